"""The whole record store over named bytes: workers' orders and reports, files of attempts, and all that it builds on.

Folder, bucket and memory differ only in their `Blobs`. docs/records.md shows the layout with plain tools. Nothing here
locks: a step that must happen once is one create-only write, and everything else may be written again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

from runtime.clock import Clock
from runtime.errors import RuntimeFailure, StoreUnavailable, StoreUnsafe
from runtime.records import codec
from runtime.records.base import KeptOutputs, RecordStore, WorkerSeen
from runtime.records.blobs import BlobInfo, Blobs
from runtime.records.control_commands import ControlCommand, OrderLog, QueueControl, ReadOrder, merge
from runtime.records.layout import MERGED, ORDER, WORKER, log_key, order_key, reports_key, worker_key
from runtime.records.results import BlobTotals
from runtime.system import system
from runtime.tasks.id_set import IdSet, task_key
from runtime.tasks.model import TaskState, hex_digest, new_token

if TYPE_CHECKING:
    from runtime.records.artifacts import ArtifactStore
    from runtime.records.notifications import NotificationStore

ORDERS_APART: Final = 64
"""Up to this many orders of a queue lie there as they were given; beyond, they are merged."""
MOVED_FOR: Final = timedelta(minutes=10)
"""How long an order stays beside the merged one that contains it."""
LISTED_WITHIN_S: Final = 300.0
"""A listing of orders that takes this long, half of `MOVED_FOR`, is taken again; it takes seconds."""
REMEMBERED_FOR: Final = timedelta(days=40)
"""How long an order is kept for an experiment that has ended. No subscription of Pub/Sub keeps messages, such as those
that foreign producers sent before the order, for more than 31 days."""
TASKS_LOOKED_AT: Final = 256
"""How many of the single tasks in orders are looked for among the records when orders are merged."""


_proven: set[str] = set()
"""URLs of stores that this process has seen to be create-only."""


class BlobRecords(BlobTotals, RecordStore):
    """`RecordStore` over named bytes."""

    holds_tasks = False

    def __init__(self, blobs: Blobs, *, clock: Clock | None = None) -> None:
        super().__init__(blobs, clock=clock)
        self._order_logs: dict[str, OrderLog] = {}
        self._outputs: str | None = None
        self._checkpoints: str | None = None

    # orders for workers, and their reports

    def put_order(self, queue: str, order: ControlCommand) -> str:
        data = codec.encode_order(order)
        while True:
            identity = new_token()
            key, asked = order_key(queue, f"{identity}.json"), self._clock.now()
            if self._create_or_read(key, data) in (None, data):
                self._skew.fresh = key, asked, self._clock.now()
                break
        self.poll_orders(queue)
        return identity

    def control(self, queue: str, *, max_age: timedelta = timedelta(0)) -> QueueControl:
        log = self._order_log(queue)
        if self._clock.boottime() - log.read_at >= max_age.total_seconds():
            self._read_orders(queue, log)
        return log.control

    def skew(self) -> timedelta | None:
        if self._skew.skew is None:
            if self._skew.fresh is None:
                key, data = "probe/clock.json", codec.encode_json({"schema": codec.SCHEMA})
                asked = self._clock.now()
                self.blobs.put(key, data)
                self._skew.fresh = key, asked, self._clock.now()
            self._skew.learn(self.blobs.list_blobs(self._skew.fresh[0]))
        return self._skew.skew

    def put_worker(self, seen: WorkerSeen) -> None:
        self.blobs.put(worker_key(seen.worker), codec.WORKER.encode(seen))

    def workers(self, *, newer_than: timedelta = timedelta(days=1)) -> list[WorkerSeen]:
        # The backend's clock only saves reading reports that are surely old; `seen_at` decides.
        surely_old = system.now() - newer_than - timedelta(days=1)
        listed = self.blobs.list_blobs("workers/")
        recent = (info.key for info in listed if info.modified >= surely_old and WORKER.fullmatch(info.key))
        seen = (one for key, data in self._read_all(recent) for one in self._decoded(key, data, codec.WORKER.decode))
        oldest = self._clock.now() - newer_than
        return sorted((one for one in seen if one.seen_at >= oldest), key=lambda one: one.worker)

    def poll_orders(self, queue: str) -> None:
        """Merge orders after one was given, which stands even if this fails: the next order tries again."""
        with suppress(RuntimeFailure):
            self._put_orders_together(queue)

    def _order_log(self, queue: str) -> OrderLog:
        if queue not in self._order_logs:
            self._order_logs.setdefault(queue, OrderLog())
        return self._order_logs[queue]

    def _read_orders(self, queue: str, log: OrderLog) -> None:
        """Bring `log` up to date.

        Merged orders move: the merged copy is written first, and the old ones are deleted `MOVED_FOR` later. A listing
        that took less than that contains the one or the other, so only a slow one is taken again, and one with an order
        that was deleted before it was read.
        """
        for pause_s in (0.05, 0.2, 1.0, 2.0, 0.0):
            asked = self._clock.boottime()
            listed = self._list_orders(queue)
            quick = self._clock.boottime() - asked < LISTED_WITHIN_S
            orders = self._read_listed(log, listed) if quick else None
            if orders is not None:
                log.take(orders, at=asked)
                return
            system.sleep(pause_s)
        raise StoreUnavailable(f"the orders of queue `{queue}` in `{self.url}` change faster than they can be read")

    def _list_orders(self, queue: str) -> dict[str, BlobInfo]:
        folder = order_key(queue, "")
        found = ((ORDER.fullmatch(info.key, len(folder)), info) for info in self.blobs.list_blobs(folder))
        return {matched[1]: info for matched, info in found if matched}

    def _read_listed(self, log: OrderLog, listed: Mapping[str, BlobInfo]) -> dict[str, ReadOrder] | None:
        """Each order in `listed`; None if one of them was deleted."""
        known = log.known
        ids = {info.key: identity for identity, info in listed.items() if identity not in known}
        new = {ids[key]: self._decode_order(key, data, listed[ids[key]]) for key, data in self._read_all(ids)}
        if len(new) < len(ids):
            return None
        return {identity: known.get(identity) or new[identity] for identity in listed}

    def _decode_order(self, key: str, data: bytes, listed: BlobInfo) -> ReadOrder:
        """The order; an undecodable one, or a newer release's, is empty and does not keep workers from the others."""
        identity = key.rpartition("/")[2].removesuffix(".json")
        try:
            return codec.decode_order(data, identity, listed.modified, self._address(key))
        except codec.UNDECODABLE as problem:
            self._report(key, problem.message)
            return ReadOrder(QueueControl(), readable=False)

    def _put_orders_together(self, queue: str) -> None:
        """Replace many orders by one of the same meaning, so that a log of years is read in a moment.

        May be killed anywhere and run twice at once: to merge merged orders changes nothing. It compares only the
        store's own times.
        """
        listed = self._list_orders(queue)
        given_at = self._skew.learn(listed.values())
        if len(listed) <= ORDERS_APART:
            return
        log, now = self._order_log(queue), given_at or max(info.modified for info in listed.values())
        stand_in = self._read_listed(log, {each: info for each, info in listed.items() if each.startswith(MERGED)})
        if stand_in is None:
            return
        gone = {
            old
            for identity, order in stand_in.items()
            if now - listed[identity].modified >= MOVED_FOR
            for old in order.merged & listed.keys()
        }
        deque(self._in_parallel(lambda identity: self.blobs.delete(listed[identity].key), sorted(gone)), maxlen=0)
        apart = listed.keys() - gone.union(*(order.merged for order in stand_in.values()))
        if len(apart) <= ORDERS_APART:
            return
        orders = self._read_listed(log, {identity: info for identity, info in listed.items() if identity not in gone})
        if orders:
            readable = {identity: order for identity, order in orders.items() if order.readable}
            said = self._without_ended(merge(order.control for order in readable.values()), now)
            data = codec.encode_merged(said, readable)
            self.blobs.create(order_key(queue, f"{MERGED}{hex_digest(data)[:16]}.json"), data)

    def _without_ended(self, control: QueueControl, now: datetime) -> QueueControl:
        """`control` without single tasks that ended, and without old orders for experiments that did."""
        some = system.sample(sorted(control.tasks), min(TASKS_LOOKED_AT, len(control.tasks)))
        found = self._in_parallel(lambda task: (task, self.find(*task) is not None), some)
        old = [name for name, covered in control.experiments.items() if now - covered.before > REMEMBERED_FOR]
        ended = {name for name in old if self._has_ended(name)}
        purged = control.purged_before
        return replace(
            control,
            tasks=control.tasks - {task for task, is_recorded in found if is_recorded},
            experiments={name: covered for name, covered in control.experiments.items() if name not in ended},
            purged_before=purged if purged and now - purged <= REMEMBERED_FOR else None,
        )

    def _has_ended(self, experiment: str) -> bool:
        """Whether every generation that began has a record."""
        if self.totals(experiment).counts.get(TaskState.QUEUED):
            return False
        from runtime.records.order_scope import read_keys  # Only a merge of many orders comes here.

        recorded = IdSet()
        for task_id, generation in self.recorded(experiment):
            recorded.add(task_key(task_id, generation))
        listed = (read_keys(self, part) for part in self.parts(experiment))
        return all(key in recorded for keys in listed for key in keys) and not any(self.tried_again(experiment))

    # the store itself, and files of attempts

    def check(self) -> None:
        """Prove create-only once for each process and URL.

        The probe stays in the store, so one refused write is the proof from the second process on.
        """
        if self.url in _proven:
            return
        key = "probe/create-only.json"
        for _ in range(2):
            data = codec.encode_json({"schema": codec.SCHEMA, "probe": system.urandom(8).hex()})
            created = self.blobs.create(key, data)
            found = self.blobs.get(key)
            if not created and found is not None and found != data:
                _proven.add(self.url)
                return
            if created and found != data:
                break
        raise StoreUnsafe(
            f"record store `{self.url}` does not keep the first of two writes",
            facts=[f"`{key}` was created twice, and the second creation was not refused"],
            hint="use a folder on a file system with hard links, or a bucket of a service with conditional writes",
            retryable=False,
        )

    def log_url(self, task_id: str, token: str) -> str:
        return self._address(log_key(task_id, token))

    def outputs_url(self, task_id: str, token: str) -> str:
        # On the path of every task, so their common folder is looked up once.
        if self._outputs is None:
            self._outputs = self._address("outputs/").rstrip("/")
        return f"{self._outputs}/{task_id}/{token}"

    def checkpoints_path(self, task_id: str) -> str | None:
        # On the path of every task, so their common folder is looked up once.
        if self._checkpoints is None:
            self._checkpoints = str(self.blobs.path("checkpoints") or "")
        return f"{self._checkpoints}/{task_id}" if self._checkpoints else None

    def keep_outputs(self, task_id: str, token: str, folder: Path) -> KeptOutputs:
        from runtime.records import output_upload

        key = f"outputs/{task_id}/{token}"
        found = output_upload.find_outputs(folder)
        if self.blobs.path(key) is not None:
            # All that lies there stays there.
            if not (found.files or found.others):
                found.remove_empty()
                return KeptOutputs()
            found.sync()
            return KeptOutputs(self._address(key))
        odd = {
            name: why
            for name in found.files
            if (why := output_upload.why_no_object(name, self._address(f"{key}/{name}")))
        }
        names = [name for name in found.files if name not in odd]
        deque(self._in_parallel(lambda name: self.blobs.upload(f"{key}/{name}", found.files[name]), names), maxlen=0)
        left_out = output_upload.report_left_out(found.others | odd)
        return KeptOutputs(self._address(key) if names else None, left_out)

    def open_artifacts(self) -> ArtifactStore:
        from runtime.records.artifacts import ArtifactStore  # Few tasks have any.

        return ArtifactStore(self.blobs)

    def open_notifications(self) -> NotificationStore:
        from runtime.records.notifications import NotificationStore  # Few tasks have any.

        return NotificationStore(self.blobs)

    def append_log(self, task_id: str, token: str, data: bytes) -> str:
        key = log_key(task_id, token)
        self.blobs.append(key, data)
        return self._address(key)

    def read_log(self, url: str) -> Iterator[bytes]:
        return self.blobs.stream("/".join(url.split("/")[-3:]))

    def keep_reports(self, task_id: str, token: str, data: bytes) -> None:
        self.blobs.create(reports_key(task_id, token), data)

    def read_reports(self, task_id: str, token: str) -> bytes | None:
        return self.blobs.get(reports_key(task_id, token))

    def close(self) -> None:
        self._outputs = None
        super().close()
