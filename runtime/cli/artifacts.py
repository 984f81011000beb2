"""`runtime artifacts`: files and folders that tasks and jobs save as they run, listed, brought home, and put for reuse."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from runtime.cli.commands import OutputOption, StackOption, new_app
from runtime.cli.console import note, say
from runtime.cli.output import Columns, OutputFormat, print_json, print_list, progress
from runtime.errors import InvalidValue, RequestRefused
from runtime.units import count_noun, format_size, format_time

if TYPE_CHECKING:
    from runtime.client.artifacts import ArtifactInfo
    from runtime.client.jobs.artifacts import RunArtifact
    from runtime.client.jobs.handle import JobHandle

app = new_app("Files and folders that tasks and jobs save as they run, by tag.")

WhatArgument = Annotated[
    str, Argument(metavar="EXPERIMENT|TASK|JOB[.INDEX]", help="A name, an id or its beginning, or `last`.")
]
OnOption = Annotated[str | None, Option(metavar="TARGET", help="The job of that name on this target.")]

COLUMNS: Columns = {
    "TAG": "tag",
    "TASK": lambda one: one.task and one.task[:14],
    "KEY": "key",
    "STATE": "state",
    "FILES": "files",
    "SIZE": lambda one: format_size(one.size_bytes),
    "SAVED": lambda one: one.saved_at and format_time(one.saved_at),
}

JOB_COLUMNS: Columns = {
    "TAG": "tag",
    "RUN": "index",
    "STATE": "state",
    "FILES": "files",
    "SIZE": lambda one: format_size(one.size_bytes),
    "SAVED": lambda one: one.saved_at and format_time(one.saved_at),
}


def _open_job(what: str, on: str | None, stack: str | None) -> tuple[JobHandle, int | None] | None:
    """The job that `what` means, and the run if it names one; None if it means no job."""
    from runtime.cli.jobs import is_job, open_job
    from runtime.client.jobs.artifacts import split_run

    name, index = split_run(what)
    if is_job(name, on=on, stack=stack, put=index is None):
        return open_job(name, on), index
    if on is not None:
        raise RequestRefused(f"`--on` is for the jobs of a target, and `{what}` is no job", hint="leave `--on` out")
    return None


@app.command("list")
def list_(
    what: WhatArgument, on: OnOption = None, stack: StackOption = None, output: OutputOption = OutputFormat.TEXT
) -> None:
    """List the artifacts of a task or a job, or of an experiment with all its tasks.

    `final` is what the attempt that succeeded left, `saved` the newest version so far of a task or run that has not
    succeeded, and `put` came from `runtime artifacts put`. What one that succeeded left is `damaged` if it cannot be read.

    \b
    Examples:
      runtime artifacts list last
      runtime artifacts list j-91c0
      runtime artifacts list sweep -o json | jq -r '.[] | [.task, .tag, .version] | @tsv'
    """
    from runtime.client.artifacts import list_artifacts
    from runtime.client.resolve_id import recall_last
    from runtime.stack.open import open_stack

    if named := _open_job(what, on, stack):
        from runtime.client.jobs.artifacts import list_artifacts as list_of_job

        with named[0] as job:
            of_runs = list_of_job(job, named[1])
            print_list(of_runs, JOB_COLUMNS, output)
            for run in of_runs:
                if run.state == "damaged":
                    note(f"`{run.tag}` of run {run.index}: {run.left_out}")
            if not of_runs:
                note(f"nothing of {what} has an artifact; `runtime launch --capture PATH:TAG` saves them")
        return
    with open_stack(stack) as opened:
        found = list_artifacts(what, opened.records, last=recall_last(opened.settings.data_dir, opened.name))
        print_list(found, COLUMNS, output)
        for each in found:
            if each.state == "damaged":
                note(f"`{each.tag}` of `{each.task}`: {each.left_out}")
        if not found:
            note(f"nothing of {what} has an artifact; `runtime submit --capture PATH:TAG` saves them")


@app.command("get")
def get(
    what: WhatArgument,
    tag: Annotated[str, Argument(metavar="TAG")],
    to: Annotated[
        str | None, Argument(metavar="[DIR]", help="A folder, new or empty; named like the tag by default.")
    ] = None,
    on: OnOption = None,
    stack: StackOption = None,
    output: OutputOption = OutputFormat.TEXT,
) -> None:
    """Bring an artifact home. The folder appears whole or not at all; prints the artifact's path.

    Of a task or job that runs, it is the newest version so far.

    \b
    Examples:
      runtime artifacts get sweep model
      runtime artifacts get j-91c0.3 model
      runtime artifacts get t-3f2a model results/model
    """
    from runtime.client.artifacts import find_artifact, get_artifact
    from runtime.client.resolve_id import recall_last
    from runtime.stack.open import open_stack

    if to == "":
        raise InvalidValue("folder", to, "a name or a path", hint=f"runtime artifacts get {what} {tag}")
    info: ArtifactInfo | RunArtifact
    if named := _open_job(what, on, stack):
        from runtime.client.jobs import artifacts as of_jobs

        with named[0] as job:
            info = of_jobs.find_artifact(job, tag, named[1])
            with progress(f"getting {tag}", info.files, "files") as bar:
                path = of_jobs.get_artifact(job, info, Path(to or tag), progress=lambda _: bar.advance())
    else:
        with open_stack(stack) as opened:
            last = recall_last(opened.settings.data_dir, opened.name)
            info = find_artifact(what, tag, opened.records, last=last)
            with progress(f"getting {tag}", info.files, "files") as bar:
                path = get_artifact(info, Path(to or tag), opened.records, progress=lambda _: bar.advance())
    if output is OutputFormat.JSON:
        print_json({"tag": tag, "version": info.version, "path": str(path), "size_bytes": info.size_bytes})
        return
    say(str(path))
    note(f"{count_noun(info.files, 'file')}, {format_size(info.size_bytes)}, {info.state}")


@app.command("put")
def put(
    path: Annotated[str, Argument(metavar="PATH", help="A file or a folder.")],
    tag: Annotated[str | None, Option("--tag", metavar="TAG", help="Its tag; the name of the file by default.")] = None,
    experiment: Annotated[
        str, Option("--experiment", "-e", metavar="NAME", help="The experiment that it belongs to.")
    ] = "default",
    stack: StackOption = None,
    output: OutputOption = OutputFormat.TEXT,
) -> None:
    """Save a file or folder of this machine for tasks to reuse, and print what `--reuse` takes.

    \b
    Examples:
      runtime artifacts put weights --tag base --experiment sweep
      runtime submit --reuse sweep/base:base -- python train.py --from artifacts/base
    """
    from runtime.client.artifacts import put_artifact
    from runtime.errors import InvalidValue
    from runtime.stack.open import open_stack

    if not path:
        raise InvalidValue("path", path, "a file or a folder; `.` is the current one")
    place = Path(path).expanduser()
    with open_stack(stack) as opened:
        info = put_artifact(place, tag or place.resolve().name, experiment, opened.records)
    if output is OutputFormat.JSON:
        print_json(info)
        return
    say(f"{experiment}/{info.tag}")
    note(f"{count_noun(info.files, 'file')}, {format_size(info.size_bytes)}")
    if info.left_out:
        note(f"left out: {info.left_out}")
