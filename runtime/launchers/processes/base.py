"""What launchers that start plain processes share: `local` on this machine, `ssh` on others.

A native id is `TOKEN@BOOT`: the token is on the shim's command line, so one listing of processes says which jobs live,
and the boot id tells a reboot from a death.
"""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

from runtime.errors import InfrastructureFailure, InvalidValue, NotPossible
from runtime.jobs.array import read_indices
from runtime.jobs.hosts.base import Host, HostUnavailable
from runtime.jobs.ledger import job_folder
from runtime.jobs.order import activation_lines, environment_order, make_order
from runtime.jobs.plan import (
    Fidelity,
    FieldSupport,
    JobIdentity,
    LaunchPlan,
    NativePart,
    NativeState,
    PlanContext,
    Target,
    check_record_folder,
)
from runtime.jobs.spec import BuildOn, CodeMode, JobSpec, JobState
from runtime.jobs.spec_fields import leaf_fields, set_fields
from runtime.launchers.processes.interrupt import Process, job_of, list_shims, signal_processes
from runtime.reasons import EndReason

MOST_RANKS: Final = 256
"""Ranks of a run on one machine: the shim starts them at once, and holds two files open for each."""
START_S: Final = 30.0
"""How long a shim may take to claim its job."""
APPEAR_S: Final = 5.0
"""One that is in no listing of processes after so long has ended."""
LOOK_S: Final = 0.1
LOOK_MOST_S: Final = 2.0
"""Pause between two looks at shims that are to end: the first, and the longest, since each lists all processes."""
GRACE_S: Final = 60.0
"""Of a shim whose order cannot be read."""
WAKE_S: Final = 10.0
"""How long beyond its grace a shim that was stopped may take to end."""

_BOOT: Final = "cat /proc/sys/kernel/random/boot_id 2>/dev/null || sysctl -n kern.bootsessionuuid"
_LIST: Final = f"({_BOOT}) | head -n 1; ps -ww -A -o args= | grep -F -e '--native' || true"
# Whatever of /proc there is and may be read; a process that asks bears variables of its own job.
_BEARING: Final = 'grep -ahzsxF "$0" "$@" /proc/[0-9]*/environ | tr "\\0" "\\n" | sort -u'

_SHIM: Final = FieldSupport(fidelity=Fidelity.SHIM, how="the shim")
_NO_LIMIT: Final = FieldSupport(fidelity=Fidelity.REFUSED, how="nothing on a plain machine holds a process to it")
_NO_SCHEDULER: Final = FieldSupport(
    fidelity=Fidelity.REFUSED, how="there is no scheduler: what is launched runs at once"
)

PROCESS_KEEPS: Final[Mapping[str, FieldSupport]] = {
    **dict.fromkeys(leaf_fields(), _SHIM),
    "command": FieldSupport(fidelity=Fidelity.NATIVE, how="a process"),
    "name": FieldSupport(fidelity=Fidelity.NATIVE, how="the ledger"),
    "image": FieldSupport(fidelity=Fidelity.REFUSED, how="processes of this machine run without a container"),
    "mounts": FieldSupport(
        fidelity=Fidelity.REFUSED,
        how="a path of the machine is there already: name it in the command, which reads a bucket by itself",
    ),
    "resources.cpus": FieldSupport(
        fidelity=Fidelity.SHIM, how="as a limit: a run is kept to so many of the machine's CPUs, and none are set aside"
    ),
    "resources.memory": FieldSupport(
        fidelity=Fidelity.SHIM, how="as a limit: a run that holds more is ended, and none is set aside"
    ),
    "resources.disk": _NO_LIMIT,
    "resources.shared_memory": FieldSupport(fidelity=Fidelity.NATIVE, how="the machine's own /dev/shm"),
    "resources.gpus.count": FieldSupport(
        fidelity=Fidelity.SHIM, how="locks of the machine's GPUs that all its users share"
    ),
    "resources.gpus.type": _NO_LIMIT,
    "resources.tpu.type": _NO_LIMIT,
    "resources.tpu.topology": _NO_LIMIT,
    "resources.tpu.slices": _NO_LIMIT,
    "gang.start_timeout": FieldSupport(fidelity=Fidelity.NATIVE, how="all ranks are started at once"),
    "placement.on": FieldSupport(fidelity=Fidelity.NATIVE, how="the choice of the target"),
    "placement.capacity": _NO_SCHEDULER,
    "placement.nodes": _NO_SCHEDULER,
    "placement.exclude": _NO_SCHEDULER,
    "placement.selector": _NO_SCHEDULER,
    "priority": _NO_SCHEDULER,
    "account": _NO_SCHEDULER,
    "start_deadline": FieldSupport(fidelity=Fidelity.NATIVE, how="it starts at once"),
    "ttl_after_finished": FieldSupport(fidelity=Fidelity.CLIENT, how="runtime gc"),
    "retry.capacity.window": _NO_SCHEDULER,
    "outputs.upload": FieldSupport(fidelity=Fidelity.REFUSED, how="outputs stay in the record root: runtime fetch"),
    "after": FieldSupport(fidelity=Fidelity.REFUSED, how="there is no scheduler that could wait"),
    "idempotency_key": FieldSupport(fidelity=Fidelity.NATIVE, how="part of the job's id"),
}


def plan_processes(
    spec: JobSpec,
    target: Target,
    job: JobIdentity,
    context: PlanContext,
    *,
    keeps: Mapping[str, FieldSupport],
    root: str,
    slots: int | None,
) -> LaunchPlan:
    """The plan of a job that is one shim process; an array shares out `slots` at a time, the machine's CPUs if None."""
    if (ranks := spec.nodes * spec.tasks_per_node) > MOST_RANKS:
        raise NotPossible(
            f"target `{target.name}` is one machine, and {ranks} ranks are more than the {MOST_RANKS} that run on one",
            facts=[f"`nodes` is {spec.nodes}, `tasks_per_node` is {spec.tasks_per_node}"],
            hint="fewer of `--nodes` or `--tasks-per-node`, or a target of several machines; `--seeds N` runs N times in turn",
        )
    indices = read_indices(spec.array, context.base)
    offset = spec.array.offset if spec.array else 0
    backend: dict[str, Any] = {}
    if spec.array:
        wanted = spec.array.pack or spec.array.max_parallel or check_slots(target) or slots
        backend["pack"] = {
            "slots": min(wanted, spec.array.max_parallel or wanted, len(indices)) if wanted else 0,
            "per": spec.array.pack_per.value,
        }
    if spec.resources.gpus:
        backend["gpus"] = {"count": spec.resources.gpus.count}
        if (devices := read_gpus(target)) is not None:
            backend["gpus"]["devices"] = devices
    if limits := _limits(spec):
        backend["limits"] = limits
    if made := environment_order(spec, BuildOn.NODE):
        backend["environment"] = made
    setup = [*target.settings.get("setup", ()), *activation_lines(spec)]
    if setup:
        backend["setup"] = setup
    live = str((context.base / spec.code.path).resolve()) if spec.code.mode is CodeMode.NONE else None
    order = make_order(spec, job, indices, context, retries="shim", environ=context.environ, live_tree=live, **backend)
    python = str(target.settings.get("python", "python3"))
    words = [python, f"{root}/jobs/{job.id}/shim.py", f"{root}/jobs/{job.id}", "--native", "TOKEN"]
    words += ["--indices", f"{offset}-{offset + len(indices) - 1}"] if spec.array else []
    if scratch := target.settings.get("scratch"):
        words += ["--scratch", str(scratch)]
    return LaunchPlan(
        job=job,
        spec=spec,
        target=target,
        order=order,
        artefacts={"command": shlex.join(words) + "\n"},
        parts=(
            NativePart(name=job.id, artefact="command", offset=offset, count=len(indices), native={"words": words}),
        ),
        fidelity={name: keeps[name] for name in set_fields(spec) if name in keeps},
        indices=tuple(indices),
        root=root,
    )


def _limits(spec: JobSpec) -> dict[str, float]:
    """What a run may take of its machine at most, where the spec says."""
    limits: dict[str, float] = {}
    if spec.resources.cpus:
        limits["cpus"] = spec.resources.cpus
    if spec.resources.memory and spec.resources.memory.high:
        limits["memory_bytes"] = spec.resources.memory.high
    return limits


PROCESS_SETTINGS: Final = ("python", "setup", "slots", "scratch", "gpus")


def check_process_settings(target: Target) -> None:
    """Raise `InvalidValue` for a setting of a target of processes that cannot be used."""
    check_record_folder(target)
    where = f"targets.{target.name}"
    for name in ("python", "scratch"):
        value = target.settings.get(name)
        if name in target.settings and (not isinstance(value, str) or not value):
            raise InvalidValue(f"{where}.{name}", value, "text")
    setup = target.settings.get("setup", [])
    if not isinstance(setup, list | tuple) or not all(isinstance(line, str) for line in setup):
        raise InvalidValue(f"{where}.setup", setup, "lines of shell")
    check_slots(target)
    read_gpus(target)


def check_slots(target: Target) -> int | None:
    """How many runs of an array go at a time, where the target says it."""
    slots = target.settings.get("slots")
    if slots is not None and (type(slots) is not int or slots < 1):
        raise InvalidValue(f"targets.{target.name}.slots", slots, "a whole number from 1 on")
    return slots


def read_gpus(target: Target) -> list[str] | None:
    """The machine's GPUs where the target names them; the shim asks `nvidia-smi` otherwise."""
    given = target.settings.get("gpus")
    if given is None:
        return None
    if type(given) is int and given >= 0:
        return [str(number) for number in range(given)]
    if isinstance(given, list | tuple) and all(isinstance(each, str | int) for each in given):
        return [str(each) for each in given]
    raise InvalidValue(f"targets.{target.name}.gpus", given, 'how many there are, or their names, such as ["0", "2"]')


class ShimNotStarted(NotPossible):
    """Nothing runs that could take the job."""

    reason: ClassVar[EndReason] = EndReason.SETUP_FAILED


def spawn_shim(plan: LaunchPlan, part: NativePart, host: Host, *, before: Sequence[str] = ()) -> str:
    """Start the shim and return the native id of the one that serves the job: an earlier one may have been first.

    `before` are words that the shim's command line is put behind.
    """
    # The plan was made without asking the machine, so its root may begin with `~`.
    folder = f"{host.files.root}/{plan.folder}"
    words = [word.replace(f"{plan.root}/{plan.folder}", folder) for word in part.native["words"]]
    if plan.order.get("environment", {}).get("build_on") == BuildOn.SUBMIT:
        _build_environment(plan, words, host)
    boot, running = _look(host)
    if (serving := _find_shim(folder, running)) is not None:
        return serving
    native = f"{os.urandom(8).hex()}@{boot}"
    host.spawn(
        [*before, *(native if word == "TOKEN" else word for word in words)], folder=folder, log=f"{folder}/shim.log"
    )
    started = time.monotonic()
    while time.monotonic() - started < START_S:
        owner = host.files.read(f"{plan.folder}/owners/{plan.order['epoch']}.0")
        if owner is not None:
            return owner.decode()
        if time.monotonic() - started > APPEAR_S and native not in " ".join(_look(host)[1]):
            raise ShimNotStarted(
                f"the shim of job `{plan.job.id}` did not start on `{host.name}`",
                facts=_last_words(plan, host),
                hint=f"set `python` of target `{plan.target.name}`; `runtime targets check {plan.target.name}` tries it",
            )
        time.sleep(0.02)
    # It may still claim the job: no other target is to be tried.
    raise HostUnavailable(
        f"the shim of job `{plan.job.id}` runs on `{host.name}` and took no job within {START_S:g} s",
        facts=_last_words(plan, host),
        hint="run the same `runtime launch` again: there is one job, whoever comes first",
    )


def _find_shim(folder: str, lines: Sequence[str]) -> str | None:
    """Native id of a shim that serves the job in this run folder. Its claim may be gone with a folder that was lost."""
    for line in lines:
        before, given, after = line.partition(" --native ")
        if given and before.endswith(f" {folder}"):
            return after.split()[0]
    return None


def _build_environment(plan: LaunchPlan, words: Sequence[str], host: Host) -> None:
    done = host.run([words[0], words[1], words[2], "--prepare"], timeout_s=3600)
    if done.code != 0:
        raise NotPossible(
            f"the environment of job `{plan.job.id}` cannot be made on `{host.name}`",
            facts=(done.err or done.out).strip().splitlines()[-5:],
            hint="environment.build_on: node makes it where the job runs",
        )


def _last_words(plan: LaunchPlan, host: Host) -> list[str]:
    said = host.files.read(f"{plan.folder}/shim.log") or b""
    return said.decode("utf-8", "replace").strip().splitlines()[-3:]


def process_states(native_ids: Sequence[str], host: Host) -> list[NativeState]:
    """Which shims live. One that is gone is lost, or its machine was started anew."""
    boot, lines = _look(host)
    text = "\n".join(lines)
    found = []
    for native in native_ids:
        if native in text:
            found.append(
                NativeState(native_id=native, index=None, state=JobState.RUNNING, raw="running", where=host.name)
            )
            continue
        rebooted = native.partition("@")[2] != boot
        found.append(
            NativeState(
                native_id=native,
                index=None,
                state=JobState.FAILED,
                reason=EndReason.NODE_FAILED if rebooted else EndReason.LOST,
                raw="rebooted" if rebooted else "gone",
                message=f"`{host.name}` was started anew" if rebooted else f"its process on `{host.name}` is gone",
                where=host.name,
            )
        )
    return found


def cancel_processes(native_ids: Sequence[str], indices: Sequence[int] | None, host: Host) -> list[str]:
    """End the shims of these native jobs; what is left over, in words. Of single runs they see the marks themselves."""
    if indices is None:
        return end_processes(native_ids, host)
    wake_processes(native_ids, host)
    return []


def wake_processes(native_ids: Sequence[str], host: Host) -> list[Process]:
    """Let stopped shims of these native jobs go on, so that they find our cancel mark. Returns all their shims."""
    shims = list_shims(native_ids, host)
    signal_processes(host, "CONT", [each for each in shims if each.is_stopped])
    return shims


def end_processes(native_ids: Sequence[str], host: Host, *, patience_s: float = 150) -> list[str]:
    """Wait for shims that found our cancel mark; what is still there after `patience_s` is left over, in words.

    Stopped ones are woken at every look. If that took longer than a shim's grace, something stops them again and again: they
    are killed, and `clear_processes` ends what they ran.
    """
    until, pause = time.monotonic() + patience_s, LOOK_S
    kill_at: float | None = None
    while shims := wake_processes(native_ids, host):
        now = time.monotonic()
        if kill_at is not None and now >= kill_at:
            signal_processes(host, "KILL", shims)
        elif kill_at is None and (stopped := [each for each in shims if each.is_stopped]):
            kill_at = now + _read_grace_s(stopped[0], host) + WAKE_S
            until = max(until, kill_at + WAKE_S)
        if now >= until:
            left = [native for native in native_ids if any(native in each.line for each in shims)]
            return [_say_left(native, shims, host) for native in left]
        time.sleep(pause)
        pause = min(LOOK_MOST_S, pause * 1.2)
    return []


def _read_grace_s(shim: Process, host: Host) -> float:
    try:
        order = host.files.read(f"{job_folder(job_of(shim.line))}/order.json")
    except InfrastructureFailure:
        order = None
    return float(json.loads(order)["grace_s"]) if order else GRACE_S


def _say_left(native: str, shims: Sequence[Process], host: Host) -> str:
    pids = " ".join(str(each.pid) for each in shims if native in each.line)
    return (
        f"the shim {native} on `{host.name}` still runs; run the same `runtime cancel` again, "
        f"and if that does not help, `kill -9 {pids}` there"
    )


def clear_processes(folder: str, host: Host) -> list[str]:
    """Have the shim end what killed ones of the job in `folder` left running; what is left over, in words."""
    command = host.files.read(f"{folder}/artefacts/command")
    if command is None:
        return []
    place = f"{host.files.root}/{folder}"
    # Ours, for that of the job goes with its end, and may be of an earlier version.
    from runtime.shim.program import build_shim

    done = host.run([shlex.split(command.decode())[0], "-", place, "--clear"], stdin=build_shim())
    said = done.err.strip().splitlines()[-1:]
    return [] if done.code == 0 else [f"what its shim started on `{host.name}`: {''.join(said)}"]


def find_left(jobs: Sequence[str], host: Host) -> list[str]:
    """Those of the jobs whose variables a process on this host was started with."""
    marks = [word for job in jobs for word in ("-e", f"RUNTIME_JOB_ID={job}")]
    said = host.run(["sh", "-c", _BEARING, *marks]).out
    return [job for job in jobs if f"RUNTIME_JOB_ID={job}" in said.splitlines()]


def _look(host: Host) -> tuple[str, list[str]]:
    """The machine's boot id, and the command lines of all shims on it."""
    answer = host.run(["sh", "-c", _LIST])
    boot, *lines = answer.out.splitlines() or [""]
    return boot.strip()[:8], lines
