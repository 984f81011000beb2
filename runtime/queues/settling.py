"""Settling into a record store that lies beside the queue: what is written, and what is refused."""

from __future__ import annotations

from runtime.queues.base import Refused
from runtime.records.base import RecordExists, ResultStore, is_unwritten, settle_record
from runtime.tasks.lease import Settlement


def record_settlement(records: ResultStore, settlement: Settlement) -> Refused | None:
    """Write the mark and the record; the caller ends the lease in either case, since a record stands."""
    try:
        settle_record(records, settlement.record, settlement.mark)
    except RecordExists as first:
        return Refused(settlement.lease, first.record.worker, first.record)
    return None


def refuse_lost(records: ResultStore, settlement: Settlement, holder: str | None = None) -> Refused | None:
    """Refuse an ending other than success whose lease passed on: another attempt may be running, and this one buries nothing.

    None if its own record stands already.
    """
    record = settlement.record
    existing = records.find(record.task_id, record.generation)
    try:
        unwritten = is_unwritten(record, existing)
    except RecordExists as first:
        return Refused(settlement.lease, first.record.worker, first.record)
    return Refused(settlement.lease, holder) if unwritten else None
