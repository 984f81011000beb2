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
