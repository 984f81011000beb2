"""What was launched, by job id: create-only files in the record root of the target, and what they say together.

    jobs/ID/                 the run folder; making it is the lock of a launch
      lock                   who launches now: owner, token and a counter that an observer watches
      spec.json intent.json  what was asked for, by whom, from which code; written before the backend is called
      plan.json artefacts/   what was decided
      order.json shim.py     what the shim is told, and the shim
      native/000001.json     a native job: name, id, part, epoch; one file for each that was started
      cancel  cancel.INDEX   marks
      owners/ runs/          the shim's (docs/shim.md)
    done/ID.INDEX.REASON.CODE.ATTEMPT   outcomes in names: one listing tells the state of every job
    snapshots/HEX.tar        code, by content id

Nothing is locked with flock and nothing is appended to: all of it is safe on NFS.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from runtime.jobs import JobState
from runtime.reasons import EndReason


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
    intent: Mapping[str, Any] = field(default_factory=dict)


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
    entry: LedgerEntry
    state: JobState
    reason: EndReason | None
    """Of a single job why it ended; of an array that of its first index that failed."""
    counts: Mapping[JobState, int]
    indices: tuple[IndexStatus, ...] = ()
    """Only where they were asked for."""
