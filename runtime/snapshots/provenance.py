"""Where a call or a command comes from: the command line of its program, and the state of the git repositories of its code.

It goes along for people, and no id depends on it: the same call from another command line is the same job or task. A job
has it in its order, which no id covers. For tasks, the repositories lie beside the snapshot as a note of the record store,
because every task that runs this code has them in common, and the command line is in the calls themselves.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from runtime.errors import RequestRefused
from runtime.secret_detection import drop_secret_arguments, has_known_form
from runtime.snapshots.git import GitHead, ask_git, read_diffs, read_git_head, start_git
from runtime.snapshots.snapshot import SnapshotRules, survey

MOST_DIFF_BYTES: Final = 256 << 10
"""Limit for the diffs of all repositories together."""
MOST_ARGV_BYTES: Final = 8 << 10
"""Each task of a call has it in its message."""
CUT: Final = "\n[cut: the diffs together are longer than 256 KiB]\n"


def own_argv() -> list[str]:
    """The command line of this process, without arguments that look like secrets, and without its end if it is long."""
    kept: list[str] = []
    left = MOST_ARGV_BYTES
    for word in map(_plain, drop_secret_arguments(sys.argv)):
        left -= len(word.encode()) + 1
        if left < 0:
            return [*kept, "[cut]"]
        kept.append(word)
    return kept


def read_repositories(folder: Path, names: Collection[str], around: GitHead | None = None) -> list[dict[str, Any]]:
    """Return the state of the repository around `folder`, and of those inside it, which has the files `names`.

    `around` is what `read_git_head` says of `folder`, if that is known.
    `folder` in a record is relative. `diff` and `staged_diff` show the files of the snapshot alone, as `read_git_state` does;
    `dirty` is true if any file differs from the commit, or is not tracked.
    """
    found, left = [], MOST_DIFF_BYTES
    for place, files in _split(folder, names):
        here = folder / place
        if not _has_git(here):
            continue
        remote = start_git(here, "config", "--get", "remote.origin.url")
        head = (around if place == "." else None) or read_git_head(here)
        url = remote()
        if head is None:
            continue
        record: dict[str, Any] = {
            "folder": place,
            "commit": head.commit,
            "branch": None if head.branch is None else _plain(head.branch),
            "dirty": head.dirty,
            "remote": remove_credentials(_plain(os.fsdecode(url or b"")).strip()) or None,
        }
        diffs = read_diffs(here, files) if head.changed else ("", "")
        for name, diff in zip(("diff", "staged_diff"), diffs, strict=True):
            record[name] = cut_text(diff, left)
            left -= min(left, len(diff.encode("utf-8", "replace")))
        found.append(record)
    return found


def read_origin_here(folder: Path | None = None, rules: SnapshotRules | None = None) -> dict[str, Any]:
    """Return the provenance that a launch from this process would record, of the code in `folder` or around the working directory."""
    here = folder or Path.cwd()
    top = None if folder else ask_git(here, "rev-parse", "--show-toplevel")
    return {"argv": own_argv(), "git": read_folder(Path(os.fsdecode(top).rstrip("\n")) if top else here, rules)}


def read_folder(folder: Path, rules: SnapshotRules | None = None) -> list[dict[str, Any]]:
    """Read the repositories of a folder of code; none of a folder that is refused as code."""
    rules = rules or SnapshotRules()
    try:
        names = [file.name for file in survey(folder, rules)]
    except RequestRefused:
        return []
    return read_repositories(folder, without_secrets(names, rules))


def without_secrets(names: Collection[str], rules: SnapshotRules) -> list[str]:
    """Leave out the files that look like secrets and were named as belonging to the code."""
    named = set(rules.secrets)
    return [name for name in names if name not in named]


def encode_note(repositories: list[dict[str, Any]]) -> bytes:
    return json.dumps({"git": repositories}).encode()


def cut_text(text: str, most_bytes: int) -> str:
    """Return a text of at most `most_bytes`, with a note at its end if it was cut."""
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= most_bytes:
        return encoded.decode()
    return encoded[:most_bytes].decode("utf-8", "ignore") + CUT


def remove_credentials(url: str) -> str:
    """Return a URL without password, token and query; empty for one that is a secret all the same.

    The user of ssh is kept, and that of http is not: it may be a token.
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        return ""
    if parts.scheme and parts.netloc:
        user, at, host = parts.netloc.rpartition("@")
        netloc = f"{user.partition(':')[0]}{at}{host}" if "ssh" in parts.scheme else host
        url = parts._replace(netloc=netloc, query="", fragment="").geturl()
    return "" if has_known_form(url) else url


def _has_git(folder: Path) -> bool:
    """Tell cheaply whether git may know `folder`, since asking it takes several processes."""
    return "GIT_DIR" in os.environ or any(
        os.path.lexists(each / ".git") for each in (folder.resolve(), *folder.resolve().parents)
    )


def _split(folder: Path, names: Collection[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the folder of each repository, the one around first, with the files that are its own."""
    inner = sorted(each for each in _folders(names) if os.path.lexists(folder / each / ".git"))
    files: dict[str, list[str]] = {".": [], **{each: [] for each in inner}}
    for name in names:
        above = next((each for each in reversed(inner) if name.startswith(f"{each}/")), None)
        files[above or "."].append(name[len(above) + 1 :] if above else name)
    yield from files.items()


def _folders(names: Collection[str]) -> set[str]:
    found: set[str] = set()
    for name in names:
        above = name.rpartition("/")[0]
        while above and above not in found:
            found.add(above)
            above = above.rpartition("/")[0]
    return found


def _plain(text: str) -> str:
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
