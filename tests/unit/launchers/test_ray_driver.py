"""The driver of a job, as far as it needs no Ray."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from runtime.jobs.spec import Priority
from runtime.launchers.ray.driver import Driver
from runtime.launchers.ray.priority import Claim, Demand

JOB = "j-" + "0" * 24


class Rival:
    """A board with one other claim."""

    def __init__(self, claim: Claim) -> None:
        self.claim = claim

    def write(self, claim: Claim) -> None: ...

    def read(self) -> list[Claim]:
        return [self.claim]

    def close(self) -> None: ...


@pytest.fixture
def driver(tmp_path: Path) -> Driver:
    """The driver of a job with one run that lets another one go first."""
    folder = tmp_path / "jobs" / JOB
    (folder / "runs" / "0").mkdir(parents=True)
    order = {
        "runs": {"0": {}},
        "nodes": 1,
        "turn": {"owner": "ada", "priority": "low"},
        "ray": {"bundle": {"CPU": 1}, "options": {"num_cpus": 1}},
    }
    (folder / "order.json").write_text(json.dumps(order))
    driver = Driver(str(tmp_path), JOB, 1, 0)
    need = driver.gate.demand.need
    driver.gate._list_totals = lambda: [need]
    high = Demand(job="j-high", owner="bob", priority=Priority.HIGH, kind="CPU", need=need)
    driver.gate.open(lambda: Rival(Claim(demand=high, waiting=1, since=time.monotonic())))
    driver.gate.ask(0)
    assert not driver.gate.decide(0)
    return driver
