"""Whether the organisation's policies would let a stack be made and work."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

from infra.preflight.findings import PreflightFinding, fail, guard_all, ok, warn
from infra.settings.model import StackSettings
from runtime.stack.google_api import GoogleApi

GITHUB_TOKENS: Final = "https://token.actions.githubusercontent.com"
"""Issuer of the identities of hosted pipelines."""

Judge: TypeAlias = Callable[[str, Mapping[str, Any], StackSettings], PreflightFinding]
"""(check, the policy's spec, settings) → finding."""

_EXCEPTION: Final = "ask an administrator of the organisation for an exception for this project"


def check_policies(settings: StackSettings, api: GoogleApi) -> Iterator[PreflightFinding]:
    rules: list[tuple[str, Judge]] = [
        ("gcp.resourceLocations", _locations),
        ("iam.allowedPolicyMemberDomains", _domains),
        ("iam.disableServiceAccountCreation", _no_accounts),
    ]
    if settings.ci is not None:
        rules.append(("iam.workloadIdentityPoolProviders", _federation))
    if settings.heads:
        rules += [
            ("compute.requireOsLogin", _os_login),
            ("compute.trustedImageProjects", _images),
            ("compute.vmExternalIpAccess", _addresses),
        ]
    for constraint, judge in rules:
        check = f"policy {constraint}"
        yield from guard_all(check, partial(_look, check, constraint, judge, settings, api))


def _look(
    check: str, constraint: str, judge: Judge, settings: StackSettings, api: GoogleApi
) -> Iterator[PreflightFinding]:
    path = f"v2/projects/{settings.project}/policies/{constraint}:getEffectivePolicy"
    yield judge(check, api.get("orgpolicy", path).get("spec", {}), settings)


@dataclass(frozen=True, slots=True)
class _Allowed:
    """The values that a list policy allows, without conditional rules."""

    all: bool
    none: bool
    allowed: tuple[str, ...]
    denied: tuple[str, ...]

    @property
    def free(self) -> bool:
        return not self.none and not self.denied and (self.all or not self.allowed)

    def allows(self, *names: str) -> bool:
        """Whether the policy allows a value with these names."""
        if self.none or not set(names).isdisjoint(self.denied):
            return False
        return self.all or not self.allowed or not set(names).isdisjoint(self.allowed)


def _read_list(spec: Mapping[str, Any]) -> _Allowed:
    rules = [rule for rule in spec.get("rules", ()) if "condition" not in rule]
    values = [rule.get("values", {}) for rule in rules]
    return _Allowed(
        any(rule.get("allowAll") for rule in rules),
        any(rule.get("denyAll") for rule in rules),
        tuple(value for each in values for value in each.get("allowedValues", ())),
        tuple(value for each in values for value in each.get("deniedValues", ())),
    )


def _enforced(spec: Mapping[str, Any]) -> bool:
    return any(rule.get("enforce") for rule in spec.get("rules", ()) if "condition" not in rule)


def _locations(check: str, spec: Mapping[str, Any], settings: StackSettings) -> PreflightFinding:
    policy = _read_list(spec)
    wanted = sorted(set(_locations_of(settings)))
    if policy.free:
        return ok(check, "resources may lie anywhere")
    refused = [place for place in wanted if not policy.allows(*_names_of_place(place))]
    if refused:
        allowed = ", ".join(policy.allowed) or "nothing"
        return fail(check, f"nothing may lie in {', '.join(refused)}; allowed: {allowed}", _EXCEPTION)
    return ok(check, f"{', '.join(wanted)} is allowed")


def _locations_of(settings: StackSettings) -> Iterator[str]:
    if settings.region:
        yield settings.region
    if settings.records is not None and settings.records.location:
        yield settings.records.location.lower()
    for registry in settings.registries.values():
        yield from (region for region in registry.regions if region not in registry.existing)
    for secret in settings.secrets.values():
        if secret.existing is None:
            # A secret without regions lies in the location `global`.
            yield from secret.regions or ("global",)


def _names_of_place(place: str) -> set[str]:
    """Return the values that stand for a place: its name, and Google's groups with it.

    https://cloud.google.com/resource-manager/docs/organization-policy/defining-locations
    """
    continent = place.partition("-")[0]
    groups = {place, continent, {"europe": "eu"}.get(continent, continent)}
    return {place} | {f"in:{group}-locations" for group in groups}


def _domains(check: str, spec: Mapping[str, Any], settings: StackSettings) -> PreflightFinding:
    policy = _read_list(spec)
    people = (*settings.access.operators, *settings.access.researchers)
    if policy.free:
        return ok(check, "members of any domain may be granted roles")
    if policy.none:
        return fail(check, "no member may be granted a role", _EXCEPTION)
    if not people:
        return ok(check, "restricted, and the stack grants nothing to people")
    domains = sorted({member.rpartition("@")[2].rpartition(":")[2] for member in people})
    text = f"roles only for {', '.join(policy.allowed)}; the stack grants some to members of {', '.join(domains)}"
    return warn(check, text, f"see that these are the customers behind the domains, or {_EXCEPTION}")


def _federation(check: str, spec: Mapping[str, Any], settings: StackSettings) -> PreflightFinding:
    policy = _read_list(spec)
    if policy.free:
        return ok(check, "identities of any provider may come in")
    if policy.none or GITHUB_TOKENS in policy.denied or (policy.allowed and GITHUB_TOKENS not in policy.allowed):
        return fail(check, f"the pipeline's identities, of {GITHUB_TOKENS}, may not come in", _EXCEPTION)
    return ok(check, "the pipeline's identities may come in")


def _no_accounts(check: str, spec: Mapping[str, Any], settings: StackSettings) -> PreflightFinding:
    if _enforced(spec):
        return fail(check, "no service account may be made, and the stack makes one for each role", _EXCEPTION)
    return ok(check, "service accounts may be made")


def _os_login(check: str, spec: Mapping[str, Any], settings: StackSettings) -> PreflightFinding:
    if _enforced(spec):
        return fail(check, "machines take no keys of their own, and a head reaches its TPU nodes with one", _EXCEPTION)
    return ok(check, "not required")


def _images(check: str, spec: Mapping[str, Any], settings: StackSettings) -> PreflightFinding:
    policy = _read_list(spec)
    projects = sorted({_image_project(head.boot_image, settings.project or "") for head in settings.heads.values()})
    if policy.free:
        return ok(check, "images of any project may be used")
    refused = [each for each in projects if not policy.allows(each)]
    if refused:
        return fail(check, f"boot images of {', '.join(refused)} may not be used", f"set `boot_image`, or {_EXCEPTION}")
    return ok(check, f"images of {', '.join(projects)} may be used")


def _image_project(image: str, project: str) -> str:
    """Return `projects/debian-cloud` of `projects/debian-cloud/global/images/…` or of a link to it."""
    found = re.search(r"projects/[^/]+", image)
    return found[0] if found else f"projects/{project}"


def _addresses(check: str, spec: Mapping[str, Any], settings: StackSettings) -> PreflightFinding:
    free = _read_list(spec).free
    return ok(check, "allowed, and not used" if free else "restricted, and no machine of the stack has one")
