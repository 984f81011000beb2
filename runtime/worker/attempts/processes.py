"""The process table, the memory of processes, and the end of a process tree, from /proc and the cgroup's files.

The guardian and attempts load this module, so it imports next to nothing. Without /proc (macOS) the table is empty: then
only a whole process group can be signalled, and memory is unknown.
"""

# pathlib is too large for the processes that load this.
# ruff: noqa: PTH208

from __future__ import annotations

import os
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36


class ProcessRow:
    """One line of the process table."""

    __slots__ = ("pid", "ppid", "rss_bytes", "session", "state")

    def __init__(self, pid: int, ppid: int, session: int, state: str, rss_bytes: int) -> None:
        self.pid, self.ppid, self.session, self.state, self.rss_bytes = pid, ppid, session, state, rss_bytes

    @property
    def dead(self) -> bool:
        """Whether only its exit status is left."""
        return self.state in ("Z", "X")


def parse_stat(line: bytes) -> ProcessRow:
    """Parse a /proc/PID/stat line. The command's name may hold blanks and parentheses, so it ends at the last parenthesis."""
    head, _, tail = line.rpartition(b")")
    fields = tail.split()
    return ProcessRow(
        pid=int(head.partition(b" ")[0]),
        state=fields[0].decode(),
        ppid=int(fields[1]),
        session=int(fields[3]),
        rss_bytes=int(fields[21]) * PAGE_BYTES,
    )


def read_table() -> dict[int, ProcessRow]:
    """Return every visible process, by pid; empty without /proc."""
    table: dict[int, ProcessRow] = {}
    try:
        names = os.listdir("/proc")
    except OSError:
        return table
    for name in names:
        if name.isdecimal():
            line = read_file(f"/proc/{name}/stat", 1024)
            if line:
                process = parse_stat(line)
                table[process.pid] = process
    return table


def read_file(path: str, limit: int = 1 << 20) -> bytes:
    """Return the file's first bytes, or nothing if it cannot be read: processes may end meanwhile."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(fd, limit)
    except OSError:
        return b""
    finally:
        os.close(fd)


def find_process(pid: int) -> ProcessRow | None:
    """Return one entry of the table; None if the process or the table does not exist."""
    line = read_file(f"/proc/{pid}/stat", 1024)
    return parse_stat(line) if line else None


def is_stopped(pid: int) -> bool:
    """Whether the process got SIGSTOP or the like and waits for SIGCONT; False if unknown."""
    process = find_process(pid)
    return process is not None and process.state == "T"


def find_descendants(table: Mapping[int, ProcessRow], root: int) -> list[int]:
    """Return all processes below `root`, parents before their children; zombies are left out, their children are not."""
    children: dict[int, list[int]] = {}
    for process in table.values():
        children.setdefault(process.ppid, []).append(process.pid)
    found, todo = [], list(children.get(root, ()))
    while todo:
        pid = todo.pop(0)
        if not table[pid].dead:
            found.append(pid)
        todo += children.get(pid, ())
    return found


def find_session(table: Mapping[int, ProcessRow], leader: int) -> list[int]:
    """Return the live members of the session that `leader` began, the leader first."""
    members = [p.pid for p in table.values() if p.session == leader and not p.dead]
    return sorted(members, key=lambda pid: (pid != leader, pid))


def find_marked(table: Mapping[int, ProcessRow], tokens: Iterable[str]) -> list[int]:
    """Return live processes whose first environment names one of these attempts."""
    marks = [f"RUNTIME_ATTEMPT_TOKEN={token}\0".encode() for token in tokens]
    if not marks:
        return []
    found = []
    for process in table.values():
        if not process.dead:
            environ = read_file(f"/proc/{process.pid}/environ")
            if environ and any(mark in environ for mark in marks):
                found.append(process.pid)
    return found


def send_signal(pids: Iterable[int], signum: int) -> None:
    """Signal each process; processes that have ended or are not ours are passed over."""
    for pid in pids:
        try:
            os.kill(pid, signum)
        except (ProcessLookupError, PermissionError):
            pass


def end_tree(root: int, *, patience_s: float = 5.0) -> int:
    """SIGKILL all processes below this one until none is left; returns how many were ended.

    A subreaper calls this on itself: orphans fall to it and are found in the next round. Gives up after `patience_s` on
    processes that still live, such as one stuck in the kernel or of another user.
    """
    ended: set[int] = set()
    give_up, pause = time.monotonic() + patience_s, 0.001
    while True:
        table = read_table()
        found = find_descendants(table, root)
        send_signal(found, signal.SIGKILL)
        ended.update(found)
        if not reap() or time.monotonic() > give_up or (not found and not table):
            return len(ended)
        time.sleep(pause)
        pause = min(pause * 2, 0.05)


def reap() -> bool:
    """Take the exit status of every dead child; returns whether a living child is left."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if not pid:
            return True


def find_prctl() -> Callable[[int, int | bytes], int]:
    """Return the C library's prctl as `(option, value)`, which does nothing on other systems than Linux."""
    if sys.platform != "linux":
        return lambda option, value: -1
    import ctypes

    # Without argtypes, which would cost each child a tenth of a millisecond; the kernel ignores missing arguments.
    function: Callable[[int, int | bytes], int] = ctypes.CDLL(None).prctl
    return function


# memory


def own_rss_bytes() -> int:
    """Resident memory of this process; 0 if unknown."""
    fields = read_file("/proc/self/statm", 256).split()
    return int(fields[1]) * PAGE_BYTES if len(fields) > 1 else 0


def pss_bytes(pid: int, table: Mapping[int, ProcessRow]) -> int:
    """Return memory with shared pages divided among the processes that share them; if unreadable, resident memory."""
    for line in read_file(f"/proc/{pid}/smaps_rollup", 4096).splitlines():
        if line.startswith(b"Pss:"):
            return int(line.split()[1]) * 1024
    return table[pid].rss_bytes if pid in table else 0


def tree_memory_bytes(table: Mapping[int, ProcessRow], root: int, *, limit_bytes: int) -> int:
    """Return the memory of `root` and all processes below it.

    Resident sizes count a shared page once for each process, so the costlier proportional sizes are read if their sum is
    over the limit.
    """
    pids = [root, *find_descendants(table, root)]
    total = sum(table[pid].rss_bytes for pid in pids if pid in table)
    if total <= limit_bytes or len(pids) == 1:
        return total
    return sum(pss_bytes(pid, table) for pid in pids)


class OomWatch:
    """Counts the kernel's kills for memory, of this process's cgroup (v2 memory.events, v1 memory.oom_control); in the
    root cgroup, which has no counter, of the whole machine."""

    def __init__(self, path: str | None = None) -> None:
        self.path = path if path is not None else find_oom_counter()
        self._seen = 0
        self.kills()

    def kills(self) -> int:
        """Return the kills since the last call."""
        now = parse_oom_kills(read_file(self.path, 65536)) if self.path else 0
        more, self._seen = now - self._seen, now
        return max(more, 0)


def parse_oom_kills(text: bytes) -> int:
    """Return the `oom_kill` line of memory.events, memory.oom_control or vmstat; 0 without such a line."""
    for line in text.splitlines():
        name, _, value = line.partition(b" ")
        if name == b"oom_kill":
            return int(value)
    return 0


def find_oom_counter(root: str = "/sys/fs/cgroup", membership: bytes | None = None) -> str:
    """Return the path of the file with this process's `oom_kill` counter; empty if none is found."""
    if membership is None:
        membership = read_file("/proc/self/cgroup", 65536)
    candidates = []
    for line in membership.decode("utf-8", "replace").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        path = path.rstrip("/")
        if controllers == "":
            candidates += [f"{root}{path}/memory.events", f"{root}/unified{path}/memory.events"]
        elif "memory" in controllers.split(","):
            # Inside a container the path is that of the host, while the mount shows the container's own folder.
            candidates += [f"{root}/memory{path}/memory.oom_control", f"{root}/memory/memory.oom_control"]
    for candidate in [*candidates, "/proc/vmstat"]:
        if b"oom_kill " in read_file(candidate, 65536):
            return candidate
    return ""
