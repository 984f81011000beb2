"""Decides all that a launch will do and does none of it: the spec for the target, the code, the job's id, the plan."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.client.jobs.secrets import check_sources
from runtime.errors import RequestRefused, UnknownName
from runtime.jobs.plan import Fidelity, FieldSupport, JobIdentity, LaunchPlan, PlanContext, Target
from runtime.jobs.spec import CodeMode, JobSpec, parse_spec
from runtime.jobs.spec_fields import job_id, set_fields, spec_fields
from runtime.launchers.base import Launcher
from runtime.launchers.registry import get_launcher
from runtime.snapshots.snapshot import Snapshot, SnapshotRules, make_snapshot
from runtime.values import MISSING, dataclass, fields, replace

if TYPE_CHECKING:
    from runtime.config import Settings
from runtime.jobs.identity import owner_name


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
    """Start a new job although the same launch was made before."""
    ignore: tuple[str, ...] = ()
    """Fields that may be dropped where the target refuses them."""
    experiment: str | None = None
    base: Path | None = None
    """Folder that the spec's relative paths start from; the working directory by default."""
    lifetime: timedelta | None = None
    """Time after which the backend ends and removes the job by itself, if it can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A plan, and the bytes that go with it."""

    plan: LaunchPlan
    launcher: Launcher
    context: PlanContext
    snapshot: Snapshot | None
    base: Path


def prepare(spec: JobSpec, target: Target, settings: Settings, options: LaunchOptions) -> Prepared:
    """Decide everything that a launch will do, without doing any of it and without the network.

    Reads the work tree, for the code's content id is part of the job's. Raises `FieldsRefused`, `RequestRefused`.
    """
    launcher = get_launcher(target.kind)
    base = options.base or Path.cwd()
    spec = _drop_refused(_apply_defaults(spec, target), target, launcher, options.ignore)
    snapshot = _take_code(spec, base)
    code, owner = snapshot.id if snapshot else None, owner_name()
    identity = JobIdentity(
        id=job_id(owner=owner, target=target.name, spec=spec, snapshot=code),
        name=spec.name or _name_of(spec),
        owner=owner,
        snapshot=code,
        experiment=options.experiment,
        lifetime=options.lifetime,
    )
    context = make_context(settings, base)
    plan = launcher.plan(spec, target, identity, context)
    if plan.order.get("secrets"):
        check_sources(plan.secrets)
    return Prepared(plan=plan, launcher=launcher, context=context, snapshot=snapshot, base=base)


def make_context(settings: Settings, base: Path | None = None) -> PlanContext:
    return PlanContext(
        settings=settings,
        now=datetime.now(UTC),
        base=base or Path.cwd(),
        environ=dict(os.environ),
        records=str(settings.data_dir / "jobs"),
    )


def read_fidelity(spec: JobSpec, launcher: Launcher) -> dict[str, FieldSupport]:
    """How each field that the spec sets is kept."""
    no_leaves = ("placement.on", "checkpoint", "array", "retry")
    return {name: launcher.keeps[name] for name in set_fields(spec) if name not in no_leaves}


def _apply_defaults(spec: JobSpec, target: Target) -> JobSpec:
    """The spec without the choice of a target, which is no part of what the job is, and with the target's defaults in
    the places that the spec leaves open, at every depth."""
    if spec.placement.on:
        spec = replace(spec, placement=replace(spec.placement, on=()))
    if not target.defaults:
        return spec
    merged = _merge(target.defaults, spec_fields(spec))
    return parse_spec(merged, source=f"the request with the defaults of target `{target.name}`")


def _merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(under)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = _merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


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
