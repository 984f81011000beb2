"""Messages about ends, from before the record until they are sent: what keeps a message when its worker dies.

A message is written before the record that it is about, so it is there whenever the record is. A sender claims one try of it
by an object that is only ever created, so no two send the same try. The end of it all, which sinks got the message and
which were given up, is create-only as well, and then the message is removed: a listing has what is left, mostly nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from runtime.errors import InvalidTask, RuntimeFailure, may_pass
from runtime.records.blobs import Blobs
from runtime.records.codec import SCHEMA, UNDECODABLE, decode_json, encode_json
from runtime.records.layout import NOTIFICATION, matched, notification_key, told_key
from runtime.sanitize import CleanLogger
from runtime.tasks.notification_sinks import TaskSink, check_task_sink, read_sinks, sink_fields
from runtime.tasks.notifications import Notification
from runtime.units import format_time

_WHO: Final = ("experiment", "queue", "owner", "task", "generation", "token")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryRecord:
    """The result of sending a message: after one try, or for good."""

    sent: frozenset[int] = frozenset()
    """Numbers of the sinks that have it."""
    problems: Mapping[int, str] = field(default_factory=dict)
    """Why the others do not."""
    tries: int = 0
    at: str = ""
    by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenNotification:
    """A message that is not known to be sent, as a listing shows it."""

    name: str
    tries: int
    """Tries that began."""
    touched_at: datetime
    """When it was written, or its last try began or ended, by the store's clock."""


class NotificationStore:
    """Safe to use from any thread."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs

    def write(self, message: Notification) -> None:
        """Keep the message until it is closed; the same one may be written again."""
        fields: dict[str, Any] = {name: found for name in _WHO if (found := getattr(message, name))}
        fields["sinks"] = [sink_fields(sink) for sink in message.sinks]
        self._blobs.put(notification_key(message.name), encode_json({"schema": SCHEMA, **fields}))

    def find_open(self) -> list[OpenNotification]:
        """Return the messages that are not known to be sent, by one listing."""
        infos = {info.key: info for info in self._blobs.list_blobs("notify/")}
        found: dict[str, OpenNotification] = {}
        for key in matched(infos, NOTIFICATION):
            name, number, at = key[1], int(key[2] or 0), infos[key[0]].modified
            if not number:
                found[name] = OpenNotification(name=name, tries=0, touched_at=at)
            elif (known := found.get(name)) is not None:  # a closed notification leaves a try without its message
                tries = max(known.tries, number)
                found[name] = OpenNotification(name=name, tries=tries, touched_at=max(known.touched_at, at))
        return list(found.values())

    def has_told(self, message: Notification) -> bool:
        """Whether a message about this experiment to the same sinks is open, or was told."""
        begins = message.name.partition(".")[0] + "."
        places = notification_key(begins), told_key(message.experiment, begins)
        return any(list(self._blobs.list_keys(place.removesuffix(".json"))) for place in places)

    def read(self, name: str) -> Notification | None:
        """Return the message; None if it is closed, or nobody can read it."""
        data = self._blobs.get(notification_key(name))
        if data is None:
            return None
        try:
            fields = decode_json(data, notification_key(name))
            said = {each: fields[each] for each in _WHO if each in fields}
            return Notification(**said, sinks=tuple(map(_checked, read_sinks("sinks", fields["sinks"]))))
        except (*UNDECODABLE, InvalidTask, KeyError, TypeError, ValueError):
            return None

    def claim(self, message: Notification, number: int, *, by: str, now: datetime) -> bool:
        """Begin a try, which is this caller's alone on True."""
        return self._blobs.create(
            notification_key(message.name, number), _encode(DeliveryRecord(tries=number, at=format_time(now), by=by))
        )

    def read_tries(self, name: str, tries: int) -> DeliveryRecord:
        """Return the outcome of the first `tries` tries together."""
        sent: set[int] = set()
        last = DeliveryRecord()
        for number in range(1, tries + 1):
            if (one := _decode(self._blobs.get(notification_key(name, number)))) is not None:
                sent |= one.sent
                last = one
        problems = {number: why for number, why in last.problems.items() if number not in sent}
        return DeliveryRecord(sent=frozenset(sent), problems=problems, tries=tries, at=last.at, by=last.by)

    def end_try(self, message: Notification, told: DeliveryRecord) -> None:
        """Note the outcome of a claimed try; the next one follows."""
        self._blobs.put(notification_key(message.name, told.tries), _encode(told))

    def close(self, message: Notification, told: DeliveryRecord) -> None:
        """Note what became of it for good, and remove the message."""
        self._blobs.create(told_key(message.experiment, message.name), _encode(told))
        self.remove(message.name, told.tries)

    def remove(self, name: str, tries: int) -> None:
        self._blobs.delete(notification_key(name))
        for number in range(1, tries + 1):
            self._blobs.delete(notification_key(name, number))

    def find_told(self, experiment: str, name: str) -> DeliveryRecord | None:
        """Return what became of a closed message."""
        return _decode(self._blobs.get(told_key(experiment, name)))


def _checked(sink: TaskSink) -> TaskSink:
    check_task_sink(sink)
    return sink


def _encode(told: DeliveryRecord) -> bytes:
    problems = {str(number): why for number, why in told.problems.items()}
    fields = {"schema": SCHEMA, "sent": sorted(told.sent), "problems": problems, "tries": told.tries}
    return encode_json({**fields, "at": told.at, "by": told.by})


def _decode(data: bytes | None) -> DeliveryRecord | None:
    if data is None:
        return None
    with suppress(*UNDECODABLE, KeyError, TypeError, ValueError, AttributeError):
        fields = decode_json(data, "notify/")
        return DeliveryRecord(
            sent=frozenset(map(int, fields["sent"])),
            problems={int(number): str(why) for number, why in fields["problems"].items()},
            tries=int(fields["tries"]),
            at=str(fields["at"]),
            by=str(fields["by"]),
        )
    return DeliveryRecord()


def keep_message(store: NotificationStore, message: Notification) -> None:
    """Keep a message about an end before that is recorded.

    A store that is away for a moment refuses the record as well, and all of it is tried again. One that refuses messages
    alone keeps no record waiting.
    """
    try:
        store.write(message)
    except RuntimeFailure as problem:
        if may_pass(problem):
            raise
        CleanLogger(__name__).warning("a message about `%s` cannot be kept: %s", message.task, problem.message)
