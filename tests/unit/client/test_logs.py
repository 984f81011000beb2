"""The places of attempts' output, and following it until the task ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runtime.client.tasks.logs import AttemptLog, choose_log, find_logs, follow, read_log
from runtime.client.tasks.redrive import read_dead, redrive
from runtime.client.tasks.task_facts import read_standing
from runtime.errors import NotPossible, UnknownName
from runtime.tasks.history import Lease
from runtime.testing import sample_task
from tests.verbs_support import Bench


@pytest.fixture(params=["memory", "sqlite"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    bench = Bench.memory() if request.param == "memory" else Bench.sqlite(tmp_path)
    yield bench
    bench.close()


def logs_of(bench: Bench, task_id: str) -> list[AttemptLog]:
    return find_logs(bench.records, read_standing(bench.records, task_id))


def text_of(bench: Bench, log: AttemptLog) -> str:
    return b"".join(read_log(bench.records, log)).decode(errors="surrogateescape")


def write(bench: Bench, lease: Lease, text: str) -> str:
    return bench.records.append_log(lease.task.id, lease.token, text.encode())


def test_short_log_is_read_from_the_record(bench: Bench) -> None:
    task = sample_task()
    bench.put(task)
    bench.succeed(log="epoch 1\nepoch 2\n")

    [log] = logs_of(bench, task.id)

    assert text_of(bench, log) == "epoch 1\nepoch 2\n"


def test_long_log_is_read_whole_from_the_store_and_not_from_the_record(bench: Bench) -> None:
    task = sample_task()
    bench.put(task)
    lease = bench.lease()
    url = write(bench, lease, "the whole of it")
    bench.succeed(lease, log="end of it", log_url=url)

    [log] = logs_of(bench, task.id)

    assert text_of(bench, log) == "the whole of it"


def test_log_of_bytes_that_are_no_text_comes_back_as_it_was(bench: Bench) -> None:
    task = sample_task()
    bench.put(task)
    bench.succeed(log=b"\xff\xfe loss".decode(errors="surrogateescape"))

    [log] = logs_of(bench, task.id)

    assert b"".join(read_log(bench.records, log)) == b"\xff\xfe loss"


def test_running_attempt_is_read_as_far_as_it_has_written(bench: Bench) -> None:
    task = sample_task()
    bench.put(task)
    lease = bench.lease("w-seven")
    write(bench, lease, "epoch 1\n")

    [log] = logs_of(bench, task.id)

    assert (log.state, log.worker, text_of(bench, log)) == ("leased", "w-seven", "epoch 1\n")


def test_each_attempt_is_listed_oldest_first_over_generations(bench: Bench) -> None:
    task = sample_task()
    bench.put(task)
    first = bench.try_again(log="first\n")
    bench.clock.advance(seconds=1)
    second = bench.fail(log="second\n", attempts=2)
    list(redrive(bench, read_dead(bench.records), now=bench.now))
    third = bench.succeed(log="third\n")

    logs = logs_of(bench, task.id)

    assert [(log.token, log.generation, text_of(bench, log)) for log in logs] == [
        (first.token, 1, "first\n"),
        (second.token, 1, "second\n"),
        (third.token, 2, "third\n"),
    ]
    assert choose_log(task.id, logs) == logs[-1]
    assert choose_log(task.id, logs, first.token[:6]) == logs[0]


def test_attempt_that_does_not_exist_names_those_that_do(bench: Bench) -> None:
    task = sample_task()
    bench.put(task)
    record = bench.succeed()

    with pytest.raises(UnknownName) as unknown:
        choose_log(task.id, logs_of(bench, task.id), "nope")

    assert unknown.value.known == [record.token]


def test_task_that_has_not_started_has_no_log_and_says_where_to_ask(bench: Bench) -> None:
    task = sample_task()
    bench.put(task)

    with pytest.raises(NotPossible) as refused:
        choose_log(task.id, logs_of(bench, task.id))

    assert f"runtime explain {task.id}" in (refused.value.hint or "")


def test_task_cancelled_before_a_start_has_no_log(bench: Bench) -> None:
    task = sample_task()
    bench.put(task)
    bench.queue().purge()

    assert logs_of(bench, task.id) == []


class Script:
    """Replaces the pause between two looks, and runs the next step each time."""

    def __init__(self, *steps: Callable[[], object]) -> None:
        self._steps = list(steps)

    def __call__(self, _: float) -> None:
        assert self._steps, "it looks again though the task has ended"
        self._steps.pop(0)()


def test_follow_prints_each_byte_once_until_the_record(bench: Bench) -> None:
    task = sample_task()
    bench.put(task)
    lease = bench.lease()
    url = write(bench, lease, "one ")

    def end() -> None:
        write(bench, lease, "three")
        bench.succeed(lease, log="two three", log_url=url)

    script = Script(lambda: write(bench, lease, "two "), lambda: None, end)

    pieces = list(follow(bench.records, task.id, sleep=script))

    assert b"".join(pieces) == b"one two three"


def test_follow_waits_for_the_start_of_a_queued_task(bench: Bench) -> None:
    task = sample_task()
    bench.put(task)
    said: list[AttemptLog] = []

    pieces = list(
        follow(
            bench.records, task.id, said=said.append, sleep=Script(lambda: None, lambda: bench.succeed(log="quick\n"))
        )
    )

    assert b"".join(pieces) == b"quick\n"
    assert len(said) == 1


def test_follow_goes_on_with_the_next_attempt(bench: Bench) -> None:
    task = sample_task()
    bench.put(task)
    lease = bench.lease()
    write(bench, lease, "first ")
    said: list[AttemptLog] = []

    def fail() -> None:
        write(bench, lease, "failed ")
        bench.try_again(lease, log="first failed ")

    def second() -> None:
        bench.clock.advance(seconds=1)
        bench.succeed(log="second", attempts=2)

    pieces = list(follow(bench.records, task.id, said=said.append, sleep=Script(fail, second)))

    assert b"".join(pieces) == b"first failed second"
    assert [log.state for log in said] == ["leased", "succeeded"]


def test_follow_of_a_task_that_has_ended_prints_its_log_and_returns(bench: Bench) -> None:
    task = sample_task()
    bench.put(task)
    bench.try_again(log="old\n")
    bench.clock.advance(seconds=1)
    bench.fail(log="new\n", attempts=2)

    assert b"".join(follow(bench.records, task.id, sleep=Script())) == b"new\n"
