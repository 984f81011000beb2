"""Whether the workflows in `.github/workflows` present the tokens that the pipeline's identity accepts."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml

from infra.settings.model import CiSettings, RepositorySettings


def find_workflow_problems(ci: CiSettings, folder: Path) -> list[tuple[str, str]]:
    """Return settings and what is wrong with each; nothing if no workflow here deploys into an environment, or one of the
    repositories fits: this folder may be a checkout of any."""
    found = [list(_find_problems(f"ci.repositories.{name}", its, folder)) for name, its in ci.repositories.items()]
    return found[0] if found and all(found) else []


def _find_problems(path: str, ci: RepositorySettings, folder: Path) -> Iterator[tuple[str, str]]:
    read = {file.name: yaml.safe_load(file.read_text()) for file in sorted(folder.glob(".github/workflows/*.yml"))}
    pairs = [(file, each, name) for file, each in read.items() for name in _list_environments(each)]
    deploying = {file: each for file, each, name in pairs if name == ci.environment}
    if pairs and not deploying:
        found = ", ".join(f"`{name}` ({file})" for file, _, name in pairs)
        yield f"{path}.environment", f"no workflow deploys in the environment `{ci.environment}`; there is {found}"
    for file, workflow in deploying.items():
        # YAML 1.1 reads the key `on` as true.
        triggers = workflow.get("on", workflow.get(True))
        push = triggers.get("push") if isinstance(triggers, dict) else None
        branches = [f"refs/heads/{each}" for each in (push or {}).get("branches", ["**"])]
        if not any(fnmatch(ci.ref, each) for each in branches):
            yield f"{path}.ref", f"{file} deploys {', '.join(branches)}, and no token of it names `{ci.ref}`"


def _list_environments(workflow: Any) -> Iterator[str]:
    for job in workflow.get("jobs", {}).values():
        if environment := job.get("environment"):
            yield environment["name"] if isinstance(environment, dict) else environment
