"""A development machine: a job that holds its machine, and gets each new state of a folder as the next tree to run.

The job's folder has the trees as `hold/N.tar` and `hold/N.json`, the counter `hold/beat`, by which the machine knows that
its client lives, and `hold/over` once it is given back. docs/shim.md has the rules of the other side.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from runtime.client.jobs.handle import JobHandle
from runtime.client.jobs.launch import carry_out
from runtime.client.jobs.prepare import LaunchOptions, LaunchRequest, PreparedLaunch, code_rules, prepare
from runtime.client.jobs.targets import open_target
from runtime.config import Settings
from runtime.errors import NotPossible
from runtime.jobs import ledger
from runtime.jobs.ledger import job_folder
from runtime.jobs.log_follower import RunLog, read_limit
from runtime.jobs.plan import Target
from runtime.jobs.spec import JobState
from runtime.jobs.spec_fields import held_ids
from runtime.shim.dev_loop import BEAT, FOLDER, OVER
from runtime.snapshots.snapshot import Snapshot, SnapshotRules, make_snapshot, survey
from runtime.system import system

CLIENT: Final = "client"
"""File for each client that has taken the machine over: `client.N`, the highest of which goes on with it."""
BEAT_S: Final = 20.0
"""How often the counter moves."""
LOOK_S: Final = 1.0
"""How often the folder is looked at."""
LOOKS: Final = 5
"""Looks after which a folder is taken although its files still change."""
SESSIONS: Final = 10_000
"""Machines that one user had for one folder in a record root, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandEnd:
    """The end of a command on the machine."""

    attempt: int
    reason: str
    exit_code: int
    lasted_s: float
    message: str
    tree: int


def open_machine(
    request: LaunchRequest,
    target: Target,
    settings: Settings,
    options: LaunchOptions,
    progress: Callable[[str], None] = lambda text: None,
) -> tuple[DevMachine, PreparedLaunch]:
    """Launch a machine for a folder, or go on with the one that is still held for it. Raises as `carry_out`."""
    prepared = prepare(request, target, settings, replace(options, hold=True))
    prepared = _choose(prepared, again=options.again)
    job = carry_out(prepared, replace(options, again=False), progress)
    try:
        return DevMachine(job, prepared), prepared
    except BaseException:
        job.close()
        raise


def _choose(prepared: PreparedLaunch, *, again: bool) -> PreparedLaunch:
    """Return the plan of the machine that is still held for the folder, or of the next one."""
    plan, hold = prepared.plan, prepared.plan.job.hold
    assert hold is not None
    every = held_ids(owner=plan.job.owner, target=plan.target.name, spec=plan.spec, hold=hold)
    ids = list(itertools.islice(every, SESSIONS))
    with open_target(plan.target, prepared.context, prepared.launcher) as place:
        there = set(ledger.list_jobs(place.files))
        chosen = max((number for number, each in enumerate(ids) if each in there), default=0)
        if ids[chosen] in there and ledger.read_entry(place.files, ids[chosen]) is not None:
            over = place.files.read(f"{job_folder(ids[chosen])}/{FOLDER}/{OVER}") is not None
            status = JobHandle(ids[chosen], place.target, place.launcher, place.host).status()
            chosen += bool(again or over or status.state.terminal or status.entry.cancelled)
    if not chosen:
        return prepared
    identity = replace(plan.job, id=ids[chosen])
    return replace(prepared, plan=prepared.launcher.plan(plan.spec, plan.target, identity, prepared.context))


class DevMachine:
    """The machine from its client's side."""

    def __init__(self, job: JobHandle, prepared: PreparedLaunch) -> None:
        """Take the machine over: an earlier client of it learns that at its next beat."""
        self.job, self.files = job, job.files
        self.tree = 0
        """Number of the newest tree that was sent."""
        self._folder = f"{job_folder(job.id)}/{FOLDER}"
        self._command = list(prepared.plan.order["runs"]["0"]["command"])
        self._beats, self._due = 0, 0.0
        self._log = RunLog(self.files, job.id, 0, read_limit(self.files, job.id))
        self._attempt = 1
        self._client = self._take_over()
        self.beat()
        self._sent: tuple[str | None, list[str] | None] = job.entry().snapshot, self._command
        """Content id and command of that tree."""
        if not job.new:
            self._recall()

    def _clients(self) -> list[int]:
        names = self.files.names(self._folder, f"{CLIENT}.")
        return [int(number) for name in names if (number := name.partition(".")[2]).isdecimal()]

    def _take_over(self) -> int:
        """Return the number of this client, higher than that of any before."""
        number = max(self._clients(), default=0) + 1
        while not self.files.create(f"{self._folder}/{CLIENT}.{number}", b""):
            number += 1
        return number

    def _recall(self) -> None:
        self.tree = max(self._numbers(), default=0)
        if self.tree:
            name = f"{self._folder}/{self.tree}.json"
            known = ledger.read_objects(self.files, [name]).get(name, {})
            self._sent = f"sha256:{known.get('sha256')}", known.get("command")
        else:
            order = f"{job_folder(self.job.id)}/order.json"
            first = ledger.read_objects(self.files, [order]).get(order, {})
            self._sent = self._sent[0], first.get("runs", {}).get("0", {}).get("command")
        self._attempt = max(self.job.attempts(0), default=1)
        if self._find_end(self._attempt):
            self._attempt += 1

    def _numbers(self) -> list[int]:
        found = (re.fullmatch(r"([1-9][0-9]*)\.json", name) for name in self.files.names(self._folder))
        return [int(each[1]) for each in found if each]

    def _find_end(self, attempt: int) -> str | None:
        """The file with the end of an attempt, None while it runs."""
        folder = self._attempt_folder(attempt)
        names = (name for name in self.files.names(folder, "end.") if name.count(".") == 2)
        return next((f"{folder}/{name}" for name in names), None)

    def _attempt_folder(self, attempt: int) -> str:
        return f"{job_folder(self.job.id)}/runs/0/a{attempt:04d}"

    def send(self, snapshot: Snapshot, *, anyway: bool = False) -> bool:
        """Send a tree, unless the machine has it already; `anyway` runs the same tree again. Returns whether it was sent."""
        wanted = snapshot.id, self._command
        if wanted == self._sent and not anyway:
            return False
        number = self.tree + 1
        self.files.write(f"{self._folder}/{number}.tar", snapshot.archive)
        about = {"sha256": snapshot.id.removeprefix("sha256:"), "command": self._command}
        if not self.files.create(f"{self._folder}/{number}.json", json.dumps(about).encode()):
            raise MachineTakenOver(self.job)
        self.tree, self._sent = number, wanted
        for ending in ("json", "tar"):
            # The machine may be unpacking the last one.
            self.files.remove(f"{self._folder}/{number - 2}.{ending}")
        return True

    def beat(self) -> None:
        """Move the counter on if it is due. Raises `MachineTakenOver` if a later client goes on with the machine."""
        if system.monotonic() < self._due:
            return
        if max(self._clients(), default=0) > self._client:
            raise MachineTakenOver(self.job)
        self._beats += 1
        self.files.write(f"{self._folder}/{BEAT}", f"{self._client} {self._beats}".encode())
        self._due = system.monotonic() + BEAT_S

    def read(self, write: Callable[[RunLog, int, int], None], began: Callable[[str], None]) -> list[CommandEnd]:
        """Pass the log of each attempt that may have news, with numbers of attempt and tree, to `write`, and its host to
        `began`; returns the ends since the last call."""
        ends = []
        for number in self.job.attempts(0):
            if number < self._attempt:
                continue
            began_as, ended = f"{self._attempt_folder(number)}/start.json", self._find_end(number)
            notes = ledger.read_objects(self.files, [began_as, ended] if ended else [began_as])
            start, end = notes.get(began_as, {}), notes.get(ended or "", {})
            tree = int(start.get("tree", 0))
            began(str(start.get("host", "")))
            write(self._log, number, tree)
            if ended is None:
                continue
            self._attempt = number + 1
            ends.append(
                CommandEnd(
                    attempt=number,
                    reason=str(end.get("reason")),
                    exit_code=int(end.get("code", 1)),
                    lasted_s=max(0.0, end.get("at", 0.0) - start.get("at", 0.0)),
                    message=str(end.get("message", "")),
                    tree=tree,
                )
            )
        return ends

    def give_back(self) -> list[str]:
        """Tell the machine that it is not needed any more. One that has not begun is cancelled; returns what that left."""
        self.files.write(f"{self._folder}/{OVER}", b"")
        if self.job.state() is JobState.PENDING:
            return self.job.cancel()
        return []


class MachineTakenOver(NotPossible):
    """Another client goes on with the machine."""

    def __init__(self, job: JobHandle) -> None:
        super().__init__(
            f"another `runtime dev` of this folder goes on with the machine of job `{job.id}`",
            hint=f"runtime logs -f {job.id[:10]}",
        )


class Folder:
    """The folder whose states run on the machine."""

    def __init__(self, prepared: PreparedLaunch) -> None:
        spec, settings = prepared.plan.spec, prepared.context.settings
        self._path: Path = prepared.context.base / spec.code.path
        self._rules: SnapshotRules = code_rules(spec, settings, prepared.target)
        self._due, self._looks = 0.0, 0
        self._seen: object = None
        self._taken: object = None

    def look(self) -> Snapshot | None:
        """Return a snapshot if the folder changed since the last one, and has stood still since the last look.

        It is looked at once a second. Raises `NotPossible` if no snapshot can be taken; the next look tries again.
        """
        if system.monotonic() < self._due:
            return None
        self._due = system.monotonic() + LOOK_S
        seen = [
            (name, status.st_mode, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
            for name, status in survey(self._path, self._rules)
        ]
        still, self._seen = seen == self._seen, seen
        self._looks = 0 if still else self._looks + 1
        if seen == self._taken or not (still or self._looks >= LOOKS):
            return None
        self._looks = 0
        snapshot = make_snapshot(self._path, self._rules)
        self._taken = seen
        return snapshot
