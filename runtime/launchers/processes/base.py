"""The common part of launchers that start plain processes: `local` on this machine, `ssh` on others.

A native id is `TOKEN@BOOT.SPACE`: the token is on the shim's command line, so one listing of processes shows which jobs live,
the boot id tells a reboot from a death, and the number of the namespace whether its processes can be seen from here.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, TypeVar

from runtime.end_reasons import EndReason, Explanation
from runtime.errors import InfrastructureFailure, InvalidValue, NotPossible
from runtime.jobs.array import read_indices
from runtime.jobs.hosts.base import Host, HostUnavailable
from runtime.jobs.ledger import job_folder, read_object, read_objects
from runtime.jobs.plan import (
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
from runtime.jobs.run_config import activation_lines, environment_order, make_order
from runtime.jobs.secret_schemes import COMMON_SCHEMES, SecretScheme
from runtime.jobs.spec import BuildOn, CodeMode, JobSpec, JobState
from runtime.jobs.spec_fields import set_fields
from runtime.launchers.field_support import ALARM, COMMON, NO_TPU, by_client, by_shim, fields_of, native, refused
from runtime.launchers.job_status import ELSEWHERE, REBOOTED
from runtime.launchers.processes.containers import container_order, show_container
from runtime.launchers.processes.discovery import is_shim, list_owned, remove_owned
from runtime.launchers.settings import read_target_settings
from runtime.shim.containers import ENGINES
from runtime.shim.files import CONTAINERS
from runtime.system import system


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    pid: int
    parent: int
    state: str
    """The state in `ps`, such as `S` or `T+`."""
    line: str

    @property
    def is_stopped(self) -> bool:
        return self.state.startswith("T")

    @property
    def is_shim(self) -> bool:
        return is_shim(self.line)


def list_processes(host: Host) -> list[ProcessInfo]:
    found = []
    for line in host.run(["ps", "-ww", "-A", "-o", "pid=,ppid=,stat=,args="]).out.splitlines():
        words = line.split(None, 3)
        if len(words) == 4 and words[0].isdecimal() and words[1].isdecimal():
            found.append(ProcessInfo(int(words[0]), int(words[1]), words[2], words[3]))
    return found


def list_shims(native_ids: Sequence[str], host: Host) -> list[ProcessInfo]:
    """The shims of these native jobs, with the copies that each made of itself."""
    return [each for each in list_processes(host) if each.is_shim and any(one in each.line for one in native_ids)]


def _tops(shims: Sequence[ProcessInfo]) -> list[ProcessInfo]:
    """The shims that no other of them started."""
    pids = {each.pid for each in shims}
    return [each for each in shims if each.parent not in pids]


def _served(job: str, shims: Sequence[ProcessInfo], index: int | None, host: Host) -> dict[int, int]:
    """Process id of a shim → its index, for one index or all, by the newest attempts: the copies that a shim makes of
    itself have the same command line."""
    folder = f"jobs/{job}/runs"
    newest: dict[str, int] = {}
    for run in [str(index)] if index is not None else host.files.names(folder):
        names = host.files.names(f"{folder}/{run}")
        attempts = [name for name in names if name[0] == "a" and name[1:].isdecimal()]
        if attempts and "result" not in names:
            newest[f"{folder}/{run}/{attempts[-1]}/start.json"] = int(run)
    pids = {each.pid for each in shims}
    found = {start.get("pid"): newest[name] for name, start in read_objects(host.files, newest).items()}
    return {pid: served for pid, served in found.items() if pid in pids}


def _choose(
    top: ProcessInfo, runs: Sequence[ProcessInfo], index: int | None, served: Mapping[int, int]
) -> list[ProcessInfo]:
    if "--indices" not in top.line:
        return [top]
    if index is None:
        return list(runs)
    chosen = [each for each in runs if served.get(each.pid) == index]
    if not chosen:
        raise NotPossible(f"run {index} does not run now", hint="`runtime status` shows which do")
    return chosen


def _below(roots: Iterable[ProcessInfo], processes: Sequence[ProcessInfo]) -> list[ProcessInfo]:
    """The descendants of `roots`, nearest first."""
    found: list[ProcessInfo] = []
    parents = {each.pid for each in roots}
    while parents:
        children = [each for each in processes if each.parent in parents]
        found += children
        parents = {each.pid for each in children}
    return found


def _marked(job: str, index: int | None, processes: Sequence[ProcessInfo], host: Host) -> list[ProcessInfo]:
    """Processes outside the tree that have the job's variables, if the system shows them."""
    wanted = [f"RUNTIME_JOB_ID={job}"] + ([f"RUNTIME_ARRAY_INDEX={index}"] if index is not None else [])
    pids: set[int] | None = None
    for text in wanted:
        said = host.run(["sh", "-c", 'grep -lzs -x -F -e "$0" /proc/[0-9]*/environ || true', text]).out
        found = {int(path.split("/")[2]) for path in said.split()}
        pids = found if pids is None else pids & found
    return [each for each in processes if each.pid in (pids or ())]


def _record_memory(job: str, chosen: Sequence[ProcessInfo], served: Mapping[int, int], host: Host) -> None:
    """Leave the file by which the shim takes a killed command for one that was killed for memory."""
    for shim in chosen:
        if shim.pid in served:
            run = f"jobs/{job}/runs/{served[shim.pid]}"
            host.files.write(f"{run}/{host.files.names(run, 'a')[-1]}/oom", b"")


def job_of(line: str) -> str:
    """The job that a shim's command line names. Raises `NotPossible` if it names none."""
    found = re.search("j-[0-9a-f]{24}", line)
    if found is None:
        raise NotPossible("the shim's command line names no job", hint="look at it with `ps`")
    return found[0]


def signal_processes(host: Host, name: str, processes: Sequence[ProcessInfo]) -> None:
    """Signal the processes that still exist."""
    if processes:
        pids = list(dict.fromkeys(str(each.pid) for each in processes))
        host.run(["sh", "-c", 'kill -s "$0" "$@" 2>/dev/null || true', name, *pids])


MOST_RANKS: Final = 256
"""Ranks of a run on one machine: the shim starts all at once, with two open files for each."""
START_S: Final = 30.0
"""How long a shim may take to claim its job."""
APPEAR_S: Final = 5.0
"""A shim that is in no listing of processes after this time has ended."""
LOOK_S: Final = 0.1
LOOK_MOST_S: Final = 2.0
"""Pause between two looks at shims that must end: the first, and the longest, since each lists all processes."""
GRACE_S: Final = 60.0
"""Grace of a shim whose order cannot be read."""
WAKE_S: Final = 10.0
"""How long beyond its grace a stopped shim may take to end."""

_BOOT: Final = "cat /proc/sys/kernel/random/boot_id 2>/dev/null || sysctl -n kern.bootsessionuuid"
_SPACE: Final = "readlink /proc/self/ns/pid 2>/dev/null || echo"
_LIST: Final = f"({_BOOT}) | head -n 1; {_SPACE}; ps -ww -A -o args= | grep -F -e '--native' || true"
# Reads the environments in /proc that are open to us; grep itself has the variables of a job that it runs in.
_BEARING: Final = 'grep -ahzsxF "$@" /proc/[0-9]*/environ | tr "\\0" "\\n" | sort -u; '
# A docker's processes show no variables to others than root.
_NOTING: Final = (
    f'for mark in "$@"; do for note in "$0/jobs/${{mark#RUNTIME_JOB_ID=}}"/runs/*/a*/{CONTAINERS}; do '
    '[ ! -e "$note" ] || echo "$mark"; done; done'
)

_NO_LIMIT: Final = refused("nothing on a plain machine holds a process to it")
_NO_SCHEDULER: Final = refused("there is no scheduler: what is launched runs at once")

PROCESS_KEEPS: Final[Mapping[str, FieldSupport]] = {
    **COMMON,
    "command": native("a process"),
    "name": native("the ledger"),
    "image": native("a container of podman or docker for each rank"),
    "mounts": native("bind mounts of the container; without `image` a path is where it is"),
    "resources.cpus": by_shim(
        "as a limit: a run is kept to so many CPUs of the machine, which other runs take last; none are set aside"
    ),
    "resources.memory": by_shim(
        "as a limit: a run that holds more is ended, and none is set aside; in a container it is the engine's, for each rank"
    ),
    "resources.tpu.type": NO_TPU,
    "resources.tpu.slices": NO_TPU,
    "resources.disk": _NO_LIMIT,
    "resources.shared_memory": native("the machine's own /dev/shm"),
    "resources.gpus.count": by_shim("locks of the machine's GPUs that all its users share"),
    "resources.gpus.type": _NO_LIMIT,
    "gang.start_timeout": native("all ranks are started at once"),
    **dict.fromkeys(fields_of("placement"), _NO_SCHEDULER),
    "placement.on": COMMON["placement.on"],
    "priority": _NO_SCHEDULER,
    "account": _NO_SCHEDULER,
    "start_deadline": native("it starts at once"),
    "retry.capacity.window": _NO_SCHEDULER,
    "after": refused("there is no scheduler that could wait"),
}


def plan_processes(
    spec: JobSpec,
    target: Target,
    job: JobIdentity,
    context: PlanContext,
    *,
    settings: ProcessSettings,
    python: str,
    keeps: Mapping[str, FieldSupport],
    root: str,
    slots: int = 0,
) -> LaunchPlan:
    """Plan a job that is one shim process; an array shares out `slots` at a time, or the machine's CPUs if 0.

    `python` runs the shim if the settings name none.
    """
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
        wanted = spec.array.pack or spec.array.max_parallel or settings.slots or slots
        backend["pack"] = {
            "slots": min(wanted, spec.array.max_parallel or wanted, len(indices)) if wanted else 0,
            "per": spec.array.pack_per.value,
        }
    if spec.resources.gpus:
        backend["gpus"] = {"count": spec.resources.gpus.count}
        if (devices := _read_gpus(settings.gpus, target)) is not None:
            backend["gpus"]["devices"] = devices
    limits: dict[str, float] = {}
    if spec.resources.cpus:
        limits["cpus"] = spec.resources.cpus
    if spec.resources.memory and spec.resources.memory.high:
        limits["memory_bytes"] = spec.resources.memory.high
    if limits:
        backend["limits"] = limits
    if made := environment_order(spec, BuildOn.NODE):
        backend["environment"] = made
    contained = container_order(spec, settings.container)
    if contained:
        backend["container"] = contained
    if setup := [*settings.setup, *([] if contained else activation_lines(spec))]:
        backend["setup"] = setup
    live = str((context.base / spec.code.path).resolve()) if spec.code.mode is CodeMode.NONE else None
    # The job's own lines run inside of a container, the target's outside.
    outside = replace(spec, environment=replace(spec.environment, setup=())) if contained else spec
    order = make_order(
        outside, job, indices, context, retries="shim", environ=context.environ, live_tree=live, **backend
    )
    python = settings.python or python
    words = [python, f"{root}/jobs/{job.id}/shim.py", f"{root}/jobs/{job.id}", "--native", "TOKEN"]
    words += ["--indices", f"{offset}-{offset + len(indices) - 1}"] if spec.array else []
    if settings.scratch:
        words += ["--scratch", settings.scratch]
    return LaunchPlan(
        job=job,
        spec=spec,
        target=replace(target, settings={"python": python, **target.settings}),
        order=order,
        artefacts={
            "command": shlex.join(words) + "\n",
            **({"container": show_container(order, job.id, root)} if contained else {}),
        },
        parts=(
            NativePart(name=job.id, artefact="command", offset=offset, count=len(indices), native={"words": words}),
        ),
        fidelity={name: keeps[name] for name in set_fields(spec) if name in keeps},
        indices=tuple(indices),
        root=root,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSettings:
    """The settings of a target whose jobs are processes of one machine."""

    python: str | None = None
    setup: tuple[str, ...] = ()
    slots: int | None = None
    """How many runs of an array go at a time."""
    scratch: str | None = None
    container: str | None = None
    """`podman` or `docker`; without it the first that the machine has."""
    gpus: Any = None
    """The number of the machine's GPUs, or their names; without it the shim asks `nvidia-smi`."""


EXPECTED: Final = {
    "setup": "lines of shell",
    "host": "a host as `ssh` knows it, such as me@gpu1",
    "options": 'words for ssh, such as ["-p", "2222"]',
}

P = TypeVar("P", bound=ProcessSettings)


def read_process_settings(kind: type[P], target: Target) -> P:
    """Raises `UnknownName` or `InvalidValue` for a setting, or a record root, that cannot be used."""
    found = read_target_settings(kind, target, EXPECTED, where=f"for target `{target.name}`")
    check_record_folder(target)
    _read_gpus(found.gpus, target)
    if found.container not in (None, *ENGINES):
        raise InvalidValue(f"targets.{target.name}.container", found.container, " or ".join(ENGINES))
    return found


def _read_gpus(given: Any, target: Target) -> list[str] | None:
    if given is None:
        return None
    if type(given) is int and given >= 0:
        return [str(number) for number in range(given)]
    if isinstance(given, list | tuple) and all(isinstance(each, str | int) for each in given):
        return [str(each) for each in given]
    raise InvalidValue(f"targets.{target.name}.gpus", given, 'how many there are, or their names, such as ["0", "2"]')


class ProcessLauncher:
    """The calls that are the same on this machine and on a machine behind ssh."""

    secret_schemes: ClassVar[Mapping[str, SecretScheme]] = COMMON_SCHEMES
    resumes: ClassVar[bool] = True
    keeps_ended: ClassVar[bool] = False
    interrupts: ClassVar[Mapping[str, FieldSupport]] = {
        "preempt": by_client("TERM to the shim, which this command then starts anew"),
        "timeout": ALARM,
        "node-loss": native("KILL to the shim and everything below it at once"),
        "oom": by_shim("KILL to the command, and a note that memory was the reason"),
    }

    def find(self, target: Target, names: Sequence[str], host: Host) -> dict[str, str]:
        # A process has no name to look up; the shim's claim of the job decides which process counts.
        return {}

    def states(self, target: Target, native_ids: Sequence[str], host: Host) -> list[NativeState]:
        """The state of each shim. A shim that is gone is lost, or its machine was restarted."""
        boot, lines = _look(host)
        return [_state_of(native, boot, "\n".join(lines), host) for native in native_ids]

    def cancel(self, target: Target, native_ids: Sequence[str], indices: Sequence[int] | None, host: Host) -> list[str]:
        if indices is None:
            return end_processes(native_ids, host)
        wake_processes(native_ids, host)  # shims see the marks of single runs themselves
        return []

    def stop(self, target: Target, native_ids: Sequence[str], host: Host) -> None:
        signal_processes(host, "TERM", _tops(list_shims(native_ids, host)))

    def clear(self, target: Target, folder: str, host: Host) -> list[str]:
        command = host.files.read(f"{folder}/artefacts/command")
        if command is None:
            return []
        place = f"{host.files.root}/{folder}"
        # This version's shim: the job's own is removed when the job ends, and may be of an earlier version.
        from runtime.shim.bundle import build_shim

        done = host.run([shlex.split(command.decode())[0], "-", place, "--clear"], stdin=build_shim())
        said = done.err.strip().splitlines()[-1:]
        return [] if done.code == 0 else [f"what its shim started on `{host.name}`: {''.join(said)}"]

    def read_machine(self, target: Target, host: Host) -> str:
        return host.run(["uname", "-n"]).out.strip()

    def find_leftovers(self, target: Target, jobs: Sequence[str], host: Host) -> list[str]:
        marks = [word for job in jobs for word in ("-e", f"RUNTIME_JOB_ID={job}")]
        said = host.run(["sh", "-c", _BEARING + _NOTING, host.files.root, *marks]).out.splitlines()
        return [job for job in jobs if f"RUNTIME_JOB_ID={job}" in said]

    def owned(
        self, target: Target, host: Host, *, owner: str | None = None, job: str | None = None
    ) -> list[OwnedResource]:
        """Shims and what killed ones left. A machine knows processes by account, so those of an owner are this account's."""
        return list_owned(host, everybody=owner is None, job=job)

    def remove(self, target: Target, owned: Sequence[OwnedResource], host: Host) -> list[str]:
        return remove_owned(host, owned)

    def explain(self, target: Target, native: NativeState, host: Host) -> Explanation | None:
        return None

    def interrupt(self, target: Target, native_id: str, index: int | None, how: str, host: Host) -> None:
        """Raises `NotPossible` if nothing of the job runs."""
        processes = list_processes(host)
        shims = [each for each in processes if each.is_shim and native_id in each.line]
        if not shims:
            raise NotPossible(
                f"nothing of `{native_id}` runs on `{host.name}`", hint="`runtime status` shows what does"
            )
        # The shim that the launcher started; the others serve single runs.
        top = _tops(shims)[0]
        runs = [each for each in shims if each.pid != top.pid]
        job = job_of(top.line)
        served = _served(job, [top, *runs], index, host)
        chosen = _choose(top, runs, index, served)
        if how == "preempt":
            signal_processes(host, "TERM", chosen if index is not None else [top])
        elif how == "timeout":
            signal_processes(host, "ALRM", chosen)
        elif how == "node-loss":
            # The shim first: it would take its command's death for the end of the attempt.
            roots = chosen if index is not None else [top]
            signal_processes(host, "KILL", [*roots, *_below(roots, processes), *_marked(job, index, processes, host)])
        elif how == "oom":
            _record_memory(job, chosen, served, host)
            signal_processes(host, "KILL", [each for each in _below(chosen, processes) if not each.is_shim])
        else:
            raise NotPossible(f"`{how}` cannot be provoked here", hint=f"one of {', '.join(self.interrupts)}")


def _state_of(native: str, boot: str, listed: str, host: Host) -> NativeState:
    if native in listed:
        return NativeState(native_id=native, index=None, state=JobState.RUNNING, raw="running", where=host.name)
    its_boot, _, its_space = native.partition("@")[2].partition(".")
    our_boot, _, our_space = boot.partition(".")
    raw, message, reason = "gone", f"its process on `{host.name}` is gone", EndReason.LOST
    if its_boot != our_boot:
        raw, message, reason = REBOOTED, f"`{host.name}` was started anew", EndReason.NODE_FAILED
    elif its_space and our_space and its_space != our_space:
        raw, message = (
            ELSEWHERE,
            f"its process began in another container of `{host.name}`, and cannot be seen from here",
        )
    return NativeState(
        native_id=native,
        index=None,
        state=JobState.FAILED,
        reason=reason,
        raw=raw,
        message=message,
        where=host.name,
    )


class ShimNotStarted(NotPossible):
    """No shim runs that could take the job."""

    reason: ClassVar[EndReason] = EndReason.SETUP_FAILED


def spawn_shim(plan: LaunchPlan, part: NativePart, host: Host, *, before: Sequence[str] = ()) -> str:
    """Start the shim behind the words `before`; returns the native id of the shim that serves the job, which may be an
    earlier one."""
    # The plan was made without the machine, so its root may begin with `~`.
    folder = f"{host.files.root}/{plan.folder}"
    words = [word.replace(f"{plan.root}/{plan.folder}", folder) for word in part.native["words"]]
    if plan.order.get("environment", {}).get("build_on") == BuildOn.SUBMIT:
        _build_environment(plan, words, host)
    boot, running = _look(host)
    if (serving := _find_shim(folder, running)) is not None:
        return serving
    native = f"{system.urandom(8).hex()}@{boot}"
    host.spawn(
        [*before, *(native if word == "TOKEN" else word for word in words)], folder=folder, log=f"{folder}/shim.log"
    )
    started = system.monotonic()
    while system.monotonic() - started < START_S:
        owner = host.files.read(f"{plan.folder}/owners/{plan.order['epoch']}.0")
        if owner is not None:
            return owner.decode()
        if system.monotonic() - started > APPEAR_S and native not in " ".join(_look(host)[1]):
            raise ShimNotStarted(
                f"the shim of job `{plan.job.id}` did not start on `{host.name}`",
                facts=_last_words(plan, host),
                hint=f"set `python` of target `{plan.target.name}`; `runtime targets check {plan.target.name}` tries it",
            )
        system.sleep(0.02)
    # It may still claim the job: no other target is to be tried.
    raise HostUnavailable(
        f"the shim of job `{plan.job.id}` runs on `{host.name}` and took no job within {START_S:g} s",
        facts=_last_words(plan, host),
        hint="run the same `runtime launch` again: there is one job, whoever comes first",
    )


def _find_shim(folder: str, lines: Sequence[str]) -> str | None:
    """Native id of a shim that serves the job in this run folder, whose claim may be lost."""
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


def wake_processes(native_ids: Sequence[str], host: Host) -> list[ProcessInfo]:
    """Wake stopped shims of these native jobs, so that they find our cancel mark; returns all their shims."""
    shims = list_shims(native_ids, host)
    signal_processes(host, "CONT", [each for each in shims if each.is_stopped])
    return shims


def end_processes(native_ids: Sequence[str], host: Host, *, patience_s: float = 150) -> list[str]:
    """Wait for shims to find our cancel mark; returns the shims that are left after `patience_s`, in words.

    Each look wakes stopped shims. If something stops them again for longer than their grace, they are killed, and `clear`
    ends their commands.
    """
    until, pause = system.monotonic() + patience_s, LOOK_S
    kill_at: float | None = None
    while shims := wake_processes(native_ids, host):
        now = system.monotonic()
        if kill_at is not None and now >= kill_at:
            signal_processes(host, "KILL", shims)
        elif kill_at is None and (stopped := [each for each in shims if each.is_stopped]):
            kill_at = now + _read_grace_s(stopped[0], host) + WAKE_S
            until = max(until, kill_at + WAKE_S)
        if now >= until:
            left = {native: [each.pid for each in shims if native in each.line] for native in native_ids}
            return [
                f"the shim {native} on `{host.name}` still runs; run the same `runtime cancel` again, "
                f"and if that does not help, `kill -9 {' '.join(map(str, pids))}` there"
                for native, pids in left.items()
                if pids
            ]
        system.sleep(pause)
        pause = min(LOOK_MOST_S, pause * 1.2)
    return []


def _read_grace_s(shim: ProcessInfo, host: Host) -> float:
    try:
        grace_s = read_object(host.files, f"{job_folder(job_of(shim.line))}/order.json").get("grace_s")
    except InfrastructureFailure:
        grace_s = None
    return float(grace_s) if isinstance(grace_s, int | float) else GRACE_S


def _look(host: Host) -> tuple[str, list[str]]:
    """The machine's boot and the namespace of processes, and the command lines of all shims in it."""
    answer = host.run(["sh", "-c", _LIST])
    boot, space, *lines = answer.out.splitlines() + [""] * 2
    number = "".join(filter(str.isdecimal, space))
    return boot.strip()[:8] + (f".{int(number):x}" if number else ""), lines
