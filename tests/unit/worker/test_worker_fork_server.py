"""Attempts that kill or stop the processes that run them: the worker goes on, and each spends its own failures."""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta

import pytest

from runtime.end_reasons import EndReason
from runtime.tasks.model import TaskState
from runtime.worker.attempts import processes
from runtime.worker.attempts.model import GuardianFailed
from runtime.worker.attempts.scratch import remove_leftovers
from tests.services_support import wait_until
from tests.unit.worker.worker_bench import EXPERIMENT, Bench, bench, start_command, stored

__all__ = ["bench", "stored"]

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="attempts' trees are seen through /proc")

MORE_BODIES = """

def signal_guardian(number):
    (HERE / "began").touch()
    os.kill(os.getppid(), number)
    time.sleep(600)


def signal_worker(number, how):
    worker = int(open(f"/proc/{os.getppid()}/stat").read().rpartition(")")[2].split()[1])
    if how == "itself":
        os.kill(worker, number)
    elif how == "shell":
        os.spawnlp(os.P_WAIT, "sh", "sh", "-c", f"kill -{number} {worker}; sleep 600")
    else:
        os.spawnlp(os.P_WAIT, "sh", "sh", "-c", f"setsid sh -c 'kill -{number} {worker}; sleep 600' & sleep 600")
    time.sleep(600)


def end_on_signal(name):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    wait(name)


def end_guardian_once(name):
    path = HERE / f"{name}.ended"
    if path.exists():
        return current_attempt().attempt
    path.touch()
    signal_guardian(signal.SIGKILL)


def stop_guardian(value):
    os.kill(os.getppid(), signal.SIGSTOP)
    return value


def spoil_reports():
    from runtime.worker.attempts import wire

    wire.DETAIL_HEADER = wire.STOP


def daemon_then_stop_guardian(name):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execve("/bin/sleep", ["sleep", "600"], {})
        os._exit(0)
    os.wait()
    if (HERE / f"{name}.go").exists():
        return "again"
    signal_guardian(signal.SIGSTOP)
"""


@pytest.fixture(autouse=True)
def bodies(bench: Bench) -> None:
    path = bench.code / "worker_bodies.py"
    path.write_text(path.read_text() + MORE_BODIES)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.tasks.retry_policy.FIRST_DELAY", timedelta(seconds=0.02))
    monkeypatch.setattr("runtime.worker.attempts.liveness.GUARDIAN_WAIT_S", 0.01)
    monkeypatch.setattr("runtime.worker.attempts.liveness.PING_EVERY_S", 0.2)
    # A stopped guardian is noticed; a slow one is not given up.
    monkeypatch.setattr("runtime.worker.attempts.liveness.SILENCES", 1000)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "slots", "warm"),
    [(signal.SIGKILL, 3, True), (signal.SIGSTOP, 1, False)],
)
@pytest.mark.usefixtures("quick", "stored")
@pytest.mark.daily(2)
def test_tasks_that_end_their_guardian_are_dead_letters_and_every_good_one_is_done(
    bench: Bench, number: int, slots: int, warm: bool
) -> None:
    killers = [bench.function("signal_guardian", int(number), key=f"killer {n}") for n in range(3)]
    good = [bench.function("give", n) for n in range(30)]
    bench.put(*good[:5], *killers, *good[5:])

    result = bench.run(slots=slots, reuse_process=warm, idle_timeout=timedelta(seconds=1))

    assert (result.exit_code, result.succeeded, result.failed) == (0, 30, 3), bench.log.getvalue()
    assert [bench.record(task).value for task in good] == list(range(30))
    for task in killers:
        record = bench.record(task)
        assert (record.state, record.reason) == (TaskState.FAILED, EndReason.LOST)
        assert {note.reason for note in bench.notes(task)} == {EndReason.LOST}


@pytest.mark.usefixtures("quick", "stored")
def test_loss_of_an_attempt_with_its_guardian_is_evidence_and_a_failure_is_none(bench: Bench) -> None:
    killer, wrong = bench.function("end_guardian_once", "a"), bench.function("fail_first", "b")
    bench.put(killer, wrong)

    result = bench.run(idle_timeout=timedelta(seconds=1))

    assert (result.exit_code, result.succeeded) == (0, 2), bench.log.getvalue()
    [lost], [failed] = bench.notes(killer), bench.notes(wrong)
    assert (lost.reason, lost.evidence) == (EndReason.LOST, "the process that starts attempts")
    assert (failed.reason, failed.evidence) == (EndReason.APP_FAILED, None)
    assert [(note.alone, note.machine is not None) for note in (lost, failed)] == [(True, True)] * 2
    assert (bench.record(killer).value, bench.record(wrong).value) == (2, 2)


@pytest.mark.usefixtures("quick", "stored")
@pytest.mark.parametrize("warm", [False, True])
def test_task_that_stops_its_guardian_and_returns_has_succeeded_and_the_worker_leaves(bench: Bench, warm: bool) -> None:
    task = bench.function("stop_guardian", "done")
    bench.put(task)

    result = bench.run(reuse_process=warm)

    assert (result.exit_code, result.succeeded) == (0, 1)
    assert bench.record(task).value == "done"


@pytest.mark.usefixtures("quick", "stored")
def test_tasks_behind_one_that_spoils_the_reports_of_its_process_spend_no_failure(bench: Bench) -> None:
    good = [bench.function("give", n, max_failures=1) for n in range(20)]
    bench.put(*good[:10], bench.function("spoil_reports"), *good[10:])

    result = bench.run(reuse_process=True, idle_timeout=timedelta(seconds=2))

    assert (result.exit_code, result.succeeded, result.failed) == (0, 21, 0), bench.log.getvalue()
    assert [bench.record(task).value for task in good] == list(range(20))


@pytest.mark.usefixtures("quick")
def test_worker_that_can_start_no_guardian_gives_its_tasks_back_and_says_why(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.worker.attempts.guardian_link._GUARDIAN", "import os; os._exit(3)")
    task = bench.function("give", 1)
    bench.put(task)

    with pytest.raises(GuardianFailed) as failed:
        bench.run(idle_timeout=None)

    assert failed.value.exit_code == 3
    [left] = bench.events("worker_left")
    assert (left["reason"], left["released"]) == ("the process that starts attempts cannot be started", 1)
    assert bench.notes(task) == []
    assert bench.records.totals(EXPERIMENT).counts[TaskState.QUEUED] == 1


@pytest.mark.slow
def test_worker_command_whose_guardian_is_stopped_leaves_on_sigterm_with_its_task_free_and_no_process_left(
    bench: Bench,
) -> None:
    task = bench.function("daemon_then_stop_guardian", "a", max_failures=1)
    bench.put(task)
    worker = start_command(bench, "--grace", "1s")
    assert wait_until((bench.code / "began").exists)
    below = processes.find_descendants(processes.read_table(), worker.pid)

    worker.send_signal(signal.SIGTERM)
    _, said = worker.communicate(timeout=240)

    assert worker.returncode == 0, said
    table = processes.read_table()
    assert len(below) >= 3
    assert [pid for pid in below if pid in table and not table[pid].dead] == []
    assert [note.reason for note in bench.notes(task)] == [EndReason.PREEMPTED]
    assert bench.records.totals(EXPERIMENT).counts[TaskState.QUEUED] == 1


@pytest.mark.slow
def test_task_of_a_worker_killed_while_its_guardian_is_stopped_runs_again_and_nothing_is_left_by_then(
    bench: Bench,
) -> None:
    task = bench.function("daemon_then_stop_guardian", "a")
    bench.put(task)
    worker = start_command(bench)
    assert wait_until((bench.code / "began").exists)
    below = processes.find_descendants(processes.read_table(), worker.pid)
    bench.let_go("a")
    worker.kill()

    result = bench.run(idle_timeout=None, max_tasks=1)
    table = processes.read_table()
    worker.communicate()
    remove_leftovers()  # The next worker does the same.

    assert result.succeeded == 1
    assert len(below) >= 3
    assert [pid for pid in below if pid in table and not table[pid].dead] == []
    assert [note.reason for note in bench.notes(task)] == [EndReason.LOST]


@pytest.mark.parametrize("how", ["itself", "shell", "daemon"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.daily(2)
def test_task_that_signals_its_worker_fails_for_it_and_the_worker_goes_on(
    bench: Bench, number: signal.Signals, how: str
) -> None:
    bad, good = bench.function("signal_worker", int(number), how, max_failures=1), bench.function("give", 1)
    bench.put(bad, good)
    worker = start_command(bench, "--idle-timeout", "1s", "--max-consecutive-failures", "0")

    _, said = worker.communicate(timeout=240)

    assert worker.returncode == 0, said
    record = bench.record(bad)
    assert (record.state, record.reason) == (TaskState.FAILED, EndReason.APP_FAILED)
    assert record.message == f"sent {number.name} to its worker, which goes on"
    assert bench.record(good).value == 1


def guardian_of(worker: int) -> int:
    """Return the guardian's pid once it serves; 0 before that."""
    for process in processes.read_table().values():
        named = processes.read_file(f"/proc/{process.pid}/comm") == b"rt-guardian\n"
        if process.ppid == worker and named and not process.dead:
            return process.pid
    return 0


@pytest.mark.parametrize("replaced", [False, True])
def test_attempt_gets_the_signals_that_its_worker_holds_back(bench: Bench, replaced: bool) -> None:
    task = bench.function("end_on_signal", "kind")
    worker = start_command(bench, "--grace", "60s")
    assert wait_until(lambda: guardian_of(worker.pid))
    if replaced:
        # The first guardian started before any signal was blocked.
        first = guardian_of(worker.pid)
        os.kill(first, signal.SIGKILL)
        assert wait_until(lambda: guardian_of(worker.pid) not in (0, first))
    bench.put(task)
    bench.began("kind")

    worker.send_signal(signal.SIGTERM)
    _, said = worker.communicate(timeout=240)

    assert worker.returncode == 0, said
    assert bench.record(task).state is TaskState.SUCCEEDED
