"""The front door: the few names that users import. Each is loaded when it is first used."""

from __future__ import annotations

TYPE_CHECKING = False  # A worker's guardian, and so each of its children, does without `typing`.
if TYPE_CHECKING:
    from typing import Any

    from runtime.context import current_attempt
    from runtime.errors import RuntimeFailure
    from runtime.jobs import JobSpec
    from runtime.launching import JobHandle, launch
    from runtime.stacks import open_stack
    from runtime.submission import submit, wait
    from runtime.worker import WorkerOptions, run_worker
    from runtime.workflows import workflow

__version__ = "0.1.0"

__all__ = [
    "JobHandle",
    "JobSpec",
    "RuntimeFailure",
    "WorkerOptions",
    "current_attempt",
    "launch",
    "open_stack",
    "run_worker",
    "submit",
    "wait",
    "workflow",
]

_HOMES = {
    "JobHandle": "runtime.launching",
    "JobSpec": "runtime.jobs",
    "RuntimeFailure": "runtime.errors",
    "WorkerOptions": "runtime.worker",
    "current_attempt": "runtime.context",
    "launch": "runtime.launching",
    "open_stack": "runtime.stacks",
    "run_worker": "runtime.worker",
    "submit": "runtime.submission",
    "wait": "runtime.submission",
    "workflow": "runtime.workflows",
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
