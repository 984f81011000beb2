"""`runtime import`: know the jobs that a bundle submitted."""

from __future__ import annotations

from typing import Annotated

from typer import Argument, Option

from runtime.cli.commands import OutputOption
from runtime.cli.console import note
from runtime.cli.jobs import short
from runtime.cli.output import Columns, OutputFormat, print_list

COLUMNS: Columns = {"JOB": "job", "NAME": "name", "TARGET": "target", "NATIVE": lambda one: ",".join(one.native_ids)}


def import_(
    folder: Annotated[str, Argument(metavar="DIR", help="The bundle, as the target's machine sees it.")],
    on: Annotated[str, Option(metavar="TARGET", help="Where its submit.sh was run.")],
    output: OutputOption = OutputFormat.TEXT,
) -> int:
    """Know the jobs that a bundle submitted, where nothing of ours was at hand.

    `runtime launch --export DIR` makes a bundle; copied to a cluster, its submit.sh submits it there. Afterwards status,
    logs, fetch and cancel work as for any other job.

    \b
    Examples:
      runtime launch --on hpc -f job.yaml --export bundle
      runtime import /scratch/ada/bundle --on hpc
    """
    from runtime.client.jobs.bundles import import_bundle
    from runtime.config import load_settings

    found = import_bundle(folder, on, load_settings())
    print_list(found, COLUMNS, output)
    note(f"`runtime status {short(found[0].job)}` shows it")
    return 0
