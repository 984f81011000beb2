"""The resources that a run requests from a Ray cluster."""

from __future__ import annotations

from typing import Any, Final

from runtime.errors import InvalidValue, NotPossible
from runtime.jobs.spec import MAX_RANKS, JobSpec
from runtime.launchers.ray.placement import head_of
from runtime.tpu_shapes import find_shape

CPUS: Final = 1.0
"""CPUs of each node of a run if the spec names none."""


def render_demand(spec: JobSpec) -> dict[str, Any]:
    """`options` of each node's actor, and the same as a `bundle` of a placement group."""
    wanted = spec.resources
    cpus = CPUS if wanted.cpus is None else wanted.cpus
    gpus = wanted.gpus.count if wanted.gpus else 0
    memory = wanted.memory.low if wanted.memory else 0
    options: dict[str, Any] = {"num_cpus": cpus}
    bundle: dict[str, Any] = {"CPU": cpus}
    if gpus:
        options["num_gpus"] = bundle["GPU"] = gpus
    if memory:
        options["memory"] = bundle["memory"] = memory
    if wanted.gpus and wanted.gpus.type:
        options["accelerator_type"] = wanted.gpus.type
        bundle[f"accelerator_type:{wanted.gpus.type}"] = 0.001
    found: dict[str, Any] = {"options": options, "bundle": bundle}
    if wanted.tpu:
        hosts, chips = count_hosts(wanted.tpu.type)
        nodes, slices = hosts * wanted.tpu.slices, wanted.tpu.slices
        if spec.nodes not in (1, nodes):
            have = f"{slices} TPUs of type `{wanted.tpu.type}` have" if slices > 1 else ""
            raise NotPossible(
                f"{have or f'a TPU of type `{wanted.tpu.type}` has'} {nodes} hosts, and `nodes` is {spec.nodes}",
                hint=f"nodes: {nodes}, or leave it out",
            )
        if nodes * spec.tasks_per_node > MAX_RANKS:
            raise NotPossible(
                f"{slices} TPUs of type `{wanted.tpu.type}` have {nodes} hosts, and a run has at most {MAX_RANKS} ranks",
                hint="fewer of `resources.tpu.slices`, or of `tasks_per_node`",
            )
        if hosts == 1:
            options["resources"] = {"TPU": chips, head_of(wanted.tpu.type): 1}
        tpu = {"type": wanted.tpu.type, "chips": chips, "hosts": hosts, "slices": slices}
        found |= {"tpu": tpu, "start_s": spec.gang.start_timeout.total_seconds()}
    return found


def count_nodes(spec: JobSpec) -> int:
    """Machines of a run: those of its TPU slices, if it asks for any."""
    tpu = spec.resources.tpu
    return count_hosts(tpu.type)[0] * tpu.slices if tpu else spec.nodes


def count_hosts(type_: str) -> tuple[int, int]:
    """Hosts of a slice, and the chips of each, as `find_shape` has them. Raises `InvalidValue` for a text that is no type."""
    shape = find_shape(type_)
    if shape is None:
        raise InvalidValue("resources.tpu.type", type_, "a type and a size, such as v4-8 or v5litepod-16")
    return shape
