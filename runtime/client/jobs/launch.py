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
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from runtime.client.jobs.roots import open_target
from runtime.client.jobs.secrets import check_sources, read_values
from runtime.client.jobs.targets import apply_defaults, choose_target, find_target, list_targets, named_here
from runtime.errors import InfrastructureFailure, NotPossible, RequestRefused, UnknownName
from runtime.faults import reach
from runtime.jobs import ledger
from runtime.jobs.hosts.base import Files, FileToWrite, Host, Links
from runtime.jobs.ledger import JobStatus, LedgerEntry, NativeJob, job_folder
from runtime.jobs.lock import Lock
from runtime.jobs.order import SNAPSHOT_FILE
from runtime.jobs.plan import Fidelity, JobIdentity, Keeping, LaunchPlan, NativePart, NativeState, PlanContext, Target
from runtime.jobs.spec import CodeMode, JobSpec, JobState, job_id, parse_spec, secret_refs, set_fields, spec_fields
from runtime.launchers.base import ChecksHost, Clears, Launcher, Stops, Sweeps
from runtime.launchers.registry import get_launcher
from runtime.launchers.standing import judge_job
from runtime.reasons import EndReason
from runtime.shim.program import build_shim
from runtime.snapshots.snapshot import GitState, Snapshot, SnapshotRules, make_snapshot, read_git_state
from runtime.units import format_time
from runtime.values import MISSING, dataclass, fields, replace

if TYPE_CHECKING:
    from runtime.config import Settings
from runtime.jobs.identity import owner_name
from runtime.jobs.ledger import newest_natives

T = TypeVar("T")

SHORTEST_PREFIX: Final = 4
_UNMARKED: Final = {
    True: "cancel it again once there is room, or the same launch starts it again",
    False: "a run whose shim serves others too goes on; cancel it again once there is room",
}
WAIT_S: Final = 1.0


class FieldsRefused(RequestRefused):
    """The target cannot keep fields that the spec sets."""

    def __init__(self, target: str, refused: dict[str, Keeping]) -> None:
        self.target, self.refused = target, refused
        super().__init__(
            f"target `{target}` cannot keep {', '.join(f'`{name}`' for name in refused)} of this job",
            facts=[f"{name}: {keeping.how}" for name, keeping in refused.items()],
            hint=f"take it out of the spec, name another target, or drop it: {' '.join(f'--ignore {name}' for name in refused)}",
        )


class TargetSilent(InfrastructureFailure):
    """The target that a job was launched on does not answer, so nothing is known of the job."""

    def __init__(self, job: str, target: Target, problem: InfrastructureFailure) -> None:
        self.job, self.target, self.problem = job, target, problem
        super().__init__(
            f"nobody knows how job `{job}` stands: target `{target.name}` does not answer: {problem.message}",
            facts=problem.facts,
            hint=problem.hint or f"runtime targets check {target.name}",
            retryable=problem.retryable,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    again: bool = False
    """Start a new job although the same launch was made before."""
    ignore: tuple[str, ...] = ()
    """Fields that may be dropped where the target refuses them."""
    experiment: str | None = None
    base: Path | None = None
    """Folder that the spec's relative paths start from; the working directory by default."""
    lifetime: timedelta | None = None
    """A backend that can ends and removes the job after so long, whoever is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A plan, and the bytes that go with it."""

    plan: LaunchPlan
    launcher: Launcher
    context: PlanContext
    snapshot: Snapshot | None
    base: Path


class JobHandle:
    """A job that was launched, here or elsewhere, now or earlier. Closing it closes the connection to its target."""

    def __init__(self, job: str, target: Target, launcher: Launcher, host: Host, *, new: bool = False) -> None:
        self.id, self.target, self.new = job, target, new
        """`new` is False where the same launch had been made before."""
        self.launcher, self.host = launcher, host

    @property
    def files(self) -> Files:
        """The record root."""
        return self.host.files

    def entry(self) -> LedgerEntry:
        found = ledger.read_entry(self.files, self.id)
        if found is None:
            raise UnknownName("job", self.id, [], hint="`runtime status` lists the jobs that there are")
        return found

    def status(self, *, indices: bool = False) -> JobStatus:
        """Where it stands now, by the ledger and one question to the backend, which has to answer."""
        return judge_job(self.entry(), self.target, self.launcher, self.host, indices=indices)[0]

    def look(
        self, *, tell: Callable[[InfrastructureFailure], None] = lambda problem: None
    ) -> tuple[JobStatus, list[NativeState]]:
        """Where it stands, run by run, and what the backend said; `unknown` if it does not answer, and `tell` hears why."""
        return judge_job(self.entry(), self.target, self.launcher, self.host, indices=True, tell=tell)

    def state(self) -> JobState:
        return self.status().state

    def natives(self, entry: LedgerEntry | None = None) -> list[NativeState]:
        """What the backend says; nothing is asked where every index has its result."""
        entry = entry or self.entry()
        if len(entry.outcomes) >= entry.indices or not entry.natives:
            return []
        return self.launcher.states(self.target, [each.native_id for each in newest_natives(entry)], self.host)

    def wait(self, *, timeout_s: float | None = None, stuck: bool = False) -> JobStatus:
        """Wait for the end, or, with `stuck`, until it waits for what does not come by itself. Raises `TimeoutError`; the
        job goes on."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        pause = 0.05
        while True:
            status = self.status()
            if status.state.terminal or (stuck and status.reason is not None):
                return status
            if until is not None and time.monotonic() >= until:
                raise TimeoutError(f"job {self.id} is {status.state} after {timeout_s:g} s")
            time.sleep(pause)
            pause = min(WAIT_S, pause * 1.5)

    def attempts(self, index: int | None = None) -> list[int]:
        """Numbers of the attempts of an index, the first by default, oldest first."""
        index = self._first() if index is None else index
        names = self.files.names(f"{job_folder(self.id)}/runs/{index}", "a")
        return sorted(int(name[1:]) for name in names if name[1:].isdigit())

    def logs(
        self,
        *,
        index: int | None = None,
        rank: int = 0,
        attempt: int | None = None,
        follow: bool = False,
        tell: Callable[[JobStatus], None] = lambda status: None,
    ) -> Iterator[bytes]:
        """What an index printed, the first by default, of every attempt in turn or of one; `follow` goes on until the
        job has ended, and `tell` hears at each look where it stands."""
        index = self._first() if index is None else index
        from runtime.client.jobs.joblog import LogReader, read_limit
        from runtime.jobs.hosts.bucket import look_again_s

        limit, readers = read_limit(self.files, self.id), dict[int, LogReader]()
        at = attempt or 1
        while True:
            ended = not follow
            if follow:
                status = self.status()
                ended = status.state.terminal
                tell(status)
            there = self.attempts(index)
            for number in [each for each in there if each >= at] if attempt is None else [attempt]:
                at = number
                name = f"{job_folder(self.id)}/runs/{index}/a{number:04d}/rank{rank}.log"
                yield from readers.setdefault(number, LogReader(self.files, name, limit)).read()
            if ended:
                return
            time.sleep(look_again_s(self.files))

    def _first(self) -> int:
        return int(self.entry().intent.get("offset", 0))

    def cancel(self, *, indices: Sequence[int] | None = None) -> list[str]:
        """Stop it, or some of its indices. Returns what is left over, in words; empty means that all is gone.

        A run that has ended stays as it ended. Where native jobs bear labels, they are looked for whatever is written
        down of them. A record root that refuses the mark keeps nothing running: the native jobs are stopped all the same.
        """
        if indices is None:
            self._record_ends()
        entry = self.entry()
        if indices is None and len(entry.outcomes) >= entry.indices:
            return self.end_strays()
        refused = self._mark_cancelled(indices)
        if len(entry.outcomes) >= entry.indices:
            return []
        left: list[str] = []
        if indices is None and isinstance(self.launcher, Sweeps):
            left += self.sweep()
        elif natives := [each.native_id for each in newest_natives(entry)]:
            if refused and indices is None and isinstance(self.launcher, Stops):
                self.launcher.stop(self.target, natives, self.host)
            left += self.launcher.cancel(self.target, natives, indices, self.host)
            if isinstance(self.launcher, Clears):
                left += self.launcher.clear(self.target, job_folder(self.id), self.host)
        if indices is None and not left:
            try:
                self.files.remove(f"{job_folder(self.id)}/secrets")
            except InfrastructureFailure as problem:
                left.append(f"the files of its secrets: {problem.message}")
        if refused and (refused := self._mark_cancelled(indices)):  # what has ended may have made room
            left.append(f"no cancel mark could be written: {refused.message}; {_UNMARKED[indices is None]}")
        return left

    def _mark_cancelled(self, indices: Sequence[int] | None) -> InfrastructureFailure | None:
        """Leave the marks that shims and `status` look for; why the record root refused, if it did."""
        mark = json.dumps({"at": format_time(ledger.now()), "by": owner_name()}).encode()
        try:
            for name in ["cancel"] if indices is None else [f"cancel.{index}" for index in indices]:
                ledger.leave_mark(self.files, self.id, name, mark)
        except InfrastructureFailure as problem:
            return problem
        return None

    def end_strays(self) -> list[str]:
        """End what the backend has with its label of a job that has ended and is still at work, after it is written down
        how the job ended. What is left, in words."""
        if not isinstance(self.launcher, Sweeps):
            return []
        started = self.launcher.list_started(self.target, self.host)
        if not any(each.live for each in started if each.job == self.id):
            return []
        self._record_ends()
        return self.sweep()

    def sweep(self) -> list[str]:
        """End and remove all that the backend has with its label. What is left, in words."""
        return self.launcher.sweep(self.target, self.id, self.host) if isinstance(self.launcher, Sweeps) else []

    def _record_ends(self) -> None:
        """Write down the ends that only the backend tells, where nothing of a native job stays unseen.

        Where the backend or the record root does not answer, nothing is known to have ended.
        """
        if not isinstance(self.launcher, Sweeps):
            return
        with contextlib.suppress(InfrastructureFailure):
            status = self.status(indices=True)
            for each in status.indices if status.entry.natives else ():
                if each.state.terminal and each.index not in status.entry.outcomes:
                    ledger.record_end(self.files, self.id, each)

    def fetch(self, to: Path, *, index: int | None = None, overwrite: bool = False) -> list[Path]:
        """Copy what the job wrote to its output folders home; the files that are there now.

        Raises `FilesDiffer` once all others are copied, where others are there under their names, and `NameRefused` at
        the first whose name leads elsewhere.
        """
        from runtime.client.fetch import fetch, list_outputs, refuse_differing

        listed = list_outputs(self, [] if index is None else [index])
        done = list(fetch(self.files, listed, to, overwrite=overwrite))
        refuse_differing(done, to)
        return [Path(each.path) for each in done]

    def close(self) -> None:
        self.host.close()

    def __enter__(self) -> JobHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# deciding


def prepare(spec: JobSpec, target: Target, settings: Settings, options: LaunchOptions) -> Prepared:
    """Everything that a launch will do, decided without doing any of it and without the network.

    Reads the work tree, for the code's content id is part of the job's. Raises `FieldsRefused`, `RequestRefused`.
    """
    launcher = get_launcher(target.kind)
    base = options.base or Path.cwd()
    spec = apply_defaults(named_here(spec), target)
    spec = _drop_refused(spec, target, launcher, options.ignore)
    snapshot = _take_code(spec, base)
    identity = JobIdentity(
        id=job_id(owner=owner_name(), target=target.name, spec=spec, snapshot=snapshot.id if snapshot else None),
        name=spec.name or _name_of(spec),
        owner=owner_name(),
        snapshot=snapshot.id if snapshot else None,
        experiment=options.experiment,
        lifetime=options.lifetime,
    )
    context = make_context(target, settings, base)
    plan = launcher.plan(spec, target, identity, context)
    check_sources([ref for ref in secret_refs(spec) if ref.name in plan.order.get("secrets", {})])
    return Prepared(plan=plan, launcher=launcher, context=context, snapshot=snapshot, base=base)


def make_context(target: Target, settings: Settings, base: Path | None = None) -> PlanContext:
    return PlanContext(
        settings=settings,
        now=ledger.now(),
        base=base or Path.cwd(),
        environ=dict(os.environ),
        records=str(settings.data_dir / "jobs"),
    )


def read_fidelity(spec: JobSpec, launcher: Launcher) -> dict[str, Keeping]:
    """How each field that the spec sets is kept."""
    return {name: launcher.keeps[name] for name in _leaves(spec)}


def _leaves(spec: JobSpec) -> list[str]:
    return [name for name in set_fields(spec) if name not in ("placement.on", "checkpoint", "array", "retry")]


def _drop_refused(spec: JobSpec, target: Target, launcher: Launcher, ignore: Sequence[str]) -> JobSpec:
    if unknown := next((name for name in ignore if name not in launcher.keeps), None):
        raise UnknownName("field", unknown, launcher.keeps, hint="`runtime targets show` lists every field")
    kept = {name: launcher.keeps[name] for name in _leaves(spec)}
    refused = {name: keeping for name, keeping in kept.items() if keeping.fidelity is Fidelity.REFUSED}
    left = {name: keeping for name, keeping in refused.items() if name not in ignore}
    if left:
        raise FieldsRefused(target.name, left)
    for name in refused:
        spec = _without(spec, name.split("."))
    return spec


def _without(value: Any, path: Sequence[str]) -> Any:
    """The dataclass with one leaf at its default; an object that is nothing without it goes as a whole."""
    first, *rest = path
    field = next(each for each in fields(value) if each.name == first)
    default = field.default_factory() if field.default_factory is not MISSING else field.default
    if rest and default is not None:
        default = _without(getattr(value, first), rest)
    return replace(value, **{first: default})


def _take_code(spec: JobSpec, base: Path) -> Snapshot | None:
    if spec.code.mode is not CodeMode.SNAPSHOT:
        return None
    rules = SnapshotRules(max_bytes=spec.code.max_size, secrets=spec.code.secrets, exclude=spec.code.exclude)
    return make_snapshot(base / spec.code.path, rules)


def _name_of(spec: JobSpec) -> str:
    word = next((word for word in spec.command if word.endswith((".py", ".sh"))), spec.command[0])
    kept = "".join(char if char.isalnum() else "-" for char in Path(word).stem.lower()).strip("-")
    return (kept or "job")[:28]


# doing


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
    """Native jobs that are gone, with indices of theirs that have no result, and that nobody else will start again."""
    plan = prepared.plan
    if not getattr(prepared.launcher, "takes_up", False):
        return []
    entry = ledger.read_entry(host.files, plan.job.id)
    if entry is None or entry.cancelled:
        return []
    newest = newest_natives(entry)
    states = prepared.launcher.states(plan.target, [each.native_id for each in newest], host)
    gone = {
        each.native_id
        for each in states
        if each.index is None and each.reason in (EndReason.LOST, EndReason.NODE_FAILED)
    }
    # Read after the states: what was committed before a native job went counts.
    outcomes = ledger.read_outcomes(host.files, plan.job.id).get(plan.job.id, {})
    open_indices = (
        set(range(_offset(plan), _offset(plan) + len(plan.indices))) - set(outcomes) - entry.cancelled_indices
    )
    found = []
    for each in newest:
        part = plan.parts[each.part] if each.part < len(plan.parts) else NativePart(name="", artefact="", count=0)
        if each.native_id in gone and open_indices & set(range(part.offset, part.offset + part.count)):
            found.append(each)
    return found


def _take_up(prepared: Prepared, host: Host, lock: Lock, progress: Callable[[str], None]) -> None:
    """Start the shims of native jobs that are gone anew, once; the budgets that are left are theirs to keep.

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
    """Do it beside what comes next; its result is for whoever calls."""
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
    prepared: Prepared,
    files: Files,
    git: Callable[[], GitState | None] | None,
    progress: Callable[[str], None],
) -> None:
    """The intent and all that the nodes need, before the backend is called."""
    plan = prepared.plan
    # Others the backend itself brings.
    refs = [ref for ref in secret_refs(plan.spec) if ref.name in plan.order.get("secrets", {})]
    values = read_values(refs, plan.target, prepared.context)
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
    """Remove their files where the job has ended: had it before its launch was repeated, it does so no more."""
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
    """Read those again, as at the launch, whose files went when the job had ended."""
    paths = {name: f"{plan.folder}/{path}" for name, path in plan.order.get("secrets", {}).items()}
    gone = [ref for ref in secret_refs(plan.spec) if ref.name in paths and files.read(paths[ref.name]) is None]
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
    """The plan of the first launch of this kind that was not made yet."""
    plan = prepared.plan
    again = 0
    while True:
        identity = job_id(
            owner=plan.job.owner, target=plan.target.name, spec=plan.spec, snapshot=plan.job.snapshot, again=again
        )
        if files.read(f"{job_folder(identity)}/intent.json") is None:
            renamed = replace(plan.job, id=identity)
            return prepared.launcher.plan(plan.spec, plan.target, renamed, prepared.context)
        again += 1


# finding


def find_job(text: str, *, settings: Settings | None = None, target: str | None = None) -> JobHandle:
    """The job of that id or beginning of an id, on whichever target of the project it lies.

    The target that it was launched on from here is looked at first; another that does not answer is passed over. Raises
    `TargetSilent` if that target is the one that does not answer, and `UnknownName`.
    """
    from runtime.config import load_settings

    settings = settings or load_settings()
    known: list[str] = []
    silent: list[tuple[Target, InfrastructureFailure]] = []
    remembered = _remembered(text, settings)
    for each in [find_target(target, settings)] if target else _likely_targets(remembered, settings):
        launcher = get_launcher(each.kind)
        try:
            host = open_target(each, launcher, make_context(each, settings))
            jobs = ledger.list_jobs(host.files)
        except InfrastructureFailure as problem:
            if target:
                raise TargetSilent(text, each, problem) from problem
            silent.append((each, problem))
            continue
        found = [job for job in jobs if job.startswith(text)] if len(text) >= SHORTEST_PREFIX else []
        if len(found) == 1:
            return JobHandle(found[0], each, launcher, host)
        host.close()
        if found:
            raise NotPossible(
                f"`{text}` is the beginning of more than one job",
                facts=[f"it may be: {', '.join(found[:10])}"],
                hint="add letters until only one is left",
            )
        known += jobs
    for each, why in silent:
        if jobs := [job for job, there in remembered if there == each]:
            raise TargetSilent(jobs[0] if len(jobs) == 1 else text, each, why) from why
    unknown = UnknownName("job", text, known[:10], hint="`runtime status` lists the jobs that there are")
    unknown.facts = (
        *unknown.facts,
        *(f"target `{each.name}` does not answer: {why.message}" for each, why in silent),
    )
    raise unknown


def remember_job(job: str, target: str, settings: Settings, *, records: str | None = None) -> None:
    """Keep on this machine where a job lies; a cache, and a folder that cannot be written stops nobody.

    `records` is a record root other than the target's own.
    """
    path = settings.data_dir / "launched" / job
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{target}\n{records or ''}", encoding="utf-8")
    except OSError:
        pass


def forget_job(job: str, settings: Settings) -> None:
    """The other way round, where a job is removed."""
    with contextlib.suppress(OSError):
        (settings.data_dir / "launched" / job).unlink()


def _remembered(text: str, settings: Settings) -> list[tuple[str, Target]]:
    """The jobs whose id begins so that were launched from here, each with its target."""
    known = {each.name: each for each in list_targets(settings)}
    found = []
    for path in (settings.data_dir / "launched").glob(f"{text}*") if len(text) >= SHORTEST_PREFIX else ():
        name, _, records = path.read_text(encoding="utf-8").strip().partition("\n")
        if name in known:
            found.append((path.name, replace(known[name], records=records) if records else known[name]))
    return found


def _likely_targets(remembered: Sequence[tuple[str, Target]], settings: Settings) -> list[Target]:
    """Every target, those of remembered jobs first."""
    first: list[Target] = []
    for _, target in remembered:
        if target not in first:
            first.append(target)
    return [*first, *(each for each in list_targets(settings) if each not in first)]


def list_handles(settings: Settings) -> Iterator[tuple[Target, Launcher, Host]]:
    """Every target of the project, opened; whoever iterates closes the hosts."""
    for target in list_targets(settings):
        launcher = get_launcher(target.kind)
        yield target, launcher, open_target(target, launcher, make_context(target, settings))


def _json(value: object) -> bytes:
    # Not indented: that is done in Python, and an order of a thousand runs would take longer than its launch.
    return json.dumps(value, sort_keys=True, ensure_ascii=False).encode() + b"\n"
