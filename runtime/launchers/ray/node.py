"""The actor of a run on a node of the cluster: it starts the shim as a fresh process and waits for it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from runtime.launchers.ray import detach
from runtime.launchers.ray.secret_rotation import read_rotated
from runtime.shim.tree_walk import remove_folder

FOLDER: Final = "runtime-ray-"
"""Prefix of the temporary folders' names."""
OF_WORKER: Final = frozenset(
    {"PYTHONBREAKPOINT", "RAY_CLIENT_MODE", "RAY_JOB_ID", "RAY_LD_PRELOAD_ON_WORKERS", "RAY_RAYLET_PID", "SPT_NOENV"}
)
"""Variables that Ray sets for its own worker, which a command must not take for its own."""


class Node:
    """One node of one run. Every method may be called again, and from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lifeline: int | None = None
        self._report: int | None = None
        self._code: int | None = None

    def where(self) -> dict[str, Any]:
        """Where this actor is."""
        import ray

        return {
            "host": os.uname().nodename,
            "address": ray.util.get_node_ip_address(),
            "node": ray.get_runtime_context().get_node_id(),
            "worker": os.environ.get("TPU_WORKER_ID"),
        }

    def run(self, shim: bytes, job: str, root: str, words: list[str], env: Mapping[str, str]) -> int:
        """Run the shim, once however often this is called, and return its exit code.

        `root` is the record root, `words` are what follows the shim's folder.
        """
        with self._lock:
            if self._code is None:
                self._code = self._run(shim, job, root, words, env)
            return self._code

    def stop(self) -> None:
        """Send TERM to the shim, which ends its command within the grace. Nothing if there is none."""
        lifeline = self._lifeline
        if lifeline is not None:
            os.write(lifeline, b"T")

    def _run(self, shim: bytes, job: str, root: str, words: list[str], env: Mapping[str, str]) -> int:
        own = tempfile.mkdtemp(prefix=FOLDER)
        try:
            program = Path(own, "shim.py")
            program.write_bytes(shim)
            if "--bucket" in words:
                folder, log = f"{own}/{job}", ""
                Path(folder).mkdir(0o700)
            else:
                folder = f"{root}/jobs/{job}"
                log = f"{folder}/shim.log"
            return self._guard([sys.executable, str(program), folder, *words], log, env)
        finally:
            remove_folder(own)

    def _guard(self, words: list[str], log: str, env: Mapping[str, str]) -> int:
        ours, its = os.pipe(), os.pipe()
        try:
            subprocess.run(
                [sys.executable, detach.__file__, str(ours[0]), str(its[1]), log, *words],
                pass_fds=(ours[0], its[1]),
                env={**_inherited(), **read_rotated(), **env},
                check=True,
            )
        finally:
            os.close(ours[0])
            os.close(its[1])
        self._lifeline = ours[1]
        with os.fdopen(its[0], "rb") as report:
            said = report.read()
        return int(said) if said else 137


def _inherited() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in OF_WORKER}
