"""An in-process API with the calls of `runtime.launchers.kubernetes.client.KubernetesCluster`, for tests of the launcher.

It has no controllers: a test creates and ends the pods.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from typing import Any

from runtime.jobs.ledger import now
from runtime.launchers.kubernetes.gpu_leases import Gpu, lease_name, read_table
from runtime.launchers.kubernetes.states import INDEX, NAME_OF_JOB
from runtime.units import format_time


class Api:
    """Namespaced objects with versions; a stale write is refused."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], dict[str, Any]] = {}
        self.before_write: Callable[[], None] = lambda: None
        self.printed = ""
        """Output of every pod."""
        self.holds_on = False
        """Whether deleted objects stay, as on a node that does not answer."""
        self._count = 0

    def get(self, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        return copy.deepcopy(self.objects.get((kind, namespace, name)))

    def list(self, kind: str, namespace: str, *, labels: str = "", fields: str = "") -> list[dict[str, Any]]:
        found = [each for key, each in self.objects.items() if key[:2] == (kind, namespace)]
        return [copy.deepcopy(each) for each in found if matches(each["metadata"].get("labels", {}), labels)]

    def create(self, kind: str, namespace: str, body: Mapping[str, Any]) -> dict[str, Any] | None:
        key = (kind, namespace, body["metadata"]["name"])
        if key in self.objects:
            return None
        self.objects[key] = made = copy.deepcopy(dict(body))
        made["metadata"] |= {"namespace": namespace, "uid": f"u{self._number()}"}
        made["metadata"] |= {"creationTimestamp": format_time(now()), "resourceVersion": self._number()}
        made.setdefault("status", {})
        return copy.deepcopy(made)

    def replace(self, kind: str, namespace: str, body: Mapping[str, Any]) -> bool:
        self.before_write()
        key = (kind, namespace, body["metadata"]["name"])
        if self.objects[key]["metadata"]["resourceVersion"] != body["metadata"]["resourceVersion"]:
            return False
        self.objects[key] = made = copy.deepcopy(dict(body))
        made["metadata"]["resourceVersion"] = self._number()
        return True

    def patch(self, kind: str, namespace: str, name: str, changes: Mapping[str, Any]) -> bool:
        found = self.objects[(kind, namespace, name)]
        found["metadata"]["annotations"].update(changes["metadata"]["annotations"])
        found["spec"].update(changes["spec"])
        return True

    def delete(self, kind: str, namespace: str, name: str, *, grace_s: int | None = None) -> None:
        """Delete an object; a Job's dependents go first."""
        found = self.objects.get((kind, namespace, name))
        if found is None:
            return
        if self.holds_on:
            found["metadata"]["deletionTimestamp"] = format_time(now())
            return
        del self.objects[(kind, namespace, name)]
        for key, each in list(self.objects.items()):
            if any(owner["uid"] == found["metadata"]["uid"] for owner in each["metadata"].get("ownerReferences", ())):
                del self.objects[key]

    def read_log(self, namespace: str, pod: str, lines: int) -> str:
        assert ("pods", namespace, pod) in self.objects
        return self.printed

    def close(self) -> None:
        pass

    # test actions

    def job(self, name: str) -> str:
        """Create a foreign Job that runs; return its uid."""
        made = self.create("jobs", "lab", {"metadata": {"name": name}, "spec": {}})
        assert made is not None
        return str(made["metadata"]["uid"])

    def add_pod(self, job: str, status: Mapping[str, Any], *, index: int = 0) -> None:
        """Create the next pod of a Job, with this status."""
        owner = self.objects[("jobs", "lab", job)]
        labels = {**owner["spec"]["template"]["metadata"]["labels"], NAME_OF_JOB: job, INDEX: str(index)}
        reference = {"kind": "Job", "name": job, "uid": owner["metadata"]["uid"], "controller": True}
        metadata = {"name": f"{job}-{index}-{self._number()}", "labels": labels, "ownerReferences": [reference]}
        self.create(
            "pods",
            "lab",
            {
                "metadata": metadata,
                "spec": {"nodeName": "n1", **owner["spec"]["template"]["spec"]},
                "status": dict(status),
            },
        )

    def end_job(self, job: str, how: str, **status: Any) -> None:
        """End the Job as `Complete` or `Failed`."""
        found = self.objects[("jobs", "lab", job)]
        found["status"] = {"conditions": [{"type": how, "status": "True"}], **status}

    def orphan(self, job: str) -> None:
        """Delete a Job without its dependents, as somebody else might."""
        del self.objects[("jobs", "lab", job)]
        for each in self.objects.values():
            each["metadata"].pop("ownerReferences", None)

    def names(self, *kinds: str) -> list[str]:
        return sorted(name for kind, _, name in self.objects if kind in (kinds or (kind,)))

    def table(self, number: int) -> list[tuple[str, int, float]]:
        lease = self.get("leases", "lab", lease_name(Gpu("n1", number)))
        return [(each.job, each.slots, each.share) for each in read_table(lease)]

    def _number(self) -> str:
        self._count += 1
        return str(self._count)


def matches(labels: Mapping[str, str], selector: str) -> bool:
    """Return whether a selector such as `a`, `a=b` or `a in (b,c)`, separated by commas, matches an object's labels."""
    for term in re.findall(r"[^,(]+(?:\([^)]*\))?", selector):
        name, among, chosen = term.partition(" in ")
        if not among:
            name, equal, chosen = term.partition("=")
            among = equal
        if name not in labels or (among and labels[name] not in chosen.strip("()").split(",")):
            return False
    return True
