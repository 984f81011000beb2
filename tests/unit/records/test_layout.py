"""The names of a store's objects, which people, scripts and older releases rely on."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from runtime.end_reasons import EndReason
from runtime.records.base import WorkerSeen, settle_record
from runtime.records.blobs import Blobs
from runtime.records.blobs.bucket import BucketBlobs
from runtime.records.blobs.folder import FolderBlobs
from runtime.records.control_commands import pause_order
from runtime.records.memory import MemoryRecords
from runtime.records.store import BlobRecords
from runtime.tasks.history import EndedNote, Record, StartedMark, mark_of
from runtime.tasks.model import Task, TaskState
from runtime.testing import FakeClock, sample_task
from tests.fakes.gcs import GcsServer

AT = datetime(2026, 1, 1, tzinfo=UTC)

NAMES = [
    "attempts/t-a0c29eed7fe0ee5daf2bdbe1/g1/a1.ended.json",
    "attempts/t-a0c29eed7fe0ee5daf2bdbe1/g1/a3.started.json",
    "attempts/t-lab17/g2/a2.ended.json",
    "claims/af2bdbe1/00000",
    "closed/af2bdbe1/t-a0c29eed7fe0ee5daf2bdbe1.g1.failed",
    "counters/af2bdbe1/node%201%2Fa+RANDOM/1767225600000-s3-f1-c0-x0",
    "experiments/339b6516-Lab@17.json",
    "experiments/af2bdbe1-sample.json",
    "homes/c/t-lab17.json",
    "logs/t-a0c29eed7fe0ee5daf2bdbe1/a1.log",
    "manifests/af2bdbe1/00000-1-f383647bf5e39c54.jsonl",
    "manifests/af2bdbe1/00000-1-f383647bf5e39c54.sent",
    "marks/339b6516/t-lab17.g2.expired.json",
    "orders/%2Edefault/RANDOM.json",
    "payloads/2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824",
    "probe/create-only.json",
    "records/339b6516/c/t-lab17.g2.json",
    "records/af2bdbe1/a/t-a0c29eed7fe0ee5daf2bdbe1.g1.json",
    "values/RANDOM",
    "workers/node%201%2Fa.json",
]


def record_of(task: Task, state: TaskState, *, token: str, value: object = None) -> Record:
    return Record(
        task_id=task.id,
        generation=task.generation,
        experiment=task.experiment,
        state=state,
        token=token,
        reason=EndReason.APP_FAILED,
        ended_at=AT,
        attempts=1,
        value=value,
    )


Names = Callable[[], list[str]]


@pytest.fixture(params=["memory", "folder", "bucket"])
def place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Blobs, Names]]:
    """A place for objects, and a way around it to their names."""
    if request.param == "memory":
        memory = MemoryRecords().blobs
        yield memory, lambda: list(memory.list_keys(""))
    elif request.param == "folder":
        files = (path for path in tmp_path.rglob("*") if path.is_file())
        yield FolderBlobs(tmp_path), lambda: sorted(str(path.relative_to(tmp_path)) for path in files)
    else:
        server = GcsServer().start()
        server.make_bucket("lab")
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        bucket = BucketBlobs("gs://lab/p")
        yield bucket, lambda: sorted(name.removeprefix("p/") for name in server.buckets["lab"])
        bucket.close()
        server.stop()


def test_objects_have_the_names_that_they_always_had(
    place: tuple[Blobs, Names], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.records.store._proven", set())
    blobs, names = place
    store = BlobRecords(blobs, clock=FakeClock(AT))
    ours = sample_task()
    foreign = sample_task(id="t-lab17", experiment="Lab@17", generation=2)
    store.check()
    store.put_experiment(ours.experiment, queue="default")
    store.mark_sent(store.put_part(ours.experiment, 0, ['{"id": "1"}']))
    store.put_blob(b"hello")
    store.record_started(ours, StartedMark("a3", "node", AT, alone=False))
    store.record_ended(ours, EndedNote(token="a1", reason=EndReason.APP_FAILED, ended_at=AT))
    store.record_ended(foreign, EndedNote(token="a2", reason=EndReason.APP_FAILED, ended_at=AT))
    settle_record(store, record_of(ours, TaskState.SUCCEEDED, token="a3", value="x" * 100_000))
    expired = record_of(foreign, TaskState.EXPIRED, token="a2")
    settle_record(store, expired, mark_of(expired, foreign))
    store.unmark(ours.id, 1, TaskState.FAILED)
    store.append_log(ours.id, "a1", b"said")
    store.put_order(".default", pause_order(AT))
    store.put_worker(WorkerSeen(worker="node 1/a", host="node", queue="default", seen_at=AT, started_at=AT, slots=1))
    store.put_counters("node 1/a", {ours.experiment: {TaskState.SUCCEEDED: 3, TaskState.FAILED: 1}})

    found = [
        re.sub(r"(?<=\+)[0-9a-f]{8}(?=/)|(?<=^orders/%2Edefault/)[0-9a-f]{16}|(?<=^values/).*", "RANDOM", key)
        for key in names()
    ]
    if isinstance(blobs, BucketBlobs):
        # Objects cannot grow, so a log lies in parts.
        log = "logs/t-a0c29eed7fe0ee5daf2bdbe1/a1"
        assert f"{log}.00000.log" in found
        found[found.index(f"{log}.00000.log")] = f"{log}.log"
    assert found == NAMES
