"""The rules about a whole stack: its place, its parts together, and the names by which one part refers to another.

`rules` judges every part alone first.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Final

from infra.gcp import catalog
from infra.gcp.catalog import BOOT_IMAGE_PROJECTS, IMAGE_SOURCES
from infra.naming import Names
from infra.settings.forms import NETWORK, REPOSITORY, SUBNET, parse_range
from infra.settings.key_rules import find_key_problems
from infra.settings.model import DAY_S, AccessSettings, HeadSettings, StackSettings
from infra.settings.problems import wrong
from infra.settings.rules import (
    ACCELERATOR,
    BOOT_IMAGE,
    GOOGLES_ADDRESSES,
    IMAGE,
    READERS_OF,
    REGION,
    SMALLEST_SUBNET,
    count_machines,
)
from runtime.outputs import image_path
from runtime.schema import Problem, suggest


def find_stack_problems(settings: StackSettings) -> list[Problem]:
    return [problem for rule in _RULES for problem in rule(settings)]


def _place(settings: StackSettings) -> Iterator[Problem]:
    if settings.uses_google:
        parts = ("network", "queues", "records", "buckets", "registries", "secrets", "heads", "ci")
        users = ", ".join(f"`{part}`" for part in parts if getattr(settings, part))
        for key in ("project", "region"):
            if getattr(settings, key) is None:
                yield Problem(key, f"is not set, and {users} need it", "no default is taken for it")
    if settings.region is not None:
        yield from _region_problems(settings.region, "region")
    zones = {"zone": settings.zone} | {f"heads.{name}.zone": head.zone for name, head in settings.heads.items()}
    for path, zone in zones.items():
        if zone is not None and not re.fullmatch(rf"{re.escape(settings.region or '?')}-[a-z0-9]+", zone):
            allowed = f"a zone of the region `{settings.region}`" if settings.region else "nothing without `region`"
            yield wrong(path, zone, allowed)
    if any((head.zone or settings.zone) is None for head in settings.heads.values()):
        yield Problem("zone", "is not set, and `heads` need it", _zone_hint(settings))


def _regions(settings: StackSettings) -> Iterator[Problem]:
    for path, region in list_regions(settings):
        yield from _region_problems(region, path)
    for path, place in settings.bucket_locations.items():
        if place is not None and place.lower() not in catalog.BUCKET_LOCATIONS and not REGION.fullmatch(place.lower()):
            larger = ", ".join(f"`{each.upper()}`" for each in sorted(catalog.BUCKET_LOCATIONS))
            yield wrong(f"{path}.location", place, f"a region such as `us-west4`, or one of {larger}")


def _buckets(settings: StackSettings) -> Iterator[Problem]:
    access = settings.access
    there = {
        "workers": ("queues", settings.queues),
        "clusters": ("heads", settings.heads),
        "operators": ("access.operators", access.operators),
        "researchers": ("access.researchers", access.researchers),
    }
    for name, bucket in settings.buckets.items():
        for key in ("readers", "writers"):
            for index, member in enumerate(getattr(bucket, key)):
                if member in there and not there[member][1]:
                    where = f"buckets.{name}.{key}[{index}]"
                    yield Problem(where, f"is `{member}`, and `{there[member][0]}` is not set")
    if settings.project is None:
        return
    records = settings.bucket_names.get("records")
    for path, taken in settings.bucket_names.items():
        if path != "records" and taken == records:
            yield Problem(path, "has the name of the task records' bucket", "choose another")
        elif taken.endswith("-pulumi-state"):
            # So does `scripts/bootstrap` name it.
            yield wrong(path, taken, "a bucket that does not hold Pulumi's state")


def _heads(settings: StackSettings) -> Iterator[Problem]:
    if not settings.heads:
        return
    if settings.network is None:
        yield Problem(
            "network",
            "is not set, and `heads` need it",
            "`network: {cidr: 10.64.0.0/20}` makes one, `subnet` uses one that exists",
        )
    for name, head in settings.heads.items():
        for index, secret in enumerate(head.environment):
            if secret not in settings.secrets:
                known = sorted(settings.secrets)
                allowed = f"a name in `secrets`: {', '.join(known) or 'there is none'}"
                yield wrong(f"heads.{name}.environment[{index}]", secret, allowed, suggest(secret, known))
        yield from _taken_variable_problems(settings, name, head)
        yield from _head_image_problems(settings, f"heads.{name}.image", head.image)
        yield from _boot_image_problems(settings, f"heads.{name}.boot_image", head.boot_image)


def _taken_variable_problems(settings: StackSettings, name: str, head: HeadSettings) -> Iterator[Problem]:
    carriers = {settings.secrets[each].env: each for each in head.environment if each in settings.secrets}
    for path, machine in head.machines(f"heads.{name}").items():
        for variable in sorted(carriers.keys() & machine.variables.keys()):
            yield Problem(
                f"{path}.variables.{variable}",
                f"is the variable of the secret `{carriers[variable]}`, which `environment` names",
                "leave one of them out",
            )


def _head_image_problems(settings: StackSettings, path: str, image: str) -> Iterator[Problem]:
    """Find an image of a stranger, or of a repository that the nodes may not read because the stack does not know it."""
    if not IMAGE.fullmatch(image) or not settings.project:
        return
    known = sorted(repository_urls(settings))
    if any(image.startswith((f"{each}/", f"{each}@")) for each in (*known, *IMAGE_SOURCES, *settings.overrides.images)):
        return
    source = image.partition("@")[0].rpartition("/")[0]
    own = f"-docker.pkg.dev/{image_path(settings.project)}/" in image
    yield Problem(
        path,
        f"is in a repository that is not of this stack{', so its nodes may not read it' if own else ''};"
        f" allowed are images under {', '.join(known) or 'a registry in `registries`'}",
        suggest(source, known) if own else f"if you trust it: `overrides: {{images: [{source}]}}`",
    )


def find_image_projects(settings: StackSettings) -> frozenset[str]:
    """Projects whose images a head may start from."""
    own = [settings.project] if settings.project else []
    return BOOT_IMAGE_PROJECTS.union(settings.overrides.boot_image_projects, own)


def _boot_image_problems(settings: StackSettings, path: str, image: str) -> Iterator[Problem]:
    found = BOOT_IMAGE.fullmatch(image)
    known = sorted(find_image_projects(settings))
    if found and found["project"] not in known:
        yield Problem(
            path,
            f"is an image of the project `{found['project']}`, allowed are {', '.join(known)}",
            suggest(found["project"], known)
            or f"if you trust it: `overrides: {{boot_image_projects: [{found['project']}]}}`",
        )


def _subnet(settings: StackSettings) -> Iterator[Problem]:
    network = settings.network
    if network is None:
        return
    found, named = SUBNET.fullmatch(network.subnet or ""), NETWORK.fullmatch(network.network or "")
    if found and found["region"] != settings.region:
        yield wrong("network.subnet", network.subnet, f"a subnet in the region `{settings.region}`")
    if found and found["project"].isdecimal():
        # Only the id says whether the network is another project's.
        fix = "`gcloud projects describe` prints it"
        yield wrong("network.subnet", network.subnet, "a self-link with the project's id, not its number", fix)
    elif found and named and found["project"] != named["project"]:
        yield wrong("network.network", network.network, f"a network of the subnet's project, `{found['project']}`")
    cidr = parse_range(network.cidr)
    if cidr is None or cidr.prefixlen > SMALLEST_SUBNET:
        return
    room = cidr.num_addresses - GOOGLES_ADDRESSES
    needed = count_machines(settings)
    if needed > room:
        yield Problem(
            "network.cidr",
            f"is `{network.cidr}` with room for {room:,} machines, and the pools' maxima with the heads are {needed:,}",
            f"a /{32 - (needed + GOOGLES_ADDRESSES - 1).bit_length()} would do",
        )


def _queues(settings: StackSettings) -> Iterator[Problem]:
    for name in settings.queues:
        if name.endswith("-dead") and name.removesuffix("-dead") in settings.queues:
            other = name.removesuffix("-dead")
            yield Problem(f"queues.{name}", f"has the name of the dead letters of `{other}`", "choose another name")
    if settings.alerts is None:
        return
    days = settings.alerts.oldest_task_days
    for name, queue in settings.queues.items():
        if days <= 30 and days * DAY_S >= queue.retention_s:
            yield wrong(
                "alerts.oldest_task_days",
                days,
                f"less than the retention of queue `{name}`, {queue.retention_s / DAY_S:.3g} days: "
                "a task would be gone before anyone hears of it",
            )


def _secrets(settings: StackSettings) -> Iterator[Problem]:
    counts = Counter(secret.env for secret in settings.secrets.values())
    for name, secret in settings.secrets.items():
        if counts[secret.env] > 1:
            others = sorted(other for other, its in settings.secrets.items() if its.env == secret.env and other != name)
            yield Problem(
                f"secrets.{name}.env",
                f"is `{secret.env}`, which `{', '.join(others)}` has too",
                "a variable carries one secret",
            )
        for index, role in enumerate(secret.readers):
            part = READERS_OF.get(role)
            if part is not None and not getattr(settings, part):
                yield Problem(
                    f"secrets.{name}.readers[{index}]",
                    f"is `{role.value}`, and without `{part}` a stack has no account of that role",
                    "leave it out",
                )


def _registries(settings: StackSettings) -> Iterator[Problem]:
    owners: dict[str, str] = {}
    for name in settings.registries:
        for url in sorted(made_repository_urls(settings, name)):
            if url in owners:
                yield Problem(
                    f"registries.{name}.repository",
                    f"gives the repository {url} that `registries.{owners[url]}` makes",
                    "choose another `repository`",
                )
            owners[url] = name


def _kubernetes_clusters(settings: StackSettings) -> Iterator[Problem]:
    for key in ("context", "cluster_identifier"):
        counts = Counter(getattr(cluster, key) for cluster in settings.kubernetes.values())
        for name, cluster in settings.kubernetes.items():
            value = getattr(cluster, key)
            if counts[value] > 1:
                yield Problem(
                    f"kubernetes.{name}.{key}",
                    f"is `{value}`, which another cluster of this stack has too",
                    "put the namespaces of one cluster under one name",
                )


def _pipeline(settings: StackSettings) -> Iterator[Problem]:
    """Keep what pipelines may do out of their own reach."""
    if settings.ci is not None:
        parts = ("queues", "records", "buckets", "registries", "secrets", "heads", "network", "kubernetes", "deployer")
        for part in parts:
            if getattr(settings, part):
                yield Problem(
                    part,
                    "is set beside `ci`, and a pipeline that deploys this stack could change its own rights",
                    "put `ci` into a stack of its own, which a person brings up",
                )
    if settings.deployer is None:
        return
    access = settings.access
    for path, is_set, why, hint in (
        (
            "federation",
            settings.federation,
            "may not decide who signs in",
            f"put it into the stack with `ci`; {_SIGNED_IN}",
        ),
        (
            "access.project_grants",
            access.project_grants,
            "may not make people's grants on the project",
            "leave it out; the stack with `ci` makes them, with the same people under `access`",
        ),
        ("kubernetes", settings.kubernetes, "has no login to a cluster", "put it into a stack that a person brings up"),
        ("impersonate", settings.impersonate, "acts as its own account", "leave it out"),
    ):
        if is_set:
            yield Problem(path, f"is set, and the pipeline that deploys this stack {why}", hint)
    lists = {
        "access.operators": access.operators,
        "access.researchers": access.researchers,
        "access.workers": access.workers,
    }
    for name, bucket in settings.buckets.items():
        lists |= {f"buckets.{name}.readers": bucket.readers, f"buckets.{name}.writers": bucket.writers}
    for path, members in lists.items():
        if (member := f"serviceAccount:{settings.deployer}") in members:
            hint = "leave it out; the stack with `ci` says what it may do"
            yield Problem(path, f"has `{member}`, the stack's `deployer`", hint)


_SIGNED_IN: Final = (
    "here, `access.workers` takes"
    " `principal://iam.googleapis.com/projects/NUMBER/locations/global/workloadIdentityPools/POOL/subject/SUBJECT`"
)


def _workload_identity(settings: StackSettings) -> Iterator[Problem]:
    for name, cluster in settings.kubernetes.items():
        for namespace, its in cluster.namespaces.items():
            if its.workload_identity and not settings.queues:
                yield Problem(
                    f"kubernetes.{name}.namespaces.{namespace}.workload_identity",
                    "is set, and without `queues` a stack has no account `worker` to act as",
                    "set `queues`, or leave it out",
                )
    if settings.federation and settings.ci is None and not settings.queues:
        yield Problem("federation", "is set, and without `queues` there is nothing to sign in for")


def _idle(settings: StackSettings) -> Iterator[Problem]:
    """Find keys that would do nothing."""
    if settings.uses_google:
        return
    idle = {
        "access": settings.access != AccessSettings(),
        "alerts": settings.alerts is not None,
        "impersonate": settings.impersonate is not None,
        "deployer": settings.deployer is not None,
    }
    for key, is_set in idle.items():
        if is_set:
            yield Problem(key, "is set, and nothing of Google is in this stack", "leave it out")


_RULES: Final = (
    _place,
    _regions,
    _buckets,
    _heads,
    _subnet,
    _queues,
    _secrets,
    _registries,
    find_key_problems,
    _kubernetes_clusters,
    _pipeline,
    _workload_identity,
    _idle,
)


# --- facts that the rules share


def list_regions(settings: StackSettings) -> Iterator[tuple[str, str]]:
    """Yield the path and the region of each setting that names one, besides the stack's own."""
    for part in ("queues", "registries", "secrets"):
        for name, its in getattr(settings, part).items():
            yield from ((f"{part}.{name}.regions[{index}]", each) for index, each in enumerate(its.regions))
    for name, registry in settings.registries.items():
        yield from ((f"registries.{name}.existing.{each}", each) for each in registry.existing)


def made_repository_urls(settings: StackSettings, registry: str) -> set[str]:
    """`REGION-docker.pkg.dev/PROJECT/NAME` of every repository that the stack makes, caches included."""
    its = settings.registries[registry]
    names = Names(stack=settings.stack, project=settings.project)
    repositories = {its.repository or names.repository(registry)}
    if its.pull_through:
        repositories.add(names.repository(f"{registry}-cache"))
    regions = [region for region in its.made_regions(settings.region or "") if region]
    project = image_path(settings.project or "")
    return {f"{region}-docker.pkg.dev/{project}/{name}" for region in regions for name in repositories}


def repository_urls(settings: StackSettings) -> set[str]:
    """URLs of all repositories that the stack makes or refers to."""
    found = {url for registry in settings.registries for url in made_repository_urls(settings, registry)}
    for registry in settings.registries.values():
        for path in registry.existing.values():
            if matched := REPOSITORY.fullmatch(path):
                found.add(f"{matched['region']}-docker.pkg.dev/{image_path(matched['project'])}/{matched['name']}")
    return found


def _zone_hint(settings: StackSettings) -> str | None:
    families = {
        found["family"]
        for pool in settings.pools.values()
        if (found := ACCELERATOR.fullmatch(pool.accelerator)) and found["family"] in catalog.TPU_FAMILIES
    }
    zones = {zone for family in families for zone in catalog.TPU_FAMILIES[family].zones}
    fitting = sorted(zone for zone in zones if catalog.region_of(zone) == settings.region)
    return f"{' or '.join(fitting)} has the pools' accelerators" if fitting else None


def _region_problems(region: str, path: str) -> Iterator[Problem]:
    if not REGION.fullmatch(region):
        parent = catalog.region_of(region)
        hint = f"that is a zone; its region is `{parent}`" if REGION.fullmatch(parent) else None
        yield wrong(path, region, "a region such as `us-west4`", hint or suggest(region, catalog.REGIONS))
