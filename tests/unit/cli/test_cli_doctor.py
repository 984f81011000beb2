"""`runtime doctor`: its output and exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.cli import console, output
from runtime.cli.main import main
from runtime.outputs import RecordsOutput, StackOutputs, encode_outputs
from runtime.stack import find as stacks
from tests.output_support import differences, documented

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("RUNTIME_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stacks, "_has_pulumi", lambda: False)

    def call(*args: str) -> tuple[int, str, str]:
        code = main(["doctor", *args])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def broken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = StackOutputs(stack="dev", records=RecordsOutput(url=f"file:{folder}/nowhere"))
    (folder / "dev.json").write_text(encode_outputs(outputs))
    monkeypatch.setenv("RUNTIME_OUTPUTS", str(folder / "dev.json"))


def test_local_stack_is_green(run: Run) -> None:
    code, out, err = run()

    assert (code, err) == (0, "")
    assert [line.split("\t")[:2] for line in out.splitlines()] == [
        ["ok", check] for check in ("program", "data folder", "stack", "queue default", "records")
    ]


def test_failing_line_says_the_fix_and_exits_with_1(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(tmp_path, monkeypatch)

    code, out, err = run()

    [failing] = [line.split("\t") for line in out.splitlines() if line.startswith("fail")]
    assert (code, err) == (1, "1 failed\n")
    assert failing[1] == "records"
    assert failing[3] != "-"


def test_json_is_an_array_and_exits_alike(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(tmp_path, monkeypatch)

    code, out, err = run("-o", "json")

    printed = json.loads(out)
    assert (code, err) == (1, "")
    [shown] = documented()["runtime doctor -o json"]
    assert [differences(shown, line) for line in printed] == [[]] * len(printed)
    assert [line["check"] for line in printed if line["verdict"] == "fail"] == ["records"]


def test_terminal_shows_the_fix_below_its_line(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(tmp_path, monkeypatch)
    for module in (output, console):
        monkeypatch.setattr(module, "is_terminal", lambda stream=None: True)
    monkeypatch.delenv("NO_COLOR", raising=False)

    _, out, _ = run()

    lines = out.splitlines()
    index = next(number for number, line in enumerate(lines) if "\x1b[31mfail\x1b[0m" in line)
    assert lines[index].split("  ")[1].strip() == "records"
    assert lines[index + 1].strip().startswith("\x1b[1mfix:\x1b[0m ")


def test_unknown_stack_is_a_failing_line(run: Run) -> None:
    code, out, _ = run("--stack", "dve")

    assert code == 1
    assert "fail\tstack\tno stack named `dve`" in out
