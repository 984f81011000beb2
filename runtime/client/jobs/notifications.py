"""Messages about the end of jobs that no shim has sent: found by their claims, and sent by `runtime keep` under the same id.

The caller of `announce_end` holds the job's lock; `send_due` takes it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from runtime.client.jobs.handle import JobHandle
from runtime.client.jobs.targets import OpenTarget, make_context
from runtime.config import Settings
from runtime.end_reasons import EndReason
from runtime.errors import NotPossible, RuntimeFailure
from runtime.jobs import ledger
from runtime.jobs.hosts.base import AccessDenied, Files
from runtime.jobs.ledger import JobStatus, job_folder
from runtime.jobs.lock import Lock, LockHeld
from runtime.jobs.plan import owner_name
from runtime.jobs.secret_schemes import COMMON_SCHEMES
from runtime.jobs.spec import SecretRef, parse_spec
from runtime.shim.common import CLAIMS, NOTIFY
from runtime.shim.notify import DeliveryFailure, claim_name, deliver, find_event, make_claim, sent_name, wants
from runtime.system import system
from runtime.tasks.notification_sinks import Sink

QUIET_S: Final = 120.0
"""Age from which nobody is at work on a claim: a shim sends for half a minute."""
GIVEN_UP_S: Final = 86400.0
"""Age from which a message is not sent any more."""
OF_MACHINE: Final = "its command runs only on the machine of the job, and that did not run it"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnsentMessage:
    """A message that is not known to be sent."""

    event: Mapping[str, Any]
    sink: int
    began: float
    at: float
    problem: str
    """Why the last try failed; empty if its sender died, or is at work."""

    def is_due(self, now: float) -> bool:
        """Whether it is time for another try: pauses double, and after a day there is none."""
        return now - self.at >= max(QUIET_S, self.at - self.began) and now - self.began < GIVEN_UP_S


def read_unsent(files: Files, job: str = "") -> list[UnsentMessage]:
    """Read the claims of a job, or of all jobs that we may read."""
    claims: list[dict[str, Any]] = []
    for name in files.names(CLAIMS, f"{job}." if job else ""):
        with contextlib.suppress(AccessDenied):  # one of another user
            claims += ledger.read_objects(files, [f"{CLAIMS}/{name}"]).values()
    found = []
    for claim in claims:
        try:
            event = {**claim["event"], "job": str(claim["event"]["job"]), "id": str(claim["event"]["id"])}
            times = float(claim["began"]), float(claim["at"])
            sink, problem = int(claim["sink"]), str(claim.get("problem", ""))
        except (ValueError, TypeError, LookupError):
            continue
        found.append(UnsentMessage(event=event, sink=sink, began=times[0], at=times[1], problem=problem))
    return found


def send_due(place: OpenTarget, settings: Settings, progress: Callable[[str], None]) -> None:
    """Try each message of the target's jobs again that is due. One that cannot be sent stops no other."""
    for each in read_unsent(place.files):
        job = JobHandle(each.event["job"], place.target, place.launcher, place.host)
        if not each.is_due(system.time()):
            continue
        try:
            entry = ledger.read_entry(job.files, job.id)
            if entry is None or entry.target != place.target.name:
                continue
            held = Lock(job.files, job.id, f"runtime keep of {owner_name()}")
            held.take(patience_s=0)
            try:
                _send_again(job, each, settings, progress)
            finally:
                held.release()
        except (LockHeld, NotPossible):
            continue  # it is removed or launched, or is another user's


def announce_end(job: JobHandle, status: JobStatus, settings: Settings, progress: Callable[[str], None]) -> None:
    """Send the messages of a job that has ended, unless its shim claimed them."""
    order = _read(job, "order.json")
    if not order.get("notify"):
        return
    entry = status.entry
    outcomes = ledger.read_outcomes(job.files, job.id).get(job.id, {})
    ended = [(each.index, str(each.reason), each.code, each.attempt) for each in outcomes.values()]
    for index in range(entry.first_index, entry.first_index + entry.indices):
        if index not in outcomes:
            cancelled = entry.cancelled or index in entry.cancelled_indices
            reason = EndReason.CANCELLED if cancelled else status.reason or EndReason.LOST
            ended.append((index, str(reason), 1, 0))
    event = find_event(order, ended)
    for number, sink in enumerate(order["notify"]["sinks"] if event else ()):
        assert event
        if not wants(sink, event) or _is_sent(job, event, number):
            continue
        now = system.time()
        if job.files.create(claim_name(event, number), make_claim(event, number, now).encode()):
            _send(
                job, UnsentMessage(event=event, sink=number, began=now, at=now, problem=""), order, settings, progress
            )


def _is_sent(job: JobHandle, event: Mapping[str, Any], number: int) -> bool:
    return job.files.read(f"{job_folder(job.id)}/{sent_name(event, number)}") is not None


def _send_again(job: JobHandle, unsent: UnsentMessage, settings: Settings, progress: Callable[[str], None]) -> None:
    name = claim_name(unsent.event, unsent.sink)
    if _is_sent(job, unsent.event, unsent.sink):
        job.files.remove(name)
        return
    # Another keeper may have tried it since it was listed.
    if any(each == unsent for each in read_unsent(job.files, job.id)):
        _send(job, unsent, _read(job, "order.json"), settings, progress)


def _send(
    job: JobHandle, unsent: UnsentMessage, order: Mapping[str, Any], settings: Settings, progress: Callable[[str], None]
) -> None:
    event, number = unsent.event, unsent.sink
    sinks = order.get("notify", {}).get("sinks", ())
    name = claim_name(event, number)
    if number >= len(sinks):
        job.files.remove(name)
        return
    problem = ""
    try:
        if "command" in sinks[number]:
            raise DeliveryFailure(OF_MACHINE)
        deliver(sinks[number], event, lambda: _find_url(job, number, settings))
    except DeliveryFailure as found:
        problem = str(found)
    if problem:
        job.files.write(name, make_claim(event, number, unsent.began, problem).encode())
        if problem != unsent.problem:
            progress(f"{job.id}: notification {number} was not sent: {problem}")
        return
    job.files.write(f"{job_folder(job.id)}/{sent_name(event, number)}", b"")
    job.files.remove(name)
    progress(f"{job.id}: sent notification {number}")


def _find_url(job: JobHandle, number: int, settings: Settings) -> str:
    """Read the URL of a webhook with the rights of this user. Raises `DeliveryFailure`."""
    from runtime.client.jobs.secrets import read_values

    sinks: tuple[Sink, ...] = parse_spec(_read(job, "spec.json"), source=f"job `{job.id}`").notify
    source = sinks[number].webhook if number < len(sinks) else None
    if source is None:
        raise DeliveryFailure("its spec names no webhook")
    ref = SecretRef(name=f"{NOTIFY}{number}", source=source)
    if ref.scheme not in COMMON_SCHEMES:
        raise DeliveryFailure(f"only the machine of the job can read {ref.source}")
    try:
        return read_values([ref], job.target, make_context(settings))[ref.name]
    except RuntimeFailure as problem:
        raise DeliveryFailure(problem.message) from None


def _read(job: JobHandle, file: str) -> dict[str, Any]:
    with ledger.as_damage(job.files, job.id, file):
        return {**json.loads(job.files.read(f"{job_folder(job.id)}/{file}") or b"{}")}


def describe_unsent(unsent: UnsentMessage) -> str:
    """`notification 0 was not sent: the receiver answered HTTP 500; runtime keep sends it again`"""
    why = f": {unsent.problem}" if unsent.problem else " yet"
    final = unsent.problem == OF_MACHINE or system.time() - unsent.began >= GIVEN_UP_S
    return f"notification {unsent.sink} was not sent{why}" + ("" if final else "; `runtime keep` sends it again")
