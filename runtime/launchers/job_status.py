"""Judges where jobs stand: by the ledger, one question to the backend, and the outcomes read once more."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from runtime.end_reasons import EndReason
from runtime.errors import InfrastructureFailure
from runtime.jobs.hosts.base import Host
from runtime.jobs.ledger import (
    JobStatus,
    LedgerEntry,
    RunOutcome,
    find_begun,
    job_folder,
    judge,
    name_unbegun,
    newest_natives,
    read_outcomes,
    read_unannounced,
)
from runtime.jobs.plan import NativeState, Target
from runtime.jobs.spec import JobState
from runtime.launchers.base import Launcher
from runtime.shim.common import DUPLICATE
from runtime.system import system

GONE: Final = (EndReason.LOST, EndReason.NODE_FAILED, EndReason.PREEMPTED)
"""Ends of a native job after which its runs may be started again, if the backend itself starts nothing."""
FORGOTTEN: Final = "forgotten"
"""`raw` of a native job that a backend without memory of earlier starts does not know. Its end tells nothing of the job."""

REBOOTED: Final = "rebooted"
ELSEWHERE: Final = "elsewhere"
UNSEEN: Final = (REBOOTED, ELSEWHERE)
"""`raw` of native jobs that began before this boot of the machine, or in another of its containers. If machines share a record
root, they may live where nobody can look from here."""
LIVES: Final = "it lives where it began, on another machine or in another container"


def judge_job(
    entry: LedgerEntry,
    target: Target,
    launcher: Launcher,
    host: Host,
    *,
    indices: bool = False,
    tell: Callable[[InfrastructureFailure], None] | None = None,
    lives: Callable[[LedgerEntry], bool | None] = lambda entry: None,
) -> tuple[JobStatus, list[NativeState]]:
    """Where a job stands, run by run with `indices`, and the backend's states of its native jobs.

    Without `tell`, a backend that does not answer raises; with it, its native jobs are `unknown` and `tell` gets the
    error. `lives` is asked whether a job with native jobs that cannot be seen from here gives signs of life, None if that
    is not known; the states are returned as the backend has them.
    """
    (found,) = judge_jobs([entry], target, launcher, host, indices=indices, tell=tell, lives=lives)
    return found


def judge_jobs(
    entries: Sequence[LedgerEntry],
    target: Target,
    launcher: Launcher,
    host: Host,
    *,
    indices: bool = False,
    tell: Callable[[InfrastructureFailure], None] | None,
    lives: Callable[[LedgerEntry], bool | None] = lambda entry: None,
) -> list[tuple[JobStatus, list[NativeState]]]:
    """Judge each job like `judge_job`, with one question to the backend for all that have not ended."""
    homes = {
        native.native_id: entry.id
        for entry in entries
        if len(entry.outcomes) < entry.indices
        for native in newest_natives(entry)
    }
    open_jobs = set(homes.values())
    # If only one job is asked about, every answer is about that job, even under another id.
    only = next(iter(open_jobs)) if len(open_jobs) == 1 else None
    said: dict[str, list[NativeState]] = {}
    for state in ask(list(homes), target, launcher, host, tell=tell):
        home = only or homes.get(state.native_id) or homes.get(state.native_id.rpartition("_")[0])
        if home is not None:
            said.setdefault(home, []).append(state)
    _follow_owners(entries, said, target, launcher, host, tell)
    suspects = {entry.id for entry in entries if entry.id in open_jobs and _might_have_ended(entry, said)}
    # A result that was committed while we asked counts: it came before the native job's end.
    again = read_outcomes(host.files, min(suspects) if len(suspects) == 1 else "") if suspects else {}
    found = []
    for entry in entries:
        current = entry
        if entry.id in suspects:
            announced = again.get(entry.id, {})
            gone = _list_gone(entry, announced, said.get(entry.id, ()))
            current = replace(entry, outcomes={**read_unannounced(host.files, entry.id, gone), **announced})
        natives = name_unbegun(host.files, current, said.get(entry.id, []))
        known = natives
        if any(each.raw in UNSEEN for each in natives):
            sign = lives(current)
            known = [_as_far_as_known(each, current, target, sign) for each in natives]
        begun = find_begun(host.files, current, known)
        found.append((judge(current, known, begun=begun, indices=indices), natives))
    return found


def _as_far_as_known(state: NativeState, entry: LedgerEntry, target: Target, lives: bool | None) -> NativeState:
    """The state of a native job that may not be visible from here, by whether its job gives signs of life. If nobody has
    watched it, it is gone only if everything says that it ran on this machine before its last boot."""
    if state.raw not in UNSEEN or lives is False:
        return state
    if lives:
        return replace(state, state=JobState.RUNNING, reason=None, message=LIVES)
    began_here = entry.target == target.name and (entry.kind != "local" or entry.intent.get("from") == system.node())
    if state.raw == REBOOTED and began_here:
        return state
    message = f"it began on another machine, or in another container of `{state.where}`, and cannot be seen from here"
    return replace(state, state=JobState.UNKNOWN, reason=None, message=message)


def _follow_owners(
    entries: Sequence[LedgerEntry],
    said: dict[str, list[NativeState]],
    target: Target,
    launcher: Launcher,
    host: Host,
    tell: Callable[[InfrastructureFailure], None] | None,
) -> None:
    """Replace the state of a twin, which ended because another native job serves its part, with the state of that one."""
    twins = {
        f"{job_folder(entry.id)}/owners/{native.epoch}.{native.part}": (entry.id, native.native_id)
        for entry in entries
        if any(map(_is_twin, said.get(entry.id, ())))
        for native in newest_natives(entry)
    }
    owners = {
        content.decode(errors="replace"): twins[name]
        for name, content in (host.files.read_many(list(twins)) if twins else {}).items()
    }
    others = [owner for owner, (_, twin) in owners.items() if _is_another(owner, twin)]
    for state in ask(others, target, launcher, host, tell=tell):
        if state.native_id in owners:
            job, twin = owners[state.native_id]
            said[job] = [each for each in said[job] if each.native_id != twin] + [state]


def _is_another(owner: str, native_id: str) -> bool:
    """Whether a claim names another native job as the ledger would. On a backend with unique names there are no twins, and
    shims claim by a finer id, such as a uid."""
    return not owner.startswith(native_id) and ("/" in owner) is ("/" in native_id)


def _is_twin(state: NativeState) -> bool:
    return state.state.terminal and (state.reason is EndReason.DUPLICATE or state.exit_code == DUPLICATE)


def _might_have_ended(entry: LedgerEntry, said: Mapping[str, Sequence[NativeState]]) -> bool:
    states = said.get(entry.id, ())
    return len(states) < len(newest_natives(entry)) or any(each.state.terminal for each in states)


def _list_gone(entry: LedgerEntry, outcomes: Mapping[int, RunOutcome], states: Sequence[NativeState]) -> list[int]:
    """List the runs without an outcome that no native job runs any more."""
    living = {each.index for each in states if not each.state.terminal}
    if None in living:
        return []
    runs = range(entry.first_index, entry.first_index + entry.indices)
    return [index for index in runs if index not in outcomes and index not in living]


def ask(
    native_ids: Sequence[str],
    target: Target,
    launcher: Launcher,
    host: Host,
    *,
    tell: Callable[[InfrastructureFailure], None] | None = None,
) -> list[NativeState]:
    """The backend's states. Without `tell`, a backend that does not answer raises; with it, each job is `unknown`."""
    if not native_ids:
        return []
    try:
        return launcher.states(target, native_ids, host)
    except InfrastructureFailure as problem:
        if tell is None:
            raise
        tell(problem)
        return [
            NativeState(native_id=native, index=None, state=JobState.UNKNOWN, message=problem.message)
            for native in native_ids
        ]
