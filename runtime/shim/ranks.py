"""The ranks of an attempt: their processes on this machine, or the starter that runs a shim for each elsewhere."""

import hashlib
import os
import signal
import socket
import subprocess
import sys
import time

from runtime.shim.files import leave_mark, list_names
from runtime.shim.logs import LOG_BYTES, Logs
from runtime.shim.memory import held_memory
from runtime.shim.processes import Child, boot_id, end_orphans, kill, kill_group, started_at
from runtime.shim.setup import SetupLines
from runtime.shim.words import LOOK_S, own_path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, List, Optional

    from runtime.shim.command import Command


class Ranks(object):
    """The processes that an attempt has started. `leader` is the host of the shim that watches the attempt, if that is another one."""

    def __init__(self, order: "Dict[str, Any]", folder: str, leader: "Optional[str]" = None) -> None:
        self.order, self.folder = order, folder
        self.address = leader or "127.0.0.1"
        self.children: "List[Child]" = []
        self.count = order["nodes"] * order["tasks_per_node"]
        self.logs = Logs(order.get("log_bytes", LOG_BYTES))
        self.setup = SetupLines(folder)
        self.leads = False
        """Whether the ranks are processes of shims elsewhere, which look for files in the attempt's folder."""

    def start(self, rank: int, command: "Command") -> None:
        """Start one rank. Raises `OSError` or `ValueError` if its command cannot be started."""
        if command.has_setup:
            self.setup.expect(rank)
        log = self.logs.open(os.path.join(self.folder, "rank%d.log" % rank))
        try:
            child = Child(
                command.words,
                cwd=command.folder,
                env=dict(command.environment, **self._variables(rank)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                close_fds=True,
            )
        finally:
            os.close(log)
        self.children.append(child)

    def _variables(self, rank):
        per_node = self.order["tasks_per_node"]
        found = dict(
            RUNTIME_RANK=str(rank),
            RUNTIME_WORLD_SIZE=str(self.count),
            RUNTIME_LOCAL_RANK=str(rank % per_node),
            RUNTIME_NODE_RANK=str(rank // per_node),
            RUNTIME_NUM_NODES=str(self.order["nodes"]),
            RUNTIME_MASTER_ADDR=self.address,
        )
        if self.count > 1:
            chosen = 20000 + int(hashlib.sha256(self.folder.encode()).hexdigest()[:4], 16) % 10000
            port = str(self.order.get("master_port") or chosen)
            found.update(
                RANK=str(rank),
                WORLD_SIZE=str(self.count),
                LOCAL_RANK=found["RUNTIME_LOCAL_RANK"],
                MASTER_ADDR=self.address,
                MASTER_PORT=port,
                JAX_COORDINATOR_ADDRESS="%s:%s" % (self.address, port),
                JAX_NUM_PROCESSES=str(self.count),
                JAX_PROCESS_ID=str(rank),
            )
        return found

    def start_elsewhere(self, job, index, attempt):
        """Have the backend's own starter run a shim for each rank. Raises `OSError`."""
        self.leads = True
        words = list(self.order["launch_ranks"]) + [sys.executable, own_path(), job]
        words += ["--index", str(index), "--rank-of", str(attempt)]
        environment = dict(os.environ, RUNTIME_LEADER=socket.gethostname())
        log = os.open(os.path.join(self.folder, "ranks.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            child = Child(
                words, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        finally:
            os.close(log)
        self.children.append(child)

    def groups(self):
        """The process groups of the ranks, such that they can be told from later ones with the same numbers."""
        return [{"boot": boot_id(), "pid": child.pid, "start": started_at(child.pid)} for child in self.children]

    def poll(self) -> "List[Optional[int]]":
        """The exit code of each rank, None while it runs."""
        return [child.poll() for child in self.children]

    def printed(self):
        """A value that differs once anything more was printed.

        Ranks elsewhere write their logs themselves, over once they are full, so the time of the last change counts too.
        """
        if not self.leads:
            return self.logs.printed()
        logs = [os.path.join(self.folder, name) for name in list_names(self.folder) if name.endswith(".log")]
        found = [os.stat(log) for log in logs if os.path.exists(log)]
        return sum(each.st_size for each in found), max([each.st_mtime for each in found] or [0.0])

    def held_memory(self, limit):
        """Memory of the node that holds most, in bytes; nodes are groups of ranks of this machine."""
        per_node = self.order["tasks_per_node"]
        ranks = [child.pid for child in self.children]
        nodes = [ranks[first : first + per_node] for first in range(0, len(ranks), per_node)]
        return max([held_memory(node, limit) for node in nodes] or [0])

    def ask_for_checkpoint(self, name):
        """Send the signal `name` to each command and not to its group: a helper without a handler would die of it."""
        if self.leads:
            # A signal to srun would reach every process of every rank, whatever it does with signals.
            self._mark("ask")
            return
        for child in self.children:
            if child.poll() is None:
                kill(child.pid, getattr(signal, "SIG" + name))

    def end(self, grace: float, meanwhile: "Optional[Callable[[], None]]" = None) -> None:
        """Send TERM to every group, and kill what is left after `grace` seconds; `meanwhile` is called while waiting."""
        until = time.time() + grace
        # srun turns a TERM into a kill of all ranks at once; their shims look for this file instead.
        told = self.leads and self._mark("stop")
        if told:
            until += 2.0
        for child in self.children:
            if child.poll() is None and not told:
                kill_group(child.pid, signal.SIGTERM)
        while time.time() < until and any(child.poll() is None for child in self.children):
            if meanwhile is not None:
                meanwhile()
            time.sleep(min(LOOK_S, 0.05))
        self.kill()
        for child in self.children:
            child.wait()
        end_orphans()

    def kill(self):
        """Kill what is left of every group."""
        for child in self.children:
            kill_group(child.pid, signal.SIGKILL)

    def _mark(self, name):
        """Whether the shims of ranks will find this file. No refusal may keep this shim from ending them."""
        return leave_mark(os.path.join(self.folder, name), os.path.join(self.folder, "start.json"))

    def close(self):
        """Return when the logs hold all that was printed. Safe to call again."""
        self.logs.close()
        self.setup.forget()
