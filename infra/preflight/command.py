"""What a project would make of a stack: asked of Google before anything is made, by reading alone.

`preflight` yields one finding for each thing it looked at: APIs, quotas, zones and TPU software that the project sees,
names that are taken or soft-deleted, organisation policies that would break the stack. What this identity may not ask,
or what does not answer, is a finding too, and the rest goes on.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, Final

from infra.cli import Parser
from infra.naming import MAKER, MANAGED_BY, STACK_LABEL, Names, labels
from infra.settings.files import find_project_folder, find_stack_file, load_stack_config
from infra.settings.model import Capacity, HeadSettings, PoolSettings, Settings
from infra.settings.read import settings_from
from runtime.errors import RuntimeFailure
from runtime.stack.google_api import GoogleApi, GoogleRefused, GoogleUnreachable

GITHUB_TOKENS: Final = "https://token.actions.githubusercontent.com"
"""The issuer of the identities that the hosted pipelines bring."""
ACCOUNTS_LIMIT: Final = 100
"""https://cloud.google.com/iam/quotas: service accounts of a project, unless it was raised."""
_BATCH: Final = 20
"""Services in one request; Google takes 30."""


class Level(StrEnum):
    OK = "ok"
    WARN = "warn"
    """May be a problem, or cannot be told."""
    FAIL = "fail"
    """`up` would fail, or what it makes would not work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    check: str
    """`apis`, `quota TPU v5e`, `name`, `policy gcp.resourceLocations` …"""
    level: Level
    message: str
    fix: str | None = None


Look = Callable[[], Iterable[Finding]]


def preflight(settings: Settings, api: GoogleApi | None) -> Iterator[Finding]:
    """Everything that can be told before `up`. Changes nothing. Without Google resources no `api` is needed."""
    if api is None or not settings.uses_google:
        yield _ok("project", "the stack has no Google resources, so there is nothing to ask")
        return
    reached = False
    first: list[tuple[str, Look]] = [("identity", lambda: _identity(api)), ("project", lambda: _project(settings, api))]
    for check, look in first:
        try:
            yield from _guard(check, look)
            reached = True
        except GoogleUnreachable as problem:
            yield _fail(check, problem.message, problem.hint)
    if not reached:
        # Each further question would wait as long for nothing.
        yield _warn("the rest", "was not asked: Google cannot be reached from here", "mend the network, then ask again")
        return
    yield from _look_around(settings, api)


def _look_around(settings: Settings, api: GoogleApi) -> Iterator[Finding]:
    looks: list[tuple[str, Look]] = [
        ("apis", lambda: _apis(settings, api)),
        ("zones", lambda: _zones(settings, api)),
        ("quotas", lambda: _quotas(settings, api)),
        ("quota service accounts", lambda: _accounts(settings, api)),
        *((f"pool {head}.{name}", look) for head, name, look in _pool_looks(settings, api)),
    ]
    looks += [(f"uses {wanted.what}", partial(_look_for, wanted, api)) for wanted in _referred(settings)]
    for check, look in looks:
        yield from _guard_all(check, look)
    yield from _names(settings, api)
    yield from _policies(settings, api)


EXAMPLES: Final = """examples:
  python -m infra preflight --stack dev
  python -m infra preflight --stack marin-us-west4 -o json | jq '.[] | select(.level != "ok")'

It asks with this machine's Google credentials, as the account that the stack file names under `impersonate`, and reads
only. What an identity may not ask is a warning.

exit codes: 0 nothing fails, 2 something does
"""


def main(args: Sequence[str]) -> int:
    """`python -m infra preflight`. Errors are raised."""
    parser = Parser(
        prog="python -m infra preflight",
        description="Ask a Google project, by reading alone, whether a stack could be made in it.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--stack", "-s", required=True, metavar="NAME", help="whose file is Pulumi.NAME.yaml")
    parser.add_argument(
        "--folder", type=Path, metavar="PATH", help="where the stack files lie; here or above by default"
    )
    parser.add_argument("--output", "-o", choices=["text", "json"], default="text")
    asked = parser.parse_args(args)
    settings = load_settings(asked.stack, asked.folder)
    with ExitStack() as stack:
        api = None
        if settings.uses_google:
            # The name of a server that stands in for Google, as the runtime reads it.
            server = os.environ.get("RUNTIME_GOOGLE_API") or None
            api = stack.enter_context(GoogleApi(server=server, impersonate=settings.impersonate, again=False))
        findings = list(_shown(preflight(settings, api), asked.output))
    if asked.output == "json":
        sys.stdout.write(json.dumps([dataclasses.asdict(each) for each in findings], indent=2) + "\n")
    return 2 if any(each.level is Level.FAIL for each in findings) else 0


def load_settings(stack: str, folder: Path | None = None) -> Settings:
    """The settings of `Pulumi.<stack>.yaml`. Raises `UnknownName` where there is no such file, `InvalidSettings`."""
    config = load_stack_config(find_stack_file(stack, folder or find_project_folder()))
    return settings_from(stack, config.values, config.secrets, config.written)


def _shown(findings: Iterable[Finding], output: str) -> Iterator[Finding]:
    """Text is printed as it becomes known."""
    for finding in findings:
        if output == "text":
            sys.stdout.write(f"{finding.level.value:<4}  {finding.check:<28}  {finding.message}\n")
            if finding.fix:
                sys.stdout.write(f"{'':<36}fix: {finding.fix}\n")
            sys.stdout.flush()
        yield finding


# identity, project, APIs


def _identity(api: GoogleApi) -> Iterator[Finding]:
    yield _ok("identity", api.who() or "credentials that do not tell whose they are")


def _project(settings: Settings, api: GoogleApi) -> Iterator[Finding]:
    found = api.find("cloudresourcemanager", f"v3/projects/{settings.project}")
    if found is None:
        yield _fail(
            "project", f"there is no project `{settings.project}`", "correct `project`, or `gcloud projects create`"
        )
        return
    state = str(found.get("state", "ACTIVE"))
    if state != "ACTIVE":
        fix = f"gcloud projects undelete {settings.project}"
        yield _fail("project", f"project `{settings.project}` is {state.lower().replace('_', ' ')}", fix)
        return
    yield _ok("project", f"{settings.project} is active")


def _apis(settings: Settings, api: GoogleApi) -> Iterator[Finding]:
    from infra.program import find_services

    wanted = [f"{service}.googleapis.com" for service in find_services(settings)]
    off: list[str] = []
    for start in range(0, len(wanted), _BATCH):
        names = [f"projects/{settings.project}/services/{service}" for service in wanted[start : start + _BATCH]]
        answer = api.get("serviceusage", f"v1/projects/{settings.project}/services:batchGet", names=names)
        off += [
            each["name"].rpartition("/")[2] for each in answer.get("services", ()) if each.get("state") != "ENABLED"
        ]
    first = [name for name in off if name.partition(".")[0] in ("serviceusage", "cloudresourcemanager")]
    if first:
        fix = f"gcloud services enable {' '.join(first)} --project {settings.project}"
        yield _fail("apis", f"{' and '.join(first)} must be on before `up` can enable the rest", fix)
    elif off:
        yield _ok("apis", f"{len(wanted) - len(off)} of {len(wanted)} are on; `up` enables {', '.join(sorted(off))}")
    else:
        yield _ok("apis", f"all {len(wanted)} are on")


# quotas


def _quotas(settings: Settings, api: GoogleApi) -> Iterator[Finding]:
    needs = list(_compute_needs(settings))
    if not needs:
        return
    project = api.get("compute", f"compute/v1/projects/{settings.project}")
    region = api.get("compute", f"compute/v1/projects/{settings.project}/regions/{settings.region}")
    limits = _limits(project) | _limits(region)
    for check, metrics, amount, unit in needs:
        metric = next((each for each in metrics if each in limits), None)
        if metric is None:
            yield _warn(f"quota {check}", f"the project tells no quota {' or '.join(metrics)}", "look it up by hand")
            continue
        limit, used = limits[metric]
        left = limit - used
        text = f"{metric}: {amount:g} {unit} wanted, {left:g} of {limit:g} free"
        if left < amount:
            where = f"https://console.cloud.google.com/iam-admin/quotas?project={settings.project}"
            # After a first `up` the stack's own are among the used.
            yield _warn(f"quota {check}", f"{text}; fine if this stack has them already", f"ask for more at {where}")
        else:
            yield _ok(f"quota {check}", text)


def _compute_needs(settings: Settings) -> Iterator[tuple[str, tuple[str, ...], float, str]]:
    heads = settings.heads.values()
    by_family: dict[str, int] = {}
    for head in heads:
        family, cpus = _machine(head)
        by_family[family] = by_family.get(family, 0) + cpus
    for family, cpus in by_family.items():
        yield f"CPUs {family}", (f"{family.upper()}_CPUS", "CPUS"), cpus, "CPUs"
    if heads:
        yield "disks", ("SSD_TOTAL_GB", "DISKS_TOTAL_GB"), sum(head.disk_gb for head in heads), "GB"
    if settings.network is not None and settings.network.subnet is None:
        yield "addresses", ("IN_USE_ADDRESSES",), 1, "address of the NAT"
        yield "networks", ("NETWORKS",), 1, "network"


def _machine(head: HeadSettings) -> tuple[str, int]:
    """Family and CPUs of `n2-standard-8`, `n2-custom-8-32768`, `e2-medium` …"""
    parts = head.machine_type.split("-")
    numbers = [int(part) for part in parts[1:] if part.isdigit()]
    return parts[0], numbers[0] if numbers else 2


def _limits(answer: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Metric → (limit, used)."""
    return {each["metric"]: (each.get("limit", 0.0), each.get("usage", 0.0)) for each in answer.get("quotas", ())}


def _accounts(settings: Settings, api: GoogleApi) -> Iterator[Finding]:
    from infra.program import find_roles

    wanted = len(find_roles(settings)) + 2 * len(settings.heads) + 2 * (settings.ci is not None)
    path = f"v1/projects/{settings.project}/serviceAccounts"
    have = sum(1 for _ in api.pages("iam", path, "accounts", pageSize=100))
    text = f"{have} are there, the stack has {wanted}; a project has {ACCOUNTS_LIMIT} unless that was raised"
    if have + wanted > ACCOUNTS_LIMIT:
        yield _warn("quota service accounts", text, "ask for more at the project's quota page")
    else:
        yield _ok("quota service accounts", text)


# zones and TPUs


def _zones(settings: Settings, api: GoogleApi) -> Iterator[Finding]:
    if not settings.zone or not settings.heads:
        return
    zone = api.find("compute", f"compute/v1/projects/{settings.project}/zones/{settings.zone}")
    if zone is None:
        known = [
            each["name"] for each in api.pages("compute", f"compute/v1/projects/{settings.project}/zones", "items")
        ]
        fix = f"the project sees {_near(settings.zone, known)}; some zones are open to chosen projects only"
        yield _fail("zone", f"the project does not see zone `{settings.zone}`", fix)
    elif zone.get("status", "UP") != "UP":
        yield _warn("zone", f"{settings.zone} is {str(zone['status']).lower()}", "wait: Google works on it")
    else:
        yield _ok("zone", f"{settings.zone} is up")


def _pool_looks(settings: Settings, api: GoogleApi) -> Iterator[tuple[str, str, Look]]:
    for head_name, head in settings.heads.items():
        for pool_name, pool in head.pools.items():
            label = f"{head_name}.{pool_name}"

            def look(label: str = label, pool: PoolSettings = pool) -> Iterator[Finding]:
                yield from _hardware(settings, label, pool, api)
                yield from _guard_all(f"quota {label}", lambda: _tpu_quota(settings, label, pool, api))

            yield head_name, pool_name, look


def _hardware(settings: Settings, label: str, pool: PoolSettings, api: GoogleApi) -> Iterator[Finding]:
    where = f"v2/projects/{settings.project}/locations/{settings.zone}"
    types = [each.get("type", "") for each in api.pages("tpu", f"{where}/acceleratorTypes", "acceleratorTypes")]
    check = f"pool {label}"
    if pool.accelerator in types:
        yield _ok(check, f"{settings.zone} has {pool.accelerator}")
    else:
        fix = f"it has {_near(pool.accelerator, types)}"
        yield _fail(check, f"the project sees no {pool.accelerator} in {settings.zone}", fix)
    versions = [each.get("version", "") for each in api.pages("tpu", f"{where}/runtimeVersions", "runtimeVersions")]
    if pool.runtime_version in versions:
        yield _ok(check, f"{settings.zone} has software {pool.runtime_version}")
    else:
        fix = f"it has {_near(pool.runtime_version, versions)}"
        yield _fail(check, f"there is no TPU software `{pool.runtime_version}` in {settings.zone}", fix)


_FAMILY_WORDS: Final = {"v5litepod": ("v5s", "litepod")}
"""What the names of a family's quotas hold, where that is not the family's name: `TPUV5sLitepodPerProject…`."""


def _tpu_quota(settings: Settings, label: str, pool: PoolSettings, api: GoogleApi) -> Iterator[Finding]:
    family, _, size_text = pool.accelerator.rpartition("-")
    size = int(size_text)
    kind = "preemptible" if pool.capacity in (Capacity.PREEMPTIBLE, Capacity.SPOT) else pool.capacity.value
    path = f"v1beta1/projects/{settings.project}/services/tpu.googleapis.com/consumerQuotaMetrics"
    found = [
        limit
        for metric in api.pages("serviceusage", path, "metrics", view="FULL")
        if _is_quota_of(metric, family, kind)
        for each in metric.get("consumerQuotaLimits", ())
        if (limit := _limit_in(each, settings)) is not None
    ]
    check = f"quota {label}"
    where = f"https://console.cloud.google.com/iam-admin/quotas?project={settings.project}&service=tpu.googleapis.com"
    if not found:
        text = f"the project tells no {kind.replace('_', ' ')} quota of {family} in {settings.zone}"
        yield _warn(check, text, f"look at {where}")
        return
    # Small sizes are served from a quota of their own; which one counts is Google's to say, so the largest is taken.
    limit = max(found)
    text = f"{limit:,} of {family}, {kind.replace('_', ' ')}, in {settings.zone}"
    if limit < size:
        yield _fail(check, f"{text}: not one {pool.accelerator} fits", f"ask for more at {where}")
    elif limit < pool.max * size:
        fits = f"{limit // size:,} nodes of at least {pool.min:,} and at most {pool.max:,}"
        yield _warn(check, f"{text}: {fits}", f"ask for more at {where}, or lower `max`")
    else:
        yield _ok(check, f"{text}: all {pool.max:,} nodes fit")


def _is_quota_of(metric: Mapping[str, Any], family: str, kind: str) -> bool:
    names = [str(metric.get("metric", ""))] + [
        str(each.get("name", "")) for each in metric.get("consumerQuotaLimits", ())
    ]
    text = re.sub(r"[^a-z0-9]", "", " ".join(names).lower())
    words = _FAMILY_WORDS.get(family, (family,))
    if not all(word in text for word in words):
        return False
    marks = {"preemptible": "preemptible" in text, "reserved": "reserved" in text}
    return marks.get(kind, not any(marks.values()))


def _limit_in(limit: Mapping[str, Any], settings: Settings) -> int | None:
    """What the project may have in the stack's zone; -1 stands for no limit."""
    own, general = None, None
    for bucket in limit.get("quotaBuckets", ()):
        dimensions = bucket.get("dimensions", {})
        value = int(bucket.get("effectiveLimit", 0))
        if dimensions.get("zone") == settings.zone or dimensions.get("region") == settings.region:
            own = value
        elif not dimensions:
            general = value
    found = own if own is not None else general
    return sys.maxsize if found == -1 else found


# names


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A name that the stack would take."""

    what: str
    name: str
    service: str
    path: str
    adoptable: bool = False


def _wanted(settings: Settings) -> Iterator[_Wanted]:
    project, names = f"projects/{settings.project}", Names(stack=settings.stack, project=settings.project)
    for queue in settings.queues:
        for what, kind, name in (
            ("topic", "topics", names.topic(queue)),
            ("topic", "topics", names.dead_letters(queue)),
            ("subscription", "subscriptions", names.subscription(queue)),
            ("subscription", "subscriptions", names.dead_letters(queue)),
        ):
            yield _Wanted(what, name, "pubsub", f"v1/{project}/{kind}/{name}")
    if settings.records is not None:
        name = settings.records.bucket or names.bucket("records")
        yield _Wanted("bucket", name, "storage", f"storage/v1/b/{name}", adoptable=True)
    for registry, each in settings.registries.items():
        name = each.repository or names.repository(registry)
        for region in each.regions or (settings.region or "",):
            if region not in each.existing:
                path = f"v1/{project}/locations/{region}/repositories"
                yield _Wanted(f"repository in {region}", name, "artifactregistry", f"{path}/{name}")
                if each.pull_through is not None:
                    cache = names.repository(f"{registry}-cache")
                    yield _Wanted(f"repository in {region}", cache, "artifactregistry", f"{path}/{cache}")
    for secret, wanted in settings.secrets.items():
        if wanted.existing is None:
            name = names.secret(secret)
            yield _Wanted("secret", name, "secretmanager", f"v1/{project}/secrets/{name}")
    yield from _wanted_identities(settings, names)
    if settings.network is not None and settings.network.subnet is None:
        name = names.network()
        yield _Wanted("network", name, "compute", f"compute/v1/{project}/global/networks/{name}")
    for head in settings.heads:
        name = names.head(head)
        path = f"compute/v1/{project}/zones/{settings.zone}/instances/{name}"
        yield _Wanted("machine", name, "compute", path)


def _wanted_identities(settings: Settings, names: Names) -> Iterator[_Wanted]:
    from infra.program import find_roles

    project = f"projects/{settings.project}"
    roles = [role.value for role in find_roles(settings)]
    roles += [f"{head}-{role}" for head in settings.heads for role in ("head", "node")]
    roles += ["deployer", "previewer"] if settings.ci is not None else []
    for role in roles:
        path = f"v1/{project}/serviceAccounts/{names.account_email(role)}"
        yield _Wanted("service account", names.account(role), "iam", path)
    made = [f"{head}-{role}" for head in settings.heads for role in ("head", "reaper")]
    made += ["deployer", "previewer"] if settings.ci is not None else []
    for role in made:
        name = names.role(role)
        yield _Wanted("custom role", name, "iam", f"v1/{project}/roles/{name}", adoptable=True)
    if settings.ci is not None and settings.ci.pool is None:
        name = names.identity_pool()
        path = f"v1/{project}/locations/global/workloadIdentityPools/{name}"
        yield _Wanted("identity pool", name, "iam", path, adoptable=True)


def _names(settings: Settings, api: GoogleApi) -> Iterator[Finding]:
    free = total = 0
    for wanted in _wanted(settings):
        total += 1
        found = list(_guard_all(f"name {wanted.name}", partial(_look_up, settings, wanted, api)))
        free += not found
        yield from found
    if settings.records is not None:
        bucket = settings.records.bucket or Names(stack=settings.stack, project=settings.project).bucket("records")
        yield from _guard_all(f"name {bucket}", lambda: _deleted_buckets(settings, bucket, api))
    if total:
        yield _ok("names", f"{free} of {total} are free")


def _look_up(settings: Settings, wanted: _Wanted, api: GoogleApi) -> Iterator[Finding]:
    """Nothing where the name is free."""
    check = f"name {wanted.name}"
    thing = f"{wanted.what} `{wanted.name}`"
    try:
        found = api.find(wanted.service, wanted.path)
    except GoogleRefused as refused:
        if refused.status == 403 and not refused.disabled_api and wanted.what == "bucket":
            text = f"{thing} is another project's: the names of buckets are unique in the world"
            yield _fail(check, text, "set `records.bucket` to another name")
            return
        if refused.disabled_api:
            return  # Where the API was never on, nothing of it is there.
        raise
    if found is None:
        return
    adopts = "`adopt: true` in the stack file takes it over"
    if found.get("deleted") or found.get("state") == "DELETED":
        if settings.adopt and wanted.adoptable:
            yield _ok(check, f"{thing} is soft-deleted, and `adopt` brings it back")
        else:
            yield _fail(check, f"{thing} is soft-deleted, and its name cannot be taken until it is gone", adopts)
        return
    owner = _owner(found, settings)
    if owner == settings.stack:
        yield _ok(check, f"{thing} is there and this stack's own")
    elif owner is not None:
        yield _fail(check, f"{thing} is there and belongs to stack `{owner}`", "choose another name for this stack")
    elif settings.adopt and wanted.adoptable:
        yield _ok(check, f"{thing} is there, and `adopt` takes it over")
    else:
        fix = adopts if wanted.adoptable else "import it (docs/operations.md), or delete it"
        yield _warn(check, f"{thing} is there: fine if an earlier `up` of this stack made it, else `up` fails", fix)


def _owner(found: Mapping[str, Any], settings: Settings) -> str | None:
    """The stack that says it made this: by its labels, or in words where a kind of resource has no labels."""
    borne = found.get("labels", {})
    if borne.get(MANAGED_BY) == MAKER:
        own = borne.get(STACK_LABEL)
        return settings.stack if own == labels(settings.stack, {})[STACK_LABEL] else str(own)
    said = " ".join(str(found.get(key, "")) for key in ("displayName", "title", "description"))
    names = Names(stack=settings.stack, project=settings.project)
    ours = {settings.stack, *(names.cluster(head) for head in settings.heads)}
    return settings.stack if ours & set(re.findall(r"[\w-]+", said)) else None


def _referred(settings: Settings) -> Iterator[_Wanted]:
    """What the stack uses and another one makes."""
    for registry in settings.registries.values():
        for existing in registry.existing.values():
            yield _Wanted("repository", existing, "artifactregistry", f"v1/{existing}")
    for secret in settings.secrets.values():
        if secret.existing is not None:
            yield _Wanted("secret", secret.existing, "secretmanager", f"v1/{secret.existing}")
    if settings.ci is not None and settings.ci.pool is not None:
        yield _Wanted("identity pool", settings.ci.pool, "iam", f"v1/{settings.ci.pool}")
    subnet = settings.network.subnet if settings.network is not None else None
    if subnet is not None:
        path = subnet[subnet.index("projects/") :] if "projects/" in subnet else subnet
        yield _Wanted("subnet", path, "compute", f"compute/v1/{path}")


def _look_for(wanted: _Wanted, api: GoogleApi) -> Iterator[Finding]:
    check = f"uses {wanted.what}"
    found = api.find(wanted.service, wanted.path)
    if found is None or found.get("state") == "DELETED":
        fix = "bring up the stack that makes it first, or correct the name"
        yield _fail(check, f"there is no `{wanted.name}`, which this stack refers to", fix)
    else:
        yield _ok(check, f"{wanted.name} is there")


def _deleted_buckets(settings: Settings, bucket: str, api: GoogleApi) -> Iterator[Finding]:
    found = api.pages("storage", "storage/v1/b", "items", project=settings.project, softDeleted="true", prefix=bucket)
    for each in found:
        if each.get("name") == bucket:
            until = str(each.get("hardDeleteTime", "some days"))[:10]
            text = f"bucket `{bucket}` was deleted; what it held can be had back until {until}"
            fix = f"gcloud storage restore gs://{bucket}#{each.get('generation', 'GENERATION')}, then `adopt: true`"
            yield _warn(f"name {bucket}", text, fix)


# organisation policies


def _policies(settings: Settings, api: GoogleApi) -> Iterator[Finding]:
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

        yield from _guard_all(check, look)


@dataclass(frozen=True, slots=True)
class _Allowed:
    """What a list policy lets through, without rules that hold under a condition only."""

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


_EXCEPTION: Final = "ask an administrator of the organisation for an exception for this project"


def _locations(check: str, spec: Mapping[str, Any], settings: Settings) -> Iterator[Finding]:
    policy = _read_list(spec)
    wanted = sorted(set(_locations_of(settings)))
    if policy.free:
        yield _ok(check, "resources may lie anywhere")
        return
    refused = [place for place in wanted if policy.none or not _place_allowed(place, policy)]
    if refused:
        allowed = ", ".join(policy.allowed) or "nothing"
        yield _fail(check, f"nothing may lie in {', '.join(refused)}; allowed: {allowed}", _EXCEPTION)
    else:
        yield _ok(check, f"{', '.join(wanted)} is allowed")


def _locations_of(settings: Settings) -> Iterator[str]:
    if settings.region:
        yield settings.region
    if settings.records is not None and settings.records.location:
        yield settings.records.location.lower()
    for registry in settings.registries.values():
        yield from (region for region in registry.regions if region not in registry.existing)
    for secret in settings.secrets.values():
        if secret.existing is None:
            # Kept everywhere, a secret lies in a location of its own.
            yield from secret.regions or ("global",)


def _place_allowed(place: str, policy: _Allowed) -> bool:
    names = _names_of_place(place)
    if any(value in names for value in policy.denied):
        return False
    return policy.all or not policy.allowed or any(value in names for value in policy.allowed)


def _names_of_place(place: str) -> set[str]:
    """The values that stand for a place: itself, and the groups that Google counts it among.

    https://cloud.google.com/resource-manager/docs/organization-policy/defining-locations
    """
    continent = place.partition("-")[0]
    groups = {place, continent, {"europe": "eu"}.get(continent, continent)}
    return {place} | {f"in:{group}-locations" for group in groups}


def _domains(check: str, spec: Mapping[str, Any], settings: Settings) -> Iterator[Finding]:
    policy = _read_list(spec)
    people = (*settings.access.operators, *settings.access.researchers)
    if policy.free:
        yield _ok(check, "members of any domain may be granted roles")
    elif policy.none:
        yield _fail(check, "no member may be granted a role", _EXCEPTION)
    elif not people:
        yield _ok(check, "restricted, and the stack grants nothing to people")
    else:
        domains = sorted({member.rpartition("@")[2].rpartition(":")[2] for member in people})
        text = f"roles only for {', '.join(policy.allowed)}; the stack grants some to members of {', '.join(domains)}"
        yield _warn(check, text, f"see that these are the customers behind the domains, or {_EXCEPTION}")


def _federation(check: str, spec: Mapping[str, Any], settings: Settings) -> Iterator[Finding]:
    policy = _read_list(spec)
    if policy.free:
        yield _ok(check, "identities of any provider may come in")
    elif policy.none or GITHUB_TOKENS in policy.denied or (policy.allowed and GITHUB_TOKENS not in policy.allowed):
        yield _fail(check, f"the pipeline's identities, of {GITHUB_TOKENS}, may not come in", _EXCEPTION)
    else:
        yield _ok(check, "the pipeline's identities may come in")


def _no_accounts(check: str, spec: Mapping[str, Any], settings: Settings) -> Iterator[Finding]:
    if _enforced(spec):
        yield _fail(check, "no service account may be made, and the stack makes one for each role", _EXCEPTION)
    else:
        yield _ok(check, "service accounts may be made")


def _os_login(check: str, spec: Mapping[str, Any], settings: Settings) -> Iterator[Finding]:
    if _enforced(spec):
        text = "machines take no keys of their own, and a head reaches its TPU nodes with one"
        yield _fail(check, text, _EXCEPTION)
    else:
        yield _ok(check, "not required")


def _images(check: str, spec: Mapping[str, Any], settings: Settings) -> Iterator[Finding]:
    policy = _read_list(spec)
    projects = sorted({_image_project(head.boot_image, settings.project or "") for head in settings.heads.values()})
    if policy.free:
        yield _ok(check, "images of any project may be used")
        return
    refused = [
        each
        for each in projects
        if policy.none or each in policy.denied or (policy.allowed and not policy.all and each not in policy.allowed)
    ]
    if refused:
        yield _fail(check, f"boot images of {', '.join(refused)} may not be used", f"set `boot_image`, or {_EXCEPTION}")
    else:
        yield _ok(check, f"images of {', '.join(projects)} may be used")


def _image_project(image: str, project: str) -> str:
    """`projects/debian-cloud` of `projects/debian-cloud/global/images/…` or of a link to it."""
    found = re.search(r"projects/[^/]+", image)
    return found[0] if found else f"projects/{project}"


def _addresses(check: str, spec: Mapping[str, Any], settings: Settings) -> Iterator[Finding]:
    free = _read_list(spec).free
    yield _ok(check, "allowed, and not used" if free else "restricted, and no machine of the stack has one")


# findings


def _guard_all(check: str, look: Look) -> Iterator[Finding]:
    """As `_guard`; that nothing answered is a finding too."""
    try:
        yield from _guard(check, look)
    except RuntimeFailure as problem:
        yield _fail(check, problem.message, problem.hint)


def _guard(check: str, look: Look) -> Iterator[Finding]:
    """What `look` finds; that it was refused is a finding."""
    try:
        yield from look()
    except GoogleRefused as refused:
        if refused.disabled_api:
            text = f"cannot be asked before the {_api_of(refused)} API is on; `up` enables it"
            yield _warn(check, text, f"gcloud services enable {_api_of(refused)}.googleapis.com, then ask again")
        elif refused.status in (401, 403):
            text = f"this identity may not ask: {refused.message.partition(': ')[2]}"
            yield _warn(check, text, "ask with an identity that may, such as one with `roles/viewer` on the project")
        else:
            yield _fail(check, refused.message, refused.hint)


def _api_of(refused: GoogleRefused) -> str:
    found = re.search(r"([a-z]+)\.googleapis\.com", refused.url)
    return found[1] if found else "needed"


def _near(wanted: str, known: Sequence[str]) -> str:
    """Some of what there is, the nearest first."""
    near = difflib.get_close_matches(wanted, known, n=5, cutoff=0.3) or sorted(known)[:5]
    return (
        f"{', '.join(near)} and {len(known) - len(near)} more" if len(known) > len(near) else ", ".join(near) or "none"
    )


def _ok(check: str, message: str) -> Finding:
    return Finding(check=check, level=Level.OK, message=message)


def _warn(check: str, message: str, fix: str | None) -> Finding:
    return Finding(check=check, level=Level.WARN, message=message, fix=fix)


def _fail(check: str, message: str, fix: str | None) -> Finding:
    return Finding(check=check, level=Level.FAIL, message=message, fix=fix)
