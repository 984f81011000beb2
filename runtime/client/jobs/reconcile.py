"""Keeping jobs going if their backend starts nothing again: what `runtime keep` does to each open job of a target.

It looks at the index of open jobs, never at all jobs, and takes a job up as the same launch would: under the job's lock, by
the order and the spec in the job's folder, at the next epoch, so that the old shim is refused. The new shim judges by the
notes of the attempts whether a budget is left. Any number of keepers and launches may run at once; one that is killed at
any step leaves nothing that the next cannot continue.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any, Final

from runtime.client.jobs.handle import JobHandle
from runtime.client.jobs.notifications import announce_end, send_due
from runtime.client.jobs.retry import go_on
from runtime.client.jobs.targets import OpenTarget
from runtime.config import Settings
from runtime.end_reasons import EndReason
from runtime.errors import InfrastructureFailure, NotPossible, RequestRefused
from runtime.faults import reach
from runtime.jobs import ledger, lock, maintenance_lock, open_jobs
from runtime.jobs.hosts.base import AccessDenied
from runtime.jobs.hosts.bucket import is_bucket
from runtime.jobs.indices import open_runs
from runtime.jobs.ledger import IndexStatus, JobStatus, LedgerEntry, job_folder, newest_natives
from runtime.jobs.lock import Lock, LockHeld
from runtime.jobs.plan import NativeState, owner_name
from runtime.jobs.spec import parse_spec, secret_refs
from runtime.launchers.base import Clears, SeesOneMachine
from runtime.launchers.job_status import ELSEWHERE, FORGOTTEN, GONE, LIVES, judge_job, judge_jobs
from runtime.shim.common import NOTIFY
from runtime.system import system
from runtime.units import count_noun

MOST_IN_VAIN: Final = 3
"""Number of native jobs in a row that may end before they begin an attempt."""
LAUNCH: Final = timedelta(minutes=2)
"""How long a launch may be at work on what looks as if it was never submitted."""
_OF_LAUNCHER: Final = ("env", "file")
"""Schemes of secrets that only the launching machine can read."""


class ReconcileAction(StrEnum):
    TAKE_UP = "take_up"
    LEAVE = "leave"
    DROP = "drop"
    """Remove the job from the index: it has ended."""
    END = "end"
    """Clear what the job left behind, and remove it from the index."""


DONE: Final = {
    ReconcileAction.TAKE_UP: "taken_up",
    ReconcileAction.LEAVE: "left",
    ReconcileAction.DROP: "dropped",
    ReconcileAction.END: "ended",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconcileDecision:
    act: ReconcileAction
    seen: str
    """What was seen of the job, in words."""
    reason: EndReason | None = None
    """The end to record for runs without a result."""
    submitted: bool = True
    """False for a job whose launch was cut off before its backend got it: it lost nothing, and waits for the same launch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptJob:
    """One open job, what was seen of it, and what was done."""

    job: str
    target: str
    owner: str | None
    """None if the job may not be read."""
    seen: str
    done: str
    """`taken_up`, `left`, `dropped` (from the index) or `ended`."""
    native_id: str | None = None
    """The native job that was started."""
    next: str | None = None
    """The next step, if keeping alone does not help."""
    submitted: bool = True
    """Whether its backend ever got it; if not, it waits for the same launch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTarget:
    jobs: tuple[KeptJob, ...]
    problems: tuple[InfrastructureFailure, ...] = ()
    """Answers that did not come while a job was taken up."""


def decide_keep(
    entry: LedgerEntry, natives: Sequence[NativeState], *, resumes: bool, in_vain: int = 0, begun: bool = False
) -> ReconcileDecision:
    """Decide what to do with an open job. `resumes` is the launcher's; `in_vain` counts the last native jobs in a row that
    began no attempt; `begun` is whether a job without a native job has begun one all the same."""
    if not open_runs(entry, cancelled=True):
        return ReconcileDecision(act=ReconcileAction.DROP, seen="all of its results are there")
    newest = newest_natives(entry)
    if not newest and entry.refused:
        return ReconcileDecision(act=ReconcileAction.DROP, seen=f"the backend refused it: {entry.refused.message}")
    if not newest and not begun:
        return ReconcileDecision(act=ReconcileAction.LEAVE, seen="it was never submitted", submitted=False)
    if not newest or len(newest) < len(entry.intent.get("parts", ())):
        return ReconcileDecision(act=ReconcileAction.LEAVE, seen="its launch did not come to an end")
    if not resumes:
        status = ledger.judge(entry, natives)
        if status.state.terminal:
            return ReconcileDecision(
                act=ReconcileAction.DROP, seen=f"its backend has ended it: {status.reason or status.state}"
            )
        return ReconcileDecision(act=ReconcileAction.LEAVE, seen=f"{status.state}; its backend itself starts it again")
    if living := next((each for each in natives if not each.state.terminal), None):
        return ReconcileDecision(act=ReconcileAction.LEAVE, seen=str(living.state))
    if entry.cancelled or not open_runs(entry):
        return ReconcileDecision(act=ReconcileAction.END, seen="it was cancelled, and its native job is gone")
    why = next((each.message for each in natives if each.message), "its backend knows nothing of it")
    if any(each.reason not in GONE for each in natives):
        return ReconcileDecision(act=ReconcileAction.DROP, seen=f"its backend has ended it: {why}")
    if in_vain >= MOST_IN_VAIN:
        seen = f"its last {count_noun(in_vain, 'native job')} ended before they began an attempt"
        return ReconcileDecision(act=ReconcileAction.END, seen=seen, reason=EndReason.LOST)
    return ReconcileDecision(act=ReconcileAction.TAKE_UP, seen=why)


def keep_target(
    place: OpenTarget, settings: Settings, *, holder: str = "", progress: Callable[[str], None] = lambda text: None
) -> KeptTarget:
    """Look at each job in the target's index once, and do what is due. Raises `InfrastructureFailure`, and does nothing,
    if the target does not answer.

    While the record root is held, its jobs are left alone, unless `holder` is the token of the hold.
    """
    files, target = place.files, place.target
    send_due(place, settings, progress)
    named = open_jobs.list_open(files, target.name)
    if not named:
        return KeptTarget(jobs=())
    held = maintenance_lock.read_hold(files)
    if held is not None and held.token != holder:
        if held.blocks(ledger.now()):
            seen = f"{held.tell()}; it takes them up"
            left = [
                KeptJob(
                    job=job,
                    target=target.name,
                    owner=None,
                    seen=seen,
                    done=DONE[ReconcileAction.LEAVE],
                    next=maintenance_lock.HINT,
                )
                for job in sorted(named)
            ]
            return KeptTarget(jobs=tuple(left))
        progress(f"{held.tell()}, and has given no sign for more than an hour: it is ignored; {maintenance_lock.HINT}")
    # The service filters names in a bucket. A folder is listed whole, so once for all jobs.
    read = {job: ledger.read_outcomes(files, job).get(job, {}) for job in named} if is_bucket(files.root) else None
    entries = ledger.read_many_entries(files, named, read)
    judged = judge_jobs(entries, target, place.launcher, place.host, tell=None)
    found, problems = [_judge_unread(job, place) for job in named.keys() - {each.id for each in entries}], []
    for status, natives in judged:
        entry = status.entry
        begun = not entry.natives and ledger.has_begun(files, entry.id)
        verdict = decide_keep(entry, natives, resumes=place.launcher.resumes, begun=begun)
        if verdict.act is ReconcileAction.LEAVE:
            cut_off = not entry.natives and ledger.now() - entry.launched_at >= LAUNCH
            found.append(_line(entry, place, verdict, hint=f"the same launch by `{entry.owner}`" if cut_off else None))
            continue
        try:
            found.append(_act(JobHandle(entry.id, target, place.launcher, place.host), settings, progress))
        except LockHeld as held:
            found.append(_line(entry, place, verdict, left=f"{verdict.seen}; {held.holder} is at work on it"))
        except (AccessDenied, RequestRefused) as problem:
            seen = f"{verdict.seen}; {problem.message}"
            found.append(
                _line(entry, place, verdict, left=seen, hint=problem.hint or f"runtime explain {entry.id[:10]}")
            )
        except InfrastructureFailure as problem:
            problems.append(problem)
            found.append(_line(entry, place, verdict, left=f"{verdict.seen}; {problem.message}", hint=problem.hint))
    return KeptTarget(jobs=tuple(sorted(found, key=lambda each: each.job)), problems=tuple(problems))


def list_strange_folders(place: OpenTarget, names: Collection[str]) -> dict[str, int]:
    """Folder → number of open jobs in the same record root of targets that have none of these names: nobody keeps them."""
    known = {open_jobs.open_folder(name) for name in names}
    folders = [f"{open_jobs.OPEN}/{each}" for each in place.files.names(open_jobs.OPEN)]
    counts = {folder: len(place.files.names(folder)) for folder in folders if folder not in known}
    return {folder: count for folder, count in counts.items() if count}


def _judge_unread(job: str, place: OpenTarget) -> KeptJob:
    """Tell why a job of the index could not be read. Its name stays: its launch may have begun just now."""
    seen = "its folder is not there, or its launch has just begun"
    try:
        if ledger.read_entry(place.files, job) is not None:
            seen = "its launch has just begun"
    except NotPossible as problem:
        seen = problem.message
    return KeptJob(job=job, target=place.target.name, owner=None, seen=seen, done=DONE[ReconcileAction.LEAVE])


def _line(
    entry: LedgerEntry,
    place: OpenTarget,
    verdict: ReconcileDecision,
    *,
    left: str = "",
    native: str | None = None,
    hint: str | None = None,
) -> KeptJob:
    return KeptJob(
        job=entry.id,
        target=place.target.name,
        owner=entry.owner,
        seen=left or verdict.seen,
        done=DONE[ReconcileAction.LEAVE if left else verdict.act],
        native_id=native,
        next=hint,
        submitted=verdict.submitted,
    )


def _act(job: JobHandle, settings: Settings, progress: Callable[[str], None]) -> KeptJob:
    """Decide once more under the job's lock, and do it. Raises `LockHeld`."""
    # Refuses the folder of another user: their command would run as us.
    job.files.make_folder(job_folder(job.id))
    held = Lock(job.files, job.id, f"runtime keep of {owner_name()}@{system.node()}")
    held.take(patience_s=lock.STILL_S + 5, wait=False)
    reach("keep.locked")
    try:
        status, natives = judge_job(job.entry(), job.target, job.launcher, job.host)
        entry, resumes = status.entry, job.launcher.resumes
        verdict = decide_keep(entry, natives, resumes=resumes)
        if verdict.act is ReconcileAction.TAKE_UP:
            starts = _read_starts(job, entry)
            _check_machine(job, entry, natives, starts)
            forgotten = any(each.raw == FORGOTTEN for each in natives)
            in_vain = 0 if forgotten else _count_in_vain(entry, starts)
            verdict = decide_keep(entry, natives, resumes=resumes, in_vain=in_vain)
        hidden = verdict.act in (ReconcileAction.TAKE_UP, ReconcileAction.END) and any(
            each.raw == ELSEWHERE for each in natives
        )
        if hidden and job.find_life(progress):
            verdict = ReconcileDecision(act=ReconcileAction.LEAVE, seen=LIVES)
        native = None
        match verdict.act:
            case ReconcileAction.TAKE_UP:
                _check_secrets(job, entry)
                native = go_on(job, open_runs(entry), settings, held, progress=progress).native_id
            case ReconcileAction.END:
                _end(job, status, verdict, settings, progress)
            case ReconcileAction.DROP:
                announce_end(job, status, settings, progress)
                open_jobs.drop_open(job.files, job.id, job.target.name)
    finally:
        held.release()
    return _line(entry, job, verdict, native=native)


def _end(
    job: JobHandle, status: JobStatus, verdict: ReconcileDecision, settings: Settings, progress: Callable[[str], None]
) -> None:
    """End what a killed shim left running, record the end of runs that have none, and drop the job from the index."""
    entry = status.entry
    if isinstance(job.launcher, Clears) and (left := job.launcher.clear(job.target, job_folder(job.id), job.host)):
        raise NotPossible(f"something of it is left: {', '.join(left)}", hint=f"runtime cancel {job.id[:10]}")
    if verdict.reason is not None:
        state = ledger.state_of(verdict.reason)
        for index in open_runs(entry):
            end = IndexStatus(index=index, state=state, reason=verdict.reason, message=verdict.seen)
            ledger.record_end(job.files, job.id, end)
    announce_end(job, status, settings, progress)
    job.files.remove(f"{job_folder(job.id)}/secrets")
    open_jobs.drop_open(job.files, job.id, job.target.name)


def _read_starts(job: JobHandle, entry: LedgerEntry) -> dict[str, dict[str, Any]]:
    """The notes with which attempts of the open runs began, by file, the oldest attempt first."""
    runs = f"{job_folder(job.id)}/runs"
    left = set(open_runs(entry))
    begun = [int(name) for name in job.files.names(runs) if name.isdecimal() and int(name) in left]
    numbers = [(number, index) for index in begun for number in ledger.list_attempts(job.files, job.id, index)]
    names = [f"{runs}/{index}/a{number:04d}/start.json" for number, index in sorted(numbers)]
    return ledger.read_objects(job.files, names)


def _count_in_vain(entry: LedgerEntry, starts: Mapping[str, Mapping[str, Any]]) -> int:
    """How many of the newest native jobs in a row began no attempt of a run that is open."""
    begun, count = {note.get("native") for note in starts.values()}, 0
    for native in sorted(entry.natives, key=lambda each: each.epoch, reverse=True):
        if native.native_id in begun:
            break
        count += 1
    return count


def _check_machine(
    job: JobHandle, entry: LedgerEntry, natives: Sequence[NativeState], starts: Mapping[str, Mapping[str, Any]]
) -> None:
    """Raise `NotPossible` if the job ran on another machine than this target's, where it may live.

    Two machines may share a record root, and two users may have a target of the same name for different machines.
    """
    if not isinstance(job.launcher, SeesOneMachine):
        return
    here = job.launcher.read_machine(job.target, job.host)
    hosts = [str(note["host"]) for note in starts.values() if "host" in note]
    if not hosts and entry.kind == "local":
        hosts = [str(entry.intent.get("from", here))]
    if hosts and hosts[-1] != here:
        raise NotPossible(
            f"it ran on `{hosts[-1]}`, and target `{job.target.name}` is `{here}`",
            hint=f"runtime keep where `{job.target.name}` is `{hosts[-1]}`",
        )
    # A shim that is lost was started on this machine since it booted.
    if not hosts and any(each.reason is not EndReason.LOST for each in natives):
        raise NotPossible(
            f"nothing tells whether it ran on `{here}`, the machine of target `{job.target.name}`",
            hint=f"the same launch by `{entry.owner}` takes it up",
        )


def _check_secrets(job: JobHandle, entry: LedgerEntry) -> None:
    """Raise `NotPossible` for secrets that are gone from the job's folder and that only the launching machine can read."""
    if not entry.intent.get("secrets"):
        return
    folder = job_folder(job.id)
    read = job.files.read_many([f"{folder}/order.json", f"{folder}/spec.json"])
    with ledger.as_damage(job.files, job.id, "order.json"):
        paths = {**json.loads(read.get(f"{folder}/order.json") or b"{}").get("secrets", {})}
    with ledger.as_damage(job.files, job.id, "spec.json"):
        written = json.loads(read.get(f"{folder}/spec.json") or b"{}")
    spec = parse_spec(written, source=f"job `{job.id}`")
    there = {f"secrets/{name}" for name in job.files.names(f"{folder}/secrets")}
    gone = [
        ref
        for ref in secret_refs(spec)
        if not ref.name.startswith(NOTIFY)
        and ref.name in paths
        and paths[ref.name] not in there
        and ref.source.partition("://")[0] in _OF_LAUNCHER
    ]
    if gone:
        raise NotPossible(
            f"its secret {', '.join(f'`{ref.name}`' for ref in gone)} is gone, and comes from `{entry.intent.get('from')}`",
            hint=f"the same `runtime launch` by `{entry.owner}` on `{entry.intent.get('from')}` reads it again",
        )
