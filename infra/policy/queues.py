"""The rules about topics and subscriptions: no task expires or is delivered for ever, and no dead letter is lost."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from infra.check.recording import Registration, Unknown
from infra.policy.base import (
    AGENT,
    SERVICE_IDENTITY,
    SUBSCRIPTION,
    SUBSCRIPTION_GRANT,
    TOPIC,
    TOPIC_GRANT,
    Bounds,
    Finding,
    get,
    may_be,
)
from infra.policy.graph import Graph


def find_missing_dead_letters(graph: Graph, bounds: Bounds) -> Iterator[Finding]:
    """A subscription without dead letters delivers a task that nobody can do for ever."""
    dead = _dead_letter_topics(graph)
    for each in graph.of_type(SUBSCRIPTION):
        if not get(each.inputs.get("deadLetterPolicy"), "deadLetterTopic") and not _topics(graph, each, "topic") & dead:
            yield each, "has no dead letters", "set `dead_letter_policy`"


def find_lost_dead_letters(graph: Graph, bounds: Bounds) -> Iterator[Finding]:
    """A topic keeps nothing by itself: without a subscription of its own a dead letter is gone at once."""
    subscribed: set[str] = set()
    for each in graph.of_type(SUBSCRIPTION):
        subscribed |= _topics(graph, each, "topic")
    for each in graph.of_type(SUBSCRIPTION):
        wanted = _topics(graph, each, "deadLetterPolicy")
        if wanted and not wanted & subscribed:
            yield each, "sends its dead letters to a topic that has no subscription", "subscribe to that topic"


def find_powerless_agents(graph: Graph, bounds: Bounds) -> Iterator[Finding]:
    """Pub/Sub's own agent moves dead letters. Without its two grants they are redelivered for ever, with no error."""
    for each in graph.of_type(SUBSCRIPTION):
        wanted = _topics(graph, each, "deadLetterPolicy")
        if not wanted:
            continue
        publishes = any(
            may_be(grant.inputs.get("role"), "roles/pubsub.publisher") and wanted & _topics(graph, grant, "topic")
            for grant in graph.of_type(TOPIC_GRANT)
            if _is_agents(graph, grant)
        )
        subscribes = any(
            may_be(grant.inputs.get("role"), "roles/pubsub.subscriber")
            and (each.urn in graph.behind(grant, "subscription", SUBSCRIPTION) or _same_name(grant, each))
            for grant in graph.of_type(SUBSCRIPTION_GRANT)
            if _is_agents(graph, grant)
        )
        if not publishes:
            yield each, "has dead letters that Pub/Sub's agent may not publish", "grant it the topic's publisher role"
        if not subscribes:
            yield each, "has dead letters that Pub/Sub's agent may not take off it", "grant it the subscriber role"


def find_expiring_subscriptions(graph: Graph, bounds: Bounds) -> Iterator[Finding]:
    """By default an idle subscription is deleted after 31 days, with all its tasks."""
    for each in graph.of_type(SUBSCRIPTION):
        if not may_be(get(each.inputs.get("expirationPolicy"), "ttl"), ""):
            hint = 'set `expiration_policy` with the ttl ""'
            yield each, "is deleted with all its tasks after 31 days without a worker", hint


def find_short_retention(graph: Graph, bounds: Bounds) -> Iterator[Finding]:
    """Subscriptions say how long they keep messages, dead letters no shorter than tasks. The default is 7 days."""
    by_topic: dict[str, float] = {}
    for each in graph.of_type(SUBSCRIPTION):
        kept = _seconds(each.inputs.get("messageRetentionDuration"))
        if kept is None:
            yield each, "does not say how long it keeps messages", "set `message_retention_duration`"
            continue
        for topic in _topics(graph, each, "topic"):
            by_topic[topic] = min(kept, by_topic.get(topic, kept))
    for each in graph.of_type(SUBSCRIPTION):
        kept = _seconds(each.inputs.get("messageRetentionDuration"))
        shortest = min(
            (by_topic.get(topic, math.inf) for topic in _topics(graph, each, "deadLetterPolicy")), default=math.inf
        )
        if kept is not None and shortest < kept < math.inf:
            message = f"keeps tasks for {kept:.0f} s and its dead letters for {shortest:.0f} s only"
            yield each, message, "keep dead letters at least as long"


def _topics(graph: Graph, resource: Registration, key: str) -> set[str]:
    """The topics behind an input: their URNs, and their names if known."""
    value = resource.inputs.get(key)
    name = get(value, "deadLetterTopic") if key == "deadLetterPolicy" else value
    found = set(graph.behind(resource, key, TOPIC))
    if isinstance(name, str) and name:
        found.add(name.rpartition("/")[2])
    for urn in list(found):
        topic = graph.get(urn)
        if topic is not None and isinstance(topic.inputs.get("name"), str):
            found.add(str(topic.inputs["name"]))
    return found


def _dead_letter_topics(graph: Graph) -> set[str]:
    return {topic for each in graph.of_type(SUBSCRIPTION) for topic in _topics(graph, each, "deadLetterPolicy")}


def _is_agents(graph: Graph, grant: Registration) -> bool:
    member = grant.inputs.get("member")
    known = isinstance(member, str) and bool(AGENT.match(member))
    return known or bool(graph.behind(grant, "member", SERVICE_IDENTITY))


def _same_name(grant: Registration, subscription: Registration) -> bool:
    name = grant.inputs.get("subscription")
    return isinstance(name, str) and name.rpartition("/")[2] == subscription.inputs.get("name")


def _seconds(value: Any) -> float | None:
    """Seconds of `600s`; None if the input is absent, infinity if only the cloud knows it."""
    if isinstance(value, Unknown):
        return math.inf
    found = re.fullmatch(r"(\d+(?:\.\d+)?)s", value) if isinstance(value, str) else None
    return float(found[1]) if found else None
