"""Jobs on a real Ray head with a second node, both on this machine. The launchers' suite is in `test_ray_head_suite`."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from runtime.client.jobs.dev import CommandEnd, DevMachine, open_machine
from runtime.client.jobs.handle import JobHandle
from runtime.client.jobs.prepare import LaunchOptions, LaunchRequest
from runtime.client.jobs.status import read_attempts
from runtime.end_reasons import EndReason
from runtime.errors import NotPossible
from runtime.jobs.ledger import job_folder
from runtime.jobs.spec import (
    Array,
    Backoff,
    EnvironmentManager,
    JobEnvironment,
    JobResources,
    JobSpec,
    JobState,
    Retry,
    SecretRef,
    Tpu,
)
from runtime.launchers.ray.client import WATCH_S
from runtime.snapshots.snapshot import make_snapshot
from runtime.testing.launcher_bench import Bench, LauncherCase, read_log
from runtime.testing.metadata import MetadataServer
from tests.fakes.google import GoogleServer
from tests.services.ray_cluster import HEAD_CPUS, NODE_CPUS, RayCluster
from tests.services_support import MotoServer, wait_until
from tests.shim_support import is_running, signal_all

pytest.register_assert_rewrite("runtime.testing.launchers")
from runtime.testing.launchers import LauncherSuite  # noqa: E402  its assertions are rewritten first

pytestmark = pytest.mark.service

AGAIN = Retry(failure=1, backoff=Backoff(min=timedelta(seconds=0.1), max=timedelta(seconds=0.2)))
BIG = JobResources(cpus=HEAD_CPUS + 1)
"""What only the second node has room for."""


@pytest.fixture
def ray_cluster(shared_ray: RayCluster) -> RayCluster:
    return shared_ray


@pytest.fixture
def case(ray_cluster: RayCluster, tmp_path: Path) -> LauncherCase:
    return LauncherCase(
        kind="ray",
        settings={"address": ray_cluster.address, "python": sys.executable},
        records=str(tmp_path / "records"),
        patience_s=400,
        break_job=kill_processes,
        tell=ray_cluster.tell,
    )


@pytest.fixture
def bench(case: LauncherCase, tmp_path: Path) -> Iterator[Bench]:
    made = Bench(case, tmp_path / "bench")
    yield made
    made.close()


def kill_processes(job: JobHandle) -> None:
    """Kill driver, guards and shims of a job, as they go with their machines."""

    def kill_all() -> bool:
        pids = list(find_processes(job))
        signal_all(pids)
        return not pids

    assert wait_until(kill_all)


def find_processes(job: JobHandle) -> dict[int, list[bytes]]:
    """Pid → words of each driver, guard and shim of a job."""
    # Another run of these tests on this machine has jobs of the same ids.
    root, needle = job.files.root.encode(), job.id.encode()
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and int(folder.name) != os.getpid():
            try:
                words = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if needle in words and root in words and b"runtime" in words:
                found[int(folder.name)] = words.split(b"\0")
    return found


@pytest.mark.nightly
class TestRayOfAStack:
    """The nodes of a stack's cluster are machines that Google may take away."""

    @pytest.fixture
    def case(self, case: LauncherCase, machine: MetadataServer) -> LauncherCase:
        return replace(case, settings={**case.settings, "stack": "s", "cluster": "main"}, metadata=machine)

    @pytest.fixture
    def bench(self, bench: Bench, tmp_path: Path) -> Bench:
        head = {"head": "head", "cluster_name": "c", "zone": "z", "internal_ip": "10.0.0.2", "image": "image"}
        cluster = {**head, "worker_identity": "w@x", "config_sha256": "0", "ports": {}}
        contract = tmp_path / "contract.json"
        contract.write_text(json.dumps({"schema": 1, "stack": "s", "project": "p", "clusters": {"main": cluster}}))
        bench.settings = replace(bench.settings, outputs=str(contract))
        return bench

    test_notice = LauncherSuite.test_notice_of_the_cloud_asks_the_command_to_end_and_the_attempt_is_preempted


@pytest.mark.nightly
class TestRayInABucket:
    """The tests of the suite that do something else where the record root is a bucket."""

    @pytest.fixture
    def case(self, case: LauncherCase, moto_server: MotoServer) -> LauncherCase:
        return put_in_bucket(case, moto_server)

    test_log_and_outputs_come_home = LauncherSuite.test_job_runs_the_tree_and_its_log_and_outputs_come_home
    test_way_is_given = LauncherSuite.test_command_that_gives_way_to_a_notice_is_started_again_as_preempted
    test_array = LauncherSuite.test_array_has_a_result_and_a_log_for_each_index
    test_several_nodes = LauncherSuite.test_ranks_of_several_nodes_reach_each_other_and_end_together
    test_rank_that_fails = LauncherSuite.test_rank_that_fails_on_another_node_ends_the_job_with_its_code
    test_cancel = LauncherSuite.test_cancel_ends_the_job_and_says_that_nothing_is_left
    test_launches_at_once = LauncherSuite.test_launches_at_once_are_one_job
    test_take_up = LauncherSuite.test_array_that_is_gone_is_taken_up_where_it_was
    test_folder_that_is_gone = LauncherSuite.test_job_that_runs_and_whose_folder_is_gone_is_found_by_its_name
    test_another_root = LauncherSuite.test_record_root_that_was_used_and_is_another_one_now_is_no_answer
    test_one_plan_twice = LauncherSuite.test_carry_out_of_one_plan_twice_is_one_job

    def test_job_whose_record_was_removed_runs_again(self, ray_cluster: RayCluster, bench: Bench) -> None:
        for _ in range(2):
            job = bench.start("true")
            assert bench.end(job).state is JobState.SUCCEEDED
            assert (job.new, job.attempts()) == (True, [1])
            name = job.entry().natives[0].native_id
            assert wait_until(lambda name=name: ray_cluster.read(f"/api/jobs/{name}")["status"] == "SUCCEEDED")
            job.files.remove(f"jobs/{job.id}")
            for each in job.files.names("done"):
                job.files.remove(f"done/{each}")


def put_in_bucket(case: LauncherCase, server: MotoServer, **settings: str) -> LauncherCase:
    """The case with an empty bucket as its record root."""
    import boto3

    boto3.client("s3", endpoint_url=server.url, region_name="us-east-1").create_bucket(Bucket="lab")
    return replace(case, records=f"s3://lab/{uuid.uuid4().hex}", settings={**case.settings, **settings})


def test_environment_of_a_lock_file_is_made_once_where_all_nodes_see_it(bench: Bench) -> None:
    (bench.tree / "environment.yml").write_text("dependencies: []\n")

    job = bench.start("tool", nodes=2, environment=JobEnvironment(manager=EnvironmentManager.CONDA))

    assert bench.end(job).state is JobState.SUCCEEDED
    (link,) = [each for each in Path(job.files.root, "environments").iterdir() if each.is_symlink()]
    assert [read_log(job, rank=rank) for rank in (0, 1)] == [f"{link.resolve()}/bin/tool\n"] * 2


def test_environment_of_a_job_in_a_bucket_is_kept_on_the_node(
    case: LauncherCase, moto_server: MotoServer, tmp_path: Path
) -> None:
    bench = Bench(put_in_bucket(case, moto_server), tmp_path / "bench")
    # The node keeps it beyond the test.
    (bench.tree / "environment.yml").write_text(f"dependencies: []  # {uuid.uuid4()}\n")

    job = bench.start("tool", environment=JobEnvironment(manager=EnvironmentManager.CONDA))

    assert bench.end(job).state is JobState.SUCCEEDED
    tool = Path(read_log(job).strip())
    assert tool.parts[:3] == ("/", "tmp", f"runtime-environments-{os.geteuid()}")
    shutil.rmtree(tool.parents[1])
    bench.close()


# nodes that go


def test_run_whose_node_is_killed_goes_on_where_there_is_room(ray_cluster: RayCluster, bench: Bench) -> None:
    job = bench.start("sh", "-c", "echo attempt $RUNTIME_ATTEMPT; [ $RUNTIME_ATTEMPT = 2 ] || sleep 600", resources=BIG)
    assert wait_until(lambda: read_log(job) == "attempt 1\n")

    ray_cluster.kill(1)
    ray_cluster.start_node(1, NODE_CPUS)

    assert bench.end(job).state is JobState.SUCCEEDED
    assert (read_log(job), job.attempts()) == ("attempt 1\nattempt 2\n", [1, 2])
    assert [each.reason for each in read_attempts(job.files, job.id, 0)] == [EndReason.NODE_FAILED, EndReason.SUCCEEDED]
    assert [each.native_id for each in job.entry().natives] == [f"{job.id}-e1-p0-{job.entry().natives[0].name[-6:]}"]


def test_run_of_two_nodes_goes_on_together_after_one_was_killed(ray_cluster: RayCluster, bench: Bench) -> None:
    command = "echo $RUNTIME_NODE_RANK in attempt $RUNTIME_ATTEMPT; [ $RUNTIME_ATTEMPT = 2 ] || sleep 600"
    job = bench.start("sh", "-c", command, nodes=2, grace_period=timedelta(seconds=2))
    assert wait_until(lambda: [read_log(job, rank=rank) for rank in (0, 1)] == ["0 in attempt 1\n", "1 in attempt 1\n"])

    ray_cluster.kill(1)
    ray_cluster.start_node(1, NODE_CPUS)

    assert bench.end(job).state is JobState.SUCCEEDED
    assert job.attempts() == [1, 2]
    assert read_log(job, rank=1, attempt=2) == "1 in attempt 2\n"


def test_job_of_a_head_that_was_killed_is_taken_up_once(ray_cluster: RayCluster, bench: Bench) -> None:
    command = ("sh", "-c", "echo attempt $RUNTIME_ATTEMPT; [ $RUNTIME_ATTEMPT = 2 ] || sleep 600")
    job = bench.start(*command)
    assert wait_until(lambda: read_log(job) == "attempt 1\n")

    for number in (1, 0):
        ray_cluster.kill(number)
    ray_cluster.start_head(HEAD_CPUS)
    ray_cluster.start_node(1, NODE_CPUS)
    gone = bench.end(job)
    again = [bench.start(*command) for _ in range(2)]

    assert (gone.state, gone.reason) == (JobState.FAILED, EndReason.LOST)
    assert [(each.id, each.new) for each in again] == [(job.id, False)] * 2
    for _ in range(2):
        if bench.end(job).state is JobState.FAILED:
            # A head that has just begun may fail to start a driver. That is no attempt, and the same launch goes on.
            assert (job.attempts(), bench.end(job).reason) == ([1], EndReason.LOST), ray_cluster.read("/api/jobs/")
            bench.start(*command)
    assert bench.end(job).state is JobState.SUCCEEDED, ray_cluster.read("/api/jobs/")
    assert read_log(job) == "attempt 1\nattempt 2\n"
    epochs = [each.epoch for each in job.entry().natives]
    assert epochs == list(range(1, len(epochs) + 1))


def test_shim_that_was_cut_off_while_its_job_was_taken_up_ends_itself_and_decides_nothing(
    bench: Bench, tmp_path: Path
) -> None:
    script = f"echo attempt $RUNTIME_ATTEMPT; while ! [ -e {tmp_path}/go$RUNTIME_ATTEMPT ]; do sleep 0.1; done"
    job = bench.start("sh", "-c", script)
    bench.wait_for(lambda: read_log(job) == "attempt 1\n")
    found = find_processes(job)
    shims = [pid for pid, words in found.items() if words[1].endswith(b"/shim.py")]
    signal_all(shims, signal.SIGSTOP)
    signal_all(found.keys() - set(shims))  # the driver, and the guard, which would end its shim in time
    gone = bench.end(job)
    again = bench.start("sh", "-c", script)
    bench.wait_for(lambda: read_log(again) == "attempt 1\nattempt 2\n")

    signal_all(shims, signal.SIGCONT)
    bench.wait_for(lambda: not any(map(is_running, shims)))
    assert again.entry().outcomes == {}
    (tmp_path / "go1").touch()
    (tmp_path / "go2").touch()

    assert (gone.state, gone.reason, len(shims)) == (JobState.FAILED, EndReason.LOST, 1)
    assert bench.end(again).state is JobState.SUCCEEDED
    assert [each.reason for each in read_attempts(job.files, job.id, 0)] == ["stopped", EndReason.SUCCEEDED]
    assert b"taken up elsewhere" in (job.files.read(f"{job_folder(job.id)}/shim.log") or b"")


# arrays and fleets


@pytest.mark.nightly
def test_array_grows_with_the_cluster_and_a_lost_run_waits_again_without_a_failure(
    ray_cluster: RayCluster, bench: Bench, tmp_path: Path
) -> None:
    command = ("sh", "-c", f"until [ -e {tmp_path}/over ]; do sleep 0.2; done")
    array, retry = Array(count=2, max_parallel=2), Retry(failure=0)
    job = bench.start(*command, array=array, retry=retry, resources=BIG)

    def standing() -> list[JobState]:
        return sorted(each.state for each in job.look()[0].indices)

    # Only the second node has room for one of them.
    assert wait_until(lambda: standing() == [JobState.PENDING, JobState.RUNNING])
    ray_cluster.start_node(2, NODE_CPUS)
    assert wait_until(lambda: standing() == [JobState.RUNNING] * 2)
    ray_cluster.kill(2)
    assert wait_until(lambda: standing() == [JobState.PENDING, JobState.RUNNING])
    ray_cluster.start_node(2, NODE_CPUS)
    assert wait_until(lambda: standing() == [JobState.RUNNING] * 2)
    (tmp_path / "over").touch()

    assert bench.end(job).state is JobState.SUCCEEDED
    reasons = [[each.reason for each in read_attempts(job.files, job.id, index)] for index in range(2)]
    assert sorted(reasons) == [[EndReason.NODE_FAILED, EndReason.SUCCEEDED], [EndReason.SUCCEEDED]]
    ray_cluster.kill(2)


# what the head knows


def test_secret_is_in_no_answer_of_the_head(
    ray_cluster: RayCluster, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CANARY", "canary-4711")
    job = bench.start("sh", "-c", "echo ${#TOKEN}; sleep 5", secrets=(SecretRef(name="TOKEN", source="env://CANARY"),))
    assert wait_until(lambda: read_log(job) == "11\n")

    said = read_answers(ray_cluster, job)

    assert [path for path, answer in said.items() if "canary-4711" in answer] == []
    assert bench.end(job).state is JobState.SUCCEEDED


def read_answers(ray_cluster: RayCluster, job: JobHandle) -> dict[str, str]:
    """What the head answers about its jobs, actors, tasks and nodes, of which none is missing."""
    name = job.entry().natives[0].native_id
    paths = ["/api/jobs/", f"/api/jobs/{name}", f"/api/jobs/{name}/logs", "/logical/actors", "/nodes?view=summary"]
    paths += [f"/api/v0/{kind}?detail=1" for kind in ("actors", "tasks", "workers")] + ["/api/v0/runtime_envs"]
    said: dict[str, str] = {}

    def ask() -> bool:
        """Ask for what a head under load has not answered in time yet."""
        for path in paths:
            if (answer := None if path in said else ray_cluster.read(path)) is not None:
                said[path] = json.dumps(answer)
        return len(said) == len(paths)

    assert wait_until(ask), sorted(set(paths) - set(said))
    assert name in said["/api/jobs/"]
    return said


def test_cancel_waits_for_the_command_s_own_end_and_the_head_knows_the_job_as_ended(
    ray_cluster: RayCluster, bench: Bench
) -> None:
    handler = "trap 'sleep 10; echo put away; exit 0' TERM; echo ready; while :; do sleep 0.1; done"
    job = bench.start("sh", "-c", handler)
    assert wait_until(lambda: read_log(job) == "ready\n")
    name = job.entry().natives[0].native_id

    left = job.cancel()

    assert (left, read_log(job).splitlines()[-1]) == ([], "put away")
    assert bench.end(job).state is JobState.CANCELLED
    # An entry that is deleted while the head looks at its actor comes back within this time, without its metadata.
    time.sleep(WATCH_S)
    known = ray_cluster.read(f"/api/jobs/{name.partition('+')[0]}")
    assert (known["status"] in ("SUCCEEDED", "FAILED"), known["metadata"]["job"]) == (True, job.id)


WAITS = (
    JobState.PENDING,
    f"for 100 CPU: no node that is there could hold it: it asks for 100 CPU, and the largest offers {NODE_CPUS} CPU",
    ("each node asks for 100 CPU",),
)


def explain(job: JobHandle) -> tuple[JobState, str, tuple[str, ...]]:
    """A job's state, and what the launcher says about its last native state, without the time that it has waited."""
    (status, states) = job.look()
    said = job.launcher.explain(job.target, states[-1], job.host) if states else None
    if said is None:
        return status.state, "", ()
    return status.state, re.sub("^it has waited [0-9a-z.]+ ", "", said.sentence), said.evidence


def test_run_that_fits_nowhere_is_pending_says_what_it_asks_for_and_is_cancelled(bench: Bench) -> None:
    job = bench.start("true", resources=JobResources(cpus=100))
    assert wait_until(lambda: explain(job) == WAITS)

    assert job.cancel() == []
    assert (bench.end(job).state, job.attempts()) == (JobState.CANCELLED, [])


def test_python_that_the_head_does_not_have_is_setup_failed(case: LauncherCase, tmp_path: Path) -> None:
    broken = LauncherCase(
        kind="ray", settings={**case.settings, "python": "/no/python"}, records=case.records, patience_s=case.patience_s
    )
    bench = Bench(broken, tmp_path / "broken")
    try:
        job = bench.start("true")
        status = bench.end(job)
        assert (status.state, status.reason) == (JobState.FAILED, EndReason.SETUP_FAILED)
    finally:
        bench.close()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU cannot be shared out")
def test_command_is_kept_to_the_cpus_that_its_job_names(bench: Bench) -> None:
    job = bench.start("nproc", resources=JobResources(cpus=1))

    assert bench.end(job).state is JobState.SUCCEEDED
    assert read_log(job) == "1\n"


# TPUs


def test_run_on_a_tpu_of_one_host_is_placed_where_it_is(ray_cluster: RayCluster, bench: Bench) -> None:
    ray_cluster.start_node(2, 1, **{"TPU": 4, "TPU-v4-8-head": 1, "one-host": 1})

    job = bench.start("true", resources=JobResources(tpu=Tpu(type="v4-8")))

    assert bench.end(job).state is JobState.SUCCEEDED
    ray_cluster.kill(2)


def test_development_machine_holds_its_tpu_between_commands_and_gives_it_back(
    ray_cluster: RayCluster, bench: Bench
) -> None:
    ray_cluster.start_node(2, 1, **{"TPU": 4, "TPU-v4-8-head": 1, "one-host": 1})
    tpu = JobResources(tpu=Tpu(type="v4-8"))
    (bench.tree / "text").write_text("first\n")
    machine = open_held(bench, JobSpec(command=("cat", "text"), resources=tpu))
    ends: list[CommandEnd] = []

    def has_ended(tree: int) -> bool:
        ends.extend(machine.read(lambda log, attempt, tree: None, lambda host: None))
        return bool(ends) and ends[-1].tree == tree

    bench.wait_for(lambda: has_ended(0))
    other = bench.start("true", resources=tpu)
    bench.wait_for(lambda: explain(other)[2] == ("each node asks for 1 CPU, 4 chips of a TPU v4-8",))
    (bench.tree / "text").write_text("second\n")
    assert machine.send(make_snapshot(bench.tree))
    bench.wait_for(lambda: has_ended(1))
    assert other.attempts() == []
    assert machine.give_back() == []

    assert [bench.end(each).state for each in (machine.job, other)] == [JobState.SUCCEEDED] * 2
    assert [(each.reason, each.exit_code) for each in ends] == [("succeeded", 0)] * 2
    assert read_log(machine.job) == "first\nsecond\n"
    ray_cluster.kill(2)


def test_development_machine_that_has_not_begun_is_cancelled_when_it_is_given_back(bench: Bench) -> None:
    machine = open_held(bench, JobSpec(command=("true",), resources=JobResources(cpus=100)))
    assert wait_until(lambda: machine.job.state() is JobState.PENDING)
    assert machine.give_back() == []
    assert bench.end(machine.job).state is JobState.CANCELLED


@pytest.mark.usefixtures("ray_cluster")
def test_development_machine_of_several_hosts_is_refused(bench: Bench) -> None:
    with pytest.raises(NotPossible, match="this job takes 2 nodes"):
        open_held(bench, JobSpec(command=("true",), resources=JobResources(tpu=Tpu(type="v4-16"))))


def open_held(bench: Bench, spec: JobSpec) -> DevMachine:
    options = LaunchOptions(base=bench.tree)
    machine, _ = open_machine(LaunchRequest(spec), bench.target, bench.settings, options)
    bench.keep(machine.job)
    return machine


def test_run_on_a_slice_of_two_hosts_is_one_run_of_two_nodes(ray_cluster: RayCluster, bench: Bench) -> None:
    ray_cluster.start_node(2, 1, **{"TPU": 4, "TPU-v4-16-head": 1, "slice-a": 1})
    # Another slice of the type, which has one host too few.
    ray_cluster.start_node(3, 1, **{"TPU": 4, "slice-b": 1})
    job = bench.start(
        "sh", "-c", "echo $RUNTIME_NODE_RANK of $RUNTIME_NUM_NODES", resources=JobResources(tpu=Tpu(type="v4-16"))
    )
    assert wait_until(lambda: explain(job)[2] == ("each node asks for 1 CPU, 4 chips of a TPU v4-16",))

    ray_cluster.start_node(4, 1, **{"TPU": 4, "slice-a": 1})

    assert bench.end(job).state is JobState.SUCCEEDED
    assert [read_log(job, rank=rank) for rank in (0, 1)] == ["0 of 2\n", "1 of 2\n"]
    for number in (2, 3, 4):
        ray_cluster.kill(number)


def test_nodes_of_a_run_on_a_slice_are_its_hosts_in_the_order_of_ray_s_labels(
    ray_cluster: RayCluster, bench: Bench
) -> None:
    """As on Google's TPU machines, where no variable has the number of a host."""
    hosts = {2: 3, 3: 1, 4: 2, 5: 0}
    for number, host in hosts.items():
        resources = {"TPU": 4, "slice-a": 1, **({} if host else {"TPU-v4-32-head": 1})}
        ray_cluster.start_node(number, 1, labels={"ray.io/tpu-worker-id": str(host)}, **resources)

    job = bench.start("true", resources=JobResources(tpu=Tpu(type="v4-32")))

    assert bench.end(job).state is JobState.SUCCEEDED
    met = json.loads(job.files.read(f"jobs/{job.id}/runs/0/a0001/go") or b"{}")
    assert met["addresses"] == [f"127.0.0.{number + 1}" for number in (5, 3, 4, 2)]
    for number in hosts:
        ray_cluster.kill(number)


def test_run_on_two_slices_waits_for_both_and_goes_on_together_after_a_host_was_lost(
    ray_cluster: RayCluster, bench: Bench
) -> None:
    for number, resources in ((2, {"TPU-v4-16-head": 1, "slice-a": 1}), (3, {"slice-a": 1}), (4, {"slice-b": 1})):
        ray_cluster.start_node(number, 1, **{"TPU": 4, **resources})
    command = "echo $RUNTIME_NODE_RANK in slice $MEGASCALE_SLICE_ID of $MEGASCALE_NUM_SLICES at "
    command += "$MEGASCALE_COORDINATOR_ADDRESS; [ $RUNTIME_ATTEMPT = 2 ] || sleep 600"
    job = bench.start(
        "sh",
        "-c",
        command,
        resources=JobResources(tpu=Tpu(type="v4-16", slices=2)),
        grace_period=timedelta(seconds=2),
    )
    asked = ("each node asks for 1 CPU, 4 chips of a TPU v4-16, in 2 slices at once",)
    assert wait_until(lambda: explain(job)[2] == asked), f"{explain(job)}\n{ray_cluster.tell()}"
    ray_cluster.start_node(5, 1, **{"TPU": 4, "TPU-v4-16-head": 1, "slice-b": 1})
    assert wait_until(lambda: all(read_log(job, rank=rank) for rank in range(4))), ray_cluster.tell()

    ray_cluster.kill(3)
    ray_cluster.start_node(3, 1, **{"TPU": 4, "slice-a": 1})

    assert bench.end(job).state is JobState.SUCCEEDED
    assert job.attempts() == [1, 2]
    said = [read_log(job, rank=rank, attempt=2).split(" at ") for rank in range(4)]
    assert [words for words, _ in said] == [f"{rank} in slice {rank // 2} of 2" for rank in range(4)]
    assert len({address for _, address in said}) == 1
    for number in (2, 3, 4, 5):
        ray_cluster.kill(number)


# in a bucket


def test_job_in_a_bucket_goes_on_after_its_node_was_killed(
    ray_cluster: RayCluster, case: LauncherCase, moto_server: MotoServer, tmp_path: Path
) -> None:
    bench = Bench(put_in_bucket(case, moto_server), tmp_path / "bucket")
    try:
        command = "echo $RUNTIME_ATTEMPT | tee $RUNTIME_OUTPUT_DIR/n; [ $RUNTIME_ATTEMPT = 2 ] || sleep 600"
        job = bench.start("sh", "-c", command, resources=BIG)
        assert wait_until(lambda: read_log(job) == "1\n")

        ray_cluster.kill(1)
        ray_cluster.start_node(1, NODE_CPUS)

        assert bench.end(job).state is JobState.SUCCEEDED
        assert [path.read_text() for path in job.fetch(tmp_path / "home")] == ["2\n"]
    finally:
        bench.close()


def test_secret_that_a_node_reads_is_in_no_object_answer_log_or_list_of_processes(
    ray_cluster: RayCluster, google: GoogleServer, case: LauncherCase, moto_server: MotoServer, tmp_path: Path
) -> None:
    resource = google.put_secret("hf-token", b"canary-4711")
    contract = {"schema": 1, "stack": "lab", "secrets": {"hf-token": {"env": "HF_TOKEN", "resource": resource}}}
    (tmp_path / "contract.json").write_text(json.dumps(contract))
    bench = Bench(put_in_bucket(case, moto_server, stack="lab"), tmp_path / "bucket")
    bench.settings = replace(bench.settings, outputs=str(tmp_path / "contract.json"))
    try:
        command = "echo $RUNTIME_NODE_RANK ${#HF_TOKEN}; [ $RUNTIME_ATTEMPT = 2 ] || { sleep 8; exit 1; }"
        secret = SecretRef(name="HF_TOKEN", source="secret-manager://hf-token")
        job = bench.start("sh", "-c", command, nodes=2, secrets=(secret,), retry=AGAIN)
        assert wait_until(lambda: [read_log(job, rank=rank) for rank in (0, 1)] == ["0 11\n", "1 11\n"])
        google.put_secret("hf-token", b"canary-4711", b"canary-47-12")

        answers = read_answers(ray_cluster, job)
        words = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")]
        status = bench.end(job)

        assert status.state is JobState.SUCCEEDED
        assert [read_log(job, rank=rank, attempt=2) for rank in (0, 1)] == ["0 12\n", "1 12\n"]
        assert [path for path, answer in answers.items() if "canary" in answer] == []
        assert [each for each in words if b"canary" in each] == []
        files = bench.open_host().files
        names = [name for name, _ in files.tree("")]
        assert [name for name, content in files.read_many(names).items() if b"canary" in content] == []
        assert f"jobs/{job.id}/order.json" in names
    finally:
        bench.close()
