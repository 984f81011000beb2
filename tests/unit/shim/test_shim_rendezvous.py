"""Runs of several nodes: shims that have nothing in common but the record root, a folder or a bucket."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runtime.shim.main import parse_place
from runtime.shim.rendezvous import Leader, NodeHeartbeat, own_address
from runtime.shim.retry import decide
from runtime.testing.metadata import MetadataServer
from tests.fakes.gcs import GcsServer
from tests.shim_support import JOB, ShimJob, each_python, make_job, processes_with, wait_for, wait_until_it_listens
from tests.unit.shim.test_shim_bucket import URL, BucketJob

OWN = f"{sys.version_info[0]}.{sys.version_info[1]}"
QUICK = {"POLL_S": 0.1, "BEAT_S": 0.3}
"""Constants of the shim for tests that wait for another node to notice something."""

MakeGang = Callable[..., "Gang"]


class Gang:
    """A job of several nodes whose shims are started one by one."""

    def __init__(self, job: ShimJob) -> None:
        self.job = job
        self.started: list[subprocess.Popen[str]] = []

    def start(self, node: int, **environ: str) -> subprocess.Popen[str]:
        self.started.append(self.job.start("--node", str(node), RUNTIME_ADDRESS=f"10.0.0.{node + 1}", **environ))
        return self.started[-1]

    def run(self, nodes: int = 2, **environ: str) -> list[int]:
        started = [self.start(node, **environ) for node in range(nodes)]
        return [self.job.finish(each) for each in started]

    def record(self, attempt: int = 1) -> Path:
        return self.job.folder / f"runs/0/a{attempt:04d}"

    def result(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.job.folder / "runs/0/result").read_text())
        return found

    def close(self) -> None:
        for each in self.started:
            if each.poll() is None:
                os.kill(each.pid, signal.SIGCONT)
                each.kill()
            each.communicate()


@pytest.fixture(params=["folder", pytest.param("bucket", marks=pytest.mark.nightly)])
def make(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeGang]:
    server = GcsServer().start() if request.param == "bucket" else None
    if server is not None:
        server.make_bucket("lab")
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
    gangs: list[Gang] = []

    def make_gang(script: str, *, start_s: float = 600.0, python: str = sys.executable, **changes: Any) -> Gang:
        wanted = {"nodes": 2, "meet": {"start_s": start_s}} | changes
        made = make_job(tmp_path, python, script, **wanted)
        job = made if server is None else BucketJob(made.root, made.python, made.order, url=URL)
        job.constants = dict(QUICK)
        gangs.append(Gang(job))
        return gangs[-1]

    yield make_gang
    for gang in gangs:
        gang.close()
    assert processes_with(f"{tmp_path}/scratch/job-") == []
    if server is not None:
        server.stop()


@pytest.fixture
def said(tmp_path: Path) -> Path:
    """A folder for files by which commands tell the test where they are."""
    folder = tmp_path / "said"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("python", each_python())
def test_nodes_run_their_ranks_with_one_place_to_meet(make: MakeGang, python: str) -> None:
    script = (
        "echo $RANK/$WORLD_SIZE local $LOCAL_RANK node $RUNTIME_NODE_RANK of $RUNTIME_NUM_NODES at "
        "$MASTER_ADDR $RUNTIME_MASTER_ADDR $JAX_COORDINATOR_ADDRESS $MASTER_PORT; "
        "echo $RANK >$RUNTIME_OUTPUT_DIR/of-$RANK"
    )
    gang = make(script, tasks_per_node=2, python=python)

    assert gang.run() == [0, 0]

    assert gang.job.results() == {0: ("succeeded", 0, 1)}
    go = json.loads((gang.record() / "go").read_text())
    place = f"10.0.0.1 10.0.0.1 10.0.0.1:{go['port']} {go['port']}"
    assert [read_log(gang, rank) for rank in range(4)] == [
        f"0/4 local 0 node 0 of 2 at {place}\n",
        f"1/4 local 1 node 0 of 2 at {place}\n",
        f"2/4 local 0 node 1 of 2 at {place}\n",
        f"3/4 local 1 node 1 of 2 at {place}\n",
    ]
    outputs = gang.job.folder / "runs/0/output/a0001"
    assert sorted(path.name for path in outputs.iterdir()) == [f"of-{rank}" for rank in range(4)]
    assert gang.job.left_over() == []


@pytest.mark.parametrize("slices", [2, 1])
def test_ranks_know_the_slices_of_their_own_run_alone(
    make: MakeGang, monkeypatch: pytest.MonkeyPatch, slices: int
) -> None:
    monkeypatch.setenv("RUNTIME_JOB_ID", "j-around")
    monkeypatch.setenv("MEGASCALE_SLICE_ID", "7")
    script = "echo $RANK is of slice ${MEGASCALE_SLICE_ID-none} of ${MEGASCALE_NUM_SLICES-none} "
    script += "at ${MEGASCALE_COORDINATOR_ADDRESS-none} ${MEGASCALE_PORT-none}"
    gang = make(script, slices=slices)

    assert gang.run() == [0, 0]

    said = ["0 of 2 at 10.0.0.1 8081", "1 of 2 at 10.0.0.1 8081"] if slices > 1 else ["none of none at none none"] * 2
    assert [read_log(gang, rank) for rank in (0, 1)] == [f"{rank} is of slice {said[rank]}\n" for rank in (0, 1)]


def read_log(gang: Gang, rank: int, attempt: int = 1) -> str:
    return "".join(path.read_text() for path in sorted(gang.record(attempt).glob(f"rank{rank}.*log")))


@pytest.mark.parametrize("failing", [0, 1])
def test_node_that_fails_ends_the_run_with_its_own_code(make: MakeGang, failing: int) -> None:
    gang = make(f'[ "$RANK" = {failing} ] && exit 7; exec sleep 600')

    assert gang.run() == [1, 1]

    assert gang.job.results() == {0: ("app_failed", 7, 1)}
    assert (gang.result()["rank"], gang.result().get("node")) == (failing, 1 if failing else None)


def test_run_that_fails_is_tried_again_by_all_of_its_nodes(make: MakeGang) -> None:
    gang = make('[ "$RUNTIME_ATTEMPT$RANK" = 11 ] && exit 7; exit 0', retry={"failure": 1})

    assert gang.run() == [0, 0]

    assert gang.job.results() == {0: ("succeeded", 0, 2)}
    assert gang.job.ends() == ["app_failed", "-"]


def test_nodes_that_a_backend_starts_again_exit_alike_after_each_attempt(make: MakeGang) -> None:
    gang = make('[ "$RUNTIME_ATTEMPT$RANK" = 11 ] && exit 7; exit 0', retry={"failure": 1}, retries="backend")

    assert gang.run() == [10, 10]
    assert gang.job.ends() == ["app_failed"]
    assert gang.run() == [0, 0]
    assert gang.job.results() == {0: ("succeeded", 0, 2)}
    assert gang.run() == [0, 0]


def test_run_whose_nodes_do_not_all_come_found_no_capacity(make: MakeGang) -> None:
    gang = make("true", start_s=0.5)

    assert gang.job.finish(gang.start(0)) == 1

    assert gang.job.results() == {0: ("no_capacity", 1, 1)}
    assert gang.result()["message"] == "1 of 2 nodes came within 0 s; missing: 1"


def test_run_with_a_window_waits_for_its_nodes_in_one_attempt_after_another(make: MakeGang) -> None:
    gang = make("true", start_s=6, retry={"capacity_s": 3600})
    first = gang.start(0)
    wait_for(lambda: "a0002" in list_record(gang, "runs/0"), "a second attempt")

    second = gang.start(1)

    assert [gang.job.finish(each) for each in (second, first)] == [0, 0]
    assert gang.job.results()[0][0] == "succeeded"
    assert set(gang.job.ends()) == {"no_capacity", "-"}


def list_record(gang: Gang, folder: str) -> list[str]:
    """List what the record has in a folder of the job, while its shims run."""
    if isinstance(gang.job, BucketJob):
        return gang.job.files.names(f"jobs/{JOB}/{folder}")
    path = gang.job.folder / folder
    return sorted(each.name for each in path.iterdir()) if path.is_dir() else []


def list_tree(gang: Gang) -> list[str]:
    """List every file that the record has of the run."""
    if isinstance(gang.job, BucketJob):
        return [name for name, _ in gang.job.files.tree(f"jobs/{JOB}/runs/0")]
    root = gang.job.folder / "runs/0"
    return [str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()]


def test_node_that_waits_in_vain_gives_its_machine_back(make: MakeGang) -> None:
    gang = make("true", start_s=0.2, retries="backend")

    assert gang.job.finish(gang.start(1)) == 10

    assert list_record(gang, "runs/0") == []


@pytest.mark.parametrize("killed", [0, 1])
def test_node_that_is_killed_and_started_again_ends_the_attempt_as_lost(
    make: MakeGang, killed: int, said: Path
) -> None:
    gang = make(f'touch {said}/$RUNTIME_ATTEMPT.$RANK; [ "$RUNTIME_ATTEMPT" = 2 ] || exec sleep 600')
    nodes = [gang.start(0), gang.start(1)]
    wait_for(lambda: len(list(said.iterdir())) == 2, "both commands")

    nodes[killed].kill()
    nodes[killed].communicate()
    nodes[killed] = gang.start(killed)

    assert [gang.job.finish(each) for each in nodes] == [0, 0]
    assert gang.job.results() == {0: ("succeeded", 0, 2)}
    assert gang.job.ends() == ["lost" if killed else "-", "-"]
    assert sorted(path.name for path in said.iterdir()) == ["1.0", "1.1", "2.0", "2.1"]


def test_node_that_gives_no_sign_of_life_is_lost(make: MakeGang, said: Path) -> None:
    gang = make(f"touch {said}/$RANK; exec sleep 600", retry={"preemption": 0})
    gang.job.constants["SILENT_S"] = 12.0
    first, second = gang.start(0), gang.start(1)
    wait_for(lambda: len(list(said.iterdir())) == 2, "both commands")

    os.kill(second.pid, signal.SIGSTOP)

    assert gang.job.finish(first) == 1
    assert gang.job.results() == {0: ("lost", 1, 1)}
    assert re.fullmatch(r"node 1 on \S+ gave no sign of life for 12 s", gang.result()["message"])
    os.kill(second.pid, signal.SIGCONT)
    assert gang.job.finish(second) == 1


def test_node_leaves_an_attempt_whose_node_0_is_silent(make: MakeGang, said: Path) -> None:
    gang = make(f"touch {said}/$RANK; exec sleep 600", retries="backend", start_s=600)
    gang.job.constants["SILENT_S"] = 12.0
    first, second = gang.start(0), gang.start(1)
    wait_for(lambda: len(list(said.iterdir())) == 2, "both commands")

    os.kill(first.pid, signal.SIGSTOP)

    assert gang.job.finish(second) == 10
    os.kill(first.pid, signal.SIGCONT)
    assert gang.job.finish(first) == 10
    assert gang.job.ends() == ["lost"]


@pytest.mark.parametrize("stopped", [0, 1])
def test_node_whose_machine_is_taken_away_stops_the_attempt(make: MakeGang, stopped: int, said: Path) -> None:
    gang = make(f"touch {said}/$RANK; exec sleep 600", retries="backend")
    nodes = [gang.start(0), gang.start(1)]
    wait_for(lambda: len(list(said.iterdir())) == 2, "both commands")
    wait_until_it_listens(nodes[stopped])

    nodes[stopped].terminate()

    codes = [gang.job.finish(each) for each in nodes]
    assert codes == [12 if node == stopped else 10 for node in (0, 1)]
    assert gang.job.ends() == ["stopped"]


def test_cancel_ends_every_node(make: MakeGang, said: Path) -> None:
    gang = make(f"touch {said}/$RANK; exec sleep 600")
    nodes = [gang.start(0), gang.start(1)]
    wait_for(lambda: len(list(said.iterdir())) == 2, "both commands")

    if isinstance(gang.job, BucketJob):
        gang.job.files.write(f"jobs/{JOB}/cancel", b"")
    else:
        (gang.job.folder / "cancel").touch()

    assert [gang.job.finish(each) for each in nodes] == [1, 1]
    assert gang.job.results() == {0: ("cancelled", 1, 1)}


def test_request_for_a_checkpoint_reaches_the_command_of_each_node(make: MakeGang, said: Path) -> None:
    script = f'trap "touch {said}/asked.$RANK; exit 0" USR1; touch {said}/$RANK; while :; do sleep 0.1; done'
    gang = make(script, checkpoint={"signal": "USR1", "lead_s": 60})
    nodes = [gang.start(0), gang.start(1)]
    wait_for(lambda: len(list(said.iterdir())) == 2, "both commands")

    os.kill(nodes[0].pid, signal.SIGUSR1)

    assert [gang.job.finish(each) for each in nodes] == [0, 0]
    assert sorted(path.name for path in said.iterdir()) == ["0", "1", "asked.0", "asked.1"]


@pytest.mark.parametrize("warned", [0, 1])
@pytest.mark.daily(1)
def test_notice_on_one_node_has_all_make_a_checkpoint_and_ends_the_attempt(
    make: MakeGang, warned: int, said: Path
) -> None:
    script = (
        f'trap "touch {said}/asked.$RANK" USR1; trap "exit 1" TERM; touch {said}/$RANK; while :; do sleep 0.1; done'
    )
    gang = make(
        script,
        checkpoint={"signal": "USR1", "lead_s": 600},
        notices={"clouds": ["gce"]},
        grace_s=600,
        retries="backend",
    )
    gang.job.constants["GCE_NOTICE_S"] = 25.0
    with MetadataServer() as server, MetadataServer() as quiet:
        nodes = [gang.start(node, **(server if node == warned else quiet).environment) for node in (0, 1)]
        wait_for(lambda: len(list(said.iterdir())) == 2, "both commands")

        server.preempted = "TRUE"

        assert [gang.job.finish(each) for each in nodes] == [10, 10]
    assert gang.job.ends() == ["preempted"]
    assert sorted(path.name for path in said.glob("asked.*")) == ["asked.0", "asked.1"]


@pytest.mark.parametrize("warned", [0, 1])
def test_rank_that_fails_because_its_peer_makes_way_for_a_notice_is_preempted_with_it(
    make: MakeGang, warned: int, said: Path
) -> None:
    """The other node's command crashes as soon as its peer has heard of the notice, long before that node has ended."""
    other = 1 - warned
    script = (
        f'touch {said}/$RANK; [ "$RANK" = {other} ] && while [ ! -e {said}/asked ]; do sleep 0.05; done && exit 1; '
        f'trap "touch {said}/asked; sleep 1; exit 1" TERM USR1; while :; do sleep 0.1; done'
    )
    gang = make(script, checkpoint={"signal": "USR1", "lead_s": 600}, notices={"clouds": ["gce"]}, retries="backend")
    gang.job.constants["GCE_NOTICE_S"] = 25.0
    with MetadataServer() as server, MetadataServer() as quiet:
        nodes = [gang.start(node, **(server if node == warned else quiet).environment) for node in (0, 1)]
        wait_for(lambda: len(list(said.iterdir())) == 2, "both commands")

        server.preempted = "TRUE"

        assert [gang.job.finish(each) for each in nodes] == [10, 10]
    assert gang.job.ends() == ["preempted"]


def test_nodes_that_are_killed_and_stopped_at_random_end_with_one_result(make: MakeGang, said: Path) -> None:
    """A backend starts each shim again until it ends for good; whatever happens to them, all nodes end alike."""
    dice = random.Random(5)
    retry = {"preemption": 1000, "capacity_s": 3600.0}
    gang = make(
        f"[ -e {said}/calm ] || sleep 600; echo $RUNTIME_ATTEMPT >$RUNTIME_OUTPUT_DIR/$RANK",
        nodes=3,
        retry=retry,
        retries="backend",
    )
    gang.job.constants |= {"SILENT_S": 6.0, "LOST_IN_A_ROW": 1000, "SEND_S": 3.0}
    nodes = {node: gang.start(node) for node in range(3)}
    codes: dict[int, int] = {}
    for turn in range(10):
        hit = dice.randrange(3)
        sign = dice.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
        time.sleep(dice.random())  # where it meets the shims is of no matter
        if nodes[hit].poll() is None:
            os.kill(nodes[hit].pid, sign)
        if turn == 9:
            (said / "calm").touch()
        for node, shim in nodes.items():
            if shim.poll() is not None:
                nodes[node] = gang.start(node)

    for shim in nodes.values():
        if shim.poll() is None:
            os.kill(shim.pid, signal.SIGCONT)
    until = time.monotonic() + 600
    while len(codes) < 3:
        assert time.monotonic() < until, (codes, gang.job.ends())
        for node, shim in nodes.items():
            if shim.poll() in (0, 1, 2, 3):
                codes[node] = shim.returncode
            elif shim.poll() is not None:
                nodes[node] = gang.start(node)
        time.sleep(0.1)
    for node in range(3):
        gang.job.finish(nodes[node])

    assert codes == {0: 0, 1: 0, 2: 0}
    ((reason, code, attempt),) = gang.job.results().values()
    assert (reason, code) == ("succeeded", 0)
    outputs = gang.job.folder / f"runs/0/output/a{attempt:04d}"
    assert {path.name: path.read_text() for path in outputs.iterdir()} == {
        str(rank): f"{attempt}\n" for rank in range(3)
    }
    assert set(gang.job.ends()) <= {"stopped", "lost", "-"}


def test_time_limit_holds_for_every_node_by_the_clock_of_node_0(make: MakeGang) -> None:
    gang = make("echo $RUNTIME_DEADLINE; exec sleep 600", time_limit_s=1)

    assert gang.run() == [1, 1]

    assert gang.job.results() == {0: ("timeout", 124, 1)}
    go = json.loads((gang.record() / "go").read_text())
    assert [read_log(gang, rank) for rank in (0, 1)] == [f"{int(go['deadline'])}\n"] * 2


def test_time_that_a_run_waits_for_its_nodes_is_no_part_of_its_limit(make: MakeGang, said: Path) -> None:
    gang = make("exit 0", time_limit_s=60)
    gang.job.clock = said / "clock"
    gang.job.clock.touch()
    first = gang.start(0)
    wait_for(lambda: "ranks/" in "".join(list_tree(gang)), "node 0")
    gang.job.pass_time(100)

    second = gang.start(1)

    assert [gang.job.finish(each) for each in (first, second)] == [0, 0]
    assert gang.job.results() == {0: ("succeeded", 0, 1)}


def test_setup_of_a_node_that_fails_is_blamed_on_that_node(make: MakeGang) -> None:
    gang = make("exec sleep 600", setup=['[ "$RANK" = 0 ] || false'])

    assert gang.run() == [1, 1]

    assert gang.job.results() == {0: ("setup_failed", 1, 1)}
    assert gang.result()["node"] == 1
    assert "at: false" in gang.result()["message"]


def test_command_that_is_not_there_on_any_node_ends_the_run(make: MakeGang) -> None:
    gang = make("unused", runs={0: {"command": ["no-such-command"]}})

    assert gang.run() == [1, 1]

    assert gang.job.results() == {0: ("setup_failed", 127, 1)}


def test_output_of_another_node_counts_as_output_of_the_run() -> None:
    run = SimpleNamespace(record=None, node=0, attempt_name=lambda number: f"runs/0/a{number:04d}")
    leader = Leader({"nodes": 2, "meet": {"start_s": 1}}, run, 1)
    leader.signs[1] = NodeHeartbeat()
    printed = []
    for beat in ("1 100", "2 100", "3 250"):
        leader.signs[1].see(beat)
        printed.append(leader.share(7))

    assert printed[0] == printed[1] != printed[2]
    assert leader.share(8) != printed[2]


def test_checkpoint_of_node_0_is_what_every_node_begins_with(make: MakeGang) -> None:
    script = (
        'cd $RUNTIME_CHECKPOINT_DIR; [ "$RUNTIME_ATTEMPT" = 2 ] && { cat step; exit; }; '
        'if [ "$RANK" = 0 ]; then echo 41 >step; exit 7; fi; exec sleep 600'
    )
    gang = make(script, retry={"failure": 1}, retries="backend")

    assert gang.run() == [10, 10]
    assert gang.run() == [0, 0]

    assert [read_log(gang, rank, attempt=2) for rank in (0, 1)] == ["41\n", "41\n"]


def test_each_node_goes_on_with_its_own_shard_and_what_node_0_wrote(make: MakeGang, said: Path) -> None:
    script = (
        'cd $RUNTIME_CHECKPOINT_DIR; [ "$RUNTIME_ATTEMPT" = 2 ] && { cat meta shard$RANK; exit; }; '
        f'echo of $RANK >shard$RANK; : >{said}/$RANK; [ "$RANK" = 1 ] && exec sleep 600; '
        f"until [ -e {said}/1 ]; do sleep 0.1; done; echo 41 >meta; exit 7"
    )
    gang = make(script, retry={"failure": 1}, retries="backend")

    assert gang.run() == [10, 10]
    assert gang.run() == [0, 0]

    assert [read_log(gang, rank, attempt=2) for rank in (0, 1)] == ["41\nof 0\n", "41\nof 1\n"]


def test_node_that_the_order_does_not_have_is_refused(make: MakeGang) -> None:
    gang = make("true")

    assert gang.job.finish(gang.start(2)) == 2

    assert "no node 2" in gang.job.stderr


def test_node_of_a_job_without_a_meeting_is_refused(make: MakeGang) -> None:
    gang = make("true", meet=None)

    assert gang.job.finish(gang.start(1)) == 2


def test_place_of_a_backend_that_counts_all_nodes_gives_run_and_node() -> None:
    assert [parse_place(f"8+{count}/2") for count in range(4)] == [(8, 0), (8, 1), (9, 0), (9, 1)]


def test_address_is_what_the_backend_says_or_one_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNTIME_ADDRESS", "10.1.2.3")
    assert own_address() == "10.1.2.3"

    monkeypatch.delenv("RUNTIME_ADDRESS")
    assert re.fullmatch(r"[0-9.]+|[0-9a-f:]+", own_address())


def test_signs_of_a_counter_that_moves_are_never_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    signs = NodeHeartbeat()
    for beat in range(5):
        signs.see(str(beat))
        now[0] += 50
        assert not signs.is_silent()
    signs.see("4")
    now[0] += 10

    assert signs.is_silent()


@pytest.mark.parametrize(
    ("ages", "window", "expected"),
    [
        ([0], 3600, "again"),
        ([3500, 0], 3600, "again"),
        ([3700, 0], 3600, "final"),
        ([0], None, "final"),
    ],
)
def test_lack_of_capacity_is_waited_out_within_its_window(ages: list[int], window: float | None, expected: str) -> None:
    retry = {"failure": 0, "preemption": 0, "on_exit": {}, "backoff_s": [1.0, 2.0]}
    retry |= {} if window is None else {"capacity_s": window}
    ended = [{"reason": "no_capacity", "code": 1, "at": 10_000.0 - age} for age in ages]

    what, then = decide(ended, retry, pause=lambda: 0.5)

    assert what == expected
    assert then == "no_capacity" if expected == "final" else isinstance(then, float)


def test_lack_of_capacity_after_an_attempt_that_ran_begins_a_new_window() -> None:
    retry = {"failure": 1, "preemption": 0, "on_exit": {}, "backoff_s": [1.0, 2.0], "capacity_s": 60}
    ended = [
        {"reason": "no_capacity", "code": 1, "at": 0.0},
        {"reason": "app_failed", "code": 1, "at": 900.0},
        {"reason": "no_capacity", "code": 1, "at": 1000.0},
    ]

    assert decide(ended, retry, pause=lambda: 0.5) == ("again", 1.0)
