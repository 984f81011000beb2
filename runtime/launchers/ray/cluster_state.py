"""The driver's view of its cluster: nodes, the stack's pools, and the requests and refusals of Ray's autoscaler. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from runtime.errors import InvalidValue
from runtime.launchers.ray.placement import head_of
from runtime.launchers.ray.resource_request import count_hosts

RECENT_S: Final = 1800.0
"""A refusal that is older than this says nothing about now."""
_KEPT: Final = 300
"""Letters of a refusal's own text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """A living node of Ray."""

    total: Mapping[str, float]
    free: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolView:
    """A kind of node that the autoscaler makes."""

    name: str
    accelerator: str
    most: int
    """Slices at most."""
    host: Mapping[str, float]
    """Resources of a slice's first host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """An attempt to make nodes that failed."""

    pool: str
    at: float
    """Seconds since 1970."""
    text: str

    @property
    def kind(self) -> str:
        """`quota`, `stock-out`, or empty."""
        text = self.text.lower()
        if "quota" in text:
            return "quota"
        return "stock-out" if re.search(r"no more capacity|stock.?out|resource_pool_exhausted", text) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    nodes: tuple[NodeView, ...] = ()
    pools: tuple[PoolView, ...] | None = None
    """None if the pools are not known."""
    coming: Mapping[str, int] = field(default_factory=dict)
    """Pool → nodes that are being made."""
    dead: Mapping[str, int] = field(default_factory=dict)
    """Pool → nodes that the autoscaler counts as failed."""
    refusals: tuple[Refusal, ...] = ()
    """The recent ones, oldest first."""
    error: str | None = None
    """Why the autoscaler itself has ended."""


def read_view(
    nodes: Sequence[Mapping[str, Any]],
    free: Mapping[str, Mapping[str, float]],
    *,
    contract: str | None = None,
    head: str | None = None,
    status: str | bytes | None = None,
    error: str | bytes | None = None,
    log: str = "",
    now: float,
) -> ClusterView:
    """Make a view of Ray's answers. What cannot be read is left out, since it only explains.

    `nodes` is the answer of `ray.nodes()`, `free` has the free resources by a node's id. `contract` is the stack's, in which
    `head` chooses the cluster if there are several. `status` and `error` are the autoscaler's reports in Ray's store, and
    `log` is the end of its log, the only place that has a cloud's own words for a refusal.
    """
    report = _read_report(status)
    pending = [str(each[1]) for each in report.get("pending_nodes") or ()]
    coming = {str(pool): int(count) for pool, count in (report.get("pending_launches") or {}).items()}
    for pool in pending:
        coming[pool] = coming.get(pool, 0) + 1
    dead: dict[str, int] = {}
    for each in report.get("failed_nodes") or ():
        dead[str(each[1])] = dead.get(str(each[1]), 0) + 1
    refusals = [*_read_records(report), *read_log(log)]
    return ClusterView(
        nodes=tuple(
            NodeView(total=dict(each["Resources"]), free=dict(free.get(each["NodeID"], {})))
            for each in nodes
            if each["Alive"]
        ),
        pools=_read_pools(contract, head),
        coming={pool: count for pool, count in coming.items() if count},
        dead=dead,
        refusals=tuple(sorted((each for each in refusals if now - each.at < RECENT_S), key=lambda each: each.at)),
        error=(error.decode("utf-8", "replace") if isinstance(error, bytes) else error) or None,
    )


def _read_report(status: str | bytes | None) -> Mapping[str, Any]:
    try:
        found = json.loads(status or "{}").get("autoscaler_report")
    except (ValueError, AttributeError):
        return {}
    return found if isinstance(found, Mapping) else {}


def _read_records(report: Mapping[str, Any]) -> list[Refusal]:
    """Refusals by a node provider that reports them itself."""
    known = (report.get("node_availability_summary") or {}).get("node_availabilities") or {}
    return [
        Refusal(
            pool=str(pool),
            at=float(each["last_checked_timestamp"]),
            text="{category}: {description}".format(**(each["unavailable_node_information"] or _UNTOLD))[:_KEPT],
        )
        for pool, each in known.items()
        if not each["is_available"]
    ]


_UNTOLD: Final = {"category": "unavailable", "description": "no reason given"}
_HEADER: Final = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d+\t\w+ .*? -- (.*)")
_FAILED: Final = re.compile(r"(\w*NodeLauncher\w*): Failed to launch (?:\d+|\{\}) node\(s\) of type ([^\s.]+)\.")
_TRACEBACK: Final = re.compile(r"(\w*NodeLauncher\w*): Traceback ")
_RETURNED: Final = re.compile(r'returned "(.+?)"[.>]|[\'"]message[\'"]: ([\'"])(.+?)\2[,}]')


def read_log(text: str) -> list[Refusal]:
    """Refusals of a cloud in the autoscaler's log: a line that names the pool, then a traceback with the cloud's words.

    Both are entries of their own, of a launcher's thread that the text names; entries of other threads may come between.
    """
    found: list[Refusal] = []
    failed: dict[str, tuple[str, float]] = {}
    refused: tuple[str, float] | None = None
    last = ""
    for line in [*text.splitlines(), "1970-01-01 00:00:00,000\tINFO end -- end"]:
        header = _HEADER.match(line)
        if header is None:
            if line and not line[0].isspace():
                last = line
            continue
        if refused and last:
            found.append(Refusal(pool=refused[0], at=refused[1], text=_find_words(last)))
        refused, last = None, ""
        if names := _FAILED.match(header[2]):
            # The monitor writes in its machine's time.
            at = datetime.strptime(header[1], "%Y-%m-%d %H:%M:%S").astimezone(UTC).timestamp()
            failed[names[1]] = names[2], at
        elif thread := _TRACEBACK.match(header[2]):
            refused = failed.pop(thread[1], None)
    return found


def _find_words(line: str) -> str:
    said = _RETURNED.search(line)
    return ((said[1] or said[3]) if said else line)[:_KEPT]


def _read_pools(contract: str | None, head: str | None) -> tuple[PoolView, ...] | None:
    try:
        cluster = _find_cluster(contract, head)
        return None if cluster is None else read_pools(cluster["pools"])
    except (ValueError, AttributeError, KeyError, TypeError):
        return None


def _find_cluster(contract: str | None, head: str | None) -> Mapping[str, Any] | None:
    clusters = json.loads(contract or "{}").get("clusters") or {}
    chosen = [each for each in clusters.values() if len(clusters) == 1 or each.get("head") == head]
    return chosen[0] if len(chosen) == 1 else None


def read_pools(pools: Mapping[str, Any]) -> tuple[PoolView, ...]:
    """Pools of a contract that have an accelerator whose hosts are known."""
    found = []
    for name, pool in sorted(pools.items()):
        accelerator = pool.get("accelerator") if isinstance(pool, Mapping) else None
        try:
            chips = count_hosts(str(accelerator))[1]
        except InvalidValue:
            continue
        host = {"TPU": float(chips), head_of(str(accelerator)): 1.0}
        if pool.get("cpus"):
            host["CPU"] = float(pool["cpus"])
        found.append(PoolView(name=name, accelerator=str(accelerator), most=int(pool.get("max") or 0), host=host))
    return tuple(found)
