"""Whether the organisation's policies would let a stack be made and work."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeAlias

from infra.naming import Names
from infra.preflight.findings import Level, PreflightFinding, guard_all, ok
from infra.settings.model import StackSettings
from runtime.stack.google_api import GoogleApi

GITHUB_TOKENS: Final = "https://token.actions.githubusercontent.com"
"""Issuer of the identities of hosted pipelines."""

_EXCEPTION: Final = "ask an administrator of the organisation for an exception for this project"
_SEE: Final = f"see that it is so, or {_EXCEPTION}"

Verdict: TypeAlias = tuple[Level, str] | None
"""What is wrong; None if the policy is not in the way."""


@dataclass(frozen=True, slots=True)
class _Policy:
    """Rules of a policy, as if they had no condition."""

    rules: Sequence[Mapping[str, Any]]

    @property
    def enforced(self) -> bool:
        return any(rule.get("enforce") for rule in self.rules)

    @property
    def none(self) -> bool:
        return any(rule.get("denyAll") for rule in self.rules)

    def values(self, kind: str, place: str = "values") -> list[str]:
        """List the `allowedValues`, the `deniedValues`, or another list in the rules."""
        listed = (value for rule in self.rules for value in rule.get(place, {}).get(kind, ()))
        return [str(value).removeprefix("is:") for value in listed]

    def allows(self, *names: str) -> bool:
        """Whether the policy allows a value with these names."""
        allowed, denied = self.values("allowedValues"), self.values("deniedValues")
        if self.none or not set(names).isdisjoint(denied):
            return False
        return any(rule.get("allowAll") for rule in self.rules) or not allowed or not set(names).isdisjoint(allowed)

    def shown(self) -> str:
        return ", ".join(self.values("allowedValues")) or "nothing"


Judge: TypeAlias = Callable[[_Policy, StackSettings], Verdict]


def check_policies(settings: StackSettings, api: GoogleApi) -> Iterator[PreflightFinding]:
    for constraint, (matters, judge) in _CONSTRAINTS.items():
        if matters(settings):
            check = f"policy {constraint}"
            yield from guard_all(check, partial(_look, check, constraint, judge, settings, api))


def _look(
    check: str, constraint: str, judge: Judge, settings: StackSettings, api: GoogleApi
) -> Iterator[PreflightFinding]:
    path = f"v2/projects/{settings.project}/policies/{constraint}:getEffectivePolicy"
    rules = (api.find("orgpolicy", path) or {}).get("spec", {}).get("rules", ())
    verdict = judge(_Policy([rule for rule in rules if "condition" not in rule]), settings)
    # A rule with a condition counts instead of the others if the project has the tag, which nothing here can tell.
    conditions = [
        (rule["condition"].get("expression", "a condition"), judge(_Policy([rule]), settings))
        for rule in rules
        if "condition" in rule
    ]
    differ = [(expression, other) for expression, other in conditions if (other is None) is not (verdict is None)]
    if differ:
        _, text = next(each for each in (verdict, *(other for _, other in differ)) if each is not None)
        verdict = Level.WARN, f"it depends on `{'`, `'.join(expression for expression, _ in differ)}` whether {text}"
    if verdict is None:
        yield ok(check, "not in the way")
        return
    level, text = verdict
    yield PreflightFinding(check=check, level=level, message=text, fix=_EXCEPTION if level is Level.FAIL else _SEE)


def _refuse(what: str, refused: Iterable[str], policy: _Policy) -> Verdict:
    if names := ", ".join(refused):
        return Level.FAIL, f"{what} {names}; allowed: {policy.shown()}"
    return None


def _locations(policy: _Policy, settings: StackSettings) -> Verdict:
    wanted = sorted(set(_locations_of(settings)))
    refused = [place for place in wanted if not policy.allows(*_names_of_place(place))]
    return _refuse("nothing may lie in", refused, policy)


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


def _services(policy: _Policy, settings: StackSettings) -> Verdict:
    from infra.program import find_services

    names = (f"{service}.googleapis.com" for service in find_services(settings) if service not in _NEVER_RESTRICTED)
    return _refuse("the project may not use", (name for name in names if not policy.allows(name)), policy)


_NEVER_RESTRICTED: Final = frozenset({"cloudresourcemanager", "serviceusage", "iam", "iamcredentials", "sts"})
"""Services that the policy does not cover.
https://cloud.google.com/resource-manager/docs/organization-policy/restricting-resources-supported-services"""


def _own_keys(policy: _Policy, settings: StackSettings) -> Verdict:
    services = replace(settings, kms_key="wanted").encrypted_services
    refused = [each for each in services if not policy.allows(f"{each}.googleapis.com")]
    return (Level.FAIL, f"{', '.join(refused)} may keep nothing without a `kms_key`") if refused else None


def _people(settings: StackSettings) -> list[str]:
    return sorted({*settings.access.operators, *settings.access.researchers})


def _domains(policy: _Policy, settings: StackSettings) -> Verdict:
    if policy.none:
        return Level.FAIL, "no member may be granted a role"
    allowed, people = policy.values("allowedValues"), _people(settings)
    if policy.allows() or not (allowed and people):
        return None
    domains = sorted({member.rpartition("@")[2].rpartition(":")[2] for member in people})
    return (
        Level.WARN,
        f"roles are only for the customers {', '.join(allowed)}; the stack grants some in {', '.join(domains)}",
    )


def _members(policy: _Policy, settings: StackSettings) -> Verdict:
    named = policy.values("allowedMemberSubjects", "parameters")
    others = [member for member in _people(settings) if member not in named]
    if not policy.enforced or not others:
        return None
    sets = ", ".join(policy.values("allowedPrincipalSets", "parameters")) or "no other set"
    return Level.WARN, f"roles are only for named members and {sets}; the stack grants some to {', '.join(others)}"


def _federation(policy: _Policy, settings: StackSettings) -> Verdict:
    refused = [] if policy.allows(GITHUB_TOKENS) else [GITHUB_TOKENS]
    return _refuse("the pipeline's identities may not come in from", refused, policy)


def _images(policy: _Policy, settings: StackSettings) -> Verdict:
    projects = sorted({_image_project(head.boot_image, settings.project or "") for head in settings.heads.values()})
    return _refuse("heads may not boot images of", (each for each in projects if not policy.allows(each)), policy)


def _image_project(image: str, project: str) -> str:
    """Return `projects/debian-cloud` of `projects/debian-cloud/global/images/…` or of a link to it."""
    found = re.search(r"projects/[^/]+", image)
    return found[0] if found else f"projects/{project}"


def _subnet(policy: _Policy, settings: StackSettings) -> Verdict:
    network = Names(stack=settings.stack, project=settings.project).network()
    own = f"projects/{settings.project}/regions/{settings.region}/subnetworks/{network}"
    subnet = settings.network.subnet if settings.network is not None else None
    path = "projects/" + (subnet or own).partition("projects/")[2]
    return _judge_under(policy, path)


def _key_project(policy: _Policy, settings: StackSettings) -> Verdict:
    return _judge_under(policy, settings.kms_key or "")


def _judge_under(policy: _Policy, path: str) -> Verdict:
    """Judge a policy whose values name a resource, its project, or a folder or organisation above."""
    project = "/".join(path.split("/")[:2])
    if policy.allows(path, project, f"under:{project}"):
        return None
    above = [each for each in policy.values("allowedValues") if each.startswith(("under:folders/", "under:organ"))]
    if above and policy.allows(above[0]):
        return Level.WARN, f"`{path}` may be used only if it is {' or '.join(above)}"
    return _refuse("the stack may not use", [f"`{path}`"], policy)


def _enforced(text: str) -> Judge:
    return lambda policy, settings: (Level.FAIL, text) if policy.enforced else None


_CONSTRAINTS: Final[Mapping[str, tuple[Callable[[StackSettings], object], Judge]]] = {
    "gcp.resourceLocations": (lambda stack: True, _locations),
    "gcp.restrictServiceUsage": (lambda stack: True, _services),
    "gcp.restrictNonCmekServices": (lambda stack: stack.kms_key is None, _own_keys),
    "gcp.restrictCmekCryptoKeyProjects": (lambda stack: stack.kms_key, _key_project),
    "iam.allowedPolicyMemberDomains": (lambda stack: True, _domains),
    "iam.managed.allowedPolicyMembers": (lambda stack: True, _members),
    "iam.disableServiceAccountCreation": (
        lambda stack: True,
        _enforced("no service account may be made, and the stack makes one for each role"),
    ),
    "iam.workloadIdentityPoolProviders": (lambda stack: stack.ci, _federation),
    "compute.requireOsLogin": (
        lambda stack: stack.heads,
        _enforced("machines take no keys of their own, and a head reaches its TPU nodes with one"),
    ),
    "compute.disableGuestAttributesAccess": (
        lambda stack: stack.heads,
        _enforced("nobody can read what a head waits for, and it reports that in guest attributes"),
    ),
    "compute.trustedImageProjects": (lambda stack: stack.heads, _images),
    "compute.restrictCloudNATUsage": (lambda stack: stack.network and not stack.network.subnet, _subnet),
    "compute.restrictSharedVpcSubnetworks": (lambda stack: stack.host_project, _subnet),
}
"""Constraint → whether it concerns a stack, and what it means for one."""
