"""A fleet of workers on a real Ray head, whose TPUs are preempted one by one: benchmarks/storm.py in a small form."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.storm import run_storm, strike_by_progress
from tests.services.head_support import require_ray
from tests.services_support import PubsubEmulator

pytestmark = [pytest.mark.service, pytest.mark.nightly]

NODES, TASKS, PREEMPTIONS = 3, 60, 6


def test_fleet_on_tpus_that_are_preempted_does_each_task_once_and_leaves_no_node(
    pubsub_emulator: PubsubEmulator, tmp_path: Path
) -> None:
    require_ray()

    storm = run_storm(
        tmp_path,
        pubsub_emulator,
        nodes=NODES,
        tasks=TASKS,
        task_s=0.3,
        strikes=strike_by_progress(PREEMPTIONS, TASKS),
    )

    assert (storm.done, storm.recorded_twice, storm.left_behind) == (TASKS, 0, 0), storm
    assert (storm.preemptions, storm.removed, storm.workers_lost) == (PREEMPTIONS, PREEMPTIONS, 0), storm
    assert storm.made > NODES, storm
