"""A consumer of ours that keeps no results: our worker over records in memory, or our queue alone in a loop."""

from __future__ import annotations

import os
import sys
from datetime import UTC, datetime, timedelta

from benchmarks import bodies
from benchmarks.peers.ours_pubsub import open_queue


def work(topic: str, subscription: str) -> None:
    from runtime.worker.options import WorkerOptions
    from runtime.worker.run import run_worker

    run_worker(open_queue(topic, subscription), WorkerOptions(reuse_process=True))


def loop(topic: str, subscription: str) -> None:
    import select

    from runtime.end_reasons import EndReason
    from runtime.tasks.history import Record, Settlement
    from runtime.tasks.model import FunctionEntry, TaskState

    queue = open_queue(topic, subscription)
    worker = f"w-{os.getpid()}"
    queue.join(worker)
    while True:
        leases = queue.lease(1000, worker=worker, ttl=timedelta(seconds=30))
        settlements = []
        for lease in leases:
            entry = lease.task.entry
            assert isinstance(entry, FunctionEntry)
            getattr(bodies, entry.function.partition(":")[2])(*entry.args)
            record = Record(
                task_id=lease.task.id,
                generation=lease.task.generation,
                experiment=lease.task.experiment,
                state=TaskState.SUCCEEDED,
                token=lease.token,
                reason=EndReason.SUCCEEDED,
                ended_at=datetime.now(UTC),
                worker=worker,
                attempts=1,
            )
            settlements.append(Settlement(lease, record))
        if settlements:
            queue.settle(settlements)
        else:
            wake_fd = queue.wake_descriptor()
            if wake_fd is not None:
                select.select([wake_fd], [], [], 0.5)
                queue.drain_wakes()


if __name__ == "__main__":
    {"memory": work, "none": loop}[sys.argv[1]](*sys.argv[2:])
