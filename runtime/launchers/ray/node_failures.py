"""The driver's notes on nodes that died: a file beside the attempt, from which the next shim takes the reason.

The driver ends no attempt. An attempt's own end counts, unless it says only that the attempt was asked to stop.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from runtime.shim.record import RunRecord
from runtime.shim.retry import LOSS


def find_dead(
    codes: Sequence[int | None], places: Sequence[Mapping[str, Any]], nodes: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Return the places that were lost and whose node Ray counts as dead. `nodes` is the answer of `ray.nodes()`."""
    dead = {each["NodeID"] for each in nodes if not each["Alive"]}
    return [place for code, place in zip(codes, places, strict=True) if code is None and place["node"] in dead]


def has_living(
    codes: Sequence[int | None], places: Sequence[Mapping[str, Any]], nodes: Sequence[Mapping[str, Any]]
) -> bool:
    """Return whether a node that was lost is alive, so that its shim may be."""
    alive = {each["NodeID"] for each in nodes if each["Alive"]}
    return any(code is None and place["node"] in alive for code, place in zip(codes, places, strict=True))


def record_dead(run: RunRecord, native: str, before: int, dead: Sequence[Mapping[str, Any]]) -> int | None:
    """Write beside the attempt that began on these nodes that they died; returns its number, None if there is none.

    `before` is the number of the newest attempt when the nodes were placed. Attempts of other native jobs are left alone.
    """
    attempts = run.attempts()
    if not dead or not attempts or attempts[-1][0] <= before:
        return None
    number, end = attempts[-1]
    start = run.started(number) or {}
    if start.get("native") != native or (end is not None and end["reason"] != "stopped"):
        return None
    names = ", ".join(f"{each['host']} ({each['node'][:8]})" for each in dead)
    text = json.dumps({"message": f"ray says that its node {names} is dead"}, sort_keys=True)
    run.record.write(f"{run.attempt_name(number)}/{LOSS}", text)
    return int(number)
