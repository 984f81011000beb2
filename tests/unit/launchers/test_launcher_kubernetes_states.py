"""Kubernetes' states in our terms: from objects of a real cluster, and for every reason that its components can set."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from runtime.end_reasons import EndReason
from runtime.jobs.spec import JobState
from runtime.launchers.kubernetes import states
from runtime.launchers.kubernetes.explain import explain_index
from runtime.launchers.kubernetes.states import expand, read_pod, read_states

CAPTURED = json.loads((Path(__file__).parents[2] / "golden/kubernetes/captured.json").read_text())

POD_REASONS = {
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
DISRUPTIONS = {
    "PreemptionByScheduler": EndReason.PREEMPTED,
    "EvictionByEvictionAPI": EndReason.PREEMPTED,
    "TerminationByKubelet": EndReason.PREEMPTED,
    "DeletionByTaintManager": EndReason.NODE_FAILED,
    "DeletionByPodGC": EndReason.NODE_FAILED,
}
WAITING = {
    "ImagePullBackOff": EndReason.IMAGE_FAILED,
    "ErrImagePull": EndReason.IMAGE_FAILED,
    "ErrImageNeverPull": EndReason.IMAGE_FAILED,
    "InvalidImageName": EndReason.IMAGE_FAILED,
    "ImageInspectError": EndReason.IMAGE_FAILED,
    "SignatureValidationFailed": EndReason.IMAGE_FAILED,
    "CreateContainerConfigError": EndReason.CONFIG_INVALID,
    "CreateContainerError": EndReason.CONFIG_INVALID,
}
JOB_REASONS = {
    "MaxFailedIndexesExceeded": EndReason.SIBLING_FAILED,
    "DeadlineExceeded": EndReason.TIMEOUT,
}
PASSING = {
    "ContainerCreating",
    "CrashLoopBackOff",
    "NetworkPluginNotReady",
    "PodInitializing",
    "PreCreateHookError",
    "PreStartHookError",
    "RegistryUnavailable",
    "RunContainerError",
}


def pod_of(name: str, place: int = -1) -> dict[str, Any]:
    return copy.deepcopy(CAPTURED["pods"][name][place])  # type: ignore[no-any-return]


def failed_pod(**status: Any) -> dict[str, Any]:
    return {"metadata": {"name": "p"}, "spec": {}, "status": {"phase": "Failed", **status}}


def ended_container(**terminated: Any) -> list[dict[str, Any]]:
    return [{"name": "main", "state": {"terminated": terminated}}]


def waiting_pod(reason: str, message: str = "") -> dict[str, Any]:
    state = {"waiting": {"reason": reason, "message": message}}
    return {
        "metadata": {"name": "p"},
        "spec": {},
        "status": {"phase": "Pending", "containerStatuses": [{"name": "main", "state": state}]},
    }


@pytest.mark.parametrize(
    ("name", "state", "reason", "raw", "code"),
    [
        ("again", JobState.FAILED, EndReason.LOST, "Error/10", 10),
        ("config", JobState.PENDING, EndReason.CONFIG_INVALID, "Pending/CreateContainerConfigError", None),
        ("deadline", JobState.FAILED, EndReason.TIMEOUT, "DeadlineExceeded", 137),
        ("disk", JobState.FAILED, EndReason.DISK, "Evicted/Disk", 137),
        ("done", JobState.SUCCEEDED, EndReason.SUCCEEDED, "Succeeded", 0),
        ("evicted", JobState.FAILED, EndReason.PREEMPTED, "DisruptionTarget/EvictionByEvictionAPI", 137),
        ("evicting", JobState.RUNNING, None, "Terminating/EvictionByEvictionAPI", None),
        ("failed", JobState.FAILED, EndReason.APP_FAILED, "Error/1", 1),
        ("invalidname", JobState.PENDING, EndReason.IMAGE_FAILED, "Pending/InvalidImageName", None),
        ("never", JobState.PENDING, EndReason.IMAGE_FAILED, "Pending/ErrImageNeverPull", None),
        ("nopython", JobState.FAILED, EndReason.IMAGE_FAILED, "StartError", 128),
        ("oom", JobState.FAILED, EndReason.OOM, "OOMKilled", 137),
        # The registry did not answer: the kubelet tries again.
        ("pull", JobState.PENDING, None, "Pending/ErrImagePull", None),
        ("running", JobState.RUNNING, None, "Running", None),
        ("unschedulable", JobState.PENDING, None, "Pending/Unschedulable", None),
    ],
)
def test_pod_of_a_real_cluster_is_read(
    name: str, state: JobState, reason: EndReason | None, raw: str, code: int | None
) -> None:
    # Containers that restart: the oldest has ended.
    view = read_pod(pod_of(name, 0 if name == "again" else -1))

    assert (view.state, view.reason, view.raw, view.exit_code) == (state, reason, raw, code)


def test_every_captured_pod_has_its_expectation() -> None:
    (marks,) = test_pod_of_a_real_cluster_is_read.pytestmark  # type: ignore[attr-defined]

    assert sorted(CAPTURED["pods"]) == sorted(row[0] for row in marks.args[1])


def test_every_reason_that_the_tables_know_is_expected_here() -> None:
    assert states._POD_REASONS.keys() == POD_REASONS.keys()
    assert states._DISRUPTIONS.keys() == DISRUPTIONS.keys()
    assert states._WAITING.keys() == WAITING.keys()
    assert states._JOB_REASONS.keys() == JOB_REASONS.keys()


@pytest.mark.parametrize(("word", "reason"), POD_REASONS.items())
def test_pod_that_failed_as_a_whole_has_a_reason_that_is_known(word: str, reason: EndReason) -> None:
    view = read_pod(failed_pod(reason=word, message="m"))

    assert (view.state, view.reason) == (JobState.FAILED, reason)


@pytest.mark.parametrize("word", ["OutOfcpu", "OutOfmemory", "OutOfpods", "OutOfnvidia.com/gpu"])
def test_pod_that_its_node_refuses_has_no_capacity(word: str) -> None:
    assert read_pod(failed_pod(reason=word)).reason is EndReason.NO_CAPACITY


@pytest.mark.parametrize(("word", "reason"), DISRUPTIONS.items())
def test_disruption_says_who_took_the_pod_away(word: str, reason: EndReason) -> None:
    condition = {"type": "DisruptionTarget", "status": "True", "reason": word}

    assert read_pod(failed_pod(conditions=[condition])).reason is reason
    assert read_pod(failed_pod(conditions=[{**condition, "reason": "New"}])).reason is EndReason.PREEMPTED


@pytest.mark.parametrize(("word", "reason"), WAITING.items())
def test_container_that_waits_for_ever_is_pending_with_what_it_would_end_as(word: str, reason: EndReason) -> None:
    view = read_pod(waiting_pod(word, "not found"))

    # The pod has its node, and runs as soon as the image or the Secret exists.
    assert (view.state, view.reason, view.message) == (JobState.PENDING, reason, "not found")


@pytest.mark.parametrize("word", [*sorted(PASSING), "SomethingNew"])
def test_container_that_waits_for_what_passes_is_pending(word: str) -> None:
    view = read_pod(waiting_pod(word))

    assert (view.state, view.reason) == (JobState.PENDING, None)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("Back-off pulling image: ErrImagePull: not found", EndReason.IMAGE_FAILED),
        ("pull access denied, repository does not exist", EndReason.IMAGE_FAILED),
        ("", EndReason.IMAGE_FAILED),
        ("dial tcp: i/o timeout", None),
        ("received unexpected HTTP status: 503 Service Unavailable", None),
        ("toomanyrequests: too many requests", None),
    ],
)
def test_pull_that_fails_on_the_network_may_come_by_itself(message: str, reason: EndReason | None) -> None:
    view = read_pod(waiting_pod("ImagePullBackOff", message))

    assert (view.state, view.reason) == (JobState.PENDING, reason)


@pytest.mark.parametrize(
    ("terminated", "reason"),
    [
        ({"reason": "Error", "exitCode": 1}, EndReason.APP_FAILED),
        ({"reason": "Error", "exitCode": 2}, EndReason.CONFIG_INVALID),
        ({"reason": "Error", "exitCode": 3}, EndReason.DUPLICATE),
        # With every exit code the shim leaves a message; if none exists, it had no time to write one.
        ({"reason": "Error", "exitCode": 10}, EndReason.LOST),
        ({"reason": "Error", "exitCode": 11}, EndReason.APP_FAILED),
        ({"reason": "Error", "exitCode": 12}, EndReason.LOST),
        ({"reason": "Error", "exitCode": 77}, EndReason.APP_FAILED),
        # A signal alone proves nothing.
        ({"reason": "Error", "exitCode": 137}, EndReason.LOST),
        ({"reason": "Error", "exitCode": 143}, EndReason.LOST),
        ({"reason": "ContainerStatusUnknown", "exitCode": 137}, EndReason.NODE_FAILED),
        ({"reason": "ContainerCannotRun", "exitCode": 127, "message": "x"}, EndReason.CONFIG_INVALID),
        ({"reason": "StartError", "exitCode": 128, "message": "no such file or directory"}, EndReason.IMAGE_FAILED),
        ({"reason": "OOMKilled", "exitCode": 0}, EndReason.OOM),
    ],
)
def test_container_that_ended_has_a_reason(terminated: dict[str, Any], reason: EndReason) -> None:
    assert read_pod(failed_pod(containerStatuses=ended_container(**terminated))).reason is reason


@pytest.mark.parametrize(
    ("told", "reason", "message"),
    [
        ({"reason": "no_capacity", "code": 1, "message": "GPU 0 is full"}, EndReason.NO_CAPACITY, "GPU 0 is full"),
        ({"reason": "idle", "code": 1}, EndReason.IDLE, ""),
        # A disrupted pod would have a condition for that.
        ({"reason": "stopped", "code": 143}, EndReason.LOST, ""),
        ({"reason": "disk", "code": 1, "message": "used 9 MiB"}, EndReason.DISK, "used 9 MiB"),
        (
            {"reason": "succeeded", "code": 0},
            EndReason.LOST,
            "the run ended well, and its record could not be written",
        ),
        ({"reason": "of a later shim"}, EndReason.APP_FAILED, '{"reason": "of a later shim"}'),
        ("Traceback: 1", EndReason.APP_FAILED, "Traceback: 1"),
        ([1], EndReason.APP_FAILED, "[1]"),
    ],
)
def test_result_in_the_termination_message_counts(told: object, reason: EndReason, message: str) -> None:
    text = told if isinstance(told, str) else json.dumps(told)
    ended = {"exitCode": 1, "reason": "Error", "message": text}

    view = read_pod(failed_pod(containerStatuses=ended_container(**ended)))

    assert (view.state, view.reason, view.message) == (JobState.FAILED, reason, message)


def test_failed_pod_that_left_no_word_is_lost() -> None:
    view = read_pod(failed_pod())

    assert (view.reason, view.message) == (EndReason.LOST, "its container left no word")


def test_pod_on_a_node_that_is_not_heard_of_still_counts_as_running() -> None:
    view = read_pod({"metadata": {"name": "p"}, "spec": {"nodeName": "n"}, "status": {"phase": "Unknown"}})

    assert (view.state, view.raw) == (JobState.RUNNING, "Unknown/NodeLost")


# Jobs


def native(name: str) -> str:
    return f"cap/{name}"


def of_job(name: str, **changes: Any) -> Any:
    job = copy.deepcopy(CAPTURED["jobs"][name])
    job["spec"].update(changes)
    return read_states([job], CAPTURED["pods"][name], [native(name)])[0]


@pytest.mark.parametrize(
    ("name", "state", "reason", "raw"),
    [
        ("again", JobState.PENDING, None, "Pending/ContainerCreating"),
        ("config", JobState.PENDING, EndReason.CONFIG_INVALID, "Pending/CreateContainerConfigError"),
        ("deadline", JobState.FAILED, EndReason.TIMEOUT, "DeadlineExceeded"),
        ("done", JobState.SUCCEEDED, EndReason.SUCCEEDED, "Complete"),
        ("failed", JobState.FAILED, EndReason.APP_FAILED, "Error/1"),
        ("nopython", JobState.FAILED, EndReason.IMAGE_FAILED, "StartError"),
        ("oom", JobState.FAILED, EndReason.OOM, "OOMKilled"),
        ("pull", JobState.PENDING, None, "Pending/ErrImagePull"),
        ("running", JobState.RUNNING, None, "Running"),
        ("unschedulable", JobState.PENDING, None, "Pending/Unschedulable"),
    ],
)
def test_job_of_a_real_cluster_is_read(name: str, state: JobState, reason: EndReason | None, raw: str) -> None:
    found = of_job(name)

    assert (found.native_id, found.index, found.state, found.reason, found.raw) == (native(name), 0, state, reason, raw)


def test_index_whose_pod_failed_and_that_the_job_has_not_given_up_starts_again() -> None:
    job, pods = CAPTURED["jobs"]["again"], CAPTURED["pods"]["again"][:1]

    (found,) = read_states([job], pods, [native("again")])

    assert (found.state, found.raw) == (JobState.PENDING, "Retry/Error/10")


def test_jobs_of_others_are_left_out_and_a_job_without_pods_waits() -> None:
    job = copy.deepcopy(CAPTURED["jobs"]["again"])

    assert read_states([job], [], ["cap/other"]) == []
    (found,) = read_states([job], [], [native("again")])
    assert (found.state, found.raw) == (JobState.PENDING, "Pending/NoPod")
    job["spec"]["suspend"] = True
    assert read_states([job], [], [native("again")])[0].raw == "Suspended"


def test_indices_begin_where_the_job_begins_and_each_has_its_own_state() -> None:
    job = copy.deepcopy(CAPTURED["jobs"]["failed"])
    job["metadata"]["labels"] = {states.OFFSET: "8"}
    job["spec"]["completions"] = 4
    job["status"] = {"completedIndexes": "1,3", "failedIndexes": "2"}

    found = read_states([job], CAPTURED["pods"]["failed"], [native("failed")])

    assert [(each.index, each.state) for each in found] == [
        (8, JobState.PENDING),
        (9, JobState.SUCCEEDED),
        (10, JobState.FAILED),
        (11, JobState.SUCCEEDED),
    ]
    assert found[2].reason is EndReason.LOST


@pytest.mark.parametrize(("word", "reason"), [*JOB_REASONS.items(), ("New", EndReason.LOST)])
def test_job_that_failed_without_a_pod_left_has_a_reason(word: str, reason: EndReason) -> None:
    job = copy.deepcopy(CAPTURED["jobs"]["failed"])
    job["status"] = {"conditions": [{"type": "Failed", "status": "True", "reason": word, "message": "m"}]}

    (found,) = read_states([job], [], [native("failed")])

    assert (found.state, found.reason) == (JobState.FAILED, reason)


@pytest.mark.parametrize("word", ["FailedIndexes", "BackoffLimitExceeded", "PodFailurePolicy"])
def test_index_that_failed_without_a_pod_left_is_lost_and_no_failure_of_the_command(word: str) -> None:
    job = copy.deepcopy(CAPTURED["jobs"]["failed"])
    job["status"]["conditions"] = [{"type": "Failed", "status": "True", "reason": word, "message": "m"}]

    (found,) = read_states([job], [], [native("failed")])

    assert (found.state, found.reason, found.exit_code) == (JobState.FAILED, EndReason.LOST, None)
    assert found.message == "no pod is left that could tell why"


@pytest.mark.parametrize("name", ["running", "evicting", "config", "never"])
def test_run_has_not_ended_while_its_pod_is_there_whatever_its_job_says(name: str) -> None:
    job = copy.deepcopy(CAPTURED["jobs"]["failed"])
    pod = pod_of(name)
    pod["metadata"]["ownerReferences"][0]["uid"] = job["metadata"]["uid"]

    (found,) = read_states([job], [pod], [native("failed")])

    assert (found.state, found.raw) == (read_pod(pod).state, read_pod(pod).raw)
    assert not found.state.terminal


def test_pods_of_a_job_that_is_gone_are_still_its_runs() -> None:
    pod, done = pod_of("evicting"), pod_of("done")
    for each, index in ((pod, "2"), (done, "1")):
        each["metadata"]["labels"] |= {states.OFFSET: "4", states.INDEX: index, states.NAME_OF_JOB: "gone"}

    (found,) = read_states([], [pod, done], ["cap/gone", "cap/other"])

    assert (found.native_id, found.index, found.state) == ("cap/gone", 6, JobState.RUNNING)
    assert found.message.startswith("its Job is gone, and its pod is not")


def test_job_that_is_being_deleted_and_has_no_pod_left_has_not_ended() -> None:
    job = copy.deepcopy(CAPTURED["jobs"]["running"])
    job["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"

    (found,) = read_states([job], [], [native("running")])

    assert (found.state, found.raw) == (JobState.PENDING, "Deleting")


def test_pod_that_was_killed_with_its_job_ended_for_the_reason_of_the_job() -> None:
    job, pod = copy.deepcopy(CAPTURED["jobs"]["running"]), pod_of("running")
    said = {"type": "Failed", "status": "True", "reason": "DeadlineExceeded", "message": "active longer than specified"}
    job["status"] = {"conditions": [said]}
    pod["status"] = {"phase": "Failed", "containerStatuses": ended_container(exitCode=137, reason="Error")}

    (found,) = read_states([job], [pod], [native("running")])

    assert (found.state, found.reason, found.message) == (JobState.FAILED, EndReason.TIMEOUT, said["message"])


# runs of several nodes


def gang(*pods: str, **status: Any) -> list[Any]:
    """The states of a Job whose runs have two pods each, by captured pods in the order of its completions."""
    job = copy.deepcopy(CAPTURED["jobs"]["failed"])
    job["metadata"]["labels"] = {states.NODES: "2", states.OFFSET: "7"}
    job["spec"]["completions"] = len(pods)
    job["status"] = status
    found = []
    for completion, name in enumerate(pods):
        if name == "-":
            continue
        pod = pod_of(name)
        pod["metadata"]["labels"] = {states.NODES: "2", states.OFFSET: "7", states.INDEX: str(completion)}
        pod["metadata"]["ownerReferences"] = [{"uid": job["metadata"]["uid"], "controller": True}]
        found.append(pod)
    return read_states([job], found, [native("failed")])


@pytest.mark.parametrize(
    ("pods", "status", "state", "reason", "raw", "message"),
    [
        (("running", "running"), {}, JobState.RUNNING, None, "Running", ""),
        (("running", "unschedulable"), {}, JobState.PENDING, None, "Pending/Unschedulable", "node 1 of 2: 0/1 nodes"),
        (("-", "running"), {}, JobState.PENDING, None, "Pending/NoPod", "node 0 of 2: it has no pod yet"),
        (
            ("running", "never"),
            {},
            JobState.PENDING,
            EndReason.IMAGE_FAILED,
            "Pending/ErrImageNeverPull",
            "node 1 of 2",
        ),
        (("running", "failed"), {}, JobState.PENDING, None, "Retry/Error/1", "node 1 of 2: starts again"),
        # A node that failed for good keeps nobody else's machine from being counted.
        (("running", "failed"), {"failedIndexes": "1"}, JobState.RUNNING, None, "Error/1", "node 1 of 2"),
        (
            ("failed", "failed"),
            {"failedIndexes": "0,1"},
            JobState.FAILED,
            EndReason.APP_FAILED,
            "Error/1",
            "node 0 of 2",
        ),
        (
            ("done", "failed"),
            {"completedIndexes": "0", "failedIndexes": "1"},
            JobState.FAILED,
            EndReason.APP_FAILED,
            "Error/1",
            "node 1 of 2",
        ),
        (("running", "done"), {"completedIndexes": "1"}, JobState.RUNNING, None, "Running", ""),
        (("done", "done"), {"completedIndexes": "0,1"}, JobState.SUCCEEDED, EndReason.SUCCEEDED, "Complete", ""),
    ],
)
def test_run_of_several_nodes_waits_for_the_last_and_ends_with_the_last(
    pods: tuple[str, ...], status: dict[str, str], state: JobState, reason: EndReason | None, raw: str, message: str
) -> None:
    (found,) = gang(*pods, **status)

    assert (found.index, found.state, found.reason, found.raw) == (7, state, reason, raw)
    assert found.message.startswith(message)


def test_runs_of_several_nodes_are_counted_as_runs() -> None:
    found = gang("running", "running", "running", "unschedulable", "-", "-")

    assert [(each.index, each.state) for each in found] == [
        (7, JobState.RUNNING),
        (8, JobState.PENDING),
        (9, JobState.PENDING),
    ]


def test_node_that_explains_a_run_is_the_one_that_waits_before_one_that_runs() -> None:
    pods = []
    for completion, name in enumerate(("running", "unschedulable", "running")):
        pods.append(pod_of(name))
        pods[-1]["metadata"]["labels"] = {states.NODES: "3", states.INDEX: str(completion)}

    assert states.choose_telling(pods) == [pods[1]]
    assert states.choose_telling(pods[:1]) == pods[:1]
    assert states.choose_telling([pods[0], pods[2]]) == [pods[0]]


def test_lists_of_indices_are_expanded() -> None:
    assert expand("0,2-5,9") == {0, 2, 3, 4, 5, 9}
    assert expand("") == frozenset()


# explanations


def explained(name: str, *, events: list[dict[str, Any]] | None = None) -> Any:
    return explain_index(of_job(name), CAPTURED["jobs"][name], [pod_of(name)], events or [])


def test_unschedulable_is_explained_with_what_it_asks_for_and_what_is_missing() -> None:
    said = explained("unschedulable")

    assert said.sentence.startswith("no node takes it: 0/1 nodes are available: 1 Insufficient cpu.")
    assert said.evidence[0] == "it asks for cpu 500"


def event_of(pod: dict[str, Any], message: str, reason: str, *, count: int = 1) -> dict[str, Any]:
    about = {"name": pod["metadata"]["name"]}
    return {
        "involvedObject": about,
        "type": "Warning",
        "reason": reason,
        "message": message,
        "count": count,
        "source": {"component": "kubelet"},
    }


def test_events_that_say_the_same_are_one_and_those_of_every_pod_none() -> None:
    pod = pod_of("unschedulable")
    told = read_pod(pod).message
    events = [
        event_of(pod, "no ClusterDNS", "MissingClusterDNS"),
        event_of(pod, "slow disk", "Slow"),
        event_of(pod, told, "FailedScheduling"),
        event_of(pod, "slow disk", "Slow", count=2),
    ]

    said = explained("unschedulable", events=events)

    assert said.evidence[2:] == ("kubelet: slow disk (3 times)",)


def test_pod_that_runs_or_failed_by_itself_needs_no_explaining() -> None:
    pod = pod_of("unschedulable")
    pod["status"] = {"phase": "Running", "containerStatuses": [{"name": "main", "state": {"running": {}}}]}

    assert explain_index(of_job("unschedulable"), CAPTURED["jobs"]["unschedulable"], [pod], []) is None


def test_result_of_the_shim_in_a_failed_pod_is_told_with_its_attempt_and_not_by_the_pod() -> None:
    pod = pod_of("failed")
    pod["status"]["containerStatuses"] = ended_container(exitCode=1, reason="Error", message="Traceback: 1")
    job = CAPTURED["jobs"]["failed"]
    assert explain_index(of_job("failed"), job, [pod], []).sentence == "Error/1: Traceback: 1"

    told = json.dumps({"reason": "no_capacity", "code": 1, "message": "GPU 0 is full"})
    pod["status"]["containerStatuses"] = ended_container(exitCode=1, reason="Error", message=told)

    assert explain_index(of_job("failed"), job, [pod], []) is None


def test_oom_is_explained_with_the_limit() -> None:
    assert explained("oom").sentence == "it used more memory than its limit of 48Mi"


def test_images_are_explained_with_their_names() -> None:
    assert explained("never").sentence == (
        "the image `test.local/nothing:7` cannot be pulled: "
        'Container image "test.local/nothing:7" is not present with pull policy of Never'
    )
    assert explained("nopython").sentence.startswith("the image `test.local/pause:1` has no Python that could run")


def test_missing_secret_is_explained() -> None:
    assert explained("config").sentence == 'its container cannot be made: secret "absent" not found'


def test_deadline_and_disk_are_explained() -> None:
    assert explained("deadline").sentence == "the pod was older than its activeDeadlineSeconds"
    assert explained("disk").sentence == (
        "it used more disk than its limit, and was taken off the node `node-1`: "
        "Pod ephemeral local storage usage exceeds the total limit of containers 10Mi."
    )


def test_disk_that_the_shim_measured_is_told_with_its_attempt() -> None:
    pod = pod_of("failed")
    told = json.dumps({"reason": "disk", "code": 1, "message": "used 104 MiB of disk, its limit is 100 MiB"})
    pod["status"]["containerStatuses"] = ended_container(exitCode=1, reason="Error", message=told)

    assert explain_index(of_job("failed"), CAPTURED["jobs"]["failed"], [pod], []) is None


def test_attempts_that_were_lost_are_explained_by_how_their_pods_ended() -> None:
    # If the kernel kills a container's processes together for lack of memory, no shim is left to report it.
    killed, last = [pod_of("oom"), pod_of("oom")], pod_of("failed")
    told = json.dumps({"reason": "lost", "code": 1})
    last["status"]["containerStatuses"] = ended_container(exitCode=1, reason="Error", message=told)
    job = CAPTURED["jobs"]["failed"]
    last["metadata"]["ownerReferences"][0]["uid"] = job["metadata"]["uid"]
    (state,) = read_states([job], [last], [native("failed")])

    said = explain_index(state, job, [*killed, last], [])

    assert said is not None
    assert said.sentence == "its pods went without a word: OOMKilled (2 times)"
    assert said.hint == "raise resources.memory"
    assert len(said.evidence) == 2


def test_pod_that_waits_for_what_does_not_come_is_explained_with_the_way_out() -> None:
    job = copy.deepcopy(CAPTURED["jobs"]["config"])
    job["metadata"]["labels"] = {"research-runtime/job": "j-91c0ffee1234"}

    said = explain_index(of_job("config"), job, [pod_of("config")], [])

    assert said is not None
    assert said.hint is not None
    assert said.hint.endswith("; or runtime cancel j-91c0ffee")
    assert said.evidence[-1] == "its pod keeps what it was given on node-1 until the job is cancelled"


def test_quota_is_explained_with_its_numbers() -> None:
    message = (
        'Error creating: pods "x" is forbidden: exceeded quota: runtime-quota, requested: requests.memory=200Gi, '
        "used: requests.memory=64Mi, limited: requests.memory=100Gi"
    )
    event = {"reason": "FailedCreate", "type": "Warning", "message": message, "involvedObject": {"name": "again"}}
    job = CAPTURED["jobs"]["again"]
    (state,) = read_states([job], [], [native("again")])

    said = explain_index(state, job, [], [event])

    assert said is not None
    assert said.sentence == (
        "the quota `runtime-quota` has no room: a run asks for requests.memory=200Gi, "
        "requests.memory=64Mi is used of requests.memory=100Gi"
    )


def test_pod_on_a_dead_node_is_explained_with_the_way_out() -> None:
    pod = pod_of("evicting")
    pod["status"]["conditions"] = [
        {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager", "message": "m"}
    ]
    job = copy.deepcopy(CAPTURED["jobs"]["evicted"])
    job["metadata"].setdefault("labels", {})["research-runtime/job"] = "j-91c0ffee"
    (state,) = read_states([job], [pod], [native("evicted")])

    said = explain_index(state, job, [pod], [])

    assert said is not None
    assert (
        said.sentence == f"the node `node-1` does not answer, and its pod `{pod['metadata']['name']}` keeps the index"
    )
    assert said.hint == (
        "if the node stays away: runtime cancel j-91c0ffee --index 0 --release; its old run may still go on there"
    )


def test_job_that_is_forgotten_is_said_to_be() -> None:
    said = explain_index(of_job("done"), None, [], [])

    assert said is not None
    assert said.sentence == "Kubernetes has forgotten it"
