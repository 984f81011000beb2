"""Decides everything about a launch and does none of it: the spec for the target, the code, the job's id, the plan."""

from __future__ import annotations

import os
import posixpath
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from runtime.client.jobs.literal_secrets import refuse_secrets
from runtime.client.jobs.targets import find_target, make_context
from runtime.config import Settings
from runtime.errors import InvalidValue, NotPossible, RequestRefused, UnknownName
from runtime.jobs.call import ANY_PYTHON, FunctionCall
from runtime.jobs.plan import Fidelity, FieldSupport, JobIdentity, LaunchPlan, PlanContext, Target, owner_name
from runtime.jobs.run_config import OWN_LOCKS
from runtime.jobs.secret_schemes import check_schemes
from runtime.jobs.spec import (
    CodeMode,
    EnvironmentManager,
    InvalidSpec,
    JobEnvironment,
    JobSpec,
    expand,
    parse_spec,
    secret_refs,
)
from runtime.jobs.spec_fields import held_ids, job_id, set_fields, spec_fields
from runtime.launchers.base import Launcher
from runtime.launchers.registry import get_launcher
from runtime.snapshots.excludes import list_own_places
from runtime.snapshots.snapshot import SecretInTree, Snapshot, SnapshotRules, make_snapshot
from runtime.system import system
from runtime.tasks.notification_sinks import put_named
from runtime.units import count_noun

if TYPE_CHECKING:
    from runtime.client.jobs.reused_artifacts import ReusedArtifact, Sources


class FieldsRefused(RequestRefused):
    """The target cannot keep fields that the spec sets."""

    def __init__(self, target: str, refused: dict[str, FieldSupport]) -> None:
        self.target, self.refused = target, refused
        super().__init__(
            f"target `{target}` cannot keep {', '.join(f'`{name}`' for name in refused)} of this job",
            facts=[f"{name}: {support.how}" for name, support in refused.items()],
            hint=f"take it out of the spec, name another target, or drop it: {' '.join(f'--ignore {name}' for name in refused)}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    again: bool = False
    ignore: tuple[str, ...] = ()
    experiment: str | None = None
    base: Path | None = None
    """Folder that the spec's relative paths start from; the working directory by default."""
    lifetime: timedelta | None = None
    """Time after which the backend ends and removes the job, if it can."""
    assume_yes: bool = False
    """Start a job that costs money without asking; the project's limit holds all the same."""
    agree: Callable[[], bool] | None = None
    """Asks a person whether a job that costs money is to start; None without a person to ask."""
    hold: bool = False
    """The job keeps its machine between commands, as a development machine."""
    snapshot: Snapshot | None = None
    """The code that goes along, in place of the tree at `base` as it is now."""


class LaunchRequest:
    """The job to launch, as a spec, the fields of a job file, or the words of a command.

    A spec is parsed once for all targets without defaults, and once for each target that has some.
    """

    def __init__(self, job: JobSpec | Mapping[str, Any] | Sequence[str], *, source: str = "`runtime.launch`") -> None:
        """`source` names the job in errors."""
        if not isinstance(job, JobSpec | Mapping):
            job = {"command": job if isinstance(job, str) else list(job)}
        elif isinstance(job, Mapping):
            job = _with_texts(job)
        # In full, so that the defaults of a target are merged at every depth.
        self._job, self.source = job if isinstance(job, JobSpec) else expand(job), source
        self._specs: dict[str, JobSpec] = {}
        self._sources: Sources | None = None
        self._sinks: Mapping[str, Any] = {}
        """Those of the settings, for the names in `notify`."""

    def settle(self, spec: JobSpec, target: Target, settings: Settings) -> tuple[JobSpec, tuple[ReusedArtifact, ...]]:
        """Return the spec with ids of versions for the sources in `reuse`, the same on every target, and the versions."""
        if not spec.reuse:
            return spec, ()
        if self._sources is None:
            from runtime.client.jobs.reused_artifacts import Sources

            self._sources = Sources(settings)
        return self._sources.settle(spec, target.stack)

    def take_sinks(self, settings: Settings) -> None:
        """Have the sinks of these settings stand in place of their names."""
        if isinstance(self._job, Mapping):
            self._job = _with_sinks(self._job, settings.project.notify)
        self._sinks = settings.project.notify

    def choose_targets(self, names: Sequence[str], settings: Settings) -> list[Target]:
        """Return the targets to try in order: `names`, or else the job's own choice. Raises `NotPossible` for none."""
        self.take_sinks(settings)
        wanted = names or _chosen_by(self._job)
        try:
            if wanted:
                return [find_target(name, settings) for name in wanted]
            hint = "runtime launch --on local …; `runtime targets list` says which there are"
            raise NotPossible("no target is named", hint=hint)
        except RequestRefused:
            self._read_plain()  # faults of the job are reported first
            raise

    def spec_on(self, target: Target) -> JobSpec:
        """Return the spec with the target's defaults in the fields that the job leaves open, at every depth.

        The job's choice of a target is dropped, for it is no part of the job. Raises `InvalidSpec`.
        """
        if not target.defaults:
            return self._read_plain()
        if target.name not in self._specs:
            self._specs[target.name] = self._read_merged(target)
        return self._specs[target.name]

    def _read_plain(self) -> JobSpec:
        if "" not in self._specs:
            spec = self._job if isinstance(self._job, JobSpec) else parse_spec(self._job, source=self.source)
            self._specs[""] = replace(spec, placement=replace(spec.placement, on=())) if spec.placement.on else spec
        return self._specs[""]

    def _read_merged(self, target: Target) -> JobSpec:
        source = f"the request with the defaults of target `{target.name}`"
        written = spec_fields(self._job) if isinstance(self._job, JobSpec) else self._job
        if _chosen_by(written):
            written = {**written, "placement": {**written["placement"], "on": []}}
        try:
            defaults = _with_sinks(target.defaults, self._sinks)
            spec = parse_spec(_merge(defaults, written), source=source)
        except InvalidSpec:
            self._read_plain()  # raises if the job is wrong without the defaults
            raise
        # A value that equals the field's own default is not written, so that a job file that spells it out has the same id.
        left = _drop_equal(written, defaults, spec_fields(spec))
        return spec if left == written else parse_spec(_merge(defaults, left), source=source)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedLaunch:
    """A plan, and the bytes that go with it."""

    plan: LaunchPlan
    target: Target
    """The target as it is defined, which a launcher completes for the plan."""
    launcher: Launcher
    context: PlanContext
    snapshot: Snapshot | None
    reused: tuple[ReusedArtifact, ...] = ()
    """Artifacts of others that the job's folder is to have."""
    carried: Mapping[str, bytes] = field(default_factory=dict)
    """Results that runs of the job have from another one, by the names with which listings show them."""


def prepare(
    request: LaunchRequest | JobSpec, target: Target, settings: Settings, options: LaunchOptions
) -> PreparedLaunch:
    """Decide everything about a launch, without any effect, and without the network unless the job reuses artifacts.

    Reads the work tree and what is reused, because content ids of both are part of the job's. Raises `FieldsRefused`, `RequestRefused`.
    """
    if isinstance(request, JobSpec):
        request = LaunchRequest(request)
    launcher, base = get_launcher(target.kind), options.base or Path.cwd()
    request.take_sinks(settings)
    spec = request.spec_on(target)
    check_environment(spec.environment)
    if options.hold:
        spec = check_held(spec)
    if spec.call:
        spec = replace(spec, call=_choose_python(spec, spec.call, target))
    spec = _drop_refused(spec, target, launcher, options.ignore)
    spec, reused = request.settle(spec, target, settings)
    check_schemes(secret_refs(spec), launcher.secret_schemes, target.name)
    if options.snapshot is not None and spec.code.mode is CodeMode.SNAPSHOT:
        snapshot: Snapshot | None = options.snapshot
    else:
        rules = code_rules(spec, settings, target)
        snapshot = _take_code(spec, base, rules)
        if spec.environment.manager is EnvironmentManager.FROZEN and snapshot and set(OWN_LOCKS) & set(snapshot.names):
            snapshot = _take_code(
                spec, base, replace(rules, exclude=(*rules.exclude, *(f"/{name}" for name in OWN_LOCKS)))
            )
    if spec.environment.manager is EnvironmentManager.FROZEN:
        from runtime.client.jobs.freeze_environment import freeze_environment

        spec, snapshot = freeze_environment(spec, base / spec.code.path, snapshot, options)
    code, owner = snapshot.id if snapshot else None, owner_name()
    if spec.name == "last":
        allowed = "a name that is not `last`, which means the newest job"
        raise InvalidValue("name", spec.name, allowed, hint="name another, such as `--name last-one`")
    hold = f"hold {system.node()}:{(base / spec.code.path).resolve()}" if options.hold else None
    identity = JobIdentity(
        id=next(held_ids(owner=owner, target=target.name, spec=spec, hold=hold))
        if hold
        else job_id(owner=owner, target=target.name, spec=spec, snapshot=code),
        name=spec.name or _name_of(spec),
        owner=owner,
        snapshot=code,
        experiment=options.experiment,
        lifetime=options.lifetime,
        hold=hold,
    )
    context = make_context(settings, base)
    plan = launcher.plan(spec, target, identity, context)
    if hold and plan.order["nodes"] > 1:
        raise NotPossible(
            f"a development machine is one machine, and this job takes {count_noun(plan.order['nodes'], 'node')}",
            hint="ask for a slice of one host, such as v4-8, or launch it: runtime launch",
        )
    if spec.capture and (plan.order.get("meet") or plan.order.get("launch_ranks")):
        raise NotPossible(
            f"`capture` saves what one machine writes, and a run of this job takes {count_noun(plan.order['nodes'], 'machine')}",
            hint="leave `capture` out, and write to RUNTIME_CHECKPOINT_DIR, which the next attempt finds",
        )
    _check_lock(plan, snapshot, base / spec.code.path)
    refuse_secrets(plan, source=request.source)
    return PreparedLaunch(
        plan=plan, target=target, launcher=launcher, context=context, snapshot=snapshot, reused=reused
    )


def check_environment(environment: JobEnvironment) -> None:
    """Raise `NotPossible` for a lock file and the like that nothing would install."""
    about = {"lock": environment.lock, "extras": environment.extras, "python": environment.python}
    if environment.manager is EnvironmentManager.NONE and (named := [name for name, value in about.items() if value]):
        raise NotPossible(
            f"`environment.{named[0]}` needs an `environment.manager`, and there is none",
            hint="environment.manager: uv for a uv.lock, pip for a list of requirements, or conda",
        )


def _check_lock(plan: LaunchPlan, snapshot: Snapshot | None, tree: Path) -> None:
    """Raise `NotPossible` if the snapshot that goes with the job lacks the lock file of its environment."""
    lock = plan.order.get("environment", {}).get("lock")
    if not lock or snapshot is None or not snapshot.names:
        return
    name = posixpath.normpath(lock)
    meant = (
        os.path.relpath(os.path.realpath(tree / name), os.path.realpath(tree)) if (tree / name).is_symlink() else name
    )
    if not {name, meant} <= set(snapshot.names):
        raise NotPossible(
            f"the environment is made of `{lock}`, and the snapshot has no such file"
            + (f": it is a link to `{meant}`" if meant != name else ""),
            hint="make it, or name another in `environment.lock`; if git ignores it, `git add --force` it, and if .runtimeignore leaves it out, take the line away",
        )


HELD_FOR: Final = timedelta(hours=8)
"""Time limit of a development machine that names none, so that a forgotten one is given back."""


def check_held(spec: JobSpec) -> JobSpec:
    """Return the spec of a development machine with a time limit. Raises `NotPossible` for one that cannot be held."""
    refused = None
    if spec.array is not None:
        refused = "runs one command at a time, and this job is an array", "runtime launch starts arrays"
    elif spec.nodes > 1:
        refused = f"is one machine, and this job asks for {count_noun(spec.nodes, 'node')}", "leave out `nodes`"
    elif spec.code.mode is not CodeMode.SNAPSHOT:
        refused = f"runs each new snapshot, and `code.mode` is {spec.code.mode}", "leave out `code.mode`"
    if refused:
        raise NotPossible(f"a development machine {refused[0]}", hint=refused[1])
    return spec if spec.time_limit else replace(spec, time_limit=HELD_FOR)


def code_rules(spec: JobSpec, settings: Settings, target: Target) -> SnapshotRules:
    """Return the rules of the snapshot that a launch of the spec takes."""
    return SnapshotRules(
        max_bytes=spec.code.max_size,
        secrets=spec.code.secrets,
        exclude=spec.code.exclude,
        left_out=list_own_places(settings, *_record_folder(target)),
    )


def read_fidelity(spec: JobSpec, launcher: Launcher) -> dict[str, FieldSupport]:
    """Return how the launcher keeps each field that the spec sets."""
    no_leaves = ("placement.on", "checkpoint", "array", "retry")
    return {name: launcher.keeps[name] for name in set_fields(spec) if name not in no_leaves}


def _chosen_by(job: JobSpec | Mapping[str, Any]) -> Sequence[str]:
    """Return the targets that a job names. A malformed choice counts as none and is left to `parse_spec`."""
    if isinstance(job, JobSpec):
        return job.placement.on
    placement = job.get("placement")
    on = placement.get("on") if isinstance(placement, Mapping) else None
    return on if isinstance(on, list | tuple) and all(isinstance(name, str) for name in on) else ()


def _merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(under)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = _merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


def _with_texts(job: Mapping[str, Any]) -> Mapping[str, Any]:
    """Write paths in `capture` and `reuse` as texts. In `reuse`, a path is a file or folder of this machine, whatever its name."""
    made = dict(job)
    for part in ("capture", "reuse"):
        if isinstance(named := job.get(part), Mapping):
            made[part] = {tag: _as_text(each, part) for tag, each in named.items()}
    return made


def _as_text(path: object, field: str) -> object:
    if not isinstance(path, os.PathLike):
        return path
    text = os.fspath(path)
    return text if field == "capture" or os.path.isabs(text) else os.path.join(".", text)  # noqa: PTH117, PTH118


def _with_sinks(written: Mapping[str, Any], sinks: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**written, "notify": put_named(written["notify"], sinks)} if written.get("notify") else written


def _drop_equal(
    written: Mapping[str, Any], defaults: Mapping[str, Any], differing: Mapping[str, Any]
) -> dict[str, Any]:
    """Return `written` without the fields that `defaults` has too and that are not in `differing`."""
    left = {}
    for key, value in written.items():
        default = defaults.get(key)
        if isinstance(value, Mapping) and isinstance(default, Mapping):
            left[key] = _drop_equal(value, default, differing.get(key, {}))
        elif key not in defaults or key in differing:
            left[key] = value
    return left


def _drop_refused(spec: JobSpec, target: Target, launcher: Launcher, ignore: Sequence[str]) -> JobSpec:
    if unknown := next((name for name in ignore if name not in launcher.keeps), None):
        raise UnknownName("field", unknown, launcher.keeps, hint="`runtime targets show` lists every field")
    fidelity = read_fidelity(spec, launcher)
    refused = {name: support for name, support in fidelity.items() if support.fidelity is Fidelity.REFUSED}
    left = {name: support for name, support in refused.items() if name not in ignore}
    if left:
        raise FieldsRefused(target.name, left)
    for name in refused:
        spec = _without(spec, name.split("."))
    return spec


def _without(value: Any, path: Sequence[str]) -> Any:
    """Return the dataclass with one leaf at its default; an object that needs the leaf is dropped as a whole."""
    first, *rest = path
    field = next(each for each in fields(value) if each.name == first)
    default = field.default_factory() if field.default_factory is not MISSING else field.default
    if rest and default is not None:
        default = _without(getattr(value, first), rest)
    return replace(value, **{first: default})


def _record_folder(target: Target) -> list[str]:
    """Return the record root, if it could be a folder of this machine: it may lie in the code, and every job changes it."""
    return [target.records] if target.records and target.records.startswith("/") else []


def _take_code(spec: JobSpec, base: Path, rules: SnapshotRules) -> Snapshot | None:
    if spec.code.mode is not CodeMode.SNAPSHOT:
        return None
    try:
        return make_snapshot(base / spec.code.path, rules)
    except SecretInTree as problem:
        problem.hint = f"{problem.hint}; if it belongs in the snapshot, name it in `code.secrets`"
        raise


def _choose_python(spec: JobSpec, call: FunctionCall, target: Target) -> FunctionCall:
    """Return the call with this very Python where its files are the target's too, and nothing else is asked for."""
    ours = target.kind == "local" or (target.kind == "slurm" and "host" not in target.settings)
    plain = spec.image is None and spec.environment.name is None and spec.environment.manager is EnvironmentManager.NONE
    return replace(call, python=sys.executable) if ours and plain and call.python == ANY_PYTHON else call


def _name_of(spec: JobSpec) -> str:
    if spec.call:
        word = spec.call.function.rpartition(":")[2].rpartition(".")[2]
    else:
        word = next((word for word in spec.command if word.endswith((".py", ".sh"))), spec.command[0])
    kept = "".join(char if char.isascii() and char.isalnum() else "-" for char in Path(word).stem.lower())
    return kept.strip("-")[:28].rstrip("-") or "job"
