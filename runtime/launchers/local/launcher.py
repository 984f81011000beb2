"""Jobs as processes of this machine: a detached shim each, with n nodes as n process groups."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import ClassVar

from runtime.jobs.hosts.base import Host
from runtime.jobs.hosts.local import LocalFiles, LocalHost
from runtime.jobs.plan import FieldSupport, JobIdentity, LaunchPlan, NativePart, PlanContext, Target
from runtime.jobs.spec import JobSpec
from runtime.launchers.processes.base import (
    PROCESS_KEEPS,
    ProcessLauncher,
    ProcessSettings,
    plan_processes,
    read_process_settings,
    spawn_shim,
)


class LocalLauncher(ProcessLauncher):
    kind: ClassVar[str] = "local"
    keeps: ClassVar[Mapping[str, FieldSupport]] = PROCESS_KEEPS

    def check_settings(self, target: Target) -> None:
        read_process_settings(ProcessSettings, target)

    def open_host(self, target: Target, context: PlanContext) -> Host:
        return LocalHost(target.records or context.records)

    def plan(self, spec: JobSpec, target: Target, job: JobIdentity, context: PlanContext) -> LaunchPlan:
        return plan_processes(
            spec,
            target,
            job,
            context,
            settings=read_process_settings(ProcessSettings, target),
            python=sys.executable,
            keeps=self.keeps,
            root=LocalFiles(target.records or context.records).root,
            slots=os.cpu_count() or 1,
        )

    def submit(self, plan: LaunchPlan, part: NativePart, host: Host) -> str:
        return spawn_shim(plan, part, host)
