"""The program: makes the components that the settings ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pulumi

from infra.components.alerts import Alerts, AlertsArgs, WatchedCluster, WatchedQueue
from infra.components.apis import Apis, ApisArgs
from infra.components.bucket import Bucket, BucketArgs
from infra.components.ci_identity import CiIdentity, CiIdentityArgs
from infra.components.federation import Federation, FederationArgs
from infra.components.identity import MACHINE_ROLES, Identity, IdentityArgs, member_label
from infra.components.key import KeyGrants, KeyGrantsArgs, find_agents
from infra.components.late import patience
from infra.components.network import Network, NetworkArgs
from infra.components.providers import google_provider, kubernetes_provider
from infra.components.queue import Queue, QueueArgs
from infra.components.ray_head import NodeRoles, NodeRolesArgs, RayHead, RayHeadArgs, SecretVariable
from infra.components.records import Records, RecordsArgs, name_bucket
from infra.components.registry import Registry, RegistryArgs
from infra.components.secret import Secret, SecretArgs
from infra.components.shared import Key, StackSite, as_member
from infra.components.workspace import Workspace, WorkspaceArgs
from infra.naming import NODE_ROLES, Names, labels
from infra.settings.model import KubernetesAccess, Role, StackSettings

Members = dict[str, pulumi.Input[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltStack:
    """The parts of a stack, from which `export` makes the contract."""

    settings: StackSettings
    network: Network | None = None
    queues: Mapping[str, Queue] = field(default_factory=dict)
    records: Records | None = None
    buckets: Mapping[str, Bucket] = field(default_factory=dict)
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
                    google_account=Names(stack=settings.stack, project=settings.project).account_email("worker")
                    if namespace_settings.workload_identity
                    else None,
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
        node_roles = self._node_roles() if settings.heads else {}
        identity = Identity(
            "identity",
            IdentityArgs(
                site=self.site,
                roles=find_roles(settings),
                reaper_role=node_roles.get("reaper"),
                sign_ins=self._sign_ins() | dict(settings.pod_members),
                access=access,
                project_grants=settings.makes_project_grants,
                has_heads=bool(settings.heads) or (settings.ci is not None and "heads" in settings.ci.deploys),
                apis=self.apis,
            ),
            self.opts,
        )
        operators: Members = {member_label(member): member for member in access.operators}
        researchers: Members = {member_label(member): member for member in access.researchers}
        everyone = operators | researchers
        network = self._network()
        ci = self._ci()
        deployer: Members = {"deployer": f"serviceAccount:{settings.deployer}"} if settings.deployer else {}
        registries = self._registries(identity, everyone, deployer)
        secrets = self._secrets(identity, operators)
        heads = self._heads(network, registries, secrets, node_roles, operators, researchers)
        nodes: Members = {f"{name}-node": as_member(head.node_email) for name, head in heads.items()}
        workers = nodes | self._workers(identity)
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
        audiences = {
            "workers": self._workers(identity),
            "clusters": nodes | drivers,
            "operators": operators,
            "researchers": researchers,
        }
        self._alerts(queues, heads)
        return BuiltStack(
            settings=settings,
            network=network,
            queues=queues,
            records=records,
            buckets=self._buckets(audiences),
            registries=registries,
            secrets=secrets,
            heads=heads,
            identity=identity,
            ci=ci,
            workspaces=workspaces,
        )

    def _sign_ins(self) -> Members:
        """Return the machines outside of Google that sign in; in a stack without queues there is no account for them."""
        if not self.settings.federation:
            return {}
        args = FederationArgs(site=self.site, issuers=self.settings.federation, apis=self.apis)
        federation = Federation("federation", args, self.opts)
        return dict(federation.members) if self.settings.queues else {}

    def _workers(self, identity: Identity) -> Members:
        """Return the account `worker`, if the stack has queues, and the programs that have its rights."""
        accounts: Members = {each.value: identity.members[each] for each in (Role.WORKER,) if each in identity.members}
        return accounts | {member_label(member): member for member in self.settings.access.workers}

    def _records(self, users: Members, publishers: Members) -> Records | None:
        settings = self.settings.records
        if settings is None:
            return None
        args = RecordsArgs(site=self.site, settings=settings, users=users, publishers=publishers, apis=self.apis)
        return Records("records", args, self.opts)

    def _buckets(self, audiences: Mapping[str, Members]) -> dict[str, Bucket]:
        def members(named: Sequence[str]) -> Members:
            found: Members = {}
            for each in named:
                found |= audiences.get(each, {member_label(each): each})
            return found

        return {
            name: Bucket(
                f"{name}-bucket",
                BucketArgs(
                    site=self.site,
                    bucket=name,
                    settings=bucket,
                    readers=members(bucket.readers),
                    writers=members(bucket.writers),
                    apis=self.apis,
                ),
                self.opts,
            )
            for name, bucket in self.settings.buckets.items()
        }

    def _network(self) -> Network | None:
        settings = self.settings.network
        if settings is None:
            return None
        return Network("network", NetworkArgs(site=self.site, settings=settings, apis=self.apis), self.opts)

    def _ci(self) -> CiIdentity | None:
        if self.settings.ci is None:
            return None
        self._node_roles()
        grantable = [*MACHINE_ROLES.values(), *project_node_roles(self.site.project).values()]
        args = CiIdentityArgs(site=self.site, settings=self.settings.ci, grantable=grantable, apis=self.apis)
        return CiIdentity("ci", args, self.opts)

    def _node_roles(self) -> Mapping[str, pulumi.Input[str]]:
        """Return the names of the roles for Ray's nodes: of those that the pipeline's stack made, or of the stack's own."""
        if self.settings.deployer is not None:
            return project_node_roles(self.site.project)
        ids = NODE_ROLES if self.settings.ci is not None else {kind: self.site.names.role(kind) for kind in NODE_ROLES}
        operators: Members = {member_label(member): member for member in self.settings.access.operators}
        args = NodeRolesArgs(site=self.site, ids=ids, operators=operators, apis=self.apis)
        return NodeRoles("nodes", args, self.opts).names

    def _registries(self, identity: Identity, people: Members, deployer: Members) -> dict[str, Registry]:
        return {
            name: Registry(
                f"{name}-registry",
                RegistryArgs(
                    site=self.site,
                    registry=name,
                    settings=registry,
                    readers=people,
                    guests=self._workers(identity),
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
                    readers={role.value: identity.members[role] for role in secret.readers if role in identity.members}
                    | (self._workers(identity) if Role.WORKER in secret.readers else {}),
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
        node_roles: Mapping[str, pulumi.Input[str]],
        operators: Members,
        researchers: Members,
    ) -> dict[str, RayHead]:
        if not self.settings.heads:
            return {}
        assert network is not None  # `parse_settings` requires it, and a zone of each head
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
                    zone=head.zone or self.settings.zone or "",
                    head=name,
                    settings=head,
                    network=network.network,
                    subnet=network.subnet,
                    cidr=network.cidr,
                    node_role=node_roles["head"],
                    ssh_cidrs=self.settings.network.ssh_cidrs if self.settings.network else (),
                    firewalls=self.settings.host_project is None,
                    environment={
                        secret: SecretVariable(env=secrets[secret].env, resource=secrets[secret].resource)
                        for secret in head.environment
                    },
                    repositories=pulled_from,
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
        "storage": bool(settings.bucket_locations) or bool(settings.ci and settings.ci.state_bucket),
        "artifactregistry": bool(settings.registries),
        "secretmanager": bool(settings.secrets),
        "compute": settings.network is not None or bool(settings.heads),
        "tpu": bool(settings.heads),
        "logging": bool(settings.heads),
        "iap": bool(settings.heads),
        "oslogin": bool(settings.heads),
        "monitoring": settings.alerts is not None or bool(settings.heads),
        "cloudkms": settings.grants_key or bool(settings.ci and settings.ci.state_key),
        "cloudbilling": bool(settings.ci and settings.ci.billing_account),
        "billingbudgets": settings.alerts is not None and settings.alerts.budget is not None,
        "iamcredentials": settings.signs_in,
        "sts": settings.signs_in,
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


def project_node_roles(project: str) -> dict[str, str]:
    """Return the roles for Ray's nodes that the stack of a project's pipeline makes: kind → `projects/P/roles/ID`."""
    return {kind: f"projects/{project}/roles/{role}" for kind, role in NODE_ROLES.items()}
