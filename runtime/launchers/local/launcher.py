"""Jobs as processes of this machine: a detached shim each, with n nodes as n process groups."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import ClassVar, Final

from runtime.errors import UnknownName
from runtime.jobs.hosts.base import Host
from runtime.jobs.hosts.local import LocalFiles, LocalHost
from runtime.jobs.plan import FieldSupport, JobIdentity, LaunchPlan, NativePart, NativeState, PlanContext, Target
from runtime.jobs.spec import JobSpec
from runtime.launchers.processes.base import (
    PROCESS_KEEPS,
    PROCESS_SETTINGS,
    cancel_processes,
    check_process_settings,
    clear_processes,
    find_left,
    plan_processes,
    process_states,
    spawn_shim,
)
from runtime.launchers.processes.interrupt import PROCESS_INTERRUPTS, interrupt_processes, stop_processes
from runtime.reasons import Explanation
from runtime.values import replace

SETTINGS: Final = PROCESS_SETTINGS


class LocalLauncher:
    kind: ClassVar[str] = "local"
    keeps: ClassVar[Mapping[str, FieldSupport]] = PROCESS_KEEPS
    takes_up: ClassVar[bool] = True
    interrupts: ClassVar[Mapping[str, FieldSupport]] = PROCESS_INTERRUPTS

    def check_settings(self, target: Target) -> None:
        for name in target.settings:
            if name not in SETTINGS:
                raise UnknownName("setting", name, SETTINGS, where=f"for target `{target.name}`")
        check_process_settings(target)

    def open_host(self, target: Target, context: PlanContext) -> Host:
        return LocalHost(target.records or context.records)

    def plan(self, spec: JobSpec, target: Target, job: JobIdentity, context: PlanContext) -> LaunchPlan:
        settings = {"python": sys.executable, **target.settings}
        return plan_processes(
            spec,
            replace(target, settings=settings),
            job,
            context,
            keeps=self.keeps,
            root=LocalFiles(target.records or context.records).root,
            slots=os.cpu_count() or 1,
        )

    def submit(self, plan: LaunchPlan, part: NativePart, host: Host) -> str:
        return spawn_shim(plan, part, host)

    def find(self, target: Target, names: Sequence[str], host: Host) -> dict[str, str]:
        # A process has no name that could be looked up; the shim's claim of the job says which one counts.
        return {}

    def states(self, target: Target, native_ids: Sequence[str], host: Host) -> list[NativeState]:
        return process_states(native_ids, host)

    def cancel(self, target: Target, native_ids: Sequence[str], indices: Sequence[int] | None, host: Host) -> list[str]:
        return cancel_processes(native_ids, indices, host)

    def stop(self, target: Target, native_ids: Sequence[str], host: Host) -> None:
        stop_processes(native_ids, host)

    def clear(self, target: Target, folder: str, host: Host) -> list[str]:
        return clear_processes(folder, host)

    def find_left(self, target: Target, jobs: Sequence[str], host: Host) -> list[str]:
        return find_left(jobs, host)

    def explain(self, target: Target, native: NativeState, host: Host) -> Explanation | None:
        return None

    def interrupt(self, target: Target, native_id: str, index: int | None, how: str, host: Host) -> None:
        interrupt_processes(native_id, index, how, host)
