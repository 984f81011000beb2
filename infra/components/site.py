"""What every Google component of a stack has in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from infra.naming import Names

UNREAD: Final = ("deletionPolicy",)
"""What Google knows nothing of. Of an import whose inputs differ, engines before 2026 make an error and newer ones an update
besides; neither helps. The first `up` without `adopt` sets it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where resources are made and how they are kept. A plain value: make one for your own program as well."""

    project: str
    region: str
    names: Names
    labels: Mapping[str, str] = field(default_factory=dict)
    protect: bool = True
    """What holds work refuses to be destroyed."""
    adopt: bool = False
    """Import what survived a destroy instead of creating it."""
