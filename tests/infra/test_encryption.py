"""The stack's encryption key: its settings, everything that it encrypts, the grants of Google's agents, and its rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pulumi_gcp as gcp
import pytest

from infra.check.check import check_stack, find_violations
from infra.check.command import render_report, report_fields
from infra.check.recording import Recording, Registration
from infra.check.recording import record as record_program
from infra.components.ci_identity import find_permissions
from infra.components.key import ROLE
from infra.gcp.outputs import compute
from infra.policy.base import StackBounds
from infra.policy.rules import apply_rule
from infra.program import build
from infra.settings.model import CiSettings, StackSettings
from infra.settings.read import parse_settings
from tests.infra.conftest import Project, checked
from tests.infra.test_config import GOOD, find_paths, problems_of
from tests.infra.test_policy_rules import Lab
from tests.infra.test_policy_rules import run as run_lab

RING = "projects/my-lab/locations/us-west4/keyRings/lab"
KEY = f"{RING}/cryptoKeys/work"
FOREIGN = "projects/keys-1/locations/us-west4/keyRings/lab/cryptoKeys/work"
GRANT = "gcp:kms/cryptoKeyIAMMember:CryptoKeyIAMMember"
TOKEN = {"env": "HF_TOKEN", "readers": ["worker"], "regions": ["us-west4"]}
ENCRYPTED = {"storage", "pubsub", "artifactregistry", "secretmanager", "compute"}


def values(**changes: Any) -> dict[str, Any]:
    return GOOD | {"kms_key": KEY, "secrets": {"hf-token": TOKEN}} | changes


def read(**changes: Any) -> StackSettings:
    return parse_settings("west", values(**changes))


def record(**changes: Any) -> Recording:
    settings = read(**changes)
    return record_program(lambda: build(settings), stack="west", compute=compute)


def keys_in(recording: Recording) -> dict[str, object]:
    """Return the key of each resource that has one, without the grants."""
    found: dict[str, object] = {}
    for each in recording.resources:
        for name, value in {**each.inputs, **dict(_nested(each))}.items():
            if "msKey" in name:
                found[each.name] = value
    return found


def _nested(each: Registration) -> list[tuple[str, object]]:
    inputs = each.inputs
    found = [*(inputs.get("encryption") or {}).items(), *(inputs.get("bootDisk") or {}).items()]
    for replica in (inputs.get("replication") or {}).get("userManaged", {}).get("replicas", []):
        found += (replica.get("customerManagedEncryption") or {}).items()
    found += (((inputs.get("replication") or {}).get("auto") or {}).get("customerManagedEncryption") or {}).items()
    return found


# settings


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("my-key", "gcloud kms keys list"),
        (f"{KEY}/", "gcloud kms keys list"),
        (f"{KEY}\n", "gcloud kms keys list"),
        (f"https://cloudkms.googleapis.com/v1/{KEY}", "gcloud kms keys list"),
        (f"{KEY}/cryptoKeyVersions/3", f"`{KEY}`"),
        (KEY.replace("my-lab", "123456"), "gcloud projects describe"),
    ],
)
def test_key_of_another_form_is_refused_with_what_to_write(key: str, hint: str) -> None:
    (problem,) = problems_of(values(kms_key=key))

    assert problem.path == "kms_key"
    assert hint in (problem.hint or "")


@pytest.mark.parametrize(
    ("changes", "paths"),
    [
        ({"records": {"location": "US"}}, ["kms_key"]),
        ({"registries": {"images": {"repository": "marin", "regions": ["us-west4", "us-east1"]}}}, ["kms_key"]),
        ({"secrets": {"hf-token": TOKEN | {"regions": ["us-east1"]}}}, ["kms_key"]),
        ({"secrets": {"hf-token": TOKEN | {"regions": []}}}, ["secrets.hf-token.regions"]),
({"kms_key": KEY.replace("us-west4", "us-east1")}, ["kms_key"] * 4),
    ],
)  # fmt: skip
def test_key_of_another_place_than_what_it_encrypts_is_refused(changes: dict[str, Any], paths: list[str]) -> None:
    assert find_paths(values(**changes)) == paths


@pytest.mark.parametrize(
    ("location", "changes"),
    [
        ("us", {"records": {"location": "US"}}),
        ("europe", {"records": {"location": "EU"}}),
        ("global", {"secrets": {"hf-token": {"env": "HF_TOKEN"}}}),
        ("europe-west4", {"queues": {"default": {}}}),
    ],
)
def test_key_of_a_larger_place_fits_what_is_kept_there(location: str, changes: dict[str, Any]) -> None:
    key = KEY.replace("us-west4", location)

    assert find_paths({"project": "my-lab", "region": "us-west4", "kms_key": key} | changes) == []


def test_key_with_nothing_to_encrypt_is_refused() -> None:
    (problem,) = problems_of({"project": "my-lab", "region": "us-west4", "kms_key": KEY, "network": GOOD["network"]})

    assert problem.path == "kms_key"


def test_secret_and_repository_of_another_stack_need_no_key_of_their_place() -> None:
    lent = {
        "secrets": {"hf-token": {"env": "HF_TOKEN", "existing": "projects/other/secrets/x"}},
        "registries": {"images": {"existing": {"us-west4": "projects/other/locations/us-west4/repositories/x"}}},
        "records": {"location": "us-west4"},
    }
    settings = parse_settings("west", {"project": "my-lab", "region": "us-west4", "kms_key": KEY} | lent)

    assert settings.encrypted_services == ("storage",)


# what the program makes


def test_key_encrypts_everything_that_holds_work() -> None:
    recording = record()

    found = keys_in(recording)
    assert set(found.values()) == {KEY}
    assert {name for name in found if not name.startswith("key-")} == {
        "records-bucket",
        "default-queue-topic",
        "default-queue-dead-topic",
        "images-registry-us-west4-repository",
        "hf-token-secret-secret",
        "main-head-vm",
    }


def test_key_of_the_own_project_is_granted_to_the_agents_before_its_users_are_made() -> None:
    recording = record()
    by_urn = {each.urn: each for each in recording.resources}
    grants = {each.name: each for each in recording.of_type(GRANT)}

    assert set(grants) == {f"key-{service}-agent" for service in ENCRYPTED}
    assert {(each.inputs["cryptoKeyId"], each.inputs["role"]) for each in grants.values()} == {(KEY, ROLE)}
    users = {
        "records-bucket": "storage",
        "default-queue-topic": "pubsub",
        "default-queue-dead-topic": "pubsub",
        "images-registry-us-west4-repository": "artifactregistry",
        "hf-token-secret-secret": "secretmanager",
        "main-head-vm": "compute",
    }
    for each in recording.resources:
        if each.name in users:
            assert grants[f"key-{users[each.name]}-agent"].urn in each.dependencies, each.name
    for each in grants.values():
        behind = {by_urn[urn].type for urn in each.property_dependencies["member"]}
        assert behind == {"gcp:projects/serviceIdentity:ServiceIdentity"}
    assert list(find_violations(recording, read())) == []


def test_key_of_another_project_is_used_and_nothing_is_granted_on_it() -> None:
    recording = record(kms_key=FOREIGN)

    assert set(keys_in(recording).values()) == {FOREIGN}
    assert list(recording.of_type(GRANT)) == []
    assert "apis-cloudkms" not in {each.name for each in recording.resources}
    assert list(find_violations(recording, read(kms_key=FOREIGN))) == []


def test_key_of_a_stack_of_records_alone_learns_the_number_of_the_project() -> None:
    settings = parse_settings("west", {"project": "my-lab", "region": "us-west4", "kms_key": KEY, "records": {"location": "us-west4"}})  # fmt: skip

    def known(type_: str, name: str, inputs: Any) -> dict[str, Any]:
        more = {"member": "serviceAccount:service-42@gcp-sa-cloudkms.iam.gserviceaccount.com"}
        return {**compute(type_, name, inputs), **(more if type_.endswith("ServiceIdentity") else {})}

    recording = record_program(lambda: build(settings), stack="west", compute=known)

    assert [each.inputs["member"] for each in recording.of_type(GRANT)] == [
        "serviceAccount:service-42@gs-project-accounts.iam.gserviceaccount.com"
    ]


def test_pipeline_may_change_the_grants_of_a_key_only_if_it_deploys_stacks_with_one() -> None:
    grants = {"cloudkms.cryptoKeys.getIamPolicy", "cloudkms.cryptoKeys.setIamPolicy"}

    assert set(find_permissions(["kms_key"])) >= grants
    assert not grants & set(find_permissions(CiSettings(repositories={}).deploys))


# what is left to a person


def set_key(key: str) -> Callable[[dict[str, Any]], None]:
    def change(config: dict[str, Any]) -> None:
        config.update(kms_key=key)
        config["secrets"]["hf-token"].update(regions=["us-central1"])

    return change


DEV_KEY = "projects/my-lab-dev/locations/us-central1/keyRings/lab/cryptoKeys/work"


def test_check_with_a_key_of_another_project_lists_the_commands_of_its_owner(project: Project) -> None:
    project.copy("dev", set_key(DEV_KEY.replace("my-lab-dev", "keys-1")))

    report = check_stack("dev", folder=project.folder)

    bind = (
        "gcloud kms keys add-iam-policy-binding work --project keys-1 --location us-central1 --keyring lab"
        " --member serviceAccount:service-NUMBER@{}.iam.gserviceaccount.com"
        " --role roles/cloudkms.cryptoKeyEncrypterDecrypter"
    )
    identity = "gcloud beta services identity create --service {}.googleapis.com --project my-lab-dev"
    assert report.findings == ()
    assert report.left_to_key_owner == (
        (
            "gcloud services enable storage.googleapis.com pubsub.googleapis.com artifactregistry.googleapis.com"
            " secretmanager.googleapis.com --project my-lab-dev"
        ),
        "gcloud storage service-agent --project my-lab-dev",
        *(identity.format(each) for each in ("pubsub", "artifactregistry", "secretmanager")),
        *(
            bind.format(each)
            for each in ("gs-project-accounts", "gcp-sa-pubsub", "gcp-sa-artifactregistry", "gcp-sa-secretmanager")
        ),
    )
    section = render_report(report).split("\nleft to the owner of the key\n")[1].split("\n\n")[0].splitlines()
    assert [line.strip() for line in section] == list(report.left_to_key_owner)
    assert report_fields(report)["left_to_key_owner"] == list(report.left_to_key_owner)


def test_check_with_a_key_of_the_own_project_leaves_the_agent_of_storage_alone(project: Project) -> None:
    project.copy("dev", set_key(DEV_KEY))

    report = check_stack("dev", folder=project.folder)

    assert report.findings == ()
    assert report.left_to_key_owner == ("gcloud storage service-agent --project my-lab-dev",)
    assert checked("dev").left_to_key_owner == ()


# a running stack


# the policies


def topic(key: str | None) -> Callable[[Lab], None]:
    def program(lab: Lab) -> None:
        gcp.pubsub.Topic("lab-topic", name="t", project="my-lab", kms_key_name=key, opts=lab.opts())

    return program


def raw_key(lab: Lab) -> None:
    gcp.compute.Disk("lab-disk", zone="us-west4-a", disk_encryption_key={"raw_key": "a"}, opts=lab.opts())


def key_grant(member: str | None, key: str = KEY) -> Callable[[Lab], None]:
    def program(lab: Lab) -> None:
        agent = gcp.projects.ServiceIdentity(
            "lab-agent", project="my-lab", service="pubsub.googleapis.com", opts=lab.opts()
        )
        gcp.kms.CryptoKeyIAMMember(
            "lab-grant", crypto_key_id=key, role=ROLE, member=member or agent.member, opts=lab.opts()
        )

    return program


def found(rule: str, program: Callable[[Lab], None], keys: frozenset[str] | None = frozenset({KEY})) -> list[str]:
    return [each.message for each in apply_rule(rule, run_lab(program).resources, StackBounds(keys=keys))]


AGENT = "serviceAccount:service-12@gcp-sa-pubsub.iam.gserviceaccount.com"


@pytest.mark.parametrize(
    "program",
    [
        topic(FOREIGN),
        topic(f"{KEY}/cryptoKeyVersions/1"),
        raw_key,
        key_grant(None, FOREIGN),
        key_grant("user:stranger@example.org"),
        key_grant("group:lab@example.com"),
        # An agent whose identity the stack does not make may be another project's.
        key_grant(AGENT),
    ],
)
def test_foreign_key_or_a_key_for_people_is_refused(program: Callable[[Lab], None]) -> None:
    assert len(found("stack-key", program)) == 1


def test_key_in_a_stack_without_one_is_refused() -> None:
    assert len(found("stack-key", topic(KEY), frozenset())) == 1


@pytest.mark.parametrize("program", [topic(KEY), topic(None), key_grant(None)])
def test_own_key_is_let_through(program: Callable[[Lab], None]) -> None:
    assert found("stack-key", program) == []


def test_topic_without_the_key_is_refused_in_a_stack_with_one() -> None:
    assert len(found("encrypted", topic(None))) == 1
    assert found("encrypted", topic(KEY)) == []
    assert found("encrypted", topic(None), frozenset()) == []
    assert found("encrypted", topic(None), None) == []
