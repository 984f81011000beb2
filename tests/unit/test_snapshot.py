"""Snapshots: the exact tree, by content id."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from runtime.errors import InvalidValue, NotPossible, StoreUnsafe
from runtime.records import open_records
from runtime.records.keyed import BlobRecords
from runtime.snapshot import fetch_snapshot, list_files, pack, restore, snapshot_id, take_snapshot


def make_tree(folder: Path) -> Path:
    (folder / "pkg").mkdir(parents=True)
    (folder / "pkg" / "main.py").write_bytes(b"print('hi')\r\n")
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "link").symlink_to("run.sh")
    return folder


def contents(folder: Path) -> dict[str, tuple[bool, bytes]]:
    return {
        str(path.relative_to(folder)): (os.access(path, os.X_OK), path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_snapshot_restores_names_modes_links_and_bytes(tmp_path: Path) -> None:
    tree, records = make_tree(tmp_path / "tree"), open_records("memory:")
    identity = take_snapshot(tree, records)
    restore(fetch_snapshot(identity, records), tmp_path / "restored")
    assert contents(tmp_path / "restored") == contents(tree)
    assert (tmp_path / "restored" / "link").readlink() == Path("run.sh")


def test_snapshot_of_the_same_tree_elsewhere_and_later_has_the_same_id(tmp_path: Path) -> None:
    one, other = make_tree(tmp_path / "a"), make_tree(tmp_path / "b")
    os.utime(other / "pkg" / "main.py", (1, 1))
    assert snapshot_id(pack(one, list_files(one))) == snapshot_id(pack(other, list_files(other)))


@pytest.mark.parametrize("change", ["bytes", "mode", "name"])
def test_snapshot_of_a_changed_tree_has_another_id(tmp_path: Path, change: str) -> None:
    tree = make_tree(tmp_path / "a")
    before = snapshot_id(pack(tree, list_files(tree)))
    match change:
        case "bytes":
            (tree / "pkg" / "main.py").write_bytes(b"print('ho')\r\n")
        case "mode":
            (tree / "run.sh").chmod(0o644)
        case "name":
            (tree / "run.sh").rename(tree / "ran.sh")
    assert snapshot_id(pack(tree, list_files(tree))) != before


def test_list_files_in_a_git_tree_takes_untracked_and_leaves_ignored_and_deleted(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "tree")
    (tree / ".gitignore").write_text("*.log\n")
    (tree / "big.log").write_text("x")
    git = ["git", "-C", str(tree), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "run.sh"], check=True)
    subprocess.run([*git, "commit", "-qm", "x"], check=True)
    (tree / "run.sh").unlink()
    assert list_files(tree) == [".gitignore", "link", "pkg/main.py"]


def test_snapshot_that_the_store_changed_is_refused(tmp_path: Path) -> None:
    records = open_records("memory:")
    assert isinstance(records, BlobRecords)
    identity = take_snapshot(make_tree(tmp_path / "tree"), records)
    records.blobs.put(f"snapshots/{identity.removeprefix('sha256:')}", b"import os; os.abort()")
    with pytest.raises(StoreUnsafe):
        fetch_snapshot(identity, records)


def test_snapshot_with_a_secret_or_too_large_is_refused_before_it_is_read(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "tree")
    with pytest.raises(NotPossible, match="too large"):
        take_snapshot(tree, open_records("memory:"), max_bytes=10)
    (tree / ".env").write_text("TOKEN=1")
    with pytest.raises(NotPossible, match=r"`\.env`"):
        take_snapshot(tree, open_records("memory:"))


def test_fetch_of_what_is_no_content_id_says_the_form() -> None:
    with pytest.raises(InvalidValue):
        fetch_snapshot("../../etc/passwd", open_records("memory:"))
