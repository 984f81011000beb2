"""States of jobs by the head's words and the driver's notes. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from runtime.end_reasons import EndReason, Explanation
from runtime.jobs.plan import NativeState
from runtime.jobs.spec import JobState
from runtime.launchers.job_status import FORGOTTEN
from runtime.shim.common import DUPLICATE
from runtime.units import format_duration

_ENDED: Final = ("STOPPED", "SUCCEEDED", "FAILED")
_NO_START: Final = "JOB_SUPERVISOR_ACTOR_START_TIMEOUT"
_FAULTS_OF_HEAD: Final = (
    "JOB_SUPERVISOR_ACTOR_DIED",
    "JOB_SUPERVISOR_ACTOR_START_FAILURE",
    "JOB_SUPERVISOR_ACTOR_UNKNOWN_FAILURE",
    "JOB_SUPERVISOR_ACTOR_UNSCHEDULABLE",
    "RUNTIME_ENV_SETUP_FAILURE",
)
"""Kinds of errors that a head has just after its start. A submission of ours names no runtime environment that could fail."""

_NEXT_TURN: Final = "it asks again once that run has begun, or has taken no place for an hour; only a launch with a higher `priority` would go before it"


def has_ended(info: Mapping[str, Any]) -> bool:
    return info.get("status") in _ENDED


def has_failed_to_start(info: Mapping[str, Any], note: Mapping[str, Any] | None) -> bool:
    """Whether the head failed to start a driver through no fault of the job. A driver's first act is its note."""
    if info.get("status") != "FAILED" or note is not None or info.get("driver_exit_code") is not None:
        return False
    return info.get("error_type") in _FAULTS_OF_HEAD


def read_states(
    native: str, info: Mapping[str, Any] | None, note: Mapping[str, Any] | None, *, asked: bool = False
) -> list[NativeState]:
    """The state of a native job, and those of its runs that wait for a place.

    `info` is what the head knows, None if nothing: a head that has started again has forgotten its jobs. A job that was
    `asked` to end for a restart counts as forgotten at once.
    """
    if asked:
        said = "it was asked to end, with a checkpoint, for a restart of the head"
        return [_state(native, JobState.FAILED, EndReason.LOST, raw=FORGOTTEN, message=said)]
    if info is None:
        said = "the head does not know it: it was started again, or the job was deleted there"
        return [_state(native, JobState.FAILED, EndReason.LOST, raw=FORGOTTEN, message=said)]
    status = str(info.get("status"))
    started = read_time(info.get("start_time"))
    if status == "PENDING":
        return [_state(native, JobState.PENDING, raw=status, message=str(info.get("message") or ""))]
    if status not in _ENDED:
        runs = (note or {}).get("runs", {})
        waiting = [int(index) for index, run in runs.items() if run["state"] == "waiting"]
        why = (note or {}).get("why") or {}
        message = f"{why['for']}: {why['sentence']}" if "sentence" in why else _describe_wants(note)
        message = tell_better(note) or message
        whole = _state(native, JobState.RUNNING, raw=status, started_at=started, where=_report_hosts(runs))
        return [
            whole,
            *(_state(native, JobState.PENDING, index=index, raw="waiting", message=message) for index in waiting),
        ]
    return [_read_end(native, status, info, note)]


def _read_end(native: str, status: str, info: Mapping[str, Any], note: Mapping[str, Any] | None) -> NativeState:
    message, code = str(info.get("message") or ""), info.get("driver_exit_code")
    if status == "SUCCEEDED":
        return _state(native, JobState.SUCCEEDED, raw=status)
    if status == "STOPPED":
        return _state(native, JobState.CANCELLED, EndReason.CANCELLED, raw=status, message="stopped on the head")
    if info.get("error_type") == _NO_START or _NO_START in message:
        return _state(native, JobState.FAILED, EndReason.NO_CAPACITY, raw=status, message=message)
    if code == DUPLICATE:
        message = "another native job had begun to serve it"
    elif isinstance(code, int) and code > 0 and (note is None or code != 1):
        # The driver could not begin, or a shim could not follow its order.
        return _state(native, JobState.FAILED, EndReason.APP_FAILED, raw=status, message=message, exit_code=code)
    return _state(native, JobState.FAILED, EndReason.LOST, raw=status, message=message)


def explain_waiting(
    native: NativeState, note: Mapping[str, Any] | None, *, now: datetime | None = None
) -> Explanation | None:
    """Explain the resources that a run waits for, and why."""
    if native.state is not JobState.PENDING:
        return None
    if native.raw != "waiting":
        return Explanation(
            sentence="the head has not started its driver yet",
            evidence=tuple(filter(None, [native.message])),
            hint="`ray status` on the head shows what it is busy with",
        )
    why = (note or {}).get("why") or {}
    asks = f"each node asks for {_describe_wants(note)}"
    found = (*why.get("evidence", ()), *why.get("before", ()))
    if (better := tell_better(note)) is not None:
        return Explanation(sentence=better, evidence=(asks, *found), hint=_NEXT_TURN)
    if "sentence" not in why:
        return Explanation(
            sentence="it waits for room on the cluster",
            evidence=(asks,),
            hint="it starts by itself when there is room; a demand that no kind of node can meet waits for ever",
        )
    since = (note or {}).get("runs", {}).get(str(native.index), {}).get("since")
    waited = f" {format_duration((now or datetime.now(UTC)).timestamp() - since)}" if since else ""
    return Explanation(
        sentence=f"it has waited{waited} for {why['for']}: {why['sentence']}",
        evidence=(asks, *found),
        hint=why.get("hint"),
    )


def tell_better(note: Mapping[str, Any] | None) -> str | None:
    """`it lets j-… of ada (priority high) go first`; None if the driver's runs let nobody go first."""
    why = (note or {}).get("why") or {}
    if not (better := why.get("behind")):
        return None
    whose = f" of {better['owner']}" if better["owner"] else ""
    return f"it lets {better['job']}{whose} (priority {better['priority']}) go first"


def _describe_wants(note: Mapping[str, Any] | None) -> str:
    wants = (note or {}).get("wants", {})
    amounts = [f"{amount:g} {name}" for name, amount in wants.get("bundle", {}).items() if amount]
    if tpu := wants.get("tpu"):
        several = f", in {tpu['slices']} slices at once" if tpu.get("slices", 1) > 1 else ""
        amounts.append(f"{tpu['chips']} chips of a TPU {tpu['type']}{several}")
    return ", ".join(amounts)


def _report_hosts(runs: Mapping[str, Any]) -> str:
    hosts = sorted({host for run in runs.values() for host in run.get("hosts", ())})
    return ", ".join(hosts[:4]) + (f" and {len(hosts) - 4} more" if len(hosts) > 4 else "")


def read_time(milliseconds: object) -> datetime | None:
    """The time in a head's words; None if it is not a number of milliseconds, or the year is out of range."""
    if not isinstance(milliseconds, int) or isinstance(milliseconds, bool) or milliseconds <= 0:
        return None
    try:
        return datetime.fromtimestamp(milliseconds / 1000, UTC)
    except (OverflowError, OSError, ValueError):
        return None


def _state(native: str, state: JobState, reason: EndReason | None = None, **more: Any) -> NativeState:
    return NativeState(native_id=native, index=more.pop("index", None), state=state, reason=reason, **more)
