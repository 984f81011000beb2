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
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
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
from runtime.clusters.reaper import API, Removal
from runtime.clusters.refusals import AGAIN, find_next_step, is_too_many
from runtime.errors import InfrastructureFailure, InvalidValue, NotPossible, UnknownName, explain_briefly
from runtime.stack.google_api import GoogleRefused
from runtime.units import format_duration
from runtime.values import dataclass, replace

if TYPE_CHECKING:
    from runtime.clusters.ray_view import RayView
    from runtime.clusters.reaper import Reaper
    from runtime.stack.google_api import GoogleApi

METADATA_KEY: Final = "ray-member"
"""Key of a member's metadata by which its boot program knows that it joins by itself."""
AUTOSCALER_KEY: Final = "ray-autoscaler"
KEY_MARK: Final = "@@HEAD_PUBLIC_KEY@@"
KEY_ATTRIBUTE: Final = "ssh-key"
LOOK_EVERY_S: Final = 5.0
_NAME: Final = re.compile(r"[a-z](?:[a-z0-9-]{0,61}[a-z0-9])?")


class Capacity(StrEnum):
    RESERVED = "reserved"
    ON_DEMAND = "on_demand"
    SPOT = "spot"
    PREEMPTIBLE = "preemptible"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberSpec:
    name: str
    accelerator: str
    capacity: Capacity = Capacity.RESERVED
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
    """What a head's own machine says of its cluster."""

    address: str
    """Internal address. It is reserved, so a head that is made again has it too; and unlike the head's name it needs no DNS of
    the project, in which Google's TPU machines are not."""
    config: Mapping[str, Any]
    """The autoscaler's file."""
    ssh_key: str | None = None
    """The public key that the head logs in with."""


class Step(StrEnum):
    CREATE = "create"
    REPLACE = "replace"
    """A node of this name will never work again: remove it, then create."""
    KEEP = "keep"
    """The node is there or being made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one member."""

    name: str
    accelerator: str
    capacity: str
    state: str = ""
    """Google's word; empty if it lists none."""
    hosts: int = 0
    """Hosts that Google lists."""
    in_ray: int | None = None
    """Hosts that Ray counts on; None if Ray was not asked."""
    created: bool = False
    """Whether this call created it."""
    joined: bool = False
    removed: bool = False
    """Whether it was removed again because it did not become whole."""
    trouble: str | None = None
    """Why the last request for it failed, if it is sent again."""
    error: str | None = None
    next: str | None = None

    @property
    def is_whole(self) -> bool:
        """Whether Google runs all hosts."""
        return self.state == "READY" and self.hosts >= (count_hosts(self.accelerator) or 1)

    @property
    def is_broken(self) -> bool:
        """Whether it failed and is to be removed. A member that was there before and that is under repair, or that Ray does not see
        at this moment, is left to its operator; and nothing is removed only because Ray does not answer."""
        if self.error is None:
            return False
        if self.created:
            return not self.is_whole or self.in_ray is not None
        return self.state in ("CREATING", "READY") and not self.is_whole


def make_specs(
    accelerator: str,
    *,
    name: str,
    count: int = 1,
    capacity: Capacity = Capacity.RESERVED,
    reservation: str | None = None,
    runtime_version: str | None = None,
) -> list[MemberSpec]:
    """Return one member called `name`, or several called `name-0`, `name-1` …. Raises `InvalidValue` or `NotPossible`."""
    if not count_hosts(accelerator):
        raise InvalidValue("type", accelerator, "a type of TPU and its size, such as v4-16, v5litepod-8 or v6e-4")
    for option, text in (("--reservation", reservation), ("--runtime-version", runtime_version)):
        if text is not None and not text.strip():
            raise InvalidValue(option, text, "a name, which a variable of your shell may have lacked")
    if reservation is not None and capacity is not Capacity.RESERVED:
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


def plan_members(specs: Iterable[MemberSpec], nodes: Iterable[TpuNode], cluster: str) -> dict[str, Step]:
    """Decide what is to be done for each name. Raises `NotPossible` for a name that something else has."""
    known = {node.name: node for node in nodes}
    steps = {}
    for spec in specs:
        node = known.get(spec.name)
        if node is None:
            steps[spec.name] = Step.CREATE
            continue
        _expect_same(spec, node, cluster)
        steps[spec.name] = Step.REPLACE if node.state in DEAD or node.state == "DELETING" else Step.KEEP
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
    """Return what the boot program tells Ray: each host of another type offers what the program finds of CPUs and memory."""
    same = pool["node_config"].get("acceleratorType") == spec.accelerator
    resources = dict(pool.get("resources", {})) if same else {"TPU": count_chips(spec.accelerator)}
    # Only the first host of a slice has it, and which one that is the host alone knows.
    resources.pop(f"TPU-{spec.accelerator}-head", None)
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
    if spec.capacity is Capacity.ON_DEMAND:
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


class Joining:
    """Creates members and waits until they are whole; the only place that creates nodes."""

    def __init__(
        self,
        api: GoogleApi,
        reaper: Reaper,
        *,
        project: str,
        zone: str,
        cluster: str,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._api = api
        self._reaper = reaper
        self._instances = f"compute/v1/projects/{project}/zones/{zone}/instances"
        self._parent = f"projects/{project}/locations/{zone}"
        self._cluster = cluster
        self._clock = clock
        self._sleep = sleep
        self._asked: dict[str, str] = {}
        """Member → the operation that creates it."""
        self._created: set[str] = set()
        """Members that this call asked for, and that nobody else did."""
        self._failed: dict[str, tuple[str, str]] = {}
        """Member → why it cannot be made, and the next step."""
        self._trouble: dict[str, str] = {}
        """Member → why the last request for it failed, which is sent again."""

    def read_head(self, head: str) -> HeadFacts:
        """Ask Google for the head's machine. Raises `NotPossible` if it has none, or no autoscaler file."""
        import yaml

        # A list, because reapers and operators may list instances, and a list holds each instance whole.
        found = next(self._api.pages("compute", self._instances, "items", filter=f"name = {head}"), None)
        items = (found or {}).get("metadata", {}).get("items", ())
        text = next((str(each.get("value", "")) for each in items if each.get("key") == AUTOSCALER_KEY), None)
        address = next((each.get("networkIP") for each in (found or {}).get("networkInterfaces", ())), None)
        if text is None or address is None:
            raise NotPossible(
                f"google has no head `{head}` with an autoscaler file", hint="`pulumi up`, then `runtime stack pull`"
            )
        path = f"{self._instances}/{head}/getGuestAttributes"
        attributes = self._api.find("compute", path, queryPath="runtime/") or {}
        said = attributes.get("queryValue", {}).get("items", ())
        key = next((str(each.get("value")) for each in said if each.get("key") == KEY_ATTRIBUTE), None)
        try:
            config = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError):
            config = None  # which has no pools
        return HeadFacts(address=str(address), config=config, ssh_key=key)

    def join(
        self,
        bodies: Mapping[str, Mapping[str, Any]],
        specs: Sequence[MemberSpec],
        *,
        within: timedelta,
        wait: bool = True,
        keep: bool = False,
        look_ray: Callable[[], RayView] | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> list[Outcome]:
        """Create what is missing and wait until Google, and Ray if it is asked, list all hosts of each member.

        Safe to call again after an interruption: what was made is found by its name. A member that is not whole within
        the bound, or that Google cannot make, is removed again unless `keep`. `say` gets what is left if this raises.
        """
        try:
            outcomes, nodes = self._wait(bodies, specs, within=within, wait=wait, look_ray=look_ray, say=say)
            return outcomes if keep or not wait else self._undo(outcomes, nodes)
        except BaseException:
            if left := [each for each in sorted(self._created) if each not in self._failed]:
                names = " ".join(left)
                say(f"left as it is: {names}; the same command goes on, `runtime cluster remove {names}` ends it")
            raise

    def _wait(
        self,
        bodies: Mapping[str, Mapping[str, Any]],
        specs: Sequence[MemberSpec],
        *,
        within: timedelta,
        wait: bool,
        look_ray: Callable[[], RayView] | None,
        say: Callable[[str], None],
    ) -> tuple[list[Outcome], dict[str, TpuNode]]:
        deadline = self._clock() + within.total_seconds()
        said: dict[str, str] = {}
        while True:
            try:
                nodes = self._advance(specs, bodies)
            except InfrastructureFailure as problem:
                if not problem.retryable or self._clock() >= deadline:
                    raise
                say(explain_briefly(problem))
                self._sleep(LOOK_EVERY_S)
                continue
            ray = _look(look_ray)
            outcomes = [self._judge(spec, nodes.get(spec.name), ray, asked=look_ray is not None) for spec in specs]
            for each in outcomes:
                if (text := _describe(each)) != said.get(each.name):
                    said[each.name] = text
                    say(f"{each.name}: {text}")
            open_ = [each for each in outcomes if not each.joined and each.error is None]
            if not wait or not open_:
                break
            if self._clock() >= deadline:
                unknown = look_ray is not None and ray is None
                outcomes = [_expired(each, within, unknown=unknown) if each in open_ else each for each in outcomes]
                break
            self._sleep(LOOK_EVERY_S)
        return [replace(each, created=each.name in self._created) for each in outcomes], nodes

    def _advance(self, specs: Sequence[MemberSpec], bodies: Mapping[str, Mapping[str, Any]]) -> dict[str, TpuNode]:
        """Create what is missing, and list what is there."""
        self._follow()
        nodes = self._list_members(specs)
        self._remove_dead(nodes.values())
        known = {*nodes, *self._asked, *self._failed}
        missing = [each for each in specs if each.name not in known]
        for spec in missing:
            # Of a hundred members that are asked for at once, Google may refuse all but the first few for now.
            if not self._create(spec, bodies[spec.name]):
                break
        if not missing:
            return nodes
        self._follow()
        return self._list_members(specs)

    def _list_members(self, specs: Iterable[MemberSpec]) -> dict[str, TpuNode]:
        """List the nodes of `specs`. A name that something else has meanwhile is a failure, and its node is left alone."""
        wanted = {each.name for each in specs}
        named = [each for each in self._reaper.list_nodes() if each.name in wanted]
        ours = {each.name: each for each in named if each.member == each.name and each.cluster == self._cluster}
        for each in named:
            if each.name not in ours:
                self._failed[each.name] = (
                    f"the name `{each.name}` is taken by another node in this zone",
                    "choose another with `--name NAME`",
                )
        return ours

    def _create(self, spec: MemberSpec, body: Mapping[str, Any]) -> bool:
        """Ask for a member. Returns False if Google takes no more requests for now."""
        repeats, self._created = spec.name in self._created, self._created | {spec.name}
        try:
            answer = self._api.post("tpu", f"{API}/{self._parent}/nodes", body, nodeId=spec.name)
        except InfrastructureFailure as problem:
            why, words, status = explain_briefly(problem), "", None
            if isinstance(problem, GoogleRefused):
                words, status = f"{problem.reason}: {problem.said}", problem.status
                why = f"google refused it: {problem.said or problem.reason}"
            too_many = status == 429 and is_too_many(words)
            if not repeats and (status == 409 or too_many):
                # Another call made it at this moment and answers for it, or may do so until this one asks again.
                self._created -= {spec.name}
            # After these it is not known whether Google makes it, or it does so later: the next list shows it.
            if status in (None, 409) or too_many or (status != 429 and problem.retryable):
                self._trouble[spec.name] = why
            else:
                self._failed[spec.name] = (why, find_next_step(words))
            return not too_many
        self._asked[spec.name] = str(answer.get("name", ""))
        self._trouble.pop(spec.name, None)
        return True

    def _follow(self) -> None:
        """Ask after the creations that are under way: one that failed says why there alone."""
        for name, operation in self._asked.items():
            if not operation or name in self._failed:
                continue
            try:
                answer = self._api.find("tpu", f"{API}/{operation}") or {"done": True}
            except InfrastructureFailure:
                continue
            if problem := answer.get("error"):
                text = " ".join(str(problem.get("message", problem)).split()).rstrip(".")
                self._failed[name] = (f"google could not make it: {text}", find_next_step(text))
            if answer.get("done"):
                self._asked[name] = ""

    def _remove_dead(self, nodes: Iterable[TpuNode]) -> None:
        """Remove what an earlier call left and will never work again, so that its name is free."""
        from runtime.clusters.dead import find_removable

        dead = [each for each in nodes if each.state in DEAD and each.name not in self._asked]
        if dead:
            for each in self._reaper.remove(find_removable(dead)):
                if each.error is not None:
                    self._trouble[each.dead.name] = f"it cannot be removed: {each.error}"

    def _judge(self, spec: MemberSpec, node: TpuNode | None, ray: RayView | None, *, asked: bool) -> Outcome:
        outcome = Outcome(
            name=spec.name,
            accelerator=spec.accelerator,
            capacity=str(spec.capacity),
            state=node.state if node else "",
            hosts=len(set(node.addresses)) if node else 0,
            in_ray=None if ray is None or node is None else len(set(node.addresses) & ray.alive),
            trouble=self._trouble.get(spec.name) if node is None or node.state in DEAD else None,
        )
        if spec.name in self._failed:
            why, step = self._failed[spec.name]
            return replace(outcome, error=why, next=step)
        made = self._asked.get(spec.name) == ""
        if node is None and made:
            step = f"`runtime cluster reap --dry-run` shows what the reaper removes; then {spec.render_add()}"
            return replace(outcome, error="google made it and no longer lists it", next=step)
        if node is not None and node.state in DEAD and spec.name in self._asked:
            return replace(outcome, error=f"it is {node.state} already", next=spec.render_add())
        return replace(outcome, joined=outcome.is_whole and (not asked or (outcome.in_ray or 0) >= spec.hosts))

    def _undo(self, outcomes: list[Outcome], nodes: Mapping[str, TpuNode]) -> list[Outcome]:
        """Remove members that did not become whole: a slice has all its hosts or none."""
        from runtime.clusters.dead import find_removable

        broken = [nodes[each.name] for each in outcomes if each.is_broken and each.name in nodes]
        removals: dict[str, Removal] = {}
        if broken:
            removals = {each.dead.name: each for each in self._reaper.remove(find_removable(broken))}
        return [_with_removal(each, removals.get(each.name)) for each in outcomes]


def _with_removal(outcome: Outcome, removal: Removal | None) -> Outcome:
    if removal is None:
        return outcome
    if removal.error is None:
        return replace(outcome, removed=True)
    left = f"{outcome.error}; left running: {removal.error}"
    return replace(outcome, error=left, next=f"`runtime cluster remove {outcome.name}`")


def _look(look_ray: Callable[[], RayView] | None) -> RayView | None:
    if look_ray is None:
        return None
    try:
        return look_ray()
    except InfrastructureFailure:  # the head restarts, say; the next round asks again
        return None


def _describe(outcome: Outcome) -> str:
    if outcome.error is not None:
        return outcome.error
    hosts = f"{outcome.hosts} of {count_hosts(outcome.accelerator)} hosts"
    if not outcome.state:
        return outcome.trouble or "asked for"
    in_ray = "" if outcome.in_ray is None else f", {outcome.in_ray} in Ray"
    trouble = f"; {outcome.trouble}" if outcome.trouble else ""
    return f"{outcome.state}, {hosts}{in_ray}{trouble}"


def _expired(outcome: Outcome, within: timedelta, *, unknown: bool) -> Outcome:
    what = _describe(outcome) if outcome.state or outcome.trouble else "google lists no such node"
    what += ", and Ray does not answer" if unknown else ""
    step = "allow more with `--within`, or look at the hosts of a member that is kept with `--keep`"
    step = step if outcome.state else AGAIN
    return replace(outcome, error=f"not whole within {format_duration(within)}: {what}", next=step)
