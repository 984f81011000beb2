"""Jobs on a real Kubernetes that runs pods, with the rights that the shipped role gives in one namespace."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml
from kubernetes import client

from infra.settings.model import ClaimSettings, NamespaceSettings
from runtime.cli.main import main
from runtime.client.jobs.explain import explain, read_facts
from runtime.client.jobs.gc import Garbage, find_garbage, remove
from runtime.client.jobs.handle import JobHandle, find_job
from runtime.client.jobs.launch import launch
from runtime.client.jobs.prepare import LaunchOptions
from runtime.client.jobs.retry import retry_job
from runtime.client.jobs.status import read_attempts
from runtime.client.jobs.target_check import CheckVerdict, check_target
from runtime.client.jobs.targets import find_target, make_context
from runtime.config import Project, Settings
from runtime.end_reasons import EndReason
from runtime.errors import NotPossible
from runtime.jobs.spec import (
    Array,
    Checkpoint,
    EnvironmentManager,
    Gpus,
    JobEnvironment,
    JobResources,
    JobSpec,
    JobState,
    Range,
    Retry,
    SecretRef,
)
from runtime.launchers.kubernetes import render
from runtime.launchers.kubernetes.client import KubernetesCluster, KubernetesUnavailable
from runtime.launchers.kubernetes.gpu_leases import Gpu, lease_name, read_table
from runtime.launchers.kubernetes.launcher import KubernetesLauncher
from runtime.launchers.kubernetes.states import INDEX
from runtime.outputs import PubSubQueueOutput, RecordsOutput, StackOutputs, encode_outputs
from runtime.queues.pubsub.client import ensure_topics
from runtime.secret_detection import looks_secret
from runtime.tasks.container import Mount, MountMode
from runtime.testing.launcher_bench import LauncherCase
from runtime.testing.launchers import LauncherSuite
from tests.fakes.gcs import GcsServer
from tests.images_support import ROOT
from tests.kubernetes_support import PYTHON_IMAGE, Access, Kubernetes
from tests.readme_support import AS_PROMISED, follow_readme
from tests.services.test_workspace import missing_in, wait_for_right, workspace_objects
from tests.services_support import MotoServer, PubsubEmulator, relayed, wait_until
from tests.shim_support import shims_with

pytestmark = [
    pytest.mark.service,
    pytest.mark.slow,
    pytest.mark.xdist_group("kubernetes-node"),
]

WITHOUT_PYTHON = "test.local/pause:1"
MIB = 1 << 20
SHORT = timedelta(seconds=10)
PATIENCE_S = 400
"""A generous limit: machines that run many tests at once are slow."""
FOREVER = "3000"
"""Seconds of commands that the test always ends early."""


@dataclass(frozen=True)
class Lab:
    """A namespace to launch into, its administrator, and the settings of a user who launches."""

    namespace: str
    admin: Access
    settings: Settings
    kubeconfig: Path
    claim_folder: Path

    def launch(self, *command: str, target: str = "lab", again: bool = False, **fields: Any) -> JobHandle:
        spec = JobSpec(command=command, **{"grace_period": SHORT, **fields})
        return launch(spec, target, settings=self.settings, options=LaunchOptions(again=again))

    def jobs(self, job: JobHandle) -> list[Any]:
        return list(
            client.BatchV1Api(self.admin.api)
            .list_namespaced_job(self.namespace, label_selector=f"research-runtime/job={job.id}")
            .items
        )

    def pods(self, job: JobHandle) -> list[Any]:
        return list(
            client.CoreV1Api(self.admin.api)
            .list_namespaced_pod(self.namespace, label_selector=f"research-runtime/job={job.id}")
            .items
        )


@pytest.fixture(scope="module")
def workspace(
    kubernetes_node: Kubernetes, python_image: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Path, Path]]:
    """A namespace with the shipped objects and a bound claim, a launcher's kubeconfig, and the claim's folder."""
    admin, mark = kubernetes_node.administrator(), uuid.uuid4().hex[:8]
    namespace, people = f"lab-{mark}", kubernetes_node.new_namespace("people")
    client.CoreV1Api(admin.api).create_namespaced_service_account(people, {"metadata": {"name": "alice"}})
    folder = tmp_path_factory.mktemp("claim")
    admin.apply(
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": f"records-{mark}"},
            "spec": {
                "capacity": {"storage": "1Gi"},
                "accessModes": ["ReadWriteMany"],
                "hostPath": {"path": str(folder)},
                "storageClassName": "",
            },
        }
    )
    settings = NamespaceSettings(
        quota={"pods": "30", "requests.memory": "100Gi"},
        launchers=(f"ServiceAccount:{people}/alice",),
        claims={"records": ClaimSettings(size="1Gi", existing_volume=f"records-{mark}")},
    )
    for each in workspace_objects(namespace, settings):
        admin.apply(each)
    secret = {"metadata": {"name": "login"}, "stringData": {"token": "hush"}}
    client.CoreV1Api(admin.api).create_namespaced_secret(namespace, secret)
    wait_for_right(kubernetes_node.account(people, "alice"), "create", "jobs", namespace, group="batch")
    kubeconfig = kubernetes_node.kubeconfig_with_context(
        tmp_path_factory.mktemp("kube") / "config", "lab", token=kubernetes_node.token(people, "alice")
    )
    yield namespace, kubeconfig, folder
    kubernetes_node.delete_namespace(namespace)
    kubernetes_node.delete_namespace(people)


@pytest.fixture
def lab(
    kubernetes_node: Kubernetes,
    workspace: tuple[str, Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Lab]:
    namespace, kubeconfig, folder = workspace
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "main.py").write_text("print('from the tree')\n")
    # Separate trees make the same command in two tests two jobs.
    (tree / "mark").write_text(str(tmp_path))
    monkeypatch.chdir(tree)
    target = {
        "kind": "kubernetes",
        "context": "lab",
        "namespace": namespace,
        "image": PYTHON_IMAGE,
        "image_pull_policy": "Never",
        "service_account": "runtime-job",
        "records": "claim://records/runtime",
    }
    targets = {
        "lab": target,
        "gpus": {**target, "gpus": {"node-1": 3}, "check_gpus": False},
        "seen": {**target, "gpus": {"node-1": 3}},
        "bare": {**target, "defaults": {"image": WITHOUT_PYTHON}},
        "wrong": {**target, "defaults": {"image": "test.local/nothing:7"}},
    }
    settings = Settings(
        project=Project(root=tmp_path, targets=targets),
        data_dir=tmp_path / "data",
        cache_dir=tmp_path / "cache",
        config_dir=tmp_path / "config",
    )
    admin = kubernetes_node.administrator()
    yield Lab(namespace, admin, settings, kubeconfig, folder)
    client.BatchV1Api(admin.api).delete_collection_namespaced_job(namespace, propagation_policy="Background")
    core, mine = client.CoreV1Api(admin.api), "research-runtime/job"
    core.delete_collection_namespaced_pod(namespace, label_selector=mine, grace_period_seconds=0)
    assert wait_until(lambda: not core.list_namespaced_pod(namespace, label_selector=mine).items)


def ended(job: JobHandle, *, timeout_s: float = PATIENCE_S) -> tuple[JobState, EndReason | None]:
    status = job.wait(timeout=timeout_s)
    return status.state, status.reason


def printed(job: JobHandle, index: int = 0, **options: Any) -> str:
    return b"".join(job.logs(index=index, **options)).decode()


def until(condition: Callable[[], object], what: str, timeout_s: float = PATIENCE_S) -> None:
    assert wait_until(condition, timeout_s=timeout_s, every_s=0.2), f"{what} did not come within {timeout_s} s"


def explained(job: JobHandle, index: int = 0) -> Any:
    native = next(each for each in job.natives() if each.index == index)
    return KubernetesLauncher().explain(job.target, native, job.host)


# runs


def test_readme_launch_on_kubernetes_ends_as_promised(lab: Lab, tmp_path: Path) -> None:
    settings = lab.settings.project.targets["lab"]

    assert follow_readme(tmp_path / "project", "lab", settings=settings) == AS_PROMISED


def test_seeds_are_as_many_finished_runs_each_with_its_own_index_seed_and_output(lab: Lab, tmp_path: Path) -> None:
    script = "echo $RUNTIME_ARRAY_INDEX $SEED > $RUNTIME_OUTPUT_DIR/said; cat main.py; python3 main.py"
    with lab.launch("sh", "-c", script, array=Array(seeds=4, offset=3)) as job:
        status = job.wait(timeout=PATIENCE_S)
        job.fetch(tmp_path / "home")

        assert dict(status.counts) == {JobState.SUCCEEDED: 4}
        said = {path.parent.name: path.read_text() for path in (tmp_path / "home").rglob("said")}
        assert said == {str(index): f"{index} {index}\n" for index in (3, 4, 5, 6)}
        assert printed(job, 5).endswith("from the tree\n")
        assert [job.attempts(index) for index in (3, 4, 5, 6)] == [[1]] * 4
        (native,) = lab.jobs(job)
        until(lambda: lab.jobs(job)[0].status.completed_indexes == "0-3", "the Job's own count")
        assert native.metadata.uid == (lab.claim_folder / "runtime/jobs" / job.id / "owners/1.0").read_text()


def test_snapshot_of_many_megabytes_reaches_the_claim_whole(lab: Lab) -> None:
    content = os.urandom(48 * MIB)
    Path("weights.bin").write_bytes(content)
    with lab.launch("sha256sum", "weights.bin") as job:
        assert ended(job) == (JobState.SUCCEEDED, EndReason.SUCCEEDED)
        assert printed(job) == f"{hashlib.sha256(content).hexdigest()}  weights.bin\n"


def test_same_launch_again_is_the_same_job_with_its_result(lab: Lab) -> None:
    with lab.launch("echo", "once") as first:
        assert ended(first) == (JobState.SUCCEEDED, EndReason.SUCCEEDED)
    for each in lab.jobs(first):
        client.BatchV1Api(lab.admin.api).delete_namespaced_job(each.metadata.name, lab.namespace)

    with lab.launch("echo", "once") as second:
        assert (second.id, second.new) == (first.id, False)
        # The Job is gone; its result is not.
        assert ended(second) == (JobState.SUCCEEDED, EndReason.SUCCEEDED)
        assert printed(second) == "once\n"


def test_failure_within_the_budget_is_another_pod_and_the_last_one_fails_the_index_at_once(lab: Lab) -> None:
    script = "echo attempt $RUNTIME_ATTEMPT; [ $RUNTIME_ARRAY_INDEX = 0 ] && [ $RUNTIME_ATTEMPT = 2 ]"
    with lab.launch("sh", "-c", script, array=Array(count=2), retry=Retry(failure=1)) as job:
        status = job.wait(timeout=PATIENCE_S)

        assert dict(status.counts) == {JobState.SUCCEEDED: 1, JobState.FAILED: 1}
        assert status.reason is EndReason.APP_FAILED
        assert [job.attempts(index) for index in (0, 1)] == [[1, 2], [1, 2]]
        assert printed(job, 1) == "attempt 1\nattempt 2\n"

        def counted() -> tuple[str, str]:
            status = lab.jobs(job)[0].status
            return status.completed_indexes, status.failed_indexes

        # The controller counts each pod some time after the pod has ended.
        until(lambda: counted() == ("0", "1"), "the Job's own count")


def test_exit_code_that_asks_for_another_start_costs_nothing(lab: Lab) -> None:
    with lab.launch("sh", "-c", "[ $RUNTIME_ATTEMPT = 2 ] || exit 75") as job:
        assert ended(job) == (JobState.SUCCEEDED, EndReason.SUCCEEDED)
        assert job.attempts() == [1, 2]


def test_time_limit_ends_an_attempt_and_a_new_checkpoint_gives_another(lab: Lab) -> None:
    script = "trap 'date > $RUNTIME_CHECKPOINT_DIR/c' USR1; [ $RUNTIME_ATTEMPT = 2 ] || while :; do sleep 0.1; done"
    checkpoint = Checkpoint(lead=timedelta(seconds=8))
    with (
        lab.launch("sh", "-c", script, time_limit=timedelta(seconds=25), checkpoint=checkpoint) as again,
        lab.launch("sleep", FOREVER, time_limit=timedelta(seconds=2)) as late,
    ):
        assert ended(late) == (JobState.FAILED, EndReason.TIMEOUT)
        assert ended(again) == (JobState.SUCCEEDED, EndReason.SUCCEEDED)
        assert again.attempts() == [1, 2]


def test_claims_secrets_and_shared_memory_are_in_the_pod(lab: Lab) -> None:
    (lab.claim_folder / "data").mkdir(exist_ok=True)
    (lab.claim_folder / "data" / "x").write_text("from the claim\n")
    with lab.launch(
        "sh",
        "-c",
        "cat /data/x; touch /data/y || echo read-only; echo $TOKEN $OTHER; df -k /dev/shm | tail -1 | awk '{print $2}'",
        mounts=(Mount(source="claim://records/data", target="/data", mode=MountMode.RO),),
        secrets=(
            SecretRef(name="TOKEN", source="kubernetes://login/token"),
            SecretRef(name="OTHER", source="env://KUBECONFIG"),
        ),
        resources=JobResources(shared_memory=Range.read("8MiB").low, memory=Range(64 * MIB, 64 * MIB)),  # type: ignore[arg-type]
    ) as job:
        assert ended(job) == (JobState.SUCCEEDED, EndReason.SUCCEEDED)
        lines = printed(job).splitlines()
        assert lines[0] == "from the claim"
        assert lines[-3:] == ["read-only", f"hush {lab.kubeconfig}", "8192"]
        assert "hush" not in str(lab.jobs(job))
        assert str(lab.kubeconfig) not in str(lab.jobs(job))


# ends in Kubernetes' terms


def test_pod_tells_the_result_where_the_record_root_is_not_read(lab: Lab) -> None:
    with lab.launch("sleep", FOREVER, idle_timeout=timedelta(seconds=1)) as job:
        assert ended(job) == (JobState.FAILED, EndReason.IDLE)
        natives = [each.native_id for each in job.entry().natives]

        def said() -> list[tuple[EndReason | None, str]]:
            states = KubernetesLauncher().states(job.target, natives, job.host)
            return [(each.reason, each.message) for each in states]

        until(lambda: said() == [(EndReason.IDLE, "printed nothing for 1 s")], "the pod's own word")


def test_run_over_its_memory_is_oom_and_explained_with_the_limit(lab: Lab) -> None:
    memory = JobResources(memory=Range(48 * MIB, 48 * MIB))
    with lab.launch("python3", "-c", "x = bytearray(300 << 20)", resources=memory) as job:
        assert ended(job) == (JobState.FAILED, EndReason.OOM)


# A missing Secret, deleted pods and killed shims cost no failures; the failure budget is 0.
LATE = "[ $RUNTIME_ARRAY_INDEX = 0 ] || [ $RUNTIME_ATTEMPT = 2 ] || sleep 3000"


def test_pods_that_wait_are_deleted_or_are_killed_are_no_failures_of_their_run(lab: Lab) -> None:
    core, secret = client.CoreV1Api(lab.admin.api), f"late-{uuid.uuid4().hex[:8]}"
    late = SecretRef(name="TOKEN", source=f"kubernetes://{secret}/token")
    with lab.launch("sh", "-c", LATE, array=Array(count=2), secrets=(late,)) as job:
        waiting = ["Pending/CreateContainerConfigError"] * 2
        until(lambda: [each.raw for each in job.natives()] == waiting, "two pods that wait")
        status = job.status()
        assert (status.state, status.reason) == (JobState.PENDING, EndReason.CONFIG_INVALID)
        with pytest.raises(NotPossible, match="is pending"):
            retry_job(job, lab.settings)
        assert garbage_of(job, lab) == []
        first = next(pod for pod in lab.pods(job) if pod.metadata.labels[INDEX] == "0")

        core.delete_namespaced_pod(first.metadata.name, lab.namespace)
        core.create_namespaced_secret(lab.namespace, {"metadata": {"name": secret}, "stringData": {"token": "hush"}})
        until(lambda: job.attempts(1) == [1], "the second run")
        kill_shim(job, 1)

        assert dict(job.wait(timeout=PATIENCE_S).counts) == {JobState.SUCCEEDED: 2}
        assert [job.attempts(index) for index in (0, 1)] == [[1], [1, 2]]
        assert [failures_before(job, 0, 1), failures_before(job, 1, 1), failures_before(job, 1, 2)] == [1, 0, 1]


def failures_before(job: JobHandle, index: int, attempt: int) -> int:
    """Return Kubernetes' failure count of the index at the start of an attempt."""
    start = json.loads(job.files.read(f"jobs/{job.id}/runs/{index}/a{attempt:04d}/start.json") or b"{}")
    return int(start["failures"])


def kill_shim(job: JobHandle, index: int) -> None:
    """Kill the first process of the pod's container as the kernel does; it is a process of this machine too."""
    for pid in shims_with(f"jobs/{job.id}/shim.py"):
        # The shim of another index may have ended by now.
        with contextlib.suppress(OSError, ValueError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if words[words.index(b"--index") + 1] == str(index).encode():
                os.kill(pid, signal.SIGKILL)


def garbage_of(job: JobHandle, lab: Lab) -> list[Garbage]:
    later = datetime.now(UTC) + timedelta(seconds=1)
    found = find_garbage(job, owner=None, older_than=timedelta(0), now=later)
    return [each for each in found if each.name == job.id]


def test_run_over_its_disk_limit_ends_as_such_before_it_is_evicted_and_spends_failures(lab: Lab) -> None:
    # Outside every folder that a job is given.
    script = "mkdir /deep; while :; do head -c 4M /dev/zero >> /deep/file; sleep 0.5; done"
    limits = JobResources(disk=Range(20 * MIB, 20 * MIB))
    with lab.launch("sh", "-c", script, resources=limits) as job:
        assert ended(job) == (JobState.FAILED, EndReason.DISK)
        assert job.attempts() == [1]
        said = explain(read_facts(job))
        assert said.sentence == f"job `{job.id[:10]}` failed: the command used more disk than its limit"
        assert [line for line in said.evidence if "MiB of disk, its limit is 20 MiB" in line]


def test_image_without_python_is_image_failed_with_that_sentence(lab: Lab) -> None:
    with lab.launch("true", target="bare") as job:
        until(lambda: job.state().terminal, "the end")
        status = job.status(indices=True)
        assert (status.state, status.reason) == (JobState.FAILED, EndReason.IMAGE_FAILED)
        assert status.indices[0].message.startswith("the image has no Python that could run: ")
        assert (
            explained(job).sentence
            == "the image `test.local/pause:1` has no Python that could run: the shim needs Python 3.6 or newer"
        )


def test_environment_that_the_image_cannot_make_is_setup_failed_with_that_sentence(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "environment.yml").write_text("dependencies: []\n")
    spec = JobSpec(command=("true",), environment=JobEnvironment(manager=EnvironmentManager.CONDA))
    with launch(spec, "lab", settings=lab.settings, options=LaunchOptions(base=tmp_path)) as job:
        assert ended(job) == (JobState.FAILED, EndReason.SETUP_FAILED)
        said = explain(read_facts(job))
        facts = [said.sentence, *said.evidence]
        assert any("environment with conda: there is no such program on PATH on" in each for each in facts), facts


def test_run_that_fits_no_node_waits_and_the_numbers_are_said(lab: Lab) -> None:
    with lab.launch("true", resources=JobResources(cpus=500)) as job:
        until(lambda: job.natives()[0].raw == "Pending/Unschedulable", "the scheduler's word")

        said = explained(job)

        assert job.state() is JobState.PENDING
        assert said.sentence.startswith("no node takes it: 0/1 nodes are available: 1 Insufficient cpu.")
        assert said.evidence[0] == "it asks for cpu 500, memory 2Gi"
        assert job.cancel() == []


def test_run_over_the_quota_waits_and_the_numbers_are_said(lab: Lab) -> None:
    with lab.launch("true", resources=JobResources(memory=Range.read("200GiB"))) as job:
        until(lambda: explained(job).sentence.startswith("the quota"), "the controller's word")

        assert job.state() is JobState.PENDING
        said = explained(job).sentence
        assert said.startswith(
            "the quota `runtime-quota` has no room: a run asks for requests.memory=200Gi, requests.memory="
        )
        assert said.endswith("is used of requests.memory=100Gi")


def test_evicted_pod_is_a_preemption_that_the_record_counts_and_no_failure(lab: Lab) -> None:
    script = "[ $RUNTIME_ATTEMPT = 2 ] || sleep 3000"
    with lab.launch("sh", "-c", script) as job:
        until(lambda: job.attempts() == [1], "the first attempt")
        (native,) = job.entry().natives
        KubernetesLauncher().interrupt(job.target, native.native_id, 0, "preempt", job.host)

        assert ended(job) == (JobState.SUCCEEDED, EndReason.SUCCEEDED)
        assert job.attempts() == [1, 2]
        names = job.files.names(f"jobs/{job.id}/runs/0/a0001")
        assert "end.stopped.143" in names
        # Kubernetes does not count failures that it caused, which is how the shim knows the cause.
        assert (failures_before(job, 0, 1), failures_before(job, 0, 2)) == (0, 0)


@pytest.mark.parametrize(
    ("how", "attempts", "end"),
    [
        ("timeout", [1], (JobState.FAILED, EndReason.TIMEOUT)),
        ("oom", [1], (JobState.FAILED, EndReason.OOM)),
        ("node-loss", [1, 2], (JobState.SUCCEEDED, EndReason.SUCCEEDED)),
    ],
)
@pytest.mark.daily(1)
def test_interruption_ends_as_the_real_one_does(
    lab: Lab, how: str, attempts: list[int], end: tuple[JobState, EndReason]
) -> None:
    script = "[ $RUNTIME_ATTEMPT = 2 ] || sleep 3000"
    with lab.launch("sh", "-c", script, time_limit=timedelta(minutes=5)) as job:
        until(lambda: job.attempts() == [1], "the first attempt")
        (native,) = job.entry().natives
        KubernetesLauncher().interrupt(job.target, native.native_id, 0, how, job.host)

        assert ended(job) == end
        assert job.attempts() == attempts


def test_spent_preemptions_end_the_index(lab: Lab) -> None:
    with lab.launch("sleep", FOREVER, retry=Retry(preemption=0)) as job:
        until(lambda: job.attempts() == [1], "the first attempt")
        (native,) = job.entry().natives
        KubernetesLauncher().interrupt(job.target, native.native_id, 0, "preempt", job.host)

        assert ended(job) == (JobState.FAILED, EndReason.PREEMPTED)
        assert job.attempts() == [1]


# cancelling


def test_cancel_ends_all_and_nothing_is_left(lab: Lab) -> None:
    with lab.launch("sleep", FOREVER, array=Array(count=2)) as job:
        until(lambda: (job.attempts(0), job.attempts(1)) == ([1], [1]), "both runs")

        assert job.cancel() == []

        assert (lab.jobs(job), lab.pods(job)) == ([], [])
        assert ended(job) == (JobState.CANCELLED, EndReason.CANCELLED)


def test_cancel_of_one_index_leaves_the_other(lab: Lab) -> None:
    with lab.launch("sh", "-c", "[ $RUNTIME_ARRAY_INDEX = 0 ] || sleep 3000", array=Array(count=2)) as job:
        until(lambda: job.attempts(1) == [1], "the second run")

        assert job.cancel(indices=[1]) == []

        assert dict(job.wait(timeout=PATIENCE_S).counts) == {JobState.SUCCEEDED: 1, JobState.CANCELLED: 1}


def test_index_of_a_node_that_is_silent_is_released_and_runs_again(lab: Lab, kubernetes_node: Kubernetes) -> None:
    script = "[ $RUNTIME_ATTEMPT = 2 ] || sleep 3000"
    kubelet = int((kubernetes_node.folder / "kubelet.pid").read_text())
    with lab.launch("sh", "-c", script) as job:
        until(lambda: job.attempts() == [1], "the first attempt")
        (pod,) = lab.pods(job)
        # The record root is on the same silent node here, so nothing of it can be read meanwhile.
        entry = job.entry()
        (native,) = entry.natives
        until(lambda: job.natives(entry)[0].raw == "Running", "the word of its node")
        os.kill(kubelet, signal.SIGSTOP)
        try:
            core = client.CoreV1Api(lab.admin.api)
            core.delete_namespaced_pod(pod.metadata.name, lab.namespace)
            until(lambda: job.natives(entry)[0].raw == "Terminating/Deleted", "the deletion")
            time.sleep(3)
            assert [each.metadata.name for each in lab.pods(job)] == [pod.metadata.name]

            left = KubernetesLauncher().release(job.target, [native.native_id], 0, job.host)

            assert left == []
            until(lambda: [each.metadata.uid for each in lab.pods(job)] not in ([], [pod.metadata.uid]), "another pod")
        finally:
            os.kill(kubelet, signal.SIGCONT)
        assert ended(job) == (JobState.SUCCEEDED, EndReason.SUCCEEDED)
        assert job.attempts() == [1, 2]


# parts of GPUs


def test_twelve_seeds_with_an_image_that_is_not_there_leave_nothing_and_run_at_once_with_the_right_one(
    lab: Lab,
) -> None:
    script = "echo $CUDA_VISIBLE_DEVICES $NVIDIA_VISIBLE_DEVICES $SEED; while [ ! -e $RUNTIME_CHECKPOINT_DIR/../../../go ]; do sleep 0.1; done"
    resources = JobResources(gpus=Gpus(count=0.25), cpus=0.05, memory=Range(48 * MIB, 48 * MIB))
    wrong = "test.local/nothing:7"
    with lab.launch("true", target="gpus", array=Array(seeds=12), resources=resources, image=wrong) as job:
        stuck = ["Pending/ErrImageNeverPull"] * 12
        until(lambda: [each.raw for each in job.natives()] == stuck, "twelve pods that wait")
        status = job.status()
        assert (status.state, status.reason) == (JobState.PENDING, EndReason.IMAGE_FAILED)
        assert explained(job).sentence.startswith("the image `test.local/nothing:7` cannot be pulled: ")
        assert garbage_of(job, lab) == []

        assert job.cancel() == []

        assert (lab.jobs(job), lab.pods(job)) == ([], [])
        assert job.state() is JobState.CANCELLED
    with lab.launch("sh", "-c", script, target="gpus", array=Array(seeds=12), resources=resources) as job:
        assert [native.native_id.rpartition("-")[2] for native in job.entry().natives] == ["0", "1", "2"]
        until(lambda: dict(job.status().counts) == {JobState.RUNNING: 12}, "all twelve")
        assert [total_of(lab, number) for number in range(3)] == [1.0, 1.0, 1.0]

        with pytest.raises(NotPossible, match=r"no GPU of target `gpus` has a free slot of 0\.5") as refused:
            lab.launch("true", target="gpus", resources=JobResources(gpus=Gpus(count=0.5)))

        assert len(refused.value.facts) == 3
        (lab.claim_folder / "runtime/jobs" / job.id / "go").touch()
        assert ended(job) == (JobState.SUCCEEDED, EndReason.SUCCEEDED)
        said = sorted(printed(job, index).split() for index in range(12))
        assert said == sorted([str(index // 4), str(index // 4), str(index)] for index in range(12))
        until(lambda: all(each.status.completion_time for each in lab.jobs(job)), "the end of the Jobs")
    # Entries of ended Jobs no longer count.
    with lab.launch("true", target="gpus", resources=JobResources(gpus=Gpus(count=0.5))) as other:
        assert ended(other) == (JobState.SUCCEEDED, EndReason.SUCCEEDED)


@pytest.mark.parametrize(
    ("line", "end", "begin"),
    [
        ("0, GPU-1, 30000, 40000", (JobState.SUCCEEDED, EndReason.SUCCEEDED), ""),
        ("0, GPU-1, 3000, 40000", (JobState.FAILED, EndReason.NO_CAPACITY), "GPU 0 has 3000 of 40000 MiB free"),
        ("", (JobState.FAILED, EndReason.SETUP_FAILED), "1 GPUs were given (0), and those visible are: none"),
    ],
)
@pytest.mark.daily(1)
def test_gpu_that_others_use_or_that_is_not_visible_is_seen_before_the_command_starts(
    lab: Lab, line: str, end: tuple[JobState, EndReason], begin: str
) -> None:
    folder = lab.claim_folder / "bin"
    folder.mkdir(exist_ok=True)
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\necho '{line}'\n")
    (folder / "nvidia-smi").chmod(0o755)
    with lab.launch(
        "true",
        target="seen",
        mounts=(Mount(source="claim://records/bin", target="/usr/local/sbin"),),
        resources=JobResources(gpus=Gpus(count=0.5)),
    ) as job:
        assert ended(job) == end
        cluster = KubernetesCluster("lab", str(lab.kubeconfig))

        def messages() -> list[str]:
            pods = cluster.list("pods", lab.namespace, labels=f"research-runtime/job={job.id}")
            states = [each["state"] for pod in pods for each in pod["status"].get("containerStatuses", ())]
            return [state["terminated"].get("message", "") for state in states if "terminated" in state]

        until(messages, "the end of the pod")
        told = json.loads(messages()[0])
        assert (told["reason"], told["message"].startswith(begin)) == (end[1].value, True)


def total_of(lab: Lab, number: int) -> float:
    lease = KubernetesCluster("lab", str(lab.kubeconfig)).get(
        "leases", lab.namespace, lease_name(Gpu("node-1", number))
    )
    return sum(each.slots * each.share for each in read_table(lease))


# workers

SERVE = """
import os, socket, sys
# The machine's own address on the bridge of the pods is the first of their network.
host = socket.gethostbyname(socket.gethostname()).rpartition(".")[0] + ".1"
os.environ["PUBSUB_EMULATOR_HOST"] = f"{host}:{sys.argv[1]}"
os.environ["RUNTIME_OUTPUTS"] = os.path.abspath("contract.json")
os.execv(sys.executable, [sys.executable, "-m", "runtime", "worker", *sys.argv[2:]])
"""


@pytest.fixture
def relay(pubsub_emulator: PubsubEmulator) -> Iterator[int]:
    """A port on every interface that forwards to the emulator."""
    with relayed(pubsub_emulator.address) as port:
        yield port


def test_workers_in_pods_serve_a_queue(
    lab: Lab,
    kubernetes_node: Kubernetes,
    relay: int,
    pubsub_emulator: PubsubEmulator,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    kubernetes_node.bind_folder(lab.namespace, "packages", Path(sysconfig.get_path("purelib")))
    queue = PubSubQueueOutput(topic="projects/test/topics/pods", subscription="projects/test/subscriptions/pods")
    ensure_topics(queue, emulator=pubsub_emulator.address)
    (lab.claim_folder / "tasks").mkdir()
    there, here = Path("contract.json"), lab.settings.project.root / "contract.json"
    for path, root in ((there, "/runtime-records/tasks"), (here, str(lab.claim_folder / "tasks"))):
        outputs = StackOutputs(stack="lab", records=RecordsOutput(url=f"file:{root}"), queues={"default": queue})
        path.write_text(encode_outputs(outputs))
    monkeypatch.setenv("RUNTIME_OUTPUTS", str(here))
    shutil.copytree(ROOT / "runtime", "runtime", ignore=shutil.ignore_patterns("__pycache__"))
    Path("serve.py").write_text(SERVE)
    for number in range(6):
        assert main(["submit", "--experiment", "pods", "--", "sh", "-c", f"echo task {number} in $(hostname)"]) == 0

    words = ("python3", "serve.py", str(relay), "--max-tasks", "3", "--idle-timeout", "300s")
    with lab.launch(
        *words,
        array=Array(count=2),
        mounts=(Mount(source="claim://packages", target="/packages"),),
        env={"PYTHONPATH": "/packages"},
    ) as job:
        status = job.wait(timeout=PATIENCE_S)
        assert dict(status.counts) == {JobState.SUCCEEDED: 2}, printed(job, 0) + printed(job, 1)

    capfd.readouterr()
    assert main(["status", "pods", "-o", "json"]) == 0
    assert json.loads(capfd.readouterr().out)["totals"]["succeeded"] == 6
    records = [json.loads(path.read_text()) for path in (lab.claim_folder / "tasks" / "records").rglob("t-*.json")]
    said = sorted(record["log"].split() for record in records)
    assert [words[:3] for words in said] == [["task", str(number), "in"] for number in range(6)]
    assert len({words[3] for words in said}) == 2


# manifests


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parents[1] / "golden/kubernetes").glob("*.yaml")), ids=lambda path: path.stem
)
def test_reviewed_manifest_is_accepted_by_the_api_field_by_field(lab: Lab, path: Path) -> None:
    cluster = KubernetesCluster("lab", str(lab.kubeconfig))
    for manifest in yaml.safe_load_all(path.read_text()):
        manifest["metadata"]["namespace"] = lab.namespace

        made = cluster.create("jobs", lab.namespace, manifest, dry_run=True)

        assert missing_in(made, manifest) == []


def test_misspelt_field_of_a_manifest_is_seen(lab: Lab) -> None:
    path = Path(__file__).parents[1] / "golden/kubernetes/plain.yaml"
    manifest = yaml.safe_load(path.read_text())
    manifest["metadata"]["namespace"] = lab.namespace
    manifest["spec"]["template"]["spec"]["restartPolicies"] = "Never"

    made = KubernetesCluster("lab", str(lab.kubeconfig)).create("jobs", lab.namespace, manifest, dry_run=True)

    assert missing_in(made, manifest) == [".spec.template.spec.restartPolicies"]


# once

LAUNCH = """
import os, sys
from pathlib import Path
from runtime.jobs import lock
from runtime.config import Project, Settings
from runtime.jobs.spec import Array, Gpus, JobResources, JobSpec
from runtime.client.jobs.launch import launch
import json
root, targets, target, share = Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3], float(sys.argv[4])
settings = Settings(project=Project(root=root, targets=targets), data_dir=root / "data", cache_dir=root / "cache", config_dir=root / "config")
resources = JobResources(gpus=Gpus(count=share)) if share else JobResources()
lock.STILL_S = float(os.environ.get("STILL_S", lock.STILL_S))
job = launch(JobSpec(command=("sh", "-c", "echo ran; sleep 1"), name="once", resources=resources), target, settings=settings)
print(job.id, job.new)
"""


def start_launch(lab: Lab, *, share: float = 0, **environ: str) -> subprocess.Popen[str]:
    target = "gpus" if share else "lab"
    arguments = [str(lab.settings.project.root), json.dumps(dict(lab.settings.project.targets)), target, str(share)]
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCH, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environ},
    )


@pytest.mark.parametrize("share", [0, 0.5])
@pytest.mark.parametrize("point", ["unlocked", "locked", "written", "submitted", "launched"])
@pytest.mark.daily(2)
def test_launch_killed_at_any_step_and_repeated_is_one_job(lab: Lab, point: str, share: float) -> None:
    killed = start_launch(lab, share=share, RUNTIME_FAULTS=f"launch.{point}=kill")
    killed.communicate(timeout=PATIENCE_S)
    # The repeated launch knows that the lock's holder is dead.
    repeated = start_launch(lab, share=share, STILL_S="1")
    out, err = repeated.communicate(timeout=PATIENCE_S)

    assert killed.returncode == -signal.SIGKILL
    assert repeated.returncode == 0, err
    with find_job(out.split()[0], settings=lab.settings, target="gpus" if share else "lab") as job:
        assert ended(job) == (JobState.SUCCEEDED, EndReason.SUCCEEDED)
        assert printed(job) == "ran\n"
        assert job.attempts() == [1]
        assert len(lab.jobs(job)) == 1


def test_two_launches_at_once_are_one_job(lab: Lab) -> None:
    both = [start_launch(lab) for _ in range(3)]
    said = [each.communicate(timeout=PATIENCE_S)[0].split() for each in both]

    assert len({job for job, _ in said}) == 1
    assert sorted(new for _, new in said) == ["False", "False", "True"]
    with find_job(said[0][0], settings=lab.settings, target="lab") as job:
        assert ended(job) == (JobState.SUCCEEDED, EndReason.SUCCEEDED)
        assert job.attempts() == [1]
        assert len(lab.jobs(job)) == 1


# the promises of every launcher


class TestKubernetesLauncher(LauncherSuite):
    @pytest.fixture
    def case(self, workspace: tuple[str, Path, Path], monkeypatch: pytest.MonkeyPatch) -> LauncherCase:
        namespace, kubeconfig, _ = workspace
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        settings = {"context": "lab", "namespace": namespace, "image": PYTHON_IMAGE, "image_pull_policy": "Never"}
        return LauncherCase(
            kind="kubernetes",
            settings=settings,
            records=f"claim://records/suite-{uuid.uuid4().hex[:8]}",
            patience_s=PATIENCE_S,
        )


# a record root in a bucket


@pytest.fixture
def bucket(
    kubernetes_node: Kubernetes, workspace: tuple[str, Path, Path], moto_server: MotoServer
) -> Iterator[dict[str, Any]]:
    """Settings of a target with its jobs in a bucket, on a server here that pods reach at their node's address."""
    admin = kubernetes_node.administrator()
    keys = {name: value for name, value in moto_server.environment.items() if looks_secret(name)}
    plain = {name: value for name, value in moto_server.environment.items() if name not in keys}
    admin.apply(
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "bucket-keys", "namespace": workspace[0]},
            "stringData": keys,
        }
    )
    boto3.client("s3", endpoint_url=moto_server.url, region_name="us-east-1").create_bucket(Bucket="lab")
    with relayed(moto_server.address) as port:
        environment = {**plain, "AWS_ENDPOINT_URL": f"http://{kubernetes_node.node_address}:{port}"}
        records = f"s3://lab/{uuid.uuid4().hex[:8]}"
        yield {"records": records, "records_secret": "bucket-keys", "records_env": environment}


@pytest.fixture
def elsewhere(bucket: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The same settings, but pods reach a server that has no such bucket."""
    server, address = GcsServer().start(), bucket["records_env"]["AWS_ENDPOINT_URL"].rpartition(":")[0]
    with relayed(server.url.removeprefix("http://")) as port:
        yield {**bucket, "records_env": {**bucket["records_env"], "AWS_ENDPOINT_URL": f"{address}:{port}"}}
    server.stop()


@pytest.mark.nightly
class TestKubernetesLauncherWithBucket(LauncherSuite):
    @pytest.fixture
    def case(
        self, workspace: tuple[str, Path, Path], bucket: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> LauncherCase:
        namespace, kubeconfig, _ = workspace
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        settings = {
            "context": "lab",
            "namespace": namespace,
            "image": PYTHON_IMAGE,
            "image_pull_policy": "Never",
            **bucket,
        }
        return LauncherCase(kind="kubernetes", settings=settings, records=bucket["records"], patience_s=PATIENCE_S)


@pytest.fixture
def far(lab: Lab, bucket: dict[str, Any]) -> Lab:
    """The lab with targets whose jobs lie in a bucket."""
    target = lab.settings.project.targets["lab"]
    targets = {
        "far": {**target, **bucket},
        "gpus": {**target, **bucket, "gpus": {"node-1": 1}, "check_gpus": False},
    }
    project = replace(lab.settings.project, targets=targets)
    return replace(lab, settings=replace(lab.settings, project=project))


def test_checkpoint_goes_to_the_next_pod_by_the_bucket_and_outputs_come_home(far: Lab, tmp_path: Path) -> None:
    script = (
        "cat $RUNTIME_CHECKPOINT_DIR/c && echo done > $RUNTIME_OUTPUT_DIR/said && exit 0; "
        "trap 'echo saved > $RUNTIME_CHECKPOINT_DIR/c' USR1; while :; do sleep 0.1; done"
    )
    with far.launch(
        "sh",
        "-c",
        script,
        target="far",
        time_limit=timedelta(seconds=25),
        checkpoint=Checkpoint(lead=timedelta(seconds=8)),
    ) as job:
        assert ended(job) == (JobState.SUCCEEDED, EndReason.SUCCEEDED)
        assert job.attempts() == [1, 2]
        assert printed(job).endswith("saved\n")
        assert [path.read_text() for path in job.fetch(tmp_path / "home")] == ["done\n"]


# runs of several nodes


@pytest.mark.parametrize(("place", "lost"), [("lab", 0), ("far", 1)])
@pytest.mark.daily(1)
def test_run_of_several_nodes_goes_on_with_all_of_them_after_one_was_lost(
    place: str, lost: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    lab: Lab = request.getfixturevalue(place)
    script = (
        "echo node $RUNTIME_NODE_RANK of $RUNTIME_NUM_NODES in attempt $RUNTIME_ATTEMPT at $MASTER_ADDR; "
        "echo $RANK > $RUNTIME_OUTPUT_DIR/$RANK; [ $RUNTIME_ATTEMPT = 2 ] || sleep 3000"
    )
    with lab.launch("sh", "-c", script, target=place, nodes=2) as job:
        until(lambda: "go" in job.files.names(f"jobs/{job.id}/runs/0/a0001"), "the start of both nodes")
        (native,) = job.entry().natives
        until(lambda: len(lab.pods(job)) == 2, "both pods")
        address = next(each.status.pod_ip for each in lab.pods(job) if completion(each) == 0)
        (pod,) = (each for each in lab.pods(job) if completion(each) == lost)
        assert job.state() is JobState.RUNNING
        client.CoreV1Api(lab.admin.api).delete_namespaced_pod(pod.metadata.name, lab.namespace, grace_period_seconds=0)

        assert ended(job) == (JobState.SUCCEEDED, EndReason.SUCCEEDED)

        assert (native.native_id, job.attempts()) == (f"{lab.namespace}/{lab.jobs(job)[0].metadata.name}", [1, 2])
        attempts = read_attempts(job.files, job.id, 0)
        # Kubernetes counts no failure for a pod that was deleted; node 0 left no end, and node 1 has a successor that says so.
        assert [each.reason for each in attempts] == ["preempted" if lost else "lost", "succeeded"]
        assert f"node 0 of 2 in attempt 1 at {address}\n" in printed(job)
        (said,) = {
            line.rpartition(" ")[2] for rank in (0, 1) for line in printed(job, rank=rank, attempt=2).splitlines()
        }
        assert said == newest_address(lab, job)
        fetched = {str(path.relative_to(tmp_path / "home")) for path in job.fetch(tmp_path / "home")}
        assert {name.rpartition("/")[2] for name in fetched} == {"0", "1"}
        until(lambda: all(not each.status.active for each in lab.jobs(job)), "the end of every pod")


def completion(pod: Any) -> int:
    return int(pod.metadata.labels["batch.kubernetes.io/job-completion-index"])


def newest_address(lab: Lab, job: JobHandle) -> str:
    """Return the address of the last pod that was node 0."""
    pods = [each for each in lab.pods(job) if completion(each) == 0]
    return str(max(pods, key=lambda each: each.metadata.creation_timestamp).status.pod_ip)


def test_run_whose_second_node_fits_nowhere_waits_and_says_which(lab: Lab) -> None:
    # Of its single node the cluster has some CPUs less than twice this many.
    cpus = float(os.cpu_count() or 1) * 0.6
    with lab.launch(
        "true", nodes=2, resources=JobResources(cpus=cpus, memory=Range(64 * MIB)), grace_period=SHORT
    ) as job:
        until(lambda: job.natives()[0].raw == "Pending/Unschedulable", "the scheduler's word")

        said = explained(job)

        assert job.state() is JobState.PENDING
        assert re.match(r"node [01] of 2: 0/1 nodes are available: 1 Insufficient cpu", job.natives()[0].message)
        assert said.sentence.startswith("no node takes it: 0/1 nodes are available: 1 Insufficient cpu.")
        assert job.cancel() == []
        assert lab.pods(job) == []


def test_job_of_a_bucket_leaves_no_object_behind_and_its_record_stays(far: Lab) -> None:
    core = client.CoreV1Api(far.admin.api)
    with far.launch(
        "sh", "-c", "echo $OTHER", target="far", secrets=(SecretRef(name="OTHER", source="env://KUBECONFIG"),)
    ) as job:
        assert ended(job) == (JobState.SUCCEEDED, EndReason.SUCCEEDED)
        assert printed(job) == f"{far.kubeconfig}\n"
        mine = {"label_selector": f"research-runtime/job={job.id}"}
        (shim,) = core.list_namespaced_config_map(far.namespace, **mine).items
        (secret,) = core.list_namespaced_secret(far.namespace, **mine).items
        (native,) = far.jobs(job)
        assert {each.metadata.owner_references[0].uid for each in (shim, secret)} == {native.metadata.uid}
        log = f"jobs/{job.id}/runs/0/a0001/rank0.log"
        there = [name for name, _ in job.files.tree("jobs")]
        assert not [
            name
            for name in there
            if str(far.kubeconfig).encode() in (job.files.read(f"jobs/{name}") or b"") and f"jobs/{name}" != log
        ]

        until(lambda: not any(each.status.active for each in far.jobs(job)), "the end of its Job")
        assert (job.cancel(), len(far.jobs(job))) == ([], 1), "what has ended stays"
        assert job.sweep() == []
        # They were deleted before their Job.
        assert core.list_namespaced_secret(far.namespace, **mine).items == []
        assert core.list_namespaced_config_map(far.namespace, **mine).items == []
        assert job.state() is JobState.SUCCEEDED


def test_jobs_of_a_bucket_are_collected_with_all_that_lies_there_and_in_the_cluster(far: Lab) -> None:
    secret = SecretRef(name="OTHER", source="env://KUBECONFIG")
    core, batch = client.CoreV1Api(far.admin.api), client.BatchV1Api(far.admin.api)
    with far.launch("echo", "hello", target="far", secrets=(secret,)) as job:
        assert ended(job) == (JobState.SUCCEEDED, EndReason.SUCCEEDED)
        until(lambda: not any(each.status.active for each in far.jobs(job)), "the end of its Job")

        def garbage() -> list[Garbage]:
            return find_garbage(job, owner=None, older_than=timedelta(0), now=datetime.now(UTC))

        until(lambda: {each.kind for each in garbage()} == {"job", "code"}, "a job and its code")
        left = [remove(each, job, owner="alice") for each in garbage()]

        assert (left, garbage()) == ([[], []], [])
        assert [name for name, _ in job.files.tree("")] == ["record-root"]
        mine = {"label_selector": f"research-runtime/job={job.id}"}
        listed = (core.list_namespaced_pod, core.list_namespaced_config_map, core.list_namespaced_secret)
        assert [each.metadata.name for list_them in listed for each in list_them(far.namespace, **mine).items] == []
        assert batch.list_namespaced_job(far.namespace, **mine).items == []
    with far.launch("echo", "hello", target="far", secrets=(secret,)) as again:
        assert (again.id, again.new) == (job.id, True)
        assert ended(again) == (JobState.SUCCEEDED, EndReason.SUCCEEDED)


# probes and file pods


def test_probes_and_pods_that_serve_files_leave_nothing(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def jobs() -> list[str]:
        return [
            each.metadata.name for each in client.BatchV1Api(lab.admin.api).list_namespaced_job(lab.namespace).items
        ]

    before = {path.name for path in (lab.claim_folder / "runtime/jobs").iterdir()}
    others = set(jobs())
    for name, verdict in (("lab", [CheckVerdict.OK]), ("wrong", [CheckVerdict.FAIL])):
        steps = list(check_target(name, lab.settings, patience=timedelta(minutes=6)))
        assert sorted({each.verdict for each in steps if each.step == "run"}) == verdict, steps
        assert steps[-1].text == "nothing left", steps
    # The Job of the file pod is shared, and stays for some minutes.
    assert [each for each in set(jobs()) - others if not each.startswith("runtime-files-")] == []
    assert {path.name for path in (lab.claim_folder / "runtime/jobs").iterdir()} == before

    monkeypatch.setattr(render, "FILES_IDLE_S", 20)
    monkeypatch.setattr(render, "READ", timedelta(seconds=1))
    own = {**lab.settings.project.targets["lab"], "python": "/usr/local/bin/python3"}
    settings = replace(lab.settings, project=replace(lab.settings.project, targets={"own": own}))
    target = find_target("own", settings)
    shared = set(jobs())
    host = KubernetesLauncher().open_host(target, make_context(settings))
    assert host.files.names("jobs") == sorted(before)
    (mine,) = set(jobs()) - shared
    made = client.BatchV1Api(lab.admin.api).read_namespaced_job(mine, lab.namespace)
    assert made.spec.active_deadline_seconds is None, "it runs, and ends when it has nothing to do"
    # The client is gone, as after a kill.
    host.close()
    until(lambda: mine not in jobs(), "the end of the Job of the files")


def test_pod_of_another_user_reads_its_secrets_and_writes_to_the_bucket(far: Lab) -> None:
    far.settings.project.targets["far"]["run_as_user"] = 65534
    secret = SecretRef(name="OTHER", source="env://KUBECONFIG")
    with far.launch("sh", "-c", "id -u; echo $OTHER", target="far", secrets=(secret,)) as job:
        assert ended(job) == (JobState.SUCCEEDED, EndReason.SUCCEEDED)
        assert printed(job) == f"65534\n{far.kubeconfig}\n"


def test_launch_that_was_cut_off_within_a_submission_is_gone_on_with_or_ended_by_cancel(
    far: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = KubernetesCluster.create

    def cut_off(cluster: KubernetesCluster, kind: str, *args: Any, **more: Any) -> Any:
        if kind == "configmaps":
            raise KubernetesUnavailable("the line is cut")
        return create(cluster, kind, *args, **more)

    for command in ("on", "off"):
        with monkeypatch.context() as patched:
            patched.setattr(KubernetesCluster, "create", cut_off)
            with pytest.raises(KubernetesUnavailable):
                far.launch("echo", command, target="far")
    # The namespace has Jobs of other tests, too; none of those is suspended.
    jobs = [
        job for job in client.BatchV1Api(far.admin.api).list_namespaced_job(far.namespace).items if job.spec.suspend
    ]
    assert len(jobs) == 2

    with far.launch("echo", "on", target="far") as job:
        assert ended(job) == (JobState.SUCCEEDED, EndReason.SUCCEEDED)
    (waiting,) = {job.metadata.labels["research-runtime/job"] for job in jobs} - {job.id}
    with find_job(waiting, settings=far.settings) as job:
        assert job.cancel() == []
        assert far.jobs(job) == []
        assert job.state() is JobState.CANCELLED


def test_runs_that_share_a_gpu_bring_their_shim_from_a_bucket_too(far: Lab) -> None:
    share = JobResources(gpus=Gpus(count=0.5))
    with far.launch("sh", "-c", "echo $CUDA_VISIBLE_DEVICES", target="gpus", resources=share) as job:
        assert ended(job) == (JobState.SUCCEEDED, EndReason.SUCCEEDED)
        assert printed(job) == "0\n"


def test_pods_that_the_bucket_refuses_end_and_say_so(far: Lab, elsewhere: dict[str, Any]) -> None:
    far.settings.project.targets["far"].update(elsewhere)
    with far.launch("true", target="far") as job:
        assert job.wait(timeout=PATIENCE_S).state is JobState.FAILED
        (index,) = job.status(indices=True).indices
        assert "the record root s3://lab/" in index.message
        assert "NoSuchBucket" in index.message
