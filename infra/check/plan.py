"""Plans the steps of an `up` between two recordings, without an engine.

`plan` compares an earlier registration of a program's resources with the present one, and returns steps. It follows
those rules of the engine that need no provider: URNs and aliases, ignored changes, imports, protection, and the
dependents that a replacement takes along. `REPLACING`, a table for the types of this program, has the properties that make
Google or Kubernetes replace a resource; docs/decisions/plan-of-recordings.md has its sources and the limits of plans.
"""

from __future__ import annotations

import ipaddress
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, TypeAlias

from infra.check.recording import Recording, Registration, SecretValue, UnknownValue, is_grant


class Action(StrEnum):
    SAME = "same"
    CREATE = "create"
    IMPORT = "import"
    """Take over an existing resource. If its inputs differ from the program's, engines before 2026 refuse; later ones update it."""
    UPDATE = "update"
    REPLACE = "replace"
    DELETE = "delete"
    FORGET = "forget"
    """Removed from the state and left in the cloud (`retain_on_delete`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStep:
    action: Action
    urn: str
    """The new URN; the old URN of a resource that is removed."""
    type: str
    changed: tuple[str, ...] = ()
    """Paths of the inputs that differ: `deadLetterPolicy.maxDeliveryAttempts`."""
    replacing: tuple[str, ...] = ()
    """Paths of `changed`, and of inputs taken from a replaced resource, that cannot be changed in place."""
    was: str | None = None
    """The URN before, if an alias matched."""
    delete_first: bool = False
    """A replacement that deletes before it creates."""
    blocked: str | None = None
    """Why the engine or Google would refuse the step; None if neither does."""

    @property
    def name(self) -> str:
        return self.urn.split("::")[-1]


def plan(old: Recording, new: Recording) -> tuple[PlanStep, ...]:
    """Return the steps from `old` to `new`: the resources of `new` in its order, then deletions, dependents first."""
    return tuple(_Comparison(old, new).steps())


def changes(steps: Sequence[PlanStep]) -> list[PlanStep]:
    return [each for each in steps if each.action is not Action.SAME]


class _Comparison:
    def __init__(self, old: Recording, new: Recording) -> None:
        self.old, self.new = old, new
        self.before = {each.urn: each for each in old.resources}
        self.kept: set[str] = set()
        self.replaced: set[str] = set()
        """New URNs."""

    def steps(self) -> Iterator[PlanStep]:
        for each in self.new.resources:
            yield self._step(each)
        for each in reversed(self.old.resources):
            if each.urn not in self.kept:
                yield _removal(each)

    def _step(self, new: Registration) -> PlanStep:
        old = self._find(new)
        if old is None:
            return PlanStep(action=Action.IMPORT if new.import_id else Action.CREATE, urn=new.urn, type=new.type)
        self.kept.add(old.urn)
        was = old.urn if old.urn != new.urn else None
        if not new.custom:
            return PlanStep(action=Action.SAME, urn=new.urn, type=new.type, was=was)
        if _imports_another(old, new):
            return PlanStep(action=Action.IMPORT, urn=new.urn, type=new.type, was=was)
        changed = tuple(
            path for path in differing_paths(old.inputs, new.inputs) if not _covered(path, new.ignore_changes)
        )
        replacing = self._replacing(old, new, changed)
        if not replacing:
            action = Action.UPDATE if changed else Action.SAME
            blocked = "Google shrinks no disk" if 0 < _boot_disk_gb(new) < _boot_disk_gb(old) else None
            return PlanStep(action=action, urn=new.urn, type=new.type, changed=changed, was=was, blocked=blocked)
        self.replaced.add(new.urn)
        return PlanStep(
            action=Action.REPLACE,
            urn=new.urn,
            type=new.type,
            changed=changed,
            replacing=replacing,
            was=was,
            delete_first=bool(new.delete_before_replace),
            blocked=_refusal_to_replace(old, new),
        )

    def _find(self, new: Registration) -> Registration | None:
        for urn in (new.urn, *new.aliases):
            if urn in self.before and urn not in self.kept:
                return self.before[urn]
        return None

    def _replacing(self, old: Registration, new: Registration, changed: Sequence[str]) -> tuple[str, ...]:
        found = [path for path in changed if _must_replace(new.type, path, old.inputs, new.inputs)]
        found += [path for path in changed if _covered(path, new.replace_on_changes)]
        if self._provider_replaced(old, new):
            found.append("provider")
        # A replaced resource may come back with other outputs, so the engine replaces its dependents too.
        for name, urns in new.property_dependencies.items():
            takes_along = urns & self.replaced and not _covered(name, new.ignore_changes)
            if takes_along and _may_replace(new.type, name):
                found.append(name)
        return tuple(dict.fromkeys(found))

    def _provider_replaced(self, old: Registration, new: Registration) -> bool:
        if (old.provider is None) != (new.provider is None):
            return True
        if old.provider is None or new.provider is None:
            return False
        # A reference is the URN with the id behind it.
        before, now = old.provider.rpartition("::")[0], new.provider.rpartition("::")[0]
        if now in self.replaced:
            return True
        return before != now and now not in {each.urn for each in self.new.resources if before in each.aliases}


def _imports_another(old: Registration, new: Registration) -> bool:
    """Whether `import_id` names another resource than the state has; an unknown id counts as the same."""
    if not new.import_id or new.import_id == old.import_id:
        return False
    identity = old.outputs.get("id")
    return isinstance(identity, str) and identity != new.import_id


def _boot_disk_gb(machine: Registration) -> int:
    """Return the size of a machine's boot disk, 0 without one that is known."""
    disk = machine.inputs.get("bootDisk")
    image = disk.get("initializeParams") if isinstance(disk, Mapping) else None
    size = image.get("size") if isinstance(image, Mapping) else None
    return int(size) if isinstance(size, int | float) else 0


def _refusal_to_replace(old: Registration, new: Registration) -> str | None:
    # The engine allows taking the protection away and replacing in one step.
    if old.protect and new.protect:
        return "it is protected"
    if new.import_id:
        return "it is still marked as imported, and an import cannot be replaced"
    identity = old.outputs.get("id")
    if old.retain_on_delete and isinstance(identity, str) and identity == new.outputs.get("id"):
        return "the old one stays where it is, and has the name"
    return _guarded(old)


def _removal(old: Registration) -> PlanStep:
    blocked = "it is protected" if old.protect else None
    if old.custom and old.retain_on_delete:
        return PlanStep(action=Action.FORGET, urn=old.urn, type=old.type, blocked=blocked)
    return PlanStep(action=Action.DELETE, urn=old.urn, type=old.type, blocked=blocked or _guarded(old))


def _guarded(old: Registration) -> str | None:
    """Return the guard that makes Google's provider refuse a deletion; only an earlier `up` can remove it."""
    if old.retain_on_delete:
        return None
    if old.inputs.get("deletionPolicy") == "PREVENT":
        return "its `deletionPolicy` is PREVENT"
    if old.inputs.get("deletionProtection") is True:
        return "its `deletionProtection` is on"
    return None


def differing_paths(old: Any, new: Any, path: str = "") -> list[str]:
    """Return the paths of all differing leaves. Values that are unknown on both sides are equal."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        found = []
        for key in sorted({**old, **new}):
            # A key that holds a dot stands in quotes, as in the engine.
            part = f'["{key}"]' if re.search(r'[."\[\]]', key) else f".{key}"
            found += differing_paths(old.get(key), new.get(key), (path + part).removeprefix("."))
        return found
    if isinstance(old, list) and isinstance(new, list):
        pairs = enumerate(itertools.zip_longest(old, new))
        return [found for index, pair in pairs for found in differing_paths(*pair, f"{path}[{index}]")]
    return [] if _same(old, new) else [path]


def _same(old: Any, new: Any) -> bool:
    if isinstance(old, UnknownValue) or isinstance(new, UnknownValue):
        return isinstance(old, UnknownValue) and isinstance(new, UnknownValue)
    if isinstance(old, SecretValue) or isinstance(new, SecretValue):
        return isinstance(old, SecretValue) and isinstance(new, SecretValue) and _same(old.value, new.value)
    # In JSON true differs from 1; in Python it does not.
    return type(old) is type(new) and bool(old == new)


def path_parts(path: str) -> tuple[str, ...]:
    """`labels["a.b"].c[0]` → `labels`, `a.b`, `c`, `0`."""
    found = re.findall(r'\["((?:[^"\\]|\\.)*)"\]|\[([0-9]+|\*)\]|([^.\[\]]+)', path)
    return tuple(next(part for part in each if part) for each in found)


def _covered(path: str, patterns: Sequence[str]) -> bool:
    parts = path_parts(path)
    return any(_begins_with(parts, path_parts(pattern)) for pattern in patterns)


def _begins_with(parts: Sequence[str], prefix: Sequence[str]) -> bool:
    return len(parts) >= len(prefix) and all(want in ("*", have) for have, want in zip(parts, prefix, strict=False))


def _must_replace(type_: str, path: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    parts = path_parts(path)
    return is_grant(type_) or any(
        _begins_with(parts, path_parts(pattern)) and (trigger(old, new) if callable(trigger) else trigger)
        for pattern, trigger in _triggers(type_).items()
    )


def _may_replace(type_: str, name: str) -> bool:
    """Whether a new value anywhere in the input `name` could force a replacement."""
    return is_grant(type_) or any(path_parts(pattern)[0] == name for pattern in _triggers(type_))


def _triggers(type_: str) -> Mapping[str, Trigger]:
    own: Mapping[str, Trigger] = REPLACING.get(type_, {})
    return {**KUBERNETES_OBJECT, **own} if type_.startswith("kubernetes:") else own


Trigger: TypeAlias = bool | Callable[[Mapping[str, Any], Mapping[str, Any]], bool]


def _range_moves(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """A subnet's range can grow in place; any other change replaces the subnet."""
    try:
        before, now = (ipaddress.ip_network(each["ipCidrRange"]) for each in (old, new))
    except (KeyError, ValueError, TypeError):
        return True
    return before.version != now.version or not before.subnet_of(now)  # type: ignore[arg-type]


def _all(*paths: str) -> dict[str, Trigger]:
    return dict.fromkeys(paths, True)


KUBERNETES_OBJECT: Final[Mapping[str, Trigger]] = _all("apiVersion", "kind", "metadata.name", "metadata.namespace")

REPLACING: Final[Mapping[str, Mapping[str, Trigger]]] = {
    "gcp:artifactregistry/repository:Repository": _all(
        "repositoryId", "location", "project", "format", "mode", "kmsKeyName", "remoteRepositoryConfig"
    ),
    "gcp:billing/budget:Budget": _all("billingAccount"),
    "gcp:compute/address:Address": _all(
        *("name", "project", "region", "address", "addressType", "description", "purpose", "subnetwork", "networkTier")
    ),
    "gcp:compute/diskResourcePolicyAttachment:DiskResourcePolicyAttachment": _all("name", "project", "zone", "disk"),
    "gcp:compute/firewall:Firewall": _all("name", "project", "direction"),
    "gcp:compute/instance:Instance": _all(
        *("name", "project", "zone", "hostname", "metadataStartupScript", "guestAccelerators", "scratchDisks"),
        *("reservationAffinity", "confidentialInstanceConfig"),
        *(f"bootDisk.{key}" for key in ("deviceName", "source", "mode", "kmsKeySelfLink")),
        *(f"bootDisk.initializeParams.{key}" for key in ("image", "snapshot", "type")),
        *("scheduling.preemptible", "scheduling.provisioningModel"),
        *("networkInterfaces[*].nicType", "networkInterfaces[*].networkIp"),
    ),
    "gcp:compute/network:Network": _all("name", "project", "autoCreateSubnetworks", "description"),
    "gcp:compute/resourcePolicy:ResourcePolicy": _all(
        *("name", "project", "region", "description", "diskConsistencyGroupPolicy", "groupPlacementPolicy"),
        "snapshotSchedulePolicy",
    ),
    "gcp:compute/router:Router": _all("name", "project", "region", "network", "encryptedInterconnectRouter"),
    "gcp:compute/routerNat:RouterNat": _all("name", "project", "region", "router", "type", "endpointTypes"),
    "gcp:compute/subnetwork:Subnetwork": {
        **_all("name", "project", "region", "network", "description"),
        "ipCidrRange": _range_moves,
    },
    "gcp:iam/workloadIdentityPool:WorkloadIdentityPool": _all("workloadIdentityPoolId", "project"),
    "gcp:iam/workloadIdentityPoolProvider:WorkloadIdentityPoolProvider": _all(
        "workloadIdentityPoolId", "workloadIdentityPoolProviderId", "project"
    ),
    "gcp:monitoring/alertPolicy:AlertPolicy": _all("project"),
    "gcp:monitoring/notificationChannel:NotificationChannel": _all("project"),
    "gcp:projects/iAMCustomRole:IAMCustomRole": _all("roleId", "project"),
    "gcp:projects/service:Service": _all("service", "project"),
    "gcp:projects/serviceIdentity:ServiceIdentity": _all("service", "project"),
    "gcp:pubsub/subscription:Subscription": _all("name", "project", "topic", "enableMessageOrdering", "filter", "tags"),
    "gcp:pubsub/topic:Topic": _all("name", "project", "tags"),
    "gcp:secretmanager/secret:Secret": _all("secretId", "project", "replication", "tags"),
    "gcp:serviceaccount/account:Account": _all("accountId", "project"),
    "gcp:storage/bucket:Bucket": _all(
        "name", "location", "project", "enableObjectRetention", "hierarchicalNamespace", "customPlacementConfig"
    ),
    "kubernetes:core/v1:PersistentVolumeClaim": _all(
        "spec.accessModes", "spec.selector", "spec.storageClassName", "spec.volumeMode", "spec.volumeName"
    ),
    "kubernetes:rbac.authorization.k8s.io/v1:RoleBinding": _all("roleRef"),
    "pulumi:providers:kubernetes": _all("clusterIdentifier"),
}
"""Type → inputs that cannot be changed in place. Any change replaces a grant (`…IAMMember`).

Google's types have the inputs that the Terraform provider below pulumi-gcp marks so, as of its source of August 2026.
"""
