"""The last launch of each name from each folder, as digests: what is new in the next one is said before it starts.

A cache in the user's data folder, for people alone. Without a note, or with one that cannot be read, nothing is said.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from runtime.file_trust import write_private
from runtime.jobs.spec_fields import set_fields, spec_fields
from runtime.system import system
from runtime.units import count_noun

if TYPE_CHECKING:
    from runtime.client.jobs.prepare import PreparedLaunch

VERSION: Final = 1
MOST_FILES: Final = 20_000
"""Trees with more files get no note: it would take longer to read than it says."""
KEPT: Final = 200
NAMED: Final = 3
"""Names of files and fields in a line."""


@dataclass(frozen=True, slots=True)
class LastLaunch:
    """A launch, as far as the next one is compared with it."""

    job: str
    fields: Mapping[str, str]
    """Field that the spec sets → digest of its value; `target` is one, too."""
    files: Mapping[str, str]
    """Name in the snapshot → digest of the file."""


def look_at(prepared: PreparedLaunch) -> LastLaunch | None:
    """Return the digests of a launch; None for a tree of very many files."""
    plan, snapshot = prepared.plan, prepared.snapshot
    if snapshot is not None and snapshot.files > MOST_FILES:
        return None
    written = spec_fields(plan.spec)
    fields = {name: _digest(json.dumps(_find(written, name), sort_keys=True)) for name in set_fields(plan.spec)}
    files: dict[str, str] = {}
    if snapshot is not None:
        from runtime.snapshots.snapshot import digest_files

        files = digest_files(snapshot)
    return LastLaunch(plan.job.id, {**fields, "target": _digest(plan.target.name)}, files)


def recall(prepared: PreparedLaunch) -> LastLaunch | None:
    """Return the last launch of the name from the folder, if it is known."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        said = json.loads(_path(prepared).read_text(encoding="utf-8"))
        if said["version"] == VERSION:
            return LastLaunch(str(said["job"]), dict(said["fields"].items()), dict(said["files"].items()))
    return None


def remember(prepared: PreparedLaunch, launch: LastLaunch) -> None:
    """Note the launch as the last of its name. A folder that cannot be written stops no launch."""
    path = _path(prepared)
    said = {"version": VERSION, "job": launch.job, "fields": dict(launch.fields), "files": dict(launch.files)}
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{system.urandom(4).hex()}")
    with suppress(OSError):
        try:
            write_private(temporary, json.dumps(said, separators=(",", ":")))
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        _drop_oldest(path.parent)


def tell_difference(prepared: PreparedLaunch, new: LastLaunch, tell: Callable[[str], None]) -> None:
    """Tell in a line what differs from the last launch, if it is known and something does."""
    last = recall(prepared)
    if last is not None and (told := describe_difference(last, new, prepared.plan.job.name)):
        tell(told)


def describe_difference(last: LastLaunch, new: LastLaunch, name: str) -> str | None:
    """Return in a line what the new launch has otherwise than the last one; None if nothing that is compared differs."""
    parts = [
        f"{count_noun(len(names), 'file')} {what} ({_some(names)})"
        for what, names in (
            ("changed", [each for each in new.files if each in last.files and new.files[each] != last.files[each]]),
            ("added", [each for each in new.files if each not in last.files]),
            ("removed", [each for each in last.files if each not in new.files]),
        )
        if names
    ]
    fields = {*last.fields, *new.fields}
    if differing := [each for each in sorted(fields) if last.fields.get(each) != new.fields.get(each)]:
        parts.append(f"different {_some(differing)}")
    return f"not the last launch of `{name}` ({last.job[:10]}): {'; '.join(parts)}" if parts else None


def _some(names: Iterable[str]) -> str:
    first = sorted(names)
    more = len(first) - NAMED
    return ", ".join(first[:NAMED]) + (f" and {more:,} more" if more > 0 else "")


def _path(prepared: PreparedLaunch) -> Path:
    context, plan = prepared.context, prepared.plan
    folder = os.path.realpath(context.base / plan.spec.code.path)
    name = hashlib.sha256(os.fsencode(f"{plan.job.name}\0{folder}")).hexdigest()[:32]
    return context.settings.data_dir / "last-launches" / f"{name}.json"


def _find(written: Mapping[str, Any], name: str) -> Any:
    value: Any = written
    for key in name.split("."):
        value = value[key]
    return value


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=12).hexdigest()


def _drop_oldest(folder: Path) -> None:
    with os.scandir(folder) as entries:
        found = [(entry.stat().st_mtime_ns, entry.path) for entry in entries]
    for _, path in sorted(found)[:-KEPT]:
        os.unlink(path)  # noqa: PTH108
