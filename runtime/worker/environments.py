"""The environments of tasks: the interpreter and the packages that they were submitted with, made once on each machine.

Making one takes minutes and happens on threads of its own; the leases of the tasks that wait are renewed meanwhile, and no
time limit runs. A task whose packages cannot be installed has failed. What this machine cannot make for a reason of its own
(no such Python, a full disk, no network) buries no task: the task goes back to the queue for other workers.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Final

from runtime.errors import RequestRefused
from runtime.reasons import EndReason
from runtime.shim.environment import CannotMake, GivenUp, find_environment
from runtime.shim.words import SetupFailed
from runtime.snapshots.environment import Packages, fetch_packages
from runtime.values import dataclass, field
from runtime.worker.attempts.child_handle import LOG_TAIL_BYTES
from runtime.worker.attempts.model import Ended
from runtime.worker.offload import Offload
from runtime.worker.services import HeldLease, Services

AT_ONCE: Final = 4
"""Environments that are made at a time."""
FRESH_S: Final = 86_400.0
"""Time after which the use of an environment is noted again: one that nobody uses is removed."""
CANNOT_FOR_S: Final = 60.0
"""Time after which this machine tries again to make what it could not make."""


@dataclass(slots=True, frozen=True)
class Made:
    """An environment that was found or made; `said` is the managers' output, if they ran."""

    home: str
    said: str


@dataclass(slots=True)
class _Making:
    waiting: list[HeldLease] = field(default_factory=list)


class MakingFailed(Exception):
    """The environment cannot be made, with the reason and the managers' output."""

    def __init__(self, problem: SetupFailed, said: str) -> None:
        self.problem, self.said = problem, said
        super().__init__(str(problem))


class Environments:
    def __init__(
        self,
        services: Services,
        then: Callable[[HeldLease], None],
        decline: Callable[[HeldLease, str, timedelta], None],
        conclude: Callable[[Ended], None],
    ) -> None:
        """`then` gets tasks with their environment, `decline` those for other workers, `conclude` the ends of the others."""
        self._services = services
        self._then, self._decline, self._conclude = then, decline, conclude
        self.calls = Offload(inline=False, threads=AT_ONCE)
        self._homes: dict[str, tuple[str, float]] = {}
        """By content id: the folder, and when its use was noted."""
        self._cannot: dict[str, tuple[str, float]] = {}
        """By content id: why this machine cannot make it, and until when that counts."""
        self._making: dict[str, _Making] = {}

    def enter(self, held: HeldLease) -> None:
        """Pass the task on, once the environment that it names is here; a task that names none runs in the worker's own."""
        identity = held.lease.task.environment
        if identity is None:
            self._then(held)
        elif home := self._find(identity):
            held.environment = home
            self._then(held)
        elif why := self._find_reason(identity):
            self._decline(held, why, timedelta(seconds=CANNOT_FOR_S))
        elif identity in self._making:
            self._making[identity].waiting.append(held)
        else:
            self._making[identity] = _Making([held])
            self._fetch(identity)

    def close(self) -> None:
        """Wait for the threads, which end their managers once the worker leaves."""
        self.calls.close()

    # the cache

    def _find(self, identity: str) -> str | None:
        home, noted_at = self._homes.get(identity, ("", 0.0))
        if home and time.monotonic() - noted_at < FRESH_S and Path(home, "bin", "python").exists():
            return home
        return None

    def _find_reason(self, identity: str) -> str | None:
        why, until = self._cannot.get(identity, ("", 0.0))
        return why if time.monotonic() < until else None

    # making it

    def _fetch(self, identity: str) -> None:
        services = self._services
        services.offload.call(
            lambda: fetch_packages(identity, services.records),
            lambda packages, problem: self._fetched(identity, packages, problem),
        )

    def _fetched(self, identity: str, packages: Packages | None, problem: Exception | None) -> None:
        if packages is None:
            self._fail(identity, problem, "")
            return
        gives_up = partial(self._is_unwanted, self._making[identity])
        self.calls.call(
            partial(make_environment, packages, self._services.scratch, gives_up), partial(self._was_made, identity)
        )

    def _is_unwanted(self, making: _Making) -> bool:
        """Whether no task waits for it any more. Called on the builder's thread."""
        by_token = self._services.holdings.by_token
        leaving = self._services.leaving.reason is not None
        return leaving or not any(held.lease.token in by_token for held in list(making.waiting))

    def _was_made(self, identity: str, made: Made | None, problem: Exception | None) -> None:
        if made is not None:
            self._homes[identity] = made.home, time.monotonic()
            for held in self._take_waiting(identity):
                held.environment = made.home
                if made.said:
                    self._log(held, made.said)
                else:
                    self._then(held)
            return
        told = problem.problem if isinstance(problem, MakingFailed) else problem
        if isinstance(told, GivenUp):
            # Tasks that came while it was given up still want it.
            again = self._take_waiting(identity)
            if self._services.leaving.reason is None:
                for held in again:
                    self.enter(held)
        elif isinstance(told, CannotMake | OSError):
            why = f"its environment cannot be made on this machine: {told}"
            self._cannot = {key: known for key, known in self._cannot.items() if time.monotonic() < known[1]}
            self._cannot[identity] = why, time.monotonic() + CANNOT_FOR_S
            for held in self._take_waiting(identity):
                self._decline(held, why, timedelta(seconds=CANNOT_FOR_S))
        else:
            self._fail(identity, told, problem.said if isinstance(problem, MakingFailed) else "")

    def _take_waiting(self, identity: str) -> list[HeldLease]:
        by_token = self._services.holdings.by_token
        return [held for held in self._making.pop(identity).waiting if held.lease.token in by_token]

    def _fail(self, identity: str, problem: Exception | None, said: str) -> None:
        reason = EndReason.CONFIG_INVALID if isinstance(problem, RequestRefused) else EndReason.SETUP_FAILED
        now, log = self._services.clock.now().timestamp(), said.encode(errors="replace")
        for held in self._take_waiting(identity):
            self._conclude(
                Ended(
                    held.lease.token,
                    -1,
                    reason,
                    now,
                    now,
                    message=f"environment {identity[:19]}: {problem}",
                    log=log[-LOG_TAIL_BYTES:],
                    log_bytes=len(log),
                    undrained=log,
                )
            )

    def _log(self, held: HeldLease, said: str) -> None:
        """Begin the attempt's log with the managers' output, and then pass the task on."""
        services, task, token = self._services, held.lease.task.id, held.lease.token
        data = said.encode(errors="replace")
        held.logged_bytes = len(data)

        def written(url: str | None, problem: Exception | None) -> None:
            held.log_url = url or held.log_url
            if problem is not None:
                services.say.trouble("writing a log", problem)
            if held.lease.token in services.holdings.by_token:
                self._then(held)

        services.offload.call(lambda: services.records.append_log(task, token, data), written)


def make_environment(packages: Packages, scratch: str, gives_up: Callable[[], bool]) -> Made:
    """Find or make the environment on this machine, where all workers of this user share it. Raises `MakingFailed`.

    The lock file lies in a folder of its own meanwhile, where managers find no settings and modules of anybody else.
    """
    said: list[str] = []
    folder = tempfile.mkdtemp(prefix="environment-", dir=scratch)
    try:
        for name, text in packages.files.items():
            Path(folder, name).write_text(text, encoding="utf-8")
        home: str = find_environment(packages.order(), "", folder, True, gives_up, said.append)  # type: ignore[no-untyped-call]
    except SetupFailed as problem:
        raise MakingFailed(problem, "".join(said)) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Made(home, "".join(said))


def entered(home: str, identity: str) -> dict[str, str]:
    """Return the variables of an attempt in an environment."""
    return {
        "RUNTIME_ENVIRONMENT_ID": identity,
        "VIRTUAL_ENV": home,
        "RUNTIME_PYTHON": f"{home}/bin/python",
        "PATH": os.pathsep.join((f"{home}/bin", os.environ.get("PATH", os.defpath))),
        "PYTHONHOME": "",
    }
