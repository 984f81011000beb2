"""The rules about single settings beyond their types: ranges, syntax, and keys that belong together in one value.

Each rule judges one value alone, so that a component is as strict in another program as in a stack. `stack_rules` has the
rules about the parts together.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from infra.gcp import catalog
from infra.naming import OWN_LABELS
from infra.settings.cluster_rules import find_claim_problems, find_cluster_problems, find_namespace_problems
from infra.settings.forms import (
    IMAGE_HOST,
    IMAGE_PATH,
    LARGEST,
    LINK,
    PRIVATE,
    REPOSITORY,
    Choice,
    Form,
    find_declared_problems,
    is_within,
    parse_range,
)
from infra.settings.key_rules import find_form_problems
from infra.settings.machine_rules import (
    VARIABLE,
    find_container_problems,
    find_cpu_problems,
    find_label_problems,
    find_machine_problems,
    find_shm_problems,
)
from infra.settings.model import (
    AccessSettings,
    AlertSettings,
    BucketSettings,
    CiSettings,
    ClaimSettings,
    ContainerSettings,
    HeadSettings,
    IssuerSettings,
    KubernetesAccess,
    NamespaceSettings,
    NetworkSettings,
    QueueSettings,
    RegistrySettings,
    RepositorySettings,
    Role,
    SecretSettings,
    StackSettings,
    TpuPoolSettings,
)
from infra.settings.problems import wrong
from runtime.outputs import PROJECT_ID, is_free_variable
from runtime.schema import Problem, join, suggest
from runtime.tpu_shapes import find_shape

SMALLEST_SUBNET: Final = 29
"""https://cloud.google.com/vpc/docs/subnets#valid-ranges"""
LEAST_HEAD_GIB: Final = 4
"""Ray 2.60's processes took 0.7 GiB on a head without a node, and its object store takes 30 %; the system, Docker and the
drivers of jobs have the rest."""
GOOGLES_ADDRESSES: Final = 4
"""Addresses that Google reserves in every subnet: network, gateway, last but one, broadcast."""

_NAME: Final = re.compile(r"[a-z](?:[a-z0-9-]{0,38}[a-z0-9])?")
_NAME_RULE: Final = "lower case letters, digits and dashes, a letter first, 40 at most"
_LABEL_KEY: Final = re.compile(r"[a-z](?:[a-z0-9_-]{0,61}[a-z0-9])?")
_LABEL_VALUE: Final = re.compile(r"(?:[a-z0-9](?:[a-z0-9_-]{0,61}[a-z0-9])?)?")
_EMAIL: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9.!#$%&'+/=?^_{|}~-]*@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+")
PUBLIC_DOMAINS: Final = frozenset({"gmail.com", "googlemail.com"})
"""Domains in which everybody can have an account."""
_DOMAIN: Final = r"[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+"
PERSON: Final = re.compile(rf"(?:group|user):{_EMAIL.pattern}|domain:(?P<domain>{_DOMAIN})")
_VALUE: Final = r"""[^\s*'"\\]+"""
_POOL: Final = (
    r"iam\.googleapis\.com/"
    r"(?:projects/[0-9]+/locations/global/workloadIdentityPools|locations/global/workforcePools)/[a-z0-9.-]+"
)
MEMBER: Final = re.compile(
    rf"{PERSON.pattern}|serviceAccount:[a-z0-9][a-z0-9.-]*@[a-z0-9.-]+\.gserviceaccount\.com"
    r"|serviceAccount:[a-z0-9.:-]+\.svc\.id\.goog\[[a-z0-9-]+/[a-z0-9.-]+\]"
    rf"|principal://{_POOL}/subject/{_VALUE}"
    rf"|principalSet://{_POOL}/(?:group|namespace|attribute\.[a-z0-9_]+|kubernetes\.[a-z.]+)/{_VALUE}"
)
"""An IAM principal, and no whole pool. https://cloud.google.com/iam/docs/principal-identifiers"""
DEPLOYED_PARTS: Final = (*CiSettings(repositories={}).deploys, "kms_key")
"""Keys of what a pipeline can deploy."""
AUDIENCES: Final = ("workers", "clusters", "operators", "researchers")
"""Words for members of a stack: the account `worker` and its like, heads and nodes, people."""
IMAGE: Final = re.compile(
    rf"(?P<name>(?!.*docker\.pkg\.dev(?:/[^/]+){{1,2}}@){IMAGE_HOST}{IMAGE_PATH}+)@sha256:[0-9a-f]{{64}}"
)
BOOT_IMAGE: Final = re.compile(rf"{LINK}/global/images/(?P<name>[a-z](?:[a-z0-9-]{{0,61}}[a-z0-9])?)")
_DATED_IMAGES: Final = ("debian-cloud", "rocky-linux-cloud", "ubuntu-os-cloud")
"""Projects whose images end in their date, and whose families do not."""
ACCELERATOR: Final = re.compile(r"(?P<family>(?:v|tpu)[0-9]+[a-z]*)-(?P<size>[1-9][0-9]{0,5})")
_RUNTIME_VERSION: Final = re.compile(r"[a-z][a-z0-9]*-[a-z0-9][a-z0-9.-]*")
_MACHINE: Final = re.compile(
    r"[a-z][0-9]+[a-z]*-(?:[a-z]+-[0-9]+[a-z-]*|custom-[1-9][0-9]*-[1-9][0-9]*(?:-ext)?|micro|small|medium)"
)
REGION: Final = re.compile(r"[a-z]+-[a-z]+[0-9]+")
_OWNER_NAME: Final = re.compile(r"[A-Za-z0-9-]+/[A-Za-z0-9._-]+")
_REF_PART: Final = r"(?!\.)[^\x00-\x20\x7f-\xa0~^:?*\[\\'/]+(?<!\.)(?<!\.lock)"
_REF: Final = re.compile(rf"(?!.*(?:\.\.|@\{{))refs/(?:heads|tags)/{_REF_PART}(?:/{_REF_PART})*")
"""What Git takes, without quotes and signs that stand for other names. https://git-scm.com/docs/git-check-ref-format"""
_DOCKERS: Final = ipaddress.ip_network("172.17.0.0/16")

READERS_OF: Final[Mapping[Role, str]] = {
    Role.WORKER: "queues",
    Role.SUBMITTER: "queues",
    Role.PUSHER: "registries",
    Role.REAPER: "heads",
}
"""Role → the part of a stack that needs its account."""


def find_own_problems(value: object, path: str) -> list[Problem]:
    """Judge `value` alone, without nested settings."""
    rule = _RULES.get(type(value))
    return [*find_declared_problems(value, path), *(rule(value, path) if rule else ())]


def _stack(settings: StackSettings, path: str) -> Iterator[Problem]:
    is_number = settings.project is not None and settings.project.isdecimal()
    hint = "that is its number; `gcloud projects describe` prints the id" if is_number else None
    allowed = "a project's id: 6 to 30 lower case letters, digits and dashes"
    if settings.project is not None:
        yield from Form(PROJECT_ID, allowed, hint).problems(settings.project, join(path, "project"))
    yield from _label_problems(settings.labels, join(path, "labels"))
    yield from find_form_problems(settings, path)
    for part in ("federation", "queues", "buckets", "registries", "secrets", "heads", "kubernetes"):
        yield from _name_problems(getattr(settings, part), join(path, part))


def _network(network: NetworkSettings, path: str) -> Iterator[Problem]:
    where = join(path, "cidr")
    cidr = parse_range(network.cidr)
    if cidr is None or not is_within(cidr, PRIVATE):
        pass
    elif cidr.prefixlen > SMALLEST_SUBNET:
        yield wrong(where, network.cidr, f"at least a /{SMALLEST_SUBNET}: Google makes no smaller subnet")
    elif cidr.overlaps(_DOCKERS):
        yield wrong(where, network.cidr, f"a range that does not overlap {_DOCKERS}, which containers on the head use")
    if network.flow_logs and network.subnet is not None:
        yield Problem(
            join(path, "flow_logs"),
            "is set beside `subnet`, and its owner says what is logged there",
            "leave it out; `gcloud compute networks subnets update --enable-flow-logs` switches it on",
        )
    if network.nat_addresses and network.subnet is not None:
        yield Problem(join(path, "nat_addresses"), "is set beside `subnet`, whose owner makes its NAT")
    if network.network is not None and network.subnet is None:
        yield Problem(join(path, "network"), "is set without `subnet`", "name the subnet as well")


def _queue(queue: QueueSettings, path: str) -> Iterator[Problem]:
    if queue.min_backoff_s > queue.max_backoff_s:
        yield wrong(join(path, "min_backoff_s"), queue.min_backoff_s, f"at most `max_backoff_s`, {queue.max_backoff_s}")


def _bucket(bucket: BucketSettings, path: str) -> Iterator[Problem]:
    if bucket.existing is not None:
        for key in ("bucket", "delete_after_days"):
            if getattr(bucket, key):
                yield Problem(join(path, key), "is set beside `existing`, whose owner decides it")
    ages = bucket.delete_after_days
    for prefix, days in ages.items():
        where = join(path, f"delete_after_days.{prefix}")
        if not re.fullmatch("[^/].*/", prefix):
            yield wrong(where, prefix, "a prefix that ends in `/`, such as `tmp/`: objects under any other stay")
        if not 1 <= days <= 3650:
            yield wrong(where, days, "1 to 3,650")
        for outer in (each for each in ages if prefix.startswith(each) and ages[each] < days):
            yield Problem(
                where, f"is {days}, and all of `{outer}` is deleted after {ages[outer]}", "choose another prefix"
            )
    if not bucket.readers and not bucket.writers:
        yield Problem(
            path,
            "has neither `readers` nor `writers`: nobody could use it",
            "`writers: [workers, clusters, operators, researchers]` lets in all of the stack",
        )
    for key in ("readers", "writers"):
        members: tuple[str, ...] = getattr(bucket, key)
        for index, member in enumerate(members):
            where = f"{join(path, key)}[{index}]"
            if ":" in member:
                yield from _member_problems(member, where)
            elif member not in AUDIENCES:
                allowed = f"one of {', '.join(AUDIENCES)}, or an IAM principal"
                yield wrong(where, member, allowed, suggest(member, AUDIENCES))
    for member in sorted({*bucket.readers} & {*bucket.writers}):
        yield Problem(join(path, "readers"), f"has `{member}`, a writer", "writers read, too")


def _registry(registry: RegistrySettings, path: str) -> Iterator[Problem]:
    for region, repository in registry.existing.items():
        where = join(path, f"existing.{region}")
        found = REPOSITORY.fullmatch(repository)
        if not found:
            yield wrong(where, repository, "`projects/P/locations/R/repositories/N`")
        elif found["region"] != region:
            yield wrong(where, repository, f"a repository in {region}")


def _secret(secret: SecretSettings, path: str) -> Iterator[Problem]:
    where = join(path, "env")
    if not VARIABLE.fullmatch(secret.env):
        yield wrong(where, secret.env, "the name of a variable: letters, digits and underscores, no digit first")
    elif not is_free_variable(secret.env):
        yield wrong(where, secret.env, "a variable that neither the system nor the runtime sets or obeys")
    for index, role in enumerate(secret.readers):
        if role not in READERS_OF:
            yield wrong(
                f"{join(path, 'readers')}[{index}]",
                role.value,
                f"one of {', '.join(each.value for each in READERS_OF)}",
                hint="a cluster reads what its head's `environment` names",
            )
    if secret.attempts is not None and Role.WORKER not in secret.readers:
        yield Problem(
            join(path, "attempts"),
            f"is `{secret.attempts.value}`, and workers may not read the secret",
            "add `worker` to its `readers`, or leave `attempts` out",
        )
    if secret.existing is not None and secret.regions:
        yield Problem(
            join(path, "regions"),
            "is set beside `existing`, and the stack that owns the secret says where it is kept",
            "leave it out",
        )


def _head(head: HeadSettings, path: str) -> Iterator[Problem]:
    allowed = "`HOST/PROJECT/REPOSITORY/NAME@sha256:` and 64 hex digits"
    hint = "`runtime image push` prints the digest; write 64 zeros until there is one"
    yield from Form(IMAGE, allowed, hint).problems(head.image, join(path, "image"))
    yield from _machine_problems(head.machine_type, join(path, "machine_type"))
    yield from _boot_image_problems(head.boot_image, join(path, "boot_image"))
    yield from _name_problems(head.pools, join(path, "pools"))
    is_known = head.machine_type.partition("-")[0] in catalog.SERIES
    disks = catalog.find_series(head.machine_type).boot_disks if is_known else catalog.BOOT_DISKS
    if head.disk_type is not None:
        yield from Choice(disks).problems(head.disk_type, join(path, "disk_type"))
    yield from find_machine_problems(head, path)
    yield from _head_size_problems(head, path)


def _head_size_problems(head: HeadSettings, path: str) -> Iterator[Problem]:
    """Find what neither the head nor, if they inherit it, its nodes have room for."""
    memory_gib = catalog.find_memory_gib(head.machine_type)
    if memory_gib is not None:
        if memory_gib < LEAST_HEAD_GIB:
            seen = f"is `{head.machine_type}` with {memory_gib:g} GiB of memory, and Ray's head needs {LEAST_HEAD_GIB}"
            yield Problem(join(path, "machine_type"), seen, "the default, `n2-standard-8`, has 32")
        yield from find_shm_problems(head.container, path, head.machine_type, memory_gib)
    vcpus = catalog.count_vcpus(head.machine_type)
    if vcpus is not None:
        yield from find_cpu_problems(head.container, path, head.machine_type, vcpus)
    for name, pool in head.pools.items():
        inherits = pool.container.options is None
        where = path if inherits else join(path, f"pools.{name}")
        host = catalog.find_tpu_host(pool.accelerator)
        if host is not None and not (inherits and vcpus is not None and vcpus <= host.vcpus):
            yield from find_cpu_problems(
                head.container if inherits else pool.container, where, pool.accelerator, host.vcpus
            )


def _machine_problems(machine_type: str, where: str) -> Iterator[Problem]:
    if not _MACHINE.fullmatch(machine_type):
        yield wrong(where, machine_type, "a machine type such as `n2-standard-8`")
    elif catalog.find_series(machine_type).architecture != "X86_64":
        yield wrong(where, machine_type, "an x86 machine: TPU nodes are x86 machines, and run the same cluster image")


def _boot_image_problems(image: str, where: str) -> Iterator[Problem]:
    allowed = "one version of an image, `projects/P/global/images/NAME`"
    found = BOOT_IMAGE.fullmatch(image)
    if "/family/" in image or (
        found and found["project"] in _DATED_IMAGES and not re.search(r"-v[0-9]{8}$", found["name"])
    ):
        yield wrong(where, image, allowed, hint="a family would replace the head on the day it gets a new version")
    elif not found:
        yield wrong(where, image, allowed)
    elif catalog.is_arm_image(image):
        yield wrong(where, image, "an image for x86 machines", "the name without `arm64` is the one for x86")


def _pool(pool: TpuPoolSettings, path: str) -> Iterator[Problem]:
    yield from _accelerator_problems(pool, path)
    yield from _software_problems(pool, join(path, "runtime_version"))
    host = catalog.find_tpu_host(pool.accelerator)
    if pool.cpus is not None and not 1 <= pool.cpus <= (host.vcpus if host else LARGEST):
        most = f" to {host.vcpus}, the vCPUs of each host of `{pool.accelerator}`" if host else " or more"
        yield Problem(
            join(path, "cpus"),
            f"is {pool.cpus:,}, allowed are 1{most}",
            f"leave it out for half of them, {host.vcpus // 2}" if host else None,
        )
    if host is not None:
        yield from find_shm_problems(pool.container, path, pool.accelerator, host.memory_gib)
    if pool.min > pool.max:
        yield wrong(join(path, "min"), pool.min, f"at most `max`, {pool.max}")
    yield from _buffer_problems(pool, join(path, "buffer"))
    yield from find_machine_problems(pool, path)
    yield from find_label_problems(pool.labels, join(path, "labels"))


def _buffer_problems(pool: TpuPoolSettings, where: str) -> Iterator[Problem]:
    if not 0 <= pool.buffer <= pool.max:
        yield wrong(where, pool.buffer, f"0 to `max`, {pool.max}")
    elif pool.buffer and pool.min >= pool.max:
        yield Problem(
            where,
            f"is {pool.buffer}, and all nodes of the pool exist at all times: `min` is `max`, {pool.max}",
            "leave it out, or lower `min`",
        )


def _accelerator_problems(pool: TpuPoolSettings, path: str) -> Iterator[Problem]:
    where, families = join(path, "accelerator"), sorted(catalog.TPU_FAMILIES)
    name, _, size = pool.accelerator.rpartition("-")
    if alias := catalog.FAMILY_ALIASES.get(name.lower()):
        yield wrong(where, pool.accelerator, "the TPU API's own name", f"did you mean `{alias}-{size}`?")
        return
    if not ACCELERATOR.fullmatch(pool.accelerator):
        allowed = f"`FAMILY-N`, with a family such as {', '.join(families)}"
        yield wrong(where, pool.accelerator, allowed, suggest(name or pool.accelerator, families))
        return
    for key in ("min", "buffer") if count_hosts(pool) > 1 else ():
        if getattr(pool, key):
            yield Problem(
                join(path, key),
                f"is {getattr(pool, key)}, and slices of several hosts come and go with work: allowed is 0",
                f"write `{key}: 0`; `runtime cluster add` makes a slice that stays",
            )
    if catalog.find_tpu_host(pool.accelerator) is None and pool.cpus is None:
        family = catalog.TPU_FAMILIES.get(name)
        nearest = None if family else suggest(name, families)
        sizes = ", ".join(f"{name}-{each}" for each in family.hosts) if family else ", ".join(families)
        yield Problem(
            join(path, "cpus"),
            f"is not set, and the hosts of `{pool.accelerator}` are not known here; known are {sizes}",
            f"{nearest or ''} if Google has it: set `cpus` to what Ray may hand out on each host".lstrip(),
        )


def _software_problems(pool: TpuPoolSettings, where: str) -> Iterator[Problem]:
    family = pool.accelerator.rpartition("-")[0]
    known = catalog.TPU_FAMILIES.get(family)
    hint = f"`{known.runtime_version}` is the usual one for {family}" if known and known.runtime_version else None
    if not _RUNTIME_VERSION.fullmatch(pool.runtime_version):
        listed = "a TPU software version, as `gcloud compute tpus tpu-vm versions list` prints them"
        yield wrong(where, pool.runtime_version, listed, hint)
        return
    made_for = catalog.software_family(pool.runtime_version)
    if known and made_for and made_for != family:
        message = f"is `{pool.runtime_version}`, which is for {made_for}, not {family}"
        yield Problem(where, message, hint)


def _access(access: AccessSettings, path: str) -> Iterator[Problem]:
    for key in ("operators", "researchers", "workers"):
        members: tuple[str, ...] = getattr(access, key)
        for index, member in enumerate(members):
            yield from _member_problems(member, f"{join(path, key)}[{index}]", programs_only=key == "workers")
    for member in sorted({*access.operators} & {*access.researchers}):
        where = f"{join(path, 'researchers')}[{access.researchers.index(member)}]"
        yield Problem(where, f"is `{member}`, which `operators` has too", "operators have its rights")
    if access.project_grants is False and not (access.operators or access.researchers):
        yield Problem(
            join(path, "project_grants"),
            "is `false`, and there is nobody whose grants another stack could make",
            "name `operators` or `researchers`, or leave it out",
        )


def _member_problems(member: str, where: str, *, programs_only: bool = False) -> Iterator[Problem]:
    kind, _, rest = member.partition(":")
    address = rest if kind == "domain" else rest.rpartition("@")[2]
    if member in ("allUsers", "allAuthenticatedUsers") or (address.lower() in PUBLIC_DOMAINS and kind == "domain"):
        yield Problem(where, f"is `{member}`, which is everybody", "name a person or a group")
    elif kind in ("user", "group") and rest.endswith(".gserviceaccount.com"):
        yield wrong(where, member, "an account of a program as such", f"write `serviceAccount:{rest}`")
    elif not MEMBER.fullmatch(member):
        hint = f"did you mean `group:{member}`?" if _EMAIL.fullmatch(member) else None
        if member.startswith("principalSet://") and member.endswith("/*"):
            hint = "that is every identity of the pool: name a `/group/…` or `/attribute.NAME/VALUE` of it"
        forms = ("serviceAccount:EMAIL", "principal://…/subject/…", "principalSet://…/group/…")
        people = () if programs_only else ("group:EMAIL", "user:EMAIL", "domain:DOMAIN")
        yield wrong(where, member, ", ".join(f"`{each}`" for each in (*people, *forms)), hint)
    elif programs_only and kind in ("group", "user", "domain"):
        hint = "people do a worker's work as `operators` or `researchers`"
        yield Problem(where, f"is `{member}`, which is no program", hint)
    elif "//" not in member and member != member.lower().replace("serviceaccount:", "serviceAccount:"):
        # Google's comparison knows no case: one of two spellings would take away what the other has.
        yield wrong(
            where, member, "an address in lower case, as Google compares them", f"write `{kind}:{rest.lower()}`"
        )


def _ci(ci: CiSettings, path: str) -> Iterator[Problem]:
    if not ci.repositories:
        yield Problem(join(path, "repositories"), "is empty: nothing could deploy", "name one")
    for name in ci.repositories:
        if not _OWNER_NAME.fullmatch(name):
            yield wrong(join(path, f"repositories.{name}"), name, "`owner/name`")
    for index, part in enumerate(ci.deploys):
        if part not in DEPLOYED_PARTS:
            where = f"{join(path, 'deploys')}[{index}]"
            yield wrong(where, part, f"one of {', '.join(DEPLOYED_PARTS)}", suggest(part, DEPLOYED_PARTS))


def _issuer(issuer: IssuerSettings, path: str) -> Iterator[Problem]:
    if not issuer.subjects:
        yield Problem(join(path, "subjects"), "is empty: nobody could sign in", "name one")
    if issuer.jwks is not None:
        yield from _jwks_problems(issuer.jwks, join(path, "jwks"))
    elif _INSIDE.match(issuer.issuer):
        message = f"is not set, and Google cannot fetch the keys of `{issuer.issuer}`"
        yield Problem(join(path, "jwks"), message, _JWKS_HINT)


_INSIDE: Final = re.compile(r"https://(?:[^/:]*\.(?:svc|local|internal)|[^./:]+)(?:[:/]|$)")
"""Addresses that only the machines of a cluster know."""
_JWKS_HINT: Final = "`kubectl get --raw /openid/v1/jwks` prints those of a cluster"


def _jwks_problems(text: str, where: str) -> Iterator[Problem]:
    try:
        keys = json.loads(text)["keys"]
        private = any({"d", "k"} & key.keys() for key in keys)
    except (ValueError, KeyError, TypeError, AttributeError):
        yield Problem(where, 'is no JSON Web Key Set, `{"keys": [{…}]}`', _JWKS_HINT)
        return
    if private:
        yield Problem(where, "has a private key, which nobody but the issuer needs", _JWKS_HINT)
    elif not keys:
        yield Problem(where, "has no key: no token could be verified", _JWKS_HINT)


def _repository_ids(repository: RepositorySettings, path: str) -> Iterator[Problem]:
    for key, query in (("repository_id", ".id"), ("owner_id", ".owner.id")):
        if not 0 < getattr(repository, key) <= LARGEST:
            hint = f"`gh api repos/OWNER/NAME --jq {query}` prints it"
            yield wrong(join(path, key), getattr(repository, key), f"a positive number, at most {LARGEST:,}", hint)
    meant = f"refs/heads/{repository.ref}"
    nearest = f"did you mean `{meant}`?" if _REF.fullmatch(meant) and not repository.ref.startswith("refs/") else None
    yield from Form(_REF, "`refs/heads/BRANCH`", nearest).problems(repository.ref, join(path, "ref"))


def _alerts(alerts: AlertSettings, path: str) -> Iterator[Problem]:
    if not alerts.emails and not alerts.channels:
        hint = "write at least one address or one of `channels`, or leave `alerts` out"
        yield Problem(join(path, "emails"), "is empty: alerts would reach nobody", hint)
    for index, email in enumerate(alerts.emails):
        if not _EMAIL.fullmatch(email):
            yield wrong(f"{join(path, 'emails')}[{index}]", email, "an e-mail address")


_RULES: Final[Mapping[type, Callable[[Any, str], Iterator[Problem]]]] = {
    StackSettings: _stack,
    NetworkSettings: _network,
    QueueSettings: _queue,
    BucketSettings: _bucket,
    RegistrySettings: _registry,
    SecretSettings: _secret,
    HeadSettings: _head,
    TpuPoolSettings: _pool,
    ContainerSettings: find_container_problems,
    KubernetesAccess: find_cluster_problems,
    NamespaceSettings: find_namespace_problems,
    ClaimSettings: find_claim_problems,
    AccessSettings: _access,
    IssuerSettings: _issuer,
    CiSettings: _ci,
    RepositorySettings: _repository_ids,
    AlertSettings: _alerts,
}


# --- shared by the rules


def _name_problems(members: Mapping[str, object], path: str) -> Iterator[Problem]:
    for name in members:
        if not _NAME.fullmatch(name):
            readable = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
            hint = f"did you mean `{readable}`?" if _NAME.fullmatch(readable) else None
            yield Problem(join(path, name), f"is no name, allowed are {_NAME_RULE}", hint)


def _label_problems(labels: Mapping[str, str], path: str) -> Iterator[Problem]:
    for key, value in labels.items():
        where = join(path, key)
        if key in OWN_LABELS:
            yield Problem(where, "is a label that every resource gets from us", "choose another key")
        elif key.startswith(("goog", "ray-", "pulumi")):
            yield Problem(where, "is a key that Google, Ray or Pulumi keeps for itself")
        elif not _LABEL_KEY.fullmatch(key):
            yield Problem(
                where, "is no label key, allowed are 63 lower case letters, digits, `-` and `_`, a letter first"
            )
        if not _LABEL_VALUE.fullmatch(value):
            yield wrong(where, value, "at most 63 lower case letters, digits, `-` and `_`, no sign at the ends")
    if len(labels) > 60:
        yield Problem(path, f"has {len(labels)} labels, allowed are 60")


def count_hosts(pool: TpuPoolSettings) -> int:
    """Return the machines of each node of a pool: Ray and Google count a slice of several as one node."""
    shape = find_shape(pool.accelerator)
    return shape[0] if shape else 1


def count_machines(settings: StackSettings) -> int:
    """Return the most machines that a stack may have at a time: its heads, and the hosts of their pools' maxima."""
    return sum(1 + count_tpu_hosts(head) for head in settings.heads.values())


def count_tpu_hosts(head: HeadSettings) -> int:
    """Return the most TPU hosts that a cluster may have at a time."""
    return sum(pool.max * count_hosts(pool) for pool in head.pools.values())
