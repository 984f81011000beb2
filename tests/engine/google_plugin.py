"""The `gcp` provider of the tests: a Google that is deliberately strict.

It refuses the same requests as Google and its provider: inputs outside the wheel's types or Google's limits, names
that are taken or soft-deleted, APIs that are not enabled, missing resources and accounts, and changes of immutable
inputs. `Read` answers from the store, which tests tamper with. With PUBSUB_EMULATOR_HOST, topics and subscriptions
are also made in Google's Pub/Sub emulator.
"""

from __future__ import annotations

import hashlib
import http.client
import ipaddress
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc

from infra.check.recording import UNKNOWN, UnknownValue
from infra.gcp.outputs import compute
from tests.engine.google_access import CALLER_VARIABLE, refuse_stranger
from tests.engine.google_limits import find_refused
from tests.engine.google_refusals import refuse_firewall, refuse_key, refuse_machine
from tests.engine.google_store import FOLDER_VARIABLE, Cloud, Fault, World
from tests.engine.plugin import (
    Failure,
    Found,
    Plugin,
    Refused,
    Resource,
    Values,
    hide_again,
    is_covered,
    reveal,
    serve,
    struct,
    value_at,
)

MADE_AT: Final = "2026-11-20T00:00:00Z"
NUMBER_DIGITS: Final = 12

ALREADY_ENABLED: Final = frozenset({"serviceusage.googleapis.com"})
"""Without this API, no API of a new project could be enabled."""

DEFAULT_RANGE: Final = "10.128.0.0/20"

EMULATORS_RETENTION_S: Final = 604_800
"""The emulator still has the service's old limit of seven days."""

DEFAULT_AGENTS: Final = re.compile(
    r"serviceAccount:(?:\d+(-compute@developer|@cloudservices)|service-\d+@(gs-project-accounts|compute-system)\.iam)"
    r"\.gserviceaccount\.com"
)

POD: Final = re.compile(r"serviceAccount:[a-z][-a-z0-9]{4,28}[a-z0-9]\.svc\.id\.goog\[[-a-z0-9]+/[-.a-z0-9]+\]")
"""A service account of a namespace on GKE. Google knows the pool of the project's clusters, and no account in them."""

AGENTS: Final = {
    "pubsub": "service-{number}@gcp-sa-pubsub.iam.gserviceaccount.com",
    "tpu": "service-{number}@cloud-tpu.iam.gserviceaccount.com",
    "secretmanager": "service-{number}@gcp-sa-secretmanager.iam.gserviceaccount.com",
    "artifactregistry": "service-{number}@gcp-sa-artifactregistry.iam.gserviceaccount.com",
    "monitoring": "service-{number}@gcp-sa-monitoring-notification.iam.gserviceaccount.com",
}

DEFAULTS_ON_IMPORT: Final[Mapping[str, Mapping[str, Any]]] = {
    "gcp:storage/bucket:Bucket": {"forceDestroy": False},
    "": {"deletionPolicy": "DELETE"},
}
"""Inputs known only to the provider: Google stores none of them, so an import yields their defaults."""

NOT_KEPT_BY_GOOGLE: Final = frozenset(
    {"forceDestroy", "deletionPolicy", "disableOnDestroy", "disableDependentServices", "allowStoppingForUpdate"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """The special properties of a resource type."""

    api: str
    """The API that must be enabled; `{service}` is the resource's own."""
    fixed: tuple[str, ...] = ()
    """Immutable inputs: another value means another resource. `project` is always immutable."""
    held: tuple[str, ...] = ()
    """Inputs that the provider sends in place, and Google refuses to change."""
    refers: Mapping[str, str] = field(default_factory=dict)
    """Path of an input (`*` for each item of a list) → type of the resource it must name."""
    soft_days: int = 0
    """Days for which its name stays taken after deletion."""
    undeletes: int = 0
    """The number of these days during which the provider restores it instead."""
    shared: bool = False
    """Whether creating it again is allowed."""


GRANT: Final = ("role", "member", "condition")
TOPIC, SUBSCRIPTION = "gcp:pubsub/topic:Topic", "gcp:pubsub/subscription:Subscription"
ACCOUNT, SERVICE = "gcp:serviceaccount/account:Account", "gcp:projects/service:Service"
SERVICE_IDENTITY = "gcp:projects/serviceIdentity:ServiceIdentity"
ROLE, BUCKET = "gcp:projects/iAMCustomRole:IAMCustomRole", "gcp:storage/bucket:Bucket"
INSTANCE, DISK, SUBNET = "gcp:compute/instance:Instance", "gcp:compute/disk:Disk", "gcp:compute/subnetwork:Subnetwork"
NETWORK, ROUTER = "gcp:compute/network:Network", "gcp:compute/router:Router"
FIREWALL = "gcp:compute/firewall:Firewall"
POOL = "gcp:iam/workloadIdentityPool:WorkloadIdentityPool"
SECRET, REPOSITORY = "gcp:secretmanager/secret:Secret", "gcp:artifactregistry/repository:Repository"
CHANNEL = "gcp:monitoring/notificationChannel:NotificationChannel"
KEY_GRANT = "gcp:kms/cryptoKeyIAMMember:CryptoKeyIAMMember"
RESOURCE_POLICY = "gcp:compute/resourcePolicy:ResourcePolicy"

KINDS: Final[Mapping[str, Kind]] = {
    SERVICE: Kind(api="serviceusage", fixed=("service",), shared=True),
    SERVICE_IDENTITY: Kind(api="{service}", fixed=("service",), shared=True),
    TOPIC: Kind(api="pubsub", fixed=("name",)),
    SUBSCRIPTION: Kind(
        api="pubsub",
        fixed=("name", "topic", "filter", "enableMessageOrdering"),
        refers={"topic": TOPIC, "deadLetterPolicy.deadLetterTopic": TOPIC},
    ),
    "gcp:pubsub/topicIAMMember:TopicIAMMember": Kind(api="pubsub", fixed=("topic",), refers={"topic": TOPIC}),
    "gcp:pubsub/subscriptionIAMMember:SubscriptionIAMMember": Kind(
        api="pubsub", fixed=("subscription",), refers={"subscription": SUBSCRIPTION}
    ),
    REPOSITORY: Kind(
        api="artifactregistry",
        fixed=("location", "repositoryId", "format", "mode", "kmsKeyName", "remoteRepositoryConfig"),
    ),
    "gcp:artifactregistry/repositoryIamMember:RepositoryIamMember": Kind(
        api="artifactregistry", fixed=("location", "repository"), refers={"repository": REPOSITORY}
    ),
    SECRET: Kind(api="secretmanager", fixed=("secretId", "replication")),
    "gcp:secretmanager/secretIamMember:SecretIamMember": Kind(
        api="secretmanager", fixed=("secretId",), refers={"secretId": SECRET}
    ),
    # A soft-deleted bucket can be restored only until someone else takes its name.
    BUCKET: Kind(api="storage", fixed=("name", "location", "hierarchicalNamespace", "enableObjectRetention")),
    "gcp:storage/bucketIAMMember:BucketIAMMember": Kind(api="storage", fixed=("bucket",), refers={"bucket": BUCKET}),
    ACCOUNT: Kind(api="iam", fixed=("accountId",)),
    "gcp:serviceaccount/iAMMember:IAMMember": Kind(
        api="iam", fixed=("serviceAccountId",), refers={"serviceAccountId": ACCOUNT}
    ),
    # No stack makes one; a test sees the policies refuse it.
    "gcp:serviceaccount/key:Key": Kind(api="iam", fixed=("serviceAccountId",)),
    ROLE: Kind(api="iam", fixed=("roleId",), soft_days=37, undeletes=7),
    "gcp:projects/iAMMember:IAMMember": Kind(api="cloudresourcemanager"),
    POOL: Kind(api="iam", fixed=("workloadIdentityPoolId", "mode"), soft_days=30),
    "gcp:iam/workloadIdentityPoolProvider:WorkloadIdentityPoolProvider": Kind(
        api="iam",
        fixed=("workloadIdentityPoolId", "workloadIdentityPoolProviderId"),
        refers={"workloadIdentityPoolId": POOL},
        soft_days=30,
    ),
    NETWORK: Kind(api="compute", fixed=("name", "autoCreateSubnetworks", "description")),
    SUBNET: Kind(
        api="compute", fixed=("name", "network", "region", "description", "purpose"), refers={"network": NETWORK}
    ),
    "gcp:compute/subnetworkIAMMember:SubnetworkIAMMember": Kind(
        api="compute", fixed=("subnetwork", "region"), refers={"subnetwork": SUBNET}
    ),
    ROUTER: Kind(api="compute", fixed=("name", "network", "region"), refers={"network": NETWORK}),
    "gcp:compute/routerNat:RouterNat": Kind(
        api="compute", fixed=("name", "router", "region"), refers={"router": ROUTER}
    ),
    FIREWALL: Kind(api="compute", fixed=("name", "direction"), held=("network",), refers={"network": NETWORK}),
    "gcp:compute/address:Address": Kind(
        api="compute",
        fixed=("name", "region", "address", "addressType", "subnetwork", "purpose", "description"),
        refers={"subnetwork": SUBNET},
    ),
    DISK: Kind(api="compute", fixed=("name", "zone", "type", "image", "snapshot", "description")),
    RESOURCE_POLICY: Kind(api="compute", fixed=("name", "region", "description", "snapshotSchedulePolicy")),
    "gcp:compute/diskResourcePolicyAttachment:DiskResourcePolicyAttachment": Kind(
        # A boot disk has the name of its machine.
        api="compute",
        fixed=("name", "disk", "zone"),
        refers={"disk": INSTANCE, "name": RESOURCE_POLICY},
    ),
    INSTANCE: Kind(
        api="compute",
        fixed=(
            "name",
            "zone",
            "hostname",
            "metadataStartupScript",
            "bootDisk.deviceName",
            "bootDisk.kmsKeySelfLink",
            "bootDisk.initializeParams.image",
            "bootDisk.initializeParams.snapshot",
            "bootDisk.initializeParams.type",
            "bootDisk.source",
            "networkInterfaces.*.networkIp",
            "scheduling.preemptible",
            "scheduling.provisioningModel",
        ),
        refers={
            "networkInterfaces.*.subnetwork": SUBNET,
            "networkInterfaces.*.network": NETWORK,
            "attachedDisks.*.source": DISK,
            "bootDisk.source": DISK,
            "serviceAccount.email": ACCOUNT,
            "resourcePolicies": RESOURCE_POLICY,
        },
    ),
    "gcp:compute/instanceIAMMember:InstanceIAMMember": Kind(
        api="compute", fixed=("instanceName", "zone"), refers={"instanceName": INSTANCE}
    ),
    "gcp:iap/tunnelInstanceIAMMember:TunnelInstanceIAMMember": Kind(
        api="iap", fixed=("instance", "zone"), refers={"instance": INSTANCE}
    ),
    CHANNEL: Kind(api="monitoring", fixed=("type",)),
    "gcp:monitoring/alertPolicy:AlertPolicy": Kind(api="monitoring", refers={"notificationChannels.*": CHANNEL}),
    "gcp:logging/metric:Metric": Kind(api="logging", fixed=("name",)),
    "gcp:billing/budget:Budget": Kind(
        api="billingbudgets",
        fixed=("billingAccount",),
        refers={"allUpdatesRule.monitoringNotificationChannels.*": CHANNEL},
    ),
    KEY_GRANT: Kind(api="cloudkms", fixed=("cryptoKeyId",)),
    "gcp:billing/accountIamMember:AccountIamMember": Kind(api="cloudbilling", fixed=("billingAccountId",)),
    "gcp:kms/keyRing:KeyRing": Kind(api="cloudkms", fixed=("name", "location")),
}

STOPS: Final = ("machineType", "minCpuPlatform", "serviceAccount", "shieldedInstanceConfig", "enableDisplay")
"""Inputs that Google changes only on a stopped machine."""


class GooglePlugin(Plugin):
    version = "10.2.0"

    def __init__(self, cloud: Cloud, emulator: str | None = None, caller: str = "") -> None:
        super().__init__()
        self.cloud, self.caller = cloud, caller
        self.emulator = _Emulator(emulator) if emulator else None
        self.provider: Values = {}

    # the provider

    def check_provider(self, inputs: Values) -> list[Failure]:
        from tests.infra.provider_types import find_input_problems

        problems = find_input_problems("pulumi:providers:gcp", _known(inputs))
        failures = [Failure(each.path, each.message) for each in problems]
        if not inputs.get("project"):
            failures.append(Failure("project", "is missing: an ambient project would be taken"))
        return failures

    def replaces_provider(self, old: Values, new: Values) -> list[str]:
        return [key for key in ("project",) if old.get(key) != new.get(key)]

    def configure(self, inputs: Values) -> None:
        self.provider = reveal(inputs)

    # checks before creation

    def check(self, wanted: Resource) -> list[Failure]:
        # Unchanged inputs need no second check, nor the import of the wheel's types, which takes a second.
        mark = hashlib.sha256(
            wanted.type.encode() + struct(wanted.inputs).SerializeToString(deterministic=True)
        ).hexdigest()
        if self.cloud.is_approved(mark):
            return []
        failures = self._find_failures(wanted)
        if not failures:
            self.cloud.approve(mark)
        return failures

    def _find_failures(self, wanted: Resource) -> list[Failure]:
        if wanted.type not in KINDS:
            return [Failure("", f"{wanted.type} is not known to the plug-in of the tests; add it to its KINDS")]
        from tests.infra.provider_types import find_input_problems

        failures = [Failure(each.path, each.message) for each in find_input_problems(wanted.type, wanted.inputs)]
        failures += [Failure(path, why) for path, why in find_refused(wanted.type, wanted.inputs)]
        return failures + [
            Failure(key, "is missing: the provider would make up a name")
            for key in ("name",)
            if "name" in KINDS[wanted.type].fixed and key not in wanted.inputs
        ]

    def replaces(self, type_: str, path: str, old: Any, new: Any) -> bool:
        kind = KINDS[type_]
        fixed = (*kind.fixed, "project", *(GRANT if _is_grant(type_) else ()))
        return is_covered(path, fixed) or _shrinks(type_, path, old, new)

    # creating and changing

    def create(self, wanted: Resource) -> tuple[str, Values]:
        inputs = self._completed(wanted.inputs)
        if wanted.preview:
            return "", _known_outputs(inputs, self._outputs(wanted, inputs, serial=None))
        fault = self._start("create", wanted)
        with self.cloud.change() as world:
            refuse_stranger(world, self.caller, "create", wanted.type, inputs)
            id_, outputs = self._make(world, wanted, inputs)
        if self.emulator is not None:
            self.emulator.create(wanted.type, id_, inputs)
        self._end("create", fault)
        return id_, {**wanted.inputs, **hide_again(outputs, wanted.inputs)}

    def _make(self, world: World, wanted: Resource, inputs: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        kind = KINDS[wanted.type]
        _refuse_unless_enabled(world, wanted.type, inputs)
        _refuse_unless_there(world, wanted.type, inputs)
        _refuse_unless_encrypted(world, wanted.type, inputs)
        _refuse_unless_possible(wanted.type, inputs)
        world.serial += 1
        outputs = self._outputs(wanted, inputs, serial=world.serial)
        id_ = _grant_id(world, wanted.type, inputs) if _is_grant(wanted.type) else str(outputs["id"])
        outputs.pop("id", None)
        _give_address(world, outputs)
        taken = world.resources.get(id_)
        # Google accepts a duplicate grant and keeps one. Two in one stack are still a mistake: removing either removes
        # both.
        again = taken is not None and _is_grant(wanted.type) and _is_granted_elsewhere(taken["urn"], wanted.urn)
        if taken is not None and not kind.shared and not again:
            raise Refused(f"Error 409: `{id_}` already exists", grpc.StatusCode.ALREADY_EXISTS)
        ghost = world.deleted.get(id_)
        if ghost is not None and ghost["days"] < kind.soft_days:
            if ghost["days"] >= kind.undeletes:
                raise Refused(
                    f"Error 409: Requested entity already exists: `{id_}` was deleted {ghost['days']} days ago and "
                    f"keeps its name for {kind.soft_days}",
                    grpc.StatusCode.ALREADY_EXISTS,
                )
            del world.deleted[id_]
        world.resources[id_] = {
            "type": wanted.type,
            "urn": wanted.urn,
            "inputs": _json(inputs),
            "outputs": _json(_beyond(inputs, outputs)),
        }
        return id_, {**inputs, **outputs}

    def read(self, known: Resource) -> Found | None:
        fault = self._start("read", known)
        id_ = _plain_id(known.id)
        world = self.cloud.world()
        there = world.resources.get(id_)
        if there is not None:
            refuse_stranger(world, self.caller, "read", known.type, there["inputs"])
        gone = self.emulator is not None and not self.emulator.has(known.type, id_)
        self._end("read", fault)
        if there is None or there["type"] != known.type or gone:
            return None
        stored = there["inputs"]
        if known.inputs:
            # Inputs that Google does not store stay as the engine remembers them.
            asked = reveal(known.inputs)
            inputs = {key: value for key, value in stored.items() if key not in NOT_KEPT_BY_GOOGLE}
            inputs |= {key: asked[key] for key in NOT_KEPT_BY_GOOGLE if key in asked}
            inputs = {key: value for key, value in inputs.items() if key in asked or key not in _PROVIDERS_OWN}
        else:
            inputs = {key: value for key, value in stored.items() if key not in NOT_KEPT_BY_GOOGLE}
            inputs |= {key: value for key, value in _defaults(known.type).items() if key in stored}
            if known.type == BUCKET:
                # The provider returns only the labels that it knows from before.
                inputs.pop("labels", None)
        inputs = hide_again(inputs, known.inputs)
        return Found(id=id_, state={**stored, **inputs, **there["outputs"]}, inputs=inputs)

    def update(self, wanted: Resource) -> Values:
        inputs = self._completed(wanted.inputs)
        kept = {key: value for key, value in wanted.state.items() if key not in wanted.old_inputs}
        if wanted.preview:
            return {**kept, **wanted.inputs}
        fault = self._start("update", wanted)
        with self.cloud.change() as world:
            there = world.resources.get(wanted.id)
            if there is None:
                raise Refused(f"Error 404: `{wanted.id}` was not found", grpc.StatusCode.NOT_FOUND)
            refuse_stranger(world, self.caller, "update", wanted.type, inputs)
            _refuse_unless_enabled(world, wanted.type, inputs)
            _refuse_unless_there(world, wanted.type, inputs)
            _refuse_unless_encrypted(world, wanted.type, inputs)
            _refuse_unless_possible(wanted.type, inputs)
            self._refuse_fixed(wanted.type, there["inputs"], inputs)
            fresh = self._outputs(wanted, inputs, serial=world.serial)
            labels = {key: fresh[key] for key in ("effectiveLabels", "pulumiLabels") if key in fresh}
            there["inputs"] = _json(inputs)
            there["outputs"] |= labels
        if self.emulator is not None:
            self.emulator.update(wanted.type, wanted.id, inputs)
        self._end("update", fault)
        return hide_again({**inputs, **there["outputs"]}, wanted.inputs)

    def delete(self, known: Resource) -> None:
        fault = self._start("delete", known)
        policy = known.state.get("deletionPolicy")
        if policy == "PREVENT":
            raise Refused(f"`{known.id}` has deletion_policy PREVENT and must not be destroyed")
        if policy != "ABANDON":
            self._remove(known)
        self._end("delete", fault)

    def _remove(self, known: Resource) -> None:
        kind = KINDS[known.type]
        with self.cloud.change() as world:
            there = world.resources.get(known.id)
            if there is None:
                return
            refuse_stranger(world, self.caller, "delete", known.type, there["inputs"])
            if known.type == SERVICE and not _disables(known.state):
                return
            if known.type in (INSTANCE, SECRET) and there["inputs"].get("deletionProtection"):
                raise Refused(f"Error 400: `{known.id}` has deletion protection")
            if there["outputs"].get("objects") and not known.state.get("forceDestroy"):
                raise Refused(f"Error 409: The bucket you tried to delete is not empty: `{known.id}`")
            _refuse_while_used(world, known.id, known.type)
            del world.resources[known.id]
            if kind.soft_days:
                world.deleted[known.id] = {"type": known.type, "days": 0}
            if known.type == ACCOUNT:
                _orphan_grants(world, there["outputs"])
        if self.emulator is not None:
            self.emulator.delete(known.type, known.id)

    # faults and cancellation

    def _start(self, operation: str, resource: Resource) -> Fault | None:
        self.cloud.note_call(operation, {"type": resource.type, "urn": resource.urn, "id": resource.id})
        fault = self.cloud.take_fault(operation, resource.type, resource.name)
        if fault is not None and not fault.hang:
            raise Refused(fault.message, grpc.StatusCode.UNKNOWN)
        if fault is not None and fault.hang == "before":
            self._hang(operation)
        return fault

    def _end(self, operation: str, fault: Fault | None) -> None:
        if fault is not None and fault.hang == "after":
            self._hang(operation)

    def _hang(self, operation: str) -> None:
        self.cloud.note_call("hang", {"in": operation})
        self.stopping.wait(600)
        raise Refused("the call was cancelled before Google answered", grpc.StatusCode.CANCELLED)

    # values

    def _completed(self, inputs: Values) -> dict[str, Any]:
        """Return the values that the provider fills in for inputs the resource does not set."""
        values: dict[str, Any] = dict(reveal(inputs))
        if "project" not in values and self.provider.get("project"):
            values["project"] = self.provider["project"]
        return values

    def _outputs(self, wanted: Resource, inputs: Values, *, serial: int | None) -> dict[str, Any]:
        """Compute the outputs; without a serial (in a preview), only those known in advance."""
        outputs: dict[str, Any] = dict(compute(wanted.type, wanted.name, inputs))
        if "labels" in inputs and wanted.type != CHANNEL:
            outputs |= self._labels(inputs)
        if serial is None:
            return outputs
        outputs |= _made_up(wanted, inputs, serial)
        unknown = {key for key, value in outputs.items() if isinstance(value, UnknownValue)}
        return outputs | {key: _invent(key, wanted.urn, serial) for key in unknown}

    def _labels(self, inputs: Values) -> dict[str, Any]:
        defaults = _decoded(self.provider.get("defaultLabels", {}))
        mark = _decoded(self.provider.get("addPulumiAttributionLabel", True))
        labels = {**defaults, **inputs["labels"], **({"goog-pulumi-provisioned": "true"} if mark else {})}
        return {"pulumiLabels": labels, "effectiveLabels": labels}

    def _refuse_fixed(self, type_: str, old: Values, new: Values) -> None:
        for path in (*KINDS[type_].fixed, *KINDS[type_].held, "project"):
            if value_at(old, path) != value_at(new, path):
                raise Refused(f"Error 400: `{path}` cannot change: it is {value_at(old, path)!r}")
        before, now = (value_at(each, "bootDisk.initializeParams.size") for each in (old, new))
        if isinstance(before, int | float) and isinstance(now, int | float) and now < before:
            raise Refused(
                f"Error 400: the requested disk size of {now:.0f} GB is smaller than the {before:.0f} GB of the disk"
            )
        if type_ == INSTANCE and not new.get("allowStoppingForUpdate"):
            for path in STOPS:
                if value_at(old, path) != value_at(new, path):
                    raise Refused(
                        f"changing `{path}` of a machine that runs means to stop it: set allow_stopping_for_update"
                    )


# refusals


def _refuse_unless_enabled(world: World, type_: str, inputs: Values) -> None:
    api = KINDS[type_].api.format_map({"service": inputs.get("service", "")})
    api = api if "." in api else f"{api}.googleapis.com"
    project = str(inputs.get("project") or "")
    if api in ALREADY_ENABLED or not project or f"{project}/{api}" in world.resources:
        return
    raise Refused(
        f"Error 403: {api} API has not been used in project {project_number(project)} before or it is disabled. Enable it, "
        "then retry. If you enabled this API recently, wait a few minutes for the action to propagate to our systems "
        "and retry. Reason: SERVICE_DISABLED",
        grpc.StatusCode.PERMISSION_DENIED,
    )


def _refuse_unless_there(world: World, type_: str, inputs: Values) -> None:
    for path, wanted_type in KINDS[type_].refers.items():
        for value in _values_at(inputs, path):
            if _find(world, wanted_type, str(value), inputs) is None:
                raise Refused(f"Error 404: `{path}` names `{value}`, which was not found", grpc.StatusCode.NOT_FOUND)
    if _is_grant(type_):
        _refuse_unknown_member(world, str(inputs["member"]))
        role = str(inputs["role"])
        if role.startswith("projects/") and role not in world.resources:
            raise Refused(f"Error 400: Role {role} does not exist in the resource's hierarchy")


def _refuse_unless_encrypted(world: World, type_: str, inputs: Values) -> None:
    """Refuse a key that the service's agent was not granted."""
    granted = {
        (each["inputs"]["cryptoKeyId"], each["inputs"]["member"])
        for each in world.resources.values()
        if each["type"] == KEY_GRANT
    }
    refuse_key(type_, inputs, project_number(str(inputs.get("project") or "")), granted)


def _refuse_unless_possible(type_: str, inputs: Values) -> None:
    if type_ == INSTANCE:
        refuse_machine(inputs)
    elif type_ == FIREWALL:
        refuse_firewall(inputs)


def _refuse_unknown_member(world: World, member: str) -> None:
    kind, _, email = member.partition(":")
    if kind == "serviceAccount" and not (DEFAULT_AGENTS.fullmatch(member) or POD.fullmatch(member)):
        known = {each["outputs"].get("email") for each in world.resources.values()}
        if email not in known:
            raise Refused(f"Error 400: Service account {email} does not exist.")
    found = re.match(r"principal(?:Set)?://iam\.googleapis\.com/(projects/\d+/.*?workloadIdentityPools/[^/]+)/", member)
    if found:
        pools = {each["outputs"].get("name") for each in world.resources.values() if each["type"] == POOL}
        if found[1] not in pools:
            raise Refused(f"Error 400: Identity Pool does not exist ({found[1]})")


def _refuse_while_used(world: World, id_: str, type_: str) -> None:
    """Refuse a deletion that Google refuses: networks with machines in them and disks in use, but few others."""
    if type_ not in (NETWORK, SUBNET, DISK, ROUTER, RESOURCE_POLICY):
        return
    for other_id, other in world.resources.items():
        for path, refers in KINDS[other["type"]].refers.items():
            if refers == type_ and not _is_grant(other["type"]):
                for value in _values_at(other["inputs"], path):
                    if _fits(id_, str(value)):
                        raise Refused(f"Error 400: `{id_}` is already being used by `{other_id}`")


def _orphan_grants(world: World, account: Values) -> None:
    """Keep grants with the deleted account, so that a later account of the same name does not get them."""
    member = f"serviceAccount:{account['email']}"
    for id_ in [id_ for id_, each in world.resources.items() if _is_grant(each["type"])]:
        if world.resources[id_]["inputs"]["member"] == member:
            lost = world.resources.pop(id_)
            lost["inputs"]["member"] = f"deleted:{member}?uid={account['uniqueId']}"
            world.resources[f"{id_}?uid={account['uniqueId']}"] = lost


def _find(world: World, type_: str, value: str, inputs: Values) -> str | None:
    """Find the resource that an input names by id, self-link, e-mail address, or name within the same place."""
    for id_, each in world.resources.items():
        if each["type"] != type_:
            continue
        if _plain_id(value) == id_ or (type_ == ACCOUNT and value == each["outputs"].get("email")):
            return id_
        if "/" not in value and id_.rpartition("/")[2] == value and _is_in_place(id_, inputs):
            return id_
    return None


def _is_in_place(id_: str, inputs: Values) -> bool:
    """Return whether an id and the inputs agree on the place, as far as both state it."""
    parts = id_.split("/")
    for key, collection in (
        ("project", "projects"),
        ("location", "locations"),
        ("region", "regions"),
        ("zone", "zones"),
    ):
        if collection in parts and inputs.get(key) and parts[parts.index(collection) + 1] != inputs[key]:
            return False
    return True


def _fits(id_: str, value: str) -> bool:
    """Return whether an id, a self-link or a bare name refers to the resource with this id."""
    value = _plain_id(value)
    return id_ == value or id_.rpartition("/")[2] == value


def _plain_id(value: str) -> str:
    return re.sub(r"^https://(www\.googleapis\.com/compute|compute\.googleapis\.com/compute)/v1/", "", value)


def _values_at(inputs: Values, path: str) -> Iterator[Any]:
    found: Iterable[Any] = [reveal(inputs)]
    for key in path.split("."):
        step: list[Any] = []
        for value in found:
            if key == "*" and isinstance(value, list):
                step += value
            elif isinstance(value, Mapping) and value.get(key) is not None:
                step.append(value[key])
        found = step
    for value in found:
        yield from value if isinstance(value, list) else [value]


def _grant_id(world: World, type_: str, inputs: Values) -> str:
    """Build an id from resource, role, member and condition: two equal grants would undo each other."""
    on = str(inputs["project"])
    for path, wanted_type in KINDS[type_].refers.items():
        on = _find(world, wanted_type, str(value_at(inputs, path)), inputs) or on
    service = "iap/" if type_.startswith("gcp:iap/") else ""
    title = value_at(inputs, "condition.title")
    # Google compares the addresses of people without their case.
    member = str(inputs["member"])
    member = member.lower() if member.startswith(("user:", "group:", "domain:", "serviceAccount:")) else member
    return f"{service}{on}/{inputs['role']}/{member}" + (f"/{title}" if title else "")


def _is_granted_elsewhere(there: str, wanted: str) -> bool:
    """Return whether the existing grant is this grant itself or one from another stack."""
    return there == wanted or there.partition("::")[0] != wanted.partition("::")[0]


def _is_grant(type_: str) -> bool:
    return type_.endswith(("IAMMember", "IamMember"))


def _shrinks(type_: str, path: str, old: Any, new: Any) -> bool:
    """Disks and address ranges can grow in place."""
    if type_ == DISK and path == "size":
        return isinstance(old, int) and isinstance(new, int) and new < old
    if type_ == SUBNET and path == "ipCidrRange" and isinstance(old, str) and isinstance(new, str):
        return not ipaddress.ip_network(old).subnet_of(ipaddress.ip_network(new))  # type: ignore[arg-type]
    return False


def _disables(state: Values) -> bool:
    return bool(state.get("disableOnDestroy", True))


# values that Google adds


def project_number(project: str) -> str:
    """Derive a project number from the project id, so that tests can compute it."""
    return str(int(hashlib.sha256(project.encode()).hexdigest(), 16))[:NUMBER_DIGITS].replace("0", "1")


def _made_up(wanted: Resource, inputs: Values, serial: int) -> dict[str, Any]:
    project = str(inputs.get("project") or "")
    number = project_number(project) if project else ""
    digits = _invent("id", wanted.urn, serial)
    match wanted.type.rpartition(":")[2]:
        case "ServiceIdentity":
            service = str(inputs["service"]).removesuffix(".googleapis.com")
            pattern = AGENTS.get(service, f"service-{{number}}@gcp-sa-{service}.iam.gserviceaccount.com")
            email = pattern.format(number=number)
            return {"email": email, "member": f"serviceAccount:{email}"}
        case "Secret":
            return {"name": f"projects/{number}/secrets/{inputs['secretId']}", "createTime": MADE_AT}
        case "WorkloadIdentityPool":
            return {"name": _pool_name(number, inputs), "state": "ACTIVE"}
        case "WorkloadIdentityPoolProvider":
            provider = inputs["workloadIdentityPoolProviderId"]
            return {"name": f"{_pool_name(number, inputs)}/providers/{provider}", "state": "ACTIVE"}
        case "AlertPolicy":
            return dict.fromkeys(("id", "name"), f"projects/{project}/alertPolicies/{digits}")
        case "NotificationChannel":
            return dict.fromkeys(("id", "name"), f"projects/{project}/notificationChannels/{digits}")
        case "Budget":
            return {"id": f"billingAccounts/{inputs['billingAccount']}/budgets/{digits}", "name": digits}
        case "Account":
            return {"uniqueId": _invent("uniqueId", wanted.urn, serial)}
        case "Bucket":
            return {"projectNumber": int(number), "timeCreated": MADE_AT, "updated": MADE_AT}
        case "Instance":
            return {"currentStatus": "RUNNING", "cpuPlatform": "Intel Cascade Lake"}
    return {}


def _pool_name(number: str, inputs: Values) -> str:
    pool = str(inputs["workloadIdentityPoolId"]).rpartition("/")[2]
    return f"projects/{number}/locations/global/workloadIdentityPools/{pool}"


def _invent(key: str, urn: str, serial: int) -> Any:
    """Invent a value that only Google knows: different for each resource created, stable during its life."""
    if re.search(r"[Tt]ime(stamp)?$|^timeCreated$|^updated$", key):
        return MADE_AT
    return str(int(hashlib.sha256(f"{key} {urn} {serial}".encode()).hexdigest(), 16))[:19]


def _give_address(world: World, outputs: dict[str, Any]) -> None:
    """Assign an address in the subnet to a reservation, and to every network interface that names a subnet."""
    if outputs.get("addressType") == "INTERNAL":
        outputs["address"] = f"10.64.1.{2 + world.serial % 250}"
    for index, face in enumerate(outputs.get("networkInterfaces") or ()):
        subnet = next(
            (
                each
                for id_, each in world.resources.items()
                if each["type"] == SUBNET and _fits(id_, str(face.get("subnetwork", "")))
            ),
            None,
        )
        face["name"] = f"nic{index}"
        if isinstance(face.get("networkIp"), UnknownValue | None):
            network = ipaddress.ip_network(subnet["inputs"]["ipCidrRange"] if subnet else DEFAULT_RANGE)
            face["networkIp"] = str(network[2 + world.serial % 250])


def _known(inputs: Values) -> dict[str, Any]:
    """Drop the inputs that the SDK adds to a provider."""
    return {key: value for key, value in inputs.items() if key not in ("version", "pluginDownloadURL")}


def _known_outputs(inputs: Values, outputs: Values) -> dict[str, Any]:
    """Return a preview's outputs: the given inputs, and nothing that only Google knows."""
    added = {key: value if key in inputs else UNKNOWN for key, value in outputs.items() if key != "id"}
    return {**inputs, **added}


def _beyond(inputs: Values, outputs: Values) -> dict[str, Any]:
    """Return the outputs that differ from the inputs."""
    return {key: value for key, value in outputs.items() if key not in inputs or value != inputs[key]}


def _defaults(type_: str) -> dict[str, Any]:
    return {**DEFAULTS_ON_IMPORT[""], **DEFAULTS_ON_IMPORT.get(type_, {})}


_PROVIDERS_OWN: Final = frozenset({"project"})


def _decoded(value: Any) -> Any:
    """Decode a provider's inputs, which travel as text."""
    return json.loads(value) if isinstance(value, str) else value


def _json(values: Values) -> dict[str, Any]:
    copied: dict[str, Any] = json.loads(json.dumps(values))
    return copied


class _Emulator:
    """Topics and subscriptions in Google's Pub/Sub emulator, over its JSON API."""

    def __init__(self, address: str) -> None:
        self._address = address

    def create(self, type_: str, id_: str, inputs: Values) -> None:
        if type_ in (TOPIC, SUBSCRIPTION):
            self._call("PUT", id_, _body(type_, inputs))

    def update(self, type_: str, id_: str, inputs: Values) -> None:
        if type_ == SUBSCRIPTION:
            body = _body(type_, inputs)
            # The emulator changes no other fields of an existing subscription.
            mask = ("ackDeadlineSeconds", "messageRetentionDuration", "retryPolicy", "deadLetterPolicy")
            fields = [key for key in mask if key in body]
            self._call("PATCH", id_, {"subscription": {"name": id_, **body}, "updateMask": ",".join(fields)})

    def has(self, type_: str, id_: str) -> bool:
        return type_ not in (TOPIC, SUBSCRIPTION) or self._call("GET", id_, missing_is_fine=True)

    def delete(self, type_: str, id_: str) -> None:
        if type_ in (TOPIC, SUBSCRIPTION):
            self._call("DELETE", id_, missing_is_fine=True)

    def _call(self, method: str, id_: str, body: Values | None = None, *, missing_is_fine: bool = False) -> bool:
        connection = http.client.HTTPConnection(self._address, timeout=240)
        try:
            text = json.dumps(body) if body is not None else None
            connection.request(method, f"/v1/{id_}", text, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            said = answer.read().decode(errors="replace")
        except OSError as problem:
            raise Refused(f"the Pub/Sub emulator does not answer: {problem}", grpc.StatusCode.UNAVAILABLE) from problem
        finally:
            connection.close()
        if answer.status == http.client.NOT_FOUND and missing_is_fine:
            return False
        if answer.status >= http.client.BAD_REQUEST:
            raise Refused(f"Error {answer.status}: the Pub/Sub emulator refuses {method} {id_}: {said}")
        return True


def _body(type_: str, inputs: Values) -> dict[str, Any]:
    """Convert a topic or subscription to the API's spelling, which differs from the provider's only in these names."""
    shared = ("labels", "messageRetentionDuration")
    more = ("ackDeadlineSeconds", "retryPolicy", "filter", "enableMessageOrdering", "deadLetterPolicy", "topic")
    body = {key: inputs[key] for key in (shared if type_ == TOPIC else (*shared, *more)) if key in inputs}
    if "messageRetentionDuration" in body:
        wanted_s = float(str(body["messageRetentionDuration"]).removesuffix("s"))
        body["messageRetentionDuration"] = f"{min(wanted_s, EMULATORS_RETENTION_S):.0f}s"
    if inputs.get("enableExactlyOnceDelivery"):
        body["enableExactlyOnceDelivery"] = True
    if isinstance(inputs.get("expirationPolicy"), Mapping):
        ttl = inputs["expirationPolicy"].get("ttl")
        body["expirationPolicy"] = {"ttl": ttl} if ttl else {}
    return body


if __name__ == "__main__":
    serve(
        GooglePlugin(
            Cloud(Path(os.environ[FOLDER_VARIABLE])),
            os.environ.get("PUBSUB_EMULATOR_HOST"),
            os.environ.get(CALLER_VARIABLE, ""),
        )
    )
