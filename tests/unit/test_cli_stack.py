"""`runtime stack`: list, show, pull, use."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime import stacks
from runtime.cli.main import main
from runtime.outputs import PubSubQueueOutput, RecordsOutput, StackOutputs, decode_outputs, encode_outputs

DEV = StackOutputs(
    stack="dev",
    region="us-west4",
    records=RecordsOutput(url="gs://p-records"),
    queues={"default": PubSubQueueOutput(topic="projects/p/topics/t", subscription="projects/p/subscriptions/s")},
)

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    for name in ("DATA", "CACHE", "CONFIG"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stacks, "_has_pulumi", lambda: False)
    (tmp_path / "dev.json").write_text(encode_outputs(DEV))

    def call(*args: str) -> tuple[int, str, str]:
        code = main(["stack", *args])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_list_without_anything_has_the_built_in_stack(run: Run) -> None:
    assert run("list") == (0, "local\tbuilt-in\t-\tyes\n", "")
    code, out, _ = run("list", "-o", "json")
    assert (code, json.loads(out)) == (0, [{"name": "local", "source": "built-in", "default": True, "read_at": None}])


def test_pulled_stack_is_listed_shown_and_used(run: Run, tmp_path: Path) -> None:
    code, out, err = run("pull", "./dev.json")
    assert (code, out) == (0, "")
    assert "read stack `dev` from ./dev.json" in err

    code, out, err = run("use", "dev")
    assert (code, out) == (0, "")
    assert "commands now use stack `dev`" in err

    _, out, _ = run("list", "-o", "json")
    assert [(each["name"], each["default"]) for each in json.loads(out)] == [("local", False), ("dev", True)]
    code, out, _ = run("show")
    assert code == 0
    assert [line.split(maxsplit=1) for line in out.splitlines() if not line.startswith("from")] == [
        ["stack", "dev"],
        ["region", "us-west4"],
        ["records", "gs://p-records"],
        ["queue", "default: pubsub, projects/p/subscriptions/s"],
    ]


def test_show_as_json_is_the_contract(run: Run) -> None:
    run("pull", "./dev.json")

    code, out, _ = run("show", "dev", "-o", "json")

    assert code == 0
    assert decode_outputs(out) == DEV


def test_use_says_where_another_goes_first(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNTIME_STACK", "other")

    code, _, err = run("use", "local")

    assert code == 0
    assert "RUNTIME_STACK" in err


def test_stack_that_cannot_be_read_is_not_made_the_default(run: Run, tmp_path: Path) -> None:
    code, _, err = run("use", "dve")

    assert code == 2
    assert err.startswith("error: no stack named `dve`\n  known stacks: local\n")
    assert not (tmp_path / "CONFIG").exists()


def test_contract_of_another_major_is_explained(run: Run, tmp_path: Path) -> None:
    (tmp_path / "dev.json").write_text('{"schema": 2, "stack": "dev"}')

    code, _, err = run("pull", "./dev.json")

    assert code == 2
    assert err == (
        "error: stack `dev` exports a contract that this release cannot read\n  found schema 2, need 1\n"
        "hint: pip install --upgrade research-runtime\n"
    )
