"""The artifacts of a job: files that its attempts save as they run, and files that they find when they begin.

docs/artifacts.md has the promises. The sources of a spec's `reuse` are settled at launch: the spec of a job that was launched
has ids of versions.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from runtime.errors import InvalidTask

if TYPE_CHECKING:
    from runtime.jobs.spec import JobSpec

REUSED: Final = "reuse"
"""Folder of a job with the versions that it reuses: `TAG.json` and `data/SHA256`."""


def check_artifacts(capture: Mapping[str, str], every: timedelta, reuse: Mapping[str, str]) -> None:
    """Raise `ValueError` for what no attempt could save or find."""
    from runtime.tasks import artifacts

    if every != artifacts.EVERY and not capture:
        raise ValueError("has `capture_every`, and no `capture`")
    # Sources are not versions yet, and each of them stands for one.
    settled = dict.fromkeys(reuse, artifacts.Version(1, 1, 1, "x", "x", "x").id)
    try:
        artifacts.check_artifacts(artifacts.ArtifactSpec(capture, every, settled))
    except InvalidTask as problem:
        name = problem.field.removeprefix("artifacts").removeprefix(".").replace("every_s", "capture_every")
        raise ValueError(f"has `{name}` that {problem.problem}" if name else problem.problem) from None
    if empty := [tag for tag, source in reuse.items() if not source]:
        raise ValueError(f"has no source in `reuse.{empty[0]}`")


def artifacts_order(spec: JobSpec) -> dict[str, Any]:
    """Return the shim's settings for artifacts; empty without any."""
    if not (spec.capture or spec.reuse):
        return {}
    from runtime.tasks.artifacts import ArtifactSpec, variable_of

    made = ArtifactSpec(spec.capture, spec.capture_every, spec.reuse)
    return {
        "capture": dict(made.capture),
        "every_s": made.every.total_seconds(),
        "reuse": dict(made.reuse),
        "variables": {variable_of(tag): path for tag, path in made.paths.items()},
    }


def owner_of(job: str, index: int) -> str:
    """Whose artifacts those of a run are, in the ids of their versions."""
    return f"{job}-{index}"
