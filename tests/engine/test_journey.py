"""`pulumi up` → `runtime submit` → `runtime worker` → records, on the resources that the program created."""

from __future__ import annotations

import json
import os
import shutil
import sysconfig
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest
from kubernetes import client

from tests.engine.harness import ROOT, Lab
from tests.engine.kubernetes_plugin import KUBECONFIG_VARIABLE
from tests.fakes.gcs import GcsServer
from tests.fakes.google import GoogleServer
from tests.kubernetes_support import Kubernetes
from tests.services.test_workspace import wait_for_right
from tests.services_support import PubsubEmulator, relayed, wait_until

TASKS = 5


@pytest.fixture
def gcs() -> Iterator[GcsServer]:
    server = GcsServer().start()
    yield server
    server.stop()


@pytest.fixture
def google() -> Iterator[GoogleServer]:
    server = GoogleServer("my-lab-dev")
    server.start()
    yield server
    server.stop()


def test_tasks_run_on_the_queue_and_records_that_the_stack_made(
    lab: Lab, pubsub_emulator: PubsubEmulator, gcs: GcsServer, google: GoogleServer, tmp_path: Path
) -> None:
    lab.environment |= pubsub_emulator.environment | gcs.environment | google.environment
    lab.init("dev")
    lab.up("dev")
    # Secrets exist only in the simulated Google too; this server stores values.
    google.put_secret("dev-hf-token", b"hf-1")
    # Buckets exist only in the simulated Google; this server stores objects.
    [bucket] = lab.cloud.ids(":Bucket")
    gcs.make_bucket(bucket)
    command = ["sh", "-c", 'test "$HF_TOKEN" = hf-1 && echo "{\\"ran\\": true}" > "$RUNTIME_OUTPUT_DIR/answer.json"']
    lines = [json.dumps({"command": command, "key": f"task-{number}"}) for number in range(TASKS)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(lines) + "\n")

    lab.runtime("submit", "--stack", "dev", "--from", str(tmp_path / "tasks.jsonl"), "--experiment", "journey")
    lab.runtime("worker", "--stack", "dev", "--max-tasks", "2", "--idle-timeout", "240s")
    lab.runtime("stack", "publish", "--stack", "dev", "--yes")
    # Another machine, which has neither the `pulumi` command nor a passphrase.
    published = f"gs://{bucket}/contract/v1.json"
    elsewhere = {"PATH": os.defpath, "PULUMI_CONFIG_PASSPHRASE": None, "RUNTIME_OUTPUTS": published}
    lab.runtime("worker", "--max-tasks", str(TASKS - 2), "--idle-timeout", "240s", cwd=tmp_path, **elsewhere)
    status = lab.runtime("status", "journey", "--exact", "-o", "json", cwd=tmp_path, **elsewhere).json()

    assert status["totals"]["succeeded"] == TASKS
    records = [key for key in gcs.buckets[bucket] if key.startswith("records/")]
    assert len(records) == TASKS
    assert [key for key in gcs.buckets[bucket] if key.endswith("answer.json")] != []


@pytest.fixture
def from_pods(
    kubernetes_node: Kubernetes, pubsub_emulator: PubsubEmulator, gcs: GcsServer, google: GoogleServer
) -> Iterator[Mapping[str, str]]:
    """The variables by which pods reach what stands for Google."""
    node, found = kubernetes_node.node_address, pubsub_emulator.environment | gcs.environment | google.environment
    with ExitStack() as relays:
        yield {
            name: f"{scheme}{slashes}{node}:{relays.enter_context(relayed(address))}"
            for name, place in found.items()
            for scheme, slashes, address in (place.rpartition("//"),)
        }


@pytest.fixture
def people(kubernetes_node: Kubernetes) -> str:
    """A namespace whose service account `ada` stands for a person who launches."""
    namespace = kubernetes_node.new_namespace("people")
    core = client.CoreV1Api(kubernetes_node.administrator().api)
    core.create_namespaced_service_account(namespace, {"metadata": {"name": "ada"}})
    return namespace


def test_workers_in_pods_on_gke_serve_the_queue_of_their_stack_and_go(
    lab: Lab,
    kubernetes_node: Kubernetes,
    python_image: str,
    people: str,
    pubsub_emulator: PubsubEmulator,
    gcs: GcsServer,
    google: GoogleServer,
    from_pods: Mapping[str, str],
    tmp_path: Path,
) -> None:
    space = f"train-{uuid.uuid4().hex[:8]}"
    api = kubernetes_node.administrator().api
    core, batch = client.CoreV1Api(api), client.BatchV1Api(api)
    lab.environment |= pubsub_emulator.environment | gcs.environment | google.environment
    lab.environment[KUBECONFIG_VARIABLE] = str(kubernetes_node.kubeconfig_with_context(tmp_path / "admin", "gke"))
    inside = {"quota": {"pods": "4"}, "workload_identity": True, "launchers": [f"ServiceAccount:{people}/ada"]}
    cluster = {"context": "gke", "cluster_identifier": "gke", "server": "https://gke.example.com"}
    lab.init("dev")
    lab.set("dev", "kubernetes", {"gke": {**cluster, "namespaces": {space: inside}}})
    lab.up("dev")
    google.put_secret("dev-hf-token", b"hf-1")
    [bucket] = lab.cloud.ids(":Bucket")
    gcs.make_bucket(bucket)
    lab.runtime("stack", "publish", "--stack", "dev", "--yes")
    wait_for_right(kubernetes_node.account(people, "ada"), "create", "jobs", space, group="batch")

    # What an image of workers has: `runtime`, and its packages.
    code, packages = tmp_path / "code", Path(sysconfig.get_path("purelib"))
    shutil.copytree(ROOT / "runtime", code / "runtime", ignore=shutil.ignore_patterns("__pycache__"))
    (code / "runtime-command").write_text('#!/bin/sh\nexec python3 -m runtime "$@"\n')
    mounts = [{"source": f"claim://{each}", "target": f"/{each}", "mode": "ro"} for each in ("code", "packages")]
    setup = "cp /code/runtime-command /usr/local/bin/runtime; chmod 755 /usr/local/bin/runtime"
    for claim, folder in (("code", code), ("packages", packages)):
        kubernetes_node.bind_folder(space, claim, folder)
    (tmp_path / "runtime.toml").write_text(
        f"""
        [targets.gke]
        kind = "kubernetes"
        stack = "dev"
        records = "gs://{bucket}/jobs"
        records_env = {{ STORAGE_EMULATOR_HOST = "{from_pods["STORAGE_EMULATOR_HOST"]}" }}
        image = "{python_image}"
        image_pull_policy = "Never"
        setup = ["{setup}"]
        """
    )
    ada = kubernetes_node.kubeconfig_with_context(tmp_path / "ada", "gke", token=kubernetes_node.token(people, "ada"))
    # Her machine has no `pulumi`, and the kubeconfig of a launcher.
    hers = {
        "PATH": os.defpath,
        "PULUMI_CONFIG_PASSPHRASE": None,
        "RUNTIME_OUTPUTS": f"gs://{bucket}/contract/v1.json",
        "KUBECONFIG": str(ada),
    }
    command = ["sh", "-c", 'test "$HF_TOKEN" = hf-1 && hostname > "$RUNTIME_OUTPUT_DIR/host"']
    lines = [json.dumps({"command": command, "key": f"task-{number}"}) for number in range(6)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(lines) + "\n")

    def ended() -> int:
        status = lab.runtime("status", "pods", "--exact", "-o", "json", cwd=tmp_path, **hers).json()
        return int(status["totals"]["succeeded"] + status["totals"]["failed"])

    lab.runtime("submit", "--from", "tasks.jsonl", "--experiment", "pods", cwd=tmp_path, **hers)
    # Neither can take all six tasks, and both cannot have left once six are done.
    fleet = ["worker", "--on", "gke", "--count", "2", "--max-tasks", "4", "--set", f"mounts={json.dumps(mounts)}"]
    variables = {**from_pods, "PYTHONPATH": "/code:/packages"}
    fleet += [word for name, value in variables.items() for word in ("--env", f"{name}={value}")]
    job = lab.runtime(*fleet, cwd=tmp_path, **hers).out.split()[0]
    assert wait_until(lambda: ended() == 6, every_s=0.5), lab.runtime("logs", job, cwd=tmp_path, **hers).text
    results = lab.runtime("results", "pods", "-o", "json", cwd=tmp_path, **hers).json()
    pods = core.list_namespaced_pod(space).items
    lab.runtime("cancel", job, cwd=tmp_path, **hers)
    left = [*core.list_namespaced_pod(space).items, *batch.list_namespaced_job(space).items]
    # Kubernetes looks a second time, five seconds later, at a namespace that had claims.
    core.delete_collection_namespaced_persistent_volume_claim(space)
    lab.run("destroy", "--yes", "--skip-preview", "--stack", "dev")

    assert {(each["state"], each["attempts"]) for each in results} == {("succeeded", 1)}
    hosts = [each.data.decode().strip() for key, each in gcs.buckets[bucket].items() if key.endswith("/host")]
    assert len(hosts) == len(results) == 6
    assert set(hosts) == {each.spec.hostname for each in pods}
    assert [each.spec.service_account_name for each in pods] == ["runtime-job", "runtime-job"]
    assert left == []
    assert lab.resources("dev") == {}
    assert space not in [each.metadata.name for each in core.list_namespace().items]


def test_topic_deleted_at_the_service_is_drift_and_comes_back(lab: Lab, pubsub_emulator: PubsubEmulator) -> None:
    from google.pubsub_v1 import PublisherClient

    lab.environment |= pubsub_emulator.environment
    lab.init("dev")
    lab.up("dev")
    topic = "projects/my-lab-dev/topics/dev-default-dead"
    PublisherClient().delete_topic(topic=topic)
    with lab.cloud.change() as world:
        del world.resources[topic]

    found = {step.name: step.op for step in lab.preview("dev", "--refresh")}
    lab.up("dev", "--refresh")

    assert found["default-queue-dead-topic"] == "create"
    assert PublisherClient().get_topic(topic=topic).name == topic
