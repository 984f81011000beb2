"""Keeps an attempt from signalling its worker, to find out which of a worker's attempts ended it.

No host records the sender of a SIGKILL. An attempt whose worker was lost again and again on one host runs behind a filter
of system calls: a signal to its worker or guardian, or to all processes at once, is refused (EPERM), which shows in the
attempt's own error. The kernel is asked to take its memory first. docs/decisions/retry-budgets.md has the reasons.
"""

from __future__ import annotations

import os
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection

VARIABLE = "RUNTIME_FENCED"
"""The variable with the worker's pid, in the environment of an attempt to fence."""

PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 22, 38, 2
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050001  # SECCOMP_RET_ALLOW; SECCOMP_RET_ERRNO with EPERM
_NUMBER_AT, _ARCHITECTURE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16

# kill, tkill, tgkill, rt_sigqueueinfo, rt_tgsigqueueinfo, pidfd_open: each has the pid as its first argument.
_CALLS = {
    "x86_64": (0xC000003E, (62, 200, 234, 129, 297, 434)),
    "aarch64": (0xC00000B7, (129, 130, 131, 138, 240, 434)),
}


def put_up(worker: int) -> bool:
    """Refuse signals of this process and its descendants to worker and guardian; False if the system has no such filter.

    The fence cannot be taken down, and programs that change their user (sudo, mount helpers) lose that right behind it.
    """
    try:
        with open("/proc/self/oom_score_adj", "w") as file:  # noqa: PTH123 (pathlib is too large for attempts)
            file.write("1000")
    except OSError:
        pass
    guardian = os.getppid()
    groups = {-os.getpgid(pid) for pid in (worker, guardian)}
    return _install(_program({worker, guardian, -1, *groups} - {0, -os.getpgrp()}))


def _program(pids: Collection[int]) -> bytes:
    """Return a classic BPF program; empty on a machine whose system calls are unknown here."""
    architecture, calls = _CALLS.get(os.uname().machine, (0, ()))
    if not calls:
        return b""
    lines = [(_LOAD, 0, 0, _ARCHITECTURE_AT)]
    # Jumps count the lines they skip. The last two lines are: allow, refuse.
    end = 4 + len(calls) + len(pids)
    lines.append((_JUMP_IF_EQUAL, 0, end - len(lines) - 1, architecture))
    lines.append((_LOAD, 0, 0, _NUMBER_AT))
    load_pid = len(lines) + len(calls)
    for number, call in enumerate(calls):
        missed = 0 if number < len(calls) - 1 else end - len(lines) - 1
        lines.append((_JUMP_IF_EQUAL, load_pid - len(lines) - 1, missed, call))
    lines.append((_LOAD, 0, 0, _FIRST_ARGUMENT_AT))
    for pid in pids:
        lines.append((_JUMP_IF_EQUAL, end + 1 - len(lines) - 1, 0, pid & 0xFFFFFFFF))
    lines += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _REFUSE)]
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


def _install(program: bytes) -> bool:
    if not program or sys.platform != "linux":
        return False
    import ctypes

    prctl = ctypes.CDLL(None).prctl
    buffer = ctypes.create_string_buffer(program)
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer))
    if prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        return False
    return not prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.c_char_p(header), 0, 0)
