"""Ray's API for jobs as a head answers: 500 with a traceback for a taken id, 404 in plain text for an unknown one.

Nothing runs: a job that is submitted is RUNNING until a test, or `stop`, changes it. `restart` forgets all jobs.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, Self

ENDED: Final = ("STOPPED", "SUCCEEDED", "FAILED")


class RayHead(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.jobs: dict[str, dict[str, Any]] = {}
        self.drivers: list[dict[str, Any]] = []
        """Programs that connected by themselves."""
        self.submitted: list[str] = []
        """Ids of all submissions that were accepted, in any session."""
        self.session = 1
        self.silent = False
        self.answers_restart = True
        """Whether `POST /restart`, which is no path of Ray's, restarts it."""
        self._thread = threading.Thread(target=self.serve_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def restart(self) -> None:
        self.jobs, self.drivers, self.silent = {}, [], False
        self.session += 1


class _Answers(BaseHTTPRequestHandler):
    server: RayHead

    def log_message(self, *_: object) -> None:
        pass

    def _say(self, status: int, value: object) -> None:
        data = value.encode() if isinstance(value, str) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _name(self) -> str:
        return self.path.split("/")[3]

    def do_GET(self) -> None:
        if self.server.silent:
            return self._say(503, "not now")
        if self.path == "/api/version":
            return self._say(200, {"ray_version": "2.60.0", "session_name": f"session_{self.server.session}"})
        name = self._name()
        if not name:
            return self._say(200, [*self.server.jobs.values(), *self.server.drivers])
        if name not in self.server.jobs:
            return self._say(404, f"Job {name} does not exist")
        return self._say(200, self.server.jobs[name])

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        if self.path == "/restart":
            if self.server.answers_restart:
                self.server.restart()
            return self._say(200, None)
        if self.path.endswith("/stop"):
            known = self.server.jobs.get(self._name())
            if known is None:
                return self._say(404, f"Job {self._name()} does not exist")
            if known["status"] not in ENDED:
                known["status"] = "STOPPED"
            return self._say(200, {"stopped": True})
        name = body["submission_id"]
        if name in self.server.jobs:
            said = f"ValueError: Job with submission_id {name} already exists. Please use another."
            return self._say(500, f"Traceback (most recent call last):\n  File …\n{said}")
        self.server.jobs[name] = {**body, "status": "RUNNING"}
        self.server.submitted.append(name)
        return self._say(200, {"submission_id": name})

    def do_DELETE(self) -> None:
        known = self.server.jobs.get(self._name())
        if known is None:
            return self._say(404, f"Job {self._name()} does not exist")
        if known["status"] not in ENDED:
            return self._say(500, "Traceback (most recent call last):\n  File …\nRuntimeError: it has not ended")
        del self.server.jobs[self._name()]
        return self._say(200, {"deleted": True})
