"""Rows, files and functions named in docs/architecture.md exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.unit.test_layers import ROWS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
QUESTIONS = 20


def find_definitions(path: Path) -> set[str]:
    """Return a module's functions and classes, with methods as `Class.method`; for a shell script, its functions."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return set(re.findall(r"^(\w+)\(\)", text, flags=re.MULTILINE))
    found = set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return found


def find_missing(page: str) -> list[str]:
    """List places that the page names but the code lacks."""
    missing = []
    for file, names in re.findall(r"`((?:runtime|infra)/[\w/]+\.py)`((?:[, ]+(?:and )?`[A-Za-z_][\w.]*`)*)", page):
        path = ROOT / file
        if not path.is_file():
            missing.append(file)
            continue
        defined = find_definitions(path)
        missing += [f"{file}: {name}" for name in re.findall(r"`([\w.]+)`", names) if name not in defined]
    return missing


def read_questions(page: str) -> list[str]:
    section = page.partition("## Twenty questions")[2].partition("\n## ")[0]
    return [
        line for line in section.splitlines() if line.startswith("| ") and not line.startswith(("| question", "|--"))
    ]


def test_files_and_functions_that_the_page_names_exist() -> None:
    assert find_missing(PAGE) == []


def test_every_question_is_answered_with_a_file_and_a_function() -> None:
    questions = read_questions(PAGE)

    assert len(questions) == QUESTIONS
    assert [line for line in questions if not re.search(r"`(runtime|infra)/[\w/]+\.py` `\w", line)] == []


def test_rows_that_the_page_draws_are_those_of_the_test() -> None:
    drawn = PAGE.partition("```\n")[2].partition("```")[0].splitlines()
    rows = [tuple(re.findall(r"\w+", line.partition("  ")[0])) for line in drawn if line]

    assert rows[: len(ROWS)] == [tuple(row) for row in ROWS if row]
    assert rows[len(ROWS)][0] == "root"


@pytest.mark.parametrize(
    "package", [package for row in ROWS for package in row if (ROOT / "runtime" / package).is_dir()]
)
def test_every_package_has_a_sentence(package: str) -> None:
    assert re.search(rf"^\| `{package}` \| .+\. \|$", PAGE, flags=re.MULTILINE), package


def test_a_place_that_is_not_there_is_found() -> None:
    page = "`runtime/errors.py` `NoSuchError`, `runtime/nothing.py` `f` and `runtime/units.py` `parse_size`"

    assert find_missing(page) == ["runtime/errors.py: NoSuchError", "runtime/nothing.py"]
