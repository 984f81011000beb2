"""Numbers and nouns agree in what commands print."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
NOUNS = (
    "attempts|bytes|combinations|differences|entries|failures|files|fields|hosts|jobs|letters|lines|machines|messages|nodes|notes|parts|"
    "preemptions|results|runs|shards|slots|tasks|times|tokens|workers|CPUs|GPUs"
)
_NOUN_FOLLOWS = re.compile(rf"^ (?:[a-z]+ )?(?:{NOUNS})\b")

MORE_THAN_ONE = {
    ("bundles.py", "len(parts)"),
    ("convert.py", "most_bytes"),
    ("wait.py", "total"),
    ("explain.py", "name"),
    ("explain.py", "what"),
    ("target_check.py", "start.get('python', 'of some kind')"),
    ("doctor.py", "count_noun(done.notes, 'note')"),
    ("quickstart.py", "count_noun(value['clusters'], 'group')"),
}
"""File and expression: what is never 1 there, or no number of that noun."""


def find_counts(source: str) -> Iterator[str]:
    """Yield the expressions that stand before a plural noun in a formatted text, outside of a choice by their value."""
    tree = ast.parse(source)
    choices = [node for node in ast.walk(tree) if isinstance(node, ast.IfExp)]
    chosen = {id(inner) for choice in choices for inner in ast.walk(choice)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr) and id(node) not in chosen:
            for value, text in pairwise(node.values):
                if (
                    isinstance(value, ast.FormattedValue)
                    and isinstance(text, ast.Constant)
                    and _NOUN_FOLLOWS.match(text.value)
                ):
                    yield ast.unparse(value.value)


def test_counts_before_nouns_go_through_the_one_function() -> None:
    paths = [path for place in ("cli", "client") for path in (ROOT / "runtime" / place).rglob("*.py")]
    found = {(path.name, count) for path in paths for count in find_counts(path.read_text(encoding="utf-8"))}

    assert {each for each in found if not each[1].isupper()} - MORE_THAN_ONE == set()


@pytest.mark.parametrize("source", ['f"{n} tasks"', 'f"{len(found):,} dead letters were"', 'f"of {a} {b} files"'])
def test_count_before_a_plural_noun_is_found(source: str) -> None:
    assert list(find_counts(source)) != []
