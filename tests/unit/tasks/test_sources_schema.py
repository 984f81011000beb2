"""The JSON Schema and the parser accept and refuse the same tasks, and the documentation's examples are valid tasks."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from runtime.errors import InvalidTask
from runtime.tasks.wire import decode_task, encode_task, parse_task, task_fields
from runtime.testing import sample_task

SCHEMA = json.loads((files("runtime") / "tasks" / "task.schema.json").read_text(encoding="utf-8"))
VALIDATOR = Draft202012Validator(SCHEMA)
DOCUMENT = Path(__file__).parents[3] / "docs" / "task-format.md"

BARE = {"project": "p", "workflow": "w", "args": ["--x=1"]}
COMMAND = {"command": ["ls", "-l"]}

ACCEPTED: list[dict[str, Any]] = [
    BARE,
    COMMAND,
    {"project": "p", "workflow": "w"},
    {"project": "p", "workflow": "w", "args": None},
    {"project": "p", "workflow": "w", "args": []},
    {"command": [""]},
    {"function": "m:f"},
    {"function": "m.n:A.f", "args": [1, None, {"a": []}], "kwargs": {"x": 1.5}},
    {"function": "m:f", "args": None, "kwargs": None},
    {**COMMAND, "schema": 1},
    {**COMMAND, "unheard_of": {"a": [1]}, "other": None},
    {**COMMAND, "id": "t-9c53bed0996bf6a537a8eec1"},
    {**COMMAND, "id": "t-Z"},
    {**COMMAND, "experiment": "Größe_1.a+b@c=d-e"},
    {**COMMAND, "experiment": "x" * 128},
    {**COMMAND, "generation": 1_000_000},
    {**COMMAND, "resources": {}},
    {**COMMAND, "resources": {"cpus": 0.5, "memory": 17, "gpus": 0.25}},
    {**COMMAND, "resources": {"cpus": 0, "memory": "1.5 GiB", "gpus": 8}},
    {**COMMAND, "resources": {"memory": "512MB", "gpus": 1}},
    {**COMMAND, "timeout_s": 0.1},
    {**COMMAND, "timeout_s": 999_999_999},
    {**COMMAND, "not_before": "2026-01-31T12:00:00Z", "expires_at": "2026-01-31 12:00:00.123456+02:00"},
    {**COMMAND, "max_failures": 1},
    {**COMMAND, "max_failures": 0},
    {**COMMAND, "resources": {"memory": 1 << 60}},
    {**COMMAND, "outputs": ["/a", "gs://b/c", ""]},
    {**COMMAND, "snapshot": "s", "folder": "a/..b/c\n"},
    {**COMMAND, "snapshot": "s", "key": "any text\n{}", "submitted_by": "a@b"},
    {**COMMAND, "priority": -1_000_000},
    {**COMMAND, "image": "ghcr.io/lab/train:1.4@sha256:ab", "mounts": []},
    {**COMMAND, "image": "docker://debian", "mounts": ["/a b:/c", "/a:/d:rw", {"source": "/a:b", "target": "/e"}]},
    {**COMMAND, "image": "debian", "mounts": [{"source": "/a", "target": "/b", "mode": "rw"}]},
    {**COMMAND, "image": None, "mounts": None},
    {**COMMAND, "mounts": []},
    {**COMMAND, "secrets": []},
    {**COMMAND, "secrets": ["hf-token", "WANDB_API_KEY"]},
    {
        **COMMAND,
        **dict.fromkeys(
            ["id", "experiment", "generation", "resources", "timeout_s", "not_before", "expires_at", "max_failures",
             "outputs", "snapshot", "folder", "secrets", "key", "priority", "submitted_by", "submitted_at"]
        ),
    },
]  # fmt: skip

REFUSED: list[Any] = [
    None,
    3,
    "x",
    [],
    [BARE],
    {},
    {"project": "p"},
    {"args": []},
    {"workflow": "w"},
    {"workflow": "w", "project": None},
    {"workflow": "w", "project": ""},
    {"workflow": "", "project": "p"},
    {"workflow": None, "project": "p"},
    {**BARE, "args": [1]},
    {**BARE, "args": "--x"},
    {**BARE, "args": {"x": 1}},
    {**BARE, "command": ["ls"]},
    {**BARE, "function": "m:f"},
    {**COMMAND, "function": "m:f"},
    {**COMMAND, "workflow": None},
    {"command": []},
    {"command": "ls"},
    {"command": ["ls", 1]},
    {"command": ["ls", "a\0b"]},
    {"command": ["ls\0"]},
    {"command": None},
    {"function": "f"},
    {"function": ":f"},
    {"function": "m:"},
    {"function": ""},
    {"function": "m:f", "args": {"a": 1}},
    {"function": "m:f", "kwargs": [1]},
    {**COMMAND, "schema": 2},
    {**COMMAND, "schema": "1"},
    {**COMMAND, "schema": None},
    {**COMMAND, "id": "x-1"},
    {**COMMAND, "id": "t-"},
    {**COMMAND, "id": "t-a b"},
    {**COMMAND, "id": "t-ü"},
    {**COMMAND, "id": "t-a\n"},
    {**COMMAND, "id": "t-" + "a" * 63},
    {**COMMAND, "id": 7},
    {**COMMAND, "experiment": ""},
    {**COMMAND, "experiment": ".hidden"},
    {**COMMAND, "experiment": "a/b"},
    {**COMMAND, "experiment": "a\n"},
    *({**COMMAND, "folder": name} for name in ("", "/a", "..", "a/../b", "a/", "a//b", "./a", "a/.", "a\0b", 1)),
    {**COMMAND, "experiment": "x" * 129},
    *({**COMMAND, "image": name} for name in ("", "a b", "--privileged", "./a", "/a", "train.sif", 1, ["a"], "a\n")),
    *(
        {**COMMAND, "image": "a", "mounts": mounts}
        for mounts in ("/a:/b", {}, [1], ["/a"], ["a:/b"], ["/a:b"], ["/a:/b:x"], ["gs://a:/b"], [{"source": "/a"}])
    ),
    {**COMMAND, "image": "a", "mounts": [{"source": "/a", "target": "/b", "readonly": True}]},
    {**COMMAND, "image": "a", "mounts": [{"source": "/a", "target": "/b", "mode": "x"}]},
    {**COMMAND, "mounts": ["/a:/b"]},
    {**COMMAND, "image": "a", "environment": "sha256:" + "0" * 64},
    *({**COMMAND, "secrets": names} for names in ("hf-token", {"hf-token": "x"}, [""], ["a b"], ["A=x"], ["a\n"], [1])),
    {**COMMAND, "generation": 0},
    {**COMMAND, "generation": True},
    {**COMMAND, "generation": "1"},
    {**COMMAND, "generation": 1_000_001},
    {**COMMAND, "resources": []},
    {**COMMAND, "resources": {"gpu": 1}},
    {**COMMAND, "resources": {"gpus": 1.5}},
    {**COMMAND, "resources": {"gpus": -1}},
    {**COMMAND, "resources": {"cpus": "2"}},
    {**COMMAND, "resources": {"cpus": True}},
    {**COMMAND, "resources": {"memory": "16 gigs"}},
    {**COMMAND, "resources": {"memory": -1}},
    {**COMMAND, "resources": {"memory": 1.5}},
    {**COMMAND, "timeout_s": 0},
    {**COMMAND, "timeout_s": -1},
    {**COMMAND, "timeout_s": 1e9},
    {**COMMAND, "timeout_s": "2h"},
    {**COMMAND, "timeout_s": True},
    {**COMMAND, "not_before": "tomorrow"},
    {**COMMAND, "not_before": "2026-01-31T12:00:00"},
    {**COMMAND, "expires_at": 1700000000},
    {**COMMAND, "submitted_at": ""},
    {**COMMAND, "max_failures": -1},
    {**COMMAND, "resources": {"memory": (1 << 60) + 1}},
    {**COMMAND, "outputs": "a"},
    {**COMMAND, "outputs": [1]},
    {**COMMAND, "snapshot": ""},
    {**COMMAND, "key": 3},
    {**COMMAND, "priority": 1.5},
    {**COMMAND, "priority": 1_000_001},
    {**COMMAND, "submitted_by": []},
]


def test_schema_is_a_schema() -> None:
    Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("fields", ACCEPTED, ids=json.dumps)
def test_both_accept(fields: dict[str, Any]) -> None:
    parse_task(fields)

    assert list(VALIDATOR.iter_errors(fields)) == []


@pytest.mark.parametrize("fields", REFUSED, ids=lambda fields: json.dumps(fields)[:60])
def test_both_refuse(fields: Any) -> None:
    with pytest.raises(InvalidTask):
        parse_task(fields)

    assert not VALIDATOR.is_valid(fields)


def test_what_is_written_fits_the_schema() -> None:
    fields = task_fields(decode_task(encode_task(sample_task(priority=3, extra={"colour": "red"}))))

    assert list(VALIDATOR.iter_errors(fields)) == []


def test_every_field_of_the_schema_is_in_the_documentation() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    known = {*SCHEMA["properties"], "args", "kwargs", *SCHEMA["properties"]["resources"]["properties"]}

    assert [name for name in sorted(known) if f"`{name}`" not in text] == []


def test_examples_of_the_documentation_are_tasks() -> None:
    blocks = re.findall(r"```json\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    decoder, examples = json.JSONDecoder(), []
    for block in blocks:
        rest = block.strip()
        while rest:
            fields, end = decoder.raw_decode(rest)
            examples.append(fields)
            rest = rest[end:].strip()

    assert len(examples) == 6
    for fields in examples:
        parse_task(fields)
        assert list(VALIDATOR.iter_errors(fields)) == []
