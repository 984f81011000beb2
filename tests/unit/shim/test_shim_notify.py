"""Messages about the end of a job, by real shims, to a server of this process, to commands and to a stand-in of Pub/Sub."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import pytest

from runtime.shim.notify import find_event
from tests.fakes.gcs import GcsServer
from tests.services_support import find_free_port
from tests.shim_support import JOB, ShimJob, each_python, find_pythons, make_job
from tests.unit.shim.test_shim_bucket import URL, maker

PYTHONS = find_pythons()
OLDEST = PYTHONS[min(PYTHONS, key=lambda version: int(version[2:]))]
SECRET = "canary-4711"
HOOK = "RUNTIME_NOTIFY_0"
SOON = {"NOTIFY_PAUSE_S": 0.01}


class Receiver:
    """Takes messages, after the answers in `answers`; it hangs on an answer of 0 until it is closed."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.answers: list[int] = []
        self.over = threading.Event()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.requests.append((self.path, dict(self.headers)))
                answer = receiver.answers.pop(0) if receiver.answers else 200
                if answer == 0:
                    receiver.over.wait()
                    return
                if answer == 200:
                    receiver.bodies.append(json.loads(body))
                self.send_response(answer)
                if answer == 302:
                    self.send_header("Location", f"ftp://{SECRET}/")
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as running:
        yield running


Make = Callable[..., ShimJob]


@pytest.fixture
def make(tmp_path: Path, receiver: Receiver) -> Make:
    def make_one(
        script: str, *sinks: dict[str, Any], url: str | None = None, python: str = OLDEST, **changes: Any
    ) -> ShimJob:
        told = [{"on": "ended", **each} for each in sinks or ({"webhook": HOOK},)]
        job = make_job(
            tmp_path,
            python,
            script,
            notify={"name": "train", "owner": "ada", "target": "gpu", "sinks": told},
            secrets={HOOK: f"secrets/{HOOK}"},
            **changes,
        )
        (job.folder / "secrets").mkdir(exist_ok=True)
        (job.folder / "secrets" / HOOK).write_text(url or f"{receiver.url}/hooks/{SECRET}?key={SECRET}\n")
        job.constants = dict(SOON)
        return job

    return make_one


def sent(job: ShimJob) -> list[str]:
    return sorted(path.name for path in (job.folder / "notify").glob("*.sent"))


def claims(job: ShimJob) -> list[dict[str, Any]]:
    """The messages that are not known to be sent."""
    return [json.loads(path.read_text()) for path in sorted((job.root / "notify").glob(f"{JOB}.*"))]


def everything(job: ShimJob) -> str:
    """All that the shim wrote, but for the secret itself."""
    files = [path for path in job.root.rglob("*") if path.is_file() and path.parent.name != "secrets"]
    return "".join(path.read_text(errors="replace") for path in files) + job.stdout + job.stderr


@pytest.mark.parametrize("python", each_python())
def test_webhook_hears_once_of_a_job_that_ended_on_every_python(python: str, make: Make, receiver: Receiver) -> None:
    job = make("exit 3", python=python)

    assert job.run() == 1
    assert job.run() == 1

    [body] = receiver.bodies
    assert {name: value for name, value in body.items() if name not in ("at", "id")} == {
        "job": JOB,
        "name": "train",
        "owner": "ada",
        "target": "gpu",
        "state": "failed",
        "reason": "app_failed",
        "counts": {"app_failed": 1},
        "text": f"job train ({JOB[:10]}) on gpu failed (app_failed)",
    }
    assert receiver.requests[0][0] == f"/hooks/{SECRET}?key={SECRET}"
    assert sent(job) == [f"{body['id']}.0.sent"]
    assert claims(job) == []


def test_webhook_hears_of_a_job_whose_secrets_are_removed_as_soon_as_it_has_ended(
    make: Make, receiver: Receiver
) -> None:
    job = make("rm -r ${RUNTIME_PREEMPTED_NOTE%/runs/*}/secrets")

    assert job.run() == 0
    assert [body["state"] for body in receiver.bodies] == ["succeeded"]
    assert not (job.folder / "secrets").exists()
    assert SECRET not in everything(job)


@pytest.mark.parametrize(("on", "heard"), [("failed", 0), ("succeeded", 1), ("ended", 1)])
def test_sink_hears_only_of_the_end_that_it_asks_for(on: str, heard: int, make: Make, receiver: Receiver) -> None:
    job = make("true", {"webhook": HOOK, "on": on})

    assert job.run() == 0

    assert [each["text"] for each in receiver.bodies] == [f"job train ({JOB[:10]}) on gpu succeeded"] * heard


@pytest.mark.parametrize("changes", [{}, {"pack": {"slots": 2}}], ids=["in-turn", "packed"])
def test_array_sends_one_message_after_its_last_run(changes: dict[str, Any], make: Make, receiver: Receiver) -> None:
    runs = {index: {"command": ["sh", "-c", f"exit {index // 2}"]} for index in range(3)}
    job = make("", runs=runs, fold=True, **changes)

    job.run("--indices", "0-1")
    assert receiver.bodies == []
    job.run("--indices", "2")
    job.run("--indices", "0-2")

    [body] = receiver.bodies
    assert (body["state"], body["counts"]) == ("failed", {"succeeded": 2, "app_failed": 1})
    assert body["text"].endswith("failed: 1 app_failed, 2 succeeded")


def test_job_that_was_cancelled_sends_a_message(make: Make, receiver: Receiver) -> None:
    job = make("true")
    (job.folder / "cancel").touch()

    job.run()

    assert [(each["state"], each["text"]) for each in receiver.bodies] == [
        ("cancelled", f"job train ({JOB[:10]}) on gpu was cancelled")
    ]


def test_receiver_that_fails_for_a_while_gets_the_message(make: Make, receiver: Receiver) -> None:
    receiver.answers = [500, 503]
    job = make("true")

    assert job.run() == 0

    assert len(receiver.bodies) == 1
    assert claims(job) == []


@pytest.mark.parametrize(
    ("answers", "problem", "asked"),
    [
        ([500] * 9, "the receiver answered HTTP 500", 3),
        ([404], "the receiver answered HTTP 404", 1),
        ([302], "the receiver answered HTTP 302, a redirect, which is not followed", 1),
    ],
)
def test_message_that_is_refused_stays_with_its_reason(
    answers: list[int], problem: str, asked: int, make: Make, receiver: Receiver
) -> None:
    receiver.answers = answers
    job = make("true")

    assert job.run() == 0

    assert job.results() == {0: ("succeeded", 0, 1)}
    assert [each["problem"] for each in claims(job)] == [problem]
    assert f"shim: notification 0 was not sent: {problem}" in job.stderr.splitlines()
    assert len(receiver.requests) == asked
    assert sent(job) == []
    assert SECRET not in everything(job)


def test_receiver_that_hangs_ends_no_sooner_and_keeps_no_machine(make: Make, receiver: Receiver) -> None:
    receiver.answers = [0] * 9
    job = make("true")
    job.constants |= {"NOTIFY_ANSWER_S": 0.2}

    assert job.run() == 0

    assert job.results() == {0: ("succeeded", 0, 1)}
    assert [each["problem"] for each in claims(job)] == ["no answer within 0 s"]


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        (f"file:///{SECRET}", "its secret holds no URL that begins with https:// or http://"),
        (f"{SECRET}", "its secret holds no URL that begins with https:// or http://"),
        (f"http://[{SECRET}", "its secret holds no URL that begins with https:// or http://"),
        (f"http://127.0.0.1:{SECRET}/", "its secret holds no valid URL"),
        (f"http://127.0.0.1/{SECRET} {SECRET}", "its secret holds no valid URL"),
    ],
)
def test_secret_that_is_no_url_is_said_and_not_shown(url: str, problem: str, make: Make) -> None:
    for python in {OLDEST, PYTHONS[max(PYTHONS, key=lambda version: int(version[2:]))]}:
        job = make("true", url=url, python=python)

        assert job.run() == 0

        assert [each["problem"] for each in claims(job)] == [problem]
        assert SECRET not in everything(job)


def test_nobody_listens_is_said(make: Make) -> None:
    job = make("true", url=f"http://127.0.0.1:{find_free_port()}/{SECRET}")

    assert job.run() == 0

    assert [each["problem"] for each in claims(job)] == ["Connection refused"]
    assert SECRET not in everything(job)


def test_command_of_the_job_does_not_see_the_webhook(make: Make) -> None:
    job = make("env")

    job.run()

    assert HOOK not in job.log()


@pytest.mark.parametrize("point", ["shim.notice_claimed", "shim.notice_sent"])
def test_shim_killed_before_its_mark_leaves_a_claim_to_send_again(point: str, make: Make, receiver: Receiver) -> None:
    job = make("true")
    job.run(RUNTIME_FAULTS=f"{point}=kill")

    job.run()

    [claim] = claims(job)
    assert claim["event"]["state"] == "succeeded"
    assert "problem" not in claim
    assert [each["id"] for each in receiver.bodies] == [claim["event"]["id"]] * (point == "shim.notice_sent")
    assert sent(job) == []


def test_command_gets_the_message_and_no_secret(make: Make, tmp_path: Path) -> None:
    job = make("true", {"command": ["sh", "-c", f"cat > {tmp_path}/told; env >&2"]})

    assert job.run(RUNTIME_NOTIFY_0=SECRET) == 0

    assert json.loads((tmp_path / "told").read_text())["state"] == "succeeded"
    assert claims(job) == []
    assert SECRET not in job.stderr


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (["sh", "-c", "exit 7"], "its command ended with exit code 7"),
        (["no-such-program"], "its command cannot be started: No such file or directory"),
        (["sh", "-c", "sleep 600 & sleep 600"], "its command did not end within 1 s"),
    ],
)
def test_command_that_fails_or_hangs_is_said_and_ends(command: list[str], problem: str, make: Make) -> None:
    job = make("true", {"command": command})
    job.constants |= {"NOTIFY_S": 1.0}

    assert job.run() == 0

    assert [each["problem"] for each in claims(job)] == [problem]


def test_topic_gets_the_message(make: Make, receiver: Receiver) -> None:
    job = make("true", {"topic": "projects/lab/topics/ends"})

    assert job.run(RUNTIME_GOOGLE_API=receiver.url, STORAGE_EMULATOR_HOST=receiver.url) == 0

    [(path, headers)] = receiver.requests
    assert path == "/pubsub.googleapis.com/v1/projects/lab/topics/ends:publish"
    assert headers["Authorization"] == "Bearer anonymous"
    [message] = receiver.bodies[0]["messages"]
    event = json.loads(base64.b64decode(message["data"]))
    assert event["state"] == "succeeded"
    assert message["attributes"] == {"event": event["id"], "job": JOB, "state": "succeeded"}


def test_one_sink_that_fails_keeps_no_message_from_the_others(make: Make, receiver: Receiver, tmp_path: Path) -> None:
    receiver.answers = [404]
    job = make("true", {"webhook": HOOK}, {"command": ["sh", "-c", f"cat > {tmp_path}/told"]})

    job.run()

    assert [each["sink"] for each in claims(job)] == [0]
    assert (tmp_path / "told").exists()


def test_job_in_a_bucket_sends_one_message(tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    server = GcsServer().start()
    try:
        server.make_bucket("lab")
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        about = {"name": "train", "owner": "ada", "sinks": [{"webhook": HOOK, "on": "ended"}]}
        job = maker(tmp_path, OLDEST, URL)("true", notify=about)
        job.environ |= {HOOK: f"{receiver.url}/{SECRET}"}

        assert (job.run(), job.run()) == (0, 0)
    finally:
        server.stop()

    assert [each["text"] for each in receiver.bodies] == [f"job train ({JOB[:10]}) succeeded"]


def test_event_of_a_retried_job_has_another_id() -> None:
    order = {"job": JOB, "runs": {"0": {}}, "notify": {"name": "train", "owner": "ada", "sinks": []}}

    def event(order: dict[str, Any], *outcomes: tuple[int, str, int, int]) -> str:
        found = find_event(order, outcomes)
        assert found
        return str(found["id"])

    first = event(order, (0, "app_failed", 1, 1))
    assert first == event(order, (0, "app_failed", 1, 1))
    assert first != event(order, (0, "app_failed", 1, 2))
    cancelled = event(order, (0, "cancelled", 1, 0))
    assert cancelled != event({**order, "forgiven": {"0": 0}}, (0, "cancelled", 1, 0))
    assert find_event(order, []) is None
