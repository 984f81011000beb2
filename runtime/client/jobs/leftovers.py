"""What is left on a target of jobs that ended without a word: processes of a killed shim, and the files of secrets.

A shim that lives clears both away itself. `status` and `gc` do it for one that was killed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from runtime.errors import InfrastructureFailure, NotPossible
from runtime.jobs import ledger
from runtime.jobs.hosts.base import Files, Host
from runtime.jobs.ledger import JobStatus, job_folder
from runtime.jobs.lock import Lock
from runtime.jobs.plan import Target
from runtime.launchers.base import Clears, Launcher


def tidy(statuses: Iterable[JobStatus], target: Target, launcher: Launcher, host: Host, *, owner: str) -> None:
    """Clear away what is left of those jobs of `owner` that have ended. A target that refuses keeps it until the next time."""
    mine = [each for each in statuses if each.entry.owner == owner]
    with contextlib.suppress(InfrastructureFailure):
        for job in find_processes(mine, target, launcher, host):
            end_processes(job, target, launcher, host)
    with contextlib.suppress(InfrastructureFailure):
        for status in find_secrets(mine, host.files):
            remove_secrets(status, host.files, owner=owner)


def find_processes(statuses: Iterable[JobStatus], target: Target, launcher: Launcher, host: Host) -> list[str]:
    """Jobs without a living shim that still have processes on this host."""
    silent = [each.entry.id for each in statuses if ended_silently(each)]
    return launcher.find_left(target, silent, host) if silent and isinstance(launcher, Clears) else []


def end_processes(job: str, target: Target, launcher: Launcher, host: Host) -> list[str]:
    return launcher.clear(target, job_folder(job), host) if isinstance(launcher, Clears) else []


def find_secrets(statuses: Iterable[JobStatus], files: Files) -> list[JobStatus]:
    """Jobs that have ended and whose secrets are still there."""
    ended = [each for each in statuses if each.state.terminal and _may_hold_secrets(each)]
    return [each for each in ended if files.names(f"{job_folder(each.entry.id)}/secrets")]


def _may_hold_secrets(status: JobStatus) -> bool:
    # Launches of earlier versions did not write it down.
    return bool(status.entry.intent.get("secrets", ended_silently(status)))


def ended_silently(status: JobStatus) -> bool:
    """Whether a job has ended and its shim left no result of some run: it was killed, or its machine went."""
    entry = status.entry
    return status.state.terminal and bool(entry.natives) and len(entry.outcomes) < entry.indices


def remove_secrets(status: JobStatus, files: Files, *, owner: str) -> bool:
    """Remove the values of a job that has ended; False if it is being started again, which reads them once more."""
    job = status.entry.id
    lock = Lock(files, job, owner)
    try:
        lock.take(patience_s=0)
    except NotPossible:
        return False
    try:
        now = ledger.read_entry(files, job)
        if now is None or len(now.outcomes) < len(status.entry.outcomes):
            return False
        if status.entry.natives and now.natives != status.entry.natives:
            return False
        files.remove(f"{job_folder(job)}/secrets")
    finally:
        lock.release()
    return True
