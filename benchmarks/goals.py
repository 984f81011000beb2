"""The goals as data: what is measured, and which ratio of which figures each goal asks for.

Goals keep their numbers; those missing here (13, 18, 19, 21, 22) are about parts that this table does not measure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.ratios import Check, Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One measurement, made once in each round."""

    measure: str
    """A function of `benchmarks.measure`."""
    needs: tuple[str, ...] = ()
    """Services."""
    package: str | None = None
    """What must be importable for it."""
    together: str | None = None
    """Neighbours with the same word run at the same time, because they mostly wait."""
    once: bool = False
    """In the first round only, because it takes a minute."""
    parameters: Mapping[str, Any] = field(default_factory=dict)


def _cell(measure: str, /, **rest: Any) -> Cell:
    known = {name: rest.pop(name) for name in ("needs", "package", "together", "once") if name in rest}
    return Cell(measure=measure, parameters=rest, **known)


_REDIS, _EMULATOR, _POSTGRES = ("redis",), ("pubsub",), ("postgres",)
_ONE = {"look_ahead": 0}
"""Claims of one, so that each task's settlement and the next claim share a commit."""

CELLS: Mapping[str, Cell] = {
    "disk": _cell("limit", name="sqlite:fsync"),
    # 1, 4
    "ours.full": _cell("drain", peer="ours", n=4000, options=_ONE),
    "ours.ahead": _cell("drain", peer="ours", n=4000, options={"look_ahead": 1}),
    "ours.default": _cell("drain", peer="ours", n=8000),
    "huey": _cell("drain", peer="huey", n=2000, package="huey"),
    "limit.full": _cell("limit", name="sqlite:drain", n=4000, synchronous="FULL"),
    "ray": _cell("drain", peer="ray", n=3000, package="ray"),
    # 2
    "ours.normal": _cell("drain", peer="ours", n=15000, options={"durability": "normal"}),
    "pool": _cell("drain", peer="pool", n=20000),
    "limit.normal": _cell("limit", name="sqlite:drain", n=30000, synchronous="NORMAL"),
    # 3
    "ours.tens": _cell("drain", peer="ours", n=10000, options={"look_ahead": 9}),
    "limit.tens": _cell("limit", name="sqlite:drain", n=20000, synchronous="FULL", claim=10),
    # 4
    "taskiq": _cell("drain", peer="taskiq", n=3000, needs=_REDIS, package="taskiq_redis"),
    "celery": _cell("drain", peer="celery", n=1500, needs=_REDIS, package="celery"),
    # 5
    "ours.put": _cell("enqueue", peer="ours", n=1000),
    "huey.put": _cell("enqueue", peer="huey", n=1000, package="huey"),
    "limit.put": _cell("limit", name="sqlite:enqueue", n=1000, per_commit=1),
    "ours.bulk": _cell("enqueue_made", n=50000),
    "ours.bulk_whole": _cell("enqueue", peer="ours", n=50000, single=False),
    "rq.bulk": _cell("enqueue", peer="rq", n=3000, single=False, needs=_REDIS, package="rq"),
    "limit.bulk": _cell("limit", name="sqlite:enqueue", n=100000, per_commit=100),
    # 6
    "ours.cpu": _cell("drain", peer="ours", n=300, body="cpu"),
    "huey.cpu": _cell("drain", peer="huey", n=300, body="cpu", package="huey"),
    "ours.cpu2": _cell("drain", peer="ours", n=600, body="cpu", workers=2),
    "pool.cpu2": _cell("drain", peer="pool", n=600, body="cpu", workers=2),
    # 7
    "ours.full2": _cell("drain", peer="ours", n=4000, workers=2, options=_ONE),
    "ours.contention": _cell("limit", name="sqlite:contention_ours", n=2000),
    "limit.contention": _cell("limit", name="sqlite:contention", n=2000),
    # 8
    "ours.queued_1k": _cell("backlog", queued=1000),
    "ours.queued_100k": _cell("backlog", queued=100_000),
    "ours.finished_1m": _cell("backlog", queued=1000, file="finished"),
    # 9
    "ours.latency": _cell("latency", peer="ours", idle_s=20),
    "taskiq.latency": _cell("latency", peer="taskiq", needs=_REDIS, package="taskiq_redis"),
    "limit.wake": _cell("limit", name="wake:inotify"),
    # 10
    "ours.idle": _cell("idle", peer="ours", seconds=25, together="idle"),
    "huey.idle": _cell("idle", peer="huey", seconds=25, together="idle", package="huey"),
    # 11
    "ours.cold": _cell("cold_start", peer="ours"),
    "huey.cold": _cell("cold_start", peer="huey", package="huey"),
    "celery.cold": _cell("cold_start", peer="celery", needs=_REDIS, package="celery"),
    "taskiq.cold": _cell("cold_start", peer="taskiq", needs=_REDIS, package="taskiq_redis"),
    # 12
    "ours.forked": _cell("forked", n=300, heavy=8),
    "limit.fork": _cell("limit", name="fork:forks", n=400),
    "limit.fork_import": _cell("limit", name="fork:forks", n=400, importing=True),
    "limit.fork_heavy": _cell("limit", name="fork:forks", n=8, body="heavy"),
    "rq": _cell("drain", peer="rq", n=60, needs=_REDIS, package="rq"),
    # 14
    "ours.killed": _cell("redelivery", peer="ours", how="kill"),
    "ray.killed": _cell("redelivery", peer="ray", how="kill", package="ray"),
    # 15
    "ours.stopped": _cell("redelivery", peer="ours", how="stop", timeout_s=100, once=True, together="long"),
    "procrastinate.stopped": _cell(
        "redelivery",
        peer="procrastinate",
        how="stop",
        # The sweep comes at each full minute. From here on, the loss is known in about 25 s, and the sweep is due
        # in 55 s: the mean of all moments at which a worker may be lost.
        at_second=5,
        timeout_s=150,
        once=True,
        together="long",
        needs=_POSTGRES,
        package="procrastinate",
    ),
    "ours.kept": _cell("kept_leases", n=1000, slots=100, lease_s=1, times=5, once=True, together="long"),
    "ours.stopped_best": _cell("redelivery", peer="ours", how="stop", options={"lease": "1s"}, together="stopped"),
    "procrastinate.stopped_best": _cell(
        "redelivery",
        peer="procrastinate",
        how="stop",
        options={"best": True},
        together="stopped",
        needs=_POSTGRES,
        package="procrastinate",
    ),
    # 16
    "ours_pubsub.publish": _cell("publish", peer="ours_pubsub", n=10000, needs=_EMULATOR),
    "pubsub.publish": _cell("publish", peer="pubsub", n=10000, needs=_EMULATOR),
    "ours_pubsub": _cell("drain", peer="ours_pubsub", n=5000, options={"records": "memory"}, needs=_EMULATOR),
    "ours_pubsub.queue": _cell("drain", peer="ours_pubsub", n=5000, options={"records": "none"}, needs=_EMULATOR),
    "pubsub.pull": _cell("drain", peer="pubsub", n=5000, options={"mode": "pull"}, needs=_EMULATOR),
    "pubsub.stream": _cell("drain", peer="pubsub", n=4000, needs=_EMULATOR),
    # 17
    "ours_pubsub.cpu": _cell("drain", peer="ours_pubsub", n=300, body="cpu", needs=_EMULATOR),
    "pubsub.cpu": _cell("drain", peer="pubsub", n=300, body="cpu", needs=_EMULATOR),
    "ours_pubsub.cpu2": _cell("drain", peer="ours_pubsub", n=500, body="cpu", workers=2, needs=_EMULATOR),
    "pubsub.cpu2": _cell("drain", peer="pubsub", n=500, body="cpu", workers=2, needs=_EMULATOR),
    # 20
    "cli": _cell("limit", name="cli:commands"),
}

F = Figure
_FULL = F("ours.full", "rate")

CHECKS: tuple[Check, ...] = (
    Check(
        goal=1,
        what="no-op drain, 1 worker, FULL, claims of 1",
        ours=_FULL,
        theirs=F("huey", "rate"),
        against="huey",
        at_least=2.5,
        limit=F("limit.full", "rate"),
    ),
    Check(
        goal=1,
        what="no-op drain, 1 worker, FULL, claims of 1",
        ours=_FULL,
        theirs=F("ray", "rate"),
        against="Ray",
        at_least=3.5,
        limit=F("limit.full", "rate"),
    ),
    Check(
        goal=1,
        what="no-op drain, 1 worker, FULL, claims of 1",
        ours=_FULL,
        theirs=F("limit.full", "rate"),
        against="fused SQLite",
        at_least=0.75,
    ),
    Check(
        goal=1,
        what="the same, one task held ahead of the running one",
        ours=F("ours.ahead", "rate"),
        theirs=F("limit.full", "rate"),
        against="fused SQLite",
        at_least=0.75,
    ),
    Check(
        goal=1,
        what="the same, default look-ahead",
        ours=F("ours.default", "rate"),
        theirs=F("huey", "rate"),
        against="huey",
        at_least=2.5,
    ),
    Check(
        goal=1,
        what="the same, default look-ahead",
        ours=F("ours.default", "rate"),
        theirs=F("ray", "rate"),
        against="Ray",
        at_least=3.5,
    ),
    Check(
        goal=2,
        what="no-op drain, 1 worker, NORMAL",
        ours=F("ours.normal", "rate"),
        theirs=F("pool", "rate"),
        against="ProcessPoolExecutor",
        at_least=1.0,
    ),
    Check(
        goal=2,
        what="no-op drain, 1 worker, NORMAL",
        ours=F("ours.normal", "rate"),
        theirs=F("limit.normal", "rate"),
        against="fused SQLite",
        at_least=0.4,
    ),
    Check(
        goal=3,
        what="no-op drain, 1 worker, FULL, claims of 10",
        ours=F("ours.tens", "rate"),
        theirs=F("limit.tens", "rate"),
        against="SQLite, claims of 10",
        at_least=0.4,
    ),
    Check(
        goal=3,
        what="no-op drain, 1 worker, FULL, claims of 10",
        ours=F("ours.tens", "rate"),
        theirs=F("huey", "rate"),
        against="huey",
        at_least=5,
    ),
    Check(
        goal=4,
        what="CPU per 1000 no-ops, FULL, claims of 1",
        ours=F("ours.full", "cpu_s"),
        theirs=F("huey", "cpu_s"),
        against="huey",
        at_most=0.5,
        unit="s",
        limit=F("limit.full", "cpu_s"),
    ),
    Check(
        goal=4,
        what="CPU per 1000 no-ops, FULL, claims of 1",
        ours=F("ours.full", "cpu_s"),
        theirs=F("taskiq", "cpu_s"),
        against="taskiq + Redis",
        at_most=0.3,
        unit="s",
        limit=F("limit.full", "cpu_s"),
    ),
    Check(
        goal=4,
        what="CPU per 1000 no-ops, FULL, claims of 1",
        ours=F("ours.full", "cpu_s"),
        theirs=F("celery", "cpu_s"),
        against="celery + Redis",
        at_most=0.1,
        unit="s",
    ),
    Check(
        goal=4,
        what="the same, default look-ahead",
        ours=F("ours.default", "cpu_s"),
        theirs=F("huey", "cpu_s"),
        against="huey",
        at_most=0.5,
        unit="s",
    ),
    Check(
        goal=4,
        what="the same, default look-ahead",
        ours=F("ours.default", "cpu_s"),
        theirs=F("celery", "cpu_s"),
        against="celery + Redis",
        at_most=0.1,
        unit="s",
    ),
    Check(
        goal=5,
        what="enqueue one, FULL",
        ours=F("ours.put", "rate"),
        theirs=F("huey.put", "rate"),
        against="huey",
        at_least=1.2,
        limit=F("limit.put", "rate"),
    ),
    Check(
        goal=5,
        what="enqueue one, FULL",
        ours=F("ours.put", "rate"),
        theirs=F("limit.put", "rate"),
        against="SQLite, 1 per commit",
        at_least=0.8,
    ),
    Check(
        goal=5,
        what="enqueue by 1000, tasks made before",
        ours=F("ours.bulk", "rate"),
        theirs=F("limit.bulk", "rate"),
        against="SQLite, 100 per commit",
        at_least=0.3,
    ),
    Check(
        goal=5,
        what="enqueue by 1000, tasks made in between",
        ours=F("ours.bulk_whole", "rate"),
        theirs=F("rq.bulk", "rate"),
        against="RQ in bulk",
        at_least=6,
    ),
    Check(
        goal=6,
        what="overhead of a 10 ms task, 1 worker",
        ours=F("ours.cpu", "overhead_ms"),
        theirs=F("huey.cpu", "overhead_ms"),
        against="huey",
        at_most=0.4,
        unit="ms",
    ),
    Check(
        goal=6,
        what="10 ms tasks, 2 workers",
        ours=F("ours.cpu2", "rate"),
        theirs=F("pool.cpu2", "rate"),
        against="ProcessPoolExecutor",
        at_least=0.97,
    ),
    Check(
        goal=7,
        what="no-op drain, 2 workers, FULL",
        ours=F("ours.full2", "rate"),
        theirs=_FULL,
        against="1 worker of ours",
        at_least=1.0,
    ),
    Check(
        goal=7,
        what="the lesser of 2 workers' share",
        ours=F("ours.full2", "lesser_share"),
        at_least=0.35,
        unit="",
    ),
    Check(
        goal=7,
        what="p99 of a claim, 2 processes",
        ours=F("ours.contention", "p99_ms"),
        theirs=F("limit.contention", "p99_ms"),
        against="SQLite's busy handler",
        at_most=0.02,
        unit="ms",
    ),
    Check(
        goal=8,
        what="drain with 100,000 queued",
        ours=F("ours.queued_100k", "rate"),
        theirs=F("ours.queued_1k", "rate"),
        against="1,000 queued",
        at_least=0.9,
    ),
    Check(
        goal=8,
        what="drain with 1,000,000 finished",
        ours=F("ours.finished_1m", "rate"),
        theirs=F("ours.queued_1k", "rate"),
        against="1,000 queued",
        at_least=0.9,
    ),
    Check(
        goal=9,
        what="start latency on an idle worker, p50",
        ours=F("ours.latency", "p50_ms"),
        theirs=F("taskiq.latency", "p50_ms"),
        against="taskiq",
        at_most=0.6,
        unit="ms",
    ),
    Check(
        goal=9,
        what="start latency on an idle worker, p99",
        ours=F("ours.latency", "p99_ms"),
        theirs=F("taskiq.latency", "p99_ms"),
        against="taskiq",
        at_most=1.0,
        unit="ms",
    ),
    Check(
        goal=9,
        what="start latency on an idle worker, p50",
        ours=F("ours.latency", "p50_ms"),
        theirs=F("limit.wake", "p50_ms"),
        against="inotify wake",
        at_most=3,
        unit="ms",
    ),
    Check(
        goal=9,
        what="first start after 20 s idle",
        ours=F("ours.latency", "after_idle_ms"),
        theirs=F("ours.latency", "p50_ms"),
        against="our p50",
        at_most=2,
        unit="ms",
    ),
    Check(
        goal=10,
        what="CPU of an idle worker",
        ours=F("ours.idle", "idle_cpu_percent"),
        theirs=F("huey.idle", "idle_cpu_percent"),
        against="huey",
        at_most=0.5,
        unit="%",
    ),
    Check(
        goal=10,
        what="CPU of an idle worker",
        ours=F("ours.idle", "idle_cpu_percent"),
        at_most=0.1,
        unit="%",
    ),
    Check(
        goal=10,
        what="PSS of an idle worker's processes",
        ours=F("ours.idle", "pss_mb"),
        theirs=F("huey.idle", "pss_mb"),
        against="huey",
        at_most=1.0,
        unit="MB",
    ),
    Check(
        goal=11,
        what="cold start to the first task's end",
        ours=F("ours.cold", "seconds"),
        theirs=F("huey.cold", "seconds"),
        against="huey",
        at_most=1.0,
        unit="s",
    ),
    Check(
        goal=11,
        what="cold start to the first task's end",
        ours=F("ours.cold", "seconds"),
        theirs=F("celery.cold", "seconds"),
        against="celery",
        at_most=0.25,
        unit="s",
    ),
    Check(
        goal=11,
        what="cold start to the first task's end",
        ours=F("ours.cold", "seconds"),
        theirs=F("taskiq.cold", "seconds"),
        against="taskiq",
        at_most=0.25,
        unit="s",
    ),
    Check(
        goal=12,
        what="a fresh process for each task",
        ours=F("ours.forked", "rate"),
        theirs=F("limit.fork", "rate"),
        against="fork with a pipe",
        at_least=0.6,
    ),
    Check(
        goal=12,
        what="a fresh process for each task",
        ours=F("ours.forked", "rate"),
        theirs=F("limit.fork_import", "rate"),
        against="the same, child imports the task",
        at_least=0.6,
    ),
    Check(
        goal=12,
        what="a fresh process for each task",
        ours=F("ours.forked", "rate"),
        theirs=F("rq", "rate"),
        against="RQ's forking worker",
        at_least=6,
        limit=F("limit.fork_import", "rate"),
    ),
    Check(
        goal=12,
        what="the same after tasks that imported 300 MB",
        ours=F("ours.forked", "rate_after_heavy"),
        theirs=F("ours.forked", "rate"),
        against="before them",
        at_least=0.9,
    ),
    Check(
        goal=12,
        what="tasks that import 300 MB themselves",
        ours=F("ours.forked", "rate_heavy"),
        theirs=F("limit.fork_heavy", "rate"),
        against="fork with the same import",
        at_least=0.9,
    ),
    Check(
        goal=14,
        what="redelivery, worker killed on this host",
        ours=F("ours.killed", "seconds"),
        theirs=F("ray.killed", "seconds"),
        against="Ray",
        at_most=1.0,
        unit="s",
    ),
    Check(
        goal=14,
        what="redelivery, worker killed on this host",
        ours=F("ours.killed", "seconds"),
        theirs=F("procrastinate.stopped", "seconds"),
        against="procrastinate, default",
        at_most=0.02,
        unit="s",
    ),
    Check(
        goal=15,
        what="redelivery, worker unreachable, default",
        ours=F("ours.stopped", "seconds"),
        theirs=F("procrastinate.stopped", "seconds"),
        against="procrastinate, default",
        at_most=0.6,
        unit="s",
    ),
    Check(
        goal=15,
        what="redelivery, worker unreachable, best setting",
        ours=F("ours.stopped_best", "seconds"),
        theirs=F("procrastinate.stopped_best", "seconds"),
        against="procrastinate, best",
        at_most=1.0,
        unit="s",
    ),
    Check(
        goal=15,
        what="repeated of 1,000 leases at that setting, tasks 5x longer",
        ours=F("ours.kept", "repeated"),
        at_most=0,
        unit="",
    ),
    Check(
        goal=16,
        what="Pub/Sub publish",
        ours=F("ours_pubsub.publish", "rate"),
        theirs=F("pubsub.publish", "rate"),
        against="raw publisher",
        at_least=0.9,
    ),
    Check(
        goal=16,
        what="Pub/Sub no-op drain without results, worker",
        ours=F("ours_pubsub", "rate"),
        theirs=F("pubsub.pull", "rate"),
        against="raw pull and acknowledge",
        at_least=0.5,
    ),
    Check(
        goal=16,
        what="Pub/Sub no-op drain without results, queue alone",
        ours=F("ours_pubsub.queue", "rate"),
        theirs=F("pubsub.pull", "rate"),
        against="raw pull and acknowledge",
        at_least=0.5,
    ),
    Check(
        goal=16,
        what="Pub/Sub CPU per 1000 no-ops, worker",
        ours=F("ours_pubsub", "worker_cpu_s"),
        theirs=F("pubsub.stream", "worker_cpu_s"),
        against="raw streaming callback",
        at_most=2.5,
        unit="s",
    ),
    Check(
        goal=16,
        what="Pub/Sub CPU per 1000 no-ops, queue alone",
        ours=F("ours_pubsub.queue", "worker_cpu_s"),
        theirs=F("pubsub.stream", "worker_cpu_s"),
        against="raw streaming callback",
        at_most=2.5,
        unit="s",
    ),
    Check(
        goal=17,
        what="Pub/Sub 10 ms tasks, results kept, 1 worker",
        ours=F("ours_pubsub.cpu", "rate"),
        theirs=F("pubsub.cpu", "rate"),
        against="raw streaming",
        at_least=0.97,
    ),
    Check(
        goal=17,
        what="Pub/Sub 10 ms tasks, results kept, 2 workers",
        ours=F("ours_pubsub.cpu2", "rate"),
        theirs=F("pubsub.cpu2", "rate"),
        against="raw streaming",
        at_least=0.97,
    ),
    Check(
        goal=20,
        what="`runtime --version`, CPU",
        ours=F("cli", "version_ms"),
        theirs=F("cli", "argparse_ms"),
        against="argparse",
        at_most=1.2,
        unit="ms",
    ),
    Check(
        goal=20,
        what="`runtime worker --help`, CPU",
        ours=F("cli", "worker_help_ms"),
        theirs=F("cli", "argparse_help_ms"),
        against="argparse `--help`",
        at_most=1.2,
        unit="ms",
    ),
    Check(
        goal=20,
        what="`runtime status`, CPU",
        ours=F("cli", "status_ms"),
        theirs=F("cli", "typer_ms"),
        against="lean typer",
        at_most=1.1,
        unit="ms",
    ),
    Check(
        goal=20,
        what="`runtime queue list`, CPU",
        ours=F("cli", "queue_list_ms"),
        theirs=F("cli", "typer_ms"),
        against="lean typer",
        at_most=1.1,
        unit="ms",
    ),
    Check(
        goal=20,
        what="`runtime submit --help`, CPU",
        ours=F("cli", "submit_help_ms"),
        theirs=F("cli", "typer_ms"),
        against="lean typer",
        at_most=1.1,
        unit="ms",
    ),
    Check(goal=20, what="`runtime --help`, CPU", ours=F("cli", "help_ms"), at_most=150, unit="ms"),
    Check(goal=20, what="`runtime status`, CPU", ours=F("cli", "status_ms"), at_most=300, unit="ms"),
)


def cells_of(checks: tuple[Check, ...]) -> list[str]:
    """The cells that some checks need, in the order in which they are measured."""
    wanted = {
        figure.cell for check in checks for figure in (check.ours, check.theirs, check.limit) if figure is not None
    }
    return [name for name in CELLS if name in wanted]
