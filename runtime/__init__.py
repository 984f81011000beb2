"""The front door: the few names that users import. Each is loaded when it is first used."""

from __future__ import annotations

TYPE_CHECKING = False  # A worker's guardian, and so each of its children, does without `typing`.
if TYPE_CHECKING:
    from typing import Any

    from runtime.client.jobs.handle import JobHandle
    from runtime.client.jobs.launch import launch
    from runtime.client.tasks.mapping import map_tasks
    from runtime.client.tasks.submit import submit
    from runtime.client.tasks.wait import wait
    from runtime.errors import RuntimeFailure
    from runtime.experiments.run import map, run_experiment  # noqa: A004  as `concurrent.futures` names it
    from runtime.experiments.space import choice, integer, log, uniform
    from runtime.experiments.tune import tune
    from runtime.jobs.spec import JobSpec
    from runtime.stack.open import open_stack
    from runtime.tasks.workflows import workflow
    from runtime.worker.attempts.context import artifact, current_attempt
    from runtime.worker.options import WorkerOptions
    from runtime.worker.run import run_worker

__version__ = "0.1.0"

__all__ = [
    "JobHandle",
    "JobSpec",
    "RuntimeFailure",
    "WorkerOptions",
    "artifact",
    "choice",
    "current_attempt",
    "integer",
    "launch",
    "log",
    "map",
    "map_tasks",
    "open_stack",
    "run_experiment",
    "run_worker",
    "submit",
    "tune",
    "uniform",
    "wait",
    "workflow",
]

_HOMES = {
    "artifact": "runtime.worker.attempts.context",
    "JobHandle": "runtime.client.jobs.handle",
    "JobSpec": "runtime.jobs.spec",
    "RuntimeFailure": "runtime.errors",
    "WorkerOptions": "runtime.worker.options",
    "choice": "runtime.experiments.space",
    "current_attempt": "runtime.worker.attempts.context",
    "integer": "runtime.experiments.space",
    "launch": "runtime.client.jobs.launch",
    "log": "runtime.experiments.space",
    "map": "runtime.experiments.run",
    "map_tasks": "runtime.client.tasks.mapping",
    "open_stack": "runtime.stack.open",
    "run_experiment": "runtime.experiments.run",
    "run_worker": "runtime.worker.run",
    "submit": "runtime.client.tasks.submit",
    "tune": "runtime.experiments.tune",
    "uniform": "runtime.experiments.space",
    "wait": "runtime.client.tasks.wait",
    "workflow": "runtime.tasks.workflows",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'runtime' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
