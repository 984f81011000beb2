"""Who hears of an end: webhooks, topics of Pub/Sub and commands, as jobs, tasks and the project's settings name them. Pure.

docs/notifications.md has the promises.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any, Final

from runtime.errors import InvalidTask, InvalidValue, RequestRefused, UnknownName

_TOPIC: Final = r"projects/[a-z][-a-z0-9.:]{2,60}[a-z0-9]/topics/[A-Za-z][A-Za-z0-9._~+%-]{2,254}"
_REFERENCE: Final = r"(?!https?:)[a-z][a-z0-9+.-]*://[^\0\n]+"
_NAME: Final = r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}"
TASK_SCHEMES: Final = ("secret-manager", "file", "env")
"""Sources of URLs that every worker can read."""
MOST_SINKS: Final = 10
ENDS: Final = ("succeeded", "failed", "cancelled", "expired")
"""The ends of a task, which are its terminal states."""
ENDED: Final = "ended"
COMPLETE: Final = "complete"
WORDS: Final = (*ENDS, ENDED, COMPLETE)
"""Words after `--notify-on`."""


class NotifyOn(StrEnum):
    FAILED = "failed"
    SUCCEEDED = "succeeded"
    ENDED = "ended"
    """However it ended, cancelled too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sink:
    """Exactly one of `webhook`, `topic` and `command` is given."""

    webhook: str | None = None
    """Secret with a URL that takes JSON: `secret-manager://NAME`, `env://NAME` or `file://PATH`, never the URL itself."""
    topic: str | None = None
    """Topic of Pub/Sub, `projects/P/topics/T`."""
    command: tuple[str, ...] = ()
    """argv that gets the message as JSON on its standard input."""
    on: NotifyOn = NotifyOn.ENDED

    def __post_init__(self) -> None:
        check_sink(self.webhook, self.topic, self.command)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSink:
    """A sink that hears of a task's end. The fields are those of `Sink`, with the ends that it hears of."""

    webhook: str | None = None
    topic: str | None = None
    command: tuple[str, ...] = ()
    on: tuple[str, ...] = ENDS

    @property
    def kind(self) -> str:
        """What it is, without the address."""
        return "webhook" if self.webhook else "topic" if self.topic else "command"


NO_SINKS: Final[tuple[TaskSink, ...]] = ()


def check_sink(webhook: str | None, topic: str | None, command: Sequence[str]) -> None:
    """Raise `ValueError` for an address that nothing can be sent to."""
    if sum(bool(each) for each in (webhook, topic, command)) != 1:
        raise ValueError("has none or several of `webhook`, `topic` and `command`, expected exactly one")
    # Whatever it is may be the secret itself, so it is not repeated.
    if webhook and not re.fullmatch(_REFERENCE, webhook):
        raise ValueError(
            "has a `webhook` that is no reference: its URL is a secret, so store that and name it here, such as "
            "secret-manager://NAME, file://PATH or env://NAME"
        )
    if topic and not re.fullmatch(_TOPIC, topic):
        raise ValueError(f"has the topic `{topic}`, expected projects/PROJECT/topics/TOPIC")
    if command and (not command[0] or any("\0" in word for word in command)):
        raise ValueError("has a `command` that no process can be started with")


# settings


def find_named(name: str, settings: Mapping[str, Any], *, where: str = "in the project's settings") -> Sink:
    """Return the sink of the table `notify.NAME`. Raises `UnknownName` with the known ones, and `RequestRefused`."""
    if not re.fullmatch(_NAME, name):
        # It may be the URL of a webhook, so it is not repeated.
        raise RequestRefused(
            "`notify` is neither the name of a sink, nor a reference to a webhook's URL, nor a topic",
            facts=[f"known sinks: {', '.join(sorted(settings)) or 'none'}"],
            hint="such as secret-manager://NAME, file://PATH or projects/PROJECT/topics/TOPIC",
        )
    if name not in settings:
        hint = None if settings else "add `[tool.runtime.notify.NAME]` with `webhook`, `topic` or `command`"
        raise UnknownName("sink", name, sorted(settings), where=where, hint=hint)
    from runtime.schema import read_record  # Only submissions and launches with sinks come here.

    sink, problems = read_record(Sink, settings[name])
    if sink is None:
        said = [str(each) if each.path else each.message for each in problems]
        raise RequestRefused(
            f"sink `{name}` {where} cannot be used", facts=said, hint="docs/notifications.md has its keys"
        )
    return sink


def put_named(notify: Any, settings: Mapping[str, Any]) -> Any:
    """Return a job's field `notify` with the sinks of the settings in place of their names; everything else stays.

    A name is a text, alone or in the list, or the key `sink` of an object, whose `on` then stands before that of the settings.
    """
    if isinstance(notify, str):
        notify = [notify]
    if not isinstance(notify, list | tuple):
        return notify
    made: list[Any] = []
    for each in notify:
        name = each.get("sink") if isinstance(each, Mapping) else each
        if not isinstance(name, str):
            made.append(each)
            continue
        found = find_named(name, settings)
        rest = {key: value for key, value in each.items() if key != "sink"} if isinstance(each, Mapping) else {}
        address = {key: getattr(found, key) for key in ("webhook", "topic", "command") if getattr(found, key)}
        made.append({**address, "on": found.on.value, **rest})
    return made


def named_schema(sink: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a JSON Schema that also takes names, beside the objects of the schema `sink`."""
    name = {"type": "string", "description": "A sink of the project's settings."}
    named = {"type": "object", "properties": {"sink": name, "on": sink["properties"]["on"]}, "required": ["sink"]}
    return {"type": ["string", "array"], "items": {"anyOf": [name, {**named, "additionalProperties": False}, sink]}}


# tasks


def read_words(words: str | Sequence[str] | None, name: str = "notify_on") -> tuple[str, ...] | None:
    """Return the ends among `words`, a list or a text with commas, each once; None stays. Raises `InvalidValue`."""
    if words is None:
        return None
    every = [word.strip() for word in words.split(",")] if isinstance(words, str) else list(words)
    for word in every:
        if word not in WORDS:
            raise InvalidValue(name, word, f"one or several of {', '.join(WORDS)}")
    if not every:
        raise InvalidValue(name, "", f"one or several of {', '.join(WORDS)}")
    known = {end for word in every for end in (ENDS if word == ENDED else (word,))}
    return tuple(word for word in (*ENDS, COMPLETE) if word in known)


def make_sinks(
    notify: Any, on: str | Sequence[str] | None, settings: Mapping[str, Any]
) -> tuple[tuple[TaskSink, ...], tuple[TaskSink, ...]]:
    """Return the sinks that hear of each task's end, and those that hear when all tasks have ended.

    `notify` is a name in `settings`, a reference to a webhook's URL, a topic, an object with the fields of `Sink`, or a list
    of these. `on` holds for all of them that do not say it themselves. Raises `RequestRefused`.
    """
    ends = read_words(on)
    given = [notify] if isinstance(notify, str | Mapping) else notify
    if not isinstance(given, list | tuple):
        raise InvalidValue("notify", type(given).__name__, "a sink, or a list of sinks")
    if len(given) > MOST_SINKS:
        raise InvalidValue("notify", f"{len(given)} sinks", f"{MOST_SINKS} at most")
    made = [_make_sink(each, ends, settings) for each in given]
    of_tasks = (replace(sink, on=tuple(end for end in sink.on if end in ENDS)) for sink in made)
    return (
        tuple(dict.fromkeys(sink for sink in of_tasks if sink.on)),
        tuple(dict.fromkeys(replace(sink, on=()) for sink in made if COMPLETE in sink.on)),
    )


def _make_sink(given: Any, ends: tuple[str, ...] | None, settings: Mapping[str, Any]) -> TaskSink:
    address: dict[str, Any]
    if isinstance(given, Mapping):
        said = dict(given)
        own = said.pop("on", None)
        ends = ends if own is None else read_words(own, "notify.on")
        address = {name: tuple(value) if isinstance(value, list) else value for name, value in said.items() if value}
        unknown = sorted(map(str, said.keys() - {"webhook", "topic", "command"}))
        if unknown:
            raise UnknownName("field", f"notify.{unknown[0]}", [f"notify.{each.name}" for each in fields(Sink)])
    elif not isinstance(given, str):
        raise InvalidValue(
            "notify", type(given).__name__, "the name of a sink, or an object with `webhook`, `topic` or `command`"
        )
    elif re.fullmatch(_TOPIC, given):
        address = {"topic": given}
    elif "://" in given:
        address = {"webhook": given}
    else:
        named = find_named(given, settings)
        address = {"webhook": named.webhook, "topic": named.topic, "command": named.command}
        ends = ends or read_words(named.on)
    sink = TaskSink(**address, on=(*ENDS,) if ends is None else ends)
    try:
        check_task_sink(sink)
    except ValueError as problem:
        raise RequestRefused(f"`notify` {problem}") from None
    from runtime.secret_detection import find_secret_argument

    if find_secret_argument(sink.command):
        raise RequestRefused(
            "`notify` has a command with an argument that looks like a secret",
            hint="let the command read it from a file of the worker's machine",
        )
    return sink


def check_task_sink(sink: TaskSink) -> None:
    """Raise `ValueError` for a sink that no worker can send to."""
    for text in (sink.webhook, sink.topic):
        if text is not None and not isinstance(text, str):
            raise ValueError("has a `webhook` or `topic` that is no text")
    command: Any = sink.command
    if not isinstance(command, tuple) or not all(isinstance(word, str) for word in command):
        raise ValueError("has a `command` that is no list of texts")
    check_sink(sink.webhook, sink.topic, sink.command)
    if sink.webhook and sink.webhook.partition("://")[0] not in TASK_SCHEMES:
        known = ", ".join(f"{each}://" for each in TASK_SCHEMES)
        raise ValueError(f"has a `webhook` from a source that workers do not know, expected one of {known}")


def check_sinks(sinks: object) -> None:
    """Raise `InvalidTask` for the sinks of a task."""
    if not isinstance(sinks, tuple) or not all(isinstance(each, TaskSink) for each in sinks):
        raise InvalidTask("notify", "is no list of sinks")
    if len(sinks) > MOST_SINKS:
        raise InvalidTask("notify", f"has {len(sinks)} sinks, expected at most {MOST_SINKS}")
    for number, sink in enumerate(sinks):
        try:
            check_task_sink(sink)
        except ValueError as problem:
            raise InvalidTask(f"notify[{number}]", str(problem)) from None
        if not sink.on or not set(sink.on) <= set(ENDS):
            raise InvalidTask(f"notify[{number}].on", f"expected one or several of {', '.join(ENDS)}")


def sink_fields(sink: TaskSink) -> dict[str, Any]:
    """The wire object, without fields that have their default value."""
    found: dict[str, Any] = {sink.kind: getattr(sink, sink.kind)}
    if sink.command:
        found["command"] = list(sink.command)
    if sink.on not in (ENDS, ()):
        found["on"] = list(sink.on)
    return found


def read_sinks(name: str, value: object) -> tuple[TaskSink, ...]:
    """The sinks of a wire array; a task checks them. Raises `InvalidTask`."""
    if type(value) is not list:
        raise InvalidTask(name, "is no array of sinks")
    return tuple(_read_sink(f"{name}[{number}]", each) for number, each in enumerate(value))


def _read_sink(name: str, value: object) -> TaskSink:
    if type(value) is not dict:
        raise InvalidTask(name, 'is no object such as {"webhook": "secret-manager://hook"}')
    if unknown := sorted(set(value) - {"webhook", "topic", "command", "on"}):
        raise InvalidTask(f"{name}.{unknown[0]}", "is not known, expected webhook, topic, command or on")
    command, on = value.get("command") or (), value.get("on", list(ENDS))
    if not isinstance(command, list | tuple) or not isinstance(on, list):
        raise InvalidTask(name, "has a `command` or `on` that is no array")
    return TaskSink(
        webhook=value.get("webhook"), topic=value.get("topic"), command=tuple(command), on=tuple(map(str, on))
    )
