"""Counters of killed workers stay too low forever; reports on an experiment are right all the same."""

from __future__ import annotations

import os
import random
import threading
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from runtime.client.tasks.cancel import cancel_task
from runtime.client.tasks.redrive import retry
from runtime.client.tasks.status import read_experiment
from runtime.client.tasks.wait import WaitResult, wait
from runtime.tasks.model import TaskState
from tests.fakes.faults import Fault, Request, Response
from tests.fakes.gcs import GcsServer
from tests.services.failure_support import EXPERIMENT, WorkerProcess, Yard, call, open_yard

pytestmark = [pytest.mark.service, pytest.mark.slow, pytest.mark.soak]

FULL = os.environ.get("SOAK") == "1"
KILLS = 12 if FULL else 3
GOOD, WRONG, CANCELLED, AGAIN = (200, 12, 8, 4) if FULL else (40, 4, 3, 2)


class UnreliableBucket(GcsServer):
    """A bucket that fails one page of a listing in ten, each time in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.chance = random.Random(11)
        self.page_size = 50

    def handle(self, request: Request) -> Response | None:
        if request.kind == "LIST" and self.chance.random() < 0.1:
            faults = (Fault.REFUSE_503, Fault.STORE_THEN_DROP, Fault.CUT_OFF, Fault.RESET, Fault.REPEAT_PAGE)
            self.fail_next("LIST", [self.chance.choice(faults)])
        return super().handle(request)


@pytest.fixture(params=["folder", "bucket"])
def yard(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Yard]:
    server = UnreliableBucket().start()
    server.make_bucket("lab")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
    records = "gs://lab/yard" if request.param == "bucket" else tmp_path / "records"
    with open_yard("pubsub", tmp_path, request, records=records) as opened:
        yield opened
    server.stop()


@pytest.mark.daily(1)
def test_totals_after_workers_were_killed_at_random_are_the_truth_and_wait_returns(yard: Yard) -> None:
    for first in range(0, GOOD, 20):
        yard.submit([call("short", f"s{n}", 0.05) for n in range(first, first + 20)])
    wrong = yard.submit([call("wrong_once", f"w{n}", max_failures=1) for n in range(WRONG)])
    for task in yard.submit([call("short", f"c{n}", 0.05) for n in range(CANCELLED)]):
        cancel_task(yard.stack, task, now=datetime.now(UTC), by="a test")
    waited: list[WaitResult] = []
    waiting = threading.Thread(target=lambda: waited.append(wait(EXPERIMENT, queue=yard.queue)), daemon=True)
    waiting.start()

    living = kill_at_random(yard)
    yard.wait_recorded(timeout_s=600)
    waiting.join(timeout=600)

    totals = {TaskState.SUCCEEDED: GOOD, TaskState.FAILED: WRONG, TaskState.CANCELLED: CANCELLED}
    assert [(one.complete, nonzero(one.totals)) for one in waited] == [(True, totals)]
    assert any(worker.alive for worker in living)
    assert nonzero(yard.records.totals(EXPERIMENT, exact=True).counts) == totals
    assert nonzero(read_experiment(yard.stack, EXPERIMENT, now=datetime.now(UTC)).totals) == totals
    assert Counter(record.state for record in yard.records.records(EXPERIMENT)) == totals

    for number, task in enumerate(wrong[:AGAIN]):
        yard.open_gate(f"w{number}")
        assert retry(yard.stack, task, now=datetime.now(UTC)).done
        yard.tasks[task] = 2
    totals |= {TaskState.SUCCEEDED: GOOD + AGAIN, TaskState.FAILED: WRONG - AGAIN}
    done = wait(EXPERIMENT, queue=yard.queue, timeout=timedelta(minutes=10))
    assert (done.complete, nonzero(done.totals)) == (True, totals)
    yard.check()


def kill_at_random(yard: Yard) -> list[WorkerProcess]:
    """Keep three workers running, and kill one of them as soon as some more tasks have begun; return those alive."""
    chance = random.Random(5)
    options = [("--slots", "2", "--reuse-process"), ("--slots", "2"), ("--reuse-process",)]
    # A short lease, because the tasks of a killed worker wait for its end.
    options = [(*each, "--max-consecutive-failures", "0", "--lease", "2s") for each in options]
    living = [yard.start(*each) for each in options]
    for _ in range(KILLS):
        begun = len(yard.runs()) + chance.randrange(1, 15)
        left = GOOD + WRONG
        yard.wait_for(lambda begun=begun, left=left: len(yard.runs()) >= min(begun, left), "more tasks")  # type: ignore[misc]
        index = chance.randrange(len(living))
        living[index].kill()
        living[index] = yard.start(*options[index])
    return living


def nonzero(totals: object) -> dict[TaskState, int]:
    assert isinstance(totals, dict)
    return {state: count for state, count in totals.items() if count}
