"""How Slurm keeps each field of a spec, and what of it can be provoked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from runtime.jobs.plan import (
    Fidelity,
    FieldSupport,
)
from runtime.jobs.spec_fields import leaf_fields

_SHIM: Final = FieldSupport(fidelity=Fidelity.SHIM, how="the shim")


def _native(how: str) -> FieldSupport:
    return FieldSupport(fidelity=Fidelity.NATIVE, how=how)


def _refused(why: str) -> FieldSupport:
    return FieldSupport(fidelity=Fidelity.REFUSED, how=why)


KEEPS: Final[Mapping[str, FieldSupport]] = {
    **dict.fromkeys(leaf_fields(), _SHIM),
    "command": _native("the batch script, which runs the shim"),
    "name": _native("the ledger; the job's name on Slurm is its id"),
    "image": _native("`apptainer exec` before the command"),
    "mounts": _native("`--bind` of the container"),
    "resources.cpus": _native("--cpus-per-task"),
    "resources.memory": _native("--mem"),
    "resources.disk": _native("--tmp"),
    "resources.shared_memory": _native("the node's own /dev/shm"),
    "resources.gpus.count": _native("--gres=gpu"),
    "resources.gpus.type": _native("--gres=gpu:TYPE"),
    "resources.tpu.type": _refused("nodes of Slurm have no TPUs"),
    "resources.tpu.topology": _refused("nodes of Slurm have no TPUs"),
    "resources.tpu.slices": _refused("nodes of Slurm have no TPUs"),
    "nodes": _native("--nodes, and srun starts the ranks"),
    "tasks_per_node": _native("--ntasks-per-node where there are several nodes; else the shim starts the ranks"),
    "gang.start_timeout": _native("all nodes are given at once"),
    "array.count": _native("--array"),
    "array.params": _native("--array, and the shim sets them"),
    "array.file": _native("--array, and the shim sets them"),
    "array.seeds": _native("--array, and the shim sets them"),
    "array.offset": _native("offset + task of --array"),
    "array.max_parallel": _native("--array=…%N, divided over the arrays"),
    "placement.on": _native("the choice of the target"),
    "placement.capacity": _native("--reservation, or the target's `capacity`"),
    "placement.nodes": _native("--nodelist"),
    "placement.exclude": _native("--exclude"),
    "placement.selector": _native("--constraint"),
    "priority": _native("--qos by the target's `priorities`; low is --nice"),
    "account": _native("--account"),
    "time_limit": _native("--time, behind the shim's own clock"),
    "start_deadline": _native("--deadline, the time limit added"),
    "ttl_after_finished": FieldSupport(fidelity=Fidelity.CLIENT, how="runtime gc"),
    "retry.failure": _native("scontrol requeue by the shim; runs that share a node start again there"),
    "retry.preemption": _native("--requeue; the shim counts"),
    "retry.capacity.window": _native("a job waits in the queue for as long as it takes"),
    "checkpoint.signal": _native("--signal=B:USR1 before a preemption, the shim's clock before the time limit"),
    "outputs.upload": _refused("outputs stay in the record root: runtime fetch"),
    "after": _native("--dependency: afterok, afterany or afternotok"),
    "idempotency_key": _native("part of the job's id"),
}

INTERRUPTS: Final[Mapping[str, FieldSupport]] = {
    "preempt": FieldSupport(fidelity=Fidelity.NATIVE, how="scontrol requeue"),
    "timeout": FieldSupport(
        fidelity=Fidelity.SHIM, how="ALRM to the shim: its deadline is now, or a checkpoint's lead away"
    ),
    "node-loss": FieldSupport(fidelity=Fidelity.REFUSED, how="taking a node down needs an operator"),
    "oom": FieldSupport(fidelity=Fidelity.REFUSED, how="only the memory of a running command can be exceeded"),
}
