"""A real Slurm for the tests: found, started by `scripts/slurm`, and used."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Self

from tests.ports import Ports

SCRIPT = Path(__file__).parents[1] / "scripts" / "slurm"
INSTALL = "scripts/slurm install"


def find_missing() -> str | None:
    """Name the missing parts for a Slurm; None if nothing is missing."""
    if os.geteuid() != 0:
        return "Slurm (starting it needs root)"
    packages = _script("status").stdout.strip().removeprefix("packages: ")
    return None if packages == "installed" else f"Slurm (without {packages.removeprefix('missing ')})"


class Slurm:
    """Four nodes in a private folder. They end with this process, even if it is killed."""

    def __init__(self, *, accounting: bool = True, **settings: object) -> None:
        # Short because of munge's socket: a pytest path can exceed the 107 characters of a socket's name.
        self.folder = Path(tempfile.mkdtemp(prefix="rr-slurm-"))
        self.conf = self.folder / "lab" / "slurm.conf"
        self._accounting = accounting
        self._ports = Ports(20)
        self._settings = settings

    def start(self) -> Self:
        options = ["--owner", str(os.getpid()), "--port", str(self._ports.first)]
        options += [] if self._accounting else ["--without-accounting"]
        for name, value in self._settings.items():
            options += ["--set", f"{name}={value}"]
        done = _script("start", *options, str(self.folder / "lab"))
        if done.returncode != 0:
            self.stop()
            raise RuntimeError(f"Slurm did not start (exit code {done.returncode}): {done.stderr}")
        return self

    def stop(self) -> None:
        """Stop it; stopping twice changes nothing."""
        _script("stop", str(self.folder / "lab"))
        shutil.rmtree(self.folder, ignore_errors=True)
        self._ports.close()

    @property
    def environment(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.conf)}

    def run(self, *words: str, check: bool = True) -> str:
        """Run a Slurm command and return its output."""
        done = subprocess.run(
            words, capture_output=True, text=True, check=False, env={**os.environ, **self.environment}, timeout=300
        )
        if check and done.returncode != 0:
            raise RuntimeError(f"{words} ended with {done.returncode}: {done.stderr}")
        return done.stdout

    def node(self, number: int, way: str) -> None:
        """Start (`up`) or kill (`down`) the daemon of a node."""
        done = _script("node", str(self.folder / "lab"), str(number), way)
        assert done.returncode == 0, done.stderr

    def jobs(self, job: str) -> list[str]:
        """Return the native ids of all jobs whose name begins with `job`, from the queue and accounting together."""
        queue = self.run("squeue", "-h", "-t", "all", "-o", "%F|%j").splitlines()
        history = (
            self.run("sacct", "-X", "-n", "-P", "-D", "--format=JobID,JobName").splitlines() if self._accounting else []
        )
        found = set()
        for line in [*queue, *history]:
            number, _, name = line.partition("|")
            if name.startswith(job):
                found.add(number.partition("_")[0])
        return sorted(found, key=int)

    def clear(self) -> None:
        self.run("scancel", "-u", "root", "--full", check=False)


def _script(*words: str) -> subprocess.CompletedProcess[str]:
    # Files rather than pipes, which the daemons left behind would keep open.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        done = subprocess.run([str(SCRIPT), *words], stdout=out, stderr=err, stdin=subprocess.DEVNULL, check=False)
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(done.args, done.returncode, out.read(), err.read())
