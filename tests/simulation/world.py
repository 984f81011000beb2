"""A world of hosts and processes in virtual time. Real code runs in it unchanged, and blocks where it blocks.

Each thread is a greenlet, and one of them runs at a time until it waits: for time, a lock, a call. A process that is
killed is never resumed, so no `finally` of its code runs; one that is stopped is resumed late. What happens next is
decided by `World.draw` alone, so a seed, or the tape of its decisions, is the whole run.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import greenlet

from tests.simulation.choices import Chance, Choice, Tape

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
_EPOCH_S = EPOCH.timestamp()
_MEMORY = Path("/dev/shm")
"""A file system in memory, if there is one."""
STORM = 5_000
"""Steps at one instant after which something spins."""
STEPS = 400_000
"""Steps of one run after which it has gone astray."""

MOMENT_S = 0.002
"""How long a call takes to arrive, and its answer to come back."""
FATES: Final[tuple[tuple[str, float, float], ...]] = (
    ("", 0.0, 300),
    ("latency", 0.05, 60),
    ("latency", 0.4, 30),
    ("latency", 3.0, 10),
    ("answer", 0.05, 40),
    ("answer", 0.4, 20),
    ("refused", 0.0, 7),
    ("lost", 0.0, 7),
    ("retried", 0.0, 7),
    ("kill", 0.0, 2),
    ("stop", 5.0, 1),
    ("stop", 40.0, 1),
    ("stop", 95.0, 1),
    ("jump", 30.0, 1),
    ("jump", -30.0, 1),
    ("outage", 30.0, 0.7),
    ("outage", 200.0, 0.3),
    ("denied", 40.0, 0.5),
    ("late", 2.0, 3),
    ("late", 25.0, 3),
    ("denied", 200.0, 0.5),
    ("answer", 9.0, 4),
    ("stop", 900.0, 0),
    ("stop", 5_400.0, 0),
    ("jump", 3_600.0, 0),
    ("jump", -3_600.0, 0),
    ("outage", 1_200.0, 0),
    ("outage", 5_400.0, 0),
    ("denied", 1_200.0, 0),
    ("denied", 5_400.0, 0),
)
"""What may become of a call, its measure in seconds, and how often: it is slow to arrive or to answer; it is refused
and not done; it is done, and the answer is lost; the same, and the library's own second try meets the first; then its
process is killed, or stopped; then the clock of its host jumps; or from now on, for a while, its host is cut off from
what it calls, or lacks a permission there; or it is done so long after its caller was told that it failed."""
PASSING = frozenset({"", "latency", "answer", "refused", "lost", "retried", "late"})
"""Fates that concern one call and nothing else."""
_KINDS = [kind for kind, _, _ in FATES[1:]]
CALL = Choice("call", *(weight for _, _, weight in FATES), kinds=_KINDS)
CUT_OFF_S = 0.7
"""How long a call takes to fail meanwhile."""
FLAP = Choice("flap", 1, 1, fault=False)
"""A permission that has just changed holds for some calls and not for others."""
NO_ANSWER_S = 10.0
"""When a caller gives up."""
_OFTEN = {"stop": 8, "kill": 3}
HARSH_CALL = Choice("harsh-call", *(weight * _OFTEN.get(kind, 1) for kind, _, weight in FATES), kinds=_KINDS)
"""Decides in worlds where processes are stopped and killed more often."""
SLOW_CALL = Choice(
    "slow-call",
    *(weight * (10 if kind in ("latency", "answer") and measure >= 0.4 else 1) for kind, measure, weight in FATES),
    kinds=_KINDS,
)
"""Decides in worlds in which much may happen between two pages of one listing."""
STEADY_CALL = Choice("steady-call", *(0 if kind == "outage" else weight for kind, _, weight in FATES), kinds=_KINDS)
"""Decides in worlds that cut hosts off in their own way."""
SELDOM_CALL = Choice(
    "seldom-call",
    *(weight if kind in PASSING else 0.04 if kind == "kill" else 0.015 for kind, _, weight in FATES),
    kinds=_KINDS,
)
"""Decides in worlds that last for hours: what holds a process up happens once an hour, and then for minutes or hours."""
SKEW_S = (0.0, 20.0, -20.0, 300.0, -300.0)
SKEW = Choice("skew", 4, 1, 1, 1, 1)


class Over(greenlet.GreenletExit):
    """The world has ended: unwinds what is left of a thread."""


class Broken(Exception):
    """A law does not hold. The first is the run's result."""

    def __init__(self, law: str, what: str) -> None:
        super().__init__(f"{law}: {what}")
        self.law, self.what = law, what


class Host:
    def __init__(self, name: str, skew_s: float = 0.0) -> None:
        self.name, self.skew_s = name, skew_s


class Process:
    """A name, a host, and threads. `mortal` ones may be killed and stopped."""

    def __init__(self, name: str, host: Host, *, mortal: bool) -> None:
        self.name, self.host, self.mortal = name, host, mortal
        self.dead = False
        self.stopped_until = 0.0
        self.threads: list[Strand] = []
        self.random = random.Random(name)
        self.on_death: list[Callable[[], None]] = []
        """What the rest of the world does when it is gone: its locks and connections end."""


class Strand(greenlet.greenlet):
    """A thread of a process."""

    process: Process
    name: str
    ticket = 0
    """Entries of the schedule with an older number are void."""
    woken = False
    ended = False
    until_s = float("inf")
    """When it ended, or its process."""
    joined: list[Strand]


class World:
    def __init__(
        self, seed: int, script: Tape | None = None, *, tracing: bool = False, wild: bool = False, until_s: float = 1e9
    ) -> None:
        self.chance = Chance(seed, script, wild=wild)
        self.calls = CALL
        self.now = 0.0
        """Seconds since the world began."""
        self.until_s = until_s
        self.steps, self.most_steps = 0, STEPS
        self.trace: list[str] | None = [] if tracing else None
        self.processes: dict[str, Process] = {}
        self.graves: list[Process] = []
        self.workers: list[tuple[Strand, float]] = []
        """Threads that run a worker, and since when."""
        self.killed: set[str] = set()
        self.over = False
        self.broken: Broken | None = None
        self.cause: Exception | None = None
        """The exception that a thread died of."""
        self.wake_ups: dict[int, Any] = {}
        """By descriptor."""
        self.descriptors = itertools.count(10_000)
        self.still = 0
        """More than 0 while the running thread may not be interrupted: nobody else runs, and no time passes."""
        self.after_step: Callable[[], object] | None = None
        """What the machine does of its own accord."""
        self.at_close: list[Callable[[], object]] = []
        self._hub = greenlet.getcurrent()
        self._heap: list[tuple[float, int, Strand, int]] = []
        self._order = itertools.count()
        self._instant, self._at_instant = -1.0, 0
        self.hosts: dict[str, Host] = {}
        self.cut_off: dict[tuple[str, str], tuple[float, bool]] = {}
        """By host and what it calls: until when, and whether for lack of a permission."""
        self.longest_denial_s = 0.0
        self.refused: set[str] = set()
        """Tokens of attempts whose end a queue refused, since their lease was lost or another was first."""
        self._net: Process | None = None
        """Has the calls that are under way after their caller gave up."""
        self._folder: Path | None = None
        self._replaced = contextlib.ExitStack()

    # who

    def host(self, name: str) -> Host:
        """Return the host of that name; its clock is drawn when it is first named."""
        if name not in self.hosts:
            self.hosts[name] = Host(name, SKEW_S[self.chance.draw(name, SKEW)])
        return self.hosts[name]

    def me(self) -> Process | None:
        """Return the process that runs now; None between two steps."""
        current = greenlet.getcurrent()
        return current.process if isinstance(current, Strand) else None

    def draw(self, choice: Choice, who: str = "") -> int:
        """Take a decision in the name of the running process, or of `who`."""
        if self.over:
            raise Over
        me = self.me()
        return self.chance.draw(who or (me.name if me else "world"), choice)

    def note(self, text: str) -> None:
        if self.trace is not None:
            current = greenlet.getcurrent()
            who = f"{current.process.name}/{current.name}" if isinstance(current, Strand) else "-"
            if self._folder is not None:
                text = text.replace(str(self._folder), "/world")
            self.trace.append(f"{self.now:10.3f}  {who:<24} {text}")

    def spawn(
        self, name: str, call: Callable[[], object], *, host: str = "", at_s: float = 0.0, mortal: bool = False
    ) -> Process:
        """Start a process `at_s` from now."""
        process = self.processes[name] = Process(name, self.host(host or name), mortal=mortal)
        self.start(self.strand(process, call, "main"), at_s)
        return process

    def strand(self, process: Process, call: Callable[[], object], name: str) -> Strand:
        def body() -> None:
            try:
                call()
            except Over:
                return
            except Broken as problem:
                self.broken = self.broken or problem
            except Exception as problem:
                if self.over:
                    return
                self.note(f"died of {type(problem).__name__}: {problem}")
                what = f"{process.name.rstrip('0123456789.')} died of {type(problem).__name__}: {str(problem)[:90]}"
                self.broken = self.broken or Broken("no process or thread dies of an exception", what)
                self.cause = problem
            finally:
                strand.ended, strand.until_s = True, min(strand.until_s, self.now)
                for other in strand.joined:
                    self.wake(other)

        strand = Strand(body, self._hub)
        strand.process, strand.name, strand.joined = process, name, []
        process.threads.append(strand)
        return strand

    def works(self) -> None:
        """Note that the running thread is a worker from now on."""
        strand = greenlet.getcurrent()
        assert isinstance(strand, Strand)
        self.workers.append((strand, self.now))

    def worked_s(self) -> float:
        """Return how long workers lived, all of them together."""
        return sum(min(strand.until_s, self.now) - since for strand, since in self.workers)

    def swallowed(self, message: str) -> None:
        """Note that code has caught an exception that it did not foresee, and goes on."""
        problem = sys.exc_info()[1]
        if self.over or isinstance(problem, Broken):
            return
        what = f"{message.partition(' of')[0]}: {type(problem).__name__}: {str(problem)[:90]}"
        self.note(f"SWALLOWED {what}")
        self.broken = self.broken or Broken("no exception is swallowed", what)
        self.cause = self.cause or (problem if isinstance(problem, Exception) else None)

    def kill(self, process: Process) -> None:
        """End a process here and now; if it is the running one, this never returns."""
        if process.dead:
            return
        self.note(f"SIGKILL for {process.name}")
        process.dead = True
        self.graves.append(process)
        self.killed.add(process.name)
        for strand in process.threads:
            strand.until_s = min(strand.until_s, self.now)
        for each in process.on_death:
            each()
        if self.me() is process:
            self._hub.switch()
            raise Over

    def stop(self, process: Process, span_s: float) -> None:
        """SIGSTOP, and SIGCONT after `span_s`."""
        self.note(f"SIGSTOP for {process.name}, {span_s:g} s")
        process.stopped_until = max(process.stopped_until, self.now + span_s)
        if self.me() is process:
            self.pause(0.0)

    # time

    def start(self, strand: Strand, after_s: float = 0.0) -> None:
        heapq.heappush(self._heap, (self.now + after_s, next(self._order), strand, strand.ticket))

    def pause(self, seconds: float) -> None:
        """Have the running thread wait; between two steps time does not pass."""
        strand = greenlet.getcurrent()
        if self.over:
            raise Over
        if isinstance(strand, Strand) and not self.still:
            if self._nobody_before(self.now + seconds, strand):
                return
            self.start(strand, max(0.0, seconds))
            self._hub.switch()
            if self.over:
                raise Over

    def park(self, seconds: float | None = None) -> bool:
        """Have the running thread wait until somebody wakes it; False if the time was over before."""
        strand = greenlet.getcurrent()
        if self.over:
            raise Over
        assert isinstance(strand, Strand), "nobody could ever wake it"
        assert not self.still, "it waits where nobody else can run"
        strand.woken = False
        if seconds is not None:
            if self._nobody_before(self.now + seconds, strand):
                return False
            self.start(strand, max(0.0, seconds))
        self._hub.switch()
        if self.over:
            raise Over
        return strand.woken

    def _nobody_before(self, at: float, strand: Strand) -> bool:
        """Let the running thread go on at that time without a switch, if nobody else has anything to do before."""
        heap = self._heap
        while heap and heap[0][0] <= at:
            _, _, other, ticket = heap[0]
            if other.ticket == ticket and not other.ended and not other.process.dead:
                return False
            heapq.heappop(heap)
        if not self.now < at <= self.until_s or strand.process.stopped_until > at:
            return False
        if self.steps >= self.most_steps or self.broken is not None or self.after_step is not None:
            return False
        self.now = self._instant = at
        self._at_instant = 0
        self.steps += 1
        return True

    def wake(self, strand: Strand) -> None:
        if not strand.woken and not self.over:
            strand.woken = True
            strand.ticket += 1
            self.start(strand)

    def wall(self) -> float:
        """Seconds since 1970 by the clock of the running process's host."""
        me = self.me()
        return _EPOCH_S + self.now + (me.host.skew_s if me else 0.0)

    def wall_time(self) -> datetime:
        me = self.me()
        return EPOCH + timedelta(seconds=self.now + (me.host.skew_s if me else 0.0))

    def boot_time(self) -> float:
        if self.over:
            raise Over
        return 1000.0 + self.now

    # calls that leave the process

    def call(
        self,
        what: str,
        apply: Callable[[], Any],
        *,
        write: bool,
        refused: Callable[[str], Exception],
        denied: Callable[[], Exception] | None = None,
        to: str = "",
    ) -> Any:
        """Make a call: it takes time, may fail before or after its effect, and its process may be killed or stopped.

        `refused` makes the exception of a failure from its text, `denied` that of a missing permission; `to` names what
        is called.
        """
        me = self.me()
        if me is None:
            return apply()
        if self.cut_off and not self.chance.healed:
            self._meet_outage(what, (me.host.name, to), refused, denied)
        kind, measure, _ = FATES[self.draw(self.calls)]
        self.pause(measure if kind == "latency" else MOMENT_S)
        if kind == "outage" or (kind == "denied" and denied is not None):
            self.note(
                f"{me.host.name} {'lacks a permission at' if kind == 'denied' else 'is cut off from'} {to} for {measure:g} s"
            )
            self.cut_off[me.host.name, to] = self.now + measure, kind == "denied"
            if kind == "denied":
                self.longest_denial_s = max(self.longest_denial_s, measure)
            self._meet_outage(what, (me.host.name, to), refused, denied)
        if kind == "late" and to:
            self.pause(NO_ANSWER_S)
            self.note(f"{what} -> 504, done {measure:g} s LATER")
            if write:
                self._apply_later(what, apply, measure)
            raise refused("504")
        if kind in ("refused", "denied"):
            self.note(f"{what} -> 503, not done")
            raise refused("503")
        result = apply()
        lost = kind in ("lost", "retried") and (write or kind == "lost")
        self.note(f"{what} -> done, ANSWER LOST" if lost else what)
        if self.chance.healed and kind in ("kill", "stop", "jump"):
            kind = ""  # it was decided before, on behalf of one that stood still since
        if kind == "kill" and me.mortal:
            self.kill(me)
        elif kind == "stop" and me.mortal:
            self.stop(me, measure)
        elif kind == "jump":
            me.host.skew_s += measure
            self.note(f"the clock of {me.host.name} jumps by {measure:g} s")
        self.pause(measure if kind == "answer" else MOMENT_S)
        if not lost:
            return result
        if kind == "lost":
            raise refused("504")
        return Retried

    def _meet_outage(
        self,
        what: str,
        where: tuple[str, str],
        refused: Callable[[str], Exception],
        denied: Callable[[], Exception] | None,
    ) -> None:
        until, lacks = self.cut_off.get(where, (0.0, False))
        if until <= self.now or (lacks and self.draw(FLAP)):
            return
        self.pause(CUT_OFF_S)
        self.note(f"{what} -> {'403' if lacks else 'cut off'}")
        raise denied() if lacks and denied is not None else refused("503")

    def is_late(self) -> bool:
        """Whether a call is under way whose caller has given up."""
        return self._net is not None and self.me() is self._net

    def _apply_later(self, what: str, apply: Callable[[], Any], after_s: float) -> None:
        def late() -> None:
            self.note(f"{what} -> done LATE")
            apply()

        if self._net is None:
            self._net = self.processes["net"] = Process("net", Host("net"), mortal=False)
        self.start(self.strand(self._net, late, "late"), after_s)

    # the run

    def run(self) -> None:
        """Step until nothing is left to do, the time is over, or a law is broken."""
        heap, hub = self._heap, self._hub
        assert greenlet.getcurrent() is hub
        while heap and self.broken is None:
            at, _, strand, ticket = heapq.heappop(heap)
            process = strand.process
            if strand.ticket != ticket or process.dead or strand.ended:
                continue
            if process.stopped_until > at:
                heapq.heappush(heap, (process.stopped_until, next(self._order), strand, ticket))
                continue
            if at > self.until_s:
                return
            self.now = at = max(at, self.now)
            self.steps += 1
            if at == self._instant:
                self._at_instant += 1
                if self._at_instant > STORM:
                    self.broken = Broken("nothing spins", f"{process.name.rstrip('0123456789.')} took {STORM} steps")
                    return
            else:
                self._instant, self._at_instant = at, 0
            if self.steps > self.most_steps:
                self.broken = Broken("nothing spins", f"{self.most_steps} steps in one run")
                return
            strand.switch()
            if self.after_step is not None:
                self.after_step()

    def judge(self, check: Callable[[], object]) -> None:
        """End everybody, and let `check` look at what is left, as a process that nothing happens to."""
        for process in self.processes.values():
            process.dead = True
            self.graves.append(process)
        self.heal()
        self.until_s = self.now + 1e6
        self.spawn("judge", check)
        self.run()

    def folder(self) -> Path:
        """Return a folder of the real machine, for what code wants to write there; it goes with the world."""
        if self._folder is None:
            place = _MEMORY if _MEMORY.is_dir() else None
            self._folder = Path(tempfile.mkdtemp(prefix="simulation-", dir=place))
        return self._folder

    def replace(self, place: Any, name: str, stand_in: Any) -> None:
        """Have an attribute of a module that asks the machine itself stand in until the world is closed."""
        self._replaced.callback(setattr, place, name, getattr(place, name))
        setattr(place, name, stand_in)

    def close(self) -> None:
        """Unwind every thread that is left."""
        self.over, self.after_step = True, None
        for each in self.at_close:
            each()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._heap.clear()
        for process in [*self.processes.values(), *self.graves]:
            for strand in process.threads:
                if strand.gr_frame is not None and not strand.dead:
                    strand.throw(Over)
            process.threads.clear()
        self._replaced.close()

    def heal(self) -> None:
        """From now on no fault happens, and what was stopped goes on."""
        self.note("no more faults")
        self.chance.healed = True
        for process in self.processes.values():
            process.stopped_until = min(process.stopped_until, self.now)


class Retried:
    """The result of a call whose library made it twice: the effect was there already."""
