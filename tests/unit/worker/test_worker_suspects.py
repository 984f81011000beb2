"""Tasks whose workers were lost: which become suspects, how a suspect gets its turn, and that no other task waits."""

from __future__ import annotations

import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from runtime.clock import machine_id
from runtime.end_reasons import EndReason
from runtime.queues.base import Queue, WaitingLookup
from runtime.tasks.history import EndedNote, Release, StartedMark
from runtime.tasks.model import FunctionEntry, Task, TaskState
from runtime.testing import sample_task
from tests.services_support import wait_until
from tests.unit.worker.worker_bench import Bench, ago, bench, open_pair_with_folder, start_command

__all__ = ["bench"]

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="attempts' trees are seen through /proc")

HOUR = timedelta(hours=1)


def lose(queue: Queue, *tasks: Task, times: int = 2, alone: bool = True, since: timedelta = HOUR) -> None:
    """Lose each task with its worker `times` times, `since` ago."""
    for number in range(times):
        ids = {task.id for task in tasks}
        leases = queue.lease(len(tasks), worker="w-gone", ttl=timedelta(minutes=1))
        assert {lease.task.id for lease in leases} == ids
        at = ago(seconds=since.total_seconds() - number)
        queue.release(
            [
                Release(
                    lease,
                    note=EndedNote(
                        token=lease.token,
                        reason=EndReason.LOST,
                        ended_at=at,
                        started_at=at - timedelta(seconds=1),
                        worker="w-gone",
                        alone=alone,
                        machine=machine_id(),
                    ),
                )
                for lease in leases
            ]
        )


@pytest.fixture(params=["sqlite", "folder"])
def queue(request: pytest.FixtureRequest, bench: Bench) -> Queue:
    """The embedded queue, with its records in the same file or in a folder."""
    if request.param == "folder":
        queue, bench.records = open_pair_with_folder(bench)
        bench.open_queue = lambda: open_pair_with_folder(bench)[0]  # type: ignore[method-assign]
        return queue
    return bench.open_queue()


def has_begun(bench: Bench, name: str) -> bool:
    return (bench.code / f"{name}.began").exists()


def test_tasks_that_were_lost_together_run_side_by_side_again(bench: Bench, queue: Queue) -> None:
    names = "abcd"
    lost = [bench.function("wait", name) for name in names]
    queue.put(lost)
    lose(queue, *lost, times=3, alone=False)

    with bench.running(slots=4):
        for name in names:
            bench.began(name)  # None has been released, so all four run.
        for name in names:
            bench.let_go(name)
        assert wait_until(lambda: all(bench.records.find(task.id, 1) for task in lost))


def test_line_goes_on_while_a_suspect_waits_for_a_free_moment(bench: Bench, queue: Queue) -> None:
    suspect = bench.function("note", "suspect")
    queue.put([suspect])
    lose(queue, suspect)
    behind = [bench.function("note", f"{n}") for n in range(6)]
    long = bench.function("wait", "long")
    queue.put([long, *behind])

    with bench.running(slots=2):
        assert wait_until(lambda: all(bench.records.find(task.id, 1) for task in behind))
        assert bench.records.find(suspect.id, 1) is None
        bench.let_go("long")
        assert wait_until(lambda: bench.records.find(suspect.id, 1) is not None)

    assert (bench.code / "order").read_text().split()[-1] == "suspect"


def test_suspect_that_has_waited_gets_the_next_slot_beside_what_runs(
    bench: Bench, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.worker.dispatch.ALONE_PATIENCE_S", 0.5)
    suspect, long = bench.function("give", 1), bench.function("wait", "long")
    queue.put([suspect])
    lose(queue, suspect)
    queue.put([long, *(bench.function("note", f"{n}") for n in range(3))])

    with bench.running(slots=2):
        bench.began("long")
        assert wait_until(lambda: bench.records.find(suspect.id, 1) is not None)
        assert bench.records.find(long.id, 1) is None
        bench.let_go("long")


@pytest.mark.parametrize("reuse", [False, True])
def test_suspect_that_has_waited_gets_a_slot_though_quick_tasks_never_end(
    bench: Bench, queue: Queue, monkeypatch: pytest.MonkeyPatch, reuse: bool
) -> None:
    monkeypatch.setattr("runtime.worker.dispatch.ALONE_PATIENCE_S", 0.3)
    suspect = bench.function("give", "suspect")
    queue.put([suspect])
    lose(queue, suspect)
    queue.put([bench.function("give", n) for n in range(200)])
    more = 200

    def fed() -> bool:
        nonlocal more
        depth = queue.depth()
        if depth is not None and depth.total < 100:
            queue.put([bench.function("give", more + n) for n in range(100)])
            more += 100
        return bench.records.find(suspect.id, 1) is not None

    with bench.running(slots=2, reuse_process=reuse):
        assert wait_until(fed)


def test_suspects_run_one_at_a_time_until_one_has_succeeded(bench: Bench, queue: Queue) -> None:
    names = "abc"
    suspects = [bench.function("wait", name) for name in names]
    queue.put(suspects)
    lose(queue, *suspects)

    def begun() -> list[str]:
        return [name for name in names if has_begun(bench, name)]

    with bench.running(slots=3):
        # Their histories are read in parallel, so any of them may begin first.
        assert wait_until(lambda: bool(begun()))
        other = bench.function("give", 1)
        queue.put([other])  # Other tasks start beside it as they come.
        assert wait_until(lambda: bench.records.find(other.id, 1) is not None)
        (first,) = begun()
        bench.let_go(first)
        for name in names:
            bench.began(name)
        for name in names:
            bench.let_go(name)
        assert wait_until(lambda: all(bench.records.find(task.id, 1) for task in suspects))


def test_more_suspects_than_slots_leave_room_for_the_line(bench: Bench, queue: Queue) -> None:
    suspects = [bench.function("wait", f"s{n}") for n in range(9)]
    queue.put(suspects)
    lose(queue, *suspects)
    queue.put([long := bench.function("wait", "long"), *(behind := [bench.function("give", n) for n in range(9)])])

    with bench.running(slots=3):
        assert wait_until(lambda: all(bench.records.find(task.id, 1) for task in behind))
        assert bench.records.find(long.id, 1) is None
        for name in ("long", *(f"s{n}" for n in range(9))):
            bench.let_go(name)
        assert wait_until(lambda: bench.records.find(long.id, 1) is not None)


def test_task_that_was_lost_waits_before_its_next_attempt_and_the_line_does_not(bench: Bench, queue: Queue) -> None:
    suspect, other = bench.function("give", 1), bench.function("give", 2)
    queue.put([suspect])
    lose(queue, suspect, times=12, alone=False, since=timedelta(seconds=12))
    queue.put([other])

    result = bench.run(bench.open_queue(), max_tasks=1, idle_timeout=None)

    assert (result.succeeded, bench.record(other).value) == (1, 2)
    assert bench.records.find(suspect.id, 1) is None
    assert isinstance(queue, WaitingLookup)
    waiting = queue.find_waiting(suspect.id)
    assert waiting is not None
    assert waiting.due is not None


# the fence

REACH = """
import os, signal
from pathlib import Path


def worker():
    return int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1])


def reach():
    # Signal 0 reaches what may be signalled and does it no harm.
    refused = []
    targets = {"worker": worker(), "guardian": os.getppid(), "group": -os.getpgid(worker()), "all": -1, "self": os.getpid()}
    for name, pid in targets.items():
        try:
            os.kill(pid, 0)
        except PermissionError:
            refused.append(name)
    return refused


def kill_worker():
    os.kill(worker(), signal.SIGKILL)
"""
EVERYTHING = ["worker", "guardian", "group", "all"]


def reaching(bench: Bench, key: str, body: str = "reach", **fields: Any) -> Task:
    (bench.code / "reach.py").write_text(REACH)
    return sample_task(key, entry=FunctionEntry(f"reach:{body}", ()), **fields)


def test_suspect_that_kills_its_worker_fails_by_it_and_the_worker_lives(bench: Bench) -> None:
    task = reaching(bench, "crasher", "kill_worker", max_failures=1)
    bench.put(task)
    queue = bench.open_queue()
    lose(queue, task, times=3)
    queue.close()

    worker = start_command(bench, "--once")
    _, said = worker.communicate(timeout=240)

    assert worker.returncode == 0, said
    record = bench.record(task)
    assert (record.state, record.reason) == (TaskState.FAILED, EndReason.APP_FAILED)
    assert "Operation not permitted" in (record.message or "")
    assert "it ran fenced" in (record.message or "")


def test_suspect_reaches_itself_and_no_process_of_its_worker(bench: Bench, queue: Queue) -> None:
    fenced, plain = reaching(bench, "fenced"), reaching(bench, "plain")
    queue.put([fenced])
    lose(queue, fenced, times=3)
    queue.put([plain])

    bench.run(bench.open_queue())

    assert bench.record(fenced).value == EVERYTHING
    assert bench.record(plain).value == []


def test_suspect_is_the_first_that_the_kernel_ends_for_memory(bench: Bench, queue: Queue) -> None:
    task = bench.command("cat", "/proc/self/oom_score_adj")
    queue.put([task])
    lose(queue, task, times=3)

    bench.run(bench.open_queue())

    assert bench.record(task).log == "1000\n"


def test_command_of_a_suspect_is_fenced_too(bench: Bench, queue: Queue) -> None:
    # 0 is the shell's own process group; $g is its worker's.
    task = bench.command("sh", "-c", "g=$(awk '{print $4}' /proc/$PPID/stat); kill -0 $g || kill -0 0 && echo fenced")
    queue.put([task])
    lose(queue, task, times=3)

    bench.run(bench.open_queue())

    assert bench.record(task).log.endswith("fenced\n")
    assert "not permitted" in bench.record(task).log


@pytest.mark.parametrize("reuse", [False, True])
def test_attempt_after_a_fenced_one_runs_in_another_process(bench: Bench, queue: Queue, reuse: bool) -> None:
    fenced = bench.command("grep", "Seccomp:", "/proc/self/status")
    queue.put([fenced])
    lose(queue, fenced, times=3)
    free, shell = reaching(bench, "free"), bench.command("grep", "-h", "Seccomp:", "/proc/self/status")
    queue.put([free, shell])

    bench.run(bench.open_queue(), reuse_process=reuse)

    mine = Path("/proc/self/status").read_text().partition("Seccomp:")[2].split()[0]
    assert bench.record(fenced).log.split() == ["Seccomp:", "2"]
    assert bench.record(free).value == []
    assert bench.record(shell).log.split() == ["Seccomp:", mine]


# a queue that does not track holders


class Untracked:
    """The embedded queue without tracking of holders: begun attempts are on record in the record store."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self.traits = replace(queue.traits, tracks_holders=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.queue, name)


def test_attempts_without_an_end_are_losses_on_the_machine_that_they_name(bench: Bench) -> None:
    queue, records = open_pair_with_folder(bench)
    task = reaching(bench, "task")
    queue.put([task])
    for number in range(3):
        records.record_started(task, StartedMark(f"gone-{number}", f"w-{number}", ago(minutes=1), True, machine_id()))
    began: list[StartedMark] = []
    record_started = records.record_started
    records.record_started = lambda task, mark: began.append(mark) or record_started(task, mark)  # type: ignore[method-assign,func-returns-value]

    bench.run(Untracked(queue), slots=2)  # type: ignore[arg-type]

    assert bench.record(task, records=records).value == EVERYTHING  # Fenced, because all were lost on this machine.
    notes = records.history(task.id, 1).ended
    assert {(note.reason, note.alone, note.machine) for note in notes} == {(EndReason.LOST, True, machine_id())}
    # A suspect without other suspects beside it counts as alone, even on a worker with more slots.
    assert [(mark.alone, mark.machine) for mark in began] == [(True, machine_id())]
