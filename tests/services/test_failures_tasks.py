"""Bad tasks: each ends with its own reason, none ends a worker, and the good tasks beside it succeed."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.end_reasons import EndReason
from runtime.snapshots.snapshot import archive_reference, take_snapshot
from runtime.tasks.model import TaskState
from tests.services.failure_support import STACKS, Yard, call, open_yard, publish_raw

MIB = 1 << 20

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="workers run their attempts on Linux")


@pytest.fixture(params=STACKS)
def yard(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Yard]:
    with open_yard(request.param, tmp_path, request) as opened:
        yield opened


def test_tasks_that_end_badly_each_get_their_reason_and_stop_nobody(yard: Yard) -> None:
    once = {"max_failures": 1}
    bad = {
        "unknown module": ({"function": "nowhere:f", **once}, EndReason.CONFIG_INVALID, "no module named `nowhere`"),
        "unknown function": (call("nothing", **once), EndReason.CONFIG_INVALID, "no function `nothing`"),
        "unknown workflow": (
            {"project": "bodies", "workflow": "tran", "args": []},
            EndReason.CONFIG_INVALID,
            "tran",
        ),
        "unknown project": ({"project": "nowhere", "workflow": "x", "args": []}, EndReason.CONFIG_INVALID, "nowhere"),
        "too many arguments": (call("quick", "a", "b", "c"), EndReason.CONFIG_INVALID, "positional argument"),
        "bad option": (
            {"project": "bodies", "workflow": "train", "args": ["--epochs=many"]},
            EndReason.CONFIG_INVALID,
            "epochs",
        ),
        "no such program": ({"command": ["no-such-program"]}, EndReason.CONFIG_INVALID, "no-such-program"),
        "raises": (call("wrong", "w", **once), EndReason.APP_FAILED, "w cannot be right"),
        "SystemExit": (call("leave", "e", **once), EndReason.APP_FAILED, "nothing to do here"),
        "exit code": ({"command": ["sh", "-c", "exit 7"], **once}, EndReason.APP_FAILED, "exit code 7"),
        "segfault": (call("crash", "c", **once), EndReason.APP_FAILED, "SIGSEGV"),
        "memory": (
            call("fill", "m", resources={"memory": 200 * MIB}, **once),
            EndReason.OOM,
            "over its limit",
        ),
        "time": (call("short", "t", 600, timeout_s=0.5, **once), EndReason.TIMEOUT, "timed out"),
    }
    good = yard.submit([call("quick", f"q{n}") for n in range(8)])
    ids = yard.submit([line for line, _, _ in bad.values()])
    # Twice the tasks and one worker: if a task had ended the worker, nothing else would run.
    worker = yard.start("--slots", "4", "--max-consecutive-failures", "0")

    done = yard.wait_recorded(good)
    records = dict(zip(bad, yard.wait_recorded(ids), strict=True))

    assert {record.state for record in done} == {TaskState.SUCCEEDED}
    assert {name: record.reason for name, record in records.items()} == {
        name: reason for name, (_, reason, _) in bad.items()
    }
    wordless = {name: record.message for name, record in records.items() if bad[name][2] not in (record.message or "")}
    assert not wordless
    assert records["exit code"].exit_code == 7
    assert worker.alive
    yard.check()


@pytest.mark.slow
def test_task_that_ignores_every_signal_is_killed_after_its_time(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    with open_yard("sqlite", tmp_path, request) as yard:
        [hanging, quick] = yard.submit([call("hang", "h", timeout_s=0.5, max_failures=1), call("quick", "q")])
        yard.start("--slots", "2")

        [record, done] = yard.wait_recorded([hanging, quick])

        assert (record.reason, done.state) == (EndReason.TIMEOUT, TaskState.SUCCEEDED)
        yard.check()


@pytest.mark.service
def test_malformed_message_becomes_a_dead_letter_with_its_text(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    with open_yard("pubsub", tmp_path, request) as yard:
        publish_raw(
            yard,
            b"{not json",
            b"\xff\xfe not text",
            b'{"project": "bodies"}',
            json.dumps({"project": "bodies", "workflow": "train", "args": ["--epochs=3"]}).encode(),
        )
        worker = yard.start()
        task = yard.submit_one("quick", "after them")
        yard.wait_recorded([task])
        yard.wait_for(lambda: len(list(yard.records.records("default"))) == 4, "four records")

        records = list(yard.records.records("default"))
        bare = [record for record in records if record.state is TaskState.SUCCEEDED]
        marks = list(yard.records.marks("default", TaskState.FAILED))
        assert [record.value["epochs"] for record in bare] == [3]
        assert {mark.raw for mark in marks} == {"{not json", '{"project": "bodies"}', "\ufffd\ufffd not text"}
        assert {mark.reason for mark in marks} == {EndReason.CONFIG_INVALID}
        assert worker.alive
        # These tasks came without a manifest, so the submitted total is unknown.
        yard.check(extra=[record.task_id for record in records])


def test_malformed_line_is_refused_before_anything_is_put(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    with open_yard("sqlite", tmp_path, request) as yard:
        lines = tmp_path / "tasks.jsonl"
        lines.write_text('{"function": "bodies:quick", "args": ["a"]}\n{"function": 7}\n')

        refused = yard.cli("submit", "--from", str(lines))

        assert refused.returncode == 2
        assert "line 2" in refused.stderr
        assert "Traceback" not in refused.stderr
        assert list(yard.records.experiments()) == []
        yard.check()


AWKWARD = (
    'it\'s "quoted" `twice`',
    "{braces} {{doubled}} $HOME %s %(x)s",
    "line one\nline two\ttabbed\r",
    "  leading and trailing  ",
    "-dash --option=x",
    "ünï ✓ 日本",
    "back\\slash \\n",
    "",
    "*.txt; rm -rf . & | > <",
)


@pytest.mark.parametrize("kind", STACKS)
def test_awkward_arguments_and_paths_arrive_byte_for_byte(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    place = folder = tmp_path / 'it\'s a {folder} with "quotes" and\nbreaks'
    place.mkdir()
    with open_yard(kind, place, request) as yard:
        said = place / "said by the command.json"
        script = "import json, sys; json.dump(sys.argv[2:], open(sys.argv[1], 'w'))"
        ids = yard.submit(
            [
                call("echo", *AWKWARD, kwargs={"key with {}": AWKWARD[2]}),
                {
                    "project": "bodies",
                    "workflow": "train",
                    "args": ["--epochs=1", f"--name={AWKWARD[0]}", f"--path={folder}"],
                },
                {"command": ["python3", "-c", script, str(said), *AWKWARD]},
                call("write", "w", AWKWARD[2]),
                call("echo", "x" * 200_000),
            ]
        )
        yard.start()

        echoed, trained, commanded, wrote, large = yard.wait_recorded(ids)

        assert echoed.value == [list(AWKWARD), {"key with {}": AWKWARD[2]}]
        assert trained.value == {"epochs": 1, "name": AWKWARD[0], "path": str(folder)}
        assert commanded.state is TaskState.SUCCEEDED, commanded
        assert json.loads(said.read_text()) == list(AWKWARD)
        assert wrote.outputs_url
        assert (Path(wrote.outputs_url) / "out.txt").read_bytes() == AWKWARD[2].encode()
        if large.value_url:
            assert json.loads(yard.records.get_blob(large.value_url)) == [["x" * 200_000], {}]
        else:
            assert large.value == [["x" * 200_000], {}]
        yard.check()


def test_failures_that_are_not_in_a_row_end_no_worker(yard: Yard) -> None:
    lines = []
    for n in range(3):
        lines += [call("wrong", f"w{n}", max_failures=1), call("quick", f"q{n}")]
    # One after the other and in order, so that a success comes between any two failures.
    ids: list[str] = []
    worker = yard.start("--max-consecutive-failures", "2", "--look-ahead", "0")
    for line in lines:
        ids += yard.submit([line])
        yard.wait_recorded(ids[-1:])

    assert worker.alive
    assert worker.stop() == 0
    yard.check()


def test_failures_in_a_row_end_the_worker_and_it_keeps_nothing(yard: Yard) -> None:
    ids = yard.submit([call("wrong", f"w{n}", max_failures=1) for n in range(4)])
    worker = yard.start("--max-consecutive-failures", "2")
    worker.expected = {1}

    worker.wait()
    left = worker.events("worker_left")[0]
    yard.start("--max-consecutive-failures", "0")
    records = yard.wait_recorded(ids)

    # Another task may have begun before the second failure was known, and may have failed too.
    assert left["failed"] in (2, 3)
    assert left["reason"].endswith("tasks in a row failed and none succeeded (--max-consecutive-failures 2)")
    assert {record.reason for record in records} == {EndReason.APP_FAILED}
    notes = [note.reason for task in ids for note in yard.notes(task)]
    # Or the worker stops it, which spends no failure.
    assert set(notes) <= {EndReason.PREEMPTED}
    assert len(notes) <= 1
    yard.check()


@pytest.mark.slow
def test_big_task_among_small_workers_is_left_alone_until_a_large_one_comes(yard: Yard) -> None:
    big = yard.submit_one("quick", "big", resources={"cpus": 1.5})
    small = yard.submit([call("short", f"s{n}", 0.05) for n in range(10)])
    worker = yard.start("--slots", "4", "--look-ahead", "0", RUNTIME_CPUS="2")

    yard.wait_recorded(small)
    worker.said("task_declined")

    assert not yard.runs("big")
    assert len(worker.events("task_declined")) == 1
    worker.stop()
    yard.start("--slots", "1")
    [record] = yard.wait_recorded([big])
    assert (record.state, record.attempts) == (TaskState.SUCCEEDED, 1)
    yard.check()


def test_two_launches_of_one_experiment_each_run_the_code_they_were_submitted_with(yard: Yard) -> None:
    tree = yard.folder / "tree"
    tree.mkdir()
    ids = []
    for version in ("old", "new"):
        (tree / "model.py").write_text(f"def version():\n    return {version!r}\n")
        identity = take_snapshot(tree, yard.records)
        ids += yard.submit([{"function": "model:version", "snapshot": identity, "key": version}])
    (yard.code / "model.py").write_text("def version():\n    return 'the code of the worker'\n")
    yard.start("--reuse-process")

    records = yard.wait_recorded(ids)

    assert [record.value for record in records] == ["old", "new"]
    assert len({record.code for record in records}) == 2
    yard.check()


@pytest.mark.service
def test_worker_killed_while_it_fetches_the_code_its_task_runs_elsewhere(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    import os

    with open_yard("pubsub", tmp_path, request) as yard:
        tree = yard.folder / "tree"
        tree.mkdir()
        (tree / "model.py").write_text("def version():\n    return 1\n")
        identity = take_snapshot(tree, yard.records)
        stored = yard.folder / "records" / archive_reference(identity)
        kept = stored.rename(yard.folder / "kept")
        # Opening the FIFO blocks until there is a writer, so the worker's download lasts as long as the test needs.
        os.mkfifo(stored)
        [task] = yard.submit([{"function": "model:version", "snapshot": identity}])
        victim = yard.start()

        waiting = threading.Thread(target=_wait_for_reader, args=(stored,), daemon=True)
        waiting.start()
        waiting.join(300)
        assert not waiting.is_alive(), "the worker never asked for the code"
        victim.kill()
        kept.replace(stored)
        yard.start()
        [record] = yard.wait_recorded([task])

        assert (record.value, record.code) == (1, identity)
        yard.check()


def _wait_for_reader(fifo: Path) -> None:
    with fifo.open("wb"):
        pass
