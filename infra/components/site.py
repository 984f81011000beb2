"""Facts that all Google components of a stack share."""

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
    """Whether resources that hold work refuse to be destroyed."""
    adopt: bool = False
    """Whether to import resources that survived a destroy instead of creating them."""
