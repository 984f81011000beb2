"""A launched job: found by its id, judged, waited for, cancelled and fetched, and its logs with the backend's own."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from runtime.client.jobs.job_cache import read_place
from runtime.client.jobs.targets import OpenTarget, find_target, list_usable_targets, make_context, open_target
from runtime.config import Settings, load_settings
from runtime.end_reasons import EndReason
from runtime.errors import InfrastructureFailure, NotPossible, RuntimeFailure, UnknownName
from runtime.jobs import ledger, open_jobs
from runtime.jobs.hosts.base import Host, read_tail
from runtime.jobs.indices import open_runs
from runtime.jobs.ledger import IndexStatus, JobStatus, LedgerEntry, RunOutcome, job_folder, newest_natives
from runtime.jobs.log_follower import LOOK_S, LifeWatch, describe_watch
from runtime.jobs.plan import NativeState, Target, owner_name
from runtime.jobs.spec import JobState
from runtime.launchers.base import Clears, KeepsOutput, Launcher, Releases, Stops, find_keeper
from runtime.launchers.job_status import LIVES, UNSEEN, judge_job
from runtime.system import system
from runtime.units import Span, format_duration, format_time, read_span

_UNMARKED: Final = {
    True: "cancel it again once there is room, or the same launch starts it again",
    False: "a run whose shim serves others too goes on; cancel it again once there is room",
}
ASKED_AGAIN_S: Final = (0.5, 2.0)
"""Pauses before a backend that did not answer a cancel is asked again how its runs ended."""
UNSEEN_S: Final = 150.0
"""How long a cancel waits for a job that cannot be seen from here: for the grace of most jobs."""
WAIT_S: Final = 1.0
SHORTEST_PREFIX: Final = 4


class JobHandle(OpenTarget):
    """A job that was launched, here or elsewhere, now or earlier. Closing it closes the connection to its target."""

    def __init__(self, job: str, target: Target, launcher: Launcher, host: Host, *, new: bool = False) -> None:
        super().__init__(target, launcher, host)
        self.id, self.new = job, new
        """`new` is False if the same launch was made before."""
        self._watch: tuple[list[str], LifeWatch] | None = None
        """The native jobs that are watched because they cannot be seen from here."""

    def __repr__(self) -> str:
        return f"<job {self.id[:10]} on {self.target.name}>"

    def entry(self) -> LedgerEntry:
        found = ledger.read_entry(self.files, self.id)
        if found is None:
            raise UnknownName("job", self.id, [], hint="`runtime status` lists the jobs that there are")
        return found

    def status(self, *, indices: bool = False) -> JobStatus:
        """Judge the job by the ledger and one question to the backend. Raises if the backend does not answer.

        A job that cannot be seen from here is `unknown` at first, and by its signs of life once it was looked at for 13 s.
        """
        return judge_job(
            self.entry(), self.target, self.launcher, self.host, indices=indices, lives=self._watch_heartbeat
        )[0]

    def look(
        self, *, tell: Callable[[InfrastructureFailure], None] = lambda problem: None
    ) -> tuple[JobStatus, list[NativeState]]:
        """Judge the job run by run, and return the backend's states too. A backend that does not answer makes states
        `unknown`; `tell` gets the reason."""
        return judge_job(
            self.entry(), self.target, self.launcher, self.host, indices=True, tell=tell, lives=self._watch_heartbeat
        )

    def poll_closely(self, tell: Callable[[str], None]) -> tuple[JobStatus, list[NativeState]]:
        """Do what `look` does, after watching a job that cannot be seen from here; `tell` gets a message if that takes time."""
        status, natives = self.look()
        if any(each.raw in UNSEEN for each in natives):
            self.find_life(tell)
            status, natives = self.look()
        return status, natives

    def _watch_heartbeat(self, entry: LedgerEntry) -> bool | None:
        natives = [each.native_id for each in newest_natives(entry)]
        if self._watch is None or self._watch[0] != natives:
            self._watch = natives, LifeWatch(self.files, self.id)
        return self._watch[1].look(open_runs(entry, cancelled=True))

    def find_life(self, tell: Callable[[str], None] = lambda text: None) -> bool:
        """Whether native jobs that cannot be seen from here give a sign of life; waits for one for at most 13 s, unless that is
        known already or nothing is hidden. `status` and `look` go by it from then on."""
        told = False
        while True:
            entry = self.entry()
            if not any(each.raw in UNSEEN for each in self.natives(entry)):
                return False
            if (lives := self._watch_heartbeat(entry)) is not None:
                return lives
            if not told:
                told = True
                tell(describe_watch(f"job `{self.id}`"))
            system.sleep(LOOK_S)

    def state(self) -> JobState:
        return self.status().state

    def natives(self, entry: LedgerEntry | None = None) -> list[NativeState]:
        """Ask the backend for the states of the native jobs, unless every index has a result."""
        entry = entry or self.entry()
        if len(entry.outcomes) >= entry.indices or not entry.natives:
            return []
        return self.launcher.states(self.target, [each.native_id for each in newest_natives(entry)], self.host)

    def wait(
        self,
        *,
        timeout: Span | None = None,
        stuck: bool = False,
        tell: Callable[[JobStatus], None] = lambda status: None,
    ) -> JobStatus:
        """Wait for the end; with `stuck` also return when the job needs help to go on. Raises `TimeoutError`; the job goes on.

        `tell` gets the job's status at each look.
        """
        span = read_span(timeout, "timeout")
        until = None if span is None else system.monotonic() + span.total_seconds()
        pause = 0.05
        while True:
            status = self.status()
            tell(status)
            if status.state.terminal or (stuck and status.reason is not None):
                return status
            if span is not None and until is not None and system.monotonic() >= until:
                raise TimeoutError(f"job {self.id} is {status.state} after {format_duration(span)}")
            system.sleep(pause)
            pause = min(WAIT_S, pause * 1.5)

    def result(self, timeout: Span | None = None, *, index: int | None = None) -> Any:
        """Wait for the end and return what the function returned: of an array's run, or of all of them as a list.

        Raises what the function raised, with its traceback as the cause; `CallFailed` for a run that ended otherwise or that
        runs a command; `TimeoutError`. Only the job's owner can load values.
        """
        from runtime.client.jobs import call_results  # with pickle, which no launch needs

        entry, outcomes = self._await_own(timeout)
        every = index is None and self._is_array(entry)
        ran = sorted(outcomes) if every else [entry.first_index if index is None else ledger.check_index(entry, index)]
        stored = call_results.read_stored(self.files, self.id, {each: outcomes[each] for each in ran})
        values = [
            call_results.take_value(stored[each], outcomes[each], call_results.describe_call(entry, each))
            for each in ran
        ]
        return values if every else values[0]

    def exception(self, timeout: Span | None = None, *, index: int | None = None) -> BaseException | None:
        """Wait for the end and return what `result` would raise of a run, the first by default; None if it has a value."""
        from runtime.client.jobs import call_results

        entry, outcomes = self._await_own(timeout)
        outcome = outcomes[entry.first_index if index is None else ledger.check_index(entry, index)]
        stored = call_results.read_stored(self.files, self.id, {outcome.index: outcome})[outcome.index]
        return call_results.find_problem(stored, outcome, call_results.describe_call(entry, outcome.index))

    def _await_own(self, timeout: Span | None) -> tuple[LedgerEntry, dict[int, RunOutcome]]:
        """Wait for the end; returns how each run ended, by its index. Raises `NotPossible` for another user's job."""
        from runtime.client.jobs import call_results

        call_results.check_own(self.entry())
        self.wait(timeout=timeout)
        status = self.status(indices=True)
        return status.entry, {each.index: call_results.end_of(status.entry, each) for each in status.indices}

    def _is_array(self, entry: LedgerEntry) -> bool:
        spec = json.loads(self.files.read(f"{job_folder(self.id)}/spec.json") or b"{}")
        return entry.indices > 1 or "array" in spec

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
        """Yield the log of an index, the first by default: every attempt in turn, or one. `follow` goes on until the job
        has ended, and passes the job's status to `tell` at each look."""
        from runtime.jobs.hosts.bucket import poll_again_s
        from runtime.jobs.log_follower import RunLog, read_limit

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
            system.sleep(poll_again_s(self.files))

    def cancel(self, *, indices: Sequence[int] | None = None) -> list[str]:
        """Stop the job, or some of its indices. Returns descriptions of leftovers; empty means that all is gone.

        A run that has ended stays as it ended. Native jobs with labels are found by them, even if the ledger lacks them. If the
        record root refuses the mark, the native jobs are stopped all the same.
        """
        self._record_ends()
        entry = self.entry()
        if indices is None and len(entry.outcomes) >= entry.indices:
            return self.end_strays()
        refused = self._mark_cancelled(indices)
        if len(entry.outcomes) >= entry.indices:
            return []
        left: list[str] = []
        if indices is None and find_keeper(self.launcher):
            left += self.sweep()
        elif natives := [each.native_id for each in newest_natives(entry)]:
            if refused and indices is None and isinstance(self.launcher, Stops):
                self.launcher.stop(self.target, natives, self.host)
            left += self.launcher.cancel(self.target, natives, indices, self.host)
            if isinstance(self.launcher, Clears):
                left += self.launcher.clear(self.target, job_folder(self.id), self.host)
            if indices is None and not refused and self.launcher.resumes:
                left += self._await_unseen()
        if indices is None and not left:
            try:
                self.files.remove(f"{job_folder(self.id)}/secrets")
            except InfrastructureFailure as problem:
                left.append(f"the files of its secrets: {problem.message}")
            self._leave_index(entry)
        if refused and (refused := self._mark_cancelled(indices)):  # runs that ended may have made room
            left.append(f"no cancel mark could be written: {refused.message}; {_UNMARKED[indices is None]}")
        return left

    def _await_unseen(self) -> list[str]:
        """Wait until native jobs that cannot be seen from here have found the cancel mark, and record the ends that they leave
        open. Returns descriptions of leftovers."""
        until = system.monotonic() + UNSEEN_S
        while lives := self.find_life():
            if system.monotonic() >= until:
                break
            system.sleep(LOOK_S)
        if lives:
            return [f"job `{self.id}`: {LIVES}, and does not heed its cancel mark; run `runtime cancel` there"]
        entry = self.entry()
        if any(each.raw in UNSEEN for each in self.natives(entry)):
            for index in open_runs(entry, cancelled=True):
                ended = IndexStatus(index=index, state=JobState.CANCELLED, reason=EndReason.CANCELLED)
                ledger.record_end(self.files, self.id, ended)
        return []

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
        """Give up a run that its backend keeps bound to a dead machine. Returns descriptions of leftovers."""
        if not isinstance(self.launcher, Releases):
            raise NotPossible(
                f"target `{self.target.name}` ({self.target.kind}) holds no run for a machine that is gone",
                hint=f"runtime cancel {self.id[:10]} --index {index}",
            )
        natives = [each.native_id for each in newest_natives(self.entry())]
        return self.launcher.release(self.target, natives, index, self.host)

    def end_strays(self) -> list[str]:
        """End native jobs that are still at work although the job has ended, after recording how it ended. Returns
        descriptions of leftovers."""
        keeper = find_keeper(self.launcher)
        if keeper is None:
            return []
        owned = keeper.owned(self.target, self.host, job=self.id)
        if not any(each.live for each in owned):
            return []
        self._record_ends()
        if left := keeper.remove(self.target, owned, self.host):
            return left
        entry = self.entry()
        if len(entry.outcomes) >= entry.indices:
            self._leave_index(entry)
        return []

    def _leave_index(self, entry: LedgerEntry) -> None:
        """Remove a job without living native jobs from the index. Without any, a launch may have been cut off."""
        if entry.natives:
            open_jobs.drop_if_ended(self.files, entry.target, self.id, lambda: self.entry().natives == entry.natives)

    def sweep(self) -> list[str]:
        """End and remove all that a backend with labels still holds of the job. Returns descriptions of leftovers."""
        keeper = find_keeper(self.launcher)
        return (
            keeper.remove(self.target, keeper.owned(self.target, self.host, job=self.id), self.host) if keeper else []
        )

    def _record_ends(self) -> None:
        """Record the ends that only the backend knows, which a cancel mark would hide. If it or the record root does not
        answer, none is recorded; a run that the same launch would start again has not ended."""
        if self.launcher.resumes:
            return
        for pause_s in (*ASKED_AGAIN_S, None):
            try:
                status = self.status(indices=True)
                for each in status.indices if status.entry.natives else ():
                    if each.state.terminal and each.index not in status.entry.outcomes:
                        ledger.record_end(self.files, self.id, each)
            except InfrastructureFailure as problem:
                if pause_s is None or not problem.retryable:
                    return
                system.sleep(pause_s)
            else:
                return

    def fetch(self, to: Path, *, index: int | None = None, overwrite: bool = False) -> list[Path]:
        """Copy the files in the job's output folders home, and return their paths here.

        Raises `FilesDiffer` once all others are copied, if other files have their names here, and `UnsafeRemoteName` at the
        first name that leads elsewhere.
        """
        from runtime.client.fetch import fetch, list_outputs, refuse_differing

        listed = list_outputs(self.files, self.entry(), [] if index is None else [index])
        done = list(fetch(self.files, listed, to, overwrite=overwrite))
        refuse_differing(done, to)
        return [Path(each.path) for each in done]


class TargetSilent(InfrastructureFailure):
    """The target that a job was launched on does not answer, so nothing is known of the job."""

    def __init__(self, job: str, target: Target, problem: InfrastructureFailure) -> None:
        self.job, self.target, self.problem = job, target, problem
        super().__init__(
            f"nobody knows how job `{job}` stands: target `{target.name}` does not answer: {problem.message}",
            facts=problem.facts,
            hint=problem.hint or f"runtime targets check {target.name}",
            retryable=problem.retryable,
        )


def find_job(text: str, *, settings: Settings | None = None, target: str | Target | None = None) -> JobHandle:
    """Find the job by its id or the beginning of it, on any target that can be named, or on one.

    The search begins with the target that the job was launched on from here. Raises `TargetSilent` if that one does not
    answer, the refusal if it cannot be used here, and `UnknownName`; other targets of either kind are passed over.
    """
    settings = settings or load_settings()
    known: list[str] = []
    silent: list[tuple[Target, RuntimeFailure]] = []
    remembered = _remembered(text, settings)
    named = find_target(target, settings) if isinstance(target, str) else target
    for each in [named] if named else _likely_targets(remembered, settings):
        try:
            place = open_target(each, make_context(settings))
            jobs = ledger.list_jobs(place.files)
        except RuntimeFailure as problem:
            if target:
                raise _why_silent(text, each, problem) from problem
            silent.append((each, problem))
            continue
        found = [job for job in jobs if job.startswith(text)] if len(text) >= SHORTEST_PREFIX else []
        if len(found) == 1:
            return JobHandle(found[0], each, place.launcher, place.host)
        place.close()
        if found:
            raise NotPossible(
                f"`{text}` is the beginning of more than one job",
                facts=[f"it may be: {', '.join(found[:10])}"],
                hint="add letters until only one is left",
            )
        known += jobs
    for each, why in silent:
        if jobs := [job for job, there in remembered if there == each]:
            raise _why_silent(jobs[0] if len(jobs) == 1 else text, each, why) from why
    unknown = UnknownName("job", text, known[:10], hint="`runtime status` lists the jobs that there are")
    unknown.facts = (*unknown.facts, *(_report_silent(each, why) for each, why in silent))
    raise unknown


def _why_silent(job: str, target: Target, why: RuntimeFailure) -> RuntimeFailure:
    return TargetSilent(job, target, why) if isinstance(why, InfrastructureFailure) else why


def _report_silent(target: Target, why: RuntimeFailure) -> str:
    if isinstance(why, InfrastructureFailure):
        return f"target `{target.name}` does not answer: {why.message}"
    return f"target `{target.name}` cannot be used here: {why.message}" + (f"; {why.hint}" if why.hint else "")


def _remembered(text: str, settings: Settings) -> list[tuple[str, Target]]:
    """List jobs with this beginning that were launched from here, each with its target."""
    if len(text) < SHORTEST_PREFIX or not re.fullmatch("j-[0-9a-f]*", text):
        return []
    known = {each.name: each for each in list_usable_targets(settings)}
    found = []
    for path in (settings.data_dir / "launched").glob(f"{text}*"):
        place = read_place(path.name, settings)
        if place is not None and place[0] in known:
            there = known[place[0]]
            found.append((path.name, replace(there, records=place[1]) if place[1] else there))
    return found


def _likely_targets(remembered: Sequence[tuple[str, Target]], settings: Settings) -> list[Target]:
    """List every target, beginning with the targets of remembered jobs."""
    first: list[Target] = []
    for _, target in remembered:
        if target not in first:
            first.append(target)
    return [*first, *(each for each in list_usable_targets(settings) if each not in first)]


def check_owner(entry: LedgerEntry, *, others: bool, verb: str) -> None:
    """Raise `NotPossible` for the job of another user, unless `others` allows it."""
    me = owner_name()
    if entry.owner != me and not others:
        raise NotPossible(
            f"job `{entry.id}` is `{entry.owner}`'s, and you are `{me}`", hint=f"`--others` to {verb} it all the same"
        )


def check_log(job: JobHandle, index: int, attempt: int | None, rank: int) -> None:
    """Raise `UnknownName`, with the known ones, if that attempt or rank has no log."""
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


def read_labelled(job: JobHandle, run: int, *, rank: int = 0, attempt: int | None = None) -> Iterator[bytes]:
    """Yield the whole lines of a run's log as far as they exist, each behind the run's index."""
    rest = b""
    for piece in job.logs(index=run, rank=rank, attempt=attempt):
        *whole, rest = (rest + piece).split(b"\n")
        if whole:
            yield b"".join(b"[%d] %s\n" % (run, line) for line in whole)
    if rest:
        yield b"[%d] %s\n" % (run, rest)


def follow_all(
    job: JobHandle,
    runs: Sequence[int] = (),
    *,
    every_s: float = 0.5,
    tell: Callable[[JobStatus], None] = lambda status: None,
) -> Iterator[tuple[int, bytes]]:
    """Yield whole lines of rank 0 of every run, or of `runs`, as they come, each with its index, until all of them have
    ended. `tell` gets the job's status at each look."""
    from runtime.jobs.hosts.bucket import poll_again_s
    from runtime.jobs.log_follower import RunLog, read_limit

    entry = job.entry()
    limit, logs = read_limit(job.files, job.id), dict[int, RunLog]()
    rest: dict[int, bytes] = {}
    finished: set[int] = set()
    while True:
        status = job.status()
        ended = status.state.terminal
        tell(status)
        done = ledger.read_outcomes(job.files, job.id).get(job.id, {})
        there = {int(name) for name in job.files.names(f"{job_folder(job.id)}/runs") if name.isdecimal()}
        there &= set(runs) or there
        for index in sorted(there - finished):
            for piece in logs.setdefault(index, RunLog(job.files, job.id, index, limit)).read():
                whole, _, rest[index] = (rest.get(index, b"") + piece).rpartition(b"\n")
                for line in whole.split(b"\n") if whole else ():
                    yield index, line
            if index in done:
                finished.add(index)
                if last := rest.pop(index, b""):
                    yield index, last
        if ended or len(finished) >= (len(runs) or entry.indices):
            return
        system.sleep(max(every_s, poll_again_s(job.files)))


def read_backend_log(job: JobHandle, native: NativeState | None) -> list[str]:
    """Return the last lines of the backend's own log of a native job; empty if there is none or it cannot be read."""
    if native is not None and isinstance(job.launcher, KeepsOutput):
        try:
            text = job.launcher.read_output(job.target, native, job_folder(job.id), job.host)
        except RuntimeFailure:
            return []
        return [line.rstrip() for line in text.splitlines() if line.strip()]
    return read_tail(job.files, f"{job_folder(job.id)}/shim.log", 100)


def read_unbegun(job: JobHandle, index: int) -> list[str]:
    """Return the end of the backend's own log for a run without any other log: its last native job began no attempt, or
    none has begun yet. Empty for any other run."""
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
    """Return the backend's state of one run, or of the native job that serves it."""
    native = next((each for each in states if each.index == index), None)
    return native or next((each for each in reversed(states) if each.index is None), None)
