"""A whole record store over named bytes: the layout, the commit, marks, manifests and totals.

Folder, bucket and memory differ only in their `Blobs`. docs/records.md shows the layout with plain tools. Nothing here
locks: what must happen once is one create-only write, and all else may be written again.
"""

from __future__ import annotations

import itertools
import os
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Final, TypeVar

from runtime.clock import Clock, SystemClock
from runtime.errors import PartTaken, RuntimeFailure, StoreUnavailable, StoreUnsafe
from runtime.records import codec
from runtime.records.base import (
    INLINE_BYTES,
    ExperimentSeen,
    KeptOutputs,
    ManifestPart,
    RecordStore,
    Totals,
    WorkerSeen,
)
from runtime.records.blobs.base import BlobInfo, Blobs
from runtime.records.coverage import read_keys
from runtime.records.orders import Control, Order, OrderLog, ReadOrder, merge
from runtime.records.settle import is_unwritten
from runtime.tasks.history import EndedNote, History, Mark, Record, StartedMark
from runtime.tasks.idset import IdSet, task_key
from runtime.tasks.model import Task, TaskState, experiment_digest, hex_digest, new_token
from runtime.values import replace

# Executors and URLs load a good deal that a worker on the embedded file never uses.
if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

NOTE_LOG_BYTES: Final = 8 * 1024
REPORTED: Final = 1_000
"""Things that cannot be decoded and are said by one store object; more help nobody."""
MARKS_COUNTED: Final = 10_000
"""Up to here `totals` counts what did not succeed by the names of its marks; beyond, it believes the counters."""
ORDERS_APART: Final = 64
"""Up to this many orders of a queue lie there as they were given; beyond, they are put together."""
MOVED_FOR: Final = timedelta(minutes=10)
"""How long an order stays beside the one that says it too."""
LISTED_WITHIN_S: Final = 300.0
"""A listing of orders that takes as long, which is half of that, is taken again; it takes seconds."""
REMEMBERED_FOR: Final = timedelta(days=40)
"""How long an order is kept for an experiment that has ended. No subscription of Pub/Sub keeps messages, such as those
that foreign producers sent before the order, for more than 31 days."""
TASKS_LOOKED_AT: Final = 256
"""Of the single tasks that orders name: how many are looked for among the records when orders are put together."""

_HEX: Final = "0123456789abcdef"
_OUR_ID: Final = re.compile(r"t-[0-9a-f]{24}")
_COUNTED: Final = (TaskState.SUCCEEDED, TaskState.FAILED, TaskState.CANCELLED, TaskState.EXPIRED)

# What listings take for ours, in whole: people, editors and copying tools leave other names beside it.
# Text is compiled when a folder or a bucket is listed: the local stack loads this module too.
_RECORD: Final = r"records/[0-9a-f]{8}/[0-9a-f]/([\w+@=%-]+)\.g(\d+)\.json"
_MARK: Final = r"marks/[0-9a-f]{8}/([\w+@=%-]+)\.g(\d+)\.(failed|cancelled|expired)\.json"
_ATTEMPT: Final = r"attempts/[\w+@=%-]+/g\d+/[\w-]+\.(ended|started)\.json"
_EXPERIMENT: Final = r"experiments/([0-9a-f]{8})-[\w.~+@=%-]*\.json"
_PART: Final = r"manifests/[0-9a-f]{8}/((\d+)-(\d+)-[0-9a-f]+)\.(jsonl|sent)"
_COUNTER: Final = r"counters/[0-9a-f]{8}/([\w.~+@=%-]+)/(\d{13})-s(\d+)-f(\d+)-c(\d+)-x(\d+)"
_WORKER: Final = re.compile(r"workers/[\w.~+@=%-]+\.json", re.ASCII)
_BLOB: Final = re.compile(r"[a-z]+/[0-9a-f]{64}")
_ORDER: Final = re.compile(r"((?:merged-)?[0-9a-f]{16})\.json")
MERGED: Final = "merged-"
"""Begins the id of an order that stands in place of several."""


A = TypeVar("A")
B = TypeVar("B")

_proven: set[str] = set()
"""URLs whose create-only this process has seen to hold."""


class BlobRecords(RecordStore):
    holds_tasks = False

    def __init__(self, blobs: Blobs, *, clock: Clock | None = None) -> None:
        self.url = blobs.url
        self.blobs = blobs
        self._clock = clock or SystemClock()
        self._known_experiments: set[str] = set()
        self._homes: dict[str, str] = {}
        self._reported: set[str] = set()
        """Keys of what cannot be decoded, each said once."""
        self._counters: dict[tuple[str, str], str] = {}
        """By experiment and worker the name of the last report."""
        self._start_of_counting = os.urandom(4).hex()
        self._outputs: str | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._lock = Lock()
        self._order_logs: dict[str, OrderLog] = {}
        self._fresh: tuple[str, datetime, datetime] | None = None
        """The key that this process created last, and the times before and after."""
        self._skew: timedelta | None = None

    def check(self) -> None:
        """Prove create-only once for each process and URL.

        The probe stays in the store, so one refused write is the proof from the second process on.
        """
        if self.url in _proven:
            return
        key = "probe/create-only.json"
        for _ in range(2):
            data = codec.encode_json({"schema": codec.SCHEMA, "probe": os.urandom(8).hex()})
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

    # records

    def commit(self, record: Record) -> None:
        record = self.fit(record)
        self._see_experiment(record.experiment)
        key = _record_key(record.task_id, record.generation, self._home(record.task_id, record.experiment))
        existing = self._create_or_read(key, codec.encode_record(record))
        if existing is not None:
            is_unwritten(record, self._decode_record(key, existing))

    def fit(self, record: Record) -> Record:
        """The record with its value and log within `INLINE_BYTES`; a larger value goes to `value_url`."""
        if record.value is not None:
            encoded = codec.encode_text(record.value).encode()
            if len(encoded) > INLINE_BYTES:
                record = replace(record, value=None, value_url=self.put_blob(encoded, prefix="values"))
        log = _end_of(record.log, INLINE_BYTES)
        return record if log is record.log else replace(record, log=log)

    def find(self, task_id: str, generation: int) -> Record | None:
        home = self._find_home(task_id)
        return None if home is None else self._read_record(_record_key(task_id, generation, home))

    def find_all(self, task_id: str) -> list[Record]:
        home = self._find_home(task_id)
        if home is None:
            return []
        keys = self.blobs.list_keys(f"records/{home}/{_shard(task_id)}/{task_id}.g")
        return sorted(self._read_records(keys), key=lambda record: record.generation)

    def resolve(self, prefix: str, limit: int = 10) -> list[str]:
        if _OUR_ID.fullmatch(prefix):
            homes = [prefix[-8:]]
        else:
            homes = sorted({found[1] for found in _matched(self.blobs.list_keys("experiments/"), _EXPERIMENT)})
        shards = _shard(prefix) if len(prefix) > 2 else _HEX
        places = [(f"records/{home}/{shard}/{prefix}", _RECORD) for home in homes for shard in shards]
        places += [(f"marks/{home}/{prefix}", _MARK) for home in homes]

        def ids_under(place: tuple[str, str]) -> list[str]:
            ids = (found[1] for found in _matched(self.blobs.list_keys(place[0]), place[1]))
            return list(itertools.islice((task_id for task_id, _ in itertools.groupby(ids)), limit))

        found = {task_id for ids in self._in_parallel(ids_under, places) for task_id in ids}
        return sorted(found)[:limit]

    def records(self, experiment: str) -> Iterator[Record]:
        shards = _record_shards(experiment)
        return self._read_records(itertools.chain.from_iterable(map(self.blobs.list_keys, shards)))

    def recorded(self, experiment: str) -> Iterator[tuple[str, int]]:
        def listed(shard: str) -> list[tuple[str, int]]:
            return [(found[1], int(found[2])) for found in _matched(self.blobs.list_keys(shard), _RECORD)]

        return itertools.chain.from_iterable(self._in_parallel(listed, _record_shards(experiment)))

    def tried_again(self, experiment: str) -> Iterator[tuple[str, int]]:
        def listed(shard: str) -> list[tuple[str, int, TaskState]]:
            return [newest for newest in self._newest_states(shard) if newest[2] is not TaskState.SUCCEEDED]

        ended = set(itertools.chain.from_iterable(self._in_parallel(listed, _record_shards(experiment))))
        # Marks are listed last: a mark is there before its record is, and once it is gone it is gone for good.
        ended.difference_update((mark[1], int(mark[2]), TaskState(mark[3])) for mark in self._list_marks(experiment))
        return ((task_id, generation) for task_id, generation, _ in ended)

    def _list_marks(self, experiment: str) -> Iterator[re.Match[str]]:
        return _matched(self.blobs.list_keys(f"marks/{experiment_digest(experiment)}/"), _MARK)

    # attempts

    def note_started(self, task: Task, started: StartedMark) -> None:
        self.blobs.create(_started_key(task, started.token), codec.encode_started(started))

    def retract_started(self, task: Task, token: str) -> None:
        self.blobs.delete(_started_key(task, token))

    def note_ended(self, task: Task, note: EndedNote) -> None:
        note = replace(note, log=_end_of(note.log, NOTE_LOG_BYTES))
        self.blobs.create(f"attempts/{task.id}/g{task.generation}/{note.token}.ended.json", codec.encode_ended(note))

    def history(self, task_id: str, generation: int) -> History:
        ended: list[EndedNote] = []
        started: list[StartedMark] = []
        closed: set[str] = set()
        found = list(_matched(self.blobs.list_keys(f"attempts/{task_id}/g{generation}/"), _ATTEMPT))
        if not found:
            return History()
        for key, data in self._read_all(each[0] for each in found):
            token = key.rpartition("/")[2].partition(".")[0]
            if key.endswith(".ended.json"):
                # Whatever it says, that attempt is over.
                closed.add(token)
                ended += self._decoded(key, data, codec.decode_ended)
            elif key.endswith(".started.json"):
                started += self._decoded(key, data, codec.decode_started)
        still_open = [mark for mark in started if mark.token not in closed]
        if still_open and (record := self.find(task_id, generation)):
            still_open = [mark for mark in still_open if mark.token != record.token]
        return History(
            ended=tuple(sorted(ended, key=lambda note: note.ended_at)),
            open=tuple(sorted(still_open, key=lambda mark: mark.started_at)),
        )

    # what did not succeed

    def mark(self, mark: Mark) -> None:
        self._see_experiment(mark.experiment)
        home = self._home(mark.task_id, mark.experiment)
        key = _mark_key(home, mark.task_id, mark.generation, mark.state)
        if self.blobs.get(_closed_key(key)) is not None:
            return
        self.blobs.put(key, codec.encode_mark(mark))
        # Closed between the two looks: whoever closes it says so before taking the mark away, so one of us meets the other.
        if self.blobs.get(_closed_key(key)) is not None:
            self.blobs.delete(key)

    def unmark(self, task_id: str, generation: int, state: TaskState) -> bool:
        home = self._find_home(task_id)
        if home is None:
            return False
        key, ours = _mark_key(home, task_id, generation, state), new_token().encode()
        first = self._create_or_read(_closed_key(key), ours)
        self.blobs.delete(key)
        return first is None or first == ours

    def marks(
        self, experiment: str | None = None, state: TaskState | None = None, *, limit: int | None = None
    ) -> Iterator[Mark]:
        """A mark counts once its record says the same and the next generation has none."""
        prefix = "marks/" if experiment is None else f"marks/{experiment_digest(experiment)}/"
        found = itertools.chain.from_iterable(_newest_of_each(_matched(self.blobs.list_keys(prefix), _MARK)))
        wanted = (mark[0] for mark in found if state is None or mark[3] == state)
        looked_at = itertools.islice(wanted, limit)
        return (mark for mark in self._in_parallel(self._confirmed_mark, looked_at) if mark is not None)

    def find_mark(self, task_id: str, generation: int, state: TaskState) -> Mark | None:
        home = self._find_home(task_id)
        return None if home is None else self._confirmed_mark(_mark_key(home, task_id, generation, state))

    def _confirmed_mark(self, key: str) -> Mark | None:
        [found] = _matched([key], _MARK)
        task_id, generation, home = found[1], int(found[2]), key.split("/")[1]
        record = self._read_record(_record_key(task_id, generation, home))
        if record is None:
            return None
        # The length of a record that is damaged says nothing for sure, and the name of the mark does.
        states = _COUNTED if record.unreadable else (record.state,)
        state = next((one for one in states if key == _mark_key(home, task_id, generation, one)), None)
        if state is None:
            return None
        # A redrive that stopped between its two steps left the mark; the task lives on in the next generation.
        if self.blobs.get(_record_key(task_id, generation + 1, home)) is not None:
            return None
        data = self.blobs.get(key)
        if data is None:
            return None
        for mark in self._decoded(key, data, codec.decode_mark):
            return mark
        return Mark(
            task_id=task_id,
            generation=generation,
            experiment=record.experiment,
            state=state,
            marked_at=record.ended_at,
            reason=record.reason,
            message=record.message,
            task=None,
            raw=data.decode(errors="replace"),
        )

    # what was submitted

    def put_experiment(self, experiment: str, *, queue: str | None) -> None:
        key = _experiment_key(experiment)
        seen = ExperimentSeen(experiment, self._clock.now(), queue)
        existing = self._create_or_read(key, codec.encode_experiment(seen))
        self._known_experiments.add(experiment)
        if existing is None or queue is None:
            return
        for known in self._decoded(key, existing, codec.decode_experiment):
            if known.queue != queue:
                self.blobs.put(key, codec.encode_experiment(replace(known, queue=queue)))

    def experiments(self) -> list[ExperimentSeen]:
        keys = (found[0] for found in _matched(self.blobs.list_keys("experiments/"), _EXPERIMENT))
        found = self._read_all(keys)
        seen = (one for key, data in found for one in self._decode_experiment(key, data))
        return sorted(seen, key=lambda one: one.name)

    def _decode_experiment(self, key: str, data: bytes) -> list[ExperimentSeen]:
        """One that cannot be decoded is known by its name alone, and by nothing where that was cut."""
        decoded = self._decoded(key, data, codec.decode_experiment)
        name = _experiment_of(key)
        return decoded or ([] if name is None else [ExperimentSeen(name, None)])

    def find_experiment(self, experiment: str) -> ExperimentSeen | None:
        key = _experiment_key(experiment)
        data = self.blobs.get(key)
        if data is None:
            return None
        return next(iter(self._decoded(key, data, codec.decode_experiment)), ExperimentSeen(experiment, None))

    def put_part(self, experiment: str, index: int, lines: Sequence[str]) -> ManifestPart:
        """Create-only by index: the same lines again are the same part, others raise `PartTaken`."""
        if any("\n" in line for line in lines):
            raise ValueError("a manifest line holds a line break")
        data = "".join(f"{line}\n" for line in lines).encode()
        name = f"{index:05}-{len(lines)}-{hex_digest(data)[:16]}"
        digest = experiment_digest(experiment)
        self._see_experiment(experiment)
        # The index is claimed first: two submitters of different tasks must not both get it.
        claimed = self._create_or_read(f"claims/{digest}/{index:05}", name.encode())
        if claimed is not None and claimed != name.encode():
            raise PartTaken(experiment, index)
        asked = self._clock.now()
        if self.blobs.create(f"manifests/{digest}/{name}.jsonl", data):
            self._fresh = f"manifests/{digest}/{name}.jsonl", asked, self._clock.now()
        sent = claimed is not None and self.blobs.get(f"manifests/{digest}/{name}.sent") is not None
        return ManifestPart(experiment, name, len(lines), sent=sent)

    def parts(self, experiment: str) -> list[ManifestPart]:
        written: list[tuple[int, int, str]] = []
        sent: set[str] = set()
        for found in _matched(self.blobs.list_keys(f"manifests/{experiment_digest(experiment)}/"), _PART):
            if found[4] == "sent":
                sent.add(found[1])
            else:
                written.append((int(found[2]), int(found[3]), found[1]))
        return [ManifestPart(experiment, name, count, sent=name in sent) for _, count, name in sorted(written)]

    def read_part(self, part: ManifestPart) -> list[str]:
        key = f"manifests/{experiment_digest(part.experiment)}/{part.name}.jsonl"
        data = self.blobs.get(key)
        if data is None:
            raise StoreUnavailable(f"manifest part `{self._address(key)}` is gone", retryable=False)
        if not part.name.endswith(hex_digest(data)[:16]):
            raise codec.damaged(self._address(key), "its digest is not the one in its name")
        return data.decode(errors="replace").split("\n")[:-1]

    def mark_sent(self, part: ManifestPart) -> None:
        self.blobs.create(f"manifests/{experiment_digest(part.experiment)}/{part.name}.sent", b"")

    # payloads and values

    def put_blob(self, data: bytes, *, prefix: str = "payloads") -> str:
        key = f"{prefix}/{hex_digest(data)}"
        self.blobs.create(key, data)
        return self._address(key)

    def has_blob(self, reference: str) -> bool:
        key = "/".join(reference.split("/")[-2:])
        return next(iter(self.blobs.list_keys(key)), None) == key

    def get_blob(self, reference: str) -> bytes:
        """Only the last two parts of the reference count, so a share that is mounted elsewhere will do."""
        key = "/".join(reference.split("/")[-2:])
        # A reference may come from anybody's message.
        data = self.blobs.get(key) if _BLOB.fullmatch(key) else None
        if data is None:
            raise StoreUnavailable(
                f"`{reference}` is not in record store `{self.url}`",
                hint="was it removed, or written to another store?",
                retryable=False,
            )
        if hex_digest(data) != key.rpartition("/")[2]:
            raise codec.damaged(reference, "its content is not what its name says")
        return data

    # orders

    def put_order(self, queue: str, order: Order) -> str:
        data = codec.encode_order(order)
        while True:
            identity = new_token()
            key, asked = order_key(queue, f"{identity}.json"), self._clock.now()
            if self._create_or_read(key, data) in (None, data):
                self._fresh = key, asked, self._clock.now()
                break
        self.look_after_orders(queue)
        return identity

    def control(self, queue: str, *, max_age: timedelta = timedelta(0)) -> Control:
        log = self._order_log(queue)
        if self._clock.boottime() - log.read_at >= max_age.total_seconds():
            self._read_orders(queue, log)
        return log.control

    def _order_log(self, queue: str) -> OrderLog:
        if queue not in self._order_logs:
            key = f"control/{_quoted(queue)}.json"
            data = self.blobs.get(key)
            decoded = [] if data is None else self._decoded(key, data, codec.decode_old_control)
            old = next(iter(decoded), Control())
            self._order_logs.setdefault(queue, OrderLog(old))
        return self._order_logs[queue]

    def _read_orders(self, queue: str, log: OrderLog) -> None:
        """Bring `log` up to date.

        Orders that are put together move: the new copy is there first, and the old ones go `MOVED_FOR` later. A listing
        that took less than that has met the one or the other, so only a slow one is taken again; and so is one of which
        something is gone when it comes to be read.
        """
        for pause_s in (0.05, 0.2, 1.0, 2.0, 0.0):
            asked = self._clock.boottime()
            listed = self._list_orders(queue)
            quick = self._clock.boottime() - asked < LISTED_WITHIN_S
            orders = self._read_listed(log, listed) if quick else None
            if orders is not None:
                log.take(orders, at=asked)
                return
            time.sleep(pause_s)
        raise StoreUnavailable(f"the orders of queue `{queue}` in `{self.url}` change faster than they can be read")

    def _list_orders(self, queue: str) -> dict[str, BlobInfo]:
        folder = order_key(queue, "")
        found = ((_ORDER.fullmatch(info.key, len(folder)), info) for info in self.blobs.list_blobs(folder))
        return {matched[1]: info for matched, info in found if matched}

    def _read_listed(self, log: OrderLog, listed: Mapping[str, BlobInfo]) -> dict[str, ReadOrder] | None:
        """Each order in `listed`; None if one of them is gone."""
        known = log.known
        ids = {info.key: identity for identity, info in listed.items() if identity not in known}
        new = {ids[key]: self._decode_order(key, data, listed[ids[key]]) for key, data in self._read_all(ids)}
        if len(new) < len(ids):
            return None
        return {identity: known.get(identity) or new[identity] for identity in listed}

    def _decode_order(self, key: str, data: bytes, listed: BlobInfo) -> ReadOrder:
        """One that cannot be decoded, or that a newer release gave, tells nothing and keeps nobody from hearing the others."""
        identity = key.rpartition("/")[2].removesuffix(".json")
        try:
            return codec.decode_order(data, identity, listed.modified, self._address(key))
        except codec.UNDECODABLE as problem:
            self._report(key, problem.message)
            return ReadOrder(Control(), readable=False)

    def look_after_orders(self, queue: str) -> None:
        """Upkeep after an order was given, which stands whatever becomes of this: whoever gives the next takes it up."""
        with suppress(RuntimeFailure):
            self._put_orders_together(queue)

    def _put_orders_together(self, queue: str) -> None:
        """Replace many orders by one that says the same, so that a log of years is read in a moment.

        Safe to be killed anywhere and to be done by two at once: to merge what is merged already changes nothing. The
        times that are compared are all the store's.
        """
        listed = self._list_orders(queue)
        given_at = self._learn_skew(listed.values())
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

    def _without_ended(self, control: Control, now: datetime) -> Control:
        """Without what the records say by now: single tasks that ended, and old orders for experiments that did."""
        import random

        some = random.sample(sorted(control.tasks), min(TASKS_LOOKED_AT, len(control.tasks)))
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
        """Whether every generation that was begun has a record."""
        if self.totals(experiment).counts.get(TaskState.QUEUED):
            return False
        recorded = IdSet()
        for task_id, generation in self.recorded(experiment):
            recorded.add(task_key(task_id, generation))
        listed = (read_keys(self, part) for part in self.parts(experiment))
        return all(key in recorded for keys in listed for key in keys) and not any(self.tried_again(experiment))

    # clocks

    def skew(self) -> timedelta | None:
        if self._skew is None:
            if self._fresh is None:
                key, data = "probe/clock.json", codec.encode_json({"schema": codec.SCHEMA})
                asked = self._clock.now()
                self.blobs.put(key, data)
                self._fresh = key, asked, self._clock.now()
            self._learn_skew(self.blobs.list_blobs(self._fresh[0]))
        return self._skew

    def _learn_skew(self, infos: Iterable[BlobInfo]) -> datetime | None:
        """The store's own time of what this process created last, if that is among `infos`."""
        fresh = self._fresh
        stored = next((info.modified for info in infos if fresh and info.key == fresh[0]), None)
        if fresh is not None and stored is not None:
            _, asked, answered = fresh
            # Between the two it may have been any time.
            self._skew = asked - stored if stored < asked else min(timedelta(0), answered - stored)
        return stored

    # workers

    def put_worker(self, seen: WorkerSeen) -> None:
        self.blobs.put(f"workers/{_quoted(seen.worker)}.json", codec.encode_worker(seen))

    def workers(self, *, newer_than: timedelta = timedelta(days=1)) -> list[WorkerSeen]:
        # The backend's clock only spares reading what is old beyond doubt; `seen_at` decides.
        surely_old = datetime.now(UTC) - newer_than - timedelta(days=1)
        listed = self.blobs.list_blobs("workers/")
        recent = (info.key for info in listed if info.modified >= surely_old and _WORKER.fullmatch(info.key))
        seen = (one for key, data in self._read_all(recent) for one in self._decoded(key, data, codec.decode_worker))
        oldest = self._clock.now() - newer_than
        return sorted((one for one in seen if one.seen_at >= oldest), key=lambda one: one.worker)

    def put_counters(self, worker: str, counters: Mapping[str, Mapping[TaskState, int]]) -> None:
        """The numbers are the name, so that `totals` lists and never reads.

        Each start of a worker has a folder of its own: a successor of the same name counts from 0, and what it does not
        know of has to stay.
        """
        for experiment, counts in counters.items():
            numbers = "-".join(
                f"{letter}{counts.get(state, 0)}" for letter, state in zip("sfcx", _COUNTED, strict=True)
            )
            before = self._counters.get((experiment, worker), "")
            if before.rpartition("/")[2].partition("-")[2] == numbers:
                continue
            folder = f"counters/{experiment_digest(experiment)}/{_quoted(worker)}+{self._start_of_counting}/"
            name = f"{folder}{int(self._clock.now().timestamp() * 1000):013}-{numbers}"
            self.blobs.create(name, b"")
            self._counters[experiment, worker] = name
            if before:
                self.blobs.delete(before)

    def totals(self, experiment: str, *, exact: bool = False) -> Totals:
        """Without `exact` a few listings: manifest names, the highest of each worker's counters, mark names."""
        as_of = self._clock.now()
        digest = experiment_digest(experiment)
        if exact:
            ended = self._count_records(experiment)
            submitted = sum(part.count for part in self.parts(experiment))
        else:
            counters = self._start(lambda: self._sum_counters(digest))
            marks = self._start(lambda: self._count_marks(experiment))
            submitted = sum(part.count for part in self.parts(experiment))
            ended, reported_at = counters.result()
            as_of = min(as_of, reported_at or as_of)
            if (marked := marks.result()) is not None:
                ended = Counter({TaskState.SUCCEEDED: ended[TaskState.SUCCEEDED]}) + marked
        queued = max(0, submitted - ended.total())
        counts = {state: ended[state] for state in _COUNTED if ended[state]}
        return Totals({TaskState.QUEUED: queued, **counts}, as_of, exact)

    def _count_records(self, experiment: str) -> Counter[TaskState]:
        """Each task by its newest generation. One whose record did not succeed has ended as long as its mark is there:
        without it the next generation was published, and the task waits or runs."""
        others = IdSet()
        lock = Lock()

        def count(shard: str) -> int:
            succeeded = 0
            for task_id, generation, state in self._newest_states(shard):
                if state is TaskState.SUCCEEDED:
                    succeeded += 1
                    continue
                with lock:
                    others.add(task_key(f"{task_id}.{state}", generation))
            return succeeded

        ended = Counter({TaskState.SUCCEEDED: sum(self._in_parallel(count, _record_shards(experiment)))})
        # Marks are listed last, as in `tried_again`.
        for mark in self._list_marks(experiment) if others else ():
            if task_key(f"{mark[1]}.{mark[3]}", int(mark[2])) in others:
                ended[TaskState(mark[3])] += 1
        return ended

    def _newest_states(self, prefix: str) -> Iterator[tuple[str, int, TaskState]]:
        """Id, newest recorded generation and its state for each task, told from names and sizes alone."""
        current, newest = "", 0
        state = TaskState.SUCCEEDED
        match = re.compile(_RECORD, re.ASCII).fullmatch
        for info in self.blobs.list_blobs(prefix):
            found = match(info.key)
            if found is None:
                continue
            if found[1] != current:
                if current:
                    yield current, newest, state
                current, newest = found[1], 0
            if int(found[2]) > newest:
                newest, state = int(found[2]), codec.state_of_size(info.size)
        if current:
            yield current, newest, state

    def _sum_counters(self, digest: str) -> tuple[Counter[TaskState], datetime | None]:
        """By state, and when the last worker reported by its own clock.

        Of each start of a worker the highest numbers count: they only grow, whatever its clock does and whichever of
        its names could not be deleted.
        """
        highest: dict[str, tuple[int, ...]] = {}
        latest: int | None = None
        for found in _matched(self.blobs.list_keys(f"counters/{digest}/"), _COUNTER):
            at, *numbers = map(int, found.groups()[1:])
            latest = max(at, latest or 0)
            highest[found[1]] = max(tuple(numbers), highest.get(found[1], ()), key=sum)
        total: Counter[TaskState] = Counter()
        for counts in highest.values():
            total.update(dict(zip(_COUNTED, counts, strict=True)))
        return total, None if latest is None else datetime.fromtimestamp(latest / 1000, UTC)

    def _count_marks(self, experiment: str) -> Counter[TaskState] | None:
        """By state of the newest generation; None where there are too many to list."""
        marks = list(itertools.islice(self._list_marks(experiment), MARKS_COUNTED + 1))
        if len(marks) > MARKS_COUNTED:
            return None
        return Counter(TaskState(newest[-1][3]) for newest in _newest_of_each(marks))

    # files

    def record_url(self, task_id: str, generation: int) -> str:
        return self._address(_record_key(task_id, generation, self._find_home(task_id) or ""))

    def log_url(self, task_id: str, token: str) -> str:
        return self._address(_log_key(task_id, token))

    def outputs_url(self, task_id: str, token: str) -> str:
        # On the path of every task, so the place that all of them share is looked up once.
        if self._outputs is None:
            self._outputs = self._address("outputs/").rstrip("/")
        return f"{self._outputs}/{task_id}/{token}"

    def checkpoints_path(self, task_id: str) -> str | None:
        path = self.blobs.path(f"checkpoints/{task_id}")
        return None if path is None else str(path)

    def keep_outputs(self, task_id: str, token: str, folder: Path) -> KeptOutputs:
        from runtime.records import kept_outputs

        key = f"outputs/{task_id}/{token}"
        found = kept_outputs.find_outputs(folder)
        if self.blobs.path(key) is not None:
            # What lies there stays there, whatever it is.
            if not (found.files or found.others):
                found.remove_empty()
                return KeptOutputs()
            found.sync()
            return KeptOutputs(self._address(key))
        odd = {name: why for name in found.files if (why := kept_outputs.why_no_object(name))}
        names = [name for name in found.files if name not in odd]
        deque(self._in_parallel(lambda name: self.blobs.upload(f"{key}/{name}", found.files[name]), names), maxlen=0)
        left_out = kept_outputs.tell_left_out(found.others | odd)
        return KeptOutputs(self._address(key) if names else None, left_out)

    def append_log(self, task_id: str, token: str, data: bytes) -> str:
        key = _log_key(task_id, token)
        self.blobs.append(key, data)
        return self._address(key)

    def read_log(self, url: str) -> Iterator[bytes]:
        return self.blobs.stream("/".join(url.split("/")[-3:]))

    def close(self) -> None:
        with self._lock:
            pool, self._pool, self._outputs = self._pool, None, None
        if pool is not None:
            pool.shutdown(cancel_futures=True)
        self.blobs.close()

    # where things lie

    def _address(self, key: str) -> str:
        path = self.blobs.path(key)
        return f"{self.url}/{key}" if path is None else str(path)

    def _home(self, task_id: str, experiment: str) -> str:
        """The digest under which a task's records lie, written down first where its id does not end with it."""
        if _OUR_ID.fullmatch(task_id):
            return task_id[-8:]
        if task_id not in self._homes:
            said = codec.encode_json({"schema": codec.SCHEMA, "task": task_id, "experiment": experiment})
            # Create-only: two experiments that use one id still share one record.
            existing = self._create_or_read(_home_key(task_id), said)
            if not self._keep_home(task_id, existing or said):
                # Nobody can tell any more where it was, and without a home the task could never be recorded.
                self.blobs.put(_home_key(task_id), said)
                self._keep_home(task_id, said)
        return self._homes[task_id]

    def _find_home(self, task_id: str) -> str | None:
        if _OUR_ID.fullmatch(task_id):
            return task_id[-8:]
        if task_id not in self._homes:
            said = self.blobs.get(_home_key(task_id))
            if said is None or not self._keep_home(task_id, said):
                return None
        return self._homes[task_id]

    def _keep_home(self, task_id: str, said: bytes) -> bool:
        if len(self._homes) > 10_000:
            self._homes = {}
        for fields in self._decoded(_home_key(task_id), said, codec.decode_json):
            self._homes[task_id] = experiment_digest(str(fields.get("experiment")))
            return True
        return False

    def _see_experiment(self, experiment: str) -> None:
        if experiment not in self._known_experiments:
            self.put_experiment(experiment, queue=None)

    # reading and writing

    def _create_or_read(self, key: str, data: bytes) -> bytes | None:
        """None if created now, else what was there first, which may be this call's own data after a retry."""
        for pause in (0.05, 0.2, 0.5, 1.0, 2.0):
            if self.blobs.create(key, data):
                return None
            existing = self.blobs.get(key)
            if existing is not None:
                return existing
            # S3 refuses while another's conditional write is on its way, and that one may fail yet.
            time.sleep(pause)
        raise StoreUnavailable(f"`{self._address(key)}` was refused as existing, yet it is not there")

    def _read_record(self, key: str) -> Record | None:
        data = self.blobs.get(key)
        return None if data is None else self._decode_record(key, data)

    def _read_records(self, keys: Iterable[str]) -> Iterator[Record]:
        found = self._read_all(each[0] for each in _matched(keys, _RECORD))
        return (self._decode_record(key, data) for key, data in found)

    def _decode_record(self, key: str, data: bytes) -> Record:
        [found] = _matched([key], _RECORD)
        record = codec.read_record(data, self._address(key), found[1], int(found[2]))
        if record.unreadable:
            self._report(key, record.unreadable)
        return record

    def _decoded(self, key: str, data: bytes, decode: Callable[[bytes, str], A]) -> list[A]:
        """What `decode` makes of it, or nothing where that cannot be done, which is said once."""
        try:
            return [decode(data, self._address(key))]
        except codec.UNDECODABLE as problem:
            self._report(key, problem.message)
            return []

    def _report(self, key: str, problem: str) -> None:
        if key not in self._reported and len(self._reported) < REPORTED:
            self._reported.add(key)
            import logging  # only when there is something to say: loading it takes as long as all of this module

            logging.getLogger(__name__).warning("%s; passed over", problem)

    def _read_all(self, keys: Iterable[str]) -> Iterator[tuple[str, bytes]]:
        """In order; what is gone meanwhile is passed over."""
        found = self._in_parallel(lambda key: (key, self.blobs.get(key)), keys)
        return ((key, data) for key, data in found if data is not None)

    def _in_parallel(self, call: Callable[[A], B], items: Iterable[A]) -> Iterator[B]:
        """`map` with as many calls under way as the backend gains from; a call must not start others this way."""
        if self.blobs.parallel == 1:
            yield from map(call, items)
            return
        under_way: deque[Future[B]] = deque()
        for item in items:
            under_way.append(self._executor().submit(call, item))
            if len(under_way) >= 2 * self.blobs.parallel:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()

    def _start(self, call: Callable[[], B]) -> Future[B]:
        from concurrent.futures import Future

        if self.blobs.parallel > 1:
            return self._executor().submit(call)
        done: Future[B] = Future()
        done.set_result(call())
        return done

    def _executor(self) -> ThreadPoolExecutor:
        from concurrent.futures import ThreadPoolExecutor

        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self.blobs.parallel, thread_name_prefix="records")
            return self._pool


def _matched(keys: Iterable[str], shape: str) -> Iterator[re.Match[str]]:
    """The keys of that shape; what people left beside them is passed over."""
    return filter(None, map(re.compile(shape, re.ASCII).fullmatch, keys))


def _newest_of_each(marks: Iterable[re.Match[str]]) -> Iterator[list[re.Match[str]]]:
    """For each task the marks of its newest generation; keys of one task lie side by side."""
    for _, group in itertools.groupby(marks, key=lambda mark: mark[1]):
        ours = list(group)
        newest = max(int(mark[2]) for mark in ours)
        yield [mark for mark in ours if int(mark[2]) == newest]


def _shard(task_id: str) -> str:
    """One of 16 folders, so that a listing can go in parallel; told by an id's third letter alone, as prefixes are."""
    letter = task_id[2:3].lower() or "0"
    return letter if letter in _HEX else _HEX[ord(letter) % 16]


def _home_key(task_id: str) -> str:
    return f"homes/{_shard(task_id)}/{task_id}.json"


def _record_key(task_id: str, generation: int, home: str) -> str:
    return f"records/{home}/{_shard(task_id)}/{task_id}.g{generation}.json"


def _record_shards(experiment: str) -> list[str]:
    digest = experiment_digest(experiment)
    return [f"records/{digest}/{shard}/" for shard in _HEX]


def _experiment_key(experiment: str) -> str:
    return f"experiments/{experiment_digest(experiment)}-{_quoted(experiment)[:200]}.json"


def _experiment_of(key: str) -> str | None:
    """The name that is in the key, if it is there whole."""
    from urllib.parse import unquote

    digest, _, quoted = key.rpartition("/")[2].removesuffix(".json").partition("-")
    name = unquote(quoted)
    return name if experiment_digest(name) == digest else None


def _mark_key(home: str, task_id: str, generation: int, state: TaskState) -> str:
    return f"marks/{home}/{task_id}.g{generation}.{state}.json"


def _closed_key(mark_key: str) -> str:
    """What says that a mark was closed, for as long as there may be anybody who would put it back."""
    return f"closed/{mark_key.removeprefix('marks/').removesuffix('.json')}"


def order_key(queue: str, name: str) -> str:
    return f"orders/{_quoted(queue)}/{name}"


def _started_key(task: Task, token: str) -> str:
    return f"attempts/{task.id}/g{task.generation}/{token}.started.json"


def _log_key(task_id: str, token: str) -> str:
    return f"logs/{task_id}/{token}.log"


def _quoted(name: str) -> str:
    """Any text as one part of a key."""
    from urllib.parse import quote

    quoted = quote(name, safe="@+=", errors="surrogatepass")
    return f"%2E{quoted[1:]}" if quoted.startswith(".") else quoted


def _end_of(text: str, limit_bytes: int) -> str:
    if len(text) * 4 <= limit_bytes:
        return text
    data = text.encode(errors="surrogatepass")
    if len(data) <= limit_bytes:
        return text
    # Not in the middle of a character, of which at most three bytes are left.
    tail = data[-limit_bytes:]
    start = next((at for at in range(4) if tail[at] & 0xC0 != 0x80), 0)
    return tail[start:].decode(errors="surrogatepass")
