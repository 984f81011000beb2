"""`runtime cluster reap`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from runtime.cli.clusters.common import ClusterOption, open_clusters
from runtime.cli.commands import OutputOption, StackOption
from runtime.cli.console import note
from runtime.cli.output import Columns, OutputFormat, format_count, print_list
from runtime.clusters.pools import read_pools
from runtime.clusters.reap_policy import Suspicion
from runtime.units import count_noun, format_time, parse_duration

if TYPE_CHECKING:
    from runtime.clusters.reap_policy import DeadResource
    from runtime.clusters.reaper import ReapRun


@dataclass(frozen=True, slots=True, kw_only=True)
class ReapRow:
    """A node, or a queued resource, that was or would be removed."""

    cluster: str
    name: str
    pool: str | None
    why: str
    removed: bool
    gone: bool = False
    """Whether Google no longer lists it; a removed one that it lists is being deleted."""
    error: str | None = None
    again: str | None = None
    """For a member, the command that makes it again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingRow:
    """A node that is removed at `until` unless it changes."""

    cluster: str
    name: str
    pool: str | None
    why: str
    until: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class ReapReport:
    cluster: str
    dry_run: bool
    removed: tuple[ReapRow, ...]
    """With `dry_run`, the rows that would be removed."""
    failed: tuple[ReapRow, ...]
    waiting: tuple[WaitingRow, ...]
    live: Mapping[str, int]
    max: Mapping[str, int]
    error: str | None = None
    """Why the lists could not be read."""
    no_heads: str | None = None
    """Why heads cannot be listed; then no node was looked at for its head."""
    waits_until: datetime | None = None
    """The time until which the zone is left alone, because Google refused."""


def reap(
    cluster: ClusterOption = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Say what would be removed, and remove nothing.")] = False,
    longest_creation: Annotated[
        str, Option(metavar="TIME", help="A node that is made for longer counts as dead.")
    ] = "1h",
    longest_deletion: Annotated[
        str, Option(metavar="TIME", help="A deletion that takes longer is asked for again.")
    ] = "15m",
    longest_wait: Annotated[
        str, Option(metavar="TIME", help="For how long a slice may lack a host, and a node its head.")
    ] = "10m",
    state: Annotated[
        Path | None, Option(metavar="FOLDER", help="Where a run notes what the next has to know.", show_default=False)
    ] = None,
    metrics_file: Annotated[
        Path | None, Option(metavar="FILE", help="Write numbers for Prometheus to it.", show_default=False)
    ] = None,
    stack: StackOption = None,
    output: OutputOption = OutputFormat.TEXT,
) -> int:
    """Remove TPU nodes that will never work again.

    Ray does not remove them: nodes that were preempted, that never came up, that an older head or a destroyed stack left
    behind, slices that lack a host, deletions that hang, and queued resources that failed. The head of each cluster does
    this every 45 seconds. Exit code 3 if something could not be removed.

    \b
    Examples:
      runtime cluster reap --stack marin-us-west4 --dry-run
      runtime cluster reap --cluster main -o json
      runtime cluster reap --metrics-file /var/lib/node_exporter/reaper.prom
    """
    from runtime.clusters.metrics import ClusterMetrics, write_metrics
    from runtime.clusters.reap_policy import ReapTimes
    from runtime.clusters.reaper import reap_once
    from runtime.clusters.reaper_state import ReaperState, load_memory, save_memory, share_pause

    wait = parse_duration(longest_wait, field="--longest-wait")
    bounds = ReapTimes(
        creation=parse_duration(longest_creation, field="--longest-creation"),
        deletion=parse_duration(longest_deletion, field="--longest-deletion"),
        incomplete=wait,
        headless=wait,
    )
    chosen = open_clusters(stack, cluster)
    folder = state or chosen.settings.cache_dir / "clusters"
    began = time.monotonic()
    reports, measured, changed = [], [], {}
    zones: dict[Path, ReaperState] = {}
    for name, each in chosen.clusters.items():
        memory_file = folder / f"{chosen.project}-{each.cluster_name}.json"
        before = load_memory(memory_file)
        zone_file = folder / "zones" / f"{chosen.project}-{each.zone}.json"
        zone = zones.get(zone_file) or load_memory(zone_file)
        before = share_pause(before, zone)
        run, after = reap_once(
            chosen.reaper(each), each.cluster_name, before, datetime.now(UTC), bounds=bounds, dry_run=dry_run
        )
        zones[zone_file] = share_pause(ReaperState(), after)
        if not dry_run and after != before:
            changed[memory_file] = after
        if not dry_run and zones[zone_file] != zone:
            changed[zone_file] = zones[zone_file]
        most = {pool.name: pool.max for pool in read_pools(each)}
        measured.append(ClusterMetrics(cluster=each.cluster_name, max=most, run=run, memory=after))
        reports.append(_report(name, run, most, dry_run=dry_run))
    took = time.monotonic() - began
    _print_reports(reports, output)
    with contextlib.ExitStack() as writes:  # each is done, whichever fails
        if metrics_file is not None and not dry_run:
            writes.callback(write_metrics, metrics_file, measured, datetime.now(UTC), took)
        for file, memory in changed.items():
            writes.callback(save_memory, file, memory)
    return 3 if any(report.failed or report.error for report in reports) else 0


def _report(name: str, run: ReapRun, most: Mapping[str, int], *, dry_run: bool) -> ReapReport:
    plan = run.plan

    def row(dead: DeadResource, **more: Any) -> ReapRow:
        return ReapRow(cluster=name, name=dead.name, pool=dead.pool, why=dead.why, again=dead.again, **more)

    if dry_run:
        rows = [row(each, removed=False) for each in (plan.dead if plan else ())]
    else:
        rows = [row(each.dead, removed=each.error is None, gone=each.gone, error=each.error) for each in run.removals]
    return ReapReport(
        cluster=name,
        dry_run=dry_run,
        removed=tuple(each for each in rows if each.error is None),
        failed=tuple(each for each in rows if each.error is not None),
        waiting=tuple(
            WaitingRow(
                cluster=name,
                name=each.suspect.name,
                pool=each.suspect.pool,
                why=each.suspect.what,
                until=each.until,
            )
            for each in (plan.waiting if plan else ())
            # A deletion that is under way is nothing to say.
            if each.suspect.suspicion is not Suspicion.DELETING
        ),
        live=dict(plan.live) if plan else {},
        max=dict(most),
        error=run.error.message if run.error else None,
        no_heads=run.view.no_heads if run.view else None,
        waits_until=run.waits_until,
    )


def _print_reports(reports: list[ReapReport], output: OutputFormat) -> None:
    if output is OutputFormat.JSON:
        print_list(reports, {}, output)
    else:
        columns: Columns = {
            "CLUSTER": "cluster",
            "NODE": "name",
            "POOL": "pool",
            "WHY": "why",
            "RESULT": lambda row: row.error or _describe_removal(row),
        }
        print_list([row for report in reports for row in (*report.removed, *report.failed)], columns, output)
    for report in reports:
        for line in _notes(report):
            note(f"{report.cluster}: {line}")


def _describe_removal(row: ReapRow) -> str:
    if not row.removed:
        return "would be removed"
    return "removed" if row.gone else "being deleted"


def _notes(report: ReapReport) -> Iterator[str]:
    """Yield what a run says about a cluster besides its rows."""
    for why in dict.fromkeys(each.why for each in report.waiting):
        rows = [each for each in report.waiting if each.why == why]
        others = f" and {count_noun(len(rows) - 1, 'other')}" if len(rows) > 1 else ""
        until = format_time(min(each.until for each in rows))
        yield f"{rows[0].name}{others}: {why}; removed after {until} unless that changes"
    for row in report.removed:
        if row.again is not None:
            yield f"`{row.again}` makes {row.name} again"
    if report.error is not None:
        yield report.error
    if report.no_heads is not None:
        yield f"nodes of an older head or of none are not looked for: {report.no_heads}"
    if report.waits_until is not None:
        yield f"google refused: left alone until {format_time(report.waits_until)}"
    if report.error is not None or (report.waits_until is not None and not (report.removed or report.failed)):
        return
    live, most = sum(report.live.values()), sum(report.max.values())
    removed = f"{format_count(len(report.removed))} {'to remove' if report.dry_run else 'removed'}"
    failed = f", {format_count(len(report.failed))} could not be removed" if report.failed else ""
    beyond = ": more than the pools allow" if live > most else ""
    yield f"{removed}{failed}; {format_count(live)} of at most {count_noun(most, 'node')} live{beyond}"
