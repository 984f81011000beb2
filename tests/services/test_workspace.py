"""Workspaces on the real Kubernetes API: objects applied by the administrator, and a launcher's rights in them."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pulumi  # noqa: TID251  (the component is made by a program of the test)
import pulumi_kubernetes
import pytest
from kubernetes import client
from kubernetes.client.exceptions import ApiException

from infra.check.recording import record
from infra.components.workspace import Workspace, WorkspaceArgs
from infra.settings.files import load_stack_config
from infra.settings.model import ClaimSettings, NamespaceSettings
from tests.kubernetes_support import Access, Kubernetes, eventually, manifests

ROOT = Path(__file__).parents[2]
CLAIM = ClaimSettings(size="1Gi")


@dataclass(frozen=True)
class Made:
    """An existing workspace, and the API with its launcher's identity."""

    namespace: str
    objects: list[dict[str, Any]]
    launcher: Access


@pytest.fixture(scope="module")
def admin(kubernetes: Kubernetes) -> Access:
    return kubernetes.administrator()


@pytest.fixture(scope="module")
def people(kubernetes: Kubernetes, admin: Access) -> str:
    """A namespace whose service accounts stand for people who launch."""
    namespace = kubernetes.new_namespace("people")
    for name in ("alice", "bob", "mallory"):
        client.CoreV1Api(admin.api).create_namespaced_service_account(namespace, {"metadata": {"name": name}})
    return namespace


@pytest.fixture
def make(kubernetes: Kubernetes, admin: Access, people: str) -> Callable[..., Made]:
    """Make a workspace that Alice launches in."""

    def made(settings: NamespaceSettings | None = None, *, as_whom: Access | None = None, **changes: Any) -> Made:
        settings = settings or NamespaceSettings(quota={"pods": "20"})
        namespace = changes.pop("namespace", f"lab-{uuid.uuid4().hex[:8]}")
        settings = replace(settings, launchers=(f"ServiceAccount:{people}/alice",))
        objects = workspace_objects(namespace, settings, **changes)
        for each in objects:
            (as_whom or admin).apply(each)
        kubernetes.wait_for_account(namespace)
        launcher = kubernetes.account(people, "alice")
        wait_for_right(launcher, "create", "jobs", namespace, group="batch")
        return Made(namespace, objects, launcher)

    return made


def wait_for_right(
    access: Access, verb: str, what: str, namespace: str, *, group: str = "", given: bool = True
) -> None:
    """Wait for the API, which learns of a stored or deleted role or binding a moment later."""
    eventually(lambda: access.may(verb, what, group=group, namespace=namespace) is given)


def workspace_objects(namespace: str, settings: NamespaceSettings, **changes: Any) -> list[dict[str, Any]]:
    def program() -> None:
        provider = pulumi_kubernetes.Provider("cluster", context="test", cluster_identifier="test")
        args = WorkspaceArgs(namespace=namespace, settings=settings, labels={"stack": "test"}, **changes)
        Workspace("test", args, pulumi.ResourceOptions(providers=[provider]))

    return manifests(record(program, stack="test").resources)


def job(name: str, **template: Any) -> dict[str, Any]:
    pod = {"restartPolicy": "Never", "containers": [{"name": "main", "image": "registry.example/nothing:1"}]}
    return {"metadata": {"name": name}, "spec": {"suspend": True, "template": {"spec": pod | template}}}


def pod(name: str, **container: Any) -> dict[str, Any]:
    main = {"name": "main", "image": "registry.example/nothing:1"} | container
    return {"metadata": {"name": name}, "spec": {"containers": [main]}}


def volume(name: str, **spec: Any) -> dict[str, Any]:
    asked = {"capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteMany"], "hostPath": {"path": "/nowhere"}}
    return {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": asked | spec}


def storage_class(name: str, **fields: Any) -> dict[str, Any]:
    kind = {"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": {"name": name}}
    return kind | {"provisioner": "kubernetes.io/no-provisioner"} | fields


def claim_of(access: Access, namespace: str, name: str) -> Any:
    return client.CoreV1Api(access.api).read_namespaced_persistent_volume_claim(name, namespace)


# objects that the administrator applies


def test_every_object_is_stored_as_registered_and_a_second_apply_changes_nothing(
    make: Callable[..., Made], admin: Access
) -> None:
    full = NamespaceSettings(
        quota={"pods": "5", "requests.cpu": "4", "limits.memory": "4Gi"},
        claims={"data": CLAIM},
        image_pull_secrets=("registry-login",),
        egress_cidrs=("10.8.0.0/16",),
    )
    made = make(full, neighbours=("User:bob",), holds_slots=True)

    first = [admin.find(each) for each in made.objects]
    again = [admin.apply(each) for each in made.objects]

    assert [missing_in(found, each) for found, each in zip(first, made.objects, strict=True)] == [[]] * len(first)
    # The quota's controller writes the usage; nothing else may have changed.
    assert [wanted_of(each) for each in again] == [wanted_of(each) for each in first if each]


def missing_in(found: Any, wanted: Any, path: str = "") -> list[str]:
    """List the paths of `wanted` that differ in `found`, which may have more keys."""
    if isinstance(wanted, dict):
        if not isinstance(found, dict):
            return [path]
        return [each for key, item in wanted.items() for each in missing_in(found.get(key), item, f"{path}.{key}")]
    if isinstance(wanted, list):
        if not isinstance(found, list) or len(found) != len(wanted):
            return [path]
        pairs = enumerate(zip(found, wanted, strict=True))
        return [each for index, (one, other) in pairs for each in missing_in(one, other, f"{path}[{index}]")]
    return [] if found == wanted else [path]


def wanted_of(found: dict[str, Any]) -> dict[str, Any]:
    metadata = {key: found["metadata"].get(key) for key in ("name", "uid", "generation", "labels", "annotations")}
    others = {key: value for key, value in found.items() if key not in ("metadata", "status")}
    return {"metadata": metadata, **others}


def test_checker_of_stored_objects_sees_a_difference() -> None:
    stored = {"a": [{"b": 1, "c": 2}], "d": "x"}

    assert missing_in(stored, {"a": [{"b": 1}]}) == []
    assert missing_in(stored, {"a": [{"b": 2}], "d": "x"}) == [".a[0].b"]
    assert missing_in(stored, {"a": [], "e": 1}) == [".a", ".e"]
    assert missing_in(None, {"a": 1}) == [""]


def test_checked_in_phoebe_stack_is_accepted_object_by_object(kubernetes: Kubernetes, admin: Access) -> None:
    from infra.program import build
    from infra.settings.read import read_settings

    path = ROOT / "Pulumi.phoebe.yaml"
    recording = record(lambda: _ignore(build(read_settings())), stack="phoebe", config=load_stack_config(path).values)
    objects = manifests(recording.resources)

    assert {each["kind"] for each in objects} >= {"Namespace", "ResourceQuota", "NetworkPolicy", "Role", "RoleBinding"}
    for each in objects:
        # A dry run does not create the namespace that later objects need.
        admin.apply(each, dry_run=each["kind"] != "Namespace")
    kubernetes.delete_namespace("l2r")


def _ignore(built: object) -> None:
    assert built


def test_object_that_the_api_does_not_take_is_refused_by_a_dry_run(make: Callable[..., Made], admin: Access) -> None:
    made = make()
    (quota,) = [each for each in made.objects if each["kind"] == "ResourceQuota"]
    quota["spec"]["hard"]["pods"] = "-1"

    with pytest.raises(ApiException) as refused:
        admin.apply(quota, dry_run=True)

    assert refused.value.status == 422


def test_administrator_of_the_namespace_alone_can_make_a_workspace_in_it(
    kubernetes: Kubernetes, admin: Access, people: str, make: Callable[..., Made]
) -> None:
    namespace = kubernetes.new_namespace("granted")
    admin.apply(
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": {"name": "administrators", "namespace": namespace},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "admin"},
            "subjects": [{"kind": "ServiceAccount", "name": "bob", "namespace": people}],
        }
    )
    bob = kubernetes.account(people, "bob")
    wait_for_right(bob, "create", "rolebindings", namespace, group="rbac.authorization.k8s.io")

    made = make(NamespaceSettings(create=False, claims={"data": CLAIM}), namespace=namespace, as_whom=bob)

    assert not bob.may("create", "namespaces")
    assert made.launcher.may("create", "jobs", namespace=namespace, group="batch")
    assert claim_of(admin, namespace, "data").status.phase == "Pending"


# a launcher's rights


def test_launcher_can_do_what_launching_takes(make: Callable[..., Made], admin: Access) -> None:
    made = make(NamespaceSettings(quota={"pods": "5"}, claims={"data": CLAIM}))
    batch, core = client.BatchV1Api(made.launcher.api), client.CoreV1Api(made.launcher.api)
    coordination = client.CoordinationV1Api(made.launcher.api)

    created = batch.create_namespaced_job(made.namespace, job("train"))
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "train", "uid": created.metadata.uid, "controller": True}
    core.create_namespaced_config_map(
        made.namespace,
        {"metadata": {"name": "shim", "ownerReferences": [owner]}, "data": {"shim.py": ""}, "immutable": True},
    )
    batch.patch_namespaced_job("train", made.namespace, {"spec": {"suspend": False}})
    eventually(lambda: len(core.list_namespaced_pod(made.namespace, label_selector="job-name=train").items) == 1)
    (running,) = core.list_namespaced_pod(made.namespace).items
    core.patch_namespaced_pod(running.metadata.name, made.namespace, {"metadata": {"finalizers": None}})
    lease = coordination.create_namespaced_lease(made.namespace, {"metadata": {"name": "gpu-0"}, "spec": {}})
    lease.metadata.annotations = {"slot-0": str(created.metadata.uid)}
    coordination.replace_namespaced_lease("gpu-0", made.namespace, lease)

    assert [each.metadata.name for each in core.list_namespaced_persistent_volume_claim(made.namespace).items] == [
        "data"
    ]
    assert core.list_namespaced_event(made.namespace).items is not None
    assert (
        coordination.read_namespaced_lease("gpu-0", made.namespace).metadata.annotations == lease.metadata.annotations
    )
    batch.delete_namespaced_job("train", made.namespace, propagation_policy="Background")
    eventually(lambda: not client.CoreV1Api(admin.api).list_namespaced_pod(made.namespace).items)


def test_lease_that_another_changed_meanwhile_is_not_overwritten(make: Callable[..., Made]) -> None:
    made = make()
    coordination = client.CoordinationV1Api(made.launcher.api)
    mine = coordination.create_namespaced_lease(made.namespace, {"metadata": {"name": "gpu-0"}, "spec": {}})
    theirs = coordination.read_namespaced_lease("gpu-0", made.namespace)
    theirs.metadata.annotations = {"slot-0": "theirs"}
    coordination.replace_namespaced_lease("gpu-0", made.namespace, theirs)

    mine.metadata.annotations = {"slot-0": "mine"}
    with pytest.raises(ApiException) as refused:
        coordination.replace_namespaced_lease("gpu-0", made.namespace, mine)

    assert refused.value.status == 409


MAY = [
    ("create", "jobs", "batch"),
    ("get", "pods/log", ""),
    ("get", "pods/exec", ""),
    ("create", "pods/exec", ""),
    ("create", "pods/eviction", ""),
    ("create", "services", ""),
    ("get", "resourcequotas", ""),
    ("update", "leases", "coordination.k8s.io"),
    ("create", "secrets", ""),
]
MAY_NOT = [
    ("get", "secrets", ""),
    ("list", "secrets", ""),
    ("patch", "secrets", ""),
    ("delete", "secrets", ""),
    ("create", "serviceaccounts/token", ""),
    ("create", "serviceaccounts", ""),
    ("impersonate", "serviceaccounts", ""),
    ("create", "persistentvolumeclaims", ""),
    ("delete", "persistentvolumeclaims", ""),
    ("patch", "resourcequotas", ""),
    ("delete", "networkpolicies", "networking.k8s.io"),
    ("create", "rolebindings", "rbac.authorization.k8s.io"),
    ("escalate", "roles", "rbac.authorization.k8s.io"),
    ("create", "pods/portforward", ""),
    ("deletecollection", "jobs", "batch"),
    ("create", "deployments", "apps"),
]


def test_launcher_may_this_and_not_that(make: Callable[..., Made]) -> None:
    made = make()

    answers = {
        each: made.launcher.may(each[0], each[1], group=each[2], namespace=made.namespace) for each in MAY + MAY_NOT
    }

    assert answers == dict.fromkeys(MAY, True) | dict.fromkeys(MAY_NOT, False)


def test_launcher_is_refused_outside_the_namespace_and_at_what_belongs_to_others(
    make: Callable[..., Made], admin: Access
) -> None:
    made, other = make(), make(replace(NamespaceSettings(quota={"pods": "1"})))
    client.CoreV1Api(admin.api).create_namespaced_secret(
        made.namespace, {"metadata": {"name": "registry-login"}, "stringData": {"password": "canary"}}
    )
    unbound = [each for each in other.objects if each["kind"] == "RoleBinding"]
    client.RbacAuthorizationV1Api(admin.api).delete_namespaced_role_binding(
        unbound[0]["metadata"]["name"], other.namespace
    )
    wait_for_right(made.launcher, "create", "jobs", other.namespace, group="batch", given=False)
    core, batch = client.CoreV1Api(made.launcher.api), client.BatchV1Api(made.launcher.api)

    calls: dict[str, Callable[[], object]] = {
        "read a secret": lambda: core.read_namespaced_secret("registry-login", made.namespace),
        "list secrets": lambda: core.list_namespaced_secret(made.namespace),
        "a job elsewhere": lambda: batch.create_namespaced_job(other.namespace, job("train")),
        "pods elsewhere": lambda: core.list_namespaced_pod(other.namespace),
        "all pods": core.list_pod_for_all_namespaces,
        "nodes": core.list_node,
        "namespaces": core.list_namespace,
        "volumes": core.list_persistent_volume,
        "a token": lambda: core.create_namespaced_service_account_token(
            "runtime-job", made.namespace, {"spec": {"expirationSeconds": 600}}
        ),
    }

    assert {what: status_of(call) for what, call in calls.items()} == dict.fromkeys(calls, 403)


def status_of(call: Callable[[], object]) -> int:
    try:
        call()
    except ApiException as refused:
        return int(refused.status)
    return 200


def message_of(refused: ApiException) -> str:
    return str(json.loads(refused.body)["message"])


def test_one_who_is_no_launcher_can_do_nothing(make: Callable[..., Made], kubernetes: Kubernetes, people: str) -> None:
    made = make()
    mallory = kubernetes.account(people, "mallory")

    assert [mallory.may(verb, what, group=group, namespace=made.namespace) for verb, what, group in MAY] == [
        False
    ] * len(MAY)


def test_account_of_jobs_has_no_rights(make: Callable[..., Made], kubernetes: Kubernetes) -> None:
    made = make()
    as_job = kubernetes.account(made.namespace, "runtime-job")

    answers = [as_job.may(verb, what, group=group, namespace=made.namespace) for verb, what, group in MAY + MAY_NOT]

    assert answers == [False] * len(answers)


def test_neighbours_share_the_table_of_slots_and_see_only_whether_a_job_is_there(
    make: Callable[..., Made], kubernetes: Kubernetes, people: str
) -> None:
    made = make(neighbours=(f"ServiceAccount:{people}/bob",), holds_slots=True)
    client.BatchV1Api(made.launcher.api).create_namespaced_job(made.namespace, job("train"))
    bob = kubernetes.account(people, "bob")
    wait_for_right(bob, "update", "leases", made.namespace, group="coordination.k8s.io")

    assert client.BatchV1Api(bob.api).read_namespaced_job("train", made.namespace).metadata.name == "train"
    client.CoordinationV1Api(bob.api).create_namespaced_lease(
        made.namespace, {"metadata": {"name": "gpu-1"}, "spec": {}}
    )
    assert {
        (verb, what): bob.may(verb, what, group=group, namespace=made.namespace)
        for verb, what, group in [*MAY, ("list", "jobs", "batch"), ("delete", "jobs", "batch")]
        if bob.may(verb, what, group=group, namespace=made.namespace)
    } == {("update", "leases"): True}


# quota, defaults, pod security, network


def test_quota_refuses_the_pod_over_the_limit_with_the_numbers(make: Callable[..., Made]) -> None:
    made = make(NamespaceSettings(quota={"pods": "1"}))
    core = client.CoreV1Api(made.launcher.api)
    eventually(lambda: used(made).get("pods") == "0")
    core.create_namespaced_pod(made.namespace, pod("first"))

    with pytest.raises(ApiException) as refused:
        core.create_namespaced_pod(made.namespace, pod("second"))

    assert refused.value.status == 403
    assert "exceeded quota: runtime-quota, requested: pods=1, used: pods=1, limited: pods=1" in message_of(
        refused.value
    )


def used(made: Made) -> dict[str, str]:
    quota = client.CoreV1Api(made.launcher.api).read_namespaced_resource_quota("runtime-quota", made.namespace)
    return quota.status.used or {}


def test_pod_without_requests_gets_the_defaults_that_the_quota_needs(make: Callable[..., Made]) -> None:
    made = make(NamespaceSettings(quota={"requests.cpu": "4", "requests.memory": "8Gi", "limits.memory": "8Gi"}))
    core = client.CoreV1Api(made.launcher.api)
    eventually(lambda: used(made).get("requests.cpu") == "0")

    created = core.create_namespaced_pod(made.namespace, pod("plain"))

    (container,) = created.spec.containers
    assert container.resources.requests == {"cpu": "1", "memory": "2Gi"}
    assert container.resources.limits == {"memory": "2Gi"}


def test_quota_lets_no_service_open_the_namespace(make: Callable[..., Made]) -> None:
    made = make()
    core = client.CoreV1Api(made.launcher.api)
    eventually(lambda: used(made).get("services.nodeports") == "0")

    def serve(kind: str, **fields: Any) -> Callable[[], object]:
        spec = {"type": kind, "ports": [{"port": 29500}], "selector": {"job-name": "train"}} | fields
        return lambda: core.create_namespaced_service(
            made.namespace, {"metadata": {"name": kind.lower()}, "spec": spec}
        )

    assert status_of(serve("NodePort")) == 403
    assert status_of(serve("LoadBalancer")) == 403
    assert status_of(serve("ClusterIP", clusterIP="None")) == 200


@pytest.mark.parametrize(
    ("what", "spec", "container"),
    [
        ("privileged", {}, {"securityContext": {"privileged": True}}),
        ("host network", {"hostNetwork": True}, {}),
        ("host path", {"volumes": [{"name": "root", "hostPath": {"path": "/"}}]}, {}),
    ],
)
def test_pod_that_reaches_for_the_host_is_refused(
    make: Callable[..., Made], what: str, spec: dict[str, Any], container: dict[str, Any]
) -> None:
    made = make()
    wanted = pod("grabby", **container)
    wanted["spec"] |= spec

    with pytest.raises(ApiException) as refused:
        client.CoreV1Api(made.launcher.api).create_namespaced_pod(made.namespace, wanted)

    assert refused.value.status == 403
    assert 'violates PodSecurity "baseline' in message_of(refused.value), what


def test_network_is_closed_by_policy_in_both_directions(make: Callable[..., Made], admin: Access) -> None:
    made = make()

    policies = client.NetworkingV1Api(admin.api).list_namespaced_network_policy(made.namespace).items

    closed = {each.metadata.name: each for each in policies}["runtime-default-deny"].spec
    assert closed.pod_selector.to_dict() == {"match_expressions": None, "match_labels": None}
    assert closed.policy_types == ["Ingress", "Egress"]
    assert (closed.ingress, closed.egress) == (None, None)


# claims


@pytest.fixture
def scrapped(admin: Access) -> Iterator[list[dict[str, Any]]]:
    """Cluster-wide objects to delete after the test."""
    made: list[dict[str, Any]] = []
    yield made
    for each in made:
        resource = admin.dynamic.resources.get(api_version=each["apiVersion"], kind=each["kind"])
        resource.delete(name=each["metadata"]["name"])


def test_claim_that_binds_on_first_use_stays_pending_and_holds_nothing_up(
    make: Callable[..., Made], admin: Access, scrapped: list[dict[str, Any]]
) -> None:
    late = storage_class(f"late-{uuid.uuid4().hex[:8]}", volumeBindingMode="WaitForFirstConsumer")
    scrapped.append(late)
    admin.apply(late)

    claim = ClaimSettings(size="1Gi", storage_class=late["metadata"]["name"])
    made = make(NamespaceSettings(quota={"pods": "5"}, claims={"data": claim}))

    eventually(lambda: "WaitForFirstConsumer" in reasons(admin, made.namespace))
    found = claim_of(admin, made.namespace, "data")
    assert found.status.phase == "Pending"
    assert found.metadata.annotations == {"pulumi.com/skipAwait": "true"}


def reasons(access: Access, namespace: str) -> set[str]:
    return {each.reason for each in client.CoreV1Api(access.api).list_namespaced_event(namespace).items}


@pytest.mark.parametrize("default_class", [False, True])
def test_claim_binds_to_the_existing_volume_it_names(
    make: Callable[..., Made], admin: Access, scrapped: list[dict[str, Any]], default_class: bool
) -> None:
    mark = uuid.uuid4().hex[:8]
    # Reserved, as an administrator should do: pending claims of other tests could bind any free volume.
    there = [volume(f"kept-{mark}", claimRef={"namespace": f"lab-{mark}", "name": "data"})]
    if default_class:
        default = storage_class(f"default-{mark}")
        default["metadata"]["annotations"] = {"storageclass.kubernetes.io/is-default-class": "true"}
        there.append(default)
    scrapped += there
    for each in there:
        admin.apply(each)

    claim = ClaimSettings(size="1Gi", existing_volume=f"kept-{mark}")
    made = make(NamespaceSettings(quota={"pods": "5"}, claims={"data": claim}), namespace=f"lab-{mark}")

    eventually(lambda: claim_of(admin, made.namespace, "data").status.phase == "Bound")
    assert claim_of(admin, made.namespace, "data").spec.volume_name == f"kept-{mark}"


def test_claim_that_is_there_already_is_left_as_it_is(
    kubernetes: Kubernetes, make: Callable[..., Made], admin: Access
) -> None:
    namespace = kubernetes.new_namespace("granted")
    core = client.CoreV1Api(admin.api)
    theirs = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "20Gi"}}}
    before = core.create_namespaced_persistent_volume_claim(namespace, {"metadata": {"name": "theirs"}, "spec": theirs})

    claims = {"theirs": ClaimSettings(size="20Gi", existing=True)}
    made = make(NamespaceSettings(create=False, claims=claims), namespace=namespace)

    after = claim_of(admin, namespace, "theirs")
    assert after.metadata.resource_version == before.metadata.resource_version
    assert "PersistentVolumeClaim" not in {each["kind"] for each in made.objects}
