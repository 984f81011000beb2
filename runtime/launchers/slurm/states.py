"""The output of `squeue` and `sacct`, read and mapped to our states and end reasons. Pure: text in, values out.

Text formats and not `--json`, which changes its shape with each release and is a plugin that many sites lack.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from runtime.end_reasons import EndReason
from runtime.jobs.plan import NativeStart, NativeState, OwnedResource
from runtime.jobs.spec import JobState

SQUEUE_FORMAT: Final = "%F|%K|%j|%T|%N|%S|%r"
OWNED_FORMAT: Final = "%F|%T|%V|%u|%j|%k"
"""Columns of a listing of our own jobs: id, state, time of submission in seconds since 1970, user, name, comment."""
MARK: Final = "research-runtime/"
"""Begins the comment of our jobs; the owner follows."""
SACCT_FORMAT: Final = "JobID,JobName,State,ExitCode,NodeList,Start,Reason"
STARTS_FORMAT: Final = "JobID,State,Start,End"
"""Columns of `sacct --duplicates`, with times in seconds since 1970."""

_WAITING: Final = (
    *("PENDING", "CONFIGURING", "POWER_UP_NODE", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD"),
    *("RESV_DEL_HOLD", "SPECIAL_EXIT"),
)
_RUNNING: Final = (
    *("RUNNING", "COMPLETING", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED", "SUSPENDED", "UPDATE_DB"),
    "EXPEDITING",
)
_FAILED: Final = JobState.FAILED

STATES: Final[Mapping[str, tuple[JobState, EndReason | None]]] = {
    **dict.fromkeys(_WAITING, (JobState.PENDING, None)),
    **dict.fromkeys(_RUNNING, (JobState.RUNNING, None)),
    "COMPLETED": (JobState.SUCCEEDED, EndReason.SUCCEEDED),
    "CANCELLED": (JobState.CANCELLED, EndReason.CANCELLED),
    "FAILED": (_FAILED, EndReason.APP_FAILED),
    "TIMEOUT": (_FAILED, EndReason.TIMEOUT),
    "DEADLINE": (_FAILED, EndReason.TIMEOUT),
    "OUT_OF_MEMORY": (_FAILED, EndReason.OOM),
    "PREEMPTED": (_FAILED, EndReason.PREEMPTED),
    "NODE_FAIL": (_FAILED, EndReason.NODE_FAILED),
    "BOOT_FAIL": (_FAILED, EndReason.NODE_FAILED),
    "RECONFIG_FAIL": (_FAILED, EndReason.NODE_FAILED),
    "LAUNCH_FAILED": (_FAILED, EndReason.SETUP_FAILED),
    # The job was started by another cluster of the federation: this copy is the twin.
    "REVOKED": (_FAILED, EndReason.DUPLICATE),
}

ENDED: Final = tuple(word for word, (state, _) in STATES.items() if state.terminal and word != "REVOKED")
"""Words for jobs that have ended everywhere; a job that is revoked here may go on in another cluster of its federation."""

WAITS_FOR: Final = frozenset(
    {
        "BeginTime",
        "Cleaning",
        "Dependency",
        "JobArrayTaskLimit",
        "JobHeldAdmin",
        "JobHeldUser",
        "Licenses",
        "Prolog",
        "Priority",
        "ReqNodeNotAvail",
        "Reservation",
        "Resources",
    }
)
"""Reasons for which a job waits. Slurm keeps the last one in place if a job ends without another."""

NO_OUTPUT_FILE: Final = 53
"""Exit signal that slurmd reports if it cannot open the output file: the folder is missing, or full."""

_MESSAGES: Final = {
    "REQUEUE_HOLD": "it was requeued and is held: `scontrol release` lets it start",
    "SPECIAL_EXIT": "it was requeued with a special exit and is held: `scontrol release` lets it start",
    "RESV_DEL_HOLD": "its reservation was deleted, and it is held",
    "SUSPENDED": "it is suspended",
    "REVOKED": "another cluster of the federation started it",
    "DEADLINE": "its deadline came before it could end",
}


_ENDS_OF_STARTS: Final = {
    # A user or a preemption requeued it while it ran.
    "REQUEUED": EndReason.PREEMPTED,
    **{
        word: reason
        for word, (_, reason) in STATES.items()
        if reason not in (None, EndReason.SUCCEEDED, EndReason.APP_FAILED)
    },
}


@dataclass(frozen=True, slots=True)
class SlurmRow:
    """One line about one native job or one task of an array."""

    job: str
    """The id of the array for a task of an array."""
    task: int | None
    name: str
    state: str
    """Slurm's word, without the text after it."""
    where: str
    start: str
    reason: str
    exit_code: int = 0
    exit_signal: int = 0
    from_accounting: bool = False

    @property
    def id(self) -> str:
        return self.job if self.task is None else f"{self.job}_{self.task}"

    @property
    def layout(self) -> Layout | None:
        return read_layout(self.name)

    @property
    def has_ended(self) -> bool:
        return judge_row(self)[0].terminal

    @property
    def refused(self) -> bool:
        """Whether Slurm refused the job as one that can never run: it keeps such a job for a while, as failed."""
        return self.state == "FAILED" and not self.where and (self.reason == "BadConstraints" or self.from_accounting)


def parse_squeue(text: str) -> list[SlurmRow]:
    """Lines in `SQUEUE_FORMAT`, one for each task of an array (`squeue -r`)."""
    rows = []
    for line in text.splitlines():
        parts = line.split("|", 6)
        if len(parts) != 7 or not parts[0].isdecimal():
            continue
        job, task, name, state, where, start, reason = parts
        known = _known(where), _known(start), _known(reason)
        rows += [SlurmRow(job, each, name, state, *known) for each in expand_tasks(task)]
    return rows


def parse_sacct(text: str) -> list[SlurmRow]:
    """Lines in `SACCT_FORMAT` of `sacct -X -P -n`."""
    rows = []
    for line in text.splitlines():
        parts = line.split("|", 6)
        if len(parts) != 7:
            continue
        number, name, state, code, where, start, reason = parts
        match = re.fullmatch(r"(\d+)(?:\+\d+)?(?:_(.+))?", number)
        if match is None:
            continue
        exit_code, _, exit_signal = code.partition(":")
        rows += [
            SlurmRow(
                job=match[1],
                task=task,
                name=name,
                state=state.split(" ")[0].rstrip("+"),
                where=_known(where),
                start=_known(start),
                reason=_known(reason),
                exit_code=int(exit_code or 0),
                exit_signal=int(exit_signal or 0),
                from_accounting=True,
            )
            for task in expand_tasks(match[2] or "N/A")
        ]
    return rows


def parse_starts(text: str) -> list[NativeStart]:
    """Lines in `STARTS_FORMAT`, oldest first: a job that was requeued has one for each time that it was started."""
    found = []
    for line in text.splitlines():
        number, _, rest = line.partition("|")
        words = rest.split("|")
        if len(words) != 3 or not words[1].isdecimal():
            continue  # it waits to be started
        state = words[0].split(" ")[0].rstrip("+")
        found.append(
            NativeStart(
                native_id=re.split("[_+]", number)[0],
                began_at=datetime.fromtimestamp(int(words[1]), UTC),
                ended_at=datetime.fromtimestamp(int(words[2]), UTC) if words[2].isdecimal() else None,
                reason=_ENDS_OF_STARTS.get(state),
                raw=state,
            )
        )
    return sorted(found, key=lambda each: each.began_at)


def expand_tasks(text: str) -> list[int | None]:
    """`N/A` → [None]; `7` → [7]; `[0-3,7%2]` → [0, 1, 2, 3, 7]; steps as in `0-8:4`."""
    if text in ("N/A", ""):
        return [None]
    found: list[int | None] = []
    for part in text.strip("[]").partition("%")[0].split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?(?::(\d+))?", part)
        if match:
            found += range(int(match[1]), int(match[2] or match[1]) + 1, int(match[3] or 1))
    return found


def _known(text: str) -> str:
    return "" if text in ("N/A", "None", "None assigned", "Unknown", "(null)") else text.strip()


# the indices behind each task, in a job's name


@dataclass(frozen=True, slots=True)
class Layout:
    """The indices of our array that the tasks of one native array serve."""

    offset: int
    each: int
    """Number of indices of one task."""
    count: int
    """Number of indices of all tasks."""

    def indices(self, task: int | None) -> Sequence[int]:
        if task is None:
            return range(self.offset, self.offset + self.count)
        first = self.offset + task * self.each
        return range(first, min(first + self.each, self.offset + self.count))

    def task_of(self, index: int) -> int | None:
        """The task that serves an index; None for an index of another native array."""
        inside = self.offset <= index < self.offset + self.count
        return (index - self.offset) // self.each if inside else None


_NAME = r"j-[0-9a-f]+\.[0-9a-f]{8}\.\d+(?:\.(\d+)x(\d+)x(\d+))?(?:\.e\d+)?"


def native_name(job: str, root: str, part: int, layout: Layout | None) -> str:
    """The job's name on Slurm: our id, a hash of the record root, the part, and the layout of an array.

    The same launch into another record root is another job.
    """
    served = "" if layout is None else f".{layout.offset}x{layout.each}x{layout.count}"
    return f"{job}.{_mark_of(root)}.{part}{served}"


def _mark_of(root: str) -> str:
    return hashlib.sha256(root.encode()).hexdigest()[:8]


def read_layout(name: str) -> Layout | None:
    """The layout in an array's name that `native_name` made; None for any other name."""
    match = re.fullmatch(_NAME, name)
    return Layout(int(match[1]), int(match[2]), int(match[3])) if match and match[1] is not None else None


def to_owned(text: str, root: str, owner: str | None, job: str | None) -> list[OwnedResource]:
    """Our jobs of a record root that have not ended, from lines in `OWNED_FORMAT`, each array once.

    A job without our comment, which a site may have replaced, is its user's.
    """
    found: dict[str, OwnedResource] = {}
    for line in text.splitlines():
        number, _, rest = line.partition("|")
        state, submitted, user, name, comment = [*rest.split("|", 4), "", "", "", ""][:5]
        if not (number.isdecimal() and submitted.isdecimal() and re.fullmatch(_NAME, name)) or state in ENDED:
            continue
        ours, place, *_ = name.split(".")
        whose = comment.removeprefix(MARK) if comment.startswith(MARK) else user
        if place == _mark_of(root) and job in (None, ours) and owner in (None, whose):
            since = datetime.fromtimestamp(int(submitted), UTC)
            found[number] = OwnedResource(job=ours, native_id=number, what="slurm job", live=True, since=since)
    return list(found.values())


# from rows to states


def merge_rows(queue: Iterable[SlurmRow], accounting: Iterable[SlurmRow]) -> list[SlurmRow]:
    """One row for each job or task: the queue's while it lives, else the accounting's, which knows exit codes."""
    merged = {row.id: row for row in queue}
    for row in accounting:
        known = merged.get(row.id)
        # Accounting lags behind the queue by seconds.
        if known is None or (known.has_ended and row.has_ended):
            merged[row.id] = row
    return list(merged.values())


def to_states(rows: Iterable[SlurmRow]) -> Iterator[NativeState]:
    """The state of each index, by the rows that `merge_rows` returns."""
    for row in rows:
        (state, reason), layout = judge_row(row), row.layout
        message = _MESSAGES.get(row.state, "") or _say(row, state)
        if row.from_accounting and not state.terminal:
            state, message = JobState.UNKNOWN, f"accounting says {row.state} and the queue has no such job"
        code = 128 + row.exit_signal if row.exit_signal else row.exit_code
        why = "" if state.terminal and row.reason in WAITS_FOR else row.reason
        for index in layout.indices(row.task) if layout else [None]:
            yield NativeState(
                native_id=row.id,
                index=index,
                state=state,
                reason=reason,
                raw=f"{row.state}/{why}" if why else row.state,
                message=message,
                exit_code=code if state.terminal and row.from_accounting else None,
                where=row.where,
            )


def judge_row(row: SlurmRow) -> tuple[JobState, EndReason | None]:
    """The state, and the reason of a job that has ended."""
    state, reason = STATES.get(row.state, (JobState.UNKNOWN, None))
    if row.state == "FAILED":
        if row.refused:
            return state, EndReason.CONFIG_INVALID
        if row.exit_signal == NO_OUTPUT_FILE if row.from_accounting else row.reason == "JobLaunchFailure":
            return state, EndReason.SETUP_FAILED
    if row.state == "DEADLINE" and not row.where:
        return state, EndReason.NO_CAPACITY
    return state, reason


def _say(row: SlurmRow, state: JobState) -> str:
    if state is JobState.PENDING and row.reason:
        return f"waits: {row.reason}"
    if row.exit_signal == NO_OUTPUT_FILE:
        return "slurm could not open the job's output file: its folder is missing on the node, or full"
    if state is JobState.UNKNOWN:
        return f"slurm says {row.state}"
    return ""
