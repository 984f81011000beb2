"""Every call to Google Pub/Sub, typed, one method per call; failures come out as ours.

The generated clients are used as they are, without the high-level library's batching and streaming, which hold
messages that nobody asked for. `insist` is the one place where a call is made again.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from runtime.errors import InvalidContract, MissingExtra, NotPossible, QueueUnavailable
from runtime.outputs import PubSubQueueOutput
from runtime.sanitize import CleanLogger
from runtime.system import system
from runtime.units import count_noun, format_duration

if TYPE_CHECKING:
    import threading

T = TypeVar("T")
log = CleanLogger(__name__)

# https://cloud.google.com/pubsub/quotas#resource_limits
MAX_PUBLISH_MESSAGES: Final = 1_000
MAX_PULL_MESSAGES: Final = 1_000
MAX_REQUEST_BYTES: Final = 9_000_000
"""The service takes 10 MB in a request; the rest is left to the framing."""
MAX_ACK_IDS: Final = 1_000
"""Requests of acknowledgement end at 512 KiB, which is some 2,500 ids of the service."""

MIN_DEADLINE_S: Final = 10
"""The service's minimum for a subscription; the emulator takes less."""
MAX_DEADLINE_S: Final = 600

START_PATIENCE_S: Final = 10.0
"""For an emulator that is just starting."""

_RESOURCE_ID: Final = r"[A-Za-z][A-Za-z0-9._~+%-]{2,254}"
"""https://cloud.google.com/pubsub/docs/pubsub-basics#resource_names"""
_CALL_TIMEOUT_S: Final = 20.0
_SERVICE_URL: Final = "https://pubsub.googleapis.com/"


def check_names(settings: PubSubQueueOutput) -> None:
    """Raise `InvalidContract` for a name that no topic or subscription can have."""
    for field, kind in (
        ("topic", "topics"),
        ("subscription", "subscriptions"),
        ("dead_letter_topic", "topics"),
        ("dead_letter_subscription", "subscriptions"),
    ):
        name: str | None = getattr(settings, field)
        if name is None:
            continue
        if not re.fullmatch(rf"projects/[^/\s]+/{kind}/(?!goog){_RESOURCE_ID}", name, re.ASCII):
            raise InvalidContract(
                f"`{name}` is no `{field}` of a Pub/Sub queue",
                facts=[
                    f"expected: projects/PROJECT/{kind}/NAME",
                    "a NAME has 3 to 255 letters, digits and -._~+%, begins with a letter, and not with `goog`",
                ],
                hint="correct the queue's URL; for a queue of a stack run `pulumi up`, or correct the published contract",
            )


@dataclass(frozen=True, slots=True)
class OutgoingMessage:
    data: bytes
    attributes: Mapping[str, str]

    @property
    def size(self) -> int:
        """Bytes in a request, with a margin for the framing of each field."""
        return len(self.data) + 16 + sum(len(name) + 4 * len(value) + 8 for name, value in self.attributes.items())


class ReceivedMessage(NamedTuple):
    ack_id: str
    message_id: str
    data: bytes
    attributes: dict[str, str]
    published_at: datetime
    attempt: int
    """1 for the first delivery, and so on; 0 if the subscription has no dead-letter policy and nobody counts."""


class AckReply(NamedTuple):
    """Ids that a service with exactly-once delivery refused; without it both sets are empty, even if ids were refused."""

    gone: frozenset[str]
    """Another delivery of the message is newer, or it was acknowledged."""
    again: frozenset[str]
    """Failed for now."""


_ALL_WELL: Final = AckReply(frozenset(), frozenset())


class PubSubUnavailable(QueueUnavailable):
    """A call that failed. `missing` names the topic or subscription that does not exist."""

    missing: str | None = None


class PubSubClient:
    """The calls. Safe to use from several threads.

    Pulls have a connection of their own, so that `close_pulls` can end the one that waits.
    """

    def __init__(self, *, emulator: str | None = None) -> None:
        """`emulator` is `host:port`; without it the variable of Google's own clients decides."""
        self.emulator = emulator or os.environ.get("PUBSUB_EMULATOR_HOST") or None
        try:
            import grpc  # type: ignore[import-untyped]
            from google.pubsub_v1 import PublisherClient, SubscriberClient, types
            from google.pubsub_v1.services.publisher.transports import PublisherGrpcTransport
            from google.pubsub_v1.services.subscriber.transports import SubscriberGrpcTransport
        except ImportError as problem:
            raise MissingExtra("a queue on Pub/Sub", "gcp") from problem

        def connect(host: str, *, options: Sequence[tuple[str, Any]] = (), **credentials: Any) -> Any:
            options = [
                *options,
                # A channel that lost its server tries again ever more rarely, by default up to every two minutes,
                # and by default all channels of a process to one address share that fate.
                ("grpc.initial_reconnect_backoff_ms", 200),
                ("grpc.max_reconnect_backoff_ms", 5_000),
                ("grpc.use_local_subchannel_pool", 1),
            ]
            if self.emulator:
                return grpc.insecure_channel(self.emulator, options=options)
            return SubscriberGrpcTransport.create_channel(host, options=options, **credentials)

        identity: dict[str, Any] = {}
        if self.emulator:
            from google.auth.credentials import AnonymousCredentials

            identity["credentials"] = AnonymousCredentials()  # type: ignore[no-untyped-call]
        self._types = types
        transport = SubscriberGrpcTransport(channel=connect, **identity)
        self._subscriber = SubscriberClient(transport=transport)
        self._publisher = PublisherClient(transport=PublisherGrpcTransport(channel=transport.grpc_channel))
        self._puller = SubscriberClient(transport=SubscriberGrpcTransport(channel=connect, **identity))
        self._message = types.PubsubMessage.pb(types.PubsubMessage()).__class__

    def publish(self, topic: str, messages: Sequence[OutgoingMessage]) -> list[str]:
        """The ids of the messages, in order, once the service has stored them all."""
        # The plain protobuf classes: filling their wrappers costs several times the call itself.
        request = self._types.PublishRequest(topic=topic)
        self._types.PublishRequest.pb(request).messages.extend(
            [self._message(data=one.data, attributes=one.attributes) for one in messages]
        )
        with _explained("publish to", topic, self.emulator):
            reply = self._publisher.publish(request=request, retry=None, timeout=_CALL_TIMEOUT_S * 3)
        ids = list(reply.message_ids)
        if len(ids) != len(messages):
            raise PubSubUnavailable(
                f"topic `{topic}` confirmed {len(ids)} of {count_noun(len(messages), 'message')}",
                hint="run the command again",
            )
        return ids

    def pull(self, subscription: str, most: int, *, wait_s: float) -> list[ReceivedMessage]:
        """Up to `most` messages, or none after `wait_s`; may be none though there are some."""
        from google.api_core.exceptions import DeadlineExceeded

        request = self._types.PullRequest(subscription=subscription, max_messages=min(most, MAX_PULL_MESSAGES))
        with _explained("pull from", subscription, self.emulator):
            try:
                # The emulator answers an empty pull a second before this time is over; the service may not.
                reply = self._puller.pull(request=request, retry=None, timeout=wait_s)
            except DeadlineExceeded:
                return []
        return [
            ReceivedMessage(
                one.ack_id,
                one.message.message_id,
                one.message.data,
                dict(one.message.attributes),
                one.message.publish_time.ToDatetime(tzinfo=UTC),
                one.delivery_attempt,
            )
            for one in self._types.PullResponse.pb(reply).received_messages
        ]

    def acknowledge(self, subscription: str, ack_ids: Sequence[str]) -> AckReply:
        """At most `MAX_ACK_IDS`. A stale id is passed over in silence unless delivery is exactly-once."""
        return self._confirm(
            lambda: self._subscriber.acknowledge(
                subscription=subscription, ack_ids=list(ack_ids), retry=None, timeout=_CALL_TIMEOUT_S
            ),
            "acknowledge on",
            subscription,
        )

    def modify_deadline(self, subscription: str, ack_ids: Sequence[str], deadline: timedelta) -> AckReply:
        """At most `MAX_ACK_IDS`; they come back when `deadline` has passed without a further call."""
        # 0 to 600; 0 would give the message away at once and count as a failed delivery.
        # https://cloud.google.com/pubsub/docs/reference/rpc/google.pubsub.v1#modifyackdeadlinerequest
        return self._confirm(
            lambda: self._subscriber.modify_ack_deadline(
                subscription=subscription,
                ack_ids=list(ack_ids),
                ack_deadline_seconds=deadline_seconds(deadline),
                retry=None,
                timeout=_CALL_TIMEOUT_S,
            ),
            "renew leases on",
            subscription,
        )

    def _confirm(self, call: Any, what: str, subscription: str) -> AckReply:
        from google.api_core.exceptions import GoogleAPICallError

        with _explained(what, subscription, self.emulator):
            try:
                call()
            except GoogleAPICallError as problem:
                # With exactly-once delivery the fate of each id is in the error's metadata; ids that it does not
                # name went well. https://cloud.google.com/pubsub/docs/exactly-once-delivery
                fates = (problem.metadata or {}) if problem.reason == "EXACTLY_ONCE_ACKID_FAILURE" else {}
                if not fates:
                    raise
                return AckReply(
                    frozenset(ack_id for ack_id, fate in fates.items() if fate.startswith("PERMANENT_FAILURE")),
                    frozenset(ack_id for ack_id, fate in fates.items() if fate.startswith("TRANSIENT_FAILURE")),
                )
        return _ALL_WELL

    def seek(self, subscription: str, at: datetime) -> None:
        """Count everything published before `at` as acknowledged."""
        with _explained("purge", subscription, self.emulator):
            self._subscriber.seek(
                request={"subscription": subscription, "time": at}, retry=None, timeout=_CALL_TIMEOUT_S
            )

    def service_time(self) -> datetime | None:
        """The service's own time, within a second and never ahead of it; None without an answer."""
        if self.emulator:
            # It sends no time of its own, and uses the clock of this machine.
            return system.now()
        import http.client
        import urllib.error
        import urllib.request
        from email.utils import parsedate_to_datetime

        try:
            try:
                answer: Any = urllib.request.urlopen(_SERVICE_URL, timeout=_CALL_TIMEOUT_S)
            except urllib.error.HTTPError as refused:
                answer = refused  # Even a refusal contains the time.
            with answer:
                return parsedate_to_datetime(answer.headers["Date"])
        except (OSError, http.client.HTTPException, ValueError, TypeError):
            return None

    def create_topic(self, topic: str) -> bool:
        """Whether it is new."""
        return self._create(
            topic, lambda: self._publisher.create_topic(name=topic, retry=None, timeout=_CALL_TIMEOUT_S)
        )

    def create_subscription(self, settings: PubSubQueueOutput) -> bool:
        """The subscription of the settings. Whether it is new."""
        request: dict[str, Any] = {
            "name": settings.subscription,
            "topic": settings.topic,
            "ack_deadline_seconds": settings.ack_deadline_s,
            "enable_exactly_once_delivery": bool(settings.exactly_once),
            # Never expires; the service's default is 31 days without a puller.
            "expiration_policy": {},
        }
        if settings.retention_s:
            request["message_retention_duration"] = timedelta(seconds=settings.retention_s)
        if settings.dead_letter_topic:
            request["dead_letter_policy"] = {
                "dead_letter_topic": settings.dead_letter_topic,
                "max_delivery_attempts": settings.max_delivery_attempts or 0,
            }
        create = self._subscriber.create_subscription
        return self._create(settings.subscription, lambda: create(request=request, retry=None, timeout=_CALL_TIMEOUT_S))

    def _create(self, name: str, call: Callable[[], object]) -> bool:
        from google.api_core.exceptions import AlreadyExists

        with _explained("create", name, self.emulator):
            try:
                call()
            except AlreadyExists:
                return False
        return True

    def close_pulls(self) -> None:
        """End the waiting pull. Messages that the service was just sending come back after their deadlines."""
        self._puller.transport.close()  # type: ignore[no-untyped-call]

    def close(self) -> None:
        for client in (self._puller, self._subscriber):
            client.transport.close()  # type: ignore[no-untyped-call]


def deadline_seconds(deadline: timedelta) -> int:
    return max(MIN_DEADLINE_S, min(MAX_DEADLINE_S, round(deadline.total_seconds())))


def ensure_topics(settings: PubSubQueueOutput, *, emulator: str | None = None) -> list[str]:
    """Create the topics and subscriptions that the settings name and an emulator lacks; returns the new names.

    Elsewhere the stack owns topics and subscriptions, and this raises `NotPossible`. Safe to call again.
    """
    client = PubSubClient(emulator=emulator)
    try:
        if not client.emulator:
            raise NotPossible(
                "topics and subscriptions of a real project belong to its stack",
                facts=["no emulator is set in PUBSUB_EMULATOR_HOST"],
                hint="run `pulumi up` for the stack",
            )
        wanted: dict[str, Callable[[], bool]] = {settings.topic: lambda: client.create_topic(settings.topic)}
        if dead_topic := settings.dead_letter_topic:
            wanted[dead_topic] = lambda: client.create_topic(dead_topic)
            if dead := settings.dead_letter_subscription:
                plain = PubSubQueueOutput(topic=dead_topic, subscription=dead)
                wanted[dead] = lambda: client.create_subscription(plain)
        wanted[settings.subscription] = lambda: client.create_subscription(settings)
        return [name for name, create in wanted.items() if insist(create, patience_s=START_PATIENCE_S)]
    finally:
        client.close()


@contextmanager
def _explained(what: str, resource: str, emulator: str | None) -> Iterator[None]:
    """Turn the library's errors into ours."""
    try:
        yield
    except Exception as problem:
        raise explain_problem(problem, what, resource, emulator) from problem


def explain_problem(problem: Exception, what: str, resource: str, emulator: str | None) -> PubSubUnavailable:
    """Our error for one of the library's, with whether a further call may help and what to do if not."""
    from google.api_core import exceptions as api
    from google.auth import exceptions as auth

    where = f"the emulator at {emulator}" if emulator else "Google Pub/Sub"
    said = str(getattr(problem, "message", problem)).splitlines()
    fact = f"{where} said: {type(problem).__name__} {said[0] if said else ''}".rstrip()
    cannot = f"cannot {what} `{resource}`"
    if isinstance(problem, api.NotFound):
        error = PubSubUnavailable(
            f"{cannot}: it does not exist",
            facts=[fact],
            hint="`runtime queue repair` makes it again on an emulator"
            if emulator
            else f"run `pulumi up` for its stack, or `{_creating_command(resource)}`",
            retryable=False,
        )
        error.missing = resource
        return error
    if isinstance(problem, api.PermissionDenied | api.Unauthenticated | auth.DefaultCredentialsError):
        return PubSubUnavailable(
            f"{cannot}: not permitted",
            facts=[fact, "needed: roles/pubsub.publisher on the topic, roles/pubsub.subscriber on the subscription"],
            hint="run `gcloud auth application-default login`, or give this identity those roles",
            denied=True,
        )
    if isinstance(problem, api.InvalidArgument):
        return PubSubUnavailable(
            f"{cannot}: the service does not take what it is asked",
            facts=[fact],
            hint="is that the name of a topic or subscription? the queue's URL or the stack's contract has it",
            retryable=False,
        )
    refused = api.ServiceUnavailable | api.TooManyRequests | api.Aborted | api.Cancelled | api.RetryError
    lost = api.DeadlineExceeded | api.GatewayTimeout | api.BadGateway | auth.TransportError
    failed = api.InternalServerError | api.Unknown
    again = isinstance(problem, refused | lost | failed) or bool(getattr(problem, "retryable", False))
    return PubSubUnavailable(
        cannot,
        facts=[fact],
        hint="see https://status.cloud.google.com" if again and not emulator else None,
        retryable=again,
    )


def insist(call: Callable[[], T], *, patience_s: float, known: bool = False, stop: threading.Event | None = None) -> T:
    """Make a call until it succeeds, and return its result; raise its last failure if that is hopeless or after `patience_s`.

    If topic and subscription are `known` to have existed, a missing one may come back, as after an emulator's restart.
    `stop` ends the waiting early.
    """
    started = system.monotonic()
    for attempt in itertools.count():
        try:
            return call()
        except PubSubUnavailable as problem:
            pause = backoff_s(attempt)
            waited = system.monotonic() - started
            again = problem.retryable or (known and problem.missing is not None)
            if not again or waited + pause > patience_s:
                raise
            if attempt == 4:
                log.warning("%s; trying again for up to %s", problem.message, format_duration(patience_s - waited))
        if stop is None:
            system.sleep(pause)
        elif stop.wait(pause):
            patience_s = 0
    raise AssertionError


def backoff_s(attempt: int) -> float:
    """0.1 s, doubling to 5 s, each with jitter, so that a fleet does not come back in one moment."""
    return min(5.0, 0.1 * 2.0 ** min(attempt, 10)) * (0.5 + system.random() / 2)


def _creating_command(resource: str) -> str:
    _, project, kind, name = resource.split("/")
    topic = " --topic TOPIC" if kind == "subscriptions" else ""
    return f"gcloud pubsub {kind} create {name}{topic} --project {project}"


def chunks(items: Sequence[str], most: int) -> Iterator[list[str]]:
    for start in range(0, len(items), most):
        yield list(items[start : start + most])
