"""`runtime gc`: remove what jobs left that ended long ago."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from typer import Option

from runtime.cli.cancel import LEFT_OVER
from runtime.cli.commands import OutputOption, YesOption
from runtime.cli.jobs import OthersOption
from runtime.cli.printing import note
from runtime.cli.show import Columns, Output, confirm, format_count, print_list
from runtime.units import count_noun, format_size, parse_duration

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
    on: Annotated[str, Option(metavar="TARGET", help="Whose record root to clear.")] = "local",
    older_than: Annotated[str, Option(metavar="30d", help="Ended at least so long ago.")] = "30d",
    dry_run: Annotated[bool, Option("--dry-run", help="List what would go, and remove nothing.")] = False,
    others: OthersOption = False,
    yes: YesOption = False,
    output: OutputOption = Output.TEXT,
) -> int:
    """Remove what your jobs left on a target: folders with logs and outputs, marks, trees that none uses any more.

    Only jobs that have ended, as long ago as you say, and yours unless `--others`; never what runs. What a
    job wrote to its output folder goes with it: `runtime fetch` first. On Kubernetes its Jobs go too, and Jobs of
    yours that have ended and are written down nowhere. The same launch starts a new job afterwards.

    \b
    Examples:
      runtime gc --dry-run
      runtime gc --older-than 7d --yes
      runtime gc --on hpc --older-than 90d
    """
    from runtime.client.jobs.gc import find_garbage, fold, remove
    from runtime.client.jobs.known import drop_jobs, forget_job
    from runtime.client.jobs.targets import find_target, make_context, open_target
    from runtime.config import load_settings
    from runtime.jobs.plan import owner_name

    span = parse_duration(older_than, field="older-than")
    settings, me = load_settings(), owner_name()
    owner = None if others else me
    with open_target(find_target(on, settings), make_context(settings)) as place:
        found = find_garbage(place, owner=owner, older_than=span, now=datetime.now(UTC))
        if found and not dry_run:
            size = format_size(sum(each.size_bytes for each in found))
            confirm(f"remove {format_count(len(found))} things with {size} from `{on}`", yes=yes)
        print_list(found, COLUMNS, output)
        kept = []
        for each in () if dry_run else found:
            left_over = remove(each, place, owner=me)
            for line in left_over:
                note(f"left over: {line}")
            if left_over:
                kept.append(each)
            elif each.kind == "job":
                forget_job(each.name, settings)
        drop_jobs(place.target, [each.name for each in found if each not in kept and not dry_run], settings)
        if folded := 0 if dry_run else fold(place, owner=owner):
            note(f"{count_noun(folded, 'ended job')} {'is' if folded == 1 else 'are'} in fewer files now")
    done, gone = "would go" if dry_run else "removed", [each for each in found if each not in kept]
    note(f"{format_count(len(gone))} {done}, {format_size(sum(each.size_bytes for each in gone))}")
    return LEFT_OVER if kept else 0
