"""Manifests of Jobs and pods: pure functions of a spec and a place."""

from __future__ import annotations

import base64
import copy
import hashlib
import math
import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final

from runtime.errors import NotPossible
from runtime.jobs.plan import JobIdentity
from runtime.jobs.spec import CodeMode, JobSpec, OnTaskFailure, Priority, secret_refs
from runtime.launchers.kubernetes.field_support import OF_CLUSTER
from runtime.launchers.kubernetes.settings import (
    CLAIM_SCHEME,
    MOUNT,
    RECORDS_VARIABLES,
    SECRETS_MOUNT,
    SHIM_MOUNT,
    KubernetesTarget,
)
from runtime.launchers.kubernetes.states import CONTAINER, NODES, OFFSET
from runtime.shim.common import AGAIN
from runtime.shim.retry import LOST_IN_A_ROW
from runtime.tasks.container import Mount, MountMode

MANAGED: Final = "research-runtime"
MANAGED_BY: Final = "app.kubernetes.io/managed-by"
JOB: Final = "research-runtime/job"
OWNER: Final = "research-runtime/owner"
PART: Final = "research-runtime/part"
ACCOUNT: Final = "research-runtime/account"
SLOTS: Final = "research-runtime/slots"
"""Annotation of a Job that shares GPUs: `WAITING`, then the slots that it was released with."""
RECORD: Final = "research-runtime/record"
"""Annotation of a Job: the record of its job that it was made for (`name_record`)."""
FILES: Final = "research-runtime/files"
"""Annotation of a Job that brings its shim itself: `WAITING` until the shim has arrived."""
WAITING: Final = "waiting"
HOSTNAME: Final = "kubernetes.io/hostname"

KEPT: Final = timedelta(days=7)
"""How long the API remembers a Job that has ended, if the spec does not set it."""
START: Final = timedelta(minutes=15)
"""Added to the pod's own deadline, whose clock starts before its image is pulled."""
NOTE_S: Final = 10
"""Added to the grace, for the shim to write down how the attempt ended."""
SEND_S: Final = 60
"""Added as well if the end of the log and outputs are still to be sent to a bucket."""
_MOST: Final = (1 << 31) - 1
READ: Final = timedelta(minutes=1)
"""How long the API remembers an object without use once it has ended: a probe, or a pod that served files."""
FILES_START: Final = timedelta(minutes=5)
"""The pod that serves files runs by then, or is ended."""
NEVER_AGAIN: Final = (1, 2, 3, 11, 126, 127, 128)
"""Exit codes that no further pod would change: the shim's own, and those of a container that cannot start."""

_NATIVE: Final = "RUNTIME_NATIVE_JOB"
_FAILURES: Final = "batch.kubernetes.io/job-index-failure-count"
"""Annotation of a pod: the earlier failures at this index that `podFailurePolicy` does not ignore."""
FILES_IDLE_S: Final = 300
_WAIT: Final = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
idle, most = 0, int(sys.argv[1])
while idle < most:
    time.sleep(min(5, most))
    others = [name for name in os.listdir("/proc") if name.isdecimal() and int(name) != os.getpid()]
    idle = 0 if others else idle + min(5, most)
""".strip()


def render_job(
    spec: JobSpec,
    place: KubernetesTarget,
    job: JobIdentity,
    *,
    part: int,
    offset: int,
    count: int,
    slots: int | None = None,
) -> dict[str, Any]:
    """The Indexed Job that serves `count` indices from `offset` on; at most `slots` run at a time if they share a GPU."""
    name = job_name(job, place, part)
    labels = {**_labels(job.owner), JOB: job.id, PART: str(part), OFFSET: str(offset)}
    if spec.nodes > 1:
        labels[NODES] = str(spec.nodes)
    if spec.account:
        labels[ACCOUNT] = label_value(spec.account)
    parallel = min(slots or count, spec.array.max_parallel or count if spec.array else count, count)
    # The shim decides which failure is final: a lower limit would count lost pods, and pods that began no attempt, as failures.
    limit = min(spec.retry.failure + spec.retry.preemption + LOST_IN_A_ROW, _MOST)
    kept = spec.ttl_after_finished or (KEPT if job.lifetime is None else READ)
    made: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": count * spec.nodes,
        "parallelism": parallel * spec.nodes,
        "backoffLimit": min(limit * count * spec.nodes, _MOST),
        "backoffLimitPerIndex": limit,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                # The shim has charged the attempt to its budget in the record root.
                {"action": "Ignore", "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": [AGAIN]}},
                {
                    "action": "FailIndex",
                    "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": list(NEVER_AGAIN)},
                },
            ]
        },
        "ttlSecondsAfterFinished": int(kept.total_seconds()),
        "template": {"metadata": {"labels": dict(labels)}, "spec": _pod(spec, place, job, part, offset)},
    }
    if (spec.array and spec.array.on_task_failure is OnTaskFailure.STOP) or (spec.nodes > 1 and count == 1):
        # A node that failed for good never comes, and its run would wait for it.
        made["maxFailedIndexes"] = 0
    if job.lifetime is not None:
        made["activeDeadlineSeconds"] = math.ceil(job.lifetime.total_seconds())
    metadata: dict[str, Any] = {
        "name": name,
        "namespace": place.namespace,
        "labels": labels,
        "annotations": {"research-runtime/name": job.name, "research-runtime/root": place.records},
    }
    if place.bucket:
        # The deadline of a suspended Job does not run; pods that begin before its files exist wait for them.
        made["suspend"] = job.lifetime is None
        metadata["annotations"][FILES] = WAITING
    if slots is not None:
        made["suspend"] = True
        metadata["annotations"][SLOTS] = WAITING
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": made}


def render_shim(job: Mapping[str, Any], shim: bytes) -> dict[str, Any]:
    """The shim as a file that the Job's pods mount and that is removed with the Job."""
    name = _brought(job, "shim")["configMap"]["name"]
    return {**_owned(job, "ConfigMap", name), "data": {"shim.py": shim.decode()}}


def render_secrets(job: Mapping[str, Any], values: Mapping[str, bytes]) -> dict[str, Any]:
    """The secrets of a spec as files that the Job's pods mount and that are removed with the Job."""
    data = {name: base64.b64encode(value).decode("ascii") for name, value in values.items()}
    name = _brought(job, "secrets")["secret"]["secretName"]
    return {**_owned(job, "Secret", name), "type": "Opaque", "data": data}


def name_afresh(job: Mapping[str, Any], mark: str) -> dict[str, Any]:
    """The Job with new names for its shim and secrets: those of a deleted Job of its name may still exist."""
    made: dict[str, Any] = copy.deepcopy(dict(job))
    for volume in made["spec"]["template"]["spec"]["volumes"]:
        if volume["name"] == "shim":
            volume["configMap"]["name"] += f"-{mark}"
        elif volume["name"] == "secrets":
            volume["secret"]["secretName"] += f"-{mark}"
    return made


def _brought(job: Mapping[str, Any], volume: str) -> dict[str, Any]:
    found: dict[str, Any] = next(each for each in job["spec"]["template"]["spec"]["volumes"] if each["name"] == volume)
    return found


def _owned(job: Mapping[str, Any], kind: str, name: str) -> dict[str, Any]:
    metadata = job["metadata"]
    owner = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "name": metadata["name"],
        "uid": metadata["uid"],
        # A Job that is deleted goes last: once no Job is left, none of its Secrets is.
        "blockOwnerDeletion": True,
    }
    labels = {name: metadata["labels"][name] for name in (MANAGED_BY, OWNER, JOB)}
    return {
        "apiVersion": "v1",
        "kind": kind,
        "metadata": {"name": name, "namespace": metadata["namespace"], "labels": labels, "ownerReferences": [owner]},
        "immutable": True,
    }


def render_files_job(place: KubernetesTarget, name: str, owner: str) -> dict[str, Any]:
    """The Job of the pod that reads and writes the record root for machines outside.

    It ends by itself, and is removed, if it has nothing to do for some minutes or its pod does not come to run.
    """
    if place.image is None:
        raise NotPossible(
            f"target `{place.target}` names no image",
            facts=["a pod of it reads and writes the record root"],
            hint=f'set image = "…" in [tool.runtime.targets.{place.target}]; it needs a Python 3',
        )
    container = {
        "name": CONTAINER,
        "image": place.find_image(place.image),
        "command": [place.python, "-c", _WAIT, str(FILES_IDLE_S)],
        "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"cpu": "1", "memory": "1Gi"}},
        "volumeMounts": [{"name": "records", "mountPath": MOUNT}],
        **_pull(place),
    }
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
        "containers": [container],
        "volumes": [_claim_volume("records", place.claim)],
        **_common(place),
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "namespace": place.namespace, "labels": _labels(owner)},
        "spec": {
            "backoffLimit": 0,
            # The launch that sees the pod run removes this.
            "activeDeadlineSeconds": int(FILES_START.total_seconds()),
            "ttlSecondsAfterFinished": int(READ.total_seconds()),
            "template": {"metadata": {"labels": _labels(owner)}, "spec": pod},
        },
    }


def job_name(job: JobIdentity, place: KubernetesTarget, part: int) -> str:
    """A hash of the job and of its record root, by which a repeated launch finds the Job."""
    return f"{job.id}-{root_mark(place)}-{part}"


def root_mark(place: KubernetesTarget) -> str:
    """A mark in names that tells the Jobs of one record root from those of another."""
    return hashlib.sha256(place.records.encode()).hexdigest()[:6]


def name_record(intent: bytes | None) -> str:
    """The value of `RECORD` for a job whose ledger has this intent; a job that was removed and made again has another."""
    return hashlib.sha256(intent or b"").hexdigest()[:16]


def label_value(text: str) -> str:
    """`text` as Kubernetes takes it in a label."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", text)[:63].strip("-_.")


def quantity(amount: int) -> str:
    """Bytes in the largest unit of Kubernetes that divides them."""
    for power, unit in ((40, "Ti"), (30, "Gi"), (20, "Mi"), (10, "Ki")):
        if amount % (1 << power) == 0:
            return f"{amount >> power}{unit}"
    return str(amount)


def bind_gpu(manifest: Mapping[str, Any], node: str, gpu: int, slots: int) -> dict[str, Any]:
    """The Job with its pods on one GPU of a node, `slots` at a time.

    Both variables are set, since frameworks look at one and container runtimes at the other.
    """
    made: dict[str, Any] = copy.deepcopy(dict(manifest))
    made["spec"]["parallelism"] = min(slots, made["spec"]["parallelism"])
    pod = made["spec"]["template"]["spec"]
    pod["nodeSelector"] = {**pod.get("nodeSelector", {}), HOSTNAME: node}
    container, variables = pod["containers"][0], ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
    kept = [each for each in container["env"] if each["name"] not in variables]
    container["env"] = kept + [{"name": name, "value": str(gpu)} for name in variables]
    return made


def slots_of_gpu(spec: JobSpec) -> int | None:
    """How many runs share a GPU; None if each has whole ones, or none."""
    gpus = spec.resources.gpus
    return math.floor(1 / gpus.count + 1e-9) if gpus and gpus.count < 1 else None


# the pod


def _pod(spec: JobSpec, place: KubernetesTarget, job: JobIdentity, part: int, offset: int) -> dict[str, Any]:
    folder = f"{MOUNT if place.bucket else place.root}/jobs/{job.id}"
    index = "$(JOB_COMPLETION_INDEX)"
    secret = {"prefix": RECORDS_VARIABLES, "secretRef": {"name": place.records_secret}}
    volumes, mounts = _volumes(spec, place, job, part)
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": image_of(spec, place),
        "command": [
            place.python,
            f"{SHIM_MOUNT if place.bucket else folder}/shim.py",
            folder,
            *(["--bucket", place.bucket] if place.bucket else []),
            "--native",
            f"$({_NATIVE})",
            "--part",
            str(part),
            *(
                ["--place", f"{offset}+{index}/{spec.nodes}"]
                if spec.nodes > 1
                else ["--index", f"{offset}+{index}" if offset else index]
            ),
        ],
        "env": [
            {
                "name": _NATIVE,
                "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['batch.kubernetes.io/controller-uid']"}},
            },
            # Pods of an index have one host name, wherever they run.
            {"name": "RUNTIME_HOST", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
            {
                "name": "RUNTIME_POD_FAILURES",
                "valueFrom": {"fieldRef": {"fieldPath": f"metadata.annotations['{_FAILURES}']"}},
            },
            *(
                [{"name": "RUNTIME_ADDRESS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]
                if spec.nodes > 1
                else []
            ),
            # The effective amounts: a namespace may have limits of its own, too.
            *(
                {
                    "name": f"RUNTIME_DISK_{which.upper()}",
                    "valueFrom": {"resourceFieldRef": {"resource": f"{which}s.ephemeral-storage"}},
                }
                for which in ("request", "limit")
            ),
            *(
                {"name": f"{RECORDS_VARIABLES}{name}", "value": value}
                for name, value in sorted(place.records_env.items())
            ),
            *_secrets(spec),
        ],
        **({"envFrom": [secret]} if place.records_secret else {}),
        **_resources(spec, place),
        "volumeMounts": mounts,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        **_pull(place),
    }
    note_s = NOTE_S + (SEND_S if place.bucket else 0)
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": math.ceil(spec.grace_period.total_seconds()) + note_s,
        "containers": [container],
        "volumes": volumes,
        **_common(place),
    }
    if spec.time_limit:
        waits = START + (spec.gang.start_timeout if spec.nodes > 1 else timedelta(0))
        pod["activeDeadlineSeconds"] = math.ceil((spec.time_limit + spec.grace_period + waits).total_seconds())
    if selector := _selector(spec, place):
        pod["nodeSelector"] = selector
    if affinity := _affinity(spec):
        pod["affinity"] = affinity
    if spec.priority is not Priority.NORMAL:
        pod["priorityClassName"] = _priority_class(spec, place)
    return pod


def image_of(spec: JobSpec, place: KubernetesTarget) -> str:
    image = spec.image or place.image
    if image is None:
        raise NotPossible(
            f"the job names no image, and target `{place.target}` has none",
            hint=f'--image …, or image = "…" in [tool.runtime.targets.{place.target}]',
        )
    return place.find_image(image)


def _common(place: KubernetesTarget) -> dict[str, Any]:
    found: dict[str, Any] = {"automountServiceAccountToken": False, "enableServiceLinks": False}
    if place.service_account:
        found["serviceAccountName"] = place.service_account
    if place.image_pull_secrets:
        found["imagePullSecrets"] = [{"name": secret} for secret in place.image_pull_secrets]
    if place.tolerations:
        found["tolerations"] = [dict(each) for each in place.tolerations]
    if place.run_as_user is not None:
        found["securityContext"] = {"runAsUser": place.run_as_user, "fsGroup": place.run_as_user}
    return found


def _pull(place: KubernetesTarget) -> dict[str, str]:
    return {"imagePullPolicy": place.image_pull_policy} if place.image_pull_policy else {}


def _labels(owner: str) -> dict[str, str]:
    return {MANAGED_BY: MANAGED, OWNER: label_value(owner)}


def _secrets(spec: JobSpec) -> list[dict[str, Any]]:
    found = []
    for ref in secret_refs(spec):
        if ref.scheme != OF_CLUSTER:
            continue
        name, _, key = ref.place.partition("/")
        if not name or not key:
            raise NotPossible(
                f"secret `{ref.name}` is to come from `{ref.source}`", hint="write kubernetes://SECRET/KEY"
            )
        found.append({"name": ref.name, "valueFrom": {"secretKeyRef": {"name": name, "key": key}}})
    return found


def _resources(spec: JobSpec, place: KubernetesTarget) -> dict[str, Any]:
    wanted = spec.resources
    requests: dict[str, str] = {}
    limits: dict[str, str] = {}
    if wanted.cpus is not None:
        requests["cpu"] = limits["cpu"] = f"{math.ceil(wanted.cpus * 1000)}m"
    for name, amount in (("memory", wanted.memory), ("ephemeral-storage", wanted.disk)):
        if amount is not None:
            requests[name] = quantity(amount.low)
            limits[name] = quantity(amount.high if amount.high is not None else amount.low)
    if wanted.gpus and wanted.gpus.count >= 1:
        requests[place.gpu_resource] = limits[place.gpu_resource] = str(int(wanted.gpus.count))
    return {"resources": {"requests": requests, "limits": limits}} if requests else {}


def _volumes(
    spec: JobSpec, place: KubernetesTarget, job: JobIdentity, part: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    mounts: list[dict[str, Any]] = [{"name": "records", "mountPath": MOUNT}]
    names: dict[str, str] = {}
    name = job_name(job, place, part)
    if place.bucket:
        volumes: list[dict[str, Any]] = [
            {"name": "records", "emptyDir": {}},
            {"name": "shim", "configMap": {"name": f"{name}-shim"}},
        ]
        mounts.append({"name": "shim", "mountPath": SHIM_MOUNT, "readOnly": True})
        if any(each.scheme != OF_CLUSTER for each in secret_refs(spec)):
            volumes.append({"name": "secrets", "secret": {"secretName": f"{name}-secrets"}})
            mounts.append({"name": "secrets", "mountPath": SECRETS_MOUNT, "readOnly": True})
    else:
        names[place.claim] = "records"
        volumes = [_claim_volume("records", place.claim)]
    for mount in spec.mounts:
        claim, path = _claim_of(mount, place)
        if claim not in names:
            names[claim] = f"claim-{len(names)}"
            volumes.append(_claim_volume(names[claim], claim))
        made: dict[str, Any] = {"name": names[claim], "mountPath": mount.target}
        if path:
            made["subPath"] = path
        if mount.mode is MountMode.RO:
            made["readOnly"] = True
        mounts.append(made)
    if spec.resources.shared_memory:
        size = quantity(int(spec.resources.shared_memory))
        volumes.append({"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": size}})
        mounts.append({"name": "shared-memory", "mountPath": "/dev/shm"})
    return volumes, mounts


def _claim_of(mount: Mount, place: KubernetesTarget) -> tuple[str, str]:
    if not mount.source.startswith(CLAIM_SCHEME):
        claims = f"claim://NAME/PATH; claims of the stack: {', '.join(sorted(place.claims)) or 'none'}"
        raise NotPossible(
            f"cannot mount `{mount.source}`: pods here mount claims only",
            facts=["a path of the node is refused by the namespace's pod security, and a bucket is no file system"],
            hint=f"let the command read it by itself, or copy it to {claims}" if "://" in mount.source else claims,
        )
    name, _, path = mount.source.removeprefix(CLAIM_SCHEME).partition("/")
    return place.claims.get(name, name), path.strip("/")


def _claim_volume(name: str, claim: str) -> dict[str, Any]:
    return {"name": name, "persistentVolumeClaim": {"claimName": claim}}


def _selector(spec: JobSpec, place: KubernetesTarget) -> dict[str, str]:
    found = {**place.node_selector, **spec.placement.selector}
    gpus = spec.resources.gpus
    if gpus and gpus.type:
        label = place.gpu_types.get(gpus.type)
        if label is None:
            raise NotPossible(
                f"target `{place.target}` does not say which nodes have `{gpus.type}` GPUs",
                facts=[f"it knows: {', '.join(sorted(place.gpu_types)) or 'none'}"],
                hint=f'gpu_types = {{ {gpus.type} = "LABEL=VALUE" }} in [tool.runtime.targets.{place.target}]',
            )
        name, _, value = label.partition("=")
        found[name] = value
    return found


def _affinity(spec: JobSpec) -> dict[str, Any]:
    rules = [
        {"key": HOSTNAME, "operator": operator, "values": list(nodes)}
        for operator, nodes in (("In", spec.placement.nodes), ("NotIn", spec.placement.exclude))
        if nodes
    ]
    if not rules:
        return {}
    terms = {"nodeSelectorTerms": [{"matchExpressions": rules}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}


def _priority_class(spec: JobSpec, place: KubernetesTarget) -> str:
    found: str | None = place.priority_classes.get(spec.priority.value)
    if found is None:
        raise NotPossible(
            f"target `{place.target}` has no priority class for `{spec.priority.value}`",
            hint=f'priority_classes = {{ {spec.priority.value} = "…" }} in [tool.runtime.targets.{place.target}]',
        )
    return found


def check_code(spec: JobSpec) -> None:
    if spec.code.mode is CodeMode.NONE:
        raise NotPossible(
            "`code.mode: none` runs the live tree of this machine, which no pod can see",
            hint="code.mode: snapshot, or image where the code lies in the image",
        )
