"""`scripts/google-facts` takes newer facts from Google's answers and removes none."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from infra.gcp.catalog import FACTS
from tests.fakes.google import GoogleServer
from tests.infra.conftest import ROOT

ZONE, OTHER = "us-west4-a", "us-north9-b"


def machine(name: str, vcpus: int, memory_mib: int, **fields: Any) -> dict[str, Any]:
    return {"name": name, "guestCpus": vcpus, "memoryMb": memory_mib, "architecture": "X86_64", **fields}


@pytest.fixture
def google() -> Iterator[GoogleServer]:
    server = GoogleServer("lab", page=2)
    where = "projects/lab"
    server.lists[f"{where}/zones"] = [{"name": ZONE}, {"name": OTHER}]
    server.lists[f"{where}/zones/{ZONE}/machineTypes"] = [
        machine("n2-standard-8", 8, 32_768),
        machine("n9-standard-4", 4, 16_384, architecture="ARM64"),
        machine("n9-standard-96", 96, 380_928, architecture="ARM64"),
        machine("ct5lp-hightpu-4t", 112, 200_704),
        machine("e9-small", 2, 2_048, isSharedCpu=True),
    ]
    server.lists[f"{where}/zones/{OTHER}/machineTypes"] = [
        machine("b9-highgpu-1g", 12, 87_040, accelerators=[{"guestAcceleratorType": "x", "guestAcceleratorCount": 1}])
    ]
    server.lists[f"{where}/locations"] = [{"locationId": zone} for zone in (ZONE, OTHER, "elsewhere")]
    for zone, types in {ZONE: ["v5litepod-1", "v5litepod-16"], OTHER: ["v4-8", "v9x-8"]}.items():
        server.lists[f"{where}/locations/{zone}/acceleratorTypes"] = [{"type": each} for each in types]
        versions = [{"version": "tpu-ubuntu2204-base"}, {"version": "v2-alpha-tpuv6e"}]
        server.lists[f"{where}/locations/{zone}/runtimeVersions"] = versions
    server.start()
    yield server
    server.stop()


def update(google: GoogleServer, file: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts/google-facts"), "lab", "--file", str(file)]
    return subprocess.run(command, env=google.environment, capture_output=True, text=True, check=False)


def test_google_facts_adds_what_the_project_sees_and_says_what_changed(google: GoogleServer, tmp_path: Path) -> None:
    file = tmp_path / "facts.json"
    file.write_text((ROOT / "infra/gcp/facts.json").read_text())

    done = update(google, file)

    assert (done.returncode, done.stderr, google.refused) == (0, "", [])
    facts, today = json.loads(file.read_text()), datetime.now(UTC).date().isoformat()
    assert set(facts["regions"]["names"]) == {*FACTS["regions"]["names"], "us-north9"}
    assert facts["machines"]["series"]["n9"] == {"architecture": "ARM64", "gib_per_vcpu": {"standard": 3.875}}
    assert facts["machines"]["series"]["b9"] == {"maintenance": "TERMINATE"}
    assert facts["machines"]["series"]["n2"] == FACTS["machines"]["series"]["n2"]
    assert facts["machines"]["shared"]["e9-small"] == [2, 2.0]
    v4, v5e = facts["tpus"]["families"]["v4"], facts["tpus"]["families"]["v5litepod"]
    assert v4["zones"] == ["us-central2-b", OTHER]
    assert (v5e["hosts"]["4"], v5e["slice_host"], v5e["hosts"]["1"]) == ([112, 196], [112, 196], [24, 48])
    assert [facts[part]["as_of"] for part in ("regions", "machines", "tpus")] == [today] * 3
    assert facts["prices"] == FACTS["prices"]
    lines = done.stdout.splitlines()
    assert f"tpus.families.v4.zones: ['us-central2-b'] → ['us-central2-b', '{OTHER}']" in lines
    assert f"note: {ZONE} has v5litepod and no software v2-alpha-tpuv5-lite" in lines
    assert f"note: {OTHER} has the new family v9x: write its hosts into the file by hand" in lines


def test_google_facts_without_the_api_writes_nothing_and_says_why(google: GoogleServer, tmp_path: Path) -> None:
    file = tmp_path / "facts.json"
    file.write_text((ROOT / "infra/gcp/facts.json").read_text())
    google.disable_api("tpu")

    done = update(google, file)

    assert done.returncode == 3
    assert "Cloud TPU" in done.stderr or "tpu" in done.stderr
    assert json.loads(file.read_text()) == FACTS
