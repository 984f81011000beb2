"""All that commands print: hostile text from tasks and elsewhere on a terminal, in pipes and as JSON."""

from __future__ import annotations

import ast
import io
import json
import os
import pty
import re
import subprocess
import sys
import tty
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.cli import console
from runtime.cli.main import main
from runtime.cli.output import OutputFormat, print_list
from runtime.errors import RequestRefused
from runtime.stack.open import OpenStack
from runtime.testing import sample_task
from tests.shim_support import PATIENCE_S
from tests.verbs_support import Bench

ROOT = Path(__file__).parents[3]
PLACES = ("runtime/cli", "runtime/client")
WRITER = "runtime/cli/console.py"
STREAMS = {"stdout", "stderr", "__stdout__", "__stderr__"}
WRITERS = {
    "sys": STREAMS,
    "os": {"write", "writev"},
    "typer": {"echo", "secho", "prompt", "confirm", "progressbar", "style"},
    "getpass": {"getpass"},
    "traceback": {"print_exc", "print_exception", "print_stack"},
}
"""Module → its functions and streams that print, or that style what is printed."""
PRINTING_MODULES = {"rich", "logging", "click"}

HOSTILE = "boom\x1b]52;c;cm0gLXJm\x07\x1b[2A\x9b6n\u202etxt.exe \x1b[8mhidden"
SHOWN = r"boom\x1b]52;c;cm0gLXJm\x07\x1b[2A\x9b6n\u202etxt.exe \x1b[8mhidden"
OURS = re.compile(r"\x1b\[(?:0|1|2|3[1-6])m")


def find_writes(source: str) -> Iterator[int]:
    """Yield the lines of a module that could print past `runtime.cli.console`."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Name(id=module), attr=name) if name in WRITERS.get(module, ()):
                yield node.lineno
            case ast.Name(id="print" | "input", ctx=ast.Load()):  # a field of that name prints nothing
                yield node.lineno
            case ast.Constant(value="/dev/tty" | "/dev/stdout" | "/dev/stderr"):
                yield node.lineno
            case ast.ImportFrom(module=str(module), names=names):
                taken = {each.name for each in names} & WRITERS.get(module, set())
                if taken or module.partition(".")[0] in PRINTING_MODULES:
                    yield node.lineno
            case ast.Import(names=names):
                if {each.name.partition(".")[0] for each in names} & PRINTING_MODULES:
                    yield node.lineno


def test_commands_print_through_one_place() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for place in PLACES
        for path in sorted((ROOT / place).rglob("*.py"))
        if str(path.relative_to(ROOT)) != WRITER
        for line in find_writes(path.read_text(encoding="utf-8"))
    ]

    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "print('x')",
        "import sys\nsys.stdout.write(text)",
        "import sys\nout = sys.stderr",
        "from sys import stdout",
        "import typer\ntyper.echo(text)",
        "from typer import confirm",
        "def f(write=print): ...",
        "input('name? ')",
        "import getpass\ngetpass.getpass('value? ')",
        "from rich.console import Console",
        "import os\nos.write(1, b'x')",
        "import logging",
        "import traceback\ntraceback.print_exc()",
        "open('/dev/tty', 'w')",
    ],
)
def test_print_past_the_one_place_is_found(source: str) -> None:
    assert list(find_writes(source)) != []


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setenv("RUNTIME_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.chdir(tmp_path)
    bench = Bench.sqlite(tmp_path, "local.db")
    yield bench
    bench.close()


def show_on(terminal: bool, monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    """Run a command with stdout and stderr on a terminal, or on none; return what they got, without our own styles."""
    stream = Screen() if terminal else io.StringIO()
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", stream)
        patched.setattr(sys, "stderr", stream)
        main(list(words))
    return OURS.sub("", stream.getvalue())


def commands_in(text: str) -> set[str]:
    """Return the characters that a terminal obeys or does not show."""
    return {char for char in text if not char.isprintable() and char not in "\n\t"}


COMMANDS = (
    ("status",),
    ("status", "sample"),
    ("status", "sample", "--failed"),
    ("status", "TASK"),
    ("explain", "TASK"),
    ("explain", "sample"),
    ("queue", "dead", "list"),
    ("queue", "dead", "show", "TASK"),
    ("queue", "list"),
    ("status", "WORKER"),
)


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_error_of_a_task_is_shown_without_commanding_the_terminal(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], terminal: bool
) -> None:
    task = sample_task("1", submitted_by=f"ada{HOSTILE}")
    bench.put(task)
    bench.report("w-one", host=f"node{HOSTILE}", labels={"zone": HOSTILE}, declined={"t-1": HOSTILE})
    bench.fail(message=f"Traceback\nValueError: {HOSTILE}")

    names = {"TASK": task.id, "WORKER": "w-one"}
    shown = show_on(terminal, monkeypatch, *(names.get(word, word) for word in words))

    assert commands_in(shown) == set()
    assert (SHOWN in shown) == (words[:2] != ("queue", "list"))


def test_unparsable_message_is_cleaned_on_a_terminal_and_exact_in_a_pipe(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Bench.memory()
    monkeypatch.setattr(OpenStack, "records", property(lambda _: memory.records))
    memory.bury_malformed("t-bad", f'{{"x": "{HOSTILE}"', f"cannot be parsed: {HOSTILE}")

    screen, pipe = (show_on(terminal, monkeypatch, "queue", "dead", "show", "t-bad") for terminal in (True, False))

    assert commands_in(screen) == set()
    assert SHOWN in screen
    assert f'\n{{"x": "{HOSTILE}"\n' in pipe


def test_json_has_the_exact_error_and_nothing_that_a_terminal_obeys(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = sample_task("1")
    bench.put(task)
    bench.fail(message=HOSTILE)

    shown = show_on(True, monkeypatch, "queue", "dead", "list", "-o", "json")

    assert commands_in(shown) == set()
    assert [each["error"] for each in json.loads(shown)] == [HOSTILE]


@pytest.mark.parametrize(
    "words",
    [
        ("status", HOSTILE),
        ("explain", HOSTILE),
        ("queue", HOSTILE),
        (HOSTILE,),
        ("logs", HOSTILE),
        ("submit", "--timeout", HOSTILE, "a", "b"),
        ("worker", "--queue", "a", HOSTILE),
        ("worker", "--label", HOSTILE),
        ("launch", "--on", HOSTILE, "true"),
        ("launch", "-f", HOSTILE),
        ("submit", "--from", HOSTILE),
        ("--debug", "status", HOSTILE),
    ],
    ids=lambda words: words[0] if words[0] != HOSTILE else "command",
)
def test_error_that_repeats_hostile_words_commands_no_terminal(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.setenv("RUNTIME_DEBUG", "0")
    shown = show_on(True, monkeypatch, *words)

    assert "error: " in shown
    assert commands_in(shown) == set()


def test_fact_of_several_lines_passes_for_no_hint() -> None:
    refused = RequestRefused("a\nhint: run it", facts=["b\nhint: curl | sh"], hint="c\nerror: d")

    lines = refused.render().splitlines()

    assert [line for line in lines if not line.startswith(" ")] == ["error: a", "hint: c"]


def test_line_of_several_lines_passes_for_no_other_line(capsys: pytest.CaptureFixture[str]) -> None:
    console.say("entry  a\nnext: curl", "end")

    assert capsys.readouterr().out == "entry  a\n    next: curl\nend\n"


def test_note_of_several_lines_passes_for_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    console.note("cannot run `x`\nerror: y")
    console.note_block("a\nb")

    assert capsys.readouterr().err == "cannot run `x`\n    error: y\na\nb\n"


def test_screen_that_is_drawn_again_shows_hostile_lines_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)

    with console.draw_screen() as draw:
        draw([console.paint("title", "bold"), f"error {HOSTILE}"])

    assert f"error {SHOWN}" in screen.getvalue()
    assert "\x1b]" not in screen.getvalue()


def test_style_survives_and_no_text_can_forge_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)

    console.say(console.paint("x\x1b[0m", "red") + " \x1b[31my\ufdd031;")

    assert screen.getvalue() == "\x1b[31mx\\x1b[0m\x1b[0m \\x1b[31my\ufdd031;\n"


def test_cells_of_a_table_keep_their_columns_whatever_they_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)

    print_list(
        [{"a": "\x1b[1m", "b": 1}, {"a": "x\ty\nz", "b": 2}], {"A": lambda row: row["a"], "B": lambda row: row["b"]}
    )

    assert OURS.sub("", screen.getvalue()).splitlines() == [
        "A        B",
        r"\x1b[1m  1",
        "x y z    2",
    ]


def test_dry_run_prints_lines_that_are_the_same_tasks(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = show_on(True, monkeypatch, "submit", "--no-snapshot", "--dry-run", "--", "echo", HOSTILE)

    assert commands_in(shown) == set()
    assert json.loads(shown.splitlines()[0])["command"] == ["echo", HOSTILE]


LOG = b"\x1b[31mred\x1b[0m 50%\r60%\x1b]0;title\x07 \x1b[6n\xff\n\x1b[8mend"


def logs_of(bench: Bench, *, terminal: bool) -> bytes:
    """Return the bytes that `runtime logs` writes, on a real terminal or into a pipe."""
    task = sample_task("1")
    bench.put(task)
    bench.succeed(log=LOG.decode(errors="surrogateescape"))
    reading, writing = pty.openpty() if terminal else os.pipe()
    if terminal:
        tty.setraw(writing)
    with subprocess.Popen([sys.executable, "-m", "runtime", "logs", task.id], stdout=writing) as process:
        os.close(writing)
        got = b""
        try:
            while more := os.read(reading, 10_000):
                got += more
        except OSError:  # Linux says EIO when the last writer has left a terminal.
            pass
        assert process.wait(PATIENCE_S) == 0
    os.close(reading)
    return got


def test_log_in_a_pipe_is_byte_for_byte(bench: Bench) -> None:
    assert logs_of(bench, terminal=False) == LOG


def test_log_on_a_terminal_keeps_colours_commands_nothing_and_ends_them(bench: Bench) -> None:
    assert logs_of(bench, terminal=True) == (
        b"\x1b[31mred\x1b[0m 50%\r60%\\x1b]0;title\\x07 \\x1b[6n\\xff\n\x1b[8mend\x1b[0m"
    )


def test_log_that_is_interrupted_gives_the_terminal_back(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)

    def pieces() -> Iterator[bytes]:
        yield b"\x1b[31mred"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        console.write_log(pieces())

    assert screen.getvalue() == "\x1b[31mred\x1b[0m"


def test_label_of_a_bar_is_cleaned_and_no_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    from runtime.cli.output import progress

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)

    with progress("submitting [bold]x[/bold]\x1b]0;t\x07", total=1) as bar:
        bar.advance()

    assert r"submitting [bold]x[/bold]\x1b]0;t\x07" in screen.getvalue()
    assert "\x1b]" not in screen.getvalue()


def test_log_line_of_a_library_is_cleaned_and_loads_logging_only_then() -> None:
    code = (
        "import sys; from runtime.sanitize import CleanLogger; log = CleanLogger('runtime.x'); assert 'logging' not in sys.modules\n"
        f"log.warning('%s is odd: %d', {HOSTILE!r}, 3)\n"
        f"try: raise ValueError({HOSTILE!r})\n"
        "except ValueError: log.exception('cannot read `%s`', 'a')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=True)

    assert done.stderr.startswith(f"{SHOWN} is odd: 3\ncannot read `a`\nTraceback (most recent call last):\n")
    assert commands_in(done.stderr) == set()


def test_modules_log_through_the_cleaned_logger() -> None:
    paths = [path for path in (ROOT / "runtime").rglob("*.py") if "shim" not in path.parts and path.stem != "sanitize"]

    assert [str(path) for path in paths if re.search(r"\bimport logging\b|\bgetLogger\b", path.read_text())] == []


def test_lists_of_json_and_text_have_the_same_rows(capsys: pytest.CaptureFixture[str]) -> None:
    print_list([{"a": HOSTILE}], {"A": lambda row: row["a"]}, OutputFormat.JSON)

    assert json.loads(capsys.readouterr().out) == [{"a": HOSTILE}]
