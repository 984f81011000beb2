"""The state of the simulated Google: a folder with a locked JSON file, shared by plug-in and tests.

`cloud.json` holds the resources, `faults.json` the faults to come, `calls.jsonl` one line for each call. Tests
read and change them through `Cloud`, even while the engine runs.
"""

from __future__ import annotations

import fcntl
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FOLDER_VARIABLE = "MADE_UP_GOOGLE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault that happens `times` times."""

    type: str = ""
    """Part of the resource's type; empty for any."""
    operation: str = "create"
    name: str = ""
    """Part of the resource's logical name; empty for any."""
    times: int = 1
    message: str = "500: backend error"
    hang: str = ""
    """`before` or `after` the operation: hang until cancelled instead of failing with `message`."""


@dataclass(slots=True)
class World:
    """The content of `cloud.json`."""

    resources: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Id → type, urn, inputs, outputs."""
    deleted: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Soft-deleted resources that still hold their names; `days` counts the days since deletion."""
    serial: int = 0


class Cloud:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._threads = threading.RLock()
        self._depth = 0
        self._approved: set[str] | None = None
        self._last: tuple[str, World] | None = None
        folder.mkdir(parents=True, exist_ok=True)

    # for tests

    def world(self) -> World:
        """Return the current state, read-only since it may be shared."""
        with self._locked():
            return self._load(shared=True)

    @contextmanager
    def change(self) -> Iterator[World]:
        """Yield the state for changes by hand; they are written at the end unless an exception is raised."""
        with self._locked():
            world = self._load()
            yield world
            self._write("cloud.json", asdict(world))

    def ids(self, type_: str) -> list[str]:
        """List the ids of all resources whose type ends with `type_`."""
        return sorted(id_ for id_, each in self.world().resources.items() if each["type"].endswith(type_))

    def one(self, type_: str, containing: str = "") -> str:
        """Return the id of the only such resource."""
        found = [id_ for id_ in self.ids(type_) if containing in id_]
        assert len(found) == 1, f"{len(found)} resources of {type_} with `{containing}`: {found}"
        return found[0]

    def inject(self, *faults: Fault) -> None:
        with self._locked():
            self._write("faults.json", [asdict(each) for each in faults])

    def faults(self) -> list[dict[str, Any]]:
        """Return the faults with repetitions left."""
        with self._locked():
            return self._faults()

    def calls(self, operation: str | None = None) -> list[dict[str, Any]]:
        path = self.folder / "calls.jsonl"
        with self._locked():
            lines = path.read_text().splitlines() if path.exists() else []
        calls = [json.loads(line) for line in lines]
        return [each for each in calls if operation in (None, each["operation"])]

    def forget_calls(self) -> None:
        (self.folder / "calls.jsonl").unlink(missing_ok=True)

    # for the plug-in

    def take_fault(self, operation: str, type_: str, name: str) -> Fault | None:
        with self._locked():
            faults = self._faults()
            for index, each in enumerate(faults):
                fits = each["operation"] == operation and each["type"] in type_ and each["name"] in name
                if fits and each["times"] > 0:
                    faults[index] = {**each, "times": each["times"] - 1}
                    self._write("faults.json", [left for left in faults if left["times"] > 0])
                    return Fault(**each)
        return None

    def note_call(self, operation: str, values: Mapping[str, Any]) -> None:
        with self._locked(), (self.folder / "calls.jsonl").open("a") as calls:
            calls.write(json.dumps({"operation": operation, **values}) + "\n")

    def is_approved(self, mark: str) -> bool:
        """Return whether inputs with this digest passed before, by the same code, since the folder lasts for one
        test."""
        if self._approved is None:
            path = self.folder / "approved"
            self._approved = set(path.read_text().split()) if path.exists() else set()
        return mark in self._approved

    def approve(self, mark: str) -> None:
        with (self.folder / "approved").open("a") as marks:
            marks.write(f"{mark}\n")
        if self._approved is not None:
            self._approved.add(mark)

    def _faults(self) -> list[dict[str, Any]]:
        path = self.folder / "faults.json"
        faults: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
        return faults

    def _load(self, *, shared: bool = False) -> World:
        path = self.folder / "cloud.json"
        if not path.exists():
            return World()
        text = path.read_text()
        if not shared:
            return World(**json.loads(text))
        # Parsing takes long, reading does not; inode and times may equal those of an earlier version of the file.
        if self._last is None or self._last[0] != text:
            self._last = (text, World(**json.loads(text)))
        return self._last[1]

    def _write(self, name: str, value: Any) -> None:
        path = self.folder / f".{name}.new"
        # Indentation would make it readable, and ten times slower.
        path.write_text(json.dumps(value))
        path.replace(self.folder / name)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        # Threads of a process share its file lock, so they need a second lock; nested calls already hold it.
        with self._threads:
            if self._depth:
                yield
                return
            with (self.folder / ".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                self._depth += 1
                try:
                    yield
                finally:
                    self._depth -= 1
