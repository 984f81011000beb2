"""The status of jobs for people: the overview of a target, one job in full, and its attempts.

Reads the ledger and the shim's files beside it, and asks each backend once. A backend that does not answer makes states
unknown and raises nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from runtime.client.jobs.gc import tidy
from runtime.client.jobs.handle import JobHandle
from runtime.client.jobs.job_cache import JobFilter, JobLine, is_noted, read_target_note, save_job, save_target
from runtime.client.jobs.targets import LOCAL, OpenTarget
from runtime.client.metric_reports import ReportSummary, parse_sum
from runtime.config import Settings
from runtime.end_reasons import EndReason
from runtime.errors import InfrastructureFailure, RuntimeFailure
from runtime.jobs import ledger
from runtime.jobs.hosts.base import Files
from runtime.jobs.indices import choose_indices
from runtime.jobs.ledger import IndexStatus, JobStatus, LedgerEntry, job_folder
from runtime.jobs.plan import NativeStart, NativeState, owner_name
from runtime.jobs.spec import Dependency, JobState, When
from runtime.launchers.base import RemembersStarts
from runtime.launchers.job_status import UNSEEN, judge_jobs
from runtime.shim.files import FOLDED, METRICS_SUM
from runtime.shim.retry import LOSS, name_end, name_loss
from runtime.system import system

ATTEMPTS_SHOWN: Final = 20
TIMED_RECENT: Final = 50
"""Ended jobs of a target whose times are read unasked, the newest."""
TIMED: Final = 1000
HELD: Final = "the machine is held and waits for a change of the code"
RUNS_TIMED: Final = 4
"""Runs of an array whose times stand for it: its first ones for the beginning, its last ones for the end."""
REPORTS_SHOWN: Final = 16
"""Runs of an array whose reports are read while they go on."""
GUESSED: Final = 8
"""The highest attempt of a run that goes on whose reports are looked for: asking for its number costs an exchange a run."""
UNTOLD: Final = ("stopped", EndReason.LOST)
"""Ends of attempts without a cause."""
NEAR: Final = timedelta(minutes=1)
"""Largest distance between the clocks of a node and of the backend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadableJob:
    """A job of which nothing can be told, since a file of its record is damaged. It may run."""

    job: str
    file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetJobs:
    target: str
    records: str
    jobs: tuple[JobLine, ...] = ()
    """Jobs that run or wait, jobs that failed in the last day, and the newest; or those that were asked for."""
    left_out: int = 0
    problem: str | None = None
    """Why the target, or the backend behind its record root, did not answer."""
    as_of: datetime | None = None
    """When it was read; None if it never was from here."""
    unreadable: tuple[UnreadableJob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AfterView:
    job: str
    when: When
    state: JobState | None
    """None if the record root has no such job any more, or shows it to its owner alone."""
    reason: EndReason | None
    hopeless: bool
    """The job has ended in another way than is waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptView:
    index: int
    attempt: int
    native: str | None
    host: str | None
    started_at: datetime | None
    ended_at: datetime | None
    reason: EndReason | str | None
    """None while it runs, or if it left no end and no later attempt began."""
    exit_code: int | None
    message: str
    restarts: int | None = None
    """Earlier starts of its native job by the backend; None if the backend does not count them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeView:
    native_id: str
    name: str
    part: int
    epoch: int
    state: JobState | None
    """None if every run has its result, so that the backend was not asked."""
    raw: str
    where: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReports:
    """What the newest attempt of a run has reported."""

    index: int
    attempt: int
    step: float | None
    of: float | None
    metrics: Mapping[str, float]
    metric_ranges: Mapping[str, Sequence[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
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
    """Attempts of the runs that were asked for, or of a job with one run."""
    indices: tuple[IndexStatus, ...]
    """Runs that have not succeeded, or the only run; several runs that were asked for, whatever their state."""
    records: str
    logs: str
    outputs: str
    after: tuple[AfterView, ...] = ()
    """The jobs that it comes after, until its first run begins."""
    reports: tuple[RunReports, ...] = ()
    """What its only run, or the runs that go on, have reported; `REPORTS_SHOWN` at most."""
    problem: str | None = None


def read_target(
    place: OpenTarget,
    *,
    now: datetime,
    looked_at: datetime | None = None,
    wanted: JobFilter | None = None,
    settings: Settings | None = None,
) -> TargetJobs:
    """Read the jobs of a target with one listing of outcomes, three reads, and one question to the backend.

    With `settings` this machine remembers the answer.
    """
    files, wanted = place.files, wanted or JobFilter()
    damaged: list[ledger.DamagedFile] = []
    entries = ledger.read_many_entries(files, ledger.list_jobs(files), tell=damaged.append)
    silent: list[InfrastructureFailure] = []
    judged = judge_jobs(entries, place.target, place.launcher, place.host, tell=silent.append)
    ranked = sorted((status for status, _ in judged), key=lambda each: each.entry.launched_at, reverse=True)
    living = [each for each in ranked if not each.state.terminal]
    ended = [each for each in ranked if each.state.terminal][: TIMED if wanted.chooses else TIMED_RECENT]
    times = read_times(files, [*living[:TIMED], *ended])
    lines = [_line(status, times.get(status.entry.id, JobTimes()), looked_at, now) for status in ranked]
    shown = wanted.apply(lines, now)
    chosen = {each.job for each in shown}
    tidy([status for status in ranked if status.entry.id in chosen], place, owner=owner_name())
    if settings is not None and place.target.name != LOCAL:
        known = read_target_note(place.target, settings)
        before = {each.job: each for each in known.jobs} if known and (silent or damaged) else {}
        # A backend that does not answer takes back nothing of what it said before, and neither does a damaged record.
        seen = [before.get(each.job, each) if silent and each.state is JobState.UNKNOWN else each for each in lines]
        seen += [before[each.job] for each in damaged if each.job in before]
        save_target(place.target, seen, settings, at=now)
    return TargetJobs(
        target=place.target.name,
        records=files.root,
        jobs=tuple(shown),
        left_out=0 if wanted.chooses else len(ranked) - len(shown),
        problem=silent[0].message if silent else None,
        as_of=now,
        unreadable=tuple(UnreadableJob(job=each.job, file=each.file) for each in damaged),
    )


def note_status(job: JobHandle, status: JobStatus, settings: Settings) -> None:
    """Let this machine's overview know what was seen of a job on a target that it does not ask."""
    if job.target.name != LOCAL and status.state is not JobState.UNKNOWN and is_noted(job.target, settings):
        now = system.now()
        times = read_times(job.files, [status]).get(job.id, JobTimes())
        save_job(job.target, _line(status, times, None, now), settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTimes:
    """When a job began and ended, as far as its runs wrote it down."""

    began: datetime | None = None
    first_failed: datetime | None = None
    ended: datetime | None = None


def read_times(files: Files, statuses: Sequence[JobStatus]) -> dict[str, JobTimes]:
    """Return the times of jobs in one read: of an array, from the first starts of its first runs and the ends of its last."""
    wanted: dict[str, tuple[list[str], list[str], list[str]]] = {}
    for status in statuses:
        entry, runs = status.entry, f"{job_folder(status.entry.id)}/runs"
        first, ended, failed = entry.first_index, list[int](), list[int]()
        if status.state.terminal:
            ended = sorted(entry.outcomes)[-RUNS_TIMED:]
        if status.state is JobState.FAILED:
            failed = [index for index, each in entry.outcomes.items() if ledger.state_of(each.reason).terminal]
        wanted[entry.id] = (
            [f"{runs}/{index}/a0001/start.json" for index in range(first, first + min(entry.indices, RUNS_TIMED))],
            [f"{runs}/{index}/result" for index in ended],
            [f"{runs}/{min(failed)}/result"] if failed else [],
        )
    names = dict.fromkeys(name for groups in wanted.values() for group in groups for name in group)
    read = ledger.read_objects(files, names) if names else {}
    at = {name: found for name, value in read.items() if (found := _at(value)) is not None}
    return {
        job: JobTimes(
            began=min((at[name] for name in starts if name in at), default=None),
            ended=max((at[name] for name in ends if name in at), default=None),
            first_failed=next((at[name] for name in failures if name in at), None),
        )
        for job, (starts, ends, failures) in wanted.items()
    }


def _line(status: JobStatus, times: JobTimes, looked_at: datetime | None, now: datetime) -> JobLine:
    entry = status.entry
    ended = times.first_failed if status.state is JobState.FAILED else times.ended if status.state.terminal else None
    new = status.state is JobState.FAILED and (looked_at is None or (ended or entry.launched_at) > looked_at)
    until = times.ended if status.state.terminal else now
    gpus = entry.intent.get("gpus")
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
        ended_at=ended,
        new=new,
        gpus=gpus if isinstance(gpus, int | float) else None,
        started_at=times.began,
        elapsed_s=max(0.0, (until - times.began).total_seconds()) if until and times.began else None,
        as_of=now,
    )


def totals_of(counts: Mapping[JobState, int]) -> dict[JobState, int]:
    return {state: counts.get(state, 0) for state in JobState}


def read_job(
    job: JobHandle,
    *,
    index: Sequence[str] | None = None,
    failed_only: bool = False,
    settings: Settings | None = None,
) -> JobView:
    """Read a job in full, with the attempts of the runs that `index` lists. With `settings` this machine remembers it."""
    silent: list[InfrastructureFailure] = []
    status, said = job.look(tell=silent.append)
    tidy([status], job, owner=owner_name())
    if settings is not None and not silent:
        note_status(job, status, settings)
    entry = status.entry
    chosen = choose_indices(entry, index) or ((entry.first_index,) if entry.indices == 1 else ())
    indices = [each for each in status.indices if entry.indices == 1 or each.state is not JobState.SUCCEEDED]
    if len(chosen) > 1:
        indices = [each for each in status.indices if each.index in set(chosen)]
    if failed_only:
        indices = [each for each in status.indices if each.state is JobState.FAILED]
    attempts = tuple(each for run in chosen for each in report_attempts(job, entry, run))
    if entry.intent.get("hold") and status.state is JobState.RUNNING and attempts and attempts[-1].reason is not None:
        indices = [replace(each, message=HELD) for each in indices]
    folder = f"{job.files.root}/{job_folder(job.id)}"
    run = chosen[0] if len(chosen) == 1 else "INDEX"
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
        natives=tuple(_native_views(status, said)),
        attempts=attempts,
        indices=tuple(indices),
        records=folder,
        logs=f"{folder}/runs/{log}",
        outputs=f"{folder}/runs/{run}/output/aATTEMPT",
        after=tuple(read_after(job, entry)),
        reports=tuple(_read_reports(job, status, attempts)),
        problem=silent[0].message if silent else None,
    )


def _read_reports(job: JobHandle, status: JobStatus, known: Sequence[AttemptView]) -> Iterator[RunReports]:
    """Yield the last numbers of a job's only run, or of the first runs of an array that go on, by one read."""
    runs = [each for each in status.indices if status.entry.indices == 1 or each.state is JobState.RUNNING]
    newest = {each.index: each.attempt for each in known}
    attempts = {each.index: each.attempt or newest.get(each.index) for each in runs[:REPORTS_SHOWN]}
    for index, (attempt, summed) in read_sums(job.files, job.id, attempts).items():
        yield RunReports(
            index=index,
            attempt=attempt,
            step=summed.step,
            of=summed.of,
            metrics=summed.metrics,
            metric_ranges=summed.ranges,
        )


def read_sums(files: Files, job: str, attempts: Mapping[int, int | None]) -> dict[int, tuple[int, ReportSummary]]:
    """Return what runs have reported, by index, in one read: the attempt of that number, or the newest of the first ones if
    it is not known."""
    places = {
        f"{job_folder(job)}/runs/{index}/a{number:04d}/{METRICS_SUM}": (index, number)
        for index, attempt in attempts.items()
        for number in (range(1, GUESSED + 1) if attempt is None else [attempt])
    }
    read = files.read_many(places) if places else {}
    found: dict[int, tuple[int, ReportSummary]] = {}
    for name, (index, number) in places.items():
        if name in read and (summed := parse_sum(read[name])) is not None:
            found[index] = number, summed
    return found


def read_after(job: JobHandle, entry: LedgerEntry) -> list[AfterView]:
    """Read the jobs that this one comes after; none once one of its runs has begun."""
    wanted = [Dependency.read(text) for text in entry.intent.get("after", ())]
    if not wanted or entry.outcomes or job.files.names(f"{job_folder(job.id)}/runs"):
        return []
    found = []
    for each in wanted:
        status = None
        try:
            status, _ = JobHandle(each.job, job.target, job.launcher, job.host).look()
        except RuntimeFailure:
            pass  # it was collected since, or belongs to another user
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


def _native_views(status: JobStatus, states: Sequence[NativeState]) -> Iterator[NativeView]:
    said: dict[str, NativeState] = {}
    for each in states:
        # Some backends report an array member by member; the first one stands for the array.
        said.setdefault(each.native_id, each)
        said.setdefault(each.native_id.rpartition("_")[0], each)
    for native in status.entry.natives:
        state = said.get(native.native_id)
        if state and state.raw in UNSEEN and not status.state.terminal:
            state = replace(state, state=JobState.UNKNOWN)
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


def read_attempts(files: Files, job: str, index: int) -> list[AttemptView]:
    run = f"{job_folder(job)}/runs/{index}"
    numbers = ledger.list_attempts(files, job, index)[-ATTEMPTS_SHOWN:]
    ends = {
        number: next((name for name in files.names(f"{run}/a{number:04d}", "end.") if name.count(".") == 2), None)
        for number in numbers
    }
    wanted = [f"{run}/result", *(f"{run}/a{number:04d}/start.json" for number in numbers)]
    wanted += [f"{run}/a{number:04d}/{name}" for number, name in ends.items() if name]
    untold = [number for number, name in ends.items() if name is None or name.startswith("end.stopped.")]
    wanted += [f"{run}/a{number:04d}/{LOSS}" for number in untold]
    read = ledger.read_objects(files, wanted)
    result = read.get(f"{run}/result", {})
    found = []
    for number in numbers:
        start = read.get(f"{run}/a{number:04d}/start.json", {})
        end = read.get(f"{run}/a{number:04d}/{ends[number]}", {})
        if not end and result.get("attempt") == number:
            end = result
        end = name_loss(end, read.get(f"{run}/a{number:04d}/{LOSS}"))  # type: ignore[no-untyped-call]
        if not end and number != numbers[-1]:
            end = {"reason": EndReason.LOST, "message": "it left no word, and the next one began"}
        if end.get("reason") == "stopped" and "failures" in start:
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


def report_attempts(job: JobHandle, entry: LedgerEntry, index: int) -> list[AttemptView]:
    """Read the newest attempts of a run, with the backend's reasons for ends that the attempts could not know."""
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


def join_starts(attempts: Sequence[AttemptView], starts: Sequence[NativeStart], kind: str) -> list[AttemptView]:
    """Give attempts the backend's reason for the start that each ran in; if one start had several attempts, the last one
    ended with it."""
    last = {start: each.attempt for each in attempts if (start := _start_of(each, starts)) is not None}
    reasons = {attempt: start for start, attempt in last.items() if start.reason is not None}
    return [
        replace(each, reason=start.reason, message=f"{kind} says of that start: {start.raw}")
        if each.reason in UNTOLD and (start := reasons.get(each.attempt))
        else each
        for each in attempts
    ]


def _start_of(attempt: AttemptView, starts: Sequence[NativeStart]) -> NativeStart | None:
    """Find the start that an attempt ran in: by its number, or by the nearest time, because two clocks are compared."""
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
    # The later of two that touch: an attempt begins after its start.
    return min((start for start in reversed(mine) if distance(start) <= NEAR), key=difference, default=None)


def _at(note: Mapping[str, Any]) -> datetime | None:
    return datetime.fromtimestamp(note["at"], UTC) if "at" in note else None
