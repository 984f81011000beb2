"""Reads Jobs and pods of Kubernetes into our states: pure functions of one list of each.

Every state, reason and condition that the job controller, the scheduler and the kubelet set has a place here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final, TypeVar

from runtime.end_reasons import EndReason
from runtime.jobs.plan import NativeState
from runtime.jobs.spec import JobState
from runtime.shim.common import AGAIN
from runtime.units import parse_time

Object = Mapping[str, Any]
P = TypeVar("P", bound=Mapping[str, Any])

OFFSET: Final = "research-runtime/offset"
"""Label of a Job: the first index that it serves."""
NODES: Final = "research-runtime/nodes"
"""Label of a Job and its pods: how many pods a run has, if it has several."""
CONTAINER: Final = "main"
FINALIZER: Final = "batch.kubernetes.io/job-tracking"
INDEX: Final = "batch.kubernetes.io/job-completion-index"
NAME_OF_JOB: Final = "batch.kubernetes.io/job-name"

_SHIM_CODES: Final = {
    0: EndReason.SUCCEEDED,
    1: EndReason.APP_FAILED,
    2: EndReason.CONFIG_INVALID,
    3: EndReason.DUPLICATE,
    AGAIN: EndReason.LOST,
    11: EndReason.APP_FAILED,
    12: EndReason.LOST,
}

# A container that waits: reasons of the kubelet that do not pass by themselves. None of them is an
# end: the pod keeps its machine, and runs as soon as the image or the Secret that it waits for exists.
_WAITING: Final = {
    "ImagePullBackOff": EndReason.IMAGE_FAILED,
    "ErrImagePull": EndReason.IMAGE_FAILED,
    "ErrImageNeverPull": EndReason.IMAGE_FAILED,
    "InvalidImageName": EndReason.IMAGE_FAILED,
    "ImageInspectError": EndReason.IMAGE_FAILED,
    "SignatureValidationFailed": EndReason.IMAGE_FAILED,
    "CreateContainerConfigError": EndReason.CONFIG_INVALID,
    "CreateContainerError": EndReason.CONFIG_INVALID,
}
# A pull that fails for a reason of the network is tried again by the kubelet, and may succeed.
_NETWORK = re.compile(
    r"timeout|timed out|refused|no such host|temporary|reset by peer|unreachable|server misbehaving|EOF|"
    r"\b(429|500|502|503|504)\b|too many requests|i/o|no route",
    re.IGNORECASE,
)

# `status.reason` of a pod that failed as a whole.
_POD_REASONS: Final = {
    "Evicted": EndReason.PREEMPTED,
    "DeadlineExceeded": EndReason.TIMEOUT,
    "Preempting": EndReason.PREEMPTED,
    "Preempted": EndReason.PREEMPTED,
    "NodeLost": EndReason.NODE_FAILED,
    "NodeShutdown": EndReason.NODE_FAILED,
    "Shutdown": EndReason.NODE_FAILED,
    "Terminated": EndReason.NODE_FAILED,
    "NodeAffinity": EndReason.NO_CAPACITY,
    "UnexpectedAdmissionError": EndReason.NODE_FAILED,
    "TopologyAffinityError": EndReason.NO_CAPACITY,
    "PodOSNotSupported": EndReason.CONFIG_INVALID,
    "PodFeatureUnsupported": EndReason.CONFIG_INVALID,
    "SysctlForbidden": EndReason.CONFIG_INVALID,
    "AppArmor": EndReason.CONFIG_INVALID,
    "InvalidNodeInfo": EndReason.NODE_FAILED,
    "VolumeAttachmentLimitExceeded": EndReason.NO_CAPACITY,
}
# `reason` of the condition DisruptionTarget.
_DISRUPTIONS: Final = {
    "PreemptionByScheduler": EndReason.PREEMPTED,
    "EvictionByEvictionAPI": EndReason.PREEMPTED,
    "TerminationByKubelet": EndReason.PREEMPTED,
    "DeletionByTaintManager": EndReason.NODE_FAILED,
    "DeletionByPodGC": EndReason.NODE_FAILED,
}
# `reason` of a container that has ended.
_ENDED: Final = {
    "OOMKilled": EndReason.OOM,
    "DeadlineExceeded": EndReason.TIMEOUT,
    "Evicted": EndReason.PREEMPTED,
    "ContainerCannotRun": EndReason.CONFIG_INVALID,
    "StartError": EndReason.CONFIG_INVALID,
    "ContainerStatusUnknown": EndReason.NODE_FAILED,
}
# `reason` of a Job's condition Failed, if no pod is left to show more. Pods that failed too often prove nothing about the
# command: a run that failed by itself has its result in the record root.
_JOB_REASONS: Final = {"MaxFailedIndexesExceeded": EndReason.SIBLING_FAILED, "DeadlineExceeded": EndReason.TIMEOUT}
_ABSENT = re.compile(r"executable file not found|no such file or directory", re.IGNORECASE)
_OWN_DISK = re.compile(r"exceed(s|ed) (its|the total|the)?.*limit", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class PodView:
    """One pod in our words."""

    name: str
    index: int
    """As the Job counts, from 0."""
    state: JobState
    reason: EndReason | None
    """Why it ended; for a pod that waits for a change that does not come by itself, the reason it would end with."""
    raw: str
    message: str
    exit_code: int | None
    started_at: datetime | None
    where: str


def read_states(jobs: Sequence[Object], pods: Sequence[Object], wanted: Iterable[str]) -> list[NativeState]:
    """A state for each index of the Jobs that exist; native ids are `NAMESPACE/NAME`.

    If a Job is gone, a state for each index whose pod is left: it still has its machine.
    """
    by_job: dict[str, list[Object]] = {}
    for pod in pods:
        uid = next((each["uid"] for each in pod["metadata"].get("ownerReferences", ()) if each.get("controller")), "")
        by_job.setdefault(uid, []).append(pod)
    asked = set(wanted)
    found: list[NativeState] = []
    for job in jobs:
        mine = by_job.pop(job["metadata"]["uid"], [])
        if (native := native_id(job)) in asked:
            found += _states_of(job, mine, native)
    left = [pod for orphans in by_job.values() for pod in orphans if not has_ended(pod)]
    for native in sorted({job_of(pod) for pod in left} & asked - {each.native_id for each in found}):
        mine = [pod for pod in left if job_of(pod) == native]
        found += [_without_job(pod, native) for pod in newest_pods(mine).values()]
    return found


def _without_job(pod: Object, native: str) -> NativeState:
    view = read_pod(pod)
    return NativeState(
        native_id=native,
        index=run_of(pod),
        state=view.state,
        raw=view.raw,
        message=f"its Job is gone, and its pod is not: {view.message}".rstrip(": "),
        started_at=view.started_at,
        where=view.where,
    )


def job_of(pod: Object) -> str:
    """The native id of the Job that made a pod."""
    metadata = pod["metadata"]
    return f"{metadata.get('namespace', '')}/{metadata.get('labels', {}).get(NAME_OF_JOB, '')}"


def has_ended(pod: Object) -> bool:
    """Whether a pod has given its machine back."""
    return pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


def native_id(job: Object) -> str:
    return f"{job['metadata']['namespace']}/{job['metadata']['name']}"


def _states_of(job: Object, pods: Sequence[Object], native: str) -> Iterator[NativeState]:
    status, spec = job.get("status", {}), job["spec"]
    offset, nodes = int(job["metadata"].get("labels", {}).get(OFFSET, 0)), nodes_of(job)
    newest = newest_pods(pods)
    succeeded, failed = expand(status.get("completedIndexes", "")), expand(status.get("failedIndexes", ""))
    over = ended_condition(job)
    found = []
    for index in range(int(spec.get("completions", 1))):
        pod = newest.get(index)
        view = read_pod(pod) if pod is not None else None
        state, reason, raw, message = _judge(job, index in succeeded, index in failed, over, view)
        found.append(
            NativeState(
                native_id=native,
                index=offset + index // nodes,
                state=state,
                reason=reason,
                raw=raw,
                message=message,
                exit_code=view.exit_code if view and state.terminal else None,
                started_at=view.started_at if view else None,
                where=view.where if view else "",
            )
        )
        if len(found) == nodes:
            yield _judge_together(found)
            found = []


def _judge_together(found: Sequence[NativeState]) -> NativeState:
    """The state of a run by those of its nodes: it waits for the last of them, and has ended when all of them have."""
    if len(found) == 1:
        return found[0]
    node, telling = min(enumerate(found), key=lambda each: (_telling(each[1].state), each[1].reason in _OF_OTHERS))
    state, message = telling.state, f"node {node} of {len(found)}: {telling.message or telling.raw}"
    living = any(not each.state.terminal for each in found)
    if living and state.terminal:
        # Node 0 decides the end of the run, and the others still have their machines.
        return replace(found[0], state=JobState.RUNNING, reason=None, raw=telling.raw, message=message, exit_code=None)
    if state is JobState.SUCCEEDED or (state is JobState.RUNNING and not telling.message):
        return found[0]
    return replace(telling, message=message)


_OF_OTHERS: Final = (EndReason.SIBLING_FAILED, EndReason.LOST)
"""Ends of a node that may follow from the end of another one."""
_ORDER: Final = (JobState.PENDING, JobState.FAILED, JobState.RUNNING, JobState.SUCCEEDED)


def _telling(state: JobState) -> int:
    return _ORDER.index(state)


def nodes_of(found: Object) -> int:
    """How many pods each run of this Job, or of this pod's Job, has."""
    return int((found["metadata"].get("labels") or {}).get(NODES, 1))


def run_of(pod: Object) -> int:
    """The index of the run that a pod serves."""
    return int((pod["metadata"].get("labels") or {}).get(OFFSET, 0)) + pod_index(pod) // nodes_of(pod)


def choose_telling(pods: Sequence[P]) -> list[P]:
    """The pods of the one node of a run that best explains its state, oldest first."""
    newest = newest_pods(pods)
    if len(newest) < 2:
        return list(pods)
    chosen = min(newest, key=lambda index: (_telling(read_pod(newest[index]).state), index))
    return [pod for pod in pods if pod_index(pod) == chosen]


def _judge(
    job: Object, succeeded: bool, failed: bool, over: Object | None, view: PodView | None
) -> tuple[JobState, EndReason | None, str, str]:
    if succeeded:
        return JobState.SUCCEEDED, EndReason.SUCCEEDED, "Complete", ""
    # A pod that is left has its machine, even if its Job has ended.
    if (failed or over is not None) and (view is None or view.state.terminal):
        return _judge_ended(failed, over, view)
    if view is None:
        if job["metadata"].get("deletionTimestamp"):
            return JobState.PENDING, None, "Deleting", "the Job is being deleted"
        if job["spec"].get("suspend"):
            return JobState.PENDING, None, "Suspended", "the Job is suspended"
        return JobState.PENDING, None, "Pending/NoPod", "it has no pod yet"
    if view.state is JobState.FAILED:
        # The Job has not given this index up: another pod follows.
        word = view.reason.value if view.reason else view.raw
        return JobState.PENDING, None, f"Retry/{view.raw}", f"starts again after {word}: {view.message}".rstrip(": ")
    if view.state is JobState.SUCCEEDED:
        return JobState.RUNNING, None, "Succeeded/Counting", "its pod has ended well"
    return view.state, view.reason, view.raw, view.message


def _judge_ended(
    failed: bool, over: Object | None, view: PodView | None
) -> tuple[JobState, EndReason | None, str, str]:
    said = over.get("reason", "") if over is not None else ""
    known = None if failed else _JOB_REASONS.get(said)
    # If a pod was killed because its Job ended, the Job has the reason.
    if view is not None and view.state is JobState.FAILED and (known is None or view.reason is not EndReason.LOST):
        return JobState.FAILED, view.reason, view.raw, view.message
    if over is not None and over["type"] == "Complete":
        return JobState.SUCCEEDED, EndReason.SUCCEEDED, "Complete", ""
    if over is None or failed:
        return JobState.FAILED, EndReason.LOST, "Failed/FailedIndexes", "no pod is left that could tell why"
    return JobState.FAILED, known or EndReason.LOST, f"Failed/{said}", over.get("message", "")


def ended_condition(job: Object) -> Object | None:
    """The condition of a Job that has ended: Complete or Failed, and not the ones that announce them."""
    conditions = {
        each["type"]: each for each in job.get("status", {}).get("conditions", ()) if each["status"] == "True"
    }
    return next((conditions[name] for name in ("Complete", "Failed") if name in conditions), None)


def is_unfinished(job: Object) -> bool:
    return ended_condition(job) is None


def newest_pods(pods: Iterable[Object]) -> dict[int, Object]:
    """The latest pod of each index, as the Job counts."""
    newest: dict[int, Object] = {}
    for pod in sorted(pods, key=created_at):
        newest[pod_index(pod)] = pod
    return newest


def created_at(pod: Object) -> str:
    return str(pod["metadata"].get("creationTimestamp") or "")


def pod_index(pod: Object) -> int:
    metadata = pod["metadata"]
    return int(metadata.get("labels", {}).get(INDEX) or metadata.get("annotations", {}).get(INDEX) or 0)


def expand(text: str) -> frozenset[int]:
    """The numbers of `0,2-5`."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def read_pod(pod: Object) -> PodView:
    state, reason, raw, message, code = _read_pod(pod)
    status = pod.get("status", {})
    started = status.get("startTime")
    return PodView(
        name=pod["metadata"]["name"],
        index=pod_index(pod),
        state=state,
        reason=reason,
        raw=raw,
        message=" ".join(message.split()),
        exit_code=code,
        started_at=parse_time(started) if started else None,
        where=pod.get("spec", {}).get("nodeName", ""),
    )


Read = tuple[JobState, EndReason | None, str, str, int | None]


def _read_pod(pod: Object) -> Read:
    status = pod.get("status", {})
    phase = status.get("phase", "Pending")
    if pod["metadata"].get("deletionTimestamp") and phase not in ("Succeeded", "Failed"):
        return _read_ending(pod, JobState.PENDING if phase == "Pending" else JobState.RUNNING)
    if phase == "Pending":
        return _read_pending(pod)
    if phase == "Running":
        return _read_running(pod)
    if phase == "Succeeded":
        return JobState.SUCCEEDED, EndReason.SUCCEEDED, "Succeeded", "", 0
    if phase == "Failed":
        return _read_failed(pod)
    # `Unknown`: the kubelet does not answer; nothing is concluded about the run.
    message = status.get("message") or "the node's kubelet does not answer"
    return JobState.RUNNING, None, f"{phase}/{status.get('reason', 'NodeLost')}", message, None


def _read_pending(pod: Object) -> Read:
    status = pod.get("status", {})
    if (waiting := _waiting(pod)) is not None:
        word, message = waiting.get("reason", "ContainerCreating"), waiting.get("message", "")
        reason = _WAITING.get(word)
        if word in ("ImagePullBackOff", "ErrImagePull") and _NETWORK.search(message):
            reason = None
        if reason is EndReason.CONFIG_INVALID and _ABSENT.search(message):
            reason = EndReason.IMAGE_FAILED
        return JobState.PENDING, reason, f"Pending/{word}", message, None
    for each in status.get("conditions", ()):
        if each["type"] == "PodScheduled" and each["status"] != "True":
            word = each.get("reason", "Unscheduled")
            return JobState.PENDING, None, f"Pending/{word}", each.get("message", ""), None
    return JobState.PENDING, None, f"Pending/{status.get('reason') or 'Starting'}", status.get("message", ""), None


def _read_ending(pod: Object, state: JobState) -> Read:
    """A pod that was asked to end: its kubelet has not confirmed it, and on a dead node never will."""
    disruption = _disruption(pod) or {}
    message = disruption.get("message", "") or "it was told to end and has not yet"
    return state, None, f"Terminating/{disruption.get('reason', 'Deleted')}", message, None


def _read_running(pod: Object) -> Read:
    if _ended_container(pod) is not None:
        return JobState.RUNNING, None, "Running/Ending", "its container has ended", None
    if (waiting := _waiting(pod)) is not None:
        word = waiting.get("reason", "ContainerCreating")
        return JobState.PENDING, None, f"Pending/{word}", waiting.get("message", ""), None
    return JobState.RUNNING, None, "Running", "", None


def _read_failed(pod: Object) -> Read:
    status = pod.get("status", {})
    message = status.get("message", "")
    word = status.get("reason", "")
    ended = _ended_container(pod) or {}
    code = ended.get("exitCode")
    disruption = _disruption(pod)
    if word == "Evicted" and disruption is None and _OWN_DISK.search(message):
        return JobState.FAILED, EndReason.DISK, "Evicted/Disk", message, code
    if word.startswith("OutOf"):
        return JobState.FAILED, EndReason.NO_CAPACITY, word, message, code
    if disruption is not None:
        reason = _DISRUPTIONS.get(disruption.get("reason", ""), EndReason.PREEMPTED)
        raw = f"DisruptionTarget/{disruption.get('reason', '')}"
        return JobState.FAILED, reason, raw, message or disruption.get("message", ""), code
    if word in _POD_REASONS:
        return JobState.FAILED, _POD_REASONS[word], word, message, code
    return _read_ended(ended, word, message)


def _read_ended(ended: Object, word: str, message: str) -> Read:
    said, code = ended.get("reason", ""), ended.get("exitCode")
    text = ended.get("message", "") or message
    if (told := read_told(text)) is not None:
        return JobState.FAILED, told[0], f"Error/{code}", told[1], code
    if said in ("StartError", "ContainerCannotRun") and _ABSENT.search(text):
        return JobState.FAILED, EndReason.IMAGE_FAILED, said, f"the image has no Python that could run: {text}", code
    if said in _ENDED:
        return JobState.FAILED, _ENDED[said], said, text or _SENTENCES.get(said, ""), code
    if code is None:
        return JobState.FAILED, EndReason.LOST, word or "Failed", text or "its container left no word", None
    if code in _SHIM_CODES and code != 0:
        return JobState.FAILED, _SHIM_CODES[code], f"Error/{code}", text, code
    if code > 128:
        # A signal, and the shim had no time to note why: it proves nothing.
        return JobState.FAILED, EndReason.LOST, f"Error/{code}", text or f"killed by signal {code - 128}", code
    return JobState.FAILED, EndReason.APP_FAILED, f"Error/{code}", text, code


def read_told(text: str) -> tuple[EndReason, str] | None:
    """Reason and message of the shim's termination message; None for any other text."""
    try:
        found = json.loads(text)
        reason, message = str(found["reason"]), str(found.get("message", ""))
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    if reason == EndReason.SUCCEEDED:
        # The shim writes it before it commits it, and a pod that committed it has not failed.
        return EndReason.LOST, "the run ended well, and its record could not be written"
    known = _ENDS_OF_SHIM.get(reason) or (EndReason(reason) if reason in set(EndReason) else None)
    return (known, message) if known else None


def left_result(pod: Object) -> bool:
    """Whether the termination message of a pod's container is the shim's own result."""
    ended = _ended_container(pod)
    return ended is not None and read_told(ended.get("message", "")) is not None


# Ends of attempts that are not the last. A shim that was asked to stop cannot know why; if a disruption was the reason,
# the pod has a condition for it.
_ENDS_OF_SHIM: Final = {"stopped": EndReason.LOST, "checkpointed": EndReason.TIMEOUT, "requeue": EndReason.APP_FAILED}
_SENTENCES: Final = {"OOMKilled": "the container used more memory than its limit"}


def _main(pod: Object) -> Object:
    found = pod.get("status", {}).get("containerStatuses", ())
    return next((each for each in found if each.get("name") == CONTAINER), found[0] if found else {})


def _waiting(pod: Object) -> Object | None:
    found: Object | None = _main(pod).get("state", {}).get("waiting")
    return found


def _ended_container(pod: Object) -> Object | None:
    found: Object | None = _main(pod).get("state", {}).get("terminated")
    return found


def _disruption(pod: Object) -> Object | None:
    conditions = pod.get("status", {}).get("conditions", ())
    return next((each for each in conditions if each["type"] == "DisruptionTarget" and each["status"] == "True"), None)
