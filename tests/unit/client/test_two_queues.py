"""An experiment whose tasks are in two queues: each of them gives, ends and gets back its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.client.tasks.cancel import cancel_task
from runtime.client.tasks.redrive import read_dead, redrive, retry
from runtime.client.tasks.repair import repair
from runtime.client.tasks.status import TaskQueues
from runtime.client.tasks.submit import Submission, submit_tasks
from runtime.end_reasons import EndReason
from runtime.errors import QueueUnavailable
from runtime.queues.base import Queue
from runtime.queues.memory import MemoryQueue
from runtime.queues.sqlite.queue import SqliteQueue
from runtime.tasks.history import Record, Settlement, mark_of
from runtime.tasks.model import Task, TaskState
from runtime.testing import sample_task
from tests.verbs_support import TTL, Bench

CPU, GPU = [[sample_task(f"{kind}{number}") for number in range(count)] for kind, count in (("c", 3), ("g", 2))]


def submit(bench: Bench, tasks: list[Task], queue: str | None = None) -> Submission:
    return submit_tasks(tasks, bench.queue(queue), experiment="sample")


@pytest.fixture
def bench() -> Iterator[Bench]:
    """Three tasks in the queue `default`, and then two in `gpu`."""
    bench = Bench.memory()
    bench.add_queue("gpu")
    submit(bench, CPU)
    submit(bench, GPU, "gpu")
    yield bench
    bench.close()


def fail(bench: Bench, queue: Queue) -> Task:
    """Have the next task of the queue fail for good."""
    [lease] = queue.lease(1, worker="w-one", ttl=TTL)
    task = lease.task
    record = Record(
        task_id=task.id,
        generation=task.generation,
        experiment="sample",
        state=TaskState.FAILED,
        token=lease.token,
        reason=EndReason.APP_FAILED,
        ended_at=bench.now,
    )
    queue.settle([Settlement(lease, record, mark_of(record, task))])
    return task


def ended(bench: Bench) -> dict[TaskState, int]:
    return {state: count for state, count in bench.records.totals("sample", exact=True).counts.items() if count}


def waiting(bench: Bench, queue: str | None = None) -> int:
    return bench.queue(queue).depth().ready


@pytest.mark.parametrize("order", [("default", "gpu"), ("gpu", "default")])
def test_purge_ends_the_tasks_of_its_queue_and_no_others(bench: Bench, order: tuple[str, str]) -> None:
    counts = {"default": len(CPU), "gpu": len(GPU)}
    first, second = order

    assert bench.queue(first).purge() == counts[first]
    assert ended(bench) == {TaskState.CANCELLED: counts[first], TaskState.QUEUED: counts[second]}
    assert (waiting(bench, first), waiting(bench, second)) == (0, counts[second])

    assert bench.queue(second).purge() == counts[second]
    assert ended(bench) == {TaskState.CANCELLED: len(CPU) + len(GPU)}


def test_purge_ends_a_later_generation_in_its_own_queue_alone(bench: Bench) -> None:
    task = fail(bench, bench.queue("gpu"))
    assert retry(bench, task.id, now=bench.now).queue == "gpu"

    bench.queue().purge()
    assert bench.records.find(task.id, 2) is None

    bench.queue("gpu").purge()
    second = bench.records.find(task.id, 2)
    assert second is not None
    assert second.state is TaskState.CANCELLED


def test_repair_puts_each_task_into_its_queue_again(bench: Bench) -> None:
    for name, count in (("default", len(CPU)), ("gpu", len(GPU))):
        emptied = MemoryQueue(bench.records, name=name, clock=bench.clock)

        assert repair(emptied, bench.records).published == count
        assert emptied.depth().ready == count
        emptied.close()


def test_retry_and_redrive_put_a_task_into_its_queue_again(bench: Bench) -> None:
    ours, theirs = fail(bench, bench.queue()), fail(bench, bench.queue("gpu"))

    assert retry(bench, theirs.id, now=bench.now).queue == "gpu"
    assert waiting(bench, "gpu") == len(GPU)
    [again] = redrive(bench, read_dead(bench.records, "sample"), now=bench.now)
    assert (again.task, again.queue) == (ours.id, "default")
    assert waiting(bench) == len(CPU)


def test_retry_of_a_task_in_a_file_goes_to_its_queue(tmp_path: Path) -> None:
    bench = Bench.sqlite(tmp_path)
    first = bench.queue()
    assert isinstance(first, SqliteQueue)
    other = SqliteQueue(first._file, bench.records, name="gpu", clock=bench.clock)  # type: ignore[arg-type]
    bench._queues["gpu"] = other
    submit(bench, CPU)
    submit(bench, GPU, "gpu")
    task = fail(bench, other)

    assert retry(bench, task.id, now=bench.now).queue == "gpu"
    assert waiting(bench, "gpu") == len(GPU)
    assert [TaskQueues(bench).find("sample", each.id) for each in (CPU[0], GPU[0])] == ["default", "gpu"]
    bench.close()


def test_order_to_cancel_a_task_reaches_a_queue_that_its_stack_does_not_name(bench: Bench) -> None:
    del bench._queues["gpu"]

    cancel_task(bench, GPU[0].id, now=bench.now, by="somebody")

    assert {task for task, _ in bench.records.control("gpu").tasks} == {GPU[0].id}


class Away(MemoryQueue):
    """A queue that takes no task for now."""

    def put(self, tasks: object) -> object:  # type: ignore[override]
        raise QueueUnavailable("the service is away")


def test_part_that_was_not_sent_is_left_to_its_own_queue() -> None:
    bench = Bench.memory()
    bench.add_queue("gpu")
    away = Away(bench.records, clock=bench.clock)
    with pytest.raises(QueueUnavailable):
        submit_tasks(CPU, away, experiment="sample")

    sent = submit(bench, GPU, "gpu")
    assert (sent.new, sent.resumed, waiting(bench, "gpu")) == (len(GPU), 0, len(GPU))

    # A task that is in no queue yet is put into the one that is asked for.
    assert submit(bench, CPU[:1], "gpu").new == 1
    assert ended(bench) == {TaskState.QUEUED: len(CPU) + len(GPU)}

    assert submit(bench, CPU).resumed == len(CPU)
    assert waiting(bench) == len(CPU)
    assert ended(bench) == {TaskState.QUEUED: len(CPU) + len(GPU)}
    bench.close()


def test_queue_of_a_task_is_that_of_its_part(bench: Bench) -> None:
    queues = TaskQueues(bench)

    assert [queues.find("sample", task.id) for task in (*CPU, *GPU)] == ["default"] * 3 + ["gpu"] * 2
    assert queues.find("sample", sample_task("foreign").id) == "default"
