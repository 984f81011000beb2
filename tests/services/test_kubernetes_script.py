"""The Kubernetes that the tests start: its pods run, and it leaves nothing behind."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from kubernetes import client

from tests import kubernetes_support
from tests.kubernetes_support import Kubernetes, eventually
from tests.services_support import require, wait_until

PAUSE = {"image": "test.local/pause:1", "imagePullPolicy": "Never"}


@pytest.mark.slow
def test_node_runs_a_job_and_tells_its_logs_and_limits(kubernetes_node: Kubernetes) -> None:
    access = kubernetes_node.administrator()
    namespace = kubernetes_node.new_namespace("jobs")
    batch, core = client.BatchV1Api(access.api), client.CoreV1Api(access.api)
    script = "echo index $JOB_COMPLETION_INDEX; exit $JOB_COMPLETION_INDEX"
    container = {"name": "main", "command": ["/bin/busybox", "sh", "-c", script], **PAUSE}
    pod = {"restartPolicy": "Never", "automountServiceAccountToken": False, "containers": [container]}
    spec = {
        "completionMode": "Indexed",
        "completions": 2,
        "parallelism": 2,
        "backoffLimitPerIndex": 0,
        "template": {"spec": pod},
    }

    batch.create_namespaced_job(namespace, {"metadata": {"name": "seeds"}, "spec": spec})
    eventually(lambda: batch.read_namespaced_job("seeds", namespace).status.failed_indexes == "1")
    eventually(lambda: batch.read_namespaced_job("seeds", namespace).status.completed_indexes == "0")

    pods = core.list_namespaced_pod(namespace, label_selector="job-name=seeds").items
    logs = sorted(core.read_namespaced_pod_log(each.metadata.name, namespace) for each in pods)
    assert logs == ["index 0\n", "index 1\n"]
    (node,) = core.list_node().items
    assert node.metadata.name == "node-1"


@pytest.mark.slow
def test_bridge_keeps_its_address_when_pods_go(kubernetes_node: Kubernetes) -> None:
    chosen = Path("/sys/class/net") / bridge_of(kubernetes_node.folder) / "addr_assign_type"

    # NET_ADDR_SET: https://www.kernel.org/doc/Documentation/ABI/testing/sysfs-class-net
    assert chosen.read_text().strip() == "3"


@pytest.fixture
def programs() -> None:
    missing = kubernetes_support.find_missing()
    require(missing or "Kubernetes", not missing, kubernetes_support.INSTALL)


@pytest.mark.service
@pytest.mark.slow
@pytest.mark.usefixtures("programs")
def test_stop_leaves_no_process_and_no_folder() -> None:
    running = Kubernetes().start()
    all_up = wait_until(lambda: len(pids_of(running.folder)) == 4)

    running.stop()
    running.stop()

    assert all_up
    assert not running.folder.exists()
    assert pids_of(running.folder) == []


@pytest.mark.service
@pytest.mark.slow
def test_node_that_is_stopped_with_a_running_pod_leaves_no_mount_bridge_or_cgroup(
    kubernetes_node: Kubernetes,
) -> None:
    core = client.CoreV1Api(kubernetes_node.administrator().api)
    namespace = kubernetes_node.new_namespace("left")
    container = {"name": "main", "resources": {"limits": {"memory": "32Mi"}}, **PAUSE}
    core.create_namespaced_pod(namespace, {"metadata": {"name": "left"}, "spec": {"containers": [container]}})
    eventually(lambda: core.read_namespaced_pod("left", namespace).status.phase == "Running")
    folder = kubernetes_node.folder
    traces_before = traces_of(folder)

    kubernetes_node.stop()

    assert {"mounts", "bridge", "cgroups"} <= {kind for kind, found in traces_before.items() if found}
    assert wait_until(lambda: not any(traces_of(folder).values())), traces_of(folder)
    kubernetes_node.start()


@pytest.mark.service
@pytest.mark.slow
@pytest.mark.usefixtures("programs")
def test_start_that_fails_leaves_its_logs_and_nothing_that_runs(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    built = next(kubernetes_support.CACHE.glob("*/bin"))
    shutil.copytree(built, cache / built.parent.name / "bin", copy_function=os.symlink)
    broken = cache / built.parent.name / "bin" / "kube-apiserver"
    broken.unlink()
    broken.write_text("#!/bin/sh\necho no such flag\nexit 1\n")
    broken.chmod(0o755)
    folder = Path(f"/tmp/rr-{os.getpid()}-broken")

    said = subprocess.run(
        [str(kubernetes_support.SCRIPT), "start", "--control-plane-only", str(folder)],
        env={**os.environ, "RUNTIME_KUBERNETES_CACHE": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert said.returncode == 3
    assert said.stderr == (
        f"no such flag\nerror: `apiserver` of {folder} did not become ready\n"
        f"hint: read {folder}/apiserver.log; its last lines are above\n"
    )
    assert pids_of(folder) == []
    kubernetes_support.run_script("stop", str(folder))
    assert not folder.exists()


@pytest.mark.service
@pytest.mark.slow
@pytest.mark.usefixtures("programs")
def test_kubernetes_whose_owner_is_killed_stops_by_itself() -> None:
    owner = subprocess.Popen(["sleep", "600"])
    folder = Path(f"/tmp/rr-{os.getpid()}-owned")
    kubernetes_support.run_script("start", "--control-plane-only", "--owner", str(owner.pid), str(folder))
    # The last daemon is still between fork and exec when the command returns.
    all_up = wait_until(lambda: len(pids_of(folder)) == 4)

    owner.kill()
    owner.wait()

    assert all_up
    assert wait_until(lambda: not folder.exists())
    assert wait_until(lambda: pids_of(folder) == [])


def pids_of(folder: Path) -> list[int]:
    """List processes that name the folder, except zombies."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if any(str(folder).encode() in word for word in words):
                found.append(int(entry.name))
    return found


def bridge_of(folder: Path) -> str:
    return f"rr-{hashlib.sha256(str(folder).encode()).hexdigest()[:8]}"


def traces_of(folder: Path) -> dict[str, list[str]]:
    digest = bridge_of(folder).removeprefix("rr-")
    groups = [str(each) for each in Path("/sys/fs/cgroup").glob(f"*/research-runtime-{digest}")]
    groups += [str(each) for each in Path("/sys/fs/cgroup").glob(f"research-runtime-{digest}")]
    notes = Path("/var/lib/cni/results")
    return {
        "processes": [str(each) for each in pids_of(folder)],
        "mounts": [line for line in Path("/proc/mounts").read_text().splitlines() if f" {folder}/" in line],
        "bridge": [each.name for each in Path("/sys/class/net").iterdir() if each.name == bridge_of(folder)],
        "cgroups": groups,
        "notes": [each.name for each in notes.glob(f"rr-{digest}-*")] if notes.exists() else [],
    }
