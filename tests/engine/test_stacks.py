"""Every checked-in stack for Google through its life under the policies: preview, up, no further changes, drift found
and repaired, changed and up again."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from infra.check.check import check_stack
from runtime.outputs import outputs_fields, parse_outputs
from tests.engine.harness import PACK, ROOT, Lab, Step
from tests.engine.test_stack_phoebe import STACK as PHOEBE

PIPELINE = "marin-pipeline"
MARIN = ("marin-us-central2", "marin-us-west4", "marin-eu-west4")
"""The first owns the repositories and secrets that the others refer to."""
PREVIEW_GOAL_S = 5.0

Summary = tuple[str, str, tuple[str, ...]]


def test_dev_is_made_as_planned_and_heals_by_refresh_and_up(lab: Lab) -> None:
    lab.init("dev")
    make_as_planned(lab, "dev")
    before = lab.cloud.world()
    bucket, grant = tamper(lab, "dev")

    unseen = lab.preview("dev")
    lab.refresh("dev")
    found = lab.preview("dev")
    lab.up("dev")

    assert unseen == []
    assert summary(found) == [("create", grant, ()), ("update", bucket, ("versioning.enabled",))]
    assert lab.preview("dev", "--refresh") == []
    assert inputs_of(lab.cloud.world().resources) == inputs_of(before.resources)
    change(lab, "dev")


def test_skylight_is_made_as_planned_heals_and_refuses_to_go(lab: Lab) -> None:
    lab.init("skylight")
    make_as_planned(lab, "skylight")
    expect_drift_found(lab, "skylight")
    lab.up("skylight", "--refresh")
    there = lab.cloud.world().resources
    protected = {each["urn"] for each in lab.resources("skylight").values() if each.get("protect")}

    said = lab.destroy("skylight", check=False)

    named = {urn for urn in protected if f'"{urn}" cannot be deleted' in said.text}
    assert said.code != 0
    # The engine does not look past the first refusal: a topic's subscription comes first.
    assert {urn.rpartition("::")[2] for urn in protected - named} == {"default-queue-topic", "default-queue-dead-topic"}
    assert lab.cloud.world().resources == there
    assert lab.cloud.calls("delete") == []
    change(lab, "skylight")


def test_head_with_every_setting_of_its_own_is_made_left_alone_and_changed_in_place(lab: Lab) -> None:
    lab.init("dev")
    lab.set("dev", "zone", "us-central1-a")
    lab.set("dev", "network.flow_logs", True)
    lab.set(
        "dev",
        "heads.main",
        {
            "image": f"us-central1-docker.pkg.dev/my-lab-dev/dev-images/c@sha256:{'0' * 64}",
            "variables": {"MARIN_PREFIX": 'gs://it\'s "$here"'},
            "setup": "mkdir -p /mnt/cache\n",
            "container": {"shm_size": "16g", "mounts": ["/mnt/cache:/cache"], "options": ["--ulimit=nproc=4096"]},
            "disk_type": "pd-ssd",
            "snapshot_days": 7,
            "pools": {
                "v5e": {"accelerator": "v5litepod-1", "runtime_version": "v2-alpha-tpuv5-lite", "labels": {"a": "b"}}
            },
        },
    )
    lab.up("dev", *PACK)
    lab.run("up", "--yes", "--expect-no-changes", "--stack", "dev", *PACK)
    made = {urn.rpartition("::")[2]: each for urn, each in lab.resources("dev").items()}
    (face,) = made["main-head-vm"]["outputs"]["networkInterfaces"]
    assert face["networkIp"] == made["main-head-address"]["outputs"]["address"]
    assert lab.preview("dev", "--refresh") == []

    lab.set("dev", "heads.main.variables", {"MARIN_PREFIX": "gs://there"})
    lab.set("dev", "heads.main.snapshot_days", 0)
    lab.set("dev", "labels", {"team": "second-day"})
    steps = [step for step in lab.preview("dev", *PACK) if step.name.startswith("main-head")]
    lab.up("dev", *PACK)

    assert sorted((step.op, step.name) for step in steps) == [
        ("delete", "main-head-snapshots"),
        ("delete", "main-head-snapshots-of-disk"),
        ("update", "main-head-address"),
        ("update", "main-head-vm"),
    ]


def test_stack_that_goes_takes_nothing_from_its_neighbours(lab: Lab) -> None:
    for stack in ("one", "two"):
        lab.init(stack, file="dev")
        lab.set(stack, "access.researchers", ["group:lab@example.com"])
    lab.set("two", "access.project_grants", False)
    lab.up("one")
    lab.up("two")

    lab.destroy("two")

    assert summary(lab.preview("one", "--refresh")) == []


def test_stack_that_goes_takes_grants_that_another_makes_too_until_that_one_is_up_again(lab: Lab) -> None:
    for stack in ("one", "two"):
        lab.init(stack, file="dev")
        lab.set(stack, "access.researchers", ["group:lab@example.com"])
        lab.up(stack)

    lab.destroy("two")
    lost = lab.preview("one", "--refresh")
    lab.up("one", "--refresh")

    assert sorted((step.op, step.name) for step in lost) == [
        ("create", "identity-group-lab-at-example.com-logs"),
        ("create", "identity-group-lab-at-example.com-monitoring"),
    ]
    assert lab.preview("one", "--refresh") == []


def test_preview_of_the_largest_stack_creates_all_that_a_check_counts(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    lab.init(MARIN[0])

    started = time.monotonic()
    steps = lab.preview(MARIN[0])
    took_s = time.monotonic() - started

    with capsys.disabled():
        print(f" [preview of {len(steps)} resources: {took_s:.1f} s, the goal is {PREVIEW_GOAL_S:.0f} s] ", end="")
    assert {step.op for step in steps} == {"create"}
    recorded = check_stack(MARIN[0], folder=ROOT).recording.resources
    assert {step.urn for step in steps if "pulumi:pulumi:Stack::" not in step.urn} == {each.urn for each in recorded}


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        (
            "queues.default.ack_deadline_s",
            120,
            [
                ("update", "default-queue-dead-subscription", ("ackDeadlineSeconds",)),
                ("update", "default-queue-subscription", ("ackDeadlineSeconds",)),
            ],
        ),
        (
            "secrets.wandb",
            {"env": "WANDB_API_KEY", "readers": ["worker"]},
            [
                ("create", "wandb-secret", ()),
                ("create", "wandb-secret-secret", ()),
                ("create", "wandb-secret-worker-accessor", ()),
            ],
        ),
        ("secrets.hf-token.readers", [], [("delete", "hf-token-secret-worker-accessor", ())]),
        (
            "records.soft_delete_days",
            30,
            [("update", "records-bucket", ("softDeletePolicy.retentionDurationSeconds",))],
        ),
        (
            "labels.team",
            "vision",
            [
                ("update", name, ("labels.team",))
                for name in (
                    "default-queue-dead-subscription",
                    "default-queue-dead-topic",
                    "default-queue-subscription",
                    "default-queue-topic",
                    "hf-token-secret-secret",
                    "images-registry-us-central1-repository",
                    "records-bucket",
                )
            ],
        ),
    ],
)
def test_knob_of_dev_changes_exactly_what_it_should(
    dev: Lab, path: str, value: object, expected: list[Summary]
) -> None:
    file = dev.project / "Pulumi.dev.yaml"
    before = file.read_text()
    try:
        dev.set("dev", path, value)
        steps = dev.preview("dev")
    finally:
        file.write_text(before)

    assert sorted((step.op, step.name, step.paths) for step in steps) == expected


def test_targeted_run_is_not_judged_by_what_it_leaves_for_later(dev: Lab) -> None:
    file = dev.project / "Pulumi.dev.yaml"
    before = file.read_text()
    try:
        dev.set("dev", "queues.later", {})
        steps = dev.preview("dev", "--target", "**::default-queue-topic", *PACK)
    finally:
        file.write_text(before)

    assert steps == []


def test_wrong_setting_is_explained_without_a_traceback_and_makes_nothing(lab: Lab) -> None:
    lab.init("dev")
    lab.set("dev", "queues.default.ack_deadline", 60)

    said = lab.up("dev", check=False)

    assert said.code != 0
    assert "did you mean `ack_deadline_s`?" in said.text
    assert "Traceback" not in said.text
    assert lab.cloud.world().resources == {}


# steps of the life


def make_as_planned(lab: Lab, stack: str) -> None:
    """Preview and up, then repeat both, which find no changes; the engine agrees with `infra check`."""
    planned = lab.preview(stack, *PACK)
    lab.up(stack, *PACK)
    made = lab.resources(stack)
    report = check_stack(stack)
    assert report.recording is not None

    assert {step.op for step in planned} == {"create"}
    assert sorted(step.urn for step in planned) == sorted(made)
    assert sorted(made) == sorted([*(each.urn for each in report.recording.resources), stack_urn(stack)])
    # Without `--skip-preview`, as the pipeline runs it.
    lab.run("up", "--yes", "--expect-no-changes", "--stack", stack, *PACK)
    contract = lab.contract(stack)
    assert report.contract is not None
    assert differing(report.contract, contract) == []
    assert outputs_fields(parse_outputs(contract, source="pulumi")) == contract
    assert "[secret]" not in str(contract)


def change(lab: Lab, stack: str) -> None:
    """Add a label everywhere and one more queue, then preview and bring them up under the policies."""
    lab.set(stack, "labels.team", "second-day")
    lab.set(stack, "queues.second-day", {})
    steps = lab.preview(stack, *PACK)
    lab.up(stack, *PACK)

    assert {step.op for step in steps} == {"create", "update"}
    assert {step.op for step in steps if step.name == "second-day-queue-topic"} == {"create"}
    assert {step.op for step in steps if "labels.team" in step.paths} == {"update"}


def expect_drift_found(lab: Lab, stack: str) -> None:
    """Expect that the pipeline's nightly command finds the drift."""
    bucket, grant = tamper(lab, stack)

    said = lab.run("preview", "--refresh", "--expect-no-changes", "--json", "--stack", stack, check=False)

    assert said.code != 0
    assert summary(lab.steps(said)) == [("create", grant, ()), ("update", bucket, ("versioning.enabled",))]


def tamper(lab: Lab, stack: str) -> tuple[str, str]:
    """Turn a bucket's versioning off and remove a grant, as somebody might by hand; return both URNs."""
    resources = lab.resources(stack).values()
    # Those for data keep no versions.
    bucket = next(each for each in resources if each["urn"].endswith("::records-bucket"))
    grant = next(each for each in resources if each["type"].endswith(":BucketIAMMember"))
    with lab.cloud.change() as world:
        world.resources[bucket["id"]]["inputs"]["versioning"] = {"enabled": False}
        del world.resources[grant["id"]]
    return bucket["urn"], grant["urn"]


def summary(steps: Iterable[Step]) -> list[Summary]:
    return sorted((step.op, step.urn, step.paths) for step in steps)


def inputs_of(resources: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {id_: each["inputs"] for id_, each in resources.items()}


def stack_urn(stack: str) -> str:
    return f"urn:pulumi:{stack}::research-runtime::pulumi:pulumi:Stack::research-runtime-{stack}"


def differing(known: Any, real: Any, path: str = "contract") -> list[str]:
    """List leaves that `infra check` claims to know but that differ in reality; an unknown value is no claim."""
    if isinstance(known, Mapping) and isinstance(real, Mapping):
        missing = [f"{path}.{key}" for key in known.keys() ^ real.keys()]
        return missing + [
            each for key in known.keys() & real.keys() for each in differing(known[key], real[key], f"{path}.{key}")
        ]
    unknown = isinstance(known, str) and known.startswith("<known after")
    return [] if unknown or known == real else [f"{path}: {known!r} came out as {real!r}"]


def test_every_checked_in_stack_lives_its_life_here() -> None:
    assert {"dev", "skylight", PIPELINE, *MARIN, PHOEBE} == {
        path.name.split(".")[1] for path in ROOT.glob("Pulumi.*.yaml")
    }


def test_differing_contracts_are_told_apart() -> None:
    known = {"a": "<known after up>", "b": "x", "c": {"d": 1}}

    assert differing(known, {"a": "y", "b": "x", "c": {"d": 1}}) == []
    assert sorted(differing(known, {"a": "y", "b": "z", "c": {}})) == [
        "contract.b: 'x' came out as 'z'",
        "contract.c.d",
    ]
