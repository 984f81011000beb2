"""The record of a run as the driver reads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.launchers.ray import run_reader
from runtime.launchers.ray.run_reader import DriversRun
from runtime.shim.record import FolderRecord


def test_cancel_mark_in_a_bucket_is_looked_for_every_few_seconds_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(run_reader.time, "monotonic", lambda: now)
    rare, often = (DriversRun(FolderRecord(str(tmp_path)), 3, look_s=each) for each in (5.0, 0.0))
    assert (rare.cancelled(), often.cancelled()) == (False, False)

    (tmp_path / "cancel.3").touch()
    now = 104.0
    assert (rare.cancelled(), often.cancelled()) == (False, True)
    now = 105.0
    assert rare.cancelled()
    (tmp_path / "cancel.3").unlink()
    now = 200.0
    assert rare.cancelled()
