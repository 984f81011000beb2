"""Submitting to a head that has just begun itself, and may fail to start a driver."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from runtime.launchers.ray.client import RayJobs
from runtime.launchers.ray.states import has_failed_to_start

TRIES: Final = 3
"""How often one launch submits a job whose driver the head fails to start."""
START_S: Final = 15.0
"""How long a launch waits for a driver to start. A later start is not a failure; the launch just does not see it."""
_LOOK_S: Final = 0.2


def submit_until_begun(
    jobs: RayJobs, body: Mapping[str, Any], read_note: Callable[[], Mapping[str, Any] | None]
) -> dict[str, Any]:
    """Submit a job, again if the head fails to start its driver; returns the head's view of it.

    `read_note` reads the driver's note. Submitting under the same id is safe: the shims of a driver that did begin have
    claimed the runs.
    """
    until = time.monotonic() + START_S
    tries = 0
    while True:
        known, tries = jobs.submit(body), tries + 1
        while known.get("status") == "PENDING" and time.monotonic() < until:
            time.sleep(_LOOK_S)
            known = jobs.get(body["submission_id"]) or known
        if tries == TRIES or not has_failed_to_start(known, read_note()):
            return known
        jobs.delete(body["submission_id"])
