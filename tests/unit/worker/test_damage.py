"""Undecodable data in a store is reported and skipped, or counts by its name: no verb stops at it."""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime.cli.main import main
from runtime.client.resolve_id import find_submitted, identify
from runtime.client.tasks.cancel import cancel
from runtime.client.tasks.explain import explain, read_facts
from runtime.client.tasks.logs import find_logs
from runtime.client.tasks.redrive import dead_letter, read_dead, redrive, retry
from runtime.client.tasks.repair import repair
from runtime.client.tasks.status import read_experiment, read_overview, read_task
from runtime.client.tasks.submit import Submission, submit_tasks
from runtime.client.tasks.task_facts import read_standing
from runtime.client.tasks.wait import wait
from runtime.end_reasons import EndReason
from runtime.errors import NotPossible
from runtime.queues.sqlite.queue import open_sqlite
from runtime.records.control_commands import resume_order
from runtime.records.store import BlobRecords
from runtime.tasks.model import TaskState
from runtime.tasks.wire import encode_task
from runtime.testing import sample_task
from tests.conformance.records_cases import sample_record
from tests.verbs_support import Bench

DONE, BROKEN, HELD, WAITING = (sample_task(name) for name in ("done", "broken", "held", "waiting"))
OTHER = sample_task("other", experiment="other")
TASKS = (DONE, BROKEN, HELD, WAITING)

JUNK = {
    "empty": b"",
    "cut": b'{"schema":1,"task":"t-',
    "no UTF-8": b"\xff\xfe\x00",
    "no object": b"[1, 2]",
    "newer": b'{"schema":2,"what":"new"}',
    "of nothing": b'{"schema":1}',
    "nested": b"[" * 100_000,
}


def filled(bench: Bench) -> Bench:
    """A stack with one task of each outcome, and an unaffected experiment."""
    bench.put(OTHER)
    bench.succeed(bench.lease("w-other"), value=1)
    bench.put(*TASKS)
    bench.succeed(value={"loss": 0.5})
    bench.fail(bench.lease(), message="it broke")
    lease = bench.lease()
    if not bench.records.holds_tasks:
        bench.records.record_ended(HELD, ended_note(bench, "old"))
    bench.report("w-one", running=(lease.task.id,))
    bench.report("w-two")
    return bench


def ended_note(bench: Bench, token: str) -> Any:
    from runtime.tasks.history import EndedNote

    return EndedNote(token=token, reason=EndReason.PREEMPTED, ended_at=bench.now, worker="w-gone")


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench.memory()
    yield filled(bench)
    bench.close()


def blobs(bench: Bench) -> Any:
    assert isinstance(bench.records, BlobRecords)
    return bench.records.blobs


def keys(bench: Bench, prefix: str, part: str = "") -> list[str]:
    return [key for key in blobs(bench).list_keys(prefix) if part in key]


def damage(bench: Bench, prefix: str, data: bytes, part: str = "") -> None:
    found = keys(bench, prefix, part)
    assert found, f"nothing lies under {prefix}"
    for key in found:
        blobs(bench).put(key, data)


def look(bench: Bench) -> None:
    """Run every read-only verb on everything."""
    read_overview(bench, now=bench.now)
    read_overview(bench, now=bench.now, exact=True)
    for name in ("sample", "other"):
        read_experiment(bench, name, now=bench.now, failures=None)
        list(bench.records.records(name))
        list(bench.records.recorded(name))
        list(bench.records.tried_again(name))
        assert not wait(name, queue=bench.queue(), timeout=0).totals.get(TaskState.EXPIRED)
    for task in (*TASKS, OTHER):
        read_task(bench, task.id)
        explain(read_facts(bench, task.id, now=bench.now))
        find_logs(bench.records, read_standing(bench.records, task.id))
        assert identify(task.id, bench.records).name == task.id
        find_submitted(bench.records, task.id)
    [dead_letter(mark) for mark in read_dead(bench.records)]
    submission = Submission(experiment="sample", queue="default", tasks=tuple((task.id, 1) for task in TASKS))
    wait(submission, queue=bench.queue(), timeout=0)
    bench.queue().peek(10)
    bench.queue().outlook()
    identify("w-two", bench.records)
    bench.records.control("default")


def act(bench: Bench) -> None:
    """Run every verb that changes something, on everything; a refusal has a message."""
    list(redrive(bench, list(read_dead(bench.records)), now=bench.now))
    for task in TASKS:
        retry(bench, task.id, now=bench.now)
    repair(bench.queue(), bench.records, now=bench.now)
    for task in (WAITING, HELD):
        cancel(bench, identify(task.id, bench.records), now=bench.now)
    cancel(bench, identify("sample", bench.records), now=bench.now)
    bench.queue().pause()
    bench.queue().resume()
    bench.queue().tend()


def healthy(bench: Bench) -> None:
    """Check that the unaffected experiment is unchanged."""
    records = bench.records
    assert read_task(bench, OTHER.id).state is TaskState.SUCCEEDED
    assert records.totals("other", exact=True).counts[TaskState.SUCCEEDED] == 1
    assert [record.value for record in records.records("other")] == [1]


PLACES = {
    "record": ("records/", "sample"),
    "mark": ("marks/", ""),
    "ended note": ("attempts/", ".ended.json"),
    "started mark": ("attempts/", ".started.json"),
    "experiment": ("experiments/", "sample"),
    "worker": ("workers/", "w-one"),
    "order": ("orders/", ""),
}


def place(bench: Bench, name: str) -> tuple[str, str]:
    if name == "record":
        return f"records/{DONE.id[-8:]}/", ""
    if name == "order":
        bench.queue().pause()
        resume = resume_order(bench.records.control("default"), bench.now)
        assert resume is not None
        bench.records.put_order("default", resume)
    return PLACES[name]


@pytest.mark.parametrize("data", JUNK.values(), ids=JUNK)
@pytest.mark.parametrize("name", PLACES)
def test_object_that_cannot_be_decoded_stops_no_verb_and_is_said_once(
    bench: Bench, name: str, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    damage(bench, *place(bench, name)[:1], data, place(bench, name)[1])

    with caplog.at_level(logging.WARNING):
        look(bench)
        look(bench)
        said = [record.getMessage() for record in caplog.records]
        act(bench)
        look(bench)

    healthy(bench)
    assert len(said) == len(set(said)) >= 1
    assert all("passed over" in line for line in said)


def test_record_that_cannot_be_decoded_counts_as_what_its_length_says(bench: Bench) -> None:
    [key] = keys(bench, "records/", DONE.id)
    size = len(blobs(bench).get(key))
    blobs(bench).put(key, b"x" * size)

    seen = wait(Submission(experiment="sample", queue="default", tasks=((DONE.id, 1),)), queue=bench.queue(), timeout=0)
    task = read_task(bench, DONE.id)

    assert seen.complete
    assert seen.totals == {TaskState.SUCCEEDED: 1}
    with pytest.raises(NotPossible, match=DONE.id):
        seen.values()
    assert (task.state, task.has_value) == (TaskState.SUCCEEDED, False)
    assert "cannot be read" in (task.message or "")
    assert any("cannot be read" in line for line in explain(read_facts(bench, DONE.id, now=bench.now)).evidence)
    assert bench.records.totals("sample", exact=True).counts[TaskState.SUCCEEDED] == 1


def test_record_of_a_newer_release_keeps_what_this_one_understands(bench: Bench) -> None:
    [key] = keys(bench, "records/", BROKEN.id)
    fields = json.loads(blobs(bench).get(key)) | {"schema": 2, "reason": "oom"}
    blobs(bench).put(key, json.dumps(fields).encode())

    record = bench.records.find(BROKEN.id, 1)

    assert record is not None
    assert (record.state, record.reason, record.message) == (TaskState.FAILED, EndReason.OOM, "it broke")
    assert "newer release" in (record.unreadable or "")


def test_value_that_this_interpreter_cannot_read_leaves_the_rest_of_its_record(bench: Bench) -> None:
    [key] = keys(bench, "records/", DONE.id)
    data = blobs(bench).get(key)
    blobs(bench).put(key, data.replace(b"0.5", b"1" * 5000))

    record = bench.records.find(DONE.id, 1)

    assert record is not None
    assert (record.state, record.worker, record.value) == (TaskState.SUCCEEDED, "w-one", None)
    assert "thousands of digits" in (record.unreadable or "")
    look(bench)


@pytest.mark.parametrize("data", JUNK.values(), ids=JUNK)
def test_second_commit_beside_a_damaged_record_is_refused_as_ever(bench: Bench, data: bytes) -> None:
    from runtime.records.base import RecordExists

    damage(bench, f"records/{DONE.id[-8:]}/", data, DONE.id)

    with pytest.raises(RecordExists):
        bench.records.commit(sample_record(DONE, token="b2"))


def test_mark_that_cannot_be_decoded_is_listed_and_its_task_is_retried_from_the_manifest(bench: Bench) -> None:
    damage(bench, "marks/", b"{")

    [letter] = [dead_letter(mark) for mark in read_dead(bench.records, "sample")]
    refused = next(iter(redrive(bench, list(read_dead(bench.records)), now=bench.now)))
    again = retry(bench, BROKEN.id, now=bench.now)

    assert (letter.task, letter.reason, letter.message, letter.raw) == (
        BROKEN.id,
        EndReason.APP_FAILED,
        "it broke",
        "{",
    )
    assert not refused.done
    assert (again.done, again.generation) == (True, 2)


def test_started_mark_whose_end_cannot_be_decoded_is_closed(bench: Bench) -> None:
    task = sample_task("once")
    bench.put(task)
    records = bench.records
    from runtime.tasks.history import StartedMark

    records.record_started(task, StartedMark("a1", "w-one", bench.now, alone=False))
    records.record_ended(task, ended_note(bench, "a1"))
    damage(bench, f"attempts/{task.id}/", b"{", ".ended.json")

    history = records.history(task.id, 1)

    assert (history.ended, history.open) == ((), ())


def test_experiment_that_cannot_be_decoded_is_known_by_its_name(bench: Bench) -> None:
    damage(bench, "experiments/", b"{")

    assert [seen.name for seen in bench.records.experiments()] == ["other", "sample"]
    assert bench.records.find_experiment("sample") is not None


def test_home_that_cannot_be_decoded_is_written_again_with_the_next_record(bench: Bench) -> None:
    foreign = sample_task("foreign", id="t-foreign")
    bench.records.commit(sample_record(foreign))
    damage(bench, "homes/", b"{", foreign.id)
    records = BlobRecords(blobs(bench))

    assert records.find(foreign.id, 1) is None
    with pytest.raises(Exception, match="already has a record"):
        records.commit(sample_record(foreign, token="b2"))

    assert records.find(foreign.id, 1) is not None


def test_worker_report_that_cannot_be_decoded_leaves_the_others(bench: Bench) -> None:
    damage(bench, "workers/", b"{", "w-one")

    assert [seen.worker for seen in bench.records.workers()] == ["w-two"]


@pytest.mark.parametrize(
    "fields",
    [
        {"slots": "many"},
        {"labels": 7},
        {"running": "t-1"},
        {"seen_at": "0001-01-01T00:00:00+09:00"},
        {"rate_per_s": "fast"},
    ],
    ids=str,
)
def test_report_whose_fields_are_of_another_kind_is_passed_over(bench: Bench, fields: dict[str, Any]) -> None:
    [key] = keys(bench, "workers/", "w-one")
    blobs(bench).put(key, json.dumps(json.loads(blobs(bench).get(key)) | fields).encode())

    assert [seen.worker for seen in bench.records.workers()] == ["w-two"]
    look(bench)


# manifests


LINES = {
    "no JSON": "{",
    "another release": '{"schema":2,"id":"t-5555555555555555af2bdbe1","experiment":"sample","container":"x"}',
    "out of bounds": '{"schema":1,"id":"t-6666666666666666af2bdbe1","experiment":"sample","command":["x"],"timeout_s":0}',
    "no text": "\ufffd",
}


def list_lines(bench: Bench, *lines: str) -> None:
    """Manifest lines from a foreign writer, in a part with the right digest."""
    bench.records.put_part("sample", 7, lines)


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_manifest_line_that_cannot_be_decoded_stops_no_verb_and_repair_makes_it_a_dead_letter(
    bench: Bench, line: str
) -> None:
    fresh = sample_task("fresh")
    list_lines(bench, line, encode_task(fresh))
    look(bench)

    first = repair(bench.queue(), bench.records, now=bench.now)
    again = repair(bench.queue(), bench.records, now=bench.now)

    assert (first.malformed, again.malformed) == (1, 0)
    assert fresh.id in {task.id for task in bench.queue().peek(10)}
    [letter] = [dead_letter(mark) for mark in read_dead(bench.records) if mark.task_id != BROKEN.id]
    assert (letter.raw, letter.reason, letter.redrivable) == (line, EndReason.CONFIG_INVALID, False)
    assert letter.task == json.loads(line).get("id") if "id" in line else letter.task.startswith("t-")
    look(bench)
    act(bench)
    healthy(bench)


def test_experiment_with_a_line_that_cannot_be_decoded_is_complete_once_it_is_repaired() -> None:
    bench = Bench.memory()
    bench.put(DONE)
    bench.succeed()
    bench.records.put_part("sample", 7, ["{"])

    before = bench.records.totals("sample", exact=True).counts
    repair(bench.queue(), bench.records, now=bench.now)
    after = bench.records.totals("sample", exact=True).counts

    assert (before[TaskState.QUEUED], after[TaskState.QUEUED]) == (1, 0)
    assert (after[TaskState.SUCCEEDED], after[TaskState.FAILED]) == (1, 1)


def test_submission_takes_up_a_part_whose_line_cannot_be_decoded(bench: Bench) -> None:
    unsent = sample_task("unsent")
    list_lines(bench, "{", encode_task(unsent))

    result = submit_tasks([unsent, sample_task("more")], bench.queue(), experiment="sample")

    assert (result.resumed, result.known, result.new) == (1, 1, 1)
    assert [mark.raw for mark in read_dead(bench.records) if mark.raw] == ["{"]


def test_manifest_part_that_is_damaged_leaves_the_other_parts(bench: Bench) -> None:
    bench.put(sample_task("fresh"))
    [part] = [part for part in bench.records.parts("sample") if part.count == len(TASKS)]
    damage(bench, "manifests/", b"not what its name says\n", f"{part.name}.jsonl")

    overview = read_overview(bench, now=bench.now, exact=True)
    states = [read_task(bench, task.id).state for task in (DONE, BROKEN)]
    repaired = repair(bench.queue(), bench.records, now=bench.now)

    assert [seen.submitted for seen in overview.experiments if seen.experiment == "sample"] == [5]
    assert states == [TaskState.SUCCEEDED, TaskState.FAILED]
    assert (repaired.published, repaired.unreadable) == (1, 1)
    healthy(bench)


# the embedded file


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RUNTIME_DATA_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    bench = Bench.sqlite(tmp_path, "local.db")
    filled(bench).close()
    return tmp_path / "local.db"


def spoil(path: Path, statement: str, *values: object) -> None:
    with sqlite3.connect(path) as connection:
        assert connection.execute(statement, values).rowcount >= 1
    connection.close()


SPOILT: dict[str, tuple[str, Callable[[], tuple[object, ...]]]] = {
    "body": ("UPDATE tasks SET body=? WHERE id=?", lambda: ("{", WAITING.id)),
    "body that was cut off": ("UPDATE tasks SET body=? WHERE id=?", lambda: ('{"function":', WAITING.id)),
    "body of a newer release": ("UPDATE tasks SET body=? WHERE id=?", lambda: ('{"schema":2}', WAITING.id)),
    "body that is no UTF-8": ("UPDATE tasks SET body=CAST(? AS TEXT) WHERE id=?", lambda: (b"\xff\xfe", WAITING.id)),
    "body of a dead letter": ("UPDATE tasks SET body=? WHERE id=?", lambda: ("{", BROKEN.id)),
    "body of what is held": ("UPDATE tasks SET body=? WHERE id=?", lambda: ("{", HELD.id)),
    "body of what is done": ("UPDATE tasks SET body=? WHERE id=?", lambda: ("{", DONE.id)),
    "every body": ("UPDATE tasks SET body=? WHERE id<>?", lambda: (7, OTHER.id)),
    "value": ("UPDATE records SET value=? WHERE value LIKE '%loss%'", lambda: ("{",)),
    "long value": ("UPDATE records SET value=? WHERE value LIKE '%loss%'", lambda: ("1" * 5000,)),
    "rest": ("UPDATE records SET rest=? WHERE state='failed'", lambda: ('{"unheard_of": 1}',)),
    "reason": ("UPDATE records SET reason=? WHERE state='failed'", lambda: ("gpu_fell_off",)),
    "state": ("UPDATE records SET state=? WHERE state='failed'", lambda: ("undecided",)),
    "time": ("UPDATE records SET ended=? WHERE state='failed'", lambda: ("yesterday",)),
    "message": ("UPDATE records SET message=CAST(? AS TEXT) WHERE state='failed'", lambda: (b"\xff",)),
    "worker": ("REPLACE INTO objects VALUES('workers/w-one.json', ?, 1e10)", lambda: ("{",)),
    "order": ("REPLACE INTO objects VALUES('orders/default/0123456789abcdef.json', ?, 1e10)", lambda: (b"{",)),
    "note": (
        "INSERT INTO notes SELECT 'a1', seq, 1, 1.0, ? FROM tasks WHERE id=?",
        lambda: ("{", WAITING.id),
    ),
}


@pytest.mark.parametrize("name", SPOILT)
def test_row_that_cannot_be_decoded_stops_no_verb(path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    statement, values = SPOILT[name]
    spoil(path, statement, *values())
    commands = [
        ["status"],
        ["status", "-o", "json"],
        ["status", "sample", "--failed"],
        ["status", "sample", "-o", "json"],
        *(["status", task.id] for task in (*TASKS, OTHER)),
        *(["explain", task.id] for task in (*TASKS, OTHER)),
        ["explain", "sample"],
        ["queue", "peek"],
        ["queue", "stats"],
        ["queue", "dead", "list"],
        ["queue", "dead", "list", "-o", "json"],
        ["queue", "repair", "--yes"],
        ["logs", DONE.id],
        ["retry", "--failed", "sample", "--yes"],
        ["queue", "dead", "redrive", "--all", "--yes"],
        ["cancel", WAITING.id],
        ["cancel", HELD.id],
        ["cancel", "sample", "--yes"],
        ["queue", "purge", "--yes"],
        ["queue", "dead", "purge", "--all", "--yes"],
    ]

    for command in commands:
        code = main(command)
        said = capsys.readouterr()
        # A refusal names one thing that cannot be done; nothing crashes.
        assert code in (0, 2), f"{command}: {said.err}"
        assert "bug" not in said.err, f"{command}: {said.err}"
        if command[0] in ("status", "explain") or command[:2] == ["queue", "peek"]:
            assert code == 0, f"{command}: {said.err}"

    queue, records = open_sqlite(path)
    assert records.totals("sample").counts[TaskState.QUEUED] == 0
    found = records.find(OTHER.id, 1)
    assert found is not None
    assert found.value == 1
    queue.close()


def test_waiting_task_that_cannot_be_decoded_can_be_cancelled_and_explained(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(path, "UPDATE tasks SET body=? WHERE id=?", "{", WAITING.id)

    assert main(["explain", WAITING.id]) == 0
    assert "cannot be decoded; the worker that comes to it makes a dead letter of it" in capsys.readouterr().out
    assert main(["cancel", WAITING.id]) == 0

    queue, records = open_sqlite(path)
    found = records.find(WAITING.id, 1)
    assert found is not None
    assert found.state is TaskState.CANCELLED
    queue.close()


def test_wait_for_a_value_that_cannot_be_read_says_which(path: Path) -> None:
    spoil(path, "UPDATE records SET value=? WHERE value LIKE '%loss%'", "1" * 5000)
    queue, _ = open_sqlite(path)

    seen = wait(Submission(experiment="sample", queue="default", tasks=((DONE.id, 1),)), queue=queue, timeout=240)

    assert seen.complete
    with pytest.raises(NotPossible, match=DONE.id):
        seen.values()
    queue.close()
