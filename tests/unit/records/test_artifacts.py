"""Versions of artifacts in a store: whole or absent, only what changed, and hostile manifests."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runtime.errors import StoreUnavailable
from runtime.records.artifacts import ArtifactDamaged, ArtifactRefused, ArtifactStore, Writer
from runtime.records.blobs.folder import FolderBlobs
from runtime.records.memory import MemoryBlobs
from runtime.shim import file_manifest
from runtime.tasks.artifacts import Version
from runtime.worker.content_cache import ContentCache

FIRST = Version(1, 1, 1, "token", "t-1", "model")
OLD_NS = 10**18


class Sent(MemoryBlobs):
    """Notes uploads, and fails the next ones if asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.uploads: list[str] = []
        self.failures = 0

    def upload(self, key: str, file: Path) -> None:
        if self.failures:
            self.failures -= 1
            raise StoreUnavailable("full")
        self.uploads.append(file.read_text())
        super().upload(key, file)


class Bench:
    def __init__(self, folder: Path) -> None:
        self.blobs = Sent()
        self.store = ArtifactStore(self.blobs)
        self.path = folder / "model"
        self.folder = folder
        self.writer = Writer(self.store, FIRST, self.path, folder / "stage")
        self._restored = 0

    def write(self, name: str, text: str, *, settled: bool = True) -> None:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        if settled:
            os.utime(path, ns=(OLD_NS, OLD_NS))

    def restore(self, version: Version, **options: Any) -> dict[str, str]:
        manifest = self.store.find(version)
        assert manifest is not None
        self._restored += 1
        to = self.folder / f"restored{self._restored}"
        to.mkdir()
        self.store.restore(version, manifest, to, **options)
        return {str(path.relative_to(to)): path.read_text() for path in sorted(to.rglob("*")) if path.is_file()}

    def put_manifest(self, files: dict[str, Any], **more: Any) -> Version:
        self.blobs.put(f"artifacts/{FIRST.id}.json", json.dumps({"files": files, "at": 1, **more}).encode())
        return FIRST


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_save_sends_only_what_changed_and_nothing_without_a_change(bench: Bench) -> None:
    bench.write("a", "1")
    bench.write("deep/b", "2")
    first = bench.writer.save()
    assert bench.writer.save() is None
    bench.write("deep/b", "33")
    second = bench.writer.save()

    assert first is not None
    assert second is not None
    assert second > first
    assert bench.blobs.uploads == ["1", "2", "33"]
    assert bench.restore(first) == {"a": "1", "deep/b": "2"}
    assert bench.restore(second) == {"a": "1", "deep/b": "33"}


def test_save_that_fails_leaves_no_version_and_is_made_good_by_the_next(bench: Bench) -> None:
    bench.write("a", "1")
    bench.write("b", "2")
    bench.blobs.failures = 1
    with pytest.raises(StoreUnavailable):
        bench.writer.save()
    assert bench.store.versions("t-1", "model") == []

    version = bench.writer.save()

    assert version is not None
    assert bench.restore(version) == {"a": "1", "b": "2"}


def test_last_save_reads_again_what_may_have_changed_within_a_tick_of_the_clock(bench: Bench) -> None:
    bench.write("a", "1", settled=False)
    status = (bench.path / "a").stat()
    bench.writer.save()
    (bench.path / "a").write_text("2")
    os.utime(bench.path / "a", ns=(status.st_atime_ns, status.st_mtime_ns))

    version = bench.writer.save(final=True)

    assert version is not None
    assert bench.restore(version) == {"a": "2"}


def test_last_save_of_what_another_attempt_left_is_a_version_of_this_attempt(bench: Bench) -> None:
    bench.write("a", "1")
    earlier = bench.writer.save()
    assert earlier is not None
    manifest = bench.store.find(earlier)
    assert manifest is not None
    later = Writer(bench.store, Version(1, 2, 1, "other", "t-1", "model"), bench.path, bench.folder / "stage")
    later.know(manifest)

    saved = later.save(final=True)

    assert saved == Version(1, 2, 1, "other", "t-1", "model")
    assert bench.blobs.uploads == ["1"]
    assert later.save(final=True) is None


def test_artifact_that_was_removed_is_absent_in_the_last_version(bench: Bench) -> None:
    bench.write("a", "1")
    bench.writer.save()
    (bench.path / "a").unlink()
    bench.path.rmdir()

    assert bench.writer.save(final=True) is None, "an attempt that was killed may have been about to write it again"
    version = bench.writer.save(final=True, absent=True)

    assert version is not None
    manifest = bench.store.find(version)
    assert manifest is not None
    assert manifest.absent


def test_what_lies_too_deep_or_cannot_be_read_is_left_out_and_named(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.write("a", "1")
    here = Path.cwd()
    os.chdir(bench.path)
    for _ in range(300):
        os.mkdir("d")  # noqa: PTH102 - the whole path would be too long
        os.chdir("d")
    os.chdir(here)
    (bench.path / "closed").mkdir()
    listdir = os.listdir

    def refuse(path: str) -> list[str]:
        if path.endswith("closed"):
            raise PermissionError(13, "Permission denied")
        return listdir(path)

    monkeypatch.setattr(file_manifest.os, "listdir", refuse)
    found, left_out = file_manifest.look(str(bench.path))

    assert found is not None
    assert (len(found), left_out) == (
        2 + 1 + 255,
        {"closed": "cannot be read: Permission denied", "/".join(["d"] * 256): "lies in more than 254 folders"},
    )


def test_modes_links_and_empty_folders_are_kept_and_one_file_is_an_artifact_too(bench: Bench) -> None:
    bench.write("run", "x")
    (bench.path / "run").chmod(0o750)
    (bench.path / "empty").mkdir()
    (bench.path / "link").symlink_to("run")
    version = bench.writer.save()
    assert version is not None
    manifest = bench.store.find(version)
    assert manifest is not None
    to = bench.folder / "to"
    to.mkdir()
    bench.store.restore(version, manifest, to)
    assert stat.S_IMODE((to / "run").stat().st_mode) == 0o750
    assert ((to / "empty").is_dir(), (to / "link").readlink()) == (True, Path("run"))

    single = Writer(bench.store, Version(1, 1, 1, "token", "t-1", "one"), bench.path / "run", bench.folder / "stage")
    saved = single.save()
    assert saved is not None
    assert bench.restore(saved) == {"run": "x"}


CONTENT = {"sha256": "0" * 64, "size": 1, "mode": 0o644}


@pytest.mark.parametrize(
    "files",
    [
        {"../up": {"link": "x"}},
        {"/abs": {"folder": True}},
        {"a/../../b": {"folder": True}},
        {"out": {"link": "/etc"}},
        {"out": {"link": "../x"}},
        {"d/out": {"link": "../../x"}},
        {"in": {"link": "."}, "in/x": {"link": "y"}},
        {"a\0b": {"folder": True}},
        {"a": CONTENT},
        {"a": {**CONTENT, "sha256": "../../etc/passwd"}},
        {"a": {**CONTENT, "size": -1}},
        {"a": {**CONTENT, "mode": "x"}},
        {"a": []},
        [],
    ],
    ids=ascii,
)
def test_manifest_that_names_what_no_folder_may_hold_is_refused(bench: Bench, files: Any) -> None:
    version = bench.put_manifest(files)
    outside = set(bench.folder.iterdir())
    with pytest.raises(ArtifactDamaged):
        bench.restore(version)
    assert {path.name for path in set(bench.folder.iterdir()) - outside} <= {"restored1"}


def test_content_that_is_gone_or_other_than_named_is_not_restored(bench: Bench) -> None:
    bench.write("a", "1")
    version = bench.writer.save()
    assert version is not None
    (key,) = bench.blobs.list_keys("artifacts/t-1/data/")
    bench.blobs.put(key, b"2")
    with pytest.raises(ArtifactDamaged, match="other bytes"):
        bench.restore(version)
    bench.blobs.delete(key)
    with pytest.raises(ArtifactDamaged, match="gone"):
        bench.restore(version)


def test_drop_keeps_every_byte_that_a_kept_version_names(bench: Bench) -> None:
    bench.write("a", "1")
    bench.write("b", "2")
    first = bench.writer.save()
    bench.write("b", "33")
    second = bench.writer.save()
    assert first is not None
    assert second is not None
    bench.blobs.put(f"artifacts/t-1/data/{'f' * 64}", b"never named")

    bench.store.drop([first], keep=[second])
    assert bench.store.versions("t-1") == [second]
    assert len(list(bench.blobs.list_keys("artifacts/t-1/data/"))) == 3
    bench.store.sweep("t-1", [second])

    assert len(list(bench.blobs.list_keys("artifacts/t-1/data/"))) == 2
    assert bench.restore(second) == {"a": "1", "b": "33"}


def test_sweep_leaves_the_versions_of_a_tag_that_is_named_like_the_folder_of_bytes(bench: Bench) -> None:
    bench.write("a", "1")
    bench.writer.first = replace(FIRST, tag="data")
    saved = bench.writer.save()
    assert saved is not None

    bench.store.sweep("t-1", [saved])

    assert bench.store.versions("t-1", "data") == [saved]
    assert bench.restore(saved) == {"a": "1"}


def test_too_many_files_are_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.shim.file_manifest.MOST_FILES", 3)
    for number in range(4):
        bench.write(str(number), "x")
    with pytest.raises(ArtifactRefused):
        bench.writer.save()


def test_large_file_goes_to_a_folder_piece_by_piece_and_comes_back(tmp_path: Path) -> None:
    (tmp_path / "records").mkdir()
    store = ArtifactStore(FolderBlobs(tmp_path / "records"))
    content = os.urandom(3 << 20)
    (tmp_path / "large").write_bytes(content)
    version = Writer(store, FIRST, tmp_path / "large", tmp_path / "stage").save()
    assert version is not None
    manifest = store.find(version)
    assert manifest is not None
    (tmp_path / "to").mkdir()
    store.restore(version, manifest, tmp_path / "to")
    assert (tmp_path / "to" / "large").read_bytes() == content


# the cache


class TestCache:
    @pytest.fixture
    def saved(self, bench: Bench) -> Version:
        bench.write("a", "1" * 100)
        bench.write("b", "2" * 100)
        version = bench.writer.save()
        assert version is not None
        return version

    def test_file_is_fetched_once(self, bench: Bench, saved: Version, tmp_path: Path) -> None:
        cache = ContentCache.open(tmp_path / "cache")
        assert cache is not None
        whole = bench.restore(saved, cache=cache)
        for key in list(bench.blobs.list_keys("artifacts/t-1/data/")):
            bench.blobs.delete(key)
        assert bench.restore(saved, cache=cache) == whole

    def test_damaged_file_or_one_of_others_is_fetched_again(self, bench: Bench, saved: Version, tmp_path: Path) -> None:
        cache = ContentCache.open(tmp_path / "cache")
        assert cache is not None
        whole = bench.restore(saved, cache=cache)
        damaged, open_to_others = sorted((tmp_path / "cache" / "artifacts").iterdir())
        damaged.write_text("x")
        open_to_others.chmod(0o666)
        assert bench.restore(saved, cache=cache) == whole
        assert damaged.read_text() != "x"

    def test_cache_stays_below_its_limit(self, bench: Bench, saved: Version, tmp_path: Path) -> None:
        (tmp_path / "cache").mkdir()
        part = tmp_path / "cache" / ".part-dead"
        part.write_text("x")
        os.utime(part, ns=(OLD_NS, OLD_NS))
        cache = ContentCache(tmp_path / "cache", 150)
        bench.restore(saved, cache=cache)
        assert [path.stat().st_size for path in (tmp_path / "cache").iterdir()] == [100]

    def test_cache_may_be_switched_off(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RUNTIME_REUSE_CACHE", "0")
        assert ContentCache.open(tmp_path / "cache") is None
