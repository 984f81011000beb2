"""What a stack's program would make, without an engine, a cloud, an account or a network.

`check_stack` runs the program for one stack file, validates every input, applies the policies and returns a `Report`;
`python -m infra check` prints it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infra.recording import Recording


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One reason why a stack must not be deployed."""

    source: str
    """`settings`, `inputs` or `policy`"""
    rule: str
    """Name of the policy or check."""
    where: str
    """URN of the resource, or path of the setting."""
    message: str
    hint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Who gets which role where."""

    member: str
    role: str
    on: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    urn: str
    monthly_usd: float
    basis: str
    """`n2-standard-8, 730 h, us-west4, prices of 2026-11`"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    stack: str
    findings: tuple[Finding, ...]
    recording: Recording | None
    """None where the settings are wrong: then nothing was run."""
    costs: tuple[Cost, ...] = ()
    grants: tuple[Grant, ...] = ()
    rendered: Mapping[str, str] = field(default_factory=dict)
    """File name → text of what is rendered into metadata: autoscaler files, boot scripts, units."""
    contract: Mapping[str, Any] | None = None


def check_stack(stack: str, *, folder: Path | None = None) -> Report:
    """Check the stack whose file is `Pulumi.<stack>.yaml` in `folder`, by default the project's root."""
    raise NotImplementedError


def load_stack_file(path: Path) -> dict[str, str]:
    """The `config:` of a stack file with full keys, values as the engine passes them (objects as JSON text)."""
    raise NotImplementedError
