"""Notes of a conversion: each part of the cluster file that the stack file lacks, and the next step for it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

from runtime.errors import InvalidValue
from runtime.secret_detection import find_secret_in_shell, has_known_form

READS: Final = re.compile(r"\bgcloud\s+secrets\s+versions\s+access\b(?P<rest>[^|;&><)]*)")
"""A command that reads a secret by its name."""
LONGEST: Final = 160
"""Letters of the file that a note repeats."""
LONGEST_TEXT: Final = 16 * 1024
"""Letters of the longest text: that of a machine's whole set-up script."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    where: str
    """Path in the cluster file."""
    what: str
    next: str
    """What takes its place, or what the reader does."""

    def line(self) -> str:
        return f"{self.where}: `{self.what}`: {self.next}"


class Notes:
    def __init__(self) -> None:
        self._made: list[Note] = []

    def add(self, where: str, what: object, next_step: str) -> None:
        """Add a note, once; what looks like a secret is not repeated."""
        made = Note(where=where, what=quote(what), next=next_step)
        if made not in self._made:
            self._made.append(made)

    def all(self) -> tuple[Note, ...]:
        return tuple(self._made)


def quote(value: object) -> str:
    """Return a value as one printable line, cut, and without what looks like a secret."""
    text = " ".join(str(value)[: LONGEST * 16].split())
    if holds_secret(text):
        return "… (holds what looks like a secret)"
    text = "".join(each if each.isprintable() else "?" for each in text).replace("`", "'")
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def holds_secret(text: str) -> bool:
    """Whether a text holds what looks like the value of a secret; the name of one in Secret Manager is none."""
    text = READS.sub("", text)
    return has_known_form(text) or find_secret_in_shell(text) is not None


def read_table(value: Any, where: str) -> dict[str, Any]:
    """Return a table of the file; an absent one is empty."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidValue(where, quote(value), "a table")
    return {str(key): each for key, each in value.items()}


def read_texts(value: Any, where: str) -> list[str]:
    """Return a list of commands or options; an absent one is empty."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(each, str | int | float) for each in value):
        raise InvalidValue(where, quote(value), "a list of texts")
    return [_bounded(str(each), f"{where}[{index}]") for index, each in enumerate(value)]


def read_text(value: Any, where: str, allowed: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise InvalidValue(where, quote(value), allowed)
    return _bounded(value.strip(), where)


def _bounded(text: str, where: str) -> str:
    if len(text) > LONGEST_TEXT:
        raise InvalidValue(where, quote(text), f"a text of at most {LONGEST_TEXT:,} letters")
    return text


def read_count(value: Any, where: str, default: int) -> int:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1 or not 0 <= value < 1 << 31:
        raise InvalidValue(where, quote(value), "a whole number, 0 or more")
    return int(value)
