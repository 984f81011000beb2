"""What a pipeline deploys, in what order and as whom; how a deployment goes on after a failure and stops when asked."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from infra.check.workflows import find_workflow_problems
from infra.cli import main
from infra.deploy.deploy import IMAGES, UP_OPTIONS, CommandFailed, DeploymentFailed, Shell, deploy
from infra.deploy.plan import (
    DeployPlan,
    StackJob,
    find_changes,
    list_runtime_inputs,
    plan_deployment,
    read_stacks,
)
from infra.settings.files import list_stacks
from infra.settings.model import CiSettings, RepositorySettings
from runtime.errors import RequestRefused
from runtime.outputs import NO_DIGEST
from tests.infra.conftest import ROOT, Project
from tests.services_support import wait_until

DEPLOYER = "lab-pipeline-deployer@lab-1234.iam.gserviceaccount.com"
CI = {"repositories": {"lab/code": {"repository_id": 1, "owner_id": 2}}, "state_bucket": "lab-state"}
PLACE = {"pulumi:disable-default-providers": ["*"], "project": "lab-1234", "region": "us-west4"}
NUMBERS = {"lab-1234": "123"}
POOL = "projects/123/locations/global/workloadIdentityPools/lab-pipeline-ci"


@pytest.fixture
def lab(project: Project) -> Project:
    """A pipeline, an owner of a repository and a secret, two stacks that use them, and one that a person deploys."""
    base = {**PLACE, "deployer": DEPLOYER}
    project.write("lab-pipeline", {**PLACE, "ci": CI})
    project.write(
        "z-owner", base | {"registries": {"images": {"repository": "lab"}}, "secrets": {"token": {"env": "T"}}}
    )
    repository = {"us-west4": "projects/lab-1234/locations/us-west4/repositories/lab"}
    project.write("a-user", base | {"registries": {"images": {"existing": repository}}, "queues": {"default": {}}})
    project.write(
        "b-user", base | {"secrets": {"token": {"env": "T", "existing": "projects/lab-1234/secrets/z-owner-token"}}}
    )
    project.write("alone", PLACE)
    return project


def plan(lab: Project, changed: Sequence[str] | None = None, **more: Any) -> DeployPlan:
    return plan_deployment(read_stacks(lab.folder), more.pop("numbers", NUMBERS), changed, **more)


def jobs(planned: DeployPlan) -> list[StackJob]:
    return [job for each in planned.deploy for job in each.stacks]


def test_plan_brings_the_owner_up_before_its_users_as_the_pipelines_accounts(lab: Project) -> None:
    planned = plan(lab)

    [deployment] = planned.deploy
    assert (deployment.account, deployment.state) == (DEPLOYER, "gs://lab-state")
    assert deployment.provider == f"{POOL}/providers/deploy"
    assert deployment.stacks == (
        StackJob(stack="z-owner", images=True),
        StackJob(stack="a-user", needs=("z-owner",)),
        StackJob(stack="b-user", needs=("z-owner",)),
    )
    assert {each.account for each in planned.preview} == {DEPLOYER.replace("deployer", "previewer")}
    assert {each.provider for each in planned.preview} == {f"{POOL}/providers/preview"}
    assert planned.skipped == {
        "alone": "it has no `deployer`, so a person deploys it",
        "lab-pipeline": "it makes the pipeline's own identity, so a person deploys it",
    }


@pytest.mark.parametrize(
    ("changed", "up", "images"),
    [
        ([], [], []),
        (["docs/index.md", "tests/infra/test_deploy.py", "infra.md"], [], []),
        (["Pulumi.a-user.yaml"], ["a-user"], []),
        (["infra/program.py"], ["z-owner", "a-user", "b-user"], []),
        (["Pulumi.yaml"], ["z-owner", "a-user", "b-user"], []),
        (["locks/infra.txt"], ["z-owner", "a-user", "b-user"], ["z-owner"]),
        (["runtime/errors.py"], ["z-owner", "a-user", "b-user"], ["z-owner"]),
        (["docker/worker.Dockerfile"], [], ["z-owner"]),
        (["runtime/work.py"], [], ["z-owner"]),
    ],
)
def test_plan_has_what_a_change_concerns(lab: Project, changed: list[str], up: list[str], images: list[str]) -> None:
    planned = plan(lab, changed, program=["runtime/errors.py"])

    assert [each.stack for each in jobs(planned) if each.up] == up
    assert [each.stack for each in planned.preview] == up
    assert [each.stack for each in jobs(planned) if each.images] == images


def test_plan_says_why_it_leaves_a_stack_out(lab: Project) -> None:
    stranger = "deployer@lab-2.iam.gserviceaccount.com"
    lab.write("c-user", {**PLACE, "queues": {"default": {}}, "deployer": stranger})

    assert plan(lab).skipped["c-user"] == f"no stack of this folder makes its `deployer`, {stranger}"
    assert plan(lab, numbers={}).skipped["a-user"] == "the variable PROJECT_NUMBERS lacks `lab-1234`"
    assert plan(lab, ["docs/index.md"]).skipped["a-user"] == "none of its inputs changed"
    assert plan(lab, only="b-user").skipped["a-user"] == "another stack was asked for"
    assert jobs(plan(lab, only="b-user")) == [StackJob(stack="b-user")]
    lab.write("lab-pipeline", {**PLACE, "ci": {"repositories": CI["repositories"]}})
    assert plan(lab).skipped["a-user"] == "`ci.state_bucket` of `lab-pipeline` is not set"


def test_stacks_that_wait_for_each_other_are_refused(lab: Project) -> None:
    base = {**PLACE, "deployer": DEPLOYER}
    for one, other in (("c", "d"), ("d", "c")):
        secret = {"env": "T", "existing": f"projects/lab-1234/secrets/{other}-own"}
        lab.write(one, base | {"secrets": {"own": {"env": "O"}, "others": secret}})

    with pytest.raises(RequestRefused, match="wait for each other"):
        plan(lab)


def test_every_checked_in_stack_is_planned_or_left_out_with_a_reason_and_after_its_owners() -> None:
    stacks = read_stacks(ROOT)

    planned = plan_deployment(stacks, {each.project: "1" for each in stacks})

    order = [each.stack for each in jobs(planned)]
    assert sorted([*order, *planned.skipped]) == list_stacks(ROOT)
    owners = {("marin-us-west4", "marin-us-central2"), ("marin-eu-west4", "marin-us-central2")}
    assert [(user, owner) for user, owner in owners if user in order and order.index(owner) > order.index(user)] == []


def test_changes_are_those_since_a_commit_that_git_knows(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.check_output(["git", "-C", str(tmp_path), *who, *words], text=True).strip()

    git("init", "-q")
    (tmp_path / "one").write_text("1")
    git("add", ".")
    git("commit", "-qm", "one")
    first = git("rev-parse", "HEAD")
    (tmp_path / "a ü").write_text("2")
    (tmp_path / "one").unlink()
    git("add", ".")
    git("commit", "-qm", "two")

    assert find_changes(tmp_path, first) == ["a ü", "one"]
    assert find_changes(tmp_path, "HEAD") == []
    assert find_changes(tmp_path, "0" * 40) is None
    assert find_changes(tmp_path, "--output=x") is None


def test_runtime_inputs_are_what_the_program_imports() -> None:
    code = "from pathlib import Path; from infra.deploy.plan import list_runtime_inputs as f; print(*f(Path.cwd()))"

    found = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True).split()

    assert {"runtime/errors.py", "runtime/outputs.py", "runtime/schema.py"} <= set(found)
    assert "runtime/cli/main.py" not in found
    assert set(found) <= set(list_runtime_inputs(ROOT))


def test_command_writes_outputs_and_notices_for_the_pipeline(
    lab: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PROJECT_NUMBERS", json.dumps(NUMBERS))
    monkeypatch.setenv("GITHUB_OUTPUT", str(tmp_path / "output"))

    assert main(["plan-deploy", "--folder", str(lab.folder), "--since", "", "--stack", "", "-o", "github"]) == 0

    outputs = dict(line.split("=", 1) for line in (tmp_path / "output").read_text().splitlines())
    assert [each["stack"] for each in json.loads(outputs["deploy"])[0]["stacks"]] == ["z-owner", "a-user", "b-user"]
    assert [each["stack"] for each in json.loads(outputs["preview"])] == ["z-owner", "a-user", "b-user"]
    said = capsys.readouterr().out
    assert f"::notice::z-owner: up and images, as {DEPLOYER}\n" in said
    assert "::notice::alone: left out, it has no `deployer`, so a person deploys it\n" in said


@pytest.mark.parametrize("numbers", ["no", "[]", '{"lab-1234": "12x"}'])
def test_numbers_that_are_none_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], numbers: str
) -> None:
    monkeypatch.setenv("PROJECT_NUMBERS", numbers)

    assert main(["plan-deploy", "--folder", str(ROOT)]) == 2
    assert "PROJECT_NUMBERS is no JSON of numbers" in capsys.readouterr().err


# deploying


IMAGE = "sha256:" + "a" * 64


class FakeCommands(Shell):
    """Notes each command, and fails those that contain one of `failing`."""

    def __init__(self, *failing: str, bucket: bool = True) -> None:
        self.failing, self.bucket = failing, bucket
        self.done: list[str] = []

    def run(self, *command: str) -> None:
        line = " ".join(command[2:] if command[0] == sys.executable else command)
        self.done.append(line)
        if any(each in line for each in self.failing):
            raise CommandFailed(f"`{line}` ended with 1")

    def read(self, *command: str) -> Any:
        self.run(*command)
        place = {"url": "us-west4-docker.pkg.dev/lab-1/lab"}
        images = {
            "main": f"{place['url']}/ray@{IMAGE}",
            "new": f"{place['url']}/ray@{NO_DIGEST}",
            "public": f"rayproject/ray@{IMAGE}",
        }
        clusters = {name: {"image": image, "cluster_name": f"owner-{name}"} for name, image in images.items()}
        contract = {"registries": {"images": {"us-west4": place, "us-west1": place}}, "clusters": clusters}
        return contract | ({"published_url": "gs://lab/contract/v1.json"} if self.bucket else {})


JOBS = (StackJob(stack="owner", images=True), StackJob(stack="user", needs=("owner",)), StackJob(stack="other"))


def ups(commands: FakeCommands) -> list[str]:
    return [line.split()[3] for line in commands.done if line.startswith("pulumi up")]


def test_deployment_brings_up_publishes_and_pushes_images_before_the_next_stack() -> None:
    commands = FakeCommands()

    deploy(JOBS[:2], commands, "4f1c2d0")

    end = " ".join(UP_OPTIONS)
    assert end.endswith("--policy-pack infra/policy/pack")
    image = "us-west4-docker.pkg.dev/lab-1/lab/ray"
    assert commands.done[:6] == [
        f"pulumi up --stack owner {end}",
        "pulumi stack output contract --json --stack owner",
        "runtime stack publish --stack owner --commit 4f1c2d0 --yes",
        f"gcloud --quiet artifacts docker tags add {image}@{IMAGE} {image}:keep-owner-main",
        "runtime stack show owner -o json",
        "gcloud --quiet auth configure-docker us-west4-docker.pkg.dev",
    ]
    assert [line.split()[3] for line in commands.done if "image push" in line] == list(IMAGES)
    assert commands.done[6] == "runtime image build --reuse --stack owner"
    assert commands.done[-4] == f"pulumi up --stack user {end}"


def test_stack_whose_owner_failed_is_left_out_and_the_others_go_on() -> None:
    commands = FakeCommands("pulumi up --stack owner")

    with pytest.raises(DeploymentFailed) as problem:
        deploy(JOBS, commands, "HEAD")

    assert ups(commands) == ["owner", "other"]
    assert list(problem.value.failed) == ["owner", "user"]
    assert problem.value.failed["user"] == "not begun, since it uses what owner makes"


def test_failed_image_fails_the_run_and_keeps_no_stack_back() -> None:
    commands = FakeCommands("image build --variant cuda", bucket=False)

    with pytest.raises(DeploymentFailed) as problem:
        deploy(JOBS, commands, "HEAD")

    assert ups(commands) == ["owner", "user", "other"]
    assert list(problem.value.failed) == ["owner"]
    assert not any("publish" in line for line in commands.done)


PULUMI = """#!/bin/sh
# Takes one interrupt as a request to finish, and notes a second one.
trap 'echo interrupted >>"$NOTES"' INT
trap 'echo terminated >>"$NOTES"' TERM
echo "begun $3" >>"$NOTES"
until [ -e "$NOTES.end" ]; do sleep 0.05; done
echo finished >>"$NOTES"
exit 1
"""


def test_pipeline_that_is_cancelled_asks_the_engine_once_and_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = tmp_path / "notes"
    (tmp_path / "pulumi").write_text(PULUMI)
    (tmp_path / "pulumi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("NOTES", str(notes))
    stacks = json.dumps([{"stack": name, "up": True, "images": False, "needs": []} for name in ("one", "two")])
    command = [sys.executable, "-m", "infra", "deploy", stacks]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    assert wait_until(lambda: notes.exists() and "begun" in notes.read_text())
    process.send_signal(signal.SIGINT)
    assert wait_until(lambda: "interrupted" in notes.read_text())
    process.send_signal(signal.SIGTERM)
    (tmp_path / "notes.end").touch()
    _, said = process.communicate(timeout=60)

    assert notes.read_text().splitlines() == ["begun one", "interrupted", "finished"]
    assert process.returncode == 3
    assert "two: `pulumi up --stack two --yes" in said
    assert "was not begun, since the pipeline was asked to stop" in said


def test_command_is_interrupted_at_its_time_limit_and_one_that_cannot_be_run_fails() -> None:
    shell = Shell(limit_s=0.1)

    with pytest.raises(CommandFailed, match="ended with"):
        shell.run("sh", "-c", "trap 'exit 5' INT; while :; do sleep 0.05; done")
    with pytest.raises(CommandFailed, match="cannot be run"):
        shell.run("no-such-command")
    assert Shell().read("echo", '{"a": 1}') == {"a": 1}


def test_contract_that_was_not_published_keeps_no_stack_back() -> None:
    commands = FakeCommands("stack publish --stack owner")

    with pytest.raises(DeploymentFailed) as problem:
        deploy(JOBS, commands, "HEAD")

    assert ups(commands) == ["owner", "user", "other"]
    assert list(problem.value.failed) == ["owner"]


def test_deployment_of_something_else_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deploy", '{"stack": "dev"}']) == 2
    assert "this is no list of stacks to deploy" in capsys.readouterr().err


# the pipeline's identity

WORKFLOW = "on: {push: {branches: [main]}}\njobs: {deploy: {environment: production, steps: []}}\n"


@pytest.mark.parametrize(
    ("workflow", "settings", "wrong"),
    [
        (WORKFLOW, {}, []),
        (WORKFLOW.replace("production", "{name: production}"), {}, []),
        (WORKFLOW.replace("main", "'release/*'"), {"ref": "refs/heads/release/1"}, []),
        (WORKFLOW, {"environment": "staging"}, ["ci.repositories.lab/code.environment"]),
        (WORKFLOW, {"ref": "refs/heads/trunk"}, ["ci.repositories.lab/code.ref"]),
        ("on: push\njobs: {test: {steps: []}}\n", {"environment": "staging"}, []),
    ],
)
def test_settings_of_the_pipeline_are_compared_with_its_workflows(
    tmp_path: Path, workflow: str, settings: dict[str, str], wrong: list[str]
) -> None:
    (tmp_path / ".github/workflows").mkdir(parents=True)
    (tmp_path / ".github/workflows/deploy.yml").write_text(workflow)
    ci = CiSettings(repositories={"lab/code": RepositorySettings(repository_id=1, owner_id=2, **settings)})

    assert [where for where, _ in find_workflow_problems(ci, tmp_path)] == wrong


def test_check_reports_an_environment_that_no_workflow_has(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    (project.folder / ".github/workflows").mkdir(parents=True)
    (project.folder / ".github/workflows/deploy.yml").write_text(WORKFLOW)
    pipeline = next(each for each in read_stacks(ROOT) if each.ci)
    project.copy(
        pipeline.stack, lambda config: next(iter(config["ci"]["repositories"].values())).update(environment="staging")
    )

    assert main(["check", "--stack", pipeline.stack, "--folder", str(project.folder)]) == 2
    assert "there is `production` (deploy.yml)" in capsys.readouterr().err
