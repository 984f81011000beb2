"""Job specs: one meaning, however they are written."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from runtime.errors import NotPossible
from runtime.jobs.array import expand_array, fill_command
from runtime.jobs.spec import (
    Array,
    Backoff,
    Checkpoint,
    Code,
    CodeMode,
    Dependency,
    Gpus,
    InvalidSpec,
    JobResources,
    JobSpec,
    JobState,
    OnExit,
    Placement,
    Priority,
    Range,
    Retry,
    SecretRef,
    parse_spec,
    spec_schema,
)
from runtime.jobs.spec_fields import encode_spec, job_id, set_fields, spec_fields
from runtime.jobs.spec_file import MOST_BYTES, load_yaml, read_spec_file
from runtime.schema import Size
from runtime.tasks.container import Mount, MountMode

GIB = 1024**3
ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)

FULL = JobSpec(
    command=("python", "train.py", "--lr", "{lr}"),
    name="train-7b",
    code=Code(mode=CodeMode.SNAPSHOT, exclude=("data/",), max_size=Size(GIB), writable=False),
    image="registry.example.org/lab/image@sha256:" + "a" * 64,
    env={"WANDB_MODE": "online", "HOME_DIR": None},
    secrets=(SecretRef(name="HF_TOKEN", source="secret-manager://hf-token"),),
    mounts=(Mount(source="claim://scratch", target="/scratch", mode=MountMode.RW),),
    resources=JobResources(
        cpus=8, memory=Range(16 * GIB, None), gpus=Gpus(count=0.25, type="h100"), shared_memory=Size(GIB)
    ),
    array=Array(params={"lr": (1e-3, 3e-4), "depth": (2, 4)}, max_parallel=16, pack=4),
    placement=Placement(on=("slurm", "local"), capacity="reservation:lab", selector={"zone": "a"}),
    priority=Priority.HIGH,
    account="vision",
    time_limit=timedelta(hours=12),
    grace_period=timedelta(seconds=30),
    retry=Retry(failure=1, on_exit={"75": OnExit.REQUEUE}, backoff=Backoff(min=timedelta(seconds=1))),
    checkpoint=Checkpoint(lead=timedelta(minutes=1)),
    after=("j-0123",),
)


def problems_of(value: object) -> list[tuple[str, str, str | None]]:
    with pytest.raises(InvalidSpec) as failed:
        parse_spec(value)
    return [(each.path, each.message, each.hint) for each in failed.value.problems]


@pytest.mark.parametrize(
    ("outputs", "said"),
    [
        ({"include": ["*.csv"]}, "has `include`, and no `every`"),
        ({"every": "5s", "include": ["*.csv", "/out/*"]}, "has `/out/*` in `include`, which no path"),
        ({"every": "5s", "include": ["../*.csv"]}, "has `../*.csv` in `include`, which no path"),
        ({"every": "5s", "include": ["./*.csv"]}, "has `./*.csv` in `include`, which no path"),
        ({"every": "5s", "include": [""]}, "has `` in `include`, which no path"),
        ({"every": "0.1s"}, "has `every` 100ms, expected 1s to 1d"),
        ({"every": "2d"}, "has `every` 2d, expected 1s to 1d"),
        ({"every": "1m", "dir": "/data"}, "has `every` and `dir`: a folder of your own is sent nowhere"),
    ],
)
def test_outputs_that_cannot_be_sent_at_intervals_are_refused(outputs: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidSpec) as refused:
        parse_spec({"command": ["x"], "outputs": outputs})

    assert said in refused.value.message


def test_spec_survives_the_way_through_json_and_yaml(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(json.dumps(spec_fields(FULL)))

    read = parse_spec(json.loads(encode_spec(FULL)))
    assert read == FULL
    assert expand_array(read.array) == expand_array(FULL.array)
    assert parse_spec(read_spec_file(str(tmp_path / "job.yaml"))) == FULL


def test_spec_written_by_hand_means_what_its_values_say() -> None:
    spec = parse_spec(
        {
            "command": ["python", "train.py"],
            "resources": {"memory": "16GiB..64GiB", "gpus": {"count": 8}},
            "time_limit": "12h",
            "retry": {"capacity": {"window": "1d"}},
            "array": {"seeds": 3},
        }
    )

    assert spec.resources == JobResources(memory=Range(16 * GIB, 64 * GIB), gpus=Gpus(count=8.0))
    assert (spec.time_limit, spec.retry.capacity.window) == (timedelta(hours=12), timedelta(days=1))
    assert spec.array == Array(seeds=3)


def test_spec_of_one_line_of_shell_may_be_text() -> None:
    assert parse_spec({"command": "a | b", "shell": True}) == JobSpec(command=("a | b",), shell=True)


def test_spec_with_many_mistakes_names_each_with_what_is_allowed() -> None:
    assert problems_of(
        {
            "comand": ["x"],
            "resources": {"gpu": 1, "memory": "lots"},
            "env": {"A": 1},
            "nodes": "2",
            "priority": "hihg",
            "time_limit": [],
            "mounts": [{"source": "/a"}],
        }
    ) == [
        ("comand", "is no field here", "did you mean `command`?"),
        ("command", "is missing", None),
        ("env.A", "is 1, expected text", "put it in quotes"),
        ("mounts[0].target", "is missing", None),
        ("resources.gpu", "is no field here", "did you mean `gpus`?"),
        ("resources.memory", 'is "lots", expected a size such as 16GiB, 16GiB.. or 16GiB..64GiB', None),
        ("nodes", 'is "2", expected a whole number', None),
        ("priority", 'is "hihg", expected one of low, normal, high, urgent', "did you mean `high`?"),
        ("time_limit", "is a list, expected a duration such as 90s, 5m, 2h or 1d", None),
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"command": []}, "has an empty `command`"),
        ({"shell": True, "command": ["a", "b"]}, "expected one line of shell"),
        ({"name": "Big_Run"}, "expected lower-case letters"),
        ({"env": {"HF_TOKEN": "hf_abc"}}, "looks like a secret"),
        ({"env": {"1X": "a"}}, "expected letters, digits"),
        ({"nodes": 0}, "`nodes` 0, expected 1 to 100000"),
        ({"nodes": 100_000_000}, "`nodes` 100000000, expected 1 to 100000"),
        ({"tasks_per_node": 100_001}, "`tasks_per_node` 100001, expected 1 to 100000"),
        (
            {"nodes": 1000, "tasks_per_node": 101},
            "`nodes` 1000 and `tasks_per_node` 101, expected at most 100000 ranks",
        ),
        ({"time_limit": "0s"}, "expected more than 0"),
        ({"time_limit": "1m", "checkpoint": {"lead": "2m"}}, "expected less than `time_limit` 1m"),
        ({"array": {}}, "has none of"),
        ({"array": {"count": 2, "seeds": 2}}, "has count and seeds"),
        ({"array": {"count": 0}}, "`count` 0, expected 1 to 100000"),
        ({"array": {"params": {"lr": []}}}, "no values for `params.lr`"),
        ({"array": {"count": 2, "pack": 2}, "nodes": 2}, "packed runs"),
        ({"resources": {"gpus": {"count": 1.5}}}, "expected whole GPUs"),
        ({"resources": {"cpus": 0}}, "`cpus` 0, expected more than 0"),
        ({"mounts": [{"source": "/a", "target": "b"}]}, "expected an absolute path"),
        ({"secrets": [{"name": "A", "source": "hf-token"}]}, "a `source` that is no reference, expected SCHEME://REST"),
        ({"secrets": [{"name": "A", "source": "env://"}]}, "expected SCHEME://REST"),
        ({"secrets": [{"name": "A", "source": "Env://A"}]}, "expected SCHEME://REST"),
        ({"placement": {"capacity": "cheap"}}, "expected spot, on-demand, auto"),
        ({"retry": {"on_exit": {"300": "fail"}}}, "expected 0 to 255"),
        ({"retry": {"failure": -1}}, "expected 0 or more"),
        ({"retry": {"backoff": {"min": "1h"}}}, "above `max`"),
        ({"resources": {"gpus": {"count": math.nan}}}, "is NaN, expected a number"),
        ({"resources": {"gpus": {"count": math.inf}}}, "is Infinity, expected a number"),
        ({"resources": {"cpus": math.nan}}, "is NaN, expected a number"),
        ({"time_limit": "99999999999999d"}, "expected a duration"),
        ({"time_limit": math.inf}, "expected a duration"),
        ({"array": {"params": {"lr": [math.nan]}}}, "values for `params.lr` that JSON does not have"),
        ({"array": {"params": {"day": [date(2026, 1, 31)]}}}, "values for `params.day` that JSON does not have"),
        ({"array": {"params": {"x": ENDLESS}}}, "values for `params.x` that JSON does not have"),
        ({"command": ["a\0b"]}, "zero byte"),
        ({"env": {"A": "\0"}}, "zero byte"),
    ],
)
def test_spec_that_cannot_mean_anything_is_refused(change: dict[str, Any], message: str) -> None:
    assert any(message in found for _, found, _ in problems_of({"command": ["x"], **change}))


def test_parameters_written_as_a_grid_are_the_same_job_as_their_list() -> None:
    written = parse_spec({"command": ["x"], "array": {"params": {"lr": "log:1e-3:1e-1:3", "seed": "0:2", "b": [1]}}})
    listed = parse_spec(
        {"command": ["x"], "array": {"params": {"lr": ["0.001", "0.01", "0.1"], "seed": ["0", "1"], "b": [1]}}}
    )

    assert encode_spec(written) == encode_spec(listed)
    assert JobSpec(command=("x",), array=Array(params={"n": "1,2"})).array == Array(params={"n": ("1", "2")})
    assert jsonschema.Draft202012Validator(spec_schema()).is_valid(
        {"command": ["x"], "array": {"params": {"n": "0:3"}}}
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("log:0:1:3", '"log:0:1:3", expected log:LO:HI:N with LO above 0'),
        ("1e-5:1e-1:5l", "; log:1e-5:1e-1:5; a text"),
        ("", "no values for `params.lr`"),
    ],
)
def test_unreadable_grid_of_a_parameter_is_refused(text: str, said: str) -> None:
    with pytest.raises(InvalidSpec) as refused:
        parse_spec({"command": ["x"], "array": {"params": {"lr": text}}}, source="`job.yaml`")

    assert said in refused.value.message


@pytest.mark.parametrize(("params", "name"), [({"a=b": [1]}, "a=b"), ({"": [1]}, ""), ({"a": ["\0"]}, "a")])
def test_parameter_that_no_process_can_be_given_is_refused(params: dict[str, Any], name: str) -> None:
    spec = parse_spec({"command": ["x"], "array": {"params": params}})

    with pytest.raises(NotPossible) as refused:
        expand_array(spec.array)

    assert refused.value.message == f"parameter {json.dumps(name)} of the array cannot be a variable of a process"


def test_array_beyond_all_bounds_is_refused_before_it_is_made() -> None:
    spec = parse_spec({"command": ["x"], "array": {"params": {f"p{each}": list(range(10)) for each in range(30)}}})

    with pytest.raises(NotPossible, match=f"has {10**30} indices"):
        expand_array(spec.array)


def test_date_in_a_file_is_text_and_a_key_that_is_there_twice_an_error() -> None:
    assert load_yaml("array: {params: {day: [2026-01-31]}}") == {"array": {"params": {"day": ["2026-01-31"]}}}
    with pytest.raises(yaml.YAMLError, match="`a` is there twice"):
        load_yaml("env:\n  a: 1\n  a: 2\n")


@pytest.mark.parametrize("key", ["null", "~", "NULL"])
def test_key_that_is_null_is_an_error_and_no_variable_called_none(key: str) -> None:
    with pytest.raises(yaml.YAMLError, match="a key is null"):
        load_yaml(f"env:\n  {key}: a\n")

    assert load_yaml('env:\n  "null": a\n') == {"env": {"null": "a"}}


def test_spec_with_a_secret_by_name_only_takes_it_from_the_shell() -> None:
    assert parse_spec({"command": ["x"], "env": {"HF_TOKEN": None}}).env == {"HF_TOKEN": None}


def test_set_fields_are_those_that_differ_from_their_default() -> None:
    assert set_fields(JobSpec(command=("x",))) == ["command"]
    assert set_fields(JobSpec(command=("x",), checkpoint=Checkpoint(), nodes=2)) == ["checkpoint", "command", "nodes"]
    assert set_fields(FULL) == [
        "account",
        "after",
        "array.max_parallel",
        "array.pack",
        "array.params",
        "checkpoint.lead",
        "code.exclude",
        "code.max_size",
        "code.writable",
        "command",
        "env",
        "grace_period",
        "image",
        "mounts",
        "name",
        "placement.capacity",
        "placement.on",
        "placement.selector",
        "priority",
        "resources.cpus",
        "resources.gpus.count",
        "resources.gpus.type",
        "resources.memory",
        "resources.shared_memory",
        "retry.backoff.min",
        "retry.failure",
        "retry.on_exit",
        "secrets",
        "time_limit",
    ]


def test_schema_accepts_what_we_write_and_refuses_what_we_refuse() -> None:
    schema = spec_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(spec_fields(FULL), schema)

    for wrong in (
        {},
        {"command": ["x"], "comand": 1},
        {"command": ["x"], "nodes": "2"},
        {"command": ["x"], "priority": "x"},
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)


def test_schema_describes_every_field_that_the_source_explains() -> None:
    described = spec_schema()["properties"]["checkpoint"]["anyOf"][0]["properties"]["lead"]["description"]

    assert described == "How long before the time limit the signal comes."


@pytest.mark.parametrize(
    ("written", "identity"),
    [
        ({"command": ["true"]}, "j-724d78f85fdf1828e493a9c8"),
        (
            {
                "command": ["python", "train.py", "--lr", "{lr}"],
                "array": {"params": {"lr": [0.1, 0.01], "depth": [2, 4]}, "max_parallel": 2},
                "env": {"B": "2", "A": None},
                "resources": {"cpus": 8, "memory": "16GiB..", "gpus": {"count": 1, "type": "a100"}},
            },
            "j-54c1a689248b2ecd1c77d407",
        ),
        (
            {
                "command": "echo hi | cat",
                "shell": True,
                "after": "ok:j-0123",
                "time_limit": "1h",
                "checkpoint": {"lead": "1m"},
            },
            "j-686548f9099208b17ad61bb0",
        ),
        (
            {
                "command": ["x"],
                "nodes": 2,
                "retry": {"failure": 3, "on_exit": {"42": "requeue"}},
                "secrets": [{"name": "HF", "source": "env://HF"}],
                "log_limit": "2GiB",
                "idempotency_key": "a",
            },
            "j-3aa671565f0e34cd824a6d07",
        ),
    ],
)
def test_job_id_of_a_spec_stays_what_it_was_in_earlier_versions(written: dict[str, Any], identity: str) -> None:
    assert job_id(owner="ada", target="hpc", spec=parse_spec(written), snapshot="sha256:1") == identity


def test_job_id_differs_by_each_of_its_parts_and_by_nothing_else() -> None:
    def made(**change: Any) -> str:
        return job_id(**{"owner": "a", "target": "t", "spec": FULL, "snapshot": "sha256:1", **change})

    others = [
        made(owner="b"),
        made(target="u"),
        made(spec=dataclasses.replace(FULL, nodes=1, idempotency_key="2")),
        made(snapshot=None),
        made(again=1),
        made(
            spec=dataclasses.replace(
                FULL, array=Array(params={"depth": (2, 4), "lr": (1e-3, 3e-4)}, max_parallel=16, pack=4)
            )
        ),
    ]

    assert made() == made(spec=parse_spec(spec_fields(FULL)))
    assert made() == made(spec=dataclasses.replace(FULL, env=dict(reversed(FULL.env.items()))))
    assert len({made(), *others}) == 7
    assert len(made()) == 26


def test_array_of_parameters_is_every_combination_with_the_last_name_fastest() -> None:
    assert expand_array(FULL.array) == [
        {"lr": 1e-3, "depth": 2},
        {"lr": 1e-3, "depth": 4},
        {"lr": 3e-4, "depth": 2},
        {"lr": 3e-4, "depth": 4},
    ]


def test_array_of_seeds_counts_and_files_expand_to_their_indices() -> None:
    assert expand_array(None) == [{}]
    assert expand_array(Array(seeds=2, offset=5)) == [{"seed": 5}, {"seed": 6}]
    assert expand_array(Array(count=2)) == [{}, {}]
    assert expand_array(Array(file="p.jsonl"), [{"a": 1}]) == [{"a": 1}]
    with pytest.raises(NotPossible, match="0 indices"):
        expand_array(Array(file="p.jsonl"), [])


def test_fill_command_replaces_parameters_and_leaves_other_braces() -> None:
    command = ("python", "--lr={lr}", "{index}", '{"a": {"b": 1}}', "awk {print}", "{name}")

    assert fill_command(command, {"lr": 3e-4, "name": "x y"}, 7) == (
        "python",
        "--lr=0.0003",
        "7",
        '{"a": {"b": 1}}',
        "awk {print}",
        "x y",
    )


def test_fill_command_with_a_name_that_is_nearly_a_parameter_is_refused() -> None:
    with pytest.raises(NotPossible, match=r"`\{dephts\}`") as failed:
        fill_command(("{dephts}",), {"depths": 1}, 0)

    assert failed.value.hint == "did you mean `{depths}`?"


@pytest.mark.parametrize("text", ["16GiB", "16GiB..", "16GiB..64GiB", "1500"])
def test_range_reads_what_it_writes(text: str) -> None:
    assert Range.read(str(Range.read(text))) == Range.read(text)


@pytest.mark.parametrize("text", ["", "..16GiB", "64GiB..16GiB", "0", True, None, 1.5])
def test_range_that_is_none_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match="a size such as"):
        Range.read(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("env: " + "[" * 700 + "]" * 700, "is no YAML: it is nested too deeply"),
        ("priority: " + "9" * 5000, "is no YAML: Exceeds the limit"),
        ("env: &a {A: *a}", "is no YAML: an anchor refers to itself"),
        (
            "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{f'*a{i - 1}, ' * 10}]\n" for i in range(1, 9)),
            "is no YAML: its anchors stand for more than 1,000,000 values",
        ),
        ("#" * (MOST_BYTES + 1), "is no job file: it has more than 4 MiB"),
    ],
    ids=["deep", "digits", "circle", "bomb", "large"],
)
def test_reading_a_spec_that_would_exhaust_the_reader_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "job.yaml").write_text(text)

    with pytest.raises(NotPossible, match=re.escape(said)) as refused:
        read_spec_file(tmp_path / "job.yaml")

    assert refused.value.hint


def test_reading_a_spec_whose_anchors_repeat_values_is_no_bomb(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("a: &a [1, 2]\nb: *a\nc: {<<: &m {d: *a}, e: *m}\n")

    assert read_spec_file(tmp_path / "job.yaml") == {"a": [1, 2], "b": [1, 2], "c": {"d": [1, 2], "e": {"d": [1, 2]}}}


def test_reading_a_spec_of_a_file_that_is_none_says_so(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("a: [")

    with pytest.raises(NotPossible, match="is no YAML"):
        parse_spec(read_spec_file(str(tmp_path / "job.yaml")))
    with pytest.raises(NotPossible, match="no such file"):
        parse_spec(read_spec_file(str(tmp_path / "other.yaml")))


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("j-91c0", ("j-91c0",)),
        (["j-91c0", "any:j-2"], ("j-91c0", "any:j-2")),
        ("notok:j-2", ("notok:j-2",)),
        ("ok:j-2", ("j-2",)),
    ],
)
def test_after_is_one_job_or_many_each_with_the_end_that_is_waited_for(written: Any, read: tuple[str, ...]) -> None:
    spec = parse_spec({"command": ["true"], "after": written})

    assert spec.after == read
    assert parse_spec(spec_fields(spec)) == spec
    assert jsonschema.Draft202012Validator(spec_schema()).is_valid({"command": ["true"], "after": written})
    assert replace(spec, after="any:j-2").after == ("any:j-2",)  # type: ignore[arg-type]


@pytest.mark.parametrize("written", ["train", "maybe:j-1", ["j-1", "last"], "", 7])
def test_after_that_names_no_job_is_refused(written: Any) -> None:
    with pytest.raises(InvalidSpec):
        parse_spec({"command": ["true"], "after": written})
    assert not jsonschema.Draft202012Validator(spec_schema()).is_valid({"command": ["true"], "after": written})


@pytest.mark.parametrize(
    ("when", "met"),
    [
        ("ok", {JobState.SUCCEEDED}),
        ("notok", {JobState.FAILED, JobState.CANCELLED}),
        ("any", {JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED}),
    ],
)
def test_dependency_is_met_by_the_end_that_it_waits_for_and_by_no_state_before(when: str, met: set[JobState]) -> None:
    assert {state for state in JobState if Dependency.read(f"{when}:j-1").is_met(state)} == met


def test_number_of_gpus_is_short_for_their_count() -> None:
    short = parse_spec({"command": ["true"], "resources": {"gpus": 0.5, "cpus": 2}})

    assert short == parse_spec({"command": ["true"], "resources": {"gpus": {"count": 0.5}, "cpus": 2}})
    with pytest.raises(InvalidSpec, match=r"resources\.gpus"):
        parse_spec({"command": ["true"], "resources": {"gpus": True}})
