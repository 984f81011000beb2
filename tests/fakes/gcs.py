"""Google Cloud Storage as our object-store library uses it: the XML API, with preconditions that hold.

Objects can be put at once or in parts, copied, read, deleted and listed page by page, with and without a delimiter.
`x-goog-if-generation-match: 0` is checked under a lock together with the write; the emulators available for
installation do not do that.
"""

from __future__ import annotations

import bisect
import re
import threading
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from hashlib import md5
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

from tests.fakes.faults import FaultyServer, Request, Response

PAGE = 1000


class StoredObject(NamedTuple):
    data: bytes
    generation: int
    modified: datetime


class GcsServer(FaultyServer):
    """Buckets are created by `make_bucket`; a missing bucket answers 404."""

    def __init__(self) -> None:
        super().__init__()
        self.buckets: dict[str, dict[str, StoredObject]] = {}
        self._sorted: dict[str, list[str]] = {}
        self._generation = 0
        self._writes = threading.Lock()
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.least_part = 5 << 20
        self.clock_offset = timedelta(0)
        """The lead of the server's clock over this machine's."""
        self.conditional = True
        """False ignores preconditions, as an unsafe store does."""
        self.ranges = True
        """False answers a request for a range with the whole object, as some proxies do."""

    @property
    def environment(self) -> dict[str, str]:
        return {"STORAGE_EMULATOR_HOST": self.url}

    def make_bucket(self, name: str) -> None:
        self.buckets.setdefault(name, {})

    def fill(self, bucket: str, keys: Iterable[str], data: bytes = b"") -> None:
        """Store many objects at once, without requests."""
        now = datetime.now(UTC)
        self.buckets[bucket].update((key, StoredObject(data, 1, now)) for key in keys)
        self._sorted.pop(bucket, None)

    def answer(self, request: Request) -> Response:
        parts = urlsplit(request.path)
        bucket, _, key = parts.path.lstrip("/").partition("/")
        bucket, key = unquote(bucket), unquote(key)
        query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        if bucket not in self.buckets:
            return Response(404, body=b"<Error><Code>NoSuchBucket</Code></Error>")
        with self._writes:
            match request.method:
                case "POST" | "PUT" | "DELETE" if "uploads" in query or "uploadId" in query:
                    return self._upload(bucket, key, query, request)
                case "PUT" if "x-goog-copy-source" in request.headers:
                    return self._copy(bucket, key, request)
                case "PUT":
                    return self._put(bucket, key, request)
                case "DELETE":
                    return self._delete(bucket, key)
                case "GET" if not key:
                    return self._list(bucket, query)
                case "GET" | "HEAD":
                    return self._get(bucket, key, request.headers.get("range", "") if self.ranges else "")
        return Response(405)

    def _put(self, bucket: str, key: str, request: Request) -> Response:
        stored = self.buckets[bucket].get(key)
        wanted = request.headers.get("x-goog-if-generation-match")
        if self.conditional and wanted is not None and int(wanted) != (stored.generation if stored else 0):
            return Response(412, body=b"<Error><Code>PreconditionFailed</Code></Error>")
        self._generation += 1
        now = datetime.now(UTC) + self.clock_offset
        self.buckets[bucket][key] = StoredObject(request.body, self._generation, now)
        if stored is None and bucket in self._sorted:
            bisect.insort(self._sorted[bucket], key)
        return Response(200, {"ETag": f'"{self._generation}"', "x-goog-generation": str(self._generation)})

    def _copy(self, bucket: str, key: str, request: Request) -> Response:
        there, _, source = unquote(request.headers["x-goog-copy-source"]).lstrip("/").partition("/")
        found = self.buckets.get(there, {}).get(source)
        if found is None:
            return Response(404, body=b"<Error><Code>NoSuchKey</Code></Error>")
        made = self._put(bucket, key, replace(request, body=found.data))
        body = f"<CopyObjectResult><ETag>{made.headers['ETag']}</ETag></CopyObjectResult>" if made.status == 200 else ""
        return replace(made, body=body.encode() or made.body)

    def _upload(self, bucket: str, key: str, query: dict[str, str], request: Request) -> Response:
        """Join the parts in the order that the last request names; each but the last has at least 5 MiB."""
        if request.method == "POST" and "uploads" in query:
            name = f"upload-{len(self.uploads)}"
            self.uploads[name] = {}
            text = f"<InitiateMultipartUploadResult><UploadId>{name}</UploadId></InitiateMultipartUploadResult>"
            return Response(200, body=text.encode())
        parts = self.uploads.get(query["uploadId"])
        if parts is None:
            return Response(404, body=b"<Error><Code>NoSuchUpload</Code></Error>")
        if request.method == "PUT":
            parts[int(query["partNumber"])] = request.body
            return Response(200, {"ETag": f'"{md5(request.body).hexdigest()}"'})
        del self.uploads[query["uploadId"]]
        if request.method == "DELETE":
            return Response(204)
        named = re.findall(r"<PartNumber>(\d+)</PartNumber><ETag>(.+?)</ETag>", unescape(request.body.decode()))
        wrong = [n for n, tag in named if tag != f'"{md5(parts.get(int(n), b"")).hexdigest()}"']
        if wrong or not named:
            return Response(400, body=b"<Error><Code>InvalidPart</Code></Error>")
        pieces = [parts[int(number)] for number, _ in named]
        if any(len(piece) < self.least_part for piece in pieces[:-1]):
            return Response(400, body=b"<Error><Code>EntityTooSmall</Code></Error>")
        made = self._put(bucket, key, replace(request, body=b"".join(pieces), headers={}))
        text = f"<CompleteMultipartUploadResult><ETag>{made.headers['ETag']}</ETag></CompleteMultipartUploadResult>"
        return replace(made, body=text.encode())

    def _delete(self, bucket: str, key: str) -> Response:
        if self.buckets[bucket].pop(key, None) is None:
            return Response(404, body=b"<Error><Code>NoSuchKey</Code></Error>")
        if bucket in self._sorted:
            names = self._sorted[bucket]
            del names[bisect.bisect_left(names, key)]
        return Response(204)

    def _get(self, bucket: str, key: str, wanted: str) -> Response:
        stored = self.buckets[bucket].get(key)
        if stored is None:
            return Response(404, body=b"<Error><Code>NoSuchKey</Code></Error>")
        headers = {
            "ETag": f'"{stored.generation}"',
            "x-goog-generation": str(stored.generation),
            "Last-Modified": format_datetime(stored.modified, usegmt=True),
            "x-length": str(len(stored.data)),
        }
        if found := re.fullmatch(r"bytes=(\d+)-(\d*)", wanted):
            first, size = int(found[1]), len(stored.data)
            if first >= size:
                return Response(416, body=b"<Error><Code>InvalidRange</Code></Error>")
            last = min(int(found[2] or size - 1), size - 1)
            headers |= {"Content-Range": f"bytes {first}-{last}/{size}", "x-length": str(last + 1 - first)}
            return Response(206, headers, stored.data[first : last + 1])
        return Response(200, headers, stored.data)

    def _list(self, bucket: str, query: dict[str, str]) -> Response:
        objects = self.buckets[bucket]
        if bucket not in self._sorted:
            self._sorted[bucket] = sorted(objects)
        names = self._sorted[bucket]
        prefix = query.get("prefix", "")
        if delimiter := query.get("delimiter"):
            names = _roll_up(names, prefix, delimiter)
        # A page begins after its token; if both `start-after` and the token are given, the later one counts.
        after = max(query.get("start-after", ""), bytes.fromhex(query.get("continuation-token", "")).decode())
        first = max(bisect.bisect_left(names, prefix), bisect.bisect_right(names, after) if after else 0)
        limit = min(int(query.get("max-keys", PAGE)), PAGE)
        last = bisect.bisect_left(names, prefix + "\U0010ffff")
        page = names[first : min(first + limit, last)]
        rows = "".join(
            f"<Contents><Key>{escape(key)}</Key><Generation>{found.generation}</Generation>"
            f"<LastModified>{found.modified:%Y-%m-%dT%H:%M:%S.%fZ}</LastModified>"
            f'<ETag>"{found.generation}"</ETag><Size>{len(found.data)}</Size></Contents>'
            if (found := objects.get(key))
            else f"<CommonPrefixes><Prefix>{escape(key)}</Prefix></CommonPrefixes>"
            for key in page
        )
        more = first + limit < last
        token = f"<NextContinuationToken>{page[-1].encode().hex()}</NextContinuationToken>" if more else ""
        text = (
            f'<?xml version="1.0" encoding="UTF-8"?><ListBucketResult><Name>{bucket}</Name>'
            f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}{rows}</ListBucketResult>"
        )
        return Response(200, {"Content-Type": "application/xml"}, text.encode())


def _roll_up(names: list[str], prefix: str, delimiter: str) -> list[str]:
    """List the names that begin with `prefix`, up to the first delimiter after it, without duplicates."""
    found = []
    for name in names[bisect.bisect_left(names, prefix) :]:
        if not name.startswith(prefix):
            break
        first, cut, _ = name[len(prefix) :].partition(delimiter)
        if not found or found[-1] != prefix + first + cut:
            found.append(prefix + first + cut)
    return found
