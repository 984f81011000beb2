"""The rules, as plain functions over what a program registered.

A rule yields a `Violation` for each resource that breaks it. `apply_rules` runs all of them; the policy pack and
`python -m infra check` both use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from infra.recording import Registration


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    rule: str
    urn: str
    message: str
    """What is wrong, with the value, and what would be right."""
    hint: str | None = None


Rule: TypeAlias = Callable[[Sequence[Registration]], Iterable[Violation]]

RULES: Final[dict[str, Rule]] = {}
"""Name → rule; the name is what the engine prints."""


def apply_rules(resources: Sequence[Registration]) -> list[Violation]:
    """Every violation of every rule, in the order of the resources."""
    return [violation for rule in RULES.values() for violation in rule(resources)]
