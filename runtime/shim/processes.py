"""Processes of this machine and signals to this shim: which process lives, which fell to this shim, how they are ended."""

import errno
import os
import re
import signal
import subprocess
import time

from runtime.shim.common import LOOK_S, SOON_S, say
from runtime.shim.files import list_names, read_system

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List, Optional, Set


ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)


ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StopRequests(object):
    """Requests that came by signals, and the notice that this machine will be taken away."""

    stop = checkpoint = due = False
    why = ""
    goes = False
    """Whether this machine will be taken away, so that no attempt may begin."""
    notice: "Optional[Any]" = None
    """The notice that the shim itself has read."""
    warned = False
    """Whether that notice is new to the attempt."""
    watches = False

    def __init__(self):
        for number in ENDING:
            signal.signal(number, self._stop)
        for name in ("SIGUSR1", "SIGUSR2"):
            signal.signal(getattr(signal, name), self._checkpoint)
        signal.signal(signal.SIGALRM, self._due)

    def take(self):
        """The signals for a checkpoint or for the time limit, to pass on to shims that this one started."""
        names = [signal.SIGUSR1] * self.checkpoint + [signal.SIGALRM] * self.due
        self.checkpoint = self.due = False
        return names

    def watch(self, sources):
        """Watch for a notice from now on; returns after the first look. Safe to call again."""
        if not self.watches:
            from runtime.shim.notices import watch

            self.watches = True
            watch(sources, self)

    def hear(self, notice):
        """Note a notice; called by the watch's thread."""
        self.notice = notice
        self.goes = self.warned = True

    def end(self):
        """The result of an attempt that ends since it was asked to."""
        if self.notice is not None:
            return "preempted", 143, {"message": "notice from %s: %s" % (self.notice.source, self.notice.text)}
        return "stopped", 143, {"message": "asked to stop by %s" % self.why}

    def _stop(self, number, frame):
        self.stop = True
        self.why = self.why or signal.Signals(number).name

    def _checkpoint(self, number, frame):
        self.checkpoint = True

    def _due(self, number, frame):
        """Take the time limit to be near, for rehearsals: a checkpoint's lead away."""
        self.due = True


def stops_within(seconds, asked, give_up=lambda: False):
    """Wait for `seconds`, or until we are asked to stop or `give_up()`; returns whether we were asked."""
    until = time.time() + seconds
    while time.time() < until and not asked.stop and not give_up():
        time.sleep(min(LOOK_S, max(0.0, until - time.time())))
    return asked.stop


LEFT_S = 10.0
"""How long processes that a command left are killed over and over: one stuck in the kernel ends later, or never."""
PR_SET_CHILD_SUBREAPER = 36


def boot_id() -> str:
    """The id of this boot of the machine, empty if the system has none."""
    return read_system("/proc/sys/kernel/random/boot_id").strip()


def _stat(pid):
    """State, group and start of a process; None if there is none, or the system has no /proc."""
    words = _stat_words(pid)
    return (words[0], int(words[2]), words[19]) if words else None


def _stat_words(pid):
    """The fields of /proc/PID/stat behind the process's name, none if there is no such file."""
    return read_system("/proc/%d/stat" % pid).rpartition(")")[2].split()


def started_at(pid: int) -> "Optional[str]":
    found = _stat(pid)
    return found[2] if found else None


def is_alive(who: "Dict[str, Any]") -> bool:
    """Whether the process of `{"boot", "pid", "start"}` still runs, and no other has its number now."""
    if who.get("boot") != boot_id():
        return False
    try:
        os.kill(who["pid"], 0)
    except OSError as problem:
        if problem.errno != errno.EPERM:
            return False
    found = _stat(who["pid"])
    return found is None or (found[0] != "Z" and who.get("start") in (None, found[2]))


def owner_of(pid: int) -> "Optional[int]":
    """The number of the user of a process; None if there is none, or it cannot be seen."""
    found = re.search("^Uid:\\s+([0-9]+)", read_system("/proc/%d/status" % pid), re.MULTILINE)
    return int(found.group(1)) if found else None


def is_group_alive(leader, owner=None):
    """Whether anything of the process group of `{"boot", "pid", "start"}` still runs, for this owner if one is given."""
    if leader.get("boot") != boot_id():
        return False
    found = _stat(leader["pid"])
    if found and leader.get("start") not in (None, found[2]):
        return False  # another process has the number, so nothing of the group was left
    for name in list_names("/proc"):
        each = _stat(int(name)) if name.isdecimal() else None
        if each and each[0] != "Z" and each[1] == leader["pid"] and owner in (None, owner_of(int(name))):
            return True
    return False


def adopt_orphans():
    """Have orphans below this process fall to it, even daemons in sessions of their own. Does nothing on a system without
    subreapers, where only the process group of a command can be ended."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    except (ImportError, OSError, AttributeError):
        pass


def reap_orphans():
    """Reap the orphans that fell to us and have ended; False if we have no child at all.

    Commands run in sessions of their own. The code that started a child in our session waits for it.
    """
    if not hasattr(os, "waitid"):
        return True
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None or ended.si_pid in KNOWN or os.getsid(ended.si_pid) == os.getsid(0):
                return True
            os.waitpid(ended.si_pid, os.WNOHANG)
        except OSError as problem:
            return problem.errno != errno.ECHILD


KNOWN: "Set[int]" = set()
"""Children in sessions of their own that this process waits for itself."""


class ChildProcess(subprocess.Popen):  # type: ignore[type-arg]
    """A child in a session of its own whose exit code only this class reads: Popen takes a lost one for success."""

    def __init__(self, words, **more):
        subprocess.Popen.__init__(self, words, **more)
        KNOWN.add(self.pid)

    def poll(self):
        return self._known(subprocess.Popen.poll(self))

    def wait(self, timeout=None):
        return self._known(subprocess.Popen.wait(self, timeout))

    def _known(self, code):
        if code is not None:
            KNOWN.discard(self.pid)
        return code


def end_orphans():
    """Kill the processes that the commands of this process left running, daemons too, until none is left.

    Shims of other jobs, which a command launched, stay. Gives up on processes that cannot be killed.
    """
    until, pause, found_none = time.monotonic() + LEFT_S, SOON_S / 5, 0
    while reap_orphans() and found_none < 2:
        left = find_orphans()
        for pid in left:
            kill(pid, signal.SIGKILL)
        found_none = 0 if left else found_none + 1
        if time.monotonic() >= until:
            say("cannot end what a command left running: %s" % ", ".join(str(pid) for pid in left))
            return
        time.sleep(pause if left else 0)
        pause = min(LOOK_S, pause * 2)


def find_orphans():
    """Living processes below this one in other sessions than ours, without known children and shims of other jobs and
    their descendants."""
    table = list_processes()
    below: Dict[int, List[int]] = {}
    for pid, each in table.items():
        below.setdefault(each[0], []).append(pid)
    found, left, own = [], list(below.get(os.getpid(), ())), os.getsid(0)
    while left:
        pid = left.pop()
        if pid in KNOWN or (table[pid][1] != own and is_shim(pid)):
            continue
        if table[pid][1] != own and table[pid][2] != "Z":
            found.append(pid)
        left += below.get(pid, ())
    return found


def list_processes():
    """Process → its parent, session and state; empty on a system without /proc."""
    found = {}
    for name in list_names("/proc"):
        words = _stat_words(int(name)) if name.isdecimal() else None
        if words:
            found[int(name)] = int(words[1]), int(words[3]), words[0]
    return found


def end_marked(job, index, attempts):
    """Kill the processes that attempts of a run whose shim was killed left on this machine: those with the attempts'
    variables, and their descendants, but neither this process, its ancestors, nor shims and their descendants."""
    until, pause = time.monotonic() + LEFT_S, SOON_S
    while True:
        left = find_marked(job, index, attempts)
        for pid in left:
            kill(pid, signal.SIGKILL)
        if not left:
            return
        over = time.monotonic() >= until
        say("%s what was left running: %s" % ("cannot end" if over else "ends", ", ".join(map(str, left))))
        if over:
            return
        time.sleep(pause)
        pause = min(LOOK_S, pause * 2)


def find_marked(job, index, attempts):
    table = list_processes()
    spared, pid = set(), os.getpid()
    while pid in table:
        spared.add(pid)
        pid = table[pid][0]
    wanted = {"RUNTIME_JOB_ID": [job], "RUNTIME_ARRAY_INDEX": [str(index)], "RUNTIME_ATTEMPT": attempts}
    marked = {pid for pid in table if pid not in spared and table[pid][2] != "Z" and bears(pid, wanted)}
    return [pid for pid in table if marked and _is_left(pid, table, marked, spared)]


def _is_left(pid, table, marked, spared):
    line = []
    while pid in table:
        line.append(pid)
        pid = table[pid][0]
    if not line or line[0] in spared or table[line[0]][2] == "Z" or not marked.intersection(line):
        return False
    return not any(is_shim(each) for each in line)


def bears(pid, wanted):
    """Whether a process was started with these values of variables."""
    pairs = [each.partition("=") for each in read_system("/proc/%d/environ" % pid).split("\0")]
    borne = {name: value for name, _, value in pairs}
    return all(borne.get(name) in values for name, values in wanted.items())


def is_shim(pid):
    """Whether a process is a shim, or a copy of one."""
    words = read_system("/proc/%d/cmdline" % pid).split("\0")
    names = [word.rpartition("/")[2] for word in words]
    return any("shim" in word for word in words) and any(re.match("j-[0-9a-f]{24}$", name) for name in names)


def kill(pid, number):
    try:
        os.kill(pid, number)
    except OSError:
        pass


def kill_group(pid, number):
    try:
        os.killpg(pid, number)
    except OSError:
        pass
