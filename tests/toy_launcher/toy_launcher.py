"""A launcher as another package would write it: a batch system that is a folder, with a unique name for each job.

The first start of a job creates `spool/NAME`, which holds the pid, and when and for whom it began. research-runtime imports
nothing from here.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime
from typing import ClassVar, Final

from runtime.end_reasons import EndReason, Explanation
from runtime.errors import NotPossible, UnknownName
from runtime.jobs.array import expand_array
from runtime.jobs.hosts.base import Host
from runtime.jobs.hosts.local import LocalFiles, LocalHost
from runtime.jobs.plan import (
    Fidelity,
    FieldSupport,
    JobIdentity,
    LaunchPlan,
    NativePart,
    NativeState,
    OwnedResource,
    PlanContext,
    Target,
    check_record_folder,
)
from runtime.jobs.price import Price
from runtime.jobs.run_config import make_order
from runtime.jobs.spec import JobSpec, JobState
from runtime.jobs.spec_fields import leaf_fields, set_fields

# mkdir succeeds once: a second start under the same name ends here.
START: Final = (
    'mkdir "$0" 2>/dev/null || exit 0; echo "$(date +%s) $1" > "$0/about"; shift; '
    'echo $$ > "$0/pid.part"; mv "$0/pid.part" "$0/pid"; exec "$@"'
)
# A number may be another process by now.
END: Final = (
    'for name; do pid=$(cat "$name/pid" 2>/dev/null) && ps -ww -o args= -p "$pid" | grep -q "/jobs/$name " && '
    'kill "$pid"; done; true'
)
LOOK: Final = (
    'for name; do [ -d "$name" ] || continue; pid=$(cat "$name/pid" 2>/dev/null); '
    'if [ -z "$pid" ] || ps -o stat= -p "$pid" | grep -qv Z; then echo "$name running"; else echo "$name gone"; fi; done'
)
KEPT: Final = (
    "command", "call", "name", "shell", "env", "secrets", "grace_period", "time_limit", "retry.failure", "retry.preemption",
    "retry.on_exit", "retry.backoff.min", "retry.backoff.max", "array.count", "array.params", "array.items", "array.offset",
    "code.mode", "code.path", "code.exclude", "code.secrets", "code.max_size", "code.writable", "placement.on",
    "idempotency_key",
)  # fmt: skip


class ToyLauncher:
    kind: ClassVar[str] = "toy"
    keeps: ClassVar[Mapping[str, FieldSupport]] = {
        **dict.fromkeys(leaf_fields(), FieldSupport(fidelity=Fidelity.REFUSED, how="the toy has none")),
        **dict.fromkeys(KEPT, FieldSupport(fidelity=Fidelity.SHIM, how="the shim")),
    }

    resumes: ClassVar[bool] = False
    keeps_ended: ClassVar[bool] = False

    def check_settings(self, target: Target) -> None:
        for name in target.settings:
            if name not in ("python", "notices"):
                raise UnknownName("setting", name, ["python", "notices"], where=f"for target `{target.name}`")
        if target.records is None:
            raise NotPossible(f"target `{target.name}` names no records", hint='records = "/some/folder"')
        check_record_folder(target)

    def open_host(self, target: Target, context: PlanContext) -> Host:
        return LocalHost(str(target.records))

    def plan(self, spec: JobSpec, target: Target, job: JobIdentity, context: PlanContext) -> LaunchPlan:
        indices = expand_array(spec.array)
        offset = spec.array.offset if spec.array else 0
        root = LocalFiles(str(target.records)).root
        words = [
            str(target.settings.get("python", "python3")),
            f"{root}/jobs/{job.id}/shim.py",
            f"{root}/jobs/{job.id}",
        ]
        words += ["--native", job.id]
        words += ["--indices", f"{offset}-{offset + len(indices) - 1}"] if spec.array else []
        # As on machines of a cloud that may take them away.
        heeds = {"notices": {"clouds": ["gce"]}} if target.settings.get("notices") else {}
        return LaunchPlan(
            job=job,
            spec=spec,
            target=target,
            order=make_order(spec, job, indices, context, retries="shim", environ=context.environ, **heeds),
            artefacts={"command": shlex.join(words) + "\n"},
            parts=(
                NativePart(name=job.id, artefact="command", offset=offset, count=len(indices), native={"words": words}),
            ),
            fidelity={name: self.keeps[name] for name in set_fields(spec) if name in self.keeps},
            indices=tuple(indices),
            root=root,
        )

    def submit(self, plan: LaunchPlan, part: NativePart, host: Host) -> str:
        folder = f"{plan.root}/{plan.folder}"
        host.files.make_folder("spool")
        host.spawn(
            ["sh", "-c", START, f"{plan.root}/spool/{part.name}", plan.job.owner, *part.native["words"]],
            folder=folder,
            log=f"{folder}/shim.log",
        )
        # Until the name exists, `states` would leave the job out, which means that it is gone.
        until = time.monotonic() + 240
        while part.name not in host.files.names("spool", part.name):
            if time.monotonic() > until:
                raise NotPossible(f"job `{part.name}` did not start")
            time.sleep(0.01)
        return part.name

    def find(self, target: Target, names: Sequence[str], host: Host) -> dict[str, str]:
        there = set(host.files.names("spool"))
        return {name: name for name in names if name in there}

    def states(self, target: Target, native_ids: Sequence[str], host: Host) -> list[NativeState]:
        said = host.run(["sh", "-c", f"cd {shlex.quote(host.files.root)}/spool && {LOOK}", "look", *native_ids]).out
        return [self._state(*line.split(" ")) for line in said.splitlines()]

    def _state(self, name: str, raw: str) -> NativeState:
        if raw == "running":
            return NativeState(native_id=name, index=None, state=JobState.RUNNING, raw=raw)
        return NativeState(native_id=name, index=None, state=JobState.FAILED, reason=EndReason.LOST, raw=raw)

    def cancel(self, target: Target, native_ids: Sequence[str], indices: Sequence[int] | None, host: Host) -> list[str]:
        if indices is not None:
            return []
        wait = f"i=0; while [ $i -lt 600 ] && ({LOOK}) | grep -q running; do sleep 0.1; i=$((i+1)); done; {LOOK}"
        said = host.run(
            ["sh", "-c", f"cd {shlex.quote(host.files.root)}/spool && {wait}", "wait", *native_ids], timeout_s=90
        )
        return [f"{line.split(' ')[0]} still runs" for line in said.out.splitlines() if line.endswith("running")]

    def owned(
        self, target: Target, host: Host, *, owner: str | None = None, job: str | None = None
    ) -> list[OwnedResource]:
        read = host.files.read_many(
            [f"spool/{name}/about" for name in host.files.names("spool") if job in (None, name)]
        )
        about = {path.split("/")[1]: text.decode().strip().partition(" ") for path, text in read.items()}
        mine = {name: since for name, (since, _, whose) in about.items() if since and owner in (None, whose)}
        states = self.states(target, sorted(mine), host) if mine else []
        return [
            OwnedResource(
                job=each.native_id,
                native_id=each.native_id,
                what="process",
                live=not each.state.terminal,
                since=datetime.fromtimestamp(int(mine[each.native_id]), UTC),
            )
            for each in states
        ]

    def remove(self, target: Target, owned: Sequence[OwnedResource], host: Host) -> list[str]:
        names = sorted({each.job for each in owned})
        host.run(["sh", "-c", f"cd {shlex.quote(host.files.root)}/spool && {END}", "end", *names])
        left = self.cancel(target, names, None, host)
        for name in names if not left else ():
            host.files.remove(f"spool/{name}")
        return left

    def price(self, plan: LaunchPlan) -> Price | None:
        return Price(
            what=f"{len(plan.indices)} × toy",
            hourly=0.25 * len(plan.indices),
            time_limit=plan.spec.time_limit,
            listed_on=date(2026, 1, 2),
        )

    def explain(self, target: Target, native: NativeState, host: Host) -> Explanation | None:
        return None
