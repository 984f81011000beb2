"""The program: makes the components that the settings ask for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pulumi

from infra.components.alerts import Alerts, AlertsArgs, WatchedCluster, WatchedQueue
from infra.components.apis import Apis, ApisArgs
from infra.components.ci_identity import CiIdentity, CiIdentityArgs
from infra.components.identity import PROJECT_ROLES, Identity, IdentityArgs, member_label
from infra.components.key import KeyGrants, KeyGrantsArgs, find_agents
from infra.components.late import patience
from infra.components.network import Network, NetworkArgs
from infra.components.providers import google_provider, kubernetes_provider
from infra.components.queue import Queue, QueueArgs
from infra.components.ray_head import RayHead, RayHeadArgs, SecretVariable
from infra.components.records import Records, RecordsArgs, name_bucket
from infra.components.registry import Registry, RegistryArgs
from infra.components.secret import Secret, SecretArgs
from infra.components.shared import Key, StackSite, as_member
from infra.components.workspace import Workspace, WorkspaceArgs
from infra.naming import Names, labels
from infra.settings.model import KubernetesAccess, Role, StackSettings

Members = dict[str, pulumi.Input[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltStack:
    """The parts of a stack, from which `export` makes the contract."""

    settings: StackSettings
    network: Network | None = None
    queues: Mapping[str, Queue] = field(default_factory=dict)
    records: Records | None = None
    registries: Mapping[str, Registry] = field(default_factory=dict)
    secrets: Mapping[str, Secret] = field(default_factory=dict)
    heads: Mapping[str, RayHead] = field(default_factory=dict)
    identity: Identity | None = None
    ci: CiIdentity | None = None
    workspaces: Mapping[str, Mapping[str, Workspace]] = field(default_factory=dict)
    """Kubernetes cluster → namespace → workspace."""


def build(settings: StackSettings) -> BuiltStack:
    """Register everything that `settings` ask for."""
    workspaces = _build_workspaces(settings)
    if not settings.uses_google:
        return BuiltStack(settings=settings, workspaces=workspaces)
    return _GoogleParts(settings).build(workspaces)


def _build_workspaces(settings: StackSettings) -> dict[str, dict[str, Workspace]]:
    found: dict[str, dict[str, Workspace]] = {}
    for cluster, cluster_settings in settings.kubernetes.items():
        provider = kubernetes_provider(cluster, cluster_settings, adopt=settings.adopt)
        found[cluster] = {
            namespace: Workspace(
                f"{cluster}-{namespace}",
                WorkspaceArgs(
                    namespace=namespace,
                    settings=namespace_settings,
                    labels=labels(settings.stack, settings.labels),
                    protect=settings.protect,
                    neighbours=_neighbours(namespace, cluster_settings),
                    holds_slots=namespace == cluster_settings.slot_namespace,
                ),
                pulumi.ResourceOptions(providers=[provider]),
            )
            for namespace, namespace_settings in cluster_settings.namespaces.items()
        }
    return found


def _neighbours(namespace: str, cluster: KubernetesAccess) -> tuple[str, ...]:
    """Return the launchers of the cluster's other namespaces, if all namespaces share one table of GPU slots."""
    if cluster.slot_namespace is None:
        return ()
    others = (each for name, each in cluster.namespaces.items() if name != namespace)
    own = cluster.namespaces[namespace].launchers
    return tuple(dict.fromkeys(who for each in others for who in each.launchers if who not in own))


class _GoogleParts:
    """Builds the parts in the order of their needs: accounts, stores, heads, queues, alerts."""

    def __init__(self, settings: StackSettings) -> None:
        assert settings.project is not None  # `parse_settings` requires it, and the region
        assert settings.region is not None
        self.settings = settings
        self.site = StackSite(
            project=settings.project,
            region=settings.region,
            names=Names(stack=settings.stack, project=settings.project),
            labels=labels(settings.stack, settings.labels),
            protect=settings.protect,
            adopt=settings.adopt,
        )
        self.opts = pulumi.ResourceOptions(providers=[google_provider(settings)], transformations=patience())
        self.apis = Apis(
            "apis",
            ApisArgs(
                project=settings.project,
                services=find_services(settings),
                # The agent of Pub/Sub gets grants; the agent of TPUs has to exist before any node.
                agents=[
                    *(["pubsub"] if settings.queues else []),
                    *(["tpu"] if settings.heads else []),
                    *(find_agents(settings.encrypted_services) if settings.grants_key else []),
                ],
            ),
            self.opts,
        )
        if settings.kms_key is not None:
            self.site = replace(self.site, key=self._key(settings.kms_key))

    def _key(self, kms_key: str) -> Key:
        if not self.settings.grants_key:
            return Key(name=kms_key)
        services = self.settings.encrypted_services
        args = KeyGrantsArgs(site=self.site, kms_key=kms_key, services=services, apis=self.apis)
        return Key(name=kms_key, grants=KeyGrants("key", args, self.opts).grants)

    def build(self, workspaces: Mapping[str, Mapping[str, Workspace]]) -> BuiltStack:
        settings, access = self.settings, self.settings.access
        identity = Identity(
            "identity",
            IdentityArgs(
                site=self.site,
                roles=find_roles(settings),
                access=access,
                has_heads=bool(settings.heads),
                apis=self.apis,
            ),
            self.opts,
        )
        operators: Members = {member_label(member): member for member in access.operators}
        researchers: Members = {member_label(member): member for member in access.researchers}
        everyone = operators | researchers
        network = self._network()
        ci = self._ci()
        deployer: Members = {"deployer": ci.deployer_member} if ci is not None else {}
        registries = self._registries(identity, everyone, deployer)
        secrets = self._secrets(identity, operators)
        heads = self._heads(network, registries, secrets, identity, operators, researchers)
        nodes: Members = {f"{name}-node": as_member(head.node_email) for name, head in heads.items()}
        workers: Members = {"worker": identity.members[Role.WORKER]} | nodes if settings.queues else nodes
        submitters: Members = {"submitter": identity.members[Role.SUBMITTER]} if settings.queues else {}
        queues = {
            name: Queue(
                f"{name}-queue",
                QueueArgs(
                    site=self.site,
                    queue=name,
                    settings=queue,
                    # People submit, redrive and try a worker from their own machines.
                    workers=workers | everyone,
                    submitters=submitters,
                    apis=self.apis,
                ),
                self.opts,
            )
            for name, queue in settings.queues.items()
        }
        # The driver of a job runs on the head with the head's identity, and the units there take jobs up.
        drivers: Members = {f"{name}-head": as_member(head.head_email) for name, head in heads.items()}
        records = self._records(workers | submitters | everyone | drivers, deployer)
        self._alerts(queues, heads)
        return BuiltStack(
            settings=settings,
            network=network,
            queues=queues,
            records=records,
            registries=registries,
            secrets=secrets,
            heads=heads,
            identity=identity,
            ci=ci,
            workspaces=workspaces,
        )

    def _records(self, users: Members, publishers: Members) -> Records | None:
        settings = self.settings.records
        if settings is None:
            return None
        args = RecordsArgs(site=self.site, settings=settings, users=users, publishers=publishers, apis=self.apis)
        return Records("records", args, self.opts)

    def _network(self) -> Network | None:
        settings = self.settings.network
        if settings is None:
            return None
        return Network("network", NetworkArgs(site=self.site, settings=settings, apis=self.apis), self.opts)

    def _ci(self) -> CiIdentity | None:
        if self.settings.ci is None:
            return None
        return CiIdentity(
            "ci",
            CiIdentityArgs(
                site=self.site,
                settings=self.settings.ci,
                services=find_services(self.settings),
                grantable=_grantable(self.settings, self.site.names),
                apis=self.apis,
            ),
            self.opts,
        )

    def _registries(self, identity: Identity, people: Members, deployer: Members) -> dict[str, Registry]:
        worker = identity.members.get(Role.WORKER)
        return {
            name: Registry(
                f"{name}-registry",
                RegistryArgs(
                    site=self.site,
                    registry=name,
                    settings=registry,
                    readers=people,
                    guests={"worker": worker} if worker is not None else {},
                    writers={"pusher": identity.members[Role.PUSHER]} | deployer,
                    apis=self.apis,
                ),
                self.opts,
            )
            for name, registry in self.settings.registries.items()
        }

    def _secrets(self, identity: Identity, operators: Members) -> dict[str, Secret]:
        return {
            name: Secret(
                f"{name}-secret",
                SecretArgs(
                    site=self.site,
                    secret=name,
                    settings=secret,
                    # A head grants its own nodes the secrets that its `environment` names.
                    readers={role.value: identity.members[role] for role in secret.readers if role in identity.members},
                    keepers=operators,
                    apis=self.apis,
                ),
                self.opts,
            )
            for name, secret in self.settings.secrets.items()
        }

    def _heads(
        self,
        network: Network | None,
        registries: Mapping[str, Registry],
        secrets: Mapping[str, Secret],
        identity: Identity,
        operators: Members,
        researchers: Members,
    ) -> dict[str, RayHead]:
        if not self.settings.heads:
            return {}
        assert network is not None  # `parse_settings` requires it, and the zone
        assert self.settings.zone is not None
        kept = self.settings.records
        # By name and not by the bucket, whose grants wait for the accounts of the heads.
        records = None if kept is None else f"gs://{name_bucket(kept, self.site.names)}"
        pulled_from: Members = {}
        for name, registry in registries.items():
            pulled_from |= {f"{name}-{region}": each for region, each in registry.repositories.items()}
            pulled_from |= {f"{name}-{region}-cache": each for region, each in registry.cache_repositories.items()}
        return {
            name: RayHead(
                f"{name}-head",
                RayHeadArgs(
                    site=self.site,
                    zone=self.settings.zone,
                    head=name,
                    settings=head,
                    network=network.network,
                    subnet=network.subnet,
                    cidr=network.cidr,
                    firewalls=self.settings.host_project is None,
                    environment={
                        secret: SecretVariable(env=secrets[secret].env, resource=secrets[secret].resource)
                        for secret in head.environment
                    },
                    repositories=pulled_from,
                    reapers={"reaper": identity.members[Role.REAPER]},
                    operators=operators,
                    users=researchers,
                    records=records,
                    apis=self.apis,
                ),
                self.opts,
            )
            for name, head in self.settings.heads.items()
        }

    def _alerts(self, queues: Mapping[str, Queue], heads: Mapping[str, RayHead]) -> None:
        if self.settings.alerts is None:
            return
        Alerts(
            "alerts",
            AlertsArgs(
                site=self.site,
                settings=self.settings.alerts,
                queues={
                    name: WatchedQueue(
                        subscription=queue.subscription, dead_letter_subscription=queue.dead_letter_subscription
                    )
                    for name, queue in queues.items()
                },
                clusters={
                    name: WatchedCluster(
                        cluster_name=head.cluster_name,
                        zone=head.zone,
                        head=head.name,
                        max_nodes=sum(pool.max for pool in self.settings.heads[name].pools.values()),
                    )
                    for name, head in heads.items()
                },
                apis=self.apis,
            ),
            self.opts,
        )


def find_services(settings: StackSettings) -> list[str]:
    """Return the short names of the APIs that the parts need."""
    wanted = {
        "iam": True,
        "cloudresourcemanager": True,
        "serviceusage": True,
        "pubsub": bool(settings.queues),
        "storage": settings.records is not None,
        "artifactregistry": bool(settings.registries),
        "secretmanager": bool(settings.secrets),
        "compute": settings.network is not None or bool(settings.heads),
        "tpu": bool(settings.heads),
        "logging": bool(settings.heads),
        "iap": bool(settings.heads),
        "oslogin": bool(settings.heads),
        "monitoring": settings.alerts is not None or bool(settings.heads),
        "cloudkms": settings.grants_key,
        "billingbudgets": settings.alerts is not None and settings.alerts.budget is not None,
        "iamcredentials": settings.ci is not None,
        "sts": settings.ci is not None,
    }
    return [service for service, needed in wanted.items() if needed]


def find_roles(settings: StackSettings) -> list[Role]:
    """Return the roles that need an account; the parts of heads and pipelines make their own accounts."""
    wanted = {
        Role.WORKER: bool(settings.queues),
        Role.SUBMITTER: bool(settings.queues),
        Role.PUSHER: bool(settings.registries),
        Role.REAPER: bool(settings.heads),
    }
    return [role for role, needed in wanted.items() if needed]


def _grantable(settings: StackSettings, names: Names) -> list[str]:
    """Return the roles that the stack grants in its project, without the roles of its pipeline."""
    heads = (names.role(f"{head}-{role}") for head in settings.heads for role in ("head", "reaper"))
    return [*PROJECT_ROLES, *(f"projects/{settings.project}/roles/{role}" for role in heads)]
