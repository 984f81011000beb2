"""The rules about encryption: the stack's key and no other, for everything that the key can encrypt."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from infra.check.recording import Registration, UnknownValue
from infra.policy.base import (
    AGENT,
    BUCKET,
    INSTANCE,
    KEY_GRANT,
    PIPELINE,
    REPOSITORY,
    SECRET,
    SERVICE_IDENTITY,
    TOPIC,
    Finding,
    Graph,
    StackBounds,
)
from runtime.schema import leaves

_NAMES_A_KEY: Final = re.compile(r"[kK]msKey|[cC]ryptoKey|[eE]ncryptionKey")
"""Inputs such as `defaultKmsKeyName`, `cryptoKeyId`, `sourceImageEncryptionKey.rawKey`. Keys of labels have no capitals."""

ENCRYPTED: Final = (BUCKET, TOPIC, REPOSITORY, SECRET, INSTANCE)


def find_foreign_keys(graph: Graph, bounds: StackBounds) -> Iterator[Finding]:
    """Every key is the one that the stack file names. The owner of another key could take away the data that it encrypts."""
    for each in graph.made("gcp"):
        for path, key in _keys(each):
            if isinstance(key, UnknownValue):
                yield each, f"has a key in `{path}` that is not known before `up`", "name it as `kms_key`"
            elif bounds.keys is not None and key not in bounds.keys:
                allowed = ", ".join(f"`{one}`" for one in bounds.keys) or "none"
                yield each, f"has the key `{key}` in `{path}`, allowed is {allowed}", "name it as `kms_key`"
        if each.type != KEY_GRANT:
            continue
        member = each.inputs.get("member")
        is_agent = isinstance(member, UnknownValue) or AGENT.fullmatch(str(member))
        is_pipeline = (parent := graph.parent(each)) is not None and parent.type == PIPELINE
        if not is_pipeline and not (is_agent and graph.behind(each, "member", SERVICE_IDENTITY)):
            yield each, f"lets `{member}` decrypt with the key", "only Google's agents use it, for their services"


def find_unencrypted(graph: Graph, bounds: StackBounds) -> Iterator[Finding]:
    """In a stack with a key, the key encrypts everything that it can."""
    for each in graph.of_type(*ENCRYPTED) if bounds.keys else ():
        if not any(True for _ in _keys(each)):
            yield each, "is not encrypted with the stack's key", "pass `site.key` on"


def _keys(resource: Registration) -> Iterator[tuple[str, object]]:
    for path, value in leaves(resource.inputs):
        if value is not None and _NAMES_A_KEY.search(path):
            yield path, value
