"""Names and labels, made from project, stack and role alone: the same every time, nothing random.

Several stacks share a project, so every name that is unique in a project or the world carries the stack. A name that
Google refuses (too long, too short, other characters, a prefix of Google's own) is changed and ends in a hash of the
whole, so that two names never become one.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from runtime.errors import InvalidValue

MANAGED_BY: Final = "managed-by"
MAKER: Final = "research-runtime"
STACK_LABEL: Final = "stack"
OWN_LABELS: Final = (MANAGED_BY, STACK_LABEL)
"""Label keys that no stack file can set: the reaper, `gc` and the policies read them."""

CLUSTER_LIMIT: Final = 35
"""Ray names a machine `ray-CLUSTER-worker-<8 hex digits>-compute`, and Google takes 63 characters."""

NODE_ROLES: Final = {"head": "research_runtime_head", "reaper": "research_runtime_reaper"}
"""Kind → id of the custom role that a pipeline's stack makes for all Ray clusters of the project."""

JOB_ACCOUNT: Final = "runtime-job"
"""The Kubernetes service account of jobs. In Kubernetes it has no rights and no token."""

KEPT: Final = "keep-"
"""Prefix of the tags whose images the clean-up of a registry never deletes."""

_HASH_LENGTH: Final = 8
_SLUG: Final = re.compile(r"[a-z](?:[-a-z0-9]*[a-z0-9])?")
_GOOGLES: Final = re.compile(r"^(?:goog|gcp-)|google|g00gle")
"""Words that Google reserves in names of buckets, topics and identity pools."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """The names of one stack. Names that carry the project raise `InvalidValue` if the stack has none."""

    stack: str
    project: str | None = None

    def topic(self, queue: str) -> str:
        """`STACK-QUEUE`"""
        return _fit(self.stack, queue, least=3, limit=255)

    def dead_letters(self, queue: str) -> str:
        """Name of the dead-letter topic and of its subscription: `STACK-QUEUE-dead`."""
        return _fit(self.stack, queue, "dead", least=3, limit=255)

    subscription = topic
    """The same name: topics and subscriptions have namespaces of their own."""

    def bucket(self, role: str) -> str:
        """`PROJECT-STACK-ROLE`, at most 63 characters; with the project, since it has to be unique in the world."""
        return _fit(self._project(), self.stack, role, least=3, limit=63)

    def account(self, role: str) -> str:
        """Id of a service account, 6 to 30 characters."""
        return _fit(self.stack, role, least=6, limit=30)

    def account_email(self, role: str) -> str:
        return f"{self.account(role)}@{account_domain(self._project())}"

    def role(self, role: str) -> str:
        """Id of a custom role: letters, digits, underscores and periods, 3 to 64."""
        return _fit(self.stack, role, least=3, limit=64).replace("-", "_")

    def identity_pool(self, purpose: str = "ci") -> str:
        """4 to 32 characters; `gcp-` is Google's own prefix."""
        return _fit(self.stack, purpose, least=4, limit=32)

    def repository(self, registry: str) -> str:
        """At most 63 characters."""
        return _fit(self.stack, registry, limit=63)

    def secret(self, secret: str) -> str:
        return _fit(self.stack, secret, limit=255)

    def network(self) -> str:
        return _fit(self.stack, limit=63)

    def firewall(self, purpose: str) -> str:
        return _fit(self.stack, purpose, limit=63)

    def address(self, head: str) -> str:
        return _fit(self.stack, head, "address", limit=63)

    def snapshots(self, head: str) -> str:
        """Name of the schedule."""
        return _fit(self.stack, head, "snapshots", limit=63)

    def cluster(self, head: str) -> str:
        """Ray's name of the cluster: `STACK-HEAD`, short enough that Ray's node names fit 63 characters."""
        return _fit(self.stack, head, limit=CLUSTER_LIMIT)

    def head(self, head: str) -> str:
        """`ray-CLUSTER-head-<8 hex digits>-compute`: Ray reads the kind of a node from the last part of its name."""
        digits = digest("/".join((self.project or "", self.stack, head)))
        return f"ray-{self.cluster(head)}-head-{digits}-compute"

    def _project(self) -> str:
        if not self.project:
            raise InvalidValue("project", self.project, "the id of a Google project, which this name carries")
        return self.project


def account_domain(project: str) -> str:
    """Return the part of the addresses of a project's service accounts behind the `@`."""
    domain, _, name = project.rpartition(":")
    return f"{name}.{domain}.iam.gserviceaccount.com" if domain else f"{name}.iam.gserviceaccount.com"


def shorten(name: str, limit: int) -> str:
    """Return `name`, or the beginning of a longer name and a hash of the whole."""
    return name if len(name) <= limit else _hashed(name, name, limit)


def labels(stack: str, own: Mapping[str, str]) -> dict[str, str]:
    """Return every resource's labels: its maker, its stack, and the stack's `own`, by Google's rules: at most 63 of
    lower case letters, digits, `-` and `_`."""
    return {**own, MANAGED_BY: MAKER, STACK_LABEL: _fit(stack, limit=63)}


def _fit(*parts: str, least: int = 1, limit: int) -> str:
    """Join the parts by dashes; if that is not a valid name, return a similar name that ends in a hash of the parts.

    The name has `least` to `limit` lower case letters, digits and dashes, begins with a letter and ends with a letter or
    digit, which is valid for every kind of name.
    """
    whole = "-".join(parts)
    if _SLUG.fullmatch(whole) and least <= len(whole) <= limit and not _GOOGLES.search(whole):
        return whole
    readable = re.sub(r"[^a-z0-9]+", "-", whole.lower()).strip("-")
    readable = re.sub(r"goog|g00g", "g", readable)
    # The dash and the hash behind it would turn `gcp` into Google's own prefix.
    if not readable[:1].isalpha() or f"{readable}-".startswith("gcp-"):
        readable = f"r-{readable}".rstrip("-")
    return _hashed(readable, whole, limit)


def _hashed(readable: str, whole: str, limit: int) -> str:
    beginning = readable[: limit - _HASH_LENGTH - 1].rstrip("-")
    return f"{beginning}-{digest(whole)}"


def digest(text: str) -> str:
    """Return the digits that tell names apart which would be one."""
    return hashlib.sha256(text.encode()).hexdigest()[:_HASH_LENGTH]
