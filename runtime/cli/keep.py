"""`runtime keep`: take up jobs whose backend starts nothing again."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

from typer import Option

from runtime.cli.commands import OutputOption, StackOption
from runtime.cli.console import note
from runtime.cli.output import Columns, OutputFormat, print_list
from runtime.errors import RequestRefused
from runtime.units import count_noun, parse_duration

if TYPE_CHECKING:
    from collections.abc import Iterable

    from runtime.client.jobs.reconcile import KeptJob
    from runtime.config import Settings
    from runtime.jobs.plan import Target

SILENT = 3
COLUMNS: Columns = {
    "JOB": "job",
    "TARGET": "target",
    "OWNER": "owner",
    "DONE": "done",
    "SEEN": "seen",
    "NEXT": "next",
}


def keep(
    on: Annotated[
        list[str] | None, Option("--on", metavar="TARGET", help="Whose jobs; may be repeated. All targets by default.")
    ] = None,
    once: Annotated[bool, Option("--once", help="Look once and leave, as a timer needs it.")] = False,
    every: Annotated[str, Option(metavar="30s", help="Pause between two looks.")] = "30s",
    cluster: Annotated[
        str | None,
        Option(
            "--cluster",
            metavar="NAME",
            help="All jobs of this Ray cluster of the stack, whatever their targets are called.",
            show_default=False,
        ),
    ] = None,
    address: Annotated[
        str | None,
        Option(metavar="URL", help="Where the API of that cluster's head is reachable.", show_default=False),
    ] = None,
    stack: StackOption = None,
    output: OutputOption = OutputFormat.TEXT,
) -> int:
    """Start jobs again whose machine went, if their backend does not: this machine, and machines over ssh.

    A job that is gone, has runs without a result and was not cancelled goes on as its next attempt, by the order in
    its folder and with the budgets that are left. On Slurm and Kubernetes, which start jobs again themselves, this
    only clears the index of open jobs. Any number may run at once, anywhere that reaches the record root; nothing
    runs twice. With `--once`, exit code 3 means that a target did not answer, and nothing was concluded there.

    \b
    Examples:
      runtime keep                                    go on for ever, every 30 s, for all targets
      runtime keep --once --on gpu1 --on gpu2         from a timer
      runtime keep --once -o json
      runtime keep --once --cluster main --address http://127.0.0.1:8265     on its head
    """
    from runtime.client.jobs.targets import find_target, list_usable_targets
    from runtime.config import load_settings

    pause_s = parse_duration(every, field="every").total_seconds()
    if output is OutputFormat.JSON and not once:
        raise RequestRefused("`-o json` prints one look", hint="runtime keep --once -o json")
    settings = load_settings()
    if cluster is not None:
        if on:
            raise RequestRefused(
                "`--cluster` keeps all targets of a cluster, and `--on` names one", hint="name one of them"
            )
        return _keep_cluster(cluster, address, stack, settings, output, pause_s=None if once else pause_s)
    if address is not None or stack is not None:
        raise RequestRefused("`--address` and `--stack` belong to `--cluster NAME`", hint="add `--cluster NAME`")
    names = [name for text in on or () for name in text.split(",") if name]
    targets = [find_target(name, settings) for name in names] or list_usable_targets(settings, tell=note)
    said: set[str] = set()
    if once:
        rows, silent = _look(targets, settings, said)
        print_list(rows, COLUMNS, output)
        return SILENT if silent else 0
    while True:
        _tell(_look(targets, settings, said)[0], said)
        time.sleep(pause_s)


def _keep_cluster(
    key: str, address: str | None, stack: str | None, settings: Settings, output: OutputFormat, *, pause_s: float | None
) -> int:
    """Keep all jobs of a cluster, once without a pause."""
    from runtime.client.jobs.cluster_jobs import keep_cluster, open_cluster_jobs
    from runtime.errors import InfrastructureFailure, UnknownName
    from runtime.stack.find import find_stack

    outputs = find_stack(stack, settings=settings).outputs
    if key not in outputs.clusters:
        raise UnknownName("cluster", key, list(outputs.clusters), where=f"in stack `{outputs.stack}`")
    said: set[str] = set()
    with open_cluster_jobs(outputs, key, settings, address=address) as place:
        while True:
            rows: list[KeptJob] = []
            silent = True
            try:
                found = keep_cluster(place, settings, progress=lambda text: _once(text, said))
                rows, silent = list(found.jobs), bool(found.problems)
            except InfrastructureFailure as problem:
                _once(f"cluster `{key}` does not answer, nothing was done there: {problem.message}", said)
            if pause_s is None:
                print_list(rows, COLUMNS, output)
                return SILENT if silent else 0
            _tell(rows, said)
            time.sleep(pause_s)


def _look(targets: Iterable[Target], settings: Settings, said: set[str]) -> tuple[list[KeptJob], bool]:
    """Look at each target once; returns its open jobs, and whether one did not answer. Problems are noted, each once."""
    from runtime.client.jobs.reconcile import keep_target, list_strange_folders
    from runtime.client.jobs.targets import list_usable_targets, make_context, open_target
    from runtime.errors import InfrastructureFailure

    rows: list[KeptJob] = []
    silent = False
    names = {each.name for each in (*targets, *list_usable_targets(settings))}
    for target in targets:
        try:
            with open_target(target, make_context(settings)) as place:
                found = keep_target(place, settings, progress=note)
                rows += found.jobs
                silent = silent or bool(found.problems)
                for folder, count in list_strange_folders(place, names).items():
                    where = f"`{place.files.root}/{folder}`"
                    _once(f"{where} has {count_noun(count, 'open job')} of a target that has another name here", said)
        except InfrastructureFailure as problem:
            silent = True
            _once(f"target `{target.name}` does not answer, nothing was done there: {problem.message}", said)
        except RequestRefused as problem:
            # One target that cannot be used must not stop the jobs of the others.
            silent = True
            _once(f"target `{target.name}` cannot be used here, nothing was done there: {problem.message}", said)
    return rows, silent


def _tell(rows: Iterable[KeptJob], said: set[str]) -> None:
    """Note what was done, and what stays undone, once."""
    for each in rows:
        if each.done != "left":
            note(f"{each.job} on {each.target}: {each.done.replace('_', ' ')}; {each.seen}")
        elif each.next or each.owner is None:
            _once(
                f"{each.job} on {each.target}: left alone; {each.seen}" + (f"; {each.next}" if each.next else ""), said
            )


def _once(text: str, said: set[str]) -> None:
    if text not in said:
        said.add(text)
        note(text)
