"""Record roots that were used and have disappeared: no job is launched twice, and reports state only known facts."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runtime.client.jobs.handle import find_job
from runtime.client.jobs.targets import KnownRoot
from runtime.jobs.hosts.agent import MARKER
from runtime.testing.launcher_bench import read_log
from runtime.worker.attempts import processes
from tests.jobs_support import Terminal, open_terminal
from tests.shim_support import processes_with, wait_for

SLEEP = "echo up; sleep 600"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Terminal]:
    with open_terminal(tmp_path, monkeypatch, capsys) as terminal:
        yield terminal


def root_of(run: Terminal) -> Path:
    return run.data / "jobs"


def move_away(root: Path) -> None:
    root.rename(root.with_name("away"))


def unmount(root: Path) -> None:
    """Leave only the mount point, as when the file system is not mounted."""
    move_away(root)
    root.mkdir()


def mount_another(root: Path) -> None:
    unmount(root)
    (root / MARKER).write_text("r-another\n")


def bring_back(root: Path) -> None:
    shutil.rmtree(root, ignore_errors=True)
    root.with_name("away").rename(root)


GONE = [
    (move_away, "is not there"),
    (unmount, "has lost its file `record-root`, or its file system is not mounted"),
    (mount_another, "is another one than it was"),
]
ways_to_lose_it = pytest.mark.parametrize(("lose", "said"), GONE, ids=["moved", "unmounted", "another"])


def launch(run: Terminal, *words: str) -> tuple[int, str]:
    typed = run("launch", *(words or ("--on", "local")), "--", "sh", "-c", SLEEP)
    return typed.code, typed.out.strip() or typed.err


def await_command(job: str) -> None:
    wait_for(lambda: processes_with(f"RUNTIME_JOB_ID={job}"), "the command")


def shims(run: Terminal) -> int:
    table, with_data = processes.read_table(), processes_with(str(run.data))
    found = {pid for pid in with_data if b"--native" in processes.read_file(f"/proc/{pid}/cmdline")}
    # A child that a shim has just forked still looks like the shim.
    return sum(pid in table and table[pid].ppid not in found for pid in found)


@ways_to_lose_it
def test_launch_into_a_root_that_was_used_and_is_gone_starts_nothing(
    run: Terminal, lose: Callable[[Path], None], said: str
) -> None:
    job = run.launch(SLEEP)
    await_command(job)
    root = root_of(run)
    identity = (root / MARKER).read_text().split()[0]
    lose(root)
    left = sorted(root.rglob("*")) if root.exists() else None

    code, text = launch(run)

    assert (code, shims(run)) == (3, 1)
    assert text.startswith(f"error: the record root `{root}` of target `local` {said}\n")
    assert identity in text
    assert "  nothing was made or started, and nothing is known of its jobs\n" in text
    assert text.endswith("if it was removed on purpose: runtime targets check local --new-records\n")
    assert (sorted(root.rglob("*")) if root.exists() else None) == left
    bring_back(root)
    assert launch(run) == (0, job)
    assert shims(run) == 1


@ways_to_lose_it
def test_every_command_says_that_the_target_does_not_answer(
    run: Terminal, lose: Callable[[Path], None], said: str
) -> None:
    job = run.launch(SLEEP)
    await_command(job)
    lose(root_of(run))

    text, read = run("status", job[:8]), run("status", "last", "-o", "json")
    overview, listed = run("status"), run("status", "--on", "local", "-o", "json")
    others = [run(*words).code for words in (["logs", job], ["explain", job], ["cancel", job], ["retry", job])]
    others += [run(*words).code for words in (["fetch", job], ["gc", "--yes"], ["interrupt", job, "--as", "oom"])]

    assert (text.code, text.out) == (3, f"{job} · local (local) · unknown\n")
    assert text.err.startswith(
        f"error: nobody knows how job `{job}` stands: target `local` does not answer: the record"
    )
    assert said in text.err
    assert (read.code, read.json["state"], read.json["job"], read.json["target"]) == (3, "unknown", job, "local")
    assert (overview.code, listed.code, listed.json["jobs"]) == (0, 3, [])
    assert overview.err.startswith("target `local` does not answer: the record root ")
    assert others == [3] * 7
    bring_back(root_of(run))
    assert run("status", job, "-o", "json").json["state"] == "running"


@ways_to_lose_it
def test_root_that_was_removed_on_purpose_is_begun_again_by_a_word(
    run: Terminal, lose: Callable[[Path], None], said: str
) -> None:
    run.finish("echo one")
    lose(root_of(run))

    refused = run("targets", "check", "local")
    accepted = run("targets", "check", "local", "--new-records")

    assert refused.code == 1
    assert said in refused.out
    assert (accepted.code, "fail" in accepted.out) == (0, False)
    assert (root_of(run) / MARKER).exists()
    assert run("targets", "check", "local").code == 0
    run.finish("echo one")


def test_job_that_is_remembered_and_gone_from_a_root_that_answers_is_unknown_as_a_name(run: Terminal) -> None:
    job = run.finish("true")
    shutil.rmtree(run.folder(job))

    assert run("status", job).code == 2


def test_root_whose_name_is_no_utf8_is_known_as_any_other(tmp_path: Path) -> None:
    address = os.fsdecode(b"/scratch/caf\xe9")
    KnownRoot("hpc", address, tmp_path).saw("r-1")

    assert list(KnownRoot("hpc", address, tmp_path).known) == ["r-1"]
    assert list(KnownRoot("hpc", "/scratch/caf", tmp_path).known) == []


def test_root_of_another_user_is_known_from_its_first_use_on(run: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    records = run.tree.parent / "scratch" / "records"
    (run.tree / "runtime.toml").write_text(f'[targets.lab]\nkind = "local"\nrecords = "{records}"\n')
    job = run("launch", "--on", "lab", "--", "sh", "-c", SLEEP).out.strip()
    monkeypatch.setenv("RUNTIME_DATA_DIR", str(run.tree.parent / "theirs"))

    seen = run("status", job, "-o", "json")
    move_away(records)
    lost = run("launch", "--on", "lab", "--", "true")

    assert (seen.code, seen.json["state"]) == (0, "running")
    assert lost.code == 3
    assert not records.exists()


def test_job_whose_target_is_gone_is_not_launched_on_the_next_one(run: Terminal) -> None:
    first, second = run.tree.parent / "first", run.tree.parent / "second"
    (run.tree / "runtime.toml").write_text(
        "".join(f'[targets.{each.name}]\nkind = "local"\nrecords = "{each}"\n' for each in (first, second))
    )
    code, job = launch(run, "--on", "first,second")
    await_command(job)
    move_away(first)

    again, said = launch(run, "--on", "first,second")
    running = shims(run)
    other = run("launch", "--on", "first,second", "--", "true")

    assert (code, again, running) == (0, 3, 1)
    assert f"the record root `{first}` of target `first` is not there" in said
    assert (other.code, run("status", other.out.strip(), "-o", "json").json["target"]) == (0, "second")


def test_handle_whose_root_goes_raises_and_makes_nothing(run: Terminal) -> None:
    job = run.launch(SLEEP)
    await_command(job)
    with find_job(job) as handle:
        assert handle.state().value == "running"
        move_away(root_of(run))
        for use in (handle.status, handle.cancel, handle.attempts, lambda: list(handle.logs())):
            with pytest.raises(Exception, match="is not there"):
                use()

    assert not root_of(run).exists()


def test_first_launches_at_once_agree_on_the_root(run: Terminal) -> None:
    words = [sys.executable, "-m", "runtime", "launch", "--on", "local", "--"]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    started = [
        subprocess.Popen([*words, "sh", "-c", f"echo {number}"], stderr=subprocess.PIPE, text=True, env=environ)
        for number in range(4)
    ]
    said = [each.communicate(timeout=240)[1] for each in started]

    assert [each.returncode for each in started] == [0] * 4, said
    assert run("launch", "--on", "local", "--", "true").code == 0
    [address] = (run.data / "roots").iterdir()
    assert [path.name for path in address.iterdir()] == [(root_of(run) / MARKER).read_text().split()[0]]
    assert [path.read_text() for path in address.iterdir()] == [f"{root_of(run)}\n"]


def test_data_folder_that_cannot_be_written_stops_no_launch(run: Terminal) -> None:
    records = run.tree.parent / "records"
    (run.tree / "runtime.toml").write_text(f'[targets.lab]\nkind = "local"\nrecords = "{records}"\n')
    run.data.mkdir(exist_ok=True)
    (run.data / "roots").write_text("no folder")

    assert run("launch", "--on", "lab", "--", "true").code == 0


# a record root that lost a running job


def forget(run: Terminal, job: str) -> None:
    """Remove the root's marker, the job's folder, and this user's notes of both."""
    (root_of(run) / MARKER).unlink()
    shutil.rmtree(run.folder(job))
    for name in ("roots", "launched"):
        shutil.rmtree(run.data / name)


def test_job_that_runs_and_was_forgotten_everywhere_is_found_by_its_process(run: Terminal) -> None:
    job = run.launch(SLEEP)
    await_command(job)
    native = run("status", job, "-o", "json").json["natives"][0]["native_id"]
    forget(run, job)

    assert launch(run) == (0, job)

    assert (shims(run), run("status", job, "-o", "json").json["natives"][0]["native_id"]) == (1, native)
    assert run("cancel", job).code == 0
    assert processes_with(f"RUNTIME_JOB_ID={job}") == []


def test_result_of_a_job_whose_root_goes_and_comes_back_is_kept(run: Terminal) -> None:
    """The shim does not create a record root either; it waits for its own to return."""
    go = run.tree.parent / "go"
    job = run.launch(f"until [ -e {go} ]; do sleep 0.05; done; echo done")
    await_command(job)
    move_away(root_of(run))
    go.touch()
    wait_for(lambda: not processes_with(f"RUNTIME_JOB_ID={job}"), "the end of the command")
    waiting = processes_with(f"{job}\0--native")
    made = root_of(run).exists()

    bring_back(root_of(run))

    assert (bool(waiting), made) == (True, False)
    run.wait(job, "succeeded")
    with find_job(job) as handle:
        assert read_log(handle) == "done\n"


def test_shim_whose_job_folder_is_gone_for_good_ends_when_it_is_told_to(run: Terminal) -> None:
    job = run.launch("sleep 600")
    await_command(job)
    shim = min(processes_with(f"{job}\0--native"))  # a child that the shim has just forked still looks like the shim
    move_away(root_of(run))

    os.kill(shim, signal.SIGTERM)

    wait_for(lambda: not processes_with(job), "the end of the command and of its shim")
    assert not root_of(run).exists()
