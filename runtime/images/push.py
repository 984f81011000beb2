"""Pushing an image to every region's registry, and listing the images of the registries."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Final, TypeVar

from runtime.errors import InfrastructureFailure, NotPossible, RuntimeFailure, UnknownName
from runtime.images.build import local_reference
from runtime.images.registry import ImageManifest, ImageRegistry, login_hint
from runtime.images.source import LATEST, ImageSource, source_of_labels
from runtime.images.tools import LocalImage, Tool, ToolCommand, find_image, push_commands, run_quietly
from runtime.outputs import StackOutputs

DEFAULT_REGISTRY: Final = "images"
KNOWN_NAMES: Final = ("worker", "worker-cuda", "cluster")
_AT_ONCE: Final = 8
_REFUSALS: Final = ("unauthorized", "denied", "forbidden", "authentication required", " 401", " 403")
"""Words of the tools' messages that mean missing credentials or rights."""

T = TypeVar("T")
R = TypeVar("R")


class PushState(StrEnum):
    PUSHED = "pushed"
    UNCHANGED = "unchanged"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class PushTarget:
    region: str
    registry: ImageRegistry


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionManifests:
    """The manifests that one region holds under the tags to push."""

    target: PushTarget
    manifests: Mapping[str, ImageManifest | None]
    problem: RuntimeFailure | None = None

    def others(self, image: LocalImage) -> dict[str, ImageManifest | None]:
        """Return tags that do not name `image` here, each with the image that it names."""
        return {tag: each for tag, each in self.manifests.items() if not (each and each.digests & image.digests)}


@dataclass(frozen=True, slots=True, kw_only=True)
class PushStep:
    target: PushTarget
    tags: tuple[str, ...]
    """Tags to push, in order; empty if the registry has all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushPlan:
    name: str
    image: LocalImage
    source: ImageSource
    steps: tuple[PushStep, ...]
    unreadable: tuple[RegionManifests, ...] = ()
    """Regions whose registry did not answer, so nothing is pushed there."""

    def commands(self, tool: Tool, step: PushStep) -> list[ToolCommand]:
        remotes = [step.target.registry.reference(self.name, tag) for tag in step.tags]
        return [command for remote in remotes for command in push_commands(tool, self.image.reference, remote)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PushResult:
    region: str
    state: PushState
    image: str
    """Reference by digest if the digest is known, otherwise by tag."""
    digest: str | None
    tags: tuple[str, ...]
    problem: str | None = None
    hint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredImage:
    """One image in one region."""

    region: str
    name: str
    tags: tuple[str, ...]
    digest: str
    size_bytes: int
    created: datetime | None
    image: str
    in_use: tuple[str, ...] = ()
    """Clusters of the stack whose head is pinned to the image."""


class TagTaken(NotPossible):
    """A commit's tag names another image in `places`; it is not moved, and nothing was pushed anywhere."""

    def __init__(self, name: str, tag: str, places: Mapping[str, ImageManifest]) -> None:
        self.name, self.tag, self.places = name, tag, dict(places)
        facts = [f"{region} has it as {manifest.digest}" for region, manifest in places.items()]
        super().__init__(
            f"tag `{tag}` of `{name}` names another image already",
            facts=[
                *facts,
                "stacks, heads and plans rely on a commit's tag, so it is never moved; nothing was pushed",
                "two builds of one commit are two images, even if nothing was changed",
            ],
            hint="commit the change and build again; or take the image that is there: `runtime image build --reuse`",
        )


class PushFailed(InfrastructureFailure):
    """Some regions did not get the image; `failed` and `done` name them."""

    def __init__(self, name: str, failed: Sequence[PushResult], done: Sequence[PushResult]) -> None:
        self.name, self.failed, self.done = name, tuple(failed), tuple(done)
        facts = [f"{each.region}: {line}" for each in failed for line in (each.problem or "unknown").splitlines()]
        if done:
            facts.append(f"done: {', '.join(each.region for each in done)}")
        hints = [each.hint for each in failed if each.hint]
        super().__init__(
            f"image `{name}` did not reach {', '.join(each.region for each in failed)}",
            facts=facts,
            hint=hints[0] if hints else "push again: what is there already is left alone",
        )


def find_targets(
    outputs: StackOutputs, *, registry: str | None = None, regions: Sequence[str] = ()
) -> list[PushTarget]:
    """Return the chosen registries of a stack. Raises `UnknownName` and `NotPossible`."""
    known = outputs.registries
    if not known:
        raise NotPossible(
            f"stack `{outputs.stack}` has no registry",
            hint=f"add `registries` to Pulumi.{outputs.stack}.yaml, or name another stack with `--stack`",
        )
    name = registry or (DEFAULT_REGISTRY if DEFAULT_REGISTRY in known else next(iter(known)) if len(known) == 1 else "")
    if name not in known:
        if registry is None:
            raise NotPossible(
                f"stack `{outputs.stack}` has several registries and none is called `{DEFAULT_REGISTRY}`",
                facts=[f"registries: {', '.join(sorted(known))}"],
                hint="name one with `--registry`",
            )
        raise UnknownName("registry", name, known, where=f"in stack `{outputs.stack}`")
    places = known[name]
    for region in regions:
        if region not in places:
            raise UnknownName("region", region, places, where=f"of registry `{name}`")
    return [
        PushTarget(region=region, registry=ImageRegistry(output.url))
        for region, output in sorted(places.items())
        if not regions or region in regions
    ]


def plan_push(name: str, tool: Tool, targets: Sequence[PushTarget], *, tag: str = LATEST) -> PushPlan:
    """Decide which image goes to which registry, from their present contents.

    Raises `TagTaken` if that would move a commit's tag anywhere, `NotPossible` if there is nothing to push.
    """
    reference = local_reference(name, tag)
    image = find_image(tool, reference)
    if image is None:
        raise NotPossible(
            f"`{tool}` has no image `{reference}`", hint=f"runtime image build --name {name}, or another `--tool`"
        )
    source = source_of_labels(image.labels, image=reference)
    seen = _at_once(lambda target: _look(target, name, source.tags), targets)
    taken = find_taken(source, image, seen)
    if taken and source.fixed_tag:
        raise TagTaken(name, source.fixed_tag, taken)
    return PushPlan(
        name=name,
        image=image,
        source=source,
        steps=tuple(PushStep(target=each.target, tags=tuple(each.others(image))) for each in seen if not each.problem),
        unreadable=tuple(each for each in seen if each.problem),
    )


def find_taken(source: ImageSource, image: LocalImage, seen: Iterable[RegionManifests]) -> dict[str, ImageManifest]:
    """Return region → manifest that the commit's tag names there, for regions where that is not `image`."""
    found = ((each.target.region, each.others(image).get(source.fixed_tag or "")) for each in seen)
    return {region: manifest for region, manifest in found if manifest}


def push(plan: PushPlan, tool: Tool, *, advance: Callable[[], object] = lambda: None) -> list[PushResult]:
    """Push to all regions at once; one that fails does not stop the others. `advance` is called after each region."""

    def go(step: PushStep) -> PushResult:
        try:
            return _push_one(plan, tool, step)
        finally:
            advance()

    failed = [
        _result(
            plan,
            each.target,
            PushState.FAILED,
            "\n".join((each.problem.message, *each.problem.facts)),
            each.problem.hint,
        )
        for each in plan.unreadable
        if each.problem
    ]
    return sorted([*failed, *_at_once(go, plan.steps)], key=lambda each: each.region)


def ensure_all_pushed(name: str, results: Sequence[PushResult]) -> None:
    """Raise `PushFailed` if a region did not get it."""
    failed = [each for each in results if each.state is PushState.FAILED]
    if failed:
        raise PushFailed(name, failed, [each for each in results if each.state is not PushState.FAILED])


def list_stored(outputs: StackOutputs, targets: Sequence[PushTarget], names: Sequence[str]) -> list[StoredImage]:
    """List the images of the registries, newest first. Raises `UnknownName` for a name in `names` that no registry has."""
    wanted = names or tuple(dict.fromkeys((*KNOWN_NAMES, *head_images(outputs))))
    pairs = [(target, name) for target in targets for name in wanted]
    answers = _at_once(lambda pair: _stored(outputs, *pair), pairs)
    found = {pair[1] for pair, answer in zip(pairs, answers, strict=True) if answer is not None}
    for name in names:
        if name not in found:
            raise UnknownName("image", name, found, where=f"in the registries of stack `{outputs.stack}`")
    stored = [each for answer in answers for each in answer or ()]
    oldest_last = sorted(stored, key=lambda each: each.created.timestamp() if each.created else 0.0, reverse=True)
    return sorted(oldest_last, key=lambda each: (each.name, each.region))


def head_images(outputs: StackOutputs) -> list[str]:
    """Return the names of the images that the stack's heads run."""
    return sorted({each.image.partition("@")[0].rpartition("/")[2] for each in outputs.clusters.values()})


def _look(target: PushTarget, name: str, tags: Sequence[str]) -> RegionManifests:
    try:
        manifests = {tag: target.registry.find_manifest(name, tag) for tag in tags}
    except RuntimeFailure as problem:
        return RegionManifests(target=target, manifests={}, problem=problem)
    return RegionManifests(target=target, manifests=manifests)


def _push_one(plan: PushPlan, tool: Tool, step: PushStep) -> PushResult:
    registry = step.target.registry
    problem = run_quietly(plan.commands(tool, step))
    hint = login_hint(registry.place, tool) if problem and _is_refusal(problem) else None
    digest = None
    if problem is None:
        try:
            manifest = registry.find_manifest(plan.name, plan.source.tags[0])
            digest = manifest.digest if manifest else None
            if manifest is None or not manifest.digests & plan.image.digests:
                problem = f"the registry has another image as {plan.source.tags[0]}: somebody pushed at the same time"
        except RuntimeFailure as failure:
            problem, hint = failure.message, failure.hint
    state = PushState.FAILED if problem else PushState.PUSHED if step.tags else PushState.UNCHANGED
    return _result(plan, step.target, state, problem, hint, digest)


def _result(
    plan: PushPlan,
    target: PushTarget,
    state: PushState,
    problem: str | None,
    hint: str | None,
    digest: str | None = None,
) -> PushResult:
    return PushResult(
        region=target.region,
        state=state,
        image=target.registry.reference(plan.name, digest or plan.source.tags[0]),
        digest=digest,
        tags=plan.source.tags,
        problem=problem,
        hint=hint,
    )


def _stored(outputs: StackOutputs, target: PushTarget, name: str) -> list[StoredImage] | None:
    registry = target.registry
    tags = registry.list_tags(name)
    if tags is None:
        return None
    by_digest: dict[str, tuple[ImageManifest, list[str]]] = {}
    for tag in tags:
        if manifest := registry.find_manifest(name, tag):
            by_digest.setdefault(manifest.digest, (manifest, []))[1].append(tag)
    return [
        StoredImage(
            region=target.region,
            name=name,
            tags=tuple(named),
            digest=digest,
            size_bytes=manifest.size_bytes,
            created=registry.created_at(name, manifest),
            image=registry.reference(name, digest),
            in_use=tuple(sorted(key for key, cluster in outputs.clusters.items() if cluster.image.endswith(digest))),
        )
        for digest, (manifest, named) in by_digest.items()
    ]


def _is_refusal(text: str) -> bool:
    return any(word in text.lower() for word in _REFUSALS)


def _at_once(function: Callable[[T], R], items: Sequence[T]) -> list[R]:
    if len(items) < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(max_workers=_AT_ONCE) as pool:
        return list(pool.map(function, items))
