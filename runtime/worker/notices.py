"""Preemption notices: the cloud, or an operator, announces that this machine will be taken away.

`NoticeWatch` polls in a daemon thread: a file if one is named, Google's metadata server if the firmware names Compute
Engine, Amazon's if it names EC2. On any other machine nothing is asked over the network.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from runtime.errors import InvalidValue
from runtime.units import parse_time
from runtime.values import dataclass

if TYPE_CHECKING:
    from email.message import Message

METADATA_URL: Final = "http://169.254.169.254"
"""Google's metadata server, and Amazon's."""

GCE_NOTICE: Final = timedelta(seconds=30)
"""From the notice to the machine's end. https://cloud.google.com/compute/docs/instances/preemptible"""
PREEMPTED_EXIT: Final = 75
"""Exit code of a job's command that gives way to a notice and wants to be started again (EX_TEMPFAIL)."""


@dataclass(frozen=True, slots=True)
class Notice:
    source: str
    """`file`, `gce` or `ec2`."""
    at: datetime
    """When the notice was seen."""
    deadline: datetime | None
    """The end of the machine, if known."""
    text: str
    """The notice in one line for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticeSettings:
    """The places to ask, and how often. URLs have no path; None asks a cloud only if the firmware names it."""

    file: Path | None = None
    """A file whose existence is a notice, with its first line as the text."""
    gce_url: str | None = None
    ec2_url: str | None = None
    clouds: tuple[str, ...] = ("gce", "ec2")
    """Clouds that may be asked at all."""
    every: timedelta = timedelta(seconds=5)
    file_every: timedelta = timedelta(seconds=0.5)
    timeout: timedelta = timedelta(seconds=2)
    """The time-out of one request."""


def notice_settings_from(environ: Mapping[str, str]) -> NoticeSettings:
    """Read the settings from the environment: RUNTIME_PREEMPTION_FILE, RUNTIME_PREEMPTION_NOTICES=auto|off, and the variables that
    the clouds' own libraries obey: GCE_METADATA_HOST, AWS_EC2_METADATA_SERVICE_ENDPOINT and AWS_EC2_METADATA_DISABLED.
    """
    file = environ.get("RUNTIME_PREEMPTION_FILE")
    notices = environ.get("RUNTIME_PREEMPTION_NOTICES") or "auto"
    if notices not in ("auto", "off"):
        raise InvalidValue("RUNTIME_PREEMPTION_NOTICES", notices, "auto, or off to ask no metadata server")
    gce_host = environ.get("GCE_METADATA_HOST")
    ec2_url = environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT")
    clouds: tuple[str, ...] = ("gce", "ec2") if notices == "auto" else ()
    if environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        clouds = tuple(cloud for cloud in clouds if cloud != "ec2")
    return NoticeSettings(
        file=Path(file) if file else None,
        gce_url=f"http://{gce_host}" if gce_host else None,
        ec2_url=ec2_url.rstrip("/") if ec2_url else None,
        clouds=clouds,
    )


def answer_notice(notice: Notice, environ: Mapping[str, str]) -> int:
    """Return the exit code of a process that gives way to `notice`.

    A job has to be started again. Its shim takes the exit code for a preemption only beside the note that is written
    here; without one, as on a full disk, it takes the command for one that asks to be started again.
    """
    if not environ.get("RUNTIME_JOB_ID"):
        return 0
    if note := environ.get("RUNTIME_PREEMPTED_NOTE"):
        with suppress(OSError):
            Path(note).write_text(f"{notice.text}\n", encoding="utf-8")
    return PREEMPTED_EXIT


def find_cloud(root: Path = Path("/")) -> str | None:
    """Return `gce`, `ec2` or None, by the firmware's name for this machine."""
    firmware = root / "sys/class/dmi/id"
    if _read_line(firmware / "product_name") in ("Google Compute Engine", "Google"):
        return "gce"
    # Nitro machines say so as the vendor; older Xen ones only in the version of the firmware.
    if _read_line(firmware / "sys_vendor") == "Amazon EC2" or "amazon" in _read_line(firmware / "bios_version").lower():
        return "ec2"
    return None


class _Source(Protocol):
    every: timedelta

    def ask(self) -> Notice | None:
        """Return the notice, or None; raises OSError or ValueError if no answer can be had."""


class NoticeWatch:
    """Watches inside the context until the first notice, in a thread, which calls `on_notice` with it.

    Does nothing, without a thread, if it has no source to ask.
    """

    def __init__(
        self, settings: NoticeSettings, on_notice: Callable[[Notice], None], *, root: Path = Path("/")
    ) -> None:
        self._on_notice = on_notice
        self._sources = _choose_sources(settings, root)
        self._stop = threading.Event()

    def __enter__(self) -> NoticeWatch:
        if self._sources:
            threading.Thread(target=self._watch, name="notices", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """Return at once; a request that is under way ends by its time-out, and its answer is dropped."""
        self._stop.set()

    def _watch(self) -> None:
        due = dict.fromkeys(self._sources, 0.0)
        while not self._stop.is_set():
            for source in self._sources:
                now = time.monotonic()
                if now < due[source]:
                    continue
                due[source] = now + source.every.total_seconds()
                try:
                    notice = source.ask()
                # One bad answer must not end the watch: metadata servers answer 503 while they are updated.
                # HTTPException is no OSError, and naming it here would import http.client on machines that need none.
                except Exception:
                    continue
                if notice is not None:
                    if not self._stop.is_set():
                        self._on_notice(notice)
                    return
            self._stop.wait(max(0, min(due.values()) - time.monotonic()))


def _choose_sources(settings: NoticeSettings, root: Path) -> list[_Source]:
    sources: list[_Source] = []
    if settings.file is not None:
        sources.append(_FileSource(settings.file, settings.file_every))
    here = find_cloud(root) if settings.clouds else None
    if "gce" in settings.clouds and (settings.gce_url or here == "gce"):
        sources.append(_GceSource(settings.gce_url or METADATA_URL, settings))
    if "ec2" in settings.clouds and (settings.ec2_url or here == "ec2"):
        sources.append(_Ec2Source(settings.ec2_url or METADATA_URL, settings))
    return sources


class _FileSource:
    def __init__(self, path: Path, every: timedelta) -> None:
        self._path, self.every = path, every

    def ask(self) -> Notice | None:
        try:
            text = self._path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return None
        except OSError:
            # The path is no readable file.
            text = ""
        first = text.strip().partition("\n")[0]
        return Notice("file", datetime.now(UTC), None, first or f"`{self._path}` exists")


class _GceSource:
    """Compute Engine and TPU VMs. https://cloud.google.com/compute/docs/metadata/overview"""

    def __init__(self, url: str, settings: NoticeSettings) -> None:
        self._url, self._settings, self.every = url, settings, settings.every

    def ask(self) -> Notice | None:
        at = datetime.now(UTC)
        if self._read("preempted").upper() == "TRUE":
            return Notice("gce", at, at + GCE_NOTICE, "Compute Engine preempts this machine")
        event = self._read("maintenance-event")
        if event.upper().startswith("TERMINATE"):
            # A minute ahead, or an hour where the machine has accelerators; the server does not say which.
            return Notice("gce", at, None, f"Compute Engine ends this machine for maintenance ({event})")
        return None

    def _read(self, key: str) -> str:
        url = f"{self._url}/computeMetadata/v1/instance/{key}"
        status, body, headers = _request(self._settings, "GET", url, {"Metadata-Flavor": "Google"})
        if status == 404:
            return ""
        # A proxy or a captive portal may answer anything; only the server itself sends this header.
        if status != 200 or headers.get("Metadata-Flavor") != "Google":
            raise ValueError(f"{url} answered {status}")
        return body.strip()


class _Ec2Source:
    """Spot instances, by the second version of the service, which asks for a token first.

    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
    """

    _TOKEN_SECONDS = 21600

    def __init__(self, url: str, settings: NoticeSettings) -> None:
        self._url, self._settings, self.every = url, settings, settings.every
        self._token: str | None = None

    def ask(self) -> Notice | None:
        status, body = self._read("spot/instance-action")
        if status == 401:
            # The token aged: get another, once.
            self._token = None
            status, body = self._read("spot/instance-action")
        if status == 404:
            return None
        if status != 200:
            raise ValueError(f"{self._url} answered {status}")
        return self._parse(body)

    def _read(self, key: str) -> tuple[int, str]:
        if self._token is None:
            headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(self._TOKEN_SECONDS)}
            status, body, _ = _request(self._settings, "PUT", f"{self._url}/latest/api/token", headers)
            if status != 200:
                raise ValueError(f"{self._url} answered {status} when asked for a token")
            self._token = body
        headers = {"X-aws-ec2-metadata-token": self._token}
        status, body, _ = _request(self._settings, "GET", f"{self._url}/latest/meta-data/{key}", headers)
        return status, body

    @staticmethod
    def _parse(body: str) -> Notice:
        """Read an action, which is a notice even if its details cannot be read."""
        action, deadline = "take away", None
        with suppress(ValueError, KeyError, TypeError, InvalidValue):
            said = json.loads(body)
            action, deadline = str(said["action"]), parse_time(said["time"])
        return Notice("ec2", datetime.now(UTC), deadline, f"EC2 will {action} this machine")


def _request(settings: NoticeSettings, method: str, url: str, headers: Mapping[str, str]) -> tuple[int, str, Message]:
    """Send a short request straight to the address, past any proxy of the environment."""
    # Here and not above: it costs 3 MB that only machines of a cloud have to spend.
    import urllib.error
    import urllib.request

    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, headers=dict(headers), method=method)
    try:
        with opener.open(request, timeout=settings.timeout.total_seconds()) as response:
            return response.status, response.read(65536).decode("utf-8", "replace"), response.headers
    except urllib.error.HTTPError as problem:
        with problem:
            return problem.code, "", problem.headers


def _read_line(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
