"""The resources of a workspace: whole objects, protection, and those that need only a namespace's rights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pulumi
import pulumi_kubernetes
import pytest

from infra.check.recording import Recording, Registration, record
from infra.components.workspace import Workspace, WorkspaceArgs, pod_defaults
from infra.export import export
from infra.program import build
from infra.settings.model import ClaimSettings, KubernetesAccess, NamespaceSettings, StackSettings
from infra.settings.read import InvalidSettings, find_problems
from tests.infra.provider_types import find_input_problems

LABELS = {"managed-by": "research-runtime", "stack": "lab"}
QUOTA = {"pods": "50"}


def record_workspace(settings: NamespaceSettings, *, preview: bool = True, **changes: Any) -> Recording:
    args = WorkspaceArgs(namespace="l2r", settings=settings, labels=LABELS)

    def program() -> None:
        provider = pulumi_kubernetes.Provider("cluster", context="lab", cluster_identifier="lab")
        workspace = Workspace("lab-l2r", replace(args, **changes), pulumi.ResourceOptions(providers=[provider]))
        pulumi.export("service_account", workspace.service_account)
        pulumi.export("claims", dict(workspace.claims))

    return record(program, stack="lab", preview=preview)


def objects(recording: Recording) -> dict[str, Registration]:
    """Logical name without the component's → object."""
    return {
        each.name.removeprefix("lab-l2r-"): each for each in recording.resources if each.type.startswith("kubernetes:")
    }


def kinds(recording: Recording) -> dict[str, str]:
    return {name: each.type.rpartition(":")[2] for name, each in objects(recording).items()}


def metadata(name: str) -> dict[str, Any]:
    return {"name": name, "namespace": "l2r", "labels": LABELS}


def spec(recording: Recording, name: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = objects(recording)[name].inputs["spec"]
    return found


FULL = NamespaceSettings(
    quota={"pods": "50", "requests.cpu": "64"},
    claims={"scratch": ClaimSettings(size="1Ti", storage_class="shared")},
    image_pull_secrets=("registry-login",),
    egress_cidrs=("10.8.0.0/16",),
    launchers=("Group:lab", "User:alice", "ServiceAccount:ci/deployer"),
)


@pytest.mark.parametrize("preview", [True, False])
def test_workspace_with_everything_makes_these_objects(preview: bool) -> None:
    recording = record_workspace(FULL, preview=preview)

    assert kinds(recording) == {
        "namespace": "Namespace",
        "quota": "ResourceQuota",
        "defaults": "LimitRange",
        "default-deny": "NetworkPolicy",
        "workers": "NetworkPolicy",
        "account": "ServiceAccount",
        "launchers-role": "Role",
        "launchers": "RoleBinding",
        "claim-scratch": "PersistentVolumeClaim",
    }
    assert recording.outputs == {"service_account": "runtime-job", "claims": {"scratch": "scratch"}}


def test_workspace_in_a_namespace_of_others_makes_nothing_outside_it() -> None:
    recording = record_workspace(replace(FULL, create=False))

    assert kinds(recording) == {
        "quota": "ResourceQuota",
        "defaults": "LimitRange",
        "default-deny": "NetworkPolicy",
        "workers": "NetworkPolicy",
        "account": "ServiceAccount",
        "launchers-role": "Role",
        "launchers": "RoleBinding",
        "claim-scratch": "PersistentVolumeClaim",
    }
    assert {each.inputs["metadata"]["namespace"] for each in objects(recording).values()} == {"l2r"}


def test_workspace_in_a_namespace_of_others_leaves_their_limits_alone_unless_told() -> None:
    recording = record_workspace(NamespaceSettings(create=False))

    assert kinds(recording) == {
        "default-deny": "NetworkPolicy",
        "workers": "NetworkPolicy",
        "account": "ServiceAccount",
        "launchers-role": "Role",
    }


def test_every_object_is_a_child_with_the_given_provider_and_stands_in_the_namespace() -> None:
    recording = record_workspace(FULL)

    (component,) = recording.of_type("runtime:kubernetes:Workspace")
    (provider,) = recording.of_type("pulumi:providers:kubernetes")
    namespace = objects(recording)["namespace"]
    for name, each in objects(recording).items():
        assert each.parent == component.urn
        assert (each.provider or "").startswith(provider.urn)
        assert each.delete_before_replace is True
        assert each.name.startswith("lab-l2r-")
        assert name == "namespace" or namespace.urn in each.dependencies
    assert component.outputs == {
        "namespace": "l2r",
        "service_account": "runtime-job",
        "claims": {"scratch": "scratch"},
    }


def test_every_object_is_one_that_the_provider_takes() -> None:
    recording = record_workspace(FULL, neighbours=("User:bob",), holds_slots=True)

    assert [
        problem for each in objects(recording).values() for problem in find_input_problems(each.type, each.inputs)
    ] == []


def test_misspelt_field_of_an_object_is_found() -> None:
    claim = objects(record_workspace(FULL))["claim-scratch"]

    (problem,) = find_input_problems(claim.type, {**claim.inputs, "spec": {"acessModes": ["ReadWriteMany"]}})

    assert problem.path == "spec.acessModes"


def test_what_holds_data_is_protected_and_outlives_a_destroy() -> None:
    recording = record_workspace(FULL)

    kept = {name: (each.protect, each.retain_on_delete) for name, each in objects(recording).items()}
    assert kept == dict.fromkeys(kept, (False, False)) | {"namespace": (True, True), "claim-scratch": (True, True)}


def test_stack_without_protection_still_keeps_the_data() -> None:
    recording = record_workspace(FULL, protect=False)

    kept = {name: (each.protect, each.retain_on_delete) for name, each in objects(recording).items()}
    assert kept == dict.fromkeys(kept, (False, False)) | {"namespace": (False, True), "claim-scratch": (False, True)}


def test_namespace_without_claims_goes_with_its_stack() -> None:
    namespace = objects(record_workspace(NamespaceSettings(quota=QUOTA), protect=False))["namespace"]

    assert (namespace.protect, namespace.retain_on_delete) == (False, False)


def test_namespace_bears_the_labels_and_a_pod_security_level() -> None:
    namespace = objects(record_workspace(FULL))["namespace"]

    assert namespace.inputs["metadata"] == {
        "name": "l2r",
        "labels": {
            **LABELS,
            "pod-security.kubernetes.io/enforce": "baseline",
            "pod-security.kubernetes.io/warn": "restricted",
            "pod-security.kubernetes.io/audit": "restricted",
        },
    }


def test_quota_is_the_settings_and_no_way_in_from_outside() -> None:
    recording = record_workspace(FULL)

    assert spec(recording, "quota") == {
        "hard": {"pods": "50", "requests.cpu": "64", "services.loadbalancers": "0", "services.nodeports": "0"}
    }
    assert spec(recording, "defaults") == {"limits": [{"type": "Container", "defaultRequest": {"cpu": "1"}}]}


def test_quota_of_the_settings_has_the_last_word() -> None:
    recording = record_workspace(NamespaceSettings(quota={"services.nodeports": "2"}))

    assert spec(recording, "quota") == {"hard": {"services.loadbalancers": "0", "services.nodeports": "2"}}


def test_network_is_closed_but_for_what_workers_need() -> None:
    recording = record_workspace(FULL)

    assert spec(recording, "default-deny") == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    assert spec(recording, "workers") == {
        "podSelector": {},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"from": [{"podSelector": {}}]}],
        "egress": [
            {"to": [{"podSelector": {}}]},
            {"ports": [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]},
            {"ports": [{"protocol": "TCP", "port": 443}]},
            {"to": [{"ipBlock": {"cidr": "10.8.0.0/16"}}]},
        ],
    }


def test_no_declared_range_opens_no_further_rule() -> None:
    egress = spec(record_workspace(replace(FULL, egress_cidrs=())), "workers")["egress"]

    assert egress == [
        {"to": [{"podSelector": {}}]},
        {"ports": [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]},
        {"ports": [{"protocol": "TCP", "port": 443}]},
    ]


@pytest.mark.parametrize(
    ("cidr", "without"),
    [
        ("0.0.0.0/0", ["169.254.0.0/16"]),
        ("::/0", ["fe80::/10", "fd20:ce::/32"]),
        ("fd00::/8", ["fd20:ce::/32"]),
        ("168.0.0.0/8", None),
    ],
)
def test_wide_range_leaves_out_where_credentials_of_nodes_are_served(cidr: str, without: list[str] | None) -> None:
    *_, last = spec(record_workspace(replace(FULL, egress_cidrs=(cidr,))), "workers")["egress"]

    assert last == {"to": [{"ipBlock": {"cidr": cidr} | ({"except": without} if without else {})}]}


def test_jobs_run_as_an_account_without_token_that_names_the_pull_secret() -> None:
    account = objects(record_workspace(FULL))["account"]

    assert account.inputs == {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata("runtime-job"),
        "automountServiceAccountToken": False,
        "imagePullSecrets": [{"name": "registry-login"}],
    }


def test_account_without_a_pull_secret_names_none() -> None:
    account = objects(record_workspace(replace(FULL, image_pull_secrets=())))["account"]

    assert "imagePullSecrets" not in account.inputs


def test_role_for_launching_is_this_and_no_more() -> None:
    role = objects(record_workspace(FULL))["launchers-role"]
    rights = {
        (group, resource): sorted(rule["verbs"])
        for rule in role.inputs["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }

    watching = ["get", "list", "watch"]
    making = sorted([*watching, "create", "delete", "patch"])
    assert role.inputs["metadata"] == metadata("runtime-launcher")
    assert rights == {
        ("batch", "jobs"): making,
        ("", "pods"): making,
        ("", "pods/log"): ["get"],
        ("", "pods/exec"): ["create", "get"],
        ("", "pods/eviction"): ["create"],
        ("", "configmaps"): making,
        ("", "secrets"): ["create"],
        ("", "services"): ["create", "delete", "get", "list"],
        ("", "events"): watching,
        ("", "persistentvolumeclaims"): ["get", "list"],
        ("", "resourcequotas"): ["get", "list"],
        ("", "limitranges"): ["get", "list"],
        ("coordination.k8s.io", "leases"): sorted([*making, "update"]),
    }


def test_launchers_are_bound_to_the_role_by_kind() -> None:
    binding = objects(record_workspace(FULL))["launchers"]

    rbac = "rbac.authorization.k8s.io"
    assert binding.inputs["roleRef"] == {"apiGroup": rbac, "kind": "Role", "name": "runtime-launcher"}
    assert binding.inputs["subjects"] == [
        {"kind": "Group", "name": "lab", "apiGroup": rbac},
        {"kind": "User", "name": "alice", "apiGroup": rbac},
        {"kind": "ServiceAccount", "name": "deployer", "namespace": "ci"},
    ]


def test_launcher_whose_name_has_colons_keeps_them() -> None:
    binding = objects(record_workspace(replace(FULL, launchers=("User:oidc:alice@lab.example",))))["launchers"]

    assert [each["name"] for each in binding.inputs["subjects"]] == ["oidc:alice@lab.example"]


def test_neighbours_may_ask_for_jobs_and_write_leases_only_where_the_slots_are() -> None:
    beside = objects(record_workspace(FULL, neighbours=("User:bob",)))
    holding = objects(record_workspace(FULL, neighbours=("User:bob",), holds_slots=True))

    bob = [{"kind": "User", "name": "bob", "apiGroup": "rbac.authorization.k8s.io"}]
    assert holding.keys() - beside.keys() == {"gpu-slots-role", "gpu-slots"}
    assert beside["job-readers"].inputs["subjects"] == holding["gpu-slots"].inputs["subjects"] == bob
    assert beside["job-readers-role"].inputs["rules"] == [
        {"apiGroups": ["batch"], "resources": ["jobs"], "verbs": ["get"]}
    ]
    assert [rule["resources"] for rule in holding["gpu-slots-role"].inputs["rules"]] == [["leases"]]


def test_slots_without_neighbours_need_no_role_of_their_own() -> None:
    assert kinds(record_workspace(FULL, holds_slots=True)) == kinds(record_workspace(FULL))


def test_claim_says_class_size_and_mode_and_is_not_waited_for() -> None:
    claim = objects(record_workspace(FULL))["claim-scratch"]

    assert claim.inputs == {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": metadata("scratch") | {"annotations": {"pulumi.com/skipAwait": "true"}},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "resources": {"requests": {"storage": "1Ti"}},
            "storageClassName": "shared",
        },
    }


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # The cluster's default class fills the gap.
        (ClaimSettings(size="1Gi"), {}),
        (ClaimSettings(size="1Gi", existing_volume="pv-7"), {"volumeName": "pv-7", "storageClassName": ""}),
        (
            ClaimSettings(size="1Gi", existing_volume="pv-7", storage_class="nfs"),
            {"volumeName": "pv-7", "storageClassName": "nfs"},
        ),
        (ClaimSettings(size="1Gi", storage_class=""), {"storageClassName": ""}),
    ],
)
def test_claim_names_the_volume_it_adopts_and_no_class_that_would_miss_it(
    settings: ClaimSettings, expected: dict[str, str]
) -> None:
    recording = record_workspace(NamespaceSettings(quota=QUOTA, claims={"data": settings}))

    asked = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    assert spec(recording, "claim-data") == asked | expected


def test_claim_that_is_there_already_is_used_and_not_made() -> None:
    settings = replace(FULL, claims={"l2r-persistent-claim": ClaimSettings(size="20Gi", existing=True)})
    recording = record_workspace(settings)

    assert not [each for each in kinds(recording).values() if each == "PersistentVolumeClaim"]
    assert recording.outputs["claims"] == {"l2r-persistent-claim": "l2r-persistent-claim"}
    assert objects(recording)["namespace"].retain_on_delete


@pytest.mark.parametrize(
    ("quota", "request_", "limit"),
    [
        ({"pods": "5"}, None, None),
        ({"requests.nvidia.com/gpu": "8"}, None, None),
        ({"cpu": "64", "memory": "1Ti"}, {"cpu": "1", "memory": "2Gi"}, None),
        ({"requests.memory": "1Gi"}, {"memory": "1Gi"}, None),
        ({"cpu": "500m", "requests.cpu": "2"}, {"cpu": "500m"}, None),
        ({"limits.cpu": "8"}, None, {"cpu": "1"}),
        ({"requests.cpu": "8", "limits.cpu": "500m"}, {"cpu": "500m"}, {"cpu": "500m"}),
    ],
)
def test_defaults_are_what_the_quota_counts_and_never_more_than_it_allows(
    quota: dict[str, str], request_: dict[str, str] | None, limit: dict[str, str] | None
) -> None:
    found = pod_defaults(quota)

    assert (found.default_request if found else None, found.default if found else None) == (request_, limit)


def test_wrong_settings_are_refused_before_anything_is_registered() -> None:
    wrong = NamespaceSettings(quota=QUOTA, launchers=("alice",), claims={"a": ClaimSettings(size="plenty")})

    with pytest.raises(InvalidSettings) as refused:
        record_workspace(wrong)

    assert {problem.path for problem in refused.value.problems} == {"lab-l2r.launchers[0]", "lab-l2r.claims.a.size"}


# a cluster with several namespaces


def record_cluster(slot_namespace: str | None) -> Recording:
    cluster = KubernetesAccess(
        context="lab",
        cluster_identifier="lab",
        server="https://lab.example:6443",
        slot_namespace=slot_namespace,
        namespaces={
            "one": NamespaceSettings(quota=QUOTA, launchers=("User:ann", "User:both")),
            "two": NamespaceSettings(quota=QUOTA, launchers=("User:bob", "User:both")),
        },
    )
    settings = StackSettings(stack="lab", kubernetes={"lab": cluster})
    return record(lambda: export(build(settings)), stack="lab")


def bound(recording: Recording) -> dict[str, list[str]]:
    bindings = recording.of_type("kubernetes:rbac.authorization.k8s.io/v1:RoleBinding")
    return {each.name: [who["name"] for who in each.inputs["subjects"]] for each in bindings}


def test_namespaces_know_nothing_of_each_other_by_default() -> None:
    recording = record_cluster(None)

    assert bound(recording) == {"lab-one-launchers": ["ann", "both"], "lab-two-launchers": ["bob", "both"]}
    assert "slot_namespace" not in recording.outputs["contract"]["kubernetes"]["lab"]


def test_namespaces_that_share_slots_let_the_others_launchers_write_them_and_see_jobs() -> None:
    recording = record_cluster("two")

    assert bound(recording) == {
        "lab-one-launchers": ["ann", "both"],
        "lab-one-job-readers": ["bob"],
        "lab-two-launchers": ["bob", "both"],
        "lab-two-job-readers": ["ann"],
        "lab-two-gpu-slots": ["ann"],
    }
    assert recording.outputs["contract"]["kubernetes"]["lab"]["slot_namespace"] == "two"


def test_slot_namespace_that_is_none_of_the_clusters_is_refused_with_the_nearest() -> None:
    cluster = KubernetesAccess(
        context="lab",
        cluster_identifier="lab",
        server="https://lab.example:6443",
        slot_namespace="slot",
        namespaces={"slots": NamespaceSettings(quota=QUOTA)},
    )

    (problem,) = find_problems(cluster, "kubernetes.lab")

    assert (problem.path, problem.hint) == ("kubernetes.lab.slot_namespace", "did you mean `slots`?")
