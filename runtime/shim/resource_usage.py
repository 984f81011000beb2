"""How much memory and disk an attempt takes, and what the kernel killed for memory."""

import os
import re
import tempfile
import time

from runtime.shim.common import BEGAN
from runtime.shim.files import list_names, read_system

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Set


CGROUP = "/sys/fs/cgroup"


def held_memory(leaders, limit):
    """Memory that the sessions of `leaders` hold, in bytes; 0 on a system without /proc.

    Resident sizes count a shared page once for each process, so the costlier proportional sizes are read only if their
    sum is over the limit.
    """
    pids = [int(name) for name in list_names("/proc") if name.isdecimal()]
    mine = [pid for pid in pids if _session(pid) in leaders]
    total = sum(_resident(pid) for pid in mine)
    if total <= limit or len(mine) == 1:
        return total
    return sum(_proportional(pid) for pid in mine)


def memory_share():
    """The part of this container's memory that cannot be given back; None if it is not known.

    Only version 2 of cgroups is read: if it kills, it kills all processes of a container, and this one with them.
    """
    lines = read_system(CGROUP + "/memory.stat").splitlines()
    held = [int(line.split()[1]) for line in lines if line.startswith(("anon ", "shmem "))]
    try:
        return sum(held) / int(read_system(CGROUP + "/memory.max"))
    except (ValueError, ZeroDivisionError):
        return None


def _session(pid):
    try:
        return os.getsid(pid)
    except OSError:
        return None


def _resident(pid):
    words = read_system("/proc/%d/statm" % pid).split()
    return int(words[1]) * os.sysconf("SC_PAGE_SIZE") if words else 0


def _proportional(pid):
    text = read_system("/proc/%d/smaps_rollup" % pid)
    sizes = [int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:")]
    return sum(sizes) if text else _resident(pid)


def ran_out_of_memory():
    """Whether the kernel killed a process of our cgroup for memory."""
    return _oom_kills() > _before


def _oom_kills():
    places = []
    for line in read_system("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            places.append("/sys/fs/cgroup" + path + "/memory.events")
        elif "memory" in controllers.split(","):
            places += ["/sys/fs/cgroup/memory" + each + "/memory.oom_control" for each in (path, "")]
    entries = [entry for place in places for entry in read_system(place).splitlines()]
    return max([0] + [int(entry.split()[1]) for entry in entries if entry.startswith("oom_kill ")])


_before = _oom_kills()


def forget_oom_kills() -> None:
    """Have `ran_out_of_memory` count from now on."""
    global _before
    _before = _oom_kills()


DISK_S = 5.0
"""How often the container's own disk is looked at, and more rarely if a look takes long."""
OWN_DISK = "/"


def disk_limit():
    """How many bytes this container may write to its own disk; None if it has no limit of its own."""
    asked, limit = (os.environ.get(name, "") for name in ("RUNTIME_DISK_REQUEST", "RUNTIME_DISK_LIMIT"))
    # For a container without a limit, Kubernetes names all that the node has as its limit, and no request.
    return int(limit) if limit.isdecimal() and asked.isdecimal() and int(asked) else None


class DiskUse(object):
    """Bytes that this container has written to its own disk, counted a little at a time.

    It counts files newer than this process in its file system, without mounts, and all of `folders`. A folder whose names
    are as old as its image is listed, but its files are not looked at, so an append to a file of the image stays unseen.
    """

    def __init__(self, limit, folders):
        self.limit = limit
        self.folders = [os.path.realpath(each) for each in folders]
        self.used = 0
        self.look, self.due = None, time.monotonic() + DISK_S

    def is_over(self, seconds, now=False):
        """Look for up to `seconds`; with `now`, begin a new look at once."""
        if not self.limit:
            return False
        if now:
            self.look = None
        elif self.look is None and time.monotonic() < self.due:
            return False
        if self.look is None:
            self.used, self.began = 0, time.monotonic()
            self.look = self._look()
        until = time.monotonic() + seconds
        for _ in self.look:
            if self.used > self.limit:
                return True
            if time.monotonic() >= until:
                return False
        self.look, self.due = None, time.monotonic() + max(DISK_S, 2 * (time.monotonic() - self.began))
        return self.used > self.limit

    def _look(self):
        """Add up sizes, and yield now and then."""
        mounted = mount_points()
        # Most new files lie there, so it comes first.
        often = os.path.realpath(tempfile.gettempdir())
        first = self.folders + ([] if any((often + "/").startswith(each + "/") for each in mounted) else [often])
        left = [OWN_DISK] + [each for each in first[::-1] if each != OWN_DISK]
        elsewhere = mounted | set(first)
        seen: Set[Any] = set()
        while left:
            folder = left.pop()
            try:
                # ctime, since unpacking an archive sets mtime back.
                fresh = os.lstat(folder).st_ctime >= BEGAN
            except OSError:
                continue  # it went meanwhile
            for place, entry in enumerate(scan(folder)):
                try:
                    if entry.is_dir(follow_symlinks=False):
                        left += [] if entry.path in elsewhere else [entry.path]
                    elif fresh:
                        self._add(entry.stat(follow_symlinks=False), seen)
                except OSError:
                    continue
                if place % 100 == 99:
                    yield
            yield

    def _add(self, status, seen):
        """Count a file of several names once."""
        who = (status.st_dev, status.st_ino)
        if status.st_ctime >= BEGAN and who not in seen:
            self.used += status.st_blocks * 512
            if status.st_nlink > 1:
                seen.add(who)


def scan(folder):
    """Yield the entries of a folder that can be read."""
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                yield entry
    except OSError:
        return


def mount_points():
    """Folders and files of this container that are mounted from other file systems."""
    text = read_system("/proc/self/mountinfo", errors="surrogateescape")
    found = {line.split()[4] for line in text.split("\n") if line} - {"/"}
    return {re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal.group(1), 8)), each) for each in found}
