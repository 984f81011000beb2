"""Values that Google refuses: what its own descriptions of its APIs list, and the limits that they state in prose alone.

Nothing here is the product's, so a mistake there is refused here.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from tests.fakes.google import read_document

_APIS: Final = {"artifactregistry": "artifactregistry.v1", "compute": "compute.v1", "monitoring": "monitoring.v3"}
"""Module of a type → the API whose schema has the name of the type."""

_DAYS_31_S: Final = 31 * 86_400
_POOL_ID: Final = re.compile(r"(?!gcp-)[a-z0-9-]{4,32}")
_PUBSUB_ID: Final = re.compile(r"(?!goog)[A-Za-z][A-Za-z0-9._~+%-]{2,254}")
_ROLE: Final = re.compile(r"(?:roles|projects/[^/]+/roles|organizations/[0-9]+/roles)/[A-Za-z0-9_.]+")
_MEMBER: Final = re.compile(
    r"(?:user|group|serviceAccount|deleted:serviceAccount):[^@\s:]+@[^@\s:]+\.\S+|domain:[^@\s:]+\.[^@\s:]+"
    r"|all(?:Authenticated)?Users|principal(?:Set)?://\S+|serviceAccount:\S+\.svc\.id\.goog\[\S+\]"
)
_CIDR: Final = "a range of addresses"

LIMITS: Final[Mapping[str, Mapping[str, re.Pattern[str] | range | str]]] = {
    "gcp:artifactregistry/repository:Repository": {"repositoryId": re.compile(r"[a-z](?:[a-z0-9-]{0,61}[a-z0-9])?")},
    "gcp:billing/budget:Budget": {"billingAccount": re.compile(r"[0-9A-F]{6}-[0-9A-F]{6}-[0-9A-F]{6}")},
    "gcp:compute/firewall:Firewall": {"sourceRanges[]": _CIDR, "destinationRanges[]": _CIDR},
    "gcp:compute/subnetwork:Subnetwork": {"ipCidrRange": _CIDR},
    "gcp:iam/workloadIdentityPool:WorkloadIdentityPool": {"workloadIdentityPoolId": _POOL_ID},
    "gcp:iam/workloadIdentityPoolProvider:WorkloadIdentityPoolProvider": {"workloadIdentityPoolProviderId": _POOL_ID},
    "gcp:projects/iAMCustomRole:IAMCustomRole": {
        "roleId": re.compile(r"[A-Za-z0-9_.]{3,64}"),
        "permissions[]": re.compile(r"[a-z][A-Za-z0-9]*(?:\.[A-Za-z0-9]+){1,3}"),
    },
    "gcp:pubsub/subscription:Subscription": {
        "name": _PUBSUB_ID,
        "ackDeadlineSeconds": range(10, 601),
        "deadLetterPolicy.maxDeliveryAttempts": range(5, 101),
        "messageRetentionDuration": range(600, _DAYS_31_S + 1),
        "retryPolicy.minimumBackoff": range(601),
        "retryPolicy.maximumBackoff": range(601),
    },
    "gcp:pubsub/topic:Topic": {"name": _PUBSUB_ID, "messageRetentionDuration": range(600, _DAYS_31_S + 1)},
    "gcp:secretmanager/secret:Secret": {"secretId": re.compile(r"[A-Za-z0-9_-]{1,255}")},
    "gcp:serviceaccount/account:Account": {
        "accountId": re.compile(r"[a-z][a-z0-9-]{4,28}[a-z0-9]"),
        "displayName": re.compile(r"(?s).{0,100}"),
    },
    "gcp:storage/bucket:Bucket": {
        "name": re.compile(r"(?!goog)(?!.*(?:google|g00gle))[a-z0-9][a-z0-9_-]{1,61}[a-z0-9]"),
        "softDeletePolicy.retentionDurationSeconds": range(7 * 86_400, 90 * 86_400 + 1),
    },
}
"""Type → path → what is allowed: a form, a range (of seconds, if the value is text that ends in `s`), or a range of addresses."""


def find_refused(type_: str, inputs: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the path and the reason of each value that Google would refuse. Values that are not plain are not judged."""
    _, module, name = re.split("[:/]", type_, maxsplit=2)
    if api := _APIS.get(module):
        schemas = read_document(api)["schemas"]
        yield from _described(inputs, schemas.get(name.rpartition(":")[2], {}), schemas, "")
    limits = dict(LIMITS.get(type_, {}))
    if "IAMMember" in type_ or "IamMember" in type_:
        limits |= {"role": _ROLE, "member": _MEMBER}
    for path, allowed in limits.items():
        for where, value in _at(inputs, path):
            if not _is_allowed(value, allowed):
                yield where, f"is `{value}`, and Google takes {allowed}"
    labels = inputs.get("labels")
    for key, value in labels.items() if isinstance(labels, Mapping) and module != "monitoring" else ():
        if not re.fullmatch(r"[a-z][a-z0-9_-]{0,62}", key) or (
            isinstance(value, str) and not re.fullmatch(r"[a-z0-9_-]{0,63}", value)
        ):
            yield "labels", f"has `{key}: {value}`, which is no label of Google's"


def _described(
    value: Any, schema: Mapping[str, Any], schemas: Mapping[str, Any], path: str
) -> Iterator[tuple[str, str]]:
    """Judge a value by the enumerations and patterns of a schema; names that only the provider has are passed over."""
    schema = schemas[schema["$ref"]] if "$ref" in schema else schema
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _described(item, schema.get("properties", {}).get(key, {}), schemas, f"{path}.{key}".lstrip("."))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _described(item, schema.get("items", {}), schemas, f"{path}[{index}]")
    elif isinstance(value, str):
        if value not in schema.get("enum", (value,)):
            yield path, f"is `{value}`, and Google takes {', '.join(schema['enum'])}"
        # A link stands where Google's own answer has a name.
        if "/" not in value and not re.fullmatch(schema.get("pattern", ".*"), value, re.DOTALL):
            yield path, f"is `{value}`, and Google takes {schema['pattern']}"


def _at(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    head, _, rest = path.partition(".")
    found = value.get(head.removesuffix("[]")) if isinstance(value, Mapping) else None
    if head.endswith("[]"):
        items = found if isinstance(found, list) else []
        yield from ((f"{head[:-2]}[{index}]", item) for index, item in enumerate(items))
    elif rest:
        yield from ((f"{head}.{where}", item) for where, item in _at(found, rest))
    else:
        yield head, found


def _is_allowed(value: Any, allowed: re.Pattern[str] | range | str) -> bool:
    if isinstance(allowed, range):
        if isinstance(value, str):
            return re.fullmatch(r"[0-9]+s", value) is not None and int(value[:-1]) in allowed
        # Zero switches off what has a least time.
        return not isinstance(value, int) or value == 0 or value in allowed
    if not isinstance(value, str):
        return True
    if isinstance(allowed, re.Pattern):
        return allowed.fullmatch(value) is not None
    try:
        return bool(ipaddress.ip_network(value))
    except ValueError:
        return False
