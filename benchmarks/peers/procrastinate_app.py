"""procrastinate on PostgreSQL: coroutine tasks, and a periodic task that retries the tasks of lost workers."""

from __future__ import annotations

import asyncio
import os
import sys

import procrastinate

from benchmarks import bodies

app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=os.environ["BENCHMARK_POSTGRES"]))

DEFAULT = {"heartbeat": 10.0, "stalled": 30.0, "cron": "* * * * *"}
"""Its own heartbeat settings, and the sweep each minute that its manual shows."""
BEST = {"heartbeat": 0.5, "stalled": 1.5, "cron": "* * * * * */1"}
SETTINGS = BEST if os.environ.get("BENCHMARK_BEST") else DEFAULT


@app.task(name="noop")
async def noop(index: int) -> None:
    bodies.noop(index)


@app.task(name="stuck_once")
async def stuck_once(index: int) -> None:
    if bodies.began(index) == 0:
        # Not a blocking sleep: a worker that lives goes on with its heartbeats.
        await asyncio.sleep(600)
    bodies.ended(index)


@app.periodic(cron=SETTINGS["cron"])
@app.task(name="sweep", queueing_lock="sweep", pass_context=True)
async def sweep(context: procrastinate.JobContext, timestamp: int) -> None:
    stalled = await app.job_manager.get_stalled_jobs(seconds_since_heartbeat=SETTINGS["stalled"])
    for job in stalled:
        await app.job_manager.retry_job(job)


async def _work() -> None:
    async with app.open_async():
        await app.run_worker_async(
            concurrency=2,  # One slot for the sweep: a task that hangs must not block the sweep that would find it.
            update_heartbeat_interval=SETTINGS["heartbeat"],
            stalled_worker_timeout=SETTINGS["stalled"],
        )


if __name__ == "__main__":
    sys.exit(asyncio.run(_work()))
