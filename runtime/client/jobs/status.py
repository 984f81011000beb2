"""What became of jobs, for people to read: the overview of a target, one job in full, why it waits or failed, its log.

Reads the ledger and what the shim wrote beside it, and asks each backend once. A backend that does not answer makes
states unknown and is never an error of the look itself.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from runtime.client.jobs.joblog import LogReader, read_limit
from runtime.client.jobs.launch import JobHandle
from runtime.client.jobs.leftovers import tidy
from runtime.errors import InfrastructureFailure, NotPossible, RuntimeFailure, UnknownName
from runtime.jobs import ledger
from runtime.jobs.hosts.base import Files, Host, Room, read_tail
from runtime.jobs.hosts.bucket import look_again_s
from runtime.jobs.identity import owner_name
from runtime.jobs.ledger import IndexStatus, JobStatus, LedgerEntry, job_folder, newest_natives
from runtime.jobs.plan import NativeStart, NativeState, Target
from runtime.jobs.pulse import Pulse, PulseWatch, describe_pulse
from runtime.jobs.spec import Dependency, JobState, When
from runtime.jobs.traces import Raised, describe_code, find_raised
from runtime.launchers.base import KeepsOutput, Launcher, Releases, RemembersStarts
from runtime.launchers.standing import ask, judge_many
from runtime.reasons import EndReason
from runtime.shim.fold import FOLDED
from runtime.units import format_duration, format_size, format_time
from runtime.values import dataclass, replace

NEWEST: Final = 10
"""Jobs that an overview shows whatever became of them."""
RECENT: Final = timedelta(days=1)
ATTEMPTS_SHOWN: Final = 20
TOLD_LINES: Final = 3
"""Lines of a log that an explanation has."""
UNCAUGHT: Final = 1
"""How Python exits with an exception that nobody caught."""
TOLD_ALONE: Final = 10
"""The same of the backend's own log, if no attempt began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLine:
    """One job in an overview."""

    job: str
    name: str
    target: str
    owner: str
    state: JobState
    reason: EndReason | None
    runs: int
    totals: Mapping[JobState, int]
    launched_at: datetime
    ended_at: datetime | None
    """Of a job that failed, where its result says it."""
    new: bool = False
    """It failed since you last looked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetJobs:
    """The jobs of one target."""

    target: str
    records: str
    jobs: tuple[JobLine, ...] = ()
    """What runs or waits, what failed in the last day, and the newest."""
    left_out: int = 0
    """Older ones that have ended."""
    problem: str | None = None
    """Why the target, or the backend behind its record root, did not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptView:
    """One attempt of one run."""

    index: int
    attempt: int
    native: str | None
    host: str | None
    started_at: datetime | None
    ended_at: datetime | None
    reason: EndReason | str | None
    """None while it runs, or where it left no word and none began after it."""
    exit_code: int | None
    message: str
    restarts: int | None = None
    """How often the backend had started its native job before; None where the backend does not count them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AfterView:
    """A job that another one comes after."""

    job: str
    when: When
    state: JobState | None
    """None if the record root has no such job any more, or shows it to its owner alone."""
    reason: EndReason | None
    hopeless: bool
    """It has ended, and not as is waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeView:
    """One native job, and what its backend says of it."""

    native_id: str
    name: str
    part: int
    epoch: int
    state: JobState | None
    """None where nothing was asked, because every run has its result."""
    raw: str
    where: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """One job in full."""

    job: str
    name: str
    target: str
    kind: str
    owner: str
    state: JobState
    reason: EndReason | None
    totals: Mapping[JobState, int]
    runs: int
    launched_at: datetime
    launched_from: str | None
    snapshot: str | None
    commit: str | None
    branch: str | None
    cancelled: bool
    natives: tuple[NativeView, ...]
    attempts: tuple[AttemptView, ...]
    """Of the run that was asked for, or of a job that is one run."""
    indices: tuple[IndexStatus, ...]
    """Runs that have not succeeded; of a job that is one run, that one."""
    records: str
    logs: str
    outputs: str
    after: tuple[AfterView, ...] = ()
    """The jobs that it comes after, as long as nothing of it has begun."""
    problem: str | None = None
    """Why the backend did not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SilentJob:
    """A job of which nothing can be told, because its target does not answer."""

    job: str
    target: str
    kind: str
    problem: str
    state: JobState = JobState.UNKNOWN


# many jobs


def read_target(
    target: Target, launcher: Launcher, host: Host, *, now: datetime, looked_at: datetime | None = None
) -> TargetJobs:
    """The jobs of a target: one listing of outcomes, two reads, and one question to the backend."""
    files = host.files
    entries = ledger.read_many_entries(files, ledger.list_jobs(files))
    silent: list[InfrastructureFailure] = []
    judged = judge_many(entries, target, launcher, host, tell=silent.append)
    ranked = sorted(judged, key=lambda each: each.entry.launched_at, reverse=True)
    failed = [each for each in ranked if each.state is JobState.FAILED]
    ended = read_ends(files, failed[:50])
    chosen = [
        status
        for place, status in enumerate(ranked)
        if place < NEWEST or not status.state.terminal or _is_recent(status, ended, now)
    ]
    tidy(chosen, target, launcher, host, owner=owner_name())
    shown = [_line(status, ended.get(status.entry.id), looked_at) for status in chosen]
    return TargetJobs(
        target=target.name,
        records=files.root,
        jobs=tuple(shown),
        left_out=len(ranked) - len(shown),
        problem=silent[0].message if silent else None,
    )


def read_ends(files: Files, statuses: Iterable[JobStatus]) -> dict[str, datetime]:
    """Job → when its first failed run ended, in one read."""
    names = {}
    for status in statuses:
        failed = [index for index, each in status.entry.outcomes.items() if ledger.state_of(each.reason).terminal]
        if failed:
            names[f"{job_folder(status.entry.id)}/runs/{min(failed)}/result"] = status.entry.id
    read = ledger.read_objects(files, names) if names else {}
    return {names[name]: datetime.fromtimestamp(result["at"], UTC) for name, result in read.items()}


def _is_recent(status: JobStatus, ended: Mapping[str, datetime], now: datetime) -> bool:
    if status.state is not JobState.FAILED:
        return False
    return now - ended.get(status.entry.id, status.entry.launched_at) < RECENT


def _line(status: JobStatus, ended: datetime | None, looked_at: datetime | None) -> JobLine:
    entry = status.entry
    new = status.state is JobState.FAILED and (looked_at is None or (ended or entry.launched_at) > looked_at)
    return JobLine(
        job=entry.id,
        name=entry.name,
        target=entry.target,
        owner=entry.owner,
        state=status.state,
        reason=status.reason,
        runs=entry.indices,
        totals=totals_of(status.counts),
        launched_at=entry.launched_at,
        ended_at=ended if status.state is JobState.FAILED else None,
        new=new,
    )


def totals_of(counts: Mapping[JobState, int]) -> dict[JobState, int]:
    """Every state with its number."""
    return {state: counts.get(state, 0) for state in JobState}


def read_job(job: JobHandle, *, index: int | None = None, failed_only: bool = False) -> JobView:
    """A job in full; `index` asks for the attempts of that run."""
    silent: list[InfrastructureFailure] = []
    status, said = job.look(tell=silent.append)
    tidy([status], job.target, job.launcher, job.host, owner=owner_name())
    entry = status.entry
    chosen = check_index(entry, index) if index is not None else first_index(entry) if entry.indices == 1 else None
    indices = [each for each in status.indices if entry.indices == 1 or each.state is not JobState.SUCCEEDED]
    if failed_only:
        indices = [each for each in status.indices if each.state is JobState.FAILED]
    folder = f"{job.files.root}/{job_folder(job.id)}"
    run = "INDEX" if chosen is None else chosen
    folded = status.state.terminal and bool(job.files.read_from(f"{job_folder(job.id)}/{FOLDED}", 0, 1))
    log = f"{run}.aATTEMPT.rankRANK.log" if folded else f"{run}/aATTEMPT/rankRANK.log"
    return JobView(
        job=job.id,
        name=entry.name,
        target=entry.target,
        kind=entry.kind,
        owner=entry.owner,
        state=status.state,
        reason=status.reason,
        totals=totals_of(status.counts),
        runs=entry.indices,
        launched_at=entry.launched_at,
        launched_from=entry.intent.get("from"),
        snapshot=entry.snapshot,
        commit=entry.intent.get("commit"),
        branch=entry.intent.get("branch"),
        cancelled=entry.cancelled,
        natives=tuple(_native_views(entry, said)),
        attempts=tuple(tell_attempts(job, entry, chosen)) if chosen is not None else (),
        indices=tuple(indices),
        records=folder,
        logs=f"{folder}/runs/{log}",
        outputs=f"{folder}/runs/{run}/output/aATTEMPT",
        after=tuple(read_after(job, entry)),
        problem=silent[0].message if silent else None,
    )


def read_after(job: JobHandle, entry: LedgerEntry) -> list[AfterView]:
    """How the jobs stand that it comes after; none once anything of it has begun."""
    wanted = [Dependency.read(text) for text in entry.intent.get("after", ())]
    if not wanted or entry.outcomes or job.files.names(f"{job_folder(job.id)}/runs"):
        return []
    found = []
    for each in wanted:
        status = None
        try:
            status, _ = JobHandle(each.job, job.target, job.launcher, job.host).look()
        except RuntimeFailure:
            pass  # it was collected since, or is somebody else's
        found.append(
            AfterView(
                job=each.job,
                when=each.when,
                state=status.state if status else None,
                reason=status.reason if status else None,
                hopeless=status is not None and status.state.terminal and not each.is_met(status.state),
            )
        )
    return found


def describe_after(each: AfterView) -> str:
    """`j-91c0…, which failed (app_failed)`"""
    ends = {When.OK: "", When.ANY: "the end of ", When.NOTOK: "the failure of "}
    if each.state is None:
        return f"{ends[each.when]}`{each.job[:10]}`, of which nothing can be read"
    verb = "" if each.state in (JobState.SUCCEEDED, JobState.FAILED) else "is "
    verb = "was " if each.state is JobState.CANCELLED else verb
    why = f" ({each.reason})" if each.reason and each.reason.value != each.state.value else ""
    return f"{ends[each.when]}`{each.job[:10]}`, which {verb}{each.state}{why}"


def _native_views(entry: LedgerEntry, states: Sequence[NativeState]) -> Iterator[NativeView]:
    said: dict[str, NativeState] = {}
    for each in states:
        # Of an array some backends tell member by member; the first stands for it.
        said.setdefault(each.native_id, each)
        said.setdefault(each.native_id.rpartition("_")[0], each)
    for native in entry.natives:
        state = said.get(native.native_id)
        yield NativeView(
            native_id=native.native_id,
            name=native.name,
            part=native.part,
            epoch=native.epoch,
            state=state.state if state else None,
            raw=state.raw if state else "",
            where=state.where if state else "",
            message=state.message if state else "",
        )


def first_index(entry: LedgerEntry) -> int:
    return int(entry.intent.get("offset", 0))


def check_index(entry: LedgerEntry, index: int) -> int:
    """`index`, if the job has it. Raises `UnknownName`."""
    first = first_index(entry)
    if not first <= index < first + entry.indices:
        known = f"{first} to {first + entry.indices - 1}" if entry.indices > 1 else f"only {first}, it is no array"
        raise UnknownName("run", str(index), [known], where=f"in job `{entry.id}`")
    return index


def read_attempts(files: Files, job: str, index: int) -> list[AttemptView]:
    """The newest attempts of a run, oldest first."""
    run = f"{job_folder(job)}/runs/{index}"
    numbers = sorted(int(name[1:]) for name in files.names(run, "a") if name[1:].isdigit())[-ATTEMPTS_SHOWN:]
    ends = {
        number: next((name for name in files.names(f"{run}/a{number:04d}", "end.") if name.count(".") == 2), None)
        for number in numbers
    }
    wanted = [f"{run}/result", *(f"{run}/a{number:04d}/start.json" for number in numbers)]
    wanted += [f"{run}/a{number:04d}/{name}" for number, name in ends.items() if name]
    read = ledger.read_objects(files, wanted)
    result = read.get(f"{run}/result", {})
    found = []
    for number in numbers:
        start = read.get(f"{run}/a{number:04d}/start.json", {})
        end = read.get(f"{run}/a{number:04d}/{ends[number]}", {})
        if not end and result.get("attempt") == number:
            end = result
        if not end and number != numbers[-1]:
            end = {"reason": EndReason.LOST, "message": "it left no word, and the next one began"}
        if end.get("reason") == "stopped" and "failures" in start:
            from runtime.shim.retry import name_end

            then = read.get(f"{run}/a{number + 1:04d}/start.json", {})
            end = name_end(end, start["failures"], then.get("failures"), None)  # type: ignore[no-untyped-call]
        found.append(
            AttemptView(
                index=index,
                attempt=number,
                native=start.get("native"),
                host=start.get("host"),
                started_at=_at(start),
                ended_at=_at(end),
                reason=end.get("reason"),
                exit_code=end.get("code"),
                message=end.get("message", ""),
                restarts=start.get("restarts"),
            )
        )
    return found


def tell_attempts(job: JobHandle, entry: LedgerEntry, index: int) -> list[AttemptView]:
    """The newest attempts of a run, and why those ended that could not know it themselves, if the backend remembers."""
    attempts = read_attempts(job.files, job.id, index)
    untold = {each.native for each in attempts if each.reason in UNTOLD}
    names = {each.native_id: each.name for each in entry.natives if each.native_id in untold}
    if not names or not isinstance(job.launcher, RemembersStarts):
        return attempts
    try:
        starts = job.launcher.list_starts(job.target, names, index, job.host)
    except RuntimeFailure:
        return attempts
    return join_starts(attempts, starts, entry.kind)


UNTOLD: Final = ("stopped", EndReason.LOST)
"""Ends of attempts that say nothing about why."""
NEAR: Final = timedelta(minutes=1)
"""How far the clocks of a node and of the backend may be apart."""


def join_starts(attempts: Sequence[AttemptView], starts: Sequence[NativeStart], kind: str) -> list[AttemptView]:
    """The attempts, with what the backend says of the very start that each ran in; of several that one start had, it is
    the last that ended with it."""
    last = {start: each.attempt for each in attempts if (start := _start_of(each, starts)) is not None}
    reasons = {attempt: start for start, attempt in last.items() if start.reason is not None}
    return [
        replace(each, reason=start.reason, message=f"{kind} says of that start: {start.raw}")
        if each.reason in UNTOLD and (start := reasons.get(each.attempt))
        else each
        for each in attempts
    ]


def _start_of(attempt: AttemptView, starts: Sequence[NativeStart]) -> NativeStart | None:
    """The start that an attempt ran in: by its number, or the one whose time is nearest, for two clocks are compared."""
    began, ended = attempt.started_at, attempt.ended_at
    if began is None:
        return None

    def distance(start: NativeStart) -> timedelta:
        past = began - start.ended_at if start.ended_at else timedelta(0)
        return max(timedelta(0), start.began_at - began, past)

    def difference(start: NativeStart) -> timedelta:
        return distance(start) + (abs(ended - start.ended_at) if ended and start.ended_at else timedelta(0))

    mine = [start for start in starts if start.native_id == attempt.native]
    if attempt.restarts is not None:
        mine = mine[attempt.restarts : attempt.restarts + 1]
    # Of two that touch it is the later: an attempt begins after its start.
    return min((start for start in reversed(mine) if distance(start) <= NEAR), key=difference, default=None)


def _at(note: Mapping[str, Any]) -> datetime | None:
    return datetime.fromtimestamp(note["at"], UTC) if "at" in note else None


def read_params(files: Files, job: str, indices: Iterable[int]) -> dict[int, dict[str, str]]:
    """Index → the parameters that its command was given, as far as the order says them."""
    text = files.read(f"{job_folder(job)}/order.json")
    runs = json.loads(text)["runs"] if text else {}
    prefix = "RUNTIME_PARAM_"
    return {
        index: {
            name.removeprefix(prefix).lower(): value
            for name, value in runs.get(str(index), {}).get("env", {}).items()
            if name.startswith(prefix)
        }
        for index in indices
    }


# logs


def check_log(job: JobHandle, index: int, attempt: int | None, rank: int) -> None:
    """Raise `UnknownName` if that attempt or rank has printed nowhere, saying which there are."""
    there = job.attempts(index)
    if attempt is not None and attempt not in there:
        raise UnknownName(
            "attempt", str(attempt), [str(each) for each in there], where=f"of job `{job.id}`", hint=_see(job)
        )
    if there and rank:
        folder = f"{job_folder(job.id)}/runs/{index}/a{(attempt or there[-1]):04d}"
        ranks = [name[4:-4] for name in job.files.names(folder, "rank") if name.endswith(".log")]
        if str(rank) not in ranks:
            raise UnknownName("rank", str(rank), ranks, where=f"of job `{job.id}`", hint=_see(job))


def _see(job: JobHandle) -> str:
    return f"`runtime status {job.id[:10]}` lists its attempts"


def follow_all(
    job: JobHandle, *, every_s: float = 0.5, tell: Callable[[JobStatus], None] = lambda status: None
) -> Iterator[tuple[int, bytes]]:
    """Whole lines of every run as they come, each with its index, until all have ended. Of arrays; rank 0. `tell` hears at
    each look where the job stands."""
    entry = job.entry()
    limit, readers = read_limit(job.files, job.id), dict[tuple[int, int], LogReader]()
    rest: dict[int, bytes] = {}
    finished: set[int] = set()
    while True:
        status = job.status()
        ended = status.state.terminal
        tell(status)
        done = ledger.read_outcomes(job.files, job.id).get(job.id, {})
        there = {int(name) for name in job.files.names(f"{job_folder(job.id)}/runs") if name.isdigit()}
        for index in sorted(there - finished):
            for piece in _new_bytes(job, index, readers, limit):
                whole, _, rest[index] = (rest.get(index, b"") + piece).rpartition(b"\n")
                for line in whole.split(b"\n") if whole else ():
                    yield index, line
            if index in done:
                finished.add(index)
                if last := rest.pop(index, b""):
                    yield index, last
        if ended or len(finished) >= entry.indices:
            return
        time.sleep(max(every_s, look_again_s(job.files)))


def _new_bytes(job: JobHandle, index: int, readers: dict[tuple[int, int], LogReader], limit: int) -> Iterator[bytes]:
    newest = max((attempt for run, attempt in readers if run == index), default=1)
    for number in [each for each in job.attempts(index) if each >= newest]:
        name = f"{job_folder(job.id)}/runs/{index}/a{number:04d}/rank0.log"
        yield from readers.setdefault((index, number), LogReader(job.files, name, limit)).read()


# why


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """What was seen of one job, or of one run of it; everything that an explanation may rest on."""

    status: JobStatus
    index: int
    """The run that is explained."""
    attempts: tuple[AttemptView, ...] = ()
    log: tuple[str, ...] = ()
    """Last lines of its newest attempt."""
    raised: Raised | None = None
    """The exception that ended it, if its log says so."""
    backend_log: tuple[str, ...] = ()
    """Last lines of what the backend kept beside the log: of what ran before the shim, and of the shim itself."""
    backend: tuple[str, tuple[str, ...], str | None] | None = None
    """The launcher's own sentence, evidence and hint."""
    native: NativeState | None = None
    cancelled_by: str | None = None
    one_of_many: bool = False
    """A run of an array was asked for by its index."""
    limits: Mapping[str, Any] | None = None
    """The order's `retry`, `time_limit_s` and the like."""
    pulse: Pulse | None = None
    """None where it was not looked for, or where nothing is counted yet."""
    after: tuple[AfterView, ...] = ()
    """The jobs that it comes after, if nothing of it has begun."""
    room: Room | None = None
    """What is free in the record root; None if it was not looked for."""


@dataclass(frozen=True, slots=True)
class JobExplanation:
    sentence: str
    evidence: tuple[str, ...] = ()
    next_step: str | None = None


def read_facts(job: JobHandle, index: int | None = None, *, watch: Callable[[str], None] | None = None) -> JobFacts:
    """Look at everything that tells why a job stands where it does.

    With `watch`, also for a sign of life of an attempt that runs; `watch` is told where that takes time.
    """
    status, said = job.look()
    entry = status.entry
    chosen = check_index(entry, index) if index is not None else _telling_index(status)
    attempts = read_attempts(job.files, job.id, chosen)
    watched = None
    if watch and _may_live(status, chosen, attempts):
        watched = PulseWatch(job.files, f"{job_folder(job.id)}/runs/{chosen}", attempts[-1].attempt)
    native, backend = _ask_why(job, entry, chosen, said)
    log: list[str] = []
    if attempts:
        log = read_tail(job.files, f"{job_folder(job.id)}/runs/{chosen}/a{attempts[-1].attempt:04d}/rank0.log", 100)
    mark = job.files.read(f"{job_folder(job.id)}/cancel") or job.files.read(f"{job_folder(job.id)}/cancel.{chosen}")
    order = json.loads(job.files.read(f"{job_folder(job.id)}/order.json") or b"{}")
    beside = read_backend_log(job, native)
    pulse = watched.wait(watch) if watched and watch else None
    if pulse and not pulse.moved and read_attempts(job.files, job.id, chosen) != attempts:
        return read_facts(job, index)  # it ended meanwhile
    return JobFacts(
        status=status,
        index=chosen,
        attempts=tuple(tell_attempts(job, entry, chosen)),
        log=tuple(log[-TOLD_LINES:]),
        raised=find_raised("\n".join(log)) if attempts and attempts[-1].exit_code == UNCAUGHT else None,
        backend_log=tuple(beside[-(TOLD_LINES if attempts else TOLD_ALONE) :]),
        backend=backend,
        native=native,
        cancelled_by=_who(mark),
        one_of_many=entry.indices > 1 and index is not None,
        limits={key: order.get(key) for key in ("retry", "time_limit_s", "idle_timeout_s", "checkpoint")},
        pulse=pulse,
        after=tuple(read_after(job, entry)),
        room=None if status.state is JobState.SUCCEEDED else job.files.room(),
    )


def read_backend_log(job: JobHandle, native: NativeState | None) -> list[str]:
    """The last lines that the backend kept of a native job beside the attempts' own logs; empty if nobody can say."""
    if native is not None and isinstance(job.launcher, KeepsOutput):
        try:
            text = job.launcher.read_output(job.target, native, job_folder(job.id), job.host)
        except RuntimeFailure:
            return []
        return [line.rstrip() for line in text.splitlines() if line.strip()]
    return read_tail(job.files, f"{job_folder(job.id)}/shim.log", 100)


def read_unbegun(job: JobHandle, index: int) -> list[str]:
    """The end of the backend's own log, for a run of which nothing else is to be read: its last native job began no attempt,
    or none has begun yet. Empty for any other run."""
    entry = job.entry()
    if index in entry.outcomes:
        return []
    if not entry.natives:
        return read_backend_log(job, None)
    status, said = job.look()
    one = next(each for each in status.indices if each.index == index)
    if one.reason is not EndReason.SETUP_FAILED and job.attempts(index):
        return []
    return read_backend_log(job, _native_of(said, index))


def _native_of(states: Sequence[NativeState], index: int) -> NativeState | None:
    """What the backend said of one run, or of the native job that serves it."""
    native = next((each for each in states if each.index == index), None)
    return native or next((each for each in reversed(states) if each.index is None), None)


def _may_live(status: JobStatus, index: int, attempts: Sequence[AttemptView]) -> bool:
    one = next(each for each in status.indices if each.index == index)
    return one.state is JobState.RUNNING and bool(attempts) and attempts[-1].reason is None


def _telling_index(status: JobStatus) -> int:
    for state in (JobState.FAILED, JobState.UNKNOWN, JobState.PENDING, JobState.RUNNING):
        for each in status.indices:
            if each.state is state and each.message != ledger.ITS_TURN:
                return each.index
    return first_index(status.entry)


def _ask_why(
    job: JobHandle, entry: LedgerEntry, index: int, states: Sequence[NativeState]
) -> tuple[NativeState | None, tuple[str, tuple[str, ...], str | None] | None]:
    natives = [each.native_id for each in newest_natives(entry)]
    states = states or ask(natives, job.target, job.launcher, job.host)
    native = _native_of(states, index)
    if native is None or native.state is JobState.UNKNOWN:
        return native, None
    try:
        said = job.launcher.explain(job.target, native, job.host)
    except RuntimeFailure:
        return native, None
    return native, (said.sentence, tuple(said.evidence), said.hint) if said else None


def _who(mark: bytes | None) -> str | None:
    if mark is None:
        return None
    try:
        said = json.loads(mark)
        return f"{said['by']} at {said['at']}"
    except (ValueError, KeyError):
        return "somebody"


def explain(facts: JobFacts) -> JobExplanation:
    """Pure: one sentence, the evidence, the next step."""
    status = facts.status
    entry = status.entry
    one = next(each for each in status.indices if each.index == facts.index)
    what = f"job `{entry.id[:10]}`" if not facts.one_of_many else f"run {facts.index} of job `{entry.id[:10]}`"
    state = one.state if facts.one_of_many or entry.indices == 1 else status.state
    counted = _count_states(status) if entry.indices > 1 and not facts.one_of_many else None
    evidence = _evidence(facts, one)
    short = entry.id[:10]
    at = f" --index {facts.index}" if entry.indices > 1 else ""
    if state is JobState.SUCCEEDED:
        return JobExplanation(f"{what} succeeded", evidence, f"runtime fetch {short}")
    if (hopeless := next((each for each in facts.after if each.hopeless), None)) and not facts.cancelled_by:
        will = "never ran" if state.terminal else "will never run"
        return JobExplanation(
            f"{what} {will}: it comes after {describe_after(hopeless)}",
            evidence,
            f"runtime explain {hopeless.job[:10]}",
        )
    if state is JobState.CANCELLED:
        by = f" by {facts.cancelled_by}" if facts.cancelled_by else ""
        return JobExplanation(f"{what} was cancelled{by}", evidence, f"runtime retry {short}")
    if state is JobState.UNKNOWN:
        said = facts.native.message if facts.native else one.message
        return JobExplanation(
            f"nobody knows how {what} stands: target `{entry.target}` does not answer",
            ((said,) if said else ()) + evidence,
            f"runtime targets check {entry.target}",
        )
    if not entry.natives and not entry.outcomes and entry.refused:
        return JobExplanation(
            f"{what} was not taken by `{entry.target}`: {entry.refused.message}",
            evidence,
            "mend that, and launch it again",
        )
    if not entry.natives and not entry.outcomes:
        return JobExplanation(
            f"{what} was never handed to `{entry.target}`: its launch did not get to the end",
            evidence,
            "run the same `runtime launch` again: it goes on where it stopped",
        )
    if state in (JobState.PENDING, JobState.RUNNING):
        return _explain_unfinished(facts, what, one, counted, evidence, f"{short}{at}")
    return _explain_failure(facts, what, one, counted, evidence, short, at)


def _explain_unfinished(
    facts: JobFacts, what: str, one: IndexStatus, counted: str | None, evidence: tuple[str, ...], target: str
) -> JobExplanation:
    if facts.backend:
        sentence, more, hint = facts.backend
        if counted and facts.status.state is JobState.RUNNING:
            return JobExplanation(
                f"{what} runs: {counted}; run {facts.index} {'is pending' if one.state is JobState.PENDING else 'runs'}: "
                f"{sentence}",
                (*more, *evidence),
                hint,
            )
        doing = " is pending" if one.state is JobState.PENDING else ""
        return JobExplanation(f"{what}{doing}: {sentence}", (*more, *evidence), hint)
    if one.state is JobState.PENDING and not (counted and facts.status.state is JobState.RUNNING):
        said = f": {one.message}" if one.message else ""
        return JobExplanation(f"{what} waits on `{facts.status.entry.target}`{said}", evidence, None)
    last, step = facts.attempts[-1] if facts.attempts else None, f"runtime logs -f {target}"
    doing = f"its attempt {last.attempt} runs on {last.host}" if last and last.reason is None else "between attempts"
    if not facts.attempts:
        doing = "its first attempt has not begun"
    doing = counted or doing
    if facts.pulse and not facts.pulse.moved:
        of = f" of run {facts.index}" if counted else ""
        doing += f"; attempt {facts.pulse.attempt}{of} gives no sign of life"
        where = last.host if last and last.host else "its machine"
        step = f"see whether {where} and the record root answer; if they do not, runtime cancel {target}"
    return JobExplanation(f"{what} runs: {doing}", evidence, step)


NOT_FOUND: Final = 127
"""Exit code of a command that is not there, as shells have it."""

BY_SETUP: Final = "the setup lines "
"""How the shim's word of an attempt begins whose lines of setup failed."""

_SAYINGS: Final[Mapping[EndReason, tuple[str, str]]] = {
    EndReason.APP_FAILED: ("the command failed with exit code {code}{raised}", "runtime logs {job}{at}"),
    EndReason.OOM: (
        "the command was killed for memory",
        "ask for more: --memory SIZE, or do less at a time; then runtime launch again",
    ),
    EndReason.DISK: (
        "the command used more disk than its limit",
        "ask for more: `resources.disk`, or write less beside the record root; then runtime launch again",
    ),
    EndReason.TIMEOUT: (
        "it came to its time limit{limit} without a new checkpoint",
        "raise --time-limit, or write checkpoints into RUNTIME_CHECKPOINT_DIR",
    ),
    EndReason.IDLE: (
        "it printed nothing for longer than `idle_timeout`",
        "see where it hangs: runtime logs {job}{at}; or raise `idle_timeout`",
    ),
    EndReason.SETUP_FAILED: ("it could not be prepared{said}", "runtime targets check {target}"),
    EndReason.PREEMPTED: (
        "its machine was taken away more often than `retry.preemption` allows",
        "runtime retry {job} --failed",
    ),
    EndReason.NODE_FAILED: ("its machine failed or was started anew", "runtime retry {job} --failed"),
    EndReason.LOST: (
        "it went without a word: neither a result nor its process is there",
        "runtime retry {job} --failed",
    ),
    EndReason.NO_CAPACITY: ("no machine could take it in time", "name another target, or ask for less"),
    EndReason.QUOTA: ("a quota forbids it", "see the quota with whoever runs `{target}`, or ask for less"),
    EndReason.IMAGE_FAILED: ("its container image could not be started", "correct `image`"),
    EndReason.CONFIG_INVALID: ("the backend cannot take it as it is", "correct the job file"),
    EndReason.SIBLING_FAILED: ("another rank of it failed first", "runtime logs {job}{at}"),
    EndReason.DUPLICATE: ("it was a twin: another native job serves it", "runtime status {job}"),
}


def _explain_failure(
    facts: JobFacts,
    what: str,
    one: IndexStatus,
    counted: str | None,
    evidence: tuple[str, ...],
    short: str,
    at: str,
) -> JobExplanation:
    saying, step = _SAYINGS.get(one.reason or EndReason.LOST, (f"it ended as {one.reason}", "runtime logs {job}{at}"))
    told = one.message or (facts.attempts[-1].message if facts.attempts else "")
    if one.reason is EndReason.SETUP_FAILED and facts.index not in facts.status.entry.outcomes:
        step = "mend `setup` or `python` of target `{target}`; runtime logs {job}{at} shows what was printed"
    elif told.startswith(BY_SETUP):
        step = "mend that line of `environment.setup`, or of `setup` of target `{target}`; runtime logs {job}{at}"
    elif one.reason is EndReason.SETUP_FAILED and one.exit_code == NOT_FOUND:
        step = "name a program that is there, or bring it with `environment`"
    limit = (facts.limits or {}).get("time_limit_s")
    words = {
        "said": f": {told}" if told else "",
        "code": "unknown" if one.exit_code is None else describe_code(one.exit_code),
        "raised": f": {facts.raised}" if facts.raised else "",
        "limit": f" of {format_duration(limit)}" if limit else "",
        "job": short,
        "at": at,
        "target": facts.status.entry.target,
    }
    if facts.backend:
        sentence, more, hint = facts.backend
        evidence, step = (sentence, *more, *evidence), hint or step
    why = saying.format(**words)
    sentence = f"{what} failed: {counted}; run {facts.index}: {why}" if counted else f"{what} failed: {why}"
    return JobExplanation(sentence, evidence, step.format(**words))


def _count_states(status: JobStatus) -> str:
    parts = [f"{status.counts[state]} {state}" for state in JobState if status.counts.get(state)]
    reasons = Counter(each.reason for each in status.indices if each.state is JobState.FAILED)
    why = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common() if reason)
    return ", ".join(parts) + f" of {status.entry.indices}" + (f" ({why})" if why else "")


def _evidence(facts: JobFacts, one: IndexStatus) -> tuple[str, ...]:
    lines = []
    gone = facts.native is not None and facts.native.reason in (EndReason.LOST, EndReason.NODE_FAILED)
    # That the process of a job that has its result is gone tells nothing.
    tells = facts.native is not None and not (gone and facts.index in facts.status.entry.outcomes)
    if facts.native is not None and tells and (facts.native.raw or facts.native.message):
        known = "\n".join([facts.backend[0] if facts.backend else "", *(each.message for each in facts.attempts)])
        said = ", ".join(part for part in (facts.native.raw, facts.native.message) if part and part not in known)
        said = said or facts.native.raw
        lines.append(f"{facts.status.entry.kind} says of {facts.native.native_id or 'it'}: {said}")
    if one.message and facts.native is None:
        lines.append(one.message)
    lines += [_attempt_line(attempt) for attempt in facts.attempts[-5:]]
    lines += describe_pulse(facts.pulse) if facts.pulse else []
    if facts.limits and facts.limits.get("retry") and len(facts.attempts) > 1:
        retry = facts.limits["retry"]
        lines.append(f"budgets: {retry['failure']} failures and {retry['preemption']} preemptions are tried again")
    lines += [f"log: {line}" for line in facts.log]
    if one.reason in (EndReason.LOST, EndReason.SETUP_FAILED, None):
        lines += [f"{facts.status.entry.kind}'s own log: {line}" for line in facts.backend_log]
    lines += [f"it comes after {describe_after(each)}" for each in facts.after]
    if facts.room and facts.room.bytes is not None:
        lines.append(f"the record root has {describe_room(facts.room)} free")
    return tuple(lines)


def describe_room(room: Room) -> str:
    """`3.2 GiB and 1,204 files`"""
    parts = [format_size(room.bytes)] if room.bytes is not None else []
    parts += [f"{room.files:,} files"] if room.files is not None else []
    return " and ".join(parts)


def _attempt_line(attempt: AttemptView) -> str:
    where = f" on {attempt.host}" if attempt.host else ""
    if attempt.reason is None:
        began = f", began {format_time(attempt.started_at)}" if attempt.started_at else ""
        return f"attempt {attempt.attempt}{where}{began}: no end is noted"
    code = f", exit code {describe_code(attempt.exit_code)}" if attempt.exit_code else ""
    said = f": {attempt.message}" if attempt.message else ""
    return f"attempt {attempt.attempt}{where} ended as {attempt.reason}{code}{said}"


# acting


def release_index(job: JobHandle, index: int) -> list[str]:
    """Give up a run whose machine is gone, where the backend keeps it for that; what is left over, in words."""
    if not isinstance(job.launcher, Releases):
        raise NotPossible(
            f"target `{job.target.name}` ({job.target.kind}) holds no run for a machine that is gone",
            hint=f"runtime cancel {job.id[:10]} --index {index}",
        )
    natives = [each.native_id for each in newest_natives(job.entry())]
    return job.launcher.release(job.target, natives, index, job.host)


# whose


def check_owner(entry: LedgerEntry, me: str, *, others: bool, verb: str) -> None:
    """Raise `NotPossible` for a job of somebody else, unless that is meant."""
    if entry.owner != me and not others:
        raise NotPossible(
            f"job `{entry.id}` is `{entry.owner}`'s, and you are `{me}`",
            hint=f"`--others` to {verb} it all the same",
        )
