"""All rules by name, and their application to the resources that a program registered.

A rule yields a finding for each resource that breaks it; the policy pack and `python -m infra check` both apply the rules.
A rule judges the inputs that the program passed, never the values that a provider adds to a resource (an address, a
default, a member). A value that only the cloud knows breaks no rule: the engine applies the rules again when it is known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from infra.check.recording import Registration
from infra.policy import grants, resources
from infra.policy.base import UNBOUNDED, Bounds, Graph, Rule
from infra.settings.model import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    rule: str
    urn: str
    message: str
    """The problem, with the value and the allowed ones."""
    hint: str | None = None


RULES: Final[Mapping[str, Rule]] = {
    "no-keys": grants.find_keys,
    "no-basic-roles": grants.find_basic_roles,
    "single-grants": grants.find_wholesale_grants,
    "no-public-members": grants.find_public_members,
    "project-grants": grants.find_project_grants,
    "narrow-custom-roles": grants.find_wide_custom_roles,
    "dead-letters": resources.find_missing_dead_letters,
    "dead-letters-kept": resources.find_lost_dead_letters,
    "dead-letters-arrive": resources.find_powerless_agents,
    "no-expiry": resources.find_expiring_subscriptions,
    "retention": resources.find_short_retention,
    "closed-instances": resources.find_open_instances,
    "closed-firewalls": resources.find_open_firewalls,
    "no-secret-values": resources.find_secret_values,
    "buckets": resources.find_open_buckets,
    "labels": resources.find_unlabelled,
    "protected": resources.find_unprotected,
    "regions": resources.find_strays,
    "claims": resources.find_wild_claims,
    "closed-namespaces": resources.find_open_namespaces,
    "explicit-provider": resources.find_default_providers,
    "parented": resources.find_orphans,
    "api-first": resources.find_hasty,
    "agent-first": grants.find_hasty_agent_grants,
}
"""Name → rule; the engine prints the name."""


def apply_rules(registrations: Sequence[Registration], bounds: Bounds = UNBOUNDED) -> list[Violation]:
    """Return every violation of every rule, in the order of the resources."""
    order = {each.urn: index for index, each in enumerate(registrations)}
    found = [violation for name in RULES for violation in apply_rule(name, registrations, bounds)]
    return sorted(found, key=lambda violation: order[violation.urn])


def apply_rule(name: str, registrations: Sequence[Registration], bounds: Bounds = UNBOUNDED) -> list[Violation]:
    return [
        Violation(rule=name, urn=resource.urn, message=message, hint=hint)
        for resource, message, hint in RULES[name](Graph(registrations), bounds)
    ]


def bounds_of(settings: Settings) -> Bounds:
    """The bounds that a stack's settings set."""
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
