"""Values that Google allows if the wheels' types say only "a string": names, ranges, enumerations, roles, members.

A table of our own, taken from the REST references of the services, for the resource types of this program; the newest
entry was checked in November 2026. A type that is not in it is judged by its types alone.
"""

from __future__ import annotations

import functools
import ipaddress
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeAlias

from infra.check.recording import SecretValue, UnknownValue, is_grant
from infra.gcp import machines
from runtime.schema import Problem, join

Check: TypeAlias = Callable[[Any], str | None]
"""The problem of a value, or None."""


def find_value_problems(type_: str, inputs: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield a problem for each value that Google would refuse."""
    for path, check in _checks(type_):
        for where, value in _select(inputs, path, ""):
            message = check(value)
            if message is not None:
                yield Problem(path=where, message=message)
    for key, both in TOGETHER.get(type_, {}).items():
        message = both(inputs)
        if message is not None:
            yield Problem(path=key, message=message)


@functools.cache
def _checks(type_: str) -> tuple[tuple[tuple[str, ...], Check], ...]:
    table = dict(VALUES.get(type_, {}))
    if type_.startswith("gcp:"):
        table = {**COMMON, **table}
    if is_grant(type_):
        table = {"role": role, "member": member} | table
    return tuple((tuple(path.split(".")), check) for path, check in table.items())


def _select(value: Any, path: tuple[str, ...], at: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, SecretValue):
        value = value.value
    if isinstance(value, UnknownValue) or value is None:
        return
    if not path:
        yield at, value
        return
    head, *rest = path
    if head == "[]":
        if isinstance(value, list | tuple):
            for index, item in enumerate(value):
                yield from _select(item, tuple(rest), f"{at}[{index}]")
    elif isinstance(value, Mapping) and head in value:
        yield from _select(value[head], tuple(rest), join(at, head))


def matches(pattern: str, said: str) -> Check:
    compiled = re.compile(pattern)

    def check(value: Any) -> str | None:
        if isinstance(value, str) and not compiled.fullmatch(value):
            return f"is `{value[:80]}`, expected {said}"
        return None

    return check


def between(lowest: int, highest: int, unit: str = "") -> Check:
    def check(value: Any) -> str | None:
        if isinstance(value, int) and not isinstance(value, bool) and not lowest <= value <= highest:
            return f"is {value}, allowed are {lowest} to {highest}{unit and ' ' + unit}"
        return None

    return check


def one_of(*allowed: str) -> Check:
    def check(value: Any) -> str | None:
        if isinstance(value, str) and value not in allowed:
            return f"is `{value}`, allowed: {', '.join(allowed)}"
        return None

    return check


def seconds(lowest: int, highest: int, *, zero: bool = False, empty: bool = False) -> Check:
    """A duration as Google writes it: `600s`."""

    def check(value: Any) -> str | None:
        if not isinstance(value, str) or (empty and value == ""):
            return None
        found = re.fullmatch(r"([0-9]+)(\.[0-9]{1,9})?s", value)
        if not found:
            return f"is `{value}`, expected seconds such as `{max(lowest, 1)}s`"
        amount = float(value[:-1])
        if (zero and amount == 0) or lowest <= amount <= highest:
            return None
        return f"is `{value}`, allowed are {lowest}s to {highest}s" + (", or 0s" if zero else "")

    return check


def cidr(value: Any) -> str | None:
    if isinstance(value, str):
        try:
            ipaddress.ip_network(value)
        except ValueError as problem:
            return f"is no range of addresses: {problem}"
    return None


def label_set(value: Any) -> str | None:
    """Labels of Google: at most 64, lower case."""
    if not isinstance(value, Mapping):
        return None
    if len(value) > 64:
        return f"has {len(value)} labels, allowed are 64"
    for key, text in value.items():
        if not re.fullmatch(r"[a-z][a-z0-9_-]{0,62}", key):
            return f"has the key `{key[:80]}`; keys are a lower-case letter, then up to 62 of a-z, 0-9, `_`, `-`"
        if isinstance(text, str) and not re.fullmatch(r"[a-z0-9_-]{0,63}", text):
            return f"has `{key}: {text[:80]}`; values are up to 63 of a-z, 0-9, `_`, `-`"
    return None


def all_of(*checks: Check) -> Check:
    def check(value: Any) -> str | None:
        return next((message for each in checks if (message := each(value)) is not None), None)

    return check


def soft_delete(value: Any) -> str | None:
    if isinstance(value, int) and value != 0 and not 604_800 <= value <= 7_776_000:
        return f"is {value}, allowed are 0, or 604800 (7 days) to 7776000 (90 days)"
    return None


def backoff_order(value: Any) -> str | None:
    """The shorter wait of a retry policy is not above the longer."""
    if not isinstance(value, Mapping):
        return None
    low, high = value.get("minimumBackoff"), value.get("maximumBackoff")
    spans = [re.fullmatch(r"([0-9]+)s", each) if isinstance(each, str) else None for each in (low, high)]
    if spans[0] and spans[1] and int(spans[0][1]) > int(spans[1][1]):
        return f"has a minimum of {low} above its maximum of {high}"
    return None


def machine_fits(inputs: Any) -> str | None:
    """A machine's boot disk and its behaviour at maintenance are what Google takes for its family."""
    machine_type = _at(inputs, "machineType")
    if machine_type is None or machine_type.partition("-")[0] not in machines.FAMILIES:
        return None
    disk, disks = _at(inputs, "bootDisk", "initializeParams", "type"), machines.disk_types(machine_type)
    if disk is not None and disk not in disks:
        return f"is `{machine_type}`, whose boot disk can be {', '.join(disks)}, not `{disk}`"
    if _at(inputs, "scheduling", "onHostMaintenance") == "MIGRATE" and machines.maintenance(machine_type) != "MIGRATE":
        return f"is `{machine_type}`, which needs `onHostMaintenance: TERMINATE`: Google cannot move it while it runs"
    return None


def firewall_is_at_home(inputs: Any) -> str | None:
    """A firewall is in the project of its network."""
    network, project = _at(inputs, "network"), _at(inputs, "project")
    found = re.search(rf"projects/({PROJECT})/global/networks/", network or "")
    if found and project is not None and found[1] != project:
        return f"is of project `{found[1]}`, and a firewall in `{project}` cannot refer to it"
    return None


def _at(inputs: Any, *path: str) -> str | None:
    """Return the text at a path; None for anything else, unknown values included."""
    for key in path:
        inputs = inputs.get(key) if isinstance(inputs, Mapping) else None
    return inputs if isinstance(inputs, str) else None


PROJECT = r"(?:[a-z0-9.-]+:)?[a-z][a-z0-9-]{4,28}[a-z0-9]"
LINK = rf"(?:https://(?:www\.googleapis\.com/compute|compute\.googleapis\.com/compute)/v1/)?projects/{PROJECT}"
NAME_63 = r"[a-z](?:[-a-z0-9]{0,61}[a-z0-9])?"

project = matches(PROJECT, "a project id: 6 to 30 of a-z, 0-9, `-`, beginning with a letter")
role = matches(
    rf"roles/[A-Za-z0-9_.]+|projects/{PROJECT}/roles/[A-Za-z0-9_.]{{3,64}}|organizations/[0-9]+/roles/[A-Za-z0-9_.]{{3,64}}",
    "`roles/…`, `projects/P/roles/R` or `organizations/N/roles/R`",
)
email = r"[^@\s:]+@[^@\s:]+\.[^@\s:]+"
member = matches(
    rf"(?:user|group|serviceAccount|deleted:serviceAccount):{email}(?:\?uid=[0-9]+)?|domain:[^@\s:]+\.[^@\s:]+"
    r"|serviceAccount:[a-z][a-z0-9-]+\.svc\.id\.goog\[[a-z0-9-]+/[a-z0-9-]+\]"
    r"|allUsers|allAuthenticatedUsers|project(?:Owner|Editor|Viewer):[a-z0-9.:-]+"
    r"|principal(?:Set)?://(?:iam|sts)\.googleapis\.com/\S+",
    "`serviceAccount:`, `user:` or `group:` and an e-mail address, `domain:` and a domain, or `principalSet://…`",
)
pubsub_id = matches(
    r"(?!goog)[A-Za-z][A-Za-z0-9._~+%-]{2,254}",
    "3 to 255 letters, digits, `-._~+%`, beginning with a letter, not `goog`",
)
topic_path = matches(
    rf"projects/{PROJECT}/topics/[A-Za-z][A-Za-z0-9._~+%-]{{2,254}}|[A-Za-z][A-Za-z0-9._~+%-]{{2,254}}|_deleted-topic_",
    "`projects/P/topics/T`",
)
full_topic_path = matches(
    rf"projects/{PROJECT}/topics/[A-Za-z][A-Za-z0-9._~+%-]{{2,254}}", "`projects/P/topics/T` in full"
)
compute_name = matches(NAME_63, "1 to 63 of a-z, 0-9, `-`, beginning with a letter, not ending in `-`")
account_id = matches(r"[a-z][a-z0-9-]{4,28}[a-z0-9]", "6 to 30 of a-z, 0-9, `-`, beginning with a letter")
region = matches(r"[a-z]+(?:-[a-z]+)+[0-9]+", "a region such as `us-west4`")
zone = matches(r"[a-z]+(?:-[a-z]+)+[0-9]+-[a-z]", "a zone such as `us-west4-a`")
location = matches(r"[A-Za-z]+(?:-[A-Za-z]+)*[0-9]*(?:-[a-z])?", "a region or multi-region")
network_link = matches(rf"{LINK}/global/networks/{NAME_63}|{NAME_63}", "a network's self-link")
subnet_link = matches(
    rf"{LINK}/regions/[a-z0-9-]+/subnetworks/{NAME_63}|{NAME_63}",
    "a subnet's self-link: `projects/P/regions/R/subnetworks/N`",
)
deletion_policy = one_of("DELETE", "PREVENT", "ABANDON")
permission = matches(r"[a-z][A-Za-z0-9]*(?:\.[A-Za-z0-9]+){1,3}", "a permission such as `tpu.nodes.list`")
account_name = matches(rf"projects/(?:{PROJECT}|-)/serviceAccounts/{email}", "`projects/P/serviceAccounts/EMAIL`")
bucket_name = all_of(
    matches(
        r"[a-z0-9][a-z0-9_.-]{1,220}[a-z0-9]",
        "3 to 63 of a-z, 0-9, `-`, `_`, `.`, beginning and ending with a letter or digit",
    ),
    matches(r"(?!goog)(?!.*google)(?!.*g00gle).*", "a name without `google` that does not begin with `goog`"),
    matches(r"[^.]{3,63}|[^.]{1,63}(?:\.[^.]{1,63})+", "parts of at most 63 characters"),
    matches(r"(?![0-9]+\.[0-9]+\.[0-9]+\.[0-9]+$).*", "a name that is no address"),
)
pool_id = matches(r"(?!gcp-)[a-z0-9-]{4,32}", "4 to 32 of a-z, 0-9, `-`, not beginning with `gcp-`")
service_host = matches(r"[a-z0-9-]+\.googleapis\.com", "a service such as `pubsub.googleapis.com`")
repository_id = matches(r"[a-z](?:[a-z0-9-]{0,61}[a-z0-9])?", "1 to 63 of a-z, 0-9, `-`, beginning with a letter")

COMMON: Final[Mapping[str, Check]] = {"labels": label_set, "project": project, "deletionPolicy": deletion_policy}

_SUBSCRIPTION_DAYS = seconds(600, 2_678_400)
VALUES: Final[Mapping[str, Mapping[str, Check]]] = {
    "pulumi:providers:gcp": {"project": project, "region": region, "zone": zone, "defaultLabels": label_set},
    "gcp:artifactregistry/repository:Repository": {
        "repositoryId": repository_id,
        "location": location,
        "format": one_of("DOCKER", "MAVEN", "NPM", "PYTHON", "APT", "YUM", "GO", "KFP", "GENERIC"),
        "mode": one_of("STANDARD_REPOSITORY", "VIRTUAL_REPOSITORY", "REMOTE_REPOSITORY"),
        "cleanupPolicies.[].action": one_of("DELETE", "KEEP"),
        "cleanupPolicies.[].condition.tagState": one_of("TAGGED", "UNTAGGED", "ANY"),
        "cleanupPolicies.[].condition.olderThan": matches(r"[0-9]+[smhd]", "a duration such as `30d`"),
        "cleanupPolicies.[].condition.newerThan": matches(r"[0-9]+[smhd]", "a duration such as `30d`"),
    },
    "gcp:artifactregistry/repositoryIamMember:RepositoryIamMember": {"location": location},
    "gcp:billing/budget:Budget": {
        "billingAccount": matches(r"[0-9A-F]{6}-[0-9A-F]{6}-[0-9A-F]{6}", "`XXXXXX-XXXXXX-XXXXXX` in hex digits"),
        "amount.specifiedAmount.currencyCode": matches(r"[A-Z]{3}", "a currency such as `USD`"),
        "amount.specifiedAmount.units": matches(r"[0-9]+", "a whole number as text"),
    },
    "gcp:compute/firewall:Firewall": {
        "name": compute_name,
        "network": network_link,
        "direction": one_of("INGRESS", "EGRESS"),
        "priority": between(0, 65_535),
        "sourceRanges.[]": cidr,
        "destinationRanges.[]": cidr,
        "targetTags.[]": compute_name,
        "sourceTags.[]": compute_name,
        "allows.[].protocol": matches(r"tcp|udp|icmp|esp|ah|sctp|ipip|all|[0-9]{1,3}", "tcp, udp, icmp … or a number"),
        "allows.[].ports.[]": matches(
            r"[0-9]{1,5}(?:-[0-9]{1,5})?", "a port or a range such as `6379` or `10000-19999`"
        ),
        "denies.[].protocol": matches(r"tcp|udp|icmp|esp|ah|sctp|ipip|all|[0-9]{1,3}", "tcp, udp, icmp … or a number"),
    },
    "gcp:compute/instance:Instance": {
        "name": compute_name,
        "zone": zone,
        "machineType": matches(r"[a-z][a-z0-9]*-[a-z0-9-]+", "a machine type such as `n2-standard-8`"),
        "tags.[]": compute_name,
        "desiredStatus": one_of("RUNNING", "SUSPENDED", "TERMINATED"),
        "networkInterfaces.[].network": network_link,
        "networkInterfaces.[].subnetwork": subnet_link,
        "serviceAccount.email": matches(rf"{email}|default", "an e-mail address"),
        "serviceAccount.scopes.[]": matches(r"https://www\.googleapis\.com/auth/\S+|[a-z-]+", "a scope"),
        "scheduling.onHostMaintenance": one_of("MIGRATE", "TERMINATE"),
    },
    "gcp:compute/instanceIAMMember:InstanceIAMMember": {"zone": zone},
    "gcp:compute/network:Network": {"name": compute_name, "routingMode": one_of("REGIONAL", "GLOBAL")},
    "gcp:compute/router:Router": {"name": compute_name, "network": network_link, "region": region},
    "gcp:compute/routerNat:RouterNat": {
        "name": compute_name,
        "region": region,
        "natIpAllocateOption": one_of("AUTO_ONLY", "MANUAL_ONLY"),
        "sourceSubnetworkIpRangesToNat": one_of(
            "ALL_SUBNETWORKS_ALL_IP_RANGES", "ALL_SUBNETWORKS_ALL_PRIMARY_IP_RANGES", "LIST_OF_SUBNETWORKS"
        ),
        "minPortsPerVm": between(2, 65_536),
        "maxPortsPerVm": between(2, 65_536),
        "logConfig.filter": one_of("ERRORS_ONLY", "TRANSLATIONS_ONLY", "ALL"),
    },
    "gcp:compute/subnetwork:Subnetwork": {
        "name": compute_name,
        "network": network_link,
        "region": region,
        "ipCidrRange": cidr,
        "stackType": one_of("IPV4_ONLY", "IPV4_IPV6", "IPV6_ONLY"),
    },
    "gcp:compute/subnetworkIAMMember:SubnetworkIAMMember": {"region": region},
    "gcp:iam/workloadIdentityPool:WorkloadIdentityPool": {"workloadIdentityPoolId": pool_id},
    "gcp:iam/workloadIdentityPoolProvider:WorkloadIdentityPoolProvider": {
        "workloadIdentityPoolId": pool_id,
        "workloadIdentityPoolProviderId": pool_id,
        "oidc.issuerUri": matches(r"https://\S+", "an https address"),
    },
    "gcp:monitoring/alertPolicy:AlertPolicy": {
        "combiner": one_of("AND", "OR", "AND_WITH_MATCHING_RESOURCE"),
        "severity": one_of("CRITICAL", "ERROR", "WARNING"),
        "conditions.[].conditionThreshold.comparison": one_of("COMPARISON_GT", "COMPARISON_LT"),
        "conditions.[].conditionThreshold.duration": seconds(60, 84_600, zero=True),
        "conditions.[].conditionThreshold.aggregations.[].alignmentPeriod": seconds(60, 90_000),
        "conditions.[].conditionAbsent.duration": seconds(120, 84_600),
    },
    "gcp:monitoring/notificationChannel:NotificationChannel": {
        "labels": lambda value: None,
        "type": one_of("email", "sms", "slack", "pagerduty", "webhook_tokenauth", "webhook_basicauth", "pubsub"),
    },
    "gcp:projects/iAMCustomRole:IAMCustomRole": {
        "roleId": matches(r"[A-Za-z0-9_.]{3,64}", "3 to 64 letters, digits, `_`, `.`"),
        "permissions.[]": permission,
        "stage": one_of("ALPHA", "BETA", "GA", "DEPRECATED", "DISABLED", "EAP"),
    },
    "gcp:projects/service:Service": {"service": service_host},
    "gcp:projects/serviceIdentity:ServiceIdentity": {"service": service_host},
    "gcp:pubsub/subscription:Subscription": {
        "name": pubsub_id,
        "topic": topic_path,
        "ackDeadlineSeconds": between(10, 600, "seconds"),
        "messageRetentionDuration": _SUBSCRIPTION_DAYS,
        "expirationPolicy.ttl": seconds(86_400, 31_536_000_000, empty=True),
        "retryPolicy": backoff_order,
        "retryPolicy.minimumBackoff": seconds(0, 600),
        "retryPolicy.maximumBackoff": seconds(0, 600),
        "deadLetterPolicy.maxDeliveryAttempts": between(5, 100),
        "deadLetterPolicy.deadLetterTopic": full_topic_path,
    },
    "gcp:pubsub/topic:Topic": {"name": pubsub_id, "messageRetentionDuration": _SUBSCRIPTION_DAYS},
    "gcp:secretmanager/secret:Secret": {
        "secretId": matches(r"[A-Za-z0-9_-]{1,255}", "1 to 255 letters, digits, `_`, `-`")
    },
    "gcp:serviceaccount/account:Account": {
        "accountId": account_id,
        "displayName": matches(r"(?s).{0,100}", "at most 100 characters"),
    },
    "gcp:serviceaccount/iAMMember:IAMMember": {"serviceAccountId": account_name},
    "gcp:storage/bucket:Bucket": {
        "name": bucket_name,
        "location": location,
        "storageClass": one_of("STANDARD", "NEARLINE", "COLDLINE", "ARCHIVE", "MULTI_REGIONAL", "REGIONAL"),
        "publicAccessPrevention": one_of("inherited", "enforced"),
        "softDeletePolicy.retentionDurationSeconds": soft_delete,
        "lifecycleRules.[].action.type": one_of("Delete", "SetStorageClass", "AbortIncompleteMultipartUpload"),
    },
}
"""Type → path (`[]` is any element of a list) → check."""

TOGETHER: Final[Mapping[str, Mapping[str, Check]]] = {
    "gcp:compute/firewall:Firewall": {"network": firewall_is_at_home},
    "gcp:compute/instance:Instance": {"machineType": machine_fits},
}
"""Type → path to report → check of inputs that depend on each other; it gets all inputs."""
