"""Creates members of a Ray cluster and waits until each has all its hosts, or removes it again.

A member carries who makes it, and until when: only that call, or any call after that time by Google's clock, removes it if
it does not become whole. The first operator's slice thus outlives a second operator who waits for a shorter time.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from runtime.clusters.gcp_errors import AGAIN, find_next_step, is_too_many
from runtime.clusters.head_config import START_AGAIN, is_stopped, read_head
from runtime.clusters.members import HeadFacts, MemberSpec
from runtime.clusters.nodes import DEAD, MAKER_LABEL, UNTIL_LABEL, TpuNode, count_hosts
from runtime.clusters.reaper import API, Removal
from runtime.errors import InfrastructureFailure, NotPossible, explain_briefly
from runtime.stack.google_api import GoogleRefused
from runtime.units import format_duration, format_time

if TYPE_CHECKING:
    from runtime.clusters.ray_view import RayView
    from runtime.clusters.reaper import Reaper
    from runtime.stack.google_api import GoogleApi

AUTOSCALER_KEY: Final = "ray-autoscaler"
KEY_ATTRIBUTE: Final = "ssh-key"
LOOK_EVERY_S: Final = 5.0
_TOKEN_BYTES: Final = 8


class ClusterStopped(NotPossible):
    """No member is added to a cluster whose Ray an operator stopped; nothing was made."""

    def __init__(self, head: str) -> None:
        self.head = head
        super().__init__(
            f"Ray on head `{head}` was stopped by `runtime cluster stop`",
            facts=["nothing was added: a member would cost money and join nothing"],
            hint=f"{START_AGAIN} starts Ray again; then run the same command",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberOutcome:
    """The result for one member."""

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
    others_until: datetime | None = None
    """The time until which another call, which made it, waits for it."""
    joined: bool = False
    stopped: bool = False
    """Whether the cluster was stopped meanwhile."""
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
        at this moment, is left to its operator, and one that another call is still making to that call; and nothing is
        removed only because Ray does not answer."""
        if self.error is None or self.others_until is not None:
            return False
        if self.stopped:
            return self.created
        if self.created:
            return not self.is_whole or self.in_ray is not None
        return self.state in ("CREATING", "READY") and not self.is_whole


class Provisioner:
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
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._api = api
        self._reaper = reaper
        self._project, self._zone = project, zone
        self._instances = f"compute/v1/projects/{project}/zones/{zone}/instances"
        self._parent = f"projects/{project}/locations/{zone}"
        self._cluster = cluster
        self._clock = clock
        self._sleep = sleep
        self._now = now
        self._token = secrets.token_hex(_TOKEN_BYTES)
        self._deadline = 0.0
        """By `clock`: when this call stops waiting."""
        self._asked: dict[str, str] = {}
        """Member → the operation that creates it."""
        self._tried: set[str] = set()
        """Members that this call asked for, so that they may be there."""
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
        said = read_head(self._api, project=self._project, zone=self._zone, head=head) or {}
        try:
            config = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError):
            config = None  # which has no pools
        return HeadFacts(address=str(address), config=config, ssh_key=said.get(KEY_ATTRIBUTE), stopped=is_stopped(said))

    def is_stopped(self, head: str) -> bool:
        """Whether an operator stopped Ray on the head; False if Google does not say."""
        try:
            return is_stopped(read_head(self._api, project=self._project, zone=self._zone, head=head))
        except InfrastructureFailure:
            return False  # the next look asks again

    def join(
        self,
        bodies: Mapping[str, Mapping[str, Any]],
        specs: Sequence[MemberSpec],
        *,
        within: timedelta,
        wait: bool = True,
        keep: bool = False,
        look_ray: Callable[[], RayView] | None = None,
        has_stopped: Callable[[], bool] = lambda: False,
        say: Callable[[str], None] = lambda _: None,
    ) -> list[MemberOutcome]:
        """Create missing members and wait until Google, and Ray if it is asked, list all hosts of each member.

        Safe to call again after an interruption: what was made is found by its name. A member that is not whole within
        the bound, or that Google cannot make, is removed again unless `keep`, or if another call makes it; and so is all
        that this call made once the cluster `has_stopped`. `say` gets what is left if this raises.
        """
        try:
            outcomes, nodes = self._wait(
                bodies, specs, within=within, wait=wait, look_ray=look_ray, has_stopped=has_stopped, say=say
            )
            stopped = any(each.stopped for each in outcomes)
            return outcomes if (keep or not wait) and not stopped else self._undo(outcomes, nodes)
        except BaseException:
            if left := [each for each in sorted(self._tried) if each not in self._failed]:
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
        has_stopped: Callable[[], bool],
        say: Callable[[str], None],
    ) -> tuple[list[MemberOutcome], dict[str, TpuNode]]:
        # A call that does not wait returns before Google is done.
        self._deadline = deadline = self._clock() + (within.total_seconds() if wait else 0.0)
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
            # After the creations: a stop that began earlier may not have seen them, and one that begins later does.
            if has_stopped():
                outcomes = [_stopped(each) for each in outcomes]
                break
            open_ = [each for each in outcomes if not each.joined and each.error is None]
            if not wait or not open_:
                break
            if self._clock() >= deadline:
                unknown = look_ray is not None and ray is None
                outcomes = [_expired(each, within, unknown=unknown) if each in open_ else each for each in outcomes]
                break
            self._sleep(LOOK_EVERY_S)
        return outcomes, nodes

    def _advance(self, specs: Sequence[MemberSpec], bodies: Mapping[str, Mapping[str, Any]]) -> dict[str, TpuNode]:
        """Create missing members, and list the existing ones."""
        self._follow()
        nodes = self._list_members(specs)
        self._remove_dead(nodes.values())
        known = {*nodes, *self._asked, *self._failed}
        missing = [each for each in specs if each.name not in known]
        for spec in missing:
            # If a hundred members are requested at once, Google may refuse all but the first few for now.
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
        repeats, self._tried = spec.name in self._tried, self._tried | {spec.name}
        try:
            answer = self._api.post("tpu", f"{API}/{self._parent}/nodes", self._sign(body), nodeId=spec.name)
        except InfrastructureFailure as problem:
            why, words, status = explain_briefly(problem), "", None
            if isinstance(problem, GoogleRefused):
                words, status = f"{problem.reason}: {problem.said}", problem.status
                why = f"google refused it: {problem.said or problem.reason}"
            too_many = status == 429 and is_too_many(words)
            if not repeats and (status == 409 or too_many):
                self._tried -= {spec.name}
            # After these it is not known whether Google makes it, or it does so later: the next list shows it.
            if status in (None, 409) or too_many or (status != 429 and problem.retryable):
                self._trouble[spec.name] = why
            else:
                self._failed[spec.name] = (why, find_next_step(words))
            return not too_many
        self._asked[spec.name] = str(answer.get("name", ""))
        self._trouble.pop(spec.name, None)
        return True

    def _sign(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Say in a member's labels who makes it, and until when."""
        left = timedelta(seconds=max(0.0, self._deadline - self._clock()))
        until = int((self._googles_now() + left).timestamp())
        return {**body, "labels": {**body["labels"], MAKER_LABEL: self._token, UNTIL_LABEL: str(until)}}

    def _googles_now(self) -> datetime:
        return self._now() - self._reaper.skew()

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
        from runtime.clusters.reap_policy import find_removable

        dead = [each for each in nodes if each.state in DEAD and each.name not in self._asked]
        if dead:
            for each in self._reaper.remove(find_removable(dead)):
                if each.error is not None:
                    self._trouble[each.dead.name] = f"it cannot be removed: {each.error}"

    def _judge(self, spec: MemberSpec, node: TpuNode | None, ray: RayView | None, *, asked: bool) -> MemberOutcome:
        outcome = MemberOutcome(
            name=spec.name,
            accelerator=spec.accelerator,
            capacity=str(spec.capacity),
            state=node.state if node else "",
            hosts=len(set(node.addresses)) if node else 0,
            in_ray=None if ray is None or node is None else len(set(node.addresses) & ray.alive),
            trouble=self._trouble.get(spec.name) if node is None or node.state in DEAD else None,
            created=spec.name in self._asked if node is None else node.maker == self._token,
            others_until=None if node is None else self._find_others_time(node),
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

    def _find_others_time(self, node: TpuNode) -> datetime | None:
        until = node.maker_until
        others = node.maker not in (None, self._token) and until is not None and until > self._googles_now()
        return until if others else None

    def _undo(self, outcomes: list[MemberOutcome], nodes: Mapping[str, TpuNode]) -> list[MemberOutcome]:
        """Remove members that did not become whole: a slice has all its hosts or none."""
        from runtime.clusters.reap_policy import find_removable

        broken = [nodes[each.name] for each in outcomes if each.is_broken and each.name in nodes]
        removals: dict[str, Removal] = {}
        if broken:
            removals = {each.dead.name: each for each in self._reaper.remove(find_removable(broken))}
        return [_with_removal(each, removals.get(each.name)) for each in outcomes]


def _with_removal(outcome: MemberOutcome, removal: Removal | None) -> MemberOutcome:
    if removal is None:
        return outcome
    if removal.error is None:
        return replace(outcome, removed=True)
    left = f"{outcome.error}; left running: {removal.error}"
    return replace(outcome, error=left, next=f"`runtime cluster remove {outcome.name}`")


def _others(name: str) -> str:
    return f"run the same command then; `runtime cluster remove {name}` ends it now"


def _stopped(outcome: MemberOutcome) -> MemberOutcome:
    """A member of a cluster that is stopped; only what this call made is removed by it."""
    why = "the cluster was stopped by `runtime cluster stop` meanwhile"
    step = f"{START_AGAIN} starts Ray again"
    if outcome.created and not outcome.state:
        step = "`runtime cluster stop` once more, which removes it if Google lists it later"
    return replace(outcome, error=why, next=step, stopped=True, joined=False)


def _look(look_ray: Callable[[], RayView] | None) -> RayView | None:
    if look_ray is None:
        return None
    try:
        return look_ray()
    except InfrastructureFailure:  # the head restarts, say; the next round asks again
        return None


def _describe(outcome: MemberOutcome) -> str:
    if outcome.error is not None:
        return outcome.error
    hosts = f"{outcome.hosts} of {count_hosts(outcome.accelerator)} hosts"
    if not outcome.state:
        return outcome.trouble or "asked for"
    in_ray = "" if outcome.in_ray is None else f", {outcome.in_ray} in Ray"
    trouble = f"; {outcome.trouble}" if outcome.trouble else ""
    return f"{outcome.state}, {hosts}{in_ray}{trouble}"


def _expired(outcome: MemberOutcome, within: timedelta, *, unknown: bool) -> MemberOutcome:
    what = _describe(outcome) if outcome.state or outcome.trouble else "google lists no such node"
    what += ", and Ray does not answer" if unknown else ""
    if outcome.others_until is not None:
        what += f"; another call makes it, and waits until {format_time(outcome.others_until)}"
        return replace(outcome, error=f"not whole within {format_duration(within)}: {what}", next=_others(outcome.name))
    step = "allow more with `--within`, or look at the hosts of a member that is kept with `--keep`"
    step = step if outcome.state else AGAIN
    return replace(outcome, error=f"not whole within {format_duration(within)}: {what}", next=step)
