"""Deploys the stacks of one account in the planned order, and reports every failure at the end.

A stack whose owner failed is left out, and the others go on. An `up` is never killed: at its time limit, and when the
pipeline is cancelled, it is asked to stop, and only once, since at a second signal the engine leaves operations pending.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from infra.cli import InfraParser, say
from infra.deploy.plan import StackJob
from infra.naming import KEPT
from runtime.errors import InfrastructureFailure, RequestRefused
from runtime.outputs import NO_DIGEST

UP_LIMIT_S: Final = 3600
UP_OPTIONS: Final = ("--yes", "--non-interactive", "--color", "never", "--policy-pack", "infra/policy/pack")
RUNTIME: Final = (sys.executable, "-m", "runtime")
IMAGES: Final = {
    "worker": (),
    "worker-cuda": ("--variant", "cuda"),
    "cluster": ("--file", "docker/cluster.Dockerfile"),
}
"""Image → options of its build."""


class DeploymentFailed(InfrastructureFailure):
    """Some stacks or images are not deployed; `failed` says why, by stack."""

    def __init__(self, failed: dict[str, str]) -> None:
        self.failed = failed
        super().__init__(
            f"not everything was deployed: {', '.join(f'`{each}`' for each in failed)}",
            facts=[f"{stack}: {reason}" for stack, reason in failed.items()],
            hint="run the workflow again; docs/operations.md says what to do about locks and pending operations",
        )


class CommandFailed(Exception):
    """A command failed, or was not begun because the pipeline was asked to stop."""


def deploy(jobs: Sequence[StackJob], commands: Shell, commit: str) -> None:
    """Bring the stacks up and push their images. Raises `DeploymentFailed` once all had their turn."""
    failed: dict[str, str] = {}
    missing: set[str] = set()
    for job in jobs:
        say(f"::group::{job.stack}\n")
        try:
            if owners := sorted(missing.intersection(job.needs)):
                missing.add(job.stack)
                raise CommandFailed(f"not begun, since it uses what {' and '.join(owners)} makes")
            if job.up:
                missing.add(job.stack)
                commands.run("pulumi", "up", "--stack", job.stack, *UP_OPTIONS)
                missing.remove(job.stack)
                contract = commands.read("pulumi", "stack", "output", "contract", "--json", "--stack", job.stack)
                # Without a record bucket there is no place to publish the contract in.
                if contract.get("published_url"):
                    commands.run(*RUNTIME, "stack", "publish", "--stack", job.stack, "--commit", commit, "--yes")
                _keep_images(contract, commands)
            if job.images:
                _push_images(job.stack, commands)
        except CommandFailed as problem:
            failed[job.stack] = str(problem)
        say("::endgroup::\n")
    if failed:
        raise DeploymentFailed(failed)


def _keep_images(contract: Mapping[str, Any], commands: Shell) -> None:
    """Tag the images that heads are pinned to, so that the clean-up of their registries leaves them."""
    own = tuple(f"{place['url']}/" for regions in contract.get("registries", {}).values() for place in regions.values())
    for cluster in contract.get("clusters", {}).values():
        image, _, digest = cluster["image"].partition("@")
        if image.startswith(own) and digest != NO_DIGEST:
            kept = f"{image}:{KEPT}{cluster['cluster_name']}"
            commands.run("gcloud", "--quiet", "artifacts", "docker", "tags", "add", cluster["image"], kept)


def _push_images(stack: str, commands: Shell) -> None:
    registries = commands.read(*RUNTIME, "stack", "show", stack, "-o", "json")["registries"]
    hosts = {place["url"].partition("/")[0] for registry in registries.values() for place in registry.values()}
    commands.run("gcloud", "--quiet", "auth", "configure-docker", ",".join(sorted(hosts)))
    for image, options in IMAGES.items():
        # `--reuse`: a second run of the same commit takes the existing image, because another build has another digest.
        commands.run(*RUNTIME, "image", "build", *options, "--reuse", "--stack", stack)
        commands.run(*RUNTIME, "image", "push", image, "--stack", stack)


class Shell:
    """Runs commands, each in a session of its own, so that a signal to the pipeline reaches it only through `stop`."""

    def __init__(self, limit_s: float = UP_LIMIT_S) -> None:
        self._limit_s = limit_s
        self._process: subprocess.Popen[str] | None = None
        self._stopping = self._interrupted = False

    def stop(self, *_: object) -> None:
        """Ask the running command to stop, and begin no other."""
        if not self._stopping:
            self._stopping = True
            self._interrupt()

    def was_asked_to_stop(self) -> bool:
        return self._stopping

    def run(self, *command: str) -> None:
        """Raises `CommandFailed`, as `read` does."""
        self._run(command, None)

    def read(self, *command: str) -> Any:
        """Return the JSON that the command prints."""
        return json.loads(self._run(command, subprocess.PIPE))

    def _run(self, command: Sequence[str], output: int | None) -> str:
        shown = " ".join(command[2:] if command[:3] == RUNTIME else command)
        if self.was_asked_to_stop():
            raise CommandFailed(f"`{shown}` was not begun, since the pipeline was asked to stop")
        say(f"+ {shown}\n")
        sys.stdout.flush()
        self._interrupted = False
        try:
            self._process = subprocess.Popen(command, stdout=output, text=True, start_new_session=True)
        except OSError as problem:
            raise CommandFailed(f"`{shown}` cannot be run: {problem.strerror}") from problem
        if self.was_asked_to_stop():
            self._interrupt()
        try:
            out, _ = self._process.communicate(timeout=self._limit_s)
        except subprocess.TimeoutExpired:
            self._interrupt()
            out, _ = self._process.communicate()
        code, self._process = self._process.returncode, None
        if code != 0:
            raise CommandFailed(f"`{shown}` ended with {code}")
        return out or ""

    def _interrupt(self) -> None:
        if self._process is not None and not self._interrupted:
            self._interrupted = True
            self._process.send_signal(signal.SIGINT)


def main(words: Sequence[str]) -> int:
    """`python -m infra deploy`. Errors are raised."""
    parser = InfraParser("deploy", "Deploy the stacks of one account, in order; for pipelines.")
    parser.add_argument("stacks", metavar="JSON", help="`stacks` of an entry under `deploy` of `plan-deploy -o json`")
    args = parser.parse_args(words)
    try:
        jobs = [StackJob(**{**each, "needs": tuple(each["needs"])}) for each in json.loads(args.stacks)]
    except (ValueError, TypeError, KeyError) as problem:
        hint = "`python -m infra plan-deploy -o json` prints it"
        raise RequestRefused("this is no list of stacks to deploy", facts=[str(problem)], hint=hint) from None
    shell = Shell()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, shell.stop)
    deploy(jobs, shell, os.environ.get("GITHUB_SHA", "HEAD"))
    return 0
