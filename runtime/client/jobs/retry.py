"""Starts runs of a job once more: failed ones by hand, and interrupted ones.

If the launcher starts shims itself, or can submit part of a launch again, the same job continues as its next epoch: its
order names the attempts that are forgiven, results of the runs that start again are put aside, and the new shim claims the
later epoch. Other launchers get a new job of the same order, whose folder already has the results of the other runs.
Killed at any step and run again, nothing runs twice.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from runtime.client.jobs.handle import JobHandle
from runtime.client.jobs.launch import carry_out, submit_again, write_order
from runtime.client.jobs.prepare import LaunchOptions, PreparedLaunch
from runtime.client.jobs.targets import make_context
from runtime.config import Settings
from runtime.errors import NotPossible
from runtime.faults import reach
from runtime.jobs import ledger
from runtime.jobs.hosts.base import Files
from runtime.jobs.hosts.bucket import is_bucket
from runtime.jobs.hosts.local import find_python
from runtime.jobs.indices import open_runs
from runtime.jobs.ledger import JobStatus, LedgerEntry, NativeJob, check_index, job_folder, newest_natives
from runtime.jobs.lock import Lock
from runtime.jobs.plan import JobIdentity, LaunchPlan, NativePart, owner_name
from runtime.jobs.run_config import SNAPSHOT_FILE, begin_epoch, find_unnoted
from runtime.jobs.spec import JobSpec, JobState, parse_spec
from runtime.jobs.spec_fields import job_id
from runtime.launchers.base import Resubmits
from runtime.shim.bundle import build_shim
from runtime.snapshots.snapshot import Snapshot
from runtime.system import system
from runtime.units import format_time

if TYPE_CHECKING:
    from runtime.client.jobs.reused_artifacts import ReusedArtifact

QUIET_S: Final = 15.0
"""Time that a shim may take to exit after it committed its last result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetriedJob:
    job: str
    """Another job if `new` is True."""
    indices: tuple[int, ...]
    native_id: str
    new: bool
    epoch: int


def retry_job(
    job: JobHandle,
    settings: Settings,
    *,
    indices: Sequence[int] = (),
    progress: Callable[[str], None] = lambda text: None,
) -> RetriedJob:
    """Start the failed runs of a job, or `indices`, once more with new budgets.

    Raises `NotPossible` while the job runs, and if none of its runs failed.
    """
    status, _ = job.poll_closely(progress)
    chosen = choose_runs(status, indices)
    if job.launcher.resumes or isinstance(job.launcher, Resubmits):
        with _held_and_quiet(job, progress) as lock:
            # Another may have started it again since, and it may have succeeded.
            status, _ = job.poll_closely(progress)
            return go_on(job, choose_runs(status, indices), settings, lock, status=status, progress=progress)
    return _as_new_job(job, status, chosen, settings, progress)


def start_anew(
    job: JobHandle, settings: Settings, *, progress: Callable[[str], None] = lambda text: None
) -> RetriedJob | None:
    """Start interrupted runs again, as a backend that requeues does: nothing is forgiven. None if no run is open."""
    if not open_runs(job.entry(), cancelled=True):
        return None
    with _held_and_quiet(job, progress) as lock:
        left = open_runs(job.entry(), cancelled=True)
        return go_on(job, left, settings, lock, progress=progress) if left else None


def choose_runs(status: JobStatus, indices: Sequence[int]) -> list[int]:
    """Choose the runs to start again: `indices`, or else the failed ones, or else the cancelled ones."""
    entry = status.entry
    if not status.state.terminal:
        raise NotPossible(
            f"job `{entry.id}` is {status.state}: it is retried when all of it has ended",
            hint=f"runtime status {entry.id[:10]}, or runtime cancel {entry.id[:10]}",
        )
    states = {each.index: each.state for each in status.indices}
    for index in indices:
        check_index(entry, index)
        if states[index] is JobState.SUCCEEDED:
            raise NotPossible(
                f"run {index} of job `{entry.id}` succeeded, nothing was started",
                hint="`runtime launch --again` starts the whole job anew",
            )
    failed = [index for index, state in states.items() if state is JobState.FAILED]
    cancelled = [index for index, state in states.items() if state is JobState.CANCELLED]
    chosen = sorted(set(indices)) or failed or cancelled
    if not chosen:
        raise NotPossible(f"nothing of job `{entry.id}` failed", hint="`runtime launch --again` starts it anew")
    return chosen


@contextlib.contextmanager
def _held_and_quiet(job: JobHandle, progress: Callable[[str], None]) -> Iterator[Lock]:
    """Hold the job's lock while none of its native jobs lives."""
    # A shim that has just committed its last result may wait for the lock, so it is not held while we wait for the shim.
    _wait_until_quiet(job)
    lock = Lock(job.files, job.id, f"{owner_name()}@{system.node()}")
    lock.take(patience_s=600, tell=progress)
    try:
        _ensure_kept(job, lock)
        _wait_until_quiet(job)
        yield lock
    finally:
        lock.release()


def _ensure_kept(job: JobHandle, lock: Lock) -> None:
    """Raise `NotPossible` if the job was removed since somebody looked at it, or half of it was."""
    folder = job_folder(job.id)
    found = job.files.read_many([f"{folder}/intent.json", f"{folder}/{ledger.REMOVING}"])
    if list(found) == [f"{folder}/intent.json"]:
        return
    if not found:
        # The lock made the folder, and goes with it.
        lock.stop()
        job.files.remove(folder)
    raise NotPossible(f"`runtime gc` has removed job `{job.id}`", hint="runtime launch, which is a new job then")


def go_on(
    job: JobHandle,
    indices: Sequence[int],
    settings: Settings,
    lock: Lock,
    *,
    status: JobStatus | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> RetriedJob:
    """Start these runs again, or find the native job with which an earlier call did. The caller holds the `lock`, and has
    seen that no native job of this job lives."""
    forgive = status is not None
    entry = job.entry()
    plan = _restore_plan(job, entry, indices)
    unnoted = find_unnoted(plan.order, entry)
    newest = max([1, *(each.epoch for each in entry.natives), *unnoted.values()])
    adopted = _adopt(job, entry, unnoted)
    started = [each.native_id for each in adopted]
    wanted = [part for part in plan.parts if _number(part) not in {each.part for each in adopted}]
    # A part that an earlier try may have started goes on with the epoch of that try, of which the backend starts no second.
    goes_on = any(unnoted.get(_number(part)) == newest for part in wanted)
    epoch = newest if goes_on or (adopted and not wanted) else newest + 1
    noted = {each.part for each in (*entry.natives, *adopted) if each.epoch == epoch}
    left = [part for part in wanted if _number(part) not in noted]
    # If an earlier try began to submit a part, its attempts may already be the new ones.
    submits = f"{plan.folder}/submit"
    untried = [part for part in left if not job.files.names(submits, f"{epoch}.{_number(part)}.")]
    fresh = {index for part in untried for index in range(part.offset, part.offset + part.count)}
    _unfold(job, plan, sorted(fresh & set(indices)))
    files = lock.files()
    if status is not None:
        # No later look asks the old native job how these runs ended.
        told = fresh if isinstance(job.launcher, Resubmits) else frozenset[int]()
        _record_others(files, status, entry, indices, told)
    fresh &= set(indices)
    forgiven = dict(plan.order.get("forgiven", {}))
    if forgive:
        forgiven |= {str(index): max(job.attempts(index), default=0) for index in sorted(fresh)}
    order = begin_epoch({**plan.order, "forgiven": forgiven}, epoch, map(_number, left))
    plan = replace(plan, order=order)
    write_order(plan, files, make_context(settings))
    if forgive:
        for name in ["cancel", "stopped", *(f"cancel.{index}" for index in indices)]:
            files.remove(f"{plan.folder}/{name}")
    for part in left:
        if forgive:
            served = range(part.offset, part.offset + part.count)
            _put_aside(files, entry, sorted(fresh & set(served)), epoch - 1)
        reach("launch.forgiven")
        native_id = submit_again(plan, part, job, lock, _number(part))
        progress(f"started {native_id} on {job.target.name}")
        started.append(native_id)
    return RetriedJob(job=job.id, indices=tuple(indices), native_id=started[0], new=False, epoch=epoch)


def _record_others(
    files: Files, status: JobStatus, entry: LedgerEntry, chosen: Sequence[int], told: Collection[int]
) -> None:
    """Record how runs ended that are not chosen and have no result, so that no shim begins them: the cancelled ones, since
    their mark may go, and those whose end only the old native job tells."""
    for each in status.indices:
        if each.index not in {*chosen, *entry.outcomes} and (each.state is JobState.CANCELLED or each.index in told):
            ledger.record_end(files, entry.id, each)


def _number(part: NativePart) -> int:
    return int(part.native.get("number", 0))


def _adopt(job: JobHandle, entry: LedgerEntry, unnoted: Mapping[int, int]) -> list[NativeJob]:
    """Record native jobs whose launcher died before it recorded them; the retry continues with them."""
    names = dict(enumerate(entry.intent.get("parts", ()))) or {0: job.id}
    claims = {f"{job_folder(job.id)}/owners/{epoch}.{part}": (part, epoch) for part, epoch in unnoted.items()}
    found = [
        NativeJob(name=names[part], native_id=owner.decode(), part=part, epoch=epoch, at=ledger.now())
        for claim, owner in (job.files.read_many(claims) if claims else {}).items()
        for part, epoch in [claims[claim]]
    ]
    for native in found:
        ledger.record_native(job.files, job.id, native)
    return found


def _unfold(job: JobHandle, plan: LaunchPlan, indices: Sequence[int]) -> None:
    """Put the files of a job that has ended back to where a shim looks for them."""
    # Shims fold nothing in a bucket.
    if not indices or is_bucket(job.files.root):
        return
    words = [find_python(job.target.settings, job.host), "-", f"{job.files.root}/{plan.folder}", "--unfold"]
    words += [str(index) for index in indices]
    done = job.host.run(words, stdin=build_shim(), timeout_s=600)
    if done.code != 0:
        raise NotPossible(
            f"the files of job `{job.id}` cannot be put back where they were", facts=done.err.strip().splitlines()[-1:]
        )
    archive = plan.order.get("code", {}).get("archive")
    if archive is None or job.files.read_from(f"{plan.folder}/{archive}", 0, 1):
        return
    common = ledger.snapshot_name(plan.order["code"]["sha256"])
    if not job.files.link(common, f"{plan.folder}/{archive}"):
        raise _code_is_gone(job, common)


def _code_is_gone(job: JobHandle, name: str) -> NotPossible:
    return NotPossible(
        f"the code of job `{job.id}` is gone", facts=[f"`{job.files.root}/{name}`"], hint="runtime launch --again"
    )


def _wait_until_quiet(job: JobHandle) -> None:
    natives = [each.native_id for each in newest_natives(job.entry())]
    until = system.monotonic() + QUIET_S
    while natives and any(not each.state.terminal for each in job.launcher.states(job.target, natives, job.host)):
        if system.monotonic() >= until:
            raise NotPossible(
                f"a native job of `{job.id}` still lives: {', '.join(natives)}",
                hint=f"runtime cancel {job.id[:10]} ends it",
            )
        system.sleep(0.1)


def _restore_plan(job: JobHandle, entry: LedgerEntry, indices: Sequence[int]) -> LaunchPlan:
    """Read the launch's plan back from the ledger: later edits of files and settings change nothing."""
    folder = job_folder(job.id)
    resubmits = isinstance(job.launcher, Resubmits)
    names = job.files.names(f"{folder}/artefacts") if resubmits else ["command"]
    wanted = [f"{folder}/order.json", f"{folder}/spec.json", *(f"{folder}/artefacts/{name}" for name in names)]
    read = job.files.read_many(wanted)
    if missing := sorted(set(wanted) - read.keys()) or ([] if names else [f"{folder}/artefacts"]):
        raise NotPossible(f"job `{job.id}` cannot go on: {', '.join(missing)} is gone", hint="runtime launch --again")
    with ledger.as_damage(job.files, job.id, "artefacts"):
        artefacts = {name: read[f"{folder}/artefacts/{name}"].decode() for name in names}
        parts, root = _restore_parts(job, entry, artefacts, indices)
    with ledger.as_damage(job.files, job.id, "order.json"):
        order = {**json.loads(read[f"{folder}/order.json"])}
    return LaunchPlan(
        job=JobIdentity(id=job.id, name=entry.name, owner=entry.owner, snapshot=entry.snapshot),
        spec=_read_spec(job, read[f"{folder}/spec.json"]),
        target=job.target,
        order=order,
        artefacts=artefacts,
        parts=tuple(parts),
        fidelity={},
        indices=({},) * entry.indices,
        root=root,
    )


def _restore_parts(
    job: JobHandle, entry: LedgerEntry, artefacts: Mapping[str, str], indices: Sequence[int]
) -> tuple[list[NativePart], str]:
    """Return the parts, and the record root of the plan, which may begin with `~`."""
    if isinstance(job.launcher, Resubmits):
        return job.launcher.restore_parts(artefacts, entry.intent["parts"], indices), job.files.root
    words = shlex.split(artefacts["command"])
    first = entry.first_index
    part = NativePart(name=job.id, artefact="command", offset=first, count=entry.indices, native={"words": words})
    return [part], words[1].partition(f"/{job_folder(job.id)}/")[0]


def _read_spec(job: JobHandle, text: bytes) -> JobSpec:
    with ledger.as_damage(job.files, job.id, "spec.json"):
        written = json.loads(text)
    return parse_spec(written, source=f"job `{job.id}`")


def _put_aside(files: Files, entry: LedgerEntry, indices: Sequence[int], epoch: int) -> None:
    """Keep results of the runs that start again under another name, so that no outcome is in the way."""
    results = files.read_many([f"{job_folder(entry.id)}/runs/{index}/result" for index in indices])
    for name, content in results.items():
        files.create(f"{name}.{epoch}", content)
        files.remove(name)
    for index in indices:
        outcome = entry.outcomes.get(index)
        if outcome is not None:
            files.remove(outcome.listed)


def _as_new_job(
    job: JobHandle, status: JobStatus, indices: Sequence[int], settings: Settings, progress: Callable[[str], None]
) -> RetriedJob:
    entry = status.entry
    if left := job.end_strays():
        raise NotPossible(
            f"job `{job.id}` has ended, and its backend still has something of it",
            facts=left,
            hint=f"runtime cancel {job.id[:10]}",
        )
    _record_others(job.files, status, entry, indices, [each.index for each in status.indices])
    entry = job.entry()
    folder = job_folder(job.id)
    read = job.files.read_many([f"{folder}/spec.json", f"{folder}/{SNAPSHOT_FILE}"])
    if f"{folder}/spec.json" not in read:
        raise NotPossible(f"job `{job.id}` cannot go on: {folder}/spec.json is gone", hint="runtime launch --again")
    spec = _read_spec(job, read[f"{folder}/spec.json"])
    if spec.array is not None and spec.array.file is not None and not Path(spec.array.file).is_file():
        raise NotPossible(
            f"`array.file` `{spec.array.file}` of job `{job.id}` is not here",
            hint="go to the folder it was launched from",
        )
    archive = read.get(f"{folder}/{SNAPSHOT_FILE}")
    if archive is None and entry.snapshot is not None:
        archive = job.files.read(ledger.snapshot_name(entry.snapshot))
        if archive is None:
            raise _code_is_gone(job, ledger.snapshot_name(entry.snapshot))
    snapshot = Snapshot(archive=archive) if archive is not None else None
    context = make_context(settings)
    identity = JobIdentity(id=_free_id(job, spec, entry), name=entry.name, owner=owner_name(), snapshot=entry.snapshot)
    plan = job.launcher.plan(spec, job.target, identity, context)
    done = {index: outcome for index, outcome in entry.outcomes.items() if index not in set(indices)}
    reused: tuple[ReusedArtifact, ...] = ()
    if spec.reuse:
        from runtime.client.jobs.reused_artifacts import read_kept

        reused = read_kept(spec, job.files, job.id)
    prepared = PreparedLaunch(
        plan=plan,
        target=job.target,
        launcher=job.launcher,
        context=context,
        snapshot=snapshot,
        reused=reused,
        carried=_carry_over(job, identity.id, done),
    )
    # The price of the job was agreed to when it was launched.
    with carry_out(prepared, LaunchOptions(assume_yes=True), progress) as made:
        natives = made.entry().natives
    return RetriedJob(
        job=identity.id, indices=tuple(indices), native_id=natives[0].native_id if natives else "", new=True, epoch=1
    )


def _free_id(job: JobHandle, spec: JobSpec, entry: LedgerEntry) -> str:
    snapshot = f"{entry.snapshot} {job.id}"
    ids = (
        job_id(owner=owner_name(), target=job.target.name, spec=spec, snapshot=snapshot, again=again)
        for again in itertools.count()
    )
    # A launch that was interrupted goes on.
    return next(found for found in ids if job.files.read(f"{job_folder(found)}/launched") is None)


def _carry_over(job: JobHandle, to: str, done: Mapping[int, ledger.RunOutcome]) -> dict[str, bytes]:
    """Return results of the other runs for the new job, by the names that listings read. A shim that finds one ends with it."""
    results = {}
    for outcome in done.values():
        result: dict[str, Any] = {
            "reason": outcome.reason.value,
            "code": outcome.code,
            "attempt": outcome.attempt,
            "at": system.time(),
            "from": job.id,
            "noted": format_time(ledger.now()),
        }
        results[replace(outcome, job=to).listed] = json.dumps(result, sort_keys=True).encode()
    return results
