"""`runtime fetch`: bring home what a job or a task wrote."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from runtime.cli.commands import OutputOption, StackOption
from runtime.cli.console import note
from runtime.cli.jobs import IndexOption, OnOption, is_job, open_job, short
from runtime.cli.output import Columns, OutputFormat, format_count, print_list, progress
from runtime.errors import InvalidValue, RuntimeFailure
from runtime.units import count_noun, format_size

if TYPE_CHECKING:
    from runtime.client.fetch import FetchedFile, FetchList

_NAMED = 5
"""How many of the folders that are left out are named."""
COLUMNS: Columns = {"FILE": "path", "SIZE": lambda one: format_size(one.size_bytes), "WHAT": "what"}


def fetch(
    what: Annotated[str, Argument(metavar="JOB|TASK|EXPERIMENT", help="A name, an id or its beginning, or `last`.")],
    to: Annotated[str | None, Argument(metavar="[DIR]", help="Folder; one named like the work by default.")] = None,
    index: IndexOption = None,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace files that differ.")] = False,
    on: OnOption = None,
    stack: StackOption = None,
    output: OutputOption = OutputFormat.TEXT,
) -> int:
    """Bring home what a job or a task wrote to its output folder, by the target's own transport.

    Of each run it is the attempt that counts; runs of an array go into a folder each, named by their index, and tasks of
    an experiment into one named by their key or id. A file that is there already and is the same stays; one that differs
    stays too and is named, unless `--overwrite`.

    \b
    Examples:
      runtime fetch j-91c0
      runtime fetch train-7b
      runtime fetch j-91c0 results --index 0-3,7
      runtime fetch t-3f2a results
      runtime fetch sweep
    """
    from runtime.client.fetch import check_name, list_outputs, list_task
    from runtime.jobs.indices import choose_indices

    if to == "":
        raise InvalidValue("folder", to, "a name or a path; `.` is the working directory", hint=f"runtime fetch {what}")
    if not is_job(what, on=on, stack=stack):
        from runtime.client.resolve_id import recall_last
        from runtime.stack.open import open_stack

        with open_stack(stack) as opened:
            last = recall_last(opened.settings.data_dir, opened.name)
            name, lists = list_task(what, opened.records, last=last)
        return _fetch(lists, Path(to or name), overwrite=overwrite, output=output)
    with open_job(what, on) as job:
        entry = job.entry()
        listed = list_outputs(job.files, entry, choose_indices(entry, index))
        if not listed:
            print_list([], COLUMNS, output)
            note(f"job {short(job.id)} wrote nothing to its output folder; `runtime status {short(job.id)}` says where")
            return 0
        folder = Path(to or check_name(f"{entry.name}-{short(job.id)}"))
        return _fetch([(job.files, listed)], folder, overwrite=overwrite, output=output)


def _fetch(lists: Sequence[FetchList], folder: Path, *, overwrite: bool, output: OutputFormat) -> int:
    from runtime.client.fetch import fetch, refuse_differing

    deep = [each for _, files in lists for each in files if each.too_deep]
    listed = [each for _, files in lists for each in files if not each.too_deep]
    done: list[FetchedFile] = []
    try:
        with progress("fetching", len(listed), "files") if listed else nullcontext() as bar:
            for files, each_list in lists:
                for each in fetch(files, each_list, folder, overwrite=overwrite):
                    done.append(each)
                    if bar is not None:
                        bar.advance()
    except RuntimeFailure as problem:
        left = f"{format_count(len(done))} of {count_noun(len(listed), 'file')} came before it"
        problem.facts = (*problem.facts, f"{left}, and stay in `{folder}`" if done else left)
        raise
    finally:
        print_list(done, COLUMNS, output)
    note(f"{count_noun(len(listed), 'file')}, {format_size(sum(each.size_bytes for each in listed))}, in {folder}")
    for one in deep[:_NAMED]:
        note(f"left out: `{_shorten(one.place)}` lies too deep; it stays where the command wrote it")
    if len(deep) > _NAMED:
        note(f"left out: {count_noun(len(deep) - _NAMED, 'more folder')} of this kind")
    refuse_differing(done, folder)
    return 0


def _shorten(name: str) -> str:
    return name if len(name) <= 200 else f"{name[:100]}…{name[-100:]}"
