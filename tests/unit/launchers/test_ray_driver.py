"""The driver of a job, as far as it needs no Ray."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from runtime.jobs.spec import Priority
from runtime.launchers.ray.driver import Driver
from runtime.launchers.ray.priority import Claim, Demand
from runtime.shim.common import FAILED

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


@pytest.mark.parametrize("by", ["a cancel mark", "TERM"])
def test_run_that_is_stopped_while_it_lets_another_go_first_asks_ray_for_nothing(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(driver, "_make_actor", lambda options, held: asked.append(options))
    monkeypatch.setattr(driver, "_await_all", lambda *_, **__: None)
    waits = threading.Event()
    cancelled = driver._is_unwanted

    def look(run: Any) -> bool:
        waits.set()
        return cancelled(run)

    monkeypatch.setattr(driver, "_is_unwanted", look)
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(driver._carry_out(0)))
    thread.start()
    waits.wait()
    if by == "TERM":
        driver.stopping.set()
    else:
        (tmp_path / "jobs" / JOB / "cancel").touch()
    thread.join()

    assert (codes, asked) == ([FAILED], [])
