"""Why a Job's index waits or failed, with the numbers that Kubernetes gives: pure functions of its objects."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from runtime.jobs.plan import NativeState
from runtime.jobs.spec import JobState
from runtime.launchers.kubernetes.render import JOB
from runtime.launchers.kubernetes.states import CONTAINER, PodView, has_ended, left_result, read_pod
from runtime.reasons import EndReason, Explanation
from runtime.values import replace

Object = Mapping[str, Any]

_QUOTA = re.compile(r"exceeded quota: ([^,]+), requested: (.+?), used: (.+?), limited: (.+)")


def explain_index(
    native: NativeState,
    job: Object | None,
    pods: Sequence[Object],
    events: Sequence[Object],
    *,
    image: str = "",
) -> Explanation | None:
    """`pods` are those of the index, oldest first; `events` those of the Job and of these pods."""
    if job is None:
        return Explanation(sentence="Kubernetes has forgotten it", evidence=("no Job of that name is left",))
    pod = pods[-1] if pods else None
    if pod is None:
        return _without_pod(job, events)
    view = read_pod(pod)
    evidence = tuple(_evidence(view, pod, events))
    lost = _on_dead_node(pod, view)
    if lost:
        return Explanation(
            sentence=f"the node `{view.where}` does not answer, and its pod `{view.name}` keeps the index",
            evidence=evidence,
            hint=f"if the node stays away: runtime cancel {job['metadata'].get('labels', {}).get(JOB, 'ID')} "
            f"--index {native.index} --release; its old run may still go on there",
        )
    for build in (_unscheduled, _image, _memory, _disk, _evicted):
        found = build(view, pod, evidence, image)
        if found is not None:
            return _with_way_out(found, view, job)
    if view.raw.startswith("Pending/Create"):
        found = Explanation(
            sentence=f"its container cannot be made: {view.message}", evidence=evidence, hint=_CONTAINER_HINT
        )
        return _with_way_out(found, view, job)
    if view.reason is EndReason.TIMEOUT:
        return Explanation(sentence="the pod was older than its activeDeadlineSeconds", evidence=evidence)
    if view.reason is EndReason.LOST and (found := _lost(pods)):
        return found
    # Without a message it is the state and nothing that explains it; our own result is told with its attempt.
    if not view.message or left_result(pod):
        return None
    return Explanation(sentence=f"{view.raw}: {view.message}", evidence=evidence)


def _with_way_out(found: Explanation, view: PodView, job: Object) -> Explanation:
    """Of a pod that waits for what does not come by itself, how to get its machine back."""
    if view.state is not JobState.PENDING or view.reason is None:
        return found
    name = job["metadata"].get("labels", {}).get(JOB, "ID")
    where = f" on {view.where}" if view.where else ""
    return replace(
        found,
        evidence=(*found.evidence, f"its pod keeps what it was given{where} until the job is cancelled"),
        hint=f"{found.hint}; or runtime cancel {name[:10]}",
    )


_CONTAINER_HINT = "a Secret or ConfigMap that the pod names has to be there, with the key"


def _without_pod(job: Object, events: Sequence[Object]) -> Explanation:
    refused = [each for each in events if each.get("reason") == "FailedCreate"]
    if refused:
        message = _text(refused[-1])
        found = _QUOTA.search(message)
        if found:
            return Explanation(
                sentence=f"the quota `{found[1]}` has no room: a run asks for {found[2]}, {found[3]} is used of {found[4]}",
                evidence=(f"job controller: {message}",),
                hint="ask for less, or wait: it starts when others have ended",
            )
        return Explanation(sentence=f"no pod can be made: {message}", evidence=(f"job controller: {message}",))
    if job["spec"].get("suspend"):
        return Explanation(sentence="the Job is suspended", hint="launch it again: it goes on where it stopped")
    active, parallel = int(job.get("status", {}).get("active", 0)), int(job["spec"].get("parallelism", 1))
    return Explanation(
        sentence=f"{active} of at most {parallel} runs are active, and its turn has not come",
        evidence=(f"job: parallelism {parallel}",),
    )


def _unscheduled(view: PodView, pod: Object, evidence: tuple[str, ...], image: str) -> Explanation | None:
    if view.raw not in ("Pending/Unschedulable", "Pending/SchedulingGated"):
        return None
    asked = ", ".join(f"{name} {amount}" for name, amount in sorted(_requests(pod).items())) or "nothing"
    return Explanation(
        sentence=f"no node takes it: {view.message}",
        evidence=(f"it asks for {asked}", *evidence),
        hint="ask for less, or for other nodes",
    )


def _image(view: PodView, pod: Object, evidence: tuple[str, ...], image: str) -> Explanation | None:
    name = next((each["image"] for each in pod["spec"]["containers"] if each["name"] == CONTAINER), image)
    if view.reason is EndReason.IMAGE_FAILED and view.raw in ("StartError", "ContainerCannotRun"):
        return Explanation(
            sentence=f"the image `{name}` has no Python that could run: the shim needs Python 3.6 or newer",
            evidence=evidence,
            hint="put a Python into the image, or name it: `python` of the target",
        )
    if view.reason is EndReason.IMAGE_FAILED or "Image" in view.raw:
        return Explanation(
            sentence=f"the image `{name}` cannot be pulled: {view.message}",
            evidence=evidence,
            hint="check name and tag, and the pull secret of the namespace",
        )
    return None


def _memory(view: PodView, pod: Object, evidence: tuple[str, ...], image: str) -> Explanation | None:
    if view.reason is not EndReason.OOM:
        return None
    limit = _limits(pod).get("memory")
    return Explanation(
        sentence=f"it used more memory than its limit of {_size(limit)}" if limit else "its node ran out of memory",
        evidence=evidence,
        hint="raise resources.memory",
    )


def _disk(view: PodView, pod: Object, evidence: tuple[str, ...], image: str) -> Explanation | None:
    if view.reason is not EndReason.DISK or left_result(pod):
        return None
    return Explanation(
        sentence=f"it used more disk than its limit, and was taken off the node `{view.where}`: {view.message}",
        evidence=evidence,
        hint="raise resources.disk, or write to the record root or a claim",
    )


def _lost(pods: Sequence[Object]) -> Explanation | None:
    """How the pods ended that left no word of the shim: each was an attempt that counts as lost."""
    views = [read_pod(each) for each in pods if has_ended(each) and not left_result(each)]
    if not views:
        return None
    counted = ", ".join(
        f"{raw}{f' ({count} times)' * (count > 1)}" for raw, count in Counter(each.raw for each in views).items()
    )
    memory = any(each.reason is EndReason.OOM for each in views)
    return Explanation(
        sentence=f"its pods went without a word: {counted}",
        evidence=tuple(map(_pod_line, views[-4:])),
        hint="raise resources.memory" if memory else None,
    )


def _evicted(view: PodView, pod: Object, evidence: tuple[str, ...], image: str) -> Explanation | None:
    if not view.raw.startswith(("Evicted", "DisruptionTarget")):
        return None
    return Explanation(
        sentence=f"its pod was taken off the node `{view.where}`: {view.message or view.raw}", evidence=evidence
    )


def _on_dead_node(pod: Object, view: PodView) -> bool:
    if view.raw in ("Terminating/DeletionByTaintManager", "Terminating/DeletionByPodGC"):
        return True
    return view.raw.startswith("Unknown/")


def _evidence(view: PodView, pod: Object, events: Sequence[Object]) -> Iterator[str]:
    yield _pod_line(view)
    said = Counter[str]()
    for each in events:
        mine = each.get("involvedObject", {}).get("name") == view.name and each.get("type") != "Normal"
        # Every cluster without a name service says so of every pod.
        if mine and each.get("reason") != "MissingClusterDNS" and _text(each) not in view.message:
            by = each.get("source", {}).get("component") or each.get("reportingComponent") or "event"
            said[f"{by}: {_text(each)}"] += int(each.get("count") or 1)
    for text, count in list(said.items())[-4:]:
        yield text + (f" ({count} times)" if count > 1 else "")


def _pod_line(view: PodView) -> str:
    where = f" on {view.where}" if view.where else ""
    return f"pod {view.name}{where}: {view.raw}" + (f", exit code {view.exit_code}" if view.exit_code else "")


def _text(event: Object) -> str:
    return " ".join(str(event.get("message", "")).split())


def _requests(pod: Object) -> Mapping[str, str]:
    found: Mapping[str, str] = pod["spec"]["containers"][0].get("resources", {}).get("requests", {})
    return found


def _limits(pod: Object) -> Mapping[str, str]:
    found: Mapping[str, str] = pod["spec"]["containers"][0].get("resources", {}).get("limits", {})
    return found


def _size(quantity: str) -> str:
    from runtime.units import format_size

    return format_size(int(quantity)) if quantity.isdigit() else quantity
