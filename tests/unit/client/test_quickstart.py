"""The quickstart: its count can fail, its fleet leaves nothing behind, and its report is right."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from runtime.cli import quickstart as command
from runtime.client.quickstart import (
    EXPERIMENT,
    Audit,
    QuickstartResult,
    _Fleet,
    _load_example,
    _work_folder,
    audit,
    find_example,
    run_quickstart,
)
from runtime.end_reasons import EndReason
from runtime.errors import InvalidValue, RequestRefused
from runtime.records.memory import MemoryRecords
from runtime.tasks.history import EndedNote, Record
from runtime.tasks.model import Task, TaskState
from runtime.testing import sample_task
from tests.services_support import PATIENCE_S

NOW = datetime(2026, 1, 31, 12, 0, tzinfo=UTC)
FILES = ["a.py", "b.py", "c.py"]

CLEAN = Audit(
    submitted=33,
    recorded=33,
    lost=0,
    recorded_twice=0,
    attempts=34,
    attempts_lost=1,
    workers=3,
    workers_lost=1,
    files=1973,
    files_missing=0,
    files_twice=0,
    redone=("t-97083eae2e14e6632c4fe4bf",),
)


class Quiet:
    def say(self, text: str) -> None:
        pass

    def progress(self, done: int, total: int) -> None:
        pass


class Store(MemoryRecords):
    """Records of map tasks with outputs in a folder; `broken` makes it list one record twice."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.broken = False

    def records(self, experiment: str) -> Iterator[Record]:
        found = list(super().records(experiment))
        yield from [*found, *found[:1]] if self.broken else found

    def add(self, task: Task, *files: str, worker: str = "w-1", state: TaskState = TaskState.SUCCEEDED) -> None:
        output = self.folder / task.id / "rows.jsonl"
        output.parent.mkdir()
        output.write_text("".join(json.dumps({"path": name}) + "\n" for name in files))
        record = Record(
            task_id=task.id,
            generation=1,
            experiment=EXPERIMENT,
            state=state,
            token=f"token-{task.key}",
            reason=EndReason.SUCCEEDED if state is TaskState.SUCCEEDED else EndReason.APP_FAILED,
            ended_at=NOW,
            worker=worker,
            value={"output": str(output)},
        )
        self.commit(record)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def shard(number: int) -> Task:
    return sample_task(str(number), experiment=EXPERIMENT)


def ids(*tasks: Task) -> list[tuple[str, int]]:
    return [(task.id, 1) for task in tasks]


def test_audit_of_a_run_that_lost_a_worker_is_clean(store: Store) -> None:
    first, second = shard(1), shard(2)
    lost = EndedNote(token="dead", reason=EndReason.LOST, ended_at=NOW, worker="w-1")
    store.record_ended(second, lost)
    store.add(first, "a.py", "b.py", worker="w-1")
    store.add(second, "c.py", worker="w-2")

    assert audit(ids(first, second), store, FILES) == Audit(
        submitted=2,
        recorded=2,
        lost=0,
        recorded_twice=0,
        attempts=3,
        attempts_lost=1,
        workers=2,
        workers_lost=1,
        files=3,
        files_missing=0,
        files_twice=0,
        redone=(second.id,),
    )


def test_audit_notices_a_task_without_a_record(store: Store) -> None:
    store.add(shard(1), *FILES)

    found = audit(ids(shard(1), shard(2)), store, FILES)

    assert (found.submitted, found.recorded, found.lost, found.clean) == (2, 1, 1, False)


def test_audit_notices_a_second_record(store: Store) -> None:
    store.add(shard(1), *FILES)
    store.broken = True

    found = audit(ids(shard(1)), store, FILES)

    assert (found.recorded, found.recorded_twice, found.files_twice, found.clean) == (1, 1, 3, False)


def test_audit_notices_missing_and_repeated_files(store: Store) -> None:
    store.add(shard(1), "a.py", "b.py")
    store.add(shard(2), "b.py")

    found = audit(ids(shard(1), shard(2)), store, FILES)

    assert (found.files, found.files_missing, found.files_twice, found.clean) == (2, 1, 1, False)


def test_audit_takes_no_files_from_a_task_that_failed(store: Store) -> None:
    store.add(shard(1), *FILES, state=TaskState.FAILED)

    found = audit(ids(shard(1)), store, FILES)

    assert (found.recorded, found.lost, found.files_missing) == (0, 0, 3)


def test_example_is_found_and_loads_beside_another_of_its_name(tmp_path: Path) -> None:
    shutil.copytree(find_example(), tmp_path / "copy")
    sys.modules["curation"] = other = type(sys)("curation")

    try:
        example = _load_example(tmp_path / "copy")
        assert sys.modules["curation"] is other
    finally:
        del sys.modules["curation"]

    assert example.__file__ == str(tmp_path / "copy/curation.py")
    assert set(example.workflows) == {"shards", "tokens", "duplicates"}


@pytest.mark.parametrize(
    ("options", "kind"), [({"workers": 0}, InvalidValue), ({"path": Path("gone")}, RequestRefused)]
)
def test_senseless_options_are_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], kind: type[Exception]
) -> None:
    monkeypatch.setenv("RUNTIME_DATA_DIR", str(tmp_path / "data"))

    with pytest.raises(kind):
        run_quickstart(Quiet(), **options)

    assert not (tmp_path / "data").exists()


def test_tree_without_source_is_refused_and_no_worker_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNTIME_DATA_DIR", str(tmp_path / "data"))
    (tmp_path / "empty").mkdir()

    with pytest.raises(RequestRefused, match="no source files below"):
        run_quickstart(Quiet(), path=tmp_path / "empty")

    assert processes_in(tmp_path) == []


def processes_in(folder: Path) -> list[int]:
    """List the processes whose working directory is in `folder`."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "cwd").readlink().is_relative_to(folder):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


# folder


def test_folder_is_used_again_and_emptied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNTIME_DATA_DIR", str(tmp_path))
    with _work_folder(keep=False) as first:
        (first / "old").touch()

    with _work_folder(keep=False) as second:
        assert second == first == tmp_path / "quickstart"
        assert list(second.iterdir()) == []


def test_folder_that_is_kept_or_in_use_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNTIME_DATA_DIR", str(tmp_path))

    with _work_folder(keep=False) as running, _work_folder(keep=False) as beside, _work_folder(keep=True) as kept:
        assert running == tmp_path / "quickstart"
        assert beside.name.startswith("quickstart-20")
        assert running != beside
        assert kept.parent == tmp_path


# fleet


class ScriptFleet(_Fleet):
    """A fleet that runs a script instead of the worker."""

    script = "pass"

    def _popen(self, log: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", self.script], stdout=log, stderr=log, start_new_session=True)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[ScriptFleet]:
    with ScriptFleet(tmp_path, tmp_path / "logs", os.environ, tmp_path / "presence") as fleet:
        yield fleet


def eventually(condition: Callable[[], object], within_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "did not come true"
        time.sleep(0.01)


def test_killed_worker_is_not_an_error_and_says_what_it_ran(fleet: ScriptFleet, tmp_path: Path) -> None:
    fleet.script = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from runtime.queues.sqlite.local_workers import Presence\n"
        f"Presence(Path({str(tmp_path / 'presence')!r}), 'w-1').mark(['0123456789abcdef'])\n"
        'print(\'{"worker": "w-1"}\', flush=True); time.sleep(60)\n'
    )
    fleet.start(1)
    eventually(fleet.find_busy)
    busy = fleet.find_busy()
    assert busy

    running = fleet.kill(busy)

    assert (busy.name, running) == ("w-1", ("0123456789abcdef",))
    assert busy.popen.returncode == -signal.SIGKILL
    fleet.check()
    assert fleet.find_busy() is None


# report


@pytest.fixture
def result() -> QuickstartResult:
    largest = [
        {
            "files": [f"encodings/cp{number}.py" for number in range(1250, 1256)],
            "similarity": 0.7,
            "spare_tokens": 47491,
        },
        {"files": ["encodings/koi8_r.py", "encodings/koi8_u.py"], "similarity": 0.923, "spare_tokens": 3162},
    ]
    python = {"files": 1791, "code": 558954, "comment": 58917, "docstring": 114167, "blank": 126201, "tokens": 7031113}
    config = {"files": 63, "code": 129, "comment": 2, "docstring": 0, "blank": 8, "tokens": 762}
    return QuickstartResult(
        folder=Path("/data/quickstart"),
        root=Path("/usr/lib/python3.12"),
        bytes=32_100_000,
        seconds=9.42,
        killed="w-node-0a1b",
        killed_running=("0123456789abcdef",),
        audit=CLEAN,
        value={
            "languages": [{"language": "Python", **python}, {"language": "config", **config}],
            "clusters": 2,
            "spare_tokens": 50653,
            "largest": largest,
        },
    )


def test_report(result: QuickstartResult, golden: Callable[[str, str], None]) -> None:
    golden("quickstart/report.txt", command.render_result(result, ["first", "second", "third"]))


def test_report_says_when_the_kill_hit_nothing(result: QuickstartResult) -> None:
    between = replace(result, audit=replace(CLEAN, attempts=33, attempts_lost=0, workers_lost=0, redone=()))

    text = command.render_result(between, [])

    assert "attempts  33\n" in text
    assert "worker w-node-0a1b was killed between two attempts" in text


def test_unclean_count_fails_the_command(
    result: QuickstartResult, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from runtime.cli.main import main

    broken = replace(result, audit=replace(CLEAN, lost=1, recorded=32))
    monkeypatch.setattr("runtime.client.quickstart.run_quickstart", lambda *_, **__: broken)

    code = main(["quickstart", "-o", "json"])

    printed = capsys.readouterr()
    assert code == 1
    assert json.loads(printed.out)["audit"]["clean"] is False
    assert "33 submitted, 32 recorded, 1 lost" in printed.err
