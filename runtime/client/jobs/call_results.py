"""The values of a job's calls, read from the attempts that committed its results."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import CancelledError
from typing import Any

from runtime.client.values import CallFailed, End, StoredValue, load_raised, load_returned, parse_stored
from runtime.end_reasons import EndReason
from runtime.errors import NotPossible
from runtime.jobs.hosts.base import Files
from runtime.jobs.ledger import IndexStatus, LedgerEntry, RunOutcome, job_folder, read_objects
from runtime.jobs.plan import owner_name
from runtime.shim.files import VALUE


def read_stored(files: Files, job: str, outcomes: Mapping[int, RunOutcome]) -> dict[int, StoredValue | None]:
    """Return the value file of each index's last attempt, None if there is none. A result that `retry` carried over is read
    from the job that made it."""
    places = {index: _place(job, index, outcome.attempt) for index, outcome in outcomes.items()}
    found = files.read_many(places.values())
    missing = [index for index, place in places.items() if place not in found]
    if missing:
        results = {index: f"{job_folder(job)}/runs/{index}/result" for index in missing}
        notes = read_objects(files, results.values())
        for index, name in results.items():
            if before := notes.get(name, {}).get("from"):
                places[index] = _place(before, index, outcomes[index].attempt)
        found |= files.read_many([places[index] for index in missing])
    return {index: parse_stored(found[place]) if place in found else None for index, place in places.items()}


def _place(job: str, index: int, attempt: int) -> str:
    return f"{job_folder(job)}/runs/{index}/a{attempt:04d}/{VALUE}"


def end_of(entry: LedgerEntry, run: IndexStatus) -> RunOutcome:
    """Return how a run ended: the result that its shim committed, or else the state that the backend reports."""
    if run.index in entry.outcomes:
        return entry.outcomes[run.index]
    reason = run.reason or EndReason.LOST
    return RunOutcome(job=entry.id, index=run.index, reason=reason, code=run.exit_code or 1, attempt=run.attempt or 0)


def check_own(entry: LedgerEntry) -> None:
    """Raise `NotPossible` for the job of another user, whose pickles this process does not load."""
    if entry.owner != owner_name():
        raise NotPossible(
            f"the values of job `{entry.id}` are `{entry.owner}`'s, and loading them could run code of theirs",
            hint="let its owner write what you need to a file: `runtime fetch` copies the outputs",
        )


def read_ends(files: Files, entry: LedgerEntry, outcomes: Mapping[int, RunOutcome]) -> dict[int, End]:
    """Return the ends of runs by their indices, whose values are read, and not yet loaded."""
    stored = read_stored(files, entry.id, outcomes)
    return {index: _end(stored[index], outcome, describe_call(entry, index)) for index, outcome in outcomes.items()}


def _end(stored: StoredValue | None, outcome: RunOutcome, what: str) -> End:
    def take() -> Any:
        if outcome.reason is EndReason.CANCELLED:
            raise CancelledError(f"{what} was cancelled")
        return take_value(stored, outcome, what)

    if outcome.reason is EndReason.SUCCEEDED:
        return End(take=take)
    raised = stored.describe() if stored and stored.raised else None
    return End(take=take, cancelled=outcome.reason is EndReason.CANCELLED, failure=raised or str(outcome.reason))


def take_value(stored: StoredValue | None, outcome: RunOutcome, what: str) -> Any:
    """Return the value of an ended run, or raise its function's exception. Raises `CallFailed` for a run without either."""
    problem = find_problem(stored, outcome, what)
    if problem is not None:
        raise problem
    assert stored is not None
    return load_returned(stored, what)


def find_problem(stored: StoredValue | None, outcome: RunOutcome, what: str) -> BaseException | None:
    """Return the exception of an ended run's function, a `CallFailed` for a run without a value, or None."""
    if outcome.reason is EndReason.SUCCEEDED and stored is not None and not stored.raised:
        return None
    if stored is not None and stored.raised and outcome.reason is EndReason.APP_FAILED:
        return load_raised(stored, what)
    hint = f"runtime explain {outcome.job[:10]} --index {outcome.index}"
    if outcome.reason is EndReason.SUCCEEDED:
        return CallFailed(f"{what} left no value: it runs a command, or its function ended the process", hint=hint)
    code = f", exit code {outcome.code}" if outcome.reason is EndReason.APP_FAILED else ""
    return CallFailed(f"{what} ended without a value: {outcome.reason}{code}", hint=hint)


def describe_call(entry: LedgerEntry, index: int) -> str:
    """Return the name of a run for messages, such as `run 3 of sac (j-12345678)`."""
    whole = f"{entry.name} ({entry.id[:10]})"
    return whole if entry.indices == 1 else f"run {index} of {whole}"
