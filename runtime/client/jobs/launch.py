"""Launching: from a spec to a job that runs, exactly once, whatever is killed on the way.

Steps, each safe to repeat: take the snapshot; decide the job's id; plan; lock the run folder; write what was decided;
submit each part and write down its native id. A launcher that dies leaves its lock; the next one waits until its counter
stands still, and goes on where it stopped. The shim's claim refuses the twin that a lost answer may have made.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from runtime.client.jobs.roots import open_target
from runtime.client.jobs.secrets import read_values
from runtime.client.jobs.targets import choose_target
from runtime.errors import InfrastructureFailure, NotPossible, RequestRefused
from runtime.faults import reach
from runtime.jobs import ledger
from runtime.jobs.hosts.base import Files, FileToWrite, Host, Links
from runtime.jobs.ledger import NativeJob, job_folder
from runtime.jobs.lock import Lock
from runtime.jobs.order import SNAPSHOT_FILE
from runtime.jobs.plan import LaunchPlan, NativePart, PlanContext, Target
from runtime.jobs.spec import JobSpec, parse_spec
from runtime.jobs.spec_fields import job_id, spec_fields
from runtime.launchers.base import ChecksHost
from runtime.launchers.standing import judge_job
from runtime.reasons import EndReason
from runtime.shim.program import build_shim
from runtime.snapshots.snapshot import GitState, Snapshot, read_git_state
from runtime.units import format_time
from runtime.values import replace

if TYPE_CHECKING:
    from runtime.config import Settings
from runtime.client.jobs.find import forget_job, remember_job
from runtime.client.jobs.handle import JobHandle
from runtime.client.jobs.prepare import FieldsRefused, LaunchOptions, Prepared, prepare
from runtime.jobs.ledger import newest_natives

T = TypeVar("T")


def launch(
    job: JobSpec | Mapping[str, Any] | Sequence[str],
    on: str | Sequence[str] = (),
    *,
    settings: Settings | None = None,
    options: LaunchOptions | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> JobHandle:
    """Start a job on the first target that accepts it, or find the one that the same launch made before.

    `job` is a spec, the fields of a job file, or just the words of a command.

    A target that refuses a field, or that cannot be reached, is passed over where there is another; raises what the last
    one said. Once a target was handed the job, no other is tried, and the same launch comes back to it.
    """
    from runtime.config import load_settings

    spec = _as_spec(job)
    settings, options = settings or load_settings(), options or LaunchOptions()
    targets = choose_target(spec, [on] if isinstance(on, str) else on, settings)
    handed: list[Target] = []
    if len(targets) > 1 and not options.again:
        handed = [target for target in targets if _was_launched(spec, target, settings, options)]
        targets.sort(key=lambda target: target not in handed)
    for target in targets[:-1]:
        try:
            prepared = prepare(spec, target, settings, options)
            _ensure_answers(prepared)
        except (FieldsRefused, NotPossible, InfrastructureFailure) as problem:
            if target in handed and isinstance(problem, InfrastructureFailure):
                raise  # the job may run there
            progress(f"target `{target.name}` does not accept it: {problem.message}")
            continue
        try:
            return carry_out(prepared, options, progress)
        except NotPossible as problem:
            forget_job(prepared.plan.job.id, settings)
            progress(f"target `{target.name}` does not accept it: {problem.message}")
    return carry_out(prepare(spec, targets[-1], settings, options), options, progress)


def _was_launched(spec: JobSpec, target: Target, settings: Settings, options: LaunchOptions) -> bool:
    """Whether this very launch was made on this target, from here."""
    try:
        job = prepare(spec, target, settings, options).plan.job.id
    except RequestRefused:
        return False
    return (settings.data_dir / "launched" / job).exists()


def _ensure_answers(prepared: Prepared) -> None:
    """Raise `InfrastructureFailure` from a target that does not answer or takes no files, while nothing is begun there."""
    host = open_target(prepared.plan.target, prepared.launcher, prepared.context)
    try:
        host.files.make_folder(prepared.plan.folder)
    finally:
        host.close()


def _as_spec(job: JobSpec | Mapping[str, Any] | Sequence[str]) -> JobSpec:
    if isinstance(job, JobSpec):
        return job
    if isinstance(job, Mapping):
        return parse_spec(job, source="`runtime.launch`")
    return parse_spec({"command": job if isinstance(job, str) else list(job)}, source="`runtime.launch`")


def carry_out(
    prepared: Prepared, options: LaunchOptions, progress: Callable[[str], None] = lambda text: None
) -> JobHandle:
    """Do what was decided, exactly once."""
    host = open_target(prepared.plan.target, prepared.launcher, prepared.context)
    try:
        return _carry_out(prepared, options, host, progress)
    except BaseException:
        host.close()
        raise


def _carry_out(prepared: Prepared, options: LaunchOptions, host: Host, progress: Callable[[str], None]) -> JobHandle:
    plan = prepared.plan
    if options.again:
        plan = _next_of_the_same(prepared, host.files)
        prepared = replace(prepared, plan=plan)
    handle = functools.partial(JobHandle, plan.job.id, plan.target, prepared.launcher, host)
    known = host.files.read(f"{plan.folder}/launched") is not None
    if known and not _find_broken(prepared, host):
        return handle(new=False)
    reach("launch.unlocked")
    git = _begin(functools.partial(read_git_state, prepared.base / plan.spec.code.path)) if prepared.snapshot else None
    for note in () if known else plan.notes:
        progress(note)
    if not known and isinstance(prepared.launcher, ChecksHost):
        for note in prepared.launcher.check_host(plan.target, host):
            progress(note)
    if not host.files.make_folder(plan.folder):
        # What an earlier launch or a removal that was cut off said of it holds no more.
        for name in (ledger.REFUSED, ledger.REMOVING):
            host.files.remove(f"{plan.folder}/{name}")
    remember_job(plan.job.id, plan.target.name, prepared.context.settings)
    lock = Lock(host.files, plan.job.id, f"{plan.job.owner}@{os.uname().nodename}")
    lock.take(patience_s=600, tell=progress)
    try:
        if host.files.read(f"{plan.folder}/launched") is not None:
            _take_up(prepared, host, lock, progress)
            return handle(new=False)
        reach("launch.locked")
        _write_down(prepared, host.files, git, progress)
        reach("launch.written")
        for number in range(len(plan.parts)):
            _submit_part(prepared, number, host, lock, progress)
        _forget_secrets(plan, host.files)
        # Without it the same launch finds what was started and gets here again.
        host.files.create(f"{plan.folder}/launched", format_time(ledger.now()).encode(), lasting=False)
        reach("launch.launched")
    finally:
        lock.release()
    return handle(new=True)


def _submit_part(prepared: Prepared, number: int, host: Host, lock: Lock, progress: Callable[[str], None]) -> None:
    plan, part = prepared.plan, prepared.plan.parts[number]
    if host.files.read(f"{plan.folder}/native/001.{number:06d}.json") is not None:
        return
    lock.ensure_held()
    native_id = prepared.launcher.find(plan.target, [part.name], host).get(part.name)
    if native_id is None:
        try:
            native_id = prepared.launcher.submit(plan, part, host)
        except RequestRefused as problem:
            ledger.note_refusal(host.files, plan.job.id, problem)
            if number == 0:
                _remove_secrets(plan, host.files)  # nothing runs that would
            raise
    reach("launch.submitted")
    native = NativeJob(name=part.name, native_id=native_id, part=number, epoch=1, at=ledger.now())
    ledger.record_native(host.files, plan.job.id, native)
    progress(f"started {native_id} on {plan.target.name}")


def _find_broken(prepared: Prepared, host: Host) -> list[NativeJob]:
    """List native jobs that are gone while indices of theirs have no result, if the backend starts nothing again itself."""
    plan = prepared.plan
    if not prepared.launcher.takes_up:
        return []
    entry = ledger.read_entry(host.files, plan.job.id)
    if entry is None or entry.cancelled:
        return []
    status, states = judge_job(entry, plan.target, prepared.launcher, host)
    gone = {
        each.native_id
        for each in states
        if each.index is None and each.reason in (EndReason.LOST, EndReason.NODE_FAILED)
    }
    first = _offset(plan)
    ended = status.entry.outcomes.keys() | entry.cancelled_indices
    found = []
    for each in newest_natives(entry):
        part = plan.parts[each.part] if each.part < len(plan.parts) else NativePart(name="", artefact="", count=0)
        served = range(max(part.offset, first), min(part.offset + part.count, first + len(plan.indices)))
        if each.native_id in gone and not ended.issuperset(served):
            found.append(each)
    return found


def _take_up(prepared: Prepared, host: Host, lock: Lock, progress: Callable[[str], None]) -> None:
    """Start the shims of native jobs that are gone once more, with the budgets that are left.

    The new shim claims the job for a later epoch, so whatever an old one may still do is refused.
    """
    for broken in _find_broken(prepared, host):
        number, epoch = broken.part, broken.epoch + 1
        # What stands there counts and not the plan's: a retry by hand may have changed it.
        order = json.loads(host.files.read(f"{prepared.plan.folder}/order.json") or b"{}") or prepared.plan.order
        plan = replace(prepared.plan, order={**order, "epoch": epoch})
        bring_secrets(plan, host.files, prepared.context)
        host.files.write(f"{plan.folder}/shim.py", build_shim(), mode=0o700)
        host.files.write(f"{plan.folder}/order.json", _json(plan.order))
        host.files.write(f"{plan.folder}/{ledger.EPOCH}", str(epoch).encode())
        reach("launch.reordered")
        lock.ensure_held()
        native_id = prepared.launcher.submit(plan, plan.parts[number], host)
        reach("launch.resubmitted")
        native = NativeJob(name=broken.name, native_id=native_id, part=number, epoch=epoch, at=ledger.now())
        ledger.record_native(host.files, plan.job.id, native)
        progress(f"`{broken.native_id}` is gone; started {native_id} on {plan.target.name} to go on")


def _offset(plan: LaunchPlan) -> int:
    return plan.spec.array.offset if plan.spec.array else 0


def _begin(action: Callable[[], T]) -> Callable[[], T]:
    """Run `action` in a thread. The returned function waits for the result."""
    found: list[T] = []

    def do() -> None:
        with contextlib.suppress(Exception):
            found.append(action())

    thread = threading.Thread(target=do, daemon=True)
    thread.start()

    def finish() -> T:
        thread.join()
        return found[0] if found else action()

    return finish


def _write_down(
    prepared: Prepared, files: Files, git: Callable[[], GitState | None] | None, progress: Callable[[str], None]
) -> None:
    """The intent and all that the nodes need, before the backend is called."""
    plan = prepared.plan
    values = read_values(plan.secrets, plan.target, prepared.context)
    if prepared.snapshot is not None:
        _store_snapshot(prepared.snapshot, plan, files, progress)
    wanted = [FileToWrite(f"{plan.folder}/secrets/{name}", value.encode()) for name, value in values.items()]
    wanted += [
        FileToWrite(f"{plan.folder}/shim.py", build_shim(), 0o700),
        FileToWrite(f"{plan.folder}/order.json", _json(plan.order)),
    ]
    wanted += [
        FileToWrite(f"{plan.folder}/artefacts/{name}", text.encode(), 0o700) for name, text in plan.artefacts.items()
    ]
    wanted += [
        FileToWrite(f"{plan.folder}/spec.json", _json(spec_fields(plan.spec)), once=True),
        # The last: whoever sees a job finds all of it.
        FileToWrite(f"{plan.folder}/intent.json", _json(_intent(prepared, git() if git else None)), once=True),
    ]
    files.write_many(wanted)


def _forget_secrets(plan: LaunchPlan, files: Files) -> None:
    """Remove the files of a job's secrets if the job has ended: a shim that ended before a repeated launch removes nothing."""
    if not plan.order.get("secrets"):
        return
    outcomes = ledger.read_outcomes(files, plan.job.id).get(plan.job.id, {})
    if len(outcomes) >= len(plan.indices):
        _remove_secrets(plan, files)


def _remove_secrets(plan: LaunchPlan, files: Files) -> None:
    # File by file: the shim may be removing the folder at this moment.
    for path in plan.order.get("secrets", {}).values():
        files.remove(f"{plan.folder}/{path}")


def bring_secrets(plan: LaunchPlan, files: Files, context: PlanContext) -> None:
    """Read and write again the secrets whose files were removed when the job had ended."""
    paths = {ref.name: f"{plan.folder}/{plan.order['secrets'][ref.name]}" for ref in plan.secrets}
    gone = [ref for ref in plan.secrets if files.read(paths[ref.name]) is None]
    for name, value in read_values(gone, plan.target, context).items():
        files.write(paths[name], value.encode(), mode=0o600)


def _intent(prepared: Prepared, git: GitState | None) -> dict[str, Any]:
    plan = prepared.plan
    return {
        "name": plan.job.name,
        "owner": plan.job.owner,
        "from": os.uname().nodename,
        "target": plan.target.name,
        "kind": plan.target.kind,
        "at": format_time(ledger.now()),
        "snapshot": plan.job.snapshot,
        "experiment": plan.job.experiment,
        "indices": len(plan.indices),
        "offset": _offset(plan),
        "parts": [part.name for part in plan.parts],
        "secrets": any(path.startswith("secrets/") for path in plan.order.get("secrets", {}).values()),
        **({"after": list(plan.spec.after)} if plan.spec.after else {}),
        **({"commit": git.commit, "branch": git.branch, "diff": git.diff[:1_000_000]} if git else {}),
    }


def _store_snapshot(snapshot: Snapshot, plan: LaunchPlan, files: Files, progress: Callable[[str], None]) -> None:
    """Stored once for all jobs of a user in the root, and beside each job under a name that the shim knows.

    The shim looks at the bytes, so it does no harm where somebody else's file lies under the content id.
    """
    assert plan.job.snapshot is not None
    name, common = f"{plan.folder}/{SNAPSHOT_FILE}", ledger.snapshot_name(plan.job.snapshot)
    if isinstance(files, Links) and files.link(common, name):
        return
    if files.read_from(name, 0, 1):
        return
    progress(f"sending the code: {snapshot.files} files")
    if isinstance(files, Links) and files.create(common, snapshot.archive) and files.link(common, name):
        return
    files.create(name, snapshot.archive)


def _next_of_the_same(prepared: Prepared, files: Files) -> LaunchPlan:
    """Find the plan of the first equal launch that was not made yet."""
    plan = prepared.plan
    again = 0
    while True:
        identity = job_id(
            owner=plan.job.owner, target=plan.target.name, spec=plan.spec, snapshot=plan.job.snapshot, again=again
        )
        if files.read(f"{job_folder(identity)}/intent.json") is None:
            if identity == plan.job.id:
                return plan
            renamed = replace(plan.job, id=identity)
            return prepared.launcher.plan(plan.spec, plan.target, renamed, prepared.context)
        again += 1


def _json(value: object) -> bytes:
    # Not indented: that is done in Python, and an order of a thousand runs would take longer than its launch.
    return json.dumps(value, sort_keys=True, ensure_ascii=False).encode() + b"\n"
