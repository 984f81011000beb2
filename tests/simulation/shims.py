"""Shims as actors: the real shim without a machine, from its claim to the fold, around commands that only take time.

A shim's files are steps of the world, its clock is the world's, and its command is `attempt_once` here.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any, Final

from runtime.client.jobs import launch
from runtime.jobs import lock
from runtime.shim import files, main, processes, record, retry, run_loop
from runtime.shim.attempt import OVERTAKEN
from runtime.shim.common import BEAT_S, AlreadyClaimed
from runtime.shim.processes import StopRequests
from runtime.shim.record import FolderRecord
from tests.simulation.choices import Choice
from tests.simulation.files import Root
from tests.simulation.job_laws import STAYS_ENDED
from tests.simulation.world import World

RUN_S: Final = (3.0, 0.05, 25.0, 120.0)
RUN = Choice("run", 20, 10, 20, 10, fault=False)
RESULT = Choice("result", 60, 12, 4, 4)
"""Success; a failure; exit code 75, which asks for another start; a fatal signal to the shim itself."""
LOOK_S: Final = 1.0


class SimulatedAsked(StopRequests):
    """Requests without signals."""

    def __init__(self) -> None:  # type: ignore[no-untyped-def,unused-ignore]
        pass


class Shims:
    """What stands in for the machine under the shim's modules, for one world."""

    def __init__(self, world: World, root: Root, laws: Any) -> None:
        self.world, self.root, self.laws = world, root, laws
        clock = SimpleNamespace(time=world.wall, monotonic=world.boot_time, sleep=world.pause)
        for module in (files, record, run_loop, processes):
            world.replace(module, "time", clock)
        for module in (files, record, run_loop, main, processes):
            world.replace(module, "say", lambda text: world.note(f"shim: {text}"))
        world.replace(record, "started_at", lambda pid: None)
        world.replace(record, "boot_id", str)
        world.replace(run_loop, "attempt_once", self.attempt_once)
        world.replace(run_loop, "decide", lambda ended, kept: retry.decide(ended, kept, self._chance))  # type: ignore[no-untyped-call]
        # The modules' own `os`, whose calls that change or list folders are steps.
        steps = SimpleNamespace(**{**vars(os), "listdir": self._as_step(os.listdir, "list", False, False)})
        steps.mkdir = self._as_step(os.mkdir, "mkdir", False, True)
        world.replace(record, "os", steps)
        for name, content, write in (
            ("create_whole", True, True),
            ("write_whole", True, True),
            ("create_empty", False, True),
            ("read_text", False, False),
            ("drop_file", False, True),
        ):
            world.replace(record, name, self._as_step(getattr(record, name), name, content, write))
        world.replace(lock, "_this_process", self._this_process)
        world.replace(lock.processes, "is_alive", lambda who: not world.processes[who["start"]].dead)
        world.replace(launch, "build_shim", lambda: b"# the shim\n")
        world.replace(launch, "_read_git", lambda code, prepared: (None, []))

    def _chance(self) -> float:
        me = self.world.me()
        assert me is not None
        return me.random.random()

    def _this_process(self) -> dict[str, Any]:
        me = self.world.me()
        return {} if me is None else {"boot": me.host.name, "namespace": "sim", "pid": 1, "start": me.name}

    def _as_step(self, do: Any, name: str, content: bool, write: bool) -> Any:
        def step(path: str, *args: Any, **named: Any) -> Any:
            short = path.partition("/records/")[2]
            if self.world.me() is not None and name == "drop_file":
                try:
                    return self.root.step(f"{name} {short}", lambda: do(path), write=True)
                except OSError:
                    return None
            if name == "create_empty" and short.startswith("done/"):
                self.laws.announces(*short.removeprefix("done/").split(".")[:3])
            if write and short.endswith("/result"):
                return self.root.step(
                    f"{name} {short}", lambda: self._keep_first(do, path, *args, **named), content=content, write=write
                )
            return self.root.step(f"{name} {short}", lambda: do(path, *args, **named), content=content, write=write)

        return step

    def _keep_first(self, do: Any, path: str, *args: Any, **named: Any) -> Any:
        job, index = path.split("/")[-4], int(path.split("/")[-2])
        before = self.laws.result(job, index)
        try:
            done = do(path, *args, **named)
            self.laws.jobs[job].runs[index].committed = self.world.now
            return done
        finally:
            if before is not None and self.laws.result(job, index) != before:
                self.laws._break(STAYS_ENDED, f"the result {before['reason']} was replaced")

    def attempt_once(
        self, order: Any, run: Any, number: int, scratch: str, asked: Any, binding: Any, gpus: Any
    ) -> tuple[str, int, dict[str, Any]]:
        """The command: it takes its time, and ends as drawn; what `Attempt` looks for ends it sooner."""
        world = self.world
        until = world.now + RUN_S[world.draw(RUN)]
        result = world.draw(RESULT)
        name = run.attempt_name(number)
        self.laws.command_begins(order["job"], run.index, number)
        end: tuple[str, int, dict[str, Any]] | None = None
        due, beats = world.now, 0
        while end is None:
            if world.now >= until:
                end = asked.end() if asked.stop else _END[result]
            elif run.cancelled():
                end = "cancelled", 1, {}
            elif run.is_overtaken(number):
                end = OVERTAKEN
            elif asked.stop:
                end = asked.end()
            else:
                self.laws.command_goes_on(order["job"])
                if world.now >= due:
                    due, beats = world.now + BEAT_S, beats + 1
                    run.record.beat(f"{name}/beat", str(beats))
                world.pause(max(0.0, min(LOOK_S, until - world.now)))
        if end == _END[3]:
            me = world.me()
            assert me is not None
            world.kill(me)
        self.laws.command_ends(order["job"], run.index, number, end[0])
        return end

    def serve(
        self, folder: str, native: str, asked: StopRequests, *, part: int, index: int | None, indices: list[int]
    ) -> int:
        """Run a shim for a native job; returns its exit code, 1 if it dies of an exception.

        It serves one run, or, without `index`, several in turn.
        """
        options = SimpleNamespace(
            clear=False, prepare=False, rank_of=None, part=part, native=native, index=index, node=0, indices=indices,
            scratch="/scratch", member=None,
        )  # fmt: skip
        try:
            code = int(main.follow(FolderRecord(folder), options, asked))  # type: ignore[no-untyped-call]
            if code == NO_ORDER:
                self._lost()
            return code
        except (OSError, AlreadyClaimed) as problem:
            self.world.note(f"the shim dies of {type(problem).__name__}: {problem}")
            self._lost()
            return 1

    def _lost(self) -> None:
        """A shim ended and left nothing."""
        me = self.world.me()
        assert me is not None
        self.laws.died(self.laws.processes[me.name])


NO_ORDER: Final = 2
"""The exit code of a shim whose record root was away when it began; the backend takes it for the job's own."""
_END: Final[list[tuple[str, int, dict[str, Any]]]] = [
    ("succeeded", 0, {}),
    ("app_failed", 1, {}),
    ("requeue", 75, {}),
    ("killed", 137, {}),
]
