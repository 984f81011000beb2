"""What was launched, by job id: create-only files in the record root of the target, and what they say together.

    jobs/ID/                 the run folder; making it is the lock of a launch
      lock                   who launches now: owner, token and a counter that an observer watches
      spec.json intent.json  what was asked for, by whom, from which code; written before the backend is called
      plan.json artefacts/   what was decided
      order.json shim.py     what the shim is told, and the shim
      native/001.000000.json a native job by epoch and part: its name and id; one file for each that was started
      epoch                  the newest epoch of a job that was retried
      cancel  cancel.INDEX   marks
    refused                why the backend did not take it, until a later launch finds that it does
      owners/ runs/          the shim's (docs/shim.md)
      ended                  all small files of a job that has ended, folded into one; of a run runs/INDEX.ended
    done/ID.INDEX.REASON.CODE.ATTEMPT   outcomes in names: one listing tells the state of every job
    snapshots/HEX.tar        code, by content id; jobs have it too, by a link where there are links

Nothing is locked with flock and nothing is appended to: all of it is safe on NFS.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from runtime.errors import NotPossible, RequestRefused, StoreUnavailable, UnknownName
from runtime.jobs.hosts.base import AccessDenied, Files, Links
from runtime.jobs.plan import NativeState
from runtime.jobs.spec import JobState
from runtime.reasons import EndReason
from runtime.units import format_time, parse_time
from runtime.values import dataclass, field, replace

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A committed result of one index, as its name in `done/` says."""

    job: str
    index: int
    reason: EndReason
    code: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeJob:
    """One native job that was started for a job."""

    name: str
    native_id: str
    part: int
    epoch: int
    at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """What the backend said when it did not take a job."""

    reason: EndReason
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """All that the ledger knows of a job without asking the backend."""

    id: str
    name: str
    owner: str
    target: str
    kind: str
    launched_at: datetime
    snapshot: str | None
    indices: int
    natives: tuple[NativeJob, ...]
    cancelled: bool
    cancelled_indices: frozenset[int]
    outcomes: Mapping[int, Outcome]
    refused: Refusal | None = None
    """Why the backend did not take it; says nothing once a native job is there."""
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
    """Where a job stands, by the evidence there is."""

    entry: LedgerEntry
    state: JobState
    reason: EndReason | None
    """Of a single job why it ended; of an array that of its first index that failed. Of a pending job, what it waits for
    that does not come by itself: an image that is not there is `image_failed`."""
    counts: Mapping[JobState, int]
    indices: tuple[IndexStatus, ...] = ()
    """Only where they were asked for."""


def check_index(entry: LedgerEntry, index: int) -> int:
    """`index`, if the job has it. Raises `UnknownName`."""
    first = entry.first_index
    if not first <= index < first + entry.indices:
        known = f"{first} to {first + entry.indices - 1}" if entry.indices > 1 else f"only {first}, it is no array"
        raise UnknownName("run", str(index), [known], where=f"in job `{entry.id}`")
    return index


# marks and names

ITS_TURN: Final = "other runs of the job go first"
"""Message of a run that waits for a slot of its own job."""
EPOCH: Final = "epoch"
"""File in the run folder of a job that was started anew: the number of its newest epoch."""


REMOVING: Final = "removing"
"""File in the run folder of a job that is being removed, with whose it is."""
REFUSED: Final = "refused"
"""File in the run folder of a job that the backend did not take."""


def note_refusal(files: Files, job: str, problem: RequestRefused) -> None:
    """Remember that the backend did not take the job, so that it is not shown as one that waits.

    `problem.reason` says how such a job ended, where the class has one.
    """
    content = {"reason": getattr(problem, "reason", EndReason.CONFIG_INVALID), "message": problem.message}
    files.write(f"{job_folder(job)}/{REFUSED}", json.dumps(content).encode())


def _refusal(content: bytes | None) -> Refusal | None:
    if not content:
        return None
    try:
        said = json.loads(content)
        return Refusal(reason=EndReason(said["reason"]), message=str(said["message"]))
    except (ValueError, KeyError, TypeError):
        return None  # a crash left a part of it


def leave_mark(files: Files, job: str, name: str, content: bytes) -> None:
    """Leave a mark in the run folder of a job; one that is there stays.

    A disk without room for another file mostly has room for another name, so the mark is then a second name of the
    intent. Raises `StoreUnavailable` if the record root refuses both.
    """
    folder = job_folder(job)
    try:
        files.create(f"{folder}/{name}", content)
    except StoreUnavailable:
        with contextlib.suppress(StoreUnavailable):
            if isinstance(files, Links) and files.link(f"{folder}/intent.json", f"{folder}/{name}"):
                return
        if name not in files.names(folder, name):
            raise


def native_name(epoch: int, part: int) -> str:
    return f"native/{epoch:03d}.{part:06d}.json"


def job_folder(job: str) -> str:
    return f"jobs/{job}"


def snapshot_name(identity: str) -> str:
    """Of a content id, `sha256:…`."""
    return f"snapshots/{identity.removeprefix('sha256:')}.tar"


def read_objects(files: Files, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The JSON objects in those of the files that hold one: a machine that lost its power may leave others empty."""
    found = {}
    for name, content in files.read_many(names).items():
        try:
            value = json.loads(content)
        except ValueError:
            continue
        if isinstance(value, dict):
            found[name] = value
    return found


def list_attempts(files: Files, job: str, index: int) -> list[int]:
    """Numbers of the attempts that a run has begun, oldest first."""
    names = files.names(f"{job_folder(job)}/runs/{index}", "a")
    return sorted(int(name[1:]) for name in names if name[1:].isdigit())


def read_outcomes(files: Files, job: str = "") -> dict[str, dict[int, Outcome]]:
    """Job → index → outcome, of every job or of one, by one listing."""
    found: dict[str, dict[int, Outcome]] = {}
    for name in files.names("done", f"{job}." if job else ""):
        outcome = parse_outcome(name)
        if outcome is not None:
            found.setdefault(outcome.job, {})[outcome.index] = outcome
    return found


def parse_outcome(name: str) -> Outcome | None:
    """None for what is no outcome, such as a file that is just being written."""
    parts = name.split(".")
    if len(parts) != 5 or parts[2] not in _REASONS:
        return None
    try:
        return Outcome(
            job=parts[0], index=int(parts[1]), reason=EndReason(parts[2]), code=int(parts[3]), attempt=int(parts[4])
        )
    except ValueError:
        return None


_REASONS: Final = frozenset(reason.value for reason in EndReason)


def read_entry(files: Files, job: str, outcomes: Mapping[int, Outcome] | None = None) -> LedgerEntry | None:
    """What the ledger knows of a job; None where it has none of that id. Raises `NotPossible` for one that we may not
    look into."""
    folder = job_folder(job)
    try:
        names = files.names(folder)
    except AccessDenied:
        raise NotPossible(
            f"job `{job}` is another user's, and its folder is open to nobody else",
            facts=[f"`{files.root}/{folder}`"],
            hint="its owner, or who may read everything there, sees and cancels it",
        ) from None
    natives = [f"{folder}/native/{name}" for name in files.names(f"{folder}/native")] if "native" in names else []
    refusals = [f"{folder}/{REFUSED}"] if REFUSED in names and not natives else []
    read = files.read_many([f"{folder}/intent.json", *natives, *refusals])
    if f"{folder}/intent.json" not in read:
        return None
    try:
        intent = json.loads(read[f"{folder}/intent.json"])
    except ValueError:
        raise NotPossible(
            f"nothing can be told of job `{job}`: `{files.root}/{folder}/intent.json` is damaged",
            hint="its logs and outputs lie beside it; launch it again with `--again`",
        ) from None
    return _entry(
        job,
        intent,
        tuple(_native(json.loads(read[name])) for name in natives if name in read),
        read_outcomes(files, job).get(job, {}) if outcomes is None else outcomes,
        cancelled="cancel" in names,
        cancelled_indices=frozenset(
            int(name.removeprefix("cancel.")) for name in names if name.removeprefix("cancel.").isdigit()
        ),
        refused=_refusal(read.get(f"{folder}/{REFUSED}")),
    )


def _entry(
    job: str,
    intent: Mapping[str, Any],
    natives: tuple[NativeJob, ...],
    outcomes: Mapping[int, Outcome],
    *,
    cancelled: bool = False,
    cancelled_indices: frozenset[int] = frozenset(),
    refused: Refusal | None = None,
) -> LedgerEntry:
    return LedgerEntry(
        id=job,
        name=intent["name"],
        owner=intent["owner"],
        target=intent["target"],
        kind=intent["kind"],
        launched_at=parse_time(intent["at"]),
        snapshot=intent.get("snapshot"),
        indices=intent["indices"],
        natives=natives,
        cancelled=cancelled,
        cancelled_indices=cancelled_indices,
        outcomes=outcomes,
        refused=refused,
        intent=intent,
    )


def record_end(files: Files, job: str, ended: IndexStatus) -> None:
    """Commit how a run ended of which only the backend tells, so that it stays so when that has forgotten it.

    A result that is there stays. Safe to repeat.
    """
    name = f"{job_folder(job)}/runs/{ended.index}"
    attempts = [int(each[1:]) for each in files.names(name, "a") if each[1:].isdigit()]
    result: dict[str, Any] = {
        "reason": ended.reason or EndReason.LOST,
        "code": 1 if ended.exit_code is None else ended.exit_code,
        "attempt": max(attempts, default=0),
        "at": now().timestamp(),
        "message": ended.message,
    }
    if not files.create(f"{name}/result", json.dumps(result, sort_keys=True).encode()):
        result = json.loads(files.read(f"{name}/result") or b"{}") or result
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
    """Where a job stands. In this order counts: a committed result, our cancel mark, the native state.

    A native job that is gone without a word and left no result is `lost`; one that nobody submitted is `pending`, as is a
    run that is not among those that have `begun`.
    """
    by_index: dict[int | None, NativeState] = {}
    for each in natives:
        known = by_index.get(each.index)
        if known is None or known.state.terminal:
            by_index[each.index] = each  # of several native jobs the one that lives counts
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

    A shim commits how its command failed. Where a native job failed, no result is there and no attempt is open, what
    comes before the command is to blame: lines of setup, a Python that is missing or too old, the code of the shim.
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


def find_begun(files: Files, entry: LedgerEntry, natives: Sequence[NativeState]) -> frozenset[int] | None:
    """Indices that have begun an attempt, for a native job that runs many in turn; None if the backend speaks of each."""
    if entry.indices == 1 or not any(each.index is None and each.state is JobState.RUNNING for each in natives):
        return None
    # Beside the folder of a run that has ended may lie what it was folded into; without any, the whole job is folded.
    names = {name.partition(".")[0] for name in files.names(f"{job_folder(entry.id)}/runs")}
    return frozenset(int(name) for name in names if name.isdigit()) or None


def _is_open(files: Files, run: str) -> bool:
    """Whether the last attempt of a run left no word of its end."""
    attempts = [name for name in files.names(run, "a") if name[1:].isdigit()]
    return bool(attempts) and not files.names(f"{run}/{max(attempts)}", "end.")


def _judge_index(
    entry: LedgerEntry, index: int, natives: Mapping[int | None, NativeState], begun: frozenset[int] | None
) -> IndexStatus:
    outcome = entry.outcomes.get(index)
    if outcome is not None:
        return IndexStatus(
            index=index,
            state=state_of(outcome.reason),
            reason=outcome.reason,
            attempt=outcome.attempt,
            exit_code=outcome.code,
        )
    native = natives.get(index) or natives.get(None)
    cancelled = entry.cancelled or index in entry.cancelled_indices
    if native is None:
        if cancelled:
            return IndexStatus(index=index, state=JobState.CANCELLED, reason=EndReason.CANCELLED)
        if not entry.natives and entry.refused:
            reason, message = entry.refused.reason, entry.refused.message
            return IndexStatus(index=index, state=JobState.FAILED, reason=reason, message=message)
        if len({each.part for each in entry.natives}) < len(entry.intent.get("parts", ())) or not entry.natives:
            # A launch that was cut off: what it started last may be there, and goes by no number yet.
            return IndexStatus(index=index, state=JobState.PENDING, message="not submitted yet")
        return IndexStatus(index=index, state=JobState.FAILED, reason=EndReason.LOST, message="gone without a result")
    if native.index is None and begun is not None and index not in begun and native.state is JobState.RUNNING:
        # The shim looks for the mark before it begins a run.
        if cancelled:
            return IndexStatus(index=index, state=JobState.CANCELLED, reason=EndReason.CANCELLED)
        return IndexStatus(index=index, state=JobState.PENDING, message=ITS_TURN)
    if not native.state.terminal:
        waits_for = native.reason if native.state is JobState.PENDING else None
        return IndexStatus(index=index, state=native.state, reason=waits_for, message=native.message)
    if cancelled:
        return IndexStatus(index=index, state=JobState.CANCELLED, reason=EndReason.CANCELLED)
    # The backend says that it ended well and no result was committed: the nodes could not write, or it was not the shim.
    reason = EndReason.LOST if native.state is JobState.SUCCEEDED or native.reason is None else native.reason
    return IndexStatus(
        index=index,
        state=state_of(reason),
        reason=reason,
        exit_code=native.exit_code,
        message=native.message or native.raw,
    )


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
    """Ids of every job in the record root; what is named otherwise is none of ours."""
    return [name for name in files.names("jobs") if re.fullmatch("j-[0-9a-f]+", name)]


def now() -> datetime:
    return datetime.now(UTC)


def read_many_entries(files: Files, jobs: Iterable[str]) -> list[LedgerEntry]:
    """The entries of many jobs: one listing of the outcomes of all, and two reads.

    Only arrays that have not ended, and jobs that were retried, are looked at one by one.
    """
    outcomes = read_outcomes(files)
    intents = _read_intents(files, jobs)
    left = [job for job, intent in intents.items() if len(outcomes.get(job, {})) < intent["indices"]]
    simple = [job for job in left if intents[job]["indices"] == 1]
    natives = {job: [f"{job_folder(job)}/{native_name(1, part)}" for part in _parts(intents[job])] for job in simple}
    marks = [f"{job_folder(job)}/{name}" for job in simple for name in ("cancel", EPOCH, REFUSED)]
    read = files.read_many([*itertools.chain.from_iterable(natives.values()), *marks])
    found = []
    for job, intent in intents.items():
        mine = outcomes.get(job, {})
        if job in natives and f"{job_folder(job)}/{EPOCH}" not in read:
            started = tuple(_native(json.loads(read[name])) for name in natives[job] if name in read)
            cancelled, refused = (read.get(f"{job_folder(job)}/{name}") for name in ("cancel", REFUSED))
            found.append(_entry(job, intent, started, mine, cancelled=cancelled is not None, refused=_refusal(refused)))
        elif len(mine) < intent["indices"]:
            entry = read_entry(files, job, mine)
            found += [entry] if entry else []
        else:
            found.append(_entry(job, intent, (), mine))
    return found


def read_natives(files: Files, entries: Sequence[LedgerEntry]) -> dict[str, tuple[NativeJob, ...]]:
    """Job → the newest native job of each part, by one read; jobs that were started anew are looked at one by one."""
    names = {
        f"{job_folder(entry.id)}/{native_name(1, part)}": entry.id for entry in entries for part in _parts(entry.intent)
    }
    marks = {f"{job_folder(entry.id)}/{EPOCH}": entry.id for entry in entries}
    read = files.read_many([*names, *marks])
    found: dict[str, tuple[NativeJob, ...]] = {entry.id: () for entry in entries}
    for name, job in names.items():
        if name in read:
            found[job] += (_native(json.loads(read[name])),)
    for entry in entries:
        if f"{job_folder(entry.id)}/{EPOCH}" in read:
            again = read_entry(files, entry.id, entry.outcomes)
            found[entry.id] = again.natives if again else ()
    return found


def _read_intents(files: Files, jobs: Iterable[str]) -> dict[str, dict[str, Any]]:
    names = {f"{job_folder(job)}/intent.json": job for job in jobs}
    return {names[name]: intent for name, intent in read_objects(files, names).items()}


def _parts(intent: Mapping[str, Any]) -> range:
    return range(len(intent.get("parts", ())) or 1)


def newest_natives(entry: LedgerEntry) -> list[NativeJob]:
    """The native job of each part that counts: the one of the latest epoch."""
    newest: dict[int, NativeJob] = {}
    for each in entry.natives:
        if each.part not in newest or each.epoch > newest[each.part].epoch:
            newest[each.part] = each
    return [newest[part] for part in sorted(newest)]
