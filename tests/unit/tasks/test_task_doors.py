"""A task that nothing could run, store or count is refused when it is made, in every way of making it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from runtime.cli.main import main
from runtime.client.resolve_id import identify
from runtime.client.tasks.build import TaskOptions
from runtime.client.tasks.redrive import begin_again, plan_redrive
from runtime.client.tasks.submit import submit
from runtime.errors import InvalidTask, InvalidValue, RequestRefused, UnknownName
from runtime.queues.memory import MemoryQueue
from runtime.queues.pubsub.client import ReceivedMessage
from runtime.queues.pubsub.message import read_message
from runtime.queues.sqlite.queue import open_sqlite
from runtime.records.memory import MemoryRecords
from runtime.stack.open import open_stack
from runtime.tasks.model import (
    LIMITS,
    CommandEntry,
    FunctionEntry,
    Resources,
    Task,
    TaskState,
    Terms,
    WorkflowEntry,
    next_generation,
    task_id,
)
from runtime.tasks.wire import decode_stored, decode_task, encode_task, parse_task, stand_in
from runtime.testing import sample_task
from runtime.units import parse_duration, parse_size, parse_time
from tests.conformance.records_cases import sample_mark, sample_record

ROOT = Path(__file__).parents[3]
NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Submit from an empty folder: a submission takes a snapshot of the project around the current one."""
    monkeypatch.chdir(tmp_path)


HALF = "\udcff"
"""The result of `os.listdir` for a byte that is not UTF-8."""

TERMS: list[tuple[str, Any, Any]] = [
    # field on the wire, value on the wire, value in Python
    ("timeout_s", 0, timedelta()),
    ("timeout_s", -1, timedelta(seconds=-1)),
    ("timeout_s", 1e-9, timedelta()),
    ("timeout_s", 10**9, timedelta(seconds=10**9)),
    ("timeout_s", 1e400, timedelta.max),
    ("timeout_s", "2h", "2h"),
    ("max_failures", -1, -1),
    ("max_failures", 10_000_001, 10_000_001),
    ("max_failures", 3.0, 3.0),
    ("max_failures", True, True),
    ("priority", 99_999_999_999, 99_999_999_999),
    ("priority", -1_000_001, -1_000_001),
    ("priority", "high", "high"),
    ("resources.gpus", {"gpus": 1.5}, Resources(gpus=1.5)),
    ("resources.gpus", {"gpus": -1}, Resources(gpus=-1)),
    ("resources.cpus", {"cpus": 1e400}, Resources(cpus=1e400)),
    ("resources.cpus", {"cpus": 10**6}, Resources(cpus=10**6)),
    ("resources.memory", {"memory": -1}, Resources(memory_bytes=-1)),
    ("resources.memory", {"memory": (1 << 60) + 1}, Resources(memory_bytes=(1 << 60) + 1)),
    ("resources.memory", {"memory": 0.5}, Resources(memory_bytes=0.5)),  # type: ignore[arg-type]
    ("resources", "2 GPUs", "2 GPUs"),
    ("expires_at", "2026-01-01T00:00:00", datetime(2026, 1, 1)),  # noqa: DTZ001 (that is what is refused)
    ("expires_at", "0001-01-01T00:00:00+05:00", datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=5)))),
    ("not_before", 1_700_000_000, 1_700_000_000),
    ("submitted_at", "yesterday", "yesterday"),
    ("submitted_by", HALF, HALF),
    ("submitted_by", "", ""),
    ("snapshot", "", ""),
    ("snapshot", 7, 7),
    ("folder", "../x", "../x"),
    ("folder", "/srv", "/srv"),
    ("folder", "a\0b", "a\0b"),
    ("folder", HALF, HALF),
    ("secrets", "hf-token", "hf-token"),
    ("secrets[1]", ["a", ""], ("a", "")),
    ("secrets[0]", ["HF_TOKEN=x"], ("HF_TOKEN=x",)),
    ("secrets[0]", [HALF], (HALF,)),
    ("experiment", "a/b", "a/b"),
    ("experiment", "x" * 129, "x" * 129),
    ("experiment", HALF, HALF),
]
"""The terms of a submission."""

OWN: list[tuple[str, Any, Any]] = [
    ("generation", 0, 0),
    ("generation", 1_000_001, 1_000_001),
    ("generation", True, True),
    ("id", "../../etc", "../../etc"),
    ("id", "t-", "t-"),
    ("id", "t-a\n", "t-a\n"),
    ("key", "", ""),
    ("key", HALF, HALF),
    ("outputs", "gs://b/o", "gs://b/o"),
    ("outputs[1]", ["a", 5], ("a", 5)),
    ("outputs[0]", [HALF], (HALF,)),
]

ENTRIES: list[tuple[str, dict[str, Any], Any]] = [
    ("command", {"command": []}, CommandEntry(())),
    ("command", {"command": "ls"}, CommandEntry("ls")),  # type: ignore[arg-type]
    ("command[1]", {"command": ["ls", HALF]}, CommandEntry(("ls", HALF))),
    ("command[0]", {"command": [1]}, CommandEntry((1,))),  # type: ignore[arg-type]
    ("command", {"command": ["ls", "a\0b"]}, CommandEntry(("ls", "a\0b"))),
    ("project", {"project": "", "workflow": "w"}, WorkflowEntry("", "w")),
    ("workflow", {"project": "p", "workflow": HALF}, WorkflowEntry("p", HALF)),
    ("args[0]", {"project": "p", "workflow": "w", "args": [HALF]}, WorkflowEntry("p", "w", (HALF,))),
    ("function", {"function": "noname"}, FunctionEntry("noname")),
    ("function", {"function": f"m:{HALF}"}, FunctionEntry(f"m:{HALF}")),
    ("args[0]", {"function": "m:f", "args": [float("nan")]}, FunctionEntry("m:f", (float("nan"),))),
    ("args[0]", {"function": "m:f", "args": [[1e400]]}, FunctionEntry("m:f", ([1e400],))),
    ("args[0]", {"function": "m:f", "args": [{"x": HALF}]}, FunctionEntry("m:f", ({"x": HALF},))),
    ("kwargs.x", {"function": "m:f", "kwargs": {"x": HALF}}, FunctionEntry("m:f", (), {"x": HALF})),
    ("kwargs", {"function": "m:f", "kwargs": {HALF: 1}}, FunctionEntry("m:f", (), {HALF: 1})),
]
PYTHON_ENTRIES: list[tuple[str, Any]] = [
    *((field, entry) for field, _, entry in ENTRIES),
    ("args[0]", FunctionEntry("m:f", (10**5000,))),
    ("args[0]", FunctionEntry("m:f", (object(),))),
    ("args[0]", FunctionEntry("m:f", ([object()],))),
    ("args", FunctionEntry("m:f", "ab")),  # type: ignore[arg-type]
    ("kwargs", FunctionEntry("m:f", (), {1: 2})),  # type: ignore[dict-item]
    ("entry", ("p", "w", ())),
    ("entry", None),
]

NAMES = {"timeout_s": "timeout"}


def shown(value: Any) -> str:
    """Format a value for a test's name, which must be ASCII; a number may be too long to print."""
    try:
        return ascii(value)[:40]
    except ValueError:
        return "too long"


def fields_of(name: str, value: Any, **more: Any) -> dict[str, Any]:
    """Build a wire object with one bad field."""
    return {"id": "t-1", "command": ["true"], **more, name.partition(".")[0].partition("[")[0]: value}


def python_of(name: str, value: Any) -> dict[str, Any]:
    plain = name.partition(".")[0].partition("[")[0]
    return {NAMES.get(plain, plain): value}


def refused_field(make: Callable[[], object]) -> str:
    with pytest.raises(InvalidTask) as refused:
        make()
    return refused.value.field


# Python


@pytest.mark.parametrize(("field", "_", "value"), TERMS + OWN, ids=shown)
def test_task_made_or_changed_in_python_is_refused_with_the_field(field: str, _: Any, value: Any) -> None:
    good = {"id": "t-1", "entry": CommandEntry(("true",))}

    assert refused_field(lambda: Task(**(good | python_of(field, value)))) == field
    assert refused_field(lambda: replace(sample_task(), **python_of(field, value))) == field


@pytest.mark.parametrize(("field", "entry"), PYTHON_ENTRIES, ids=shown)
def test_task_of_an_entry_that_cannot_be_written_is_refused(field: str, entry: Any) -> None:
    assert refused_field(lambda: Task(id="t-1", entry=entry)) == field


@pytest.mark.parametrize(("field", "_", "value"), TERMS, ids=shown)
def test_defaults_and_options_of_a_submission_are_refused_with_the_field(field: str, _: Any, value: Any) -> None:
    assert refused_field(lambda: Terms(**python_of(field, value))) == field
    assert refused_field(lambda: TaskOptions(**python_of(field, value))) == field


def test_unknown_fields_may_not_stand_for_known_ones() -> None:
    assert refused_field(lambda: sample_task(extra={"id": "t-2"})) == "extra"
    assert refused_field(lambda: sample_task(extra={"args": []})) == "extra"
    assert refused_field(lambda: sample_task(extra={"colour": float("inf")})) == "colour"
    assert refused_field(lambda: sample_task(extra=None)) == "extra"


@pytest.mark.parametrize(
    ("keywords", "error"),
    [
        ({"timeout": 0}, InvalidTask),
        ({"timeout": timedelta()}, InvalidTask),
        ({"timeout": timedelta.max}, InvalidTask),
        ({"timeout": float("nan")}, InvalidValue),
        ({"max_failures": 10_000_001}, InvalidTask),
        ({"max_failures": -1}, InvalidTask),
        ({"priority": 10**9}, InvalidTask),
        ({"key": ""}, InvalidTask),
        ({"key": HALF}, InvalidTask),
        ({"secrets": "hf-token"}, InvalidValue),
        ({"secrets": ["hf token"]}, InvalidTask),
        ({"outputs": "gs://b/o"}, InvalidTask),
        ({"outputs": [1]}, InvalidTask),
        ({"resources": Resources(gpus=1.5)}, InvalidTask),
        ({"resources": {"memory": "9" * 400}}, InvalidTask),
        ({"expires": timedelta.max}, InvalidValue),
        ({"delay": timedelta.max}, InvalidValue),
        ({"delay": "9" * 400 + "ms"}, InvalidValue),
        ({"snapshot": ""}, InvalidTask),
    ],
    ids=shown,
)
def test_submit_in_python_refuses_and_puts_nothing(keywords: dict[str, Any], error: type[Exception]) -> None:
    queue = MemoryQueue(MemoryRecords())

    with pytest.raises(error):
        submit(print, queue=queue, **keywords)

    assert queue.depth().total == 0


def test_task_whose_failures_are_none_is_taken_and_none_is_the_same_at_every_door() -> None:
    queue = MemoryQueue(MemoryRecords())
    submit({"command": ["a"], "max_failures": 0}, queue=queue)
    submit({"command": ["b"]}, queue=queue, max_failures=0)

    assert [task.max_failures for task in queue.peek(5)] == [0, 0]
    assert [decode_task(encode_task(task)).max_failures for task in queue.peek(5)] == [0, 0]


# the wire


def wire(fields: dict[str, Any]) -> str:
    return json.dumps(fields)


@pytest.mark.parametrize(("field", "value", "_"), TERMS + OWN, ids=shown)
def test_line_message_and_mapping_are_refused_with_the_field(field: str, value: Any, _: Any) -> None:
    fields = fields_of(field, value)
    whole = fields_of(field, value, schema=1, experiment="e") if field != "experiment" else fields | {"schema": 1}

    assert refused_field(lambda: decode_task(wire(fields))) == field
    assert refused_field(lambda: parse_task(fields)) == field
    assert refused_field(lambda: decode_stored(wire(whole))) == field
    with pytest.raises(RequestRefused):
        submit(fields, queue=MemoryQueue(MemoryRecords()))
    delivery = read_message(ReceivedMessage("a", "m", wire(fields).encode(), {}, NOW, 1), lambda _: b"")
    assert delivery.invalid is not None


@pytest.mark.parametrize(("field", "value", "_"), ENTRIES, ids=shown)
@pytest.mark.parametrize("named", [{"id": "t-1"}, {"key": "k"}, {}], ids=["id", "key", "neither"])
def test_entry_on_the_wire_is_refused_whatever_gives_it_its_id(
    field: str, value: dict[str, Any], _: Any, named: dict[str, str]
) -> None:
    assert refused_field(lambda: decode_task(wire(value | named))) == field
    if "id" in named:
        assert refused_field(lambda: decode_stored(wire(value | named | {"schema": 1, "experiment": "e"}))) == field


@pytest.mark.parametrize("data", [b"\xff", "", "nonsense", "[]", "3", "null", 3, None, b"3", '{"id": "t-1"}', "{}"])
def test_anything_that_is_no_task_is_refused_and_not_a_crash(data: Any) -> None:
    refused_field(lambda: decode_task(data))
    refused_field(lambda: decode_stored(data))


@pytest.mark.parametrize(
    "fields",
    [
        {"schema": 2},
        {"command": "abc"},
        {"command": {"a": 1}},
        {"function": "m:f"},
        {"project": "p"},
        {"kwargs": {}},
        {"submitted_at": "0001-01-01T00:00:00+05:00"},
        {"submitted_at": 5},
    ],
)
def test_stored_text_that_only_looks_like_ours_is_held_to_the_same(fields: dict[str, Any]) -> None:
    body = wire({"schema": 1, "id": "t-1", "experiment": "e", "command": ["true"]} | fields)

    refused_field(lambda: decode_stored(body))


def test_task_without_a_number_of_attempts_left_cannot_begin_again() -> None:
    last = sample_task(generation=LIMITS["generation"][1])
    plan = plan_redrive(sample_mark(last), [sample_record(last, state=TaskState.FAILED)], now=NOW)

    assert refused_field(lambda: next_generation(last)) == "generation"
    assert refused_field(lambda: begin_again(last, now=NOW)) == "generation"
    assert plan.task is None
    assert plan.refused is not None
    assert "generation" in plan.refused


@pytest.mark.parametrize("experiment", ["sweep", "a/b", None, 3, HALF], ids=shown)
@pytest.mark.parametrize("identity", ["t-abc", "../etc", "", None, 7, HALF, "t-" + "a" * 100], ids=shown)
@pytest.mark.parametrize("generation", [3, 0, None, 1 << 40])
def test_stand_in_keeps_what_names_are_good_and_is_always_a_task(
    identity: Any, experiment: Any, generation: Any
) -> None:
    made = stand_in(identity, experiment, generation=generation)

    assert made.id == "t-abc" if identity == "t-abc" else made.id.startswith("t-")
    assert made.experiment == ("sweep" if experiment == "sweep" else "default")
    assert made.generation == (3 if generation == 3 else 1)


# the command line


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    monkeypatch.setenv("RUNTIME_DATA_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def run(*args: str) -> tuple[int, str]:
        code = main(["submit", *args])
        return code, capsys.readouterr().err

    yield run
    queue, _ = open_sqlite(tmp_path / "local.db")
    assert queue.depth().total == 0, "something was put"
    queue.close()


OPTIONS = [
    (["--timeout", "0s"], "`--timeout` is 0.0, expected seconds above 0 and below 1,000,000,000"),
    (["--max-failures", "10000001"], "`--max-failures` is 10000001, expected a whole number from 0 to 1,000,000"),
    (["--max-failures=-1"], "`--max-failures` is -1, expected"),
    (["--priority", "99999999999"], "`--priority` is 99999999999, expected a whole number from -1,000,000 to"),
    (["--priority=-99999999999"], "`--priority` is -99999999999, expected"),
    (["--expires", "9" * 400 + "ms"], "no valid expires"),
    (["--delay", "9" * 400 + "ms"], "no valid delay"),
    (["--memory", "9" * 400], "`resources.memory` is"),
    (["--memory", "2000PiB"], "`resources.memory` is"),
    (["--gpus", "nan"], "`resources.gpus` is nan"),
    (["--cpus", "inf"], "`resources.cpus` is inf"),
]


@pytest.mark.parametrize(("option", "said"), OPTIONS, ids=shown)
@pytest.mark.parametrize("work", [["--", "true"], ["--grid", "x=1,2", "p", "w"], ["--from", "lines.jsonl"]])
def test_option_out_of_bounds_is_refused_by_its_name(run: Any, option: list[str], said: str, work: list[str]) -> None:
    Path("lines.jsonl").write_text('{"command": ["true"]}\n')

    code, err = run(*option, *work)

    assert code == 2
    assert err.startswith("error: ")
    assert said in err
    assert "bug" not in err


@pytest.mark.parametrize(("option", "field"), [("--key", "key"), ("--outputs", "outputs[0]")])
def test_option_that_is_no_utf8_is_refused_by_its_name(run: Any, option: str, field: str) -> None:
    code, err = run(option, f"a{HALF}", "--", "true")

    assert code == 2
    assert f"`--{field}` holds bytes that are no UTF-8" in err


def test_grid_whose_value_is_no_utf8_is_refused(run: Any) -> None:
    code, err = run("--grid", f"x=a,{HALF}", "--", "echo", "{x}")

    assert code == 2
    assert "`command[1]` holds bytes that are no UTF-8" in err


@pytest.mark.parametrize("name", [f"t-abc{HALF}", f"e{HALF}"], ids=shown)
def test_name_that_is_no_utf8_is_unknown_and_not_a_crash(tmp_path: Path, name: str) -> None:
    _, records = open_sqlite(tmp_path / "local.db")

    with pytest.raises(UnknownName):
        identify(name, records)
    records.close()


def test_queue_whose_name_is_no_utf8_is_refused_and_not_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNTIME_DATA_DIR", str(tmp_path))

    with open_stack(queue=f"q{HALF}") as stack, pytest.raises(InvalidValue):
        stack.queue()


# the bounds


def test_bounds_of_the_schema_are_those_of_the_table() -> None:
    properties = json.loads((ROOT / "runtime/tasks/task.schema.json").read_text())["properties"]
    resources = properties["resources"]["properties"]
    whole = {
        name: (properties[name]["minimum"], properties[name]["maximum"])
        for name in ("generation", "max_failures", "priority")
    }
    memory = resources["memory"]["oneOf"][0]

    assert whole | {
        "timeout_s": (properties["timeout_s"]["exclusiveMinimum"], properties["timeout_s"]["exclusiveMaximum"]),
        "resources.cpus": (resources["cpus"]["minimum"], resources["cpus"]["exclusiveMaximum"]),
        "resources.gpus": (resources["gpus"]["minimum"], resources["gpus"]["exclusiveMaximum"]),
        "resources.memory": (memory["minimum"], memory["maximum"]),
    } == dict(LIMITS)


def test_bounds_of_the_documentation_are_those_of_the_table() -> None:
    text = (ROOT / "docs/task-format.md").read_text().replace("−", "-")
    rows = dict(re.findall(r"^\| `(\w+)` \| (-?[\d,]+ to [\d,]+) \|", text, re.MULTILINE))

    assert rows == {
        name: f"{least:,} to {most:,}" for name, (least, most) in LIMITS.items() if name in rows and name != "timeout_s"
    }
    assert set(rows) == {"generation", "max_failures", "priority"}


def test_number_too_long_to_be_printed_is_refused_all_the_same() -> None:
    for field in ("priority", "max_failures", "generation"):
        assert refused_field(lambda field=field: sample_task(**{field: 10**5000})) == field  # type: ignore[misc]
    assert refused_field(lambda: Task(id="t-1", entry=CommandEntry(("a",)), timeout=10**5000)) == "timeout_s"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "read",
    [
        lambda: parse_duration("9" * 400),
        lambda: parse_duration("9" * 400 + "ms"),
        lambda: parse_duration("9" * 400 + "d"),
        lambda: parse_size("9" * 400),
        lambda: parse_size("9" * 400 + "PiB"),
        lambda: parse_time("0001-01-01T00:00:00+05:00"),
        lambda: parse_time("9999-12-31T23:59:59-05:00"),
    ],
)
def test_unit_beyond_what_a_machine_counts_is_refused_and_not_a_crash(read: Callable[[], object]) -> None:
    with pytest.raises(InvalidValue):
        read()


def test_ids_of_what_cannot_be_hashed_are_refused() -> None:
    assert refused_field(lambda: task_id("e", key=HALF)) == "key"
    assert refused_field(lambda: task_id("e", entry=FunctionEntry("m:f", (10**5000,)))) == "args[0]"
    assert refused_field(lambda: task_id("e", entry=FunctionEntry("m:f", ({1: 2, "a": 3},)))) == "entry"
