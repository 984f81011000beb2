"""Messages that are to be sent, in an order in which a receiver that hangs holds up only its own."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from runtime.tasks.notification_sinks import TaskSink
from runtime.tasks.notifications import Notification

if TYPE_CHECKING:
    from runtime.shim.notify import MessageSender

AT_ONCE: Final = 32
"""Messages that are sent at the same time."""
TO_ONE: Final = 8
"""Most of these to one receiver; a receiver that failed the last time gets one message at a time."""
KEPT_IN_MEMORY: Final = 10_000
"""Most messages held in memory; further ones are found in the store."""


@dataclass(slots=True)
class DueMessage:
    """A message to be sent."""

    message: Notification
    event: dict[str, Any]
    sinks: dict[int, TaskSink]
    """Those that hear of it."""
    tries: int = 0
    also: tuple[str, ...] = ()
    """Other messages of the same kind, which this one stands for."""
    sending: list[MessageSender] = field(default_factory=list)
    problems: dict[int, str] = field(default_factory=dict)
    """Why a sink gets nothing from this worker."""

    def receivers(self) -> tuple[TaskSink, ...]:
        return tuple(self.sinks.values())


class NotificationQueue:
    """Messages that wait and messages that are being sent, by receiver."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[TaskSink, ...], deque[DueMessage]] = {}
        self._under_way: Counter[TaskSink] = Counter()
        self._sending: dict[str, DueMessage] = {}
        self._failing: set[TaskSink] = set()
        self.names: set[str] = set()
        """The names of all messages in it."""

    def add(self, due: DueMessage) -> None:
        """Take a message, unless it is in here or there are too many."""
        if due.message.name not in self.names and len(self.names) < KEPT_IN_MEMORY:
            self.names.add(due.message.name)
            self._waiting.setdefault(due.receivers(), deque()).append(due)

    def take(self) -> DueMessage | None:
        """Return the next message that may be sent now; each group of receivers has its turn."""
        receivers = next(filter(self._has_room, self._waiting), None)
        if receivers is None:
            return None
        waiting = self._waiting.pop(receivers)
        due = waiting.popleft()
        if waiting:
            self._waiting[receivers] = waiting
        self._sending[due.message.name] = due
        self._under_way.update(receivers)
        return due

    def _has_room(self, receivers: tuple[TaskSink, ...]) -> bool:
        return len(self._sending) < AT_ONCE and all(
            self._under_way[each] < (1 if each in self._failing else TO_ONE) for each in receivers
        )

    def end(self, due: DueMessage, failed: set[int] | None) -> None:
        """Note that a message is under way no more, and the numbers of the sinks that failed; None if nothing was sent."""
        self._sending.pop(due.message.name, None)
        self._under_way.subtract(due.receivers())
        self.names.discard(due.message.name)
        if failed is not None:
            ended = {sink: number in failed for number, sink in due.sinks.items()}
            self._failing.difference_update(ended)
            self._failing.update(sink for sink, has_failed in ended.items() if has_failed)

    def is_empty(self) -> bool:
        return not self.names

    def close(self) -> None:
        """Leave unsent messages to the store, and end the commands that still run."""
        self._waiting.clear()
        for due in list(self._sending.values()):
            for each in list(due.sending):
                each.stop()
