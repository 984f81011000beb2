"""Heads of machine families that differ in what Google takes, and heads in a network of another project."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.harness import PACK, Lab
from tests.engine.test_adoption import seed

REGION, ZONE = "us-central1", "us-central1-a"
SUBNET = f"projects/net-host/regions/{REGION}/subnetworks/shared"
POOL = {"accelerator": "v5litepod-1", "runtime_version": "v2-alpha-tpuv5-lite"}


def set_head(lab: Lab, machine_type: str, network: dict[str, Any]) -> None:
    head = {
        "image": f"docker.io/rayproject/ray@sha256:{'0' * 64}",
        "machine_type": machine_type,
        "pools": {"v5e": POOL},
    }
    lab.init("dev")
    for key, value in {"region": REGION, "zone": ZONE, "network": network, "heads": {"main": head}}.items():
        lab.set("dev", key, value)


@pytest.mark.parametrize(
    ("machine_type", "disk", "maintenance"),
    [("c4-standard-8", "hyperdisk-balanced", "MIGRATE"), ("g2-standard-8", "pd-balanced", "TERMINATE")],
)
def test_head_of_a_newer_family_or_with_a_gpu_is_made(lab: Lab, machine_type: str, disk: str, maintenance: str) -> None:
    set_head(lab, machine_type, {"cidr": "10.64.0.0/20"})

    lab.up("dev", *PACK)

    made = lab.cloud.world().resources[lab.cloud.one(":Instance")]["inputs"]
    assert made["bootDisk"]["initializeParams"]["type"] == disk
    assert made["scheduling"]["onHostMaintenance"] == maintenance
    assert lab.preview("dev", "--refresh") == []


def test_head_in_a_subnet_of_another_project_is_made_without_touching_that_project(lab: Lab) -> None:
    set_head(lab, "n2-standard-8", {"subnet": SUBNET, "cidr": "10.64.0.0/20"})
    network = "projects/net-host/global/networks/shared"
    seed(lab.cloud, "gcp:compute/network:Network", network, project="net-host", name="shared")
    seed(
        lab.cloud,
        "gcp:compute/subnetwork:Subnetwork",
        SUBNET,
        project="net-host",
        name="shared",
        region=REGION,
        network=network,
        ipCidrRange="10.64.0.0/20",
    )
    before = {id_: each for id_, each in lab.cloud.world().resources.items() if "net-host" in id_}

    lab.up("dev", *PACK)

    machine = lab.cloud.world().resources[lab.cloud.one(":Instance")]["inputs"]
    assert [each["subnetwork"] for each in machine["networkInterfaces"]] == [SUBNET]
    assert lab.cloud.ids(":Firewall") == []
    assert {id_: each for id_, each in lab.cloud.world().resources.items() if "net-host" in id_} == before
    assert lab.preview("dev", "--refresh") == []
