"""The Protocols of launchers, one for every backend and others for what only some can do.

`plan` decides everything and touches nothing; `submit` is the only call that starts something. A job's state and history
lie in its record root (docs/jobs.md); a launcher adds the knowledge of its backend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Protocol, runtime_checkable

from runtime.end_reasons import Explanation
from runtime.jobs.hosts.base import Host
from runtime.jobs.plan import (
    FieldSupport,
    JobIdentity,
    LaunchPlan,
    NativePart,
    NativeStart,
    NativeState,
    OwnedResource,
    PlanContext,
    Target,
)
from runtime.jobs.price import Price
from runtime.jobs.secret_schemes import SecretScheme
from runtime.jobs.spec import JobSpec


class Launcher(Protocol):
    """Starts, inspects and stops jobs on one kind of backend.

    All calls but `plan` may raise `InfrastructureFailure` if the backend does not answer; nothing is concluded from it.
    """

    kind: ClassVar[str]
    keeps: ClassVar[Mapping[str, FieldSupport]]
    """Every leaf field of `JobSpec`, dotted → its support here; a test holds that none is missing."""
    secret_schemes: ClassVar[Mapping[str, SecretScheme]]
    """Scheme of a secret's source → how the value reaches the command here. The default for launchers of other packages is
    `COMMON_SCHEMES`."""
    resumes: ClassVar[bool]
    """True if the backend restarts nothing by itself: a repeated launch of a job whose native job is gone without a result
    then starts its shim again. The default for launchers of other packages is False."""

    def check_settings(self, target: Target) -> None:
        """Raise `RequestRefused` for settings that this launcher cannot read; the backend is not asked."""

    def open_host(self, target: Target, context: PlanContext) -> Host:
        """The machine that submits, and the files of the record root."""

    def plan(self, spec: JobSpec, target: Target, job: JobIdentity, context: PlanContext) -> LaunchPlan: ...

    def submit(self, plan: LaunchPlan, part: NativePart, host: Host) -> str:
        """Start one part and return its native id. Only called when `find` has no job of that name."""

    def find(self, target: Target, names: Sequence[str], host: Host) -> dict[str, str]:
        """Name → native id of the jobs that the backend has or remembers under these names."""

    def states(self, target: Target, native_ids: Sequence[str], host: Host) -> list[NativeState]:
        """The backend's states of these jobs, in as few calls as possible; forgotten jobs are left out."""

    def cancel(self, target: Target, native_ids: Sequence[str], indices: Sequence[int] | None, host: Host) -> list[str]:
        """Stop the jobs, or some of their indices; already gone is success. Returns a description of anything left."""

    def explain(self, target: Target, native: NativeState, host: Host) -> Explanation | None:
        """Why a job waits or how it ended, as far as only the backend knows."""


@runtime_checkable
class Interrupts(Protocol):
    """A launcher that can provoke what backends do to jobs, for tests and rehearsals."""

    interrupts: ClassVar[Mapping[str, FieldSupport]]
    """`preempt`, `timeout`, `node-loss` and `oom` → how it is provoked here, or why not."""

    def interrupt(self, target: Target, native_id: str, index: int | None, how: str, host: Host) -> None:
        """`how` is `preempt`, `timeout`, `node-loss` or `oom`. Raises `NotPossible` for one that cannot be done here."""


@runtime_checkable
class Releases(Protocol):
    """A launcher whose backend keeps a run bound to a dead machine until the run is released."""

    def release(self, target: Target, native_ids: Sequence[str], index: int, host: Host) -> list[str]:
        """Release one index, so that it can end or start elsewhere. Returns a description of anything left."""


@runtime_checkable
class Clears(Protocol):
    """A launcher whose shims may be killed while their commands go on."""

    def clear(self, target: Target, folder: str, host: Host) -> list[str]:
        """End the processes that killed shims of the job in this run folder left. Returns a description of anything left."""

    def find_leftovers(self, target: Target, jobs: Sequence[str], host: Host) -> list[str]:
        """The jobs that still have processes on this host."""


@runtime_checkable
class SeesOneMachine(Protocol):
    """A launcher whose `states` are those of one machine, so that a job of another machine looks as if it were gone."""

    def read_machine(self, target: Target, host: Host) -> str:
        """The machine's name, as attempts write it into their notes."""


@runtime_checkable
class Stops(Protocol):
    """A launcher whose `cancel` waits for shims that find our cancel mark."""

    def stop(self, target: Target, native_ids: Sequence[str], host: Host) -> None:
        """Ask the shims to end their commands, if the record root refuses the mark."""


@runtime_checkable
class KeepsOutput(Protocol):
    """A launcher whose backend keeps the output before the shim begins, and that of the shim itself."""

    def read_output(self, target: Target, native: NativeState, folder: str, host: Host) -> str:
        """The end of that output for the job in this run folder; empty if there is none."""


@runtime_checkable
class Resubmits(Protocol):
    """A launcher that can submit the native jobs of a launch another time, for some of their indices."""

    def restore_parts(
        self, artefacts: Mapping[str, str], names: Sequence[str], indices: Sequence[int]
    ) -> list[NativePart]:
        """The parts of a launch that serve these indices, cut down to them. `artefacts` are those of the launch, `names` its
        parts' names in order; `native["number"]` of a part is its place among them."""


@runtime_checkable
class RemembersStarts(Protocol):
    """A launcher whose backend starts one native job several times, and remembers how each start ended."""

    def list_starts(self, target: Target, names: Mapping[str, str], index: int, host: Host) -> list[NativeStart]:
        """The starts of one index, oldest first; `names` are native ids with their names. Empty without a history."""


@runtime_checkable
class ListsOwned(Protocol):
    """A launcher that finds what its backend holds of ours without the ledger and without any state of this machine."""

    keeps_ended: ClassVar[bool]
    """True if the backend holds a job that has ended until it is removed, and then forgets how it ended."""

    def owned(
        self, target: Target, host: Host, *, owner: str | None = None, job: str | None = None
    ) -> list[OwnedResource]:
        """List everything of the jobs of the target's record root: of one owner or of all, of one job or of all."""

    def remove(self, target: Target, owned: Sequence[OwnedResource], host: Host) -> list[str]:
        """End and remove these, and all else of their jobs; return when it is gone. Returns a description of anything left."""


def find_keeper(launcher: Launcher) -> ListsOwned | None:
    """The launcher, if its backend holds jobs that have ended until they are removed."""
    return launcher if isinstance(launcher, ListsOwned) and launcher.keeps_ended else None


@runtime_checkable
class Prices(Protocol):
    """A launcher whose jobs cost money by the hour."""

    def price(self, plan: LaunchPlan) -> Price | None:
        """The price of a launch by a dated list, without the network; None for a job that costs nothing."""


@runtime_checkable
class Exports(Protocol):
    """A launcher whose jobs can be written as a folder that submits itself without this package."""

    def export(self, plan: LaunchPlan, folder: Path, snapshot: bytes | None) -> list[Path]:
        """Write into a new or empty folder; returns the files. Raises `NotPossible` for a job that cannot go in."""


@runtime_checkable
class ChecksHost(Protocol):
    """A launcher that looks at the machine before anything is written there."""

    def check_host(self, target: Target, host: Host) -> list[str]:
        """Notes for people, in words. Raises `NotPossible` if no job should be launched there."""
