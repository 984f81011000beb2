"""Programs in copies of a Python process that has loaded the client: as apart as processes, without loading it each time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

COMMAND = "import sys; from runtime.cli.main import main; sys.exit(main(sys.argv[1:]))"
"""The program that is `runtime` as typed."""

# A fork of the process of the tests would have copies of locks that their threads hold.
_ORIGINAL = """
import json, os, sys
import runtime.cli.launch, runtime.cli.main, runtime.cli.retry, runtime.faults, runtime.launchers.local.launcher
for line in sys.stdin:
    asked = json.loads(line)
    copy = os.fork()
    if not copy:
        for number, path in enumerate((os.devnull, asked["out"], asked["err"])):
            os.dup2(os.open(path, os.O_RDWR), number)
        os.chdir(asked["folder"])
        os.environ.clear()
        os.environ.update(asked["environ"])
        runtime.faults.arm()
        sys.argv[1:] = asked["words"]
        exec(asked["program"], {"__name__": "__main__"})
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]), flush=True)
"""


class Copies:
    """The process that is copied; it starts with the first program."""

    def __init__(self) -> None:
        self._original: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._original is not None:
            self._original.communicate()

    def run(
        self, program: str, words: Sequence[str], environ: Mapping[str, str] = os.environ
    ) -> subprocess.CompletedProcess[str]:
        """Run a program with these arguments in this process's folder; the copy reads its fault points again."""
        if self._original is None:
            self._original = subprocess.Popen(
                [sys.executable, "-c", _ORIGINAL],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=Path(__file__).parents[1],
                # No folder of the first test, which would end all processes whose variables name it.
                env={"PATH": os.environ["PATH"]},
            )
        assert self._original.stdin
        assert self._original.stdout
        with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
            asked = {"program": program, "words": list(words), "environ": dict(environ), "folder": str(Path.cwd())}
            self._original.stdin.write(json.dumps({**asked, "out": out.name, "err": err.name}) + "\n")
            self._original.stdin.flush()
            code = int(self._original.stdout.readline())
            return subprocess.CompletedProcess(list(words), code, out.read(), err.read())
