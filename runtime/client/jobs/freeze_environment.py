"""The environment of a job whose packages are those of the Python that launches it: a list that goes along in the snapshot."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.client.tasks.packages import freeze
from runtime.errors import NotPossible
from runtime.jobs.run_config import FROZEN_LOCK, PINNED_LOCK
from runtime.jobs.spec import EnvironmentManager, JobSpec
from runtime.snapshots.environment import LOCK_OF
from runtime.snapshots.snapshot import Snapshot, add_file

if TYPE_CHECKING:
    from runtime.client.jobs.prepare import LaunchOptions


def freeze_environment(
    spec: JobSpec, folder: Path, snapshot: Snapshot | None, options: LaunchOptions
) -> tuple[JobSpec, Snapshot]:
    """Return the spec with the list of packages as its lock file, and the snapshot that has it.

    `folder` is the project, which is left out of the list, as its code goes along. Raises `NotPossible` for a job without a
    snapshot, and for packages that no other machine could install.
    """
    wanted = spec.environment
    if snapshot is None or options.hold:
        why = "a development machine runs each new snapshot" if options.hold else f"`code.mode` is `{spec.code.mode}`"
        raise NotPossible(
            f"`environment.manager: frozen` sends its list along with the code, and {why}",
            hint="name a lock file: environment.manager: uv or pip",
        )
    for name in ("lock", "name", "python"):
        if getattr(wanted, name) is not None:
            raise NotPossible(
                f"`environment.{name}` does not go with `frozen`, which lists the packages of the Python that launches",
                hint=f"take `environment.{name}` out, or name another `environment.manager`",
            )
    packages = freeze(folder.resolve(), wanted.extras)
    lock = FROZEN_LOCK if packages.complete else PINNED_LOCK
    if options.snapshot is None:  # a snapshot that is given has the list with which it was taken
        snapshot = add_file(snapshot, lock, packages.files[LOCK_OF["pip"]].encode())
    made = replace(wanted, manager=EnvironmentManager.PIP, lock=lock, python=packages.python, extras=())
    return replace(spec, environment=made), snapshot
