"""Jobs as people name them: by id, name, the beginning of an id, or `last`, for commands that look and that act."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.client.jobs.find import AmbiguousJob, open_job
from runtime.config import load_settings
from runtime.errors import UnknownName
from tests.jobs_support import Terminal, open_terminal
from tests.shim_support import PATIENCE_S


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Terminal]:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    with open_terminal(tmp_path, monkeypatch, capsys) as terminal:
        yield terminal


def add_box(run: Terminal) -> None:
    """Name a second target of this machine, with a record root of its own."""
    (run.tree / "runtime.toml").write_text(f'[targets.box]\nkind = "local"\nrecords = "{run.tree.parent}/box"\n')


def type_elsewhere(run: Terminal, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command in another session, as in another terminal."""
    done = subprocess.run(
        [sys.executable, "-m", "runtime", *words],
        cwd=run.tree,
        env=os.environ,
        start_new_session=True,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def launch_elsewhere(run: Terminal, name: str, script: str = "sleep 600") -> str:
    return type_elsewhere(run, "launch", "--on", "local", "--name", name, "--", "sh", "-c", script).stdout.strip()


def end_all(run: Terminal, *jobs: str) -> None:
    for job in jobs:
        assert run("cancel", job).code == 0


# names


def test_job_by_its_name_is_found_by_every_command_that_looks(run: Terminal) -> None:
    job = run.finish("echo hello; echo out >$RUNTIME_OUTPUT_DIR/o", "--name", "train-7b")

    assert run("status", "train-7b", "-o", "json").json["job"] == job
    assert run("logs", "train-7b").out == "hello\n"
    assert run("explain", "train-7b").out.startswith(f"job `{job[:10]}` succeeded")
    assert run("wait", "train-7b").code == 0
    assert run("fetch", "train-7b", "home").code == 0
    assert run("retry", "train-7b", "--index", "0").err.startswith(f"error: run 0 of job `{job}` succeeded")
    assert json.loads(run("results", "train-7b", "-o", "json").out)[0]["job"] == job
    assert run("cancel", "train-7b", "-o", "json").json[0]["name"] == job


def test_name_of_several_jobs_is_the_newest_and_that_is_said_in_one_line(run: Terminal) -> None:
    run.finish("echo first", "--name", "train")
    second = run.finish("echo second", "--name", "train")

    said = run("logs", "train")

    assert said.out == "second\n"
    assert said.err == f"`train` is the name of 2 jobs; this is the newest, {second[:10]} on local\n"


def test_name_goes_before_the_beginning_of_an_id_and_after_a_whole_id(run: Terminal) -> None:
    first = run.finish("echo first", "--name", "plain")
    short_name = run.finish("echo named", "--name", first[:10])
    run.finish("echo whole", "--name", first)

    assert run("logs", first).out == "first\n"
    assert run("status", first[:10], "-o", "json").json["job"] == short_name
    assert run("status", first[:9], "-o", "json").json["job"] == first


@pytest.mark.parametrize(
    ("program", "name"),
    [("./Évaluation.sh", "valuation"), ("./ünï.sh", "n"), ("./" + "a" * 27 + "_b.sh", "a" * 27), ("./Ж.sh", "job")],
)
def test_job_without_a_name_gets_one_that_every_backend_takes(run: Terminal, program: str, name: str) -> None:
    path = run.tree / program
    path.write_text("#!/bin/sh\ntrue\n")
    path.chmod(0o755)

    assert run("launch", "--on", "local", "--follow", "--", program).code == 0

    assert [line["name"] for line in run("status", "--all", "-o", "json").json["jobs"]] == [name]


def test_name_like_a_tasks_id_is_a_job_with_on_and_last_is_no_name(run: Terminal) -> None:
    job = run.finish("true", "--name", "t-test")

    refused = run("launch", "--on", "local", "--name", "last", "--", "true")

    assert run("status", "t-test", "--on", "local", "-o", "json").json["job"] == job
    assert run("status", "t-test").err.startswith("error: no task named `t-test`")
    assert (refused.code, refused.err.splitlines()[0]) == (2, "error: `last` is no valid name")


def test_name_that_begins_another_jobs_id_is_not_cancelled(run: Terminal) -> None:
    first = run.launch("sleep 600", "--name", "plain")
    named = run.launch("sleep 601", "--name", first[:10])

    refused = run("cancel", first[:10])

    assert refused.code == 2
    assert refused.err.startswith(
        f"error: `{first[:10]}` is the name of a job and the beginning of the id of another\n"
    )
    assert (first in refused.err, named in refused.err) == (True, True)
    end_all(run, first, named)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc, in which nobody can make a folder")
def test_fetch_into_a_folder_that_cannot_be_made_names_it(run: Terminal) -> None:
    run.finish("echo out >$RUNTIME_OUTPUT_DIR/o", "--name", "train")

    refused = run("fetch", "train", "/proc/none")

    assert (refused.code, refused.err.splitlines()[-3]) == (2, "error: the folder `/proc/none` cannot be made there")


def test_name_of_an_experiment_and_a_job_is_the_experiment_and_on_means_the_job(run: Terminal) -> None:
    job = run.finish("true", "--name", "sweep")
    assert run("submit", "--experiment", "sweep", "proj", "train").code == 0

    said = run("status", "sweep", "-o", "json")

    assert said.json["experiment"] == "sweep"
    assert (
        said.err
        == "`sweep` is an experiment and the name of a job; this is the experiment, `--on TARGET` means the job\n"
    )
    assert run("status", "sweep", "--on", "local", "-o", "json").json["job"] == job


def test_name_that_begins_an_experiments_is_not_cancelled(run: Terminal) -> None:
    job = run.launch("sleep 600", "--name", "train")
    assert run("submit", "--experiment", "train-all", "proj", "train").code == 0

    refused = run("cancel", "train", "--yes")

    assert refused.code == 2
    assert "  it may be: train-all\n" in refused.err
    assert run("status", "train", "-o", "json").json["job"] == job
    assert run("cancel", "train", "--on", "local").code == 0


def test_name_while_the_stack_does_not_answer_is_looked_at_but_not_cancelled(
    run: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = run.launch("sleep 600", "--name", "train")
    monkeypatch.setenv("RUNTIME_OUTPUTS", "/no/such/contract.json")

    seen, refused = run("status", "train", "-o", "json"), run("cancel", "train")

    assert seen.json["job"] == job
    assert refused.code == 2
    assert refused.err.startswith(
        "error: `train` is the name of a job, and it is not known whether there is an experiment"
    )
    end_all(run, job)


def test_cancel_by_a_name_of_two_living_jobs_is_refused_and_of_one_is_done(run: Terminal) -> None:
    ended = run.finish("true", "--name", "train")
    first = run.launch("sleep 600", "--name", "train")
    second = run.launch("sleep 601", "--name", "train")

    refused = run("cancel", "train")
    end_all(run, second)
    done = run("cancel", "train", "-o", "json")

    assert refused.code == 2
    assert refused.err.splitlines()[0] == (
        "error: `train` is the name of 2 jobs that have not ended, and this takes one"
    )
    assert f"`{first}` train on local" in refused.err
    assert f"`{second}` train on local" in refused.err
    assert ended not in refused.err
    assert done.json[0]["name"] == first
    assert "`train` is the name of 3 jobs; this is the only one that has not ended" in done.err


def test_wait_for_a_name_waits_for_its_living_jobs_on_every_target(run: Terminal) -> None:
    add_box(run)
    there = run("launch", "--on", "box", "--name", "train", "--", "sh", "-c", "sleep 2; exit 7").out.strip()
    here = run.finish("true", "--name", "train")

    waited = run("wait", "train", "-o", "json")

    assert (waited.code, waited.json["complete"]) == (1, True)
    assert [(each["job"], each["state"]) for each in waited.json["jobs"]] == [(there, "failed"), (here, "succeeded")]
    assert "`train` is the name of 2 jobs on box, local; these are all of them\n" in waited.err
    assert run("wait", "train", "--on", "local").code == 0


def test_results_of_a_name_are_those_of_its_jobs_on_every_target(run: Terminal) -> None:
    add_box(run)
    here = run.finish("exit 3", "--name", "train")
    run("launch", "--on", "box", "--name", "train", "--follow", "--", "sh", "-c", "exit 4")

    rows = json.loads(run("results", "train", "-o", "json").out)

    assert [row["exit_code"] for row in rows] == [3, 4]
    assert [row["exit_code"] for row in json.loads(run("results", here, "-o", "json").out)] == [3]
    assert [row["exit_code"] for row in json.loads(run("results", "train", "--on", "box", "-o", "json").out)] == [4]


def test_wait_for_a_name_that_a_silent_target_has_too_is_refused_until_one_is_chosen(run: Terminal) -> None:
    add_box(run)
    run("launch", "--on", "box", "--name", "train", "--", "sh", "-c", "true")
    run.finish("true", "--name", "train")
    (run.tree.parent / "box").rename(run.tree.parent / "gone")

    refused = run("wait", "train")

    assert refused.code == 3
    assert "`--on TARGET` chooses another" in refused.err
    assert run("wait", "train", "--on", "local").code == 0


def test_wait_for_a_name_that_a_target_out_of_reach_has_too_says_what_it_left_out(run: Terminal) -> None:
    add_box(run)
    there = run("launch", "--on", "box", "--name", "train", "--", "sh", "-c", "true").out.strip()
    run.finish("true", "--name", "train")
    (run.tree / "runtime.toml").unlink()

    waited = run("wait", "train")

    assert waited.code == 0
    assert (
        f"left out, since nothing can be asked about it here: `{there}` was launched on target `box`, which"
        in waited.err
    )


def test_interrupt_by_a_name_of_two_living_jobs_is_refused(run: Terminal) -> None:
    jobs = [run.launch(f"sleep {600 + n}", "--name", "train") for n in range(2)]

    assert run("interrupt", "train", "--as", "preempt").err.startswith("error: `train` is the name of 2 jobs that have")
    end_all(run, *jobs)


def test_cancel_by_a_name_of_jobs_on_two_targets_counts_both(run: Terminal) -> None:
    add_box(run)
    here = run.launch("sleep 600", "--name", "train")
    there = run("launch", "--on", "box", "--name", "train", "--", "sleep", "600").out.strip()

    refused = run("cancel", "train")
    one = run("cancel", "train", "--on", "box", "-o", "json")

    assert (refused.code, f"`{there}` train on box" in refused.err) == (2, True)
    assert one.json[0]["name"] == there
    end_all(run, here)


def test_cancel_by_a_name_that_a_silent_target_may_have_too_is_refused_until_one_is_chosen(run: Terminal) -> None:
    add_box(run)
    here = run.launch("sleep 600", "--name", "train")
    run("launch", "--on", "box", "--name", "train", "--", "sh", "-c", "true")
    (run.tree.parent / "box").rename(run.tree.parent / "gone")

    refused = run("cancel", "train")

    assert refused.code == 3
    assert "`--on TARGET` chooses another" in refused.err
    assert run("cancel", "train", "--on", "local", "-o", "json").json[0]["name"] == here


@pytest.mark.parametrize(
    ("toml", "why"),
    [
        ("", "not defined here"),
        ('[targets.box]\nkind = "local"\nrecords = "/nowhere/else"\n', "defined otherwise then"),
    ],
)
def test_cancel_by_a_name_that_a_target_out_of_reach_has_too_is_refused_until_one_is_chosen(
    run: Terminal, toml: str, why: str
) -> None:
    add_box(run)
    here = run.launch("sleep 600", "--name", "train")
    there = run("launch", "--on", "box", "--name", "train", "--", "sh", "-c", "true").out.strip()
    (run.tree / "runtime.toml").write_text(toml)

    refused = run("cancel", "train")

    assert refused.code == 2
    assert f"`{there}` was launched on target `box`, which {'is' if 'here' in why else 'was'} {why}" in refused.err
    assert run("cancel", "train", "--on", "local", "-o", "json").json[0]["name"] == here


def test_job_on_a_target_that_is_gone_is_unknown_and_its_target_named(run: Terminal) -> None:
    add_box(run)
    there = run("launch", "--on", "box", "--name", "train", "--", "sh", "-c", "true").out.strip()
    (run.tree / "runtime.toml").unlink()

    for text in (there, there[:10], "train"):
        unknown = run("status", text)

        assert unknown.code == 2
        assert f"`{there}` was launched on target `box`, which is not defined here" in unknown.err


def test_cancel_by_a_name_of_a_job_that_ended_on_a_target_out_of_reach_is_done(run: Terminal) -> None:
    add_box(run)
    here = run.launch("sleep 600", "--name", "train")
    run("launch", "--on", "box", "--name", "train", "--follow", "--", "sh", "-c", "true")
    assert run("status", "--on", "box").code == 0
    (run.tree / "runtime.toml").unlink()

    assert run("cancel", "train", "-o", "json").json[0]["name"] == here


def test_job_of_another_machine_is_found_by_name_on_a_named_target(run: Terminal) -> None:
    add_box(run)
    job = run("launch", "--on", "box", "--name", "train", "--", "true").out.strip()
    for note in [*(run.data / "known").rglob("*"), *(run.data / "launched").iterdir()]:
        if note.is_file():
            note.unlink()

    assert run("status", "train").err.startswith("error: no experiment named `train`")
    assert run("wait", "train", "--on", "box").code == 0
    assert run("status", "train", "--on", "box", "-o", "json").json["job"] == job
    assert run("status", "--on", "box").code == 0
    assert run("status", "train", "-o", "json").json["job"] == job


def test_beginning_of_ids_on_two_targets_is_refused_with_the_candidates(run: Terminal) -> None:
    add_box(run)
    here = run.finish("true", "--name", "here")
    twin = here[:-4] + ("0000" if not here.endswith("0000") else "1111")
    other = run.data / "launched" / twin
    other.write_text("box\n")

    refused = run("cancel", here[:12])

    assert refused.code == 2
    assert f"`{here}` here on local" in refused.err
    assert f"`{twin}` without a known name on box" in refused.err


def test_job_that_nobody_knows_is_an_error_with_the_known_names(run: Terminal) -> None:
    run.finish("true", "--name", "train")

    said = run("interrupt", "tain", "--as", "preempt")

    assert said.code == 2
    assert said.err.startswith("error: no job named `tain`")
    assert "  names of jobs launched from here: train\n" in said.err


# last


def test_last_of_a_command_that_acts_is_the_last_of_this_terminal(run: Terminal) -> None:
    mine = run.launch("sleep 600", "--name", "mine")
    other = launch_elsewhere(run, "other")

    assert run("status", "last", "-o", "json").json["job"] == other
    assert run("cancel", "last", "-o", "json").json[0]["name"] == mine
    assert run("status", other, "-o", "json").json["state"] in ("pending", "running")
    end_all(run, other)


def test_last_of_a_terminal_that_launched_nothing_is_refused_with_the_candidates(run: Terminal) -> None:
    other = launch_elsewhere(run, "other")

    for words in (["cancel", "last"], ["cancel", "last", "--yes"], ["interrupt", "last", "--as", "preempt"]):
        refused = run(*words)

        assert refused.code == 2
        assert refused.err.splitlines()[0] == (
            "error: `last` means the last job that was launched from this terminal, and none was"
        )
        assert f"  `{other}` other on local, launched " in refused.err
    assert run("logs", "last", "--attempt", "9").err.startswith("error: no attempt named `9`")
    end_all(run, other)


def test_last_after_an_experiment_of_another_terminal_is_refused_for_acting(run: Terminal) -> None:
    run.finish("true", "--name", "mine")
    assert run("submit", "--experiment", "sweep", "proj", "train").code == 0
    other = launch_elsewhere(run, "other")

    refused = run("cancel", "last", "--yes")

    assert refused.code == 2
    assert "or experiment `sweep`, which is newer" in refused.err
    end_all(run, other)


def test_last_after_the_same_launch_again_is_that_job(run: Terminal) -> None:
    first = run.finish("echo first", "--name", "first")
    run.finish("echo second", "--name", "second")
    assert run.launch("echo first", "--name", "first") == first

    assert run("logs", "last").out == "first\n"


def test_after_takes_a_name_and_last(run: Terminal) -> None:
    run.finish("true", "--name", "first")

    for text in ("first", "last", "any:first"):
        said = run("launch", "--on", "local", "--after", text, "--", "true")

        assert "after" in said.err.splitlines()[0]
        assert "no job named" not in said.err


# the notes


def test_notes_that_are_damaged_or_unreadable_hide_no_job(run: Terminal) -> None:
    job = run.finish("echo hello", "--name", "train")
    for path in (run.data / "known").rglob("*"):
        if path.is_file():
            path.write_bytes(b"\xff\x00[")
    (run.data / "known" / "targets").mkdir(exist_ok=True)
    (run.data / "known" / "targets" / ("0" * 24 + ".json")).write_text("[[[[")
    os.mkfifo(run.data / "known" / "targets" / ("1" * 24 + ".json"))

    assert run("logs", "train").out == "hello\n"
    assert run("status", job[:10]).code == 0
    assert run("cancel", "last").code == 2  # it is not known any more which terminal it came from


def test_launch_whose_notes_cannot_be_written_is_made_all_the_same(run: Terminal) -> None:
    run.data.mkdir()
    for name in ("launched", "known"):
        (run.data / name).write_text("in the way")

    job = run.finish("echo hello", "--name", "train")

    assert run("logs", job).out == "hello\n"


def test_removed_job_is_known_by_no_name(run: Terminal) -> None:
    run.finish("true", "--name", "train")
    assert run("gc", "--older-than", "0s", "--yes").code == 0

    assert run("status", "train").err.startswith("error: no experiment named `train`")
    assert not any((run.data / "known").rglob("*.train"))


def test_open_job_of_several_with_a_name_tells_the_caller(run: Terminal) -> None:
    for text in ("first", "second"):
        run.finish(f"echo {text}", "--name", "train")
    said: list[str] = []

    with open_job("train", settings=load_settings(), tell=said.append) as job:
        newest = job.id

    assert run("status", "last", "-o", "json").json["job"] == newest
    assert len(said) == 1
    with pytest.raises(UnknownName):
        open_job("trai", settings=load_settings())
    for seconds in (600, 601):
        run.launch(f"sleep {seconds}", "--name", "train")
    with pytest.raises(AmbiguousJob):
        open_job("train", settings=load_settings(), acting=True)


@pytest.mark.parametrize("words", [["train", "--failed"], ["--failed", "train"]])
def test_retry_of_what_failed_takes_the_name_of_a_job(run: Terminal, words: list[str]) -> None:
    job = run.finish("exit 3", "--name", "train")

    assert run("retry", *words, "-o", "json").json[0]["job"] == job


def test_status_of_a_name_that_only_one_of_two_users_jobs_has_is_ones_own(run: Terminal) -> None:
    job = run.finish("true", "--name", "train")
    twin = run.data / "jobs" / "jobs" / "j-0123456789abcdef01234567"
    twin.mkdir(mode=0o700)
    intent = {"name": "train", "owner": "mia", "target": "local", "kind": "local", "indices": 1, "offset": 0}
    (twin / "intent.json").write_text(json.dumps({**intent, "at": "2999-01-01T00:00:00Z", "parts": ["p"]}))

    said = run("status", "train", "--on", "local", "-o", "json")

    assert said.json["job"] == job
    assert said.err == ""
