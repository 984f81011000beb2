"""How the value of a secret reaches its command: a table of schemes for each launcher, as `keeps` is one of fields."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from runtime.errors import NotPossible
from runtime.jobs.spec import SecretRef


class SecretReader(StrEnum):
    """Reads the value of a secret."""

    LAUNCH = "launch"
    """The launching machine, when it launches; the value then goes to the job in a file."""
    BACKEND = "backend"
    """The backend itself, which gives it to the command."""
    MACHINE = "machine"
    """The machine that runs the command, with its own identity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretScheme:
    """How a launcher brings secrets of one scheme."""

    reader: SecretReader
    how: str
    """For people: `a variable of the launching shell`."""


def _at_launch(how: str) -> SecretScheme:
    return SecretScheme(reader=SecretReader.LAUNCH, how=how)


COMMON_SCHEMES: Final[Mapping[str, SecretScheme]] = {
    "env": _at_launch("a variable of the launching shell, in a file of mode 0600 while the job lasts"),
    "file": _at_launch("a file of the launching machine, in a file of mode 0600 while the job lasts"),
    "secret-manager": _at_launch(
        "the stack's newest version at the launch, in a file of mode 0600 while the job lasts"
    ),
}
"""Schemes of every launcher that declares none: these alone can be read at launch."""


class SchemeRefused(NotPossible):
    """The target has no way to bring secrets of this scheme."""

    def __init__(self, ref: SecretRef, target: str, known: Iterable[str]) -> None:
        self.scheme, self.known = ref.scheme, sorted(known)
        nearest = difflib.get_close_matches(ref.scheme, self.known, n=1)
        super().__init__(
            f"target `{target}` cannot bring secret `{ref.name}`: it knows no sources that begin with `{ref.scheme}://`",
            facts=[f"known there: {', '.join(f'{each}://' for each in self.known) or 'none'}"],
            hint=f"did you mean `{nearest[0]}://`?"
            if nearest
            else f"`runtime targets show {target}` says what each does",
        )


def check_schemes(refs: Iterable[SecretRef], schemes: Mapping[str, SecretScheme], target: str) -> None:
    """Raise `SchemeRefused` for the first secret with a scheme that the target's launcher does not have."""
    for ref in refs:
        if ref.scheme not in schemes:
            raise SchemeRefused(ref, target, schemes)
