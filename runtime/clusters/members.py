"""Members of a Ray cluster: TPUs that an operator adds, reserved ones among them, and that Ray neither makes nor ends.

A member is made like a node of one of the cluster's pools, from the file that the head's autoscaler reads, but with
labels of ours instead of Ray's, and with the head's address: it joins by itself whenever it boots or its Ray ends. All
are made by `nodes.create`. A queued resource would wait in Google's queue without a bound, be a second thing to remove,
and take no other reservation; a slice that `nodes.create` makes has all its hosts or fails.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from runtime.clusters.nodes import (
    CLUSTER_LABEL,
    DEAD,
    JOINS_LABEL,
    MANAGED_LABEL,
    MEMBER_LABEL,
    TpuNode,
    count_chips,
    count_hosts,
)
from runtime.errors import InvalidValue, NotPossible, UnknownName
from runtime.outputs import is_pool_resource

if TYPE_CHECKING:
    from runtime.clusters.ray_view import RayView

METADATA_KEY: Final = "ray-member"
"""Key of a member's metadata by which its boot program knows that it joins by itself."""
KEY_MARK: Final = "@@HEAD_PUBLIC_KEY@@"
_NAME: Final = re.compile(r"[a-z](?:[a-z0-9-]{0,61}[a-z0-9])?")


class MemberCapacity(StrEnum):
    RESERVED = "reserved"
    ON_DEMAND = "on_demand"
    SPOT = "spot"
    PREEMPTIBLE = "preemptible"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberSpec:
    name: str
    accelerator: str
    capacity: MemberCapacity = MemberCapacity.RESERVED
    reservation: str | None = None
    """`projects/P/locations/Z/reservations/R`; None is any reservation of the project."""
    runtime_version: str | None = None
    """None is that of a pool of the same family."""

    @property
    def hosts(self) -> int:
        return count_hosts(self.accelerator) or 1

    def render_add(self) -> str:
        """Return the command that makes it."""
        words = ["runtime", "cluster", "add", self.accelerator, "--name", self.name, "--capacity", str(self.capacity)]
        words += ["--reservation", self.reservation] if self.reservation else []
        words += ["--runtime-version", self.runtime_version] if self.runtime_version else []
        return f"`{shlex.join(words)}`"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadFacts:
    """Facts about a cluster from the head's own machine."""

    address: str
    """Internal address. It is reserved, so a head that is made again has it too; and unlike the head's name it needs no DNS of
    the project, in which Google's TPU machines are not."""
    config: Mapping[str, Any]
    """The autoscaler's file."""
    ssh_key: str | None = None
    """The public key that the head logs in with."""
    stopped: bool = False
    """Whether an operator stopped Ray there."""


class MemberStep(StrEnum):
    CREATE = "create"
    REPLACE = "replace"
    """A node of this name will never work again: remove it, then create."""
    KEEP = "keep"
    """The node exists or is being created."""


def make_specs(
    accelerator: str,
    *,
    name: str,
    count: int = 1,
    capacity: MemberCapacity = MemberCapacity.RESERVED,
    reservation: str | None = None,
    runtime_version: str | None = None,
) -> list[MemberSpec]:
    """Return one member called `name`, or several called `name-0`, `name-1` …. Raises `InvalidValue` or `NotPossible`."""
    if not count_hosts(accelerator):
        raise InvalidValue("type", accelerator, "a type of TPU and its size, such as v4-16, v5litepod-8 or v6e-4")
    for option, text in (("--reservation", reservation), ("--runtime-version", runtime_version)):
        if text is not None and not text.strip():
            raise InvalidValue(option, text, "a name, which a variable of your shell may have lacked")
    if reservation is not None and capacity is not MemberCapacity.RESERVED:
        raise NotPossible(
            f"`--reservation` is for reserved TPUs, and `--capacity` is {capacity}", hint="`--capacity reserved`"
        )
    names = [name] if count == 1 else [f"{name}-{number}" for number in range(count)]
    for each in names:
        if not _NAME.fullmatch(each):
            raise InvalidValue(
                "name", each, "up to 63 lower-case letters, digits and dashes; a letter first, no dash last"
            )
    return [
        MemberSpec(
            name=each,
            accelerator=accelerator,
            capacity=capacity,
            reservation=reservation,
            runtime_version=runtime_version,
        )
        for each in names
    ]


def plan_members(specs: Iterable[MemberSpec], nodes: Iterable[TpuNode], cluster: str) -> dict[str, MemberStep]:
    """Decide the action for each name. Raises `NotPossible` for a name that something else has."""
    known = {node.name: node for node in nodes}
    steps = {}
    for spec in specs:
        node = known.get(spec.name)
        if node is None:
            steps[spec.name] = MemberStep.CREATE
            continue
        _expect_same(spec, node, cluster)
        steps[spec.name] = MemberStep.REPLACE if node.state in DEAD or node.state == "DELETING" else MemberStep.KEEP
    return steps


def _expect_same(spec: MemberSpec, node: TpuNode, cluster: str) -> None:
    of = f"cluster `{node.cluster}`" if node.cluster else "no cluster"
    if node.member != spec.name or node.cluster != cluster:
        what = f"a member of {of}" if node.member else f"a node of {of}"
        raise NotPossible(
            f"the name `{spec.name}` is taken by {what} in this zone", hint="choose another with `--name NAME`"
        )
    kind, asked = f"{node.accelerator} ({node.capacity})", f"{spec.accelerator} ({spec.capacity})"
    differs = None
    if kind != asked:
        differs = f"a {kind}, not a {asked}"
    # Google may name the project of a reservation by its number.
    elif spec.reservation and spec.reservation.rpartition("/")[2] != (node.reservation or "").rpartition("/")[2]:
        differs = f"of {node.reservation or 'any reservation'}, not of {spec.reservation}"
    elif spec.runtime_version and spec.runtime_version != (node.runtime_version or spec.runtime_version):
        differs = f"a TPU with the software {node.runtime_version}, not {spec.runtime_version}"
    if differs is not None:
        raise NotPossible(
            f"member `{spec.name}` is {differs}",
            hint=f"`runtime cluster remove {spec.name}` first, or choose another name with `--name NAME`",
        )


def render_member(spec: MemberSpec, facts: HeadFacts, cluster: str) -> dict[str, Any]:
    """Return the body of `nodes.create`. Raises `NotPossible` if no pool tells how."""
    try:
        return _render_member(spec, facts, cluster)
    except (KeyError, TypeError, AttributeError) as problem:
        raise NotPossible(
            f"the head's autoscaler file has another form than ours: {problem!r}",
            hint="`runtime cluster config --check` says whether it is the contract's",
        ) from problem


def _render_member(spec: MemberSpec, facts: HeadFacts, cluster: str) -> dict[str, Any]:
    pool = _choose_pool(spec, facts.config)
    config = dict(pool["node_config"])
    config.pop("schedulingConfig", None)
    metadata = {key: str(text) for key, text in config.get("metadata", {}).items()}
    keys = metadata.pop("ssh-keys", None)
    if keys is not None and facts.ssh_key is not None:
        metadata["ssh-keys"] = keys.replace(KEY_MARK, facts.ssh_key)
    metadata[METADATA_KEY] = json.dumps(_ray_facts(spec, facts, pool), sort_keys=True)
    scheduling = _scheduling(spec)
    key, maker = MANAGED_LABEL
    ours = {key: maker, JOINS_LABEL: cluster, MEMBER_LABEL: spec.name}
    labels = {name: value for name, value in config.get("labels", {}).items() if name != CLUSTER_LABEL}
    return {
        **config,
        "acceleratorType": spec.accelerator,
        "runtimeVersion": spec.runtime_version or config["runtimeVersion"],
        **({"schedulingConfig": scheduling} if scheduling else {}),
        "labels": dict(sorted({**labels, **ours}.items())),
        "metadata": metadata,
    }


def _ray_facts(spec: MemberSpec, facts: HeadFacts, pool: Mapping[str, Any]) -> dict[str, Any]:
    """Return the resources that the boot program tells Ray: each host of another type offers the CPUs and memory that the program finds."""
    same = pool["node_config"].get("acceleratorType") == spec.accelerator
    resources = dict(pool.get("resources", {})) if same else {"TPU": count_chips(spec.accelerator)}
    # Only the first host of a slice has it, and which one that is the host alone knows.
    resources.pop(f"TPU-{spec.accelerator}-head", None)
    resources = {name: amount for name, amount in resources.items() if not is_pool_resource(name)}
    labels = dict(pool.get("labels", {})) if same else {}
    return {
        "head": facts.address,
        "hosts": spec.hosts,
        "type": spec.accelerator,
        "resources": resources,
        "labels": {**labels, MEMBER_LABEL: spec.name},
    }


def _choose_pool(spec: MemberSpec, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a pool of the same type, else one of the same family, else any."""
    pools: list[Mapping[str, Any]] = [
        each
        for _, each in sorted(config["available_node_types"].items())
        if "acceleratorType" in each.get("node_config", {})
    ]
    family = spec.accelerator.partition("-")[0]

    def closeness(pool: Mapping[str, Any]) -> int:
        its = pool["node_config"]["acceleratorType"]
        return 0 if its == spec.accelerator else 1 if its.partition("-")[0] == family else 2

    if not pools:
        raise NotPossible(
            "the cluster has no pool of TPUs to take settings from",
            hint="add a pool to the stack file, with `max: 0` if Ray is to make none of it, and run `pulumi up`",
        )
    chosen = min(pools, key=closeness)
    if closeness(chosen) == 2 and spec.runtime_version is None:
        raise NotPossible(
            f"no pool of this cluster has TPUs of the family `{family}`, so their software is not known",
            hint="name it with `--runtime-version`; https://cloud.google.com/tpu/docs/runtimes",
        )
    return chosen


def _scheduling(spec: MemberSpec) -> dict[str, Any]:
    if spec.capacity is MemberCapacity.ON_DEMAND:
        return {}
    return {str(spec.capacity): True, **({"reservationName": spec.reservation} if spec.reservation else {})}


def find_members(names: Sequence[str], nodes: Iterable[TpuNode], cluster: str) -> list[TpuNode]:
    """Return the members with these names, without those that are gone already. Raises `NotPossible` for a node that is no
    member, and `UnknownName` if no member has any of the names."""
    nodes = list(nodes)
    members = {node.member: node for node in nodes if node.member is not None and node.cluster == cluster}
    for name in names:
        if name not in members and any(node.name == name for node in nodes):
            raise NotPossible(
                f"`{name}` is no member of this cluster",
                facts=["Ray makes and ends the nodes of pools, and makes a new one for each that is removed"],
                hint="`runtime cluster status` shows the members",
            )
    found = [members[name] for name in dict.fromkeys(names) if name in members]
    if not found:
        raise UnknownName("member", names[0], (each for each in members if each), where=f"in cluster `{cluster}`")
    return found


def find_busy(members: Iterable[TpuNode], ray: RayView) -> list[str]:
    """Return the names of the members on which something holds CPUs or TPUs."""
    return [str(each.member) for each in members if any(address in ray.busy for address in each.addresses)]
