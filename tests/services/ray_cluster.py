"""A real Ray cluster on this machine: a head, and nodes that can be killed one by one, each with all of its processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.ports import Ports
from tests.services_support import PATIENCE_S, require, wait_until

# In the order of the ports of a node, after the base of the node.
_PORTS = (
    "node-manager-port",
    "object-manager-port",
    "dashboard-agent-listen-port",
    "dashboard-agent-grpc-port",
    "runtime-env-agent-port",
    "metrics-export-port",
    "min-worker-port",
)
SITE = Path(__file__).parent / "lab/site"
ENVIRON = {
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_metrics_report_interval_ms": "60000",
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(SITE),
    "RAY_agent_register_timeout_ms": "240000",
    # A token in the user's home, which `ray.init` leaves, would have every head ask for it.
    "RAY_AUTH_MODE": "disabled",
    "RAY_gcs_server_port_wait_time_s": "240",
    "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "240",
    "RAY_worker_register_timeout_seconds": "240",
    "RAY_health_check_timeout_ms": "60000",
}
"""Settings under which a node takes less of this machine, and has the time that it needs where other tests keep it busy.
One that was killed refuses connections, which the head notices as soon as otherwise."""
HEAD_CPUS, NODE_CPUS = 4, 6
"""CPUs of the head that files share, and of its node 1."""
_STARTED = "Ray runtime started."
_WORKERS = 80
_STEP = 100
_NODES = 8


class RayCluster:
    """A head on 127.0.0.1; node K listens on addresses and ports of its own."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        require("unshare", shutil.which("unshare"), "apt-get install util-linux")
        self._ray = Path(sys.executable).with_name("ray")
        require("ray", self._ray.exists(), "make test")
        self._environ = {**os.environ, **ENVIRON, **environ}
        # Unix sockets have short names, and a folder of a test has a long one.
        self._folder = tempfile.mkdtemp(prefix="ray-")
        self._ports = Ports(_STEP * (_NODES + 1))
        self._base = self._ports.first
        self._going: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._base + 1}"

    def start_head(self, cpus: int) -> None:
        words = ["--head", f"--port={self._base}", "--dashboard-host=127.0.0.1", f"--dashboard-port={self._base + 1}"]
        words += [
            "--include-dashboard=true",
            f"--temp-dir={self._folder}",
            f"--ray-client-server-port={self._base + 2}",
        ]
        self._await_start(0, lambda: self._start(0, cpus, words, {}), lambda: self.count_nodes() == 1)

    def start_node(
        self, number: int, cpus: int, *, labels: Mapping[str, str] | None = None, **resources: float
    ) -> None:
        words = [f"--address=127.0.0.1:{self._base}"]
        # The head may count the last node of this number for a while.
        before = self._log(number).count(_STARTED)
        self._await_start(
            number,
            lambda: self._start(number, cpus, words, resources, labels),
            lambda: self._log(number).count(_STARTED) > before,
        )

    def kill(self, number: int) -> None:
        """End a machine without notice."""
        process = self._going.pop(number)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(PATIENCE_S)

    def close(self) -> None:
        for number in list(self._going):
            self.kill(number)
        self._ports.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def read(self, path: str) -> Any:
        """An answer of the head's API, None if it gives none."""
        try:
            with urllib.request.urlopen(f"{self.address}{path}", timeout=10) as answer:
                return json.loads(answer.read())
        except (OSError, urllib.error.URLError, ValueError):
            return None

    def tell(self) -> str:
        """What the head says, for messages of failed tests."""
        return tell_of_jobs(self.read)

    def count_nodes(self) -> int:
        """How many nodes the head counts as alive."""
        found = self.read("/nodes?view=summary")
        return sum(each["raylet"].get("state") == "ALIVE" for each in found["data"]["summary"]) if found else 0

    def _await_start(self, number: int, start: Callable[[], None], has_started: Callable[[], bool]) -> None:
        def look() -> bool:
            if number not in self._going or self._going[number].poll() is not None:
                # The first time, or Ray gave up after 30 s on a machine that is busy with other tests.
                start()
            return has_started()

        assert wait_until(look, timeout_s=3 * PATIENCE_S, every_s=0.5), f"{self._log(number)}\n{self.tell()}"

    def _start(
        self,
        number: int,
        cpus: int,
        words: list[str],
        resources: Mapping[str, float],
        labels: Mapping[str, str] | None = None,
    ) -> None:
        first = self._base + _STEP * number + 10
        ports = [f"--{name}={first + at}" for at, name in enumerate(_PORTS)]
        words = [*words, *ports, f"--max-worker-port={first + len(_PORTS) + _WORKERS}", f"--num-cpus={cpus}"]
        words += [f"--node-ip-address=127.0.0.{number + 1}", "--num-gpus=0", "--object-store-memory=80000000"]
        # Nobody reads what it would send to drivers, and it takes a second of a CPU for each node.
        words += ["--include-log-monitor=false"]
        words += [f"--resources={json.dumps(resources)}"] if resources else []
        with Path(f"{self._folder}/{number}.log").open("ab") as log:
            self._going[number] = subprocess.Popen(
                # `ray start` leaves its children alive when it is killed; the first process of a namespace does not.
                [
                    "unshare",
                    "-U",
                    "-r",
                    "-p",
                    "-f",
                    "--kill-child",
                    "--mount-proc",
                    self._ray,
                    "start",
                    "--block",
                    *words,
                ],
                env={**self._environ, **({"RAY_OVERRIDE_LABELS": json.dumps(labels)} if labels else {})},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _log(self, number: int) -> str:
        path = Path(f"{self._folder}/{number}.log")
        return path.read_text(errors="replace") if path.exists() else ""


def tell_of_jobs(read: Callable[[str], Any]) -> str:
    """Jobs, their drivers' logs, actors and tasks that have not ended, and resources, as a head's API tells them."""
    jobs = {job["submission_id"]: job["status"] for job in read("/api/jobs/") or ()}
    drivers = {job: read(f"/api/jobs/{job}/logs") for job, status in jobs.items() if status in ("PENDING", "RUNNING")}
    listed = [read(f"/api/v0/{what}?detail=1&limit=1000") for what in ("actors", "tasks", "workers")]
    over = ("DEAD", "FINISHED", "FAILED")
    found = [
        {name: each[name] for name in each if each[name] not in (None, "", {}, [])}
        for answer in listed
        for each in ((answer or {}).get("data") or {}).get("result", {}).get("result", ())
        if each.get("state") not in over and each.get("is_alive", True)
    ]
    cluster = read("/api/cluster_status")
    return "\n".join(map(str, (jobs, drivers, *found, cluster)))
