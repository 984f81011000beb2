"""Messages about tasks that have ended: kept in the store before the record, and sent after it, off the loop.

Threads of their own send, so a receiver that hangs delays no lease, no settlement and no other message. Messages that are in the store when this
worker dies are sent by another worker or the next one: each looks for messages that nobody is at work on.
docs/notifications.md has the promises.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from runtime import faults
from runtime.errors import RuntimeFailure
from runtime.records.base import RecordStore, Totals
from runtime.records.totals import FEW_OF_ONE, open_tasks
from runtime.system import system
from runtime.tasks.history import Settlement
from runtime.tasks.notifications import Notification, choose_sinks, describe_complete, describe_end, find_notification
from runtime.worker.notification_queue import AT_ONCE, DueMessage, NotificationQueue
from runtime.worker.thread_calls import ThreadCalls
from runtime.worker.worker_context import WorkerContext

if TYPE_CHECKING:
    from runtime.records.notifications import DeliveryRecord, NotificationStore, OpenNotification

LOOK_AFTER_S: Final = 1.0
"""From the start to the first look for what others have left."""
LOOK_EVERY_S: Final = 5.0
LOOK_MOST: Final = 200
"""Messages that one look finds at most."""
REMOTE_LOOK_EVERY_S: Final = 30.0
CLAIM_FOR: Final = timedelta(seconds=60)
"""A claimed try without an end that is older than this has no sender any more: a try takes half a minute. It is also the
first pause between two tries; each further one is twice as long."""
MOST_TRIES: Final = 10
"""The last try is about eight hours after the first."""
FORGOTTEN_AFTER: Final = timedelta(days=1)
"""Age of a message without a record from which no settlement can be under way: each writes its message again first."""
WATCHED_FOR: Final = timedelta(days=40)
"""How long an experiment may take."""
STILL_S: Final = 120.0
"""How long the counters of an experiment stand still before its records are counted; then twice as long, and so on."""
URL_FOR_S: Final = 300.0
MOST_URL_BYTES: Final = 8192


@dataclass(slots=True)
class SendResult:
    """The result of one try."""

    message: Notification
    told: DeliveryRecord
    final: bool
    new: frozenset[int] = frozenset()
    """The sinks that got it in this try."""
    problem: Exception | None = None
    """Why it could not be claimed, or noted in the store."""


@dataclass(slots=True)
class _Still:
    """How long an experiment's counters have not changed."""

    counts: object
    since: float
    wait_s: float = STILL_S


@dataclass(slots=True)
class CompletionWatch:
    """Whether experiments are complete, asked again and again at the cost of a hint."""

    records: RecordStore
    _still: dict[str, _Still] = field(default_factory=dict)

    def find_complete(self, experiment: str, *, last: bool = False) -> Totals | None:
        """Return the exact totals of an experiment without an open task; None while it has one.

        The `last` look of a worker that leaves counts, if that takes few requests.
        """
        hint, now = self.records.totals(experiment), system.monotonic()
        few = last and hint.submitted <= FEW_OF_ONE
        if not (hint.exact or few or self._is_count_due(experiment, hint, now)):
            return None
        totals = hint if hint.exact else self.records.totals(experiment, exact=True)
        return totals if totals.submitted and not open_tasks(totals) else None

    def _is_count_due(self, experiment: str, hint: Totals, now: float) -> bool:
        if not open_tasks(hint):
            return True
        # Counters fall short for good when a worker is killed before its next report.
        still = self._still.get(experiment)
        if still is None or still.counts != hint.counts:
            self._still[experiment] = _Still(hint.counts, now)
            return False
        if now - still.since < still.wait_s:
            return False
        still.since, still.wait_s = now, 2 * still.wait_s
        return True


def write_ahead(settlements: Iterable[Settlement], records: RecordStore, queue: str) -> None:
    """Keep the messages about these ends before they are recorded. Costs nothing for tasks that nobody wants to hear of."""
    for settlement in settlements:
        if settlement.lease.task.notify and (message := find_notification(settlement, queue)) is not None:
            from runtime.records.notifications import keep_message

            keep_message(records.open_notifications(), message)
            faults.reach("worker.notification_written")


class Notifier:
    def __init__(self, services: WorkerContext) -> None:
        self._services = services
        self._mailbox = NotificationQueue()
        self._look_at = system.monotonic() + LOOK_AFTER_S
        self._looking = False
        self._looked_last = False
        self._give_up_at = float("inf")
        self._watching = CompletionWatch(services.records)
        self._urls: dict[str, tuple[str, float]] = {}
        self._store: NotificationStore = services.records.open_notifications()
        self.calls = ThreadCalls(inline=False, threads=AT_ONCE)

    def next_at(self) -> float:
        return float("inf") if self._looking else self._look_at

    def tell(self, recorded: Sequence[Settlement]) -> None:
        """Send the messages about ends that this worker has recorded."""
        for settlement in recorded:
            message = find_notification(settlement, self._services.queue.name)
            if message is not None:
                record = settlement.record
                self._mailbox.add(DueMessage(message, describe_end(message, record), choose_sinks(message, record)))
        self._resume_calls()

    def poll_when_due(self, now: float) -> None:
        if now >= self._look_at and not self._looking:
            self._look()

    def is_over(self, now: float, *, patience_s: float) -> bool:
        """Whether a worker that leaves may go: its messages are sent, or left in the store after `patience_s`."""
        if self._give_up_at == float("inf"):
            self._give_up_at = now + patience_s
        if now >= self._give_up_at:
            return True
        if not self._looked_last and not self._looking:
            self._looked_last = True
            self._look()
        return not self._looking and self._mailbox.is_empty()

    def close(self) -> None:
        """Leave unsent messages to other workers; a call that hangs is not waited for."""
        self._mailbox.close()
        self.calls.close(wait=False)

    # on the loop

    def _look(self) -> None:
        self._looking = True
        self._look_at = system.monotonic() + (LOOK_EVERY_S if self._services.local else REMOTE_LOOK_EVERY_S)
        self._services.offload.call(partial(self._find_due, frozenset(self._mailbox.names)), self._found)

    def _found(self, due: list[DueMessage] | None, problem: Exception | None) -> None:
        self._looking = False
        if due is None:
            self._services.say.trouble("looking for messages to send", problem)
        else:
            for each in due:
                self._mailbox.add(each)
        self._resume_calls()

    def _resume_calls(self) -> None:
        while (due := self._mailbox.take()) is not None:
            self.calls.call(partial(self._send, due), partial(self._was_sent, due))

    def _was_sent(self, due: DueMessage, sent: SendResult | None, problem: Exception | None) -> None:
        self._mailbox.end(due, None if sent is None else set(sent.told.problems))
        if problem is not None:
            self._services.say.trouble("sending messages", problem)
        elif sent is not None:
            self._services.say.told(sent.message, sorted(sent.new), sent.told.problems, final=sent.final)
            if sent.problem is not None:
                self._services.say.trouble("noting which messages are sent", sent.problem)
        self._resume_calls()

    # off the loop, if the store is remote

    def _find_due(self, known: frozenset[str]) -> list[DueMessage]:
        """Return due messages that nobody is sending, without those that are `known`."""
        found = [each for each in self._store.find_open() if each.name not in known]
        if not found:
            return []
        now = self._services.clock.now() - (self._services.records.skew() or timedelta())
        groups: dict[str, list[OpenNotification]] = {}
        for each in sorted(found, key=lambda one: one.name):
            # The messages about an experiment that go to the same sinks are one.
            key = each.name.partition(".")[0] if each.name.startswith("e-") else each.name
            groups.setdefault(key, []).append(each)
        due: list[DueMessage] = []
        for first, *others in groups.values():
            age = now - first.touched_at
            if first.tries and age < CLAIM_FOR * 2 ** (first.tries - 1):
                continue
            if len(due) == LOOK_MOST:
                break
            one = self._make_due(first, age)
            if one is not None:
                one.also = tuple(other.name for other in others)
                due.append(one)
        return due

    def _make_due(self, opened: OpenNotification, age: timedelta) -> DueMessage | None:
        message = self._store.read(opened.name)
        if message is None:
            return None
        if message.task is None:
            totals = self._watching.find_complete(message.experiment, last=self._looked_last)
            if totals is None:
                if age > WATCHED_FOR:
                    self._store.remove(opened.name, opened.tries)
                return None
            event, record = describe_complete(message, totals.counts, now=self._services.clock.now()), None
        else:
            record = self._services.records.find(message.task, message.generation)
            if record is None:
                if age > FORGOTTEN_AFTER:
                    self._store.remove(opened.name, opened.tries)
                return None
            event = describe_end(message, record)
        sinks = choose_sinks(message, record)
        if not sinks:
            # The end that was to be told of came second.
            self._store.remove(opened.name, opened.tries)
            return None
        return DueMessage(message, event, sinks, opened.tries)

    # on the thread

    def _send(self, due: DueMessage) -> SendResult | None:
        """Claim a message and send it to all its sinks at the same time; None if another worker has it."""
        from runtime.records.notifications import DeliveryRecord
        from runtime.shim.notify import MessageSender, send_together

        try:
            told = self._claim(due)
        except RuntimeFailure as problem:
            return SendResult(due.message, DeliveryRecord(), False, problem=problem)
        if told is None:
            return None
        faults.reach("worker.notification_claimed")
        for number, sink in due.sinks.items():
            if number in told.sent:
                continue
            if sink.command and "command" not in self._services.options.accept:
                due.problems[number] = "this worker accepts no commands"
                continue
            address = {sink.kind: getattr(sink, sink.kind)}
            find_url = partial(self._find_url, sink.webhook or "")
            due.sending.append(MessageSender(address, number, due.event, find_url, self._services.scratch, quiet=True))
        send_together(due.sending)
        faults.reach("worker.notification_sent")
        return self._conclude(due, told)

    def _claim(self, due: DueMessage) -> DeliveryRecord | None:
        """Claim the next try of a message. Returns what earlier tries came to; None if it is another sender's, or sent."""
        store, message, number = self._store, due.message, due.tries + 1
        if not store.claim(message, number, by=self._services.name, now=self._services.clock.now()):
            return None
        if store.find_told(message.experiment, message.name) is not None:
            store.remove(message.name, number)
            return None
        for name in due.also:
            store.remove(name, 1)
        return store.read_tries(message.name, due.tries)

    def _conclude(self, due: DueMessage, before: DeliveryRecord) -> SendResult:
        from runtime.records.notifications import DeliveryRecord
        from runtime.units import format_time

        new = frozenset(one.number for one in due.sending if not one.problem)
        problems = due.problems | {one.number: one.problem for one in due.sending if one.problem}
        tries, at = due.tries + 1, format_time(self._services.clock.now())
        told = DeliveryRecord(sent=before.sent | new, problems=problems, tries=tries, at=at, by=self._services.name)
        final = not problems or tries >= MOST_TRIES
        try:
            if final:
                self._store.close(due.message, told)
            else:
                self._store.end_try(due.message, told)
        except RuntimeFailure as problem:
            # The others are concluded all the same. This one is sent again when its claim is old, with the same id.
            return SendResult(due.message, told, final, new, problem)
        return SendResult(due.message, told, final, new)

    def _find_url(self, reference: str) -> str:
        """Return the URL of a webhook, with the rights that attempts have here. Raises `DeliveryFailure`."""
        known = self._urls.get(reference)
        if known is None or system.monotonic() >= known[1]:
            known = self._urls[reference] = self._read_url(reference), system.monotonic() + URL_FOR_S
        return known[0]

    def _read_url(self, reference: str) -> str:
        from runtime.shim.notify import DeliveryFailure

        scheme, _, place = reference.partition("://")
        if scheme == "env":
            if place not in os.environ:
                raise DeliveryFailure(f"the worker has no variable `{place}`")
            return os.environ[place]
        if scheme == "file":
            try:
                with Path(place).expanduser().open("rb") as opened:
                    return opened.read(MOST_URL_BYTES).decode()
            except (OSError, RuntimeError, ValueError) as problem:
                why = getattr(problem, "strerror", None) or type(problem).__name__
                raise DeliveryFailure(f"the worker cannot read `{place}`: {why.lower()}") from None
        secrets = self._services.secrets
        if secrets is None:
            raise DeliveryFailure(f"the queue of this worker gives no secrets, and its URL is in {reference}")
        try:
            return secrets.read(place)
        except RuntimeFailure as problem:
            raise DeliveryFailure(problem.message) from None
