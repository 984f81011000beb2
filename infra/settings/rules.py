"""The rules about single settings beyond their types: ranges, syntax, and keys that belong together in one value.

A value is judged by itself, so that a component is as strict alone as in a stack. `stack_rules` has the rules about
parts of a stack that have to fit together.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from infra.gcp import catalog
from infra.naming import OWN_LABELS
from infra.settings.kubernetes_rules import judge_claim, judge_cluster, judge_namespace
from infra.settings.model import (
    AccessSettings,
    AlertSettings,
    BudgetSettings,
    Capacity,
    CiSettings,
    ClaimSettings,
    HeadSettings,
    KubernetesSettings,
    NamespaceSettings,
    NetworkSettings,
    Overrides,
    PoolSettings,
    QueueSettings,
    RecordsSettings,
    RegistrySettings,
    Role,
    SecretSettings,
    Settings,
)
from infra.settings.typed import wrong
from runtime.schema import Problem, join, suggest

DAY_S: Final = 86_400
MAX_NODES: Final = 1024
SMALLEST_SUBNET: Final = 21
GOOGLES_ADDRESSES: Final = 4
"""Addresses of every subnet that Google keeps: network, gateway, last but one, broadcast."""

_NAME: Final = re.compile(r"[a-z](?:[a-z0-9-]{0,38}[a-z0-9])?")
_NAME_RULE: Final = "lower case letters, digits and dashes, a letter first, 40 at most"
_PROJECT: Final = re.compile(r"[a-z][a-z0-9-]{4,28}[a-z0-9]")
_LABEL_KEY: Final = re.compile(r"[a-z](?:[a-z0-9_-]{0,61}[a-z0-9])?")
_LABEL_VALUE: Final = re.compile(r"(?:[a-z0-9](?:[a-z0-9_-]{0,61}[a-z0-9])?)?")
_EMAIL: Final = re.compile(r"[^@\s:]+@[a-z0-9-]+(?:\.[a-z0-9-]+)+", re.IGNORECASE)
_MEMBER: Final = re.compile(r"(?:group|user):(?P<email>.+)|domain:(?P<domain>.+)")
_DOMAIN: Final = re.compile(r"[a-z0-9-]+(?:\.[a-z0-9-]+)+", re.IGNORECASE)
_SERVICE_ACCOUNT: Final = re.compile(r"[a-z][a-z0-9-]{4,28}[a-z0-9]@[a-z0-9.-]+\.iam\.gserviceaccount\.com")
SUBNET: Final = re.compile(
    r"(?:https://www\.googleapis\.com/compute/v1/)?projects/[a-z0-9.:-]+/regions/(?P<region>[a-z0-9-]+)/subnetworks/[a-z0-9-]+"
)
_NETWORK: Final = re.compile(
    r"(?:https://www\.googleapis\.com/compute/v1/)?projects/[a-z0-9.:-]+/global/networks/[a-z0-9-]+"
)
REPOSITORY: Final = re.compile(
    r"projects/(?P<project>[a-z0-9.:-]+)/locations/(?P<region>[a-z0-9-]+)/repositories/(?P<name>[a-z][a-z0-9-]*)"
)
_SECRET: Final = re.compile(r"projects/[a-z0-9.:-]+/secrets/[A-Za-z0-9_-]{1,255}")
_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9_-]{1,61}[a-z0-9]")
IMAGE: Final = re.compile(r"(?P<name>[a-z0-9.-]+(?::\d+)?(?:/[a-z0-9._-]+)+)@sha256:[0-9a-f]{64}")
_BOOT_IMAGE: Final = re.compile(
    r"(?:https://www\.googleapis\.com/compute/v1/)?projects/(?P<project>[a-z0-9.:-]+)/global/images/(?P<name>[a-z][a-z0-9-]*)"
)
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TAKEN_VARIABLES: Final = frozenset(
    {"PATH", "HOME", "USER", "SHELL", "PWD", "LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONPATH"}
)
ACCELERATOR: Final = re.compile(r"(?P<family>v\d+[a-z]*)-(?P<size>[1-9]\d*)")
_RUNTIME_VERSION: Final = re.compile(r"(?:tpu|v2)-[a-z0-9][a-z0-9.-]*")
_MACHINE: Final = re.compile(r"(?P<family>[a-z]\d+[a-z]*)-(?:[a-z]+-\d+[a-z-]*|custom-\d+-\d+(?:-ext)?)")
_CI_POOL: Final = re.compile(r"projects/(?P<number>[^/]+)/locations/global/workloadIdentityPools/[a-z0-9-]{4,32}")
_BILLING: Final = re.compile(r"[0-9A-F]{6}-[0-9A-F]{6}-[0-9A-F]{6}")
_PRIVATE: Final = tuple(
    ipaddress.ip_network(each) for each in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10")
)
_DOCKERS: Final = ipaddress.ip_network("172.17.0.0/16")

READERS_OF: Final[Mapping[Role, str]] = {
    Role.WORKER: "queues",
    Role.SUBMITTER: "queues",
    Role.PUSHER: "registries",
    Role.REAPER: "heads",
}
"""Role → the part of a stack that needs an account of that role."""


def find_own_problems(value: object, path: str) -> list[Problem]:
    """Judge `value` alone, without the settings that lie in it."""
    rule = _RULES.get(type(value))
    return list(rule(value, path)) if rule else []


def _stack(settings: Settings, path: str) -> Iterator[Problem]:
    if settings.project is not None and not _PROJECT.fullmatch(settings.project):
        numeric = settings.project.isdigit()
        yield wrong(
            join(path, "project"),
            settings.project,
            "a project's id: 6 to 30 lower case letters, digits and dashes",
            hint="that is its number; `gcloud projects describe` prints the id" if numeric else None,
        )
    yield from _label_problems(settings.labels, join(path, "labels"))
    if settings.impersonate is not None and not _SERVICE_ACCOUNT.fullmatch(settings.impersonate):
        yield wrong(
            join(path, "impersonate"), settings.impersonate, "a service account, `NAME@PROJECT.iam.gserviceaccount.com`"
        )
    named = {
        "queues": settings.queues,
        "registries": settings.registries,
        "secrets": settings.secrets,
        "heads": settings.heads,
        "kubernetes": settings.kubernetes,
    }
    for part, members in named.items():
        yield from _name_problems(members, join(path, part))


def _network(network: NetworkSettings, path: str) -> Iterator[Problem]:
    where = join(path, "cidr")
    try:
        cidr = ipaddress.ip_network(network.cidr)
    except ValueError:
        yield wrong(where, network.cidr, "an IPv4 range whose host bits are zero, such as `10.64.0.0/20`")
        return
    if cidr.version != 4 or not any(cidr.subnet_of(each) for each in _PRIVATE if each.version == cidr.version):
        private = ", ".join(str(each) for each in _PRIVATE)
        yield wrong(where, network.cidr, f"a private IPv4 range, within {private}")
    elif cidr.prefixlen > SMALLEST_SUBNET:
        yield wrong(where, network.cidr, "at least a /21: 1,024 nodes and a head have to fit")
    elif cidr.overlaps(_DOCKERS):
        yield wrong(where, network.cidr, f"a range that does not overlap {_DOCKERS}, which containers on the head use")
    if network.subnet is not None and not SUBNET.fullmatch(network.subnet):
        yield wrong(join(path, "subnet"), network.subnet, "a self-link, `projects/P/regions/R/subnetworks/N`")
    if network.network is not None and network.subnet is None:
        yield Problem(path=join(path, "network"), message="is set without `subnet`", hint="name the subnet as well")
    elif network.network is not None and not _NETWORK.fullmatch(network.network):
        yield wrong(join(path, "network"), network.network, "a self-link, `projects/P/global/networks/N`")


def _queue(queue: QueueSettings, path: str) -> Iterator[Problem]:
    yield from _range(queue, path, "ack_deadline_s", 10, 600)
    yield from _range(queue, path, "max_delivery_attempts", 5, 100)
    yield from _range(queue, path, "retention_s", 600, 31 * DAY_S)
    yield from _range(queue, path, "min_backoff_s", 0, 600)
    yield from _range(queue, path, "max_backoff_s", 0, 600)
    if queue.min_backoff_s > queue.max_backoff_s:
        yield wrong(join(path, "min_backoff_s"), queue.min_backoff_s, f"at most `max_backoff_s`, {queue.max_backoff_s}")


def _records(records: RecordsSettings, path: str) -> Iterator[Problem]:
    if records.bucket is not None and (
        not _BUCKET.fullmatch(records.bucket) or re.match("goog|.*google", records.bucket)
    ):
        yield wrong(
            join(path, "bucket"),
            records.bucket,
            "3 to 63 lower case letters, digits, dashes, underscores, not Google's name",
        )
    if records.soft_delete_days != 0 and not 7 <= records.soft_delete_days <= 90:
        yield wrong(join(path, "soft_delete_days"), records.soft_delete_days, "0, or 7 to 90")
    yield from _range(records, path, "logs_days", 1, 3650)
    yield from _range(records, path, "notes_days", 1, 3650)


def _registry(registry: RegistrySettings, path: str) -> Iterator[Problem]:
    if registry.repository is not None and not re.fullmatch(r"[a-z](?:[a-z0-9-]{0,61}[a-z0-9])?", registry.repository):
        yield wrong(join(path, "repository"), registry.repository, "lower case letters, digits and dashes, 63 at most")
    yield from _range(registry, path, "keep_days", 1, 3650)
    yield from _range(registry, path, "keep_newest", 1, 1000)
    if registry.pull_through is not None and registry.pull_through not in catalog.PULL_THROUGH_HOSTS:
        hosts = sorted(catalog.PULL_THROUGH_HOSTS)
        yield wrong(
            join(path, "pull_through"),
            registry.pull_through,
            f"one of {', '.join(hosts)}",
            suggest(registry.pull_through, hosts),
        )
    yield from _repeated(registry.regions, join(path, "regions"))
    for region, repository in registry.existing.items():
        where = join(path, f"existing.{region}")
        found = REPOSITORY.fullmatch(repository)
        if not found:
            yield wrong(where, repository, "`projects/P/locations/R/repositories/N`")
        elif found["region"] != region:
            yield wrong(where, repository, f"a repository in {region}")


def _secret(secret: SecretSettings, path: str) -> Iterator[Problem]:
    where = join(path, "env")
    if not _VARIABLE.fullmatch(secret.env):
        yield wrong(where, secret.env, "the name of a variable: letters, digits and underscores, no digit first")
    elif secret.env in _TAKEN_VARIABLES or secret.env.startswith("RUNTIME_"):
        yield wrong(where, secret.env, "a variable that neither the system nor the runtime sets itself")
    for index, role in enumerate(secret.readers):
        if role not in READERS_OF:
            yield wrong(
                f"{join(path, 'readers')}[{index}]",
                role.value,
                f"one of {', '.join(each.value for each in READERS_OF)}",
                hint="a cluster reads what its head's `environment` names",
            )
    yield from _repeated(secret.readers, join(path, "readers"))
    yield from _repeated(secret.regions, join(path, "regions"))
    if secret.existing is not None:
        if not _SECRET.fullmatch(secret.existing):
            yield wrong(join(path, "existing"), secret.existing, "`projects/P/secrets/N`, without a version")
        if secret.regions:
            yield Problem(
                path=join(path, "regions"),
                message="is set beside `existing`, and the stack that owns the secret says where it is kept",
                hint="leave it out",
            )


def _head(head: HeadSettings, path: str) -> Iterator[Problem]:
    if not IMAGE.fullmatch(head.image):
        yield wrong(
            join(path, "image"),
            head.image,
            "`HOST/PROJECT/REPOSITORY/NAME@sha256:` and 64 hex digits",
            hint="`runtime image push` prints the digest; write 64 zeros until there is one",
        )
    yield from _machine_problems(head.machine_type, join(path, "machine_type"))
    yield from _range(head, path, "disk_gb", 50, 65_536)
    yield from _range(head, path, "idle_minutes", 1, 1440)
    yield from _boot_image_problems(head.boot_image, join(path, "boot_image"))
    yield from _name_problems(head.pools, join(path, "pools"))
    yield from _repeated(head.environment, join(path, "environment"))


def _machine_problems(machine_type: str, where: str) -> Iterator[Problem]:
    found = _MACHINE.fullmatch(machine_type)
    if not found:
        yield wrong(where, machine_type, "a machine type such as `n2-standard-8`")
    elif found["family"] in catalog.ARM_FAMILIES:
        yield wrong(where, machine_type, "an x86 machine: the cluster image and the boot image are built for it")
    elif found["family"] not in catalog.X86_FAMILIES:
        families = sorted(catalog.X86_FAMILIES)
        yield wrong(
            where, machine_type, f"a machine of the families {', '.join(families)}", suggest(found["family"], families)
        )


def _boot_image_problems(image: str, where: str) -> Iterator[Problem]:
    allowed = "one version of an image, `projects/P/global/images/NAME`"
    found = _BOOT_IMAGE.fullmatch(image)
    if "/family/" in image or (
        found and found["project"] == "debian-cloud" and not re.search(r"-v\d{8}$", found["name"])
    ):
        yield wrong(where, image, allowed, hint="a family would replace the head on the day it gets a new version")
    elif not found:
        yield wrong(where, image, allowed)


def _pool(pool: PoolSettings, path: str) -> Iterator[Problem]:
    yield from _accelerator_problems(pool.accelerator, join(path, "accelerator"))
    yield from _software_problems(pool, join(path, "runtime_version"))
    if pool.capacity is Capacity.RESERVED:
        yield Problem(
            path=join(path, "capacity"),
            message="is `reserved`, allowed are preemptible, spot, on_demand: Ray's autoscaler makes no reserved nodes",
            hint="reserved nodes join a running cluster by hand, outside its pools",
        )
    if pool.reservation is not None:
        yield Problem(
            path=join(path, "reservation"),
            message=f"is `{pool.reservation}`, and Ray's autoscaler makes no reserved nodes",
            hint="leave it out: reserved nodes join a running cluster by hand, outside its pools",
        )
    yield from _range(pool, path, "min", 0, MAX_NODES)
    yield from _range(pool, path, "max", 0, MAX_NODES)
    yield from _range(pool, path, "cpus", 1, 1024)
    if pool.min > pool.max:
        yield wrong(join(path, "min"), pool.min, f"at most `max`, {pool.max}")


def _accelerator_problems(accelerator: str, where: str) -> Iterator[Problem]:
    found = ACCELERATOR.fullmatch(accelerator)
    name, _, size_text = accelerator.rpartition("-")
    alias = catalog.FAMILY_ALIASES.get(name.lower())
    families = sorted(catalog.TPU_FAMILIES)
    nearest: str | None
    if alias or not found or found["family"] not in catalog.TPU_FAMILIES:
        nearest = f"did you mean `{alias}-{size_text}`?" if alias else suggest(name or accelerator, families)
        yield wrong(where, accelerator, f"`FAMILY-N` with one of the families {', '.join(families)}", nearest)
        return
    family, size = catalog.TPU_FAMILIES[found["family"]], int(found["size"])
    if size in family.single_host:
        return
    sizes = ", ".join(f"{found['family']}-{each}" for each in family.single_host)
    if size >= family.pod_sizes_from:
        yield Problem(
            path=where,
            message=f"is `{accelerator}`, a slice of several hosts, and Ray's autoscaler cannot handle those;"
            f" allowed are {sizes}",
            hint="larger slices join a running cluster by hand, outside its pools",
        )
    else:
        yield wrong(where, accelerator, sizes)


def _software_problems(pool: PoolSettings, where: str) -> Iterator[Problem]:
    found = ACCELERATOR.fullmatch(pool.accelerator)
    family = found["family"] if found else None
    known = catalog.TPU_FAMILIES.get(family or "")
    hint = f"`{known.runtime_version}` is the usual one for {family}" if known else None
    if not _RUNTIME_VERSION.fullmatch(pool.runtime_version):
        listed = "a TPU software version, as `gcloud compute tpus tpu-vm versions list` prints them"
        yield wrong(where, pool.runtime_version, listed, hint)
        return
    made_for = catalog.software_family(pool.runtime_version)
    if known and made_for and made_for != family:
        yield Problem(
            path=where, message=f"is `{pool.runtime_version}`, which is for {made_for}, not {family}", hint=hint
        )


def _access(access: AccessSettings, path: str) -> Iterator[Problem]:
    for key in ("operators", "researchers"):
        members: tuple[str, ...] = getattr(access, key)
        for index, member in enumerate(members):
            where = f"{join(path, key)}[{index}]"
            if member in ("allUsers", "allAuthenticatedUsers"):
                yield Problem(path=where, message=f"is `{member}`, which is everybody", hint="name a group")
                continue
            found = _MEMBER.fullmatch(member)
            right = found and (
                _EMAIL.fullmatch(found["email"]) if found["email"] else _DOMAIN.fullmatch(found["domain"])
            )
            if not right:
                hint = f"did you mean `group:{member}`?" if _EMAIL.fullmatch(member) else None
                yield wrong(where, member, "`group:EMAIL`, `user:EMAIL` or `domain:DOMAIN`", hint)
        yield from _repeated(members, join(path, key))
    if not access.project_grants and not (access.operators or access.researchers):
        yield Problem(
            path=join(path, "project_grants"),
            message="is `false`, and there is nobody whose grants another stack could make",
            hint="name `operators` or `researchers`, or leave it out",
        )


def _ci(ci: CiSettings, path: str) -> Iterator[Problem]:
    if not re.fullmatch(r"[A-Za-z0-9-]+/[A-Za-z0-9._-]+", ci.repository):
        yield wrong(join(path, "repository"), ci.repository, "`owner/name`")
    for key in ("repository_id", "owner_id"):
        if getattr(ci, key) <= 0:
            hint = f"`gh api repos/{ci.repository} --jq {'.id' if key == 'repository_id' else '.owner.id'}` prints it"
            yield wrong(join(path, key), getattr(ci, key), "a positive number", hint)
    if not re.fullmatch(r"refs/(?:heads|tags)/[^\s~^:?*\[\\]+", ci.ref):
        yield wrong(join(path, "ref"), ci.ref, "`refs/heads/BRANCH`", hint=f"did you mean `refs/heads/{ci.ref}`?")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9 ._-]{0,254}", ci.environment):
        yield wrong(join(path, "environment"), ci.environment, "the name of a protected environment")
    if ci.pool is not None:
        found = _CI_POOL.fullmatch(ci.pool)
        if not found or not found["number"].isdigit():
            advice = "the project's number, not its id: `gcloud projects describe` prints it" if found else None
            allowed = "`projects/NUMBER/locations/global/workloadIdentityPools/ID`"
            yield wrong(join(path, "pool"), ci.pool, allowed, advice)


def _alerts(alerts: AlertSettings, path: str) -> Iterator[Problem]:
    if not alerts.emails:
        yield Problem(path=join(path, "emails"), message="is empty: alerts would reach nobody")
    for index, email in enumerate(alerts.emails):
        if not _EMAIL.fullmatch(email):
            yield wrong(f"{join(path, 'emails')}[{index}]", email, "an e-mail address")
    yield from _range(alerts, path, "oldest_task_days", 1, 30)


def _budget(budget: BudgetSettings, path: str) -> Iterator[Problem]:
    if not _BILLING.fullmatch(budget.billing_account):
        yield wrong(join(path, "billing_account"), budget.billing_account, "`XXXXXX-XXXXXX-XXXXXX` in hex digits")
    if budget.monthly <= 0:
        yield wrong(join(path, "monthly"), budget.monthly, "a positive number")
    if not re.fullmatch(r"[A-Z]{3}", budget.currency):
        yield wrong(join(path, "currency"), budget.currency, "three capital letters, such as `USD`")


def _overrides(overrides: Overrides, path: str) -> Iterator[Problem]:
    for family, zones in overrides.tpu_zones.items():
        where = join(path, f"tpu_zones.{family}")
        if family not in catalog.TPU_FAMILIES:
            alias = catalog.FAMILY_ALIASES.get(family)
            hint = f"did you mean `{alias}`?" if alias else suggest(family, catalog.TPU_FAMILIES)
            yield wrong(where, family, f"one of the families {', '.join(sorted(catalog.TPU_FAMILIES))}", hint)
        for index, zone in enumerate(zones):
            if not re.fullmatch(r"[a-z]+-[a-z]+\d+-[a-z0-9]+", zone):
                yield wrong(f"{where}[{index}]", zone, "a zone such as `us-west4-a`")
    for index, region in enumerate(overrides.regions):
        if not re.fullmatch(r"[a-z]+-[a-z]+\d+", region):
            yield wrong(f"{join(path, 'regions')}[{index}]", region, "a region such as `us-west4`")


_RULES: Final[Mapping[type, Callable[[Any, str], Iterator[Problem]]]] = {
    Settings: _stack,
    NetworkSettings: _network,
    QueueSettings: _queue,
    RecordsSettings: _records,
    RegistrySettings: _registry,
    SecretSettings: _secret,
    HeadSettings: _head,
    PoolSettings: _pool,
    KubernetesSettings: judge_cluster,
    NamespaceSettings: judge_namespace,
    ClaimSettings: judge_claim,
    AccessSettings: _access,
    CiSettings: _ci,
    AlertSettings: _alerts,
    BudgetSettings: _budget,
    Overrides: _overrides,
}


# --- what rules share


def _range(value: object, path: str, key: str, least: int, most: int) -> Iterator[Problem]:
    number = getattr(value, key)
    if not least <= number <= most:
        yield Problem(path=join(path, key), message=f"is {number:,}, allowed are {least:,} to {most:,}")


def _name_problems(members: Mapping[str, object], path: str) -> Iterator[Problem]:
    for name in members:
        if not _NAME.fullmatch(name):
            readable = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
            hint = f"did you mean `{readable}`?" if _NAME.fullmatch(readable) else None
            yield Problem(path=join(path, name), message=f"is no name, allowed are {_NAME_RULE}", hint=hint)


def _label_problems(labels: Mapping[str, str], path: str) -> Iterator[Problem]:
    for key, value in labels.items():
        where = join(path, key)
        if key in OWN_LABELS:
            yield Problem(path=where, message="is a label that every resource gets from us", hint="choose another key")
        elif key.startswith(("goog", "ray-", "pulumi")):
            yield Problem(path=where, message="is a key that Google, Ray or Pulumi keeps for itself")
        elif not _LABEL_KEY.fullmatch(key):
            yield Problem(
                path=where,
                message="is no label key, allowed are 63 lower case letters, digits, `-` and `_`, a letter first",
            )
        if not _LABEL_VALUE.fullmatch(value):
            yield wrong(where, value, "at most 63 lower case letters, digits, `-` and `_`, no sign at the ends")
    if len(labels) > 60:
        yield Problem(path=path, message=f"has {len(labels)} labels, allowed are 60")


def _repeated(values: tuple[str, ...], path: str) -> Iterator[Problem]:
    for value, count in Counter(values).items():
        if count > 1:
            yield Problem(path=path, message=f"has `{value}` {count} times")
