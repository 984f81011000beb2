"""Checkpoint folders of the nodes of one run, in a bucket: each begins with node 0's files and its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.shim.bucket import Bucket
from runtime.shim.bucket_record import BucketRecord, Checkpoints
from runtime.shim.record import RunRecord
from tests.fakes.gcs import GcsServer

URL = "gs://lab/runtime"


class Machine:
    """The checkpoint folder of a node in one attempt, on a machine that has never seen the job."""

    def __init__(self, root: Path, node: int, attempt: int) -> None:
        own = root / f"{node}-{attempt}"
        self.record = BucketRecord(Bucket(URL), str(own / "jobs" / "j-1"))
        run = RunRecord(self.record, 0)
        run.folder, run.node = str(own), node
        if not self.record.begun(run.attempt_name(attempt)):
            self.record.begin(run.attempt_name(attempt), "{}")
        self.checkpoints = Checkpoints(self.record, run, attempt)
        self.folder = own / "checkpoint"
        self.checkpoints.restore()

    def write(self, **files: str) -> Machine:
        for name, text in files.items():
            (self.folder / name).write_text(text)
        self.checkpoints.send()
        return self

    def files(self) -> dict[str, str]:
        return {path.name: path.read_text() for path in sorted(self.folder.iterdir())}


@pytest.fixture(autouse=True)
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[GcsServer]:
    running = GcsServer().start()
    running.make_bucket("lab")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", running.url)
    yield running
    running.stop()


def test_node_begins_with_the_files_of_node_0_and_its_own_and_with_no_other_s(tmp_path: Path) -> None:
    Machine(tmp_path, 0, 1).write(meta="1", shard0="a", latest="0")
    Machine(tmp_path, 1, 1).write(shard1="b", latest="1")
    Machine(tmp_path, 2, 1).write(shard2="c")

    found = [Machine(tmp_path, node, 2).files() for node in range(3)]

    assert found == [
        {"latest": "0", "meta": "1", "shard0": "a"},
        {"latest": "1", "meta": "1", "shard0": "a", "shard1": "b"},
        {"latest": "0", "meta": "1", "shard0": "a", "shard2": "c"},
    ]


def test_files_that_came_from_node_0_are_not_sent_again_and_stay_as_new_as_node_0_has_them(tmp_path: Path) -> None:
    Machine(tmp_path, 0, 1).write(meta="1")
    Machine(tmp_path, 1, 1)
    Machine(tmp_path, 0, 2).write(meta="2")
    Machine(tmp_path, 1, 2).write(shard1="b")
    Machine(tmp_path, 0, 3).write(meta="3")

    later = Machine(tmp_path, 1, 4)

    assert later.files() == {"meta": "3", "shard1": "b"}
    assert later.record.names("runs/0/checkpoint/node1/data") == [
        "3e23e8160039594a33894f6564e1b1348bbd7a0088d42c4acb73eeaed59c009d"
    ]
    sent = later.record.names("runs/0/checkpoint/node1")
    later.checkpoints.send()
    assert later.record.names("runs/0/checkpoint/node1") == sent == ["a0002.000000.json", "data"]


def test_node_that_wrote_nothing_has_no_list_of_its_own(tmp_path: Path) -> None:
    Machine(tmp_path, 0, 1).write(meta="1")

    second = Machine(tmp_path, 1, 2).write()

    assert (second.files(), second.record.names("runs/0/checkpoint/node1")) == ({"meta": "1"}, [])


def test_list_of_a_node_that_is_not_whole_gives_way_to_the_one_before_with_nothing_of_it_left(
    tmp_path: Path, server: GcsServer
) -> None:
    Machine(tmp_path, 0, 1).write(meta="1")
    machine = Machine(tmp_path, 1, 1).write(shard="old")
    machine.write(shard="new", another="new too")
    lost = max(server.buckets["lab"], key=lambda key: ("node1/data" in key, server.buckets["lab"][key].data == b"new"))
    machine.record.bucket.delete(lost.removeprefix("runtime/"))

    assert Machine(tmp_path, 1, 2).files() == {"meta": "1", "shard": "old"}


def test_shard_in_a_folder_that_node_0_has_removed_comes_back_in_it(tmp_path: Path) -> None:
    first = Machine(tmp_path, 0, 1)
    (first.folder / "step1").mkdir()
    first.write(**{"step1/meta": "1"})
    Machine(tmp_path, 1, 2).write(**{"step1/shard1": "b"})
    second = Machine(tmp_path, 0, 2)
    (second.folder / "step1/meta").unlink()
    (second.folder / "step1").rmdir()
    second.write(meta="2")

    later = Machine(tmp_path, 1, 3)

    found = {path.relative_to(later.folder).as_posix() for path in later.folder.rglob("*")}
    assert found == {"meta", "step1", "step1/shard1"}
