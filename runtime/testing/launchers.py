"""The promises of every launcher, as a suite that any package can run on its own: docs/adding-a-launcher.md.

    class TestMyLauncher(LauncherSuite):
        @pytest.fixture
        def case(self, tmp_path): return LauncherCase(kind="mine", records=str(tmp_path / "records"))

Tests of what a launcher refuses are skipped with its own reason. Needs pytest; nothing else of the package imports it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import pytest

from runtime.client.jobs.artifacts import list_artifacts
from runtime.client.jobs.launch import carry_out
from runtime.client.jobs.prepare import FieldsRefused, LaunchOptions, prepare
from runtime.client.jobs.status import read_attempts
from runtime.client.jobs.targets import RootLost
from runtime.end_reasons import EndReason
from runtime.jobs import ledger
from runtime.jobs.call import FunctionCall
from runtime.jobs.hosts.agent import MARKER
from runtime.jobs.hosts.bucket import is_bucket
from runtime.jobs.plan import Fidelity, FieldSupport, LaunchPlan
from runtime.jobs.secret_schemes import COMMON_SCHEMES, SchemeRefused, SecretReader, SecretScheme
from runtime.jobs.spec import Array, Backoff, Code, CodeMode, JobEnvironment, JobSpec, JobState, Retry, SecretRef
from runtime.jobs.spec_fields import leaf_fields, set_fields
from runtime.testing.launcher_bench import Bench, LauncherCase, read_log

pytest.register_assert_rewrite("runtime.testing.launcher_protocols")
from runtime.testing.launcher_protocols import ProtocolSuite  # noqa: E402  its assertions are rewritten first

LAUNCH_FAULTS: Final = ("unlocked", "locked", "written", "submitted", "launched")
"""Steps of a launch at which RUNTIME_FAULTS kills it."""
TAKE_UP_FAULTS: Final = ("unlocked", "reordered", "resubmitted")

CONTRACT: Final = frozenset(
    {
        "RUNTIME_JOB_ID",
        "RUNTIME_EXPERIMENT",
        "RUNTIME_ORIGIN",
        "RUNTIME_ATTEMPT",
        "RUNTIME_RESTARTS",
        "RUNTIME_RANK",
        "RUNTIME_WORLD_SIZE",
        "RUNTIME_LOCAL_RANK",
        "RUNTIME_NODE_RANK",
        "RUNTIME_NUM_NODES",
        "RUNTIME_ARRAY_INDEX",
        "RUNTIME_MASTER_ADDR",
        "RUNTIME_CHECKPOINT_DIR",
        "RUNTIME_OUTPUT_DIR",
        "RUNTIME_METRICS",
        "RUNTIME_PREEMPTED_NOTE",
        "RUNTIME_SNAPSHOT_ID",
        "PYTHONUNBUFFERED",
    }
)
"""Variables that every command sees on every backend; RUNTIME_DEADLINE comes with a time limit."""


def check_keeps(keeps: Mapping[str, FieldSupport]) -> list[str]:
    """The faults of a launcher's table, in words: every field of a spec is in exactly one class, with a reason."""
    wrong = [f"`{name}` is not in the table" for name in leaf_fields() if name not in keeps]
    wrong += [f"`{name}` is no field of a spec" for name in keeps if name not in leaf_fields()]
    for name, support in keeps.items():
        if support.fidelity not in list(Fidelity):
            wrong.append(f"`{name}` has the class {support.fidelity!r}")
        if not support.how.strip():
            wrong.append(f"`{name}` does not say how it is kept, or why not")
    return wrong


def check_schemes(schemes: Mapping[str, SecretScheme]) -> list[str]:
    """The faults of a launcher's table of secret schemes, in words."""
    wrong = [f"`{name}` does not say how a value travels" for name, each in schemes.items() if not each.how.strip()]
    wrong += [f"`{name}` can be in no source" for name in schemes if not re.fullmatch(r"[a-z][a-z0-9+.-]*", name)]
    wrong += [
        f"`{name}` has the reader {each.reader!r}"
        for name, each in schemes.items()
        if each.reader not in list(SecretReader)
    ]
    read = [name for name, each in schemes.items() if each.reader is SecretReader.LAUNCH]
    return wrong + [
        f"`{name}` is read at launch, which knows no such source" for name in read if name not in COMMON_SCHEMES
    ]


def check_plan(plan: LaunchPlan) -> list[str]:
    """The faults of a plan, in words."""
    wrong = [
        f"part `{part.name}` submits no artefact of the plan"
        for part in plan.parts
        if part.artefact not in plan.artefacts
    ]
    if len({part.name for part in plan.parts}) != len(plan.parts):
        wrong.append("two parts have one name, and would be taken for one job")
    offset = plan.spec.array.offset if plan.spec.array else 0
    served = [index for part in plan.parts for index in range(part.offset, part.offset + part.count)]
    if sorted(served) != list(range(offset, offset + len(plan.indices))):
        wrong.append(f"the parts serve the indices {served}")
    unsaid = set(set_fields(plan.spec)) - set(plan.fidelity) - {"checkpoint", "array", "retry", "placement.on"}
    wrong += [f"the plan does not say how `{name}` is kept" for name in sorted(unsaid)]
    wrong += [f"the plan keeps `{name}`, which is refused" for name in plan.refused()]
    for name in ("schema", "job", "epoch", "runs", "nodes", "tasks_per_node", "grace_s", "retry", "retries"):
        if name not in plan.order:
            wrong.append(f"the order has no `{name}`")
    try:
        json.dumps(plan.order)
    except TypeError as problem:
        wrong.append(f"the order is no JSON: {problem}")
    return wrong


class PlanSuite:
    """The promises of a launcher's table and plans, for `LauncherSuite`."""

    @pytest.fixture
    def bench(self, case: LauncherCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
        for name, value in case.environ.items():
            monkeypatch.setenv(name, value)
        made = Bench(case, tmp_path / "bench")
        yield made
        made.close()

    def test_keeps_has_every_field_in_exactly_one_class(self, bench: Bench) -> None:
        assert check_keeps(bench.launcher.keeps) == []

    def test_launcher_says_its_own_kind(self, bench: Bench) -> None:
        assert bench.launcher.kind == bench.case.kind

    def test_plan_is_equal_each_time_and_touches_nothing(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        bench.plan("sh", "main.sh")  # imports on first use may read files
        before = _look(bench.folder)

        def refuse(*_: object, **__: object) -> None:
            raise AssertionError("a plan asks nothing of the outside")

        prepared = prepare(
            JobSpec(command=("sh", "main.sh")), bench.target, bench.settings, LaunchOptions(base=bench.tree)
        )
        with monkeypatch.context() as patch:
            patch.setattr(subprocess, "Popen", refuse)
            patch.setattr(socket.socket, "connect", refuse)
            patch.setattr(os, "mkdir", refuse)
            plans = [
                bench.launcher.plan(prepared.plan.spec, bench.target, prepared.plan.job, prepared.context)
                for _ in range(2)
            ]

        assert plans[0] == plans[1] == prepared.plan
        assert _look(bench.folder) == before
        assert check_plan(plans[0]) == []

    def test_plan_of_an_array_serves_each_index_once(self, bench: Bench) -> None:
        bench.require("array.params", "array.offset")

        plan = bench.plan("echo", "{x}", array=Array(params={"x": (1, 2, 3)}, offset=4))

        assert check_plan(plan) == []
        assert [plan.order["runs"][index]["command"] for index in ("4", "5", "6")] == [
            ["echo", "1"],
            ["echo", "2"],
            ["echo", "3"],
        ]

    def test_plan_names_no_secret_value(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        secret = bench.require_secret()
        monkeypatch.setenv("CANARY", "canary-4711")

        plan = bench.plan("true", secrets=(secret,))

        assert "canary-4711" not in json.dumps(plan.order) + "".join(plan.artefacts.values())

    def test_field_that_is_refused_stops_the_launch_and_leaves_nothing(self, bench: Bench) -> None:
        name, changes = _refused_change(bench.launcher.keeps)

        with pytest.raises(FieldsRefused) as refused:
            bench.start("true", **changes)

        assert list(refused.value.refused) == [name]
        assert ledger.list_jobs(bench.open_host().files) == []

    def test_every_scheme_of_secrets_says_how_a_value_travels(self, bench: Bench) -> None:
        assert check_schemes(bench.launcher.secret_schemes) == []

    def test_secret_of_a_scheme_that_is_not_declared_is_refused_and_nothing_is_left(self, bench: Bench) -> None:
        bench.require("secrets")
        known = sorted(bench.launcher.secret_schemes)
        before = _look(bench.folder)

        with pytest.raises(SchemeRefused) as refused:
            bench.start("true", secrets=(SecretRef(name="TOKEN", source="no-such-scheme://canary-4711"),))

        assert (refused.value.scheme, refused.value.known) == ("no-such-scheme", known)
        assert "canary-4711" not in refused.value.render()
        assert _look(bench.folder) == before
        assert ledger.list_jobs(bench.open_host().files) == []


class LauncherSuite(PlanSuite, ProtocolSuite):
    """Derive from it, name the class `Test…`, and give it a fixture `case` that returns a `LauncherCase`."""

    # a job's life

    def test_job_runs_the_tree_and_its_log_and_outputs_come_home(self, bench: Bench, tmp_path: Path) -> None:
        job = bench.start("sh", "-c", "sh main.sh; echo 7 > $RUNTIME_OUTPUT_DIR/n")
        (bench.tree / "main.sh").write_text("echo edited later\n")

        status = bench.end(job)

        assert (status.state, status.reason, job.new) == (JobState.SUCCEEDED, EndReason.SUCCEEDED, True)
        assert read_log(job) == "from the tree\n"
        assert [path.name for path in job.fetch(tmp_path / "home")] == ["n"]
        assert (tmp_path / "home" / "n").read_text() == "7\n"

    def test_command_sees_the_variables_that_every_backend_sets(self, bench: Bench) -> None:
        job = bench.start("env")

        assert bench.end(job).state is JobState.SUCCEEDED
        names = {line.split("=", 1)[0] for line in read_log(job).splitlines() if "=" in line}
        assert {name for name in names if name.startswith("RUNTIME_")} | {"PYTHONUNBUFFERED"} & names == CONTRACT

    def test_function_runs_from_the_tree_and_its_values_come_home(self, bench: Bench) -> None:
        bench.require("call", "array.items")
        (bench.tree / "lab.py").write_text(
            "def divide(n, by):\n    print('n is', n)\n    return [n // by, {'by': by}] if by else 1 / 0\n"
        )

        job = bench.start(call=FunctionCall(function="lab:divide", kwargs={"by": 2}), array=Array(items=(4, 6)))
        failed = bench.start(call=FunctionCall(function="lab:divide", args=(1, 0)), name="failed")

        assert (bench.end(job).state, bench.end(failed).reason) == (JobState.SUCCEEDED, EndReason.APP_FAILED)
        assert job.result() == [[2, {"by": 2}], [3, {"by": 2}]]
        assert read_log(job, index=1) == "n is 6\n"
        problem = failed.exception()
        assert isinstance(problem, ZeroDivisionError)
        assert "in divide\n" in str(problem.__cause__)

    def test_secret_reaches_the_command_and_is_gone_when_the_job_has_ended(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        secret = bench.require_secret()
        monkeypatch.setenv("CANARY", "canary-4711")

        job = bench.start("sh", "-c", "echo ${#TOKEN}", secrets=(secret,))

        assert bench.end(job).state is JobState.SUCCEEDED
        assert read_log(job) == "11\n"
        folder = ledger.job_folder(job.id)
        names = [f"{folder}/{name}" for name, _ in job.files.tree(folder)]
        bench.wait_for(lambda: all(b"canary-4711" not in content for content in job.files.read_many(names).values()))

    def test_job_that_fails_says_so_and_the_same_launch_is_the_same_job(self, bench: Bench) -> None:
        job = bench.start("sh", "-c", "exit 3")
        status = bench.end(job)

        again = bench.start("sh", "-c", "exit 3")

        assert (status.state, status.reason) == (JobState.FAILED, EndReason.APP_FAILED)
        assert job.status(indices=True).indices[0].exit_code == 3
        assert (again.id, again.new, again.attempts()) == (job.id, False, [1])

    def test_line_of_setup_that_fails_is_no_failure_of_the_command(self, bench: Bench) -> None:
        bench.require("environment.setup")

        job = bench.start("echo", "never", environment=JobEnvironment(setup=("cd /no/such/folder",)))
        status = bench.end(job)

        assert (status.state, status.reason) == (JobState.FAILED, EndReason.SETUP_FAILED)
        assert read_attempts(job.files, job.id, 0)[-1].message.startswith("the setup lines ended with exit code ")
        assert "/no/such/folder" in read_log(job)

    def test_failures_are_retried_until_the_budget_is_spent(self, bench: Bench) -> None:
        bench.require("retry.failure")

        job = bench.start("sh", "-c", "exit $((2 - RUNTIME_ATTEMPT))", retry=_once_more(bench))

        assert bench.end(job).state is JobState.SUCCEEDED
        assert job.attempts() == [1, 2]

    def test_command_that_gives_way_to_a_notice_is_started_again_as_preempted(self, bench: Bench) -> None:
        order = bench.plan("true").order
        if order.get("notices") and order["retries"] == "shim":
            pytest.skip("its shim leaves a machine that will be taken away, and nothing starts it elsewhere by itself")
        gives_way = 'echo going > "$RUNTIME_PREEMPTED_NOTE"; exit 75'
        job = bench.start("sh", "-c", f"echo attempt $RUNTIME_ATTEMPT; [ $RUNTIME_ATTEMPT = 2 ] || {{ {gives_way}; }}")

        assert bench.end(job).state is JobState.SUCCEEDED
        assert (read_log(job), job.attempts()) == ("attempt 1\nattempt 2\n", [1, 2])
        assert [each.reason for each in read_attempts(job.files, job.id, 0)] == ["preempted", "succeeded"]

    def test_failure_is_tried_again_after_all_that_launched_and_followed_was_killed(self, bench: Bench) -> None:
        bench.require("retry.failure")
        pause = {"backoff": {"min": "1s", "max": "1s"}} if bench.keeps("retry.backoff.min") else {}
        # The first attempt fails on request, after the last process that could ask for another is killed.
        waits = "until [ -e $RUNTIME_CHECKPOINT_DIR/fail ]; do sleep 0.2; done; exit 1"
        if is_bucket(bench.case.records):
            waits = "sleep 30; exit 1"  # a running command does not see new objects of the bucket
        command = f"echo attempt $RUNTIME_ATTEMPT; [ $RUNTIME_ATTEMPT = 2 ] || {{ {waits}; }}"
        spec = {"command": ["sh", "-c", command], "retry": {"failure": 1, **pause}}
        with bench.launch_elsewhere(spec, follow=True) as follower:
            said = follower.stdout.readline().split() if follower.stdout else []
            assert said, follower.communicate()[1]
            job = bench.find(said[0])
            bench.wait_for(lambda: job.attempts() == [1])
            still_follows = follower.poll() is None
            os.killpg(follower.pid, signal.SIGKILL)

        job.files.create(f"{ledger.job_folder(job.id)}/runs/0/checkpoint/fail", b"")
        # This reads files and does not ask the backend.
        bench.wait_for(lambda: bool(ledger.read_outcomes(job.files, job.id)))

        assert (still_follows, follower.returncode) == (True, -signal.SIGKILL)
        assert bench.end(job).state is JobState.SUCCEEDED
        assert (read_log(job), job.attempts()) == ("attempt 1\nattempt 2\n", [1, 2])

    def test_what_an_attempt_captured_is_found_by_the_next_one_and_by_a_job_that_reuses_it(self, bench: Bench) -> None:
        bench.require("capture", "reuse", "retry.failure")
        script = "cat out/w && exit 0; mkdir out; echo weights > out/w; exit 3"

        job = bench.start("sh", "-c", script, capture={"model": "out"}, retry=_once_more(bench))
        ended = bench.end(job).state
        [made] = list_artifacts(job)
        other = bench.start("cat", "artifacts/base/w", reuse={"base": f"{job.id}/model"})

        assert (ended, bench.end(other).state) == (JobState.SUCCEEDED, JobState.SUCCEEDED)
        assert (made.state, made.files, made.size_bytes, job.attempts()) == ("final", 1, 8, [1, 2])
        assert [read_log(each).splitlines()[-1] for each in (job, other)] == ["weights"] * 2

    def test_array_has_a_result_and_a_log_for_each_index(self, bench: Bench) -> None:
        bench.require("array.params")

        job = bench.start("sh", "-c", "echo {x}; exit {x}", array=Array(params={"x": (0, 1, 2)}))

        assert dict(bench.end(job).counts) == {JobState.SUCCEEDED: 1, JobState.FAILED: 2}
        assert [read_log(job, index) for index in range(3)] == ["0\n", "1\n", "2\n"]
        assert [each.exit_code for each in job.status(indices=True).indices] == [0, 1, 2]

    def test_ranks_of_several_nodes_reach_each_other_and_end_together(self, bench: Bench) -> None:
        bench.require("nodes", "tasks_per_node")

        job = bench.start("python3", "-c", _MEETS, nodes=2, tasks_per_node=2)

        assert bench.end(job).state is JobState.SUCCEEDED
        assert [read_log(job, rank=rank) for rank in range(4)] == ["1/0 2/1 3/1\n", "", "", ""]

    def test_rank_that_fails_on_another_node_ends_the_job_with_its_code(self, bench: Bench) -> None:
        bench.require("nodes")

        job = bench.start("sh", "-c", "[ $RUNTIME_NODE_RANK = 0 ] || exit 7; exec sleep 600", nodes=2)

        status = bench.end(job)
        assert (status.state, status.reason) == (JobState.FAILED, EndReason.APP_FAILED)
        assert job.status(indices=True).indices[0].exit_code == 7

    def test_cancel_ends_the_job_and_says_that_nothing_is_left(self, bench: Bench) -> None:
        job = bench.start("sleep", "600")
        bench.wait_for(lambda: job.attempts() == [1])

        assert job.cancel() == []

        assert bench.end(job).state is JobState.CANCELLED
        assert job.cancel() == [], "cancelling what is gone is success"

    def test_states_never_say_that_an_unknown_job_runs(self, bench: Bench) -> None:
        job = bench.start("true")
        bench.end(job)
        natives = [each.native_id[:-1] + ("0" if each.native_id[-1] != "0" else "1") for each in job.entry().natives]

        said = bench.launcher.states(bench.target, natives, bench.open_host())

        assert [each.raw for each in said if not each.state.terminal] == []

    # once

    @pytest.mark.parametrize("point", LAUNCH_FAULTS)
    def test_launch_killed_at_any_step_and_repeated_is_one_job(self, bench: Bench, point: str) -> None:
        spec = {"command": ["sh", "-c", "echo ran; sleep 0.3"]}
        killed = bench.launch_elsewhere(spec, RUNTIME_FAULTS=f"launch.{point}=kill")
        killed.communicate(timeout=bench.case.patience_s)

        repeated = bench.launch_elsewhere(spec, holder_is_dead=True)
        out, errors = repeated.communicate(timeout=2 * bench.case.patience_s)

        assert (killed.returncode, repeated.returncode) == (-signal.SIGKILL, 0), errors
        job = bench.find(out.split()[0])
        assert bench.end(job).state is JobState.SUCCEEDED
        assert (read_log(job), job.attempts(), len(job.entry().natives)) == ("ran\n", [1], 1)

    def test_launches_at_once_are_one_job(self, bench: Bench) -> None:
        spec = {"command": ["sh", "-c", "echo ran; sleep 0.3"]}
        started = [bench.launch_elsewhere(spec) for _ in range(3)]
        said = [each.communicate(timeout=2 * bench.case.patience_s)[0].split() for each in started]

        assert len({job for job, _ in said}) == 1
        assert sorted(new for _, new in said) == ["False", "False", "True"]
        job = bench.find(said[0][0])
        assert bench.end(job).state is JobState.SUCCEEDED
        assert (read_log(job), job.attempts(), len(job.entry().natives)) == ("ran\n", [1], 1)

    @pytest.mark.parametrize("point", TAKE_UP_FAULTS)
    def test_job_that_is_gone_is_taken_up_once_by_launching_again(self, bench: Bench, point: str) -> None:
        break_job = bench.require_resume()
        spec = {"command": ["sh", "-c", "echo attempt $RUNTIME_ATTEMPT; [ $RUNTIME_ATTEMPT = 2 ] || sleep 600"]}
        out, errors = bench.launch_elsewhere(spec).communicate(timeout=bench.case.patience_s)
        assert out, errors
        job = bench.find(out.split()[0])
        bench.wait_for(lambda: read_log(job) == "attempt 1\n")
        break_job(job)
        gone = bench.end(job)

        killed = bench.launch_elsewhere(spec, RUNTIME_FAULTS=f"launch.{point}=kill")
        killed.communicate(timeout=bench.case.patience_s)
        started = [bench.launch_elsewhere(spec) for _ in range(2)]
        said = [each.communicate(timeout=2 * bench.case.patience_s) for each in started]

        assert (gone.state, gone.reason) == (JobState.FAILED, EndReason.LOST), errors
        assert killed.returncode == -signal.SIGKILL
        assert [out.split() for out, _ in said] == [[job.id, "False"]] * 2, said
        assert bench.end(job).state is JobState.SUCCEEDED
        assert read_log(job) == "attempt 1\nattempt 2\n"
        assert job.attempts() == [1, 2]
        # A native job whose launcher died before it could note it may have ended before the next look.
        assert [each.epoch for each in job.entry().natives] in ([1, 2], *([[1]] if point == "resubmitted" else []))

    def test_array_that_is_gone_is_taken_up_where_it_was(self, bench: Bench) -> None:
        break_job = bench.require_resume()
        command = ("sh", "-c", "echo runs; [ $RUNTIME_ARRAY_INDEX = 0 ] || [ $RUNTIME_ATTEMPT = 2 ] || sleep 600")
        array = Array(count=3, max_parallel=2)
        job = bench.start(*command, array=array)
        bench.wait_for(lambda: set(job.entry().outcomes) == {0})
        bench.wait_for(lambda: read_log(job, 1) == read_log(job, 2) == "runs\n")
        break_job(job)
        bench.end(job)

        again = bench.start(*command, array=array)

        assert (again.id, again.new) == (job.id, False)
        assert dict(bench.end(again).counts) == {JobState.SUCCEEDED: 3}
        assert [again.attempts(index) for index in range(3)] == [[1], [1, 2], [1, 2]]

    def test_job_that_is_gone_with_no_budget_left_ends_as_lost(self, bench: Bench) -> None:
        break_job = bench.require_resume()
        job = bench.start("sleep", "600", retry=Retry(preemption=0))
        bench.wait_for(lambda: job.attempts() == [1])
        break_job(job)
        bench.end(job)

        again = bench.start("sleep", "600", retry=Retry(preemption=0))

        status = bench.end(again)
        assert (status.state, status.reason, again.attempts()) == (JobState.FAILED, EndReason.LOST, [1])
        assert set(again.entry().outcomes) == {0}, "it is final now"

    def test_job_that_runs_and_whose_folder_is_gone_is_found_by_its_name(self, bench: Bench) -> None:
        """The backend is asked before every submission, even if the record root and this machine know no job."""
        command = ("sh", "-c", "echo runs; exec sleep 600")
        job = bench.start(*command)
        # A shim that loses the folder while it begins an attempt ends.
        bench.wait_for(lambda: read_log(job) == "runs\n")
        natives = [(each.name, each.native_id) for each in job.entry().natives]
        job.files.remove(ledger.job_folder(job.id))

        again = bench.start(*command)

        assert (again.id, again.new) == (job.id, True), "no ledger tells of it"
        assert [(each.name, each.native_id) for each in again.entry().natives] == natives
        assert again.cancel() == []

    def test_record_root_that_was_used_and_is_another_one_now_is_no_answer(self, bench: Bench) -> None:
        job = bench.start("true")
        bench.end(job)
        marker = job.files.read(MARKER) or b""
        host = bench.open_host()
        host.files.write(MARKER, b"r-another\n")

        with pytest.raises(RootLost) as lost:
            bench.start("echo", "another")
        host.files.write(MARKER, marker)
        again = bench.start("true")

        assert (lost.value.exit_code, lost.value.retryable) == (3, True)
        assert (again.id, again.new) == (job.id, False)

    def test_carry_out_of_one_plan_twice_is_one_job(self, bench: Bench) -> None:
        options = bench.options
        prepared = prepare(JobSpec(command=("true",)), bench.target, bench.settings, options)

        first, second = (bench.keep(carry_out(prepared, options)) for _ in range(2))

        assert (first.id, first.new, second.id, second.new) == (prepared.plan.job.id, True, first.id, False)
        assert bench.end(second).state is JobState.SUCCEEDED


_MEETS: Final = """
import os, socket, time
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if rank:
    until = time.time() + 120
    while True:
        try:
            opened = socket.create_connection(place, 10)
            break
        except OSError:
            if time.time() > until:
                raise
            time.sleep(0.2)
    opened.sendall(("%d/%s" % (rank, os.environ["RUNTIME_NODE_RANK"])).encode())
else:
    listening = socket.socket(socket.AF_INET6 if ":" in place[0] else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind(("", place[1]))
    listening.listen(size)
    print(*sorted(listening.accept()[0].makefile().read() for _ in range(size - 1)))
"""
"""The first rank prints the rank and node of each other that reached it at the address that all were given."""


def _once_more(bench: Bench) -> Retry:
    """The budget of one failure, which costs little time."""
    pause = Backoff(min=timedelta(seconds=0.1), max=timedelta(seconds=0.2))
    # A backend without this field has its own pauses.
    return Retry(failure=1, backoff=pause) if bench.keeps("retry.backoff.min") else Retry(failure=1)


def _refused_change(keeps: Mapping[str, FieldSupport]) -> tuple[str, dict[str, Any]]:
    """A field that the launcher refuses, and a change of a spec that sets only this field."""
    from runtime.jobs.spec import EnvironmentManager, Gpus, JobResources, Placement, Priority

    changes: dict[str, dict[str, Any]] = {
        "image": {"image": "lab/image:1"},
        "account": {"account": "vision"},
        "priority": {"priority": Priority.HIGH},
        "after": {"after": ("j-other",)},
        "placement.capacity": {"placement": Placement(capacity="spot")},
        "placement.nodes": {"placement": Placement(nodes=("n1",))},
        "resources.cpus": {"resources": JobResources(cpus=1.0)},
        "resources.gpus.count": {"resources": JobResources(gpus=Gpus(count=1))},
        "environment.manager": {"environment": JobEnvironment(manager=EnvironmentManager.UV)},
        "nodes": {"nodes": 2},
        "array.pack": {"array": Array(count=2, pack=2)},
        "idle_timeout": {"idle_timeout": timedelta(minutes=5)},
        "code.mode": {"code": Code(mode=CodeMode.IMAGE)},
    }
    for name, change in changes.items():
        if keeps[name].fidelity is Fidelity.REFUSED:
            return name, change
    pytest.skip("it refuses none of the fields that the suite tries")


def _look(folder: Path) -> list[tuple[str, int]]:
    return sorted((str(path), path.stat().st_mtime_ns) for path in folder.rglob("*"))
