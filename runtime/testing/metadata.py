"""Stand-ins for the metadata servers of Compute Engine and EC2, on loopback: preemption notices, and the credentials of
the machine."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Final, Self
from urllib.parse import parse_qs, urlsplit

_GCE: Final = "/computeMetadata/v1/instance/"
_EC2: Final = "/latest/meta-data/"


class MetadataServer:
    """Serves the two clouds' paths; tests set the answers."""

    def __init__(self, *, listen: bool = True) -> None:
        """Take a port; with `listen=False` connections are refused until `listen` is called."""
        self.preempted = "FALSE"
        self.maintenance = "NONE"
        self.action: str | None = None
        self.status: int | None = None
        """An HTTP status to answer every request with."""
        self.delay_s = 0.0
        self.genuine = True
        """False answers as a stranger does: without the header of Google's server."""
        self.page: str | None = None
        """A page that a captive portal answers every request with."""
        self.valid_token = "token-1"
        self.google_token = "google-1"
        self.google_email = "worker@p.iam.gserviceaccount.com"
        self.keys: dict[str, str] | None = {"AccessKeyId": "A", "SecretAccessKey": "S", "Token": "T"}
        """Credentials of EC2's role; None while the machine has none."""
        self.requests: list[tuple[str, str]] = []
        """Method and path of each request, without its query."""
        self.waiting = 0
        """How many requests wait for a change now."""
        self._closed = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer._answer(self, "GET")

            def do_PUT(self) -> None:
                outer._answer(self, "PUT")

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler, bind_and_activate=False)
        self._server.daemon_threads = True
        self._server.server_bind()
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        if listen:
            self.listen()

    def listen(self) -> None:
        self._server.server_activate()
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def environment(self) -> dict[str, str]:
        """The variables that lead the clouds' libraries here."""
        return {
            "GCE_METADATA_HOST": self.url.removeprefix("http://"),
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": self.url,
        }

    def announce(self) -> None:
        """Have both clouds say that the machine will be taken away."""
        self.preempted, self.action = "TRUE", '{"action": "terminate"}'

    def call_off(self) -> None:
        """Have neither cloud say so."""
        self.preempted, self.action = "FALSE", None

    def count(self, method: str, path: str) -> int:
        return sum(request == (method, path) for request in self.requests)

    def close(self) -> None:
        self._closed.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, handler: BaseHTTPRequestHandler, method: str) -> None:
        parts = urlsplit(handler.path)
        self.requests.append((method, parts.path))
        self._closed.wait(self.delay_s)
        if self.page is not None:
            status, body = 200, self.page
        else:
            status, body = (self.status, "") if self.status else self._look_up(handler, method, parts.path)
        try:
            handler.send_response(status)
            if self.genuine and self.page is None:
                handler.send_header("Metadata-Flavor", "Google")
                if parts.path.startswith(_GCE):
                    handler.send_header("ETag", _tag(body))
            handler.send_header("Content-Length", str(len(body)))
            handler.end_headers()
            handler.wfile.write(body.encode())
        except OSError:
            pass

    def _look_up(self, handler: BaseHTTPRequestHandler, method: str, path: str) -> tuple[int, str]:
        if path.startswith(_GCE):
            return self._google(handler, path.removeprefix(_GCE)) if method == "GET" else (405, "")
        if (method, path) == ("PUT", "/latest/api/token"):
            return (200, self.valid_token) if handler.headers["X-aws-ec2-metadata-token-ttl-seconds"] else (400, "")
        if method != "GET" or not path.startswith(_EC2):
            return 404, ""
        if handler.headers["X-aws-ec2-metadata-token"] != self.valid_token:
            return 401, ""
        return self._amazon(path.removeprefix(_EC2))

    def _google(self, handler: BaseHTTPRequestHandler, key: str) -> tuple[int, str]:
        if handler.headers["Metadata-Flavor"] != "Google":
            return 403, ""
        match key:
            case "preempted":
                self._wait_for_change(parse_qs(urlsplit(handler.path).query))
                return 200, self.preempted
            case "maintenance-event":
                return 200, self.maintenance
            case "service-accounts/default/token":
                said = {"access_token": self.google_token, "expires_in": 3599, "token_type": "Bearer"}
                return (200, json.dumps(said)) if self.google_token else (404, "")
            case "service-accounts/default/email":
                return (200, self.google_email) if self.google_token else (404, "")
        return 404, ""

    def _wait_for_change(self, query: dict[str, list[str]]) -> None:
        """Wait as the server does: until the value has another version than the client's, or for `timeout_sec`."""
        if query.get("wait_for_change") != ["true"]:
            return
        until = time.monotonic() + float(query["timeout_sec"][0])
        self.waiting += 1
        while query["last_etag"] == [_tag(self.preempted)] and time.monotonic() < until:
            if self._closed.wait(0.01):
                break
        self.waiting -= 1

    def _amazon(self, key: str) -> tuple[int, str]:
        match key:
            case "spot/instance-action":
                return (200, self.action) if self.action is not None else (404, "")
            case "placement/region":
                return 200, "us-east-1"
            case "iam/security-credentials/":
                return (200, "the-role") if self.keys else (404, "")
            case "iam/security-credentials/the-role" if self.keys:
                return 200, json.dumps(self.keys | {"Expiration": "2999-01-01T00:00:00Z"})
        return 404, ""


def _tag(text: str) -> str:
    return text.encode().hex()
