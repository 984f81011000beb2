"""The rules about resources: their place and labels, queues, machines, buckets, namespaces."""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from infra.check.recording import Registration, SecretValue, UnknownValue
from infra.naming import MAKER, MANAGED_BY, STACK_LABEL
from infra.policy.base import (
    ACCOUNT,
    ADDRESS,
    AGENT,
    BUCKET,
    CLAIM,
    CUSTOM_ROLE,
    FIREWALL,
    INSTANCE,
    NAMESPACE,
    NETWORK_POLICY,
    PROVIDER_PREFIX,
    QUOTA,
    REPOSITORY,
    REPOSITORY_GRANT,
    SCHEDULE,
    SECRET,
    SECRET_GRANT,
    SERVICE,
    SERVICE_IDENTITY,
    SUBNET,
    SUBSCRIPTION,
    SUBSCRIPTION_GRANT,
    TOPIC,
    TOPIC_GRANT,
    Finding,
    Graph,
    StackBounds,
    get,
    is_own_account,
    items_of,
    may_be,
    namespace_of,
)
from infra.render.firewalls import IAP_RANGE
from infra.settings.cluster_rules import is_clusters_own, quantity
from infra.settings.forms import PRIVATE
from infra.settings.read import SECRET_VALUE
from runtime.schema import leaves

HOLD_WORK: Final = (TOPIC, SUBSCRIPTION, SECRET, REPOSITORY, INSTANCE, BUCKET, ACCOUNT)
"""Types whose loss loses tasks, data or grants: a new service account under an old name has no grants."""

LABELLED: Final = (TOPIC, SUBSCRIPTION, SECRET, REPOSITORY, INSTANCE, BUCKET, ADDRESS)

APIS: Final[Mapping[str, str]] = {
    "billing": "cloudbilling",
    "billing/budget": "billingbudgets",
    "kms": "cloudkms",
    "projects": "cloudresourcemanager",
    "serviceaccount": "iam",
}
"""Module of the provider → the API that it calls, if their names differ."""


def find_secret_values(graph: Graph, bounds: StackBounds) -> Iterator[Finding]:
    """No secret value passes through Pulumi. What it is given it keeps in its state."""
    for each in graph.resources:
        if not each.custom or each.type.startswith(PROVIDER_PREFIX):
            continue
        for path, value in leaves(each.inputs):
            if isinstance(value, SecretValue):
                yield each, f"has a secret value in `{path}`", "refer to the secret by its name"
            elif isinstance(value, str) and SECRET_VALUE.search(value):
                yield each, f"has what looks like a secret value in `{path}`", "refer to the secret by its name"


def find_unlabelled(graph: Graph, bounds: StackBounds) -> Iterator[Finding]:
    """Labels say whose a resource is. `gc` and the bill go by them."""
    for each in graph.resources:
        if not each.custom:
            continue
        if each.type in LABELLED:
            labels = each.inputs.get("labels")
        elif each.type.startswith("kubernetes:"):
            labels = get(each.inputs.get("metadata"), "labels")
        else:
            continue
        if not may_be(get(labels, MANAGED_BY), MAKER) or not get(labels, STACK_LABEL):
            yield each, f"lacks the labels `{MANAGED_BY}: {MAKER}` and `{STACK_LABEL}`", "pass `labels(stack, own)`"


def find_unprotected(graph: Graph, bounds: StackBounds) -> Iterator[Finding]:
    """What holds work refuses to be destroyed, in every stack that says so."""
    # A pull-through cache fills itself again.
    holders = [each for each in graph.of_type(*HOLD_WORK) if not may_be(each.inputs.get("mode"), "REMOTE_REPOSITORY")]
    wanted = bounds.protect if bounds.protect is not None else any(each.protect for each in holders)
    for each in holders if wanted else ():
        if not each.protect:
            yield each, "holds work and can be destroyed", "set `protect`, or `protect: false` for the whole stack"


def find_strays(graph: Graph, bounds: StackBounds) -> Iterator[Finding]:
    """Everything is in the project and the regions that the stack file names."""
    for each in (*graph.of_type(f"{PROVIDER_PREFIX}gcp"), *graph.made("gcp")):
        project = each.inputs.get("project")
        homes = {bounds.project, *(bounds.lenders if each.type in (REPOSITORY_GRANT, SECRET_GRANT) else ())}
        if bounds.project and isinstance(project, str) and project not in homes:
            yield each, f"is in the project `{project}`, allowed is {bounds.project}", "name it under `existing`"
    for each in graph.made("gcp") if bounds.regions is not None else ():
        for key, place in _places(each):
            if not isinstance(place, str) or place == "global":
                continue
            region = place.rpartition("-")[0] if key == "zone" else place
            if region.lower() not in (bounds.regions or ()):
                allowed = ", ".join(sorted(bounds.regions or ()))
                yield each, f"is in `{place}`, allowed are {allowed}", "name the region in the stack file"


def _places(resource: Registration) -> Iterator[tuple[str, Any]]:
    """Yield every region, zone and location that a resource is in, or keeps copies in."""
    for key in ("region", "zone", "location"):
        yield key, resource.inputs.get(key)
    for each in items_of(get(resource.inputs.get("customPlacementConfig"), "dataLocations")):
        yield "location", each
    for each in items_of(get(get(resource.inputs.get("replication"), "userManaged"), "replicas")):
        yield "location", get(each, "location")


def find_hasty(graph: Graph, bounds: StackBounds) -> Iterator[Finding]:
    """An API that is not on yet refuses; only a dependency says what has to be there first."""
    for each in graph.made("gcp"):
        needed = _api(each)
        if needed is None:
            continue
        enabled = [other.inputs.get("service") for other in graph.waited_for(each) if other.type == SERVICE]
        if not any(may_be(service, f"{needed}.googleapis.com") for service in enabled):
            yield each, f"does not wait until {needed}.googleapis.com is on", f'depend on `apis.needs("{needed}")`'


def _api(resource: Registration) -> str | None:
    """Return the API that makes `resource`; None for a resource that switches an API on."""
    if resource.type == SERVICE:
        return None
    if resource.type == SERVICE_IDENTITY:
        service = resource.inputs.get("service")
        return service.removesuffix(".googleapis.com") if isinstance(service, str) else "serviceusage"
    if resource.type == CUSTOM_ROLE:
        return "iam"
    kind = resource.type.split(":")[1]
    module = kind.split("/")[0]
    return APIS.get(kind, APIS.get(module, module))


# queues: no task expires or is delivered for ever, and no dead letter is lost


def find_missing_dead_letters(graph: Graph, bounds: StackBounds) -> Iterator[Finding]:
    """A subscription without dead letters delivers a task that nobody can do for ever."""
    dead = {topic for each in graph.of_type(SUBSCRIPTION) for topic in _topics(graph, each, "deadLetterPolicy")}
    for each in graph.of_type(SUBSCRIPTION):
        if not get(each.inputs.get("deadLetterPolicy"), "deadLetterTopic") and not _topics(graph, each, "topic") & dead:
            yield each, "has no dead letters", "set `dead_letter_policy`"


def find_leaving_tasks(graph: Graph, bounds: StackBounds) -> Iterator[Finding]:
    """Workers pull tasks; a subscription that pushes or exports them sends them wherever it says."""
    for each in graph.of_type(SUBSCRIPTION):
        for key in ("pushConfig", "bigqueryConfig", "cloudStorageConfig"):
            if each.inputs.get(key):
                yield each, f"sends its tasks elsewhere by `{key}`", "let workers pull them"


def find_lost_dead_letters(graph: Graph, bounds: StackBounds) -> Iterator[Finding]:
    """A topic keeps nothing by itself: without a subscription of its own a dead letter is gone at once."""
    subscribed: set[str] = set()
    for each in graph.of_type(SUBSCRIPTION):
        subscribed |= _topics(graph, each, "topic")
    for each in graph.of_type(SUBSCRIPTION):
        wanted = _topics(graph, each, "deadLetterPolicy")
        if wanted and not wanted & subscribed:
            yield each, "sends its dead letters to a topic that has no subscription", "subscribe to that topic"


def find_powerless_agents(graph: Graph, bounds: StackBounds) -> Iterator[Finding]:
    """Pub/Sub's own agent moves dead letters. Without its two grants they are redelivered for ever, with no error."""
    for each in graph.of_type(SUBSCRIPTION):
        wanted = _topics(graph, each, "deadLetterPolicy")
        if not wanted:
            continue
        publishes = any(
            may_be(grant.inputs.get("role"), "roles/pubsub.publisher") and wanted & _topics(graph, grant, "topic")
            for grant in graph.of_type(TOPIC_GRANT)
            if _is_agents(graph, grant)
        )
        subscribes = any(
            may_be(grant.inputs.get("role"), "roles/pubsub.subscriber")
            and (each.urn in graph.behind(grant, "subscription", SUBSCRIPTION) or _same_name(grant, each))
            for grant in graph.of_type(SUBSCRIPTION_GRANT)
            if _is_agents(graph, grant)
        )
        if not publishes:
            yield each, "has dead letters that Pub/Sub's agent may not publish", "grant it the topic's publisher role"
        if not subscribes:
            yield each, "has dead letters that Pub/Sub's agent may not take off it", "grant it the subscriber role"


def find_expiring_subscriptions(graph: Graph, bounds: StackBounds) -> Iterator[Finding]:
    """By default an idle subscription is deleted after 31 days, with all its tasks."""
    for each in graph.of_type(SUBSCRIPTION):
        if not may_be(get(each.inputs.get("expirationPolicy"), "ttl"), ""):
            hint = 'set `expiration_policy` with the ttl ""'
            yield each, "is deleted with all its tasks after 31 days without a worker", hint


def find_short_retention(graph: Graph, bounds: StackBounds) -> Iterator[Finding]:
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


def _topics(graph: Graph, resource: Registration, key: str) -> set[str]:
    """Return the URNs of the topics behind an input, and their names if known."""
    value = resource.inputs.get(key)
    name = get(value, "deadLetterTopic") if key == "deadLetterPolicy" else value
    found = set(graph.behind(resource, key, TOPIC))
    if isinstance(name, str) and name:
        found.add(name.rpartition("/")[2])
    for urn in list(found):
        topic = graph.get(urn)
        if topic is not None and isinstance(topic.inputs.get("name"), str):
            found.add(str(topic.inputs["name"]))
    return found


def _is_agents(graph: Graph, grant: Registration) -> bool:
    member = grant.inputs.get("member")
    known = isinstance(member, str) and bool(AGENT.match(member))
    return known or bool(graph.behind(grant, "member", SERVICE_IDENTITY))


def _same_name(grant: Registration, subscription: Registration) -> bool:
    name = grant.inputs.get("subscription")
    return isinstance(name, str) and name.rpartition("/")[2] == subscription.inputs.get("name")


def _seconds(value: Any) -> float | None:
    """Return the seconds of `600s`; None if the input is absent, infinity if only the cloud knows it."""
    if isinstance(value, UnknownValue):
        return math.inf
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)s", value) if isinstance(value, str) else None
    return float(found[1]) if found else None


# machines, firewalls and buckets, which are closed


METADATA: Final[Mapping[str, re.Pattern[str]]] = {
    "block-project-ssh-keys": re.compile("true", re.IGNORECASE),
    "enable-oslogin": re.compile("true", re.IGNORECASE),
    "enable-guest-attributes": re.compile("true|false", re.IGNORECASE),
    "serial-port-enable": re.compile("false", re.IGNORECASE),
    "startup-script": re.compile("[^\0]*"),
    "ray-*": re.compile("[^\0]*"),
}
"""Keys of a machine's metadata that a program may set, and their values. The guest agent obeys others, such as SSH keys.
https://cloud.google.com/compute/docs/metadata/predefined-metadata-keys"""


def find_open_instances(graph: Graph, bounds: StackBounds) -> Iterator[Finding]:
    """Machines have no external address, are shielded, take no SSH keys, and run as an account of their stack."""
    for each in graph.of_type(INSTANCE):
        for interface in items_of(each.inputs.get("networkInterfaces")):
            if items_of(get(interface, "accessConfigs")) or items_of(get(interface, "ipv6AccessConfigs")):
                yield each, "has an external address", "leave `access_configs` out"
        if each.inputs.get("canIpForward") is True:
            yield each, "forwards packets of other addresses", "leave `can_ip_forward` out"
        if items_of(each.inputs.get("attachedDisks")) or isinstance(get(each.inputs.get("bootDisk"), "source"), str):
            yield each, "has a disk that exists already", "start from an image"
        yield from _find_foreign_images(each, bounds)
        shield = each.inputs.get("shieldedInstanceConfig")
        for key in ("enableSecureBoot", "enableVtpm", "enableIntegrityMonitoring"):
            if not may_be(get(shield, key), True):
                yield each, f"is not shielded: `{key}` is not true", "set `shielded_instance_config`"
        metadata = each.inputs.get("metadata")
        if not isinstance(metadata, UnknownValue) and not get(metadata, "block-project-ssh-keys"):
            yield each, "accepts SSH keys of the whole project", "set the metadata `block-project-ssh-keys` to TRUE"
        for key, value in metadata.items() if isinstance(metadata, Mapping) else ():
            form = METADATA.get("ray-*" if key.startswith("ray-") else key)
            if form is None:
                allowed = ", ".join(f"`{one}`" for one in METADATA)
                yield each, f"has the metadata `{key}`, allowed are {allowed}", "give it a line in `METADATA`"
            elif not isinstance(value, UnknownValue) and not form.fullmatch(str(value)):
                yield each, f"has another value of the metadata `{key}` than `{form.pattern}`", None
        email = get(each.inputs.get("serviceAccount"), "email")
        if isinstance(email, UnknownValue) and not graph.behind(each, "serviceAccount", ACCOUNT):
            yield each, "runs as an account that is not known before `up`", "make an account for it"
        elif isinstance(email, str) and not is_own_account(graph, f"serviceAccount:{email}"):
            yield each, f"runs as `{email}`, which is no account of this stack", "make an account for it"


def _find_foreign_images(machine: Registration, bounds: StackBounds) -> Iterator[Finding]:
    boot = get(machine.inputs.get("bootDisk"), "initializeParams")
    if isinstance(get(boot, "snapshot"), str):
        yield machine, "starts from a snapshot", "start from an image"
    image = get(boot, "image")
    if bounds.image_projects is None or not isinstance(image, str):
        return
    found = re.search(r"(?:^|/)projects/([^/]+)/global/images/[^/]+$", image)
    if found is None or found[1] not in bounds.image_projects:
        allowed = f"allowed are images of {', '.join(sorted(bounds.image_projects))}"
        yield machine, f"starts from `{image}`, {allowed}", "write `projects/P/global/images/NAME`"


def find_open_addresses(graph: Graph, bounds: StackBounds) -> Iterator[Finding]:
    """Reserved addresses are of the subnet, or of its NAT; another external one would be a way in."""
    for each in graph.of_type(ADDRESS):
        parent = graph.parent(each)
        if parent is not None and parent.type == "runtime:network:Network":
            continue
        if not may_be(each.inputs.get("addressType"), "INTERNAL"):
            yield each, "is an external address", 'set `address_type="INTERNAL"`'


def find_other_schedules(graph: Graph, bounds: StackBounds) -> Iterator[Finding]:
    """A resource policy takes snapshots and keeps them in the stack's regions. Others stop and move machines."""
    for each in graph.of_type(SCHEDULE):
        snapshots = each.inputs.get("snapshotSchedulePolicy")
        others = sorted(key for key, value in each.inputs.items() if key.endswith("Policy") and value)
        for key in others:
            if key not in ("snapshotSchedulePolicy", "deletionPolicy"):
                yield each, f"has a `{key}`", "take snapshots, and nothing else"
        place = get(get(snapshots, "snapshotProperties"), "storageLocations")
        if not isinstance(snapshots, UnknownValue) and not place:
            yield each, "does not say where snapshots are kept", "set `storage_locations`"
        elif isinstance(place, str) and bounds.regions is not None and place.lower() not in bounds.regions:
            yield each, f"keeps snapshots in `{place}`, allowed are {', '.join(sorted(bounds.regions))}", None


def find_open_firewalls(graph: Graph, bounds: StackBounds) -> Iterator[Finding]:
    """A firewall lets in Google's proxy and the machines of the stack's own range, and nobody else."""
    ranges = PRIVATE if bounds.cidrs is None else [ipaddress.ip_network(each) for each in bounds.cidrs]
    allowed = [ipaddress.ip_network(IAP_RANGE), *ranges]
    for each in graph.of_type(FIREWALL):
        direction = each.inputs.get("direction", "INGRESS")
        if direction == "EGRESS" or not each.inputs.get("allows"):
            continue
        given = each.inputs.get("sourceRanges")
        for key in ("sourceTags", "sourceServiceAccounts"):
            if each.inputs.get(key):
                yield each, f"lets in machines by `{key}`, which machines of others in its network may have", None
        if not given:
            yield each, "names no source, so it lets in everybody", "set `source_ranges`"
        for source in items_of(given) or [given]:
            if not source:
                continue
            if isinstance(source, UnknownValue):
                if not graph.behind(each, "sourceRanges", SUBNET):
                    yield each, "lets in a range that is not known before `up`", "name the range"
            elif not _is_within(source, allowed):
                hint = f"allowed are ranges within {', '.join(map(str, allowed))}"
                yield each, f"lets in `{source}`, which is not of this stack", hint


def find_open_buckets(graph: Graph, bounds: StackBounds) -> Iterator[Finding]:
    """Buckets are closed and say how long what is deleted stays; all but those of data keep versions."""
    for each in graph.of_type(BUCKET):
        if not may_be(each.inputs.get("uniformBucketLevelAccess"), True):
            yield each, "grants by object", "set `uniform_bucket_level_access`"
        if not may_be(each.inputs.get("publicAccessPrevention"), "enforced"):
            yield each, "could be made public", 'set `public_access_prevention="enforced"`'
        parent = graph.parent(each)
        data = parent is not None and parent.type == "runtime:bucket:Bucket"
        if not data and not may_be(get(each.inputs.get("versioning"), "enabled"), True):
            yield each, "keeps no versions", "set `versioning`"
        if each.inputs.get("hierarchicalNamespace"):
            yield each, "has folders, which can be renamed past a condition on object names", None
        if not each.inputs.get("softDeletePolicy"):
            yield each, "does not say how long deleted objects stay", "set `soft_delete_policy`"


def _is_within(source: Any, allowed: Iterable[ipaddress.IPv4Network | ipaddress.IPv6Network]) -> bool:
    try:
        range_ = ipaddress.ip_network(str(source), strict=False)
    except ValueError:
        return False
    return isinstance(range_, ipaddress.IPv4Network) and any(
        isinstance(each, ipaddress.IPv4Network) and range_.subnet_of(each) for each in allowed
    )


# namespaces and claims of Kubernetes


POD_SECURITY: Final = "pod-security.kubernetes.io/enforce"
"""https://kubernetes.io/docs/concepts/security/pod-security-standards/"""


def find_wild_claims(graph: Graph, bounds: StackBounds) -> Iterator[Finding]:
    """Claims have a size within bounds, and a class that the stack file names."""
    for each in graph.of_type(CLAIM):
        spec = each.inputs.get("spec")
        size = get(get(get(spec, "resources"), "requests"), "storage")
        if isinstance(size, UnknownValue):
            continue
        if not isinstance(size, str) or quantity(size) <= 0:
            yield each, "asks for no size", "set `size`"
        elif quantity(size) > quantity(bounds.max_claim):
            yield each, f"asks for {size}, allowed is at most {bounds.max_claim}", "ask for what is needed"
        storage_class = get(spec, "storageClassName")
        named = isinstance(storage_class, str) and storage_class
        if named and bounds.storage_classes is not None and storage_class not in bounds.storage_classes:
            allowed = ", ".join(sorted(bounds.storage_classes)) or "the cluster's default"
            yield each, f"has the class `{storage_class}`, allowed are {allowed}", "name it in the stack file"


def find_open_namespaces(graph: Graph, bounds: StackBounds) -> Iterator[Finding]:
    """A namespace that we make has a quota and refuses pods with rights on their host; each one in use denies traffic."""
    # A quota with scopes limits some pods only.
    limits = [
        each
        for each in graph.of_type(QUOTA)
        if not any(isinstance(get(each.inputs.get("spec"), key), list | Mapping) for key in ("scopes", "scopeSelector"))
    ]
    denials = [each for each in graph.of_type(NETWORK_POLICY) if _denies(each.inputs.get("spec"))]
    for each in graph.of_type(NAMESPACE):
        name = get(each.inputs.get("metadata"), "name")
        if not _any_in(limits, each.provider, name):
            yield each, f"makes the namespace `{name}` without a quota", "set `quota`"
        if not _any_in(denials, each.provider, name):
            yield each, f"makes the namespace `{name}` without a network policy that denies by default", None
        enforced = get(get(each.inputs.get("metadata"), "labels"), POD_SECURITY)
        if not any(may_be(enforced, level) for level in ("baseline", "restricted")):
            hint = f"label it `{POD_SECURITY}: baseline`"
            yield each, f"makes the namespace `{name}`, which admits privileged pods", hint
    for each in graph.made("kubernetes"):
        name = get(each.inputs.get("metadata"), "name") if each.type == NAMESPACE else namespace_of(each)
        if isinstance(name, str) and is_clusters_own(name):
            yield each, f"is in the namespace `{name}`, which is the cluster's own", "choose another namespace"
    for each in graph.of_type(CLAIM):
        name = namespace_of(each)
        if not _any_in(denials, each.provider, name):
            yield each, f"is in the namespace `{name}`, which has no network policy that denies by default", None


def _any_in(resources: Iterable[Registration], provider: str | None, namespace: Any) -> bool:
    """Whether a resource is, or may be, in this namespace of this cluster."""
    return any(
        each.provider == provider and (isinstance(namespace, UnknownValue) or may_be(namespace_of(each), namespace))
        for each in resources
    )


def _denies(spec: Any) -> bool:
    """Whether a network policy closes, or may close, every pod of its namespace both ways and opens nothing."""
    selector, types = get(spec, "podSelector"), get(spec, "policyTypes")
    everyone = isinstance(selector, UnknownValue) or (
        isinstance(selector, Mapping)
        and not any(value for value in selector.values() if not isinstance(value, UnknownValue))
    )
    both = isinstance(types, UnknownValue) or all(
        any(may_be(each, side) for each in items_of(types)) for side in ("Ingress", "Egress")
    )
    return everyone and both and not items_of(get(spec, "ingress")) and not items_of(get(spec, "egress"))
