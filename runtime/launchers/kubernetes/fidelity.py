"""How Kubernetes keeps each field of a spec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from runtime.jobs.plan import Fidelity, FieldSupport
from runtime.jobs.spec_fields import leaf_fields


def _native(how: str) -> FieldSupport:
    return FieldSupport(fidelity=Fidelity.NATIVE, how=how)


def _refused(why: str) -> FieldSupport:
    return FieldSupport(fidelity=Fidelity.REFUSED, how=why)


_SHIM: Final = FieldSupport(fidelity=Fidelity.SHIM, how="the shim")
_NO_PACKING: Final = _refused("each run has a pod of its own; runs share a GPU by resources.gpus.count below 1")
_NO_TPU: Final = _refused("this launcher asks for no TPUs")
_NO_BUILD: Final = _refused("build it into the image, or name an environment that is there: environment.name")
_NO_BACKOFF: Final = _refused("the job controller waits: 10 s, doubling up to 10 min")

KEEPS: Final[Mapping[str, FieldSupport]] = {
    **dict.fromkeys(leaf_fields(), _SHIM),
    "name": _native("an annotation of the Job, whose own name is a hash"),
    "image": _native("image"),
    "secrets": _native("secretKeyRef of kubernetes://; others are read at launch, into a file in the record root"),
    "mounts": _native("volumes of claims"),
    "environment.manager": _NO_BUILD,
    "environment.lock": _NO_BUILD,
    "environment.extras": _NO_BUILD,
    "environment.build_on": _NO_BUILD,
    "resources.cpus": _native("requests and limits of cpu"),
    "resources.memory": _native("requests and limits of memory"),
    "resources.gpus.count": _native("limits of nvidia.com/gpu; below 1 a slot of a GPU, by a Lease"),
    "resources.gpus.type": _native("nodeSelector, by gpu_types of the target"),
    "resources.tpu.type": _NO_TPU,
    "resources.tpu.topology": _NO_TPU,
    "resources.tpu.slices": _NO_TPU,
    "resources.disk": _native("requests and limits of ephemeral-storage; the shim ends a run that is over it"),
    "resources.shared_memory": _native("an emptyDir in memory at /dev/shm"),
    "nodes": _refused("a job is one pod for each run; ranks of several nodes have no launcher here yet"),
    "gang.start_timeout": _native("all ranks start at once, in one pod"),
    "array.count": _native("completions"),
    "array.seeds": _native("completions"),
    "array.max_parallel": _native("parallelism"),
    "array.pack": _NO_PACKING,
    "array.pack_per": _NO_PACKING,
    "array.on_task_failure": _native("maxFailedIndexes"),
    "placement.on": _native("the choice of the target"),
    "placement.capacity": _refused(
        "clusters mark such nodes each in their own way: placement.selector names the label"
    ),
    "placement.nodes": _native("nodeAffinity"),
    "placement.exclude": _native("nodeAffinity"),
    "placement.selector": _native("nodeSelector"),
    "priority": _native("priorityClassName, by priority_classes of the target"),
    "account": _native("a label of the Job and its pods"),
    "time_limit": FieldSupport(
        fidelity=Fidelity.SHIM, how="the shim's clock, and activeDeadlineSeconds of the pod behind it"
    ),
    "start_deadline": _refused("a pod that does not fit waits until it does"),
    "grace_period": _native("terminationGracePeriodSeconds"),
    "ttl_after_finished": _native("ttlSecondsAfterFinished"),
    "retry.failure": FieldSupport(
        fidelity=Fidelity.SHIM,
        how="the shim's count in the record root; backoffLimitPerIndex leaves room for all of it",
    ),
    "retry.preemption": FieldSupport(
        fidelity=Fidelity.SHIM, how="the shim's count in the record root; podFailurePolicy ignores them"
    ),
    "retry.capacity.window": _refused("a pod that does not fit waits until it does"),
    "retry.backoff.min": _NO_BACKOFF,
    "retry.backoff.max": _NO_BACKOFF,
    "outputs.upload": _refused("outputs stay in the record root: runtime fetch"),
    "after": _refused("nothing in Kubernetes waits for another Job"),
    "idempotency_key": _native("part of the job's id"),
}

INTERRUPTS: Final[Mapping[str, FieldSupport]] = {
    "preempt": _native("the eviction API, as a drain does it"),
    "timeout": FieldSupport(
        fidelity=Fidelity.SHIM, how="ALRM to the shim: its deadline is now, or a checkpoint's lead away"
    ),
    "node-loss": _native("the pod is deleted without grace"),
    "oom": FieldSupport(fidelity=Fidelity.SHIM, how="KILL to the command, and a note that memory was the reason"),
}
