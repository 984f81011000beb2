"""The results of a job's runs, and what they report meanwhile, on the local launcher."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import runtime
from runtime.cli.main import main
from runtime.client.jobs.status import read_job
from tests.experiments_support import open_lab
from tests.services_support import PATIENCE_S, wait_until

MODULE = """\
import time
from pathlib import Path

class Odd:
    pass

def fit(run, variant):
    for step in range(3):
        run.report(step=step, loss=variant["lr"] / (step + 1))
    if variant["lr"] > 2:
        raise ValueError("diverged")
    return {"acc": variant["lr"]} if variant["lr"] < 2 else Odd()

def fit_item(item):
    return fit(runtime_run(), item)

def hang(run, variant):
    run.progress(3, 10, loss=0.5)
    while not Path(variant).exists():
        time.sleep(0.02)
"""


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with open_lab("lab_of_results", MODULE, tmp_path, monkeypatch) as lab:
        yield lab


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run_command(*args: str) -> tuple[int, str, str]:
        code = main(args)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run_command


def job_of(call: Any) -> Any:
    return call._source.job


def ended(call: Any) -> None:
    call.exception(timeout=PATIENCE_S)


def test_results_of_a_call_are_its_variant_value_and_what_it_reported(lab: Any, run: Any) -> None:
    call = runtime.run_experiment(lab.fit, {"lr": 1.5, "net": {"depth": 2}}, name="fit", target="local")
    ended(call)

    code, out, err = run("results", job_of(call).id, "-o", "json")
    [row] = json.loads(out)

    assert (code, err) == (0, "")
    assert row["params"] == {"lr": 1.5, "net.depth": 2}
    assert (row["state"], row["value"], row["value_type"], row["attempts"]) == ("succeeded", {"acc": 1.5}, None, 1)
    assert (row["metrics"], row["metric_ranges"]) == ({"loss": 0.5}, {"loss": [0.5, 1.5]})
    assert row["duration_s"] > 0


def test_results_show_the_type_of_a_pickle_and_the_error_of_a_call_that_failed(lab: Any, run: Any) -> None:
    odd = runtime.run_experiment(lab.fit, {"lr": 2}, name="odd", target="local")
    failed = runtime.run_experiment(lab.fit, {"lr": 3}, name="failed", target="local")
    for each in (odd, failed):
        ended(each)

    _, odd_out, _ = run("results", job_of(odd).id)
    _, failed_out, _ = run("results", job_of(failed).id)

    assert odd_out.split("\t")[:5] == ["0", "lr=2", "succeeded", "<lab_of_results.Odd>", "loss=0.666667"]
    assert failed_out.split("\t")[:5] == ["0", "lr=3", "failed", "ValueError: diverged", "loss=1"]


def test_results_and_plots_of_a_name_are_those_of_all_its_jobs(lab: Any, run: Any) -> None:
    calls = [runtime.run_experiment(lab.fit, {"lr": lr}, name="sac", target="local") for lr in (1.5, 0.5)]
    for call in calls:
        ended(call)

    code, out, err = run("results", "sac", "-o", "json")

    rows = json.loads(out)
    assert (code, [row["job"] for row in rows]) == (0, [job_of(call).id for call in calls])
    assert [row["params"] for row in rows] == [{"lr": 1.5}, {"lr": 0.5}]
    assert "`sac` is the name of 2 jobs on local; these are all of them" in err
    points = json.loads(run("plot", "sac", "loss", "-o", "json")[1])
    assert {point["name"] for point in points} == {"lr=1.5", "lr=0.5"}


def test_results_of_an_array_of_commands_have_its_grid_and_are_chosen_and_sorted(lab: Any, run: Any) -> None:
    script = """echo '{"loss": '$RUNTIME_PARAM_LR'}' >> $RUNTIME_METRICS; exit {code}"""
    words = ["launch", "--on", "local", "--name", "train", "--grid", "lr=3,1,2", "--grid", "code=0,3", "--follow"]
    code, out, _ = run(*words, "-o", "json", "--", "sh", "-c", script)
    job = json.loads(out)["job"] if out.startswith("{") else "train"

    code, out, _ = run(
        "results", job, "--where", "state=succeeded", "--sort", "-lr", "--columns", "index,lr,loss", "-o", "csv"
    )

    assert code == 0
    assert list(csv.DictReader(io.StringIO(out))) == [
        {"index": "0", "lr": "3", "loss": "3.0"},
        {"index": "4", "lr": "2", "loss": "2.0"},
        {"index": "2", "lr": "1", "loss": "1.0"},
    ]
    _, out, _ = run("results", job, "-o", "csv", "--limit", "1")
    [first] = csv.DictReader(io.StringIO(out))
    assert (first["params.lr"], first["params.code"], first["metrics.loss"]) == ("3", "0", "3.0")


def test_status_shows_what_a_run_that_goes_on_has_reported(
    lab: Any, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = runtime.run_experiment(lab.hang, str(tmp_path / "go"), name="hang", target="local")
    job = job_of(call)

    assert wait_until(lambda: read_job(job).reports != ())
    [seen] = read_job(job).reports
    _, out, _ = run("status", job.id)
    (tmp_path / "go").touch()
    ended(call)

    assert (seen.index, seen.attempt, seen.step, seen.of, dict(seen.metrics)) == (0, 1, 3.0, 10.0, {"loss": 0.5})
    assert "progress    3 of 10, 30 %" in out
    assert "metrics     loss=0.5" in out
