"""Values of a job's secrets, read on the launching machine with the rights of the launching user.

A value goes from its source into a file of mode 0600 in the run folder, or into a Secret that its Kubernetes Job owns, and
nowhere else: plans, argument lists, errors, logs and output never contain one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from runtime.errors import NotPossible
from runtime.jobs.plan import PlanContext, Target
from runtime.jobs.spec import SecretRef
from runtime.stack.secret_reader import decode_value, find_source, read_newest

if TYPE_CHECKING:
    from runtime.config import Settings

MOST_BYTES: Final = 1 << 20
"""Longest secret in a file; a longer file was named by mistake, and some files have no end."""
_OF_STACK: Final = "secret-manager"


def read_values(refs: Sequence[SecretRef], target: Target, context: PlanContext) -> dict[str, str]:
    """Return the values of all references by variable, or raise.

    Sources on this machine come first, and the network only for secrets of the stack. Raises `NotPossible` for a value
    that is missing, unreadable or no text; `UnknownName` for a secret that the stack does not have;
    `InfrastructureFailure` if Secret Manager does not answer.
    """
    of_stack = [ref for ref in refs if ref.scheme == _OF_STACK]
    values = {ref.name: _as_text(ref, _read_here(ref, context)) for ref in refs if ref not in of_stack}
    if of_stack:
        values |= _read_of_stack(of_stack, target, context.settings)
    return values


def _read_here(ref: SecretRef, context: PlanContext) -> bytes:
    rest = ref.place
    if ref.scheme == "env":
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
    return decode_value(
        value, ref.name, ref.source, hint="keep it encoded, such as with base64, and decode it in the command"
    )


def _read_of_stack(refs: Sequence[SecretRef], target: Target, settings: Settings) -> dict[str, str]:
    from runtime.stack.find import find_stack
    from runtime.stack.google_api import GoogleApi

    outputs = find_stack(target.stack, settings=settings).outputs
    found = {ref: find_source(outputs, ref, target) for ref in refs}
    with GoogleApi(server=settings.google_api) as api:
        return {ref.name: _as_text(ref, read_newest(ref.place, found[ref], outputs.stack, api)) for ref in refs}
