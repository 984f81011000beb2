"""The renderers' view of a cluster, in plain values: equal values give equal text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from infra.gcp.catalog import find_tpu_host
from infra.settings.model import ContainerSettings, MachineSettings, TpuPoolSettings
from runtime.errors import InvalidValue
from runtime.tpu_shapes import find_shape

HEAD_TYPE: Final = "ray_head"
"""Ray's node type of the head; no pool can have this name."""

PORTS: Final[Mapping[str, int]] = {
    "gcs": 6379,
    "node_manager": 6380,
    "object_manager": 6381,
    "runtime_env_agent": 6382,
    "agent_grpc": 6383,
    "metrics": 8080,
    "dashboard": 8265,
    "client": 10001,
    "worker_min": 10002,
    "worker_max": 19999,
    "autoscaler_metrics": 44217,
    "dashboard_metrics": 44227,
    "agent": 52365,
}
"""Every port that Ray listens on, for the firewall. None is open beyond the subnet: Ray requires no password."""

_TASKS_SHARE: Final = 0.6
"""Part of a host's memory for tasks. Ray's object store takes up to 30 %, the system and Ray itself the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretReference:
    env: str
    resource: str
    """`projects/P/secrets/N`"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayCluster:
    name: str
    """Ray's name of the cluster."""
    key: str
    """The cluster's name among users and in the contract."""
    stack: str
    project: str
    region: str
    zone: str
    head: str
    """Name of the VM."""
    machine_type: str
    image: str
    network: str
    """Self-link or partial URL, like the subnet."""
    subnet: str
    node_email: str
    pools: Mapping[str, TpuPoolSettings]
    secrets: tuple[SecretReference, ...] = ()
    idle_minutes: int = 10
    labels: Mapping[str, str] = field(default_factory=dict)
    machine: MachineSettings = MachineSettings()
    """Settings of the head, which pools inherit."""
    cloud_logging: bool = True
    records: str | None = None
    """URL of the stack's records, below which jobs have theirs; without it there are no jobs to take up."""

    @property
    def max_workers(self) -> int:
        return sum(pool.max for pool in self.pools.values())

    def machine_of(self, pool: TpuPoolSettings) -> MachineSettings:
        """Return the settings of a pool's nodes, with those of the head that the pool leaves out."""
        ours, its = self.machine, pool.container
        return MachineSettings(
            variables={**ours.variables, **pool.variables},
            setup=(ours.setup if pool.setup is None else pool.setup) or None,
            container=ContainerSettings(
                shm_size=its.shm_size,
                mounts=ours.container.mounts if its.mounts is None else its.mounts,
                options=ours.container.options if its.options is None else its.options,
            ),
        )


def chips_per_host(accelerator: str) -> int:
    """Return the chips that one host of a slice sees: 4 for `v4-8`, 8 for `v5litepod-8`, 4 for `v5litepod-16`."""
    shape = find_shape(accelerator)
    if shape is None:
        raise InvalidValue("accelerator", accelerator, "a type and a size, such as v4-8 or v5litepod-1")
    return shape[1]


def cpus_per_host(pool: TpuPoolSettings) -> int:
    """Return the CPUs that Ray hands out on each host: half of the host's, so that tasks do not get too little, if the
    pool names no number."""
    if pool.cpus is not None:
        return pool.cpus
    host = find_tpu_host(pool.accelerator)
    if host is None:
        raise InvalidValue("cpus", pool.cpus, f"a number, since the hosts of `{pool.accelerator}` are not known here")
    return host.vcpus // 2


def memory_per_host(pool: TpuPoolSettings) -> int | None:
    """Return the bytes that Ray hands out on each host; None for a host that is not known here. Without the number Ray
    makes no node for a task that asks for memory until it has seen a first one."""
    host = find_tpu_host(pool.accelerator)
    return int(host.memory_gib * _TASKS_SHARE) * 1024**3 if host else None


def partial_url(link: str) -> str:
    """Return `projects/P/…` of a self-link: the TPU API takes no `https://` before it."""
    return re.sub(r"^https?://[^/]+/compute/[^/]+/", "", link)
