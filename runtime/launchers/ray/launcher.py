"""Jobs on Ray clusters: one submission for each part, whose driver on the head places an actor for each node of a run."""

from __future__ import annotations

import hashlib
import json
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final, cast

from runtime.end_reasons import Explanation
from runtime.errors import NotPossible
from runtime.jobs import ledger, maintenance_lock
from runtime.jobs.array import read_indices
from runtime.jobs.hosts.base import Files, Host, HostUnavailable
from runtime.jobs.hosts.bucket import BucketFiles
from runtime.jobs.hosts.local import LocalHost
from runtime.jobs.ledger import job_folder
from runtime.jobs.plan import (
    FieldSupport,
    JobIdentity,
    LaunchPlan,
    NativePart,
    NativeState,
    OwnedResource,
    PlanContext,
    Target,
)
from runtime.jobs.run_config import activation_lines, environment_order, make_order
from runtime.jobs.secret_schemes import SecretScheme
from runtime.jobs.spec import CodeMode, JobSpec
from runtime.jobs.spec_fields import set_fields
from runtime.launchers.ray.client import RayJobs
from runtime.launchers.ray.discovery import find_job, is_ours, list_owned, read_grace
from runtime.launchers.ray.field_support import KEEPS
from runtime.launchers.ray.names import note_name, render_entrypoint, split_name, strip_nonce, submission_name
from runtime.launchers.ray.pending_reason import warn_of_type
from runtime.launchers.ray.resource_request import count_nodes, render_demand
from runtime.launchers.ray.restart_notes import read_asked
from runtime.launchers.ray.secrets import SECRET_SCHEMES, find_machine_secrets, schemes_of
from runtime.launchers.ray.settings import RayTarget, check_settings, read_place
from runtime.launchers.ray.states import explain_waiting, has_ended, read_states
from runtime.launchers.ray.submit_retry import submit_until_begun

SUBMISSION: Final = "submission.json"
END_S: Final = 120.0
"""How much longer than the grace a job may take to end after it was cancelled."""
_LOOK_S: Final = 0.5
_FEW: Final = 8


class RayHost(LocalHost):
    """This machine, the files of the record root, and the way to the head, which is opened on use."""

    def __init__(self, place: RayTarget) -> None:
        super().__init__(place.root if place.bucket is None else ".")
        self.place, self.jobs = place, RayJobs(place)
        self.holder = ""
        """Token of the hold whose maker this is: it may submit jobs all the same."""
        if place.bucket is not None:
            self.files: Files = BucketFiles(place.bucket)

    def ask(self, do: str, *args: Any, patience_s: float = 60) -> Any:
        if self.place.bucket is not None:
            raise HostUnavailable(
                f"no machine of target `{self.place.target}` runs commands for launches", retryable=False
            )
        return super().ask(do, *args, patience_s=patience_s)

    def close(self) -> None:
        self.jobs.close()


class RayLauncher:
    kind: ClassVar[str] = "ray"
    keeps: ClassVar[Mapping[str, FieldSupport]] = KEEPS
    secret_schemes: ClassVar[Mapping[str, SecretScheme]] = SECRET_SCHEMES
    resumes: ClassVar[bool] = True
    """A head that starts again has forgotten its jobs."""
    keeps_ended: ClassVar[bool] = False
    """A head keeps jobs that have ended, but the record says how they ended, and a lost one can be cancelled."""

    def check_settings(self, target: Target) -> None:
        check_settings(target)

    def open_host(self, target: Target, context: PlanContext) -> Host:
        return RayHost(read_place(target, context))

    def plan(self, spec: JobSpec, target: Target, job: JobIdentity, context: PlanContext) -> LaunchPlan:
        place = read_place(target, context)
        _check(spec)
        indices = read_indices(spec.array, context.base)
        backend: dict[str, Any] = {
            "ray": render_demand(spec),
            "turn": {"owner": job.owner, "priority": spec.priority.value},
        }
        if spec.array and spec.array.max_parallel:
            backend["ray"]["max_parallel"] = spec.array.max_parallel
        if spec.resources.cpus:
            # Ray counts CPUs and holds nobody to them.
            backend["limits"] = {"cpus": spec.resources.cpus}
        if place.pools is not None:
            # A stack's clusters are Google's machines.
            backend["notices"] = {"clouds": ["gce"]}
        if made := environment_order(spec, local=place.bucket is not None):
            backend["environment"] = made
        if setup := activation_lines(spec):
            backend["setup"] = setup
        if spec.resources.tpu and spec.resources.tpu.slices > 1:
            backend["slices"] = spec.resources.tpu.slices
        if place.bucket is not None and (named := find_machine_secrets(spec, target, context)):
            backend["machine_secrets"] = named
        order = make_order(
            replace(spec, nodes=count_nodes(spec)),
            job,
            indices,
            context,
            retries="backend",
            environ=context.environ,
            meets=True,
            # The driver reads the shim of the job's folder, which folding removes.
            fold=False,
            schemes=schemes_of(place.bucket),
            **backend,
        )
        if spec.code.mode is CodeMode.IMAGE:
            order["code"] = {"path": "."}
        name = submission_name(job.id, place.root, 1, 0)
        body = render_submission(place, job, epoch=1, part=0, grace_s=spec.grace_period.total_seconds())
        return LaunchPlan(
            job=job,
            spec=spec,
            target=target,
            order=order,
            artefacts={SUBMISSION: json.dumps(body, indent=2, ensure_ascii=False) + "\n"},
            parts=(
                NativePart(
                    name=name,
                    artefact=SUBMISSION,
                    offset=spec.array.offset if spec.array else 0,
                    count=len(indices),
                ),
            ),
            fidelity={each: KEEPS[each] for each in set_fields(spec) if each in KEEPS},
            indices=tuple(indices),
            root=place.root,
            notes=_warn(spec, place),
        )

    def submit(self, plan: LaunchPlan, part: NativePart, host: Host) -> str:
        """Submit one part for the order's epoch, or find what an earlier launch of the same record submitted."""
        maintenance_lock.refuse_if_held(host.files, holder=_opened(host).holder)
        jobs, place = _opened(host).jobs, _opened(host).place
        body = json.loads(plan.artefacts[part.artefact])
        body = set_epoch(body, place, plan.job.id, int(plan.order.get("epoch", 1)), int(part.native.get("number", 0)))
        name = body["submission_id"]
        body["metadata"]["record"] = _name_record(host.files, plan.job.id)
        known = jobs.get(name)
        if known is not None and has_ended(known) and not is_ours(known, body["metadata"], ["record"]):
            # It belongs to a record that was removed since.
            jobs.replace(name)
        known = submit_until_begun(jobs, body, lambda: _read_note(host.files, name))
        if not is_ours(known, body["metadata"], ["job", "epoch"]):
            raise NotPossible(
                f"the head has another job under the id `{name}`",
                facts=[f"its metadata: {known.get('metadata')}"],
                hint="`ray job delete` it if nobody needs it, or launch with --again",
            )
        return str(name)

    def check_host(self, target: Target, host: Host) -> list[str]:
        """Raise `RootHeld` while the cluster is restarted."""
        maintenance_lock.refuse_if_held(host.files, holder=_opened(host).holder)
        return []

    def find(self, target: Target, names: Sequence[str], host: Host) -> dict[str, str]:
        found = {}
        for name, info in _look_up(names, host).items():
            job, epoch, _ = split_name(name)
            wanted = {"job": job, "epoch": str(epoch), "record": _name_record(host.files, job)}
            # An ended job of a record that was removed since does not serve this one.
            if is_ours(info, wanted, ["job", "epoch"] if not has_ended(info) else list(wanted)):
                found[name] = name
        return found

    def states(self, target: Target, native_ids: Sequence[str], host: Host) -> list[NativeState]:
        known = _look_up([strip_nonce(native) for native in native_ids], host)
        asked = _find_asked(known, host)
        found: list[NativeState] = []
        for native in native_ids:
            name = strip_nonce(native)
            info = known.get(name)
            note = _read_note(host.files, native)
            found += read_states(native, info, note, asked=name in asked and has_ended(info or {}))
        return found

    def cancel(self, target: Target, native_ids: Sequence[str], indices: Sequence[int] | None, host: Host) -> list[str]:
        if indices is not None:
            # Its shim looks for the mark, or the driver while it waits for a place.
            return []
        # Not deleted: the head still looks at them, and would make an entry without our metadata.
        return _end(_opened(host).jobs, map(strip_nonce, native_ids))

    def owned(
        self, target: Target, host: Host, *, owner: str | None = None, job: str | None = None
    ) -> list[OwnedResource]:
        """The drivers of this record root's jobs that the head has not forgotten."""
        return list_owned(_opened(host).jobs.list(), _opened(host).place.root, owner, job)

    def remove(self, target: Target, owned: Sequence[OwnedResource], host: Host) -> list[str]:
        """Have the shims of these jobs end their commands, wait for their drivers, and make the head forget these."""
        jobs, root = _opened(host).jobs, _opened(host).place.root
        wanted = {each.job for each in owned}
        found = {name: info for name, info in jobs.list().items() if find_job(name, info, root) in wanted}
        for job in {split_name(name)[0] for name, info in found.items() if not has_ended(info)}:
            # A driver that is stopped ends before its shims do; one whose shims find the mark waits for them.
            ledger.leave_mark(host.files, job, "cancel", b"{}")
        if left := _end(jobs, found):
            return left
        for name, info in found.items():
            (jobs.delete if has_ended(info) else jobs.replace)(name)
        return []

    def stop(self, target: Target, native_ids: Sequence[str], host: Host) -> None:
        for name in map(strip_nonce, native_ids):
            _opened(host).jobs.stop(name)

    def explain(self, target: Target, native: NativeState, host: Host) -> Explanation | None:
        return explain_waiting(native, _read_note(host.files, native.native_id))

    def read_output(self, target: Target, native: NativeState, folder: str, host: Host) -> str:
        return _opened(host).jobs.read_log(strip_nonce(native.native_id))

    def restore_parts(
        self, artefacts: Mapping[str, str], names: Sequence[str], indices: Sequence[int]
    ) -> list[NativePart]:
        """The only part: runs that have their result end at once."""
        return [
            NativePart(
                name=names[0], artefact=SUBMISSION, offset=min(indices), count=len(indices), native={"number": 0}
            )
        ]


def render_submission(place: RayTarget, job: JobIdentity, *, epoch: int, part: int, grace_s: float) -> dict[str, Any]:
    """The body of `POST /api/jobs/`. No entrypoint resources, so that Ray keeps the driver on the head."""
    return {
        "submission_id": submission_name(job.id, place.root, epoch, part),
        "entrypoint": render_entrypoint(place.python, place.root, job.id, epoch, part),
        "metadata": {
            "job": job.id,
            "epoch": str(epoch),
            "name": job.name,
            "owner": job.owner,
            "grace_s": f"{grace_s:g}",
        },
    }


def set_epoch(body: Mapping[str, Any], place: RayTarget, job: str, epoch: int, part: int) -> dict[str, Any]:
    """The submission for another epoch."""
    return {
        **body,
        "submission_id": submission_name(job, place.root, epoch, part),
        # With the interpreter that the launch named: another target may lead to the same cluster.
        "entrypoint": render_entrypoint(shlex.split(body["entrypoint"])[1], place.root, job, epoch, part),
        "metadata": {**body["metadata"], "epoch": str(epoch)},
    }


def _check(spec: JobSpec) -> None:
    if spec.code.mode is CodeMode.NONE:
        raise NotPossible(
            "`code.mode: none` runs the live tree of this machine, which no node of the cluster can see",
            hint="code.mode: snapshot, or image where the code lies in the cluster's image",
        )


def _warn(spec: JobSpec, place: RayTarget) -> tuple[str, ...]:
    tpu = spec.resources.tpu
    of_type = warn_of_type(tpu.type, place.pools, place.target) if tpu and place.pools is not None else None
    of_traffic = place.apart and "records are in {} and the nodes in {}: traffic between them costs money".format(
        *place.apart
    )
    return tuple(each for each in (of_type, of_traffic) if each)


def _name_record(files: Files, job: str) -> str:
    return hashlib.sha256(files.read(f"{job_folder(job)}/intent.json") or b"").hexdigest()[:16]


def _look_up(names: Sequence[str], host: Host) -> dict[str, dict[str, Any]]:
    jobs = _opened(host).jobs
    if len(names) > _FEW:
        known = jobs.list()
        return {name: known[name] for name in names if name in known}
    return {name: info for name in names if (info := jobs.get(name)) is not None}


def _find_asked(known: Mapping[str, Mapping[str, Any]], host: Host) -> set[str]:
    """The submissions that were stopped for a restart of the head, by the mark in the record root or by the head's notes."""
    stopped = {name for name, info in known.items() if info.get("status") == "STOPPED"}
    held = maintenance_lock.read_hold(host.files) if stopped else None
    asked = {*held.asked} if held else set()
    return asked if asked >= stopped else asked | read_asked(_opened(host).jobs)


def _read_note(files: Files, native: str) -> dict[str, Any] | None:
    job, epoch, part = split_name(native)
    text = files.read(f"{job_folder(job)}/{note_name(epoch, part)}")
    try:
        return {**json.loads(text)} if text else None
    except (ValueError, TypeError):
        return None


def _end(jobs: RayJobs, names: Iterable[str]) -> list[str]:
    """Wait for the ends of jobs whose shims know that they are cancelled, stop those that do not end, and return what is left,
    in words."""
    left = []
    for name in names:
        info = jobs.get(name)
        if info is None or has_ended(info):
            continue
        if not _wait_until_ended(jobs, name, read_grace(info) + END_S, waits=info.get("status") == "RUNNING"):
            jobs.stop(name)
            if not _wait_until_ended(jobs, name, END_S):
                left.append(f"the job `{name}` of the head is still there")
    return left


def _wait_until_ended(jobs: RayJobs, name: str, seconds: float, *, waits: bool = True) -> bool:
    until = time.monotonic() + seconds
    while True:
        info = jobs.get(name)
        if info is None or has_ended(info):
            return True
        if not waits or time.monotonic() >= until:
            return False
        time.sleep(_LOOK_S)


def _opened(host: Host) -> RayHost:
    return cast(RayHost, host)
