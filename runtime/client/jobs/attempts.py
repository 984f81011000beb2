"""The attempts of a run, as the shim's notes and the backend's history have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from runtime.client.jobs.handle import JobHandle
from runtime.errors import RuntimeFailure
from runtime.jobs import ledger
from runtime.jobs.hosts.base import Files
from runtime.jobs.ledger import LedgerEntry, job_folder
from runtime.jobs.plan import NativeStart
from runtime.launchers.base import RemembersStarts
from runtime.reasons import EndReason
from runtime.values import dataclass, replace

ATTEMPTS_SHOWN: Final = 20


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


def read_attempts(files: Files, job: str, index: int) -> list[AttemptView]:
    """The newest attempts of a run, oldest first."""
    run = f"{job_folder(job)}/runs/{index}"
    numbers = ledger.list_attempts(files, job, index)[-ATTEMPTS_SHOWN:]
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
