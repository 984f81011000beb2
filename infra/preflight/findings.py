"""The findings of a preflight: one for each check."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from runtime.errors import RuntimeFailure
from runtime.stack.google_api import GoogleRefused


class Level(StrEnum):
    OK = "ok"
    WARN = "warn"
    """A possible problem, or an unknown fact."""
    FAIL = "fail"
    """`up` would fail, or its resources would not work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightFinding:
    check: str
    """`apis`, `quota TPU v5e`, `name`, `policy gcp.resourceLocations` …"""
    level: Level
    message: str
    fix: str | None = None


Look = Callable[[], Iterable[PreflightFinding]]


def ok(check: str, message: str) -> PreflightFinding:
    return PreflightFinding(check=check, level=Level.OK, message=message)


def warn(check: str, message: str, fix: str | None) -> PreflightFinding:
    return PreflightFinding(check=check, level=Level.WARN, message=message, fix=fix)


def fail(check: str, message: str, fix: str | None) -> PreflightFinding:
    return PreflightFinding(check=check, level=Level.FAIL, message=message, fix=fix)


def guard_all(check: str, look: Look) -> Iterator[PreflightFinding]:
    """Like `guard`, but an unanswered question is a finding too."""
    try:
        yield from guard(check, look)
    except RuntimeFailure as problem:
        yield fail(check, problem.message, problem.hint)


def guard(check: str, look: Look) -> Iterator[PreflightFinding]:
    """Yield the findings of `look`; Google's refusal is a finding too."""
    try:
        yield from look()
    except GoogleRefused as refused:
        if refused.disabled_api:
            text = f"cannot be asked before the {_api_of(refused)} API is on; `up` enables it"
            yield warn(check, text, f"gcloud services enable {_api_of(refused)}.googleapis.com, then ask again")
        elif "vpcServiceControls" in refused.message:
            text = f"a perimeter of VPC Service Controls keeps {_api_of(refused)} from this machine: {refused.said}"
            yield fail(
                check, text, "ask the administrators of the organisation for an ingress rule, or ask from inside"
            )
        elif refused.status in (401, 403):
            text = f"this identity may not ask: {refused.message.partition(': ')[2]}"
            yield warn(check, text, "ask with an identity that may, such as one with `roles/viewer` on the project")
        else:
            yield fail(check, refused.message, refused.hint)


def _api_of(refused: GoogleRefused) -> str:
    found = re.search(r"([a-z]+)\.googleapis\.com", refused.url)
    return found[1] if found else "needed"


def name_nearest(wanted: str, known: Sequence[str]) -> str:
    """List up to five of the known names, the nearest first."""
    near = difflib.get_close_matches(wanted, known, n=5, cutoff=0.3) or sorted(known)[:5]
    more = f" and {len(known) - len(near)} more" if len(known) > len(near) else ""
    return f"{', '.join(near)}{more}" or "none"
