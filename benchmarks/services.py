"""The services that peers need, each started once per run on a free port of this machine and stopped at its end."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.processes import environment, kill, tree
from tests.services_support import PubsubEmulator, RedisServer, find_emulator_jar, find_free_port, wait_until
from tests.slurm_support import Slurm, find_missing

INSTALL = {
    "redis": "make services",
    "pubsub": "make services",
    "postgres": "sudo apt-get install postgresql",
    "slurm": "scripts/slurm install",
}


class ServiceMissing(Exception):
    """A service is not installed; the text names it and the command that installs it."""


class Services:
    """Starts services on request; measurements get `addresses`."""

    def __init__(self) -> None:
        self.addresses: dict[str, Any] = {}
        self.missing: dict[str, str] = {}
        self.pids: list[int] = []
        self._stack = ExitStack()

    def need(self, name: str) -> None:
        """Start the service unless it runs. Raises `ServiceMissing` at each call if it is not installed."""
        if name in self.missing:
            raise ServiceMissing(self.missing[name])
        if name in self.addresses:
            return
        try:
            getattr(self, f"_start_{name}")()
        except ServiceMissing as problem:
            self.missing[name] = str(problem)
            raise
        except (OSError, RuntimeError, subprocess.SubprocessError) as problem:
            self.missing[name] = f"{name} did not start: {problem}"
            raise ServiceMissing(self.missing[name]) from problem

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Services:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start_redis(self) -> None:
        if not shutil.which("redis-server"):
            raise ServiceMissing(f"Redis is not installed: `{INSTALL['redis']}`")
        server = RedisServer().start()
        self._stack.callback(server.stop)
        self._keep(server.pid)
        self.addresses |= {"redis": server.url, "redis_pid": server.pid}

    def _start_pubsub(self) -> None:
        if not shutil.which("java") or find_emulator_jar() is None:
            raise ServiceMissing(f"the Pub/Sub emulator is not installed: `{INSTALL['pubsub']}`")
        emulator = PubsubEmulator().start()
        self._stack.callback(emulator.stop)
        self._keep(emulator.pid)
        self.addresses |= {"pubsub": emulator.address, "pubsub_pid": emulator.pid}

    def _start_postgres(self) -> None:
        programs = _find_postgres()
        if programs is None:
            raise ServiceMissing(f"PostgreSQL is not installed: `{INSTALL['postgres']}`")
        folder = Path(tempfile.mkdtemp(prefix="postgres-", dir="/tmp"))
        self._stack.callback(shutil.rmtree, folder, ignore_errors=True)
        as_user = _as_other_user(folder)
        data, port = folder / "data", find_free_port()
        subprocess.run(
            [*as_user, str(programs / "initdb"), "-D", str(data), "-U", "benchmark", "-A", "trust", "-N", "-E", "UTF8"],
            check=True,
            capture_output=True,
            env=environment({"LC_ALL": "C"}),
            cwd=folder,
        )
        # synchronous_commit is on, as everywhere by default.
        server = subprocess.Popen(
            [*as_user, str(programs / "postgres"), "-D", str(data), "-h", "127.0.0.1", "-p", str(port), "-k", ""],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment({"LC_ALL": "C"}),
            cwd=folder,
            start_new_session=True,
        )
        self._stack.callback(_end_server, server)
        self._keep(server.pid)
        ready = [str(programs / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(port)]
        if not wait_until(lambda: subprocess.run(ready, check=False).returncode == 0, timeout_s=30, every_s=0.1):
            raise ServiceMissing("PostgreSQL did not start in 30 s")
        self.addresses["postgres"] = f"postgresql://benchmark@127.0.0.1:{port}/postgres"

    def _start_slurm(self) -> None:
        if missing := find_missing():
            raise ServiceMissing(f"{missing} is not here: `{INSTALL['slurm']}`")
        before = set(tree([os.getpid()]))
        lab = Slurm().start()
        self._stack.callback(lab.stop)
        # Its daemons leave the process that started them, so this process becomes their parent.
        self.pids += [pid for pid in tree([os.getpid()]) if pid not in before]
        self.addresses["slurm"] = str(lab.conf)

    def _keep(self, pid: int | None) -> None:
        if pid is not None:
            self.pids.append(pid)


def _find_postgres() -> Path | None:
    """The folder of the newest server's programs."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: int(path.parts[-3]))
    if found:
        return found[-1].parent
    named = shutil.which("postgres")
    return Path(named).resolve().parent if named else None


def _as_other_user(folder: Path) -> list[str]:
    """PostgreSQL refuses to run as root; its package has created a user for it."""
    if os.geteuid() != 0:
        return []
    if not shutil.which("setpriv"):
        raise ServiceMissing("PostgreSQL does not run as root, and `setpriv` is not here: `apt-get install util-linux`")
    try:
        shutil.chown(folder, "postgres", "postgres")
    except LookupError:
        raise ServiceMissing("PostgreSQL does not run as root, and there is no user `postgres`") from None
    folder.chmod(0o755)
    return ["setpriv", "--reuid", "postgres", "--regid", "postgres", "--clear-groups"]


def _end_server(server: subprocess.Popen[bytes]) -> None:
    pids = tree([server.pid])
    server.terminate()
    try:
        server.wait(5)
    except subprocess.TimeoutExpired:
        pass
    kill([*pids, *tree([server.pid])])
    server.wait()
