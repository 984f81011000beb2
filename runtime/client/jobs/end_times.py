"""When jobs ended, also those that left no result: by the last sign that anything has of them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import UTC, datetime

from runtime.jobs import ledger
from runtime.jobs.hosts.base import Files
from runtime.jobs.indices import open_runs
from runtime.jobs.ledger import JobStatus, LedgerEntry, job_folder
from runtime.shim.common import BEAT_S


def read_ends(files: Files, statuses: Sequence[JobStatus], *, before: datetime | None = None) -> dict[str, datetime]:
    """Job → when its last result was committed, or the latest sign of it if it has runs without one.

    Jobs that are younger than `before` by their results are not searched for later signs.
    """
    found, names = {}, {}
    for status in statuses:
        found[status.entry.id] = status.entry.launched_at
        for index in status.entry.outcomes:
            names[f"{job_folder(status.entry.id)}/runs/{index}/result"] = status.entry.id
    for name, result in ledger.read_objects(files, names).items() if names else ():
        at = datetime.fromtimestamp(result["at"], UTC)
        found[names[name]] = max(found[names[name]], at)
    for status in statuses:
        job = status.entry.id
        if ended_silently(status) and (before is None or found[job] <= before):
            starts = [each.at for each in status.entry.natives]
            found[job] = max([found[job], *starts, *_read_signs(files, status.entry)])
    return found


def _read_signs(files: Files, entry: LedgerEntry) -> list[datetime]:
    """When the newest attempts of runs without a result may have ended: the counter of an attempt is 1 at its start and moves every `BEAT_S`."""
    runs = f"{job_folder(entry.id)}/runs"
    left = set(open_runs(entry, cancelled=True))
    begun = [int(name) for name in files.names(runs) if name.isdecimal() and int(name) in left]
    newest = [(index, max(ledger.list_attempts(files, entry.id, index), default=0)) for index in begun]
    starts = {
        f"{runs}/{index}/a{number:04d}/start.json": f"{runs}/{index}/a{number:04d}/beat" for index, number in newest
    }
    notes = ledger.read_objects(files, starts) if starts else {}
    beats = files.read_many([starts[name] for name in notes]) if notes else {}
    found = []
    for name, note in notes.items():
        beat = beats.get(starts[name], b"")
        with contextlib.suppress(KeyError, ValueError, TypeError, OverflowError, OSError):
            found.append(datetime.fromtimestamp(note["at"] + BEAT_S * (int(beat) - 1 if beat.isdigit() else 0), UTC))
    return found


def ended_silently(status: JobStatus) -> bool:
    """Whether a job has ended and its shim left no result of some run: it was killed, or its machine went."""
    entry = status.entry
    return status.state.terminal and bool(entry.natives) and len(entry.outcomes) < entry.indices
