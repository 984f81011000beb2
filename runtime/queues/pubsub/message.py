"""Tasks as Pub/Sub messages and back: values and pure functions.

The body is the task's wire text, byte for byte as it was submitted. A delivery's delay, its number of
tries and the place of a large payload are attributes, so that giving a task back never rewrites the body.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import Enum, auto
from typing import Final

from runtime.errors import LOST_FOR_GOOD, InvalidTask, InvalidValue
from runtime.queues.pubsub.client import MAX_PUBLISH_MESSAGES, MAX_REQUEST_BYTES, OutgoingMessage, ReceivedMessage
from runtime.tasks.canonical_json import canonical_json
from runtime.tasks.history import InvalidMessage
from runtime.tasks.model import DEFAULT_EXPERIMENT, Task, Terms, check_experiment, task_id
from runtime.tasks.wire import decode_task, encode_task, stand_in
from runtime.units import format_time, parse_time

INLINE_BYTES: Final = 1024 * 1024
"""Larger bodies go to the record store and the message refers to them.

The service would take 10 MB, but each delivery and each copy moves and is billed for all of it, and a worker's
look-ahead holds many at once; 1 MiB leaves room for arguments of several 100 KB.
"""

TASK: Final = "runtime_task"
GENERATION: Final = "runtime_generation"
EXPERIMENT: Final = "runtime_experiment"
COPY: Final = "runtime_copy"
"""How often it was given back; 0 is left out."""
TRIES: Final = "runtime_tries"
ALONE: Final = "runtime_alone"
SUSPECT: Final = "runtime_suspect"
NOT_BEFORE: Final = "runtime_not_before"
"""Outranks the body's own `not_before`."""
SUBMITTED: Final = "runtime_submitted"
"""On a copy: when the first message was published, for a body without a time of submission."""
PUBLISHED: Final = "runtime_published"
"""On a copy of a foreign producer's message: when the service took in the first one, by the service's clock."""
PAYLOAD: Final = "runtime_payload"
"""The body's reference in the record store."""

# A message may carry 100 attributes; ours must fit beside those of a foreign producer.
# https://cloud.google.com/pubsub/quotas#resource_limits
_FOREIGN_ATTRIBUTES: Final = 80
# Attributes that the service adds itself, and refuses or overwrites when they are sent again.
_SERVICE_ATTRIBUTES: Final = ("googclient_", "CloudPubSubDeadLetterSource")


class DeliveryState(Enum):
    HELD = auto()
    """Delivered and not handed out: looked at, waiting for its time, or looked ahead."""
    LEASED = auto()
    DONE = auto()
    """Acknowledged, or left for the service to deliver again."""


@dataclass(slots=True, eq=False)
class Delivery:
    """A task as it was delivered, with all later facts about its messages."""

    task: Task
    body: bytes
    """The body of a copy; a reference if the attributes have `PAYLOAD`."""
    attributes: Mapping[str, str]
    bare: bool
    """A foreign message without an id of its own: the id was taken from the message."""
    ack_ids: dict[str, str]
    """Message id → newest ack id. Two if the task was published twice and both came here."""
    attempt: int = 0
    text: str = ""
    """The wire text, if it names its task."""
    tries: int = 0
    copies: int = 0
    suspect: bool = False
    alone: bool = False
    published_at: datetime | None = None
    """When the service took it in, of a foreign producer's message; such a task is in no manifest that an order could
    name."""
    invalid: InvalidMessage | None = None
    holding: DeliveryState = DeliveryState.HELD
    confirmed_until: float = 0.0
    """By the boot clock: until then the service gives it to nobody else."""
    since: float = 0.0
    """By the boot clock: held since, or last spoken of by its holder."""
    token: str = ""
    """The attempt that it was handed out for."""
    lost: bool = False
    """The service said that another delivery is newer."""
    settled_as: str | None = None
    """The token of the record that stands for it."""

    @property
    def key(self) -> tuple[str, int]:
        return self.task.id, self.task.generation

    @property
    def size(self) -> int:
        return len(self.body) + 500


def write_message(task: Task, put_blob: Callable[[bytes], str]) -> OutgoingMessage:
    """The first message of a task."""
    attributes = {TASK: task.id, GENERATION: str(task.generation), EXPERIMENT: task.experiment}
    body = encode_task(task).encode()
    if len(body) > INLINE_BYTES:
        attributes[PAYLOAD] = put_blob(body)
        # For people who look at the queue; the reference that counts is the attribute.
        body = canonical_json({"schema": 1, "id": task.id, "payload": attributes[PAYLOAD]}).encode()
    return OutgoingMessage(body, attributes)


def write_copy(
    delivery: Delivery,
    *,
    not_before: datetime | None,
    tries: int | None = None,
    alone: bool | None = None,
    suspect: bool | None = None,
) -> OutgoingMessage:
    """The message that takes the place of a delivery: same task and generation, foreign attributes kept."""
    attributes = {
        name: value
        for name, value in delivery.attributes.items()
        if not name.startswith(("runtime_", *_SERVICE_ATTRIBUTES))
    }
    attributes = dict(list(attributes.items())[:_FOREIGN_ATTRIBUTES])
    task = delivery.task
    attributes |= {TASK: task.id, GENERATION: str(task.generation), EXPERIMENT: task.experiment}
    tries = delivery.tries if tries is None else tries
    optional = {
        COPY: str(delivery.copies + 1),
        TRIES: str(tries) if tries else None,
        ALONE: "1" if (delivery.alone if alone is None else alone) else None,
        SUSPECT: "1" if (delivery.suspect if suspect is None else suspect) else None,
        SUBMITTED: format_time(task.submitted_at) if task.submitted_at else None,
        # An order covers the task by this time, and a copy must not look younger.
        PUBLISHED: format_time(delivery.published_at) if delivery.published_at else None,
        NOT_BEFORE: format_time(not_before) if not_before else None,
        PAYLOAD: delivery.attributes.get(PAYLOAD),
    }
    attributes |= {name: value for name, value in optional.items() if value is not None}
    # A bare body gets its id written into it: the copy's own message id would name another task.
    body = encode_task(task).encode() if delivery.bare and not delivery.invalid else delivery.body
    return OutgoingMessage(body, attributes)


def read_message(message: ReceivedMessage, get_blob: Callable[[str], bytes]) -> Delivery:
    """The delivery of a message; one that cannot be parsed has `invalid` set and a task that stands for it.

    What `get_blob` raises when a store cannot be reached, or refuses us, goes through.
    """
    attributes = message.attributes
    ack_ids = {message.message_id: message.ack_id}
    try:
        text = _read_text(message, get_blob)
        submitted_at = _time(attributes.get(SUBMITTED)) or message.published_at
        task = decode_task(text, defaults=Terms(submitted_at=submitted_at), fallback_key=message.message_id)
    except InvalidTask as problem:
        return _invalid_delivery(message, ack_ids, problem)
    not_before = _time(attributes.get(NOT_BEFORE)) if NOT_BEFORE in attributes else task.not_before
    if not_before is not task.not_before:
        task = replace(task, not_before=not_before)
    # Ours name their task in an attribute too. A foreign one has its id in its text, where an id made from the message's
    # own id cannot be.
    bare = attributes.get(TASK) != task.id and task.id not in text
    return Delivery(
        task=task,
        body=message.data,
        attributes=attributes,
        bare=bare,
        ack_ids=ack_ids,
        attempt=message.attempt,
        text="" if bare else text,
        tries=_number(attributes.get(TRIES)),
        copies=_number(attributes.get(COPY)),
        suspect=SUSPECT in attributes or message.attempt > 1,
        alone=ALONE in attributes,
        # Ours name their task; so do copies of foreign ones, which carry the first message's time.
        published_at=_time(attributes.get(PUBLISHED)) if TASK in attributes else message.published_at,
    )


def _read_text(message: ReceivedMessage, get_blob: Callable[[str], bytes]) -> str:
    body = message.data
    try:
        if PAYLOAD in message.attributes:
            body = get_blob(message.attributes[PAYLOAD])
        return body.decode()
    except LOST_FOR_GOOD as problem:
        raise InvalidTask("payload", f"cannot be read: {problem.message}") from problem
    except UnicodeDecodeError as problem:
        raise InvalidTask("json", f"is no UTF-8: {problem}") from None


def _invalid_delivery(message: ReceivedMessage, ack_ids: dict[str, str], problem: InvalidTask) -> Delivery:
    try:
        experiment = check_experiment(message.attributes.get(EXPERIMENT, DEFAULT_EXPERIMENT))
    except InvalidValue:
        experiment = DEFAULT_EXPERIMENT
    identity = task_id(experiment, key=f"message:{message.message_id}")
    # Not the id of its attribute: a damaged body must not end the generation of the task that it claims to be.
    return Delivery(
        task=stand_in(identity, experiment, submitted_at=message.published_at),
        body=message.data,
        attributes=message.attributes,
        bare=True,
        ack_ids=ack_ids,
        attempt=message.attempt,
        invalid=InvalidMessage(identity, message.data.decode(errors="replace"), problem.message),
    )


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 10 else 0


def _time(text: str | None) -> datetime | None:
    try:
        return parse_time(text) if text else None
    except InvalidValue:
        return None


def split_requests(messages: Iterable[OutgoingMessage]) -> Iterator[list[OutgoingMessage]]:
    """Runs of messages that fit into one publish request each, by number and by bytes."""
    batch: list[OutgoingMessage] = []
    size = 0
    for message in messages:
        if batch and (len(batch) == MAX_PUBLISH_MESSAGES or size + message.size > MAX_REQUEST_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(message)
        size += message.size
    if batch:
        yield batch


@dataclass(slots=True)
class DeliveryVerdicts:
    """Decisions on deliveries that were just examined."""

    ready: list[Delivery] = field(default_factory=list)
    later: list[Delivery] = field(default_factory=list)
    finished: list[Delivery] = field(default_factory=list)
    """Recorded already: another delivery of the task came first."""
    replace: list[Delivery] = field(default_factory=list)
    """To be published again and acknowledged, before the service counts one delivery too many."""


def judge(
    deliveries: Sequence[Delivery], *, recorded: Sequence[bool], now: datetime, last_attempt: int | None
) -> DeliveryVerdicts:
    """Pure. `last_attempt` is the delivery after which the service may move a message away; None replaces nothing."""
    verdicts = DeliveryVerdicts()
    for delivery, is_recorded in zip(deliveries, recorded, strict=True):
        due = delivery.task.not_before
        if is_recorded:
            verdicts.finished.append(delivery)
        elif last_attempt is not None and _must_replace(delivery, last_attempt):
            verdicts.replace.append(delivery)
        elif due is not None and due > now:
            verdicts.later.append(delivery)
        else:
            verdicts.ready.append(delivery)
    return verdicts


def _must_replace(delivery: Delivery, last_attempt: int) -> bool:
    # A bare message has no id but its message's, and the service gives it another when it moves it; a copy bears it.
    return delivery.attempt >= last_attempt or (delivery.attempt > 1 and delivery.bare and not delivery.invalid)
