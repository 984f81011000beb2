"""A machine that a job keeps between its commands: each new tree runs the command again.

The job's folder has `hold/N.tar` and then `hold/N.json`, N counted from 1, for each tree that the client sends; the counter
`hold/beat`, which moves while the client lives; and `hold/over` once the machine is to be given back.
"""

import json
import re
import threading
import time

from runtime.shim.attempt import keep_native_limit
from runtime.shim.common import LOOK_S, say
from runtime.shim.files import SNAPSHOT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, Tuple

HOLD_LOOK_S = 1.0
"""How often a new tree is looked for."""
SILENT_S = 900.0
"""How long the client's counter may stand still, by this machine's monotonic clock."""
GAP_S = 60.0
"""The most of a pause between two looks that counts: the record root may not answer, or this machine may stand still."""
FOLDER, OVER, BEAT = "hold", "over", "beat"

_TREE = re.compile(r"([1-9][0-9]{0,8})\.json$")
_SHA256 = re.compile(r"[0-9a-f]{64}$")


class DevTrees(object):
    """The trees of a job that keeps its machine. A thread looks for them, so that no command waits for a network."""

    def __init__(self, order, run):
        self.order, self.run = order, run
        limit = order.get("time_limit_s")
        self.deadline = keep_native_limit(order, time.time() + limit if limit else None)
        """The end of the whole hold; a restart of the shim begins it again."""
        self.newest: "Tuple[int, Dict[str, Any]]" = (0, {})
        self.current = self.newest
        """Number and content of the newest tree, and of the one whose command was begun last; 0 is the launch's own."""
        self.archive = SNAPSHOT
        self.gpus = None
        """The GPUs that the run keeps between its commands."""
        self.over = None
        self.beat, self.silent_s, self.looked = None, 0.0, None
        self.said = set()
        self.closed = threading.Event()
        self._look()
        thread = threading.Thread(target=self._go)
        thread.daemon = True
        thread.start()

    def _go(self):
        while not self.closed.wait(HOLD_LOOK_S):
            self._look()

    def _look(self):
        try:
            names = set(self.run.record.names(FOLDER))
            self._find_newest(names)
            if OVER in names:
                self.over = "succeeded", 0, {"message": "its client gave the machine back"}
            beat = self.run.record.read("%s/%s" % (FOLDER, BEAT)) if BEAT in names else ""
        except Exception as problem:
            self.looked = None
            self._say("cannot look for a new tree, tries again: %s" % problem)
            return
        now = time.monotonic()
        if beat != self.beat:
            self.beat, self.silent_s = beat, 0.0
        elif self.looked is not None:
            self.silent_s += min(now - self.looked, GAP_S)
        self.looked = now
        if self.silent_s >= SILENT_S and self.over is None:
            self.over = "succeeded", 0, {"message": "its client gave no sign of life for %d s" % SILENT_S}

    def _find_newest(self, names):
        numbers = [int(found.group(1)) for found in map(_TREE.match, names) if found]
        for number in sorted(numbers, reverse=True):
            if number <= self.newest[0]:
                return
            try:
                self.newest = number, read_tree(self.run.record.read("%s/%d.json" % (FOLDER, number)))
                return
            except ValueError as problem:
                self._say("skips %s/%d.json: %s" % (FOLDER, number, problem))

    def _say(self, text):
        if text not in self.said:
            self.said.add(text)
            say(text)

    def begin(self):
        """The order of the next command, which runs in the newest tree."""
        number, tree = self.current = self.newest
        order = dict(self.order)
        if self.deadline:
            order["time_limit_s"] = max(1.0, self.deadline - time.time())
        self.archive = SNAPSHOT
        if number:
            self.archive = "%s/%d.tar" % (FOLDER, number)
            order["code"] = dict(order.get("code") or {}, archive=self.archive, sha256=tree["sha256"])
            index = str(self.run.index)
            work = order["runs"][index]
            order["runs"] = dict(order["runs"], **{index: dict(work, command=tree.get("command") or work["command"])})
        return order

    def ends_command(self):
        """Why the running command has to end, None if it has not to."""
        if self.over is not None:
            return self.over[2]["message"]
        return "a newer tree has come" if self.newest[0] > self.current[0] else None

    def find_end(self):
        """The result of the run if the machine is to be given back, else None."""
        if self.over is None and self.deadline and time.time() >= self.deadline:
            return "timeout", 124, {"message": "the time limit of the whole hold has come"}
        return self.over

    def wait(self, asked, give_up):
        """Wait after a command for the next tree, the end of the hold, or a reason to `give_up()`."""
        while not (asked.stop or asked.goes or self.ends_command() or self.find_end() or give_up()):
            time.sleep(LOOK_S)

    def close(self):
        self.closed.set()
        if self.gpus:
            self.gpus.drop()


def read_tree(text):
    """The content of `hold/N.json`; raises `ValueError` for a damaged one."""
    tree = json.loads(text or "")
    if not isinstance(tree, dict) or not _SHA256.match(str(tree.get("sha256"))):
        raise ValueError("it names no content id")
    words = tree.get("command")
    if words is not None and not (isinstance(words, list) and words and all(isinstance(each, str) for each in words)):
        raise ValueError("its command is no list of words")
    return tree
