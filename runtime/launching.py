"""Launching: from a spec to a job that runs, exactly once, whatever is killed on the way.

Steps, each safe to repeat: take the snapshot; decide the job's id; plan; make the run folder, which is the lock; write
what was decided; for each part look for a native job of its name, and only if there is none submit it; write down its id.
A launcher that dies leaves the lock; the next one waits until its counter stands still, looks for the native jobs by
name, and goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.jobs import JobSpec, JobState
from runtime.launchers.base import LaunchPlan, Target
from runtime.ledger import JobStatus

if TYPE_CHECKING:
    from runtime.config import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    again: bool = False
    """Start a new job although the same launch was made before."""
    ignore: tuple[str, ...] = ()
    """Fields that may be dropped where the target refuses them."""
    experiment: str | None = None
    base: Path | None = None
    """Folder that the spec's relative paths start from; the working directory by default."""


class JobHandle:
    """A job that was launched, here or elsewhere, now or earlier."""

    id: str
    target: Target
    new: bool
    """False where the same launch had been made before."""

    def state(self) -> JobState:
        raise NotImplementedError

    def status(self, *, indices: bool = False) -> JobStatus:
        raise NotImplementedError

    def wait(self, *, timeout_s: float | None = None) -> JobStatus:
        """Wait for the end. Raises `TimeoutError`; the job goes on."""
        raise NotImplementedError

    def logs(self, *, index: int = 0, rank: int = 0, attempt: int | None = None, follow: bool = False) -> Iterator[str]:
        """Lines of the newest attempt, or of one; `follow` goes on until the job has ended, over its attempts."""
        raise NotImplementedError

    def cancel(self, *, indices: Sequence[int] | None = None) -> list[str]:
        """Returns what is left over, in words; empty means all is gone."""
        raise NotImplementedError

    def fetch(self, to: Path, *, index: int | None = None) -> list[Path]:
        """Copy outputs home; the files that were written."""
        raise NotImplementedError


def plan_launch(spec: JobSpec, target: Target, settings: Settings, options: LaunchOptions) -> LaunchPlan:
    """What `launch` would do, without doing any of it and without the network. Raises `RequestRefused`."""
    raise NotImplementedError


def launch(
    spec: JobSpec,
    on: str | Sequence[str],
    *,
    settings: Settings | None = None,
    options: LaunchOptions | None = None,
    progress: Callable[[str], None] | None = None,
) -> JobHandle:
    """Start the job on the first of `on` that accepts it, or find the one that the same launch made before."""
    raise NotImplementedError


def find_job(job_id: str, *, settings: Settings | None = None) -> JobHandle:
    """The job of that id or beginning of an id, on whichever target of the project it lies. Raises `UnknownName`."""
    raise NotImplementedError
