"""Who hears of a submission: sinks that its tasks carry, and those that hear once when all tasks have ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from runtime.client.tasks.build import submitter
from runtime.errors import RequestRefused
from runtime.queues.base import Queue
from runtime.records.base import RecordStore
from runtime.tasks.history import Record
from runtime.tasks.model import Task, new_token
from runtime.tasks.notification_sinks import NO_SINKS, TaskSink, make_sinks
from runtime.tasks.notifications import Notification


@dataclass(frozen=True, slots=True)
class Recipients:
    of_tasks: tuple[TaskSink, ...] = NO_SINKS
    """They hear of the end of each task."""
    of_all: tuple[TaskSink, ...] = NO_SINKS
    """They hear when the experiment is complete."""

    def check(self, check_secrets: Callable[[Sequence[str]], None] | None) -> None:
        """Refuse webhooks whose URL is in a secret that no worker of the queue can read."""
        places = [sink.webhook.partition("://") for sink in (*self.of_tasks, *self.of_all) if sink.webhook]
        names = sorted({name for scheme, _, name in places if scheme == "secret-manager"})
        if names and check_secrets is not None:
            check_secrets(names)

    def watch(self, queue: Queue, experiment: str, *, new: bool) -> None:
        """Have the workers tell when the experiment is complete. All its tasks are submitted; if none of them is `new`, an
        earlier submission may have said so."""
        if self.of_all:
            message = Notification(
                experiment=experiment, sinks=self.of_all, queue=queue.name, owner=submitter(), token=new_token()
            )
            store = queue.records.open_notifications()
            if new or not store.has_told(message):
                store.write(message)


NOBODY: Final = Recipients()


def read_untold(records: RecordStore, task: Task | None, record: Record | None) -> tuple[str, ...]:
    """Return a line for each message about the end of a task that a sink did not get."""
    if task is None or record is None or not task.notify:
        return ()
    message = Notification(
        experiment=record.experiment, sinks=task.notify, task=record.task_id, generation=record.generation
    )
    store, then = records.open_notifications(), "given up"
    told = store.find_told(message.experiment, message.name)
    if told is None:
        tries = max((each.tries for each in store.find_open() if each.name == message.name), default=None)
        if tries is None:
            return ()
        if not tries:
            return ("the message about its end is not sent yet: a worker of its queue sends it",)
        told, then = store.read_tries(message.name, tries), "a worker of its queue tries again"
    after = "1 try" if told.tries == 1 else f"{told.tries} tries"
    return tuple(
        f"notification {number} ({task.notify[number].kind}) was not sent: {why}; {then} after {after}"
        for number, why in sorted(told.problems.items())
        if number < len(task.notify)
    )


def read_hearers(notify: Any, on: str | Sequence[str] | None, settings: Mapping[str, Any]) -> Recipients:
    """Return those who hear, by the names in the project's `settings`. Raises `RequestRefused`."""
    if notify is None:
        if on is not None:
            raise RequestRefused("`notify_on` says when, and nobody is named", hint="name who hears with `notify`")
        return NOBODY
    return Recipients(*make_sinks(notify, on, settings))
