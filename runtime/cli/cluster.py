"""`runtime cluster`: look after Ray clusters on TPUs."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated

from typer import Option

from runtime.cli.commands import OutputOption, StackOption, new_app
from runtime.cli.printing import note
from runtime.cli.show import Columns, Output, format_count, print_list
from runtime.config import load_settings
from runtime.errors import NotPossible, UnknownName
from runtime.stack.find import find_stack
from runtime.units import count_noun, parse_duration
from runtime.values import dataclass

if TYPE_CHECKING:
    from runtime.clusters.reaper import Reaper
    from runtime.outputs import ClusterOutput, StackOutputs

app = new_app("Look after Ray clusters on TPUs.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReapRow:
    """A node, or a queued resource, that was or would be removed."""

    cluster: str
    name: str
    pool: str | None
    why: str
    removed: bool
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReapReport:
    cluster: str
    dry_run: bool
    removed: tuple[ReapRow, ...]
    """With `dry_run`, the rows that would be removed."""
    failed: tuple[ReapRow, ...]
    live: Mapping[str, int]
    max: Mapping[str, int]


@app.callback()
def _group() -> None:
    """Look after Ray clusters on TPUs."""


@app.command()
def reap(
    cluster: Annotated[str | None, Option(metavar="NAME", help="Only this one.")] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Say what would be removed, and remove nothing.")] = False,
    longest_creation: Annotated[
        str, Option(metavar="TIME", help="A node that is made for longer counts as dead.")
    ] = "1h",
    stack: StackOption = None,
    output: OutputOption = Output.TEXT,
) -> int:
    """Remove TPU nodes that were preempted or never came up, and that Ray no longer counts.

    The head of each cluster does this every two minutes. Exit code 3 if something could not be removed.

    \b
    Examples:
      runtime cluster reap --stack marin-us-west4 --dry-run
      runtime cluster reap --cluster main -o json
    """
    from runtime.clusters.reaper import Reaper
    from runtime.stack.google_api import GoogleApi

    bound = parse_duration(longest_creation, field="--longest-creation")
    settings = load_settings()
    outputs = find_stack(stack, settings=settings).outputs
    chosen = _choose_clusters(outputs, cluster)
    project = _project(outputs)
    api = GoogleApi(server=settings.google_api)
    reports = []
    for name, each in chosen.items():
        reaper = Reaper(api, project=project, zone=each.zone)
        reports.append(_reap(name, each, reaper, dry_run=dry_run, longest_creation=bound))
    _print_reports(reports, output)
    return 3 if any(report.failed for report in reports) else 0


def _reap(
    name: str, cluster: ClusterOutput, reaper: Reaper, *, dry_run: bool, longest_creation: timedelta
) -> ReapReport:
    plan = reaper.plan(cluster.cluster_name, datetime.now(UTC), longest_creation=longest_creation)
    rows = []
    for dead in plan.dead:
        error = None if dry_run else reaper.remove(dead)
        removed = not dry_run and error is None
        rows.append(ReapRow(cluster=name, name=dead.name, pool=dead.pool, why=dead.why, removed=removed, error=error))
    return ReapReport(
        cluster=name,
        dry_run=dry_run,
        removed=tuple(row for row in rows if row.error is None),
        failed=tuple(row for row in rows if row.error is not None),
        live=dict(plan.live),
        max={
            pool: int(values.get("max", 0)) if isinstance(values, Mapping) else 0
            for pool, values in cluster.pools.items()
        },
    )


def _print_reports(reports: list[ReapReport], output: Output) -> None:
    if output is Output.JSON:
        print_list(reports, {}, output)
    else:
        rows = [row for report in reports for row in (*report.removed, *report.failed)]
        columns: Columns = {
            "CLUSTER": "cluster",
            "NODE": "name",
            "POOL": "pool",
            "WHY": "why",
            "RESULT": lambda row: row.error or ("removed" if row.removed else "would be removed"),
        }
        print_list(rows, columns, output)
    for report in reports:
        live, most = sum(report.live.values()), sum(report.max.values())
        removed = f"{format_count(len(report.removed))} {'to remove' if report.dry_run else 'removed'}"
        failed = f", {format_count(len(report.failed))} could not be removed" if report.failed else ""
        beyond = ": more than the pools allow" if live > most else ""
        nodes = f"{format_count(live)} of at most {count_noun(most, 'node')} live{beyond}"
        note(f"{report.cluster}: {removed}{failed}; {nodes}")


def _choose_clusters(outputs: StackOutputs, name: str | None) -> dict[str, ClusterOutput]:
    if not outputs.clusters:
        raise NotPossible(
            f"stack `{outputs.stack}` has no Ray cluster",
            hint="`runtime stack list` shows the stacks that can be named",
        )
    if name is None:
        return dict(outputs.clusters)
    if name not in outputs.clusters:
        raise UnknownName("cluster", name, outputs.clusters, where=f"in stack `{outputs.stack}`")
    return {name: outputs.clusters[name]}


def _project(outputs: StackOutputs) -> str:
    if outputs.project is None:
        raise NotPossible(
            f"the contract of stack `{outputs.stack}` names no Google project",
            hint=f"run `pulumi up --stack {outputs.stack}`, then `runtime stack pull`",
        )
    return outputs.project
