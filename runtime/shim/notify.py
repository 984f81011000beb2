"""Messages about the end of a job, to webhooks, topics of Pub/Sub and commands; docs/notifications.md has the rules.

A shim claims each message in the record root, sends it, and marks it as sent. A claim without such a mark is sent again by
`runtime keep`, under the same id. The URL of a webhook is a secret: no message, claim or error here has one.
"""

import base64
import functools
import hashlib
import http.client
import io
import json
import os
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request

from runtime.faults import reach
from runtime.shim.cloud import MAY_PASS, Google
from runtime.shim.common import CLAIMS, HOST, AlreadyClaimed, SetupFailed, say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, Iterable, Mapping, Optional, Sequence, Tuple

NOTIFY_S = 30.0
"""How long a message may take, with all tries; those of a job are sent at the same time."""
NOTIFY_ANSWER_S = 9.0
NOTIFY_TRIES = 3
NOTIFY_PAUSE_S = 0.5
"""Pause before the second try; the third comes after four times as much."""
TOPIC_SCOPE = "https://www.googleapis.com/auth/pubsub"


class DeliveryFailure(Exception):
    """A message was not taken; the text says why, and never has the address."""


class NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: the address of a webhook is a secret, and another host should not see what it is sent."""

    def redirect_request(self, *_):
        return None


def find_urls(order, folder):
    """The URLs of webhooks in files that the launch left, by their names. They are read before the runs begin, because the files are
    removed with the last result."""
    found = {}
    for name in [sink["webhook"] for sink in order["notify"]["sinks"] if "webhook" in sink]:
        path = (order.get("secrets") or {}).get(name)
        try:
            if path:
                with io.open(os.path.join(folder, path), encoding="utf-8") as opened:
                    found[name] = opened.read()
        except (IOError, OSError):
            pass  # the message says so
    return found


def notify(order, record, urls):
    """Send the messages of a job that has ended and that nobody has claimed yet. A problem here fails no job."""
    if not order.get("notify"):
        return
    try:
        event = find_event(order, record.outcomes())
        if event is not None:
            _send_all(order, record, event, urls)
    except Exception as problem:
        say("cannot send notifications: %s" % type(problem).__name__)


def find_event(
    order: "Mapping[str, Any]", outcomes: "Iterable[Tuple[int, str, int, int]]"
) -> "Optional[Dict[str, Any]]":
    """The message about a job whose runs all have ended, else None. `outcomes` are (index, reason, code, attempt).

    Equal results have equal ids; those of a job that was retried have another.
    """
    ended = {index: (reason, code, attempt) for index, reason, code, attempt in outcomes}
    if not set(map(str, ended)).issuperset(order["runs"]):
        return None
    found = [(index,) + ended[index] for index in sorted(map(int, order["runs"]))]
    counts: "Dict[str, int]" = {}
    for _, reason, _, _ in found:
        counts[reason] = counts.get(reason, 0) + 1
    failed = [reason for _, reason, _, _ in found if reason not in ("succeeded", "cancelled")]
    state = "failed" if failed else "cancelled" if "cancelled" in counts else "succeeded"
    about = order["notify"]
    text = json.dumps([order["job"], order.get("forgiven") or {}, found], sort_keys=True)
    runs = "" if len(found) == 1 else ": " + ", ".join("%d %s" % (counts[each], each) for each in sorted(counts))
    reason = failed[0] if failed else state
    place = " on %s" % about["target"] if about.get("target") else ""
    ended_as = "was cancelled" if state == "cancelled" else state
    said = " (%s)" % reason if len(found) == 1 and reason != state else runs
    return {
        "id": hashlib.sha256(text.encode("utf-8")).hexdigest()[:24],
        "job": order["job"],
        "name": about["name"],
        "owner": about["owner"],
        "target": about.get("target", ""),
        "state": state,
        "reason": reason,
        "counts": counts,
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "text": "job %s (%s)%s %s%s" % (about["name"], order["job"][:10], place, ended_as, said),
    }


def wants(sink: "Mapping[str, Any]", event: "Mapping[str, Any]") -> bool:
    """Whether a message goes to this sink."""
    return sink["on"] in ("ended", event["state"])


def make_claim(event: "Mapping[str, Any]", number: int, began: float, problem: str = "") -> str:
    """The text of a claim, from which the message can be sent again."""
    claim = {"event": event, "sink": number, "began": began, "at": time.time(), "by": HOST}
    return json.dumps(dict(claim, **({"problem": problem} if problem else {})), sort_keys=True)


def claim_name(event: "Mapping[str, Any]", number: int) -> str:
    return "%s/%s.%s.%d" % (CLAIMS, event["job"], event["id"], number)


def sent_name(event: "Mapping[str, Any]", number: int) -> str:
    """The mark of a message that was sent, in the job's folder."""
    return "%s/%s.%d.sent" % (CLAIMS, event["id"], number)


def _send_all(order, record, event, urls):
    began = time.time()
    sending = []
    for number, sink in enumerate(order["notify"]["sinks"]):
        if wants(sink, event) and _claim(record, event, number, began):
            reach("shim.notice_claimed")
            find_url = functools.partial(_find_url, order, sink, urls)
            sending.append(MessageSender(sink, number, event, find_url, record.folder))
    for each in send_together(sending):
        if each.problem:
            say("notification %d was not sent: %s" % (each.number, each.problem))
            record.write_common(claim_name(event, each.number), make_claim(event, each.number, began, each.problem))
        else:
            reach("shim.notice_sent")
            record.write(sent_name(event, each.number), "", lambda: True)
            record.drop_common(claim_name(event, each.number))


def _claim(record, event, number, began):
    """Whether this call claimed a message. Another shim may have sent it, and given its claim up since."""
    if record.read(sent_name(event, number)) is not None:
        return False
    try:
        record.create_common(claim_name(event, number), make_claim(event, number, began))
    except AlreadyClaimed:
        return False
    if record.read(sent_name(event, number)) is None:
        return True
    record.drop_common(claim_name(event, number))
    return False


class MessageSender(threading.Thread):
    """Sends one message; it may hang for longer than its sender waits."""

    def __init__(self, sink, number, event, find_url, folder=None, quiet=False):
        # type: (Mapping[str, Any], int, Mapping[str, Any], Callable[[], str], Optional[str], bool) -> None
        threading.Thread.__init__(self)
        self.daemon = True
        self.sink, self.number, self.event, self.find_url, self.folder = sink, number, event, find_url, folder
        self.quiet = quiet
        self.problem = "no answer within %d s" % NOTIFY_S
        self.child = None  # type: Optional[subprocess.Popen[bytes]]
        """The command of a sink that is one."""

    def run(self):
        try:
            deliver(self.sink, self.event, self.find_url, self.folder, self.quiet, began=self._note)
            self.problem = ""
        except DeliveryFailure as problem:
            self.problem = str(problem)
        except Exception as problem:
            self.problem = type(problem).__name__  # its text may have the address

    def _note(self, child):
        self.child = child

    def stop(self) -> None:
        """End a command that still runs; nobody else would once its sender has gone."""
        if self.child is not None and self.child.poll() is None:
            _end(self.child)


def send_together(sending: "Sequence[MessageSender]") -> "Sequence[MessageSender]":
    """Send messages at the same time, and return them once all are sent or their time is over."""
    for each in sending:
        each.start()
    until = time.monotonic() + NOTIFY_S + 2.0
    for each in sending:
        each.join(max(0.0, until - time.monotonic()))
    return sending


def _find_url(order, sink, urls):
    """The URL of the webhook: from the file that the launch left, by this machine's own account, or from a variable."""
    name = sink["webhook"]
    if name in urls:
        return urls[name]
    if name in (order.get("secrets") or {}):
        raise DeliveryFailure("the file with its URL was gone when its shim began")
    if name in (order.get("machine_secrets") or {}):
        from runtime.shim.machine_secrets import read_secrets

        try:
            return read_secrets({name: order["machine_secrets"][name]})[name]
        except SetupFailed as problem:
            raise DeliveryFailure(str(problem))
    return os.environ.get(name, "")


def deliver(
    sink: "Mapping[str, Any]",
    event: "Mapping[str, Any]",
    find_url: "Callable[[], str]",
    folder: "Optional[str]" = None,
    quiet: bool = False,
    began: "Callable[[subprocess.Popen[bytes]], None]" = lambda child: None,
) -> None:
    """Send a message to its sink. A command runs in `folder`, and `began` gets it; what it prints is dropped if `quiet`.
    Raises `DeliveryFailure`."""
    body = json.dumps(event, sort_keys=True).encode("utf-8")
    if "webhook" in sink:
        post(find_url().strip(), body)
    elif "topic" in sink:
        _publish(sink["topic"], body, event)
    else:
        _run(sink["command"], body, folder, subprocess.DEVNULL if quiet else 2, began)


def post(url: str, body: bytes, headers: "Optional[Mapping[str, str]]" = None) -> None:
    """Send a body to a URL, and again while a failure may pass. Raises `DeliveryFailure`."""
    try:
        parts = urllib.parse.urlsplit(url)
        known = parts.scheme in ("https", "http") and parts.hostname
    except ValueError:
        known = False
    if not known:
        raise DeliveryFailure("its secret holds no URL that begins with https:// or http://")
    for number in range(NOTIFY_TRIES):
        time.sleep(NOTIFY_PAUSE_S * 4 ** (number - 1) if number else 0)
        problem, passes = _post_once(url, body, headers or {})
        if not problem:
            return
        if not passes:
            break
    raise DeliveryFailure(problem)


def _post_once(url, body, headers):
    """The problem, empty if the receiver took the body, and whether it may pass."""
    # A name of a cluster or of this machine is behind no proxy.
    handlers = [NoRedirects()] + ([urllib.request.ProxyHandler({})] if url.startswith("http:") else [])
    try:
        request = urllib.request.Request(url, data=body, headers=dict(headers), method="POST")
        request.add_header("Content-Type", "application/json")
        request.add_header("User-Agent", "research-runtime")
        with urllib.request.build_opener(*handlers).open(request, timeout=NOTIFY_ANSWER_S):
            return "", False
    except urllib.error.HTTPError as refused:
        refused.close()
        also = ", a redirect, which is not followed" if 300 <= refused.code < 400 else ""
        return "the receiver answered HTTP %d%s" % (refused.code, also), refused.code in MAY_PASS
    except (IOError, OSError) as problem:
        cause = getattr(problem, "reason", problem)
        if "CERTIFICATE_VERIFY_FAILED" in str(cause):
            return "the receiver's certificate is not valid", False
        if isinstance(cause, socket.timeout):
            return "no answer within %d s" % NOTIFY_ANSWER_S, True
        return getattr(cause, "strerror", None) or "the connection was closed", True
    except http.client.InvalidURL:
        return "its secret holds no valid URL", False
    except http.client.HTTPException:
        return "the receiver does not speak HTTP", True
    except ValueError:
        return "its secret holds no valid URL", False


def _publish(topic, body, event):
    """https://cloud.google.com/pubsub/docs/reference/rest/v1/projects.topics/publish"""
    stand_in = os.environ.get("RUNTIME_GOOGLE_API")
    server = stand_in.rstrip("/") + "/" if stand_in else "https://"
    try:
        token = Google(TOPIC_SCOPE).credentials()
    except Exception:
        raise DeliveryFailure("this machine has no credentials of Google")
    attributes = {name: event[name] for name in ("job", "task", "experiment", "state") if name in event}
    attributes["event"] = event["id"]
    message = {"data": base64.b64encode(body).decode("ascii"), "attributes": attributes}
    text = json.dumps({"messages": [message]}).encode("utf-8")
    post("%spubsub.googleapis.com/v1/%s:publish" % (server, topic), text, {"Authorization": "Bearer " + token})


def _end(child: "subprocess.Popen[bytes]") -> None:
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except OSError:
        pass  # nothing of it is left


def _run(words, body, folder, output, began):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RUNTIME_")}
    # A worker holds signals back from its threads, and a child would inherit that for good.
    blocked = signal.pthread_sigmask(signal.SIG_SETMASK, [])
    try:
        child = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            cwd=folder,
            env=environment,
            start_new_session=True,
        )
    except OSError as problem:
        raise DeliveryFailure("its command cannot be started: %s" % os.strerror(problem.errno or 0))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    began(child)
    try:
        child.communicate(body, timeout=NOTIFY_S)
    except subprocess.TimeoutExpired:
        raise DeliveryFailure("its command did not end within %d s" % NOTIFY_S)
    finally:
        _end(child)
        child.wait()
    if child.returncode:
        raise DeliveryFailure("its command ended with exit code %d" % child.returncode)
