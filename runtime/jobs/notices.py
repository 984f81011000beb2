"""Who hears of a job's end, as fields of its spec and as the part of the shim's order that says so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runtime.jobs.hosts.base import Files
from runtime.shim.common import CLAIMS, NOTIFY
from runtime.tasks.notification_sinks import Sink


def notify_order(sinks: Sequence[Sink], *, name: str, owner: str) -> dict[str, Any]:
    """The order's `notify`: the job's facts in a message, and its sinks. A webhook is the name of a secret."""
    return {
        "name": name,
        "owner": owner,
        "sinks": [_sink(number, each) for number, each in enumerate(sinks)],
    }


def drop_notices(files: Files, job: str) -> None:
    """Remove the claims of messages about a job that is removed."""
    for name in files.names(CLAIMS, f"{job}."):
        files.remove(f"{CLAIMS}/{name}")


def _sink(number: int, sink: Sink) -> dict[str, Any]:
    if sink.webhook:
        to: dict[str, Any] = {"webhook": f"{NOTIFY}{number}"}
    elif sink.topic:
        to = {"topic": sink.topic}
    else:
        to = {"command": list(sink.command)}
    return {**to, "on": sink.on.value}
