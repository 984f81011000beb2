"""Tasks: their wire format there and back, their ids, and refusals."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime, timedelta, timezone
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import InvalidTask
from runtime.tasks.canonical_json import canonical_json
from runtime.tasks.entry_text import describe_entry
from runtime.tasks.model import (
    CommandEntry,
    Entry,
    FunctionEntry,
    Resources,
    Task,
    TaskState,
    Terms,
    WorkflowEntry,
    entry_fields,
    experiment_digest,
    next_generation,
    task_id,
)
from runtime.tasks.wire import decode_stored, decode_task, encode_task, parse_task, task_fields
from runtime.testing import sample_task
from runtime.units import divide, format_time

# Small values: what an example costs is the number of its characters and leaves.
TEXT = st.text(min_size=1, max_size=8)
ARGUMENT = st.characters(codec="utf-8", exclude_characters="\0")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
TIMES = st.integers(10**12, 4 * 10**12).map(
    lambda milliseconds: datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=milliseconds)
)
ENTRIES = (
    st.builds(WorkflowEntry, TEXT, TEXT, st.lists(st.text()).map(tuple))
    | st.builds(CommandEntry, st.lists(st.text(ARGUMENT), min_size=1).map(tuple))
    | st.builds(
        FunctionEntry, st.just("mod.sub:name"), st.lists(JSON).map(tuple), st.dictionaries(TEXT, JSON, max_size=3)
    )
)
KNOWN = {"schema", "id", "project", "workflow", "args", "command", "function", "kwargs"} | set(Task.__slots__)


@st.composite
def tasks(draw: st.DrawFn) -> Task:
    entry = draw(ENTRIES)
    key = draw(st.none() | TEXT)
    extra = draw(st.dictionaries(TEXT.filter(lambda name: name not in KNOWN | {"timeout_s"}), JSON, max_size=3))
    return Task(
        id=task_id("exp", key=key, entry=entry),
        entry=entry,
        experiment="exp",
        generation=draw(st.integers(1, 100)),
        resources=Resources(cpus=draw(st.sampled_from([0, 1, 2.5])), gpus=draw(st.sampled_from([0, 0.25, 4]))),
        timeout=draw(st.none() | st.integers(1, 10**6).map(lambda seconds: timedelta(seconds=seconds))),
        not_before=draw(st.none() | TIMES),
        expires_at=draw(st.none() | TIMES),
        max_failures=draw(st.integers(1, 50)),
        outputs=tuple(draw(st.lists(TEXT, max_size=2))),
        secrets=draw(st.none() | st.lists(st.sampled_from(["hf-token", "A.b_c"]), max_size=2).map(tuple)),
        key=key,
        priority=draw(st.integers(-5, 5)),
        submitted_at=draw(st.none() | TIMES),
        extra=extra,
    )


@given(tasks())
def test_task_survives_the_wire_whole(task: Task) -> None:
    assert decode_task(encode_task(task)) == task
    assert decode_stored(encode_task(task)) == task


def dump(value: object, *, sort_keys: bool = False) -> str:
    return json.dumps(value, sort_keys=sort_keys, separators=(",", ":"), ensure_ascii=False)


@st.composite
def usual_tasks(draw: st.DrawFn) -> Task:
    """Draw a task as `submit` makes it from a function and its arguments."""
    entry = draw(ENTRIES)
    return Task(
        id=task_id("exp", entry=entry),
        entry=entry,
        experiment="exp",
        snapshot=draw(st.none() | TEXT),
        folder=draw(st.none() | st.just("a/b")),
        submitted_by=draw(st.none() | TEXT),
        submitted_at=draw(st.none() | TIMES),
    )


@given(tasks() | usual_tasks())
def test_wire_format_is_the_json_of_the_fields(task: Task) -> None:
    assert encode_task(task) == dump(task_fields(task))
    assert decode_stored(encode_task(task)) == task


@given(ENTRIES)
def test_id_is_that_of_the_canonical_entry(entry: Entry) -> None:
    text = f"exp\0{dump({'entry': entry_fields(entry)}, sort_keys=True)}"
    assert task_id("exp", entry=entry) == f"t-{sha256(text.encode()).hexdigest()[:16]}{experiment_digest('exp')}"


def test_secrets_change_neither_the_id_of_a_task_nor_the_text_of_one_that_names_none() -> None:
    plain, none = (decode_task(json.dumps({"command": ["a"]} | more)) for more in ({}, {"secrets": []}))

    assert [plain.id, none.id] == ["t-c8764b3fb8eae34e37a8eec1"] * 2
    assert encode_task(plain) == f'{{"schema":1,"id":"{plain.id}","experiment":"default","command":["a"]}}'
    assert ("secrets" in task_fields(plain), task_fields(none)["secrets"]) == (False, [])


@given(st.datetimes(timezones=st.sampled_from([UTC, timezone(timedelta(hours=5, minutes=30))])))
def test_time_is_spelled_in_utc_with_milliseconds(at: datetime) -> None:
    try:
        expected = at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    except OverflowError:
        return
    assert format_time(at) == expected


def test_tasks_of_different_times_are_spelled_with_their_own() -> None:
    times = [datetime(2026, 1, 31, 12, 0, second, tzinfo=UTC) for second in (1, 1, 2)]
    made = [sample_task(submitted_at=at) for at in (*times, None, times[0])]

    assert [json.loads(encode_task(task)).get("submitted_at") for task in made] == [
        *("2026-01-31T12:00:01.000Z", "2026-01-31T12:00:01.000Z", "2026-01-31T12:00:02.000Z", None),
        "2026-01-31T12:00:01.000Z",
    ]


def test_value_that_holds_itself_is_no_json() -> None:
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(ValueError, match="Circular"):
        canonical_json(endless)
    with pytest.raises(InvalidTask) as refused:
        task_id("exp", entry=FunctionEntry("m:f", (endless,)))
    assert refused.value.field == "args[0]"


def test_bare_form_is_a_task_of_the_default_experiment() -> None:
    task = decode_task('{"project": "p", "workflow": "w", "args": ["--x=1"]}', fallback_key="msg-7")
    assert task.entry == WorkflowEntry("p", "w", ("--x=1",))
    assert (task.experiment, task.generation, task.max_failures) == ("default", 1, 3)
    assert task.id == task_id("default", key="message:msg-7")


def test_identical_entries_without_a_key_are_one_task_and_keys_tell_them_apart() -> None:
    line = '{"command": ["echo", "1"]}'
    assert decode_task(line).id == decode_task('{"command":["echo","1"],"timeout_s":5}').id
    assert decode_task('{"command": ["echo", "1"], "key": "a"}').id != decode_task(line).id
    assert decode_task(line, defaults=Terms(experiment="other")).id != decode_task(line).id


def test_id_ends_with_the_digest_of_its_experiment() -> None:
    assert sample_task("1", experiment="sweep").id.endswith(experiment_digest("sweep"))


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("{", "json"),
        ("[]", "json"),
        ("3", "json"),
        ("{}", "entry"),
        ('{"workflow": "w", "command": ["x"], "project": "p"}', "entry"),
        ('{"workflow": "w"}', "project"),
        ('{"project": "p", "workflow": ""}', "workflow"),
        ('{"project": "p", "workflow": "w", "args": "x"}', "args"),
        ('{"project": "p", "workflow": "w", "args": 0}', "args"),
        ('{"project": "p", "workflow": "w", "args": [1]}', "args[0]"),
        ('{"project": "p", "workflow": "w", "kwargs": {}}', "kwargs"),
        ('{"command": []}', "command"),
        ('{"command": ["x"], "project": "p"}', "project"),
        ('{"function": "noname"}', "function"),
        ('{"function": "m:f", "args": [{"x": "\\udcff"}]}', "args[0]"),
        ('{"command": ["x", "\\uDCFF"]}', "command[1]"),
        ('{"command": ["x"], "schema": 2}', "schema"),
        ('{"command": ["x"], "schema": true}', "schema"),
        ('{"command": ["x"], "timeout_s": 0}', "timeout_s"),
        ('{"command": ["x"], "timeout_s": true}', "timeout_s"),
        ('{"command": ["x"], "max_failures": -1}', "max_failures"),
        ('{"command": ["x"], "expires_at": "2026-01-01"}', "expires_at"),
        ('{"command": ["x"], "id": "../../etc"}', "id"),
        ('{"command": ["x"], "experiment": ".hidden"}', "experiment"),
        ('{"command": ["x"], "experiment": "a/b"}', "experiment"),
        ('{"command": ["x"], "resources": {"gpu": 1}}', "resources.gpu"),
        ('{"command": ["x"], "resources": {"gpus": 1.5}}', "resources.gpus"),
        ('{"command": ["x"], "resources": {"memory": "16 parsecs"}}', "resources.memory"),
    ],
)
def test_malformed_task_is_refused_with_the_field(line: str, field: str) -> None:
    with pytest.raises(InvalidTask) as refused:
        decode_task(line, line=4)
    assert (refused.value.field, refused.value.line) == (field, 4)


def test_text_that_was_cut_off_is_refused_wherever_that_was() -> None:
    whole = encode_task(sample_task("1", timeout=timedelta(seconds=1.5), resources=Resources(gpus=1)))
    for end in range(len(whole)):
        for read in (decode_task, decode_stored):
            with pytest.raises(InvalidTask):
                read(whole[:end])


def test_argument_that_is_no_utf8_is_refused() -> None:
    with pytest.raises(InvalidTask) as refused:
        parse_task({"command": ["cat", os.fsdecode(b"/tmp/\xff")]})
    assert refused.value.field == "command[1]"


def test_escaped_surrogate_pair_is_a_character() -> None:
    assert decode_task('{"command": ["\\ud83d\\ude00"]}').entry == CommandEntry(("\U0001f600",))


def test_deeply_nested_json_is_refused_and_not_a_crash() -> None:
    with pytest.raises(InvalidTask):
        decode_task('{"command": ["x"], "pad": ' + "[" * 100_000 + "]" * 100_000 + "}")


def test_default_values_are_left_out_of_the_wire() -> None:
    assert set(json.loads(encode_task(sample_task("1")))) == {"schema", "id", "experiment", "command", "key"}


def test_next_generation_forgets_the_delay_and_keeps_the_rest() -> None:
    task = sample_task("1", not_before=datetime(2026, 1, 1, tzinfo=UTC), max_failures=9)
    again = next_generation(task)
    assert (again.generation, again.not_before, again.max_failures, again.id) == (2, None, 9, task.id)


def test_describe_entry_is_one_line_of_bounded_width() -> None:
    text = describe_entry(CommandEntry(("echo", "a\nb" * 100)), width=40)
    assert "\n" not in text
    assert len(text) == 40


def test_terminal_states_are_those_with_a_record() -> None:
    assert [state for state in TaskState if not state.terminal] == [TaskState.QUEUED, TaskState.LEASED]


def test_divide_gives_parts_that_differ_by_at_most_one() -> None:
    assert divide(7, 3) == [3, 2, 2]
    assert divide(2, 3) == [1, 1, 0]
