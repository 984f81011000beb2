"""`runtime cluster buffer`: what it asks Ray's autoscaler for, and what it leaves as it is."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runtime.cli.main import main
from runtime.clusters import autoscaler_request
from runtime.outputs import StackOutputs
from tests.cluster_support import CLUSTER, OUTPUTS, add_hosts, labels
from tests.fakes.google import Refusal
from tests.fakes.tpu import TpuServer
from tests.output_support import differences, documented
from tests.unit.cli.test_cli_cluster_status import Dashboard

Run = Callable[..., tuple[int, str, str]]

NODE = {"runtime-pool-v4": 1}
OTHER = {"CPU": 8}


def outputs(pools: dict[str, Any]) -> StackOutputs:
    return replace(OUTPUTS, clusters={"main": replace(CLUSTER, pools=pools)})


BUFFERED = outputs({"v4": {"accelerator": "v4-8", "min": 0, "max": 8, "buffer": 2}, "v5e": {"max": 2}})


class Store:
    """Ray's store, in place of `RayRequest`."""

    request: list[dict[str, Any]]
    written: int
    address: str | None

    def __init__(self) -> None:
        self.request, self.written, self.address = [], 0, None

    def __call__(self, address: str) -> Store:
        self.address = address
        return self

    def read(self) -> list[dict[str, Any]]:
        return self.request

    def write(self, request: list[dict[str, Any]]) -> None:
        self.request, self.written = request, self.written + 1


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    made = Store()
    monkeypatch.setattr(autoscaler_request, "RayRequest", made)
    return made


@pytest.fixture
def dashboard() -> Iterator[Dashboard]:
    """The first of its hosts is busy."""
    running = Dashboard("10.0.0.1", "10.0.0.2")
    running.start()
    yield running
    running.stop()


@pytest.fixture
def buffer(run: Run, dashboard: Dashboard) -> Run:
    def call(*args: str, contract: StackOutputs = BUFFERED) -> tuple[int, str, str]:
        return run("buffer", "--address", dashboard.url, *args, outputs=contract)

    return call


def test_buffer_asks_for_the_busy_nodes_and_the_idle_ones_once(server: TpuServer, buffer: Run, store: Store) -> None:
    add_hosts(server, "READY", "READY", "CREATING")
    store.request = [OTHER]

    code, out, err = buffer()

    assert (code, out) == (0, "main\tv4\t2\t1\t8\t3\t0\n")
    assert err == "main v4: asked for 3 nodes instead of 0: 1 busy, a buffer of 2, at most 8\n"
    assert store.request == [OTHER, NODE, NODE, NODE]
    assert store.address == "127.0.0.1:6379"
    assert buffer() == (0, "main\tv4\t2\t1\t8\t3\t3\n", "")
    assert store.written == 1


def test_buffer_dry_run_says_it_and_asks_for_nothing(server: TpuServer, buffer: Run, store: Store) -> None:
    add_hosts(server, "READY")

    code, out, err = buffer("--dry-run")

    assert (code, out) == (0, "main\tv4\t2\t1\t8\t3\t0\n")
    assert err == "main v4: would ask for 3 nodes instead of 0: 1 busy, a buffer of 2, at most 8\n"
    assert store.written == 0


def test_buffer_of_a_pool_that_has_none_any_more_is_taken_back(buffer: Run, store: Store) -> None:
    store.request = [OTHER, NODE]

    assert buffer("--dry-run", contract=OUTPUTS)[2].endswith("what was asked for one would be taken back\n")
    code, out, err = buffer(contract=OUTPUTS)

    assert (code, out) == (0, "")
    assert err == "main: no pool has a buffer, and what was asked for one is taken back\n"
    assert store.request == [OTHER]
    assert buffer(contract=OUTPUTS)[2] == "main: no pool has a buffer\n"
    assert store.written == 1


def test_buffer_asks_for_nothing_until_the_nodes_of_a_removed_pool_have_ended(
    server: TpuServer, buffer: Run, store: Store
) -> None:
    add_hosts(server, "READY")
    server.add_node("old", "READY", labels=labels(pool="old"), acceleratorType="v4-8")
    store.request = [OTHER, NODE]

    code, out, err = buffer()

    assert (code, out) == (0, "main\tv4\t2\t1\t8\t0\t1\n")
    assert err.endswith(
        "main: nothing is asked for until Ray has ended the nodes of old, which the stack no longer has\n"
    )
    assert store.request == [OTHER]


def test_buffer_holds_on_to_what_was_asked_for_if_google_does_not_answer(
    server: TpuServer, buffer: Run, store: Store
) -> None:
    store.request = [NODE]
    server.refusals["tpu.projects.locations.nodes.list"] = Refusal(403, "PERMISSION_DENIED", "not for you")

    code, _, err = buffer()

    assert (code, store.request, store.written) == (3, [NODE], 0)
    assert "not for you" in err


def test_buffer_holds_on_to_what_was_asked_for_if_ray_does_not_answer(run: Run, store: Store) -> None:
    store.request = [NODE]

    code, _, err = run("buffer", "--address", "http://127.0.0.1:9", outputs=BUFFERED)

    assert (code, store.request, store.written) == (3, [NODE], 0)
    assert "no answer of Ray's dashboard at `http://127.0.0.1:9`" in err
    assert "hint: the command belongs on the head: " in err


def test_buffer_holds_on_to_what_was_asked_for_if_the_contract_is_damaged(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store.request = [NODE]
    damaged = tmp_path / "contract.json"
    damaged.write_text('{"clusters": {"main": ')
    monkeypatch.setenv("RUNTIME_OUTPUTS", str(damaged))

    code = main(["cluster", "buffer"])

    assert (code, store.request, store.written) == (2, [NODE], 0)
    assert str(damaged) in capsys.readouterr().err


@pytest.mark.parametrize("address", ["8265", "http://[10.0.0.1:8265"])
def test_buffer_refuses_an_address_without_a_host(address: str, run: Run, store: Store) -> None:
    code, _, err = run("buffer", "--address", address, outputs=BUFFERED)

    assert (code, store.written) == (2, 0)
    assert f"`--address {address}` names no host" in err


def test_buffer_as_json_is_documented(server: TpuServer, buffer: Run, store: Store) -> None:
    add_hosts(server, "READY")

    printed = json.loads(buffer("-o", "json")[1])

    assert differences(documented()["runtime cluster buffer -o json"], printed) == []
