"""What the runs of a job printed, and what the backend kept beside their logs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from runtime.client.jobs.handle import JobHandle
from runtime.errors import RuntimeFailure, UnknownName
from runtime.jobs import ledger
from runtime.jobs.hosts.base import read_tail
from runtime.jobs.hosts.bucket import look_again_s
from runtime.jobs.ledger import JobStatus, job_folder
from runtime.jobs.plan import NativeState
from runtime.jobs.runs import RunLog, read_limit
from runtime.launchers.base import KeepsOutput
from runtime.reasons import EndReason


def check_log(job: JobHandle, index: int, attempt: int | None, rank: int) -> None:
    """Raise `UnknownName` if that attempt or rank has printed nowhere, saying which there are."""
    there = job.attempts(index)
    if attempt is not None and attempt not in there:
        raise UnknownName(
            "attempt", str(attempt), [str(each) for each in there], where=f"of job `{job.id}`", hint=_see(job)
        )
    if there and rank:
        folder = f"{job_folder(job.id)}/runs/{index}/a{(attempt or there[-1]):04d}"
        ranks = [name[4:-4] for name in job.files.names(folder, "rank") if name.endswith(".log")]
        if str(rank) not in ranks:
            raise UnknownName("rank", str(rank), ranks, where=f"of job `{job.id}`", hint=_see(job))


def _see(job: JobHandle) -> str:
    return f"`runtime status {job.id[:10]}` lists its attempts"


def follow_all(
    job: JobHandle, *, every_s: float = 0.5, tell: Callable[[JobStatus], None] = lambda status: None
) -> Iterator[tuple[int, bytes]]:
    """Whole lines of every run as they come, each with its index, until all have ended. Of arrays; rank 0. `tell` hears at
    each look where the job stands."""
    entry = job.entry()
    limit, logs = read_limit(job.files, job.id), dict[int, RunLog]()
    rest: dict[int, bytes] = {}
    finished: set[int] = set()
    while True:
        status = job.status()
        ended = status.state.terminal
        tell(status)
        done = ledger.read_outcomes(job.files, job.id).get(job.id, {})
        there = {int(name) for name in job.files.names(f"{job_folder(job.id)}/runs") if name.isdigit()}
        for index in sorted(there - finished):
            for piece in logs.setdefault(index, RunLog(job.files, job.id, index, limit)).read():
                whole, _, rest[index] = (rest.get(index, b"") + piece).rpartition(b"\n")
                for line in whole.split(b"\n") if whole else ():
                    yield index, line
            if index in done:
                finished.add(index)
                if last := rest.pop(index, b""):
                    yield index, last
        if ended or len(finished) >= entry.indices:
            return
        time.sleep(max(every_s, look_again_s(job.files)))


def read_backend_log(job: JobHandle, native: NativeState | None) -> list[str]:
    """The last lines that the backend kept of a native job beside the attempts' own logs; empty if nobody can say."""
    if native is not None and isinstance(job.launcher, KeepsOutput):
        try:
            text = job.launcher.read_output(job.target, native, job_folder(job.id), job.host)
        except RuntimeFailure:
            return []
        return [line.rstrip() for line in text.splitlines() if line.strip()]
    return read_tail(job.files, f"{job_folder(job.id)}/shim.log", 100)


def read_unbegun(job: JobHandle, index: int) -> list[str]:
    """The end of the backend's own log, for a run of which nothing else is to be read: its last native job began no attempt,
    or none has begun yet. Empty for any other run."""
    entry = job.entry()
    if index in entry.outcomes:
        return []
    if not entry.natives:
        return read_backend_log(job, None)
    status, said = job.look()
    one = next(each for each in status.indices if each.index == index)
    if one.reason is not EndReason.SETUP_FAILED and job.attempts(index):
        return []
    return read_backend_log(job, find_native(said, index))


def find_native(states: Sequence[NativeState], index: int) -> NativeState | None:
    """What the backend said of one run, or of the native job that serves it."""
    native = next((each for each in states if each.index == index), None)
    return native or next((each for each in reversed(states) if each.index is None), None)
