"""The TPU API v2alpha1, and the part of Compute Engine that Ray's node provider and the reaper call.

It is as strict as Google's own description: routes, query parameters, bodies and answers are checked against the
discovery documents of Google's client library. Names can be taken, lists come in pages, creation lasts until the
operation is polled, and callers are limited to their permissions.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any, ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

from tests.fakes import google
from tests.fakes.faults import FaultyServer, Request, Response
from tests.fakes.google import Method, Refusal, check_fields, read_document

DOCUMENTS = {"tpu.googleapis.com": "tpu.v2alpha1", "compute.googleapis.com": "compute.v1"}

PERMISSIONS = {
    "compute.instances.get": "compute.instances.get",
    "compute.instances.getGuestAttributes": "compute.instances.getGuestAttributes",
    "compute.instances.list": "compute.instances.list",
    "compute.instances.setLabels": "compute.instances.setLabels",
    "compute.zoneOperations.get": "compute.zoneOperations.get",
    "tpu.projects.locations.nodes.create": "tpu.nodes.create",
    "tpu.projects.locations.nodes.delete": "tpu.nodes.delete",
    "tpu.projects.locations.nodes.get": "tpu.nodes.get",
    "tpu.projects.locations.nodes.list": "tpu.nodes.list",
    "tpu.projects.locations.nodes.patch": "tpu.nodes.update",
    "tpu.projects.locations.operations.get": "tpu.operations.get",
    "tpu.projects.locations.queuedResources.delete": "tpu.nodes.delete",
    "tpu.projects.locations.queuedResources.list": "tpu.nodes.list",
}
"""Method → required permission."""

NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
LABEL = re.compile(r"[a-z0-9_-]{0,63}")
ACCELERATOR = re.compile(r"(v\d+[a-z]*)-\d+")

Answer = dict[str, Any]
Query = Mapping[str, list[str]]


class TpuServer(FaultyServer):
    """One project, any zone. `environment` points the runtime at it; `endpoint` is for Google's own client."""

    def __init__(self, project: str = "p-1", zone: str = "us-central2-b", *, page: int = 3) -> None:
        super().__init__()
        self.project, self.zone, self.page = project, zone, page
        self.nodes: dict[str, Answer] = {}
        """Resource name → node, in the order of creation."""
        self.created: list[Answer] = []
        """Bodies of the requests that created nodes."""
        self.instances: dict[str, Answer] = {}
        self.guest_attributes: dict[str, dict[str, str]] = {}
        """Instance → what it says of itself in the namespace `runtime`."""
        self.queued: dict[str, Answer] = {}
        self.permissions: set[str] | None = None
        """The caller's permissions; None is all."""
        self.slow_creation = False
        """Whether nodes stay in CREATING."""
        self.undeletable: set[str] = set()
        """Short names of nodes whose deletion is refused."""
        self.slow_deletion = False
        """Whether nodes and queued resources stay in DELETING once their deletion was asked for."""
        self.stubborn: set[str] = set()
        """Short names of nodes whose deletion is accepted and then fails, so that nothing changes."""
        self.refusals: dict[str, Refusal] = {}
        """Method → refusal of each of its calls."""
        self.failing: dict[str, str] = {}
        """Short names of nodes whose creation is accepted and then fails, with Google's words."""
        self.refuse_paths: list[str] = []
        """Parts of paths whose calls are refused."""
        self.clock_offset: timedelta | None = None
        """Time by which the caller's clock is ahead of this one's; None if answers have no date."""
        self.refused: list[str] = []
        """Requests outside Google's description."""
        self.give_addresses: Callable[[str, int], list[str]] = lambda type_, number: [
            f"10.64.{number // 250}.{number % 250 + 3}"
        ]
        """Accelerator type and number of a new node → addresses of its hosts."""
        self.now: Callable[[], str] = lambda: "2026-11-20T10:00:00.123456789Z"
        """When a node is made that somebody creates through the API."""
        self._operations: dict[str, Callable[[], None] | None] = {}
        self._errors: dict[str, str] = {}
        self._numbers = itertools.count(1)

    @property
    def environment(self) -> dict[str, str]:
        return {"RUNTIME_GOOGLE_API": self.url}

    @property
    def parent(self) -> str:
        return f"projects/{self.project}/locations/{self.zone}"

    def endpoint(self, service: str) -> str:
        root = f"{self.url}/{service}.googleapis.com/"
        return root + read_document(DOCUMENTS[f"{service}.googleapis.com"])["servicePath"]

    # arranged by a test

    def add_node(self, name: str, state: str = "READY", **fields: Any) -> str:
        resource = f"{self.parent}/nodes/{name}"
        self.nodes[resource] = {
            "name": resource,
            "state": state,
            "createTime": "2026-11-20T10:00:00.123456789Z",
            **fields,
        }
        return resource

    def preempt(self, resource: str) -> None:
        self.nodes[resource]["state"] = "PREEMPTED"

    def add_instance(self, inputs: Mapping[str, Any], ip: str = "10.64.0.2", *, created: str | None = None) -> None:
        """Add the VM that Pulumi would create from these inputs."""
        name = inputs["name"]
        self.instances[name] = {
            "name": name,
            "status": "RUNNING",
            "labels": dict(inputs["labels"]),
            "labelFingerprint": _fingerprint(inputs["labels"]),
            "networkInterfaces": [{"networkIP": ip}],
            "metadata": {"items": [{"key": key, "value": value} for key, value in inputs.get("metadata", {}).items()]},
            **({"creationTimestamp": created} if created else {}),
        }

    def calls(self) -> list[str]:
        return [method.id for method, _ in filter(None, map(self._route, self.log))]

    # answering

    def answer(self, request: Request) -> Response:
        try:
            value, status = self._serve(request), 200
        except Refusal as refusal:
            if refusal.ours:
                self.refused.append(f"{request.method} {request.path}: {refusal.message}")
            status = refusal.status
            value = {"error": {"code": status, "message": refusal.message, "status": refusal.reason}}
        headers = {"Content-Type": "application/json"}
        if self.clock_offset is not None:
            headers["Date"] = format_datetime(datetime.now(UTC) - self.clock_offset, usegmt=True)
        return Response(status, headers, json.dumps(value).encode())

    def _serve(self, request: Request) -> Answer:
        routed = self._route(request)
        if routed is None:
            raise Refusal(404, "NOT_FOUND", "no such method", ours=True)
        method, path = routed
        query = parse_qs(urlsplit(request.path).query, keep_blank_values=True)
        google._check_query(method, query)
        body = google._read_body(method, request)
        permission = PERMISSIONS.get(method.id)
        handler = self._handlers.get(method.id)
        if permission is None or handler is None:
            raise Refusal(501, "UNIMPLEMENTED", f"this fake does not do `{method.id}`", ours=True)
        if self.permissions is not None and permission not in self.permissions:
            raise Refusal(403, "PERMISSION_DENIED", f"Permission '{permission}' denied on 'projects/{self.project}'")
        if any(part in path for part in self.refuse_paths):
            raise Refusal(403, "PERMISSION_DENIED", f"Permission denied on '{path}'")
        if method.id in self.refusals:
            raise self.refusals[method.id]
        value = handler(self, path, query, body)
        if method.response is not None:
            check_fields(value, method.response, method.schemas, "answer")
        return value

    def _route(self, request: Request) -> tuple[Method, str] | None:
        host, _, path = urlsplit(request.path).path.lstrip("/").partition("/")
        for method in _methods_of(host):
            if method.verb == request.method and method.pattern.fullmatch(path):
                return method, unquote(path)
        return None

    # TPU

    def _create_node(self, path: str, query: Query, body: Answer) -> Answer:
        parent, name = _resource(path), query.get("nodeId", [""])[0]
        if not NAME.fullmatch(name):
            raise _invalid(f"invalid node id: {name!r}")
        self._check_node(body)
        resource = f"{parent}/nodes/{name}"
        if resource in self.nodes:
            raise Refusal(409, "ALREADY_EXISTS", f"Resource '{resource}' already exists")
        number = next(self._numbers)
        self.created.append(body)
        self.nodes[resource] = {
            **body,
            "name": resource,
            "state": "CREATING",
            "createTime": self.now(),
            "networkEndpoints": [
                {"ipAddress": address} for address in self.give_addresses(body["acceleratorType"], number)
            ],
        }

        def finish() -> None:
            if resource in self.nodes and not self.slow_creation:
                self.nodes[resource]["state"] = "READY"

        if name in self.failing:
            del self.nodes[resource]
            return self._operation(parent, None, error=self.failing[name])
        return self._operation(parent, finish)

    def _check_node(self, body: Answer) -> None:
        if not ACCELERATOR.fullmatch(body.get("acceleratorType", "")) or not body.get("runtimeVersion"):
            raise _invalid("acceleratorType and runtimeVersion are required")
        if len(body.get("schedulingConfig", {})) > 1 and "reservationName" not in body["schedulingConfig"]:
            raise _invalid("schedulingConfig: one of preemptible, spot, reserved")
        for part in ("network", "subnetwork"):
            if body.get("networkConfig", {}).get(part, "").startswith("http"):
                raise _invalid(f"networkConfig.{part} is no resource name")
        for key, value in body.get("labels", {}).items():
            if not LABEL.fullmatch(key) or not LABEL.fullmatch(value):
                raise _invalid(f"label {key}={value}")

    def _list_nodes(self, path: str, query: Query, body: Answer) -> Answer:
        parent = _resource(path)
        return self._page("nodes", [each for name, each in self.nodes.items() if name.startswith(f"{parent}/")], query)

    def _get_node(self, path: str, query: Query, body: Answer) -> Answer:
        return self._node(_resource(path))

    def _patch_node(self, path: str, query: Query, body: Answer) -> Answer:
        node = self._node(_resource(path))
        for key in query.get("updateMask", [""])[0].split(","):
            if key not in ("labels", "metadata", "tags", "description"):
                raise _invalid(f"updateMask {key!r}")
            node[key] = body.get(key, {})
        return self._operation(_resource(path).rpartition("/nodes/")[0], None)

    def _delete_node(self, path: str, query: Query, body: Answer) -> Answer:
        resource = _resource(path)
        self._node(resource)
        if resource.rpartition("/")[2] in self.undeletable:
            raise Refusal(409, "ABORTED", f"unable to queue the operation on {resource}")
        if self.slow_deletion:
            self.nodes[resource]["state"] = "DELETING"
        elif resource.rpartition("/")[2] not in self.stubborn:
            del self.nodes[resource]
        return self._operation(resource.rpartition("/nodes/")[0], None)

    def _list_queued(self, path: str, query: Query, body: Answer) -> Answer:
        return self._page("queuedResources", list(self.queued.values()), query)

    def _delete_queued(self, path: str, query: Query, body: Answer) -> Answer:
        resource = _resource(path)
        if resource not in self.queued:
            raise Refusal(404, "NOT_FOUND", f"Resource '{resource}' was not found")
        asked = [name for name, node in self.nodes.items() if node.get("queuedResource") == resource]
        if asked and query.get("force") != ["true"]:
            raise Refusal(400, "FAILED_PRECONDITION", f"Queued resource '{resource}' has nodes; use force")
        for name in asked:
            del self.nodes[name]
        if self.slow_deletion:
            self.queued[resource]["state"] = {"state": "DELETING"}
        else:
            del self.queued[resource]
        return self._operation(resource.rpartition("/queuedResources/")[0], None)

    def _get_operation(self, path: str, query: Query, body: Answer) -> Answer:
        name = _resource(path)
        if name not in self._operations:
            raise Refusal(404, "NOT_FOUND", f"Operation '{name}' was not found")
        finish = self._operations[name]
        if finish is not None:
            finish()
        if name in self._errors:
            return {"name": name, "done": True, "error": {"code": 8, "message": self._errors[name]}}
        return {"name": name, "done": True, "response": {}}

    def _node(self, resource: str) -> Answer:
        if resource not in self.nodes:
            raise Refusal(404, "NOT_FOUND", f"Resource '{resource}' was not found")
        return self.nodes[resource]

    def _operation(self, parent: str, finish: Callable[[], None] | None, *, error: str | None = None) -> Answer:
        name = f"{parent}/operations/operation-{next(self._numbers)}"
        self._operations[name] = finish
        if error is not None:
            self._errors[name] = error
        return {"name": name, "done": False}

    def _page(self, key: str, items: list[Answer], query: Query) -> Answer:
        size = min(self.page, int(query.get("pageSize", ["0"])[0]) or self.page)
        start = int(query.get("pageToken", ["0"])[0])
        more = {"nextPageToken": str(start + size)} if start + size < len(items) else {}
        answer = {key: items[start : start + size], **more} if items else {}
        return _mask(answer, key, query["fields"][0]) if "fields" in query else answer

    # Compute Engine

    def _list_instances(self, path: str, query: Query, body: Answer) -> Answer:
        wanted = query.get("filter", [""])[0]
        return {"items": [each for each in self.instances.values() if not wanted or matches(wanted, each)]}

    def _get_instance(self, path: str, query: Query, body: Answer) -> Answer:
        return self._instance(path.rpartition("/")[2])

    def _get_guest_attributes(self, path: str, query: Query, body: Answer) -> Answer:
        name, wanted = path.split("/")[-2], query.get("queryPath", [""])[0]
        self._instance(name)
        namespace = wanted.partition("/")[0]
        known = self.guest_attributes.get(name)
        if not known:
            raise Refusal(404, "notFound", f"The resource '{wanted}' of type 'Guest Attribute' was not found")
        items = [{"namespace": namespace, "key": key, "value": value} for key, value in known.items()]
        return {"queryPath": wanted, "queryValue": {"items": items}}

    def _set_labels(self, path: str, query: Query, body: Answer) -> Answer:
        instance = self._instance(path.split("/")[-2])
        if body.get("labelFingerprint") != instance["labelFingerprint"]:
            raise Refusal(412, "conditionNotMet", "Labels fingerprint either invalid or resource labels have changed")
        instance["labels"] = body["labels"]
        instance["labelFingerprint"] = _fingerprint(body["labels"])
        return {"name": f"operation-{next(self._numbers)}", "status": "DONE"}

    def _zone_operation(self, path: str, query: Query, body: Answer) -> Answer:
        return {"name": path.rpartition("/")[2], "status": "DONE"}

    def _instance(self, name: str) -> Answer:
        if name not in self.instances:
            raise Refusal(404, "notFound", f"The resource 'instances/{name}' was not found")
        return self.instances[name]

    _handlers: ClassVar[Mapping[str, Callable[..., Answer]]] = {
        "compute.instances.get": _get_instance,
        "compute.instances.getGuestAttributes": _get_guest_attributes,
        "compute.instances.list": _list_instances,
        "compute.instances.setLabels": _set_labels,
        "compute.zoneOperations.get": _zone_operation,
        "tpu.projects.locations.nodes.create": _create_node,
        "tpu.projects.locations.nodes.delete": _delete_node,
        "tpu.projects.locations.nodes.get": _get_node,
        "tpu.projects.locations.nodes.list": _list_nodes,
        "tpu.projects.locations.nodes.patch": _patch_node,
        "tpu.projects.locations.operations.get": _get_operation,
        "tpu.projects.locations.queuedResources.delete": _delete_queued,
        "tpu.projects.locations.queuedResources.list": _list_queued,
    }


@functools.cache
def _methods_of(host: str) -> tuple[Method, ...]:
    if host not in DOCUMENTS:
        return ()
    document = read_document(DOCUMENTS[host])
    return tuple(google._methods(document, document))


def _resource(path: str) -> str:
    """Return the parent for a collection such as `v2alpha1/projects/P/locations/Z/nodes`, else the member's name."""
    name = path.partition("/")[2]
    parts = name.split("/")
    return name if len(parts) % 2 == 0 else "/".join(parts[:-1])


def _fingerprint(labels: Mapping[str, str]) -> str:
    return base64.b64encode(hashlib.sha256(json.dumps(labels, sort_keys=True).encode()).digest()[:8]).decode()


def _mask(answer: Answer, key: str, fields: str) -> Answer:
    """Return the parts of a list's page that `fields` names, such as `nextPageToken,nodes(name,state)`.

    https://cloud.google.com/apis/docs/system-parameters
    """
    matched = re.fullmatch(rf"nextPageToken,(?:unreachable,)?{key}\(([a-zA-Z,]+)\)", fields)
    if matched is None:
        raise _invalid(f"fields={fields}")
    wanted = matched[1].split(",")
    schema = {"nodes": "Node", "queuedResources": "QueuedResource"}[key]
    if unknown := set(wanted) - set(read_document("tpu.v2alpha1")["schemas"][schema]["properties"]):
        raise _invalid(f"fields: no such field {unknown}")
    shown = [{name: each[name] for name in wanted if name in each} for each in answer.get(key, ())]
    token = {"nextPageToken": answer["nextPageToken"]} if "nextPageToken" in answer else {}
    return {**({key: shown} if shown else {}), **token}


def _invalid(what: str) -> Refusal:
    return Refusal(400, "INVALID_ARGUMENT", what, ours=True)


# Compute Engine's filters, as far as Ray uses them


def matches(expression: str, instance: Mapping[str, Any]) -> bool:
    """Return whether a filter such as `(labels.a = b) AND (NOT labels.c:*)` matches `instance`."""
    tokens = re.findall(r"[()]|AND\b|OR\b|NOT\b|[\w.-]+\s*=\s*[\w-]+|[\w.-]+:\*|\S+", expression)
    found, rest = _either(tokens, instance)
    if rest:
        raise _invalid(f"filter: {' '.join(rest)}")
    return found


def _either(tokens: list[str], instance: Mapping[str, Any]) -> tuple[bool, list[str]]:
    found, tokens = _both(tokens, instance)
    while tokens[:1] == ["OR"]:
        other, tokens = _both(tokens[1:], instance)
        found = found or other
    return found, tokens


def _both(tokens: list[str], instance: Mapping[str, Any]) -> tuple[bool, list[str]]:
    found, tokens = _one(tokens, instance)
    while tokens[:1] == ["AND"]:
        other, tokens = _one(tokens[1:], instance)
        found = found and other
    return found, tokens


def _one(tokens: list[str], instance: Mapping[str, Any]) -> tuple[bool, list[str]]:
    if not tokens:
        raise _invalid("filter: ends early")
    first, rest = tokens[0], tokens[1:]
    if first == "NOT":
        found, rest = _one(rest, instance)
        return not found, rest
    if first == "(":
        found, rest = _either(rest, instance)
        if rest[:1] != [")"]:
            raise _invalid("filter: an open bracket")
        return found, rest[1:]
    if first.endswith(":*"):
        return _field(instance, first[:-2]) is not None, rest
    key, equals, value = first.partition("=")
    if not equals:
        raise _invalid(f"filter: {first}")
    return _field(instance, key.strip()) == value.strip(), rest


def _field(instance: Mapping[str, Any], path: str) -> Any:
    kind, _, key = path.partition(".")
    return instance.get(kind, {}).get(key) if key else instance.get(kind)


def names_of(nodes: Iterable[str]) -> list[str]:
    return [each.rpartition("/")[2] for each in nodes]
