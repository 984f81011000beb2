"""Checks a resource's inputs against the provider's own types, without the provider.

The wheels of pulumi-gcp and pulumi-kubernetes carry a typed class for every resource and every nested object: names,
types and what is required. What mocks let pass (a misspelt key in a dictionary, a number where text belongs, a missing
nested field) is found here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class InputProblem:
    path: str
    """`cleanupPolicies[0].condition.olderThan`, in the provider's camelCase."""
    message: str


def find_input_problems(type_: str, inputs: Mapping[str, Any]) -> list[InputProblem]:
    """What is wrong with `inputs` (camelCase, `UNKNOWN` allowed anywhere) of a resource of `type_`.

    Raises `LookupError` for a type that the installed wheels do not have.
    """
    raise NotImplementedError
