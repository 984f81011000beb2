"""What passes between a launch and a launcher: the target, the plan, and what a backend says of its native jobs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import Any

from runtime.config import Settings
from runtime.errors import InvalidValue
from runtime.jobs.spec import JobSpec, JobState, SecretRef, secret_refs
from runtime.reasons import EndReason
from runtime.values import dataclass, field


class Fidelity(StrEnum):
    """How a backend keeps one field of a spec."""

    NATIVE = "native"
    SHIM = "shim"
    """Emulated by the shim, as long as the job lives."""
    CLIENT = "client"
    """Emulated by the command that follows the job, while it follows."""
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldSupport:
    """How a backend supports one field of a spec, and in which of its words."""

    fidelity: Fidelity
    how: str
    """`--time`, `activeDeadlineSeconds of the pod`, `the shim's clock`; of a refused field why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A named place to launch."""

    name: str
    kind: str
    """Name of its launcher."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What the launcher reads: host, partition, namespace, profiles …, as `[tool.runtime.targets.NAME]` has it."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Fields of a spec that are taken where the spec leaves them out."""
    records: str | None = None
    """Record root: a folder on the target, `claim://NAME/PATH` or a bucket; the launcher's default where None."""
    stack: str | None = None


def check_record_folder(target: Target) -> None:
    """Raise `InvalidValue` where the record root is a URL; of launchers that keep records in a folder."""
    if target.records is not None and re.match("[A-Za-z][A-Za-z0-9+.-]+:/", target.records):
        raise InvalidValue(
            f"targets.{target.name}.records",
            target.records,
            f"a folder: a target of kind `{target.kind}` keeps its jobs in files, and in no bucket or claim",
            hint="name a folder that its nodes can write, such as /scratch/lab/runtime",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobIdentity:
    """Who launches what, decided before anything is planned."""

    id: str
    """`j-…`"""
    name: str
    """For people: the spec's name, or one made of the command."""
    owner: str
    """The user's name, the same on all machines of a person."""
    snapshot: str | None
    """`sha256:…` of the code; None where the spec has none."""
    experiment: str | None = None
    lifetime: timedelta | None = None
    """After so long the backend ends and removes the job, where it can, whoever is there: of probes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """What a backend has of one job, found by its labels."""

    job: str
    live: bool
    """Whether anything of it has not ended."""
    at: datetime
    """When the oldest of it was made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """Exactly what would be started, as data. Equal inputs have equal plans."""

    job: JobIdentity
    spec: JobSpec
    target: Target
    order: Mapping[str, Any]
    """`order.json` of the shim."""
    artefacts: Mapping[str, str]
    """File name → text of what the backend is given: a script, a manifest, a command line."""
    parts: tuple[NativePart, ...]
    """What is submitted, one native job each; more than one where a limit splits an array."""
    fidelity: Mapping[str, FieldSupport]
    """Field that the spec sets → how it is kept."""
    indices: tuple[Mapping[str, Any], ...] = ({},)
    """Parameters of each index, in order."""
    root: str = ""
    """Record root in full."""
    notes: tuple[str, ...] = ()
    """What a person should know: a default that was taken, a field that was ignored by request."""

    @property
    def folder(self) -> str:
        """The job's run folder under the record root."""
        return f"jobs/{self.job.id}"

    @property
    def secrets(self) -> list[SecretRef]:
        """Secrets whose values the launch reads and brings in files; the backend itself brings the others."""
        files = self.order.get("secrets")
        return [ref for ref in secret_refs(self.spec) if ref.name in files] if files else []

    def refused(self) -> list[str]:
        return [name for name, support in self.fidelity.items() if support.fidelity is Fidelity.REFUSED]


@dataclass(frozen=True, slots=True, kw_only=True)
class NativePart:
    """One call of the backend's own submit command."""

    name: str
    """Unique on the backend, and a hash: it is how the job is found again when an answer was lost."""
    artefact: str
    """Which of the plan's artefacts it submits."""
    offset: int = 0
    """The first index that it serves."""
    count: int = 1
    native: Mapping[str, Any] = field(default_factory=dict)
    """What else the launcher has to know to submit it: an argv, a namespace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeState:
    """What the backend says of one native job, or of one of its indices."""

    native_id: str
    """`1234`, `1234_7`, `NAMESPACE/NAME`"""
    index: int | None
    """None for the whole."""
    state: JobState
    reason: EndReason | None = None
    """Why it ended, if the backend knows. Of a pending one, what it waits for that does not come by itself."""
    raw: str = ""
    """The backend's own word: `PREEMPTED`, `OOMKilled`, `Pending/Resources`."""
    message: str = ""
    """The backend's own sentence about it."""
    exit_code: int | None = None
    started_at: datetime | None = None
    where: str = ""
    """Node or host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeStart:
    """One of the times that a backend started a native job."""

    native_id: str
    """As an attempt's start note has it: of a member of an array the id of the array."""
    began_at: datetime
    ended_at: datetime | None
    """None while it runs."""
    reason: EndReason | None
    """None if the backend does not say why that start ended, or only that its script ended by itself."""
    raw: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanContext:
    """What a launcher may look at while it plans; it asks nothing of the network."""

    settings: Settings
    now: datetime
    base: Path
    """Folder that the spec's relative paths start from."""
    environ: Mapping[str, str]
    """Variables of the launching shell."""
    records: str
    """Record root on this machine, for targets that lie here and name none."""
