"""CPU time of short commands, ours and the minimum that a command line framework costs."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.processes import ROOT, environment, executable

_HERE = Path(__file__).parent


def commands(folder: Path, *, n: int = 5) -> dict[str, float]:
    """Milliseconds of user and system time of each, all once and then all again; medians."""
    runtime = executable("runtime")
    asked: dict[str, Sequence[str]] = {
        "argparse": [sys.executable, str(_HERE / "cli_argparse.py"), "--level", "3"],
        "argparse_help": [sys.executable, str(_HERE / "cli_argparse.py"), "--help"],
        "typer": [sys.executable, str(_HERE / "cli_typer.py"), "--level", "3"],
        "version": [runtime, "--version"],
        "worker_help": [runtime, "worker", "--help"],
        "help": [runtime, "--help"],
        "status": [runtime, "status"],
        "submit_help": [runtime, "submit", "--help"],
        "launch_help": [runtime, "launch", "--help"],
        "queue_list": [runtime, "queue", "list"],
    }
    environ = environment({"RUNTIME_DATA_DIR": str(folder), "XDG_CONFIG_HOME": str(folder)})
    times: dict[str, list[float]] = {name: [] for name in asked}
    for turn in range(n + 1):
        for name, command in asked.items():
            spent = _cpu_ms(command, environ)
            if turn and spent is not None:
                times[name].append(spent)
    return {f"{name}_ms": statistics.median(found) for name, found in times.items() if found}


def _cpu_ms(command: Sequence[str], environ: dict[str, str]) -> float | None:
    """None if the command failed."""
    null = os.open(os.devnull, os.O_RDWR)
    try:
        actions = [(os.POSIX_SPAWN_DUP2, null, number) for number in range(3)]
        pid = os.posix_spawn(command[0], list(command), {**environ, "PWD": str(ROOT)}, file_actions=actions)
    finally:
        os.close(null)
    _, status, usage = os.wait4(pid, 0)
    return (usage.ru_utime + usage.ru_stime) * 1000 if os.waitstatus_to_exitcode(status) == 0 else None
