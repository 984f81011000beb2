"""The vocabulary of the rules: what a rule is, the types of resources, and how rules read inputs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from infra.check.recording import Registration, Secret, Unknown
from infra.policy.graph import Graph


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The bounds of one stack. Without them, rules judge by the resources alone."""

    protect: bool | None = None
    """Whether resources that hold work have to be protected; None: all of them or none."""
    regions: frozenset[str] | None = None
    """Where resources may be; None: anywhere."""
    storage_classes: frozenset[str] | None = None
    """Storage classes that claims may name; None: any. Leaving the class to the cluster is always allowed."""
    max_claim: str = "100Ti"


UNBOUNDED: Final = Bounds()

Finding: TypeAlias = tuple[Registration, str, str | None]
"""Resource, message, hint."""

Rule: TypeAlias = Callable[[Graph, Bounds], Iterable[Finding]]

TOPIC: Final = "gcp:pubsub/topic:Topic"
SUBSCRIPTION: Final = "gcp:pubsub/subscription:Subscription"
TOPIC_GRANT: Final = "gcp:pubsub/topicIAMMember:TopicIAMMember"
SUBSCRIPTION_GRANT: Final = "gcp:pubsub/subscriptionIAMMember:SubscriptionIAMMember"
SECRET: Final = "gcp:secretmanager/secret:Secret"
REPOSITORY: Final = "gcp:artifactregistry/repository:Repository"
INSTANCE: Final = "gcp:compute/instance:Instance"
FIREWALL: Final = "gcp:compute/firewall:Firewall"
BUCKET: Final = "gcp:storage/bucket:Bucket"
ACCOUNT: Final = "gcp:serviceaccount/account:Account"
SERVICE: Final = "gcp:projects/service:Service"
SERVICE_IDENTITY: Final = "gcp:projects/serviceIdentity:ServiceIdentity"
PROJECT_GRANT: Final = "gcp:projects/iAMMember:IAMMember"
CUSTOM_ROLE: Final = "gcp:projects/iAMCustomRole:IAMCustomRole"
NAMESPACE: Final = "kubernetes:core/v1:Namespace"
QUOTA: Final = "kubernetes:core/v1:ResourceQuota"
CLAIM: Final = "kubernetes:core/v1:PersistentVolumeClaim"
NETWORK_POLICY: Final = "kubernetes:networking.k8s.io/v1:NetworkPolicy"
CLUSTER_GRANTS: Final = (
    "kubernetes:rbac.authorization.k8s.io/v1:RoleBinding",
    "kubernetes:rbac.authorization.k8s.io/v1:ClusterRoleBinding",
)
AGENT: Final = re.compile(r"serviceAccount:(service-\d+@|\d+@cloudservices)")
"""Members that are agents of Google's services."""


def get(value: Any, key: str) -> Any:
    """A key of an object: unknown if the object is, None if there is no object."""
    if isinstance(value, Unknown):
        return value
    if isinstance(value, Secret):
        return get(value.value, key)
    return value.get(key) if isinstance(value, Mapping) else None


def items_of(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


def may_be(value: Any, wanted: str | bool) -> bool:
    """Whether `value` is the wanted one, or only the cloud knows it."""
    return value == wanted or isinstance(value, Unknown)
