"""The environment that goes with submitted tasks: a lock file, the packages of the Python that submits, or none."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from runtime.config import Settings
from runtime.errors import InvalidValue, RequestRefused
from runtime.tasks.model import is_content_id

if TYPE_CHECKING:
    from runtime.client.tasks.task_snapshot import SubmittedCode
    from runtime.records.base import RecordStore

FROZEN: Final = "frozen"
NONE: Final = "none"
ALLOWED: Final = "a lock file (uv.lock, requirements.txt), `frozen` or `none`"


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmittedPackages:
    """The environment of tasks; None for tasks that run with the worker's own packages."""

    id: str | None = None
    described: str = ""
    """What it is, for people."""


NO_PACKAGES: Final = SubmittedPackages()


def take_packages(
    wanted: str | Path | bool | None,
    records: RecordStore | None,
    settings: Settings,
    code: SubmittedCode,
    *,
    extra: Sequence[str] = (),
) -> SubmittedPackages:
    """Return the environment to submit, after storing it in `records` if given.

    `wanted` is a lock file, "frozen", "none" or False, a content id, or None for the project's setting, whose lock file lies
    in the project's folder. `extra` are pins that come before those of the list. Raises `NotPossible` for packages that no
    other machine could install.
    """
    base = None
    if wanted is None and not extra:
        if (inherited := _inherit(records, code)) is not None:
            return inherited
        if settings.project.environment is None:
            return NO_PACKAGES
    if wanted is None and settings.project.environment is not None:
        wanted, base = settings.project.environment, settings.project.root
    if wanted is None:
        wanted = FROZEN
    if wanted is False or wanted == NONE:
        if extra:
            raise RequestRefused(
                f"`--with {extra[0]}` adds to an environment, and the tasks have none",
                hint="leave `--environment none` out, or name a lock file or `frozen`",
            )
        return NO_PACKAGES
    if isinstance(wanted, bool) or (isinstance(wanted, str) and not wanted):
        raise InvalidValue("environment", wanted, ALLOWED)
    if isinstance(wanted, str) and is_content_id(wanted):
        if extra:
            raise RequestRefused("`--with` adds to a lock file or a frozen list, and `environment` is a content id")
        return SubmittedPackages(id=wanted, described=wanted[:19])
    # here, since most tasks have none
    from runtime.client.tasks.packages import freeze, read_lock
    from runtime.snapshots.environment import LOCK_OF, put_packages
    from runtime.units import count_noun

    if wanted == FROZEN:
        packages = freeze(code.taken_from, extra)
        count = packages.files[LOCK_OF["pip"]].count("\n")
        described = f"`{sys.prefix}` ({count_noun(count, 'package')}, Python {packages.python})"
    else:
        packages = read_lock(base / wanted if base else Path(wanted), extra)
        described = f"`{wanted}` (Python {packages.python})"
    identity = packages.id if records is None else put_packages(packages, records)
    return SubmittedPackages(id=identity, described=described)


def _inherit(records: RecordStore | None, code: SubmittedCode) -> SubmittedPackages | None:
    """Return the environment of the attempt that submits, if the tasks carry its code too."""
    identity = os.environ.get("RUNTIME_ENVIRONMENT_ID")
    if identity is None:
        return None
    from runtime.snapshots.environment import has_packages

    own = code.snapshot is not None and code.snapshot == os.environ.get("RUNTIME_SNAPSHOT_ID")
    if not own or records is None or not is_content_id(identity) or not has_packages(identity, records):
        return None
    return SubmittedPackages(id=identity, described=f"this attempt, `{identity[:19]}`")
