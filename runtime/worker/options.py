"""The options of a worker, and the result that it returns when it has left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final, Literal

from runtime.queues.base import DEFAULT_LEASE
from runtime.system import system
from runtime.units import Span, read_span, to_span

EntryKind = Literal["workflow", "command", "function"]
ENTRY_KINDS: Final[tuple[EntryKind, ...]] = ("workflow", "command", "function")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    slots: int | Literal["auto"] = 1
    gpus_per_slot: float = 0
    idle_timeout: Span | None = None
    """Time without work after which the worker leaves; None stays."""
    wait_for_first: bool = False
    """Do not leave for idleness before the first task came."""
    max_tasks: int | None = None
    max_consecutive_failures: int = 3
    """Distinct tasks that fail in a row, before any has succeeded, until the worker leaves with exit code 1; 0 never does."""
    lease: Span = DEFAULT_LEASE
    grace: Span = timedelta(seconds=30)
    """Time between asking attempts to stop and killing them."""
    reuse_process: bool = False
    accept: frozenset[EntryKind] = frozenset(ENTRY_KINDS)
    labels: Mapping[str, str] = field(default_factory=dict)
    look_ahead: int | None = None
    """Tasks held beyond the free slots; None derives the number from how long tasks take."""
    name: str | None = None
    metrics_address: tuple[str, int] | None = None
    owns_process: bool = False
    """The process serves this worker alone, as under `runtime worker`: the worker ends the orphans that fall to the
    process, and handles its notices and signals."""

    def __post_init__(self) -> None:
        for name in ("idle_timeout", "lease", "grace"):
            object.__setattr__(self, name, read_span(getattr(self, name), name))

    @property
    def idle_time(self) -> timedelta | None:
        return read_span(self.idle_timeout, "idle_timeout")

    @property
    def lease_time(self) -> timedelta:
        return to_span(self.lease, "lease")

    @property
    def grace_time(self) -> timedelta:
        return to_span(self.grace, "grace")


@dataclass(frozen=True, slots=True)
class WorkerResult:
    exit_code: int
    succeeded: int
    failed: int
    released: int
    reason: str


def new_worker_name() -> str:
    """Make a name, `w-HOST-RANDOM`, that is unique in the world and sorts by host."""
    host = "".join(c for c in system.node().lower() if c.isalnum() or c == "-")[:24].strip("-") or "host"
    return f"w-{host}-{system.urandom(4).hex()}"
