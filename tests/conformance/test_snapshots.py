"""The runtime and the shim judge every archive alike when restoring, and write nothing outside the tree."""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.errors import NotPossible, StoreUnsafe
from runtime.records.memory import MemoryRecords
from runtime.shim.common import SetupFailed
from runtime.shim.tree import restore
from runtime.snapshots.snapshot import snapshot_id
from runtime.worker.attempts.work_trees import WorkTree, WorkTrees
from tests.conformance.snapshot_cases import Case, make_cases

Restore = Callable[[bytes, str, Path], str | None]
"""Restore an archive with this id into a folder, and return the refusal."""


class Trusting(MemoryRecords):
    """A store that does not verify the data it returns."""

    def get_blob(self, reference: str) -> bytes:
        found = self.blobs.get(reference)
        assert found is not None
        return found


def by_worker(archive: bytes, identity: str, folder: Path) -> str | None:
    records = Trusting()
    records.blobs.put(f"snapshots/{identity.removeprefix('sha256:')}", archive)
    trees = WorkTrees(str(folder.parent), discard=lambda path: None)
    try:
        trees.add(identity, trees.fetch(identity, records), used=())
    except (NotPossible, StoreUnsafe) as problem:
        return problem.message
    tree = WorkTree(trees.place(identity, 0))
    tree.prepare()
    Path(tree.folder).rename(folder)
    return None


def by_shim(archive: bytes, identity: str, folder: Path) -> str | None:
    stored = folder.with_name("snapshot.tar")
    stored.write_bytes(archive)
    try:
        restore(str(stored), identity.removeprefix("sha256:"), str(folder))
    except SetupFailed as problem:
        return str(problem)
    return None


@pytest.fixture(params=[by_worker, by_shim])
def restored_by(request: pytest.FixtureRequest) -> Restore:
    found: Restore = request.param
    return found


def describe(folder: Path) -> tuple[tuple[str, str, bytes], ...]:
    found = []
    for path in sorted(folder.rglob("*")):
        name, mode = str(path.relative_to(folder)), path.lstat().st_mode
        if stat.S_ISLNK(mode):
            found.append((name, "link", str(path.readlink()).encode()))
        elif stat.S_ISREG(mode):
            found.append((name, f"{mode & 0o7777:o}", path.read_bytes()))
    return tuple(found)


NAMES = [case.name for case in make_cases(Path("/outside"))]


@pytest.mark.parametrize("name", NAMES)
def test_archive_is_restored_or_refused_and_nothing_lands_outside(
    tmp_path: Path, restored_by: Restore, name: str
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    (outside / "kept").chmod(0o644)
    (case,) = (each for each in make_cases(outside) if each.name == name)
    (tmp_path / "scratch").mkdir()

    said = restored_by(case.archive, snapshot_id(case.archive), tmp_path / "scratch" / "tree")

    if case.refused is None:
        assert (said, describe(tmp_path / "scratch" / "tree")) == (None, case.tree)
    else:
        assert case.refused in (said or "")
    assert describe(outside) == (("kept", "644", b"kept"),)
    assert {path.name.partition("-")[0] for path in (tmp_path / "scratch").iterdir()} <= {
        "tree",
        "snapshot.tar",
        "code",
    }
    assert {path.name for path in tmp_path.iterdir()} == {"outside", "scratch"}


def test_archive_of_other_bytes_than_its_id_is_refused_before_it_is_unpacked(
    tmp_path: Path, restored_by: Restore
) -> None:
    (case,) = (each for each in make_cases(tmp_path) if each.name == "files and links")
    identity = f"sha256:{hashlib.sha256(b'other').hexdigest()}"

    said = restored_by(case.archive, identity, tmp_path / "tree")

    assert "holds other bytes than were submitted" in (said or "")
    assert not (tmp_path / "tree").exists()


def test_tree_in_the_place_of_a_link_leaves_what_the_link_points_to(tmp_path: Path) -> None:
    case: Case = make_cases(tmp_path)[0]
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "kept").touch()
    (tmp_path / "tree").symlink_to("outside")

    assert by_shim(case.archive, snapshot_id(case.archive), tmp_path / "tree") is None

    assert [path.name for path in (tmp_path / "outside").iterdir()] == ["kept"]
    assert describe(tmp_path / "tree") == case.tree
