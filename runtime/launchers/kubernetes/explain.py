"""Why an index of a Job waits or failed, with the numbers of Kubernetes: pure functions of its objects."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from runtime.end_reasons import EndReason, Explanation
from runtime.jobs.plan import NativeState
from runtime.jobs.spec import JobState
from runtime.launchers.kubernetes.client import Object
from runtime.launchers.kubernetes.render import JOB
from runtime.launchers.kubernetes.states import CONTAINER, PodView, has_ended, left_result, nodes_of, read_pod
from runtime.units import count_noun, format_size

_QUOTA = re.compile(r"exceeded quota: ([^,]+), requested: (.+?), used: (.+?), limited: (.+)")


def explain_index(
    native: NativeState, job: Object | None, pods: Sequence[Object], events: Sequence[Object]
) -> Explanation | None:
    """`pods` are those of the index, oldest first; `events` those of the Job and of these pods."""
    if job is None:
        return Explanation(sentence="Kubernetes has forgotten it", evidence=("no Job of that name is left",))
    if not pods:
        return _without_pod(job, events)
    pod = pods[-1]
    view = read_pod(pod)
    evidence = tuple(_evidence(view, events))
    name = job["metadata"].get("labels", {}).get(JOB, "ID")
    on_dead_node = view.raw in ("Terminating/DeletionByTaintManager", "Terminating/DeletionByPodGC")
    if on_dead_node or view.raw.startswith("Unknown/"):
        return Explanation(
            sentence=f"the node `{view.where}` does not answer, and its pod `{view.name}` keeps the index",
            evidence=evidence,
            hint=f"if the node stays away: runtime cancel {name} "
            f"--index {native.index} --release; its old run may still go on there",
        )
    if (found := _known(view, pod)) is not None:
        sentence, hint, more = found
        if view.state is JobState.PENDING and view.reason is not None:
            # It waits for a change that does not come by itself: the hint says how to get its machine back.
            where = f" on {view.where}" if view.where else ""
            evidence += (f"its pod keeps what it was given{where} until the job is cancelled",)
            hint = f"{hint}; or runtime cancel {name[:10]}"
        return Explanation(sentence=sentence, evidence=(*more, *evidence), hint=hint)
    if view.reason is EndReason.TIMEOUT:
        return Explanation(sentence="the pod was older than its activeDeadlineSeconds", evidence=evidence)
    if view.reason is EndReason.LOST and (lost := _lost(pods)):
        return lost
    # Without a message the state explains nothing; the shim's own result is shown with its attempt.
    if not view.message or left_result(pod):
        return None
    return Explanation(sentence=f"{view.raw}: {view.message}", evidence=evidence)


def _known(view: PodView, pod: Object) -> tuple[str, str | None, tuple[str, ...]] | None:
    """Sentence, hint and further evidence for a pod whose state has a known cause."""
    container: Object = next((each for each in pod["spec"]["containers"] if each["name"] == CONTAINER), {})
    image = container.get("image", "")
    resources = pod["spec"]["containers"][0].get("resources", {})
    if view.raw in ("Pending/Unschedulable", "Pending/SchedulingGated"):
        requests = resources.get("requests", {})
        asked = ", ".join(f"{name} {amount}" for name, amount in sorted(requests.items())) or "nothing"
        hint = "ask for less, or for other nodes"
        return f"no node takes it: {view.message}", hint, (f"it asks for {asked}",)
    if view.reason is EndReason.IMAGE_FAILED and view.raw in ("StartError", "ContainerCannotRun"):
        hint = "put a Python into the image, or name it: `python` of the target"
        return f"the image `{image}` has no Python that could run: the shim needs Python 3.6 or newer", hint, ()
    if view.reason is EndReason.IMAGE_FAILED or "Image" in view.raw:
        hint = "check name and tag, and the pull secret of the namespace"
        return f"the image `{image}` cannot be pulled: {view.message}", hint, ()
    if view.reason is EndReason.OOM:
        limit = resources.get("limits", {}).get("memory")
        size = format_size(int(limit)) if limit and limit.isdecimal() else limit
        sentence = f"it used more memory than its limit of {size}" if limit else "its node ran out of memory"
        return sentence, "raise resources.memory", ()
    if view.reason is EndReason.DISK and not left_result(pod):
        sentence = f"it used more disk than its limit, and was taken off the node `{view.where}`: {view.message}"
        return sentence, "raise resources.disk, or write to the record root or a claim", ()
    if view.raw.startswith(("Evicted", "DisruptionTarget")):
        return f"its pod was taken off the node `{view.where}`: {view.message or view.raw}", None, ()
    if view.raw.startswith("Pending/Create"):
        hint = "a Secret or ConfigMap that the pod names has to be there, with the key"
        return f"its container cannot be made: {view.message}", hint, ()
    return None


def _without_pod(job: Object, events: Sequence[Object]) -> Explanation:
    refused = [each for each in events if each.get("reason") == "FailedCreate"]
    if refused:
        message = _text(refused[-1])
        evidence = (f"job controller: {message}",)
        if found := _QUOTA.search(message):
            return Explanation(
                sentence=f"the quota `{found[1]}` has no room: a run asks for {found[2]}, {found[3]} is used of {found[4]}",
                evidence=evidence,
                hint="ask for less, or wait: it starts when others have ended",
            )
        return Explanation(sentence=f"no pod can be made: {message}", evidence=evidence)
    if job["spec"].get("suspend"):
        return Explanation(sentence="the Job is suspended", hint="launch it again: it goes on where it stopped")
    what = "run" if nodes_of(job) == 1 else "pod"
    active, parallel = int(job.get("status", {}).get("active", 0)), int(job["spec"].get("parallelism", 1))
    return Explanation(
        sentence=f"{active} of at most {count_noun(parallel, what)} active, and its turn has not come",
        evidence=(f"job: parallelism {parallel}",),
    )


def _lost(pods: Sequence[Object]) -> Explanation | None:
    """The ends of the pods whose shim left no result: each was an attempt that counts as lost."""
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


def _evidence(view: PodView, events: Sequence[Object]) -> Iterator[str]:
    yield _pod_line(view)
    said = Counter[str]()
    for each in events:
        mine = each.get("involvedObject", {}).get("name") == view.name and each.get("type") != "Normal"
        # A cluster without a name service reports that for every pod.
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
