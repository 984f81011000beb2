"""`runtime cluster status`: what it prints of Google's side and of Ray's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from tests.cluster_support import CLUSTER, OUTPUTS, add_hosts
from tests.fakes.faults import FaultyServer, Request, Response
from tests.fakes.tpu import TpuServer
from tests.output_support import differences, documented

Run = Callable[..., tuple[int, str, str]]


class Dashboard(FaultyServer):
    """Answers as Ray's dashboard does, about hosts at `alive`."""

    def __init__(self, *alive: str) -> None:
        super().__init__()
        self.alive = alive
        self.jobs: list[dict[str, object]] = []
        self.actors: list[dict[str, str]] | None = []
        """None if this Ray does not list actors."""

    def answer(self, request: Request) -> Response:
        usage = {address: {"TPU": [4.0, 4.0]} for address in self.alive[:1]}
        report = {"usageByNode": usage, "resourceDemand": [[{"TPU": 4.0}, 2]]}
        summary = [{"raylet": {"nodeId": each, "nodeManagerAddress": each, "state": "ALIVE"}} for each in self.alive]
        if request.path == "/api/jobs/":
            return Response(200, {}, json.dumps(self.jobs).encode())
        if request.path.startswith("/api/v0/actors?") and self.actors is None:
            return Response(500, {}, b"no")
        known: dict[str, object] = {
            "/nodes?view=summary": {"summary": summary},
            "/api/cluster_status": {"clusterStatus": {"loadMetricsReport": report}, "autoscalingError": None},
        }
        if request.path.startswith("/api/v0/actors?"):
            known[request.path] = {"result": {"total": len(self.actors or ()), "result": self.actors}}
        body = {"result": True, "msg": "", "data": known[request.path]}
        return Response(200, {"Content-Type": "application/json"}, json.dumps(body).encode())


@pytest.fixture
def dashboard() -> Iterator[Dashboard]:
    running = Dashboard("10.0.0.1", "10.0.0.2")
    running.start()
    yield running
    running.stop()


def test_status_without_ray_says_so_and_shows_the_rest(server: TpuServer, run: Run) -> None:
    add_hosts(server, "READY", "CREATING", "PREEMPTED")

    code, out, err = run("status")

    assert (code, out) == (
        0,
        "main\tv4\t4\t8\t2\t2\t-\t-\t1 CREATING, 1 PREEMPTED, 1 READY\nmain\tv5e\t0\t2\t0\t0\t-\t-\t-\n",
    )
    assert "main: Ray was not asked: `--address URL` or `--tunnel` reaches its dashboard" in err
    assert "main v4: 2 of at least 4 nodes live\n" in err
    assert server.calls().count("tpu.projects.locations.nodes.delete") == 0


def test_status_with_ray_shows_what_it_sees_what_runs_and_what_waits(
    server: TpuServer, run: Run, dashboard: Dashboard
) -> None:
    add_hosts(server, "READY", "READY", "READY", "READY")

    code, out, err = run("status", "--address", dashboard.url)

    assert (code, out.splitlines()[0]) == (0, "main\tv4\t4\t8\t4\t0\t2\t1\t4 READY")
    assert err.splitlines() == [
        "main v4: n-3, n-4: Google runs what Ray does not see",
        "  next: runtime cluster exec --cluster main --node n-3 -- sudo journalctl -u runtime-ray-node -n 50",
        "main: 2 requests for 4 TPU wait: 1 of 4 nodes works on nothing",
        "  next: it starts within seconds, unless it asks for more CPUs, memory or hosts at once: `runtime explain JOB`",
    ]


def test_list_status_and_config_show_the_buffer_of_a_pool(server: TpuServer, run: Run) -> None:
    add_hosts(server, "READY")
    pools = {"v4": {"accelerator": "v4-8", "min": 1, "max": 8, "buffer": 2}}
    outputs = replace(OUTPUTS, clusters={"main": replace(CLUSTER, pools=pools)})

    assert run("list", outputs=outputs)[1].rstrip("\n").split("\t")[-1] == "v4: v4-8, 1 to 8, 2 idle"
    assert run("status", outputs=outputs)[1] == "main\tv4\t1, 2 idle\t8\t1\t0\t-\t-\t1 READY\n"
    assert json.loads(run("status", "-o", "json", outputs=outputs)[1])[0]["pools"][0]["buffer"] == 2
    assert "pools.v4.buffer\t2\n" in run("config", outputs=outputs)[1]


def started(number: int, **more: object) -> dict[str, object]:
    said = {"job": f"j-{number:02}", "epoch": "1", "name": "train", "owner": "ada", "grace_s": "5"}
    name, ray_id = f"j-{number:02}-e1-p0-0", f"{number:02}000000"
    return {"submission_id": name, "job_id": ray_id, "status": "RUNNING", "metadata": said, **more}


def test_status_with_ray_names_our_jobs_and_the_command_that_shows_each(
    server: TpuServer, run: Run, dashboard: Dashboard
) -> None:
    add_hosts(server, "READY", "READY", "READY", "READY")
    other: dict[str, object] = {"submission_id": "raysubmit_1", "status": "RUNNING", "entrypoint": "python x.py"}
    odd = {**other, "submission_id": "j-04-e1-p0-0", "metadata": "a text"}
    dashboard.jobs = [started(1), started(2), started(3, status="STOPPED"), other, odd]
    dashboard.actors = [{"job_id": "01000000", "node_id": each} for each in ("10.0.0.1", "10.0.0.2")]

    lines = run("status", "--address", dashboard.url)[2].splitlines()
    [printed] = json.loads(run("status", "--address", dashboard.url, "-o", "json")[1])

    assert lines[:3] == [
        "main: j-01 `train` of ada: RUNNING on n-1, n-2: `runtime status j-01`",
        "main: j-02 `train` of ada: RUNNING, on no node yet: `runtime explain j-02`",
        "main: 2 jobs that the runtime did not start: `runtime cluster dashboard`",
    ]
    first = {"job": "j-01", "name": "train", "owner": "ada", "state": "RUNNING", "nodes": ["n-1", "n-2"]}
    assert printed["jobs"][0] == {**first, "show": "runtime status j-01"}
    assert ([each["job"] for each in printed["jobs"]], printed["others"]) == (["j-01", "j-02"], 2)


def test_status_with_many_jobs_stays_short_and_without_actors_names_no_nodes(
    server: TpuServer, run: Run, dashboard: Dashboard
) -> None:
    add_hosts(server, "READY", "READY", "READY", "READY")
    dashboard.jobs, dashboard.actors = [started(number) for number in range(1, 32)], None

    lines = run("status", "--address", dashboard.url)[2].splitlines()
    [printed] = json.loads(run("status", "--address", dashboard.url, "-o", "json")[1])

    assert lines[9:11] == [
        "main: j-10 `train` of ada: RUNNING: `runtime status j-10`",
        "main: 21 other jobs of ours: `-o json` has all",
    ]
    assert (len(printed["jobs"]), printed["jobs"][0]["nodes"]) == (31, None)


def test_status_with_an_address_that_does_not_answer_shows_google(server: TpuServer, run: Run) -> None:
    add_hosts(server, "READY")

    code, out, err = run("status", "--address", "http://127.0.0.1:9")

    assert (code, out.splitlines()[0]) == (0, "main\tv4\t4\t8\t1\t0\t-\t-\t1 READY")
    assert "no answer of Ray's dashboard at `http://127.0.0.1:9`" in err


def test_status_as_json_is_documented(server: TpuServer, run: Run, dashboard: Dashboard) -> None:
    add_hosts(server, "READY", "PREEMPTED")
    dashboard.jobs = [started(1)]
    dashboard.actors = [{"job_id": "01000000", "node_id": "10.0.0.1"}]

    printed = json.loads(run("status", "--address", dashboard.url, "-o", "json")[1])

    assert [(each["pool"], each["live"], each["dead"], each["busy"]) for each in printed[0]["pools"]] == [
        ("v4", 1, 1, 1),
        ("v5e", 0, 0, 0),
    ]
    assert differences(documented()["runtime cluster status -o json"], printed) == []


def test_status_without_rights_is_explained(server: TpuServer, run: Run) -> None:
    server.permissions = set()

    code, out, err = run("status")

    assert (code, out) == (3, "")
    assert "main: google refused" in err
    assert "\n  next: `runtime doctor` says what this identity may do\n" in err
