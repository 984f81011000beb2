"""Parts of GPUs: a Lease for each GPU, with an annotation that lists its Jobs and the share of each.

Launches write it by compare-and-swap on the Lease's version. An entry counts only while its Job exists and has not ended,
so nothing has to be renewed or given back. A Job waits suspended until it is in the table; if its launch was killed
meanwhile, the entry counts for `PATIENCE`.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from runtime.errors import InfrastructureFailure
from runtime.jobs.ledger import now
from runtime.launchers.kubernetes.client import KubernetesCluster
from runtime.launchers.kubernetes.render import FILES, MANAGED, MANAGED_BY, SLOTS, WAITING
from runtime.launchers.kubernetes.states import is_unfinished
from runtime.units import divide, parse_time

TABLE: Final = "research-runtime/slots"
PATIENCE: Final = timedelta(minutes=15)
"""How long a suspended Job keeps its slots; a launch that goes on later takes them again."""
_TRIES: Final = 20
_CLOSE: Final = 1e-6


@dataclass(frozen=True, slots=True, order=True)
class Gpu:
    node: str
    number: int

    def __str__(self) -> str:
        return f"{self.node}/{self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A Job that has a part of a GPU."""

    uid: str
    job: str
    """NAMESPACE/NAME"""
    slots: int
    share: float
    """Share of the GPU of each slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The runs of a job that one Job serves."""

    gpu: Gpu | None = None
    """None if runs share no GPU."""
    first: int = 0
    """The first run, counted from 0."""
    count: int
    parallel: int
    """How many runs at a time."""


def lease_name(gpu: Gpu) -> str:
    return f"runtime-gpu-{re.sub(r'[^a-z0-9.-]', '-', gpu.node.lower())}-{gpu.number}"


def read_table(lease: Mapping[str, Any] | None) -> list[Holder]:
    text = ((lease or {}).get("metadata", {}).get("annotations") or {}).get(TABLE, "{}")
    return [
        Holder(uid=uid, job=each["job"], slots=int(each["slots"]), share=float(each["share"]))
        for uid, each in sorted(json.loads(text).items())
    ]


def write_table(holders: Sequence[Holder]) -> str:
    table = {each.uid: {"job": each.job, "slots": each.slots, "share": each.share} for each in holders}
    return json.dumps(table, sort_keys=True)


def grant(holders: Sequence[Holder], uid: str, job: str, wanted: int, share: float) -> tuple[int, list[Holder]]:
    """The slots of the GPU that the Job gets, at most `wanted`, and the table with it; a Job that has some keeps them."""
    for each in holders:
        if each.uid == uid:
            return each.slots, list(holders)
    free = 1 - sum(each.slots * each.share for each in holders)
    got = min(wanted, int((free + _CLOSE) / share))
    if got < 1:
        return 0, list(holders)
    return got, [*holders, Holder(uid=uid, job=job, slots=got, share=share)]


def living(
    holders: Sequence[Holder], find_job: Callable[[str], Mapping[str, Any] | None], now: datetime
) -> list[Holder]:
    """The holders whose Job is the same one, has not ended, and is released or waits for less than `PATIENCE`."""
    found = []
    for each in holders:
        job = find_job(each.job)
        if job is None or job["metadata"]["uid"] != each.uid or not is_unfinished(job):
            continue
        if not is_waiting(job) or now - parse_time(job["metadata"]["creationTimestamp"]) < PATIENCE:
            found.append(each)
    return found


def is_waiting(job: Mapping[str, Any]) -> bool:
    """Whether a Job still waits for slots of a GPU or for its shim."""
    annotations = job["metadata"].get("annotations") or {}
    return WAITING in (annotations.get(SLOTS), annotations.get(FILES))


def take_slots(
    cluster: KubernetesCluster, namespace: str, gpu: Gpu, *, uid: str, job: str, wanted: int, share: float
) -> tuple[int, list[Holder]]:
    """Write the Job into the GPU's table; returns its slots and the table. Safe to repeat."""
    name = lease_name(gpu)

    def find_job(native: str) -> Mapping[str, Any] | None:
        where, _, what = native.partition("/")
        return cluster.get("jobs", where, what)

    for _ in range(_TRIES):
        lease = cluster.get("leases", namespace, name)
        got, holders = grant(living(read_table(lease), find_job, now()), uid, job, wanted, share)
        if got == 0:
            return 0, holders
        metadata = {
            **((lease or {}).get("metadata") or {"name": name, "namespace": namespace}),
            "labels": {MANAGED_BY: MANAGED},
            "annotations": {TABLE: write_table(holders)},
        }
        metadata.pop("managedFields", None)
        body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata}
        if lease is None:
            if cluster.create("leases", namespace, body) is not None:
                return got, holders
        elif cluster.replace("leases", namespace, {**body, "spec": lease.get("spec", {})}):
            return got, holders
        time.sleep(0.05)
    raise InfrastructureFailure(
        f"the slots of GPU `{gpu}` change too fast: {_TRIES} writes were refused", hint="run the same command again"
    )


def deal(gpus: Sequence[Gpu], slots: int, count: int, at_once: int | None = None) -> list[Share]:
    """Share all runs evenly, in a row, over as many GPUs as the runs that may go at once fill."""
    together = min(count, at_once or count)
    used = list(gpus)[: max(1, min(len(gpus), -(-together // slots)))]
    counts = divide(count, len(used))
    parallel = divide(min(together, slots * len(used)), len(used))
    return [
        Share(gpu=gpu, first=sum(counts[:place]), count=counts[place], parallel=parallel[place])
        for place, gpu in enumerate(used)
    ]
