"""Values of a job's secrets, read on the launching machine with the rights of the launching user.

A value goes from its source into a file of mode 0600 in the run folder, or into a Secret that its Kubernetes Job owns, and
nowhere else: plans, argument lists, errors, logs and output never contain one.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from runtime.errors import InfrastructureFailure, NotPossible
from runtime.jobs.plan import PlanContext, Target
from runtime.jobs.spec import SecretRef

if TYPE_CHECKING:
    from runtime.config import Settings
    from runtime.outputs import SecretOutput, StackOutputs
    from runtime.stack.google_api import GoogleApi, GoogleRefused

OLDER_VERSIONS: Final = 20
"""Number of versions below a disabled one that are tried, as on the head of a cluster."""
MOST_BYTES: Final = 1 << 20
"""Longest secret in a file; a longer file was named by mistake, and some files have no end."""
_OF_STACK: Final = "secret-manager"


def check_sources(refs: Sequence[SecretRef]) -> None:
    """Raise `NotPossible` for a reference that the launching machine cannot read; reads nothing."""
    for ref in refs:
        if _scheme(ref) not in ("env", "file", _OF_STACK):
            raise NotPossible(
                f"secret `{ref.name}` is to come from `{ref.source}`, which this target cannot read",
                hint="env://NAME, file://PATH and secret-manager://NAME are read where the job is launched",
            )


def read_values(refs: Sequence[SecretRef], target: Target, context: PlanContext) -> dict[str, str]:
    """Return the values of all references by variable, or raise.

    Sources on this machine come first, and the network only for secrets of the stack. Raises `NotPossible` for a value
    that is missing, unreadable or no text; `UnknownName` for a secret that the stack does not have;
    `InfrastructureFailure` if Secret Manager does not answer.
    """
    check_sources(refs)
    of_stack = [ref for ref in refs if _scheme(ref) == _OF_STACK]
    values = {ref.name: _as_text(ref, _read_here(ref, context)) for ref in refs if ref not in of_stack}
    if of_stack:
        values |= _read_of_stack(of_stack, target, context.settings)
    return values


def _scheme(ref: SecretRef) -> str:
    return ref.source.partition("://")[0]


def _read_here(ref: SecretRef, context: PlanContext) -> bytes:
    scheme, _, rest = ref.source.partition("://")
    if scheme == "env":
        if rest not in context.environ:
            raise NotPossible(
                f"secret `{ref.name}` is to come from the variable `{rest}`, which is not set here",
                hint=f"export {rest}, or name another source",
            )
        return os.fsencode(context.environ[rest])
    try:
        with Path(rest).expanduser().open("rb") as opened:
            value = opened.read(MOST_BYTES + 1)
    except (OSError, RuntimeError) as problem:  # RuntimeError: `~` of somebody who is not known
        why = getattr(problem, "strerror", None) or str(problem)
        raise NotPossible(
            f"cannot read the secret `{ref.name}` from `{rest}`: {why.lower()}", hint="check the path after file://"
        ) from None
    if len(value) > MOST_BYTES:
        raise NotPossible(
            f"cannot read the secret `{ref.name}` from `{rest}`: it is longer than {MOST_BYTES:,} bytes",
            hint="check the path after file://",
        )
    return value[:-2] if value.endswith(b"\r\n") else value.removesuffix(b"\n")


def _as_text(ref: SecretRef, value: bytes) -> str:
    """Raise `NotPossible` for a value that no variable can carry, without the value in the error."""
    fault = "holds a zero byte, which no variable can carry"
    if b"\0" not in value:
        try:
            return value.decode()
        except UnicodeDecodeError:
            fault = "is no UTF-8"  # raised below, because this error contains the value
    raise NotPossible(
        f"the value of secret `{ref.name}` {fault}",
        facts=[f"read from {ref.source}"],
        hint="keep it encoded, such as with base64, and decode it in the command",
    )


def _read_of_stack(refs: Sequence[SecretRef], target: Target, settings: Settings) -> dict[str, str]:
    from runtime.stack.find import LOCAL, find_stack
    from runtime.stack.google_api import GoogleApi
    from runtime.stack.secrets import find_secret

    outputs = find_stack(target.stack, settings=settings).outputs
    if outputs.stack == LOCAL:
        raise NotPossible(
            f"secret `{refs[0].name}` is to come from `{refs[0].source}`, and no stack is named that has it",
            facts=[f"target `{target.name}` names {'no stack' if target.stack is None else 'the built-in one'}"],
            hint=f'set stack = "…" in [tool.runtime.targets.{target.name}], or RUNTIME_STACK',
        )
    names = {ref: ref.source.partition("://")[2] for ref in refs}
    found = {ref: find_secret(outputs, name) for ref, name in names.items()}
    with GoogleApi(server=settings.google_api) as api:
        return {ref.name: _as_text(ref, _read_newest(names[ref], found[ref], outputs, api)) for ref in refs}


def _read_newest(name: str, secret: SecretOutput, outputs: StackOutputs, api: GoogleApi) -> bytes:
    from runtime.stack.google_api import GoogleRefused

    try:
        return _access(f"{secret.resource}/versions/latest", name, api)
    except GoogleRefused as refused:
        newest = re.search(r"/versions/(\d+)\]", refused.message) if refused.status == 400 else None
        if newest is None:
            raise _explain(refused, name, outputs.stack) from refused
    # `latest` is the newest one, enabled or not, and listing takes a right that reading does not.
    first = int(newest.group(1)) - 1
    for number in range(first, max(0, first - OLDER_VERSIONS), -1):
        try:
            return _access(f"{secret.resource}/versions/{number}", name, api)
        except GoogleRefused as refused:
            if refused.status not in (400, 404):
                raise _explain(refused, name, outputs.stack) from refused
    raise NotPossible(
        f"cannot read secret `{name}` of stack `{outputs.stack}`: it has no enabled version",
        hint=f"runtime secrets put {name} --stack {outputs.stack}",
    )


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
