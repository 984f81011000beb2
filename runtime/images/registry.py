"""The contents of a registry, read over the OCI distribution API, for images of any tool.

Credentials come from docker's and podman's own settings: from a helper such as gcloud's, or from the entry that `login`
left. They are sent to the registry's host and to the token service that it names, and appear nowhere else.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
import re
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from runtime.errors import InfrastructureFailure, InvalidValue, NotPossible

_ACCEPT: Final = ", ".join(
    (
        "application/vnd.oci.image.index.v1+json",
        "application/vnd.docker.distribution.manifest.list.v2+json",
        "application/vnd.oci.image.manifest.v1+json",
        "application/vnd.docker.distribution.manifest.v2+json",
    )
)
_PATIENCE_S: Final = 30
_LOCAL_HOSTS: Final = ("localhost", "127.0.0.1", "[::1]")
_CHALLENGE: Final = re.compile(r'(\w+)="([^"]*)"')


class RegistryFailed(InfrastructureFailure):
    """A registry could not be read. `status` is that of its HTTP answer, None without an answer."""

    def __init__(self, place: str, problem: str, *, status: int | None = None, hint: str | None = None) -> None:
        self.place, self.status = place, status
        retryable = status is None or status >= 500 or status == 429
        super().__init__(
            f"cannot read `{place}`: {problem}", hint=hint or "check the network, then try again", retryable=retryable
        )


class RegistryRefused(NotPossible):
    """The registry did not accept the credentials."""

    def __init__(self, place: str, status: int) -> None:
        self.place, self.status = place, status
        super().__init__(
            f"registry refused access to `{place}`",
            facts=[f"it answered {status}: {'credentials are missing' if status == 401 else 'no right to do this'}"],
            hint=login_hint(place),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageManifest:
    digest: str
    config_digest: str | None
    """Digest of the configuration; None for an index over several platforms."""
    size_bytes: int
    """Size of configuration and layers as they are transferred; 0 for an index."""

    @property
    def digests(self) -> frozenset[str]:
        return frozenset(each for each in (self.digest, self.config_digest) if each)


def host_of(place: str) -> str:
    return place.partition("/")[0]


def is_local(place: str) -> bool:
    """Whether `place` is a registry of this machine; only such a registry may be asked without TLS."""
    name, _, port = host_of(place).rpartition(":")
    return name in _LOCAL_HOSTS and port.isdecimal()


def login_hint(place: str, tool: str = "docker") -> str:
    host = host_of(place)
    if host.endswith((".pkg.dev", "gcr.io")):
        return f"gcloud auth configure-docker {host}"
    return f"{tool} login {host}"


class ImageRegistry:
    """The images below one address, `us-west4-docker.pkg.dev/PROJECT/REPOSITORY` or `localhost:5000`."""

    def __init__(self, place: str) -> None:
        if "://" in place or not host_of(place) or place.endswith("/"):
            raise InvalidValue("registry", place, "HOST/PATH, such as us-west4-docker.pkg.dev/my-project/images")
        self.place = place
        self.host, _, self._path = place.partition("/")
        self._base = f"{'http' if is_local(place) else 'https'}://{self.host}"
        self._token: str | None = None
        # A proxy of the environment must not come between us and this machine.
        proxies = [urllib.request.ProxyHandler({})] if is_local(place) else []
        self._opener = urllib.request.build_opener(*proxies)

    def reference(self, name: str, tag: str) -> str:
        return f"{self.place}/{name}{'@' if tag.startswith('sha256:') else ':'}{tag}"

    def find_manifest(self, name: str, tag: str) -> ImageManifest | None:
        """Read the manifest that `tag` (or a digest) names; None if none does. Raises `RegistryFailed` and `RegistryRefused`."""
        answer = self._get(name, f"manifests/{tag}", accept=_ACCEPT)
        if answer is None:
            return None
        body, headers = answer
        value = self._json(name, body)
        config = value.get("config") or {}
        blobs = [config, *(value.get("layers") or ())]
        return ImageManifest(
            digest=headers.get("docker-content-digest") or f"sha256:{hashlib.sha256(body).hexdigest()}",
            config_digest=config.get("digest"),
            size_bytes=sum(int(blob.get("size", 0)) for blob in blobs if isinstance(blob, dict)),
        )

    def list_tags(self, name: str) -> list[str] | None:
        """List all tags; None if the registry has no such image."""
        tags: list[str] = []
        page: str | None = "tags/list"
        while page is not None:
            answer = self._get(name, page, accept="application/json")
            if answer is None:
                return None
            body, headers = answer
            tags += [str(tag) for tag in self._json(name, body).get("tags") or ()]
            page = _next_page(headers.get("link"))
        return sorted(tags)

    def created_at(self, name: str, manifest: ImageManifest) -> datetime | None:
        """Return the time of the build as the configuration has it."""
        if manifest.config_digest is None:
            return None
        answer = self._get(name, f"blobs/{manifest.config_digest}", accept="*/*")
        try:
            return datetime.fromisoformat(self._json(name, answer[0])["created"]) if answer else None
        except (KeyError, ValueError, TypeError):
            return None

    def _get(self, name: str, what: str, *, accept: str) -> tuple[bytes, Mapping[str, str]] | None:
        path = f"{self._path}/{name}" if self._path else name
        url = f"{self._base}/v2/{path}/{what}"
        for attempt in range(2):
            try:
                return self._open(url, accept)
            except urllib.error.HTTPError as problem:
                problem.close()
                if problem.code == 404:
                    return None
                if problem.code == 401 and attempt == 0 and self._authorize(problem.headers.get("WWW-Authenticate")):
                    continue
                if problem.code in (401, 403):
                    raise RegistryRefused(f"{self.place}/{name}", problem.code) from None
                raise RegistryFailed(
                    f"{self.place}/{name}", f"the registry answered {problem.code}", status=problem.code
                ) from None
            except OSError as problem:
                reason = getattr(problem, "reason", problem)
                raise RegistryFailed(f"{self.place}/{name}", str(reason).lower()) from problem
        raise AssertionError("unreachable: the second attempt returns or raises")

    def _open(self, url: str, accept: str) -> tuple[bytes, Mapping[str, str]]:
        request = urllib.request.Request(url, headers={"Accept": accept})
        if self._token is not None:
            # Not sent on if a blob is redirected: that is another host.
            request.add_unredirected_header("Authorization", self._token)
        with self._opener.open(request, timeout=_PATIENCE_S) as answer:
            body: bytes = answer.read()
            return body, {name.lower(): value for name, value in answer.headers.items()}

    def _authorize(self, challenge: str | None) -> bool:
        """Answer the registry's challenge; returns False without anything to answer."""
        scheme, _, rest = (challenge or "").partition(" ")
        if scheme.lower() == "basic":
            self._token = self._basic
            return self._basic is not None
        values = dict(_CHALLENGE.findall(rest))
        realm = values.pop("realm", "")
        if scheme.lower() != "bearer" or not _may_send(realm, self._base):
            return False
        query = urllib.parse.urlencode({key: value for key, value in values.items() if key in ("service", "scope")})
        request = urllib.request.Request(f"{realm}?{query}")
        if self._basic is not None:
            request.add_unredirected_header("Authorization", self._basic)
        try:
            with self._opener.open(request, timeout=_PATIENCE_S) as answer:
                value = json.loads(answer.read())
        except urllib.error.HTTPError as problem:
            problem.close()
            return False
        except (OSError, ValueError):
            return False
        token = value.get("token") or value.get("access_token")
        self._token = f"Bearer {token}" if token else None
        return self._token is not None

    @cached_property
    def _basic(self) -> str | None:
        found = find_credentials(self.host)
        return "Basic " + base64.b64encode(":".join(found).encode()).decode() if found else None

    def _json(self, name: str, body: bytes) -> dict[str, Any]:
        try:
            value = json.loads(body)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise RegistryFailed(
                f"{self.place}/{name}", "the answer is no registry's", status=200, hint="check the address"
            )
        return value


def find_credentials(host: str) -> tuple[str, str] | None:
    """Return user and password for `host`, from the first of podman's and docker's settings that has them."""
    for path in _settings_files():
        try:
            value = json.loads(path.read_bytes())
            helper = (value.get("credHelpers") or {}).get(host)
            entry = (value.get("auths") or {}).get(host) or (value.get("auths") or {}).get(f"https://{host}") or {}
            helper = helper or value.get("credsStore")
        except (OSError, ValueError, AttributeError):
            continue
        found = (_ask_helper(helper, host) if helper else None) or _decode_entry(entry)
        if found:
            return found
    return None


def _settings_files() -> Iterator[Path]:
    home = Path.home()
    if named := os.environ.get("REGISTRY_AUTH_FILE"):
        yield Path(named)
    if runtime_folder := os.environ.get("XDG_RUNTIME_DIR"):
        yield Path(runtime_folder) / "containers/auth.json"
    yield Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config") / "containers/auth.json"
    yield Path(os.environ.get("DOCKER_CONFIG") or home / ".docker") / "config.json"


def _ask_helper(helper: str, host: str) -> tuple[str, str] | None:
    if not re.fullmatch(r"[\w.-]+", helper):
        return None
    try:
        done = subprocess.run(
            [f"docker-credential-{helper}", "get"],
            input=host,
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
            check=False,
        )
        value = json.loads(done.stdout) if done.returncode == 0 else {}
        return str(value["Username"]), str(value["Secret"])
    except (OSError, ValueError, KeyError, TypeError, subprocess.TimeoutExpired):
        return None


def _decode_entry(entry: Mapping[str, Any]) -> tuple[str, str] | None:
    try:
        user, colon, password = base64.b64decode(str(entry.get("auth") or "")).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        return None
    return (user, password) if colon else None


def _may_send(realm: str, base: str) -> bool:
    """Whether a token service may be asked: over TLS, or for a registry of this machine on this machine."""
    parts = urllib.parse.urlsplit(realm)
    if parts.scheme == "https":
        return True
    return parts.scheme == "http" and base.startswith("http://") and is_local(parts.netloc)


def _next_page(link: str | None) -> str | None:
    """`</v2/team/app/tags/list?n=100&last=x>; rel="next"` → `tags/list?n=100&last=x`"""
    if not link or 'rel="next"' not in link:
        return None
    target = link[link.find("<") + 1 : link.find(">")]
    query = urllib.parse.urlsplit(target).query
    return f"tags/list?{query}"
