"""Attempts' output folders, however odd, and how their content is kept."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime.queues.base import Queue
from runtime.records import open_records
from runtime.records.base import RecordStore
from runtime.records.output_upload import find_outputs
from runtime.records.store import BlobRecords
from runtime.tasks.history import Record
from runtime.tasks.model import TaskState
from tests.fakes.gcs import GcsServer
from tests.services_support import wait_until
from tests.unit.worker.worker_bench import Bench, bench, open_pair_with_records

__all__ = ["bench"]

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="workers run their attempts on Linux")

BODIES = """
import os
from pathlib import Path

from runtime import current_attempt


def poison():
    os.path.isdir = os.path.exists = os.path.lexists = lambda path: False
    os.lstat = os.stat = None


def keep(name):
    (current_attempt().output_dir / name).write_text(name)


def keep_and_fail(name):
    keep(name)
    raise ValueError("no")


def make_by_the_variable():
    os.makedirs(os.environ["RUNTIME_OUTPUT_DIR"] + "/empty/as/well")


def remove_and_ask_again():
    current_attempt().output_dir.rmdir()
    (current_attempt().output_dir / "late").write_text("x")


def remove():
    current_attempt().output_dir.rmdir()
"""


class Remote:
    """A queue in a file, with its records in a folder or a bucket."""

    def __init__(self, bench: Bench, url: str) -> None:
        self.bench, self.url = bench, url
        self.queue, self.records = self.open()

    def open(self) -> tuple[Queue, RecordStore]:
        return open_pair_with_records(self.bench, open_records(self.url))

    @property
    def in_bucket(self) -> bool:
        return "://" in self.url

    def record(self, task: Any) -> Record:
        return self.bench.record(task, records=self.records)

    def kept(self, record: Record) -> set[str]:
        """List the names below the place that the record names."""
        assert record.outputs_url is not None
        if not self.in_bucket:
            root = Path(record.outputs_url)
            return {str(path.relative_to(root)) for path in root.rglob("*")} if root.is_dir() else {root.name}
        assert isinstance(self.records, BlobRecords)
        prefix = f"outputs/{record.task_id}/{record.token}/"
        assert record.outputs_url == f"{self.records.url}/{prefix.rstrip('/')}"
        return {key.removeprefix(prefix) for key in self.records.blobs.list_keys(prefix)}


@pytest.fixture(params=["folder", "gs"])
def remote(request: pytest.FixtureRequest, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Iterator[Remote]:
    (bench.code / "output_bodies.py").write_text(BODIES)
    if request.param == "folder":
        (bench.folder / "records").mkdir()
        yield Remote(bench, f"file:{bench.folder / 'records'}")
        return
    server = GcsServer().start()
    server.make_bucket("lab")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
    yield Remote(bench, "gs://lab/p")
    server.stop()


def body(bench: Bench, name: str, *args: Any) -> Any:
    from runtime.tasks.model import FunctionEntry
    from runtime.testing import sample_task

    return sample_task(f"{name} {args}", entry=FunctionEntry(f"output_bodies:{name}", args), max_failures=0)


def shell(bench: Bench, text: str) -> Any:
    return bench.command("sh", "-c", f"cd $RUNTIME_OUTPUT_DIR && {text}")


ODD = """
mkdir -p s/t e; echo a > a; echo b > s/t/b; ln -s a l; ln -s s folder; ln -s nowhere gone; mkfifo pipe
echo x > "$(printf 'caf\\351')"; echo x > "$(printf 'two\\nlines')"
"""


def test_what_can_be_kept_is_and_the_rest_is_named(remote: Remote) -> None:
    task = shell(remote.bench, ODD)
    remote.queue.put([task])

    remote.bench.run(remote.queue)

    record = remote.record(task)
    assert record.state is TaskState.SUCCEEDED, record.message
    if remote.in_bucket:
        assert remote.kept(record) == {"a", "l", "s/t/b"}
        assert record.message is not None
        assert record.message.startswith("left out of its outputs: ")
        for told in (
            "`folder` is a link to a folder",
            "`gone` is a link to nothing",
            "`pipe` is no regular file",
            r"`caf\udce9` has a name that is no UTF-8",
            r"`two\nlines` has a control character in its name",
        ):
            assert told in record.message
        assert remote.bench.events("outputs_left_out")
    else:
        assert {"a", "l", "s/t/b", "folder", "gone", "pipe", "e"} < remote.kept(record)
        assert record.message is None


@pytest.mark.parametrize("text", ["cd .. && rmdir $RUNTIME_OUTPUT_DIR && echo x > $RUNTIME_OUTPUT_DIR"])
def test_file_in_the_place_of_the_folder_is_kept(remote: Remote, text: str) -> None:
    task = shell(remote.bench, text)
    remote.queue.put([task])

    remote.bench.run(remote.queue)

    record = remote.record(task)
    assert remote.kept(record) == {record.token if not remote.in_bucket else f"{record.token}.outputs"}


def test_outputs_are_found_though_an_earlier_task_has_spoilt_the_process(remote: Remote) -> None:
    poison, *others = tasks = [body(remote.bench, "poison"), *(body(remote.bench, "keep", str(n)) for n in range(3))]
    remote.queue.put(tasks)

    remote.bench.run(remote.queue, reuse_process=True, slots=1)

    assert remote.record(poison).state.terminal
    recorded = [remote.record(task) for task in others]
    assert [record.state for record in recorded] == [TaskState.SUCCEEDED] * 3
    assert [remote.kept(record) for record in recorded] == [{"0"}, {"1"}, {"2"}]


def test_nothing_stays_with_the_worker_of_what_lies_in_a_bucket(remote: Remote) -> None:
    good, bad = tasks = [body(remote.bench, "keep", "a"), body(remote.bench, "keep_and_fail", "b")]
    remote.queue.put(tasks)
    remote.queue.close()

    def left() -> list[Path]:
        return list((remote.bench.folder / "tmp").rglob("*.outputs"))

    remote.bench.open_queue = lambda: remote.open()[0]  # type: ignore[method-assign]
    with remote.bench.running():
        assert wait_until(lambda: all(remote.records.find(task.id, 1) for task in tasks))
        assert wait_until(lambda: not left()), left()

    assert remote.kept(remote.record(good)) == {"a"}
    assert remote.record(bad).outputs_url is None


@pytest.mark.parametrize("name", ["make_by_the_variable", "remove"])
def test_folder_that_stays_empty_is_gone(remote: Remote, name: str) -> None:
    task = body(remote.bench, name)
    remote.queue.put([task])

    remote.bench.run(remote.queue)

    record = remote.record(task)
    assert (record.state, record.outputs_url) == (TaskState.SUCCEEDED, None)
    assert not (remote.bench.folder / "records" / "outputs" / task.id).exists()


def test_folder_is_made_as_often_as_it_is_asked_for(remote: Remote) -> None:
    task = body(remote.bench, "remove_and_ask_again")
    remote.queue.put([task])

    remote.bench.run(remote.queue)

    assert remote.kept(remote.record(task)) == {"late"}


def test_what_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read everything, so the test provokes the refusals."""
    (tmp_path / "open").write_text("x")
    (tmp_path / "closed").write_text("x")
    (tmp_path / "locked").mkdir()
    (tmp_path / "locked" / "inside").write_text("x")
    real_open, real_scan = os.open, os.scandir

    def refuse(real: Any, names: set[str]) -> Any:
        def call(path: Any, *args: Any) -> Any:
            if Path(path).name in names:
                raise PermissionError(13, "Permission denied", str(path))
            return real(path, *args)

        return call

    monkeypatch.setattr(os, "open", refuse(real_open, {"closed"}))
    monkeypatch.setattr(os, "scandir", refuse(real_scan, {"locked"}))
    found = find_outputs(tmp_path)

    assert set(found.files) == {"open"}
    assert found.others == dict.fromkeys(("closed", "locked"), "cannot be read: Permission denied")
