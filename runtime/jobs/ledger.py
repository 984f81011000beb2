"""The launched jobs, by id: create-only files in the record root of the target, and the verdict on them together.

    jobs/ID/                 the run folder; making it is the lock of a launch
      lock                   the launcher at work: owner, token and a counter that an observer watches
      spec.json intent.json  the request, its owner and its code; written before the backend is called
      plan.json artefacts/   the decisions
      order.json shim.py     the shim, and its instructions
      native/001.000000.json a native job by epoch and part: its name and id; one file for each that was started
      epoch                  the newest epoch of a job that was retried
      cancel  cancel.INDEX   marks
      refused                the backend's refusal, until a later launch is accepted
      owners/ runs/          the shim's (docs/shim.md)
      ended                  all small files of a job that has ended, folded into one; runs/INDEX.ended for a run
    done/ID.INDEX.REASON.CODE.ATTEMPT   outcomes in names: one listing shows the state of every job
    snapshots/HEX.tar        code, by content id; jobs have it too, by a link if the store has links

Nothing is locked with flock and nothing is appended to: all of it is safe on NFS.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final

from runtime.end_reasons import EndReason
from runtime.errors import InvalidValue, NotPossible, RequestRefused, StoreUnavailable, UnknownName
from runtime.jobs.hosts.base import AccessDenied, Files
from runtime.jobs.plan import NativeState
from runtime.jobs.spec import MAX_INDICES, JobState
from runtime.system import system
from runtime.units import format_time, parse_time


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """A committed result of one index, from its name in `done/`."""

    job: str
    index: int
    reason: EndReason
    code: int
    attempt: int

    @property
    def listed(self) -> str:
        """The name."""
        return f"done/{self.job}.{self.index}.{self.reason}.{self.code}.{self.attempt}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeJob:
    """A native job that was started for a job."""

    name: str
    native_id: str
    part: int
    epoch: int
    at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendRefusal:
    """The backend's refusal of a job."""

    reason: EndReason
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """The ledger's knowledge of a job; the backend is not asked."""

    id: str
    name: str
    owner: str
    target: str
    kind: str
    launched_at: datetime
    snapshot: str | None
    indices: int
    natives: tuple[NativeJob, ...]
    outcomes: Mapping[int, RunOutcome]
    cancelled: bool = False
    cancelled_indices: frozenset[int] = frozenset()
    refused: BackendRefusal | None = None
    """Why the backend did not take it; meaningless once there is a native job."""
    intent: Mapping[str, Any] = field(default_factory=dict)

    @property
    def first_index(self) -> int:
        return int(self.intent.get("offset", 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexStatus:
    index: int
    state: JobState
    reason: EndReason | None = None
    attempt: int | None = None
    exit_code: int | None = None
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """Where a job stands, by the evidence so far."""

    entry: LedgerEntry
    state: JobState
    reason: EndReason | None
    """The end of a single job, or of the first failed index of an array. For a pending job, a cause that does not pass by
    itself: a missing image is `image_failed`."""
    counts: Mapping[JobState, int]
    indices: tuple[IndexStatus, ...] = ()
    """Only if they were asked for."""


def check_index(entry: LedgerEntry, index: int) -> int:
    """`index`, if the job has it. Raises `UnknownName`."""
    first = entry.first_index
    if not first <= index < first + entry.indices:
        known = f"{first} to {first + entry.indices - 1}" if entry.indices > 1 else f"only {first}, it is no array"
        raise UnknownName("run", str(index), [known], where=f"in job `{entry.id}`")
    return index


class DamagedFile(NotPossible):
    """A file of a job's folder with the wrong content."""

    def __init__(self, job: str, file: str) -> None:
        self.job, self.file = job, file
        folder = f"{file.partition(job)[0]}{job}"
        super().__init__(
            f"nothing can be told of job `{job}`: `{file}` is damaged",
            facts=["its logs and outputs lie beside it, and it may run"],
            hint=f"an empty file `{folder}/cancel` ends it if it runs; the launch with `--again` starts another beside it",
        )


@contextlib.contextmanager
def as_damage(files: Files, job: str, name: str) -> Iterator[None]:
    """Raise `DamagedFile` if the content of the job's file `name` turns out to be of another form while it is read."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError, InvalidValue) as problem:
        raise DamagedFile(job, f"{files.root}/{job_folder(job)}/{name}") from problem


# marks and names

ITS_TURN: Final = "other runs of the job go first"
"""Message of a run that waits for a slot of its own job."""
EPOCH: Final = "epoch"
"""File in the run folder of a job that was restarted: the number of its newest epoch."""
REMOVING: Final = "removing"
"""File in the run folder of a job that is being removed, with its owner."""
REFUSED: Final = "refused"
"""File in the run folder of a job that the backend did not take."""


def record_refusal(files: Files, job: str, problem: RequestRefused) -> None:
    """Note that the backend did not take the job, so that it is not shown as waiting; `problem.reason` is its end, if the
    class has one."""
    content = {"reason": getattr(problem, "reason", EndReason.CONFIG_INVALID), "message": problem.message}
    files.write(f"{job_folder(job)}/{REFUSED}", json.dumps(content).encode())


def _refusal(content: bytes | None) -> BackendRefusal | None:
    if not content:
        return None
    try:
        said = json.loads(content)
        return BackendRefusal(reason=EndReason(said["reason"]), message=str(said["message"]))
    except (ValueError, KeyError, TypeError):
        return None  # a crash cut it off


def leave_mark(files: Files, job: str, name: str, content: bytes) -> None:
    """Leave a mark in the run folder of a job; an existing one stays.

    A disk without room for a file mostly has room for a name, so the mark is then a second name of the intent. Raises
    `StoreUnavailable` if the record root refuses both.
    """
    folder = job_folder(job)
    try:
        files.create(f"{folder}/{name}", content)
    except StoreUnavailable:
        with contextlib.suppress(StoreUnavailable):
            if files.link(f"{folder}/intent.json", f"{folder}/{name}"):
                return
        if name not in files.names(folder, name):
            raise


def native_name(epoch: int, part: int) -> str:
    return f"native/{epoch:03d}.{part:06d}.json"


def job_folder(job: str) -> str:
    return f"jobs/{job}"


def snapshot_name(identity: str) -> str:
    """The name of the archive with a content id, `sha256:…`."""
    return f"snapshots/{identity.removeprefix('sha256:')}.tar"


def read_objects(files: Files, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The JSON objects in the files; a file that a power failure left empty is left out."""
    read = files.read_many(names)
    return {name: value for name, content in read.items() if (value := _parse_object(content)) is not None}


def _parse_object(content: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_object(files: Files, name: str) -> dict[str, Any]:
    """The JSON object in a file; an empty one if the file is gone or damaged."""
    return read_objects(files, [name]).get(name, {})


def list_attempts(files: Files, job: str, index: int) -> list[int]:
    """Numbers of the attempts that a run has begun, oldest first."""
    names = files.names(f"{job_folder(job)}/runs/{index}", "a")
    return sorted(int(name[1:]) for name in names if name[1:].isdecimal())


def read_outcomes(files: Files, job: str = "") -> dict[str, dict[int, RunOutcome]]:
    """Job → index → outcome, of every job or of one, by one listing."""
    found: dict[str, dict[int, RunOutcome]] = {}
    for name in files.names("done", f"{job}." if job else ""):
        outcome = parse_outcome(name)
        if outcome is not None:
            found.setdefault(outcome.job, {})[outcome.index] = outcome
    return found


def read_unannounced(files: Files, job: str, indices: Iterable[int]) -> dict[int, RunOutcome]:
    """The outcomes of runs that have a result, though its shim died before it could announce it."""
    places = {f"{job_folder(job)}/runs/{index}/result": index for index in indices}
    found = {}
    for name, result in read_objects(files, places).items():
        with contextlib.suppress(KeyError, ValueError, TypeError):
            found[places[name]] = RunOutcome(
                job=job,
                index=places[name],
                reason=EndReason(result["reason"]),
                code=int(result["code"]),
                attempt=int(result["attempt"]),
            )
    return found


def parse_outcome(name: str) -> RunOutcome | None:
    """The outcome in a name; None for another name, such as that of a temporary file."""
    parts = name.split(".")
    if len(parts) != 5:
        return None
    try:
        return RunOutcome(
            job=parts[0], index=int(parts[1]), reason=EndReason(parts[2]), code=int(parts[3]), attempt=int(parts[4])
        )
    except ValueError:
        return None


def read_entry(files: Files, job: str, outcomes: Mapping[int, RunOutcome] | None = None) -> LedgerEntry | None:
    """The entry of a job; None if there is no job of that id, or if it is half removed.

    Raises `NotPossible` for a job that we may not read.
    """
    folder = job_folder(job)
    try:
        names = files.names(folder)
    except AccessDenied:
        raise NotPossible(
            f"job `{job}` is another user's, and its folder is open to nobody else",
            facts=[f"`{files.root}/{folder}`"],
            hint="its owner, or who may read everything there, sees and cancels it",
        ) from None
    if REMOVING in names:
        return None
    natives = [f"{folder}/native/{name}" for name in files.names(f"{folder}/native")] if "native" in names else []
    refusals = [f"{folder}/{REFUSED}"] if REFUSED in names and not natives else []
    read = files.read_many([f"{folder}/intent.json", *natives, *refusals])
    if f"{folder}/intent.json" not in read:
        return None
    with as_damage(files, job, "native"):
        started = tuple(_native(json.loads(read[name])) for name in natives if name in read)
    ended = read_outcomes(files, job).get(job, {}) if outcomes is None else outcomes
    with as_damage(files, job, "intent.json"):
        entry = _entry(job, json.loads(read[f"{folder}/intent.json"]), started, ended)
    return replace(
        entry,
        cancelled="cancel" in names,
        cancelled_indices=frozenset(
            int(name.removeprefix("cancel.")) for name in names if name.removeprefix("cancel.").isdecimal()
        ),
        refused=_refusal(read.get(f"{folder}/{REFUSED}")),
    )


def _entry(
    job: str, intent: Mapping[str, Any], natives: tuple[NativeJob, ...], outcomes: Mapping[int, RunOutcome]
) -> LedgerEntry:
    return LedgerEntry(
        id=job,
        name=intent["name"],
        owner=intent["owner"],
        target=intent["target"],
        kind=intent["kind"],
        launched_at=parse_time(intent["at"]),
        snapshot=intent.get("snapshot"),
        indices=_read_count(intent),
        natives=natives,
        outcomes=outcomes,
        intent=intent,
    )


def _read_count(intent: Mapping[str, Any]) -> int:
    """The number of a job's runs. Raises `ValueError`."""
    count = intent["indices"]
    if type(count) is not int or not 0 <= count <= MAX_INDICES:
        raise ValueError(f"{count!r} runs")
    return count


def record_end(files: Files, job: str, ended: IndexStatus) -> None:
    """Commit the end of a run that only the backend knows, before the backend forgets it.

    An existing result stays. Safe to repeat.
    """
    name = f"{job_folder(job)}/runs/{ended.index}"
    result: dict[str, Any] = {
        "reason": ended.reason or EndReason.LOST,
        "code": 1 if ended.exit_code is None else ended.exit_code,
        "attempt": max(list_attempts(files, job, ended.index), default=0),
        "at": now().timestamp(),
        "message": ended.message,
    }
    if not files.create(f"{name}/result", json.dumps(result, sort_keys=True).encode()):
        stands = read_object(files, f"{name}/result")
        result = stands if {"reason", "code", "attempt"} <= stands.keys() else result
    files.create(f"done/{job}.{ended.index}.{result['reason']}.{result['code']}.{result['attempt']}", b"")


def _native(value: Mapping[str, Any]) -> NativeJob:
    return NativeJob(
        name=value["name"], native_id=value["id"], part=value["part"], epoch=value["epoch"], at=parse_time(value["at"])
    )


def record_native(files: Files, job: str, native: NativeJob) -> None:
    """Write down a native job that was started. Safe to repeat."""
    content = {
        "name": native.name,
        "id": native.native_id,
        "part": native.part,
        "epoch": native.epoch,
        "at": format_time(native.at),
    }
    if native.epoch > 1:
        files.write(f"{job_folder(job)}/{EPOCH}", str(native.epoch).encode())
    name = f"{job_folder(job)}/{native_name(native.epoch, native.part)}"
    files.create(name, json.dumps(content, sort_keys=True).encode())


# the verdict: a pure function of the evidence


def judge(
    entry: LedgerEntry, natives: Sequence[NativeState], *, begun: frozenset[int] | None = None, indices: bool = False
) -> JobStatus:
    """Judge where a job stands, first by a committed result, then by our cancel mark, then by the native state.

    A native job that is gone without a result is `lost`; a job that was not submitted is `pending`, and so is a run that
    has not `begun`.
    """
    by_index: dict[int | None, NativeState] = {}
    for each in natives:
        known = by_index.get(each.index)
        if known is None or known.state.terminal:
            by_index[each.index] = each  # a living native job counts more than its predecessors
    offset = entry.first_index
    statuses = [_judge_index(entry, index, by_index, begun) for index in range(offset, offset + entry.indices)]
    counts = Counter(each.state for each in statuses)
    state = _overall(counts)
    failed = next((each for each in statuses if each.state is JobState.FAILED), None)
    telling = failed or next((each for each in statuses if each.reason is not None), None)
    return JobStatus(
        entry=entry,
        state=state,
        reason=telling.reason if telling and (state.terminal or state is JobState.PENDING) else None,
        counts=dict(counts),
        indices=tuple(statuses) if indices else (),
    )


def name_unbegun(files: Files, entry: LedgerEntry, natives: Sequence[NativeState]) -> list[NativeState]:
    """The states, with `setup_failed` for each native job that failed before the shim could begin an attempt.

    A shim commits its command's failure. If a native job failed without a result or an open attempt, the cause came
    before the command: setup lines, a Python that is missing or too old, the code of the shim.
    """
    first = entry.first_index
    runs = f"{job_folder(entry.id)}/runs"
    begun: set[str] | None = None
    named = []
    for each in natives:
        index = first if each.index is None and entry.indices == 1 else each.index
        if each.state is JobState.FAILED and each.reason is EndReason.APP_FAILED and index not in entry.outcomes:
            begun = set(files.names(runs)) if begun is None else begun
            if index is not None and (str(index) not in begun or not _is_open(files, f"{runs}/{index}")):
                code = f" with exit code {each.exit_code}" if each.exit_code else ""
                message = f"it ended{code} before its command began"
                each = replace(each, reason=EndReason.SETUP_FAILED, message=message)
        named.append(each)
    return named


def has_begun(files: Files, job: str) -> bool:
    """Whether a shim of the job has begun a run, of which not all have ended."""
    return bool(files.names(f"{job_folder(job)}/runs"))


def find_begun(files: Files, entry: LedgerEntry, natives: Sequence[NativeState]) -> frozenset[int] | None:
    """Indices that have begun an attempt, for a native job that runs many in turn; None if the backend reports each."""
    if entry.indices == 1 or not any(each.index is None and each.state is JobState.RUNNING for each in natives):
        return None
    # A folded run lies beside its folder; without any run, the whole job is folded.
    names = {name.partition(".")[0] for name in files.names(f"{job_folder(entry.id)}/runs")}
    return frozenset(int(name) for name in names if name.isdecimal()) or None


def _is_open(files: Files, run: str) -> bool:
    """Whether the last attempt of a run has no noted end."""
    attempts = [name for name in files.names(run, "a") if name[1:].isdecimal()]
    return bool(attempts) and not files.names(f"{run}/{max(attempts)}", "end.")


def _judge_index(
    entry: LedgerEntry, index: int, natives: Mapping[int | None, NativeState], begun: frozenset[int] | None
) -> IndexStatus:
    def ended(reason: EndReason, message: str = "", code: int | None = None, attempt: int | None = None) -> IndexStatus:
        state = state_of(reason)
        return IndexStatus(index=index, state=state, reason=reason, attempt=attempt, exit_code=code, message=message)

    if (outcome := entry.outcomes.get(index)) is not None:
        return ended(outcome.reason, code=outcome.code, attempt=outcome.attempt)
    native = natives.get(index) or natives.get(None)
    cancelled = entry.cancelled or index in entry.cancelled_indices
    # The shim looks for the mark before it begins a run.
    waits = native is not None and native.index is None and begun is not None and index not in begun
    waits = waits and native is not None and native.state is JobState.RUNNING
    if cancelled and (native is None or waits or native.state.terminal):
        return ended(EndReason.CANCELLED)
    if native is None:
        if not entry.natives and entry.refused:
            return ended(entry.refused.reason, entry.refused.message)
        if len({each.part for each in entry.natives}) < len(entry.intent.get("parts", ())) or not entry.natives:
            # The launch was cut off: its last native job may exist, and is not noted yet.
            return IndexStatus(index=index, state=JobState.PENDING, message="not submitted yet")
        return ended(EndReason.LOST, "gone without a result")
    if waits:
        return IndexStatus(index=index, state=JobState.PENDING, message=ITS_TURN)
    if not native.state.terminal:
        waits_for = native.reason if native.state is JobState.PENDING else None
        return IndexStatus(index=index, state=native.state, reason=waits_for, message=native.message)
    # If it ended well without a committed result, the nodes could not write, or it was not the shim.
    reason = EndReason.LOST if native.state is JobState.SUCCEEDED or native.reason is None else native.reason
    return ended(reason, native.message or native.raw, native.exit_code)


def state_of(reason: EndReason) -> JobState:
    if reason is EndReason.SUCCEEDED:
        return JobState.SUCCEEDED
    return JobState.CANCELLED if reason is EndReason.CANCELLED else JobState.FAILED


def _overall(counts: Mapping[JobState, int]) -> JobState:
    for state in (JobState.RUNNING, JobState.UNKNOWN):
        if counts.get(state):
            return state
    if counts.get(JobState.PENDING):
        return JobState.RUNNING if any(state.terminal for state in counts) else JobState.PENDING
    for state in (JobState.FAILED, JobState.CANCELLED):
        if counts.get(state):
            return state
    return JobState.SUCCEEDED


def list_jobs(files: Files) -> list[str]:
    """The ids of all jobs in the record root; other names are not ours."""
    return [name for name in files.names("jobs") if re.fullmatch("j-[0-9a-f]+", name)]


def now() -> datetime:
    return system.now()


def read_many_entries(
    files: Files,
    jobs: Iterable[str],
    outcomes: Mapping[str, Mapping[int, RunOutcome]] | None = None,
    *,
    tell: Callable[[DamagedFile], None] = lambda problem: None,
) -> list[LedgerEntry]:
    """The entries of many jobs, by one listing of all outcomes, unless they are given, and two reads; arrays that have not
    ended, and jobs that were retried, are read one by one. A job whose files are damaged is left out, and `tell` gets that."""
    outcomes = read_outcomes(files) if outcomes is None else outcomes
    names = {f"{job_folder(job)}/intent.json": job for job in jobs}
    intents: dict[str, dict[str, Any]] = {}
    for name, content in files.read_many(names).items():
        if (intent := _parse_object(content)) is not None and _is_intent(intent):
            intents[names[name]] = intent
        else:
            tell(DamagedFile(names[name], f"{files.root}/{name}"))
    left = [job for job, intent in intents.items() if len(outcomes.get(job, {})) < intent["indices"]]
    simple = [job for job in left if intents[job]["indices"] == 1]
    natives = {job: [f"{job_folder(job)}/{native_name(1, part)}" for part in _parts(intents[job])] for job in simple}
    marks = [f"{job_folder(job)}/{name}" for job in simple for name in ("cancel", EPOCH, REFUSED, REMOVING)]
    read = files.read_many([*itertools.chain.from_iterable(natives.values()), *marks])
    found = []
    for job, intent in intents.items():
        mine = outcomes.get(job, {})
        if f"{job_folder(job)}/{REMOVING}" in read:
            continue
        if job in natives and f"{job_folder(job)}/{EPOCH}" not in read:
            with _telling(tell), as_damage(files, job, "native"):
                started = tuple(_native(json.loads(read[name])) for name in natives[job] if name in read)
                cancelled, refused = (read.get(f"{job_folder(job)}/{name}") for name in ("cancel", REFUSED))
                entry = _entry(job, intent, started, mine)
                found.append(replace(entry, cancelled=cancelled is not None, refused=_refusal(refused)))
        elif len(mine) < intent["indices"]:
            with _telling(tell):
                found += filter(None, [read_entry(files, job, mine)])
        else:
            found.append(_entry(job, intent, (), mine))
    return found


@contextlib.contextmanager
def _telling(tell: Callable[[DamagedFile], None]) -> Iterator[None]:
    try:
        yield
    except DamagedFile as problem:
        tell(problem)


def _is_intent(value: Mapping[str, Any]) -> bool:
    """Whether the object can be read as an intent."""
    try:
        _entry("", value, (), {})
        _parts(value)
    except (ValueError, TypeError, LookupError, AttributeError, InvalidValue):
        return False
    return True


def read_natives(files: Files, entries: Sequence[LedgerEntry]) -> dict[str, tuple[NativeJob, ...]]:
    """Job → the newest native job of each part, by one read; jobs that were restarted are read one by one."""
    names = {
        f"{job_folder(entry.id)}/{native_name(1, part)}": entry.id for entry in entries for part in _parts(entry.intent)
    }
    marks = {f"{job_folder(entry.id)}/{EPOCH}": entry.id for entry in entries}
    read = files.read_many([*names, *marks])
    found: dict[str, tuple[NativeJob, ...]] = {entry.id: () for entry in entries}
    for name, job in names.items():
        if name in read:
            with contextlib.suppress(DamagedFile), as_damage(files, job, name):
                found[job] += (_native(json.loads(read[name])),)
    for entry in entries:
        if f"{job_folder(entry.id)}/{EPOCH}" in read:
            with contextlib.suppress(DamagedFile):
                again = read_entry(files, entry.id, entry.outcomes)
                found[entry.id] = again.natives if again else ()
    return found


def _parts(intent: Mapping[str, Any]) -> range:
    return range(len(intent.get("parts", ())) or 1)


def newest_natives(entry: LedgerEntry) -> list[NativeJob]:
    """The native job of the latest epoch of each part."""
    newest = {each.part: each for each in sorted(entry.natives, key=lambda each: each.epoch)}
    return [newest[part] for part in sorted(newest)]
