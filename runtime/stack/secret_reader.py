"""Reads values of a stack's secrets from Secret Manager, for jobs at their launch and for workers' attempts.

A value is returned and goes nowhere else: no error, fact or hint contains one.
"""

from __future__ import annotations

import base64
import re
from typing import TYPE_CHECKING, Final

from runtime.errors import InfrastructureFailure, NotPossible

if TYPE_CHECKING:
    from runtime.jobs.plan import Target
    from runtime.jobs.spec import SecretRef
    from runtime.outputs import SecretOutput, StackOutputs
    from runtime.stack.google_api import GoogleApi, GoogleRefused

OLDER_VERSIONS: Final = 20
"""Number of versions below a disabled one that are tried, as on the head of a cluster."""


def find_source(outputs: StackOutputs, ref: SecretRef, target: Target) -> SecretOutput:
    """The secret of the stack that a job's `secret-manager://NAME` means.

    Raises `NotPossible` if no stack is named, and the errors of `find_secret`.
    """
    from runtime.stack.find import LOCAL
    from runtime.stack.secrets import find_secret

    if outputs.stack == LOCAL:
        raise NotPossible(
            f"secret `{ref.name}` is to come from `{ref.source}`, and no stack is named that has it",
            facts=[f"target `{target.name}` names {'no stack' if target.stack is None else 'the built-in one'}"],
            hint=f'set stack = "…" in [tool.runtime.targets.{target.name}], or RUNTIME_STACK',
        )
    return find_secret(outputs, ref.place)


def read_newest(name: str, secret: SecretOutput, stack: str, api: GoogleApi) -> bytes:
    """Read the newest enabled version, with the right to read alone.

    Raises `NotPossible` if this identity may not read it, or if it has no enabled version, and `InfrastructureFailure` if
    Secret Manager does not answer.
    """
    from runtime.stack.google_api import GoogleRefused

    try:
        return _access(f"{secret.resource}/versions/latest", name, api)
    except GoogleRefused as refused:
        newest = re.search(r"/versions/(\d+)\]", refused.message) if refused.status == 400 else None
        if newest is None:
            raise _explain(refused, name, stack) from refused
    # `latest` is the newest one, enabled or not, and listing takes a right that reading does not.
    first = int(newest.group(1)) - 1
    for number in range(first, max(0, first - OLDER_VERSIONS), -1):
        try:
            return _access(f"{secret.resource}/versions/{number}", name, api)
        except GoogleRefused as refused:
            if refused.status not in (400, 404):
                raise _explain(refused, name, stack) from refused
    raise NotPossible(
        f"cannot read secret `{name}` of stack `{stack}`: it has no enabled version",
        hint=f"runtime secrets put {name} --stack {stack}",
    )


def decode_value(value: bytes, name: str, source: str, *, hint: str) -> str:
    """Return the text of a value. Raises `NotPossible` for a value that no variable can carry."""
    fault = "holds a zero byte, which no variable can carry"
    if b"\0" not in value:
        try:
            return value.decode()
        except UnicodeDecodeError:
            fault = "is no UTF-8"  # raised below, because this error contains the value
    raise NotPossible(f"the value of secret `{name}` {fault}", facts=[f"read from {source}"], hint=hint)


def _access(version: str, name: str, api: GoogleApi) -> bytes:
    from runtime.stack.secrets import crc32c

    payload = api.get("secretmanager", f"v1/{version}:access").get("payload", {})
    value = base64.b64decode(payload.get("data", ""))
    if "dataCrc32c" in payload and int(payload["dataCrc32c"]) != crc32c(value):
        raise InfrastructureFailure(
            f"the value of secret `{name}` was damaged on its way here: its checksum is another", hint="try again"
        )
    return value


def _explain(refused: GoogleRefused, name: str, stack: str) -> NotPossible | InfrastructureFailure:
    what = f"cannot read secret `{name}` of stack `{stack}`"
    if refused.disabled_api:
        return NotPossible(f"{what}: the Secret Manager API is not enabled", hint=f"run `pulumi up --stack {stack}`")
    if refused.status == 403:
        return NotPossible(
            f"{what}: this identity may not",
            facts=[refused.message],
            hint="ask an operator for `roles/secretmanager.secretAccessor` on it",
        )
    if refused.status == 404:
        return NotPossible(
            f"{what}: it does not exist, or has no value",
            hint=f"`runtime secrets check --stack {stack}` says which; runtime secrets put {name} --stack {stack}",
        )
    return InfrastructureFailure(
        f"{what}: {refused.message}", facts=refused.facts, hint=refused.hint, retryable=refused.retryable
    )
