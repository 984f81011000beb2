"""A backend with native jobs, and its launchers: one that requeues jobs itself, one that is told to, and one that does nothing.

It starts the same name as often as it is asked to, except for a later epoch, as a protocol without unique names allows;
it preempts, loses nodes, notices that late, and forgets what has ended.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, ClassVar, Final

from runtime.end_reasons import EndReason, Explanation
from runtime.jobs.array import expand_array
from runtime.jobs.hosts.base import Host, HostUnavailable
from runtime.jobs.plan import (
    Fidelity,
    FieldSupport,
    JobIdentity,
    LaunchPlan,
    NativePart,
    NativeState,
    OwnedResource,
    PlanContext,
    Target,
)
from runtime.jobs.run_config import make_order
from runtime.jobs.secret_schemes import COMMON_SCHEMES
from runtime.jobs.spec import JobSpec, JobState
from runtime.jobs.spec_fields import leaf_fields, set_fields
from runtime.launchers import registry
from runtime.shim.common import AGAIN, DUPLICATE, LOST
from tests.simulation.choices import Choice
from tests.simulation.files import Root, SimulatedHost
from tests.simulation.shims import Shims, SimulatedAsked
from tests.simulation.world import EPOCH, Process, World

QUEUED_S: Final = (0.5, 0.0, 8.0, 60.0)
QUEUED = Choice("queued", 4, 2, 2, 1, fault=False)
SUBMITS_S: Final = (0.1, 2.0, 6.0)
SUBMITS = Choice("submits", 6, 2, 1)
"""How long it takes to accept a native job; `find` does not know it before."""
MISHAP = Choice("mishap", 25, 1, 1, 1)
"""Of a running native job, each `WEATHER_S`: nothing; it is preempted; its node fails; its node is cut off, and works on."""
APART_S: Final = (15.0, 200.0)
APART = Choice("apart", 1, 1)
"""How long a node that was taken for gone works on, before it is heard of again and its processes are ended."""
WEATHER_S: Final = 10.0
DEATH = Choice("death", 2, 1)
"""How it takes the death of a script: as the loss of its node, or as a failure."""
GRACE_S: Final = 30.0
NOTICED_S: Final = (1.0, 25.0)
NOTICED = Choice("noticed", 1, 1)
"""When it notices that a node is gone."""
FORGETS_S: Final = (900.0, 30.0)
FORGETS = Choice("forgets", 3, 1)
"""How long it knows of a native job that has ended."""
STARTS: Final = 40
"""After so many starts it gives a native job up."""
PART_RUNS: Final = 2
"""So many runs of an array may be in one native job."""
KIND: Final = "simulated"


@dataclass
class Native:
    id: str
    name: str
    job: str
    folder: str
    part: int
    epoch: int
    serves: list[int]
    """The runs that its shim serves."""
    array: str
    """Of the members of an array the id that they share; else its own id."""
    state: JobState = JobState.PENDING
    reason: EndReason | None = None
    code: int | None = None
    starts: int = 0
    asked: SimulatedAsked = field(default_factory=SimulatedAsked)
    process: Process | None = None
    why: str = ""
    """Why it was ended from outside: `preempted`, `node`, `cancelled`."""
    made_at: float = 0.0
    ended_at: float = 0.0
    forgotten_s: float = 0.0


class Cluster:
    """The native jobs. `how` is `requeues`, `told` (a shim's exit code asks for the next start) or `nothing`.

    With `labels` its launcher lists what it holds without the ledger.
    """

    def __init__(self, world: World, root: Root, shims: Shims, how: str, *, labels: bool) -> None:
        self.world, self.root, self.shims, self.how, self.labels = world, root, shims, how, labels
        self.laws = shims.laws
        self.has_arrays = how != "nothing"
        self.natives: dict[str, Native] = {}
        self._ids = itertools.count(1)
        self.apart: set[Process] = set()
        """Shims on nodes that are cut off: no request reaches them, and nobody hears how they end."""
        self.process = world.spawn("cluster", self._weather)
        self._timers = itertools.count()
        world.replace(registry, "_OWN", {**registry._OWN, KIND: "tests.simulation.backend:open_launcher"})
        _CURRENT[:] = [self]

    # what only it does

    def later(self, seconds: float, do: Callable[[], object]) -> None:
        self.world.start(self.world.strand(self.process, do, f"timer {next(self._timers)}"), seconds)

    def _weather(self) -> None:
        while True:
            self.world.pause(WEATHER_S)
            for native in [each for each in self.natives.values() if each.state is JobState.RUNNING and not each.why]:
                mishap = self.world.draw(MISHAP, native.id)
                if mishap == 1:
                    self.world.note(f"preempts {native.id}")
                    self.end(native, "preempted")
                elif mishap == 2:
                    self.world.note(f"the node of {native.id} fails")
                    self._kill(native, "node")
                elif mishap == 3:
                    self._lose(native)

    def _lose(self, native: Native) -> None:
        """Hear nothing of a node any more: its job counts as gone, and its shim goes on."""
        process, start = native.process, native.starts
        assert process is not None
        self.world.note(f"the node of {native.id} is cut off")
        native.why = "node"
        self.apart.add(process)
        self.laws.cut_off(process)

        def give_up() -> None:
            if native.starts == start and native.state is JobState.RUNNING:
                self._over(native, None)

        self.later(NOTICED_S[self.world.draw(NOTICED, native.id)], give_up)
        self.later(APART_S[self.world.draw(APART, native.id)], lambda: process.dead or self.world.kill(process))

    def end(self, native: Native, why: str) -> None:
        """TERM, and KILL after the grace period."""
        if native.state.terminal:
            return
        native.why = why
        if native.state is JobState.RUNNING and native.process in self.apart:
            return
        native.asked.stop, native.asked.why = True, "SIGTERM"
        if native.state is JobState.PENDING:
            self._over(native, None)
            return
        start = native.starts
        self.later(GRACE_S, lambda: native.starts == start and self._kill(native, why))

    def _kill(self, native: Native, why: str) -> None:
        if native.process is not None and not native.process.dead and native.process not in self.apart:
            native.why = why
            self.world.kill(native.process)

    def _start(self, native: Native) -> None:
        if native.state is not JobState.PENDING:
            return
        native.state, native.why, native.asked = JobState.RUNNING, "", SimulatedAsked()
        native.starts += 1
        name = f"{native.id}.{native.starts}"

        def run() -> None:
            one = native.serves[0] if len(native.serves) == 1 else None
            code = self.shims.serve(
                native.folder, native.array, asked, part=native.part, index=one, indices=native.serves
            )
            self.world.note(f"exit code {code}")
            self.exited(native, process, code)

        asked, start = native.asked, native.starts
        process = native.process = self.world.spawn(name, run, mortal=True)
        self.laws.processes[process.name] = native
        process.on_death.append(lambda: self._died(native, process, start))

    def _died(self, native: Native, process: Process, start: int) -> None:
        self.laws.killed(native, process)
        if process in self.apart:
            return
        if not native.why and self.world.draw(DEATH, native.id) and self.how != "nothing":
            self.later(1.0, lambda: native.starts == start and self._over(native, 137))
            return
        native.why = native.why or "node"
        span = NOTICED_S[self.world.draw(NOTICED, native.id)] if native.why == "node" else 0.5
        self.later(span, lambda: native.starts == start and self._over(native, None))

    def exited(self, native: Native, process: Process, code: int) -> None:
        """Take note of a shim's exit code, unless its node is cut off; the process ends now."""
        process.on_death.clear()
        if process not in self.apart:
            self._over(native, code)
        process.dead = True
        self.world.graves.append(process)

    def _over(self, native: Native, code: int | None) -> None:
        if native.state.terminal:
            return
        again = native.why in ("preempted", "node") and code not in (0, 1, 2, DUPLICATE)
        again = (again and self.how != "nothing") or (self.how == "told" and code in (AGAIN, LOST))
        if native.why != "cancelled" and again and native.starts < STARTS:
            native.state, native.why = JobState.PENDING, ""
            self.later(2.0 + QUEUED_S[self.world.draw(QUEUED, native.id)], lambda: self._start(native))
            return
        native.code, native.ended_at = code, self.world.now
        native.forgotten_s = FORGETS_S[self.world.draw(FORGETS, native.id)]
        if native.why == "cancelled":
            native.state, native.reason = JobState.CANCELLED, EndReason.CANCELLED
        elif code == 0:
            native.state = JobState.SUCCEEDED
        else:
            reasons = {None: EndReason.LOST, DUPLICATE: EndReason.DUPLICATE}
            native.state, native.reason = JobState.FAILED, reasons.get(code, EndReason.APP_FAILED)
            if code is None and self.how != "nothing":
                native.reason = EndReason.PREEMPTED if native.why == "preempted" else EndReason.NODE_FAILED

    # what launchers ask for

    def call(self, what: str, do: Callable[[], Any], *, write: bool = False) -> Any:
        found: list[Any] = []
        self.world.call(what, lambda: found.append(do()), write=write, refused=_silent)
        return found[0]

    def submit(self, name: str, job: str, folder: str, epoch: int, part: int, indices: list[int]) -> str:
        """Take a native job: one for all its runs, or, if the backend knows arrays, a member for each."""
        name = name if epoch == 1 else f"{name}.e{epoch}"
        known = [each.array for each in self.natives.values() if each.name == name] if epoch > 1 else []
        if known:
            return known[0]
        array = f"n{next(self._ids)}"
        self.world.note(f"{array} for {name}")
        members = {array: indices}
        if self.has_arrays and len(indices) > 1:
            members = {f"{array}_{index}": [index] for index in indices}
        for member, serves in members.items():
            self._take(Native(member, name, job, folder, part, epoch, serves, array, made_at=self.world.now))
        return array

    def _take(self, native: Native) -> None:
        self.natives[native.id] = native
        self.later(QUEUED_S[self.world.draw(QUEUED, native.id)], lambda: self._start(native))

    def members(self, native_id: str) -> list[Native]:
        return [each for each in self.natives.values() if native_id in (each.id, each.array)]

    def known(self) -> list[Native]:
        now = self.world.now
        return [
            each for each in self.natives.values() if not each.state.terminal or now < each.ended_at + each.forgotten_s
        ]


def _silent(status: str) -> Exception:
    return HostUnavailable("the backend does not answer", facts=[status], retryable=True)


_CURRENT: list[Cluster] = []


def open_launcher() -> Launching:
    """The launcher of the world that runs; the registry calls it."""
    cluster = _CURRENT[0]
    made: Launching
    if cluster.labels:
        made = LabelledResubmitting(cluster) if cluster.how == "requeues" else Labelled(cluster)
    else:
        made = Resubmitting(cluster) if cluster.how == "requeues" else Launching(cluster)
    made.resumes = cluster.how == "nothing"
    return made


class Launching:
    """A launcher of the cluster, as another package would write it."""

    kind: ClassVar[str] = KIND
    keeps: ClassVar[Mapping[str, FieldSupport]] = dict.fromkeys(
        leaf_fields(), FieldSupport(fidelity=Fidelity.SHIM, how="the shim")
    )
    secret_schemes = COMMON_SCHEMES
    resumes = False

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def check_settings(self, target: Target) -> None:
        pass

    def open_host(self, target: Target, context: PlanContext) -> Host:
        return SimulatedHost(self.cluster.root)

    def plan(self, spec: JobSpec, target: Target, job: JobIdentity, context: PlanContext) -> LaunchPlan:
        root = str(self.cluster.root.path)
        folder = f"{root}/jobs/{job.id}"
        retries = "backend" if self.cluster.how == "told" else "shim"
        runs = expand_array(spec.array)
        most = PART_RUNS if self.cluster.has_arrays else len(runs)
        lines = [
            f"python3 {folder}/shim.py {folder} --indices {start}-{min(start + most, len(runs)) - 1}"
            for start in range(0, len(runs), most)
        ]
        names = [f"{job.id}.p{number}" if number else job.id for number in range(len(lines))]
        self.cluster.laws.planned(job.id, len(runs))
        return LaunchPlan(
            job=job,
            spec=spec,
            target=target,
            order=make_order(spec, job, runs, context, retries=retries, environ={}),
            artefacts={"command": "\n".join(lines)},
            parts=tuple(_parts(names, lines)),
            indices=tuple(runs),
            fidelity={name: self.keeps[name] for name in set_fields(spec) if name in self.keeps},
            root=root,
        )

    def submit(self, plan: LaunchPlan, part: NativePart, host: Host) -> str:
        cluster, epoch = self.cluster, int(plan.order.get("epoch", 1))
        folder = part.native["words"][2]
        indices = part.native.get("serves") or list(range(part.offset, part.offset + part.count))

        cluster.world.pause(SUBMITS_S[cluster.world.draw(SUBMITS)])

        def submit() -> str:
            return cluster.submit(part.name, plan.job.id, folder, epoch, part.native.get("number", 0), indices)

        return str(cluster.call(f"submit {part.name} epoch {epoch}", submit, write=True))

    def find(self, target: Target, names: Sequence[str], host: Host) -> dict[str, str]:
        """As the launcher for Slurm does: the oldest, before all that have ended."""

        def look() -> dict[str, str]:
            first = sorted(self.cluster.known(), key=lambda each: each.state.terminal)
            return {each.name: each.array for each in reversed(first) if each.name in names}

        return dict(self.cluster.call("find", look))

    def states(self, target: Target, native_ids: Sequence[str], host: Host) -> list[NativeState]:
        def look() -> list[NativeState]:
            return [_state(each) for each in self.cluster.known() if {each.id, each.array} & {*native_ids}]

        found: list[NativeState] = self.cluster.call(f"ask for {' '.join(native_ids)}", look)
        return found

    def cancel(self, target: Target, native_ids: Sequence[str], indices: Sequence[int] | None, host: Host) -> list[str]:
        cluster = self.cluster
        mine = [native for each in native_ids for native in cluster.members(each)]
        if indices is not None:
            mine = [each for each in mine if each.id != each.array and each.serves[0] in indices]

        def cancel() -> None:
            for native in mine:
                cluster.end(native, "cancelled")

        cluster.call(f"cancel {' '.join(native_ids)}", cancel, write=True)
        until = cluster.world.now + 150.0
        while any(not each.state.terminal for each in mine) and cluster.world.now < until:
            cluster.world.pause(1.0)
        return [f"{each.id} is {each.state}" for each in mine if not each.state.terminal]

    def explain(self, target: Target, native: NativeState, host: Host) -> Explanation | None:
        return None


class Resubmitting(Launching):
    """A launcher that retries in the same job."""

    def restore_parts(
        self, artefacts: Mapping[str, str], names: Sequence[str], indices: Sequence[int]
    ) -> list[NativePart]:
        parts = []
        for part in _parts(names, artefacts["command"].splitlines()):
            serves = sorted({*indices} & {*range(part.offset, part.offset + part.count)})
            if serves:
                parts.append(replace(part, native={**part.native, "serves": serves}))
        return parts


class Labelled(Launching):
    """A launcher that finds its jobs by labels, too."""

    keeps_ended: ClassVar[bool] = False

    def owned(
        self, target: Target, host: Host, *, owner: str | None = None, job: str | None = None
    ) -> list[OwnedResource]:
        def look() -> list[OwnedResource]:
            return [
                OwnedResource(
                    job=each.job,
                    native_id=each.id,
                    what="job",
                    live=not each.state.terminal,
                    since=EPOCH + timedelta(seconds=each.made_at),
                )
                for each in self.cluster.known()
                if job in (None, each.job)
            ]

        found: list[OwnedResource] = self.cluster.call("list what it holds", look)
        return found

    def remove(self, target: Target, owned: Sequence[OwnedResource], host: Host) -> list[str]:
        return self.cancel(target, [each.native_id for each in owned], None, host)


class LabelledResubmitting(Labelled, Resubmitting):
    """Both."""


def _parts(names: Sequence[str], lines: Sequence[str]) -> list[NativePart]:
    parts = []
    for number, (name, line) in enumerate(zip(names, lines, strict=True)):
        words = shlex.split(line)
        first, last = map(int, words[-1].split("-"))
        native = {"words": words, "number": number}
        parts.append(NativePart(name=name, artefact="command", offset=first, count=last - first + 1, native=native))
    return parts


def _state(native: Native) -> NativeState:
    return NativeState(
        native_id=native.id,
        index=None if native.id == native.array else native.serves[0],
        state=native.state,
        reason=native.reason,
        raw=native.why or str(native.state),
        exit_code=native.code,
    )
