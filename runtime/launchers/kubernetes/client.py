"""The Kubernetes API as plain JSON: a launcher's requests, and the meaning of its refusals.

The library is imported on use. Objects stay dictionaries, since its model classes take longer to build than a thousand
pods take to arrive.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from runtime.errors import InfrastructureFailure, MissingExtra, NotPossible

Object = Mapping[str, Any]

_GROUPS: Final = {"jobs": "/apis/batch/v1", "leases": "/apis/coordination.k8s.io/v1"}
_READ_TRIES: Final = 3
_PATIENCE_S: Final = 30


class KubernetesUnavailable(InfrastructureFailure):
    """The API does not answer: nothing is known about any job."""


class ApiRefused(NotPossible):
    """The API refused a request; `status` is the HTTP code and `said` its own sentence."""

    def __init__(self, what: str, status: int, said: str, *, hint: str | None = None) -> None:
        self.status, self.said = status, said
        super().__init__(f"kubernetes refuses to {what}: {said}", facts=[f"HTTP {status}"], hint=hint)


class KubernetesCluster:
    """One cluster, reached by a context of the user's kubeconfig."""

    def __init__(self, context: str | None, kubeconfig: str | None) -> None:
        """`kubeconfig` is the value of the variable KUBECONFIG; None for the usual place."""
        self.context, self._kubeconfig = context, kubeconfig
        self._client: Any = None

    def close(self) -> None:
        connection, self._client = self._client, None
        if connection is not None:
            connection.rest_client.pool_manager.clear()

    def get(self, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        return self._read(f"get the {_one(kind)} `{name}`", _path(kind, namespace, name), absent=404)

    def list(self, kind: str, namespace: str, *, labels: str = "", fields: str = "") -> list[dict[str, Any]]:
        query = [(key, value) for key, value in (("labelSelector", labels), ("fieldSelector", fields)) if value]
        answer = self._read(f"list the {kind}", _path(kind, namespace), query) or {}
        return list(answer.get("items", []))

    def create(self, kind: str, namespace: str, body: Object, *, dry_run: bool = False) -> dict[str, Any] | None:
        """The new object; None if one of that name exists already."""
        what, query = f"create the {_one(kind)} `{body['metadata']['name']}`", [("dryRun", "All")] if dry_run else []
        try:
            return self._ask(what, "POST", _path(kind, namespace), query, body)
        except ApiRefused as refused:
            # A namespace that is being deleted refuses new objects with 409, too.
            if refused.status == 409 and "already exists" in refused.said:
                return None
            raise

    def replace(self, kind: str, namespace: str, body: Object) -> bool:
        """Write a changed object back; False if it was changed since it was read."""
        name = body["metadata"]["name"]
        what = f"replace the {_one(kind)} `{name}`"
        return self._ask(what, "PUT", _path(kind, namespace, name), body=body, absent=409) is not None

    def patch(self, kind: str, namespace: str, name: str, changes: Object) -> bool:
        """Merge changes into an object; False if there is none."""
        what = f"change the {_one(kind)} `{name}`"
        return self._ask(what, "PATCH", _path(kind, namespace, name), body=changes, absent=404) is not None

    def delete(self, kind: str, namespace: str, name: str, *, grace_s: int | None = None) -> None:
        """Delete an object and all that it owns; already gone is success."""
        options: dict[str, Any] = {"propagationPolicy": "Foreground" if kind == "jobs" else "Background"}
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        what = f"delete the {_one(kind)} `{name}`"
        self._ask(what, "DELETE", _path(kind, namespace, name), body=options, absent=404)

    def evict(self, namespace: str, pod: str) -> None:
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": namespace}}
        self._ask(f"evict the pod `{pod}`", "POST", f"{_path('pods', namespace, pod)}/eviction", body=body)

    def open_exec(self, namespace: str, pod: str, words: Sequence[str]) -> Any:
        """Open a websocket to a command in the pod's first container: channel 0 is its input, 1 its output, 2 its errors."""
        connection = self._connection()
        from kubernetes import client
        from kubernetes.client.exceptions import ApiException
        from kubernetes.stream import stream

        # The library swaps a method of its client while it connects, so the client is not shared.
        api = client.CoreV1Api(client.ApiClient(connection.configuration))
        try:
            return stream(
                api.connect_get_namespaced_pod_exec,
                pod,
                namespace,
                command=list(words),
                stdin=True,
                stdout=True,
                stderr=True,
                tty=False,
                binary=True,
                _preload_content=False,
                _request_timeout=_PATIENCE_S,
            )
        except ApiException as problem:
            raise KubernetesUnavailable(
                f"cannot run a command in the pod `{pod}`: {_first_line(problem.reason)}",
                hint=f"kubectl -n {namespace} exec {pod} -- true",
            ) from problem

    def run(self, namespace: str, pod: str, words: Sequence[str]) -> str:
        """Run a command in the pod to its end; returns its output and errors."""
        socket = self.open_exec(namespace, pod, words)
        socket.run_forever(timeout=_PATIENCE_S)
        said = (socket.read_channel(1) or b"") + (socket.read_channel(2) or b"")
        close_exec(socket)
        return bytes(said).decode("utf-8", "replace")

    def read_log(self, namespace: str, pod: str, lines: int) -> str:
        """The last lines that a pod's only container printed; empty if it has not begun, or is gone."""
        try:
            answer = self._raw("GET", f"{_path('pods', namespace, pod)}/log", [("tailLines", str(lines))], None)
        except ApiRefused as refused:
            if refused.status in (400, 404):
                return ""
            raise
        return bytes(answer.data).decode("utf-8", "replace")

    def _read(
        self, what: str, path: str, query: Sequence[tuple[str, str]] = (), absent: int = 0
    ) -> dict[str, Any] | None:
        for again in range(1, _READ_TRIES):
            try:
                return self._ask(what, "GET", path, query, absent=absent)
            except KubernetesUnavailable:
                time.sleep(0.15 * 2**again)
        return self._ask(what, "GET", path, query, absent=absent)

    def _ask(
        self,
        what: str,
        method: str,
        path: str,
        query: Sequence[tuple[str, str]] = (),
        body: Object | None = None,
        absent: int = 0,
    ) -> dict[str, Any] | None:
        """The answer of the API; None for the status `absent`."""
        try:
            answer = self._raw(method, path, query, body)
        except ApiRefused as refused:
            if refused.status == absent:
                return None
            raise ApiRefused(what, refused.status, refused.said, hint=refused.hint) from None
        return dict(json.loads(answer.data))

    def _raw(self, method: str, path: str, query: Sequence[tuple[str, str]], body: Object | None) -> Any:
        from urllib.parse import urlencode

        # The library's own calls differ between versions; its connections, keys and tokens do not.
        connection = self._connection()
        from urllib3.exceptions import HTTPError

        headers = {"Accept": "application/json, */*", "User-Agent": "research-runtime"}
        for auth in connection.configuration.auth_settings().values():
            if auth.get("in") == "header" and auth.get("value"):
                headers[auth["key"]] = auth["value"]
        if body is not None:
            headers["Content-Type"] = "application/merge-patch+json" if method == "PATCH" else "application/json"
        url = connection.configuration.host + path + (f"?{urlencode(list(query))}" if query else "")
        try:
            answer = connection.rest_client.pool_manager.request(
                method,
                url,
                headers=headers,
                body=json.dumps(body).encode() if body is not None else None,
                timeout=_PATIENCE_S,
                retries=False,
            )
        except (HTTPError, OSError) as problem:
            raise KubernetesUnavailable(
                f"the kubernetes API of {self._name()} does not answer: {_first_line(problem)}",
                hint="kubectl version, with the same context",
            ) from problem
        if answer.status >= 300:
            raise self._explain(answer.status, answer.data.decode("utf-8", "replace"))
        return answer

    def _explain(self, status: int, text: str) -> Exception:
        try:
            said = str(json.loads(text)["message"])
        except (TypeError, ValueError, KeyError):
            said = _first_line(text)
        if status == 401:
            return NotPossible(
                f"the kubernetes API of {self._name()} does not know who is asking",
                facts=[said],
                hint="sign in again, and try `kubectl auth whoami`",
            )
        if status == 429 or status >= 500:
            return KubernetesUnavailable(
                f"the kubernetes API of {self._name()} cannot answer: {said}", facts=[f"HTTP {status}"]
            )
        hint = "bind the role `runtime-launcher` of the namespace to yourself" if status == 403 else None
        if status == 403 and "exceeded quota" in said:
            hint = "kubectl describe resourcequota; ask for less, or wait until others have ended"
        return ApiRefused("do that", status, said, hint=hint)

    def _name(self) -> str:
        return f"context `{self.context}`" if self.context else "the current context"

    def _connection(self) -> Any:
        if self._client is not None:
            return self._client
        try:
            from kubernetes import client, config
        except ModuleNotFoundError as problem:
            raise MissingExtra("launcher `kubernetes`", "kubernetes") from problem
        from urllib.parse import urlsplit

        configuration = client.Configuration()
        try:
            config.load_kube_config(  # type: ignore[no-untyped-call]
                config_file=self._kubeconfig, context=self.context, client_configuration=configuration
            )
        except (config.ConfigException, OSError) as problem:
            raise NotPossible(
                f"cannot reach kubernetes by {self._name()}: {_first_line(problem)}",
                facts=[f"kubeconfig: {self._kubeconfig or '~/.kube/config'}"],
                hint="kubectl config get-contexts; set `context` of the target",
            ) from None
        if urlsplit(configuration.host).hostname in ("127.0.0.1", "localhost", "::1"):
            # A proxy of the environment leads away from this machine.
            configuration.proxy = None
        self._client = client.ApiClient(configuration)
        return self._client


def close_exec(socket: Any) -> None:
    """Close a connection in any state."""
    try:
        socket.close()
    except Exception:  # the other end is gone
        pass
    socket.sock.shutdown()


def _path(kind: str, namespace: str, name: str = "") -> str:
    return f"{_GROUPS.get(kind, '/api/v1')}/namespaces/{namespace}/{kind}" + (f"/{name}" if name else "")


def _one(kind: str) -> str:
    return {"persistentvolumeclaims": "claim", "resourcequotas": "quota"}.get(kind, kind[:-1])


def _first_line(text: object) -> str:
    lines = str(text).strip().splitlines()
    return lines[0] if lines else "it gave no reason"
