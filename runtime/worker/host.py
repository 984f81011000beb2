"""The parts of a worker that touch its machine. A simulation replaces them."""

from __future__ import annotations

import os
from pathlib import Path
from selectors import BaseSelector

from runtime.config import load_project
from runtime.snapshots.worker_code import CodeIdentity
from runtime.system import system
from runtime.worker.attempts.model import ChildPoolSettings
from runtime.worker.attempts.pool import AttemptPool
from runtime.worker.attempts.scratch import ScratchRoot, clear_left_containers, open_root, remove_leftovers
from runtime.worker.slots import HostResources, read_machine


class WorkerHost:
    """Makes a worker's processes for attempts, and its folders."""

    def read_machine(self) -> HostResources:
        return read_machine(os.environ)

    def open_scratch(self, worker: str) -> ScratchRoot:
        return open_root(worker)

    def clear_left(self) -> None:
        """End what dead workers left running, and begin to remove the folders that they left."""
        clear_left_containers()
        # Their trees may be large; nothing waits for their end.
        system.thread(remove_leftovers, name="leftovers").start()

    def make_pool(self, selector: BaseSelector, slots: int, settings: ChildPoolSettings) -> AttemptPool:
        return AttemptPool(selector=selector, slots=slots, settings=settings)

    def identify_code(self) -> CodeIdentity:
        """Look for the code of tasks that bring none, in the current folder."""
        return CodeIdentity(Path.cwd(), load_project().workflow_packages)
