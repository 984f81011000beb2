"""What the runs of a job returned and reported: a row for each, in the order of their indices. No pickle is loaded."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from runtime.client.jobs.handle import JobHandle
from runtime.client.jobs.status import GUESSED
from runtime.client.metric_reports import ReportSummary, parse_sum
from runtime.client.params import name_params, params_of_packed, read_word
from runtime.client.values import StoredValue, parse_stored
from runtime.end_reasons import EndReason
from runtime.jobs import ledger
from runtime.jobs.hosts.base import Files
from runtime.jobs.ledger import IndexStatus, LedgerEntry, job_folder
from runtime.jobs.spec import JobState
from runtime.shim.files import METRICS_SUM, VALUE

BATCH: Final = 200
"""Runs whose files are read in one exchange."""
_PARAM: Final = "RUNTIME_PARAM_"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """A run of a job, with what its last attempt returned and reported."""

    job: str
    index: int
    params: Mapping[str, Any] = field(default_factory=dict)
    """What the run was called with, or its place in the grid; empty if that is a pickle."""
    state: JobState
    reason: EndReason | None = None
    message: str | None = None
    value: Any = None
    value_type: str | None = None
    """The type of a value that only the call's `result()` loads; None for one that is in `value`."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    metric_ranges: Mapping[str, Sequence[float]] = field(default_factory=dict)
    exit_code: int | None = None
    attempts: int = 0
    started_at: datetime | None = None
    """When its last attempt began."""
    ended_at: datetime | None = None
    duration_s: float | None = None
    outputs: str | None = None
    """The folder of its last attempt's outputs."""


@dataclass(frozen=True, slots=True)
class RunFiles:
    """What lies in the record root of a run."""

    result: Mapping[str, Any]
    start: Mapping[str, Any]
    value: StoredValue | None
    reports: ReportSummary | None
    attempt: int
    outputs: str | None


def read_run_results(job: JobHandle) -> Iterator[RunResult]:
    """Yield the rows of a job. Asks the backend once, and reads the files of `BATCH` runs at a time."""
    status = job.status(indices=True)
    params = read_params(job.files, status.entry)
    runs = iter(status.indices)
    while batch := list(itertools.islice(runs, BATCH)):
        read = read_run_files(job.files, status.entry, batch)
        for run in batch:
            yield _row(job.id, run, params.get(run.index, {}), read[run.index])


def read_params(files: Files, entry: LedgerEntry) -> dict[int, dict[str, Any]]:
    """Return the parameters of each run by index; a single call's argument, and an item, are parameters too."""
    folder = job_folder(entry.id)
    read = ledger.read_objects(files, [f"{folder}/order.json", f"{folder}/spec.json"])
    order, spec = read.get(f"{folder}/order.json", {}), read.get(f"{folder}/spec.json", {})
    named = (spec.get("array") or {}).get("params") or {}
    names = {name.upper(): name for name in named} if isinstance(named, Mapping) else {}
    call = order.get("call") or {}
    found: dict[int, dict[str, Any]] = {}
    for index, run in (order.get("runs") or {}).items():
        if call.get("packed"):
            found[int(index)] = params_of_packed(
                run["item"] if "item" in run else next(iter(call.get("args") or ()), None)
            )
        elif "item" in run:
            found[int(index)] = name_params(run["item"])
        elif call:
            args = call.get("args") or []
            found[int(index)] = {**(name_params(args[0]) if len(args) == 1 else {}), **(call.get("kwargs") or {})}
        else:
            found[int(index)] = {
                names.get(name.removeprefix(_PARAM), name.removeprefix(_PARAM).lower()): read_word(text)
                for name, text in (run.get("env") or {}).items()
                if name.startswith(_PARAM)
            }
    return found


def read_run_files(files: Files, entry: LedgerEntry, runs: Sequence[IndexStatus]) -> dict[int, RunFiles]:
    """Read what the last attempts of these runs left, by index; results that were carried over where they were made."""
    own = job_folder(entry.id)
    tried = {run.index: _attempts(run) for run in runs}
    names = [f"{own}/runs/{run.index}/result" for run in runs if run.state.terminal]
    names += [
        f"{own}/runs/{index}/a{number:04d}/{name}"
        for index, numbers in tried.items()
        for number in numbers
        for name in ("start.json", VALUE, METRICS_SUM)
    ]
    read = files.read_many(names)
    found: dict[int, RunFiles] = {}
    folders: dict[int, tuple[Mapping[str, Any], str, int]] = {}
    for run in runs:
        result = _parse(read.get(f"{own}/runs/{run.index}/result"))
        made_in = result.get("from") or entry.id
        numbers = [each for each in tried[run.index] if f"{own}/runs/{run.index}/a{each:04d}/start.json" in read]
        number = max(numbers or tried[run.index], default=0)
        folders[run.index] = result, f"{job_folder(made_in)}/runs/{run.index}", number
    elsewhere = [
        f"{folder}/a{number:04d}/{name}"
        for _, folder, number in folders.values()
        for name in ("start.json", VALUE, METRICS_SUM)
        if not folder.startswith(f"{own}/")
    ]
    read |= files.read_many(elsewhere) if elsewhere else {}
    for index, (result, folder, number) in folders.items():
        attempt = f"{folder}/a{number:04d}"
        summed, value = read.get(f"{attempt}/{METRICS_SUM}"), read.get(f"{attempt}/{VALUE}")
        found[index] = RunFiles(
            result=result,
            start=_parse(read.get(f"{attempt}/start.json")),
            value=_parse_value(value),
            reports=parse_sum(summed) if summed is not None else None,
            attempt=number,
            outputs=f"{files.root}/{folder}/output/a{number:04d}" if number else None,
        )
    return found


def _attempts(run: IndexStatus) -> Sequence[int]:
    """The number of the last attempt of an ended run; of one that runs, the numbers that it may have."""
    if run.attempt:
        return [run.attempt]
    return range(1, GUESSED + 1) if run.state is not JobState.PENDING else []


def _parse(content: bytes | None) -> Mapping[str, Any]:
    try:
        said = json.loads(content or b"{}")
    except (ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}


def _parse_value(content: bytes | None) -> StoredValue | None:
    try:
        return None if content is None else parse_stored(content)
    except (ValueError, RecursionError):
        return None


def _row(job: str, run: IndexStatus, params: Mapping[str, Any], read: RunFiles) -> RunResult:
    stored = read.value
    value, kind, message = None, None, str(read.result.get("message") or run.message) or None
    if stored is not None and stored.raised:
        message = f"{stored.head.get('type')}: {stored.head.get('message')}"
    elif stored is not None and stored.head["form"] == "json":
        value = json.loads(stored.body)
    elif stored is not None:
        kind = str(stored.head.get("type"))
    started, ended = _time(read.start), _time(read.result)
    return RunResult(
        job=job,
        index=run.index,
        params=params,
        state=run.state,
        reason=run.reason if run.state.terminal else None,
        message=message,
        value=value,
        value_type=kind,
        metrics=read.reports.metrics if read.reports else {},
        metric_ranges=read.reports.ranges if read.reports else {},
        exit_code=run.exit_code,
        attempts=read.attempt if read.start else 0,
        started_at=started,
        ended_at=ended,
        duration_s=round((ended - started).total_seconds(), 3) if started and ended else None,
        outputs=read.outputs if read.start else None,
    )


def _time(note: Mapping[str, Any]) -> datetime | None:
    at = note.get("at")
    return datetime.fromtimestamp(at, UTC) if isinstance(at, int | float) else None
