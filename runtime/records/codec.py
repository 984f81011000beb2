"""Records, notes, marks and the rest as JSON that people read with jq: one object, one line, UTF-8.

What has its default value is left out, fields that this release does not know are ignored, and `schema` is a major
that added fields never bump. Every text can be written: a document that holds half of a surrogate pair, which is no
UTF-8, is written with escapes alone. NaN and infinities are spelled as Python's json does. docs/decisions/text-and-numbers.md
has the reasons.

A record's length modulo 4 says its state (`state_of_size`), so that a listing, which has sizes and costs a request
per 1,000 names, counts states exactly and no record needs to be read: docs/decisions/record-size-says-state.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

from runtime.errors import InvalidRecord, InvalidTask, InvalidValue, NotPossible, StoreUnsafe, explain_json
from runtime.reasons import EndReason
from runtime.records.base import ExperimentSeen, RecordStore, WorkerSeen
from runtime.records.orders import Control, Covered, OldControl, Order, OrderKind, ReadOrder, control_of
from runtime.tasks.history import EndedNote, Mark, Record, StartedMark
from runtime.tasks.model import TaskState, hex_digest
from runtime.tasks.wire import parse_task, task_fields
from runtime.units import format_time, parse_time
from runtime.values import replace

SCHEMA: Final = 1
MERGED: Final = "merged"
"""Stands for the kind of an order that says what several said."""

K = TypeVar("K")

_STATES: Final = (TaskState.SUCCEEDED, TaskState.FAILED, TaskState.CANCELLED, TaskState.EXPIRED)

_READABLE = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_ASCII = json.JSONEncoder(ensure_ascii=True, separators=(",", ":"))


def state_of_size(size: int) -> TaskState:
    """The state of an encoded record of `size` bytes."""
    return _STATES[size % 4]


def encode_text(value: object, field: str = "value") -> str:
    """JSON of anything that a record can hold; raises `InvalidRecord` for the rest."""
    try:
        text = _READABLE.encode(value)
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
    """The object in `data`. Raises `StoreUnsafe` if it is damaged and `NotPossible` if a newer release wrote it."""
    try:
        fields = json.loads(data)
        schema = fields.get("schema", SCHEMA)
    except (ValueError, RecursionError, AttributeError) as problem:
        raise damaged(where, explain_json(problem)) from None
    if schema != SCHEMA:
        raise NotPossible(
            f"`{where}` was written by a newer release",
            facts=[f"found schema {schema!r}, this release reads {SCHEMA}"],
            hint="pip install --upgrade research-runtime",
        )
    return fields  # type: ignore[no-any-return]


def damaged(where: str, problem: object) -> StoreUnsafe:
    return StoreUnsafe(
        f"`{where}` cannot be read: {problem}",
        facts=["it was changed or damaged after it was written; what it said is unknown"],
        hint="move it out of the store to go on without it",
        retryable=False,
    )


UNDECODABLE: Final = (StoreUnsafe, NotPossible)
"""What decoding raises. A listing, or a loop over many, reports it and goes on; nothing else may be caught with it."""


def encode_record(record: Record) -> bytes:
    fields: dict[str, Any] = {
        "schema": SCHEMA,
        "task": record.task_id,
        "generation": record.generation,
        "experiment": record.experiment,
        "state": record.state.value,
        "reason": record.reason.value,
        "token": record.token,
        "attempts": record.attempts,
        "ended_at": format_time(record.ended_at),
    }
    if record.started_at is not None:
        fields["started_at"] = format_time(record.started_at)
    for name in ("message", "worker", "exit_code", "code", "value", "value_url", "outputs_url", "log_url"):
        value = getattr(record, name)
        if value is not None:
            fields[name] = value
    if record.metrics:
        fields["metrics"] = dict(record.metrics)
    if record.log:
        fields["log"] = record.log
    data = encode_json(fields)
    padding = (_STATES.index(record.state) - len(data)) % 4
    return data[:-1] + b" " * padding + b"\n"


def decode_record(data: bytes, where: str = "record") -> Record:
    return _record_of(decode_json(data, where), where)


def read_record(data: bytes, where: str, task_id: str, generation: int) -> Record:
    """As `decode_record`; one that cannot be decoded is `unreadable` and counts as what its name and length say."""
    try:
        return decode_record(data, where)
    except UNDECODABLE as problem:
        why = problem.message
    fields = _salvage(data)
    try:
        found = _record_of(fields | {"value": None, "metrics": {}}, where)
    except UNDECODABLE:
        return unreadable_record(task_id, generation, fields.get("experiment"), state_of_size(len(data)), why)
    return replace(found, unreadable=why)


def unreadable_record(task_id: str, generation: int, experiment: object, state: TaskState, why: str) -> Record:
    """What stands for a record of which nothing else is known."""
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
"""The end reason of a record that says only its state."""
_UNKNOWN_TIME: Final = datetime(1970, 1, 1, tzinfo=UTC)


def _salvage(data: bytes) -> dict[str, Any]:
    """The object with numbers that are too long left out; empty where there is none to be had."""
    try:
        fields = json.loads(data, parse_int=lambda text: int(text) if len(text) < _LONGEST_NUMBER else None)
    except (ValueError, RecursionError):
        return {}
    return fields if type(fields) is dict else {}


_LONGEST_NUMBER: Final = 600
"""Digits that every interpreter reads, whatever its limit is set to."""


def _record_of(fields: Mapping[str, Any], where: str) -> Record:
    with _reading(where):
        return Record(
            task_id=_need(fields, "task", str),
            generation=_need(fields, "generation", int),
            experiment=_need(fields, "experiment", str),
            state=TaskState(fields["state"]),
            reason=EndReason(fields["reason"]),
            token=_need(fields, "token", str),
            attempts=_take(fields, "attempts", int, 1),
            ended_at=parse_time(fields["ended_at"]),
            started_at=_time(fields.get("started_at")),
            message=_take(fields, "message", str),
            worker=_take(fields, "worker", str),
            exit_code=_take(fields, "exit_code", int),
            value=fields.get("value"),
            value_url=_take(fields, "value_url", str),
            log=_take(fields, "log", str, ""),
            log_url=_take(fields, "log_url", str),
            outputs_url=_take(fields, "outputs_url", str),
            metrics=_take(fields, "metrics", dict, {}),
            code=_take(fields, "code", str),
        )


def read_value(record: Record, records: RecordStore) -> Any:
    """What the task returned, wherever the store keeps it; None only if it returned nothing, or None.

    Raises `StoreUnavailable` if the store has it no more or does not answer, and `StoreUnsafe` if it is damaged.
    """
    if record.unreadable:
        raise damaged(f"the value of task {record.task_id}", record.unreadable)
    if record.value_url is None:
        return record.value
    data = records.get_blob(record.value_url)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as problem:
        raise damaged(record.value_url, explain_json(problem)) from None


def encode_ended(note: EndedNote) -> bytes:
    fields: dict[str, Any] = {
        "schema": SCHEMA,
        "token": note.token,
        "reason": note.reason.value,
        "ended_at": format_time(note.ended_at),
    }
    if note.started_at is not None:
        fields["started_at"] = format_time(note.started_at)
    for name in ("worker", "message", "exit_code", "machine", "evidence"):
        value = getattr(note, name)
        if value is not None:
            fields[name] = value
    for name in ("alone", "progressed", "log"):
        if value := getattr(note, name):
            fields[name] = value
    return encode_json(fields)


def decode_ended(data: bytes, where: str = "note") -> EndedNote:
    fields = decode_json(data, where)
    with _reading(where):
        return EndedNote(
            token=_need(fields, "token", str),
            reason=EndReason(fields["reason"]),
            ended_at=parse_time(fields["ended_at"]),
            started_at=_time(fields.get("started_at")),
            worker=_take(fields, "worker", str),
            message=_take(fields, "message", str),
            alone=_take(fields, "alone", bool, False),
            machine=_take(fields, "machine", str),
            evidence=_take(fields, "evidence", str),
            progressed=_take(fields, "progressed", bool, False),
            exit_code=_take(fields, "exit_code", int),
            log=_take(fields, "log", str, ""),
        )


def encode_started(started: StartedMark) -> bytes:
    return encode_json(
        {
            "schema": SCHEMA,
            "token": started.token,
            "worker": started.worker,
            "started_at": format_time(started.started_at),
            "alone": started.alone,
            **({} if started.machine is None else {"machine": started.machine}),
        }
    )


def decode_started(data: bytes, where: str = "started mark") -> StartedMark:
    fields = decode_json(data, where)
    with _reading(where):
        return StartedMark(
            _need(fields, "token", str),
            _need(fields, "worker", str),
            parse_time(fields["started_at"]),
            _take(fields, "alone", bool, False),
            _take(fields, "machine", str),
        )


def encode_mark(mark: Mark) -> bytes:
    fields: dict[str, Any] = {
        "schema": SCHEMA,
        "task_id": mark.task_id,
        "generation": mark.generation,
        "experiment": mark.experiment,
        "state": mark.state.value,
        "reason": mark.reason.value,
        "marked_at": format_time(mark.marked_at),
    }
    if mark.message is not None:
        fields["message"] = mark.message
    if mark.task is not None:
        fields["task"] = task_fields(mark.task)
    if mark.raw is not None:
        fields["raw"] = mark.raw
    return encode_json(fields)


def decode_mark(data: bytes, where: str = "mark") -> Mark:
    fields = decode_json(data, where)
    with _reading(where):
        task = fields.get("task")
        return Mark(
            task_id=_need(fields, "task_id", str),
            generation=_need(fields, "generation", int),
            experiment=_need(fields, "experiment", str),
            state=TaskState(fields["state"]),
            reason=EndReason(fields["reason"]),
            marked_at=parse_time(fields["marked_at"]),
            message=_take(fields, "message", str),
            task=None if task is None else parse_task(task),
            raw=_take(fields, "raw", str),
        )


def encode_experiment(seen: ExperimentSeen) -> bytes:
    fields: dict[str, Any] = {"schema": SCHEMA, "experiment": seen.name}
    if seen.created_at is not None:
        fields["created_at"] = format_time(seen.created_at)
    if seen.queue is not None:
        fields["queue"] = seen.queue
    return encode_json(fields)


def decode_experiment(data: bytes, where: str = "experiment") -> ExperimentSeen:
    fields = decode_json(data, where)
    with _reading(where):
        return ExperimentSeen(
            _need(fields, "experiment", str), _time(fields.get("created_at")), _take(fields, "queue", str)
        )


def encode_order(order: Order) -> bytes:
    fields: dict[str, Any] = {"schema": SCHEMA, "order": order.kind.value, "at": format_time(order.at)}
    if order.by is not None:
        fields["by"] = order.by
    if order.ends:
        fields["ends"] = sorted(order.ends)
    if order.experiments:
        fields["experiments"] = {name: sorted(parts) for name, parts in sorted(order.experiments.items())}
    if order.tasks:
        fields["tasks"] = _generations(order.tasks)
    return encode_json(fields)


def encode_merged(control: Control, merged: Iterable[str]) -> bytes:
    """What `control` says, in place of the orders whose ids are `merged`; equal values are equal bytes."""
    fields: dict[str, Any] = {"schema": SCHEMA, "order": MERGED, "merged": sorted(merged)}
    if control.pauses:
        fields["pauses"] = sorted(control.pauses)
    if control.ended:
        fields["ended"] = sorted(control.ended)
    if control.experiments:
        fields["experiments"] = {
            name: {
                "parts": sorted(covered.parts),
                "before": format_time(covered.before),
                "ordered_at": format_time(covered.ordered_at),
            }
            for name, covered in sorted(control.experiments.items())
        }
    if control.tasks:
        fields["tasks"] = _generations(control.tasks)
    if control.purged_before is not None:
        fields["purged_before"] = format_time(control.purged_before)
    return encode_json(fields)


def decode_order(data: bytes, identity: str, stored_at: datetime, where: str = "order") -> ReadOrder:
    fields = decode_json(data, where)
    with _reading(where):
        tasks = frozenset(
            (task_id, generation) for task_id, many in fields.get("tasks", {}).items() for generation in many
        )
        experiments = fields.get("experiments", {})
        if fields["order"] == MERGED:
            covered = {
                name: Covered(
                    parts=frozenset(each["parts"]),
                    before=parse_time(each["before"]),
                    ordered_at=parse_time(each["ordered_at"]),
                )
                for name, each in experiments.items()
            }
            control = Control(
                pauses=frozenset(fields.get("pauses", ())),
                ended=frozenset(fields.get("ended", ())),
                experiments=covered,
                tasks=tasks,
                purged_before=_time(fields.get("purged_before")),
            )
            return ReadOrder(control, frozenset(fields["merged"]))
        order = Order(
            kind=OrderKind(fields["order"]),
            at=parse_time(fields["at"]),
            by=fields.get("by"),
            ends=frozenset(fields.get("ends", ())),
            experiments={name: frozenset(parts) for name, parts in experiments.items()},
            tasks=tasks,
        )
        # As a merged order will say it.
        return ReadOrder(control_of(identity, order, parse_time(format_time(stored_at))))


def _generations(tasks: Iterable[tuple[str, int]]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for task_id, generation in sorted(tasks):
        found.setdefault(task_id, []).append(generation)
    return found


def decode_old_control(data: bytes, where: str = "control") -> Control:
    """What an older release told the workers, in one object that it wrote anew for each order."""
    fields = decode_json(data, where)
    with _reading(where):
        old = OldControl(
            purged_before=_time(fields.get("purged_before")),
            cancelled_before={name: parse_time(at) for name, at in fields.get("cancelled_before", {}).items()},
            cancelled_tasks=frozenset(fields.get("cancelled_tasks", ())),
        )
        # Named by its content: once it is resumed, it would take another change to pause again.
        pause = f"control-{hex_digest(data)[:16]}"
        return Control(
            pauses=frozenset({pause}) if fields.get("paused", False) else frozenset(),
            old=None if old == OldControl() else old,
        )


def encode_worker(seen: WorkerSeen) -> bytes:
    return encode_json(
        {
            "schema": SCHEMA,
            "worker": seen.worker,
            "host": seen.host,
            "queue": seen.queue,
            "seen_at": format_time(seen.seen_at),
            "started_at": format_time(seen.started_at),
            "slots": seen.slots,
            "running": list(seen.running),
            "done": seen.done,
            "failed": seen.failed,
            "rate_per_s": seen.rate_per_s,
            "left": seen.left,
            "labels": dict(seen.labels),
            "declined": dict(seen.declined),
        }
    )


def decode_worker(data: bytes, where: str = "worker") -> WorkerSeen:
    fields = decode_json(data, where)
    with _reading(where):
        return WorkerSeen(
            worker=_need(fields, "worker", str),
            host=_need(fields, "host", str),
            queue=_need(fields, "queue", str),
            seen_at=parse_time(fields["seen_at"]),
            started_at=parse_time(fields["started_at"]),
            slots=_need(fields, "slots", int),
            running=tuple(_take(fields, "running", list, [])),
            done=_take(fields, "done", int, 0),
            failed=_take(fields, "failed", int, 0),
            rate_per_s=float(fields.get("rate_per_s", 0)),
            left=_take(fields, "left", bool, False),
            labels=_take(fields, "labels", dict, {}),
            declined=_take(fields, "declined", dict, {}),
        )


def _time(text: str | None) -> datetime | None:
    return None if text is None else parse_time(text)


def _need(fields: Mapping[str, Any], name: str, kind: type[K]) -> K:
    value = fields[name]
    if type(value) is not kind:
        raise TypeError(f"`{name}` is {type(value).__name__}, expected {kind.__name__}")
    return value


def _take(fields: Mapping[str, Any], name: str, kind: type[Any], default: Any = None) -> Any:
    return default if fields.get(name) is None else _need(fields, name, kind)


@contextmanager
def _reading(where: str) -> Iterator[None]:
    try:
        yield
    except KeyError as problem:
        raise damaged(where, f"it has no {problem}") from None
    except (ValueError, TypeError, AttributeError, InvalidValue, InvalidTask) as problem:
        raise damaged(where, problem) from None
