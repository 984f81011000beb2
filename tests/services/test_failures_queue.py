"""The queue or the disk goes away and comes back, tasks race with leaving workers, and dead letters are redriven."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from runtime.end_reasons import EndReason
from runtime.tasks.history import Release
from runtime.tasks.model import TaskState
from tests.services.failure_support import EXPERIMENT, STACKS, Yard, call, open_yard
from tests.services.pubsub_pairs import lease_soon

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="workers run their attempts on Linux")

MIB = 1 << 20


@pytest.fixture(params=STACKS)
def yard(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Yard]:
    with open_yard(request.param, tmp_path, request) as opened:
        yield opened


@pytest.fixture
def remote_yard(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Yard]:
    with open_yard("pubsub", tmp_path, request) as opened:
        yield opened


@pytest.mark.service
def test_emulator_restarted_under_its_workers_repair_brings_back_what_it_forgot(remote_yard: Yard) -> None:
    from runtime.queues.pubsub.client import ensure_topics

    yard = remote_yard
    assert yard.emulator is not None
    assert yard.settings_output is not None
    yard.submit([call("held", "running", "gate"), *(call("quick", f"q{n}") for n in range(20))])
    late = yard.submit([call("held", f"waiting{n}", "gate") for n in range(10)])
    workers = [yard.start("--slots", "2"), yard.start("--slots", "2")]
    yard.wait_for(lambda: len({run.worker for run in yard.runs()}) == 2, "both workers at work")
    yard.wait_run("running")

    yard.emulator.restart()
    ensure_topics(yard.settings_output, emulator=yard.emulator.address)
    yard.open_gate("gate")
    repaired = yard.cli("queue", "repair", "--yes")
    assert repaired.returncode == 0, repaired.stderr
    records = yard.wait_recorded()

    assert {record.state for record in records} == {TaskState.SUCCEEDED}
    assert len(records) == 31
    assert yard.wait_recorded(late)
    assert all(worker.alive for worker in workers)
    again = yard.cli("queue", "repair", "--yes", "-o", "json")
    assert again.returncode == 0, again.stderr
    assert '"published": 0' in again.stdout
    yard.check()


@pytest.mark.service
def test_emulator_that_stops_answering_for_a_while_costs_no_task(remote_yard: Yard) -> None:
    yard = remote_yard
    assert yard.emulator is not None
    assert yard.emulator.pid is not None
    ids = yard.submit([call("short", f"s{n}", 0.05) for n in range(60)])
    workers = [yard.start("--lease", "2s"), yard.start("--lease", "2s")]
    yard.wait_for(lambda: len(yard.runs()) >= 5, "five runs")

    os.kill(yard.emulator.pid, signal.SIGSTOP)
    try:
        # Longer than a lease and its renewal, so leases count as lost by then.
        time.sleep(4)
    finally:
        os.kill(yard.emulator.pid, signal.SIGCONT)
    records = yard.wait_recorded(ids)

    assert {record.state for record in records} == {TaskState.SUCCEEDED}
    assert all(worker.alive for worker in workers)
    yard.check()


def test_purge_ends_every_task_once_also_where_its_worker_is_killed(yard: Yard) -> None:
    ids = yard.submit([call("held", f"h{n}", "gate") for n in range(40)])
    killed, staying = yard.start("--slots", "2"), yard.start("--slots", "2")
    yard.wait_for(lambda: len(yard.runs()) == 4, "four runs")

    purged = yard.cli("queue", "purge", "--yes")
    killed.kill()
    records = yard.wait_recorded(ids)
    status = yard.cli("status", EXPERIMENT, "-o", "json")
    after = yard.submit([call("quick", "afterwards")])
    yard.wait_recorded(after)

    assert "40 tasks cancelled" in purged.stderr
    assert {record.state for record in records} == {TaskState.CANCELLED}
    assert {state: n for state, n in json.loads(status.stdout)["totals"].items() if n} == {"cancelled": 40}
    assert [run.name for run in yard.runs()[4:]] == ["afterwards"]
    yard.wait_for(lambda: staying.events("attempt_ended") or staying.events("lease_lost"), "what ran was stopped")
    repaired = yard.cli("queue", "repair", "--yes", "-o", "json")
    assert json.loads(repaired.stdout)["published"] == 0
    yard.check()


@contextlib.contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Path]:
    """Mount a file system of that size in memory."""
    from tests.services_support import pass_over

    if os.geteuid() != 0 or shutil.which("mount") is None:
        pass_over("mounting a small disk needs root")
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pass_over(f"no small disk can be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.service
def test_record_folder_on_a_full_disk_workers_wait_and_go_on_when_there_is_room(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    with small_disk(tmp_path / "disk", 8 * MIB) as disk, open_yard("pubsub", tmp_path, request, records=disk) as yard:
        ids = yard.submit([call("held", f"through it all {n}", "gate") for n in range(3)])
        workers = [yard.start("--slots", "2"), yard.start()]
        yard.wait_for(lambda: len(yard.runs()) == 3, "three runs")
        ids += yard.submit([call("short", f"s{n}", 0.02) for n in range(30)])
        ballast = disk / "ballast"
        fill_disk(ballast)
        yard.open_gate("gate")
        for worker in workers:
            worker.said("No space left on device")
        assert all(worker.alive for worker in workers)

        ballast.unlink()
        records = yard.wait_recorded(ids)

        assert {record.state for record in records} == {TaskState.SUCCEEDED}
        yard.check()


@pytest.mark.slow
def test_embedded_file_on_a_full_disk_workers_wait_and_go_on_when_there_is_room(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    with small_disk(tmp_path / "data", 8 * MIB) as disk, open_yard("sqlite", tmp_path, request) as yard:
        ids = yard.submit([call("short", f"s{n}", 0.02) for n in range(30)])
        ids += yard.submit([call("held", "through it all")])
        workers = [yard.start("--slots", "2"), yard.start()]
        yard.wait_run("through it all")
        ballast = disk / "ballast"
        fill_disk(ballast)
        for _ in range(2):
            ids += fill_and_submit(yard)
        yard.open_gate("through it all")
        time.sleep(1)
        assert all(worker.alive for worker in workers), yard.logs()

        ballast.unlink()
        records = yard.wait_recorded(ids)

        assert {record.state for record in records} == {TaskState.SUCCEEDED}
        yard.check()


def fill_disk(ballast: Path) -> None:
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)


def fill_and_submit(yard: Yard) -> list[str]:
    """Submit to a full disk; a refused submission is not acknowledged, so none of its tasks are expected."""
    from runtime.errors import InfrastructureFailure

    with contextlib.suppress(InfrastructureFailure):
        return yard.submit([call("quick", f"on the full disk {random.random()}")])
    return []


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize("kind", STACKS)
def test_task_submitted_as_a_worker_leaves_for_idleness_is_never_lost(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    rounds = 20 if os.environ.get("SOAK") == "1" else 5
    with open_yard(kind, tmp_path, request) as yard:
        chance = random.Random(1)
        by_the_leaver = 0
        for number in range(rounds):
            worker = yard.start("--idle-timeout", "0.3s", "--lease", "10s").ready()
            # At about the moment when it leaves, before and after.
            time.sleep(0.3 + chance.uniform(-0.1, 0.15))
            yard.submit([call("quick", f"r{number}")])
            assert worker.wait() == 0
            by_the_leaver += bool(yard.runs(f"r{number}"))
        yard.start("--slots", "2")
        records = yard.wait_recorded()

        assert {record.state for record in records} == {TaskState.SUCCEEDED}
        assert len(records) == rounds
        assert {len(yard.runs(f"r{number}")) for number in range(rounds)} == {1}
        yard.check()


@pytest.mark.service
def test_task_released_200_times_spends_no_budget(remote_yard: Yard) -> None:
    yard = remote_yard
    [task] = yard.submit([call("quick", "patient", max_failures=1)])
    for _ in range(200):
        [lease] = lease_soon(yard.queue)
        yard.queue.release([Release(lease)])
    yard.start()

    [record] = yard.wait_recorded([task])

    assert (record.state, record.attempts) == (TaskState.SUCCEEDED, 1)
    assert yard.notes(task) == []
    yard.check()


def test_tasks_that_leaving_workers_hand_back_unstarted_spend_no_budget(yard: Yard) -> None:
    """A worker with quick tasks leases some ahead; if it never begins them, that is nobody's failure."""
    # On Pub/Sub, returned tasks may take an ack deadline of ten seconds to come again.
    rounds = 4 if yard.kind == "sqlite" else 2
    quick = yard.submit([call("quick", f"q{n}") for n in range(20)])
    ahead: list[str] = []
    for number in range(rounds):
        worker = yard.start("--look-ahead", "8", "--grace", "5s")
        if not number:
            yard.wait_recorded(quick)
            ahead = yard.submit([call("held", f"ahead{n}", "gate") for n in range(6)])
        yard.wait_for(lambda worker=worker: any(run.worker == worker.pid for run in yard.runs()[20:]), "a run")
        assert worker.stop() == 0
    yard.open_gate("gate")
    yard.start()
    yard.wait_recorded()

    began = {run.token for run in yard.runs()}
    for task in ahead:
        notes = yard.notes(task)
        assert {note.token for note in notes} <= began, "a note of an attempt that never began"
        assert {note.reason for note in notes} <= {EndReason.PREEMPTED}
    yard.check()


def test_redrive_after_the_cause_is_gone_succeeds_once(yard: Yard) -> None:
    task = yard.submit_one("wrong_once", "redriven", max_failures=2)
    worker = yard.start("--max-consecutive-failures", "0")
    [failed] = yard.wait_recorded([task])
    assert (failed.state, failed.attempts) == (TaskState.FAILED, 2)

    yard.open_gate("redriven")
    redriven = yard.cli("queue", "dead", "redrive", "--all", "--yes")
    assert redriven.returncode == 0, redriven.stderr
    twice = yard.cli("queue", "dead", "redrive", "--all", "--yes")
    assert twice.returncode == 0, twice.stderr
    yard.tasks[task] = 2
    [record] = yard.wait_recorded([task])

    assert (record.state, record.generation, record.attempts) == (TaskState.SUCCEEDED, 2, 1)
    refused = yard.cli("retry", task)
    assert refused.returncode != 0
    assert "succeeded" in refused.stdout + refused.stderr
    assert len(yard.runs("redriven")) == 3
    assert len(yard.records.find_all(task)) == 2
    assert worker.alive
    yard.check()


def test_task_cancelled_while_it_runs_ends_soon_and_is_recorded_once(yard: Yard) -> None:
    task = yard.submit_one("held", "for ever")
    worker = yard.start()
    run = yard.wait_run("for ever")

    cancelled = yard.cli("cancel", task, "--yes")
    assert cancelled.returncode == 0, cancelled.stderr
    [record] = yard.wait_recorded([task])

    assert record.state is TaskState.CANCELLED
    assert wait_gone(run.pid)
    assert worker.alive
    yard.check()


def wait_gone(pid: int) -> bool:
    from tests.services_support import wait_until

    return wait_until(lambda: not Path(f"/proc/{pid}").exists())


def test_worker_that_met_an_expired_task_records_it_unstarted(yard: Yard) -> None:
    soon = datetime.now(UTC) + timedelta(seconds=2)
    task = yard.submit_one("quick", "too late", expires_at=soon.isoformat())
    time.sleep(2.1)
    yard.start()

    [record] = yard.wait_recorded([task])

    assert (record.state, record.attempts) == (TaskState.EXPIRED, 0)
    assert not yard.runs()
    yard.check()
