"""What the shim reads of the kernel about memory and disk."""

from __future__ import annotations

import pytest

from runtime.shim import resource_usage


@pytest.mark.parametrize(
    ("asked", "limit", "expected"),
    [("", "", None), ("5", "", None), ("5", "much", None), ("", "7", None), ("0", "7", None), ("5", "7", 7)],
)
def test_disk_of_a_container_has_a_limit_only_if_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, asked: str, limit: str, expected: int | None
) -> None:
    monkeypatch.setenv("RUNTIME_DISK_REQUEST", asked)
    monkeypatch.setenv("RUNTIME_DISK_LIMIT", limit)

    assert resource_usage.disk_limit() == expected


@pytest.mark.parametrize(("processes", "expected"), [(1, 100), (2, 120), (3, 180)])
def test_memory_over_the_limit_is_counted_by_shares_where_processes_may_share_it(
    monkeypatch: pytest.MonkeyPatch, processes: int, expected: int
) -> None:
    """100 bytes each, 60 of them its share; one process shares with none of its session, so its share is not read."""
    monkeypatch.setattr(resource_usage, "list_names", lambda path: ["self", *map(str, range(1, processes + 1)), "99"])
    monkeypatch.setattr(resource_usage, "_session", lambda pid: 98 if pid == 99 else 1)
    monkeypatch.setattr(resource_usage, "_resident", lambda pid: 100)
    monkeypatch.setattr(resource_usage, "_proportional", lambda pid: 60)

    assert resource_usage.held_memory({1}, 50) == expected
    assert resource_usage.held_memory({1}, 100 * processes) == 100 * processes


@pytest.mark.parametrize(
    ("line", "place", "text"),
    [
        ("0::/pod:a", "/sys/fs/cgroup/pod:a/memory.events", "oom 3\noom_kill 2\n"),
        ("9:memory:/pod:a", "/sys/fs/cgroup/memory/pod:a/memory.oom_control", "under_oom 0\noom_kill 2\n"),
        ("9:cpu,memory:/elsewhere", "/sys/fs/cgroup/memory/memory.oom_control", "oom_kill 2\n"),
    ],
)
def test_kills_for_memory_are_counted_in_the_group_of_this_process(
    monkeypatch: pytest.MonkeyPatch, line: str, place: str, text: str
) -> None:
    files = {"/proc/self/cgroup": "3:cpuset:/other\n" + line + "\n"}
    monkeypatch.setattr(resource_usage, "read_system", lambda path: files.get(path, ""))
    monkeypatch.setattr(resource_usage, "_before", 0)

    assert not resource_usage.ran_out_of_memory()
    files[place] = text
    assert resource_usage.ran_out_of_memory()
    resource_usage.forget_oom_kills()
    assert not resource_usage.ran_out_of_memory()
