"""A process for each task, its result through a pipe: the limit for a fork server.

Run as a program, because the parent has to be small: a fork copies page tables.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

_RESULT = b'{"state":"succeeded","value":null}' * 4


def forks(folder: Path, *, n: int, body: str = "noop", importing: bool = False) -> dict[str, float]:
    """With `importing`, each child imports the task's module, as it must if the parent never loads user code."""
    from benchmarks.board import Board
    from benchmarks.bodies import VARIABLE
    from benchmarks.measure import in_new_process
    from benchmarks.processes import environment

    board = Board(folder / "board", n)
    command = [sys.executable, "-m", "benchmarks.limits.fork", str(n), body, str(int(importing))]
    in_new_process(command, environ=environment({VARIABLE: str(board.path)}))
    return {"rate": n / board.span(range(n)), "lost": float(board.lost(range(n)))}


def popens(folder: Path, *, n: int) -> dict[str, float]:
    """subprocess.Popen of `true`, waited for."""
    import subprocess

    began = time.perf_counter()
    for _ in range(n):
        subprocess.Popen(["/bin/true"]).wait()
    return {"rate": n / (time.perf_counter() - began)}


def _main(n: int, body: str, importing: bool) -> None:
    if not importing:
        from benchmarks import bodies

        bodies.attach()
    for index in range(n):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            from benchmarks import bodies

            getattr(bodies, body)(index)
            os.write(write, _RESULT)
            os._exit(0)
        os.close(write)
        while os.read(read, 65536):
            pass
        os.close(read)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2], sys.argv[3] == "1")
