"""What must hold in every run, a function for each law. Each names the promise of DESIGN that it stands for."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from runtime.client.tasks.redrive import RedriveResult
from runtime.client.tasks.wait import WaitResult
from runtime.end_reasons import EndReason
from runtime.records import codec, layout
from runtime.records.control_commands import QueueControl
from runtime.tasks.history import Record
from runtime.tasks.model import Task, TaskState
from runtime.tasks.retry_policy import CRASHES_TO_BURY
from runtime.worker.attempts.model import AttemptEnd, AttemptOrder
from runtime.worker.options import WorkerResult
from runtime.worker.pending_settlements import DENIED_FOR_S
from tests.simulation.attempts import WORK_S
from tests.simulation.bucket import REFUSED, Bucket
from tests.simulation.world import Broken, Process, World

_RECORD = re.compile(layout.RECORD, re.ASCII)
_END = re.compile(r"attempts/.*/(.*)\.ended\.json", re.ASCII)
OBEYED_WITHIN_S = 140.0
"""An order is obeyed within this time: 10 s until it is read, 5 s for the read, and the longest stop of a worker."""

ANSWERED_WITHIN_S = 5.0
"""A worker obeys what it has read within this time, unless it is stopped."""

SETTLED_WITHIN_S = 60.0
"""The end of an attempt is in the store within this time, if its worker is not stopped or cut off."""

DONE_AGAIN_S = 45.0
"""Who starts a task this long after a success of it, in a worker that nothing holds up, comes second: a call or three may go
unanswered before the success is in the store."""

WORKERS_TO_BURY = 7
"""A task that ends its workers ends at most so many: two before it is suspected, and then one on each of three hosts or
three on one."""

NEVER_CHANGES = "P2: a record never changes"
OF_ITS_ATTEMPT = "P2: a success is the success of its own attempt"
OBEYS_CANCEL = "an acknowledged cancel is obeyed"
IN_FORCE = "an acknowledged order is in force"
RECORDED = "P1: an acknowledged task is recorded in the end"
WAIT_ENDS = "`wait` ends once every task has"
WAIT_TRUE = "`wait` tells the truth"
EVIDENCE = "P4: each failure that was spent has an attempt that failed"
INNOCENT = "P4: no innocent task is buried"
OWN_WORD = "P4: a guess does not stand for what a worker saw"
BURIED = "P9: a crasher becomes a dead letter"
MARKED = "P1: a failed task is a dead letter until it is tried again"
COUNTED = "a worker counts what it has recorded"
SETTLED = "P9: what has ended is settled"
ONCE = "one call queues a generation"
PURGED = "a purge ends what was submitted before it"
SPARED = "a cancel or purge ends nothing that is submitted after it"
FAILS = frozenset({EndReason.APP_FAILED, EndReason.TIMEOUT})
"""What spends a task's failures, as the documentation says."""


@dataclass
class Seen:
    """All that happened to one generation of a task."""

    starts: list[tuple[float, str, str]] = field(default_factory=list)
    """Time, token and host."""
    ends: dict[str, AttemptEnd] = field(default_factory=dict)
    ended_at: list[tuple[float, str, Process]] = field(default_factory=list)
    """Time, token and worker."""
    recorded_at: float = 0.0
    crashes: int = 0
    """How many workers it has ended."""


class Laws:
    """Watches the records and the attempts of a world, and what its users were told."""

    def __init__(self, world: World, bucket: Bucket | None = None) -> None:
        self._world, self._bucket = world, bucket
        self.work_s = WORK_S
        """How long an attempt may take, the likeliest time first."""
        self.tasks: dict[tuple[str, int], tuple[Task, float]] = {}
        """What somebody began to submit, and when they first did."""
        self.failing = False
        """Attempts fail half of the time."""
        self.crashers: set[str] = set()
        """Tasks under which the process that starts attempts dies, every time."""
        self.worker_crashers: set[str] = set()
        """Tasks that end their worker, unless they run fenced."""
        self.seen: dict[tuple[str, int], Seen] = defaultdict(Seen)
        self.acknowledged: dict[tuple[str, int], tuple[Task, float]] = {}
        """Tasks whose submission returned, and when it did."""
        self.cancelled: dict[str, tuple[float, float]] = {}
        """Experiments whose cancel returned: when it was asked for and when it returned."""
        self.read: dict[str, tuple[float, float]] = {}
        """By worker: when it last asked for its orders, and when it had them."""
        self.purged: tuple[float, float] | None = None
        self.paused: tuple[float, bool] | None = None
        """Whether the queue is paused, and since when this was acknowledged; None while somebody pauses or resumes it."""
        self.ending: set[str] = set()
        """Experiments and tasks that somebody has begun to cancel and was not told, and `purge`."""
        self.records: dict[tuple[str, int], Record] = {}
        self.own_ends: dict[str, AttemptEnd] = {}
        """By token: how attempts ended under their workers' eyes."""
        self.late: set[tuple[str, int]] = set()
        """Records that a call made after its caller had given up."""
        if bucket is not None:
            bucket.watchers.append(self.written)

    def _break(self, law: str, what: str) -> None:
        broken = Broken(law, what)
        self._world.note(f"BROKEN {broken}")
        self._world.broken = self._world.broken or broken

    # after every step

    def written(self, key: str, before: bytes | None, data: bytes) -> None:
        found = _RECORD.fullmatch(key)
        if found is None:
            self._noted(key, data)
            return
        if before is not None:
            self._break(NEVER_CHANGES, f"`{key}` was written twice")
            return
        self.recorded(codec.read_record(data, key, found[1], int(found[2])))

    def _noted(self, key: str, data: bytes) -> None:
        """P4: what another worker takes for an attempt's end has a place of its own, and gives way to what its worker saw."""
        found = _END.fullmatch(key)
        if found is None:
            return
        ended = self.own_ends.get(found[1])
        if codec.ENDED.decode(data, key).reason is EndReason.LOST and (ended is None or not _is_lost(ended)):
            self._break(OWN_WORD, "an attempt is noted as lost, which only its worker could see")

    def recorded(self, record: Record) -> None:
        """See a record that was not there before, at the moment when it is durable."""
        key = record.task_id, record.generation
        self.records[key], self.seen[key].recorded_at = record, self._world.now
        if self._world.is_late():
            self.late.add(key)
        if record.state is TaskState.CANCELLED and key in self.tasks:
            over = [each[1] for each in (self.cancelled.get(record.experiment), self.purged) if each]
            under_way = self.ending & {"purge", record.experiment, record.task_id}
            if not under_way and max(over, default=-1.0) < self.tasks[key][1]:
                self._break(SPARED, f"{_name(record)} is cancelled, and was submitted later")
        if record.state is TaskState.SUCCEEDED:
            ended = self.seen[record.task_id, record.generation].ends.get(record.token)
            if ended is None or ended.reason is not EndReason.SUCCEEDED or record.value != json.loads(ended.value):
                self._break(OF_ITS_ATTEMPT, f"{_name(record)} holds {record.value} of {record.token}")

    def attempt_starts(self, order: AttemptOrder, process: Process) -> None:
        key, now = (order.task_id, order.generation), self._world.now
        self.seen[key].starts.append((now, order.token, process.host.name))
        asked = self.cancelled.get(order.experiment)
        _, submitted = self.acknowledged.get(key, (None, 1e9))
        if asked is None or submitted >= asked[0]:
            return
        if 0.0 < self.seen[key].recorded_at < asked[0]:
            return  # it had ended, and this is one delivery too many
        began, had = self.read.get(process.name, (0.0, 0.0))
        if now > max(asked[1], process.stopped_until) + OBEYED_WITHIN_S:
            self._break(OBEYS_CANCEL, f"a task of {order.experiment} starts {now - asked[1]:.0f} s after its cancel")
        elif began > asked[1] and now > had + ANSWERED_WITHIN_S and process.stopped_until < had:
            self._break(OBEYS_CANCEL, f"a worker that has read its orders starts a task of {order.experiment}")

    def attempt_ends(self, order: AttemptOrder, ended: AttemptEnd) -> None:
        seen, process = self.seen[order.task_id, order.generation], self._world.me()
        seen.ends[order.token] = self.own_ends[order.token] = ended
        if process is not None:
            seen.ended_at.append((self._world.now, order.token, process))

    def left(self, worker: str, result: WorkerResult) -> None:
        """A worker that left for want of work has counted each record that it committed, and no other.

        It need not know of one that came to stand after the answer that it does not.
        """
        mine = {key: record.state for key, record in self.records.items() if record.worker == worker}
        known = Counter(state for key, state in mine.items() if key not in self.late)
        stand = Counter(mine.values())
        for state, said in ((TaskState.SUCCEEDED, result.succeeded), (TaskState.FAILED, result.failed)):
            if result.reason.startswith("idle") and not known[state] <= said <= stand[state]:
                self._break(COUNTED, f"it says that {said} {state}, and {stand[state]} stand")

    def redriven(self, found: Iterable[RedriveResult]) -> None:
        """Note what a redrive was told: each generation that it queued has to be recorded, and only one call queued it."""
        for one in found:
            key = one.task, one.generation
            if one.done and key in self.acknowledged:
                self._break(ONCE, f"two calls say that they queued {one.task[-12:]} g{one.generation}")
            elif one.done:
                first = self.acknowledged[one.task, 1][0]
                self.acknowledged[key] = replace(first, generation=one.generation), self._world.now

    # at the end of a run

    def check_orders(self, control: QueueControl, done: Mapping[str, object]) -> None:
        """P1 for orders: what was acknowledged is in force."""
        if "pauser" in done and not control.paused:
            self._break(IN_FORCE, "a pause is not")
        if "canceller" in done and "e0" not in control.experiments:
            self._break(IN_FORCE, "a cancel is not")
        if "purger" in done and control.purged_before is None:
            self._break(IN_FORCE, "a purge is not")

    def check_read(self, read: Callable[[], QueueControl]) -> None:
        """P1 for orders: what was acknowledged before they are read is in force."""
        cancelled, paused, purged = set(self.cancelled), self.paused, self.purged
        control = read()
        if forgotten := cancelled - control.experiments.keys():
            self._break(IN_FORCE, f"the cancel of {min(forgotten)} is not")
        if paused is not None and paused == self.paused and control.paused is not paused[1]:
            self._break(IN_FORCE, f"a {'pause' if paused[1] else 'resume'} is not")
        if purged is not None and control.purged_before is None:
            self._break(IN_FORCE, "a purge is not")

    def check_delivered(self, waiting: Collection[str]) -> None:
        """P1: an acknowledged task has a record, or a message that will be delivered."""
        stranded = [key for key in self.acknowledged if key not in self.records and key[0] not in waiting]
        if stranded:
            self._break(RECORDED, f"{len(stranded)} have neither a record nor a message")

    def check_recorded(self) -> None:
        """P1: every acknowledged task has its record."""
        lost = [key for key in self.acknowledged if key not in self.records]
        if lost:
            self._break(RECORDED, f"{len(lost)} of {len(self.acknowledged)} are not")

    def check_waited(self, name: str, said: WaitResult | None, *, tried_again: bool = False) -> None:
        """What `wait` said of an experiment is what its records say: those of first generations, or the newest of all."""
        if said is None:
            self._break(WAIT_ENDS, f"that for {name} does not")
            return
        newest: dict[str, Record] = {}
        for record in sorted(self.records.values(), key=lambda record: record.generation):
            if record.experiment == name and (tried_again or record.generation == 1):
                newest[record.task_id] = record
        truth = Counter(record.state for record in newest.values())
        told = {state: count for state, count in said.totals.items() if count}
        if said.complete and told != dict(truth):
            self._break(WAIT_TRUE, f"it said {_counts(told)} of {name}, and {_counts(truth)} stand")

    def check_wait_ended(self, keys: Iterable[tuple[str, int]]) -> None:
        """Whoever is told that all has ended finds a record of each."""
        open_ = [key for key in keys if key not in self.records]
        if open_:
            self._break(WAIT_TRUE, f"it returns before {len(open_)} have ended")

    def check_failures(self) -> None:
        """P4: what was spent was spent by attempts that failed, and who never failed is not buried."""
        for key, record in self.records.items():
            if record.state is not TaskState.FAILED:
                continue
            ends = [ended.reason for ended in self.seen[key].ends.values()]
            if record.reason is EndReason.CONFIG_INVALID:
                refused = any(ended.value == REFUSED for ended in self.seen[key].ends.values())
                if not (refused or self._lacked(record)):
                    self._break(EVIDENCE, f"{_name(record)} {record.reason}: {record.message}")
            elif record.reason is not EndReason.LOST:
                task = self.acknowledged[key][0] if key in self.acknowledged else None
                needed = max(1, task.max_failures) if task else 1
                failed = sum(reason in FAILS for reason in ends)
                if failed < needed:
                    self._break(EVIDENCE, f"{_name(record)} {record.reason}: {failed} of {needed} attempts failed")
            elif key[0] not in self.worker_crashers:
                died = sum(reason is EndReason.LOST for reason in ends)
                seen = self.seen[key]
                heard = set(seen.ends) - self._unheard(key)
                hosts = {host for _, token, host in seen.starts if token not in heard or _is_lost(seen.ends[token])}
                hosts |= self._announced(key, {token for _, token, _ in seen.starts})
                if died < CRASHES_TO_BURY and len(hosts) < CRASHES_TO_BURY:
                    self._break(INNOCENT, f"{_name(record)}: its starter died {died} times, lost on {len(hosts)} hosts")

    def _unheard(self, key: tuple[str, int]) -> set[str]:
        """Return the tokens of attempts whose end only their worker knew, which was killed then."""
        ended = ((token, by) for _, token, by in self.seen[key].ended_at if by.name in self._world.killed)
        return {token for token, _ in ended if not self._is_noted(*key, token)}

    def _is_noted(self, task_id: str, generation: int, token: str) -> bool:
        return (
            self._bucket is not None and f"attempts/{task_id}/g{generation}/{token}.ended.json" in self._bucket.objects
        )

    def _lacked(self, record: Record) -> bool:
        """Whether a task could not be started for want of a permission that was missing for long."""
        could_not = record.reason is EndReason.CONFIG_INVALID and "could not be started" in str(record.message)
        return could_not and self._world.longest_denial_s > DENIED_FOR_S

    def _announced(self, key: tuple[str, int], started: set[str]) -> set[str]:
        """Return the hosts of workers that were killed between the note of a start and the start: the note counts."""
        objects, writers = (self._bucket.objects, self._bucket.writers) if self._bucket is not None else ({}, {})
        folder = f"attempts/{key[0]}/g{key[1]}/"
        notes = (each for each in objects if each.startswith(folder) and each.endswith(".started.json"))
        by = (writers[each] for each in notes if each[len(folder) :].partition(".")[0] not in started)
        return {process.host.name for process in by if process is not None}

    def attempt_crashes(self, order: AttemptOrder) -> None:
        """P9: a task that ends its workers ends few of them."""
        seen = self.seen[order.task_id, order.generation]
        seen.crashes += 1
        self._world.note(f"ends its worker, for the {seen.crashes}. time")
        if seen.crashes > WORKERS_TO_BURY:
            self._break(BURIED, f"it has ended {seen.crashes} workers")

    def check_crashers(self) -> None:
        """P9: a task that crashes what starts it ends as a dead letter."""
        fair = {EndReason.LOST, EndReason.EXPIRED, EndReason.TIMEOUT}
        for (identity, _), record in self.records.items():
            if self._lacked(record):
                continue
            if identity in self.worker_crashers and record.reason not in {*fair, EndReason.APP_FAILED}:
                self._break(BURIED, f"{_name(record)} is {record.state}: {record.reason}")
            if identity in self.crashers and record.reason not in fair:
                self._break(BURIED, f"{_name(record)} is {record.state}: {record.reason}")

    def check_settled(self) -> None:
        """P9: a success in a worker that nothing holds up is settled, whatever its value; other ends may lose their lease."""
        assert self._bucket is not None
        cut_off = {host for host, _ in self._world.cut_off}
        for (task_id, generation), seen in self.seen.items():
            successes = [each for each in seen.ended_at if seen.ends[each[1]].reason is EndReason.SUCCEEDED]
            for at, token, process in successes:
                held_up = process.name in self._world.killed or process.stopped_until or process.host.name in cut_off
                noted = self._is_noted(task_id, generation, token)
                late = not seen.recorded_at or seen.recorded_at > at + SETTLED_WITHIN_S
                if token in self._world.refused and seen.ends[token].value == REFUSED:
                    continue  # it could only be recorded as a failure, which needs the lease
                record = self.records.get((task_id, generation))
                again = [began for began, by, _ in seen.starts if record is not None and by == record.token]
                if max(again, default=0.0) > at + DONE_AGAIN_S and not (held_up or noted):
                    self._break(SETTLED, f"{task_id[-12:]} g{generation} was done again after its success")
                if late and not (held_up or noted or self._world.now < at + SETTLED_WITHIN_S):
                    self._break(SETTLED, f"{task_id[-12:]} g{generation} is not after {self._world.now - at:.0f} s")

    def check_purged(self) -> None:
        """P1: a purge ends every task that was submitted before it."""
        if self.purged is None:
            return
        left = [key for key, (_, at) in self.acknowledged.items() if at < self.purged[0] and key not in self.records]
        if left:
            self._break(PURGED, f"{len(left)} of {len(self.acknowledged)} have no record")

    def check_marks(self) -> None:
        """P1: each failed task is a dead letter until it is tried again; a closed mark does not come back."""
        assert self._bucket is not None
        objects = self._bucket.objects
        for (task_id, generation), record in self.records.items():
            if record.state is TaskState.SUCCEEDED:
                continue
            key = layout.mark_key(task_id[-8:], task_id, generation, record.state)
            closed = layout.closed_key(key) in objects
            if closed and key in objects:
                # One that was killed between the two steps may leave it, and a write may arrive late; whoever lives takes its
                # own mark back, and no reader takes it for open.
                writer, closed_at = self._bucket.writers[key], objects[layout.closed_key(key)][1]
                if (
                    objects[key][1] > closed_at
                    and writer is not None
                    and writer.name not in {"net", *self._world.killed}
                ):
                    self._break(MARKED, f"the closed mark of {_name(record)} came back")
            elif closed and (task_id, generation + 1) not in self.records:
                self._break(MARKED, f"{_name(record)} was tried again, and no next generation ended")
            elif not closed and key not in objects:
                self._break(MARKED, f"{_name(record)} has no mark: no redrive finds it")


def _is_lost(ended: AttemptEnd) -> bool:
    return ended.reason is EndReason.LOST


def _name(record: Record) -> str:
    return f"{record.task_id[-12:]} g{record.generation}"


def _counts(counts: Any) -> str:
    return ", ".join(f"{count} {state}" for state, count in sorted(counts.items())) or "nothing"
