"""What a launcher is: values that pass between the parts, and the Protocol that every backend fulfils.

`plan` decides everything and touches nothing; `submit` is the only call that starts something. What a job was, is and
became lies in its record root (docs/jobs.md); a launcher adds what only its backend knows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Protocol, runtime_checkable

from runtime.jobs.hosts.base import Host
from runtime.jobs.plan import (
    FieldSupport,
    JobIdentity,
    LaunchPlan,
    NativePart,
    NativeStart,
    NativeState,
    PlanContext,
    Started,
    Target,
)
from runtime.jobs.spec import JobSpec
from runtime.reasons import Explanation


class Launcher(Protocol):
    """Starts, inspects and stops jobs on one kind of backend.

    All calls but `plan` may raise `InfrastructureFailure` where the backend does not answer, and then nothing is
    concluded from it.
    """

    kind: ClassVar[str]
    keeps: ClassVar[Mapping[str, FieldSupport]]
    """Every leaf field of `JobSpec`, dotted → how it is kept here; a test holds that none is missing."""
    takes_up: ClassVar[bool]
    """True if the backend starts nothing again by itself: launching a job again, whose native job is gone without a result,
    then starts its shim again. A launcher of another package that does not say so has False."""

    def check_settings(self, target: Target) -> None:
        """Raise `RequestRefused` unless the target's settings are such as this launcher reads; nothing is asked."""

    def open_host(self, target: Target, context: PlanContext) -> Host:
        """The machine that submits, and the files of the record root."""

    def plan(self, spec: JobSpec, target: Target, job: JobIdentity, context: PlanContext) -> LaunchPlan: ...

    def submit(self, plan: LaunchPlan, part: NativePart, host: Host) -> str:
        """Start one part and return its native id. Only called when `find` has no job of that name."""

    def find(self, target: Target, names: Sequence[str], host: Host) -> dict[str, str]:
        """Name → native id of the jobs that the backend has or remembers under these names."""

    def states(self, target: Target, native_ids: Sequence[str], host: Host) -> list[NativeState]:
        """What the backend says of these jobs, in as few calls as it can; one it has forgotten is left out."""

    def cancel(self, target: Target, native_ids: Sequence[str], indices: Sequence[int] | None, host: Host) -> list[str]:
        """Stop the jobs, or some indices of them; already gone is success. Returns what is left over, in words."""

    def explain(self, target: Target, native: NativeState, host: Host) -> Explanation | None:
        """Why it waits or how it ended, as far as only the backend knows."""


@runtime_checkable
class Interrupts(Protocol):
    """A launcher that can provoke what backends do to jobs, for tests and rehearsals."""

    interrupts: ClassVar[Mapping[str, FieldSupport]]
    """`preempt`, `timeout`, `node-loss` and `oom` → how it is provoked here, or why not."""

    def interrupt(self, target: Target, native_id: str, index: int | None, how: str, host: Host) -> None:
        """`how` is `preempt`, `timeout`, `node-loss` or `oom`. Raises `NotPossible` for one that cannot be done here."""


@runtime_checkable
class Releases(Protocol):
    """A launcher whose backend keeps a run bound to a machine that is gone until the run is released."""

    def release(self, target: Target, native_ids: Sequence[str], index: int, host: Host) -> list[str]:
        """Give up one index, so that it can end or start elsewhere. Returns what is left over, in words."""


@runtime_checkable
class Clears(Protocol):
    """A launcher whose shims may be killed while what they started goes on."""

    def clear(self, target: Target, folder: str, host: Host) -> list[str]:
        """End what killed shims of the job in this run folder left running. Returns what is left over, in words."""

    def find_left(self, target: Target, jobs: Sequence[str], host: Host) -> list[str]:
        """Those of the jobs that still have processes on this host."""


@runtime_checkable
class Stops(Protocol):
    """A launcher whose `cancel` waits for shims that find our cancel mark."""

    def stop(self, target: Target, native_ids: Sequence[str], host: Host) -> None:
        """Ask the shims to end what they run, for a record root that refuses the mark."""


@runtime_checkable
class KeepsOutput(Protocol):
    """A launcher whose backend keeps what is printed before the shim begins, and by the shim itself."""

    def read_output(self, target: Target, native: NativeState, folder: str, host: Host) -> str:
        """The end of that, for a job whose run folder this is; empty if there is none."""


@runtime_checkable
class Resubmits(Protocol):
    """A launcher that can submit the native jobs of a launch another time, for some of their indices."""

    def restore_parts(
        self, artefacts: Mapping[str, str], names: Sequence[str], indices: Sequence[int]
    ) -> list[NativePart]:
        """The parts of a launch that serve these indices, cut down to them. `artefacts` are those of the launch, `names` those of
        all its parts in order; `native["number"]` of a part is its place among them."""


@runtime_checkable
class RemembersStarts(Protocol):
    """A launcher whose backend starts one native job several times, and remembers how each start ended."""

    def list_starts(self, target: Target, names: Mapping[str, str], index: int, host: Host) -> list[NativeStart]:
        """The starts that served one index, oldest first; `names` are native ids with their names. Empty if the backend keeps no
        history."""


@runtime_checkable
class Sweeps(Protocol):
    """A launcher that finds what it started by labels, whatever the ledger says."""

    def list_started(self, target: Target, host: Host, *, owner: str | None = None) -> list[Started]:
        """Every job of the target's record root that the backend has something of, ended or not; of everybody, or of one
        owner."""

    def sweep(self, target: Target, job: str, host: Host) -> list[str]:
        """End and remove all of a job, and see that it is gone. Returns what is left over, in words."""


@runtime_checkable
class Exports(Protocol):
    """A launcher whose jobs can be written as a folder that submits itself where nothing of ours is."""

    def export(self, plan: LaunchPlan, folder: Path, snapshot: bytes | None) -> list[Path]:
        """Write a new or empty folder; the files that were written. Raises `NotPossible` for what cannot go in."""


@runtime_checkable
class ChecksHost(Protocol):
    """A launcher that looks at the machine before anything is written there."""

    def check_host(self, target: Target, host: Host) -> list[str]:
        """What a person should know, in words. Raises `NotPossible` where no job should be launched."""
