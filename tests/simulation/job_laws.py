"""What must hold of jobs in every run, a function for each law."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from runtime.jobs.ledger import JobStatus
from runtime.jobs.spec import JobState
from runtime.shim.retry import LOST_IN_A_ROW
from tests.simulation.files import Root
from tests.simulation.world import Broken, Process, World

ONE_AT_A_TIME = "a job's command runs once at a time"
EXPLAINED = "a second start of a command has its reason"
SAME_JOB = "the same launch is the same job"
IN_LEDGER = "an acknowledged launch is in the ledger, and ends"
STAYS_ENDED = "what has ended stays as it ended"
KNOWN_FIRST = "what runs is in the ledger"
NOTHING_HELD = "a job that has ended holds no native job"
EVIDENCE = "each failure that was counted is an attempt that failed"
CANCELLED = "an acknowledged cancel ends the job"
CLEAN = "garbage collection removes everything of jobs that have ended"
ROOT_KEPT = "a record root that is missing is not made again"
ANSWERED = "who repeats a command is told in the end that it is done"
WAIT_ENDS = "`wait` ends once the job has"
WAIT_TRUE = "`wait` tells the truth"
OBEYED_WITHIN_S = 130.0
"""A command that starts later than this after an acknowledged cancel started in spite of it: the longest stop of a shim, and
the latency of its last steps."""
MANY = 40
"""After so many starts the backend gives a native job up."""


@dataclass
class Command:
    """A start of a job's command."""

    native: str
    process: str
    attempt: int
    began: float
    ended: float | None = None
    how: str = ""
    """`killed` if its machine or its shim went."""


@dataclass
class KnownRun:
    """All that happened to one run of a job."""

    commands: list[Command] = field(default_factory=list)
    since: float = 0.0
    """When whoever started it again last began to; commands from before that count no more."""
    committed: float = 0.0
    """When its last result was written."""
    died: int = 0
    """How often a shim of it was killed, or ended by an exception."""
    starts: int = 0
    """How often its native job was started, at most."""
    cancelled: float | None = None
    """When somebody was told that it alone is cancelled."""


@dataclass
class Known:
    """All that happened to a job."""

    runs: dict[int, KnownRun] = field(default_factory=lambda: {0: KnownRun()})
    """By index."""
    acknowledged: float | None = None
    cancelling: float = 1e9
    """When somebody began to cancel it."""
    cancelled: float | None = None
    reopened: float = 0.0
    """When somebody last started it again by hand, as they were told."""
    reopening: float | None = None
    """When somebody began to who has not been told."""
    said: tuple[JobState, float] | None = None
    budget: tuple[int, int] = (0, 0)
    """Failures and preemptions that its spec allows each run."""


class JobLaws:
    def __init__(self, world: World) -> None:
        self.world = world
        self.root: Root
        self.jobs: dict[str, Known] = defaultdict(Known)
        self.processes: dict[str, Any] = {}
        """Native jobs by their processes' names."""
        self.apart: set[str] = set()
        """Processes of shims whose node is cut off."""
        self.removing = -1.0
        """When somebody last began to remove something."""
        self.names: dict[str, str] = {}
        """By the name of a launch: its job."""

    def _break(self, law: str, what: str) -> None:
        broken = Broken(law, what)
        self.world.note(f"BROKEN {broken}")
        self.world.broken = self.world.broken or broken

    # as it happens

    def command_begins(self, job: str, index: int, attempt: int) -> None:
        """ONE_AT_A_TIME, EXPLAINED, KNOWN_FIRST and CANCELLED."""
        me = self.world.me()
        assert me is not None
        native, known, now = self.processes[me.name], self.jobs[job], self.world.now
        self.world.note(f"starts the command of {job[:8]} {index}, attempt {attempt}")
        run = known.runs[index]
        running = [each for each in run.commands if each.ended is None and each.process not in self.apart]
        if running and (me.name not in self.apart or attempt < max(each.attempt for each in running)):
            self._break(ONE_AT_A_TIME, f"{native.id} starts it while {running[0].native} runs it")
        if not self.root.away and self.root.read(f"jobs/{job}/intent.json") is None:
            self._break(KNOWN_FIRST, "its command starts without an intent")
        # Without a result, a shim that died before it could commit one explains the next start.
        if self.result(job, index) is not None:
            self._break(EXPLAINED, f"attempt {attempt} starts although there is a result")
        for told in (known.cancelled, run.cancelled):
            if told is not None and now > told + OBEYED_WITHIN_S:
                self._break(CANCELLED, f"its command starts {now - told:.0f} s later")
        run.commands.append(Command(native.id, me.name, attempt, now))

    def command_goes_on(self, job: str) -> None:
        """KNOWN_FIRST."""
        me = self.world.me()
        if me is not None and me.name in self.apart:
            return
        if not self.root.away and self.root.read(f"jobs/{job}/intent.json") is None:
            self._break(KNOWN_FIRST, "its record is gone while its command runs")

    def command_ends(self, job: str, index: int, attempt: int, how: str) -> None:
        for each in self.jobs[job].runs[index].commands:
            if each.attempt == attempt and each.ended is None:
                each.ended, each.how = self.world.now, how
        self.world.note(f"the command of {job[:8]} {index}, attempt {attempt}, ends: {how}")

    def cut_off(self, process: Process) -> None:
        """The backend takes a shim for gone that goes on: another may start beside it."""
        self.apart.add(process.name)

    def killed(self, native: Any, process: Process) -> None:
        self.died(native)
        for run in self.jobs[native.job].runs.values():
            for each in run.commands:
                if each.process == process.name and each.ended is None:
                    each.ended, each.how = self.world.now, "killed"

    def died(self, native: Any) -> None:
        """A shim was killed, or ended by an exception or without its order."""
        runs = self.jobs[native.job].runs
        for run in [runs[index] for index in native.serves]:
            run.died += 1
            run.starts = max(run.starts, native.starts)

    def planned(self, job: str, count: int) -> None:
        """Somebody begins to launch a job of so many runs."""
        runs = self.jobs[job].runs
        for index in range(count):
            runs.setdefault(index, KnownRun())

    def launched(self, name: str, job: str, budget: tuple[int, int]) -> None:
        """SAME_JOB."""
        if self.names.setdefault(name, job) != job:
            self._break(SAME_JOB, f"{name} became two jobs")
        known = self.jobs[job]
        known.budget = budget
        known.acknowledged = known.acknowledged or self.world.now

    def told(self, status: JobStatus, asked_at: float, *, firmly: bool) -> None:
        """STAYS_ENDED: look at what somebody was told, who asked at that time. `firmly` if only results count."""
        entry, known = status.entry, self.jobs[status.entry.id]
        if (
            known.reopening is not None
            or asked_at < known.reopened
            or (known.cancelled is not None and asked_at < known.cancelled)
        ):
            return
        if self._may_go_on(status):
            return
        if known.said is not None and asked_at < known.said[1]:
            return  # it had not ended yet when they looked
        if status.state is JobState.CANCELLED and known.said is not None and known.cancelling <= known.said[1]:
            return  # whoever cancelled it had looked before, and the run was alive then
        if status.state is JobState.CANCELLED and known.said is not None and self._kept_nothing(known.said[1]):
            return  # how it had ended could not be written down before the cancel
        if known.said is not None and status.state is not known.said[0] and status.state is not JobState.UNKNOWN:
            before = f"{known.said[0]}, and {self.world.now - known.said[1]:.0f} s later"
            self._break(STAYS_ENDED, f"it was {before} {status.state} ({status.reason})")
        if known.said is None and status.state.terminal and (not firmly or len(entry.outcomes) >= entry.indices):
            known.said = status.state, self.world.now

    def _may_go_on(self, status: JobStatus) -> bool:
        """Whether it says what the backend says, which took a shim of the job for gone that may go on."""
        entry = status.entry
        return len(entry.outcomes) < entry.indices and any(self.processes[each].job == entry.id for each in self.apart)

    def _kept_nothing(self, since: float) -> bool:
        """Whether the record root was full or away since then."""
        return max(self.root.full_until, self.root.away_until) > since

    def reopen(self, job: str) -> None:
        """Somebody begins to start the job again by hand."""
        known = self.jobs[job]
        if known.reopening is None:
            known.reopening = self.world.now

    def reopened(self, job: str, indices: Sequence[int], *, began_again: bool) -> None:
        """They have, these runs of it; unless `began_again` it was another job."""
        known = self.jobs[job]
        began, known.reopening = known.reopening, None
        if began_again:
            assert began is not None
            known.reopened, known.said = self.world.now, None
            for index in indices:
                known.runs[index].since = began

    def removed(self, job: str, natives: Iterable[Any]) -> None:
        """KNOWN_FIRST: its record was removed, so the next launch is the first one.

        A twin of its first native job finds no order, and runs nothing; but a retry was promised a run.
        """
        known = self.jobs[job]
        for run in known.runs.values():
            run.since, run.cancelled = self.removing, None
        known.said = known.cancelled = None
        retries = [each for each in natives if each.job == job and each.epoch > 1 and not each.state.terminal]
        if any(each.made_at < self.removing for each in retries):
            self._break(KNOWN_FIRST, "its record is gone while a native job of it is there")

    def announces(self, job: str, index: str, reason: str) -> None:
        """STAYS_ENDED: what listings show as a job's end is its result, or was before somebody began it anew."""
        result, known = self.result(job, int(index)), self.jobs[job]
        anew = max(self.removing, known.reopened, known.reopening or 0.0)
        if (result is None or result["reason"] != reason) and anew < known.runs[int(index)].committed:
            self._break(STAYS_ENDED, f"{reason} is announced, and its result is {result and result['reason']}")

    # at the end of a run

    def result(self, job: str, index: int) -> Any:
        return json.loads(self.root.read(f"jobs/{job}/runs/{index}/result") or b"null")

    def check_ended(self, job: str, status: JobStatus | None) -> None:
        """IN_LEDGER."""
        if status is None:
            self._break(IN_LEDGER, "there is no such job")
        elif not status.state.terminal:
            self._break(IN_LEDGER, f"it is {status.state}")

    def check_removed(self, job: str) -> None:
        """IN_LEDGER: what is not there any more was removed, and ran since it was last started again by hand."""
        known = self.jobs[job]
        if known.acknowledged is None:
            return
        began = [each.began for run in known.runs.values() for each in run.commands]
        if self.removing < max([known.acknowledged, *began]):
            self._break(IN_LEDGER, "there is no such job, and nobody removed it")

    def check_announced(self) -> None:
        """STAYS_ENDED: each name of the listing is the result of a job, until somebody begins to remove it."""
        for name in sorted(each.name for each in self.root.path.glob("done/*")):
            job, index, reason, _, _ = name.split(".")
            result, removing = self.result(job, int(index)), self.root.path / f"jobs/{job}/removing"
            if self.root.read(f"jobs/{job}/intent.json") is None and not removing.exists():
                self._break(STAYS_ENDED, f"{reason} is announced of a job that is not there")
            elif (result is None or result["reason"] != reason) and self.removing < self._committed(job, int(index)):
                self._break(STAYS_ENDED, f"{reason} is announced, and its result is {result and result['reason']}")

    def _committed(self, job: str, index: int) -> float:
        return self.jobs[job].runs[index].committed

    def check_clean(self, natives: list[Any]) -> None:
        """CLEAN: what nobody needs any more can be removed wholly."""
        left = [str(each.relative_to(self.root.path)) for each in sorted(self.root.path.rglob("*")) if each.is_file()]
        left = [each for each in left if each.startswith(("jobs/", "done/"))]
        live = [each.id for each in natives if not each.state.terminal]
        if left or live:
            self._break(CLEAN, f"{len(live)} live, and files remain: {', '.join(left[:3])}")

    def check_held(self, job: str, status: JobStatus, natives: list[Any]) -> None:
        """NOTHING_HELD."""
        held = [each.id for each in natives if each.job == job and not each.state.terminal]
        if status.state.terminal and held:
            self._break(NOTHING_HELD, f"it is {status.state}, and {len(held)} live")

    def check_evidence(self, job: str) -> None:
        """EVIDENCE: a run that its budget of failures ended has that many attempts that failed."""
        for index, run in self.jobs[job].runs.items():
            self._check_evidence(job, index, run)

    def _check_evidence(self, job: str, index: int, run: KnownRun) -> None:
        known = self.jobs[job]
        failures = sum(each.how == "app_failed" and each.began >= run.since for each in run.commands)
        if known.reopening is None and failures > known.budget[0] + 1 + run.died:
            # A shim that died before it could note the failure of its command was lost.
            self._break(EVIDENCE, f"{failures} attempts failed of {known.budget[0] + 1}, and {run.died} shims died")
        result = self.result(job, index)
        if result is None or "from" in result:
            return
        if result["reason"] == "app_failed":
            counts = [each for each in run.commands if each.began >= run.since or each.process in self.apart]
            failed = sum(each.how == "app_failed" for each in counts)
            asked = sum(each.how == "requeue" for each in run.commands)
            # With a message it is the backend's word: it takes the death of a shim for a failure, and a shim without an order.
            if failed < known.budget[0] + 1 and asked <= known.budget[1] and "message" not in result:
                self._break(EVIDENCE, f"{failed} of {known.budget[0] + 1} attempts failed")
        elif result["reason"] in ("stopped", "preempted", "node_failed"):
            if len(run.commands) <= known.budget[1] and run.starts < MANY:
                self._break(EVIDENCE, f"{result['reason']} after {len(run.commands)} of {known.budget[1] + 1} attempts")
        elif result["reason"] == "lost":
            # A folder that was made although the answer was an error is an attempt that nobody began.
            died = run.died + result["attempt"] - len(run.commands)
            # What has ended without a result is lost once the backend has forgotten how.
            mine = [each for each in self.processes.values() if each.job == job]
            forgotten = any(self.world.now >= each.ended_at + each.forgotten_s for each in mine)
            if died < LOST_IN_A_ROW and not forgotten:
                self._break(EVIDENCE, f"lost after {died} of {LOST_IN_A_ROW} shims died")

    def check_cancelled(self, job: str, status: JobStatus) -> None:
        """CANCELLED."""
        if self.jobs[job].cancelled is not None and not status.state.terminal:
            self._break(CANCELLED, f"it is {status.state}")

    def check_waited(self, heard: Any, found: dict[str, JobStatus], *, firmly: bool) -> None:
        """WAIT_ENDS and WAIT_TRUE: `heard` is the job, what `wait` said of it, and when it was asked."""
        if heard is None:
            self._break(WAIT_ENDS, "it does not")
            return
        job, said, at = heard
        known = self.jobs[job]
        if self._may_go_on(said) or (firmly and len(said.entry.outcomes) < said.entry.indices):
            return
        if at >= known.reopened and known.reopening is None and said.state is not found[job].state:
            self._break(WAIT_TRUE, f"it said {said.state}, and it is {found[job].state}")

    def check_heard(self, unheard: set[str]) -> None:
        """ANSWERED: everybody who insisted was told in the end that it is done."""
        if unheard:
            self._break(ANSWERED, f"{', '.join(sorted(unheard))} are still at it")

    def check_root(self) -> None:
        """ROOT_KEPT."""
        if self.root.made_anew:
            self._break(ROOT_KEPT, f"{len(self.root.made_anew)} names were made in its place")
