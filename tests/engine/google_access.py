"""What the simulated Google lets an account do: by the roles that were granted to it, with their conditions.

`CALLER_VARIABLE` names the account that a command runs as; without it, a person who owns the project does. The roles'
permissions are from https://cloud.google.com/iam/docs/roles-permissions and from nothing in the project.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, Final

import grpc

from tests.engine.google_store import World
from tests.engine.plugin import Refused, Values, value_at

CALLER_VARIABLE: Final = "MADE_UP_CALLER"

ROLES: Final[Mapping[str, tuple[str, ...]]] = {
    "roles/billing.costsManager": ("billing.budgets.*",),
    "roles/compute.instanceAdmin.v1": (
        *("compute.instances.*", "compute.disks.*", "compute.resourcePolicies.*", "compute.subnetworks.use"),
        *("compute.addresses.*", "compute.snapshots.*"),
    ),
    "roles/compute.networkAdmin": (
        *("compute.networks.*", "compute.subnetworks.*", "compute.routers.*", "compute.addresses.*"),
        *("compute.firewalls.get", "compute.firewalls.list", "compute.instances.get"),
    ),
    "roles/compute.securityAdmin": ("compute.firewalls.*", "compute.networks.updatePolicy", "compute.networks.get"),
    "roles/compute.viewer": ("compute.*.get", "compute.*.list", "compute.*.getIamPolicy"),
    "roles/iam.serviceAccountAdmin": (
        *("iam.serviceAccounts.create", "iam.serviceAccounts.delete", "iam.serviceAccounts.get"),
        *("iam.serviceAccounts.update", "iam.serviceAccounts.getIamPolicy", "iam.serviceAccounts.setIamPolicy"),
    ),
    "roles/iam.serviceAccountUser": ("iam.serviceAccounts.actAs", "iam.serviceAccounts.get"),
    "roles/iam.serviceAccountViewer": ("iam.serviceAccounts.get", "iam.serviceAccounts.getIamPolicy"),
    "roles/monitoring.alertPolicyEditor": ("monitoring.alertPolicies.*",),
    "roles/monitoring.notificationChannelEditor": ("monitoring.notificationChannels.*",),
    "roles/monitoring.viewer": ("monitoring.*.get",),
    "roles/resourcemanager.projectIamAdmin": (
        *("resourcemanager.projects.get", "resourcemanager.projects.getIamPolicy"),
        "resourcemanager.projects.setIamPolicy",
    ),
    "roles/serviceusage.serviceUsageAdmin": ("serviceusage.*",),
    "roles/serviceusage.serviceUsageViewer": ("serviceusage.services.get",),
}
"""Predefined role → patterns of its permissions, as far as this Google asks for them."""

RESOURCES: Final[Mapping[str, str]] = {
    "artifactregistry/repository": "artifactregistry.repositories",
    "billing/account": "billing.accounts",
    "billing/budget": "billing.budgets",
    "compute/address": "compute.addresses",
    "compute/disk": "compute.disks",
    "compute/firewall": "compute.firewalls",
    "compute/instance": "compute.instances",
    "compute/network": "compute.networks",
    "compute/resourcePolicy": "compute.resourcePolicies",
    "compute/router": "compute.routers",
    "compute/routerNat": "compute.routers",
    "compute/subnetwork": "compute.subnetworks",
    "iam/workloadIdentityPool": "iam.workloadIdentityPools",
    "iam/workloadIdentityPoolProvider": "iam.workloadIdentityPoolProviders",
    "kms/cryptoKey": "cloudkms.cryptoKeys",
    "monitoring/alertPolicy": "monitoring.alertPolicies",
    "monitoring/notificationChannel": "monitoring.notificationChannels",
    "projects/iAMCustomRole": "iam.roles",
    "projects/service": "serviceusage.services",
    "projects/serviceIdentity": "serviceusage.services",
    "pubsub/subscription": "pubsub.subscriptions",
    "pubsub/topic": "pubsub.topics",
    "secretmanager/secret": "secretmanager.secrets",
    "serviceaccount/account": "iam.serviceAccounts",
    "storage/bucket": "storage.buckets",
}
"""Type, without package and class → the resource in the names of permissions."""

# A service is enabled, and a router is updated for its NAT.
_ACTIONS: Final = {
    ("serviceusage.services", "create"): "enable",
    ("serviceusage.services", "update"): "enable",
    ("compute.addresses", "create"): "createInternal",
    ("compute.addresses", "update"): "setLabels",
}
_ALSO: Final[Mapping[tuple[str, str], tuple[str, ...]]] = {
    ("compute.instances", "create"): ("iam.serviceAccounts.actAs", "compute.subnetworks.use", "compute.disks.create"),
    ("compute.firewalls", "create"): ("compute.networks.updatePolicy",),
    ("pubsub.subscriptions", "create"): ("pubsub.topics.attachSubscription",),
}
_ATTACHMENT: Final = "compute/diskResourcePolicyAttachment"
_ONLY: Final = re.compile(
    r"api\.getAttribute\('iam\.googleapis\.com/modifiedGrantsByRole', \[\]\)\.hasOnly\(\[(?P<roles>[^\]]*)\]\)"
)


def refuse_stranger(world: World, caller: str, operation: str, type_: str, inputs: Values) -> None:
    """Refuse an operation unless roles that were granted to `caller` have its permissions; an empty caller owns all."""
    if not caller:
        return
    project = str(inputs.get("project") or "")
    for permission in _permissions(operation, type_):
        held = any(
            _allows(world, role, permission) and _is_met(condition, permission, inputs)
            for role, condition in _granted(world, caller, project, inputs)
        )
        if not held:
            raise Refused(
                f"Error 403: Permission '{permission}' denied on resource (or it may not exist). Caller: {caller}",
                grpc.StatusCode.PERMISSION_DENIED,
            )


def _permissions(operation: str, type_: str) -> Iterator[str]:
    kind = type_.split(":")[1]
    if re.search(r"(?i)iammember$", kind):
        on = re.sub(r"(?i)iammember$", "", kind).rstrip("/")
        names = {"projects": "resourcemanager.projects", "serviceaccount": "iam.serviceAccounts"}
        resource = names.get(on) or RESOURCES[on]
        yield f"{resource}.{'getIamPolicy' if operation == 'read' else 'setIamPolicy'}"
        return
    if kind == _ATTACHMENT:
        yield {"create": "compute.disks.addResourcePolicies", "delete": "compute.disks.removeResourcePolicies"}.get(
            operation, "compute.disks.get"
        )
        return
    resource = RESOURCES[kind]
    if kind == "compute/routerNat" and operation in ("create", "delete"):
        operation = "update"
    action = "get" if operation == "read" else _ACTIONS.get((resource, operation), operation)
    yield f"{resource}.{action}"
    yield from _ALSO.get((resource, operation), ())


def _granted(world: World, caller: str, project: str, inputs: Values) -> Iterator[tuple[str, str | None]]:
    """Yield role and condition of the grants to `caller` in the project, and on the billing account of a budget."""
    for each in world.resources.values():
        made = each["inputs"]
        if made.get("member") != f"serviceAccount:{caller}":
            continue
        in_project = each["type"] == "gcp:projects/iAMMember:IAMMember" and made.get("project") == project
        pays = "billingAccountId" in made and made["billingAccountId"] == inputs.get("billingAccount")
        if in_project or pays:
            yield made["role"], value_at(made, "condition.expression")


def _allows(world: World, role: str, permission: str) -> bool:
    custom: Mapping[str, Any] = world.resources.get(role, {}).get("inputs", {})
    allowed = custom.get("permissions", ()) if role.startswith("projects/") else ROLES.get(role, ())
    return any(fnmatchcase(permission, pattern) for pattern in allowed)


def _is_met(condition: str | None, permission: str, inputs: Values) -> bool:
    """Whether a condition on the roles that a change of the project's grants is about lets this change through."""
    if condition is None or permission != "resourcemanager.projects.setIamPolicy":
        return True
    found = _ONLY.fullmatch(condition)
    return found is not None and str(inputs["role"]) in re.findall(r"'([^']+)'", found["roles"])
