"""The environments of tasks: the interpreter and the packages that they were submitted with, made once on each machine.

A task whose packages cannot be installed has failed. What this machine cannot make for a reason of its own (no such Python, a
full disk, no network) is left to other workers.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from runtime.shim.common import SetupFailed
from runtime.shim.environment import CannotMake, GivenUp, find_environment
from runtime.shim.tree_walk import remove_folder
from runtime.snapshots.environment import Packages, fetch_packages
from runtime.worker.prerequisites import MakingFailed, Prerequisites
from runtime.worker.worker_context import HeldLease


@dataclass(slots=True, frozen=True)
class MadeEnvironment:
    """An environment that was found or made; `said` is the managers' output, if they ran."""

    home: str
    said: str


class Environments(Prerequisites[str, str]):
    """The environments by content id; the prerequisite is their folder."""

    fresh_s = 86_400.0
    """Time after which the use of an environment is noted again: one that nobody uses is removed."""
    kind = "its environment cannot be made on this machine: "

    def enter(self, held: HeldLease) -> None:
        """Pass the task on, once the environment that it names is here; a task that names none runs in the worker's own."""
        identity = held.lease.task.environment
        if identity is None:
            self._then(held)
        else:
            self.take(held, identity)

    def make(self, key: str, gives_up: Callable[[], bool]) -> None:
        def fetched(packages: Packages | None, problem: Exception | None) -> None:
            if packages is None:
                self.answer(key, None, problem)
            else:
                self.calls.call(partial(make_environment, packages, self.services.scratch, gives_up), was_made)

        def was_made(made: MadeEnvironment | None, problem: Exception | None) -> None:
            if made is None:
                self.answer(key, None, problem)
            else:
                self.answer(key, made.home, None, made.said)

        self.services.offload.call(lambda: fetch_packages(key, self.services.records), fetched)

    def give(self, held: HeldLease, made: str) -> None:
        held.environment = made

    def is_there(self, made: str) -> bool:
        return Path(made, "bin", "python").exists()

    def name(self, key: str) -> str:
        return f"environment {key[:19]}"

    def is_given_up(self, problem: Exception | None) -> bool:
        return isinstance(problem, GivenUp)

    def is_of_the_machine(self, problem: Exception | None) -> bool:
        return isinstance(problem, CannotMake | OSError)


def make_environment(packages: Packages, scratch: str, gives_up: Callable[[], bool]) -> MadeEnvironment:
    """Find or make the environment on this machine, where all workers of this user share it. Raises `MakingFailed`.

    The lock file lies in a folder of its own meanwhile, where managers find no settings and modules of anybody else.
    """
    said: list[str] = []
    folder = tempfile.mkdtemp(prefix="environment-", dir=scratch)
    try:
        for name, text in packages.files.items():
            Path(folder, name).write_text(text, encoding="utf-8")
        home: str = find_environment(packages.order(), "", folder, True, gives_up, said.append)
    except SetupFailed as problem:
        raise MakingFailed(problem, "".join(said)) from None
    finally:
        remove_folder(folder)
    return MadeEnvironment(home, "".join(said))


def entered(home: str, identity: str) -> dict[str, str]:
    """Return the variables of an attempt in an environment."""
    return {
        "RUNTIME_ENVIRONMENT_ID": identity,
        "VIRTUAL_ENV": home,
        "RUNTIME_PYTHON": f"{home}/bin/python",
        "PATH": os.pathsep.join((f"{home}/bin", os.environ.get("PATH", os.defpath))),
        "PYTHONHOME": "",
    }
