"""Decisions of the driver, without Ray: a run's request, the meaning of its nodes' exit codes, and the next step."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from runtime.shim.common import DONE, DUPLICATE, FAILED, NEVER, REFUSED

FINAL: Final = frozenset({DONE, FAILED, REFUSED, DUPLICATE, NEVER})
"""Exit codes of a shim after which its run is not placed again."""
NOT_OURS: Final = frozenset({REFUSED, DUPLICATE, NEVER})
"""Exit codes after which the run has no result from this driver, so no other node can finish it."""
MOST_AT_ONCE: Final = 256
"""Runs of an array that are placed or wait for a place at a time, unless `array.max_parallel` names another number."""
WORKER_LABEL: Final = "ray.io/tpu-worker-id"
"""Ray's label of a node that is a host of a TPU slice."""
MOST_THREADS: Final = 1024
"""The largest such number: each run has a thread of the driver."""


def count_at_once(runs: int, most: int | None) -> int:
    return max(1, min(runs, most or MOST_AT_ONCE, MOST_THREADS))


def judge_codes(codes: Sequence[int | None]) -> int | None:
    """The exit code of a run by those of its nodes, node 0 first; None if it has to be placed again.

    A code of None is a node that was lost. Node 0 commits the result, so its code counts if it is final.
    """
    if codes[0] in FINAL:
        return codes[0]
    return next((code for code in codes if code in NOT_OURS), None)


def is_over(codes: Mapping[int, int | None], nodes: int) -> bool:
    """Whether nodes that still go on have nothing to wait for: another was lost, or cannot take part."""
    return len(codes) < nodes and any(code is None or code in NOT_OURS for code in codes.values())


def next_pause(idle: int, retry: Mapping[str, Any], chance: Callable[[], float] = random.random) -> float:
    """Seconds until a run is placed again after `idle` placements in a row that began no attempt.

    After an attempt the shim's own rule decides.
    """
    low, high = retry["backoff_s"]
    return 0.0 if idle < 1 else float(min(high, low * 2 ** (idle - 1)) * (0.5 + chance()))


def worst_code(codes: Sequence[int]) -> int:
    """One exit code for the driver."""
    for code in (REFUSED, DUPLICATE, NEVER, FAILED):
        if code in codes:
            return code
    return DONE


def add_numbers(places: Sequence[Mapping[str, Any]], nodes: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Complete places by the numbers of hosts in their slices that Ray read from Google, by its `nodes()`.

    The variable `TPU_WORKER_ID` is set on GKE, and seldom in a container on a TPU machine.
    """
    known = {each["NodeID"]: (each.get("Labels") or {}).get(WORKER_LABEL) for each in nodes}
    return [{**each, "worker": each.get("worker") or known.get(each["node"])} for each in places]


def sort_nodes(places: Sequence[Mapping[str, Any]], slices: int = 1) -> list[int]:
    """Which actor is which node of the run: as they came, or slice by slice in the order of each slice's own numbers."""
    order: list[int] = []
    hosts = len(places) // slices
    for first in range(0, len(places), hosts):
        here = list(range(first, first + hosts))
        numbers = {at: places[at].get("worker") for at in here}
        if all(isinstance(each, str) and each.isdecimal() for each in numbers.values()):
            here.sort(key=lambda at: int(str(numbers[at])))
        order += here
    return order


def list_firsts(wants: Mapping[str, Any], nodes: int) -> list[tuple[dict[str, float], dict[str, Any]]]:
    """Return the first request of a run, in the form of `list_rooms`: all its nodes, or the first host of each slice of a TPU with
    several hosts. That host has a resource of its own, and its name leads to the others."""
    tpu = wants.get("tpu")
    if tpu is None or tpu.get("hosts", nodes) == 1:
        return list_rooms(wants, nodes)
    first = {head_of(tpu["type"]): 1.0}
    return [(first, {"num_cpus": 0, "resources": first})] * int(tpu.get("slices", 1))


def list_rooms(
    wants: Mapping[str, Any], nodes: int, names: Sequence[str] = ()
) -> list[tuple[dict[str, float], dict[str, Any]]]:
    """Return the request of each node, as a bundle of a placement group and as options of its actor.

    With the `names` of slices, the nodes are their hosts, slice by slice.
    """
    bundle, options = dict(wants["bundle"]), dict(wants["options"])
    if not names:
        return [({**bundle, **options.get("resources", {})}, options)] * nodes
    rooms = []
    for name in names:
        resources = {name: 1, "TPU": wants["tpu"]["chips"]}
        rooms += [({**bundle, **resources}, {**options, "resources": resources})] * (nodes // len(names))
    return rooms


def head_of(type_: str) -> str:
    """The resource that only the first host of a TPU slice has."""
    return f"TPU-{type_}-head"


def find_slice(resources: Mapping[str, float], type_: str) -> str | None:
    """The name of the TPU slice that a node is the first host of, by the node's resources: `{NAME: 1, "TPU": 4, …}`."""
    known = ("CPU", "GPU", "TPU", "memory", "object_store_memory", head_of(type_))
    found = [
        name
        for name, amount in resources.items()
        if amount == 1 and name not in known and not name.startswith(("node:", "accelerator_type:", "TPU-", "TPU_"))
    ]
    return found[0] if len(found) == 1 else None
