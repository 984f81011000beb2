"""How tasks and their attempts ended: a create-only record for each generation, marks, and notes of attempts."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final, Literal

from runtime.clock import Clock
from runtime.errors import LOST_FOR_GOOD
from runtime.records import codec, layout
from runtime.records.base import INLINE_BYTES, ManifestPart, Totals, is_unwritten
from runtime.records.blobs import Blobs
from runtime.records.layout import COUNTED, matched
from runtime.records.objects import BlobManifests
from runtime.records.order_scope import read_keys
from runtime.system import system
from runtime.tasks.history import EndedNote, History, Mark, Record, StartedMark, mark_of
from runtime.tasks.id_set import IdSet, task_key
from runtime.tasks.model import Task, TaskState, experiment_digest, new_token

NOTE_LOG_BYTES: Final = 8 * 1024
MARKS_COUNTED: Final = 10_000
"""Up to this many marks `totals` counts unsuccessful tasks by the names of their marks; beyond, by counters."""


class BlobResults(BlobManifests):
    """Records and marks under the experiment of their task."""

    def __init__(self, blobs: Blobs, *, clock: Clock | None = None) -> None:
        super().__init__(blobs, clock=clock)
        self._homes: dict[str, str] = {}

    def commit(self, record: Record) -> None:
        record = self.fit(record)
        self._see_experiment(record.experiment)
        key = layout.record_key(record.task_id, record.generation, self._home(record.task_id, record.experiment))
        existing = self._create_or_read(key, codec.encode_record(record))
        if existing is not None:
            is_unwritten(record, self._decode_record(key, existing))

    def fit(self, record: Record) -> Record:
        """The record with its value and log within `INLINE_BYTES`; a larger value goes to `value_url`."""
        if record.value is not None:
            encoded = codec.encode_text(record.value).encode()
            if len(encoded) > INLINE_BYTES:
                record = replace(record, value=None, value_url=self.put_blob(encoded, prefix="values"))
        log = end_of(record.log, INLINE_BYTES)
        return record if log is record.log else replace(record, log=log)

    def find(self, task_id: str, generation: int) -> Record | None:
        home = self._find_home(task_id)
        return None if home is None else self._read_record(layout.record_key(task_id, generation, home))

    def find_all(self, task_id: str) -> list[Record]:
        home = self._find_home(task_id)
        if home is None:
            return []
        keys = self.blobs.list_keys(f"records/{home}/{layout.shard(task_id)}/{task_id}.g")
        return sorted(self._read_records(keys), key=lambda record: record.generation)

    def resolve(self, prefix: str, limit: int = 10) -> list[str]:
        if layout.OUR_ID.fullmatch(prefix):
            homes = [prefix[-8:]]
        else:
            homes = sorted({found[1] for found in matched(self.blobs.list_keys("experiments/"), layout.EXPERIMENT)})
        shards = layout.shard(prefix) if len(prefix) > 2 else layout.HEX
        places = [(f"records/{home}/{shard}/{prefix}", layout.RECORD) for home in homes for shard in shards]
        places += [(f"marks/{home}/{prefix}", layout.MARK) for home in homes]

        def ids_under(place: tuple[str, str]) -> list[str]:
            ids = (found[1] for found in matched(self.blobs.list_keys(place[0]), place[1]))
            return list(itertools.islice((task_id for task_id, _ in itertools.groupby(ids)), limit))

        found = {task_id for ids in self._in_parallel(ids_under, places) for task_id in ids}
        return sorted(found)[:limit]

    def records(self, experiment: str) -> Iterator[Record]:
        shards = layout.record_shards(experiment)
        return self._read_records(itertools.chain.from_iterable(map(self.blobs.list_keys, shards)))

    def recorded(self, experiment: str) -> Iterator[tuple[str, int]]:
        def listed(folder: str) -> list[tuple[str, int]]:
            return [(found[1], int(found[2])) for found in matched(self.blobs.list_keys(folder), layout.RECORD)]

        return itertools.chain.from_iterable(self._in_parallel(listed, layout.record_shards(experiment)))

    def tried_again(self, experiment: str) -> Iterator[tuple[str, int]]:
        def listed(folder: str) -> list[tuple[str, int, TaskState]]:
            return [newest for newest in self._newest_states(folder) if newest[2] is not TaskState.SUCCEEDED]

        ended = set(itertools.chain.from_iterable(self._in_parallel(listed, layout.record_shards(experiment))))
        if ended:
            # Marks are listed last: a mark is written before its record, and a closed one never opens again.
            open_ = self._list_open_marks(experiment)
            ended.difference_update((mark[1], int(mark[2]), TaskState(mark[3])) for mark in open_)
        return ((task_id, generation) for task_id, generation, _ in ended)

    def mark(self, mark: Mark) -> None:
        self._see_experiment(mark.experiment)
        home = self._home(mark.task_id, mark.experiment)
        key = layout.mark_key(home, mark.task_id, mark.generation, mark.state)
        if self.blobs.get(layout.closed_key(key)) is not None:
            # An earlier try of this call may have put it back, and then failed.
            self.blobs.delete(key)
            return
        self.blobs.put(key, codec.MARK.encode(mark))
        # Closed between the two looks: `unmark` writes the closing before it deletes the mark, so one of us meets the other.
        if self.blobs.get(layout.closed_key(key)) is not None:
            self.blobs.delete(key)

    def unmark(self, task_id: str, generation: int, state: TaskState) -> bool:
        home = self._find_home(task_id)
        if home is None:
            return False
        key, ours = layout.mark_key(home, task_id, generation, state), new_token().encode()
        first = self._create_or_read(layout.closed_key(key), ours)
        self.blobs.delete(key)
        return first is None or first == ours

    def marks(
        self, experiment: str | None = None, state: TaskState | None = None, *, limit: int | None = None
    ) -> Iterator[Mark]:
        """A mark counts once its record has the same state and the next generation has no record."""
        found = itertools.chain.from_iterable(layout.newest_of_each(self._list_open_marks(experiment)))
        wanted = (mark[0] for mark in found if state is None or mark[3] == state)
        looked_at = itertools.islice(wanted, limit)
        return (mark for mark in self._in_parallel(self._confirmed_mark, looked_at) if mark is not None)

    def find_mark(self, task_id: str, generation: int, state: TaskState) -> Mark | None:
        home = self._find_home(task_id)
        if home is None:
            return None
        key = layout.mark_key(home, task_id, generation, state)
        mark = self._confirmed_mark(key)
        # A late process may have put a closed one back.
        return mark if mark is not None and self.blobs.get(layout.closed_key(key)) is None else None

    def record_url(self, task_id: str, generation: int) -> str:
        return self._address(layout.record_key(task_id, generation, self._find_home(task_id) or ""))

    def _newest_states(self, prefix: str) -> Iterator[tuple[str, int, TaskState]]:
        """Id, newest recorded generation and its state for each task, from names and sizes alone."""
        current, newest = "", 0
        state = TaskState.SUCCEEDED
        match = re.compile(layout.RECORD, re.ASCII).fullmatch
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

    def _list_marks(self, experiment: str) -> Iterator[re.Match[str]]:
        return matched(self.blobs.list_keys(f"marks/{experiment_digest(experiment)}/"), layout.MARK)

    def _list_open_marks(self, experiment: str | None) -> Iterator[re.Match[str]]:
        """List marks without those that are closed, which a write that arrives late may put back."""
        below = "" if experiment is None else f"{experiment_digest(experiment)}/"
        closed = IdSet()
        for key in self.blobs.list_keys(f"closed/{below}"):
            closed.add(task_key(key, 1))
        marks = matched(self.blobs.list_keys(f"marks/{below}"), layout.MARK)
        return (each for each in marks if task_key(layout.closed_key(each[0]), 1) not in closed)

    def _confirmed_mark(self, key: str) -> Mark | None:
        [found] = matched([key], layout.MARK)
        task_id, generation, home = found[1], int(found[2]), key.split("/")[1]
        record = self._read_record(layout.record_key(task_id, generation, home))
        if record is None:
            return None
        # The length of a damaged record proves nothing; the name of the mark does.
        states = COUNTED if record.unreadable else (record.state,)
        state = next((one for one in states if key == layout.mark_key(home, task_id, generation, one)), None)
        if state is None:
            return None
        # A redrive that stopped between its two steps left the mark; the task lives on in the next generation.
        if self.blobs.get(layout.record_key(task_id, generation + 1, home)) is not None:
            return None
        data = self.blobs.get(key)
        if data is None:
            return None
        for mark in self._decoded(key, data, codec.MARK.decode):
            return mark
        mark = mark_of(record, None, raw=data.decode(errors="replace"))
        return replace(mark, task_id=task_id, generation=generation, state=state)

    def _home(self, task_id: str, experiment: str) -> str:
        """The digest under which a task's records lie, stored first if its id does not end with it."""
        if layout.OUR_ID.fullmatch(task_id):
            return task_id[-8:]
        if task_id not in self._homes:
            said = codec.encode_json({"schema": codec.SCHEMA, "task": task_id, "experiment": experiment})
            # Create-only: two experiments that use one id still share one record.
            existing = self._create_or_read(layout.home_key(task_id), said)
            if not self._keep_home(task_id, existing or said):
                # The damaged one is unknown for good, and without a home the task could never be recorded.
                self.blobs.put(layout.home_key(task_id), said)
                self._keep_home(task_id, said)
        return self._homes[task_id]

    def _find_home(self, task_id: str) -> str | None:
        if layout.OUR_ID.fullmatch(task_id):
            return task_id[-8:]
        if task_id not in self._homes:
            said = self.blobs.get(layout.home_key(task_id))
            if said is None or not self._keep_home(task_id, said):
                return None
        return self._homes[task_id]

    def _keep_home(self, task_id: str, said: bytes) -> bool:
        if len(self._homes) > 10_000:
            self._homes = {}
        for fields in self._decoded(layout.home_key(task_id), said, codec.decode_json):
            self._homes[task_id] = experiment_digest(str(fields.get("experiment")))
            return True
        return False

    def _read_record(self, key: str) -> Record | None:
        data = self.blobs.get(key)
        return None if data is None else self._decode_record(key, data)

    def _read_records(self, keys: Iterable[str]) -> Iterator[Record]:
        found = self._read_all(each[0] for each in matched(keys, layout.RECORD))
        return (self._decode_record(key, data) for key, data in found)

    def _decode_record(self, key: str, data: bytes) -> Record:
        [found] = matched([key], layout.RECORD)
        record = codec.read_record(data, self._address(key), found[1], int(found[2]))
        if record.unreadable:
            self._report(key, record.unreadable)
        return record

    def record_started(self, task: Task, started: StartedMark) -> None:
        self.blobs.create(layout.attempt_key(task, started.token, "started"), codec.STARTED.encode(started))

    def retract_started(self, task: Task, token: str) -> None:
        self.blobs.delete(layout.attempt_key(task, token, "started"))

    def record_proven(self, task: Task, token: str) -> None:
        self.blobs.create(layout.attempt_key(task, token, "proven"), b"{}")

    def record_ended(self, task: Task, note: EndedNote) -> None:
        note = replace(note, log=end_of(note.log, NOTE_LOG_BYTES))
        step: Literal["lost", "ended"] = "lost" if note.unseen else "ended"
        self.blobs.create(layout.attempt_key(task, note.token, step), codec.ENDED.encode(note))

    def history(self, task_id: str, generation: int) -> History:
        ended: list[EndedNote] = []
        started: list[StartedMark] = []
        closed: set[str] = set()
        found = list(matched(self.blobs.list_keys(f"attempts/{task_id}/g{generation}/"), layout.ATTEMPT))
        if not found:
            return History()
        said = {step: {each[1] for each in found if each[2] == step} for step in ("proven", "ended")}
        wanted = (
            each[0] for each in found if each[2] != "proven" and (each[2] != "lost" or each[1] not in said["ended"])
        )
        for key, data in self._read_all(wanted):
            if key.endswith(".started.json"):
                started += self._decoded(key, data, codec.STARTED.decode)
            else:
                # Readable or not, the attempt is over.
                closed.add(key.rpartition("/")[2].partition(".")[0])
                ended += self._decoded(key, data, codec.ENDED.decode)
        still_open = [
            replace(mark, proven=True) if mark.token in said["proven"] else mark
            for mark in started
            if mark.token not in closed
        ]
        if still_open and (record := self.find(task_id, generation)):
            still_open = [mark for mark in still_open if mark.token != record.token]
        return History(
            ended=tuple(sorted(ended, key=lambda note: note.ended_at)),
            open=tuple(sorted(still_open, key=lambda mark: mark.started_at)),
        )


class BlobTotals(BlobResults):
    """Tasks by state: manifests say how many were submitted; results and counters say how many ended."""

    def __init__(self, blobs: Blobs, *, clock: Clock | None = None) -> None:
        super().__init__(blobs, clock=clock)
        self._counters: dict[tuple[str, str], str] = {}
        """By experiment and worker: the name of the last report."""
        self._start_of_counting = system.urandom(4).hex()

    def put_counters(self, worker: str, counters: Mapping[str, Mapping[TaskState, int]]) -> None:
        """Write the numbers as a name, so that `totals` lists and never reads.

        Each start of a worker has a folder of its own: a successor of the same name counts from 0, and its
        predecessor's numbers have to stay.
        """
        for experiment, counts in counters.items():
            numbers = "-".join(f"{letter}{counts.get(state, 0)}" for letter, state in zip("sfcx", COUNTED, strict=True))
            before = self._counters.get((experiment, worker), "")
            if before.rpartition("/")[2].partition("-")[2] == numbers:
                continue
            folder = f"{layout.counters_folder(experiment)}{layout.quoted(worker)}+{self._start_of_counting}/"
            name = f"{folder}{int(self._clock.now().timestamp() * 1000):013}-{numbers}"
            self.blobs.create(name, b"")
            self._counters[experiment, worker] = name
            if before:
                self.blobs.delete(before)

    def totals(self, experiment: str, *, exact: bool = False) -> Totals:
        """Without `exact` a few listings: manifest names, the highest of each worker's counters, mark names."""
        as_of = self._clock.now()
        if exact:
            ended = self._count_records(experiment)
            submitted = self._count_submitted(self.parts(experiment))
        else:
            looks: list[Callable[[str], Any]] = [self._sum_counters, self._count_marks, self.parts]
            (ended, reported_at), marked, parts = self._in_parallel(lambda look: look(experiment), looks)
            submitted = sum(part.count for part in parts)
            as_of = min(as_of, reported_at or as_of)
            if marked is not None:
                ended = Counter({TaskState.SUCCEEDED: ended[TaskState.SUCCEEDED]}) + marked
        queued = max(0, submitted - ended.total())
        counts = {state: ended[state] for state in COUNTED if ended[state]}
        return Totals({TaskState.QUEUED: queued, **counts}, as_of, exact)

    def _count_submitted(self, parts: Sequence[ManifestPart]) -> int:
        """Count each task once. Only the tasks of late parts may be listed twice."""
        count, keys = sum(part.count for part in parts), IdSet()
        if any(part.late for part in parts):
            for part in parts:
                with suppress(*LOST_FOR_GOOD):
                    count -= sum(not keys.add(key) for key in read_keys(self, part))
        return count

    def _count_records(self, experiment: str) -> Counter[TaskState]:
        """Count each task by its newest generation. An unsuccessful one has ended while its mark exists: without the mark
        the next generation was published, and the task waits or runs."""
        others = IdSet()
        lock = system.lock()

        def count(shard: str) -> int:
            succeeded = 0
            for task_id, generation, state in self._newest_states(shard):
                if state is TaskState.SUCCEEDED:
                    succeeded += 1
                    continue
                with lock:
                    others.add(task_key(f"{task_id}.{state}", generation))
            return succeeded

        ended = Counter({TaskState.SUCCEEDED: sum(self._in_parallel(count, layout.record_shards(experiment)))})
        # Marks are listed last, as in `tried_again`.
        for mark in self._list_open_marks(experiment) if others else ():
            if task_key(f"{mark[1]}.{mark[3]}", int(mark[2])) in others:
                ended[TaskState(mark[3])] += 1
        return ended

    def _sum_counters(self, experiment: str) -> tuple[Counter[TaskState], datetime | None]:
        """Records by state, and when the last worker reported by its own clock.

        The highest numbers of each start of a worker count: they only grow, even if its clock jumps or an old name
        could not be deleted.
        """
        highest: dict[str, tuple[int, ...]] = {}
        latest: int | None = None
        for found in matched(self.blobs.list_keys(layout.counters_folder(experiment)), layout.COUNTER):
            at, *numbers = map(int, found.groups()[1:])
            latest = max(at, latest or 0)
            highest[found[1]] = max(tuple(numbers), highest.get(found[1], ()), key=sum)
        total: Counter[TaskState] = Counter()
        for counts in highest.values():
            total.update(dict(zip(COUNTED, counts, strict=True)))
        return total, None if latest is None else datetime.fromtimestamp(latest / 1000, UTC)

    def _count_marks(self, experiment: str) -> Counter[TaskState] | None:
        """Marks by state of the newest generation; None if there are too many to list."""
        marks = list(itertools.islice(self._list_marks(experiment), MARKS_COUNTED + 1))
        if len(marks) > MARKS_COUNTED:
            return None
        return Counter(TaskState(newest[-1][3]) for newest in layout.newest_of_each(marks))


def end_of(text: str, limit_bytes: int) -> str:
    if len(text) * 4 <= limit_bytes:
        return text
    data = text.encode(errors="surrogatepass")
    if len(data) <= limit_bytes:
        return text
    # Not in the middle of a character: at most three of its bytes are left.
    tail = data[-limit_bytes:]
    start = next((at for at in range(4) if tail[at] & 0xC0 != 0x80), 0)
    return tail[start:].decode(errors="surrogatepass")
