"""Artifacts of tasks: saved while an attempt runs and at its end, found by the next attempt, whatever worker runs it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from runtime.end_reasons import EndReason
from runtime.errors import StoreUnavailable
from runtime.queues.base import Queue
from runtime.records import open_records
from runtime.records.artifacts import ArtifactStore
from runtime.records.base import RecordStore
from runtime.records.blobs.folder import FolderBlobs
from runtime.snapshots.snapshot import take_snapshot
from runtime.tasks.artifacts import CHECKPOINT, ArtifactSpec, Version
from runtime.tasks.model import CommandEntry, Task, TaskState
from runtime.testing import sample_task
from runtime.worker.attempts.scratch import remove_leftovers
from tests.fakes.gcs import GcsServer
from tests.services_support import wait_until
from tests.unit.worker.worker_bench import (
    ROOT,
    Bench,
    bench,
    open_pair_with_folder,
    open_pair_with_records,
)

__all__ = ["bench"]

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="workers run their attempts on Linux")

WORKER = """
import sys
from pathlib import Path
from runtime.queues.sqlite.queue import SqliteQueue, open_sqlite
from runtime.records import open_records
from runtime.records.sqlite_file import EmbeddedFile
from runtime.worker.options import WorkerOptions
from runtime.worker.run import run_worker

path, url = Path(sys.argv[1]), sys.argv[2]
queue = open_sqlite(path)[0] if url == "own" else SqliteQueue(EmbeddedFile(path), open_records(url))
run_worker(queue, WorkerOptions(slots=1))
"""


class Place:
    """A queue with one kind of store, opened as often as needed."""

    def __init__(self, bench: Bench, url: str) -> None:
        self.bench, self.url = bench, url
        self.queue, self.records = self.open()

    def open(self) -> tuple[Queue, RecordStore]:
        from runtime.queues.sqlite.queue import open_sqlite

        if self.url == "own":
            return open_sqlite(self.bench.path)
        return open_pair_with_records(self.bench, open_records(self.url))

    def run(self, **options: Any) -> None:
        self.bench.run(self.open()[0], **options)

    def versions(self, task: Task, tag: str) -> list[Version]:
        return self.records.open_artifacts().versions(task.id, tag)

    def content(self, task: Task, tag: str, to: Path) -> dict[str, str]:
        """The files of the newest version."""
        store = self.records.open_artifacts()
        version = self.versions(task, tag)[-1]
        manifest = store.find(version)
        assert manifest is not None
        to.mkdir()
        store.restore(version, manifest, to)
        return {str(path.relative_to(to)): path.read_text() for path in sorted(to.rglob("*")) if path.is_file()}


@pytest.fixture(params=["own file", "folder", "bucket"])
def place(request: pytest.FixtureRequest, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    if request.param == "own file":
        yield Place(bench, "own")
    elif request.param == "folder":
        (bench.folder / "records").mkdir()
        yield Place(bench, f"file:{bench.folder / 'records'}")
    else:
        server = GcsServer().start()
        server.make_bucket("lab")
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        yield Place(bench, "gs://lab/p")
        server.stop()


def captured(records: RecordStore, script: str, key: str, source: Path, **fields: Any) -> Task:
    """A shell command in a tree of its own, with `out/model` and the file `log.csv` captured."""
    fields = {
        "artifacts": ArtifactSpec({"model": "out/model", "log": "log.csv"}, timedelta(seconds=1)),
        "snapshot": take_snapshot(source, records),
        "max_failures": 1,
        **fields,
    }
    return sample_task(key, entry=CommandEntry(("sh", "-c", script)), **fields)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a.txt").write_text("one\n")
    return tmp_path / "source"


TRAIN = """
mkdir -p out/model
step=$(cat out/model/step 2>/dev/null || echo 0)
echo begin $step
while [ $step -lt 3 ]; do
    step=$((step + 1)); echo $step > out/model/next; mv out/model/next out/model/step; echo $step >> log.csv
    if [ $step = 2 ] && [ ! -e {folder}/again ]; then touch {folder}/again {folder}/half; {half}; fi
done
"""
"""A training of three steps that stops half-way the first time."""


def test_end_of_a_task_leaves_each_captured_file_and_folder_as_it_was(
    place: Place, source: Path, tmp_path: Path
) -> None:
    script = "mkdir -p out/model/deep; echo 1 > out/model/deep/w; ln -s deep/w out/model/last; echo a > log.csv; exit 0"
    task = captured(place.records, script, "end", source)
    place.queue.put([task])

    place.run()

    record = place.records.find(task.id, 1)
    assert record is not None
    assert (record.state, record.message) == (TaskState.SUCCEEDED, None)
    assert place.content(task, "model", tmp_path / "model") == {"deep/w": "1\n", "last": "1\n"}
    assert (tmp_path / "model" / "last").readlink() == Path("deep/w")
    assert place.content(task, "log", tmp_path / "log") == {"log.csv": "a\n"}
    assert {version.token for version in place.versions(task, "model")} == {record.token}


@pytest.mark.daily(1)
def test_attempt_that_fails_leaves_its_artifacts_to_the_next_which_goes_on_from_there(
    place: Place, source: Path, tmp_path: Path
) -> None:
    script = TRAIN.format(folder=tmp_path, half="exit 7")
    task = captured(place.records, script, "train", source, max_failures=2)
    place.queue.put([task])

    place.run(idle_timeout=timedelta(seconds=1))

    record = place.records.find(task.id, 1)
    assert record is not None
    assert (record.state, record.log) == (TaskState.SUCCEEDED, "begin 2\n")
    assert place.content(task, "log", tmp_path / "log") == {"log.csv": "1\n2\n3\n"}
    versions = place.versions(task, "model") + place.versions(task, "log")
    assert [(version.tag, version.attempt, version.token) for version in versions] == [
        ("model", 2, record.token),
        ("log", 2, record.token),
    ]


@pytest.mark.daily(1)
def test_worker_that_is_killed_leaves_what_was_saved_to_the_next_worker(
    place: Place, source: Path, tmp_path: Path
) -> None:
    script = TRAIN.format(folder=tmp_path, half="sleep 600")
    task = captured(place.records, script, "train", source)
    place.queue.put([task])
    worker = start_worker(place)
    try:
        assert wait_until((tmp_path / "half").exists)
        assert wait_until(lambda: bool(place.versions(task, "model")) and bool(place.versions(task, "log")))
    finally:
        worker.send_signal(signal.SIGKILL)
        worker.wait()
    saved = place.content(task, "model", tmp_path / "saved")

    place.run(idle_timeout=timedelta(seconds=1))

    record = place.records.find(task.id, 1)
    assert saved == {"step": "2\n"}
    assert record is not None
    assert (record.state, record.log) == (TaskState.SUCCEEDED, "begin 2\n")
    assert place.content(task, "model", tmp_path / "model") == {"step": "3\n"}
    # The guardian of the killed worker may have held its scratch when the next worker looked for leftovers.
    assert wait_until(lambda: bool(remove_leftovers()) or not list((tmp_path / "tmp").glob("*/*")))


def start_worker(place: Place) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "RUNTIME_PREEMPTION_NOTICES": "off",
        "TMPDIR": str(place.bench.folder / "tmp"),
    }
    (place.bench.folder / "tmp").mkdir(exist_ok=True)
    words = [sys.executable, "-c", WORKER, str(place.bench.path), place.url]
    return subprocess.Popen(words, env=environment, stderr=subprocess.DEVNULL, start_new_session=True)


@pytest.mark.daily(1)
def test_task_that_runs_out_of_time_leaves_its_artifacts(place: Place, source: Path, tmp_path: Path) -> None:
    script = "mkdir -p out/model; echo 1 > out/model/w; sleep 600"
    task = captured(place.records, script, "slow", source, timeout=timedelta(seconds=2))
    place.queue.put([task])

    place.run(max_consecutive_failures=0)

    record = place.records.find(task.id, 1)
    assert record is not None
    assert record.reason is EndReason.TIMEOUT
    assert place.content(task, "model", tmp_path / "model") == {"w": "1\n"}


@pytest.mark.daily(1)
def test_success_whose_artifact_is_a_link_is_none(place: Place, source: Path) -> None:
    task = captured(place.records, "mkdir -p out/real; ln -s real out/model", "link", source)
    place.queue.put([task])

    place.run(max_consecutive_failures=0)

    record = place.records.find(task.id, 1)
    assert record is not None
    assert record.reason is EndReason.SETUP_FAILED
    assert record.message is not None
    assert re.fullmatch("its artifact could not be saved: `model`: `/[^`]*/out/model` is a link", record.message)


def test_path_that_is_not_there_is_named_and_links_out_of_the_artifact_are_left_out(
    place: Place, source: Path, tmp_path: Path
) -> None:
    script = (
        "mkdir -p out/model; ln -s /etc/passwd out/model/secret; ln -s ../../a.txt out/model/up; mkfifo out/model/p"
    )
    task = captured(place.records, script, "links", source)
    place.queue.put([task])

    place.run()

    record = place.records.find(task.id, 1)
    assert record is not None
    assert record.message == (
        "left out of artifact `model`: `p` is no regular file; `secret` is a link out of the artifact; "
        "`up` is a link out of the artifact; no artifact `log`: there is no `log.csv`"
    )
    assert place.content(task, "model", tmp_path / "model") == {}


def test_place_that_leads_out_of_the_snapshot_is_refused_and_nothing_there_is_touched(
    place: Place, source: Path, tmp_path: Path
) -> None:
    (tmp_path / "outside" / "model").mkdir(parents=True)
    (tmp_path / "outside" / "model" / "mine").write_text("mine")
    (source / "out").symlink_to(tmp_path / "outside")
    task = captured(place.records, "true", "outside", source)
    place.queue.put([task])

    place.run(max_consecutive_failures=0)

    record = place.records.find(task.id, 1)
    assert record is not None
    assert (record.reason, record.message) == (
        EndReason.CONFIG_INVALID,
        "the place `out/model` of artifact `model` leads out of the snapshot",
    )
    assert (tmp_path / "outside" / "model" / "mine").read_text() == "mine"
    assert place.versions(task, "model") == []


def test_reused_version_is_found_in_the_folder_of_artifacts(place: Place, source: Path, tmp_path: Path) -> None:
    first = captured(place.records, "mkdir -p out/model; echo 1 > out/model/w; echo a > log.csv", "first", source)
    place.queue.put([first])
    place.run()
    model, log = (place.versions(first, tag)[-1].id for tag in ("model", "log"))
    script = 'cat artifacts/base/w artifacts/names "$RUNTIME_ARTIFACT_BASE/w"; echo $RUNTIME_ARTIFACTS | sed s,$PWD,,'
    reused = ArtifactSpec(reuse={"base": model, "names": log})
    second = captured(place.records, script, "second", source, artifacts=reused)
    gone = captured(
        place.records, script, "gone", source, artifacts=ArtifactSpec(reuse={"base": model.replace("n00", "n99")})
    )
    place.queue.put([second, gone])

    place.run(max_consecutive_failures=0)

    done, failed = place.records.find(second.id, 1), place.records.find(gone.id, 1)
    assert done is not None
    assert (done.state, done.log) == (TaskState.SUCCEEDED, "1\na\n1\n/artifacts\n")
    assert failed is not None
    assert failed.reason is EndReason.CONFIG_INVALID
    assert failed.message is not None
    assert failed.message.endswith("which the task reuses as `base`")


@pytest.mark.parametrize(
    ("harm", "problem"), [("gone", "file `w` of it is gone"), ("other", "file `w` of it has other bytes than it names")]
)
@pytest.mark.daily(2)
def test_reused_version_that_is_damaged_fails_the_task_and_is_not_left_to_other_workers(
    place: Place, source: Path, harm: str, problem: str
) -> None:
    first = captured(place.records, "mkdir -p out/model; echo 1 > out/model/w", "first", source)
    place.queue.put([first])
    place.run(idle_timeout=timedelta(seconds=1))
    blobs = place.records.open_artifacts()._blobs
    (content,) = blobs.list_keys(f"artifacts/{first.id}/data/")
    blobs.delete(content) if harm == "gone" else blobs.put(content, b"2\n")
    version = place.versions(first, "model")[-1]
    second = captured(place.records, "true", "second", source, artifacts=ArtifactSpec(reuse={"base": version.id}))
    place.queue.put([second])

    place.run(max_consecutive_failures=0, idle_timeout=timedelta(seconds=1))

    failed = place.records.find(second.id, 1)
    assert failed is not None
    assert (failed.reason, failed.message) == (
        EndReason.CONFIG_INVALID,
        f"`base`, which the task reuses: version `{version.id}` cannot be used: {problem}",
    )


@pytest.mark.daily(1)
def test_checkpoint_folder_follows_the_task_to_another_worker(place: Place, source: Path, tmp_path: Path) -> None:
    script = f"""
    mkdir -p $RUNTIME_CHECKPOINT_DIR; cat $RUNTIME_CHECKPOINT_DIR/step 2>/dev/null && exit 0
    echo 7 > $RUNTIME_CHECKPOINT_DIR/step; touch {tmp_path}/half; exit 3
    """
    task = captured(place.records, script, "resume", source, artifacts=ArtifactSpec(), max_failures=2)
    place.queue.put([task])

    place.run(max_consecutive_failures=1)
    assert place.records.find(task.id, 1) is None
    place.run(idle_timeout=timedelta(seconds=1))

    record = place.records.find(task.id, 1)
    assert record is not None
    assert (record.state, record.log) == (TaskState.SUCCEEDED, "7\n")
    assert place.versions(task, CHECKPOINT) == []


def test_disk_that_is_full_at_the_last_save_is_tried_again_and_then_fails_the_attempt(
    bench: Bench, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, records = open_pair_with_folder(bench)
    task = captured(records, "echo a > log.csv; mkdir -p out/model", "full", source)
    queue.put([task])
    real: Callable[..., None] = FolderBlobs.upload
    failures = iter([True])

    def upload(self: FolderBlobs, key: str, file: Path) -> None:
        if key.startswith("artifacts/") and next(failures, False):
            raise self._explain(OSError(28, "No space left on device"), key)
        real(self, key, file)

    monkeypatch.setattr(FolderBlobs, "upload", upload)

    bench.run(open_pair_with_folder(bench)[0])

    record = bench.record(task, records=records)
    assert record.state is TaskState.SUCCEEDED
    store = records.open_artifacts()
    (version,) = store.versions(task.id, "log")
    assert version.token == record.token


def test_store_that_is_away_when_artifacts_are_brought_costs_the_task_nothing(
    bench: Bench, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, records = open_pair_with_folder(bench)
    task = captured(records, "mkdir -p out/model; echo a > log.csv", "away", source)
    queue.put([task])
    real = ArtifactStore.versions
    failures = iter([True])

    def versions(self: ArtifactStore, owner: str, tag: str | None = None) -> list[Version]:
        if next(failures, False):
            raise StoreUnavailable("the store is away")
        return real(self, owner, tag)

    monkeypatch.setattr(ArtifactStore, "versions", versions)

    bench.run(open_pair_with_folder(bench)[0], idle_timeout=timedelta(seconds=1))

    record = bench.record(task, records=records)
    assert (record.state, record.attempts) == (TaskState.SUCCEEDED, 1)
    assert records.history(task.id, 1).ended == ()
    assert [event["what"] for event in bench.events("trouble")] == [f"bringing the artifacts of {task.id}"]
