"""Trees that the shim makes from a snapshot, under names that came from another machine."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path

import pytest

from runtime.shim.tree import GuardedFolder, UnsafeName, restore, shared_tree
from runtime.snapshots.snapshot import make_snapshot


@pytest.fixture
def snapshot(tmp_path: Path) -> tuple[str, str]:
    """The archive of a file in a folder, and its checksum."""
    (tmp_path / "code" / "below").mkdir(parents=True)
    (tmp_path / "code" / "below" / "file.txt").write_text("right")
    made = make_snapshot(tmp_path / "code")
    (tmp_path / "code.tar").write_bytes(made.archive)
    return str(tmp_path / "code.tar"), made.id.removeprefix("sha256:")


def test_restored_snapshot_takes_the_place_of_an_earlier_tree(tmp_path: Path, snapshot: tuple[str, str]) -> None:
    earlier = tmp_path / "tree"
    earlier.mkdir()
    (earlier / "left over").touch()

    restore(*snapshot, str(earlier))

    assert [each.name for each in earlier.iterdir()] == ["below"]
    assert (earlier / "below" / "file.txt").read_text() == "right"


def test_nothing_in_a_shared_tree_can_be_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: tuple[str, str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    tree = Path(shared_tree(*snapshot))

    modes = {path.name: stat.S_IMODE(path.stat().st_mode) & 0o222 for path in [tree, *tree.rglob("*")]}
    assert modes == {tree.name: 0, "below": 0, "file.txt": 0}


@pytest.mark.parametrize("number", [errno.ENAMETOOLONG, errno.EILSEQ, errno.EINVAL])
def test_name_that_the_file_system_refuses_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number))

    with GuardedFolder(str(tmp_path)) as below, monkeypatch.context() as strict:
        strict.setattr(os, "open", refuse)
        with pytest.raises(UnsafeName, match=f"'name' is refused by the file system: {os.strerror(number)}"):
            below.create("name")


def test_link_to_a_target_that_no_file_system_takes_is_refused(tmp_path: Path) -> None:
    with GuardedFolder(str(tmp_path)) as below, pytest.raises(UnsafeName, match="'name' is refused by the file system"):
        below.link("name", "a\0b")


def test_file_under_the_name_of_a_folder_is_refused(tmp_path: Path) -> None:
    with GuardedFolder(str(tmp_path)) as below:
        below.make("name")
        with pytest.raises(UnsafeName, match="'name' is the name of a folder here"):
            below.create("name")


def test_disk_without_room_for_a_folder_is_no_fault_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with GuardedFolder(str(tmp_path)) as below, monkeypatch.context() as full:
        full.setattr(os, "mkdir", refuse)
        with pytest.raises(OSError, match="No space left"):
            below.create("folder/name")
