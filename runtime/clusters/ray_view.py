"""What Ray's dashboard says of a cluster: its hosts, which of them work, and what waits for one.

Ray spells most keys of its answers in camel case, names of pools among them, so hosts are known by their addresses alone.
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any, Final

from runtime.errors import InfrastructureFailure
from runtime.values import dataclass, field

PATIENCE_S: Final = 10
_WORK: Final = ("CPU", "TPU", "GPU")
"""Resources that a host has to give; those of its object store are not work."""


class DashboardUnreachable(InfrastructureFailure):
    """Ray's dashboard at `address` did not answer, or not as Ray does."""

    def __init__(self, address: str, problem: str) -> None:
        self.address = address
        super().__init__(
            f"no answer of Ray's dashboard at `{address}`: {problem}",
            hint="`runtime cluster dashboard` makes it reachable at http://127.0.0.1:8265; `--tunnel` does so for one look",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RayView:
    alive: frozenset[str]
    """Addresses of the hosts that Ray counts on, without the head's."""
    busy: frozenset[str] = frozenset()
    """Addresses of hosts on which something holds CPUs or TPUs."""
    wanted: Mapping[str, int] = field(default_factory=dict)
    """Resources that something waits for, such as `{"TPU": 4}` → how often."""
    error: str | None = None
    """The autoscaler's last error."""


def read_ray(address: str) -> RayView:
    """Ask the dashboard at `address`, such as `http://127.0.0.1:8265`. Raises `DashboardUnreachable`."""
    root = address.rstrip("/")
    nodes = _get(root, "/nodes?view=summary")
    status = _get(root, "/api/cluster_status")
    try:
        return parse_ray(nodes, status)
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as problem:
        raise DashboardUnreachable(root, f"its answer has another form ({problem!r})") from problem


def parse_ray(nodes: Mapping[str, Any], status: Mapping[str, Any]) -> RayView:
    """Read the answers to `/nodes?view=summary` and `/api/cluster_status`.

    The usage of hosts is by address or by Ray's id of the node, which depends on the autoscaler.
    """
    addresses: dict[str, str] = {}
    alive = set()
    for each in nodes["data"]["summary"]:
        raylet = each["raylet"]
        address = str(raylet.get("nodeManagerAddress") or each.get("ip"))
        if raylet.get("isHeadNode"):
            continue
        addresses[str(raylet.get("nodeId"))] = address
        if raylet.get("state") == "ALIVE":
            alive.add(address)
    data = status["data"]
    report = (data.get("clusterStatus") or {}).get("loadMetricsReport") or {}
    busy = set()
    for key, usage in (report.get("usageByNode") or {}).items():
        if any(float(usage[name][0]) > 0 for name in _WORK if name in usage):
            busy.add(addresses.get(key, key))
    wanted = {json.dumps(what, sort_keys=True): int(count) for what, count in report.get("resourceDemand") or ()}
    return RayView(
        alive=frozenset(alive),
        busy=frozenset(busy & alive),
        wanted=wanted,
        error=str(data.get("autoscalingError") or "").strip() or None,
    )


def _get(root: str, path: str) -> Mapping[str, Any]:
    # A proxy of this machine knows neither a loopback forward nor an address of the stack's network.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{root}{path}", timeout=PATIENCE_S) as answer:
            value = json.load(answer)
    except urllib.error.HTTPError as problem:
        raise DashboardUnreachable(root, f"`GET {path}` answered {problem.code}") from problem
    except (OSError, ValueError, RecursionError, http.client.HTTPException) as problem:
        reason = getattr(problem, "reason", None) or problem
        raise DashboardUnreachable(root, str(reason)) from problem
    if not isinstance(value, Mapping):
        raise DashboardUnreachable(root, f"`GET {path}` answered no object")
    return value
