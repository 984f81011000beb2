"""The preemption notices that a worker heeds: its settings, and which of the sources it asks.

The sources are the shim's (`runtime/shim/notices.py`): a file if one is named, Google's metadata server if the firmware
names Compute Engine, Amazon's if it names EC2. On any other machine nothing is asked over the network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from runtime.errors import InvalidValue
from runtime.shim import notices as sources

PREEMPTED_EXIT: Final = 75
"""Exit code of a job's command that gives way to a notice and wants to be started again (EX_TEMPFAIL)."""


@dataclass(frozen=True, slots=True)
class PreemptionNotice:
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
    every: timedelta = timedelta(seconds=sources.CLOUD_EVERY_S)
    file_every: timedelta = timedelta(seconds=sources.FILE_EVERY_S)
    timeout: timedelta = timedelta(seconds=sources.ANSWER_S)
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


def answer_notice(notice: PreemptionNotice, environ: Mapping[str, str]) -> int:
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


class NoticeWatch:
    """Watches inside the context until the first notice, in threads, one of which calls `on_notice` with it.

    Does nothing, without a thread, if it has no source to ask.
    """

    def __init__(
        self, settings: NoticeSettings, on_notice: Callable[[PreemptionNotice], None], *, root: Path = Path("/")
    ) -> None:
        self._sources = _choose_sources(settings, root)
        self._watch = sources.CloudNoticeWatch(self._sources, lambda seen: on_notice(_translate(seen)))

    def __enter__(self) -> NoticeWatch:
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Return at once; a request that is under way ends by its time-out, and its answer is dropped."""
        self._watch.stop()


def _translate(seen: sources.CloudNotice) -> PreemptionNotice:
    at = datetime.fromtimestamp(seen.at, UTC)
    deadline = None if seen.deadline is None else at + timedelta(seconds=seen.deadline - seen.at)
    return PreemptionNotice(seen.source, at, deadline, seen.text)


def _choose_sources(settings: NoticeSettings, root: Path) -> list[Any]:
    found: list[Any] = []
    if settings.file is not None:
        found.append(sources.FileSource(str(settings.file), settings.file_every.total_seconds()))
    here = find_cloud(root) if settings.clouds else None
    times = settings.every.total_seconds(), settings.timeout.total_seconds()
    if "gce" in settings.clouds and (settings.gce_url or here == "gce"):
        found.append(sources.GceSource(settings.gce_url or sources.METADATA_URL, *times))
    if "ec2" in settings.clouds and (settings.ec2_url or here == "ec2"):
        found.append(sources.Ec2Source(settings.ec2_url or sources.METADATA_URL, *times))
    return found


def _read_line(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
