"""The components together, as a program composes them: they refuse mistakes jointly and serve foreign programs."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pulumi
import pytest

from infra.check.check import find_collisions, report_on
from infra.check.recording import Recording, record
from infra.components.alerts import Alerts, AlertsArgs
from infra.components.ci_identity import CiIdentity, CiIdentityArgs
from infra.components.identity import Identity, IdentityArgs
from infra.components.network import Network, NetworkArgs
from infra.components.queue import Queue, QueueArgs
from infra.components.records import Records, RecordsArgs
from infra.components.registry import Registry, RegistryArgs
from infra.components.secret import Secret, SecretArgs
from infra.export import export
from infra.gcp.outputs import compute
from infra.program import build
from infra.settings.model import (
    AccessSettings,
    AlertSettings,
    AttemptAccess,
    BudgetSettings,
    CiSettings,
    HeadSettings,
    NetworkSettings,
    QueueSettings,
    RecordsSettings,
    RegistrySettings,
    RepositorySettings,
    Role,
    SecretSettings,
    StackSettings,
    TpuPoolSettings,
)
from infra.settings.read import InvalidSettings
from runtime.outputs import RecordsOutput, parse_outputs
from tests.infra.components_support import depends_on, find_grants, run, sample_site
from tests.infra.provider_types import find_input_problems

ROOT = Path(__file__).parents[2]

WRONG: dict[str, tuple[Callable[[pulumi.ResourceOptions], object], str]] = {
    "queue": (
        lambda opts: Queue(
            "q", QueueArgs(site=sample_site(), queue="default", settings=QueueSettings(ack_deadline_s=5)), opts
        ),
        "queues.default.ack_deadline_s",
    ),
    "records": (
        lambda opts: Records("r", RecordsArgs(site=sample_site(), settings=RecordsSettings(soft_delete_days=3)), opts),
        "records.soft_delete_days",
    ),
    "registry": (
        lambda opts: Registry(
            "r",
            RegistryArgs(site=sample_site(), registry="images", settings=RegistrySettings(existing={"us-west4": "x"})),
            opts,
        ),
        "registries.images.existing.us-west4",
    ),
    "secret": (
        lambda opts: Secret(
            "s", SecretArgs(site=sample_site(), secret="hf", settings=SecretSettings(env="not a name")), opts
        ),
        "secrets.hf.env",
    ),
    "network": (
        lambda opts: Network("n", NetworkArgs(site=sample_site(), settings=NetworkSettings(cidr="10.0.0.1/24")), opts),
        "network.cidr",
    ),
    "network without its subnet": (
        lambda opts: Network(
            "n",
            NetworkArgs(site=sample_site(), settings=NetworkSettings(network="projects/p/global/networks/n")),
            opts,
        ),
        "network.network",
    ),
    "identity": (
        lambda opts: Identity(
            "i", IdentityArgs(site=sample_site(), roles=[], access=AccessSettings(operators=("allUsers",))), opts
        ),
        "access.operators[0]",
    ),
    "ci": (
        lambda opts: CiIdentity(
            "c",
            CiIdentityArgs(
                site=sample_site(),
                settings=CiSettings(repositories={"lab/infra": RepositorySettings(repository_id=0, owner_id=22)}),
                grantable=["roles/x"],
            ),
            opts,
        ),
        "ci.repositories.lab/infra.repository_id",
    ),
    "alerts": (
        lambda opts: Alerts("a", AlertsArgs(site=sample_site(), settings=AlertSettings()), opts),
        "alerts.emails",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_component_with_a_wrong_value_names_it_and_registers_nothing(name: str) -> None:
    make, path = WRONG[name]

    def program(opts: pulumi.ResourceOptions) -> None:
        with pytest.raises(InvalidSettings) as refused:
            make(opts)
        assert [each.path for each in refused.value.problems] == [path]

    recording = run(program)

    assert [each.type for each in recording.resources] == ["pulumi:providers:gcp"]


DEPLOYER = "lab-pipeline-deployer@lab-1234.iam.gserviceaccount.com"
BILLING = "000000-AAAAAA-111111"
OPS, LAB = "group:ops@example.org", "group:lab@example.org"


def sample_settings(**changes: object) -> StackSettings:
    own: dict[str, object] = {
        "stack": "marin-us-west4",
        "project": "lab-1234",
        "region": "us-west4",
        "zone": "us-west4-a",
        "labels": {"team": "ml"},
        "network": NetworkSettings(),
        "queues": {"default": QueueSettings()},
        "records": RecordsSettings(),
        "registries": {"images": RegistrySettings(regions=("us-west4", "europe-west4"))},
        "secrets": {"hf-token": SecretSettings(env="HF_TOKEN", readers=(Role.WORKER,))},
        "heads": {
            "main": HeadSettings(
                image=f"us-west4-docker.pkg.dev/lab-1234/marin-us-west4-images/cluster@sha256:{'a' * 64}",
                environment=("hf-token",),
                pools={"v5e": TpuPoolSettings(accelerator="v5litepod-4", runtime_version="v2-alpha-tpuv5-lite")},
            )
        },
        "access": AccessSettings(operators=(OPS,), researchers=(LAB,)),
        "deployer": DEPLOYER,
        "alerts": AlertSettings(
            emails=("ops@example.org",), budget=BudgetSettings(billing_account=BILLING, monthly=1000)
        ),
    }
    return StackSettings(**(own | changes))  # type: ignore[arg-type]


def record_stack(settings: StackSettings, *, preview: bool = True) -> Recording:
    return record(lambda: export(build(settings)), stack=settings.stack, compute=compute, preview=preview)


@pytest.mark.parametrize("preview", [True, False])
def test_whole_stack_registers_nothing_that_google_would_refuse(preview: bool) -> None:
    recording = record_stack(sample_settings(), preview=preview)

    problems = {each.urn: find_input_problems(each.type, each.inputs) for each in recording.resources if each.custom}
    assert {urn: found for urn, found in problems.items() if found} == {}
    strays = [each.urn for each in recording.resources if each.custom and each.parent and "pulumi:Stack" in each.parent]
    assert [urn.rsplit("::", 1)[-1] for urn in strays] == ["google"]
    assert all(each.provider for each in recording.resources if each.custom and each.type.startswith("gcp:"))


def test_contract_says_which_attempts_get_a_secret_that_workers_may_read() -> None:
    secrets = {
        "all": SecretSettings(env="A", readers=(Role.WORKER,)),
        "named": SecretSettings(env="B", readers=(Role.WORKER, Role.PUSHER), attempts=AttemptAccess.NAMED),
        "none": SecretSettings(env="C", readers=(Role.PUSHER,)),
    }
    recording = record_stack(sample_settings(secrets=secrets, heads={}))

    found = recording.outputs["contract"]["secrets"]
    assert {name: secret.get("attempts") for name, secret in found.items()} == {
        "all": "all",
        "named": "named",
        "none": None,
    }


def test_whole_stack_waits_for_the_switch_of_all_switches() -> None:
    recording = record_stack(sample_settings())

    first = recording.named("gcp:projects/service:Service", "apis-serviceusage")
    for each in recording.resources:
        if each.custom and each.type.startswith("gcp:"):
            assert depends_on(recording, each, first.urn), each.urn


def pipeline_settings(**ci: object) -> StackSettings:
    repositories = {"lab/infra": RepositorySettings(repository_id=11, owner_id=22)}
    return StackSettings(
        stack="lab-pipeline",
        project="lab-1234",
        region="us-west4",
        access=AccessSettings(operators=(OPS,), researchers=(LAB,)),
        ci=CiSettings(repositories=repositories, **({"billing_account": BILLING} | ci)),  # type: ignore[arg-type]
    )


def find_missing(settings: StackSettings, **ci: object) -> list[tuple[str, str]]:
    pipeline = report_on(record_stack(pipeline_settings(**ci)), pipeline_settings(**ci))
    stack = report_on(record_stack(settings), settings)
    assert [*pipeline.findings, *stack.findings] == []
    found = find_collisions([pipeline, stack])
    return [(each.where, each.message) for each in found if each.rule == "deployer"]


def test_whole_stack_lies_within_the_rights_of_its_deployer() -> None:
    assert find_missing(sample_settings()) == []


def test_budget_is_in_the_account_in_which_the_deployer_makes_budgets() -> None:
    message = f"is in `{BILLING}`, where `{DEPLOYER}` may make none"
    for account in (None, "000000-BBBBBB-222222"):
        assert find_missing(sample_settings(), billing_account=account) == [("marin-us-west4: alerts.budget", message)]


def test_part_that_the_deployer_may_not_deploy_is_named() -> None:
    parts = ("network", "queues", "records", "registries", "heads", "alerts")

    found = find_missing(sample_settings(), deploys=parts)

    assert ("marin-us-west4: secrets", f"is set, and `{DEPLOYER}` may not deploy it") in found
    lacking = f"is a grant for which `{DEPLOYER}` lacks `secretmanager.secrets.setIamPolicy`"
    assert {message for where, message in found if where != "marin-us-west4: secrets"} == {lacking}


def test_grant_in_the_project_beyond_the_condition_of_the_deployer_is_named() -> None:
    settings, pipeline = sample_settings(), pipeline_settings()
    people = replace(settings, deployer=None)
    reports = [report_on(record_stack(pipeline), pipeline), replace(report_on(record_stack(people)), settings=settings)]

    found = {each.message for each in find_collisions(reports) if each.rule == "deployer"}

    assert f"grants `roles/compute.osAdminLogin` in the project, which `{DEPLOYER}` may not grant" in found


def test_whole_stack_contract_is_published_by_the_deployer_and_by_no_other_pipeline() -> None:
    recording = record_stack(sample_settings())

    bucket = "bucket lab-1234-marin-us-west4-records"
    pipelines = {
        (member.split(":")[1].split("@")[0], role)
        for member, role, on in find_grants(recording)
        if on == bucket and ("deployer" in member or "previewer" in member)
    }
    assert pipelines == {("lab-pipeline-deployer", "roles/storage.objectUser")}
    grant = recording.named("gcp:storage/bucketIAMMember:BucketIAMMember", "records-deployer-publisher")
    assert "/objects/contract/" in grant.inputs["condition"]["expression"]
    assert recording.outputs["contract"]["published_url"] == "gs://lab-1234-marin-us-west4-records/contract/v1.json"


@pytest.mark.parametrize("bucket", [None, "lab-own-records"])
def test_whole_stack_gives_head_and_nodes_the_records_of_their_jobs(bucket: str | None) -> None:
    recording = record_stack(sample_settings(records=RecordsSettings(bucket=bucket)))

    (made,) = recording.of_type("gcp:storage/bucket:Bucket")
    name = made.inputs["name"]
    machines = {
        (member.split(":")[1].split("@")[0].removeprefix("marin-us-west4-"), role)
        for member, role, on in find_grants(recording)
        if on == f"bucket {name}" and member.split("@")[0].endswith(("-head", "-node"))
    }
    user, reader = "roles/storage.objectUser", "roles/storage.objectViewer"
    assert machines == {("main-head", user), ("main-head", reader), ("main-node", user), ("main-node", reader)}
    metadata = recording.named("gcp:compute/instance:Instance", "main-head-vm").inputs["metadata"]
    assert parse_outputs(json.loads(metadata["ray-contract"])).records == RecordsOutput(url=f"gs://{name}")
    assert "ray-keep-service" in metadata


def test_whole_stack_moving_a_person_between_lists_loses_no_shared_grant() -> None:
    before = record_stack(sample_settings(deployer=None, access=AccessSettings(researchers=(LAB,))))
    after = record_stack(sample_settings(deployer=None, access=AccessSettings(operators=(LAB,))))

    lost = {each.urn for each in before.resources} - {each.urn for each in after.resources}
    assert {urn.rsplit("::", 1)[-1] for urn in lost} == {"identity-group-lab-at-example.org-login"}


def test_whole_stack_twice_over_is_the_same() -> None:
    once, again = record_stack(sample_settings()), record_stack(sample_settings())

    assert {each.urn: each.inputs for each in once.resources} == {each.urn: each.inputs for each in again.resources}


def test_two_stacks_of_a_project_share_no_name() -> None:
    """Names unique in a project; a name in a region or below a parent is distinguished by that."""
    keys = {
        "gcp:pubsub/topic:Topic": "name",
        "gcp:pubsub/subscription:Subscription": "name",
        "gcp:storage/bucket:Bucket": "name",
        "gcp:serviceaccount/account:Account": "accountId",
        "gcp:projects/iAMCustomRole:IAMCustomRole": "roleId",
        "gcp:secretmanager/secret:Secret": "secretId",
        "gcp:artifactregistry/repository:Repository": "repositoryId",
        "gcp:compute/network:Network": "name",
        "gcp:compute/firewall:Firewall": "name",
        "gcp:compute/instance:Instance": "name",
    }

    def names(stack: str) -> set[tuple[str, str]]:
        recording = record_stack(sample_settings(stack=stack, deployer=None))
        return {(each.type, each.inputs[keys[each.type]]) for each in recording.resources if each.type in keys}

    west, east = names("marin-us-west4"), names("marin-east")
    assert {type_ for type_, _name in west} == set(keys)
    assert west & east == set()


def test_own_program_takes_a_queue_and_a_bucket_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_PROJECT", "ambient")
    member = "serviceAccount:pipeline@lab-1234.iam.gserviceaccount.com"

    recording = record(
        lambda: runpy.run_path(str(ROOT / "examples" / "own-program" / "__main__.py")) and None,
        project="own-program",
        stack="dev",
        config={
            "own-program:project": "lab-1234",
            "own-program:region": "us-west4",
            "own-program:worker": member,
        },
        compute=compute,
    )

    assert recording.outputs == {
        "topic": "projects/lab-1234/topics/curation-dev-crops",
        "subscription": "projects/lab-1234/subscriptions/curation-dev-crops",
        "records": "gs://lab-1234-curation-dev-records",
    }
    kinds = {each.type for each in recording.resources if not each.custom}
    assert kinds == {"runtime:queue:Queue", "runtime:records:Records"}
    assert {on for who, _role, on in find_grants(recording) if who == member} == {
        "topic curation-dev-crops",
        "topic curation-dev-crops-dead",
        "subscription curation-dev-crops",
        "subscription curation-dev-crops-dead",
        "bucket lab-1234-curation-dev-records",
    }
    for each in recording.resources:
        if each.custom and each.type.startswith("gcp:"):
            assert each.provider is not None
            assert find_input_problems(each.type, each.inputs) == []
            assert not each.protect


def test_heads_in_two_zones_are_each_made_with_their_nodes_in_their_own() -> None:
    main = sample_settings().heads["main"]
    recording = record_stack(sample_settings(heads={"main": main, "second": replace(main, zone="us-west4-b")}))

    assert {each.name: each.inputs["zone"] for each in recording.of_type("gcp:compute/instance:Instance")} == {
        "main-head-vm": "us-west4-a",
        "second-head-vm": "us-west4-b",
    }
    clusters = recording.outputs["contract"]["clusters"]
    assert {name: each["zone"] for name, each in clusters.items()} == {"main": "us-west4-a", "second": "us-west4-b"}
