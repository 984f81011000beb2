"""Decides which stacks a pipeline deploys and previews, as whom, and in what order.

A stack takes part if its file names a `deployer` that a pipeline's own stack of this folder makes, and if one of its inputs
changed since the commit that was deployed last. Every other stack is left out with a reason.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, Final

from infra.cli import InfraParser, say, say_json
from infra.naming import Names
from infra.settings.files import find_project_folder, find_stack_file, list_stacks
from infra.settings.model import StackSettings
from infra.settings.read import load_settings
from runtime.errors import RequestRefused

NUMBERS_VARIABLE: Final = "PROJECT_NUMBERS"
"""JSON: project → its number, which the names of identity providers carry."""

PROGRAM_INPUTS: Final = ("infra/", "Pulumi.yaml", "locks/infra.txt")
IMAGE_INPUTS: Final = ("docker/", "runtime/", "locks/", "pyproject.toml", ".dockerignore")


@dataclass(frozen=True, slots=True, kw_only=True)
class StackJob:
    stack: str
    up: bool = True
    images: bool = False
    """Whether images are built and pushed after the `up`."""
    needs: tuple[str, ...] = ()
    """Stacks of the same plan that come first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """Stacks that one account deploys, in this order. An owner that another account deploys is not waited for."""

    account: str
    provider: str
    state: str
    stacks: tuple[StackJob, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    stack: str
    account: str
    provider: str
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployPlan:
    deploy: tuple[Deployment, ...]
    preview: tuple[Preview, ...]
    skipped: Mapping[str, str]
    """Stack → why it is neither deployed nor previewed."""


def read_stacks(folder: Path) -> list[StackSettings]:
    """Raises `InvalidSettings` and `InvalidStackFile`."""
    return [load_settings(name, folder) for name in list_stacks(folder)]


def _makes(stack: StackSettings) -> set[str]:
    """Return the image repositories and secrets that the stack makes, by Google's names."""
    names = Names(stack=stack.stack, project=stack.project)
    secrets = (names.secret(key) for key, secret in stack.secrets.items() if secret.existing is None)
    return {*_repositories(stack), *(f"projects/{stack.project}/secrets/{secret}" for secret in secrets)}


def _repositories(stack: StackSettings) -> list[str]:
    names = Names(stack=stack.stack, project=stack.project)
    return [
        f"projects/{stack.project}/locations/{region}/repositories/{registry.repository or names.repository(key)}"
        for key, registry in stack.registries.items()
        for region in registry.made_regions(stack.region or "")
    ]


def _uses(stack: StackSettings) -> set[str]:
    """Return what the stack names under `existing`."""
    registries = (path for registry in stack.registries.values() for path in registry.existing.values())
    return {*registries, *(secret.existing for secret in stack.secrets.values() if secret.existing is not None)}


def plan_deployment(
    stacks: Sequence[StackSettings],
    numbers: Mapping[str, Any],
    changed: Collection[str] | None = None,
    *,
    program: Collection[str] = (),
    only: str | None = None,
) -> DeployPlan:
    """Plan for the files that `changed`, or for every stack if that is None; `program` names further inputs of all programs."""
    pipelines = {_account(each, "deployer"): each for each in stacks if each.ci}
    owners = {name: each.stack for each in stacks for name in _makes(each)}
    needs = {each.stack: {owners[name] for name in _uses(each) if name in owners} - {each.stack} for each in stacks}
    by_name, skipped = {each.stack: each for each in stacks}, dict[str, str]()
    jobs, previews = dict[str, list[StackJob]](), list[Preview]()
    for name in _sort(needs):
        stack = by_name[name]
        job = StackJob(
            stack=name,
            up=_is_changed((*PROGRAM_INPUTS, f"Pulumi.{name}.yaml", *program), changed),
            images=bool(_repositories(stack)) and _is_changed(IMAGE_INPUTS, changed),
            needs=tuple(each.stack for each in jobs.get(stack.deployer or "", ()) if each.stack in needs[name]),
        )
        pipeline = pipelines.get(stack.deployer or "")
        if reason := _find_reason(stack, job, pipeline, numbers, only):
            skipped[name] = reason
            continue
        assert pipeline is not None
        assert stack.deployer is not None
        jobs.setdefault(stack.deployer, []).append(job)
        if job.up:
            account = _account(pipeline, "previewer")
            previews.append(Preview(stack=name, account=account, **_place(pipeline, numbers, "preview")))
    deployments = tuple(
        Deployment(account=account, stacks=tuple(of), **_place(pipelines[account], numbers, "deploy"))
        for account, of in jobs.items()
    )
    return DeployPlan(deploy=deployments, preview=tuple(previews), skipped=dict(sorted(skipped.items())))


def _sort(needs: Mapping[str, Collection[str]]) -> list[str]:
    """Return the owners of what others use first, by name otherwise."""
    try:
        return list(TopologicalSorter({name: sorted(needs[name]) for name in sorted(needs)}).static_order())
    except CycleError as problem:
        circle = " and ".join(f"`{name}`" for name in dict.fromkeys(problem.args[1]))
        raise RequestRefused(f"{circle} wait for each other", hint="let one stack own what they share") from None


def _is_changed(inputs: Sequence[str], changed: Collection[str] | None) -> bool:
    """Whether a changed file is one of `inputs`, or lies in one that ends with `/`."""
    return changed is None or any(
        file == each or (each.endswith("/") and file.startswith(each)) for file in changed for each in inputs
    )


def _account(pipeline: StackSettings, role: str) -> str:
    return Names(stack=pipeline.stack, project=pipeline.project).account_email(role)


def _find_reason(
    stack: StackSettings, job: StackJob, pipeline: StackSettings | None, numbers: Mapping[str, Any], only: str | None
) -> str | None:
    if stack.ci:
        return "it makes the pipeline's own identity, so a person deploys it"
    if not stack.deployer:
        return "it has no `deployer`, so a person deploys it"
    if pipeline is None or pipeline.ci is None:
        return f"no stack of this folder makes its `deployer`, {stack.deployer}"
    if not pipeline.ci.state_bucket:
        return f"`ci.state_bucket` of `{pipeline.stack}` is not set"
    if not numbers.get(pipeline.project or ""):
        return f"the variable {NUMBERS_VARIABLE} lacks `{pipeline.project}`"
    if only not in (None, stack.stack):
        return "another stack was asked for"
    return None if job.up or job.images else "none of its inputs changed"


def _place(pipeline: StackSettings, numbers: Mapping[str, Any], role: str) -> dict[str, str]:
    pool = Names(stack=pipeline.stack, project=pipeline.project).identity_pool()
    path = f"projects/{numbers[pipeline.project or '']}/locations/global/workloadIdentityPools/{pool}"
    assert pipeline.ci is not None
    return {"provider": f"{path}/providers/{role}", "state": f"gs://{pipeline.ci.state_bucket}"}


def find_changes(folder: Path, since: str) -> list[str] | None:
    """List the files that differ from the commit `since`; None if git does not have it."""
    diff = ("diff", "--name-only", "--no-renames", "-z", "--end-of-options", f"{since}^{{commit}}", "HEAD", "--")
    done = subprocess.run(["git", "-C", str(folder), *diff], capture_output=True, text=True, check=False)
    return [each for each in done.stdout.split("\0") if each] if done.returncode == 0 else None


def list_runtime_inputs(folder: Path) -> list[str]:
    """List the files of the runtime that the program imports."""
    import infra.export
    import infra.program
    import infra.settings.read  # noqa: F401

    files = {module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] == "runtime"}
    found = (Path(file) for file in files if file is not None)
    return sorted(each.relative_to(folder).as_posix() for each in found if each.is_relative_to(folder))


EXAMPLES: Final = """examples:
  python -m infra plan-deploy                        every stack that a pipeline deploys, and why it leaves the others out
  python -m infra plan-deploy --since 4f1c2d0        those with an input that differs from that commit

PROJECT_NUMBERS is JSON with the number of each project: {"my-lab-dev": "123456789012"}
"""


def main(words: Sequence[str]) -> int:
    """`python -m infra plan-deploy`. Errors are raised."""
    parser = InfraParser("plan-deploy", "Which stacks a pipeline deploys, as whom, and in what order.", EXAMPLES)
    parser.add_argument("--since", metavar="COMMIT", default="", help="the commit that was deployed last")
    parser.add_argument("--stack", metavar="NAME", default="", help="only this stack")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="where the stack files are; found from here upwards")
    parser.add_argument(
        "-o",
        "--output",
        choices=("text", "json", "github"),
        default="text",
        help="`github`: outputs of a step, and notices",
    )
    args = parser.parse_args(words)
    folder = find_project_folder(args.folder)
    if args.stack:
        find_stack_file(args.stack, folder)
    changed = find_changes(folder, args.since) if args.since else None
    program = list_runtime_inputs(folder) if changed is not None else ()
    plan = plan_deployment(read_stacks(folder), _read_numbers(), changed, program=program, only=args.stack or None)
    _show(plan, args.output)
    return 0


def _read_numbers() -> dict[str, Any]:
    text = os.environ.get(NUMBERS_VARIABLE) or "{}"
    try:
        numbers = json.loads(text)
    except ValueError:
        numbers = None
    if not isinstance(numbers, dict) or not all(str(each).isdecimal() for each in numbers.values()):
        raise RequestRefused(f"{NUMBERS_VARIABLE} is no JSON of numbers", hint='such as {"my-lab-dev": "123456789012"}')
    return numbers


def _show(plan: DeployPlan, output: str) -> None:
    if output == "json":
        say_json(json.dumps(asdict(plan), indent=2))
        return
    if output == "github":
        with Path(os.environ["GITHUB_OUTPUT"]).open("a", encoding="utf-8") as outputs:
            outputs.writelines(f"{key}={json.dumps(asdict(plan)[key])}\n" for key in ("deploy", "preview"))
    mark = "::notice::" if output == "github" else ""
    for each in plan.deploy:
        for job in each.stacks:
            parts = [part for part, wanted in (("up", job.up), ("images", job.images)) if wanted]
            say(f"{mark}{job.stack}: {' and '.join(parts)}, as {each.account}\n")
    for stack, reason in plan.skipped.items():
        say(f"{mark}{stack}: left out, {reason}\n")
