"""`runtime keep`: what it decides, and that nothing runs twice whoever takes a job up, and whenever a keeper dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from runtime.cli.main import main
from runtime.client.jobs import targets
from runtime.client.jobs.handle import JobHandle
from runtime.client.jobs.launch import launch
from runtime.client.jobs.prepare import LaunchOptions
from runtime.client.jobs.reconcile import KeptJob, ReconcileAction, decide_keep, keep_target, list_strange_folders
from runtime.client.jobs.status import read_target
from runtime.client.jobs.targets import OpenTarget
from runtime.config import Project, Settings
from runtime.end_reasons import EndReason
from runtime.errors import MissingExtra, StoreUnavailable
from runtime.jobs import lock, open_jobs
from runtime.jobs.ledger import BackendRefusal, LedgerEntry, NativeJob, RunOutcome
from runtime.jobs.lock import Lock
from runtime.jobs.plan import NativeState, Target
from runtime.jobs.spec import Array, Code, CodeMode, JobSpec, JobState, Retry, SecretRef
from runtime.launchers.processes.base import ProcessLauncher
from runtime.launchers.slurm.launcher import SlurmLauncher
from tests.copies_support import Copies
from tests.jobs_support import as_somebody_else, folder_for_all
from tests.shim_support import PATIENCE_S, kill_all, processes_with, signal_all, wait_for

NOW = datetime(2026, 1, 1, tzinfo=UTC)
KEEP = """
import os, sys
from runtime.cli.main import main
from runtime.jobs import lock
lock.STILL_S = float(os.environ.get("STILL_S", lock.STILL_S))
sys.exit(main(["keep", "--once", "--on", "local", "-o", "json"]))
"""


# decided


def entry(*, runs: int = 1, ended: int = 0, natives: int = 1, parts: int = 1, **changes: Any) -> LedgerEntry:
    return LedgerEntry(
        id="j-aa",
        name="train",
        owner="ada",
        target="local",
        kind="local",
        launched_at=NOW,
        snapshot=None,
        indices=runs,
        natives=tuple(NativeJob(name="j-aa", native_id=str(n), part=n, epoch=1, at=NOW) for n in range(natives)),
        outcomes={
            n: RunOutcome(job="j-aa", index=n, reason=EndReason.SUCCEEDED, code=0, attempt=1) for n in range(ended)
        },
        intent={"parts": ["j-aa"] * parts},
        **changes,
    )


def native(state: JobState = JobState.FAILED, reason: EndReason | None = None, id: str = "0") -> NativeState:
    return NativeState(native_id=id, index=None, state=state, reason=reason)


LOST = native(reason=EndReason.LOST)
FAILED = native(reason=EndReason.APP_FAILED)
RUNNING = native(JobState.RUNNING)
SILENT = native(JobState.UNKNOWN)
REFUSED = BackendRefusal(reason=EndReason.CONFIG_INVALID, message="no such partition")


@pytest.mark.parametrize(
    ("given", "states", "resumes", "in_vain", "act"),
    [
        # gone
        (entry(), [LOST], True, 0, ReconcileAction.TAKE_UP),
        (entry(), [native(reason=EndReason.NODE_FAILED)], True, 2, ReconcileAction.TAKE_UP),
        (entry(), [native(reason=EndReason.PREEMPTED)], True, 0, ReconcileAction.TAKE_UP),
        (entry(), [], True, 0, ReconcileAction.TAKE_UP),
        (entry(runs=3, ended=2), [LOST], True, 0, ReconcileAction.TAKE_UP),
        (entry(runs=3, ended=1, cancelled_indices=frozenset([1])), [LOST], True, 0, ReconcileAction.TAKE_UP),
        # alive, or not known to be gone
        (entry(), [RUNNING], True, 0, ReconcileAction.LEAVE),
        (entry(), [native(JobState.PENDING)], True, 0, ReconcileAction.LEAVE),
        (entry(), [SILENT], True, 0, ReconcileAction.LEAVE),
        (entry(natives=2, parts=2), [LOST, native(JobState.RUNNING, id="1")], True, 0, ReconcileAction.LEAVE),
        (entry(cancelled=True), [RUNNING], True, 0, ReconcileAction.LEAVE),
        (entry(cancelled=True), [SILENT], True, 0, ReconcileAction.LEAVE),
        # a launch that is under way, or was cut off
        (entry(natives=0), [], True, 0, ReconcileAction.LEAVE),
        (entry(natives=0, cancelled=True), [], True, 0, ReconcileAction.LEAVE),
        (entry(natives=1, parts=2), [LOST], True, 0, ReconcileAction.LEAVE),
        (entry(natives=1, parts=2, refused=REFUSED), [LOST], False, 0, ReconcileAction.LEAVE),
        # ended
        (entry(ended=1), [], True, 0, ReconcileAction.DROP),
        (entry(ended=1), [], False, 0, ReconcileAction.DROP),
        (entry(natives=0, refused=REFUSED), [], True, 0, ReconcileAction.DROP),
        (entry(), [FAILED], True, 0, ReconcileAction.DROP),
        (entry(cancelled=True), [LOST], True, 0, ReconcileAction.END),
        (entry(runs=2, ended=1, cancelled_indices=frozenset([1])), [LOST], True, 0, ReconcileAction.END),
        (entry(), [LOST], True, 3, ReconcileAction.END),
        # a backend that starts jobs again itself
        (entry(), [RUNNING], False, 0, ReconcileAction.LEAVE),
        (entry(), [native(JobState.PENDING)], False, 0, ReconcileAction.LEAVE),
        (entry(), [SILENT], False, 0, ReconcileAction.LEAVE),
        (entry(), [LOST], False, 0, ReconcileAction.DROP),
        (entry(), [], False, 0, ReconcileAction.DROP),
        (entry(cancelled=True), [native(JobState.CANCELLED, EndReason.CANCELLED)], False, 0, ReconcileAction.DROP),
        (entry(cancelled=True), [RUNNING], False, 0, ReconcileAction.LEAVE),
    ],
)
def test_decision_on_an_open_job(
    given: LedgerEntry, states: list[NativeState], resumes: bool, in_vain: int, act: ReconcileAction
) -> None:
    assert decide_keep(given, states, resumes=resumes, in_vain=in_vain).act is act


def test_launch_that_was_cut_off_lost_nothing_unless_a_run_has_begun() -> None:
    verdicts = [decide_keep(entry(natives=0), [], resumes=True, begun=begun) for begun in (False, True)]

    assert [(each.act, each.submitted) for each in verdicts] == [
        (ReconcileAction.LEAVE, False),
        (ReconcileAction.LEAVE, True),
    ]
    assert decide_keep(entry(natives=1, parts=2), [LOST], resumes=True).submitted


def test_only_a_job_that_is_given_up_gets_a_result_from_a_keeper() -> None:
    given_up = decide_keep(entry(), [LOST], resumes=True, in_vain=3)
    cancelled = decide_keep(entry(cancelled=True), [LOST], resumes=True)

    assert (given_up.reason, cancelled.reason) == (EndReason.LOST, None)


# done


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[Settings]:
    yield Settings(
        project=Project(root=tmp_path, targets={"hpc": {"kind": "slurm", "records": str(tmp_path / "records")}}),
        data_dir=tmp_path / "data",
        cache_dir=tmp_path / "cache",
        config_dir=tmp_path / "config",
    )
    signal_all(processes_with(str(tmp_path)))


def start(settings: Settings, script: str, **changes: Any) -> JobHandle:
    # The salt makes it a job of its own: a shim ends leftovers of its job anywhere on the machine.
    env = {"SALT": os.urandom(8).hex()}
    spec = JobSpec(command=("sh", "-c", script), code=Code(mode=CodeMode.NONE), env=env, **changes)
    return launch(spec, "local", settings=settings, options=LaunchOptions(base=settings.project.root))


def lose(job: JobHandle, index: int = 0) -> None:
    """Kill the shim and the command, as the loss of their machine does."""
    runs = f"jobs/{job.id}/runs/{index}"
    wait_for(
        lambda: any(job.files.read(f"{runs}/a{each:04d}/start.json") for each in job.attempts(index)), "the attempt"
    )
    kill_all(job.id)


def kept(job: JobHandle, settings: Settings) -> KeptJob:
    (found,) = keep_target(job, settings).jobs
    return found


def test_lost_job_goes_on_as_its_next_attempt_and_ends(settings: Settings) -> None:
    job = start(settings, "[ $RUNTIME_ATTEMPT = 2 ] || sleep 600")
    lose(job)

    found = kept(job, settings)

    assert (found.job, found.target, found.done, found.next) == (job.id, "local", "taken_up", None)
    assert found.seen == "its process on `localhost` is gone"
    assert job.wait(timeout=PATIENCE_S).state is JobState.SUCCEEDED
    assert job.attempts() == [1, 2]
    assert [each.epoch for each in job.entry().natives] == [1, 2]
    assert found.native_id == job.entry().natives[1].native_id
    wait_for(lambda: keep_target(job, settings).jobs == (), "the removal of the name")


def test_job_that_runs_is_left(settings: Settings) -> None:
    job = start(settings, "sleep 600")
    wait_for(lambda: job.attempts() != [], "the attempt")

    found = kept(job, settings)

    assert (found.done, found.seen) == ("left", "running")
    assert len(job.entry().natives) == 1


def test_job_goes_on_only_with_runs_that_have_no_result(settings: Settings) -> None:
    script = "[ $RUNTIME_ARRAY_INDEX = 0 ] || [ $RUNTIME_ATTEMPT = 2 ] || sleep 600"
    job = start(settings, script, array=Array(count=2, max_parallel=1))
    wait_for(lambda: 0 in job.entry().outcomes, "the first result")
    lose(job, 1)

    assert kept(job, settings).done == "taken_up"
    assert job.wait(timeout=PATIENCE_S).state is JobState.SUCCEEDED
    assert (job.attempts(0), job.attempts(1)) == ([1], [1, 2])


def test_budget_that_is_spent_is_judged_by_the_shim_that_takes_the_job_up(settings: Settings) -> None:
    job = start(settings, "sleep 600", retry=Retry(preemption=0))
    lose(job)

    assert kept(job, settings).done == "taken_up"
    status = job.wait(timeout=PATIENCE_S)
    assert (status.state, status.reason, job.attempts()) == (JobState.FAILED, EndReason.LOST, [1])
    wait_for(lambda: keep_target(job, settings).jobs == (), "the removal of the name")


def test_job_whose_shims_begin_no_attempt_is_given_up_after_three(settings: Settings) -> None:
    job = start(settings, "sleep 600")
    lose(job)
    order = job.files.read(f"jobs/{job.id}/order.json") or b""
    # The shim can no longer follow its order: it claims the job, and leaves.
    job.files.write(f"jobs/{job.id}/order.json", order.replace(b'"runs": {"0"', b'"runs": {"7"'))

    acts = []
    for _ in range(4):
        acts.append(kept(job, settings).done)
        wait_for(lambda: not processes_with(job.id), "the end of the shim")

    assert acts == ["taken_up", "taken_up", "taken_up", "ended"]
    assert (job.status().state, job.status().reason) == (JobState.FAILED, EndReason.LOST)
    assert open_jobs.list_open(job.files, "local") == {}


def test_cancelled_job_is_ended_and_not_taken_up(settings: Settings) -> None:
    job = start(settings, "sleep 600")
    lose(job)
    job.files.create(f"jobs/{job.id}/cancel", b"{}")

    assert kept(job, settings).done == "ended"
    assert (job.status().state, len(job.entry().natives)) == (JobState.CANCELLED, 1)
    assert open_jobs.list_open(job.files, "local") == {}


def test_name_that_was_left_behind_is_dropped(settings: Settings) -> None:
    job = start(settings, "true")
    job.wait(timeout=PATIENCE_S)
    wait_for(lambda: not processes_with(job.id), "the end of the shim")
    open_jobs.mark_open(job.files, "local", job.id, 0)

    assert kept(job, settings).done == "dropped"
    assert open_jobs.list_open(job.files, "local") == {}


def test_job_that_somebody_is_at_work_on_is_passed_over_and_said(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "BEAT_S", 0.1)
    job = start(settings, "sleep 600")
    lose(job)
    held = Lock(job.files, job.id, "ada@elsewhere")
    held.take(patience_s=0)
    try:
        found = kept(job, settings)
    finally:
        held.release()

    assert (found.done, found.seen) == (
        "left",
        "its process on `localhost` is gone; ada@elsewhere is at work on it",
    )
    assert len(job.entry().natives) == 1


def test_job_that_ran_on_another_machine_is_left_to_that_one(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = start(settings, "sleep 600")
    lose(job)
    monkeypatch.setattr(ProcessLauncher, "read_machine", lambda *given: "other-login")

    found = kept(job, settings)

    assert (found.done, found.next) == ("left", f"runtime keep where `local` is `{os.uname().nodename}`")
    assert len(job.entry().natives) == 1


@pytest.mark.parametrize(("removed", "done"), [(False, "taken_up"), (True, "left")])
def test_job_with_a_secret_of_the_launching_machine_goes_on_while_its_value_is_there(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, removed: bool, done: str
) -> None:
    monkeypatch.setenv("CANARY", "canary-815")
    script = "[ $RUNTIME_ATTEMPT = 2 ] || sleep 600; [ $TOKEN = canary-815 ]"
    job = start(settings, script, secrets=(SecretRef(name="TOKEN", source="env://CANARY"),))
    lose(job)
    # The keeper's own variable of that name is another.
    monkeypatch.setenv("CANARY", "of-the-keeper")
    if removed:
        job.files.remove(f"jobs/{job.id}/secrets")

    found = kept(job, settings)

    assert found.done == done
    if removed:
        here = os.uname().nodename
        assert found.next == f"the same `runtime launch` by `{job.entry().owner}` on `{here}` reads it again"
        assert len(job.entry().natives) == 1
    else:
        assert job.wait(timeout=PATIENCE_S).state is JobState.SUCCEEDED


DAMAGES = (b"", b'{"name": ', b"[" * 100_000)


@pytest.mark.parametrize(
    "file", ["intent.json", "order.json", "spec.json", "artefacts/command", "native/001.000000.json", "owners/1.0"]
)
@pytest.mark.daily(2)
def test_damaged_file_of_one_job_stops_no_other(settings: Settings, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    monkeypatch.setenv("CANARY", "1")
    for content in DAMAGES:
        damaged = start(settings, "sleep 600", secrets=(SecretRef(name="TOKEN", source="env://CANARY"),))
        other = start(settings, "[ $RUNTIME_ATTEMPT = 2 ] || sleep 600")
        lose(damaged)
        lose(other)
        path = settings.data_dir / "jobs/jobs" / damaged.id / file
        # A name is made once; damage comes later.
        path.unlink()
        path.write_bytes(content)

        done = {each.job: each.done for each in keep_target(other, settings).jobs}

        assert done[other.id] == "taken_up", content
        assert other.id in {each.job for each in read_target(other, now=NOW).jobs}, content
        assert other.wait(timeout=PATIENCE_S).state is JobState.SUCCEEDED
        kill_all(damaged.id)
        open_jobs.drop_open(damaged.files, damaged.id)


def test_job_of_more_runs_than_any_launch_makes_counts_as_damaged(settings: Settings) -> None:
    job = start(settings, "sleep 600")
    lose(job)
    intent = job.files.read(f"jobs/{job.id}/intent.json") or b""
    job.files.write(f"jobs/{job.id}/intent.json", intent.replace(b'"indices": 1', b'"indices": 100000000000'))

    found = kept(job, settings)

    assert found.done == "left"
    assert "intent.json` is damaged" in found.seen


@pytest.mark.parametrize("words", [["keep", "--once"], ["keep", "--once", "--on", "local,broken"]])
def test_target_that_cannot_be_used_stops_no_other(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    job = start(settings, "[ $RUNTIME_ATTEMPT = 2 ] || sleep 600")
    lose(job)
    (settings.project.root / "runtime.toml").write_text('[targets.broken]\nkind = "slurm"\nrecords = "/r"\n')
    monkeypatch.chdir(settings.project.root)
    monkeypatch.setenv("RUNTIME_DATA_DIR", str(settings.data_dir))
    opened = targets.open_target

    def open_target(target: Target, *more: Any) -> OpenTarget:
        if target.name == "broken":
            raise MissingExtra("target `broken`", "all")
        return opened(target, *more)

    monkeypatch.setattr(targets, "open_target", open_target)

    code = main(words)

    said = capsys.readouterr()
    assert (code, "taken_up" in said.out, "`broken` cannot be used here" in said.err) == (3, True, True)
    assert job.wait(timeout=PATIENCE_S).state is JobState.SUCCEEDED


def test_job_that_may_not_be_read_is_said(settings: Settings) -> None:
    with folder_for_all() as folder:
        settings = replace(settings, data_dir=folder)
        job = start(settings, "sleep 600")
        lose(job)
        with as_somebody_else(folder / "jobs", hidden=f"jobs/{job.id}"):
            found = kept(job, settings)

    assert (found.job, found.owner, found.done) == (job.id, None, "left")
    assert "is another user's" in found.seen


def test_target_that_does_not_answer_concludes_nothing(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    job = start(settings, "sleep 600")
    lose(job)

    def silent(*_: object) -> None:
        raise StoreUnavailable("no route to host")

    with monkeypatch.context() as patch:
        patch.setattr(ProcessLauncher, "states", silent)
        with pytest.raises(StoreUnavailable):
            keep_target(job, settings)

    assert open_jobs.list_open(job.files, "local") == {job.id: [0]}
    assert len(job.entry().natives) == 1


def test_backend_that_restarts_jobs_itself_only_loses_names_of_jobs_that_ended(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {"1": NativeState(native_id="1", index=None, state=JobState.RUNNING)}
    monkeypatch.setattr(SlurmLauncher, "submit", lambda *given: "1")
    monkeypatch.setattr(SlurmLauncher, "find", lambda *given: {})
    monkeypatch.setattr(SlurmLauncher, "states", lambda _, target, ids, host: [said[each] for each in ids])
    spec = JobSpec(command=("true",), code=Code(mode=CodeMode.NONE))
    job = launch(spec, "hpc", settings=settings, options=LaunchOptions(base=settings.project.root))

    running = kept(job, settings)
    said["1"] = NativeState(native_id="1", index=None, state=JobState.FAILED, reason=EndReason.OOM)
    ended = kept(job, settings)

    assert (running.done, running.seen) == ("left", "running; its backend itself starts it again")
    assert (ended.done, ended.seen) == ("dropped", "its backend has ended it: oom")
    assert open_jobs.list_open(job.files, "hpc") == {}


def test_open_jobs_under_another_name_of_the_target_are_counted(settings: Settings) -> None:
    job = start(settings, "sleep 600")
    open_jobs.mark_open(job.files, "bobs", "j-aa", 0)
    open_jobs.mark_open(job.files, "bobs", "j-aa", 1)

    assert list_strange_folders(job, ["local"]) == {"open/bobs": 2}


# once


def environ(settings: Settings, **more: str) -> dict[str, str]:
    return {**os.environ, "RUNTIME_DATA_DIR": str(settings.data_dir), **more}


@pytest.mark.parametrize("point", ["keep.locked", "launch.reordered", "launch.forgiven", "launch.resubmitted"])
def test_keeper_killed_at_any_step_and_run_again_starts_one_attempt(
    settings: Settings, copies: Copies, tmp_path: Path, point: str
) -> None:
    go = tmp_path / "go"
    script = (
        f"echo ran >> {tmp_path}/ran; [ $RUNTIME_ATTEMPT = 2 ] || sleep 600; until [ -e {go} ]; do sleep 0.05; done"
    )
    job = start(settings, script)
    wait_for((tmp_path / "ran").exists, "the command")
    lose(job)

    killed = copies.run(KEEP, [], environ(settings, RUNTIME_FAULTS=f"{point}=kill"))
    # The next keeper knows that the lock's holder is dead.
    again = copies.run(KEEP, [], environ(settings, STILL_S="1"))

    assert killed.returncode == -signal.SIGKILL
    assert again.returncode == 0, again.stderr
    go.touch()
    assert job.wait(timeout=PATIENCE_S).state is JobState.SUCCEEDED
    assert (job.attempts(), (tmp_path / "ran").read_text()) == ([1, 2], "ran\n" * 2)
    assert len(job.entry().natives) == 2
    wait_for(lambda: keep_target(job, settings).jobs == (), "the removal of the name")


def test_keepers_and_a_launch_at_once_start_one_attempt(settings: Settings, tmp_path: Path) -> None:
    job = start(settings, f"echo ran >> {tmp_path}/ran; [ $RUNTIME_ATTEMPT = 1 ] || exit 0; sleep 600")
    spec = f"""
import json, sys
from pathlib import Path
from runtime.client.jobs.launch import launch
from runtime.client.jobs.prepare import LaunchOptions
from runtime.config import load_settings
from runtime.jobs.spec import parse_spec
spec = parse_spec(json.loads(Path({str(settings.data_dir / "jobs/jobs" / job.id / "spec.json")!r}).read_text()), source="it")
launch(spec, "local", settings=load_settings(), options=LaunchOptions(base=Path({str(settings.project.root)!r})))
"""
    wait_for((tmp_path / "ran").exists, "the command")
    lose(job)
    every = [
        subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True, env=environ(settings))
        for text in (KEEP, KEEP, spec)
    ]
    said = [each.communicate(timeout=PATIENCE_S)[0] for each in every]

    assert [each.returncode for each in every] == [0, 0, 0], said
    assert job.wait(timeout=PATIENCE_S).state is JobState.SUCCEEDED
    assert (job.attempts(), (tmp_path / "ran").read_text()) == ([1, 2], "ran\n" * 2)
