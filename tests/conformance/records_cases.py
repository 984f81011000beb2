"""The record stores under test in the conformance suite, each opened as the product opens it.

To add one, add a line to `STORES`: a function that sets up an empty place and returns the `Place`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from runtime.end_reasons import EndReason
from runtime.queues.sqlite.queue import open_sqlite
from runtime.records import open_records
from runtime.records.base import RecordStore
from runtime.records.control_commands import ControlCommand, OrderKind
from runtime.tasks.history import EndedNote, Mark, Record
from runtime.tasks.model import Task, TaskState
from runtime.tasks.wire import encode_task
from tests.fakes.faults import FaultProxy, FaultyServer
from tests.fakes.gcs import GcsServer

if TYPE_CHECKING:
    from tests.services_support import MotoServer

TEXTS: Final = {
    "plain": "plain",
    "empty": "",
    "half of a pair": "a \udcff b \ud800",
    "nul": "before\0after\0",
    "control": "\x01\x1b[2J\r\n\t\x7f\u2028\ufeff",
    "wide": "ünïcode \U0001f600 \U0010ffff",
    "looks like JSON": '{"a": "\\ud800"}\\',
    "huge": "é" * 40_000,
}
"""Texts that a program may print; every store takes them and returns them unchanged."""

VALUES: Final = {
    "nan": [float("nan"), float("inf"), float("-inf"), -0.0],
    "long number": 10**4000,
    "nested": functools.reduce(lambda inner, _: [inner], range(200), {"end": None}),
    "many": {str(number): [number, None, True] for number in range(1_000)},
    "false": False,
    "zero": 0,
}
"""Values that a function may return beside text."""

REFUSED: Final = {
    "longer number": 10**5000,
    "longer number inside": {"a": [1, 10**5000]},
    "nested too deeply": functools.reduce(lambda inner, _: [inner], range(100_000), []),
    "no JSON": {"a": {1, 2}},
    "key that is no text": {(1, 2): 3},
}
"""Values that no record can hold."""

T0: Final = datetime(2026, 11, 21, 8, 0, 0, tzinfo=UTC)


def put_part_of(store: RecordStore, tasks: Sequence[Task]) -> None:
    """Submit as a queue beside the store does: put a manifest part for each experiment at its next free place."""
    for experiment in dict.fromkeys(task.experiment for task in tasks):
        lines = [encode_task(task) for task in tasks if task.experiment == experiment]
        store.put_part(experiment, len(store.parts(experiment)), lines)


@dataclass
class Place:
    """The place of one store."""

    open: Callable[[], RecordStore]
    """Open the store as another process would; a store in memory has only one view."""
    submit: Callable[[RecordStore, Sequence[Task]], None] = put_part_of
    """Record tasks as submitted, as a submission does."""
    processes: bool = True
    """Whether other processes can open the store by its URL."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables that other processes need to open it."""
    server: FaultyServer | None = None
    """Answers every request of the store, and can be made to fail; None for a store without a network."""
    opened: list[RecordStore] = field(default_factory=list)

    def store(self) -> RecordStore:
        store = self.open()
        self.opened.append(store)
        return store


Factory = Callable[[pytest.FixtureRequest, Path, ExitStack], Place]


def memory(request: pytest.FixtureRequest, folder: Path, cleanup: ExitStack) -> Place:
    store = open_records("memory:")
    return Place(lambda: store, processes=False)


def in_folder(request: pytest.FixtureRequest, folder: Path, cleanup: ExitStack) -> Place:
    root = folder / "the records"
    root.mkdir()
    return Place(lambda: open_records(f"file:{root}"))


def gcs(request: pytest.FixtureRequest, folder: Path, cleanup: ExitStack) -> Place:
    server = GcsServer().start()
    cleanup.callback(server.stop)
    server.make_bucket("lab")
    monkeypatch = request.getfixturevalue("monkeypatch")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
    return Place(lambda: open_records("gs://lab/some/prefix"), environment=server.environment, server=server)


def s3(request: pytest.FixtureRequest, folder: Path, cleanup: ExitStack) -> Place:
    server: MotoServer = request.getfixturevalue("moto_server")
    make_s3_bucket(server, "lab")
    proxy = FaultProxy(server.address).start()
    cleanup.callback(proxy.stop)
    request.getfixturevalue("monkeypatch").setenv("AWS_ENDPOINT_URL", proxy.url)
    environment = server.environment | {"AWS_ENDPOINT_URL": proxy.url}
    return Place(lambda: open_records("s3://lab/some/prefix"), environment=environment, server=proxy)


def make_s3_bucket(server: MotoServer, name: str) -> None:
    import http.client

    connection = http.client.HTTPConnection(server.address)
    connection.request("PUT", f"/{name}")
    assert connection.getresponse().status == 200
    connection.close()


def sqlite(request: pytest.FixtureRequest, folder: Path, cleanup: ExitStack) -> Place:
    queue, _ = open_sqlite(folder / "queue.db")
    cleanup.callback(queue.close)

    def submit(store: RecordStore, tasks: Sequence[Task]) -> None:
        queue.put(tasks)

    return Place(lambda: open_records(f"sqlite:{folder}/queue.db"), submit=submit)


STORES: dict[str, Factory] = {
    "memory": memory,
    "folder": in_folder,
    "gcs": gcs,
    "s3": s3,
    "sqlite": sqlite,
}
REAL_SERVICES = {"s3"}
REMOTE = ("gcs", "s3")
"""Stores behind a network; their `Place` has a `server`."""


@contextmanager
def opened_place(name: str, request: pytest.FixtureRequest, folder: Path) -> Iterator[Place]:
    with ExitStack() as cleanup:
        place = STORES[name](request, folder, cleanup)
        try:
            yield place
        finally:
            for store in place.opened:
                store.close()


def sample_record(task: Task, *, token: str = "a1", state: TaskState = TaskState.SUCCEEDED, **fields: Any) -> Record:
    """Build a small record of `task`; keywords are `Record`'s."""
    reasons = {
        TaskState.SUCCEEDED: EndReason.SUCCEEDED,
        TaskState.FAILED: EndReason.APP_FAILED,
        TaskState.CANCELLED: EndReason.CANCELLED,
        TaskState.EXPIRED: EndReason.EXPIRED,
    }
    values: dict[str, Any] = {"generation": task.generation, "reason": reasons[state], "ended_at": T0} | fields
    return Record(task_id=task.id, experiment=task.experiment, state=state, token=token, **values)


def sample_mark(task: Task, /, state: TaskState = TaskState.FAILED, **fields: Any) -> Mark:
    record = sample_record(task, state=state)
    values: dict[str, Any] = {"message": "it broke", "marked_at": T0, "task": task} | fields
    return Mark(
        task_id=task.id,
        generation=task.generation,
        experiment=task.experiment,
        state=state,
        reason=record.reason,
        **values,
    )


def sample_note(token: str, **fields: Any) -> EndedNote:
    values: dict[str, Any] = {"reason": EndReason.APP_FAILED, "ended_at": T0, "worker": "w-1"} | fields
    return EndedNote(token=token, **values)


def cancel_order(**fields: Any) -> ControlCommand:
    """Build an order; keywords are `ControlCommand`'s."""
    return ControlCommand(kind=OrderKind.CANCEL, at=T0, by="ada@lab", **fields)
