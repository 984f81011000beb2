"""Values between a launch and a launcher: the target, the plan, and the backend's states of its native jobs."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import Any

from runtime.config import Settings
from runtime.end_reasons import EndReason
from runtime.errors import InvalidValue
from runtime.jobs.spec import JobSpec, JobState, SecretRef, secret_refs


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
    """`--time`, `activeDeadlineSeconds of the pod`, `the shim's clock`; the reason for a refused field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A named place to launch."""

    name: str
    kind: str
    """Name of its launcher."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The launcher's settings: host, partition, namespace, profiles …, as `[tool.runtime.targets.NAME]` has them."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Fields for specs that leave them out."""
    records: str | None = None
    """Record root: a folder on the target, `claim://NAME/PATH` or a bucket; None for the launcher's default."""
    stack: str | None = None


def check_record_folder(target: Target) -> None:
    """Raise `InvalidValue` if the record root is a URL, for launchers that keep records in a folder."""
    if target.records is not None and re.match("[A-Za-z][A-Za-z0-9+.-]+:/", target.records):
        raise InvalidValue(
            f"targets.{target.name}.records",
            target.records,
            f"a folder: a target of kind `{target.kind}` keeps its jobs in files, and in no bucket or claim",
            hint="name a folder that its nodes can write, such as /scratch/lab/runtime",
        )


def owner_name() -> str:
    """Return the user's name, the same on all machines of a person."""
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid{os.getuid()}"  # as in containers that run as a number without a name


@dataclass(frozen=True, slots=True, kw_only=True)
class JobIdentity:
    """A job's id, names and code, decided before anything is planned."""

    id: str
    """`j-…`"""
    name: str
    """For people: the spec's name, or one made of the command."""
    owner: str
    """The user's name, the same on all machines of a person."""
    snapshot: str | None
    """`sha256:…` of the code; None if the spec has none."""
    experiment: str | None = None
    lifetime: timedelta | None = None
    """How long until the backend ends and removes the job by itself, if it can; for probes."""
    hold: str | None = None
    """The folder, and its machine, whose trees run one after another while the job keeps its machine; None for a job that
    runs once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedResource:
    """Something of a job that the backend holds, found by the backend's own labels or names."""

    job: str
    """`j-…`"""
    native_id: str
    what: str
    """In the backend's words: `Job`, `pod`, `slurm job`, `ray job`, `process`."""
    live: bool
    """False once it has ended."""
    since: datetime
    """When it was made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """A launch in full, as data. Equal inputs have equal plans."""

    job: JobIdentity
    spec: JobSpec
    target: Target
    order: Mapping[str, Any]
    """`order.json` of the shim."""
    artefacts: Mapping[str, str]
    """File name → text for the backend: a script, a manifest, a command line."""
    parts: tuple[NativePart, ...]
    """The native jobs to submit; more than one if a limit splits an array."""
    fidelity: Mapping[str, FieldSupport]
    """Field that the spec sets → its support."""
    indices: tuple[Mapping[str, Any], ...] = ({},)
    """Parameters of each index, in order."""
    root: str = ""
    """Record root in full."""
    notes: tuple[str, ...] = ()
    """Notes for people: a default that was taken, a field that was ignored by request."""

    @property
    def folder(self) -> str:
        """The job's run folder under the record root."""
        return f"jobs/{self.job.id}"

    @property
    def secrets(self) -> list[SecretRef]:
        """Secrets whose values the launch reads and brings in files."""
        files = self.order.get("secrets")
        return [ref for ref in secret_refs(self.spec) if ref.name in files] if files else []

    def refused(self) -> list[str]:
        return [name for name, support in self.fidelity.items() if support.fidelity is Fidelity.REFUSED]


@dataclass(frozen=True, slots=True, kw_only=True)
class NativePart:
    """One call of the backend's own submit command."""

    name: str
    """Unique on the backend, and a hash: it finds the job again if an answer was lost."""
    artefact: str
    """The plan's artefact that it submits."""
    offset: int = 0
    """The first index that it serves."""
    count: int = 1
    native: Mapping[str, Any] = field(default_factory=dict)
    """More of the launcher's own data: an argv, a namespace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeState:
    """The backend's state of one native job, or of one of its indices."""

    native_id: str
    """`1234`, `1234_7`, `NAMESPACE/NAME`"""
    index: int | None
    """None for the whole."""
    state: JobState
    reason: EndReason | None = None
    """Why it ended, if the backend knows; for a pending job, a cause that does not pass by itself."""
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
    """The id in an attempt's start note: for a member of an array the id of the array."""
    began_at: datetime
    ended_at: datetime | None
    """None while it runs."""
    reason: EndReason | None
    """None if the backend does not know the reason, or only that the script ended by itself."""
    raw: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanContext:
    """The values that a launcher may read while it plans; it uses no network."""

    settings: Settings
    now: datetime
    base: Path
    """Folder that the spec's relative paths start from."""
    environ: Mapping[str, str]
    """Variables of the launching shell."""
    records: str
    """Record root on this machine, for targets that lie here and name none."""
