"""The one order in which an ending is written, whatever queue or command writes it.

The mark goes first, so that a record that did not succeed always has its mark until the task is tried again. The record
goes second, and the first record wins. The caller ends the lease only after that. Every step may be repeated.
"""

from __future__ import annotations

from runtime import faults
from runtime.records.base import RecordExists, ResultStore
from runtime.tasks.history import Mark, Record


def settle_record(records: ResultStore, record: Record, mark: Mark | None = None) -> None:
    """Write the mark, then the record; both are durable on return.

    Raises `RecordExists` if another attempt's record was first; if that record contradicts the mark, the mark is closed.
    """
    if mark is not None:
        records.mark(mark)
        faults.reach("queue.marked")
    try:
        records.commit(record)
    except RecordExists as first:
        if mark is not None and first.record.state is not record.state:
            records.unmark(record.task_id, record.generation, record.state)
        raise
    faults.reach("queue.recorded")


def is_unwritten(record: Record, existing: Record | None) -> bool:
    """Whether `record` has yet to be written; False if it lies there already, from a write that was repeated.

    Raises `RecordExists` if `existing` is another attempt's.
    """
    if existing is not None and existing.token != record.token:
        raise RecordExists(existing)
    return existing is None
