"""Our jobs as the process list of a machine shows them, without any ledger: shims by their command lines, processes
that killed shims left by their variables, if the system shows these, and containers by their labels."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from runtime.jobs.hosts.base import Host
from runtime.jobs.plan import OwnedResource
from runtime.system import system

GRACE_S: Final = 70.0
"""How long shims may take to end their commands, whose grace nobody can read without the ledger; then all is killed."""
KILLED_S: Final = 10.0
LOOK_S: Final = 0.1
LOOK_MOST_S: Final = 2.0
_NOTE: Final = "RUNTIME_PREEMPTED_NOTE"
"""A variable of every command of ours: a file in its job's folder."""
# First this shell and the user, then all processes, then the variables of those that are open to us, then containers: of this
# user if there is a further word, else of all. An engine may hang.
_LIST: Final = (
    'echo "$$ $(id -u)"; ps -ww -A -o pid=,ppid=,uid=,stat=,etime=,args=; echo; '
    f'grep -aHzsF -e "{_NOTE}=$0/jobs/" /proc/[0-9]*/environ | tr "\\0" "\\n"; '
    "soon=; command -v timeout >/dev/null && soon='timeout 15'; "
    "for engine in podman docker; do command -v $engine >/dev/null || continue; "
    '$soon $engine ps --all --filter "label=research-runtime.root=$0" '
    "${1:+--filter label=research-runtime.user=$(id -u)} --format '{{.Names}}' 2>/dev/null | while read -r name; do "
    'echo "container $engine $name $($soon $engine inspect --format "{{.Created}}" "$name" 2>/dev/null)"; done; done'
)
_CONTAINER: Final = re.compile(
    r"container (podman|docker) (rt-([0-9a-f]{24})-\S+) (\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)\S*(?: ([+-]\d{4}))?"
)


@dataclass(frozen=True, slots=True)
class _Process:
    pid: int
    parent: int
    uid: int
    state: str
    age: timedelta
    line: str


def is_shim(line: str) -> bool:
    """Whether this command line is that of a shim."""
    return "shim.py" in line and "--native" in line


@dataclass(frozen=True, slots=True)
class _Container:
    """A container that no living shim looks after."""

    engine: str
    name: str
    job: str
    since: datetime


@dataclass(frozen=True, slots=True)
class _Found:
    process: _Process
    job: str
    native: str
    """The shim's native id; empty for a process that a killed shim left."""


def list_owned(host: Host, *, everybody: bool, job: str | None) -> list[OwnedResource]:
    """Each shim that serves a job of this record root, and each process or container that a killed one left; of all users, or
    of ours."""
    now = system.now()
    owned: dict[str, OwnedResource] = {}
    found, containers = _look(host, everybody=everybody)
    for each in found:
        # Copies of a shim have its native id; the oldest is the one that was launched.
        name = each.native or f"pid {each.process.pid}"
        since = now - each.process.age
        if job in (None, each.job) and (name not in owned or since < owned[name].since):
            owned[name] = OwnedResource(
                job=each.job, native_id=name, what="shim" if each.native else "process", live=True, since=since
            )
    for one in containers:
        if job in (None, one.job):
            owned[one.name] = OwnedResource(
                job=one.job, native_id=one.name, what="container", live=True, since=one.since
            )
    return list(owned.values())


def remove_owned(host: Host, owned: Sequence[OwnedResource]) -> list[str]:
    """End all processes of these jobs, shims with their grace; returns a description of anything left."""
    jobs = {each.job for each in owned}
    kill_at = system.monotonic() + GRACE_S
    asked: set[int] = set()
    pause = LOOK_S
    while True:
        processes, containers = _look(host, everybody=True)
        found = [each for each in processes if each.job in jobs]
        boxes = [each for each in containers if each.job in jobs]
        if not found and not boxes:
            return []
        now = system.monotonic()
        shims = {each.process.pid: each.process for each in found if each.native}
        if now >= kill_at + KILLED_S:
            return [
                f"process {each.process.pid} of job `{each.job}` still runs on `{host.name}`: {each.process.line[:80]}"
                for each in found
            ] + [f"container {each.name} of job `{each.job}` is still on `{host.name}`" for each in boxes]
        for box in boxes:
            host.run([box.engine, "rm", "--force", box.name])
        _signal(host, "CONT", [pid for pid, each in shims.items() if each.state.startswith("T")])
        tops = [pid for pid, each in shims.items() if each.parent not in shims and pid not in asked]
        _signal(host, "TERM", tops)
        asked.update(tops)
        _signal(host, "KILL", [each.process.pid for each in found if now >= kill_at or not each.native])
        system.sleep(pause)
        pause = min(LOOK_MOST_S, pause * 1.5)


def _signal(host: Host, name: str, pids: Sequence[int]) -> None:
    if pids:
        host.run(["sh", "-c", 'kill -s "$0" "$@" 2>/dev/null || true', name, *map(str, pids)])


def _look(host: Host, *, everybody: bool) -> tuple[list[_Found], list[_Container]]:
    root = host.files.root
    own, listed = host.run(["sh", "-c", _LIST, root, *([] if everybody else ["own"])]).out.split("\n", 1)
    lines, _, marks = listed.partition("\n\n")
    here, uid = map(int, own.split())
    processes = {each.pid: each for each in _read_processes(lines) if not each.state.startswith("Z")}
    found = list(_find(processes, root, _read_marks(marks, root), set(_line_of(here, processes))))
    served = {each.job for each in found if each.native}
    containers = [each for each in _read_containers(marks) if each.job not in served]
    return [each for each in found if everybody or each.process.uid == uid], containers


def _find(processes: Mapping[int, _Process], root: str, marks: Mapping[int, str], spared: set[int]) -> Iterator[_Found]:
    """Yield shims of this root, and marked processes that no shim looks after: neither its own nor that of another job,
    which a command of the first launched."""
    shim = re.compile(rf"\s{re.escape(root)}/jobs/(j-[0-9a-f]+) --native (\S+)")
    for pid, each in processes.items():
        match = shim.search(each.line) if is_shim(each.line) else None
        if match is not None:
            yield _Found(each, match[1], match[2])
        elif pid in marks.keys() - spared and not any(is_shim(processes[one].line) for one in _line_of(pid, processes)):
            yield _Found(each, marks[pid], "")


def _line_of(pid: int, processes: Mapping[int, _Process]) -> Iterator[int]:
    """Yield a process and those that it descends from."""
    seen: set[int] = set()
    while pid in processes and pid not in seen:
        seen.add(pid)
        yield pid
        pid = processes[pid].parent


def _read_processes(lines: str) -> Iterator[_Process]:
    for line in lines.splitlines():
        words = line.split(None, 5)
        if len(words) == 6 and words[0].isdecimal() and words[1].isdecimal() and words[2].isdecimal():
            pid, parent, uid = map(int, words[:3])
            yield _Process(pid, parent, uid, words[3], read_age(words[4]), words[5])


def _read_marks(lines: str, root: str) -> dict[int, str]:
    """Process → the job of this root whose command it is, or descends from."""
    mark = re.compile(rf"/proc/(\d+)/environ:{_NOTE}={re.escape(root)}/jobs/(j-[0-9a-f]+)/")
    return {int(match[1]): match[2] for line in lines.splitlines() if (match := mark.match(line))}


def _read_containers(lines: str) -> Iterator[_Container]:
    for line in lines.splitlines():
        if match := _CONTAINER.match(line):
            engine, name, job, day, clock, zone = match.groups()
            since = datetime.strptime(f"{day} {clock} {zone or '+0000'}", "%Y-%m-%d %H:%M:%S %z")
            yield _Container(engine, name, f"j-{job}", since)


def read_age(text: str) -> timedelta:
    """The age in the words of `ps`, `[[DAYS-]HOURS:]MINUTES:SECONDS`; none for other words."""
    match = re.fullmatch(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+)", text)
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups()) if match else (0, 0, 0, 0)
    return timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
