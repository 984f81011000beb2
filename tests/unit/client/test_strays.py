"""gc of jobs that a backend has and no record: found by the backend's process list alone, and ended."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from runtime.client.jobs import gc
from runtime.jobs.hosts.agent import MARKER
from runtime.jobs.hosts.base import HostUnavailable
from runtime.jobs.hosts.local import LocalHost
from runtime.jobs.plan import Target, owner_name
from runtime.launchers.base import ListsOwned
from runtime.launchers.local.launcher import LocalLauncher
from runtime.launchers.processes.base import ProcessLauncher
from tests.jobs_support import Terminal, open_terminal
from tests.shim_support import DAEMON, lives, processes_with, shims_with, signal_all, wait_for

AT_WORK = "touch $RUNTIME_OUTPUT_DIR/begun; exec sleep 600"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Terminal]:
    monkeypatch.setattr(gc, "SETTLED", timedelta(0))
    with open_terminal(tmp_path, monkeypatch, capsys) as terminal:
        yield terminal


def launch_at_work(run: Terminal, name: str, script: str = AT_WORK) -> str:
    """Launch a job and wait until its command has begun."""
    job = run.launch(script, "--name", name)
    wait_for(lambda: any(run.folder(job).rglob("begun")), f"the command of {job}")
    return job


def rows(out: str) -> list[list[str]]:
    """Return the columns KIND, NAME and STATE of each line about a stray."""
    lines = [line.split("\t") for line in out.splitlines()]
    return [[line[0], line[1], line[4]] for line in lines if line[0] == "native"]


def test_gc_ends_a_running_job_whose_record_is_gone_and_leaves_one_with_its_record(run: Terminal) -> None:
    kept, stray = launch_at_work(run, "kept"), launch_at_work(run, "stray")
    shutil.rmtree(run.folder(stray))

    dry = run("gc", "--on", "local", "--dry-run")
    still = bool(processes_with(stray))
    gone = run("gc", "--on", "local", "--yes")
    again = run("gc", "--on", "local", "--dry-run")

    assert rows(dry.out) == rows(gone.out) == [["native", stray, "running"]]
    assert (still, gone.code, processes_with(stray), run.folder(stray).exists()) == (True, 0, [], False)
    assert (rows(again.out), again.code) == ([], 0)
    assert list((run.data / "jobs" / "done").glob(f"{stray}.*")) == []
    assert run("status", kept, "-o", "json").json["state"] == "running"


def test_gc_asks_before_it_ends_a_running_job_and_lists_it_first(run: Terminal) -> None:
    stray = launch_at_work(run, "stray")
    shutil.rmtree(run.folder(stray))

    said = run("gc")

    assert (said.code, rows(said.out)) == (2, [["native", stray, "running"]])
    assert "and end 1 job of the backend that no record has: nobody is there to answer" in said.err
    assert shims_with(stray)


def test_gc_ends_what_a_killed_shim_of_a_job_without_record_left(run: Terminal) -> None:
    said, daemon = run.tree.parent / "daemon.pid", run.tree.parent / "daemon.py"
    daemon.write_text(DAEMON)
    stray = run.launch(f"{sys.executable} {daemon} {said}; exec sleep 600")
    wait_for(said.exists, "the daemon")
    signal_all(shims_with(stray))
    wait_for(lambda: not shims_with(stray), "the end of the shim")
    shutil.rmtree(run.folder(stray))
    host = LocalHost(str(run.data / "jobs"))
    owned = LocalLauncher().owned(Target(name="local", kind="local"), host, job=stray)

    gone = run("gc", "--yes")

    assert {(each.job, each.what, each.live) for each in owned} == {(stray, "process", True)}
    assert (gone.code, rows(gone.out)) == (0, [["native", stray, "running"]])
    assert not lives(said)
    assert LocalLauncher().owned(Target(name="local", kind="local"), host, job=stray) == []


def test_job_that_a_job_launched_is_its_own_even_if_the_record_of_the_first_is_gone(run: Terminal) -> None:
    """The inner shim has the variables of the outer job, and its own job is at work."""
    inner = f"RUNTIME_DATA_DIR={run.data} {sys.executable} -m runtime launch --on local --name inner -- sleep 601"
    outer = launch_at_work(run, "outer", f"{inner} > id; touch $RUNTIME_OUTPUT_DIR/begun; exec sleep 600")
    (other,) = [path.name for path in (run.data / "jobs" / "jobs").iterdir() if path.name != outer]
    run.wait(other, "running")
    shutil.rmtree(run.folder(outer))

    gone = run("gc", "--yes")

    assert (gone.code, rows(gone.out), shims_with(f"jobs/{outer}")) == (0, [["native", outer, "running"]], [])
    assert run("status", other, "-o", "json").json["state"] == "running"


def test_nothing_is_concluded_from_a_record_root_without_its_marker(run: Terminal) -> None:
    """A machine that never used the root cannot tell it from a mount point without its file system."""
    stray = launch_at_work(run, "stray")
    shutil.rmtree(run.folder(stray))
    (run.data / "jobs" / MARKER).unlink()
    shutil.rmtree(run.data / "roots")

    said = run("gc", "--yes")

    assert (said.code, rows(said.out)) == (0, [])
    assert shims_with(stray)


def test_record_root_that_is_gone_answers_nothing_and_nothing_is_ended(run: Terminal) -> None:
    stray = launch_at_work(run, "stray")
    (run.data / "jobs").rename(run.data / "away")

    said = run("gc", "--yes")

    assert (said.code, rows(said.out)) == (3, [])
    assert shims_with(stray)


def test_young_stray_is_named_and_left_until_every_cache_would_show_its_record(
    run: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gc, "SETTLED", timedelta(hours=1))
    stray = launch_at_work(run, "stray")
    shutil.rmtree(run.folder(stray))

    young = run("gc", "--dry-run")
    assert rows(young.out) == []
    assert f"job `{stray}` runs without a record; a call later than 1h after its start ends it" in young.err
    assert rows(run("gc", "--older-than", "0s", "--dry-run").out) == [["native", stray, "running"]]


def test_stray_whose_record_came_back_before_it_was_removed_is_left(run: Terminal) -> None:
    stray = launch_at_work(run, "stray")
    host = LocalHost(str(run.data / "jobs"))
    target = Target(name="local", kind="local")
    garbage = gc.Garbage(kind="native", name=stray, target="local", what="")

    with gc.OpenTarget(target, LocalLauncher(), host) as place:
        left = gc.remove(garbage, place, owner=owner_name())

    assert left == [f"job `{stray}`: it is known again"]
    assert shims_with(stray)
    assert run("status", stray, "-o", "json").json["state"] == "running"


# several targets


def test_gc_of_several_targets_lists_all_and_goes_on_where_one_does_not_answer(
    run: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = [f'[targets.{name}]\nkind = "local"\nrecords = "{tmp_path}/{name}"\n' for name in ("one", "two", "down")]
    (run.tree / "runtime.toml").write_text("".join(tables))
    jobs = {name: run("launch", "--on", name, "--name", name, "--", "true").out.strip() for name in ("one", "two")}
    for name, job in jobs.items():
        wait_for(lambda name=name, job=job: bool([*(tmp_path / name / "done").glob(f"{job}.*")]), job)  # type: ignore[misc]
    wait_for(lambda: not shims_with(str(tmp_path)), "the end of the shims")
    listed = ProcessLauncher.owned

    def owned(self: ProcessLauncher, target: Target, host: LocalHost, **which: str | None) -> object:
        if target.name == "down":
            raise HostUnavailable("nobody answers there")
        return listed(self, target, host, **which)

    monkeypatch.setattr(ProcessLauncher, "owned", owned)

    said = run("gc", "--on", "one,down", "--on", "two", "--older-than", "0s", "--yes", "-o", "json")

    assert said.code == 3
    assert "target `down` does not answer: nobody answers there" in said.err
    assert [(each["target"], each["name"]) for each in said.json if each["kind"] == "job"] == [*jobs.items()]
    assert [path.name for name in jobs for path in (tmp_path / name / "jobs").iterdir()] == []
    assert run("gc", "--on", "down", "--yes").code == 3


def test_launchers_that_list_what_is_ours_have_the_protocol() -> None:
    assert isinstance(LocalLauncher(), ListsOwned)
