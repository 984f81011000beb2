"""Removes TPU nodes that Ray no longer sees.

Ray's Google node provider counts nodes that are being created or run. It neither counts nor deletes a node that Google
has preempted: the node stays, holds its share of the quota, and nothing takes its place. The reaper finds such nodes by
the cluster's label and deletes them; the autoscaler then creates new ones. The reaper reads every page of the list, which
Ray does not, so its count is the true one. `runtime.clusters.reap_policy` decides; only the class here reads and deletes.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar

from runtime.clusters.nodes import (
    KIND_LABEL,
    QueuedResource,
    TpuNode,
    ZoneView,
    parse_heads,
    parse_node,
    parse_queued,
)
from runtime.clusters.reap_policy import BOUNDS, DeadResource, ReapPlan, ReapTimes, plan_reaping
from runtime.clusters.reaper_state import ReaperState, back_off, forgive, recall_seen, waits_until
from runtime.errors import InfrastructureFailure, explain_briefly
from runtime.stack.google_api import GoogleRefused, GoogleUnreachable

if TYPE_CHECKING:
    from runtime.stack.google_api import GoogleApi

T = TypeVar("T")

API: Final = "v2alpha1"
PAGE: Final = 1000
"""Members of a list that one request asks for; Google may send fewer."""
AT_ONCE: Final = 16
"""Deletions under way at the same time."""
READ_BACK_AFTER_S: Final = (0.0, 2.0, 5.0, 10.0)
"""Pauses before each look at what was deleted."""

# A node's metadata holds its boot script; 1,024 of them would be 30 MB.
_NODE_FIELDS: Final = (
    "nextPageToken,unreachable,"
    "nodes(name,state,labels,createTime,acceleratorType,networkEndpoints,queuedResource,runtimeVersion,schedulingConfig)"
)
_RIGHT_CLOCK: Final = timedelta(minutes=1)
"""A clock that is off by less is used as it is; Google tells its own to the second."""
_QUEUED_FIELDS: Final = "nextPageToken,unreachable,queuedResources(name,state,tpu)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """The result for one resource."""

    dead: DeadResource
    error: str | None = None
    """Why it is still there."""
    gone: bool = False
    """Whether Google no longer lists it; False while Google deletes it."""
    postponed: bool = False
    """Whether its deletion was left to a later run, because Google refused another one for a passing reason."""
    passing: bool = False
    """Whether `error` may pass by itself."""


class Reaper:
    """Reads and deletes in one project and zone; the only place that does."""

    def __init__(self, api: GoogleApi, *, project: str, zone: str, sleep: Callable[[float], None] = time.sleep) -> None:
        self._api = api
        self._sleep = sleep
        self._instances = f"compute/v1/projects/{project}/zones/{zone}/instances"
        self._parent = f"{API}/projects/{project}/locations/{zone}"

    def look(self) -> ZoneView:
        """List nodes, queued resources and heads. Raises `GoogleRefused` or `GoogleUnreachable`; heads that cannot be listed
        are only noted."""
        nodes, queued = self.list_nodes(), self._queued()
        try:
            listed = self._api.pages("compute", self._instances, "items", filter=f"labels.{KIND_LABEL} = head")
            heads = _parsed(parse_heads, listed)
        except InfrastructureFailure as problem:
            return ZoneView(nodes=nodes, queued=queued, no_heads=explain_briefly(problem))
        return ZoneView(nodes=nodes, queued=queued, heads=heads)

    def skew(self) -> timedelta:
        """Time by which this machine's clock is ahead of Google's, by the last answer; 0 if it is about right.

        Google's clock dates the nodes, and a clock that is set must not make old what is young.
        """
        skew = self._api.skew
        return timedelta(0) if skew is None or abs(skew) < _RIGHT_CLOCK else skew

    def remove(self, dead: Sequence[DeadResource]) -> list[Removal]:
        """Delete, and read back whether Google does it.

        A resource that is gone already counts as removed. If Google refuses one for a passing reason, such as too many
        requests, the rest is postponed.
        """
        done: list[Removal] = []
        rest = iter(dead)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            while batch := list(itertools.islice(rest, AT_ONCE)):
                answers = list(pool.map(self._delete, batch))
                done += [
                    Removal(dead=each)
                    if problem is None
                    else Removal(dead=each, error=explain_briefly(problem), passing=problem.retryable)
                    for each, problem in zip(batch, answers, strict=True)
                ]
                if any(problem is not None and problem.retryable for problem in answers):
                    break
        accepted = [each.dead for each in done if each.error is None]
        verdicts = self._read_back(accepted) if accepted else {}
        return [
            *(verdicts.get(each.dead.resource, each) for each in done),
            *(Removal(dead=each, postponed=True, error="left to the next run") for each in rest),
        ]

    def _delete(self, dead: DeadResource) -> InfrastructureFailure | None:
        query = {"force": "true"} if dead.is_queued else {}
        try:
            self._api.delete("tpu", f"{API}/{dead.resource}", **query)
        except InfrastructureFailure as problem:
            return None if isinstance(problem, GoogleRefused) and problem.status == 404 else problem
        return None

    def _read_back(self, dead: Iterable[DeadResource]) -> dict[str, Removal]:
        """List again until Google has begun each deletion; an accepted deletion may still fail later."""
        left = {each.resource: each for each in dead}
        verdicts: dict[str, Removal] = {}
        states: dict[str, str] = {}
        for pause in READ_BACK_AFTER_S:
            if pause:
                self._sleep(pause)
            try:
                states = self._states(left.values())
            except InfrastructureFailure as problem:
                unknown = f"google accepted the deletion, which could not be read back: {explain_briefly(problem)}"
                return verdicts | {name: Removal(dead=each, error=unknown) for name, each in left.items()}
            for name, each in list(left.items()):
                state = states.get(name)
                if state in (None, "DELETING", "SUSPENDING"):
                    verdicts[name] = Removal(dead=each, gone=state is None)
                    del left[name]
            if not left:
                return verdicts
        waited = f"{sum(READ_BACK_AFTER_S):.0f} s after google accepted its deletion"
        return verdicts | {
            name: Removal(dead=each, error=f"still {states[name]} {waited}") for name, each in left.items()
        }

    def _states(self, dead: Iterable[DeadResource]) -> dict[str, str]:
        kinds = {each.is_queued for each in dead}
        listed: list[TpuNode | QueuedResource] = [
            *(self.list_nodes() if False in kinds else ()),
            *(self._queued() if True in kinds else ()),
        ]
        return {each.resource: each.state for each in listed}

    def list_nodes(self) -> tuple[TpuNode, ...]:
        listed = self._list("nodes", _NODE_FIELDS)
        return _parsed(lambda items: tuple(parse_node(item) for item in items), listed)

    def _queued(self) -> tuple[QueuedResource, ...]:
        listed = self._list("queuedResources", _QUEUED_FIELDS)
        return _parsed(lambda items: tuple(parse_queued(item) for item in items), listed)

    def _list(self, kind: str, wanted: str) -> Iterable[dict[str, Any]]:
        return self._api.pages("tpu", f"{self._parent}/{kind}", kind, pageSize=PAGE, fields=wanted)


def _parsed(parse: Callable[[Iterable[dict[str, Any]]], T], listed: Iterable[dict[str, Any]]) -> T:
    """Parse a list. Raises `GoogleUnreachable` if a member has another form than Google's."""
    try:
        return parse(listed)
    except (KeyError, TypeError, AttributeError, ValueError) as problem:
        raise GoogleUnreachable(
            f"a list of Google's has another form than it should: {problem!r}",
            hint="is there a proxy in between?",
            retryable=True,
        ) from problem


@dataclass(frozen=True, slots=True, kw_only=True)
class ReapRun:
    """The result of one run for one cluster."""

    plan: ReapPlan | None = None
    """None if Google was not asked, or did not answer."""
    view: ZoneView | None = None
    removals: tuple[Removal, ...] = ()
    error: InfrastructureFailure | None = None
    """Why the lists could not be read."""
    waits_until: datetime | None = None
    """The time until which the zone is left alone."""


def reap_once(
    reaper: Reaper,
    cluster: str,
    memory: ReaperState,
    now: datetime,
    *,
    bounds: ReapTimes = BOUNDS,
    dry_run: bool = False,
) -> tuple[ReapRun, ReaperState]:
    """Remove what is dead in one cluster and its zone; returns what was done and what the next run has to know.

    A dry run asks a zone that is left alone too, removes nothing, and returns the memory as it was.
    """
    until = waits_until(memory, now)
    if until is not None and not dry_run:
        return ReapRun(waits_until=until), memory
    try:
        view = reaper.look()
    except InfrastructureFailure as problem:
        after = back_off(memory, now) if problem.retryable and not dry_run else memory
        return ReapRun(error=problem, waits_until=after.wait_until), after
    googles = now - reaper.skew()
    plan = plan_reaping(view, cluster, googles, seen=recall_seen(memory, googles), bounds=bounds)
    if dry_run:
        return ReapRun(plan=plan, view=view), memory
    removals = reaper.remove(plan.dead) if plan.dead else []
    after = _remember(memory, plan, removals, now, looked_at=googles)
    return ReapRun(plan=plan, view=view, removals=tuple(removals), waits_until=after.wait_until), after


def _remember(
    memory: ReaperState, plan: ReapPlan, removals: Sequence[Removal], now: datetime, *, looked_at: datetime
) -> ReaperState:
    tried = {each.dead.resource for each in removals if not each.postponed}
    removed = Counter(each.dead.kind for each in removals if each.error is None)
    after = replace(
        memory,
        # A deletion that hangs is asked for again only after its time has passed once more.
        seen={key: at for key, at in plan.seen.items() if key.partition(" ")[2] not in tried},
        looked_at=looked_at,
        removed=dict(Counter(memory.removed) + removed),
        failed=memory.failed + sum(each.error is not None and not each.postponed for each in removals),
    )
    return back_off(after, now) if any(each.postponed or each.passing for each in removals) else forgive(after)
