"""Failures while the engine works, each completed by the next `up`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from infra.components.late import PATIENCE_VARIABLE
from tests.engine.google_store import Fault
from tests.engine.harness import PACK, ROOT, Lab, Said
from tests.engine.test_adoption import seed

TOPIC = "urn:pulumi:dev::research-runtime::runtime:queue:Queue$gcp:pubsub/topic:Topic::default-queue-topic"

NOT_ENABLED = (
    "Error 403: Cloud Pub/Sub API has not been used in project 861911186264 before or it is disabled. "
    "Reason: SERVICE_DISABLED"
)
NO_ACCOUNT = "Error 400: Service account dev-worker@my-lab-dev.iam.gserviceaccount.com does not exist."


AGENT_LATE = "Error 400: Service account service-861911186264@gcp-sa-pubsub.iam.gserviceaccount.com does not exist."
REFUSED = "Error 403: Permission 'pubsub.topics.create' denied on resource (or it may not exist)."


@pytest.mark.parametrize(
    "fault",
    [
        Fault(type="topic:Topic", name="default-queue-topic", times=12, message=NOT_ENABLED),
        Fault(type="IAMMember", name="default-queue-agent", times=12, message=AGENT_LATE),
        Fault(type="IAMMember", name="worker", times=12, message=NO_ACCOUNT),
        Fault(type="topic:Topic", name="default-queue-topic", times=5, message=REFUSED),
    ],
    ids=["api", "agent", "account", "grant"],
)
def test_first_up_waits_for_what_google_makes_known_late(lab: Lab, fault: Fault) -> None:
    lab.init("dev")
    lab.cloud.inject(fault)

    said = lab.up("dev")

    assert lab.cloud.faults() == []
    assert "Google does not know" in said.text or "Google refuses" in said.text
    lab.expect_no_changes("dev")


@pytest.mark.parametrize(("message", "tries"), [(NOT_ENABLED, 14), (REFUSED, 6), ("Error 403: Quota exceeded", 1)])
def test_first_up_gives_up_in_the_end_and_is_completed_by_the_next(lab: Lab, message: str, tries: int) -> None:
    lab.init("dev")
    lab.cloud.inject(Fault(type="topic:Topic", name="default-queue-topic", times=100, message=message))

    first = lab.up("dev", check=False)
    lab.cloud.inject()
    created = [each["urn"] for each in lab.cloud.calls("create")]
    lab.up("dev")

    assert first.code != 0
    assert message in first.text
    assert created.count(TOPIC) == tries
    lab.expect_no_changes("dev")


def test_refusal_is_final_in_a_run_that_makes_nothing_that_spreads_late_and_without_patience(lab: Lab) -> None:
    lab.init("dev")
    topic = Fault(type="topic:Topic", name="default-queue-topic", times=100, message=REFUSED)
    lab.cloud.inject(topic)
    without = lab.run("up", "--yes", "--skip-preview", "--stack", "dev", check=False, **{PATIENCE_VARIABLE: "0"})
    lab.cloud.inject()
    lab.up("dev")
    with lab.cloud.change() as world:
        del world.resources["projects/my-lab-dev/topics/dev-default"]
    lab.cloud.inject(topic)

    later = lab.up("dev", "--refresh", check=False)

    assert (without.code != 0, later.code != 0) == (True, True)
    assert "next try" not in without.text + later.text


def test_up_that_was_killed_before_google_acted_is_taken_up_again(lab: Lab) -> None:
    lab.init("dev")
    kill_while_creating(lab, "before")

    locked = lab.up("dev", check=False)
    lab.run("cancel", "--yes", "dev")
    lab.up("dev")
    lab.run("refresh", "--yes", "--skip-preview", "--clear-pending-creates", "--stack", "dev")

    assert (locked.code != 0, "currently locked" in locked.text) == (True, True)
    assert "pending_operations" not in lab.export("dev")["deployment"]
    lab.expect_no_changes("dev")


def test_up_that_was_killed_after_google_acted_takes_over_what_was_made(lab: Lab) -> None:
    lab.init("dev")
    kill_while_creating(lab, "after")
    lab.run("cancel", "--yes", "dev")

    refused = lab.up("dev", check=False)
    lab.run("refresh", "--yes", "--skip-preview", "--clear-pending-creates", "--stack", "dev")
    lab.take_over("dev", {"default-queue-topic": "projects/my-lab-dev/topics/dev-default"})
    lab.up("dev")

    assert refused.code != 0
    assert "interrupted while creating" in refused.text
    assert "pending_operations" not in lab.export("dev")["deployment"]
    assert len(lab.cloud.ids("Topic")) == 2
    lab.expect_no_changes("dev")


def kill_while_creating(lab: Lab, when: str) -> None:
    """Kill the machine that runs `up` while it creates the topic."""
    lab.cloud.inject(Fault(type="topic:Topic", name="default-queue-topic", hang=when))
    process = lab.start("up", "--yes", "--skip-preview", "--parallel", "1", "--stack", "dev")
    lab.wait_for_call("hang")
    lab.kill(process)
    pending = lab.export("dev")["deployment"]["pending_operations"]
    assert TOPIC in [each["resource"]["urn"] for each in pending if each["type"] == "creating"]


def test_bad_program_is_blocked_by_the_policy_pack_before_it_is_made_and_once_it_is(lab: Lab) -> None:
    # The settings of `dev`, which restrict locations.
    lab.init("bad", file="dev")
    (lab.project / "infra").unlink()
    (lab.project / "infra").mkdir()
    (lab.project / "infra" / "__main__.py").write_text(BAD_PROGRAM)
    api = {"project": "lab-project", "service": "storage.googleapis.com"}
    seed(lab.cloud, "gcp:projects/service:Service", "lab-project/storage.googleapis.com", **api)

    first = lab.run("preview", "--stack", "bad", *PACK, check=False)
    refused = lab.run("up", "--yes", "--stack", "bad", *PACK, check=False)
    nothing_made = lab.cloud.calls("create")
    lab.up("bad")
    second = lab.run("preview", "--stack", "bad", *PACK, check=False)

    assert (first.code != 0, refused.code != 0, second.code != 0) == (True, True, True)
    assert nothing_made == []
    assert broken_rules(first) == BROKEN_RULES
    assert broken_rules(refused) == BROKEN_RULES
    assert broken_rules(second) == BROKEN_RULES


def test_program_that_lets_strangers_in_is_blocked_by_the_policy_pack_before_anything_is_made(lab: Lab) -> None:
    lab.init("bad", file="dev")
    (lab.project / "infra").unlink()
    (lab.project / "infra").mkdir()
    (lab.project / "infra" / "__main__.py").write_text(OPEN_PROGRAM)

    refused = lab.run("up", "--yes", "--stack", "bad", *PACK, check=False)

    assert refused.code != 0
    assert lab.cloud.calls("create") == []
    assert broken_rules(refused) >= OPENING_RULES, refused.text
    named = {"open-key", "open-subnet", "open-admin"}
    assert {name for name in named if name in refused.text} == named


def broken_rules(said: Said) -> set[str]:
    return set(re.findall(r"\[mandatory\]  (\S+)  ", said.text))


BROKEN_RULES = {
    "agent-first",
    "allowed-members",
    "api-first",
    "buckets",
    "dead-letters",
    "labels",
    "no-expiry",
    "project-grants",
    "regions",
    "retention",
}

OPENING_RULES = {
    "allowed-members",
    "allowed-roles",
    "allowed-types",
    "closed-contract",
    "closed-firewalls",
    "closed-instances",
    "narrow-custom-roles",
    "pinned-federation",
    "project-grants",
}

OPEN_PROGRAM = """
import pulumi
from pulumi_gcp import Provider, compute, iam, projects, serviceaccount, storage

opts = pulumi.ResourceOptions(provider=Provider("google", project="my-lab-dev"))
place = {"project": "my-lab-dev", "opts": opts}
head = serviceaccount.Account("open-head", account_id="open-head", **place)
serviceaccount.Key("open-key", service_account_id=head.name, opts=opts)
compute.SubnetworkIAMMember(
    "open-subnet", subnetwork="s", region="us-central1", role="roles/compute.networkUser", member="allUsers", **place
)
projects.IAMMember("open-admin", role="roles/owner", member=head.email.apply("serviceAccount:{}".format), **place)
serviceaccount.IAMMember(
    "open-token", service_account_id=head.name, role="roles/iam.serviceAccountTokenCreator", member="allUsers", opts=opts
)
storage.BucketIAMMember(
    "open-writer", bucket="open-bucket", role="roles/storage.objectUser", member="allAuthenticatedUsers", opts=opts
)
projects.IAMCustomRole(
    "open-role", role_id="open", title="Open", permissions=["secretmanager.versions.access"], **place
)
iam.WorkloadIdentityPoolProvider(
    "open-provider",
    workload_identity_pool_id="open-pool",
    workload_identity_pool_provider_id="open-any",
    attribute_mapping={"google.subject": "assertion.sub"},
    oidc={"issuer_uri": "https://token.actions.githubusercontent.com"},
    **place,
)
compute.Firewall(
    "open-firewall",
    name="open",
    network="n",
    source_ranges=["0.0.0.0/1", "128.0.0.0/1"],
    allows=[{"protocol": "all"}],
    **place,
)
compute.Instance(
    "open-machine",
    name="open",
    machine_type="n2-standard-8",
    zone="us-central1-a",
    boot_disk={"initialize_params": {"image": "debian"}},
    network_interfaces=[{"network": "n"}],
    metadata={"ssh-keys": "root:ssh-ed25519 A"},
    **place,
)
"""

BAD_PROGRAM = """
import pulumi
from pulumi_gcp import Provider, projects, pubsub, storage

opts = pulumi.ResourceOptions(provider=Provider("google", project="lab-project"))
place = {"project": "lab-project"}
apis = [
    projects.Service(name, service=f"{name}.googleapis.com", **place, opts=opts)
    for name in ("cloudresourcemanager", "pubsub")
]
after = pulumi.ResourceOptions.merge(opts, pulumi.ResourceOptions(depends_on=apis))
projects.IAMMember("all", role="roles/owner", member="group:lab@example.com", **place, opts=after)
topic = pubsub.Topic("topic", name="tasks", **place, opts=after)
pubsub.Subscription("subscription", name="tasks", topic=topic.id, **place, opts=after)
agent = "serviceAccount:1234567@cloudservices.gserviceaccount.com"
pubsub.TopicIAMMember("agent", topic=topic.name, role="roles/pubsub.publisher", member=agent, **place, opts=after)
storage.Bucket("bucket", name="lab-bucket", location="europe-west4", **place, opts=opts)
"""


def test_checked_in_stack_files_are_left_alone() -> None:
    # A lab works on copies; this test notices one that does not.
    files = sorted(path.name for path in Path(ROOT).glob("Pulumi.*.yaml"))

    assert files
    assert [name for name in files if "encryptionsalt" in (ROOT / name).read_text()] == []
