"""What the reaper keeps between its runs."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from runtime.clusters.reaper_state import (
    ReaperState,
    back_off,
    forgive,
    load_memory,
    recall_seen,
    save_memory,
    waits_until,
)
from runtime.errors import InfrastructureFailure
from tests.cluster_support import NOW

SECOND = timedelta(seconds=1)
WHOLE = ReaperState(
    seen={"incomplete projects/p/locations/z/nodes/n": NOW},
    looked_at=NOW + SECOND,
    refusals=2,
    wait_until=NOW + 90 * SECOND,
    removed={"preempted": 3, "older head": 1},
    failed=4,
)


@pytest.mark.parametrize("memory", [ReaperState(), WHOLE])
def test_memory_comes_back_from_its_file_as_it_was(tmp_path: Path, memory: ReaperState) -> None:
    file = tmp_path / "deep" / "memory.json"

    save_memory(file, memory)

    assert load_memory(file) == memory
    assert [each.name for each in file.parent.iterdir()] == ["memory.json"]


@pytest.mark.parametrize(
    "text",
    [
        *(None, "", "{}", "[]", "null", "\udcff", "[" * 100_000),
        '{"seen": {"a": "yesterday"}}',
        '{"seen": {}, "refusals": "many"}',
        '{"seen": {}, "refusals": 1e400, "wait_until": null, "removed": {}, "failed": 0}',
        '{"seen": {}, "refusals": 0, "wait_until": null, "removed": {"preempted": -5}, "failed": 0}',
    ],
)
def test_memory_that_is_missing_or_damaged_is_empty(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "memory.json"
    if text is not None:
        file.write_text(text, errors="surrogateescape")

    assert load_memory(file) == ReaperState()


def test_memory_that_cannot_be_written_says_where(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(InfrastructureFailure) as failed:
        save_memory(tmp_path / "file" / "memory.json", WHOLE)

    assert f"{tmp_path}/file/memory.json" in failed.value.message


@pytest.mark.parametrize(
    ("refusals", "pause"), [(0, 45), (1, 90), (2, 180), (3, 360), (4, 600), (5, 600), (10_000, 600)]
)
def test_back_off_doubles_the_pause_up_to_ten_minutes(refusals: int, pause: int) -> None:
    assert back_off(ReaperState(refusals=refusals), NOW) == ReaperState(
        refusals=refusals + 1, wait_until=NOW + pause * SECOND
    )


def test_forgive_forgets_refusals_alone() -> None:
    assert forgive(WHOLE) == ReaperState(seen=WHOLE.seen, looked_at=WHOLE.looked_at, removed=WHOLE.removed, failed=4)


@pytest.mark.parametrize(
    ("after", "waits"),
    [(0, True), (89, True), (90, False), (91, False), (-510, True), (-511, False)],
)
def test_pause_ends_at_its_time_and_when_the_clock_was_set_back_far(after: int, waits: bool) -> None:
    assert waits_until(WHOLE, NOW + after * SECOND) == (WHOLE.wait_until if waits else None)


def test_file_that_could_not_be_replaced_leaves_no_piece(tmp_path: Path) -> None:
    (tmp_path / "memory.json").mkdir()

    with pytest.raises(InfrastructureFailure):
        save_memory(tmp_path / "memory.json", WHOLE)

    assert [each.name for each in tmp_path.iterdir()] == ["memory.json"]


@pytest.mark.parametrize(
    ("gap", "recalled"), [(timedelta(minutes=15), True), (timedelta(minutes=16), False), (timedelta(days=-1), False)]
)
def test_suspects_of_a_look_long_ago_are_forgotten(gap: timedelta, recalled: bool) -> None:
    memory = ReaperState(seen=WHOLE.seen, looked_at=NOW)

    assert recall_seen(memory, NOW + gap) == (WHOLE.seen if recalled else {})
    assert recall_seen(ReaperState(seen=WHOLE.seen), NOW) == {}
