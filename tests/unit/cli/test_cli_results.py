"""`runtime results`, `runtime wait`, and `logs` and `fetch` of an experiment, as typed."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runtime.cli.main import main
from runtime.tasks.model import CommandEntry
from runtime.testing import sample_task
from tests.services_support import replace_sleep
from tests.verbs_support import Bench

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """The stack `local`, on a file that commands of this test use too."""
    monkeypatch.setenv("RUNTIME_DATA_DIR", str(tmp_path / "data"))
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    bench = Bench.sqlite(tmp_path / "data", "local.db")
    yield bench
    bench.close()


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run_command(*args: str) -> tuple[int, str, str]:
        code = main(args)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run_command


def put_three(bench: Bench) -> list[str]:
    """Put `a`, which returns a dictionary, `b`, which fails, and `c`, which waits."""
    tasks = [sample_task(key, experiment="sweep", entry=CommandEntry(("run", key))) for key in "abc"]
    bench.put(*tasks)
    leases = {lease.task.key: lease for lease in (bench.lease(), bench.lease())}
    bench.succeed(leases["a"], value={"acc": 0.5}, metrics={"loss": 0.25}, log="hello\n")
    bench.fail(leases["b"], message="Traceback\nValueError: nan")
    return [task.id for task in tasks]


def test_results_for_a_pipe_are_a_line_for_each_task(bench: Bench, run: Run) -> None:
    a, b, c = put_three(bench)

    code, out, err = run("results", "sweep")

    assert code == 0
    assert out.splitlines() == [
        f'{a}\ta\trun a\tsucceeded\t{{"acc": 0.5}}\tloss=0.25\t5s',
        f"{b}\tb\trun b\tfailed\tValueError: nan\t-\t5s",
        f"{c}\tc\trun c\tqueued\t-\t-\t-",
    ]
    assert err == "1 task has not ended; `runtime wait sweep` returns when all have\n"


def test_results_as_csv_have_a_column_for_each_metric(bench: Bench, run: Run) -> None:
    put_three(bench)

    code, out, _ = run("results", "sweep", "-o", "csv")
    rows = list(csv.DictReader(io.StringIO(out)))

    assert code == 0
    assert [(row["key"], row["state"], row["metrics.loss"]) for row in rows] == [
        ("a", "succeeded", "0.25"),
        ("b", "failed", ""),
        ("c", "queued", ""),
    ]
    assert json.loads(rows[0]["value"]) == {"acc": 0.5}
    assert (rows[0]["duration_s"], rows[1]["message"]) == ("5.0", "ValueError: nan")


def test_results_as_csv_keep_control_characters_and_formulas_in_their_cells(bench: Bench, run: Run) -> None:
    texts = ["a\rb", "a\r\nb", "\n", 'a"b,c', "=1+1", "\x1b[31m", "a\tb"]
    bench.put(*(sample_task(str(number), experiment="odd") for number in range(len(texts))))
    for text in texts:
        bench.succeed(bench.lease(), value=text)

    _, out, _ = run("results", "odd", "-o", "csv")

    assert [row["value"] for row in csv.DictReader(io.StringIO(out, newline=""))] == texts
    assert "\r\n" not in out.replace("a\r\nb", "")


def test_results_show_people_a_nan_and_programs_null(bench: Bench, run: Run) -> None:
    bench.put(sample_task("a", experiment="odd"))
    bench.succeed(bench.lease(), value={"loss": math.nan})

    table, document = run("results", "odd")[1], run("results", "odd", "-o", "json")[1]

    assert '{"loss": NaN}' in table
    assert json.loads(document)[0]["value"] == {"loss": None}


def test_results_as_json_have_the_values(bench: Bench, run: Run) -> None:
    put_three(bench)

    _, out, _ = run("results", "last", "-o", "json")

    assert [each["value"] for each in json.loads(out)] == [{"acc": 0.5}, None, None]


def test_results_of_one_task_are_one_row(bench: Bench, run: Run) -> None:
    task = put_three(bench)[0]

    _, out, err = run("results", task)

    assert (out.count("\n"), err) == (1, "")
    assert out.startswith(f"{task}\ta\t")


def test_status_of_a_task_shows_its_value(bench: Bench, run: Run) -> None:
    task = put_three(bench)[0]

    _, text, _ = run("status", task)
    _, fields, _ = run("status", task, "-o", "json")

    assert 'value       {"acc": 0.5}\n' in text
    assert json.loads(fields)["value"] == {"acc": 0.5}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["results", "nope"], "error: no experiment named `nope`"),
        (["results", "j-0123"], "error: no job named `j-0123`"),
        (["results", "sweep", "--on", "local"], "error: no job named `sweep`"),
        (["results", "sweep", "--columns", "key,los"], "error: no column named `los` in these results"),
        (["results", "sweep", "--sort", "-nothing"], "error: no column named `nothing` in these results"),
        (["results", "sweep", "--where", "loss"], "error: `loss` is no valid where"),
        (["results", "sweep", "--columns", ","], "error: `--columns` names no column"),
        (["results", "sweep", "-o", "xml"], "error: `--output` of `runtime results`"),
        (["wait", "nope"], "error: no experiment named `nope`"),
        (["wait", "sweep", "--timeout", "soon"], "error: `soon` is no valid timeout"),
        (["wait", "t-5d0c", "--on", "hpc"], "error: no target named `hpc`"),
        (["wait", "sweep", "--on", "hpc"], "error: no target named `hpc`"),
        (["wait", "sweep", "--on", "local"], "error: no job named `sweep`"),
        (["logs", "sweep", "-f"], "error: `--follow` and `--attempt` are of one task"),
        (["fetch", "sweep"], "error: no task of `sweep` has outputs"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else "",
)
def test_wrong_request_is_refused_with_a_next_step(bench: Bench, run: Run, words: list[str], said: str) -> None:
    put_three(bench)

    code, out, err = run(*words)

    assert (code, out) == (2, "")
    assert err.startswith(said)
    assert "\nhint: " in err or "\n  allowed: " in err


def test_wait_returns_1_if_a_task_failed_and_names_it(bench: Bench, run: Run) -> None:
    _, b, _ = put_three(bench)
    bench.succeed()

    code, out, err = run("wait", "sweep")

    assert (code, out) == (1, "")
    assert f"  {b}: ValueError: nan\n" in err


def test_wait_for_a_task_that_succeeded_returns_0(bench: Bench, run: Run) -> None:
    code, out, _ = run("wait", put_three(bench)[0], "-o", "json")

    assert code == 0
    assert json.loads(out)["complete"] is True


def test_wait_that_times_out_returns_124_and_says_how_to_go_on(bench: Bench, run: Run) -> None:
    put_three(bench)

    code, _, err = run("wait", "sweep", "--timeout", "10ms")

    assert code == 124
    assert err.endswith("not over after 10ms, the work goes on; `runtime wait sweep` waits again\n")


def test_interrupted_wait_leaves_the_work_alone(bench: Bench, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    put_three(bench)

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    replace_sleep(monkeypatch, interrupt)

    code, _, err = run("wait", "sweep")

    assert code == 130
    assert err.endswith("detached, the work goes on; come back with `runtime wait sweep`\n")


def test_wait_for_a_job_returns_with_its_end(tmp_path: Path, run: Run, bench: Bench) -> None:
    _, job, _ = run("launch", "--on", "local", "--", "sh", "-c", "exit 3")

    code, _, err = run("wait", job.strip())

    assert code == 1
    assert f"job {job.strip()} failed (app_failed)\nwhy: `runtime explain {job[:10]}`\n" in err


def test_wait_for_a_job_that_times_out_returns_124(tmp_path: Path, run: Run, bench: Bench) -> None:
    _, job, _ = run("launch", "--on", "local", "--", "sh", "-c", f"until [ -e {tmp_path}/go ]; do sleep 0.05; done")

    code, _, err = run("wait", job.strip(), "--timeout", "10ms")
    (tmp_path / "go").touch()
    ended, _, _ = run("wait", "last")

    assert code == 124
    assert "not over after 10ms, the work goes on" in err
    assert ended == 0


def test_wait_for_a_name_is_for_its_newest_job_and_those_that_have_not_ended(
    tmp_path: Path, run: Run, bench: Bench
) -> None:
    def launch(*command: str) -> str:
        _, job, _ = run("launch", "--on", "local", "--name", "sac", "--", *command)
        return job.strip()

    ended = launch("sh", "-c", "exit 3")
    run("wait", ended)
    waits = launch("sh", "-c", f"until [ -e {tmp_path}/go ]; do sleep 0.05; done")
    newest = launch("true")
    early, out, _ = run("wait", "sac", "--timeout", "10ms", "-o", "json")
    (tmp_path / "go").touch()
    code, _, err = run("wait", "sac")

    assert (early, json.loads(out)["complete"], [each["job"] for each in json.loads(out)["jobs"]]) == (
        124,
        False,
        [waits, newest],
    )
    assert code == 0
    assert f"job {newest} succeeded\n" in err
    assert ended not in err


def test_logs_of_an_experiment_are_those_of_its_tasks(bench: Bench, run: Run) -> None:
    put_three(bench)

    assert run("logs", "sweep") == (0, "[a] hello\n", "")


def test_fetch_of_an_experiment_makes_a_folder_for_each_task(bench: Bench, run: Run, tmp_path: Path) -> None:
    tasks = [sample_task(key, experiment="sweep") for key in ("a", "../b", "c")]
    bench.put(*tasks)
    for lease in [bench.lease() for _ in tasks[:2]]:
        outputs = tmp_path / "data" / lease.token
        outputs.mkdir()
        (outputs / "model").write_text(str(lease.task.key))
        bench.succeed(lease, outputs_url=str(outputs))

    code, _, err = run("fetch", "sweep")

    assert code == 0
    assert err.endswith("2 files, 5B, in sweep\n")
    found = {str(path.relative_to(tmp_path)): path.read_text() for path in (tmp_path / "sweep").rglob("model")}
    assert found == {"sweep/a/model": "a", f"sweep/{tasks[1].id}/model": "../b"}
