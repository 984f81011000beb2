"""Launching on this machine: once, despite kills, and a repeated launch is the same job."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from runtime.client.fetch import FilesDiffer
from runtime.client.jobs.handle import JobHandle, find_job
from runtime.client.jobs.launch import launch
from runtime.client.jobs.prepare import FieldsRefused, LaunchOptions, LaunchRequest, prepare
from runtime.client.jobs.status import read_attempts
from runtime.config import Project, Settings
from runtime.end_reasons import EndReason
from runtime.errors import NotPossible, UnknownName
from runtime.jobs import ledger
from runtime.jobs.hosts.local import LocalFiles
from runtime.jobs.plan import Target, owner_name
from runtime.jobs.spec import Array, Code, CodeMode, InvalidSpec, JobSpec, JobState, Priority, Retry, parse_spec
from runtime.jobs.spec_fields import spec_fields
from runtime.snapshots.snapshot import make_snapshot
from tests.copies_support import Copies
from tests.shim_support import PATIENCE_S, is_running, processes_with, shims_with, signal_all, wait_for

FAULTS = ["unlocked", "locked", "written", "submitted", "launched"]

LAUNCH = """
import os, sys
from pathlib import Path
from runtime.jobs import lock
from runtime.config import load_settings
from runtime.jobs.spec import JobSpec
from runtime.client.jobs.launch import launch
lock.STILL_S = float(os.environ.get("STILL_S", lock.STILL_S))
job = launch(JobSpec(command=("sh", "-c", "echo ran >> ran; cat ran; sleep 0.3"), name="once"), "local")
print(job.id, job.new)
"""


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(
        project=Project(root=tmp_path),
        data_dir=tmp_path / "data",
        cache_dir=tmp_path / "cache",
        config_dir=tmp_path / "config",
    )


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The work tree that jobs are launched from."""
    folder = tmp_path / "tree"
    folder.mkdir()
    # Equal trees make equal jobs, and a shim kills leftovers of its job anywhere on the machine, even another test's.
    (folder / "salt").write_bytes(os.urandom(12))
    (folder / "main.py").write_text("print('one')\n")
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture(autouse=True)
def _nothing_left_behind(tmp_path: Path) -> Iterator[None]:
    yield
    signal_all(processes_with(str(tmp_path)))


def start(settings: Settings, *command: str, again: bool = False, **changes: object) -> JobHandle:
    spec = replace(JobSpec(command=command), **changes)  # type: ignore[arg-type]
    return launch(spec, "local", settings=settings, options=LaunchOptions(again=again))


def printed(job: JobHandle, index: int = 0) -> str:
    return b"".join(job.logs(index=index)).decode()


def test_launch_runs_the_tree_as_it_was_and_reports_the_end(settings: Settings, tree: Path) -> None:
    job = start(settings, sys.executable, "main.py")
    (tree / "main.py").write_text("print('two')\n")

    status = job.wait(timeout=PATIENCE_S)

    assert (status.state, status.reason) == (JobState.SUCCEEDED, EndReason.SUCCEEDED)
    assert printed(job) == "one\n"
    assert job.new


def test_launch_of_the_same_again_is_the_same_job_and_its_result(settings: Settings, tree: Path) -> None:
    first = start(settings, "sh", "-c", "exit 3")
    first.wait(timeout=PATIENCE_S)

    second = start(settings, "sh", "-c", "exit 3")

    assert (second.id, second.new) == (first.id, False)
    assert second.status().reason is EndReason.APP_FAILED
    assert second.attempts() == [1]


def test_launch_of_a_changed_tree_or_again_is_another_job(settings: Settings, tree: Path) -> None:
    first = start(settings, "true")
    again = start(settings, "true", again=True)
    third = start(settings, "true", again=True)
    (tree / "new.py").write_text("")
    changed = start(settings, "true")

    assert len({each.id for each in (first, again, third, changed)}) == 4
    assert [each.wait(timeout=PATIENCE_S).state for each in (first, again, third, changed)] == [JobState.SUCCEEDED] * 4


def test_intent_says_where_the_tree_stood_in_its_history(settings: Settings, tree: Path) -> None:
    plain = start(settings, "true").entry().intent
    author = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    for words in (["init", "-q", "-b", "side"], ["add", "-A"], [*author, "commit", "-qm", "x"]):
        subprocess.run(["git", *words], cwd=tree, check=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=tree, check=True, capture_output=True, text=True).stdout
    (tree / "main.py").write_text("print('two')\n")

    intent = start(settings, "true").entry().intent

    assert {"commit", "branch", "diff"}.isdisjoint(plain)
    assert (intent["commit"], intent["branch"]) == (head.strip(), "side")
    assert "-print('one')\n+print('two')\n" in intent["diff"]


def test_code_is_stored_once_for_all_jobs_that_run_it(settings: Settings, tree: Path) -> None:
    said: list[str] = []
    one = launch(["sleep", "600"], "local", settings=settings, progress=said.append)
    other = launch(["cat", "main.py"], "local", settings=settings, progress=said.append)

    root = settings.data_dir / "jobs"
    [stored] = (root / "snapshots").iterdir()
    assert [line for line in said if line.startswith("sending")] == ["sending the code: 2 files"]
    assert (root / f"jobs/{one.id}/snapshot.tar").samefile(stored)
    assert stored.stem == hashlib.sha256(stored.read_bytes()).hexdigest()
    assert other.wait(timeout=PATIENCE_S).state is JobState.SUCCEEDED
    assert one.cancel() == []


def test_code_of_another_user_under_the_same_id_is_not_relied_on(
    settings: Settings, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalFiles, "link", lambda *_: False)
    name = make_snapshot(tree).id.removeprefix("sha256:")
    (settings.data_dir / "jobs/snapshots").mkdir(parents=True)
    (settings.data_dir / f"jobs/snapshots/{name}.tar").write_bytes(b"something else")

    job = start(settings, "cat", "main.py")

    assert job.wait(timeout=PATIENCE_S).state is JobState.SUCCEEDED
    assert printed(job) == "print('one')\n"


def test_launch_of_the_live_tree_sees_later_edits(settings: Settings, tree: Path) -> None:
    job = start(settings, "sh", "-c", "while [ ! -e go ]; do sleep 0.05; done; cat go", code=Code(mode=CodeMode.NONE))

    (tree / "go.part").write_text("edited later\n")
    (tree / "go.part").rename(tree / "go")

    assert job.wait(timeout=PATIENCE_S).state is JobState.SUCCEEDED
    assert printed(job) == "edited later\n"


def test_launch_of_an_array_gives_each_index_its_parameters_and_status(settings: Settings, tree: Path) -> None:
    job = start(
        settings,
        "sh",
        "-c",
        "echo {x} $RUNTIME_ARRAY_INDEX; exit {x}",
        array=Array(params={"x": (0, 1, 2)}, offset=5),
    )

    status = job.wait(timeout=PATIENCE_S)

    assert status.state is JobState.FAILED
    assert dict(status.counts) == {JobState.SUCCEEDED: 1, JobState.FAILED: 2}
    assert [printed(job, index) for index in (5, 6, 7)] == ["0 5\n", "1 6\n", "2 7\n"]
    assert [(each.index, each.exit_code) for each in job.status(indices=True).indices] == [(5, 0), (6, 1), (7, 2)]


@pytest.mark.parametrize("field", [{"lock": "requirements.txt"}, {"extras": ["gpu"]}, {"python": "3.11"}])
def test_launch_with_a_lock_file_and_no_manager_is_refused(
    settings: Settings, tree: Path, field: dict[str, object]
) -> None:
    with pytest.raises(NotPossible) as refused:
        launch({"command": ["true"], "environment": field}, "local", settings=settings)

    assert (
        refused.value.message == f"`environment.{next(iter(field))}` needs an `environment.manager`, and there is none"
    )


def test_launch_of_ranks_runs_them_together(settings: Settings, tree: Path) -> None:
    job = start(settings, "sh", "-c", "echo $RUNTIME_RANK of $RUNTIME_WORLD_SIZE", nodes=2)

    assert job.wait(timeout=PATIENCE_S).state is JobState.SUCCEEDED
    assert b"".join(job.logs(rank=1)) == b"1 of 2\n"


def test_launch_retries_failures_after_the_client_is_gone(settings: Settings, tree: Path) -> None:
    program = LAUNCH.replace(
        '"echo ran >> ran; cat ran; sleep 0.3"), name="once"',
        '"exit $((2 - RUNTIME_ATTEMPT))"), retry=Retry(failure=1, backoff=Backoff(min=timedelta(seconds=1)))',
    )
    program = "from datetime import timedelta\nfrom runtime.jobs.spec import Backoff, Retry\n" + program
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environ(settings)
    )

    job = find_job(done.stdout.split()[0], settings=settings)

    assert job.wait(timeout=PATIENCE_S).state is JobState.SUCCEEDED
    assert job.attempts() == [1, 2]


def test_launch_with_a_field_that_cannot_be_kept_is_refused_unless_ignored(settings: Settings, tree: Path) -> None:
    spec = JobSpec(command=("true",), priority=Priority.HIGH, account="vision")

    with pytest.raises(FieldsRefused) as refused:
        launch(spec, "local", settings=settings)
    with pytest.raises(FieldsRefused) as still:
        launch(spec, "local", settings=settings, options=LaunchOptions(ignore=("priority",)))
    job = launch(spec, "local", settings=settings, options=LaunchOptions(ignore=("priority", "account")))

    assert sorted(refused.value.refused) == ["account", "priority"]
    assert sorted(still.value.refused) == ["account"]
    assert job.wait(timeout=PATIENCE_S).state is JobState.SUCCEEDED


def test_launch_of_a_secret_keeps_its_value_in_one_file_until_the_job_has_ended(
    settings: Settings, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "canary-815")

    def holding() -> list[Path]:
        found = []
        for folder, _, names in os.walk(settings.data_dir):
            for path in (Path(folder, name) for name in names):
                with suppress(FileNotFoundError):  # The job has ended and is being cleaned up.
                    if path.is_file() and b"canary-815" in path.read_bytes():
                        found.append(path)
        return found

    script = "until [ -e go ]; do sleep 0.05; done; test $HF_TOKEN = canary-$((800 + 15))"
    job = start(settings, "sh", "-c", script, env={"HF_TOKEN": None}, code=Code(mode=CodeMode.NONE))
    assert [(path.parent.name, path.stat().st_mode & 0o777) for path in holding()] == [("secrets", 0o600)]
    (tree / "go").touch()

    assert job.wait(timeout=PATIENCE_S).state is JobState.SUCCEEDED
    wait_for(lambda: holding() == [], "the end of the secret")


def test_cancel_ends_the_tree_and_says_that_nothing_is_left(settings: Settings, tree: Path) -> None:
    job = start(settings, "sh", "-c", "sleep 671 & sleep 672")
    wait_for(lambda: job.attempts() == [1], "the attempt")

    assert job.cancel() == []

    assert job.status().state is JobState.CANCELLED
    assert processes_with(str(settings.data_dir)) == []


WORKER = (sys.executable, "-m", "runtime", "worker")


def worker_of_a_fleet(settings: Settings, notice: Path) -> JobHandle:
    """Launch a worker as a job, which serves an empty queue and watches for `notice`."""
    env = {
        "PYTHONPATH": str(Path(__file__).parents[3]),
        "RUNTIME_QUEUE": f"sqlite:{settings.data_dir / 'fleet.db'}",
        "RUNTIME_PREEMPTION_NOTICES": "off",
        "RUNTIME_PREEMPTION_FILE": str(notice),
    }
    job = start(settings, *WORKER, env=env)
    wait_for(lambda: "worker_started" in printed(job), "the worker")
    return job


def test_worker_of_a_fleet_goes_on_after_a_preemption_notice_and_ends_as_cancelled(
    settings: Settings, tree: Path, tmp_path: Path
) -> None:
    notice = tmp_path / "notice"
    job = worker_of_a_fleet(settings, notice)

    notice.write_text("going at noon\n")
    wait_for(lambda: job.attempts()[-1] > 1, "the next attempt")
    notice.unlink()
    first, second = read_attempts(job.files, job.id, 0)[:2]

    assert (first.reason, first.exit_code, first.message) == ("preempted", 75, "gave way to a notice: going at noon")
    assert second.reason in (None, "preempted")
    assert job.status().state is JobState.RUNNING
    assert job.cancel() == []
    assert (job.status().state, job.status().reason) == (JobState.CANCELLED, EndReason.CANCELLED)


def test_worker_of_a_fleet_that_is_cancelled_at_once_with_its_signal_is_cancelled(
    settings: Settings, tree: Path, tmp_path: Path
) -> None:
    job = worker_of_a_fleet(settings, tmp_path / "notice")

    # Some backends signal all processes of a job: the worker first, then its shim.
    (settings.data_dir / "jobs/jobs" / job.id / "cancel").write_text("{}")
    signal_all(sorted(processes_with(f"RUNTIME_JOB_ID={job.id}")), signal.SIGTERM)

    assert job.wait(timeout=PATIENCE_S).state is JobState.CANCELLED


def test_worker_of_a_fleet_whose_every_process_is_told_to_stop_has_not_succeeded(
    settings: Settings, tree: Path, tmp_path: Path
) -> None:
    job = worker_of_a_fleet(settings, tmp_path / "notice")
    mine = processes_with(f"RUNTIME_JOB_ID={job.id}")

    shims = [pid for pid in processes_with(f"jobs/{job.id}/shim.py") if pid not in mine]
    signal_all(shims, signal.SIGSTOP)  # so that it may find any end of its worker when it continues
    signal_all([*mine, *shims], signal.SIGTERM)
    wait_for(lambda: not any(map(is_running, mine)), "the end of the worker")
    signal_all(shims, signal.SIGCONT)
    wait_for(lambda: job.status().state.terminal, "the end")

    assert [each.reason for each in read_attempts(job.files, job.id, 0)] == ["stopped"]
    assert job.status().reason is EndReason.LOST, "the same launch takes it up"


def test_cancel_of_one_index_leaves_the_others(settings: Settings, tree: Path) -> None:
    job = start(settings, "sh", "-c", "[ $RUNTIME_ARRAY_INDEX = 0 ] || sleep 600", array=Array(count=2, max_parallel=2))
    wait_for(lambda: job.attempts(1) == [1], "the second run")

    job.cancel(indices=[1])

    assert dict(job.wait(timeout=PATIENCE_S).counts) == {JobState.SUCCEEDED: 1, JobState.CANCELLED: 1}


def test_fetch_brings_the_outputs_of_the_attempt_that_counts(settings: Settings, tree: Path, tmp_path: Path) -> None:
    job = start(
        settings,
        "sh",
        "-c",
        "mkdir $RUNTIME_OUTPUT_DIR/a; echo $RUNTIME_ARRAY_INDEX > $RUNTIME_OUTPUT_DIR/a/n",
        array=Array(count=2),
    )
    job.wait(timeout=PATIENCE_S)

    written = job.fetch(tmp_path / "home")

    assert sorted(str(path.relative_to(tmp_path / "home")) for path in written) == ["0/a/n", "1/a/n"]
    assert (tmp_path / "home" / "1" / "a" / "n").read_text() == "1\n"


def test_handle_of_an_array_with_an_offset_begins_at_its_first_index(settings: Settings, tree: Path) -> None:
    with start(settings, "sh", "-c", "echo run $RUNTIME_ARRAY_INDEX", array=Array(count=2, offset=7)) as job:
        job.wait(timeout=PATIENCE_S)

        assert (job.attempts(), b"".join(job.logs())) == ([1], b"run 7\n")


def test_fetch_by_hand_leaves_a_file_that_differs(settings: Settings, tree: Path, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "n").write_text("mine")
    with start(settings, "sh", "-c", "cd $RUNTIME_OUTPUT_DIR; echo theirs > n; mkfifo pipe; ln -s n link") as job:
        job.wait(timeout=PATIENCE_S)

        with pytest.raises(FilesDiffer) as differs:
            job.fetch(tmp_path / "home")

        assert differs.value.names == [str(tmp_path / "home" / "n")]
        assert (tmp_path / "home" / "n").read_text() == "mine"
        assert job.fetch(tmp_path / "home", overwrite=True) == [tmp_path / "home" / name for name in ("link", "n")]
        assert (tmp_path / "home" / "n").read_text() == "theirs\n"


def test_status_of_a_shim_that_was_killed_is_lost(settings: Settings, tree: Path) -> None:
    job = start(settings, "sleep", "600")
    wait_for(lambda: job.attempts() == [1], "the attempt")
    signal_all(shims_with(str(settings.data_dir)))

    status = job.wait(timeout=PATIENCE_S)

    assert (status.state, status.reason) == (JobState.FAILED, EndReason.LOST)


def test_logs_follow_over_attempts_until_the_end(settings: Settings, tree: Path) -> None:
    job = start(settings, "sh", "-c", "echo $RUNTIME_ATTEMPT; [ $RUNTIME_ATTEMPT = 3 ] || exit 75", retry=Retry())

    assert b"".join(job.logs(follow=True)) == b"1\n2\n3\n"
    assert b"".join(job.logs(attempt=2)) == b"2\n"


def test_owner_without_a_name_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> str:
        raise KeyError("getpwuid(): uid not found: 12345")

    monkeypatch.setattr("getpass.getuser", unknown)

    assert owner_name() == f"uid{os.getuid()}"


def test_find_job_by_the_beginning_of_its_id(settings: Settings, tree: Path) -> None:
    job = start(settings, "true")

    assert find_job(job.id[:8], settings=settings).id == job.id
    with pytest.raises(UnknownName):
        find_job("j-ffffffff", settings=settings)


# once


def environ(settings: Settings, **more: str) -> dict[str, str]:
    return {**os.environ, "RUNTIME_DATA_DIR": str(settings.data_dir), **more}


@pytest.mark.parametrize("point", FAULTS)
def test_launch_killed_at_any_step_and_repeated_is_one_job(
    settings: Settings, copies: Copies, tree: Path, point: str
) -> None:
    killed = copies.run(LAUNCH, [], environ(settings, RUNTIME_FAULTS=f"launch.{point}=kill"))
    # The repeated launch knows that the lock's holder is dead.
    repeated = copies.run(LAUNCH, [], environ(settings, STILL_S="1"))

    assert killed.returncode == -signal.SIGKILL
    assert repeated.returncode == 0, repeated.stderr
    assert len(ledger.list_jobs(LocalFiles(str(settings.data_dir / "jobs")))) == 1
    job = find_job(repeated.stdout.split()[0], settings=settings)
    assert job.wait(timeout=PATIENCE_S).state is JobState.SUCCEEDED
    assert printed(job) == "ran\n"
    assert job.attempts() == [1]
    assert len(job.entry().natives) == 1


def test_two_launches_at_once_are_one_job(settings: Settings, tree: Path) -> None:
    both = [
        subprocess.Popen([sys.executable, "-c", LAUNCH], stdout=subprocess.PIPE, text=True, env=environ(settings))
        for _ in range(3)
    ]
    said = [each.communicate(timeout=PATIENCE_S)[0].split() for each in both]

    assert len({job for job, _ in said}) == 1
    assert sorted(new for _, new in said) == ["False", "False", "True"]
    job = find_job(said[0][0], settings=settings)
    assert job.wait(timeout=PATIENCE_S).state is JobState.SUCCEEDED
    assert job.attempts() == [1]


def test_job_id_of_a_prepared_launch_stays_what_it_was_in_earlier_versions(
    settings: Settings, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.client.jobs.prepare.owner_name", lambda: "ada")
    defaults = {
        "nodes": 2,
        "env": {"A": "1", "Z": "x"},
        "resources": {"memory": "8GiB"},
        "placement": {"on": ["hpc"]},
    }
    box = Target(name="box", kind="local", defaults=defaults)
    filled = {
        "command": ["true"],
        "code": {"mode": "none"},
        "nodes": 1,
        "env": {"A": "9"},
        "placement": {"on": ["box"]},
    }
    dropped = {"command": ["true"], "code": {"mode": "none"}, "account": "lab", "placement": {"capacity": "spot"}}
    ignore = LaunchOptions(ignore=("account", "placement.capacity"))

    with_defaults = prepare(parse_spec(filled), box, settings, LaunchOptions()).plan
    without_refused = prepare(parse_spec(dropped), Target(name="local", kind="local"), settings, ignore).plan

    assert (with_defaults.job.id, with_defaults.spec.nodes, with_defaults.spec.env) == (
        "j-2be04387c34bdcb7847fff3f",
        2,
        {"A": "9", "Z": "x"},
    )
    assert without_refused.job.id == "j-92310ce90d5842d381eb583b"
    assert prepare(LaunchRequest(filled), box, settings, LaunchOptions()).plan.job == with_defaults.job


def test_fields_are_parsed_once_for_targets_without_defaults_and_once_for_each_with_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parsed: list[object] = []
    monkeypatch.setattr(
        "runtime.client.jobs.prepare.parse_spec",
        lambda fields, *, source: (parsed.append(fields), parse_spec(fields, source=source))[1],
    )
    request = LaunchRequest({"command": ["true"], "time_limit": "1h", "resources": {"cpus": 2}})
    bare, other = (Target(name=name, kind="local") for name in ("a", "b"))
    filled = Target(name="c", kind="local", defaults={"time_limit": "2h", "resources": {"memory": "1GiB"}, "nodes": 2})

    specs = [request.spec_on(target) for target in (bare, other, bare, filled, filled)]

    assert len(parsed) == 2
    assert specs[0] is specs[1] is specs[2]
    assert specs[3] is specs[4]
    assert spec_fields(specs[3]) == {
        "command": ["true"],
        "nodes": 2,
        "resources": {"cpus": 2.0, "memory": "1GiB"},
        "time_limit": 3600.0,
    }


def test_fault_of_the_job_is_not_blamed_on_the_defaults_of_a_target() -> None:
    filled = Target(name="box", kind="local", defaults={"nodes": 0})

    with pytest.raises(InvalidSpec, match=r"the job spec of `job\.yaml` cannot be used"):
        LaunchRequest({"command": [], "nodes": 2}, source="`job.yaml`").spec_on(filled)
    with pytest.raises(InvalidSpec, match="with the defaults of target `box`"):
        LaunchRequest({"command": ["true"]}, source="`job.yaml`").spec_on(filled)


def test_outcome_names_that_are_none_are_passed_over() -> None:
    good = ledger.parse_outcome("j-1.0.succeeded.0.2")

    assert good == ledger.RunOutcome(job="j-1", index=0, reason=EndReason.SUCCEEDED, code=0, attempt=2)
    assert [ledger.parse_outcome(name) for name in ("j-1.0.odd.0.1", "j-1.x.oom.0.1", "j-1.0.oom.1.1.77.abc", "")] == [
        None
    ] * 4
