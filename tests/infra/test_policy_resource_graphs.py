"""Small programs whose queues, machines, places and namespaces look right, each with what its rule says of them."""

from __future__ import annotations

from typing import Any

import pulumi
import pulumi_gcp as gcp
import pulumi_kubernetes as kubernetes
import pytest

from infra.policy.base import StackBounds
from tests.infra.test_policy_bad_graphs import account, known_later
from tests.infra.test_policy_rules import AGENT, DENY, LABELS, THERE, Lab, Program, found_by, group_grant, queue

BOUNDS = StackBounds(
    project="my-lab",
    regions=frozenset({"us-west4"}),
    lenders=frozenset({"lender"}),
    storage_classes=frozenset({"fast"}),
    cidrs=frozenset({"10.64.0.0/20"}),
)
PUBLISH, TAKE = "may not publish", "may not take off it"


def made(type_: type[pulumi.CustomResource], **inputs: Any) -> Program:
    return lambda lab: type_("lab-it", **inputs, opts=lab.opts()) and None  # type: ignore[call-overload,no-any-return]


def provider_with_a_token(lab: Lab) -> None:
    gcp.Provider("other", project="my-lab", access_token=pulumi.Output.secret("y"))


def topic(**labels: str) -> Program:
    return lambda lab: gcp.pubsub.Topic("lab-t", name="t", labels=labels, opts=lab.opts()) and None


def identity(*, service: str | None) -> Program:
    def program(lab: Lab) -> None:
        waits = []
        if service is not None:
            waits = [gcp.projects.Service("lab-api", service=f"{service}.googleapis.com", opts=lab.opts())]
        gcp.projects.ServiceIdentity("lab-agent", service="pubsub.googleapis.com", opts=lab.opts(depends_on=waits))

    return program


def dead_letters_granted(
    *,
    topic: str = "dead",
    publishes: str = "roles/pubsub.publisher",
    subscription: str = "projects/my-lab/subscriptions/tasks-sub",
    subscribes: str = "roles/pubsub.subscriber",
    member: str = AGENT,
) -> Program:
    """A queue whose grants name everything by its name."""

    def program(lab: Lab) -> None:
        queue(lab, grants=False)
        gcp.pubsub.TopicIAMMember(
            "lab-may-bury",
            topic=f"projects/my-lab/topics/tasks-{topic}",
            role=publishes,
            member=member,
            opts=lab.opts(),
        )
        gcp.pubsub.SubscriptionIAMMember(
            "lab-may-take", subscription=subscription, role=subscribes, member=member, opts=lab.opts()
        )

    return program


def subscription_known_later(lab: Lab) -> None:
    queue(lab, grants=False)
    gcp.pubsub.SubscriptionIAMMember(
        "lab-may-take",
        subscription=known_later(lab, "x"),
        role="roles/pubsub.subscriber",
        member=AGENT,
        opts=lab.opts(),
    )


def second_dead_subscription(lab: Lab) -> None:
    queue(lab)
    short = {"message_retention_duration": "600s", "expiration_policy": {"ttl": ""}}
    gcp.pubsub.Subscription(
        "lab-second", name="s", topic="projects/my-lab/topics/tasks-dead", labels=LABELS, **short, opts=lab.opts()
    )


def topics_without_names(lab: Lab) -> None:
    tasks, dead = (gcp.pubsub.Topic(f"lab-{name}", labels=LABELS, opts=lab.opts()) for name in ("tasks", "dead"))
    lab.subscription("sub", tasks, **lab.dead_letters(dead))


def machine_of_its_account(lab: Lab) -> None:
    lab.instance(service_account={"email": account(lab).email, "scopes": ["cloud-platform"]})


def machine_of_an_account_known_later(lab: Lab) -> None:
    lab.instance(service_account={"email": known_later(lab, "a@b.example.org"), "scopes": ["cloud-platform"]})


def namespaces(
    *, quota: str = "train", deny: str = "train", level: str = "restricted", elsewhere: bool = False, **spec: Any
) -> Program:
    """A namespace `train`, with a quota and a policy in the namespaces of these names, or in another cluster."""

    def program(lab: Lab) -> None:
        other = kubernetes.Provider("other", context="other")
        beside = lab.opts(provider=other) if elsewhere else lab.opts()
        labels = LABELS | {"pod-security.kubernetes.io/enforce": level}
        kubernetes.core.v1.Namespace("lab-train", metadata={"name": "train", "labels": labels}, opts=lab.opts())
        kubernetes.core.v1.ResourceQuota(
            "lab-quota", metadata={"namespace": quota, "labels": LABELS}, spec={"hard": {"pods": "9"}}, opts=beside
        )
        kubernetes.networking.v1.NetworkPolicy(
            "lab-deny", metadata={"namespace": deny, "labels": LABELS}, spec=DENY | spec, opts=beside
        )

    return program


def claim_beside(denied: str) -> Program:
    def program(lab: Lab) -> None:
        inside = {"namespace": denied, "labels": LABELS}
        kubernetes.networking.v1.NetworkPolicy("lab-deny", metadata=inside, spec=DENY, opts=lab.opts())
        lab.claim("1Gi")

    return program


UNLABELLED = "lacks the labels `managed-by: research-runtime` and `stack`"
WITHOUT_QUOTA = "makes the namespace `train` without a quota"
UNDENIED = "makes the namespace `train` without a network policy that denies by default"

JUDGED: dict[str, tuple[str, Program, list[str]]] = {
    "token-of-a-provider": ("no-secret-values", provider_with_a_token, []),
    "label-of-the-maker-alone": ("labels", topic(**{"managed-by": "research-runtime"}), [UNLABELLED]),
    "label-of-the-stack-alone": ("labels", topic(stack="dev"), [UNLABELLED]),
    # places
    "topic-elsewhere": (
        "regions",
        made(gcp.pubsub.Topic, project="stranger"),
        ["is in the project `stranger`, allowed is my-lab"],
    ),
    "topic-of-a-lender": (
        "regions",
        made(gcp.pubsub.Topic, project="lender"),
        ["is in the project `lender`, allowed is my-lab"],
    ),
    "secret-of-a-lender": (
        "regions",
        made(gcp.secretmanager.SecretIamMember, project="lender", secret_id="s", role="r", member="m"),
        [],
    ),
    "secret-of-a-stranger": (
        "regions",
        made(gcp.secretmanager.SecretIamMember, project="stranger", secret_id="s", role="r", member="m"),
        ["is in the project `stranger`, allowed is my-lab"],
    ),
    "project-known-later": ("regions", lambda lab: made(gcp.pubsub.Topic, project=known_later(lab, "p"))(lab), []),
    "everywhere": (
        "regions",
        made(gcp.artifactregistry.Repository, repository_id="r", location="global", format="DOCKER"),
        [],
    ),
    # APIs
    "agent-before-its-api": ("api-first", identity(service=None), ["does not wait until pubsub.googleapis.com is on"]),
    "agent-after-its-api": ("api-first", identity(service="pubsub"), []),
    "agent-after-another-api": (
        "api-first",
        identity(service="serviceusage"),
        ["does not wait until pubsub.googleapis.com is on"],
    ),
    "role-before-its-api": (
        "api-first",
        lambda lab: lab.custom_role("tpu.nodes.list") and None,
        ["does not wait until iam.googleapis.com is on"],
    ),
    # dead letters
    "agent-by-name": ("dead-letters-arrive", dead_letters_granted(), []),
    "agent-that-publishes-tasks": ("dead-letters-arrive", dead_letters_granted(topic="live"), [PUBLISH]),
    "agent-that-sees-the-topic": (
        "dead-letters-arrive",
        dead_letters_granted(publishes="roles/pubsub.viewer"),
        [PUBLISH],
    ),
    "agent-that-takes-dead-letters": (
        "dead-letters-arrive",
        dead_letters_granted(subscription="projects/my-lab/subscriptions/dead-sub"),
        [TAKE],
    ),
    "agent-that-sees-the-subscription": (
        "dead-letters-arrive",
        dead_letters_granted(subscribes="roles/pubsub.viewer"),
        [TAKE],
    ),
    "people-in-the-place-of-the-agent": (
        "dead-letters-arrive",
        dead_letters_granted(member="group:lab@example.com"),
        [PUBLISH, TAKE],
    ),
    "agent-of-a-subscription-known-later": ("dead-letters-arrive", subscription_known_later, [PUBLISH, TAKE]),
    "second-subscription-that-keeps-less": (
        "retention",
        second_dead_subscription,
        ["keeps tasks for 2678400 s and its dead letters for 600 s only"],
    ),
    "topics-without-names": (
        "dead-letters-kept",
        topics_without_names,
        ["sends its dead letters to a topic that has no subscription"],
    ),
    "people-wait-for-no-agent": ("agent-first", group_grant, []),
    # machines
    "address-of-ipv6": (
        "closed-instances",
        lambda lab: lab.instance(network_interfaces=[{"ipv6_access_configs": [{"network_tier": "PREMIUM"}]}]),
        ["has an external address"],
    ),
    "disk-of-another": (
        "closed-instances",
        lambda lab: lab.instance(attached_disks=[{"source": "projects/stranger/zones/us-west4-a/disks/d"}]),
        ["has a disk that exists already"],
    ),
    "no-metadata": (
        "closed-instances",
        lambda lab: lab.instance(metadata=None),
        ["accepts SSH keys of the whole project"],
    ),
    "metadata-without-the-key": (
        "closed-instances",
        lambda lab: lab.instance(metadata={"enable-oslogin": "TRUE"}),
        ["accepts SSH keys of the whole project"],
    ),
    "machine-of-its-account": ("closed-instances", machine_of_its_account, []),
    "machine-of-an-account-known-later": (
        "closed-instances",
        machine_of_an_account_known_later,
        ["runs as an account that is not known before `up`"],
    ),
    # firewalls
    "firewall-that-denies": (
        "closed-firewalls",
        lambda lab: lab.firewall(allows=None, denies=[{"protocol": "all"}], source_ranges=["0.0.0.0/0"]),
        [],
    ),
    "address-within-the-range": ("closed-firewalls", lambda lab: lab.firewall(source_ranges=["10.64.1.7/24"]), []),
    "no-range": (
        "closed-firewalls",
        lambda lab: lab.firewall(source_ranges=["everybody"]),
        ["lets in `everybody`, which is not of this stack"],
    ),
    # claims and namespaces
    "claim-of-nothing": ("claims", lambda lab: lab.claim("0"), ["asks for no size"]),
    "claim-of-all": ("claims", lambda lab: lab.claim("100Ti", ""), []),
    "quota-of-another-namespace": ("closed-namespaces", namespaces(quota="other"), [WITHOUT_QUOTA]),
    "policy-of-another-namespace": ("closed-namespaces", namespaces(deny="other"), [UNDENIED]),
    "both-in-another-cluster": ("closed-namespaces", namespaces(elsewhere=True), [WITHOUT_QUOTA, UNDENIED]),
    "restricted-namespace": ("closed-namespaces", namespaces(), []),
    "policy-for-some-pods": (
        "closed-namespaces",
        namespaces(pod_selector={"match_labels": {"app": "a"}}),
        [UNDENIED],
    ),
    "policy-of-one-way": ("closed-namespaces", namespaces(policy_types=["Ingress"]), [UNDENIED]),
    "policy-of-the-other-way": ("closed-namespaces", namespaces(policy_types=["Egress"]), [UNDENIED]),
    "policy-with-a-way-out": ("closed-namespaces", namespaces(egress=[{}]), [UNDENIED]),
    "claim-in-a-closed-namespace": ("closed-namespaces", claim_beside("train"), []),
    "claim-beside-a-closed-namespace": (
        "closed-namespaces",
        claim_beside("other"),
        ["is in the namespace `train`, which has no network policy that denies by default"],
    ),
}


@pytest.mark.parametrize("name", JUDGED)
def test_rule_says_of_a_graph_what_is_wrong_with_it_and_no_more(name: str) -> None:
    rule, program, expected = JUDGED[name]

    found = [message for _, message in found_by(rule, program, BOUNDS, component="runtime:test:Lab")]

    assert len(found) == len(expected)
    assert all(message.endswith(end) for message, end in zip(found, expected, strict=True)), found


def test_machine_of_its_account_is_allowed_once_the_account_is_known() -> None:
    assert found_by("closed-instances", machine_of_its_account, BOUNDS, day=THERE) == []
