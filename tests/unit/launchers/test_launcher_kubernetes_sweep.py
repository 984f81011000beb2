"""The backend's view of a job, whatever is on record: failed means gone, and ended jobs keep their end."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from runtime.client.jobs.gc import Garbage, find_garbage
from runtime.client.jobs.handle import JobHandle
from runtime.client.jobs.launch import launch
from runtime.client.jobs.retry import retry_job
from runtime.client.jobs.targets import OpenTarget, find_target, make_context
from runtime.config import Settings, load_settings
from runtime.end_reasons import EndReason
from runtime.errors import InfrastructureFailure, NotPossible
from runtime.jobs import ledger
from runtime.jobs.hosts.agent import MARKER
from runtime.jobs.hosts.base import HostUnavailable
from runtime.jobs.hosts.local import LocalFiles
from runtime.jobs.plan import PlanContext, Target, owner_name
from runtime.jobs.spec import Array, Gpus, JobResources, JobSpec, JobState
from runtime.launchers.kubernetes import cleanup, launcher
from runtime.launchers.kubernetes.client import ApiRefused
from runtime.launchers.kubernetes.launcher import KubernetesLauncher
from runtime.launchers.kubernetes.settings import KubernetesTarget, read_place
from tests.fakes.kubernetes import Api
from tests.jobs_support import Terminal, open_terminal
from tests.services_support import replace_sleep

NO_IMAGE = {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}
RUNS = {"running": {}}
KILLED_FOR_MEMORY = {"terminated": {"reason": "OOMKilled", "exitCode": 137}}
TARGETS = """
[targets.lab]
kind = "kubernetes"
namespace = "lab"
image = "registry.example/train:7"
records = "claim://data/runtime"
gpus = { n1 = 1 }

[targets.other]
kind = "kubernetes"
namespace = "lab"
image = "registry.example/train:7"
records = "claim://data/elsewhere"
"""


@dataclass
class Pod:
    """A record root on this machine, in place of one on a claim, and the API."""

    cluster: Api
    place: KubernetesTarget
    files: LocalFiles

    def run(self, *_: object, **__: object) -> None:
        raise HostUnavailable("no pod here runs commands", retryable=False)

    def close(self) -> None:
        pass


@dataclass
class Lab:
    run: Terminal
    api: Api
    root: Path
    settings: Settings

    def launch(self, *command: str, target: str = "lab", **fields: Any) -> JobHandle:
        return launch(JobSpec(command=command or ("true",), **fields), target, settings=self.settings)

    def native(self, job: JobHandle) -> str:
        """Return the name of its only Job."""
        (name,) = [name for name in self.api.names("jobs") if name.startswith(job.id)]
        return name

    def garbage(self, owner: str | None = None) -> list[Garbage]:
        """Find the garbage of jobs, whenever they ended."""
        place = OpenTarget(find_target("lab", self.settings), KubernetesLauncher(), self.launch_host())
        later = datetime.now(UTC) + timedelta(seconds=1)
        found = find_garbage(place, owner=owner, older_than=timedelta(0), now=later)
        return [each for each in found if each.kind in ("job", "native")]

    def launch_host(self) -> Any:
        target = find_target("lab", self.settings)
        return KubernetesLauncher().open_host(target, make_context(self.settings))

    def record(self, job: JobHandle) -> Path:
        return self.root / "data" / "runtime" / "jobs" / job.id


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Lab]:
    pytest.importorskip("kubernetes")
    api, root = Api(), tmp_path / "claim"

    def open_host(self: KubernetesLauncher, target: Target, context: PlanContext) -> Pod:
        place = read_place(target, context)
        return Pod(api, place, LocalFiles(str(root / place.records)))

    monkeypatch.setattr(KubernetesLauncher, "open_host", open_host)
    monkeypatch.setattr(cleanup, "_LOOK_S", 0.0)
    for module in (cleanup, launcher):
        monkeypatch.setattr(module, "END_S", 0)
        monkeypatch.setattr(module, "grace_of", lambda found: 0.0)
    with open_terminal(tmp_path, monkeypatch, capsys) as terminal:
        (terminal.tree / "runtime.toml").write_text(TARGETS)
        yield Lab(terminal, api, root, load_settings())


def pod(state: Mapping[str, Any], phase: str = "Pending") -> dict[str, Any]:
    return {"phase": phase, "containerStatuses": [{"name": "main", "state": state}]}


def stands(job: JobHandle) -> tuple[JobState, EndReason | None]:
    status = job.status()
    return status.state, status.reason


def succeed(lab: Lab, job: JobHandle) -> None:
    """Write the result that its shim would leave."""
    result = {"reason": "succeeded", "code": 0, "attempt": 1, "at": datetime.now(UTC).timestamp()}
    job.files.create(f"jobs/{job.id}/runs/0/result", json.dumps(result).encode())
    job.files.create(f"done/{job.id}.0.succeeded.0.1", b"")


# waiting pods


def test_job_without_its_image_is_pending_with_the_reason_until_it_is_cancelled_and_all_is_gone(lab: Lab) -> None:
    job = lab.launch()
    lab.api.add_pod(lab.native(job), pod(NO_IMAGE))

    assert stands(job) == (JobState.PENDING, EndReason.IMAGE_FAILED)
    (one,) = job.status(indices=True).indices
    assert (one.state, one.reason, one.message) == (JobState.PENDING, EndReason.IMAGE_FAILED, "not found")
    assert job.wait(stuck=True).state is JobState.PENDING
    assert lab.garbage() == []
    with pytest.raises(NotPossible, match="is pending"):
        retry_job(job, lab.settings)

    said = lab.run("cancel", job.id)

    assert (said.code, lab.api.names("jobs", "pods")) == (0, [])
    assert "nothing of it is left" in said.out
    assert stands(job) == (JobState.CANCELLED, EndReason.CANCELLED)


def test_status_and_explain_say_what_a_pending_job_waits_for(lab: Lab) -> None:
    job = lab.launch()
    lab.api.add_pod(lab.native(job), pod(NO_IMAGE))

    assert "pending (image_failed)" in lab.run("status", job.id).out
    assert [each["state"] for each in lab.run("status", "--on", "lab", "-o", "json").json["jobs"]] == ["pending"]
    said = lab.run("explain", job.id).out
    assert "is pending: the image" in said
    assert f"runtime cancel {job.id[:10]}" in said


@pytest.mark.parametrize("runs", [1, 2])
def test_who_follows_a_job_that_waits_for_what_does_not_come_is_told_once(
    lab: Lab, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = lab.launch("true", array=Array(count=runs) if runs > 1 else None)
    for index in range(runs):
        lab.api.add_pod(lab.native(job), pod(NO_IMAGE), index=index)
    looks = iter(range(3))

    def sleep(seconds: float) -> None:
        if next(looks, None) is None:
            raise KeyboardInterrupt

    replace_sleep(monkeypatch, sleep)

    said = lab.run("logs", "-f", job.id)

    assert said.code == 130
    assert said.err.count(f"job {job.id[:10]} is pending (image_failed), and does not go on by itself\n") == 1
    assert f"`runtime cancel {job.id[:10]}` gives back what it holds" in said.err


# cancel


@pytest.mark.parametrize("kept", [True, False], ids=["recorded", "unrecorded"])
def test_cancel_of_a_job_that_has_its_result_ends_what_still_lives_and_changes_nothing_else(
    lab: Lab, kept: bool
) -> None:
    job = lab.launch()
    lab.api.add_pod(lab.native(job), pod(RUNS, "Running"))
    succeed(lab, job)
    if not kept:
        shutil.rmtree(lab.record(job) / "native")

    said = lab.run("cancel", job.id)

    assert (said.code, lab.api.names("jobs", "pods")) == (0, [])
    assert "it had already succeeded" in said.out
    assert stands(job) == (JobState.SUCCEEDED, None) or stands(job) == (JobState.SUCCEEDED, EndReason.SUCCEEDED)


@pytest.mark.parametrize("act", ["command", "handle"])
def test_run_that_only_its_backend_knows_the_end_of_keeps_it_when_it_is_cancelled(lab: Lab, act: str) -> None:
    job = lab.launch()
    lab.api.add_pod(lab.native(job), pod(KILLED_FOR_MEMORY, "Failed"))
    lab.api.end_job(lab.native(job), "Failed", failedIndexes="0")
    assert stands(job) == (JobState.FAILED, EndReason.OOM)

    assert (lab.run("cancel", job.id).code if act == "command" else len(job.cancel())) == 0

    assert stands(job) == (JobState.FAILED, EndReason.OOM)
    assert lab.run("cancel", job.id).out.split("\t")[-1].strip() == "it had already failed"


def test_cancel_of_an_array_leaves_the_runs_that_had_ended_as_they_were(lab: Lab) -> None:
    job = lab.launch("true", array=Array(count=3))
    native = lab.native(job)
    lab.api.add_pod(native, pod(KILLED_FOR_MEMORY, "Failed"), index=0)
    lab.api.add_pod(native, pod(RUNS, "Running"), index=1)
    lab.api.objects[("jobs", "lab", native)]["status"] = {"failedIndexes": "0"}

    assert job.cancel() == []

    states = [(each.state, each.reason) for each in job.status(indices=True).indices]
    assert states == [
        (JobState.FAILED, EndReason.OOM),
        (JobState.CANCELLED, EndReason.CANCELLED),
        (JobState.CANCELLED, EndReason.CANCELLED),
    ]


def test_cancel_names_what_does_not_go_and_the_job_has_not_ended(lab: Lab) -> None:
    job = lab.launch()
    native = lab.native(job)
    lab.api.add_pod(native, pod(RUNS, "Running"))
    lab.api.holds_on = True

    said = lab.run("cancel", job.id)

    assert said.code == 3
    assert f"left over: the Job lab/{native} is still being deleted" in said.err
    assert stands(job)[0] is JobState.RUNNING


def test_cancel_ends_what_somebody_who_deleted_the_job_left_alone(lab: Lab) -> None:
    job = lab.launch()
    native = lab.native(job)
    lab.api.add_pod(native, pod(RUNS, "Running"))
    lab.api.create("configmaps", "lab", {"metadata": {"name": f"{native}-shim-1", "labels": labels_of(lab, native)}})
    lab.api.orphan(native)
    assert stands(job) == (JobState.RUNNING, None)

    assert job.cancel() == []

    assert lab.api.names("pods", "configmaps") == []
    assert stands(job) == (JobState.CANCELLED, EndReason.CANCELLED)


def labels_of(lab: Lab, native: str) -> dict[str, str]:
    return dict(lab.api.objects[("jobs", "lab", native)]["metadata"]["labels"])


def test_job_of_the_same_id_in_another_record_root_is_left_alone(lab: Lab) -> None:
    job = lab.launch()
    elsewhere = replace(job.host.place, path="elsewhere")  # type: ignore[attr-defined]
    other = lab.native(job).replace(cleanup.root_mark(job.host.place), cleanup.root_mark(elsewhere))  # type: ignore[attr-defined]
    body = lab.api.objects[("jobs", "lab", lab.native(job))]
    lab.api.create("jobs", "lab", {**body, "metadata": {**body["metadata"], "name": other}})

    assert job.cancel() == []

    assert lab.api.names("jobs") == [other]


# gc, and repeating a launch


def test_gc_takes_jobs_pods_and_what_they_own_with_the_record_and_the_same_launch_is_a_new_job(lab: Lab) -> None:
    first = lab.launch()
    native = lab.native(first)
    lab.api.add_pod(native, pod({"terminated": {"reason": "Completed", "exitCode": 0}}, "Succeeded"))
    owner = {"name": native, "uid": lab.api.objects[("jobs", "lab", native)]["metadata"]["uid"]}
    for kind in ("configmaps", "secrets"):
        metadata = {"name": f"{native}-{kind}", "labels": labels_of(lab, native), "ownerReferences": [owner]}
        lab.api.create(kind, "lab", {"metadata": metadata})
    lab.api.end_job(native, "Complete", completedIndexes="0")
    succeed(lab, first)

    said = lab.run("gc", "--on", "lab", "--older-than", "0s", "--yes")

    assert said.code == 0, said.err
    assert (lab.api.names("jobs", "pods", "configmaps", "secrets"), lab.record(first).exists()) == ([], False)
    second = lab.launch()
    assert (second.id, second.new) == (first.id, True)
    assert stands(second) == (JobState.PENDING, None)


def test_ended_job_of_a_record_that_was_removed_is_never_taken_for_the_new_one(lab: Lab) -> None:
    first = lab.launch()
    native = lab.native(first)
    lab.api.end_job(native, "Complete", completedIndexes="0")
    old = lab.api.objects[("jobs", "lab", native)]["metadata"]["uid"]
    shutil.rmtree(lab.record(first))

    second = lab.launch()

    assert (second.id, second.new) == (first.id, True)
    assert lab.api.objects[("jobs", "lab", native)]["metadata"]["uid"] != old
    assert stands(second) == (JobState.PENDING, None)


def test_ended_job_of_a_launch_that_was_cut_off_is_taken_for_its_own(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    launch_and_cut_off(lab, monkeypatch)
    (native,) = lab.api.names("jobs")
    lab.api.end_job(native, "Complete", completedIndexes="0")
    uid = lab.api.objects[("jobs", "lab", native)]["metadata"]["uid"]

    job = lab.launch()

    assert job.new
    assert lab.api.objects[("jobs", "lab", native)]["metadata"]["uid"] == uid


def launch_and_cut_off(lab: Lab, monkeypatch: pytest.MonkeyPatch, *, after: int = 0, **fields: Any) -> None:
    """Interrupt a launch between a Job's creation and its record, `after` that many recorded Jobs."""
    record, done = ledger.record_native, iter(range(after))

    def record_or_end(*args: Any) -> None:
        if next(done, None) is None:
            raise KeyboardInterrupt
        record(*args)

    with monkeypatch.context() as patched:
        patched.setattr(ledger, "record_native", record_or_end)
        with pytest.raises(KeyboardInterrupt):
            lab.launch("true", **fields)


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_job_that_lives_is_gone_on_with_although_its_record_was_removed(lab: Lab) -> None:
    first = lab.launch()
    native = lab.native(first)
    uid = lab.api.objects[("jobs", "lab", native)]["metadata"]["uid"]
    shutil.rmtree(lab.record(first))

    second = lab.launch()

    assert lab.api.objects[("jobs", "lab", native)]["metadata"]["uid"] == uid
    assert [each.native_id for each in second.entry().natives] == [f"lab/{native}"]


def test_gc_leaves_the_ledger_of_a_job_that_lives(lab: Lab) -> None:
    job = lab.launch()
    lab.api.add_pod(lab.native(job), pod(RUNS, "Running"))
    succeed(lab, job)
    half = lab.launch("false")
    lab.api.add_pod(lab.native(half), pod(RUNS, "Running"))
    half.files.write(f"jobs/{half.id}/{ledger.REMOVING}", owner_name().encode())

    assert lab.garbage() == []

    lab.api.end_job(lab.native(job), "Complete", completedIndexes="0")
    assert lab.garbage() == [], "its pod is still there"


def test_gc_that_cannot_end_everything_keeps_the_record_and_says_what_is_left(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = lab.launch()
    native = lab.native(job)
    lab.api.end_job(native, "Complete", completedIndexes="0")
    succeed(lab, job)
    lab.api.holds_on = True

    said = lab.run("gc", "--on", "lab", "--older-than", "0s", "--yes")

    assert said.code == 3
    assert f"left over: the Job lab/{native} is still being deleted" in said.err
    assert stands(job)[0] is JobState.SUCCEEDED


def test_gc_takes_jobs_that_are_written_down_nowhere_and_says_which_run(lab: Lab) -> None:
    kept = lab.launch("echo", "kept")
    ended, lives = lab.launch("true"), lab.launch("false")
    lab.api.end_job(lab.native(ended), "Complete", completedIndexes="0")
    shutil.rmtree(lab.record(ended))
    shutil.rmtree(lab.record(lives))

    listed = {(each.kind, each.name, each.state) for each in lab.garbage(owner_name())}
    assert listed == {("native", ended.id, None), ("native", lives.id, JobState.RUNNING)}
    assert lab.garbage("somebody else") == []
    assert lab.run("gc", "--on", "lab", "--older-than", "0s", "--yes").code == 0
    assert lab.api.names("jobs", "pods") == [lab.native(kept)]
    assert lab.garbage(owner_name()) == []


def test_configmap_without_a_job_is_found_and_removed_like_one(lab: Lab) -> None:
    job = lab.launch()
    native, labels = lab.native(job), labels_of(lab, lab.native(job))
    lab.api.create("configmaps", "lab", {"metadata": {"name": f"{native}-shim-1", "labels": labels}})
    lab.api.orphan(native)
    shutil.rmtree(lab.record(job))
    host = lab.launch_host()

    owned = KubernetesLauncher().owned(job.target, host)

    assert [(each.job, each.native_id, each.what, each.live) for each in owned] == [
        (job.id, f"lab/{native}-shim-1", "ConfigMap", False)
    ]
    assert [(each.kind, each.name, each.state) for each in lab.garbage()] == [("native", job.id, None)]
    assert KubernetesLauncher().remove(job.target, owned, host) == []
    assert lab.api.names("configmaps") == []


def test_job_of_a_root_without_its_marker_is_no_stray(lab: Lab) -> None:
    job = lab.launch()
    shutil.rmtree(lab.record(job))
    (lab.root / "data" / "runtime" / MARKER).unlink()

    assert lab.garbage() == []


# causes of failure


def test_launch_that_is_refused_in_the_middle_takes_back_what_it_had_begun(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_to_let_go(lab, monkeypatch)

    with pytest.raises(NotPossible, match="no room"):
        launch_on_half_a_gpu(lab)

    assert lab.api.names("jobs") == []


def test_launch_that_cannot_take_back_what_it_had_begun_is_not_said_to_have_failed(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_to_let_go(lab, monkeypatch)
    lab.api.holds_on = True

    with pytest.raises(InfrastructureFailure, match="what it had begun does not go"):
        launch_on_half_a_gpu(lab)

    (line,) = lab.run("status", "--on", "lab", "-o", "json").json["jobs"]
    assert line["state"] == "pending"


def refuse_to_let_go(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> bool:
        raise ApiRefused("change the job", 403, "no room")

    monkeypatch.setattr(lab.api, "patch", refuse)


def launch_on_half_a_gpu(lab: Lab) -> JobHandle:
    return lab.launch("true", resources=JobResources(gpus=Gpus(count=0.5)))


def test_job_that_was_refused_and_is_launched_again_is_not_failed_while_it_may_live(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ApiRefused("create the job", 403, "no room")

    with monkeypatch.context() as patched:
        patched.setattr(lab.api, "create", refuse)
        with pytest.raises(NotPossible):
            lab.launch()
    (job,) = ledger.list_jobs(LocalFiles(str(lab.root / "data/runtime")))
    assert lab.run("status", job, "-o", "json").json["state"] == "failed"
    launch_and_cut_off(lab, monkeypatch)

    assert lab.run("status", job, "-o", "json").json["state"] == "pending"
    assert lab.run("cancel", job).code == 0
    assert (lab.api.names("jobs"), lab.run("status", job, "-o", "json").json["state"]) == ([], "cancelled")


def test_runs_of_a_part_that_a_cut_off_launch_may_have_started_are_pending(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    (lab.run.tree / "runtime.toml").write_text(TARGETS.replace("gpus = { n1 = 1 }", "gpus = { n1 = 2 }"))
    lab.settings = load_settings()
    launch_and_cut_off(lab, monkeypatch, after=1, array=Array(count=4), resources=JobResources(gpus=Gpus(count=0.5)))
    first, second = lab.api.names("jobs")
    lab.api.end_job(first, "Failed", failedIndexes="0,1")
    lab.api.add_pod(second, pod(RUNS, "Running"))
    (job,) = ledger.list_jobs(LocalFiles(str(lab.root / "data/runtime")))

    assert lab.run("status", job, "-o", "json").json["state"] == "running"
    assert lab.run("cancel", job, "--yes").code == 0
    assert lab.api.names("jobs", "pods") == []
    assert (
        lab.run("status", job, "-o", "json").json["totals"] | {"failed": 2, "cancelled": 2}
        == (lab.run("status", job, "-o", "json").json["totals"])
    )


def test_retry_ends_what_still_lives_of_a_job_that_is_said_to_have_failed(lab: Lab) -> None:
    job = lab.launch()
    native = lab.native(job)
    lab.api.add_pod(native, pod(RUNS, "Running"))
    result = {"reason": "app_failed", "code": 1, "attempt": 1, "at": datetime.now(UTC).timestamp()}
    job.files.create(f"jobs/{job.id}/runs/0/result", json.dumps(result).encode())
    job.files.create(f"done/{job.id}.0.app_failed.1.1", b"")

    again = retry_job(job, lab.settings)

    assert [name.rpartition("-")[0].rpartition("-")[0] for name in lab.api.names("jobs")] == [again.job]


# pods that end before their command


def test_pod_that_fails_before_its_command_begins_is_set_up_wrongly_and_its_log_says_how(lab: Lab) -> None:
    job = lab.launch()
    lab.api.add_pod(lab.native(job), pod({"terminated": {"reason": "Error", "exitCode": 1}}, "Failed"))
    lab.api.end_job(lab.native(job), "Failed", failedIndexes="0")
    lab.api.printed = "SyntaxError: invalid syntax\n"

    assert stands(job) == (JobState.FAILED, EndReason.SETUP_FAILED)
    said = lab.run("explain", job.id).out
    assert "it could not be prepared: it ended with exit code 1 before its command began" in said
    assert "  kubernetes's own log: SyntaxError: invalid syntax" in said
    assert lab.run("logs", job.id).out == "SyntaxError: invalid syntax\n"


# probes


def test_probe_that_waits_for_what_does_not_come_ends_at_once_and_leaves_nothing(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = KubernetesLauncher.submit

    def submit_with_pod(self: KubernetesLauncher, *args: Any) -> str:
        native = submit(self, *args)
        manifest = lab.api.objects[("jobs", "lab", native.partition("/")[2])]
        deadlines.append((manifest["spec"]["activeDeadlineSeconds"], manifest["spec"]["ttlSecondsAfterFinished"]))
        lab.api.add_pod(native.partition("/")[2], pod(NO_IMAGE))
        return native

    deadlines: list[tuple[int, int]] = []
    monkeypatch.setattr(KubernetesLauncher, "submit", submit_with_pod)

    said = lab.run("targets", "check", "lab", "--wait", "5m")

    assert said.code == 1
    assert "the image `registry.example/train:7` cannot be pulled: not found" in said.out
    assert deadlines == [(360, 60)]
    assert lab.api.names("jobs", "pods") == []
    left = [path.name for path in lab.root.rglob("*") if not path.is_dir()]
    assert left == ["record-root"], "it is known from now on"
    assert list((lab.run.data / "probes").iterdir()) == []
