"""Orders and results on the control socket between worker and child, and the memory page that both share.

User code has the control socket too, and may write to it or read from it: after bytes that are no frame, neither side
knows where the next frame begins, and the child is replaced.
"""

from __future__ import annotations

import _thread
import errno
import fcntl
import json
import os
import struct
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import mmap
    from typing import Any

# Frames from the worker: magic, length, kind. An order's fields are joined by NUL, which neither paths nor JSON can
# hold; the task's JSON is last. Frames to the worker: magic, length, kind, flags, start, end, and the peak of resident
# memory or 0.
MAGIC = 0x1DF7A3C5
ORDER_HEADER = struct.Struct("<IIB")
ORDER, GO_ON = 1, 2
RESULT_HEADER = struct.Struct("<IIBBddQ")
RESULT, PROGRESS = 1, 2
RETIRES, WAITS, DETAILED = 1, 2, 4
"""Flags of a result: the child exits and takes no further order; it waits for GO_ON, since output of this attempt is
still in the pipe; JSON details and then the value follow."""
ORDER_FIELDS = 13
DETAIL_HEADER = struct.Struct("<I")
MOST_VALUE_BYTES = 64 * 1024 * 1024
MOST_FRAME_BYTES = 4 * MOST_VALUE_BYTES + (16 << 20)
"""A value's characters take up to four bytes each."""

# A cell of the page that worker, guardian and children share, one for each child. Written by the child: how many
# orders it has begun, and when the last one began on the wall and the monotonic clock; the command's pid; OVER once
# the user's code has ended; CLOSED if it found its end of the socket gone; WAITS while it waits for a frame; its own
# pid, which the guardian may report later than the child acts. Written by the worker: HOLD (begin nothing further),
# which order is asked to stop, and why.
CELL_BYTES = 64
BEGUN = struct.Struct("<Qdd")
COMMAND_PID = PID = struct.Struct("<I")
STOP = struct.Struct("<Q")
COMMAND_PID_AT, OVER_AT, CLOSED_AT, WAITS_AT, HOLD_AT, REASON_AT, STOP_AT, PID_AT = 24, 28, 29, 30, 32, 33, 40, 48
STOP_REASONS = ("", "preempted", "cancelled", "timeout", "expired", "lost", "other")

CONTROL_FD = 3
CLEAN_EXIT = 117
"""Exit status of a child that left nothing behind and had reported everything."""

# Made before any user code runs: in a warm process user code may replace what `json` offers.
encode_json = json.JSONEncoder().encode


class ControlSocket:
    """The child's end of the control socket, and its cell of the shared page."""

    def __init__(self, page: mmap.mmap) -> None:
        self.page = page
        self.cell = self.pid = 0
        self.begun = 0
        """Orders that this child has begun."""
        self._buffer = b""

    def open(self, cell: int) -> None:
        self.cell, self.pid = cell, os.getpid()
        PID.pack_into(self.page, cell + PID_AT, self.pid)
        # The socket needs no owner; this is the cheapest mark by which `_write` recognizes it.
        fcntl.fcntl(CONTROL_FD, fcntl.F_SETOWN, self.pid)

    # frames

    def next_order(self) -> list[str]:
        while True:
            kind, payload = self._next_frame()
            if kind == ORDER:
                return payload.decode("utf-8", "surrogatepass").split("\0", ORDER_FIELDS)

    def wait_to_go_on(self) -> None:
        """Wait until the worker has read the attempt's output; orders that come before that are kept."""
        orders = b""
        while True:
            kind, payload = self._next_frame()
            if kind == GO_ON:
                break
            orders += ORDER_HEADER.pack(MAGIC, len(payload), kind) + payload
        self._buffer = orders + self._buffer

    def _next_frame(self) -> tuple[int, bytes]:
        buffer, header = self._buffer, ORDER_HEADER.size
        while True:
            if len(buffer) >= header:
                magic, length, kind = ORDER_HEADER.unpack_from(buffer)
                if magic != MAGIC or length > MOST_FRAME_BYTES:
                    os._exit(1)  # User code has read from the socket; orders that were not begun go to another child.
                end = header + length
                if len(buffer) >= end:
                    self._buffer = buffer[end:]
                    return kind, buffer[header:end]
                if end - len(buffer) > 65536:
                    buffer = self._read_long(buffer, end)
                    continue
            buffer += self._read(65536)

    def _read(self, size: int) -> bytes:
        self.page[self.cell + WAITS_AT] = 1
        data = os.read(CONTROL_FD, size)
        self.page[self.cell + WAITS_AT] = 0
        if not data:
            os._exit(CLEAN_EXIT)
        return data

    def _read_long(self, start: bytes, end: int) -> bytes:
        parts, size = [start], len(start)
        while size < end:
            parts.append(self._read(min(end - size, 1 << 20)))
            size += len(parts[-1])
        return b"".join(parts)

    def send_result(self, flags: int, started: float, ended: float, peak: int, payload: bytes) -> None:
        self._write(RESULT_HEADER.pack(MAGIC, len(payload), RESULT, flags, started, ended, peak) + payload)

    def send_progress(self, payload: bytes) -> None:
        if len(payload) <= MOST_FRAME_BYTES:
            self._write(RESULT_HEADER.pack(MAGIC, len(payload), PROGRESS, 0, time.time(), 0.0, 0) + payload)

    def _write(self, data: bytes) -> None:
        """Send all of `data` to the worker; if the socket is gone, the process ends."""
        with _writing:
            try:
                if fcntl.fcntl(CONTROL_FD, fcntl.F_GETOWN) != self.pid:
                    # User code has closed it and opened something else, which must not get this.
                    raise OSError(errno.EBADF, "not the control socket")
                sent = os.write(CONTROL_FD, data)
                while sent < len(data):
                    sent += os.write(CONTROL_FD, data[sent:])
            except OSError:
                self.page[self.cell + CLOSED_AT] = 1
                os._exit(1)

    # the cell

    def begin(self, started: float) -> None:
        """Count the next order as begun; the process exits if the worker has set HOLD."""
        self.begun += 1
        BEGUN.pack_into(self.page, self.cell, self.begun, started, time.monotonic())
        self.page[self.cell + OVER_AT] = 0
        # After the count: the worker sets HOLD, then reads the count, and so knows which orders have not begun.
        if self.page[self.cell + HOLD_AT]:
            BEGUN.pack_into(self.page, self.cell, self.begun - 1, started, 0.0)
            os._exit(CLEAN_EXIT)

    def mark_over(self) -> None:
        self.page[self.cell + OVER_AT] = 1

    def record_command(self, pid: int) -> None:
        """Name the session that the guardian signals instead of the child's; 0 for none."""
        COMMAND_PID.pack_into(self.page, self.cell + COMMAND_PID_AT, pid)

    def order_to_stop(self) -> int:
        """Return the order that is asked to stop, as `begun` counts; 0 for none."""
        order: int = STOP.unpack_from(self.page, self.cell + STOP_AT)[0]
        return order

    def stop_reason(self) -> str:
        return STOP_REASONS[self.page[self.cell + REASON_AT]]


def encode_report(details: dict[str, Any], value: str) -> bytes:
    """Return the payload of a detailed result; if it cannot be sent, that of a failure with the reason."""
    try:
        text = encode_json(details).encode()
    except (TypeError, ValueError, RecursionError) as problem:
        # User code has put a value that is not a number among its metrics.
        return encode_report({"outcome": "app_failed", "message": f"its metrics cannot be recorded: {problem}"}, "")
    payload = DETAIL_HEADER.pack(len(text)) + text + value.encode("utf-8", "surrogatepass")
    if len(payload) > MOST_FRAME_BYTES:
        message = f"it reported {len(payload) >> 20} MiB; the most is {MOST_FRAME_BYTES >> 20} MiB"
        return encode_report({"outcome": "app_failed", "message": message}, "")
    return payload


_writing = _thread.allocate_lock()
"""Threads of the user's code report progress too."""
