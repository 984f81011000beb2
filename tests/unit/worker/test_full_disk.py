"""Jobs whose record root is full: they still end on request, and all reports on them are true."""

from __future__ import annotations

import errno
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from runtime.errors import StoreUnavailable
from runtime.jobs.hosts.local import LocalFiles
from runtime.shim import run_loop as serving
from runtime.shim.common import HOST
from runtime.shim.files import _write_beside, write_whole
from runtime.shim.processes import boot_id, started_at
from runtime.shim.record import FolderRecord, RunRecord
from tests.jobs_support import Terminal, open_terminal
from tests.services_support import replace_sleep
from tests.shim_support import (
    CALL,
    IMPORT,
    JOB,
    PATIENCE_S,
    make_asked,
    make_job,
    processes_with,
    signal_all,
    wait_for,
)

FULL = OSError(errno.ENOSPC, "no space left on device")
FILLS = {
    "bytes": "cat /dev/zero > $RUNTIME_OUTPUT_DIR/big",
    "files": "i=0; while true > $RUNTIME_OUTPUT_DIR/$i; do i=$((i + 1)); done",
}
"""Exhausted resource → how a command exhausts it."""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Terminal]:
    with open_terminal(tmp_path, monkeypatch, capsys) as terminal:
        yield terminal


@pytest.fixture
def small(run: Terminal) -> Iterator[Terminal]:
    """A small file system as the record root of this machine."""
    root = run.data / "jobs"
    root.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m,nr_inodes=300", "tmpfs", str(root)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no mounting here: {done.stderr.strip()}")
    try:
        yield run
    finally:
        signal_all(processes_with(str(root)))
        subprocess.run(["umount", "--lazy", str(root)], check=True)


def fill(run: Terminal, what: str, *words: str) -> str:
    """Launch a job that has filled its record root and still runs."""
    go, ready = run.tree.parent / "go", run.tree.parent / "ready"
    wait = f"until [ -e {go} ]; do sleep 0.05; done"
    job = run.launch(f"{wait}; {{ {FILLS[what]}; }} 2>/dev/null; touch {ready}; sleep 600", *words)
    wait_for((run.folder(job) / "runs/0/a0001/beat").exists, "the last that its shim writes for a while")
    go.touch()
    wait_for(ready.exists, "the full disk")
    return job


def test_job_that_filled_its_disk_is_cancelled_and_its_room_is_in_the_evidence(small: Terminal) -> None:
    job = fill(small, "bytes")

    seen = small("explain", job, "-o", "json").json
    done = small("cancel", job)

    assert any(line.startswith("the record root has 0B and ") for line in seen["evidence"]), seen["evidence"]
    assert (done.code, done.err) == (0, "")
    assert processes_with(f"RUNTIME_JOB_ID={job}") == []
    assert small("status", job, "-o", "json").json["state"] == "cancelled"
    assert "was cancelled by somebody" in small("explain", job).out


def test_job_whose_cancel_mark_cannot_be_written_is_ended_and_that_is_said(small: Terminal) -> None:
    job = fill(small, "files")

    done = small("cancel", job)
    left = processes_with(f"RUNTIME_JOB_ID={job}")
    for path in (small.folder(job) / "runs/0/output/a0001").iterdir():
        path.unlink()
    again = small("cancel", job)

    assert done.code == 3
    assert "left over: no cancel mark could be written: the record root " in done.err
    assert left == []
    assert (again.code, again.err) == (0, "")
    assert small("status", job, "-o", "json").json["state"] == "cancelled"


def test_cancel_without_room_for_its_mark_wipes_the_secrets_and_has_room_then(
    small: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "canary-4711")
    job = fill(small, "files", "--secret", "TOKEN=env://TOKEN")
    assert (small.folder(job) / "secrets/TOKEN").exists()

    assert small("cancel", job).code == 0

    assert not (small.folder(job) / "secrets").exists()
    assert small("status", job, "-o", "json").json["state"] == "cancelled"


def test_one_run_whose_cancel_mark_cannot_be_written_is_said_to_go_on(
    run: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = run.launch("sleep 600", "--seeds", "2", "--max-parallel", "2")
    wait_for((run.folder(job) / "runs/1/a0001/processes.json").exists, "the second run")
    refuse_marks(monkeypatch)

    done = run("cancel", job, "--index", "1")
    monkeypatch.undo()
    monkeypatch.setenv("RUNTIME_DATA_DIR", str(run.data))

    assert done.code == 3
    assert "a run whose shim serves others too goes on" in done.err
    assert run("status", job, "-o", "json").json["totals"]["cancelled"] == 0
    assert run("cancel", job, "--yes").code == 0


def test_cancel_of_a_job_that_has_ended_needs_no_mark(run: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    job = run.finish("true")
    refuse_marks(monkeypatch)

    assert run("cancel", job).code == 0


def refuse_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the record root refuse every further file, whatever its name."""

    def refuse(*_: object, **__: object) -> bool:
        raise StoreUnavailable("the record root refuses: no space left on device")

    monkeypatch.setattr(LocalFiles, "create", refuse)
    monkeypatch.setattr(LocalFiles, "link", refuse)


@pytest.mark.parametrize("what", list(FILLS))
def test_gc_makes_room_in_a_record_root_that_is_full(small: Terminal, what: str) -> None:
    job = fill(small, what)
    small("cancel", job)
    if what == "files":
        # Room only for the cancel's marker.
        (small.folder(job) / "runs/0/output/a0001/0").unlink()
        assert small("cancel", job).code == 0
    wait_for(lambda: not processes_with(job), "the end of the shim")

    done = small("gc", "--older-than", "0s", "--yes")

    assert done.code == 0, done.err
    assert not small.folder(job).exists()


def test_gc_that_was_interrupted_on_a_full_disk_is_gone_on_with(small: Terminal) -> None:
    job = fill(small, "bytes")
    small("cancel", job)
    (small.folder(job) / "removing").hardlink_to(small.folder(job) / "intent.json")
    for path in (small.folder(job) / "native").iterdir():
        path.unlink()
    (small.folder(job) / "cancel").unlink()

    assert small("gc", "--older-than", "365d", "--yes").code == 0

    assert not small.folder(job).exists()


# the shim


class Disk:
    """A disk that a test fills while a shim runs in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = False
        write = _write_beside

        def refuse(path: str, text: str, durable: bool = True, mode: int | None = None) -> str:
            if self.full and not path.endswith("beat"):
                raise FULL
            return write(path, text, durable, mode)

        monkeypatch.setattr("runtime.shim.files._write_beside", refuse)
        for module in ("files", "record"):
            monkeypatch.setattr(f"runtime.shim.{module}.create_empty", lambda path, text: refuse(path, text) and None)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def serve(tmp_path: Path, script: str, asked: object, **changes: object) -> int:
    made = make_job(tmp_path, sys.executable, script, **changes)
    options = SimpleNamespace(native="test", member=None, scratch=str(tmp_path))
    return serving.serve(made.order, FolderRecord(str(made.folder)), 0, options, asked, {})


@pytest.mark.parametrize(("how", "code"), [("cancel", 1), ("stop", 10)])
def test_shim_that_waits_to_note_a_failure_on_a_full_disk_ends_when_it_is_told_to(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], how: str, code: int
) -> None:
    asked, sleep = make_asked(why="SIGTERM"), time.sleep

    def tell(seconds: float) -> None:
        """Stop or cancel the shim while it waits for room."""
        if "tries again" in capsys.readouterr().err:
            if how == "stop":
                asked.stop = True
            else:
                (tmp_path / "jobs" / JOB / "cancel").touch()
        sleep(seconds)

    end = RunRecord.end

    def fill_up(*args: object) -> None:
        disk.full = True
        end(*args)

    monkeypatch.setattr(RunRecord, "end", fill_up)
    replace_sleep(monkeypatch, tell)

    assert serve(tmp_path, "exit 3", asked) == code
    assert not (tmp_path / "done").is_dir() or list((tmp_path / "done").iterdir()) == []


def test_shim_that_is_told_to_stop_on_a_full_disk_leaves_nothing_running(tmp_path: Path) -> None:
    made = make_job(tmp_path, sys.executable, "echo up; sleep 600")
    program = (
        IMPORT + "import errno\nfrom runtime.shim import files\nfrom runtime.shim.record import RunRecord\n"
        "def full(*_):\n    raise OSError(errno.ENOSPC, 'no space left on device')\n"
        "end = RunRecord.end\n"
        "def fill(*words):\n    files._write_beside = full\n    return end(*words)\n"
        "RunRecord.end = fill\n" + CALL
    )
    words = [sys.executable, "-c", program, str(made.folder), "--scratch", str(tmp_path)]
    started = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: (made.folder / "runs/0/a0001/rank0.log").exists() and made.log() == "up\n", "the command")

    started.terminate()
    _, said = started.communicate(timeout=PATIENCE_S)

    assert started.returncode == 10
    assert "leaves no word of how index 0 ended" in said
    assert "Traceback" not in said
    assert made.ends() == ["-"]


def test_failed_run_stops_the_others_of_its_array_on_a_full_disk(tmp_path: Path, disk: Disk) -> None:
    made = make_job(tmp_path, sys.executable, "true", on_task_failure="stop")
    run = RunRecord(FolderRecord(str(made.folder)), 0)
    disk.full = True

    run.record.mark(serving.HALTED)

    assert run.record.has(serving.HALTED)


def test_what_a_killed_shim_left_running_is_ended_before_notes_are_written(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = make_job(tmp_path, sys.executable, "true")
    run = RunRecord(FolderRecord(str(made.folder)), 0)
    left = subprocess.Popen(["sleep", "600"], start_new_session=True)
    monkeypatch.setattr("runtime.shim.record.is_alive", lambda _: False)
    first, second = run.claim("one"), run.claim("two")
    folders = [Path(run.attempt_folder(number)) for number in (first, second)]
    (folders[0] / "start.json").write_text(json.dumps({"host": HOST, "boot": "another"}))
    group = {"boot": boot_id(), "pid": left.pid, "start": started_at(left.pid)}
    write_whole(str(folders[1] / "processes.json"), json.dumps([group]))
    disk.full = True

    run.clear()

    assert left.wait(PATIENCE_S) == -signal.SIGKILL
    assert "cannot note how attempt 1 ended" in capsys.readouterr().err
