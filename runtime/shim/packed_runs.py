"""Runs many indices on one machine, which share its CPUs and GPUs."""

import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback

from runtime.shim.common import AGAIN, FAILED, LOOK_S, SOON_S, own_path, worst
from runtime.shim.cpus import allowed_cpus, keep_to
from runtime.shim.gpus import given_gpus
from runtime.shim.processes import ASKING, KNOWN, StopRequests, adopt_orphans, end_orphans, is_alive, kill, reap_orphans
from runtime.shim.record import FolderRecord, RunRecord
from runtime.shim.resource_usage import forget_oom_kills
from runtime.shim.run_loop import serve

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict


def pack(order, record, indices, options, asked):
    """Run `indices` on this machine's slots, each with its own CPUs and GPUs; returns an exit code."""
    cpus, limits = allowed_cpus(), order.get("limits") or {}
    wanted = order["pack"]["slots"] or min(len(cpus), len(indices))
    slots = share_out(min(wanted, room(limits, len(cpus))), order["pack"].get("per", "node"), cpus, given_gpus())
    if limits.get("cpus"):
        slots = [(mine[: math.ceil(limits["cpus"])], own) for mine, own in slots]
    waiting, codes = list(indices), []
    running: Dict[int, Any] = {}
    pause = SOON_S
    load_for_copies(order)
    while waiting or running:
        for slot in range(len(slots)):
            if slot in running and running[slot].poll() is not None:
                codes.append(running.pop(slot).returncode)
                if codes[-1] < 0:
                    end_orphans()  # it was killed, and its processes fell to us
                pause = SOON_S
            if slot not in running and waiting and not asked.stop:
                if order["pack"].get("step"):
                    running[slot] = BackendStep(order["pack"]["step"], record.folder, waiting.pop(0), options)
                else:
                    running[slot] = Branch(order, record, waiting.pop(0), slots[slot], options)
        for name in asked.take():
            for branch in running.values():
                branch.signal(name)
        if asked.stop:
            for branch in running.values():
                branch.signal(signal.SIGTERM)
            codes += [branch.wait() for branch in running.values()]
            return AGAIN
        reap_orphans()
        time.sleep(pause)
        pause = min(LOOK_S / 4, pause * 1.5)
    return worst(codes)


def load_for_copies(order):
    """Load and find out once what each copy of this process would load and find out again."""
    tempfile.gettempdir()  # Python finds it by writing to it
    if (order.get("code") or {}).get("archive"):
        import tarfile  # noqa: F401

        import runtime.shim.tree
    if order.get("call"):
        from runtime.shim.call_files import load_program

        load_program(order["call"]["python"])
    if order.get("environment"):
        import runtime.shim.environment
    if order.get("notices"):
        import urllib.request  # noqa: F401

        import runtime.shim.notices  # noqa: F401


class Branch(object):
    """A copy of this process that serves one index of a packed machine.

    It is forked, because a new Python with the shim's imports costs many times as much as the rest of a short run. This
    process has one thread and holds nothing open that a copy could disturb.
    """

    def __init__(self, order, record, index, share, options):
        self.returncode = None
        sys.stderr.flush()
        # A signal waits until the copy has its own handlers, rather than being noted in ours.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)
        try:
            self.pid = os.fork()
            if self.pid == 0:
                self._serve(order, record, index, share, options, blocked)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        KNOWN.add(self.pid)

    def poll(self):
        """The exit code, None while it runs."""
        return self._reap(os.WNOHANG)

    def wait(self):
        return self._reap(0)

    def signal(self, number):
        kill(self.pid, number)

    def _reap(self, how):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, how)
            if pid:
                KNOWN.discard(pid)
                self.returncode = os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status)
        return self.returncode

    def _serve(self, order, record, index, share, options, unblocked):
        code = FAILED
        try:
            os.setsid()
            KNOWN.clear()
            adopt_orphans()
            asked = StopRequests()
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
            random.seed()
            forget_oom_kills()
            code = serve(order, record, index, options, asked, bind(*share))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)


class BackendStep(subprocess.Popen):  # type: ignore[type-arg]
    """A shim of one index of a packed machine, started by a command of the backend that limits its CPUs and memory."""

    def __init__(self, starter, folder, index, options):
        self.run = RunRecord(FolderRecord(folder), index)
        self.before = len(self.run.attempts())
        words = list(starter) + [sys.executable, own_path(), folder, "--native", options.native]
        words += ["--index", str(index)] + (["--part", str(options.part)] if options.part is not None else [])
        words += ["--scratch", options.scratch] if options.scratch else []
        subprocess.Popen.__init__(self, words, stdin=subprocess.DEVNULL)

    def signal(self, number):
        """Signal the shim alone: the starter would pass it on to every process of the run, or end them at once."""
        for attempt, _ in self.run.attempts()[self.before :]:
            start = self.run.started(attempt)
            if start and is_alive(start):
                kill(start["pid"], number)
                return
        if number == signal.SIGTERM:
            kill(self.pid, number)  # its shim has not begun


def share_out(slots, per, cpus, gpus):
    """The CPUs and GPUs of each slot, shared out as evenly as possible."""
    count = slots * max(1, len(gpus)) if per == "gpu" else slots
    shares = []
    for slot in range(count):
        mine = [cpu for place, cpu in enumerate(cpus) if place % count == slot] or [cpus[slot % len(cpus)]]
        if per == "gpu":
            own = [gpus[slot // slots]] if gpus else []
        elif len(gpus) >= count:
            own = [gpu for place, gpu in enumerate(gpus) if place % count == slot]
        else:
            own = [gpus[slot % len(gpus)]] if gpus else []
        shares.append((mine, own))
    return shares


def room(limits, cpus):
    """How many runs with these limits fit into the machine's CPUs and memory, at least one."""
    found = [cpus / limits["cpus"]] if limits.get("cpus") else []
    if limits.get("memory_bytes"):
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / limits["memory_bytes"])
    return max(1, int(min(found))) if found else sys.maxsize


def bind(cpus, gpus):
    """Keep this run to its CPUs; returns the variables that keep it to its GPUs."""
    keep_to(cpus)
    # Both, since frameworks look at one and container runtimes at the other.
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus), "NVIDIA_VISIBLE_DEVICES": ",".join(gpus) or "void"}
