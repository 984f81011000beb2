"""How the verbs show jobs: the overview of a target, one job, what it printed."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Final

from typer import Option

from runtime.cli.show import cut_lines, format_ago, format_count, note, paint, table_lines

if TYPE_CHECKING:
    from runtime.client.jobs.attempts import AttemptView
    from runtime.client.jobs.handle import JobHandle
    from runtime.client.jobs.status import JobLine, JobView, TargetJobs
    from runtime.jobs.ledger import IndexStatus, JobStatus
    from runtime.jobs.spec import JobState

LISTED: Final = 20
BAR: Final = 24
_STYLES: Final[Mapping[str, str]] = {"running": "cyan", "succeeded": "green", "failed": "red", "unknown": "yellow"}

OnOption = Annotated[str | None, Option("--on", metavar="TARGET", help="Target of the job, or to look at.")]
IndexOption = Annotated[int | None, Option("--index", metavar="I", help="This run of a job's array.")]
OthersOption = Annotated[bool, Option("--others", help="Also where the job is somebody else's.")]


def is_job(text: str | None) -> bool:
    """Whether it is written as a job's id, or the beginning of one, is; `last` where the newest of yours is a job."""
    return text is not None and (re.fullmatch("j-[0-9a-f]*", text) is not None or _last_job(text) is not None)


def open_job(text: str, on: str | None = None) -> JobHandle:
    """The job that an id, its beginning or `last` means. Raises `UnknownName`."""
    from runtime.client.jobs.find import find_job

    return find_job(_last_job(text) or text, target=on)


def _last_job(text: str) -> str | None:
    if text != "last":
        return None
    from runtime.client.identify import newest_job
    from runtime.config import load_settings

    return newest_job(load_settings().data_dir)


def short(job: str) -> str:
    """Enough of an id for the next command."""
    return job[:10]


def write_bytes(pieces: Iterable[bytes]) -> int:
    """How many bytes there were. A terminal gets long lines cut."""
    count = 0
    for piece in cut_lines(iter(pieces)) if sys.stdout.isatty() else pieces:
        count += sys.stdout.buffer.write(piece)
        sys.stdout.flush()
    return count


def detached(job: str) -> None:
    note(f"detached, the job goes on; `runtime logs -f {short(job)}` comes back, `runtime cancel {short(job)}` ends it")


def stuck_teller(job: str) -> Callable[[JobStatus], None]:
    """Says once what a job that is followed waits for, where that does not come by itself."""
    said: set[object] = set()

    def tell(status: JobStatus) -> None:
        if not status.state.terminal and status.reason is not None and status.reason not in said:
            said.add(status.reason)
            note(f"job {short(job)} is {_state(status.state, status.reason)}, and does not go on by itself")
            note(f"why: `runtime explain {short(job)}`; `runtime cancel {short(job)}` gives back what it holds")

    return tell


def target_lines(seen: TargetJobs, now: datetime, *, whole: bool = True) -> list[str]:
    """The jobs of a target; `whole` where nothing else is on the page."""
    from runtime.jobs.spec import JobState

    said = [f"target `{seen.target}` does not answer: {seen.problem}"] if seen.problem else []
    if not seen.jobs and said:
        return said
    if not seen.jobs:
        return [f"no jobs on `{seen.target}`; `runtime launch --help` shows how"] if whole else []
    counted = _count(sum(1 for each in seen.jobs if not each.state.terminal), "unfinished job")
    lines = [*said, *([f"{paint('jobs', 'dim')} on {seen.target}: {counted}"] if whole else [])]
    lines += table_lines([_job_row(each) for each in seen.jobs[:LISTED]])
    more = len(seen.jobs) - LISTED + seen.left_out if len(seen.jobs) > LISTED else seen.left_out
    if more > 0:
        lines.append(f"and {_count(more, 'older job')}")
    failed = [each for each in seen.jobs if each.state is JobState.FAILED]
    new = sum(each.new for each in failed)
    if failed:
        since = f", {new} since you last looked" if new else ""
        lines.append(f"{_count(len(failed), 'failed job')}{since}; why: `runtime explain {short(failed[0].job)}`")
    return lines


def _job_row(each: JobLine) -> dict[str, object]:
    from runtime.jobs.spec import JobState

    done = sum(count for state, count in each.totals.items() if state.terminal)
    return {
        "JOB": short(each.job),
        "NAME": each.name,
        "STATE": _state(each.state, each.reason),
        "DONE": f"{done}/{each.runs}",
        "FAILED": each.totals[JobState.FAILED] or None,
        "TARGET": each.target,
        "OWNER": each.owner,
        "LAUNCHED": each.launched_at,
    }


def job_lines(seen: JobView, now: datetime) -> list[str]:
    """One job in full."""
    from runtime.client.jobs.status import describe_after
    from runtime.jobs.spec import JobState

    state = _state(seen.state, seen.reason)
    title = f"{paint(seen.job, 'bold')} · {seen.name} · {seen.target} ({seen.kind})"
    lines = [f"{title} · {paint(state, _STYLES[seen.state]) if seen.state in _STYLES else state}"]
    if seen.runs > 1:
        lines += _totals_lines(seen)
    by = f" by {seen.owner}" + (f" from {seen.launched_from}" if seen.launched_from else "")
    commit = f", commit {seen.commit[:10]}" if seen.commit else ""
    branch = f" of {seen.branch}" if seen.commit and seen.branch else ""
    pairs: list[tuple[str, str | None]] = [
        ("done", _bar(seen) if seen.runs > 1 else None),
        ("launched", f"{format_ago(seen.launched_at, now)}{by}"),
        ("code", f"{seen.snapshot[:19]}{commit}{branch}" if seen.snapshot else None),
        ("cancelled", "asked for" if seen.cancelled and not seen.state.terminal else None),
        *(("after", describe_after(each)) for each in seen.after),
        *_native_pairs(seen),
        ("records", seen.records),
        ("logs", f"`runtime logs {short(seen.job)}`, {seen.logs}"),
        ("outputs", f"`runtime fetch {short(seen.job)}`, {seen.outputs}"),
    ]
    lines += [f"{paint(f'{label:<11}', 'dim')} {text}" for label, text in pairs if text]
    if seen.attempts:
        lines += ["", *table_lines([_attempt_row(each, now) for each in seen.attempts])]
    if seen.runs > 1 and seen.indices:
        lines += ["", *table_lines([index_row(each) for each in seen.indices[:LISTED]])]
        if len(seen.indices) > LISTED:
            lines.append(f"and {len(seen.indices) - LISTED} more; `--failed` lists those that failed")
    if seen.state is not JobState.SUCCEEDED:
        lines += ["", f"why: `runtime explain {short(seen.job)}`"]
    return lines


def _totals_lines(seen: JobView) -> list[str]:
    width = max(len(format_count(count)) for count in seen.totals.values())
    lines = []
    for state, count in seen.totals.items():
        if count:
            text = f"  {state:<10} {format_count(count):>{width}}"
            lines.append(paint(text, _STYLES[state]) if state in _STYLES else text)
    return lines


def _bar(seen: JobView) -> str:
    done = sum(count for state, count in seen.totals.items() if state.terminal)
    full = BAR * done // seen.runs
    return f"[{'#' * full}{'.' * (BAR - full)}] {format_count(done)} of {format_count(seen.runs)}, {100 * done // seen.runs} %"


def _native_pairs(seen: JobView) -> list[tuple[str, str | None]]:
    pairs: list[tuple[str, str | None]] = []
    for native in seen.natives[:5]:
        said = ", ".join(part for part in (native.raw, native.message) if part)
        where = f" on {native.where}" if native.where else ""
        later = f", epoch {native.epoch}" if native.epoch > 1 else ""
        pairs.append(("native", f"{native.native_id}{later}{where}" + (f": {said}" if said else "")))
    if len(seen.natives) > 5:
        pairs.append(("", f"and {len(seen.natives) - 5} more native jobs"))
    return pairs


def _attempt_row(each: AttemptView, now: datetime) -> dict[str, object]:
    return {
        "ATTEMPT": each.attempt,
        "HOST": each.host,
        "STARTED": format_ago(each.started_at, now) if each.started_at else None,
        "ENDED": format_ago(each.ended_at, now) if each.ended_at else None if each.reason else "no word yet",
        "REASON": each.reason,
        "EXIT": _code(each.exit_code),
        "MESSAGE": each.message,
    }


def _code(code: int | None) -> str | int | None:
    from runtime.jobs.traces import name_signal

    name = name_signal(code)
    return f"{code} {name}" if name else code


def index_row(each: IndexStatus) -> dict[str, object]:
    return {header: cell(each) for header, cell in INDEX_COLUMNS.items()}


INDEX_COLUMNS: Mapping[str, Callable[[Any], object]] = {
    "INDEX": lambda each: each.index,
    "STATE": lambda each: each.state,
    "REASON": lambda each: each.reason,
    "EXIT": lambda each: each.exit_code,
    "ATTEMPT": lambda each: each.attempt,
    "MESSAGE": lambda each: each.message,
}


def _state(state: JobState, reason: object) -> str:
    return f"{state} ({reason})" if reason and str(reason) != str(state) else str(state)


def summarise_job(seen: JobView) -> str:
    """One line for logs."""
    counted = ", ".join(f"{format_count(count)} {state}" for state, count in seen.totals.items() if count)
    return f"{seen.job}: {_state(seen.state, seen.reason)}" + (f", {counted} of {seen.runs}" if seen.runs > 1 else "")


def _count(number: int, noun: str) -> str:
    return f"{format_count(number)} {noun}" + ("" if number == 1 else "s")
