"""`runtime cluster`: what the commands print, do and refuse."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from runtime.cli.clusters.stop import STOP_RAY
from runtime.outputs import StackOutputs
from tests.cluster_support import CLUSTER, OUTPUTS, add_hosts, labels, member_labels
from tests.fakes.google import Refusal
from tests.fakes.tpu import TpuServer, names_of
from tests.infra.machine_support import MetadataServer
from tests.output_support import differences, documented
from tests.services_support import replace_sleep

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def reap(run: Run) -> Run:
    def call(*args: str, **more: object) -> tuple[int, str, str]:
        return run("reap", *args, **more)

    return call


# reap


def test_reap_removes_and_says_what_lives(server: TpuServer, reap: Run) -> None:
    for name, state in (("n-0", "PREEMPTED"), ("n-1", "READY"), ("n-2", "READY")):
        server.add_node(name, state, labels=labels())

    code, out, err = reap()

    assert (code, out) == (0, "main\tn-0\tv4\tpreempted\tremoved\n")
    assert "main: 1 removed; 2 of at most 10 nodes live\n" in err
    assert names_of(server.nodes) == ["n-1", "n-2"]
    assert reap()[:2] == (0, "")


def test_reap_dry_run_removes_nothing(server: TpuServer, reap: Run) -> None:
    server.add_node("n-0", "PREEMPTED", labels=labels())

    code, out, err = reap("--dry-run")

    assert (code, out) == (0, "main\tn-0\tv4\tpreempted\twould be removed\n")
    assert "main: 1 to remove; 0 of at most 10 nodes live\n" in err
    assert names_of(server.nodes) == ["n-0"]


def test_reap_as_json_is_one_object_for_each_cluster(server: TpuServer, reap: Run) -> None:
    server.add_node("n-0", "PREEMPTED", labels=labels())
    server.add_node("n-1", "READY", labels=labels(pool="v5e"))

    code, out, _ = reap("-o", "json")

    row = {
        "cluster": "main",
        "name": "n-0",
        "pool": "v4",
        "why": "preempted",
        "removed": True,
        "gone": True,
        "error": None,
        "again": None,
    }
    assert (code, json.loads(out)) == (
        0,
        [
            {
                "cluster": "main",
                "dry_run": False,
                "removed": [row],
                "failed": [],
                "waiting": [],
                "live": {"v5e": 1},
                "max": {"v4": 8, "v5e": 2},
                "error": None,
                "no_heads": None,
                "waits_until": None,
            }
        ],
    )
    assert differences(documented()["runtime cluster reap -o json"], json.loads(out)) == []


def test_reap_that_cannot_remove_one_removes_the_rest_and_exits_with_3(server: TpuServer, reap: Run) -> None:
    for name in ("n-0", "n-1"):
        server.add_node(name, "PREEMPTED", labels=labels())
    server.undeletable.add("n-0")

    code, out, err = reap()

    assert code == 3
    assert [line.split("\t")[1] for line in out.splitlines()] == ["n-1", "n-0"]
    assert "1 could not be removed" in err
    assert names_of(server.nodes) == ["n-0"]


def test_reap_says_when_more_live_than_the_pools_allow(server: TpuServer, reap: Run) -> None:
    for number in range(11):
        server.add_node(f"n-{number}", "READY", labels=labels())

    assert "11 of at most 10 nodes live: more than the pools allow" in reap()[2]


@pytest.mark.parametrize(
    ("args", "outputs", "words"),
    [
        (["--cluster", "mian"], OUTPUTS, "did you mean `main`?"),
        ([], StackOutputs(stack="dev", project="p-1"), "stack `dev` has no Ray cluster"),
        ([], StackOutputs(stack="marin", clusters={"main": CLUSTER}), "names no Google project"),
        (["--longest-creation", "soon"], OUTPUTS, "--longest-creation"),
    ],
)
def test_reap_that_was_asked_wrongly_is_refused(reap: Run, args: list[str], outputs: StackOutputs, words: str) -> None:
    code, out, err = reap(*args, outputs=outputs)

    assert (code, out) == (2, "")
    assert words in err


def test_reap_without_rights_is_explained(server: TpuServer, reap: Run) -> None:
    server.permissions = set()

    code, out, err = reap()

    assert (code, out) == (3, "")
    assert "tpu.nodes.list" in err
    assert "Traceback" not in err


def test_reap_says_what_it_will_remove_unless_it_changes(server: TpuServer, reap: Run) -> None:
    for name in ("n-0", "n-1"):
        server.add_node(name, "READY", labels=labels(), acceleratorType="v4-16")

    code, out, err = reap()

    assert (code, out) == (0, "")
    assert "main: n-0 and 1 other: lacks 2 of 2 hosts; removed after 20" in err
    assert names_of(server.nodes) == ["n-0", "n-1"]

    code, out, _ = reap("--longest-wait", "0s")

    assert (code, out.splitlines()) == (
        0,
        [f"main\tn-{number}\tv4\tlacks 2 of 2 hosts for 0ms\tremoved" for number in (0, 1)],
    )


def test_reap_without_the_right_to_list_heads_says_what_it_leaves_out(server: TpuServer, reap: Run) -> None:
    server.permissions = {"tpu.nodes.list", "tpu.nodes.delete"}
    server.add_node("old", "READY", labels=labels(), createTime="2026-11-20T08:59:59Z")

    code, out, err = reap()

    assert (code, out) == (0, "")
    assert "main: nodes of an older head or of none are not looked for: google refused `GET" in err


def test_reap_says_that_google_still_deletes(server: TpuServer, reap: Run) -> None:
    server.add_node("n-0", "PREEMPTED", labels=labels())
    server.slow_deletion = True

    assert reap()[:2] == (0, "main\tn-0\tv4\tpreempted\tbeing deleted\n")
    assert reap() == (0, "", "main: 0 removed; 0 of at most 10 nodes live\n")


def test_reap_leaves_a_zone_that_refused_alone_and_says_until_when(
    server: TpuServer, reap: Run, tmp_path: Path
) -> None:
    server.refusals["tpu.projects.locations.nodes.delete"] = Refusal(429, "RESOURCE_EXHAUSTED", "Quota exceeded")
    server.add_node("n-0", "PREEMPTED", labels=labels())

    first, second = reap("--state", str(tmp_path / "state")), reap("--state", str(tmp_path / "state"))

    assert first[0] == 3
    assert "google refused: left alone until 20" in first[2]
    assert second[:2] == (0, "")
    assert "google refused: left alone until 20" in second[2]
    assert server.calls().count("tpu.projects.locations.nodes.delete") == 1


def test_reap_goes_on_with_other_clusters_when_one_zone_does_not_answer(server: TpuServer, reap: Run) -> None:
    other = replace(CLUSTER, cluster_name="marin-b", zone="europe-west4-b")
    server.add_node("n-0", "PREEMPTED", labels=labels())
    server.refuse_paths.append("locations/europe-west4-b")

    code, out, err = reap(outputs=replace(OUTPUTS, clusters={"b": other, "main": CLUSTER}))

    assert (code, out) == (3, "main\tn-0\tv4\tpreempted\tremoved\n")
    assert "b: google refused `GET" in err


def test_reap_of_two_clusters_in_one_zone_asks_once_after_a_refusal(
    server: TpuServer, reap: Run, tmp_path: Path
) -> None:
    second = replace(CLUSTER, cluster_name="marin-b")
    outputs = replace(OUTPUTS, clusters={"b": second, "main": CLUSTER})
    lists = "tpu.projects.locations.nodes.list"
    server.refusals[lists] = Refusal(429, "RESOURCE_EXHAUSTED", "Quota exceeded")

    code, _, err = reap("--state", str(tmp_path / "state"), outputs=outputs)
    calls = server.calls().count(lists)
    alone = reap("--state", str(tmp_path / "state"), "--cluster", "main", outputs=outputs)

    assert (code, [line.partition("`")[0] for line in err.splitlines() if "left alone" not in line]) == (
        3,
        ["b: google refused "],
    )
    assert all("main: google refused: left alone until 20" in each for each in (err, alone[2]))
    assert server.calls().count(lists) == calls


def test_reap_that_is_answered_ends_the_pause_of_the_zone(server: TpuServer, reap: Run, tmp_path: Path) -> None:
    zone = tmp_path / "state" / "zones" / "p-1-us-central2-b.json"
    zone.parent.mkdir(parents=True)
    past = {"seen": {}, "refusals": 3, "wait_until": "2020-01-01T00:00:00Z", "removed": {}, "failed": 0}
    zone.write_text(json.dumps(past))

    assert reap("--state", str(tmp_path / "state"))[0] == 0
    assert json.loads(zone.read_text())["refusals"] == 0


def test_reap_writes_its_numbers_for_prometheus(server: TpuServer, reap: Run, tmp_path: Path) -> None:
    file = tmp_path / "metrics" / "reaper.prom"
    for name, state in (("n-0", "PREEMPTED"), ("n-1", "READY")):
        server.add_node(name, state, labels=labels())

    reap("--metrics-file", str(file))
    server.add_node("n-2", "TERMINATED", labels=labels())
    server.add_node("n-3", "PREEMPTED", labels=labels())
    reap("--metrics-file", str(file))

    samples = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(file.read_text())
        for sample in family.samples
    }
    assert samples[("runtime_reaper_removed_total", "marin-main", "preempted")] == 2
    assert samples[("runtime_reaper_removed_total", "marin-main", "terminated")] == 1
    assert samples[("runtime_reaper_failed_total", "marin-main")] == 0
    assert samples[("runtime_cluster_nodes", "READY", "marin-main", "v4")] == 1
    assert samples[("runtime_cluster_nodes_max", "marin-main", "v5e")] == 2
    assert samples[("runtime_reaper_up", "marin-main")] == 1
    assert [path.name for path in file.parent.iterdir()] == ["reaper.prom"]


def test_reap_with_a_damaged_memory_begins_again(server: TpuServer, reap: Run, tmp_path: Path) -> None:
    state = tmp_path / "state"
    server.add_node("n-0", "PREEMPTED", labels=labels())
    reap("--state", str(state))
    [file] = state.iterdir()
    file.write_text('{"seen": []}')
    server.add_node("n-0", "PREEMPTED", labels=labels())

    assert reap("--state", str(state))[:2] == (0, "main\tn-0\tv4\tpreempted\tremoved\n")
    assert json.loads(file.read_text())["removed"] == {"preempted": 1}


def test_reap_that_cannot_keep_its_memory_says_where(server: TpuServer, reap: Run, tmp_path: Path) -> None:
    server.add_node("n-0", "PREEMPTED", labels=labels())
    (tmp_path / "file").write_text("")

    code, _, err = reap("--state", str(tmp_path / "file"))

    assert code == 3
    assert f"{tmp_path / 'file'}/p-1-marin-main.json" in err


# list and status


def test_list_shows_the_contract_without_asking_anybody(server: TpuServer, run: Run) -> None:
    assert run("list") == (
        0,
        "main\tus-central2-b\tray-marin-main-head-0123abcd-compute\tv4: v4-8, 4 to 8; v5e: ?, 0 to 2\n",
        "",
    )
    assert server.log == []


def test_list_as_json_is_documented(run: Run) -> None:
    printed = json.loads(run("list", "-o", "json")[1])

    assert [each["cluster"] for each in printed] == ["main"]
    assert differences(documented()["runtime cluster list -o json"], printed) == []


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["status", "--address", "http://x", "--tunnel"], "two ways to one dashboard"),
        (["status", "--address", "http://x"], "`--address` is of one cluster"),
        (["attach", "--dry-run"], "stack `marin` has 2 clusters"),
        (["config"], "name one: `--cluster b`"),
    ],
)
def test_command_of_one_cluster_with_several_is_refused(run: Run, args: list[str], words: str) -> None:
    code, out, err = run(*args, outputs=replace(OUTPUTS, clusters={"main": CLUSTER, "b": CLUSTER}))

    assert (code, out) == (2, "")
    assert words in err


# attach, exec, dashboard


def test_dry_run_prints_the_command_and_asks_nobody(server: TpuServer, run: Run) -> None:
    proxy = f"gcloud compute start-iap-tunnel {CLUSTER.head} %p --listen-on-stdin --project p-1 --zone us-central2-b"
    ssh = ["ssh", "-o", f"ProxyCommand={proxy}", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4"]

    attach, exec_ = run("attach", "--dry-run"), run("exec", "--dry-run", "--", "ls", "a b")
    dashboard = run("dashboard", "--dry-run", "--port", "8300", "--user", "ada")

    assert [shlex.split(out) for _, out, _ in (attach, exec_, dashboard)] == [
        [*ssh, "-t", CLUSTER.head],
        [*ssh, CLUSTER.head, "ls 'a b'"],
        [
            *(*ssh, "-o", "ExitOnForwardFailure=yes", "-L", "127.0.0.1:8300:127.0.0.1:8265"),
            *("-l", "ada", "-N", CLUSTER.head),
        ],
    ]
    assert [code for code, _, _ in (attach, exec_, dashboard)] == [0, 0, 0]
    assert server.log == []


@pytest.mark.parametrize(("named", "address"), [("n-1", "10.0.0.1"), ("n-1/1", "10.0.0.2"), ("10.9.9.9", "10.9.9.9")])
def test_dry_run_with_a_node_leads_over_the_head_to_its_address(
    server: TpuServer, run: Run, named: str, address: str
) -> None:
    endpoints = [{"ipAddress": "10.0.0.1"}, {"ipAddress": "10.0.0.2"}]
    server.add_node("n-1", "READY", labels=labels(), networkEndpoints=endpoints)

    _, out, _ = run("exec", "--node", named, "--dry-run", "--", "uptime")

    words = shlex.split(shlex.split(out)[-1])
    assert (words[:2], words[-2:]) == (["sudo", "ssh"], [f"ray@{address}", "uptime"])


@pytest.mark.parametrize(
    ("node", "words"),
    [
        ("n-2", "did you mean `n-1`?"),
        ("n-1/1", "node `n-1` has no host 1"),
        ("n-1/x", "`NAME/1` for the second host"),
    ],
)
def test_exec_on_a_node_that_is_not_there_is_refused(server: TpuServer, run: Run, node: str, words: str) -> None:
    server.add_node("n-1", "READY", labels=labels(), networkEndpoints=[{"ipAddress": "10.0.0.1"}])

    code, out, err = run("exec", "--node", node, "--", "uptime")

    assert (code, out) == (2, "")
    assert words in err


def test_exec_without_gcloud_names_it(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    ssh = tmp_path / "bin" / "ssh"
    ssh.write_text("#!/bin/sh\n")
    ssh.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))

    code, out, err = run("exec", "--", "uptime")

    assert (code, out) == (2, "")
    assert "`gcloud` is not on this machine" in err


# config


def test_config_prints_the_contracts_settings(server: TpuServer, run: Run) -> None:
    code, out, _ = run("config")

    assert (code, out.splitlines()[:2]) == (0, ["cluster_name\tmarin-main", f"head\t{CLUSTER.head}"])
    assert "pools.v4.max\t8" in out.splitlines()
    assert server.log == []


def test_config_as_json_is_documented(run: Run) -> None:
    printed = json.loads(run("config", "-o", "json")[1])

    assert printed["cluster_name"] == "marin-main"
    assert differences(documented()["runtime cluster config -o json"], printed) == []


@pytest.mark.parametrize(("used", "code"), [("0", 0), ("1", 1)])
def test_config_check_compares_the_digest_with_the_heads(server: TpuServer, run: Run, used: str, code: int) -> None:
    server.guest_attributes[CLUSTER.head] = {"state": "ready", "config-sha256": used, "restart-needed": "no"}

    returned, out, _ = run("config", "--check")

    assert (returned, [line.split("\t")[:2] for line in out.splitlines()]) == (
        code,
        [["ok", "head"], ["fail" if code else "ok", "file"], ["ok", "restart"]],
    )
    assert server.refused == []


def test_config_check_of_a_head_that_is_lost_says_how_to_make_it_again(server: TpuServer, run: Run) -> None:
    server.instances.clear()

    code, out, _ = run("config", "--check", "-o", "json")

    [finding] = json.loads(out)
    assert (code, finding["verdict"], finding["check"]) == (1, "fail", "head")
    assert "pulumi up --refresh --stack marin" in finding["fix"]
    assert differences(documented()["runtime cluster config --check -o json"], [finding]) == []


# stop


def test_stop_dry_run_shows_what_would_be_left_billing(server: TpuServer, run: Run) -> None:
    add_hosts(server, "READY", "PREEMPTED")
    server.add_node("theirs", "READY", labels=labels("other"))

    code, out, err = run("stop", "--dry-run")

    assert (code, out.splitlines()) == (
        0,
        [
            "main\tnode\tn-1\tv4\tREADY\twould be removed",
            "main\tnode\tn-2\tv4\tPREEMPTED\twould be removed",
        ],
    )
    assert f"main: Ray on `{CLUSTER.head}` would be stopped\n" in err
    assert "main: 2 resources would be left billing without the head\n" in err
    assert names_of(server.nodes) == ["n-1", "n-2", "theirs"]


def test_stop_without_a_head_removes_nodes_and_queued_resources_and_reads_back(server: TpuServer, run: Run) -> None:
    server.instances.clear()
    add_hosts(server, "READY", "READY")
    name = f"{server.parent}/queuedResources/q"
    spec = {"parent": server.parent, "node": {"labels": labels()}}
    server.queued[name] = {"name": name, "state": {"state": "WAITING_FOR_RESOURCES"}, "tpu": {"nodeSpec": [spec]}}
    server.add_node("theirs", "READY", labels=labels("other"))

    code, out, err = run("stop", "--yes", "-o", "json")

    printed = json.loads(out)
    assert (code, [(each["kind"], each["name"], each["gone"]) for each in printed]) == (
        0,
        [("queued resource", "q", True), ("node", "n-1", True), ("node", "n-2", True)],
    )
    assert differences(documented()["runtime cluster stop -o json"], printed) == []
    assert err == "main: nothing is left\n"
    assert (names_of(server.nodes), server.queued) == (["theirs"], {})


@pytest.mark.parametrize(
    ("code", "can_say", "reported"), [(0, True, [("state", "stopped")]), (0, False, []), (5, True, [])]
)
def test_head_says_that_it_was_stopped_once_ray_is(
    code: int, can_say: bool, reported: list[tuple[str, str]], tmp_path: Path
) -> None:
    systemctl = tmp_path / "systemctl"
    systemctl.write_text(f'#!/bin/sh\necho "$@"\nexit {code}\n')
    systemctl.chmod(0o700)
    metadata = MetadataServer(guest_attributes=can_say)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "GCE_METADATA_HOST": metadata.address}

    done = subprocess.run(STOP_RAY[1:], env=environment, capture_output=True, text=True, check=False)

    metadata.stop()
    assert (done.returncode, metadata.reported) == (code, reported)
    assert done.stdout == "stop runtime-ray-watch.service runtime-ray-head.service\n"
    assert ("this machine cannot say that Ray was stopped" in done.stderr) is (not can_say)


def test_stop_looks_until_two_lists_in_a_row_are_empty(
    server: TpuServer, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    def a_member_is_added(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 1:
            server.add_node("late", "CREATING", labels=member_labels("late"), acceleratorType="v4-8")

    replace_sleep(monkeypatch, a_member_is_added)

    code, out, err = run("stop", "--yes", "--leave-head")

    assert (code, out, err) == (0, "main\tnode\tlate\tmember late\tCREATING\tremoved\n", "main: nothing is left\n")
    assert (pauses, server.nodes) == ([5.0, 5.0], {})


def test_stop_that_cannot_remove_one_says_what_is_left(server: TpuServer, run: Run) -> None:
    add_hosts(server, "READY", "READY")
    server.undeletable.add("n-1")

    code, _, err = run("stop", "--yes", "--leave-head")

    assert code == 3
    assert "main: 0 resources being deleted, 1 left\n  next: run the same command again" in err
    assert names_of(server.nodes) == ["n-1"]


def test_stop_without_a_yes_does_nothing(server: TpuServer, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    add_hosts(server, "READY")

    code, _, err = run("stop", "--leave-head")

    assert code == 2
    assert "remove 1 node or queued resource of `marin-main`" in err
    assert names_of(server.nodes) == ["n-1"]


# help


@pytest.mark.parametrize("verb", ["list", "status", "config", "attach", "exec", "dashboard", "reap", "stop"])
def test_help_of_each_verb_has_examples(
    run: Run, monkeypatch: pytest.MonkeyPatch, golden: Callable[[str, str], None], verb: str
) -> None:
    monkeypatch.setenv("COLUMNS", "100")

    code, out, _ = run(verb, "--help")

    assert (code, f"runtime cluster {verb}" in out.partition("Examples:")[2]) == (0, True)
    golden(f"cli/cluster-{verb}.txt", out)
