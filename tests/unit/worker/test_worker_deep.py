"""Tasks whose attempts leave trees that are too deep for Python's recursion and for paths: each ends as it would without."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.records import open_records
from runtime.records.output_upload import find_outputs
from runtime.shim.tree_walk import MOST_PARTS
from runtime.snapshots.snapshot import take_snapshot
from runtime.tasks.model import ArtifactSpec, CommandEntry, FunctionEntry, Task, TaskState
from runtime.testing import sample_task
from tests.deep_support import cleared, dig
from tests.fakes.gcs import GcsServer
from tests.unit.worker.worker_bench import Bench, bench, open_pair_with_folder, open_pair_with_records

__all__ = ["bench", "cleared"]

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="workers run their attempts on Linux")


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    server = GcsServer().start()
    server.make_bucket("lab")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
    yield "gs://lab/p"
    server.stop()


def shell(script: str, **fields: object) -> Task:
    return sample_task(script, entry=CommandEntry(("sh", "-c", f"set -e; {script}")), **{"max_failures": 1, **fields})


def left(bench: Bench) -> list[str]:
    """List what the worker has left of its scratch folder."""
    return sorted(path.name for path in (bench.folder / "tmp").rglob("w-*"))


def test_task_that_leaves_deep_trees_succeeds_and_so_does_the_next(bench: Bench) -> None:
    tasks = [shell("; ".join(map(dig, ("$TMPDIR/there", "$RUNTIME_CHECKPOINT_DIR")))), shell("true")]
    bench.put(*tasks)

    result = bench.run(slots=1)

    assert [bench.record(each).state for each in tasks] == [TaskState.SUCCEEDED] * 2, bench.record(tasks[0]).message
    assert (result.succeeded, left(bench)) == (2, [])


def test_task_that_leaves_a_deep_tree_in_its_code_succeeds_and_so_does_the_next(bench: Bench) -> None:
    (bench.folder / "source").mkdir()
    (bench.folder / "source" / "a.txt").write_text("one\n")
    identity = take_snapshot(bench.folder / "source", bench.records)
    tasks = [shell(dig("left"), snapshot=identity), shell("test ! -e left", snapshot=identity)]
    bench.put(*tasks)

    bench.run(slots=1)

    assert [bench.record(each).state for each in tasks] == [TaskState.SUCCEEDED] * 2, bench.record(tasks[0]).message
    assert left(bench) == []


@pytest.mark.slow
def test_task_that_fails_and_leaves_deep_trees_fails_for_its_own_reason(bench: Bench) -> None:
    task = shell("; ".join(map(dig, ("$TMPDIR/there", "$RUNTIME_CHECKPOINT_DIR"))) + "; exit 3")
    bench.put(task)

    bench.run(slots=1)

    record = bench.record(task)
    assert (record.state, record.exit_code) == (TaskState.FAILED, 3)
    assert left(bench) == []


def test_deep_outputs_in_a_folder_stay_there(bench: Bench) -> None:
    (bench.folder / "records").mkdir()
    queue, records = open_pair_with_records(bench, open_records(f"file:{bench.folder / 'records'}"))
    task = shell(dig("$RUNTIME_OUTPUT_DIR"))
    queue.put([task])

    bench.run(queue)

    record = bench.record(task, records=records)
    assert (record.state, record.message) == (TaskState.SUCCEEDED, None)
    assert record.outputs_url is not None
    assert (Path(record.outputs_url) / "near").exists()


def test_deep_outputs_for_a_bucket_are_left_out_and_named(bench: Bench, bucket: str) -> None:
    queue, records = open_pair_with_records(bench, open_records(bucket))
    long = "/".join(["n" * 200] * 6)
    task = shell(
        dig("$RUNTIME_OUTPUT_DIR") + f"; cd $RUNTIME_OUTPUT_DIR; echo x > kept; mkdir -p {long}; echo x > {long}/file"
    )
    queue.put([task])

    bench.run(queue)

    record = bench.record(task, records=records)
    assert record.state is TaskState.SUCCEEDED, record.message
    assert record.message is not None
    assert f"cannot be read: lies {MOST_PARTS} folders deep, and {MOST_PARTS - 1} is the most" in record.message
    assert "has a name that is too long for a bucket, with its folder more than 1,024 bytes" in record.message
    blobs = records.blobs  # type: ignore[attr-defined]
    prefix = f"outputs/{record.task_id}/{record.token}/"
    assert [key.removeprefix(prefix) for key in blobs.list_keys(prefix)] == ["kept", "near"]
    assert left(bench) == []


def test_artifact_of_a_task_leaves_out_what_lies_too_deep(bench: Bench) -> None:
    (bench.folder / "source").mkdir()
    (bench.folder / "source" / "a.txt").write_text("one\n")
    queue, records = open_pair_with_folder(bench)
    identity = take_snapshot(bench.folder / "source", records)
    task = shell(dig("model"), snapshot=identity, artifacts=ArtifactSpec(capture={"model": "model"}))
    queue.put([task])

    bench.run(queue)

    record = bench.record(task, records=records)
    assert record.state is TaskState.SUCCEEDED, record.message
    assert record.message is not None
    assert f"lies in more than {MOST_PARTS - 1} folders" in record.message
    assert left(bench) == []


def test_names_longer_than_a_path_are_found_and_left_out(tmp_path: Path) -> None:
    here = tmp_path / "outputs"
    here.mkdir()
    (here / "kept").write_text("x")
    opened = os.open(here, os.O_RDONLY)
    for _ in range(30):
        os.mkdir("n" * 200, dir_fd=opened)
        below = os.open("n" * 200, os.O_RDONLY, dir_fd=opened)
        os.close(os.open("file", os.O_WRONLY | os.O_CREAT, dir_fd=below))
        os.close(opened)
        opened = below
    os.close(opened)

    found = find_outputs(here)

    assert "kept" in found.files
    assert 15 < len(found.files) < 30
    assert set(found.others.values()) == {"cannot be read: File name too long"}


SPOILS = """
from runtime import current_attempt
from runtime.worker.attempts import scratch

def spoil():
    def fail(*args, **more):
        raise RecursionError("too deep")

    scratch.remove_tree = scratch.remove_empty = fail
    current_attempt().output_dir
"""
"""An attempt runs in the process that tidies up after it."""


def test_failure_while_an_attempt_tidies_up_keeps_its_end(bench: Bench) -> None:
    (bench.code / "spoils.py").write_text(SPOILS)
    task = sample_task("spoil", entry=FunctionEntry("spoils:spoil", ()), max_failures=1)
    bench.put(task)

    bench.run(slots=1)

    record = bench.record(task)
    assert record.state is TaskState.SUCCEEDED, record.message
    assert "runtime: cannot tidy up after the attempt: RecursionError: too deep" in record.log
