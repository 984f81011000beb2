"""`runtime worker --on TARGET --count N`: which workers it launches, what it refuses, and a fleet that loses its machine."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import runtime
from runtime.cli.worker import FLEET_OPTIONS, build_parser
from runtime.cli.worker_fleet import _NOT_THERE, add_options
from runtime.outputs import PubSubQueueOutput
from tests.jobs_support import Terminal, open_terminal
from tests.shim_support import PATIENCE_S, kill_all, wait_for

PACKAGE = Path(runtime.__file__).parents[1]


@pytest.fixture
def terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Terminal]:
    with open_terminal(tmp_path, monkeypatch, capsys) as opened:
        (opened.tree / "runtime.toml").write_text(
            f'[targets.hpc]\nkind = "slurm"\nrecords = "{tmp_path}/records"\n'
            '[targets.gpu1]\nkind = "ssh"\nhost = "gpu1"\n'
        )
        yield opened


def planned(terminal: Terminal, *words: str) -> dict[str, object]:
    said = terminal("worker", *words, "--dry-run", "-o", "json")
    assert said.code == 0, said.err
    (plan,) = said.json
    return dict(plan)


def test_options_that_make_a_fleet_are_those_that_its_parser_has() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    add_options(parser)
    mine = {name for action in parser._actions for name in action.option_strings}
    plain = {name for action in build_parser()._actions for name in action.option_strings}

    assert (mine, mine & plain) == (FLEET_OPTIONS, set())


def test_fleet_is_an_array_of_workers_with_the_flags_as_they_were_typed(terminal: Terminal) -> None:
    words = ["--queue", "data", "--slots=2", "--idle-timeout", "5m", "--labels", "team=a b"]
    plan = planned(terminal, "--count", "3", *words[:3], "--on", "local", "--gpus", "2", *words[3:], "--memory=1GiB")

    assert plan["spec"] == {
        "command": [sys.executable, "-m", "runtime", "worker", *words],
        "name": "fleet",
        "code": {"mode": "image"},
        "env": {"RUNTIME_DATA_DIR": str(terminal.data), "RUNTIME_QUEUE": "data", "RUNTIME_STACK": "local"},
        "resources": {"memory": {"low": 1 << 30, "high": 1 << 30}, "gpus": {"count": 2.0}}
        | {"memory": plan["spec"]["resources"]["memory"]},  # type: ignore[index]
        "array": {"count": 3, "max_parallel": 3},
        "retry": {"failure": 3, "preemption": 100_000, "on_exit": {"127": "fail", "2": "fail"}},
    }


def test_same_fleet_is_the_same_job_and_another_name_is_another(terminal: Terminal) -> None:
    given = ["--on", "local", "--count", "2"]

    ids = [
        planned(terminal, *given, *more)["job"]
        for more in ([], [], ["--name", "second"], ["--slots", "2"], ["--count", "3"])
    ]

    assert ids[0] == ids[1]
    assert len(set(ids)) == 4


def test_grace_of_the_workers_fits_into_that_of_their_job(terminal: Terminal) -> None:
    spec = planned(terminal, "--on", "local", "--grace", "10m")["spec"]

    assert isinstance(spec, dict)
    assert spec["grace_period"] == 630.0


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (
            ["--count", "3"],
            "`--count` of `runtime worker` belongs to a fleet, and no target is named to launch it on",
            "--on TARGET launches workers there; without it, one worker runs here",
        ),
        (["--on", "local", "--count", "0"], "`0` is no valid number of workers", ""),
        (["--on", "local", "--slots", "many"], "`many` is no valid number of slots", ""),
        (["--on", "local", "--slotz", "1"], "`--slotz`", "`--slots`"),
        (["--on", "local", "extra"], "takes no argument `extra`", ""),
        (["--on", "local", "--metrics-host", "::"], "`--metrics-host` goes with `--metrics-port`", ""),
        (["--on", "nowhere"], "no target named `nowhere`", ""),
        (
            ["--on", "hpc"],
            "queue `default` of stack `local` lies in a file of this machine, which target `hpc` (slurm) cannot serve",
            "--stack NAME",
        ),
        (["--on", "gpu1", "--queue", "sqlite:/tmp/q.db"], "lies in a file of this machine", "--on local"),
        (["--on", "local", "--queue", "sqlite:q.db"], "`sqlite:q.db`", ""),
        (["--on", "local", "--gpus", "two"], "`two`", ""),
    ],
)
def test_wrong_fleet_is_refused_before_anything_starts(
    terminal: Terminal, words: list[str], message: str, hint: str
) -> None:
    said = terminal("worker", *words)

    assert said.code == 2
    assert message in said.err
    assert hint in said.err
    assert not (terminal.data / "jobs").exists()


def contract(tmp_path: Path) -> dict[str, object]:
    from runtime.outputs import RecordsOutput, StackOutputs, outputs_fields

    queue = PubSubQueueOutput(topic="projects/p/topics/t", subscription="projects/p/subscriptions/s")
    return outputs_fields(
        StackOutputs(stack="lab", records=RecordsOutput(url="gs://lab/records"), queues={"default": queue})
    )


def test_fleet_elsewhere_finds_the_stack_and_says_if_runtime_is_not_there(
    terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lab.json").write_text(json.dumps(contract(tmp_path)))
    monkeypatch.setenv("RUNTIME_OUTPUTS", str(tmp_path / "lab.json"))

    spec = planned(terminal, "--on", "gpu1", "--count", "2", "--slots", "auto")["spec"]
    refused = terminal("worker", "--on", "gpu1", "--queue", "dat")

    assert isinstance(spec, dict)
    assert spec["command"] == ["sh", "-c", _NOT_THERE, "runtime", "--slots", "auto"]
    # A contract in a file of this machine is no use elsewhere.
    assert spec["env"] == {"RUNTIME_QUEUE": "default", "RUNTIME_STACK": "lab"}
    assert refused.code == 2
    assert "no queue named `dat` in stack `lab`" in refused.err


def test_worker_that_is_not_installed_on_the_target_is_explained(tmp_path: Path) -> None:
    (tmp_path / "runtime").write_text('#!/bin/sh\necho started "$@"\n')
    (tmp_path / "runtime").chmod(0o755)
    words = ["/bin/sh", "-c", _NOT_THERE, "runtime", "--slots", "2"]

    missing = subprocess.run(words, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False)
    there = subprocess.run(
        words, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True, check=False
    )

    assert (missing.returncode, missing.stdout) == (127, "")
    assert missing.stderr.startswith(f"error: there is no command runtime on {os.uname().nodename}")
    assert (there.returncode, there.stdout) == (0, "started worker --slots 2\n")


def test_fleet_drains_a_queue_and_goes_on_after_its_machine_was_lost(terminal: Terminal, tmp_path: Path) -> None:
    go, ran = tmp_path / "go", tmp_path / "ran"
    ran.mkdir()
    script = f"touch {ran}/$RUNTIME_TASK_ID; until [ -e {go} ]; do sleep 0.05; done"
    submitted = terminal("submit", "--no-snapshot", "--grid", "n=0:6", "-e", "drain", "--", "sh", "-c", script, "{n}")
    assert submitted.code == 0, submitted.err
    fleet = ["worker", "--on", "local", "--count", "3", "--idle-timeout", "3s", "--env", f"PYTHONPATH={PACKAGE}"]
    job = terminal(*fleet).out.strip()
    again = terminal(*fleet)
    assert again.out.strip() == job
    assert "the same was launched before" in again.err
    wait_for(lambda: len(list(ran.iterdir())) >= 3, "a task on each worker")

    kill_all(job)
    kept = terminal("keep", "--once", "--on", "local", "-o", "json")
    go.touch()

    assert [(each["job"], each["done"]) for each in kept.json] == [(job, "taken_up")]
    waited = terminal("wait", "drain", "--timeout", str(int(PATIENCE_S)))
    assert waited.code == 0, waited.err
    terminal.wait(job, "succeeded", "failed")
    status = terminal("status", job, "-o", "json").json
    assert (status["state"], status["runs"], status["totals"]["succeeded"]) == ("succeeded", 3, 3)
    assert len(list(ran.iterdir())) == 6
