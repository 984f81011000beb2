"""A Kubernetes namespace to launch into: quota, closed network, a service account, rights to launch, claims.

Needs a Kubernetes provider in `opts`, and nothing of Google. With `settings.create` off, all its objects are inside the
namespace, so the rights of a namespace's administrator suffice.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pulumi
from pulumi_kubernetes import core, meta, networking, rbac

from infra.naming import JOB_ACCOUNT
from infra.settings.cluster_rules import OWN_ADDRESSES, quantity
from infra.settings.model import ClaimSettings, NamespaceSettings
from infra.settings.read import ensure_valid

LAUNCHER_ROLE: Final = "runtime-launcher"
SLOT_ROLE: Final = "runtime-gpu-slots"
NEIGHBOUR_ROLE: Final = "runtime-job-reader"

POD_SECURITY: Final = {
    "pod-security.kubernetes.io/enforce": "baseline",
    "pod-security.kubernetes.io/warn": "restricted",
    "pod-security.kubernetes.io/audit": "restricted",
}
"""No privileged containers, host paths or host networks. Research images still run as root, so `restricted` only warns."""

NO_OPENINGS: Final = {"services.loadbalancers": "0", "services.nodeports": "0"}
"""Quotas against services that open the namespace to the outside; a job's own service only names its ranks."""

POD_DEFAULTS: Final = {"cpu": "1", "memory": "2Gi"}
"""Requests of a container without its own, if the quota would refuse it; smaller if the quota is smaller."""

RBAC: Final = "rbac.authorization.k8s.io"
EVERY_POD: Final = meta.v1.LabelSelectorArgs()
_READ: Final = ("get", "list", "watch")


def _rule(group: str, resources: Sequence[str], verbs: Sequence[str]) -> rbac.v1.PolicyRuleArgs:
    return rbac.v1.PolicyRuleArgs(api_groups=[group], resources=[*resources], verbs=[*verbs])


LEASES: Final = (_rule("coordination.k8s.io", ["leases"], [*_READ, "create", "update", "patch", "delete"]),)

LAUNCHING: Final = (
    # The launcher makes a job suspended, adds its files, and then starts it by a patch.
    _rule("batch", ["jobs"], [*_READ, "create", "patch", "delete"]),
    # A pod of a dead node keeps its index until its finalizer is patched away; a loader pod fills a claim.
    _rule("", ["pods"], [*_READ, "create", "patch", "delete"]),
    _rule("", ["pods/log"], ["get"]),
    # Clients with a websocket need `get`, and clients with a POST need `create`.
    _rule("", ["pods/exec"], ["get", "create"]),
    _rule("", ["pods/eviction"], ["create"]),
    _rule("", ["configmaps"], [*_READ, "create", "patch", "delete"]),
    # A job with records in a bucket owns one secret with the values of its spec, which is deleted with the job.
    _rule("", ["secrets"], ["create"]),
    _rule("", ["services"], ["get", "list", "create", "delete"]),
    # Not `events.k8s.io`, which has the same events: an administrator of one namespace may not grant those.
    _rule("", ["events"], _READ),
    _rule("", ["persistentvolumeclaims", "resourcequotas", "limitranges"], ["get", "list"]),
    *LEASES,
)
"""All rights of a launcher: it reads no secret, makes no token, and sees nothing outside the namespace."""

NEIGHBOURLY: Final = (_rule("batch", ["jobs"], ["get"]),)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkspaceArgs:
    namespace: str
    settings: NamespaceSettings
    labels: Mapping[str, str] = field(default_factory=dict)
    protect: bool = True
    neighbours: Sequence[str] = ()
    """Launchers of other namespaces that share one table of GPU slots with this one, written like `settings.launchers`.
    They may look up whether a job here still exists."""
    google_account: str | None = None
    """E-mail address of the Google account that jobs act as, by GKE's workload identity."""
    holds_slots: bool = False
    """Whether this namespace has the table; then the neighbours may write its Lease objects."""


class Workspace(pulumi.ComponentResource):
    """The namespace; it and its claims outlive `pulumi destroy` if they hold data."""

    namespace: pulumi.Output[str]
    service_account: pulumi.Output[str]
    """Name of the service account of jobs."""
    claims: Mapping[str, pulumi.Output[str]]
    """Claim's name in the settings → name of the PersistentVolumeClaim."""

    def __init__(self, name: str, args: WorkspaceArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        ensure_valid(args.settings, name)
        super().__init__("runtime:kubernetes:Workspace", name, None, opts)
        self._name, self._args, self._settings = name, args, args.settings
        self._inside: list[pulumi.Resource] = []
        made = self._make_namespace()
        self._inside += [made] if made else []
        self._limit()
        self._close_network()
        account = self._make_account()
        self._grant("launchers", LAUNCHER_ROLE, LAUNCHING, self._settings.launchers)
        self._grant("gpu-slots", SLOT_ROLE, LEASES, args.neighbours if args.holds_slots else ())
        self._grant("job-readers", NEIGHBOUR_ROLE, NEIGHBOURLY, args.neighbours)
        self.namespace = _name_of(made) if made else pulumi.Output.from_input(args.namespace)
        self.service_account = _name_of(account)
        self.claims = {claim: self._claim(claim, each) for claim, each in self._settings.claims.items()}
        self.register_outputs(
            {"namespace": self.namespace, "service_account": self.service_account, "claims": dict(self.claims)}
        )

    def _make_namespace(self) -> core.v1.Namespace | None:
        if not self._settings.create:
            return None
        namespace = self._args.namespace
        return core.v1.Namespace(
            f"{self._name}-namespace",
            metadata=meta.v1.ObjectMetaArgs(
                name=namespace, labels={**self._settings.labels, **self._args.labels, **POD_SECURITY}
            ),
            opts=self._options(
                protect=self._args.protect,
                # The deletion of a namespace deletes its claims.
                retain_on_delete=bool(self._settings.claims),
            ),
        )

    def _limit(self) -> None:
        # The makers of a foreign namespace also set its limits, unless the settings have some.
        if not (self._settings.create or self._settings.quota):
            return
        core.v1.ResourceQuota(
            f"{self._name}-quota",
            metadata=self._metadata("runtime-quota"),
            spec=core.v1.ResourceQuotaSpecArgs(hard={**NO_OPENINGS, **self._settings.quota}),
            opts=self._options(),
        )
        defaults = pod_defaults(self._settings.quota)
        if defaults is not None:
            core.v1.LimitRange(
                f"{self._name}-defaults",
                metadata=self._metadata("runtime-defaults"),
                spec=core.v1.LimitRangeSpecArgs(limits=[defaults]),
                opts=self._options(),
            )

    def _close_network(self) -> None:
        networking.v1.NetworkPolicy(
            f"{self._name}-default-deny",
            metadata=self._metadata("runtime-default-deny"),
            spec=networking.v1.NetworkPolicySpecArgs(pod_selector=EVERY_POD, policy_types=["Ingress", "Egress"]),
            opts=self._options(),
        )
        networking.v1.NetworkPolicy(
            f"{self._name}-workers",
            metadata=self._metadata("runtime-workers"),
            spec=open_to(self._settings.egress_cidrs, metadata=self._args.google_account is not None),
            opts=self._options(),
        )

    def _make_account(self) -> core.v1.ServiceAccount:
        return core.v1.ServiceAccount(
            f"{self._name}-account",
            metadata=self._metadata(
                JOB_ACCOUNT,
                annotations={"iam.gke.io/gcp-service-account": account}
                if (account := self._args.google_account)
                else None,
            ),
            automount_service_account_token=False,
            image_pull_secrets=[
                core.v1.LocalObjectReferenceArgs(name=secret) for secret in self._settings.image_pull_secrets
            ]
            or None,
            opts=self._options(),
        )

    def _grant(self, purpose: str, role: str, rules: Sequence[rbac.v1.PolicyRuleArgs], whom: Sequence[str]) -> None:
        """Make a role and its binding. The launchers' role exists without subjects, too, so that an administrator can
        bind it by hand."""
        if not whom and role != LAUNCHER_ROLE:
            return
        made = rbac.v1.Role(
            f"{self._name}-{purpose}-role",
            metadata=self._metadata(role),
            rules=rules,
            opts=self._options(),
        )
        if whom:
            rbac.v1.RoleBinding(
                f"{self._name}-{purpose}",
                metadata=self._metadata(role),
                role_ref=rbac.v1.RoleRefArgs(api_group=RBAC, kind="Role", name=role),
                subjects=[subject(each) for each in whom],
                opts=self._options(made),
            )

    def _claim(self, claim: str, settings: ClaimSettings) -> pulumi.Output[str]:
        if settings.existing:
            return pulumi.Output.from_input(claim)
        made = core.v1.PersistentVolumeClaim(
            f"{self._name}-claim-{claim}",
            # A class that binds on first use would keep `up` waiting for a job that nobody can launch yet.
            metadata=self._metadata(claim, annotations={"pulumi.com/skipAwait": "true"}),
            spec=claim_spec(settings),
            opts=self._options(protect=self._args.protect, retain_on_delete=True),
        )
        return _name_of(made)

    def _metadata(self, name: str, **others: Any) -> meta.v1.ObjectMetaArgs:
        return meta.v1.ObjectMetaArgs(
            name=name, namespace=self._args.namespace, labels=dict(self._args.labels), **others
        )

    def _options(self, *needs: pulumi.Resource, **others: Any) -> pulumi.ResourceOptions:
        # Names are fixed, so a new object cannot exist beside the old one.
        return pulumi.ResourceOptions(
            parent=self, depends_on=[*self._inside, *needs], delete_before_replace=True, **others
        )


def claim_spec(settings: ClaimSettings) -> core.v1.PersistentVolumeClaimSpecArgs:
    storage_class = settings.storage_class
    if storage_class is None and settings.existing_volume:
        # Left out, the cluster would fill in its default class, and a volume of no class would never bind.
        storage_class = ""
    return core.v1.PersistentVolumeClaimSpecArgs(
        access_modes=[settings.access_mode],
        resources=core.v1.VolumeResourceRequirementsArgs(requests={"storage": settings.size}),
        storage_class_name=storage_class,
        volume_name=settings.existing_volume,
    )


METADATA: Final = (("169.254.169.252/32", (987, 988)), ("169.254.169.254/32", (80,)))
"""Where a node of GKE gives pods tokens of their own account; with Dataplane V2 the second.
https://cloud.google.com/kubernetes-engine/docs/how-to/workload-identity"""


def open_to(cidrs: Sequence[str], *, metadata: bool = False) -> networking.v1.NetworkPolicySpecArgs:
    """Return the policy that lets the namespace's pods reach each other, name servers, HTTPS and `cidrs`; with `metadata`,
    also GKE's metadata server."""
    inside = networking.v1.NetworkPolicyPeerArgs(pod_selector=EVERY_POD)
    declared = [
        networking.v1.NetworkPolicyPeerArgs(ip_block=networking.v1.IPBlockArgs(cidr=cidr, except_=_own_within(cidr)))
        for cidr in cidrs
    ]
    egress = [
        networking.v1.NetworkPolicyEgressRuleArgs(to=[inside]),
        # The address of the name servers differs between clusters.
        networking.v1.NetworkPolicyEgressRuleArgs(ports=[_port("UDP", 53), _port("TCP", 53)]),
        networking.v1.NetworkPolicyEgressRuleArgs(ports=[_port("TCP", 443)]),
    ]
    for cidr, ports in METADATA if metadata else ():
        block = networking.v1.NetworkPolicyPeerArgs(ip_block=networking.v1.IPBlockArgs(cidr=cidr))
        tcp = [_port("TCP", port) for port in ports]
        egress.append(networking.v1.NetworkPolicyEgressRuleArgs(to=[block], ports=tcp))
    if declared:
        egress.append(networking.v1.NetworkPolicyEgressRuleArgs(to=declared))
    return networking.v1.NetworkPolicySpecArgs(
        pod_selector=EVERY_POD,
        policy_types=["Ingress", "Egress"],
        ingress=[networking.v1.NetworkPolicyIngressRuleArgs(from_=[inside])],
        egress=egress,
    )


def _own_within(cidr: str) -> list[str] | None:
    """Return the addresses in a range where a node's credentials are served; None if there are none."""
    outer = ipaddress.ip_network(cidr)
    inside = [str(each) for each in OWN_ADDRESSES if each.version == outer.version and each.subnet_of(outer)]  # type: ignore[arg-type]
    return inside or None


def pod_defaults(quota: Mapping[str, str]) -> core.v1.LimitRangeItemArgs | None:
    """Return a container's default requests and limits for the amounts that the quota counts; None without any.

    A quota on CPUs or memory refuses each pod without requests. The default has limits only if the quota counts limits,
    because Kubernetes refuses a request above a default limit.
    """
    requests = _defaults(quota, "requests.{0}", "{0}")
    limits = _defaults(quota, "limits.{0}")
    # Kubernetes refuses a LimitRange with a request above its limit.
    requests = {each: min(amount, limits.get(each, amount), key=quantity) for each, amount in requests.items()}
    if not (requests or limits):
        return None
    return core.v1.LimitRangeItemArgs(type="Container", default=limits or None, default_request=requests or None)


def _defaults(quota: Mapping[str, str], *patterns: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for resource, usual in POD_DEFAULTS.items():
        counted = [quota[key] for pattern in patterns if (key := pattern.format(resource)) in quota]
        if counted:
            found[resource] = min([usual, *counted], key=quantity)
    return found


def subject(launcher: str) -> rbac.v1.SubjectArgs:
    """Return `User:alice`, `Group:lab` or `ServiceAccount:NAMESPACE/NAME` as a subject of a RoleBinding."""
    kind, _, who = launcher.partition(":")
    if kind == "ServiceAccount":
        namespace, _, name = who.partition("/")
        return rbac.v1.SubjectArgs(kind=kind, name=name, namespace=namespace)
    return rbac.v1.SubjectArgs(kind=kind, name=who, api_group=RBAC)


def _port(protocol: str, port: int) -> networking.v1.NetworkPolicyPortArgs:
    return networking.v1.NetworkPolicyPortArgs(protocol=protocol, port=port)


def _name_of(made: core.v1.Namespace | core.v1.ServiceAccount | core.v1.PersistentVolumeClaim) -> pulumi.Output[str]:
    # From the output and not the argument, so that users of the name wait until the object exists.
    return made.metadata.apply(lambda metadata: str(metadata.name))
