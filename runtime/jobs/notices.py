"""Who hears of a job's end, as fields of its spec and as the part of the shim's order that says so."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Final

from runtime.jobs.hosts.base import Files
from runtime.shim.words import CLAIMS, NOTIFY
from runtime.values import dataclass

_TOPIC: Final = r"projects/[a-z][-a-z0-9.:]{2,60}[a-z0-9]/topics/[A-Za-z][A-Za-z0-9._~+%-]{2,254}"


class NotifyOn(StrEnum):
    FAILED = "failed"
    SUCCEEDED = "succeeded"
    ENDED = "ended"
    """However it ended, cancelled too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notify:
    """Exactly one of `webhook`, `topic` and `command` is given."""

    webhook: str | None = None
    """Secret with a URL that takes JSON: `secret-manager://NAME`, `env://NAME` or `file://PATH`, never the URL itself."""
    topic: str | None = None
    """Topic of Pub/Sub, `projects/P/topics/T`."""
    command: tuple[str, ...] = ()
    """argv that gets the message as JSON on its standard input; it runs on the machine of the job."""
    on: NotifyOn = NotifyOn.ENDED

    def __post_init__(self) -> None:
        if sum(bool(each) for each in (self.webhook, self.topic, self.command)) != 1:
            raise ValueError("has none or several of `webhook`, `topic` and `command`, expected exactly one")
        # Whatever it is may be the secret itself, so it is not repeated.
        if self.webhook and not re.fullmatch(r"(?!https?:)[a-z][a-z0-9+.-]*://[^\0\n]+", self.webhook):
            raise ValueError(
                "has a `webhook` that is no reference: its URL is a secret, so store that and name it here, such as "
                "secret-manager://NAME, file://PATH or env://NAME"
            )
        if self.topic and not re.fullmatch(_TOPIC, self.topic):
            raise ValueError(f"has the topic `{self.topic}`, expected projects/PROJECT/topics/TOPIC")
        if self.command and (not self.command[0] or any("\0" in word for word in self.command)):
            raise ValueError("has a `command` that no process can be started with")


def notify_order(sinks: Sequence[Notify], *, name: str, owner: str) -> dict[str, Any]:
    """The order's `notify`: what a message says of the job, and its sinks. A webhook is the name of a secret."""
    return {
        "name": name,
        "owner": owner,
        "sinks": [_sink(number, each) for number, each in enumerate(sinks)],
    }


def drop_notices(files: Files, job: str) -> None:
    """Remove the claims of messages about a job that is removed."""
    for name in files.names(CLAIMS, f"{job}."):
        files.remove(f"{CLAIMS}/{name}")


def _sink(number: int, sink: Notify) -> dict[str, Any]:
    if sink.webhook:
        to: dict[str, Any] = {"webhook": f"{NOTIFY}{number}"}
    elif sink.topic:
        to = {"topic": sink.topic}
    else:
        to = {"command": list(sink.command)}
    return {**to, "on": sink.on.value}
