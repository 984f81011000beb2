"""Ray judges our rendered files: its schema, its Google node provider and its autoscaler, none of them modified."""

from __future__ import annotations

import copy
import dataclasses
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.components.ray_head import HEAD_PERMISSIONS, REAPER_PERMISSIONS
from infra.render.autoscaler import START_NODE, render_autoscaler
from infra.render.cluster import HEAD_TYPE, RayCluster, cpus_per_host, memory_per_host
from infra.render.startup import render_contract
from infra.render.units import render_head_service, render_start_script
from infra.settings.model import MachineSettings, TpuPoolSettings
from runtime.cli.main import main
from runtime.clusters.warm_nodes import Wish, merge_request
from tests.fakes.tpu import TpuServer, names_of
from tests.infra.render_support import SHAPES, V4, sample_cluster
from tests.services.ray_support import Autoscaler, google_of, node_types
from tests.services_support import wait_until

pytestmark = [
    # From Ray's own imports and clients; warnings from our code stay errors.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
    pytest.mark.filterwarnings("ignore:.*pkg_resources.*"),
    pytest.mark.filterwarnings("ignore:.*get_event_loop.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:unclosed.*:ResourceWarning"),
]

POOLS = {"v4": dataclasses.replace(V4, min=4, max=6)}
LABELS = {
    "ray-cluster-name": "marin-main",
    "ray-node-name": "ray-marin-main-head",
    "ray-node-status": "up-to-date",
    "ray-node-type": "head",
    "ray-user-node-type": HEAD_TYPE,
}


@pytest.fixture
def cluster() -> RayCluster:
    return sample_cluster(pools=POOLS)


@pytest.fixture
def server(cluster: RayCluster) -> Iterator[TpuServer]:
    fake = TpuServer(project=cluster.project, zone=cluster.zone, page=1000)
    fake.permissions = set(HEAD_PERMISSIONS)
    fake.add_instance({"name": cluster.head, "labels": LABELS})
    fake.start()
    yield fake
    fake.stop()


@pytest.fixture
def autoscaler(server: TpuServer, cluster: RayCluster, tmp_path: Path) -> Iterator[Autoscaler]:
    key = tmp_path / "id_ed25519"
    key.write_text("not a key")
    with google_of(server):
        made = Autoscaler(tmp_path / "autoscaler.yaml", key)
        made.apply(render_autoscaler(cluster))
        yield made


@pytest.fixture
def provider(server: TpuServer, cluster: RayCluster) -> Iterator[Any]:
    from ray.autoscaler._private.gcp.node_provider import GCPNodeProvider

    with google_of(server):
        yield GCPNodeProvider(yaml.safe_load(render_autoscaler(cluster))["provider"], cluster.name)


# the file


@pytest.mark.parametrize("shape", SHAPES)
def test_rendered_file_of_every_pool_shape_passes_rays_validation(shape: str) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    fields = yaml.safe_load(render_autoscaler(sample_cluster(pools={shape: SHAPES[shape]})))

    prepared = prepare_config(copy.deepcopy(fields))
    validate_config(prepared)

    # `ray start` fills in no defaults, so the file must contain them.
    assert prepared == fields


def test_rendered_file_of_all_pool_shapes_is_what_ray_up_would_have_filled_in() -> None:
    from ray.autoscaler._private.gcp.config import get_node_type
    from ray.autoscaler._private.gcp.node_provider import GCPNodeProvider

    fields = yaml.safe_load(render_autoscaler(sample_cluster(pools=SHAPES)))

    assert GCPNodeProvider.fillout_available_node_types_resources(fields) == fields
    kinds = {name: get_node_type(each["node_config"]).value for name, each in fields["available_node_types"].items()}
    assert kinds == {HEAD_TYPE: "compute", **dict.fromkeys(SHAPES, "tpu")}


@pytest.mark.parametrize("shape", SHAPES)
def test_chips_of_a_pool_are_what_ray_counts_on_a_host(shape: str) -> None:
    from ray._private.accelerators.tpu import get_num_tpu_visible_chips_per_host
    from ray.autoscaler._private.gcp.config import _get_num_tpu_chips

    pool = SHAPES[shape]
    resources = node_types(render_autoscaler(sample_cluster(pools={shape: pool})))[shape]["resources"]

    config = {"acceleratorType": pool.accelerator}
    ours = min(_get_num_tpu_chips(config), get_num_tpu_visible_chips_per_host(pool.accelerator))
    assert resources == {
        "CPU": cpus_per_host(pool),
        "memory": memory_per_host(pool),
        "TPU": ours,
        f"TPU-{pool.accelerator}-head": 1,
    }


def test_memory_of_a_pool_is_what_ray_hands_out_on_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private.resource_and_label_spec import ResourceAndLabelSpec

    resources = node_types(render_autoscaler(sample_cluster(pools={"v4": V4})))["v4"]["resources"]
    monkeypatch.setenv("RAY_OVERRIDE_RESOURCES", json.dumps(resources))

    spec = ResourceAndLabelSpec(num_gpus=0, object_store_memory=100_000_000).resolve(is_head=False)

    assert (spec.num_cpus, spec.memory) == (120, 244 * 1024**3)


@pytest.mark.parametrize("kind", ["head", "node"])
def test_start_script_gives_ray_only_options_that_it_takes(kind: str, tmp_path: Path) -> None:
    from ray.scripts.scripts import start

    recorder = tmp_path / "ray"
    recorder.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    recorder.chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", render_start_script(sample_cluster(cloud_logging=False), MachineSettings()), "start-ray", kind],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "RAY_HEAD_IP": "10.64.0.2"},
        capture_output=True,
        text=True,
        check=True,
    )
    command, *arguments = done.stdout.splitlines()

    assert command == "start"
    parsed = start.make_context("start", list(arguments)).params
    assert (parsed["head"], parsed["block"], parsed["disable_usage_stats"]) == (kind == "head", True, True)
    assert (parsed["node_manager_port"], parsed["min_worker_port"]) == (6380, 10002)
    with pytest.raises(Exception, match="node-manager-prot"):
        start.make_context("start", [*arguments, "--node-manager-prot=1"])


def test_ray_start_uses_the_first_autoscaler_as_we_do() -> None:
    import ray

    assert ray._config.enable_autoscaler_v2() is False
    assert "--env=RAY_enable_autoscaler_v2=0" in render_head_service(sample_cluster())


def test_rays_validation_refuses_what_is_wrong() -> None:
    import jsonschema
    from ray.autoscaler._private.util import validate_config

    fields = yaml.safe_load(render_autoscaler(sample_cluster()))
    for wrong in (
        {**fields, "max_worker": 4},
        {**fields, "idle_timeout_minutes": "10"},
        {**fields, "available_node_types": {**fields["available_node_types"], "v4": {"resources": {}, "max": 3}}},
    ):
        with pytest.raises(jsonschema.ValidationError):
            validate_config(wrong)


# the provider


def test_provider_finds_the_head_by_our_labels_and_its_kind_by_our_name(
    provider: Any, server: TpuServer, cluster: RayCluster
) -> None:
    from ray.autoscaler._private.gcp.node import GCPNodeType

    found = provider.non_terminated_nodes({"ray-node-type": "head"})

    assert found == [cluster.head]
    assert GCPNodeType.name_to_type(cluster.head) is GCPNodeType.COMPUTE
    assert provider.internal_ip(cluster.head) == "10.64.0.2"
    assert provider.node_tags(cluster.head) == LABELS
    assert server.refused == []


def test_provider_sees_no_head_of_another_cluster_or_under_a_wrong_name(provider: Any, server: TpuServer) -> None:
    server.instances.clear()
    server.add_instance({"name": "ray-x-head-0123abcd-compute", "labels": {**LABELS, "ray-cluster-name": "x"}})
    assert provider.non_terminated_nodes({"ray-node-type": "head"}) == []

    # The name that Pulumi's own naming would give it.
    server.add_instance({"name": "marin-main-head-compute-0a1b2c3", "labels": LABELS})
    assert provider.non_terminated_nodes({"ray-node-type": "head"}) == ["marin-main-head-compute-0a1b2c3"]
    with pytest.raises(ValueError, match="0a1b2c3"):
        provider.set_node_tags("marin-main-head-compute-0a1b2c3", {"ray-node-status": "up-to-date"})


def test_provider_rewrites_only_label_keys_that_pulumi_ignores(
    provider: Any, server: TpuServer, cluster: RayCluster
) -> None:
    from infra.components.ray_head import RAY_WRITES

    before = dict(server.instances[cluster.head]["labels"])
    provider.set_node_tags(cluster.head, dict.fromkeys(RAY_WRITES, "x"))

    assert server.instances[cluster.head]["labels"] == {**before, **dict.fromkeys(RAY_WRITES, "x")}


def test_provider_spoils_a_list_of_service_accounts_which_is_why_we_render_the_apis_own_key(provider: Any) -> None:
    tags = {"ray-node-name": "ray-marin-main-worker", "ray-node-type": "worker"}
    ours = node_types(render_autoscaler(sample_cluster()))["v4"]["node_config"]
    account = ours["serviceAccount"]
    listed = {key: value for key, value in ours.items() if key != "serviceAccount"}
    listed["serviceAccounts"] = [{"email": account["email"], "scopes": account["scope"]}]

    with pytest.raises(KeyError, match="scopes"):
        provider.create_node(listed, tags, 2)
    assert len(provider.create_node(ours, tags, 2)) == 2


# the autoscaler


def test_autoscaler_asks_for_min_workers_with_our_node_config(
    autoscaler: Autoscaler, server: TpuServer, cluster: RayCluster
) -> None:
    autoscaler.round()
    autoscaler.round()

    assert len(autoscaler.workers()) == 4
    assert server.refused == []
    config = yaml.safe_load(autoscaler._file.read_text())["available_node_types"]["v4"]["node_config"]
    for body in server.created:
        launched = {key: value for key, value in body["labels"].items() if key.startswith("ray-")}
        assert body == {**config, "labels": {**cluster.labels, **launched}}
        assert launched.keys() == {
            "ray-cluster-name",
            "ray-launch-config",
            "ray-node-name",
            "ray-node-status",
            "ray-node-type",
            "ray-user-node-type",
        }
        assert (launched["ray-cluster-name"], launched["ray-user-node-type"]) == ("marin-main", "v4")


def test_autoscaler_starts_ray_on_each_node_with_one_command_over_ssh(
    autoscaler: Autoscaler, server: TpuServer
) -> None:
    autoscaler.round()
    autoscaler.round()

    addresses = {each["networkEndpoints"][0]["ipAddress"] for each in server.nodes.values()}
    assert {address for address, _ in autoscaler.shell.ran} == addresses
    for address in addresses:
        *checks, start = autoscaler.shell.commands(address)
        assert all("uptime" in check for check in checks)
        assert START_NODE in start
        assert "RAY_HEAD_IP=10.64.0.2" in start
        assert '{"CPU":120,"memory":261993005056,"TPU":4,"TPU-v4-8-head":1}' in start
    assert {each["labels"]["ray-node-status"] for each in server.nodes.values()} == {"up-to-date"}


def apply_pools(autoscaler: Autoscaler, cluster: RayCluster, **pools: TpuPoolSettings) -> None:
    autoscaler.apply(render_autoscaler(dataclasses.replace(cluster, pools=pools)))


def ask(autoscaler: Autoscaler, *bundles: dict[str, float]) -> None:
    autoscaler.load.set_resource_requests(list(bundles))
    autoscaler.round()
    autoscaler.round()


def test_autoscaler_makes_each_slice_of_several_hosts_as_one_node_up_to_the_maximum(
    autoscaler: Autoscaler, server: TpuServer, cluster: RayCluster
) -> None:
    server.give_addresses = lambda _, number: [f"10.64.{number}.{host}" for host in range(2)]
    slices = dataclasses.replace(V4, accelerator="v4-16", min=0, max=2)
    apply_pools(autoscaler, cluster, slices=slices)

    ask(autoscaler, {"TPU-v4-16-head": 1})
    assert [body["acceleratorType"] for body in server.created] == ["v4-16"]
    ask(autoscaler, *[{"TPU-v4-16-head": 1.0}] * 3)

    assert len(autoscaler.workers()) == 2
    starts = {address: command for address, command in autoscaler.shell.ran if START_NODE in command}
    first = {address for address, command in starts.items() if '"TPU-v4-16-head":1' in command}
    assert (len(starts), {address[-1] for address in first}, len(first)) == (4, {"0"}, 2)
    assert all('"TPU":4' in command for command in starts.values())


def test_autoscaler_makes_no_node_of_a_family_that_it_does_not_know_and_goes_on_with_others(
    autoscaler: Autoscaler, server: TpuServer, cluster: RayCluster
) -> None:
    new = dataclasses.replace(V4, accelerator="tpu7x-8", min=0)
    apply_pools(autoscaler, cluster, new=new, v4=dataclasses.replace(V4, min=1, max=2))

    ask(autoscaler, {"TPU-tpu7x-8-head": 1})

    assert [body["acceleratorType"] for body in server.created] == ["v4-8"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_autoscaler_that_finds_no_head_in_the_zone_of_its_nodes_starts_ray_on_none_of_them(
    autoscaler: Autoscaler, server: TpuServer, cluster: RayCluster
) -> None:
    server.instances.clear()

    for _ in range(3):
        autoscaler.ray.update()
        assert wait_until(lambda: autoscaler.ray.pending_launches.value == 0)

    assert len(server.nodes) == 4
    assert autoscaler.ray.num_failures > 0
    assert autoscaler.shell.ran == []


def test_autoscaler_neither_counts_nor_deletes_a_preempted_node_until_the_reaper_did(
    autoscaler: Autoscaler,
    server: TpuServer,
    cluster: RayCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    autoscaler.round()
    autoscaler.round()
    lost, *kept = autoscaler.workers()
    server.preempt(lost)

    assert autoscaler.workers() == kept
    autoscaler.round()
    autoscaler.round()
    assert len(autoscaler.workers()) == 4
    assert len(server.nodes) == 5, "what is preempted goes on to hold quota"

    monkeypatch.setenv("RUNTIME_GOOGLE_API", server.url)
    contract = tmp_path / "contract.json"
    contract.write_text(render_contract(cluster, "0" * 64))
    monkeypatch.setenv("RUNTIME_OUTPUTS", str(contract))
    server.permissions = set(REAPER_PERMISSIONS)
    capsys.readouterr()
    code = main(["cluster", "reap", "--cluster", "main", "-o", "json"])

    assert code == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in report["removed"]] == names_of([lost])
    assert (report["live"], report["max"]) == ({"v4": 4}, {"v4": 6})
    assert lost not in server.nodes
    server.permissions = set(HEAD_PERMISSIONS)
    autoscaler.round()
    assert sorted(server.nodes) == autoscaler.workers()


def test_autoscaler_at_its_maximum_replaces_a_preempted_node(
    autoscaler: Autoscaler, server: TpuServer, cluster: RayCluster
) -> None:
    autoscaler.apply(
        render_autoscaler(dataclasses.replace(cluster, pools={"v4": dataclasses.replace(V4, min=2, max=2)}))
    )
    autoscaler.round()
    autoscaler.round()
    lost, _ = autoscaler.workers()

    server.preempt(lost)
    autoscaler.round()
    autoscaler.round()

    assert len(autoscaler.workers()) == 2
    assert lost not in autoscaler.workers()


def test_autoscaler_takes_up_a_changed_file_without_ending_a_node(
    autoscaler: Autoscaler, server: TpuServer, cluster: RayCluster
) -> None:
    autoscaler.round()
    autoscaler.round()
    before = autoscaler.workers()
    commands = list(autoscaler.shell.ran)

    changed = dataclasses.replace(
        cluster,
        pools={"v4": dataclasses.replace(V4, min=5, max=8, runtime_version="tpu-ubuntu2404-base", cpus=100)},
        image=cluster.image.replace("a" * 64, "b" * 64),
        secrets=(),
    )
    autoscaler.apply(render_autoscaler(changed))
    autoscaler.round()
    autoscaler.round()

    after = autoscaler.workers()
    assert set(before) < set(after)
    assert len(after) == 5
    (new,) = set(after) - set(before)
    assert server.nodes[new]["runtimeVersion"] == "tpu-ubuntu2404-base"
    address = server.nodes[new]["networkEndpoints"][0]["ipAddress"]
    assert {to for to, _ in autoscaler.shell.ran[len(commands) :]} == {address}, "no running node was touched"


def buffered(cluster: RayCluster, *, min: int, max: int) -> RayCluster:
    """Of two pools of one type, one has a buffer."""
    ours = dataclasses.replace(V4, min=min, max=max, buffer=1)
    return dataclasses.replace(cluster, pools={"v4": ours, "plain": dataclasses.replace(V4, min=0, max=9)})


def request_nodes(autoscaler: Autoscaler, count: int) -> None:
    wish = Wish(pool="v4", buffer=1, busy=0, max=9, wanted=count)
    autoscaler.load.set_resource_requests(merge_request([], [wish]))
    autoscaler.round()
    autoscaler.round()


def test_request_for_a_buffer_makes_nodes_of_its_own_pool_within_its_maximum(
    autoscaler: Autoscaler, server: TpuServer, cluster: RayCluster
) -> None:
    autoscaler.apply(render_autoscaler(buffered(cluster, min=0, max=3)))

    request_nodes(autoscaler, 2)
    assert len(autoscaler.workers()) == 2
    request_nodes(autoscaler, 5)

    assert len(autoscaler.workers()) == 3
    assert {body["labels"]["ray-user-node-type"] for body in server.created} == {"v4"}


def test_request_for_a_buffer_counts_nodes_from_before_it_and_those_of_the_minimum(
    autoscaler: Autoscaler, cluster: RayCluster
) -> None:
    autoscaler.round()
    autoscaler.round()
    before = autoscaler.workers()
    assert len(before) == 4

    autoscaler.apply(render_autoscaler(buffered(cluster, min=4, max=6)))
    request_nodes(autoscaler, 4)
    assert autoscaler.workers() == before
    request_nodes(autoscaler, 5)

    assert len(set(autoscaler.workers()) - set(before)) == 1


@pytest.mark.parametrize("emptied_first", [False, True], ids=["at once", "max 0 first"])
def test_removed_pool_beside_a_request_stops_the_autoscaler_unless_its_nodes_have_ended_before(
    emptied_first: bool, autoscaler: Autoscaler, cluster: RayCluster
) -> None:
    """The reason why the buffer's command asks for nothing while nodes of a removed pool live."""
    both = buffered(cluster, min=0, max=3)

    def apply(**plain: TpuPoolSettings) -> None:
        autoscaler.apply(render_autoscaler(dataclasses.replace(both, pools={"v4": both.pools["v4"], **plain})))

    apply(plain=dataclasses.replace(V4, min=1, max=9))
    request_nodes(autoscaler, 2)
    assert len(autoscaler.workers()) == 3
    if emptied_first:
        apply(plain=dataclasses.replace(V4, min=0, max=0))
        request_nodes(autoscaler, 2)
        assert len(autoscaler.workers()) == 2

    apply()
    if not emptied_first:
        with pytest.raises(AssertionError, match="Ray's round failed"):
            request_nodes(autoscaler, 2)
        assert len(autoscaler.workers()) == 3
        autoscaler.load.set_resource_requests([])
        autoscaler.round()
    request_nodes(autoscaler, 2)

    assert len(autoscaler.workers()) == 2


def test_autoscaler_keeps_the_last_good_file(autoscaler: Autoscaler) -> None:
    autoscaler.round()
    autoscaler._file.write_text("cluster_name: [")
    autoscaler.round()
    autoscaler.round()

    assert len(autoscaler.workers()) == 4


def test_autoscaler_of_a_changed_pool_without_our_switch_ends_its_nodes(
    autoscaler: Autoscaler, cluster: RayCluster
) -> None:
    """The reason for `disable_launch_config_check` in the file."""
    unchecked = "disable_launch_config_check: true"
    autoscaler.apply(render_autoscaler(cluster).replace(unchecked, "disable_launch_config_check: false"))
    autoscaler.round()
    autoscaler.round()
    before = autoscaler.workers()

    pool = dataclasses.replace(POOLS["v4"], runtime_version="tpu-ubuntu2404-base")
    autoscaler.apply(render_autoscaler(dataclasses.replace(cluster, pools={"v4": pool})))
    autoscaler.round()

    assert not set(before) & set(autoscaler.workers())


def test_autoscaler_with_fewer_rights_makes_nothing(autoscaler: Autoscaler, server: TpuServer) -> None:
    server.permissions = set(HEAD_PERMISSIONS) - {"tpu.nodes.create"}
    autoscaler.round()

    assert server.nodes == {}
