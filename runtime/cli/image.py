"""`runtime image`: build images from the work tree, push them to every region, and see what lies there."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from runtime.cli.commands import OutputOption, StackOption, new_app
from runtime.cli.console import note, say
from runtime.cli.output import Columns, OutputFormat, print_json, print_list, progress
from runtime.images.build import (
    DEFAULT_FILE,
    DEFAULT_PLATFORM,
    BuildOptions,
    BuildPlan,
    Variant,
    plan_build,
    plan_reuse,
    reuse,
)
from runtime.images.build import build as build_image
from runtime.images.push import PushResult, ensure_all_pushed, find_targets, head_images, list_stored, plan_push
from runtime.images.push import push as push_image
from runtime.images.tools import Tool, build_command, find_tool, pull_commands
from runtime.units import format_size

if TYPE_CHECKING:
    from runtime.images.push import PushTarget
    from runtime.images.tools import LocalImage
    from runtime.outputs import StackOutputs

app = new_app("Build container images, push them to every region, and see what lies there.")

ToolOption = Annotated[Tool | None, Option("--tool", help="What builds and pushes; by default the first that works.")]
DryRunOption = Annotated[bool, Option("--dry-run", help="Print the commands and run none.")]
RegistryOption = Annotated[
    str | None, Option("--registry", metavar="NAME", help="Registry of the stack; by default `images`.")
]
RegionOption = Annotated[list[str] | None, Option("--region", metavar="REGION", help="Only there; may be repeated.")]


@app.command()
def build(
    extra: Annotated[list[str] | None, Argument(metavar="[-- ARGS...]", help="Passed on to the tool.")] = None,
    variant: Annotated[Variant, Option(help="`cuda` builds on NVIDIA's image.")] = Variant.CPU,
    base: Annotated[str | None, Option(metavar="IMAGE", help="Build on an image of yours.")] = None,
    file: Annotated[Path | None, Option(metavar="FILE", help=f"By default {DEFAULT_FILE}.")] = None,
    context: Annotated[Path, Option(metavar="FOLDER", help="A checkout of research-runtime.")] = Path(),
    name: Annotated[str | None, Option(metavar="NAME", help="By default that of the file: worker, cluster.")] = None,
    platform: Annotated[str, Option(metavar="OS/ARCH")] = DEFAULT_PLATFORM,
    pip_config: Annotated[
        Path | None, Option(metavar="FILE", help="pip's settings for the build, kept out of every layer.")
    ] = None,
    reuse_there: Annotated[
        bool, Option("--reuse", help="Fetch this commit's image from the stack's registries if it is there.")
    ] = False,
    stack: StackOption = None,
    tool: ToolOption = None,
    dry_run: DryRunOption = False,
    output: OutputOption = OutputFormat.TEXT,
) -> None:
    """Build an image from the work tree. It is called by its commit (`-dirty` if a file differs), the date and `latest`.

    \b
    Examples:
      runtime image build                                       the worker, for CPUs
      runtime image build --variant cuda
      runtime image build --base registry.example/lab/torch:2.8.0
      runtime image build --file docker/cluster.Dockerfile      Ray and TPUs
      runtime image build -- --no-cache
    """
    options = BuildOptions(
        context=context,
        file=file,
        name=name,
        variant=variant,
        base=base,
        platform=platform,
        pip_config=pip_config,
        extra=tuple(extra or ()),
    )
    plan = plan_build(options, datetime.now(UTC))
    for warning in plan.warnings:
        note(f"note: {warning}")
    chosen = find_tool(tool)
    there = plan_reuse(plan, [target.registry for target in _targets(stack)[1]]) if reuse_there else None
    if dry_run:
        for command in (
            pull_commands(chosen, there, plan.request.tags) if there else [build_command(chosen, plan.request)]
        ):
            say(str(command))
        return
    if there:
        note(f"this commit's image is there already: {there}")
    image = reuse(plan, chosen, there) if there else build_image(plan, chosen)
    _report_built(plan, image, chosen, output)


@app.command()
def push(
    name: Annotated[str, Argument(metavar="[NAME]", help="What `build` called it.")] = "worker",
    tag: Annotated[str, Option(metavar="TAG", help="Which of this machine's builds.")] = "latest",
    stack: StackOption = None,
    registry: RegistryOption = None,
    region: RegionOption = None,
    tool: ToolOption = None,
    dry_run: DryRunOption = False,
    output: OutputOption = OutputFormat.TEXT,
) -> None:
    """Push an image to the registry of every region, and print its digests.

    What is there already is left alone. A commit's tag is never moved: if it names another image anywhere, nothing is
    pushed. Credentials are those of the tool: `gcloud auth configure-docker HOST`, `docker login`, `podman login`.

    \b
    Examples:
      runtime image push --stack marin-us-west4
      runtime image push cluster --stack marin-us-west4 --region us-west4
      runtime image push --dry-run
    """
    outputs, targets = _targets(stack, registry, region)
    chosen = find_tool(tool)
    plan = plan_push(name, chosen, targets, tag=tag)
    if dry_run:
        for step in plan.steps:
            for command in plan.commands(chosen, step):
                say(str(command))
        ensure_all_pushed(name, push_image(replace(plan, steps=()), chosen))
        if not any(step.tags for step in plan.steps):
            note("all of it is there already")
        return
    with progress(f"pushing {name}", total=len(plan.steps), unit="regions") as bar:
        results = push_image(plan, chosen, advance=bar.advance)
    columns: Columns = {
        "REGION": "region",
        "STATE": "state",
        "IMAGE": "image",
        "TAGS": lambda pushed: ", ".join(pushed.tags),
    }
    print_list(results, columns, output)
    _report_pin(outputs, name, results)
    ensure_all_pushed(name, results)


@app.command("list")
def list_(
    names: Annotated[
        list[str] | None,
        Argument(metavar="[NAME...]", help="By default worker, worker-cuda, cluster and what heads run."),
    ] = None,
    stack: StackOption = None,
    registry: RegistryOption = None,
    region: RegionOption = None,
    output: OutputOption = OutputFormat.TEXT,
) -> None:
    """List the images of each region: tags, digest, size, age, and the clusters whose head is pinned to it.

    \b
    Examples:
      runtime image list --stack marin-us-west4
      runtime image list cluster -o json | jq -r '.[0].image'
    """
    outputs, targets = _targets(stack, registry, region)
    columns: Columns = {
        "NAME": "name",
        "REGION": "region",
        "TAGS": lambda stored: ", ".join(stored.tags),
        "DIGEST": "digest",
        "SIZE": lambda stored: format_size(stored.size_bytes),
        "BUILT": "created",
        "IN USE": lambda stored: ", ".join(stored.in_use),
    }
    print_list(list_stored(outputs, targets, names or []), columns, output)


def _targets(
    stack: str | None, registry: str | None = None, regions: list[str] | None = None
) -> tuple[StackOutputs, list[PushTarget]]:
    from runtime.stack.find import find_stack

    outputs = find_stack(stack).outputs
    return outputs, find_targets(outputs, registry=registry, regions=regions or ())


def _report_built(plan: BuildPlan, image: LocalImage, tool: Tool, output: OutputFormat) -> None:
    if output is OutputFormat.JSON:
        print_json(
            {
                "name": plan.name,
                "tool": tool,
                "commit": plan.source.commit,
                "dirty": plan.source.dirty,
                "images": list(plan.request.tags),
                "ids": sorted(image.digests),
            }
        )
        return
    for reference in plan.request.tags:
        say(reference)
    note(f"built with {tool}; `runtime image push {plan.name}` takes it to the registries of a stack")


def _report_pin(outputs: StackOutputs, name: str, results: list[PushResult]) -> None:
    """Print the line for the stack file, for an image that heads run."""
    if name != "cluster" and name not in head_images(outputs):
        return
    there = [each for each in results if each.digest]
    nearest = next((each for each in there if each.region == outputs.region), there[0] if there else None)
    if nearest is not None:
        heads = ", ".join(f"heads.{head}.image" for head in sorted(outputs.clusters)) or "heads.NAME.image"
        note(f"to run it, set {heads} in Pulumi.{outputs.stack}.yaml:")
        note(f"  image: {nearest.image}")
