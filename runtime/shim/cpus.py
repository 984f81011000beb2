"""CPUs of this machine that a run is kept to, so that runs of several shims do not share them."""

import math
import os
import random
import re
import time

from runtime.shim.common import LOOK_S, SetupFailed, say
from runtime.shim.files import read_system
from runtime.shim.gpus import GpuShare

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List, Set

TRIES = 20
"""How often to choose again if another shim claimed the same CPUs at the same moment."""


class CpuShare(GpuShare):
    """CPUs that are ours until `drop`, by a claim as for GPUs. Nothing waits for CPUs: those of others are taken last."""

    kind = "cpus"
    called = "CPUs"
    folder = "/tmp/research-runtime-cpus"

    def choose(self, cores, idle):
        """Claim CPUs and return them. `cores` and `idle` are a CPU's core, and how idle it was."""
        share = min(1.0, self.count)
        allowed = [int(each) for each in self.devices]
        chosen: List[int] = []
        crowded: Set[int] = set()
        for _ in range(TRIES):
            taken = self._taken(share)
            chosen = choose_cpus(self.count, allowed, taken, cores, idle)
            crowded = taken.intersection(chosen)
            self.claim[self.kind] = {str(each): share for each in chosen}
            self._write()
            if not self._taken(share).intersection(chosen) - crowded:
                break
            self.drop()
            time.sleep(LOOK_S * random.random())
        else:
            crowded = set(chosen)
            self._write()
        if crowded:
            say("%d of its %d CPUs are others' too: this machine has not enough for all" % (len(crowded), len(chosen)))
        return chosen

    def _taken(self, share):
        return {int(each) for each, used in self._used().items() if each.isdecimal() and used + share > 1.0 + 1e-6}


def choose_cpus(count, allowed, taken, cores, idle):
    """The CPUs for a run that asks for `count`, of those that this process may use.

    Whole cores come first, so that runs do not share one. A rest comes from a core that is shared already, then the idlest
    of what is free, then CPUs that are taken.
    """
    wanted = math.ceil(count)
    groups: Dict[Any, List[int]] = {}
    for cpu in allowed:
        groups.setdefault(cores.get(cpu, cpu), []).append(cpu)

    def idleness(cpus):
        return -sum(idle.get(cpu, 0) for cpu in cpus), min(cpus)

    whole = sorted((cpus for cpus in groups.values() if not taken.intersection(cpus)), key=idleness)
    parts = [cpu for cpus in groups.values() if taken.intersection(cpus) for cpu in cpus if cpu not in taken]
    chosen: List[int] = []
    rest: List[int] = []
    for cpus in whole:
        (chosen if len(chosen) + len(cpus) <= wanted else rest).extend(cpus)
    last = sorted(taken.intersection(allowed), key=lambda cpu: idleness([cpu]))
    chosen += sorted(parts, key=lambda cpu: idleness([cpu])) + rest + last
    return sorted(chosen[:wanted])


def keep_to_share(limits):
    """Keep this process and its children to as many CPUs as the order says; returns the claim of them, None if there is none."""
    wanted, allowed = limits["cpus"], allowed_cpus()
    if math.ceil(wanted) >= len(allowed):
        if wanted > len(allowed):
            say("%g CPUs are asked for and %d are there, so it is kept to none of them" % (wanted, len(allowed)))
        return None
    if not hasattr(os, "sched_setaffinity"):
        say("this system keeps no process to a CPU")
        return None
    before = _idle_time()
    time.sleep(LOOK_S / 2)
    after = _idle_time()
    idle = {cpu: after[cpu] - before[cpu] for cpu in after if cpu in before}
    cores = find_cores(allowed)
    try:
        share = CpuShare({"count": wanted, "locks": limits.get("claims")}, [str(cpu) for cpu in allowed])
        chosen = share.choose(cores, idle)
    except SetupFailed as problem:
        say("%s; it is kept to the idlest CPUs" % problem)
        share, chosen = None, choose_cpus(wanted, allowed, set(), cores, idle)
    keep_to(chosen)
    return share


def find_cores(cpus):
    """CPU → a name of its core. A CPU alone is a core, if the system does not say."""
    path = "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list"
    return {cpu: read_system(path % cpu).strip() or cpu for cpu in cpus}


def keep_to(cpus):
    try:
        os.sched_setaffinity(0, cpus)
    except (AttributeError, OSError):
        pass


def allowed_cpus():
    """The CPUs that this process may use, by its affinity and its cgroup."""
    try:
        return sorted(os.sched_getaffinity(0))
    except AttributeError:
        return list(range(os.cpu_count() or 1))


def _idle_time():
    lines = [line.split() for line in read_system("/proc/stat").splitlines() if re.match("cpu[0-9]", line)]
    return {int(words[0][3:]): int(words[4]) for words in lines}
