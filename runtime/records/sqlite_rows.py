"""Records as rows of the embedded file: what each column holds, and what is made of one that cannot be read."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from runtime.errors import explain_json
from runtime.reasons import EndReason
from runtime.records.codec import encode_ended, encode_text, unreadable_record
from runtime.records.embedded import record_id, split_record_id
from runtime.tasks.history import EndedNote, Record
from runtime.tasks.model import TERMINAL_STATES, TaskState

if TYPE_CHECKING:
    pass

_COLUMNS: Final = "rid, state, token, reason, worker, started, ended, attempts, message, code, value, log, rest"

_INSERT: Final = f"INSERT INTO records({_COLUMNS}) VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"

_REST: Final = ("exit_code", "value_url", "log_url", "outputs_url")


def encode_note(note: EndedNote) -> str:
    return encode_ended(note).decode()


def insert_record(connection: sqlite3.Connection, seq: int, record: Record) -> None:
    """Add the record of task number `seq`; the caller knows that there is none yet."""
    started = record.started_at
    rest: dict[str, Any] | None = None
    for name in _REST:
        value = getattr(record, name)
        if value is not None:
            rest = {} if rest is None else rest
            rest[name] = value
    if record.metrics:
        rest = {} if rest is None else rest
        rest["metrics"] = dict(record.metrics)
    connection.execute(
        _INSERT,
        (
            record_id(seq, record.generation),
            record.state.value,
            record.token,
            record.reason.value,
            _text(record.worker),
            None if started is None else started.timestamp(),
            record.ended_at.timestamp(),
            record.attempts,
            _text(record.message),
            _text(record.code),
            None if record.value is None else encode_text(record.value),
            _log(record.log) if record.log else None,
            None if rest is None else encode_text(rest, "metrics"),
        ),
    )


def _text(text: str | None) -> str | bytes | None:
    """As a column holds it: what is no UTF-8 as bytes, which `_read_text` knows by their type."""
    if text is None or text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="surrogatepass")
    return text


def read_text(stored: Any) -> str | None:
    if isinstance(stored, bytes):
        return stored.decode(errors="surrogatepass")
    return None if stored is None else str(stored)


def _log(log: str) -> bytes | str:
    """The bytes that were printed; JSON where it is no such log."""
    try:
        return log.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        return encode_text(log)


def _read_log(stored: Any) -> str:
    if stored is None:
        return ""
    return stored.decode(errors="surrogateescape") if isinstance(stored, bytes) else str(json.loads(stored))


def raw_text(body: Any) -> str:
    """A stored text as people are shown it, whatever was put there."""
    return body.decode(errors="replace") if isinstance(body, bytes) else str(body)


def read_records(connection: sqlite3.Connection, where: str, values: Sequence[object]) -> list[Record]:
    rows = connection.execute(
        f"SELECT {_COLUMNS}, t.id, e.name FROM records r JOIN tasks t ON t.seq=(r.rid >> 20) "
        f"JOIN experiments e ON e.id=t.experiment WHERE {where} ORDER BY r.rid",
        values,
    ).fetchall()
    return [_record(row) for row in rows]


def _record(row: tuple[Any, ...]) -> Record:
    (
        rid,
        state,
        token,
        reason,
        worker,
        started,
        ended,
        attempts,
        message,
        code,
        value,
        log,
        rest,
        task_id,
        experiment,
    ) = row
    generation = split_record_id(rid)[1]
    unreadable = None
    try:
        found = None if value is None else json.loads(value)
    except (TypeError, ValueError, RecursionError) as problem:
        found, unreadable = None, f"the value of `{task_id}` cannot be read: {explain_json(problem)}"
    try:
        return Record(
            task_id=task_id,
            generation=generation,
            experiment=experiment,
            state=TaskState(state),
            token=token,
            reason=EndReason(reason),
            worker=read_text(worker),
            started_at=None if started is None else read_time(started),
            ended_at=read_time(ended),
            attempts=int(attempts),
            message=read_text(message),
            code=read_text(code),
            value=found,
            log=_read_log(log),
            unreadable=unreadable,
            **({} if rest is None else json.loads(rest)),
        )
    except (TypeError, ValueError, OverflowError, RecursionError) as problem:
        known = TaskState(state) if state in TERMINAL_STATES else TaskState.FAILED
        why = f"the record of `{task_id}` cannot be read: {explain_json(problem)}"
        return unreadable_record(task_id, generation, experiment, known, why)


def read_time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
