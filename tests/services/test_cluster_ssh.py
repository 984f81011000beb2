"""`runtime cluster exec`, `status --tunnel` and `stop`, and the calls of launchers, through a real ssh and sshd; only
Google's proxy is a stand-in."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runtime.cli.clusters.stop import STOP_RAY
from runtime.clusters.ray_view import read_ray
from runtime.launchers.ray.client import RayJobs
from runtime.launchers.ray.settings import RayTarget
from runtime.outputs import encode_outputs
from runtime.stack.iap_ssh import HeadWay
from tests.cluster_support import CLUSTER, OUTPUTS, labels
from tests.fakes.faults import FaultyServer, Request, Response
from tests.fakes.tpu import TpuServer, names_of
from tests.services.gcloud_support import add_gcloud
from tests.services_support import find_free_port, wait_until
from tests.shim_support import PATIENCE_S, processes_with
from tests.ssh_support import SshServer

Cluster = Callable[..., Any]
"""Returns the process that ended, or with `wait=False` the one that runs."""


def can_connect(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


@pytest.fixture
def server() -> Iterator[TpuServer]:
    fake = TpuServer()
    fake.add_instance({"name": CLUSTER.head, "labels": labels(kind="head")})
    fake.start()
    yield fake
    fake.stop()


KILLED = """
import os, signal, sys
from runtime.stack.port_forward import open_forward
from runtime.stack.iap_ssh import HeadWay
port, head, zone, *options = sys.argv[1:]
with open_forward(HeadWay(head=head, project="p-1", zone=zone, dashboard=int(port), options=tuple(options))):
    os.kill(os.getpid(), signal.SIGKILL)
"""


class Dashboard(FaultyServer):
    def answer(self, request: Request) -> Response:
        summary = [{"raylet": {"nodeId": "aa", "nodeManagerAddress": "10.0.0.1", "state": "ALIVE"}}]
        data = {"summary": summary} if request.path.startswith("/nodes") else {"clusterStatus": None}
        return Response(200, {"Content-Type": "application/json"}, json.dumps({"data": data}).encode())


def read_port(dashboard: Dashboard) -> int:
    return int(dashboard.url.rpartition(":")[2])


@pytest.fixture
def dashboard() -> Iterator[Dashboard]:
    running = Dashboard()
    running.start()
    yield running
    running.stop()


@pytest.fixture
def cluster(ssh_server: SshServer, server: TpuServer, dashboard: Dashboard, tmp_path: Path) -> Cluster:
    """Run `runtime cluster …`; its head is the test's sshd, behind a stand-in for gcloud."""
    programs = tmp_path / "programs"
    add_gcloud(programs, ssh_server, CLUSTER.head, CLUSTER.zone)
    contract = tmp_path / "contract.json"
    each = replace(CLUSTER, ports={"dashboard": read_port(dashboard)})
    contract.write_text(encode_outputs(replace(OUTPUTS, clusters={"main": each})))

    environment = {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "RUNTIME_GOOGLE_API": server.url,
        "RUNTIME_OUTPUTS": str(contract),
    }

    def call(verb: str, *args: str, wait: bool = True) -> Any:
        options = [f"--ssh-option={word}" for word in ssh_server.options]
        words = [sys.executable, "-m", "runtime", "cluster", verb, *options, *args]
        process = subprocess.Popen(
            words,
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        if not wait:
            return process
        try:
            out, err = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    return call


def test_exec_runs_the_command_on_the_head_word_for_word(cluster: Cluster) -> None:
    done = cluster("exec", "--", "sh", "-c", 'printf "%s|" "$@"; exit 7', "sh", "a b", "it's", "$HOME")

    assert (done.returncode, done.stdout, done.stderr) == (7, "a b|it's|$HOME|", "")


def test_exec_on_a_node_uses_the_heads_key_and_quotes_for_both_shells(cluster: Cluster, ssh_server: SshServer) -> None:
    # `sudo` of the head prints its words, and runs the last one as the node's shell would.
    ssh_server.add_command("sudo", 'printf "%s " "$1" "$2" "$3"; for last; do :; done; eval "$last"')

    done = cluster("exec", "--node", "10.0.0.9", "--", "printf", "%s|", "a b", "it's")

    assert (done.returncode, done.stdout) == (0, "ssh -i /etc/runtime-ray/ssh/id_ed25519 a b|it's|")


def test_exec_with_another_host_key_is_refused_by_ssh(cluster: Cluster, ssh_server: SshServer) -> None:
    other = (ssh_server.folder / "user_key.pub").read_text().split()
    ssh_server.known_hosts.write_text(f"{CLUSTER.head} {other[0]} {other[1]}\n")

    done = cluster("exec", "--", "true")

    assert done.returncode == 255
    assert "REMOTE HOST IDENTIFICATION HAS CHANGED" in done.stderr


def test_status_by_tunnel_asks_rays_dashboard_on_the_head(cluster: Cluster, server: TpuServer) -> None:
    endpoints = [{"ipAddress": "10.0.0.1"}]
    server.add_node("n-1", "READY", labels=labels(), acceleratorType="v4-8", networkEndpoints=endpoints)

    done = cluster("status", "--tunnel")

    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "main\tv4\t4\t8\t1\t0\t1\t0\t1 READY")


def test_status_by_a_tunnel_that_fails_shows_google_and_ssh_s_own_words(
    cluster: Cluster, server: TpuServer, ssh_server: SshServer
) -> None:
    server.add_node("n-1", "READY", labels=labels())
    ssh_server.known_hosts.write_text("")

    done = cluster("status", "--tunnel")

    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "main\tv4\t4\t8\t1\t0\t-\t-\t1 READY")
    assert f"main: no way to head `{CLUSTER.head}`: Host key verification failed." in done.stderr


def test_launchers_calls_of_a_head_take_the_same_way(
    cluster: Cluster, dashboard: Dashboard, ssh_server: SshServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "programs"), prepend=os.pathsep)
    port = int(dashboard.url.rpartition(":")[2])
    way = HeadWay(
        head=CLUSTER.head, project="p-1", zone=CLUSTER.zone, options=tuple(ssh_server.options), dashboard=port
    )
    jobs = RayJobs(RayTarget(target="t", root="gs://b", python="python3", address=None, tunnel=way))
    try:
        assert jobs.read_session() is None
        assert read_ray(jobs.read_address()).alive == {"10.0.0.1"}
        forwarded = int(jobs.read_address().rpartition(":")[2])
    finally:
        jobs.close()
    assert not can_connect(forwarded)


def test_dashboard_forwards_a_port_until_it_is_interrupted(cluster: Cluster, ssh_server: SshServer) -> None:
    port = find_free_port()
    running = cluster("dashboard", "--port", str(port), wait=False)
    try:
        wait_until(lambda: can_connect(port) or running.poll() is not None)
        view = read_ray(f"http://127.0.0.1:{port}")
    finally:
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=PATIENCE_S)

    assert view.alive == {"10.0.0.1"}
    assert said.splitlines()[0] == f"http://127.0.0.1:{port} is the dashboard of marin-main, until Ctrl-C"
    assert not can_connect(port)


def test_forward_of_a_process_that_is_killed_ends_with_it(
    cluster: Cluster, ssh_server: SshServer, dashboard: Dashboard, tmp_path: Path
) -> None:
    programs = str(tmp_path / "programs")
    words = [str(read_port(dashboard)), CLUSTER.head, CLUSTER.zone, *ssh_server.options]

    killed = subprocess.run(
        [sys.executable, "-c", KILLED, *words],
        env={**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"},
        check=False,
    )

    assert killed.returncode == -signal.SIGKILL
    assert ssh_server.connections() == 1
    assert wait_until(lambda: processes_with(programs) == [])


def test_dashboard_at_a_port_that_is_taken_ends_with_ssh_s_own_words(cluster: Cluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = cluster("dashboard", "--port", str(taken.getsockname()[1]))

    assert done.returncode == 255
    assert "Address already in use" in done.stderr


def test_stop_stops_ray_on_the_head_before_it_removes_the_nodes(
    cluster: Cluster, server: TpuServer, ssh_server: SshServer
) -> None:
    server.add_node("n-1", "READY", labels=labels())
    ssh_server.add_command("sudo", 'echo "$@" >>said')

    done = cluster("stop", "--yes")

    assert (done.returncode, done.stdout) == (0, "main\tnode\tn-1\tv4\tREADY\tremoved\n")
    said = (ssh_server.home / "said").read_text()
    assert said == shlex.join(STOP_RAY[1:3]) + f" {STOP_RAY[3]}\n"
    assert said.startswith("sh -c systemctl stop runtime-ray-watch.service runtime-ray-head.service || exit; curl ")
    assert server.nodes == {}


def test_stop_that_cannot_stop_ray_removes_nothing(cluster: Cluster, server: TpuServer, ssh_server: SshServer) -> None:
    server.add_node("n-1", "READY", labels=labels())
    ssh_server.add_command("sudo", "echo a password is required >&2; exit 1")

    done = cluster("stop", "--yes")

    assert (done.returncode, done.stdout) == (3, "")
    assert f"error: could not stop Ray on head `{CLUSTER.head}`: ssh ended with 1" in done.stderr
    assert names_of(server.nodes) == ["n-1"]
