"""The rules, as plain functions over what a program registered.

A rule yields a `Violation` for each resource that breaks it. `apply_rules` runs all of them; the policy pack and
`python -m infra check` both use it. A rule judges what the program asked for, on the first day as on every later one:
what a provider adds to a resource of its own (an address, a default, a member) is no wish of the program's. A value that
only the cloud can tell breaks no rule: the engine asks again when it is known.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from infra.check.recording import Registration, Secret, Unknown
from infra.naming import MAKER, MANAGED_BY, STACK_LABEL
from infra.policy.graph import PROVIDER_PREFIX, Graph
from infra.settings.kubernetes_rules import quantity
from infra.settings.model import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    rule: str
    urn: str
    message: str
    """What is wrong, with the value, and what would be right."""
    hint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What differs between stacks. Without it, rules judge by the resources alone."""

    protect: bool | None = None
    """Whether what holds work has to be protected; None: all of it or none of it."""
    regions: frozenset[str] | None = None
    """Where resources may be; None: anywhere."""
    storage_classes: frozenset[str] | None = None
    """Of claims; None: any. Leaving it to the cluster is always allowed."""
    max_claim: str = "100Ti"


Finding: TypeAlias = tuple[Registration, str, str | None]
"""Resource, message, hint."""
Rule: TypeAlias = Callable[[Graph, Bounds], Iterable[Finding]]

RULES: Final[dict[str, Rule]] = {}
"""Name → rule; the name is what the engine prints."""


def apply_rules(resources: Sequence[Registration], bounds: Bounds = Bounds()) -> list[Violation]:
    """Every violation of every rule, in the order of the resources."""
    order = {each.urn: index for index, each in enumerate(resources)}
    found = [violation for name in RULES for violation in apply_rule(name, resources, bounds)]
    return sorted(found, key=lambda violation: order[violation.urn])


def apply_rule(name: str, resources: Sequence[Registration], bounds: Bounds = Bounds()) -> list[Violation]:
    return [
        Violation(rule=name, urn=resource.urn, message=message, hint=hint)
        for resource, message, hint in RULES[name](Graph(resources), bounds)
    ]


def bounds_of(settings: Settings) -> Bounds:
    """What a stack's settings say about its bounds."""
    regions = {settings.region, *(region for each in settings.registries.values() for region in each.regions)}
    regions |= {region for each in settings.secrets.values() for region in each.regions}
    regions |= {region for each in settings.registries.values() for region in each.existing}
    if settings.records is not None and settings.records.location is not None:
        regions.add(settings.records.location)
    claims = [
        claim
        for cluster in settings.kubernetes.values()
        for namespace in cluster.namespaces.values()
        for claim in namespace.claims.values()
    ]
    return Bounds(
        protect=settings.protect,
        regions=frozenset(region.lower() for region in regions if region),
        storage_classes=frozenset(claim.storage_class for claim in claims if claim.storage_class),
    )


TOPIC: Final = "gcp:pubsub/topic:Topic"
SUBSCRIPTION: Final = "gcp:pubsub/subscription:Subscription"
TOPIC_GRANT: Final = "gcp:pubsub/topicIAMMember:TopicIAMMember"
SUBSCRIPTION_GRANT: Final = "gcp:pubsub/subscriptionIAMMember:SubscriptionIAMMember"
SECRET: Final = "gcp:secretmanager/secret:Secret"
REPOSITORY: Final = "gcp:artifactregistry/repository:Repository"
INSTANCE: Final = "gcp:compute/instance:Instance"
FIREWALL: Final = "gcp:compute/firewall:Firewall"
BUCKET: Final = "gcp:storage/bucket:Bucket"
ACCOUNT: Final = "gcp:serviceaccount/account:Account"
SERVICE: Final = "gcp:projects/service:Service"
SERVICE_IDENTITY: Final = "gcp:projects/serviceIdentity:ServiceIdentity"
PROJECT_GRANT: Final = "gcp:projects/iAMMember:IAMMember"
CUSTOM_ROLE: Final = "gcp:projects/iAMCustomRole:IAMCustomRole"
NAMESPACE: Final = "kubernetes:core/v1:Namespace"
QUOTA: Final = "kubernetes:core/v1:ResourceQuota"
CLAIM: Final = "kubernetes:core/v1:PersistentVolumeClaim"
NETWORK_POLICY: Final = "kubernetes:networking.k8s.io/v1:NetworkPolicy"
CLUSTER_GRANTS: Final = (
    "kubernetes:rbac.authorization.k8s.io/v1:RoleBinding",
    "kubernetes:rbac.authorization.k8s.io/v1:ClusterRoleBinding",
)

HOLD_WORK: Final = (TOPIC, SUBSCRIPTION, SECRET, REPOSITORY, INSTANCE, BUCKET, ACCOUNT)
"""What loses tasks, data or grants when it goes. A service account made again under its old name has no grants."""

LABELLED: Final = (TOPIC, SUBSCRIPTION, SECRET, REPOSITORY, INSTANCE, BUCKET)

IAP_RANGE: Final = "35.235.240.0/20"
"""From here Google's identity-aware proxy connects; https://cloud.google.com/iap/docs/using-tcp-forwarding."""

HEAD: Final = "runtime:ray:RayHead"
PEOPLE: Final = "runtime:identity:Identity"
PIPELINE: Final = "runtime:identity:CiIdentity"

PROJECT_ROLES: Final[Mapping[tuple[str, str], str]] = {
    (HEAD, "roles/logging.logWriter"): "log entries have no resource to grant on",
    (HEAD, "roles/monitoring.metricWriter"): "metrics have no resource to grant on",
    (PEOPLE, "roles/logging.logWriter"): "log entries have no resource to grant on",
    (PEOPLE, "roles/monitoring.metricWriter"): "metrics have no resource to grant on",
    (PEOPLE, "roles/logging.viewer"): "log entries have no resource to grant on",
    (PEOPLE, "roles/monitoring.viewer"): "metrics have no resource to grant on",
    (PEOPLE, "roles/iap.tunnelResourceAccessor"): "nodes are made later, and the way in is the same for all",
    (PEOPLE, "roles/compute.osLogin"): "people log in to heads and to nodes that Ray makes later",
    (PEOPLE, "roles/compute.osAdminLogin"): "operators repair heads and nodes that Ray makes later",
    (PIPELINE, "roles/compute.instanceAdmin.v1"): "the deployer makes heads",
    (PIPELINE, "roles/compute.networkAdmin"): "the deployer makes networks",
    (PIPELINE, "roles/compute.securityAdmin"): "the deployer makes firewalls",
    (PIPELINE, "roles/iam.roleAdmin"): "the deployer makes custom roles",
    (PIPELINE, "roles/iam.serviceAccountAdmin"): "the deployer makes accounts and their grants",
    (PIPELINE, "roles/iam.serviceAccountUser"): "the deployer makes heads that run as an account",
    (PIPELINE, "roles/iam.serviceAccountViewer"): "a preview reads accounts",
    (PIPELINE, "roles/iam.roleViewer"): "a preview reads custom roles",
    (PIPELINE, "roles/iam.workloadIdentityPoolAdmin"): "the deployer makes its own federation",
    (PIPELINE, "roles/iam.workloadIdentityPoolViewer"): "a preview reads the federation",
    (PIPELINE, "roles/monitoring.alertPolicyEditor"): "the deployer makes alerts",
    (PIPELINE, "roles/monitoring.notificationChannelEditor"): "the deployer makes alerts",
    (PIPELINE, "roles/monitoring.viewer"): "a preview reads alerts",
    (PIPELINE, "roles/resourcemanager.projectIamAdmin"): "the deployer grants what this table lists",
    (PIPELINE, "roles/serviceusage.serviceUsageAdmin"): "the deployer switches APIs on",
    (PIPELINE, "roles/serviceusage.serviceUsageViewer"): "a preview reads which APIs are on",
    (PIPELINE, "roles/compute.viewer"): "a preview reads networks and heads",
}
"""(Component, role) → why it is granted on the project and not on one resource. Anything else is a violation."""

APIS: Final[Mapping[str, str]] = {
    "artifactregistry": "artifactregistry",
    "billing": "billingbudgets",
    "compute": "compute",
    "iam": "iam",
    "logging": "logging",
    "monitoring": "monitoring",
    "projects": "cloudresourcemanager",
    "pubsub": "pubsub",
    "secretmanager": "secretmanager",
    "serviceaccount": "iam",
    "storage": "storage",
    "tpu": "tpu",
}
"""Module of the provider → the API that it calls."""


def _rule(name: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        RULES[name] = rule
        return rule

    return register


# --- grants and keys


@_rule("no-keys")
def find_keys(graph: Graph, bounds: Bounds) -> Iterator[Finding]:
    """No key is ever made. It leaks, and nobody sees who uses it; people log in, machines have an identity, pipelines
    federate."""
    keys = {
        "gcp:serviceaccount/key:Key": "a service account's key",
        "gcp:storage/hmacKey:HmacKey": "an HMAC key",
        "gcp:projects/apiKey:ApiKey": "an API key",
        "gcp:apikeys/key:Key": "an API key",
    }
    for each in graph.of_type(*keys):
        yield each, f"is {keys[each.type]}, and no key is ever made", "grant a role to an identity instead"


@_rule("no-basic-roles")
def find_basic_roles(graph: Graph, bounds: Bounds) -> Iterator[Finding]:
    """Owner, editor and viewer are nearly everything, and grow with each new API."""
    for each in graph.made("gcp"):
        role = each.inputs.get("role")
        if role in ("roles/owner", "roles/editor", "roles/viewer"):
            yield each, f"grants `{role}`, which is nearly everything", "grant the narrow roles of what is needed"


@_rule("single-grants")
def find_wholesale_grants(graph: Graph, bounds: Bounds) -> Iterator[Finding]:
    """A binding or policy takes away every grant that it does not list, those of other stacks and of people too."""
    for each in graph.made("gcp"):
        if re.search(r"iam(binding|policy)$", each.type, re.IGNORECASE):
            yield (
                each,
                f"is a `{each.type.rpartition(':')[2]}`, which removes the grants of others",
                "use the IAM member",
            )


@_rule("no-public-members")
def find_public_members(graph: Graph, bounds: Bounds) -> Iterator[Finding]:
    """Nothing is open to everybody."""
    for each in graph.made("gcp"):
        members = [each.inputs.get("member"), *_list(each.inputs.get("members"))]
        for member in members:
            if member in ("allUsers", "allAuthenticatedUsers"):
                yield each, f"grants to `{member}`, which is everybody", "grant to a group"
    for each in graph.of_type(*CLUSTER_GRANTS):
        for subject in _list(each.inputs.get("subjects")):
            name = _get(subject, "name")
            if name in ("system:authenticated", "system:unauthenticated", "system:anonymous", "system:serviceaccounts"):
                yield each, f"grants to `{name}`, which is everybody", "grant to a group"


@_rule("project-grants")
def find_project_grants(graph: Graph, bounds: Bounds) -> Iterator[Finding]:
    """Grants are on the resource, and on the project only those that have a reason. `PROJECT_ROLES` lists them."""
    for each in graph.of_type(PROJECT_GRANT):
        role = each.inputs.get("role")
        if isinstance(role, Unknown) or graph.behind(each, "role", CUSTOM_ROLE):
            if not graph.behind(each, "role", CUSTOM_ROLE):
                yield each, "grants a role on the project that is not known before `up`", "name the role"
            continue
        parent = graph.parent(each)
        if (parent.type if parent else "", role) not in PROJECT_ROLES:
            hint = "grant it on the resource, or give the exception a reason in `PROJECT_ROLES`"
            yield each, f"grants `{role}` on the whole project", hint
        elif role == "roles/resourcemanager.projectIamAdmin" and not each.inputs.get("condition"):
            yield each, f"grants `{role}` without a condition, so its holder can grant anything", "list what it grants"


@_rule("narrow-custom-roles")
def find_wide_custom_roles(graph: Graph, bounds: Bounds) -> Iterator[Finding]:
    """A custom role that may grant, make keys or act as anybody is an owner by another name.

    The pipeline that deploys grants on what it makes, and on nothing else: not on the project, and not as anybody.
    """
    for each in graph.of_type(CUSTOM_ROLE):
        parent = graph.parent(each)
        deploys = parent is not None and parent.type == PIPELINE
        wide = [
            permission
            for permission in _list(each.inputs.get("permissions"))
            if isinstance(permission, str) and (_DEPLOYERS if deploys else _WIDE).search(permission)
        ]
        if wide:
            yield each, f"contains {', '.join(f'`{one}`' for one in wide)}", "grant that on the one resource it is for"


# --- queues


@_rule("dead-letters")
def find_missing_dead_letters(graph: Graph, bounds: Bounds) -> Iterator[Finding]:
    """A subscription without dead letters delivers a task that nobody can do for ever."""
    dead = _dead_letter_topics(graph)
    for each in graph.of_type(SUBSCRIPTION):
        if (
            not _get(each.inputs.get("deadLetterPolicy"), "deadLetterTopic")
            and not _topics(graph, each, "topic") & dead
        ):
            yield each, "has no dead letters", "set `dead_letter_policy`"


@_rule("dead-letters-kept")
def find_lost_dead_letters(graph: Graph, bounds: Bounds) -> Iterator[Finding]:
    """A topic keeps nothing by itself: without a subscription of its own a dead letter is gone at once."""
    subscribed: set[str] = set()
    for each in graph.of_type(SUBSCRIPTION):
        subscribed |= _topics(graph, each, "topic")
    for each in graph.of_type(SUBSCRIPTION):
        wanted = _topics(graph, each, "deadLetterPolicy")
        if wanted and not wanted & subscribed:
            yield each, "sends its dead letters to a topic that has no subscription", "subscribe to that topic"


@_rule("dead-letters-arrive")
def find_powerless_agents(graph: Graph, bounds: Bounds) -> Iterator[Finding]:
    """Pub/Sub's own agent moves dead letters. Without its two grants they are redelivered for ever, with no error."""
    for each in graph.of_type(SUBSCRIPTION):
        wanted = _topics(graph, each, "deadLetterPolicy")
        if not wanted:
            continue
        publishes = any(
            _may_be(grant.inputs.get("role"), "roles/pubsub.publisher") and wanted & _topics(graph, grant, "topic")
            for grant in graph.of_type(TOPIC_GRANT)
            if _is_agents(graph, grant)
        )
        subscribes = any(
            _may_be(grant.inputs.get("role"), "roles/pubsub.subscriber")
            and (each.urn in graph.behind(grant, "subscription", SUBSCRIPTION) or _same_name(grant, each))
            for grant in graph.of_type(SUBSCRIPTION_GRANT)
            if _is_agents(graph, grant)
        )
        if not publishes:
            yield each, "has dead letters that Pub/Sub's agent may not publish", "grant it the topic's publisher role"
        if not subscribes:
            yield each, "has dead letters that Pub/Sub's agent may not take off it", "grant it the subscriber role"


@_rule("no-expiry")
def find_expiring_subscriptions(graph: Graph, bounds: Bounds) -> Iterator[Finding]:
    """By default an idle subscription is deleted after 31 days, with all its tasks."""
    for each in graph.of_type(SUBSCRIPTION):
        if not _may_be(_get(each.inputs.get("expirationPolicy"), "ttl"), ""):
            hint = 'set `expiration_policy` with the ttl ""'
            yield each, "is deleted with all its tasks after 31 days without a worker", hint


@_rule("retention")
def find_short_retention(graph: Graph, bounds: Bounds) -> Iterator[Finding]:
    """Subscriptions say how long they keep messages, dead letters no shorter than tasks. The default is 7 days."""
    by_topic: dict[str, float] = {}
    for each in graph.of_type(SUBSCRIPTION):
        kept = _seconds(each.inputs.get("messageRetentionDuration"))
        if kept is None:
            yield each, "does not say how long it keeps messages", "set `message_retention_duration`"
            continue
        for topic in _topics(graph, each, "topic"):
            by_topic[topic] = min(kept, by_topic.get(topic, kept))
    for each in graph.of_type(SUBSCRIPTION):
        kept = _seconds(each.inputs.get("messageRetentionDuration"))
        shortest = min(
            (by_topic.get(topic, math.inf) for topic in _topics(graph, each, "deadLetterPolicy")), default=math.inf
        )
        if kept is not None and shortest < kept < math.inf:
            message = f"keeps tasks for {kept:.0f} s and its dead letters for {shortest:.0f} s only"
            yield each, message, "keep dead letters at least as long"


# --- machines and networks


@_rule("closed-instances")
def find_open_instances(graph: Graph, bounds: Bounds) -> Iterator[Finding]:
    """Machines have no external address, are shielded, and take no SSH keys of the project."""
    for each in graph.of_type(INSTANCE):
        for interface in _list(each.inputs.get("networkInterfaces")):
            if _list(_get(interface, "accessConfigs")) or _list(_get(interface, "ipv6AccessConfigs")):
                yield each, "has an external address", "leave `access_configs` out"
        shield = each.inputs.get("shieldedInstanceConfig")
        for key in ("enableSecureBoot", "enableVtpm", "enableIntegrityMonitoring"):
            if not _may_be(_get(shield, key), True):
                yield each, f"is not shielded: `{key}` is not true", "set `shielded_instance_config`"
        metadata = each.inputs.get("metadata")
        blocked = _get(metadata, "block-project-ssh-keys")
        if not isinstance(blocked, Unknown) and str(blocked).lower() != "true":
            yield each, "accepts SSH keys of the whole project", "set the metadata `block-project-ssh-keys` to TRUE"


@_rule("closed-firewalls")
def find_open_firewalls(graph: Graph, bounds: Bounds) -> Iterator[Finding]:
    """Nothing is open to everybody, and SSH comes through the identity-aware proxy or from inside."""
    for each in graph.of_type(FIREWALL):
        if each.inputs.get("direction", "INGRESS") != "INGRESS" or not each.inputs.get("allows"):
            continue
        sources = _list(each.inputs.get("sourceRanges"))
        tagged = each.inputs.get("sourceTags") or each.inputs.get("sourceServiceAccounts")
        if not sources and not tagged and not isinstance(each.inputs.get("sourceRanges"), Unknown):
            yield each, "names no source, so it lets in everybody", "set `source_ranges`"
        for source in sources:
            if isinstance(source, Unknown):
                continue
            if _is_everybody(source):
                yield each, f"lets in `{source}`, which is everybody", f"SSH comes through {IAP_RANGE}"
            elif _opens_ssh(each) and source != IAP_RANGE and not _is_private(source):
                yield each, f"lets in SSH from `{source}`", f"SSH comes through {IAP_RANGE}, or from inside"


# --- what is kept, and where


@_rule("no-secret-values")
def find_secret_values(graph: Graph, bounds: Bounds) -> Iterator[Finding]:
    """No secret value passes through Pulumi. What it is given it keeps in its state."""
    versions = (
        "gcp:secretmanager/secretVersion:SecretVersion",
        "gcp:secretmanager/regionalSecretVersion:RegionalSecretVersion",
        "kubernetes:core/v1:Secret",
    )
    for each in graph.resources:
        if each.type in versions:
            yield each, "holds a secret's value", "make the container only; `runtime secrets put` takes the value"
        elif each.custom and (path := _find_secret(each.inputs)) is not None:
            yield each, f"has a secret value in `{path}`", "refer to the secret by its name"


@_rule("buckets")
def find_open_buckets(graph: Graph, bounds: Bounds) -> Iterator[Finding]:
    """Buckets are closed, keep versions, and say how long what is deleted stays."""
    for each in graph.of_type(BUCKET):
        if not _may_be(each.inputs.get("uniformBucketLevelAccess"), True):
            yield each, "grants by object", "set `uniform_bucket_level_access`"
        if not _may_be(each.inputs.get("publicAccessPrevention"), "enforced"):
            yield each, "could be made public", 'set `public_access_prevention="enforced"`'
        if not _may_be(_get(each.inputs.get("versioning"), "enabled"), True):
            yield each, "keeps no versions", "set `versioning`"
        if not each.inputs.get("softDeletePolicy"):
            yield each, "does not say how long deleted objects stay", "set `soft_delete_policy`"


@_rule("labels")
def find_unlabelled(graph: Graph, bounds: Bounds) -> Iterator[Finding]:
    """Labels say whose a resource is. `gc` and the bill go by them."""
    for each in graph.resources:
        if not each.custom:
            continue
        if each.type in LABELLED:
            labels = each.inputs.get("labels")
        elif each.type.startswith("kubernetes:"):
            labels = _get(each.inputs.get("metadata"), "labels")
        else:
            continue
        if not _may_be(_get(labels, MANAGED_BY), MAKER) or not _get(labels, STACK_LABEL):
            yield each, f"lacks the labels `{MANAGED_BY}: {MAKER}` and `{STACK_LABEL}`", "pass `labels(stack, own)`"


@_rule("protected")
def find_unprotected(graph: Graph, bounds: Bounds) -> Iterator[Finding]:
    """What holds work refuses to be destroyed, in every stack that says so."""
    # A pull-through cache is filled again by itself.
    holders = [each for each in graph.of_type(*HOLD_WORK) if not _may_be(each.inputs.get("mode"), "REMOTE_REPOSITORY")]
    wanted = bounds.protect if bounds.protect is not None else any(each.protect for each in holders)
    for each in holders if wanted else ():
        if not each.protect:
            yield each, "holds work and can be destroyed", "set `protect`, or `protect: false` for the whole stack"


@_rule("regions")
def find_strays(graph: Graph, bounds: Bounds) -> Iterator[Finding]:
    """Everything is in the regions that the stack file names."""
    if bounds.regions is None:
        return
    for each in graph.made("gcp"):
        for key in ("region", "zone", "location"):
            place = each.inputs.get(key)
            if not isinstance(place, str) or place == "global":
                continue
            region = place.rpartition("-")[0] if key == "zone" else place
            if region.lower() not in bounds.regions:
                allowed = ", ".join(sorted(bounds.regions))
                yield each, f"is in `{place}`, allowed are {allowed}", "name the region in the stack file"


# --- Kubernetes


@_rule("claims")
def find_wild_claims(graph: Graph, bounds: Bounds) -> Iterator[Finding]:
    """Claims have a size within bounds, and a class that the stack file names."""
    for each in graph.of_type(CLAIM):
        spec = each.inputs.get("spec")
        size = _get(_get(_get(spec, "resources"), "requests"), "storage")
        if isinstance(size, Unknown):
            continue
        if not isinstance(size, str) or quantity(size) <= 0:
            yield each, "asks for no size", "set `size`"
        elif quantity(size) > quantity(bounds.max_claim):
            yield each, f"asks for {size}, allowed is at most {bounds.max_claim}", "ask for what is needed"
        storage_class = _get(spec, "storageClassName")
        named = isinstance(storage_class, str) and storage_class
        if named and bounds.storage_classes is not None and storage_class not in bounds.storage_classes:
            allowed = ", ".join(sorted(bounds.storage_classes)) or "the cluster's default"
            yield each, f"has the class `{storage_class}`, allowed are {allowed}", "name it in the stack file"


@_rule("closed-namespaces")
def find_open_namespaces(graph: Graph, bounds: Bounds) -> Iterator[Finding]:
    """A namespace that we make has a quota, and every one that we put something into denies traffic by default."""
    limits = list(graph.of_type(QUOTA))
    denials = [each for each in graph.of_type(NETWORK_POLICY) if _denies(each.inputs.get("spec"))]
    for each in graph.of_type(NAMESPACE):
        name = _get(each.inputs.get("metadata"), "name")
        if not _any_in(limits, each.provider, name):
            yield each, f"makes the namespace `{name}` without a quota", "set `quota`"
        if not _any_in(denials, each.provider, name):
            yield each, f"makes the namespace `{name}` without a network policy that denies by default", None
    for each in graph.of_type(CLAIM):
        name = _namespace(each)
        if not _any_in(denials, each.provider, name):
            yield each, f"is in the namespace `{name}`, which has no network policy that denies by default", None


# --- shape


@_rule("explicit-provider")
def find_default_providers(graph: Graph, bounds: Bounds) -> Iterator[Finding]:
    """A default provider takes whatever project and cluster the shell happens to be in."""
    for each in graph.resources:
        if not each.custom or each.type.startswith(PROVIDER_PREFIX):
            continue
        # `urn:pulumi:STACK::PROJECT::pulumi:providers:gcp::NAME::ID`
        name = each.provider.split("::")[-2] if each.provider and each.provider.count("::") >= 4 else None
        if name is None or re.fullmatch(r"default(_\d+.*)?", name):
            yield (
                each,
                "uses the default provider",
                "pass the stack's provider to the component, and `parent=self` to its children",
            )


@_rule("parented")
def find_orphans(graph: Graph, bounds: Bounds) -> Iterator[Finding]:
    """Every resource belongs to a component and begins with its name. Two of a component would otherwise have children
    of one name."""
    for each in graph.resources:
        if not each.custom or each.type.startswith(PROVIDER_PREFIX):
            continue
        parent = graph.parent(each)
        if parent is None or parent.custom:
            yield each, "belongs to no component", "set `parent=self`"
        elif not each.name.startswith(f"{parent.name}-"):
            yield each, f"is named `{each.name}`, and its component `{parent.name}`", f"begin it with `{parent.name}-`"


@_rule("api-first")
def find_hasty(graph: Graph, bounds: Bounds) -> Iterator[Finding]:
    """An API that is not on yet refuses; only a dependency says what has to be there first."""
    for each in graph.made("gcp"):
        needed = _api(each)
        if needed is None:
            continue
        enabled = [other.inputs.get("service") for other in graph.waited_for(each) if other.type == SERVICE]
        if not any(_may_be(service, f"{needed}.googleapis.com") for service in enabled):
            yield each, f"does not wait until {needed}.googleapis.com is on", f'depend on `apis.needs("{needed}")`'


@_rule("agent-first")
def find_hasty_agent_grants(graph: Graph, bounds: Bounds) -> Iterator[Finding]:
    """A service's agent comes into being on first use, and nobody can be granted anything before."""
    for each in graph.made("gcp"):
        member = each.inputs.get("member")
        if not each.type.lower().endswith("iammember") or not isinstance(member, str) or not _AGENT.match(member):
            continue
        if not any(other.type == SERVICE_IDENTITY for other in graph.waited_for(each)):
            yield each, f"grants to `{member}`, and does not wait until that is made", "depend on its ServiceIdentity"


# --- what rules share

_DEPLOYERS: Final = re.compile(
    r"^resourcemanager\..*\.setIamPolicy$|^iam\.serviceAccountKeys\.|^iam\.serviceAccounts\.(actAs|getAccessToken|sign)"
)
"""What not even the custom role of a deploying pipeline may contain."""
_WIDE: Final = re.compile(rf"\.setIamPolicy$|{_DEPLOYERS.pattern}")
_AGENT: Final = re.compile(r"serviceAccount:(service-\d+@|\d+@cloudservices)")


def _get(value: Any, key: str) -> Any:
    """A key of an object; unknown of an unknown, and None of nothing."""
    if isinstance(value, Unknown):
        return value
    if isinstance(value, Secret):
        return _get(value.value, key)
    return value.get(key) if isinstance(value, Mapping) else None


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


def _may_be(value: Any, wanted: str | bool) -> bool:
    """Whether it is, or only the cloud can tell."""
    return value == wanted or isinstance(value, Unknown)


def _find_secret(value: Any, path: str = "") -> str | None:
    """Where the first value lies that is marked as secret."""
    if isinstance(value, Secret):
        return path
    items: Iterable[tuple[str, Any]] = ()
    if isinstance(value, Mapping):
        items = ((f"{path}.{key}" if path else str(key), item) for key, item in value.items())
    elif isinstance(value, list | tuple):
        items = ((f"{path}[{index}]", item) for index, item in enumerate(value))
    return next((found for where, item in items if (found := _find_secret(item, where)) is not None), None)


def _topics(graph: Graph, resource: Registration, key: str) -> set[str]:
    """What names the topics behind an input: their URNs, and the name where it is known."""
    value = resource.inputs.get(key)
    name = _get(value, "deadLetterTopic") if key == "deadLetterPolicy" else value
    found = set(graph.behind(resource, key, TOPIC))
    if isinstance(name, str) and name:
        found.add(name.rpartition("/")[2])
    for urn in list(found):
        topic = graph.get(urn)
        if topic is not None and isinstance(topic.inputs.get("name"), str):
            found.add(str(topic.inputs["name"]))
    return found


def _dead_letter_topics(graph: Graph) -> set[str]:
    return {topic for each in graph.of_type(SUBSCRIPTION) for topic in _topics(graph, each, "deadLetterPolicy")}


def _is_agents(graph: Graph, grant: Registration) -> bool:
    member = grant.inputs.get("member")
    known = isinstance(member, str) and bool(_AGENT.match(member))
    return known or bool(graph.behind(grant, "member", SERVICE_IDENTITY))


def _same_name(grant: Registration, subscription: Registration) -> bool:
    name = grant.inputs.get("subscription")
    return isinstance(name, str) and name.rpartition("/")[2] == subscription.inputs.get("name")


def _seconds(value: Any) -> float | None:
    """Of `600s`; None where nothing is said, and for ever where only the cloud knows."""
    if isinstance(value, Unknown):
        return math.inf
    found = re.fullmatch(r"(\d+(?:\.\d+)?)s", value) if isinstance(value, str) else None
    return float(found[1]) if found else None


def _is_everybody(source: str) -> bool:
    try:
        return ipaddress.ip_network(source, strict=False).prefixlen == 0
    except ValueError:
        return True


def _is_private(source: str) -> bool:
    network = ipaddress.ip_network(source, strict=False)
    return network.is_private


def _opens_ssh(firewall: Registration) -> bool:
    for allowed in _list(firewall.inputs.get("allows")):
        protocol, ports = _get(allowed, "protocol"), _get(allowed, "ports")
        if protocol not in ("tcp", "all", "6"):
            continue
        if not ports:
            return True
        for port in _list(ports):
            low, _, high = str(port).partition("-")
            if low.isdigit() and int(low) <= 22 <= int(high or low):
                return True
    return False


def _namespace(resource: Registration) -> Any:
    return _get(resource.inputs.get("metadata"), "namespace")


def _any_in(resources: Iterable[Registration], provider: str | None, namespace: Any) -> bool:
    """Whether one of them is, or may be, in this namespace of this cluster."""
    return any(
        each.provider == provider and (isinstance(namespace, Unknown) or _may_be(_namespace(each), namespace))
        for each in resources
    )


def _denies(spec: Any) -> bool:
    """Whether a network policy closes, or may close, every pod of its namespace both ways and opens nothing."""
    selector, types = _get(spec, "podSelector"), _get(spec, "policyTypes")
    everyone = isinstance(selector, Unknown) or (
        isinstance(selector, Mapping)
        and not any(value for value in selector.values() if not isinstance(value, Unknown))
    )
    both = isinstance(types, Unknown) or all(
        any(_may_be(each, side) for each in _list(types)) for side in ("Ingress", "Egress")
    )
    return everyone and both and not _list(_get(spec, "ingress")) and not _list(_get(spec, "egress"))


def _api(resource: Registration) -> str | None:
    """The API that makes `resource`; None for what switches APIs on."""
    if resource.type == SERVICE:
        return None
    if resource.type == SERVICE_IDENTITY:
        service = resource.inputs.get("service")
        return service.removesuffix(".googleapis.com") if isinstance(service, str) else "serviceusage"
    if resource.type == CUSTOM_ROLE:
        return "iam"
    module = resource.type.split(":")[1].split("/")[0]
    return APIS.get(module, module)
