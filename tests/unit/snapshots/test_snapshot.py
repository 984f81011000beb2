"""Snapshots: the exact tree, by content id."""

from __future__ import annotations

import os
import stat
import subprocess
import tarfile
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from runtime.errors import InvalidValue, NotPossible, StoreUnsafe
from runtime.records import open_records
from runtime.records.store import BlobRecords
from runtime.shim.tree import unpack
from runtime.snapshots.git import GitHead, read_git_head, read_git_state
from runtime.snapshots.snapshot import (
    IGNORE_FILE,
    SnapshotRules,
    fetch_snapshot,
    make_snapshot,
    survey,
    take_snapshot,
)


def list_files(folder: Path, *, exclude: Sequence[str] = ()) -> list[str]:
    return [each.name for each in survey(folder, SnapshotRules(exclude=exclude))]


def make_tree(folder: Path) -> Path:
    (folder / "pkg").mkdir(parents=True)
    (folder / "pkg" / "main.py").write_bytes(b"print('hi')\r\n")
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "link").symlink_to("run.sh")
    return folder


def contents(folder: Path) -> dict[str, tuple[bool, bytes]]:
    return {
        str(path.relative_to(folder)): (os.access(path, os.X_OK), path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_snapshot_restores_names_modes_links_and_bytes(tmp_path: Path) -> None:
    tree, records = make_tree(tmp_path / "tree"), open_records("memory:")
    identity = take_snapshot(tree, records)
    unpack(fetch_snapshot(identity, records), str(tmp_path / "restored"))
    assert contents(tmp_path / "restored") == contents(tree)
    assert (tmp_path / "restored" / "link").readlink() == Path("run.sh")


def test_snapshot_of_the_same_tree_elsewhere_and_later_has_the_same_id(tmp_path: Path) -> None:
    one, other = make_tree(tmp_path / "a"), make_tree(tmp_path / "b")
    os.utime(other / "pkg" / "main.py", (1, 1))
    assert make_snapshot(one).id == make_snapshot(other).id


@pytest.mark.parametrize("change", ["bytes", "mode", "name"])
def test_snapshot_of_a_changed_tree_has_another_id(tmp_path: Path, change: str) -> None:
    tree = make_tree(tmp_path / "a")
    before = make_snapshot(tree).id
    match change:
        case "bytes":
            (tree / "pkg" / "main.py").write_bytes(b"print('ho')\r\n")
        case "mode":
            (tree / "run.sh").chmod(0o644)
        case "name":
            (tree / "run.sh").rename(tree / "ran.sh")
    assert make_snapshot(tree).id != before


def test_list_files_in_a_git_tree_takes_untracked_and_leaves_ignored_and_deleted(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "tree")
    (tree / ".gitignore").write_text("*.log\n")
    (tree / "big.log").write_text("x")
    git = ["git", "-C", str(tree), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "run.sh"], check=True)
    subprocess.run([*git, "commit", "-qm", "x"], check=True)
    (tree / "run.sh").unlink()
    assert list_files(tree) == [".gitignore", "link", "pkg/main.py"]


def test_snapshot_that_the_store_changed_is_refused(tmp_path: Path) -> None:
    records = open_records("memory:")
    assert isinstance(records, BlobRecords)
    identity = take_snapshot(make_tree(tmp_path / "tree"), records)
    records.blobs.put(f"snapshots/{identity.removeprefix('sha256:')}", b"import os; os.abort()")
    with pytest.raises(StoreUnsafe):
        fetch_snapshot(identity, records)


def test_snapshot_with_a_secret_or_too_large_is_refused_before_it_is_read(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "tree")
    with pytest.raises(NotPossible, match="too large"):
        take_snapshot(tree, open_records("memory:"), rules=SnapshotRules(max_bytes=10))
    (tree / ".env").write_text("TOKEN=1")
    with pytest.raises(NotPossible, match=r"`\.env`"):
        take_snapshot(tree, open_records("memory:"))


def test_fetch_of_what_is_no_content_id_says_the_form() -> None:
    with pytest.raises(InvalidValue):
        fetch_snapshot("../../etc/passwd", open_records("memory:"))


def git(folder: Path, *args: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@example.org", *args],
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout


def make_repository(folder: Path, files: dict[str, str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    git(folder, "init", "-q", "-b", "main")
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "x", "--allow-empty")
    return folder


def state_of(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Return the state of everything below, including .git, as far as a write would change it."""
    return {
        str(path.relative_to(folder)): (path.lstat().st_mode, path.lstat().st_mtime_ns, path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink()
    }


def test_list_files_honours_the_ignore_file_for_what_git_tracks_too(tmp_path: Path) -> None:
    tree = make_repository(
        tmp_path / "tree", {"main.py": "", "data/big.bin": "", "data/keep.txt": "", "a/data.log": ""}
    )
    (tree / ".runtimeignore").write_text("# large\n/data/*\n!/data/keep.txt\n*.log\n")

    assert list_files(tree) == [".runtimeignore", "data/keep.txt", "main.py"]
    assert list_files(tree, exclude=["main.py"]) == [".runtimeignore", "data/keep.txt"]


def test_list_files_walks_repositories_inside_the_tree_by_their_own_rules(tmp_path: Path) -> None:
    tree = make_repository(tmp_path / "tree", {"main.py": ""})
    inner = make_repository(tree / "vendor" / "lib", {"lib.py": "", ".gitignore": "*.o\n"})
    (inner / "lib.o").write_text("")
    (inner / "new.py").write_text("")
    make_repository(inner / "deep", {"deep.py": ""})

    assert list_files(tree) == [
        "main.py",
        "vendor/lib/.gitignore",
        "vendor/lib/deep/deep.py",
        "vendor/lib/lib.py",
        "vendor/lib/new.py",
    ]


def test_list_files_takes_a_submodule_and_passes_over_one_that_was_never_fetched(tmp_path: Path) -> None:
    library = make_repository(tmp_path / "library", {"lib.py": ""})
    tree = make_repository(tmp_path / "tree", {"main.py": ""})
    git(tree, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(library), "lib")
    git(tree, "commit", "-qm", "y")
    git(tmp_path, "clone", "-q", str(tree), "clone")

    assert list_files(tree) == [".gitmodules", "lib/lib.py", "main.py"]
    assert list_files(tmp_path / "clone") == [".gitmodules", "main.py"]


def test_list_files_of_a_folder_inside_a_repository_takes_that_folder_only(tmp_path: Path) -> None:
    tree = make_repository(tmp_path / "tree", {"a/x.py": "", "b/y.py": "", ".gitignore": "*.log\n"})
    (tree / "a" / "new.log").write_text("")

    assert list_files(tree / "a") == ["x.py"]


def test_list_files_without_git_honours_gitignore_files(tmp_path: Path) -> None:
    for name in ("main.py", "out.log", "sub/keep.log", "sub/drop.txt", "build/x.o", "sub/__pycache__/x.pyc"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / ".gitignore").write_text("*.log\nbuild/\n")
    (tmp_path / "sub" / ".gitignore").write_text("drop.txt\n")

    assert list_files(tmp_path) == [".gitignore", "main.py", "sub/.gitignore"]


def test_snapshot_takes_the_bytes_of_the_work_tree_whatever_filters_say(tmp_path: Path) -> None:
    tree = make_repository(
        tmp_path / "tree", {".gitattributes": "*.txt text eol=lf\n*.bin filter=lfs\nsecret.md export-ignore\n"}
    )
    git(tree, "config", "filter.lfs.clean", "echo pointer")
    (tree / "dos.txt").write_bytes(b"one\r\ntwo\r\n")
    (tree / "model.bin").write_bytes(b"\0weights")
    (tree / "secret.md").write_text("kept")

    unpack(make_snapshot(tree).archive, str(tmp_path / "restored"))

    assert (tmp_path / "restored" / "dos.txt").read_bytes() == b"one\r\ntwo\r\n"
    assert (tmp_path / "restored" / "model.bin").read_bytes() == b"\0weights"
    assert (tmp_path / "restored" / "secret.md").read_text() == "kept"


def test_snapshot_writes_nothing_to_the_tree_the_index_or_the_object_store(tmp_path: Path) -> None:
    tree = make_repository(tmp_path / "tree", {"main.py": "1"})
    (tree / "main.py").write_text("2")
    (tree / "new.py").write_text("3")
    before = state_of(tree)

    make_snapshot(tree)
    read_git_state(tree, ["main.py", "new.py"])

    assert state_of(tree) == before


def test_snapshot_of_a_file_that_changes_while_it_is_read_reads_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "grows.txt"
    path.write_text("half")
    looks: list[int] = []
    fstat = os.fstat

    def look(descriptor: int) -> os.stat_result:
        looks.append(descriptor)
        if len(looks) == 2:  # Between the first read and the check after it.
            path.write_text("half and the rest")
        return fstat(descriptor)

    monkeypatch.setattr(os, "fstat", look)

    assert _content(make_snapshot(tmp_path).archive, "grows.txt") == b"half and the rest"
    assert len(looks) == 4


def test_snapshot_of_a_file_that_never_holds_still_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "busy.log").write_text("x")
    reads = []
    fstat = os.fstat

    def restless(descriptor: int) -> os.stat_result:
        reads.append(descriptor)
        values = list(fstat(descriptor))
        values[stat.ST_SIZE] += len(reads)
        return os.stat_result(values)

    monkeypatch.setattr(os, "fstat", restless)
    monkeypatch.setattr("runtime.snapshots.snapshot.time.sleep", lambda seconds: None)

    with pytest.raises(NotPossible, match=r"`busy\.log` does not hold still") as failed:
        make_snapshot(tmp_path)

    assert failed.value.facts == ("read 5 times",)


def test_snapshot_with_a_named_secret_takes_that_one_only(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("A=1")
    (tmp_path / "server.key").write_text("B")

    with pytest.raises(NotPossible, match=r"`server\.key`"):
        make_snapshot(tmp_path, SnapshotRules(secrets=[".env"]))
    made = make_snapshot(tmp_path, SnapshotRules(secrets=[".env", "server.key"]))

    assert made.files == 2


def test_snapshot_too_large_names_the_five_largest(tmp_path: Path) -> None:
    for index in range(7):
        (tmp_path / f"f{index}").write_bytes(b"x" * (index * 1024))

    with pytest.raises(NotPossible, match="too large") as failed:
        make_snapshot(tmp_path, SnapshotRules(max_bytes=1024))

    assert failed.value.facts == ("at most 1KiB", *(f"f{index}: {index}KiB" for index in (6, 5, 4, 3, 2)))


def test_snapshot_passes_over_what_is_neither_file_nor_link(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "main.py").write_text("")

    assert make_snapshot(tmp_path).files == 1


def test_list_files_of_a_folder_looks_at_its_own_repository_whatever_a_hook_has_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = make_repository(tmp_path / "tree", {"main.py": ""})
    other = make_repository(tmp_path / "other", {"other.py": ""})
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other / ".git" / "index"))

    assert list_files(tree) == ["main.py"]


def test_git_state_says_commit_branch_and_diff(tmp_path: Path) -> None:
    tree = make_repository(tmp_path / "tree", {"main.py": "1\n"})
    (tree / "main.py").write_text("2\n")

    found = read_git_state(tree, ["main.py"])

    assert found is not None
    assert found.commit == git(tree, "rev-parse", "HEAD").strip()
    assert found.branch == "main"
    assert "-1\n+2\n" in found.diff
    assert read_git_state(tmp_path, ["main.py"]) is None


def test_head_is_told_where_git_cannot_compare_the_tree_with_it(tmp_path: Path) -> None:
    tree = make_repository(tmp_path / "tree", {"main.py": "1\n"})
    commit = git(tree, "rev-parse", "HEAD").strip()
    (tree / ".gitattributes").write_text("*.py filter=missing\n")
    git(tree, "config", "filter.missing.required", "true")
    (tree / "main.py").write_text("changed = 1\n")

    head = read_git_head(tree)

    assert head == GitHead(commit=commit, branch="main", dirty=True, changed=True)


def test_head_off_every_branch_has_none_and_a_branch_of_that_name_has_it(tmp_path: Path) -> None:
    tree = make_repository(tmp_path / "tree", {"main.py": "1\n"})
    git(tree, "checkout", "--quiet", "-b", "(detached)")
    named = read_git_head(tree)
    git(tree, "update-ref", "refs/odd/place", "HEAD")
    git(tree, "symbolic-ref", "HEAD", "refs/odd/place")
    odd = read_git_head(tree)
    git(tree, "checkout", "--quiet", "--detach")
    detached = read_git_head(tree)

    assert [head and head.branch for head in (named, odd, detached)] == ["(detached)", "refs/odd/place", None]


def test_untracked_files_alone_make_a_tree_dirty_and_not_changed(tmp_path: Path) -> None:
    tree = make_repository(tmp_path / "tree", {"main.py": "1\n"})
    clean = read_git_head(tree)
    (tree / "untracked").write_text("1")
    dirty = read_git_head(tree)

    assert [head and (head.dirty, head.changed) for head in (clean, dirty)] == [(False, False), (True, False)]


def test_git_state_before_the_first_commit_and_on_a_detached_head(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q", "-b", "main", "empty")
    tree = make_repository(tmp_path / "tree", {"main.py": "1"})
    git(tree, "checkout", "-q", "--detach")

    empty, detached = read_git_state(tmp_path / "empty", []), read_git_state(tree, ["main.py"])

    assert empty is not None
    assert detached is not None
    assert (empty.commit, empty.branch, empty.diff) == (None, "main", "")
    assert (detached.branch, detached.diff) == (None, "")


_NAMES = st.text(
    st.characters(blacklist_characters="/\0", blacklist_categories=("Cs",)), min_size=1, max_size=12
).filter(
    lambda name: (
        name not in (".", "..", ".gitignore", ".gitmodules", ".gitattributes", IGNORE_FILE, "__pycache__")
        and name.casefold() != ".git"
        and len(name.encode()) < 200
    )
)
_FILES = st.dictionaries(
    st.lists(_NAMES, min_size=1, max_size=3).map("/".join),
    st.tuples(st.sampled_from(["file", "script", "link"]), st.binary(max_size=600)),
    max_size=8,
)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(files={"KUBECONFIG": ("file", b"")}, repository=False)
@given(files=_FILES, repository=st.booleans())
def test_snapshot_of_any_tree_restores_exactly_and_has_one_id(
    tmp_path_factory: pytest.TempPathFactory, files: dict[str, tuple[str, bytes]], repository: bool
) -> None:
    folder = tmp_path_factory.mktemp("any")
    tree = folder / "tree"
    tree.mkdir()
    if repository:
        git(tree, "init", "-q")
    for name, (kind, content) in files.items():
        path = tree / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if kind == "link":
                path.symlink_to(content.hex() or "nowhere")
            else:
                path.write_bytes(content)
                path.chmod(0o755 if kind == "script" else 0o644)
        except OSError:
            continue  # One name is a folder of the other.

    rules = SnapshotRules(secrets=tuple(files))
    first, second = make_snapshot(tree, rules), make_snapshot(tree, rules)
    unpack(first.archive, str(folder / "restored"))

    assert first.id == second.id
    assert _described(folder / "restored") == _described(tree)
    with tarfile.open(fileobj=BytesIO(first.archive)) as archive:
        assert len(archive.getnames()) == first.files


def _described(folder: Path) -> dict[str, tuple[str, bytes]]:
    """Return name → kind and content of every file and link outside .git."""
    found: dict[str, tuple[str, bytes]] = {}
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        if name.startswith(".git/") or name == ".git":
            continue
        if path.is_symlink():
            found[name] = ("link", os.fsencode(path.readlink()))
        elif path.is_file():
            found[name] = (
                "script" if os.access(path, os.X_OK) and path.stat().st_mode & 0o100 else "file",
                path.read_bytes(),
            )
    return found


def _content(archive: bytes, name: str) -> bytes:
    with tarfile.open(fileobj=BytesIO(archive)) as opened:
        found = opened.extractfile(name)
        assert found is not None
        return found.read()


def test_git_state_of_names_that_look_like_patterns_shows_these_files_only(tmp_path: Path) -> None:
    names = ["*.py", ":(top)x.py", "-dash.py", "a b.py", "new\nline.py", 'q"uote.py', "é.py", "\udcff.py"]
    tree = make_repository(tmp_path / "tree", dict.fromkeys([*names, "left.py"], "1\n"))
    for name in (*names, "left.py"):
        (tree / name).write_text("2\n" if name in names else "canary\n")

    found = read_git_state(tree, names)

    assert found is not None
    assert found.diff.count("-1\n+2\n") == found.diff.count("diff --git ") == len(names)
    assert "left.py" not in found.diff


@pytest.mark.parametrize("key", ["diff.noprefix", "diff.mnemonicPrefix", "color.ui", "diff.external", "diff.renames"])
def test_git_state_is_the_same_in_spite_of_the_users_settings_of_git(tmp_path: Path, key: str) -> None:
    tree = make_repository(tmp_path / "tree", {"main.py": "1\n", "canary.env": "a\nb\nc\n"})
    (tree / "main.py").write_text("2\n")
    git(tree, "mv", "canary.env", "settings")
    git(
        tree,
        "config",
        key,
        {"color.ui": "always", "diff.external": "touch ran;", "diff.renames": "copies"}.get(key, "true"),
    )

    found = read_git_state(tree, ["main.py", "settings"])

    assert found is not None
    assert "-1\n+2\n" in found.diff
    assert "canary" not in found.diff
    assert not (tree / "ran").exists()


def test_git_state_of_a_secret_whose_name_stays_shows_nothing_of_that_file(tmp_path: Path) -> None:
    key = "-----BEGIN PRIVATE KEY-----\n{}\n-----END PRIVATE KEY-----\n"
    password = "PASSWORD = (\n    {}\n)\n"
    names = {"key.txt": key, "settings.py": password}
    tree = make_repository(
        tmp_path / "tree",
        {**{name: text.format('"canary"') for name, text in names.items()}, "kept.py": 'TOKEN = "known"\nx = 1\n'},
    )
    for name, text in names.items():
        (tree / name).write_text(text.format("other"))
    (tree / "kept.py").write_text('TOKEN = "known"\nx = 2\n')

    found = read_git_state(tree, [*names, "kept.py"])

    assert found is not None
    assert "canary" not in found.diff
    assert "-x = 1\n+x = 2\n" in found.diff  # Its secret was there before, and is in the snapshot.


def test_list_files_of_a_folder_that_became_a_link_takes_the_link_and_nothing_behind_it(tmp_path: Path) -> None:
    tree = make_repository(tmp_path / "tree", {"data/in/a.txt": "1\n", "main.py": ""})
    (tree / "data").rename(tmp_path / "outside")
    (tmp_path / "outside" / "in" / "a.txt").write_text("canary")
    (tree / "data").symlink_to(tmp_path / "outside")

    made = make_snapshot(tree)

    assert made.names == ("data", "main.py")
    assert b"canary" not in made.archive


@pytest.mark.parametrize(
    ("variable", "value"),
    [("GIT_COMMON_DIR", "other/.git"), ("GIT_OBJECT_DIRECTORY", "other/.git/objects"), ("GIT_GLOB_PATHSPECS", "1")],
)
def test_git_state_is_of_the_folders_repository_whatever_variables_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    tree = make_repository(tmp_path / "tree", {"main.py": "1\n"})
    make_repository(tmp_path / "other", {"other.py": ""})
    (tree / "main.py").write_text("2\n")
    monkeypatch.setenv(variable, value if value == "1" else str(tmp_path / value))

    found = read_git_state(tree, ["main.py"])

    assert found is not None
    assert "-1\n+2\n" in found.diff
