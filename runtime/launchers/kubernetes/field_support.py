"""How Kubernetes keeps each field of a spec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from runtime.jobs.plan import FieldSupport
from runtime.jobs.secret_schemes import COMMON_SCHEMES, SecretReader, SecretScheme
from runtime.launchers.field_support import ALARM, COMMON, NO_TPU, by_shim, native, refused

_NO_PACKING: Final = refused("each run has a pod of its own; runs share a GPU by resources.gpus.count below 1")
WAITS: Final = refused("a pod that does not fit waits until it does")
"""Support of a field about waiting for machines, for runs of one pod."""
_NO_BACKOFF: Final = refused("the job controller waits: 10 s, doubling up to 10 min")

KEEPS: Final[Mapping[str, FieldSupport]] = {
    **COMMON,
    "name": native("an annotation of the Job, whose own name is a hash"),
    "image": native("image"),
    "secrets": native("by the scheme of each source"),
    "mounts": native("volumes of claims"),
    "environment.manager": by_shim("by uv or conda of the image, when an attempt begins; each pod makes its own"),
    "environment.build_on": by_shim("node"),
    "resources.cpus": native("requests and limits of cpu"),
    "resources.memory": native("requests and limits of memory"),
    "resources.gpus.count": native("limits of nvidia.com/gpu; below 1 a slot of a GPU, by a Lease"),
    "resources.gpus.type": native("nodeSelector, by gpu_types of the target"),
    "resources.tpu.type": NO_TPU,
    "resources.tpu.slices": NO_TPU,
    "resources.disk": native("requests and limits of ephemeral-storage; the shim ends a run that is over it"),
    "resources.shared_memory": native("an emptyDir in memory at /dev/shm"),
    "nodes": native("completions: a pod for each node of a run; their shims meet in the record root"),
    "gang.start_timeout": by_shim("node 0 waits in the record root for the others; the ranks of one pod start at once"),
    "array.count": native("completions"),
    "array.seeds": native("completions"),
    "array.max_parallel": native("parallelism"),
    "array.pack": _NO_PACKING,
    "array.pack_per": _NO_PACKING,
    "array.on_task_failure": native("maxFailedIndexes"),
    "placement.capacity": refused("clusters mark such nodes each in their own way: placement.selector names the label"),
    "placement.nodes": native("nodeAffinity"),
    "placement.exclude": native("nodeAffinity"),
    "placement.selector": native("nodeSelector"),
    "priority": native("priorityClassName, by priority_classes of the target"),
    "account": native("a label of the Job and its pods"),
    "time_limit": by_shim("the shim's clock, and activeDeadlineSeconds of the pod behind it"),
    "start_deadline": WAITS,
    "grace_period": native("terminationGracePeriodSeconds"),
    "ttl_after_finished": native("ttlSecondsAfterFinished"),
    "retry.failure": by_shim("the shim's count in the record root; backoffLimitPerIndex leaves room for all of it"),
    "retry.preemption": by_shim("the shim's count in the record root; podFailurePolicy ignores them"),
    "retry.capacity.window": by_shim("attempts whose nodes did not all come begin again within it"),
    "retry.backoff.min": _NO_BACKOFF,
    "retry.backoff.max": _NO_BACKOFF,
    "after": refused("nothing in Kubernetes waits for another Job"),
}

OF_CLUSTER: Final = "kubernetes"
"""Scheme of secrets that are in the namespace: `kubernetes://SECRET/KEY`."""

SECRET_SCHEMES: Final[Mapping[str, SecretScheme]] = {
    **COMMON_SCHEMES,
    OF_CLUSTER: SecretScheme(reader=SecretReader.BACKEND, how="secretKeyRef: the pod reads a Secret of its namespace"),
}

INTERRUPTS: Final[Mapping[str, FieldSupport]] = {
    "preempt": native("the eviction API, as a drain does it"),
    "timeout": ALARM,
    "node-loss": native("the pod is deleted without grace"),
    "oom": by_shim("KILL to the command, and a note that memory was the reason"),
}
