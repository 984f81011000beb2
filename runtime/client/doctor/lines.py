"""What an examination finds, a line each: the verdict and, if something is wrong, the fix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

from runtime.errors import RuntimeFailure
from runtime.values import dataclass

if TYPE_CHECKING:
    pass


class Verdict(StrEnum):
    OK = "ok"
    WARN = "warn"
    """Works, or is not needed by everybody."""
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One thing that was looked at."""

    check: str
    """`stack`, `queue default`, `records` …"""
    verdict: Verdict
    text: str
    fix: str | None = None
    """The next command or edit, where the verdict is not ok."""


def guard(check: str, look: Callable[[], Line]) -> Line:
    try:
        return look()
    except RuntimeFailure as problem:
        return failed(check, problem)


def ok(check: str, text: str) -> Line:
    return Line(check=check, verdict=Verdict.OK, text=text)


def warn(check: str, text: str, fix: str | None) -> Line:
    return Line(check=check, verdict=Verdict.WARN, text=text, fix=fix)


def fail(check: str, text: str, fix: str | None) -> Line:
    return Line(check=check, verdict=Verdict.FAIL, text=text, fix=fix)


def failed(check: str, problem: RuntimeFailure) -> Line:
    facts = f" ({'; '.join(problem.facts)})" if problem.facts else ""
    return fail(check, problem.message + facts, problem.hint or "run it again")


def quote_words(words: Sequence[str]) -> str:
    return ", ".join(words[:-1]) + f" and {words[-1]}" if len(words) > 1 else "".join(words)
