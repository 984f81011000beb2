"""Preemption notices: a cloud, or an operator, announces that this machine will be taken away.

A watch asks each source in a thread of its own until the first notice. Workers use the same sources
(`runtime/worker/notices.py`). Nothing here loads an HTTP client before a cloud is asked.
"""

import calendar
import errno
import io
import json
import os
import threading
import time

from runtime.shim.common import say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, List, Optional, Tuple

METADATA_URL = "http://169.254.169.254"
"""Google's metadata server, and Amazon's."""
GCE_NOTICE_S = 30.0
"""From the notice to the machine's end. https://cloud.google.com/compute/docs/instances/preemptible"""
END_S = 5.0
"""How long before a machine's end its command is gone, so that the record can still be told."""
CLOUD_EVERY_S = 5.0
FILE_EVERY_S = 0.5
ANSWER_S = 2.0
"""How long a request waits for its answer."""
FIRST_S = 10.0
"""How long the first attempt waits for the first look at every source."""


class CloudNotice(object):
    """An announcement that this machine will be taken away. Times are seconds since 1970."""

    def __init__(self, source: str, text: str, deadline: "Optional[float]" = None) -> None:
        self.source = source
        """`file`, `gce` or `ec2`."""
        self.text = text
        """The notice in one line for people."""
        self.at = time.time()
        self.deadline = deadline
        """The end of the machine, None if it is not known."""

    def end_by(self, grace: float) -> float:
        """When a command with this grace period has to be gone."""
        return self.at + grace if self.deadline is None else self.deadline - END_S


def time_for_checkpoint(room: float, grace: float, lead: float) -> float:
    """Return how many of the `room` seconds until its end a command has for a checkpoint before it gets TERM.

    That is `lead`, or the rest of the room after the grace period, but at least half of the room.
    """
    return max(0.0, min(lead, max(room - grace, room / 2)))


class CloudNoticeWatch(object):
    """Asks its sources, one thread for each, and calls `on_notice` with the first notice, once."""

    def __init__(self, sources: "List[Any]", on_notice: "Callable[[CloudNotice], None]") -> None:
        self._on_notice = on_notice
        self._looked = [(source, threading.Event()) for source in sources]
        self._stop = threading.Event()
        self._lock = threading.Lock()

    def start(self) -> None:
        for each in self._looked:
            thread = threading.Thread(target=self._watch, args=each, name="notices")
            thread.daemon = True
            thread.start()

    def stop(self) -> None:
        """Return at once; a request that is under way ends by its time-out, and its answer is dropped."""
        self._stop.set()

    def wait(self, seconds: float) -> None:
        """Return once every source has been asked, whether or not it answered, or after `seconds`."""
        until = time.monotonic() + seconds
        for _, looked in self._looked:
            looked.wait(max(0.0, until - time.monotonic()))

    def _watch(self, source: "Any", looked: "threading.Event") -> None:
        while not self._stop.is_set():
            # The second look follows at once, since the first one of a source that can wait for a change does not wait.
            due = time.monotonic() + (source.every_s if looked.is_set() else 0.0)
            try:
                notice = source.ask()
            # One bad answer must not end the watch: metadata servers answer 503 while they are updated.
            # HTTPException is no OSError, and naming it here would import http.client on machines that need none.
            except Exception:
                notice = None
            if notice is not None:
                self._pass_on(notice)
            looked.set()
            self._stop.wait(max(0.0, due - time.monotonic()))

    def _pass_on(self, notice: "CloudNotice") -> None:
        with self._lock:
            if not self._stop.is_set():
                self._stop.set()
                self._on_notice(notice)


def watch(wanted: "Dict[str, Any]", asked: "Any") -> None:
    """Watch the sources that an order names, `{"clouds": ["gce", "ec2"], "file": PATH}`, and have `asked` hear the notice.

    Returns once each was asked, so that no attempt begins on a machine that is already going.
    """

    def hear(notice: "CloudNotice") -> None:
        say("notice from %s: %s" % (notice.source, notice.text))
        asked.hear(notice)

    sources: List[Any] = [_CLOUDS[cloud]() for cloud in wanted.get("clouds") or ()]
    if wanted.get("file"):
        sources.append(FileSource(wanted["file"]))
    watching = CloudNoticeWatch(sources, hear)
    watching.start()
    watching.wait(FIRST_S)


class FileSource(object):
    """A file whose existence is a notice, with its first line as the text."""

    def __init__(self, path: str, every_s: float = FILE_EVERY_S) -> None:
        self.path, self.every_s = path, every_s

    def ask(self) -> "Optional[CloudNotice]":
        """Return the notice, or None."""
        try:
            with io.open(self.path, encoding="utf-8", errors="replace") as opened:
                text = opened.read(4096)
        except (IOError, OSError) as problem:
            if problem.errno == errno.ENOENT:
                return None
            text = ""  # The path is not a readable file.
        return CloudNotice("file", text.strip().partition("\n")[0] or "`%s` exists" % self.path)


class GceSource(object):
    """Compute Engine and TPU VMs. https://cloud.google.com/compute/docs/metadata/overview"""

    def __init__(self, url: "Optional[str]" = None, every_s: float = CLOUD_EVERY_S, answer_s: float = ANSWER_S) -> None:
        place = os.environ.get("GCE_METADATA_HOST")
        self.url = url or ("http://" + place if place else METADATA_URL)
        self.every_s, self.answer_s = every_s, answer_s
        self.tag = ""
        """The version of the last answer about a preemption; the server waits for another one."""

    def ask(self) -> "Optional[CloudNotice]":
        """Return the notice, or None. A preemption is seen at once: the time between two looks is spent waiting for it.

        Raises `OSError` or `ValueError` if the server gives no answer.
        """
        seconds = int(self.every_s) if self.tag else 0
        query = "?wait_for_change=true&timeout_sec=%d&last_etag=%s" % (seconds, self.tag) if seconds else ""
        if self._read("preempted", query, seconds).upper() == "TRUE":
            notice = CloudNotice("gce", "Compute Engine preempts this machine")
            notice.deadline = notice.at + GCE_NOTICE_S
            return notice
        event = self._read("maintenance-event")
        if event.upper().startswith("TERMINATE"):
            # A minute ahead, or an hour where the machine has accelerators; the server does not say which.
            return CloudNotice("gce", "Compute Engine ends this machine for maintenance (%s)" % event)
        return None

    def _read(self, key: str, query: str = "", seconds: float = 0.0) -> str:
        url = "%s/computeMetadata/v1/instance/%s" % (self.url, key)
        status, body, headers = _request("GET", url + query, {"Metadata-Flavor": "Google"}, self.answer_s + seconds)
        if status == 404:
            return ""
        # A proxy or a captive portal may answer anything; only the server itself sends this header.
        if status != 200 or headers.get("Metadata-Flavor") != "Google":
            raise ValueError("%s answered %d" % (url, status))
        if key == "preempted":
            self.tag = headers.get("ETag") or ""
        return body.strip()


class Ec2Source(object):
    """Spot instances, by the second version of the service, which asks for a token first.

    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
    """

    TOKEN_SECONDS = 21600

    def __init__(self, url: "Optional[str]" = None, every_s: float = CLOUD_EVERY_S, answer_s: float = ANSWER_S) -> None:
        place = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT")
        self.url = (url or place or METADATA_URL).rstrip("/")
        self.every_s, self.answer_s = every_s, answer_s
        self.token = ""

    def ask(self) -> "Optional[CloudNotice]":
        """Return the notice, or None. Raises `OSError` or `ValueError` if the service gives no answer."""
        status, body = self._read("spot/instance-action")
        if status == 401:
            # The token aged: get another, once.
            self.token = ""
            status, body = self._read("spot/instance-action")
        if status == 404:
            return None
        if status != 200:
            raise ValueError("%s answered %d" % (self.url, status))
        return self._parse(body)

    def _read(self, key: str) -> "Tuple[int, str]":
        if not self.token:
            headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(self.TOKEN_SECONDS)}
            status, body = self._request("PUT", "api/token", headers)
            if status != 200:
                raise ValueError("%s answered %d when asked for a token" % (self.url, status))
            self.token = body
        return self._request("GET", "meta-data/" + key, {"X-aws-ec2-metadata-token": self.token})

    def _request(self, method: str, path: str, headers: "Dict[str, str]") -> "Tuple[int, str]":
        status, body, _ = _request(method, "%s/latest/%s" % (self.url, path), headers, self.answer_s)
        if body.lstrip().startswith("<"):
            # The service never answers with a page, so this is a proxy or a captive portal.
            raise ValueError("%s answered with a page" % self.url)
        return status, body

    @staticmethod
    def _parse(body: str) -> "CloudNotice":
        """Read an action, which is a notice even if its details cannot be read."""
        action, deadline = "take away", None
        try:
            said = json.loads(body)
            action = str(said["action"])
            deadline = float(calendar.timegm(time.strptime(said["time"], "%Y-%m-%dT%H:%M:%SZ")))
        except (ValueError, KeyError, TypeError):
            pass
        return CloudNotice("ec2", "EC2 will %s this machine" % action, deadline)


_CLOUDS: "Dict[str, Any]" = {"gce": GceSource, "ec2": Ec2Source}


def _request(method: str, url: str, headers: "Dict[str, str]", timeout: float) -> "Tuple[int, str, Any]":
    """Send a short request straight to the address, past any proxy of the environment."""
    # Here and not above: it costs 3 MB that only machines of a cloud have to spend.
    import urllib.error
    import urllib.request

    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, headers=headers, method=method)
    try:
        with opener.open(request, timeout=timeout) as answer:
            return answer.status, answer.read(65536).decode("utf-8", "replace"), answer.headers
    except urllib.error.HTTPError as problem:
        with problem:
            return problem.code, "", problem.headers
