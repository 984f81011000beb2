"""How Ray keeps each field of a spec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from runtime.jobs.plan import FieldSupport
from runtime.launchers.field_support import COMMON, by_shim, fields_of, native, refused

_NO_PACKING: Final = refused("each run has an actor of its own; a part of a GPU is resources.gpus.count below 1")
_NO_LIMIT: Final = refused("Ray neither counts it nor holds an actor to it")
_DRIVER: Final = native("the driver on the head waits")

KEEPS: Final[Mapping[str, FieldSupport]] = {
    **COMMON,
    "command": native("an actor for each node, which starts the shim"),
    "name": native("metadata of the submission"),
    "image": refused("the cluster's own image runs everything; its stack names it"),
    "secrets": by_shim("read at launch, into a file in the record root; by each node itself if that is a bucket"),
    "mounts": refused("the cluster's machines mount what its stack says"),
    "environment.manager": by_shim(
        "by uv or conda of the cluster's image, when an attempt begins; kept in the record root, or on the node if that is a bucket"
    ),
    "environment.build_on": by_shim("node"),
    "resources.cpus": native("num_cpus, and the shim keeps each node of a run to so many CPUs, claimed on the machine"),
    "resources.memory": native("memory, set aside and no limit; the least of a range"),
    "resources.gpus.count": native("num_gpus"),
    "resources.gpus.type": native("accelerator_type"),
    "resources.tpu.type": native("TPU-TYPE-head finds a slice, and its name the other hosts: all of them or none"),
    "resources.tpu.slices": native("a placement group of TPU-TYPE-head finds them at once; MEGASCALE_* for each node"),
    "resources.disk": _NO_LIMIT,
    "resources.shared_memory": native("the node's own /dev/shm"),
    "nodes": native("a placement group, STRICT_SPREAD: all nodes at once or none; their shims meet in the record root"),
    "gang.start_timeout": by_shim(
        "node 0 waits in the record root for the others; a group that waits for room holds none"
    ),
    "array.max_parallel": native(
        "the driver places no more at a time, and never more than 1,024; 256 if it is left out"
    ),
    "array.pack": _NO_PACKING,
    "array.pack_per": _NO_PACKING,
    **dict.fromkeys(
        fields_of("placement"), refused("Ray places by resources: resources.gpus.type names a kind of node")
    ),
    "placement.on": COMMON["placement.on"],
    "priority": by_shim(
        "the driver gives a place that Ray gave it back, before the shim starts, if a higher run waits"
    ),
    "account": refused("Ray has no accounts"),
    "start_deadline": refused("a run that does not fit waits until it does"),
    "retry.failure": by_shim("the shim's count in the record root; the driver places the run again"),
    "retry.preemption": by_shim("the shim's count in the record root; the driver places the run again"),
    "retry.capacity.window": by_shim("attempts whose nodes did not all come begin again within it"),
    "retry.backoff.min": _DRIVER,
    "retry.backoff.max": _DRIVER,
    "after": refused("nothing in Ray waits for another job"),
}
