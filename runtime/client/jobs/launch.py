"""Launching: from a spec to a job that runs, exactly once, even if processes are killed on the way.

Steps, each safe to repeat: take the snapshot; decide the job's id; plan; lock the run folder; write the intent;
submit each part and record its native id. A launcher that dies leaves its lock; the next one waits until the lock's
counter stands still, and continues from there. The shim's claim refuses the twin that a lost answer may have made.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from runtime.client.jobs import launch_diff
from runtime.client.jobs.handle import JobHandle
from runtime.client.jobs.job_cache import count_gpus, forget_job, remember_job
from runtime.client.jobs.prepare import FieldsRefused, LaunchOptions, LaunchRequest, PreparedLaunch, code_rules, prepare
from runtime.client.jobs.price_check import agree_to_price
from runtime.client.jobs.record_removal import finish_removal
from runtime.client.jobs.targets import OpenTarget, open_target
from runtime.config import Settings, load_settings
from runtime.errors import InfrastructureFailure, InvalidValue, NotPossible, RequestRefused
from runtime.faults import reach
from runtime.jobs import ledger, open_jobs
from runtime.jobs.hosts.base import Files, FileToWrite
from runtime.jobs.ledger import NativeJob, job_folder, newest_natives
from runtime.jobs.lock import Lock
from runtime.jobs.log_follower import shows_life
from runtime.jobs.plan import LaunchPlan, NativePart, PlanContext, Target
from runtime.jobs.run_config import SNAPSHOT_FILE, begin_epoch
from runtime.jobs.spec import JobSpec, SecretRef
from runtime.jobs.spec_fields import job_id, spec_fields
from runtime.launchers.base import ChecksHost
from runtime.launchers.job_status import GONE, LIVES, UNSEEN, judge_job
from runtime.shim.bundle import build_shim
from runtime.snapshots.git import GitState, read_git_head, read_git_state
from runtime.snapshots.provenance import own_argv, read_repositories, without_secrets
from runtime.snapshots.snapshot import Snapshot
from runtime.system import system
from runtime.units import count_noun, format_time

T = TypeVar("T")


def launch(
    job: LaunchRequest | JobSpec | Mapping[str, Any] | Sequence[str] | Callable[..., Any],
    on: str | Sequence[str] = (),
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    settings: Settings | None = None,
    options: LaunchOptions | None = None,
    progress: Callable[[str], None] = lambda text: None,
    **fields: Any,
) -> JobHandle:
    """Start a job on the first target that accepts it, or find the one that the same launch made before.

    `job` is a spec, the fields of a job file, the words of a command, or a function, which is called with `args` and `kwargs`
    and whose value is the handle's `result()`. `fields` are those of a job file beside a function or a command.

    A target that refuses a field, or that cannot be reached, is passed over if another is left; the last refusal is
    raised. Once a target was handed the job, no other is tried, and the same launch comes back to it.
    """
    settings, options = settings or load_settings(), options or LaunchOptions()
    if callable(job):
        from runtime.client.jobs.calls import fields_of_call

        job, options = fields_of_call(job, args, kwargs, fields=fields, options=options)
    elif args or kwargs or fields:
        job = _add_fields(job, args, kwargs, fields)
    request = job if isinstance(job, LaunchRequest) else LaunchRequest(job)
    targets = request.choose_targets([on] if isinstance(on, str) else on, settings)
    handed: list[Target] = []
    if len(targets) > 1 and not options.again:
        handed = [target for target in targets if _was_launched(request, target, settings, options)]
        targets.sort(key=lambda target: target not in handed)
    for target in targets[:-1]:
        try:
            prepared = prepare(request, target, settings, options)
            with _open(prepared) as place:
                # Raises if the target does not answer or takes no files, while nothing is begun there.
                place.files.make_folder(prepared.plan.folder)
        except (FieldsRefused, NotPossible, InfrastructureFailure) as problem:
            if target in handed and isinstance(problem, InfrastructureFailure):
                raise  # the job may run there
            progress(f"target `{target.name}` does not accept it: {problem.message}")
            continue
        try:
            return carry_out(prepared, options, progress, compare=True)
        except NotPossible as problem:
            forget_job(prepared.plan.job.id, settings)
            progress(f"target `{target.name}` does not accept it: {problem.message}")
    return carry_out(prepare(request, targets[-1], settings, options), options, progress, compare=True)


def _add_fields(
    job: object, args: Sequence[Any], kwargs: Mapping[str, Any] | None, fields: Mapping[str, Any]
) -> dict[str, Any]:
    if args or kwargs:
        raise RequestRefused(
            "`args` and `kwargs` are those of a function, and this job runs a command",
            hint="write them into the command",
        )
    if isinstance(job, Mapping):
        return {**job, **fields}
    if isinstance(job, JobSpec | LaunchRequest):
        raise RequestRefused(
            "fields were given beside a whole spec",
            hint="dataclasses.replace(spec, …), or pass the fields of a job file",
        )
    if not isinstance(job, Iterable):
        raise InvalidValue("job", job, "a function, the words of a command, or the fields of a job file")
    return {"command": job if isinstance(job, str) else list(job), **fields}


def _was_launched(request: LaunchRequest, target: Target, settings: Settings, options: LaunchOptions) -> bool:
    """Whether this very launch was made on this target, from here."""
    try:
        job = prepare(request, target, settings, options).plan.job.id
    except RequestRefused:
        return False
    return (settings.data_dir / "launched" / job).exists()


def _open(prepared: PreparedLaunch) -> OpenTarget:
    return open_target(prepared.plan.target, prepared.context, prepared.launcher)


def carry_out(
    prepared: PreparedLaunch,
    options: LaunchOptions,
    progress: Callable[[str], None] = lambda text: None,
    *,
    compare: bool = False,
) -> JobHandle:
    """Do everything that was prepared, exactly once. With `compare`, a new job is compared with the last one of its name."""
    place = _open(prepared)
    try:
        return _carry_out(prepared, options, place, progress, compare=compare)
    except BaseException:
        place.close()
        raise


def _carry_out(
    prepared: PreparedLaunch,
    options: LaunchOptions,
    place: OpenTarget,
    progress: Callable[[str], None],
    *,
    compare: bool,
) -> JobHandle:
    files, launcher = place.files, place.launcher
    if options.again:
        prepared = replace(prepared, plan=_next_of_the_same(prepared, files))
    plan = prepared.plan
    job = JobHandle(plan.job.id, place.target, launcher, place.host)
    marks = launched_mark, removing = f"{plan.folder}/launched", f"{plan.folder}/{ledger.REMOVING}"
    known = list(files.read_many(marks)) == [launched_mark]
    if known and not _find_broken(plan, job):
        _remember(prepared)
        return job
    reach("launch.unlocked")
    code = prepared.context.base / plan.spec.code.path
    git = _begin(functools.partial(_read_git, code, prepared)) if prepared.snapshot else None
    if launched := launch_diff.look_at(prepared) if compare and not known else None:
        launch_diff.tell_difference(prepared, launched, progress)
    for note in () if known else plan.notes:
        progress(note)
    if not known:
        agree_to_price(prepared, options, progress)
    if not known and isinstance(launcher, ChecksHost):
        for note in launcher.check_host(plan.target, place.host):
            progress(note)
    made = files.make_folder(plan.folder)
    if not made:
        files.remove(f"{plan.folder}/{ledger.REFUSED}")
    _remember(prepared)
    lock = Lock(files, plan.job.id, f"{plan.job.owner}@{system.node()}")
    lock.take(patience_s=600, tell=progress)
    try:
        whole = f"{plan.folder}/intent.json", f"{plan.folder}/{ledger.EPOCH}"
        found = files.read_many([*marks, *whole])
        if removing in found:
            finish_removal(job.id, job, lock, owner=plan.job.owner)
        elif launched_mark in found:
            _resume(prepared, job, lock, progress)
            return job
        if removing in found or (not made and whole[0] not in found):
            lock.files().remove(f"{plan.folder}/cancel")  # of a job without a record that was being ended
        reach("launch.locked")
        # If somebody has retried it since a launch that was cut off, the order is theirs.
        if removing in found or any(name not in found for name in whole):
            _write_down(prepared, files, lock, git, progress)
        reach("launch.written")
        for number in range(len(plan.parts)):
            _submit_part(plan, number, job, lock, progress)
        if plan.order.get("secrets"):
            # A shim that ended before a repeated launch removes nothing.
            outcomes = ledger.read_outcomes(files, plan.job.id).get(plan.job.id, {})
            if len(outcomes) >= len(plan.indices):
                _remove_secrets(plan, files)
        # Without this file the same launch finds the started job and gets here again.
        files.create(f"{plan.folder}/launched", format_time(ledger.now()).encode(), lasting=False)
        reach("launch.launched")
    finally:
        lock.release()
    if launched:
        launch_diff.remember(prepared, launched)
    job.new = True
    return job


def _remember(prepared: PreparedLaunch) -> None:
    plan = prepared.plan
    remember_job(plan.job, prepared.target, prepared.context.settings, spec=plan.spec, runs=len(plan.indices))


def _submit_part(plan: LaunchPlan, number: int, job: JobHandle, lock: Lock, progress: Callable[[str], None]) -> None:
    part = plan.parts[number]
    if job.files.read(f"{plan.folder}/native/001.{number:06d}.json") is not None:
        return
    lock.ensure_held()
    native_id = job.launcher.find(plan.target, [part.name], job.host).get(part.name)
    if native_id is None:
        try:
            native_id = job.launcher.submit(plan, part, job.host)
        except RequestRefused as problem:
            ledger.record_refusal(job.files, job.id, problem)
            for name in open_jobs.name_parts(plan, number):
                job.files.remove(name)
            if number == 0:
                _remove_secrets(plan, job.files)  # nothing runs that would
            raise
    reach("launch.submitted")
    native = NativeJob(name=part.name, native_id=native_id, part=number, epoch=1, at=ledger.now())
    ledger.record_native(job.files, job.id, native)
    progress(f"started {native_id} on {plan.target.name}")


@dataclass(frozen=True, slots=True)
class _Broken:
    native: NativeJob
    open_runs: tuple[int, ...]
    unseen: bool
    """Whether it may live where nobody can look from here."""


def _find_broken(plan: LaunchPlan, job: JobHandle) -> list[_Broken]:
    """List lost native jobs with indices that have no result, if the backend itself starts nothing again."""
    if not job.launcher.resumes:
        return []
    entry = ledger.read_entry(job.files, job.id)
    if entry is None or entry.cancelled:
        return []
    status, states = judge_job(entry, plan.target, job.launcher, job.host)
    gone = {each.native_id for each in states if each.index is None and each.reason in GONE}
    unseen = {each.native_id for each in states if each.raw in UNSEEN}
    first = _offset(plan)
    ended = status.entry.outcomes.keys() | entry.cancelled_indices
    found = []
    for each in newest_natives(entry):
        part = plan.parts[each.part] if each.part < len(plan.parts) else NativePart(name="", artefact="", count=0)
        served = range(max(part.offset, first), min(part.offset + part.count, first + len(plan.indices)))
        left = tuple(index for index in served if index not in ended)
        if each.native_id in gone and left:
            found.append(_Broken(each, left, each.native_id in unseen))
    return found


def _resume(prepared: PreparedLaunch, job: JobHandle, lock: Lock, progress: Callable[[str], None]) -> None:
    """Start the shims of lost native jobs once more, with the budgets that are left.

    The new shim claims the job for a later epoch, so results of an old shim are refused.
    """
    for found in _find_broken(prepared.plan, job):
        broken = found.native
        if found.unseen and shows_life(job.files, job.id, found.open_runs, progress):
            progress(f"job `{job.id}`: {LIVES}, and goes on there")
            continue
        epoch = broken.epoch + 1
        # The order in the run folder counts, not the plan's: a retry by hand may have changed it.
        with ledger.as_damage(job.files, job.id, "order.json"):
            order = {**json.loads(job.files.read(f"{prepared.plan.folder}/order.json") or b"{}")}
        order = order or _whole_order(prepared.plan)
        plan = replace(prepared.plan, order=begin_epoch(order, epoch, [broken.part]))
        write_order(plan, lock.files(), prepared.context)
        native_id = submit_again(plan, plan.parts[broken.part], job, lock, broken.part)
        progress(f"`{broken.native_id}` is gone; started {native_id} on {plan.target.name} to go on")


def write_order(plan: LaunchPlan, files: Files, context: PlanContext) -> None:
    """Write the files of a later epoch: secrets that were removed when the job ended, the shim, and its order."""
    paths = {ref.name: f"{plan.folder}/{plan.order['secrets'][ref.name]}" for ref in plan.secrets}
    gone = [ref for ref in plan.secrets if files.read(paths[ref.name]) is None]
    for name, value in _read_secrets(gone, plan, context).items():
        files.write(paths[name], value.encode(), mode=0o600)
    files.write(f"{plan.folder}/shim.py", build_shim(), mode=0o700)
    files.write(f"{plan.folder}/order.json", _json(plan.order))
    files.write(f"{plan.folder}/{ledger.EPOCH}", str(plan.order["epoch"]).encode())
    reach("launch.reordered")


def submit_again(plan: LaunchPlan, part: NativePart, job: JobHandle, lock: Lock, number: int) -> str:
    """Start a part for the plan's epoch, write down its native id and return it."""
    lock.ensure_held()
    open_jobs.mark_open(job.files, plan.target.name, job.id, number)
    native_id = job.launcher.submit(plan, part, job.host)
    reach("launch.resubmitted")
    native = NativeJob(name=part.name, native_id=native_id, part=number, epoch=plan.order["epoch"], at=ledger.now())
    ledger.record_native(job.files, job.id, native)
    return native_id


def _offset(plan: LaunchPlan) -> int:
    return plan.spec.array.offset if plan.spec.array else 0


def _begin(action: Callable[[], T]) -> Callable[[], T]:
    """Run `action` in a thread. The returned function waits for the result."""
    found: list[T] = []

    def do() -> None:
        with contextlib.suppress(Exception):
            found.append(action())

    thread = system.thread(do, name="launch")
    thread.start()

    def finish() -> T:
        thread.join()
        return found[0] if found else action()

    return finish


def _read_git(code: Path, prepared: PreparedLaunch) -> tuple[GitState | None, list[dict[str, Any]]]:
    """Read the state of the code for the intent, and of each repository in it for those who run it."""
    assert prepared.snapshot is not None
    names = prepared.snapshot.names
    rules = code_rules(prepared.plan.spec, prepared.context.settings, prepared.target)
    head = read_git_head(code)
    state = None if head is None else read_git_state(code, names, head)
    return state, read_repositories(code, without_secrets(names, rules), head)


def _write_down(
    prepared: PreparedLaunch,
    files: Files,
    lock: Lock,
    git: Callable[[], tuple[GitState | None, list[dict[str, Any]]]] | None,
    progress: Callable[[str], None],
) -> None:
    """Write the intent and all files of the nodes, before the backend is called."""
    plan = prepared.plan
    state, repositories = git() if git else (None, [])
    # In the order, which every shim has, and not in the spec, whose hash is the job's id.
    order = {**_whole_order(plan), "origin": {"argv": own_argv(), "git": repositories}}
    values = _read_secrets(plan.secrets, plan, prepared.context)
    if prepared.snapshot is not None:
        _store_snapshot(prepared.snapshot, plan, files, progress)
    if prepared.reused:
        from runtime.client.jobs.reused_artifacts import store_reused

        store_reused(prepared.reused, plan.folder, files, progress)
    wanted = [
        *(FileToWrite(f"{plan.folder}/secrets/{name}", value.encode()) for name, value in values.items()),
        FileToWrite(f"{plan.folder}/shim.py", build_shim(), 0o700),
        FileToWrite(f"{plan.folder}/order.json", _json(order)),
        *(FileToWrite(name, b"", once=True) for name in open_jobs.name_parts(plan)),
        *(
            FileToWrite(f"{plan.folder}/artefacts/{name}", text.encode(), 0o700)
            for name, text in plan.artefacts.items()
        ),
        FileToWrite(f"{plan.folder}/spec.json", _json(spec_fields(plan.spec)), once=True),
        *(
            FileToWrite(f"{plan.folder}/runs/{name.split('.')[1]}/result", result, once=True)
            for name, result in prepared.carried.items()
        ),
        # The last of the job's own, so that a visible job is complete; nothing is announced of one that is not there.
        FileToWrite(f"{plan.folder}/intent.json", _json(_intent(prepared, state)), once=True),
        *(FileToWrite(name, b"", once=True) for name in prepared.carried),
    ]
    lock.files().write_many(wanted)


def _whole_order(plan: LaunchPlan) -> dict[str, Any]:
    order = {**plan.order, "open": open_jobs.order_entry(plan)}
    if "notify" in order:
        order["notify"] = {**order["notify"], "target": plan.target.name}
    return order


def _remove_secrets(plan: LaunchPlan, files: Files) -> None:
    # File by file: the shim may be removing the folder at this moment.
    for path in plan.order.get("secrets", {}).values():
        files.remove(f"{plan.folder}/{path}")


def _read_secrets(refs: Sequence[SecretRef], plan: LaunchPlan, context: PlanContext) -> dict[str, str]:
    if not refs:
        return {}
    from runtime.client.jobs.secrets import read_values

    return read_values(refs, plan.target, context)


def _intent(prepared: PreparedLaunch, git: GitState | None) -> dict[str, Any]:
    plan = prepared.plan
    return {
        "name": plan.job.name,
        "owner": plan.job.owner,
        "from": system.node(),
        "target": plan.target.name,
        "kind": plan.target.kind,
        "at": format_time(ledger.now()),
        "snapshot": plan.job.snapshot,
        "experiment": plan.job.experiment,
        "indices": len(plan.indices),
        "offset": _offset(plan),
        "gpus": count_gpus(plan.spec),
        "parts": [part.name for part in plan.parts],
        **({"hold": True} if plan.job.hold else {}),
        "secrets": any(path.startswith("secrets/") for path in plan.order.get("secrets", {}).values()),
        **({"after": list(plan.spec.after)} if plan.spec.after else {}),
        **({"commit": git.commit, "branch": git.branch, "diff": git.diff} if git else {}),
    }


def _store_snapshot(snapshot: Snapshot, plan: LaunchPlan, files: Files, progress: Callable[[str], None]) -> None:
    """Store the code once for all jobs of a user in the root, and beside each job under a name that the shim knows.

    The shim checks the bytes, so another user's file under the content id does no harm.
    """
    assert plan.job.snapshot is not None
    name, common = f"{plan.folder}/{SNAPSHOT_FILE}", ledger.snapshot_name(plan.job.snapshot)
    if files.link(common, name):
        return
    if files.read_from(name, 0, 1):
        return
    progress(f"sending the code: {count_noun(snapshot.files, 'file')}")
    if files.create(common, snapshot.archive) and files.link(common, name):
        return
    files.create(name, snapshot.archive)


def _next_of_the_same(prepared: PreparedLaunch, files: Files) -> LaunchPlan:
    """Return the plan of the first equal launch that was not made yet."""
    plan = prepared.plan
    ids = (
        job_id(owner=plan.job.owner, target=plan.target.name, spec=plan.spec, snapshot=plan.job.snapshot, again=again)
        for again in itertools.count()
    )
    identity = next(each for each in ids if files.read(f"{job_folder(each)}/intent.json") is None)
    if identity == plan.job.id:
        return plan
    return prepared.launcher.plan(plan.spec, plan.target, replace(plan.job, id=identity), prepared.context)


def _json(value: object) -> bytes:
    # Not indented: that is done in Python, and an order of a thousand runs would take longer than its launch.
    return json.dumps(value, sort_keys=True, ensure_ascii=False).encode() + b"\n"
