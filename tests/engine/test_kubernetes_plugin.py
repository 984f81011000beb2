"""The Kubernetes provider of the engine tests on a real API: each refusal is provoked without the engine."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest
from kubernetes import client
from kubernetes.client.exceptions import ApiException

from infra.check.recording import UNKNOWN, SecretValue
from tests.engine.kubernetes_plugin import KUBECONFIG_VARIABLE, narrowed, owned
from tests.engine.plugin import Failure
from tests.engine.plugin_client import CallRefused, PluginClient
from tests.kubernetes_support import Access, Kubernetes, eventually

NAMESPACE, CLAIM = "kubernetes:core/v1:Namespace", "kubernetes:core/v1:PersistentVolumeClaim"
CONFIG, ROLE = "kubernetes:core/v1:ConfigMap", "kubernetes:rbac.authorization.k8s.io/v1:Role"
BINDING, SECRET = "kubernetes:rbac.authorization.k8s.io/v1:RoleBinding", "kubernetes:core/v1:Secret"
CLUSTER = {"context": "lab", "clusterIdentifier": "lab-1"}


@pytest.fixture(scope="module")
def kubeconfig(kubernetes: Kubernetes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kubernetes.kubeconfig_with_context(tmp_path_factory.mktemp("kubeconfig") / "config", "lab")


@pytest.fixture(scope="module")
def plugin(kubeconfig: Path) -> Iterator[PluginClient]:
    with PluginClient("kubernetes", {KUBECONFIG_VARIABLE: str(kubeconfig)}, CLUSTER) as running:
        yield running


@pytest.fixture(scope="module")
def admin(kubernetes: Kubernetes) -> Access:
    return kubernetes.administrator()


@pytest.fixture
def namespace(kubernetes: Kubernetes) -> str:
    return kubernetes.new_namespace("plugin")


def thing(kind: str, name: str, namespace: str | None, *, version: str = "v1", **fields: Any) -> dict[str, Any]:
    metadata = {"name": name} | ({"namespace": namespace} if namespace else {})
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **fields}


def config_map(namespace: str | None, name: str = "settings", **data: Any) -> dict[str, Any]:
    return thing("ConfigMap", name, namespace, data=data or {"a": "1"})


def claim(namespace: str, size: str = "1Gi") -> dict[str, Any]:
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": size}}}
    return thing("PersistentVolumeClaim", "data", namespace, spec=spec)


def refusal(call: Any) -> CallRefused:
    with pytest.raises(CallRefused) as refused:
        call()
    return refused.value


def new_name() -> str:
    return f"made-{uuid.uuid4().hex[:8]}"


# the provider


def test_plugin_is_as_new_as_the_sdk(plugin: PluginClient) -> None:
    import pulumi_kubernetes

    assert plugin.version == pulumi_kubernetes._utilities.get_version()


@pytest.mark.parametrize(
    ("inputs", "paths"),
    [
        (CLUSTER, []),
        ({**CLUSTER, "kubeconfig": "apiVersion: v1"}, ["kubeconfig"]),
        ({"clusterIdentifier": "lab-1"}, ["context"]),
        ({"context": "lab"}, ["clusterIdentifier"]),
        ({**CLUSTER, "contxt": "lab"}, ["contxt"]),
    ],
)
def test_provider_names_a_context_and_brings_no_kubeconfig(
    plugin: PluginClient, inputs: Mapping[str, Any], paths: list[str]
) -> None:
    assert [each.path for each in plugin.check_provider(inputs)] == paths


def test_context_that_the_kubeconfig_lacks_is_refused_with_those_it_has(kubeconfig: Path) -> None:
    wrong = {**CLUSTER, "context": "phoebe"}

    refused = refusal(lambda: PluginClient("kubernetes", {KUBECONFIG_VARIABLE: str(kubeconfig)}, wrong))

    assert refused.message == "the kubeconfig has no context `phoebe`; it has lab"


# checks


@pytest.mark.parametrize(
    ("type_", "inputs", "paths"),
    [
        (CONFIG, config_map("n"), []),
        (CONFIG, {**config_map("n"), "dta": {}}, ["dta"]),
        (CONFIG, config_map("n", a=5), ["data.a"]),
        (CONFIG, config_map(None), ["metadata.namespace"]),
        (NAMESPACE, thing("Namespace", "n", "n"), ["metadata.namespace"]),
        (NAMESPACE, {**thing("Namespace", "n", None), "metadata": {}}, ["metadata.name"]),
        (NAMESPACE, config_map("n"), ["data", "kind"]),
        ("kubernetes:core/v1:Nmespace", thing("Nmespace", "n", None), [""]),
    ],
)
def test_input_that_the_api_would_not_take_is_refused_before_anything_is_made(
    plugin: PluginClient, type_: str, inputs: Mapping[str, Any], paths: list[str]
) -> None:
    failures: list[Failure] = plugin.check(type_, inputs)

    assert sorted({each.path for each in failures}) == paths, failures


# creating


def test_create_stores_the_object_and_read_returns_what_is_stored(
    plugin: PluginClient, admin: Access, namespace: str
) -> None:
    id_, state = plugin.create(CONFIG, config_map(namespace))

    found = plugin.read(CONFIG, id_, config_map(namespace), state)

    stored = admin.find(config_map(namespace))
    assert stored
    assert id_ == f"{namespace}/settings"
    assert state["metadata"]["uid"] == stored["metadata"]["uid"]
    assert "managedFields" not in state["metadata"]
    assert found
    assert (found.id, found.state, found.inputs) == (id_, state, config_map(namespace))


def test_create_of_what_exists_is_refused_and_changes_nothing(
    plugin: PluginClient, admin: Access, namespace: str
) -> None:
    admin.apply(config_map(namespace, a="theirs"))

    refused = refusal(lambda: plugin.create(CONFIG, config_map(namespace, a="ours")))

    stored = admin.find(config_map(namespace))
    assert refused.code is grpc.StatusCode.ALREADY_EXISTS
    assert stored
    assert stored["data"] == {"a": "theirs"}


def test_provider_that_was_told_to_takes_over_what_exists(kubeconfig: Path, admin: Access, namespace: str) -> None:
    client.CoreV1Api(admin.api).create_namespaced_config_map(
        namespace, {"metadata": {"name": "settings"}, "data": {"b": "theirs"}}
    )

    told = {**CLUSTER, "upsertExistingObjects": "true"}
    with PluginClient("kubernetes", {KUBECONFIG_VARIABLE: str(kubeconfig)}, told) as plugin:
        _, state = plugin.create(CONFIG, config_map(namespace, a="ours"))

    assert state["data"] == {"a": "ours", "b": "theirs"}


def test_two_creates_at_once_make_one(plugin: PluginClient, namespace: str) -> None:
    refused: list[CallRefused] = []

    def create() -> None:
        try:
            plugin.create(CONFIG, config_map(namespace))
        except CallRefused as problem:
            refused.append(problem)

    threads = [threading.Thread(target=create) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()

    assert [each.code for each in refused] == [grpc.StatusCode.ALREADY_EXISTS] * 3


def test_preview_makes_nothing_and_still_asks_the_api(plugin: PluginClient, admin: Access, namespace: str) -> None:
    wrong = claim(namespace)
    wrong["spec"]["accessModes"] = ["ReadSometimes"]

    id_, _ = plugin.create(CLAIM, claim(namespace), preview=True)
    refused = refusal(lambda: plugin.create(CLAIM, wrong, preview=True))

    assert id_ == ""
    assert admin.find(claim(namespace)) is None
    assert refused.code is grpc.StatusCode.INVALID_ARGUMENT
    assert "ReadSometimes" in refused.message


def test_preview_in_a_namespace_that_is_yet_to_be_made_passes(plugin: PluginClient) -> None:
    _, state = plugin.create(CLAIM, claim(new_name()), preview=True)

    assert state["spec"]["accessModes"] == ["ReadWriteMany"]


def test_preview_with_unknown_values_passes_and_keeps_them(plugin: PluginClient, namespace: str) -> None:
    _, state = plugin.create(CONFIG, config_map(namespace, a=UNKNOWN), preview=True)

    assert state["data"] == {"a": UNKNOWN}


def test_secret_stays_secret_in_the_state_and_is_open_in_the_cluster(
    plugin: PluginClient, admin: Access, namespace: str
) -> None:
    inputs = thing("Secret", "login", namespace, data={"password": SecretValue("Y2FuYXJ5")})

    id_, state = plugin.create(SECRET, inputs)
    found = plugin.read(SECRET, id_, inputs, state)

    stored = admin.find(inputs)
    assert stored
    assert stored["data"] == {"password": "Y2FuYXJ5"}
    assert state["data"] == {"password": SecretValue("Y2FuYXJ5")}
    assert found
    assert found.inputs["data"] == {"password": SecretValue("Y2FuYXJ5")}


# reading changes by others


def test_read_shows_a_changed_value_and_not_what_others_added(
    plugin: PluginClient, admin: Access, namespace: str
) -> None:
    id_, state = plugin.create(CONFIG, config_map(namespace))
    core = client.CoreV1Api(admin.api)
    core.patch_namespaced_config_map("settings", namespace, {"data": {"a": "2", "b": "theirs"}})

    found = plugin.read(CONFIG, id_, config_map(namespace), state)

    assert found
    assert found.inputs == config_map(namespace, a="2")
    assert found.state["data"] == {"a": "2", "b": "theirs"}


def test_read_shows_a_rule_that_others_added_to_a_list(plugin: PluginClient, admin: Access, namespace: str) -> None:
    rule = {"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]}
    role = thing("Role", "reader", namespace, version="rbac.authorization.k8s.io/v1", rules=[rule])
    id_, state = plugin.create(ROLE, role)
    more = {"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]}
    client.RbacAuthorizationV1Api(admin.api).patch_namespaced_role("reader", namespace, {"rules": [rule, more]})

    found = plugin.read(ROLE, id_, role, state)

    assert found
    assert found.inputs["rules"] == [rule, more]


def test_read_of_what_is_gone_finds_nothing(plugin: PluginClient, admin: Access, namespace: str) -> None:
    id_, state = plugin.create(CONFIG, config_map(namespace))
    client.CoreV1Api(admin.api).delete_namespaced_config_map("settings", namespace)

    assert plugin.read(CONFIG, id_, config_map(namespace), state) is None


def test_import_of_what_we_once_applied_brings_the_inputs_and_no_defaults(plugin: PluginClient, namespace: str) -> None:
    id_, _ = plugin.create(CLAIM, claim(namespace))

    found = plugin.read(CLAIM, id_)

    assert found
    assert found.inputs == claim(namespace)
    assert found.state["spec"]["volumeMode"] == "Filesystem"


def test_import_of_what_others_made_brings_all_that_is_there(
    plugin: PluginClient, admin: Access, namespace: str
) -> None:
    client.CoreV1Api(admin.api).create_namespaced_config_map(
        namespace, {"metadata": {"name": "theirs", "labels": {"team": "l2r"}}, "data": {"a": "1"}}
    )

    found = plugin.read(CONFIG, f"{namespace}/theirs")

    expected = config_map(namespace, "theirs")
    expected["metadata"]["labels"] = {"team": "l2r"}
    assert found
    assert found.inputs == expected


def test_import_of_what_is_not_there_finds_nothing(plugin: PluginClient, namespace: str) -> None:
    assert plugin.read(CONFIG, f"{namespace}/nothing") is None


# changing


def test_diff_tells_what_changes_in_place_from_what_makes_another_object(plugin: PluginClient) -> None:
    old = claim("n")

    grown, elsewhere = claim("n", "2Gi"), claim("m")
    moved = claim("n")
    moved["spec"]["accessModes"] = ["ReadWriteOnce"]
    assert plugin.diff(CLAIM, old, grown) == (["spec.resources.requests.storage"], [])
    assert plugin.diff(CLAIM, old, elsewhere) == (["metadata.namespace"], ["metadata"])
    assert plugin.diff(CLAIM, old, moved) == (["spec.accessModes[0]"], ["spec"])
    assert plugin.diff(CLAIM, old, old) == ([], [])


def test_diff_of_a_bindings_role_makes_another_binding(plugin: PluginClient) -> None:
    def binding(role: str) -> dict[str, Any]:
        reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": role}
        return thing("RoleBinding", "b", "n", version="rbac.authorization.k8s.io/v1", roleRef=reference)

    assert plugin.diff(BINDING, binding("a"), binding("b")) == (["roleRef.name"], ["roleRef"])


def test_update_changes_ours_and_leaves_theirs(plugin: PluginClient, admin: Access, namespace: str) -> None:
    old, new = config_map(namespace, a="1", b="1"), config_map(namespace, a="2")
    id_, state = plugin.create(CONFIG, old)
    client.CoreV1Api(admin.api).patch_namespaced_config_map("settings", namespace, {"data": {"theirs": "x"}})

    updated = plugin.update(CONFIG, id_, old, new, state=state)

    stored = admin.find(new)
    assert stored
    assert stored["data"] == updated["data"] == {"a": "2", "theirs": "x"}


def test_update_of_a_field_that_another_has_taken_is_a_conflict(
    plugin: PluginClient, admin: Access, namespace: str
) -> None:
    id_, state = plugin.create(CONFIG, config_map(namespace))
    client.CoreV1Api(admin.api).patch_namespaced_config_map("settings", namespace, {"data": {"a": "theirs"}})

    refused = refusal(lambda: plugin.update(CONFIG, id_, config_map(namespace), config_map(namespace), state=state))

    assert refused.code is grpc.StatusCode.ABORTED
    assert "conflict" in refused.message


def test_provider_that_was_told_to_takes_a_field_back(kubeconfig: Path, admin: Access, namespace: str) -> None:
    told = {**CLUSTER, "enablePatchForce": "true"}
    with PluginClient("kubernetes", {KUBECONFIG_VARIABLE: str(kubeconfig)}, told) as plugin:
        id_, state = plugin.create(CONFIG, config_map(namespace))
        client.CoreV1Api(admin.api).patch_namespaced_config_map("settings", namespace, {"data": {"a": "theirs"}})

        updated = plugin.update(CONFIG, id_, config_map(namespace), config_map(namespace), state=state)

    assert updated["data"] == {"a": "1"}


def test_update_that_the_api_refuses_says_why(plugin: PluginClient, namespace: str) -> None:
    id_, state = plugin.create(CLAIM, claim(namespace, "2Gi"))

    refused = refusal(lambda: plugin.update(CLAIM, id_, claim(namespace, "2Gi"), claim(namespace), state=state))

    assert refused.code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.PERMISSION_DENIED)
    assert "PersistentVolumeClaim" in refused.message


def test_update_of_what_is_gone_does_not_bring_it_back(plugin: PluginClient, admin: Access, namespace: str) -> None:
    id_, state = plugin.create(CONFIG, config_map(namespace))
    client.CoreV1Api(admin.api).delete_namespaced_config_map("settings", namespace)

    refused = refusal(
        lambda: plugin.update(CONFIG, id_, config_map(namespace), config_map(namespace, a="2"), state=state)
    )

    assert refused.code is grpc.StatusCode.NOT_FOUND
    assert admin.find(config_map(namespace)) is None


# deleting


def test_delete_waits_until_a_namespace_and_all_in_it_is_gone(plugin: PluginClient, admin: Access) -> None:
    name = new_name()
    wanted = thing("Namespace", name, None)
    id_, state = plugin.create(NAMESPACE, wanted)
    eventually(lambda: client.CoreV1Api(admin.api).list_namespaced_config_map(name).items)

    plugin.delete(NAMESPACE, id_, state)

    assert admin.find(wanted) is None
    plugin.delete(NAMESPACE, id_, state)


def test_delete_leaves_another_object_of_the_same_name(plugin: PluginClient, admin: Access, namespace: str) -> None:
    id_, state = plugin.create(CONFIG, config_map(namespace))
    core = client.CoreV1Api(admin.api)
    core.delete_namespaced_config_map("settings", namespace)
    core.create_namespaced_config_map(namespace, {"metadata": {"name": "settings"}})

    plugin.delete(CONFIG, id_, state)

    assert core.read_namespaced_config_map("settings", namespace)


def test_delete_gives_up_on_what_is_held_once_the_engine_stops(kubeconfig: Path, admin: Access, namespace: str) -> None:
    core = client.CoreV1Api(admin.api)
    with PluginClient("kubernetes", {KUBECONFIG_VARIABLE: str(kubeconfig)}, CLUSTER) as plugin:
        id_, state = plugin.create(CONFIG, config_map(namespace))
        core.patch_namespaced_config_map("settings", namespace, {"metadata": {"finalizers": ["lab.example/held"]}})
        plugin.cancel()

        refused = refusal(lambda: plugin.delete(CONFIG, id_, state))

    assert refused.code is grpc.StatusCode.DEADLINE_EXCEEDED
    # The API's garbage collector may or may not have removed the finalizer `foregroundDeletion` by now.
    assert refused.message.startswith(f"ConfigMap {namespace}/settings is still there, held by lab.example/held")
    core.patch_namespaced_config_map("settings", namespace, {"metadata": {"finalizers": None}})
    eventually(lambda: is_gone(lambda: core.read_namespaced_config_map("settings", namespace)))


def is_gone(call: Any) -> bool:
    try:
        call()
    except ApiException as refused:
        return bool(refused.status == 404)
    return False


# pure functions


def test_narrowed_keeps_values_of_what_was_wanted_and_items_beyond() -> None:
    stored = {"a": {"b": 2, "default": True}, "list": [{"x": 1, "y": 2}, {"x": 3}], "gone": 1}

    wanted = {"a": {"b": 1}, "list": [{"x": 0}], "missing": 1}
    assert narrowed(stored, wanted) == {"a": {"b": 2}, "list": [{"x": 1}, {"x": 3}]}


def test_owned_follows_keys_and_items_of_the_apis_book_keeping() -> None:
    fields = {
        "f:metadata": {"f:labels": {"f:team": {}}},
        "f:imagePullSecrets": {'k:{"name":"login"}': {}},
        "f:finalizers": {'v:"ours"': {}},
    }
    stored = {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {
            "name": "job",
            "namespace": "n",
            "uid": "u",
            "labels": {"team": "l2r", "theirs": "x"},
            "managedFields": [{"manager": "pulumi-kubernetes", "operation": "Apply", "fieldsV1": fields}],
        },
        "imagePullSecrets": [{"name": "theirs"}, {"name": "login"}],
        "finalizers": ["theirs", "ours"],
    }

    assert owned(stored) == {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {"name": "job", "namespace": "n", "labels": {"team": "l2r"}},
        "imagePullSecrets": [{"name": "login"}],
        "finalizers": ["ours"],
    }
