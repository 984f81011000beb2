"""docker, podman and buildah: which of them is installed, and the command lines of each.

Pure functions make the command lines, which a dry run shows. The tools find their credentials themselves: this module
neither reads any nor hands any on.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from runtime.errors import InfrastructureFailure, NotPossible, WorkFailed
from runtime.images.registry import is_local

PIP_SECRET: Final = "pip"
"""Id of the build secret that holds pip's settings; the Dockerfiles mount it."""

_PROBE_S: Final = 20


class Tool(StrEnum):
    """The tools in the order in which they are looked for."""

    DOCKER = "docker"
    PODMAN = "podman"
    BUILDAH = "buildah"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCommand:
    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that are added to the environment."""

    def __str__(self) -> str:
        settings = (f"{name}={shlex.quote(value)}" for name, value in self.environment.items())
        return " ".join([*settings, shlex.join(self.argv)])


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildRequest:
    context: Path
    file: Path
    tags: tuple[str, ...]
    """Whole references, `localhost/worker:latest`."""
    platform: str
    arguments: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    pip_config: Path | None = None
    extra: tuple[str, ...] = ()
    """Further arguments, passed on to the tool unchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalImage:
    reference: str
    digests: frozenset[str]
    """Digests that a registry may have for it: of its configuration, and of its manifest if the tool knows that."""
    labels: Mapping[str, str]


def find_tool(named: Tool | None = None) -> Tool:
    """Return the named tool, or the first that works here. Raises `NotPossible` with the problem of each."""
    facts = []
    for tool in [named] if named else list(Tool):
        problem = _problem_of(tool)
        if problem is None:
            return tool
        facts.append(f"{tool}: {problem}")
    what = f"`{named}` cannot be used here" if named else "no tool here can build or push images"
    raise NotPossible(what, facts=facts, hint="install podman or docker, or start docker's engine")


def build_command(tool: Tool, request: BuildRequest) -> ToolCommand:
    argv = [*(("buildah", "build", "--layers") if tool is Tool.BUILDAH else (tool.value, "build"))]
    argv += ["--platform", request.platform, "--file", str(request.file)]
    for name, value in request.arguments.items():
        argv += ["--build-arg", f"{name}={value}"]
    for name, value in request.labels.items():
        argv += ["--label", f"{name}={value}"]
    for tag in request.tags:
        argv += ["--tag", tag]
    if request.pip_config is not None:
        argv += ["--secret", f"id={PIP_SECRET},src={request.pip_config}"]
    argv += [*request.extra, str(request.context)]
    # The Dockerfiles mount a secret, which docker's older builder does not know.
    return ToolCommand(argv=tuple(argv), environment={"DOCKER_BUILDKIT": "1"} if tool is Tool.DOCKER else {})


def push_commands(tool: Tool, local: str, remote: str) -> list[ToolCommand]:
    if tool is Tool.DOCKER:
        return [
            ToolCommand(argv=("docker", "tag", local, remote)),
            ToolCommand(argv=("docker", "push", "--quiet", remote)),
        ]
    plain = ("--tls-verify=false",) if is_local(remote) else ()
    return [ToolCommand(argv=(tool.value, "push", "--quiet", *plain, local, f"docker://{remote}"))]


def pull_commands(tool: Tool, remote: str, locals_: Sequence[str]) -> list[ToolCommand]:
    """Fetch an image and give it local names."""
    plain = ("--tls-verify=false",) if is_local(remote) and tool is not Tool.DOCKER else ()
    pull = ToolCommand(argv=(tool.value, "pull", "--quiet", *plain, remote))
    return [pull, *(ToolCommand(argv=(tool.value, "tag", remote, name)) for name in locals_)]


def find_image(tool: Tool, reference: str) -> LocalImage | None:
    """Find the image of that name in the tool's storage."""
    words = ("inspect", "--type", "image") if tool is Tool.BUILDAH else ("image", "inspect")
    argv = [tool.value, *words, reference]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        return None
    try:
        return parse_inspection(tool, reference, json.loads(done.stdout))
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as problem:
        raise InfrastructureFailure(
            f"`{tool}` described image `{reference}` in a way that cannot be read",
            facts=[f"{type(problem).__name__}: {problem}"],
            hint=f"try it by hand: {shlex.join(argv)}",
            retryable=False,
        ) from problem


def parse_inspection(tool: Tool, reference: str, value: Any) -> LocalImage:
    if tool is Tool.BUILDAH:
        ids = [value["FromImageID"], value.get("FromImageDigest")]
        labels = (value.get("OCIv1") or {}).get("config", {}).get("Labels")
    else:
        [value] = value
        ids = [value["Id"], value.get("Digest")]
        ids += [each.partition("@")[2] for each in value.get("RepoDigests") or ()]
        labels = (value.get("Config") or {}).get("Labels")
    digests = {each if each.startswith("sha256:") else f"sha256:{each}" for each in ids if each}
    return LocalImage(reference=reference, digests=frozenset(digests), labels=dict(labels or {}))


def run_build(tool: Tool, command: ToolCommand) -> None:
    """Build with the tool's own output on stderr. Raises `WorkFailed`."""
    sys.stderr.flush()
    code = subprocess.run(
        command.argv,
        stdout=sys.stderr.fileno(),
        stdin=subprocess.DEVNULL,
        env={**os.environ, **command.environment},
        check=False,
    ).returncode
    if code:
        buildx = "docker needs its buildx plug-in for this; " if tool is Tool.DOCKER else ""
        raise WorkFailed(
            f"`{tool}` could not build the image",
            facts=[f"exit code {code}; its own words are above"],
            hint=f"{buildx}see the command with `--dry-run` and try it by hand",
        )


def run_quietly(commands: Sequence[ToolCommand]) -> str | None:
    """Run commands in a row; returns the last lines of the first that failed, None if none did."""
    for command in commands:
        done = subprocess.run(
            command.argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, **command.environment},
            check=False,
        )
        if done.returncode:
            lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
            return "\n".join(lines[-3:]) or f"`{command.argv[0]}` ended with exit code {done.returncode}"
    return None


def _problem_of(tool: Tool) -> str | None:
    if shutil.which(tool.value) is None:
        return "not installed"
    # docker's command is often there without an engine behind it.
    probe = ["docker", "version", "--format", "{{.Server.Version}}"] if tool is Tool.DOCKER else [tool.value, "version"]
    try:
        done = subprocess.run(
            probe, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PROBE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as problem:
        return f"does not answer: {problem}"
    if done.returncode:
        lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        return f"installed, but does not work: {lines[-1] if lines else f'exit code {done.returncode}'}"
    return None
