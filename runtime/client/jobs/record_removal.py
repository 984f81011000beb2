"""Removes the record of a job from its record root: `gc` begins it, and the next launch of the job finishes one that was cut off."""

from __future__ import annotations

from collections.abc import Collection

from runtime.client.jobs.targets import OpenTarget
from runtime.errors import NotPossible
from runtime.jobs import ledger, open_jobs
from runtime.jobs.hosts.base import Files
from runtime.jobs.ledger import job_folder
from runtime.jobs.lock import Lock
from runtime.jobs.notices import drop_notices
from runtime.launchers.base import Clears
from runtime.shim.files import FOLDED


def finish_removal(job: str, place: OpenTarget, lock: Lock, *, owner: str) -> None:
    """Go on with a removal that was cut off; a launch that holds the lock finds nothing of the job then.

    Raises `NotPossible` if something of it is left.
    """
    if left := clear_record(job, place, lock, owner=owner):
        raise NotPossible(f"job `{job}` is half removed, and some of it is left", facts=left, hint="runtime gc")
    for name in ("intent.json", ledger.REMOVING):
        lock.files().remove(f"{job_folder(job)}/{name}")


def clear_record(
    job: str, place: OpenTarget, lock: Lock, *, owner: str, claims: Collection[str] | None = None
) -> list[str]:
    """Remove what the record root has of a job, but for its intent, a mark that says so, and locks; returns what is left.

    Nothing is removed if a shim has claimed the job and `claims`, those that were there before it was judged, lacks that.
    If this is cut off, the next launch of the job or the next `gc` goes on with it. Raises `LockLost` if one of them does.
    """
    files, folder = lock.files(), job_folder(job)
    # A killed shim may have left a tree, which only the folder knows.
    begun = {int(name) for name in files.names(f"{folder}/runs") if name.isdecimal()}
    silent = begun - set(ledger.read_outcomes(files, job).get(job, {}))
    if silent and (left := end_processes(job, place)):
        return left
    ledger.leave_mark(files, job, ledger.REMOVING, owner.encode())
    if claims is not None and list_claims(job, place) - set(claims):
        files.remove(f"{folder}/{ledger.REMOVING}")
        return [f"job `{job}`: it was started again"]
    open_jobs.drop_open(files, job)
    drop_notices(files, job)
    for name in files.names(folder):
        if name not in ("intent.json", ledger.REMOVING) and not name.startswith("lock."):
            files.remove(f"{folder}/{name}")
    files.remove(f"{folder}/{FOLDED}")
    # Before the folder: a remaining mark would count as the end of the same job launched again.
    remove_ends(job, files)
    return []


def list_claims(job: str, place: OpenTarget) -> set[str]:
    """Names of the claims of shims that serve the job, or did."""
    return set(place.files.names(f"{job_folder(job)}/owners"))


def remove_ends(job: str, files: Files) -> None:
    """Remove the marks by which listings know how the runs of a job ended."""
    for name in files.names("done", f"{job}."):
        files.remove(f"done/{name}")


def end_processes(job: str, place: OpenTarget) -> list[str]:
    """End processes that a killed shim left; returns what is left, in words."""
    return place.launcher.clear(place.target, job_folder(job), place.host) if isinstance(place.launcher, Clears) else []
