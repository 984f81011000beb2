"""Ourselves, through the commands and calls that users have: `runtime worker` on the local stack, and `runtime.submit`."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final

from benchmarks import bodies
from benchmarks.peers.base import ProcessPeer
from benchmarks.processes import environment, executable

EXPERIMENT: Final = "benchmark"
CARRIED: Final = "carried_bodies"
"""The module of the tasks that bring their code: a copy of `benchmarks.bodies` in a project of its own."""


class Ours(ProcessPeer):
    """Options: `reuse` (warm children, the default), `look_ahead`, `durability`, `lease`, `max_tasks`; `code` has tasks
    bring the code of a small project, which is what `runtime.submit` does by default."""

    _bodies: Any = bodies
    salt = ""
    """Number that keeps otherwise equal tasks apart."""
    children_run_tasks = True

    def prepare(self) -> None:
        os.environ.update(environment(self.variables()))
        project = self.place.folder / "project"
        project.mkdir(exist_ok=True)
        os.chdir(project)
        if self.options.get("code"):
            shutil.copy(str(bodies.__file__), project / f"{CARRIED}.py")
            sys.path.insert(0, str(project))
            self._bodies = importlib.import_module(CARRIED)

    @property
    def _how(self) -> dict[str, Any]:
        return {
            "experiment": EXPERIMENT,
            "queue": self.options.get("queue"),
            "snapshot": None if self.options.get("code") else False,
        }

    def put(self, body: str, index: int) -> None:
        import runtime

        runtime.submit(getattr(self._bodies, body), args=[index], key=self._key(index), **self._how)

    def put_many(self, body: str, indices: range) -> None:
        import runtime

        runtime.submit(self._lines(body, indices), **self._how)

    def _lines(self, body: str, indices: range) -> Iterator[dict[str, Any]]:
        for index in indices:
            line = {"function": f"{self._bodies.__name__}:{body}", "args": [index]}
            yield line if not self.salt else {**line, "key": self._key(index)}

    def _key(self, index: int) -> str | None:
        return f"{self.salt}{index}" if self.salt else None

    def put_alone(self, tasks: Sequence[Any]) -> None:
        """Tasks that are made already."""
        import runtime

        runtime.submit(tasks, **self._how)

    def command(self, workers: int) -> Sequence[Sequence[str]]:
        return [[executable("runtime"), "worker", *worker_options(self.options)] for _ in range(workers)]

    def variables(self) -> dict[str, str]:
        return {
            **self.place.variables,
            "RUNTIME_DATA_DIR": str(self.place.folder),
            "XDG_CONFIG_HOME": str(self.place.folder),
            "XDG_CACHE_HOME": str(self.place.folder),
        }


def worker_options(options: Any) -> list[str]:
    words = ["--slots", str(options.get("slots", 1))]
    if options.get("reuse", True):
        words.append("--reuse-process")
    for name in ("look_ahead", "durability", "lease", "max_tasks", "queue"):
        if options.get(name) is not None:
            words += [f"--{name.replace('_', '-')}", str(options[name])]
    return words


def make_task(body: str, index: int, *arguments: Any) -> Any:
    """A task as `runtime.submit` makes it, identified by its experiment and its entry."""
    from runtime.tasks.model import FunctionEntry, Task, task_id

    entry = FunctionEntry(f"benchmarks.bodies:{body}", (index, *arguments))
    return Task(id=task_id(EXPERIMENT, entry=entry), entry=entry, experiment=EXPERIMENT)


PEER = Ours
