"""Notes on a head of jobs that were asked to end for its restart, so that nobody takes them for cancelled.

Ray's stop names no reason. The mark in a record root does, but only to readers of that root, and until the restart ends or is
given up. The head has it for all jobs, in the metadata of jobs that do nothing. Such a note lasts exactly as long as the head's
word that a job was stopped.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Final

from runtime.launchers.ray.client import RayJobs
from runtime.launchers.ray.discovery import read_metadata

_NOTE: Final = "runtime-restart-"
_ASKED: Final = "asked"


def is_note(name: str) -> bool:
    """Whether a submission is a note, and no job of anybody."""
    return name.startswith(_NOTE)


def read_asked(jobs: RayJobs) -> set[str]:
    """The submissions that notes on the head name."""
    return _read(jobs)[0]


def record_asked(jobs: RayJobs, names: Collection[str]) -> None:
    """Note on the head that these submissions are asked to end for its restart; noted already is success."""
    known, number = _read(jobs)
    if new := sorted({*names} - known):
        # A note cannot be changed, so a job that is asked later has another one.
        jobs.submit({"submission_id": f"{_NOTE}{number}", "entrypoint": "true", "metadata": {_ASKED: " ".join(new)}})


def _read(jobs: RayJobs) -> tuple[set[str], int]:
    """Return the jobs that the notes name, and the number of the next note."""
    found: set[str] = set()
    for number in itertools.count(1):
        info = jobs.get(f"{_NOTE}{number}")
        if info is None:
            return found, number
        found |= {*str(read_metadata(info).get(_ASKED, "")).split()}
    raise AssertionError("unreachable")
