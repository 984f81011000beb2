"""Manifests of Jobs, places of targets, and shares of GPUs: all without a cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from runtime.config import Project, Settings
from runtime.errors import InvalidValue, NotPossible, UnknownName
from runtime.jobs.plan import Fidelity, JobIdentity, LaunchPlan, PlanContext, Target
from runtime.jobs.spec import (
    Array,
    BuildOn,
    CapacityRetry,
    Code,
    CodeMode,
    EnvironmentManager,
    Gang,
    Gpus,
    JobEnvironment,
    JobResources,
    JobSpec,
    OnTaskFailure,
    Placement,
    Priority,
    Range,
    Retry,
    SecretRef,
    parse_spec,
)
from runtime.jobs.spec_fields import leaf_fields
from runtime.launchers.kubernetes.field_support import KEEPS
from runtime.launchers.kubernetes.files import JobFiles
from runtime.launchers.kubernetes.gpu_leases import (
    Gpu,
    Holder,
    deal,
    grant,
    is_waiting,
    lease_name,
    read_table,
    write_table,
)
from runtime.launchers.kubernetes.launcher import KubernetesLauncher
from runtime.launchers.kubernetes.render import label_value, quantity, render_files_job, render_secrets, render_shim
from runtime.launchers.kubernetes.settings import read_place
from runtime.outputs import ClaimOutput, KubernetesOutput, NamespaceOutput, RegistryOutput, StackOutputs, encode_outputs
from runtime.shim.bundle import build_shim
from runtime.tasks.container import Mount, MountMode

Golden = Callable[[str, str], None]
GIB = 1 << 30
JOB = JobIdentity(id="j-0123456789abcdef01234567", name="train", owner="alice", snapshot="sha256:" + "ab" * 32)


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


def target(**settings: Any) -> Target:
    records = settings.pop("records", "claim://scratch/lab/runtime")
    base = {"namespace": "lab", "context": "phoebe", "image": "registry.example/lab/train:7"}
    found = Target(name="lab", kind="kubernetes", records=records, settings={**base, **settings})
    KubernetesLauncher().check_settings(found)
    return found


def plan(context: PlanContext, where: Target | None = None, **fields: Any) -> LaunchPlan:
    spec = JobSpec(command=("python", "train.py"), **fields)
    return KubernetesLauncher().plan(spec, where or target(), JOB, context)


def manifest(planned: LaunchPlan, name: str = "job.yaml") -> dict[str, Any]:
    return yaml.safe_load(planned.artefacts[name])  # type: ignore[no-any-return]


def pod_of(planned: LaunchPlan) -> dict[str, Any]:
    return manifest(planned)["spec"]["template"]["spec"]  # type: ignore[no-any-return]


# goldens; the service tests apply each of them to a real API

GOLDENS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "seeds": (
        {
            "array": Array(seeds=12, offset=100, max_parallel=4, on_task_failure=OnTaskFailure.STOP),
            "retry": Retry(failure=2),
            "time_limit": timedelta(hours=2),
            "ttl_after_finished": timedelta(days=1),
        },
        {},
    ),
    "everything": (
        {
            "image": "registry.example/lab/other@sha256:" + "0" * 64,
            "resources": JobResources(
                cpus=1.5,
                memory=Range(16 * GIB, 64 * GIB),
                disk=Range(10 * GIB),
                gpus=Gpus(count=2, type="a100"),
                shared_memory=Range.read("8GiB").low,  # type: ignore[arg-type]
            ),
            "mounts": (
                Mount(source="claim://data/sets/one", target="/data"),
                Mount(source="claim://scratch", target="/scratch", mode=MountMode.RW),
            ),
            "secrets": (
                SecretRef(name="HF_TOKEN", source="kubernetes://huggingface/token"),
                SecretRef(name="OTHER", source="env://T"),
            ),
            "placement": Placement(nodes=("n1", "n2"), exclude=("n3",), selector={"pool": "research"}),
            "priority": Priority.HIGH,
            "account": "Lab A",
        },
        {
            "gpu_types": {"a100": "nvidia.com/gpu.product=NVIDIA-A100-SXM4-80GB"},
            "priority_classes": {"high": "research-high"},
            "service_account": "runtime-job",
            "image_pull_secrets": ["registry-login"],
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
            "run_as_user": 1000,
            "python": "/usr/bin/python3",
        },
    ),
    "bucket": (
        {"secrets": (SecretRef(name="HF_TOKEN", source="kubernetes://huggingface/token"),)},
        {
            "records": "s3://lab/runtime/",
            "records_secret": "lab-bucket",
            "records_env": {"AWS_ENDPOINT_URL": "https://s3.example", "AWS_REGION": "eu-1"},
        },
    ),
    "nodes": (
        {
            "nodes": 2,
            "tasks_per_node": 4,
            "array": Array(seeds=3, offset=10, max_parallel=2),
            "gang": Gang(start_timeout=timedelta(minutes=20)),
            "retry": Retry(failure=1, capacity=CapacityRetry(window=timedelta(hours=6))),
            "time_limit": timedelta(hours=2),
        },
        {"records": "gs://lab/runtime"},
    ),
    "slots": (
        {"array": Array(seeds=6), "resources": JobResources(gpus=Gpus(count=0.25), memory=Range(4 * GIB, 4 * GIB))},
        {"gpus": {"phortx1": 2}},
    ),
}


@pytest.mark.parametrize("name", sorted(GOLDENS))
def test_manifest_is_as_reviewed(name: str, context: PlanContext, golden: Golden) -> None:
    fields, settings = GOLDENS[name]
    planned = plan(context, target(**settings), **fields)

    text = "---\n".join(planned.artefacts[each] for each in sorted(planned.artefacts))
    golden(f"kubernetes/{name}.yaml", text)
    assert planned == plan(context, target(**settings), **fields)


def test_secret_of_the_cluster_is_in_no_order_and_others_by_file_only(context: PlanContext) -> None:
    fields, settings = GOLDENS["everything"]

    planned = plan(context, target(**settings), **fields)

    assert planned.order["secrets"] == {"OTHER": "secrets/OTHER"}
    assert "hush" not in str(planned)


def test_order_leaves_retries_to_the_backend_and_runs_the_image_where_the_image_says(context: PlanContext) -> None:
    planned = plan(context, code=Code(mode=CodeMode.IMAGE))

    assert planned.order["retries"] == "backend"
    assert planned.order["code"] == {"path": "."}


@pytest.mark.parametrize(
    ("gpus", "settings", "check"),
    [
        (None, {}, None),
        (Gpus(count=0.25), {"gpus": {"n1": 1}}, {"count": 1, "share": 0.25}),
        (Gpus(count=2), {}, {"count": 2, "share": 1.0}),
        (Gpus(count=1), {"gpu_resource": "amd.com/gpu"}, None),
        (Gpus(count=1), {"check_gpus": False}, None),
    ],
)
def test_shim_looks_at_the_gpus_of_nvidia_unless_told_not_to(
    context: PlanContext, gpus: Gpus | None, settings: dict[str, Any], check: dict[str, float] | None
) -> None:
    planned = plan(context, target(**settings), resources=JobResources(gpus=gpus))

    assert planned.order.get("gpu_check") == check
    assert planned.order["told"] == "/dev/termination-log"


def test_part_has_a_name_of_job_and_root_so_that_two_roots_do_not_meet(context: PlanContext) -> None:
    one, other = plan(context), plan(context, target(records="claim://scratch/other"))

    assert one.parts[0].name.startswith(JOB.id)
    assert one.parts[0].name != other.parts[0].name
    assert one.root == "/runtime-records/lab/runtime"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"mounts": (Mount(source="/home/data", target="/data"),)}, "cannot mount `/home/data`"),
        ({"code": Code(mode=CodeMode.NONE)}, "no pod can see"),
        ({"priority": Priority.LOW}, "no priority class for `low`"),
        ({"resources": JobResources(gpus=Gpus(count=1, type="h100"))}, "which nodes have `h100` GPUs"),
        ({"resources": JobResources(gpus=Gpus(count=0.5))}, "names no GPU that runs could share"),
        ({"secrets": (SecretRef(name="A", source="kubernetes://only"),)}, "which this target|is to come from"),
    ],
)
def test_what_the_target_cannot_do_is_refused_with_a_way_out(
    fields: dict[str, Any], text: str, context: PlanContext
) -> None:
    with pytest.raises(NotPossible, match=text) as refused:
        plan(context, **fields)

    assert refused.value.hint


def test_bucket_as_a_mount_names_the_ways_out(context: PlanContext) -> None:
    with pytest.raises(NotPossible) as refused:
        plan(context, mounts=(Mount(source="gs://lab/data", target="/data"),))

    assert refused.value.message == "cannot mount `gs://lab/data`: pods here mount claims only"
    assert (refused.value.hint or "").startswith("let the command read it by itself, or copy it to claim://NAME/PATH;")


def test_job_without_an_image_is_refused(context: PlanContext) -> None:
    bare = Target(name="lab", kind="kubernetes", records="claim://c/p", settings={"namespace": "lab"})

    with pytest.raises(NotPossible, match="names no image"):
        plan(context, bare)


def test_secret_of_a_job_enters_no_bucket_and_goes_with_the_job(context: PlanContext) -> None:
    made = manifest(plan(context, target(records="gs://lab/p"), secrets=(SecretRef(name="A", source="env://T"),)))
    made["metadata"]["uid"] = "u-1"
    files = JobFiles("gs://lab/p")

    files.write(f"jobs/{JOB.id}/secrets/A", b"hush")

    assert files.secrets_of(JOB.id) == {"A": b"hush"}
    assert files.secrets_of("j-another") == {}
    secret = render_secrets(made, files.secrets_of(JOB.id))
    (owner,) = secret["metadata"]["ownerReferences"]
    assert (owner["uid"], secret["immutable"], secret["data"]) == ("u-1", True, {"A": "aHVzaA=="})
    pod = made["spec"]["template"]["spec"]
    volumes = {each["name"]: each for each in pod["volumes"]}
    assert volumes["secrets"]["secret"] == {"secretName": secret["metadata"]["name"]}
    (mount,) = [each for each in pod["containers"][0]["volumeMounts"] if each["name"] == "secrets"]
    assert mount["mountPath"] == "/runtime-secrets"


def test_shim_of_a_job_with_a_bucket_goes_with_the_job_and_fits_into_an_object(context: PlanContext) -> None:
    made = manifest(plan(context, target(records="gs://lab/p")))
    made["metadata"]["uid"] = "u-1"

    shim = render_shim(made, build_shim())

    assert made["spec"]["suspend"] is True
    assert is_waiting(made)
    assert shim["metadata"]["ownerReferences"] == [
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "name": made["metadata"]["name"],
            "uid": "u-1",
            "blockOwnerDeletion": True,
        }
    ]
    volumes = {each["name"]: each for each in made["spec"]["template"]["spec"]["volumes"]}
    assert volumes["shim"]["configMap"]["name"] == shim["metadata"]["name"]
    assert (shim["immutable"], shim["data"]) == (True, {"shim.py": build_shim().decode()})
    assert len(yaml.safe_dump(shim)) < 900 << 10


# ends and their causes


@pytest.mark.parametrize(
    ("retry", "count", "limits"),
    [
        (Retry(), 1, (103, 103)),
        (Retry(failure=2, preemption=5), 4, (10, 40)),
        (Retry(preemption=0), 1, (3, 3)),
        (Retry(failure=1 << 31), 2, ((1 << 31) - 1,) * 2),
    ],
)
def test_limit_of_the_backend_has_room_for_every_failure_preemption_and_loss(
    context: PlanContext, retry: Retry, count: int, limits: tuple[int, int]
) -> None:
    spec = manifest(plan(context, array=Array(count=count), retry=retry))["spec"]

    # The shim counts each budget, and decides which ends are final.
    assert (spec["backoffLimitPerIndex"], spec["backoffLimit"]) == limits
    codes = {rule["action"]: rule.get("onExitCodes", {}).get("values") for rule in spec["podFailurePolicy"]["rules"]}
    assert codes == {"Ignore": [10], "FailIndex": [1, 2, 3, 11, 126, 127, 128]}


def test_probe_ends_and_goes_although_nobody_is_there(context: PlanContext) -> None:
    probe = replace(JOB, lifetime=timedelta(minutes=11))

    made = KubernetesLauncher().plan(JobSpec(command=("true",)), target(), probe, context)

    spec, usual = manifest(made)["spec"], manifest(plan(context))["spec"]
    assert (spec["activeDeadlineSeconds"], spec["ttlSecondsAfterFinished"]) == (660, 60)
    assert ("activeDeadlineSeconds" in usual, usual["ttlSecondsAfterFinished"]) == (False, 7 * 24 * 3600)


@pytest.mark.parametrize(("lifetime", "suspended"), [(timedelta(minutes=1), False), (None, True)])
def test_probe_with_a_bucket_is_not_suspended_for_its_deadline_would_not_run(
    context: PlanContext, lifetime: timedelta | None, suspended: bool
) -> None:
    where = target(records="gs://lab/p")

    made = KubernetesLauncher().plan(JobSpec(command=("true",)), where, replace(JOB, lifetime=lifetime), context)

    assert (manifest(made)["spec"]["suspend"], is_waiting(manifest(made))) == (suspended, True)


def test_pod_that_serves_files_ends_and_goes_although_nobody_is_there(context: PlanContext) -> None:
    made = render_files_job(read_place(target(), context), "files", "alice")

    spec, labels = made["spec"], made["metadata"]["labels"]
    assert (spec["backoffLimit"], spec["activeDeadlineSeconds"], spec["ttlSecondsAfterFinished"]) == (0, 300, 60)
    # It belongs to no job.
    assert labels == {"app.kubernetes.io/managed-by": "research-runtime", "research-runtime/owner": "alice"}
    assert spec["template"]["metadata"]["labels"] == labels


# fidelity


def test_every_field_of_a_spec_is_kept_in_one_way() -> None:
    assert sorted(KEEPS) == sorted(leaf_fields())
    assert all(support.how for support in KEEPS.values())


def test_refused_fields_say_why(context: PlanContext) -> None:
    refused = {name for name, support in KEEPS.items() if support.fidelity is Fidelity.REFUSED}

    assert {"array.pack", "after", "start_deadline"} <= refused
    assert plan(context, after=("j-1",)).refused() == ["after"]


def test_window_for_capacity_means_something_only_for_runs_of_several_nodes(context: PlanContext) -> None:
    retry = Retry(capacity=CapacityRetry(window=timedelta(hours=1)))

    assert plan(context, retry=retry).refused() == ["retry.capacity.window"]
    assert plan(context, retry=retry, nodes=2).refused() == []


def test_order_has_its_nodes_meet_only_if_it_has_several(context: PlanContext) -> None:
    retry = Retry(capacity=CapacityRetry(window=timedelta(hours=1)))
    one, two = plan(context).order, plan(context, nodes=2, retry=retry).order

    assert ("meet" in one, "capacity_s" in one["retry"]) == (False, False)
    assert (two["meet"], two["retry"]["capacity_s"]) == ({"start_s": 300.0}, 3600.0)


def test_runs_of_several_nodes_share_no_gpus(context: PlanContext) -> None:
    where = target(gpus={"n1": 2})

    with pytest.raises(NotPossible) as refused:
        plan(context, where, nodes=2, resources=JobResources(gpus=Gpus(count=0.5)))

    assert refused.value.message == "a run of 2 nodes cannot share GPUs with others"


# places


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"namespaces": "x"}, UnknownName),
        ({"namespace": 3}, InvalidValue),
        ({"gpus": {"n": 0}}, InvalidValue),
        ({"gpus": "n"}, InvalidValue),
        ({"gpu_types": {"a": 3}}, InvalidValue),
        ({"tolerations": "x"}, InvalidValue),
        ({"check_gpus": "no"}, InvalidValue),
        ({"run_as_user": "root"}, InvalidValue),
        ({"image_pull_policy": "Sometimes"}, InvalidValue),
        ({"records": "/home/x"}, InvalidValue),
        ({"records": "claim://"}, InvalidValue),
        ({"records": "claim://a/../b"}, InvalidValue),
        ({"records": "gs://"}, InvalidValue),
        ({"records": "s3://bucket//x"}, InvalidValue),
        ({"records": "https://bucket/x"}, InvalidValue),
        ({"records": "gs://b/p", "records_env": {"AWS_REGION": 3}}, InvalidValue),
        ({"records": "gs://b/p", "records_env": {"AWS_SECRET_ACCESS_KEY": "hush"}}, InvalidValue),
        ({"records_secret": "aws"}, InvalidValue),
        ({"records_env": {"A": "b"}}, InvalidValue),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        target(**settings)


def test_target_without_records_or_namespace_says_what_to_set(context: PlanContext) -> None:
    with pytest.raises(NotPossible, match="has no record root"):
        read_place(Target(name="t", kind="kubernetes", settings={"namespace": "lab"}), context)
    with pytest.raises(NotPossible, match="names no namespace"):
        read_place(Target(name="t", kind="kubernetes"), context)


def stack(tmp_path: Path, **claims: str) -> None:
    exported = NamespaceOutput(
        service_account="runtime-job",
        image_pull_secrets=("login",),
        claims={
            name: ClaimOutput(claim=claim, size="1Gi", access_mode="ReadWriteMany") for name, claim in claims.items()
        },
    )
    cluster = KubernetesOutput(
        context="phoebe", server="https://k", namespaces={"lab": exported}, slot_namespace="gpus"
    )
    west, east = RegistryOutput(url="us-west4.example/p/images"), RegistryOutput(url="us-east1.example/p/images")
    registries = {
        "images": {"us-east1": east, "us-west4": west},
        "far": {"eu": RegistryOutput(url="eu.example/p/far")},
        "many": {"eu": east, "asia": east},
    }
    outputs = StackOutputs(
        stack="phoebe", project="p", region="us-west4", registries=registries, kubernetes={"phoebe": cluster}
    )
    (tmp_path / "contract.json").write_text(encode_outputs(outputs))


def test_contract_of_the_stack_fills_what_the_target_leaves_out(context: PlanContext, tmp_path: Path) -> None:
    stack(tmp_path, data="data-20g")

    place = read_place(Target(name="t", kind="kubernetes", stack="phoebe", settings={"image": "i"}), context)

    assert (place.context, place.namespace, place.service_account, place.image_pull_secrets, place.slot_namespace) == (
        "phoebe",
        "lab",
        "runtime-job",
        ("login",),
        "gpus",
    )
    assert (place.claim, place.path, place.root) == ("data-20g", "runtime", "/runtime-records/runtime")


@pytest.mark.parametrize(
    ("image", "full"),
    [
        ("registry://images/train:7", "us-west4.example/p/images/train:7"),
        ("registry://far/deep/er@sha256:0", "eu.example/p/far/deep/er@sha256:0"),
        ("elsewhere.example/train:7", "elsewhere.example/train:7"),
        # Two regions, and the stack is in neither.
        ("registry://many/train:7", None),
        ("registry://imges/train:7", None),
    ],
)
def test_image_of_a_registry_of_the_stack_is_named_in_full(
    context: PlanContext, tmp_path: Path, image: str, full: str | None
) -> None:
    stack(tmp_path, data="data-20g")
    where = Target(name="t", kind="kubernetes", stack="phoebe", settings={"image": "registry://images/files:1"})

    if full is None:
        with pytest.raises(UnknownName):
            plan(context, where, image=image)
        return
    planned = plan(context, where, image=image)

    assert pod_of(planned)["containers"][0]["image"] == full
    assert pod_of(plan(context, where))["containers"][0]["image"] == "us-west4.example/p/images/files:1"
    files = render_files_job(read_place(where, context), "files", "alice")
    assert files["spec"]["template"]["spec"]["containers"][0]["image"] == "us-west4.example/p/images/files:1"


def test_claim_is_named_as_the_stack_names_it(context: PlanContext, tmp_path: Path) -> None:
    stack(tmp_path, data="data-20g", scratch="scratch-1")
    named = Target(name="t", kind="kubernetes", stack="phoebe", records="claim://scratch/x", settings={"image": "i"})

    assert read_place(named, context).claim == "scratch-1"
    with pytest.raises(NotPossible, match="has no record root") as refused:
        read_place(Target(name="t", kind="kubernetes", stack="phoebe"), context)
    assert refused.value.facts == ("claims of the stack: data, scratch",)
    with pytest.raises(UnknownName):
        read_place(Target(name="t", kind="kubernetes", stack="phoebe", settings={"namespace": "lap"}), context)


# shares of GPUs


def test_indices_are_dealt_out_in_rows_over_as_few_gpus_as_they_fill() -> None:
    gpus = [Gpu("a", 0), Gpu("a", 1), Gpu("b", 0)]

    def dealt(*numbers: int, at_once: int | None = None) -> list[tuple[int, int, int]]:
        shares = deal(gpus, *numbers, at_once)
        assert [share.gpu for share in shares] == gpus[: len(shares)]
        return [(share.first, share.count, share.parallel) for share in shares]

    assert dealt(4, 12) == [(0, 4, 4), (4, 4, 4), (8, 4, 4)]
    assert dealt(4, 5) == [(0, 3, 3), (3, 2, 2)]
    assert dealt(4, 1) == [(0, 1, 1)]
    # More runs than slots: each GPU takes its share in turn.
    assert dealt(4, 100) == [(0, 34, 4), (34, 33, 4), (67, 33, 4)]
    # Fewer runs at a time than slots: divided over only as many GPUs as they fill.
    assert dealt(4, 100, at_once=7) == [(0, 50, 4), (50, 50, 3)]
    assert dealt(4, 100, at_once=1) == [(0, 100, 1)]


def test_slots_are_granted_while_the_gpu_has_room_and_kept_once_granted() -> None:
    got, table = grant([], "u1", "lab/one", 4, 0.25)
    assert (got, sum(each.slots * each.share for each in table)) == (4, 1.0)
    assert grant(table, "u2", "lab/two", 1, 0.25) == (0, table)
    assert grant(table, "u1", "lab/one", 4, 0.25) == (4, table)
    got, half = grant([], "u1", "lab/one", 1, 0.5)
    assert grant(half, "u2", "lab/two", 4, 0.2)[0] == 2


def test_table_of_a_lease_is_read_as_it_was_written() -> None:
    table = [Holder(uid="a", job="lab/x", slots=3, share=0.25), Holder(uid="b", job="lab/y", slots=1, share=0.1)]
    lease = {"metadata": {"annotations": {"research-runtime/slots": write_table(table)}}}

    assert read_table(lease) == table
    assert read_table(None) == []
    assert read_table({"metadata": {}}) == []
    assert lease_name(Gpu("Node_1.x", 3)) == "runtime-gpu-node-1.x-3"


# wording


@pytest.mark.parametrize(("amount", "text"), [(GIB, "1Gi"), (48 << 20, "48Mi"), (3 << 10, "3Ki"), (1001, "1001")])
def test_bytes_are_said_in_the_largest_unit_that_divides_them(amount: int, text: str) -> None:
    assert quantity(amount) == text


def test_label_values_are_such_as_kubernetes_takes() -> None:
    assert label_value("Ada Löve@host.example") == "Ada-L-ve-host.example"
    assert label_value("-" * 70) == ""


def test_spec_of_a_file_is_planned_like_one_of_values(context: PlanContext) -> None:
    spec = parse_spec({"command": ["python", "train.py"], "array": {"seeds": 2}})

    assert KubernetesLauncher().plan(spec, target(), JOB, context).parts[0].count == 2


def test_environment_is_made_by_each_pod_for_itself(context: PlanContext) -> None:
    wanted = JobEnvironment(manager=EnvironmentManager.UV)

    planned = plan(context, environment=wanted)

    made = {"manager": "uv", "lock": "uv.lock", "extras": [], "build_on": "node", "local": True}
    assert planned.order["environment"] == made
    with pytest.raises(NotPossible, match=r"`environment\.build_on: submit`"):
        plan(context, environment=replace(wanted, build_on=BuildOn.SUBMIT))
