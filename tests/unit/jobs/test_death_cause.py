"""The cause of a command's death, from its log and exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from runtime.jobs.death_cause import describe_code, find_raised, name_signal


def run_python(folder: Path, text: str) -> str:
    """Python's output for a failing program."""
    tree = folder / "job-j-0123-0-abc" / "tree"
    tree.mkdir(parents=True)
    (tree / "train.py").write_text(text)
    done = subprocess.run([sys.executable, str(tree / "train.py")], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("def main():\n    raise ValueError('no column')\nmain()\n", "ValueError: no column, at train.py:2, in main"),
        ("assert False\n", "AssertionError, at train.py:1"),
        ("x = = 1\n", "SyntaxError: invalid syntax, at train.py:1"),
        # The deepest frame is the library's, and less informative.
        ("import json\njson.loads('{')\n", "json.decoder.JSONDecodeError: Expecting property name enclosed in "),
        ("try:\n    1 / 0\nexcept ZeroDivisionError:\n    raise KeyError('x')\n", "KeyError: 'x', at train.py:4"),
        ("raise ValueError('first\\nsecond: line')\n", "ValueError: first, at train.py:1"),
        ("import atexit\natexit.register(print, 'bye')\nint('x')\n", "ValueError: invalid literal for int() with base 10: 'x', at train.py:3"),
    ],
)  # fmt: skip
def test_exception_that_ended_a_program_is_told_with_its_place(tmp_path: Path, program: str, said: str) -> None:
    raised = find_raised("starts\n" + run_python(tmp_path, program))

    assert str(raised).startswith(said)
    assert "train.py:" in str(raised)


def test_exception_of_a_rank_and_one_whose_beginning_is_cut_off_are_found() -> None:
    text = '[rank1]:   File "/x/lib/python3.11/site-packages/torch/nn.py", line 9, in f\n[rank1]:     f()\n[rank1]: RuntimeError: CUDA error\n'

    assert str(find_raised(text)) == "RuntimeError: CUDA error, at /x/lib/python3.11/site-packages/torch/nn.py:9, in f"


def test_exception_that_the_program_survived_is_none_that_ended_it() -> None:
    survived = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\nValueError: x\n' + "epoch\n" * 11

    assert find_raised(survived) is None
    assert find_raised("INFO: all fine\n") is None
    assert find_raised("") is None


@pytest.mark.parametrize(
    ("code", "name"),
    [(139, "SIGSEGV"), (137, "SIGKILL"), (134, "SIGABRT"), (143, "SIGTERM"), (1, None), (255, None), (None, None)],
)
def test_signals_are_named_and_other_codes_are_not(code: int | None, name: str | None) -> None:
    assert name_signal(code) == name


def test_code_is_shown_with_the_signal_that_it_stands_for() -> None:
    assert (describe_code(139), describe_code(3)) == ("139 (SIGSEGV)", "3")
