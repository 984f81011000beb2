"""Calls that differ from one before them in their arguments alone, as nearly all calls of a program do.

What such a call has in common with the one before is kept with its open stack: the code that goes with it, its checked
options and the text of its task. A poll of the watches that the stack and the code have anyway shows whether it still
holds; after a notice, and once every `LOOK_EVERY_S`, the call goes the long way again.
"""

from __future__ import annotations

import select
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from types import FunctionType
from typing import TYPE_CHECKING, Any

from runtime.queues.sqlite.queue import SqliteQueue
from runtime.system import system
from runtime.tasks.canonical_json import canonical_json, plain_json
from runtime.tasks.literal_secrets import NUMBERS, refuse_secrets
from runtime.tasks.model import (
    FunctionEntry,
    Task,
    is_plain,
    spell_entry,
    spelled_id,
)
from runtime.tasks.wire import encode_task, spell_call, spell_code, spell_head
from runtime.units import format_time

if TYPE_CHECKING:
    from runtime.snapshots.watch import TreeWatch


class RepeatedCall:
    """A function at the top of a module, submitted without options, and the stack and code that it was submitted with."""

    __slots__ = (
        *("_before", "_behind", "_code", "_experiment", "_file", "_function", "_module", "_name", "_poll", "_queue"),
        *("_until", "_watches", "said"),
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
        self._module, self._name, self._code = function.__module__, function.__name__, function.__code__
        self._file = getattr(sys.modules.get(self._module), "__file__", None)
        self._experiment, self._function = task.experiment, f"{self._module}:{self._name}"
        self._queue, self._watches, self._until = queue, watches, until
        self._before = spell_head(task.experiment, self._function)
        self._behind = spell_code(task.snapshot, task.folder, task.submitted_by)
        self._poll = select.poll()
        for watch in watches:
            self._poll.register(watch.fd, select.POLLIN)

    def makes(self, task: Task) -> bool:
        """Whether it would put that task as the long way did, whatever a later release adds to what tasks carry."""
        entry = task.entry
        if not isinstance(entry, FunctionEntry) or task.submitted_at is None:
            return False
        return self._spell(entry.args, dict(entry.kwargs), task.submitted_at) == (task.id, encode_task(task))

    def is_current(self, function: FunctionType) -> bool:
        """Whether a call of that function would still be submitted in the same way."""
        for watch in self._watches:
            if watch.fd < 0:
                return False  # its number may be another file's now
        name = self._name
        if not (
            system.monotonic() < self._until
            and function.__code__ is self._code
            and function.__qualname__ == name == function.__name__
            and function.__module__ == self._module
        ):
            return False
        module = sys.modules.get(self._module)
        return (
            getattr(module, name, None) is function
            and getattr(module, "__file__", None) is self._file
            and not self._poll.poll(0)
        )

    def put(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> str | None:
        """Put the task of these arguments and return its id; None, with nothing put, if the caller has to go the long way.

        That is so for arguments that need a closer look, and for a task that is known.
        """
        spelled = self._spell(args, kwargs, system.now())
        if spelled is None:
            return None
        if kwargs or not NUMBERS.issuperset(map(type, args)):
            refuse_secrets(FunctionEntry(self._function, tuple(args), kwargs or {}))
        identity, body = spelled
        return identity if self._queue.put_spelled(identity, self._experiment, body) else None

    def _spell(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None, now: datetime) -> tuple[str, str] | None:
        """The id and the JSON of a task; None for arguments that are no plain values with plain names."""
        if not all(map(is_plain, args)):
            return None
        spelled, sorted_kwargs, more = canonical_json(args) if args else "", "", ""
        if kwargs is not None:
            if type(kwargs) is not dict or not all(map(is_plain, kwargs.values())) or not all(map(_is_name, kwargs)):
                return None
            if kwargs:
                sorted_kwargs, more = canonical_json(kwargs), plain_json(kwargs)
        identity = spelled_id(self._experiment, spell_entry(self._function, spelled, sorted_kwargs))
        at = f',"submitted_at":"{format_time(now)}"'
        return identity, spell_call(identity, self._before, spelled, more, self._behind, at)


def _is_name(name: object) -> bool:
    return type(name) is str and name != "" and name.isascii()
