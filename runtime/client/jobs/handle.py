"""A job that was launched: where it stands, what it printed and wrote, and its end."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from runtime.errors import InfrastructureFailure, NotPossible, UnknownName
from runtime.jobs import ledger
from runtime.jobs.hosts.base import Files, Host
from runtime.jobs.identity import owner_name
from runtime.jobs.ledger import JobStatus, LedgerEntry, job_folder, newest_natives
from runtime.jobs.plan import NativeState, Target
from runtime.jobs.spec import JobState
from runtime.launchers.base import Clears, Launcher, Releases, Stops, Sweeps
from runtime.launchers.standing import judge_job
from runtime.units import format_time

_UNMARKED: Final = {
    True: "cancel it again once there is room, or the same launch starts it again",
    False: "a run whose shim serves others too goes on; cancel it again once there is room",
}
WAIT_S: Final = 1.0


class JobHandle:
    """A job that was launched, here or elsewhere, now or earlier. Closing it closes the connection to its target."""

    def __init__(self, job: str, target: Target, launcher: Launcher, host: Host, *, new: bool = False) -> None:
        self.id, self.target, self.new = job, target, new
        """`new` is False where the same launch had been made before."""
        self.launcher, self.host = launcher, host

    @property
    def files(self) -> Files:
        """The record root."""
        return self.host.files

    def entry(self) -> LedgerEntry:
        found = ledger.read_entry(self.files, self.id)
        if found is None:
            raise UnknownName("job", self.id, [], hint="`runtime status` lists the jobs that there are")
        return found

    def status(self, *, indices: bool = False) -> JobStatus:
        """Judge the job by the ledger and one question to the backend. Raises if the backend does not answer."""
        return judge_job(self.entry(), self.target, self.launcher, self.host, indices=indices)[0]

    def look(
        self, *, tell: Callable[[InfrastructureFailure], None] = lambda problem: None
    ) -> tuple[JobStatus, list[NativeState]]:
        """Judge the job run by run, and return what the backend said. A backend that does not answer makes states `unknown`; `tell`
        gets the reason."""
        return judge_job(self.entry(), self.target, self.launcher, self.host, indices=True, tell=tell)

    def state(self) -> JobState:
        return self.status().state

    def natives(self, entry: LedgerEntry | None = None) -> list[NativeState]:
        """Ask the backend for the states of the native jobs; a job whose indices all have results is not asked about."""
        entry = entry or self.entry()
        if len(entry.outcomes) >= entry.indices or not entry.natives:
            return []
        return self.launcher.states(self.target, [each.native_id for each in newest_natives(entry)], self.host)

    def wait(self, *, timeout_s: float | None = None, stuck: bool = False) -> JobStatus:
        """Wait for the end, or, with `stuck`, until the job waits for something that does not come by itself. Raises
        `TimeoutError`; the job goes on."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        pause = 0.05
        while True:
            status = self.status()
            if status.state.terminal or (stuck and status.reason is not None):
                return status
            if until is not None and time.monotonic() >= until:
                raise TimeoutError(f"job {self.id} is {status.state} after {timeout_s:g} s")
            time.sleep(pause)
            pause = min(WAIT_S, pause * 1.5)

    def attempts(self, index: int | None = None) -> list[int]:
        """List the numbers of an index's attempts, oldest first; the first index by default."""
        return ledger.list_attempts(self.files, self.id, self.entry().first_index if index is None else index)

    def logs(
        self,
        *,
        index: int | None = None,
        rank: int = 0,
        attempt: int | None = None,
        follow: bool = False,
        tell: Callable[[JobStatus], None] = lambda status: None,
    ) -> Iterator[bytes]:
        """Yield what an index printed, the first by default: every attempt in turn, or one. `follow` goes on until the job
        has ended, and passes the job's status to `tell` at each look."""
        from runtime.jobs.hosts.bucket import look_again_s
        from runtime.jobs.runs import RunLog, read_limit

        index = self.entry().first_index if index is None else index
        log = RunLog(self.files, self.id, index, read_limit(self.files, self.id), rank=rank)
        while True:
            ended = not follow
            if follow:
                status = self.status()
                ended = status.state.terminal
                tell(status)
            yield from log.read(attempt)
            if ended:
                return
            time.sleep(look_again_s(self.files))

    def cancel(self, *, indices: Sequence[int] | None = None) -> list[str]:
        """Stop it, or some of its indices. Returns what is left over, in words; empty means that all is gone.

        A run that has ended stays as it ended. Where native jobs bear labels, they are looked for whatever is written
        down of them. A record root that refuses the mark keeps nothing running: the native jobs are stopped all the same.
        """
        if indices is None:
            self._record_ends()
        entry = self.entry()
        if indices is None and len(entry.outcomes) >= entry.indices:
            return self.end_strays()
        refused = self._mark_cancelled(indices)
        if len(entry.outcomes) >= entry.indices:
            return []
        left: list[str] = []
        if indices is None and isinstance(self.launcher, Sweeps):
            left += self.sweep()
        elif natives := [each.native_id for each in newest_natives(entry)]:
            if refused and indices is None and isinstance(self.launcher, Stops):
                self.launcher.stop(self.target, natives, self.host)
            left += self.launcher.cancel(self.target, natives, indices, self.host)
            if isinstance(self.launcher, Clears):
                left += self.launcher.clear(self.target, job_folder(self.id), self.host)
        if indices is None and not left:
            try:
                self.files.remove(f"{job_folder(self.id)}/secrets")
            except InfrastructureFailure as problem:
                left.append(f"the files of its secrets: {problem.message}")
        if refused and (refused := self._mark_cancelled(indices)):  # what has ended may have made room
            left.append(f"no cancel mark could be written: {refused.message}; {_UNMARKED[indices is None]}")
        return left

    def _mark_cancelled(self, indices: Sequence[int] | None) -> InfrastructureFailure | None:
        """Write the marks that shims and `status` look for. Returns the record root's refusal, if there was one."""
        mark = json.dumps({"at": format_time(ledger.now()), "by": owner_name()}).encode()
        try:
            for name in ["cancel"] if indices is None else [f"cancel.{index}" for index in indices]:
                ledger.leave_mark(self.files, self.id, name, mark)
        except InfrastructureFailure as problem:
            return problem
        return None

    def release(self, index: int) -> list[str]:
        """Give up a run whose machine is gone, if the backend keeps the run for it. Returns what is left over, in words."""
        if not isinstance(self.launcher, Releases):
            raise NotPossible(
                f"target `{self.target.name}` ({self.target.kind}) holds no run for a machine that is gone",
                hint=f"runtime cancel {self.id[:10]} --index {index}",
            )
        natives = [each.native_id for each in newest_natives(self.entry())]
        return self.launcher.release(self.target, natives, index, self.host)

    def end_strays(self) -> list[str]:
        """End what the backend has with its label of a job that has ended and is still at work, after it is written down
        how the job ended. What is left, in words."""
        if not isinstance(self.launcher, Sweeps):
            return []
        started = self.launcher.list_started(self.target, self.host)
        if not any(each.live for each in started if each.job == self.id):
            return []
        self._record_ends()
        return self.sweep()

    def sweep(self) -> list[str]:
        """End and remove all that the backend has with the job's label. Returns what is left over, in words."""
        return self.launcher.sweep(self.target, self.id, self.host) if isinstance(self.launcher, Sweeps) else []

    def _record_ends(self) -> None:
        """Write down the ends that only the backend tells, where nothing of a native job stays unseen.

        Where the backend or the record root does not answer, nothing is known to have ended.
        """
        if not isinstance(self.launcher, Sweeps):
            return
        with contextlib.suppress(InfrastructureFailure):
            status = self.status(indices=True)
            for each in status.indices if status.entry.natives else ():
                if each.state.terminal and each.index not in status.entry.outcomes:
                    ledger.record_end(self.files, self.id, each)

    def fetch(self, to: Path, *, index: int | None = None, overwrite: bool = False) -> list[Path]:
        """Copy what the job wrote to its output folders home; the files that are there now.

        Raises `FilesDiffer` once all others are copied, where others are there under their names, and `NameRefused` at
        the first whose name leads elsewhere.
        """
        from runtime.client.fetch import fetch, list_outputs, refuse_differing

        listed = list_outputs(self.files, self.entry(), [] if index is None else [index])
        done = list(fetch(self.files, listed, to, overwrite=overwrite))
        refuse_differing(done, to)
        return [Path(each.path) for each in done]

    def close(self) -> None:
        self.host.close()

    def __enter__(self) -> JobHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
