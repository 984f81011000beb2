"""Jobs on a real Slurm of four nodes: started once despite kills, retried as promised, every end reported right."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from runtime.client.jobs.explain import explain, read_facts
from runtime.client.jobs.handle import JobHandle, find_job, read_unbegun
from runtime.client.jobs.launch import launch
from runtime.client.jobs.prepare import LaunchOptions, prepare
from runtime.client.jobs.retry import retry_job
from runtime.client.jobs.status import read_job
from runtime.client.jobs.targets import find_target
from runtime.config import Project, Settings
from runtime.end_reasons import EndReason
from runtime.errors import NotPossible
from runtime.jobs.spec import (
    Array,
    Backoff,
    Checkpoint,
    CheckpointSignal,
    JobEnvironment,
    JobResources,
    JobSpec,
    JobState,
    PackPer,
    Placement,
    Range,
    Retry,
)
from runtime.launchers.slurm.bundle import export_bundle
from runtime.launchers.slurm.explain import SubmitRefused
from runtime.launchers.slurm.launcher import SlurmLauncher
from runtime.testing.launcher_bench import LauncherCase
from runtime.testing.launchers import LauncherSuite
from tests import slurm_support
from tests.readme_support import AS_PROMISED, follow_readme
from tests.services_support import require, wait_until
from tests.slurm_support import Slurm
from tests.ssh_support import SshServer

pytestmark = [pytest.mark.service, pytest.mark.slow]

FAULTS = ["unlocked", "locked", "written", "submitting", "submitted", "launched"]
SOON = Backoff(min=timedelta(seconds=1), max=timedelta(seconds=1))
LAUNCH = """
import os
from runtime.jobs import lock
from runtime.config import load_settings
from runtime.jobs.spec import JobSpec
from runtime.client.jobs.launch import launch
lock.STILL_S = float(os.environ.get("STILL_S", lock.STILL_S))
job = launch(JobSpec(command=("sh", "-c", "echo ran >> $RUNTIME_CHECKPOINT_DIR/ran; sleep 1"), name="once"), "hpc")
print(job.id, job.new)
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Slurm]:
    missing = slurm_support.find_missing()
    require(missing or "Slurm", not missing, slurm_support.INSTALL)
    running = Slurm().start()
    yield running
    running.stop()


class Place:
    """A project whose target `hpc` is a Slurm, and the work tree that jobs are launched from."""

    def __init__(self, slurm: Slurm, folder: Path) -> None:
        self.slurm, self.folder = slurm, folder
        self.tree = folder / "tree"
        self.tree.mkdir()
        self.target: dict[str, Any] = {"kind": "slurm", "records": str(folder / "records")}

    @property
    def settings(self) -> Settings:
        return Settings(
            project=Project(root=self.folder, targets={"hpc": self.target}),
            data_dir=self.folder / "data",
            cache_dir=self.folder / "cache",
            config_dir=self.folder / "config",
        )

    def launch(self, script: str, **changes: Any) -> JobHandle:
        spec = replace(JobSpec(command=("sh", "-c", script)), **changes)
        return launch(spec, "hpc", settings=self.settings, options=LaunchOptions(base=self.tree))

    def program(self, **environ: str) -> subprocess.Popen[str]:
        """Launch `LAUNCH` in another process; `environ` may set where it dies, or that the lock's holder is dead."""
        lines = "".join(f'{name} = "{value}"\n' for name, value in self.target.items())
        (self.tree / "pyproject.toml").write_text(f"[tool.runtime.targets.hpc]\n{lines}")
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **environ}
        return subprocess.Popen(
            [sys.executable, "-c", LAUNCH], cwd=self.tree, env=env, stdout=subprocess.PIPE, text=True
        )


@pytest.fixture
def place(lab: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    for name, value in lab.environment.items():
        monkeypatch.setenv(name, value)
    yield Place(lab, tmp_path)
    lab.clear()


PATIENCE_S = 400
"""A generous limit: machines that run many tests at once are slow."""
FOREVER = "sleep 3000"
"""A command that the test always ends early."""


def printed(job: JobHandle, index: int = 0, rank: int = 0) -> str:
    return b"".join(job.logs(index=index, rank=rank)).decode()


def ends(place: Place, job: JobHandle, index: int = 0) -> list[str]:
    """Return how each attempt of an index ended; `-` if it left no record, or needed none."""
    found = []
    for attempt in job.attempts(index):
        names = job.files.names(f"jobs/{job.id}/runs/{index}/a{attempt:04d}", "end.")
        notes = [name.removeprefix("end.").rpartition(".")[0] for name in names]
        found.append(notes[0] if notes else "-")
    return found


def told(job: JobHandle, index: int = 0) -> list[str]:
    """Return how each attempt ended according to `runtime status`."""
    return [str(each.reason) for each in read_job(job, index=[str(index)]).attempts]


def runs(job: JobHandle) -> bool:
    return job.state() is JobState.RUNNING and job.attempts() != []


def is_accounted(place: Place, job: JobHandle, starts: int = 1, index: int | None = None) -> bool:
    """Return whether accounting has `starts` starts of a run that runs; it may never hear of a short start."""
    member = job.entry().natives[0].native_id + ("" if index is None else f"_{index}")
    said = place.slurm.run("sacct", "-X", "-n", "-P", "--duplicates", "--format=State", f"--jobs={member}").split("\n")
    return (len(said) - 1, said.count("RUNNING")) == (starts, 1)


# runs


def test_readme_launch_on_slurm_ends_as_promised(place: Place, tmp_path: Path) -> None:
    hpc = {"kind": "slurm", "records": str(tmp_path / "records")}

    assert follow_readme(tmp_path / "project", "hpc", settings=hpc) == AS_PROMISED


def test_job_runs_the_tree_as_it_was_with_only_its_own_variables(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "nowhere")
    monkeypatch.setenv("SQUEUE_STATES", "SUSPENDED")
    monkeypatch.setenv("LAUNCHING_SHELL", "here")
    (place.tree / "main.sh").write_text("echo one $MINE ${LAUNCHING_SHELL-unset} $CUDA_VISIBLE_DEVICES\n")
    job = place.launch("sh main.sh", env={"MINE": "mine"}, resources=_gpus(2))
    (place.tree / "main.sh").write_text("echo two\n")

    status = job.wait(timeout=PATIENCE_S)

    assert (status.state, status.reason) == (JobState.SUCCEEDED, EndReason.SUCCEEDED)
    assert printed(job) == "one mine unset 0,1\n"
    assert len(place.slurm.jobs(job.id)) == 1


def _gpus(count: float) -> JobResources:
    from runtime.jobs.spec import Gpus

    return JobResources(gpus=Gpus(count=count, type="a100"))


def elements(place: Place, job: JobHandle) -> list[str]:
    """List the elements of the job's native array that accounting knows."""
    (native,) = place.slurm.jobs(job.id)
    return place.slurm.run("sacct", "-X", "-n", "-P", "--format=JobID", "-j", native).splitlines()


def test_array_gives_each_index_its_parameters_and_its_own_end(place: Place) -> None:
    job = place.launch("echo {x} $RUNTIME_ARRAY_INDEX; exit {x}", array=Array(params={"x": (0, 1, 0)}, offset=5))

    status = job.wait(timeout=PATIENCE_S)

    assert (status.state, dict(status.counts)) == (JobState.FAILED, {JobState.SUCCEEDED: 2, JobState.FAILED: 1})
    assert [printed(job, index) for index in (5, 6, 7)] == ["0 5\n", "1 6\n", "0 7\n"]


def test_array_above_the_clusters_limits_is_split_and_each_index_runs_once(place: Place) -> None:
    place.target["max_array_size"] = 3

    job = place.launch("echo $RUNTIME_ARRAY_INDEX", array=Array(count=8, offset=10, max_parallel=6))
    status = job.wait(timeout=PATIENCE_S)

    assert dict(status.counts) == {JobState.SUCCEEDED: 8}
    assert len(place.slurm.jobs(job.id)) == 3
    assert [printed(job, index) for index in range(10, 18)] == [f"{index}\n" for index in range(10, 18)]
    assert [job.attempts(index) for index in range(10, 18)] == [[1]] * 8


def test_array_above_the_submit_limit_runs_several_indices_in_turn(place: Place) -> None:
    place.target["max_submit"] = 2

    job = place.launch("echo $RUNTIME_ARRAY_INDEX", array=Array(count=5))
    status = job.wait(timeout=PATIENCE_S)

    assert dict(status.counts) == {JobState.SUCCEEDED: 5}
    # Accounting hears of elements some time after they have ended.
    assert wait_until(lambda: len(elements(place, job)) == 2), elements(place, job)
    assert [printed(job, index) for index in range(5)] == [f"{index}\n" for index in range(5)]


def test_packed_array_fills_the_slots_of_its_nodes_with_gpus_of_their_own(place: Place) -> None:
    job = place.launch(
        "sleep 0.2; echo $CUDA_VISIBLE_DEVICES; [ $RUNTIME_ARRAY_INDEX != 7 ]",
        array=Array(count=12, pack=2, pack_per=PackPer.GPU, max_parallel=8),
        resources=_gpus(2),
        retry=Retry(failure=1, backoff=SOON),
    )

    status = job.wait(timeout=PATIENCE_S)

    assert dict(status.counts) == {JobState.SUCCEEDED: 11, JobState.FAILED: 1}
    # Accounting hears of elements some time after they have ended.
    assert wait_until(lambda: len(elements(place, job)) == 2), elements(place, job)
    assert {printed(job, index) for index in range(12) if index != 7} == {"0\n", "1\n"}
    assert [len(job.attempts(index)) for index in (6, 7, 8)] == [1, 2, 1]


def test_two_hundred_small_runs_are_packed_on_four_nodes_and_each_runs_once(place: Place) -> None:
    job = place.launch(
        "echo $RUNTIME_ARRAY_INDEX $SLURMD_NODENAME",
        array=Array(count=200, pack=4, max_parallel=16),
        resources=JobResources(cpus=4),
        time_limit=timedelta(minutes=1),
    )

    status = job.wait(timeout=PATIENCE_S)

    assert dict(status.counts) == {JobState.SUCCEEDED: 200}
    assert wait_until(lambda: len(elements(place, job)) == 4), elements(place, job)
    said = [printed(job, index).split() for index in range(200)]
    assert [int(index) for index, _ in said] == list(range(200))
    assert {node for _, node in said} == {"n1", "n2", "n3", "n4"}
    assert {tuple(job.attempts(index)) for index in range(200)} == {(1,)}


@pytest.mark.parametrize("array", [None, Array(count=8)], ids=["single", "array"])
def test_job_that_has_ended_takes_few_entries(place: Place, array: Array | None) -> None:
    """The limit is that for jobs launched by `runtime launch` on any target: see tests/unit/shim/test_folding.py."""
    assert place.launch("echo first").wait(timeout=PATIENCE_S).state is JobState.SUCCEEDED
    records = place.folder / "records"
    assert wait_until(lambda: not place.slurm.run("squeue", "-h", "-o", "%F"))
    before = sum(1 for _ in records.rglob("*"))

    assert place.launch("echo hello", array=array).wait(timeout=PATIENCE_S).state is JobState.SUCCEEDED

    assert wait_until(lambda: not place.slurm.run("squeue", "-h", "-o", "%F"))
    assert sum(1 for _ in records.rglob("*")) - before <= 8 + (3 * 8 if array else 0)


def test_packed_runs_as_steps_run_at_once_with_cpus_of_their_own(place: Place) -> None:
    place.target["pack_steps"] = True
    job = place.launch(
        "touch $RUNTIME_CHECKPOINT_DIR/../../../here$RUNTIME_ARRAY_INDEX; n=0\n"
        "until ls $RUNTIME_CHECKPOINT_DIR/../../../here[01] >/dev/null 2>&1 && [ $(ls -d $RUNTIME_CHECKPOINT_DIR/../../../here* | wc -l) -ge 2 ]\n"
        "do sleep 0.1; n=$((n + 1)); [ $n -lt 3000 ] || exit 9; done\n"
        "echo $SLURM_STEP_ID $SLURM_CPUS_PER_TASK; [ $RUNTIME_ARRAY_INDEX$RUNTIME_ATTEMPT != 21 ]",
        array=Array(count=4, pack=2, max_parallel=2),
        resources=JobResources(cpus=4, memory=Range.read("512MiB")),
        retry=Retry(failure=1, backoff=SOON),
    )

    status = job.wait(timeout=PATIENCE_S)

    assert dict(status.counts) == {JobState.SUCCEEDED: 4}
    assert [printed(job, index).split()[1] for index in range(4)] == ["2"] * 4
    assert len({printed(job, index).split()[0] for index in range(4)}) == 4
    assert [len(job.attempts(index)) for index in range(4)] == [1, 1, 2, 1]


def test_job_waits_for_the_jobs_it_comes_after(place: Place) -> None:
    gate = place.folder / "gate"
    first = place.launch(f"until [ -e {gate} ]; do sleep 0.1; done")
    second = place.launch("true", after=(first.id,))

    assert second.state() is JobState.PENDING
    gate.touch()
    assert second.wait(timeout=PATIENCE_S).state is JobState.SUCCEEDED
    assert first.state() is JobState.SUCCEEDED
    with pytest.raises(NotPossible):
        place.launch("true", after=("j-000000000000000000000000",))


def test_job_whose_dependency_fails_names_it_and_one_that_waits_for_the_failure_or_the_end_runs(place: Place) -> None:
    wanted = {"ok": JobState.CANCELLED, "notok": JobState.SUCCEEDED, "any": JobState.SUCCEEDED}
    gate = place.folder / "gate"
    first = place.launch(f"until [ -e {gate} ]; do sleep 0.1; done; exit $RUNTIME_ARRAY_INDEX", array=Array(count=2))
    then = {when: place.launch(f"echo {when}", after=(f"{when}:{first.id}",)) for when in wanted}
    never = place.launch("echo after never", after=(then["ok"].id,))
    waits = explain(read_facts(then["ok"]))

    gate.touch()
    assert f"it comes after `{first.id[:10]}`, which is " in "\n".join(waits.evidence)
    assert {when: job.wait(timeout=PATIENCE_S).state for when, job in then.items()} == wanted
    found = explain(read_facts(then["ok"]))
    assert found.sentence == (
        f"job `{then['ok'].id[:10]}` never ran: it comes after `{first.id[:10]}`, which failed (app_failed)"
    )
    assert found.hint == f"runtime explain {first.id[:10]}"
    assert [each.job for each in read_job(then["ok"]).after] == [first.id]
    assert never.wait(timeout=PATIENCE_S).state is JobState.CANCELLED
    assert f"`{then['ok'].id[:10]}`, which was cancelled" in explain(read_facts(never)).sentence
    # The end is known before the launch.
    assert place.launch("echo late", after=(f"notok:{first.id}",)).wait(timeout=PATIENCE_S).state is JobState.SUCCEEDED
    with pytest.raises(NotPossible, match=f"`after` names `{first.id}`, and that job ended as failed"):
        place.launch("echo late", after=(first.id,))


def test_ranks_on_several_nodes_are_started_together_with_a_tree_each(place: Place) -> None:
    (place.tree / "main.sh").write_text(
        "echo $RANK of $WORLD_SIZE local $LOCAL_RANK node $RUNTIME_NODE_RANK $SLURMD_NODENAME $MINE $MASTER_ADDR\n"
        "pwd > $RUNTIME_CHECKPOINT_DIR/pwd$RANK\n"
    )
    job = place.launch("sh main.sh", nodes=2, tasks_per_node=2, env={"MINE": "mine"})

    status = job.wait(timeout=PATIENCE_S)

    assert status.state is JobState.SUCCEEDED
    host = socket.gethostname()
    lines = [printed(job, rank=rank).split() for rank in range(4)]
    assert [line[:7] for line in lines] == [
        [str(rank), "of", "4", "local", str(rank % 2), "node", str(rank // 2)] for rank in range(4)
    ]
    assert [line[8:] for line in lines] == [["mine", host]] * 4
    assert (lines[0][7], lines[2][7]) == (lines[1][7], lines[3][7])
    assert lines[0][7] != lines[2][7]
    trees = [path.read_text() for path in (place.folder / "records").glob("jobs/*/runs/0/checkpoint/pwd*")]
    assert len(set(trees)) == 4


def test_rank_that_fails_ends_the_others_and_all_start_again(place: Place) -> None:
    job = place.launch(
        f"[ $RUNTIME_ATTEMPT$RANK = 11 ] && exit 5; [ $RUNTIME_ATTEMPT = 2 ] || {FOREVER}",
        nodes=2,
        grace_period=timedelta(seconds=1),
        retry=Retry(failure=1, backoff=SOON),
    )

    status = job.wait(timeout=PATIENCE_S)

    assert (status.state, ends(place, job)) == (JobState.SUCCEEDED, ["app_failed", "-"])


def test_ranks_are_asked_for_a_checkpoint_before_the_time_limit(place: Place) -> None:
    job = place.launch(
        "[ $RUNTIME_ATTEMPT = 1 ] || exit 0\n"
        "trap 'touch $RUNTIME_CHECKPOINT_DIR/$RANK' USR2\nwhile :; do sleep 0.1; done",
        nodes=2,
        # By then, srun has started both ranks and they have set their traps, even on a busy machine.
        time_limit=timedelta(seconds=35),
        grace_period=timedelta(seconds=1),
        checkpoint=Checkpoint(lead=timedelta(seconds=10), signal=CheckpointSignal.USR2),
    )

    status = job.wait(timeout=PATIENCE_S)

    assert (status.state, ends(place, job)) == (JobState.SUCCEEDED, ["checkpointed", "-"])
    there = (place.folder / "records" / "jobs" / job.id / "runs" / "0" / "checkpoint").iterdir()
    assert sorted(path.name for path in there) == ["0", "1"]


# ends and their consequences


def test_failure_is_requeued_by_the_shim_and_only_that_member_of_the_array(place: Place) -> None:
    job = place.launch(
        "[ $RUNTIME_ARRAY_INDEX != 0 ] || [ $RUNTIME_ATTEMPT = 2 ]",
        array=Array(count=3),
        retry=Retry(failure=1, backoff=SOON),
    )

    status = job.wait(timeout=PATIENCE_S)

    assert dict(status.counts) == {JobState.SUCCEEDED: 3}
    assert [ends(place, job, index) for index in range(3)] == [["app_failed", "-"], ["-"], ["-"]]
    assert len(place.slurm.jobs(job.id)) == 1


def test_job_that_checkpoints_at_its_time_limit_finishes_on_the_third_attempt(place: Place) -> None:
    job = place.launch(
        "n=$(cat $RUNTIME_CHECKPOINT_DIR/n 2>/dev/null || echo 0); [ $n = 2 ] && exit 0\n"
        "trap 'echo $((n + 1)) > $RUNTIME_CHECKPOINT_DIR/n; exit 0' TERM\n"
        "trap 'echo $((n + 1)) > $RUNTIME_CHECKPOINT_DIR/n' USR1\n"
        "while :; do sleep 0.1; done",
        time_limit=timedelta(seconds=20),
        grace_period=timedelta(seconds=5),
        checkpoint=Checkpoint(lead=timedelta(seconds=5)),
    )

    status = job.wait(timeout=PATIENCE_S)

    assert (status.state, ends(place, job)) == (JobState.SUCCEEDED, ["checkpointed", "checkpointed", "-"])
    assert len(place.slurm.jobs(job.id)) == 1


def test_preempted_job_is_requeued_and_goes_on(place: Place) -> None:
    place.target["partition"] = "preempt"
    job = place.launch(
        f"[ $RUNTIME_ATTEMPT = 1 ] || exit 0; {FOREVER}",
        placement=Placement(nodes=("n1",)),
        grace_period=timedelta(seconds=1),
    )
    assert wait_until(lambda: runs(job) and is_accounted(place, job))

    place.slurm.run("sbatch", "-p", "urgent", "-w", "n1", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 2")
    status = job.wait(timeout=PATIENCE_S)

    assert (status.state, ends(place, job)) == (JobState.SUCCEEDED, ["stopped", "-"])
    assert len(place.slurm.jobs(job.id)) == 1
    # Accounting hears of it later.
    assert wait_until(lambda: told(job) == ["preempted", "succeeded"]), told(job)


def test_each_preemption_of_a_member_of_an_array_is_told_with_its_own_attempt(place: Place) -> None:
    place.target |= {"partition": "preempt", "flags": ["--exclusive"]}
    job = place.launch(
        f"[ $RUNTIME_ARRAY_INDEX$RUNTIME_ATTEMPT -lt 13 ] || exit 0\n[ $RUNTIME_ARRAY_INDEX = 1 ] || exit 0; {FOREVER}",
        array=Array(count=2),
        placement=Placement(nodes=("n1",)),
        grace_period=timedelta(seconds=1),
    )
    for attempt in (1, 2):
        assert wait_until(lambda n=attempt: runs(job) and len(job.attempts(1)) == n, timeout_s=PATIENCE_S)
        assert wait_until(lambda n=attempt: is_accounted(place, job, n, index=1))
        place.slurm.run("sbatch", "-p", "urgent", "-w", "n1", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 1")
        assert wait_until(lambda n=attempt: len(job.attempts(1)) == n + 1, timeout_s=PATIENCE_S)

    assert job.wait(timeout=PATIENCE_S).state is JobState.SUCCEEDED
    expected = ["preempted", "preempted", "succeeded"]
    starts = ["sacct", "-X", "-n", "-P", "--duplicates", "--format=JobID,State,Start,End"]
    assert wait_until(lambda: told(job, 1) == expected), (told(job, 1), job.attempts(1), place.slurm.run(*starts))
    assert told(job, 0) == ["succeeded"]


def is_usable(slurm: Slurm, node: str) -> bool:
    """Return whether a node takes jobs; resume it if not, which has an effect only after the node has registered."""
    state = slurm.run("sinfo", "-h", "-n", node, "-p", "debug", "-o", "%T").strip()
    if state in ("idle", "mixed", "allocated"):
        return True
    slurm.run("scontrol", "update", f"nodename={node}", "state=resume", check=False)
    return False


def test_job_on_a_node_that_goes_down_is_requeued_and_goes_on(place: Place) -> None:
    job = place.launch(f"[ $RUNTIME_ATTEMPT = 1 ] || exit 0; {FOREVER}", placement=Placement(nodes=("n4",)))
    assert wait_until(lambda: runs(job) and is_accounted(place, job))

    place.slurm.node(4, "down")
    try:
        place.slurm.run("scontrol", "update", "nodename=n4", "state=down", "reason=test")
        assert wait_until(lambda: job.state() is JobState.PENDING)
    finally:
        place.slurm.node(4, "up")
        assert wait_until(lambda: is_usable(place.slurm, "n4"), every_s=0.5)
    status = job.wait(timeout=PATIENCE_S)

    assert (status.state, len(job.attempts())) == (JobState.SUCCEEDED, 2)
    assert len(place.slurm.jobs(job.id)) == 1
    assert wait_until(lambda: told(job) == ["node_failed", "succeeded"]), told(job)


def test_job_ended_by_scancel_is_cancelled(place: Place) -> None:
    job = place.launch(FOREVER, grace_period=timedelta(seconds=1))
    assert wait_until(lambda: runs(job))

    place.slurm.run("scancel", place.slurm.jobs(job.id)[0])
    status = job.wait(timeout=PATIENCE_S)

    assert (status.state, status.reason) == (JobState.CANCELLED, EndReason.CANCELLED)


def test_cancel_of_one_index_leaves_the_others_and_of_the_job_leaves_nothing(place: Place) -> None:
    job = place.launch(FOREVER, array=Array(count=3), grace_period=timedelta(seconds=1))
    assert wait_until(lambda: all(job.attempts(index) for index in range(3)))

    assert job.cancel(indices=[1]) == []
    assert [each.state for each in job.status(indices=True).indices] == [
        JobState.RUNNING,
        JobState.CANCELLED,
        JobState.RUNNING,
    ]
    assert job.cancel() == []
    assert dict(job.status().counts) == {JobState.CANCELLED: 3}
    (native,) = place.slurm.jobs(job.id)
    # Slurm takes a moment to complete ended jobs.
    assert wait_until(lambda: place.slurm.run("squeue", "-h", "-j", native, check=False) == "")


# refusals


@pytest.mark.parametrize(
    ("setting", "value", "said", "fact"),
    [
        ("partition", "gpus", "invalid partition", "partitions on `hpc`: debug, preempt, urgent"),
        ("account", "nobody", "invalid account", "your accounts on `hpc`: root, test"),
        ("qos", "gold", "invalid qos", "your QOS on `hpc`: high, low, normal"),
        ("flags", ["--array=0-9999"], "invalid job array", "MaxArraySize on `hpc`: 1001"),
    ],
)
def test_what_slurm_refuses_is_told_with_what_there_is(
    place: Place, setting: str, value: object, said: str, fact: str
) -> None:
    place.target[setting] = value

    with pytest.raises(SubmitRefused) as refused:
        place.launch("true")

    assert said in refused.value.said.lower()
    assert list(refused.value.facts) == [fact]
    del place.target[setting]
    assert place.launch("true").wait(timeout=PATIENCE_S).state is JobState.SUCCEEDED


def test_request_that_no_node_fits_is_refused_and_a_smaller_one_of_the_same_job_is_not_taken_for_it(
    place: Place,
) -> None:
    place.target["flags"] = ["--constraint=nowhere"]
    with pytest.raises(SubmitRefused):
        place.launch("true")
    place.target["flags"] = ["--mem=900000"]
    with pytest.raises(SubmitRefused) as refused:
        place.launch("true")
    assert any("4 CPUs, 4000 MB" in fact for fact in refused.value.facts)

    place.target["flags"] = []
    job = place.launch("true")

    assert job.wait(timeout=PATIENCE_S).state is JobState.SUCCEEDED


# once


@pytest.mark.parametrize("point", FAULTS)
@pytest.mark.daily(2)
def test_launch_killed_at_any_point_and_run_again_is_one_job(place: Place, point: str) -> None:
    killed = place.program(RUNTIME_FAULTS=f"launch.{point}=kill")
    assert killed.communicate(timeout=PATIENCE_S)[0] == ""
    assert killed.returncode == -signal.SIGKILL

    done = place.program(STILL_S="1")
    identity = done.communicate(timeout=PATIENCE_S)[0].split()[0]
    job = find_job(identity, settings=place.settings)

    assert job.wait(timeout=PATIENCE_S).state is JobState.SUCCEEDED
    assert len(place.slurm.jobs(identity)) == 1
    ran = place.folder / "records" / "jobs" / identity / "runs" / "0" / "checkpoint" / "ran"
    assert ran.read_text() == "ran\n"


def test_two_launches_at_once_are_one_job(place: Place) -> None:
    both = [place.program(), place.program()]
    said = [each.communicate(timeout=PATIENCE_S)[0].split() for each in both]

    assert said[0][0] == said[1][0]
    assert sorted(new for _, new in said) == ["False", "True"]
    assert find_job(said[0][0], settings=place.settings).wait(timeout=PATIENCE_S).state is JobState.SUCCEEDED
    assert len(place.slurm.jobs(said[0][0])) == 1


def test_launch_killed_while_the_controller_hangs_and_run_again_is_one_job(place: Place) -> None:
    controller = int((place.slurm.conf.parent / "run" / "slurmctld.pid").read_text())
    os.kill(controller, signal.SIGSTOP)
    try:
        killed = place.program(RUNTIME_FAULTS="launch.submitting=kill")
        # The launch hangs in `squeue`, before it submits; its sbatch may meet a stopped or a running controller.
        time.sleep(1)
        os.kill(controller, signal.SIGCONT)
        killed.communicate(timeout=PATIENCE_S)
        os.kill(controller, signal.SIGSTOP)
        again = place.program(STILL_S="1")
        time.sleep(3)
    finally:
        os.kill(controller, signal.SIGCONT)
    identity = again.communicate(timeout=PATIENCE_S)[0].split()[0]

    assert find_job(identity, settings=place.settings).wait(timeout=PATIENCE_S).state is JobState.SUCCEEDED
    assert len(place.slurm.jobs(identity)) == 1


# reports


@pytest.mark.parametrize(
    ("settings", "code", "said"),
    [
        ({"setup": ["module_that_is_not_there load cuda/12"]}, 1, "module_that_is_not_there"),
        ({"python": "/usr/bin/python-of-another-age"}, 127, "No such file or directory"),
        # The report of an interpreter too old for the shim.
        ({"python": "OLD"}, 1, "SyntaxError: invalid syntax"),
    ],
    ids=["setup", "no python", "old python"],
)
def test_job_that_ends_before_its_command_is_set_up_wrongly_and_slurms_own_log_says_how(
    place: Place, settings: dict[str, Any], code: int, said: str
) -> None:
    old = place.folder / "python-too-old"
    old.write_text('#!/bin/sh\necho "SyntaxError: invalid syntax" >&2\nexit 1\n')
    old.chmod(0o755)
    place.target |= {name: str(old) if value == "OLD" else value for name, value in settings.items()}

    job = place.launch("echo never", array=Array(count=2))
    status = job.wait(timeout=PATIENCE_S)

    assert (status.state, status.reason) == (JobState.FAILED, EndReason.SETUP_FAILED)
    # Accounting, which knows exit codes, hears of them later than the queue.
    ended = f"it ended with exit code {code} before its command began"
    assert wait_until(lambda: all(each.message == ended for each in read_facts(job).status.indices))
    found = explain(read_facts(job))
    assert found.sentence.endswith(f"run 0: it could not be prepared: {ended}")
    assert any(said in line for line in found.evidence if line.startswith("slurm's own log: ")), found.evidence
    assert any(said in line for line in read_unbegun(job, 1))


def test_line_of_a_jobs_own_setup_that_fails_is_named(place: Place) -> None:
    job = place.launch("echo never", environment=JobEnvironment(setup=("cd /no/such/folder",)))

    status = job.wait(timeout=PATIENCE_S)

    assert (status.state, status.reason) == (JobState.FAILED, EndReason.SETUP_FAILED)
    assert explain(read_facts(job)).sentence.endswith(
        "it could not be prepared: the setup lines ended with exit code 1, at: cd /no/such/folder"
    )
    assert "/no/such/folder" in printed(job)
    assert read_unbegun(job, 0) == []


def test_shim_that_was_killed_had_begun_so_its_setup_is_not_blamed(place: Place) -> None:
    job = place.launch("kill -9 $PPID; sleep 60")

    status = job.wait(timeout=PATIENCE_S)

    assert (status.state, status.reason) == (JobState.FAILED, EndReason.APP_FAILED)


# retries


def test_retry_queues_only_what_failed_as_the_same_job(place: Place) -> None:
    place.target["max_array_size"] = 3
    ran, mended = place.folder / "ran", place.folder / "mended"
    job = place.launch(
        f"echo $RUNTIME_ARRAY_INDEX >> {ran}; case $RUNTIME_ARRAY_INDEX in 6|8|13) [ -e {mended} ] ;; esac",
        array=Array(count=9, offset=5, max_parallel=6),
    )
    assert dict(job.wait(timeout=PATIENCE_S).counts) == {JobState.SUCCEEDED: 6, JobState.FAILED: 3}
    natives = place.slurm.jobs(job.id)
    place.target["partition"] = "nowhere"  # the launch's decision counts
    mended.touch()

    again = retry_job(job, place.settings)

    assert (again.job, again.new, again.indices, again.epoch) == (job.id, False, (6, 8, 13), 2)
    assert dict(job.wait(timeout=PATIENCE_S).counts) == {JobState.SUCCEEDED: 9}
    assert sorted(map(int, ran.read_text().split())) == sorted([*range(5, 14), 6, 8, 13])
    # Three parts of three runs each: the first and the third have failed runs, and so has the second.
    later = [native for native in place.slurm.jobs(job.id) if native not in natives]
    queued = place.slurm.run("squeue", "-r", "-h", "-t", "all", "-o", "%F|%K", "-j", ",".join(later)).split()
    assert sorted(line.partition("|")[2] for line in queued) == ["0", "1", "2"]
    assert [job.attempts(index) for index in (5, 6, 8, 13)] == [[1], [1, 2], [1, 2], [1, 2]]
    assert told(job, 13) == ["app_failed", "succeeded"]
    with pytest.raises(NotPossible, match="nothing of job"):
        retry_job(job, place.settings)


def test_retry_leaves_how_the_others_ended_and_what_only_slurm_knew_of_them(place: Place) -> None:
    job = place.launch(
        f"[ $RUNTIME_ATTEMPT = 2 ] || {FOREVER}", array=Array(count=3), grace_period=timedelta(seconds=1)
    )
    assert wait_until(lambda: all(job.attempts(index) for index in range(3)))
    place.slurm.run("scancel", place.slurm.jobs(job.id)[0])
    assert job.wait(timeout=PATIENCE_S).state is JobState.CANCELLED

    retry_job(job, place.settings, indices=[1])

    states = [JobState.CANCELLED, JobState.SUCCEEDED, JobState.CANCELLED]
    job.wait(timeout=PATIENCE_S)
    assert [each.state for each in job.status(indices=True).indices] == states
    retry_job(job, place.settings, indices=[0])
    job.wait(timeout=PATIENCE_S)
    assert [each.state for each in job.status(indices=True).indices] == [JobState.SUCCEEDED, *states[1:]]


RETRY = """
import sys
from runtime.jobs import lock
from runtime.config import load_settings
from runtime.client.jobs.handle import find_job
from runtime.client.jobs.retry import retry_job
lock.STILL_S = 1.0
retry_job(find_job(sys.argv[1]), load_settings())
"""


@pytest.mark.parametrize("point", ["reordered", "forgiven", "submitting", "resubmitted"])
@pytest.mark.daily(1)
def test_retry_killed_at_any_point_and_repeated_runs_each_failed_run_once(place: Place, point: str) -> None:
    ran, mended = place.folder / "ran", place.folder / "mended"
    job = place.launch(f"[ -e {mended} ] && echo $RUNTIME_ARRAY_INDEX >> {ran} && sleep 2", array=Array(count=2))
    assert job.wait(timeout=PATIENCE_S).state is JobState.FAILED
    mended.touch()
    (place.tree / "pyproject.toml").write_text(
        f'[tool.runtime.targets.hpc]\nkind = "slurm"\nrecords = "{place.folder}/records"\n'
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "RUNTIME_DATA_DIR": str(place.folder / "data")}
    words = [sys.executable, "-c", RETRY, job.id]

    killed = subprocess.run(
        words, cwd=place.tree, env={**env, "RUNTIME_FAULTS": f"launch.{point}=kill"}, check=False, timeout=PATIENCE_S
    )
    again = subprocess.run(
        words, cwd=place.tree, env=env, check=False, timeout=PATIENCE_S, capture_output=True, text=True
    )

    assert (killed.returncode, again.returncode) == (-signal.SIGKILL, 0), again.stderr
    assert dict(job.wait(timeout=PATIENCE_S).counts) == {JobState.SUCCEEDED: 2}
    assert sorted(ran.read_text().split()) == ["0", "1"]
    assert len(place.slurm.jobs(job.id)) == 2


# queries


def test_pending_jobs_are_explained_by_slurms_own_reason(place: Place) -> None:
    launcher = SlurmLauncher()
    place.target["flags"] = ["--begin=now+1hour"]
    later = place.launch("echo later")
    place.target["flags"] = ["--time=300"]
    too_long = place.launch("echo long")
    place.target["flags"] = ["--hold"]
    held = place.launch("echo held")
    place.target["flags"] = ["--exclusive"]
    blocker = place.launch(f"{FOREVER}; echo blocker", time_limit=timedelta(minutes=30))
    assert wait_until(lambda: runs(blocker))
    place.target["flags"] = ["--exclusive", "--nodes=4"]
    waiting = place.launch("echo waiting", time_limit=timedelta(minutes=30))
    after = place.launch("echo after", after=(blocker.id,))

    jobs = {"later": later, "too_long": too_long, "held": held, "waiting": waiting, "after": after}

    def said() -> dict[str, str]:
        found = {name: launcher.explain(job.target, job.natives()[0], job.host) for name, job in jobs.items()}
        return {name: each.sentence for name, each in found.items() if each is not None}

    expected = {
        "later": "it was requeued, and Slurm lets it start again in a while",
        "too_long": "its time limit is longer than the partition allows, so it will never start",
        "held": "it is held",
        "waiting": "it waits until nodes that fit are free",
        "after": "it waits for the jobs it depends on",
    }
    # Each has its reason once the scheduler has considered it.
    assert wait_until(lambda: said() == expected, every_s=0.5), said()


def test_limit_that_can_never_be_met_is_told_and_one_that_may_be_is_waited_for(place: Place) -> None:
    place.slurm.run("sacctmgr", "-i", "modify", "qos", "low", "set", "MaxTRESPerUser=cpu=2")
    place.target["qos"] = "low"
    four = JobResources(cpus=4)
    try:
        first = place.launch(FOREVER, resources=JobResources(cpus=2))
        assert wait_until(lambda: runs(first))
        never = place.launch("echo never", resources=four)
        later = place.launch("echo later", resources=JobResources(cpus=1))
        for job in (never, later):
            assert wait_until(lambda job=job: "QOSMax" in job.natives()[0].raw), job.natives()
        said = {name: explain(read_facts(job)) for name, job in (("never", never), ("later", later))}
    finally:
        place.slurm.run("sacctmgr", "-i", "modify", "qos", "low", "set", "MaxTRESPerUser=cpu=-1")

    assert said["never"].sentence.endswith(
        "is pending: it will never start: QOS `low` allows cpu=2 for all jobs of a user, and it asks for cpu=4"
    )
    assert said["never"].hint == "cancel it and ask for less, or use another QOS: `qos` of the target"
    assert said["later"].sentence.endswith("is pending: a limit of its QOS is reached")
    assert said["later"].hint == "wait until others of your jobs have ended"
    assert "QOS `low` allows cpu=2 for all jobs of a user" in said["later"].evidence


def test_array_that_runs_is_told_to_run_with_why_the_rest_waits(place: Place) -> None:
    job = place.launch(FOREVER, array=Array(count=3, max_parallel=1))
    assert wait_until(lambda: job.state() is JobState.RUNNING and job.attempts(0) != [])

    said = (
        f"job `{job.id[:10]}` runs: 2 pending, 1 running of 3; run 1 is pending: "
        "as many of its indices run as `array.max_parallel` allows"
    )
    # The scheduler sets its reason when it next considers the remaining runs.
    assert wait_until(lambda: explain(read_facts(job)).sentence == said), explain(read_facts(job))


def test_rehearsed_preemption_requeues_and_what_only_operators_can_do_is_refused(place: Place) -> None:
    launcher = SlurmLauncher()
    job = place.launch(f"[ $RUNTIME_ATTEMPT = 1 ] || exit 0; {FOREVER}", grace_period=timedelta(seconds=1))
    assert wait_until(lambda: runs(job))
    native = job.entry().natives[0].native_id

    with pytest.raises(NotPossible):
        launcher.interrupt(job.target, native, None, "node-loss", job.host)
    launcher.interrupt(job.target, native, None, "preempt", job.host)

    assert job.wait(timeout=PATIENCE_S).state is JobState.SUCCEEDED
    assert ends(place, job) == ["stopped", "-"]


def test_job_with_a_start_deadline_that_is_met_runs(place: Place) -> None:
    job = place.launch("true", start_deadline=timedelta(minutes=5), time_limit=timedelta(minutes=1))

    assert job.wait(timeout=PATIENCE_S).state is JobState.SUCCEEDED


def test_failure_where_requeue_is_forbidden_is_tried_again_in_place(place: Place) -> None:
    place.target["flags"] = ["--no-requeue"]
    job = place.launch("exit $((2 - RUNTIME_ATTEMPT))", retry=Retry(failure=1, backoff=SOON))

    status = job.wait(timeout=PATIENCE_S)

    assert (status.state, ends(place, job)) == (JobState.SUCCEEDED, ["app_failed", "-"])
    (native,) = place.slurm.jobs(job.id)
    states = ("sacct", "-D", "-X", "-n", "-P", "--format=State", "-j", native)
    assert wait_until(lambda: place.slurm.run(*states) == "COMPLETED\n"), place.slurm.run(*states)


def test_submit_limit_is_told_and_an_array_within_it_runs(place: Place) -> None:
    place.slurm.run("sacctmgr", "-i", "-Q", "modify", "qos", "low", "set", "MaxSubmitJobsPerUser=3")
    place.target["qos"] = "low"

    with pytest.raises(SubmitRefused) as refused:
        place.launch("true", array=Array(count=10))
    place.target["max_submit"] = 3
    job = place.launch("true", array=Array(count=9))

    assert "max_submit" in str(refused.value.hint)
    assert dict(job.wait(timeout=PATIENCE_S).counts) == {JobState.SUCCEEDED: 9}


def test_bundle_runs_where_it_was_copied_to_and_submitted_twice_is_one_job(place: Place) -> None:
    spec = JobSpec(command=("sh", "main.sh", "{x}"), array=Array(params={"x": (1, 2)}), image="/images/a.sif")
    (place.tree / "main.sh").write_text('echo from the bundle $1; touch "$RUNTIME_OUTPUT_DIR/out"\n')
    # A stand-in for the container program: it checks the bind mounts, and runs the words after the image.
    container = place.folder / "apptainer"
    container.write_text(
        '#!/bin/sh\nwhile [ "$1" != /images/a.sif ]; do [ "$1" = --bind ] && { ls -d "$2" >/dev/null || exit 9; }; shift; done\n'
        'shift; exec "$@"\n'
    )
    container.chmod(0o755)
    place.target["container"] = str(container)
    target = find_target("hpc", place.settings)
    prepared = prepare(spec, target, place.settings, LaunchOptions(base=place.tree))
    assert prepared.snapshot is not None
    export_bundle(prepared.plan, place.folder / "bundle", prepared.snapshot.archive)
    moved = (place.folder / "bundle").rename(place.folder / "copied here")

    both = [
        subprocess.run([str(moved / "submit.sh")], capture_output=True, text=True, check=True).stdout for _ in range(2)
    ]
    done = moved / "records" / "done"
    assert wait_until(lambda: done.exists() and len(list(done.iterdir())) == 2)

    assert both[0] == both[1] == f"{place.slurm.jobs(prepared.plan.job.id)[0]}\n"
    logs = sorted(moved.glob("records/jobs/*/runs/*/a0001/rank0.log"))
    assert [log.read_text() for log in logs] == ["from the bundle 1\n", "from the bundle 2\n"]
    assert len(list(moved.glob("records/jobs/*/runs/*/output/a0001/out"))) == 2


def test_rehearsed_time_out_after_a_checkpoint_is_tried_again_and_spends_nothing(place: Place) -> None:
    script = (
        "[ $RUNTIME_ATTEMPT = 1 ] || exit 0; trap 'touch $RUNTIME_CHECKPOINT_DIR/c' USR1; "
        "touch $RUNTIME_OUTPUT_DIR/up; while :; do sleep 0.1; done"
    )
    job = place.launch(
        script,
        array=Array(count=4, pack=2),
        time_limit=timedelta(minutes=20),
        grace_period=timedelta(seconds=1),
        checkpoint=Checkpoint(lead=timedelta(seconds=10)),
    )
    runs = place.folder / "records" / "jobs" / job.id / "runs"
    assert wait_until(lambda: len(list(runs.glob("*/output/a0001/up"))) == 4)

    for index in (0, 2):
        SlurmLauncher().interrupt(job.target, job.entry().natives[0].native_id, index, "timeout", job.host)

    assert dict(job.wait(timeout=PATIENCE_S).counts) == {JobState.SUCCEEDED: 4}
    assert [ends(place, job, index) for index in range(4)] == [["checkpointed", "-"]] * 4


# over ssh, and without accounting


def test_job_over_ssh_runs_with_the_login_nodes_slurm(
    place: Place, ssh_server: SshServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_CONF")
    ssh_server.set_session('exec sh -c "$SSH_ORIGINAL_COMMAND"', banner="welcome to the cluster\n")
    place.target |= {
        "host": ssh_server.host,
        "options": ssh_server.options,
        "slurm_conf": str(place.slurm.conf),
    }
    (place.tree / "main.sh").write_text("echo from the tree\n")

    with place.launch("sh main.sh; exit $((2 - RUNTIME_ATTEMPT))", retry=Retry(failure=1, backoff=SOON)) as job:
        status = job.wait(timeout=PATIENCE_S)

        assert status.state is JobState.SUCCEEDED
        assert printed(job) == "from the tree\n" * 2
        assert job.attempts() == [1, 2]


@pytest.fixture(scope="module")
def forgetful() -> Iterator[Slurm]:
    missing = slurm_support.find_missing()
    require(missing or "Slurm", not missing, slurm_support.INSTALL)
    running = Slurm(accounting=False, MinJobAge=2).start()
    yield running
    running.stop()


def test_job_that_slurm_forgot_is_known_by_its_result_and_one_without_is_lost(
    forgetful: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", str(forgetful.conf))
    place = Place(forgetful, tmp_path)
    good = place.launch("exit 0")
    retried = place.launch("exit $((2 - RUNTIME_ATTEMPT))", retry=Retry(failure=1, backoff=SOON))
    broken = place.launch(f"echo runs; {FOREVER}")
    # Not before: a shim that cannot begin its attempt ends with a result that Slurm shows.
    assert wait_until(lambda: printed(broken) == "runs\n")
    # The record root refuses further writes, as if full: the job ends without a result.
    owners = place.folder / "records" / "jobs" / broken.id / "runs"
    owners.rename(owners.with_name("moved"))
    forgetful.run("scancel", "--signal=KILL", "--full", forgetful.jobs(broken.id)[0])
    assert retried.wait(timeout=PATIENCE_S).state is JobState.SUCCEEDED

    assert wait_until(
        lambda: not forgetful.run("squeue", "-h", "-t", "all", "-o", "%F"), timeout_s=PATIENCE_S, every_s=1
    )

    assert [good.status().reason, retried.status().reason, broken.status().reason] == [
        EndReason.SUCCEEDED,
        EndReason.SUCCEEDED,
        EndReason.LOST,
    ]


class TestSuite(LauncherSuite):
    """The promises of every launcher."""

    @pytest.fixture
    def case(self, place: Place) -> LauncherCase:
        return LauncherCase(kind="slurm", records=str(place.folder / "records"), patience_s=PATIENCE_S)
