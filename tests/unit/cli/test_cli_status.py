"""`runtime status` as typed: its output for people, for pipes and for programs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from runtime.cli import output
from runtime.cli import status as command
from runtime.cli.main import main
from runtime.cli.status import RateMeter, is_over
from runtime.cli.status_text import render, summarise
from runtime.client.tasks.status import read_experiment, read_overview, read_task
from runtime.testing import sample_task
from tests.services_support import replace_sleep
from tests.verbs_support import Bench


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """The stack `local`, on a file that commands of this test use too."""
    monkeypatch.setenv("RUNTIME_DATA_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    bench = Bench.sqlite(tmp_path, "local.db")
    yield bench
    bench.close()


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run_command(*args: str) -> tuple[int, str, str]:
        code = main(["status", *args])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run_command


def test_status_of_an_empty_stack_says_how_to_begin(bench: Bench, run: Run) -> None:
    code, out, err = run()

    assert (code, err) == (0, "")
    assert out == "stack local\nnothing was submitted yet; `runtime submit --help` shows how\n"


def test_overview_shows_experiments_what_waits_and_what_failed(bench: Bench, run: Run) -> None:
    bench.put(sample_task("1", experiment="sweep"), sample_task("2", experiment="sweep"))
    failed = bench.fail(message="Traceback\nValueError: nan")

    code, out, _ = run()

    assert code == 0
    assert "EXPERIMENT  QUEUED  FAILED" in out
    assert "1 task waits because no live worker serves queue `default`: `runtime worker --queue default`" in out
    assert "failed in the last day, 1 since you last looked" in out
    assert re.search(rf"{failed.task_id}  app_failed  (now|[\d.]+s ago) .* ValueError: nan\n", out)
    assert f"why: `runtime explain {failed.task_id}`" in out


def test_overview_is_padded_to_no_error_and_cut_on_a_terminal(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.put(sample_task("1"), sample_task("2"))
    bench.fail(message="short")
    bench.fail(message="e" * 900)
    seen = read_overview(bench, now=bench.now)

    everywhere = render(seen, bench.now)
    monkeypatch.setattr(output, "is_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", "100")
    on_terminal = render(seen, bench.now)

    assert max(len(line) for line in everywhere if "short" in line) < 150
    assert all(line == line.rstrip() for line in everywhere)
    rows = [line for line in on_terminal if "app_failed" in line]
    assert {len(line) for line in rows if line.endswith("…")} == {100}
    assert len(rows) == 2


def test_counts_of_one_have_a_noun_for_one(bench: Bench) -> None:
    bench.put(sample_task())
    bench.report()

    assert summarise(read_overview(bench, now=bench.now)) == "bench: 1 queued, 1 live worker"


def test_overview_says_only_once_that_a_failure_is_new(bench: Bench, run: Run) -> None:
    bench.put(sample_task())
    bench.fail()

    first, second = run()[1], run()[1]

    assert "1 since you last looked" in first
    assert "since you last looked" not in second
    assert "failed in the last day" in second


def test_overview_as_json_leaves_what_is_new_to_people(bench: Bench, run: Run) -> None:
    bench.put(sample_task())
    bench.fail()
    run("-o", "json")

    assert "1 since you last looked" in run()[1]


def test_experiment_as_text(bench: Bench, run: Run) -> None:
    bench.put(*(sample_task(str(number), experiment="sweep") for number in range(3)))
    bench.succeed()
    bench.report(rate_per_s=0.5)

    code, out, _ = run("sweep")

    assert code == 0
    lines = out.splitlines()
    assert lines[0].startswith("sweep · queue default · submitted ")
    assert lines[1:3] == ["  queued     2", "  succeeded  1"]
    assert "done        33 % of 3, 0.5/s, about 4s left" in lines
    assert "waits       1 live worker will take them next" in lines


def test_experiment_by_its_beginning_and_as_last(bench: Bench, run: Run) -> None:
    bench.put(sample_task(experiment="sweep-42"))

    assert run("swee")[1].startswith("sweep-42 ")
    assert run("last")[1].startswith("sweep-42 ")


def test_failures_in_a_pipe_are_lines_of_tabs(bench: Bench, run: Run) -> None:
    bench.put(*(sample_task(str(number)) for number in range(12)))
    for number in range(12):
        bench.fail(message=f"failed {number}")

    code, out, _ = run("sample", "--failed")

    rows = [line.split("\t") for line in out.splitlines()]
    assert code == 0
    assert len(rows) == 12
    assert {row[3] for row in rows} == {f"failed {number}" for number in range(12)}
    assert all(row[0].startswith("t-") and len(row) == 5 for row in rows)


def test_failures_of_no_experiment_are_refused(bench: Bench, run: Run) -> None:
    code, _, err = run("--failed")

    assert code == 2
    assert err.startswith("error: `--failed` lists the failures of an experiment\n")


def test_task_as_text_shows_attempts_and_where_things_lie(bench: Bench, run: Run) -> None:
    task = sample_task(submitted_by="ada")
    bench.put(task)
    note = bench.try_again()
    bench.fail(message="Traceback\nValueError: nan", attempts=2, exit_code=1, outputs_url="/outputs/1")

    out = run(task.id[:10])[1]

    lines = out.splitlines()
    assert lines[:2] == [task.id, "state       failed, generation 1"]
    assert "error       ValueError: nan" in lines
    assert "outputs     /outputs/1" in lines
    assert any(line.startswith("record      sqlite:") for line in lines)
    assert any(note.token in line and "app_failed" in line for line in lines)
    assert lines[-1] == f"why: `runtime explain {task.id}`"


def test_worker_as_text_shows_what_it_runs(bench: Bench, run: Run) -> None:
    bench.report("w-node1-7", running=("t-1",), declined={"t-2": "needs 1 GPU"}, labels={"zone": "a"}, done=3)

    out = run("w-node")[1]

    assert "w-node1-7" in out
    assert "state       live, seen " in out
    assert "slots       1 of 2 busy" in out
    assert "runs t-1" in out
    assert "cannot hold t-2: needs 1 GPU" in out


def test_unknown_name_suggests_the_nearest(bench: Bench, run: Run) -> None:
    bench.put(sample_task(experiment="sweep"))

    code, out, err = run("swepe")

    assert (code, out) == (2, "")
    assert err.splitlines()[-1] == "hint: did you mean `sweep`?"


# watching


def test_watch_in_a_pipe_says_a_line_for_each_change_and_ends_by_itself(
    bench: Bench, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.put(sample_task("1"), sample_task("2"))
    steps = iter([bench.succeed, lambda: None, bench.succeed])
    replace_sleep(monkeypatch, lambda _: next(steps)())

    code, out, _ = run("sample", "--watch")

    assert code == 0
    assert out.splitlines() == [
        "sample: 2 queued of 2",
        "sample: 1 queued, 1 succeeded of 2",
        "sample: 2 succeeded of 2",
    ]


def test_watch_interrupted_leaves_quietly(bench: Bench, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.put(sample_task())

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    replace_sleep(monkeypatch, interrupt)

    assert run("sample", "--watch") == (130, "sample: 1 queued of 1\n", "")


def test_watch_as_json_is_refused(bench: Bench, run: Run) -> None:
    assert run("--watch", "-o", "json")[0] == 2


def test_watch_on_a_terminal_draws_in_place(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.put(sample_task())
    bench.succeed()
    monkeypatch.setattr(command, "is_terminal", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")

    code = main(["status", "sample", "--watch"])

    out = capsys.readouterr().out
    assert code == 0
    assert "succeeded  1" in out
    assert "\x1b[" in out


def test_rate_is_measured_after_five_seconds(bench: Bench) -> None:
    bench.put(*(sample_task(str(number)) for number in range(20)))
    meter = RateMeter()
    first = read_experiment(bench, "sample", now=bench.now)
    for _ in range(10):
        bench.succeed()
    later = read_experiment(bench, "sample", now=bench.now)

    early = meter.measure(first, 100.0)
    soon = meter.measure(first, 104.0)
    measured = meter.measure(later, 105.0)

    assert (early.rate_per_s, soon.rate_per_s) == (0, 0)
    assert (measured.rate_per_s, measured.eta_s) == (2.0, 5.0)


def test_rate_forgets_what_is_older_than_a_minute(bench: Bench) -> None:
    bench.put(*(sample_task(str(number)) for number in range(20)))
    meter = RateMeter()
    seen = read_experiment(bench, "sample", now=bench.now)
    meter.measure(seen, 0.0)
    for _ in range(10):
        bench.succeed()
    done = read_experiment(bench, "sample", now=bench.now)
    meter.measure(done, 10.0)

    assert meter.measure(done, 69.0).rate_per_s == 0


def test_watching_is_over_when_nothing_is_left(bench: Bench) -> None:
    task = sample_task()
    bench.put(task)
    waiting = read_experiment(bench, "sample", now=bench.now), read_task(bench, task.id)
    bench.succeed()
    ended = read_experiment(bench, "sample", now=bench.now), read_task(bench, task.id)

    assert [is_over(seen) for seen in (*waiting, *ended)] == [False, False, True, True]
    assert not is_over(read_overview(bench, now=bench.now))


# rendering


def test_experiment_that_was_cancelled_or_paused_says_so(bench: Bench) -> None:
    bench.put(sample_task())
    seen = read_experiment(bench, "sample", now=bench.now)
    cancelled = replace(
        seen, cancelled_before=bench.now - timedelta(minutes=2), why="queue `q` is paused", next_step="x"
    )

    lines = render(cancelled, bench.now)

    assert "cancelled   what was submitted before 2m ago" in lines
    assert "waits       queue `q` is paused: `x`" in lines


def test_numbers_that_were_not_counted_say_how_old_they_are(bench: Bench) -> None:
    bench.put(sample_task())
    seen = replace(
        read_experiment(bench, "sample", now=bench.now), exact=False, as_of=bench.now - timedelta(seconds=12)
    )

    assert "as of       12s ago, as workers report; `--exact` counts" in render(seen, bench.now)


def test_summaries_are_one_line(bench: Bench) -> None:
    task = sample_task()
    bench.put(task)
    bench.report("w-one", done=2)
    overview = read_overview(bench, now=bench.now)

    assert summarise(overview) == "local: 1 queued, 1 live worker".replace("local", bench.name)
    assert summarise(overview.workers[0]) == "w-one: live, 0 running, 2 succeeded, 0 failed"
    assert summarise(read_task(bench, task.id)) == f"{task.id}: queued"


# cost


def test_status_loads_neither_rich_nor_a_cloud_library(bench: Bench) -> None:
    script = (
        "import sys, json\nfrom runtime.cli.main import main\nassert main(['status']) == 0\n"
        "sys.stderr.write(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=240)
    loaded: list[Any] = json.loads(done.stderr)

    assert not {"rich", "google", "obstore", "boto3", "jsonargparse", "prometheus_client"} & set(loaded)
