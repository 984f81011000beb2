"""The origin of an image, and its names: the commit of a work tree, and tags from it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from runtime.errors import InvalidValue, NotPossible
from runtime.units import format_time

LATEST: Final = "latest"
DIRTY: Final = "-dirty"
COMMIT_LENGTH: Final = 12
"""Git's own short form grows with a repository; a tag must not."""

REVISION_LABEL: Final = "org.opencontainers.image.revision"
"""Label of the whole commit, with `-dirty` if the work tree differed from it."""
CREATED_LABEL: Final = "org.opencontainers.image.created"
BASE_LABEL: Final = "org.opencontainers.image.base.name"

_NAME: Final = re.compile(r"[a-z0-9]+(?:[._-][a-z0-9]+)*(?:/[a-z0-9]+(?:[._-][a-z0-9]+)*)*")
_VERSION: Final = re.compile(r"\d+(?:\.\d+)+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSource:
    """The origin of an image, as its labels have it."""

    commit: str | None
    """The whole id; None outside a git repository, and then no tag names a commit."""
    dirty: bool
    created: datetime

    @property
    def fixed_tag(self) -> str | None:
        """The tag that a registry must never move."""
        return None if self.commit is None or self.dirty else self.commit[:COMMIT_LENGTH]

    @property
    def tags(self) -> tuple[str, ...]:
        """Tags in the order of pushing: others follow `latest`, so it comes last. A dirty tree has one tag that nobody follows."""
        if self.commit is not None and self.dirty:
            return (f"{self.commit[:COMMIT_LENGTH]}{DIRTY}",)
        named = (self.fixed_tag,) if self.fixed_tag else ()
        return (*named, f"{self.created.astimezone(UTC):%Y%m%d}", LATEST)

    @property
    def labels(self) -> dict[str, str]:
        labels = {CREATED_LABEL: format_time(self.created)}
        if self.commit is not None:
            labels[REVISION_LABEL] = self.commit + (DIRTY if self.dirty else "")
        return labels


def read_source(folder: Path, now: datetime) -> ImageSource:
    """Read the commit of the work tree around `folder`, dirty if a file differs from it or is untracked and not ignored."""
    head = _git(folder, "rev-parse", "--verify", "--quiet", "HEAD")
    if head is None:
        return ImageSource(commit=None, dirty=False, created=now)
    changes = _git(folder, "status", "--porcelain", "--untracked-files=normal")
    return ImageSource(commit=head.strip(), dirty=bool(changes), created=now)


def source_of_labels(labels: Mapping[str, str], *, image: str) -> ImageSource:
    """Read the source of an existing image; the work tree may have changed since."""
    revision = labels.get(REVISION_LABEL)
    try:
        created = datetime.fromisoformat(labels.get(CREATED_LABEL, ""))
    except ValueError:
        raise NotPossible(
            f"image `{image}` does not say when it was built",
            facts=[f"it has no label `{CREATED_LABEL}`, so `runtime image build` did not make it"],
            hint="runtime image build",
        ) from None
    commit = revision.removesuffix(DIRTY) if revision else None
    return ImageSource(commit=commit or None, dirty=bool(revision and revision.endswith(DIRTY)), created=created)


def check_name(name: str) -> str:
    """Return `name` if a registry takes it. Raises `InvalidValue`."""
    if not _NAME.fullmatch(name):
        raise InvalidValue("name of an image", name, "lower-case words of letters and digits, joined by - _ . or /")
    return name


def name_of(*, file: Path, base: str | None, variant: str | None) -> str:
    """Name an image if the user gives no name: `worker`, `worker-cuda`, `cluster`, and on a base `BASE-worker`."""
    stem = file.name.removesuffix(".Dockerfile").lower() or "worker"
    if base is not None:
        last = base.partition("@")[0].rpartition("/")[2].partition(":")[0].lower()
        return check_name(f"{last}-{stem}")
    return check_name(stem if variant in (None, "cpu") else f"{stem}-{variant}")


def is_pinned(image: str) -> bool:
    """Whether `image` names one build for good, or at least a version: by digest, or by a tag such as `3.11.14-slim`."""
    if "@sha256:" in image:
        return True
    return bool(_VERSION.search(image.rpartition("/")[2].partition(":")[2]))


def _git(folder: Path, *args: str) -> str | None:
    """Return what git printed; None if `folder` is in no repository or has no commit."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *args], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        if not any((parent / ".git").exists() for parent in (folder, *folder.parents)):
            return None
        raise NotPossible(
            f"the work tree at `{folder}` has a commit, and there is no `git` to read it", hint="install git"
        ) from None
    if done.returncode == 0:
        return done.stdout
    said = done.stderr.strip()
    if not said or "not a git repository" in said:
        return None
    raise NotPossible(
        f"git cannot read the work tree at `{folder}`",
        facts=said.splitlines()[:3],
        hint=f"try it by hand: git -C {folder} status",
    )
