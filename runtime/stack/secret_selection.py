"""Which secrets of a stack an attempt gets, from the contract and its task alone; reads no value."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from runtime.errors import InvalidContract, NotPossible, RequestRefused, UnknownName
from runtime.outputs import TO_ALL, MissingOutput, SecretOutput, StackOutputs, is_free_variable

_PLAIN_NAME: Final = re.compile(r"[a-z][a-z0-9-]{0,39}")
"""Names that the Pulumi program takes. Any other unknown name may be a value that somebody put in its place."""


class NotGranted(RequestRefused):
    """A task names secrets that its stack does not give to attempts; `refusal` has the reason."""

    def __init__(self, refusal: RequestRefused) -> None:
        super().__init__(refusal.message, facts=refusal.facts, hint=refusal.hint)


def find_granted(outputs: StackOutputs) -> dict[str, SecretOutput]:
    """Return the secrets that workers of the stack may give to attempts, by name."""
    return {name: secret for name, secret in sorted(outputs.secrets.items()) if secret.attempts is not None}


def choose(names: Sequence[str] | None, granted: Mapping[str, SecretOutput]) -> tuple[str, ...]:
    """Return the names of a task's secrets in one order; None stands for the stack's default."""
    if names is None:
        return tuple(name for name, secret in granted.items() if secret.attempts == TO_ALL)
    return tuple(sorted(set(names)))


def check_named(names: Sequence[str], outputs: StackOutputs) -> None:
    """Refuse names that the stack has no secret for, or none that workers may read.

    Raises `UnknownName`, `MissingOutput`, `NotPossible`, and the errors of `check_variables`.
    """
    stack = outputs.stack
    granted = find_granted(outputs)
    for name in names:
        if name in granted:
            continue
        if name in outputs.secrets:
            raise NotPossible(
                f"secret `{name}` cannot be given to attempts: workers of stack `{stack}` may not read it",
                facts=[f"secrets for attempts: {', '.join(granted) or 'none'}"],
                hint=f"add `worker` to `readers` of `secrets.{name}` in Pulumi.{stack}.yaml, then run "
                f"`pulumi up --stack {stack}`",
            )
        if not _PLAIN_NAME.fullmatch(name):
            raise RequestRefused(
                f"a task names a secret that stack `{stack}` does not have",
                facts=[
                    "the name is not repeated, because it may be a value",
                    f"secrets for attempts: {', '.join(granted) or 'none'}",
                ],
                hint="a task has names of secrets, never values",
            )
        if not outputs.secrets:
            raise MissingOutput(stack, "secrets", f"secret `{name}`")
        raise UnknownName("secret", name, granted, where=f"in stack `{stack}`")
    check_variables(names, granted, stack)


def check_variables(names: Sequence[str], granted: Mapping[str, SecretOutput], stack: str) -> None:
    """Raise `InvalidContract` for a secret in a variable that no secret may set, or in the variable of another one."""
    seen: dict[str, str] = {}
    for name in names:
        variable = granted[name].env
        if not is_free_variable(variable):
            problem = f"cannot be given to attempts: `{variable}` is a variable that no secret may set"
        elif seen.setdefault(variable, name) != name:
            problem = f"cannot be given to attempts: `{seen[variable]}` has the same variable, `{variable}`"
        else:
            continue
        raise InvalidContract(
            f"secret `{name}` of stack `{stack}` {problem}",
            hint=f"change `secrets.{name}.env` in Pulumi.{stack}.yaml, then run `pulumi up --stack {stack}`",
        )
