"""A stack's settings, as frozen values; `read` makes them from a stack file and judges them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Annotated, Final

from infra.gcp import catalog
from infra.naming import JOB_ACCOUNT, Names
from infra.settings import forms
from infra.settings.forms import Between, Choice, Cidr
from runtime.outputs import image_path

NAMESPACE: Final = "research-runtime"
"""The project's name, and so the prefix of our keys in a stack file."""


DAY_S: Final = 86_400


class TpuCapacity(StrEnum):
    """How Google lends a TPU."""

    PREEMPTIBLE = "preemptible"
    SPOT = "spot"
    RESERVED = "reserved"
    ON_DEMAND = "on_demand"


class Role(StrEnum):
    """The task of an identity; one service account each."""

    WORKER = "worker"
    """Serves queues: leases tasks, writes records, reads secrets that name it."""
    SUBMITTER = "submitter"
    """Puts tasks into queues; cannot take any."""
    HEAD = "head"
    """The Ray head: makes and removes TPU nodes."""
    NODE = "node"
    """A TPU node of a Ray cluster; it has the rights of a worker, and no more."""
    REAPER = "reaper"
    """Removes TPU nodes that Ray has lost."""
    PUSHER = "pusher"
    """Pushes images."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSettings:
    cidr: Annotated[str, Cidr(private=True)] = "10.64.0.0/20"
    """Range of the subnet; the heads and all hosts of the pools' maxima have to fit into it."""
    subnet: Annotated[str | None, forms.SUBNET_LINK] = None
    """Self-link of an existing subnet; then the stack makes no network."""
    network: Annotated[str | None, forms.NETWORK_LINK] = None
    """Self-link of the network of `subnet`; by default the network of the same name, as automatic subnets have it."""
    flow_logs: bool = False
    """Whether Google logs the connections of the subnet's machines."""
    nat_addresses: Annotated[int, Between(0, 16)] = 0
    """Fixed external addresses of what leaves the subnet, for the allowlists of others; 0: Google chooses them."""
    ssh_cidrs: tuple[Annotated[str, Cidr(private=True)], ...] = ()
    """Private ranges that people log in to heads from without Google's proxy, such as a VPN's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSettings:
    ack_deadline_s: Annotated[int, Between(10, 600)] = 60
    max_delivery_attempts: Annotated[int, Between(5, 100)] = 100
    """Every negative acknowledgement counts, so the highest is the default."""
    retention_s: Annotated[int, Between(600, 31 * DAY_S)] = 31 * DAY_S
    """Of the subscriptions and their dead letters."""
    min_backoff_s: Annotated[int, Between(0, 600)] = 10
    max_backoff_s: Annotated[int, Between(0, 600)] = 600
    exactly_once: bool = True
    """Among workers that reach Pub/Sub in the same region; across regions a task may come twice, and is recorded once."""
    regions: tuple[str, ...] = ()
    """Regions that may store its tasks; any by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordsSettings:
    location: str | None = None
    """Region or multi-region; the stack's region by default."""
    bucket: Annotated[str | None, forms.BUCKET] = None
    """Name of the bucket, unique in the world; set it if the default name is taken."""
    soft_delete_days: Annotated[int, Between(7, 90, or_zero=True)] = 7
    logs_days: Annotated[int, Between(1, 3650)] = 90
    notes_days: Annotated[int, Between(1, 3650)] = 30
    """Logs and attempt notes age out; records, manifests and outputs never do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketSettings:
    readers: tuple[str, ...] = ()
    writers: tuple[str, ...] = ()
    """`workers`, `clusters` (heads and nodes), `operators`, `researchers`, or IAM principals. Writers read, too."""
    location: str | None = None
    """Region or multi-region; the stack's region by default."""
    bucket: Annotated[str | None, forms.BUCKET] = None
    """Name of the bucket, unique in the world; set it if the default name is taken."""
    existing: Annotated[str | None, forms.OTHERS_BUCKET] = None
    """Name of a bucket that another makes; this stack makes the grants only."""
    soft_delete_days: Annotated[int, Between(7, 90, or_zero=True)] = 7
    delete_after_days: Mapping[str, int] = field(default_factory=dict)
    """Prefix → age at which its objects are deleted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistrySettings:
    regions: tuple[str, ...] = ()
    """The stack's region by default."""
    repository: Annotated[str | None, forms.REPOSITORY_NAME] = None
    """Name of the repository, if not the default name."""
    keep_days: Annotated[int, Between(1, 3650)] = 30
    keep_newest: Annotated[int, Between(1, 1000)] = 16
    cleanup_dry_run: bool = False
    pull_through: Annotated[str | None, Choice(catalog.PULL_THROUGH_HOSTS)] = None
    """Host of a public registry to cache beside the images: `docker.io`, or another that Google supports."""
    existing: Mapping[str, str] = field(default_factory=dict)
    """Region → `projects/P/locations/R/repositories/N` of another stack; this stack makes none in that region."""

    def made_regions(self, default: str) -> list[str]:
        """Return the regions in which the stack makes a repository; `default` is the stack's own region."""
        return [each for each in dict.fromkeys(self.regions or (default,)) if each not in self.existing]


class AttemptAccess(StrEnum):
    """The attempts of tasks that workers give a secret to."""

    ALL = "all"
    """Each one, unless its task says otherwise."""
    NAMED = "named"
    """Those whose tasks name the secret."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretSettings:
    env: str
    """Variable that carries the value."""
    readers: tuple[Role, ...] = ()
    attempts: AttemptAccess | None = None
    """`all` if left out and workers are among the readers."""
    regions: tuple[str, ...] = ()
    """Regions that keep the secret; everywhere by default."""
    existing: Annotated[str | None, forms.SECRET] = None
    """`projects/P/secrets/N` of another stack; then this stack makes the grants only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSettings:
    """Settings of the container that Ray runs in. What a pool leaves out is its head's, except `shm_size`."""

    shm_size: Annotated[str | None, forms.SHM_SIZE] = None
    """Most shared memory: `8g` on a head and `200g` on a node by default. Sizes follow the machine, so pools never take
    their head's."""
    mounts: tuple[str, ...] | None = None
    """`/host/path:/container/path`, or with `:ro` behind it"""
    options: tuple[str, ...] | None = None
    """Further options of `docker run`, `--name=value`; `machine_rules` has those that are allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSettings:
    """Settings that a head and its pools share; a pool that leaves one out has its head's."""

    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables of every process of Ray. A pool adds its own to the head's."""
    setup: str | None = None
    """Script that each machine runs once as root, before it starts Ray; empty: none, whatever the head has."""
    container: ContainerSettings = ContainerSettings()


@dataclass(frozen=True, slots=True, kw_only=True)
class TpuPoolSettings(MachineSettings):
    accelerator: str
    """`v4-8`, `v5litepod-1` …; a slice of several hosts, such as `v4-16`, is one node."""
    runtime_version: str
    """TPU software version, as `gcloud compute tpus tpu-vm versions list` prints them."""
    capacity: TpuCapacity = TpuCapacity.PREEMPTIBLE
    min: Annotated[int, Between(0, forms.MAX_NODES)] = 4
    max: Annotated[int, Between(0, forms.MAX_NODES)] = 1024
    buffer: int = 0
    """Whole idle nodes that the cluster keeps ready beside the busy ones, within `max`."""
    cpus: int | None = None
    """CPUs of each host that Ray may hand out, by default half of them. Ray enforces nothing."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Ray's labels of the nodes, which `label_selector` finds."""

    @property
    def always(self) -> int:
        """Nodes that exist at all times, with or without work."""
        return max(self.min, self.buffer)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSettings(MachineSettings):
    image: str
    """Cluster image by digest: `HOST/PROJECT/REPOSITORY/NAME@sha256:…`."""
    machine_type: str = "n2-standard-8"
    disk_gb: Annotated[int, Between(50, 65_536)] = 200
    disk_type: str | None = None
    """The usual one of the machine by default."""
    snapshot_days: Annotated[int, Between(0, 65_535)] = 0
    """Days that a daily snapshot of the disk is kept; 0: none is taken."""
    boot_image: str = catalog.BOOT_IMAGE
    """A version, never a family: a family would replace the head on its own day."""
    zone: str | None = None
    """Of the head and its nodes, since Ray looks for its head where it makes its nodes; the stack's by default."""
    pools: Mapping[str, TpuPoolSettings] = field(default_factory=dict)
    environment: tuple[str, ...] = ()
    """Names of `secrets` that become variables of every process of the cluster."""
    idle_minutes: Annotated[int, Between(1, 1440)] = 10
    cloud_logging: bool = True
    """Whether the logs of Ray and the reaper go to Cloud Logging as well as to the machine's disk."""

    def machines(self, path: str) -> Mapping[str, MachineSettings]:
        """Return the head at `path` of the stack file and its pools, each by its path."""
        return {path: self, **{f"{path}.pools.{key}": each for key, each in self.pools.items()}}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimSettings:
    size: str
    """`1Ti`"""
    storage_class: Annotated[str | None, forms.STORAGE_CLASS] = None
    access_mode: Annotated[str, Choice(forms.ACCESS_MODES)] = "ReadWriteMany"
    existing_volume: Annotated[str | None, forms.KUBERNETES_NAME] = None
    """Name of a PersistentVolume to bind to."""
    existing: bool = False
    """Whether to use a claim that exists already, and make none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceSettings:
    create: bool = True
    """False if a cluster's administrators made the namespace and the stack has rights inside it only."""
    quota: Mapping[str, str] = field(default_factory=dict)
    """`requests.cpu: "64"`, `requests.nvidia.com/gpu: "16"`, `pods: "200"` …"""
    claims: Mapping[str, ClaimSettings] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels of the namespace itself, which what watches over namespaces reads, such as Kueue."""
    image_pull_secrets: tuple[Annotated[str, forms.PULL_SECRET], ...] = ()
    """Names of secrets in the namespace; a person puts their content there."""
    egress_cidrs: tuple[Annotated[str, Cidr(private=False)], ...] = ()
    """Ranges that workers may connect to, beyond DNS and HTTPS to anywhere."""
    launchers: tuple[Annotated[str, forms.LAUNCHER], ...] = ()
    """Subjects that may launch: `User:alice`, `Group:lab`, `ServiceAccount:NAMESPACE/NAME`."""
    workload_identity: bool = False
    """Whether jobs here act as the stack's account `worker`, on a cluster with GKE's workload identity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesAccess:
    context: Annotated[str, forms.WITHOUT_SPACES]
    """Context in the kubeconfig of the person who runs `up`; the kubeconfig never enters the state."""
    cluster_identifier: Annotated[str, forms.WITHOUT_SPACES]
    """Name that stays when the address changes; another name means another cluster, and makes everything in it again."""
    server: Annotated[str, forms.SERVER]
    namespaces: Mapping[str, NamespaceSettings] = field(default_factory=dict)
    workload_pool: Annotated[str | None, forms.WORKLOAD_POOL] = None
    """`PROJECT.svc.id.goog` of a cluster on GKE, by default of the stack's project."""
    slot_namespace: str | None = None
    """The one of `namespaces` whose Lease objects record the taken parts of GPUs for all. By default each has its own
    records, which is right if no two namespaces use the same machines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessSettings:
    """IAM principals: `group:…`, `user:…`, `domain:…`, `serviceAccount:…`, `principal://…` or `principalSet://…`."""

    operators: tuple[str, ...] = ()
    researchers: tuple[str, ...] = ()
    workers: tuple[str, ...] = ()
    """Programs with the rights of the account `worker`, besides it: accounts that exist, and federated identities."""
    project_grants: bool | None = None
    """Whether this stack makes people's grants on the whole project, by default if no pipeline deploys it. A grant has no
    owner in Google, so if several stacks of a project name the same people, one of them makes the grants."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuerSettings:
    """Machines outside of Google that get tokens of an OpenID Connect issuer: a cluster's, a site's."""

    issuer: Annotated[str, forms.ISSUER]
    """`https://…`, the `iss` of its tokens."""
    subjects: tuple[Annotated[str, forms.SUBJECT], ...]
    """The `sub` of the tokens that are let in, such as `system:serviceaccount:NAMESPACE:ACCOUNT`."""
    audience: Annotated[str, forms.AUDIENCE] = "runtime-worker"
    jwks: str | None = None
    """The issuer's public keys, if Google cannot reach it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepositorySettings:
    repository_id: int
    owner_id: int
    """The federation binds the two ids; the name is for people."""
    ref: str = "refs/heads/main"
    environment: Annotated[str, forms.ENVIRONMENT] = "production"


@dataclass(frozen=True, slots=True, kw_only=True)
class CiSettings:
    """The pipelines of a project, in a stack of their own that a person brings up."""

    repositories: Mapping[str, RepositorySettings]
    """`owner/name` → the jobs in it that may deploy and preview."""
    deploys: tuple[str, ...] = ("network", "queues", "records", "buckets", "registries", "secrets", "heads", "alerts")
    """Keys of the parts that the deployed stacks may have, which decide the rights of the pipelines."""
    state_bucket: Annotated[str | None, forms.BUCKET] = None
    state_key: Annotated[str | None, forms.STATE_KEY] = None
    """Bucket of Pulumi's state, and the key of its secrets, `projects/P/locations/L/keyRings/R/cryptoKeys/K`."""
    billing_account: Annotated[str | None, forms.BILLING_ACCOUNT] = None
    """The account in which deployed stacks make budgets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetSettings:
    billing_account: Annotated[str, forms.BILLING_ACCOUNT]
    monthly: Annotated[int, Between(1, forms.LARGEST)]
    currency: Annotated[str, forms.CURRENCY] = "USD"


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertSettings:
    emails: tuple[str, ...] = ()
    channels: tuple[Annotated[str, forms.CHANNEL], ...] = ()
    """`projects/P/notificationChannels/ID` of channels that exist: Slack, PagerDuty, a webhook. Pulumi gets none of their tokens."""
    oldest_task_days: Annotated[int, Between(1, 30)] = 21
    budget: BudgetSettings | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """Sources of images beyond those that every stack may use."""

    images: tuple[Annotated[str, forms.IMAGE_SOURCE], ...] = ()
    """Further sources of the heads' images: `HOST/PATH`, and everything below."""
    boot_image_projects: tuple[Annotated[str, forms.PROJECT], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StackSettings:
    stack: str
    project: str | None = None
    region: str | None = None
    zone: str | None = None
    protect: bool = True
    """Whether resources that hold work refuse to be destroyed."""
    adopt: bool = False
    """Whether to import resources that survived a destroy (APIs, buckets, identity pools, custom roles)."""
    labels: Mapping[str, str] = field(default_factory=dict)
    kms_key: str | None = None
    """`projects/P/locations/REGION/keyRings/R/cryptoKeys/K` that encrypts what the stack keeps; Google's own keys by default."""
    network: NetworkSettings | None = None
    queues: Mapping[str, QueueSettings] = field(default_factory=dict)
    records: RecordsSettings | None = None
    buckets: Mapping[str, BucketSettings] = field(default_factory=dict)
    registries: Mapping[str, RegistrySettings] = field(default_factory=dict)
    secrets: Mapping[str, SecretSettings] = field(default_factory=dict)
    heads: Mapping[str, HeadSettings] = field(default_factory=dict)
    kubernetes: Mapping[str, KubernetesAccess] = field(default_factory=dict)
    access: AccessSettings = AccessSettings()
    federation: Mapping[str, IssuerSettings] = field(default_factory=dict)
    ci: CiSettings | None = None
    deployer: Annotated[str | None, forms.ACCOUNT] = None
    """Account of the pipeline that deploys the stack, from the project's stack with `ci`."""
    alerts: AlertSettings | None = None
    impersonate: Annotated[str | None, forms.ACCOUNT] = None
    """Service account that the provider acts as; the person who runs `up` has to be its token creator."""
    overrides: Overrides = Overrides()

    @property
    def host_project(self) -> str | None:
        """The project of the existing subnet, if the network is another project's (a shared VPC)."""
        subnet = self.network.subnet if self.network is not None else None
        owner = subnet.partition("projects/")[2].partition("/")[0] if subnet is not None else None
        return owner if owner != self.project else None

    def by_zone(self) -> list[StackSettings]:
        """Return the settings once for each zone that heads are in, with these heads alone."""
        zones = dict.fromkeys(head.zone or self.zone for head in self.heads.values())
        return [
            replace(
                self,
                zone=zone,
                heads={key: each for key, each in self.heads.items() if (each.zone or self.zone) == zone},
            )
            for zone in zones
        ]

    @property
    def pools(self) -> Mapping[str, TpuPoolSettings]:
        """`HEAD.POOL` → its settings."""
        return {f"{name}.{key}": pool for name, head in self.heads.items() for key, pool in head.pools.items()}

    @property
    def bucket_locations(self) -> Mapping[str, str | None]:
        """Path of a bucket in the stack file → its `location` as it is written."""
        found = {} if self.records is None else {"records": self.records.location}
        return found | {f"buckets.{name}": each.location for name, each in self.buckets.items()}

    @property
    def bucket_names(self) -> Mapping[str, str]:
        """Path of a bucket in the stack file → its name in Google."""
        names = Names(stack=self.stack, project=self.project)
        found = {} if self.records is None else {"records": self.records.bucket or names.bucket("records")}
        data = {
            f"buckets.{key}": each.existing or each.bucket or names.bucket(key) for key, each in self.buckets.items()
        }
        return found | data

    @property
    def grants_key(self) -> bool:
        """Whether the stack makes the grants on its key, which is then in its own project."""
        return self.kms_key is not None and self.kms_key.startswith(f"projects/{self.project}/")

    @property
    def encrypted_services(self) -> tuple[str, ...]:
        """Short names of Google's services that encrypt with `kms_key`; empty without one."""
        made = {
            "storage": self.records is not None or any(each.existing is None for each in self.buckets.values()),
            "pubsub": bool(self.queues),
            "artifactregistry": any(each.made_regions(self.region or "") for each in self.registries.values()),
            "secretmanager": any(each.existing is None for each in self.secrets.values()),
            "compute": bool(self.heads),
        }
        return tuple(service for service, is_made in made.items() if is_made and self.kms_key is not None)

    @property
    def makes_project_grants(self) -> bool:
        """Whether the stack makes people's grants on the whole project; a pipeline may not make those."""
        chosen = self.access.project_grants
        return self.deployer is None if chosen is None else chosen

    @property
    def pod_members(self) -> Mapping[str, str]:
        """Label → member that the jobs of a namespace with workload identity are.
        https://cloud.google.com/kubernetes-engine/docs/how-to/workload-identity"""
        return {
            # Clusters of one pool share the identities of namespaces with one name.
            f"{image_path(pool.removesuffix('.svc.id.goog'))}.{namespace}": f"serviceAccount:{pool}[{namespace}/{JOB_ACCOUNT}]"
            for cluster in self.kubernetes.values()
            for pool in (cluster.workload_pool or f"{self.project}.svc.id.goog",)
            for namespace, its in cluster.namespaces.items()
            if its.workload_identity
        }

    @property
    def signs_in(self) -> bool:
        """Whether somebody outside of Google exchanges tokens for those of an account."""
        return bool(self.ci or self.federation or self.pod_members)

    @property
    def uses_google(self) -> bool:
        parts = ("network", "queues", "records", "buckets", "registries", "secrets", "heads", "federation", "ci")
        return any(getattr(self, part) for part in parts)


KEYS: Final = frozenset(each.name for each in fields(StackSettings)) - {"stack"}
"""The top-level keys of a stack file, without our prefix."""
