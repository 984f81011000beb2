"""A slot's tree of a snapshot: whatever an attempt does to it, the next attempt finds it as it was submitted."""

from __future__ import annotations

import os
import py_compile
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.records.memory import MemoryRecords
from runtime.snapshots.snapshot import take_snapshot
from runtime.worker.attempts import scratch, work_trees
from runtime.worker.attempts.work_trees import WorkTree, WorkTrees


def make_source(folder: Path) -> Path:
    (folder / "pkg" / "deep").mkdir(parents=True)
    (folder / "pkg" / "a.py").write_text("A = 1\n")
    (folder / "pkg" / "deep" / "data").write_bytes(b"\0" * 5000)
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "link").symlink_to("pkg/a.py")
    return folder


Described = dict[str, tuple[str, bytes]]


def describe(folder: Path) -> Described:
    found = {}
    for path in sorted(folder.rglob("*")):
        mode = f"{path.lstat().st_mode:o}"
        if path.is_symlink():
            found[str(path.relative_to(folder))] = mode, os.fsencode(path.readlink())
        elif path.is_file():
            found[str(path.relative_to(folder))] = mode, path.read_bytes()
        else:
            found[str(path.relative_to(folder))] = mode, b""
    return found


class Slot:
    """Trees of a worker, and the tree of one slot as each fresh process finds it."""

    def __init__(self, root: Path, source: Path) -> None:
        root.mkdir()
        self.records = MemoryRecords()
        self.trees = WorkTrees(str(root), discard=scratch.remove_tree)
        self.identity = self.add(source)
        self.path = Path(self.trees.place(self.identity, 0))
        self.prepare()
        self.submitted = describe(self.path)

    def add(self, source: Path, used: tuple[str, ...] = ()) -> str:
        identity = take_snapshot(source, self.records)
        self.trees.add(identity, self.trees.fetch(identity, self.records), used=used)
        return identity

    def prepare(self) -> WorkTree:
        tree = WorkTree(str(self.path))
        tree.prepare()
        return tree


@pytest.fixture
def slot(tmp_path: Path) -> Slot:
    return Slot(tmp_path / "scratch", make_source(tmp_path / "source"))


def test_tree_is_the_submitted_one(slot: Slot, tmp_path: Path) -> None:
    assert describe(slot.path) == describe(tmp_path / "source")


def test_tree_that_nobody_touched_is_not_written_again(slot: Slot) -> None:
    before = {path: path.lstat().st_ino for path in slot.path.rglob("*")}
    slot.prepare()
    slot.prepare()

    assert {path: path.lstat().st_ino for path in slot.path.rglob("*")} == before


def write_in_place(path: Path) -> None:
    with (path / "pkg/a.py").open("r+") as opened:
        opened.write("A = 2\n")


def write_in_place_and_hide_it(path: Path) -> None:
    before = (path / "pkg/a.py").stat()
    write_in_place(path)
    os.utime(path / "pkg/a.py", ns=(before.st_atime_ns, before.st_mtime_ns))


def replace_file(path: Path) -> None:
    (path / "new").write_text("A = 2\n")
    (path / "new").rename(path / "pkg/a.py")


def link_outside(path: Path) -> None:
    shutil.rmtree(path / "pkg")
    (path / "pkg").symlink_to(path.parents[3] / "outside")


def link_file_outside(path: Path) -> None:
    (path / "pkg/a.py").unlink()
    (path / "pkg/a.py").symlink_to(path.parents[3] / "outside" / "kept")


def share_inode(path: Path) -> None:
    os.link(path / "pkg/a.py", path.parents[3] / "outside" / "twin")


def make_folder_of_file(path: Path) -> None:
    (path / "run.sh").unlink()
    (path / "run.sh").mkdir()
    (path / "run.sh" / "x").touch()


def make_file_of_folder(path: Path) -> None:
    shutil.rmtree(path / "pkg" / "deep")
    (path / "pkg" / "deep").touch()


def leave_files(path: Path) -> None:
    (path / "out.csv").write_text("1")
    (path / "ckpt" / "step-1").mkdir(parents=True)
    (path / "ckpt" / "step-1" / "w").write_text("1")
    (path / "pkg" / "deep" / "more").symlink_to("/")


def write_into_cache(path: Path) -> None:
    (path / "pkg" / "__pycache__").mkdir()
    (path / "pkg" / "__pycache__" / "state.json").write_text("1")


def forbid(path: Path) -> None:
    leave_files(path)
    (path / "ckpt").chmod(0)
    (path / "pkg" / "a.py").chmod(0)


def break_memory(path: Path) -> None:
    path.with_name(f"{path.name}.seen").write_bytes(b"garbage")
    write_in_place(path)


DEEDS: list[Callable[[Path], None]] = [
    write_in_place,
    write_in_place_and_hide_it,
    replace_file,
    link_outside,
    link_file_outside,
    share_inode,
    make_folder_of_file,
    make_file_of_folder,
    leave_files,
    write_into_cache,
    forbid,
    break_memory,
    shutil.rmtree,
    lambda path: (path / "pkg/a.py").unlink(),
    lambda path: (path / "link").unlink(),
    lambda path: (path / "run.sh").chmod(0o644),
    lambda path: (path / "pkg").chmod(0o500),
    lambda path: (path / "pkg").rename(path / "moved"),
    lambda path: (path / "pkg/deep/data").write_bytes(b"\1" * 5000),
    lambda path: os.truncate(path / "pkg/deep/data", 0),
]


@pytest.mark.parametrize("deed", DEEDS)
@pytest.mark.parametrize("tidied", [False, True])
def test_tree_is_as_submitted_whatever_an_attempt_did(
    slot: Slot, tmp_path: Path, deed: Callable[[Path], None], tidied: bool
) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "kept").write_text("kept")
    tree = slot.prepare()
    deed(slot.path)
    if tidied:
        tree.tidy()

    slot.prepare()

    assert describe(slot.path) == slot.submitted
    assert (tmp_path / "outside" / "kept").read_text() == "kept"
    if (tmp_path / "outside" / "twin").exists():
        (tmp_path / "outside" / "twin").write_text("A = 3\n")
        assert describe(slot.path) == slot.submitted


def test_byte_code_stays_beside_sources_that_did_not_change_and_goes_when_one_did(slot: Slot) -> None:
    compiled = Path(py_compile.compile(str(slot.path / "pkg/a.py")) or "")
    slot.prepare()
    assert compiled.exists()

    write_in_place(slot.path)
    slot.prepare()

    assert not compiled.exists()


def test_byte_code_of_a_source_that_was_changed_and_changed_back_goes(slot: Slot) -> None:
    write_in_place(slot.path)
    compiled = Path(py_compile.compile(str(slot.path / "pkg/a.py")) or "")
    (slot.path / "pkg/a.py").write_text("A = 1\n")

    slot.prepare()

    assert not compiled.exists()


def test_tidy_removes_and_names_what_was_left(slot: Slot) -> None:
    tree = slot.prepare()
    leave_files(slot.path)
    py_compile.compile(str(slot.path / "pkg/a.py"))

    assert tree.tidy() == ["ckpt", "out.csv", "pkg/deep/more"]
    assert {*describe(slot.path)} - {*slot.submitted} == {
        "pkg/__pycache__",
        f"pkg/__pycache__/{next((slot.path / 'pkg/__pycache__').iterdir()).name}",
    }
    assert tree.tidy() == []


def test_tree_whose_look_cannot_be_kept_is_laid_out_again_by_the_next_process(
    slot: Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(work_trees.os, "replace", full)
        write_in_place(slot.path)
        slot.prepare()
    write_in_place(slot.path)
    slot.prepare()

    assert describe(slot.path) == slot.submitted


def test_spoiled_tree_is_removed_and_the_next_has_another_place(slot: Slot) -> None:
    slot.trees.trim(0, spoiled=slot.identity)

    assert not slot.path.exists()
    assert slot.trees.place(slot.identity, 0) != str(slot.path)


def test_slot_keeps_the_trees_it_used_last(slot: Slot, tmp_path: Path) -> None:
    (tmp_path / "source" / "n").write_text("2")
    second = slot.add(tmp_path / "source")
    (tmp_path / "source" / "n").write_text("3")
    third = slot.add(tmp_path / "source")
    paths = {}
    for identity in (second, third, slot.identity):
        paths[identity] = Path(slot.trees.place(identity, 0))
        WorkTree(str(paths[identity])).prepare()
    slot.trees.trim(0)

    assert [path.exists() for path in paths.values()] == [False, True, True]
    assert slot.trees.place(second, 0) != str(paths[second])


def test_snapshot_that_is_forgotten_is_fetched_again_and_stays_for_those_that_use_it(slot: Slot) -> None:
    slot.trees.forget(slot.identity, used=[slot.identity])

    assert slot.identity not in slot.trees
    other = Path(slot.trees.place(slot.identity, 0))
    assert other == slot.path
    slot.trees.add(slot.identity, slot.trees.fetch(slot.identity, slot.records), used=[slot.identity])
    assert slot.identity in slot.trees

    slot.trees.forget(slot.identity, used=())
    assert slot.identity not in slot.trees


def test_snapshots_beyond_those_kept_go_and_those_in_use_stay(slot: Slot, tmp_path: Path) -> None:
    others = []
    for number in range(work_trees.KEPT + 2):
        (tmp_path / "source" / "n").write_text(str(number))
        others.append(slot.add(tmp_path / "source", used=(slot.identity,)))

    assert slot.identity in slot.trees
    assert [each in slot.trees for each in others] == [False] * 3 + [True] * (work_trees.KEPT - 1)
    assert slot.path.exists()
    assert len([path for path in (tmp_path / "scratch").iterdir() if path.is_dir()]) == work_trees.KEPT


_STEPS = st.lists(
    st.tuples(st.sampled_from(DEEDS), st.booleans(), st.booleans()).filter(lambda step: step[0] is not share_inode),
    min_size=1,
    max_size=5,
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=_STEPS)
def test_tree_is_as_submitted_after_any_attempts(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[Callable[[Path], None], bool, bool]]
) -> None:
    root = tmp_path_factory.mktemp("any")
    (root / "outside").mkdir()
    (root / "outside" / "kept").write_text("kept")
    slot = Slot(root / "scratch", make_source(root / "source"))
    tree = slot.prepare()
    for deed, tidied, fresh in steps:
        deed(slot.path)
        if tidied:
            tree.tidy()
        if fresh:
            tree = slot.prepare()
        else:
            tree.prepare()
        assert describe(slot.path) == slot.submitted
