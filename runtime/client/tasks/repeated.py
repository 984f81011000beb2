"""Calls that differ from one before them in their arguments alone, as nearly all calls of a program do.

What such a call has in common with the one before is kept with its open stack: the code that goes with it, its checked
options and the text of its task. A poll of the watches that the stack and the code have anyway shows whether it still
holds; after a notice, and once every `LOOK_EVERY_S`, the call goes the long way again.
"""

from __future__ import annotations

import select
import sys
from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any

from runtime.platform import system
from runtime.queues.sqlite.queue import SqliteQueue
from runtime.tasks.model import (
    FunctionEntry,
    Task,
    canonical_json,
    is_plain,
    plain_json,
    spell_entry,
    spelled_id,
)
from runtime.tasks.typed_secrets import NUMBERS, refuse_secrets
from runtime.tasks.wire import spell_call, spell_code, spell_head
from runtime.units import format_time

if TYPE_CHECKING:
    from runtime.snapshots.watch import TreeWatch


class RepeatedCall:
    """A function at the top of a module, submitted without options, and the stack and code that it was submitted with."""

    __slots__ = (
        "_before",
        "_behind",
        "_code",
        "_experiment",
        "_function",
        "_module",
        "_poll",
        "_queue",
        "_until",
        "_watches",
        "said",
    )

    def __init__(
        self,
        function: FunctionType,
        task: Task,
        queue: SqliteQueue,
        watches: Sequence[TreeWatch],
        until: float,
        said: Mapping[str, Any],
    ) -> None:
        """`watches` notice every change that matters to the call, up to the time `until` of the monotonic clock."""
        self.said = said
        self._module, self._code = sys.modules[function.__module__], function.__code__
        self._experiment, self._function = task.experiment, f"{function.__module__}:{function.__name__}"
        self._queue, self._watches, self._until = queue, watches, until
        self._before = spell_head(task.experiment, self._function)
        self._behind = spell_code(task.snapshot, task.folder, task.submitted_by)
        self._poll = select.poll()
        for watch in watches:
            self._poll.register(watch.fd, select.POLLIN)

    def is_current(self, function: FunctionType) -> bool:
        """Whether a call of that function would still be submitted in the same way."""
        module = self._module
        for watch in self._watches:
            if watch.fd < 0:
                return False  # its number may be another file's now
        return (
            system.monotonic() < self._until
            and function.__code__ is self._code
            and sys.modules.get(function.__module__) is module
            and module.__dict__.get(function.__name__) is function
            and not self._poll.poll(0)
        )

    def put(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> str | None:
        """Put the task of these arguments and return its id; None, with nothing put, if the caller has to go the long way.

        That is so for arguments that need a closer look, and for a task that is known.
        """
        if not all(map(is_plain, args)):
            return None
        spelled, sorted_kwargs, more = canonical_json(args) if args else "", "", ""
        if kwargs:
            if type(kwargs) is not dict or not all(map(is_plain, kwargs.values())) or not all(map(_is_name, kwargs)):
                return None
            sorted_kwargs, more = canonical_json(kwargs), plain_json(kwargs)
        if kwargs or not NUMBERS.issuperset(map(type, args)):
            refuse_secrets(FunctionEntry(self._function, tuple(args), kwargs or {}))
        identity = spelled_id(self._experiment, spell_entry(self._function, spelled, sorted_kwargs))
        at = f',"submitted_at":"{format_time(system.now())}"'
        body = spell_call(identity, self._before, spelled, more, self._behind, at)
        return identity if self._queue.put_spelled(identity, self._experiment, body) else None


def _is_name(name: object) -> bool:
    return type(name) is str and name != "" and name.isascii()
