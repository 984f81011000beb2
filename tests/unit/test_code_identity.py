"""Which code a worker runs, as its records name it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from runtime import code_identity
from runtime.code_identity import CodeIdentity, digest_sources, find_commit


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "a.py").write_text("x = 1\n")
    return tmp_path


def make_commit(tree: Path) -> str:
    git = ["git", "-C", str(tree), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *command], check=True)
    return subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()


def test_identity_in_a_git_tree_is_the_commit_and_says_when_the_tree_differs(tree: Path) -> None:
    commit = make_commit(tree)
    assert CodeIdentity(tree).value == f"git:{commit}"
    (tree / "pkg" / "a.py").write_text("x = 2\n")
    assert CodeIdentity(tree).value == f"git:{commit}+dirty"


def test_identity_outside_git_is_a_digest_of_the_sources(tree: Path) -> None:
    assert find_commit(tree) is None
    before = digest_sources(tree)
    assert CodeIdentity(tree).value == before
    (tree / "pkg" / "a.py").write_text("x = 2\n")
    assert digest_sources(tree) != before
    (tree / "pkg" / "a.py").write_text("x = 1\n")
    (tree / "data.csv").write_text("1")
    assert digest_sources(tree) == before


def test_identity_of_a_folder_without_or_with_too_many_sources_is_none(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tree / "b.py").write_text("")
    monkeypatch.setattr(code_identity, "_MOST_FILES", 1)
    assert digest_sources(tree) is None
    (tree / "b.py").unlink()
    (tree / "pkg" / "a.py").unlink()
    assert digest_sources(tree) is None
