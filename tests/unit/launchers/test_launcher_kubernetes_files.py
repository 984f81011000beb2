"""Requests to the pod that reads the record root, over connections that are closed at a bad moment."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from runtime.config import Project, Settings
from runtime.jobs.hosts.agent import GuardedRoot as AgentPlace
from runtime.jobs.hosts.base import HostUnavailable
from runtime.jobs.plan import PlanContext, Target
from runtime.launchers.kubernetes.files import READS, KubernetesHost
from runtime.launchers.kubernetes.settings import read_place

MARK = b"==mark=="


class Connection:
    """A connection to the pod: what was sent, and an answer, or none since it is closed or silent."""

    def __init__(self, answer: object = None, *, is_open: bool = True) -> None:
        self.sent = b""
        self._answer = MARK + json.dumps(answer).encode() + b"\n" if answer is not None else b""
        self._open = is_open

    def write_channel(self, channel: int, data: bytes) -> None:
        self.sent += data

    def is_open(self) -> bool:
        return self._open

    def update(self, timeout: float) -> None:
        pass

    def read_channel(self, channel: int) -> bytes:
        answer, self._answer = (self._answer, b"") if channel == 1 else (b"", self._answer)
        return answer

    def close(self, **_: object) -> None:
        self._open = False


class Host(KubernetesHost):
    """Connects to one after another of the given connections."""

    def __init__(self, tmp_path: Path, *connections: Connection) -> None:
        settings = Settings(project=Project(root=tmp_path), data_dir=tmp_path, cache_dir=tmp_path, config_dir=tmp_path)
        context = PlanContext(
            settings=settings, now=datetime(2026, 1, 1, tzinfo=UTC), base=tmp_path, environ={}, records=""
        )
        target = Target(name="lab", kind="kubernetes", records="claim://records/x", settings={"namespace": "lab"})
        super().__init__(read_place(target, context), cast(Any, SimpleNamespace(close=lambda: None)), "alice")
        self.left = list(connections)

    def _connect(self) -> None:
        self._mark, self._rest, self._socket = MARK, b"", self.left.pop(0)

    def _hang_up(self) -> None:
        self._socket = None


def test_read_whose_connection_was_closed_is_asked_again_over_a_new_one(tmp_path: Path) -> None:
    closed, fresh = Connection(is_open=False), Connection({"value": None})
    host = Host(tmp_path, closed, fresh)

    assert host.files.read("jobs/j-1/launched") is None

    assert closed.sent == fresh.sent
    assert host.left == []


def test_request_that_changes_something_is_not_made_twice(tmp_path: Path) -> None:
    closed, fresh = Connection(is_open=False), Connection({"value": True})
    host = Host(tmp_path, closed, fresh)

    with pytest.raises(HostUnavailable) as lost:
        host.files.create("jobs/j-1/lock", b"")

    assert lost.value.hint == "run the same command again"
    assert host.left == [fresh]


def test_read_over_two_closed_connections_is_given_up(tmp_path: Path) -> None:
    host = Host(tmp_path, Connection(is_open=False), Connection(is_open=False), Connection({"value": None}))

    with pytest.raises(HostUnavailable):
        host.files.read("jobs/j-1/launched")

    assert len(host.left) == 1


def test_read_that_gets_no_answer_in_time_is_not_waited_for_again(tmp_path: Path) -> None:
    host = Host(tmp_path, Connection(), Connection({"value": None}))

    with pytest.raises(HostUnavailable):
        host.exchange(json.dumps({"do": "read"}).encode(), 0.01)

    assert len(host.left) == 1


def test_requests_that_are_made_again_are_those_of_the_agent_that_change_nothing() -> None:
    assert [name for name in READS if not hasattr(AgentPlace, name)] == []
    assert {"create", "link", "write", "write_many", "make_folder", "remove"} & READS == set()
