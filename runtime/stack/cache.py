"""Stacks as they were found: the contract with its source, and the copies that this machine keeps of the last read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from runtime.config import Settings
from runtime.errors import (
    InvalidContract,
    RequestRefused,
)
from runtime.outputs import (
    OUTPUT_NAME,
    PUBLISHED,
    Published,
    StackOutputs,
    outputs_fields,
    parse_outputs,
    read_published,
)
from runtime.units import format_time, parse_time
from runtime.values import dataclass, field

if TYPE_CHECKING:
    pass
CACHE_PREFIX: Final = "cache:"


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundStack:
    outputs: StackOutputs
    source: str
    """`built-in`, `pulumi`, or the path or URL it was read from."""
    read_at: datetime
    cached: bool = False
    """From the cache: the source itself did not answer now."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """The contract as it was read, with keys that this release does not know."""
    published: Published | None = None
    """What a published copy says of itself."""

    @property
    def name(self) -> str:
        return self.outputs.stack

    @property
    def contract(self) -> dict[str, Any]:
        """The contract without what only its published copy has."""
        return {key: value for key, value in self.fields.items() if key != PUBLISHED} or outputs_fields(self.outputs)


def parse_found(
    value: Any, source: str, read_at: datetime, *, path: str | None = None, cached: bool = False
) -> FoundStack:
    outputs = parse_outputs(value, source=path or source)
    published = read_published(value, source=path or source)
    return FoundStack(outputs=outputs, source=source, read_at=read_at, cached=cached, fields=value, published=published)


# cache


def cache_folder(settings: Settings) -> Path:
    return settings.cache_dir / "stacks"


def cache_path(name: str, settings: Settings) -> Path:
    # A full Pulumi name has slashes.
    return cache_folder(settings) / f"{name.replace('/', '%2F')}.json"


def remember(found: FoundStack, settings: Settings, name: str | None = None) -> FoundStack:
    """Keep it, as `name` where it was asked for by another, for when no source answers.

    A cache that cannot be written stops nobody.
    """
    path = cache_path(name or found.name, settings)
    content = {
        "source": found.source,
        "read_at": format_time(found.read_at),
        OUTPUT_NAME: dict(found.fields) or outputs_fields(found.outputs),
    }
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError:
        pass
    return found


def read_cache(name: str, settings: Settings) -> FoundStack | None:
    path = cache_path(name, settings)
    try:
        content: dict[str, Any] = json.loads(path.read_bytes())
        read_at, source = parse_time(content["read_at"]), str(content["source"])
        contract = content[OUTPUT_NAME]
    except (OSError, ValueError, KeyError, TypeError, RequestRefused):
        return None
    return parse_found(contract, source, read_at, path=str(path), cached=True)


def list_cached(settings: Settings) -> Iterator[FoundStack]:
    for path in sorted(cache_folder(settings).glob("*.json")):
        try:
            found = read_cache(path.stem.replace("%2F", "/"), settings)
        except InvalidContract:
            continue
        if found is not None:
            yield found
