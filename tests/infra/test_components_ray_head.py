"""The Ray head: its resources and permissions, and the changes that follow from a changed pool."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable
from typing import Any

import pulumi
import pytest

from infra import naming
from infra.check.recording import UNKNOWN, Recording, Registration
from infra.components.ray_head import (
    BOOT_LABELS,
    HEAD_PERMISSIONS,
    RAY_WRITES,
    REAPER_PERMISSIONS,
    SNAPSHOT_LABELS,
    NodeRoles,
    NodeRolesArgs,
    RayHead,
    RayHeadArgs,
    SecretVariable,
)
from infra.policy.base import ADDRESS, SCHEDULE, SCHEDULED_DISK, StackBounds
from infra.policy.rules import apply_rules
from infra.render.autoscaler import render_autoscaler
from infra.render.cluster import RayCluster, SecretReference
from infra.settings.model import HeadSettings, TpuPoolSettings
from infra.settings.read import InvalidSettings
from tests.infra.components_support import NODE_ROLES, PROJECT, SERVICES, make_apis, run, sample_site
from tests.infra.provider_types import find_input_problems

CUSTOM_ROLE = "gcp:projects/iAMCustomRole:IAMCustomRole"
IMAGE = f"us-west4-docker.pkg.dev/{PROJECT}/marin/cluster@sha256:" + "a" * 64
V5E = TpuPoolSettings(accelerator="v5litepod-1", runtime_version="v2-alpha-tpuv5-lite")
SETTINGS = HeadSettings(image=IMAGE, pools={"v5e": V5E})
SECRET = f"projects/{PROJECT}/secrets/marin-hf-token"
NETWORK = f"projects/{PROJECT}/global/networks/marin"
SUBNET = f"projects/{PROJECT}/regions/us-west4/subnetworks/marin"
APIS = (*SERVICES, "tpu", "logging", "iap", "oslogin")


def sample_args(**fields: Any) -> RayHeadArgs:
    own: dict[str, Any] = {
        "site": sample_site(),
        "zone": "us-west4-a",
        "head": "main",
        "settings": SETTINGS,
        "network": NETWORK,
        "subnet": SUBNET,
        "cidr": "10.64.0.0/20",
        "node_role": NODE_ROLES["head"],
        "environment": {"hf-token": SecretVariable(env="HF_TOKEN", resource=SECRET)},
        "repositories": {"images-us-west4": f"projects/{PROJECT}/locations/us-west4/repositories/marin"},
        "operators": {"operators": "group:operators@example.org"},
    }
    return RayHeadArgs(**(own | fields))


def recorded(**fields: Any) -> Recording:
    return run(
        lambda opts: RayHead("main-head", sample_args(apis=fields.pop("apis", make_apis(opts, *APIS)), **fields), opts)
    )


def vm(recording: Recording) -> Registration:
    return recording.named("gcp:compute/instance:Instance", "main-head-vm")


def of_head(recording: Recording) -> list[Registration]:
    return [each for each in recording.resources if each.name.startswith("main-head")]


def grants(recording: Recording, types: Iterable[str] = ("IAMMember", "IamMember")) -> dict[str, tuple[str, str]]:
    return {
        each.name: (each.inputs["role"], each.inputs["member"])
        for each in recording.resources
        if each.type.endswith(tuple(types)) and each.name.startswith("main-head")
    }


@pytest.mark.parametrize(
    ("machine_type", "disk", "maintenance"),
    [
        ("n2-standard-8", "pd-balanced", "MIGRATE"),
        ("c4-standard-8", "hyperdisk-balanced", "MIGRATE"),
        ("x4-megamem-480-metal", "hyperdisk-balanced", "TERMINATE"),
        ("g2-standard-8", "pd-balanced", "TERMINATE"),
    ],
)
def test_head_of_each_family_gets_the_disk_and_the_maintenance_that_google_takes(
    machine_type: str, disk: str, maintenance: str
) -> None:
    machine = vm(recorded(settings=dataclasses.replace(SETTINGS, machine_type=machine_type)))

    assert machine.inputs["bootDisk"]["initializeParams"]["type"] == disk
    assert machine.inputs["scheduling"]["onHostMaintenance"] == maintenance


def test_head_passes_the_providers_types_and_every_policy() -> None:
    recording = recorded()

    problems = {
        each.name: found
        for each in recording.resources
        if each.custom and each.type.startswith("gcp:") and (found := find_input_problems(each.type, each.inputs))
    }
    assert problems == {}
    others = frozenset(sample_args().operators.values())
    assert apply_rules(recording.resources, StackBounds(members=others)) == []


def test_head_vm_is_closed_kept_and_what_ray_looks_for() -> None:
    machine = vm(recorded())
    inputs = {key: value for key, value in machine.inputs.items() if key != "metadata"}

    assert inputs == {
        "project": PROJECT,
        "zone": "us-west4-a",
        "name": "ray-marin-main-head-56060c82-compute",
        "machineType": "n2-standard-8",
        "bootDisk": {
            "autoDelete": True,
            "initializeParams": {
                "image": SETTINGS.boot_image,
                "size": 200,
                "type": "pd-balanced",
                "labels": sample_site().labels,
            },
        },
        "networkInterfaces": [{"subnetwork": SUBNET, "networkIp": UNKNOWN}],
        "serviceAccount": {
            "email": f"marin-main-head@{PROJECT}.iam.gserviceaccount.com",
            "scopes": ["https://www.googleapis.com/auth/cloud-platform"],
        },
        "shieldedInstanceConfig": {"enableSecureBoot": True, "enableVtpm": True, "enableIntegrityMonitoring": True},
        "scheduling": {
            "automaticRestart": True,
            "onHostMaintenance": "MIGRATE",
            "preemptible": False,
            "provisioningModel": "STANDARD",
        },
        "tags": ["marin-main"],
        "labels": {
            **sample_site().labels,
            "ray-cluster-name": "marin-main",
            "ray-node-name": "ray-marin-main-head",
            "ray-node-status": "up-to-date",
            "ray-node-type": "head",
            "ray-user-node-type": "ray_head",
        },
        "deletionProtection": True,
        "deletionPolicy": "PREVENT",
        "allowStoppingForUpdate": True,
    }
    assert (machine.protect, machine.delete_before_replace) == (True, True)
    assert machine.ignore_changes == (*(f'labels["{key}"]' for key in RAY_WRITES), BOOT_LABELS)


def test_head_metadata_has_the_boot_script_and_the_rendered_file_under_keys_of_their_own() -> None:
    recording = recorded()
    metadata = vm(recording).inputs["metadata"]
    (component,) = recording.of_type("runtime:ray:RayHead")

    cluster = RayCluster(
        name="marin-main",
        key="main",
        stack="marin",
        project=PROJECT,
        region="us-west4",
        zone="us-west4-a",
        head="ray-marin-main-head-56060c82-compute",
        machine_type="n2-standard-8",
        image=IMAGE,
        network=NETWORK,
        subnet=SUBNET,
        node_email=f"marin-main-node@{PROJECT}.iam.gserviceaccount.com",
        pools=SETTINGS.pools,
        secrets=(SecretReference(env="HF_TOKEN", resource=SECRET),),
        labels=sample_site().labels,
    )
    assert metadata["ray-autoscaler"] == render_autoscaler(cluster)
    digest = hashlib.sha256(metadata["ray-autoscaler"].encode()).hexdigest()
    assert component.outputs["config_sha256"] == digest
    assert f"CONFIG_SHA256={digest}" in metadata["startup-script"]
    assert {key: metadata[key] for key in metadata if not key.startswith("ray-") and key != "startup-script"} == {
        "block-project-ssh-keys": "TRUE",
        "enable-guest-attributes": "TRUE",
        "enable-oslogin": "TRUE",
        "serial-port-enable": "FALSE",
    }
    # A change of this input would replace the VM, and its script runs on the first boot only.
    assert "metadataStartupScript" not in vm(recording).inputs


def test_head_accounts_are_protected_and_may_do_what_ray_calls_and_no_more() -> None:
    recording = recorded()
    head = f"serviceAccount:marin-main-head@{PROJECT}.iam.gserviceaccount.com"
    node = f"serviceAccount:marin-main-node@{PROJECT}.iam.gserviceaccount.com"
    operators = "group:operators@example.org"

    accounts = recording.of_type("gcp:serviceaccount/account:Account")
    assert [(each.name, each.protect) for each in accounts] == [
        ("main-head-head-account", True),
        ("main-head-node-account", True),
    ]
    head_role = NODE_ROLES["head"]
    assert grants(recording) == {
        "main-head-head-tpus": (head_role, head),
        "main-head-head-acts-as-node": ("roles/iam.serviceAccountUser", head),
        "main-head-head-logging": ("roles/logging.logWriter", head),
        "main-head-head-monitoring": ("roles/monitoring.metricWriter", head),
        "main-head-head-pulls-images-us-west4": ("roles/artifactregistry.reader", head),
        "main-head-head-reads-hf-token": ("roles/secretmanager.secretAccessor", head),
        "main-head-node-logging": ("roles/logging.logWriter", node),
        "main-head-node-monitoring": ("roles/monitoring.metricWriter", node),
        "main-head-node-pulls-images-us-west4": ("roles/artifactregistry.reader", node),
        "main-head-node-reads-hf-token": ("roles/secretmanager.secretAccessor", node),
        "main-head-node-user-operators": ("roles/iam.serviceAccountUser", operators),
        "main-head-head-user-operators": ("roles/iam.serviceAccountUser", operators),
    }
    acts = recording.named("gcp:serviceaccount/iAMMember:IAMMember", "main-head-head-acts-as-node")
    assert acts.inputs["serviceAccountId"].endswith(
        f"/serviceAccounts/marin-main-node@{PROJECT}.iam.gserviceaccount.com"
    )


def record_roles(**site: Any) -> Recording:
    args = {"ids": naming.NODE_ROLES, "operators": {"ops": "group:ops@example.org"}}
    return run(
        lambda opts: NodeRoles(
            "nodes", NodeRolesArgs(site=sample_site(**site), apis=make_apis(opts, *APIS), **args), opts
        )
    )


def test_node_roles_have_the_permissions_of_rays_calls_and_operators_have_the_reapers() -> None:
    recording = record_roles()

    roles = {each.name: each for each in recording.of_type(CUSTOM_ROLE)}
    assert {name: tuple(role.inputs["permissions"]) for name, role in roles.items()} == {
        "nodes-head-role": HEAD_PERMISSIONS,
        "nodes-reaper-role": REAPER_PERMISSIONS,
    }
    assert all(role.retain_on_delete for role in roles.values())
    (grant,) = recording.of_type("gcp:projects/iAMMember:IAMMember")
    assert (grant.inputs["role"], grant.inputs["member"]) == (NODE_ROLES["reaper"], "group:ops@example.org")
    assert apply_rules(recording.resources, StackBounds(members=frozenset({"group:ops@example.org"}))) == []


def test_node_roles_that_survived_are_taken_over() -> None:
    roles = record_roles(adopt=True).of_type(CUSTOM_ROLE)

    assert {each.import_id for each in roles} == set(NODE_ROLES.values())
    assert {each.ignore_changes for each in roles} == {()}


def test_head_without_protection_can_go() -> None:
    recording = recorded(site=sample_site(protect=False))
    inputs = vm(recording).inputs

    assert not any(each.protect for each in of_head(recording))
    assert (inputs["deletionProtection"], inputs["deletionPolicy"]) == (False, "DELETE")


def test_head_firewall_lets_in_googles_proxy_for_ssh_and_the_own_range_for_ray() -> None:
    rules = {each.name: each.inputs for each in recorded().of_type("gcp:compute/firewall:Firewall")}

    ssh, cluster = rules["main-head-ssh-firewall"], rules["main-head-cluster-firewall"]
    assert (ssh["sourceRanges"], ssh["allows"]) == (["35.235.240.0/20"], [{"protocol": "tcp", "ports": ["22"]}])
    assert cluster["sourceRanges"] == ["10.64.0.0/20"]
    assert {rule["targetTags"][0] for rule in rules.values()} == {"marin-main"}
    opened = {port for allow in cluster["allows"] for port in allow.get("ports", [])}
    assert opened == {
        *("22", "6379", "6380", "6381", "6382", "6383", "8080", "10001", "10002-19999"),
        *("44217", "44227", "52365"),
    }


def test_head_lets_people_of_a_vpn_in_by_ssh() -> None:
    rules = {
        each.name: each.inputs for each in recorded(ssh_cidrs=["10.8.0.0/16"]).of_type("gcp:compute/firewall:Firewall")
    }

    assert rules["main-head-ssh-firewall"]["sourceRanges"] == ["35.235.240.0/20", "10.8.0.0/16"]


def test_head_waits_for_its_grants_and_everything_is_its_child() -> None:
    recording = recorded()
    (component,) = recording.of_type("runtime:ray:RayHead")
    machine = vm(recording)
    names = {urn.rpartition("::")[2] for urn in machine.dependencies}

    needed = {name for name in grants(recording) if not any(each in name for each in ("operators", "-reaper"))}
    assert needed | {"main-head-ssh-firewall", "main-head-cluster-firewall"} <= names
    assert {each.parent for each in of_head(recording) if each is not component} == {component.urn}


def test_head_in_a_network_of_another_project_makes_no_firewall_and_is_made() -> None:
    recording = recorded(firewalls=False, network="projects/host/global/networks/shared")

    assert recording.of_type("gcp:compute/firewall:Firewall") == []
    assert vm(recording).inputs["tags"] == ["marin-main"]


def test_head_registers_what_it_offers() -> None:
    (component,) = recorded().of_type("runtime:ray:RayHead")
    outputs = dict(component.outputs)

    assert len(outputs.pop("config_sha256")) == 64
    outputs.pop("internal_ip")
    assert outputs == {
        "name": "ray-marin-main-head-56060c82-compute",
        "cluster_name": "marin-main",
        "zone": "us-west4-a",
        "image": IMAGE,
        "ports": {
            "gcs": 6379,
            "node_manager": 6380,
            "object_manager": 6381,
            "runtime_env_agent": 6382,
            "agent_grpc": 6383,
            "metrics": 8080,
            "dashboard": 8265,
            "client": 10001,
            "worker_min": 10002,
            "worker_max": 19999,
            "autoscaler_metrics": 44217,
            "dashboard_metrics": 44227,
            "agent": 52365,
        },
        "pools": {
            "v5e": {
                "accelerator": "v5litepod-1",
                "runtime_version": "v2-alpha-tpuv5-lite",
                "capacity": "preemptible",
                "min": 4,
                "max": 1024,
                "cpus": 12,
            }
        },
        "head_email": f"marin-main-head@{PROJECT}.iam.gserviceaccount.com",
        "node_email": f"marin-main-node@{PROJECT}.iam.gserviceaccount.com",
    }


def differences(before: Recording, after: Recording) -> dict[str, set[str]]:
    """Return resource → differing inputs (for metadata, its differing keys)."""
    found: dict[str, set[str]] = {}
    for old, new in zip(sorted(of_head(before), key=_urn), sorted(of_head(after), key=_urn), strict=True):
        changed = {key for key in old.inputs.keys() | new.inputs.keys() if old.inputs.get(key) != new.inputs.get(key)}
        if "metadata" in changed:
            pair = old.inputs["metadata"], new.inputs["metadata"]
            changed = changed - {"metadata"} | {key for key in pair[0] if pair[0][key] != pair[1].get(key)}
        if changed:
            found[new.name] = changed
    return found


def _urn(each: Registration) -> str:
    return each.urn


@pytest.mark.parametrize(
    ("change", "keys"),
    [
        ({"pools": {"v5e": dataclasses.replace(V5E, max=512)}}, {"ray-autoscaler", "ray-contract", "startup-script"}),
        ({"idle_minutes": 20}, {"ray-autoscaler", "ray-contract", "startup-script"}),
        (
            {"image": IMAGE.replace("a" * 64, "b" * 64)},
            {
                "ray-autoscaler",
                "ray-contract",
                "ray-head-service",
                "ray-reaper-service",
                "ray-settings",
                "startup-script",
            },
        ),
    ],
)
def test_changed_setting_changes_metadata_alone_and_of_it_only_what_it_must(
    change: dict[str, Any], keys: set[str]
) -> None:
    before, after = recorded(), recorded(settings=dataclasses.replace(SETTINGS, **change))

    assert differences(before, after) == {"main-head-vm": keys}


def test_same_head_twice_is_the_same_text() -> None:
    assert differences(recorded(), recorded()) == {}


def test_two_heads_of_one_stack_share_no_name() -> None:
    def both(opts: pulumi.ResourceOptions) -> None:
        apis = make_apis(opts, *APIS)
        RayHead("main-head", sample_args(apis=apis), opts)
        RayHead("second-head", sample_args(apis=apis, head="second"), opts)

    recording = run(both)
    physical = [
        each.inputs[key]
        for each in recording.resources
        for key in ("accountId", "roleId", "name")
        if each.custom and key in each.inputs and "-head" in each.name
    ]

    assert len(physical) == len(set(physical))


def test_head_has_a_reserved_address_of_the_subnet_that_is_protected_like_it() -> None:
    recording = recorded()
    address = recording.named(ADDRESS, "main-head-address")

    assert address.inputs == {
        "project": PROJECT,
        "region": "us-west4",
        "name": "marin-main-address",
        "description": "Head of Ray cluster marin-main",
        "addressType": "INTERNAL",
        "purpose": "GCE_ENDPOINT",
        "subnetwork": SUBNET,
        "labels": sample_site().labels,
        "deletionPolicy": "PREVENT",
    }
    assert address.protect
    assert address.urn in vm(recording).property_dependencies["networkInterfaces"]


def test_head_without_snapshot_days_has_no_schedule() -> None:
    assert not [each for each in of_head(recorded()) if each.type in (SCHEDULE, SCHEDULED_DISK)]


def test_head_with_snapshot_days_has_its_disk_on_a_schedule() -> None:
    recording = recorded(settings=dataclasses.replace(SETTINGS, snapshot_days=14))
    schedule = recording.named(SCHEDULE, "main-head-snapshots")
    attached = recording.named(SCHEDULED_DISK, "main-head-snapshots-of-disk")

    assert schedule.inputs["snapshotSchedulePolicy"] == {
        "schedule": {"dailySchedule": {"daysInCycle": 1, "startTime": "09:00"}},
        "retentionPolicy": {"maxRetentionDays": 14, "onSourceDiskDelete": "KEEP_AUTO_SNAPSHOTS"},
        "snapshotProperties": {"labels": sample_site().labels, "storageLocations": "us-west4"},
    }
    assert schedule.ignore_changes == (SNAPSHOT_LABELS,)
    assert (attached.inputs["disk"], attached.inputs["name"]) == (vm(recording).inputs["name"], schedule.inputs["name"])
    assert vm(recording).urn in attached.property_dependencies["disk"]
    for each in (schedule, attached):
        assert find_input_problems(each.type, each.inputs) == []
    others = frozenset(sample_args().operators.values())
    assert apply_rules(recording.resources, StackBounds(members=others, regions=frozenset({"us-west4"}))) == []


def test_settings_of_head_and_pools_reach_the_metadata() -> None:
    pool = dataclasses.replace(V5E, variables={"B": "pool"})
    settings = dataclasses.replace(
        SETTINGS, variables={"A": "x y"}, setup="echo 1\n", cloud_logging=False, pools={"v5e": pool}
    )

    metadata = vm(recorded(settings=settings)).inputs["metadata"]

    assert "export A='x y'\n" in metadata["ray-start"]
    assert "export B=pool\n" in metadata["ray-autoscaler"]
    assert metadata["ray-setup"] == "#!/bin/bash\nset -euo pipefail\necho 1\n"
    assert "--log-driver=json-file" in metadata["ray-head-service"]


def test_head_can_be_made_without_apis_secrets_or_people() -> None:
    recording = recorded(apis=None, environment={}, repositories={}, operators={})

    assert '"secrets": []' in vm(recording).inputs["metadata"]["ray-settings"]


@pytest.mark.parametrize(
    "settings",
    [
        HeadSettings(image="marin/cluster:latest", pools={"v5e": V5E}),
        HeadSettings(image=IMAGE, pools={"v5e": dataclasses.replace(V5E, min=9, max=8)}),
        HeadSettings(image=IMAGE, pools={"v5e": dataclasses.replace(V5E, accelerator="v5e-1")}),
    ],
)
def test_head_with_settings_that_cannot_be_is_refused_before_anything_is_made(settings: HeadSettings) -> None:
    made: list[Recording] = []

    with pytest.raises(InvalidSettings):
        made.append(recorded(settings=settings))
    assert made == []
