"""An image registry with canned answers, and with bearer tokens like Google's."""

from __future__ import annotations

import base64
import http.server
import json
import threading
from collections.abc import Mapping
from typing import Any

Answers = Mapping[str, tuple[int, dict[str, Any] | str, dict[str, str]]]
"""Path → status, body, headers."""


def serve_registry(
    answers: Answers, seen: list[tuple[str, str]], password: str | None = None
) -> http.server.ThreadingHTTPServer:
    """Start a server on this machine; the caller shuts it down and closes it."""
    handler = type("Handler", (FakeRegistry,), {"answers": answers, "seen": seen, "password": password})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    return server


class FakeRegistry(http.server.BaseHTTPRequestHandler):
    """Uses bearer tokens like Google's registry, with its own realm."""

    answers: Answers
    seen: list[tuple[str, str]]
    password: str | None

    def do_GET(self) -> None:
        authorization = self.headers.get("Authorization", "")
        self.seen.append((self.path, authorization))
        host = self.headers["Host"]
        if self.path.startswith("/token"):
            good = authorization == "Basic " + coded(f"user:{self.password}")
            self._answer(200 if good else 401, {"token": "t0"}, {})
        elif self.password is not None and authorization != "Bearer t0":
            challenge = f'Bearer realm="http://{host}/token",service="{host}",scope="repository:lab/w:pull"'
            self._answer(401, {}, {"WWW-Authenticate": challenge})
        else:
            self._answer(*self.answers.get(self.path, (404, {}, {})))

    def _answer(self, status: int, body: dict[str, Any] | str, headers: dict[str, str]) -> None:
        data = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


def coded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
