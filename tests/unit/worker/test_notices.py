"""Preemption notices, from a file and from metadata servers of our own that behave like the clouds'."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runtime.errors import InvalidValue
from runtime.shim.notices import GCE_NOTICE_S, GceSource
from runtime.testing.metadata import MetadataServer
from runtime.worker.notices import NoticeSettings, NoticeWatch, PreemptionNotice, notice_settings_from
from runtime.worker.worker_context import LeaveDecision
from tests.services_support import PATIENCE_S

QUICK: dict[str, Any] = {
    "every": timedelta(seconds=0.02),
    "file_every": timedelta(seconds=0.02),
    "timeout": timedelta(minutes=4),
}


@pytest.fixture
def server() -> Iterator[MetadataServer]:
    server = MetadataServer()
    yield server
    server.close()


class Watching:
    """A quick watch, with the notices that it passed on, and why its source has not answered the last time."""

    def __init__(self, **settings: Any) -> None:
        self.heard: list[PreemptionNotice] = []
        self.problem: str | None = None
        self.watch = NoticeWatch(NoticeSettings(**(QUICK | settings)), self.heard.append, root=Path("/nonexistent"))
        for source in self.watch._sources:
            self._listen(source)
        self.watch.__enter__()

    @property
    def notice(self) -> PreemptionNotice | None:
        return self.heard[0] if self.heard else None

    def _listen(self, source: Any) -> None:
        ask = source.ask

        def noted() -> PreemptionNotice | None:
            try:
                notice: PreemptionNotice | None = ask()
            except Exception as problem:
                self.problem = str(problem)
                raise
            self.problem = None
            return notice

        source.ask = noted

    def stop(self) -> None:
        self.watch.__exit__()
        eventually(lambda: not any(each.name == "notices" for each in threading.enumerate()))


@pytest.fixture
def watch() -> Iterator[Callable[..., Watching]]:
    """`watch(gce_url=…)` starts a quick watch; all are stopped when the test ends."""
    watches: list[Watching] = []

    def start(**settings: Any) -> Watching:
        watches.append(Watching(**settings))
        return watches[-1]

    yield start
    for each in watches:
        each.stop()


def eventually(condition: Callable[[], object], within_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "did not come true"
        time.sleep(0.005)


def notice_of(watching: Watching) -> PreemptionNotice:
    eventually(lambda: watching.notice)
    assert watching.notice
    return watching.notice


def test_no_source_starts_no_thread_and_loads_no_http() -> None:
    code = (
        "import sys, threading; from pathlib import Path\n"
        "from runtime.worker.notices import NoticeSettings, NoticeWatch\n"
        "NoticeWatch(NoticeSettings(), print, root=Path('/nonexistent')).__enter__()\n"
        "assert threading.active_count() == 1\n"
        "loaded = {'urllib.request', 'http.client', 'ssl', 'socket'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )

    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


def test_file_that_appears_is_a_notice(watch: Any, tmp_path: Path) -> None:
    path = tmp_path / "preempt"
    watching = watch(file=path)
    time.sleep(0.06)
    assert watching.notice is None

    (tmp_path / "written").write_text("node 7 drains\nticket 12\n")
    (tmp_path / "written").rename(path)

    notice = notice_of(watching)
    assert (notice.source, notice.deadline, notice.text) == ("file", None, "node 7 drains")


def test_empty_file_names_itself(watch: Any, tmp_path: Path) -> None:
    (tmp_path / "preempt").touch()

    watching = watch(file=tmp_path / "preempt")

    notice = notice_of(watching)
    assert notice.text == f"`{tmp_path / 'preempt'}` exists"


def test_notice_is_passed_on_once(watch: Any, server: MetadataServer) -> None:
    watching = watch(gce_url=server.url)

    server.preempted = "TRUE"

    notice_of(watching)
    eventually(lambda: not any(each.name == "notices" for each in threading.enumerate()))
    assert len(watching.heard) == 1


def test_gce_preemption_has_a_deadline(watch: Any, server: MetadataServer) -> None:
    watching = watch(gce_url=server.url)
    eventually(lambda: server.count("GET", "/computeMetadata/v1/instance/maintenance-event") >= 2)
    assert watching.notice is None
    assert watching.problem is None

    server.preempted = "TRUE"

    notice = notice_of(watching)
    assert notice.source == "gce"
    assert notice.deadline == notice.at + timedelta(seconds=GCE_NOTICE_S)


def test_gce_preemption_ends_the_wait_for_the_next_look(watch: Any, server: MetadataServer) -> None:
    watching = watch(gce_url=server.url, every=timedelta(hours=1))
    eventually(lambda: server.waiting)

    server.preempted = "TRUE"

    assert notice_of(watching).text == "Compute Engine preempts this machine"


def test_gce_preemption_between_two_looks_is_seen_without_waiting(server: MetadataServer) -> None:
    source = GceSource(server.url, every_s=3600)
    assert source.ask() is None

    server.preempted = "TRUE"

    notice = source.ask()
    assert notice
    assert notice.text == "Compute Engine preempts this machine"


def test_gce_maintenance_that_ends_the_machine_is_a_notice(watch: Any, server: MetadataServer) -> None:
    server.maintenance = "MIGRATE_ON_HOST_MAINTENANCE"
    watching = watch(gce_url=server.url)
    eventually(lambda: server.count("GET", "/computeMetadata/v1/instance/maintenance-event") >= 2)
    assert watching.notice is None

    server.maintenance = "TERMINATE_ON_HOST_MAINTENANCE"

    notice = notice_of(watching)
    assert notice.deadline is None
    assert "TERMINATE_ON_HOST_MAINTENANCE" in notice.text


def test_gce_unavailable_for_a_while_is_asked_again(watch: Any, server: MetadataServer) -> None:
    server.status = 503
    watching = watch(gce_url=server.url)
    eventually(lambda: watching.problem)
    assert "answered 503" in watching.problem

    server.status, server.preempted = None, "TRUE"

    eventually(lambda: watching.notice)


def test_problem_is_gone_when_the_server_answers_again(watch: Any, server: MetadataServer) -> None:
    server.status = 503
    watching = watch(gce_url=server.url)
    eventually(lambda: watching.problem)

    server.status = None

    eventually(lambda: watching.problem is None)
    assert watching.notice is None


def test_gce_answer_of_a_stranger_is_no_notice(watch: Any, server: MetadataServer) -> None:
    server.genuine, server.preempted = False, "TRUE"

    watching = watch(gce_url=server.url)

    eventually(lambda: watching.problem)
    assert watching.notice is None


def test_slow_server_is_given_up_and_asked_again(watch: Any, server: MetadataServer) -> None:
    server.delay_s = 1
    watching = watch(gce_url=server.url, timeout=timedelta(seconds=0.2))
    eventually(lambda: watching.problem)
    assert "timed out" in watching.problem

    server.delay_s, server.preempted = 0, "TRUE"

    eventually(lambda: watching.notice)


def test_ec2_without_an_action_goes_on_with_one_token(watch: Any, server: MetadataServer) -> None:
    watching = watch(ec2_url=server.url)

    eventually(lambda: server.count("GET", "/latest/meta-data/spot/instance-action") >= 4)

    assert watching.notice is None
    assert watching.problem is None
    assert server.count("PUT", "/latest/api/token") == 1


def test_ec2_action_says_what_and_when(watch: Any, server: MetadataServer) -> None:
    server.action = '{"action": "terminate", "time": "2026-09-18T08:22:00Z"}'

    watching = watch(ec2_url=server.url)

    notice = notice_of(watching)
    assert notice.source == "ec2"
    assert notice.deadline == datetime(2026, 9, 18, 8, 22, tzinfo=UTC)
    assert notice.text == "EC2 will terminate this machine"


def test_ec2_answer_of_a_captive_portal_is_no_notice(watch: Any, server: MetadataServer) -> None:
    server.page = "<html>log in to go on</html>"

    watching = watch(ec2_url=server.url)

    eventually(lambda: watching.problem)
    assert watching.problem == f"{server.url} answered with a page"
    server.page = None
    eventually(lambda: server.count("GET", "/latest/meta-data/spot/instance-action"))
    server.page = "\n<!DOCTYPE html>"
    eventually(lambda: watching.problem)
    assert watching.notice is None


@pytest.mark.parametrize("action", ["", "[]", '{"action": "stop", "time": "soon"}'])
def test_ec2_action_that_cannot_be_read_is_still_a_notice(watch: Any, server: MetadataServer, action: str) -> None:
    server.action = action

    watching = watch(ec2_url=server.url)

    notice = notice_of(watching)
    assert notice.deadline is None


def test_ec2_aged_token_is_renewed(watch: Any, server: MetadataServer) -> None:
    watching = watch(ec2_url=server.url)
    eventually(lambda: server.count("GET", "/latest/meta-data/spot/instance-action") >= 1)

    server.valid_token, server.action = "token-2", '{"action": "stop", "time": "2026-09-18T08:22:00Z"}'

    eventually(lambda: watching.notice)
    assert server.count("PUT", "/latest/api/token") == 2


def test_ec2_refused_token_is_a_problem_not_a_notice(watch: Any, server: MetadataServer) -> None:
    server.status = 403

    watching = watch(ec2_url=server.url)

    eventually(lambda: watching.problem)
    assert "answered 403 when asked for a token" in watching.problem


def test_proxy_of_the_environment_is_not_used(
    watch: Any, server: MetadataServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    server.preempted = "TRUE"

    watching = watch(gce_url=server.url)

    eventually(lambda: watching.notice)


def test_stopped_watch_says_nothing(watch: Any, tmp_path: Path) -> None:
    watching = watch(file=tmp_path / "preempt")
    watching.stop()

    (tmp_path / "preempt").touch()

    assert watching.notice is None


def test_watch_as_a_context_ends_with_it(tmp_path: Path) -> None:
    settings = NoticeSettings(file=tmp_path / "preempt", **QUICK)

    with NoticeWatch(settings, print, root=Path("/nonexistent")):
        [thread] = [each for each in threading.enumerate() if each.name == "notices"]

    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_settings_from_the_environment() -> None:
    assert notice_settings_from({}) == NoticeSettings()
    assert notice_settings_from(
        {
            "RUNTIME_PREEMPTION_FILE": "/run/preempt",
            "GCE_METADATA_HOST": "127.0.0.1:8080",
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://127.0.0.1:8081/",
        }
    ) == NoticeSettings(file=Path("/run/preempt"), gce_url="http://127.0.0.1:8080", ec2_url="http://127.0.0.1:8081")
    assert notice_settings_from({"RUNTIME_PREEMPTION_NOTICES": "off"}).clouds == ()
    assert notice_settings_from({"AWS_EC2_METADATA_DISABLED": "true"}).clouds == ("gce",)


def test_settings_that_mean_nothing_are_refused() -> None:
    with pytest.raises(InvalidValue):
        notice_settings_from({"RUNTIME_PREEMPTION_NOTICES": "maybe"})


@pytest.mark.parametrize("notice_first", [True, False])
def test_notice_and_the_signal_that_follows_from_it_are_one_request(notice_first: bool) -> None:
    leaving = LeaveDecision(SimpleNamespace())  # type: ignore[arg-type]

    for notice in (notice_first, not notice_first):
        leaving.ask(f"notice: {notice}", 75 if notice else 143, notice=notice)
    once = (leaving.asked, leaving.reason, leaving.exit_code)
    leaving.ask("another signal", 143)

    assert once == (1, f"notice: {notice_first}", 75 if notice_first else 143)
    assert leaving.asked == 2
