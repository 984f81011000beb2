"""Google Pub/Sub as its documentation has it: at least once, in any order, and forgetful where it says so.

The stand-in for one process's client is `Client`; the messages are in `Service`, which all clients share.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import greenlet

from runtime.outputs import PubSubQueueOutput
from runtime.queues.pubsub.client import AckReply, OutgoingMessage, PubSubUnavailable, ReceivedMessage, deadline_seconds
from tests.simulation.choices import Choice
from tests.simulation.world import EPOCH, Strand, World

DUPLICATE = Choice("duplicate", 40, 1)
"""A message is delivered twice while its first delivery is under way."""
REORDER = Choice("reorder", 2, 1)
FORGET = Choice("forget", 60, 1)
"""The service forgets that it gave a message away, or how long its deadline was extended."""
STALE = Choice("stale-ack", 1, 1)
"""What it makes of an acknowledgement that comes too late: nothing, or it counts all the same."""

ASIDE = Choice("aside", 3, 1)
"""With a dead-letter policy: it puts a message aside before its time, since it counts by guess."""
COPIES = Choice("copies", 12, 1)
"""A publisher's library published it twice, and says so to nobody."""
LOSE = Choice("lose", 12, 1)
"""It forgets a message that it has confirmed, as after its retention."""

POLICY = Choice("policy", 3, 1, 1, 1, fault=False)
"""What the subscription has: neither, a dead-letter policy, exactly-once delivery, or both."""
DEADLINE_S = 60
MOST_ATTEMPTS = 5
_DEAD = "projects/p/subscriptions/dead"


def settings_of(policy: int) -> PubSubQueueOutput:
    counted = policy in (1, 3)
    return PubSubQueueOutput(
        topic="projects/p/topics/tasks",
        subscription="projects/p/subscriptions/tasks",
        dead_letter_topic="projects/p/topics/dead" if counted else None,
        dead_letter_subscription=_DEAD if counted else None,
        max_delivery_attempts=MOST_ATTEMPTS if counted else None,
        exactly_once=policy in (2, 3),
        ack_deadline_s=DEADLINE_S,
        retention_s=2_678_400,
    )


@dataclass
class Message:
    id: str
    data: bytes
    attributes: dict[str, str]
    published_at: float
    deliveries: int = 0
    holder: str | None = None
    """The ack id that counts; None while it may be delivered."""
    until: float = 0.0


class Service:
    """A topic and its subscription, and those of its dead letters."""

    def __init__(self, world: World, policy: int = 0, prefix: str = "m") -> None:
        self._world, self._prefix = world, prefix
        self.settings = settings_of(policy)
        self.dead = Service(world, prefix="d") if self.settings.max_delivery_attempts else None
        self._ids = itertools.count(1)
        self.messages: dict[str, Message] = {}
        """By id: all that nobody has acknowledged."""
        self._waiting: list[Strand] = []
        self.loses = False

    def publish(self, messages: Sequence[OutgoingMessage]) -> list[str]:
        made = [self._make(one) for one in messages]
        for one in [*made, *(self._make(one) for one in messages if self._world.draw(COPIES))]:
            if not (self.loses and self._world.draw(LOSE)):
                self.messages[one.id] = one
        self.rouse()
        return [one.id for one in made]

    def _make(self, one: OutgoingMessage) -> Message:
        return Message(f"{self._prefix}{next(self._ids)}", one.data, dict(one.attributes), self._world.now)

    def tasks(self) -> set[str]:
        """Return the tasks that it will deliver, or has put aside."""
        waiting = {one.attributes["runtime_task"] for one in self.messages.values()}
        return waiting | (self.dead.tasks() if self.dead else set())

    def rouse(self) -> None:
        waking, self._waiting = self._waiting, []
        for strand in waking:
            self._world.wake(strand)

    def free(self) -> list[Message]:
        now = self._world.now
        return [one for one in self.messages.values() if one.holder is None or one.until <= now]

    def deliver(self, most: int, deadline_s: float) -> list[ReceivedMessage]:
        world = self._world
        free = self.free()
        if len(free) > 1 and world.draw(REORDER):
            free.reverse()
        received = []
        for one in free[:most]:
            if self.dead is not None and (one.deliveries >= MOST_ATTEMPTS or (one.deliveries and world.draw(ASIDE))):
                del self.messages[one.id]
                self.dead.publish([OutgoingMessage(one.data, one.attributes)])
                world.note(f"the service puts {one.id} aside")
                continue
            one.deliveries += 1
            ack_id = f"{one.id}.{one.deliveries}"
            if not self.settings.exactly_once and world.draw(DUPLICATE):
                one.holder = None
            else:
                one.holder, one.until = ack_id, world.now + deadline_s
                if world.draw(FORGET):
                    one.until = world.now + 1.0
            at = EPOCH + timedelta(seconds=one.published_at)
            received.append(
                ReceivedMessage(ack_id, one.id, one.data, dict(one.attributes), at, one.deliveries if self.dead else 0)
            )
        return received

    def wait_s(self) -> float:
        """Until a message that is out may be delivered again."""
        return min((one.until - self._world.now for one in self.messages.values() if one.holder), default=1e9)

    def _current(self, ack_id: str) -> Message | None:
        """The message that an ack id stands for; None if a newer delivery, or none, counts."""
        one = self.messages.get(ack_id.partition(".")[0])
        return one if one is not None and one.holder == ack_id and one.until > self._world.now else None

    def acknowledge(self, ack_ids: Sequence[str]) -> AckReply:
        gone = set()
        for ack_id in ack_ids:
            one = self._current(ack_id)
            late = self.messages.get(ack_id.partition(".")[0])
            if one is not None:
                del self.messages[one.id]
            elif self.settings.exactly_once:
                gone.add(ack_id)
            elif late is not None and self._world.draw(STALE):
                del self.messages[late.id]
        return AckReply(frozenset(gone), frozenset())

    def extend(self, ack_ids: Sequence[str], seconds: float) -> AckReply:
        gone = set()
        for ack_id in ack_ids:
            one = self._current(ack_id)
            if one is not None:
                one.until = self._world.now + (1.0 if self._world.draw(FORGET) else seconds)
            elif self.settings.exactly_once:
                gone.add(ack_id)
        return AckReply(frozenset(gone), frozenset())

    def seek(self, at: datetime) -> None:
        moment = (at - EPOCH).total_seconds()
        self.messages = {name: one for name, one in self.messages.items() if one.published_at > moment}


class Client:
    """`PubSubClient` of one process."""

    emulator = None

    def __init__(self, world: World, service: Service) -> None:
        self._world, self._service = world, service
        self._closed = False
        self._pulling: list[Strand] = []

    def _call(self, what: str, apply: Any, *, write: bool = True) -> Any:
        return self._world.call(what, apply, write=write, refused=_refused, denied=_denied, to="service")

    def publish(self, topic: str, messages: Sequence[OutgoingMessage]) -> list[str]:
        ids = self._call(f"publish {len(messages)}", lambda: self._service.publish(messages))
        # The library's second try of a publication that went through publishes once more.
        return ids if isinstance(ids, list) else self._service.publish(messages)

    def pull(self, subscription: str, most: int, *, wait_s: float) -> list[ReceivedMessage]:
        world, service = self._world, self._serves(subscription)
        until = world.now + wait_s
        me = greenlet.getcurrent()
        assert isinstance(me, Strand)
        self._call("ask for messages", lambda: None, write=False)
        while not service.free() and not self._closed and (left := until - world.now) > 0:
            service._waiting.append(me)
            self._pulling.append(me)
            if not world.park(min(left, service.wait_s() + 0.001)):
                service._waiting.remove(me)
            self._pulling.remove(me)
        if self._closed:
            raise PubSubUnavailable("cannot pull: the connection was closed")
        received: list[ReceivedMessage] = service.deliver(most, DEADLINE_S)
        if received:
            world.note(f"delivers {' '.join(one.ack_id for one in received)}")
        return received

    def acknowledge(self, subscription: str, ack_ids: Sequence[str]) -> AckReply:
        service = self._serves(subscription)
        return self._confirm(f"acknowledge {' '.join(ack_ids)}", lambda: service.acknowledge(ack_ids))

    def modify_deadline(self, subscription: str, ack_ids: Sequence[str], deadline: timedelta) -> AckReply:
        service, seconds = self._serves(subscription), deadline_seconds(deadline)
        return self._confirm(f"extend {' '.join(ack_ids)} by {seconds}", lambda: service.extend(ack_ids, seconds))

    def _confirm(self, what: str, call: Callable[[], AckReply]) -> AckReply:
        reply = self._call(what, call)
        # A second try of the library finds the ids used up, or in force still; only the service's first word was lost.
        return reply if isinstance(reply, AckReply) else call()

    def _serves(self, subscription: str) -> Service:
        dead = self._service.dead
        return dead if dead is not None and subscription == _DEAD else self._service

    def seek(self, subscription: str, at: datetime) -> None:
        self._call("seek", lambda: self._service.seek(at))

    def service_time(self) -> datetime | None:
        moment: datetime = self._call(
            "ask for the time", lambda: EPOCH + timedelta(seconds=int(self._world.now)), write=False
        )
        return moment

    def close_pulls(self) -> None:
        self._closed = True
        for strand in self._pulling:
            self._world.wake(strand)

    def close(self) -> None:
        pass


def _refused(status: str) -> Exception:
    return PubSubUnavailable("the call failed", facts=[f"{status}"], retryable=True)


def _denied() -> Exception:
    return PubSubUnavailable("not permitted", facts=["403"], denied=True)
