"""A stack's settings, as frozen values. `read` makes them of a stack file, `valid` judges them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Final

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


KEYS: Final = frozenset(each.name for each in fields(Settings)) - {"stack"}
"""The top-level keys of a stack file, without our prefix."""
