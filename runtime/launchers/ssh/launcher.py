"""Jobs as processes of a named machine, started through the system's `ssh`; only the shim stays there.

The default record root is `~/.local/share/research-runtime/jobs` on that machine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

from runtime.errors import InvalidValue, NotPossible
from runtime.jobs.hosts.base import Host
from runtime.jobs.hosts.ssh import SshHost
from runtime.jobs.plan import FieldSupport, JobIdentity, LaunchPlan, NativePart, PlanContext, Target
from runtime.jobs.spec import JobSpec
from runtime.launchers.processes.base import (
    EXPECTED,
    PROCESS_KEEPS,
    ProcessLauncher,
    ProcessSettings,
    plan_processes,
    read_process_settings,
    spawn_shim,
)
from runtime.units import format_size

RECORDS: Final = "~/.local/share/research-runtime/jobs"
SMALL_HOME: Final = 20 * 1024**3
"""Bytes. A home with a smaller quota takes no snapshots, logs and outputs unless the target names it."""

_LAX: Final = re.compile(
    r"(?i)StrictHostKeyChecking[\s=\"]*(no|off|accept-new)|KnownHosts(File|Command)[\s=\"]*(/dev/null|none)"
)

# The first line is logind's own setting (`b true`), the second the user's lingering (`yes`).
_LOGIND: Final = (
    "busctl get-property org.freedesktop.login1 /org/freedesktop/login1 org.freedesktop.login1.Manager "
    "KillUserProcesses 2>/dev/null || echo unknown; "
    'loginctl show-user "$(id -un)" --property=Linger --value 2>/dev/null || echo unknown'
)
# Blocks of 1 KiB: used, quota, limit of the file system of the home; empty without a quota.
_QUOTA: Final = 'quota -wpl --filesystem="$HOME" 2>/dev/null || quota -wp 2>/dev/null || true'


@dataclass(frozen=True, slots=True, kw_only=True)
class SshSettings(ProcessSettings):
    host: str | None = None
    options: tuple[str, ...] = ()
    """Words for ssh."""


class SshLauncher(ProcessLauncher):
    kind: ClassVar[str] = "ssh"
    keeps: ClassVar[Mapping[str, FieldSupport]] = PROCESS_KEEPS

    def check_settings(self, target: Target) -> None:
        _read(target)

    def open_host(self, target: Target, context: PlanContext) -> Host:
        # Unchecked, so that a wrong setting of a target hides none of its jobs.
        given = target.settings
        return SshHost(
            str(given["host"] if "host" in given else _read(target).host),
            target.records or RECORDS,
            python=str(given.get("python", "python3")),
            options=tuple(given.get("options", ())),
            control_folder=context.settings.cache_dir / "ssh",
        )

    def check_host(self, target: Target, host: Host) -> list[str]:
        """Refuse a machine that ends our processes when we leave, and a home that is too small for jobs."""
        _scope(host)
        return [] if target.records else _check_home(target, host)

    def plan(self, spec: JobSpec, target: Target, job: JobIdentity, context: PlanContext) -> LaunchPlan:
        return plan_processes(
            spec,
            target,
            job,
            context,
            settings=_read(target),
            python="python3",
            keeps=self.keeps,
            root=(target.records or RECORDS).rstrip("/"),
        )

    def submit(self, plan: LaunchPlan, part: NativePart, host: Host) -> str:
        return spawn_shim(plan, part, host, before=_scope(host))


def _read(target: Target) -> SshSettings:
    settings = read_process_settings(SshSettings, target)
    host = settings.host
    # A name that begins with a hyphen would be an option of ssh.
    if host is None or host.startswith("-") or any(char.isspace() for char in host):
        raise InvalidValue(f"targets.{target.name}.host", host, EXPECTED["host"])
    if lax := next((option for option in settings.options if _LAX.search(option)), None):
        raise NotPossible(
            f"target `{target.name}` weakens the check of host keys: `{lax}`",
            hint=f"connect once by hand and say yes to its key: ssh {host}",
        )
    return settings


def _scope(host: Host) -> list[str]:
    """The words before the shim's, so that it outlives our session. Raises `NotPossible`.

    If logind ends a session's processes with it, lingering users have a scope that stays.
    """
    kills, lingers, *_ = [*host.run(["sh", "-c", _LOGIND]).out.split("\n"), "", ""]
    if kills.strip() != "b true":
        return []
    if lingers.strip() != "yes":
        raise NotPossible(
            f"`{host.name}` ends all of a user's processes when the user leaves (KillUserProcesses of logind)",
            facts=["a job would end with the connection that started it"],
            hint=f"allow them to stay, once: ssh {host.name} loginctl enable-linger, or ask its administrator",
        )
    return ["systemd-run", "--user", "--scope", "--quiet", "--"]


def _check_home(target: Target, host: Host) -> list[str]:
    limit = read_quota(host.run(["sh", "-c", _QUOTA]).out)
    if limit is not None and limit < SMALL_HOME:
        raise NotPossible(
            f"the home on `{host.name}` has a quota of {format_size(limit)}, and jobs would be kept there",
            facts=[f"`{host.files.root}` is the default where a target names no records"],
            hint=f'name a place for them: records = "/scratch/…" of target `{target.name}`',
        )
    return []


def read_quota(said: str) -> int | None:
    """The smallest limit in bytes in the output of `quota -w`; None if there is none."""
    limits = []
    for line in said.splitlines():
        words = line.split()
        if len(words) < 4 or not words[1].rstrip("*").isdecimal():
            continue
        limits += [int(word) * 1024 for word in words[2:4] if word.isdecimal() and int(word) > 0]
    return min(limits, default=None)
