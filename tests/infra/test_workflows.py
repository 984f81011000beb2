"""The hosted pipelines: pinned actions, least rights, no cancelled deployment, every stack, existing commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.commands_support import find_problem

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / ".github/workflows").glob("*.yml"))
STACKS = {path.name.split(".")[1] for path in ROOT.glob("Pulumi.*.yaml")}

PINNED = re.compile(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}")
VERSION = re.compile(r"uses: \S+@[0-9a-f]{40} # v\d+\.\d+\.\d+$")
READ_ONLY = {"contents": "read"}
MAY_WRITE = {
    "preview.yml/preview": {"id-token"},
    "preview.yml/comment": {"pull-requests"},
    "deploy.yml/up": {"id-token"},
    "deploy.yml/images": {"id-token"},
    "drift.yml/look": {"id-token"},
    "drift.yml/tell": {"issues"},
}
"""The only rights that a job may have beyond reading."""

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


def _faults_of_job(job: str, body: dict[str, Any]) -> Iterator[str]:
    if not isinstance(body.get("timeout-minutes"), int):
        yield f"job {job} has no time limit"
    text = yaml.safe_dump(body)
    if re.search(r"pulumi up|pulumi destroy", text):
        if body.get("concurrency", {}).get("cancel-in-progress") is not False:
            yield f"job {job} deploys and may be cancelled by a later run"
        if "matrix.stack" not in str(body.get("concurrency", {}).get("group")):
            yield f"job {job} deploys outside its stack's own queue"
        if body.get("environment") != "production":
            yield f"job {job} deploys outside the protected environment"
    if "RUNTIME_REQUIRE_ENGINE" in text:
        needed = ("pulumi/actions@", "scripts/services", "scripts/kubernetes install", "scripts/kubernetes build")
        yield from (f"job {job} requires the engine's tests and lacks {each}" for each in needed if each not in text)
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


def matrix_of(workflow: dict[str, Any], job: str) -> list[str]:
    stacks: list[str] = workflow["jobs"][job]["strategy"]["matrix"]["stack"]
    return stacks


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
        "runtime image build",
        "runtime image push",
        "runtime stack publish",
        "runtime stack show",
    } <= found


@pytest.mark.parametrize(("name", "job"), [("preview.yml", "preview"), ("deploy.yml", "up"), ("drift.yml", "look")])
def test_matrix_has_every_checked_in_stack(name: str, job: str) -> None:
    assert sorted(matrix_of(read(name), job)) == sorted(STACKS)


def test_images_go_to_the_stacks_that_own_repositories() -> None:
    settings = {
        path.name.split(".")[1]: yaml.safe_load(path.read_text())["config"] for path in ROOT.glob("Pulumi.*.yaml")
    }
    registries = {stack: values.get("research-runtime:registries", {}) for stack, values in settings.items()}
    owners = {
        stack
        for stack, named in registries.items()
        if any(not (registry or {}).get("existing") for registry in named.values())
    }

    assert set(matrix_of(read("deploy.yml"), "images")) == owners


def test_owner_of_what_stacks_share_is_deployed_before_them() -> None:
    job = read("deploy.yml")["jobs"]["up"]

    order = job["strategy"]["matrix"]["stack"]

    assert job["strategy"]["max-parallel"] == 1
    assert order.index("marin-us-central2") < min(order.index("marin-us-west4"), order.index("marin-eu-west4"))


def test_drift_is_looked_for_with_refresh_and_must_find_nothing() -> None:
    scripts = " ".join(step.get("run", "") for step in read("drift.yml")["jobs"]["look"]["steps"])

    assert "pulumi preview" in scripts
    assert "--refresh --expect-no-changes" in scripts


GOOD = """
on: {push: {branches: [main]}}
permissions: {contents: read}
defaults: {run: {shell: bash}}
jobs:
  up:
    timeout-minutes: 5
    environment: production
    permissions: {contents: read, id-token: write}
    concurrency: {group: "stack-${{ matrix.stack }}", cancel-in-progress: false}
    steps:
      - uses: actions/checkout@3d3c42e5aac5ba805825da76410c181273ba90b1 # v7.0.1
        with: {persist-credentials: false}
      - run: pulumi up --policy-pack infra/policy/pack
"""


def test_good_workflow_has_no_fault() -> None:
    assert find_faults("deploy.yml", GOOD) == []


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("@3d3c42e5aac5ba805825da76410c181273ba90b1 # v7.0.1", "@v7", "not pinned"),
        (" # v7.0.1", "", "no version"),
        ("permissions: {contents: read}\n", "", "rights of the workflow"),
        ("id-token: write", "id-token: write, packages: write", "rights of job up"),
        ("{contents: read, id-token: write}", "write-all", "rights of job up"),
        ("push: {branches: [main]}", "pull_request_target: {}", "pull_request_target"),
        ("push: {branches: [main]}", "pull_request: {}", "identity for forks"),
        ("timeout-minutes: 5", "name: x", "no time limit"),
        ("cancel-in-progress: false", "cancel-in-progress: true", "may be cancelled"),
        ("stack-${{ matrix.stack }}", "deploy", "own queue"),
        ("environment: production", "name: x", "protected environment"),
        ("{persist-credentials: false}", "{fetch-depth: 1}", "git's credentials"),
        ("run: pulumi up", 'run: pulumi up "${{ github.head_ref }}"', "pastes an expression"),
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
