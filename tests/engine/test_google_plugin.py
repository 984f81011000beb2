"""The simulated Google is strict: each refusal is provoked over the protocol, without the engine."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from infra.check.recording import UNKNOWN, SecretValue
from tests.engine.google_plugin import (
    ACCOUNT,
    BUCKET,
    DISK,
    FIREWALL,
    INSTANCE,
    NETWORK,
    POOL,
    REPOSITORY,
    ROLE,
    SECRET,
    SERVICE,
    SERVICE_IDENTITY,
    SUBSCRIPTION,
    TOPIC,
)
from tests.engine.google_store import FOLDER_VARIABLE, Cloud, Fault
from tests.engine.plugin import Failure
from tests.engine.plugin_client import CallRefused, PluginClient
from tests.services_support import PubsubEmulator, wait_until

PROJECT = "lab-project"
P = {"project": PROJECT}
GRANT = "gcp:pubsub/topicIAMMember:TopicIAMMember"
APIS = ("pubsub", "iam", "storage", "compute", "secretmanager", "artifactregistry", "cloudresourcemanager")


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PluginClient]:
    folder = tmp_path_factory.mktemp("google")
    with PluginClient("gcp", {FOLDER_VARIABLE: str(folder)}, P) as client:
        client.cloud = Cloud(folder)  # type: ignore[attr-defined]
        yield client


@pytest.fixture
def cloud(plugin: PluginClient) -> Cloud:
    """A project with only its APIs."""
    cloud: Cloud = plugin.cloud  # type: ignore[attr-defined]
    for name in ("cloud.json", "faults.json", "calls.jsonl"):
        (cloud.folder / name).unlink(missing_ok=True)
    for api in APIS:
        plugin.create(SERVICE, {**P, "service": f"{api}.googleapis.com"}, api)
    return cloud


def topic(name: str = "tasks", **more: Any) -> dict[str, Any]:
    return {**P, "name": name, **more}


def refusal(call: Any) -> CallRefused:
    with pytest.raises(CallRefused) as refused:
        call()
    return refused.value


# creating, reading, tampering


def test_create_then_read_returns_what_is_stored_and_what_google_added(plugin: PluginClient, cloud: Cloud) -> None:
    inputs = {**P, "accountId": "dev-worker"}

    id_, state = plugin.create(ACCOUNT, inputs)
    found = plugin.read(ACCOUNT, id_, inputs, state)

    assert id_ == f"projects/{PROJECT}/serviceAccounts/dev-worker@{PROJECT}.iam.gserviceaccount.com"
    assert state["email"] == f"dev-worker@{PROJECT}.iam.gserviceaccount.com"
    assert state["uniqueId"].isdigit()
    assert found is not None
    assert (found.state, found.inputs) == (state, inputs)


def test_read_after_the_store_was_tampered_with_says_what_is_there(plugin: PluginClient, cloud: Cloud) -> None:
    inputs = topic(labels={"team": "a"})
    id_, state = plugin.create(TOPIC, inputs)
    with cloud.change() as world:
        world.resources[id_]["inputs"]["labels"] = {"team": "b"}
        world.resources[id_]["inputs"]["messageRetentionDuration"] = "600s"

    found = plugin.read(TOPIC, id_, inputs, state)

    assert found is not None
    assert found.inputs == topic(labels={"team": "b"}, messageRetentionDuration="600s")
    assert plugin.diff(TOPIC, found.inputs, inputs) == (["labels.team", "messageRetentionDuration"], [])


def test_read_of_what_is_gone_or_of_another_type_finds_nothing(plugin: PluginClient, cloud: Cloud) -> None:
    id_, state = plugin.create(TOPIC, topic())

    other = plugin.read(SUBSCRIPTION, id_)
    plugin.delete(TOPIC, id_, state)

    assert (other, plugin.read(TOPIC, id_, topic(), state)) == (None, None)


def test_preview_of_a_create_makes_nothing_and_knows_only_what_was_given(plugin: PluginClient, cloud: Cloud) -> None:
    id_, state = plugin.create(ACCOUNT, {**P, "accountId": "dev-worker"}, preview=True)

    assert id_ == ""
    assert state == {
        **P,
        "accountId": "dev-worker",
        **dict.fromkeys(("name", "email", "member"), UNKNOWN),
    }
    assert cloud.ids("Account") == []


def test_secret_input_comes_back_as_a_secret_and_lies_open_in_the_cloud(plugin: PluginClient, cloud: Cloud) -> None:
    inputs = topic(labels={"team": SecretValue("a")})

    id_, state = plugin.create(TOPIC, inputs)
    found = plugin.read(TOPIC, id_, inputs, state)

    assert state["labels"] == {"team": SecretValue("a")}
    assert found is not None
    assert found.inputs["labels"] == {"team": SecretValue("a")}
    assert cloud.world().resources[id_]["inputs"]["labels"] == {"team": "a"}


def test_update_keeps_what_google_added_and_read_shows_it(plugin: PluginClient, cloud: Cloud) -> None:
    old = {**P, "accountId": "dev-worker", "displayName": "old"}
    new = {**old, "displayName": "new"}
    id_, state = plugin.create(ACCOUNT, old)

    updated = plugin.update(ACCOUNT, id_, old, new, state=state)
    found = plugin.read(ACCOUNT, id_, new, updated)

    assert updated == {**state, "displayName": "new"}
    assert found is not None
    assert found.inputs == new


def test_service_agent_has_the_number_of_the_project(plugin: PluginClient, cloud: Cloud) -> None:
    _, state = plugin.create(SERVICE_IDENTITY, {**P, "service": "pubsub.googleapis.com"})

    number = state["email"].removeprefix("service-").partition("@")[0]
    assert state["member"] == f"serviceAccount:service-{number}@gcp-sa-pubsub.iam.gserviceaccount.com"
    assert (len(number), number.isdigit()) == (12, True)


def test_many_calls_at_once_lose_nothing(plugin: PluginClient, cloud: Cloud) -> None:
    names = [f"tasks-{number}" for number in range(40)]

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda name: plugin.create(TOPIC, topic(name), name), names))

    assert cloud.ids("Topic") == sorted(f"projects/{PROJECT}/topics/{name}" for name in names)


# refused before creation


@pytest.mark.parametrize(
    ("type_", "inputs", "path"),
    [
        (TOPIC, topic(labls={"team": "a"}), "labls"),
        (TOPIC, topic(labels="team"), "labels"),
        (TOPIC, topic("goog-tasks"), "name"),
        (TOPIC, P, "name"),
        (SUBSCRIPTION, topic(topic="tasks", ackDeadlineSeconds=5), "ackDeadlineSeconds"),
        (SUBSCRIPTION, topic(ackDeadlineSeconds=60), "topic"),
        (SUBSCRIPTION, topic(topic="tasks", retryPolicy={"minBackoff": "10s"}), "retryPolicy.minBackoff"),
        (ACCOUNT, {**P, "accountId": "dev"}, "accountId"),
        (ROLE, {**P, "roleId": "dev-head", "title": "t", "permissions": []}, "roleId"),
        (POOL, {**P, "workloadIdentityPoolId": "gcp-dev"}, "workloadIdentityPoolId"),
        (BUCKET, {**P, "name": "Lab", "location": "us-west4"}, "name"),
        (TOPIC, topic(labels={"Team": "x"}), "labels"),
        (TOPIC, topic(messageRetentionDuration="2678401s"), "messageRetentionDuration"),
        (GRANT, {**P, "topic": "tasks", "role": "roles/owner", "member": "a@b.c"}, "member"),
        (GRANT, {**P, "topic": "tasks", "role": "owner", "member": "user:a@b.co"}, "role"),
        (FIREWALL, {**P, "name": "f", "network": "n", "sourceRanges": ["35.235.240.0/20", "iap"]}, "sourceRanges[1]"),
        (FIREWALL, {**P, "name": "f", "network": "n", "direction": "UP"}, "direction"),
        (FIREWALL, {**P, "name": "F", "network": "n"}, "name"),
        (INSTANCE, {**P, "name": "h", "scheduling": {"onHostMaintenance": "STAY"}}, "scheduling.onHostMaintenance"),
        ("gcp:dns/recordSet:RecordSet", P, ""),
    ],
)
def test_wrong_inputs_are_refused_by_check(plugin: PluginClient, type_: str, inputs: dict[str, Any], path: str) -> None:
    assert path in [each.path for each in plugin.check(type_, inputs)]


def test_good_inputs_pass_check_with_values_that_are_not_known_yet(plugin: PluginClient) -> None:
    assert plugin.check(SUBSCRIPTION, topic(topic=UNKNOWN, ackDeadlineSeconds=60)) == []


def test_provider_without_a_project_or_with_a_misspelt_key_is_refused(plugin: PluginClient) -> None:
    problems = plugin.check_provider({"regoin": "us-west4"})

    assert {each.path for each in problems} == {"regoin", "project"}
    assert plugin.check_provider({"project": PROJECT, "addPulumiAttributionLabel": "false"}) == []


# refused at creation


def test_create_of_a_taken_name_is_refused_also_after_a_restart(plugin: PluginClient, cloud: Cloud) -> None:
    plugin.create(TOPIC, topic(), "one")

    refused = refusal(lambda: plugin.create(TOPIC, topic(), "other"))
    with PluginClient("gcp", {FOLDER_VARIABLE: str(cloud.folder)}, P) as second:
        again = refusal(lambda: second.create(TOPIC, topic(), "other"))

    assert refused.code is again.code is grpc.StatusCode.ALREADY_EXISTS
    assert "409" in refused.message


def test_create_without_its_api_is_refused_until_the_api_is_on(plugin: PluginClient, cloud: Cloud) -> None:
    with cloud.change() as world:
        del world.resources[f"{PROJECT}/pubsub.googleapis.com"]

    refused = refusal(lambda: plugin.create(TOPIC, topic()))
    plugin.create(SERVICE, {**P, "service": "pubsub.googleapis.com"}, "pubsub")
    plugin.create(TOPIC, topic())

    assert refused.code is grpc.StatusCode.PERMISSION_DENIED
    assert "SERVICE_DISABLED" in refused.message


def test_grant_to_an_account_that_does_not_exist_is_refused(plugin: PluginClient, cloud: Cloud) -> None:
    plugin.create(TOPIC, topic())
    member = f"serviceAccount:dev-worker@{PROJECT}.iam.gserviceaccount.com"
    grant = {**P, "topic": "tasks", "role": "roles/pubsub.publisher", "member": member}

    refused = refusal(lambda: plugin.create(GRANT, grant))
    plugin.create(ACCOUNT, {**P, "accountId": "dev-worker"})
    plugin.create(GRANT, grant)

    assert refused.message == f"Error 400: Service account dev-worker@{PROJECT}.iam.gserviceaccount.com does not exist."


@pytest.mark.parametrize(
    ("member", "role"),
    [
        ("serviceAccount:service-123456789012@gcp-sa-pubsub.iam.gserviceaccount.com", "roles/pubsub.publisher"),
        (
            "principalSet://iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/x/attribute.a/b",
            "roles/pubsub.publisher",
        ),
        ("group:lab@example.com", f"projects/{PROJECT}/roles/missing"),
    ],
)
def test_grant_that_names_an_agent_pool_or_role_that_is_not_there_is_refused(
    plugin: PluginClient, cloud: Cloud, member: str, role: str
) -> None:
    plugin.create(TOPIC, topic())

    refused = refusal(lambda: plugin.create(GRANT, {**P, "topic": "tasks", "role": role, "member": member}))

    assert "not exist" in refused.message


def test_grant_made_by_two_resources_is_refused_and_by_one_twice_is_fine(plugin: PluginClient, cloud: Cloud) -> None:
    plugin.create(TOPIC, topic())
    grant = {**P, "topic": "tasks", "role": "roles/pubsub.publisher", "member": "group:lab@example.com"}
    plugin.create(GRANT, grant, "one")
    plugin.create(GRANT, grant, "one")

    assert refusal(lambda: plugin.create(GRANT, grant, "two")).code is grpc.StatusCode.ALREADY_EXISTS


def test_grant_of_another_stack_is_the_same_one_and_goes_with_either(plugin: PluginClient, cloud: Cloud) -> None:
    plugin.create(TOPIC, topic())
    grant = {**P, "topic": "tasks", "role": "roles/pubsub.publisher", "member": "group:lab@example.com"}
    id_, state = plugin.create(GRANT, grant)
    with cloud.change() as world:
        world.resources[id_]["urn"] = world.resources[id_]["urn"].replace("urn:pulumi:dev", "urn:pulumi:other")

    again, _ = plugin.create(GRANT, grant)
    own, _ = plugin.create(GRANT, {**grant, "condition": {"title": "stack dev", "expression": "true"}})
    plugin.delete(GRANT, id_, state)

    assert again == id_
    assert cloud.ids("IAMMember") == [own]


@pytest.mark.parametrize(
    ("type_", "inputs"),
    [
        (SUBSCRIPTION, topic(topic=f"projects/{PROJECT}/topics/nowhere")),
        (GRANT, {**P, "topic": "nowhere", "role": "roles/viewer", "member": "group:lab@example.com"}),
        (
            INSTANCE,
            {
                **P,
                "name": "head",
                "zone": "us-west4-a",
                "machineType": "n2-standard-8",
                "bootDisk": {"initializeParams": {"image": "i"}},
                "networkInterfaces": [{"subnetwork": f"projects/{PROJECT}/regions/us-west4/subnetworks/nowhere"}],
            },
        ),
    ],
)
def test_thing_that_refers_to_nothing_is_refused(
    plugin: PluginClient, cloud: Cloud, type_: str, inputs: dict[str, Any]
) -> None:
    assert refusal(lambda: plugin.create(type_, inputs)).code is grpc.StatusCode.NOT_FOUND


def machine(
    machine_type: str, disk: str | None, maintenance: str, image: str = "debian-12-v20260915"
) -> dict[str, Any]:
    disk_type = {} if disk is None else {"type": disk}
    return {
        **P,
        "name": "head",
        "zone": "us-west4-a",
        "machineType": machine_type,
        "bootDisk": {"initializeParams": {"image": f"projects/debian-cloud/global/images/{image}", **disk_type}},
        "networkInterfaces": [{}],
        "scheduling": {"onHostMaintenance": maintenance},
    }


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        (
            machine("n2-standard-7", "pd-balanced", "MIGRATE"),
            "Machine type with name 'n2-standard-7' does not exist in zone 'us-west4-a'.",
        ),
        *(
            (
                machine(each, "pd-balanced", "TERMINATE"),
                f"[pd-balanced, {each}] features are not compatible for creating instance.",
            )
            for each in ("c4-standard-16", "x4-megamem-480-metal", "a4-highgpu-8g")
        ),
        (
            machine("n2-standard-8", "hyperdisk-balanced", "MIGRATE"),
            "[hyperdisk-balanced, n2-standard-8] features are not compatible for creating instance.",
        ),
        *(
            (machine(each, None, "MIGRATE"), "Instances with guest accelerators do not support live migration.")
            for each in ("a3-highgpu-8g", "g2-standard-4")
        ),
        (machine("h3-standard-88", None, "MIGRATE"), "[h3-standard-88, MIGRATE] features are not compatible"),
        (
            machine("n2-standard-8", "pd-balanced", "MIGRATE", "debian-12-bookworm-arm64-v20260915"),
            "'Requested boot disk architecture (ARM64) is not compatible with machine type architecture (X86_64).'",
        ),
        (
            machine("c4a-standard-8", "hyperdisk-balanced", "MIGRATE"),
            "'Requested boot disk architecture (X86_64) is not compatible with machine type architecture (ARM64).'",
        ),
    ],
)
def test_machine_that_google_cannot_make_is_refused_in_googles_words(
    plugin: PluginClient, cloud: Cloud, inputs: dict[str, Any], said: str
) -> None:
    assert said in refusal(lambda: plugin.create(INSTANCE, inputs)).message


def test_machine_changed_to_a_type_that_its_disk_does_not_fit_is_refused(plugin: PluginClient, cloud: Cloud) -> None:
    old = {**machine("n2-standard-8", "pd-balanced", "MIGRATE"), "allowStoppingForUpdate": True}
    id_, _ = plugin.create(INSTANCE, old)

    refused = refusal(lambda: plugin.update(INSTANCE, id_, old, {**old, "machineType": "c4-standard-8"}))

    assert "[pd-balanced, c4-standard-8] features are not compatible" in refused.message


def test_boot_disk_grows_in_place_and_never_shrinks(plugin: PluginClient, cloud: Cloud) -> None:
    old = machine("n2-standard-8", "pd-balanced", "MIGRATE")
    sized = [
        {**old, "bootDisk": {"initializeParams": {**old["bootDisk"]["initializeParams"], "size": gb}}}
        for gb in (200, 300)
    ]
    id_, _ = plugin.create(INSTANCE, sized[0])

    grown = plugin.update(INSTANCE, id_, sized[0], sized[1])
    refused = refusal(lambda: plugin.update(INSTANCE, id_, sized[1], sized[0]))

    assert grown["bootDisk"]["initializeParams"]["size"] == 300
    assert "is smaller than the 300 GB of the disk" in refused.message


def test_firewall_cannot_move_to_another_network_in_place(plugin: PluginClient, cloud: Cloud) -> None:
    networks = [plugin.create(NETWORK, {**P, "name": name}, name)[0] for name in ("a", "b")]
    rule = {**P, "name": "ssh", "sourceRanges": ["10.0.0.0/8"], "allows": [{"protocol": "tcp"}]}
    id_, _ = plugin.create(FIREWALL, {**rule, "network": networks[0]})

    refused = refusal(
        lambda: plugin.update(FIREWALL, id_, {**rule, "network": networks[0]}, {**rule, "network": networks[1]})
    )

    assert "`network` cannot change" in refused.message


def test_grant_to_a_member_in_another_case_is_the_same_grant(plugin: PluginClient, cloud: Cloud) -> None:
    plugin.create(TOPIC, topic())
    grants = [
        {**P, "topic": "tasks", "role": "roles/pubsub.publisher", "member": f"user:{name}@example.com"}
        for name in ("Ada", "ada")
    ]
    plugin.create(GRANT, grants[0])

    assert "already exists" in refusal(lambda: plugin.create(GRANT, grants[1], "again")).message


def test_firewall_in_a_network_of_another_project_is_refused_in_googles_words(
    plugin: PluginClient, cloud: Cloud
) -> None:
    plugin.create(SERVICE, {"project": "host-project", "service": "compute.googleapis.com"}, "host-compute")
    network, _ = plugin.create(NETWORK, {"project": "host-project", "name": "shared"}, "shared")
    rule = {"name": "ssh", "network": network, "sourceRanges": ["10.0.0.0/8"], "allows": [{"protocol": "tcp"}]}

    refused = refusal(lambda: plugin.create(FIREWALL, {**P, **rule}))
    made, _ = plugin.create(FIREWALL, {**rule, "project": "host-project"})

    assert "Cross project referencing is not allowed for this resource." in refused.message
    assert made == "projects/host-project/global/firewalls/ssh"


def test_account_made_again_has_lost_its_grants(plugin: PluginClient, cloud: Cloud) -> None:
    account = {**P, "accountId": "dev-worker"}
    id_, state = plugin.create(ACCOUNT, account)
    plugin.create(TOPIC, topic())
    grant = {**P, "topic": "tasks", "role": "roles/pubsub.publisher", "member": state["member"]}
    grant_id, _ = plugin.create(GRANT, grant)

    plugin.delete(ACCOUNT, id_, state)
    _, again = plugin.create(ACCOUNT, account)

    assert again["uniqueId"] != state["uniqueId"]
    assert plugin.read(GRANT, grant_id, grant) is None


# deletion


def test_identity_pool_deleted_keeps_its_name_for_thirty_days_and_cannot_be_imported(
    plugin: PluginClient, cloud: Cloud
) -> None:
    inputs = {**P, "workloadIdentityPoolId": "dev-ci"}
    id_, state = plugin.create(POOL, inputs)
    plugin.delete(POOL, id_, state)

    refused = refusal(lambda: plugin.create(POOL, inputs))
    imported = plugin.read(POOL, id_)
    with cloud.change() as world:
        world.deleted[id_]["days"] = 30
    plugin.create(POOL, inputs)

    assert (refused.code, imported) == (grpc.StatusCode.ALREADY_EXISTS, None)


@pytest.mark.parametrize(("days", "comes_back"), [(0, True), (6, True), (7, False), (36, False), (37, True)])
def test_custom_role_deleted_comes_back_within_a_week_and_then_blocks_its_name(
    plugin: PluginClient, cloud: Cloud, days: int, comes_back: bool
) -> None:
    inputs = {**P, "roleId": "dev_head", "title": "t", "permissions": ["tpu.nodes.list"]}
    id_, state = plugin.create(ROLE, inputs)
    plugin.delete(ROLE, id_, state)
    with cloud.change() as world:
        world.deleted[id_]["days"] = days

    if comes_back:
        assert plugin.create(ROLE, inputs)[0] == id_
    else:
        assert refusal(lambda: plugin.create(ROLE, inputs)).code is grpc.StatusCode.ALREADY_EXISTS


def test_api_is_switched_off_only_by_those_who_say_so(plugin: PluginClient, cloud: Cloud) -> None:
    id_ = f"{PROJECT}/pubsub.googleapis.com"

    plugin.delete(SERVICE, id_, {"disableOnDestroy": False})
    kept = id_ in cloud.world().resources
    plugin.delete(SERVICE, id_, {"disableOnDestroy": True})

    assert (kept, id_ in cloud.world().resources) == (True, False)


def test_bucket_with_objects_is_deleted_only_by_force(plugin: PluginClient, cloud: Cloud) -> None:
    id_, state = plugin.create(BUCKET, {**P, "name": "lab-records", "location": "us-west4"})
    with cloud.change() as world:
        world.resources[id_]["outputs"]["objects"] = 3

    refused = refusal(lambda: plugin.delete(BUCKET, id_, state))
    plugin.delete(BUCKET, id_, {**state, "forceDestroy": True})

    assert "not empty" in refused.message
    assert cloud.ids("Bucket") == []


def test_deletion_policy_prevents_and_abandons(plugin: PluginClient, cloud: Cloud) -> None:
    id_, state = plugin.create(TOPIC, topic(deletionPolicy="PREVENT"))

    refused = refusal(lambda: plugin.delete(TOPIC, id_, state))
    plugin.delete(TOPIC, id_, {**state, "deletionPolicy": "ABANDON"})

    assert "PREVENT" in refused.message
    assert cloud.ids("Topic") == [id_]


def test_disk_in_use_is_not_deleted(plugin: PluginClient, cloud: Cloud) -> None:
    disk = {**P, "name": "head-state", "zone": "us-west4-a", "size": 200}
    disk_id, disk_state = plugin.create(DISK, disk)
    machine = {**P, "name": "head", "zone": "us-west4-a", "machineType": "n2-standard-8"}
    machine |= {"bootDisk": {"initializeParams": {"image": "i"}}, "networkInterfaces": [{}]}
    machine_id, state = plugin.create(INSTANCE, {**machine, "attachedDisks": [{"source": disk_id}]})

    refused = refusal(lambda: plugin.delete(DISK, disk_id, disk_state))
    plugin.delete(INSTANCE, machine_id, state)
    plugin.delete(DISK, disk_id, disk_state)

    assert machine_id in refused.message


# changes


@pytest.mark.parametrize(
    ("type_", "old", "new", "paths", "replaces"),
    [
        (TOPIC, topic(), topic("others"), ["name"], ["name"]),
        (TOPIC, topic(), topic(labels={"a": "b"}), ["labels"], []),
        (TOPIC, topic(), {**topic(), "project": "other-project"}, ["project"], ["project"]),
        (SUBSCRIPTION, topic(topic="a"), topic(topic="b"), ["topic"], ["topic"]),
        (SUBSCRIPTION, topic(ackDeadlineSeconds=10), topic(ackDeadlineSeconds=60), ["ackDeadlineSeconds"], []),
        (SECRET, {"replication": {"auto": {}}}, {"replication": {}}, ["replication.auto"], ["replication"]),
        (REPOSITORY, {"location": "us-west4"}, {"location": "us-west1"}, ["location"], ["location"]),
        (DISK, {"size": 100}, {"size": 200}, ["size"], []),
        (DISK, {"size": 200}, {"size": 100}, ["size"], ["size"]),
        (GRANT, {"role": "roles/a"}, {"role": "roles/b"}, ["role"], ["role"]),
        (INSTANCE, {"metadata": {"startup-script": "a"}}, {"metadata": {"startup-script": "b"}}, None, []),
        (INSTANCE, {"metadataStartupScript": "a"}, {"metadataStartupScript": "b"}, None, ["metadataStartupScript"]),
        (TOPIC, topic(labels={"a": "1"}), topic(labels={"a": 1}), ["labels.a"], []),
        (TOPIC, topic(labels={"a": "1"}), topic(labels={"a": UNKNOWN}), ["labels.a"], []),
    ],
)
def test_diff_names_what_changes_and_what_cannot_change_in_place(
    plugin: PluginClient,
    type_: str,
    old: dict[str, Any],
    new: dict[str, Any],
    paths: list[str] | None,
    replaces: list[str],
) -> None:
    found, found_replaces = plugin.diff(type_, old, new)

    assert found_replaces == replaces
    assert found == paths if paths is not None else found


def test_diff_leaves_out_what_is_ignored_and_nothing_else(plugin: PluginClient) -> None:
    old = topic(labels={"ray-node-status": "setting-up", "team": "a"})
    new = topic(labels={"ray-node-status": "up-to-date", "team": "b"})

    assert plugin.diff(TOPIC, old, new, ignore=['labels["ray-node-status"]']) == (["labels.team"], [])
    assert plugin.diff(TOPIC, old, new, ignore=["labels"]) == ([], [])


def test_update_of_what_cannot_change_is_refused(plugin: PluginClient, cloud: Cloud) -> None:
    id_, _ = plugin.create(TOPIC, topic())

    assert "`name` cannot change" in refusal(lambda: plugin.update(TOPIC, id_, topic(), topic("other"))).message


def test_update_of_what_is_gone_is_refused(plugin: PluginClient, cloud: Cloud) -> None:
    assert refusal(lambda: plugin.update(TOPIC, "gone", topic(), topic())).code is grpc.StatusCode.NOT_FOUND


def test_machine_type_changes_only_where_the_machine_may_be_stopped(plugin: PluginClient, cloud: Cloud) -> None:
    old = {**P, "name": "head", "zone": "us-west4-a", "machineType": "n2-standard-8"}
    old |= {"bootDisk": {"initializeParams": {"image": "i"}}, "networkInterfaces": [{}]}
    new = {**old, "machineType": "n2-standard-16"}
    id_, _ = plugin.create(INSTANCE, old)

    refused = refusal(lambda: plugin.update(INSTANCE, id_, old, new))
    plugin.update(INSTANCE, id_, old, {**new, "allowStoppingForUpdate": True})

    assert "allow_stopping_for_update" in refused.message


# import


def test_import_brings_defaults_of_what_google_does_not_keep(plugin: PluginClient, cloud: Cloud) -> None:
    inputs = {**P, "name": "lab-records", "location": "us-west4", "forceDestroy": True, "deletionPolicy": "ABANDON"}
    id_, _ = plugin.create(BUCKET, inputs)

    found = plugin.read(BUCKET, id_)

    assert found is not None
    assert found.inputs == {**inputs, "forceDestroy": False, "deletionPolicy": "DELETE"}


# faults


def test_injected_fault_happens_once_for_what_it_fits_and_is_written_down(plugin: PluginClient, cloud: Cloud) -> None:
    cloud.inject(Fault(type="Topic", name="dead", message="500: backend error"))

    plugin.create(TOPIC, topic("tasks"), "tasks")
    refused = refusal(lambda: plugin.create(TOPIC, topic("dead"), "dead"))
    left = cloud.faults()
    plugin.create(TOPIC, topic("dead"), "dead")

    assert (refused.message, left) == ("500: backend error", [])
    assert [each["urn"].rpartition("::")[2] for each in cloud.calls("create")][-3:] == ["tasks", "dead", "dead"]


@pytest.mark.parametrize(("when", "made"), [("before", []), ("after", [f"projects/{PROJECT}/topics/tasks"])])
def test_hanging_call_ends_when_the_engine_cancels_and_leaves_what_was_made(
    tmp_path: Path, when: str, made: list[str]
) -> None:
    cloud = Cloud(tmp_path)
    with PluginClient("gcp", {FOLDER_VARIABLE: str(tmp_path)}, P) as plugin:
        plugin.create(SERVICE, {**P, "service": "pubsub.googleapis.com"})
        cloud.inject(Fault(type="Topic", hang=when))
        refusals: list[CallRefused] = []
        call = threading.Thread(target=lambda: refusals.append(refusal(lambda: plugin.create(TOPIC, topic()))))
        call.start()
        assert wait_until(lambda: bool(cloud.calls("hang")))
        still_there = call.is_alive()
        plugin.cancel()
        call.join()

    assert still_there
    assert [each.code for each in refusals] == [grpc.StatusCode.CANCELLED]
    assert cloud.ids("Topic") == made


def test_plugin_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    program = f"""
import subprocess, time
plugin = subprocess.Popen([{str(Path(__file__).parent / "plugins" / "pulumi-resource-gcp")!r}], stdout=subprocess.PIPE)
plugin.stdout.readline()
print(plugin.pid, flush=True)
time.sleep(60)
"""
    environment = {**os.environ, "PLUGIN_PYTHON": sys.executable, FOLDER_VARIABLE: str(tmp_path)}
    engine = subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)
    assert engine.stdout is not None
    pid = int(engine.stdout.readline())

    engine.kill()
    engine.wait()
    engine.stdout.close()

    assert wait_until(lambda: not _runs(pid))


def _runs(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def test_version_is_that_of_the_sdk(plugin: PluginClient) -> None:
    from importlib.metadata import version

    assert plugin.version == version("pulumi-gcp")


# the emulator


def test_topics_and_subscriptions_come_and_go_in_the_emulator(pubsub_emulator: PubsubEmulator, tmp_path: Path) -> None:
    from google.pubsub_v1 import PublisherClient, SubscriberClient

    environment = {FOLDER_VARIABLE: str(tmp_path), **pubsub_emulator.environment}
    path = f"projects/{PROJECT}"
    with PluginClient("gcp", environment, P) as plugin, SubscriberClient() as client:
        plugin.create(SERVICE, {**P, "service": "pubsub.googleapis.com"})
        dead_id, _ = plugin.create(TOPIC, topic("dead"), "dead")
        topic_id, _ = plugin.create(TOPIC, topic(), "tasks")
        inputs = topic(
            topic=topic_id,
            ackDeadlineSeconds=60,
            deadLetterPolicy={"deadLetterTopic": dead_id, "maxDeliveryAttempts": 100},
            expirationPolicy={"ttl": ""},
            messageRetentionDuration="2678400s",
            enableExactlyOnceDelivery=True,
        )
        id_, state = plugin.create(SUBSCRIPTION, inputs)
        made = client.get_subscription(subscription=id_)
        plugin.update(SUBSCRIPTION, id_, inputs, {**inputs, "ackDeadlineSeconds": 120})
        changed = client.get_subscription(subscription=id_)
        client.delete_subscription(subscription=id_)
        gone = plugin.read(SUBSCRIPTION, id_, inputs, state)
        plugin.delete(TOPIC, topic_id, {})
        left = [each.name for each in PublisherClient().list_topics(project=path)]

    assert (made.ack_deadline_seconds, changed.ack_deadline_seconds) == (60, 120)
    assert made.dead_letter_policy.max_delivery_attempts == 100
    assert made.enable_exactly_once_delivery
    assert (gone, left) == (None, [f"{path}/topics/dead"])


def test_failure_of_a_check_names_the_path_and_the_reason(plugin: PluginClient) -> None:
    [failure] = plugin.check(TOPIC, topic(labls={}))

    assert failure == Failure("labls", "is no input here; did you mean `labels`?")
