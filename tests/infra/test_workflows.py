"""The hosted pipelines: pinned actions, least rights, no cancelled deployment, the plan's stacks, existing commands."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.commands_support import find_problem

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / ".github/workflows").glob("*.yml"))
SET_UP = ROOT / ".github/actions/set-up/action.yml"

PINNED = re.compile(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}|\./\.github/actions/set-up")
VERSION = re.compile(r"uses: (\S+@[0-9a-f]{40} # v\d+\.\d+\.\d+|\./\.github/actions/set-up)$")
READ_ONLY = {"contents": "read"}
MAY_WRITE = {
    "preview.yml/preview": {"id-token"},
    "preview.yml/comment": {"pull-requests"},
    "deploy.yml/deploy": {"id-token"},
    "drift.yml/look": {"id-token"},
    "drift.yml/tell": {"issues"},
}
"""The only rights that a job may have beyond reading."""

DEPLOYS = re.compile(r"pulumi (up|destroy)|infra deploy")

# A word after one of these starts a command too.
_SEPARATORS = re.compile(r"\|\||&&|[|;]|\$\(|<\(|\bif\b|\bthen\b|\bdo\b|\bexec\b")


def load(text: str) -> dict[str, Any]:
    # YAML 1.1 reads the key `on` as true.
    return {("on" if key is True else key): value for key, value in yaml.safe_load(text).items()}


def find_faults(name: str, text: str) -> list[str]:
    """Find all violations of this file's rules in a workflow."""
    workflow = load(text)
    return [
        *(f"not pinned: {each}" for each in uses_of(workflow) if not PINNED.fullmatch(each)),
        *(f"no version: {line.strip()}" for line in text.splitlines() if "uses:" in line and not VERSION.search(line)),
        *_faults_of_rights(name, workflow),
        *_faults_of_triggers(workflow),
        *_faults_of_deployment(workflow),
        *(fault for job, body in workflow["jobs"].items() for fault in _faults_of_job(job, body)),
    ]


def _faults_of_rights(name: str, workflow: dict[str, Any]) -> Iterator[str]:
    if workflow.get("permissions") != READ_ONLY:
        yield "rights of the workflow are not `contents: read`"
    for job, body in workflow["jobs"].items():
        rights = body.get("permissions", {})
        if not isinstance(rights, dict):
            yield f"rights of job {job}: {rights}"
            continue
        writes = {right for right, level in rights.items() if level != "read"}
        if writes - MAY_WRITE.get(f"{name}/{job}", set()):
            yield f"rights of job {job}: {rights}"
        runs_code = any("checkout" in each for each in uses_of({"jobs": {job: body}}))
        if runs_code and writes - {"id-token"}:
            yield f"job {job} runs code of the repository with the right to write"


def _faults_of_triggers(workflow: dict[str, Any]) -> Iterator[str]:
    triggers = workflow["on"] if isinstance(workflow["on"], dict) else {workflow["on"]: None}
    for trigger in ("pull_request_target", "workflow_run", "issue_comment"):
        if trigger in triggers:
            yield f"{trigger} lends the repository's rights to strangers"
    if workflow.get("defaults", {}).get("run", {}).get("shell") != "bash":
        yield "no `shell: bash`: the failure of a pipe's first command would pass"
    if "pull_request" not in triggers:
        return
    for job, body in workflow["jobs"].items():
        same_repository = "head.repo.full_name == github.repository" in str(body.get("if", ""))
        if "id-token" in body.get("permissions", {}) and not same_repository:
            yield f"job {job} has an identity for forks too"


def _faults_of_deployment(workflow: dict[str, Any]) -> Iterator[str]:
    jobs = {job: body for job, body in workflow["jobs"].items() if DEPLOYS.search(yaml.safe_dump(body))}
    if jobs and workflow.get("concurrency", {}).get("cancel-in-progress") is not False:
        yield "a later run may cancel a deployment, or overtake it"
    if len(jobs) > 1:
        yield "more than one job deploys, and each asks for an approval"
    for job, body in jobs.items():
        if body.get("environment") != "production":
            yield f"job {job} deploys outside the protected environment"
        if not all("exec " in step["run"] for step in body["steps"] if DEPLOYS.search(step.get("run", ""))):
            yield f"job {job} keeps signals from the program"


def _faults_of_job(job: str, body: dict[str, Any]) -> Iterator[str]:
    if not isinstance(body.get("timeout-minutes"), int):
        yield f"job {job} has no time limit"
    text = yaml.safe_dump(body)
    if "RUNTIME_REQUIRE_ENGINE" in text:
        needed = (
            "engine: 'true'|scripts/engine build",
            "scripts/services",
            "scripts/kubernetes install",
            "scripts/kubernetes build",
        )
        yield from (
            f"job {job} requires the engine's tests and lacks {each}" for each in needed if not re.search(each, text)
        )
    if "secrets." in text:
        yield f"job {job} uses a stored secret"
    for step in body["steps"]:
        if "checkout@" in step.get("uses", "") and step.get("with", {}).get("persist-credentials") is not False:
            yield f"job {job} leaves git's credentials in the work tree"
        if "${{" in step.get("run", ""):
            yield f"job {job} pastes an expression into a script"
        for line in step.get("run", "").replace("\\\n", " ").splitlines():
            # The drift check compares and deploys nothing.
            judged = "--policy-pack infra/policy/pack" in line or "--expect-no-changes" in line
            if re.search(r"\bpulumi (up|preview)\b", line) and not judged:
                yield f"job {job} applies no policy"


def uses_of(workflow: dict[str, Any]) -> list[str]:
    return [step["uses"] for body in workflow["jobs"].values() for step in body["steps"] if "uses" in step]


def commands_of(workflow: dict[str, Any]) -> list[list[str]]:
    """Yield the command lines in all scripts that are ours: make, runtime, python -m infra."""
    found = []
    for body in workflow["jobs"].values():
        for step in body["steps"]:
            script = step.get("run", "").replace("\\\n", " ")
            for part in _SEPARATORS.split(script.replace("\n", ";")):
                try:
                    words = shlex.split(part.strip(" )"))
                except ValueError:
                    continue
                words = [word for word in words if word != ")"]
                if words and words[0].rpartition("/")[2] in ("make", "runtime", "python"):
                    found.append([words[0].rpartition("/")[2], *words[1:]])
    return found


def read(name: str) -> dict[str, Any]:
    return load((ROOT / ".github/workflows" / name).read_text())


def test_workflows_are_all_there() -> None:
    assert [path.name for path in FILES] == ["deploy.yml", "drift.yml", "nightly.yml", "preview.yml", "test.yml"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_workflow_keeps_every_rule(path: Path) -> None:
    assert find_faults(path.name, path.read_text()) == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_workflow_calls_only_commands_that_exist(path: Path) -> None:
    problems = [problem for words in commands_of(load(path.read_text())) if (problem := find_problem(words))]

    assert problems == []


def test_commands_of_the_workflows_are_found() -> None:
    """Guards the test above against finding no commands at all."""
    found = {" ".join(words[:3]) for path in FILES for words in commands_of(load(path.read_text()))}

    assert {
        "make lint types",
        "make services",
        "make test",
        "make test-services",
        "make soak",
        "python -m infra",
    } <= found


def test_set_up_pins_its_actions_and_pastes_nothing_into_scripts() -> None:
    text = SET_UP.read_text()
    steps = yaml.safe_load(text)["runs"]["steps"]
    jobs = [body for path in FILES for body in load(path.read_text())["jobs"].values()]
    given = [set(step.get("with", {})) for body in jobs for step in body["steps"] if "set-up" in step.get("uses", "")]

    assert set().union(*given) == set(yaml.safe_load(text)["inputs"])
    assert [each["uses"] for each in steps if "uses" in each and not PINNED.fullmatch(each["uses"])] == []
    assert [line for line in text.splitlines() if "uses:" in line and not VERSION.search(line)] == []
    assert [step for step in steps if "run" in step and ("${{" in step["run"] or step["shell"] != "bash")] == []


def test_engine_has_the_version_of_its_sdk_and_is_named_nowhere_else(tmp_path: Path) -> None:
    steps = yaml.safe_load(SET_UP.read_text())["runs"]["steps"]
    [script] = [step["run"] for step in steps if step.get("id") == "locked"]
    [engine] = [step["with"] for step in steps if step.get("uses", "").startswith("pulumi/actions@")]
    output = tmp_path / "output"
    only_version = script.replace("make .venv/.compiled\n", "")

    subprocess.run(
        ["bash", "-ec", only_version], cwd=ROOT, env={**os.environ, "GITHUB_OUTPUT": str(output)}, check=True
    )

    assert output.read_text() == f"engine={version('pulumi')}\n"
    assert engine == {"pulumi-version": "${{ steps.locked.outputs.engine }}"}
    assert not any("pulumi-version" in path.read_text() for path in FILES)


@pytest.mark.parametrize(
    ("name", "job", "output"),
    [("preview.yml", "preview", "preview"), ("deploy.yml", "deploy", "deploy"), ("drift.yml", "look", "preview")],
)
def test_matrix_is_the_plan(name: str, job: str, output: str) -> None:
    jobs = read(name)["jobs"]
    planned = f"needs.plan.outputs.{output}"

    assert jobs["plan"]["outputs"] == {output: f"${{{{ steps.plan.outputs.{output} }}}}"}
    assert jobs[job]["strategy"]["matrix"] == {"include": f"${{{{ fromJSON({planned}) }}}}"}
    # GitHub refuses an empty matrix.
    assert jobs[job]["if"].startswith(f"{planned} != '[]'")
    assert "environment" not in jobs["plan"]
    assert "id-token" not in jobs["plan"].get("permissions", {})


def test_drift_is_looked_for_with_refresh_and_must_find_nothing() -> None:
    scripts = " ".join(step.get("run", "") for step in read("drift.yml")["jobs"]["look"]["steps"])

    assert "pulumi preview" in scripts
    assert "--refresh --expect-no-changes" in scripts


GOOD = """
on: {push: {branches: [main]}}
permissions: {contents: read}
defaults: {run: {shell: bash}}
concurrency: {group: deploy, cancel-in-progress: false}
jobs:
  deploy:
    timeout-minutes: 5
    environment: production
    permissions: {contents: read, id-token: write}
    steps:
      - uses: actions/checkout@3d3c42e5aac5ba805825da76410c181273ba90b1 # v7.0.1
        with: {persist-credentials: false}
      - run: exec pulumi up --policy-pack infra/policy/pack
"""


def test_good_workflow_has_no_fault() -> None:
    assert find_faults("deploy.yml", GOOD) == []


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("@3d3c42e5aac5ba805825da76410c181273ba90b1 # v7.0.1", "@v7", "not pinned"),
        (" # v7.0.1", "", "no version"),
        ("permissions: {contents: read}\n", "", "rights of the workflow"),
        ("id-token: write", "id-token: write, packages: write", "rights of job deploy"),
        ("{contents: read, id-token: write}", "write-all", "rights of job deploy"),
        ("push: {branches: [main]}", "pull_request_target: {}", "pull_request_target"),
        ("push: {branches: [main]}", "pull_request: {}", "identity for forks"),
        ("timeout-minutes: 5", "name: x", "no time limit"),
        ("cancel-in-progress: false", "cancel-in-progress: true", "may cancel a deployment"),
        ("exec ", "", "keeps signals"),
        ("environment: production", "name: x", "protected environment"),
        ("{persist-credentials: false}", "{fetch-depth: 1}", "git's credentials"),
        ("exec pulumi up", 'exec pulumi up "${{ github.head_ref }}"', "pastes an expression"),
        ("- run:", "- env: {KEY: '${{ secrets.KEY }}'}\n        run:", "stored secret"),
        (" --policy-pack infra/policy/pack", "", "no policy"),
        ("- run:", "- env: {RUNTIME_REQUIRE_ENGINE: '1'}\n        run:", "lacks scripts/kubernetes build"),
        ("defaults: {run: {shell: bash}}\n", "", "shell: bash"),
    ],
)
def test_fault_of_each_kind_is_found(old: str, new: str, fault: str) -> None:
    assert old in GOOD

    assert any(fault in found for found in find_faults("deploy.yml", GOOD.replace(old, new)))


@pytest.mark.parametrize(
    "script",
    ["make tset", ".venv/bin/runtime image psuh", ".venv/bin/python -m infra chekc", "runtime image push --stak x"],
)
def test_command_that_does_not_exist_is_found(script: str) -> None:
    [words] = commands_of({"jobs": {"x": {"steps": [{"run": script}]}}})

    assert find_problem(words) is not None
