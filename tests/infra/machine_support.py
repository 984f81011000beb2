"""A simulated machine to boot: its metadata server, its secrets, and `docker` and `systemctl` that only log calls."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

TOKEN = "ya29.token-of-the-machine"

TOOLS = {
    "systemctl": """\
#!/bin/bash
echo "systemctl $*" >>"$NOTES"
""",
    "docker": """\
#!/bin/bash
echo "docker $*" >>"$NOTES"
case "$1" in
  login) cat >"$DOCKER_CONFIG/config.json" ;;
  image) grep -qxF "$3" "$IMAGES/here" 2>/dev/null ;;
  pull)
    if grep -qxF "$2" "$IMAGES/registry" 2>/dev/null; then
      echo "$2" >>"$IMAGES/here"
    else
      echo "Error response from daemon: manifest for $2 not found"
      exit 1
    fi
    ;;
esac
""",
    "apt-get": """\
#!/bin/bash
echo "apt-get $*" >>"$NOTES"
""",
}


@dataclass
class MetadataServer:
    """Google's `metadata.google.internal` as a VM sees it, and Secret Manager beside it."""

    attributes: dict[str, str] = field(default_factory=dict)
    versions: dict[str, list[str | None]] = field(default_factory=dict)
    """Secret → values, oldest first; None is a disabled version."""
    denied: set[str] = field(default_factory=set)
    reported: list[tuple[str, str]] = field(default_factory=list)
    """Guest attributes in the order in which they were set."""
    guest_attributes: bool = True

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._etag = 1
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._server.server_port}"

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def set(self, attributes: Mapping[str, str]) -> None:
        with self._changed:
            self.attributes = dict(attributes)
            self._etag += 1
            self._changed.notify_all()

    def last(self, key: str) -> str | None:
        return next((value for name, value in reversed(self.reported) if name == key), None)

    def values(self, key: str) -> list[str]:
        return [value for name, value in self.reported if name == key]

    def get(self, path: str, query: Mapping[str, list[str]]) -> tuple[int, str]:
        if path == "instance/service-accounts/default/token":
            return 200, json.dumps({"access_token": TOKEN, "expires_in": 3000})
        if path == "instance/attributes/":
            with self._changed:
                if query.get("wait_for_change") == ["true"]:
                    asked = query["last_etag"]
                    self._changed.wait_for(lambda: asked != [str(self._etag)], float(query["timeout_sec"][0]))
                return 200, json.dumps(self.attributes)
        key = path.removeprefix("instance/attributes/")
        return (200, self.attributes[key]) if key in self.attributes else (404, "")

    @property
    def etag(self) -> str:
        return str(self._etag)

    def access(self, version: str) -> tuple[int, Any]:
        secret, _, number = version.partition("/versions/")
        values = self.versions.get(secret, [])
        if secret in self.denied:
            return 403, {"error": {"code": 403, "message": "Permission denied"}}
        chosen = len(values) if number == "latest" else int(number)
        if not 1 <= chosen <= len(values):
            return 404, {"error": {"code": 404, "message": f"Secret [{secret}] not found or has no versions."}}
        value = values[chosen - 1]
        if value is None:
            name = f"projects/123/secrets/{secret.rpartition('/')[2]}/versions/{chosen}"
            text = f"Secret Version [{name}] is in DISABLED state."
            return 400, {"error": {"code": 400, "message": text, "status": "FAILED_PRECONDITION"}}
        return 200, {"payload": {"data": base64.b64encode(value.encode()).decode()}}


def _handler(server: MetadataServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            if parts.path.startswith("/secretmanager.googleapis.com/v1/"):
                if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                    return self.respond(401, "{}")
                status, value = server.access(parts.path.split("/v1/")[1].removesuffix(":access"))
                return self.respond(status, json.dumps(value))
            if self.headers.get("Metadata-Flavor") != "Google":
                return self.respond(403, "no flavor")
            return self.respond(*server.get(parts.path.removeprefix("/computeMetadata/v1/"), parse_qs(parts.query)))

        def do_PUT(self) -> None:
            value = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
            prefix = "/computeMetadata/v1/instance/guest-attributes/runtime/"
            if not server.guest_attributes or not self.path.startswith(prefix):
                return self.respond(403, "")
            server.reported.append((self.path.removeprefix(prefix), value))
            return self.respond(200, "")

        def respond(self, status: int, text: str) -> None:
            data = text.encode()
            self.send_response(status)
            self.send_header("ETag", server.etag)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


class Machine:
    """A folder that serves as a machine's root, with tools that log their calls."""

    def __init__(self, folder: Path, metadata: Mapping[str, str]) -> None:
        self.root, self._tools, self._images = folder / "root", folder / "bin", folder / "images"
        self._notes = folder / "notes"
        for each in (self.root / "etc/systemd/system", self.root / "run", self._tools, self._images):
            each.mkdir(parents=True)
        for name, text in TOOLS.items():
            tool = self._tools / name
            tool.write_text(text)
            tool.chmod(0o755)
        self._notes.write_text("")
        self.server = MetadataServer()
        self.server.set(metadata)

    @property
    def environment(self) -> dict[str, str]:
        return {
            **{name: value for name, value in os.environ.items() if name in ("HOME", "LANG", "TMPDIR")},
            "PATH": f"{self._tools}:{os.environ['PATH']}",
            "NOTES": str(self._notes),
            "IMAGES": str(self._images),
            "RUNTIME_RAY_ROOT": str(self.root),
            "RUNTIME_RAY_WAIT_S": "0.05",
            "GCE_METADATA_HOST": self.server.address,
            "RUNTIME_GOOGLE_API": f"http://{self.server.address}",
        }

    @property
    def notes(self) -> list[str]:
        return self._notes.read_text().splitlines()

    def forget_notes(self) -> None:
        self._notes.write_text("")

    def push_image(self, image: str) -> None:
        with (self._images / "registry").open("a") as file:
            file.write(f"{image}\n")

    def boot(self) -> subprocess.Popen[str]:
        """Run the boot script from the metadata, as the guest agent does."""
        return self._start(["bash", "-c", self.server.attributes["startup-script"]])

    def run(self, *command: str) -> subprocess.Popen[str]:
        """Run a command of the installed `machine.py`."""
        return self._start([str(self.root / "opt/runtime-ray/machine.py"), *command])

    def _start(self, command: list[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def text(self, path: str) -> str:
        return (self.root / path).read_text()

    def mode(self, path: str) -> str:
        return oct((self.root / path).stat().st_mode & 0o777)

    def files(self) -> Iterator[Path]:
        return (path for path in self.root.rglob("*") if path.is_file())

    def snapshot(self) -> dict[str, tuple[str, int]]:
        """Return every file with its bytes and modification time."""
        return {
            str(path.relative_to(self.root)): (path.read_text(errors="replace"), path.stat().st_mtime_ns)
            for path in self.files()
            if "run/" not in str(path.relative_to(self.root)) and path.name != "machine.py"
        }


def finish(process: subprocess.Popen[str], timeout_s: float = 240) -> tuple[int, str]:
    try:
        out, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        out, _ = process.communicate()
        raise AssertionError(f"did not end in {timeout_s} s:\n{out}") from None
    return process.returncode, out
