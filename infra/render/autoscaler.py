"""The file that Ray's autoscaler on the head reads, and reads again every few seconds.

`ray start` does not complete the file as `ray up` does, so the file has everything that Ray looks up without a default:
the network and the identity of TPU nodes, `_has_tpus`, every list that may be empty. Ray starts running nodes again when
set-up or start commands change, so these are constant; the image and the secrets are in other files.
"""

from __future__ import annotations

from typing import Any, Final

from infra.machine.head_agent import PUBLIC_KEY_MARK
from infra.render import units
from infra.render.cluster import HEAD_TYPE, RayCluster, chips_per_host, cpus_per_host, memory_per_host, partial_url
from infra.render.startup import node_metadata
from infra.settings.model import MachineSettings, TpuCapacity, TpuPoolSettings
from runtime.errors import InvalidValue
from runtime.outputs import pool_resource
from runtime.yaml_text import dump_yaml

SSH_USER: Final = "ray"
UPSCALING_SPEED: Final = 4.0
"""Nodes that Ray requests at once, as a multiple of the running ones."""
SCOPES: Final = ("https://www.googleapis.com/auth/cloud-platform",)

START_NODE: Final = (
    f"for _ in $(seq 180); do test -x {units.MACHINE} && break; sleep 5; done; "
    f"sudo --preserve-env=RAY_HEAD_IP,RAY_OVERRIDE_RESOURCES,RAY_OVERRIDE_LABELS {units.MACHINE} start-node"
)

_HEADER: Final = """\
# Ray cluster {name} of stack {stack}, rendered from the stack's settings: change those, not this file.
# The head puts the public half of its own SSH key into `ssh-keys`.
"""


def render_autoscaler(cluster: RayCluster) -> str:
    """Render the file; equal clusters have equal text."""
    header = _HEADER.format(name=cluster.name, stack=cluster.stack)
    return header + dump_yaml(autoscaler_fields(cluster), references=True)


def autoscaler_fields(cluster: RayCluster) -> dict[str, Any]:
    if HEAD_TYPE in cluster.pools:
        raise InvalidValue("pool", HEAD_TYPE, "any other name: this one is the head's own type")
    return {
        "cluster_name": cluster.name,
        "max_workers": cluster.max_workers,
        "upscaling_speed": UPSCALING_SPEED,
        "idle_timeout_minutes": cluster.idle_minutes,
        "provider": {
            "type": "gcp",
            "project_id": cluster.project,
            "region": cluster.region,
            "availability_zone": cluster.zone,
            "use_internal_ips": True,
            "_has_tpus": True,
            # Otherwise a change of a pool ends all its nodes at once, even busy ones.
            "disable_launch_config_check": True,
        },
        "auth": {"ssh_user": SSH_USER, "ssh_private_key": units.PRIVATE_KEY},
        "docker": {},
        "head_node_type": HEAD_TYPE,
        "available_node_types": {
            HEAD_TYPE: _head_type(cluster),
            **_pool_types(cluster),
        },
        "file_mounts": {},
        "cluster_synced_files": [],
        "file_mounts_sync_continuously": False,
        "rsync_exclude": [],
        "rsync_filter": [],
        "initialization_commands": [],
        "setup_commands": [],
        "head_setup_commands": [],
        "worker_setup_commands": [],
        "head_start_ray_commands": [f"sudo systemctl restart {units.HEAD_UNIT}"],
        "worker_start_ray_commands": [START_NODE],
    }


def _head_type(cluster: RayCluster) -> dict[str, Any]:
    """Return the head's node type, which Ray needs to know; Ray makes no node of it and places no work on the head."""
    return {
        "min_workers": 0,
        "max_workers": 0,
        "resources": {"CPU": 0},
        "node_config": {"machineType": f"zones/{cluster.zone}/machineTypes/{cluster.machine_type}"},
    }


def _pool_types(cluster: RayCluster) -> dict[str, Any]:
    """Return the pools' node types; those with equal settings share one metadata object, which YAML writes once."""
    known: list[tuple[MachineSettings, dict[str, str]]] = []
    types = {}
    for name, pool in sorted(cluster.pools.items()):
        machine = cluster.machine_of(pool)
        metadata = next((each for its, each in known if its == machine), None)
        if metadata is None:
            metadata = _node_metadata(cluster, machine)
            known.append((machine, metadata))
        types[name] = _pool_type(cluster, name, pool, metadata)
    return types


def _pool_type(cluster: RayCluster, name: str, pool: TpuPoolSettings, metadata: dict[str, str]) -> dict[str, Any]:
    return {
        "min_workers": pool.min,
        "max_workers": pool.max,
        "resources": {
            "CPU": cpus_per_host(pool),
            **({"memory": memory} if (memory := memory_per_host(pool)) else {}),
            "TPU": chips_per_host(pool.accelerator),
            # Only for the first host of each slice; Ray removes it from the others.
            f"TPU-{pool.accelerator}-head": 1,
            # The autoscaler plans with this file's resources, so nodes that were made without this one count as well.
            **({pool_resource(name): 1} if pool.buffer else {}),
        },
        **({"labels": dict(sorted(pool.labels.items()))} if pool.labels else {}),
        "node_config": _node_config(cluster, pool, metadata),
    }


def _node_config(cluster: RayCluster, pool: TpuPoolSettings, metadata: dict[str, str]) -> dict[str, Any]:
    """Body of the TPU API's `nodes.create`."""
    scheduling = _scheduling(pool)
    return {
        "acceleratorType": pool.accelerator,
        "runtimeVersion": pool.runtime_version,
        **({"schedulingConfig": scheduling} if scheduling else {}),
        "networkConfig": {
            "network": partial_url(cluster.network),
            "subnetwork": partial_url(cluster.subnet),
            "enableExternalIps": False,
        },
        # The API's own key. Ray also accepts a list, `serviceAccounts`, but damages the list when it makes the first of
        # several nodes: the second fails with a KeyError.
        "serviceAccount": {"email": cluster.node_email, "scope": list(SCOPES)},
        "tags": [cluster.name],
        "labels": dict(sorted(cluster.labels.items())),
        "metadata": metadata,
    }


def _node_metadata(cluster: RayCluster, machine: MachineSettings) -> dict[str, str]:
    return {
        # OS Login ignores keys in the metadata, and this node admits only the head.
        "enable-oslogin": "FALSE",
        "block-project-ssh-keys": "TRUE",
        "enable-guest-attributes": "TRUE",
        "ssh-keys": f"{SSH_USER}:{PUBLIC_KEY_MARK}",
        **node_metadata(cluster, machine),
    }


def _scheduling(pool: TpuPoolSettings) -> dict[str, Any]:
    match pool.capacity:
        case TpuCapacity.PREEMPTIBLE:
            return {"preemptible": True}
        case TpuCapacity.SPOT:
            return {"spot": True}
        case TpuCapacity.RESERVED:
            # A reservation's name is unknown to `v2` of the API, and Ray takes that or `v2alpha1`.
            return {"reserved": True}
        case TpuCapacity.ON_DEMAND:
            return {}
