"""docs/output.md shows the commands' real output: the same keys, and values of the same kind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from runtime.cli.commands import COMMANDS, load_command
from runtime.cli.main import main
from runtime.client.artifacts import put_artifact
from runtime.tasks.model import WorkflowEntry
from runtime.testing import sample_task
from tests.output_support import PAGE, differences, documented
from tests.services_support import wait_until
from tests.shim_support import processes_with
from tests.verbs_support import Bench

ELSEWHERE = ("stack", "secrets", "doctor", "image", "cluster", "import")
"""Commands whose own tests check their examples, because those have a cloud, a registry or a batch system."""
SHOWN = {command: each for command, each in documented().items() if command.split()[1] not in ELSEWHERE}


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """A stack with every kind of entry: a failed task and a queued task, a declining worker and a running one."""
    monkeypatch.setenv("RUNTIME_DATA_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    bench = Bench.sqlite(tmp_path, "local.db")
    for key, name in (("1", "t-3f2a"), ("2", "t-5d0c")):
        entry = WorkflowEntry("my.project", "train", ("--lr=0.1",))
        fields: dict[str, Any] = {"submitted_by": "ada@laptop", "submitted_at": bench.now - timedelta(hours=1)}
        bench.put(sample_task(key, id=name, experiment="sweep", entry=entry, **fields))
    bench.fail(message="Traceback …\nValueError: nan", exit_code=1, metrics={"loss": 0.5}, worker="w-node1-7")
    bench.report(
        "w-node1-7",
        running=("t-5d0c",),
        failed=1,
        rate_per_s=0.5,
        labels={"zone": "a"},
        declined={"t-77aa": "needs 1 GPU"},
        reports={"t-5d0c": {"experiment": "sweep", "step": 30, "of": 100, "metrics": {"loss": 0.5}}},
    )
    (tmp_path / "weights").write_text("x\n")
    put_artifact(tmp_path / "weights", "base", "sweep", bench.records)
    yield bench
    bench.close()
    for pid in processes_with(str(tmp_path)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def job(bench: Bench, capsys: pytest.CaptureFixture[str]) -> str:
    """An array with a failed run."""
    script = """echo 1 > $RUNTIME_OUTPUT_DIR/model; echo 1 > log; echo '{"step": 1, "loss": 2}' >> $RUNTIME_METRICS; exit {code}"""
    words = ["launch", "--on", "local", "--name", "train", "--grid", "code=0,3", "--capture", "log:log", "--follow"]
    assert main([*words, "-o", "json", "--", "sh", "-c", script]) == 1
    assert main(["status", "--on", "local", "-o", "json"]) == 0
    found: str = json.loads(capsys.readouterr().out)["jobs"][0]["job"]
    # Its result exists a moment before its shim has ended, and a live job is not garbage.
    assert wait_until(lambda: not processes_with(found))
    return found


NAMES = {"EXPERIMENT": "sweep", "WORKER": "w-node1-7"}


def real(command: str, job: str = "") -> list[str]:
    """Return the documented command line with names from the fixture."""
    if "JOB" in command or "--on" in command:
        return [{"JOB": job, "CMD": "true"}.get(word, word) for word in command.split()[1:]]
    failed_is_wanted = command.startswith(("runtime status", "runtime retry"))
    names = {**NAMES, "TASK": "t-3f2a" if failed_is_wanted else "t-5d0c"}
    yes = ["--yes"] if "repair" in command else []
    return [names.get(word, word) for word in command.split()[1:]] + yes


@pytest.mark.parametrize("command", SHOWN)
def test_documented_shape_is_what_is_printed(
    bench: Bench, capsys: pytest.CaptureFixture[str], command: str, request: pytest.FixtureRequest
) -> None:
    job = request.getfixturevalue("job") if has_jobs(command) else ""
    assert main(real(command, job)) == 0

    assert differences(documented()[command], json.loads(capsys.readouterr().out)) == []


def has_jobs(command: str) -> bool:
    return "JOB" in command or "--on" in command or "gc" in command or command == "runtime status -o json"


@pytest.mark.parametrize("command", [each for each in SHOWN if "JOB" not in each and "launch" not in each])
def test_status_is_an_object_with_totals_and_every_list_an_array(
    bench: Bench, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    main(real(command))

    printed = json.loads(capsys.readouterr().out)

    if command.startswith("runtime status") and "WORKER" not in command and "--on" not in command:
        assert list(printed["totals"]) == ["queued", "leased", "succeeded", "failed", "cancelled", "expired"]
        assert all(type(count) is int for count in printed["totals"].values())
    elif any(verb in command for verb in ("list", "peek", "cancel", "retry")):
        assert type(printed) is list


@pytest.mark.parametrize(
    ("command", "alike"),
    [
        (["queue", "stats"], "runtime queue list -o json"),
        (["queue", "dead", "redrive", "--all", "--yes"], "runtime retry TASK -o json"),
        (["queue", "dead", "show", "t-3f2a"], "runtime queue dead list -o json"),
        (["explain", "sweep"], "runtime explain TASK -o json"),
        (["explain", "w-node1-7"], "runtime explain TASK -o json"),
        (["status", "sweep", "--failed"], "runtime status EXPERIMENT -o json"),
        (["cancel", "sweep", "--yes"], "runtime cancel TASK -o json"),
    ],
)
def test_commands_that_are_said_to_print_alike_do(
    bench: Bench, capsys: pytest.CaptureFixture[str], command: list[str], alike: str
) -> None:
    assert main([*command, "-o", "json"]) == 0

    printed = json.loads(capsys.readouterr().out)
    example = documented()[alike]
    assert (
        differences(example[0] if isinstance(example, list) and isinstance(printed, dict) else example, printed) == []
    )


@pytest.mark.parametrize(
    "command", [["queue", "peek"], ["queue", "dead", "list"], ["queue", "dead", "redrive", "--all"]]
)
def test_empty_list_is_an_empty_array(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    monkeypatch.setenv("RUNTIME_DATA_DIR", str(tmp_path))

    assert main([*command, "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


@pytest.mark.parametrize(
    ("shown", "printed", "count"),
    [
        ({"a": 1}, {"a": 1, "b": 2}, 1),
        ({"a": 1, "b": 2}, {"a": 1}, 1),
        ({"a": [{"b": 1}]}, {"a": [{"b": "1"}]}, 1),
        ({"a": [1]}, {"a": []}, 1),
        ({"a": True}, {"a": 1}, 1),
        ({"a": None, "labels": {"x": "y"}, "n": 1}, {"a": "b", "labels": {}, "n": 1.5}, 0),
    ],
)
def test_comparison_sees_what_differs(shown: Any, printed: Any, count: int) -> None:
    assert len(differences(shown, printed)) == count


NOT_SHOWN = {
    "runtime convert marin": "its `--output` names the file of the stack",
    "runtime quickstart": "its figures are for people",
    "runtime dev": "it has only a plan, that of `runtime launch --dry-run`",
    "runtime interrupt": "it is for tests of a target",
    "runtime targets show": "its keys are settings and fields, told in docs/targets.md",
}


def test_page_shows_each_command_that_prints_json() -> None:
    page = PAGE.read_text()
    named = {command for command in with_json(COMMANDS) if re.search(rf"`{command}\b", page)}

    assert sorted(with_json(COMMANDS) - named) == sorted(NOT_SHOWN)


def with_json(names: Iterable[str]) -> set[str]:
    """List the commands that take `-o json`, as typed."""
    found: set[str] = set()

    def walk(command: Any, path: str) -> None:
        for name, inner in getattr(command, "commands", {}).items():
            walk(inner, f"{path} {name}")
        if any("--output" in each.opts for each in command.params):
            found.add(path)

    for name in names:
        walk(load_command(name), f"runtime {name}")
    return found


def test_commands_with_json_are_found_at_every_depth() -> None:
    found = with_json(COMMANDS)

    assert {"runtime status", "runtime queue list", "runtime queue dead show"} <= found
    assert "runtime queue pause" not in found
