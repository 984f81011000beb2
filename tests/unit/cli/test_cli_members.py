"""`runtime cluster add` and `remove`, and how other commands show members."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta

import pytest

from infra.components.ray_head import REAPER_PERMISSIONS
from infra.render.autoscaler import render_autoscaler
from tests.cluster_support import CLUSTER, labels, member_labels
from tests.fakes.google import Refusal
from tests.fakes.tpu import TpuServer, names_of
from tests.infra.render_support import sample_cluster
from tests.output_support import differences, documented
from tests.unit.cli.test_cli_cluster_status import Dashboard

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def server() -> Iterator[TpuServer]:
    fake = TpuServer()
    fake.give_addresses = lambda type_, number: [f"10.0.0.{host + 1}" for host in range(int(type_[3:]) // 8)]
    fake.permissions = set(REAPER_PERMISSIONS)
    metadata = {"ray-autoscaler": render_autoscaler(sample_cluster())}
    fake.add_instance(
        {"name": CLUSTER.head, "labels": labels(kind="head"), "metadata": metadata},
        created="2026-11-20T11:00:00.000-00:00",
    )
    fake.guest_attributes[CLUSTER.head] = {"ssh-key": "ssh-ed25519 AAAA ray-head"}
    fake.start()
    yield fake
    fake.stop()
    assert fake.refused == []


def add_member(server: TpuServer, name: str = "eval", state: str = "READY") -> None:
    server.add_node(
        name,
        state,
        labels=member_labels(name),
        acceleratorType="v4-16",
        schedulingConfig={"reserved": True},
        networkEndpoints=[{"ipAddress": "10.0.0.1"}, {"ipAddress": "10.0.0.2"}],
    )


def test_add_makes_a_reserved_slice_and_a_second_call_finds_it(server: TpuServer, run: Run) -> None:
    first = run("add", "v4-16")
    second = run("add", "v4-16")

    assert first == (0, "main-v4-16\tv4-16\treserved\tREADY\tadded\n", "main-v4-16: READY, 2 of 2 hosts\n")
    assert second[:2] == (0, "main-v4-16\tv4-16\treserved\tREADY\twas there\n")
    [body] = server.created
    assert body["schedulingConfig"] == {"reserved": True}
    assert body["labels"].items() >= member_labels("main-v4-16").items()
    assert body["metadata"]["ssh-keys"] == "ray:ssh-ed25519 AAAA ray-head"


def test_add_of_several_numbers_them_and_waits_for_ray(server: TpuServer, run: Run) -> None:
    dashboard = Dashboard("10.0.0.1", "10.0.0.2")
    dashboard.start()
    try:
        words = ("v4-16", "--count", "2", "--capacity", "spot", "--name", "eval", "--address", dashboard.url)
        code, out, err = run("add", *words, "-o", "json")
    finally:
        dashboard.stop()

    assert (code, [each["name"] for each in json.loads(out)]) == (0, ["eval-0", "eval-1"])
    assert "eval-1: READY, 2 of 2 hosts, 2 in Ray\n" in err
    assert differences(documented()["runtime cluster add -o json"], json.loads(out)) == []


def test_add_dry_run_makes_nothing(server: TpuServer, run: Run) -> None:
    add_member(server, "eval-0")

    code, out, _ = run("add", "v4-16", "--count", "2", "--name", "eval", "--dry-run")

    assert (code, out.splitlines()) == (
        0,
        ["eval-0\tv4-16\treserved\tREADY\tis there", "eval-1\tv4-16\treserved\t-\twould be added"],
    )
    assert server.created == []


def test_add_without_waiting_ends_at_once(server: TpuServer, run: Run) -> None:
    server.slow_creation = True

    assert run("add", "v4-16", "--no-wait")[:2] == (0, "main-v4-16\tv4-16\treserved\tCREATING\tasked for\n")


def test_add_that_is_not_whole_in_time_is_removed_again(server: TpuServer, run: Run) -> None:
    server.give_addresses = lambda type_, number: ["10.0.0.1"]

    code, out, err = run("add", "v4-16", "--within", "0s")

    assert (code, out) == (3, "main-v4-16\tv4-16\treserved\tREADY\tremoved again\n")
    assert "main-v4-16: not whole within 0ms: READY, 1 of 2 hosts\n  next: allow more with `--within`" in err
    assert server.nodes == {}


def test_add_that_google_refuses_ends_with_its_words(server: TpuServer, run: Run) -> None:
    server.refusals["tpu.projects.locations.nodes.create"] = Refusal(403, "PERMISSION_DENIED", "no actAs permission")

    code, out, err = run("add", "v4-16")

    assert (code, out) == (3, "main-v4-16\tv4-16\treserved\t-\tfailed\n")
    assert "no actAs permission\n  next: the stack gives these rights to its `operators`" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["add", "h100"], "`h100` is no valid type"),
        (["add", "v4-8", "--name", "Eval"], "`Eval` is no valid name"),
        (["add", "v4-8", "--name", "n-1"], "the name `n-1` is taken by a node of cluster `marin-main`"),
        (["add", "v6e-4"], "no pool of this cluster has TPUs of the family `v6e`"),
        (["add", "v4-8", "--address", "http://x", "--tunnel"], "two ways to one dashboard"),
        (["add", "v4-8", "--within", "soon"], "--within"),
        (["add", "v4-8", "--name", ""], "`` is no valid name"),
        (["add", "v4-8", "--reservation", ""], "`` is no valid --reservation"),
        (["attach", "--node", f"eval/{'1' * 5000}", "--dry-run"], "no valid --node"),
        (["remove", "n-1"], "`n-1` is no member of this cluster"),
        (["remove", "evil", "--yes"], "did you mean `eval`?"),
        (["remove", "eval"], "nobody is there to answer"),
    ],
)
def test_what_was_asked_wrongly_is_refused_and_changes_nothing(
    server: TpuServer, run: Run, words: list[str], said: str
) -> None:
    server.add_node("n-1", labels=labels())
    add_member(server)

    code, out, err = run(*words)

    assert (code, out) == (2, "")
    assert said in err
    assert (names_of(server.nodes), server.created) == (["n-1", "eval"], [])


@pytest.mark.parametrize("words", [(), ("--dry-run",)])
def test_add_to_a_cluster_that_was_stopped_is_refused(server: TpuServer, run: Run, words: tuple[str, ...]) -> None:
    server.guest_attributes[CLUSTER.head]["state"] = "stopped"

    code, _, err = run("add", "v4-16", *words)

    assert (code, err.splitlines()[0]) == (
        2,
        f"error: Ray on head `{CLUSTER.head}` was stopped by `runtime cluster stop`",
    )
    assert server.created == []


@pytest.mark.parametrize("words", [("--no-wait",), ("--keep",), ()])
def test_add_beside_a_stop_removes_what_it_made(server: TpuServer, run: Run, words: tuple[str, ...]) -> None:
    def give_addresses(*_: object) -> list[str]:
        # The stop has read its lists before the member is in them.
        server.guest_attributes[CLUSTER.head]["state"] = "stopped"
        return ["10.0.0.1", "10.0.0.2"]

    server.give_addresses = give_addresses

    code, out, err = run("add", "v4-16", *words)

    assert (code, out.rpartition("\t")[2]) == (3, "removed again\n")
    assert "the cluster was stopped by `runtime cluster stop` meanwhile\n  next: `runtime cluster exec -- sudo " in err
    assert server.nodes == {}


def test_remove_takes_the_named_members_alone(server: TpuServer, run: Run) -> None:
    for name in ("eval-0", "eval-1"):
        add_member(server, name)

    code, out, _ = run("remove", "eval-1", "--yes", "-o", "json")

    assert (code, names_of(server.nodes)) == (0, ["eval-0"])
    assert differences(documented()["runtime cluster remove -o json"], json.loads(out)) == []
    assert run("remove", "eval-0", "--dry-run")[:2] == (0, "eval-0\tv4-16\treserved\tREADY\twould be removed\n")
    assert names_of(server.nodes) == ["eval-0"]


def test_remove_of_a_busy_member_needs_force(server: TpuServer, run: Run) -> None:
    add_member(server)
    dashboard = Dashboard("10.0.0.1", "10.0.0.2")
    dashboard.start()
    try:
        code, _, err = run("remove", "eval", "--yes", "--address", dashboard.url)
        assert (code, "something runs on 1 member: eval" in err) == (2, True)
        assert names_of(server.nodes) == ["eval"]

        assert run("remove", "eval", "--yes", "--force", "--address", dashboard.url)[0] == 0
    finally:
        dashboard.stop()
    assert server.nodes == {}


def test_remove_that_google_refuses_says_so(server: TpuServer, run: Run) -> None:
    add_member(server)
    server.undeletable.add("eval")

    code, out, err = run("remove", "eval", "--yes")

    assert (code, out) == (3, "eval\tv4-16\treserved\tREADY\tfailed\n")
    assert "eval: google refused `DELETE" in err
    assert "unable to queue the operation" in err
    assert err.endswith("  next: run the same command again; it goes on from what is there\n")


def test_remove_without_an_answer_of_ray_needs_force(server: TpuServer, run: Run) -> None:
    add_member(server)
    silent = ("remove", "eval", "--yes", "--address", "http://127.0.0.1:9")

    code, out, err = run(*silent)

    assert (code, out, names_of(server.nodes)) == (3, "", ["eval"])
    assert "error: nobody knows whether something runs there: no answer of Ray's dashboard" in err
    assert run(*silent, "--force")[0] == 0
    assert server.nodes == {}


def test_remove_that_was_interrupted_goes_on(server: TpuServer, run: Run) -> None:
    add_member(server, "eval-1")
    add_member(server, "eval-2", "DELETING")

    code, out, err = run("remove", "eval-0", "eval-1", "eval-2", "--yes")

    assert (code, names_of(server.nodes)) == (0, ["eval-2"])
    assert out == "eval-2\tv4-16\treserved\tDELETING\tbeing deleted\neval-1\tv4-16\treserved\tREADY\tremoved\n"
    assert "eval-0: no such member; it is gone already, or has another name\n" in err


@pytest.mark.parametrize(
    "words",
    [
        ("add", "v4-16"),
        ("add", "v4-16", "--name", "lost"),
        ("remove", "eval", "--yes", "--force"),
        ("reap",),
        ("stop", "--yes"),
    ],
)
def test_dry_run_sends_no_request_that_changes_something(server: TpuServer, run: Run, words: tuple[str, ...]) -> None:
    add_member(server)
    add_member(server, "lost", "PREEMPTED")

    assert run(*words, "--dry-run")[0] == 0
    assert set(server.requests) == {"GET"}


def test_status_shows_members_in_rows_of_their_own(server: TpuServer, run: Run) -> None:
    server.add_node("n-1", labels=labels(), acceleratorType="v4-8")
    add_member(server)

    code, out, err = run("status")

    assert (code, out.splitlines()[-1]) == (0, "main\tmember eval\t-\t-\t1\t0\t-\t-\t1 READY")
    assert "member" not in err


def test_status_goes_by_googles_clock(server: TpuServer, run: Run) -> None:
    server.clock_offset = timedelta(hours=2)
    add_member(server, "eval", "CREATING")
    made = datetime.now(UTC) - server.clock_offset
    server.nodes[f"{server.parent}/nodes/eval"]["createTime"] = made.isoformat()

    code, out, err = run("status")

    assert (code, out.splitlines()[-1]) == (0, "main\tmember eval\t-\t-\t1\t0\t-\t-\t1 CREATING")
    assert "will never work again" not in err


def test_reap_of_a_preempted_member_says_how_to_make_it_again(server: TpuServer, run: Run) -> None:
    add_member(server, "eval", "PREEMPTED")
    add_member(server, "train")

    code, out, err = run("reap")

    assert (code, out) == (0, "main\teval\tmember eval\tpreempted\tremoved\n")
    assert "main: `runtime cluster add v4-16 --name eval --capacity reserved` makes eval again\n" in err
    assert names_of(server.nodes) == ["train"]


def test_stop_removes_members_too(server: TpuServer, run: Run) -> None:
    add_member(server)

    code, out, _ = run("stop", "--leave-head", "--yes")

    assert (code, out, server.nodes) == (0, "main\tnode\teval\tmember eval\tREADY\tremoved\n", {})


@pytest.mark.golden
@pytest.mark.parametrize("verb", ["add", "remove"])
def test_help_of_each_verb_has_examples(
    run: Run, monkeypatch: pytest.MonkeyPatch, golden: Callable[[str, str], None], verb: str
) -> None:
    monkeypatch.setenv("COLUMNS", "100")

    code, out, _ = run(verb, "--help")

    assert (code, f"runtime cluster {verb}" in out.partition("Examples:")[2]) == (0, True)
    golden(f"cli/cluster-{verb}.txt", out)
