"""Memory that processes hold, and what the kernel killed for it."""

import io
import os

from runtime.shim.files import list_names

CGROUP = "/sys/fs/cgroup"


def held_memory(leaders, limit):
    """Memory that the sessions of `leaders` hold, in bytes; 0 if the system does not say.

    Resident sizes count a shared page once for each process, so where their sum is over the limit, and only there, the
    costlier proportional sizes are read.
    """
    pids = [int(name) for name in list_names("/proc") if name.isdigit()]
    mine = [pid for pid in pids if _session(pid) in leaders]
    total = sum(_resident(pid) for pid in mine)
    if total <= limit or len(mine) == 1:
        return total
    return sum(_proportional(pid) for pid in mine)


def memory_share():
    """Which part of this container's memory holds what cannot be given back; None where nothing says so.

    Only version 2 of cgroups is read: where it kills, it kills all processes of a container, and this one with them.
    """
    try:
        with io.open(CGROUP + "/memory.max") as opened:
            limit = int(opened.read())
        with io.open(CGROUP + "/memory.stat") as opened:
            held = [int(line.split()[1]) for line in opened if line.startswith(("anon ", "shmem "))]
        return sum(held) / limit
    except (IOError, OSError, ValueError, ZeroDivisionError):
        return None


def _session(pid):
    try:
        return os.getsid(pid)
    except OSError:
        return None


def _resident(pid):
    try:
        with io.open("/proc/%d/statm" % pid) as opened:
            return int(opened.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (IOError, OSError, IndexError):
        return 0


def _proportional(pid):
    try:
        with io.open("/proc/%d/smaps_rollup" % pid) as opened:
            return sum(int(line.split()[1]) * 1024 for line in opened if line.startswith("Pss:"))
    except (IOError, OSError):
        return _resident(pid)


def ran_out_of_memory():
    """Whether the kernel killed something of our cgroup for memory."""
    return _oom_kills() > _before


def _oom_kills():
    count = 0
    try:
        with io.open("/proc/self/cgroup") as opened:
            lines = opened.read().splitlines()
    except (IOError, OSError):
        return 0
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            places = ["/sys/fs/cgroup" + path + "/memory.events"]
        elif "memory" in controllers.split(","):
            places = [
                "/sys/fs/cgroup/memory" + path + "/memory.oom_control",
                "/sys/fs/cgroup/memory/memory.oom_control",
            ]
        else:
            continue
        for place in places:
            try:
                with io.open(place) as opened:
                    for entry in opened.read().splitlines():
                        if entry.startswith("oom_kill "):
                            count = max(count, int(entry.split()[1]))
            except (IOError, OSError):
                continue
    return count


_before = _oom_kills()


def forget_oom_kills() -> None:
    """Have `ran_out_of_memory` count from now on."""
    global _before
    _before = _oom_kills()
