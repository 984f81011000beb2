"""Resources kept open between the submissions of a process, and never out of date."""

from __future__ import annotations

import io
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runtime.client.tasks import kept_stacks
from runtime.client.tasks import task_snapshot as submitted_code
from runtime.client.tasks.kept_stacks import borrow_stack, close_kept
from runtime.client.tasks.submit import Submission, submit
from runtime.client.tasks.task_snapshot import CodeInHand, take_code
from runtime.client.tasks.wait import wait
from runtime.errors import InvalidTask
from runtime.queues.sqlite.queue import open_sqlite
from runtime.records import sqlite_file
from runtime.snapshots.snapshot import fetch_snapshot
from runtime.stack.open import OpenStack

WORDS = ("p", "w")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with some code; the stack's data is in another folder."""
    close_kept()
    folder = tmp_path / "project"
    (folder / "package" / "deep").mkdir(parents=True)
    (folder / "empty" / "below").mkdir(parents=True)
    for name in ("main.py", "package/a.py", "package/deep/b.py"):
        (folder / name).write_text(f"# {name}\n")
    monkeypatch.setenv("RUNTIME_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.chdir(folder)
    # A fork waits for other threads' current work, which may take long on a busy machine.
    monkeypatch.setattr(sqlite_file, "FORK_PATIENCE_S", 240.0)
    yield folder
    close_kept()


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[OpenStack]:
    """The stacks that were opened, in order."""
    found: list[OpenStack] = []
    real = kept_stacks.open_stack

    def counted(*args: object, **more: object) -> OpenStack:
        found.append(real(*args, **more))  # type: ignore[arg-type]
        return found[-1]

    monkeypatch.setattr(kept_stacks, "open_stack", counted)
    return found


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """A list with one entry per scan of the code."""
    found: list[object] = []

    def counted(*args: object, **more: object) -> object:
        found.append(args)
        return take_code(*args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(submitted_code, "take_code", counted)
    return found


def put(number: int, **more: object) -> Submission:
    return submit((*WORDS, [str(number)]), **more)  # type: ignore[arg-type]


def numbers(path: Path) -> list[int]:
    queue, records = open_sqlite(path)
    found = sorted(int(task.entry.args[0]) for task in queue.peek(10_000))  # type: ignore[union-attr]
    queue.close()
    records.close()
    return found


# the stack


def test_variables_and_working_directory_of_each_call_count(
    project: Path, opened: list[OpenStack], monkeypatch: pytest.MonkeyPatch
) -> None:
    put(1)
    monkeypatch.setenv("RUNTIME_DATA_DIR", str(project.parent / "other"))
    put(2)
    monkeypatch.setenv("RUNTIME_DATA_DIR", str(project.parent / "data"))
    put(3)
    monkeypatch.setenv("RUNTIME_QUEUE", "tiles")
    assert put(4).queue == "tiles"
    monkeypatch.delenv("RUNTIME_QUEUE")
    (project.parent / "beside").mkdir()
    (project.parent / "beside" / "runtime.toml").write_text('queue = "beside"\n')
    monkeypatch.chdir(project.parent / "beside")
    assert put(5).queue == "beside"

    assert numbers(project.parent / "other" / "local.db") == [2]
    assert numbers(project.parent / "data" / "local.db") == [1, 3]
    assert len(opened) == 4


def test_settings_file_counts_from_the_call_after_it_was_written(project: Path) -> None:
    assert put(1).queue == "default"
    for number, name in enumerate(("aaaa", "bbbb", "cccc"), start=2):  # same length, within one tick of most clocks
        (project / "runtime.toml").write_text(f'queue = "{name}"\n')
        assert put(number).queue == name
    (project / "runtime.toml").unlink()
    assert put(9).queue == "default"


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Watch settings files from the second look on, even new ones, and look again only after a notice."""
    monkeypatch.setattr(kept_stacks, "SETTLED_NS", -(10**18))
    monkeypatch.setattr(kept_stacks, "PLAIN_LOOKS", 1)
    monkeypatch.setattr(kept_stacks, "LOOK_EVERY_S", 3600.0)


def write_settings(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("other\n" if path.name == "default-stack" else 'queue = "other"\n')


def move_settings(path: Path) -> None:
    beside = path.parent / "made"
    write_settings(beside)
    beside.rename(path)


@pytest.mark.parametrize("write", [write_settings, move_settings])
@pytest.mark.parametrize("above", [".", ".."])
def test_settings_file_that_appears_is_noticed(
    project: Path, watched: None, opened: list[OpenStack], above: str, write: Callable[[Path], None]
) -> None:
    for number in range(5):
        assert put(number).queue == "default"
    (project / "unlisted").write_text("1")
    assert put(5).queue == "default"
    assert len(opened) == 1

    write(project / above / "runtime.toml")

    assert put(6).queue == "other"


@pytest.mark.parametrize("linked", [False, True])
def test_settings_file_that_changes_is_noticed(
    project: Path, watched: None, opened: list[OpenStack], linked: bool
) -> None:
    file = project / "runtime.toml"
    if linked:
        file.symlink_to(project.parent / "elsewhere.toml")
    file.write_text('queue = "first"\n')
    for number in range(5):
        assert put(number).queue == "first"
    assert len(opened) == 1

    file.write_text('queue = "second"\n')

    assert put(6).queue == "second"


@pytest.mark.parametrize("calls", [2, 8], ids=["looked at", "watched"])
@pytest.mark.parametrize("how", ["removed", "replaced", "folder removed"])
def test_file_that_was_removed_or_replaced_is_opened_again(project: Path, how: str, calls: int) -> None:
    data = project.parent / "data"
    for _ in range(calls):
        put(1)
    if how == "folder removed":
        shutil.rmtree(data)
    else:
        for end in ("", "-wal", "-shm"):
            Path(f"{data}/local.db{end}").unlink(missing_ok=True)
    if how == "replaced":
        other = project.parent / "other.db"
        queue, records = open_sqlite(other)
        queue.put([])
        queue.close()
        records.close()
        submit((*WORDS, ["7"]), queue=f"sqlite:{other}", snapshot=False)
        close_kept()
        other.replace(data / "local.db")

    done = put(3)

    assert (done.new, done.known) == (1, 0)
    assert numbers(data / "local.db") == ([3, 7] if how == "replaced" else [3])
    assert done.snapshot
    queue, records = open_sqlite(data / "local.db")
    assert fetch_snapshot(done.snapshot, records)
    queue.close()


def test_wait_goes_to_the_queue_that_was_named(project: Path) -> None:
    done = put(1, queue=f"sqlite:{project.parent}/other.db#tiles")

    assert not wait(done, timeout=0).complete
    assert not (project.parent / "data" / "local.db").exists()


def test_stack_whose_call_failed_is_closed(project: Path, opened: list[OpenStack]) -> None:
    put(1)
    with pytest.raises(InvalidTask):
        put(2, priority=10**12)
    assert opened[0].queue() is not None
    put(3)

    assert len(opened) == 2


def test_queue_that_is_passed_in_is_not_kept(project: Path, opened: list[OpenStack], tmp_path: Path) -> None:
    queue, records = open_sqlite(tmp_path / "own.db")
    put(1, queue=queue, snapshot=False)

    assert opened == []
    queue.close()
    records.close()


def test_threads_never_share_a_stack(project: Path) -> None:
    lent: set[int] = set()
    clashes: list[int] = []
    problems: list[BaseException] = []

    def work(first: int) -> None:
        try:
            for number in range(first, first + 20):
                with borrow_stack() as kept:
                    clashes.extend({id(kept)} & lent)
                    lent.add(id(kept))
                    lent.discard(id(kept))
                put(number)
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(0, 80, 20)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]

    assert (problems, clashes) == ([], [])
    assert numbers(project.parent / "data" / "local.db") == list(range(80))


def test_forked_child_opens_its_own_and_leaves_the_parents_alone(project: Path) -> None:
    for number in range(4):
        put(number)
    children = []
    for first in (100, 200):
        if (child := os.fork()) == 0:
            status = 1
            try:
                assert not kept_stacks._kept
                assert not kept_stacks._all
                for number in range(first, first + 10):
                    put(number)
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    for number in range(300, 310):
        put(number)

    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0]
    (project / "main.py").write_text("# edited\n")
    before, after = put(400), put(401)
    assert before.snapshot == after.snapshot != put(0).kept_code
    expected = [*range(4), *range(100, 110), *range(200, 210), *range(300, 310), 400, 401]
    assert numbers(project.parent / "data" / "local.db") == expected


def in_child(work: Callable[[], None]) -> int:
    """Fork, do the work in the child, and return the child's pid; it exits with 1 if the work raises or hangs."""
    if child := os.fork():
        return child
    signal.alarm(240)
    status = 1
    try:
        work()
        status = 0
    finally:
        os._exit(status)


def ended_well(child: int) -> bool:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_children_of_a_process_whose_threads_submit_all_submit(project: Path) -> None:
    over = threading.Event()

    def work(first: int) -> None:
        for number in itertools.count(first, 10):
            put(number)
            if over.is_set():
                return

    threads = [threading.Thread(target=work, args=(first,)) for first in (1, 2, 3)]
    [thread.start() for thread in threads]
    try:
        assert all(ended_well(in_child(lambda n=n: put(n) and None)) for n in range(0, 100, 10))
    finally:
        over.set()
        [thread.join() for thread in threads]
    assert set(range(0, 100, 10)) < set(numbers(project.parent / "data" / "local.db"))


def test_what_a_child_submits_stays_though_its_parent_closes_the_file(project: Path) -> None:
    """SQLite would mistake the parent's locks for the child's own and remove the log that the child writes to."""
    put(0)
    closed, go = os.pipe()

    def work() -> None:
        put(1)
        os.read(closed, 1)
        put(2)

    child = in_child(work)
    close_kept()
    os.write(go, b"!")

    assert ended_well(child)
    assert numbers(project.parent / "data" / "local.db") == [0, 1, 2]


def test_all_is_closed_at_exit_without_a_word(project: Path) -> None:
    script = "from runtime.client.tasks.submit import submit\nfor n in range(5): submit(('p', 'w', [str(n)]))\n"
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", script], capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert not (project.parent / "data" / "local.db-wal").exists()


# the code


def hot(project: Path, code: CodeInHand, stack: OpenStack) -> None:
    """Take the code until a call reuses the last result."""
    for _ in range(4):
        code.take(stack.records, stack.settings)
    assert code._watch is not None


@pytest.fixture
def code(project: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CodeInHand]:
    monkeypatch.setattr(submitted_code, "LOOK_EVERY_S", 3600.0)
    code = CodeInHand(None, None)
    yield code
    code.close()


@pytest.fixture
def stack(project: Path) -> Iterator[OpenStack]:
    with kept_stacks.open_stack() as stack:
        yield stack


def in_git(project: Path) -> None:
    git(project, "init", "-q")
    (project / ".gitignore").write_text("*.log\nignored/\n")
    git(project, "add", ".")
    git(project, "-c", "user.name=n", "-c", "user.email=e@x", "commit", "-qm", "first")


def git(project: Path, *words: str) -> None:
    subprocess.run(["git", "-C", str(project), *words], check=True, capture_output=True)


def same_size(project: Path) -> None:
    path = project / "package" / "a.py"
    path.write_text(path.read_text().swapcase())


def new_link(project: Path) -> None:
    (project / "link").symlink_to("main.py")


def moved_in(project: Path) -> None:
    other = project.parent / "made"
    (other / "x").mkdir(parents=True)
    (other / "x" / "y.py").write_text("y")
    other.rename(project / "package" / "made")


def replaced_folder(project: Path) -> None:
    (project / "package" / "deep").rename(project.parent / "away")
    (project / "package" / "deep").mkdir()
    (project / "package" / "deep" / "b.py").write_text("other")


CHANGES: dict[str, Callable[[Path], object]] = {
    "an edit": lambda project: (project / "main.py").write_text("# edited\n"),
    "an edit of the same size": same_size,
    "an edit far below": lambda project: (project / "package" / "deep" / "b.py").write_text("1"),
    "a new file": lambda project: (project / "package" / "new.py").write_text("1"),
    "a new file in a folder that was empty": lambda project: (project / "empty" / "below" / "new.py").write_text("1"),
    "a new folder with a file": moved_in,
    "a file that is gone": lambda project: (project / "package" / "a.py").unlink(),
    "a file that was renamed": lambda project: (project / "main.py").rename(project / "other.py"),
    "a file put over another": lambda project: shutil.copy(project / "main.py", project / "package" / "a.py"),
    "a mode": lambda project: (project / "main.py").chmod(0o755),
    "a link": new_link,
    "a folder put in the place of another": replaced_folder,
    "ignore rules": lambda project: (project / ".gitignore").write_text("main.py\n"),
    "rules of our own": lambda project: (project / ".runtimeignore").write_text("package\n"),
}


@pytest.mark.parametrize("repository", [True, False], ids=["git", "plain"])
@pytest.mark.parametrize("kind", CHANGES)
def test_every_change_is_seen_by_the_next_call(
    project: Path, code: CodeInHand, stack: OpenStack, kind: str, repository: bool
) -> None:
    if repository:
        in_git(project)
    hot(project, code, stack)
    before = code.take(stack.records, stack.settings)

    CHANGES[kind](project)

    after = code.take(stack.records, stack.settings)
    assert after == take_code(None, stack.records, stack.settings)
    assert after != before


def test_ignored_file_that_git_begins_to_track_is_seen(project: Path, code: CodeInHand, stack: OpenStack) -> None:
    in_git(project)
    (project / "run.log").write_text("1")
    hot(project, code, stack)
    before = code.take(stack.records, stack.settings)

    git(project, "add", "-f", "run.log")

    assert code.take(stack.records, stack.settings) != before


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.daily(1)
def test_any_changes_in_any_order_are_seen(project: Path, code: CodeInHand, stack: OpenStack, seed: int) -> None:
    chance = random.Random(seed)

    def change() -> None:
        # Sorted by name, because the folder's own order differs between machines.
        files = sorted(path for path in project.rglob("*") if path.is_file())
        folders = [*sorted(path for path in project.rglob("*") if path.is_dir()), project]
        path = chance.choice(folders) / f"n{chance.randrange(5)}"
        match chance.randrange(5):
            case 0 if files:
                chance.choice(files).write_text(str(chance.randrange(10)))
            case 1 if files:
                chance.choice(files).unlink()
            case 2 if files and not path.exists():
                chance.choice(files).rename(path)
            case 3 if not path.exists():
                path.mkdir()
            case _ if not path.is_dir():
                path.write_text(str(chance.randrange(10)))

    for _ in range(60):
        for _ in range(chance.randrange(3)):
            change()
        now = take_code(None, stack.records, stack.settings)
        for _ in range(chance.randrange(1, 4)):
            assert code.take(stack.records, stack.settings) == now


def test_each_task_brings_the_file_that_was_written_for_it(project: Path) -> None:
    done = []
    for number in range(30):
        (project / "config.txt").write_text(f"{number:02}")
        done.append(put(number))
        if number > 20:
            done.append(put(number + 1000))  # And some that reuse the code of the task before.

    queue, records = open_sqlite(project.parent / "data" / "local.db")
    for one, task in zip(done, queue.peek(100), strict=True):
        assert one.snapshot == task.snapshot
        assert task.snapshot is not None
        with tarfile.open(fileobj=io.BytesIO(fetch_snapshot(task.snapshot, records))) as archive:
            content = archive.extractfile("config.txt")
            assert content is not None
            assert int(content.read()) == int(task.entry.args[0]) % 1000  # type: ignore[union-attr]
    queue.close()
    records.close()
