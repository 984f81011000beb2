"""`runtime cluster`: what the commands print, do and refuse."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from runtime.cli.main import main
from runtime.outputs import StackOutputs, encode_outputs
from runtime.values import replace
from tests.cluster_support import CLUSTER, OUTPUTS, labels
from tests.fakes.google import Refusal
from tests.fakes.tpu import TpuServer, names_of
from tests.output_support import differences, documented

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def server() -> Iterator[TpuServer]:
    fake = TpuServer(page=2)
    fake.add_instance({"name": CLUSTER.head, "labels": labels(kind="head")}, created="2026-11-20T09:00:00.000-00:00")
    fake.start()
    yield fake
    fake.stop()


@pytest.fixture
def run(server: TpuServer, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    def call(*args: str, outputs: StackOutputs = OUTPUTS) -> tuple[int, str, str]:
        contract = tmp_path / "contract.json"
        contract.write_text(encode_outputs(outputs))
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setenv("RUNTIME_GOOGLE_API", server.url)
        monkeypatch.setenv("RUNTIME_OUTPUTS", str(contract))
        code = main(["cluster", *args])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


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

    row = {"cluster": "main", "name": "n-0", "pool": "v4", "why": "preempted", "removed": True, "gone": True, "error": None}
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


def test_reap_says_that_google_still_deletes(server: TpuServer, reap: Run) -> None:
    server.add_node("n-0", "PREEMPTED", labels=labels())
    server.slow_deletion = True

    assert reap()[:2] == (0, "main\tn-0\tv4\tpreempted\tbeing deleted\n")


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


