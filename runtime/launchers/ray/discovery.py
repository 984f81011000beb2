"""Our jobs as a head's own list shows them, without any ledger. Pure; anybody who reaches a head may put anything there."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Final

from runtime.jobs.plan import OwnedResource
from runtime.launchers.ray.names import render_entrypoint, split_name, submission_name
from runtime.launchers.ray.states import has_ended, read_time

_NAME: Final = re.compile(r"j-[0-9a-f]+-e[0-9]{1,9}-p[0-9]{1,9}-[0-9a-f]{6}")


def read_metadata(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of a job; empty for a job without metadata, or with something else in its place."""
    said = info.get("metadata")
    return dict(said) if isinstance(said, Mapping) else {}


def read_grace(info: Mapping[str, Any]) -> float:
    """The grace of a job in seconds; 0 if it names none that is a number."""
    try:
        grace_s = float(read_metadata(info).get("grace_s", 0))
    except (TypeError, ValueError):
        return 0.0
    return grace_s if math.isfinite(grace_s) else 0.0


def is_ours(info: Mapping[str, Any], wanted: Mapping[str, str], names: Sequence[str]) -> bool:
    """Whether a job of our id has the metadata that `wanted` has under `names`."""
    said = read_metadata(info)
    return all(said.get(name) == wanted[name] for name in names)


def find_job(name: str, info: Mapping[str, Any], root: str) -> str | None:
    """The job of this record root that a submission is a driver of, by its id, its metadata and its command alike."""
    if not _NAME.fullmatch(name):
        return None
    job, epoch, part = split_name(name)
    said, command = read_metadata(info), info.get("entrypoint")
    try:
        python = shlex.split(command)[1] if isinstance(command, str) else ""
    except (IndexError, ValueError):
        return None
    drives = command == render_entrypoint(python, root, job, epoch, part)
    named = name == submission_name(job, root, epoch, part) and (said.get("job"), said.get("epoch")) == (
        job,
        str(epoch),
    )
    return job if drives and named else None


def list_owned(
    known: Mapping[str, Mapping[str, Any]], root: str, owner: str | None, job: str | None
) -> list[OwnedResource]:
    """The submissions of a record root's jobs, live ones and others, whose start the head tells."""
    found = []
    for name, info in known.items():
        ours, since = find_job(name, info, root), read_time(info.get("start_time"))
        whose = read_metadata(info).get("owner")
        if ours is not None and since is not None and job in (None, ours) and owner in (None, whose):
            live = not has_ended(info)
            found.append(OwnedResource(job=ours, native_id=name, what="ray job", live=live, since=since))
    return found
