"""Fetched files: whatever names the other side sends, they stay inside the named folder."""

from __future__ import annotations

import json
import os
import stat
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.client.fetch import FetchOutcome, LocalFolder, RemoteFile, UnsafeRemoteName, check_name, fetch
from runtime.errors import InvalidContract, NotPossible, StoreUnavailable
from runtime.jobs.hosts.bucket import BucketFiles
from runtime.jobs.hosts.local import LocalFiles
from runtime.outputs import parse_outputs
from tests.fakes.gcs import GcsServer
from tests.jobs_support import Terminal, launch_as_before, open_terminal


def content(data: bytes) -> Callable[[BinaryIO], None]:
    def write(opened: BinaryIO) -> None:
        opened.write(data)

    return write


def listing(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "kept").write_text("kept")
    return folder


@pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="this system has no files without a name")
def test_fetch_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    seen = []

    def write(opened: BinaryIO) -> None:
        opened.write(b"half")
        opened.flush()
        seen.append(listing(tmp_path))

    with LocalFolder(tmp_path) as folder:
        folder.put("a/b", write)

    assert seen == [["a"]]
    assert (listing(tmp_path), (tmp_path / "a/b").read_bytes()) == (["a", "a/b"], b"half")


def test_file_system_without_nameless_files_is_fetched_into_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    with LocalFolder(tmp_path) as folder:
        assert folder.put("a", content(b"1")) is FetchOutcome.FETCHED
        assert folder.put("a", content(b"2"), overwrite=True) is FetchOutcome.REPLACED

    assert (listing(tmp_path), (tmp_path / "a").read_bytes()) == (["a"], b"2")


REFUSED = {
    "../x": "leads to a folder above",
    "a/../../x": "leads to a folder above",
    "..": "leads to a folder above",
    "/etc/x": "is an absolute path",
    "": "has an empty part",
    ".": "has an empty part",
    "a//b": "has an empty part",
    "a/./b": "has an empty part",
    "a/": "has an empty part",
    "a\0b": "holds a NUL",
    "a" * 256: "has a part of 256 bytes, and 255 is the most",
    "é" * 128: "has a part of 256 bytes, and 255 is the most",
    "/".join("a" * 256): "lies 256 folders deep, and 255 is the most",
    "a\ud800": "cannot be a file name here",
}


@pytest.mark.parametrize("name", REFUSED)
def test_name_that_leads_elsewhere_is_refused_and_nothing_is_written(tmp_path: Path, name: str) -> None:
    with LocalFolder(tmp_path / "home") as home, pytest.raises(UnsafeRemoteName) as refused:
        home.put(name, content(b"x"))

    assert (refused.value.name, refused.value.reason, refused.value.exit_code) == (name, REFUSED[name], 2)
    assert listing(tmp_path) == ["home"]


def test_name_that_is_longer_than_a_path_may_be_is_refused(tmp_path: Path) -> None:
    with LocalFolder(tmp_path / "home") as home, pytest.raises(UnsafeRemoteName, match="4095 is the most"):
        home.put("/".join(["a" * 99] * 41), content(b"x"))

    assert listing(tmp_path) == ["home"]


@pytest.mark.parametrize("target", ["outside", "home/real", "nowhere"])
def test_name_that_leads_through_a_link_is_refused(tmp_path: Path, outside: Path, target: str) -> None:
    (tmp_path / "home" / "real").mkdir(parents=True)
    (tmp_path / "home" / "plots").symlink_to(tmp_path / target)

    with LocalFolder(tmp_path / "home") as home, pytest.raises(UnsafeRemoteName) as refused:
        home.put("plots/x", content(b"x"))

    assert refused.value.reason == "leads through 'plots', which is no folder here"
    assert listing(tmp_path) == ["home", "home/plots", "home/real", "outside", "outside/kept"]


def test_link_that_comes_while_files_are_fetched_is_not_followed(tmp_path: Path, outside: Path) -> None:
    def replace_meanwhile(opened: BinaryIO) -> None:
        opened.write(b"x")
        (tmp_path / "home" / "a").rename(tmp_path / "home" / "moved")
        (tmp_path / "home" / "a").symlink_to(outside)

    with LocalFolder(tmp_path / "home") as home:
        home.put("a/one", replace_meanwhile)
        with pytest.raises(UnsafeRemoteName):
            home.put("b/../a/two", content(b"x"))
        home.put("c", content(b"x"))
        with pytest.raises(UnsafeRemoteName):
            home.put("a/three", content(b"x"))

    assert listing(tmp_path / "home") == ["a", "c", "moved", "moved/one"]
    assert listing(outside) == ["kept"]


def test_link_under_the_name_differs_and_is_replaced_only_when_told_to(tmp_path: Path, outside: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "x").symlink_to(outside / "kept")

    with LocalFolder(tmp_path / "home") as home:
        assert home.put("x", content(b"kept")) is FetchOutcome.DIFFERS
        assert (tmp_path / "home" / "x").is_symlink()
        assert home.put("x", content(b"new"), overwrite=True) is FetchOutcome.REPLACED

    assert (tmp_path / "home" / "x").read_bytes() == b"new"
    assert not (tmp_path / "home" / "x").is_symlink()
    assert (outside / "kept").read_text() == "kept"


def test_pipe_or_folder_under_the_name_stays(tmp_path: Path) -> None:
    (tmp_path / "home" / "folder").mkdir(parents=True)
    os.mkfifo(tmp_path / "home" / "pipe")

    with LocalFolder(tmp_path / "home") as home:
        became = [home.put(name, content(b"x"), overwrite=True) for name in ("folder", "pipe")]

    assert became == [FetchOutcome.DIFFERS, FetchOutcome.DIFFERS]
    assert stat.S_ISFIFO((tmp_path / "home" / "pipe").stat().st_mode)
    assert listing(tmp_path / "home") == ["folder", "pipe"]


def test_folder_that_the_user_named_may_be_a_link(tmp_path: Path, outside: Path) -> None:
    (tmp_path / "home").symlink_to(outside)

    with LocalFolder(tmp_path / "home") as home:
        home.put("a/x", content(b"x"))

    assert listing(outside) == ["a", "a/x", "kept"]


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_folder_that_is_a_file_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(NotPossible, match=f"`{tmp_path}/{name}` is no folder"):
        LocalFolder(tmp_path / name)


def test_file_that_cannot_be_had_whole_leaves_nothing(tmp_path: Path) -> None:
    def break_off(opened: BinaryIO) -> None:
        opened.write(b"half")
        raise StoreUnavailable("gone")

    with LocalFolder(tmp_path / "home") as home, pytest.raises(StoreUnavailable):
        home.put("x", break_off)

    assert listing(tmp_path / "home") == []


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    names=st.lists(
        st.text("./a\0é\ud800", max_size=12) | st.lists(st.sampled_from(["..", ".", "", "a", "link"])).map("/".join),
        max_size=6,
    )
)
def test_any_names_are_refused_or_lie_below_the_folder(
    tmp_path_factory: pytest.TempPathFactory, names: list[str]
) -> None:
    root = tmp_path_factory.mktemp("any")
    home = root / "one" / "home"
    home.mkdir(parents=True)
    (home / "link").symlink_to(root)
    placed = []
    with LocalFolder(home) as folder:
        for name in names:
            try:
                if folder.put(name, content(name.encode("utf-8", "surrogatepass"))) is FetchOutcome.FETCHED:
                    placed.append(name)
            except UnsafeRemoteName:
                continue

    assert {path.name for path in root.iterdir()} == {"one"}
    assert {path.name for path in (root / "one").iterdir()} == {"home"}
    there = {str(path.relative_to(home)) for path in home.rglob("*") if path.is_file() and not path.is_symlink()}
    assert there == set(placed)


@pytest.mark.parametrize("name", ["../x", "a/b", "/x", "", "a\0"])
def test_folder_is_not_named_by_what_is_a_path(name: str) -> None:
    with pytest.raises(UnsafeRemoteName):
        check_name(name)

    assert check_name("train-j-91c0") == "train-j-91c0"


# sources of file names


class HostileFiles(LocalFiles):
    """Lists the given names, and returns the same bytes for each."""

    def __init__(self, root: Path, names: list[str]) -> None:
        super().__init__(str(root))
        self._names = names

    def tree(self, folder: str) -> list[tuple[str, int]]:
        return [(name, 4) for name in self._names]

    def download(self, name: str, to: BinaryIO) -> None:
        to.write(b"evil")


def test_fetch_stops_at_a_refused_name_and_what_came_before_stays(tmp_path: Path) -> None:
    files = HostileFiles(tmp_path, ["a", "b/c", "../../x", "d"])
    listed = [RemoteFile(name=name, place=f"0/{name}", size_bytes=size) for name, size in files.tree("")]

    fetched = fetch(files, listed, tmp_path / "home")
    done = [next(fetched).path, next(fetched).path]
    with pytest.raises(UnsafeRemoteName, match=r"`0/\.\./\.\./x`"):
        next(fetched)

    assert done == [f"{tmp_path}/home/0/a", f"{tmp_path}/home/0/b/c"]
    assert listing(tmp_path) == ["home", "home/.gitignore", "home/0", "home/0/a", "home/0/b", "home/0/b/c"]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[GcsServer]:
    running = GcsServer().start()
    running.make_bucket("lab")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", running.url)
    yield running
    running.stop()


def test_fetch_from_a_bucket_refuses_an_object_that_no_file_can_be_named_like(
    server: GcsServer, tmp_path: Path
) -> None:
    files = BucketFiles("gs://lab/p")
    for name in ("out/a", f"out/{'b' * 300}"):
        files.write(name, b"x")
    listed = [RemoteFile(name=f"out/{name}", place=name, size_bytes=size) for name, size in files.tree("out")]

    with pytest.raises(UnsafeRemoteName, match="has a part of 300 bytes"):
        list(fetch(files, listed, tmp_path / "home"))

    assert listing(tmp_path / "home") == [".gitignore", "a"]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Terminal]:
    with open_terminal(tmp_path, monkeypatch, capsys) as terminal:
        yield terminal


def hostile_ssh(run: Terminal, monkeypatch: pytest.MonkeyPatch, methods: str) -> None:
    """Give targets `far` and `local` the same record root; the server behind `far` has other `methods` of `Place`."""
    commands = run.tree.parent / "commands"
    commands.mkdir()
    (commands / "methods.py").write_text(textwrap.dedent(methods))
    (commands / "ssh").write_text(
        textwrap.dedent(
            f"""\
            #!{sys.executable}
            import sys
            if "-G" in sys.argv:
                sys.exit()
            source = sys.stdin.buffer.read(int(sys.stdin.buffer.readline())).decode()
            agent, call = source.rsplit("\\nserve(", 1)
            exec(agent + open({str(commands / "methods.py")!r}).read() + "\\nserve(" + call)
            """
        )
    )
    (commands / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    (run.tree / "runtime.toml").write_text(
        f'[targets.far]\nkind = "ssh"\nhost = "box"\nrecords = "{run.data / "jobs"}"\n'
    )


def test_fetch_over_ssh_from_a_machine_that_names_files_outside_is_refused_and_says_what_came(
    run: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = run.finish("echo good > $RUNTIME_OUTPUT_DIR/a")
    hostile_ssh(
        run,
        monkeypatch,
        """
        GuardedRoot.tree = lambda self, folder: [["a", 5], ["../../x", 5], ["z", 5]]
        """,
    )

    said = run("fetch", job, "deep/home", "--on", "far")

    assert said.code == 2
    assert said.out == "deep/home/a\t5B\tfetched\n"
    assert said.err.splitlines()[-3:] == [
        "error: the remote side names a file `../../x`, which is refused: it leads to a folder above",
        "  1 of 3 files came before it, and stay in `deep/home`",
        "hint: look at the files where they lie; a link or a long path of this machine is passed by naming another folder",
    ]
    assert listing(run.tree / "deep") == ["home", "home/.gitignore", "home/a"]
    assert not (run.tree / "x").exists()


def test_fetch_without_a_folder_refuses_the_name_that_the_other_side_gives_the_job(
    run: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch_as_before(monkeypatch)
    job = run.finish("echo good > $RUNTIME_OUTPUT_DIR/a")
    intent = run.folder(job) / "intent.json"
    intent.write_text(json.dumps({**json.loads(intent.read_text()), "name": "../../../evil"}))

    said = run("fetch", job)

    assert said.code == 2
    assert "names a file `../../../evil-" in said.err
    assert not list(run.tree.parent.parent.glob("evil*"))


def test_bundle_whose_machine_names_jobs_outside_is_remembered_nowhere(
    run: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile_ssh(
        run,
        monkeypatch,
        """
        GuardedRoot.names = lambda self, folder, prefix: ["j-/../../../evil"] if folder == "jobs" else []
        GuardedRoot.read = lambda self, name: b'{"parts": ["p"], "name": "n"}'
        GuardedRoot.read_many = lambda self, names: {name: b"1" for name in names}
        GuardedRoot.create = lambda self, *args: True
        """,
    )

    said = run("import", "/bundle", "--on", "far")

    assert said.code == 2
    assert "is no bundle" in said.err
    assert not list(run.tree.parent.rglob("evil*"))


def test_answer_that_is_no_list_of_files_is_an_infrastructure_failure(
    run: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = run.finish("echo good > $RUNTIME_OUTPUT_DIR/a")
    hostile_ssh(run, monkeypatch, "GuardedRoot.tree = lambda self, folder: [1, 2]\n")

    said = run("fetch", job, "home", "--on", "far")

    assert (said.code, said.err.splitlines()[0]) == (3, "error: `box` answers with no list of files")


@pytest.mark.parametrize("name", ["..", "a/../b", "a\0b", "a b", "/a"])
def test_contract_whose_stack_can_name_no_file_is_malformed(name: str) -> None:
    with pytest.raises(InvalidContract, match="`stack` is"):
        parse_outputs({"schema": 1, "stack": name})
