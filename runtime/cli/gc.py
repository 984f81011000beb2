"""`runtime gc`: remove what jobs left that ended long ago."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

from typer import Option

from runtime.cli.cancel import LEFT_OVER
from runtime.cli.commands import OutputOption, YesOption
from runtime.cli.console import note
from runtime.cli.jobs import OthersOption
from runtime.cli.output import Columns, OutputFormat, confirm, format_count, print_list
from runtime.errors import InfrastructureFailure
from runtime.units import count_noun, format_size, parse_duration

if TYPE_CHECKING:
    from runtime.client.jobs.gc import Garbage
    from runtime.client.jobs.targets import OpenTarget
    from runtime.config import Settings

COLUMNS: Columns = {
    "KIND": "kind",
    "NAME": "name",
    "TARGET": "target",
    "WHAT": lambda one: one.what[:40],
    "STATE": "state",
    "ENDED": "ended_at",
    "SIZE": lambda one: format_size(one.size_bytes),
}


def gc(
    on: Annotated[
        list[str] | None, Option(metavar="TARGET[,TARGET…]", help="Whose record roots to clear.  [default: local]")
    ] = None,
    older_than: Annotated[str, Option(metavar="30d", help="Ended at least so long ago.")] = "30d",
    dry_run: Annotated[bool, Option("--dry-run", help="List what would go, and remove nothing.")] = False,
    others: OthersOption = False,
    yes: YesOption = False,
    output: OutputOption = OutputFormat.TEXT,
) -> int:
    """Remove what your jobs left on a target: folders with logs and outputs, marks, trees that none uses any more.

    Only jobs that have ended, as long ago as you say, and yours unless `--others`; never what runs. What a
    job wrote to its output folder goes with it: `runtime fetch` first. The same launch starts a new job afterwards.

    Jobs that the backend has and the record root does not are found by the backend's own labels, names or process list:
    `native` in the list. Nothing else would end one that runs, so it is ended, after it was listed as `running`.

    \b
    Examples:
      runtime gc --dry-run
      runtime gc --older-than 7d --yes
      runtime gc --on hpc,lab --older-than 90d
    """
    from runtime.client.jobs.gc import find_garbage
    from runtime.client.jobs.targets import find_target, make_context, open_target
    from runtime.config import load_settings
    from runtime.jobs.plan import owner_name

    span = parse_duration(older_than, field="older-than")
    settings, owner = load_settings(), None if others else owner_name()
    names = [name for each in on or ["local"] for name in each.split(",") if name]
    targets = [find_target(name, settings) for name in dict.fromkeys(names)]
    found: dict[str, list[Garbage]] = {}
    with contextlib.ExitStack() as stack:
        places = [stack.enter_context(open_target(each, make_context(settings))) for each in targets]
        for place in places:
            try:
                garbage = find_garbage(place, owner=owner, older_than=span, now=datetime.now(UTC), tell=note)
            except InfrastructureFailure as problem:
                if len(places) == 1:
                    raise
                note(f"target `{place.target.name}` does not answer: {problem.message}")
                continue
            found[place.target.name] = garbage
        everything = [each for garbage in found.values() for each in garbage]
        print_list(everything, COLUMNS, output)
        if everything and not dry_run:
            confirm(_question(everything, list(found)), yes=yes)
        kept: list[Garbage] = []
        for place in places if not dry_run else ():
            if place.target.name in found:
                kept += _remove(place, found[place.target.name], owner, settings)
    done, gone = "would go" if dry_run else "removed", [each for each in everything if each not in kept]
    note(f"{format_count(len(gone))} {done}, {format_size(sum(each.size_bytes for each in gone))}")
    return LEFT_OVER if kept or len(found) < len(places) else 0


def _question(found: Sequence[Garbage], targets: Sequence[str]) -> str:
    size, runs = (
        format_size(sum(each.size_bytes for each in found)),
        [each for each in found if each.kind == "native" and each.state],
    )
    where = ", ".join(f"`{name}`" for name in targets)
    ends = f", and end {count_noun(len(runs), 'job')} of the backend that no record has" if runs else ""
    return f"remove {format_count(len(found))} things with {size} from {where}{ends}"


def _remove(place: OpenTarget, found: Sequence[Garbage], owner: str | None, settings: Settings) -> list[Garbage]:
    """Remove the garbage of one target, and return what could not be removed."""
    from runtime.client.jobs.gc import fold, remove_all
    from runtime.client.jobs.job_cache import drop_jobs, forget_job
    from runtime.jobs.plan import owner_name

    kept = []
    for each, left_over in remove_all(found, place, owner=owner_name()):
        for line in left_over:
            note(f"left over: {line}")
        if left_over:
            kept.append(each)
        elif each.kind in ("job", "native"):
            forget_job(each.name, settings)
    drop_jobs(place.target, [each.name for each in found if each not in kept], settings)
    if folded := fold(place, owner=owner):
        note(f"{count_noun(folded, 'ended job')} {'is' if folded == 1 else 'are'} in fewer files now")
    return kept
