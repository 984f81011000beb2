"""Parts of the shim in this process: claims, what it may kill, and attempts that cannot begin."""

from __future__ import annotations

import errno
import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runtime.shim import files, processes, run_loop
from runtime.shim import record as record_module
from runtime.shim.common import HOST, AlreadyClaimed, OrderRefused
from runtime.shim.main import follow
from runtime.shim.processes import ChildProcess, boot_id, is_alive, is_group_alive, started_at
from runtime.shim.record import FolderRecord, RunRecord
from tests.shim_support import JOB, ShimJob, is_running, make_asked, make_job, wait_for
from tests.unit.shim.test_folding import fill

# records


class Behind(FolderRecord):
    """A record whose listings lag behind, as those of a shared file system may."""

    def names(self, name: str) -> list[str]:
        return []


def test_attempt_whose_number_another_shim_has_just_taken_gets_the_next_one(tmp_path: Path) -> None:
    made = make_job(tmp_path, sys.executable, "true")
    first, second = RunRecord(FolderRecord(str(made.folder)), 0), RunRecord(Behind(str(made.folder)), 0)

    assert (first.claim("one"), second.claim("two"), second.claim("three")) == (1, 2, 3)

    assert [first.started(number)["native"] for number in (1, 2, 3)] == ["one", "two", "three"]


def test_note_of_a_start_that_is_torn_or_empty_is_none_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNTIME_POD_FAILURES", "1")
    made = make_job(tmp_path, sys.executable, "true")
    run = RunRecord(FolderRecord(str(made.folder)), 0)
    for number, text in ((1, '{"nat'), (2, "")):
        note = made.folder / f"runs/0/a{number:04d}/start.json"
        note.parent.mkdir(parents=True)
        note.write_text(text)

    run.clear()

    assert [run.started(number) for number in (1, 2)] == [None, None]
    assert run.counted({}) == [None, None]
    assert run.claim("later") == 3


def test_result_that_stands_is_returned_and_announced_whatever_comes_later(tmp_path: Path) -> None:
    made = make_job(tmp_path, sys.executable, "true")
    first, second = RunRecord(FolderRecord(str(made.folder)), 0), RunRecord(FolderRecord(str(made.folder)), 0)
    stands = first.commit("app_failed", 3, 1, {"message": "no"})
    (done,) = (made.root / "done").iterdir()
    done.unlink()

    assert second.commit("succeeded", 0, 2, {}) == stands == second.result()

    assert made.results() == {0: ("app_failed", 3, 1)}


@pytest.mark.parametrize("anew", [None, ("stopped", 143, 1)], ids=["removed", "started-again"])
def test_end_of_a_job_that_was_begun_anew_meanwhile_is_not_announced(
    tmp_path: Path, anew: tuple[str, int, int] | None
) -> None:
    made = make_job(tmp_path, sys.executable, "true")
    run = RunRecord(FolderRecord(str(made.folder)), 0)
    result = run.commit("app_failed", 3, 1, {})
    (made.folder / "runs/0/result").unlink()
    next((made.root / "done").iterdir()).unlink()
    if anew:
        RunRecord(FolderRecord(str(made.folder)), 0).commit(*anew, {})

    run.announce(result)

    assert len(list((made.root / "done").iterdir())) == len(made.results())
    assert made.results() == ({0: anew} if anew else {})


def test_file_that_was_made_though_the_answer_was_lost_counts_as_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def lose_the_answer(source: str, target: str) -> None:
        link(source, target)
        link(source, target)  # as a client of NFS that repeats its request

    monkeypatch.setattr(os, "link", lose_the_answer)

    files.create_whole(str(tmp_path / "result"), "mine")

    with pytest.raises(AlreadyClaimed):
        files.create_whole(str(tmp_path / "result"), "another's")
    assert [path.name for path in tmp_path.iterdir()] == ["result"]
    assert (tmp_path / "result").read_text() == "mine"


def test_record_whose_folder_is_gone_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.shim.files.WRITE_PATIENCE_S", 0.0)
    record = FolderRecord(str(tmp_path / "jobs" / "gone"))

    for write in (record.write, record.create):
        with pytest.raises(OSError, match="folder of the job") as refused:
            write("runs/0/result", "{}")
        assert refused.value.errno == errno.ESTALE

    assert list(tmp_path.iterdir()) == []


def test_record_whose_folder_is_away_is_not_taken_for_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.shim.files.WRITE_PATIENCE_S", 0.0)
    folder = tmp_path / "jobs" / "j"
    folder.mkdir(parents=True)
    record = FolderRecord(str(folder))
    run = RunRecord(record, 0)
    result = {"reason": "succeeded", "code": 0, "attempt": 1}
    record.create("runs/0/result", json.dumps(result))
    folder.rename(tmp_path / "aside")

    for look in (run.result, run.attempts, lambda: record.read("order.json"), lambda: run.claim("native")):
        with pytest.raises(OSError, match="folder of the job") as refused:
            look()
        assert refused.value.errno == errno.ESTALE

    (tmp_path / "aside").rename(folder)
    assert (run.result(), run.attempts(), record.read("order.json")) == (result, [], None)


def test_outcome_waits_for_a_record_root_that_goes_away_beneath_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, aside, paused = tmp_path / "records" / "jobs" / "j", tmp_path / "aside", []
    folder.mkdir(parents=True)
    opens = os.open

    def go_away(path: str, *args: Any, **named: Any) -> int:
        if not paused and path.endswith("done/j.0.succeeded.0.1"):
            (tmp_path / "records").rename(aside)
        return opens(path, *args, **named)

    def come_back(seconds: float) -> None:
        paused.append(seconds)
        if aside.exists():
            aside.rename(tmp_path / "records")

    monkeypatch.setattr("runtime.shim.files.os.open", go_away)
    monkeypatch.setattr("runtime.shim.files.time", SimpleNamespace(time=lambda: 10.0 * len(paused), sleep=come_back))
    FolderRecord(str(folder)).announce("j.0.succeeded.0.1")

    assert [each.name for each in (tmp_path / "records" / "done").iterdir()] == ["j.0.succeeded.0.1"]
    assert paused


@pytest.mark.parametrize("refused", ["mkdir", "write"])
def test_attempt_waits_for_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str) -> None:
    monkeypatch.setattr("runtime.shim.files.WRITE_AGAIN_S", 0.0)
    folder = tmp_path / "jobs" / "j"
    folder.mkdir(parents=True)
    run, failures = RunRecord(FolderRecord(str(folder)), 0), [1, 1]
    place, name = (os, "mkdir") if refused == "mkdir" else (record_module, "write_whole")
    real = getattr(place, name)

    def fails_twice(*args: Any, **named: Any) -> Any:
        # The folders above an attempt's are there by then.
        if failures and ("a0001" in str(args[0])):
            failures.pop()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args, **named)

    monkeypatch.setattr(place, name, fails_twice)

    assert run.claim("native") == 1

    note = run.started(1)
    assert (failures, note and note["native"], run.attempts()) == ([], "native", [(1, None)])


def test_shim_that_cannot_claim_its_job_is_refused_and_runs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = make_job(tmp_path, sys.executable, "true")
    (made.folder / "owners").write_text("a file where a folder should be")
    options = SimpleNamespace(clear=False, prepare=False, rank_of=None, part=None, native="n", index=0)

    assert follow(FolderRecord(str(made.folder)), options, make_asked()) == 2

    assert "shim: cannot begin: " in capsys.readouterr().err
    assert not (made.folder / "runs").exists()


# processes


def test_group_of_processes_is_alive_while_any_of_it_runs(tmp_path: Path) -> None:
    said = tmp_path / "pid"
    leader = ChildProcess(["sh", "-c", f"sleep 600 & echo $! > {said}"], start_new_session=True)
    noted = {"boot": boot_id(), "pid": leader.pid, "start": started_at(leader.pid)}
    leader.wait()
    left = int(said.read_text())
    try:
        assert is_group_alive(noted)
        assert is_group_alive(noted, owner=os.geteuid())
        assert not is_group_alive(noted, owner=os.geteuid() + 1)
        assert not is_group_alive({**noted, "boot": "an earlier start"})
    finally:
        os.kill(left, signal.SIGKILL)


def test_process_is_alive_only_if_it_is_the_one_that_was_noted() -> None:
    child = ChildProcess(["sleep", "600"], start_new_session=True)
    noted = {"boot": boot_id(), "pid": child.pid, "start": started_at(child.pid)}
    try:
        assert is_alive(noted)
        assert is_alive({**noted, "start": None})
        assert not is_alive({**noted, "start": "1"})
        assert not is_group_alive({**noted, "start": "1"}), "its number belongs to another process now"
        assert not is_alive({**noted, "boot": "an earlier start"})
    finally:
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        dead = is_alive(noted), is_group_alive(noted)
        child.wait()
    assert dead == (False, False)
    assert not is_alive(noted)


def test_orphans_that_cannot_be_killed_are_given_up_with_a_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(processes, "LEFT_S", 0.0)
    monkeypatch.setattr(processes, "reap_orphans", lambda: True)
    monkeypatch.setattr(processes, "find_orphans", lambda: [2**22 + 1])

    processes.end_orphans()

    assert "cannot end what a command left running: 4194305" in capsys.readouterr().err


def test_orphans_are_killed_until_two_looks_in_a_row_find_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks = iter([[11], [], [12, 13], [14], [], []])
    killed: list[int] = []
    monkeypatch.setattr(processes, "reap_orphans", lambda: True)
    monkeypatch.setattr(processes, "find_orphans", lambda: next(looks))
    monkeypatch.setattr(processes, "kill", lambda pid, number: killed.append(pid))

    processes.end_orphans()

    assert (killed, list(looks), capsys.readouterr().err) == ([11, 12, 13, 14], [], "")


SHIM_OF_ANOTHER_JOB = ["sh", "-c", "sleep 600; true", "shim.py", f"j-{'0' * 24}"]


@pytest.fixture
def started() -> Iterator[Callable[..., int]]:
    """Start a process in a session of its own; all are killed with their descendants at the end."""
    children: list[subprocess.Popen[bytes]] = []

    def start(*words: str, **variables: str) -> int:
        environment = {"PATH": os.environ["PATH"], **variables}
        children.append(subprocess.Popen(words, env=environment, start_new_session=True))
        return children[-1].pid

    yield start
    for child in children:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def test_orphans_are_processes_in_other_sessions_that_are_no_shims_and_that_nobody_waits_for(
    started: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    left, shim, awaited = started("sleep", "600"), started(*SHIM_OF_ANOTHER_JOB), started("sleep", "600")
    own = subprocess.Popen(["sleep", "600"])
    monkeypatch.setattr(processes, "KNOWN", {awaited})
    wait_for(lambda: processes.is_shim(shim), "the words of its command")
    try:
        found = processes.find_orphans()
    finally:
        own.kill()
        own.wait()

    assert {left, shim, awaited, own.pid}.intersection(found) == {left}


def test_processes_of_an_attempt_are_those_with_all_of_its_variables_and_their_descendants(
    started: Callable[..., int],
) -> None:
    of = {"RUNTIME_JOB_ID": JOB, "RUNTIME_ARRAY_INDEX": "3", "RUNTIME_ATTEMPT": "1"}
    left = started("sh", "-c", "env -i sleep 600; true", **of)
    second = started("sleep", "600", **{**of, "RUNTIME_ATTEMPT": "2"})
    others = [started("sleep", "600", **{**of, name: "7"}) for name in of]
    shim = started(*SHIM_OF_ANOTHER_JOB, **of)

    def children(pid: int) -> list[int]:
        return [each for each, (parent, _, _) in processes.list_processes().items() if parent == pid]

    wait_for(lambda: children(left) and children(shim) and processes.is_shim(shim), "all processes")

    found = processes.find_marked(JOB, 3, {"1", "2"})

    assert set(found) == {left, *children(left), second}
    assert set(found).isdisjoint(others)
    assert processes.find_marked(JOB, 4, {"1", "2"}) == []


def test_only_attempts_of_this_machine_whose_shim_is_dead_are_cleared(
    tmp_path: Path, started: Callable[..., int]
) -> None:
    made = make_job(tmp_path, sys.executable, "true")
    own = {"host": HOST, "boot": boot_id(), "pid": os.getpid(), "start": started_at(os.getpid())}
    noted = {
        1: own,  # its shim lives
        2: {**own, "host": "another", "boot": "another"},
        3: {**own, "boot": "before a restart"},
        4: {**own, "start": "1"},  # its shim is dead, and another process has its number
    }
    left = {}
    for number, start in noted.items():
        left[number] = started("sleep", "600")
        folder, group = made.folder / f"runs/0/a{number:04d}", left[number]
        folder.mkdir(parents=True)
        (folder / "start.json").write_text(json.dumps(start))
        groups = [{"boot": start["boot"], "pid": group, "start": started_at(group)}]
        (folder / "processes.json").write_text(json.dumps(groups))

    RunRecord(FolderRecord(str(made.folder)), 0).clear()

    wait_for(lambda: not is_running(left[4]), "the end of the last attempt's group")
    assert [is_running(left[number]) for number in (1, 2, 3)] == [True] * 3
    assert made.ends() == ["-", "-", "node_failed", "-"]


# attempts that cannot begin


def test_number_of_a_rank_comes_from_the_starter_that_says_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_PROCID", "PMI_RANK", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(OrderRefused):
        run_loop.rank_number()

    found = []
    for name, value in (("OMPI_COMM_WORLD_RANK", "7"), ("PMI_RANK", "0"), ("SLURM_PROCID", "12")):
        monkeypatch.setenv(name, value)
        found.append(run_loop.rank_number())

    assert found == [7, 0, 12]


# the next start


@pytest.mark.parametrize(
    ("requeue", "pause"),
    [(["/no/such/command"], 1.0), (["sh", "-c", "exit 1"], 1.0), (["sh", "-c", "kill -9 $$"], run_loop.KILLED_S)],
    ids=["not there", "refused", "killed"],
)
def test_job_that_cannot_be_requeued_goes_on_here_unless_it_is_stopped_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, requeue: list[str], pause: float
) -> None:
    made = make_job(tmp_path, sys.executable, "true", retries="requeue", requeue=requeue)
    run, options = RunRecord(FolderRecord(str(made.folder)), 0), SimpleNamespace(native="7", member=None)
    waited: list[float] = []

    def wait(seconds: float, asked: Any, *_: object) -> bool:
        waited.append(seconds)
        return asked.stop_at == len(waited)

    monkeypatch.setattr(run_loop, "stops_within", wait)
    start = functools.partial(run_loop.next_start, made.order, options, 5.0)

    assert (start(make_asked(stop_at=None), run), waited) == (None, [5.0, pause])
    assert start(make_asked(stop_at=4), run) == 10


# attempts


def variables(made: ShimJob, rank: int = 0) -> dict[str, str]:
    """Return what a command that runs `env` printed."""
    return dict(line.split("=", 1) for line in made.log(rank=rank).splitlines() if "=" in line)


# what folding leaves alone


def everything(job: Path) -> dict[Path, bytes | None]:
    """Return the content of each file below, and None for a folder."""
    return {path: path.read_bytes() if path.is_file() else None for path in job.rglob("*")}


def test_files_of_the_command_stay_whatever_their_names_are(tmp_path: Path) -> None:
    job = fill(tmp_path, runs=1)
    for place in ("checkpoint", "checkpoint/deep", "output/a0001", "output/a0002"):
        (job / "runs/0" / place).mkdir(exist_ok=True)
        for name in (*files.OF_NO_USE, "lock.1", "result", "rank0.log", "snapshot.tar", "x.ended"):
            (job / "runs/0" / place / name).write_text(name)
        (job / "runs/0" / place / "empty").mkdir()
    own = {path: content for path, content in everything(job).items() if {"checkpoint", "output"} & set(path.parts)}

    files.fold_job(str(job), {"runs": {"0": {}}})
    folded = everything(job)
    files.unfold(str(job))

    assert (job / "runs/0/result").exists()
    for after in (folded, everything(job)):
        assert {path: after.get(path, "gone") for path in own} == own
