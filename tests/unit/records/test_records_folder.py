"""Special cases of a folder: durability in the right order, full disks, odd file systems, shared use."""

from __future__ import annotations

import errno
import os
import resource
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtime.errors import StoreUnavailable, StoreUnsafe
from runtime.records import open_records
from runtime.records.base import settle_record
from runtime.records.blobs.folder import FolderBlobs, sync
from runtime.records.store import BlobRecords
from runtime.tasks.history import mark_of
from runtime.tasks.model import TaskState, experiment_digest
from runtime.testing import sample_task
from tests.conformance.records_cases import sample_record


def every_name(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the system calls of a write in order, and still execute them."""
    made: list[str] = []

    def kind_of(descriptor: int) -> str:
        return "folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file"

    def watch(name: str, describe: Callable[..., str]) -> None:
        real = getattr(os, name)

        def watched(*args: Any, **options: Any) -> Any:
            made.append(describe(*args))
            return real(*args, **options)

        monkeypatch.setattr(os, name, watched)

    watch("fsync", lambda descriptor: f"fsync {kind_of(descriptor)}")
    watch("write", lambda *_: "write")
    watch("link", lambda *_: "link")
    watch("unlink", lambda *_: "unlink")
    watch("mkdir", lambda *_: "mkdir")
    return made


def test_create_syncs_the_file_before_its_name_and_the_folder_after(tmp_path: Path, calls: list[str]) -> None:
    blobs = FolderBlobs(tmp_path)
    blobs.create("a/b/first", b"1")
    assert calls[:4] == ["mkdir", "fsync folder", "mkdir", "fsync folder"]

    calls.clear()
    assert blobs.create("a/b/second", b"2")
    assert calls == ["write", "fsync file", "link", "unlink", "fsync folder"]

    calls.clear()
    assert not blobs.create("a/b/second", b"3")
    assert calls[-1] == "fsync folder", "who acts on another's record must know that it lasts"


def test_create_that_is_refused_leaves_the_first_and_no_other_file(tmp_path: Path) -> None:
    blobs = FolderBlobs(tmp_path)
    assert blobs.create("a/x", b"first")

    assert not blobs.create("a/x", b"second")

    assert every_name(tmp_path) == ["a/x"]
    assert (tmp_path / "a/x").read_bytes() == b"first"


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("call", ["fsync", "write", "link"])
def test_create_that_fails_at_any_step_leaves_no_file_and_works_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    blobs = FolderBlobs(tmp_path)
    blobs.create("a/there", b"")

    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as broken:
        broken.setattr(os, call, fail)
        with pytest.raises(StoreUnavailable) as failed:
            blobs.create("a/x", b"data")

    assert failed.value.retryable
    assert every_name(tmp_path) == ["a/there"]
    assert blobs.create("a/x", b"data")


def test_closed_mark_that_a_killed_process_put_back_is_no_mark(tmp_path: Path) -> None:
    store = BlobRecords(FolderBlobs(tmp_path))
    task = sample_task()
    failed = sample_record(task, state=TaskState.FAILED)
    settle_record(store, failed, mark_of(failed, task))
    [kept] = tmp_path.glob("marks/*/*")
    data = kept.read_bytes()
    store.unmark(task.id, 1, TaskState.FAILED)
    kept.write_bytes(data)

    assert store.find_mark(task.id, 1, TaskState.FAILED) is None
    assert list(store.marks("sample")) == []


def test_name_that_is_no_text_stops_no_count(tmp_path: Path) -> None:
    store = BlobRecords(FolderBlobs(tmp_path))
    task = sample_task()
    failed = sample_record(task, state=TaskState.FAILED)
    settle_record(store, failed, mark_of(failed, task))
    for folder in ("closed", "marks", "records"):
        stray = tmp_path / folder / experiment_digest("sample") / "caf\udce9.txt"
        stray.parent.mkdir(parents=True, exist_ok=True)
        stray.touch()

    assert store.totals("sample", exact=True).counts[TaskState.FAILED] == 1
    assert len(list(store.marks("sample"))) == 1


def test_commit_whose_folder_sync_failed_is_not_reported_as_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = BlobRecords(FolderBlobs(tmp_path))
    store.put_experiment("sample", queue=None)
    record = sample_record(sample_task())
    real = os.fsync

    def fail_on_folders(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(descriptor)

    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", fail_on_folders)
        for _ in range(2):
            with pytest.raises(StoreUnavailable):
                store.commit(record)

    store.commit(record)
    assert store.find(record.task_id, 1) == record


def test_what_the_system_writes_only_in_part_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs, real = FolderBlobs(tmp_path), os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:3]))

    assert blobs.create("a/x", b"0123456789")
    blobs.append("a/t.log", b"one two ")
    blobs.append("a/t.log", b"three")

    monkeypatch.undo()
    assert blobs.get("a/x") == b"0123456789"
    assert b"".join(blobs.stream("a/t.log")) == b"one two three"


WRITES_AS_NUMBER_SEVEN = """
import os, sys, threading
from pathlib import Path
from runtime.records.blobs.folder import FolderBlobs, sync
os.getpid = threading.get_native_id = lambda: 7
real = os.open
def shown(path, *args, **more):
    print(os.path.basename(path))
    return real(path, *args, **more)
os.open = shown
assert FolderBlobs(Path(sys.argv[1])).create(sys.argv[2], b"x")
"""


def test_workers_with_the_same_numbers_in_two_containers_write_under_names_of_their_own(tmp_path: Path) -> None:
    """Both may write at the same moment, and with equal names one would overwrite the other's file."""
    (tmp_path / "a").mkdir()
    names = []
    for key in ("a/one", "a/two"):
        words = [sys.executable, "-c", WRITES_AS_NUMBER_SEVEN, str(tmp_path), key]
        said = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
        names.append(next(name for name in said if name.startswith(".tmp-")))

    assert names[0] != names[1]


def test_commit_on_a_full_disk_says_what_is_free_and_leaves_nothing(tmp_path: Path) -> None:
    """The limit on a file's size stands for the disk: the kernel refuses the write itself."""
    store = BlobRecords(FolderBlobs(tmp_path))
    store.put_experiment("sample", queue=None)
    task = sample_task()
    record = sample_record(task, value="x" * 30_000)
    before = every_name(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 * 1024, limits[1]))
    try:
        with pytest.raises(StoreUnavailable) as full:
            store.commit(record)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    assert full.value.retryable
    assert any(fact.startswith("free: ") for fact in full.value.facts)
    assert str(tmp_path) in full.value.message
    assert every_name(tmp_path) == before
    store.commit(record)
    assert store.find(task.id, 1) == record


def fill_up(path: Path) -> None:
    """Write to the file until its disk is full."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        while True:
            os.write(descriptor, b"x" * 4096)
    except OSError as problem:
        if problem.errno != errno.ENOSPC:
            raise
    finally:
        os.close(descriptor)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root; the size-limit test covers the same path")
def test_commit_on_a_full_file_system_works_again_once_there_is_room(tmp_path: Path) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(tmp_path)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no mounting here: {mounted.stderr.strip()}")
    try:
        store = BlobRecords(FolderBlobs(tmp_path))
        ballast = tmp_path / "ballast"
        store.put_experiment("sample", queue=None)
        fill_up(ballast)
        before = every_name(tmp_path)
        record = sample_record(sample_task(), log="y" * 20_000)

        with pytest.raises(StoreUnavailable) as full:
            store.commit(record)

        assert "No space left" in full.value.message
        assert every_name(tmp_path) == before
        ballast.unlink()
        store.commit(record)
        assert store.find(record.task_id, 1) == record
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


WRITER = """
import sys
from pathlib import Path
from runtime.records.blobs.folder import FolderBlobs, sync
blobs = FolderBlobs(Path(sys.argv[1]))
print("ready", flush=True)
n = 0
while True:
    blobs.create(f"records/{n % 7}/{n}", b"%09d" % n * 5000)
    n += 1
"""


@pytest.mark.slow
def test_writer_killed_at_any_time_leaves_whole_files_only(tmp_path: Path) -> None:
    for delay_ms in range(0, 50, 5):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(delay_ms / 1000)
        writer.send_signal(signal.SIGKILL)
        writer.communicate()

        blobs = FolderBlobs(tmp_path)
        keys = list(blobs.list_keys("records/"))
        for key in keys:
            assert blobs.get(key) == b"%09d" % int(key.rpartition("/")[2]) * 5000


def test_listing_removes_what_a_dead_writer_left_a_day_ago(tmp_path: Path) -> None:
    blobs = FolderBlobs(tmp_path)
    blobs.create("a/x", b"")
    old, young, not_ours = tmp_path / "a/.tmp-1-1-1", tmp_path / "a/.tmp-2-2-2", tmp_path / "a/.nfs0001"
    for path in (old, young, not_ours):
        path.write_bytes(b"torn")
    yesterday = time.time() - 25 * 3600
    os.utime(old, (yesterday, yesterday))
    os.utime(not_ours, (yesterday, yesterday))

    assert list(blobs.list_keys("a/")) == ["a/x"]

    assert every_name(tmp_path) == ["a/.nfs0001", "a/.tmp-2-2-2", "a/x"]


def test_create_without_hard_links_renames_without_replacing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", no_links)
    blobs = FolderBlobs(tmp_path)

    assert blobs.create("a/x", b"first")
    assert not blobs.create("a/x", b"second")
    assert blobs.get("a/x") == b"first"
    assert every_name(tmp_path) == ["a/x"]


def test_check_on_a_file_system_with_no_create_only_write_refuses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: object, **__: object) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(os, "link", no_links)
    monkeypatch.setattr("runtime.records.blobs.folder._renameat2", lambda: None)

    with pytest.raises(StoreUnsafe) as unsafe:
        BlobRecords(FolderBlobs(tmp_path)).check()

    assert "hard link: Operation not supported" in unsafe.value.facts
    assert every_name(tmp_path) == []


def test_check_where_the_second_creation_replaces_the_first_refuses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", os.replace)

    with pytest.raises(StoreUnsafe):
        BlobRecords(FolderBlobs(tmp_path)).check()


def test_open_of_a_missing_folder_is_refused_and_makes_none(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable) as missing:
        open_records(f"file:{tmp_path}/lab/records")

    assert missing.value.render() == (
        f"error: there is no record folder `{tmp_path}/lab/records`\n"
        "  it is not made by itself, for a disk that is not mounted looks the same\n"
        f"hint: mount it, or `mkdir -p {tmp_path}/lab/records`"
    )
    assert not missing.value.retryable
    assert not (tmp_path / "lab").exists()


def test_folder_that_vanished_fails_every_call_and_is_not_made_anew(tmp_path: Path) -> None:
    root = tmp_path / "share"
    root.mkdir()
    store = open_records(str(root))
    root.rename(tmp_path / "unmounted")
    task = sample_task()

    for call in (
        lambda: store.commit(sample_record(task)),
        lambda: store.find(task.id, 1),
        lambda: list(store.records("sample")),
        lambda: store.totals("sample"),
        lambda: store.control("default"),
    ):
        with pytest.raises(StoreUnavailable):
            call()
    assert not root.exists()

    with pytest.raises(StoreUnavailable, match="there is no record folder") as gone:
        store.commit(sample_record(task))
    assert not gone.value.retryable
    assert gone.value.hint == f"mount it, or `mkdir -p {root}`"


def test_name_that_cannot_be_in_a_folder_that_is_there_is_not_called_a_missing_folder(tmp_path: Path) -> None:
    blobs = FolderBlobs(tmp_path)
    (tmp_path / "a").symlink_to(tmp_path / "gone" / "file")

    with pytest.raises(StoreUnavailable, match="failed: No such file") as refused:
        blobs.append("a", b"1")

    assert refused.value.retryable


def test_sync_leaves_out_only_what_it_was_told_to(tmp_path: Path) -> None:
    missing = tmp_path / "missing"

    sync(missing, unopened={errno.ENOENT})
    for unopened in ((), {errno.EACCES}):
        with pytest.raises(FileNotFoundError):
            sync(missing, unopened=unopened)


AS_NOBODY = """
import os, sys
from runtime.errors import StoreUnavailable
from runtime.records.blobs import folder
from runtime.records import open_records, store
# Only now: another user may not be able to read the interpreter's own files.
os.setgroups([]); os.setgid(65534); os.setuid(65534)
try:
    open_records(sys.argv[1]).check()
except StoreUnavailable as problem:
    print(problem.retryable, problem.hint)
else:
    print("written")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(
    ("mode", "said"), [(0o755, "False give user 65534 write access to `{root}`"), (0o777, "written")]
)
def test_folder_of_another_user_needs_write_access_and_says_so(mode: int, said: str) -> None:
    # Not in pytest's own folder, which only its owner may enter.
    root = Path(tempfile.mkdtemp(prefix="runtime-records-", dir="/tmp"))
    try:
        root.chmod(mode)
        BlobRecords(FolderBlobs(root)).put_experiment("by-root", queue=None)
        done = subprocess.run([sys.executable, "-c", AS_NOBODY, str(root)], capture_output=True, text=True, check=False)
        assert (done.stdout.strip(), done.stderr) == (said.format(root=root), "")
    finally:
        subprocess.run(["rm", "-rf", str(root)], check=True)


def test_shared_folder_stays_writable_for_all_whatever_the_umask(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o2775)
    before = os.umask(0o077)
    try:
        FolderBlobs(shared).create("records/a/x", b"")
    finally:
        os.umask(before)

    assert stat.S_IMODE((shared / "records").stat().st_mode) == 0o2775
    assert stat.S_IMODE((shared / "records/a").stat().st_mode) == 0o2775
    assert stat.S_IMODE((shared / "records/a/x").stat().st_mode) == 0o664


def test_private_folder_keeps_the_umask(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    before = os.umask(0o077)
    try:
        FolderBlobs(tmp_path).create("records/x", b"")
    finally:
        os.umask(before)

    assert stat.S_IMODE((tmp_path / "records").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "records/x").stat().st_mode) == 0o600


def test_list_keys_are_in_key_order_and_begin_after_what_is_asked(tmp_path: Path) -> None:
    blobs = FolderBlobs(tmp_path)
    keys = sorted(["a/b/1", "a/b.x", "a/b-", "a/b0", "a/c/d/e", "a/c/d.f", "ab/1", "z"])
    for key in keys:
        blobs.create(key, b"")

    assert list(blobs.list_keys("")) == keys
    for start in (*keys, "a/b/", "a/b/0", "a/c/d/~"):
        assert list(blobs.list_keys("", after=start)) == [key for key in keys if key > start]
    assert list(blobs.list_keys("a/b")) == [key for key in keys if key.startswith("a/b")]
    assert list(blobs.list_keys("a/c/")) == ["a/c/d.f", "a/c/d/e"]
    assert list(blobs.list_keys("none/")) == []
    assert [info.size for info in blobs.list_blobs("a/b/")] == [0]


def test_strangers_files_in_the_folder_are_passed_over(tmp_path: Path) -> None:
    store = BlobRecords(FolderBlobs(tmp_path))
    task = sample_task()
    store.commit(sample_record(task))
    [record] = (tmp_path / "records").rglob("*.json")
    (record.parent / "notes.txt").write_text("mine")
    (record.parent / "README").write_text("mine")
    (tmp_path / "marks" / task.id[-8:]).mkdir(parents=True)
    (tmp_path / "marks" / task.id[-8:] / "old.txt").write_text("mine")

    assert [found.task_id for found in store.records("sample")] == [task.id]
    assert store.totals("sample", exact=True).submitted == 1
    assert list(store.marks()) == []
