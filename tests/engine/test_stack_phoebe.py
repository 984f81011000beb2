"""The checked-in Kubernetes stack through its life: the real engine, and a real Kubernetes API behind the provider."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client

from infra.check.check import check_stack
from runtime.outputs import parse_outputs
from tests.engine.harness import PACK, Lab
from tests.engine.kubernetes_plugin import KUBECONFIG_VARIABLE
from tests.kubernetes_support import Access, Kubernetes

STACK, CHECKED_IN = "phoebe", "l2r"
CLAIM = "l2r-persistent-claim"


@pytest.fixture
def admin(kubernetes: Kubernetes) -> Access:
    return kubernetes.administrator()


@pytest.fixture
def untouched(lab: Lab, kubernetes: Kubernetes, tmp_path: Path) -> Iterator[Lab]:
    """The stack as checked in, not yet up, on a cluster without any of its objects."""
    kubernetes.delete_namespace(CHECKED_IN)
    lab.environment[KUBECONFIG_VARIABLE] = str(kubernetes.kubeconfig_with_context(tmp_path / "kubeconfig", "phoebe"))
    lab.init(STACK)
    yield lab
    kubernetes.delete_namespace(CHECKED_IN)


@pytest.fixture
def default_class(admin: Access) -> Iterator[str]:
    """A default storage class, which the cluster writes into each claim without a class, as most clusters do."""
    storage, name = client.StorageV1Api(admin.api), f"usual-{uuid.uuid4().hex[:8]}"
    marked = {"name": name, "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}}
    storage.create_storage_class({"metadata": marked, "provisioner": "example.com/none"})
    yield name
    storage.delete_storage_class(name)


@pytest.fixture
def space() -> str:
    """The name of a namespace used by one test only, since Kubernetes takes over ten seconds to delete a namespace."""
    return f"l2r-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def phoebe(lab: Lab, kubernetes: Kubernetes, space: str, tmp_path: Path) -> Lab:
    """The stack, not yet up, in a namespace of another name."""
    lab.environment[KUBECONFIG_VARIABLE] = str(kubernetes.kubeconfig_with_context(tmp_path / "kubeconfig", "phoebe"))
    lab.init(STACK)
    namespaces = lab.setting(STACK, "kubernetes")["phoebe"]["namespaces"]
    lab.set(STACK, "kubernetes.phoebe.namespaces", {space: namespaces[CHECKED_IN]})
    return lab


def knob(space: str, rest: str) -> str:
    return f"kubernetes.phoebe.namespaces.{space}.{rest}"


def kinds_there(admin: Access, space: str) -> dict[str, list[str]]:
    """List our objects in the namespace, without those that Kubernetes creates in every namespace."""
    core, rbac = client.CoreV1Api(admin.api), client.RbacAuthorizationV1Api(admin.api)
    lists: dict[str, Callable[[str], Any]] = {
        "quota": core.list_namespaced_resource_quota,
        "account": core.list_namespaced_service_account,
        "claim": core.list_namespaced_persistent_volume_claim,
        "policy": client.NetworkingV1Api(admin.api).list_namespaced_network_policy,
        "role": rbac.list_namespaced_role,
        "binding": rbac.list_namespaced_role_binding,
    }
    found = {kind: [each.metadata.name for each in call(space).items] for kind, call in lists.items()}
    return {kind: [name for name in names if name != "default"] for kind, names in found.items()}


MADE = {
    "quota": ["runtime-quota"],
    "account": ["runtime-job"],
    "claim": [CLAIM],
    "policy": ["runtime-default-deny", "runtime-workers"],
    "role": ["runtime-launcher"],
    "binding": ["runtime-launcher"],
}


def namespace_exists(admin: Access, space: str) -> bool:
    return space in [each.metadata.name for each in client.CoreV1Api(admin.api).list_namespace().items]


def test_stack_is_made_as_planned_and_a_member_of_the_group_can_launch(
    untouched: Lab, kubernetes: Kubernetes, admin: Access
) -> None:
    phoebe, space = untouched, CHECKED_IN
    planned = phoebe.preview(STACK, *PACK)
    nothing_yet = namespace_exists(admin, space)
    phoebe.up(STACK, *PACK)

    report = check_stack(STACK)
    assert report.recording is not None
    assert not nothing_yet
    assert {step.op for step in planned} == {"create"}
    assert sorted(step.urn for step in planned) == sorted(phoebe.resources(STACK))
    assert {each.urn for each in report.recording.resources} < set(phoebe.resources(STACK))
    assert kinds_there(admin, space) == MADE
    phoebe.expect_no_changes(STACK, *PACK)
    made = parse_outputs(phoebe.contract(STACK), source="pulumi").kubernetes["phoebe"].namespaces[space]
    assert (made.service_account, made.image_pull_secrets) == ("runtime-job", ("pdl-registry",))
    assert made.claims[CLAIM].claim == CLAIM
    member = kubernetes.member("l2r")
    assert member.may("create", "jobs", group="batch", namespace=space)
    assert not kubernetes.member("others").may("create", "jobs", group="batch", namespace=space)


def test_stack_that_is_up_is_changed_under_the_policies(
    phoebe: Lab, admin: Access, space: str, default_class: str
) -> None:
    phoebe.set(STACK, knob(space, "quota"), {"pods": "200", "requests.storage": "30Gi"})
    phoebe.up(STACK, *PACK)
    claim = client.CoreV1Api(admin.api).read_namespaced_persistent_volume_claim(CLAIM, space)
    phoebe.run("up", "--yes", "--expect-no-changes", "--stack", STACK, *PACK)

    phoebe.set(STACK, "labels", {"team": "second-day"})
    phoebe.set(STACK, knob(space, "claims.more"), {"size": "1Gi", "access_mode": "ReadWriteMany"})
    steps = {step.name: step.op for step in phoebe.preview(STACK, *PACK)}
    phoebe.up(STACK, *PACK)

    # The cluster chose the class, not the stack, so no policy objects.
    assert claim.spec.storage_class_name == default_class
    assert steps[f"phoebe-{space}-claim-more"] == "create"
    assert steps[f"phoebe-{space}-namespace"] == "update"
    phoebe.expect_no_changes(STACK, *PACK)


def test_no_kubeconfig_and_no_token_is_in_the_state(phoebe: Lab) -> None:
    phoebe.up(STACK)

    exported = str(phoebe.export(STACK))

    kubeconfig = Path(phoebe.environment[KUBECONFIG_VARIABLE]).read_text()
    token = kubeconfig.partition("token: ")[2].split()[0]
    assert len(token) == 32
    assert token not in exported
    assert "certificate-authority" not in exported


def test_what_somebody_changed_by_hand_is_found_and_set_back(phoebe: Lab, admin: Access, space: str) -> None:
    phoebe.up(STACK)
    rbac, networking = client.RbacAuthorizationV1Api(admin.api), client.NetworkingV1Api(admin.api)
    networking.delete_namespaced_network_policy("runtime-default-deny", space)
    role = rbac.read_namespaced_role("runtime-launcher", space)
    role.rules = [*role.rules, client.V1PolicyRule(api_groups=[""], resources=["secrets"], verbs=["get"])]
    rbac.replace_namespaced_role("runtime-launcher", space, role)

    unseen = phoebe.preview(STACK)
    drift = phoebe.preview(STACK, "--refresh")
    phoebe.refresh(STACK)
    phoebe.up(STACK)

    assert unseen == []
    assert sorted((step.op, step.name) for step in drift) == [
        ("create", f"phoebe-{space}-default-deny"),
        ("update", f"phoebe-{space}-launchers-role"),
    ]
    assert phoebe.preview(STACK, "--refresh") == []
    assert kinds_there(admin, space) == MADE
    rules = rbac.read_namespaced_role("runtime-launcher", space).rules
    assert [rule.verbs for rule in rules if "secrets" in rule.resources] == [["create"]]


def test_one_knob_changes_one_object_in_place(phoebe: Lab, admin: Access, space: str) -> None:
    phoebe.up(STACK)

    phoebe.set(STACK, knob(space, "quota.pods"), "300")
    (step,) = phoebe.preview(STACK)
    phoebe.up(STACK)

    assert (step.op, step.name, step.paths) == ("update", f"phoebe-{space}-quota", ("spec.hard.pods",))
    quota = client.CoreV1Api(admin.api).read_namespaced_resource_quota("runtime-quota", space)
    assert quota.spec.hard["pods"] == "300"


def test_change_that_the_api_would_refuse_is_refused_in_the_preview(phoebe: Lab, space: str) -> None:
    phoebe.up(STACK)

    phoebe.set(STACK, knob(space, f"claims.{CLAIM}.size"), "10Gi")
    refused = phoebe.run("preview", "--stack", STACK, check=False)

    assert refused.code != 0
    assert f"PersistentVolumeClaim {space}/{CLAIM}" in refused.text


def test_claim_that_would_be_made_anew_refuses_to_go(phoebe: Lab, admin: Access, space: str) -> None:
    phoebe.up(STACK)
    before = client.CoreV1Api(admin.api).read_namespaced_persistent_volume_claim(CLAIM, space).metadata.uid

    phoebe.set(STACK, knob(space, f"claims.{CLAIM}.access_mode"), "ReadWriteOnce")
    refused = phoebe.up(STACK, check=False)

    assert refused.code != 0
    assert "protect" in refused.text
    assert client.CoreV1Api(admin.api).read_namespaced_persistent_volume_claim(CLAIM, space).metadata.uid == before


def test_destroy_refuses_then_leaves_the_data_and_an_up_after_it_adopts(phoebe: Lab, admin: Access, space: str) -> None:
    phoebe.up(STACK)
    core = client.CoreV1Api(admin.api)
    before = core.read_namespaced_persistent_volume_claim(CLAIM, space).metadata.uid

    refused = phoebe.destroy(STACK, check=False)
    phoebe.run("state", "unprotect", "--all", "--yes", "--stack", STACK)
    phoebe.destroy(STACK)
    left = kinds_there(admin, space)
    taken = phoebe.up(STACK, check=False)
    phoebe.set(STACK, "adopt", True)
    phoebe.up(STACK)

    assert refused.code != 0
    assert left == {kind: [CLAIM] if kind == "claim" else [] for kind in MADE}
    assert taken.code != 0
    assert f"409: Namespace {space} already exists" in taken.text
    assert core.read_namespaced_persistent_volume_claim(CLAIM, space).metadata.uid == before
    assert kinds_there(admin, space) == MADE
    phoebe.expect_no_changes(STACK)


def test_stack_in_a_namespace_of_others_needs_its_administrators_rights_alone(
    phoebe: Lab, kubernetes: Kubernetes, admin: Access, space: str, tmp_path: Path
) -> None:
    core = client.CoreV1Api(admin.api)
    core.create_namespace({"metadata": {"name": space}})
    core.create_namespaced_service_account(space, {"metadata": {"name": "theirs"}})
    admin.apply(
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": {"name": "administrators", "namespace": space},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "admin"},
            "subjects": [{"kind": "ServiceAccount", "name": "theirs", "namespace": space}],
        }
    )
    granted = tmp_path / "granted"
    kubernetes.kubeconfig_with_context(granted, "phoebe", token=kubernetes.token(space, "theirs"))
    phoebe.environment[KUBECONFIG_VARIABLE] = str(granted)
    phoebe.set(STACK, knob(space, "create"), False)
    phoebe.set(STACK, knob(space, "quota"), None)

    phoebe.up(STACK)

    assert kinds_there(admin, space) == {
        **MADE,
        "quota": [],
        "account": ["runtime-job", "theirs"],
        "binding": ["administrators", "runtime-launcher"],
    }
    assert "kubernetes:core/v1:Namespace" not in {each["type"] for each in phoebe.resources(STACK).values()}
    phoebe.expect_no_changes(STACK)


def test_context_that_is_not_there_stops_before_anything_is_made(phoebe: Lab, admin: Access, space: str) -> None:
    phoebe.set(STACK, "kubernetes.phoebe.context", "elsewhere")

    refused = phoebe.up(STACK, check=False)

    assert refused.code != 0
    assert "the kubeconfig has no context `elsewhere`; it has phoebe" in refused.text
    assert not namespace_exists(admin, space)


def test_jobs_on_gke_act_as_the_account_of_workers(
    lab: Lab, kubernetes: Kubernetes, admin: Access, space: str, tmp_path: Path
) -> None:
    lab.environment[KUBECONFIG_VARIABLE] = str(kubernetes.kubeconfig_with_context(tmp_path / "kubeconfig", "gke"))
    lab.init("dev")
    inside = {"quota": {"pods": "20"}, "workload_identity": True}
    cluster = {
        "context": "gke",
        "cluster_identifier": "gke",
        "server": "https://gke.example.com",
        "namespaces": {space: inside},
    }
    lab.set("dev", "kubernetes", {"gke": cluster})
    lab.up("dev", *PACK)

    account = client.CoreV1Api(admin.api).read_namespaced_service_account("runtime-job", space)
    assert (
        account.metadata.annotations["iam.gke.io/gcp-service-account"]
        == "dev-worker@my-lab-dev.iam.gserviceaccount.com"
    )
    opened = client.NetworkingV1Api(admin.api).read_namespaced_network_policy("runtime-workers", space).spec.egress
    metadata = {
        (to.ip_block.cidr, port.port) for rule in opened for to in rule.to or () if to.ip_block for port in rule.ports
    }
    assert metadata == {("169.254.169.252/32", 987), ("169.254.169.252/32", 988), ("169.254.169.254/32", 80)}
    grants = [
        each["inputs"]
        for each in lab.cloud.world().resources.values()
        if each["type"].endswith("serviceaccount/iAMMember:IAMMember")
    ]
    assert [(each["member"], each["role"]) for each in grants] == [
        (f"serviceAccount:my-lab-dev.svc.id.goog[{space}/runtime-job]", "roles/iam.workloadIdentityUser")
    ]
    lab.expect_no_changes("dev", *PACK)
    kubernetes.delete_namespace(space)
