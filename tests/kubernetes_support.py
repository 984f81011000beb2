"""A real Kubernetes for the tests: found, started by `scripts/kubernetes`, and used.

Most tests need only the control plane, which starts in seconds; tests that ask for it get a node that runs pods.
"""

from __future__ import annotations

import copy
import fcntl
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import yaml
from kubernetes import client, dynamic
from kubernetes.client.exceptions import ApiException

from infra.check.recording import Registration
from tests.services_support import PATIENCE_S, wait_until

SCRIPT = Path(__file__).parents[1] / "scripts" / "kubernetes"
INSTALL = "scripts/kubernetes install && scripts/kubernetes build"
FIELD_MANAGER = "research-runtime"
PYTHON_IMAGE = "test.local/python:3.11"
"""The image that the fixture `python_image` imports onto the node."""

# Read at import: each test gets its own cache folder, which lacks the build that took minutes.
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "research-runtime" / "kubernetes"


def find_missing(*, node: bool = False) -> str | None:
    """Name the missing parts for a Kubernetes, or for a node with pods; None if nothing is missing. Waits for a build that runs
    beside the tests."""
    for lock in CACHE.glob("*/lock"):
        with lock.open() as opened:
            fcntl.flock(opened, fcntl.LOCK_SH)
    done = run_script("status")
    packages, built = done.stdout.splitlines()[:2]
    absent = packages.removeprefix("packages: ").removeprefix("installed").removeprefix("missing ").split()
    if not node:
        absent = [each for each in absent if each in ("etcd-server", "openssl", "curl")]
    if absent:
        return f"Kubernetes (without {', '.join(absent)})"
    return "Kubernetes (its programs are not built)" if built.endswith("not built") else None


class Kubernetes:
    """A Kubernetes in a private folder. It ends with this process, even if the process is killed."""

    def __init__(self, *, node: bool = False) -> None:
        # Short because of its sockets: a pytest path can exceed the 107 characters of a socket's name.
        self.folder = Path(tempfile.mkdtemp(prefix="rr-kubernetes-"))
        self.kubeconfig = self.folder / "kubeconfig"
        self._node = node

    def start(self) -> Self:
        options = ["--owner", str(os.getpid())] + ([] if self._node else ["--control-plane-only"])
        done = run_script("start", *options, str(self.folder))
        if done.returncode != 0:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise RuntimeError(f"Kubernetes did not start (exit code {done.returncode}): {done.stderr}")
        return self

    def stop(self) -> None:
        """Stop it; stopping twice changes nothing."""
        run_script("stop", str(self.folder))

    @property
    def server(self) -> str:
        return str(self._cluster()["server"])

    @property
    def node_address(self) -> str:
        """The address at which pods reach their node, which is this machine."""
        [node] = client.CoreV1Api(self.administrator().api).list_node().items
        return next(str(each.address) for each in node.status.addresses if each.type == "InternalIP")

    def administrator(self) -> Access:
        user = yaml.safe_load(self.kubeconfig.read_text())["users"][0]["user"]
        return Access(self, user["token"])

    def account(self, namespace: str, name: str) -> Access:
        """Open the API as a service account."""
        return Access(self, self.token(namespace, name))

    def bind_folder(self, namespace: str, claim: str, folder: Path) -> None:
        """Make a claim by which pods read a folder of this machine."""
        volume, common = f"{namespace}-{claim}", {"accessModes": ["ReadOnlyMany"], "storageClassName": ""}
        spec = {**common, "capacity": {"storage": "1Gi"}, "hostPath": {"path": str(folder)}}
        wanted = {**common, "volumeName": volume, "resources": {"requests": {"storage": "1Gi"}}}
        core = client.CoreV1Api(self.administrator().api)
        core.create_persistent_volume({"metadata": {"name": volume}, "spec": spec})
        core.create_namespaced_persistent_volume_claim(namespace, {"metadata": {"name": claim}, "spec": wanted})

    def token(self, namespace: str, name: str) -> str:
        """Create a token of a service account, as the API does for pods."""
        made = client.CoreV1Api(self.administrator().api).create_namespaced_service_account_token(
            name, namespace, {"spec": {"expirationSeconds": 3600}}
        )
        return str(made.status.token)

    def member(self, group: str) -> Access:
        """Open the API as a person in a group."""
        access = self.administrator()
        access.api.default_headers |= {"Impersonate-User": "somebody", "Impersonate-Group": group}
        return access

    def delete_namespace(self, name: str) -> None:
        """Delete the namespace with its objects, and return when it is gone. A missing namespace is no error."""
        core = client.CoreV1Api(self.administrator().api)
        manifest = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
        if self.administrator().find(manifest) is not None:
            core.delete_namespace(name)
            eventually(lambda: self.administrator().find(manifest) is None)

    def new_namespace(self, prefix: str, labels: Mapping[str, str] | None = None) -> str:
        made = client.CoreV1Api(self.administrator().api).create_namespace(
            {"metadata": {"generateName": f"{prefix}-", "labels": dict(labels or {})}}
        )
        name = str(made.metadata.name)
        self.wait_for_account(name)
        return name

    def wait_for_account(self, namespace: str) -> None:
        """Wait for the default service account: a controller creates it, and pods without an account need it."""
        core = client.CoreV1Api(self.administrator().api)
        eventually(
            lambda: "default" in {each.metadata.name for each in core.list_namespaced_service_account(namespace).items}
        )

    def kubeconfig_with_context(self, path: Path, context: str, *, token: str | None = None) -> Path:
        """Write a kubeconfig, by default the administrator's, whose context has the stack's name for its cluster."""
        config = yaml.safe_load(self.kubeconfig.read_text())
        if token:
            config["users"][0]["user"] = {"token": token}
        config["contexts"][0]["name"] = config["current-context"] = context
        path.write_text(yaml.safe_dump(config))
        path.chmod(0o600)
        return path

    def _cluster(self) -> dict[str, Any]:
        found: dict[str, Any] = yaml.safe_load(self.kubeconfig.read_text())["clusters"][0]["cluster"]
        return found

    def configuration(self, token: str) -> client.Configuration:
        configuration = client.Configuration()
        configuration.host = self.server
        configuration.ssl_ca_cert = self._cluster()["certificate-authority"]
        configuration.api_key = {"authorization": f"Bearer {token}"}
        # Ignore proxy settings in the environment for 127.0.0.1.
        configuration.proxy = None
        return configuration


class Access:
    """The API with one identity."""

    def __init__(self, kubernetes: Kubernetes, token: str) -> None:
        self.api = client.ApiClient(kubernetes.configuration(token))
        self._cache = kubernetes.folder / "discovery.json"
        self._dynamic: dynamic.DynamicClient | None = None

    @property
    def dynamic(self) -> dynamic.DynamicClient:
        if self._dynamic is None:
            self._dynamic = dynamic.DynamicClient(self.api, cache_file=str(self._cache))
        return self._dynamic

    def apply(self, manifest: Mapping[str, Any], *, dry_run: bool = False, force: bool = False) -> dict[str, Any]:
        """Apply server-side; raise ApiException with the API's answer."""
        metadata = manifest["metadata"]
        resource = self.dynamic.resources.get(api_version=manifest["apiVersion"], kind=manifest["kind"])
        applied: dict[str, Any] = resource.server_side_apply(
            body=dict(manifest),
            name=metadata["name"],
            namespace=metadata.get("namespace"),
            field_manager=FIELD_MANAGER,
            force_conflicts=force,
            **({"dry_run": "All"} if dry_run else {}),
        ).to_dict()
        return applied

    def find(self, manifest: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the stored object with the kind and name of `manifest`."""
        metadata = manifest["metadata"]
        resource = self.dynamic.resources.get(api_version=manifest["apiVersion"], kind=manifest["kind"])
        try:
            found: dict[str, Any] = resource.get(name=metadata["name"], namespace=metadata.get("namespace")).to_dict()
        except ApiException as refused:
            if refused.status == 404:
                return None
            raise
        return found

    def may(self, verb: str, resource: str, *, namespace: str | None = None, group: str = "") -> bool:
        """Ask the API whether this identity may do this. `resource` may name a subresource: `pods/log`."""
        name, _, subresource = resource.partition("/")
        attributes = {"verb": verb, "group": group, "resource": name, "subresource": subresource}
        review = client.AuthorizationV1Api(self.api).create_self_subject_access_review(
            {"spec": {"resourceAttributes": attributes | ({"namespace": namespace} if namespace else {})}}
        )
        return bool(review.status.allowed)


def manifests(registrations: Sequence[Registration]) -> list[dict[str, Any]]:
    """Return the Kubernetes objects that a program registered, in order."""
    return [copy.deepcopy(dict(each.inputs)) for each in registrations if is_object(each.type)]


def is_object(type_: str) -> bool:
    return re.fullmatch(r"kubernetes:[^:]+:[A-Z]\w+", type_) is not None


def eventually(condition: Any, *, timeout_s: float = PATIENCE_S) -> None:
    assert wait_until(condition, timeout_s=timeout_s, every_s=0.1), "it did not come true in time"


def run_script(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: PLW1510
        [str(SCRIPT), *args],
        env={**os.environ, "RUNTIME_KUBERNETES_CACHE": str(CACHE)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )
