"""Ray's API for jobs as a head answers: 500 with a traceback for a taken id, 404 in plain text for an unknown one.

Nothing runs: a job that is submitted is RUNNING until a test, or `stop`, changes it. `restart` forgets all jobs.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar, Final, Self

ENDED: Final = ("STOPPED", "SUCCEEDED", "FAILED")


class RayHead(ThreadingHTTPServer):
    daemon_threads = True
    first: ClassVar[str] = "RUNNING"
    """Status of a job that was submitted."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.jobs: dict[str, dict[str, Any]] = {}
        self.drivers: list[dict[str, Any]] = []
        """Programs that connected by themselves."""
        self.submitted: list[str] = []
        """Ids of all submissions that were accepted, in any session."""
        self.hides: set[str] = set()
        """Ids that the next GET does not know yet."""
        self.statuses: list[dict[str, Any]] = []
        """What becomes of the next submissions; the others have the status `first`."""
        self.actors: list[str] = []
        """States of a job's own actor, one for each time that it is asked for."""
        self.hosts: list[str] = []
        """Addresses of the nodes that are alive beside the head."""
        self.session = 1
        self.broken: int | None = None
        """Status of every answer to a GET."""
        self.refuses: set[str] = set()
        """Ids of jobs that are neither stopped nor deleted, for an error of the head."""
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
        self.jobs, self.drivers, self.broken = {}, [], None
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
        if self.server.broken:
            return self._say(self.server.broken, "not now")
        if self.path == "/api/version":
            return self._say(200, {"ray_version": "2.60.0", "session_name": f"session_{self.server.session}"})
        if self.path == "/nodes?view=summary":
            nodes = [{"raylet": {"nodeManagerAddress": each, "state": "ALIVE"}} for each in self.server.hosts]
            return self._say(200, {"data": {"summary": nodes}})
        if self.path == "/api/cluster_status":
            return self._say(200, {"data": {}})
        if self.path.startswith("/api/v0/actors?"):
            assert "filter_values=_ray_internal_job_actor_j-" in self.path
            found = [{"state": state} for state in self.server.actors[:1]]
            self.server.actors = self.server.actors[1:]
            return self._say(200, {"data": {"result": {"result": found}}})
        name = self._name()
        if not name:
            return self._say(200, [*self.server.jobs.values(), *self.server.drivers])
        if name in self.server.hides or name not in self.server.jobs:
            self.server.hides.discard(name)
            return self._say(404, f"Job {name} does not exist")
        if self.path.endswith("/logs"):
            return self._say(200, {"logs": "driver: hello\n"})
        return self._say(200, self.server.jobs[name])

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        if self.path == "/restart":
            if self.server.answers_restart:
                self.server.restart()
            return self._say(200, None)
        if self.path.endswith("/stop") and self._name() in self.server.refuses:
            return self._say(500, "Traceback (most recent call last):\n  File …\nRuntimeError: its actor is gone")
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
        status = self.server.statuses.pop(0) if self.server.statuses else {"status": self.server.first}
        self.server.jobs[name] = {**body, **status}
        self.server.submitted.append(name)
        return self._say(200, {"submission_id": name})

    def do_DELETE(self) -> None:
        known = self.server.jobs.get(self._name())
        if known is None:
            return self._say(404, f"Job {self._name()} does not exist")
        if known["status"] not in ENDED or self._name() in self.server.refuses:
            return self._say(500, "Traceback (most recent call last):\n  File …\nRuntimeError: it has not ended")
        del self.server.jobs[self._name()]
        return self._say(200, {"deleted": True})
