"""The packages that go with tasks: a lock file and a Python version, stored once by content id, as a snapshot is.

The worker makes an environment of them, with the builder that jobs use (`runtime.shim.environment`).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from runtime.errors import NotPossible, StoreUnsafe

if TYPE_CHECKING:
    from runtime.records.base import RecordStore

SCHEMA: Final = 1
PREFIX: Final = "environments"
_PYTHON = re.compile(r"3\.[0-9]{1,2}").fullmatch
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}").fullmatch

LOCK_OF: Final[Mapping[str, str]] = {"uv": "uv.lock", "pip": "requirements.txt"}
"""Manager → the file that it reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packages:
    """The ingredients of an environment."""

    manager: Literal["pip", "uv"]
    python: str
    """The minor version, such as 3.11."""
    files: Mapping[str, str]
    """Content by name: the lock file, and what its manager reads beside it."""
    complete: bool = False
    """Whether the lock file names every package, so that nothing else is installed for the sake of one."""

    def encode(self) -> bytes:
        fields: dict[str, Any] = {
            "schema": SCHEMA,
            "manager": self.manager,
            "python": self.python,
            "files": dict(self.files),
            "complete": self.complete,
        }
        return json.dumps(fields, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode()

    @property
    def id(self) -> str:
        return f"sha256:{hashlib.sha256(self.encode()).hexdigest()}"

    def order(self) -> dict[str, Any]:
        """The fields by which the builder knows it."""
        return {
            "manager": self.manager,
            "lock": LOCK_OF[self.manager],
            "python": self.python,
            "complete": self.complete,
            "local": True,
        }


def put_packages(packages: Packages, records: RecordStore) -> str:
    """Store the packages unless the store has them, and return their content id."""
    if not has_packages(packages.id, records):
        records.put_blob(packages.encode(), prefix=PREFIX)
    return packages.id


def has_packages(identity: str, records: RecordStore) -> bool:
    return records.has_blob(_reference(identity))


def fetch_packages(identity: str, records: RecordStore) -> Packages:
    """Return the packages of a content id. Raises `StoreUnsafe` if the store holds other bytes under its name, and `NotPossible`
    for packages that this release does not know how to install."""
    data = records.get_blob(_reference(identity))
    if f"sha256:{hashlib.sha256(data).hexdigest()}" != identity:
        raise StoreUnsafe(f"environment `{identity}` holds other bytes than were submitted", retryable=False)
    try:
        fields = json.loads(data)
        packages = Packages(
            manager=fields["manager"], python=fields["python"], files=fields["files"], complete=bool(fields["complete"])
        )
        if fields["schema"] != SCHEMA or not _is_sound(packages):
            raise ValueError("its fields are not those that this release writes")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as problem:
        raise NotPossible(
            f"environment `{identity}` cannot be read: {problem}", hint="submit and work with the same release"
        ) from None
    return packages


def _is_sound(packages: Packages) -> bool:
    """Whether it is safe to write its files, and to name its Python to a program."""
    return (
        LOCK_OF.get(packages.manager) in packages.files
        and _PYTHON(packages.python) is not None
        and all(_NAME(name) and isinstance(text, str) for name, text in packages.files.items())
    )


def _reference(identity: str) -> str:
    return f"{PREFIX}/{identity.removeprefix('sha256:')}"
