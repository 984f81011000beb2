"""How Slurm keeps each field of a spec, and which endings can be provoked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from runtime.jobs.plan import FieldSupport
from runtime.launchers.field_support import ALARM, COMMON, NO_TPU, native, refused

_SET_BY_SHIM: Final = native("--array, and the shim sets them")

KEEPS: Final[Mapping[str, FieldSupport]] = {
    **COMMON,
    "command": native("the batch script, which runs the shim"),
    "name": native("the ledger; the job's name on Slurm is its id"),
    "image": native("`apptainer exec` before the command"),
    "mounts": native("`--bind` of the container"),
    "resources.cpus": native("--cpus-per-task"),
    "resources.memory": native("--mem"),
    "resources.tpu.type": NO_TPU,
    "resources.tpu.slices": NO_TPU,
    "resources.disk": native("--tmp"),
    "resources.shared_memory": native("the node's own /dev/shm"),
    "resources.gpus.count": native("--gres=gpu"),
    "resources.gpus.type": native("--gres=gpu:TYPE"),
    "nodes": native("--nodes, and srun starts the ranks"),
    "tasks_per_node": native("--ntasks-per-node where there are several nodes; else the shim starts the ranks"),
    "gang.start_timeout": native("all nodes are given at once"),
    "array.count": native("--array"),
    "array.params": _SET_BY_SHIM,
    "array.file": _SET_BY_SHIM,
    "array.seeds": _SET_BY_SHIM,
    "array.offset": native("offset + task of --array"),
    "array.max_parallel": native("--array=…%N, divided over the arrays"),
    "placement.capacity": native("--reservation, or the target's `capacity`"),
    "placement.nodes": native("--nodelist"),
    "placement.exclude": native("--exclude"),
    "placement.selector": native("--constraint"),
    "priority": native("--qos by the target's `priorities`; low is --nice"),
    "account": native("--account"),
    "time_limit": native("--time, behind the shim's own clock"),
    "start_deadline": native("--deadline, the time limit added"),
    "retry.failure": native("scontrol requeue by the shim; runs that share a node start again there"),
    "retry.preemption": native("--requeue; the shim counts"),
    "retry.capacity.window": native("a job waits in the queue for as long as it takes"),
    "checkpoint.signal": native("--signal=B:USR1 before a preemption, the shim's clock before the time limit"),
    "after": native("--dependency: afterok, afterany or afternotok"),
}

INTERRUPTS: Final[Mapping[str, FieldSupport]] = {
    "preempt": native("scontrol requeue"),
    "timeout": ALARM,
    "node-loss": refused("taking a node down needs an operator"),
    "oom": refused("only the memory of a running command can be exceeded"),
}
