"""Wrong input is refused where it is given, with a next step, and changes nothing."""

from __future__ import annotations

import json
import sqlite3
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import runtime
from runtime.cli.main import main
from runtime.client.tasks.kept_stacks import close_kept
from runtime.errors import InvalidTask, InvalidValue, NotPossible, RequestRefused, UnknownName
from runtime.stack.open import open_stack
from runtime.tasks import grid
from runtime.tasks.grid import parse_grid
from runtime.testing import sample_task
from runtime.worker.slots import HostResources, plan_slots
from tests.verbs_support import Bench

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setenv("RUNTIME_DATA_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    bench = Bench.sqlite(tmp_path, "local.db")
    yield bench
    bench.close()


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run_command(*args: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(list(args))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run_command


def queues_in(file: Path) -> list[str]:
    with sqlite3.connect(file) as connection:
        made = connection.execute("SELECT 1 FROM sqlite_master WHERE name='queues'").fetchone()
        return sorted(name for (name,) in connection.execute("SELECT name FROM queues")) if made else []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("status", ""), "no experiment named ``"),
        (("status", "--on", ""), "no target named ``"),
        (("status", "--stack", ""), "`` is no valid stack"),
        (("queue", "list", "--stack", ""), "`` is no valid stack"),
        (("fetch", "last", ""), "`` is no valid folder"),
        (("submit", "--", ""), "the command's first word is empty"),
        (("submit", "--from", "", "--experiment", "x"), "cannot read ``: is a directory"),
    ],
)
def test_text_that_is_empty_is_refused_and_means_no_default(
    run: Run, bench: Bench, words: tuple[str, ...], message: str
) -> None:
    code, out, err = run(*words)

    assert (code, out) == (2, "")
    assert err.startswith(f"error: {message}")
    assert "hint: " in err


@pytest.mark.parametrize("output", ["", "ftp://host/x", "s3://", "gs:///"])
def test_output_that_no_task_could_have_is_refused(run: Run, bench: Bench, output: str) -> None:
    code, out, err = run("submit", "--no-snapshot", "--outputs", output, "--", "true")

    assert (code, out) == (2, "")
    assert err == f"error: `{output}` is no valid output\n  allowed: a path or a file:, gs:// or s3:// URL\n"


@pytest.mark.parametrize("output", ["out/a", "/a b", "file:///x", "file:x", "gs://lab/x/", "s3://lab/out.json"])
def test_output_of_a_kind_that_can_be_looked_for_is_taken(run: Run, bench: Bench, output: str) -> None:
    assert run("submit", "--no-snapshot", "--outputs", output, "--", "true")[0] == 0


@pytest.mark.parametrize("gpus", ["-1", "nan", "inf", "1.5"])
def test_gpus_that_no_machine_has_are_refused_before_a_target_is_tried(run: Run, bench: Bench, gpus: str) -> None:
    code, out, err = run("targets", "check", "local", f"--gpus={gpus}")

    assert (code, out) == (2, "")
    assert err.endswith("is no valid gpus\n  allowed: whole GPUs, or a part of one such as 0.25\n")


@pytest.mark.parametrize("name", [".", "broken.jsonl.gz"])
def test_file_of_tasks_that_is_none_is_refused_with_the_next_step(run: Run, bench: Bench, name: str) -> None:
    Path("broken.jsonl.gz").write_bytes(b"no gzip")

    code, out, err = run("submit", "--experiment", "x", "--from", name)

    assert (code, out) == (2, "")
    assert f"error: cannot read {'on in ' if name != '.' else ''}`{name}`: " in err
    assert "\nhint: " in err


@pytest.mark.parametrize("text", ["a: [", "a: 1\n---\nb: 2\n"])
def test_file_without_a_replica_set_is_refused_with_the_next_step(run: Run, tmp_path: Path, text: str) -> None:
    (tmp_path / "w.yaml").write_text(text)

    code, out, err = run("convert", "phoebe", str(tmp_path / "w.yaml"))

    assert (code, out) == (2, "")
    assert err.endswith("hint: name the YAML file of the ReplicaSet\n")


# queues


@pytest.mark.parametrize(
    "words",
    [
        ("queue", "pause", "trainig"),
        ("queue", "resume", "trainig"),
        ("queue", "purge", "trainig", "--yes"),
        ("queue", "stats", "trainig"),
        ("queue", "peek", "trainig"),
        ("queue", "repair", "trainig", "--yes"),
        ("status", "--queue", "trainig"),
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_queue_that_does_not_exist_is_refused_with_the_known_ones(
    bench: Bench, run: Run, tmp_path: Path, words: tuple[str, ...]
) -> None:
    run("submit", "--no-snapshot", "--queue", "training", "--", "true")

    code, out, err = run(*words)

    assert (code, out) == (2, "")
    assert err.startswith("error: no queue named `trainig` in stack `local`\n  known queues: default, training\n")
    assert "hint: did you mean `training`?" in err
    assert queues_in(tmp_path / "local.db") == ["training"]


@pytest.mark.parametrize("name", ["default", "gpu", "training"])
def test_queue_that_has_tasks_or_a_worker_or_is_the_default_is_paused(bench: Bench, run: Run, name: str) -> None:
    run("submit", "--no-snapshot", "--queue", "training", "--", "true")
    bench.report("w-one", queue="gpu")

    assert run("queue", "pause", name)[0] == 0
    assert run("queue", "resume", name)[0] == 0


def test_new_queue_of_the_local_stack_is_noted_once_and_has_the_task(bench: Bench, run: Run) -> None:
    bench.put(sample_task())
    first = run("submit", "--no-snapshot", "--queue", "nope", "--", "true")
    second = run("submit", "--no-snapshot", "--queue", "nope", "--", "true", "2")
    usual = run("submit", "--no-snapshot", "--", "true")

    said = (
        "note: queue `nope` is new in stack `local`, beside default: tasks wait there for `runtime worker --queue nope`"
    )
    assert [said in each[2] for each in (first, second, usual)] == [True, False, False]
    assert [each[0] for each in (first, second, usual)] == [0, 0, 0]


@pytest.mark.parametrize(("name", "new"), [("nope", True), ("gpu", False), ("default", False)])
def test_new_queue_of_a_worker_is_noted(bench: Bench, run: Run, name: str, new: bool) -> None:
    run("submit", "--no-snapshot", "--queue", "gpu", "--", "true")

    code, _, err = run("worker", "--queue", name, "--idle-timeout", "0s", "--log-format", "human")

    assert code == 0
    noted = (
        f"queue `{name}` is new in stack `local`, beside default, gpu: `runtime submit --queue {name}` puts tasks there"
    )
    assert (noted in err) is new


def test_new_queue_of_a_program_is_logged_once(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(3):
        runtime.submit({"command": ["echo", str(number)]}, queue="nope", snapshot=False)
    close_kept()
    runtime.submit({"command": ["echo", "3"]}, queue="nope", snapshot=False)
    runtime.submit({"command": ["echo", "4"]}, snapshot=False)
    close_kept()

    assert [record.getMessage().partition(" is new")[0] for record in caplog.records] == ["queue `nope`"]


def test_queue_that_only_a_worker_serves_is_not_new(bench: Bench, run: Run) -> None:
    bench.report("w-one", queue="gpu")

    assert "is new" not in run("submit", "--no-snapshot", "--queue", "gpu", "--", "true")[2]


@pytest.mark.parametrize("verb", ["pause", "resume", "stats", "peek"])
def test_file_that_a_queue_url_names_is_not_made_by_looking_after_it(
    bench: Bench, run: Run, tmp_path: Path, verb: str
) -> None:
    code, _, err = run("queue", verb, f"sqlite:{tmp_path}/tpyo.db")

    assert code == 2
    assert f"no task file `{tmp_path}/tpyo.db`" in err
    assert not (tmp_path / "tpyo.db").exists()


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("pubsbu:projects/p/subscriptions/s?topic=t", "did you mean `pubsub:projects/p/subscriptions/s?topic=t`?"),
        ("pubsbu://projects/p", "did you mean `pubsub:projects/p`?"),
        ("sqlite3:/tmp/x.db", "did you mean `sqlite:/tmp/x.db`?"),
        ("SQLite:/tmp/x.db", "did you mean `sqlite:/tmp/x.db`?"),
        ("/tmp/x.db", "did you mean `sqlite:/tmp/x.db`?"),
        ("redis://host", None),
        ("a/b", None),
        ("a:b", None),
    ],
)
@pytest.mark.parametrize("verb", ["submit", "pause", "worker", "python", "environment"])
def test_queue_named_like_a_misspelt_url_is_refused_and_makes_no_queue(
    bench: Bench, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, hint: str | None, verb: str
) -> None:
    if verb == "python":
        with pytest.raises(InvalidValue) as refused:
            runtime.submit({"command": ["true"]}, queue=name, snapshot=False)
        err = refused.value.render()
    else:
        if verb == "environment":
            monkeypatch.setenv("RUNTIME_QUEUE", name)
        words = {
            "submit": ("submit", "--no-snapshot", "--queue", name, "--", "true"),
            "pause": ("queue", "pause", name),
            "worker": ("worker", "--once", "--idle-timeout", "0s", "--queue", name),
            "environment": ("submit", "--no-snapshot", "--", "true"),
        }
        code, _, err = run(*words[verb])
        assert code == 2

    assert f"`{name}` is no valid queue" in err
    assert "allowed: a name without `:` and `/`, or a URL" in err
    if hint is not None:
        assert f"hint: {hint}" in err
    assert queues_in(tmp_path / "local.db") == []


def test_queue_of_any_name_in_a_file_stays_within_reach_of_its_url(bench: Bench, run: Run, tmp_path: Path) -> None:
    url = f"sqlite:{tmp_path}/local.db#a/b:c"

    assert run("submit", "--no-snapshot", "--queue", url, "--", "true")[0] == 0
    assert run("status")[0] == 0
    assert run("queue", "list")[1].startswith("a/b:c\t")
    assert run("queue", "purge", url, "--yes")[0] == 0


# grids and numbers


@pytest.mark.parametrize(
    "option",
    [
        "seed=0:99999999999",
        "seed=0:999999,0:999999",
        "seed=" + ",".join(["0:500000"] * 3),
        f"seed=0:{'9' * 5000}",
        f"seed={'9' * 5000}:1:-1",
        "seed=0:" + "9" * 19,
    ],
)
def test_grid_that_is_too_large_is_refused_before_it_is_expanded(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "MOST_VALUES", 1_000_000)
    made = 0

    def count(_frame: object, event: str, _arg: object) -> None:
        nonlocal made
        made += event == "call"

    sys.setprofile(count)
    try:
        with pytest.raises(InvalidValue) as refused:
            parse_grid([option])
    finally:
        sys.setprofile(None)

    assert "--from FILE`" in (refused.value.hint or "")
    assert made < 1_000


@pytest.mark.parametrize("share", [float("nan"), float("inf"), -float("inf"), -1.0])
def test_share_of_a_gpu_that_is_no_number_is_refused(share: float) -> None:
    with pytest.raises(InvalidValue):
        plan_slots(HostResources(4, 1024**3, ("0",)), 1, share)


@pytest.mark.parametrize("number", ["nan", "inf", "-inf", "1e400", "9" * 400, "9" * 5000, "-1"])
@pytest.mark.parametrize(
    "option",
    [
        ("submit", "--no-snapshot", "--priority"),
        ("submit", "--no-snapshot", "--cpus"),
        ("submit", "--no-snapshot", "--timeout"),
        ("submit", "--no-snapshot", "--max-failures"),
        ("worker", "--idle-timeout", "0s", "--slots"),
        ("worker", "--idle-timeout", "0s", "--gpus-per-slot"),
        ("worker", "--idle-timeout", "0s", "--max-tasks"),
        ("worker", "--idle-timeout", "0s", "--look-ahead"),
        ("worker", "--idle-timeout", "0s", "--max-consecutive-failures"),
        ("worker", "--idle-timeout", "0s", "--metrics-port"),
        ("queue", "peek", "-n"),
        ("queue", "dead", "list", "-n"),
    ],
    ids=lambda option: option[0] + option[-1],
)
def test_number_that_means_nothing_is_no_bug_of_ours(
    bench: Bench, run: Run, option: tuple[str, ...], number: str
) -> None:
    words = (*option[:-1], f"{option[-1]}={number}", *(("--", "true") if option[0] == "submit" else ()))

    code, _, err = run(*words)

    assert "this is a bug" not in err
    assert code in (0, 2)


# task lines


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ('{"command": ["true"], "command": ["false"]}', "command"),
        ('{"command": ["true"], "resources": {"cpus": 1, "cpus": 2}}', "cpus"),
        ('{"function": "a:b", "kwargs": {"x": 1, "x": 1}}', "x"),
        ('  {"command": ["true"], "own": 1, "own": 2}', "own"),
    ],
)
def test_line_with_a_key_twice_is_refused_with_line_and_key(
    bench: Bench, run: Run, tmp_path: Path, line: str, key: str
) -> None:
    (tmp_path / "tiles.jsonl").write_text(f'{{"command": ["echo"]}}\n{line}\n')

    code, _, err = run("submit", "--no-snapshot", "--from", "tiles.jsonl")

    assert code == 2
    assert f"error: task on line 2 is malformed: `{key}` is given twice\n" in err


def test_parameters_of_an_array_with_a_key_twice_are_refused_with_line_and_key(
    run: Run, bench: Bench, tmp_path: Path
) -> None:
    (tmp_path / "runs.jsonl").write_text('{"lr": 1}\n{"lr": 1, "lr": 2}\n')
    (tmp_path / "job.yaml").write_text("command: [echo, '{lr}']\narray: {file: runs.jsonl}\ncode: {mode: none}\n")

    code, _, err = run("launch", "--on", "local", "--dry-run", "-f", "job.yaml")

    assert code == 2
    assert "line 2" in err
    assert "`lr` is given twice" in err


# names of experiments


NAMES = ["last", "w-2024", "j-", "j-91c0", "t-91c0", "t-shirts"]


@pytest.mark.parametrize("name", NAMES)
def test_experiment_that_no_command_could_name_is_refused(bench: Bench, run: Run, tmp_path: Path, name: str) -> None:
    (tmp_path / f"{name}.jsonl").write_text('{"command": ["true"]}\n')

    typed = run("submit", "--no-snapshot", "--experiment", name, "--", "true")
    file = run("submit", "--no-snapshot", "--from", f"{name}.jsonl")
    with pytest.raises(InvalidValue):
        runtime.submit({"command": ["true"]}, experiment=name, snapshot=False)

    assert [typed[0], file[0]] == [2, 2]
    for _, _, err in (typed, file):
        assert f"`{name}` is no valid experiment" in err
        assert "--experiment" in err
    assert bench.records.experiments() == []


@pytest.mark.parametrize("name", ["last-one", "t-shirts-2", "j-curve", "warm", "x-j-91c0"])
def test_experiment_that_only_looks_alike_is_taken_and_found(bench: Bench, run: Run, name: str) -> None:
    assert run("submit", "--no-snapshot", "--experiment", name, "--", "true")[0] == 0
    assert run("status", name)[0] == 0


def test_experiment_of_an_earlier_release_is_still_read(bench: Bench, run: Run) -> None:
    bench.put(sample_task(experiment="t-shirts"))

    assert run("status", "t-shirts")[0] == 0


# Python


def test_uncaught_error_shows_its_facts_and_its_hint() -> None:
    refused = UnknownName("queue", "trainig", ["training"])
    refused.facts = (*refused.facts, "looked twice")
    refused.add_note("and of the caller")

    shown = traceback.format_exception_only(refused)

    assert shown[1:] == [
        "  known queues: training\n",
        "  looked twice\n",
        "hint: did you mean `training`?\n",
        "and of the caller\n",
    ]


def test_error_without_facts_has_no_notes() -> None:
    assert len(traceback.format_exception_only(NotPossible("cannot"))) == 1
    assert len(traceback.format_exception_only(InvalidTask("a", "is b"))) == 2


def test_error_of_a_program_prints_its_hint(bench: Bench, tmp_path: Path) -> None:
    with pytest.raises(RequestRefused) as refused, open_stack(queue="a/b"):
        pass

    assert "allowed: " in "".join(traceback.format_exception(refused.value))
    assert json.dumps(str(refused.value)).count("allowed") == 0
