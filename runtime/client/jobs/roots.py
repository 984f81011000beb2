"""Record roots that this user has used: by address, the ids that they bore.

A root that was used is told by its id from an empty folder under the same name, such as a mount point without its file
system. The ids are kept as names in the user's data folder, `roots/ADDRESS/ID`, made and never changed, so any number of
processes learn at once.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from runtime.errors import StoreUnavailable
from runtime.jobs.hosts.agent import MARKER
from runtime.jobs.hosts.base import Host
from runtime.jobs.plan import PlanContext, Target
from runtime.launchers.base import Launcher

FOLDER = "roots"


class RootLost(StoreUnavailable):
    """A record root that was used is not there, or is another one: nothing is known of its jobs."""


def open_target(target: Target, launcher: Launcher, context: PlanContext, *, new_records: bool = False) -> Host:
    """The machine that submits, and the record root, which is the one that it was when it was used before.

    With `new_records` any root is accepted from now on, the one that is there or a new one. Nothing is asked yet.
    """
    host = launcher.open_host(target, context)
    host.files.keep_to(KnownRoot(target.name, host.files.address, context.settings.data_dir, new=new_records))
    return host


class KnownRoot:
    """A `RootWatch` that remembers on this machine."""

    def __init__(self, target: str, address: str, data_dir: Path, *, new: bool = False) -> None:
        self._target, self._address = target, address
        self._folder = data_dir / FOLDER / hashlib.sha256(os.fsencode(address)).hexdigest()[:24]
        self._remembered = _names(self._folder)
        self.known: Sequence[str] = [] if new else self._remembered

    def saw(self, identity: str) -> None:
        if identity not in self._remembered:
            self._remembered = [*self._remembered, identity]
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                (self._folder / identity).write_bytes(os.fsencode(f"{self._address}\n"))
            except OSError:
                pass  # As with `launched`: a data folder that cannot be written stops nobody.
        self.known = [identity]

    def refusal(self, found: str | None, *, there: bool) -> RootLost:
        what = f"the record root `{self._address}` of target `{self._target}`"
        known = ", ".join(self._remembered)
        if found is not None:
            message = f"{what} is another one than it was"
            facts = [f"its file `{MARKER}` names {found}, and it was {known}"]
        elif there:
            message = f"{what} has lost its file `{MARKER}`, or its file system is not mounted"
            facts = [f"it was {known}"]
        else:
            message = f"{what} is not there"
            facts = [f"it was used before, as {known}"]
        return RootLost(
            message,
            facts=[*facts, "nothing was made or started, and nothing is known of its jobs"],
            hint=f"bring it back; if it was removed on purpose: runtime targets check {self._target} --new-records",
        )


def _names(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir())
    except OSError:
        return []
