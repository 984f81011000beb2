"""The artifacts of a task on the wire and in Python: what is taken, and what is refused with its field."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest

from runtime.errors import InvalidTask
from runtime.tasks.artifacts import EVERY, ArtifactSpec, Version, variable_of
from runtime.tasks.wire import decode_task, encode_task
from runtime.testing import sample_task

VERSION = "t-1a/model/g0000001.a000002.n00000003.0123456789abcdef"
CODE = {"snapshot": "sha256:0"}


@pytest.mark.parametrize(
    "artifacts",
    [
        ArtifactSpec({"model": "out/model", "log": "loss.csv"}),
        ArtifactSpec({"model": "out"}, timedelta(seconds=5)),
        ArtifactSpec(reuse={"base": VERSION}),
        ArtifactSpec({"A.b-c_1": "a b/ü"}, EVERY, {"base": VERSION}),
    ],
)
def test_artifacts_come_back_from_the_wire(artifacts: ArtifactSpec) -> None:
    task = sample_task("1", artifacts=artifacts, **CODE)
    assert decode_task(encode_task(task)) == task


def test_task_without_artifacts_has_no_such_field() -> None:
    assert "artifacts" not in json.loads(encode_task(sample_task("1", **CODE)))
    assert "artifacts" not in json.loads(encode_task(sample_task("1", artifacts=ArtifactSpec())))


@pytest.mark.parametrize(
    ("artifacts", "field"),
    [
        ([], "artifacts"),
        ({"captures": {}}, "artifacts.captures"),
        ({"capture": ["out"]}, "artifacts.capture"),
        ({"capture": {"a b": "out"}}, "artifacts.capture"),
        ({"capture": {"_checkpoint": "out"}}, "artifacts.capture"),
        ({"capture": {"a" * 65: "out"}}, "artifacts.capture"),
        ({"capture": {f"t{number}": f"o{number}" for number in range(101)}}, "artifacts.capture"),
        ({"capture": {"m": "/etc"}}, "artifacts.capture.m"),
        ({"capture": {"m": "../x"}}, "artifacts.capture.m"),
        ({"capture": {"m": "a/./b"}}, "artifacts.capture.m"),
        ({"capture": {"m": ""}}, "artifacts.capture.m"),
        ({"capture": {"m": 1}}, "artifacts.capture.m"),
        ({"capture": {"m": "a\0b"}}, "artifacts.capture.m"),
        ({"capture": {"m": "\ud800"}}, "artifacts.capture.m"),
        ({"capture": {"m": "a", "n": "a/b"}}, "artifacts"),
        ({"capture": {"m": "a", "n": "a"}}, "artifacts"),
        ({"capture": {"a-b": "x", "a_b": "y"}}, "artifacts"),
        ({"capture": {"m": "x"}, "reuse": {"m": VERSION}}, "artifacts"),
        ({"capture": {"m": "artifacts/base/x"}, "reuse": {"base": VERSION}}, "artifacts"),
        ({"capture": {"m": "x"}, "every_s": 0.5}, "artifacts.every_s"),
        ({"capture": {"m": "x"}, "every_s": 86_401}, "artifacts.every_s"),
        ({"capture": {"m": "x"}, "every_s": True}, "artifacts.every_s"),
        ({"reuse": {"m": "sweep/model"}}, "artifacts.reuse.m"),
        ({"reuse": {"m": VERSION.replace("t-1a", "..")}}, "artifacts.reuse.m"),
        ({"reuse": {"m": f"{VERSION}/../x"}}, "artifacts.reuse.m"),
        ({"reuse": {"m": None}}, "artifacts.reuse.m"),
    ],
    ids=ascii,
)
def test_malformed_artifacts_are_refused_with_their_field(artifacts: Any, field: str) -> None:
    with pytest.raises(InvalidTask) as refused:
        decode_task(json.dumps({"command": ["true"], "artifacts": artifacts, **CODE}))
    assert refused.value.field == field


def test_artifacts_need_code() -> None:
    with pytest.raises(InvalidTask) as refused:
        decode_task(json.dumps({"command": ["true"], "artifacts": {"capture": {"m": "out"}}}))
    assert refused.value.field == "artifacts"


def test_versions_are_ordered_by_age_and_have_one_spelling() -> None:
    version = Version.parse(VERSION)
    assert version is not None
    assert version.id == VERSION
    names = ["g0000001.a000002.n00000010.x", "g0000001.a000010.n00000001.a", "g0000002.a000001.n00000001.a"]
    versions = [Version.parse(f"t-1/m/{name}") for name in names]
    assert all(versions)
    assert sorted(filter(None, reversed(versions))) == versions
    assert Version.parse("t-1/data/" + "0" * 64) is None
    assert variable_of("base.v-2") == "RUNTIME_ARTIFACT_BASE_V_2"
