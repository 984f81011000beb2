"""Hosts: the same files and commands here and behind a real ssh, and the errors when that fails."""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from runtime.client.jobs.targets import RootLost
from runtime.errors import StoreUnavailable
from runtime.jobs.hosts.agent import MARKER
from runtime.jobs.hosts.base import (
    AccessDenied,
    CommandResult,
    Files,
    FileToWrite,
    FreeSpace,
    Host,
    HostUnavailable,
    LockLost,
)
from runtime.jobs.hosts.bucket import is_bucket
from runtime.jobs.hosts.local import LocalHost
from runtime.jobs.hosts.ssh import SshHost
from tests.jobs_support import as_somebody_else, folder_for_all
from tests.owners_support import STRANGER, give_away
from tests.services_support import require
from tests.shim_support import PATIENCE_S, find_pythons, wait_for
from tests.ssh_support import SshServer

PYTHONS = find_pythons()
OLDEST = min(PYTHONS, key=lambda version: int(version[2:]))


@pytest.fixture
def box(ssh_server: SshServer, tmp_path: Path) -> Iterator[SshHost]:
    """A real host, with the oldest Python on the other end."""
    host = SshHost(ssh_server.host, str(tmp_path / "records"), python=PYTHONS[OLDEST], options=ssh_server.options)
    yield host
    host.close()


@pytest.fixture(params=["local", pytest.param("ssh", marks=pytest.mark.service)])
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Host:
    if request.param == "local":
        return LocalHost(str(tmp_path / "records"))
    made: Host = request.getfixturevalue("box")
    return made


@pytest.fixture
def files(host: Host) -> Files:
    return host.files


@pytest.fixture
def make_files(host: Host, tmp_path: Path) -> Iterator[Callable[[], Files]]:
    """The same root, opened several times."""
    made: list[Host] = []

    def make() -> Files:
        root = str(tmp_path / "records")
        made.append(SshHost(host.name, root, options=host._options) if isinstance(host, SshHost) else LocalHost(root))
        return made[-1].files

    yield make
    for each in made:
        each.close()


# files


def test_file_is_created_once_and_read_back(files: Files) -> None:
    data = bytes(range(256)) * 5000

    assert files.read("jobs/j/a") is None
    assert files.create("jobs/j/a", data) is True
    assert files.create("jobs/j/a", b"other") is False

    assert files.read("jobs/j/a") == data
    assert files.read_from("jobs/j/a", 256, 3) == b"\x00\x01\x02"
    assert files.read_from("jobs/j/a", len(data)) == b""
    assert files.read_from("none", 0) == b""
    assert files.read_many(["jobs/j/a", "none"]) == {"jobs/j/a": data}


def test_file_is_written_over_whole_and_nothing_is_left_beside_it(files: Files) -> None:
    files.write("a/b", b"one")
    files.write("a/b", b"two", mode=0o700)

    assert files.read("a/b") == b"two"
    assert files.names("a") == ["b"]
    assert Path(files.root, "a/b").stat().st_mode & 0o777 == 0o700


def test_files_written_together_are_replaced_or_stay_as_each_one_says(files: Files) -> None:
    files.write("jobs/j/a", b"old")
    files.write("jobs/j/b", b"first")

    files.write_many(
        [
            FileToWrite("jobs/j/a", b"new"),
            FileToWrite("jobs/j/b", b"second", once=True),
            FileToWrite("jobs/j/d/c", b""),
            FileToWrite("jobs/j/e", b"\x00\xff" * 100_000, once=True),
        ]
    )
    files.write_many([])

    assert files.tree("jobs/j") == [("a", 3), ("b", 5), ("d/c", 0), ("e", 200_000)]
    assert (files.read("jobs/j/a"), files.read("jobs/j/b")) == (b"new", b"first")


def test_modes_of_files_written_together_are_theirs(files: Files) -> None:
    files.write_many([FileToWrite("jobs/j/a", b"", 0o700), FileToWrite("jobs/j/b", b"", 0o500, once=True)])

    assert [Path(files.root, "jobs/j", name).stat().st_mode & 0o777 for name in "ab"] == [0o700, 0o500]


@pytest.mark.parametrize("once", [False, True])
def test_files_written_together_appear_in_order_once_all_are_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, once: bool
) -> None:
    files = LocalHost(str(tmp_path)).files
    done: list[str] = []

    def follow(name: str) -> None:
        real = getattr(os, name)

        def call(*args: Any) -> Any:
            if name == "fsync":
                done.append("folder" if stat.S_ISDIR(os.fstat(args[0]).st_mode) else "file")
            else:
                done.append(Path(args[1]).name)
            return real(*args)

        monkeypatch.setattr(f"runtime.jobs.hosts.agent.os.{name}", call)

    for name in ("fsync", "link", "rename"):
        follow(name)
    files.write_many([FileToWrite(name, b"1", once=once) for name in ("b", "a", "c")])

    assert done == ["file", "file", "file", "b", "a", "c", "folder"]


def test_only_a_file_that_has_to_last_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = LocalHost(str(tmp_path)).files
    waited: list[int] = []
    monkeypatch.setattr("runtime.jobs.hosts.agent.os.fsync", waited.append)

    assert files.create("a", b"1", lasting=False) is True
    assert (files.create("a", b"2", lasting=False), files.read("a"), len(waited)) == (False, b"1", 0)
    assert (files.create("b", b"1"), len(waited)) == (True, 1)


def test_nothing_appears_of_files_written_together_for_which_there_was_no_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [1]
    write = os.write

    def fill(descriptor: int, data: bytes) -> int:
        if not left:
            raise OSError(errno.ENOSPC, "no space left on device")
        left.pop()
        return write(descriptor, data)

    files = LocalHost(str(tmp_path)).files
    monkeypatch.setattr("runtime.jobs.hosts.agent.os.write", fill)

    with pytest.raises(StoreUnavailable):
        files.write_many([FileToWrite("a/b", b"one"), FileToWrite("a/c", b"too much")])

    assert files.names("a") == []


def test_folders_of_jobs_are_their_owners_alone(files: Files) -> None:
    files.create("jobs/j-1/spec", b"")
    assert files.make_folder("jobs/j-2") is True
    assert files.make_folder("jobs/j-2") is False

    assert [Path(files.root, name).stat().st_mode & 0o777 for name in ("jobs/j-1", "jobs/j-2")] == [0o700] * 2
    assert Path(files.root, "jobs/j-1/spec").stat().st_mode & 0o777 == 0o600


def test_folders_below_the_root_are_for_all_who_may_write_to_the_root(files: Files) -> None:
    Path(files.root).mkdir()
    Path(files.root).chmod(0o1777)

    files.create("jobs/j-1/spec", b"")
    files.create("probe/one", b"")

    modes = {name: Path(files.root, name).stat().st_mode & 0o7777 for name in ("jobs", "probe", "jobs/j-1")}
    assert modes == {"jobs": 0o1777, "probe": 0o1777, "jobs/j-1": 0o700}


def test_files_that_only_another_user_may_read_are_left_out_of_many_and_denied_by_name() -> None:
    with folder_for_all() as root:
        files = LocalHost(str(root)).files
        files.create("jobs/j-1/intent.json", b"theirs")
        files.create("jobs/j-2/intent.json", b"mine")

        with as_somebody_else(root, hidden="jobs/j-1", shown="jobs/j-2"):
            both = ["jobs/j-1/intent.json", "jobs/j-2/intent.json"]
            assert files.read_many(both) == {"jobs/j-2/intent.json": b"mine"}
            with pytest.raises(AccessDenied):
                files.names("jobs/j-1")


def test_pipe_among_files_is_not_listed(files: Files) -> None:
    files.create("d/a", b"123")
    os.mkfifo(Path(files.root, "d/pipe"))

    assert files.tree("d") == [("a", 3)]


def test_nothing_is_left_of_a_file_for_which_there_was_no_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    files = LocalHost(str(tmp_path)).files
    monkeypatch.setattr("runtime.jobs.hosts.agent.os.fsync", full)

    with pytest.raises(StoreUnavailable) as refused:
        files.create("a/b", b"too much")

    assert refused.value.hint == "free some space, or `runtime gc`"
    assert files.names("a") == []


def test_file_has_another_name_without_being_sent_again(files: Files) -> None:
    files.create("a", b"one")

    assert files.link("a", "d/b") is True
    assert files.link("a", "d/b") is True
    assert files.link("none", "c") is False
    files.create("c", b"two")
    assert files.link("a", "c") is False

    assert files.read("d/b") == b"one"
    assert Path(files.root, "a").stat().st_nlink == 2


def test_nothing_is_changed_any_more_once_another_has_taken_the_lock_over(files: Files) -> None:
    files.create("jobs/j/lock.1", b'{"token": "ours"}')
    files.write("jobs/j/runs/0/result", b"{}")
    held = files.while_held("jobs/j/lock.1", "ours")

    assert held.create("jobs/j/mark", b"one") is True
    held.remove("jobs/j/runs")
    assert held.names("jobs/j") == ["lock.1", "mark"]

    files.create("jobs/j/lock.2", b'{"token": "theirs"}')
    changes: list[Callable[[], object]] = [
        lambda: held.create("jobs/j/other", b"two"),
        lambda: held.write("jobs/j/mark", b"two"),
        lambda: held.remove("jobs/j"),
    ]
    for change in changes:
        with pytest.raises(LockLost):
            change()
    files.remove("jobs/j/lock.2")
    files.write("jobs/j/lock.1", b'{"token": "theirs"}')
    for change in changes:
        with pytest.raises(LockLost):
            change()

    assert held.read_many(["jobs/j/mark", "jobs/j/other"]) == {"jobs/j/mark": b"one"}


def test_names_and_trees_are_listed(files: Files) -> None:
    for name in ("d/b.1", "d/a.1", "d/a.2", "d/e/f"):
        files.create(name, b"123")

    assert files.names("d") == ["a.1", "a.2", "b.1", "e"]
    assert files.names("d", "a.") == ["a.1", "a.2"]
    assert files.names("none") == []
    assert files.tree("d") == [("a.1", 3), ("a.2", 3), ("b.1", 3), ("e/f", 3)]
    assert files.room() == FreeSpace() if is_bucket(files.root) else (files.room().bytes or 0) > 0


@pytest.mark.parametrize("call", ["scandir", "stat"])
def test_tree_of_a_folder_that_cannot_be_listed_whole_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    files = LocalHost(str(tmp_path)).files
    for name in ("d/a", "d/deeper/b", "d/deeper/c"):
        files.create(name, b"123")
    real = getattr(os, call)

    def failing(path: Any, *args: Any, **more: Any) -> Any:
        if str(path).endswith({"scandir": "deeper", "stat": "/c"}[call]):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(path, *args, **more)

    monkeypatch.setattr(os, call, failing)

    with pytest.raises(StoreUnavailable) as broken:
        files.tree("d")

    assert broken.value.retryable


@pytest.mark.parametrize("size", [0, 3 * 1024 * 1024])
def test_download_is_equal_to_what_lies_there(files: Files, tmp_path: Path, size: int) -> None:
    content = os.urandom(size)
    files.create("out/a/file", content)

    with (tmp_path / "one").open("w+b") as opened:
        files.download("out/a/file", opened)

    assert (tmp_path / "one").read_bytes() == content


@pytest.mark.parametrize("size", [0, 9 * 1024 * 1024])
def test_upload_is_equal_to_what_lay_here_and_leaves_no_part(files: Files, tmp_path: Path, size: int) -> None:
    (tmp_path / "one").write_bytes(os.urandom(size))
    files.write("jobs/j/data/x", b"before")

    files.upload("jobs/j/data/x", tmp_path / "one")

    assert files.read("jobs/j/data/x") == (tmp_path / "one").read_bytes()
    assert files.names("jobs/j/data") == ["x"]


def test_upload_that_is_refused_leaves_no_part(tmp_path: Path) -> None:
    files = LocalHost(str(tmp_path / "records")).files
    (tmp_path / "one").write_bytes(b"1")
    files.make_folder("d/x")

    with pytest.raises(StoreUnavailable):
        files.upload("d/x", tmp_path / "one")

    assert files.names("d") == ["x"]


def test_removal_takes_read_only_trees_and_what_is_gone_already(files: Files) -> None:
    files.create("d/e/f", b"")
    Path(files.root, "d/e").chmod(0o500)

    files.remove("d")
    files.remove("d")

    assert files.names("") == []


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/../../outside", "."])
def test_names_that_lead_outside_are_refused(files: Files, name: str) -> None:
    with pytest.raises((ValueError, StoreUnavailable), match=r"lies outside of|the root itself"):
        files.remove(name)


def test_place_that_cannot_be_written_says_why_and_that_again_does_not_help(host: Host, tmp_path: Path) -> None:
    (tmp_path / "records").write_text("no folder")

    with pytest.raises(StoreUnavailable) as refused:
        host.files.create("a", b"")

    assert "refuses" in refused.value.message


def test_creates_at_once_have_one_winner(host: Host, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    others = [LocalHost(str(tmp_path / "records")) for _ in range(7)]
    won: list[int] = []
    start = threading.Barrier(8)

    def create(number: int, files: Files) -> None:
        start.wait()
        if files.create("one", str(number).encode()):
            won.append(number)

    threads = [
        threading.Thread(target=create, args=(number, each.files)) for number, each in enumerate([host, *others])
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()

    assert len(won) == 1
    assert host.files.read("one") == str(won[0]).encode()
    assert host.files.names("") == ["one"]


# recognising the root


class Known:
    """A watch that records the markers it sees, and refuses the root if they are wrong."""

    def __init__(self, *known: str) -> None:
        self.known: Sequence[str] = known
        self.seen: list[str] = []

    def saw(self, identity: str) -> None:
        if identity not in self.seen:
            self.seen.append(identity)

    def refusal(self, found: str | None, *, there: bool) -> RootLost:
        return RootLost(f"{found} {there}")


def test_root_is_marked_on_first_use_and_known_by_that(make_files: Callable[[], Files]) -> None:
    files, watch = make_files(), Known()
    files.keep_to(watch)
    assert (files.read("a"), files.names("jobs"), watch.seen) == (None, [], [])

    files.create("a", b"1")
    again, other = Known(*watch.seen), Known()
    for each in (again, other):
        second = make_files()
        second.keep_to(each)
        assert second.read("a") == b"1"

    [identity] = watch.seen
    assert re.fullmatch(r"r-[0-9a-f]{24}", identity)
    assert again.seen == other.seen == [identity]
    assert files.read(MARKER) == second.read(MARKER)
    assert (files.read(MARKER) or b"").startswith(identity.encode() + b"\n")


@pytest.mark.parametrize(
    "use",
    [
        lambda files: files.read("a"),
        lambda files: files.read_many(["a", "b"]),
        lambda files: files.read_from("a", 0),
        lambda files: files.names("jobs"),
        lambda files: files.tree("jobs"),
        lambda files: files.create("jobs/a", b""),
        lambda files: files.write("jobs/a", b""),
        lambda files: files.write_many([FileToWrite("jobs/a", b"")]),
        lambda files: files.make_folder("jobs/a"),
        lambda files: files.link("a", "jobs/a"),
        lambda files: files.remove("a"),
    ],
)
@pytest.mark.parametrize("marked", [False, True], ids=["unmarked", "another"])
def test_root_that_is_not_the_known_one_is_refused_and_nothing_is_made_there(
    make_files: Callable[[], Files], marked: bool, use: Callable[[Files], object]
) -> None:
    there = make_files()
    there.create("a", b"theirs")
    if marked:
        there.create(MARKER, b"r-another\n")
    before = there.tree("")
    files = make_files()
    files.keep_to(Known("r-mine"))

    for _ in range(2):
        with pytest.raises(RootLost) as lost:
            use(files)
        assert lost.value.message == f"{'r-another' if marked else None} True"

    assert there.tree("") == before


def test_root_that_is_gone_is_refused_and_not_made(host: Host) -> None:
    host.files.keep_to(Known("r-mine"))

    with pytest.raises(RootLost, match="None False"):
        host.files.create("jobs/a", b"")
    with pytest.raises(RootLost, match="None False"):
        host.spawn(["true"], folder="/", log=f"{host.files.address.rpartition(':')[2]}/jobs/log")

    assert not Path(host.files.address.rpartition(":")[2]).exists()


def test_root_that_goes_while_it_is_used_is_refused_from_then_on_and_found_again(host: Host, tmp_path: Path) -> None:
    files = host.files
    files.keep_to(Known())
    files.create("jobs/a", b"1")
    root = Path(files.root)

    root.rename(tmp_path / "away")
    for _ in range(2):
        with pytest.raises(RootLost, match="None False"):
            files.names("jobs")
        with pytest.raises(RootLost, match="None False"):
            files.write("jobs/b", b"2")
    gone = not root.exists()
    (tmp_path / "away").rename(root)

    assert gone
    assert files.names("jobs") == ["a"]


def test_roots_that_are_used_first_at_once_have_one_marker(host: Host, tmp_path: Path) -> None:
    hosts = [host, *(LocalHost(str(tmp_path / "records")) for _ in range(7))]
    watches = [Known() for _ in hosts]
    start = threading.Barrier(len(hosts))

    def use(files: Files, watch: Known, number: int) -> None:
        files.keep_to(watch)
        start.wait()
        files.create(f"jobs/{number}", b"")
        files.names("jobs")

    threads = [
        threading.Thread(target=use, args=(each.files, watch, number))
        for number, (each, watch) in enumerate(zip(hosts, watches, strict=True))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len({tuple(watch.seen) for watch in watches}) == 1
    assert len(host.files.names("jobs")) == len(hosts)


def test_marker_can_be_read_by_all_who_may_use_the_root(files: Files) -> None:
    files.keep_to(Known())
    before = os.umask(0o077)
    try:
        files.create("a", b"")
    finally:
        os.umask(before)

    assert Path(files.root, MARKER).stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("content", [b"", b"\xff\x00\n", b"x" * 5000, b"two words\n", "ü\n".encode(), b"\x1b[31m\n"])
def test_marker_with_anything_in_it_is_one_that_is_known_again(files: Files, content: bytes) -> None:
    Path(files.root).mkdir()
    Path(files.root, MARKER).write_bytes(content)
    watch = Known()
    files.keep_to(watch)

    files.create("a", b"")

    [identity] = watch.seen
    assert re.fullmatch(r"[\w.-]{1,64}", identity, re.ASCII)


@pytest.mark.parametrize("use", ["full disk", "no disk"])
def test_root_without_room_for_its_first_marker_is_used_where_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: str
) -> None:
    if use == "full disk":
        (tmp_path / "records/jobs").mkdir(parents=True)
        (tmp_path / "records/jobs/a").touch()
    files = LocalHost(str(tmp_path / "records")).files
    files.keep_to(Known())

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr("runtime.jobs.hosts.agent.os.fsync", full)

    if use == "full disk":
        assert files.link("jobs/a", "jobs/cancel") is True
    else:
        with pytest.raises(StoreUnavailable, match="no space left"):
            files.link("jobs/a", "jobs/cancel")


# commands


def test_command_is_run_with_its_input_and_variables(host: Host) -> None:
    answer = host.run(
        ["sh", "-c", 'cat; echo "$A-${HOME-none}"; echo err >&2; exit 3'],
        stdin=b"in\xff\n",
        env={"A": "one two", "HOME": None},  # type: ignore[dict-item]
    )

    assert answer == CommandResult(3, "in\ufffd\none two-none\n", "err\n")


@pytest.mark.parametrize("word", ["$HOME", "a b", "'", '"', "\\", "!x", "*", "", "ü", "a\nb", "`id`", "#", "~"])
def test_command_gets_every_word_as_it_is(host: Host, word: str) -> None:
    assert host.run(["printf", "%s|", word, "end"]) == CommandResult(0, f"{word}|end|", "")


def test_command_that_is_not_there_is_an_answer(host: Host) -> None:
    assert host.run(["no-such-command"]) == CommandResult(127, "", "no-such-command: No such file or directory")


def test_command_that_takes_too_long_is_killed_and_nothing_is_concluded(host: Host) -> None:
    with pytest.raises(HostUnavailable, match="did not end on"):
        host.run(["sleep", "60"], timeout_s=0.5)

    assert host.run(["echo", "on"]).out == "on\n"


def test_end_of_a_process_is_waited_for_and_one_that_goes_on_is_left(host: Host, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    words = ["sh", "-c", f"read word <{gate}"]

    pid = host.spawn(words, folder=str(tmp_path), log=str(tmp_path / "new/log"))
    assert host.wait(pid, 0.05) is False
    gate.write_text("go\n")
    assert host.wait(pid, PATIENCE_S) is True
    assert host.wait(pid, PATIENCE_S) is True
    assert (tmp_path / "new/log").read_bytes() == b""


def test_end_of_a_process_is_seen_without_a_descriptor_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("runtime.jobs.hosts.agent.os.pidfd_open")
    host = LocalHost(str(tmp_path))
    gate = tmp_path / "gate"
    os.mkfifo(gate)

    pid = host.spawn(["sh", "-c", f"read word <{gate}"], folder=str(tmp_path), log=str(tmp_path / "log"))
    assert host.wait(pid, 0.0) is False
    gate.write_text("go\n")
    assert host.wait(pid, PATIENCE_S) is True


def test_program_that_starts_many_processes_keeps_none_that_has_ended(tmp_path: Path) -> None:
    host = LocalHost(str(tmp_path))

    def start() -> Path:
        return Path("/proc", str(host.spawn(["true"], folder=str(tmp_path), log=str(tmp_path / "log"))), "stat")

    first = start()
    wait_for(lambda: ") Z " in first.read_text(), "the end of the process")
    start()

    assert not first.exists()


def test_process_outlives_the_connection(host: Host, tmp_path: Path) -> None:
    pid = host.spawn(
        ["sh", "-c", "echo $A; sleep 0.5; echo done"],
        folder=str(tmp_path),
        log=str(tmp_path / "log"),
        env={"A": "1"},
    )
    host.close()

    wait_for(lambda: (tmp_path / "log").read_text() == "1\ndone\n", "the end")
    assert pid > 1
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600


# the connection


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A short path: a socket's path may have about a hundred characters, which a test's own folder may exceed."""
    with tempfile.TemporaryDirectory(prefix="c-", dir="/tmp") as folder:
        yield Path(folder)


def answer_of(server: SshServer, tmp_path: Path, **changes: object) -> str:
    host = SshHost(server.host, str(tmp_path / "records"), options=server.options, **changes)  # type: ignore[arg-type]
    try:
        return host.run(["echo", "on"]).out
    finally:
        host.close()


@pytest.mark.parametrize("version", sorted(PYTHONS, key=lambda version: int(version[2:])))
def test_ssh_runs_under_every_python_here(ssh_server: SshServer, tmp_path: Path, version: str) -> None:
    assert answer_of(ssh_server, tmp_path, python=PYTHONS[version]) == "on\n"


@pytest.mark.parametrize(
    "banner", ["Welcome to box!\n", '{"id": 1, "value": [0, "forged", ""]}\n', "no end of line", "\xe9\0\n"]
)
def test_ssh_whose_login_prints_something_is_understood(ssh_server: SshServer, tmp_path: Path, banner: str) -> None:
    ssh_server.set_session('exec sh -c "$SSH_ORIGINAL_COMMAND"', banner=banner.replace("\0", ""))

    assert answer_of(ssh_server, tmp_path) == "on\n"


def test_ssh_sends_one_line_that_every_family_of_shells_reads_alike(ssh_server: SshServer, tmp_path: Path) -> None:
    ssh_server.set_session('printf "%s\\n" "$SSH_ORIGINAL_COMMAND" > sent; exec sh -c "$SSH_ORIGINAL_COMMAND"')

    assert answer_of(ssh_server, tmp_path) == "on\n"

    (line,) = (ssh_server.home / "sent").read_text().splitlines()
    before, program, after = line.split("'")
    assert (before, after) == ("exec python3 -u -c ", "")
    assert not set(program) & set("!\\$`"), "letters that csh reads between single quotes too"


@pytest.mark.parametrize("shell", ["csh", "tcsh", "bash", "dash", "zsh", "fish"])
def test_ssh_to_a_login_shell_of_another_kind_works(ssh_server: SshServer, tmp_path: Path, shell: str) -> None:
    path = shutil.which(shell)
    require(shell, path, "make services")
    ssh_server.set_session(f'exec {path} -c "$SSH_ORIGINAL_COMMAND"')

    assert answer_of(ssh_server, tmp_path) == "on\n"


def test_ssh_root_below_the_home_is_found_there(ssh_server: SshServer) -> None:
    host = SshHost(ssh_server.host, "~/records", options=ssh_server.options)
    try:
        host.files.create("a", b"1")
        assert host.files.root == f"{ssh_server.home}/records"
        assert (ssh_server.home / "records" / "a").read_bytes() == b"1"
    finally:
        host.close()


def test_ssh_that_was_cut_off_says_so_and_connects_anew_when_asked_again(ssh_server: SshServer, box: SshHost) -> None:
    assert box.run(["echo", "1"]).out == "1\n"
    ssh_server.drop_connections()

    with pytest.raises(HostUnavailable) as lost:
        box.run(["echo", "2"])

    assert lost.value.retryable
    assert lost.value.message.startswith("no connection to `box`: ")
    assert lost.value.hint == "try it by hand: ssh box true"
    assert box.run(["echo", "3"]).out == "3\n"


def test_ssh_to_a_host_that_does_not_listen_says_so(ssh_server: SshServer, box: SshHost) -> None:
    ssh_server.stop()

    with pytest.raises(HostUnavailable, match="Connection refused") as lost:
        box.run(["true"])

    assert lost.value.facts == ("ssh ended with code 255",)


def test_ssh_to_a_host_whose_key_is_unknown_is_refused(ssh_server: SshServer, tmp_path: Path) -> None:
    ssh_server.known_hosts.write_text("")

    with pytest.raises(HostUnavailable, match="Host key verification failed") as refused:
        answer_of(ssh_server, tmp_path)

    assert refused.value.hint == "see who it is, by hand: ssh box"
    assert ssh_server.known_hosts.read_text() == "", "nothing was taken on trust"
    assert ssh_server.connections() == 0


def test_ssh_to_a_host_whose_key_has_changed_is_refused(ssh_server: SshServer, tmp_path: Path) -> None:
    other = (ssh_server.folder / "user_key.pub").read_text().split()
    ssh_server.known_hosts.write_text(f"[127.0.0.1]:{ssh_server.port} {other[0]} {other[1]}\n")

    with pytest.raises(HostUnavailable, match="Host key verification failed"):
        answer_of(ssh_server, tmp_path)


def test_ssh_without_a_right_to_enter_says_so(ssh_server: SshServer, tmp_path: Path) -> None:
    (ssh_server.folder / "authorized_keys").write_text("")

    with pytest.raises(HostUnavailable, match="Permission denied") as refused:
        answer_of(ssh_server, tmp_path)

    assert refused.value.hint == "ssh box has to work without a question, or be open already (ControlMaster)"


def test_ssh_to_a_host_without_that_python_says_so(ssh_server: SshServer, tmp_path: Path) -> None:
    with pytest.raises(HostUnavailable) as refused:
        answer_of(ssh_server, tmp_path, python="python3.99")

    assert refused.value.hint == "set `python` of the target: `python3.99` is not there"


def test_ssh_hosts_share_one_connection_where_a_folder_for_it_is_named(
    ssh_server: SshServer, tmp_path: Path, short_folder: Path
) -> None:
    control = short_folder / "c"
    try:
        for _ in range(3):
            assert answer_of(ssh_server, tmp_path, control_folder=control) == "on\n"

        assert ssh_server.connections() == 1
        assert control.stat().st_mode & 0o777 == 0o700
    finally:
        close_master(ssh_server, f"{control}/%C")


def test_ssh_uses_a_connection_that_the_user_opened_by_hand(
    ssh_server: SshServer, tmp_path: Path, short_folder: Path
) -> None:
    path = f"{short_folder}/own-%C"
    ssh_server.write_client_config("ControlMaster no", f"ControlPath {path}")
    subprocess.run(["ssh", *ssh_server.options, "-o", "ControlMaster=yes", "-fN", ssh_server.host], check=True)
    try:
        (ssh_server.folder / "authorized_keys").write_text("")

        assert answer_of(ssh_server, tmp_path, control_folder=tmp_path / "c") == "on\n"

        assert ssh_server.connections() == 1
        assert not (tmp_path / "c").exists()
    finally:
        close_master(ssh_server, path)


def test_ssh_does_without_sharing_where_the_path_would_be_too_long(ssh_server: SshServer, tmp_path: Path) -> None:
    assert answer_of(ssh_server, tmp_path, control_folder=tmp_path / ("long" * 20)) == "on\n"


def close_master(server: SshServer, path: str) -> None:
    subprocess.run(
        ["ssh", *server.options, "-o", f"ControlPath={path}", "-O", "exit", server.host],
        capture_output=True,
        check=False,
    )


def test_ssh_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(HostUnavailable) as missing:
        SshHost("box", "/r").run(["true"])

    assert (missing.value.hint, missing.value.retryable) == ("install an OpenSSH client", False)


def test_folder_that_another_user_made_in_advance_is_not_used_for_a_job(tmp_path: Path) -> None:
    files = LocalHost(str(tmp_path / "root")).files
    assert files.make_folder("jobs/j-1")
    assert not files.make_folder("jobs/j-1")

    give_away(tmp_path / "root" / "jobs" / "j-1")
    with pytest.raises(StoreUnavailable, match=f"belongs to another user, uid {STRANGER}"):
        files.make_folder("jobs/j-1")

    assert [each.name for each in (tmp_path / "root" / "jobs").iterdir()] == ["j-1"]
