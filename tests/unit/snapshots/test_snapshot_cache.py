"""The cache of a snapshot: unchanged files are not read again, and changed files are never taken for unchanged."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runtime.records.memory import MemoryRecords
from runtime.snapshots import cache as snapshot_cache
from runtime.snapshots import snapshot
from runtime.snapshots.snapshot import make_snapshot, take_snapshot


class Taker:
    """Takes snapshots of one folder with one cache, and records which files were read."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.cache = root / "tree", root / "cache"
        self.records = MemoryRecords()
        self.read: list[str] = []
        real = snapshot._read

        def read(folder: str, file: snapshot.TreeFile) -> tuple[bytes, os.stat_result]:
            self.read.append(file.name)
            return real(folder, file)

        monkeypatch.setattr(snapshot, "_read", read)

    def take(self) -> tuple[str, list[str]]:
        self.read.clear()
        identity = take_snapshot(self.folder, self.records, cache_dir=self.cache)
        read = list(self.read)
        assert identity == make_snapshot(self.folder).id
        return identity, read

    @property
    def file(self) -> Path:
        (found,) = (self.cache / "snapshots").glob("*.json")
        return found


@pytest.fixture
def taker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Taker:
    made = Taker(tmp_path, monkeypatch)
    (made.folder / "pkg").mkdir(parents=True)
    for name in ("a.py", "b.py", "pkg/c.py"):
        (made.folder / name).write_text(f"# {name}\n")
    (made.folder / "link").symlink_to("a.py")
    return made


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set every file's time to long before the snapshot."""
    real = time.time_ns
    monkeypatch.setattr(snapshot_cache.time, "time_ns", lambda: real() + 60 * 10**9)


NAMES = ["a.py", "b.py", "link", "pkg/c.py"]


@pytest.mark.usefixtures("later")
def test_files_that_did_not_change_are_not_read_again(taker: Taker) -> None:
    first, read = taker.take()
    second, again = taker.take()

    assert (second, read, again) == (first, NAMES, [])


@pytest.mark.usefixtures("later")
def test_file_that_is_only_touched_is_read_alone(taker: Taker) -> None:
    first, _ = taker.take()
    os.utime(taker.folder / "a.py")

    assert taker.take() == (first, ["a.py"])
    assert taker.take() == (first, [])


def edit(path: Path) -> None:
    path.write_text(path.read_text().replace("#", "%"))


def edit_and_hide_it(path: Path) -> None:
    before = path.stat()
    edit(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace_and_hide_it(path: Path) -> None:
    before = path.stat()
    other = path.with_name("other")
    other.write_text(path.read_text().replace("#", "%"))
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.rename(path)


def make_executable(path: Path) -> None:
    path.chmod(0o755)


def make_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("b.py")


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize(
    "change", [edit, edit_and_hide_it, replace_and_hide_it, make_executable, make_link, Path.unlink]
)
def test_change_of_any_kind_makes_another_snapshot(taker: Taker, change: object) -> None:
    first, _ = taker.take()
    time.sleep(0.02)  # the file system's clock has ticked
    assert callable(change)
    change(taker.folder / "a.py")

    second, _ = taker.take()

    assert second != first
    assert taker.take() == (second, [])


def sealed(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body


DAMAGES = {
    "empty": b"",
    "garbage": b"\0\xff" * 100,
    "no newline": b"a" * 100,
    "no JSON": sealed(b"{"),
    "a list": sealed(b"[]"),
    "a number": sealed(b"1"),
    "other version": sealed(b'{"version": 2, "files": {}, "trees": {}}'),
    "no files": sealed(b'{"version": 1}'),
    "odd files": sealed(b'{"version": 1, "files": 7, "trees": {}}'),
    "odd entries": sealed(b'{"version": 1, "files": {"a.py": 1, "b.py": [], "pkg/c.py": null}, "trees": {}}'),
    "odd trees": sealed(b'{"version": 1, "files": {}, "trees": []}'),
}


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_cache_costs_reading_and_nothing_else(taker: Taker, damage: str) -> None:
    first, _ = taker.take()
    taker.file.write_bytes(DAMAGES[damage])

    assert taker.take()[0] == first
    assert taker.take() == (first, [])


@pytest.mark.usefixtures("later")
def test_cache_in_which_a_bit_flipped_is_not_believed(taker: Taker) -> None:
    first, _ = taker.take()
    edit(taker.folder / "b.py")
    second, _ = taker.take()
    written = taker.file.read_bytes()
    taker.file.write_bytes(written.replace(second.encode(), first.encode()))

    assert taker.take()[0] == second


@pytest.mark.usefixtures("later")
def test_cache_that_was_cut_off_is_not_believed(taker: Taker) -> None:
    first, _ = taker.take()
    taker.file.write_bytes(taker.file.read_bytes()[:-30])

    assert taker.take() == (first, NAMES)


def test_cache_folder_that_cannot_be_made_stops_nobody(taker: Taker) -> None:
    taker.cache.write_text("a file")

    assert taker.take()[1] == NAMES


@pytest.mark.usefixtures("later")
def test_store_that_lacks_the_snapshot_gets_it_though_the_cache_knows_it(taker: Taker) -> None:
    first, _ = taker.take()
    taker.records = MemoryRecords()

    assert taker.take()[0] == first
    assert taker.records.has_blob(f"snapshots/{first.removeprefix('sha256:')}")


@pytest.mark.usefixtures("later")
def test_snapshot_for_nobody_is_stored_nowhere_and_has_the_same_id(taker: Taker) -> None:
    before = take_snapshot(taker.folder, None, cache_dir=taker.cache)

    assert not taker.records.has_blob(f"snapshots/{before.removeprefix('sha256:')}")
    assert taker.take()[0] == before


def test_cache_is_open_to_nobody_else_and_holds_no_content(taker: Taker) -> None:
    (taker.folder / "a.py").write_text("canary-4711")
    taker.take()

    assert b"canary" not in taker.file.read_bytes()
    assert stat.S_IMODE(taker.file.parent.stat().st_mode) == 0o700


PROGRAM = """
import sys
from pathlib import Path
from runtime.snapshots.snapshot import take_snapshot
folder, cache = Path(sys.argv[1]), Path(sys.argv[2])
for _ in range(10):
    take_snapshot(folder, None, cache_dir=cache)
"""


def test_processes_that_use_one_cache_while_files_change_leave_one_that_is_right(tmp_path: Path) -> None:
    folder, cache = tmp_path / "tree", tmp_path / "cache"
    folder.mkdir()
    for number in range(50):
        (folder / f"{number}.py").write_text("0000")
    running = [
        subprocess.Popen([sys.executable, "-c", PROGRAM, str(folder), str(cache)], cwd=Path(__file__).parents[3])
        for _ in range(3)
    ]
    count = 0
    while any(each.poll() is None for each in running):
        count += 1
        (tmp_path / "new").write_text(f"{count:04}")
        (tmp_path / "new").rename(folder / f"{count % 50}.py")

    assert [each.wait() for each in running] == [0, 0, 0]
    assert take_snapshot(folder, None, cache_dir=cache) == make_snapshot(folder).id
    assert [path.name for path in (cache / "snapshots").iterdir() if path.name.startswith(".")] == []
    json.loads(next((cache / "snapshots").iterdir()).read_bytes().partition(b"\n")[2])


# bounds on the checks


def test_folder_that_the_ignore_file_names_is_not_entered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data" / "deep").mkdir(parents=True)
    (tmp_path / "data" / "deep" / "x").touch()
    (tmp_path / "main.py").touch()
    (tmp_path / ".runtimeignore").write_text("data/\n")
    opened: list[str] = []
    scandir = os.scandir
    monkeypatch.setattr(snapshot.os, "scandir", lambda path: (opened.append(Path(path).name), scandir(path))[1])

    found = snapshot.survey(tmp_path, snapshot.SnapshotRules())
    assert [each.name for each in found] == [".runtimeignore", "main.py"]
    assert opened == [tmp_path.name]


@pytest.mark.parametrize("repository", [False, True])
def test_tree_whose_files_take_too_long_to_list_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repository: bool
) -> None:
    (tmp_path / "a").touch()
    if repository:
        subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monkeypatch.setattr(snapshot, "LONGEST_LOOK_S", 0.0)

    with pytest.raises(snapshot.NotPossible, match="not listed within") as refused:
        make_snapshot(tmp_path)

    assert refused.value.hint == "name folders that are no code in .gitignore or .runtimeignore"


def test_file_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "private").touch()

    def denied(*args: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(snapshot.os, "open", denied)

    with pytest.raises(snapshot.NotPossible, match=r"`private` cannot be read"):
        make_snapshot(tmp_path)


def test_id_of_a_tree_is_the_same_on_every_python_and_release(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "a.py").write_text("A = 1\n")
    (tmp_path / "run").write_text("#!/bin/sh\n")
    (tmp_path / "run").chmod(0o755)
    (tmp_path / "link").symlink_to("x" * 150)
    (tmp_path / ("é" * 60)).mkdir()
    (tmp_path / ("é" * 60) / "long").touch()

    made = make_snapshot(tmp_path)
    assert made.id == "sha256:157e0149e04add655d5574b887b6a6a7bc6865e8cd7d64aefff4a4251c56efcb"
    # The bytes themselves, which machines with an older release unpack.
    assert hashlib.sha256(made.archive).hexdigest() == made.id.removeprefix("sha256:")
    assert len(made.archive) == 10_240
