"""The values that pass between a worker and its attempt pool: orders, how attempts ended, and the settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from runtime.end_reasons import EndReason
from runtime.errors import InfrastructureFailure


@dataclass(slots=True, eq=False, kw_only=True)
class AttemptOrder:
    """Order for one attempt. Treated as frozen; it is not declared so because that triples its cost."""

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
    """Memory limit of the attempt's processes together; 0 means no limit of ours."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Further variables, such as CUDA_VISIBLE_DEVICES."""
    secrets: Mapping[str, str] | None = field(default=None, repr=False)
    """Values of secrets by variable, which come before `env`. A process serves only orders with the same ones."""
    output_dir: str = ""
    """The folder for results; made on first use and removed if it stayed empty."""
    checkpoint_dir: str = ""
    scratch_root: str = ""
    """The attempt's scratch is `<scratch_root>/<token>`."""
    cwd: str | None = None
    code_dir: str | None = None
    """A snapshot's tree, of this slot alone (`runtime.worker.attempts.work_trees`): first on the import path, and the working directory if
    `cwd` is None."""
    snapshot: str | None = None
    """The content id of that tree."""


@dataclass(slots=True, eq=False)
class AttemptEnd:
    """How an attempt ended. By then its whole process tree is gone."""

    token: str
    slot: int
    reason: EndReason
    started_at: float
    """Seconds since the epoch; 0 if it never started."""
    ended_at: float
    value: str = ""
    """JSON text of a function's return value; empty for None."""
    message: str | None = None
    exit_code: int | None = None
    signal: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    metric_ranges: Mapping[str, Sequence[float]] = field(default_factory=dict)
    summed_up: bool = False
    """Whether the file of its reports was read; until then `metrics` may lack some."""
    progressed: bool = False
    """Whether it reported progress, or left a new file in its checkpoint folder."""
    log: bytes = b""
    """The last 64 KiB of standard output and error."""
    log_bytes: int = 0
    """The size of all output."""
    undrained: bytes = b""
    """Output that `drain_log` has not returned; the whole log if it was never called."""
    max_rss_bytes: int | None = None
    """Peak of the attempt's own process; None if it shared a warm one too shortly to measure."""
    not_started: bool = False
    """Whether it never began, and counts in no budget: a stop, or the end of the pool, came first."""


@dataclass(slots=True, frozen=True, kw_only=True)
class ChildPoolSettings:
    reuse: bool = False
    """Warm children run many functions each; otherwise each function or workflow gets a fresh process."""
    hold_fds: tuple[int, ...] = ()
    """Descriptors whose locks stand for the worker's life; the guardian holds them until all attempts have ended."""
    max_outstanding: int = 64
    """Orders a slot takes at a time, the running one included."""
    max_tasks_per_child: int = 1000
    max_growth_bytes: int = 512 * 1024 * 1024
    """A warm child that has grown by more is replaced."""
    stop_grace_s: float = 10.0
    """Between SIGTERM and SIGKILL after a time-out."""
    standby_idle_s: float = 600.0
    """Idle time of a slot after which its child that waits for a first order exits."""
    adopt_orphans: bool = False
    """Whether the process that runs the pool does nothing else: should the guardian be killed, every process that
    falls to it is one of ours and is ended."""
    scratch: str = ""
    """The folder below which attempts have their scratch folders, and note their containers."""
    sys_path: Sequence[str] | None = None
    """Import path of the children; None stands for this process's own."""


class GuardianFailed(InfrastructureFailure):
    """No guardian could be started; nothing can be run here."""

    def __init__(self, times: int, last: str) -> None:
        super().__init__(
            "the process that starts attempts cannot be started",
            facts=[f"{times} in a row ended before they were ready; the last one {last}"],
            hint="see the worker's stderr and the kernel's log; something on this host may be killing it",
        )
