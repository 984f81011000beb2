"""`pulumi up` → `runtime submit` → `runtime worker` → records, on the resources that the program created."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.harness import Lab
from tests.fakes.gcs import GcsServer
from tests.fakes.google import GoogleServer
from tests.services_support import PubsubEmulator

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
