"""Members of a cluster: the wait until one is whole."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from infra.components.ray_head import REAPER_PERMISSIONS
from infra.render.autoscaler import autoscaler_fields, render_autoscaler
from runtime.clusters.members import (
    HeadFacts,
    MemberSpec,
    make_specs,
    render_member,
)
from runtime.clusters.provisioning import MemberOutcome, Provisioner
from runtime.clusters.ray_view import DashboardUnreachable, RayView
from runtime.clusters.reaper import Reaper
from runtime.errors import NotPossible
from runtime.stack.google_api import GoogleApi, GoogleRefused
from tests.cluster_support import CLUSTER, NOW, labels, member_labels
from tests.fakes.google import Refusal
from tests.fakes.tpu import TpuServer, names_of
from tests.infra.render_support import sample_cluster

V4_CLUSTER = sample_cluster()
FACTS = HeadFacts(address="10.64.0.2", config=autoscaler_fields(V4_CLUSTER), ssh_key="ssh-ed25519 AAAA ray-head")
SPEC = MemberSpec(name="eval", accelerator="v4-16")
MINUTE = timedelta(minutes=1)


@pytest.fixture
def server() -> Iterator[TpuServer]:
    fake = TpuServer()
    fake.give_addresses = lambda type_, number: [f"10.64.1.{number * 10 + host}" for host in range(int(type_[3:]) // 8)]
    fake.permissions = set(REAPER_PERMISSIONS)
    inputs = {
        "name": CLUSTER.head,
        "labels": labels(kind="head"),
        "metadata": {"ray-autoscaler": render_autoscaler(V4_CLUSTER), "startup-script": "x"},
    }
    fake.add_instance(inputs, ip="10.64.0.2")
    fake.start()
    yield fake
    fake.stop()
    assert fake.refused == []


@pytest.fixture
def new_joining(server: TpuServer) -> Callable[..., Provisioner]:
    def make(at_each_sleep: Callable[[], object] = lambda: None) -> Provisioner:
        now = [0.0]

        def sleep(seconds: float) -> None:
            now[0] += seconds
            at_each_sleep()

        api = GoogleApi(server=server.url)
        reaper = Reaper(api, project=server.project, zone=server.zone, sleep=lambda _: None)
        return Provisioner(
            api,
            reaper,
            project=server.project,
            zone=server.zone,
            cluster="marin-main",
            clock=lambda: now[0],
            sleep=sleep,
            now=lambda: NOW + timedelta(seconds=now[0]),
        )

    return make


def join(joining: Provisioner, *specs: MemberSpec, **more: Any) -> list[MemberOutcome]:
    bodies = {each.name: render_member(each, FACTS, "marin-main") for each in specs}
    return joining.join(bodies, specs, within=more.pop("within", MINUTE), **more)


def test_head_tells_address_settings_and_key(server: TpuServer, new_joining: Callable[..., Provisioner]) -> None:
    server.guest_attributes[CLUSTER.head] = {"state": "ready", "ssh-key": "ssh-ed25519 AAAA ray-head"}

    facts = new_joining().read_head(CLUSTER.head)

    assert facts == FACTS
    with pytest.raises(NotPossible, match="google has no head `other`"):
        new_joining().read_head("other")


def test_join_makes_a_slice_and_ends_when_all_its_hosts_are_there(
    server: TpuServer, new_joining: Callable[..., Provisioner]
) -> None:
    said: list[str] = []

    [outcome] = join(new_joining(), SPEC, say=said.append)

    assert outcome == MemberOutcome(
        name="eval", accelerator="v4-16", capacity="reserved", state="READY", hosts=2, created=True, joined=True
    )
    assert said == ["eval: READY, 2 of 2 hosts"]
    [made] = server.created
    maker = made["labels"]["runtime-maker"]
    until = str(int((NOW + MINUTE).timestamp()))
    assert made["labels"] == {**member_labels("eval"), "runtime-maker": maker, "runtime-maker-until": until}
    assert re.fullmatch("[0-9a-f]{16}", maker)


def test_join_waits_until_ray_counts_every_host(server: TpuServer, new_joining: Callable[..., Provisioner]) -> None:
    server.give_addresses = lambda type_, number: ["10.0.0.1", "10.0.0.2"]
    answers: list[object] = [
        DashboardUnreachable("http://h", "no"),
        RayView(alive=frozenset({"10.0.0.1"})),
        RayView(alive=frozenset({"10.0.0.1", "10.0.0.2", "10.0.0.9"})),
    ]

    def look() -> RayView:
        answer = answers.pop(0)
        if isinstance(answer, RayView):
            return answer
        raise answer  # type: ignore[misc]

    said: list[str] = []
    [outcome] = join(new_joining(), SPEC, look_ray=look, say=said.append)

    assert (outcome.joined, outcome.in_ray, answers) == (True, 2, [])
    assert said == [
        "eval: READY, 2 of 2 hosts",
        "eval: READY, 2 of 2 hosts, 1 in Ray",
        "eval: READY, 2 of 2 hosts, 2 in Ray",
    ]


def test_join_again_finds_what_an_interrupted_call_made(
    server: TpuServer, new_joining: Callable[..., Provisioner]
) -> None:
    server.slow_creation = True
    first = join(new_joining(), SPEC, wait=False)
    assert [(each.state, each.created, each.joined, each.error) for each in first] == [("CREATING", True, False, None)]

    def google_goes_on() -> None:
        server.nodes[f"{server.parent}/nodes/eval"]["state"] = "READY"

    [outcome] = join(new_joining(google_goes_on), SPEC)

    assert (outcome.joined, outcome.created) == (True, False)
    assert len(server.created) == 1


def test_join_that_was_killed_at_any_request_goes_on_when_it_is_run_again(
    server: TpuServer, new_joining: Callable[..., Provisioner], monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = make_specs("v4-16", name="eval", count=2)
    before = GoogleApi._call

    def run_and_die_after(requests: int) -> bool:
        """Return whether the call was killed, right after Google got that many requests."""
        left = [requests]

        def call(self: GoogleApi, *args: Any, **more: Any) -> Any:
            answer = before(self, *args, **more)
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
            return answer

        with monkeypatch.context() as patched, contextlib.suppress(KeyboardInterrupt):
            patched.setattr(GoogleApi, "_call", call)
            join(new_joining(), *specs)
            return False
        return True

    killed = 0
    while run_and_die_after(killed + 1):
        killed += 1

        def google_goes_on() -> None:
            for each in server.nodes.values():
                each["state"] = "READY"

        outcomes = join(new_joining(google_goes_on), *specs)
        assert [each.joined for each in outcomes] == [True, True]
        assert (names_of(server.nodes), len(server.created)) == (["eval-0", "eval-1"], 2)
        server.nodes.clear()
        server.created.clear()
    # List, two creations, their two operations, and the list again.
    assert killed == 6


def test_join_that_is_not_whole_in_time_leaves_nothing(
    server: TpuServer, new_joining: Callable[..., Provisioner]
) -> None:
    server.give_addresses = lambda type_, number: ["10.0.0.1"]
    other = MemberSpec(name="one", accelerator="v4-8")

    outcomes = join(new_joining(), SPEC, other)

    assert [(each.name, each.joined, each.removed, each.error) for each in outcomes] == [
        ("eval", False, True, "not whole within 1m: READY, 1 of 2 hosts"),
        ("one", True, False, None),
    ]
    assert names_of(server.nodes) == ["one"]


def test_join_keeps_what_is_not_whole_if_it_is_told_to(
    server: TpuServer, new_joining: Callable[..., Provisioner]
) -> None:
    server.give_addresses = lambda type_, number: ["10.0.0.1"]

    [outcome] = join(new_joining(), SPEC, keep=True)

    assert (outcome.removed, outcome.error) == (False, "not whole within 1m: READY, 1 of 2 hosts")
    assert names_of(server.nodes) == ["eval"]


@pytest.mark.parametrize(
    ("before", "answers", "removed"),
    [
        (None, True, True),
        (None, False, False),
        ("READY", True, False),
        ("CREATING", True, True),
        ("REPAIRING", True, False),
    ],
)
def test_join_that_ray_does_not_confirm_removes_what_it_made_and_no_member_that_worked_before(
    server: TpuServer, new_joining: Callable[..., Provisioner], before: str | None, answers: bool, removed: bool
) -> None:
    endpoints = [{"ipAddress": "10.0.0.1"}, {"ipAddress": "10.0.0.2"}]
    if before is not None:
        server.add_node(
            "eval", before, labels=member_labels("eval"), acceleratorType="v4-16", networkEndpoints=endpoints
        )

    def look() -> RayView:
        if answers:
            return RayView(alive=frozenset())
        raise DashboardUnreachable("http://h", "no")

    [outcome] = join(new_joining(), SPEC, look_ray=look)

    assert (outcome.joined, outcome.error is not None, outcome.removed) == (False, True, removed)
    assert ("Ray does not answer" in str(outcome.error)) is not answers
    assert names_of(server.nodes) == ([] if removed else ["eval"])


def test_join_that_google_cannot_carry_out_ends_with_its_words(
    server: TpuServer, new_joining: Callable[..., Provisioner]
) -> None:
    server.failing["eval"] = 'There is no more capacity in the zone "us-central2-b".'

    [outcome] = join(new_joining(), SPEC)

    assert outcome.error == 'google could not make it: There is no more capacity in the zone "us-central2-b"'
    assert outcome.next == "try again later, another size, or another `--capacity`"
    assert server.nodes == {}


@pytest.mark.parametrize(
    ("refusal", "step"),
    [
        (Refusal(429, "RESOURCE_EXHAUSTED", "Quota limit 'TPUV4PodPerProject' has been exceeded."), "holds quota"),
        (Refusal(403, "PERMISSION_DENIED", "Permission 'tpu.nodes.create' denied"), "the stack gives these rights"),
        (Refusal(400, "INVALID_ARGUMENT", "No matching reservation for v4-16"), "gcloud compute reservations list"),
        (Refusal(400, "INVALID_ARGUMENT", "Invalid accelerator type: v4-12"), "accelerator-types list"),
        (Refusal(400, "INVALID_ARGUMENT", "Unknown runtime version"), "tpu-vm versions list"),
        (Refusal(400, "INVALID_ARGUMENT", "No."), "run the same command again"),
    ],
)
def test_join_that_google_refuses_says_why_and_what_next(
    server: TpuServer, new_joining: Callable[..., Provisioner], refusal: Refusal, step: str
) -> None:
    server.refusals["tpu.projects.locations.nodes.create"] = refusal

    [outcome] = join(new_joining(), SPEC)

    assert refusal.message.rstrip(".") in str(outcome.error)
    assert step in str(outcome.next)


PASSING = [
    Refusal(503, "UNAVAILABLE", "try again"),
    Refusal(429, "RESOURCE_EXHAUSTED", "Quota exceeded for quota metric 'Requests' and limit 'Requests per minute'"),
]


@pytest.mark.parametrize("refusal", PASSING)
def test_join_asks_again_after_a_passing_failure(
    server: TpuServer, new_joining: Callable[..., Provisioner], refusal: Refusal
) -> None:
    server.refusals["tpu.projects.locations.nodes.create"] = refusal

    [outcome] = join(new_joining(server.refusals.clear), SPEC)

    assert outcome.joined


@pytest.mark.parametrize("refusal", PASSING)
def test_join_that_is_refused_until_its_end_says_googles_words(
    server: TpuServer, new_joining: Callable[..., Provisioner], refusal: Refusal
) -> None:
    server.refusals["tpu.projects.locations.nodes.create"] = refusal

    [outcome] = join(new_joining(), SPEC)

    assert outcome.error == f"not whole within 1m: google refused it: {refusal.message}"
    assert outcome.next == "run the same command again; it goes on from what is there"


def test_join_of_many_members_stops_asking_when_google_takes_no_more_requests(
    server: TpuServer, new_joining: Callable[..., Provisioner]
) -> None:
    server.refusals["tpu.projects.locations.nodes.create"] = PASSING[1]

    outcomes = join(new_joining(server.refusals.clear), *make_specs("v4-16", name="eval", count=9))

    assert all(each.joined for each in outcomes)
    assert server.requests["POST"] == 10


def test_join_says_why_what_was_preempted_is_not_made_again(
    server: TpuServer, new_joining: Callable[..., Provisioner]
) -> None:
    server.add_node("eval", "PREEMPTED", labels=member_labels("eval"), acceleratorType="v4-16")
    server.undeletable.add("eval")

    [outcome] = join(new_joining(), SPEC)

    assert "it cannot be removed: google refused" in str(outcome.error)


def test_join_does_not_remove_a_whole_member_that_another_call_made_while_this_one_was_refused(
    server: TpuServer, new_joining: Callable[..., Provisioner]
) -> None:
    server.refusals["tpu.projects.locations.nodes.create"] = PASSING[1]
    endpoints = [{"ipAddress": "10.0.0.1"}, {"ipAddress": "10.0.0.2"}]

    def another_makes_it() -> None:
        server.add_node("eval", labels=member_labels("eval"), acceleratorType="v4-16", networkEndpoints=endpoints)

    [outcome] = join(new_joining(another_makes_it), SPEC, look_ray=lambda: RayView(alive=frozenset()))

    assert (outcome.created, outcome.removed, names_of(server.nodes)) == (False, False, ["eval"])


@pytest.mark.parametrize("ends", [KeyboardInterrupt, None])
def test_join_that_is_broken_off_says_what_it_leaves(
    server: TpuServer, new_joining: Callable[..., Provisioner], ends: type[BaseException] | None
) -> None:
    server.slow_creation = True

    def end() -> None:
        server.refusals["tpu.projects.locations.nodes.list"] = Refusal(403, "PERMISSION_DENIED", "no")
        if ends is not None:
            raise ends

    said: list[str] = []
    with pytest.raises(ends or GoogleRefused):
        join(new_joining(end), *make_specs("v4-16", name="eval", count=2), say=said.append)

    assert said[-1] == (
        "left as it is: eval-0 eval-1; the same command goes on, `runtime cluster remove eval-0 eval-1` ends it"
    )


def test_join_does_not_remove_a_whole_member_that_another_call_made_at_that_moment(
    server: TpuServer, new_joining: Callable[..., Provisioner], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = GoogleApi.post

    def post(self: GoogleApi, *args: Any, **more: Any) -> dict[str, Any]:
        server.add_node(
            "eval",
            labels=member_labels("eval"),
            acceleratorType="v4-16",
            networkEndpoints=[{"ipAddress": "10.0.0.1"}, {"ipAddress": "10.0.0.2"}],
        )
        return before(self, *args, **more)

    monkeypatch.setattr(GoogleApi, "post", post)

    [outcome] = join(new_joining(), SPEC, look_ray=lambda: RayView(alive=frozenset()))

    assert (outcome.created, outcome.removed, names_of(server.nodes)) == (False, False, ["eval"])


def test_join_that_waits_for_a_shorter_time_leaves_a_member_to_the_call_that_makes_it(
    server: TpuServer, new_joining: Callable[..., Provisioner]
) -> None:
    server.slow_creation = True
    during: list[MemberOutcome] = []

    def second_comes_and_goes() -> None:
        if not during:
            during.extend(join(new_joining(), SPEC))

    def google_goes_on() -> None:
        second_comes_and_goes()
        server.nodes[f"{server.parent}/nodes/eval"]["state"] = "READY"

    [first] = join(new_joining(google_goes_on), SPEC, within=30 * MINUTE)

    [second] = during
    assert (first.joined, first.created, second.removed, second.created) == (True, True, False, False)
    assert second.error == (
        "not whole within 1m: CREATING, 2 of 2 hosts; another call makes it, and waits until 2026-11-20T12:30:00.000Z"
    )
    assert second.next == "run the same command then; `runtime cluster remove eval` ends it now"


@pytest.mark.parametrize("until", ["0", "", "soon", "9" * 20])
def test_join_removes_a_member_whose_maker_s_time_is_over_or_not_known(
    server: TpuServer, new_joining: Callable[..., Provisioner], until: str
) -> None:
    signed = {**member_labels("eval"), "runtime-maker": "0", "runtime-maker-until": until}
    server.add_node("eval", "CREATING", labels=signed, acceleratorType="v4-16")

    [outcome] = join(new_joining(), SPEC)

    assert (outcome.created, outcome.removed) == (False, True)


def test_time_of_a_maker_is_googles_and_not_this_machines(
    server: TpuServer, new_joining: Callable[..., Provisioner], monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = timedelta(hours=2)
    monkeypatch.setattr(Reaper, "skew", lambda self: ahead)
    server.slow_creation = True

    join(new_joining(), SPEC, within=MINUTE, keep=True)
    signed = dict(server.created[0]["labels"])
    server.nodes.clear()
    until = int((NOW - ahead + 30 * MINUTE).timestamp())
    others = {**member_labels("eval"), "runtime-maker": "0", "runtime-maker-until": str(until)}
    server.add_node("eval", "CREATING", labels=others, acceleratorType="v4-16")
    [outcome] = join(new_joining(), SPEC)

    assert signed["runtime-maker-until"] == str(int((NOW - ahead + MINUTE).timestamp()))
    assert (outcome.others_until, outcome.removed) == (NOW - ahead + 30 * MINUTE, False)


@pytest.mark.parametrize(("more", "slow"), [({}, True), ({}, False), ({"keep": True}, True), ({"wait": False}, True)])
def test_join_of_a_cluster_that_is_stopped_meanwhile_removes_what_it_made_and_nothing_else(
    server: TpuServer, new_joining: Callable[..., Provisioner], more: dict[str, Any], slow: bool
) -> None:
    server.slow_creation = slow
    endpoints = [{"ipAddress": "10.0.0.1"}, {"ipAddress": "10.0.0.2"}]
    server.add_node("old", labels=member_labels("old"), acceleratorType="v4-16", networkEndpoints=endpoints)

    outcomes = join(new_joining(), SPEC, replace(SPEC, name="old"), has_stopped=lambda: True, **more)

    assert [(each.created, each.removed, each.joined) for each in outcomes] == [
        (True, True, False),
        (False, False, False),
    ]
    assert {each.error for each in outcomes} == {"the cluster was stopped by `runtime cluster stop` meanwhile"}
    assert names_of(server.nodes) == ["old"]


def test_head_says_whether_it_was_stopped(server: TpuServer, new_joining: Callable[..., Provisioner]) -> None:
    joining = new_joining()
    before = joining.is_stopped(CLUSTER.head)
    server.guest_attributes[CLUSTER.head] = {"state": "stopped"}

    assert (before, joining.is_stopped(CLUSTER.head), joining.read_head(CLUSTER.head).stopped) == (False, True, True)
    server.refusals["compute.instances.getGuestAttributes"] = Refusal(503, "backendError", "no")
    assert not joining.is_stopped(CLUSTER.head)


def test_join_outlives_a_time_without_answers(server: TpuServer, new_joining: Callable[..., Provisioner]) -> None:
    server.refusals["tpu.projects.locations.nodes.list"] = Refusal(429, "RESOURCE_EXHAUSTED", "too many requests")
    said: list[str] = []

    [outcome] = join(new_joining(server.refusals.clear), SPEC, say=said.append)

    assert outcome.joined
    assert "too many requests" in said[0]


def test_join_replaces_a_member_that_was_preempted(server: TpuServer, new_joining: Callable[..., Provisioner]) -> None:
    server.add_node("eval", "PREEMPTED", labels=member_labels("eval"), acceleratorType="v4-16")

    [outcome] = join(new_joining(), SPEC)

    assert (outcome.joined, outcome.created, len(server.created)) == (True, True, 1)


def test_join_ends_when_a_member_is_preempted_meanwhile(
    server: TpuServer, new_joining: Callable[..., Provisioner]
) -> None:
    server.slow_creation = True

    spec = replace(SPEC, reservation="r")
    [outcome] = join(new_joining(lambda: server.preempt(f"{server.parent}/nodes/eval")), spec)

    assert (outcome.error, outcome.removed) == ("it is PREEMPTED already", True)
    assert outcome.next == "`runtime cluster add v4-16 --name eval --capacity reserved --reservation r`"


def test_join_leaves_a_strangers_node_alone(server: TpuServer, new_joining: Callable[..., Provisioner]) -> None:
    server.add_node("eval", "READY", labels=labels(), acceleratorType="v4-16")

    [outcome] = join(new_joining(), SPEC)

    assert outcome.error == "the name `eval` is taken by another node in this zone"
    assert names_of(server.nodes) == ["eval"]


@pytest.mark.parametrize(
    "text",
    [
        "a: [",
        "",
        "[]",
        "available_node_types: {a: 3}",
        "available_node_types: {a: {node_config: {acceleratorType: v4-16}}}",
    ],
)
def test_member_of_a_head_with_a_broken_file_is_refused(
    server: TpuServer, new_joining: Callable[..., Provisioner], text: str
) -> None:
    server.instances[CLUSTER.head]["metadata"]["items"][0]["value"] = text

    with pytest.raises(NotPossible, match="has another form than ours"):
        render_member(SPEC, new_joining().read_head(CLUSTER.head), "marin-main")
