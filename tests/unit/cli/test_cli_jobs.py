"""status, logs, explain, cancel, retry, fetch, gc and interrupt of jobs, as typed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runtime.client.fetch import FilesDiffer
from runtime.client.jobs.explain import JobFacts, explain
from runtime.client.jobs.handle import JobHandle
from runtime.client.jobs.status import AfterView, AttemptView, read_attempts, read_target
from runtime.client.jobs.targets import OpenTarget
from runtime.end_reasons import EndReason, Explanation
from runtime.errors import InfrastructureFailure
from runtime.jobs import ledger
from runtime.jobs.hosts.local import LocalFiles, LocalHost
from runtime.jobs.ledger import LedgerEntry, NativeJob, RunOutcome
from runtime.jobs.log_follower import LogReader
from runtime.jobs.plan import NativeState, Target, owner_name
from runtime.jobs.spec import JobState, When
from runtime.launchers.local.launcher import LocalLauncher
from runtime.sanitize import cut_lines
from runtime.shim.logs import RankLog, render_gap, split_log
from runtime.shim.processes import list_processes
from runtime.system import system
from tests.copies_support import COMMAND, Copies
from tests.jobs_support import Terminal, Typed, as_somebody_else, folder_for_all, launch_as_before, open_terminal
from tests.shim_support import (
    DAEMON,
    PATIENCE_S,
    is_running,
    lives,
    processes_with,
    shims_with,
    signal_all,
    wait_for,
)

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Terminal]:
    with open_terminal(tmp_path, monkeypatch, capsys) as terminal:
        yield terminal


# status


def test_overview_has_the_jobs_of_this_machine_and_says_once_what_failed_since(run: Terminal) -> None:
    failed = run.finish("exit 3", "--name", "bad")
    running = run.launch("sleep 600", "--name", "long")
    run.wait(running, "running")

    first, second = run("status"), run("status")

    lines = first.out.splitlines()
    assert lines[:2] == ["stack local", ""]
    assert lines[2].split() == ["JOB", "NAME", "STATE", "DONE", "FAILED", "TARGET", "TIME", "LAUNCHED"]
    rows = [line.split()[:3] for line in lines[3:5]]
    assert rows == [[running[:10], "long", "running"], [failed[:10], "bad", "failed"]]
    assert f"1 failed job, 1 since you last looked; why: `runtime explain {failed[:10]}`" in first.out
    assert "1 failed job; why" in second.out


def test_overview_without_jobs_says_nothing_of_them(run: Terminal) -> None:
    assert run("status").out == "stack local\nnothing was submitted yet; `runtime submit --help` shows how\n"


def test_overview_names_the_targets_that_it_does_not_ask(run: Terminal) -> None:
    (run.tree / "runtime.toml").write_text('[targets.hpc]\nkind = "slurm"\n[targets.box]\nkind = "ssh"\n')
    run.finish("true")

    assert run("status").out.splitlines()[-1] == "jobs on box, hpc: not read yet, `runtime status --refresh` asks"


def test_overview_of_a_target_is_its_jobs_alone(run: Terminal) -> None:
    job = run.finish("true")

    said = run("status", "--on", "local")

    assert said.out.splitlines()[0] == "jobs on local: 0 unfinished jobs"
    assert job[:10] in said.out
    assert run("status", "--on", "local", "--failed", "-o", "json").json["jobs"] == []


def test_status_of_a_target_that_does_not_answer_is_an_infrastructure_failure(
    run: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run.tree / "runtime.toml").write_text('[targets.far]\nkind = "ssh"\nhost = "nobody.invalid"\nrecords = "/x"\n')
    monkeypatch.setenv("PATH", "")

    said, read = run("status", "--on", "far"), run("status", "--on", "far", "-o", "json")

    assert (said.code, said.out) == (3, "")
    assert said.err.startswith("error: target `far` does not answer: ")
    assert said.err.endswith("hint: runtime targets check far\n")
    assert (read.code, read.err, read.json["jobs"]) == (3, said.err, [])


def test_backend_that_does_not_answer_is_asked_once_and_what_is_known_is_printed(run: Terminal) -> None:
    commands = run.tree.parent / "bin"
    commands.mkdir()
    silent_now = f"[ ! -e {commands}/sbatch.calls ] || {{ echo Unable to contact slurm controller >&2; exit 1; }}"
    for name, script in (("sbatch", "echo 41"), ("squeue", silent_now)):
        (commands / name).write_text(f"#!/bin/sh\necho called >>{commands}/{name}.calls\n{script}\n")
        (commands / name).chmod(0o755)
    (run.tree / "runtime.toml").write_text(
        f'[targets.hpc]\nkind = "slurm"\nrecords = "{run.tree.parent}/records"\nbin = "{commands}"\n'
    )
    job = run("launch", "--on", "hpc", "--", "true").out.strip()
    silent = (
        "error: target `hpc` does not answer: `squeue` does not answer: Unable to contact slurm controller\n"
        "hint: runtime targets check hpc\n"
    )
    for words, known in (
        (["status", job], "native      41: "),
        (["status", "--on", "hpc"], f"{job[:10]}  true  unknown"),
    ):
        (commands / "squeue.calls").unlink(missing_ok=True)

        said = run(*words)

        assert (said.code, said.err) == (3, silent)
        assert known in said.out
        assert "target `hpc`" not in said.out
        assert (commands / "squeue.calls").read_text() == "called\n"


def test_overview_while_this_machine_does_not_answer_says_so_on_stderr_alone(
    run: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise InfrastructureFailure("no process can be seen")

    job = run.launch("sleep 600")
    monkeypatch.setattr(LocalLauncher, "states", fail)

    said = run("status")

    assert (said.code, said.err) == (0, "target `local` does not answer: no process can be seen\n")
    assert f"{job[:10]}  sh    unknown" in said.out
    assert "does not answer" not in said.out


def test_status_of_one_job_shows_attempts_and_where_things_lie(run: Terminal) -> None:
    job = run.finish("exit $((2 - RUNTIME_ATTEMPT))", "--retries", "1", "--set", "retry.backoff.min=1s")

    said = run("status", job[:8])

    assert said.out.splitlines()[0] == f"{job} · sh · local (local) · succeeded"
    assert f"records     {run.folder(job)}" in said.out
    assert f"`runtime fetch {job[:10]}`, {run.folder(job)}/runs/0/output/aATTEMPT" in said.out
    rows = [line.split() for line in said.out.splitlines() if line.lstrip().startswith(("1 ", "2 "))]
    assert [(row[0], *row[-3:-1]) for row in rows] == [("1", "app_failed", "1"), ("2", "succeeded", "0")]


def test_status_of_an_array_has_counts_a_bar_and_the_runs_that_failed(run: Terminal) -> None:
    job = run.finish("exit {x}", "--grid", "x=0,1,0,2")

    said = run("status", job)

    assert "  succeeded  2" in said.out
    assert "  failed     2" in said.out
    assert "done        [########################] 4 of 4, 100 %" in said.out
    assert run("status", job, "--failed").out == "1\tfailed\tapp_failed\t1\t1\t-\n3\tfailed\tapp_failed\t2\t1\t-\n"


def test_status_of_one_run_shows_its_attempts(run: Terminal) -> None:
    job = run.finish("exit {x}", "--grid", "x=0,1")

    seen = run("status", job, "--index", "1", "-o", "json").json

    assert [(each["index"], each["attempt"], each["reason"]) for each in seen["attempts"]] == [(1, 1, "app_failed")]
    assert run("status", job, "--index", "2").err.splitlines()[-1] == "  known runs: 0 to 1"


def test_names_in_a_record_that_only_look_like_numbers_stop_no_verb(run: Terminal) -> None:
    job = run.finish("echo said; exit 3")
    record, odd = run.folder(job), "\u00b2"
    for name in (
        f"runs/{odd}/a0001",
        f"runs/0/a{odd}",
        f"lock.{odd}",
        f"cancel.{odd}",
        f"epochs/{odd}",
        f"runs/0/{odd}",
    ):
        (record / name).mkdir(parents=True, exist_ok=True)

    for words in (
        ["status", job],
        ["logs", job],
        ["explain", job],
        ["status"],
        ["fetch", job],
        ["gc"],
        ["cancel", job],
    ):
        said = run(*words)
        assert said.code in (0, 1), (words, said.err)
        assert "Traceback" not in said.err
        assert "ValueError" not in said.err
    assert run("status", job, "-o", "json").json["state"] == "failed"


def test_attempt_without_a_word_is_lost_once_another_began(tmp_path: Path) -> None:
    files = LocalFiles(str(tmp_path))
    for number in (1, 2):
        files.write(f"jobs/j-1/runs/0/a{number:04d}/start.json", b'{"host": "n4", "at": 1}')

    attempts = read_attempts(files, "j-1", 0)

    silent = "it left no word, and the next one began"
    assert [(each.attempt, each.reason, each.message) for each in attempts] == [(1, "lost", silent), (2, None, "")]


def test_attempt_that_was_stopped_is_named_by_what_kubernetes_counted_before_the_next(tmp_path: Path) -> None:
    files = LocalFiles(str(tmp_path))
    for number, failures in ((1, 0), (2, 0), (3, 1)):
        start = {"native": "lab/j", "at": 1.0, "failures": failures}
        files.write(f"jobs/j-1/runs/0/a{number:04d}/start.json", json.dumps(start).encode())
        end = {"reason": "stopped", "code": 143, "at": 2.0, "message": "asked to stop by SIGTERM"}
        files.write(f"jobs/j-1/runs/0/a{number:04d}/end.stopped.143", json.dumps(end).encode())

    assert [each.reason for each in read_attempts(files, "j-1", 0)] == ["preempted", "lost", "stopped"]


def test_watch_of_a_job_ends_with_it(run: Terminal) -> None:
    job = run.launch("sleep 0.5")

    assert run("status", job, "--watch").out.splitlines()[-1] == f"{job}: succeeded"


def test_status_of_an_unknown_job_says_which_there_are(run: Terminal) -> None:
    job = run.finish("true")

    said = run("status", "j-ffffffff")

    assert said.code == 2
    assert said.err.splitlines()[0] == "error: no job named `j-ffffffff`"
    assert job in said.err


def test_last_is_the_newest_of_ones_jobs_and_experiments(run: Terminal) -> None:
    run.finish("echo first")
    job = run.finish("echo second")

    assert run("status", "last", "-o", "json").json["job"] == job
    assert run("logs", "last").out == "second\n"
    assert run("explain", "last").out.startswith(f"job `{job[:10]}` succeeded")

    assert run("submit", "--experiment", "sweep", "--", "true").code == 0

    assert run("status", "last", "-o", "json").json["experiment"] == "sweep"


def test_last_does_not_mean_a_job_that_was_removed(run: Terminal) -> None:
    job = run.finish("true")
    wait_for(lambda: not processes_with(job), "the shim's end")

    assert run("gc", "--older-than", "0s", "--yes").code == 0

    assert run("status", "last").err.splitlines()[0] == (
        "error: `last` means your newest experiment or job, and there is none yet"
    )


def test_last_where_there_is_nothing_yet_says_how_to_begin(run: Terminal) -> None:
    said = run("status", "last")

    assert (said.code, said.err.splitlines()) == (
        2,
        [
            "error: `last` means your newest experiment or job, and there is none yet",
            "hint: `runtime submit --help` and `runtime launch --help` show how to begin one",
        ],
    )


def test_beginning_of_an_id_that_is_too_short_is_unknown_and_the_jobs_are_named(run: Terminal) -> None:
    job = run.finish("true")

    said = run("status", "j-")

    assert (said.code, said.err.splitlines()[:2]) == (2, ["error: no job named `j-`", f"  known jobs: {job}"])


def test_status_with_an_index_of_something_else_is_refused(run: Terminal) -> None:
    assert run("status", "sweep", "--index", "1").code == 2
    assert run("status", "sweep", "--on", "local").code == 2


# logs


def test_logs_of_a_job_are_of_all_attempts_or_of_one(run: Terminal) -> None:
    job = run.finish("echo $RUNTIME_ATTEMPT; [ $RUNTIME_ATTEMPT = 2 ] || exit 75")

    assert run("logs", job).out == "1\n2\n"
    assert run("logs", job, "--attempt", "2").out == "2\n"
    assert run("logs", job, "--attempt", "3").code == 2
    assert run("logs", job, "--attempt", "x").err.splitlines()[0] == "error: `x` is no valid attempt"


def test_logs_of_a_job_that_printed_nothing_say_so_beside_the_log(run: Terminal) -> None:
    job = run.finish("true")

    said = run("logs", job)

    assert (said.out, said.err) == ("", f"nothing was printed; `runtime explain {job[:10]}` says how it stands\n")


def test_logs_of_ranks_and_runs(run: Terminal) -> None:
    ranks = run.finish("echo $RUNTIME_RANK", "--nodes", "2")
    array = run.finish("echo {x}", "--grid", "x=7,8")

    assert run("logs", ranks, "--rank", "1").out == "1\n"
    assert run("logs", ranks, "--rank", "2").code == 2
    assert run("logs", array, "--index", "1").out == "8\n"
    assert run("logs", array).err == "-- run 0 of 2; `--index` shows another\n"
    assert run("logs", array, "--index", "9").code == 2


def test_logs_followed_over_an_array_name_the_run_of_each_line(run: Terminal) -> None:
    job = run.launch("echo a{x}; sleep 0.3; printf b{x}", "--grid", "x=0,1")

    said = run("logs", "-f", job)

    assert sorted(said.out.splitlines()) == ["[0] a0", "[0] b0", "[1] a1", "[1] b1"]


def test_logs_followed_and_interrupted_leave_the_job_alone(run: Terminal) -> None:
    job = run.launch("echo here; sleep 600")
    words = [sys.executable, "-m", "runtime", "logs", "-f", job]
    following = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert following.stdout is not None
    assert following.stdout.readline() == "here\n"

    following.send_signal(signal.SIGINT)

    assert "detached, the job goes on" in following.communicate(timeout=PATIENCE_S)[1]
    assert following.returncode == 130
    assert run("status", job, "-o", "json").json["state"] == "running"


def test_logs_of_a_task_take_no_rank(run: Terminal) -> None:
    assert run("logs", "t-3f2a", "--rank", "1").code == 2


# cancel


def test_cancel_ends_the_job_and_says_that_nothing_is_left(run: Terminal) -> None:
    job = run.launch("sleep 671 & sleep 672")
    run.wait(job, "running")

    said = run("cancel", job)

    assert (said.code, said.out) == (0, f"{job}\tcancelled\tnothing of it is left\n")
    assert run("status", job, "-o", "json").json["state"] == "cancelled"
    assert run("cancel", job).out == f"{job}\tcancelled\tit had been cancelled before\n"


def test_cancel_of_an_array_asks_first_and_of_one_run_does_not(run: Terminal) -> None:
    job = run.launch("sleep 600", "--seeds", "2")
    run.wait(job, "running")

    assert run("cancel", job).code == 2
    assert run("cancel", job, "--index", "1").code == 0
    wait_for(lambda: run("status", job, "-o", "json").json["totals"]["cancelled"] == 1, "the end of run 1")
    assert run("cancel", job, "--yes").code == 0
    assert run("status", job, "-o", "json").json["totals"]["cancelled"] == 2


def test_cancel_of_several_of_which_one_is_refused_cancels_none(run: Terminal) -> None:
    array = run.launch("sleep 600", "--seeds", "6")
    short = run.launch("sleep 601", "--seeds", "2")

    run.wait(array, "running")
    for words in (
        [array, short, "--index", "5"],  # the second has no run 5
        [array, "j-ffffffffffffffffffffffff", "--yes"],
        [array, short],  # nobody answers the question about the first
        [short, array, "--index", "1", "--release"],
    ):
        refused = run("cancel", *words)

        assert (refused.code, refused.out) == (2, "")
    read = run("status", array, "-o", "json").json
    assert read["totals"]["cancelled"] == 0
    assert not (run.folder(array) / "cancel").exists()
    assert not [*run.folder(array).glob("cancel.*"), *run.folder(short).glob("cancel*")]
    done = run("cancel", array, short, array[:12], "--yes", "-o", "json")
    assert [row["name"] for row in done.json] == [array, short]


def test_cancel_that_fails_halfway_prints_what_was_done_and_then_the_error(
    run: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [run.launch(f"sleep {600 + number}") for number in range(3)]
    cancel = JobHandle.cancel

    def fail(job: JobHandle, **words: Any) -> list[str]:
        if job.id == jobs[1]:
            raise InfrastructureFailure("the target went away")
        return [*cancel(job, **words), "a stray"]

    monkeypatch.setattr(JobHandle, "cancel", fail)

    said = run("cancel", *jobs, "-o", "json")

    assert (said.code, [row["name"] for row in said.json]) == (3, [jobs[0]])
    assert said.err == "left over: a stray\nerror: the target went away\n"
    monkeypatch.undo()
    monkeypatch.setenv("RUNTIME_DATA_DIR", str(run.data))
    assert run("cancel", *jobs[1:]).code == 0


def test_runs_that_wait_for_a_slot_are_pending_and_once_cancelled_stay_so(run: Terminal) -> None:
    (run.tree / "runtime.toml").write_text('[targets.two]\nkind = "local"\nslots = 2\n')
    job = run("launch", "--on", "two", "--seeds", "8", "--", "sh", "-c", "sleep 600").out.strip()
    for begun in ("0", "1"):
        wait_for((run.folder(job) / "runs" / begun / "a0001").exists, f"run {begun}")

    before = run("status", job, "-o", "json").json
    overview = run("status", "--on", "two", "-o", "json").json["jobs"]
    why = run("explain", job, "--index", "5", "-o", "json").json
    run("cancel", job, "--index", "7")
    after = run("status", job, "-o", "json").json

    assert (before["state"], before["totals"]["running"], before["totals"]["pending"]) == ("running", 2, 6)
    assert [each["totals"]["pending"] for each in overview] == [6]
    assert "other runs of the job go first" in json.dumps(why)
    counted = [after["totals"][name] for name in ("running", "pending", "cancelled")]
    assert counted == [2, 5, 1]
    assert run("cancel", job, "--yes").code == 0


def test_run_that_was_cancelled_before_it_began_is_so_while_others_are_retried(run: Terminal) -> None:
    (run.tree / "runtime.toml").write_text('[targets.one]\nkind = "local"\nslots = 1\n')
    again = run.tree.parent / "again"
    script = f"[ -e {again} ] && exec sleep 600; touch {again}; sleep 600"
    job = run("launch", "--on", "one", "--seeds", "3", "--", "sh", "-c", script).out.strip()
    wait_for(again.exists, "the first run")
    run("cancel", job, "--index", "2")
    kill_shim(run, job)
    run.wait(job, "failed")

    assert run("retry", job, "--index", "0", "--yes").code == 0
    wait_for((run.folder(job) / "runs/0/a0002").exists, "the second attempt")

    states = {each["index"]: each["state"] for each in run("status", job, "-o", "json").json["indices"]}
    assert states[2] == "cancelled"
    assert run("cancel", job, "--yes").code == 0


def test_cancel_that_leaves_something_says_what_with_exit_code_3(
    run: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = run.launch("sleep 600")
    monkeypatch.setattr(LocalLauncher, "cancel", lambda *_: ["the shim still runs"])

    said = run("cancel", job)

    assert (said.code, said.out, said.err) == (
        3,
        f"{job}\tcancelled\t1 left over\n",
        "left over: the shim still runs\n",
    )


@pytest.mark.parametrize(
    "script",
    ["kill -STOP $PPID; sleep 600", "trap '' TERM; while :; do kill -STOP $PPID; sleep 0.01; done"],
    ids=["once", "over and over"],
)
def test_cancel_ends_a_job_whose_command_stops_its_shim(
    run: Terminal, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    monkeypatch.setattr("runtime.launchers.processes.base.WAKE_S", 0.5)
    job = run.launch(script, "--set", "grace_period=0s")
    wait_for(lambda: is_stopped(run, job), "the stop of the shim")

    said = run("cancel", job)

    assert (said.code, said.out) == (0, f"{job}\tcancelled\tnothing of it is left\n")
    assert processes_with(job) == []
    assert run("status", job, "-o", "json").json["state"] == "cancelled"


def is_stopped(run: Terminal, job: str) -> bool:
    table = list_processes()
    return any(table[pid][2] == "T" for pid in processes_with(f"{run.folder(job)}/shim.py") if pid in table)


def test_cancel_ends_what_a_killed_shim_left_running(run: Terminal) -> None:
    # Silent, because the pipe for its output ends with its shim.
    job = run.launch("sleep 600")
    wait_for((run.folder(job) / "runs/0/a0001/processes.json").exists, "the command")
    kill_shim(run, job)
    left = json.loads((run.folder(job) / "runs/0/a0001/processes.json").read_text())[0]["pid"]
    before = is_running(left)

    said = run("cancel", job)

    assert (said.code, said.out) == (0, f"{job}\tcancelled\tnothing of it is left\n")
    assert (before, is_running(left)) == (True, False)
    assert run("status", job, "-o", "json").json["state"] == "cancelled"
    assert run("cancel", job).out == f"{job}\tcancelled\tit had been cancelled before\n"


FLOOD = "i=0; while [ $i -lt 3000 ]; do printf '%099d\\n' $i; i=$((i+1)); done"
"""Prints 300 kB."""


def test_log_is_kept_to_its_limit_from_the_flag_on(run: Terminal) -> None:
    job = run.finish(FLOOD, "--log-limit", "64KiB")

    said = run("logs", job)

    assert len(said.out) <= 65_536
    assert "bytes are left out here, as the log outgrew its limit]" in said.out
    assert said.out.endswith(f"{2999:099d}\n")


def test_artifacts_of_a_job_are_captured_listed_brought_home_and_reused(run: Terminal) -> None:
    script = "mkdir -p out; echo {x} > out/w"
    words = ["launch", "--on", "local", "--name", "train", "--grid", "x=1,22", "--capture", "./out:model", "--follow"]
    assert run(*words, "--", "sh", "-c", script).code == 0

    listed = run("artifacts", "list", "train", "-o", "json").json
    assert [(each["tag"], each["index"], each["state"], each["size_bytes"]) for each in listed] == [
        ("model", 0, "final", 2),
        ("model", 1, "final", 3),
    ]
    table = run("artifacts", "list", "train.1").out
    assert [line.split("\t")[:5] for line in table.splitlines()] == [["model", "1", "final", "1", "3B"]]
    said = run("artifacts", "get", "train", "model", "home")
    assert (said.code, "name the run, such as" in said.err) == (2, True)
    assert run("artifacts", "get", "train.1", "model", "home").out == "home\n"
    assert Path("home/w").read_text() == "22\n"
    done = run("launch", "--on", "local", "--reuse", "train.1/model:base", "--follow", "--", "cat", "artifacts/base/w")
    assert (done.code, done.out) == (0, "22\n")


def test_artifacts_that_were_put_go_before_those_of_a_job_of_the_same_name_everywhere(run: Terminal) -> None:
    words = ["--name", "sac", "--capture", "out:model", "--follow"]
    assert run("launch", "--on", "local", *words, "--", "sh", "-c", "printf job > out").code == 0
    Path("theirs").write_text("put")
    assert run("artifacts", "put", "theirs", "--tag", "model", "-e", "sac").code == 0

    got = run("artifacts", "get", "sac", "model", "home")
    used = run("launch", "--on", "local", "--reuse", "sac/model:m", "--follow", "--", "cat", "artifacts/m")

    assert "this is the experiment, `--on TARGET` means the job" in got.err
    assert (Path("home/theirs").read_text(), used.out) == ("put", "put")
    assert [each["state"] for each in run("artifacts", "list", "sac", "-o", "json").json] == ["put"]
    assert run("artifacts", "get", "sac", "model", "of-job", "--on", "local").out == "of-job/out\n"


def test_job_without_artifacts_says_how_to_save_some(run: Terminal) -> None:
    run("launch", "--on", "local", "--name", "plain", "--follow", "--", "true")

    said = run("artifacts", "list", "plain")

    assert (said.code, said.out) == (0, "")
    assert said.err.endswith("nothing of plain has an artifact; `runtime launch --capture PATH:TAG` saves them\n")
    assert run("artifacts", "list", "plain.7").code == 2
    assert "`--on` is for the jobs of a target" in run("artifacts", "list", "No Job", "--on", "local").err


def test_log_limit_that_is_too_small_is_refused(run: Terminal) -> None:
    said = run("launch", "--on", "local", "--log-limit", "1KiB", "--", "true")

    assert said.code == 2
    assert "has `log_limit` 1KiB, expected 64KiB or more" in said.err


def test_log_that_is_written_over_is_followed_on_with_a_line_for_what_was_missed(tmp_path: Path) -> None:
    log, files = RankLog(str(tmp_path / "log"), 65_536), LocalFiles(str(tmp_path))
    reader = LogReader(files, "log", 65_536)
    seen = []
    for turn in range(40):
        log.add(b"".join(b"%09d\n" % number for number in range(turn * 1000, turn * 1000 + 1000)))
        log.flush()
        seen.append(b"".join(reader.read()))
    log.close()

    assert b"".join(seen) == b"".join(b"%09d\n" % number for number in range(40_000))
    late = b"".join(LogReader(files, "log", 65_536).read())
    missed = 400_000 - len(late) + len(render_gap(0))
    assert late == (tmp_path / "log").read_bytes()
    assert render_gap(missed) in late


def test_follower_that_comes_too_late_for_the_end_says_how_much_it_missed(tmp_path: Path) -> None:
    log, files = RankLog(str(tmp_path / "log"), 65_536), LocalFiles(str(tmp_path))
    reader = LogReader(files, "log", 65_536)
    log.add(b"x" * 60_000)
    first = b"".join(reader.read())
    log.add(b"y" * 100_000)
    log.close()

    second = b"".join(reader.read())

    tail = split_log(65_536)[1]
    assert first == b"x" * 60_000
    assert second == render_gap(100_000 - tail) + b"y" * tail


def test_evidence_of_a_line_of_megabytes_is_cut_and_a_pipe_gets_all_of_it(run: Terminal) -> None:
    job = run.finish("head -c 3000000 /dev/zero | tr '\\0' x; exit 3")

    explained, logged = run("explain", job), run("logs", job)

    assert max(map(len, explained.out.splitlines())) < 1000
    assert len(logged.out) == 3_000_000


def test_line_of_megabytes_is_cut_on_a_terminal() -> None:
    pieces = [b"short\nlo", b"n" * 3_000_000, b"g\nnext\n", b"x" * 20_000]

    shown = b"".join(cut_lines(iter(pieces))).split(b"\n")

    assert shown[0::2] == [b"short", b"next"]
    assert shown[1] == b"lo" + b"n" * 9_998 + b" [2990003 more bytes of this line]"
    assert shown[3] == b"x" * 10_000 + b" [10000 more bytes of this line]"


def kill_shim(run: Terminal, job: str) -> None:
    """Kill the job's shim and its copies, of which it may make more meanwhile; return when all have ended."""

    def end() -> bool:
        shims = processes_with(f"{run.folder(job)}/shim.py")
        signal_all(shims)
        return not shims

    wait_for(end, "the end of the shim")


def launch_daemon(run: Terminal, *words: str) -> tuple[str, Path]:
    """Launch a job with a process in its own session; return the job's id, and the file with the process id."""
    said = run.tree.parent / "daemon.pid"
    run.tree.parent.joinpath("daemon.py").write_text(DAEMON)
    job = run.launch(f"{sys.executable} {run.tree.parent}/daemon.py {said}; exec sleep 600", *words)
    wait_for(said.exists, "the daemon")
    return job, said


@pytest.mark.parametrize("verb", [["status"], ["status", "JOB"], ["cancel", "JOB"], ["gc", "--yes"]], ids=" ".join)
def test_daemon_of_a_killed_shim_is_ended_by_whoever_looks(run: Terminal, verb: list[str]) -> None:
    job, said = launch_daemon(run)
    kill_shim(run, job)
    before = lives(said)

    done = run(*(job if word == "JOB" else word for word in verb))

    assert (done.code, before) == (0, True)
    assert not lives(said)


@pytest.mark.parametrize("verb", [["cancel", "JOB"], ["gc", "--older-than", "0s", "--yes"]], ids=" ".join)
def test_tree_of_a_killed_shim_is_removed(run: Terminal, monkeypatch: pytest.MonkeyPatch, verb: list[str]) -> None:
    (run.tree.parent / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", str(run.tree.parent / "tmp"))
    job = run.launch("kill -9 $PPID")
    # If something of the job still ran, a command that looks would clean it up, tree included.
    wait_for(lambda: not processes_with(str(run.folder(job))), "the end of all of it")
    monkeypatch.delenv("TMPDIR")
    before = list((run.tree.parent / "tmp").glob("job-*/tree/main.py"))
    if verb[0] == "gc":
        (run.folder(job) / "cancel").touch()  # else it can go on

    done = run(*(job if word == "JOB" else word for word in verb))

    assert (done.code, len(before)) == (0, 1)
    assert list((run.tree.parent / "tmp").glob("job-*")) == []


def test_daemon_of_a_job_that_lives_is_left_alone(run: Terminal) -> None:
    job, said = launch_daemon(run)

    run("status")
    run("status", job)
    run("gc", "--older-than", "0s", "--yes")

    assert lives(said)
    assert run("cancel", job).code == 0
    assert not lives(said)


@pytest.mark.parametrize("verb", [["status"], ["status", "JOB"], ["gc", "--yes"]], ids=" ".join)
def test_secrets_of_a_shim_that_was_killed_while_it_ran_go_once_the_job_has_ended(
    run: Terminal, monkeypatch: pytest.MonkeyPatch, verb: list[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "canary-4711")
    job = run.launch("[ -e ../now ] || sleep 600", "--secret", "HF_TOKEN=env://HF_TOKEN")
    held = run.folder(job) / "secrets" / "HF_TOKEN"
    run.wait(job, "running")
    run("status")
    while_it_runs = held.exists()
    kill_shim(run, job)

    assert run(*(job if word == "JOB" else word for word in verb)).code == 0

    assert while_it_runs
    assert not held.parent.exists()


def test_secrets_of_a_shim_that_was_killed_after_its_result_go_at_the_next_look(
    run: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "canary-4711")
    job = run.finish("true", "--secret", "HF_TOKEN=env://HF_TOKEN")
    held = run.folder(job) / "secrets" / "HF_TOKEN"

    for verb in (["status"], ["status", job], ["gc", "--yes"]):
        held.parent.mkdir()
        held.write_text("canary-4711")

        assert run(*verb).code == 0

        assert not held.parent.exists(), verb


def test_lost_job_whose_secrets_went_reads_them_again_when_it_is_launched_again(
    run: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "canary-4711")
    words = ("--secret", "HF_TOKEN=env://HF_TOKEN")
    script = 'echo "${#HF_TOKEN}"; [ $RUNTIME_ATTEMPT = 2 ] || sleep 600'
    job = run.launch(script, *words)
    wait_for(lambda: b"11" in run("logs", job).out.encode(), "the first attempt")
    kill_shim(run, job)
    run.wait(job, "failed")
    gone = not (run.folder(job) / "secrets").exists()

    assert run.launch(script, *words) == job

    run.wait(job, "succeeded")
    assert (gone, run("logs", job, "--attempt", "2").out) == (True, "11\n")


def test_job_of_another_is_acted_on_only_where_that_is_meant(run: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    job = run.launch("sleep 600")
    intent = run.folder(job) / "intent.json"
    intent.write_text(intent.read_text().replace(f'"owner": "{owner_name()}"', '"owner": "ada"'))

    refused = run("cancel", job)

    assert refused.code == 2
    assert refused.err.splitlines()[0] == f"error: job `{job}` is `ada`'s, and you are `{owner_name()}`"
    assert run("cancel", job, "--others").code == 0
    assert run("gc", "--older-than", "0s", "--yes").out == ""
    assert run("retry", job).code == 2
    assert run("gc", "--older-than", "0s", "--others", "--dry-run").out.split("\t")[1] == job


def test_job_that_only_its_owner_may_look_into_disturbs_nobody_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with folder_for_all() as folder, open_terminal(folder, monkeypatch, capsys) as run:
        theirs, mine = run.finish("true", "--name", "theirs"), run.finish("true", "--name", "mine")

        with as_somebody_else(run.data / "jobs", hidden=f"jobs/{theirs}", shown=f"jobs/{mine}"):
            listed = run("status", "--on", "local", "-o", "json")
            asked = run("status", theirs)
            cleared = run("gc", "--older-than", "0s", "--dry-run")

        assert [job["job"] for job in listed.json["jobs"]] == [mine]
        assert asked.code == 2
        assert asked.err.splitlines()[0] == (
            f"error: job `{theirs}` is another user's, and its folder is open to nobody else"
        )
        assert (cleared.code, theirs in cleared.out) == (0, False)


def test_files_that_a_crash_left_empty_disturb_no_other_job(run: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    launch_as_before(monkeypatch)
    broken, mine = run.finish("false", "--name", "broken"), run.finish("true", "--name", "mine")
    intent = (run.folder(broken) / "intent.json").read_bytes()
    for name in ("intent.json", "runs/0/result", "runs/0/a0001/start.json"):
        (run.folder(broken) / name).write_bytes(b"")

    assert [job["job"] for job in run("status", "--on", "local", "-o", "json").json["jobs"]] == [mine]
    asked = run("status", broken)
    assert (asked.code, asked.err.splitlines()[0]) == (
        2,
        f"error: nothing can be told of job `{broken}`: `{run.folder(broken)}/intent.json` is damaged",
    )
    assert run("gc", "--older-than", "0s", "--dry-run", "-o", "json").json[0]["name"] == mine
    (run.folder(broken) / "intent.json").write_bytes(intent)
    assert run("status", broken, "-o", "json").json["attempts"][0]["host"] is None


def test_cancel_of_a_run_that_nothing_holds_cannot_release_it(run: Terminal) -> None:
    job = run.launch("sleep 600", "--seeds", "2")

    assert run("cancel", job, "--index", "1", "--release").code == 2
    assert not (run.folder(job) / "cancel.1").exists()


# explain


def test_explain_of_a_failed_job_has_the_reason_the_log_and_the_next_step(run: Terminal) -> None:
    job = run.finish("echo boom; exit 4")

    said = run("explain", job)

    assert said.out.splitlines()[0] == f"job `{job[:10]}` failed: the command failed with exit code 4"
    assert "  log: boom" in said.out
    assert said.out.splitlines()[-1] == f"next: runtime logs {job[:10]}"


def test_explain_of_a_python_failure_has_the_exception_with_file_and_line(run: Terminal) -> None:
    (run.tree / "train.py").write_text("def main():\n    raise ValueError('no column')\nmain()\n")
    job = run("launch", "--on", "local", "--", sys.executable, "train.py").out.strip()
    run.wait(job, "failed")

    assert run("explain", job).out.splitlines()[0] == (
        f"job `{job[:10]}` failed: the command failed with exit code 1: ValueError: no column, at train.py:2, in main"
    )


def test_explain_and_status_name_the_signal_that_ended_a_command(run: Terminal) -> None:
    job = run.finish("kill -SEGV $$")

    said = run("explain", job).out
    assert said.splitlines()[0] == f"job `{job[:10]}` failed: the command failed with exit code 139 (SIGSEGV)"
    assert "ended as app_failed, exit code 139 (SIGSEGV)" in said
    assert "139 SIGSEGV" in run("status", job).out
    assert run("status", job, "-o", "json").json["attempts"][0]["exit_code"] == 139


def test_explain_of_a_success_says_how_its_outputs_come_home(run: Terminal) -> None:
    job = run.finish("true")

    assert run("explain", job).out.splitlines()[-1] == f"next: runtime fetch {job[:10]}"


def test_explain_of_a_running_array_says_that_it_runs_and_why_the_rest_waits() -> None:
    states = [JobState.SUCCEEDED, JobState.RUNNING, JobState.PENDING, JobState.PENDING]
    said = [NativeState(native_id=f"7_{n}", index=n, state=each, raw=each.upper()) for n, each in enumerate(states)]
    outcome = RunOutcome(job=entry().id, index=0, reason=EndReason.SUCCEEDED, code=0, attempt=1)
    status = ledger.judge(entry(indices=4, outcomes={0: outcome}), said, indices=True)
    facts = JobFacts(status=status, index=2, native=said[2], backend=Explanation("its turn has not come", (), None))

    counted = "job `j-01234567` runs: 2 pending, 1 running, 1 succeeded of 4"
    assert explain(facts).sentence == f"{counted}; run 2 is pending: its turn has not come"
    assert explain(replace(facts, backend=None)).sentence == counted
    assert explain(replace(facts, one_of_many=True)).sentence == (
        "run 2 of job `j-01234567` is pending: its turn has not come"
    )


def test_explain_of_an_array_counts_reasons_and_tells_the_first(run: Terminal) -> None:
    job = run.finish("exit {x}", "--grid", "x=0,5,6")

    said = run("explain", job, "-o", "json").json

    assert said["kind"] == "job"
    assert said["sentence"] == (
        f"job `{job[:10]}` failed: 1 succeeded, 2 failed of 3 (2 app_failed); run 1: the command failed with exit code 5"
    )
    assert run("explain", job, "--index", "0").out.startswith(f"run 0 of job `{job[:10]}` succeeded")


def entry(**changes: Any) -> LedgerEntry:
    native = NativeJob(name="n", native_id="7", part=0, epoch=1, at=NOW)
    fields: dict[str, Any] = {
        "id": "j-0123456789abcdef01234567",
        "name": "train",
        "owner": "ada",
        "target": "hpc",
        "kind": "slurm",
        "launched_at": NOW,
        "snapshot": None,
        "indices": 1,
        "natives": (native,),
        "cancelled": False,
        "cancelled_indices": frozenset(),
        "outcomes": {},
    }
    return LedgerEntry(**(fields | changes))


def said_of(reason: EndReason, **changes: Any) -> JobFacts:
    job = entry()
    outcome = RunOutcome(job=job.id, index=0, reason=reason, code=1, attempt=1)
    status = ledger.judge(replace(job, outcomes={0: outcome}), [], indices=True)
    return JobFacts(status=status, index=0, **changes)


@pytest.mark.parametrize("reason", [each for each in EndReason if each not in (EndReason.EXPIRED, EndReason.SUCCEEDED)])
def test_explain_has_a_sentence_and_a_next_step_for_every_reason(reason: EndReason) -> None:
    found = explain(said_of(reason))

    assert found.sentence.startswith("job `j-01234567` ")
    assert found.hint
    assert "{" not in found.sentence + found.hint


@pytest.mark.parametrize(("earlier", "often"), [("lost", True), ("preempted", False)])
def test_explain_of_the_third_loss_in_a_row_says_that_it_is_the_last(earlier: str, often: bool) -> None:
    reasons = [EndReason(earlier), EndReason.LOST, EndReason.LOST]
    told = {"native": None, "host": None, "started_at": None, "ended_at": None, "exit_code": None, "message": ""}
    attempts = [AttemptView(index=0, attempt=at, reason=each, **told) for at, each in enumerate(reasons, 1)]

    sentence = explain(said_of(EndReason.LOST, attempts=attempts)).sentence

    assert ("went without a word 3 times in a row, after which a run ends: neither" in sentence) is often
    assert ("went without a word: neither" in sentence) is not often


def test_explain_of_a_waiting_job_is_what_the_backend_says() -> None:
    waiting = NativeState(native_id="7", index=None, state=JobState.PENDING, raw="PENDING", message="Resources")
    status = ledger.judge(entry(), [waiting], indices=True)
    facts = JobFacts(
        status=status, index=0, native=waiting, backend=Explanation("it waits for GPUs", ("4 of 4 taken",), "wait")
    )

    found = explain(facts)

    assert (found.sentence, found.evidence[:2], found.hint) == (
        "job `j-01234567` is pending: it waits for GPUs",
        ("4 of 4 taken", "slurm says of 7: PENDING, Resources"),
        "wait",
    )
    assert explain(replace(facts, backend=None)).sentence == "job `j-01234567` waits on `hpc`: Resources"


@pytest.mark.parametrize(
    ("state", "when", "said"),
    [
        (JobState.CANCELLED, When.OK, "never ran: it comes after `j-fedcba98`, which failed (oom)"),
        (JobState.FAILED, When.OK, "never ran: it comes after `j-fedcba98`, which failed (oom)"),
        (JobState.PENDING, When.OK, "will never run: it comes after `j-fedcba98`, which failed (oom)"),
    ],
)
def test_explain_of_a_job_whose_dependency_failed_names_that_job(state: JobState, when: When, said: str) -> None:
    native = NativeState(native_id="7", index=None, state=state, reason=EndReason.CANCELLED, raw="CANCELLED")
    status = ledger.judge(entry(), [native], indices=True)
    other = AfterView(job="j-fedcba9876543210", when=when, state=JobState.FAILED, reason=EndReason.OOM, hopeless=True)
    facts = JobFacts(status=status, index=0, native=native, after=(other,))

    found = explain(facts)

    assert found.sentence == f"job `j-01234567` {said}"
    assert found.hint == "runtime explain j-fedcba98"
    assert explain(replace(facts, status=ledger.judge(entry(cancelled=True), [native], indices=True), cancelled_by="ada")).sentence == (
        "job `j-01234567` was cancelled by ada" if state.terminal else "job `j-01234567` waits on `hpc`"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("when", "state", "reason", "said"),
    [
        (When.OK, JobState.RUNNING, None, "`j-fedcba98`, which is running"),
        (When.OK, JobState.CANCELLED, EndReason.CANCELLED, "`j-fedcba98`, which was cancelled"),
        (When.NOTOK, JobState.SUCCEEDED, EndReason.SUCCEEDED, "the failure of `j-fedcba98`, which succeeded"),
        (When.ANY, JobState.PENDING, None, "the end of `j-fedcba98`, which is pending"),
        (When.OK, None, None, "`j-fedcba98`, of which nothing can be read"),
    ],
)
def test_what_a_job_comes_after_is_told_with_how_that_stands(
    when: When, state: JobState | None, reason: EndReason | None, said: str
) -> None:
    other = AfterView(job="j-fedcba9876543210", when=when, state=state, reason=reason, hopeless=False)
    waiting = NativeState(native_id="7", index=None, state=JobState.PENDING, raw="PENDING")
    status = ledger.judge(entry(), [waiting], indices=True)

    assert (
        f"it comes after {said}" in explain(JobFacts(status=status, index=0, native=waiting, after=(other,))).evidence
    )


def test_status_and_explain_read_the_jobs_that_a_job_comes_after_until_it_begins(
    run: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch_as_before(monkeypatch)
    monkeypatch.setitem(LocalLauncher.keeps, "after", LocalLauncher.keeps["command"])  # type: ignore[arg-type]
    failed, gone, job = run.finish("exit 3"), f"j-{'0' * 24}", ""
    job = run.finish("true", "--after", failed, "--after", f"any:{gone}")
    begun = run("status", job, "-o", "json").json["after"]
    for path in (next((run.data / "jobs" / "done").glob(f"{job}.*")), run.folder(job) / "runs"):
        path.rename(run.tree / path.name)

    seen = run("status", job).out
    said = run("explain", job).out.splitlines()

    assert begun == []
    assert f"`{failed[:10]}`, which failed (app_failed)" in seen
    assert said[0] == f"job `{job[:10]}` never ran: it comes after `{failed[:10]}`, which failed (app_failed)"
    assert f"  it comes after the end of `{gone[:10]}`, of which nothing can be read" in said
    assert said[-1] == f"next: runtime explain {failed[:10]}"


def test_explain_says_nothing_twice() -> None:
    waiting = NativeState(native_id="7", index=None, state=JobState.PENDING, raw="Pending", message="0/1 nodes fit")
    status = ledger.judge(entry(), [waiting], indices=True)

    found = explain(
        JobFacts(status=status, index=0, native=waiting, backend=Explanation("no node: 0/1 nodes fit", (), None))
    )

    assert found.evidence == ("slurm says of 7: Pending",)


def test_explain_tells_what_an_attempt_said_with_the_attempt_alone() -> None:
    ended = NativeState(native_id="7", index=None, state=JobState.FAILED, raw="Error/1", message="GPU 0 is full")
    attempt = AttemptView(
        index=0,
        attempt=1,
        native="7",
        host="n1",
        started_at=NOW,
        ended_at=NOW,
        reason=EndReason.NO_CAPACITY,
        exit_code=1,
        message="GPU 0 is full",
    )
    facts = said_of(EndReason.NO_CAPACITY, native=ended)

    assert explain(facts).evidence == ("slurm says of 7: Error/1, GPU 0 is full",)
    assert explain(replace(facts, attempts=(attempt,))).evidence == (
        "slurm says of 7: Error/1",
        "attempt 1 on n1 ended as no_capacity, exit code 1: GPU 0 is full",
    )


def test_explain_of_a_command_that_is_not_there_says_what_to_do_about_it(run: Terminal) -> None:
    job = run("launch", "--on", "local", "--", "no-such-program").out.split()[0]
    run.wait(job, "failed")

    said = run("explain", job).out.splitlines()

    assert said[0] == (
        f"job `{job[:10]}` failed: it could not be prepared: cannot start no-such-program: No such file or directory"
    )
    assert said[-1] == "next: name a program that is there, or bring it with `environment`"


def test_explain_of_a_command_that_cannot_be_started_says_why(run: Terminal) -> None:
    plain = run.tree / "plain"
    plain.write_text("no program")
    said = {}
    for name, words in {"long": ("true", "x" * 200_000), "plain": (str(plain),)}.items():
        job = run("launch", "--on", "local", "--", *words).out.split()[0]
        run.wait(job, "failed")
        said[name] = run("explain", job).out.splitlines()

    assert said["long"][0].endswith("it could not be prepared: cannot start true: Argument list too long")
    assert said["long"][-1].startswith("next: its arguments or variables are longer than that machine takes")
    assert said["plain"][0].endswith(f"cannot start {plain}: Permission denied")
    assert said["plain"][-1] == "next: make the program executable, and one of that machine's kind"


def test_explain_of_a_line_of_setup_that_fails_names_it_and_the_log_has_what_it_printed(run: Terminal) -> None:
    job = run.finish("echo never", "--set", 'environment.setup=["echo loading >&2", "no-such-module load x"]')

    said = run("explain", job).out.splitlines()

    assert said[0] == (
        f"job `{job[:10]}` failed: it could not be prepared: the setup lines ended with exit code 127, "
        "at: no-such-module load x"
    )
    assert said[-1] == (
        f"next: mend that line of `environment.setup`, or of `setup` of target `local`; runtime logs {job[:10]}"
    )
    assert run("logs", job).out.splitlines()[0] == "loading"


@pytest.mark.parametrize(
    ("there", "reason"),
    [
        ([], EndReason.SETUP_FAILED),
        (["a0001/start.json", "a0001/end.app_failed.1"], EndReason.SETUP_FAILED),
        (["a0001/start.json"], EndReason.APP_FAILED),
        (["a0001/end.stopped.143", "a0002/start.json"], EndReason.APP_FAILED),
    ],
    ids=["no attempt", "none since the last ended", "one that is open", "a later one that is open"],
)
def test_native_job_that_failed_while_no_attempt_was_open_could_not_be_set_up(
    tmp_path: Path, there: list[str], reason: EndReason
) -> None:
    files, job = LocalFiles(str(tmp_path / "records")), entry()
    for name in there:
        files.write(f"jobs/{job.id}/runs/0/{name}", b"{}")
    failed = NativeState(
        native_id="7", index=None, state=JobState.FAILED, reason=EndReason.APP_FAILED, raw="FAILED", exit_code=127
    )

    (named,) = ledger.name_unbegun(files, job, [failed])

    assert named.reason is reason
    assert ledger.judge(job, [named]).reason is reason
    assert ("127" in named.message) == (reason is EndReason.SETUP_FAILED)


def test_logs_of_a_run_that_never_began_are_what_the_backend_kept(
    run: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch_as_before(monkeypatch)
    job = run.finish("true")
    outcome = next((run.data / "jobs" / "done").glob(f"{job}.*"))
    for path in (outcome, run.folder(job) / "runs"):
        path.rename(run.tree / path.name)
    failed = NativeState(
        native_id="7", index=None, state=JobState.FAILED, reason=EndReason.APP_FAILED, raw="FAILED", exit_code=1
    )
    monkeypatch.setattr(LocalLauncher, "states", lambda *_: [failed])
    monkeypatch.setattr(LocalLauncher, "read_output", lambda *_: "module: not found\n", raising=False)

    logs, why = run("logs", job), run("explain", job).out.splitlines()

    assert (logs.out, logs.err) == ("module: not found\n", "-- local's own log of what came before the command\n")
    assert why[0].endswith("failed: it could not be prepared: it ended with exit code 1 before its command began")
    assert "  local's own log: module: not found" in why
    assert why[-1] == (
        f"next: mend `setup` or `python` of target `local`; runtime logs {job[:10]} shows what was printed"
    )


def test_python_that_is_too_old_is_told_by_the_launch_and_by_explain_and_logs(run: Terminal) -> None:
    old = run.tree / "old"
    old.write_text('#!/bin/sh\necho "SyntaxError: invalid syntax" >&2\nexit 1\n')
    old.chmod(0o755)
    (run.tree / "runtime.toml").write_text(f'[targets.old]\nkind = "local"\npython = "{old}"\n')

    launched = run("launch", "--on", "old", "--", "true")
    (job,) = (path.name for path in (run.data / "jobs" / "jobs").iterdir())

    assert (launched.code, "SyntaxError: invalid syntax" in launched.err) == (2, True)
    assert "  local's own log: SyntaxError: invalid syntax" in run("explain", job).out.splitlines()
    assert run("logs", job).out == "SyntaxError: invalid syntax\n"
    assert run("status", job, "-o", "json").json["reason"] == "setup_failed"


def test_job_that_its_target_did_not_take_is_no_job_that_waits_and_may_be_launched_again(run: Terminal) -> None:
    targets = run.tree / "runtime.toml"
    targets.write_text('[targets.here]\nkind = "local"\npython = "/no/such/python"\n')
    refused = run("launch", "--on", "here", "--code", "none", "--", "true")

    (line,) = run("status", "--on", "here", "-o", "json").json["jobs"]
    job = line["job"]
    assert refused.code == 2
    assert (line["state"], line["reason"]) == ("failed", "config_invalid")
    assert run("status", job, "-o", "json").json["state"] == "failed"
    said = run("explain", job).out.splitlines()
    assert said[0].startswith(f"job `{job[:10]}` was not taken by `here`: ")
    assert said[-1] == "next: mend that, and launch it again"

    targets.write_text('[targets.here]\nkind = "local"\n')
    again = run("launch", "--on", "here", "--code", "none", "--follow", "--", "true")

    assert again.code == 0
    (line,) = run("status", "--on", "here", "-o", "json").json["jobs"]
    assert (line["job"], line["state"]) == (job, "succeeded")


def test_explain_of_a_silent_target_concludes_nothing() -> None:
    silent = NativeState(native_id="7", index=None, state=JobState.UNKNOWN, message="no connection to `hpc`")
    status = ledger.judge(entry(), [silent], indices=True)

    found = explain(JobFacts(status=status, index=0, native=silent))

    assert found.sentence == "nobody knows how job `j-01234567` stands: target `hpc` does not answer"
    assert found.hint == "runtime targets check hpc"


def test_explain_of_a_running_job_waits_for_a_sign_of_life_and_says_what_it_saw(
    run: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The test moves the counter itself, and is faster than a shim.
    monkeypatch.setattr("runtime.jobs.log_follower.STILL_S", 0.3)
    job = run.launch("sleep 600")
    beat = run.folder(job) / "runs/0/a0001/beat"
    wait_for(beat.exists, "the first sign of life")
    stopped = shims_with(job)
    signal_all(stopped, signal.SIGSTOP)
    counter = beat.read_text()

    still = run("explain", job)
    waits: list[float] = []
    monkeypatch.setattr("runtime.jobs.log_follower.STILL_S", PATIENCE_S)

    def move(seconds: float) -> None:
        waits.append(seconds)
        beat.write_text("7")

    monkeypatch.setitem(vars(system), "sleep", move)
    lives = run("explain", job)
    beat.unlink()
    nothing = run("explain", job, "-o", "json")

    host = json.loads((beat.parent / "start.json").read_text())["host"]
    assert stopped
    assert still.err == "waiting for a sign of life of attempt 1, at most 300ms\n"
    assert still.out.splitlines()[0] == (
        f"job `{job[:10]}` runs: its attempt 1 runs on {host}; attempt 1 gives no sign of life"
    )
    assert f"  no sign of life of attempt 1: its counter stood at {counter} for " in still.out
    assert still.out.splitlines()[-1] == (
        f"next: see whether {host} and the record root answer; if they do not, runtime cancel {job[:10]}"
    )
    assert f"  the shim of attempt 1 lives: its counter went from {counter} to 7" in lives.out.splitlines()
    assert lives.out.splitlines()[-1] == f"next: runtime logs -f {job[:10]}"
    assert waits == [1.0]
    assert nothing.err == ""
    assert not [line for line in nothing.json["evidence"] if "counter" in line]
    assert run("status", job, "-o", "json").json["state"] == "running", "nothing is decided by it"


def test_explain_looks_again_where_the_attempt_ended_while_it_waited(
    run: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.jobs.log_follower.STILL_S", 0.5)
    job = run.launch("until [ -e $RUNTIME_CHECKPOINT_DIR/end ]; do sleep 0.05; done; exit 4")
    runs = run.folder(job) / "runs/0"
    wait_for((runs / "a0001/beat").exists, "the first sign of life")

    sleep = time.sleep

    def end_it(seconds: float) -> None:
        (runs / "checkpoint/end").touch()
        wait_for(lambda: list((run.data / "jobs/done").glob(f"{job}.*")), "the result")
        wait_for(lambda: not (runs / "a0001/beat").exists(), "the end of the counter, which may have moved")
        sleep(seconds)

    monkeypatch.setitem(vars(system), "sleep", end_it)

    assert run("explain", job).out.splitlines()[0] == (f"job `{job[:10]}` failed: the command failed with exit code 4")


@pytest.mark.nightly
def test_shim_that_lives_moves_its_counter_and_one_that_is_stopped_does_not(
    run: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = run.launch("sleep 600")
    wait_for((run.folder(job) / "runs/0/a0001/beat").exists, "the first sign of life")
    shims = shims_with(job)

    def explain_patiently() -> Typed:
        """Explain with patience, since a live shim may be late."""
        with monkeypatch.context() as patience:
            patience.setattr("runtime.jobs.log_follower.STILL_S", PATIENCE_S)
            return run("explain", job, "-o", "json")

    lives = explain_patiently()
    signal_all(shims, signal.SIGSTOP)
    still = run("explain", job, "-o", "json")
    signal_all(shims, signal.SIGCONT)
    again = explain_patiently()

    said = [
        [line.split(":")[0] for line in each.json["evidence"] if "counter" in line] for each in (lives, still, again)
    ]
    assert said == [
        ["the shim of attempt 1 lives"],
        ["no sign of life of attempt 1"],
        ["the shim of attempt 1 lives"],
    ], again.out


def test_explain_of_a_launch_that_was_interrupted_says_to_repeat_it() -> None:
    status = ledger.judge(entry(natives=()), [], indices=True)

    found = explain(JobFacts(status=status, index=0))

    assert found.sentence == "job `j-01234567` was never handed to `hpc`: its launch did not get to the end"


@pytest.mark.parametrize(
    ("result", "cancelled", "native", "stands"),
    [
        (EndReason.SUCCEEDED, True, JobState.CANCELLED, (JobState.SUCCEEDED, EndReason.SUCCEEDED)),
        (EndReason.APP_FAILED, True, None, (JobState.FAILED, EndReason.APP_FAILED)),
        (None, True, JobState.RUNNING, (JobState.RUNNING, None)),
        (None, True, JobState.UNKNOWN, (JobState.UNKNOWN, None)),
        (None, True, JobState.FAILED, (JobState.CANCELLED, EndReason.CANCELLED)),
        (None, True, None, (JobState.CANCELLED, EndReason.CANCELLED)),
        (None, False, JobState.FAILED, (JobState.FAILED, EndReason.OOM)),
        (None, False, JobState.SUCCEEDED, (JobState.FAILED, EndReason.LOST)),
        (None, False, None, (JobState.FAILED, EndReason.LOST)),
    ],
)
def test_evidence_counts_in_its_order(
    result: EndReason | None, cancelled: bool, native: JobState | None, stands: tuple[JobState, EndReason | None]
) -> None:
    job = entry(cancelled=cancelled)
    if result:
        job = replace(job, outcomes={0: RunOutcome(job=job.id, index=0, reason=result, code=1, attempt=1)})
    said = [NativeState(native_id="7", index=None, state=native, reason=EndReason.OOM)] if native else []

    status = ledger.judge(job, said)

    assert (status.state, status.reason) == stands


def test_explain_lists_how_attempts_ended() -> None:
    attempt = AttemptView(
        index=0, attempt=1, native="7", host="n1", started_at=NOW, ended_at=NOW, reason="stopped", exit_code=143,
        message="asked to stop by SIGTERM",
    )  # fmt: skip
    facts = said_of(EndReason.PREEMPTED, attempts=(attempt,), backend_log=("shim: gone",))

    assert explain(facts).evidence == (
        "attempt 1 on n1 ended as stopped, exit code 143 (SIGTERM): asked to stop by SIGTERM",
    )


# retry


def test_retry_of_a_job_runs_only_what_failed_once_more(run: Terminal) -> None:
    script = "echo {x} >> " + str(run.tree / "ran") + "; [ {x} = 0 ] || [ -e " + str(run.tree / "mended") + " ]"
    job = run.finish(script, "--grid", "x=0,1,2")
    (run.tree / "mended").touch()

    assert run("retry", job, "--failed").code == 2
    said = run("retry", job, "--failed", "--yes")

    assert said.code == 0, said.err
    assert said.out.split("\t")[:2] == [job, "1,2"]
    run.wait(job, "succeeded")
    assert sorted((run.tree / "ran").read_text().split()) == ["0", "1", "1", "2", "2"]
    attempts = run("status", job, "--index", "1", "-o", "json").json["attempts"]
    assert [(each["attempt"], each["reason"]) for each in attempts] == [(1, "app_failed"), (2, "succeeded")]
    assert run("retry", job).code == 2


def test_retry_of_a_running_job_is_refused(run: Terminal) -> None:
    job = run.launch("sleep 600")

    said = run("retry", job)

    assert said.code == 2
    assert "it is retried when all of it has ended" in said.err


def test_retry_of_a_cancelled_job_takes_the_mark_away(run: Terminal) -> None:
    job = run.launch("[ -e " + str(run.tree / "go") + " ] || sleep 600")
    run.wait(job, "running")
    run("cancel", job)
    (run.tree / "go").touch()

    assert run("retry", job).code == 0
    run.wait(job, "succeeded")


def test_retry_of_a_job_brings_its_secrets_again(run: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "canary-815")
    job = run.finish('test "$KEY" = canary-815 && exit 3', "--secret", "KEY=env://KEY")
    wait_for(lambda: not (run.folder(job) / "secrets").exists(), "the end of the secret")

    assert run("retry", job).code == 0

    wait_for(lambda: len(run("status", job, "-o", "json").json["attempts"]) == 2, "the second attempt")
    run.wait(job)
    assert run("status", job, "-o", "json").json["attempts"][-1]["exit_code"] == 3


@pytest.mark.parametrize("point", ["reordered", "forgiven", "resubmitted"])
def test_retry_killed_at_any_step_and_repeated_runs_once(run: Terminal, copies: Copies, point: str) -> None:
    job = run.finish("echo ran >> " + str(run.tree / "ran") + "; exit 1")
    killed = copies.run(COMMAND, ["retry", job], {**os.environ, "RUNTIME_FAULTS": f"launch.{point}=kill"})
    assert killed.returncode == -signal.SIGKILL
    if point == "resubmitted":
        # The submission is not on record yet, so until then the job counts as lost.
        wait_for(lambda: list((run.data / "jobs/done").glob(f"{job}.*.2")), "the result of the second attempt")
        assert len((run.tree / "ran").read_text().split()) == 2
        return

    # A dead lock holder is noticed within a second.
    again = copies.run(f"from runtime.jobs import lock; lock.STILL_S = 1.0; {COMMAND}", ["retry", job])

    assert again.returncode == 0, again.stderr
    run.wait(job)
    assert len((run.tree / "ran").read_text().split()) == 2


def test_retry_where_nothing_is_started_anew_makes_a_new_job(run: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalLauncher, "resumes", False)
    script = "cat main.py >> $RUNTIME_OUTPUT_DIR/o; echo {x} >> " + str(run.tree / "ran") + "; [ {x} = 0 ] || [ -e " + str(run.tree / "mended") + " ]"  # fmt: skip
    job = run.finish(script, "--grid", "x=0,1")
    (run.tree / "mended").touch()
    (run.tree / "main.py").write_text("edited later\n")

    said = run("retry", job, "-o", "json")
    new = said.json[0]["job"]

    assert new != job
    assert f"{new} is a new job" in said.err
    run.wait(new, "succeeded")
    assert sorted((run.tree / "ran").read_text().split()) == ["0", "1", "1"]
    assert run("fetch", new, "home").code == 0
    assert [(run.tree / "home" / index / "o").read_text() for index in "01"] == ["print('hello')\n"] * 2


# fetch


def test_fetch_brings_outputs_and_never_loses_a_file_that_differs(run: Terminal) -> None:
    job = run.finish("mkdir $RUNTIME_OUTPUT_DIR/a; echo {x} > $RUNTIME_OUTPUT_DIR/a/n", "--grid", "x=5,6")

    first = run("fetch", job, "home")
    again = run("fetch", job, "home", "-o", "json")
    (run.tree / "home/1/a/n").write_text("mine\n")
    differs = run("fetch", job, "home")

    assert first.code == 0
    assert first.out == "home/0/a/n\t2B\tfetched\nhome/1/a/n\t2B\tfetched\n"
    assert [each["what"] for each in again.json] == ["same", "same"]
    assert differs.code == 2
    assert differs.err.splitlines()[-3:-1] == [
        "error: 1 file in `home` differs from what was written, and was left as found",
        "  home/1/a/n",
    ]
    assert (run.tree / "home/1/a/n").read_text() == "mine\n"
    assert run("fetch", job, "home", "--index", "1", "--overwrite").code == 0
    assert (run.tree / "home/1/a/n").read_text() == "6\n"
    assert sorted(path.name for path in (run.tree / "home/1/a").iterdir()) == ["n"]


def test_fetch_without_a_folder_makes_one_named_like_the_job(run: Terminal) -> None:
    job = run.finish("echo x > $RUNTIME_OUTPUT_DIR/f", "--name", "train")

    assert run("fetch", job).code == 0

    assert (run.tree / f"train-{job[:10]}" / "f").read_text() == "x\n"


def test_fetch_of_a_job_that_wrote_nothing_says_so(run: Terminal) -> None:
    job = run.finish("true")

    said = run("fetch", job)

    assert (said.code, said.out) == (0, "")
    assert "wrote nothing to its output folder" in said.err


def test_files_that_differ_are_named() -> None:
    assert FilesDiffer(Path("home"), ["a"]).names == ["a"]


# gc


def test_gc_removes_what_has_ended_and_nothing_that_runs(run: Terminal) -> None:
    done = run.finish("true", "--name", "done")
    running = run.launch("sleep 600", "--name", "long")
    run.wait(running, "running")

    dry = run("gc", "--older-than", "0s", "--dry-run")
    young = run("gc", "--yes")
    gone = run("gc", "--older-than", "0s", "--yes")

    assert [line.split("\t")[1] for line in dry.out.splitlines()] == [done]
    assert young.out == ""
    assert [line.split("\t")[1] for line in gone.out.splitlines()] == [done]
    assert not run.folder(done).exists()
    assert run.folder(running).exists()
    assert [path.name for path in (run.data / "jobs/done").iterdir()] == []
    assert run("launch", "--on", "local", "--name", "done", "-o", "json", "--", "sh", "-c", "true").json["new"] is True


def test_gc_removes_code_that_no_job_uses(run: Terminal) -> None:
    run.finish("true", "--name", "old")
    (run.tree / "later.py").write_text("pass\n")
    kept = run.launch("sleep 600", "--name", "new")

    gone = run("gc", "--older-than", "0s", "--yes", "-o", "json").json

    assert [each["kind"] for each in gone] == ["job", "code"]
    [left] = (run.data / "jobs/snapshots").iterdir()
    assert left.samefile(run.folder(kept) / "snapshot.tar")


def test_gc_without_an_answer_removes_nothing(run: Terminal) -> None:
    job = run.finish("true")

    assert run("gc", "--older-than", "0s").code == 2
    assert run.folder(job).exists()


def test_gc_that_was_interrupted_is_gone_on_with(run: Terminal) -> None:
    job = run.finish("true")
    (run.folder(job) / "removing").write_text(owner_name())
    (run.folder(job) / "ended").unlink()

    assert run("gc", "--yes").out.split("\t")[1] == job

    assert not run.folder(job).exists()
    assert list((run.data / "jobs/done").iterdir()) == []


def test_gc_removes_shared_trees_that_no_job_uses(run: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(run.tree.parent))
    job = run.finish("true", "--set", "code.writable=false")
    [tree] = (run.tree.parent / f"research-runtime-{os.getuid()}").glob(64 * "[0-9a-f]")
    old = time.time() - 3600
    os.utime(tree, (old, old))

    kept = run("gc", "--older-than", "30m", "--yes")
    gone = run("gc", "--older-than", "0s", "--yes")

    assert kept.out == ""
    assert sorted(line.split("\t")[0] for line in gone.out.splitlines()) == ["code", "job", "tree"]
    assert not tree.exists()
    assert not run.folder(job).exists()


def test_gc_leaves_a_shared_tree_that_a_job_of_another_record_root_uses(
    run: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(run.tree.parent))
    job = run.launch(f"touch {tmp_path}/begun; exec sleep 600", "--set", "code.writable=false")
    wait_for((tmp_path / "begun").exists, "the command")
    [tree] = (run.tree.parent / f"research-runtime-{os.getuid()}").glob(64 * "[0-9a-f]")
    monkeypatch.setenv("RUNTIME_DATA_DIR", str(tmp_path / "other"))

    kept = run("gc", "--older-than", "0s", "--yes")

    assert (kept.code, kept.out.split("\t")[0]) == (3, "tree")
    assert kept.err.splitlines()[0] == f"left over: tree {tree.name[:12]}: an attempt on this machine uses it"
    assert (tree / "main.py").exists()

    signal_all(processes_with(job))
    wait_for(lambda: not processes_with(job), "its end")
    assert run("gc", "--older-than", "0s", "--yes").code == 0
    assert not tree.exists()


# interrupt


def test_interrupt_as_preemption_is_survived_by_a_next_attempt(run: Terminal) -> None:
    job = run.launch("[ $RUNTIME_ATTEMPT = 2 ] || sleep 600")
    run.wait(job, "running")
    wait_for(lambda: run("status", job, "-o", "json").json["attempts"], "the first attempt")

    said = run("interrupt", job, "--as", "preempt", "-o", "json")

    assert said.code == 0, said.err
    assert said.json["started_anew"]
    run.wait(job, "succeeded")
    assert [each["reason"] for each in run("status", job, "-o", "json").json["attempts"]] == ["stopped", "succeeded"]


def test_interrupt_as_node_loss_leaves_nothing_and_the_same_launch_takes_it_up(run: Terminal) -> None:
    script = "[ $RUNTIME_ATTEMPT = 2 ] || { sleep 673 & sleep 674; }"
    job = run.launch(script)
    wait_for(lambda: run("status", job, "-o", "json").json["attempts"], "the first attempt")

    assert run("interrupt", job, "--as", "node-loss").code == 0

    run.wait(job, "failed")
    assert processes_with(f"RUNTIME_JOB_ID={job}") == []
    assert run("status", job, "-o", "json").json["reason"] == "lost"
    assert run.launch(script) == job
    run.wait(job, "succeeded")


def test_interrupt_as_timeout_goes_by_way_of_a_checkpoint(run: Terminal) -> None:
    script = "trap 'touch $RUNTIME_CHECKPOINT_DIR/new; exit 0' TERM; trap 'touch $RUNTIME_CHECKPOINT_DIR/c' USR1; touch $RUNTIME_OUTPUT_DIR/up; [ $RUNTIME_ATTEMPT = 2 ] || while :; do sleep 0.1; done"  # fmt: skip
    job = run.launch(script, "--set", "checkpoint={lead: 3s}", "--set", "grace_period=120s")
    wait_for((run.folder(job) / "runs/0/output/a0001/up").exists, "the first attempt")

    assert run("interrupt", job, "--as", "timeout").code == 0

    run.wait(job, "succeeded")
    ends = [each["reason"] for each in run("status", job, "-o", "json").json["attempts"]]
    assert ends == ["checkpointed", "succeeded"]


def test_interrupt_of_one_run_as_oom_leaves_the_others(run: Terminal) -> None:
    job = run.launch("[ {x} = 0 ] && sleep 2 || sleep 600", "--grid", "x=0,1", "--max-parallel", "2")
    wait_for((run.folder(job) / "runs/1/a0001/processes.json").exists, "the second run")

    assert run("interrupt", job, "--as", "oom", "--index", "1").code == 0

    run.wait(job, "failed")
    seen = run("status", job, "-o", "json").json
    assert (seen["totals"]["succeeded"], seen["reason"]) == (1, "oom")
    assert "killed for memory" in run("explain", job).out


def test_interrupt_of_several_runs_of_which_one_has_ended_interrupts_none(run: Terminal) -> None:
    job = run.launch("[ {x} = 0 ] && exec sleep 600", "--grid", "x=0,1", "--max-parallel", "2")
    wait_for((run.folder(job) / "runs/0/a0001/processes.json").exists, "the first run")
    wait_for((run.folder(job) / "runs/1.ended").exists, "the end of the second run")

    refused = run("interrupt", job, "--as", "preempt", "--index", "0-1")

    assert (refused.code, refused.err.splitlines()[0]) == (2, f"error: run 1 of job `{job}` ended before")
    time.sleep(0.5)
    assert [each["ended_at"] for each in run("status", job, "--index", "0", "-o", "json").json["attempts"]] == [None]
    assert run("cancel", job).code == 0


@pytest.mark.parametrize("words", [["--as", "fire"], ["--as", "preempt", "--index", "9"], []])
def test_interrupt_of_what_cannot_be_is_refused(run: Terminal, words: list[str]) -> None:
    job = run.launch("sleep 600")

    assert run("interrupt", job, *words).code == 2


def test_interrupt_of_a_job_that_has_ended_is_refused(run: Terminal) -> None:
    job = run.finish("true")

    assert run("interrupt", job, "--as", "preempt").code == 2


# many


class Counting(LocalFiles):
    """Counts the calls to the record root."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.asked: list[str] = []

    def ask(self, do: str, *args: Any, patience_s: float = 60) -> Any:
        self.asked.append(do)
        return super().ask(do, *args, patience_s=patience_s)


class Asked(LocalLauncher):
    def __init__(self) -> None:
        self.questions: list[int] = []

    def states(self, target: Target, native_ids: Any, host: Any) -> list[NativeState]:
        self.questions.append(len(native_ids))
        return [NativeState(native_id=native, index=None, state=JobState.RUNNING) for native in native_ids]


def put_jobs(root: Path, count: int) -> None:
    """Write `count` jobs, of which a third has ended and the others run."""
    for number in range(count):
        job = f"j-{number:024x}"
        folder = root / "jobs" / job
        (folder / "native").mkdir(parents=True)
        at = (NOW + timedelta(seconds=number)).isoformat()
        intent = {"name": f"n{number}", "owner": "ada", "target": "local", "kind": "local", "at": at, "indices": 1,
                  "parts": [job], "offset": 0}  # fmt: skip
        (folder / "intent.json").write_text(json.dumps(intent))
        native = {"name": job, "id": f"native-{number}", "part": 0, "epoch": 1, "at": at}
        (folder / "native/001.000000.json").write_text(json.dumps(native))
        if number % 3 == 0:
            (root / "done").mkdir(exist_ok=True)
            (root / "done" / f"{job}.0.succeeded.0.1").touch()


def test_status_of_a_thousand_jobs_is_one_listing_and_one_question(tmp_path: Path) -> None:
    put_jobs(tmp_path, 1000)
    files, launcher, host = Counting(str(tmp_path)), Asked(), LocalHost(str(tmp_path))
    host.files = files

    seen = read_target(OpenTarget(Target(name="local", kind="local"), launcher, host), now=NOW)

    assert launcher.questions == [666]
    assert sorted(files.asked) == ["names", "names", *["read_many"] * 3]
    assert (sum(each.state is JobState.RUNNING for each in seen.jobs), len(seen.jobs), seen.left_out) == (666, 670, 330)


def test_entries_of_many_jobs_equal_those_read_one_by_one(tmp_path: Path) -> None:
    put_jobs(tmp_path, 7)
    files = LocalFiles(str(tmp_path))
    (tmp_path / "jobs" / f"j-{1:024x}" / "cancel").touch()
    native = {"name": "x", "id": "later", "part": 0, "epoch": 2, "at": NOW.isoformat()}
    (tmp_path / "jobs" / f"j-{2:024x}" / "native/002.000000.json").write_text(json.dumps(native))
    (tmp_path / "jobs" / f"j-{2:024x}" / "epoch").write_text("2")

    many = ledger.read_many_entries(files, ledger.list_jobs(files))
    single = [ledger.read_entry(files, job) for job in ledger.list_jobs(files)]

    unfinished = [each for each in single if each and not each.outcomes]
    assert [each for each in many if not each.outcomes] == unfinished
    assert [(each.id, each.outcomes) for each in many] == [(each.id, each.outcomes) for each in single if each]


def test_job_is_found_on_the_target_it_was_launched_on_and_silent_ones_are_passed_over(run: Terminal) -> None:
    (run.tree / "runtime.toml").write_text(
        '[targets.near]\nkind = "local"\nrecords = "' + str(run.tree.parent / "near") + '"\n'
    )
    said = run("launch", "--on", "near", "--", "true")
    job = said.out.strip()

    assert run("status", job[:8], "-o", "json").json["target"] == "near"
    assert run("status", job[:8], "--on", "local").code == 2


def test_watch_reads_while_the_job_changes(run: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    job = run.launch("until [ -e " + str(run.tree / "go") + " ]; do sleep 0.1; done")
    sleep = time.sleep

    def let_it_end(seconds: float) -> None:
        (run.tree / "go").touch()
        sleep(seconds)

    monkeypatch.setattr("runtime.cli.status.time", SimpleNamespace(sleep=let_it_end, monotonic=time.monotonic))

    said = run("status", job, "--watch")

    assert said.out.splitlines() == [f"{job}: running", f"{job}: succeeded"]
