"""Stops jobs that are plain processes, and provokes a backend's interruptions for tests and rehearsals."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from runtime.errors import NotPossible
from runtime.jobs.hosts.base import Host
from runtime.jobs.plan import FieldSupport
from runtime.launchers.support import ALARM, by_client, by_shim, native
from runtime.values import dataclass

PROCESS_INTERRUPTS: Final[Mapping[str, FieldSupport]] = {
    "preempt": by_client("TERM to the shim, which this command then starts anew"),
    "timeout": ALARM,
    "node-loss": native("KILL to the shim and everything below it at once"),
    "oom": by_shim("KILL to the command, and a note that memory was the reason"),
}


@dataclass(frozen=True, slots=True)
class Process:
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
        return "shim.py" in self.line and "--native" in self.line


def interrupt_processes(native_id: str, index: int | None, how: str, host: Host) -> None:
    """Interrupt the job that a native id stands for, or one run of it. Raises `NotPossible` if nothing of it runs."""
    processes = list_processes(host)
    shims = [each for each in processes if each.is_shim and native_id in each.line]
    if not shims:
        raise NotPossible(f"nothing of `{native_id}` runs on `{host.name}`", hint="`runtime status` shows what does")
    # The shim that the launcher started; the others serve single runs.
    top = _tops(shims)[0]
    runs = [each for each in shims if each.pid != top.pid]
    served = _served(job_of(top.line), [top, *runs], index, host)
    chosen = _choose(top, runs, index, served)
    if how == "preempt":
        signal_processes(host, "TERM", chosen if index is not None else [top])
    elif how == "timeout":
        signal_processes(host, "ALRM", chosen)
    elif how == "node-loss":
        # The shim first: it would take its command's death for the end of the attempt.
        roots = chosen if index is not None else [top]
        job = job_of(top.line)
        signal_processes(host, "KILL", [*roots, *_below(roots, processes), *_marked(job, index, processes, host)])
    elif how == "oom":
        _note_memory(job_of(top.line), chosen, served, host)
        signal_processes(host, "KILL", [each for each in _below(chosen, processes) if not each.is_shim])
    else:
        raise NotPossible(f"`{how}` cannot be provoked here", hint=f"one of {', '.join(PROCESS_INTERRUPTS)}")


def stop_processes(native_ids: Sequence[str], host: Host) -> None:
    """TERM to the shims of these native jobs; already gone is success."""
    signal_processes(host, "TERM", _tops(list_shims(native_ids, host)))


def list_processes(host: Host) -> list[Process]:
    found = []
    for line in host.run(["ps", "-ww", "-A", "-o", "pid=,ppid=,stat=,args="]).out.splitlines():
        words = line.split(None, 3)
        if len(words) == 4 and words[0].isdigit() and words[1].isdigit():
            found.append(Process(int(words[0]), int(words[1]), words[2], words[3]))
    return found


def list_shims(native_ids: Sequence[str], host: Host) -> list[Process]:
    """The shims of these native jobs, with the copies that each made of itself."""
    return [each for each in list_processes(host) if each.is_shim and any(one in each.line for one in native_ids)]


def _tops(shims: Sequence[Process]) -> list[Process]:
    """The shims that no other of them started."""
    pids = {each.pid for each in shims}
    return [each for each in shims if each.parent not in pids]


def _served(job: str, shims: Sequence[Process], index: int | None, host: Host) -> dict[int, int]:
    """Process id of a shim → its index, for one index or all, by the newest attempts: the copies that a shim makes of
    itself have the same command line."""
    folder = f"jobs/{job}/runs"
    newest: dict[str, int] = {}
    for run in [str(index)] if index is not None else host.files.names(folder):
        names = host.files.names(f"{folder}/{run}")
        attempts = [name for name in names if name[0] == "a" and name[1:].isdigit()]
        if attempts and "result" not in names:
            newest[f"{folder}/{run}/{attempts[-1]}/start.json"] = int(run)
    pids = {each.pid for each in shims}
    found = {json.loads(text)["pid"]: newest[name] for name, text in host.files.read_many(newest).items()}
    return {pid: served for pid, served in found.items() if pid in pids}


def _choose(top: Process, runs: Sequence[Process], index: int | None, served: Mapping[int, int]) -> list[Process]:
    if "--indices" not in top.line:
        return [top]
    if index is None:
        return list(runs)
    chosen = [each for each in runs if served.get(each.pid) == index]
    if not chosen:
        raise NotPossible(f"run {index} does not run now", hint="`runtime status` shows which do")
    return chosen


def _below(roots: Iterable[Process], processes: Sequence[Process]) -> list[Process]:
    """The descendants of `roots`, nearest first."""
    found: list[Process] = []
    parents = {each.pid for each in roots}
    while parents:
        children = [each for each in processes if each.parent in parents]
        found += children
        parents = {each.pid for each in children}
    return found


def _marked(job: str, index: int | None, processes: Sequence[Process], host: Host) -> list[Process]:
    """Processes outside the tree that have the job's variables, if the system shows them."""
    wanted = [f"RUNTIME_JOB_ID={job}"] + ([f"RUNTIME_ARRAY_INDEX={index}"] if index is not None else [])
    pids: set[int] | None = None
    for text in wanted:
        said = host.run(["sh", "-c", 'grep -lzs -x -F -e "$0" /proc/[0-9]*/environ || true', text]).out
        found = {int(path.split("/")[2]) for path in said.split()}
        pids = found if pids is None else pids & found
    return [each for each in processes if each.pid in (pids or ())]


def _note_memory(job: str, chosen: Sequence[Process], served: Mapping[int, int], host: Host) -> None:
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


def signal_processes(host: Host, name: str, processes: Sequence[Process]) -> None:
    """Signal the processes that still exist."""
    if processes:
        pids = list(dict.fromkeys(str(each.pid) for each in processes))
        host.run(["sh", "-c", 'kill -s "$0" "$@" 2>/dev/null || true', name, *pids])
