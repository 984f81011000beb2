"""`runtime fetch`: bring home what a job or a task wrote."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from runtime.cli.commands import OutputOption, StackOption
from runtime.cli.jobs import OnOption, is_job, open_job, short
from runtime.cli.show import Output, format_count, format_size, note, print_list, progress

if TYPE_CHECKING:
    from runtime.fetching import Fetched

COLUMNS = {"FILE": lambda one: one.path, "SIZE": lambda one: format_size(one.size_bytes), "WHAT": lambda one: one.what}


def fetch(
    what: Annotated[str, typer.Argument(metavar="JOB|TASK", help="An id or its beginning.")],
    to: Annotated[
        Path | None,
        typer.Argument(metavar="[DIR]", help="Folder; one named like the job by default.", show_default=False),
    ] = None,
    index: Annotated[
        list[int] | None,
        typer.Option("--index", metavar="I", help="Only this run of a job's array.", show_default=False),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files that differ.")] = False,
    on: OnOption = None,
    stack: StackOption = None,
    output: OutputOption = Output.TEXT,
) -> int:
    """Bring home what a job or a task wrote to its output folder, by the target's own transport.

    Of each run it is the attempt that counts; runs of an array go into a folder each, named by their index. A file that
    is there already and is the same stays; one that differs stays too and is named, unless `--overwrite`.

    \b
    Examples:
      runtime fetch j-91c0
      runtime fetch j-91c0 results --index 3
      runtime fetch t-3f2a results
    """
    from runtime.fetching import fetch_job, fetch_task, list_outputs, refuse_differing

    if not is_job(what):
        copied = fetch_task(what, to, stack=stack, overwrite=overwrite)
        print_list(copied, COLUMNS, output)
        refuse_differing(copied, to or Path(what))
        return 0
    with open_job(what, on) as job:
        folder = to or Path(f"{job.entry().name}-{short(job.id)}")
        listed = list_outputs(job, index or ())
        total = sum(each.size_bytes for each in listed)
        done: list[Fetched] = []
        with progress("fetching", len(listed), "files") if listed else nullcontext() as bar:
            for each in fetch_job(job, listed, folder, overwrite=overwrite):
                done.append(each)
                if bar is not None:
                    bar.advance()
    print_list(done, COLUMNS, output)
    if not listed:
        note(
            f"job {short(job.id)} wrote nothing to its output folder; `runtime status {short(job.id)}` says where it is"
        )
    else:
        note(f"{format_count(len(listed))} files, {format_size(total)}, in {folder}")
    refuse_differing(done, folder)
    return 0
