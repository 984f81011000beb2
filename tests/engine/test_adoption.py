"""A destroy keeps the resources that must survive, and a stack adopts existing resources."""

from __future__ import annotations

from tests.engine.google_store import Cloud
from tests.engine.harness import PACK, Lab

CI = {"repositories": {"lab/research": {"repository_id": 123456789, "owner_id": 987654321}}}


def test_destroy_leaves_what_must_stay_and_the_next_up_adopts_it(lab: Lab) -> None:
    lab.init("dev")
    # With a pipeline identity, the small stack has every surviving resource: APIs, bucket, pool, roles.
    lab.set("dev", "ci", CI)
    lab.up("dev")
    objects = {"objects": 3}
    bucket = lab.cloud.one(":Bucket")
    with lab.cloud.change() as world:
        world.resources[bucket]["outputs"] |= objects

    lab.destroy("dev")
    left = types(lab.cloud)
    refused = lab.up("dev", check=False)
    lab.set("dev", "adopt", True)
    steps = [step.op for step in lab.preview("dev", *PACK) if step.name == "records-bucket"]
    lab.up("dev", *PACK)
    adopted = lab.preview("dev", "--refresh")
    lab.set("dev", "adopt", None)
    after = lab.preview("dev", "--refresh")
    with lab.cloud.change() as world:
        del world.resources[bucket]["inputs"]["labels"]["stack"]
    drift = [(step.name, step.paths) for step in lab.preview("dev", "--refresh")]
    lab.up("dev", "--refresh")

    assert left == {
        "Service",
        "ServiceIdentity",
        "Bucket",
        "WorkloadIdentityPool",
        "WorkloadIdentityPoolProvider",
        "IAMCustomRole",
    }
    assert lab.cloud.world().deleted == {}
    assert (refused.code != 0, "already exists" in refused.text) == (True, True)
    assert steps == ["import", "update"]
    assert adopted == []
    # What an import cannot compare is set by the same `up`, so only a change by hand is drift.
    assert (after, drift) == ([], [("records-bucket", ("labels.stack",))])
    assert lab.cloud.world().resources[bucket]["outputs"]["objects"] == 3
    assert lab.preview("dev", "--refresh") == []


def test_topic_made_by_hand_is_imported_and_brought_into_line(lab: Lab) -> None:
    lab.init("dev")
    seed(lab.cloud, "gcp:projects/service:Service", "my-lab-dev/pubsub.googleapis.com", service="pubsub.googleapis.com")
    topic = "projects/my-lab-dev/topics/dev-default"
    seed(lab.cloud, "gcp:pubsub/topic:Topic", topic, name="dev-default", labels={"team": "old"})

    lab.take_over("dev", {"default-queue-topic": topic})
    steps = {step.name: step for step in lab.preview("dev")}
    lab.up("dev")

    assert steps["default-queue-topic"].op == "update"
    assert {step.op for step in steps.values()} == {"create", "update"}
    assert lab.cloud.world().resources[topic]["inputs"]["labels"] == {"managed-by": "research-runtime", "stack": "dev"}
    assert lab.preview("dev", "--refresh") == []


def test_adopting_what_is_not_there_is_refused_before_anything_is_made(lab: Lab) -> None:
    lab.init("dev")
    lab.set("dev", "adopt", True)

    said = lab.run("preview", "--stack", "dev", check=False)

    assert said.code != 0
    assert "my-lab-dev-dev-records" in said.text
    assert "does not exist" in said.text


def seed(cloud: Cloud, type_: str, id_: str, **inputs: object) -> None:
    """Add a topic that somebody made by hand."""
    with cloud.change() as world:
        inputs = {"project": "my-lab-dev", **inputs}
        world.resources[id_] = {"type": type_, "urn": "by hand", "inputs": inputs, "outputs": {}}


def types(cloud: Cloud) -> set[str]:
    return {each["type"].rpartition(":")[2] for each in cloud.world().resources.values()}
