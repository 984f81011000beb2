"""Preemption notices under a job, on the oldest, the newest and our own Python of this machine."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runtime.shim.notices import CloudNotice, time_for_checkpoint
from runtime.shim.run_loop import attempt_once
from runtime.testing.metadata import MetadataServer
from tests.shim_support import ShimJob, find_pythons, make_asked, make_job, wait_for

PYTHONS = find_pythons()
OWN = f"{sys.version_info[0]}.{sys.version_info[1]}"
OLDEST = min(PYTHONS, key=lambda version: int(version[2:]))
NEWEST = max(PYTHONS, key=lambda version: int(version[2:]))

ENDS_AT_TERM = "trap 'exit 0' TERM; echo begun; while :; do sleep 0.05; done"
IGNORES_TERM = "trap '' TERM; echo begun; while :; do sleep 0.05; done"
GCE = {"clouds": ["gce"]}
EC2 = {"clouds": ["ec2"]}

MakeJob = Callable[..., ShimJob]


@pytest.fixture(
    params=[
        pytest.param(version, marks=[] if version == OWN else [pytest.mark.service], id=f"python{version}")
        for version in dict.fromkeys((OWN, OLDEST, NEWEST))
    ]
)
def job(request: pytest.FixtureRequest, tmp_path: Path) -> MakeJob:
    def make(script: str | Sequence[str], **changes: Any) -> ShimJob:
        return make_job(tmp_path, PYTHONS[request.param], script, **changes)

    return make


@pytest.fixture
def server() -> Iterator[MetadataServer]:
    with MetadataServer() as running:
        yield running


@pytest.fixture
def notice(tmp_path: Path) -> Path:
    return tmp_path / "notice"


def begins(made: ShimJob, index: int = 0) -> None:
    log = made.folder / f"runs/{index}/a0001/rank0.log"
    wait_for(lambda: log.exists() and "begun" in log.read_text(), "the command")


def announce(notice: Path, text: str = "going at noon\n") -> None:
    notice.with_suffix(".new").write_text(text)
    notice.with_suffix(".new").rename(notice)


def message(made: ShimJob) -> str:
    [end] = (made.folder / "runs/0/a0001").glob("end.*")
    said: str = json.loads(end.read_text())["message"]
    return said


@pytest.mark.parametrize("retries", ["shim", "backend"])
def test_notice_ends_the_attempt_and_no_other_begins_on_this_machine(job: MakeJob, notice: Path, retries: str) -> None:
    made = job(ENDS_AT_TERM, retries=retries, notices={"file": str(notice)}, grace_s=600)
    shim = made.start()
    begins(made)

    announce(notice)

    assert made.finish(shim) == 10
    assert (made.ends(), made.results(), made.left_over()) == (["preempted"], {}, [])
    assert message(made) == "notice from file: going at noon"
    assert "shim: notice from file: going at noon\n" in made.stderr


def test_next_start_elsewhere_goes_on_after_a_notice(job: MakeJob, notice: Path) -> None:
    made = job(f"[ $RUNTIME_ATTEMPT = 2 ] || {{ {ENDS_AT_TERM}; }}", notices={"file": str(notice)}, retries="backend")
    shim = made.start()
    begins(made)
    announce(notice)
    assert made.finish(shim) == 10
    notice.unlink()

    assert made.run() == 0

    assert (made.ends(), made.results()) == (["preempted", "-"], {0: ("succeeded", 0, 2)})


def test_notices_again_and_again_spend_the_preemption_budget(job: MakeJob, notice: Path) -> None:
    made = job(ENDS_AT_TERM, notices={"file": str(notice)}, retry={"preemption": 0}, retries="backend")
    shim = made.start()
    begins(made)

    announce(notice)

    assert made.finish(shim) == 1
    assert made.results() == {0: ("preempted", 143, 1)}


def test_command_with_a_checkpoint_signal_gets_it_before_term(job: MakeJob, notice: Path) -> None:
    script = "trap 'echo saves' USR1; trap 'echo ends; exit 0' TERM; echo begun; while :; do sleep 0.05; done"
    checkpoint = {"signal": "USR1", "lead_s": 0.5}
    made = job(script, notices={"file": str(notice)}, checkpoint=checkpoint, grace_s=600)
    shim = made.start()
    begins(made)

    announce(notice)

    assert made.finish(shim) == 10
    said = [line for line in made.log().splitlines() if line != "Terminated"]  # the shell's word about its own child
    assert (said, made.ends()) == (["begun", "saves", "ends"], ["preempted"])


@pytest.mark.parametrize(
    ("script", "end"),
    [
        ("trap 'exit 0' USR1", ("succeeded", 0)),
        ("trap 'exit 75' USR1", ("preempted", 143)),
        (":", ("preempted", 143)),
        ("trap 'exit 3' USR1", ("app_failed", 3)),
        ("trap 'echo noon > \"$RUNTIME_PREEMPTED_NOTE\"; exit 75' USR1", ("preempted", 75)),
    ],
    ids=["done", "asks to be started again", "dies of the signal", "fails", "gives way"],
)
@pytest.mark.daily(2)
def test_command_that_ends_by_itself_after_a_notice_is_judged_by_its_end(
    job: MakeJob, notice: Path, script: str, end: tuple[str, int]
) -> None:
    waits = "echo begun; while :; do sleep 0.05; done"
    checkpoint = {"signal": "USR1", "lead_s": 600}
    made = job(f"{script}; {waits}", notices={"file": str(notice)}, checkpoint=checkpoint, grace_s=1200)
    shim = made.start()
    begins(made)

    announce(notice)
    made.finish(shim)

    if end[0] == "preempted":
        assert (made.ends(), made.results()) == (["preempted"], {})
        assert (made.folder / f"runs/0/a0001/end.preempted.{end[1]}").exists()
    else:
        assert made.results() == {0: (*end, 1)}


def test_command_that_ignores_term_is_killed_after_its_grace_period(job: MakeJob, notice: Path) -> None:
    made = job(IGNORES_TERM, notices={"file": str(notice)}, grace_s=0.5)
    shim = made.start()
    begins(made)

    announce(notice)

    assert made.finish(shim) == 10
    assert (made.ends(), made.left_over()) == (["preempted"], [])


def test_command_that_ignores_term_is_killed_before_a_known_end_of_the_machine(
    job: MakeJob, server: MetadataServer
) -> None:
    made = job(IGNORES_TERM, notices=GCE, grace_s=3600)
    made.constants = {"GCE_NOTICE_S": 6.0}
    shim = made.start(**server.environment)
    begins(made)

    server.preempted = "TRUE"

    assert made.finish(shim) == 10
    assert (made.ends(), message(made)) == (["preempted"], "notice from gce: Compute Engine preempts this machine")


@pytest.mark.parametrize("first", ["signal", "notice"])
def test_machine_that_also_sends_term_has_preempted_the_attempt(
    job: MakeJob, server: MetadataServer, first: str
) -> None:
    says = "trap 'echo told' TERM; echo begun; while :; do sleep 0.05; done"
    made = job(says, notices=GCE, grace_s=3600)
    made.constants = {"GCE_NOTICE_S": 6.0}
    shim = made.start(**server.environment)
    begins(made)
    if first == "notice":
        server.preempted = "TRUE"
    else:
        shim.send_signal(signal.SIGTERM)
    wait_for(lambda: "told" in made.log(), "TERM for the command")

    server.preempted = "TRUE"
    shim.send_signal(signal.SIGTERM)

    assert made.finish(shim) == 10
    assert (made.ends(), made.results()) == (["preempted"], {})


def test_ec2_action_ends_the_attempt(job: MakeJob, server: MetadataServer) -> None:
    made = job(ENDS_AT_TERM, notices=EC2)
    made.constants = {"CLOUD_EVERY_S": 0.1}
    shim = made.start(**server.environment)
    begins(made)

    server.action = json.dumps({"action": "terminate", "time": "2999-01-01T00:00:00Z"})

    assert made.finish(shim) == 10
    assert (made.ends(), message(made)) == (["preempted"], "notice from ec2: EC2 will terminate this machine")


# before an attempt


@pytest.mark.parametrize("retries", ["shim", "backend"])
@pytest.mark.parametrize("source", ["file", "gce", "ec2"])
def test_no_attempt_begins_on_a_machine_that_is_already_going(
    job: MakeJob, server: MetadataServer, notice: Path, source: str, retries: str
) -> None:
    notice.touch()
    server.preempted, server.action = "TRUE", "{}"
    wanted = {"file": {"file": str(notice)}, "gce": GCE, "ec2": EC2}[source]
    made = job("echo begun", notices=wanted, retries=retries)

    assert made.run(**server.environment) == 10

    assert (made.ends(), made.results()) == ([], {})


def test_notice_before_the_attempt_has_the_job_requeued(job: MakeJob, notice: Path, tmp_path: Path) -> None:
    notice.touch()
    requeue = ["touch", str(tmp_path / "requeued-{native}")]
    made = job("echo begun", notices={"file": str(notice)}, retries="requeue", requeue=requeue)

    assert made.run("--native", "n-1") == 10

    assert (made.ends(), (tmp_path / "requeued-n-1").exists()) == ([], True)


def test_job_that_cannot_be_requeued_does_not_begin_on_a_machine_that_goes(job: MakeJob, notice: Path) -> None:
    notice.touch()
    made = job("echo begun", notices={"file": str(notice)}, retries="requeue", requeue=["false"])

    assert made.run() == 10

    assert made.ends() == []


def test_cancel_and_result_come_before_a_notice(job: MakeJob, notice: Path) -> None:
    notice.touch()
    made = job("echo begun", notices={"file": str(notice)})
    (made.folder / "cancel").touch()

    assert made.run() == 1

    assert made.results() == {0: ("cancelled", 1, 0)}


def test_notice_while_the_next_start_waits_ends_the_wait(job: MakeJob, notice: Path) -> None:
    retry = {"failure": 1, "backoff_s": [3600, 3600]}
    made = job("echo begun; exit 1", notices={"file": str(notice)}, retry=retry)
    shim = made.start()
    wait_for(lambda: made.ends() == ["app_failed"], "the end of the attempt")

    announce(notice)

    assert made.finish(shim) == 10
    assert made.ends() == ["app_failed"]


def test_notice_leaves_the_next_runs_of_the_machine_unstarted(job: MakeJob, notice: Path) -> None:
    made = job(ENDS_AT_TERM, notices={"file": str(notice)}, runs={0: {}, 1: {}})
    shim = made.start("--indices", "0,1")
    begins(made)

    announce(notice)

    assert made.finish(shim) == 10
    assert (made.ends(0), made.ends(1)) == (["preempted"], [])


def test_notice_ends_every_packed_run_and_begins_no_other(job: MakeJob, notice: Path) -> None:
    runs: dict[int, dict[str, Any]] = {0: {}, 1: {}, 2: {}}
    made = job(ENDS_AT_TERM, notices={"file": str(notice)}, runs=runs, pack={"slots": 2})
    shim = made.start("--indices", "0-2")
    begins(made, 0)
    begins(made, 1)

    announce(notice)

    assert made.finish(shim) == 10
    assert [made.ends(index) for index in runs] == [["preempted"], ["preempted"], []]


def test_attempt_that_a_notice_stops_while_it_is_prepared_is_preempted(tmp_path: Path) -> None:
    asked = make_asked()
    asked.hear(CloudNotice("gce", "it goes"))
    run = SimpleNamespace(record=SimpleNamespace(before=lambda *_: False))

    end = attempt_once({}, run, 1, str(tmp_path / "scratch"), asked, {}, None)

    assert end == ("preempted", 143, {"message": "notice from gce: it goes"})


# servers that do not answer, and orders without notices


@pytest.mark.parametrize("wanted", [GCE, EC2], ids=["gce", "ec2"])
@pytest.mark.parametrize("trouble", ["hangs", "503", "portal", "absent"])
@pytest.mark.daily(2)
def test_server_without_an_answer_disturbs_no_command(
    job: MakeJob, server: MetadataServer, wanted: dict[str, Any], trouble: str
) -> None:
    environ = dict(server.environment)
    match trouble:
        case "hangs":
            server.delay_s = 3600
        case "503":
            server.status = 503
        case "portal":
            server.page = "<html>TRUE</html>"
        case "absent":
            environ = {
                "GCE_METADATA_HOST": "127.0.0.1:9",
                "AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://127.0.0.1:9",
            }
    made = job("echo begun; sleep 0.3", notices=wanted)
    made.constants = {"ANSWER_S": 0.1, "CLOUD_EVERY_S": 0.05}

    assert made.run(**environ) == 0

    assert (made.results(), made.log()) == ({0: ("succeeded", 0, 1)}, "begun\n")
    assert trouble == "absent" or server.requests


def test_server_that_answers_again_is_heard(job: MakeJob, server: MetadataServer) -> None:
    server.status = 503
    made = job(ENDS_AT_TERM, notices=GCE)
    made.constants = {"CLOUD_EVERY_S": 0.1}
    shim = made.start(**server.environment)
    begins(made)

    server.preempted, server.status = "TRUE", None

    assert made.finish(shim) == 10
    assert made.ends() == ["preempted"]


def test_order_without_notices_starts_no_thread_and_asks_nobody(tmp_path: Path, server: MetadataServer) -> None:
    found = []
    for name, more in (("without", {}), ("with", {"notices": GCE})):
        made = make_job(tmp_path / name, sys.executable, "sed -n s/Threads:.//p /proc/$PPID/status", **more)
        assert made.run(**server.environment) == 0
        found.append((int(made.log()), bool(server.requests)))

    threads = found[0][0]
    assert found == [(threads, False), (threads + 1, True)]


def test_worker_that_sees_the_same_notice_makes_one_preempted_attempt(tmp_path: Path, notice: Path) -> None:
    root = Path(__file__).parents[3]
    env = {
        "PYTHONPATH": str(root),
        "RUNTIME_QUEUE": f"sqlite:{tmp_path / 'fleet.db'}",
        "RUNTIME_PREEMPTION_NOTICES": "off",
        "RUNTIME_PREEMPTION_FILE": str(notice),
    }
    command = [sys.executable, "-m", "runtime", "worker"]
    made = make_job(tmp_path, sys.executable, command, notices={"file": str(notice)}, env=env, grace_s=600)
    shim = made.start(HOME=os.environ.get("HOME", "/"))
    log = made.folder / "runs/0/a0001/rank0.log"
    wait_for(lambda: log.exists() and "worker_started" in log.read_text(), "the worker")

    announce(notice)

    assert made.finish(shim) == 10, made.stderr
    assert (made.ends(), made.results()) == (["preempted"], {})


def test_command_that_gives_way_before_the_shim_sees_the_notice_begins_no_other_attempt_here(
    job: MakeJob, notice: Path
) -> None:
    made = job('echo noon > "$RUNTIME_PREEMPTED_NOTE"; exit 75', notices={"file": str(notice)})

    assert made.run() == 10

    assert made.ends() == ["preempted"]


# decisions


@pytest.mark.parametrize(
    ("room", "grace", "lead", "expected"),
    [
        (25, 120, 120, 12.5),
        (115, 120, 120, 57.5),
        (115, 30, 120, 85),
        (115, 30, 60, 60),
        (120, 120, 120, 60),
        (120, 120, 0, 0),
        (-3, 120, 120, 0),
    ],
)
def test_time_for_a_checkpoint_is_the_lead_or_what_the_machine_leaves(
    room: float, grace: float, lead: float, expected: float
) -> None:
    assert time_for_checkpoint(room, grace, lead) == expected


def test_command_has_its_grace_period_or_until_shortly_before_the_machine_ends() -> None:
    now = time.time()
    unknown, known = CloudNotice("file", "noon"), CloudNotice("gce", "soon", now + 30)

    assert unknown.end_by(120) == unknown.at + 120
    assert known.end_by(120) == now + 25
