"""The code identity of a worker, as its records state it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from runtime.snapshots.worker_code import CodeIdentity, digest_sources, find_commit
from runtime.tasks.model import CommandEntry, Entry, FunctionEntry, WorkflowEntry

COMMAND = CommandEntry(("true",))


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
    assert CodeIdentity(tree).of(COMMAND) == f"git:{commit}"
    (tree / "pkg" / "a.py").write_text("x = 2\n")
    assert CodeIdentity(tree).of(COMMAND) == f"git:{commit}+dirty"


def test_identity_outside_git_is_a_digest_of_the_sources(tree: Path) -> None:
    assert find_commit(tree) is None
    before = digest_sources(tree)
    assert CodeIdentity(tree).of(COMMAND) == before
    (tree / "pkg" / "a.py").write_text("x = 2\n")
    assert digest_sources(tree) != before
    (tree / "pkg" / "a.py").write_text("x = 1\n")
    (tree / "data.csv").write_text("1")
    assert digest_sources(tree) == before


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages with `labcode` in it; the worker starts in another folder."""
    site = tmp_path / "venv" / "lib" / "site-packages"
    (site / "labcode").mkdir(parents=True)
    (site / "labcode" / "__init__.py").write_text("x = 1\n")
    (tmp_path / "work").mkdir()
    monkeypatch.syspath_prepend(site)
    return site


def describe_installation(site: Path, direct_url: str | None) -> None:
    info = site / "labcode-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: labcode\nVersion: 1.0\n")
    (info / "RECORD").write_text("labcode/__init__.py,,\nlabcode-1.0.dist-info/METADATA,,\n")
    if direct_url is not None:
        (info / "direct_url.json").write_text(direct_url)


ENTRIES: list[Entry] = [FunctionEntry("labcode.train:fit"), WorkflowEntry("labcode.train", "w", ())]


@pytest.mark.parametrize("entry", ENTRIES)
def test_identity_of_an_installed_package_is_the_commit_it_was_installed_from(
    installed: Path, tmp_path: Path, entry: Entry
) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    describe_installation(installed, f'{{"url": "https://x/y", "vcs_info": {{"vcs": "git", "commit_id": "{commit}"}}}}')

    assert CodeIdentity(tmp_path / "work").of(entry) == f"git:{commit}"


@pytest.mark.parametrize("direct_url", [None, '{"url": "file:///x"}', "no JSON"])
def test_identity_of_an_installed_package_without_a_commit_is_a_digest_of_it_alone(
    installed: Path, tmp_path: Path, direct_url: str | None
) -> None:
    describe_installation(installed, direct_url)
    # The environment may be inside an unrelated work tree.
    make_commit(tmp_path)

    identity = CodeIdentity(tmp_path / "work")

    assert identity.of(ENTRIES[0]) == digest_sources(installed / "labcode")
    assert identity.of(COMMAND) != identity.of(ENTRIES[0])


def test_identity_of_a_package_that_is_installed_as_a_link_to_its_work_tree_is_that_trees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = tmp_path / "repository"
    (tree / "src" / "linked_lab").mkdir(parents=True)
    (tree / "src" / "linked_lab" / "__init__.py").write_text("")
    commit = make_commit(tree)
    (tmp_path / "work").mkdir()
    monkeypatch.syspath_prepend(tree / "src")

    identity = CodeIdentity(tmp_path / "work")

    assert identity.of(FunctionEntry("linked_lab:f")) == f"git:{commit}"
    assert identity.of(FunctionEntry("no_such_module_anywhere:f")) is None


def test_identity_of_a_workflow_is_that_of_the_package_it_is_looked_for_in(installed: Path, tmp_path: Path) -> None:
    identity = CodeIdentity(tmp_path / "work", ["labcode"])

    assert identity.of(WorkflowEntry("no_such_project", "w", ())) == digest_sources(installed / "labcode")
