"""The difference between this machine's clock and a store's: the cost to measure it, and where it is reported."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from runtime.cli.main import main
from runtime.client.doctor import DoctorVerdict, Line, examine
from runtime.client.tasks.submit import submit
from runtime.clock import SKEW, describe_skew
from runtime.config import load_settings
from runtime.errors import StoreUnavailable
from runtime.outputs import PubSubQueueOutput, RecordsOutput, StackOutputs, encode_outputs
from runtime.records.blobs import BlobInfo
from runtime.records.blobs.bucket import BucketBlobs
from runtime.records.blobs.folder import FolderBlobs
from runtime.records.control_commands import pause_order
from runtime.records.store import BlobRecords
from runtime.tasks.wire import encode_task
from runtime.testing import FakeClock, sample_task
from tests.fakes.gcs import GcsServer
from tests.unit.queues.pubsub_bench import FakeService

SECOND = timedelta(seconds=1)
MINUTES = timedelta(minutes=5)


@pytest.mark.parametrize(
    ("skew", "said"),
    [
        (None, None),
        (SKEW, None),
        (-SKEW, None),
        (SKEW + SECOND, "31s ahead of Google's"),
        (-MINUTES, "5m behind Google's"),
    ],
)
def test_skew_is_said_from_half_a_minute_on(skew: timedelta | None, said: str | None) -> None:
    assert describe_skew(skew, "Google's") == said


# the store's clock


def folder_with_clock(root: Path, ahead: timedelta) -> BlobRecords:
    """The file system's clock is this machine's; the store gets another time of day."""
    return BlobRecords(FolderBlobs(root), clock=FakeClock(datetime.now(UTC) + ahead))


@pytest.mark.parametrize("ahead", [timedelta(0), MINUTES, -MINUTES])
def test_skew_of_a_folder_is_told_by_a_file_that_was_just_made(tmp_path: Path, ahead: timedelta) -> None:
    skew = folder_with_clock(tmp_path, ahead).skew()

    assert skew is not None
    assert abs(skew - ahead) < SKEW


@pytest.mark.parametrize("ahead", [timedelta(0), MINUTES, -MINUTES])
def test_skew_of_a_bucket_is_told_by_the_time_of_its_objects(
    monkeypatch: pytest.MonkeyPatch, bucket: GcsServer, ahead: timedelta
) -> None:
    bucket.clock_offset = -ahead

    skew = BlobRecords(BucketBlobs("gs://lab/x")).skew()

    assert skew is not None
    assert abs(skew - ahead) < SKEW


def test_skew_costs_nothing_after_an_order_and_a_listing_after_a_part(tmp_path: Path) -> None:
    blobs = CountedBlobs(tmp_path)
    clock = FakeClock(datetime.now(UTC) + MINUTES)
    ordered, submitted = BlobRecords(blobs, clock=clock), BlobRecords(blobs, clock=clock)
    ordered.put_order("default", pause_order(clock.now()))
    submitted.put_part("sample", 0, [encode_task(sample_task())])
    blobs.calls.clear()

    after_order = ordered.skew(), list(blobs.calls)
    after_part = submitted.skew(), list(blobs.calls)
    submitted.skew()

    assert all(skew is not None and abs(skew - MINUTES) < SKEW for skew in (after_order[0], after_part[0]))
    assert (after_order[1], after_part[1], blobs.calls) == ([], ["list"], ["list"])


def test_skew_is_not_what_a_slow_store_took_to_answer(tmp_path: Path) -> None:
    clock = FakeClock(datetime.now(UTC) - timedelta(seconds=50))
    blobs = CountedBlobs(tmp_path)
    blobs.after_write = lambda: clock.advance(seconds=100)
    store = BlobRecords(blobs, clock=clock)

    assert store.skew() == timedelta(0)


class CountedBlobs(FolderBlobs):
    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.calls: list[str] = []
        self.after_write = lambda: None

    def create(self, key: str, data: bytes) -> bool:
        self.calls.append("create")
        return super().create(key, data)

    def put(self, key: str, data: bytes) -> None:
        self.calls.append("put")
        super().put(key, data)
        self.after_write()

    def get(self, key: str) -> bytes | None:
        self.calls.append("get")
        return super().get(key)

    def list_blobs(self, prefix: str, *, after: str | None = None) -> Iterator[BlobInfo]:
        self.calls.append("list")
        return super().list_blobs(prefix, after=after)


# reports


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[GcsServer]:
    server = GcsServer().start()
    server.make_bucket("lab")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
    yield server
    server.stop()


@pytest.fixture
def stack(bucket: GcsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GcsServer:
    """A stack of one queue on Pub/Sub with its records in `bucket`."""
    queue = PubSubQueueOutput(topic="projects/proj/topics/tasks", subscription="projects/proj/subscriptions/tasks")
    records = RecordsOutput(url=f"gs://lab/{tmp_path.name}")
    outputs = StackOutputs(stack="dev", queues={"default": queue}, records=records)
    (tmp_path / "contract.json").write_text(encode_outputs(outputs))
    monkeypatch.setenv("RUNTIME_OUTPUTS", str(tmp_path / "contract.json"))
    monkeypatch.setenv("RUNTIME_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("PUBSUB_EMULATOR_HOST", "127.0.0.1:1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.setattr("runtime.queues.pubsub.queue.PubSubClient", FakeService)
    return bucket


COMMANDS = (
    ["submit", "--experiment", "sweep", "--", "true"],
    ["cancel", "sweep", "--yes"],
    ["queue", "purge", "--yes"],
)


@pytest.mark.parametrize(
    ("ahead", "said"), [(MINUTES, "ahead of the record store's"), (-MINUTES, "behind the record store's")]
)
def test_submit_cancel_and_purge_say_that_the_clock_is_off(
    stack: GcsServer, capsys: pytest.CaptureFixture[str], ahead: timedelta, said: str
) -> None:
    stack.clock_offset = -ahead

    for command in COMMANDS:
        assert main(command) == 0
        [noted] = [line for line in capsys.readouterr().err.splitlines() if "clock" in line]
        assert noted.startswith("note: this machine's clock is ")
        assert said in noted


def test_submit_of_a_program_logs_it_once_in_a_process(stack: GcsServer, caplog: pytest.LogCaptureFixture) -> None:
    stack.clock_offset = MINUTES

    for number in range(3):
        submit(sample_task(str(number)))

    [logged] = [record.message for record in caplog.records if "clock" in record.message]
    assert "behind the record store's" in logged


def test_clocks_that_agree_are_not_spoken_of(stack: GcsServer, capsys: pytest.CaptureFixture[str]) -> None:
    for command in COMMANDS:
        assert main(command) == 0

    assert "this machine's clock" not in capsys.readouterr().err


def test_command_whose_store_fails_when_asked_for_its_time_has_done_its_work(
    stack: GcsServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(store: BlobRecords) -> None:
        raise StoreUnavailable("away")

    monkeypatch.setattr(BlobRecords, "skew", away)

    assert [main(command) for command in COMMANDS] == [0, 0, 0]


@pytest.mark.parametrize(
    ("ahead", "verdict"),
    [
        (timedelta(0), DoctorVerdict.OK),
        (timedelta(minutes=2), DoctorVerdict.WARN),
        (-timedelta(minutes=7), DoctorVerdict.FAIL),
    ],
)
def test_doctor_compares_the_clock_with_the_stores(stack: GcsServer, ahead: timedelta, verdict: DoctorVerdict) -> None:
    stack.clock_offset = -ahead

    lines: list[Line] = list(examine(None, replace(load_settings(), outputs=os.environ["RUNTIME_OUTPUTS"])))

    [line] = [line for line in lines if line.check == "clock"]
    assert line.verdict is verdict
    assert "the record store's" in line.text
    assert ("timedatectl" in (line.fix or "")) == (verdict is not DoctorVerdict.OK)
