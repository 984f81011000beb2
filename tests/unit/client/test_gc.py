"""What happens to a job between the look for garbage and its removal, and to removals and launches that are cut off."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from runtime.client.jobs import gc
from runtime.client.jobs.handle import JobHandle
from runtime.errors import StoreUnavailable
from runtime.jobs import ledger
from runtime.jobs.hosts.base import Files
from runtime.jobs.hosts.local import LocalHost
from runtime.jobs.lock import Lock
from runtime.jobs.plan import Target, owner_name
from runtime.launchers.local.launcher import LocalLauncher
from runtime.shim.common import AlreadyClaimed
from runtime.shim.record import FolderRecord, claim_job
from runtime.system import system
from tests.jobs_support import Terminal, open_terminal
from tests.shim_support import kill_all, processes_with, shims_with, wait_for


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Terminal]:
    with open_terminal(tmp_path, monkeypatch, capsys) as terminal:
        yield terminal


def open_job(run: Terminal, job: str) -> JobHandle:
    return JobHandle(job, Target(name="local", kind="local"), LocalLauncher(), LocalHost(str(run.data / "jobs")))


def find(place: JobHandle) -> list[gc.Garbage]:
    return gc.find_garbage(place, owner=owner_name(), older_than=timedelta(0), now=system.now())


def remove(found: list[gc.Garbage], place: JobHandle) -> dict[str, list[str]]:
    return {each.kind: left for each, left in gc.remove_all(found, place, owner=owner_name())}


def test_job_that_is_started_again_after_somebody_looked_for_garbage_stays_with_its_code(
    run: Terminal, tmp_path: Path
) -> None:
    job = run.finish(f"[ -e {tmp_path}/again ] || exit 3; exec sleep 600")
    with open_job(run, job) as place:
        found = find(place)
        (tmp_path / "again").touch()
        assert run("retry", job, "--yes").code == 0
        wait_for(lambda: bool(shims_with(job)), "the shim")

        left = remove(found, place)

    assert sorted(each.kind for each in found) == ["code", "job"]
    assert left["job"] == [f"job `{job}`: it was started again"]
    assert left["code"][0].endswith(": a job uses it")
    assert run("status", job, "-o", "json").json["state"] in ("pending", "running")
    assert shims_with(job)


def test_job_that_ended_once_more_after_somebody_looked_for_garbage_keeps_its_time(run: Terminal) -> None:
    job = run.finish("exit 3")
    with open_job(run, job) as place:
        found = find(place)
        assert run("retry", job, "--yes").code == 0
        run.wait(job)
        wait_for(lambda: not processes_with(str(run.folder(job))), "the end of the shim")

        assert remove(found, place)["job"] == [f"job `{job}`: it was started again, and has ended"]

    assert run("status", job, "-o", "json").json["state"] == "failed"


def test_job_that_another_command_holds_is_left_to_it(run: Terminal) -> None:
    job = run.finish("true")
    with open_job(run, job) as place:
        found = find(place)
        lock = Lock(place.files, job, "a retry")
        lock.take(patience_s=0)

        left = remove(found, place)
        lock.release()

    assert left["job"] == [f"job `{job}`: it is being launched"]
    assert run("status", job, "-o", "json").json["state"] == "succeeded"


@pytest.mark.parametrize("cut_off", ["early", "late"])
@pytest.mark.daily(1)
def test_launch_after_a_removal_that_was_cut_off_runs_the_command_again(
    run: Terminal, tmp_path: Path, cut_off: str
) -> None:
    script = f"echo once >> {tmp_path}/runs"
    job = run.finish(script)
    ledger.leave_mark(LocalHost(str(run.data / "jobs")).files, job, ledger.REMOVING, owner_name().encode())
    if cut_off == "late":
        (run.folder(job) / "ended").unlink()

    gone = run("status", job)
    again = run.finish(script)

    assert (gone.code, gone.err.splitlines()[0]) == (2, f"error: no job named `{job}`")
    assert (again, (tmp_path / "runs").read_text()) == (job, "once\nonce\n")
    assert run("status", job, "-o", "json").json["state"] == "succeeded"
    assert not (run.folder(job) / ledger.REMOVING).exists()


def test_removal_that_a_full_disk_cut_off_leaves_nothing_that_counts_as_the_end_of_the_next_launch(
    run: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f"echo once >> {tmp_path}/runs; [ -e {tmp_path}/fails ] && exit 3; true"
    job = run.finish(script)
    (tmp_path / "fails").touch()

    def refuse(*_: object, **named: object) -> None:
        raise StoreUnavailable("the record root refuses: no space left on device")

    with open_job(run, job) as place:
        found = find(place)
        with monkeypatch.context() as patched:
            patched.setattr(Lock, "take", refuse)
            with pytest.raises(StoreUnavailable):
                remove(found, place)
    again = run.finish(script)

    assert (again, (tmp_path / "runs").read_text()) == (job, "once\nonce\n")
    assert run("status", job, "-o", "json").json["state"] == "failed"


def test_removal_and_a_shim_that_begins_meet(run: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    """A native job that no record names claims the job after it was judged, or once its removal is marked."""
    job = run.finish("exit 3")
    mark, record = run.folder(job) / ledger.REMOVING, FolderRecord(str(run.folder(job)))
    leave_mark, seen = ledger.leave_mark, list[str]()
    with open_job(run, job) as place:

        def claim(files: Files, job: str, name: str, content: bytes) -> None:
            claim_job(record, 2, 0, "native-7")
            leave_mark(files, job, name, content)
            with pytest.raises(AlreadyClaimed, match="being removed"):
                claim_job(record, 3, 0, "native-8")
            seen.append(name)

        monkeypatch.setattr(ledger, "leave_mark", claim)
        left = remove(find(place), place)

    assert seen == [ledger.REMOVING]
    assert left["job"] == [f"job `{job}`: it was started again"]
    assert run("status", job).code == 0
    assert not mark.exists()


def test_folder_of_a_launch_that_was_cut_off_before_its_intent_is_garbage_after_an_hour(run: Terminal) -> None:
    young, old = (run.data / "jobs" / "jobs" / name for name in ("j-" + 24 * "1", "j-" + 24 * "2"))
    run.finish("true")
    for folder in (young, old):
        folder.mkdir()
        (folder / "snapshot.tar").write_bytes(b"code")
    hours_ago = time.time() - 7200
    os.utime(old, (hours_ago, hours_ago))

    gone = run("gc", "--older-than", "1h", "--yes")

    assert [line.split("\t")[:2] for line in gone.out.splitlines()] == [["job", old.name]]
    assert (gone.code, young.exists(), old.exists()) == (0, True, False)


def lose(run: Terminal, script: str = "exec sleep 600", *words: str) -> str:
    """Launch a job, and kill its shim and its command once all of its runs have begun."""
    job = run.launch(script, *words)
    with open_job(run, job) as place:
        runs = place.entry().indices
        wait_for(lambda: all(place.attempts(index) for index in range(runs)), "the attempts")
        wait_for(lambda: all(beat_of(run, job, index).exists() for index in range(runs)), "the commands")
    kill_all(job)
    return job


def beat_of(run: Terminal, job: str, index: int = 0) -> Path:
    return run.folder(job) / f"runs/{index}/a0001/beat"


def test_lost_job_that_a_keeper_would_take_up_is_no_garbage_until_it_is_cancelled(run: Terminal) -> None:
    job = lose(run)
    told: list[str] = []
    with open_job(run, job) as place:
        left = gc.find_garbage(
            place, owner=owner_name(), older_than=timedelta(0), now=system.now() + timedelta(days=99), tell=told.append
        )
        assert run("cancel", job).code == 0
        gone = gc.find_garbage(place, owner=owner_name(), older_than=timedelta(0), now=system.now() + timedelta(days=9))

    assert [each.name for each in left if each.kind == "job"] == []
    assert told == [
        f"1 lost job can go on and stays: `{job}`; `runtime keep` takes up what is lost, and `runtime cancel` gives it up"
    ]
    assert [each.name for each in gone if each.kind == "job"] == [job]


def test_lost_job_whose_cancel_was_taken_back_since_somebody_looked_for_garbage_stays(run: Terminal) -> None:
    job = lose(run)
    (run.folder(job) / "cancel").touch()
    with open_job(run, job) as place:
        found = gc.find_garbage(
            place, owner=owner_name(), older_than=timedelta(0), now=system.now() + timedelta(days=9)
        )
        (run.folder(job) / "cancel").unlink()

        assert remove(found, place)["job"] == [f"job `{job}`: it was started again"]


def test_job_that_left_no_result_ended_at_its_last_sign(run: Terminal) -> None:
    job = lose(run)
    beat_of(run, job).write_text("361")
    began = json.loads((run.folder(job) / "runs/0/a0001/start.json").read_text())["at"]
    (run.folder(job) / "cancel").touch()
    ended = datetime.fromtimestamp(began + 3600, UTC)
    with open_job(run, job) as place:
        early, late = (
            gc.find_garbage(place, owner=owner_name(), older_than=timedelta(hours=1), now=ended + after)
            for after in (timedelta(minutes=59), timedelta(minutes=61))
        )
        left = remove(late, place)

    assert [each.kind for each in early if each.kind == "job"] == []
    assert [(each.name, each.ended_at) for each in late if each.kind == "job"] == [(job, ended)]
    assert left["job"] == []


@pytest.mark.parametrize(("beat", "last"), [("2", 0), ("901", 1)])
def test_array_ended_when_its_last_run_did_as_far_as_known(run: Terminal, beat: str, last: int) -> None:
    script = "[ $RUNTIME_ARRAY_INDEX = 1 ] || exit 0; exec sleep 600"
    job = run.launch(script, "--set", "array.count=2", "--set", "array.max_parallel=2")
    wait_for(
        lambda: beat_of(run, job, 1).exists() and list((run.data / "jobs/done").glob(f"{job}.0.*")), "the end of one"
    )
    kill_all(job)
    beat_of(run, job, 1).write_text(beat)
    (run.folder(job) / "cancel").touch()
    with open_job(run, job) as place:
        result = json.loads(place.files.read(f"jobs/{job}/runs/0/result") or b"")
        result["at"] += 1000
        (run.folder(job) / "runs/0.ended").unlink(missing_ok=True)
        place.files.write(f"jobs/{job}/runs/0/result", json.dumps(result).encode())
        began = json.loads((run.folder(job) / "runs/1/a0001/start.json").read_text())["at"]
        found = gc.find_garbage(
            place, owner=owner_name(), older_than=timedelta(0), now=system.now() + timedelta(days=9)
        )

    ends = [result["at"], began + 9000]
    assert [each.ended_at for each in found if each.kind == "job"] == [datetime.fromtimestamp(ends[last], UTC)]


def test_start_that_is_damaged_is_no_sign(run: Terminal) -> None:
    job = lose(run)
    (run.folder(job) / "runs/0/a0001/start.json").write_text('{"at": "now"}')
    (run.folder(job) / "cancel").touch()
    with open_job(run, job) as place:
        found = gc.find_garbage(
            place, owner=owner_name(), older_than=timedelta(0), now=system.now() + timedelta(days=9)
        )
        (native,) = place.entry().natives

    assert [each.ended_at for each in found if each.kind == "job"] == [native.at]
