"""celery on Redis: late acknowledgement, results kept, its default prefetch of 4."""

from __future__ import annotations

import os

from celery import Celery

from benchmarks import bodies

_url = os.environ["BENCHMARK_REDIS"]
app = Celery("benchmark", broker=_url, backend=_url)
app.conf.update(
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    result_expires=600,
    broker_connection_retry_on_startup=True,
)


@app.task
def noop(index: int) -> None:
    bodies.noop(index)


@app.task
def cpu(index: int) -> None:
    bodies.cpu(index)
