"""Tests with drawn examples get the same ones in each run."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from hypothesis import find, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample

WORD = "drawn-from-the-code"


def test_constants_of_loaded_modules_are_not_drawn(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    if pytestconfig.getoption("--hypothesis-profile") == "fresh":
        pytest.skip("this profile draws others on purpose")
    path = tmp_path_factory.mktemp("loaded") / "loaded_before.py"
    path.write_text(f"word = {WORD!r}\n")
    module = ModuleType("loaded_before")
    module.__file__ = str(path)
    monkeypatch.setitem(sys.modules, "loaded_before", module)

    texts = st.text(sorted(set(WORD)), min_size=len(WORD), max_size=len(WORD))  # few other constants are such texts
    with pytest.raises(NoSuchExample):
        find(texts, lambda text: text == WORD, settings=settings(max_examples=300, database=None))
