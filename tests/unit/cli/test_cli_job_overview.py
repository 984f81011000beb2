"""The overview of the jobs of all targets from what this machine knows, the choice among them, and lists of runs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runtime.cli.status_text import target_lines
from runtime.client.jobs.job_cache import JobLine
from runtime.client.jobs.status import TargetJobs
from runtime.end_reasons import EndReason
from runtime.jobs.spec import JobState
from tests.jobs_support import Terminal, open_terminal

NOW = datetime.now(UTC)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Terminal]:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    with open_terminal(tmp_path, monkeypatch, capsys) as terminal:
        yield terminal


def add_box(run: Terminal, more: str = "") -> Path:
    """Name a second target of this machine, with a record root of its own."""
    records = run.tree.parent / "box"
    (run.tree / "runtime.toml").write_text(f'[targets.box]\nkind = "local"\nrecords = "{records}"\n{more}')
    return records


def finish_on(run: Terminal, target: str, name: str, script: str = "true") -> str:
    job = run("launch", "--on", target, "--name", name, "--", "sh", "-c", script).out.strip()
    run("wait", job)
    return job


def rows(run: Terminal, *words: str) -> dict[str, Mapping[str, Any]]:
    """The jobs of a status as JSON, by name."""
    said = run("status", *words, "-o", "json")
    assert said.code == 0, said.err
    return {each["name"]: each for each in said.json["jobs"]}


# from what is known


def test_overview_has_the_jobs_of_other_targets_as_they_were_last_seen(run: Terminal) -> None:
    add_box(run)
    finish_on(run, "box", "there")
    finish_on(run, "local", "here")

    launched = rows(run)
    assert {name: each["state"] for name, each in launched.items()} == {"here": "succeeded", "there": "unknown"}
    refreshed = rows(run, "--refresh")
    assert refreshed["there"]["state"] == "succeeded"
    (run.tree.parent / "box").rename(run.tree.parent / "gone")

    known, text = rows(run), run("status")

    assert known["there"]["state"] == "succeeded"
    assert known["there"]["as_of"] == refreshed["there"]["as_of"]
    assert known["here"]["as_of"] > known["there"]["as_of"]
    assert text.err == ""


def test_target_that_does_not_answer_keeps_what_was_known_and_hides_no_other(run: Terminal) -> None:
    add_box(run)
    finish_on(run, "box", "there")
    finish_on(run, "local", "here")
    rows(run, "--refresh")
    (run.tree.parent / "box").rename(run.tree.parent / "gone")

    said = run("status", "--refresh")

    assert said.code == 0
    assert said.err.startswith("target `box` does not answer: ")
    assert [line.split()[1:3] for line in said.out.splitlines()[3:5]] == [["here", "succeeded"], ["there", "succeeded"]]


def test_malformed_target_hides_no_other(run: Terminal) -> None:
    add_box(run, more="[targets.odd]\nrecords = 3\nkind = 'local'\n[targets.wrong]\nkind = 'local'\npartition = 'x'\n")
    finish_on(run, "box", "there")

    said = run("status", "--refresh", "-o", "json")

    assert said.code == 0
    assert [each["name"] for each in said.json["jobs"]] == ["there"]
    assert "target `odd` cannot be used here: `3` is no valid targets.odd.records" in said.err
    assert "target `wrong` cannot be used here: " in said.err
    assert run("status", "there", "-o", "json").json["state"] == "succeeded"


def test_target_that_was_never_read_shows_launches_and_how_to_ask(run: Terminal) -> None:
    (run.tree / "runtime.toml").write_text('[targets.far]\nkind = "ssh"\nhost = "nobody.invalid"\nrecords = "/x"\n')
    finish_on(run, "local", "here")
    (run.data / "launched" / "j-0123456789abcdef01234567").write_text("far\n")

    said = run("status")

    assert (said.code, said.err) == (0, "")
    assert "j-01234567  -     unknown" in said.out
    assert said.out.splitlines()[-1] == "jobs on far: not read yet, `runtime status --refresh` asks"


def test_target_defined_otherwise_is_not_shown_with_the_jobs_of_the_earlier_one(run: Terminal) -> None:
    add_box(run)
    finish_on(run, "box", "there")
    rows(run, "--refresh")
    for note in (run.data / "launched").iterdir():
        note.unlink()
    (run.tree / "runtime.toml").write_text(f'[targets.box]\nkind = "local"\nrecords = "{run.tree.parent}/other"\n')

    assert rows(run) == {}


def test_job_that_is_looked_at_or_removed_is_known_so_at_once(run: Terminal) -> None:
    add_box(run)
    job = run("launch", "--on", "box", "--name", "there", "--", "sleep", "600").out.strip()
    run.wait(job, "running")
    rows(run, "--refresh")
    assert run("cancel", job).code == 0
    run.wait(job, "cancelled")

    assert rows(run)["there"]["state"] == "cancelled"
    assert run("gc", "--on", "box", "--older-than", "0s", "--yes").code in (0, 3)
    assert rows(run) == {}


def test_imported_job_is_listed(run: Terminal) -> None:
    add_box(run)
    imported = run.tree.parent / "bundle" / "records"
    finish_on(run, "box", "there")
    (run.tree.parent / "box").rename(run.tree.parent / "bundle-made")
    imported.parent.mkdir()
    (run.tree.parent / "bundle-made").rename(imported)
    [job] = [path.name for path in (imported / "jobs").iterdir()]
    (run.data / "launched" / job).write_text(f"box\n{imported}")

    assert rows(run)["there"]["target"] == "box"
    assert rows(run, "--refresh")["there"]["state"] == "succeeded"
    assert rows(run)["there"]["state"] == "succeeded"


# the choice


def test_overview_out_of_all_jobs_is_chosen_by_state_name_time_and_owner(run: Terminal) -> None:
    run.finish("true", "--name", "train-a")
    run.finish("exit 3", "--name", "train-b")
    running = run.launch("sleep 600", "--name", "eval")
    run.wait(running, "running")

    assert set(rows(run, "--all")) == {"train-a", "train-b", "eval"}
    assert set(rows(run, "--state", "failed,running")) == {"train-b", "eval"}
    assert set(rows(run, "--state", "failed", "--state", "succeeded")) == {"train-a", "train-b"}
    assert set(rows(run, "--name", "train-*")) == {"train-a", "train-b"}
    assert set(rows(run, "--name", "train-*", "--state", "failed", "--mine")) == {"train-b"}
    assert set(rows(run, "--since", "2h")) == {"train-a", "train-b", "eval"}
    assert set(rows(run, "--since", "0s")) == set()
    assert set(rows(run, "--since", "2999-01-01")) == set()
    assert set(rows(run, "--since", "29990101")) == set()
    assert set(rows(run, "--since", "2026-01-01T00:00:00Z")) == {"train-a", "train-b", "eval"}
    assert set(rows(run, "--since", (NOW - timedelta(days=2)).date().isoformat())) == {"train-a", "train-b", "eval"}
    assert set(rows(run, "--on", "local", "--name", "eval")) == {"eval"}
    assert run("status", "--name", "none-*").out == "no such jobs are known; `--refresh` asks every target\n"
    assert run("cancel", running).code == 0


def test_all_jobs_are_listed_beyond_the_newest(run: Terminal) -> None:
    put_ended(run, 30)

    assert len(run("status", "-o", "json").json["jobs"]) == 10
    assert len(run("status", "--all", "-o", "json").json["jobs"]) == 30
    assert len(run("status", "--all").out.splitlines()) == 31
    assert "and 20 older jobs: `runtime status --all`" in run("status").out


def put_ended(run: Terminal, count: int) -> None:
    """Lay jobs that succeeded long ago in the record root of `local`, as a launch of earlier versions left them."""
    run.finish("true", "--name", "first")
    root = run.data / "jobs"
    [first] = list((root / "jobs").iterdir())
    for number in range(count - 1):
        job = f"j-{number:024x}"
        at = (NOW - timedelta(days=3, minutes=number)).isoformat()
        intent = {"name": f"old-{number}", "owner": "mia", "target": "local", "kind": "local", "at": at, "indices": 1}
        (root / "jobs" / job).mkdir(mode=0o700)
        (root / "jobs" / job / "intent.json").write_text(json.dumps({**intent, "offset": 0, "parts": ["p"]}))
        (root / "done" / f"{job}.0.succeeded.0.1").touch()
    assert first.is_dir()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--state", "runing"], "error: no state named `runing` of jobs"),
        (["--state", ""], "error: no state named `` of jobs"),
        (["--state", "failed,"], "error: no state named `` of jobs"),
        (["--since", "yesterday"], "error: `yesterday` is no valid since"),
        (["--since", "2026-13-01"], "error: `2026-13-01` is no valid since"),
        (["--since", "9999999999d"], "error: `9999999999d` is no valid since"),
        (["--since", "7"], "error: `7` is no valid since"),
        (["--since", ""], "error: `` is no valid since"),
        (["--name", ""], "error: `` is no valid name"),
        (["j-91c0", "--all"], "error: `--refresh`, `--all`"),
        (["sweep", "--refresh"], "error: `--refresh`, `--all`"),
        (["--all", "--queue", "default"], "error: a list of jobs goes with neither"),
    ],
)
def test_choice_that_cannot_be_read_is_refused(run: Terminal, words: list[str], said: str) -> None:
    refused = run("status", *words)

    assert (refused.code, refused.out) == (2, "")
    assert refused.err.startswith(said)


# the table


def line(number: int, **changes: Any) -> JobLine:
    values: dict[str, Any] = {
        "job": f"j-{number:024x}",
        "name": "train-7b-lr3e4",
        "target": "hpc",
        "owner": "mia",
        "state": JobState.RUNNING,
        "reason": None,
        "runs": 1,
        "totals": dict.fromkeys(JobState, 0),
        "launched_at": NOW - timedelta(hours=3),
        "ended_at": None,
        "gpus": 8.0,
        "started_at": NOW - timedelta(hours=2),
        "elapsed_s": 7200.0,
        "as_of": NOW - timedelta(minutes=5),
    }
    return JobLine(**(values | changes))


def table(monkeypatch: pytest.MonkeyPatch, width: int, *jobs: JobLine) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr("runtime.cli.output.is_terminal", lambda: True)
    return target_lines(TargetJobs(target="hpc", records="/r", jobs=jobs), NOW)


@pytest.mark.parametrize("width", [80, 100])
def test_table_of_jobs_fits_the_terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    failed = line(2, state=JobState.FAILED, reason=EndReason.APP_FAILED, gpus=0.0, elapsed_s=None, as_of=NOW)

    lines = table(monkeypatch, width, line(1), failed, line(3, name="x" * 63, runs=1000))

    assert max(map(len, lines[1:-1])) <= width
    header = lines[1].split()
    assert header == [
        *["JOB", "NAME", "STATE", "DONE", "TARGET", "GPUS", "TIME"],
        *(["OWNER", "LAUNCHED"] if width == 100 else []),
        *["AS", "OF"],
    ]


def test_table_says_where_how_many_gpus_how_long_and_as_of_when(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = table(monkeypatch, 140, line(1))

    assert lines[2].split()[:8] == ["j-00000000", "train-7b-lr3e4", "running", "0/1", "hpc", "8", "2h", "mia"]
    assert lines[2].split()[-2:] == ["5m", "ago"]


def test_launch_writes_down_its_gpus(run: Terminal) -> None:
    (run.tree / "runtime.toml").write_text('[targets.local]\nkind = "local"\ngpus = 4\n')

    job = run("launch", "--on", "local", "--gpus", "2", "--name", "gpus", "--", "true").out.strip()
    run("wait", job)

    assert rows(run)["gpus"]["gpus"] == 2
    assert rows(run)["gpus"]["elapsed_s"] >= 0


# lists of runs


@pytest.fixture
def array(run: Terminal) -> SimpleNamespace:
    """An array of five runs, each of which prints its index and keeps it; two of them failed."""
    script = 'echo run $RUNTIME_ARRAY_INDEX | tee "$RUNTIME_OUTPUT_DIR/o"; [ $RUNTIME_ARRAY_INDEX -lt 3 ]'
    return SimpleNamespace(run=run, id=run.finish(script, "--seeds", "5", "--name", "sweep5"))


def test_logs_of_several_runs_have_each_line_with_its_index(array: SimpleNamespace) -> None:
    run = array.run

    assert run("logs", array.id, "--index", "1").out == "run 1\n"
    assert run("logs", array.id, "--index", "3,0-1").out == "[0] run 0\n[1] run 1\n[3] run 3\n"
    assert run("logs", "sweep5", "--index", "0", "--index", "4").out == "[0] run 0\n[4] run 4\n"
    assert sorted(run("logs", "-f", array.id, "--index", "2-3").out.splitlines()) == ["[2] run 2", "[3] run 3"]
    assert run("logs", array.id, "--index", "0-1", "--attempt", "9").err.startswith("error: no attempt named `9`")


def test_status_of_several_runs_has_their_attempts_and_states(array: SimpleNamespace) -> None:
    seen = array.run("status", array.id, "--index", "1,3-4", "-o", "json").json

    assert [(each["index"], each["reason"]) for each in seen["attempts"]] == [
        (1, "succeeded"),
        (3, "app_failed"),
        (4, "app_failed"),
    ]
    assert [each["index"] for each in seen["indices"]] == [1, 3, 4]
    text = array.run("status", array.id, "--index", "1,3-4").out
    assert [line.split()[0] for line in text.splitlines() if line.startswith("RUN")] == ["RUN"]


def test_explain_of_several_runs_explains_each(array: SimpleNamespace) -> None:
    one = array.run("explain", array.id, "--index", "3", "-o", "json").json
    many = array.run("explain", array.id, "--index", "0,3", "-o", "json").json

    assert one["name"] == array.id
    assert [(each["index"], each["sentence"].split()[0]) for each in many] == [(0, "run"), (3, "run")]
    assert many[1]["sentence"] == one["sentence"]
    assert array.run("explain", array.id, "--index", "0,3").out.count(f"of job `{array.id[:10]}`") >= 2


def test_fetch_and_retry_take_lists_of_runs(array: SimpleNamespace) -> None:
    run = array.run

    assert run("fetch", array.id, "home", "--index", "1-2,4").code == 0
    assert sorted(path.name for path in (run.tree / "home").glob("[!.]*")) == ["1", "2", "4"]
    assert run("retry", array.id, "--index", "3-4", "--yes", "-o", "json").json[0]["indices"] == [3, 4]


def test_cancel_and_interrupt_take_lists_of_runs(run: Terminal) -> None:
    job = run.launch("sleep 600", "--seeds", "5")
    run.wait(job, "running")

    done = run("cancel", job, "--index", "1-2,4", "-o", "json").json
    refused = run("interrupt", job, "--as", "oom", "--index", "0,9")

    assert done[0]["indices"] == [1, 2, 4]
    assert refused.err.splitlines()[-1] == "  known runs: 0 to 4"
    assert run("cancel", job, "--yes").code == 0


def test_runs_that_are_malformed_or_missing_are_refused_with_the_range(run: Terminal) -> None:
    job = run.finish("true", "--seeds", "2")

    for verb, *words in map(
        str.split, ("status", "logs", "explain", "fetch", "cancel", "retry", "interrupt --as preempt")
    ):
        for text, fact in (("0-99999999999", "known runs: 0 to 1"), ("1-", f"the runs of job `{job}` are 0 to 1")):
            said = run(verb, job, *words, "--index", text)

            assert (said.code, said.out) == (2, ""), verb
            assert fact in said.err, verb
