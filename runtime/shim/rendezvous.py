"""Nodes of one run, each a shim on a machine of its own, that meet in the run's record.

    aN/ranks/K        node K is ready: its address, host and process; only one shim makes it
    aN/ranks/K.beat   a counter that moves while node K lives, and how much its ranks have printed
    aN/ranks/K.end    how node K's part of the attempt ended; made once
    aN/go             the addresses of all nodes, from node 0 once every node is ready
    aN/ask  aN/stop   node 0 asks the others for a checkpoint, or to end
    aN/ranks/K.ask    node K, whose machine will be taken away, asks node 0 to do so

Node 0 begins attempts, decides how they end and commits the result. The other nodes serve the attempts that it begins, and
exit as it does. Nothing but the record connects the shims, so it works wherever the record root does.
"""

import json
import os
import socket
import threading
import time
import zlib

from runtime.shim.common import BEAT_S, HOST, LOOK_S, AlreadyClaimed, say
from runtime.shim.files import token
from runtime.shim.processes import boot_id, end_marked, is_alive, started_at
from runtime.shim.retry import name_end, pod_failures

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, Optional

POLL_S = 2.0
"""How often a shim looks for the others' files."""
SILENT_S = 60.0
"""A node whose counter stands still for this long is lost."""
SEND_S = 60.0
"""How much longer than their grace node 0 waits for the others, which may still send their logs and outputs."""
PORTS = 20000, 10000
"""First port that the ranks may meet at, and how many follow."""


class NodeHeartbeat(object):
    """The counter of another node. Only this machine's clock is read."""

    def __init__(self):
        self.text: "Optional[str]" = None
        self.renew()

    def renew(self):
        self.at = time.monotonic()

    def see(self, text):
        if text != self.text:
            self.text = text
            self.renew()

    def is_silent(self):
        return time.monotonic() - self.at >= SILENT_S


class Rendezvous(object):
    """One node's part in one attempt of a run. A thread looks for the others' files and moves this node's counter."""

    leads = False
    asked = False
    """Whether another node asks for a checkpoint."""

    def __init__(self, order, run, number):
        self.run, self.number = run, number
        self.nodes, self.start_s = order["nodes"], order["meet"]["start_s"]
        self.limit_s = order.get("time_limit_s")
        self.name = run.attempt_name(number)
        self.began = time.monotonic()
        self.address, self.port = "", order.get("master_port") or 0
        """Where rank 0 can be reached, once `meet` has returned None."""
        self.deadline: "Optional[float]" = None
        """The end of the attempt's time limit by the clock of node 0, from then on."""
        self.printed = 0
        """The output of this node's ranks, for the other nodes."""
        self.beats, self.beat_at = 0, 0.0
        self.looked_at = time.monotonic()
        self.left = threading.Event()
        self.thread: "Optional[threading.Thread]" = None

    @property
    def record(self):
        return self.run.record

    @property
    def node(self):
        return self.run.node

    @property
    def prefix(self):
        """Prefix of the names of this node's heartbeats."""
        return self.name + "/" if self.leads else self.rank_name(self.node, ".")

    def rank_name(self, node, what=""):
        return "%s/ranks/%d%s" % (self.name, node, what)

    def meet(self, scratch, asked):
        """Wait until every node is ready. Returns None, or the end of the attempt as `Attempt.go` does.

        Raises `AlreadyClaimed` if another shim serves this node.
        """
        self._claim(scratch)
        until = self.began + self.start_s
        while True:
            if asked.stop or asked.notice:
                return asked.end()
            if self.leads and self.run.cancelled():
                return "cancelled", 1, {}
            end = self.find_end()
            if end is not None:
                return end
            if self.is_open():
                return None
            if time.monotonic() >= until:
                return self.is_late()
            time.sleep(LOOK_S)

    def _claim(self, scratch):
        """Show that this node is ready, and begin to look for the others."""
        about = {
            "address": own_address(),
            "host": HOST,
            "boot": boot_id(),
            "pid": os.getpid(),
            "start": started_at(os.getpid()),
            "scratch": scratch,
            "token": token(),
        }
        if pod_failures() is not None:
            about["failures"] = pod_failures()
        self.record.create(self.rank_name(self.node), json.dumps(about, sort_keys=True))
        self.thread = threading.Thread(target=self._go, name="meeting")
        self.thread.daemon = True
        self.thread.start()

    def leave(self):
        """Stop looking. Safe to call again."""
        self.left.set()
        if self.thread is not None:
            self.thread.join()

    def is_open(self):
        """Whether all nodes may start their ranks; sets `address` and `port` then."""
        raise NotImplementedError

    def is_late(self):
        """The end of an attempt for which the others did not come in time."""
        raise NotImplementedError

    def find_end(self):
        """The end of the attempt because of another node, None while there is no reason for one."""
        raise NotImplementedError

    def find_preempted(self):
        """The end of the attempt because another node's machine will be taken away, None if that is not so."""

    def is_complete(self):
        """Whether the attempt has succeeded as far as other nodes are concerned."""
        return True

    def ask(self):
        """Ask the other nodes for a checkpoint."""

    def stop(self):
        """Ask the other nodes to end."""

    def await_others(self, until, asked, meanwhile):
        """Wait until the other nodes have ended, and not long after their grace is over at `until`."""

    def conclude(self, end, asked):
        """Do what follows the end of this node's part, with its logs and outputs in the record."""

    def share(self, printed):
        """Tell the others how much was printed here; returns a value that changes when anything was printed anywhere."""
        self.printed = printed
        return printed

    def mark(self, name):
        try:
            self.record.mark(name)
        except Exception as problem:
            say("cannot tell the other nodes: %s" % problem)  # they notice the end of the attempt

    def enter(self, text):
        about = json.loads(text)
        self.address, self.port, self.deadline = about["addresses"][0], about["port"], about["deadline"]

    def _go(self):
        said = None
        while not self.left.is_set():
            now = time.monotonic()
            try:
                if now - self.looked_at > SILENT_S / 4:
                    self.renew()  # we saw nothing meanwhile, so a counter may have moved unseen
                self.looked_at = now
                self.look()
                if not self.beats or now >= self.beat_at:
                    self.beats, self.beat_at = self.beats + 1, now + BEAT_S
                    self.record.overwrite(self.rank_name(self.node, ".beat"), "%d %d" % (self.beats, self.printed))
                said = None
            except Exception as problem:
                if str(problem) != said:
                    say("cannot look for the other nodes, tries again: %s" % problem)
                said = str(problem)
            self.left.wait(POLL_S)

    def look(self):
        """Read what the other nodes left."""
        raise NotImplementedError

    def renew(self):
        """Give the counters of other nodes their whole time again."""
        raise NotImplementedError


class Leader(Rendezvous):
    """Node 0, which ends the attempt when another node has failed or is lost."""

    leads = True

    def __init__(self, order, run, number):
        Rendezvous.__init__(self, order, run, number)
        self.others = range(1, self.nodes)
        self.ready: "Dict[int, Dict[str, Any]]" = {}
        self.signs: "Dict[int, NodeHeartbeat]" = {}
        self.ends: "Dict[int, Dict[str, Any]]" = {}

    def look(self):
        names = set(self.record.names("%s/ranks" % self.name))
        self.asked = self.asked or any(name.endswith(".ask") for name in names)
        for node in self.others:
            if node not in self.ready and str(node) in names:
                self.signs[node] = NodeHeartbeat()
                self.ready[node] = json.loads(self.record.read(self.rank_name(node)))
            if node not in self.ends and "%d.end" % node in names:
                self.ends[node] = json.loads(self.record.read(self.rank_name(node, ".end")))
        for node in set(self.ready).difference(self.ends):
            if "%d.beat" % node in names and time.monotonic() >= self.beat_at:
                self.signs[node].see(self.record.read(self.rank_name(node, ".beat")))
            if self.signs[node].is_silent():
                said = "node %d on %s gave no sign of life for %d s" % (node, self.ready[node]["host"], SILENT_S)
                self.ends[node] = {"reason": "lost", "code": 1, "message": said}

    def renew(self):
        for signs in list(self.signs.values()):
            signs.renew()

    def is_open(self):
        if len(self.ready) < self.nodes - 1:
            return False
        mine = json.loads(self.record.read(self.rank_name(0)))
        addresses = [mine["address"]] + [self.ready[node]["address"] for node in self.others]
        # Jobs that share a machine have different ports.
        where = "%s/%s" % (os.path.basename(self.run.job), self.name)
        port = self.port or PORTS[0] + zlib.crc32(where.encode("utf-8")) % PORTS[1]
        now = time.time()
        about = {
            "addresses": addresses,
            "port": port,
            "at": now,
            "deadline": now + self.limit_s if self.limit_s else None,
        }
        text = json.dumps(about, sort_keys=True)
        self.record.create(self.name + "/go", text)
        self.enter(text)
        return True

    def is_late(self):
        missing = ", ".join(str(node) for node in self.others if node not in self.ready)
        said = "%d of %d nodes came within %d s; missing: %s" % (
            1 + len(self.ready),
            self.nodes,
            self.start_s,
            missing,
        )
        return "no_capacity", 1, {"message": said}

    def find_end(self):
        return self._find(lambda reason: reason != "succeeded")

    def find_preempted(self):
        return self._find(lambda reason: reason == "preempted")

    def _find(self, fits):
        for node, end in sorted(dict(self.ends).items()):
            if fits(end["reason"]):
                return end["reason"], end["code"], dict(_details(end), node=node)
        return None

    def is_complete(self):
        """Whether the part of every other node has succeeded."""
        return len(self.ends) == self.nodes - 1 and self.find_end() is None

    def share(self, printed):
        return (printed,) + tuple((each.text or "").partition(" ")[2] for _, each in sorted(dict(self.signs).items()))

    def ask(self):
        self.mark(self.name + "/ask")

    def stop(self):
        self.mark(self.name + "/stop")

    def await_others(self, until, asked, meanwhile):
        until += POLL_S if asked.stop or asked.goes else SEND_S  # a machine that goes has little more than the grace
        while time.monotonic() < until and set(self.ready).difference(self.ends):
            meanwhile()
            time.sleep(LOOK_S)


class Member(Rendezvous):
    """A node that serves the attempts of node 0."""

    def __init__(self, order, run, number):
        Rendezvous.__init__(self, order, run, number)
        self.leader = NodeHeartbeat()
        self.stopped, self.over, self.lost = False, False, False
        """Whether node 0 wants the end of the attempt, has ended it, or is lost."""
        self.go_text: "Optional[str]" = None

    def look(self):
        names = self.record.names(self.name)
        self.asked = self.asked or "ask" in names
        if self.go_text is None and "go" in names:
            self.go_text = self.record.read(self.name + "/go")
        if time.monotonic() >= self.beat_at:
            self.leader.see(self.record.read(self.rank_name(0, ".beat")))
        self.stopped = self.stopped or "stop" in names
        if any(name.startswith("end.") for name in names) or _is_over(self.run, self.number):
            self.over = True
        elif self.leader.is_silent():
            self.lost = True

    def renew(self):
        self.leader.renew()

    def is_open(self):
        if self.go_text is not None:
            self.enter(self.go_text)
        return self.go_text is not None

    def is_late(self):
        return "stopped", 1, {"message": "node 0 did not begin within %d s" % self.start_s}

    def ask(self):
        if not self.asked:
            self.mark(self.rank_name(self.node, ".ask"))  # node 0 asks all others

    def find_end(self):
        if self.over or self.stopped:
            return "stopped", 143, {"message": "node 0 ended the attempt"}
        if self.lost:
            return "lost", 143, {"message": "node 0 gave no sign of life for %d s" % SILENT_S}
        return None

    def conclude(self, end, asked):
        """Note how this node's part ended, and wait until node 0 has ended the attempt."""
        if self.thread is None:
            return  # node 0 does not know of this node yet, and ends the attempt when it does not come
        reason, code, details = end
        try:
            note = dict(details, reason=reason, code=code, at=time.time())
            self.record.create(self.rank_name(self.node, ".end"), json.dumps(note, sort_keys=True))
        except AlreadyClaimed:
            pass  # a later shim of this node took us for lost
        while not asked.stop and not self.over and not self.lost:
            time.sleep(LOOK_S)


def open_meeting(order, run, number):
    """This node's part in an attempt; None for a run of one machine."""
    if not order.get("meet"):
        return None
    return (Member if run.node else Leader)(order, run, number)


def find_attempt(run):
    """The attempt that this node is to serve, None while node 0 has begun none.

    What an earlier shim of this node left on this machine is ended; its part of a running attempt is noted as lost.
    """
    number = _newest(run.record.names(run.name))
    if not number:
        return None
    name = "%s/ranks/%d" % (run.attempt_name(number), run.node)
    names = run.record.names(run.attempt_name(number) + "/ranks")
    if str(run.node) not in names:
        return None if run.ended(number) else number
    about = json.loads(run.record.read(name))
    if about["host"] == HOST and about["boot"] == boot_id() and not is_alive(about):
        end_marked(os.path.basename(run.job), run.index, {str(number)})
        run.remove_scratch(about["scratch"])
    if "%d.end" % run.node not in names and run.ended(number) is None:
        _bury(run, name, about)
    return None


def _bury(run, name, about):
    """Note the end of an earlier shim of this node, which was ready for the attempt and left no end."""
    full = run.record.read(name + ".memory")
    end = name_end(None, about.get("failures"), pod_failures(), full) or {"code": 1, "reason": "lost"}
    said = "node %d on %s: %s" % (run.node, about["host"], end.get("message", "its shim was started again"))
    try:
        run.record.create(name + ".end", json.dumps(dict(end, message=said, at=time.time()), sort_keys=True))
    except AlreadyClaimed:
        pass


def _newest(names):
    """The number of the newest attempt in a run's folder, 0 if there is none."""
    return max([int(name[1:]) for name in names if name[0] == "a" and name[1:].isdecimal()] or [0])


def _is_over(run, number):
    names = run.record.names(run.name)
    return "result" in names or _newest(names) > number


def own_address():
    """The address of this machine for the others of its network."""
    given = os.environ.get("RUNTIME_ADDRESS")
    if given:
        return given
    for family, far in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as opened:
                opened.connect((far, 9))  # sends nothing: it only asks for the route
                return opened.getsockname()[0]
        except (IOError, OSError):
            continue
    return "127.0.0.1"


def _details(end):
    return {name: value for name, value in end.items() if name not in ("reason", "code", "at")}
