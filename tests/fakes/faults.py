"""An HTTP server on 127.0.0.1 that counts its requests, and can fail the way a cloud does.

`FaultProxy` forwards to a real server, `GcsServer` (in gcs.py) answers itself; both take the same faults.
"""

from __future__ import annotations

import http.client
import itertools
import random
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final, Self
from urllib.parse import parse_qsl, urlsplit

_EMPTY_PAGE: Final = (
    "<ListBucketResult><IsTruncated>true</IsTruncated>"
    "<NextContinuationToken>{token}</NextContinuationToken></ListBucketResult>"
)


class Fault(StrEnum):
    STORE_THEN_503 = "store, then answer 503"
    STORE_THEN_DROP = "store, then close the connection without an answer"
    STORE_THEN_STALL = "store, then answer late"
    REFUSE_503 = "answer 503 and store nothing"
    REFUSE_429 = "answer 429 and store nothing"
    REFUSE_403 = "answer 403 and store nothing"
    CONFLICT_409 = "answer 409 as S3 does while another conditional write is under way"
    CUT_OFF = "answer half of the body, then close the connection"
    RESET = "answer half of the body, then reset the connection"
    REPEAT_PAGE = "answer the page of the same listing that went before"
    EMPTY_PAGE = "answer a page with nothing on it and a token for the rest"


@dataclass
class Request:
    method: str
    path: str
    """The path with its query."""
    headers: dict[str, str]
    """Headers by lower-case name."""
    body: bytes

    @property
    def kind(self) -> str:
        return "LIST" if self.method == "GET" and "list-type=2" in self.path else self.method


@dataclass
class Response:
    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    cut: Fault | None = None
    """`CUT_OFF` or `RESET`: how the connection ends after half of the body."""


class FaultyServer:
    """Answers with `answer`. Each fault applies to one of the next requests of its kind; None lets a request pass."""

    stall_s = 3.0
    page_size: int | None = None
    """The most keys on a page of a listing, if fewer than the service's own limit."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        """Count by kind: LIST, GET, PUT, DELETE …"""
        self.log: list[Request] = []
        self._faults: list[tuple[str, Fault | None]] = []
        self._chance: dict[str, Iterator[Fault | None]] = {}
        self._pages: dict[str, Response] = {}
        """The last page of each listing, by its query without the token."""
        self._resumed: dict[str, str] = {}
        """The query that got an empty page, by the token on that page."""
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def start(self) -> Self:
        self._thread.start()
        return self

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def fail_next(self, kind: str, faults: Iterable[Fault | None]) -> None:
        with self._lock:
            self._faults += [(kind, fault) for fault in faults]

    def fail_some(self, kind: str, share: float, faults: Sequence[Fault], *, seed: int) -> None:
        """Fail a random share of the requests of a kind from now on, each with one of `faults`."""
        chance = random.Random(seed)
        with self._lock:
            self._chance[kind] = (chance.choice(faults) if chance.random() < share else None for _ in itertools.count())

    @property
    def faults_left(self) -> int:
        return len(self._faults)

    def forget_faults(self) -> None:
        with self._lock:
            self._faults = []
            self._chance = {}

    def answer(self, request: Request) -> Response:
        raise NotImplementedError

    def handle(self, request: Request) -> Response | None:
        """Answer a request; None closes the connection."""
        with self._lock:
            self.requests[request.kind] += 1
            self.log.append(request)
            index = next((i for i, (kind, _) in enumerate(self._faults) if kind == request.kind), None)
            fault = self._draw(request.kind) if index is None else self._faults.pop(index)[1]
        if request.kind == "LIST":
            return self._answer_listing(request, fault)
        return self._answer_request(request, fault)

    def _draw(self, kind: str) -> Fault | None:
        return next(self._chance[kind]) if kind in self._chance else None

    def _answer_listing(self, request: Request, fault: Fault | None) -> Response | None:
        asked = dict(parse_qsl(urlsplit(request.path).query, keep_blank_values=True))
        token = asked.pop("continuation-token", "")
        path = self._resumed.get(token, request.path)
        if self.page_size is not None and "max-keys=" not in path:
            path += f"&max-keys={self.page_size}"
        request = replace(request, path=path)
        listing = str(sorted(asked.items()))
        if fault is Fault.EMPTY_PAGE:
            token = f"rest-{len(self._resumed)}"
            self._resumed[token] = path
            return Response(200, body=_EMPTY_PAGE.format(token=token).encode())
        if fault is Fault.REPEAT_PAGE and token and listing in self._pages:
            return self._pages[listing]
        response = self._answer_request(request, fault)
        if response is not None and response.status == 200:
            self._pages[listing] = replace(response, cut=None)
        return response

    def _answer_request(self, request: Request, fault: Fault | None) -> Response | None:
        match fault:
            case None | Fault.REPEAT_PAGE | Fault.EMPTY_PAGE:
                return self.answer(request)
            case Fault.CUT_OFF | Fault.RESET:
                return replace(self.answer(request), cut=fault)
            case Fault.REFUSE_503:
                return Response(503, body=b"<Error><Code>SlowDown</Code></Error>")
            case Fault.REFUSE_429:
                return Response(429, body=b"<Error><Code>TooManyRequests</Code></Error>")
            case Fault.REFUSE_403:
                return Response(403, body=b"<Error><Code>AccessDenied</Code></Error>")
            case Fault.CONFLICT_409:
                return Response(409, body=b"<Error><Code>ConditionalRequestConflict</Code></Error>")
            case Fault.STORE_THEN_503:
                self.answer(request)
                return Response(503, body=b"<Error><Code>InternalError</Code></Error>")
            case Fault.STORE_THEN_STALL:
                stored = self.answer(request)
                time.sleep(self.stall_s)
                return stored
            case Fault.STORE_THEN_DROP:
                self.answer(request)
                return None


class FaultProxy(FaultyServer):
    """Forwards everything to the server at `host:port` and adds faults on the way."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self._address = address
        self._local = threading.local()

    def answer(self, request: Request) -> Response:
        connection = http.client.HTTPConnection(self._address, timeout=60)
        try:
            headers = {name: value for name, value in request.headers.items() if name != "connection"}
            connection.request(request.method, request.path, body=request.body or None, headers=headers)
            response = connection.getresponse()
            body = response.read()
            kept = {
                name: value
                for name, value in response.getheaders()
                if name.lower() not in ("connection", "content-length", "transfer-encoding", "date", "server")
            }
            return Response(response.status, kept, body)
        finally:
            connection.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that hang up."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


def _handler(server: FaultyServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True
        wbufsize = 1 << 16

        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            headers = {name.lower(): value for name, value in self.headers.items()}
            response = server.handle(Request(self.command, self.path, headers, body))
            if response is None:
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            self.send_response_only(response.status)
            for name, value in response.headers.items():
                self.send_header(name, value)
            # A HEAD answer states the body's length but has no body; an answer without content has none either.
            self.send_header("Content-Length", response.headers.get("x-length", str(len(response.body))))
            self.end_headers()
            if response.cut is not None:
                self._cut(response)
                return
            if self.command != "HEAD":
                self.wfile.write(response.body)
            self.wfile.flush()

        def _cut(self, response: Response) -> None:
            self.wfile.write(response.body[: len(response.body) // 2])
            self.wfile.flush()
            self.close_connection = True
            if response.cut is Fault.RESET:
                # Closing without lingering resets the connection.
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()
            else:
                self.connection.shutdown(socket.SHUT_RDWR)

        do_PATCH = do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve  # noqa: N815

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler
