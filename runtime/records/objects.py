"""Objects of a store, read and written many at a time: blobs named by their content, experiments, and manifest parts."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final, TypeVar

from runtime.clock import Clock, SystemClock
from runtime.errors import ObjectDamaged, ObjectGone, PartTaken, StoreUnavailable
from runtime.records import codec
from runtime.records.base import ExperimentSeen, ManifestPart
from runtime.records.blobs import PAUSES_S, BlobInfo, Blobs
from runtime.records.layout import BLOB, EXPERIMENT, PART, experiment_key, experiment_of, matched, quoted, unquoted
from runtime.sanitize import CleanLogger
from runtime.system import system
from runtime.tasks.model import experiment_digest, hex_digest

# Loading executors takes a while, and a worker on the embedded file never uses them.
if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

REPORTED: Final = 1_000
"""Undecodable objects that one store reports at most."""
A = TypeVar("A")
B = TypeVar("B")


class ClockSkew:
    """How far this machine's clock is ahead of the store's, learned from objects that this process created."""

    def __init__(self) -> None:
        self.fresh: tuple[str, datetime, datetime] | None = None
        """The key that this process created last, and the times before and after."""
        self.skew: timedelta | None = None

    def learn(self, infos: Iterable[BlobInfo]) -> datetime | None:
        """Take the store's own time of the object that this process created last, if it is among `infos`; returns it."""
        fresh = self.fresh
        stored = next((info.modified for info in infos if fresh and info.key == fresh[0]), None)
        if fresh is not None and stored is not None:
            _, asked, answered = fresh
            # The store may have taken it at any time between the two.
            self.skew = asked - stored if stored < asked else min(timedelta(0), answered - stored)
        return stored


class Objects:
    """Reads and writes `Blobs`; the parts of a store build on it."""

    def __init__(self, blobs: Blobs, *, clock: Clock | None = None) -> None:
        self.url = blobs.url
        self.blobs = blobs
        self._clock: Clock = clock or SystemClock()
        self._skew = ClockSkew()
        self._reported: set[str] = set()
        """Keys of undecodable objects, each reported once."""
        self._pool: ThreadPoolExecutor | None = None
        self._lock = system.lock()

    def put_blob(self, data: bytes, *, prefix: str = "payloads") -> str:
        key = f"{prefix}/{hex_digest(data)}"
        self.blobs.create(key, data)
        return self._address(key)

    def has_blob(self, reference: str) -> bool:
        key = "/".join(reference.split("/")[-2:])
        return next(iter(self.blobs.list_keys(key)), None) == key

    def put_note(self, reference: str, data: bytes) -> None:
        self.blobs.create(_record_key(reference), data)

    def get_note(self, reference: str) -> bytes | None:
        return self.blobs.get(_record_key(reference))

    def get_blob(self, reference: str) -> bytes:
        """Only the last two parts of the reference count, so a share mounted at another path works too."""
        key = "/".join(reference.split("/")[-2:])
        # A reference may come from anybody's message.
        data = self.blobs.get(key) if BLOB.fullmatch(key) else None
        if data is None:
            raise ObjectGone(reference, store=self.url)
        if hex_digest(data) != key.rpartition("/")[2]:
            raise ObjectDamaged(reference, "its content is not what its name says")
        return data

    def _address(self, key: str) -> str:
        path = self.blobs.path(key)
        return f"{self.url}/{key}" if path is None else str(path)

    def _create_or_read(self, key: str, data: bytes) -> bytes | None:
        """None if this call created it, else the data that was there first; after a retry that may be this call's own."""
        for pause in PAUSES_S:
            if self.blobs.create(key, data):
                return None
            existing = self.blobs.get(key)
            if existing is not None:
                return existing
            # S3 refuses while another's conditional write is on its way, and that one may still fail.
            system.sleep(pause)
        raise StoreUnavailable(f"`{self._address(key)}` was refused as existing, yet it is not there")

    def _decoded(self, key: str, data: bytes, decode: Callable[[bytes, str], A]) -> list[A]:
        """The decoded object; nothing if it cannot be decoded, which is reported once."""
        try:
            return [decode(data, self._address(key))]
        except codec.UNDECODABLE as problem:
            self._report(key, problem.message)
            return []

    def _report(self, key: str, problem: str) -> None:
        if key not in self._reported and len(self._reported) < REPORTED:
            self._reported.add(key)
            CleanLogger(__name__).warning("%s; passed over", problem)

    def _read_all(self, keys: Iterable[str]) -> Iterator[tuple[str, bytes]]:
        """Keys and their data, in order, without objects that were removed meanwhile."""
        found = self._in_parallel(lambda key: (key, self.blobs.get(key)), keys)
        return ((key, data) for key, data in found if data is not None)

    def _in_parallel(self, call: Callable[[A], B], items: Iterable[A]) -> Iterator[B]:
        """`map` with as many calls under way as the backend gains from; a call must not start others this way."""
        if self.blobs.parallel == 1:
            yield from map(call, items)
            return
        under_way: deque[Future[B]] = deque()
        for item in items:
            under_way.append(self._executor().submit(call, item))
            if len(under_way) >= 2 * self.blobs.parallel:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()

    def _executor(self) -> ThreadPoolExecutor:

        with self._lock:
            if self._pool is None:
                self._pool = system.pool(self.blobs.parallel, name="records")
            return self._pool

    def close(self) -> None:
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(cancel_futures=True)
        self.blobs.close()


class BlobManifests(Objects):
    """Experiments, each created with its first task, and manifest parts that list submitted tasks."""

    def __init__(self, blobs: Blobs, *, clock: Clock | None = None) -> None:
        super().__init__(blobs, clock=clock)
        self._known_experiments: set[str] = set()

    def put_experiment(self, experiment: str, *, queue: str | None) -> str | None:
        key = experiment_key(experiment)
        seen = ExperimentSeen(experiment, self._clock.now(), queue)
        existing = self._create_or_read(key, codec.EXPERIMENT.encode(seen))
        self._known_experiments.add(experiment)
        if existing is None:
            return queue
        for known in self._decoded(key, existing, codec.EXPERIMENT.decode):
            if known.queue is not None:
                return known.queue
            if queue is not None:
                # Others may do the same at this moment, for a queue of theirs.
                self.blobs.put(key, codec.EXPERIMENT.encode(replace(known, queue=queue)))
        return None

    def experiments(self) -> list[ExperimentSeen]:
        """All of them; an undecodable one is known by the name in its key, and left out if that was cut."""
        seen = []
        for key, data in self._read_all(
            found[0] for found in matched(self.blobs.list_keys("experiments/"), EXPERIMENT)
        ):
            decoded, name = self._decoded(key, data, codec.EXPERIMENT.decode), experiment_of(key)
            seen += decoded or ([] if name is None else [ExperimentSeen(name, None)])
        return sorted(seen, key=lambda one: one.name)

    def find_experiment(self, experiment: str) -> ExperimentSeen | None:
        key = experiment_key(experiment)
        data = self.blobs.get(key)
        if data is None:
            return None
        return next(iter(self._decoded(key, data, codec.EXPERIMENT.decode)), ExperimentSeen(experiment, None))

    def _see_experiment(self, experiment: str) -> None:
        if experiment not in self._known_experiments:
            self.put_experiment(experiment, queue=None)

    def put_part(self, experiment: str, index: int, lines: Sequence[str], *, queue: str | None = None) -> ManifestPart:
        if any("\n" in line for line in lines):
            raise ValueError("a manifest line holds a line break")
        data = "".join(f"{line}\n" for line in lines).encode()
        name = f"{index:05}-{len(lines)}-{hex_digest(data)[:16]}"
        digest = experiment_digest(experiment)
        self._see_experiment(experiment)
        # The index is claimed first: two submitters of different tasks must not both get it.
        claimed = self._create_or_read(f"claims/{digest}/{index:05}", name.encode())
        if claimed is not None and claimed != name.encode():
            self._record_late(digest, claimed.decode(errors="replace"))
            raise PartTaken(experiment, index)
        if queue is not None:
            # First, so that nobody reads the part without it.
            self.blobs.create(f"manifests/{digest}/{name}.in-{quoted(queue)}", b"")
        key, asked = f"manifests/{digest}/{name}.jsonl", self._clock.now()
        if self.blobs.create(key, data):
            self._skew.fresh = key, asked, self._clock.now()
        sent = claimed is not None and self.blobs.get(f"manifests/{digest}/{name}.sent") is not None
        return ManifestPart(experiment, name, len(lines), sent=sent, queue=queue)

    def _record_late(self, digest: str, name: str) -> None:
        """Leave a note beside a part that was claimed and is not written: it may come after the tasks were listed again."""
        folder = f"manifests/{digest}/"
        if re.fullmatch(PART, f"{folder}{name}.late", re.ASCII) and self.blobs.get(f"{folder}{name}.jsonl") is None:
            self.blobs.create(f"{folder}{name}.late", b"")

    def parts(self, experiment: str) -> list[ManifestPart]:
        written: list[tuple[int, int, str]] = []
        noted: dict[str, set[str]] = {"sent": set(), "late": set()}
        queues: dict[str, str] = {}
        for found in matched(self.blobs.list_keys(f"manifests/{experiment_digest(experiment)}/"), PART):
            if found[4] in noted:
                noted[found[4]].add(found[1])
            elif found[4].startswith("in-"):
                queues[found[1]] = unquoted(found[4].removeprefix("in-"))
            else:
                written.append((int(found[2]), int(found[3]), found[1]))
        return [
            ManifestPart(experiment, name, count, name in noted["sent"], name in noted["late"], queues.get(name))
            for _, count, name in sorted(written)
        ]

    def read_part(self, part: ManifestPart) -> list[str]:
        key = f"manifests/{experiment_digest(part.experiment)}/{part.name}.jsonl"
        data = self.blobs.get(key)
        if data is None:
            raise ObjectGone(self._address(key))
        if not part.name.endswith(hex_digest(data)[:16]):
            raise ObjectDamaged(self._address(key), "its digest is not the one in its name")
        return data.decode(errors="replace").split("\n")[:-1]

    def mark_sent(self, part: ManifestPart) -> None:
        self.blobs.create(f"manifests/{experiment_digest(part.experiment)}/{part.name}.sent", b"")

    def record_late(self, part: ManifestPart) -> None:
        self.blobs.create(f"manifests/{experiment_digest(part.experiment)}/{part.name}.late", b"")


def _record_key(reference: str) -> str:
    return "/".join(reference.split("/")[-2:]) + ".note"
