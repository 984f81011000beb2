"""Ray: settings, plans, the head's API, states and the driver's decisions, without Ray."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from runtime.config import Project, Settings
from runtime.end_reasons import EndReason
from runtime.errors import InvalidValue, NotPossible
from runtime.jobs.plan import JobIdentity, LaunchPlan, NativeState, PlanContext, Target
from runtime.jobs.spec import (
    Array,
    BuildOn,
    Code,
    CodeMode,
    EnvironmentManager,
    Gpus,
    JobEnvironment,
    JobResources,
    JobSpec,
    JobState,
    Priority,
    Range,
    SecretRef,
    Tpu,
)
from runtime.launchers.ray import client, detach, placement, submit_retry
from runtime.launchers.ray.client import RayJobs, RayRefused, RayUnavailable
from runtime.launchers.ray.launcher import RayHost, RayLauncher, set_epoch
from runtime.launchers.ray.names import note_name, split_name, submission_name
from runtime.launchers.ray.priority import make_demand
from runtime.launchers.ray.resource_request import count_hosts
from runtime.launchers.ray.settings import RayTarget, read_place
from runtime.launchers.ray.states import read_states
from runtime.stack.iap_ssh import HeadWay
from tests.fakes.ray_head import RayHead
from tests.services_support import wait_until

JOB = JobIdentity(id=f"j-{'0' * 24}", name="train", owner="ada", snapshot=None)
NAME = f"{JOB.id}-e1-p0-4b8e25"


@pytest.fixture
def context(tmp_path: Path) -> PlanContext:
    settings = Settings(
        project=Project(root=tmp_path),
        data_dir=tmp_path / "data",
        cache_dir=tmp_path / "cache",
        config_dir=tmp_path / "config",
        outputs=str(tmp_path / "contract.json"),
    )
    return PlanContext(
        settings=settings, now=datetime(2026, 1, 1, tzinfo=UTC), base=tmp_path, environ={"T": "hush"}, records=""
    )


def target(records: str | None = "/shared/runs", **settings: Any) -> Target:
    return Target(name="lab", kind="ray", records=records, settings={"address": "http://head:8265", **settings})


def plan(context: PlanContext, where: Target | None = None, **fields: Any) -> LaunchPlan:
    return RayLauncher().plan(JobSpec(command=("python", "train.py"), **fields), where or target(), JOB, context)


# settings


@pytest.mark.parametrize(
    ("settings", "records", "named"),
    [
        ({"address": "head:8265"}, "/r", "targets.lab.address"),
        ({"address": "http://head:8265/api"}, "/r", "targets.lab.address"),
        ({"cluster": "main"}, "/r", "targets.lab.cluster"),
        ({"ssh_options": ["-v"]}, "/r", "targets.lab.ssh_options"),
        ({}, None, "targets.lab.records"),
        ({}, "claim://a/b", "targets.lab.records"),
        ({}, "gs://", "targets.lab.records"),
    ],
)
def test_setting_that_cannot_be_used_is_refused_by_its_name(
    settings: dict[str, Any], records: str | None, named: str
) -> None:
    with pytest.raises(InvalidValue) as refused:
        RayLauncher().check_settings(target(records, **settings))

    assert f"targets.lab.{refused.value.message.partition('targets.lab.')[2].partition('`')[0].split(';')[0]}" == named


def test_target_without_a_head_is_refused() -> None:
    with pytest.raises(InvalidValue, match=r"targets\.lab\.address"):
        RayLauncher().check_settings(Target(name="lab", kind="ray", records="/r"))


# plans


def test_plan_is_a_submission_whose_driver_asks_for_nothing_and_names_no_runtime_env(context: PlanContext) -> None:
    planned = plan(context)

    name = submission_name(JOB.id, "/shared/runs", 1, 0)
    assert json.loads(planned.artefacts["submission.json"]) == {
        "submission_id": name,
        "entrypoint": f"exec python3 -m runtime.launchers.ray.driver /shared/runs {JOB.id} --epoch 1 --part 0",
        "metadata": {"job": JOB.id, "epoch": "1", "name": "train", "owner": "ada", "grace_s": "120"},
    }
    assert [(part.name, part.offset, part.count) for part in planned.parts] == [(name, 0, 1)]
    assert (planned.order["retries"], planned.order["ray"]) == (
        "backend",
        {"options": {"num_cpus": 1.0}, "bundle": {"CPU": 1.0}},
    )


def test_plan_asks_for_the_resources_of_each_node(context: PlanContext) -> None:
    resources = JobResources(cpus=2, memory=Range(5, 9), gpus=Gpus(count=0.5, type="A100"))

    planned = plan(context, resources=resources, nodes=3, array=Array(count=9, offset=4, max_parallel=2))

    assert planned.order["ray"] == {
        "options": {"num_cpus": 2, "num_gpus": 0.5, "memory": 5, "accelerator_type": "A100"},
        "bundle": {"CPU": 2, "GPU": 0.5, "memory": 5, "accelerator_type:A100": 0.001},
        "max_parallel": 2,
    }
    assert (planned.order["nodes"], planned.order["meet"]) == (3, {"start_s": 300.0})
    assert [(part.offset, part.count) for part in planned.parts] == [(4, 9)]


def test_order_says_whose_runs_these_are_and_how_important(context: PlanContext) -> None:
    plain, urgent = plan(context), plan(context, priority=Priority.URGENT)

    assert plain.order["turn"] == {"owner": "ada", "priority": "normal"}
    assert urgent.order["turn"] == {"owner": "ada", "priority": "urgent"}
    assert make_demand(urgent.order, JOB.id).priority is Priority.URGENT
    assert urgent.fidelity["priority"].fidelity == "shim"


@pytest.mark.parametrize(
    ("kind", "hosts"),
    [("v4-8", (1, 4)), ("v4-16", (2, 4)), ("v5litepod-8", (1, 8)), ("v5litepod-16", (4, 4)), ("v6e-1", (1, 1))],
)
def test_type_of_a_tpu_gives_its_hosts_and_their_chips(kind: str, hosts: tuple[int, int]) -> None:
    assert count_hosts(kind) == hosts


def test_plan_for_a_slice_has_a_node_for_each_host(context: PlanContext) -> None:
    one, two = (plan(context, resources=JobResources(tpu=Tpu(type=kind))) for kind in ("v4-8", "v4-16"))

    assert (one.order["nodes"], one.order["ray"]["options"]["resources"]) == (1, {"TPU": 4, "TPU-v4-8-head": 1})
    assert (two.order["nodes"], two.order["ray"]["tpu"]) == (
        2,
        {"type": "v4-16", "chips": 4, "hosts": 2, "slices": 1},
    )
    with pytest.raises(NotPossible, match="has 2 hosts, and `nodes` is 3"):
        plan(context, resources=JobResources(tpu=Tpu(type="v4-16")), nodes=3)
    with pytest.raises(InvalidValue, match=r"resources\.tpu\.type"):
        plan(context, resources=JobResources(tpu=Tpu(type="big")))


def test_secret_is_a_file_of_a_shared_folder_and_refused_with_a_bucket(context: PlanContext) -> None:
    secret = SecretRef(name="TOKEN", source="env://T")

    planned = plan(context, secrets=(secret,))

    assert planned.order["secrets"] == {"TOKEN": "secrets/TOKEN"}
    with pytest.raises(NotPossible, match="whose record root is a bucket"):
        plan(context, target("gs://lab/runs"), secrets=(secret,))
    with pytest.raises(NotPossible, match="whose record root is a bucket"):
        plan(context, target("gs://lab/runs"), env={"API_TOKEN": None})


@pytest.mark.parametrize(("records", "local"), [("/shared/runs", {}), ("gs://lab/runs", {"local": True})])
def test_environment_is_made_by_the_nodes_and_stays_there_if_the_record_root_is_a_bucket(
    context: PlanContext, records: str, local: dict[str, bool]
) -> None:
    made = {"manager": "uv", "lock": "uv.lock", "extras": ["tpu"], "build_on": "node", **local}
    wanted = JobEnvironment(manager=EnvironmentManager.UV, extras=("tpu",))

    assert plan(context, target(records), environment=wanted).order["environment"] == made
    with pytest.raises(NotPossible, match=r"`environment\.build_on: submit`"):
        plan(context, target(records), environment=replace(wanted, build_on=BuildOn.SUBMIT))


@pytest.mark.parametrize("lock", ["../../etc/passwd", "/etc/passwd", "train/../../uv.lock", "train/uv-gpu.lock"])
def test_lock_that_the_job_does_not_take_along_or_uv_does_not_read_is_refused(context: PlanContext, lock: str) -> None:
    wanted = JobEnvironment(manager=EnvironmentManager.UV, lock="train/uv.lock")

    assert plan(context, environment=wanted).order["environment"]["lock"] == "train/uv.lock"
    with pytest.raises(NotPossible, match=r"`environment\.lock` is"):
        plan(context, environment=replace(wanted, lock=lock))


def test_live_tree_is_refused(context: PlanContext) -> None:
    with pytest.raises(NotPossible, match="no node of the cluster can see"):
        plan(context, code=Code(mode=CodeMode.NONE))


def test_later_epoch_has_an_id_of_its_own(context: PlanContext) -> None:
    planned = plan(context)
    body = json.loads(planned.artefacts["submission.json"])

    later = set_epoch(body, read_place(target(), context), JOB.id, 2, 0)

    assert later["submission_id"] == submission_name(JOB.id, "/shared/runs", 2, 0)
    assert later["entrypoint"].endswith(f"{JOB.id} --epoch 2 --part 0")
    assert later["metadata"] == {**body["metadata"], "epoch": "2"}


def test_name_is_read_back_and_differs_by_record_root() -> None:
    names = {submission_name(JOB.id, root, 3, 1) for root in ("/a", "/b")}

    assert len(names) == 2
    assert {split_name(f"{name}+abcd") for name in names} == {(JOB.id, 3, 1)}


# the stack


def test_place_of_a_stack_has_a_tunnel_to_its_head(context: PlanContext) -> None:
    (context.base / "contract.json").write_text(json.dumps(CONTRACT))
    where = Target(name="tpu", kind="ray", stack="marin", settings={"ssh_options": ["-v"]})
    RayLauncher().check_settings(where)

    place = read_place(where, context)

    way = HeadWay(project="marin-lab", zone="us-central2-b", head="ray-head", dashboard=8265, options=("-v",))
    assert (place.root, place.address, place.tunnel) == ("gs://marin/jobs-of-ray/main", None, way)


def test_launch_on_a_stack_is_told_of_a_type_that_no_pool_has(context: PlanContext) -> None:
    contract = json.loads(json.dumps(CONTRACT))
    contract["clusters"]["main"]["pools"] = {"v4": {"accelerator": "v4-8", "max": 4}}
    (context.base / "contract.json").write_text(json.dumps(contract))
    where = Target(name="tpu", kind="ray", stack="marin")

    one, other = (plan(context, where, resources=JobResources(tpu=Tpu(type=kind))) for kind in ("v4-8", "v4-16"))

    assert (one.notes, len(other.notes), "type v4-16" in other.notes[0]) == ((), 1, True)
    # Its machines are Google's, which announce that they will be taken away; nobody knows of a lab's.
    assert (one.order["notices"], plan(context).order.get("notices")) == ({"clouds": ["gce"]}, None)


@pytest.mark.parametrize(
    ("location", "root", "told"),
    [
        ("europe-west4", None, True),
        ("us-central2", None, False),
        ("us", None, False),
        (None, None, False),
        ("europe-west4", "gs://other", False),
    ],
)
def test_launch_on_a_stack_is_told_that_its_records_are_in_another_region(
    context: PlanContext, location: str | None, root: str | None, told: bool
) -> None:
    contract = {**CONTRACT, "records": {**CONTRACT["records"], "location": location}}
    (context.base / "contract.json").write_text(json.dumps(contract))

    planned = plan(context, Target(name="tpu", kind="ray", stack="marin", records=root))

    text = "records are in europe-west4 and the nodes in us-central2: traffic between them costs money"
    assert planned.notes == ((text,) if told else ())


@pytest.mark.parametrize(
    ("records", "settings", "known"),
    [(None, {}, True), ("/shared/runs", {"cluster": "main"}, True), ("/shared/runs", {}, False)],
)
def test_nodes_of_a_stack_s_cluster_are_known_as_such_though_an_address_leads_to_its_head(
    context: PlanContext, records: str | None, settings: dict[str, str], known: bool
) -> None:
    (context.base / "contract.json").write_text(json.dumps(CONTRACT))
    where = replace(target(records, **settings), stack="marin")
    RayLauncher().check_settings(where)

    planned = plan(context, where, resources=JobResources(tpu=Tpu(type="v4-8")))

    assert (planned.order.get("notices"), len(planned.notes)) == (({"clouds": ["gce"]}, 1) if known else (None, 0))
    assert read_place(where, context).tunnel is None


def test_run_that_names_cpus_is_kept_to_them_and_one_that_names_none_is_not(context: PlanContext) -> None:
    few, unnamed = (plan(context, resources=JobResources(cpus=cpus)) for cpus in (2.5, None))

    assert (few.order["limits"], unnamed.order.get("limits")) == ({"cpus": 2.5}, None)


CONTRACT: dict[str, Any] = {
    "schema": 1,
    "stack": "marin",
    "project": "marin-lab",
    "records": {"url": "gs://marin"},
    "clusters": {
        "main": {
            "head": "ray-head",
            "cluster_name": "marin-main",
            "zone": "us-central2-b",
            "internal_ip": "10.0.0.2",
            "image": "image",
            "ports": {"dashboard": 8265},
            "worker_identity": "w@x",
            "config_sha256": "0",
        }
    },
}


# the head's API


class Head(RayHead):
    """A head whose jobs wait unless a test says what becomes of them."""

    first: ClassVar[str] = "PENDING"

    def __init__(self) -> None:
        super().__init__()
        self.drivers = [{"type": "DRIVER", "submission_id": None}]

    @property
    def place(self) -> RayTarget:
        return RayTarget(target="lab", root="/r", python="python3", address=self.address)


@pytest.fixture
def head() -> Iterator[Head]:
    with Head() as running:
        yield running


def test_submission_of_a_taken_id_is_answered_by_the_job_that_has_it(head: Head) -> None:
    jobs = RayJobs(head.place)
    body = {"submission_id": NAME, "metadata": {"job": JOB.id, "epoch": "1"}}
    first = jobs.submit(body)
    # As if another launch had submitted it between our two requests.
    head.hides.add(NAME)

    second = jobs.submit(body)

    assert first == second == {**body, "status": "PENDING"}
    assert jobs.list() == {NAME: first}


def test_job_that_is_gone_is_none_and_stopping_or_deleting_it_is_success(head: Head) -> None:
    jobs = RayJobs(head.place)

    jobs.stop(NAME)
    jobs.delete(NAME)

    assert (jobs.get(NAME), jobs.read_log(NAME), jobs.list()) == (None, "", {})


def test_job_is_replaced_once_the_head_no_longer_looks_at_its_actor(
    head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    paused: list[float] = []
    monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=time.monotonic, sleep=paused.append))
    head.jobs[NAME] = {"status": "SUCCEEDED"}
    head.actors = ["ALIVE", "ALIVE", "DEAD", "ALIVE"]

    RayJobs(head.place).replace(NAME)

    assert (head.jobs, head.actors, paused) == ({}, ["ALIVE"], [0.1, 0.1, client.WATCH_S])


def test_head_that_refuses_and_one_that_does_not_answer_are_told_apart(head: Head) -> None:
    jobs = RayJobs(head.place)
    head.broken = 500
    with pytest.raises(RayRefused) as refused:
        jobs.get(NAME)
    head.broken = 503
    with pytest.raises(RayUnavailable):
        jobs.get(NAME)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        nowhere = RayTarget(target="lab", root="/r", python="p", address=f"http://127.0.0.1:{unused.getsockname()[1]}")
        with pytest.raises(RayUnavailable) as silent:
            RayJobs(nowhere).get(NAME)

    assert (refused.value.status, refused.value.said) == (500, "not now")
    assert (silent.value.exit_code, silent.value.retryable) == (3, True)


def test_id_that_another_job_has_is_no_job_of_ours(head: Head, context: PlanContext, tmp_path: Path) -> None:
    where = target(str(tmp_path / "runs"), address=head.place.address)
    planned = plan(context, where)
    head.jobs[planned.parts[0].name] = {"status": "RUNNING", "metadata": {"job": "j-other", "epoch": "1"}}
    host = RayLauncher().open_host(where, context)

    found = RayLauncher().find(where, [planned.parts[0].name], host)
    with pytest.raises(NotPossible, match="has another job under the id"):
        RayLauncher().submit(planned, planned.parts[0], host)

    assert found == {}


UNSTARTED = {"status": "FAILED", "error_type": "JOB_SUPERVISOR_ACTOR_UNKNOWN_FAILURE", "driver_exit_code": None}


@pytest.mark.parametrize(
    ("statuses", "submitted", "last"),
    [
        ([{"status": "RUNNING"}], 1, "RUNNING"),
        ([UNSTARTED, UNSTARTED, {"status": "RUNNING"}], 3, "RUNNING"),
        ([UNSTARTED] * 9, 3, "FAILED"),
        ([{**UNSTARTED, "driver_exit_code": 1}], 1, "FAILED"),
        ([{**UNSTARTED, "error_type": "JOB_SUPERVISOR_ACTOR_START_TIMEOUT"}], 1, "FAILED"),
        ([{**UNSTARTED, "error_type": "JOB_ENTRYPOINT_COMMAND_START_ERROR"}], 1, "FAILED"),
    ],
)
def test_job_whose_driver_the_head_fails_to_start_is_submitted_again(
    head: Head, context: PlanContext, tmp_path: Path, statuses: list[dict[str, Any]], submitted: int, last: str
) -> None:
    where = target(str(tmp_path / "runs"), address=head.place.address)
    planned = plan(context, where)
    head.statuses = list(statuses)

    RayLauncher().submit(planned, planned.parts[0], RayLauncher().open_host(where, context))

    assert (len(head.submitted), head.jobs[planned.parts[0].name]["status"]) == (submitted, last)


def test_job_whose_driver_left_a_note_is_not_submitted_again(head: Head, context: PlanContext, tmp_path: Path) -> None:
    where = target(str(tmp_path / "runs"), address=head.place.address)
    planned = plan(context, where)
    host = RayLauncher().open_host(where, context)
    host.files.write(f"jobs/{JOB.id}/{note_name(1, 0)}", b"{}")
    head.statuses = [UNSTARTED]

    RayLauncher().submit(planned, planned.parts[0], host)

    assert len(head.submitted) == 1


def test_ended_job_of_a_removed_record_is_replaced(
    head: Head, context: PlanContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submit_retry, "START_S", 0.0)
    monkeypatch.setattr(client, "WATCH_S", 0.0)
    where = target(str(tmp_path / "runs"), address=head.place.address)
    planned = plan(context, where)
    name = planned.parts[0].name
    launcher, host = RayLauncher(), RayLauncher().open_host(where, context)
    old = {"job": JOB.id, "epoch": "1", "record": "of another record"}
    head.jobs[name] = {"status": "FAILED", "metadata": old}

    found = launcher.find(where, [name], host)
    launcher.submit(planned, planned.parts[0], host)

    assert (found, head.jobs[name]["status"]) == ({}, "PENDING")
    assert launcher.find(where, [name], host) == {name: name}
    assert isinstance(host, RayHost)


# states


NOTE = {
    "runs": {"0": {"state": "running", "hosts": ["n1"]}, "1": {"state": "waiting"}},
    "wants": {"bundle": {"CPU": 2, "GPU": 1}},
}


@pytest.mark.parametrize(
    ("info", "note", "said"),
    [
        (None, None, [(None, JobState.FAILED, EndReason.LOST)]),
        ({"status": "PENDING"}, None, [(None, JobState.PENDING, None)]),
        ({"status": "RUNNING"}, None, [(None, JobState.RUNNING, None)]),
        ({"status": "RUNNING"}, NOTE, [(None, JobState.RUNNING, None), (1, JobState.PENDING, None)]),
        ({"status": "SUCCEEDED"}, NOTE, [(None, JobState.SUCCEEDED, None)]),
        ({"status": "STOPPED"}, NOTE, [(None, JobState.CANCELLED, EndReason.CANCELLED)]),
        (
            {"status": "FAILED", "error_type": "JOB_SUPERVISOR_ACTOR_START_TIMEOUT"},
            None,
            [(None, JobState.FAILED, EndReason.NO_CAPACITY)],
        ),
        ({"status": "FAILED", "driver_exit_code": 127}, None, [(None, JobState.FAILED, EndReason.APP_FAILED)]),
        ({"status": "FAILED", "driver_exit_code": 2}, NOTE, [(None, JobState.FAILED, EndReason.APP_FAILED)]),
        ({"status": "FAILED", "driver_exit_code": 1}, NOTE, [(None, JobState.FAILED, EndReason.LOST)]),
        ({"status": "FAILED", "driver_exit_code": 3}, NOTE, [(None, JobState.FAILED, EndReason.LOST)]),
        ({"status": "FAILED", "driver_exit_code": -9}, NOTE, [(None, JobState.FAILED, EndReason.LOST)]),
        ({"status": "FAILED", "driver_exit_code": None}, None, [(None, JobState.FAILED, EndReason.LOST)]),
    ],
)
def test_words_of_the_head_and_the_driver_are_states(
    info: Mapping[str, Any] | None,
    note: Mapping[str, Any] | None,
    said: list[tuple[int | None, JobState, EndReason | None]],
) -> None:
    found: list[NativeState] = read_states(NAME, info, note)

    assert [(each.index, each.state, each.reason) for each in found] == said


# the driver's decisions


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ([0], 0),
        ([1], 1),
        ([10], None),
        ([12], None),
        ([None], None),
        ([137], None),
        ([2], 2),
        ([3], 3),
        ([11], 11),
        ([0, 1], 0),
        ([0, None], 0),
        ([10, 10], None),
        ([10, 2], 2),
        ([None, 0], None),
        ([None, 3], 3),
    ],
)
def test_codes_of_all_nodes_say_whether_a_run_is_placed_again(codes: Sequence[int | None], code: int | None) -> None:
    assert placement.judge_codes(codes) == code


@pytest.mark.parametrize(
    ("codes", "nodes", "over"),
    [
        ({}, 2, False),
        ({1: None}, 2, True),
        ({1: 2}, 2, True),
        ({1: 0}, 2, False),
        ({1: 10}, 3, False),
        ({0: None, 1: 10}, 2, False),
    ],
)
def test_nodes_are_ended_when_another_cannot_take_part(codes: dict[int, int | None], nodes: int, over: bool) -> None:
    assert placement.is_over(codes, nodes) is over


def test_pauses_grow_with_placements_that_began_nothing() -> None:
    retry = {"backoff_s": [10.0, 35.0]}

    assert [placement.next_pause(idle, retry, lambda: 0.5) for idle in range(4)] == [0.0, 10.0, 20.0, 35.0]


@pytest.mark.parametrize(("codes", "worst"), [([0, 0], 0), ([0, 1], 1), ([1, 3, 2], 2), ([11, 1], 11)])
def test_driver_ends_with_the_worst_code(codes: list[int], worst: int) -> None:
    assert placement.worst_code(codes) == worst


@pytest.mark.parametrize(
    ("workers", "order"), [([None, None], [0, 1]), (["2", "10", "0"], [2, 0, 1]), (["1", None], [0, 1])]
)
def test_hosts_of_a_slice_are_nodes_in_its_own_order(workers: list[str | None], order: list[int]) -> None:
    assert placement.sort_nodes([{"worker": each} for each in workers]) == order


@pytest.mark.parametrize(
    ("resources", "name"),
    [
        ({"CPU": 1, "TPU": 4, "memory": 1, "node:10.0.0.3": 1, "TPU-v4-16-head": 1, "slice-a": 1}, "slice-a"),
        ({"CPU": 1, "TPU": 4, "TPU-V4": 1, "accelerator_type:TPU-V4": 1, "TPU-v4-16-head": 1, "s": 1}, "s"),
        ({"CPU": 1, "TPU": 4, "TPU-v4-16-head": 1}, None),
        ({"TPU-v4-16-head": 1, "a": 1, "b": 1}, None),
    ],
)
def test_first_host_names_its_slice(resources: dict[str, float], name: str | None) -> None:
    assert placement.find_slice(resources, "v4-16") == name


def test_runs_of_an_array_are_placed_within_bounds() -> None:
    assert [
        placement.count_at_once(*each)
        for each in ((1, None), (1000, None), (1000, 8), (3, 8), (900, 900), (9000, 9000))
    ] == [
        1,
        256,
        8,
        3,
        900,
        1024,
    ]


# the guard


def test_guard_reports_the_exit_code_and_passes_the_end_of_its_lifeline_on_as_term(tmp_path: Path) -> None:
    log = tmp_path / "log"
    program = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); print('up', flush=True)"
    program += "; time.sleep(600)"
    lifeline, report = os.pipe(), os.pipe()
    words = [sys.executable, detach.__file__, str(lifeline[0]), str(report[1]), str(log)]
    subprocess.run([*words, sys.executable, "-c", program], pass_fds=(lifeline[0], report[1]), check=True)
    os.close(lifeline[0])
    os.close(report[1])
    assert wait_until(lambda: log.exists() and "up" in log.read_text())

    os.close(lifeline[1])

    with os.fdopen(report[0], "rb") as opened:
        assert opened.read() == b"7"
