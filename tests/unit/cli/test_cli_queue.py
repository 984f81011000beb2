"""`runtime queue`, `cancel`, `retry`, `explain` and `logs` as typed."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime.cli import logs as logs_command
from runtime.cli.main import main
from runtime.client.tasks.redrive import read_dead
from runtime.end_reasons import EndReason
from runtime.queues.sqlite.queue import SqliteQueue
from runtime.stack.open import OpenStack
from runtime.tasks.model import TaskState
from runtime.testing import sample_task
from tests.verbs_support import Bench

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setenv("RUNTIME_DATA_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO())  # without a terminal
    bench = Bench.sqlite(tmp_path, "local.db")
    yield bench
    bench.close()


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run_command(*args: str) -> tuple[int, str, str]:
        code = main(list(args))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run_command


class Person(io.StringIO):
    """A terminal whose user types this answer."""

    def isatty(self) -> bool:
        return True


def counts(bench: Bench, experiment: str = "sample") -> dict[str, int]:
    return {state.value: count for state, count in bench.records.totals(experiment).counts.items() if count}


# queues


def test_queue_list_has_each_queue_once(bench: Bench, run: Run) -> None:
    bench.put(sample_task())
    bench.report()

    code, out, _ = run("queue", "list")

    assert (code, out) == (0, "default\tsqlite\tno\t1\n")


def test_queue_stats_are_numbers_and_a_reason(bench: Bench, run: Run) -> None:
    bench.put(sample_task("1"), sample_task("2"))
    bench.lease()

    out = run("queue", "stats")[1]

    assert out == "default\t1\t0\t1\t0\t0\t0\tno live worker serves queue `default`\n"


def test_queue_peek_shows_the_next_tasks_and_leases_none(bench: Bench, run: Run) -> None:
    first, second = sample_task("1"), sample_task("2", priority=5)
    bench.put(first, second)
    before = bench.queue().depth()

    out = run("queue", "peek", "-n", "1")[1]

    assert out.split("\t")[0] == second.id
    assert bench.queue().depth() == before


def test_pause_and_resume_are_seen_by_who_leases(bench: Bench, run: Run) -> None:
    bench.put(sample_task())

    assert run("queue", "pause")[0] == 0
    assert bench.records.control("default").paused
    assert "paused" in run("status")[1]
    assert run("queue", "resume")[0] == 0
    assert not bench.records.control("default").paused


@pytest.mark.parametrize(
    "command",
    [
        ["queue", "purge"],
        ["queue", "repair"],
        ["queue", "dead", "purge", "--all"],
        ["queue", "dead", "redrive", "--all"],
        ["retry", "--failed", "sample"],
        ["cancel", "sample"],
    ],
)
def test_what_cannot_be_undone_asks_and_is_refused_where_nobody_answers(
    bench: Bench, run: Run, command: list[str]
) -> None:
    bench.put(sample_task("1"), sample_task("2"))
    bench.fail()
    before = counts(bench), bench.queue().depth(), bench.records.control("default")

    code, _, err = run(*command)

    assert code == 2
    assert "hint: pass `--yes` to go on" in err
    assert (counts(bench), bench.queue().depth(), bench.records.control("default")) == before
    assert len(list(read_dead(bench.records))) == 1


@pytest.mark.parametrize(("answer", "code", "left"), [("y\n", 0, {"cancelled": 2}), ("\n", 2, {"queued": 2})])
def test_purge_does_what_the_person_answers(
    bench: Bench, run: Run, monkeypatch: pytest.MonkeyPatch, answer: str, code: int, left: dict[str, int]
) -> None:
    bench.put(sample_task("1"), sample_task("2"))
    monkeypatch.setattr(sys, "stdin", Person(answer))

    returned, _, err = run("queue", "purge")

    assert (returned, counts(bench)) == (code, left)
    assert "cancel 2 tasks in queue `default` of stack `local`? [y/N]" in err


def test_resume_says_if_somebody_paused_in_the_same_moment(
    bench: Bench, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.put(sample_task())
    bench.queue().pause()
    ring = SqliteQueue.resume

    def resume(queue: SqliteQueue) -> None:
        ring(queue)
        bench.queue().pause()

    with monkeypatch.context() as patched:
        patched.setattr(SqliteQueue, "resume", resume)
        raced = run("queue", "resume")
    alone = run("queue", "resume")

    assert (raced[0], "stays so" in raced[2]) == (0, True)
    assert (alone[0], "hands out tasks again" in alone[2]) == (0, True)


def test_purge_that_is_interrupted_says_how_to_go_on(bench: Bench, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.put(sample_task())

    def interrupted(queue: SqliteQueue, **_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(SqliteQueue, "purge", interrupted)

    code, _, err = run("queue", "purge", "--yes")

    assert code == 130
    assert "run the same command again to go on" in err


def test_purge_with_yes_asks_nobody(bench: Bench, run: Run) -> None:
    bench.put(sample_task())

    assert run("queue", "purge", "--yes")[0] == 0
    assert counts(bench) == {"cancelled": 1}


def test_repair_says_what_it_did(bench: Bench, run: Run) -> None:
    code, _, err = run("queue", "repair", "--yes")

    assert code == 0
    assert "0 published again" in err


def test_repair_of_an_experiment_that_is_not_there_is_refused(bench: Bench, run: Run) -> None:
    run("submit", "--no-snapshot", "--experiment", "sweep", "--", "true")

    code, out, err = run("queue", "repair", "--experiment", "swep", "--yes")

    assert (code, out) == (2, "")
    assert err.startswith("error: no experiment named `swep`")
    assert run("queue", "repair", "--experiment", "sweep", "--yes")[0] == 0


def test_another_queue_is_named_first(bench: Bench, run: Run) -> None:
    run("submit", "--no-snapshot", "--queue", "training", "--", "true")
    run("queue", "pause", "training")

    assert bench.records.control("training").paused
    assert not bench.records.control("default").paused


# dead letters


def test_dead_list_and_show(bench: Bench, run: Run) -> None:
    bench.put(sample_task("1"), sample_task("2"))
    record = bench.fail(message="Traceback\nValueError: nan")
    bench.fail(reason=EndReason.OOM, message="killed at 16GiB")

    listed = run("queue", "dead", "list")[1].splitlines()
    ooms = run("queue", "dead", "list", "--reason", "oom", "--experiment", "sample")[1].splitlines()
    shown = run("queue", "dead", "show", record.task_id[:12])[1]

    assert len(listed) == 2
    assert [line.split("\t")[4] for line in ooms] == ["killed at 16GiB"]
    assert "entry       true" in shown
    assert shown.endswith("Traceback\nValueError: nan\n")


def test_dead_list_says_that_there_are_more(bench: Bench, run: Run) -> None:
    bench.put(*(sample_task(str(number)) for number in range(3)))
    for _ in range(3):
        bench.fail()

    _, out, err = run("queue", "dead", "list", "-n", "2")

    assert len(out.splitlines()) == 2
    assert "more than 2" in err


def test_dead_show_of_a_task_that_is_none_is_refused(bench: Bench, run: Run) -> None:
    task = sample_task()
    bench.put(task)

    code, _, err = run("queue", "dead", "show", task.id)

    assert code == 2
    assert err.endswith(f"hint: runtime explain {task.id}\n")


def test_dead_redrive_by_experiment_and_reason(bench: Bench, run: Run) -> None:
    bench.put(sample_task("1"), sample_task("2"), sample_task("3", experiment="other"))
    oom = bench.fail(reason=EndReason.OOM)
    bench.fail()
    bench.fail()

    code, out, err = run("queue", "dead", "redrive", "sample", "--reason", "oom", "--yes")

    assert (code, out) == (0, f"{oom.task_id}\t2\tdefault\t-\n")
    assert "1 queued again" in err
    assert len(list(read_dead(bench.records))) == 2


def test_dead_redrive_needs_a_choice(bench: Bench, run: Run) -> None:
    assert run("queue", "dead", "redrive")[0] == 2
    assert run("queue", "dead", "redrive", "sample", "--all")[0] == 2


def test_dead_redrive_of_nothing_is_done(bench: Bench, run: Run) -> None:
    assert run("queue", "dead", "redrive", "--all", "--yes") == (0, "", "nothing there waits to be tried again\n")


def test_malformed_dead_letters_are_shown_refused_and_purged(
    bench: Bench, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Bench.memory()
    memory.bury_malformed("t-bad1", '{"project": 7}', "task is malformed: `project` is a number")
    monkeypatch.setattr(OpenStack, "records", property(lambda _: memory.records))

    shown = run("queue", "dead", "show", "t-bad1")
    redriven = run("queue", "dead", "redrive", "--all", "--yes")
    purged = run("queue", "dead", "purge", "t-bad1", "--yes")

    assert '{"project": 7}' in shown[1]
    assert redriven[0] == 2
    assert 'cannot run `t-bad1`, which could not be parsed: {"project": 7}' in redriven[2]
    assert purged[0] == 0
    assert run("queue", "dead", "list")[1] == ""


def test_dead_purge_keeps_the_totals(bench: Bench, run: Run) -> None:
    bench.put(sample_task("1"), sample_task("2"))
    bench.fail()
    bench.fail()

    code, _, err = run("queue", "dead", "purge", "--all", "--yes")

    assert (code, err) == (0, "2 thrown away\n")
    assert run("queue", "dead", "list")[1] == ""
    assert counts(bench) == {"failed": 2}


# cancel


def test_cancel_tasks_says_what_became_of_each(bench: Bench, run: Run) -> None:
    queued, done = sample_task("1"), sample_task("2", priority=1)
    bench.put(queued, done)
    bench.succeed()

    code, out, _ = run("cancel", queued.id, done.id)

    assert code == 0
    assert out.splitlines() == [
        f"{queued.id}\tcancelled\tit will not run",
        f"{done.id}\tsucceeded\tit had already succeeded",
    ]


def test_cancel_experiment_with_yes(bench: Bench, run: Run) -> None:
    bench.put(*(sample_task(str(number)) for number in range(3)))

    code, out, _ = run("cancel", "last", "--yes")

    assert code == 0
    assert out == "sample\tcancelled\t3 tasks cancelled, running ones stop within 10 s\n"
    assert counts(bench) == {"cancelled": 3}


def test_cancel_one_unknown_of_several_cancels_none(bench: Bench, run: Run) -> None:
    task = sample_task()
    bench.put(task)

    assert run("cancel", task.id, "t-nowhere")[0] == 2
    assert counts(bench) == {"queued": 1}


# retry


def test_retry_of_failed_tasks_and_its_refusals(bench: Bench, run: Run) -> None:
    failed, done = sample_task("1"), sample_task("2")
    bench.put(failed, done)
    bench.fail()
    bench.succeed()

    code, out, err = run("retry", failed.id, done.id)

    assert code == 2
    assert out.splitlines() == [f"{failed.id}\t2\tdefault\t-", f"{done.id}\t1\t-\tit succeeded"]
    assert "1 queued again, 1 refused" in err
    assert [task.generation for task in bench.queue().peek(5)] == [2]


def test_retry_of_a_task_that_succeeded_is_refused(bench: Bench, run: Run) -> None:
    task = sample_task()
    bench.put(task)
    bench.succeed()

    code, _, err = run("retry", task.id)

    assert code == 2
    assert f"  `{task.id}`: it succeeded" in err


def test_retry_all_failed_of_an_experiment(bench: Bench, run: Run) -> None:
    bench.put(*(sample_task(str(number)) for number in range(3)))
    bench.fail()
    bench.fail(reason=EndReason.OOM)
    bench.succeed()

    assert run("retry", "--failed", "last", "--reason", "oom", "--yes")[0] == 0
    assert counts(bench) == {"queued": 1, "failed": 1, "succeeded": 1}
    assert run("retry", "--failed", "last", "--yes")[0] == 0
    assert counts(bench) == {"queued": 2, "succeeded": 1}


@pytest.mark.parametrize("args", [[], ["t-1", "--failed", "sample"], ["t-1", "--reason", "oom"]])
def test_retry_needs_tasks_or_an_experiment(bench: Bench, run: Run, args: list[str]) -> None:
    assert run("retry", *args)[0] == 2


# explain and logs


def test_explain_prints_sentence_evidence_and_next_step(bench: Bench, run: Run) -> None:
    task = sample_task()
    bench.put(task)

    code, out, _ = run("explain", task.id)

    lines = out.splitlines()
    assert code == 0
    assert lines[0] == f"task `{task.id}` waits because no live worker serves queue `default`"
    assert all(line.startswith("  ") for line in lines[1:-1])
    assert lines[-1] == "next: runtime worker --queue default"


def test_explain_experiment_and_worker(bench: Bench, run: Run) -> None:
    bench.put(sample_task())
    bench.report("w-node1")

    assert run("explain", "sample")[1].startswith("1 task of experiment `sample` waits: ")
    assert run("explain", "w-node1")[1].startswith("worker `w-node1` is idle")


def test_explain_unknown_id_is_refused(bench: Bench, run: Run) -> None:
    code, _, err = run("explain", "t-nowhere")

    assert code == 2
    assert err.startswith("error: no task named `t-nowhere`\n")


def test_logs_go_to_stdout_byte_for_byte(bench: Bench, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    task = sample_task()
    bench.put(task)
    bench.succeed(log=b"loss \xff\n".decode(errors="surrogateescape"))

    assert main(["logs", task.id]) == 0
    assert capfdbinary.readouterr().out == b"loss \xff\n"


def test_logs_of_another_attempt(bench: Bench, run: Run) -> None:
    task = sample_task()
    bench.put(task)
    note = bench.try_again(log="first\n")
    bench.succeed(log="second\n", attempts=2)

    newest, older = run("logs", task.id), run("logs", task.id, "--attempt", note.token)

    assert (newest[1], older[1]) == ("second\n", "first\n")
    assert older[2] == f"-- attempt {note.token} on worker w-one\n"


def test_logs_follow_interrupted_says_how_to_come_back(bench: Bench, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    task = sample_task()
    bench.put(task)
    bench.lease()

    def interrupted(*_: object, **__: object) -> Iterator[bytes]:
        yield b"epoch 1\n"
        raise KeyboardInterrupt

    monkeypatch.setattr(logs_command, "follow", interrupted)

    code, out, err = run("logs", "-f", task.id)

    assert (code, out) == (130, "epoch 1\n")
    assert f"`runtime logs -f {task.id}` comes back" in err
    assert counts(bench) == {"leased": 1}


def test_every_help_has_examples(run: Run) -> None:
    commands: list[list[str]] = [[name] for name in ("status", "logs", "explain", "cancel", "retry")]
    commands += [["queue", name] for name in ("list", "stats", "peek", "pause", "resume", "purge", "repair")]
    commands += [["queue", "dead", name] for name in ("list", "show", "redrive", "purge")]

    for command in commands:
        code, out, _ = run(*command, "--help")
        assert code == 0
        assert f"  runtime {' '.join(command)}" in out.partition("Examples:")[2], command


def test_exit_of_a_json_error_keeps_stdout_empty(bench: Bench, run: Run) -> None:
    code, out, err = run("explain", "t-nowhere", "-o", "json")

    assert (code, out) == (2, "")
    assert err
    with pytest.raises(json.JSONDecodeError):
        json.loads(out)


def test_states_in_the_tables_are_those_of_the_vocabulary(bench: Bench, run: Run) -> None:
    bench.put(sample_task())
    fields: dict[str, Any] = json.loads(run("status", "-o", "json")[1])

    assert list(fields["totals"]) == [state.value for state in TaskState]
