"""`runtime.system`: its wake-ups and stand-ins, and that code asks `system` for time, chance, threads and ways to wait."""

from __future__ import annotations

import ast
import os
import select
import selectors
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.system import WakeUp, system

# wake-ups


def is_readable(fd: int) -> bool:
    return bool(select.select([fd], [], [], 0)[0])


def test_wake_up_is_readable_from_the_first_ring_until_it_is_drained() -> None:
    wake_up = system.wake_up()
    seen = [is_readable(wake_up.fd)]

    for _ in range(3):
        wake_up.ring()
    seen.append(is_readable(wake_up.fd))
    wake_up.drain()
    seen.append(is_readable(wake_up.fd))
    wake_up.ring()
    seen.append(is_readable(wake_up.fd))

    assert seen == [False, True, False, True]


def test_wake_up_that_is_full_takes_further_rings_and_one_drain_empties_it() -> None:
    wake_up = WakeUp()
    for _ in range(100_000):
        wake_up.ring()

    wake_up.drain()

    assert not is_readable(wake_up.fd)


def test_drain_of_a_wake_up_that_nobody_rang_returns_at_once() -> None:
    WakeUp().drain()


def test_wake_up_from_another_thread_ends_a_wait() -> None:
    wake_up = WakeUp()

    with system.selector() as selector:
        selector.register(wake_up.fd, selectors.EVENT_READ)
        system.thread(wake_up.ring, name="ringing").start()
        found = selector.select()

    assert [key.fd for key, _ in found] == [wake_up.fd]


def test_descriptors_of_a_wake_up_live_as_long_as_somebody_may_ring() -> None:
    wake_up = WakeUp()
    fd, ring = wake_up.fd, wake_up.ring
    del wake_up
    ring()
    late = is_readable(fd)
    del ring

    assert late
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_wake_up_that_was_closed_is_closed_once() -> None:
    wake_up = WakeUp()
    wake_up.close()
    another = WakeUp()
    wake_up.close()
    del wake_up

    another.ring()
    assert is_readable(another.fd)


# stand-ins


def test_what_stands_in_does_so_inside_alone() -> None:
    slept: list[float] = []
    before = dict(vars(system))

    with system.replaced(sleep=slept.append, node=lambda: "elsewhere"):
        system.sleep(5.0)
        nodes = [system.node()]
        with system.replaced(node=lambda: "farther"):
            nodes.append(system.node())
        nodes.append(system.node())

    assert (slept, nodes) == ([5.0], ["elsewhere", "farther", "elsewhere"])
    assert vars(system) == before
    assert system.node() == os.uname().nodename


def test_what_stood_in_does_so_no_longer_after_an_exception() -> None:
    before = dict(vars(system))

    with pytest.raises(KeyError), system.replaced(now=lambda: None):
        raise KeyError

    assert vars(system) == before


def test_threads_of_the_machine_are_daemons_with_a_name() -> None:
    seen: list[tuple[str, bool]] = []
    thread = system.thread(
        lambda: seen.append((threading.current_thread().name, threading.current_thread().daemon)), name="made"
    )
    thread.start()
    thread.join()

    assert seen == [("made", True)]


# what code asks

RUNTIME = Path(__file__).parents[2] / "runtime"

COVERED = (
    "client",
    "clock.py",
    "experiments",
    "jobs",
    "launchers/base.py",
    "launchers/processes",
    "queues",
    "records",
    "stack",
    "tasks",
    "worker",
)

REAL = {
    "jobs/hosts/agent.py": "it travels to machines with another Python, with the standard library alone",
    "worker/attempts": "it deals with real processes, and a simulation has a pool of its own",
    "worker/metrics.py": "it serves HTTP",
    "worker/notices.py": "it watches the machine that it runs on",
}

ALLOWED = {
    ("experiments/calls.py", "concurrent.futures.as_completed"): "its calls are futures, for which their library waits",
    ("jobs/hosts/ssh.py", "threading.Timer"): "it ends a process, `ssh`",
    ("records/blobs/folder.py", "time.time"): "it is compared with times that the file system gives",
    ("records/sqlite_file.py", "threading.RLock"): "it guards forks of this process",
    ("records/filelock.py", "threading.Event"): "it belongs to a thread that waits in the kernel for a lock",
    ("records/filelock.py", "threading.Lock"): "it belongs to a thread that waits in the kernel for a lock",
    ("records/filelock.py", "threading.Thread"): "it waits in the kernel for a lock, or watches one that does",
    ("records/filelock.py", "time.sleep"): "it is a pause of that watcher",
    ("worker/content_cache.py", "time.time"): "it is compared with times that the file system gives",
}
"""Direct uses that stay: (file, use) → why."""

MODULES = {
    "concurrent.futures": {"ThreadPoolExecutor", "as_completed", "wait"},
    "datetime.datetime": {"now", "today", "utcnow"},
    "os": {"pipe", "pipe2", "uname", "urandom"},
    "queue": {"LifoQueue", "PriorityQueue", "Queue", "SimpleQueue"},
    "secrets": {"choice", "randbelow", "randbits", "token_bytes", "token_hex", "token_urlsafe"},
    "selectors": {"DefaultSelector", "EpollSelector", "PollSelector", "SelectSelector"},
    "socket": {"gethostname"},
    "threading": {"Barrier", "BoundedSemaphore", "Condition", "Event", "Lock", "RLock", "Semaphore", "Thread", "Timer"},
    "time": {"clock_gettime", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "sleep", "time"},
    "uuid": {"uuid1", "uuid4"},
}
"""What `system` stands for. A generator with a seed, `random.Random`, gives the same numbers anywhere."""


def is_direct(use: str) -> bool:
    module, _, name = use.rpartition(".")
    return name in MODULES.get(module, ()) or (module == "random" and name != "Random")


def find_direct(source: str) -> set[str]:
    """Return the uses of the machine's time, chance and threads that a stand-in would not see."""
    tree = ast.parse(source)
    names: dict[str, str] = {}
    found: set[str] = set()
    for node in _walk_what_runs(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                names[each.asname or each.name.partition(".")[0]] = (
                    each.name if each.asname else each.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    for node in _walk_what_runs(tree):
        if isinstance(node, ast.Attribute | ast.Name) and (use := _spell(node, names)) and is_direct(use):
            found.add(use)
    found |= {
        f"{_spell(node, {'system': 'system'})} at import" for node in _walk_at_import(tree) if _is_of_system(node)
    }
    return found


def _walk_what_runs(node: ast.AST) -> Iterator[ast.AST]:
    """Walk the tree without what only a type checker reads."""
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        return
    yield node
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns"):
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, ast.AST):
                    yield from _walk_what_runs(each)


def _walk_at_import(node: ast.AST) -> Iterator[ast.AST]:
    """Walk what runs when the module is loaded: bodies of functions do not, their defaults and decorators do."""
    yield node
    for field, value in ast.iter_fields(node):
        if field == "body" and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, ast.AST):
                yield from _walk_at_import(each)


def _is_of_system(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "system"


def _spell(node: ast.expr | ast.AST, names: dict[str, str]) -> str | None:
    """Return the name with its modules, such as `time.sleep`; None for other expressions."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute) and (of := _spell(node.value, names)):
        return f"{of}.{node.attr}"
    return None


def test_code_that_decides_when_something_happens_asks_system_alone() -> None:
    found = set()
    for each in COVERED:
        place = RUNTIME / each
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            name = path.relative_to(RUNTIME).as_posix()
            if not any(name == real or name.startswith(f"{real}/") for real in REAL):
                found |= {(name, use) for use in find_direct(path.read_text())}

    assert found == set(ALLOWED), "ask `system` of runtime.system, or say in ALLOWED why this stays"


@pytest.mark.parametrize(
    ("source", "uses"),
    [
        ("import time\ntime.sleep(1)", {"time.sleep"}),
        ("import time as clock\nlook = clock.monotonic", {"time.monotonic"}),
        ("from time import perf_counter\nperf_counter()", {"time.perf_counter"}),
        ("def f():\n    import time\n    return time.time()", {"time.time"}),
        ("from datetime import UTC, datetime\nat = datetime.now(UTC)", {"datetime.datetime.now"}),
        ("import datetime\nat = datetime.datetime.now()", {"datetime.datetime.now"}),
        ("import threading\nself.lock = threading.Lock()", {"threading.Lock"}),
        ("from threading import Lock\nlock = Lock()", {"threading.Lock"}),
        ("import threading\nclass Mine(threading.Thread):\n    pass", {"threading.Thread"}),
        (
            "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(2) as pool:\n    pass",
            {"concurrent.futures.ThreadPoolExecutor"},
        ),
        (
            "import concurrent.futures\nconcurrent.futures.ThreadPoolExecutor()",
            {"concurrent.futures.ThreadPoolExecutor"},
        ),
        ("import os\ntoken = os.urandom(8)", {"os.urandom"}),
        ("import os\nread, write = os.pipe2(0)", {"os.pipe2"}),
        ("import random\nrandom.uniform(0, 1)", {"random.uniform"}),
        ("from runtime.system import system\ndef f(now=system.monotonic):\n    pass", {"system.monotonic at import"}),
        ("from runtime.system import system\nMARK = system.urandom(4)", {"system.urandom at import"}),
        ("from runtime.system import system\ndef f():\n    return system.monotonic()", set()),
        ("import random\nrandom.Random(7).random()", set()),
        ("import time\nstamp = time.time_ns()", set()),
        ("if TYPE_CHECKING:\n    import threading\ndef f(one: threading.Thread) -> threading.Lock:\n    pass", set()),
    ],
)
def test_direct_uses_are_found_under_any_name(source: str, uses: set[str]) -> None:
    assert find_direct(source) == uses
