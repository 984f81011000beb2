"""The driver of a job, on the head: `python -m runtime.launchers.ray.driver ROOT JOB --epoch E --part P`.

It reads the job's order from the record root, places an actor for each node of each run, and places a run again whose shim
asks for it or whose node was lost. The shims keep the record, by which budgets are charged; the driver writes nothing there
but notes for people, `ray/EPOCH.PART`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import secrets
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, Final

from runtime.jobs.hosts.bucket import is_bucket
from runtime.launchers.ray import node_failures, placement
from runtime.launchers.ray.board import Board
from runtime.launchers.ray.gate import Gate
from runtime.launchers.ray.names import note_name, submission_name
from runtime.launchers.ray.node import Node
from runtime.launchers.ray.pending_watch import Watch
from runtime.launchers.ray.priority import make_demand
from runtime.launchers.ray.run_reader import BUCKET_S, DriversRun
from runtime.shim.common import DONE, FAILED
from runtime.shim.record import FolderRecord
from runtime.shim.retry import decide as after_attempt

LOST_S: Final = 30.0
"""How long an actor that does not answer is waited for, unless Ray says sooner that it or its node is dead."""
SEND_S: Final = 90.0
"""How much longer than its grace a shim may take, to send its logs and outputs."""
_TURN_S: Final = 1.0

_WARNING: Final = 30
"""The level of Ray's own log, as in `logging`."""
_NOTE_S: Final = 2.0


class Driver:
    """All runs of one part of a job, a thread each."""

    def __init__(self, root: str, job: str, epoch: int, part: int) -> None:
        self.root, self.job = root, job
        self.bucket = root if is_bucket(root) else None
        self.record = _open_record(root, job)
        self.order: dict[str, Any] = json.loads(self.record.read("order.json") or "{}")
        self.shim: bytes = (self.record.read("shim.py") or "").encode()
        self.native = f"{submission_name(job, root, epoch, part)}+{secrets.token_hex(4)}"
        """No other start has it, so that shims of two drivers are never taken for each other's."""
        self.note = note_name(epoch, part)
        self.wants: Mapping[str, Any] = self.order["ray"]
        self.watch = Watch(self.wants, int(self.order["nodes"]))
        self.gate = Gate(make_demand(self.order, job), None, _list_totals, say)
        self.stopping = threading.Event()
        self.shown: dict[str, dict[str, Any]] = {}
        self.why: dict[str, Any] = {}
        """Why the runs that wait do."""
        self.lock = threading.Lock()

    def go(self) -> int:
        """Carry out every run; returns an exit code."""
        import ray

        runs = [int(index) for index in self.order["runs"]]
        for index in runs:
            self.shown[str(index)] = {"state": "waiting", "since": round(time.time())}
        self._write_note()
        ray.init(log_to_driver=False, logging_level=_WARNING)
        self.gate.open(lambda: Board(ray.get_runtime_context().gcs_address))
        at_once = placement.count_at_once(len(runs), self.wants.get("max_parallel"))
        with ThreadPoolExecutor(at_once) as pool:
            going = [pool.submit(self._carry_out, index) for index in runs]
            written = self._encode_note()
            while wait(going, _NOTE_S).not_done:
                waits = any(each["state"] == "waiting" for each in list(self.shown.values()))
                self.gate.poll()
                self.why = self.watch.look(self.gate.report) if waits else {}
                if (text := self._encode_note()) != written:
                    with contextlib.suppress(OSError):
                        self._write_note()
                        written = text
        codes = [each.result() for each in going]
        self.gate.close()
        self._write_note()
        return placement.worst_code(codes)

    # one run

    def _carry_out(self, index: int) -> int:
        try:
            return self._place_until_ended(index)
        finally:
            self.gate.leave(index)

    def _place_until_ended(self, index: int) -> int:
        idle, pause = (0, 0), 0.0
        run = DriversRun(_open_record(self.root, self.job), index, look_s=BUCKET_S if self.bucket else 0.0)
        while True:
            if self.stopping.wait(pause):
                return self._show(index, "stopped", FAILED)
            if (result := run.result()) is not None:
                run.announce(result)  # its maker may have died before it could
                return self._show(index, "ended", DONE if result["reason"] == "succeeded" else FAILED)
            codes: list[int | None] = [None]
            lingers = False
            begun = max((number for number, _ in run.attempts()), default=0)
            try:
                self._await_turn(index, run)
                with self._placed(index, run) as actors:
                    if actors is None:
                        if run.cancelled():
                            return self._show(index, "ended", FAILED)
                        pause = _TURN_S
                        continue
                    codes = self._serve(index, actors)
                    lingers = self._hand_on_losses(run, begun, codes, [place for _, place in actors])
            except _ray_error() as problem:
                say(f"index {index} is placed again: {type(problem).__name__}")
                self.gate.leave(index)
            code = placement.judge_codes(codes)
            if code is not None:
                return self._show(index, "ended", code)
            idle, pause = self._pause(run, idle, lingers=lingers)
            self._show(index, "waiting", FAILED)

    def _pause(self, run: Any, idle: tuple[int, int], *, lingers: bool) -> tuple[tuple[int, int], float]:
        """How many placements in a row began no attempt, beside the number of attempts; and seconds until the next one."""
        attempts = len(run.attempts())
        row = idle[1] + 1 if attempts == idle[0] else 0
        pause = placement.next_pause(row, self.order["retry"])
        if not row and (ended := run.counted(self.order)):
            what, wanted = after_attempt(ended, self.order["retry"])
            pause = wanted if what == "again" else 0.0
        # The shim of an actor that was lost on a living node has its grace yet.
        return (attempts, row), max(pause, self.order["grace_s"]) if lingers else pause

    def _await_turn(self, index: int, run: Any) -> None:
        """Wait while the runs of this driver let another go first."""
        self.gate.ask(index)
        while self.gate.behind and not self._is_unwanted(run):
            self.stopping.wait(_TURN_S)

    @contextlib.contextmanager
    def _placed(self, index: int, run: Any) -> Iterator[list[tuple[Any, dict[str, Any]]] | None]:
        """Actors of all nodes of a run with their places, in the order of the nodes; None after a cancel or TERM, and if the
        run lets another go first."""
        with contextlib.ExitStack() as held:
            if self._is_unwanted(run):
                yield None  # it was stopped while it let another go first: asking Ray now could take the other's place
                return
            places = None
            if self.order["nodes"] > 1:
                options = self._reserve(index, run, held)
                actors = [self._make_actor(each, held) for each in options or ()]
                places = self._await_all(actors, run) if actors else None
            else:
                actors = [self._make_actor(self.wants["options"], held)]
                places = self._await_all(actors, run, asks=True)
                if places and not self._may_take(index):
                    places = None
            if places is None:
                yield None
                return
            if self.order["nodes"] > 1:
                places = placement.add_numbers(places, _list_nodes())
            order = placement.sort_nodes(places, self.order.get("slices", 1))
            self._show(index, "running", DONE, hosts=[places[at]["host"] for at in order])
            yield [(actors[at], places[at]) for at in order]

    def _may_take(self, index: int) -> bool:
        """Whether a run takes the place that Ray has given it."""
        taken = self.gate.decide(index)
        if not taken and (ahead := self.gate.behind):
            say(
                f"index {index} lets {ahead.demand.job} of {ahead.demand.owner} go first: priority {ahead.demand.priority.value}"
            )
        return taken

    def _make_actor(self, options: Mapping[str, Any], held: contextlib.ExitStack) -> Any:
        import ray

        actor: Any = ray.remote(Node).options(max_concurrency=4, max_restarts=0, **options).remote()
        held.callback(ray.kill, actor)
        return actor

    def _reserve(self, index: int, run: Any, held: contextlib.ExitStack) -> list[dict[str, Any]] | None:
        """Options of the actors of all nodes, which have room at once on as many machines; None after a cancel or TERM,
        if slices do not come together in time, and if the run lets another go first."""
        # Runs that took the first hosts of their slices one by one would wait for each other.
        firsts = placement.list_firsts(self.wants, self.order["nodes"])
        options = self._gather(run, held, firsts, asks=True)
        if options is None:
            return None
        if not self._may_take(index):
            return None
        tpu = self.wants.get("tpu")
        if tpu is None or tpu.get("hosts", self.order["nodes"]) == 1:
            return options
        nodes = _nodes_of(options)
        names = [placement.find_slice(_resources_of(node), tpu["type"]) for node in nodes]
        known = sorted(name for name in names if name is not None)
        if len(known) < len(names):
            say(f"the first host of a {tpu['type']} names no slice")
            return None
        rooms = placement.list_rooms(self.wants, self.order["nodes"], known)
        return self._gather(run, held, rooms, self.wants["start_s"])

    def _gather(
        self,
        run: Any,
        held: contextlib.ExitStack,
        rooms: Sequence[tuple[Mapping[str, float], Mapping[str, Any]]],
        seconds: float = math.inf,
        *,
        asks: bool = False,
    ) -> list[dict[str, Any]] | None:
        """Options of actors that have these rooms at once, on as many machines; None after a cancel, TERM or `seconds`, and
        for a run that `asks` for its turn once the gate is closed."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        until = time.monotonic() + seconds
        bundles = [{name: amount for name, amount in bundle.items() if amount} for bundle, _ in rooms]
        group = ray.util.placement_group(bundles, strategy="STRICT_SPREAD")
        held.callback(ray.util.remove_placement_group, group)
        # A group that waits holds nothing.
        while not group.wait(_TURN_S):
            if self._is_unwanted(run) or time.monotonic() >= until or (asks and self.gate.behind):
                return None
        return [
            {**options, "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=at)}
            for at, (_, options) in enumerate(rooms)
        ]

    def _await_all(
        self, actors: Sequence[Any], run: Any, seconds: float = math.inf, *, asks: bool = False
    ) -> list[dict[str, Any]] | None:
        """Where the actors are; None as `_gather`."""
        import ray

        until = time.monotonic() + seconds
        refs = [actor.where.remote() for actor in actors]
        while True:
            ready, _ = ray.wait(refs, num_returns=len(refs), timeout=_TURN_S)
            if len(ready) == len(refs):
                return list(ray.get(refs))
            if self._is_unwanted(run) or time.monotonic() >= until or (asks and self.gate.behind):
                return None

    def _is_unwanted(self, run: Any) -> bool:
        return self.stopping.is_set() or run.cancelled()

    def _serve(self, index: int, actors: Sequence[tuple[Any, dict[str, Any]]]) -> list[int | None]:
        """Run the shims of all nodes; returns their exit codes, None for a node that was lost."""
        import ray

        refs = {self._start(index, node, *actor): node for node, actor in enumerate(actors)}
        codes: dict[int, int | None] = {}
        until: float | None = None
        while refs and (until is None or time.monotonic() < until):
            ready, _ = ray.wait(list(refs), num_returns=1, timeout=_TURN_S)
            for ref in ready:
                node = refs.pop(ref)
                try:
                    codes[node] = ray.get(ref)
                except _ray_error():
                    if self._is_back(*actors[node]):
                        refs[self._start(index, node, *actors[node])] = node
                    else:
                        codes[node] = None
            over = placement.is_over(codes, len(actors)) or self.stopping.is_set()
            if until is None and (over or (refs and codes.get(0) in placement.FINAL)):
                until = time.monotonic() + self.order["grace_s"] + SEND_S
                for node in refs.values() if over else ():
                    actors[node][0].stop.remote()
        return [codes.get(node) for node in range(len(actors))]

    def _hand_on_losses(
        self, run: Any, begun: int, codes: Sequence[int | None], places: Sequence[dict[str, Any]]
    ) -> bool:
        """Note for the next shim that nodes died; returns whether a node that was lost is alive."""
        import ray

        if None not in codes:
            return False
        nodes = ray.nodes()
        with contextlib.suppress(OSError):  # without it the attempt counts as lost
            node_failures.record_dead(run, self.native, begun, node_failures.find_dead(codes, places, nodes))
        return node_failures.has_living(codes, places, nodes)

    def _start(self, index: int, node: int, actor: Any, place: Mapping[str, Any]) -> Any:
        words = ["--native", self.native, "--index", str(index)]
        words += ["--node", str(node)] if node else []
        words += ["--bucket", self.bucket] if self.bucket else []
        env = {"RUNTIME_ADDRESS": place["address"]} if self.order["nodes"] > 1 else {}
        return actor.run.remote(self.shim, self.job, self.root, words, env)

    def _is_back(self, actor: Any, place: Mapping[str, Any]) -> bool:
        """Whether an actor that did not answer does so now; False once it or its node is dead, or `LOST_S` has passed."""
        import ray

        until = time.monotonic() + LOST_S
        while time.monotonic() < until:
            if any(each["NodeID"] == place["node"] and not each["Alive"] for each in ray.nodes()):
                return False
            try:
                ray.get(actor.where.remote(), timeout=5)
                return True
            except ray.exceptions.ActorDiedError:
                return False
            except _ray_error():
                time.sleep(_TURN_S)
        return False

    # notes for people

    def _show(self, index: int, state: str, code: int, **more: Any) -> int:
        with self.lock:
            before = self.shown.get(str(index), {})
            since = before["since"] if before.get("state") == state else round(time.time())
            self.shown[str(index)] = {
                "state": state,
                "since": since,
                **({"code": code} if state == "ended" else {}),
                **more,
            }
        say(f"index {index}: {state} {more or ''}".rstrip())
        return code

    def _encode_note(self) -> str:
        with self.lock:
            return json.dumps({"runs": self.shown, "wants": self.wants, "why": self.why}, sort_keys=True)

    def _write_note(self) -> None:
        self.record.write(self.note, self._encode_note())


def _open_record(root: str, job: str) -> Any:
    """The record of a job, for one thread."""
    if not is_bucket(root):
        return FolderRecord(f"{root}/jobs/{job}")
    from runtime.shim.bucket import Bucket
    from runtime.shim.bucket_record import BucketRecord

    return BucketRecord(Bucket(root), f"{tempfile.gettempdir()}/{job}")


def _list_nodes() -> list[dict[str, Any]]:
    import ray

    return list(ray.nodes())


def _list_totals() -> list[Mapping[str, float]]:
    """Return the resources of each living node."""
    return [dict(each["Resources"]) for each in _list_nodes() if each["Alive"]]


def _nodes_of(options: Iterable[Mapping[str, Any]]) -> list[str]:
    """The nodes on which a placement group with these options has its room."""
    import ray

    group = next(iter(options))["scheduling_strategy"].placement_group
    return list(ray.util.placement_group_table(group)["bundles_to_node_id"].values())


def _resources_of(node: str) -> dict[str, float]:
    return next((dict(each["Resources"]) for each in _list_nodes() if each["NodeID"] == node), {})


def _ray_error() -> type[Exception]:
    import ray

    found: type[Exception] = ray.exceptions.RayError
    return found


def say(text: str) -> None:
    sys.stdout.write(f"driver: {text}\n")
    sys.stdout.flush()


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Carries out a job on the Ray cluster of this head.")
    parser.add_argument("root", help="the record root: a folder, or gs://BUCKET/PREFIX or s3://BUCKET/PREFIX")
    parser.add_argument("job")
    parser.add_argument("--epoch", type=int, default=1)
    parser.add_argument("--part", type=int, default=0)
    options = parser.parse_args(words)
    driver = Driver(options.root, options.job, options.epoch, options.part)
    signal.signal(signal.SIGTERM, lambda *_: driver.stopping.set())
    return driver.go()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
