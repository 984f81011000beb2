"""The one place that prints errors: their shape on stderr, and the exit codes."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import types
from typing import TYPE_CHECKING, Annotated, Any

import pytest
import typer

from runtime.cli import commands
from runtime.cli.main import explain, main
from runtime.cli.output import confirm
from runtime.cli.worker import WorkerParser
from runtime.errors import (
    InfrastructureFailure,
    MissingExtra,
    NotPossible,
    RequestRefused,
    RuntimeFailure,
    UnknownName,
    WorkFailed,
)
from tests.shim_support import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """`run(function, *args)` runs `function` as `runtime try ARGS`, and returns exit code, stdout and stderr."""

    def run_command(function: Callable[..., Any] | typer.Typer, *args: str) -> tuple[int, str, str]:
        module = types.ModuleType("runtime.cli.try_it")
        module.__dict__["app" if isinstance(function, typer.Typer) else "try_it"] = function
        monkeypatch.setitem(sys.modules, "runtime.cli.try_it", module)
        monkeypatch.setitem(commands.COMMANDS, "try-it", ("runtime.cli.try_it", "try it"))
        code = main(["try-it", *args])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run_command


def raising(problem: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise problem

    return fail


def launch(
    target: Annotated[str, typer.Argument(metavar="TARGET")], slots: Annotated[int, typer.Option("--slots")] = 1
) -> None:
    print(f"{target} {slots}")


def test_failure_is_printed_in_its_shape(run: Any) -> None:
    failure = WorkFailed(
        "task `t-41` failed: out of memory", facts=["3 of 3 attempts", "limit 2GiB"], hint="`runtime retry t-41`"
    )

    code, out, err = run(raising(failure))

    assert (code, out) == (1, "")
    assert err == (
        "error: task `t-41` failed: out of memory\n  3 of 3 attempts\n  limit 2GiB\nhint: `runtime retry t-41`\n"
    )


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (RequestRefused("x"), 2),
        (InfrastructureFailure("x"), 3),
        (typer.Exit(124), 124),
        (SystemExit(1), 1),
        (SystemExit(None), 0),
    ],
)
def test_exit_code_follows_the_failure(run: Any, problem: BaseException, expected: int) -> None:
    assert run(raising(problem))[0] == expected


def test_returned_number_is_the_exit_code(run: Any) -> None:
    assert run(lambda: 3)[0] == 3
    assert run(lambda: None)[0] == 0


def test_interrupt_is_silent_and_exits_130(run: Any) -> None:
    assert run(raising(KeyboardInterrupt())) == (130, "", "")


def test_misspelt_command_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["sttus"])

    first, known, hint = capsys.readouterr().err.splitlines()
    assert code == 2
    assert first == "error: no command named `sttus`"
    assert known.startswith("  known commands: artifacts, cancel, ")
    assert hint == "hint: did you mean `status`?"


def test_misspelt_command_in_a_group_gets_a_suggestion(run: Any) -> None:
    app = commands.new_app("Try it.")
    app.command("list")(lambda: None)
    app.command("purge")(lambda: None)

    code, _, err = run(app, "pruge")

    assert code == 2
    assert err == "error: no command named `pruge`\n  known commands: list, purge\nhint: did you mean `purge`?\n"


def test_group_without_a_command_says_which_there_are(run: Any) -> None:
    app = commands.new_app("Try it.")
    app.command("list")(lambda: None)
    app.command("purge")(lambda: None)

    code, _, err = run(app)

    assert code == 2
    assert err.startswith("error: `runtime try-it` needs a command\n  commands: list, purge\nhint: ")


def test_misspelt_option_gets_a_suggestion(run: Any) -> None:
    code, _, err = run(launch, "gpu", "--slot", "2")

    assert code == 2
    assert err.splitlines()[0] == "error: no option named `--slot` in `runtime try-it`"
    assert err.splitlines()[-1] == "hint: did you mean `--slots`?"


def test_debug_after_the_command_says_where_it_goes(run: Any) -> None:
    code, _, err = run(launch, "gpu", "--debug")

    assert (code, err.splitlines()[-1]) == (2, "hint: it goes before the command: `runtime --debug …`")


def test_missing_argument_is_named(run: Any) -> None:
    code, _, err = run(launch)

    assert code == 2
    assert err.splitlines()[:2] == [
        "error: `runtime try-it` needs `TARGET`",
        "  usage: runtime try-it [OPTIONS] {TARGET}",
    ]


def test_value_of_the_wrong_type_names_option_and_value(run: Any) -> None:
    code, _, err = run(launch, "gpu", "--slots", "many")

    assert code == 2
    assert err.splitlines()[0] == "error: `--slots` of `runtime try-it`: `many` is not a valid int"


def test_arguments_reach_the_command(run: Any) -> None:
    assert run(launch, "gpu", "--slots", "2") == (0, "gpu 2\n", "")


def test_unexpected_exception_is_called_our_bug(run: Any) -> None:
    code, out, err = run(raising(ValueError("queue has -1 tasks")))

    first, where, bug, hint = err.splitlines()
    assert (code, out) == (3, "")
    assert first == "error: unexpected ValueError: queue has -1 tasks"
    assert where.startswith("  in `")
    assert bug.startswith("  this is a bug in research-runtime ")
    assert "--debug" in hint


def test_debug_prints_the_traceback_before_the_error(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNTIME_DEBUG", "1")

    err = run(raising(ValueError("queue has -1 tasks")))[2]

    assert err.startswith("Traceback (most recent call last):\n")
    assert "error: unexpected ValueError" in err


def test_debug_option_is_taken_before_any_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RUNTIME_DEBUG", "0")

    assert main(["--debug", "--version"]) == 0
    assert os.environ["RUNTIME_DEBUG"] == "1"


def test_missing_library_names_the_extra() -> None:
    explained = explain(ModuleNotFoundError("No module named 'google.cloud'", name="google.cloud"))

    assert isinstance(explained, MissingExtra)
    assert explained.hint == "pip install 'research-runtime[gcp]'"


def test_missing_module_of_ours_is_a_bug() -> None:
    explained = explain(ModuleNotFoundError("No module named 'runtime.lost'", name="runtime.lost"))

    assert type(explained) is RuntimeFailure


def test_full_disk_is_infrastructure_and_names_the_file() -> None:
    explained = explain(OSError(errno.ENOSPC, "No space left on device", "/data/records"))

    assert isinstance(explained, InfrastructureFailure)
    assert explained.message == "cannot use `/data/records`: no space left on device"


def test_broken_pipe_to_elsewhere_is_not_hidden(run: Any) -> None:
    code, _, err = run(raising(BrokenPipeError(errno.EPIPE, "Broken pipe")))

    assert code == 3
    assert err.startswith("error: unexpected BrokenPipeError")


def test_reader_that_leaves_early_ends_us_quietly() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as pipe:
        done = subprocess.run(
            [sys.executable, "-m", "runtime", "completion", "bash"],
            stdout=pipe,
            stderr=subprocess.PIPE,
            timeout=PATIENCE_S,
            check=False,
        )

    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")  # noqa: PTH110
def test_full_disk_under_stdout_is_said_once() -> None:
    with open("/dev/full", "wb") as full:  # noqa: PTH123
        done = subprocess.run(
            [sys.executable, "-m", "runtime", "--version"],
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=PATIENCE_S,
            check=False,
        )

    assert (done.returncode, done.stderr) == (
        3,
        b"error: the machine refused: no space left on device\nhint: free some space, and run it again\n",
    )


def test_closed_stdout_is_no_failure() -> None:
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m runtime --version >&-"], capture_output=True, timeout=PATIENCE_S, check=False
    )

    assert (done.returncode, done.stderr) == (0, b"")


def test_name_that_is_no_utf8_is_printed_as_json_escape() -> None:
    code = "from runtime.cli.console import prepare_streams; from runtime.cli.output import print_json\nprepare_streams()\n"
    done = subprocess.run(
        [sys.executable, "-c", code + "print_json(['\\udcff'])"], capture_output=True, timeout=PATIENCE_S, check=True
    )

    assert json.loads(done.stdout) == ["\udcff"]


def test_confirm_without_a_person_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", open(os.devnull))  # noqa: SIM115, PTH123

    with pytest.raises(NotPossible) as refused:
        confirm("purge 12 tasks from `default`", yes=False)
    confirm("purge 12 tasks from `default`", yes=True)

    assert refused.value.hint == "pass `--yes` to go on"
    sys.stdin.close()


@pytest.fixture
def parser() -> WorkerParser:
    parser = WorkerParser(prog="runtime worker", description="Serve a queue.")
    parser.add_argument("--slots", type=int)
    parser.add_argument("--durability", choices=["full", "normal"])
    return parser


def test_parser_misspelt_option_gets_a_suggestion(parser: WorkerParser) -> None:
    with pytest.raises(UnknownName) as unknown:
        parser.parse_args(["--slot=2"])

    assert (unknown.value.kind, unknown.value.name, unknown.value.hint) == (
        "option",
        "--slot",
        "did you mean `--slots`?",
    )


def test_parser_bad_value_names_option_and_command(parser: WorkerParser) -> None:
    with pytest.raises(RequestRefused) as refused:
        parser.parse_args(["--slots", "many"])

    assert refused.value.message == "`--slots` of `runtime worker`: invalid int value: `many`"


def test_parser_bad_choice_lists_the_choices(parser: WorkerParser) -> None:
    with pytest.raises(UnknownName) as unknown:
        parser.parse_args(["--durability", "nromal"])

    assert (unknown.value.known, unknown.value.hint) == (["full", "normal"], "did you mean `normal`?")


def test_parser_stray_argument_is_refused(parser: WorkerParser) -> None:
    with pytest.raises(RequestRefused) as refused:
        parser.parse_args(["gpu"])

    assert refused.value.message == "`runtime worker` takes no argument `gpu`"


def test_error_that_names_a_very_long_argument_shows_its_ends_and_the_hint(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["results", "x" * 200_000])

    said = capsys.readouterr().err
    assert code == 2
    assert len(said) < 10_000
    assert " more letters] " in said
    assert "\nhint: " in said
