"""Where work comes from: the command line without secrets, and the git repositories of the code."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from runtime.secret_detection import drop_secret_arguments
from runtime.snapshots import provenance
from runtime.snapshots.provenance import cut_text, own_argv, read_folder, read_repositories, remove_credentials
from runtime.snapshots.snapshot import SnapshotRules


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "init.defaultBranch=main"]
    return subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def commit(folder: Path, **files: str) -> str:
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    git(folder, "init")
    git(folder, "add", *(f"{name}.py" for name in files))
    git(folder, "commit", "-m", "first")
    return git(folder, "rev-parse", "HEAD")


def test_repositories_of_a_folder_have_their_changes_staged_and_not(tmp_path: Path) -> None:
    outer = commit(tmp_path, a="1\n")
    inner = commit(tmp_path / "lib", b="1\n", c="1\n")
    git(tmp_path, "remote", "add", "origin", "https://me:ghp_x@example.org/a.git?t=1")
    (tmp_path / "lib" / "b.py").write_text("2\n")
    git(tmp_path / "lib", "add", ".")
    (tmp_path / "lib" / "c.py").write_text("3\n")

    top, lib = read_folder(tmp_path)

    diffs = [lib.pop(name).splitlines()[-2:] for name in ("diff", "staged_diff")]
    assert diffs == [["-1", "+3"], ["-1", "+2"]]
    assert lib == {"folder": "lib", "commit": inner, "branch": "main", "dirty": True, "remote": None}
    # The folder of the other repository is a file that git does not track.
    assert top.pop("dirty")
    assert top.pop("remote") == "https://example.org/a.git"
    assert top == {"folder": ".", "commit": outer, "branch": "main", "diff": "", "staged_diff": ""}


def test_clean_repository_is_not_dirty_and_a_folder_without_git_has_none(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    assert read_folder(tmp_path / "plain") == []
    commit(tmp_path / "code", a="1\n")
    git(tmp_path / "code", "checkout", "--detach")

    [found] = read_folder(tmp_path / "code")

    assert (found["dirty"], found["diff"], found["branch"], found["remote"]) == (False, "", None, None)


def test_files_beside_the_snapshot_and_those_that_look_like_secrets_are_in_no_diff(tmp_path: Path) -> None:
    commit(tmp_path, a="1\n", kept="1\n")
    (tmp_path / ".env").write_text("A=1\n")
    git(tmp_path, "add", ".env")
    git(tmp_path, "commit", "-m", "second")
    (tmp_path / ".env").write_text("A=canary\n")
    (tmp_path / "kept.py").write_text("canary\n")
    (tmp_path / "a.py").write_text("2\n")
    (tmp_path / ".runtimeignore").write_text("kept.py\n")

    [found] = read_folder(tmp_path, SnapshotRules(secrets=(".env",)))

    assert found["diff"].splitlines()[-2:] == ["-1", "+2"]
    assert "canary" not in found["diff"] + found["staged_diff"]


def test_diffs_are_cut_together_with_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "MOST_DIFF_BYTES", 300)
    commit(tmp_path, a="1\n", b="1\n")
    (tmp_path / "a.py").write_text("x\n" * 1000)
    git(tmp_path, "add", ".")
    (tmp_path / "b.py").write_text("y\n" * 1000)

    [found] = read_repositories(tmp_path, ["a.py", "b.py"])

    assert (len(found["diff"]), found["diff"].endswith(provenance.CUT)) == (300 + len(provenance.CUT), True)
    assert found["staged_diff"] == provenance.CUT


def test_text_is_cut_between_letters() -> None:
    assert cut_text("äöü", 3) == "ä" + provenance.CUT
    assert cut_text("äöü", 6) == "äöü"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://user:pass@example.org/a.git", "https://example.org/a.git"),
        ("https://token@example.org:8443/a.git?key=1#x", "https://example.org:8443/a.git"),
        ("ssh://git:pass@example.org/a.git", "ssh://git@example.org/a.git"),
        ("git@example.org:a/b.git", "git@example.org:a/b.git"),
        ("/srv/a.git", "/srv/a.git"),
        ("https://[x/a.git", ""),
        ("https://example.org/ghp_" + "a" * 36, ""),
    ],
)
def test_remote_loses_its_credentials(url: str, shown: str) -> None:
    assert remove_credentials(url) == shown


@pytest.mark.parametrize(
    ("words", "left"),
    [
        (["train.py", "--lr=1"], ["train.py", "--lr=1"]),
        (["train.py", "--token=canary1", "--lr=1"], ["train.py", "--lr=1"]),
        (["train.py", "--token", "canary1", "--lr=1"], ["train.py", "--lr=1"]),
        (["train.py", "-v", "API_KEY=canary1"], ["train.py", "-v"]),
        (["train.py", "hf_" + "a" * 30, "x"], ["train.py", "x"]),
        (
            ["runtime", "launch", "--", "sh", "-c", "API_TOKEN=canary1 python a.py"],
            ["runtime", "launch", "--", "sh", "-c"],
        ),
        (["runtime", "launch", "--", "sh", "-c", "cd x && API_TOKEN=canary1 python a.py"], ["runtime"]),
    ],
)
def test_arguments_that_look_like_secrets_are_dropped(words: list[str], left: list[str]) -> None:
    assert drop_secret_arguments(words) == left


def test_long_command_line_loses_its_end_and_odd_bytes_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["a.py", os.fsdecode(b"\xff"), "x" * provenance.MOST_ARGV_BYTES, "y"])

    assert own_argv() == ["a.py", "\N{REPLACEMENT CHARACTER}", "[cut]"]
