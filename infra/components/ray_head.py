"""The persistent head of a Ray cluster on TPUs, and all its rights.

Ray on the head makes and removes TPU nodes; they never belong to Pulumi. The names and labels here are in the
form that Ray's Google node provider reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import pulumi
from pulumi_gcp import artifactregistry, compute, secretmanager, serviceaccount

from infra.components.apis import Apis
from infra.components.shared import Members, Part, StackSite, as_member, shown_title
from infra.gcp.catalog import find_series
from infra.machine.head_agent import digest
from infra.render.autoscaler import render_autoscaler
from infra.render.cluster import HEAD_TYPE, PORTS, RayCluster, SecretReference
from infra.render.firewalls import list_openings
from infra.render.startup import head_metadata, pool_outputs
from infra.settings.model import HeadSettings
from infra.settings.read import ensure_valid

HEAD_PERMISSIONS: Final = (
    "compute.instances.get",
    "compute.instances.list",
    "compute.instances.setLabels",
    # Ray waits for the operation that sets labels.
    "compute.zoneOperations.get",
    "tpu.nodes.create",
    "tpu.nodes.delete",
    "tpu.nodes.get",
    "tpu.nodes.list",
    "tpu.nodes.update",
    "tpu.operations.get",
    "tpu.operations.list",
)
"""Permissions of the calls of Ray's node provider, and no more. Queued resources have no permissions of their own: IAM counts them as
nodes, and refuses a role that names a permission it does not know.
https://cloud.google.com/iam/docs/roles-permissions/tpu"""

REAPER_PERMISSIONS: Final = (
    # The head's own settings, for `runtime cluster config --check`.
    "compute.instances.getGuestAttributes",
    # To tell the nodes of this head from those of an older one, or of none.
    "compute.instances.list",
    *(each for each in HEAD_PERMISSIONS if each.startswith("tpu.") and each != "tpu.nodes.update"),
)

RAY_WRITES: Final = ("ray-file-mounts-contents", "ray-launch-config", "ray-node-status", "ray-runtime-config")
"""Label keys that Ray changes while it runs."""

BOOT_LABELS: Final = "bootDisk.initializeParams.labels"
"""Set once. Another label of the stack would be another machine to some releases of Google's provider, and a head that
is protected would then let no change of the stack through.
https://github.com/hashicorp/terraform-provider-google/issues/17044"""

SNAPSHOT_LABELS: Final = "snapshotSchedulePolicy.snapshotProperties.labels"
"""Set once: other labels would be another schedule, and Google removes no snapshots of one that is gone.
https://github.com/hashicorp/terraform-provider-google/issues/19394"""

SNAPSHOT_START: Final = "09:00"
"""UTC; Google starts within the hour."""

SCOPES: Final = ("https://www.googleapis.com/auth/cloud-platform",)


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretVariable:
    env: str
    resource: pulumi.Input[str]
    """`projects/P/secrets/N`; the newest enabled version is read on the node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRolesArgs:
    site: StackSite
    ids: Mapping[str, str]
    """Of the roles `head` and `reaper`; unique in the project."""
    operators: Members = field(default_factory=dict)
    """Label → person who lists, adds and removes nodes."""
    apis: Apis | None = None


class NodeRoles(Part):
    """The custom roles in the project of those who handle TPU nodes."""

    names: Mapping[str, pulumi.Output[str]]
    """`projects/P/roles/ID` of the roles `head` and `reaper`."""

    def __init__(self, name: str, args: NodeRolesArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        site = args.site
        super().__init__("runtime:ray:NodeRoles", name, site, args.apis, opts)
        wanted = {
            "head": ("Makes and removes TPU nodes", HEAD_PERMISSIONS),
            "reaper": ("Lists, adds and removes TPU nodes", REAPER_PERMISSIONS),
        }
        self.names = {
            kind: self._custom_role(
                f"{name}-{kind}", args.ids[kind], shown_title(site, title), f"{title} of Ray clusters", permissions
            ).name
            for kind, (title, permissions) in wanted.items()
        }
        for label, member in args.operators.items():
            self._project_grant(f"{name}-{label}-reaper", self.names["reaper"], member, "iam")
        self._register()


@dataclass(frozen=True, slots=True, kw_only=True)
class RayHeadArgs:
    site: StackSite
    zone: str
    head: str
    """The name that users say; `Names.cluster` makes Ray's name of it."""
    settings: HeadSettings
    network: pulumi.Input[str]
    subnet: pulumi.Input[str]
    cidr: pulumi.Input[str]
    node_role: pulumi.Input[str]
    """`projects/P/roles/ID` of the role `head`, as `NodeRoles` makes it."""
    ssh_cidrs: Sequence[str] = ()
    """Ranges that people log in from without Google's proxy, such as a VPN's."""
    firewalls: bool = True
    """False for a network of another project: Google lets nobody else make its firewall rules."""
    environment: Mapping[str, SecretVariable] = field(default_factory=dict)
    """Secret → variable of every process of the cluster. The component grants its nodes access to each."""
    repositories: Members = field(default_factory=dict)
    """Label → `projects/P/locations/R/repositories/N` that the nodes pull from."""
    operators: Members = field(default_factory=dict)
    """Label → member that logs in to the head, and adds nodes with the nodes' identity."""
    users: Members = field(default_factory=dict)
    """Label → member that logs in to the head to use the cluster. A person on a machine can act as its account, so these
    members have all rights of the head."""
    records: str | None = None
    """URL of the bucket of the stack's records. Jobs on the cluster keep theirs there, so the bucket's owner lets
    both accounts, `head_email` and `node_email`, read and write it."""
    apis: Apis | None = None


class RayHead(Part):
    """Accounts, roles, firewall and the VM, which installs itself from its metadata and needs no second `up`."""

    name: str
    """Name of the VM."""
    cluster_name: str
    zone: str
    image: str
    internal_ip: pulumi.Output[str]
    ports: Mapping[str, int]
    """`gcs`, `client`, `dashboard`, `metrics` …"""
    pools: Mapping[str, object]
    """Pools in the form of the contract: accelerator, runtime_version, capacity, min, max, cpus."""
    config_sha256: pulumi.Output[str]
    """Digest of the rendered autoscaler file."""
    head_email: pulumi.Output[str]
    node_email: pulumi.Output[str]

    def __init__(self, name: str, args: RayHeadArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        ensure_valid(args.settings, f"heads.{args.head}")
        super().__init__("runtime:ray:RayHead", name, args.site, args.apis, opts)
        self._args = args
        names = self._site.names
        self.name = names.head(args.head)
        self.cluster_name = names.cluster(args.head)
        self.zone = args.zone
        self.image = args.settings.image
        self.ports = PORTS
        self.pools = pool_outputs(args.settings.pools)

        head = self._machine_account("head", f"Head of Ray cluster {self.cluster_name}")
        node = self._machine_account("node", f"TPU nodes of Ray cluster {self.cluster_name}")
        self.head_email, self.node_email = head.email, node.email
        needed: list[pulumi.Resource] = [
            *self._head_grants(head, node),
            *self._machine_grants("head", head),
            *self._machine_grants("node", node),
            *self._firewalls(),
        ]
        self._people_grants(head, node)

        cluster = self._cluster()
        rendered = cluster.apply(render_autoscaler)
        self.config_sha256 = rendered.apply(digest)
        metadata = pulumi.Output.all(cluster, rendered, self.config_sha256).apply(
            lambda known: head_metadata(known[0], known[1], known[2])
        )
        instance = self._instance(head, metadata, needed)
        self.internal_ip = instance.network_interfaces.apply(lambda interfaces: interfaces[0].network_ip or "")
        self._snapshots(instance)
        self._register()

    def _deletion_policy(self) -> str:
        return "PREVENT" if self._site.protect else "DELETE"

    def _machine_account(self, role: str, title: str) -> serviceaccount.Account:
        return self._account(
            f"{self._name}-{role}",
            f"{self._args.head}-{role}",
            title,
            deletion_policy=self._deletion_policy(),
            join_existing=None,
        )

    def _head_grants(self, head: serviceaccount.Account, node: serviceaccount.Account) -> list[pulumi.Resource]:
        member = as_member(head.email)
        return [
            self._project_grant(f"{self._name}-head-tpus", self._args.node_role, member, "iam", "tpu"),
            self._may_act_as("head-acts-as-node", node, member),
        ]

    def _machine_grants(self, role: str, account: serviceaccount.Account) -> list[pulumi.Resource]:
        """Make the grants that head and nodes both need: write logs and metrics, pull images, read secrets."""
        args = self._args
        member = as_member(account.email)
        writers = [
            self._project_grant(f"{self._name}-{role}-{service}", f"roles/{service}.{writer}", member, "iam", service)
            for service, writer in (("logging", "logWriter"), ("monitoring", "metricWriter"))
        ]
        images = [
            artifactregistry.RepositoryIamMember(
                f"{self._name}-{role}-pulls-{label}",
                project=_segment(repository, 1),
                location=_segment(repository, 3),
                repository=_segment(repository, 5),
                role="roles/artifactregistry.reader",
                member=member,
                opts=self._options("artifactregistry"),
            )
            for label, repository in sorted(args.repositories.items())
        ]
        secrets = [
            secretmanager.SecretIamMember(
                f"{self._name}-{role}-reads-{label}",
                project=_segment(secret.resource, 1),
                secret_id=_segment(secret.resource, 3),
                role="roles/secretmanager.secretAccessor",
                member=member,
                opts=self._options("secretmanager"),
            )
            for label, secret in sorted(args.environment.items())
        ]
        return [*writers, *images, *secrets]

    def _people_grants(self, head: serviceaccount.Account, node: serviceaccount.Account) -> None:
        for label, member in sorted(self._args.operators.items()):
            # A node runs under the nodes' identity, and a person who logs in to a machine can act as its account.
            self._may_act_as(f"node-user-{label}", node, member)
        for label, member in sorted({**self._args.users, **self._args.operators}.items()):
            self._may_act_as(f"head-user-{label}", head, member)

    def _may_act_as(
        self, label: str, account: serviceaccount.Account, member: pulumi.Input[str]
    ) -> serviceaccount.IAMMember:
        return serviceaccount.IAMMember(
            f"{self._name}-{label}",
            service_account_id=account.name,
            role="roles/iam.serviceAccountUser",
            member=member,
            opts=self._options("iam"),
        )

    def _firewalls(self) -> list[pulumi.Resource]:
        """Make the rules of the cluster's machines, unless the network's owner makes them."""
        args = self._args
        return [
            compute.Firewall(
                f"{self._name}-{rule.purpose}-firewall",
                project=self._site.project,
                name=self._site.names.firewall(f"{args.head}-{rule.purpose}"),
                description=f"{rule.title}; cluster {self.cluster_name}",
                network=args.network,
                direction="INGRESS",
                source_ranges=[*rule.sources],
                target_tags=[self.cluster_name],
                allows=[
                    compute.FirewallAllowArgs(protocol=protocol, ports=list(ports) or None)
                    for protocol, ports in rule.allowed
                ],
                deletion_policy="DELETE",
                # Google moves no rule to another network.
                opts=self._options("compute", delete_before_replace=True, replace_on_changes=["network"]),
            )
            for rule in (list_openings(args.cidr, args.ssh_cidrs) if args.firewalls else [])
        ]

    def _cluster(self) -> pulumi.Output[RayCluster]:
        """Collect the values that the renderers need.

        The e-mail comes from the names and not from the account, so that a preview shows the file; `needs` makes the
        machine wait for the account.
        """
        args, site = self._args, self._site
        secrets = pulumi.Output.from_input({each.env: each.resource for each in args.environment.values()})
        return pulumi.Output.all(network=args.network, subnet=args.subnet, secrets=secrets).apply(
            lambda known: RayCluster(
                name=self.cluster_name,
                key=args.head,
                stack=site.names.stack,
                project=site.project,
                region=site.region,
                zone=args.zone,
                head=self.name,
                machine_type=args.settings.machine_type,
                image=args.settings.image,
                network=known["network"],
                subnet=known["subnet"],
                node_email=site.names.account_email(f"{args.head}-node"),
                pools=args.settings.pools,
                secrets=tuple(
                    SecretReference(env=env, resource=resource) for env, resource in sorted(known["secrets"].items())
                ),
                idle_minutes=args.settings.idle_minutes,
                labels=site.labels,
                machine=args.settings,
                cloud_logging=args.settings.cloud_logging,
                records=args.records,
            )
        )

    def _instance(
        self,
        head: serviceaccount.Account,
        metadata: pulumi.Output[dict[str, str]],
        needed: Sequence[pulumi.Resource],
    ) -> compute.Instance:
        args, site = self._args, self._site
        series = find_series(args.settings.machine_type)
        return compute.Instance(
            f"{self._name}-vm",
            project=site.project,
            zone=args.zone,
            name=self.name,
            machine_type=args.settings.machine_type,
            boot_disk=compute.InstanceBootDiskArgs(
                auto_delete=True,
                # Google encrypts the snapshots of a disk with the key of the disk.
                # https://cloud.google.com/compute/docs/disks/customer-managed-encryption
                kms_key_self_link=self._kms_key,
                initialize_params=compute.InstanceBootDiskInitializeParamsArgs(
                    image=args.settings.boot_image,
                    size=args.settings.disk_gb,
                    type=args.settings.disk_type or series.boot_disks[0],
                    labels=dict(site.labels),
                ),
            ),
            # Without an access configuration there is no external address.
            network_interfaces=[
                compute.InstanceNetworkInterfaceArgs(subnetwork=args.subnet, network_ip=self._address().address)
            ],
            service_account=compute.InstanceServiceAccountArgs(email=head.email, scopes=list(SCOPES)),
            shielded_instance_config=compute.InstanceShieldedInstanceConfigArgs(
                enable_secure_boot=True, enable_vtpm=True, enable_integrity_monitoring=True
            ),
            scheduling=compute.InstanceSchedulingArgs(
                automatic_restart=True,
                on_host_maintenance=series.maintenance,
                preemptible=False,
                provisioning_model="STANDARD",
            ),
            tags=[self.cluster_name],
            labels={**site.labels, **self._ray_labels()},
            metadata=metadata.apply(
                lambda rendered: {
                    "enable-oslogin": "TRUE",
                    "block-project-ssh-keys": "TRUE",
                    "enable-guest-attributes": "TRUE",
                    "serial-port-enable": "FALSE",
                    **rendered,
                }
            ),
            deletion_protection=site.protect,
            deletion_policy=self._deletion_policy(),
            allow_stopping_for_update=True,
            opts=self._kept(
                "compute",
                "iap",
                "oslogin",
                needs=[*needed, *self._key_grants("compute")],
                ignore_changes=[*(f'labels["{key}"]' for key in RAY_WRITES), BOOT_LABELS],
            ),
        )

    def _address(self) -> compute.Address:
        """Reserve the head's address, so that nodes and people find a head that is made again where the last one was."""
        return compute.Address(
            f"{self._name}-address",
            project=self._site.project,
            region=self._site.region,
            name=self._site.names.address(self._args.head),
            description=f"Head of Ray cluster {self.cluster_name}",
            address_type="INTERNAL",
            purpose="GCE_ENDPOINT",
            subnetwork=self._args.subnet,
            labels=self._site.labels,
            deletion_policy=self._deletion_policy(),
            opts=self._kept("compute"),
        )

    def _snapshots(self, instance: compute.Instance) -> None:
        """Take a snapshot of the head's disk each day."""
        args, site = self._args, self._site
        if not args.settings.snapshot_days:
            return
        policy = compute.ResourcePolicy(
            f"{self._name}-snapshots",
            project=site.project,
            region=site.region,
            name=site.names.snapshots(args.head),
            description=f"Snapshots of the head of Ray cluster {self.cluster_name}",
            snapshot_schedule_policy=compute.ResourcePolicySnapshotSchedulePolicyArgs(
                schedule=compute.ResourcePolicySnapshotSchedulePolicyScheduleArgs(
                    daily_schedule=compute.ResourcePolicySnapshotSchedulePolicyScheduleDailyScheduleArgs(
                        days_in_cycle=1, start_time=SNAPSHOT_START
                    )
                ),
                retention_policy=compute.ResourcePolicySnapshotSchedulePolicyRetentionPolicyArgs(
                    max_retention_days=args.settings.snapshot_days,
                    # The snapshots of a head that was removed are what is left of it.
                    on_source_disk_delete="KEEP_AUTO_SNAPSHOTS",
                ),
                snapshot_properties=compute.ResourcePolicySnapshotSchedulePolicySnapshotPropertiesArgs(
                    labels=dict(site.labels), storage_locations=site.region
                ),
            ),
            deletion_policy="DELETE",
            opts=self._options("compute", delete_before_replace=True, ignore_changes=[SNAPSHOT_LABELS]),
        )
        compute.DiskResourcePolicyAttachment(
            f"{self._name}-snapshots-of-disk",
            project=site.project,
            zone=args.zone,
            name=policy.name,
            # The boot disk has the machine's name. As an output, so that a head that is replaced has its new disk attached.
            disk=instance.name,
            deletion_policy="DELETE",
            opts=self._options("compute", delete_before_replace=True),
        )

    def _ray_labels(self) -> dict[str, str]:
        """Return the labels by which Ray finds the head among the zone's machines and knows its type."""
        return {
            "ray-cluster-name": self.cluster_name,
            "ray-node-name": f"ray-{self.cluster_name}-head",
            "ray-node-status": "up-to-date",
            "ray-node-type": "head",
            "ray-user-node-type": HEAD_TYPE,
        }


def _segment(resource: pulumi.Input[str], index: int) -> pulumi.Output[str]:
    """Return a part of `projects/P/…`; the first is 0."""
    return pulumi.Output.from_input(resource).apply(lambda text: text.split("/")[index])
