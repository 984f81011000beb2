"""`runtime launch` as typed: refusals, output, followed jobs; and the schema of job files."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

import runtime
from runtime.cli.commands import load_command
from runtime.cli.launch import build_request
from runtime.jobs.hosts.base import HostUnavailable
from runtime.jobs.plan import Target
from runtime.jobs.spec import JobState, parse_spec, spec_schema
from runtime.jobs.spec_fields import spec_fields
from runtime.jobs.spec_file import read_spec_file
from runtime.launchers.local.launcher import LocalLauncher
from tests.jobs_support import Terminal, open_terminal
from tests.output_support import differences, documented
from tests.shim_support import PATIENCE_S, wait_for
from tests.unit.cli.test_cli_startup import run_cli

ROOT = Path(__file__).parents[3]
SCHEMA = ROOT / "docs" / "job.schema.json"
LOCAL = Target(name="local", kind="local")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Terminal]:
    with open_terminal(tmp_path, monkeypatch, capsys) as terminal:
        yield terminal


@pytest.mark.parametrize("name", ["launch", "fetch", "gc", "interrupt", "targets"])
def test_help_reads_as_reviewed(golden: Callable[[str, str], None], name: str) -> None:
    done = run_cli(name, "--help")

    assert (done.returncode, done.stderr) == (0, "")
    golden(f"cli/{name}.txt", done.stdout)


def test_options_of_artifacts_are_fields_beside_those_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text("command: [x]\ncapture: {a: one, b: two}\n")
    from runtime.cli.launch import read_artifacts

    named = read_artifacts(["./out/b:b", f"{tmp_path}/c"], ["sac/model:base"], tmp_path)
    request = build_request(tmp_path / "job.yaml", [], {"capture_every": "30s"}, [], [], [], [], artifacts=named)

    assert spec_fields(request.spec_on(LOCAL)) == {
        "command": ["x"],
        "capture": {"a": "one", "b": "out/b", "c": "c"},
        "capture_every": 30.0,
        "reuse": {"base": "sac/model"},
    }


# wrong inputs

WRONG: list[tuple[str, list[str], str]] = [
    ("nothing to run", [], "error: there is nothing to run: no command, and no job file that has one"),
    (
        "a job file as the command",
        ["broken.yaml"],
        "error: `broken.yaml` is a file that no machine can run as a command",
    ),
    (
        "a job file as the command, options behind it",
        ["broken.yaml", "--dry-run"],
        "error: `broken.yaml` is a file that no machine can run as a command",
    ),
    ("no such file", ["-f", "none.yaml"], "error: cannot read the job spec `none.yaml`: no such file or directory"),
    ("no YAML", ["-f", "broken.yaml"], "error: `broken.yaml` is no YAML: line "),
    (
        "no command",
        ["-f", "comand.yaml"],
        "error: the job spec of `comand.yaml` cannot be used: `comand` is no field here",
    ),
    ("a list for a job", ["-f", "list.yaml"], "error: `list.yaml` holds a list, expected the fields of a job"),
    (
        "a misspelt field",
        ["-f", "misspelt.yaml"],
        "error: the job spec of `misspelt.yaml` cannot be used: `resources.gpu` ",
    ),
    ("many wrong fields", ["-f", "many.yaml"], "error: the job spec of `many.yaml` cannot be used: 3 fields are wrong"),
    ("gpus of no number", ["--gpus", "a100:x", "true"], "error: `a100:x` is no valid gpus"),
    ("a secret without source", ["--secret", "TOKEN", "true"], "error: `TOKEN` is no valid secret"),
    ("a setting without value", ["--set", "nodes", "true"], "error: `nodes` is no valid set"),
    (
        "a time that is none",
        ["--time-limit", "soon", "true"],
        "error: the job spec of this command line cannot be used: `time_limit` ",
    ),
    (
        "a secret by value",
        ["--env", "HF_TOKEN=abc", "true"],
        "error: the job spec of this command line cannot be used: `spec` has a value for `env.HF_TOKEN`",
    ),
    ("a variable that is not set", ["--env", "NOT_SET_HERE", "true"], "error: `env.NOT_SET_HERE` takes the value of"),
    ("a near parameter", ["--grid", "rate=1,2", "echo", "{rat}"], "error: `{rat}` in the command is no parameter"),
    ("a refused field", ["--set", "account=lab", "true"], "error: target `local` cannot keep `account` of this job"),
]


@pytest.mark.parametrize(("words", "message"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_launch_of_what_cannot_be_says_what_is_wrong(run: Terminal, words: list[str], message: str) -> None:
    (run.tree / "broken.yaml").write_text("command: [a\n")
    (run.tree / "list.yaml").write_text("- a\n")
    (run.tree / "comand.yaml").write_text("comand: ['true']\n")
    (run.tree / "misspelt.yaml").write_text("command: ['true']\nresources: {gpu: 1}\n")
    (run.tree / "many.yaml").write_text("command: ['true']\nnodes: many\ntime_limit: soon\nimages: x\n")

    said = run("launch", "--on", "local", *words)

    assert said.code == 2
    assert said.err.splitlines()[0].startswith(message)
    assert any(each in said.err for each in ("hint: ", "allowed: ", "is no YAML", "cannot read"))
    assert said.out == ""
    assert not (run.data / "jobs").exists()


def test_launch_on_no_target_and_on_an_unknown_one_says_which_there_are(run: Terminal) -> None:
    nowhere, unknown = run("launch", "true"), run("launch", "--on", "hcp", "true")

    assert (nowhere.code, nowhere.err.splitlines()[0]) == (2, "error: no target is named")
    assert unknown.err.splitlines()[0] == "error: no target named `hcp`"
    assert "known targets: local" in unknown.err


# output


def test_dry_run_shows_the_artefact_and_who_keeps_each_field_and_starts_nothing(run: Terminal) -> None:
    said = run("launch", "--on", "local", "--time-limit", "1h", "--dry-run", "--", "sh", "-c", "true")

    assert said.code == 0
    assert "shim.py" in said.out
    assert [line.split()[:2] for line in said.out.splitlines()[-2:]] == [["command", "native"], ["time_limit", "shim"]]
    assert not (run.data / "jobs").exists()


def test_dry_run_on_many_targets_shows_those_that_accept_and_why_others_refuse(run: Terminal) -> None:
    (run.tree / "runtime.toml").write_text(
        '[targets.other]\nkind = "local"\n[targets.small]\nkind = "local"\ndefaults = { account = "x" }\n'
    )

    said = run("launch", "--on", "small,local,other", "--dry-run", "-o", "json", "--", "true")

    assert said.code == 0
    assert [each["target"] for each in said.json] == ["local", "other"]
    assert "`small` would not accept it" in said.err
    assert run("launch", "--on", "small", "--dry-run", "--", "true").code == 2


def test_launch_and_its_dry_run_say_what_the_plan_took_for_granted(run: Terminal) -> None:
    for name, says in (("sbatch", "echo 41"), ("squeue", "exit 0")):
        (run.tree / name).write_text(f"#!/bin/sh\n{says}\n")
        (run.tree / name).chmod(0o755)
    (run.tree / "runtime.toml").write_text(
        f'[targets.hpc]\nkind = "slurm"\nrecords = "{run.tree.parent}/records"\nbin = "{run.tree}"\nmax_submit = 2\n'
    )
    words = ("launch", "--on", "hpc", "--seeds", "4", "--time-limit", "10m", "--", "true")
    said = (
        "--time is 25m: 2 runs one after another, each of 10m and 2m of grace at worst, and 1m for Slurm's clock; "
        "a partition whose limit is shorter never starts it"
    )

    dry, first, second = run(*words[:3], "--dry-run", *words[3:]), run(*words), run(*words)

    assert [each.code for each in (dry, first, second)] == [0, 0, 0]
    assert [each.err.splitlines().count(said) for each in (dry, first, second)] == [1, 1, 0]


def test_launch_takes_the_first_target_that_accepts(run: Terminal) -> None:
    (run.tree / "runtime.toml").write_text('[targets.small]\nkind = "local"\ndefaults = { account = "x" }\n')

    said = run("launch", "--on", "small,local", "-o", "json", "--", "true")

    assert said.json["target"] == "local"
    assert (
        said.err.splitlines()[0]
        == "target `small` does not accept it: target `small` cannot keep `account` of this job"
    )


def test_launch_passes_over_a_target_that_does_not_answer_and_stays_where_it_went(run: Terminal) -> None:
    records = run.tree / "records"
    (run.tree / "runtime.toml").write_text(f'[targets.first]\nkind = "local"\nrecords = "{records}"\n')
    words = ["launch", "--on", "first,local", "-o", "json", "--set", "code.exclude=[records]", "--", "true"]
    records.touch()

    began = run(*words)
    records.unlink()
    same, other = run(*words), run("launch", "--again", *words[1:])

    assert (began.json["target"], began.json["new"]) == ("local", True)
    assert began.err.startswith(
        f"target `first` does not accept it: the record root `{records}` refuses: not a directory"
    )
    assert (same.json["job"], same.json["new"]) == (began.json["job"], False)
    assert (other.json["target"], other.json["new"]) == ("first", True)


def test_launch_that_may_have_begun_on_one_target_tries_no_other(
    run: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    def submit(*_: object) -> str:
        raise HostUnavailable("the answer was lost")

    monkeypatch.setattr(LocalLauncher, "submit", submit)
    (run.tree / "runtime.toml").write_text('[targets.other]\nkind = "local"\nrecords = "other"\n')

    said = run("launch", "--on", "local,other", "--", "true")

    assert (said.code, said.err.splitlines()[-1]) == (3, "error: the answer was lost")
    assert not (run.tree / "other").exists()


def test_launch_that_ignores_a_field_that_is_none_says_which_is_near(run: Terminal) -> None:
    said = run("launch", "--on", "local", "--ignore", "resources.cpu", "--", "true")

    assert (said.code, said.err.splitlines()[-1]) == (2, "hint: did you mean `resources.cpus`?")


def test_launch_that_ignores_a_refused_field_drops_it(run: Terminal) -> None:
    assert run("launch", "--on", "local", "--set", "account=x", "--ignore", "account", "--", "true").code == 0


def test_launch_again_is_the_same_job_unless_a_new_one_is_asked_for(run: Terminal) -> None:
    first = run.finish("true")

    same = run("launch", "--on", "local", "-o", "json", "--", "sh", "-c", "true")
    new = run("launch", "--on", "local", "--again", "-o", "json", "--", "sh", "-c", "true")

    assert (same.json["job"], same.json["new"]) == (first, False)
    assert "the same was launched before" in same.err
    assert (new.json["job"] != first, new.json["new"]) == (True, True)


# files and flags


def test_flags_are_the_same_as_a_file(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(
        "command: [python, train.py]\nname: train\nnodes: 2\ntime_limit: 2h\nenv: {A: b}\n"
        "resources: {cpus: 4, memory: 16GiB, gpus: {type: a100, count: 2}}\nretry: {failure: 3}\n"
        "secrets: [{name: K, source: 'env://K'}]\narray: {params: {lr: ['0.1', '0.2']}, max_parallel: 2}\n"
    )
    flags = {
        "name": "train",
        "nodes": 2,
        "time_limit": "2h",
        "resources.cpus": 4.0,
        "resources.memory": "16GiB",
        "resources.gpus.count": 2.0,
        "resources.gpus.type": "a100",
        "retry.failure": 3,
        "array.max_parallel": 2,
    }

    built = build_request(None, ["python", "train.py"], flags, ["A=b"], ["K=env://K"], ["lr=0.1,0.2"], [])

    assert built.spec_on(LOCAL) == parse_spec(read_spec_file(file))


def test_after_takes_beginnings_of_ids_and_makes_the_same_job_as_whole_ones(run: Terminal) -> None:
    (run.tree / "runtime.toml").write_text(f'[targets.hpc]\nkind = "slurm"\nrecords = "{run.tree}/records"\n')
    first = run.finish("true")

    plans = [
        run("launch", "--on", "hpc", "--dry-run", "-o", "json", "--after", f"any:{text}", "--", "true").json[0]
        for text in (first, first[:10], "last")
    ]

    assert {plan["job"] for plan in plans} == {plans[0]["job"]}
    assert plans[0]["spec"]["after"] == [f"any:{first}"]
    assert plans[0]["fidelity"]["after"] == {
        "kept": "native",
        "how": "--dependency: afterok, afterany or afternotok",
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--on", "local", "--after", "j-0123456789abcdef01234567"], "there is no scheduler that could wait"),
        (["--on", "local", "--after", "j-0123"], "error: no job named `j-0123`"),
        (["--on", "hpc", "--after", "when:j-0123456789abcdef01234567"], "expected the id of a job, j-…"),
    ],
)
def test_after_that_cannot_be_kept_or_names_no_job_is_refused(run: Terminal, words: list[str], message: str) -> None:
    said = run("launch", *words, "--", "true")

    assert (said.code, message in said.err) == (2, True), said.err


def test_flags_stand_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("command: [a]\nresources: {cpus: 4, memory: 1GiB}\n")

    built = build_request(file, ["b"], {"resources.cpus": 8.0}, [], [], [], ["priority=high"])

    assert spec_fields(built.spec_on(LOCAL)) == {
        "command": ["b"],
        "priority": "high",
        "resources": {"cpus": 8.0, "memory": "1GiB"},
    }


def test_job_file_may_say_on_which_targets(run: Terminal) -> None:
    (run.tree / "job.yaml").write_text("command: ['true']\nplacement: {on: [local]}\nenv: {ANSWER: yes}\n")

    said = run("launch", "-f", "job.yaml", "-o", "json")

    assert said.code == 0, said.err
    assert said.json["target"] == "local"


def test_launch_reads_a_job_from_standard_input(run: Terminal) -> None:
    text = "command: [sh, -c, echo from $RUNTIME_JOB_ID]\n"
    words = [sys.executable, "-m", "runtime", "launch", "--on", "local", "-f", "-", "--follow"]

    done = subprocess.run(words, input=text, capture_output=True, text=True, timeout=PATIENCE_S, check=False)

    assert (done.returncode, done.stdout[:7]) == (0, "from j-")


# following


@pytest.mark.parametrize(("script", "code"), [("echo out; exit 0", 0), ("echo out; exit 7", 1), ("exit 75", 1)])
def test_follow_prints_the_log_and_ends_like_the_job(run: Terminal, script: str, code: int) -> None:
    words = ["--set", "retry.on_exit={75: fail}"]

    said = run("launch", "--on", "local", "--follow", *words, "--", "sh", "-c", script)

    assert said.code == code
    assert said.out == ("out\n" if "out" in script else "")
    assert ("why: `runtime explain" in said.err) == bool(code)


def test_follow_of_a_time_out_is_exit_code_124(run: Terminal) -> None:
    said = run("launch", "--on", "local", "--follow", "--time-limit", "1s", "--set", "grace_period=1s", "sleep", "60")

    assert said.code == 124


def test_follow_of_an_array_names_the_run_of_each_line(run: Terminal) -> None:
    said = run("launch", "--on", "local", "--follow", "--seeds", "3", "--", "sh", "-c", "echo seed $SEED")

    assert sorted(said.out.splitlines()) == [f"[{index}] seed {index}" for index in range(3)]


def test_follow_interrupted_leaves_the_job_alone(run: Terminal) -> None:
    words = [
        sys.executable,
        "-m",
        "runtime",
        "launch",
        "--on",
        "local",
        "--follow",
        "--",
        "sh",
        "-c",
        "echo on; sleep 600",
    ]
    following = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert following.stdout is not None
    assert following.stdout.readline() == "on\n"

    following.send_signal(signal.SIGINT)

    assert "detached, the job goes on" in following.communicate(timeout=PATIENCE_S)[1]
    assert following.returncode == 130
    assert [each["state"] for each in run("status", "--on", "local", "-o", "json").json["jobs"]] == ["running"]


@pytest.mark.slow
def test_retries_go_on_after_launch_and_all_that_it_started_were_killed(run: Terminal) -> None:
    waits = "until [ -e $RUNTIME_CHECKPOINT_DIR/fail ]; do sleep 0.05; done; exit 1"
    script = f"[ $RUNTIME_ATTEMPT = 2 ] || {{ {waits}; }}"
    retry = ["--set", "retry.failure=1", "--set", "retry.backoff.max=1s", "--set", "retry.backoff.min=1s"]
    words = [sys.executable, "-m", "runtime", "launch", "--on", "local", *retry, "--follow", "--", "sh", "-c", script]
    with subprocess.Popen(
        words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as launched:
        jobs = run.data / "jobs" / "jobs"
        wait_for(lambda: bool(list(jobs.glob("j-*/runs/0/a0001/beat"))), "the first attempt")
        follows = launched.poll() is None
        os.killpg(launched.pid, signal.SIGKILL)

    (folder,) = jobs.glob("j-*")
    (folder / "runs/0/checkpoint/fail").touch()
    run.wait(folder.name)

    assert (follows, launched.returncode) == (True, -signal.SIGKILL)
    said = run("status", folder.name, "-o", "json").json
    assert (said["state"], [each["reason"] for each in said["attempts"]]) == ("succeeded", ["app_failed", "succeeded"])


# Python


def test_launch_in_python_returns_a_handle(run: Terminal) -> None:
    job = runtime.launch(["sh", "-c", "echo x; echo y > $RUNTIME_OUTPUT_DIR/f"], "local")

    assert isinstance(job, runtime.JobHandle)
    assert job.wait(timeout=PATIENCE_S).state is JobState.SUCCEEDED
    assert job.state() is JobState.SUCCEEDED
    assert b"".join(job.logs()) == b"x\n"
    assert job.fetch(run.tree / "home") == [run.tree / "home" / "f"]
    assert job.cancel() == []
    assert (
        runtime.launch({"command": ["sh", "-c", "exit 3"], "name": "bad"}, on="local").wait().state is JobState.FAILED
    )


def test_launch_in_python_of_what_is_no_job_is_refused(run: Terminal) -> None:
    with pytest.raises(runtime.RuntimeFailure, match="cannot be used"):
        runtime.launch("echo x", "local")


def test_front_door_has_these_names_and_no_others() -> None:
    assert runtime.__all__ == [
        "JobHandle",
        "JobSpec",
        "RuntimeFailure",
        "WorkerOptions",
        "artifact",
        "choice",
        "current_attempt",
        "integer",
        "launch",
        "log",
        "map",
        "map_tasks",
        "open_stack",
        "run_experiment",
        "run_worker",
        "submit",
        "tune",
        "uniform",
        "wait",
        "workflow",
    ]
    assert all(getattr(runtime, name) for name in runtime.__all__)


# the schema


def test_published_schema_is_that_of_the_code(run: Terminal) -> None:
    assert json.loads(SCHEMA.read_text()) == spec_schema()
    assert run("launch", "--schema").json == spec_schema()


ACCEPTED = [
    {"command": ["true"]},
    {"command": ["a"], "array": {"seeds": 3}, "resources": {"gpus": {"count": 0.25}}, "time_limit": "2h"},
    {"command": ["a"], "array": {"params": {"lr": [0.1]}, "max_parallel": 2}, "env": {"A": None, "B": "c"}},
    {"command": ["a"], "resources": {"memory": "16GiB.."}, "retry": {"on_exit": {"75": "requeue"}}},
]
REFUSED: list[dict[str, Any]] = [
    {},
    {"command": ["a"], "gpus": 1},
    {"command": ["a"], "nodes": "two"},
    {"command": ["a"], "resources": {"gpus": {"number": 1}}},
    {"command": ["a"], "priority": "soon"},
]


@pytest.mark.parametrize("value", ACCEPTED)
def test_schema_and_parser_take_the_same_jobs(value: dict[str, Any]) -> None:
    parse_spec(value)

    assert list(Draft202012Validator(spec_schema()).iter_errors(value)) == []


@pytest.mark.parametrize("value", REFUSED)
def test_schema_and_parser_refuse_the_same_jobs(value: dict[str, Any]) -> None:
    with pytest.raises(runtime.RuntimeFailure):
        parse_spec(value)

    assert list(Draft202012Validator(spec_schema()).iter_errors(value)) != []


def test_every_flag_of_launch_has_a_help() -> None:
    options = [param for param in load_command("launch").params if param.param_type_name == "option"]

    assert [param.name for param in options if not getattr(param, "help", None)] == []


def test_yaml_of_a_spec_reads_back_as_the_same() -> None:
    spec = parse_spec(ACCEPTED[1])

    assert parse_spec(yaml.safe_load(io.StringIO(yaml.safe_dump(spec_fields(spec))))) == spec


# bundles


def without_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without its own record root for Slurm."""
    for name in ("SCRATCH", "WORK", "PSCRATCH", "SCRATCHDIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("records", ["", 'records = "/lustre/lab"\n'])
def test_bundle_that_was_submitted_elsewhere_is_known_after_import(
    run: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, records: str
) -> None:
    without_scratch(monkeypatch)
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, script in {"sbatch": "echo 1234", "squeue": "true", "sacct": "true", "scontrol": "true"}.items():
        (commands / name).write_text(f"#!/bin/sh\n{script}\n")
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:/usr/bin:/bin")
    (run.tree / "runtime.toml").write_text(f'[targets.hpc]\nkind = "slurm"\n{records}')
    said = run("launch", "--on", "hpc", "--export", str(tmp_path / "bundle"), "-o", "json", "--", "python3", "main.py")
    assert said.code == 0, said.err
    job = said.json["job"]
    too_early = run("import", str(tmp_path / "bundle"), "--on", "hpc")
    moved = (tmp_path / "bundle").rename(tmp_path / "elsewhere")
    subprocess.run([str(moved / "submit.sh")], check=True, capture_output=True, timeout=PATIENCE_S)

    first, again = (run("import", str(moved), "--on", "hpc", "-o", "json") for _ in range(2))

    assert (too_early.code, "was not submitted" in too_early.err) == (2, True)
    assert [(each["job"], each["native_ids"], each["new"]) for each in first.json] == [(job, ["1234"], True)]
    assert again.json[0]["new"] is False
    assert differences(documented()["runtime import ./bundle --on hpc -o json"], first.json) == []
    assert [each["native_id"] for each in run("status", job[:8], "-o", "json").json["natives"]] == ["1234"]


def test_bundle_is_the_same_whatever_record_root_its_target_names(
    run: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_scratch(monkeypatch)

    def export(records: str) -> dict[str, bytes]:
        (run.tree / ".runtimeignore").write_text("runtime.toml\n")
        (run.tree / "runtime.toml").write_text(f'[targets.hpc]\nkind = "slurm"\n{records}')
        folder = tmp_path / f"bundle-{len(records)}"
        said = run("launch", "--on", "hpc", "--export", str(folder), "--", "python3", "main.py")
        assert said.code == 0, said.err
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    without, named = export(""), export('records = "/lustre/lab/canary"\n')

    assert without == named
    assert [name for name, content in named.items() if b"canary" in content or bytes(tmp_path) in content] == []


def test_bundle_for_a_target_that_has_none_is_refused(run: Terminal) -> None:
    assert run("launch", "--on", "local", "--export", "bundle", "true").code == 2
    assert run("import", str(run.tree), "--on", "local").code == 2


def test_bucket_as_a_mount_of_this_machine_is_refused_with_the_ways_out(run: Terminal) -> None:
    mounts = ["--set", "mounts=[{source: 'gs://lab/data', target: /data}]"]

    refused = run("launch", "--on", "local", *mounts, "--dry-run", "--", "true")

    assert refused.code == 2
    assert refused.err.splitlines() == [
        "error: `mounts` names `gs://lab/data`, and a machine can mount its own folders and files only",
        "hint: name an absolute path of the machine; a bucket is read by the command itself",
    ]


def test_two_fields_that_are_refused_are_named_with_the_reasons_and_the_words_that_drop_them(run: Terminal) -> None:
    words = ["--set", "placement.capacity=spot", "--set", "account=lab"]

    refused = run("launch", "--on", "local", *words, "--dry-run", "--", "true")

    assert refused.code == 2
    assert refused.err.splitlines() == [
        "error: target `local` cannot keep `account`, `placement.capacity` of this job",
        "  account: there is no scheduler: what is launched runs at once",
        "  placement.capacity: there is no scheduler: what is launched runs at once",
        (
            "hint: take it out of the spec, name another target, or drop it: --ignore account --ignore placement.capacity"
        ),
    ]
    dropped = ["--ignore", "account", "--ignore", "placement.capacity"]
    assert run("launch", "--on", "local", *words, *dropped, "--dry-run", "--", "true").code == 0


@pytest.mark.parametrize(
    ("file", "text", "table"),
    [
        ("runtime.toml", '[targets.a]\nkind = "ssh"\nhost = "a"\n', "[targets.xyz]"),
        ("pyproject.toml", '[tool.runtime.targets.a]\nkind = "ssh"\nhost = "a"\n', "[tool.runtime.targets.xyz]"),
    ],
)
def test_target_that_is_not_there_is_told_where_it_would_be(run: Terminal, file: str, text: str, table: str) -> None:
    nowhere = run("launch", "--on", "xyz", "--", "true")
    (run.tree / file).write_text(text)
    somewhere = run("launch", "--on", "xyz", "--", "true")

    assert nowhere.err.splitlines()[-1] == "hint: add [targets.xyz] to runtime.toml; `runtime targets list`"
    assert somewhere.err.splitlines()[-1] == f"hint: add {table} to {run.tree / file}; `runtime targets list`"
