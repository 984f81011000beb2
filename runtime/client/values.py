"""The value or exception of a call, read from the attempt's file, and unpickled only if its owner asks for it."""

from __future__ import annotations

import json
import pickle
import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from runtime.errors import NotPossible, WorkFailed


class CallFailed(WorkFailed):
    """A call that ended without a value: it was lost, say, or raised an exception that cannot be loaded here."""

    def __init__(
        self, message: str, *, facts: Iterable[str] = (), hint: str | None = None, traceback: str | None = None
    ) -> None:
        self.traceback = traceback
        """Traceback of the exception in the process that raised it, as text."""
        super().__init__(message, facts=facts, hint=hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How a call ended."""

    take: Callable[[], Any]
    """Returns the value or raises the exception, and `CancelledError` for a cancelled call. It may unpickle, which runs code
    that the call chose, so it is called only for somebody who asks for the value."""
    failure: str | None = None
    """What went wrong, for people, if the call failed."""
    cancelled: bool = False


class RemoteTraceback(Exception):
    """The cause of an exception that was raised elsewhere, with the traceback of that process."""

    def __init__(self, text: str) -> None:
        self.text = text
        super().__init__(text)

    def __str__(self) -> str:
        return f'\n"""\n{self.text}"""'


@dataclass(frozen=True, slots=True)
class StoredValue:
    """The file of a value: its header and its bytes."""

    head: Mapping[str, Any]
    body: bytes

    @property
    def raised(self) -> bool:
        return bool(self.head.get("raised"))

    def describe(self) -> str:
        """Return type and text of the raised exception."""
        message = self.head.get("message")
        return f"{self.head.get('type')}: {message}" if message else str(self.head.get("type"))


def parse_stored(content: bytes) -> StoredValue:
    """Raises `ValueError` for bytes that are no file of a value."""
    line, _, body = content.partition(b"\n")
    head = json.loads(line)
    if not isinstance(head, dict) or head.get("form") not in ("json", "pickle", "parts", "text"):
        raise ValueError("the file does not begin as that of a value")
    return StoredValue(head, body)


def load_returned(stored: StoredValue, what: str) -> Any:
    """Return the value; `what` names the call in errors. Raises `NotPossible` if this Python cannot load it."""
    try:
        return json.loads(stored.body) if stored.head["form"] == "json" else pickle.loads(stored.body)
    except Exception as problem:
        here = platform.python_version()
        raise NotPossible(
            f"the value of {what} cannot be loaded here: {type(problem).__name__}: {problem}",
            facts=[f"it is a {stored.head.get('type')} from Python {stored.head['python']}, and this is {here}"],
            hint="load it where its classes can be imported, or return plain numbers, texts, lists and dictionaries",
        ) from problem


def load_raised(stored: StoredValue, what: str) -> BaseException:
    """Return the exception as it was raised, with its traceback as its cause; a `CallFailed` if it cannot be loaded."""
    told = str(stored.head.get("traceback", ""))
    found: object = None
    try:
        if stored.head["form"] == "pickle":
            found = pickle.loads(stored.body)
        elif stored.head["form"] == "parts":
            kind, args, state = pickle.loads(stored.body)
            found = kind.__new__(kind, *args)
            vars(found).update(state)
    except Exception:
        found = None
    if not isinstance(found, BaseException):
        found = CallFailed(f"{what} raised {stored.describe()}", traceback=told)
    found.__cause__ = RemoteTraceback(told)
    return found
