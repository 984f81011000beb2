"""Google Cloud Storage as our object-store library speaks to it: the XML API, with preconditions that hold.

Objects can be put, read, deleted and listed page by page. `x-goog-if-generation-match: 0` is checked under a lock
together with the write, which the emulators that one can install do not do.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterable
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from tests.fakes.faults import FaultyServer, Request, Response

PAGE = 1000


class StoredObject(NamedTuple):
    data: bytes
    generation: int
    modified: datetime


class GcsServer(FaultyServer):
    """Buckets come into being by `make_bucket`; a missing one answers 404."""

    def __init__(self) -> None:
        super().__init__()
        self.buckets: dict[str, dict[str, StoredObject]] = {}
        self._sorted: dict[str, list[str]] = {}
        self._generation = 0
        self._writes = threading.Lock()
        self.conditional = True
        """False forgets preconditions, as a store that is not safe does."""

    @property
    def environment(self) -> dict[str, str]:
        return {"STORAGE_EMULATOR_HOST": self.url}

    def make_bucket(self, name: str) -> None:
        self.buckets.setdefault(name, {})

    def fill(self, bucket: str, keys: Iterable[str], data: bytes = b"") -> None:
        """Many objects at once, without requests."""
        now = datetime.now(UTC)
        self.buckets[bucket].update((key, StoredObject(data, 1, now)) for key in keys)
        self._sorted.pop(bucket, None)

    def answer(self, request: Request) -> Response:
        parts = urlsplit(request.path)
        bucket, _, key = parts.path.lstrip("/").partition("/")
        bucket, key = unquote(bucket), unquote(key)
        if bucket not in self.buckets:
            return Response(404, body=b"<Error><Code>NoSuchBucket</Code></Error>")
        with self._writes:
            match request.method:
                case "PUT":
                    return self._put(bucket, key, request)
                case "DELETE":
                    return self._delete(bucket, key)
                case "GET" if not key:
                    query = {name: values[0] for name, values in parse_qs(parts.query).items()}
                    return self._list(bucket, query)
                case "GET" | "HEAD":
                    return self._get(bucket, key)
        return Response(405)

    def _put(self, bucket: str, key: str, request: Request) -> Response:
        stored = self.buckets[bucket].get(key)
        wanted = request.headers.get("x-goog-if-generation-match")
        if self.conditional and wanted is not None and int(wanted) != (stored.generation if stored else 0):
            return Response(412, body=b"<Error><Code>PreconditionFailed</Code></Error>")
        self._generation += 1
        self.buckets[bucket][key] = StoredObject(request.body, self._generation, datetime.now(UTC))
        if stored is None and bucket in self._sorted:
            bisect.insort(self._sorted[bucket], key)
        return Response(200, {"ETag": f'"{self._generation}"', "x-goog-generation": str(self._generation)})

    def _delete(self, bucket: str, key: str) -> Response:
        if self.buckets[bucket].pop(key, None) is None:
            return Response(404, body=b"<Error><Code>NoSuchKey</Code></Error>")
        if bucket in self._sorted:
            names = self._sorted[bucket]
            del names[bisect.bisect_left(names, key)]
        return Response(204)

    def _get(self, bucket: str, key: str) -> Response:
        stored = self.buckets[bucket].get(key)
        if stored is None:
            return Response(404, body=b"<Error><Code>NoSuchKey</Code></Error>")
        headers = {
            "ETag": f'"{stored.generation}"',
            "x-goog-generation": str(stored.generation),
            "Last-Modified": format_datetime(stored.modified, usegmt=True),
            "x-length": str(len(stored.data)),
        }
        return Response(200, headers, stored.data)

    def _list(self, bucket: str, query: dict[str, str]) -> Response:
        objects = self.buckets[bucket]
        if bucket not in self._sorted:
            self._sorted[bucket] = sorted(objects)
        names = self._sorted[bucket]
        prefix = query.get("prefix", "")
        # A page begins after its token; `start-after` and the token may both be given, and the later one counts.
        after = max(query.get("start-after", ""), query.get("continuation-token", ""))
        first = max(bisect.bisect_left(names, prefix), bisect.bisect_right(names, after) if after else 0)
        limit = min(int(query.get("max-keys", PAGE)), PAGE)
        last = bisect.bisect_left(names, prefix + "\U0010ffff")
        page = names[first : min(first + limit, last)]
        rows = "".join(
            f"<Contents><Key>{escape(key)}</Key><Generation>{found.generation}</Generation>"
            f"<LastModified>{found.modified:%Y-%m-%dT%H:%M:%S.%fZ}</LastModified>"
            f'<ETag>"{found.generation}"</ETag><Size>{len(found.data)}</Size></Contents>'
            for key in page
            for found in (objects[key],)
        )
        more = first + limit < last
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        text = (
            f'<?xml version="1.0" encoding="UTF-8"?><ListBucketResult><Name>{bucket}</Name>'
            f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}{rows}</ListBucketResult>"
        )
        return Response(200, {"Content-Type": "application/xml"}, text.encode())
