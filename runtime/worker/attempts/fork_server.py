"""The small process between a worker and its attempts: it forks them, ends their trees, and outlives the worker until
that is done.

It is single-threaded, holds no state of the queue, and never runs user code. As the subreaper of all that it started it
inherits every process that an attempt leaves behind. Every child is a subreaper too, so an orphan that falls to the
guardian comes from a child that has died: nothing is left to attribute. docs/decisions/processes.md has the reasons.

Messages from the worker end with NUL: `fork ID CELL` with two descriptors (control socket, write end of the output
pipe), `stop ID` (SIGTERM to the attempt's session), `kill ID` (SIGKILL to the child and all below it), `sweep ID`,
`remove PATH`, `preload MODULE…`, `ping`. Messages to it: `ready`, `forked ID PID`, `failed ID ERRNO`, `exited ID STATUS
PEAK`, `removed PATH`, `pong`.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib.machinery
import json
import mmap
import os
import select
import signal
import socket
import sys
import time

# Children find `calls` loaded, which takes longer than a short call.
from runtime.worker.attempts import calls, child, current, entries, environment, processes, scratch, wire  # noqa: F401

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

SWEEP_PATIENCE_S = 10.0
"""After this time an attempt is reported as ended although one of its processes still lives: stuck in the kernel, or
another user's."""
prctl = processes.find_prctl()


class Guardian:
    def __init__(self, worker: socket.socket, config: dict[str, Any]) -> None:
        self.worker = worker
        self.pid = os.getpid()
        page = mmap.mmap(config["page_fd"], config["page_bytes"])
        os.close(config["page_fd"])
        self.child = current.server = child.ChildServer(
            page, reuse=config["reuse"], max_tasks=config["max_tasks"], max_growth_bytes=config["max_growth_bytes"]
        )
        self.null_fd = os.open(os.devnull, os.O_RDWR)
        self.wake_fd = -1
        """Readable after SIGCHLD, once everything is set up."""
        self.worker_pid = config["worker_pid"]
        self.scratch = config["scratch"]
        try:
            self.worker_fd = os.pidfd_open(self.worker_pid)
        except (AttributeError, OSError):
            self.worker_fd = -1
        """Turns readable when the worker dies; -1 if the system has no such descriptor."""
        self.buffer = b""
        self.fds: list[int] = []
        # A descriptor handed down has the number that it had in a worker, which may have thousands.
        self.fds_end = 1 + max(1023, worker.fileno(), config["page_fd"], *config["hold_fds"])
        self.forked: dict[str, tuple[int, int]] = {}
        """Pid and cell of each child, by the name that the worker knows it by."""
        self.names: dict[int, str] = {}
        self.helpers: dict[int, str] = {}
        """Processes that remove something, with the message that follows."""
        self.unremoved: list[str] = []
        """Trees for whose removal no process could be forked."""
        self.unswept: list[str] = []
        """Reports on children that did not die in good order; sent once none of their processes is left."""
        self.sweep_since = 0.0

    def set_up(self) -> None:
        prctl(processes.PR_SET_CHILD_SUBREAPER, 1)
        # If the worker dies while this process is stopped, it continues and ends everything below it.
        prctl(processes.PR_SET_PDEATHSIG, signal.SIGCONT)
        prctl(processes.PR_SET_NAME, b"rt-guardian\0")
        signal.signal(signal.SIGCHLD, lambda signum, frame: None)
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)
        # A worker holds some signals back, to read who sent them; its attempts are stopped by them.
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        self.wake_fd, waker_fd = os.pipe()
        for fd in (self.wake_fd, waker_fd):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(waker_fd, warn_on_full_buffer=False)
        gc.collect()
        gc.freeze()
        gc.disable()
        # Those of attempts whose guardian was killed: no child has begun anything yet.
        scratch.clear_containers(self.scratch)
        self._say("ready")

    def serve(self) -> NoReturn:
        poll = select.poll()
        for fd in (self.worker.fileno(), self.wake_fd, self.worker_fd):
            if fd >= 0:
                poll.register(fd, select.POLLIN)
        while True:
            timeout: float | None = self.sweep_pause() * 1000 if self.unswept else None
            if self.worker_fd < 0:
                timeout = min(timeout or 1000, 1000)
                if os.getppid() != self.worker_pid:
                    self._end()
            ready = {fd for fd, _ in poll.poll(timeout)}
            if self.worker_fd in ready:
                self._end()
            if self.wake_fd in ready:
                os.read(self.wake_fd, 65536)  # More than the pipe holds.
                self._reap()
            if self.worker.fileno() in ready:
                self._receive()
            if self.unswept:
                self._sweep()

    # messages

    def _receive(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self.worker, 65536, 64)
        except ConnectionError:
            self._end()
        if not data:
            self._end()
        self.fds += fds
        self.obey_all(data)

    def obey_all(self, data: bytes) -> None:
        *messages, self.buffer = (self.buffer + data).split(b"\0")
        for message in messages:
            self._obey(message.decode("utf-8", "surrogateescape"))

    def _obey(self, message: str) -> None:
        verb, _, rest = message.partition(" ")
        match verb:
            case "fork":
                name, cell = rest.split(" ")
                self._fork(name, int(cell))
            case "stop" if rest in self.forked:
                self._stop(*self.forked[rest])
            case "kill" if rest in self.forked:
                pid, _ = self.forked[rest]
                processes.send_signal([pid], signal.SIGKILL)
                # Without its monitor, an engine would remove a container late.
                if not scratch.find_containers(self.scratch, pid):
                    processes.send_signal(processes.find_descendants(processes.read_table(), pid), signal.SIGKILL)
            case "ping":
                self._say("pong")
                paths, self.unremoved = self.unremoved, []
                for path in paths:
                    self._remove(path)
            case "sweep":
                self._sweep_before(f"exited {rest} {wire.CLEAN_EXIT << 8} 0")
            case "preload":
                self._preload(rest.split(" "))
            case "remove":
                self._remove(rest)
            case _:
                pass  # A child that has died meanwhile.

    def _say(self, message: str) -> None:
        try:
            self.worker.sendall(f"{message}\0".encode("utf-8", "surrogateescape"))
        except OSError:
            self._end()

    def _fork(self, name: str, cell: int) -> None:
        control_fd, output_fd = self.fds.pop(0), self.fds.pop(0)
        try:
            pid = os.fork()
        except OSError as problem:
            self._say(f"failed {name} {problem.errno}")
        else:
            if not pid:
                self._become_child(cell, control_fd, output_fd)
            self.forked[name], self.names[pid] = (pid, cell), name
            self._say(f"forked {name} {pid}")
        os.close(control_fd)
        os.close(output_fd)

    def _become_child(self, cell: int, control_fd: int, output_fd: int) -> NoReturn:
        try:
            self._leave_guardian()
            os.dup2(self.null_fd, 0)
            os.dup2(output_fd, 1)
            os.dup2(output_fd, 2)
            if control_fd != wire.CONTROL_FD:
                os.dup2(control_fd, wire.CONTROL_FD)
            os.set_inheritable(wire.CONTROL_FD, False)
            os.closerange(wire.CONTROL_FD + 1, self.fds_end)
            self.child.serve(cell)
        except BaseException as problem:
            entries.print_error(f"runtime: the attempt's process failed: {entries.describe(problem)}")
        finally:
            os._exit(1)

    def _leave_guardian(self) -> None:
        os.setsid()
        prctl(processes.PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != self.pid:
            os._exit(wire.CLEAN_EXIT)
        prctl(processes.PR_SET_CHILD_SUBREAPER, 1)
        signal.set_wakeup_fd(-1)
        gc.enable()

    def _stop(self, pid: int, cell: int) -> None:
        leader = wire.COMMAND_PID.unpack_from(self.child.control.page, cell + wire.COMMAND_PID_AT)[0] or pid
        members = processes.find_session(processes.read_table(), leader)
        if members:
            processes.send_signal(members, signal.SIGTERM)
        elif sys.platform != "linux":
            os.killpg(leader, signal.SIGTERM)

    def _preload(self, names: list[str]) -> None:
        """Load modules of the standard library for all later children, if nothing else has their names."""
        before, path = set(sys.modules), list(sys.path)
        for name in names:
            if name in environment.PRELOADABLE and _is_standard(name):
                sys.path[:] = [_LIBRARY, f"{_LIBRARY}/lib-dynload"]
                try:
                    __import__(name)
                except Exception:
                    pass  # An attempt that needs it gets the error.
                finally:
                    sys.path[:] = path
        self.child.environment.record_preloaded(sys.modules.keys() - before)
        gc.freeze()

    def _remove(self, path: str) -> None:
        try:
            self._help(f"removed {path}", lambda: scratch.remove_tree(path))
        except OSError:
            # The worker pings as long as it waits for a removal.
            self.unremoved.append(path)

    def _help(self, message: str, remove: Callable[[], object]) -> None:
        """Call `remove` in a process of its own, after whose end the message follows. Raises `OSError`."""
        pid = os.fork()
        if pid:
            self.helpers[pid] = message
            return
        try:
            self._leave_guardian()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.closerange(wire.CONTROL_FD, self.fds_end)
            remove()
        finally:
            os._exit(0)

    # dead children

    def _reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if message := self.helpers.pop(pid, None):
                if message.startswith("removed "):
                    self._say(message)
                else:
                    self._sweep_before(message)
                continue
            name = self.names.pop(pid, None)
            if name is None:
                continue
            del self.forked[name]
            peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
            message = f"exited {name} {status} {peak}"
            if os.WIFEXITED(status) and os.WEXITSTATUS(status) == wire.CLEAN_EXIT:
                self._say(message)
            else:
                self._clear_before(message, pid)

    def _clear_before(self, message: str, pid: int) -> None:
        """Report a dead child only once its container, if it had one, and its processes are gone."""
        try:
            if scratch.find_containers(self.scratch, pid):
                self._help(message, lambda: scratch.clear_containers(self.scratch, pid))
                return
        except OSError:
            pass  # No process can be forked; the next worker removes the rest.
        self._sweep_before(message)

    def _sweep_before(self, message: str) -> None:
        """Report a dead child only once none of its processes is left."""
        self.unswept.append(message)
        self.sweep_since = time.monotonic()
        self._sweep()

    def _sweep(self) -> None:
        table = processes.read_table()
        orphans = [
            process.pid
            for process in table.values()
            if process.ppid == self.pid
            and not process.dead
            and process.pid not in self.names
            and process.pid not in self.helpers
        ]
        if orphans and time.monotonic() - self.sweep_since < SWEEP_PATIENCE_S:
            for orphan in orphans:
                processes.send_signal([orphan, *processes.find_descendants(table, orphan)], signal.SIGKILL)
            return
        messages, self.unswept = self.unswept, []
        for message in messages:
            self._say(message)

    def sweep_pause(self) -> float:
        """Seconds until the next sweep, as many as have passed, within bounds."""
        return min(max(time.monotonic() - self.sweep_since, 0.001), 0.05)

    def _end(self) -> NoReturn:
        """End everything after the worker has died, and only then let go of the locks that stand for its life."""
        signal.set_wakeup_fd(-1)
        processes.send_signal([*self.names, *self.helpers], signal.SIGKILL)
        scratch.clear_containers(self.scratch)
        while processes.reap():
            processes.end_tree(self.pid, patience_s=60)
            if not processes.find_descendants(processes.read_table(), self.pid):
                break
        os._exit(0)


_LIBRARY = os.__file__.rpartition("/")[0]


def _is_standard(name: str) -> bool:
    """Whether children would find the standard library's module under this name."""
    spec = importlib.machinery.PathFinder.find_spec(name.partition(".")[0])
    origin = spec.origin if spec else None
    return not origin or (origin.startswith(f"{_LIBRARY}/") and "site-packages" not in origin)


def _set_up_for_children(config: dict[str, Any]) -> None:
    """Do once, for all children, the set-up that each would otherwise repeat."""
    sys.path[:] = config["sys_path"]
    sys.argv = [""]
    artifacts = [name for name in os.environ if name.startswith("RUNTIME_ARTIFACT")]
    for name in (*environment.FOREIGN_ENVIRONMENT, *artifacts):
        os.environ.pop(name, None)
    os.environ.update(environment.BASE_ENVIRONMENT)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]
    main_module = sys.modules["__main__"]
    for name in list(vars(main_module)):
        if not name.startswith("__"):
            delattr(main_module, name)
    # Lists the folders of the import path once for all children; they notice when one changes.
    importlib.machinery.PathFinder.find_spec("_no_such_module_")
    # A crash of a child shows Python's stack in its log.
    faulthandler.enable(file=2)


def main(fd: int) -> NoReturn:
    """Serve the worker at the other end of `fd`, whose first message is the configuration."""
    worker = socket.socket(fileno=fd)
    os.set_inheritable(fd, False)
    # The first messages, and their descriptors, may come along with the configuration.
    data, fds = b"", []
    while b"\0" not in data:
        part, more, _, _ = socket.recv_fds(worker, 65536, 64)
        if not part:
            os._exit(0)
        data += part
        fds += more
    text, _, rest = data.partition(b"\0")
    config = json.loads(text)
    for held in config["hold_fds"]:
        os.set_inheritable(held, False)
    _set_up_for_children(config)
    guardian = Guardian(worker, config)
    guardian.set_up()
    guardian.fds += fds
    guardian.obey_all(rest)
    guardian.serve()
