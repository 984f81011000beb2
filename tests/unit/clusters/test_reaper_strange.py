"""The reaper with a wrong clock, after a long pause, and with answers that are not what Google should send."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from runtime.clusters.reaper import Reaper, ReapRun, reap_once
from runtime.clusters.reaper_state import ReaperState
from runtime.stack.google_api import GoogleApi
from tests.cluster_support import labels, ours
from tests.fakes.faults import Request, Response
from tests.fakes.tpu import TpuServer, names_of

HOUR = timedelta(hours=1)


def at(time: datetime) -> str:
    return time.isoformat()


@pytest.fixture
def now() -> datetime:
    return datetime.now(UTC)


@pytest.fixture
def server(now: datetime) -> Iterator[TpuServer]:
    fake = TpuServer(page=2)
    fake.add_instance({"name": "head", "labels": labels(kind="head")}, created=at(now - 72 * HOUR))
    fake.start()
    yield fake
    fake.stop()


@pytest.fixture
def reaper(server: TpuServer) -> Reaper:
    api = GoogleApi(server=server.url, again=False)
    return Reaper(api, project=server.project, zone=server.zone, sleep=lambda _: None)


def add_half_slice(server: TpuServer, made: datetime) -> None:
    addresses = [{"ipAddress": "10.0.0.1"}]
    server.add_node("half", labels=labels(), createTime=at(made), acceleratorType="v4-16", networkEndpoints=addresses)


def reaped(run: ReapRun) -> list[str]:
    return [each.dead.name for each in run.removals]


@pytest.mark.parametrize("off", [-2 * HOUR, timedelta(), 2 * HOUR])
def test_clock_that_is_hours_off_makes_no_young_node_old_and_no_old_one_young(
    server: TpuServer, reaper: Reaper, now: datetime, off: timedelta
) -> None:
    server.add_node("young", "CREATING", labels=labels(), createTime=at(now - off - timedelta(minutes=1)))
    server.add_node("stuck", "CREATING", labels=labels(), createTime=at(now - off - timedelta(minutes=61)))
    server.clock_offset = off

    run, _ = reap_once(reaper, "marin-main", ReaperState(), now)

    assert reaped(run) == ["stuck"]


def test_clock_that_is_set_between_two_runs_ends_no_suspect(server: TpuServer, reaper: Reaper, now: datetime) -> None:
    add_half_slice(server, now - HOUR)

    server.clock_offset = -HOUR
    _, memory = reap_once(reaper, "marin-main", ReaperState(), now)
    # A minute later somebody sets the clock right, which was an hour behind.
    server.clock_offset = timedelta()
    run, _ = reap_once(reaper, "marin-main", memory, now + HOUR)

    assert reaped(run) == []
    assert names_of(server.nodes) == ["half"]


def test_suspect_of_a_run_days_ago_waits_again(server: TpuServer, reaper: Reaper, now: datetime) -> None:
    add_half_slice(server, now - 72 * HOUR)
    old = now - 48 * HOUR
    memory = ReaperState(seen={f"incomplete {server.parent}/nodes/half": old}, looked_at=old)

    run, memory = reap_once(reaper, "marin-main", memory, now)

    assert run.plan is not None
    assert (reaped(run), [each.suspect.name for each in run.plan.waiting]) == ([], ["half"])
    assert min(memory.seen.values()) >= now - timedelta(seconds=1)


STRANGE: list[Any] = [
    {"error": {"code": 403, "message": "no"}},
    {"items": None},
    {"items": "abc"},
    {"items": ["abc"]},
    {"kind": "compute#instanceList", "items": [], "warning": {"code": "UNREACHABLE", "message": "zone is down"}},
    {"items": [{"labels": labels(kind="head"), "creationTimestamp": "yesterday"}]},
    {"items": [{"labels": labels(kind="head"), "creationTimestamp": "2026-11-20T10:00:00"}]},
    {"items": [{"labels": None}]},
    {"nextPageToken": "again"},
    [],
]


@pytest.mark.parametrize("strange", STRANGE)
def test_strange_list_of_heads_makes_no_node_headless(
    server: TpuServer, reaper: Reaper, now: datetime, strange: Any
) -> None:
    server.add_node("n-0", labels=ours("marin-main"), createTime=at(now - HOUR))
    server.add_node("n-1", "PREEMPTED", labels=labels(), createTime=at(now - HOUR))
    answer_with(server, lambda request: "/instances" in request.path, strange)

    run, memory = reap_once(reaper, "marin-main", ReaperState(), now)

    assert run.view is not None
    assert run.view.no_heads is not None
    assert (reaped(run), memory.seen) == (["n-1"], {})


@pytest.mark.parametrize(
    "strange",
    [
        {"error": {"code": 500, "message": "no"}},
        {"unreachable": ["locations/us-central2-b"]},
        {"nodes": {}},
        {"nodes": [{"state": "PREEMPTED"}]},
        {"nodes": [{"name": "projects/p/locations/z/nodes/n", "labels": 7, "state": "PREEMPTED"}]},
        {"nextPageToken": "again"},
    ],
)
def test_strange_list_of_nodes_ends_the_run_and_is_asked_for_later(
    server: TpuServer, reaper: Reaper, now: datetime, strange: Any
) -> None:
    answer_with(server, lambda request: "/nodes" in request.path, strange)

    run, memory = reap_once(reaper, "marin-main", ReaperState(), now)

    assert (run.plan, run.removals) == (None, ())
    assert run.error is not None
    assert memory.wait_until == now + timedelta(seconds=45)


def test_list_that_lacks_nodes_is_no_proof_that_one_is_gone(server: TpuServer, reaper: Reaper, now: datetime) -> None:
    server.add_node("n-0", "PREEMPTED", labels=labels(), createTime=at(now - HOUR))
    server.stubborn.add("n-0")
    lists = iter(range(9))
    partial = {"unreachable": ["locations/us-central2-b"]}
    answer_with(
        server, lambda request: request.method == "GET" and "/nodes" in request.path and next(lists) > 0, partial
    )

    run, _ = reap_once(reaper, "marin-main", ReaperState(), now)

    assert [(each.gone, "could not be read back" in str(each.error)) for each in run.removals] == [(False, True)]


def answer_with(server: TpuServer, when: Callable[[Request], bool], value: Any) -> None:
    usual = server.answer

    def answer(request: Request) -> Response:
        if when(request):
            return Response(200, {"Content-Type": "application/json"}, json.dumps(value).encode())
        return usual(request)

    server.answer = answer  # type: ignore[method-assign]
