"""Logs of the ranks' output, which never outgrow their limit."""

import fcntl
import os
import re
import select
import threading
import time

from runtime.shim.processes import LEFT_S

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List, Tuple

LOG_BYTES = 1 << 30
"""The most that a rank's log of an attempt takes if the order sets no limit."""
LOG_TAIL_BYTES = 16 << 20
"""How much of the end of a log beyond its limit is kept, at most a quarter of the limit; the rest is its beginning."""
LOG_FLUSH_S = 1.0
"""How often the end of such a log is written over."""
PIPE_BYTES = 1 << 20
F_SETPIPE_SZ = 1031


def split_log(limit: int) -> "Tuple[int, int]":
    """The bytes of the beginning and of the end that are kept of a log that outgrew `limit`."""
    tail = min(LOG_TAIL_BYTES, limit // 4)
    return limit - tail - len(render_gap(0)), tail


def render_gap(left_out: int) -> bytes:
    """The line of a log that stands for bytes left out; its length does not depend on their number."""
    return b"\n[shim: %16d bytes are left out here, as the log outgrew its limit]\n" % left_out


GAP = re.escape(render_gap(0)).replace(re.escape(b"%16d" % 0), b" *([0-9]+)")


class RankLog(object):
    """The output of one rank, in a file that never takes more than `limit` bytes.

    Beyond that the file is its beginning, a line with the number of bytes left out, and the end, which is held in memory
    and written over now and then, so that little is written even for a long output.
    """

    def __init__(self, path, limit):
        self.limit = limit
        self.head, self.tail = split_log(limit)
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self.printed = 0
        self.size = 0
        self.missing, self.why = 0, ""
        """Bytes that the disk refused since the last write that it took."""
        self.kept = bytearray()
        self.stale = False

    def add(self, data):
        self.printed += len(data)
        if self.printed > self.head:
            self.kept += data
            if len(self.kept) > 2 * self.tail:
                del self.kept[: -self.tail]
        if self.printed > self.limit:
            self.stale = True
            data = data[: max(0, self.limit - self.printed + len(data))]
        if data:
            self._append(data)

    def _append(self, data):
        try:
            if self.missing:
                said = b"\n[shim: %d bytes could not be written here: %s]\n" % (self.missing, self.why.encode())
                self.size = _write_at(self.file, said, self.size)
                self.missing = 0
            # All of it or nothing: the next write overwrites a part that a full disk took.
            self.size = _write_at(self.file, data, self.size)
        except OSError as problem:
            self.missing += len(data)
            self.why = os.strerror(problem.errno or 0)

    def flush(self):
        """Write the end over. The next flush repeats a write that the disk refuses."""
        if not self.stale:
            return
        end = bytes(self.kept[-self.tail :])
        text = render_gap(self.printed - self.head - len(end)) + end
        try:
            at = min(self.head, self.size)  # less if the disk refused a part of the beginning
            os.ftruncate(self.file, _write_at(self.file, text, at))
            self.stale = False
        except OSError:
            pass

    def close(self):
        if self.missing:
            self._append(b"")
        self.flush()
        os.close(self.file)


def _write_at(file, data, at):
    """Write all of `data` at an offset; returns the offset behind it."""
    while data:
        done = os.pwrite(file, data, at)
        at += done
        data = data[done:]
    return at


class Logs(object):
    """Copies the commands' output from pipes to their logs in a thread, so that no command waits for other work."""

    def __init__(self, limit):
        self.limit = limit
        self.logs: Dict[int, RankLog] = {}
        self.ended: List[RankLog] = []
        self.thread: Any = None
        self.until = 0.0
        """The time at which the thread ends, even during output; 0 while it goes on."""

    def open(self, path):
        """The write end of a pipe to the log at `path`; the caller closes it."""
        log = RankLog(path, self.limit)
        source, sink = os.pipe()
        try:
            fcntl.fcntl(sink, F_SETPIPE_SZ, PIPE_BYTES)
        except (IOError, OSError):
            pass  # more than a user may have, or not Linux
        if self.thread is None:
            self.wake, self.waker = os.pipe()
            self.poll = select.poll()
            self.poll.register(self.wake, select.POLLIN)
            self.thread = threading.Thread(target=self._go)
            self.thread.daemon = True
            self.thread.start()
        self.logs[source] = log
        self.poll.register(source, select.POLLIN)
        os.write(self.waker, b".")
        return sink

    def printed(self):
        return sum(log.printed for log in list(self.logs.values()) + self.ended)

    def _go(self):
        due = 0.0
        while True:
            waits = any(log.stale for log in list(self.logs.values()))
            closing = self.until  # read before the look, since an earlier look may not know the last pipe
            ready = self.poll.poll(0 if closing else 1000 * LOG_FLUSH_S if waits else None)
            if closing and (time.monotonic() > closing or not any(each in self.logs for each, _ in ready)):
                return
            for source, _ in ready:
                if source in self.logs:
                    self._take(source)
                elif not closing:
                    os.read(self.wake, 4096)
            if waits and time.monotonic() >= due:
                for log in list(self.logs.values()):
                    log.flush()
                due = time.monotonic() + LOG_FLUSH_S

    def _take(self, source):
        data = os.read(source, PIPE_BYTES)
        if data:
            self.logs[source].add(data)
        else:
            self.poll.unregister(source)
            log = self.logs[source]
            self.ended.append(log)
            del self.logs[source]
            os.close(source)
            log.close()

    def close(self):
        """Return when all output until now is in the logs. Safe to call again."""
        if self.thread is None:
            return
        self.until = time.monotonic() + LEFT_S
        os.write(self.waker, b".")
        self.thread.join()
        self.thread = None
        for source, log in self.logs.items():
            os.close(source)
            log.close()
        for each in (self.wake, self.waker):
            os.close(each)
        self.ended += self.logs.values()
        self.logs = {}
