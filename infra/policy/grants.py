"""The rules about keys, grants and roles."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

from infra.check.recording import Unknown
from infra.policy.base import (
    AGENT,
    CLUSTER_GRANTS,
    CUSTOM_ROLE,
    PROJECT_GRANT,
    SERVICE_IDENTITY,
    Bounds,
    Finding,
    Graph,
    get,
    items_of,
)

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
"""(Component, role) → reason to grant it on the project and not on one resource. Other roles are violations."""

_DEPLOYERS: Final = re.compile(
    r"^resourcemanager\..*\.setIamPolicy$|^iam\.serviceAccountKeys\.|^iam\.serviceAccounts\.(actAs|getAccessToken|sign)"
)
"""Permissions that no custom role may contain, not even the deploying pipeline's."""

_WIDE: Final = re.compile(rf"\.setIamPolicy$|{_DEPLOYERS.pattern}")


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


def find_basic_roles(graph: Graph, bounds: Bounds) -> Iterator[Finding]:
    """Owner, editor and viewer are nearly everything, and grow with each new API."""
    for each in graph.made("gcp"):
        role = each.inputs.get("role")
        if role in ("roles/owner", "roles/editor", "roles/viewer"):
            yield each, f"grants `{role}`, which is nearly everything", "grant the narrow roles of what is needed"


def find_wholesale_grants(graph: Graph, bounds: Bounds) -> Iterator[Finding]:
    """A binding or policy takes away every grant that it does not list, those of other stacks and of people too."""
    for each in graph.made("gcp"):
        if re.search(r"iam(binding|policy)$", each.type, re.IGNORECASE):
            yield (
                each,
                f"is a `{each.type.rpartition(':')[2]}`, which removes the grants of others",
                "use the IAM member",
            )


def find_public_members(graph: Graph, bounds: Bounds) -> Iterator[Finding]:
    """Nothing is open to everybody."""
    for each in graph.made("gcp"):
        members = [each.inputs.get("member"), *items_of(each.inputs.get("members"))]
        for member in members:
            if member in ("allUsers", "allAuthenticatedUsers"):
                yield each, f"grants to `{member}`, which is everybody", "grant to a group"
    for each in graph.of_type(*CLUSTER_GRANTS):
        for subject in items_of(each.inputs.get("subjects")):
            name = get(subject, "name")
            if name in ("system:authenticated", "system:unauthenticated", "system:anonymous", "system:serviceaccounts"):
                yield each, f"grants to `{name}`, which is everybody", "grant to a group"


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


def find_wide_custom_roles(graph: Graph, bounds: Bounds) -> Iterator[Finding]:
    """A custom role that may grant, make keys or act as anybody is an owner by another name.

    The pipeline that deploys grants on what it makes, and on nothing else: not on the project, and not as anybody.
    """
    for each in graph.of_type(CUSTOM_ROLE):
        parent = graph.parent(each)
        deploys = parent is not None and parent.type == PIPELINE
        wide = [
            permission
            for permission in items_of(each.inputs.get("permissions"))
            if isinstance(permission, str) and (_DEPLOYERS if deploys else _WIDE).search(permission)
        ]
        if wide:
            yield each, f"contains {', '.join(f'`{one}`' for one in wide)}", "grant that on the one resource it is for"


def find_hasty_agent_grants(graph: Graph, bounds: Bounds) -> Iterator[Finding]:
    """A service's agent comes into being on first use, and nobody can be granted anything before."""
    for each in graph.made("gcp"):
        member = each.inputs.get("member")
        if not each.type.lower().endswith("iammember") or not isinstance(member, str) or not AGENT.match(member):
            continue
        if not any(other.type == SERVICE_IDENTITY for other in graph.waited_for(each)):
            yield each, f"grants to `{member}`, and does not wait until that is made", "depend on its ServiceIdentity"
