"""What became of jobs, for people to read: the overview of a target, one job in full, why it waits or failed, its log.

Reads the ledger and what the shim wrote beside it, and asks each backend once. A backend that does not answer makes
states unknown and is never an error of the look itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

from runtime.client.jobs.attempts import AttemptView, tell_attempts
from runtime.client.jobs.handle import JobHandle
from runtime.client.jobs.leftovers import tidy
from runtime.errors import InfrastructureFailure, RuntimeFailure
from runtime.jobs import ledger
from runtime.jobs.hosts.base import Files, Host
from runtime.jobs.identity import owner_name
from runtime.jobs.ledger import IndexStatus, JobStatus, LedgerEntry, check_index, job_folder
from runtime.jobs.plan import NativeState, Target
from runtime.jobs.spec import Dependency, JobState, When
from runtime.launchers.base import Launcher
from runtime.launchers.standing import judge_many
from runtime.reasons import EndReason
from runtime.shim.files import FOLDED
from runtime.values import dataclass

NEWEST: Final = 10
"""Jobs that an overview shows whatever became of them."""
RECENT: Final = timedelta(days=1)


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
    chosen = check_index(entry, index) if index is not None else entry.first_index if entry.indices == 1 else None
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
