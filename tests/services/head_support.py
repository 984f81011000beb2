"""A real Ray head by our own scripts, whose autoscaler makes TPUs through the fake API that boot by our own scripts too.

    with LabHead({"v4": pool(max=2, cpus=1)}) as head:
        job = …  # launched on {"kind": "ray", "address": head.address, "python": sys.executable}
        head.preempt(head.nodes()[0])

`environment` is that of commands such as `runtime cluster reap`, and `ssh` a real sshd that stands for the head, reached
through a stand-in for gcloud.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from infra.machine.head_agent import digest
from infra.render import units
from infra.render.autoscaler import render_autoscaler
from infra.render.cluster import HEAD_TYPE, RayCluster
from infra.render.startup import head_metadata, render_contract
from infra.settings.model import TpuCapacity, TpuPoolSettings
from runtime.launchers.ray.resource_request import count_hosts
from runtime.outputs import encode_outputs, parse_outputs
from runtime.testing.launcher_bench import Bench, LauncherCase
from tests.fakes.tpu import TpuServer, names_of
from tests.infra.render_support import V4, sample_cluster
from tests.services.gcloud_support import add_gcloud
from tests.services.lab_machines import REPOSITORY, Lab, Machine
from tests.services.ray_cluster import SITE, tell_of_jobs
from tests.services_support import PATIENCE_S, require, wait_until
from tests.ssh_support import SshServer

HEAD: str = "head"
"""The head's name in the lab."""
_LABELS = {"ray-node-status": "up-to-date", "ray-node-type": "head", "ray-user-node-type": HEAD_TYPE}
_GONE = ("PREEMPTED", "TERMINATED", "STOPPED", "DELETING")
_LOOK_S = 0.1


def pool(accelerator: str = "v4-8", *, min: int = 0, max: int = 2, cpus: int = 2, **fields: Any) -> TpuPoolSettings:
    fields = {"capacity": TpuCapacity.PREEMPTIBLE, **fields}
    return dataclasses.replace(V4, accelerator=accelerator, min=min, max=max, cpus=cpus, **fields)


def require_ray() -> None:
    """Skip or fail without the packages that a head needs."""
    for package in ("ray", "googleapiclient", "google_auth_httplib2"):
        require(f"the package `{package}`", importlib.util.find_spec(package), "make test")


class LabHead:
    """The head, and the nodes that Google has for it; everything ends with this process."""

    def __init__(
        self,
        pools: Mapping[str, TpuPoolSettings],
        *,
        idle_minutes: float = 10,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.cluster: RayCluster = sample_cluster(
            pools=dict(pools), idle_minutes=idle_minutes, secrets=(), cloud_logging=False
        )
        self.lab = Lab({**(environ or {}), "AUTOSCALER_UPDATE_INTERVAL_S": "2", "AUTOSCALER_NODE_SSH_INTERVAL_S": "2"})
        self.folder: Path = self.lab.folder
        self.server = TpuServer(project=self.cluster.project, zone=self.cluster.zone, page=1000)
        self.server.give_addresses = self._give_addresses
        self.server.now = _now
        self.made: list[str] = []
        """Names of all nodes that were ever ready."""
        self._machines: dict[str, list[str]] = {}
        self._closed = threading.Event()
        self._watch = threading.Thread(target=self._follow_google, daemon=True)

    def __enter__(self) -> Self:
        try:
            self._begin()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def bench(self, folder: Path) -> Iterator[Bench]:
        """Jobs on this head, with their records in `folder`."""
        case = LauncherCase(
            kind="ray",
            settings={"address": self.address, "python": sys.executable},
            records=str(folder / "records"),
            patience_s=PATIENCE_S,
            tell=self.tell,
        )
        made = Bench(case, folder / "bench")
        try:
            yield made
        finally:
            made.close()

    # the head

    @property
    def head(self) -> Machine:
        return self.lab.machines[HEAD]

    @property
    def address(self) -> str:
        """URL of the dashboard and of the API for jobs."""
        return f"http://127.0.0.1:{self.head.ports['dashboard']}"

    @property
    def contract(self) -> Path:
        """The stack's contract, with this head's ports."""
        return self.folder / "contract.json"

    def kill_head(self) -> None:
        """End Ray on the head without notice, as if its machine were off."""
        with self.lab.lock:
            self.head.stop()

    def start_head(self) -> None:
        """Start Ray on the head, and wait until it answers and counts itself."""
        self.lab.systemctl(HEAD, "start", units.HEAD_UNIT)
        self.await_head()

    def await_head(self) -> None:
        assert wait_until(lambda: self.count_hosts() is not None), self.log()

    def log(self) -> str:
        """What the head printed, for messages."""
        path = self.head.log
        return path.read_text(errors="replace")[-4000:] if path.exists() else ""

    def tell(self) -> str:
        """What Google, Ray and its autoscaler say, for messages of failed tests."""
        logs = self.head.root.glob("var/lib/runtime-ray/session_2*/logs/monitor.log")
        newest = max(logs, key=lambda path: path.stat().st_mtime, default=None)
        google = {name: (node["state"], len(self.hosts(names_of([name])[0]))) for name, node in self._list_google()}
        said = newest.read_text(errors="replace")[-5000:] if newest else self.log()
        return f"{google}\n{self.count_hosts()} hosts in Ray\n{tell_of_jobs(self.read)}\n{said}"

    def read(self, path: str) -> Any:
        """An answer of the head's API, None if it gives none."""
        try:
            with urllib.request.urlopen(f"{self.address}{path}", timeout=10) as answer:
                return json.loads(answer.read())
        except (OSError, urllib.error.URLError, ValueError):
            return None

    def count_hosts(self) -> int | None:
        """How many hosts the head counts as alive beside itself; None if it does not answer, or does not count itself."""
        found = self.read("/nodes?view=summary")
        if found is None:
            return None
        alive = [each["raylet"] for each in found["data"]["summary"] if each["raylet"].get("state") == "ALIVE"]
        return len(alive) - 1 if any(each.get("isHeadNode") for each in alive) else None

    # nodes

    def nodes(self) -> list[str]:
        """Names of the nodes that Google lists as ready, oldest first."""
        return names_of([name for name, each in self._list_google() if each["state"] == "READY"])

    def list_strays(self) -> list[str]:
        """Nodes that Google lists without a machine behind them: preempted ones that nobody removed."""
        return [name for name in names_of([name for name, _ in self._list_google()]) if not self.hosts(name)]

    def hosts(self, name: str) -> list[Machine]:
        """The machines of a node that are on."""
        return [self.lab.machines[each] for each in self._machines.get(name, ()) if each in self.lab.machines]

    def hold_creation(self) -> None:
        """Let Google make no node ready until `finish_creation`."""
        self.server.slow_creation = True

    def finish_creation(self) -> None:
        self.server.slow_creation = False
        for _, node in self._list_google():
            if node["state"] == "CREATING":
                node["state"] = "READY"

    def preempt(self, name: str) -> None:
        """Kill a node's machines without notice; Google lists it as preempted."""
        self._switch_off(name)
        self.server.preempt(f"{self.server.parent}/nodes/{name}")

    def clear(self) -> None:
        """Take all nodes and members away, and forget that they were made, for the next test."""
        self.server.nodes.clear()
        assert wait_until(lambda: not self._machines_on() and self.count_hosts() == 0), self.tell()
        self.made.clear()
        self.server.created.clear()

    def _machines_on(self) -> list[str]:
        return [name for name in self._machines if self.hosts(name)]

    def kill_host(self, name: str, host: int) -> None:
        """Kill one machine of a node without notice; Google still lists the node as ready."""
        self.lab.remove(f"{name}-{host}")

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run `runtime cluster WORDS` as an operator; `exec` and the like need `ssh_words` too."""
        return subprocess.run(
            [sys.executable, "-m", "runtime", "cluster", *words],
            env=self.environment,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    def reap(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run the reaper once, as the head's timer does."""
        return self.run("reap", "--state", str(self.folder / "reaper"), *words)

    @property
    def environment(self) -> dict[str, str]:
        """Variables of an operator's commands: the contract, the fake APIs, and gcloud."""
        programs = self.folder / "programs"
        return {
            **os.environ,
            "PATH": f"{programs}:{os.environ['PATH']}",
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "RUNTIME_GOOGLE_API": self.server.url,
            "RUNTIME_OUTPUTS": str(self.contract),
        }

    @cached_property
    def ssh(self) -> SshServer:
        """An sshd on the head; its first use starts it. Its sessions have the head's paths and `sudo systemctl`."""
        server = SshServer(self.folder / "ssh")
        server.set_session(f'exec {self.lab.login_of(self.head.address)} "$SSH_ORIGINAL_COMMAND"')
        add_gcloud(self.folder / "programs", server, self.cluster.head, self.cluster.zone)
        server.start()
        return server

    @property
    def ssh_words(self) -> list[str]:
        """Options by which commands of `runtime cluster` reach the head: `--ssh-option=…`."""
        return [f"--ssh-option={word}" for word in self.ssh.options]

    # inside

    def _begin(self) -> None:
        self.server.start()
        head = self.lab.add(HEAD, self.lab.new_address())
        head.environ |= self._head_environment(head)
        self.server.add_instance(
            {"name": self.cluster.head, "labels": {"ray-cluster-name": self.cluster.name, **_LABELS}},
            ip=head.address,
            created=_now(),
        )
        autoscaler = render_autoscaler(self.cluster).replace(units.PRIVATE_KEY, f"{head.root}{units.PRIVATE_KEY}")
        sha = digest(autoscaler)
        outputs = parse_outputs(json.loads(render_contract(self.cluster, sha)))
        ours = replace(outputs.clusters[self.cluster.key], ports=head.ports)
        self.contract.write_text(encode_outputs(replace(outputs, clusters={self.cluster.key: ours})))
        self._watch.start()
        assert self.lab.boot(head, head_metadata(self.cluster, autoscaler, sha)).result(PATIENCE_S), self.log()
        self.server.guest_attributes[self.cluster.head] = dict(head.metadata.reported)
        self.await_head()

    def _head_environment(self, head: Machine) -> dict[str, str]:
        endpoints = {service: self.server.endpoint(service) for service in ("tpu", "compute")}
        return {
            "LAB_ENDPOINTS": json.dumps(endpoints),
            "PYTHONPATH": f"{SITE}:{REPOSITORY}",
            "RUNTIME_GOOGLE_API": self.server.url,
            "AUTOSCALER_METRIC_PORT": str(head.ports["autoscaler_metrics"]),
            "DASHBOARD_METRIC_PORT": str(head.ports["dashboard_metrics"]),
        }

    def _give_addresses(self, type_: str, number: int) -> list[str]:
        return [self.lab.new_address() for _ in range(count_hosts(type_)[0])]

    def _list_google(self) -> list[tuple[str, dict[str, Any]]]:
        while True:
            try:
                return list(self.server.nodes.items())
            except RuntimeError:  # it changed meanwhile
                continue

    def _follow_google(self) -> None:
        """Boot the machines of nodes that become ready, and switch off those of nodes that go."""
        while not self._closed.wait(_LOOK_S):
            there = {names_of([resource])[0]: node for resource, node in self._list_google()}
            for name, node in there.items():
                if node["state"] == "READY" and name not in self._machines:
                    self._switch_on(name, node)
            for name in list(self._machines):
                if name not in there or there[name]["state"] in _GONE:
                    self._switch_off(name)

    def _switch_on(self, name: str, node: Mapping[str, Any]) -> None:
        self.made.append(name)
        addresses = [each["ipAddress"] for each in node["networkEndpoints"]]
        self._machines[name] = [f"{name}-{number}" for number in range(len(addresses))]
        for number, address in enumerate(addresses):
            machine = self.lab.add(
                f"{name}-{number}",
                address,
                TPU_NAME=name,
                TPU_WORKER_ID=str(number),
                TPU_ACCELERATOR_TYPE=node["acceleratorType"],
                RUNTIME_GOOGLE_API=self.server.url,
            )
            self.lab.boot(machine, node["metadata"])

    def _switch_off(self, name: str) -> None:
        for each in self._machines.get(name, ()):
            self.lab.remove(each)

    def close(self) -> None:
        self._closed.set()
        if self._watch.is_alive():
            self._watch.join(PATIENCE_S)
        if "ssh" in vars(self):
            # Commands that a test killed leave theirs on the head.
            self.ssh.drop_connections()
            self.ssh.kill()
        self.lab.close()
        self.server.stop()


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
