"""A cluster as Ray's dashboard reports it: its hosts, which of them work, the requests that wait, and the jobs that run.

Ray spells most keys of its answers in camel case, names of pools among them, so hosts are known by their addresses alone.
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from runtime.errors import InfrastructureFailure

PATIENCE_S: Final = 10
_WORK: Final = ("CPU", "TPU", "GPU")
"""Resources that a host has to give; those of its object store are not work."""
_LIVING: Final = ("PENDING", "RUNNING")
_ACTORS: Final = "/api/v0/actors?" + urllib.parse.urlencode(
    {"filter_keys": "state", "filter_predicates": "=", "filter_values": "ALIVE", "limit": 10_000}
)
"""The most that Ray lists."""


class DashboardUnreachable(InfrastructureFailure):
    """Ray's dashboard at `address` did not answer, or not as Ray does."""

    def __init__(self, address: str, problem: str) -> None:
        self.address = address
        super().__init__(
            f"no answer of Ray's dashboard at `{address}`: {problem}",
            hint="`runtime cluster dashboard` makes it reachable at http://127.0.0.1:8265; `--tunnel` does so for one look",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RayJob:
    """A job that has not ended."""

    job: str | None
    """`j-…`; None for a job that the runtime did not start."""
    name: str = ""
    owner: str = ""
    state: str = "RUNNING"
    hosts: frozenset[str] | None = None
    """Addresses of the hosts on which its actors live; None if that is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayView:
    alive: frozenset[str]
    """Addresses of the hosts that Ray counts on, without the head's."""
    busy: frozenset[str] = frozenset()
    """Addresses of hosts on which something holds CPUs or TPUs."""
    wanted: Mapping[str, int] = field(default_factory=dict)
    """Resources of one host that something waits for, such as `{"TPU": 4}` → how often. Each part of a placement group counts."""
    error: str | None = None
    """The autoscaler's last error."""
    jobs: tuple[RayJob, ...] | None = None
    """None if they are not known."""


def read_ray(address: str) -> RayView:
    """Ask the dashboard at `address`, such as `http://127.0.0.1:8265`. Raises `DashboardUnreachable`."""
    root = address.rstrip("/")
    nodes = _get(root, "/nodes?view=summary")
    status = _get(root, "/api/cluster_status")
    try:
        return parse_ray(nodes, status)
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as problem:
        raise DashboardUnreachable(root, f"its answer has another form ({problem!r})") from problem


def read_jobs(address: str, view: RayView) -> RayView:
    """Add the jobs of the dashboard at `address`, and the hosts of each if Ray names them. If the head does not list its
    jobs, the view stays as it is."""
    root = address.rstrip("/")
    try:
        listed = _get(root, "/api/jobs/", list)
        try:
            return replace(view, jobs=parse_jobs(listed, _get(root, "/nodes?view=summary"), _get(root, _ACTORS)))
        except (DashboardUnreachable, KeyError, TypeError, AttributeError):
            return replace(view, jobs=parse_jobs(listed))
    except (DashboardUnreachable, KeyError, TypeError, AttributeError):
        return view


def parse_jobs(
    listed: Iterable[Mapping[str, Any]],
    nodes: Mapping[str, Any] | None = None,
    actors: Mapping[str, Any] | None = None,
) -> tuple[RayJob, ...]:
    """Read the answers to `/api/jobs/`, `/nodes?view=summary` and `/api/v0/actors`: ours by their ids, then the others.

    A job of ours may be several of Ray's. Our drivers run on the head, which is none of a job's hosts.
    """
    hosts: dict[str, set[str]] = {}
    if nodes is not None and actors is not None:
        addresses = _read_addresses(nodes)
        for each in actors["data"]["result"]["result"]:
            if each["node_id"] in addresses:
                hosts.setdefault(str(each["job_id"]), set()).add(addresses[each["node_id"]])
    found: dict[str, RayJob] = {}
    others = []
    for info in listed:
        if info["status"] not in _LIVING:
            continue
        said, job = _read_metadata(info), _find_job(info)
        made = RayJob(
            job=job,
            name=str(said.get("name") or info.get("entrypoint") or "") if job else str(info.get("entrypoint") or ""),
            owner=str(said.get("owner") or "") if job else "",
            state=str(info["status"]),
            hosts=None if actors is None else frozenset(hosts.get(str(info.get("job_id")), ())),
        )
        if job is None:
            others.append(made)
            continue
        known = found.get(job, made)
        found[job] = replace(
            made,
            state=max(known.state, made.state),  # RUNNING, if one runs
            hosts=None if made.hosts is None or known.hosts is None else known.hosts | made.hosts,
        )
    return (*(found[job] for job in sorted(found)), *others)


def _read_metadata(info: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a job was submitted with: anybody who reaches the head may put anything there."""
    said = info.get("metadata")
    return said if isinstance(said, Mapping) else {}


def _find_job(info: Mapping[str, Any]) -> str | None:
    """The id of our job that a job on the head is a start of; None if the runtime did not start it."""
    said, name = _read_metadata(info), str(info.get("submission_id") or "")
    job = said.get("job")
    return str(job) if job and name.startswith(f"{job}-e") and "epoch" in said else None


def _read_addresses(nodes: Mapping[str, Any]) -> dict[str, str]:
    """Ray's id of each node but the head → its address."""
    raylets = [(each["raylet"], each.get("ip")) for each in nodes["data"]["summary"]]
    return {
        str(raylet.get("nodeId")): str(raylet.get("nodeManagerAddress") or ip)
        for raylet, ip in raylets
        if not raylet.get("isHeadNode")
    }


def parse_ray(nodes: Mapping[str, Any], status: Mapping[str, Any]) -> RayView:
    """Read the answers to `/nodes?view=summary` and `/api/cluster_status`.

    The usage of hosts is by address or by Ray's id of the node, which depends on the autoscaler.
    """
    addresses = _read_addresses(nodes)
    alive = {
        str(each["raylet"].get("nodeManagerAddress") or each.get("ip"))
        for each in nodes["data"]["summary"]
        if each["raylet"].get("state") == "ALIVE" and not each["raylet"].get("isHeadNode")
    }
    data = status["data"]
    report = (data.get("clusterStatus") or {}).get("loadMetricsReport") or {}
    busy = set()
    for key, usage in (report.get("usageByNode") or {}).items():
        if any(float(usage[name][0]) > 0 for name in _WORK if name in usage):
            busy.add(addresses.get(key, key))
    wanted = Counter(
        {json.dumps(what, sort_keys=True): int(count) for what, count in report.get("resourceDemand") or ()}
    )
    # Ray writes the groups' own keys in snake case.
    for group, groups in report.get("pgDemand") or ():
        for what, count in group["bundles"]:
            wanted[json.dumps(what, sort_keys=True)] += int(count) * int(groups)
    return RayView(
        alive=frozenset(alive),
        busy=frozenset(busy & alive),
        wanted=dict(wanted),
        error=str(data.get("autoscalingError") or "").strip() or None,
    )


def _get(root: str, path: str, form: type = Mapping) -> Any:
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
    if not isinstance(value, form):
        raise DashboardUnreachable(root, f"`GET {path}` answered no {'list' if form is list else 'object'}")
    return value
