"""Every rule, on small programs that keep it and that break it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pulumi
import pulumi_gcp as gcp
import pulumi_kubernetes as kubernetes
import pytest

from infra.check.recording import UNKNOWN, Recording, UnknownValue, record
from infra.gcp.catalog import BOOT_IMAGE_PROJECTS
from infra.gcp.outputs import compute
from infra.naming import labels
from infra.policy.base import PIPELINE, Graph, StackBounds
from infra.policy.grants import HEAD, NODE_ROLES
from infra.policy.rules import RULES, Violation, apply_rule, apply_rules, bounds_of
from infra.settings.read import parse_settings
from tests.infra.test_config import GOOD

LABELS = labels("dev", {})
AGENT = "serviceAccount:service-1234567@gcp-sa-pubsub.iam.gserviceaccount.com"
SUBNET = "projects/p/regions/us-west4/subnetworks/s"


PINNED = (
    "(assertion.repository_id == '11' && assertion.repository_owner_id == '22'"
    " && assertion.event_name != 'pull_request_target')"
)


class Component(pulumi.ComponentResource):
    def __init__(self, name: str, type_: str, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__(type_, name, None, opts)


class Lab:
    """Tools to write a program under test: a provider, a component, and shortcuts for resources."""

    def __init__(self, type_: str = "runtime:test:Lab") -> None:
        self.google = gcp.Provider("google", project="my-lab")
        self.cluster = kubernetes.Provider("cluster", context="lab")
        self.type = type_
        self.component = Component("lab", type_, pulumi.ResourceOptions(providers=[self.google, self.cluster]))

    def opts(self, **others: Any) -> pulumi.ResourceOptions:
        return pulumi.ResourceOptions(parent=self.component, **others)

    def topic(self, name: str, **others: Any) -> gcp.pubsub.Topic:
        return gcp.pubsub.Topic(f"lab-{name}", name=name, labels=LABELS, opts=self.opts(**others))

    def subscription(
        self, name: str, topic: gcp.pubsub.Topic, opts: dict[str, Any] | None = None, **others: Any
    ) -> Any:
        arguments: dict[str, Any] = {
            "expiration_policy": {"ttl": ""},
            "message_retention_duration": "2678400s",
            "labels": LABELS,
        }
        return gcp.pubsub.Subscription(
            f"lab-{name}", name=name, topic=topic.id, **(arguments | others), opts=self.opts(**(opts or {}))
        )

    def dead_letters(self, topic: gcp.pubsub.Topic) -> dict[str, Any]:
        return {"dead_letter_policy": {"dead_letter_topic": topic.id, "max_delivery_attempts": 100}}

    def instance(self, **others: Any) -> None:
        arguments: dict[str, Any] = {
            "machine_type": "n2-standard-8",
            "zone": "us-west4-a",
            "boot_disk": {"initialize_params": {"image": "debian"}},
            "network_interfaces": [{"subnetwork": SUBNET}],
            "shielded_instance_config": {
                "enable_secure_boot": True,
                "enable_vtpm": True,
                "enable_integrity_monitoring": True,
            },
            "metadata": {"block-project-ssh-keys": "TRUE"},
            "labels": LABELS,
        }
        gcp.compute.Instance("lab-vm", **(arguments | others), opts=self.opts())

    def firewall(self, **others: Any) -> None:
        arguments: dict[str, Any] = {
            "network": "n",
            "direction": "INGRESS",
            "source_ranges": ["35.235.240.0/20"],
            "allows": [{"protocol": "tcp", "ports": ["22"]}],
        }
        gcp.compute.Firewall("lab-firewall", **(arguments | others), opts=self.opts())

    def bucket(self, **others: Any) -> None:
        arguments: dict[str, Any] = {
            "location": "us-west4",
            "uniform_bucket_level_access": True,
            "public_access_prevention": "enforced",
            "versioning": {"enabled": True},
            "soft_delete_policy": {"retention_duration_seconds": 604_800},
            "labels": LABELS,
        }
        gcp.storage.Bucket("lab-bucket", **(arguments | others), opts=self.opts())

    def project_grant(self, role: pulumi.Input[str], **others: Any) -> None:
        gcp.projects.IAMMember(
            "lab-grant", project="my-lab", role=role, member="group:x@example.com", **others, opts=self.opts()
        )

    def custom_role(self, *permissions: str) -> gcp.projects.IAMCustomRole:
        opts, name = self.opts(), "lab-role"
        if self.type == HEAD:
            # A head has the roles of a component of their own.
            opts, name = pulumi.ResourceOptions(parent=Component("lab-nodes", NODE_ROLES, opts)), "lab-nodes-role"
        return gcp.projects.IAMCustomRole(name, role_id="lab", title="Lab", permissions=[*permissions], opts=opts)

    def namespace(self, *, quota: bool = True, deny: dict[str, Any] | None = None) -> None:
        labels = LABELS | {"pod-security.kubernetes.io/enforce": "baseline"}
        kubernetes.core.v1.Namespace("lab-train", metadata={"name": "train", "labels": labels}, opts=self.opts())
        inside = {"namespace": "train", "labels": LABELS}
        if quota:
            kubernetes.core.v1.ResourceQuota(
                "lab-quota", metadata=inside, spec={"hard": {"pods": "9"}}, opts=self.opts()
            )
        if deny is not None:
            kubernetes.networking.v1.NetworkPolicy("lab-deny", metadata=inside, spec=deny, opts=self.opts())

    def claim(self, size: str | None, storage_class: str | None = None) -> None:
        kubernetes.core.v1.PersistentVolumeClaim(
            "lab-claim",
            metadata={"name": "scratch", "namespace": "train", "labels": LABELS},
            spec={
                "access_modes": ["ReadWriteMany"],
                "resources": {"requests": {"storage": size} if size else {}},
                "storage_class_name": storage_class,
            },
            opts=self.opts(),
        )


Program = Callable[[Lab], None]
UNBOUNDED = StackBounds()
BOUNDED = StackBounds(
    protect=False, regions=frozenset({"us-west4", "us-east1", "europe-west4"}), storage_classes=frozenset({"fast"})
)
DENY = {"pod_selector": {}, "policy_types": ["Ingress", "Egress"]}


NEW, THERE, STATE = "before it is made", "once it is made", "by what the state says"
"""When a rule is evaluated. With the state alone it judges values left to the state, and sees the provider's values."""


def answered(type_: str, name: str, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the outputs of an existing resource as Google returns them, without unknown values."""
    if type_ == "gcp:projects/serviceIdentity:ServiceIdentity":
        return {"id": name, "email": AGENT.removeprefix("serviceAccount:"), "member": AGENT}
    if type_ == "gcp:projects/iAMCustomRole:IAMCustomRole":
        return {"id": name, "name": f"projects/my-lab/roles/{inputs['roleId']}"}
    outputs = {"id": UNKNOWN, **compute(type_, name, inputs)}
    return {key: f"{name}-{key}" if isinstance(value, UnknownValue) else value for key, value in outputs.items()}


@cache
def run(program: Program, *, component: str = HEAD, day: str = NEW) -> Recording:
    if day == NEW:
        return record(lambda: program(Lab(component)))
    recording = record(lambda: program(Lab(component)), preview=False, compute=answered)
    if day == THERE:
        return recording
    return replace(recording, resources=tuple(replace(each, inputs=each.outputs) for each in recording.resources))


def found_by(rule: str, program: Program, bounds: StackBounds = UNBOUNDED, **options: Any) -> list[tuple[str, str]]:
    """Return each resource's name with the rule's message."""
    recording = run(program, **options)
    return [(recording.get(each.urn).name, each.message) for each in apply_rule(rule, recording.resources, bounds)]


# --- a correct queue, with one change each


def queue(
    lab: Lab, *, task: dict[str, Any] | None = None, dead: dict[str, Any] | None = None, grants: bool = True
) -> None:
    topic, dead_topic = lab.topic("tasks"), lab.topic("tasks-dead")
    lab.subscription("dead-sub", dead_topic, **(dead or {}))
    subscription = lab.subscription("tasks-sub", topic, **(lab.dead_letters(dead_topic) | (task or {})))
    if grants:
        agent = gcp.projects.ServiceIdentity("lab-agent", service="pubsub.googleapis.com", opts=lab.opts())
        gcp.pubsub.TopicIAMMember(
            "lab-may-bury", topic=dead_topic.id, role="roles/pubsub.publisher", member=agent.member, opts=lab.opts()
        )
        gcp.pubsub.SubscriptionIAMMember(
            "lab-may-take",
            subscription=subscription.name,
            role="roles/pubsub.subscriber",
            member=agent.member,
            opts=lab.opts(),
        )


def lonely_subscription(lab: Lab) -> None:
    lab.subscription("sub", lab.topic("tasks"))


def dead_letters_to_nowhere(lab: Lab) -> None:
    lab.subscription("sub", lab.topic("tasks"), **lab.dead_letters(lab.topic("dead")))


def key(lab: Lab) -> None:
    gcp.serviceaccount.Key("lab-key", service_account_id="a", opts=lab.opts())


def public_bucket(lab: Lab) -> None:
    gcp.storage.BucketIAMMember(
        "lab-g", bucket="b", role="roles/storage.objectViewer", member="allUsers", opts=lab.opts()
    )


def group_grant(lab: Lab, role: str = "roles/storage.objectViewer") -> None:
    gcp.storage.BucketIAMMember("lab-g", bucket="b", role=role, member="group:x@example.com", opts=lab.opts())


def open_contract(lab: Lab) -> None:
    gcp.storage.BucketIAMMember(
        "lab-g", bucket="b", role="roles/storage.objectUser", member="group:x@example.com", opts=lab.opts()
    )


def federation(lab: Lab, condition: str = PINNED) -> None:
    gcp.iam.WorkloadIdentityPoolProvider(
        "lab-p",
        workload_identity_pool_id="ci",
        workload_identity_pool_provider_id="preview",
        attribute_condition=condition,
        attribute_mapping={"google.subject": "assertion.sub", "attribute.role": "'preview'"},
        oidc={"issuer_uri": "https://token.actions.githubusercontent.com"},
        opts=lab.opts(),
    )


def cluster_role(lab: Lab, resource: str = "jobs") -> None:
    inside = {"name": "r", "namespace": "train", "labels": LABELS}
    rules = [{"api_groups": ["batch"], "resources": [resource], "verbs": ["get"]}]
    kubernetes.rbac.v1.Role("lab-r", metadata=inside, rules=rules, opts=lab.opts())
    group = "rbac.authorization.k8s.io"
    kubernetes.rbac.v1.RoleBinding(
        "lab-rb",
        metadata=inside,
        role_ref={"api_group": group, "kind": "Role", "name": "r"},
        subjects=[{"kind": "Group", "name": "lab", "api_group": group}],
        opts=lab.opts(),
    )


def own_custom_role(lab: Lab) -> None:
    lab.project_grant(lab.custom_role("tpu.nodes.list").name)


def pipeline_grant(lab: Lab, member: str | None = None) -> None:
    """Grant within the component of the project's pipeline, by default to the account that it makes."""
    opts = pulumi.ResourceOptions(parent=Component("lab-ci", PIPELINE, lab.opts()))
    made = gcp.serviceaccount.Account("lab-deployer", account_id="lab-deployer", project="my-lab", opts=opts)
    given = made.email.apply(lambda email: f"serviceAccount:{email}") if member is None else member
    gcp.projects.IAMMember("lab-g", project="my-lab", role="roles/iam.serviceAccountAdmin", member=given, opts=opts)


def secret_input(lab: Lab) -> None:
    gcp.pubsub.Topic("lab-t", name="t", labels=LABELS | {"x": pulumi.Output.secret("y")}, opts=lab.opts())


def labelled(lab: Lab) -> None:
    lab.topic("tasks")
    kubernetes.core.v1.ServiceAccount("lab-c", metadata={"labels": LABELS}, opts=lab.opts())


def unlabelled(lab: Lab) -> None:
    gcp.pubsub.Topic("lab-t", name="t", labels={"team": "x"}, opts=lab.opts())
    kubernetes.core.v1.ServiceAccount("lab-c", metadata={}, opts=lab.opts())


def half_protected(lab: Lab) -> None:
    lab.topic("kept", protect=True)
    lab.topic("loose")
    gcp.serviceaccount.Account("lab-a", account_id="worker", opts=lab.opts())


def unprotected(lab: Lab) -> None:
    lab.topic("loose")


def cache(lab: Lab) -> None:
    gcp.artifactregistry.Repository(
        "lab-cache", repository_id="c", location="us-west4", format="DOCKER", mode="REMOTE_REPOSITORY", opts=lab.opts()
    )


def strays(lab: Lab) -> None:
    lab.bucket(location="US-EAST1")
    lab.instance(zone="europe-west4-b")


def address(lab: Lab, kind: str | None) -> None:
    gcp.compute.Address("lab-address", address_type=kind, labels=LABELS, opts=lab.opts())


def key_for_people(lab: Lab) -> None:
    gcp.kms.CryptoKeyIAMMember(
        "lab-grant",
        crypto_key_id="projects/my-lab/locations/us-west4/keyRings/r/cryptoKeys/k",
        role="roles/cloudkms.cryptoKeyEncrypterDecrypter",
        member="group:lab@example.com",
        opts=lab.opts(),
    )


def schedule(lab: Lab, **properties: Any) -> None:
    daily = {"daily_schedule": {"days_in_cycle": 1, "start_time": "09:00"}}
    snapshots: Any = {"schedule": daily, "snapshot_properties": properties}
    gcp.compute.ResourcePolicy("lab-schedule", snapshot_schedule_policy=snapshots, opts=lab.opts())


def stops_machines(lab: Lab) -> None:
    stop: Any = {"time_zone": "UTC", "vm_stop_schedule": {"schedule": "0 9 * * *"}}
    gcp.compute.ResourcePolicy("lab-schedule", instance_schedule_policy=stop, opts=lab.opts())


def waits_for_api(lab: Lab) -> None:
    service = gcp.projects.Service("lab-pubsub", service="pubsub.googleapis.com", opts=lab.opts())
    topic = lab.topic("tasks", depends_on=[service])
    # The subscription waits for the API through the topic.
    lab.subscription("sub", topic)


def waits_with_its_parent(lab: Lab) -> None:
    service = gcp.projects.Service("lab-pubsub", service="pubsub.googleapis.com", opts=lab.opts())
    inner = Component("lab-inner", "runtime:test:Inner", lab.opts(depends_on=[service]))
    gcp.pubsub.Topic("lab-inner-t", name="t", opts=pulumi.ResourceOptions(parent=inner))


def waits_for_another_api(lab: Lab) -> None:
    service = gcp.projects.Service("lab-storage", service="storage.googleapis.com", opts=lab.opts())
    lab.topic("tasks", depends_on=[service])


def grants_to_agent(lab: Lab, *, waits: bool) -> None:
    agent = gcp.projects.ServiceIdentity("lab-agent", service="pubsub.googleapis.com", opts=lab.opts())
    gcp.pubsub.TopicIAMMember(
        "lab-g",
        topic="t",
        role="roles/pubsub.publisher",
        member=AGENT,
        opts=lab.opts(depends_on=[agent] if waits else []),
    )


def open_policy(lab: Lab) -> None:
    lab.namespace(deny=DENY | {"ingress": [{}]})


def clusters_own(lab: Lab) -> None:
    inside = {"name": "r", "namespace": "kube-system", "labels": LABELS}
    rules = [{"api_groups": ["batch"], "resources": ["jobs"], "verbs": ["get"]}]
    kubernetes.rbac.v1.Role("lab-r", metadata=inside, rules=rules, opts=lab.opts())


def limit_of_some_pods(lab: Lab) -> None:
    lab.namespace(quota=False, deny=DENY)
    inside = {"namespace": "train", "labels": LABELS}
    spec = {"hard": {"pods": "9"}, "scopes": ["BestEffort"]}
    kubernetes.core.v1.ResourceQuota("lab-quota", metadata=inside, spec=spec, opts=lab.opts())


def copies_elsewhere(lab: Lab) -> None:
    gcp.secretmanager.Secret(
        "lab-s",
        secret_id="s",
        labels=LABELS,
        replication={"user_managed": {"replicas": [{"location": "us-west4"}, {"location": "asia-east1"}]}},
        opts=lab.opts(),
    )
    lab.bucket(location="us", custom_placement_config={"data_locations": ["us-east1", "us-central1"]})


def claim_elsewhere(lab: Lab) -> None:
    lab.claim("1Gi")


KEPT: list[tuple[str, Program]] = [
    ("allowed-types", group_grant),
    ("allowed-roles", group_grant),
    ("allowed-members", group_grant),
    ("closed-contract", group_grant),
    ("pinned-federation", federation),
    ("pipeline-apart", pipeline_grant),
    ("narrow-cluster-roles", cluster_role),
    ("project-grants", own_custom_role),
    ("narrow-custom-roles", own_custom_role),
    ("tasks-stay", queue),
    ("dead-letters", queue),
    ("dead-letters-kept", queue),
    ("dead-letters-arrive", queue),
    ("no-expiry", queue),
    ("retention", queue),
    ("closed-instances", lambda lab: lab.instance()),
    ("closed-addresses", lambda lab: address(lab, "INTERNAL")),
    ("snapshots-only", lambda lab: schedule(lab, storage_locations="us-west4")),
    ("closed-firewalls", lambda lab: lab.firewall()),
    ("closed-firewalls", lambda lab: lab.firewall(source_ranges=["10.64.0.0/20"])),
    ("closed-firewalls", lambda lab: lab.firewall(source_ranges=["0.0.0.0/0"], direction="EGRESS")),
    ("no-secret-values", labelled),
    ("stack-key", labelled),
    ("encrypted", labelled),
    ("buckets", lambda lab: lab.bucket()),
    ("labels", labelled),
    ("protected", unprotected),
    ("protected", cache),
    ("regions", strays),
    ("claims", lambda lab: lab.claim("1Ti", "fast")),
    ("closed-namespaces", lambda lab: lab.namespace(deny=DENY)),
    ("api-first", waits_for_api),
    ("api-first", waits_with_its_parent),
    ("agent-first", lambda lab: grants_to_agent(lab, waits=True)),
]

BROKEN: list[tuple[str, Program, list[tuple[str, str]]]] = [
    ("allowed-types", key, [("lab-key", "is a `gcp:serviceaccount/key:Key`, which no stack may make")]),
    (
        "pipeline-apart",
        lambda lab: pipeline_grant(lab, "group:lab@example.com"),
        [("lab-g", "grants to `group:lab@example.com`, which is no account of the pipeline")],
    ),
    ("allowed-members", public_bucket, [("lab-g", "grants to `allUsers`, which is not of this stack")]),
    (
        "allowed-roles",
        lambda lab: group_grant(lab, "roles/storage.admin"),
        [
            (
                "lab-g",
                (
                    "grants `roles/storage.admin`, allowed are roles/storage.objectUser, roles/storage.objectViewer,"
                    " roles/storage.objectAdmin"
                ),
            )
        ],
    ),
    ("closed-contract", open_contract, [("lab-g", "lets its member write the contract with the records")]),
    (
        "pinned-federation",
        lambda lab: federation(lab, "true"),
        [("lab-p", "accepts tokens under another condition than `deploy_condition` and `preview_condition`")],
    ),
    ("narrow-cluster-roles", lambda lab: cluster_role(lab, "*"), [("lab-r", "allows `get *`")]),
    (
        "project-grants",
        lambda lab: lab.project_grant("roles/pubsub.admin"),
        [("lab-grant", "grants `roles/pubsub.admin` on the whole project")],
    ),
    (
        "narrow-custom-roles",
        lambda lab: (
            lab.custom_role("tpu.nodes.list", "pubsub.topics.setIamPolicy", "iam.serviceAccounts.actAs") and None
        ),
        [("lab-nodes-role", "contains `pubsub.topics.setIamPolicy`, `iam.serviceAccounts.actAs`")],
    ),
    (
        "tasks-stay",
        lambda lab: queue(lab, task={"push_config": {"push_endpoint": "https://example.org"}}),
        [("lab-tasks-sub", "sends its tasks elsewhere by `pushConfig`")],
    ),
    ("dead-letters", lonely_subscription, [("lab-sub", "has no dead letters")]),
    (
        "dead-letters-kept",
        dead_letters_to_nowhere,
        [("lab-sub", "sends its dead letters to a topic that has no subscription")],
    ),
    (
        "dead-letters-arrive",
        lambda lab: queue(lab, grants=False),
        [
            ("lab-tasks-sub", "has dead letters that Pub/Sub's agent may not publish"),
            ("lab-tasks-sub", "has dead letters that Pub/Sub's agent may not take off it"),
        ],
    ),
    (
        "no-expiry",
        lambda lab: queue(lab, dead={"expiration_policy": None}),
        [("lab-dead-sub", "is deleted with all its tasks after 31 days without a worker")],
    ),
    (
        "no-expiry",
        lambda lab: queue(lab, task={"expiration_policy": {"ttl": "86400s"}}),
        [("lab-tasks-sub", "is deleted with all its tasks after 31 days without a worker")],
    ),
    (
        "retention",
        lambda lab: queue(lab, task={"message_retention_duration": None}),
        [("lab-tasks-sub", "does not say how long it keeps messages")],
    ),
    (
        "retention",
        lambda lab: queue(lab, dead={"message_retention_duration": "600s"}),
        [("lab-tasks-sub", "keeps tasks for 2678400 s and its dead letters for 600 s only")],
    ),
    (
        "closed-instances",
        lambda lab: lab.instance(
            network_interfaces=[{"subnetwork": SUBNET, "access_configs": [{"nat_ip": "1.2.3.4"}]}]
        ),
        [("lab-vm", "has an external address")],
    ),
    (
        "closed-instances",
        lambda lab: lab.instance(boot_disk={"initialize_params": {"snapshot": "projects/x/global/snapshots/s"}}),
        [("lab-vm", "starts from a snapshot")],
    ),
    (
        "closed-instances",
        lambda lab: lab.instance(shielded_instance_config={"enable_vtpm": True, "enable_integrity_monitoring": True}),
        [("lab-vm", "is not shielded: `enableSecureBoot` is not true")],
    ),
    (
        "closed-instances",
        lambda lab: lab.instance(metadata={"block-project-ssh-keys": "FALSE"}),
        [("lab-vm", "has another value of the metadata `block-project-ssh-keys` than `true`")],
    ),
    ("closed-addresses", lambda lab: address(lab, "EXTERNAL"), [("lab-address", "is an external address")]),
    ("closed-addresses", lambda lab: address(lab, None), [("lab-address", "is an external address")]),
    ("snapshots-only", schedule, [("lab-schedule", "does not say where snapshots are kept")]),
    ("stack-key", key_for_people, [("lab-grant", "lets `group:lab@example.com` decrypt with the key")]),
    (
        "snapshots-only",
        stops_machines,
        [
            ("lab-schedule", "has a `instanceSchedulePolicy`"),
            ("lab-schedule", "does not say where snapshots are kept"),
        ],
    ),
    (
        "closed-firewalls",
        lambda lab: lab.firewall(source_ranges=["0.0.0.0/0"]),
        [("lab-firewall", "lets in `0.0.0.0/0`, which is not of this stack")],
    ),
    (
        "closed-firewalls",
        lambda lab: lab.firewall(source_ranges=["::/0"], allows=[{"protocol": "icmp"}]),
        [("lab-firewall", "lets in `::/0`, which is not of this stack")],
    ),
    (
        "closed-firewalls",
        lambda lab: lab.firewall(source_ranges=None),
        [("lab-firewall", "names no source, so it lets in everybody")],
    ),
    (
        "closed-firewalls",
        lambda lab: lab.firewall(source_ranges=["8.8.8.0/24"], allows=[{"protocol": "tcp", "ports": ["20-30"]}]),
        [("lab-firewall", "lets in `8.8.8.0/24`, which is not of this stack")],
    ),
    (
        "closed-firewalls",
        lambda lab: lab.firewall(source_ranges=["8.8.8.0/24"], allows=[{"protocol": "all"}]),
        [("lab-firewall", "lets in `8.8.8.0/24`, which is not of this stack")],
    ),
    ("no-secret-values", secret_input, [("lab-t", "has a secret value in `labels.x`")]),
    (
        "buckets",
        lambda lab: lab.bucket(
            uniform_bucket_level_access=False,
            public_access_prevention="inherited",
            versioning={"enabled": False},
            soft_delete_policy=None,
        ),
        [
            ("lab-bucket", "grants by object"),
            ("lab-bucket", "could be made public"),
            ("lab-bucket", "keeps no versions"),
            ("lab-bucket", "does not say how long deleted objects stay"),
        ],
    ),
    (
        "labels",
        unlabelled,
        [
            ("lab-t", "lacks the labels `managed-by: research-runtime` and `stack`"),
            ("lab-c", "lacks the labels `managed-by: research-runtime` and `stack`"),
        ],
    ),
    (
        "protected",
        half_protected,
        [("lab-loose", "holds work and can be destroyed"), ("lab-a", "holds work and can be destroyed")],
    ),
    ("claims", lambda lab: lab.claim("101Ti"), [("lab-claim", "asks for 101Ti, allowed is at most 100Ti")]),
    ("claims", lambda lab: lab.claim(None), [("lab-claim", "asks for no size")]),
    (
        "closed-namespaces",
        lambda lab: lab.namespace(quota=False, deny=DENY),
        [("lab-train", "makes the namespace `train` without a quota")],
    ),
    (
        "closed-namespaces",
        open_policy,
        [("lab-train", "makes the namespace `train` without a network policy that denies by default")],
    ),
    (
        "closed-namespaces",
        claim_elsewhere,
        [("lab-claim", "is in the namespace `train`, which has no network policy that denies by default")],
    ),
    (
        "closed-namespaces",
        limit_of_some_pods,
        [("lab-train", "makes the namespace `train` without a quota")],
    ),
    (
        "closed-namespaces",
        clusters_own,
        [("lab-r", "is in the namespace `kube-system`, which is the cluster's own")],
    ),
    (
        "api-first",
        lonely_subscription,
        [
            ("lab-tasks", "does not wait until pubsub.googleapis.com is on"),
            ("lab-sub", "does not wait until pubsub.googleapis.com is on"),
        ],
    ),
    ("api-first", waits_for_another_api, [("lab-tasks", "does not wait until pubsub.googleapis.com is on")]),
    (
        "agent-first",
        lambda lab: grants_to_agent(lab, waits=False),
        [("lab-g", f"grants to `{AGENT}`, and does not wait until that is made")],
    ),
]


ON_EVERY_DAY = pytest.mark.parametrize("day", [NEW, THERE, STATE])


@ON_EVERY_DAY
@pytest.mark.parametrize(("rule", "program"), KEPT, ids=[rule for rule, _ in KEPT])
def test_rule_that_a_program_keeps_finds_nothing(rule: str, program: Program, day: str) -> None:
    assert found_by(rule, program, day=day) == []


@ON_EVERY_DAY
@pytest.mark.parametrize(("rule", "program", "expected"), BROKEN, ids=[rule for rule, _, _ in BROKEN])
def test_rule_that_a_program_breaks_names_the_resource_and_what_is_wrong(
    rule: str, program: Program, expected: list[tuple[str, str]], day: str
) -> None:
    assert found_by(rule, program, day=day) == expected


GUARDS = {
    "allowed-roles": ".role",
    "allowed-members": ".member",
    "closed-contract": ".role",
    "narrow-custom-roles": ".permissions",
    "pinned-federation": ".attributeCondition",
    "narrow-cluster-roles": ".rules",
    "closed-firewalls": ".sourceRanges",
}
"""Rule → an input that has to be known before anything is made: the engine's next look comes when it is too late."""


@pytest.mark.parametrize(("rule", "program"), [case for case in KEPT if case[0] in GUARDS])
def test_rule_that_guards_against_strangers_is_broken_by_a_value_that_only_the_cloud_can_tell(
    rule: str, program: Program
) -> None:
    resources = run(program).resources
    if rule == "closed-firewalls" and resources[-1].inputs.get("direction") == "EGRESS":
        return
    broken = []
    for index, each in enumerate(resources):
        for path, inputs in with_one_unknown(each.inputs):
            changed = [*resources[:index], replace(each, inputs=inputs), *resources[index + 1 :]]
            broken += [path for _ in apply_rule(rule, changed, BOUNDED)]

    assert GUARDS[rule] in broken


@pytest.mark.parametrize(("rule", "program"), [case for case in KEPT if case[0] not in GUARDS])
def test_rule_is_not_broken_by_any_value_that_only_the_cloud_can_tell(rule: str, program: Program) -> None:
    resources = run(program).resources
    broken = []
    for index, each in enumerate(resources):
        for path, inputs in with_one_unknown(each.inputs):
            changed = [*resources[:index], replace(each, inputs=inputs), *resources[index + 1 :]]
            broken += [(each.name, path, found.message) for found in apply_rule(rule, changed, BOUNDED)]

    assert broken == []


def with_one_unknown(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield copies of `value`, each with a different one of its values, at any depth, unknown."""
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        for inner, changed in [("", UNKNOWN), *with_one_unknown(item)]:
            kept = dict(value) if isinstance(value, Mapping) else list(value)
            kept[key] = changed
            yield f"{path}.{key}{inner}", kept


def test_every_rule_has_a_program_that_keeps_it_and_one_that_breaks_it() -> None:
    bounded = {"regions", "encrypted"}  # can break only if bounds are set, below

    assert {rule for rule, _ in KEPT} == set(RULES)
    assert {rule for rule, _, _ in BROKEN} == set(RULES) - bounded


def test_pipeline_in_a_stack_without_ci_is_refused() -> None:
    refused = ["lab-deployer", "lab-g"]

    assert [
        name for name, _ in found_by("pipeline-apart", pipeline_grant, StackBounds(repositories=frozenset()))
    ] == refused
    assert found_by("pipeline-apart", pipeline_grant, StackBounds(repositories=frozenset({(11, 22)}))) == []
    assert found_by("pinned-federation", federation, StackBounds(repositories=frozenset())) == [
        ("lab-p", "accepts tokens of a repository that the stack file does not name")
    ]


def test_region_outside_of_the_bounds_is_refused() -> None:
    bounds = StackBounds(regions=frozenset({"us-west4"}))

    assert found_by("regions", strays, bounds) == [
        ("lab-bucket", "is in `US-EAST1`, allowed are us-west4"),
        ("lab-vm", "is in `europe-west4-b`, allowed are us-west4"),
    ]
    assert found_by("regions", lambda lab: lab.instance(), bounds) == []


def test_copies_outside_of_the_bounds_are_refused() -> None:
    bounds = StackBounds(regions=frozenset({"us-west4", "us", "us-east1"}))

    assert found_by("regions", copies_elsewhere, bounds) == [
        ("lab-s", "is in `asia-east1`, allowed are us, us-east1, us-west4"),
        ("lab-bucket", "is in `us-central1`, allowed are us, us-east1, us-west4"),
    ]


@pytest.mark.parametrize(
    ("image", "count"),
    [
        ("projects/debian-cloud/global/images/debian-12-v20260915", 0),
        ("https://www.googleapis.com/compute/v1/projects/my-lab/global/images/own", 0),
        ("projects/stranger/global/images/debian-12", 1),
        ("projects/debian-cloud/global/images/family/debian-12", 1),
        ("debian-12", 1),
        ("global/images/debian-12", 1),
    ],
)
def test_image_of_a_project_that_the_stack_does_not_trust_is_refused(image: str, count: int) -> None:
    bounds = StackBounds(image_projects=frozenset({"debian-cloud", "my-lab"}))

    found = found_by(
        "closed-instances", lambda lab: lab.instance(boot_disk={"initialize_params": {"image": image}}), bounds
    )

    hint = "allowed are images of debian-cloud, my-lab"
    assert found == [("lab-vm", f"starts from `{image}`, {hint}")] * count


def test_snapshots_outside_of_the_bounds_are_refused() -> None:
    bounds = StackBounds(regions=frozenset({"us-west4"}))

    assert found_by("snapshots-only", lambda lab: schedule(lab, storage_locations="asia"), bounds) == [
        ("lab-schedule", "keeps snapshots in `asia`, allowed are us-west4")
    ]


def test_storage_class_outside_of_the_bounds_is_refused() -> None:
    bounds = StackBounds(storage_classes=frozenset({"slow"}), max_claim="1Ti")

    assert found_by("claims", lambda lab: lab.claim("2Ti", "fast"), bounds) == [
        ("lab-claim", "asks for 2Ti, allowed is at most 1Ti"),
        ("lab-claim", "has the class `fast`, allowed are slow"),
    ]


@pytest.mark.parametrize(
    ("protect", "program", "names"),
    [
        (True, unprotected, ["lab-loose"]),
        (True, half_protected, ["lab-loose", "lab-a"]),
        (False, half_protected, []),
        (None, unprotected, []),
    ],
)
def test_protection_follows_what_the_stack_says(protect: bool | None, program: Program, names: list[str]) -> None:
    assert [name for name, _ in found_by("protected", program, StackBounds(protect=protect))] == names


@pytest.mark.parametrize(
    ("component", "role", "count"),
    [
        ("runtime:ray:RayHead", "roles/logging.logWriter", 0),
        ("runtime:ray:RayHead", "roles/iam.serviceAccountAdmin", 1),
        ("runtime:identity:CiIdentity", "roles/iam.serviceAccountAdmin", 0),
        ("runtime:identity:CiIdentity", "roles/resourcemanager.projectIamAdmin", 1),
        ("runtime:queue:Queue", "roles/logging.logWriter", 1),
    ],
)
def test_project_grant_is_excepted_for_its_component_only(component: str, role: str, count: int) -> None:
    assert len(found_by("project-grants", lambda lab: lab.project_grant(role), component=component)) == count


def test_deployer_may_grant_on_what_it_makes_and_not_on_the_project() -> None:
    def program(lab: Lab) -> None:
        lab.custom_role("storage.buckets.setIamPolicy", "resourcemanager.projects.setIamPolicy")

    assert found_by("narrow-custom-roles", program, component=PIPELINE) == [
        ("lab-role", "contains `resourcemanager.projects.setIamPolicy`")
    ]


def test_dead_letters_that_are_given_by_name_are_told_apart_as_well() -> None:
    def program(lab: Lab) -> None:
        full = "projects/my-lab/topics/dead"
        policy = {"dead_letter_policy": {"dead_letter_topic": full, "max_delivery_attempts": 5}}
        gcp.pubsub.Subscription("lab-a", name="a", topic="projects/my-lab/topics/tasks", **policy, opts=lab.opts())
        gcp.pubsub.Subscription("lab-b", name="b", topic=full, opts=lab.opts())

    assert found_by("dead-letters", program) == []
    assert found_by("dead-letters-kept", program) == []


def test_violations_come_in_the_order_of_the_resources_with_rule_and_hint() -> None:
    def program(lab: Lab) -> None:
        lab.bucket(versioning=None)
        key(lab)

    recording = run(program)

    found = [each for each in apply_rules(recording.resources) if each.rule in ("buckets", "allowed-types")]

    assert found == [
        Violation(
            rule="buckets",
            urn=recording.named("gcp:storage/bucket:Bucket", "lab-bucket").urn,
            message="keeps no versions",
            hint="set `versioning`",
        ),
        Violation(
            rule="allowed-types",
            urn=recording.named("gcp:serviceaccount/key:Key", "lab-key").urn,
            message="is a `gcp:serviceaccount/key:Key`, which no stack may make",
            hint="no key is ever made: it leaks, and nobody sees who uses it; grant a role to an identity",
        ),
    ]


def test_bounds_are_what_the_settings_say() -> None:
    values = GOOD | {
        "registries": {"images": {"repository": "marin", "regions": ["us-west4", "us-east1"]}},
        "records": {"location": "EU"},
    }

    assert bounds_of(parse_settings("west", values)) == StackBounds(
        protect=True,
        regions=frozenset({"us-west4", "us-east1", "eu"}),
        storage_classes=frozenset(),
        project=values["project"],
        members=frozenset({"group:ops@example.com"}),
        cidrs=frozenset({"10.64.0.0/20"}),
        subjects=frozenset(),
        repositories=frozenset(),
        buckets=frozenset(),
        issuers=frozenset(),
        keys=frozenset(),
        image_projects=BOOT_IMAGE_PROJECTS | {values["project"]},
    )


def test_waiting_is_found_through_parents_inputs_and_rings() -> None:
    recording = run(waits_for_api)
    graph = Graph(recording.resources)
    subscription = recording.named("gcp:pubsub/subscription:Subscription", "lab-sub")
    names = {each.name for each in graph.waited_for(subscription)}

    assert names == {"lab", "google", "lab-pubsub", "lab-tasks"}

    service = recording.named("gcp:projects/service:Service", "lab-pubsub")
    ring = [
        replace(each, dependencies=each.dependencies | {subscription.urn}) if each.urn == service.urn else each
        for each in recording.resources
    ]
    assert {each.name for each in Graph(ring).waited_for(service)} >= {"lab-sub", "lab-tasks"}
