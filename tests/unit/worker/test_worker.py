"""The worker with real children on the embedded queue: tasks run, recorded and returned, and when it leaves."""

from __future__ import annotations

import gc
import signal
import sys
import threading
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from runtime.end_reasons import EndReason
from runtime.errors import StoreUnavailable
from runtime.queues.base import Queue
from runtime.snapshots.snapshot import take_snapshot
from runtime.tasks.history import Lease, Record, Release, cancelled_record
from runtime.tasks.model import FunctionEntry, Resources, TaskState, WorkflowEntry, new_token
from runtime.testing import sample_task
from runtime.worker.worker_context import HeldLeases
from tests.services_support import wait_until
from tests.unit.worker.worker_bench import EXPERIMENT, Bench, ago, bench, open_pair_with_folder, start_command, stored

__all__ = ["bench", "stored"]

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="attempts' trees are seen through /proc")


# leaving


def test_worker_with_nothing_to_do_leaves_with_code_0(bench: Bench) -> None:
    result = bench.run()

    assert (result.exit_code, result.succeeded, result.reason) == (0, 0, "idle for 0.05 s")


def test_worker_whose_tasks_failed_is_drained_with_code_0(bench: Bench) -> None:
    bench.put(bench.function("fail", max_failures=1), bench.function("give"))

    result = bench.run()

    assert (result.exit_code, result.succeeded, result.failed) == (0, 1, 1)


def test_worker_that_is_idle_waits_for_a_task_that_is_due_soon(bench: Bench) -> None:
    task = bench.function("give", 1, not_before=datetime.now(UTC) + timedelta(seconds=0.6))
    bench.put(task)

    result = bench.run()

    assert result.succeeded == 1
    assert bench.record(task).value == 1


def test_workers_of_one_process_leave_no_descriptor_behind(bench: Bench) -> None:
    def count() -> int:
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir()))

    bench.put(bench.function("give", 1))
    assert bench.run().succeeded == 1
    before = count()
    for _ in range(3):
        bench.run()

    assert count() == before


class CountingQueue:
    """Forwards every call of a queue, or of its records, and counts it by name."""

    def __init__(self, beneath: Any, calls: Counter[str], **instead: Any) -> None:
        self._beneath, self._calls, self._instead = beneath, calls, instead

    def __getattr__(self, name: str) -> Any:
        found = self._instead.get(name) or getattr(self._beneath, name)
        if name == "records":
            return CountingQueue(found, self._calls)
        self._calls[name] += 1
        return found


def test_worker_that_waits_for_its_first_task_counts_idle_time_from_its_end(bench: Bench) -> None:
    task, calls = bench.function("give", 1), Counter[str]()
    with bench.running(
        over=lambda queue: CountingQueue(queue, calls, wake_descriptor=lambda: None),
        idle_timeout=timedelta(seconds=0.1),
        wait_for_first=True,
    ) as running:
        # The worker checks every 50 ms, and would have left long before.
        assert wait_until(lambda: calls["outlook"] >= 8)
        assert running.result is None
        bench.put(task)
        result = running.join()

    assert (result.succeeded, result.reason) == (1, "idle for 0.1 s")


@pytest.mark.parametrize(("count", "reason"), [(1, "took 1 task"), (3, "took 3 tasks")])
def test_worker_with_a_number_of_tasks_leaves_after_that_many(bench: Bench, count: int, reason: str) -> None:
    bench.put(*(bench.function("give", n) for n in range(5)))

    result = bench.run(idle_timeout=None, max_tasks=count)

    assert (result.succeeded, result.reason) == (count, reason)
    assert bench.open_queue().depth() is not None
    assert bench.records.totals(EXPERIMENT).counts[TaskState.QUEUED] == 5 - count


def test_worker_command_once_runs_one_task(bench: Bench) -> None:
    bench.put(bench.function("give", 1), bench.function("give", 2))

    worker = start_command(bench, "--once")
    _, said = worker.communicate(timeout=240)

    assert worker.returncode == 0, said
    assert bench.records.totals(EXPERIMENT).counts[TaskState.SUCCEEDED] == 1


class LeasesLate:
    """A queue whose first answer to `lease` is delayed until it is released."""

    def __init__(self, queue: Any) -> None:
        self.queue = queue
        self.leased, self.go_on = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.queue, name)

    def lease(self, n: int, **options: Any) -> list[Lease]:
        leases: list[Lease] = self.queue.lease(n, **options)
        self.leased.set()
        self.go_on.wait(240)
        return leases


def test_worker_that_leaves_while_leases_are_on_their_way_gives_them_back(bench: Bench) -> None:
    queue, records = open_pair_with_folder(bench)
    late = LeasesLate(queue)
    task = bench.function("give", 1)
    queue.put([task])

    with bench.running(over=lambda _: late) as running:
        assert late.leased.wait(240)
        running.worker.stop()
        assert wait_until(lambda: bool(bench.events("worker_draining")))
        late.go_on.set()
        result = running.join()

    assert (result.succeeded, records.find(task.id, 1)) == (0, None)
    depth = open_pair_with_folder(bench)[0].depth()
    assert depth is not None
    assert (depth.ready, depth.leased) == (1, 0)


# accepted tasks


def test_worker_that_accepts_commands_leaves_functions_to_others_and_says_so_once(bench: Bench) -> None:
    wanted, other = bench.command("true"), bench.function("give")
    bench.put(other, wanted)

    result = bench.run(accept=frozenset({"command"}), max_tasks=1, idle_timeout=None)

    assert result.succeeded == 1
    assert bench.record(wanted).state is TaskState.SUCCEEDED
    [said] = bench.events("task_declined")
    assert said["task"] == other.id
    assert bench.records.totals(EXPERIMENT).counts[TaskState.QUEUED] == 1
    assert bench.notes(other) == []


def test_worker_that_cannot_hold_a_task_reports_it_once_however_often_it_comes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.tasks.retry_policy.LONGEST_DELAY", timedelta(seconds=0.05))
    large = bench.function("give", resources=Resources(gpus=64))
    bench.put(large)

    calls = Counter[str]()

    with bench.running(over=lambda queue: CountingQueue(queue, calls), name="w-small") as running:
        assert wait_until(lambda: calls["release"] >= 4)
        running.worker.stop()
        running.join()

    assert len(bench.events("task_declined")) == 1
    [seen] = bench.records.workers()
    assert "gpu" in seen.declined[large.id].lower()
    assert bench.records.totals(EXPERIMENT).counts[TaskState.QUEUED] == 1


def test_worker_meets_an_expired_task_and_records_it_unstarted(bench: Bench) -> None:
    task = bench.function("note", "late", expires_at=ago(seconds=1))
    bench.put(task)

    bench.run()

    record = bench.record(task)
    assert (record.state, record.reason, record.attempts) == (TaskState.EXPIRED, EndReason.EXPIRED, 0)
    assert not (bench.code / "order").exists()


def test_task_that_expires_before_its_second_attempt_has_had_one(bench: Bench) -> None:
    until = datetime.now(UTC) + timedelta(seconds=2)
    waits = f"while [ $(date +%s) -le {int(until.timestamp()) + 1} ]; do sleep 0.1; done; exit 1"
    task = bench.command("sh", "-c", waits, expires_at=until, max_failures=3)
    bench.put(task)

    bench.run()

    record = bench.record(task)
    assert (record.state, record.message.endswith("UTC while it waited")) == (TaskState.EXPIRED, True)
    assert record.attempts == len(bench.notes(task))


def test_worker_takes_tasks_by_priority(bench: Bench) -> None:
    bench.put(bench.function("note", "low"), bench.function("note", "high", priority=5))

    bench.run()

    assert (bench.code / "order").read_text().split() == ["high", "low"]


# failures


def test_task_that_fails_once_is_tried_again_and_counts_its_attempts(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.tasks.retry_policy.FIRST_DELAY", timedelta(seconds=0.05))
    task = bench.function("fail_first", "once")
    bench.put(task)

    bench.run()

    record = bench.record(task)
    assert (record.state, record.attempts, record.value) == (TaskState.SUCCEEDED, 2, 2)
    [note] = bench.notes(task)
    assert (note.reason, note.message) == (EndReason.APP_FAILED, "RuntimeError: once")


def test_task_that_fails_after_its_lease_could_not_be_renewed_is_not_kept_from_everybody(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulates a laptop that slept: no other worker has taken the task, and this one continues."""
    answers = iter([False])
    holds = HeldLeases.holds
    monkeypatch.setattr(HeldLeases, "holds", lambda self, held: next(answers, None) is None and holds(self, held))
    task = bench.function("fail_first", "once")
    bench.put(task)

    bench.run()

    assert bench.record(task).state is TaskState.SUCCEEDED


def test_tasks_that_fail_in_a_row_end_the_worker_with_code_1_and_are_released(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.tasks.retry_policy.FIRST_DELAY", timedelta(seconds=0.05))
    bench.put(*(bench.function("fail", str(n), max_failures=1) for n in range(5)))

    result = bench.run(max_consecutive_failures=2, idle_timeout=None)

    # Another task may have begun before the second failure was known, and may have failed too.
    assert result.exit_code == 1
    assert result.failed in (2, 3)
    assert result.reason.endswith("tasks in a row failed and none succeeded (--max-consecutive-failures 2)")
    counts = bench.records.totals(EXPERIMENT).counts
    assert (counts[TaskState.FAILED], counts[TaskState.LEASED]) == (result.failed, 0)
    assert counts[TaskState.QUEUED] == 5 - result.failed


@pytest.mark.parametrize("max_failures", [1, 3])
def test_bad_tasks_in_a_row_do_not_end_a_worker_that_has_succeeded(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, max_failures: int
) -> None:
    monkeypatch.setattr("runtime.tasks.retry_policy.FIRST_DELAY", timedelta(seconds=0.01))
    bad = [bench.function("fail", str(number), max_failures=max_failures) for number in range(5)]
    good = [bench.function("give", number) for number in range(20)]
    bench.put(*good[:3], *bad, *good[3:])

    result = bench.run(look_ahead=0)

    assert (result.exit_code, result.failed, result.succeeded) == (0, 5, 20), bench.log.getvalue()
    [*_, said] = bench.events("worker_paused")
    assert said["message"].endswith("does not leave, as tasks have succeeded here")


def test_pause_of_a_worker_that_has_succeeded_has_an_end(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.worker.completion.LONGEST_PAUSE_S", 0.01)
    bench.put(bench.function("give", 1), *(bench.function("fail", str(number), max_failures=1) for number in range(12)))

    result = bench.run(look_ahead=0)

    assert (result.exit_code, result.failed, result.succeeded) == (0, 12, 1)
    assert {event["wait_s"] for event in bench.events("worker_paused")} == {0.01}


def test_one_task_that_fails_again_and_again_counts_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.tasks.retry_policy.FIRST_DELAY", timedelta(seconds=0.02))
    task = bench.function("fail", max_failures=4)
    bench.put(task)

    result = bench.run(max_consecutive_failures=2)

    assert (result.exit_code, result.failed) == (0, 1)
    assert bench.record(task).attempts == 4


def test_tasks_that_are_badly_called_never_count_against_the_worker(bench: Bench) -> None:
    bench.put(
        sample_task("1", entry=FunctionEntry("nowhere:f")),
        sample_task("2", entry=FunctionEntry("worker_bodies:nothing")),
        sample_task("3", entry=WorkflowEntry("worker_bodies", "nothing")),
        bench.function("pid", "too", "many"),
    )

    result = bench.run(max_consecutive_failures=1)

    assert (result.exit_code, result.failed) == (0, 4)
    reasons = {record.reason for record in bench.records.records(EXPERIMENT)}
    assert reasons == {EndReason.CONFIG_INVALID}


# draining


def test_worker_told_to_stop_asks_the_attempt_to_end_and_releases_it_unspent(bench: Bench) -> None:
    running_task, waiting = bench.function("wait", "slow", max_failures=1), bench.function("give")
    bench.put(running_task)
    with bench.running(look_ahead=4) as running:
        bench.began("slow")
        bench.put(waiting)
        assert wait_until(lambda: bench.records.totals(EXPERIMENT).counts[TaskState.LEASED] == 2)
        running.worker.stop("enough")
        result = running.join()

    assert (result.exit_code, result.reason, result.failed) == (0, "enough", 0)
    [note] = bench.notes(running_task)
    assert note.reason is EndReason.PREEMPTED
    assert bench.notes(waiting) == []
    counts = bench.records.totals(EXPERIMENT).counts
    assert (counts[TaskState.QUEUED], counts[TaskState.LEASED]) == (2, 0)


@pytest.mark.usefixtures("stored")
def test_attempt_that_ends_well_within_the_grace_is_recorded(bench: Bench) -> None:
    task = bench.function("polite", "kind")
    bench.put(task)
    with bench.running() as running:
        bench.began("kind")
        running.worker.stop()
        running.join()

    assert bench.record(task).value == "preempted"


@pytest.mark.usefixtures("stored")
def test_second_stop_ends_an_attempt_that_does_not_listen(bench: Bench) -> None:
    task = bench.function("stubborn", "deaf")
    bench.put(task)
    with bench.running(grace=timedelta(minutes=10)) as running:
        bench.began("deaf")
        running.worker.stop()
        assert wait_until(lambda: bool(bench.events("worker_draining")))
        assert running.result is None
        running.worker.stop()
        result = running.join()

    assert result.exit_code == 0
    assert [note.reason for note in bench.notes(task)] == [EndReason.PREEMPTED]


@pytest.mark.usefixtures("stored")
def test_attempt_that_outlives_the_grace_is_killed_and_released(bench: Bench) -> None:
    task = bench.function("stubborn", "deaf")
    bench.put(task)
    with bench.running(grace=timedelta(seconds=0.2)) as running:
        bench.began("deaf")
        running.worker.stop()
        running.join()

    assert [note.reason for note in bench.notes(task)] == [EndReason.PREEMPTED]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_worker_command_that_is_signalled_releases_its_task_and_exits_0(bench: Bench, number: signal.Signals) -> None:
    task = bench.function("wait", "slow")
    bench.put(task)
    worker = start_command(bench, "--grace", "5s")
    bench.began("slow")

    worker.send_signal(number)
    _, said = worker.communicate(timeout=240)

    assert worker.returncode == 0, said
    assert f"received {number.name}" in said
    assert bench.records.totals(EXPERIMENT).counts[TaskState.QUEUED] == 1
    assert [note.reason for note in bench.notes(task)] == [EndReason.PREEMPTED]


def test_worker_command_with_a_preemption_notice_drains_and_exits_0(bench: Bench, tmp_path: Path) -> None:
    task = bench.function("wait", "slow")
    bench.put(task)
    notice = tmp_path / "notice"
    worker = start_command(bench, RUNTIME_PREEMPTION_FILE=str(notice))
    bench.began("slow")

    notice.touch()
    _, said = worker.communicate(timeout=240)

    assert worker.returncode == 0, said
    assert "preemption notice" in said
    assert [note.reason for note in bench.notes(task)] == [EndReason.PREEMPTED]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_worker_of_a_job_that_is_signalled_says_so_by_its_exit_code(
    bench: Bench, number: signal.Signals, code: int
) -> None:
    bench.put(bench.function("wait", "slow"))
    worker = start_command(bench, "--grace", "5s", RUNTIME_JOB_ID="j-1")
    bench.began("slow")

    worker.send_signal(number)
    _, said = worker.communicate(timeout=240)

    assert worker.returncode == code, said
    assert bench.records.totals(EXPERIMENT).counts[TaskState.QUEUED] == 1


@pytest.mark.parametrize("there", [True, False], ids=["note", "nowhere for a note"])
def test_worker_of_a_job_with_a_preemption_notice_asks_to_be_started_again(
    bench: Bench, tmp_path: Path, there: bool
) -> None:
    task = bench.function("wait", "slow")
    bench.put(task)
    notice, note = tmp_path / "notice", tmp_path / "attempt" / "preempted"
    if there:
        note.parent.mkdir()
    job = {"RUNTIME_JOB_ID": "j-1", "RUNTIME_PREEMPTED_NOTE": str(note)}
    worker = start_command(bench, RUNTIME_PREEMPTION_FILE=str(notice), **job)
    bench.began("slow")

    (tmp_path / "written").write_text("going at noon\n")
    (tmp_path / "written").rename(notice)
    _, said = worker.communicate(timeout=240)

    assert worker.returncode == 75, said
    assert [each.reason for each in bench.notes(task)] == [EndReason.PREEMPTED]
    assert (note.read_text() if note.exists() else None) == ("going at noon\n" if there else None)


def test_worker_of_a_job_that_drains_itself_has_done_its_work(bench: Bench) -> None:
    worker = start_command(bench, "--idle-timeout", "0.1s", RUNTIME_JOB_ID="j-1")

    _, said = worker.communicate(timeout=240)

    assert worker.returncode == 0, said


def test_task_of_a_worker_that_is_a_job_cannot_speak_for_the_job(bench: Bench, tmp_path: Path) -> None:
    task = bench.command("sh", "-c", "echo ${RUNTIME_PREEMPTED_NOTE-none}")
    bench.put(task)
    note = str(tmp_path / "preempted")
    worker = start_command(bench, "--idle-timeout", "0.1s", RUNTIME_JOB_ID="j-1", RUNTIME_PREEMPTED_NOTE=note)

    _, said = worker.communicate(timeout=240)

    assert worker.returncode == 0, said
    assert bench.record(task).log == "none\n"


# orders


def test_running_task_that_is_cancelled_stops_and_its_record_stands(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = bench.function("wait", "slow")
    bench.put(task)
    with bench.running(lease=timedelta(seconds=1)) as running:
        bench.began("slow")
        now = datetime.now(UTC)
        bench.records.commit(cancelled_record(task.id, task.generation, task.experiment, now=now, by="a test"))
        assert wait_until(lambda: bool(bench.events("lease_lost")))
        bench.put(bench.function("give"))
        assert wait_until(lambda: bench.records.totals(EXPERIMENT).counts[TaskState.SUCCEEDED] == 1)
        running.worker.stop()
        result = running.join()

    assert bench.record(task).state is TaskState.CANCELLED
    assert (result.succeeded, result.failed) == (1, 0)


def test_running_task_of_a_cancelled_experiment_is_recorded_as_cancelled(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.worker.maintenance.RENEW_AT_LEAST_EVERY_S", 0.05)
    task = bench.function("wait", "slow", submitted_at=ago(seconds=5))
    bench.put(task)
    with bench.running():
        bench.began("slow")
        assert bench.open_queue().cancel_open(EXPERIMENT) == 1  # type: ignore[attr-defined]
        assert wait_until(lambda: bench.records.find(task.id, 1) is not None)

    assert bench.record(task).state is TaskState.CANCELLED


def test_paused_queue_hands_out_nothing_until_it_is_resumed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.worker.control.CONTROL_EVERY_S", 0.05)
    queue = bench.open_queue()
    queue.pause()
    task, calls = bench.function("give"), Counter[str]()
    bench.put(task)
    with bench.running(over=lambda queue: CountingQueue(queue, calls)):
        assert wait_until(lambda: calls["control"] >= 4)
        assert calls["lease"] == 0
        assert bench.records.find(task.id, 1) is None
        queue.resume()
        assert wait_until(lambda: bench.records.find(task.id, 1) is not None)
    queue.close()


# kept output


def test_snapshot_bound_task_runs_that_code_and_its_record_names_it(bench: Bench, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "worker_bodies.py").write_text("def give(value):\n    return ['snapshot', value]\n")
    identity = take_snapshot(tree, bench.records)
    bound, free = bench.function("give", 1, key="bound", snapshot=identity), bench.function("give", 1, key="free")
    bench.put(bound, free)

    bench.run()

    assert (bench.record(bound).value, bench.record(bound).code) == (["snapshot", 1], identity)
    assert bench.record(free).value == 1
    assert bench.record(free).code != identity


def test_task_bound_to_code_that_is_gone_fails_and_says_which(bench: Bench) -> None:
    missing = "sha256:" + "0" * 64
    task = bench.function("give", snapshot=missing, max_failures=1)
    bench.put(task)

    bench.run()

    record = bench.record(task)
    assert record.state is TaskState.FAILED
    assert missing in (record.message or "")


def test_outputs_of_the_attempt_that_succeeded_are_kept_and_named(bench: Bench) -> None:
    task, plain = bench.function("write", "the result"), bench.function("give")
    bench.put(task, plain)

    bench.run()

    url = bench.record(task).outputs_url
    assert url is not None
    assert bench.record(task).token in url
    assert (Path(url) / "result.txt").read_text() == "the result"
    assert bench.record(plain).outputs_url is None


def test_scratch_of_an_attempt_is_gone_after_it(bench: Bench) -> None:
    bench.put(bench.function("scratch"))

    assert bench.run().succeeded == 1


@pytest.mark.parametrize("kind", ["embedded", "folder"])
def test_large_value_is_kept_whole(bench: Bench, kind: str) -> None:
    import json

    queue, records = (bench.open_queue(), bench.records) if kind == "embedded" else open_pair_with_folder(bench)
    value = [["é" * 100] * 10 for _ in range(100)]
    task = bench.function("give", value, key="large")
    queue.put([task])

    bench.run(queue)

    record = bench.record(task, records=records)
    assert record.value is None
    assert record.value_url is not None
    assert json.loads(records.get_blob(record.value_url)) == value


def test_short_log_lies_in_the_record_as_it_came(bench: Bench) -> None:
    task = bench.command("sh", "-c", "printf 'to stdout\\n'; printf 'to stderr\\n' >&2")
    bench.put(task)

    bench.run()

    assert bench.record(task).log == "to stdout\nto stderr\n"
    assert bench.record(task).log_url is None


def test_long_log_lies_whole_beside_the_record_which_has_its_end(bench: Bench) -> None:
    task = bench.function("talk", 20_000)
    bench.put(task)

    bench.run()

    record = bench.record(task)
    assert record.log.endswith("line 19999\n")
    assert record.log_url is not None
    whole = b"".join(bench.records.read_log(record.log_url)).decode()
    assert whole == "".join(f"line {number}\n" for number in range(20_000))


def test_log_that_outgrows_its_limit_has_its_beginning_and_its_end_in_the_store(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.worker.completion.LOG_LIMIT_BYTES", 1000)
    monkeypatch.setattr("runtime.worker.completion.LOG_EVERY_S", 0.01)
    monkeypatch.setattr("runtime.worker.completion.REMOTE_LOG_EVERY_S", 0.01)
    task = bench.command("sh", "-c", "yes first | head -n 1000; yes second | head -n 100000; echo third")
    bench.put(task)

    bench.run()

    record = bench.record(task)
    assert record.log_url is not None
    whole = b"".join(bench.records.read_log(record.log_url)).decode()
    assert whole.startswith("first\nfirst\n")
    assert "\n[runtime: the log outgrew 1000B; what follows is its end]\n" in whole
    assert whole.endswith("second\nthird\n")
    assert len(whole) < 70_000


def test_metrics_of_an_attempt_are_recorded_and_the_last_one_counts(bench: Bench) -> None:
    task = bench.function("report")
    bench.put(task)

    bench.run()

    assert bench.record(task).metrics == {"loss": 0.25, "accuracy": 0.9}


# processes


def test_worker_that_reuses_processes_runs_tasks_in_one(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    # If a task were slow, the tasks leased ahead would go back, and the process would be replaced.
    monkeypatch.setattr("runtime.worker.dispatch.LOOK_AHEAD_S", 600.0)
    tasks = [bench.function("pid", key=str(n)) for n in range(4)]
    bench.put(*tasks)

    bench.run(reuse_process=True)

    assert len({bench.record(task).value for task in tasks}) == 1


def test_worker_runs_each_task_in_a_process_of_its_own(bench: Bench) -> None:
    tasks = [bench.function("pid", key=str(n)) for n in range(4)]
    bench.put(*tasks)

    bench.run()

    assert len({bench.record(task).value for task in tasks}) == 4


def test_worker_with_slots_runs_as_many_at_a_time(bench: Bench) -> None:
    bench.put(*(bench.function("wait", f"w{n}") for n in range(3)))
    calls = Counter[str]()
    with bench.running(over=lambda queue: CountingQueue(queue, calls), slots=2, look_ahead=0):
        bench.began("w0")
        bench.began("w1")
        tended = calls["tend"]
        assert wait_until(lambda: calls["tend"] > tended)
        assert not (bench.code / "w2.began").exists()
        bench.let_go("w1")
        bench.began("w2")


# trouble


class StubbornQueue:
    """Forwards every call; the first calls of some methods fail."""

    def __init__(self, queue: Queue, **failures: int) -> None:
        self._queue, self._failures = queue, failures

    def __getattr__(self, name: str) -> Any:
        if self._failures.get(name, 0) > 0:
            self._failures[name] -= 1
            return self._fail
        return getattr(self._queue, name)

    def _fail(self, *_: Any, **__: Any) -> Any:
        raise StoreUnavailable("the store is away")


@pytest.mark.parametrize("call", ["lease", "settle", "release", "renew", "tend"])
def test_call_that_fails_once_is_made_again_and_nothing_is_lost(
    bench: Bench, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.tasks.retry_policy.FIRST_DELAY", timedelta(seconds=0.05))
    monkeypatch.setattr("runtime.worker.maintenance.RENEW_AT_LEAST_EVERY_S", 0.05)
    again, plain = bench.function("fail_first", "a"), bench.function("give", 1)
    bench.put(again, plain)

    result = bench.run(StubbornQueue(bench.open_queue(), **{call: 1}))

    assert result.succeeded == 2
    assert bench.record(again).attempts == 2
    if call != "renew":
        assert bench.events("trouble")


def test_task_that_was_recorded_elsewhere_is_neither_run_nor_counted_again(bench: Bench) -> None:
    queue, records = open_pair_with_folder(bench)
    task = bench.function("note", "again")
    queue.put([task])
    [lease] = queue.lease(1, worker="w-gone", ttl=timedelta(seconds=30))
    records.commit(recorded(task.id, lease.token))
    queue.release([Release(lease)])
    # The task comes back with a prior lease, as after a worker that died between recording and settling.
    queue.close()
    queue, records = open_pair_with_folder(bench)
    [lease] = queue.lease(1, worker="w-next", ttl=timedelta(seconds=30))
    lease.suspect = True
    queue.release([Release(lease)])

    result = bench.run(queue)

    assert not (bench.code / "order").exists()
    assert (result.succeeded, result.failed) == (0, 0)
    assert not list((bench.folder / "records" / "counters").glob("*/*/*")), "it counts for whoever recorded it"
    [record] = records.find_all(task.id)
    assert record.worker == "w-gone"


def recorded(task_id: str, token: str) -> Record:
    return Record(
        task_id=task_id,
        generation=1,
        experiment=EXPERIMENT,
        state=TaskState.SUCCEEDED,
        token=token or new_token(),
        reason=EndReason.SUCCEEDED,
        ended_at=datetime.now(UTC),
        worker="w-gone",
    )
