"""A destroy keeps the resources that must survive, and a stack adopts existing resources."""

from __future__ import annotations

from tests.engine.google_store import Cloud
from tests.engine.harness import PACK, Lab

BOTH = ("dev", "marin-pipeline")
"""Together they have every kind of resource that survives: APIs, bucket, pool, roles."""


def test_destroy_leaves_what_must_stay_and_the_next_up_adopts_it(lab: Lab) -> None:
    for stack in BOTH:
        lab.init(stack)
    for key in ("ci.state_bucket", "ci.state_key"):
        lab.set("marin-pipeline", key, None)
    lab.set("marin-pipeline", "protect", False)
    for stack in BOTH:
        lab.up(stack)
    objects = {"objects": 3}
    bucket = lab.cloud.one(":Bucket")
    with lab.cloud.change() as world:
        world.resources[bucket]["outputs"] |= objects

    for stack in BOTH:
        lab.destroy(stack)
    left = types(lab.cloud)
    refused = [lab.up(stack, check=False) for stack in BOTH]
    for stack in BOTH:
        lab.set(stack, "adopt", True)
    steps = [step.op for step in lab.preview("dev", *PACK) if step.name == "records-bucket"]
    for stack in BOTH:
        lab.up(stack, *PACK)
    adopted = [lab.preview(stack, "--refresh") for stack in BOTH]
    for stack in BOTH:
        lab.set(stack, "adopt", None)
    after = [lab.preview(stack, "--refresh") for stack in BOTH]
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
    assert [(each.code != 0, "already exists" in each.text) for each in refused] == [(True, True)] * 2
    assert steps == ["import", "update"]
    assert adopted == [[], []]
    # What an import cannot compare is set by the same `up`, so only a change by hand is drift.
    assert (after, drift) == ([[], []], [("records-bucket", ("labels.stack",))])
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
