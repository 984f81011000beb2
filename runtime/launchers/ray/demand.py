"""What a run asks a Ray cluster for."""

from __future__ import annotations

from typing import Any, Final

from runtime.jobs.spec import JobSpec

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
    return {"options": options, "bundle": bundle}
