"""The vocabulary of the rules: their signature, the graph of resources, the types, and the reading of inputs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from infra.check.recording import STACK_TYPE, Registration, SecretValue, UnknownValue
from infra.naming import account_domain


@dataclass(frozen=True, slots=True, kw_only=True)
class StackBounds:
    """The bounds of one stack. Without them, rules judge by the resources alone."""

    protect: bool | None = None
    """Whether resources that hold work have to be protected; None: all of them or none."""
    regions: frozenset[str] | None = None
    """Allowed regions; None: all."""
    storage_classes: frozenset[str] | None = None
    """Storage classes that claims may name; None: any. Leaving the class to the cluster is always allowed."""
    max_claim: str = "100Ti"
    project: str | None = None
    """The only project to make things in; None: any."""
    lenders: frozenset[str] = frozenset()
    """Projects whose repositories and secrets the stack grants to its own accounts."""
    members: frozenset[str] | None = None
    """Members outside of the stack that may be granted a role; None: every named group, person and domain."""
    deployer: str | None = None
    """The account of the pipeline that deploys the stack, as a member."""
    cidrs: frozenset[str] | None = None
    """Ranges that a firewall may let in besides Google's proxy; None: every private one."""
    subjects: frozenset[str] | None = None
    """Subjects of cluster roles, such as `Group:lab`; None: every one that Kubernetes does not reserve."""
    repositories: frozenset[tuple[int, int]] | None = None
    """Ids of the repositories and their owners that may federate: none without a pipeline; None: any."""
    buckets: frozenset[str] | None = None
    """Names of the buckets for data; None: any."""
    issuers: frozenset[str] | None = None
    """Issuers whose tokens sign in, besides that of pipelines; None: any."""
    keys: frozenset[str] | None = None
    """Keys that the stack encrypts with: none or one; None: any."""
    image_projects: frozenset[str] | None = None
    """Projects whose images a machine may start from; None: all."""


UNBOUNDED: Final = StackBounds()


class Graph:
    """Resources in the order of registration: their dependencies, and the component that each belongs to."""

    def __init__(self, resources: Sequence[Registration]) -> None:
        self.resources = tuple(each for each in resources if each.type != STACK_TYPE)
        self._by_urn = {each.urn: each for each in self.resources}
        self._waits_for: dict[str, frozenset[str]] = {}

    def get(self, urn: str | None) -> Registration | None:
        return self._by_urn.get(urn or "")

    def of_type(self, *types: str) -> Iterator[Registration]:
        return (each for each in self.resources if each.type in types)

    def made(self, package: str) -> Iterator[Registration]:
        """Yield the resources of a provider, without providers and components."""
        return (each for each in self.resources if each.custom and each.type.startswith(f"{package}:"))

    def waited_for(self, resource: Registration) -> Iterator[Registration]:
        """Yield all resources that exist before `resource`: its dependencies, parents and provider, and theirs."""
        for urn in sorted(self._reach(resource.urn)):
            if found := self._by_urn.get(urn):
                yield found

    def behind(self, resource: Registration, key: str, type_: str) -> frozenset[str]:
        """Return the URNs of the resources of `type_` that the input `key` is made from."""
        urns = resource.property_dependencies.get(key, frozenset())
        return frozenset(urn for urn in urns if (found := self._by_urn.get(urn)) and found.type == type_)

    def parent(self, resource: Registration) -> Registration | None:
        """Return the component that a resource belongs to; None at the top."""
        return self.get(resource.parent)

    def _reach(self, start: str) -> frozenset[str]:
        if start not in self._waits_for:
            seen: set[str] = set()
            todo = list(self._direct(start))
            while todo:
                urn = todo.pop()
                if urn in seen:
                    continue
                seen.add(urn)
                todo += self._waits_for.get(urn) or self._direct(urn)
            self._waits_for[start] = frozenset(seen)
        return self._waits_for[start]

    def _direct(self, urn: str) -> frozenset[str]:
        resource = self._by_urn.get(urn)
        if resource is None:
            return frozenset()
        behind = frozenset(each for urns in resource.property_dependencies.values() for each in urns)
        others = {resource.parent or "", (resource.provider or "").rpartition("::")[0]} - {""}
        return resource.dependencies | behind | others


Finding: TypeAlias = tuple[Registration, str, str | None]
"""Resource, message, hint."""

Rule: TypeAlias = Callable[[Graph, StackBounds], Iterable[Finding]]

TOPIC: Final = "gcp:pubsub/topic:Topic"
SUBSCRIPTION: Final = "gcp:pubsub/subscription:Subscription"
TOPIC_GRANT: Final = "gcp:pubsub/topicIAMMember:TopicIAMMember"
SUBSCRIPTION_GRANT: Final = "gcp:pubsub/subscriptionIAMMember:SubscriptionIAMMember"
SECRET: Final = "gcp:secretmanager/secret:Secret"
REPOSITORY: Final = "gcp:artifactregistry/repository:Repository"
INSTANCE: Final = "gcp:compute/instance:Instance"
FIREWALL: Final = "gcp:compute/firewall:Firewall"
ADDRESS: Final = "gcp:compute/address:Address"
SCHEDULE: Final = "gcp:compute/resourcePolicy:ResourcePolicy"
SCHEDULED_DISK: Final = "gcp:compute/diskResourcePolicyAttachment:DiskResourcePolicyAttachment"
SUBNET: Final = "gcp:compute/subnetwork:Subnetwork"
BUCKET: Final = "gcp:storage/bucket:Bucket"
KEY_GRANT: Final = "gcp:kms/cryptoKeyIAMMember:CryptoKeyIAMMember"
BILLING_GRANT: Final = "gcp:billing/accountIamMember:AccountIamMember"
BUCKET_GRANT: Final = "gcp:storage/bucketIAMMember:BucketIAMMember"
REPOSITORY_GRANT: Final = "gcp:artifactregistry/repositoryIamMember:RepositoryIamMember"
SECRET_GRANT: Final = "gcp:secretmanager/secretIamMember:SecretIamMember"
ACCOUNT: Final = "gcp:serviceaccount/account:Account"
ACCOUNT_GRANT: Final = "gcp:serviceaccount/iAMMember:IAMMember"
IDENTITY_POOL: Final = "gcp:iam/workloadIdentityPool:WorkloadIdentityPool"
IDENTITY_PROVIDER: Final = "gcp:iam/workloadIdentityPoolProvider:WorkloadIdentityPoolProvider"
PIPELINE: Final = "runtime:identity:CiIdentity"
PROVIDER_PREFIX: Final = "pulumi:providers:"
SERVICE: Final = "gcp:projects/service:Service"
SERVICE_IDENTITY: Final = "gcp:projects/serviceIdentity:ServiceIdentity"
PROJECT_GRANT: Final = "gcp:projects/iAMMember:IAMMember"
CUSTOM_ROLE: Final = "gcp:projects/iAMCustomRole:IAMCustomRole"
NAMESPACE: Final = "kubernetes:core/v1:Namespace"
QUOTA: Final = "kubernetes:core/v1:ResourceQuota"
CLAIM: Final = "kubernetes:core/v1:PersistentVolumeClaim"
NETWORK_POLICY: Final = "kubernetes:networking.k8s.io/v1:NetworkPolicy"
CLUSTER_ROLE: Final = "kubernetes:rbac.authorization.k8s.io/v1:Role"
CLUSTER_GRANT: Final = "kubernetes:rbac.authorization.k8s.io/v1:RoleBinding"
AGENT: Final = re.compile(
    r"serviceAccount:(?:service-[0-9]+@[a-z0-9-]+\.iam|[0-9]+@cloudservices)\.gserviceaccount\.com"
)
"""Members that are agents of Google's services."""


def get(value: Any, key: str) -> Any:
    """Return a key of an object; for an unknown object the result is unknown, for no object None."""
    if isinstance(value, UnknownValue):
        return value
    if isinstance(value, SecretValue):
        return get(value.value, key)
    return value.get(key) if isinstance(value, Mapping) else None


def items_of(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


def may_be(value: Any, wanted: str | bool) -> bool:
    """Whether `value` is the wanted one, or only the cloud knows it."""
    return value == wanted or isinstance(value, UnknownValue)


_ACCOUNT: Final = re.compile(r"serviceAccount:(?P<id>[a-z0-9-]+)@(?P<domain>[a-z0-9.-]+\.iam\.gserviceaccount\.com)")


def is_own_account(graph: Graph, member: str) -> bool:
    """Whether a member is an account that the stack makes."""
    found = _ACCOUNT.fullmatch(member)
    return found is not None and any(
        may_be(each.inputs.get("accountId"), found["id"])
        and (not isinstance(project := each.inputs.get("project"), str) or account_domain(project) == found["domain"])
        for each in graph.of_type(ACCOUNT)
    )


def namespace_of(resource: Registration) -> Any:
    return get(resource.inputs.get("metadata"), "namespace")
