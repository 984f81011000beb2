"""Whether the names that a stack would take are free, and the resources of other stacks that it refers to exist."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from infra.naming import MAKER, MANAGED_BY, NODE_ROLES, STACK_LABEL, Names, labels
from infra.preflight.findings import PreflightFinding, fail, guard_all, ok, warn
from infra.render.firewalls import list_openings
from infra.settings.model import StackSettings
from runtime.stack.google_api import GoogleApi, GoogleRefused


@dataclass(frozen=True, slots=True)
class PlannedName:
    """A name that the stack would take."""

    what: str
    name: str
    service: str
    path: str
    adoptable: bool = False


def list_wanted(settings: StackSettings) -> Iterator[PlannedName]:
    """Yield every name that `up` would take in the project."""
    project, names = f"projects/{settings.project}", Names(stack=settings.stack, project=settings.project)
    for queue in settings.queues:
        for what, name in (("topic", names.topic(queue)), ("subscription", names.subscription(queue))):
            for taken in (name, names.dead_letters(queue)):
                yield PlannedName(what, taken, "pubsub", f"v1/{project}/{what}s/{taken}")
    for name in made_buckets(settings):
        yield PlannedName("bucket", name, "storage", f"storage/v1/b/{name}", adoptable=True)
    for registry, each in settings.registries.items():
        name = each.repository or names.repository(registry)
        for region in each.regions or (settings.region or "",):
            if region not in each.existing:
                caches = [names.repository(f"{registry}-cache")] if each.pull_through is not None else []
                for made in (name, *caches):
                    path = f"v1/{project}/locations/{region}/repositories/{made}"
                    yield PlannedName(f"repository in {region}", made, "artifactregistry", path)
    for secret, wanted in settings.secrets.items():
        if wanted.existing is None:
            name = names.secret(secret)
            yield PlannedName("secret", name, "secretmanager", f"v1/{project}/secrets/{name}")
    yield from _wanted_identities(settings, names)
    if settings.network is not None and settings.network.subnet is None:
        name = names.network()
        yield PlannedName("network", name, "compute", f"compute/v1/{project}/global/networks/{name}")
    for key, head in settings.heads.items():
        name = names.head(key)
        path = f"compute/v1/{project}/zones/{head.zone or settings.zone}/instances/{name}"
        yield PlannedName("machine", name, "compute", path)


def made_buckets(settings: StackSettings) -> list[str]:
    """Return the names of the buckets that the stack makes."""
    others = {each.existing for each in settings.buckets.values()}
    return [name for name in settings.bucket_names.values() if name not in others]


def _wanted_identities(settings: StackSettings, names: Names) -> Iterator[PlannedName]:
    from infra.program import find_roles

    project = f"projects/{settings.project}"
    roles = [role.value for role in find_roles(settings)]
    roles += [f"{head}-{role}" for head in settings.heads for role in ("head", "node")]
    pipeline = ["deployer", "previewer"] if settings.ci is not None else []
    for role in [*roles, *pipeline]:
        path = f"v1/{project}/serviceAccounts/{names.account_email(role)}"
        yield PlannedName("service account", names.account(role), "iam", path)
    made = [names.role(role) for role in pipeline]
    if settings.ci is not None and "heads" in settings.ci.deploys:
        made += NODE_ROLES.values()
    elif settings.heads and settings.deployer is None:
        made += map(names.role, NODE_ROLES)
    for name in made:
        yield PlannedName("custom role", name, "iam", f"v1/{project}/roles/{name}", adoptable=True)
    pools = [*(["ci"] if settings.ci is not None else []), *(["workers"] if settings.federation else [])]
    for name in map(names.identity_pool, pools):
        path = f"v1/{project}/locations/global/workloadIdentityPools/{name}"
        yield PlannedName("identity pool", name, "iam", path, adoptable=True)


def check_names(settings: StackSettings, api: GoogleApi) -> Iterator[PreflightFinding]:
    free = total = 0
    for wanted in list_wanted(settings):
        total += 1
        found = list(guard_all(f"name {wanted.name}", partial(_look_up, settings, wanted, api)))
        free += not found
        yield from found
    for bucket in made_buckets(settings):
        yield from guard_all(f"name {bucket}", partial(_deleted_buckets, settings, bucket, api))
    if total:
        yield ok("names", f"{free} of {total} are free")


def _look_up(settings: StackSettings, wanted: PlannedName, api: GoogleApi) -> Iterator[PreflightFinding]:
    """Yield nothing if the name is free."""
    check = f"name {wanted.name}"
    thing = f"{wanted.what} `{wanted.name}`"
    try:
        found = api.find(wanted.service, wanted.path)
    except GoogleRefused as refused:
        if refused.status == 403 and not refused.disabled_api and wanted.what == "bucket":
            text = f"{thing} is another project's: the names of buckets are unique in the world"
            yield fail(check, text, "set its `bucket` in the stack file to another name")
            return
        if refused.disabled_api:
            return  # An API that was never on holds nothing.
        raise
    if found is None:
        return
    adopts = "`adopt: true` in the stack file takes it over"
    if found.get("deleted") or found.get("state") == "DELETED":
        if settings.adopt and wanted.adoptable:
            yield ok(check, f"{thing} is soft-deleted, and `adopt` brings it back")
        else:
            yield fail(check, f"{thing} is soft-deleted, and its name cannot be taken until it is gone", adopts)
        return
    owner = _owner(found, settings)
    if owner == settings.stack:
        yield ok(check, f"{thing} is there and this stack's own")
    elif owner is not None:
        yield fail(check, f"{thing} is there and belongs to stack `{owner}`", "choose another name for this stack")
    elif settings.adopt and wanted.adoptable:
        yield ok(check, f"{thing} is there, and `adopt` takes it over")
    else:
        fix = adopts if wanted.adoptable else "import it (docs/operations.md), or delete it"
        yield warn(check, f"{thing} is there: fine if an earlier `up` of this stack made it, else `up` fails", fix)


def _owner(found: Mapping[str, Any], settings: StackSettings) -> str | None:
    """Return the stack that made `found`, by its labels, or by its description if the kind has no labels."""
    borne = found.get("labels", {})
    if borne.get(MANAGED_BY) == MAKER:
        own = borne.get(STACK_LABEL)
        return settings.stack if own == labels(settings.stack, {})[STACK_LABEL] else str(own)
    said = " ".join(str(found.get(key, "")) for key in ("displayName", "title", "description"))
    names = Names(stack=settings.stack, project=settings.project)
    ours = {settings.stack, *(names.cluster(head) for head in settings.heads)}
    return settings.stack if ours & set(re.findall(r"[\w-]+", said)) else None


def find_referred(settings: StackSettings) -> Iterator[PlannedName]:
    """Yield the resources that the stack uses and another stack makes."""
    for registry in settings.registries.values():
        for existing in registry.existing.values():
            yield PlannedName("repository", existing, "artifactregistry", f"v1/{existing}")
    for secret in settings.secrets.values():
        if secret.existing is not None:
            yield PlannedName("secret", secret.existing, "secretmanager", f"v1/{secret.existing}")
    for bucket in settings.buckets.values():
        if bucket.existing is not None:
            yield PlannedName("bucket", bucket.existing, "storage", f"storage/v1/b/{bucket.existing}")
    if settings.deployer is not None:
        path = f"projects/{settings.project}/serviceAccounts/{settings.deployer}"
        yield PlannedName("service account", path, "iam", f"v1/{path}")
        for role in NODE_ROLES.values() if settings.heads else ():
            path = f"projects/{settings.project}/roles/{role}"
            yield PlannedName("custom role", path, "iam", f"v1/{path}")
    subnet = settings.network.subnet if settings.network is not None else None
    if subnet is not None:
        path = subnet[subnet.index("projects/") :] if "projects/" in subnet else subnet
        yield PlannedName("subnet", path, "compute", f"compute/v1/{path}")
    if settings.host_project is not None:
        names = Names(stack=settings.stack, project=settings.project)
        for head in settings.heads:
            for rule in list_openings(None):
                path = f"projects/{settings.host_project}/global/firewalls/{names.firewall(f'{head}-{rule.purpose}')}"
                yield PlannedName("firewall", path, "compute", f"compute/v1/{path}")


def look_for(wanted: PlannedName, region: str | None, api: GoogleApi) -> Iterator[PreflightFinding]:
    check = f"uses {wanted.what}"
    found = api.find(wanted.service, wanted.path)
    if found is None or found.get("state") == "DELETED":
        fix = "bring up the stack that makes it first, or correct the name"
        if wanted.what == "firewall":
            fix = "`python -m infra check --stack NAME` prints the commands for the owner of the network"
        yield fail(check, f"there is no `{wanted.name}`, which this stack refers to", fix)
    elif wanted.what == "bucket" and (place := str(found.get("location", "")).lower()) != (region or place):
        text = f"{wanted.name} is in {place} and the stack's machines in {region}: traffic between them costs money"
        yield warn(check, text, "copy what they read into a bucket of their region")
    else:
        yield ok(check, f"{wanted.name} is there")


def _deleted_buckets(settings: StackSettings, bucket: str, api: GoogleApi) -> Iterator[PreflightFinding]:
    found = api.pages("storage", "storage/v1/b", "items", project=settings.project, softDeleted="true", prefix=bucket)
    for each in found:
        if each.get("name") == bucket:
            until = str(each.get("hardDeleteTime", "some days"))[:10]
            text = f"bucket `{bucket}` was deleted; what it held can be had back until {until}"
            fix = f"gcloud storage restore gs://{bucket}#{each.get('generation', 'GENERATION')}, then `adopt: true`"
            yield warn(f"name {bucket}", text, fix)
