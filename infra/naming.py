"""Names and labels, from project, stack and role. Pure: the same answer every time, nothing random.

Several stacks share a project, so every name that a project or the world must have once carries the stack. A name that
grows too long for Google is cut and ends in a hash of the whole, so that two long names stay two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    stack: str
    project: str | None = None

    def topic(self, queue: str) -> str:
        """`STACK-QUEUE`"""
        raise NotImplementedError

    def dead_letters(self, queue: str) -> str:
        """Of the dead-letter topic and of its subscription: `STACK-QUEUE-dead`."""
        raise NotImplementedError

    def subscription(self, queue: str) -> str:
        raise NotImplementedError

    def bucket(self, role: str) -> str:
        """Unique in the world, so it carries the project: `PROJECT-STACK-ROLE`, at most 63 characters."""
        raise NotImplementedError

    def account(self, role: str) -> str:
        """Id of a service account, 6 to 30 characters."""
        raise NotImplementedError

    def account_email(self, role: str) -> str:
        raise NotImplementedError

    def role(self, role: str) -> str:
        """Id of a custom role: letters, digits, underscores and periods, 3 to 64."""
        raise NotImplementedError

    def identity_pool(self) -> str:
        """4 to 32 characters; `gcp-` is Google's own prefix."""
        raise NotImplementedError

    def repository(self, registry: str) -> str:
        """At most 63 characters."""
        raise NotImplementedError

    def secret(self, secret: str) -> str:
        raise NotImplementedError

    def network(self) -> str:
        raise NotImplementedError

    def firewall(self, purpose: str) -> str:
        raise NotImplementedError

    def cluster(self, head: str) -> str:
        """Ray's name of the cluster: `STACK-HEAD`, short enough that Ray's node names fit 63 characters."""
        raise NotImplementedError

    def head(self, head: str) -> str:
        """`ray-CLUSTER-head-<8 hex digits>-compute`: Ray reads the kind of a node from the last part of its name."""
        raise NotImplementedError

    def namespace(self, namespace: str) -> str:
        """A Kubernetes namespace belongs to its cluster; it is named as the settings say."""
        raise NotImplementedError


def shorten(name: str, limit: int) -> str:
    """`name`, or its beginning and a hash of the whole where it is longer than `limit`."""
    raise NotImplementedError


def labels(stack: str, own: Mapping[str, str]) -> dict[str, str]:
    """The labels that every resource bears: who made it, for which stack, and the stack's own. Google's rules apply:
    lower case, digits, `-` and `_`, at most 63 characters."""
    raise NotImplementedError
