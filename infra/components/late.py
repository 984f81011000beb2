"""Patience with what Google makes known late.

An API, an agent, an account, a role or a grant that was made seconds ago is not known everywhere in Google, which takes
minutes in a new project. `patience` has the engine repeat an operation that fails for that reason, with growing waits and
an end. In a run that made nothing of the kind a refusal is final, and no refusal of a right is waited for longer than two
minutes, since nothing tells a late grant from a missing one.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Sequence
from enum import Enum
from typing import Final

import pulumi
from pulumi.runtime.proto import resource_pb2
from pulumi.runtime.settings import monitor_supports_feature

from runtime.errors import RequestRefused

PATIENCE_VARIABLE: Final = "RUNTIME_UP_PATIENCE"
"""Seconds for which an operation is repeated, by default 600; every wait shrinks with it, and 0 means no wait."""

WAITS_S: Final = (5, 10, 20, 40, 60)
"""Wait after the first failure, the second …; the last one repeats."""


class Reason(Enum):
    """Why Google refuses, and for how many seconds of the default patience it is asked again."""

    UNKNOWN = 600, "does not know an API, account or role of this run yet"
    REFUSED = 120, "refuses; a grant of this run may not count yet"

    @property
    def limit_s(self) -> int:
        return self.value[0]


_FINAL: Final = re.compile(
    r"quota.{0,80}exceeded|exceeded.{0,80}quota|rateLimitExceeded|BILLING_DISABLED|billing (account|to be enabled)"
    # Nothing in a run makes Cloud Storage's agent.
    r"|vpc_?service_?controls|constraints/|gs-project-accounts",
    re.IGNORECASE | re.DOTALL,
)
_UNKNOWN: Final = re.compile(
    r"SERVICE_DISABLED|has not been used in project|Cannot find metric that matches type"
    r"|Error 40[04]:.*\b(service ?account|role|identity pool)\b.*(does not exist|not found)|Unknown service account",
    re.IGNORECASE | re.DOTALL,
)
_REFUSED: Final = re.compile(
    # Some services answer 400 if their agent or their user lacks a right.
    r"Error 403|PERMISSION_?DENIED|did not have the necessary permissions|does not have access to service account",
    re.IGNORECASE,
)
_SPREADS: Final = re.compile(
    r"I[Aa][Mm]Member$|:(Service|ServiceIdentity|Account|IAMCustomRole|WorkloadIdentityPool|Metric)$"
)
"""Types that Google makes known late."""


def find_reason(error: str) -> Reason | None:
    """Return why the operation may succeed later, or None if it will not."""
    if _FINAL.search(error):
        return None
    if _UNKNOWN.search(error):
        return Reason.UNKNOWN
    return Reason.REFUSED if _REFUSED.search(error) else None


def find_wait(errors: Sequence[str]) -> float | None:
    """Return the seconds to wait before the next try, or None to give up; `errors` has the newest first."""
    reason = find_reason(errors[0])
    if reason is None:
        return None
    waits = [WAITS_S[min(index, len(WAITS_S) - 1)] for index in range(len(errors))]
    earlier = zip(reversed(errors[1:]), waits, strict=False)
    left = reason.limit_s - sum(wait for error, wait in earlier if find_reason(error) is reason)
    return min(waits[-1], left) if left > 0 else None


def patience() -> list[pulumi.ResourceTransformation]:
    """Return `transformations` for the options of Google components, once a program; none if the engine has no hooks."""
    needed = (
        resource_pb2.RESOURCE_MONITOR_FEATURE_ERROR_HOOKS,
        resource_pb2.RESOURCE_MONITOR_FEATURE_RESOURCE_HOOKS,
    )
    factor = _read_patience() / Reason.UNKNOWN.limit_s
    return [_Patience(factor).bind] if factor and all(map(monitor_supports_feature, needed)) else []


def _read_patience() -> float:
    text = os.environ.get(PATIENCE_VARIABLE) or str(Reason.UNKNOWN.limit_s)
    if not re.fullmatch(r"\d{1,5}(\.\d{1,3})?", text):
        raise RequestRefused(f"`{PATIENCE_VARIABLE}` is `{text}`", hint="give seconds, such as 600")
    return float(text)


class _Patience:
    """The hooks of one run, and whether it made something that Google makes known late."""

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._spreads = False
        self._noted = pulumi.ResourceHook("google-spreads", self._note)
        self._failed = pulumi.ErrorHook("google-is-late", self._retry)

    def bind(self, args: pulumi.ResourceTransformationArgs) -> pulumi.ResourceTransformationResult | None:
        if not args.type_.startswith("gcp:"):
            return None
        noted = [self._noted] if _SPREADS.search(args.type_) else []
        hooks = pulumi.ResourceHookBinding(after_create=[*noted], on_error=[self._failed])
        args.opts.hooks = pulumi.ResourceHookBinding.merge(args.opts.hooks, hooks)
        return pulumi.ResourceTransformationResult(args.props, args.opts)

    def _note(self, args: pulumi.ResourceHookArgs) -> None:
        self._spreads = True

    async def _retry(self, args: pulumi.ErrorHookArgs) -> bool:
        wait = find_wait(args.errors) if self._spreads and args.failed_operation != "delete" else None
        reason = find_reason(args.errors[0])
        if wait is None or reason is None:
            return False
        wait *= self._factor
        pulumi.log.info(f"`{args.name}`: Google {reason.value[1]}; next try in {wait:g} s")
        await asyncio.sleep(wait)
        return True
