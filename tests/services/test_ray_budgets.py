"""Budgets of people on a head that our own boot scripts start, with a TPU that Ray's autoscaler makes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.client.jobs.explain import explain, read_facts
from runtime.jobs.spec import JobState, Priority
from runtime.launchers.ray.pending_watch import CONTRACT
from tests.services.head_support import LabHead, pool, require_ray
from tests.services.test_ray_turns import Lab, waits

pytestmark = pytest.mark.service


@pytest.fixture
def head() -> Iterator[LabHead]:
    require_ray()
    with LabHead({"one": pool("v4-8", min=1, max=1, cpus=4)}, budgets={"ada": 0, "default": 8}) as running:
        yield running


@pytest.fixture
def lab(head: LabHead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    with head.bench(tmp_path) as bench:
        yield Lab(bench, tmp_path, monkeypatch)


def test_person_over_budget_goes_behind_others_whatever_the_priority_until_the_budget_allows_more(
    head: LabHead, lab: Lab
) -> None:
    busy = lab.launch("busy", 1, owner="carol")
    lab.bench.wait_for(lambda: lab.begun() == ["busy"])
    ada = lab.launch("ada", 2, Priority.HIGH, owner="ada")
    lab.bench.wait_for(lambda: waits(ada, 2))
    bob = lab.launch("bob", 1, owner="bob")
    lab.bench.wait_for(lambda: waits(bob, 1))

    lab.end("busy")

    lab.bench.wait_for(lambda: lab.begun() == ["busy", "bob"])
    said = explain(read_facts(ada))
    assert "ada holds 0 TPU chips, and the budget is 0" in said.evidence
    eve = lab.launch("eve", 1, owner="eve")
    lab.bench.wait_for(lambda: waits(eve, 1))
    # As the head's watcher does once the stack has another budget.
    file = Path(f"{head.head.root}{CONTRACT}")
    contract = json.loads(file.read_text())
    contract["clusters"][head.cluster.key]["budgets"]["ada"] = 8
    file.write_text(json.dumps(contract))
    lab.end("bob")
    lab.bench.wait_for(lambda: lab.begun() == ["busy", "bob", "ada"])
    for name in ("ada", "eve"):
        lab.end(name)

    assert [lab.bench.end(job).state for job in (busy, bob, ada, eve)] == [JobState.SUCCEEDED] * 4
    assert lab.begun() == ["busy", "bob", "ada", "ada", "eve"]
