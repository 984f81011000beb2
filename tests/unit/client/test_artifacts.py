"""Artifacts of tasks and experiments, as the commands list, get, put and resolve them."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from runtime.client.artifacts import (
    ManyArtifacts,
    find_artifact,
    get_artifact,
    list_artifacts,
    make_artifacts,
    put_artifact,
    resolve_reuse,
    split_capture,
    split_reuse,
)
from runtime.client.tasks.submit import submit
from runtime.end_reasons import EndReason
from runtime.errors import InfrastructureFailure, InvalidTask, InvalidValue, NotPossible, RequestRefused, UnknownName
from runtime.queues.base import Queue
from runtime.queues.sqlite.queue import open_sqlite
from runtime.records.artifacts import ArtifactDamaged, Writer
from runtime.records.base import RecordStore
from runtime.tasks.artifacts import NO_ARTIFACTS, ArtifactSpec, Version
from runtime.tasks.history import Record
from runtime.tasks.model import Task, TaskState
from runtime.testing import FakeClock, sample_task
from tests.fakes.gcs import GcsServer

CAPTURE = ArtifactSpec({"model": "out"})


class Bench:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.queue: Queue
        self.records: RecordStore
        self.queue, self.records = open_sqlite(folder / "tasks.db")

    def put(self, key: str) -> Task:
        task = sample_task(key, experiment="sweep", snapshot="sha256:0", artifacts=CAPTURE)
        self.queue.put([task])
        return task

    def save(self, task: Task, text: str, *, attempt: int = 1, token: str = "token", number: int = 1) -> Version:
        (self.folder / "model").mkdir(exist_ok=True)
        (self.folder / "model" / "w").write_text(text)
        first = Version(1, attempt, number, token, task.id, "model")
        store = self.records.open_artifacts()
        saved = Writer(store, first, self.folder / "model", self.folder / "stage").save(final=True)
        assert saved is not None
        return saved

    def succeed(self, task: Task, token: str = "token") -> None:
        self.records.commit(
            Record(
                task_id=task.id,
                generation=1,
                experiment="sweep",
                state=TaskState.SUCCEEDED,
                token=token,
                reason=EndReason.SUCCEEDED,
                ended_at=FakeClock().now(),
            )
        )

    def get(self, text: str, to: str = "to") -> str:
        path = get_artifact(find_artifact(text, "model", self.records), self.folder / to, self.records)
        return (path / "w").read_text()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.queue.close()


def test_task_that_has_not_succeeded_shows_its_newest_version_and_one_that_has_that_of_its_record(bench: Bench) -> None:
    task = bench.put("1")
    bench.save(task, "first", token="winner")
    bench.save(task, "second", attempt=2, token="late")
    assert [each.state for each in list_artifacts("sweep", bench.records)] == ["saved"]
    assert bench.get(task.id, "before") == "second"

    bench.succeed(task, "winner")

    assert [each.state for each in list_artifacts(task.id, bench.records)] == ["final"]
    assert bench.get(task.id, "after") == "first"


def test_experiment_of_several_tasks_with_a_tag_names_them(bench: Bench) -> None:
    tasks = [bench.put(str(number)) for number in range(3)]
    for task in tasks[:2]:
        bench.save(task, "x")
    with pytest.raises(ManyArtifacts) as refused:
        find_artifact("sweep", "model", bench.records)
    assert {each.task for each in refused.value.found} == {task.id for task in tasks[:2]}
    with pytest.raises(UnknownName):
        find_artifact(tasks[2].id, "model", bench.records)


def test_reuse_of_a_task_is_the_version_of_its_record_and_waits_for_one(bench: Bench) -> None:
    task = bench.put("1")
    saved = bench.save(task, "x")
    with pytest.raises(NotPossible, match="has not succeeded"):
        resolve_reuse("sweep/model", "base", bench.records, "eval")
    bench.succeed(task)
    assert resolve_reuse("sweep/model", "base", bench.records, "eval") == saved.id
    assert resolve_reuse(f"{task.id}/model", "base", bench.records, "eval") == saved.id
    assert resolve_reuse(saved.id, "base", bench.records, "eval") == saved.id


def test_address_is_downloaded_once_at_submit_and_verified(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    server = GcsServer().start()
    try:
        server.make_bucket("lab")
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        from runtime.records.blobs.bucket import BucketBlobs

        BucketBlobs("gs://lab").put("weights/base.bin", b"123")
        right = hashlib.sha256(b"123").hexdigest()
        version = resolve_reuse(f"gs://lab/weights/base.bin#sha256={right}", "base", bench.records, "eval")
        assert resolve_reuse("gs://lab/weights/base.bin", "base", bench.records, "eval") == version
        with pytest.raises(NotPossible, match="other bytes"):
            resolve_reuse(f"gs://lab/weights/base.bin#sha256={'0' * 64}", "base", bench.records, "eval")
    finally:
        server.stop()
    info = find_artifact("eval", "base", bench.records)
    assert (info.version, info.state) == (version, "put")
    assert get_artifact(info, bench.folder / "to", bench.records).read_bytes() == b"123"


def test_folder_to_get_into_is_new_or_empty_and_appears_whole(bench: Bench) -> None:
    task = bench.put("1")
    bench.save(task, "x")
    (bench.folder / "empty").mkdir()
    (bench.folder / "full").mkdir()
    (bench.folder / "full" / "mine").write_text("mine")
    assert bench.get(task.id, "deep/new") == "x"
    assert bench.get(task.id, "empty") == "x"
    with pytest.raises(NotPossible):
        bench.get(task.id, "full")
    for path in (bench.folder / "tasks.db-files" / "artifacts" / task.id / "data").iterdir():
        path.write_text("y")
    with pytest.raises(Exception, match="other bytes"):
        bench.get(task.id, "damaged")
    assert not (bench.folder / "damaged").exists()
    assert [path.name for path in bench.folder.iterdir() if path.name.startswith(".")] == []


def test_words_of_the_command_line_become_sources_and_tags() -> None:
    assert split_capture("out/model:m") == ("out/model", "m")
    assert split_capture("out/model/") == ("out/model/", "model")
    assert split_capture("a:b:c") == ("a:b", "c")
    assert split_reuse("sweep/model:base") == ("sweep/model", "base")
    assert split_reuse("sweep/model") == ("sweep/model", "model")
    assert split_reuse("https://host:8080/x/base.bin") == ("https://host:8080/x/base.bin", "base.bin")
    assert split_reuse("https://host:8080/x:base") == ("https://host:8080/x", "base")
    assert split_reuse("gs://lab/w.bin#sha256=00:w") == ("gs://lab/w.bin#sha256=00", "w")
    for text in (":m", "x:", "x:_checkpoint"):
        with pytest.raises(InvalidValue):
            split_capture(text)


def test_python_takes_paths_by_tag_and_settles_what_is_reused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(bench.folder)
    (bench.folder / "weights").write_text("x")
    made = make_artifacts({"m": str(bench.folder / "out")}, "30s", {"base": "./weights"}, bench.records, "eval")
    assert made.capture == {"m": "out"}
    assert made.every.total_seconds() == 30
    assert made.reuse == {"base": find_artifact("eval", "base", bench.records).version}
    assert make_artifacts(None, None, {}, bench.records, "eval") is NO_ARTIFACTS
    for path in ("..", "../x", "/etc", ".", "out/../../x"):
        with pytest.raises(InvalidValue):
            make_artifacts({"m": path}, None, None, bench.records, "eval")
    assert put_artifact(Path("weights"), "base", "eval", bench.records).version == made.reuse["base"]


def test_submit_in_python_refuses_artifacts_without_code_and_what_is_no_dictionary(bench: Bench) -> None:
    work = {"command": ["true"]}
    with pytest.raises(InvalidTask):
        submit(work, queue=bench.queue, capture={"m": "out"}, snapshot=False)
    for words in ({"capture": "out:m"}, {"reuse": ["sweep/model"]}, {"capture": {"a b": "out"}}):
        with pytest.raises(RequestRefused):
            submit(work, queue=bench.queue, snapshot="sha256:0", **words)  # type: ignore[arg-type]
    done = submit(work, queue=bench.queue, capture={"m": "out"}, snapshot="sha256:0")
    assert done.new == 1


def test_final_version_that_is_damaged_hides_no_other_in_the_list_and_is_not_brought_home(bench: Bench) -> None:
    tasks = [bench.put("1"), bench.put("2")]
    versions = [bench.save(task, task.id) for task in tasks]
    for task in tasks:
        bench.succeed(task)
    bench.records.open_artifacts()._blobs.put(f"artifacts/{versions[0].id}.json", b'{"fi')

    listed = list_artifacts("sweep", bench.records)

    assert [(each.task, each.state, each.files, each.saved_at is None, each.left_out) for each in listed] == [
        (tasks[0].id, "damaged", 0, True, f"version `{versions[0].id}` cannot be used: its manifest is no JSON"),
        (tasks[1].id, "final", 1, False, None),
    ]
    for use in (
        lambda: bench.get(tasks[0].id),
        lambda: resolve_reuse(f"{tasks[0].id}/model", "m", bench.records, "new"),
    ):
        with pytest.raises(ArtifactDamaged):
            use()


def test_bringing_home_tells_of_each_file_and_of_no_link_or_folder(bench: Bench) -> None:
    (bench.folder / "model").mkdir()
    (bench.folder / "model" / "link").symlink_to("w")
    (bench.folder / "model" / "empty").mkdir()
    task = bench.put("1")
    bench.save(task, "four")
    info, told = find_artifact(task.id, "model", bench.records), list[int]()

    get_artifact(info, bench.folder / "to", bench.records, progress=told.append)

    assert (info.files, told) == (1, [4])


def test_put_of_what_is_neither_a_file_nor_a_folder_is_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(bench.folder)
    os.mkfifo("pipe")
    for path, problem in (("pipe", "`pipe` is neither a file nor a folder"), ("/dev/null", "`/dev/null` is neither")):
        with pytest.raises(NotPossible, match=problem):
            put_artifact(Path(path), "m", "new", bench.records)


def test_reuse_of_an_address_that_does_not_answer_says_what_the_machine_said(bench: Bench) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}/x"

    with pytest.raises(InfrastructureFailure) as refused:
        resolve_reuse(address, "m", bench.records, "new")

    assert refused.value.message == f"`{address}` cannot be read: Connection refused"


def test_artifacts_of_python_take_paths_and_refuse_other_kinds(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(bench.folder)
    (bench.folder / "base").write_text("x")

    made = make_artifacts({"m": Path("out")}, None, {"b": Path("base")}, bench.records, "new")

    assert made.capture == {"m": "out"}
    assert made.reuse == {"b": list_artifacts("new", bench.records)[0].version}
    for given in ({"m": None}, {"m": 3}):
        with pytest.raises(InvalidValue, match="no valid capture"):
            make_artifacts(given, None, None, bench.records, "new")
        with pytest.raises(InvalidValue, match="no valid reuse"):
            make_artifacts(None, None, given, bench.records, "new")


@pytest.mark.parametrize("harm", ["gone", "cut off"])
def test_put_of_the_same_bytes_mends_what_was_damaged_since(bench: Bench, harm: str) -> None:
    (bench.folder / "base").write_text("weights")
    info = put_artifact(bench.folder / "base", "base", "new", bench.records)
    blobs = bench.records.open_artifacts()._blobs
    (content,) = blobs.list_keys(f"artifacts/{info.version.partition('/')[0]}/data/")
    blobs.delete(content) if harm == "gone" else blobs.put(content, b"wei")
    with pytest.raises(ArtifactDamaged):
        get_artifact(info, bench.folder / "before", bench.records)

    again = put_artifact(bench.folder / "base", "base", "new", bench.records)

    assert again.version == info.version
    assert get_artifact(again, bench.folder / "after", bench.records).read_text() == "weights"
