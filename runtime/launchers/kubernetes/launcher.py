"""Jobs as Indexed Jobs of one namespace, with the rights that the namespace's role gives and no others."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, cast

from runtime.end_reasons import EndReason, Explanation
from runtime.errors import InfrastructureFailure, NotPossible
from runtime.jobs.array import read_indices
from runtime.jobs.hosts.base import Host
from runtime.jobs.plan import (
    FieldSupport,
    JobIdentity,
    LaunchPlan,
    NativePart,
    NativeState,
    OwnedResource,
    PlanContext,
    Target,
    owner_name,
)
from runtime.jobs.run_config import activation_lines, environment_order, make_order
from runtime.jobs.secret_schemes import SecretScheme
from runtime.jobs.spec import CodeMode, JobSpec
from runtime.jobs.spec_fields import set_fields
from runtime.launchers.kubernetes import render
from runtime.launchers.kubernetes.cleanup import (
    END_S,
    MANAGED_JOBS,
    grace_of,
    list_owned,
    remove_owned,
    wait_until_gone,
)
from runtime.launchers.kubernetes.client import ApiRefused, KubernetesCluster, Object
from runtime.launchers.kubernetes.explain import explain_index
from runtime.launchers.kubernetes.field_support import INTERRUPTS, KEEPS, SECRET_SCHEMES, WAITS
from runtime.launchers.kubernetes.files import JobFiles, KubernetesHost
from runtime.launchers.kubernetes.gpu_leases import Gpu, Share, deal, is_waiting, take_slots
from runtime.launchers.kubernetes.settings import SECRETS_MOUNT, KubernetesTarget, check_settings, read_place
from runtime.launchers.kubernetes.states import (
    FINALIZER,
    INDEX,
    NAME_OF_JOB,
    NODES,
    OFFSET,
    choose_telling,
    created_at,
    has_ended,
    is_unfinished,
    native_id,
    newest_pods,
    nodes_of,
    pod_index,
    read_states,
    run_of,
)
from runtime.shim.bundle import build_shim

_FEW: Final = 20
_LOOK_S: Final = 0.2
_TRIES: Final = 3


TOLD: Final = "/dev/termination-log"
"""Where the shim leaves the result for readers of the pod."""
# The shim is the first process of its container.
_RING: Final = "import os, signal; os.kill(1, signal.SIGALRM)"
_KILL: Final = """
import os
for name in os.listdir("/proc"):
    if name.isdecimal() and int(name) not in (1, os.getpid()):
        os.kill(int(name), 9)
""".strip()


class NoFreeSlot(NotPossible):
    """All of the target's GPUs are taken by other Jobs."""

    reason: ClassVar[EndReason] = EndReason.NO_CAPACITY


class KubernetesLauncher:
    kind: ClassVar[str] = "kubernetes"
    keeps: ClassVar[Mapping[str, FieldSupport]] = KEEPS
    secret_schemes: ClassVar[Mapping[str, SecretScheme]] = SECRET_SCHEMES
    resumes: ClassVar[bool] = False
    keeps_ended: ClassVar[bool] = True
    interrupts: ClassVar[Mapping[str, FieldSupport]] = INTERRUPTS

    def check_settings(self, target: Target) -> None:
        check_settings(target)

    def open_host(self, target: Target, context: PlanContext) -> Host:
        place = read_place(target, context)
        return KubernetesHost(place, KubernetesCluster(place.context, context.environ.get("KUBECONFIG")), owner_name())

    def plan(self, spec: JobSpec, target: Target, job: JobIdentity, context: PlanContext) -> LaunchPlan:
        import yaml

        render.check_code(spec)
        place = read_place(target, context)
        indices = read_indices(spec.array, context.base)
        offset = spec.array.offset if spec.array else 0
        order = _order(spec, job, indices, context, place)
        parts: list[NativePart] = []
        artefacts: dict[str, str] = {}
        slots = render.slots_of_gpu(spec)
        if slots is not None and spec.nodes > 1:
            raise NotPossible(
                f"a run of {spec.nodes} nodes cannot share GPUs with others",
                facts=[f"`resources.gpus.count` is {spec.resources.gpus.count if spec.resources.gpus else 0:g}"],
                hint="whole GPUs for each node, or nodes: 1",
            )
        shares = [Share(count=len(indices), parallel=len(indices))]
        if slots is not None:
            most = spec.array.max_parallel if spec.array else None
            shares = deal(_gpus_of(spec, place), slots, len(indices), most)
        for number, share in enumerate(shares):
            first = offset + share.first
            manifest = render.render_job(spec, place, job, part=number, offset=first, count=share.count, slots=slots)
            name, native = "job.yaml", {}
            if share.gpu is not None:
                manifest = render.bind_gpu(manifest, share.gpu.node, share.gpu.number, share.parallel)
                name, native = f"job-{number}.yaml", {"gpu": [share.gpu.node, share.gpu.number]}
            artefacts[name] = yaml.safe_dump(dict(manifest), sort_keys=False, width=120)
            parts.append(
                NativePart(
                    name=render.job_name(job, place, number),
                    artefact=name,
                    offset=first,
                    count=share.count,
                    native={"namespace": place.namespace, **native},
                )
            )
        return LaunchPlan(
            job=job,
            spec=spec,
            target=target,
            order=order,
            artefacts=artefacts,
            parts=tuple(parts),
            fidelity=_fidelity(spec),
            indices=tuple(indices),
            root=place.root,
        )

    def submit(self, plan: LaunchPlan, part: NativePart, host: Host) -> str:
        pods = _opened(host)
        if "gpu" in part.native:
            return _submit_to_slots(plan, part, pods)
        job = _ensure_job(_read_yaml(plan.artefacts[part.artefact]), plan, pods)
        if pods.place.bucket and is_waiting(job):
            try:
                _let_go(job, pods)
            except NotPossible as refused:
                _take_back([part.name], pods, refused)
                raise
        return f"{pods.place.namespace}/{part.name}"

    def find(self, target: Target, names: Sequence[str], host: Host) -> dict[str, str]:
        cluster, namespace = _opened(host).cluster, _opened(host).place.namespace
        if len(names) <= _FEW:
            jobs = [job for name in names if (job := cluster.get("jobs", namespace, name)) is not None]
        else:
            jobs = cluster.list("jobs", namespace, labels=MANAGED_JOBS)
        wanted = set(names)
        # A Job that still waits for its slots is left out: submitting it again goes on with it.
        return {
            job["metadata"]["name"]: native_id(job)
            for job in jobs
            if job["metadata"]["name"] in wanted and not is_waiting(job) and _serves(job, host)
        }

    def states(self, target: Target, native_ids: Sequence[str], host: Host) -> list[NativeState]:
        labels = _selector(native_ids)
        jobs, pods = (
            _opened(host).cluster.list(kind, _opened(host).place.namespace, labels=labels) for kind in ("jobs", "pods")
        )
        return read_states(jobs, pods, native_ids)

    def cancel(self, target: Target, native_ids: Sequence[str], indices: Sequence[int] | None, host: Host) -> list[str]:
        if indices is not None:
            # Its shim looks for the mark, at once or when its pod starts.
            return []
        return _delete_jobs([native.partition("/")[2] for native in native_ids], _opened(host))

    def owned(
        self, target: Target, host: Host, *, owner: str | None = None, job: str | None = None
    ) -> list[OwnedResource]:
        return list_owned(_opened(host).cluster, _opened(host).place, owner, job)

    def remove(self, target: Target, owned: Sequence[OwnedResource], host: Host) -> list[str]:
        return remove_owned(_opened(host).cluster, _opened(host).place, owned)

    def explain(self, target: Target, native: NativeState, host: Host) -> Explanation | None:
        cluster = _opened(host).cluster
        namespace, _, name = native.native_id.partition("/")
        job, pods = _list_pods(cluster, native.native_id, native.index)
        pods = choose_telling(pods)
        events: list[Object] = []
        for each in [name, *(pod["metadata"]["name"] for pod in pods[-1:])]:
            found = cluster.list("events", namespace, fields=f"involvedObject.name={each}")
            events += sorted(found, key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime") or ""))
        return explain_index(native, job, pods, events)

    def read_output(self, target: Target, native: NativeState, folder: str, host: Host) -> str:
        cluster = _opened(host).cluster
        _, pods = _list_pods(cluster, native.native_id, native.index)
        namespace = native.native_id.partition("/")[0]
        return cluster.read_log(namespace, pods[-1]["metadata"]["name"], 100) if pods else ""

    def release(self, target: Target, native_ids: Sequence[str], index: int, host: Host) -> list[str]:
        """Release an index that a pod on a dead node keeps: delete the pod without waiting for its node.

        The Job makes another pod. The old run may still go on; the record's create-only commit decides.
        """
        cluster = _opened(host).cluster
        released = []
        for native in native_ids:
            for pod in _list_pods(cluster, native, index)[1]:
                if has_ended(pod):
                    continue
                metadata = pod["metadata"]
                place = metadata["namespace"], metadata["name"]
                cluster.delete("pods", *place, grace_s=0)
                kept = [each for each in metadata.get("finalizers", ()) if each != FINALIZER]
                cluster.patch("pods", *place, {"metadata": {"finalizers": kept or None}})
                released.append((*place, metadata["uid"]))
        if not released:
            raise NotPossible(
                f"no pod keeps index {index}", hint="`runtime explain` says what it waits for; `status` where it stands"
            )
        until = time.monotonic() + END_S
        while released:
            pods = [(each, cluster.get("pods", *each[:2])) for each in released]
            released = [each for each, pod in pods if pod is not None and pod["metadata"]["uid"] == each[2]]
            if released and time.monotonic() >= until:
                return [f"the pod {namespace}/{name} is still there" for namespace, name, _ in released]
            time.sleep(_LOOK_S if released else 0)
        return []

    def interrupt(self, target: Target, native_id: str, index: int | None, how: str, host: Host) -> None:
        cluster, python = _opened(host).cluster, _opened(host).place.python
        namespace = native_id.partition("/")[0]
        _, pods = _list_pods(cluster, native_id, index)
        running = [
            pod
            for pod in newest_pods(pods).values()
            if pod.get("spec", {}).get("nodeName")
            and pod["status"].get("phase") in ("Pending", "Running")
            and _is_hit(pod, how)
        ]
        if not running:
            raise NotPossible(f"nothing of `{native_id}` runs that could be interrupted")
        for pod in running:
            pod_name = pod["metadata"]["name"]
            if how == "preempt":
                cluster.evict(namespace, pod_name)
            elif how == "node-loss":
                cluster.delete("pods", namespace, pod_name, grace_s=0)
            elif how == "timeout":
                cluster.run(namespace, pod_name, [python, "-c", _RING])
            elif how == "oom":
                _record_memory(pod, host)
                cluster.run(namespace, pod_name, [python, "-c", _KILL])
            else:
                raise NotPossible(f"`{how}` cannot be provoked here", hint=f"one of {', '.join(self.interrupts)}")


def _let_go(job: Object, host: KubernetesHost, changes: Mapping[str, Any] | None = None) -> None:
    """Start a suspended Job with `changes`, after its shim and secrets if it brings its own. Safe to repeat."""
    cluster, place = host.cluster, host.place
    annotations = dict((changes or {}).get("annotations", {}))
    if place.bucket:
        _bring("configmaps", render.render_shim(job, build_shim()), cluster, place)
        if values := cast(JobFiles, host.files).secrets_of(job["metadata"]["labels"][render.JOB]):
            _bring("secrets", render.render_secrets(job, values), cluster, place)
        annotations[render.FILES] = "sent"
    patch = {"metadata": {"annotations": annotations}, "spec": {"suspend": False, **(changes or {}).get("spec", {})}}
    cluster.patch("jobs", place.namespace, job["metadata"]["name"], patch)


def _bring(kind: str, body: Mapping[str, Any], cluster: KubernetesCluster, place: KubernetesTarget) -> None:
    try:
        cluster.create(kind, place.namespace, body)
    except ApiRefused as refused:
        if "blockOwnerDeletion" not in refused.said:
            raise
        # OpenShift forbids a launcher to set it: the object then goes soon after its Job.
        metadata = body["metadata"]
        owners = [{**each, "blockOwnerDeletion": False} for each in metadata["ownerReferences"]]
        cluster.create(kind, place.namespace, {**body, "metadata": {**metadata, "ownerReferences": owners}})


def _ensure_job(manifest: Mapping[str, Any], plan: LaunchPlan, host: KubernetesHost) -> Object:
    """The Job of a manifest, made now or by a launch of the same record that was cut off.

    A Job of its name that has ended for another record, which was removed since, is deleted.
    """
    cluster, place = host.cluster, host.place
    manifest = render.name_afresh(manifest, secrets.token_hex(3)) if place.bucket else dict(manifest)
    record = render.name_record(host.files.read(f"{plan.folder}/intent.json"))
    metadata = manifest["metadata"]
    manifest["metadata"] = {**metadata, "annotations": {**metadata["annotations"], render.RECORD: record}}
    for _ in range(_TRIES):
        job = cluster.create("jobs", place.namespace, manifest)
        job = job or cluster.get("jobs", place.namespace, metadata["name"])
        if job is not None and _serves(job, host):
            return job
        if job is not None and (left := _delete_jobs([metadata["name"]], host)):
            raise InfrastructureFailure(
                f"an earlier Job of the name `{metadata['name']}` is in the way", facts=left, hint="launch it again"
            )
    raise InfrastructureFailure(
        f"the Job `{metadata['name']}` went away {_TRIES} times while it was made", hint="launch it again"
    )


def _serves(job: Object, host: Host) -> bool:
    """Whether a Job of our name serves the current record: it has not ended, or was made for this record."""
    metadata = job["metadata"]
    if metadata.get("deletionTimestamp"):
        return False
    if is_unfinished(job):
        return True
    intent = host.files.read(f"jobs/{metadata['labels'][render.JOB]}/intent.json")
    return bool(metadata.get("annotations", {}).get(render.RECORD) == render.name_record(intent))


def _take_back(names: Sequence[str], host: KubernetesHost, refused: NotPossible) -> None:
    """Delete Jobs of a launch that was refused. Raises `InfrastructureFailure` while any of them is left, since the launch
    has not failed yet."""
    if left := _delete_jobs(names, host):
        raise InfrastructureFailure(
            f"a launch was refused, and what it had begun does not go: {refused.message}",
            facts=left,
            hint="`runtime cancel` the job once the cluster answers, or launch it again",
        ) from refused


def _delete_jobs(names: Sequence[str], host: KubernetesHost) -> list[str]:
    """Delete Jobs and wait until they and their pods are gone; returns a description of anything left."""
    cluster, namespace = host.cluster, host.place.namespace
    jobs = [job for name in names if (job := cluster.get("jobs", namespace, name)) is not None]
    for job in jobs:
        cluster.delete("jobs", namespace, job["metadata"]["name"])
    return wait_until_gone(cluster, namespace, set(names), max(map(grace_of, jobs), default=0) + END_S)


# slots of GPUs


def _submit_to_slots(plan: LaunchPlan, part: NativePart, host: KubernetesHost) -> str:
    """Start one part with its slots, once every part of the job has some: a job starts, or is refused, as a whole."""
    cluster, place = host.cluster, host.place
    try:
        for each in plan.parts:
            _ensure_slots(plan, each, host)
        job = cluster.get("jobs", place.namespace, part.name)
        if job is not None and is_waiting(job):
            gpu, got = _ensure_slots(plan, part, host)
            changes = {"annotations": {render.SLOTS: f"{gpu}: {got}"}, "spec": {"parallelism": got}}
            _let_go(job, host, changes)
    except NotPossible as refused:
        jobs = [cluster.get("jobs", place.namespace, each.name) for each in plan.parts]
        _take_back([job["metadata"]["name"] for job in jobs if job and is_waiting(job)], host, refused)
        raise
    return f"{place.namespace}/{part.name}"


def _ensure_slots(plan: LaunchPlan, part: NativePart, host: KubernetesHost) -> tuple[Gpu | None, int]:
    """Make the Job of a part, suspended, and write it into the table of a GPU; returns GPU and slots. Safe to repeat."""
    cluster, place = host.cluster, host.place
    native = f"{place.namespace}/{part.name}"
    assert plan.spec.resources.gpus is not None
    share = plan.spec.resources.gpus.count
    manifest = _read_yaml(plan.artefacts[part.artefact])
    busy: list[str] = []
    meant = {Gpu(*each.native["gpu"]) for each in plan.parts}
    # The planned GPU first, then those that no part of the job is planned for.
    for other in [Gpu(*part.native["gpu"]), *(gpu for gpu in _gpus_of(plan.spec, place) if gpu not in meant)]:
        bound = render.bind_gpu(manifest, other.node, other.number, manifest["spec"]["parallelism"])
        job = _ensure_job(bound, plan, host)
        # If an earlier launch was cut off at another GPU, that one comes first.
        gpu = _gpu_of(job) or other
        if not is_waiting(job):
            return gpu, int(job["spec"]["parallelism"])
        got, holders = take_slots(
            cluster,
            place.slot_namespace,
            gpu,
            uid=job["metadata"]["uid"],
            job=native,
            wanted=int(manifest["spec"]["parallelism"]),
            share=share,
        )
        if got:
            return gpu, got
        busy.append(f"{gpu}: " + ", ".join(f"{each.job} has {each.slots} of {each.share:g}" for each in holders))
        _delete_jobs([part.name], host)
    raise NoFreeSlot(
        f"no GPU of target `{place.target}` has a free slot of {share:g}",
        facts=busy,
        hint="wait until one of these has ended, or name more GPUs: `gpus` of the target",
    )


# deciding


def _fidelity(spec: JobSpec) -> dict[str, FieldSupport]:
    found = {name: KEEPS[name] for name in set_fields(spec) if name in KEEPS}
    if spec.nodes == 1 and "retry.capacity.window" in found:
        found["retry.capacity.window"] = WAITS
    return found


def _order(
    spec: JobSpec, job: JobIdentity, indices: Sequence[Mapping[str, Any]], context: PlanContext, place: KubernetesTarget
) -> dict[str, Any]:
    setup = [*place.setup, *activation_lines(spec)]
    backend: dict[str, Any] = {"setup": setup} if setup else {}
    backend["told"] = TOLD
    if made := environment_order(spec, local=True):
        backend["environment"] = made
    if spec.resources.gpus and place.check_gpus:
        count = spec.resources.gpus.count
        backend["gpu_check"] = {"count": max(1, int(count)), "share": min(1.0, count)}
    # A pod that Kubernetes makes again begins with the shim of the job's folder, which folding removes.
    backend["fold"] = False
    order = make_order(
        spec,
        job,
        indices,
        context,
        retries="backend",
        environ=context.environ,
        meets=True,
        schemes=SECRET_SCHEMES,
        **backend,
    )
    if spec.code.mode is CodeMode.IMAGE:
        order["code"] = {"path": "."}
    if place.bucket and "secrets" in order:
        # The Job brings them, beside its shim.
        order["secrets"] = {name: f"{SECRETS_MOUNT}/{name}" for name in order["secrets"]}
    return order


def _gpus_of(spec: JobSpec, place: KubernetesTarget) -> list[Gpu]:
    wanted = spec.placement.nodes
    found = [
        Gpu(node, number)
        for node, count in place.gpus.items()
        if (not wanted or node in wanted) and node not in spec.placement.exclude
        for number in range(count)
    ]
    if not found:
        raise NotPossible(
            f"target `{place.target}` names no GPU that runs could share",
            facts=[f"its nodes with GPUs: {', '.join(place.gpus) or 'none'}"],
            hint=f"gpus = {{ NODE = 8 }} in [tool.runtime.targets.{place.target}]: a namespace cannot list nodes",
        )
    return found


def _gpu_of(job: Object) -> Gpu | None:
    pod = job["spec"]["template"]["spec"]
    node = pod.get("nodeSelector", {}).get("kubernetes.io/hostname")
    variables = {each["name"]: each.get("value") for each in pod["containers"][0].get("env", ())}
    number = variables.get("CUDA_VISIBLE_DEVICES")
    return Gpu(node, int(number)) if node and number else None


# doing


def _is_hit(pod: Object, how: str) -> bool:
    """Whether an interruption reaches this pod of its run: one machine of several is taken away, and not node 0, which has
    the clock and the attempt's folder."""
    nodes = nodes_of(pod)
    hit = nodes - 1 if how in ("preempt", "node-loss") else 0
    return pod_index(pod) % nodes == hit


def _record_memory(pod: Object, host: Host) -> None:
    """Leave the file by which the shim takes a killed command for one that was killed for memory."""
    run = f"jobs/{pod['metadata']['labels'][render.JOB]}/runs/{run_of(pod)}"
    attempts = host.files.names(run, "a")
    if attempts:
        host.files.write(f"{run}/{attempts[-1]}/oom", b"")


def _list_pods(
    cluster: KubernetesCluster, native: str, index: int | None
) -> tuple[Object | None, list[dict[str, Any]]]:
    """A Job and its pods, oldest first; those of one of the job's indices if `index` is given."""
    namespace, _, name = native.partition("/")
    job = cluster.get("jobs", namespace, name)
    labels = f"{NAME_OF_JOB}={name}"
    if index is not None:
        said = (job or {}).get("metadata", {}).get("labels") or {}
        nodes, first = int(said.get(NODES, 1)), index - int(said.get(OFFSET, 0))
        wanted = ",".join(str(first * nodes + node) for node in range(nodes))
        labels += f",{INDEX} in ({wanted})"
    return job, sorted(cluster.list("pods", namespace, labels=labels), key=created_at)


def _selector(native_ids: Sequence[str]) -> str:
    """A label selector for these Jobs, by job id while they are few."""
    jobs = sorted({native.partition("/")[2].rsplit("-", 2)[0] for native in native_ids})
    return f"{MANAGED_JOBS},{render.JOB} in ({','.join(jobs)})" if len(jobs) <= _FEW else MANAGED_JOBS


def _opened(host: Host) -> KubernetesHost:
    return cast(KubernetesHost, host)


def _read_yaml(text: str) -> dict[str, Any]:
    import yaml

    return dict(yaml.safe_load(text))
