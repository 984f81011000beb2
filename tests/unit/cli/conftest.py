"""`runtime cluster` of one cluster, against a fake of Google's API."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runtime.cli.main import main
from runtime.outputs import StackOutputs, encode_outputs
from tests.cluster_support import CLUSTER, OUTPUTS, labels
from tests.fakes.tpu import TpuServer

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def server() -> Iterator[TpuServer]:
    fake = TpuServer(page=2)
    fake.add_instance({"name": CLUSTER.head, "labels": labels(kind="head")}, created="2026-11-20T09:00:00.000-00:00")
    fake.start()
    yield fake
    fake.stop()


@pytest.fixture
def run(server: TpuServer, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    def call(*args: str, outputs: StackOutputs = OUTPUTS) -> tuple[int, str, str]:
        contract = tmp_path / "contract.json"
        contract.write_text(encode_outputs(outputs))
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setenv("RUNTIME_GOOGLE_API", server.url)
        monkeypatch.setenv("RUNTIME_OUTPUTS", str(contract))
        code = main(["cluster", *args])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call
