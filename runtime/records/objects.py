"""Objects of a store, read and written many at a time: decoded, created once, and named by their content."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timedelta
from threading import Lock
from typing import TYPE_CHECKING, Final, TypeVar

from runtime.clock import Clock, SystemClock
from runtime.errors import StoreUnavailable
from runtime.records import codec
from runtime.records.blobs.base import PAUSES_S, BlobInfo, Blobs
from runtime.tasks.model import hex_digest

# Loading executors takes a while, and a worker on the embedded file never uses them.
if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

from runtime.records.layout import BLOB

REPORTED: Final = 1_000
"""Things that cannot be decoded and are said by one store object; more help nobody."""
A = TypeVar("A")
B = TypeVar("B")


class Objects:
    """Reads and writes what lies in `Blobs`; the parts of a store build on it."""

    def __init__(self, blobs: Blobs, *, clock: Clock | None = None) -> None:
        self.url = blobs.url
        self.blobs = blobs
        self._clock: Clock = clock or SystemClock()
        self._skew = ClockSkew()
        self._reported: set[str] = set()
        """Keys of what cannot be decoded, each reported once."""
        self._pool: ThreadPoolExecutor | None = None
        self._lock = Lock()

    def put_blob(self, data: bytes, *, prefix: str = "payloads") -> str:
        key = f"{prefix}/{hex_digest(data)}"
        self.blobs.create(key, data)
        return self._address(key)

    def has_blob(self, reference: str) -> bool:
        key = "/".join(reference.split("/")[-2:])
        return next(iter(self.blobs.list_keys(key)), None) == key

    def get_blob(self, reference: str) -> bytes:
        """Only the last two parts of the reference count, so a share that is mounted elsewhere will do."""
        key = "/".join(reference.split("/")[-2:])
        # A reference may come from anybody's message.
        data = self.blobs.get(key) if BLOB.fullmatch(key) else None
        if data is None:
            raise StoreUnavailable(
                f"`{reference}` is not in record store `{self.url}`",
                hint="was it removed, or written to another store?",
                retryable=False,
            )
        if hex_digest(data) != key.rpartition("/")[2]:
            raise codec.damaged(reference, "its content is not what its name says")
        return data

    def _address(self, key: str) -> str:
        path = self.blobs.path(key)
        return f"{self.url}/{key}" if path is None else str(path)

    def _create_or_read(self, key: str, data: bytes) -> bytes | None:
        """None if created now, else what was there first, which may be this call's own data after a retry."""
        for pause in PAUSES_S:
            if self.blobs.create(key, data):
                return None
            existing = self.blobs.get(key)
            if existing is not None:
                return existing
            # S3 refuses while another's conditional write is on its way, and that one may fail yet.
            time.sleep(pause)
        raise StoreUnavailable(f"`{self._address(key)}` was refused as existing, yet it is not there")

    def _decoded(self, key: str, data: bytes, decode: Callable[[bytes, str], A]) -> list[A]:
        """What `decode` makes of it, or nothing where that cannot be done, which is said once."""
        try:
            return [decode(data, self._address(key))]
        except codec.UNDECODABLE as problem:
            self._report(key, problem.message)
            return []

    def _report(self, key: str, problem: str) -> None:
        if key not in self._reported and len(self._reported) < REPORTED:
            self._reported.add(key)
            import logging  # only when there is something to say: loading it takes as long as all of this module

            logging.getLogger(__name__).warning("%s; passed over", problem)

    def _read_all(self, keys: Iterable[str]) -> Iterator[tuple[str, bytes]]:
        """In order; what is gone meanwhile is passed over."""
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

    def _start(self, call: Callable[[], B]) -> Future[B]:
        from concurrent.futures import Future

        if self.blobs.parallel > 1:
            return self._executor().submit(call)
        done: Future[B] = Future()
        done.set_result(call())
        return done

    def _executor(self) -> ThreadPoolExecutor:
        from concurrent.futures import ThreadPoolExecutor

        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self.blobs.parallel, thread_name_prefix="records")
            return self._pool

    def close(self) -> None:
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(cancel_futures=True)
        self.blobs.close()


class ClockSkew:
    """How far this machine's clock is ahead of the store's, learned from objects that this process created."""

    def __init__(self) -> None:
        self.fresh: tuple[str, datetime, datetime] | None = None
        """The key that this process created last, and the times before and after."""
        self.skew: timedelta | None = None

    def learn(self, infos: Iterable[BlobInfo]) -> datetime | None:
        """Take the store's own time of what this process created last, and return it, if that is among `infos`."""
        fresh = self.fresh
        stored = next((info.modified for info in infos if fresh and info.key == fresh[0]), None)
        if fresh is not None and stored is not None:
            _, asked, answered = fresh
            # Between the two it may have been any time.
            self.skew = asked - stored if stored < asked else min(timedelta(0), answered - stored)
        return stored
