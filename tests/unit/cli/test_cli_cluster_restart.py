"""`runtime cluster restart` and `runtime keep --cluster`: what they print, refuse and return, with a bucket for records."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from runtime.cli.clusters import stop
from runtime.cli.clusters.restart import restart_words
from runtime.cli.main import main
from runtime.errors import InfrastructureFailure
from runtime.jobs import ledger, maintenance_lock
from runtime.jobs.hosts.bucket import BucketFiles
from runtime.jobs.lock import Lock
from runtime.jobs.maintenance_lock import MaintenanceLock
from runtime.launchers.ray.launcher import RayLauncher
from runtime.outputs import RecordsOutput, StackOutputs, encode_outputs
from tests.cluster_support import CLUSTER, OUTPUTS, labels
from tests.fakes.gcs import GcsServer
from tests.fakes.ray_head import RayHead
from tests.fakes.tpu import TpuServer

Run = Callable[..., tuple[int, str, str]]
ROOT = "gs://lab/jobs-of-ray/main"
WITH_RECORDS = replace(OUTPUTS, records=RecordsOutput(url="gs://lab"))
JOB = """\
name: fit
command: ["true"]
code: {mode: image}
grace_period: 1s
"""
SSH = """#!/bin/sh
for last; do :; done
echo "$last" >>{folder}/commands
curl --silent --output /dev/null --request POST {address}/restart
exit $(cat {folder}/code)
"""


@pytest.fixture
def head() -> Iterator[RayHead]:
    with RayHead() as running:
        yield running


@pytest.fixture
def run(
    head: RayHead, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Run]:
    buckets, google = GcsServer().start(), TpuServer()
    buckets.make_bucket("lab")
    google.add_instance({"name": CLUSTER.head, "labels": labels(kind="head")})
    google.start()
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, text in (("ssh", SSH.format(folder=tmp_path, address=head.address)), ("gcloud", "#!/bin/sh\n")):
        (programs / name).write_text(text)
        (programs / name).chmod(0o700)
    (tmp_path / "code").write_text("0")
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "runtime.toml").write_text(
        f'[targets.tpu]\nkind = "ray"\naddress = "{head.address}"\nrecords = "{ROOT}"\n'
    )

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", buckets.url)
    monkeypatch.setenv("RUNTIME_GOOGLE_API", google.url)
    for name in ("data", "cache", "config"):
        monkeypatch.setenv(f"XDG_{name.upper()}_HOME", str(tmp_path / name))
    contract = tmp_path / "contract.json"
    monkeypatch.setenv("RUNTIME_OUTPUTS", str(contract))

    def call(*args: str, outputs: StackOutputs = WITH_RECORDS) -> tuple[int, str, str]:
        contract.write_text(encode_outputs(outputs))
        code = main(list(args))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    yield call
    google.stop()
    buckets.stop()


def launch(run: Run) -> str:
    code, out, err = run("launch", "--on", "tpu", "-f", "job.yaml", "-o", "json")
    assert code == 0, err
    return str(json.loads(out)["job"])


def restart(run: Run, head: RayHead, *words: str, **more: Any) -> tuple[int, str, str]:
    return run("cluster", "restart", "--address", head.address, *words, **more)


def test_restart_prints_what_became_of_each_job(run: Run, head: RayHead, tmp_path: Path) -> None:
    job = launch(run)

    code, out, err = restart(run, head, "--yes", "-o", "json")

    assert code == 0, err
    assert [(each["job"], each["target"], each["done"]) for each in json.loads(out)] == [(job, "tpu", "taken_up")]
    assert err.splitlines()[-1] == "main: restarted; 1 open job taken up or ended"
    assert (tmp_path / "commands").read_text() == (shlex.join(restart_words("session_1")) + "\n")
    assert head.session == 2


def test_dry_run_prints_the_steps_and_jobs_and_changes_nothing(run: Run, head: RayHead, tmp_path: Path) -> None:
    launch(run)
    head.drivers.append({"type": "DRIVER", "job_id": "02000000", "submission_id": None, "status": "RUNNING"})
    (name,) = head.jobs

    code, out, err = restart(run, head, "--dry-run")

    assert code == 0
    assert [line.split("\t")[0] for line in out.splitlines()] == [
        *("hold", "ask", "ask", "restart", "await_head", "reap", "await_members", "take_up", "release")
    ]
    assert "take_up\ttake up 1 open job" in out
    assert f"{name}: RUNNING, of " in err
    assert "02000000: RUNNING, not ours: a program that connected by itself" in err
    assert (head.session, (tmp_path / "commands").exists()) == (1, False)
    assert maintenance_lock.read_hold(BucketFiles(ROOT)) is None


@pytest.mark.parametrize(
    ("newest", "seen", "again"),
    [
        ("session_1", "session_1", True),
        ("session_2", "session_1", False),
        (None, "session_1", True),
        ("session_2", None, True),
    ],
)
def test_command_on_the_head_restarts_ray_unless_it_has_begun_another_session_since(
    newest: str | None, seen: str | None, again: bool, tmp_path: Path
) -> None:
    for folder in ("run/runtime-ray", "var/lib/runtime-ray", "bin"):
        (tmp_path / folder).mkdir(parents=True)
    started = tmp_path / "run/runtime-ray/started-runtime-ray-head.service"
    started.write_text("files")
    if newest:
        (tmp_path / "var/lib/runtime-ray/session_latest").symlink_to(f"/tmp/ray/{newest}")
    runner = tmp_path / "bin/google_metadata_script_runner"
    runner.write_text(f"#!/bin/sh\n! flock --nonblock {tmp_path}/run/runtime-ray/restart.lock true && echo $1 alone\n")
    runner.chmod(0o700)
    *_, script = restart_words(seen)
    script = script.replace("/run/", f"{tmp_path}/run/").replace("/var/", f"{tmp_path}/var/")

    ran = subprocess.run(
        ["sh", "-c", script],
        env={**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )

    assert (ran.stdout, started.exists()) == ("startup alone\n", not again)


def test_jobs_of_others_are_listed_and_nothing_is_changed(run: Run, head: RayHead, tmp_path: Path) -> None:
    launch(run)
    head.jobs["theirs"] = {"submission_id": "theirs", "status": "RUNNING", "entrypoint": "python x.py"}

    code, out, err = restart(run, head, "--yes")

    assert (code, out) == (2, "")
    assert "error: 1 job would be lost that the runtime did not start\n  `theirs`, RUNNING: python x.py\n" in err
    assert (head.session, maintenance_lock.read_hold(BucketFiles(ROOT))) == (1, None)
    assert restart(run, head, "--yes", "--drop-foreign")[0] == 0


def test_second_restart_says_who_is_at_work(run: Run, head: RayHead) -> None:
    launch(run)
    held = Lock(BucketFiles(ROOT), "", "bob@desk", folder="restart")
    held.take(patience_s=0)
    try:
        code, _, err = restart(run, head, "--yes")
    finally:
        held.release()

    assert (code, err.splitlines()[0]) == (2, "error: cluster `main` is being restarted by bob@desk")
    assert head.session == 1


def test_head_that_ssh_cannot_restart_is_3_and_the_same_command_goes_on(
    run: Run, head: RayHead, tmp_path: Path
) -> None:
    launch(run)
    (tmp_path / "code").write_text("255")
    head.answers_restart = False

    code, _, err = restart(run, head, "--yes")

    assert code == 3
    assert f"error: could not restart Ray on head `{CLUSTER.head}`: ssh ended with 255" in err
    assert "the cluster stays marked, for an hour at most: the same command goes on\n" in err
    (tmp_path / "code").write_text("0")
    head.answers_restart = True
    code, _, err = restart(run, head, "--yes")
    assert code == 0
    assert "going on with the restart that " in err


def test_launch_that_was_cut_off_is_said_and_is_no_failure_of_the_restart(
    run: Run, head: RayHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> NoReturn:
        raise InfrastructureFailure("the laptop went to sleep")

    with monkeypatch.context() as patched:
        patched.setattr(RayLauncher, "submit", fail)
        assert run("launch", "--on", "tpu", "-f", "job.yaml", "--set", "name=cut")[0] == 3
    job = launch(run)

    code, out, err = restart(run, head, "--yes", "-o", "json")

    assert code == 0, err
    kept = {each["job"]: each for each in json.loads(out)}
    (cut,) = kept.keys() - {job}
    assert (kept[cut]["done"], kept[cut]["submitted"], kept[job]["submitted"]) == ("left", False, True)
    owner = kept[cut]["owner"]
    assert err.splitlines()[-2:] == [
        f"{cut} of {owner} was never submitted; the same launch does that, or `runtime gc` clears it",
        "main: restarted; 1 open job taken up or ended",
    ]


def test_restart_that_failed_is_given_up_and_says_what_was_done(run: Run, head: RayHead, tmp_path: Path) -> None:
    job = launch(run)
    (tmp_path / "code").write_text("255")
    head.answers_restart = False
    assert restart(run, head, "--yes")[0] == 3

    planned = restart(run, head, "--give-up", "--dry-run")
    code, out, err = restart(run, head, "--give-up", "--yes", "-o", "json")
    again = restart(run, head, "--give-up", "--yes")

    assert [line.split("\t")[0] for line in planned[1].splitlines()] == ["hold", "take_up", "release"]
    assert code == 0, err
    assert [(each["job"], each["done"]) for each in json.loads(out)] == [(job, "taken_up")]
    assert ": 1 job asked to end, Ray not restarted\n" in err
    assert err.splitlines()[-1] == "main: the restart was given up; 1 open job taken up or ended"
    assert head.session == 1
    assert maintenance_lock.read_hold(BucketFiles(ROOT)) is None
    assert (again[0], again[1], again[2].splitlines()[-1]) == (
        0,
        "",
        "main: no restart is under way; nothing was changed",
    )


def test_plan_to_give_up_a_restart_that_is_not_under_way_says_so(run: Run, head: RayHead) -> None:
    assert restart(run, head, "--give-up", "--dry-run") == (
        0,
        "",
        "main: no restart is under way; nothing was changed\n",
    )


def test_restart_of_a_living_command_is_not_given_up(run: Run, head: RayHead) -> None:
    now = ledger.now().replace(microsecond=0)
    held = MaintenanceLock(token="t", by="bob@desk", since=now, renewed=now)
    maintenance_lock.write_hold(BucketFiles(ROOT), held)
    lock = Lock(BucketFiles(ROOT), "", "bob@desk", folder="restart")
    lock.take(patience_s=0)
    try:
        code, _, err = restart(run, head, "--give-up", "--yes")
    finally:
        lock.release()

    assert (code, err.splitlines()[1]) == (2, "error: cluster `main` is being restarted by bob@desk")
    assert maintenance_lock.read_hold(BucketFiles(ROOT)) == held


def test_giving_up_and_dropping_jobs_of_others_do_not_go_together(run: Run, head: RayHead) -> None:
    code, _, err = restart(run, head, "--give-up", "--drop-foreign")

    assert (code, err.splitlines()[0]) == (2, "error: `--give-up` drops no jobs")


def test_stack_without_a_bucket_for_records_is_refused(run: Run, head: RayHead) -> None:
    code, _, err = restart(run, head, "--yes", outputs=OUTPUTS)

    assert code == 2
    assert "names no bucket for records, so the jobs of cluster `main` are not known" in err


def test_status_shows_the_mark_with_its_next_step(run: Run) -> None:
    now = ledger.now()
    maintenance_lock.write_hold(BucketFiles(ROOT), MaintenanceLock(token="t", by="ada@desk", since=now, renewed=now))

    code, _, err = run("cluster", "status")

    assert code == 0
    assert "main: the cluster is being restarted by ada@desk since " in err
    assert "gave no sign" not in err

    maintenance_lock.write_hold(
        BucketFiles(ROOT),
        MaintenanceLock(token="t", by="ada@desk", since=now, renewed=now - 2 * maintenance_lock.LASTS),
    )

    assert ", and gave no sign for an hour, so launches and keepers go on\n" in run("cluster", "status")[2]


def test_stop_beside_a_restart_says_that_ray_will_begin_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop, "PAUSE_S", 0)
    now = ledger.now()
    maintenance_lock.write_hold(BucketFiles(ROOT), MaintenanceLock(token="t", by="ada@desk", since=now, renewed=now))

    code, _, err = run("cluster", "stop", "--leave-head", "--yes")

    said = err.splitlines()
    assert code == 0
    assert said[0].startswith("main: the cluster is being restarted by ada@desk since ")
    assert said[0].endswith(", which starts Ray again")
    assert said[1].endswith("`runtime cluster restart --give-up`")


def test_keep_of_a_cluster_takes_up_jobs_of_any_target_and_leaves_them_while_it_is_held(
    run: Run, head: RayHead
) -> None:
    job = launch(run)
    head.restart()
    now = ledger.now()
    files = BucketFiles(ROOT)
    maintenance_lock.write_hold(files, MaintenanceLock(token="t", by="ada@desk", since=now, renewed=now))
    words = ("keep", "--once", "--cluster", "main", "--address", head.address, "-o", "json")

    held = json.loads(run(*words)[1])
    refused = run("launch", "--on", "tpu", "-f", "job.yaml", "--set", "name=other")
    maintenance_lock.remove_hold(files)
    kept = json.loads(run(*words)[1])

    assert [(each["job"], each["done"]) for each in held] == [(job, "left")]
    assert refused[0] == 3
    assert refused[2].startswith("error: the cluster is being restarted by ada@desk since ")
    assert [(each["job"], each["target"], each["done"]) for each in kept] == [(job, "tpu", "taken_up")]


def test_keep_of_a_cluster_whose_head_is_silent_concludes_nothing(run: Run, head: RayHead) -> None:
    launch(run)
    head.broken = 503

    code, out, err = run("keep", "--once", "--cluster", "main", "--address", head.address, "-o", "json")

    assert (code, json.loads(out)) == (3, [])
    assert "cluster `main` does not answer, nothing was done there" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--cluster", "other"), "no cluster named `other` in stack `marin`"),
        (("--cluster", "main", "--on", "tpu"), "`--cluster` keeps all targets of a cluster, and `--on` names one"),
        (("--address", "http://h:1"), "`--address` and `--stack` belong to `--cluster NAME`"),
    ],
)
def test_keep_with_options_that_do_not_go_together_is_refused(run: Run, words: tuple[str, ...], said: str) -> None:
    code, _, err = run("keep", "--once", *words)

    assert (code, err.splitlines()[0]) == (2, f"error: {said}")
