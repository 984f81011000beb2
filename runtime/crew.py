"""The worker's side of running attempts: a guardian, its children, and what is outstanding on each slot.

A slot runs one attempt at a time. Orders go to it in a row and end in that order. Nothing here blocks or uses
threads: the worker's loop passes on readable keys, and calls `tick` when `next_deadline` has come.
"""

from __future__ import annotations

import selectors
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from runtime.reasons import EndReason

LOG_TAIL_BYTES: Final = 64 * 1024


@dataclass(slots=True, eq=False, kw_only=True)
class Order:
    """What one attempt should do. Treated as frozen; it is not declared so because that triples its cost."""

    token: str
    body: str
    """The task's wire JSON."""
    task_id: str
    generation: int = 1
    attempt: int = 1
    """A count from 1; it may repeat."""
    experiment: str = "default"
    timeout_s: float | None = None
    memory_bytes: int = 0
    """What the attempt's processes may hold together; 0 means no limit of ours."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Further variables, such as CUDA_VISIBLE_DEVICES."""
    output_dir: str = ""
    """Made on first use and removed if it stayed empty."""
    checkpoint_dir: str = ""
    scratch_root: str = ""
    """The attempt's scratch is `<scratch_root>/<token>`."""
    cwd: str | None = None
    code_dir: str | None = None
    """A snapshot's tree: first on the import path, and the working directory where `cwd` is None."""
    snapshot: str | None = None
    """The content id of that tree."""


@dataclass(slots=True, eq=False)
class Ended:
    """How an attempt ended. By then its whole process tree is gone."""

    token: str
    slot: int
    reason: EndReason
    started_at: float
    """Seconds since the epoch; 0 if it never started."""
    ended_at: float
    value: str = ""
    """JSON text of what a function returned; empty for None."""
    message: str | None = None
    exit_code: int | None = None
    signal: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    progressed: bool = False
    """It reported progress, or left a new file in its checkpoint folder."""
    log: bytes = b""
    """The last 64 KiB of standard output and error."""
    log_bytes: int = 0
    """How much there was in all."""
    undrained: bytes = b""
    """What `drain_log` has not returned; the whole log if it was never called."""
    max_rss_bytes: int | None = None
    """Peak of the attempt's own process; None where it shared a warm one too shortly to tell."""
    not_started: bool = False
    """It never began and counts in no budget: a stop, or the end of the crew, came first."""


@dataclass(slots=True, eq=False)
class Progress:
    """The last word of a running attempt."""

    at: float
    done: float | None = None
    total: float | None = None
    text: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True, frozen=True, kw_only=True)
class CrewSettings:
    reuse: bool = False
    """Warm children run many functions each; otherwise each function or workflow gets a fresh process."""
    hold_fds: tuple[int, ...] = ()
    """Descriptors whose locks stand for the worker's life; the guardian holds them until nothing of ours runs."""
    max_outstanding: int = 64
    """Orders a slot takes at a time, the running one included."""
    max_tasks_per_child: int = 1000
    max_growth_bytes: int = 512 * 1024 * 1024
    """A warm child that has grown by more is replaced."""
    stop_grace_s: float = 10.0
    """Between SIGTERM and SIGKILL after a time-out."""
    standby_idle_s: float = 600.0
    """A child that waits for its first order is let go after a slot was idle for so long."""
    adopt_orphans: bool = False
    """The process that runs the crew has no business but this: should the guardian be killed, every process that
    falls to it is one of ours and is ended."""
    sys_path: Sequence[str] | None = None
    """Import path of the children; None takes this process's own."""


class Crew:
    """All the slots of one worker."""

    def __init__(
        self, *, selector: selectors.BaseSelector, slots: int, settings: CrewSettings = CrewSettings()
    ) -> None: ...

    def start(self) -> None:
        """Start the guardian, without waiting for it."""

    def close(self, grace_s: float = 0.0) -> list[Ended]:
        """Stop and end everything, wait until it is gone, and return what had not ended yet.

        Running attempts are asked to stop with reason `preempted` and have `grace_s` for it.
        """

    # orders
    def room(self, slot: int) -> int:
        """How many more orders the slot takes now."""

    def send(self, slot: int, orders: Sequence[Order]) -> None:
        """Hand orders to a slot, in one system call where it can take them at once; they run strictly in order."""

    def outstanding(self, slot: int) -> list[str]:
        """Tokens that have not ended, in order; the first is the one that runs, if any does."""

    def running(self, slot: int) -> tuple[str, float] | None:
        """Token of the attempt that has begun and its start in seconds since the epoch."""

    def take_back(self, slot: int) -> list[str]:
        """Drop the orders that have not begun and return their tokens; none of them will run or be reported."""

    # events
    def owns(self, key: selectors.SelectorKey) -> bool: ...
    def ready(self, key: selectors.SelectorKey) -> list[Ended]:
        """Read what a key of ours has; returns the attempts that ended by it."""

    def tick(self) -> list[Ended]:
        """Deadlines, memory, idle children; returns attempts that ended by it. Cheap when nothing is due."""

    def next_deadline(self) -> float | None:
        """`time.monotonic()` at which `tick` is next due; None while nothing is awaited."""

    # stopping
    def ask_to_stop(self, token: str, reason: EndReason) -> None:
        """SIGTERM to the attempt's session. Unless it succeeds, it is reported with `reason`.

        One that has not begun is reported as not started. An unknown or ended token is passed over.
        """

    def kill(self, token: str, reason: EndReason, message: str | None = None) -> None:
        """As `ask_to_stop`, with SIGKILL to its whole tree."""

    # what running attempts say
    def progress(self, token: str) -> Progress | None: ...
    def drain_log(self, token: str) -> bytes:
        """Output since the last call; after more than 4 MiB only its end, led by a line that says so."""

    # files
    def discard(self, path: str) -> None:
        """Remove a tree in the background."""

    # inspection
    def pids(self) -> list[int]:
        """The guardian and its children."""

    stats: Mapping[str, Any]
