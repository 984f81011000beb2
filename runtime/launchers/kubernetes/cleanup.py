"""Finds the objects of a job by their labels, independent of the ledger, and removes them until none is left."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from runtime.jobs.plan import OwnedResource
from runtime.launchers.kubernetes.client import KubernetesCluster, Object
from runtime.launchers.kubernetes.render import JOB, MANAGED, MANAGED_BY, OWNER, label_value, root_mark
from runtime.launchers.kubernetes.settings import KubernetesTarget
from runtime.launchers.kubernetes.states import NAME_OF_JOB, has_ended, is_unfinished, read_pod
from runtime.units import parse_time

MANAGED_JOBS: Final = f"{MANAGED_BY}={MANAGED},{JOB}"
"""Selects every object of a job."""
END_S: Final = 30
"""How long to wait, beyond the grace of the pods, until all is gone."""
_KINDS: Final[Sequence[tuple[str, str, Callable[[Object], bool]]]] = (
    ("jobs", "Job", is_unfinished),
    ("pods", "pod", lambda pod: not has_ended(pod)),
    ("configmaps", "ConfigMap", lambda found: False),
)
_LOOK_S: Final = 0.2
_GRACE_S: Final = 30
"""The grace of pods that name none."""


def list_owned(
    cluster: KubernetesCluster, place: KubernetesTarget, owner: str | None, job: str | None
) -> list[OwnedResource]:
    """Each Job, pod and ConfigMap of this record root's jobs."""
    labels = MANAGED_JOBS if job is None else f"{MANAGED_BY}={MANAGED},{JOB}={job}"
    labels += f",{OWNER}={label_value(owner)}" if owner is not None else ""
    return [
        OwnedResource(
            job=each["metadata"]["labels"][JOB],
            native_id=f"{place.namespace}/{each['metadata']['name']}",
            what=what,
            live=lives(each),
            since=parse_time(each["metadata"]["creationTimestamp"]),
        )
        for kind, what, lives in _KINDS
        for each in _list_own(cluster, kind, place, labels)
    ]


def remove_owned(cluster: KubernetesCluster, place: KubernetesTarget, owned: Sequence[OwnedResource]) -> list[str]:
    """Remove the Jobs of these jobs and all that they own; returns a description of anything left. Safe to repeat."""
    return [line for job in sorted({each.job for each in owned}) for line in _sweep(cluster, place, job)]


def _sweep(cluster: KubernetesCluster, place: KubernetesTarget, job: str) -> list[str]:
    namespace, labels = place.namespace, f"{MANAGED_BY}={MANAGED},{JOB}={job}"
    jobs, pods = (_list_own(cluster, kind, place, labels) for kind in ("jobs", "pods"))
    for each in jobs:
        # The objects that it owns, Secrets too, go before it does.
        cluster.delete("jobs", namespace, each["metadata"]["name"])
    names = {each["metadata"]["name"] for each in jobs}
    for kind, objects in (("pods", pods), ("configmaps", _list_own(cluster, "configmaps", place, labels))):
        for each in objects:
            # Its Job was deleted without it.
            if not names & {owner["name"] for owner in each["metadata"].get("ownerReferences", ())}:
                cluster.delete(kind, namespace, each["metadata"]["name"])
    names |= {_native_name(each) for each in pods}
    return wait_until_gone(cluster, namespace, names, max(map(grace_of, [*jobs, *pods]), default=0) + END_S)


def wait_until_gone(cluster: KubernetesCluster, namespace: str, names: set[str], patience_s: float) -> list[str]:
    """Wait until the Jobs of these names and their pods are gone; returns a description of anything left after `patience_s`."""
    until = time.monotonic() + patience_s
    while left := list(_list_left(cluster, namespace, sorted(names))):
        if time.monotonic() >= until:
            return left
        time.sleep(_LOOK_S)
    return []


def grace_of(found: Object) -> float:
    """The grace in seconds of a pod, or of the pods of a Job."""
    spec: Mapping[str, Any] = found["spec"]
    return float(spec.get("template", {"spec": spec})["spec"].get("terminationGracePeriodSeconds", _GRACE_S))


def _list_left(cluster: KubernetesCluster, namespace: str, names: Sequence[str]) -> Iterator[str]:
    for name in names:
        if cluster.get("jobs", namespace, name) is not None:
            yield f"the Job {namespace}/{name} is still being deleted"
        for pod in cluster.list("pods", namespace, labels=f"{NAME_OF_JOB}={name}"):
            view = read_pod(pod)
            where = f" on {view.where}" if view.where else ""
            yield f"the pod {namespace}/{view.name}{where} is still there: {view.raw}"


def _list_own(cluster: KubernetesCluster, kind: str, place: KubernetesTarget, labels: str) -> list[dict[str, Any]]:
    """The objects of this record root, by the names of their Jobs: jobs of two roots may share an id."""
    ours = re.compile(rf"j-[^-]+-{root_mark(place)}-\d+(-|$)")
    found = cluster.list(kind, place.namespace, labels=labels)
    return [each for each in found if ours.match(_native_name(each) if kind == "pods" else each["metadata"]["name"])]


def _native_name(pod: Object) -> str:
    return str(pod["metadata"]["labels"].get(NAME_OF_JOB, ""))
