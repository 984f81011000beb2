"""A listing is complete or an error: every listing call of a record store, with each fault on each page."""

from __future__ import annotations

import contextlib
import errno
import http.client
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from runtime.clock import SystemClock
from runtime.errors import StoreUnavailable
from runtime.records import open_records
from runtime.records.base import RecordStore, WorkerSeen
from runtime.records.blobs.bucket import BucketBlobs
from runtime.records.control_commands import pause_order
from runtime.records.store import BlobRecords
from runtime.tasks.history import StartedMark
from runtime.tasks.model import TaskState, next_generation
from runtime.tasks.wire import encode_task
from runtime.testing import sample_task
from tests.conformance.records_cases import (
    REAL_SERVICES,
    REMOTE,
    T0,
    Place,
    opened_place,
    sample_mark,
    sample_note,
    sample_record,
)
from tests.fakes.faults import Fault, FaultyServer
from tests.fakes.gcs import GcsServer, StoredObject

PASSING = (Fault.REFUSE_503, Fault.STORE_THEN_DROP, Fault.CUT_OFF, Fault.RESET, Fault.REPEAT_PAGE, Fault.EMPTY_PAGE)
LASTING = (Fault.REFUSE_503, Fault.STORE_THEN_DROP, Fault.CUT_OFF, Fault.RESET)
TASKS = [sample_task(str(number)) for number in range(40)]
FOREIGN = [sample_task(id=f"t-a{number}", key=str(number), experiment="foreign") for number in range(5)]


@pytest.fixture(
    params=[pytest.param(name, marks=[pytest.mark.service] if name in REAL_SERVICES else []) for name in REMOTE]
)
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """A store that holds an entry of every kind, with two names per page."""
    # The library gathers as many names before it returns them, and after a failure a listing goes on behind those.
    monkeypatch.setattr("runtime.records.blobs.bucket.PAGE", 4)
    with opened_place(request.param, request, tmp_path) as place:
        if isinstance(place.server, GcsServer):
            place.store()
            place.server.buckets["lab"].update(request.getfixturevalue("filled_bucket"))
        else:
            fill(place.store())
        server_of(place).page_size = 2
        yield place


@pytest.fixture(scope="module")
def filled_bucket() -> Mapping[str, StoredObject]:
    """The objects of a filled store: each test copies them, which takes less than to write them again."""
    server = GcsServer()
    server.make_bucket("lab")
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as cleanup:
        server.start()
        cleanup.callback(server.stop)
        patch.setenv("STORAGE_EMULATOR_HOST", server.url)
        store = cleanup.enter_context(contextlib.closing(open_records("gs://lab/some/prefix")))
        fill(store)
    return server.buckets["lab"]


@pytest.fixture(scope="module")
def filled_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a filled store: each test copies it."""
    root = tmp_path_factory.mktemp("filled")
    with contextlib.closing(open_records(f"file:{root}")) as store:
        fill(store)
    return root


def fill(store: RecordStore) -> None:
    for number in range(5):
        store.put_part("sample", number, [encode_task(task) for task in TASKS[number * 8 : number * 8 + 8]])
    for task in TASKS[:20]:
        store.commit(sample_record(task))
    for task in TASKS[20:26]:
        store.mark(sample_mark(task))
        store.commit(sample_record(task, state=TaskState.FAILED))
    for task in TASKS[20:23]:
        store.unmark(task.id, 1, TaskState.FAILED)
    store.commit(sample_record(next_generation(TASKS[20]), token="b2"))
    for task in FOREIGN:
        store.commit(sample_record(task))
    for number in range(5):
        store.record_started(TASKS[30], StartedMark(f"open-{number}", "w-1", T0, alone=True))
        store.record_ended(TASKS[30], sample_note(f"ended-{number}"))
        store.put_order("default", pause_order(T0))
        store.put_worker(worker_seen(f"w-{number}"))
        store.put_counters(f"w-{number}", {"sample": {TaskState.SUCCEEDED: 4}})
        store.append_log(TASKS[30].id, "a1", b"line %d\n" % number)


def worker_seen(name: str) -> WorkerSeen:
    now = SystemClock().now().replace(microsecond=0)
    return WorkerSeen(worker=name, host="h", queue="default", seen_at=now, started_at=T0, slots=1)


Call = Callable[[RecordStore], Any]
CALLS: Mapping[str, Call] = {
    "totals": lambda store: store.totals("sample").counts,
    "totals, exact": lambda store: store.totals("sample", exact=True).counts,
    "records": lambda store: sorted(record.task_id for record in store.records("sample")),
    "recorded": lambda store: sorted(store.recorded("sample")),
    "tried_again": lambda store: sorted(store.tried_again("sample")),
    "marks": lambda store: sorted(mark.task_id for mark in store.marks()),
    "marks of an experiment": lambda store: sorted(mark.task_id for mark in store.marks("sample")),
    "find_all": lambda store: [record.generation for record in store.find_all(TASKS[20].id)],
    "resolve": lambda store: store.resolve("t-", limit=100),
    "resolve an id": lambda store: store.resolve(TASKS[21].id),
    "history": lambda store: store.history(TASKS[30].id, 1),
    "experiments": lambda store: [seen.name for seen in store.experiments()],
    "parts": lambda store: store.parts("sample"),
    "control": lambda store: store.control("default"),
    "workers": lambda store: [seen.worker for seen in store.workers()],
    "read_log": lambda store: b"".join(store.read_log(store.log_url(TASKS[30].id, "a1"))),
}


def reopened(place: Place, *, timeout_s: float = 60, retry_for_s: float = 600) -> RecordStore:
    """Open the store as another process would."""
    timeout, retry_for = timedelta(seconds=timeout_s), timedelta(seconds=retry_for_s)
    blobs = BucketBlobs(place.opened[0].url, timeout=timeout, retry_for=retry_for)
    store = BlobRecords(blobs)
    place.opened.append(store)
    return store


STRAYS = (
    "/x",
    "../x",
    "./x",
    "a\x01b",
    "a\ufffeb",
    "notes.txt",
    "%2Fx",
    "ü b",
    " ",
    "sub/{name}",
    "{name}.bak",
    "{name} ",
    "{name}/",
)
"""Names that people, editors, consoles and copying tools leave in a folder; `{name}` is a name of ours."""


def leave_strays(place: Place) -> None:
    """Put every stray name into every folder of the store, as any other client would."""
    server = server_of(place)
    server.page_size = None
    keys = place.opened[0].blobs.list_keys("")  # type: ignore[attr-defined]
    folders = {key.rpartition("/")[0]: key.rpartition("/")[2] for key in keys}
    server.page_size = 20
    strays = [f"{folder}/{stray.format(name=name)}" for folder, name in folders.items() for stray in STRAYS]
    if isinstance(server, GcsServer):
        server.fill("lab", [f"some/prefix/{stray}" for stray in strays], b"not ours")
        return
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"))
    for stray in strays:
        connection.request("PUT", quote(f"/lab/some/prefix/{stray}", safe="/."), body=b"not ours")
        assert connection.getresponse().read() is not None
    connection.close()


def count_pages(place: Place, call: Call) -> tuple[Any, int]:
    """The result without failures, and how many pages the call requests."""
    server = server_of(place)
    server.requests.clear()
    return call(place.store()), server.requests["LIST"]


def some(place: Place, pages: int) -> list[int]:
    """Return all of few pages, else the first, the last and some between; fewer for a server in another process."""
    most = 5 if place.opened[0].url.startswith("gs:") else 3
    return sorted({number * (pages - 1) // (most - 1) for number in range(most)})


def server_of(place: Place) -> FaultyServer:
    assert place.server is not None
    return place.server


# Filling a store takes longer than listing it, so one store is filled for all calls.


def calls_on(place: Place, fault: Fault) -> Mapping[str, Call]:
    """Return every call for one fault, and one call per way of listing for the others.

    Every call gets its pages from the same code, which alone knows of faults. The ways differ in how they ask for them:
    a folder whole, many folders in parallel, names that begin alike, and sizes or times besides names. A server in
    another process is slow, and gets the fewest.
    """
    if not place.opened[0].url.startswith("gs:"):
        return {name: CALLS[name] for name in ("totals", "recorded", "workers")}
    if fault is Fault.REFUSE_503:
        return CALLS
    return {name: CALLS[name] for name in ("totals, exact", "recorded", "parts", "workers", "find_all", "read_log")}


@pytest.mark.parametrize("fault", PASSING)
@pytest.mark.daily(2)
def test_listing_with_a_fault_on_any_page_is_complete(place: Place, fault: Fault) -> None:
    for name, call in calls_on(place, fault).items():
        complete, pages = count_pages(place, call)
        for page in some(place, pages):
            server_of(place).fail_next("LIST", [*[None] * page, fault])
            assert (name, page, call(reopened(place))) == (name, page, complete)
            assert server_of(place).faults_left == 0, name


@pytest.mark.slow
def test_listing_with_a_stall_on_every_page_is_complete(place: Place) -> None:
    for name in ("totals, exact", "parts", "read_log"):
        complete, _ = count_pages(place, CALLS[name])
        server_of(place).fail_next("LIST", [None, Fault.STORE_THEN_STALL, None, Fault.STORE_THEN_STALL])

        assert (name, CALLS[name](reopened(place, timeout_s=2))) == (name, complete)
        server_of(place).forget_faults()


# Parallel listings may continue for a while after their error, so each of these tests has its own server.
@pytest.mark.parametrize("place", ["gcs"], indirect=True)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
@pytest.mark.parametrize("fault", LASTING)
@pytest.mark.daily(16)
def test_listing_with_a_fault_that_lasts_is_an_error_that_may_pass(place: Place, call: Call, fault: Fault) -> None:
    server_of(place).fail_next("LIST", [fault] * 1000)

    with pytest.raises(StoreUnavailable) as down:
        call(reopened(place, retry_for_s=0.2))

    assert down.value.retryable


def test_listing_whose_page_is_repeated_for_ever_is_an_error(place: Place) -> None:
    server_of(place).fail_next("LIST", [None, *[Fault.REPEAT_PAGE] * 100_000])

    with pytest.raises(StoreUnavailable) as broken:
        reopened(place, retry_for_s=0.2).parts("sample")

    server_of(place).forget_faults()
    assert broken.value.retryable


# foreign names


def test_listing_among_names_that_are_not_ours_is_complete(place: Place) -> None:
    complete = {name: call(place.store()) for name, call in CALLS.items()}
    leave_strays(place)

    assert {name: call(reopened(place)) for name, call in CALLS.items()} == complete


@pytest.mark.parametrize("fault", PASSING)
@pytest.mark.daily(2)
def test_listing_among_names_that_are_not_ours_with_a_fault_on_any_page_is_complete(place: Place, fault: Fault) -> None:
    leave_strays(place)
    for name in ("parts", "tried_again"):
        complete, pages = count_pages(place, CALLS[name])
        for page in some(place, pages):
            server_of(place).fail_next("LIST", [*[None] * page, fault])
            assert (name, page, CALLS[name](reopened(place))) == (name, page, complete)
            assert server_of(place).faults_left == 0, name


def test_names_that_are_not_ours_are_said_once_with_what_removes_them(
    place: Place, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.records.blobs.bucket._reported", set())
    leave_strays(place)

    for call in CALLS.values():
        call(reopened(place))

    [said] = caplog.messages
    scheme = place.opened[0].url.partition(":")[0]
    assert f"{scheme}://lab/some/prefix/" in said
    assert {"gs": "`gsutil rm ", "s3": "`aws s3 rm "}[scheme] in said


# a folder on a failing disk or server


class Disk:
    """Intercepts the system calls of a listing, counts them, and acts at one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        self.seen: list[str] = []
        self.at: int | None = None
        self.times = 1
        self.act: Callable[[], None] = lambda: None
        real_scandir, real_stat = os.scandir, os.stat

        def stat(path: Any, *args: Any, **more: Any) -> os.stat_result:
            self._count(str(path))
            return real_stat(path, *args, **more)

        @contextlib.contextmanager
        def scandir(path: str) -> Iterator[Iterator[os.DirEntry[str]]]:
            with real_scandir(path) as entries:
                yield self._count_each(path, entries)

        monkeypatch.setattr("runtime.records.blobs.folder.os.stat", stat)
        monkeypatch.setattr("runtime.records.blobs.folder.os.scandir", scandir)

    def _count_each(self, path: str, entries: Iterator[os.DirEntry[str]]) -> Iterator[os.DirEntry[str]]:
        for entry in entries:
            yield entry
            self._count(path)

    def _count(self, path: str) -> None:
        if "the records" not in path:
            return
        self.calls += 1
        self.seen.append(path)
        if self.at is not None and self.at <= self.calls < self.at + self.times:
            self.act()

    def fail(self, number: int, *, times: int = 1) -> None:
        def act() -> None:
            raise OSError(number, os.strerror(number))

        self.act, self.times = act, times


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    with opened_place("folder", request, tmp_path) as place:
        root = place.store().url.removeprefix("file:")
        shutil.copytree(request.getfixturevalue("filled_folder"), root, copy_function=os.link, dirs_exist_ok=True)
        monkeypatch.setattr("runtime.records.blobs.folder.PAUSES_S", (0.0, 0.0))
        yield place


@pytest.fixture
def disk(folder: Place, monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def count_looks(folder: Place, disk: Disk, call: Call) -> tuple[Any, int]:
    """The result without failures, and how often the call looks at the disk."""
    store = folder.store()
    disk.calls, disk.seen = 0, []
    return call(store), disk.calls


listing_calls = pytest.mark.parametrize(
    "call",
    [call for name, call in CALLS.items() if name != "read_log"],  # one file in a folder
    ids=[name for name in CALLS if name != "read_log"],
)


@listing_calls
@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO])
@pytest.mark.daily(10)
def test_listing_of_a_folder_that_fails_once_is_complete(folder: Place, disk: Disk, call: Call, number: int) -> None:
    complete, steps = count_looks(folder, disk, call)
    disk.fail(number)

    for step in range(1, steps + 1):
        store = folder.store()
        disk.calls, disk.at = 0, step
        assert call(store) == complete
        disk.at = None


@listing_calls
def test_listing_of_a_folder_that_goes_on_failing_is_an_error_that_may_pass(
    folder: Place, disk: Disk, call: Call
) -> None:
    _, steps = count_looks(folder, disk, call)
    disk.fail(errno.ESTALE, times=1000)

    for step in range(1, steps + 1):
        store = folder.store()
        disk.calls, disk.at = 0, step
        with pytest.raises(StoreUnavailable) as broken:
            call(store)
        assert broken.value.retryable
        disk.at = None


@listing_calls
@pytest.mark.parametrize("empty", [False, True], ids=["gone", "an empty folder in its place"])
def test_listing_of_a_folder_whose_disk_is_unmounted_meanwhile_is_an_error(
    folder: Place, disk: Disk, call: Call, empty: bool
) -> None:
    root = Path(folder.opened[0].url.removeprefix("file:"))
    away = root.with_name("unmounted")

    def unmount() -> None:
        root.rename(away)
        if empty:
            root.mkdir()

    _, steps = count_looks(folder, disk, call)
    disk.act = unmount
    # An empty folder that existed before a listing began is listed as empty.
    for step in [step for step in range(1, steps + 1) if not empty or Path(disk.seen[step - 1]) != root]:
        store = folder.store()
        disk.calls, disk.at = 0, step
        with pytest.raises(StoreUnavailable):
            call(store)
        disk.at = None
        if empty:
            root.rmdir()
        away.rename(root)
