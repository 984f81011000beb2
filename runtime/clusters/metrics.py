"""The reaper's numbers as a text file for Prometheus, such as node exporter's textfile collector reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from runtime.clusters.reaper import ReapRun
from runtime.clusters.reaper_state import ReaperState, write_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterMetrics:
    """A cluster's run, and what is known after it."""

    cluster: str
    """Ray's name."""
    max: Mapping[str, int]
    """By pool."""
    run: ReapRun
    memory: ReaperState


def write_metrics(path: Path, measured: list[ClusterMetrics], now: datetime, seconds: float) -> None:
    """Replace the file at `path` by the numbers of this run. Raises `InfrastructureFailure` if it cannot be written."""
    write_whole(path, render_metrics(measured, now, seconds))


def render_metrics(measured: list[ClusterMetrics], now: datetime, seconds: float) -> bytes:
    import prometheus_client as prometheus

    registry = prometheus.CollectorRegistry()

    def gauge(name: str, text: str, *labels: str) -> prometheus.Gauge:
        return prometheus.Gauge(name, text, ["cluster", *labels], registry=registry)

    def counter(name: str, text: str, *labels: str) -> prometheus.Counter:
        return prometheus.Counter(name, text, ["cluster", *labels], registry=registry)

    nodes = gauge("runtime_cluster_nodes", "TPU nodes that Google lists.", "pool", "state")
    most = gauge("runtime_cluster_nodes_max", "Nodes that the stack allows.", "pool")
    waiting = gauge("runtime_reaper_waiting", "Nodes that are removed later unless they change.", "suspicion")
    removed = counter("runtime_reaper_removed", "Nodes and queued resources that were removed, by why.", "why")
    failed = counter("runtime_reaper_failed", "Deletions that failed.")
    ok = gauge("runtime_reaper_up", "Whether the last run could read the lists.")
    until = gauge("runtime_reaper_waits_until_seconds", "Time until which Google is left alone; 0 if it is not.")
    last = prometheus.Gauge("runtime_reaper_last_run_seconds", "Time of the last run.", registry=registry)
    took = prometheus.Gauge("runtime_reaper_duration_seconds", "Seconds that the last run took.", registry=registry)
    last.set(now.timestamp())
    took.set(seconds)
    for each in measured:
        for pool, count in each.max.items():
            most.labels(each.cluster, pool).set(count)
        listed = each.run.view.nodes if each.run.view else ()
        states = Counter((node.pool or "", node.state) for node in listed if node.cluster == each.cluster)
        for (pool, state), count in states.items():
            nodes.labels(each.cluster, pool, state).set(count)
        suspicions = Counter(item.suspect.suspicion for item in each.run.plan.waiting) if each.run.plan else {}
        for suspicion, count in suspicions.items():
            waiting.labels(each.cluster, suspicion).set(count)
        for why, count in each.memory.removed.items():
            removed.labels(each.cluster, why).inc(count)
        failed.labels(each.cluster).inc(each.memory.failed)
        ok.labels(each.cluster).set(each.run.plan is not None)
        until.labels(each.cluster).set(each.run.waits_until.timestamp() if each.run.waits_until else 0)
    return bytes(prometheus.generate_latest(registry))
