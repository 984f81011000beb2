"""`runtime.shim.metrics`: what an attempt reports, summed up in bounded memory, whatever its file holds."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from runtime.shim.call import ReportFile
from runtime.shim.metrics import LOOK_BYTES, MOST_LINE, MOST_NAMES, MOST_POINTS, Reports


def sum_up(path: Path, *, seconds: float = 60) -> dict[str, Any]:
    reports = Reports(str(path))
    reports.finish(seconds)
    found: dict[str, Any] = json.loads(reports.encode())
    return found


def test_reports_have_last_least_and_greatest_number_of_each_name(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = ReportFile(str(path))
    for step, loss in enumerate([3.0, 1.0, 2.0]):
        file.add({"loss": loss}, step, 3)
    file.add({"accuracy": 0.5})

    reports = Reports(str(path))
    reports.finish(60)

    assert reports.last == {"loss": 2.0, "accuracy": 0.5}
    assert reports.ranges == {"loss": [1.0, 3.0], "accuracy": [0.5, 0.5]}
    assert (reports.lines, reports.skipped, reports.step, reports.of) == (4, 0, 2.0, 3.0)


def test_reports_of_plain_lines_and_numbers_without_a_time_count(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 3, "loss": 1, "note": "text", "done": true, "of": null}\n')

    said = sum_up(path)

    assert said["step"] == 3.0
    assert list(said["names"]) == ["loss"]
    [[at, step, value]] = said["names"]["loss"]["points"]
    assert (step, value, at > 0) == (3.0, 1.0, True)


def test_reports_with_a_torn_last_line_count_it_once_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"loss": 1}\n{"lo')
    reports = Reports(str(path))

    reports.look()
    before = dict(reports.last)
    with path.open("a") as opened:
        opened.write('ss": 2}\n{"loss": 3')
    reports.finish(60)

    assert before == {"loss": 1.0}
    assert (reports.last, reports.lines, reports.skipped) == ({"loss": 2.0}, 2, 1)


def test_reports_of_nan_and_infinities_are_kept_and_nan_is_no_extreme(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = ReportFile(str(path))
    for loss in (math.nan, 1.0, math.inf, math.nan):
        file.add({"loss": loss, "bad": math.nan})

    reports = Reports(str(path))
    reports.finish(60)

    assert math.isnan(reports.last["loss"])
    assert math.isnan(reports.last["bad"])
    assert reports.ranges == {"loss": [1.0, math.inf]}


def test_reports_of_a_hostile_file_pass_over_what_is_no_report(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    good = b'{"loss": 1}\n'
    deep, huge = b"[" * 100_000 + b"\n", b'{"x": ' + b"9" * 5000 + b"}\n"
    path.write_bytes(
        good
        + os.urandom(1000).replace(b"\n", b"")
        + b"\n"
        + deep
        + huge
        + b'{"x": 1e999, "y": '
        + b"9" * 400
        + b"}\n"
        + b"x" * (3 * LOOK_BYTES)
        + b"\n[1]\n7\nnull\n\n"
        + b'{"'
        + b"n" * 300
        + b'": 1}\n'
        + b'{"loss": 2}'
    )

    reports = Reports(str(path))
    reports.finish(60)

    assert reports.last == {"loss": 2.0, "x": math.inf}
    assert reports.skipped == 8
    assert len(reports.encode()) < 1000


def test_long_line_at_the_edge_of_a_look_is_one_skipped_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"y" * (MOST_LINE + 10) + b'\n{"loss": 1}\n')
    reports = Reports(str(path))

    while reports.look(1000):
        pass

    assert (reports.last, reports.lines, reports.skipped) == ({"loss": 1.0}, 1, 1)


def test_reports_of_many_lines_keep_few_points_and_exact_extremes(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"at": 1.5, "step": n, "loss": -n if n == 77_777 else 1 / (n + 1)}) for n in range(100_000)]
    path.write_text("\n".join(lines) + "\n")

    said = sum_up(path)["names"]["loss"]

    assert (said["count"], said["min"], said["max"]) == (100_000, -77_777.0, 1.0)
    assert 256 < len(said["points"]) <= MOST_POINTS // 4 + 1
    assert said["points"][0] == [1.5, 0.0, 1.0]
    assert said["points"][-1] == [1.5, 99_999.0, 1e-05]
    steps = [step for _, step, _ in said["points"][:-1]]
    assert steps == list(range(0, 100_000, said["every"]))


def test_reports_of_many_names_keep_a_bounded_number_of_them(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with path.open("w") as opened:
        for step in range(300):
            opened.write(json.dumps({"step": step, **{f"m{n}": n for n in range(MOST_NAMES + 10)}}) + "\n")

    said = sum_up(path)

    assert len(said["names"]) == MOST_NAMES
    assert sum(len(each["points"]) for each in said["names"].values()) <= MOST_POINTS + MOST_NAMES
    assert said["skipped"] == 300 * 10


def test_reports_without_time_to_read_all_have_the_end(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    line = b'{"loss": 1, "pad": "' + b"p" * 1000 + b'"}\n'
    path.write_bytes(line * (4 * LOOK_BYTES // len(line)) + b'{"loss": 9}\n')

    said = sum_up(path, seconds=0)

    assert said["names"]["loss"]["last"] == 9.0
    assert said["unread"] > 0


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "nothing"])
def test_reports_of_what_is_no_file_are_none(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "metrics.jsonl"
    if kind == "link":
        (tmp_path / "other").write_text('{"loss": 1}\n')
        path.symlink_to(tmp_path / "other")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()

    assert sum_up(path)["names"] == {}


def test_reports_of_a_file_that_is_begun_anew_go_on(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"loss": 1}\n{"loss": 2}\n')
    reports = Reports(str(path))
    reports.look()
    path.write_text('{"loss": 5}\n')

    reports.finish(60)

    assert (reports.last, reports.lines) == ({"loss": 5.0}, 3)


@pytest.mark.parametrize("name", ["at", "step", "of"])
def test_report_of_a_taken_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"no metric can be called `{name}`"):
        ReportFile(str(tmp_path / "m")).add({name: 1})


@pytest.mark.parametrize(
    ("numbers", "step", "raised", "said"),
    [
        ({"loss": "high"}, None, ValueError, "`loss` is 'high', which is no number"),
        ({"loss": None}, None, TypeError, "`loss` is None, which is no number"),
        ({"loss": 1.0}, "first", ValueError, "`step` is 'first', which is no number"),
    ],
)
def test_report_of_what_is_no_number_names_it(
    tmp_path: Path, numbers: dict[str, Any], step: Any, raised: type[Exception], said: str
) -> None:
    with pytest.raises(raised, match=f"^{said}$"):
        ReportFile(str(tmp_path / "m")).add(numbers, step)


def test_report_of_a_whole_number_beyond_all_floats_is_infinite(tmp_path: Path) -> None:
    ReportFile(str(tmp_path / "m")).add({"most": 10**400, "least": -(10**400)}, 1)

    line = json.loads((tmp_path / "m").read_text())
    assert (line["most"], line["least"], line["step"]) == (math.inf, -math.inf, 1.0)
