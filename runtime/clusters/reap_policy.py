"""Decides which TPU nodes and queued resources of a cluster are to be removed, from lists and a clock alone.

Some are dead at first sight: preempted, too long in creation, made for an older head. Others may only be changing: a node
that is being deleted, a slice that lacks a host, a node whose head cannot be found. These are suspects, and are removed
when they have been suspects for as long as `ReapTimes` says.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final

from runtime.clusters.nodes import (
    ALIVE,
    DEAD,
    MANAGED_LABEL,
    SPENT,
    STACK_LABEL,
    QueuedResource,
    TpuNode,
    ZoneView,
    count_hosts,
)
from runtime.units import format_duration


class Suspicion(StrEnum):
    DELETING = "deleting"
    INCOMPLETE = "incomplete"
    """A slice that lacks a host."""
    HEADLESS = "headless"
    """A node of ours whose cluster has no head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReapTimes:
    """Times after which something counts as dead."""

    creation: timedelta = timedelta(hours=1)
    deletion: timedelta = timedelta(minutes=15)
    incomplete: timedelta = timedelta(minutes=10)
    headless: timedelta = timedelta(minutes=10)

    def of(self, suspicion: Suspicion) -> timedelta:
        return {
            Suspicion.DELETING: self.deletion,
            Suspicion.INCOMPLETE: self.incomplete,
            Suspicion.HEADLESS: self.headless,
        }[suspicion]


BOUNDS: Final = ReapTimes()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadResource:
    """A node that will never run again, or a queued resource that gives no more nodes and whose nodes were all one
    cluster's."""

    resource: str
    why: str
    kind: str
    """`preempted`, `creating`, `older head` …: one of few words, for metrics."""
    pool: str | None = None
    state: str = ""
    """Google's word for it when it was listed."""
    again: str | None = None
    """For a member, the command that makes it again; Ray makes other nodes again by itself."""

    @property
    def name(self) -> str:
        return self.resource.rpartition("/")[2]

    @property
    def is_queued(self) -> bool:
        return "/queuedResources/" in self.resource


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    resource: str
    suspicion: Suspicion
    what: str
    """`lacks 1 of 4 hosts`"""
    pool: str | None = None
    state: str = ""
    again: str | None = None

    @property
    def name(self) -> str:
        return self.resource.rpartition("/")[2]

    @property
    def key(self) -> str:
        return f"{self.suspicion} {self.resource}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingReap:
    """A suspect, and when it will count as dead if nothing changes."""

    suspect: Suspect
    until: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class ReapPlan:
    dead: tuple[DeadResource, ...]
    """Nodes, then queued resources, to remove; each once."""
    waiting: tuple[PendingReap, ...]
    live: Mapping[str, int]
    """Pool → nodes that Ray counts or should."""
    seen: Mapping[str, datetime]
    """Suspect's key → when it was first seen, for the next run."""


def plan_reaping(
    view: ZoneView, cluster: str, now: datetime, *, seen: Mapping[str, datetime], bounds: ReapTimes = BOUNDS
) -> ReapPlan:
    """Decide what to remove of `cluster`, and what other clusters of ours left in its zone.

    `seen` is that of the last run's plan.
    """
    suspects = [
        *find_deleting(view, cluster),
        *find_incomplete_slices(view.nodes, cluster),
        *find_headless(view, cluster),
    ]
    known = {each.key: min(seen.get(each.key, now), now) for each in suspects}
    overdue, waiting = split_suspects(suspects, known, now, bounds)
    found = [
        *find_dead(view.nodes, cluster, now, longest_creation=bounds.creation),
        *find_orphans(view, cluster),
        *find_spent(view.queued, cluster),
        *overdue,
    ]
    dead = {each.resource: each for each in reversed(found)}
    return ReapPlan(
        dead=tuple(sorted(_through_queue(dead, view), key=lambda each: (each.is_queued, each.resource))),
        waiting=tuple(each for each in waiting if each.suspect.resource not in dead),
        live=count_live(view.nodes, cluster),
        seen=known,
    )


def find_dead(
    nodes: Iterable[TpuNode], cluster: str, now: datetime, *, longest_creation: timedelta = BOUNDS.creation
) -> list[DeadResource]:
    """Return the nodes that belong to `cluster`, are no head, and will never run again."""
    found = []
    for node in nodes:
        if node.cluster != cluster:
            continue
        if node.state in DEAD:
            found.append(_dead(node, node.state.lower(), node.state.lower()))
        elif node.state == "CREATING" and node.created_at is not None and now - node.created_at > longest_creation:
            # A member's maker that still waits removes it if it waits in vain.
            waits = node.member is not None and node.maker_until is not None and node.maker_until > now
            if not waits:
                found.append(_dead(node, f"creating for {format_duration(now - node.created_at)}", "creating"))
    return found


def find_orphans(view: ZoneView, cluster: str) -> list[DeadResource]:
    """Return the nodes that an older head of `cluster` made: the head of today has no key for them, and no job on them.

    No member is among them: it joins every head by itself.
    """
    head_made = (view.heads or {}).get(cluster)
    if head_made is None:
        return []
    return [
        _dead(node, "made for an older head", "older head")
        for node in view.nodes
        if node.cluster == cluster
        and node.member is None
        and node.state != "DELETING"
        and node.created_at is not None
        and node.created_at < head_made
    ]


def find_spent(resources: Iterable[QueuedResource], cluster: str) -> list[DeadResource]:
    """Return the queued resources that failed or were suspended and asked for nodes of `cluster` alone."""
    return [
        DeadResource(
            resource=each.resource, why=f"queued resource {each.state}", kind=each.state.lower(), state=each.state
        )
        for each in resources
        if each.state in SPENT and each.cluster == cluster
    ]


def find_deleting(view: ZoneView, cluster: str) -> list[Suspect]:
    what = "is being deleted"
    listed: list[TpuNode | QueuedResource] = [*view.nodes, *view.queued]
    return [
        _suspect(each, Suspicion.DELETING, what)
        for each in listed
        if each.cluster == cluster and each.state == "DELETING"
    ]


def find_incomplete_slices(nodes: Iterable[TpuNode], cluster: str) -> list[Suspect]:
    """Return the running slices of several hosts for which Google lists fewer hosts than their type has."""
    found = []
    for node in nodes:
        hosts = count_hosts(node.accelerator)
        if node.cluster != cluster or node.state != "READY" or hosts is None or hosts == 1:
            continue
        if (lacks := hosts - len(set(node.addresses))) > 0:
            found.append(_suspect(node, Suspicion.INCOMPLETE, f"lacks {lacks} of {hosts} hosts"))
    return found


def find_headless(view: ZoneView, cluster: str) -> list[Suspect]:
    """Return what `cluster`, and other clusters that stacks of ours made, have in the zone if they have no head there.

    Nothing is returned if heads could not be listed. Another cluster's node counts as ours by its label alone.
    """
    heads = view.heads
    if heads is None:
        return []
    key, maker = MANAGED_LABEL
    # The nodes of a queued resource go with it, so that the labels of its first node are those of all.
    listed: list[tuple[TpuNode | QueuedResource, Mapping[str, str]]] = [
        *((each, each.labels) for each in view.nodes),
        *((each, each.labels[0]) for each in view.queued if each.labels),
    ]
    found = []
    for each, labels in listed:
        of = each.cluster
        if of is None or of in heads or each.state == "DELETING":
            continue
        if of == cluster or labels.get(key) == maker:
            what = f"cluster `{of}` of stack `{labels.get(STACK_LABEL, '?')}` has no head"
            found.append(_suspect(each, Suspicion.HEADLESS, what))
    return found


def split_suspects(
    suspects: Iterable[Suspect], seen: Mapping[str, datetime], now: datetime, bounds: ReapTimes = BOUNDS
) -> tuple[list[DeadResource], list[PendingReap]]:
    """Separate the suspects that have been suspects for too long from the others."""
    overdue, waiting = [], []
    for each in suspects:
        since, bound = seen.get(each.key, now), bounds.of(each.suspicion)
        if now - since >= bound:
            why = f"{each.what} for {format_duration(timedelta(seconds=int((now - since).total_seconds())))}"
            overdue.append(
                DeadResource(
                    resource=each.resource,
                    why=why,
                    kind=each.suspicion,
                    pool=each.pool,
                    state=each.state,
                    again=each.again,
                )
            )
        else:
            waiting.append(PendingReap(suspect=each, until=since + bound))
    return overdue, waiting


def find_billed(view: ZoneView, cluster: str) -> list[DeadResource]:
    """Return everything of `cluster` that costs money without its head: nodes, and queued resources that give some."""
    nodes = [_dead(node, f"node {node.state}", "stopped") for node in view.nodes if node.cluster == cluster]
    queued = [
        DeadResource(resource=each.resource, why=f"queued resource {each.state}", kind="stopped", state=each.state)
        for each in view.queued
        if each.cluster == cluster
    ]
    found = {each.resource: each for each in (*nodes, *queued)}
    return sorted(_through_queue(found, view), key=lambda each: (not each.is_queued, each.resource))


def find_removable(nodes: Iterable[TpuNode]) -> list[DeadResource]:
    """Return nodes that somebody removes by name."""
    return [_dead(node, f"node {node.state}", "removed") for node in nodes]


def count_live(nodes: Iterable[TpuNode], cluster: str) -> dict[str, int]:
    """Return pool → nodes of `cluster` in creation or running, without members. A node without a pool's label counts under
    the empty name."""
    counted = (node for node in nodes if node.cluster == cluster and node.member is None)
    return dict(Counter(node.pool or "" for node in counted if node.state in ALIVE))


def render_add(node: TpuNode) -> str | None:
    """Return the command that makes a member again; None for other nodes."""
    if node.member is None:
        return None
    words = ["runtime", "cluster", "add", node.accelerator, "--name", node.member, "--capacity", node.capacity]
    return shlex.join([*words, *(("--reservation", node.reservation) if node.reservation else ())])


def _through_queue(dead: Mapping[str, DeadResource], view: ZoneView) -> list[DeadResource]:
    """Leave out nodes whose queued resource goes too: Google deletes them with it."""
    asked = {node.resource: node.queued_resource for node in view.nodes}
    return [each for each in dead.values() if asked.get(each.resource) not in dead]


def _dead(node: TpuNode, why: str, kind: str) -> DeadResource:
    return DeadResource(
        resource=node.resource, why=why, kind=kind, pool=node.pool, state=node.state, again=render_add(node)
    )


def _suspect(each: TpuNode | QueuedResource, suspicion: Suspicion, what: str) -> Suspect:
    pool, again = (each.pool, render_add(each)) if isinstance(each, TpuNode) else (None, None)
    return Suspect(resource=each.resource, suspicion=suspicion, what=what, pool=pool, state=each.state, again=again)
