"""Preflight of a stack in a project: each of Google's answers and the resulting finding."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.cli import main
from infra.naming import NODE_ROLES
from infra.preflight import command as subject
from infra.preflight.command import load_settings, preflight
from infra.preflight.findings import Level, PreflightFinding
from infra.preflight.names import list_wanted
from infra.settings.model import HeadSettings, NetworkSettings, StackSettings
from runtime.errors import UnknownName
from runtime.stack.google_api import GoogleApi
from tests.fakes.google import GoogleServer
from tests.infra.conftest import checked

ROOT = Path(__file__).parents[2]
ZONE = "us-west4-a"
BOOT_IMAGE = HeadSettings(image="").boot_image
NEWER = "projects/debian-cloud/global/images/debian-12-bookworm-v20261110"


@pytest.fixture(scope="module")
def marin() -> StackSettings:
    return load_settings("marin-us-west4", ROOT)


@pytest.fixture(scope="module")
def central() -> StackSettings:
    """A stack with its own repositories and secrets."""
    return load_settings("marin-us-central2", ROOT)


@pytest.fixture(scope="module")
def pipeline() -> StackSettings:
    return load_settings("marin-pipeline", ROOT)


@pytest.fixture
def google() -> Iterator[GoogleServer]:
    """A project in which everything can be created."""
    server = GoogleServer("hai-gcp-models", page=100).start()
    arrange(server, ZONE, "us-west4", "v5litepod-1", "v2-alpha-tpuv5-lite", "v5s-litepod")
    arrange(server, "us-central2-b", "us-central2", "v4-8", "tpu-ubuntu2204-base", "v4")
    where = "projects/hai-gcp-models"
    for region in ("us-central2", "us-west4", "europe-west4"):
        name = f"{where}/locations/{region}/repositories/marin"
        server.put(name, name=name)
    for secret in ("hf-token", "wandb-api-key"):
        server.put_secret(f"marin-us-central2-{secret}", b"x")
    accounts = f"{where}/serviceAccounts/marin-pipeline-deployer@hai-gcp-models.iam.gserviceaccount.com"
    for name in (accounts, *(f"{where}/roles/{role}" for role in NODE_ROLES.values())):
        server.put(name, name=name)
    yield server
    server.stop()
    assert server.refused == []


def arrange(server: GoogleServer, zone: str, region: str, accelerator: str, software: str, quota: str) -> None:
    where = f"projects/{server.project}"
    server.put(
        f"{where}/regions/{region}",
        name=region,
        quotas=[
            {"metric": "N2_CPUS", "limit": 24.0, "usage": 0.0},
            {"metric": "SSD_TOTAL_GB", "limit": 500.0, "usage": 0.0},
            {"metric": "IN_USE_ADDRESSES", "limit": 8.0, "usage": 0.0},
        ],
    )
    server.project_quotas = [{"metric": "NETWORKS", "limit": 5.0, "usage": 1.0}]
    server.put(f"{where}/zones/{zone}", name=zone, status="UP")
    server.put(f"{where}/zones/{zone}/machineTypes/n2-standard-8", name="n2-standard-8", architecture="X86_64")
    server.put(BOOT_IMAGE, name=BOOT_IMAGE.rpartition("/")[2], architecture="X86_64", diskSizeGb="10")
    server.lists[f"{where}/locations/{zone}/acceleratorTypes"] = [{"type": accelerator}, {"type": "v99-1"}]
    server.lists[f"{where}/locations/{zone}/runtimeVersions"] = [{"version": software}, {"version": "old"}]
    limits = server.lists.setdefault(f"{where}/services/tpu.googleapis.com/consumerQuotaMetrics", [])
    limits.append(tpu_quota(server, f"{quota}-preemptible", zone, 10_000))
    limits.append(tpu_quota(server, quota, zone, 0))


def tpu_quota(server: GoogleServer, metric: str, zone: str, limit: int) -> dict[str, Any]:
    buckets = [{"effectiveLimit": "0"}, {"effectiveLimit": str(limit), "dimensions": {"zone": zone}}]
    name = f"services/tpu.googleapis.com/consumerQuotaMetrics/tpu.googleapis.com%2Ftpu-{metric}"
    return {
        "metric": f"tpu.googleapis.com/tpu-{metric}",
        "consumerQuotaLimits": [{"name": f"{name}/limits/%2Fproject%2Fzone", "quotaBuckets": buckets}],
    }


def look(google: GoogleServer, settings: StackSettings) -> list[PreflightFinding]:
    with GoogleApi(server=google.url, again=False) as api:
        return list(preflight(settings, api))


def troubles(findings: list[PreflightFinding]) -> dict[str, tuple[str, str]]:
    return {each.check: (each.level.value, each.message) for each in findings if each.level is not Level.OK}


def test_project_in_which_all_can_be_made_has_no_trouble(google: GoogleServer, marin: StackSettings) -> None:
    findings = look(google, marin)

    assert troubles(findings) == {}
    assert [each.message for each in findings if each.check in ("names", "identity", "zone")] == [
        "ada@example.org",
        "us-west4-a is up",
        "14 of 14 are free",
    ]


def test_nothing_is_written(google: GoogleServer, central: StackSettings) -> None:
    look(google, central)

    assert {request.method for request in google.log} == {"GET"}


def test_stack_with_its_own_stores_has_no_trouble(google: GoogleServer, central: StackSettings) -> None:
    google.resources = {name: each for name, each in google.resources.items() if "repositories" not in name}
    google.resources = {name: each for name, each in google.resources.items() if "secrets" not in name}

    assert troubles(look(google, central)) == {}


def test_stack_without_google_is_asked_nothing() -> None:
    settings = load_settings("phoebe", ROOT)

    assert [each.message for each in preflight(settings, None)] == [
        "the stack has no Google resources, so there is nothing to ask"
    ]


@pytest.mark.parametrize(
    "stack", ["dev", "marin-pipeline", "marin-us-central2", "marin-us-west4", "marin-eu-west4", "skylight", "phoebe"]
)
def test_every_name_that_the_program_takes_is_looked_up(stack: str) -> None:
    """The program is authoritative; this module must derive the same from the settings."""
    report = checked(stack)
    assert report.recording is not None
    keys = {
        "gcp:pubsub/topic:Topic": "name",
        "gcp:pubsub/subscription:Subscription": "name",
        "gcp:storage/bucket:Bucket": "name",
        "gcp:artifactregistry/repository:Repository": "repositoryId",
        "gcp:secretmanager/secret:Secret": "secretId",
        "gcp:serviceaccount/account:Account": "accountId",
        "gcp:projects/iAMCustomRole:IAMCustomRole": "roleId",
        "gcp:iam/workloadIdentityPool:WorkloadIdentityPool": "workloadIdentityPoolId",
        "gcp:compute/network:Network": "name",
        "gcp:compute/instance:Instance": "name",
    }
    made = sorted(str(each.inputs[keys[each.type]]) for each in report.recording.resources if each.type in keys)

    settings = load_settings(stack, ROOT)
    assert sorted(each.name for each in list_wanted(settings)) == made


# names


def test_names_of_an_earlier_up_are_this_stacks_own(google: GoogleServer, marin: StackSettings) -> None:
    own = {"labels": {"managed-by": "research-runtime", "stack": "marin-us-west4"}}
    bucket = "hai-gcp-models-marin-us-west4-records"
    google.put(f"b/{bucket}", name=bucket, **own)
    email = "marin-us-west4-pusher@hai-gcp-models.iam.gserviceaccount.com"
    google.put(f"projects/hai-gcp-models/serviceAccounts/{email}", displayName="Pushes images (marin-us-west4)")
    findings = look(google, marin)

    assert troubles(findings) == {}
    assert sum(each.message.endswith("is there and this stack's own") for each in findings) == 2
    assert findings[-1].check.startswith("policy")
    assert [each.message for each in findings if each.check == "names"] == ["12 of 14 are free"]


def test_name_of_another_stack_fails(google: GoogleServer, marin: StackSettings) -> None:
    bucket = "hai-gcp-models-marin-us-west4-records"
    google.put(f"b/{bucket}", name=bucket, labels={"managed-by": "research-runtime", "stack": "dev"})

    assert troubles(look(google, marin)) == {
        f"name {bucket}": ("fail", f"bucket `{bucket}` is there and belongs to stack `dev`")
    }


def test_bucket_of_another_project_fails_with_the_setting_to_change(google: GoogleServer, marin: StackSettings) -> None:
    bucket = "hai-gcp-models-marin-us-west4-records"
    google.foreign.add(f"b/{bucket}")

    [finding] = [each for each in look(google, marin) if each.level is Level.FAIL]

    assert "unique in the world" in finding.message
    assert finding.fix == "set its `bucket` in the stack file to another name"


def test_name_of_nobody_is_a_warning_and_adopted_where_that_is_set(google: GoogleServer, marin: StackSettings) -> None:
    bucket = "hai-gcp-models-marin-us-west4-records"
    google.put(f"b/{bucket}", name=bucket)

    found = [each for each in look(google, marin) if each.check == f"name {bucket}"]
    adopted = [each for each in look(google, replace(marin, adopt=True)) if each.check == f"name {bucket}"]

    assert [(each.level.value, each.fix) for each in found] == [
        ("warn", "`adopt: true` in the stack file takes it over")
    ]
    assert [(each.level.value, each.message) for each in adopted] == [
        ("ok", f"bucket `{bucket}` is there, and `adopt` takes it over")
    ]


def test_soft_deleted_names_fail_unless_they_are_adopted(google: GoogleServer, pipeline: StackSettings) -> None:
    role = "projects/hai-gcp-models/roles/marin_pipeline_deployer"
    pool = "projects/hai-gcp-models/locations/global/workloadIdentityPools/marin-pipeline-ci"
    google.put(role, name=role, deleted=True)
    google.put(pool, name=pool, state="DELETED")

    found = {each.check: each.level.value for each in look(google, pipeline) if "soft-deleted" in each.message}
    adopted = look(google, replace(pipeline, adopt=True))

    assert found == {"name marin_pipeline_deployer": "fail", "name marin-pipeline-ci": "fail"}
    assert {each.level.value for each in adopted if "soft-deleted" in each.message} == {"ok"}


def test_deleted_bucket_can_be_had_back(google: GoogleServer, marin: StackSettings) -> None:
    bucket = "hai-gcp-models-marin-us-west4-records"
    google.deleted_buckets[bucket] = {"generation": "7", "hardDeleteTime": "2026-11-28T00:00:00Z"}
    google.deleted_buckets[f"{bucket}-old"] = {"generation": "8"}

    [finding] = [each for each in look(google, marin) if each.level is not Level.OK]

    assert (finding.level, finding.message) == (
        Level.WARN,
        f"bucket `{bucket}` was deleted; what it held can be had back until 2026-11-28",
    )
    assert f"gs://{bucket}#7" in (finding.fix or "")


def test_what_another_stack_has_to_make_first_fails_until_it_is_there(
    google: GoogleServer, marin: StackSettings
) -> None:
    del google.resources["projects/hai-gcp-models/locations/us-west4/repositories/marin"]
    del google.resources["projects/hai-gcp-models/secrets/marin-us-central2-hf-token"]

    found = [each for each in look(google, marin) if each.level is Level.FAIL]

    assert [each.check for each in found] == ["uses repository", "uses secret"]
    assert {each.fix for each in found} == {"bring up the stack that makes it first, or correct the name"}


def test_firewalls_that_the_owner_of_a_shared_network_has_not_made_fail_with_the_way_to_the_commands(
    google: GoogleServer, marin: StackSettings
) -> None:
    subnet = "projects/net-host/regions/us-west4/subnetworks/shared"
    google.put(subnet, name="shared")
    made = "projects/net-host/global/firewalls/marin-us-west4-main-ssh"
    google.put(made, name="marin-us-west4-main-ssh")
    shared = replace(marin, network=NetworkSettings(subnet=subnet))

    found = {each.message: each for each in look(google, shared) if each.check == "uses firewall"}

    assert {message: each.level.value for message, each in found.items()} == {
        f"{made} is there": "ok",
        "there is no `projects/net-host/global/firewalls/marin-us-west4-main-cluster`, which this stack refers to": "fail",
    }
    assert [each.fix for each in found.values() if each.fix] == [
        "`python -m infra check --stack NAME` prints the commands for the owner of the network"
    ]


# project, APIs, quotas


def test_project_that_is_not_there_or_deleted_fails(google: GoogleServer, marin: StackSettings) -> None:
    where = "projects/hai-gcp-models"
    google.resources[where]["state"] = "DELETE_REQUESTED"
    deleted = troubles(look(google, marin))["project"]
    del google.resources[where]
    gone = troubles(look(google, marin))["project"]

    assert deleted == ("fail", "project `hai-gcp-models` is delete requested")
    assert gone == ("fail", "there is no project `hai-gcp-models`")


def test_apis_that_up_enables_are_no_trouble_and_those_it_needs_itself_are(
    google: GoogleServer, marin: StackSettings
) -> None:
    google.services = {"tpu.googleapis.com": False}
    off = next(each for each in look(google, marin) if each.check == "apis")
    google.services["serviceusage.googleapis.com"] = False
    first = next(each for each in look(google, marin) if each.check == "apis")

    assert off.level is Level.OK
    assert "`up` enables tpu.googleapis.com" in off.message
    assert (first.level, first.fix) == (
        Level.FAIL,
        "gcloud services enable serviceusage.googleapis.com --project hai-gcp-models",
    )


def test_quota_that_is_used_up_is_a_warning(google: GoogleServer, marin: StackSettings) -> None:
    google.resources["projects/hai-gcp-models/regions/us-west4"]["quotas"][0]["usage"] = 20.0

    assert troubles(look(google, marin)) == {
        "quota CPUs n2": ("warn", "N2_CPUS: 8 CPUs wanted, 4 of 24 free; fine if this stack has them already")
    }


@pytest.mark.parametrize(
    ("limit", "level", "text"),
    [
        (0, "fail", "0 of v5litepod, preemptible, in us-west4-a: not one v5litepod-1 fits"),
        (64, "warn", "64 of v5litepod, preemptible, in us-west4-a: 64 nodes of at least 4 and at most 1,024"),
        (-1, "ok", ""),
    ],
)
def test_tpu_quota_is_compared_with_the_pool(
    google: GoogleServer, marin: StackSettings, limit: int, level: str, text: str
) -> None:
    path = "projects/hai-gcp-models/services/tpu.googleapis.com/consumerQuotaMetrics"
    google.lists[path] = [tpu_quota(google, "v5s-litepod-preemptible", ZONE, limit)]

    found = troubles(look(google, marin))

    assert found == ({} if level == "ok" else {"quota main.v5e": (level, text)})


def test_quota_of_another_kind_or_family_is_not_taken(google: GoogleServer, marin: StackSettings) -> None:
    path = "projects/hai-gcp-models/services/tpu.googleapis.com/consumerQuotaMetrics"
    google.lists[path] = [
        tpu_quota(google, metric, ZONE, 9_999) for metric in ("v5s-litepod", "v5s-litepod-reserved", "v5p-preemptible")
    ]

    assert troubles(look(google, marin)) == {
        "quota main.v5e": ("warn", "the project tells no preemptible quota of v5litepod in us-west4-a")
    }


def test_many_service_accounts_are_a_warning(google: GoogleServer, marin: StackSettings) -> None:
    google.lists["projects/hai-gcp-models/serviceAccounts"] = [{"name": str(number)} for number in range(98)]

    assert list(troubles(look(google, marin))) == ["quota service accounts"]


# zones and TPUs


def test_zone_hardware_and_software_that_the_project_does_not_see_fail_with_what_it_sees(
    google: GoogleServer, marin: StackSettings
) -> None:
    where = "projects/hai-gcp-models"
    del google.resources[f"{where}/zones/{ZONE}"]
    google.lists[f"{where}/zones"] = [{"name": "us-west4-b"}, {"name": "us-east1-b"}]
    google.lists[f"{where}/locations/{ZONE}/acceleratorTypes"] = [{"type": "v5litepod-4"}]
    google.lists[f"{where}/locations/{ZONE}/runtimeVersions"] = [{"version": "v2-alpha-tpuv6e"}]

    findings = [each for each in look(google, marin) if each.level is Level.FAIL]

    assert [(each.message, each.fix) for each in findings] == [
        (
            "the project does not see zone `us-west4-a`",
            "the project sees us-west4-b, us-east1-b; some zones are open to chosen projects only",
        ),
        ("the project sees no v5litepod-1 in us-west4-a", "it has v5litepod-4"),
        ("there is no TPU software `v2-alpha-tpuv5-lite` in us-west4-a", "it has v2-alpha-tpuv6e"),
    ]


# machines and boot images


def head_findings(google: GoogleServer, settings: StackSettings) -> list[tuple[str, str, str | None]]:
    return [(each.level.value, each.message, each.fix) for each in look(google, settings) if each.check == "head main"]


def with_head(settings: StackSettings, **changes: Any) -> StackSettings:
    return replace(settings, heads={"main": replace(settings.heads["main"], **changes)})


def test_machine_type_and_boot_image_that_are_there_are_ok(google: GoogleServer, marin: StackSettings) -> None:
    assert head_findings(google, marin) == [
        ("ok", "machine type n2-standard-8 is there", None),
        ("ok", f"boot image {BOOT_IMAGE.rpartition('/')[2]} is there", None),
    ]


def test_machine_type_that_the_zone_lacks_fails_with_what_it_has(google: GoogleServer, marin: StackSettings) -> None:
    google.lists[f"projects/hai-gcp-models/zones/{ZONE}/machineTypes"] = [
        {"name": name} for name in ("n2-standard-8", "c3-standard-8", "e2-medium")
    ]

    found = head_findings(google, with_head(marin, machine_type="c4-standard-8"))

    assert found[0] == (
        "fail",
        "the project sees no c4-standard-8 in us-west4-a",
        "it has c3-standard-8, n2-standard-8 and 1 more",
    )


def test_boot_image_that_is_not_there_fails_with_the_list(google: GoogleServer, marin: StackSettings) -> None:
    del google.resources[BOOT_IMAGE]

    assert head_findings(google, marin)[1:] == [
        (
            "fail",
            f"there is no boot image `{BOOT_IMAGE}`",
            "`gcloud compute images list --project debian-cloud` lists the images that are there",
        )
    ]


@pytest.mark.parametrize(("state", "level"), [("DEPRECATED", "warn"), ("OBSOLETE", "fail"), ("DELETED", "fail")])
def test_boot_image_that_google_gives_up_is_found_with_its_successor(
    google: GoogleServer, marin: StackSettings, state: str, level: str
) -> None:
    google.resources[BOOT_IMAGE]["deprecated"] = {
        "state": state,
        "replacement": f"https://www.googleapis.com/compute/v1/{NEWER}",
    }

    [found] = head_findings(google, marin)[1:]

    assert (found[0], found[2]) == (level, f"take `{NEWER}`")
    assert state.lower() in found[1]


def test_machine_type_that_google_gives_up_is_found(google: GoogleServer, marin: StackSettings) -> None:
    where = f"projects/hai-gcp-models/zones/{ZONE}/machineTypes/n2-standard-8"
    google.resources[where]["deprecated"] = {"state": "DEPRECATED"}

    assert head_findings(google, marin)[0][::2] == ("warn", "take another `machine_type`")


@pytest.mark.parametrize("machine_says", [True, False])
def test_boot_image_of_another_architecture_than_the_machine_fails(
    google: GoogleServer, marin: StackSettings, *, machine_says: bool
) -> None:
    google.resources[BOOT_IMAGE]["architecture"] = "ARM64"
    if not machine_says:
        del google.resources[f"projects/hai-gcp-models/zones/{ZONE}/machineTypes/n2-standard-8"]["architecture"]

    assert [each[:2] for each in head_findings(google, marin)[2:]] == [
        ("fail", "the boot image is for ARM64, and n2-standard-8 is X86_64")
    ]


def test_boot_image_larger_than_the_disk_fails_with_the_size(google: GoogleServer, marin: StackSettings) -> None:
    google.resources[BOOT_IMAGE]["diskSizeGb"] = "300"

    assert head_findings(google, marin)[2:] == [
        ("fail", "the boot image needs a disk of 300 GB, and `disk_gb` is 200", "set `disk_gb` to 300 or more")
    ]


def test_disk_of_a_newer_family_counts_against_the_quota_of_hyperdisks(
    google: GoogleServer, marin: StackSettings
) -> None:
    quotas = google.resources["projects/hai-gcp-models/regions/us-west4"]["quotas"]
    quotas.append({"metric": "HDB_TOTAL_GB", "limit": 100.0})
    where = f"projects/hai-gcp-models/zones/{ZONE}/machineTypes"
    google.put(f"{where}/c4-standard-8", name="c4-standard-8")

    found = {each.check: each for each in look(google, with_head(marin, machine_type="c4-standard-8"))}

    assert found["quota disks Hyperdisk"].message.startswith("HDB_TOTAL_GB: 200 GB wanted, 100 of 100 free")
    assert "quota disks" not in found


# organisation policies


def allow(*values: str) -> dict[str, Any]:
    return {"rules": [{"values": {"allowedValues": list(values)}}]}


DENY = {"rules": [{"denyAll": True}]}
ENFORCE = {"rules": [{"enforce": True}]}
UNLESS_DEV = {"allowAll": True, "condition": {"expression": "resource.matchTag('1/env', 'dev')"}}
ORGANISATION = {"allowedPrincipalSets": ["//cloudresourcemanager.googleapis.com/organizations/1"]}
GROUPS = {"allowedMemberSubjects": [f"group:marin-{each}@example.com" for each in ("operators", "researchers")]}
NAT_SUBNET = "projects/hai-gcp-models/regions/us-central2/subnetworks/marin-us-central2"
ON_CONDITION = {"rules": [{"denyAll": True, "condition": {"expression": "resource.matchTag('1/env', 'prod')"}}]}


@pytest.mark.parametrize(
    ("constraint", "spec", "level"),
    [
        ("gcp.resourceLocations", allow("in:us-locations", "in:eu-locations", "global"), "ok"),
        ("gcp.resourceLocations", allow("us-central2", "us-west4", "europe-west4", "in:global-locations"), "ok"),
        ("gcp.resourceLocations", allow("in:us-locations", "global"), "fail"),
        ("gcp.resourceLocations", allow("in:us-locations", "in:eu-locations"), "fail"),
        ("gcp.resourceLocations", {"rules": [{"values": {"deniedValues": ["us-central2"]}}]}, "fail"),
        ("gcp.resourceLocations", DENY, "fail"),
        ("gcp.resourceLocations", ON_CONDITION, "warn"),
        ("gcp.resourceLocations", {"rules": [*DENY["rules"], UNLESS_DEV]}, "warn"),
        ("gcp.resourceLocations", {"rules": [*DENY["rules"], *ON_CONDITION["rules"]]}, "fail"),
        ("gcp.resourceLocations", {}, "ok"),
        ("iam.allowedPolicyMemberDomains", allow("C0abc123"), "warn"),
        ("iam.allowedPolicyMemberDomains", DENY, "fail"),
        ("iam.disableServiceAccountCreation", ENFORCE, "fail"),
        ("iam.disableServiceAccountCreation", {"rules": [{"enforce": False}]}, "ok"),
        ("iam.workloadIdentityPoolProviders", allow("https://token.actions.githubusercontent.com"), "ok"),
        ("iam.workloadIdentityPoolProviders", allow("https://gitlab.example.com"), "fail"),
        ("iam.workloadIdentityPoolProviders", DENY, "fail"),
        ("compute.requireOsLogin", ENFORCE, "fail"),
        ("compute.trustedImageProjects", allow("projects/debian-cloud"), "ok"),
        ("compute.trustedImageProjects", allow("projects/cos-cloud"), "fail"),
        ("compute.trustedImageProjects", {"rules": [{"values": {"deniedValues": ["projects/debian-cloud"]}}]}, "fail"),
        ("gcp.restrictServiceUsage", allow("compute.googleapis.com", "storage.googleapis.com"), "fail"),
        ("gcp.restrictServiceUsage", {"rules": [{"values": {"deniedValues": ["tpu.googleapis.com"]}}]}, "fail"),
        ("gcp.restrictServiceUsage", {"rules": [{"values": {"deniedValues": ["iam.googleapis.com"]}}]}, "ok"),
        (
            "gcp.restrictNonCmekServices",
            {"rules": [{"values": {"deniedValues": ["is:storage.googleapis.com"]}}]},
            "fail",
        ),
        ("gcp.restrictNonCmekServices", {"rules": [{"values": {"deniedValues": ["spanner.googleapis.com"]}}]}, "ok"),
        ("iam.managed.allowedPolicyMembers", {"rules": [{"enforce": False}]}, "ok"),
        ("iam.managed.allowedPolicyMembers", {"rules": [{"enforce": True, "parameters": ORGANISATION}]}, "warn"),
        ("iam.managed.allowedPolicyMembers", {"rules": [{"enforce": True, "parameters": GROUPS}]}, "ok"),
        ("compute.disableGuestAttributesAccess", ENFORCE, "fail"),
        ("compute.restrictCloudNATUsage", allow("under:projects/hai-gcp-models"), "ok"),
        ("compute.restrictCloudNATUsage", allow(NAT_SUBNET), "ok"),
        ("compute.restrictCloudNATUsage", allow("under:organizations/1"), "warn"),
        ("compute.restrictCloudNATUsage", allow("under:projects/other"), "fail"),
        ("compute.restrictCloudNATUsage", DENY, "fail"),
    ],
)
def test_organisation_policy_is_judged_by_what_the_stack_does(
    google: GoogleServer,
    central: StackSettings,
    pipeline: StackSettings,
    constraint: str,
    spec: dict[str, Any],
    level: str,
) -> None:
    google.org_policies[constraint] = spec

    found = {each.check: each for each in look(google, pipeline if "workloadIdentity" in constraint else central)}

    finding = found[f"policy {constraint}"]
    assert finding.level.value == level
    assert (finding.fix is None) == (level == "ok")


def test_policy_with_a_condition_says_what_it_depends_on(google: GoogleServer, central: StackSettings) -> None:
    google.org_policies["compute.disableGuestAttributesAccess"] = {
        "rules": [{"enforce": False}, {"enforce": True, "condition": ON_CONDITION["rules"][0]["condition"]}]
    }

    level, text = troubles(look(google, central))["policy compute.disableGuestAttributesAccess"]

    assert level == "warn"
    assert text.startswith("it depends on `resource.matchTag('1/env', 'prod')` whether nobody can read")


@pytest.mark.parametrize(
    ("values", "level"), [(["under:projects/net"], "ok"), (["under:folders/7"], "warn"), (["projects/hai"], "fail")]
)
def test_subnet_of_another_project_and_key_are_judged_by_their_own_policies(
    google: GoogleServer, marin: StackSettings, values: list[str], level: str
) -> None:
    shared = NetworkSettings(cidr="10.0.0.0/20", subnet="projects/net/regions/us-west4/subnetworks/s")
    key = "projects/net/locations/us-west4/keyRings/r/cryptoKeys/k"
    for constraint in ("compute.restrictSharedVpcSubnetworks", "gcp.restrictCmekCryptoKeyProjects"):
        google.org_policies[constraint] = allow(*values)

    found = {each.check: each.level.value for each in look(google, replace(marin, network=shared, kms_key=key))}

    assert found["policy compute.restrictSharedVpcSubnetworks"] == level
    assert found["policy gcp.restrictCmekCryptoKeyProjects"] == level
    assert not {"policy compute.restrictCloudNATUsage", "policy gcp.restrictNonCmekServices"} & found.keys()


def test_perimeter_of_vpc_service_controls_is_named(google: GoogleServer, marin: StackSettings) -> None:
    text = "Request is prohibited by organization's policy. vpcServiceControlsUniqueIdentifier: VQQn-Zf"
    google.fail("compute.*", 403, "PERMISSION_DENIED", text)

    found = troubles(look(google, marin))

    assert found["zones"] == (
        "fail",
        "a perimeter of VPC Service Controls keeps compute from this machine: " + text,
    )


def test_policies_that_do_not_concern_the_stack_are_not_asked(google: GoogleServer) -> None:
    look(google, replace(load_settings("dev", ROOT), project="hai-gcp-models", impersonate=None))

    asked = {request.path.rpartition("/")[2] for request in google.log if "orgpolicy" in request.path}
    assert "compute.requireOsLogin:getEffectivePolicy" not in asked
    assert "gcp.resourceLocations:getEffectivePolicy" in asked


# unanswered questions


def test_what_this_identity_may_not_ask_is_a_warning_and_the_rest_goes_on(
    google: GoogleServer, marin: StackSettings
) -> None:
    google.deny("orgpolicy.*", "orgpolicy.policy.get")
    google.deny("serviceusage.*", "serviceusage.quotas.get")

    found = look(google, marin)

    warned = {each.check for each in found if each.level is Level.WARN}
    assert {each.level for each in found} == {Level.OK, Level.WARN}
    assert {"apis", "quota main.v5e", "policy gcp.resourceLocations"} <= warned
    assert "this identity may not ask" in next(each.message for each in found if each.check == "apis")
    assert "names" in {each.check for each in found if each.level is Level.OK}


def test_api_that_is_off_takes_no_names_and_is_a_warning_where_more_was_asked(
    google: GoogleServer, marin: StackSettings
) -> None:
    google.disable_api("tpu", "Cloud TPU")
    google.disable_api("secretmanager", "Secret Manager")

    found = troubles(look(google, marin))

    assert found["pool main.v5e"] == ("warn", "cannot be asked before the tpu API is on; `up` enables it")
    assert [check for check, (level, _) in found.items() if level == "fail"] == []


@pytest.mark.parametrize("status", [429, 500, 503])
def test_service_that_fails_is_a_finding_and_the_rest_goes_on(
    google: GoogleServer, marin: StackSettings, status: int
) -> None:
    google.fail("compute.*", status, "UNAVAILABLE", "try later")

    found = {each.check: each.level.value for each in look(google, marin)}

    assert (found["zones"], found["quotas"], found["pool main.v5e"]) == ("fail", "fail", "ok")


def test_without_network_two_questions_are_enough(marin: StackSettings) -> None:
    gone = GoogleServer()
    gone._server.server_close()

    found = look(gone, marin)

    assert [(each.check, each.level.value) for each in found] == [
        ("identity", "fail"),
        ("project", "fail"),
        ("the rest", "warn"),
    ]


def test_every_finding_that_is_not_ok_has_a_fix(google: GoogleServer, central: StackSettings) -> None:
    google.resources = {"projects/hai-gcp-models": google.resources["projects/hai-gcp-models"]}
    google.lists.clear()
    google.org_policies = {"gcp.resourceLocations": DENY}

    found = [each for each in look(google, central) if each.level is not Level.OK]

    assert found
    assert [each.check for each in found if not each.fix] == []


# the command


def test_command_prints_findings_and_exits_with_2_where_one_fails(
    google: GoogleServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("RUNTIME_GOOGLE_API", google.url)
    assert main(["preflight", "--stack", "marin-us-west4"]) == 0
    assert "ok    names                         14 of 14 are free\n" in capsys.readouterr().out

    google.org_policies["compute.requireOsLogin"] = ENFORCE
    assert main(["preflight", "--stack", "marin-us-west4", "-o", "json"]) == 2
    printed = json.loads(capsys.readouterr().out)
    assert [each["check"] for each in printed if each["level"] == "fail"] == ["policy compute.requireOsLogin"]
    assert {tuple(each) for each in printed} == {("check", "level", "message", "fix")}


def test_command_for_an_unknown_stack_lists_those_that_there_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)

    assert main(["preflight", "--stack", "marin-us-wset4"]) == 2
    assert "did you mean `marin-us-west4`?" in capsys.readouterr().err
    with pytest.raises(UnknownName):
        load_settings("nope", ROOT)


def test_command_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["preflight"]) == 2
    assert "--stack" in capsys.readouterr().err


def test_command_needs_no_credentials_for_a_stack_without_google(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(subject, "GoogleApi", None)

    assert main(["preflight", "--stack", "phoebe"]) == 0
    assert "nothing to ask" in capsys.readouterr().out
