"""A stack's settings: frozen values, every rule about them, and the only place that touches `pulumi.Config`.

The engine checks neither misspelt nor nested keys, so all of it happens here, over all keys, before a resource exists:
`parse_settings` takes what a stack file says and returns `Settings`, or raises one `InvalidSettings` that lists every
problem with the field, the value, what is allowed and a hint.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import StrEnum
from typing import Any, Final

from infra.settings.typed import Problem, Reader, decode, find_mistyped, hints_of, join, suggest
from runtime.errors import RequestRefused

NAMESPACE: Final = "research-runtime"
"""Prefix of our keys in a stack file, the same as the project's name."""


class Capacity(StrEnum):
    """How Google lends a TPU."""

    PREEMPTIBLE = "preemptible"
    SPOT = "spot"
    RESERVED = "reserved"
    ON_DEMAND = "on_demand"


class Role(StrEnum):
    """What an identity does; one service account each."""

    WORKER = "worker"
    """Serves queues: leases tasks, writes records, reads secrets that name it."""
    SUBMITTER = "submitter"
    """Puts tasks into queues; cannot take any."""
    HEAD = "head"
    """The Ray head: makes and removes TPU nodes."""
    NODE = "node"
    """A TPU node of a Ray cluster; what workers may do, and no more."""
    REAPER = "reaper"
    """Removes TPU nodes that Ray no longer sees."""
    PUSHER = "pusher"
    """Pushes images."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSettings:
    cidr: str = "10.64.0.0/20"
    """Range of the subnet, at least a /21; the sum of the pools' maxima has to fit into it."""
    subnet: str | None = None
    """Self-link of a subnet that exists already; then nothing of the network is made."""
    network: str | None = None
    """Self-link of the network of `subnet`; by default the one of the subnet's name, as Google names automatic ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSettings:
    ack_deadline_s: int = 60
    """10 to 600."""
    max_delivery_attempts: int = 100
    """5 to 100. Every negative acknowledgement counts, so the highest is the default."""
    retention_s: int = 2_678_400
    """600 to 2,678,400 (31 days); of the subscriptions and their dead letters."""
    min_backoff_s: int = 10
    max_backoff_s: int = 600
    exactly_once: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordsSettings:
    location: str | None = None
    """Region or multi-region; the stack's region by default."""
    bucket: str | None = None
    """Name of the bucket where the default one is taken; unique in the world."""
    soft_delete_days: int = 7
    """0, or 7 to 90."""
    logs_days: int = 90
    notes_days: int = 30
    """Logs and attempt notes age out; records, manifests and outputs never do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistrySettings:
    regions: tuple[str, ...] = ()
    """The stack's region by default."""
    repository: str | None = None
    """Name of the repository where the default one should not be."""
    keep_days: int = 30
    keep_newest: int = 16
    cleanup_dry_run: bool = False
    pull_through: str | None = None
    """Host of a public registry to cache beside the images: `docker.io`, or another that Google knows."""
    existing: Mapping[str, str] = field(default_factory=dict)
    """Region → `projects/P/locations/R/repositories/N` of another stack; then nothing is made for that region."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretSettings:
    env: str
    """Variable that carries it."""
    readers: tuple[Role, ...] = ()
    regions: tuple[str, ...] = ()
    """Where it is kept; everywhere by default."""
    existing: str | None = None
    """`projects/P/secrets/N` of another stack; then only the grants are made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    accelerator: str
    """`v4-8`, `v5litepod-1` …"""
    runtime_version: str
    """TPU software version, as `gcloud compute tpus tpu-vm versions list` prints them."""
    capacity: Capacity = Capacity.PREEMPTIBLE
    min: int = 4
    max: int = 1024
    cpus: int = 120
    """What Ray may hand out; a node has about twice as many, and Ray enforces nothing."""
    reservation: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSettings:
    image: str
    """Cluster image by digest: `HOST/PROJECT/REPOSITORY/NAME@sha256:…`."""
    machine_type: str = "n2-standard-8"
    disk_gb: int = 200
    boot_image: str = "projects/debian-cloud/global/images/debian-12-bookworm-v20260915"
    """A version, never a family: a family would replace the head on its own day."""
    pools: Mapping[str, PoolSettings] = field(default_factory=dict)
    environment: tuple[str, ...] = ()
    """Names of `secrets` that become variables of every process of the cluster."""
    idle_minutes: int = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimSettings:
    size: str
    """`1Ti`"""
    storage_class: str | None = None
    access_mode: str = "ReadWriteMany"
    existing_volume: str | None = None
    """Name of a PersistentVolume to bind to."""
    existing: bool = False
    """The claim is there already: use it, make nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceSettings:
    create: bool = True
    """False where a cluster's administrators made it and we have rights inside it only."""
    quota: Mapping[str, str] = field(default_factory=dict)
    """`requests.cpu: "64"`, `requests.nvidia.com/gpu: "16"`, `pods: "200"` …"""
    claims: Mapping[str, ClaimSettings] = field(default_factory=dict)
    image_pull_secret: str | None = None
    """Name of a secret in the namespace; its content is put there by hand."""
    egress_cidrs: tuple[str, ...] = ()
    """Beyond DNS and HTTPS to anywhere, where workers may connect to."""
    launchers: tuple[str, ...] = ()
    """Who may launch: `User:alice`, `Group:lab`, `ServiceAccount:NAMESPACE/NAME`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesSettings:
    context: str
    """In the kubeconfig of whoever runs `up`; its content never enters the state."""
    cluster_identifier: str
    """Stays when the address changes; another one means another cluster, and everything in it is made anew."""
    server: str
    namespaces: Mapping[str, NamespaceSettings] = field(default_factory=dict)
    slot_namespace: str | None = None
    """The one of `namespaces` whose Lease objects say which parts of GPUs are taken, for all of them; by default each
    keeps its own, which is right where no two of them use the same machines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessSettings:
    operators: tuple[str, ...] = ()
    """`group:…`, `user:…` or `domain:…`"""
    researchers: tuple[str, ...] = ()
    project_grants: bool = True
    """Whether this stack makes their grants that only the whole project has a place for. A grant is one and the same
    whoever makes it, so of several stacks of a project that name the same people one makes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CiSettings:
    repository: str
    """`owner/name`, for people; what binds are the two ids."""
    repository_id: int
    owner_id: int
    ref: str = "refs/heads/main"
    environment: str = "production"
    pool: str | None = None
    """`projects/NUMBER/locations/global/workloadIdentityPools/ID` of the stack that owns it; None: this one does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetSettings:
    billing_account: str
    monthly: int
    currency: str = "USD"


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertSettings:
    emails: tuple[str, ...] = ()
    oldest_task_days: int = 21
    budget: BudgetSettings | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """Facts that the dated tables of `catalog.py` do not have yet."""

    tpu_zones: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Accelerator family (`v4`, `v5litepod`) → further zones."""
    regions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    stack: str
    project: str | None = None
    region: str | None = None
    zone: str | None = None
    protect: bool = True
    """Whether what holds work refuses to be destroyed."""
    adopt: bool = False
    """Take over what survived a destroy (APIs, buckets, identity pools, custom roles) instead of failing on it."""
    labels: Mapping[str, str] = field(default_factory=dict)
    network: NetworkSettings | None = None
    queues: Mapping[str, QueueSettings] = field(default_factory=dict)
    records: RecordsSettings | None = None
    registries: Mapping[str, RegistrySettings] = field(default_factory=dict)
    secrets: Mapping[str, SecretSettings] = field(default_factory=dict)
    heads: Mapping[str, HeadSettings] = field(default_factory=dict)
    kubernetes: Mapping[str, KubernetesSettings] = field(default_factory=dict)
    access: AccessSettings = AccessSettings()
    ci: CiSettings | None = None
    alerts: AlertSettings | None = None
    impersonate: str | None = None
    """Service account that the provider acts as; whoever runs `up` needs to be its token creator."""
    overrides: Overrides = Overrides()

    @property
    def uses_google(self) -> bool:
        google = (self.network, self.queues, self.records, self.registries, self.secrets, self.heads, self.ci)
        return any(bool(each) for each in google)


OPTIONAL_PARTS: Final = ("network", "records", "ci", "alerts")
"""Keys whose absence means that the part is not wanted. Pulumi.yaml has to give each a default, so `{}` is absence."""


SECRET_VALUE: Final = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY|\bya29\.[\w-]{20,}|\bAIza[\w-]{35}|\bgh[pousr]_\w{30,}|\bhf_[A-Za-z0-9]{20,}"
    r'|\bAKIA[0-9A-Z]{16}\b|"private_key"|\bsk-[A-Za-z0-9_-]{20,}'
)
"""What secrets look like that have a form of their own."""
_VALUE_KEYS: Final = re.compile(
    r"secrets\.(?P<name>[^.]+)\.(?:value|values|token|password|key|secret|data|content|text)"
)


class InvalidSettings(RequestRefused):
    """Settings of `where` (a stack, or a component) that cannot be used; nothing was made."""

    def __init__(self, where: str, problems: Sequence[Problem]) -> None:
        self.where, self.problems = where, tuple(problems)
        super().__init__(
            f"the settings of {where} cannot be used",
            facts=[each.line() for each in self.problems],
            hint="docs/settings.md has every key and what is allowed",
        )


def parse_settings(stack: str, values: Mapping[str, Any]) -> Settings:
    """Check and type what a stack file says under our keys (without their prefix).

    A value is what YAML makes of it, or text as the engine passes it (objects and lists as JSON). Raises
    `InvalidSettings` with every problem found.
    """
    hints = hints_of(Settings)
    decoded = {key: decode(hints[key], value) if key in KEYS else value for key, value in values.items()}
    if typed_in := list(_find_typed_secrets(decoded)):
        # Alone: any other problem could repeat the value.
        raise InvalidSettings(f"stack `{stack}`", typed_in)
    reader = Reader()
    for key in OPTIONAL_PARTS:
        if key in decoded and decoded[key] in ({}, None):
            reader.problems.append(
                Problem(
                    path=key,
                    message="is empty, and the engine cannot tell that from absent",
                    hint=f"write at least one of its keys, or leave `{NAMESPACE}:{key}` out",
                )
            )
            del decoded[key]
    settings = reader.read_dataclass(Settings, decoded, "", {"stack": stack})
    problems = [*map(_with_place_of_values, reader.problems), *_find_news(settings, reader.problems)]
    if problems:
        raise InvalidSettings(f"stack `{stack}`", problems)
    assert isinstance(settings, Settings)
    return settings


def _find_news(settings: object, unread: Sequence[Problem]) -> list[Problem]:
    """What is wrong with what could be read. The rest has its default for now, and what that would break is no news."""
    from infra.settings import stack_rules

    if not isinstance(settings, Settings):
        return []
    paths = {problem.path for problem in unread}
    broken = [] if paths.isdisjoint(_PARTS) else stack_rules.find_stack_problems(settings)
    return [each for each in find_problems(settings) if each.path not in paths and each not in broken]


def _find_typed_secrets(value: object, path: str = "") -> Iterator[Problem]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _find_typed_secrets(item, join(path, str(key)))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _find_typed_secrets(item, f"{path}[{index}]")
    elif isinstance(value, str) and SECRET_VALUE.search(value):
        yield Problem(
            path=path,
            message="looks like the value of a secret, which is not repeated here",
            hint="take it out and, where it was committed or shared, have a new one made; `runtime secrets put` takes values",
        )


def _with_place_of_values(problem: Problem) -> Problem:
    found = _VALUE_KEYS.fullmatch(problem.path)
    if found is None:
        return problem
    return replace(
        problem, hint=f"no value is written here: `runtime secrets put {found['name']}` takes it, after `up`"
    )


def read_settings() -> Settings:
    """The settings of the stack that Pulumi runs now. Raises `InvalidSettings`."""
    import pulumi
    from pulumi.runtime import config as engine

    config: dict[str, Any] = engine.CONFIG.get() or engine.get_config_env()
    secrets = {key for key in config if engine.is_config_secret(key)}
    return settings_from(pulumi.get_stack(), config, secrets)


def settings_from(
    stack: str, config: Mapping[str, Any], secrets: Collection[str] = (), written: Collection[str] = ()
) -> Settings:
    """The settings in all of a stack's configuration, ours and others' keys alike, each with its namespace.

    `secrets` are the keys whose values are encrypted; `written` those that the stack file has itself, where that is
    known: the engine does not say. Raises `InvalidSettings`.
    """
    problems = [*_find_foreign(config), *_find_secret(secrets), *_find_open_door(config)]
    ours = {
        key.removeprefix(f"{NAMESPACE}:"): value for key, value in config.items() if key.startswith(f"{NAMESPACE}:")
    }
    if ours.keys() >= KEYS:
        # The engine adds the default of every key that Pulumi.yaml declares and a stack file leaves out.
        defaults = [key for key in OPTIONAL_PARTS if ours[key] == "{}" and f"{NAMESPACE}:{key}" not in written]
        ours = {key: value for key, value in ours.items() if key not in defaults}
    try:
        settings = parse_settings(stack, ours)
    except InvalidSettings as invalid:
        raise InvalidSettings(invalid.where, [*problems, *invalid.problems]) from None
    if problems:
        raise InvalidSettings(f"stack `{stack}`", problems)
    return settings


def find_problems(value: object, path: str = "") -> list[Problem]:
    """What is wrong with one settings value (a `QueueSettings`, `HeadSettings` … or the whole), taken by itself.

    Components call `ensure_valid` with theirs, so that they are as strict when used from another program.
    """
    from infra.settings import rules as settings_rules
    from infra.settings import stack_rules

    if isinstance(value, type) or not is_dataclass(value):
        raise TypeError(f"{value!r} is no settings value")
    type_: type = type(value)
    mistyped = [
        problem
        for name, hint in hints_of(type_).items()
        for problem in find_mistyped(hint, getattr(value, name), join(path, name))
    ]
    if mistyped:
        return mistyped
    found = settings_rules.find_own_problems(value, path)
    for each in fields(value):
        found += _find_nested(getattr(value, each.name), join(path, each.name))
    if isinstance(value, Settings):
        found += stack_rules.find_stack_problems(value)
    return found


def ensure_valid(value: object, path: str) -> None:
    """Raise `InvalidSettings` unless `find_problems` is empty."""
    problems = find_problems(value, path)
    if problems:
        raise InvalidSettings(f"`{path}`", problems)


KEYS: Final = frozenset(each.name for each in fields(Settings)) - {"stack"}
"""The top-level keys of a stack file, without our prefix."""

_PARTS: Final = frozenset(
    {"network", "queues", "records", "registries", "secrets", "heads", "kubernetes", "access", "ci", "alerts"}
)
"""Those that have keys of their own, on which rules about the whole stack rest."""

_FOREIGN_HINTS: Final = {
    "gcp:project": f"`{NAMESPACE}:project` is where the project is set",
    "gcp:region": f"`{NAMESPACE}:region` is where the region is set",
    "gcp:zone": f"`{NAMESPACE}:zone` is where the zone is set",
    "gcp:impersonateServiceAccount": f"`{NAMESPACE}:impersonate` is where the account is set",
    "gcp:defaultLabels": f"`{NAMESPACE}:labels` is where labels are set",
    "gcp:credentials": "no key file: log in, or set `impersonate`",
    "kubernetes:context": f"`{NAMESPACE}:kubernetes` names each cluster's context",
    "kubernetes:kubeconfig": f"`{NAMESPACE}:kubernetes` names each cluster's context; a kubeconfig never enters the state",
}


def _find_foreign(config: Mapping[str, Any]) -> list[Problem]:
    """Keys of others: of a provider they would change what it does behind our back, of nobody they are a slip."""
    found = []
    for key in config:
        namespace = key.partition(":")[0]
        if namespace in (NAMESPACE, "pulumi"):
            continue
        hint = _FOREIGN_HINTS.get(key) or suggest(namespace, [NAMESPACE]) or f"our keys begin with `{NAMESPACE}:`"
        found.append(Problem(path=key, message="is a key of another namespace", hint=hint))
    return found


def _find_secret(secrets: Collection[str]) -> list[Problem]:
    hint = "`runtime secrets put` takes values; `secrets` has their names only"
    return [Problem(path=key, message="is encrypted, and no setting is a secret", hint=hint) for key in sorted(secrets)]


def _find_open_door(config: Mapping[str, Any]) -> list[Problem]:
    key = "pulumi:disable-default-providers"
    if config.get(key) in ('["*"]', ["*"]):
        return []
    seen = f"is `{config[key]}`" if key in config else "is not set"
    hint = f'add `{key}: ["*"]`: a default provider takes whatever project the shell happens to be in'
    return [Problem(path=key, message=f'{seen}, allowed is `["*"]`', hint=hint)]


def _find_nested(value: object, path: str) -> list[Problem]:
    if isinstance(value, Mapping):
        return [problem for key, item in value.items() for problem in _find_nested(item, join(path, key))]
    if is_dataclass(value):
        return find_problems(value, path)
    return []
