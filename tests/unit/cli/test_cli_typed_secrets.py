"""Every way to type a name with a value into a launch or a submission: secrets are refused, amounts are not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runtime import submit
from runtime.client.jobs.prepare import LaunchOptions, LaunchRequest, prepare
from runtime.config import load_settings
from runtime.errors import InvalidTask
from runtime.jobs.plan import Target
from runtime.jobs.spec import Array, InvalidSpec, JobEnvironment, JobSpec, Placement, parse_spec
from runtime.queues.memory import MemoryQueue
from runtime.records.memory import MemoryRecords
from runtime.tasks.model import CommandEntry, Task, WorkflowEntry
from tests.jobs_support import Terminal, open_terminal

FORM = "hf_canary" + 20 * "a"
LAUNCHES = {
    "known form in a variable of any name": ["--env", f"AUTH={FORM}", "--", "true"],
    "known form in an argument": ["--", "login", FORM],
    "known form in a grid": ["--grid", f"auth={FORM}", "--", "true"],
    "shell with options": ["--", "bash", "-euxo", "pipefail", "-c", "cd x&&HF_TOKEN=canary python main.py"],
    "env": ["--env", "HF_TOKEN=canary", "--", "true"],
    "option": ["--", "python", "main.py", "--token=canary"],
    "option of two words": ["--", "python", "main.py", "--api-key", "canary"],
    "variable before a command": ["--", "env", "HF_TOKEN=canary", "python", "main.py"],
    "script": ["--", "sh", "-c", "HF_TOKEN=canary python main.py"],
    "line of shell": ["--set", "shell=true", "--", "HF_TOKEN=canary python main.py"],
    "grid": ["--grid", "hf_token=canary,5", "--", "true"],
    "grid through an option": ["--grid", "x=1,canary", "--", "python", "main.py", "--token={x}"],
    "parameters": ["--set", "array.params={apiKey: [canary]}", "--", "true"],
    "nested parameters": ["--set", "array.params={hub: [{password: canary}]}", "--", "true"],
    "file of parameters": ["--set", "array.file=lines", "--", "true"],
    "setup": ["--set", "environment.setup=['export HF_TOKEN=canary']", "--", "true"],
    "defaults of the target": ["--on", "with-env", "--", "true"],
    "setup of the target": ["--on", "with-setup", "--", "true"],
    "setup of a kind of node": ["--on", "with-profile", "--", "true"],
    "flags of the target": ["--on", "with-flags", "--", "true"],
    "options in a grid": ["--grid", "x=--lr=1,--token=canary", "--", "sh", "-c", "python main.py {x}"],
    "labels of the target": ["--on", "with-labels", "--", "true"],
    "job file": ["-f", "job.yaml"],
}
SUBMISSIONS = {
    "known form in an argument": ["--", "curl", f"https://lab/?auth={FORM}"],
    "known form in a grid": ["--grid", f"auth={FORM}", "--", "echo", "{auth}"],
    "option": ["--", "python", "main.py", "--token=canary"],
    "variable before a command": ["--", "env", "HF_TOKEN=canary", "true"],
    "grid": ["--grid", "token=5,canary", "--", "echo", "{token}"],
    "grid through an option": ["--grid", "x=1,canary", "--", "python", "main.py", "--token={x}"],
    "options in a grid": ["--grid", "x=--lr=1,--token=canary", "--", "sh", "-c", "python main.py {x}"],
    "grid of a workflow": ["--grid", "hf-token=canary", "mylab", "train"],
    "arguments of a workflow": ["mylab", "train", "--hf-token", "canary"],
    "lines with a command": ["--from", "commands"],
    "lines with a function": ["--from", "functions"],
}
PROJECT = """
[targets.with-env]
kind = "local"
[targets.with-env.defaults.env]
HF_TOKEN = "canary"
[targets.with-setup]
kind = "local"
setup = ["module load cuda", "export HF_TOKEN=canary"]
[targets.with-profile]
kind = "slurm"
records = "/scratch/lab"
gpu = {setup = ["export HF_TOKEN=canary"]}
[targets.with-flags]
kind = "slurm"
records = "/scratch/lab"
flags = ["--comment", "x", "--export=ALL,HF_TOKEN=canary"]
[targets.with-labels]
kind = "kubernetes"
image = "lab/image@sha256:0"
records = "claim://data/runtime"
namespace = "lab"
labels = {api-key = "canary"}
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Terminal]:
    with open_terminal(tmp_path, monkeypatch, capsys) as terminal:
        files = {
            "lines": '{"lr": 1}\n{"lr": 2, "token": "canary"}\n',
            "commands": '{"command": ["true"]}\n{"command": ["true", "--token", "canary"]}\n',
            "functions": '{"function": "mylab:train", "kwargs": {"lr": 1, "hub": {"token": "canary"}}}\n',
            "job.yaml": "command: [python, main.py, '--api-key=canary']\nplacement: {on: [local]}\n",
            "runtime.toml": PROJECT,
        }
        for name, text in files.items():
            (terminal.tree / name).write_text(text)
        yield terminal


@pytest.mark.parametrize("dry", [True, False])
@pytest.mark.parametrize("door", LAUNCHES)
def test_launch_with_a_secret_typed_in_is_refused_without_its_value(run: Terminal, door: str, dry: bool) -> None:
    words = LAUNCHES[door]
    on = [] if {"--on", "-f"} & set(words) else ["--on", "local"]

    said = run("launch", *on, *(["--dry-run"] if dry else []), *words)

    assert said.code == 2, said.out + said.err
    assert "secret" in said.err
    assert "canary" not in said.out + said.err
    assert not (run.data / "jobs").exists()


@pytest.mark.parametrize("dry", [True, False])
@pytest.mark.parametrize("door", SUBMISSIONS)
def test_submission_with_a_secret_typed_in_is_refused_without_its_value(run: Terminal, door: str, dry: bool) -> None:
    said = run("submit", "--no-snapshot", *(["--dry-run"] if dry else []), *SUBMISSIONS[door])

    assert said.code == 2, said.out + said.err
    assert "which looks like a secret" in said.err
    assert "canary" not in said.out + said.err
    assert [path for path in run.data.rglob("*") if path.is_file() and b"canary" in path.read_bytes()] == []


@pytest.mark.parametrize(
    "words",
    [
        ["--env", "TOKEN_BUDGET=4096", "--env", "KEY_DIM=64", "--", "true"],
        ["--env", "GOOGLE_APPLICATION_CREDENTIALS=/lab/key.json", "--", "true"],
        ["--grid", "num_tokens=128,256", "--grid", "key_dim=64", "--", "true", "--num-tokens", "{num_tokens}"],
        ["--grid", "token_budget=1e3,1e4", "--grid", "token=1:4", "--", "true", "--token-budget={token_budget}"],
        ["--grid", "pad_token=<pad>,PAD", "--", "true", "--pad-token", "{pad_token}"],
        ["--secret", "HF_TOKEN=env://HOME", "--", "sh", "-c", 'train --token "$HF_TOKEN"'],
    ],
)
def test_launch_with_amounts_flags_and_references_passes(run: Terminal, words: list[str]) -> None:
    said = run("launch", "--on", "local", "--dry-run", *words)

    assert said.code == 0, said.err


@pytest.mark.parametrize(
    "words",
    [
        ["--grid", "num_tokens=128,256", "--grid", "key_dim=64", "mylab", "train", "--token-budget=4096"],
        ["--grid", "token=0:5", "--", "true", "--token", "{token}", "--tokenizer", "gpt2"],
        ["mylab", "train", "--max-tokens", "5", "--pad-token", "<pad>"],
    ],
)
def test_submission_with_amounts_passes(run: Terminal, words: list[str]) -> None:
    said = run("submit", "--no-snapshot", *words)

    assert said.code == 0, said.err


def test_refused_parameter_is_named_with_the_ways_out(run: Terminal) -> None:
    said = run("launch", "--on", "local", "--grid", "hf_token=canary", "--", "true")

    assert said.err == (
        "error: the job spec of this command line cannot be used: `array` has a value for `hf_token`, which looks like a"
        " secret: name it in `secrets` instead\n"
        "hint: bring it with `--secret NAME=SOURCE` and let the command read the variable; if it is no secret, give it"
        " another name\n"
    )


@pytest.mark.parametrize(
    "spec",
    [
        JobSpec(command=("train", "--token=canary")),
        JobSpec(command=("true",), array=Array(params={"hf_token": ("canary",)})),
        JobSpec(command=("true",), environment=JobEnvironment(setup=("export API_KEY=canary",))),
        JobSpec(command=("true",), placement=Placement(selector={"api-key": "canary"})),
    ],
)
def test_spec_from_python_with_a_secret_is_refused(run: Terminal, spec: JobSpec) -> None:
    target = Target(name="lab", kind="kubernetes", settings={"namespace": "lab"}, records="claim://data/runtime")

    with pytest.raises(InvalidSpec, match="looks like a secret") as refused:
        prepare(LaunchRequest(replace(spec, image="lab/image:1")), target, load_settings(), LaunchOptions())

    assert "canary" not in refused.value.render()


def train(**settings: object) -> None:
    """Stand for the function of a task."""


@pytest.mark.parametrize(
    ("work", "terms"),
    [
        (train, {"kwargs": {"hf_token": "canary"}}),
        (train, {"args": [{"hub": {"password": "canary"}}]}),
        (train, {"args": [["--lr", "1", "--token", "canary"]]}),
        (train, {"args": ["--token", "canary"]}),
        (train, {"kwargs": {"argv": ["--token=canary"]}}),
        (("mylab", "train", ["--token", "canary"]), {}),
        ({"command": ["true", "--token=canary"]}, {}),
        ([{"command": ["true"]}, {"function": "mylab:train", "kwargs": {"api_key": "canary"}}], {}),
        (Task(id="t-1", entry=CommandEntry(("env", "HF_TOKEN=canary", "true"))), {}),
        (Task(id="t-2", entry=WorkflowEntry("mylab", "train", ("--hf-token=canary",))), {}),
    ],
)
def test_submission_from_python_with_a_secret_is_refused(run: Terminal, work: Any, terms: dict[str, Any]) -> None:
    queue = MemoryQueue(MemoryRecords())

    with pytest.raises(InvalidTask, match="which looks like a secret") as refused:
        submit(work, queue=queue, snapshot=False, **terms)

    assert "canary" not in refused.value.render()
    assert list(queue.peek(9)) == []


def test_submission_from_python_with_amounts_passes(run: Terminal) -> None:
    queue = MemoryQueue(MemoryRecords())

    submit(
        train,
        kwargs={"num_tokens": 5, "token_budget": "4096", "pad_token": "<pad>", "key": "x"},
        queue=queue,
        snapshot=False,
    )

    assert len(list(queue.peek(9))) == 1


def test_spec_of_a_job_that_exists_is_read_whatever_its_arguments() -> None:
    # `runtime retry` and `status` read jobs of earlier versions.
    assert (
        parse_spec({"command": ["train", "--token=x"], "array": {"params": {"token": ["x"]}}}).command[1] == "--token=x"
    )
