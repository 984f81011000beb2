"""The queue in memory beyond the promises of every queue."""

from __future__ import annotations

from runtime.queues.memory import MemoryQueue
from runtime.records.memory import MemoryRecords
from runtime.tasks.history import Release, cancelled_record
from runtime.tasks.model import next_generation
from runtime.testing import FakeClock, sample_task
from tests.conformance.queue_pairs import TTL


def test_next_generation_put_while_the_last_is_held_outlives_that_lease() -> None:
    clock = FakeClock()
    records = MemoryRecords(clock=clock)
    queue = MemoryQueue(records, clock=clock)
    task = sample_task()
    queue.put([task])
    [lease] = queue.lease(1, worker="w-a", ttl=TTL)
    records.commit(cancelled_record(task.id, 1, task.experiment, now=clock.now(), by="somebody"))

    queue.put([next_generation(task)])
    assert queue.renew([lease], TTL) == [lease]
    queue.release([Release(lease)])
    clock.advance(seconds=TTL.total_seconds() + 1)
    queue.tend()

    assert [one.task.generation for one in queue.lease(2, worker="w-b", ttl=TTL)] == [2]
