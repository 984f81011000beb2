"""Messages in a store: kept until they are sent, each try claimed once, and what was undecodable or left."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

import pytest

from runtime.queues.sqlite.queue import open_sqlite
from runtime.records.memory import MemoryBlobs, MemoryRecords
from runtime.records.notifications import DeliveryRecord, NotificationStore
from runtime.records.store import BlobRecords
from runtime.tasks.notification_sinks import TaskSink
from runtime.tasks.notifications import Notification

NOW = datetime(2026, 11, 27, 8, 40, 4, tzinfo=UTC)
SINKS = (TaskSink(webhook="env://HOOK", on=("failed",)), TaskSink(command=("tell", "me")))
MESSAGE = Notification(experiment="sweep", sinks=SINKS, queue="q", owner="ada", task="t-1", generation=2)
OF_ALL = Notification(experiment="sweep", sinks=(TaskSink(webhook="env://HOOK", on=()),), token="0123456789abcdef")


@pytest.fixture(params=["memory", "folder", "embedded"])
def records(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BlobRecords]:
    if request.param == "memory":
        made: BlobRecords = MemoryRecords()
    elif request.param == "folder":
        from runtime.records.blobs.folder import FolderBlobs

        made = BlobRecords(FolderBlobs(tmp_path))
    else:
        made = cast(BlobRecords, open_sqlite(tmp_path / "tasks.db")[1])
    yield made
    made.close()


@pytest.fixture
def store(records: BlobRecords) -> NotificationStore:
    return records.open_notifications()


def claim(store: NotificationStore, number: int, by: str = "w-1") -> bool:
    return store.claim(MESSAGE, number, by=by, now=NOW)


def listed(store: NotificationStore) -> list[tuple[str, int]]:
    return [(each.name, each.tries) for each in store.find_open()]


def test_message_is_read_as_it_was_written(store: NotificationStore) -> None:
    for message in (MESSAGE, OF_ALL):
        store.write(message)
        store.write(message)

    assert sorted(listed(store)) == sorted([(OF_ALL.name, 0), ("t-1.g2", 0)])
    found = store.read("t-1.g2")
    assert found == MESSAGE
    of_all = store.read(OF_ALL.name)
    assert of_all is not None
    assert (of_all.task, of_all.token, of_all.name[:2]) == (None, OF_ALL.token, "e-")


def test_try_of_a_message_is_claimed_by_one(store: NotificationStore) -> None:
    store.write(MESSAGE)

    assert [claim(store, 1), claim(store, 1, by="w-2"), claim(store, 2)] == [True, False, True]
    assert listed(store) == [("t-1.g2", 2)]


def test_tries_add_up_to_who_has_the_message_and_why_others_do_not(store: NotificationStore) -> None:
    store.write(MESSAGE)
    for number, told in enumerate(
        (
            DeliveryRecord(sent=frozenset({1}), problems={0: "HTTP 500"}, tries=1, at="a", by="w-1"),
            DeliveryRecord(problems={0: "HTTP 503"}, tries=2, at="b", by="w-2"),
        ),
        start=1,
    ):
        assert claim(store, number)
        store.end_try(MESSAGE, told)
    assert claim(store, 3)

    assert store.read_tries("t-1.g2", 2) == DeliveryRecord(
        sent=frozenset({1}), problems={0: "HTTP 503"}, tries=2, at="b", by="w-2"
    )
    assert store.read_tries("t-1.g2", 0) == DeliveryRecord()


def test_closed_message_is_gone_but_for_what_became_of_it(records: BlobRecords, store: NotificationStore) -> None:
    store.write(MESSAGE)
    assert claim(store, 1)
    told = DeliveryRecord(sent=frozenset({0, 1}), tries=1, at="a", by="w-1")

    store.close(MESSAGE, told)
    store.close(MESSAGE, DeliveryRecord(tries=1))

    assert (listed(store), store.read("t-1.g2")) == ([], None)
    assert list(records.blobs.list_keys("notify/")) == []
    assert store.find_told("sweep", "t-1.g2") == told


def test_try_without_its_message_is_no_message(store: NotificationStore) -> None:
    assert claim(store, 1)

    assert listed(store) == []


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"{}", b'{"schema": 9}', b'{"schema": 1, "experiment": "e", "sinks": [{"webhook": "https://x"}]}'],
)
def test_message_that_cannot_be_read_is_passed_over(data: bytes) -> None:
    blobs = MemoryBlobs()
    blobs.put("notify/t-1.g2.json", data)
    blobs.put("notify/t-1.g2.try1.json", data)
    blobs.put("notify/.hidden", data)
    blobs.put("notify/t-1.g2.json~", data)
    store = NotificationStore(blobs)

    assert (listed(store), store.read("t-1.g2")) == ([("t-1.g2", 1)], None)
    assert store.read_tries("t-1.g2", 1) == DeliveryRecord(tries=1)
