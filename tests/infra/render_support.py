"""A cluster to render."""

from __future__ import annotations

import dataclasses
from typing import Any

from infra.render.cluster import RayCluster, SecretReference
from infra.settings.model import TpuCapacity, TpuPoolSettings

IMAGE = "us-central2-docker.pkg.dev/p-1/marin/cluster@sha256:" + "a" * 64

V4 = TpuPoolSettings(accelerator="v4-8", runtime_version="tpu-ubuntu2204-base")
V5E = TpuPoolSettings(accelerator="v5litepod-1", runtime_version="v2-alpha-tpuv5-lite", max=256)

SHAPES = {
    "v4": V4,
    "v5e": V5E,
    "v5e-eight": dataclasses.replace(V5E, accelerator="v5litepod-8", capacity=TpuCapacity.SPOT),
    "v4-slice": dataclasses.replace(V4, accelerator="v4-32", min=0, max=8, capacity=TpuCapacity.ON_DEMAND),
    "reserved": dataclasses.replace(V4, capacity=TpuCapacity.RESERVED, min=0),
    "v5p": dataclasses.replace(V4, accelerator="v5p-8", runtime_version="v2-alpha-tpuv5", min=0),
    "v6e": dataclasses.replace(V5E, accelerator="v6e-4", runtime_version="v2-alpha-tpuv6e"),
}
"""Every kind of pool that a stack can configure."""


def sample_cluster(**fields: Any) -> RayCluster:
    defaults: dict[str, Any] = {
        "name": "marin-main",
        "key": "main",
        "stack": "marin",
        "project": "p-1",
        "region": "us-central2",
        "zone": "us-central2-b",
        "head": "ray-marin-main-head-0123abcd-compute",
        "machine_type": "n2-standard-8",
        "image": IMAGE,
        "network": "https://www.googleapis.com/compute/v1/projects/p-1/global/networks/marin",
        "subnet": "https://www.googleapis.com/compute/v1/projects/p-1/regions/us-central2/subnetworks/marin",
        "node_email": "marin-main-node@p-1.iam.gserviceaccount.com",
        "pools": {"v4": V4},
        "secrets": (SecretReference(env="HF_TOKEN", resource="projects/p-1/secrets/marin-hf-token"),),
        "labels": {"managed-by": "research-runtime", "stack": "marin"},
        "records": "gs://p-1-marin-records",
    }
    return RayCluster(**{**defaults, **fields})
