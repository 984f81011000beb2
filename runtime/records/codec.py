"""Records, notes, marks and the rest as JSON that people read with jq: one object, one line, UTF-8.

Most fields with a default value are left out, unknown fields are ignored, and `schema` is a major version that added
fields never raise. Every text can be written: a document that holds half of a surrogate pair, which is no
UTF-8, is written with escapes alone. NaN and infinities are spelled as Python's json does. docs/decisions/text-and-numbers.md
has the reasons.

A record's length modulo 4 is its state (`state_of_size`), so that a listing, which has sizes and costs a request per
1,000 names, counts states exactly without reading a record: docs/decisions/record-size-says-state.md.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final, Generic, NamedTuple, TypeVar

from runtime.end_reasons import EndReason
from runtime.errors import (
    InvalidRecord,
    InvalidTask,
    InvalidValue,
    NotPossible,
    ObjectDamaged,
    StoreUnsafe,
    explain_json,
)
from runtime.records.base import ExperimentSeen, RecordStore, WorkerSeen
from runtime.records.control_commands import (
    CancelledRange,
    ControlCommand,
    OrderKind,
    QueueControl,
    ReadOrder,
    control_of,
)
from runtime.tasks.canonical_json import make_encoder
from runtime.tasks.history import EndedNote, Mark, Record, StartedMark
from runtime.tasks.model import Task, TaskState
from runtime.tasks.wire import parse_task, task_fields
from runtime.units import format_time, parse_time

SCHEMA: Final = 1
MERGED: Final = "merged"
"""The kind of an order in place of several others."""

V = TypeVar("V")

REQUIRED: Final = object()
"""The default of a field that every object has."""

_STATES: Final = (TaskState.SUCCEEDED, TaskState.FAILED, TaskState.CANCELLED, TaskState.EXPIRED)

_encode = make_encoder(sort_keys=False, allow_nan=True)
_ASCII = json.JSONEncoder(ensure_ascii=True, separators=(",", ":"))


def state_of_size(size: int) -> TaskState:
    """The state of an encoded record of `size` bytes."""
    return _STATES[size % 4]


def encode_text(value: object, field: str = "value") -> str:
    """JSON of anything that a record can hold; raises `InvalidRecord` for the rest."""
    try:
        text = _encode(value)
        if not text.isascii():
            text.encode()
        return text
    except UnicodeEncodeError:
        return _ASCII.encode(value)
    except (TypeError, ValueError, RecursionError) as problem:
        raise InvalidRecord(field, problem) from None


def encode_json(fields: Mapping[str, Any]) -> bytes:
    try:
        return encode_text(fields).encode() + b"\n"
    except InvalidRecord:
        for name, value in fields.items():
            encode_text(value, name)
        raise


def decode_json(data: bytes, where: str) -> dict[str, Any]:
    """The object in `data`. Raises `ObjectDamaged`, and `NotPossible` if a newer release wrote it."""
    try:
        fields = json.loads(data)
        schema = fields.get("schema", SCHEMA)
    except (ValueError, RecursionError, AttributeError) as problem:
        raise ObjectDamaged(where, explain_json(problem)) from None
    if schema != SCHEMA:
        raise NotPossible(
            f"`{where}` was written by a newer release",
            facts=[f"found schema {schema!r}, this release reads {SCHEMA}"],
            hint="pip install --upgrade research-runtime",
        )
    return fields  # type: ignore[no-any-return]


UNDECODABLE: Final = (StoreUnsafe, NotPossible)
"""Failures of decoding. A listing, or a loop over many objects, reports them and goes on; it catches nothing else."""


class JsonField(NamedTuple):
    """A key of an object's JSON and the attribute that it holds."""

    key: str
    kind: Any
    default: Any = REQUIRED
    """The value for a missing or null key; it is not written, unless `always`."""
    attribute: str | None = None
    """The attribute's name if it is not the key."""
    always: bool = False


class JsonFormat(Generic[V]):
    """A value class as one JSON object: its fields, in the order in which they are written."""

    def __init__(self, made: type[V], *fields: JsonField) -> None:
        self._made, self._fields = made, fields
        self._get = operator.attrgetter(*(each.attribute or each.key for each in fields))
        # None is never written, so a default of None needs no comparison.
        left_out = [REQUIRED if each.always or each.default is None else each.default for each in fields]
        self._spelling = [
            (each.key, default, _SPELL.get(each.kind)) for each, default in zip(fields, left_out, strict=True)
        ]

    def encode(self, value: V) -> bytes:
        fields: dict[str, Any] = {"schema": SCHEMA}
        for (key, default, spell), found in zip(self._spelling, self._get(value), strict=True):
            if found is not None and (default is REQUIRED or found != default):
                fields[key] = found if spell is None else spell(found)
        return encode_json(fields)

    def decode(self, data: bytes, where: str) -> V:
        """Raises `ObjectDamaged`, and `NotPossible` if a newer release wrote it."""
        return self.read(decode_json(data, where), where)

    def read(self, fields: Mapping[str, Any], where: str) -> V:
        values = {}
        with _reading(where):
            for key, kind, default, attribute, _ in self._fields:
                found: Any = fields[key] if default is REQUIRED else fields.get(key)
                if found is None and default is not REQUIRED:
                    found = dict(default) if type(default) is dict else default
                elif kind in _READ:
                    found = _READ[kind](found)
                elif kind is not Any and type(found) is not kind:
                    raise TypeError(f"`{key}` is {type(found).__name__}, expected {kind.__name__}")
                values[attribute or key] = tuple(found) if kind is list else found
            return self._made(**values)


_SPELL: Final[Mapping[Any, Callable[[Any], Any]]] = {datetime: format_time, dict: dict, Task: task_fields}
_READ: Final[Mapping[Any, Callable[[Any], Any]]] = {
    datetime: parse_time,
    Task: parse_task,
    TaskState: TaskState,
    EndReason: EndReason,
    float: float,
}

RECORD: Final = JsonFormat(
    Record,
    JsonField("task", str, attribute="task_id"),
    JsonField("generation", int),
    JsonField("experiment", str),
    JsonField("state", TaskState),
    JsonField("reason", EndReason),
    JsonField("token", str),
    JsonField("attempts", int, 1, always=True),
    JsonField("ended_at", datetime),
    JsonField("started_at", datetime, None),
    JsonField("message", str, None),
    JsonField("worker", str, None),
    JsonField("exit_code", int, None),
    JsonField("code", str, None),
    JsonField("value", Any, None),
    JsonField("value_url", str, None),
    JsonField("outputs_url", str, None),
    JsonField("log_url", str, None),
    JsonField("metrics", dict, {}),
    JsonField("metric_ranges", dict, {}),
    JsonField("log", str, ""),
)
ENDED: Final = JsonFormat(
    EndedNote,
    JsonField("token", str),
    JsonField("reason", EndReason),
    JsonField("ended_at", datetime),
    JsonField("started_at", datetime, None),
    JsonField("worker", str, None),
    JsonField("message", str, None),
    JsonField("exit_code", int, None),
    JsonField("machine", str, None),
    JsonField("evidence", str, None),
    JsonField("alone", bool, False),
    JsonField("progressed", bool, False),
    JsonField("unseen", bool, False),
    JsonField("log", str, ""),
)
STARTED: Final = JsonFormat(
    StartedMark,
    JsonField("token", str),
    JsonField("worker", str),
    JsonField("started_at", datetime),
    JsonField("alone", bool, False, always=True),
    JsonField("machine", str, None),
    JsonField("proven", bool, None),
)
MARK: Final = JsonFormat(
    Mark,
    JsonField("task_id", str),
    JsonField("generation", int),
    JsonField("experiment", str),
    JsonField("state", TaskState),
    JsonField("reason", EndReason),
    JsonField("marked_at", datetime),
    JsonField("message", str, None),
    JsonField("task", Task, None),
    JsonField("raw", str, None),
)
EXPERIMENT: Final = JsonFormat(
    ExperimentSeen,
    JsonField("experiment", str, attribute="name"),
    JsonField("created_at", datetime, None),
    JsonField("queue", str, None),
)
WORKER: Final = JsonFormat(
    WorkerSeen,
    JsonField("worker", str),
    JsonField("host", str),
    JsonField("queue", str),
    JsonField("seen_at", datetime),
    JsonField("started_at", datetime),
    JsonField("slots", int),
    JsonField("running", list, (), always=True),
    JsonField("done", int, 0, always=True),
    JsonField("failed", int, 0, always=True),
    JsonField("rate_per_s", float, 0, always=True),
    JsonField("left", bool, False, always=True),
    JsonField("labels", dict, {}, always=True),
    JsonField("declined", dict, {}, always=True),
    JsonField("reports", dict, {}),
)


def encode_record(record: Record) -> bytes:
    data = RECORD.encode(record)
    padding = (_STATES.index(record.state) - len(data)) % 4
    return data[:-1] + b" " * padding + b"\n"


def read_record(data: bytes, where: str, task_id: str, generation: int) -> Record:
    """Decode a record; an undecodable one is `unreadable`, with the task, generation and state of its name and length."""
    try:
        return RECORD.decode(data, where)
    except UNDECODABLE as problem:
        why = problem.message
    fields = _salvage(data)
    try:
        found = RECORD.read(fields | {"value": None, "metrics": {}, "metric_ranges": {}}, where)
    except UNDECODABLE:
        return unreadable_record(task_id, generation, fields.get("experiment"), state_of_size(len(data)), why)
    return replace(found, unreadable=why)


def unreadable_record(task_id: str, generation: int, experiment: object, state: TaskState, why: str) -> Record:
    """The stand-in for a record that cannot be read."""
    return Record(
        task_id=task_id,
        generation=generation,
        experiment=experiment if isinstance(experiment, str) else "",
        state=state,
        token="",
        reason=REASON_OF[state],
        ended_at=_UNKNOWN_TIME,
        message=None if state is TaskState.SUCCEEDED else why,
        unreadable=why,
    )


REASON_OF: Final = {
    TaskState.SUCCEEDED: EndReason.SUCCEEDED,
    TaskState.FAILED: EndReason.APP_FAILED,
    TaskState.CANCELLED: EndReason.CANCELLED,
    TaskState.EXPIRED: EndReason.EXPIRED,
}
"""The end reason of a record with nothing but a state."""
_UNKNOWN_TIME: Final = datetime(1970, 1, 1, tzinfo=UTC)


def _salvage(data: bytes) -> dict[str, Any]:
    """The object without numbers that are too long; empty if it cannot be read at all."""
    try:
        fields = json.loads(data, parse_int=lambda text: int(text) if len(text) < _LONGEST_NUMBER else None)
    except (ValueError, RecursionError):
        return {}
    return fields if type(fields) is dict else {}


_LONGEST_NUMBER: Final = 600
"""Digits that every interpreter reads, at any setting of its limit."""


def read_value(record: Record, records: RecordStore) -> Any:
    """The task's result, wherever the store keeps it; None only if the task returned nothing, or None.

    Raises `StoreUnavailable` if the store has it no more or does not answer, and `ObjectDamaged`.
    """
    if record.unreadable:
        raise ObjectDamaged(f"the value of task {record.task_id}", record.unreadable)
    if record.value_url is None:
        return record.value
    data = records.get_blob(record.value_url)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as problem:
        raise ObjectDamaged(record.value_url, explain_json(problem)) from None


def encode_order(order: ControlCommand) -> bytes:
    optional = {
        "by": order.by,
        "ends": sorted(order.ends),
        "experiments": {name: sorted(parts) for name, parts in sorted(order.experiments.items())},
        "tasks": _generations(order.tasks),
    }
    fields = {"schema": SCHEMA, "order": order.kind.value, "at": format_time(order.at)}
    return encode_json(fields | {name: value for name, value in optional.items() if value})


def encode_merged(control: QueueControl, merged: Iterable[str]) -> bytes:
    """`control` as an order in place of those with the ids `merged`; equal values are equal bytes."""
    optional = {
        "pauses": sorted(control.pauses),
        "ended": sorted(control.ended),
        "experiments": {
            name: {
                "parts": sorted(covered.parts),
                "before": format_time(covered.before),
                "ordered_at": format_time(covered.ordered_at),
            }
            for name, covered in sorted(control.experiments.items())
        },
        "tasks": _generations(control.tasks),
        "purged_before": control.purged_before and format_time(control.purged_before),
    }
    fields = {"schema": SCHEMA, "order": MERGED, "merged": sorted(merged)}
    return encode_json(fields | {name: value for name, value in optional.items() if value})


def decode_order(data: bytes, identity: str, stored_at: datetime, where: str) -> ReadOrder:
    fields = decode_json(data, where)
    with _reading(where):
        tasks = frozenset(
            (task_id, generation) for task_id, many in fields.get("tasks", {}).items() for generation in many
        )
        experiments = fields.get("experiments", {})
        if fields["order"] == MERGED:
            covered = {
                name: CancelledRange(
                    parts=frozenset(each["parts"]),
                    before=parse_time(each["before"]),
                    ordered_at=parse_time(each["ordered_at"]),
                )
                for name, each in experiments.items()
            }
            control = QueueControl(
                pauses=frozenset(fields.get("pauses", ())),
                ended=frozenset(fields.get("ended", ())),
                experiments=covered,
                tasks=tasks,
                purged_before=_time(fields.get("purged_before")),
            )
            return ReadOrder(control, frozenset(fields["merged"]))
        order = ControlCommand(
            kind=OrderKind(fields["order"]),
            at=parse_time(fields["at"]),
            by=fields.get("by"),
            ends=frozenset(fields.get("ends", ())),
            experiments={name: frozenset(parts) for name, parts in experiments.items()},
            tasks=tasks,
        )
        # With milliseconds, as in a merged order.
        return ReadOrder(control_of(identity, order, parse_time(format_time(stored_at))))


def _generations(tasks: Iterable[tuple[str, int]]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for task_id, generation in sorted(tasks):
        found.setdefault(task_id, []).append(generation)
    return found


def _time(text: str | None) -> datetime | None:
    return None if text is None else parse_time(text)


@contextmanager
def _reading(where: str) -> Iterator[None]:
    try:
        yield
    except KeyError as problem:
        raise ObjectDamaged(where, f"it has no {problem}") from None
    except (ValueError, TypeError, AttributeError, InvalidValue, InvalidTask) as problem:
        raise ObjectDamaged(where, problem) from None
