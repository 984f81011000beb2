"""Process trees: their CPU time and memory, and how to end them.

CPU time is read from /proc and includes children that have been reaped, so nothing a peer starts and drops is missed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

_TICKS: Final = os.sysconf("SC_CLK_TCK")
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
ROOT: Final = Path(__file__).resolve().parent.parent
"""The checkout: everything runs with this as its working directory and on its import path."""


def adopt_orphans() -> None:
    """Make this process the new parent of orphaned descendants, so that `end_descendants` finds them."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent() -> None:
    """Have the kernel send SIGTERM to this process when its parent dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment of every measured process: byte code is written, and none of the user's own settings apply."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED", "PYTHONPROFILEIMPORTTIME", "PYTHONDEVMODE")
        and not name.startswith(("RUNTIME_", "RAY_", "CELERY_"))
    }
    return {
        **kept,
        "PYTHONPATH": str(ROOT),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
        "NO_COLOR": "1",
        **(extra or {}),
    }


def executable(name: str) -> str:
    """Path of a command in the environment that runs this process."""
    return str(Path(sys.executable).parent / name)


def start(command: Sequence[str], *, log: Path, extra: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own; its output goes to `log`."""
    with log.open("ab") as output:
        return subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment(extra),
            cwd=ROOT,
            start_new_session=True,
        )


def _stats() -> dict[int, tuple[int, float, str]]:
    """pid → parent, CPU seconds with reaped children, state."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            continue
        found[int(folder.name)] = (int(fields[1]), sum(map(int, fields[11:15])) / _TICKS, fields[0].decode())
    return found


def tree(roots: Iterable[int]) -> list[int]:
    """Living roots and all their descendants."""
    stats = _stats()
    return _tree(roots, stats)


def _tree(roots: Iterable[int], stats: Mapping[int, tuple[int, float, str]]) -> list[int]:
    children: dict[int, list[int]] = {}
    for pid, (parent, _, _) in stats.items():
        children.setdefault(parent, []).append(pid)
    found: list[int] = []
    waiting = [pid for pid in roots if pid in stats]
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found.append(pid)
            waiting += children.get(pid, [])
    return found


def cpu_seconds(roots: Iterable[int]) -> float:
    """User and system time of the trees, reaped children included."""
    stats = _stats()
    return sum(stats[pid][1] for pid in _tree(roots, stats))


def pss_bytes(roots: Iterable[int]) -> int:
    """Memory of the trees, shared pages counted proportionally."""
    total = 0
    for pid in tree(roots):
        with contextlib.suppress(OSError, ValueError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    return total


def stop_tree(process: subprocess.Popen[bytes], *, grace_s: float = 5.0) -> None:
    """Send SIGTERM to the root, and after the grace SIGKILL to the rest of its tree."""
    pids = tree([process.pid])
    if process.poll() is None:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    kill([*pids, *tree([process.pid])])
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5)


def kill(pids: Iterable[int], number: int = signal.SIGKILL) -> None:
    for pid in set(pids):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def end_descendants(*, but: Iterable[int] = ()) -> int:
    """SIGKILL everything below this process except the trees of `but`; returns how many processes that were."""
    spared = {os.getpid(), *tree(but)}
    ended: set[int] = set()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        stats = _stats()
        left = [pid for pid in _tree([os.getpid()], stats) if pid not in spared]
        living = [pid for pid in left if stats[pid][2] != "Z"]
        ended.update(living)
        kill(living)
        for pid in left:
            with contextlib.suppress(ChildProcessError, OSError):
                os.waitpid(pid, os.WNOHANG)
        if not left:
            break
        time.sleep(0.02)
    return len(ended)
