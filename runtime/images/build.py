"""Building an image from the work tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Final

from runtime.errors import NotPossible, RequestRefused
from runtime.images.registry import ImageRegistry
from runtime.images.source import BASE_LABEL, LATEST, ImageSource, check_name, is_pinned, name_of, read_source
from runtime.images.tools import (
    BuildRequest,
    LocalImage,
    Tool,
    build_command,
    find_image,
    pull_commands,
    run_build,
    run_quietly,
)

CUDA_BASE: Final = "docker.io/nvidia/cuda:12.8.1-base-ubuntu24.04"
DEFAULT_FILE: Final = Path("docker/worker.Dockerfile")
DEFAULT_PLATFORM: Final = "linux/amd64"
"""The platform of fleets, also for a laptop of another kind that builds."""


class Variant(StrEnum):
    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    context: Path
    file: Path | None = None
    name: str | None = None
    variant: Variant | None = None
    base: str | None = None
    platform: str = DEFAULT_PLATFORM
    pip_config: Path | None = None
    extra: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildPlan:
    name: str
    source: ImageSource
    request: BuildRequest
    warnings: tuple[str, ...] = ()


def local_reference(name: str, tag: str = LATEST) -> str:
    """Name an image in the tool's own storage; `localhost` keeps the tool from asking Docker Hub for it."""
    return f"localhost/{name}:{tag}"


def plan_build(options: BuildOptions, now: datetime) -> BuildPlan:
    """Decide everything. Raises `RequestRefused` for options from which nothing can be built."""
    context = options.context.resolve()
    file = options.file or context / DEFAULT_FILE
    if not file.is_file():
        raise NotPossible(
            f"no Dockerfile at `{file}`",
            facts=["images are built from a checkout of research-runtime"],
            hint="run it in the checkout, or name both: --context FOLDER --file FILE",
        )
    if options.base is not None and options.variant is Variant.CUDA:
        raise RequestRefused("`--base` and `--variant cuda` both name what to build on", hint="leave one of them out")
    if options.pip_config is not None and not options.pip_config.is_file():
        raise NotPossible(f"no file `{options.pip_config}`", hint="`--pip-config` takes a file such as pip.conf")
    base = options.base or (CUDA_BASE if options.variant is Variant.CUDA else None)
    name = check_name(options.name) if options.name else name_of(file=file, base=options.base, variant=options.variant)
    source = read_source(context, now)
    labels = {**source.labels, **({BASE_LABEL: base} if base else {})}
    # `latest` of this machine is the last build; the tags of a registry follow from the labels.
    tags = dict.fromkeys((*source.tags, LATEST))
    request = BuildRequest(
        context=context,
        file=file,
        tags=tuple(local_reference(name, tag) for tag in tags),
        platform=options.platform,
        arguments={"BASE": base} if base else {},
        labels=labels,
        pip_config=options.pip_config,
        extra=options.extra,
    )
    return BuildPlan(name=name, source=source, request=request, warnings=tuple(_warnings(options, source)))


def build(plan: BuildPlan, tool: Tool) -> LocalImage:
    """Build and return the image. Raises `WorkFailed`."""
    run_build(tool, build_command(tool, plan.request))
    return _get_image(tool, local_reference(plan.name))


def plan_reuse(plan: BuildPlan, registries: Sequence[ImageRegistry]) -> str | None:
    """Find the image of this very commit in a registry, by digest; None if it has to be built.

    Building a commit twice gives two digests, and the second could not be pushed.
    """
    if tag := plan.source.fixed_tag:
        for registry in registries:
            if manifest := registry.find_manifest(plan.name, tag):
                return registry.reference(plan.name, manifest.digest)
    return None


def reuse(plan: BuildPlan, tool: Tool, remote: str) -> LocalImage:
    """Fetch the image `remote` instead of building it."""
    if problem := run_quietly(pull_commands(tool, remote, plan.request.tags)):
        raise NotPossible(
            f"`{tool}` could not fetch `{remote}`", facts=problem.splitlines(), hint="build it: leave out `--reuse`"
        )
    return _get_image(tool, local_reference(plan.name))


def _get_image(tool: Tool, reference: str) -> LocalImage:
    image = find_image(tool, reference)
    if image is None:
        raise NotPossible(
            f"`{tool}` has no image `{reference}` after building it",
            hint="a builder that keeps its results elsewhere needs `-- --load`" if tool is Tool.DOCKER else None,
        )
    return image


def _warnings(options: BuildOptions, source: ImageSource) -> list[str]:
    warnings = []
    if options.base is not None and not is_pinned(options.base):
        warnings.append(f"base `{options.base}` is no fixed version: the same commit may give another image tomorrow")
    if source.commit is None:
        warnings.append(f"`{options.context}` is in no git repository: no tag will name a commit")
    elif source.dirty:
        warnings.append("the work tree differs from its commit: a push will carry the tag " + source.tags[0] + " alone")
    return warnings
