"""Whether a queue of the embedded file is paused: a flag in its row, which follows the orders in the record store."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from datetime import timedelta
from typing import Final

from runtime.queues.sqlite.rows import QueueRow
from runtime.records.base import RecordStore
from runtime.records.embedded import (
    EmbeddedFile,
)
from runtime.records.orders import Control, Order
from runtime.records.sqlite import SqliteRecords

SWEPT: Final = timedelta(seconds=30)


class PauseFlag:
    """The flag that claims look at, so that they read no orders."""

    def __init__(self, file: EmbeddedFile, records: RecordStore, row: QueueRow) -> None:
        self._file, self._records, self._row = file, records, row
        self._fused = isinstance(records, SqliteRecords) and records.file is file

    def give(self, decide: Callable[[Control], Order | None]) -> None:
        """Give an order and go by it; one transaction where the records lie in this file."""
        if not self._fused:
            order = decide(self._records.control(self._row.name))
            if order is not None:
                self._records.put_order(self._row.name, order)
            self.follow()
            return
        assert isinstance(self._records, SqliteRecords)
        with self._file.transaction(durable=True) as connection:
            control = self._records.control(self._row.name)
            order = decide(control)
            if order is not None:
                control = self._records.add_order(connection, self._row.name, order)
            self._set_paused(connection, control.paused)
        self._records.look_after_orders(self._row.name)

    def follow(self) -> None:
        """Pause or not, as the store says. Whoever writes that here looks once more, so the last to write knows all."""
        while self.is_paused() is not (told := self._records.control(self._row.name).paused):
            with self._file.transaction(durable=True) as connection:
                self._set_paused(connection, told)

    def is_paused(self) -> bool:
        with self._file.reading() as connection:
            row = connection.execute("SELECT paused FROM queues WHERE name=?", (self._row.name,)).fetchone()
        return bool(row and row[0])

    def _set_paused(self, connection: sqlite3.Connection, paused: bool) -> None:
        connection.execute("UPDATE queues SET paused=? WHERE id=?", (paused, self._row.number(connection)))

    def catch_up(self) -> None:
        """Follow an order whose giver was killed before it was written down here."""
        if not self._fused and self.is_paused() is not self._records.control(self._row.name, max_age=SWEPT).paused:
            self.follow()
