"""Who hears of a submission: sinks that its tasks carry, and those that hear once when all tasks have ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from runtime.client.tasks.make import submitter
from runtime.errors import RequestRefused
from runtime.queues.base import Queue
from runtime.tasks.model import new_token
from runtime.tasks.notifications import Notification
from runtime.tasks.sinks import NO_SINKS, TaskSink, make_sinks
from runtime.values import dataclass


@dataclass(frozen=True, slots=True)
class Hearers:
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

    def watch(self, queue: Queue, experiment: str) -> None:
        """Have the workers tell when the experiment is complete. All its tasks are submitted."""
        if self.of_all:
            message = Notification(
                experiment=experiment, sinks=self.of_all, queue=queue.name, owner=submitter(), token=new_token()
            )
            queue.records.open_notifications().write(message)


NOBODY = Hearers()


def read_hearers(notify: Any, on: str | Sequence[str] | None, settings: Mapping[str, Any]) -> Hearers:
    """Return those who hear, by the names in the project's `settings`. Raises `RequestRefused`."""
    if notify is None:
        if on is not None:
            raise RequestRefused("`notify_on` says when, and nobody is named", hint="name who hears with `notify`")
        return NOBODY
    return Hearers(*make_sinks(notify, on, settings))
