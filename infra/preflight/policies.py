"""Whether the organisation's policies would let a stack be made and work."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from infra.preflight.findings import Finding, fail, guard_all, ok, warn
from infra.settings.model import Settings
from runtime.stack.google_api import GoogleApi

GITHUB_TOKENS: Final = "https://token.actions.githubusercontent.com"
"""Issuer of the identities of hosted pipelines."""

_EXCEPTION: Final = "ask an administrator of the organisation for an exception for this project"


def look_at_policies(settings: Settings, api: GoogleApi) -> Iterator[Finding]:
    rules: list[tuple[str, Callable[[str, Mapping[str, Any], Settings], Iterator[Finding]]]] = [
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

        def look(constraint: str = constraint, check: str = check, judge: Any = judge) -> Iterator[Finding]:
            path = f"v2/projects/{settings.project}/policies/{constraint}:getEffectivePolicy"
            spec = api.get("orgpolicy", path).get("spec", {})
            yield from judge(check, spec, settings)

        yield from guard_all(check, look)


@dataclass(frozen=True, slots=True)
class _Allowed:
    """Values that a list policy allows, without rules that hold under a condition only."""

    all: bool
    none: bool
    allowed: tuple[str, ...]
    denied: tuple[str, ...]

    @property
    def free(self) -> bool:
        return not self.none and not self.denied and (self.all or not self.allowed)


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


def _locations(check: str, spec: Mapping[str, Any], settings: Settings) -> Iterator[Finding]:
    policy = _read_list(spec)
    wanted = sorted(set(_locations_of(settings)))
    if policy.free:
        yield ok(check, "resources may lie anywhere")
        return
    refused = [place for place in wanted if policy.none or not _place_allowed(place, policy)]
    if refused:
        allowed = ", ".join(policy.allowed) or "nothing"
        yield fail(check, f"nothing may lie in {', '.join(refused)}; allowed: {allowed}", _EXCEPTION)
    else:
        yield ok(check, f"{', '.join(wanted)} is allowed")


def _locations_of(settings: Settings) -> Iterator[str]:
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


def _place_allowed(place: str, policy: _Allowed) -> bool:
    names = _names_of_place(place)
    if any(value in names for value in policy.denied):
        return False
    return policy.all or not policy.allowed or any(value in names for value in policy.allowed)


def _names_of_place(place: str) -> set[str]:
    """The values that stand for a place: itself, and the groups that Google puts it in.

    https://cloud.google.com/resource-manager/docs/organization-policy/defining-locations
    """
    continent = place.partition("-")[0]
    groups = {place, continent, {"europe": "eu"}.get(continent, continent)}
    return {place} | {f"in:{group}-locations" for group in groups}


def _domains(check: str, spec: Mapping[str, Any], settings: Settings) -> Iterator[Finding]:
    policy = _read_list(spec)
    people = (*settings.access.operators, *settings.access.researchers)
    if policy.free:
        yield ok(check, "members of any domain may be granted roles")
    elif policy.none:
        yield fail(check, "no member may be granted a role", _EXCEPTION)
    elif not people:
        yield ok(check, "restricted, and the stack grants nothing to people")
    else:
        domains = sorted({member.rpartition("@")[2].rpartition(":")[2] for member in people})
        text = f"roles only for {', '.join(policy.allowed)}; the stack grants some to members of {', '.join(domains)}"
        yield warn(check, text, f"see that these are the customers behind the domains, or {_EXCEPTION}")


def _federation(check: str, spec: Mapping[str, Any], settings: Settings) -> Iterator[Finding]:
    policy = _read_list(spec)
    if policy.free:
        yield ok(check, "identities of any provider may come in")
    elif policy.none or GITHUB_TOKENS in policy.denied or (policy.allowed and GITHUB_TOKENS not in policy.allowed):
        yield fail(check, f"the pipeline's identities, of {GITHUB_TOKENS}, may not come in", _EXCEPTION)
    else:
        yield ok(check, "the pipeline's identities may come in")


def _no_accounts(check: str, spec: Mapping[str, Any], settings: Settings) -> Iterator[Finding]:
    if _enforced(spec):
        yield fail(check, "no service account may be made, and the stack makes one for each role", _EXCEPTION)
    else:
        yield ok(check, "service accounts may be made")


def _os_login(check: str, spec: Mapping[str, Any], settings: Settings) -> Iterator[Finding]:
    if _enforced(spec):
        text = "machines take no keys of their own, and a head reaches its TPU nodes with one"
        yield fail(check, text, _EXCEPTION)
    else:
        yield ok(check, "not required")


def _images(check: str, spec: Mapping[str, Any], settings: Settings) -> Iterator[Finding]:
    policy = _read_list(spec)
    projects = sorted({_image_project(head.boot_image, settings.project or "") for head in settings.heads.values()})
    if policy.free:
        yield ok(check, "images of any project may be used")
        return
    refused = [
        each
        for each in projects
        if policy.none or each in policy.denied or (policy.allowed and not policy.all and each not in policy.allowed)
    ]
    if refused:
        yield fail(check, f"boot images of {', '.join(refused)} may not be used", f"set `boot_image`, or {_EXCEPTION}")
    else:
        yield ok(check, f"images of {', '.join(projects)} may be used")


def _image_project(image: str, project: str) -> str:
    """`projects/debian-cloud` of `projects/debian-cloud/global/images/…` or of a link to it."""
    found = re.search(r"projects/[^/]+", image)
    return found[0] if found else f"projects/{project}"


def _addresses(check: str, spec: Mapping[str, Any], settings: Settings) -> Iterator[Finding]:
    free = _read_list(spec).free
    yield ok(check, "allowed, and not used" if free else "restricted, and no machine of the stack has one")
