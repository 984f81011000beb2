"""The index of jobs that are open: `open/TARGET/JOB.PART` in the record root, an empty file for each part that may live.

A name is made before the backend is called for its part, and removed by the shim that commits the part's last result, or
by the client that learns the end in another way. A name that is left behind does no harm: readers compare it with the
results. So a search for open work lists this folder, and never all jobs.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import unquote_to_bytes

from runtime.errors import InfrastructureFailure, NotPossible
from runtime.jobs.hosts.base import Files, FileToWrite
from runtime.jobs.lock import Lock
from runtime.jobs.plan import LaunchPlan, owner_name

OPEN: Final = "open"
_NAME: Final = re.compile(r"(j-[0-9a-f]+)\.(\d+)")


def open_folder(target: str) -> str:
    """The folder with the names of a target's open jobs; any character that is unusual in a name is written `%XX`."""
    quoted = re.sub(rb"^\.|[^A-Za-z0-9_.-]", lambda found: b"%%%02X" % ord(found[0]), target.encode())
    return f"{OPEN}/{quoted.decode()}"


def list_targets(files: Files) -> list[str]:
    """The names of all targets that have a folder in the index."""
    names = (name for name in files.names(OPEN))
    return sorted(unquote_to_bytes(name).decode("utf-8", "replace") for name in names)


def order_entry(plan: LaunchPlan) -> dict[str, Any]:
    """The part of the shim's order that tells a shim which name to remove, and which runs a part has."""
    return {
        "name": f"{open_folder(plan.target.name)}/{plan.job.id}",
        "parts": [[part.offset, part.count] for part in plan.parts],
    }


def name_parts(plan: LaunchPlan, first: int = 0) -> list[str]:
    """The names of a plan's parts, from the part `first` on."""
    return [f"{open_folder(plan.target.name)}/{plan.job.id}.{part}" for part in range(first, len(plan.parts))]


def mark_open(files: Files, target: str, job: str, part: int) -> None:
    """Create the name of a part, unless it exists. It is on disk when this returns."""
    files.write_many([FileToWrite(f"{open_folder(target)}/{job}.{part}", b"", once=True)])


def list_open(files: Files, target: str) -> dict[str, list[int]]:
    """Job → its open parts, by one listing."""
    found: dict[str, list[int]] = {}
    for name in files.names(open_folder(target)):
        if matched := _NAME.fullmatch(name):
            found.setdefault(matched[1], []).append(int(matched[2]))
    return found


def drop_open(files: Files, job: str, target: str | None = None) -> None:
    """Remove the names of a job, of any target by default. The caller holds the job's lock, or removes the job."""
    folders = [open_folder(target)] if target else [f"{OPEN}/{each}" for each in files.names(OPEN)]
    for folder in folders:
        for name in files.names(folder, f"{job}."):
            files.remove(f"{folder}/{name}")


def drop_if_ended(files: Files, target: str, job: str, has_ended: Callable[[], bool]) -> None:
    """Remove the names of a job under its lock, if `has_ended` still holds then.

    They stay if a launch, retry or keeper holds the lock, which may be starting the job, and if the record root refuses:
    a later reader drops them.
    """
    with contextlib.suppress(InfrastructureFailure, NotPossible):
        if not files.names(open_folder(target), f"{job}."):
            return
        lock = Lock(files, job, owner_name())
        lock.take(patience_s=0)
        try:
            if has_ended():
                drop_open(files, job, target)
        finally:
            lock.release()
