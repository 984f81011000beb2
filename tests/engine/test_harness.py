"""Reports about a missing engine or virtual environment, and proof that the checks of this suite can fail."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.harness import INSTALL, NEEDED, REQUIRE_VARIABLE, ROOT, Lab, require_engine
from tests.engine.plugin import Difference, SecretValue, find_differences, is_covered, split_path, value_at
from tests.kubernetes_support import INSTALL as INSTALL_KUBERNETES

PROGRAM = """
import pulumi
from pulumi_gcp import Provider, projects, pubsub

google = Provider("google", project="lab-project")
opts = pulumi.ResourceOptions(provider=google)
api = projects.Service("api", service="pubsub.googleapis.com", project="lab-project", opts=opts)
pubsub.Topic(
    "tasks",
    name="tasks",
    project="lab-project",
    labels={"team": "a"},
    opts=pulumi.ResourceOptions(provider=google, depends_on=[api]),
)
"""


def write_toy(lab: Lab, program: str = PROGRAM) -> None:
    """Create a stack of a small program that replaces ours."""
    (lab.project / "infra").unlink()
    (lab.project / "infra").mkdir()
    (lab.project / "infra" / "__main__.py").write_text(program)
    lab.run("stack", "init", "toy", "--no-select")


# the engine


def test_missing_engine_is_skipped_with_a_line_that_says_where_it_is_from(tmp_path: Path) -> None:
    with pytest.raises(pytest.skip.Exception) as skipped:
        require_engine(str(tmp_path))

    assert skipped.value.msg == f"no `pulumi` on PATH; how to get it: {INSTALL}"


def test_incomplete_engine_is_as_good_as_none(tmp_path: Path) -> None:
    for name in NEEDED[:2]:
        (tmp_path / name).touch(mode=0o755)

    with pytest.raises(pytest.skip.Exception) as skipped:
        require_engine(str(tmp_path))

    assert "no `pulumi-language-python-exec` on PATH" in str(skipped.value.msg)


@pytest.mark.parametrize(
    ("test", "path", "reason"),
    [
        ("test_journey.py", "", INSTALL),
        ("test_kubernetes_plugin.py::test_plugin_is_as_new_as_the_sdk", os.defpath, INSTALL_KUBERNETES),
    ],
    ids=["no engine", "no Kubernetes"],
)
@pytest.mark.parametrize(("required", "outcome"), [("1", "error"), ("", "skipped")])
@pytest.mark.daily(1)
def test_whatever_the_tier_lacks_is_a_failure_only_where_the_engine_is_required(
    tmp_path: Path, test: str, path: str, reason: str, required: str, outcome: str
) -> None:
    bare = {"PATH": path, "XDG_CACHE_HOME": str(tmp_path), REQUIRE_VARIABLE: required}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-rsE", "-p", "no:cacheprovider", f"tests/engine/{test}"],
        cwd=ROOT,
        env={**os.environ, "RUNTIME_REQUIRE_SERVICES": "", **bare},
        capture_output=True,
        text=True,
        check=False,
    )

    assert re.search(rf"^\d+ {outcome}", done.stdout, re.MULTILINE), done.stdout
    assert reason in done.stdout
    assert (REQUIRE_VARIABLE in done.stdout) is bool(required)


def test_complete_engine_is_found(tmp_path: Path) -> None:
    for name in NEEDED:
        (tmp_path / name).touch(mode=0o755)

    assert require_engine(str(tmp_path)) == str(tmp_path)


# the harness on a program of two resources


def test_steps_of_a_toy_are_made_then_none_then_those_of_a_change(lab: Lab) -> None:
    write_toy(lab)

    planned = [(step.op, step.name) for step in lab.preview("toy")]
    lab.up("toy")
    after = lab.preview("toy")
    (lab.project / "infra" / "__main__.py").write_text(PROGRAM.replace('"team": "a"', '"team": "b"'))
    changed = lab.preview("toy")
    (lab.project / "infra" / "__main__.py").write_text(PROGRAM.replace('name="tasks"', 'name="others"'))
    renamed = lab.preview("toy")

    assert planned == [("create", "research-runtime-toy"), *[("create", name) for name in ("google", "api", "tasks")]]
    assert after == []
    assert [(step.op, step.name, step.paths) for step in changed] == [("update", "tasks", ("labels.team",))]
    assert {step.op for step in renamed} == {"replace"}


def test_expecting_no_changes_fails_where_there_is_one(lab: Lab) -> None:
    write_toy(lab)
    lab.up("toy")
    (lab.project / "infra" / "__main__.py").write_text(PROGRAM.replace('"team": "a"', '"team": "b"'))

    with pytest.raises(AssertionError, match="no changes were expected"):
        lab.expect_no_changes("toy")


def test_resource_without_an_explicit_provider_reaches_no_ambient_project(lab: Lab) -> None:
    write_toy(lab, 'from pulumi_gcp import pubsub\npubsub.Topic("tasks", name="tasks")\n')

    said = lab.up("toy", check=False)

    assert (said.code != 0, lab.cloud.ids("Topic")) == (True, [])
    assert "an ambient project would be taken" in said.text


# the virtual environment


def test_missing_virtual_environment_says_what_to_run(make_lab: Callable[..., Lab], tmp_path: Path) -> None:
    lab = make_lab("bare", virtualenv=False)
    lab.run("stack", "init", "toy", "--no-select")
    # The engine first updates pip, setuptools and wheel; the test serves them from a folder.
    wheels = tmp_path / "wheels"
    for name in ("setuptools", "wheel"):
        write_empty_wheel(wheels, name)
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PIP_CONFIG_FILE": "/dev/null"}

    said = lab.run("preview", "--stack", "toy", check=False, **offline)
    again = lab.run("preview", "--stack", "toy", check=False, **offline)

    assert (said.code != 0, again.code != 0) == (True, True)
    assert "run `make .venv/.ready`, then pulumi again" in said.text
    # An empty environment exists now; the engine's own message points to the same command.
    assert "pip install -r requirements.txt" in again.text


def write_empty_wheel(folder: Path, name: str) -> None:
    folder.mkdir(exist_ok=True)
    info = f"{name}-99.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-99.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 99.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


# differences


def test_differences_are_named_by_path_and_kind() -> None:
    old = {"a": 1, "labels": {"x": "1", "a.b": "2"}, "rules": [{"p": 1}, {"p": 2}], "__defaults": [], "on": True}
    new = {"b": 1, "labels": {"x": "2", "a.b": "3"}, "rules": [{"p": 1}], "__defaults": ["b"], "on": 1}

    assert find_differences(old, new) == [
        Difference("a", "delete"),
        Difference("b", "add"),
        Difference("labels.x", "update"),
        Difference('labels["a.b"]', "update"),
        Difference("on", "update"),
        Difference("rules[1]", "delete"),
    ]


def test_secret_values_are_compared_by_what_lies_inside() -> None:
    assert find_differences({"a": SecretValue("x")}, {"a": "x"}) == []
    assert find_differences({"a": SecretValue("x")}, {"a": SecretValue("y")}) == [Difference("a", "update")]


def test_paths_with_quotes_indices_and_stars_are_understood() -> None:
    values = {"a": {"b.c": [{"d": 1}]}}

    assert split_path('a["b.c"][0].d') == ["a", "b.c", 0, "d"]
    assert value_at(values, 'a["b.c"][0].d') == 1
    assert value_at(values, "a.x[2].y") is None
    assert is_covered('labels["ray-node-name"]', ['labels["ray-node-name"]'])
    assert is_covered("networkInterfaces[0].subnetwork", ["networkInterfaces.*.subnetwork"])
    assert not is_covered("labels", ['labels["ray-node-name"]'])
