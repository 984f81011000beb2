"""The steps of a restart on a record root and a head's API: what they do to jobs of any target, and that none starts twice."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import pytest

from runtime import faults
from runtime.client.jobs import cluster_restart
from runtime.client.jobs.cluster_jobs import keep_cluster, list_places, open_place
from runtime.client.jobs.cluster_restart import ClusterRestart, HeadNotBack, Means, describe_strays, goes_on
from runtime.client.jobs.handle import JobHandle
from runtime.client.jobs.launch import launch
from runtime.client.jobs.targets import OpenTarget
from runtime.clusters.nodes import JOINS_LABEL, TpuNode
from runtime.clusters.restart import HeadSilent, RestartStep, RestartTakenOver, decide_step, give_up, restart
from runtime.config import Project, Settings
from runtime.errors import InfrastructureFailure
from runtime.faults import FaultReached
from runtime.jobs import ledger, maintenance_lock, open_jobs
from runtime.jobs.maintenance_lock import MaintenanceLock, RootHeld
from runtime.jobs.spec import Code, CodeMode, JobSpec, JobState
from runtime.launchers.ray.client import RayJobs, RayRefused, RayUnavailable
from runtime.launchers.ray.restart_notes import is_note
from runtime.launchers.ray.settings import RayTarget
from tests.fakes.ray_head import RayHead
from tests.services_support import PATIENCE_S

STEPS = [step for step in RestartStep if step not in (RestartStep.DONE, RestartStep.AWAIT_HEAD)]


@pytest.fixture
def head() -> Iterator[RayHead]:
    with RayHead() as running:
        yield running


@pytest.fixture
def settings(head: RayHead, tmp_path: Path) -> Settings:
    where = {"kind": "ray", "address": head.address, "records": str(tmp_path / "records")}
    targets = {
        "tpu": {**where, "python": "/opt/x/python"},
        "my tpu": where,
        "else": {**where, "records": str(tmp_path / "else")},
    }
    return Settings(
        project=Project(root=tmp_path, targets=targets),
        data_dir=tmp_path / "data",
        cache_dir=tmp_path / "cache",
        config_dir=tmp_path / "config",
    )


@pytest.fixture
def place(head: RayHead, settings: Settings, tmp_path: Path) -> Iterator[OpenTarget]:
    where = RayTarget(target="main", root=str(tmp_path / "records"), python="python3", address=head.address)
    with open_place(where, settings) as opened:
        yield opened


def start(settings: Settings, target: str, name: str = "fit") -> JobHandle:
    spec = JobSpec(name=name, command=("true",), code=Code(mode=CodeMode.IMAGE), grace_period=timedelta(seconds=1))
    return launch(spec, target, settings=settings)


def unknown(*_: object) -> NoReturn:
    raise InfrastructureFailure("no credentials")


def make(
    place: OpenTarget,
    settings: Settings,
    restart_head: Callable[[], None],
    *,
    token: str = "one",
    said: list[str] | None = None,
    read_boot: Callable[[], Mapping[str, str] | None] = lambda: None,
    reaper: Callable[[], Any] = unknown,
    **more: Any,
) -> ClusterRestart:
    means = Means(
        ray_name="marin-main", reaper=reaper, restart_head=lambda session: restart_head(), read_boot=read_boot
    )
    tell = (said if said is not None else []).append
    return ClusterRestart(place, settings, means, token=token, by=f"{token}@desk", progress=tell, **more)


def count_submitted(head: RayHead) -> int:
    """Return how many jobs were submitted, without the notes of what was asked to end."""
    return sum(not is_note(name) for name in head.submitted)


def epochs(job: JobHandle) -> list[int]:
    return [each.epoch for each in job.entry().natives]


def cut_off(world: ClusterRestart, after: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNTIME_FAULTS", f"restart.{after}=raise")
    faults.arm()
    with pytest.raises(FaultReached):
        restart(world, token="one")
    monkeypatch.delenv("RUNTIME_FAULTS")
    faults.arm()


def test_restart_takes_up_the_jobs_of_all_targets_and_keeps_their_interpreters(
    head: RayHead, settings: Settings, place: OpenTarget
) -> None:
    jobs = [start(settings, "tpu"), start(settings, "my tpu")]
    world = make(place, settings, head.restart)

    restart(world, token="one")

    assert {(each.job, each.target, each.done) for each in world.kept} == {
        (jobs[0].id, "tpu", "taken_up"),
        (jobs[1].id, "my tpu", "taken_up"),
    }
    assert [epochs(job) for job in jobs] == [[1, 2], [1, 2]]
    assert count_submitted(head) == 4
    pythons = {info["metadata"]["job"]: info["entrypoint"].split()[1] for info in head.jobs.values()}
    assert pythons == {jobs[0].id: "/opt/x/python", jobs[1].id: "python3"}
    assert maintenance_lock.read_hold(place.files) is None
    assert all(goes_on(each) for each in world.kept)


@pytest.mark.parametrize("killed", STEPS)
@pytest.mark.daily(4)
def test_restart_that_dies_after_a_step_is_finished_by_another_and_starts_no_job_twice(
    killed: RestartStep, head: RayHead, settings: Settings, place: OpenTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = start(settings, "tpu")
    restarts: list[int] = []

    def restart_head() -> None:
        restarts.append(1)
        head.restart()

    cut_off(make(place, settings, restart_head), killed, monkeypatch)
    if killed is not RestartStep.RELEASE:
        assert maintenance_lock.read_hold(place.files) is not None
        restart(make(place, settings, restart_head, token="two"), token="two")

    assert restarts == [1]
    assert (epochs(job), count_submitted(head)) == ([1, 2], 2)
    assert job.state() is JobState.RUNNING
    assert maintenance_lock.read_hold(place.files) is None


def test_job_that_was_stopped_for_a_restart_is_lost_and_not_cancelled_until_it_is_taken_up(
    head: RayHead, settings: Settings, place: OpenTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = start(settings, "tpu")

    cut_off(make(place, settings, head.restart), "ask", monkeypatch)

    (info,) = [each for name, each in head.jobs.items() if not is_note(name)]
    assert (info["status"], job.status().reason) == ("STOPPED", "lost")
    assert [each.done for each in keep_cluster(place, settings).jobs] == ["left"]


def test_job_of_other_records_that_was_stopped_for_a_restart_is_lost_and_not_cancelled(
    head: RayHead, settings: Settings, place: OpenTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, late, ended = [start(settings, "else", name) for name in ("fit", "late", "ended")]
    (name,) = [each for each in head.jobs if each.startswith(ended.id)]
    head.jobs[name]["status"] = "STOPPED"  # by a person
    del head.jobs[next(each for each in head.jobs if each.startswith(late.id))]

    cut_off(make(place, settings, head.restart), "ask", monkeypatch)
    again = start(settings, "else", "late")
    assert again.state() is JobState.RUNNING
    cut_off(make(place, settings, head.restart), "ask", monkeypatch)

    assert [each.status().reason for each in (job, again, ended)] == ["lost", "lost", "cancelled"]
    seen = make(place, settings, head.restart).look()
    assert [each.name for each in seen.jobs if not each.ours] == []
    assert len(describe_strays(seen)) == 2
    said: list[str] = []
    restart(make(place, settings, head.restart, said=said, token="two"), token="two")
    assert epochs(start(settings, "else")) == [1, 2]


def test_head_that_takes_no_note_of_jobs_of_other_records_is_restarted_all_the_same(
    head: RayHead, settings: Settings, place: OpenTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> NoReturn:
        raise RayRefused("submit `runtime-restart-1`", 500, "no room")

    monkeypatch.setattr(cluster_restart, "record_asked", refuse)
    start(settings, "else")
    said: list[str] = []

    restart(make(place, settings, head.restart, said=said), token="one")

    assert head.session == 2
    assert "ray refuses to submit `runtime-restart-1`: no room; until the restart 1 job may look cancelled" in said


@pytest.mark.parametrize(
    ("killed", "given_up_at"),
    [
        *(
            (step, "")
            for step in (
                RestartStep.HOLD,
                RestartStep.AWAIT_ENDS,
                RestartStep.FORGET,
                RestartStep.RESTART,
                RestartStep.TAKE_UP,
            )
        ),
        *((RestartStep.ASK, step) for step in ("hold", "await_ends", "forget", "take_up", "release")),
    ],
)
@pytest.mark.daily(4)
def test_restart_that_was_begun_is_given_up_and_its_jobs_go_on_once(
    killed: RestartStep,
    given_up_at: str,
    head: RayHead,
    settings: Settings,
    place: OpenTarget,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jobs = [start(settings, "tpu"), start(settings, "else")]
    cut_off(make(place, settings, head.restart), killed, monkeypatch)
    session = head.session
    if given_up_at:
        monkeypatch.setenv("RUNTIME_FAULTS", f"give_up.{given_up_at}=raise")
        faults.arm()
        with contextlib.suppress(FaultReached):
            give_up(make(place, settings, head.restart, token="two", gives_up=True), token="two")
        monkeypatch.delenv("RUNTIME_FAULTS")
        faults.arm()

    give_up(make(place, settings, head.restart, token="three", gives_up=True), token="three")

    assert maintenance_lock.read_hold(place.files) is None
    assert head.session == session
    again = [1] if killed is RestartStep.HOLD else [1, 2]
    assert (epochs(jobs[0]), jobs[0].state()) == (again, JobState.RUNNING)
    assert epochs(start(settings, "else")) == again
    assert count_submitted(head) == 2 * len(again)


def test_restart_that_is_not_under_way_is_not_given_up(head: RayHead, settings: Settings, place: OpenTarget) -> None:
    start(settings, "tpu")

    assert give_up(make(place, settings, head.restart, gives_up=True), token="one") == set()
    assert (head.session, count_submitted(head)) == (1, 1)


def test_restart_of_a_silent_head_is_given_up_only_if_no_job_would_count_as_cancelled(
    head: RayHead, settings: Settings, place: OpenTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_restart, "SILENT_S", 0)
    job = start(settings, "tpu")
    cut_off(make(place, settings, head.restart), "ask", monkeypatch)
    head.broken = 503

    with pytest.raises(HeadSilent):
        give_up(make(place, settings, head.restart, token="two", gives_up=True), token="two")

    held = maintenance_lock.read_hold(place.files)
    assert held is not None
    maintenance_lock.write_hold(place.files, replace(held, commanded=True))
    done = give_up(make(place, settings, head.restart, token="three", gives_up=True), token="three")
    assert (done, maintenance_lock.read_hold(place.files)) == ({RestartStep.HOLD, RestartStep.RELEASE}, None)
    head.restart()
    assert [each.done for each in keep_cluster(place, settings).jobs] == ["taken_up"]
    assert epochs(job) == [1, 2]


def test_while_the_cluster_is_held_keepers_and_launches_wait_and_after_an_hour_they_do_not(
    head: RayHead, settings: Settings, place: OpenTarget
) -> None:
    job = start(settings, "tpu")
    head.restart()
    now = ledger.now()
    held = MaintenanceLock(token="other", by="ada@desk", since=now, renewed=now, session="session_1")
    maintenance_lock.write_hold(place.files, held)

    (left,) = keep_cluster(place, settings).jobs
    with pytest.raises(RootHeld) as refused:
        start(settings, "tpu", "second")

    assert (left.done, left.seen.partition(" since ")[0]) == ("left", "the cluster is being restarted by ada@desk")
    assert (refused.value.exit_code, refused.value.retryable) == (3, True)
    assert (count_submitted(head), len(open_jobs.list_open(place.files, "tpu"))) == (1, 1)

    maintenance_lock.write_hold(place.files, replace(held, renewed=now - timedelta(minutes=61)))
    said: list[str] = []
    (kept,) = keep_cluster(place, settings, progress=said.append).jobs

    assert (kept.done, epochs(job)) == ("taken_up", [1, 2])
    assert "it is ignored" in said[0]
    assert start(settings, "tpu", "second").state() is JobState.RUNNING


def test_mark_that_is_old_is_begun_anew_with_the_session_of_today(
    head: RayHead, settings: Settings, place: OpenTarget
) -> None:
    start(settings, "tpu")
    head.restart()
    old = ledger.now() - timedelta(hours=3)
    maintenance_lock.write_hold(
        place.files, MaintenanceLock(token="x", by="bob@lab", since=old, renewed=old, session="session_1")
    )
    said: list[str] = []

    restart(make(place, settings, head.restart, said=said), token="one")

    assert head.session == 3
    assert said[0] == "the mark of bob@lab is older than an hour: beginning anew"


def test_head_that_does_not_come_back_is_said_in_its_own_words_and_restarted_by_the_next_command(
    head: RayHead, settings: Settings, place: OpenTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = start(settings, "tpu")

    def break_head() -> None:
        head.broken = 503

    boot = {"state": "waiting", "waiting-for": "image i@sha256:0"}
    with pytest.raises(HeadNotBack) as late:
        restart(make(place, settings, break_head, read_boot=lambda: boot, head_s=0), token="one")
    assert "it says `waiting-for`: image i@sha256:0" in late.value.facts
    assert maintenance_lock.read_hold(place.files) is not None

    monkeypatch.setattr(cluster_restart, "SILENT_S", 0)
    restart(make(place, settings, head.restart, token="two"), token="two")

    assert (head.session, epochs(job), maintenance_lock.read_hold(place.files)) == (2, [1, 2], None)


def test_command_that_dies_while_it_waits_for_the_head_is_finished_without_another_restart(
    head: RayHead, settings: Settings, place: OpenTarget
) -> None:
    job = start(settings, "tpu")
    restarts: list[int] = []

    def break_head() -> None:
        restarts.append(1)
        head.broken = 503

    def die() -> NoReturn:
        raise KeyboardInterrupt

    def come_back() -> None:
        if head.broken:
            head.restart()

    one = make(place, settings, break_head, read_boot=die)
    with pytest.raises(KeyboardInterrupt):
        restart(one, token="one")
    left = maintenance_lock.read_hold(place.files)
    assert one.marked
    assert left is not None
    assert left.commanded

    two = make(place, settings, break_head, token="two", read_boot=come_back)
    restart(two, token="two")

    assert (restarts, head.session, epochs(job), two.marked) == ([1], 2, [1, 2], False)


def test_command_that_another_took_over_while_it_stood_still_changes_nothing_more(
    head: RayHead, settings: Settings, place: OpenTarget
) -> None:
    job = start(settings, "tpu")
    restarts: list[str] = []

    def be_overtaken() -> None:
        restart(make(place, settings, lambda: (head.restart(), restarts.append("two")), token="two"), token="two")
        mark = maintenance_lock.read_hold(place.files)
        assert mark is None

    with pytest.raises(RestartTakenOver):
        restart(make(place, settings, be_overtaken), token="one")

    assert (restarts, epochs(job), maintenance_lock.read_hold(place.files)) == (["two"], [1, 2], None)


def test_command_that_waits_for_the_head_ends_once_another_took_over(
    head: RayHead, settings: Settings, place: OpenTarget
) -> None:
    def lose_mark() -> None:
        maintenance_lock.remove_hold(place.files)

    with pytest.raises(RestartTakenOver) as ended:
        restart(make(place, settings, lambda: None, read_boot=lose_mark, head_s=PATIENCE_S), token="one")

    assert ended.value.holder is None


@pytest.mark.parametrize("step", [RestartStep.ASK, RestartStep.RESTART, RestartStep.RELEASE])
def test_step_of_an_old_view_leaves_the_mark_of_another_as_it_is(
    step: RestartStep, head: RayHead, settings: Settings, place: OpenTarget
) -> None:
    start(settings, "tpu")
    world = make(place, settings, head.restart)
    world.act(RestartStep.HOLD, world.look())
    seen = world.look()
    assert seen.hold is not None
    theirs = replace(seen.hold, token="two", by="two@desk")
    maintenance_lock.write_hold(place.files, theirs)

    with pytest.raises(RestartTakenOver) as ended:
        world.act(step, seen)

    assert (ended.value.holder, maintenance_lock.read_hold(place.files), world.marked) == ("two@desk", theirs, False)


def test_session_of_a_head_that_was_silent_is_noted_when_it_answers(
    head: RayHead, settings: Settings, place: OpenTarget
) -> None:
    job = start(settings, "tpu")
    head.broken = 503
    world = make(place, settings, lambda: None, drop_foreign=True)
    world.act(RestartStep.HOLD, world.look())
    head.broken = None

    held = world.look().hold

    # Otherwise the old session would count as the new one once the unit was told to restart.
    assert held is not None
    assert (held.session, held.drops_others) == ("session_1", True)
    assert epochs(job) == [1]


def test_head_that_is_silent_for_a_moment_is_not_restarted_before_its_jobs_were_asked(
    head: RayHead, settings: Settings, place: OpenTarget
) -> None:
    start(settings, "tpu")
    world = make(place, settings, head.restart)
    world.act(RestartStep.HOLD, world.look())

    world.act(RestartStep.RESTART, replace(world.look(), session=None, jobs=()))

    assert head.session == 1
    assert decide_step(world.look(), token="one") is RestartStep.ASK


def test_head_that_answers_500_is_one_that_does_not_answer(
    head: RayHead, settings: Settings, place: OpenTarget
) -> None:
    job = start(settings, "tpu")
    head.broken = 500

    with pytest.raises(RayUnavailable, match="the head is not ready: not now"):
        keep_cluster(place, settings)

    assert epochs(job) == [1]


def test_job_that_the_head_refuses_to_end_does_not_end_the_restart(
    head: RayHead, settings: Settings, place: OpenTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_restart, "END_S", 0)
    jobs = [start(settings, "tpu"), start(settings, "tpu", "other")]
    head.refuses = {name for name in head.jobs if name.startswith(jobs[0].id)}
    said: list[str] = []

    restart(make(place, settings, head.restart, said=said), token="one")

    (stuck,) = head.refuses
    assert (
        f"ray refuses to stop `{stuck}`: RuntimeError: its actor is gone; the restart ends `fit` of "
        f"{jobs[0].entry().owner} ({stuck})"
    ) in said
    assert [epochs(job) for job in jobs] == [[1, 2], [1, 2]]


def test_head_that_dies_while_jobs_end_is_restarted(
    head: RayHead, settings: Settings, place: OpenTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_restart, "SILENT_S", 0)
    job = start(settings, "tpu")
    world = make(place, settings, head.restart)
    for step in (RestartStep.HOLD, RestartStep.ASK):
        world.act(step, world.look())
    seen = world.look()
    head.broken = 500

    world.act(RestartStep.AWAIT_ENDS, seen)
    restart(world, token="one")

    assert (head.session, epochs(job)) == (2, [1, 2])


class Google:
    """A reaper that lists one member, and never saw a node that is dead."""

    def __init__(self, state: str = "READY") -> None:
        self.state, self.asked = state, 0

    def list_nodes(self) -> list[TpuNode]:
        self.asked += 1
        labels = {JOINS_LABEL: "marin-main"}
        name = "projects/p/locations/z/nodes/main-v4-16"
        return [TpuNode(resource=name, state=self.state, labels=labels, addresses=("10.0.0.7", "10.0.0.8"))]


def test_members_are_awaited_until_ray_sees_each_of_their_hosts(
    head: RayHead, settings: Settings, place: OpenTarget
) -> None:
    google, said = Google(), []
    world = make(place, settings, head.restart, said=said, reaper=lambda: google)
    head.hosts = ["10.0.0.7"]
    joins = threading.Timer(1.5, lambda: head.hosts.append("10.0.0.8"))
    joins.start()

    world.act(RestartStep.AWAIT_MEMBERS, world.look())

    joins.join()
    assert google.asked > 1
    assert said == ["waiting for 1 member to join again, 300 s at most"]


def test_member_that_does_not_join_is_named_and_one_that_google_still_makes_is_not_awaited(
    head: RayHead, settings: Settings, place: OpenTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_restart, "MEMBERS_S", 0)
    lines = []
    for state in ("READY", "CREATING"):
        said: list[str] = []
        google = Google(state)
        world = make(place, settings, head.restart, said=said, reaper=lambda: google)  # noqa: B023
        world.act(RestartStep.AWAIT_MEMBERS, world.look())
        lines.append(said[1:])

    seen = "member node `main-v4-16` is READY, and Ray does not see it yet; `runtime cluster status --tunnel`"
    assert lines == [[seen], []]


def test_cancelled_job_is_ended_and_not_taken_up(head: RayHead, settings: Settings, place: OpenTarget) -> None:
    job = start(settings, "tpu")
    place.files.write(f"jobs/{job.id}/cancel", b"{}")
    world = make(place, settings, head.restart)

    restart(world, token="one")

    assert ([each.done for each in world.kept], epochs(job)) == (["ended"], [1])


def test_job_that_waits_through_many_restarts_is_not_given_up(
    head: RayHead, settings: Settings, place: OpenTarget
) -> None:
    job = start(settings, "tpu")

    for token in ("one", "two", "three", "four", "five"):
        restart(make(place, settings, head.restart, token=token), token=token)

    assert epochs(job) == [1, 2, 3, 4, 5, 6]
    assert job.state() is JobState.RUNNING


def test_job_of_another_record_root_is_named_with_its_owner(
    head: RayHead, settings: Settings, place: OpenTarget
) -> None:
    body: dict[str, Any] = {
        "submission_id": "j-0a-e1-p0-0",
        "entrypoint": "exec python3 -m runtime.launchers.ray.driver /else j-0a --epoch 1 --part 0",
        "metadata": {"job": "j-0a", "epoch": "1", "name": "fit", "owner": "bob", "grace_s": "1"},
        "status": "RUNNING",
    }
    head.jobs["j-0a-e1-p0-0"] = body
    start(settings, "tpu")

    lines = describe_strays(make(place, settings, head.restart).look())

    assert lines == ["`fit` of bob (j-0a-e1-p0-0): kept by nobody: the same launch takes it up"]


@pytest.mark.parametrize("metadata", ["text", ["job"], {"job": ["j-0a"], "epoch": 1}, {"job": 7}, {"grace_s": None}])
def test_job_with_odd_metadata_is_one_of_others(
    head: RayHead, settings: Settings, place: OpenTarget, metadata: object
) -> None:
    start(settings, "tpu")
    (ours,) = head.jobs.values()
    head.jobs["j-0a-e1-p0-0"] = {**ours, "submission_id": "j-0a-e1-p0-0", "metadata": metadata}

    seen = make(place, settings, head.restart).look().jobs

    assert {each.name: (each.ours, each.here) for each in seen} == {
        ours["submission_id"]: (True, True),
        "j-0a-e1-p0-0": (False, False),
    }


def test_shims_that_outlive_their_driver_are_waited_for(head: RayHead, settings: Settings, place: OpenTarget) -> None:
    job = start(settings, "tpu")
    world = make(place, settings, head.restart)
    (name,) = head.jobs
    folder = f"jobs/{job.id}"
    place.files.write(f"{folder}/ray/1.0", json.dumps({"runs": {"0": {"state": "running"}}}).encode())
    place.files.write(f"{folder}/runs/0/a0001/start.json", b"{}")
    (seen,) = world.look().jobs
    head.jobs[name]["status"] = "STOPPED"

    before = world.list_unended({name: seen})
    place.files.write(f"{folder}/runs/0/a0001/end.stopped.143", b"{}")

    assert (before, world.list_unended({name: seen})) == ([name], [])
    assert [each.target.name for each in list_places(place)] == ["tpu"]


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"version": 9}',
        b'{"token": "t", "by": "b", "since": "2026-01-01", "renewed": "2026-01-01"}',
        b'{"token": "t", "by": "b", "since": 1, "renewed": 2}',
    ],
)
def test_mark_that_nobody_can_read_blocks_nobody(text: bytes, place: OpenTarget) -> None:
    place.files.write(maintenance_lock.FILE, text)

    maintenance_lock.refuse_if_held(place.files)

    assert maintenance_lock.read_hold(place.files) is None


def test_job_that_ends_only_after_its_restart_was_given_up_is_lost_and_not_cancelled(
    head: RayHead, settings: Settings, place: OpenTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_restart, "END_S", 0)
    job = start(settings, "tpu")
    (name,) = head.jobs
    cut_off(make(place, settings, head.restart), "ask", monkeypatch)
    head.jobs[name]["status"] = "RUNNING"  # its commands take longer than their grace

    give_up(make(place, settings, head.restart, token="two", gives_up=True), token="two")
    head.jobs[name]["status"] = "STOPPED"

    assert maintenance_lock.read_hold(place.files) is None
    assert job.status().reason == "lost"
    assert [each.done for each in keep_cluster(place, settings).jobs] == ["taken_up"]


def test_job_that_a_command_stops_after_it_was_given_up_by_another_is_lost_and_not_cancelled(
    head: RayHead, settings: Settings, place: OpenTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_restart, "END_S", 0)
    jobs = [start(settings, "tpu", name) for name in ("fit", "eval")]
    slept = False
    stop = RayJobs.stop

    def sleep_before_the_second(self: RayJobs, name: str) -> None:
        nonlocal slept
        if slept:
            give_up(make(place, settings, head.restart, token="two", gives_up=True), token="two")
        slept = True
        stop(self, name)

    monkeypatch.setattr(RayJobs, "stop", sleep_before_the_second)
    with pytest.raises(RestartTakenOver):
        restart(make(place, settings, head.restart), token="one")

    keep_cluster(place, settings)
    assert [epochs(job) for job in jobs] == [[1, 2], [1, 2]]
    assert [job.state() for job in jobs] == [JobState.RUNNING] * 2
