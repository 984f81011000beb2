"""Google Pub/Sub as its documentation has it: at least once, in any order, and forgetful where it says so.

The stand-in for one process's client is `Client`; the messages are in `Service`, which all clients share.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import greenlet

from runtime.outputs import PubSubQueueOutput
from runtime.queues.pubsub.client import AckReply, OutgoingMessage, PubSubUnavailable, ReceivedMessage, deadline_seconds
from tests.simulation.choices import Choice
from tests.simulation.world import EPOCH, Process, Strand, World

DUPLICATE = Choice("duplicate", 40, 1)
"""A message is delivered twice while its first delivery is under way."""
REORDER = Choice("reorder", 2, 1)
FORGET = Choice("forget", 60, 1)
"""The service forgets that it gave a message away, or how long its deadline was extended."""
STALE = Choice("stale-ack", 1, 1)
"""What it makes of an acknowledgement that comes too late: nothing, or it counts all the same."""

LOSE = Choice("lose", 12, 1)
"""It forgets a message that it has confirmed, as after its retention."""

SETTINGS = PubSubQueueOutput(
    topic="projects/p/topics/tasks",
    subscription="projects/p/subscriptions/tasks",
    ack_deadline_s=60,
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
    stale: set[str] = field(default_factory=set)


class Service:
    def __init__(self, world: World) -> None:
        self._world = world
        self._ids = itertools.count(1)
        self.messages: dict[str, Message] = {}
        """By id: all that nobody has acknowledged."""
        self._waiting: list[Strand] = []
        self.loses = False

    def publish(self, messages: Sequence[OutgoingMessage]) -> list[str]:
        made = [Message(f"m{next(self._ids)}", one.data, dict(one.attributes), self._world.now) for one in messages]
        self.messages.update((one.id, one) for one in made if not (self.loses and self._world.draw(LOSE)))
        self.rouse()
        return [one.id for one in made]

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
            if one.holder is not None:
                one.stale.add(one.holder)
            one.deliveries += 1
            ack_id = f"{one.id}.{one.deliveries}"
            if world.draw(DUPLICATE):
                one.stale.add(ack_id)
                one.holder = None
            else:
                one.holder, one.until = ack_id, world.now + deadline_s
                if world.draw(FORGET):
                    one.until = world.now + 1.0
            at = EPOCH + timedelta(seconds=one.published_at)
            received.append(ReceivedMessage(ack_id, one.id, one.data, dict(one.attributes), at, 0))
        return received

    def wait_s(self) -> float:
        """Until a message that is out may be delivered again."""
        return min((one.until - self._world.now for one in self.messages.values() if one.holder), default=1e9)

    def acknowledge(self, ack_ids: Sequence[str]) -> None:
        for ack_id in ack_ids:
            one = self.messages.get(ack_id.partition(".")[0])
            if one is None:
                continue
            current = one.holder == ack_id and one.until > self._world.now
            if current or (self._world.draw(STALE) if self._world.me() else 1):
                del self.messages[one.id]

    def extend(self, ack_ids: Sequence[str], seconds: float) -> None:
        for ack_id in ack_ids:
            one = self.messages.get(ack_id.partition(".")[0])
            if one is None or one.holder != ack_id or one.until <= self._world.now:
                continue  # It is accepted, and does nothing.
            one.until = self._world.now + (1.0 if self._world.draw(FORGET) else seconds)

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
        return self._world.call(what, apply, write=write, refused=_refused)

    def publish(self, topic: str, messages: Sequence[OutgoingMessage]) -> list[str]:
        ids = self._call(f"publish {len(messages)}", lambda: self._service.publish(messages))
        # The library's second try of a publication that went through publishes once more.
        return ids if isinstance(ids, list) else self._service.publish(messages)

    def pull(self, subscription: str, most: int, *, wait_s: float) -> list[ReceivedMessage]:
        world, service = self._world, self._service
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
        received: list[ReceivedMessage] = service.deliver(most, SETTINGS.ack_deadline_s)
        if received:
            world.note(f"delivers {' '.join(one.ack_id for one in received)}")
        return received

    def acknowledge(self, subscription: str, ack_ids: Sequence[str]) -> AckReply:
        self._call(f"acknowledge {' '.join(ack_ids)}", lambda: self._service.acknowledge(ack_ids))
        return _ALL_WELL

    def modify_deadline(self, subscription: str, ack_ids: Sequence[str], deadline: timedelta) -> AckReply:
        seconds = deadline_seconds(deadline)
        self._call(f"extend {' '.join(ack_ids)} by {seconds}", lambda: self._service.extend(ack_ids, seconds))
        return _ALL_WELL

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


_ALL_WELL = AckReply(frozenset(), frozenset())


def _refused(status: str) -> Exception:
    return PubSubUnavailable("the call failed", facts=[f"{status}"], retryable=True)


__all__ = ["SETTINGS", "Client", "Process", "Service"]
