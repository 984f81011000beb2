"""The state of a work tree in git: its commit, and the differences from it. Git takes no lock and writes nothing."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from runtime.snapshots.secret_files import find_secrets

LONGEST_DIFF: Final = 1_000_000
_DIFF: Final = (
    # Names are not patterns, and relative to the folder as those of the snapshot. Without external drivers and filters,
    # which are the user's programs and may write, and without the old bytes of binary files.
    *("--literal-pathspecs", "diff", "--relative", "--no-ext-diff", "--no-textconv", "--no-color"),
    # A rename would name the old file, and a deleted file, or one that became a link, would show only its old content.
    *("--no-renames", "--diff-filter=dt", "--ignore-submodules"),
)
_NAMES_AT_ONCE: Final = 256 * 1024
"""Letters of names in the arguments of one call; systems take 1 MiB or more, variables included."""
_OF_HOOKS: Final = (
    # Variables that git sets for its hooks and aliases; they would lead it to another repository than the folder's.
    *("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY"),
    # Git refuses these together with literal names.
    *("GIT_GLOB_PATHSPECS", "GIT_NOGLOB_PATHSPECS", "GIT_ICASE_PATHSPECS"),
)


class Patience(Protocol):
    """Limits the time that git may take."""

    @property
    def left_s(self) -> float: ...
    def check(self) -> None:
        """Raise once the time is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GitHead:
    """Where a work tree stands, and whether anything in a folder of it differs from the commit."""

    commit: str | None
    """None before the first commit."""
    branch: str | None
    """None on a detached head."""
    dirty: bool
    """Whether a file differs, or is not tracked."""
    changed: bool
    """Whether a tracked file differs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GitState:
    """Position of the tree in its history, for people; the content id vouches for the bytes."""

    commit: str | None
    """None before the first commit."""
    branch: str | None
    """None on a detached head."""
    diff: str
    """Diff against the commit of the files that the snapshot has; empty for a clean tree. See `read_git_state`."""


def read_git_head(folder: Path) -> GitHead | None:
    """Read where the work tree around `folder` stands, with one process as a rule; None outside of a work tree."""
    said = ask_git(folder, "status", "--porcelain=v2", "--branch", "--ignore-submodules", "--", ".")
    if said is None:
        return _read_head_alone(folder)
    lines = said.split(b"\n")
    facts = dict(line[2:].split(b" ", 1) for line in lines if line.startswith(b"# ") and b" " in line[2:])
    commit, branch = facts.get(b"branch.oid", b"(initial)"), facts.get(b"branch.head", b"(detached)")
    return GitHead(
        commit=None if commit == b"(initial)" else os.fsdecode(commit),
        # A branch may have such a name, too, and a head may stand on a reference that is not a branch.
        branch=_read_branch(folder) if branch.startswith(b"(") else os.fsdecode(branch),
        dirty=any(line and not line.startswith(b"#") for line in lines),
        changed=any(line.startswith((b"1 ", b"2 ", b"u ")) for line in lines),
    )


def _read_head_alone(folder: Path) -> GitHead | None:
    """The same if git cannot compare the tree with its commit, for want of a filter, say. Then it counts as changed."""
    if ask_git(folder, "rev-parse", "--git-dir") is None:
        return None
    commit = ask_git(folder, "rev-parse", "--verify", "--quiet", "HEAD")
    branch = _read_branch(folder)
    return GitHead(commit=os.fsdecode(commit).strip() if commit else None, branch=branch, dirty=True, changed=True)


def _read_branch(folder: Path) -> str | None:
    name = ask_git(folder, "symbolic-ref", "--quiet", "HEAD")
    return os.fsdecode(name).rstrip("\n").removeprefix("refs/heads/") if name else None


def read_git_state(folder: Path, names: Collection[str], head: GitHead | None = None) -> GitState | None:
    """Read commit, branch and diff of the work tree around `folder`; None outside of a work tree.

    The diff is kept with the job, so it shows the snapshot's files, `names`, and no name or line of any other: a file that
    was left out, deleted or renamed, or that lies outside of `folder`. Files are left out of it, too, if the diff would show
    a secret that was removed from them.
    """
    head = head or read_git_head(folder)
    if head is None:
        return None
    diff = _read_changes(folder, names, "HEAD") if head.changed else ""
    return GitState(commit=head.commit, branch=head.branch, diff=diff)


def read_diffs(folder: Path, names: Collection[str]) -> tuple[str, str]:
    """Return the changes that are not staged and those that are, as `git diff` and `git diff --staged` show them.

    As in `read_git_state`, they show `names` alone.
    """
    return _read_changes(folder, names), _read_changes(folder, names, "--cached")


def _read_changes(folder: Path, names: Collection[str], *against: str) -> str:
    listed = ask_git(folder, *_DIFF, "--name-only", "-z", *against, "--", ".") or b""
    known = set(names)
    return _read_diff(folder, [name for name in map(os.fsdecode, listed.split(b"\0")) if name in known], *against)


def _read_diff(folder: Path, names: Sequence[str], *against: str) -> str:
    """Return the diff of these files, up to `LONGEST_DIFF`."""
    diff, left = "", list(names)
    while left and len(diff) < LONGEST_DIFF:
        letters = itertools.accumulate(len(os.fsencode(name)) for name in left)
        count = max(1, sum(1 for each in letters if each <= _NAMES_AT_ONCE))
        shown = ask_git(folder, *_DIFF, *against, "--", *left[:count]) or b""
        del left[:count]
        text = shown.decode("utf-8", "replace")[: LONGEST_DIFF - len(diff)]
        # Every line of a file begins with a space, `+`, `-`, `@` or a backslash.
        files = re.split(r"^(?=diff --git )", text, flags=re.MULTILINE)
        diff += "".join(each for each in files if not _removes_secret(each))
    return diff


def _removes_secret(diff: str) -> bool:
    # With the lines around, since only the body of a key changes when it is replaced.
    before, after = (
        find_secrets("".join(re.findall(rf"^[ {sign}](.*\n?)", diff, flags=re.MULTILINE))) for sign in "-+"
    )
    return not before <= after


def ask_git(folder: Path, *args: str, patience: Patience | None = None) -> bytes | None:
    """Return what git prints; None if it refuses or is not installed."""
    return start_git(folder, *args, patience=patience)()


def start_git(folder: Path, *args: str, patience: Patience | None = None) -> Callable[[], bytes | None]:
    """Start git, and return a function that waits for its output as `ask_git` does."""
    try:
        asked = subprocess.Popen(
            ["git", "-C", str(folder), *args],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={
                **{name: text for name, text in os.environ.items() if name not in _OF_HOOKS},
                "GIT_OPTIONAL_LOCKS": "0",
            },
        )
    except OSError:
        return lambda: None

    def answer() -> bytes | None:
        with asked:
            try:
                said, _ = asked.communicate(timeout=patience.left_s if patience else None)
            except BaseException as problem:
                asked.kill()
                if patience and isinstance(problem, subprocess.TimeoutExpired):
                    patience.check()
                raise
        return said if asked.returncode == 0 else None

    return answer
