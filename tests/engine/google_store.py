"""What exists in the made-up Google of the tests: a folder with a locked JSON file that plug-in and tests share.

`cloud.json` holds what there is, `faults.json` what shall go wrong, `calls.jsonl` what was asked, a line each. A test
reads and changes them through `Cloud`, also while the engine runs.
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
    """Something that goes wrong `times` times, then no more."""

    type: str = ""
    """Part of the resource's type; empty for any."""
    operation: str = "create"
    name: str = ""
    """Part of the resource's logical name; empty for any."""
    times: int = 1
    message: str = "500: backend error"
    hang: str = ""
    """`before` or `after` the thing is done, instead of a message: the call does not come back until it is cancelled."""


@dataclass(slots=True)
class World:
    """Everything in `cloud.json`."""

    resources: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Id → type, urn, inputs, outputs."""
    deleted: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What is deleted softly and still keeps its name; `days` says for how long already."""
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
        """All that is there; to be looked at only, since it may be shared."""
        with self._locked():
            return self._load(shared=True)

    @contextmanager
    def change(self) -> Iterator[World]:
        """The world, to be changed by hand; written back at the end, unless something was raised."""
        with self._locked():
            world = self._load()
            yield world
            self._write("cloud.json", asdict(world))

    def ids(self, type_: str) -> list[str]:
        """Ids of all resources whose type ends with `type_`."""
        return sorted(id_ for id_, each in self.world().resources.items() if each["type"].endswith(type_))

    def one(self, type_: str, containing: str = "") -> str:
        """The id of the only such resource."""
        found = [id_ for id_ in self.ids(type_) if containing in id_]
        assert len(found) == 1, f"{len(found)} resources of {type_} with `{containing}`: {found}"
        return found[0]

    def inject(self, *faults: Fault) -> None:
        with self._locked():
            self._write("faults.json", [asdict(each) for each in faults])

    def faults(self) -> list[dict[str, Any]]:
        """Those that have not happened as often as they should."""
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
        """Whether inputs with this digest were found to be right before, by the same code: a folder outlives no test."""
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
        # To parse it takes long, and to read it does not; a file's number and times may be those of an earlier one.
        if self._last is None or self._last[0] != text:
            self._last = (text, World(**json.loads(text)))
        return self._last[1]

    def _write(self, name: str, value: Any) -> None:
        path = self.folder / f".{name}.new"
        # Indented it would be readable, and ten times as slow.
        path.write_text(json.dumps(value))
        path.replace(self.folder / name)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        # Threads of one process share a file's lock, so they need one of their own; inside, it is held already.
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
