"""What must hold in every run, a function for each law. Each names the promise of DESIGN that it stands for."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from runtime.reasons import Budget, EndReason
from runtime.records import codec, layout
from runtime.tasks.history import Record
from runtime.tasks.model import Task, TaskState
from runtime.tasks.verdict import failures_allowed
from runtime.worker.attempts.model import Ended, Order
from tests.simulation.bucket import Bucket
from tests.simulation.world import Broken, Process, World

_RECORD = re.compile(layout.RECORD, re.ASCII)
OBEYED_WITHIN_S = 140.0
"""An order is obeyed within this time: 10 s until it is read, 5 s for the read, and the longest stop of a worker."""

NEVER_CHANGES = "P2: a record never changes"
OF_ITS_ATTEMPT = "P2: a success is the success of its own attempt"
OBEYS_CANCEL = "an acknowledged cancel is obeyed"
IN_FORCE = "an acknowledged order is in force"
RECORDED = "P1: an acknowledged task is recorded in the end"
WAIT_ENDS = "`wait` ends once every task has"
WAIT_TRUE = "`wait` tells the truth"
EVIDENCE = "P4: each failure that was spent has an attempt that failed"
INNOCENT = "P4: no innocent task is buried"
PURGED = "a purge ends what was submitted before it"


@dataclass
class Seen:
    """All that happened to one generation of a task."""

    starts: list[tuple[float, str, str]] = field(default_factory=list)
    """Time, token and host."""
    ends: dict[str, Ended] = field(default_factory=dict)


class Laws:
    """Watches the bucket and the attempts of a world, and what its users were told."""

    def __init__(self, world: World, bucket: Bucket) -> None:
        self._world, self._bucket = world, bucket
        self.seen: dict[tuple[str, int], Seen] = defaultdict(Seen)
        self.acknowledged: dict[tuple[str, int], tuple[Task, float]] = {}
        """Tasks whose submission returned, and when it did."""
        self.cancelled: dict[str, tuple[float, float]] = {}
        """Experiments whose cancel returned: when it was asked for and when it returned."""
        self.purged: tuple[float, float] | None = None
        self.records: dict[tuple[str, int], Record] = {}
        bucket.watchers.append(self._written)

    def _break(self, law: str, what: str) -> None:
        broken = Broken(law, what)
        self._world.note(f"BROKEN {broken}")
        self._world.broken = self._world.broken or broken

    # after every step

    def _written(self, key: str, before: bytes | None, data: bytes) -> None:
        found = _RECORD.fullmatch(key)
        if found is None:
            return
        if before is not None:
            self._break(NEVER_CHANGES, f"`{key}` was written twice")
            return
        record = codec.read_record(data, key, found[1], int(found[2]))
        self.records[record.task_id, record.generation] = record
        if record.state is TaskState.SUCCEEDED:
            ended = self.seen[record.task_id, record.generation].ends.get(record.token)
            if ended is None or ended.reason is not EndReason.SUCCEEDED or record.value != record.token:
                self._break(OF_ITS_ATTEMPT, f"{_name(record)} holds {record.value} of {record.token}")

    def attempt_starts(self, order: Order, process: Process) -> None:
        key, now = (order.task_id, order.generation), self._world.now
        self.seen[key].starts.append((now, order.token, process.host.name))
        asked = self.cancelled.get(order.experiment)
        _, submitted = self.acknowledged.get(key, (None, 1e9))
        if asked is not None and submitted < asked[0] and now > asked[1] + OBEYED_WITHIN_S:
            self._break(OBEYS_CANCEL, f"a task of {order.experiment} starts {now - asked[1]:.0f} s after its cancel")

    def attempt_ends(self, order: Order, ended: Ended) -> None:
        self.seen[order.task_id, order.generation].ends[order.token] = ended

    # at the end of a run

    def check_recorded(self) -> None:
        """P1: every acknowledged task has its record."""
        lost = [key for key in self.acknowledged if key not in self.records]
        if lost:
            self._break(RECORDED, f"{len(lost)} of {len(self.acknowledged)} are not")

    def check_waited(self, name: str, said: Any) -> None:
        """What `wait` said of an experiment is what its records say."""
        if said is None:
            self._break(WAIT_ENDS, f"that for {name} does not")
            return
        truth: dict[TaskState, int] = defaultdict(int)
        for (task_id, _), record in self.newest().items():
            if record.experiment == name and task_id:
                truth[record.state] += 1
        told = {state: count for state, count in said.totals.items() if count}
        if said.complete and told != dict(truth):
            self._break(WAIT_TRUE, f"it said {_counts(told)} of {name}, and {_counts(truth)} stand")

    def newest(self) -> dict[tuple[str, int], Record]:
        newest: dict[str, Record] = {}
        for record in self.records.values():
            known = newest.get(record.task_id)
            if known is None or known.generation < record.generation:
                newest[record.task_id] = record
        return {(record.task_id, record.generation): record for record in newest.values()}

    def check_failures(self) -> None:
        """P4: what was spent was spent by attempts that failed, and who never failed is not buried."""
        for key, record in self.records.items():
            if record.state is not TaskState.FAILED:
                continue
            ends = [ended.reason for ended in self.seen[key].ends.values()]
            if record.reason.budget is Budget.FAILURES:
                task = self.acknowledged[key][0] if key in self.acknowledged else None
                needed = failures_allowed(task) if task else 1
                failed = sum(reason.budget is Budget.FAILURES for reason in ends)
                if failed < needed:
                    self._break(EVIDENCE, f"{_name(record)} {record.reason}: {failed} of {needed} attempts failed")
            elif record.reason is EndReason.LOST:
                died = sum(reason is EndReason.LOST for reason in ends)
                hosts = {host for _, token, host in self.seen[key].starts if token not in self.seen[key].ends}
                if died < 3 and len(hosts) < 3:
                    self._break(INNOCENT, f"{_name(record)}: its starter died {died} times, lost on {len(hosts)} hosts")

    def check_purged(self) -> None:
        if self.purged is None:
            return
        left = [key for key, (_, at) in self.acknowledged.items() if at < self.purged[0] and key not in self.records]
        if left:
            self._break(PURGED, f"{len(left)} of {len(self.acknowledged)} have no record")


def _name(record: Record) -> str:
    return f"{record.task_id[-12:]} g{record.generation}"


def _counts(counts: Any) -> str:
    return ", ".join(f"{count} {state}" for state, count in sorted(counts.items())) or "nothing"
