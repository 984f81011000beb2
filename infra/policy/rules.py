"""All rules by name, and their application to the resources that a program registered.

A rule yields a finding for each resource that breaks it; the policy pack and `python -m infra check` both apply the rules.
A rule judges the inputs that the program passed, never the values that a provider adds to a resource (an address, a
default, a member). A value that only the cloud knows breaks no rule about settings: the engine applies the rules again
when it is known. A role, member, permission or condition has to be known, or made from a resource of the stack: the second
look comes when the grant is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from infra.check.recording import Registration
from infra.policy import encryption, grants, resources
from infra.policy.base import UNBOUNDED, Graph, Rule, StackBounds
from infra.settings.model import StackSettings
from infra.settings.stack_rules import find_image_projects


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    rule: str
    urn: str
    message: str
    """The problem, with the value and the allowed ones."""
    hint: str | None = None


RULES: Final[Mapping[str, Rule]] = {
    "allowed-types": grants.find_foreign_types,
    "allowed-roles": grants.find_foreign_roles,
    "allowed-members": grants.find_foreign_members,
    "project-grants": grants.find_project_grants,
    "narrow-custom-roles": grants.find_wide_custom_roles,
    "narrow-cluster-roles": grants.find_wide_cluster_roles,
    "pinned-federation": grants.find_loose_federation,
    "pipeline-apart": grants.find_stray_pipelines,
    "closed-contract": grants.find_open_contract,
    "tasks-stay": resources.find_leaving_tasks,
    "dead-letters": resources.find_missing_dead_letters,
    "dead-letters-kept": resources.find_lost_dead_letters,
    "dead-letters-arrive": resources.find_powerless_agents,
    "no-expiry": resources.find_expiring_subscriptions,
    "retention": resources.find_short_retention,
    "closed-instances": resources.find_open_instances,
    "closed-addresses": resources.find_open_addresses,
    "snapshots-only": resources.find_other_schedules,
    "closed-firewalls": resources.find_open_firewalls,
    "no-secret-values": resources.find_secret_values,
    "stack-key": encryption.find_foreign_keys,
    "encrypted": encryption.find_unencrypted,
    "buckets": resources.find_open_buckets,
    "labels": resources.find_unlabelled,
    "protected": resources.find_unprotected,
    "regions": resources.find_strays,
    "claims": resources.find_wild_claims,
    "closed-namespaces": resources.find_open_namespaces,
    "api-first": resources.find_hasty,
    "agent-first": grants.find_hasty_agent_grants,
}
"""Name → rule; the engine prints the name."""


def apply_rules(registrations: Sequence[Registration], bounds: StackBounds = UNBOUNDED) -> list[Violation]:
    """Return every violation of every rule, in the order of the resources."""
    order = {each.urn: index for index, each in enumerate(registrations)}
    found = [violation for name in RULES for violation in apply_rule(name, registrations, bounds)]
    return sorted(found, key=lambda violation: order[violation.urn])


def apply_rule(name: str, registrations: Sequence[Registration], bounds: StackBounds = UNBOUNDED) -> list[Violation]:
    return [
        Violation(rule=name, urn=resource.urn, message=message, hint=hint)
        for resource, message, hint in RULES[name](Graph(registrations), bounds)
    ]


def bounds_of(settings: StackSettings) -> StackBounds:
    """The bounds that a stack's settings set."""
    regions = {settings.region, *(region for each in settings.registries.values() for region in each.regions)}
    regions |= {region for each in settings.secrets.values() for region in each.regions}
    regions |= {region for each in settings.registries.values() for region in each.existing}
    regions |= {location for location in settings.bucket_locations.values() if location}
    namespaces = [each for cluster in settings.kubernetes.values() for each in cluster.namespaces.values()]
    claims = [claim for namespace in namespaces for claim in namespace.claims.values()]
    lent = [path for each in settings.registries.values() for path in each.existing.values()]
    lent += [each.existing for each in settings.secrets.values() if each.existing]
    repositories = settings.ci.repositories.values() if settings.ci else ()
    access = settings.access
    users = (each for bucket in settings.buckets.values() for each in (*bucket.readers, *bucket.writers))
    return StackBounds(
        protect=settings.protect,
        regions=frozenset(region.lower() for region in regions if region),
        storage_classes=frozenset(claim.storage_class for claim in claims if claim.storage_class),
        project=settings.project,
        lenders=frozenset(path.split("/")[1] for path in lent),
        members=frozenset(
            (*access.operators, *access.researchers, *access.workers, *users, *settings.pod_members.values())
        ),
        deployer=f"serviceAccount:{settings.deployer}" if settings.deployer else None,
        cidrs=frozenset([settings.network.cidr, *settings.network.ssh_cidrs] if settings.network else []),
        subjects=frozenset(launcher for namespace in namespaces for launcher in namespace.launchers),
        repositories=frozenset((each.repository_id, each.owner_id) for each in repositories),
        buckets=frozenset(name for path, name in settings.bucket_names.items() if path != "records"),
        issuers=frozenset(each.issuer for each in settings.federation.values()),
        keys=frozenset(key for key in (settings.kms_key, settings.ci and settings.ci.state_key) if key),
        image_projects=find_image_projects(settings),
    )
