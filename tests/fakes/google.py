"""Google's JSON APIs, as far as we call them, checked against Google's own description of each.

One server stands for all of Google: the host is the first part of the path, as `RUNTIME_GOOGLE_API` has it. Routes,
query parameters and bodies are checked against the discovery documents that Google's client library ships, and so are
this server's own answers: a request outside Google's description is refused, and noted in `refused` for the test. Names
can be taken, soft-deleted or in another project; APIs can be switched off; calls can be denied or made to fail.
"""

from __future__ import annotations

import base64
import binascii
import functools
import importlib.util
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

from tests.fakes.faults import FaultyServer, Request, Response

APIS = (
    "artifactregistry.v1",
    "cloudresourcemanager.v3",
    "compute.v1",
    "iam.v1",
    "iamcredentials.v1",
    "oauth2.v2",
    "orgpolicy.v2",
    "pubsub.v1",
    "secretmanager.v1",
    "serviceusage.v1",
    "serviceusage.v1beta1",
    "storage.v1",
    "tpu.v2",
)

PERMISSIONS = {
    "topics": {"pubsub.topics.publish", "pubsub.topics.get", "pubsub.topics.attachSubscription"},
    "subscriptions": {"pubsub.subscriptions.consume", "pubsub.subscriptions.get"},
    "b": {
        "storage.buckets.get",
        "storage.objects.create",
        "storage.objects.delete",
        "storage.objects.get",
        "storage.objects.list",
        "storage.objects.update",
    },
    "repositories": {
        "artifactregistry.repositories.downloadArtifacts",
        "artifactregistry.repositories.get",
        "artifactregistry.repositories.uploadArtifacts",
    },
    "secrets": {
        "secretmanager.secrets.get",
        "secretmanager.secrets.getIamPolicy",
        "secretmanager.versions.access",
        "secretmanager.versions.add",
        "secretmanager.versions.disable",
        "secretmanager.versions.list",
    },
}
"""Collection → permissions that can be tested there; Google refuses to test others."""

Answer = dict[str, Any]


class Refusal(Exception):
    def __init__(self, status: int, reason: str, message: str, *, ours: bool = False) -> None:
        super().__init__(message)
        self.status, self.reason, self.message = status, reason, message
        self.ours = ours
        """The request itself is at fault: no such route, field or permission."""


@dataclass(frozen=True)
class Method:
    id: str
    service: str
    verb: str
    pattern: re.Pattern[str]
    query: Mapping[str, Any]
    request: Mapping[str, Any] | None
    response: Mapping[str, Any] | None
    schemas: Mapping[str, Any]


@dataclass
class Trouble:
    """A refusal for the next `left` calls of methods whose id matches, on paths that contain `on`."""

    methods: str
    on: str
    refusal: Refusal
    left: int | None


class GoogleServer(FaultyServer):
    """Knows one project. Resources exist only if a test has put them there."""

    def __init__(self, project: str = "p", *, page: int = 2) -> None:
        super().__init__()
        self.project, self.number = project, "123456789012"
        self.email = "ada@example.org"
        self.page = page
        """The most members in one page of a list."""
        self.clock_offset = timedelta(0)
        self.resources: dict[str, Answer] = {f"projects/{project}": {"projectId": project, "state": "ACTIVE"}}
        """Name → answer of `get`: `projects/p/topics/t`, `b/bucket`, `projects/p/global/networks/n` …"""
        self.project_quotas: list[Answer] = []
        """Quotas of the project in the compute API, which has its own project resource of the same name."""
        self.foreign: set[str] = set()
        """Names that belong to another project."""
        self.deleted_buckets: dict[str, Answer] = {}
        self.policies: dict[str, Answer] = {}
        """Resource → its IAM policy."""
        self.allowed: dict[str, set[str]] = {}
        """Resource → the caller's permissions there; a resource that is not listed allows everything."""
        self.versions: dict[str, list[Answer]] = {}
        """Secret → its versions, oldest first."""
        self.payloads: dict[str, bytes] = {}
        """Version → its value, which only `access` returns."""
        self.services: dict[str, bool] = {}
        """API → whether it is enabled; an API that is not listed is."""
        self.lists: dict[str, list[Answer]] = {}
        """Collection → members: `projects/p/locations/Z/acceleratorTypes` …"""
        self.org_policies: dict[str, Answer] = {}
        """Constraint → its effective `spec`."""
        self.refused: list[str] = []
        """Requests outside Google's description. A test about something else expects none."""
        self._troubles: list[Trouble] = []

    @property
    def environment(self) -> dict[str, str]:
        return {"RUNTIME_GOOGLE_API": self.url}

    # arranged by a test

    def put(self, resource: str, /, **fields: Any) -> str:
        self.resources[resource] = fields
        return resource

    def put_secret(self, name: str, *values: bytes, readers: Iterable[str] = ()) -> str:
        resource = f"projects/{self.project}/secrets/{name}"
        self.resources[resource] = {"name": resource, "createTime": "2026-11-01T00:00:00Z"}
        self.versions[resource] = []
        members = list(readers)
        self.policies[resource] = (
            {"bindings": [{"role": "roles/secretmanager.secretAccessor", "members": members}]} if members else {}
        )
        for value in values:
            self._add_version(resource, value)
        return resource

    def deny(self, methods: str, permission: str, on: str = "") -> None:
        """Answer 403 in Google's words for methods whose id matches the glob `methods`."""
        text = f"Permission '{permission}' denied on resource '//{on or methods}' (or it may not exist)."
        self.fail(methods, 403, "PERMISSION_DENIED", text, on=on)

    def fail(
        self, methods: str, status: int, reason: str, message: str, *, on: str = "", times: int | None = None
    ) -> None:
        self._troubles.append(Trouble(methods, on, Refusal(status, reason, message), times))

    def disable_api(self, service: str, title: str | None = None) -> None:
        """Answer as a project in which the API was never enabled."""
        self.services[f"{service}.googleapis.com"] = False
        name = title or service
        self.fail(
            f"{service}.*",
            403,
            "PERMISSION_DENIED",
            f"{name} API has not been used in project {self.number} before or it is disabled. Enable it by visiting "
            f"https://console.developers.google.com/apis/api/{service}.googleapis.com/overview?project={self.number} "
            "then retry. If you enabled this API recently, wait a few minutes for the action to propagate to our "
            "systems and retry.",
        )

    def calls(self, methods: str = "*") -> list[str]:
        """Return the ids of the called methods, in order."""
        found = [self._route(request) for request in self.log]
        return [method.id for method, _ in filter(None, found) if fnmatchcase(method.id, methods)]

    # answering

    def answer(self, request: Request) -> Response:
        try:
            value = self._serve(request)
        except Refusal as refusal:
            if refusal.ours:
                self.refused.append(f"{request.method} {request.path}: {refusal.message}")
            error = {"code": refusal.status, "message": refusal.message, "status": refusal.reason}
            return self._respond(refusal.status, {"error": error})
        return self._respond(200, value)

    def _respond(self, status: int, value: Answer) -> Response:
        date = format_datetime(datetime.now(UTC) - self.clock_offset, usegmt=True)
        return Response(status, {"Content-Type": "application/json", "Date": date}, json.dumps(value).encode())

    def _serve(self, request: Request) -> Answer:
        routed = self._route(request)
        if routed is None:
            raise Refusal(404, "NOT_FOUND", "no such method", ours=True)
        method, path = routed
        query = parse_qs(urlsplit(request.path).query, keep_blank_values=True)
        _check_query(method, query)
        body = _read_body(method, request)
        for trouble in self._troubles:
            if fnmatchcase(method.id, trouble.methods) and trouble.on in path and trouble.left != 0:
                if trouble.left is not None:
                    trouble.left -= 1
                raise trouble.refusal
        handler = _find_handler(method.id)
        if handler is None:
            raise Refusal(501, "UNIMPLEMENTED", f"this fake does not do `{method.id}`", ours=True)
        value = handler(self, path, query, body)
        if method.response is not None:
            check_fields(value, method.response, method.schemas, "answer")
        return value

    def _route(self, request: Request) -> tuple[Method, str] | None:
        parts = urlsplit(request.path)
        host, _, path = parts.path.lstrip("/").partition("/")
        for method in methods_of(host):
            if method.verb == request.method and method.pattern.fullmatch(path):
                return method, unquote(path)
        return None

    # the methods

    def _get(self, path: str, query: Mapping[str, list[str]], body: Answer) -> Answer:
        name = _name(path)
        if name in self.foreign:
            raise Refusal(403, "PERMISSION_DENIED", f"Permission denied on resource '{name}' (or it may not exist).")
        if name not in self.resources:
            raise Refusal(404, "NOT_FOUND", f"Resource not found (resource={name}).")
        return self.resources[name]

    def _get_bucket(self, path: str, query: Mapping[str, list[str]], body: Answer) -> Answer:
        if _name(path) in self.foreign:
            raise Refusal(
                403,
                "",
                f"{self.email} does not have storage.buckets.get access to the Google Cloud Storage bucket. "
                "Permission 'storage.buckets.get' denied on resource (or it may not exist).",
            )
        if _name(path) not in self.resources:
            raise Refusal(404, "", "The specified bucket does not exist.")
        return self.resources[_name(path)]

    def _list_buckets(self, path: str, query: Mapping[str, list[str]], body: Answer) -> Answer:
        if query.get("softDeleted") == ["true"]:
            items = [{"name": name, **fields} for name, fields in self.deleted_buckets.items()]
        else:
            items = [fields for name, fields in self.resources.items() if name.startswith("b/")]
        prefix = query.get("prefix", [""])[0]
        return self._page("items", [item for item in items if item["name"].startswith(prefix)], query)

    def _test(self, path: str, query: Mapping[str, list[str]], body: Answer) -> Answer:
        if path.endswith("/iam/testPermissions"):
            name = _name(path).removesuffix("/iam/testPermissions")
            if name not in self.resources:
                raise Refusal(404, "", "The specified bucket does not exist.")
        else:
            name = _name(path).rpartition(":")[0]
        asked = body.get("permissions", query.get("permissions", []))
        kind = name.split("/")[-2]
        for permission in asked:
            if permission not in PERMISSIONS[kind]:
                raise Refusal(
                    400, "INVALID_ARGUMENT", f"Permission {permission} is not valid for this resource.", ours=True
                )
        # For a missing resource the answer is the empty set:
        # https://cloud.google.com/pubsub/docs/reference/rest/v1/projects.topics/testIamPermissions
        if name not in self.resources:
            return {}
        mine = [permission for permission in asked if permission in self.allowed.get(name, set(asked))]
        return {"permissions": mine} if mine else {}

    def _policy(self, path: str, query: Mapping[str, list[str]], body: Answer) -> Answer:
        name = _name(path).rpartition(":")[0]
        if name not in self.resources:
            raise Refusal(404, "NOT_FOUND", f"Resource [{name}] not found.")
        return {"etag": "BwX=", **self.policies.get(name, {})}

    def _list(self, path: str, query: Mapping[str, list[str]], body: Answer) -> Answer:
        collection = _name(path)
        items = self.lists.get(collection)
        if items is None:
            raise Refusal(404, "NOT_FOUND", f"Location {collection.split('/')[-2]} is not found.")
        key = "items" if path.startswith("compute/") else collection.rpartition("/")[2]
        return self._page(key, items, query)

    def _compute_project(self, path: str, query: Mapping[str, list[str]], body: Answer) -> Answer:
        self._get(path, query, body)
        return {"name": self.project, "quotas": self.project_quotas}

    def _accounts(self, path: str, query: Mapping[str, list[str]], body: Answer) -> Answer:
        return self._page("accounts", self.lists.get(_name(path), []), query)

    def _quota(self, path: str, query: Mapping[str, list[str]], body: Answer) -> Answer:
        return self._page("metrics", self.lists.get(_name(path), []), query)

    def _page(self, key: str, items: list[Answer], query: Mapping[str, list[str]]) -> Answer:
        size = min(self.page, int(query.get("pageSize", query.get("maxResults", ["0"]))[0]) or self.page)
        start = int(query.get("pageToken", ["0"])[0])
        more = {"nextPageToken": str(start + size)} if start + size < len(items) else {}
        return {key: items[start : start + size], **more} if items else {}

    def _list_versions(self, path: str, query: Mapping[str, list[str]], body: Answer) -> Answer:
        secret = self._secret(_name(path).removesuffix("/versions"))
        versions = list(reversed(self.versions[secret]))
        wanted = query.get("filter", [""])[0]
        if wanted:
            state = wanted.removeprefix("state:").removeprefix("state=")
            versions = [version for version in versions if version["state"] == state]
        return self._page("versions", versions, query)

    def _add(self, path: str, query: Mapping[str, list[str]], body: Answer) -> Answer:
        secret = self._secret(_name(path).removesuffix(":addVersion"))
        payload = body.get("payload", {})
        data = base64.b64decode(payload.get("data", ""))
        if len(data) > 65_536:
            raise Refusal(400, "INVALID_ARGUMENT", "The secret payload exceeds the maximum size of 65536 bytes.")
        said = payload.get("dataCrc32c")
        if said is not None and int(said) != crc32c(data):
            raise Refusal(400, "INVALID_ARGUMENT", "The provided CRC32C does not match the data.")
        version = self._add_version(secret, data)
        return {**version, "clientSpecifiedPayloadChecksum": said is not None}

    def _add_version(self, secret: str, data: bytes) -> Answer:
        number = len(self.versions[secret]) + 1
        name = f"{secret.replace(f'projects/{self.project}/', f'projects/{self.number}/')}/versions/{number}"
        version = {"name": name, "createTime": f"2026-11-{number:02}T00:00:00Z", "state": "ENABLED", "etag": '"1"'}
        self.versions[secret].append(version)
        self.payloads[f"{secret}/versions/{number}"] = data
        return version

    def _disable(self, path: str, query: Mapping[str, list[str]], body: Answer) -> Answer:
        secret, _, number = _name(path).removesuffix(":disable").partition("/versions/")
        secret = self._secret(secret)
        version = self.versions[secret][int(number) - 1]
        version["state"] = "DISABLED"
        return version

    def _access(self, path: str, query: Mapping[str, list[str]], body: Answer) -> Answer:
        secret, _, wanted = _name(path).removesuffix(":access").partition("/versions/")
        there = self.versions.get(self._secret(secret), [])
        if wanted == "latest" and not there:
            raise Refusal(404, "NOT_FOUND", f"Secret [{secret}] not found or has no versions.")
        number = len(there) if wanted == "latest" else int(wanted)
        if number > len(there):
            raise Refusal(404, "NOT_FOUND", f"Secret Version [{secret}/versions/{number}] not found.")
        version = there[number - 1]
        if version["state"] != "ENABLED":
            text = f"Secret Version [{version['name']}] is in {version['state']} state."
            raise Refusal(400, "FAILED_PRECONDITION", text)
        data = self.payloads[f"{self._secret(secret)}/versions/{number}"]
        payload = {"data": base64.b64encode(data).decode(), "dataCrc32c": str(crc32c(data))}
        return {"name": version["name"], "payload": payload}

    def _secret(self, name: str) -> str:
        """Find a secret by its project's id or number."""
        name = name.replace(f"projects/{self.number}/", f"projects/{self.project}/")
        if name not in self.versions:
            raise Refusal(404, "NOT_FOUND", f"Secret [{name}] not found.")
        return name

    def _services(self, path: str, query: Mapping[str, list[str]], body: Answer) -> Answer:
        parent = _name(path).removesuffix("/services:batchGet")
        found = []
        for name in query.get("names", []):
            service = name.rpartition("/")[2]
            state = "ENABLED" if self.services.get(service, True) else "DISABLED"
            found.append({"name": f"{parent}/services/{service}", "parent": parent, "state": state})
        if len(found) > 30:
            raise Refusal(400, "INVALID_ARGUMENT", "Request contains too many names.", ours=True)
        return {"services": found}

    def _user(self, path: str, query: Mapping[str, list[str]], body: Answer) -> Answer:
        return {"email": self.email, "verified_email": True}

    def _org_policy(self, path: str, query: Mapping[str, list[str]], body: Answer) -> Answer:
        name = _name(path).removesuffix(":getEffectivePolicy")
        spec = self.org_policies.get(name.rpartition("/")[2], {"rules": [{"allowAll": True}]})
        return {"name": name, "spec": spec}

    _handlers: ClassVar[dict[str, Callable[..., Answer]]] = {
        "*.testIamPermissions": _test,
        "secretmanager.*.getIamPolicy": _policy,
        "secretmanager.projects.secrets.versions.list": _list_versions,
        "secretmanager.projects.secrets.addVersion": _add,
        "secretmanager.projects.secrets.versions.disable": _disable,
        "secretmanager.projects.secrets.versions.access": _access,
        "serviceusage.services.batchGet": _services,
        "serviceusage.services.consumerQuotaMetrics.list": _quota,
        "oauth2.userinfo.get": _user,
        "orgpolicy.projects.policies.getEffectivePolicy": _org_policy,
        "storage.buckets.get": _get_bucket,
        "storage.buckets.list": _list_buckets,
        "tpu.projects.locations.list": _list,
        "tpu.projects.locations.*.list": _list,
        "compute.projects.get": _compute_project,
        "compute.zones.list": _list,
        "compute.machineTypes.list": _list,
        "iam.projects.serviceAccounts.list": _accounts,
        "*.get": _get,
    }


def _find_handler(method_id: str) -> Callable[..., Answer] | None:
    handlers = GoogleServer._handlers
    return next((handler for pattern, handler in handlers.items() if fnmatchcase(method_id, pattern)), None)


def _name(path: str) -> str:
    """Return the resource's name: the path without version or service."""
    return re.sub(r"^(?:storage/v1|compute/v1|v\d+(?:beta\d+|alpha\d+)?)/", "", path)


# the discovery documents


@functools.cache
def methods_of(host: str) -> tuple[Method, ...]:
    """Return the methods that Google serves on `host`, of the APIs above."""
    service = host.removesuffix(".googleapis.com")
    found: list[Method] = []
    for api in APIS:
        # Only one of our APIs is served from the common host.
        if api.partition(".")[0] != {"www": "oauth2"}.get(service, service):
            continue
        document = read_document(api)
        assert document["rootUrl"] == f"https://{host}/", (api, document["rootUrl"])
        found += _methods(document, document)
    return tuple(found)


@functools.cache
def read_document(api: str) -> Mapping[str, Any]:
    spec = importlib.util.find_spec("googleapiclient")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "discovery_cache" / "documents"
    document: Mapping[str, Any] = json.loads((folder / f"{api}.json").read_bytes())
    return document


def _methods(document: Mapping[str, Any], node: Mapping[str, Any]) -> Iterable[Method]:
    schemas = document["schemas"]
    for described in node.get("methods", {}).values():
        path = document["servicePath"] + described.get("flatPath", described["path"])
        pieces = re.split(r"\{[^}]+\}", path)
        pattern = "[^/:]+".join(re.escape(piece) for piece in pieces)
        query = {name: each for name, each in described.get("parameters", {}).items() if each["location"] == "query"}
        yield Method(
            id=described["id"],
            service=document["name"],
            verb=described["httpMethod"],
            pattern=re.compile(pattern),
            query={**document.get("parameters", {}), **query},
            request=schemas.get(described.get("request", {}).get("$ref")),
            response=schemas.get(described.get("response", {}).get("$ref")),
            schemas=schemas,
        )
    for inner in node.get("resources", {}).values():
        yield from _methods(document, inner)


def _check_query(method: Method, query: Mapping[str, list[str]]) -> None:
    for name, values in query.items():
        described = method.query.get(name)
        if described is None:
            text = f'Invalid JSON payload received. Unknown name "{name}": Cannot bind query parameter.'
            raise Refusal(400, "INVALID_ARGUMENT", text, ours=True)
        if len(values) > 1 and not described.get("repeated"):
            text = f"Invalid value at '{name}': \"{name}\" is not repeated."
            raise Refusal(400, "INVALID_ARGUMENT", text, ours=True)
        if described.get("type") == "boolean" and not set(values) <= {"true", "false"}:
            raise Refusal(400, "INVALID_ARGUMENT", f"Invalid value at '{name}' (TYPE_BOOL).", ours=True)


def _read_body(method: Method, request: Request) -> Answer:
    if not request.body:
        return {}
    if method.request is None:
        raise Refusal(400, "INVALID_ARGUMENT", "a body where none belongs", ours=True)
    try:
        body: Answer = json.loads(request.body)
    except ValueError:
        raise Refusal(400, "INVALID_ARGUMENT", "Invalid JSON payload received.", ours=True) from None
    check_fields(body, method.request, method.schemas, "")
    return body


def check_fields(value: Any, schema: Mapping[str, Any], schemas: Mapping[str, Any], path: str) -> None:
    """Raise `Refusal`, in Google's words, unless `value` matches `schema`."""
    schema = schemas[schema["$ref"]] if "$ref" in schema else schema
    kind = schema.get("type", "any")
    if kind == "object":
        _check_object(value, schema, schemas, path)
    elif kind == "array":
        if not isinstance(value, list):
            raise _invalid(path, "is no list")
        for index, item in enumerate(value):
            check_fields(item, schema["items"], schemas, f"{path}[{index}]")
    elif kind == "string":
        _check_text(value, schema, path)
    elif kind == "boolean" and type(value) is not bool:
        raise _invalid(path, "(TYPE_BOOL)")
    elif kind in ("integer", "number") and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise _invalid(path, f"({schema.get('format', kind)})")


def _check_object(value: Any, schema: Mapping[str, Any], schemas: Mapping[str, Any], path: str) -> None:
    if not isinstance(value, dict):
        raise _invalid(path, "is no message")
    known, more = schema.get("properties", {}), schema.get("additionalProperties")
    for key, item in value.items():
        inner = f"{path}.{key}" if path else key
        if key in known:
            check_fields(item, known[key], schemas, inner)
        elif more is not None:
            check_fields(item, more, schemas, inner)
        else:
            at = f" at '{path}'" if path else ""
            text = f'Invalid JSON payload received. Unknown name "{key}"{at}: Cannot find field.'
            raise Refusal(400, "INVALID_ARGUMENT", text, ours=True)


def _check_text(value: Any, schema: Mapping[str, Any], path: str) -> None:
    if schema.get("format") in ("int64", "uint64"):
        if isinstance(value, bool) or not re.fullmatch(r"-?\d+", str(value)):
            raise _invalid(path, "(TYPE_INT64)")
        return
    if not isinstance(value, str):
        raise _invalid(path, "(TYPE_STRING)")
    if "enum" in schema and value not in schema["enum"]:
        raise _invalid(path, f'({schema.get("$ref", "enum")}), "{value}"')
    if schema.get("format") == "byte":
        try:
            base64.b64decode(value, validate=True)
        except binascii.Error:
            raise _invalid(path, "(TYPE_BYTES), Base64 decoding failed") from None


def _invalid(path: str, what: str) -> Refusal:
    return Refusal(400, "INVALID_ARGUMENT", f"Invalid value at '{path}' {what}", ours=True)


def crc32c(data: bytes) -> int:
    """Compute bit by bit, to share nothing with the table of the code under test."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF
