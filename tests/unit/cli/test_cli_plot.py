"""`runtime plot`: curves of tasks and runs in the terminal, as points and as pictures."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runtime.cli.main import main
from runtime.cli.text_plot import Canvas, draw_bars, draw_curves
from runtime.client.metric_series import Curve, SeriesSource, choose
from runtime.shim.call import ReportFile
from runtime.shim.metrics import Reports
from runtime.tasks.model import CommandEntry
from runtime.testing import sample_task
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


def put(bench: Bench, tmp_path: Path, courses: dict[str, list[float]]) -> None:
    """Put a task for each course, which it has reported over steps; its key is its learning rate."""
    tasks = [sample_task(key, experiment="sweep", entry=CommandEntry(("run", f"--lr={key}"))) for key in courses]
    bench.put(*tasks)
    for task, numbers in zip(tasks, courses.values(), strict=True):
        lease = bench.lease()
        assert lease.task.id == task.id
        path = tmp_path / f"{task.id}.jsonl"
        file = ReportFile(str(path))
        for step, number in enumerate(numbers):
            file.add({"loss": number}, step)
        reports = Reports(str(path))
        reports.finish(60)
        bench.records.keep_reports(task.id, lease.token, reports.encode().encode())
        bench.succeed(lease, metrics=reports.last, metric_ranges=reports.ranges)


def curve(*points: tuple[float, float], label: str = "a") -> Curve:
    return Curve(label, points, points[-1][1] if points else math.nan)


def test_curve_in_ascii_has_axes_and_a_line_about_it() -> None:
    drawn = list(
        draw_curves(
            [curve((0, 0), (10, 5)), curve((0, 5), label="b")],
            over="step",
            canvas=Canvas(width=26, height=5, unicode=False),
        )
    )

    assert drawn == [
        "5 |o                   ***",
        "  |              ******",
        "  |         *****",
        "  |   ******",
        "0 |***",
        "  +-----------------------",
        "   0        step        10",
        "  * a: last 5, 0 to 5",
        "  o b: last 5, 5 to 5",
    ]


def test_curve_in_braille_joins_its_points_with_four_dots_to_a_row() -> None:
    drawn = list(draw_curves([curve((0, 0), (1, 1))], over="step", canvas=Canvas(width=24, height=4)))

    assert (drawn[0][-1], drawn[3][3]) == ("⠉", "⣀")
    assert all("⠀" <= letter <= "⣿" for row in drawn[:4] for letter in row[3:].strip())


@pytest.mark.parametrize(
    "points",
    [
        [(0.0, 1.0)],
        [(5.0, 0.0), (5.0, 0.0)],
        [(0.0, 1e308), (1.0, -1e308)],
        [(0.0, 5e-324), (1.0, 0.0)],
        [(3.0, 1.0), (1.0, 2.0), (2.0, 3.0)],
    ],
    ids=["one", "the same", "huge", "tiny", "a clock that jumps"],
)
def test_curve_of_odd_numbers_fits_its_canvas(points: list[tuple[float, float]]) -> None:
    drawn = list(draw_curves([curve(*points)], over="step", canvas=Canvas(width=60, height=6)))

    assert len(drawn) == 6 + 3
    assert all(len(line) <= 60 for line in drawn)


def test_curve_without_finite_numbers_is_a_sentence() -> None:
    assert list(draw_curves([curve()], over="step", canvas=Canvas())) == ["no finite number was reported"]


def test_tasks_that_reported_once_have_a_bar_each(bench: Bench, tmp_path: Path, run: Run) -> None:
    put(bench, tmp_path, {"0.1": [2.0], "0.3": [1.0]})

    code, out, err = run("plot", "sweep", "loss")

    title, *bars = out.splitlines()
    assert (code, err, title) == (0, "", "loss of sweep")
    assert [(bar.split()[0], bar.split()[-1], bar.count("█") // 10) for bar in bars] == [
        ("lr=0.1", "2", 6),
        ("lr=0.3", "1", 3),
    ]


def test_bars_begin_at_zero_or_below() -> None:
    drawn = list(draw_bars([("adam", 2.0), ("sgd", 1.0), ("none", 0.0)], canvas=Canvas(width=22, unicode=False)))

    assert drawn == ["adam #### 2", " sgd ## 1", "none  0"]


def test_of_many_curves_the_least_the_median_and_the_greatest_are_drawn() -> None:
    sources = [SeriesSource(str(n), float(n), {}, lambda: None) for n in (5, 3, 8, 1, 9, 2, 7, 4, 6)]
    sources.append(SeriesSource("nan", math.nan, {}, lambda: None))

    chosen, said = choose(sources)

    assert [each.label for each in chosen] == ["1", "5", "9"]
    assert said == "least, median and greatest of 10 by their last number"
    assert choose(sources[:8]) == (sources[:8], None)


def test_plot_of_an_experiment_shows_a_curve_for_each_task(bench: Bench, run: Run, tmp_path: Path) -> None:
    put(bench, tmp_path, {"0.1": [4.0, 2.0, 1.0], "0.2": [4.0, 8.0, math.nan]})

    code, out, err = run("plot", "sweep", "loss")

    lines = out.splitlines()
    assert (code, err, lines[0]) == (0, "", "loss of sweep")
    assert lines[1].lstrip().startswith("8 │")
    assert lines[20].lstrip().startswith("1 │")
    assert lines[-2:] == ["  * lr=0.1: last 1, 1 to 4", "  o lr=0.2: last nan, 4 to 8"]


def test_plot_as_csv_and_json_has_the_points(bench: Bench, run: Run, tmp_path: Path) -> None:
    put(bench, tmp_path, {"0.1": [4.0, 2.0], "0.2": [3.0, math.nan]})

    _, as_csv, _ = run("plot", "sweep", "loss", "-o", "csv")
    _, as_json, _ = run("plot", "sweep", "loss", "-o", "json")
    _, versus, _ = run("plot", "sweep", "loss", "--vs", "lr", "-o", "json")

    rows = list(csv.DictReader(io.StringIO(as_csv)))
    assert [(row["name"], row["step"], row["value"]) for row in rows] == [
        ("lr=0.1", "0.0", "4.0"),
        ("lr=0.1", "1.0", "2.0"),
        ("lr=0.2", "0.0", "3.0"),
        ("lr=0.2", "1.0", "nan"),
    ]
    assert [row["value"] for row in json.loads(as_json)] == [4.0, 2.0, 3.0, None]
    assert json.loads(versus) == [{"name": "lr=0.1", "lr": 0.1, "value": 2.0}]


@pytest.mark.parametrize("over", [[], ["--x", "time"], ["--vs", "lr"]], ids=["step", "time", "parameter"])
def test_plot_as_a_picture_writes_a_png(bench: Bench, run: Run, tmp_path: Path, over: list[str]) -> None:
    put(bench, tmp_path, {"0.1": [4.0, 2.0], "0.2": [3.0, 1.0]})

    code, out, err = run("plot", "sweep", "loss", "--png", "loss.png", *over)

    assert (code, out, err) == (0, "", "wrote loss.png\n")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_plot_of_numbers_too_far_apart_for_a_picture_is_refused_and_leaves_no_file(
    bench: Bench, run: Run, tmp_path: Path
) -> None:
    put(bench, tmp_path, {"0.1": [1.7e308, -1.7e308]})

    code, out, err = run("plot", "sweep", "loss", "--png", "loss.png")

    assert (code, out) == (2, "")
    assert err.startswith("error: `loss` cannot be drawn as a picture: its numbers are too large or too far apart\n")
    assert not (tmp_path / "loss.png").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sweep", "los"], "error: no metric named `los`"),
        (["nope", "loss"], "error: no experiment named `nope`"),
        (["sweep", "loss", "--vs", "depth"], "error: no parameter named `depth`"),
        (["sweep", "loss", "--vs", "lr", "--x", "time"], "error: `--vs` draws over a parameter"),
        (["sweep", "loss", "--png", "a.png", "-o", "csv"], "error: `--png` writes a picture"),
        (["sweep", "loss", "--png", "no/such/folder/a.png"], "error: cannot write `no/such/folder/a.png`"),
        (["sweep", "loss", "--on", "local"], "error: no job named `sweep`"),
    ],
)
def test_plot_of_what_cannot_be_drawn_is_refused(
    bench: Bench, run: Run, tmp_path: Path, words: list[str], said: str
) -> None:
    put(bench, tmp_path, {"0.1": [4.0, 2.0]})

    code, out, err = run("plot", *words)

    assert (code, out) == (2, "")
    assert err.startswith(said)


def test_number_that_tasks_returned_is_drawn_over_a_parameter_and_has_no_course(bench: Bench, run: Run) -> None:
    for rate in ("0.1", "0.2"):
        bench.put(sample_task(rate, experiment="sweep", entry=CommandEntry(("run", f"--lr={rate}"))))
        bench.succeed(bench.lease(), value={"loss": float(rate) * 2, "name": "x", "done": True})

    code, out, _ = run("plot", "sweep", "value.loss", "--vs", "lr", "-o", "json")
    _, _, without = run("plot", "sweep", "value.loss")
    _, _, unknown = run("plot", "sweep", "loss")

    assert (code, [(row["lr"], row["value"]) for row in json.loads(out)]) == (0, [(0.1, 0.2), (0.2, 0.4)])
    assert without.startswith(
        "error: the course of `value.loss` was not kept, only its last number\nhint: `--vs PARAM`"
    )
    assert unknown.startswith("error: no metric named `loss`\n  known metrics: value.loss\n")


def test_plot_of_an_experiment_that_reported_nothing_names_how_to_report(bench: Bench, run: Run) -> None:
    bench.put(sample_task("a", experiment="sweep"))

    code, _, err = run("plot", "sweep", "loss")

    assert code == 2
    assert err.startswith("error: nothing was reported yet")
    assert "$RUNTIME_METRICS" in err
