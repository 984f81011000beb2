"""The attempt pool with real processes: every way an attempt can end, and that nothing remains of it."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import resource
import secrets
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime.end_reasons import EndReason
from runtime.records.memory import MemoryRecords
from runtime.snapshots.snapshot import take_snapshot
from runtime.worker.attempts import processes, wire
from runtime.worker.attempts.model import AttemptEnd, AttemptOrder, ChildPoolSettings
from runtime.worker.attempts.pool import AttemptPool
from runtime.worker.attempts.work_trees import WorkTrees
from tests.services_support import PATIENCE_S
from tests.shim_support import is_running

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="process trees are read from /proc")

_tokens = itertools.count(1)
# As unique as real ones, since processes are also found by token.
_PREFIX = secrets.token_hex(4)


def wait_until(done: Callable[[], Any], patience_s: float = PATIENCE_S) -> Any:
    give_up = time.monotonic() + patience_s
    while not (value := done()):
        assert time.monotonic() < give_up, "waited in vain"
        time.sleep(0.005)
    return value


class Bench:
    """An attempt pool, its loop, and orders with short names for the functions of pool_tasks."""

    def __init__(self, tmp_path: Path, *, slots: int = 1, **settings: Any) -> None:
        self.selector = selectors.DefaultSelector()
        path = [str(Path(__file__).parent), *sys.path]
        self.pool = AttemptPool(
            selector=self.selector, slots=slots, settings=ChildPoolSettings(sys_path=path, **settings)
        )
        # Not the machine's counter, which an attempt of another test may increase.
        self.pool._endings._oom = processes.OomWatch("")
        self.pool.start()
        self.move_to(tmp_path)

    def move_to(self, tmp_path: Path) -> None:
        """Give the orders to come other folders, and forget the ended ones."""
        self.tmp = tmp_path
        self.ended: dict[str, AttemptEnd] = {}
        (tmp_path / "trees").mkdir(exist_ok=True)
        self.trees = WorkTrees(str(tmp_path / "trees"), self.pool.discard)

    def is_at_rest(self) -> bool:
        """Return whether no slot has an order."""
        return not any(slot.outstanding() for slot in self.pool.slots)

    def close(self) -> None:
        """Close the pool, and check that it leaves no process and no descriptor."""
        pids = self.pids()
        self.pool.close()
        assert not [pid for pid in pids if is_running(pid)]
        assert not self.selector.get_map()
        self.selector.close()

    def tree(self, folder: Path, slot: int = 0) -> str:
        """Return the slot's tree of a folder's snapshot, the same for equal content."""
        records = MemoryRecords()
        identity = take_snapshot(folder, records)
        if identity not in self.trees:
            self.trees.add(identity, self.trees.fetch(identity, records), used=())
        return self.trees.place(identity, slot)

    def order(self, entry: str | list[str] | dict[str, Any], *args: object, **fields: Any) -> AttemptOrder:
        if isinstance(entry, str):
            body: dict[str, Any] = {"function": f"pool_tasks:{entry}", "args": list(args)}
        else:
            body = {"command": entry} if isinstance(entry, list) else entry
        token = f"{_PREFIX}{next(_tokens):08x}"
        task_id = fields.pop("task_id", f"t-{token}")
        return AttemptOrder(
            token=token,
            body=json.dumps(body),
            task_id=task_id,
            output_dir=str(self.tmp / "outputs" / task_id / token),
            checkpoint_dir=str(self.tmp / "checkpoints" / task_id),
            scratch_root=str(self.tmp / "scratch"),
            **fields,
        )

    def step(self, timeout: float = 0.05) -> list[AttemptEnd]:
        due = self.pool.next_deadline()
        if due is not None:
            timeout = min(timeout, max(0.0, due - time.monotonic()))
        for key, _ in self.selector.select(timeout):
            if key.fd in self.selector.get_map():
                key.data()
        ended = self.pool.tick()
        self.ended.update((one.token, one) for one in ended)
        return ended

    def step_until(self, done: Callable[[], Any]) -> Any:
        give_up = time.monotonic() + PATIENCE_S
        while not (value := done()):
            assert time.monotonic() < give_up, f"waited in vain; ended: {self.ended}"
            self.step()
        return value

    def wait(self, *orders: AttemptOrder) -> list[AttemptEnd]:
        self.step_until(lambda: all(order.token in self.ended for order in orders))
        return [self.ended.pop(order.token) for order in orders]

    def run(self, entry: str | list[str] | dict[str, Any], *args: object, **fields: Any) -> AttemptEnd:
        order = self.order(entry, *args, **fields)
        self.pool.slots[0].send([order])
        return self.wait(order)[0]

    def start(self, entry: str | list[str], *args: object, **fields: Any) -> AttemptOrder:
        """Send an order and wait until it has begun and its process is known."""
        order = self.order(entry, *args, **fields)
        # Before sending as well, because some attempts prevent the guardian's report.
        self.step_until(lambda: all(child.pid for child in self.pool._children))
        self.pool.slots[0].send([order])
        self.step_until(lambda: self.pool.slots[0].running() and self.child.pid)
        return order

    def pids(self) -> list[int]:
        """The guardian and its children."""
        guardian = self.pool._guardian.process
        return [*([guardian.pid] if guardian else []), *(child.pid for child in self.pool._children if child.pid)]

    @property
    def child(self) -> Any:
        """The child that runs the first slot's orders."""
        return self.pool.slots[0].child

    def expire(self, order: AttemptOrder) -> None:
        """Let the order's time limit pass now."""
        order.timeout_s = 0.001
        self.pool._events.wake_by(0.0)
        self.pool.tick()

    def is_over(self) -> bool:
        """Return whether the code of the first slot's attempt has ended; its process may still be at work."""
        return self.child is not None and self.child.cell.has(wire.OVER_AT)

    def has_reported(self) -> bool:
        """Return whether the first slot's attempt, the only one, has reported its end; its process may live on."""
        return bool(self.ended) or (self.child is not None and self.child.result is not None)

    def grow_idle(self) -> None:
        """Make the slots look idle for a long time."""
        for slot in self.pool.slots:
            slot.idle_since -= self.pool._settings.standby_idle_s
        self.pool._events.wake_by(0.0)

    def path(self, name: str) -> str:
        return str(self.tmp / name)


@pytest.fixture(scope="module", autouse=True)
def patience() -> Iterator[None]:
    """Raise all patience, so that a slow machine causes no failure."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("runtime.worker.attempts.pool.CLOSE_PATIENCE_S", PATIENCE_S)
        patch.setattr("runtime.worker.attempts.liveness.STRAYS_PATIENCE_S", PATIENCE_S)
        patch.setattr("runtime.worker.attempts.liveness.PING_EVERY_S", 30.0)
        yield


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    benches: list[Bench] = []

    def make(**settings: Any) -> Bench:
        benches.append(Bench(tmp_path, **settings))
        return benches[-1]

    yield make
    for bench in benches:
        bench.close()


@pytest.fixture
def fresh(make: Callable[..., Bench]) -> Bench:
    return make()


@pytest.fixture
def warm(make: Callable[..., Bench]) -> Bench:
    return make(reuse=True)


@pytest.fixture(params=["fresh", "warm"])
def bench(request: pytest.FixtureRequest, make: Callable[..., Bench]) -> Bench:
    return make(reuse=request.param == "warm")


@pytest.fixture(scope="module")
def kept(patience: None) -> Iterator[dict[bool, Bench]]:
    """The pools that `used` hands on, by whether their processes run several attempts."""
    pools: dict[bool, Bench] = {}
    yield pools
    for bench in pools.values():
        bench.close()


@pytest.fixture(params=["fresh", "warm"])
def used(request: pytest.FixtureRequest, tmp_path: Path, kept: dict[bool, Bench]) -> Iterator[Bench]:
    """A pool that may have served the attempts of other tests, none of which it must have been damaged by."""
    reuse = request.param == "warm"
    # A test that fails may leave its pool at work, which the next one then does not get.
    bench = kept.pop(reuse, None) or Bench(tmp_path, reuse=reuse)
    bench.move_to(tmp_path)
    yield bench
    if bench.is_at_rest():
        kept[reuse] = bench
    else:
        bench.close()


# how attempts end


def test_function_returns_value(used: Bench) -> None:
    before = time.time()
    ended = used.run({"function": "pool_tasks:echo", "args": [1, "é\u2028"], "kwargs": {"x": None}})
    assert (ended.reason, ended.message, ended.exit_code, ended.signal) == (EndReason.SUCCEEDED, None, None, None)
    assert json.loads(ended.value) == {"args": [1, "é\u2028"], "kwargs": {"x": None}}
    assert before - 1 < ended.started_at <= ended.ended_at < time.time() + 1
    assert not ended.not_started


def test_function_without_value_has_none(used: Bench) -> None:
    ended = used.run("nothing")
    assert (ended.reason, ended.value, ended.log) == (EndReason.SUCCEEDED, "", b"")


def test_large_argument_and_value_pass(used: Bench) -> None:
    order = used.order("echo", "x" * 3_000_000)
    used.pool.slots[0].send([order])
    assert len(json.loads(used.wait(order)[0].value)["args"][0]) == 3_000_000


@pytest.mark.parametrize(
    ("call", "reason", "message", "log"),
    [
        (("fail",), EndReason.APP_FAILED, "ValueError: boom", b"pool_tasks.py"),
        (("interrupt",), EndReason.APP_FAILED, "KeyboardInterrupt", b"KeyboardInterrupt"),
        (("leave", 3), EndReason.APP_FAILED, "exited with code 3", b""),
        (("leave", "out of luck"), EndReason.APP_FAILED, "out of luck", b"out of luck"),
        (("leave", ""), EndReason.APP_FAILED, "exited with code 1", b""),
        (("leave_untold",), EndReason.APP_FAILED, "exited with code 1", b""),
        (("leave", 0), EndReason.SUCCEEDED, None, b""),
        (("leave", None), EndReason.SUCCEEDED, None, b""),
        (("exhaust",), EndReason.OOM, "MemoryError", b"MemoryError"),
        (("odd_value",), EndReason.APP_FAILED, "the function returned set, which is no JSON value", b"plain numbers"),
        (
            ("long_number",),
            EndReason.APP_FAILED,
            "the function returned int, which is no JSON value: it holds",
            b"text",
        ),
        (("deep",), EndReason.APP_FAILED, "the function returned list, which is no JSON value: it is nested", b""),
        (("spoil_metrics",), EndReason.APP_FAILED, "its metrics cannot be recorded", b""),
        (("missing",), EndReason.CONFIG_INVALID, "module `pool_tasks` has no function `missing`", b""),
        (("leave",), EndReason.CONFIG_INVALID, "TypeError: leave() missing 1 required", b"TypeError"),
        (("leave_at_once", 4), EndReason.APP_FAILED, "the process exited with code 4 before", b""),
        (("leave_at_once", 0), EndReason.APP_FAILED, "the process exited with code 0 before", b""),
        (("crash",), EndReason.APP_FAILED, "died of signal 11 (SIGSEGV)", b"Segmentation fault"),
        (("die", signal.SIGABRT), EndReason.APP_FAILED, "died of signal 6 (SIGABRT)", b"Aborted"),
        (("die", signal.SIGKILL), EndReason.APP_FAILED, "killed by signal 9 (SIGKILL) from outside", b""),
    ],
)
def test_function_end_has_reason_and_message(
    used: Bench, call: tuple[Any, ...], reason: EndReason, message: str | None, log: bytes
) -> None:
    ended = used.run(*call)
    assert ended.reason is reason
    assert (ended.message or "").startswith(message or "")
    assert (ended.message is None) == (message is None)
    assert log in ended.log
    assert used.run("nothing").reason is EndReason.SUCCEEDED


@pytest.mark.parametrize(
    "call", [("unlimited_number",), ("unreadable_details",), ("undecodable_progress",), ("broken_details",)]
)
def test_what_a_child_says_and_nobody_can_read_is_its_own_attempts_and_no_others(
    bench: Bench, call: tuple[Any, ...]
) -> None:
    ended = bench.run(*call)

    expected = {
        "unlimited_number": (EndReason.SUCCEEDED, None),
        "unreadable_details": (EndReason.APP_FAILED, "what it reported cannot be read: it holds a whole number"),
        "broken_details": (EndReason.APP_FAILED, "what it reported cannot be read"),
        "undecodable_progress": (EndReason.SUCCEEDED, None),
    }
    reason, message = expected[call[0]]
    assert ended.reason is reason
    assert (ended.message or "").startswith(message or "")
    assert bench.run("nothing").reason is EndReason.SUCCEEDED


STRAY = "file descriptor 3, over which its process reports to the worker"


@pytest.mark.parametrize("then", ["return", "hang", "exit", "flood"])
@pytest.mark.parametrize(("text", "count"), [("x", 5), ("hello\n", 1000), ("\0", 34)])
def test_attempt_that_writes_to_stray_descriptors_fails_by_itself(
    used: Bench, text: str, count: int, then: str
) -> None:
    # Too short to be told from the start of a frame: only further bytes show that it is not one.
    waits = count == 5 and then in ("hang", "exit")
    ended = used.run("write_stray", text, count, then, timeout_s=1.0 if waits and then == "hang" else 600.0)

    if waits:
        assert ended.reason is {"hang": EndReason.TIMEOUT, "exit": EndReason.APP_FAILED}[then]
    else:
        assert (ended.reason, (ended.message or "").startswith(f"wrote to {STRAY}")) == (EndReason.APP_FAILED, True)
    assert used.run("echo", 1).reason is EndReason.SUCCEEDED


def test_attempts_behind_one_that_writes_to_stray_descriptors_run_or_are_given_back(warm: Bench) -> None:
    ahead, spoiler = warm.order("wait_for", warm.path("go")), warm.order("write_stray", "hello\n", 1000)
    begun = [warm.order("nothing"), warm.order("wait_for", warm.path("spoilt"))]
    behind = [warm.order("note", warm.path("notes")) for _ in range(3)]
    warm.pool.slots[0].send([ahead, spoiler, *begun, *behind])
    Path(warm.path("go")).touch()

    [first] = warm.wait(spoiler)
    Path(warm.path("spoilt")).touch()

    assert first.reason is EndReason.APP_FAILED
    # The end of begun orders is unknown; that spends no failure.
    assert {one.reason for one in warm.wait(*begun)} <= {EndReason.SUCCEEDED, EndReason.PREEMPTED}
    assert {one.reason for one in warm.wait(*behind)} == {EndReason.SUCCEEDED}
    assert len(Path(warm.path("notes")).read_text().splitlines()) == 3


def test_announced_length_that_no_frame_has_is_refused_at_once(used: Bench) -> None:
    ended = used.run("announce_result", 1 << 30)
    assert (ended.message or "").startswith(f"wrote to {STRAY}")


@pytest.mark.parametrize("how", ["closed", "progress", "reopened"])
def test_attempt_that_closes_its_control_descriptor_is_told_so(used: Bench, how: str) -> None:
    path = used.path("its own") if how == "reopened" else None

    ended = used.run("close_control", path, how)

    assert (ended.reason, ended.exit_code) == (EndReason.APP_FAILED, None)
    assert (ended.message or "").startswith(f"closed {STRAY}")
    assert path is None or Path(path).read_bytes() == b""
    assert used.run("echo", 1).reason is EndReason.SUCCEEDED


def test_attempt_that_closes_its_control_descriptor_has_a_time_limit_still(used: Bench) -> None:
    assert used.run("close_control", None, "hang", timeout_s=0.3).reason is EndReason.TIMEOUT


@pytest.mark.parametrize("size", [7, 1 << 20])
def test_orders_that_an_attempt_read_from_its_socket_run_all_the_same(
    warm: Bench, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    thief, behind = warm.start("steal_orders", warm.path("go"), size), [warm.order("echo", n) for n in range(3)]
    warm.pool.slots[0].send(behind)
    Path(warm.path("go")).touch()
    [stolen] = warm.wait(thief)
    ping_often(warm, monkeypatch)

    assert {one.reason for one in [stolen, *warm.wait(*behind)]} == {EndReason.SUCCEEDED}


@pytest.mark.parametrize("value", ["nan", "surrogate", "nul"])
def test_value_that_every_store_takes_is_passed_on(used: Bench, value: str) -> None:
    ended = used.run("odd_but_fine", value)

    assert ended.reason is EndReason.SUCCEEDED
    assert json.loads(ended.value) == {"surrogate": ["a\udcff"], "nul": ["a\0"]}.get(value) or "NaN" in ended.value


@pytest.mark.parametrize(
    ("name", "args", "shown"),
    [
        ("pool_tasks:fail", (), b"ValueError: boom"),
        ("pool_tasks:leave", (), b"TypeError: leave() missing 1 required"),
        ("pool_tasks:missing", (), b"module `pool_tasks` has no function `missing`"),
        ("no_such_module:f", (), b"no module named `no_such_module`"),
        ("needy:f", (), b"No module named 'also_missing'"),
        ("broken:f", (), b"SyntaxError"),
        ("json:loads", ("{",), b"JSONDecodeError"),
        ("pool_tasks:interrupt", (), b"KeyboardInterrupt"),
    ],
)
def test_traceback_shows_no_frame_of_ours(
    used: Bench, tmp_path: Path, name: str, args: tuple[str, ...], shown: bytes
) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "needy.py").write_text("import also_missing\n")
    (tmp_path / "code" / "broken.py").write_text("def f(:\n")
    ended = used.run({"function": name, "args": list(args)}, code_dir=used.tree(tmp_path / "code"))
    assert shown in ended.log
    assert b"worker/attempts" not in ended.log


def test_traceback_of_what_fails_before_user_code_shows_no_frame_of_ours(used: Bench) -> None:
    ended = used.run("nothing", env={"A\0B": "1"})
    assert (ended.reason, ended.message) == (EndReason.SETUP_FAILED, "ValueError: embedded null byte")
    assert ended.log == b"ValueError: embedded null byte\n"


def test_unknown_module_is_config_invalid_and_failing_import_is_not(used: Bench, tmp_path: Path) -> None:
    ended = used.run({"function": "no_such_module:f"})
    assert (ended.reason, ended.message) == (
        EndReason.CONFIG_INVALID,
        "no module named `no_such_module` for function `no_such_module:f`",
    )
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "needy.py").write_text("import also_missing\n")
    ended = used.run({"function": "needy:f"}, code_dir=used.tree(tmp_path / "code"))
    assert ended.reason is EndReason.APP_FAILED
    assert ended.message == "ModuleNotFoundError: No module named 'also_missing'"


@pytest.mark.parametrize(
    ("argv", "reason", "message", "code"),
    [
        (["true"], EndReason.SUCCEEDED, None, None),
        (["sh", "-c", "exit 7"], EndReason.APP_FAILED, "exit code 7", 7),
        (["sh", "-c", "exit 139"], EndReason.APP_FAILED, "exit code 139 (128 + 11: as a shell reports SIGSEGV)", 139),
        (["sh", "-c", "kill -SEGV $$"], EndReason.APP_FAILED, "died of signal 11 (SIGSEGV)", None),
        (["sh", "-c", "kill -9 $$"], EndReason.APP_FAILED, "killed by signal 9 (SIGKILL) from outside", None),
        (["no-such-program"], EndReason.CONFIG_INVALID, "no program `no-such-program` on PATH", 127),
        (["./nope"], EndReason.CONFIG_INVALID, "no program `./nope` in folder", 127),
        (["/etc/passwd"], EndReason.CONFIG_INVALID, "`/etc/passwd` may not be executed: permission denied", 126),
        (["a\0b"], EndReason.CONFIG_INVALID, "cannot start", 126),
    ],
)
def test_command_end_has_reason_and_message(
    used: Bench, argv: list[str], reason: EndReason, message: str | None, code: int | None
) -> None:
    ended = used.run(argv)
    assert (ended.reason, ended.exit_code) == (reason, code)
    assert (ended.message or "").startswith(message or "")


def test_command_arguments_pass_verbatim(used: Bench) -> None:
    words = ["a b", "'", '"', "$HOME", "{}", "*", "new\nline", "", "é"]
    ended = used.run([sys.executable, "-c", "import sys, json; print(json.dumps(sys.argv[1:]))", *words])
    assert json.loads(ended.log) == words


def test_missing_folder_is_setup_failed(used: Bench) -> None:
    ended = used.run("nothing", cwd="/no/such/folder")
    assert ended.reason is EndReason.SETUP_FAILED
    assert ended.message == "cannot enter folder `/no/such/folder`: No such file or directory"


def test_workflow_that_is_unknown_is_config_invalid(used: Bench) -> None:
    pytest.importorskip("runtime.tasks.workflows")
    ended = used.run({"project": "no_such_project", "workflow": "w", "args": []})
    assert ended.reason is EndReason.CONFIG_INVALID


def test_workflow_value_that_is_no_json_is_dropped_with_a_note(used: Bench, tmp_path: Path) -> None:
    pytest.importorskip("runtime.tasks.workflows")
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "proj.py").write_text(
        "import os, tempfile\n"
        "def odd(n: int) -> object:\n"
        "    print(n + 1, os.path.isdir(os.environ['RUNTIME_OUTPUT_DIR']), tempfile.gettempdir())\n"
        "    return object()\n"
        "workflows = {'odd': odd}\n"
    )
    tree = used.tree(tmp_path / "code")
    for _ in range(2):
        order = used.order({"project": "proj", "workflow": "odd", "args": ["--n", "4"]}, code_dir=tree)
        used.pool.slots[0].send([order])
        ended = used.wait(order)[0]
        assert (ended.reason, ended.value) == (EndReason.SUCCEEDED, ""), ended
        assert f"5 True {tmp_path}/scratch/{order.token}".encode() in ended.log
        assert b"the value is not kept" in ended.log


def test_workflow_value_that_run_prints_is_kept(used: Bench, tmp_path: Path) -> None:
    pytest.importorskip("runtime.tasks.workflows")
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "proj.py").write_text(
        "import dataclasses, pathlib\n"
        "@dataclasses.dataclass\n"
        "class Run:\n"
        "    loss: float\n"
        "    at: pathlib.Path\n"
        "def fit() -> list:\n"
        "    return [Run(0.5, pathlib.Path('/a'))]\n"
        "workflows = {'fit': fit}\n"
    )
    order = used.order({"project": "proj", "workflow": "fit", "args": []}, code_dir=used.tree(tmp_path / "code"))
    used.pool.slots[0].send([order])

    ended = used.wait(order)[0]

    assert (ended.reason, ended.value) == (EndReason.SUCCEEDED, '[{"loss":0.5,"at":"/a"}]'), ended


def test_modules_in_the_working_folder_do_not_reach_the_guardian(
    make: Callable[..., Bench], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("socket", "json", "signal", "select", "random"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('loaded')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert make().run("nothing").reason is EndReason.SUCCEEDED


def test_closed_output_does_not_reach_the_next_attempt(used: Bench) -> None:
    assert used.run("close_output").reason is EndReason.SUCCEEDED
    assert used.run("say").log == b"hi\n"


# time, memory, stops


def test_timeout_ends_function_and_says_the_limit(used: Bench) -> None:
    ended = used.run("sleep", timeout_s=0.2)
    assert (ended.reason, ended.message) == (EndReason.TIMEOUT, "timed out after 200ms")


def test_timeout_kills_what_ignores_sigterm(make: Callable[..., Bench]) -> None:
    bench = make(stop_grace_s=0.2)
    order = bench.start("stubborn", bench.path("up"), timeout_s=600.0)
    bench.step_until(Path(bench.path("up")).exists)
    bench.expire(order)
    [ended] = bench.wait(order)
    assert (ended.reason, ended.signal) == (EndReason.TIMEOUT, signal.SIGKILL)


@pytest.mark.parametrize("reason", [EndReason.PREEMPTED, EndReason.CANCELLED])
def test_time_limit_that_passes_after_an_attempt_was_asked_to_stop_holds_and_is_not_what_ended_it(
    make: Callable[..., Bench], reason: EndReason
) -> None:
    bench = make(stop_grace_s=0.2)
    order = bench.start("stubborn", bench.path("up"), timeout_s=600.0)
    bench.step_until(Path(bench.path("up")).exists)
    bench.pool.ask_to_stop(order.token, reason)

    bench.expire(order)
    [ended] = bench.wait(order)

    assert (ended.reason, ended.message, ended.signal) == (reason, f"stopped: {reason}", signal.SIGKILL)


def test_memory_limit_that_is_crossed_after_an_attempt_was_asked_to_stop_is_not_what_ended_it(used: Bench) -> None:
    order = used.order("hold_when_stopped", 200 << 20, used.path("up"), memory_bytes=100 << 20)
    used.pool.slots[0].send([order])
    used.step_until(Path(used.path("up")).exists)
    used.pool.ask_to_stop(order.token, EndReason.PREEMPTED)

    assert used.wait(order)[0].reason is EndReason.PREEMPTED


def test_attempt_that_is_preempted_after_its_time_limit_has_timed_out(used: Bench) -> None:
    order = used.start("stubborn", used.path("up"), timeout_s=600.0)
    used.step_until(Path(used.path("up")).exists)
    used.expire(order)
    used.pool.ask_to_stop(order.token, EndReason.PREEMPTED)
    used.pool.kill(order.token, EndReason.PREEMPTED)

    assert used.wait(order)[0].reason is EndReason.TIMEOUT


def test_timeout_of_command_reaches_its_session(used: Bench) -> None:
    ended = used.run(["sh", "-c", "sleep 300 & wait"], timeout_s=0.3)
    assert (ended.reason, ended.message) == (EndReason.TIMEOUT, "timed out after 300ms")


def test_timeout_counts_from_the_start_of_each_pipelined_order(warm: Bench) -> None:
    orders = [warm.order("sleep", 600.0, timeout_s=0.5) for _ in range(3)]
    warm.pool.slots[0].send(orders)
    ended = warm.wait(*orders)
    assert {one.reason for one in ended} == {EndReason.TIMEOUT}
    # Counted from their sending, all but the first would have had no time.
    assert all(one.ended_at - one.started_at > 0.4 for one in ended)


def test_memory_over_limit_is_oom_with_numbers(used: Bench) -> None:
    ended = used.run("hold", 200 << 20, used.path("never"), memory_bytes=100 << 20)
    assert ended.reason is EndReason.OOM
    assert ended.message
    assert "over its limit of 100" in ended.message
    assert (ended.max_rss_bytes or 0) > 100 << 20


def test_stop_raises_in_code_that_does_not_look_and_runs_finally(used: Bench) -> None:
    order = used.start("careful", used.path("note"))
    used.step_until(Path(used.path("note.up")).exists)
    used.pool.ask_to_stop(order.token, EndReason.PREEMPTED)
    ended = used.wait(order)[0]
    assert (ended.reason, ended.message) == (EndReason.PREEMPTED, "stopped: preempted")
    assert Path(used.path("note")).read_text() == "left in good order"


def test_stop_only_sets_the_flag_for_code_that_looks(used: Bench) -> None:
    order = used.start("saves_checkpoint", used.path("note"))
    used.step_until(Path(used.path("note.up")).exists)
    used.pool.ask_to_stop(order.token, EndReason.CANCELLED)
    ended = used.wait(order)[0]
    assert (ended.reason, json.loads(ended.value)) == (EndReason.SUCCEEDED, "cancelled")
    assert used.run("nothing").reason is EndReason.SUCCEEDED


def test_stop_of_command_is_reported_with_the_asked_reason(used: Bench) -> None:
    order = used.start(["sleep", "300"])
    used.pool.ask_to_stop(order.token, EndReason.PREEMPTED)
    assert used.wait(order)[0].reason is EndReason.PREEMPTED


def test_kill_ends_at_once_with_the_given_message(used: Bench) -> None:
    order = used.start("stubborn", used.path("up"))
    used.pool.kill(order.token, EndReason.LOST, "the lease was lost")
    ended = used.wait(order)[0]
    assert (ended.reason, ended.message) == (EndReason.LOST, "the lease was lost")


def test_stop_of_what_has_not_begun_reports_it_as_not_started(used: Bench) -> None:
    first = used.order("wait_for", used.path("go"))
    others = [used.order("note", used.path("notes")) for _ in range(3)]
    used.pool.slots[0].send([first, *others])
    used.step_until(used.pool.slots[0].running)
    used.pool.ask_to_stop(others[1].token, EndReason.CANCELLED)
    ended = used.wait(others[1])[0]
    assert (ended.reason, ended.not_started) == (EndReason.CANCELLED, True)
    Path(used.path("go")).touch()
    assert [one.reason for one in used.wait(first, others[0], others[2])] == [EndReason.SUCCEEDED] * 3
    lines = Path(used.path("notes")).read_text().splitlines()
    assert [json.loads(line)[1] for line in lines] == [others[0].task_id, others[2].task_id]


def test_process_is_told_to_be_an_attempts_also_before_the_guardian_has_said_which_one_it_forked(bench: Bench) -> None:
    order = bench.start(
        [
            "sh",
            "-c",
            f"sleep 300 & echo $! > {bench.path('pid')}.part; mv {bench.path('pid')}.part {bench.path('pid')}; wait",
        ]
    )
    bench.step_until(Path(bench.path("pid")).exists)
    below = int(Path(bench.path("pid")).read_text())
    assert bench.pool.attempt_of(below) == order.token

    bench.child.pid = 0

    assert bench.pool.attempt_of(below) == order.token
    assert bench.pool.attempt_of(os.getpid()) is None
    bench.pool.kill(order.token, EndReason.CANCELLED)
    bench.wait(order)


def test_stop_of_unknown_token_is_passed_over(used: Bench) -> None:
    used.pool.ask_to_stop("gone", EndReason.CANCELLED)
    used.pool.kill("gone", EndReason.CANCELLED)
    assert used.run("nothing").reason is EndReason.SUCCEEDED


# leftover processes of attempts


def test_plain_child_is_gone_after_the_attempt(used: Bench) -> None:
    ended = used.run("start_child", used.path("pid"))
    assert ended.reason is EndReason.SUCCEEDED
    assert not is_running(int(Path(used.path("pid")).read_text()))
    assert b"ended 1 process that the attempt had left running" in ended.log


# The process of an attempt in good order ends with 117.
@pytest.mark.parametrize("then", ["return", "crash", "exit 0", "exit 3", "exit 117"])
@pytest.mark.parametrize("scrub", [False, True])
def test_daemon_is_gone_after_the_attempt(used: Bench, scrub: bool, then: str) -> None:
    ended = used.run("start_daemon", used.path("pid"), scrub, then)
    assert (ended.reason is EndReason.SUCCEEDED) == (then == "return"), ended
    assert not is_running(int(Path(used.path("pid")).read_text()))


def test_daemon_is_gone_after_kill(used: Bench) -> None:
    order = used.start("start_daemon", used.path("pid"), True, "hang")
    used.step_until(Path(used.path("pid")).exists)
    used.pool.kill(order.token, EndReason.CANCELLED)
    used.wait(order)
    assert not is_running(int(Path(used.path("pid")).read_text()))


def test_daemon_of_command_is_gone_after_it(used: Bench) -> None:
    ended = used.run(["sh", "-c", f"setsid sleep 300 & echo $! > {used.path('pid')}; exec true"])
    assert ended.reason is EndReason.SUCCEEDED
    assert not is_running(int(Path(used.path("pid")).read_text()))


def test_daemon_of_another_slot_is_left_alone(make: Callable[..., Bench]) -> None:
    bench = make(slots=2)
    order = bench.order("start_daemon", bench.path("pid"), True, "hang")
    bench.pool.slots[1].send([order])
    bench.step_until(Path(bench.path("pid")).exists)
    assert bench.run("crash").reason is EndReason.APP_FAILED
    assert bench.run("start_daemon", bench.path("other"), True, "crash").reason is EndReason.APP_FAILED
    assert is_running(int(Path(bench.path("pid")).read_text()))
    assert not is_running(int(Path(bench.path("other")).read_text()))


def test_forked_copy_that_returns_reports_nothing(used: Bench) -> None:
    assert json.loads(used.run("fork_and_return").value) == "parent"
    assert used.run("nothing").reason is EndReason.SUCCEEDED


# many orders on one slot


def test_pipelined_orders_run_in_order(used: Bench) -> None:
    orders = [used.order("echo", index) for index in range(40)]
    used.pool.slots[0].send(orders)
    ended = used.wait(*orders)
    assert [json.loads(one.value)["args"][0] for one in ended] == list(range(40))
    assert [one.started_at for one in ended] == sorted(one.started_at for one in ended)


def test_death_blames_the_running_order_only(used: Bench) -> None:
    orders = [used.order(*call) for call in [("echo", 1), ("echo", 2), ("die", signal.SIGSEGV), ("echo", 3)]]
    used.pool.slots[0].send(orders)
    assert [one.reason for one in used.wait(*orders)] == [
        EndReason.SUCCEEDED,
        EndReason.SUCCEEDED,
        EndReason.APP_FAILED,
        EndReason.SUCCEEDED,
    ]


def test_room_and_outstanding_follow_orders(used: Bench) -> None:
    room = used.pool.slots[0].room()
    orders = [used.order("wait_for", used.path("go")), used.order("nothing")]
    used.pool.slots[0].send(orders)
    assert used.pool.slots[0].room() == room - 2
    assert used.pool.slots[0].outstanding() == [order.token for order in orders]
    used.step_until(used.pool.slots[0].running)
    token, started = used.pool.slots[0].running() or ("", 0.0)
    assert (token, abs(started - time.time()) < PATIENCE_S) == (orders[0].token, True)
    Path(used.path("go")).touch()
    used.wait(*orders)
    assert (used.pool.slots[0].room(), used.pool.slots[0].outstanding(), used.pool.slots[0].running()) == (
        room,
        [],
        None,
    )


def test_take_back_returns_what_has_not_begun_and_it_never_runs(used: Bench) -> None:
    first = used.order("wait_for", used.path("go"))
    others = [used.order("note", used.path("notes")) for _ in range(5)]
    used.pool.slots[0].send([first, *others])
    used.step_until(used.pool.slots[0].running)
    assert used.pool.slots[0].take_back() == [order.token for order in others]
    assert used.pool.slots[0].outstanding() == [first.token]
    Path(used.path("go")).touch()
    assert used.wait(first)[0].reason is EndReason.SUCCEEDED
    assert used.run("nothing").reason is EndReason.SUCCEEDED
    assert not Path(used.path("notes")).exists()
    assert used.pool.slots[0].take_back() == []


def test_take_back_of_busy_slot_loses_and_repeats_nothing(warm: Bench) -> None:
    """At any moment: each order either runs once or comes back."""
    orders = {}
    taken: set[str] = set()
    for round_ in range(30):
        batch = [warm.order("note", warm.path("notes")) for _ in range(20)]
        orders.update((order.token, order) for order in batch)
        warm.pool.slots[0].send(batch)
        warm.step_until(lambda: warm.pool.slots[0].running() or not warm.pool.slots[0].outstanding())
        time.sleep(round_ * 0.0001)
        taken.update(warm.pool.slots[0].take_back())
        warm.step_until(lambda: not warm.pool.slots[0].outstanding())
    warm.step()
    ran = [json.loads(line)[1] for line in Path(warm.path("notes")).read_text().splitlines()]
    expected = {order.task_id for token, order in orders.items() if token not in taken}
    assert len(ran) == len(set(ran))
    assert set(ran) == expected
    assert set(warm.ended) == set(orders) - taken


def test_fresh_function_finds_a_new_process(fresh: Bench) -> None:
    assert [json.loads(fresh.run("count_calls").value) for _ in range(3)] == [1, 1, 1]


def test_library_modules_that_attempts_load_are_loaded_ahead(fresh: Bench, tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "needs.py").write_text(
        "import sys\n"
        "before = {'fractions', 'random'} & set(sys.modules)\n"
        "import fractions, random\n"
        "def f():\n    return [sorted(before), random.random()]\n"
    )
    tree = fresh.tree(tmp_path / "code")
    results = [json.loads(fresh.run({"function": "needs:f"}, code_dir=tree).value) for _ in range(6)]
    assert results[0][0] == []
    assert results[-1][0] == ["fractions", "random"]
    assert len({number for _, number in results}) == len(results), "each draws numbers of its own"


def test_module_of_a_snapshot_comes_before_one_that_was_loaded_ahead(fresh: Bench, tmp_path: Path) -> None:
    for name in ("plain", "own"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "asks.py").write_text("import fractions\ndef f():\n    return fractions.__file__\n")
    (tmp_path / "own" / "fractions.py").touch()
    found = [
        json.loads(fresh.run({"function": "asks:f"}, code_dir=fresh.tree(tmp_path / name)).value)
        for name in ("plain", "plain", "plain", "plain", "own")
    ]
    assert found[-1] == f"{fresh.tree(tmp_path / 'own')}/fractions.py"
    assert found[-2] != found[-1]


def test_warm_functions_share_a_process(warm: Bench) -> None:
    assert [json.loads(warm.run("count_calls").value) for _ in range(3)] == [1, 2, 3]


def test_warm_child_is_replaced_after_its_tasks(make: Callable[..., Bench]) -> None:
    bench = make(reuse=True, max_tasks_per_child=3)
    orders = [bench.order("count_calls") for _ in range(7)]
    bench.pool.slots[0].send(orders)
    assert [json.loads(ended.value) for ended in bench.wait(*orders)] == [1, 2, 3, 1, 2, 3, 1]


def test_warm_child_is_replaced_when_it_has_grown(make: Callable[..., Bench]) -> None:
    bench = make(reuse=True, max_growth_bytes=32 << 20)
    pids = [json.loads(bench.run("grow", 20 << 20).value) for _ in range(4)]
    assert len(set(pids)) == 2


def test_warm_child_restores_what_a_task_changed(warm: Bench) -> None:
    before = json.loads(warm.run("look").value)
    assert warm.run("spoil").reason is EndReason.SUCCEEDED
    ended = warm.run("look")
    assert json.loads(ended.value) == before
    assert ended.log == b"seen\n"


def test_warm_child_gets_its_own_snapshot_only(warm: Bench, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(f"def f():\n    return {name!r}\n")
    orders = [
        warm.order({"function": "mine:f"}, code_dir=warm.tree(tmp_path / name)) for name in ("one", "two", "one", "one")
    ]
    warm.pool.slots[0].send(orders)
    assert [json.loads(ended.value) for ended in warm.wait(*orders)] == ["one", "two", "one", "one"]


def test_thread_that_python_waits_for_ends_before_the_attempt(used: Bench) -> None:
    assert used.run("leave_thread", used.path("note")).reason is EndReason.SUCCEEDED
    assert Path(used.path("note")).read_text() == "thread done"
    assert used.run("nothing").reason is EndReason.SUCCEEDED


def test_exit_handlers_of_fresh_attempt_run(fresh: Bench) -> None:
    assert fresh.run("at_exit", fresh.path("note")).reason is EndReason.SUCCEEDED
    assert Path(fresh.path("note")).read_text() == "exit handler ran"


# the attempts' environment and output


def test_environment_contract(used: Bench) -> None:
    order = used.order(
        "describe_attempt",
        generation=2,
        attempt=3,
        experiment="exp",
        timeout_s=600,
        env={"EXTRA": "a=b\nc", "CUDA_VISIBLE_DEVICES": "1"},
        snapshot="s-1",
        cwd=str(used.tmp),
    )
    used.pool.slots[0].send([order])
    ended = used.wait(order)[0]
    seen = json.loads(ended.value)
    deadline = seen["environ"].pop("RUNTIME_DEADLINE")
    assert abs(float(deadline) - (ended.started_at + 600)) < 0.01
    assert abs(seen.pop("deadline") - float(deadline)) < 0.01
    assert seen == {
        "task_id": order.task_id,
        "attempt": 3,
        "token": order.token,
        "experiment": "exp",
        "generation": 2,
        "unbuffered": "1",
        "cwd": str(used.tmp),
        "environ": {
            "EXTRA": "a=b\nc",
            "RUNTIME_TASK_ID": order.task_id,
            "RUNTIME_GENERATION": "2",
            "RUNTIME_ATTEMPT": "3",
            "RUNTIME_RESTARTS": "2",
            "RUNTIME_ATTEMPT_TOKEN": order.token,
            "RUNTIME_EXPERIMENT": "exp",
            "RUNTIME_OUTPUT_DIR": order.output_dir,
            "RUNTIME_CHECKPOINT_DIR": order.checkpoint_dir,
            "RUNTIME_SCRATCH_DIR": f"{order.scratch_root}/{order.token}",
            "RUNTIME_METRICS": f"{order.scratch_root}/{order.token}.metrics.jsonl",
            "RUNTIME_SNAPSHOT_ID": "s-1",
            "RUNTIME_RANK": "0",
            "RUNTIME_WORLD_SIZE": "1",
            "RUNTIME_LOCAL_RANK": "0",
            "RUNTIME_NODE_RANK": "0",
            "RUNTIME_NUM_NODES": "1",
        },
    }


def test_environment_of_one_order_is_not_the_next_ones(used: Bench) -> None:
    used.run("nothing", env={"EXTRA": "1"}, timeout_s=60, snapshot="s-1")
    seen = json.loads(used.run("describe_attempt").value)["environ"]
    assert not {"EXTRA", "RUNTIME_DEADLINE", "RUNTIME_SNAPSHOT_ID"} & set(seen)


def test_command_has_folders_and_environment(used: Bench) -> None:
    script = "echo $RUNTIME_TASK_ID $EXTRA; echo x > $TMPDIR/a; echo done > $RUNTIME_OUTPUT_DIR/result; pwd"
    order = used.order(["sh", "-c", script], env={"EXTRA": "more"}, cwd=str(used.tmp))
    used.pool.slots[0].send([order])
    ended = used.wait(order)[0]
    assert ended.log.decode().splitlines() == [f"{order.task_id} more", str(used.tmp)]
    assert Path(order.output_dir, "result").read_text() == "done\n"
    assert list((used.tmp / "scratch").iterdir()) == []


def test_folders_come_into_being_on_use_and_scratch_goes(used: Bench) -> None:
    used.run("nothing")
    assert not (used.tmp / "outputs").exists()
    assert not (used.tmp / "scratch").exists()
    order = used.order("use_folders")
    used.pool.slots[0].send([order])
    assert used.wait(order)[0].reason is EndReason.SUCCEEDED
    assert Path(order.output_dir, "result.txt").read_text() == "done"
    assert list((used.tmp / "scratch").iterdir()) == []


def test_output_folder_that_stayed_empty_is_removed(used: Bench) -> None:
    order = used.order("use_folders", False, False)
    used.pool.slots[0].send([order])
    assert used.wait(order)[0].reason is EndReason.SUCCEEDED
    assert not Path(order.output_dir).parent.exists()


def test_scratch_of_killed_attempt_is_removed(bench: Bench) -> None:
    order = bench.start(["sh", "-c", "mkdir $TMPDIR/deep; touch $TMPDIR/deep/file; sleep 300"])
    bench.step_until(Path(order.scratch_root, order.token, "deep", "file").exists)
    os.kill(bench.pids()[1], signal.SIGKILL)
    assert bench.wait(order)[0].signal == signal.SIGKILL
    bench.step_until(lambda: not Path(order.scratch_root, order.token).exists())
    assert not Path(order.output_dir).exists()


def test_output_is_kept_as_it_came(used: Bench) -> None:
    ended = used.run("say_raw")
    assert ended.log == ended.undrained == b"\xff\x00raw, no end of line|and stderr"
    assert ended.log_bytes == len(ended.log)


def test_output_of_a_megabyte_is_counted_and_its_end_kept(used: Bench) -> None:
    ended = used.run("say", "0123456789abcdef" * 64, 1024)
    assert ended.log_bytes == 1 << 20
    assert len(ended.log) == 64 * 1024
    assert len(ended.undrained) == 1 << 20
    assert ended.log.endswith(b"abcdef")


def test_output_belongs_to_its_own_attempt(used: Bench) -> None:
    calls = [("say", f"line {index}\n" * (index % 3)) for index in range(60)]
    orders = [used.order(*call) for call in calls]
    used.pool.slots[0].send(orders)
    assert [ended.log.decode() for ended in used.wait(*orders)] == [text for _, text in calls]


def test_output_of_running_attempt_can_be_drained(used: Bench) -> None:
    order = used.start("say_and_wait", "so far", used.path("go"))
    seen = b""

    def drained() -> bool:
        nonlocal seen
        seen += used.pool.drain_log(order.token)
        return seen == b"so far\n"

    used.step_until(drained)
    Path(used.path("go")).touch()
    ended = used.wait(order)[0]
    assert (ended.log, ended.log_bytes, ended.undrained) == (b"so far\n", 7, b"")
    assert used.pool.drain_log(order.token) == b""


def test_progress_is_noted_while_running_and_metrics_are_kept(used: Bench) -> None:
    order = used.start("count_up", used.path("go"))
    noted = used.step_until(lambda: used.child.noted)
    assert (noted.progressed, noted.metrics) == (True, {"loss": 0.5})
    Path(used.path("go")).touch()
    ended = used.wait(order)[0]
    assert (ended.progressed, ended.metrics) == (True, {"loss": 0.25, "accuracy": 1.0})
    ended = used.run("nothing")
    assert (ended.progressed, ended.metrics) == (False, {})


def test_memory_peak_is_that_of_its_own_attempt(make: Callable[..., Bench]) -> None:
    bench = make(reuse=True)
    bench.run("nothing")
    order = bench.start("wait_for", bench.path("go"), memory_bytes=1 << 40)
    bench.step_until(lambda: bench.child.noted and bench.child.noted.memory_peak)
    Path(bench.path("go")).touch()
    assert bench.wait(order)[0].max_rss_bytes
    assert bench.run("echo").max_rss_bytes is None


def test_new_checkpoint_counts_as_progress(used: Bench) -> None:
    assert used.run("leaves_checkpoint", task_id="t-1").progressed
    assert not used.run("fail", task_id="t-1").progressed


def test_child_has_no_descriptor_but_its_own(make: Callable[..., Bench], tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as lock:
        bench = make(slots=2, hold_fds=(lock.fileno(),))
        second = bench.order("wait_for", bench.path("go"))
        bench.pool.slots[1].send([second])
        assert json.loads(bench.run("list_fds").value) == [0, 1, 2, 3]
        shown = bench.run(["sh", "-c", "ls /proc/self/fd"]).log.split()
        assert len(shown) == 4, "of its own, ls has the folder open"
        assert json.loads(bench.run("describe_stdin").value) == ["/dev/null", ""]
        # A signal would write to this descriptor, which may be a file of the attempt's by then.
        interpreter = json.loads(bench.run("describe_interpreter").value)
        assert interpreter == {"wakeup_fd": -1, "collects": True, "argv": [""]}
        Path(bench.path("go")).touch()
        bench.wait(second)


def test_child_of_a_worker_with_thousands_of_descriptors_has_none_of_them(
    make: Callable[..., Bench], tmp_path: Path
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    with contextlib.ExitStack() as held:
        held.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1100):
            held.enter_context(Path(os.devnull).open("rb"))
        lock = held.enter_context((tmp_path / "lock").open("w"))
        assert lock.fileno() > 1024
        assert json.loads(make(hold_fds=(lock.fileno(),)).run("list_fds").value) == [0, 1, 2, 3]


def test_temporary_folder_of_one_workflow_is_not_the_next_ones(warm: Bench) -> None:
    assert json.loads(warm.run("make_temporary").value).startswith("/tmp/")


# many, and over


@pytest.mark.slow
def test_hundreds_of_fresh_attempts_leave_no_descriptor_and_no_zombie(fresh: Bench) -> None:
    for entry in ("nothing", "nothing", ["true"]):
        fresh.run(entry)
    guardian = fresh.pids()[0]

    def is_settled() -> bool:
        return len(fresh.pids()) == 3 and all(fresh.pids())  # the guardian, and two children of the slot

    def count_descriptors() -> tuple[int, int]:
        return len(list(Path("/proc/self/fd").iterdir())), len(list(Path(f"/proc/{guardian}/fd").iterdir()))

    fresh.step_until(is_settled)
    # The guardian closes its ends of a child's descriptors a moment after it reports the fork.
    mine, of_guardian = (max(counts) for counts in zip(*(count_descriptors() for _ in range(20)), strict=True))
    orders = [fresh.order("nothing") for _ in range(120)] + [fresh.order(["true"]) for _ in range(80)]
    for start in range(0, len(orders), 40):
        fresh.pool.slots[0].send(orders[start : start + 40])
        ended = fresh.wait(*orders[start : start + 40])
        assert {one.reason for one in ended} == {EndReason.SUCCEEDED}
    fresh.step_until(lambda: is_settled() and count_descriptors()[0] <= mine and count_descriptors()[1] <= of_guardian)
    table = processes.read_table()
    assert [process for process in table.values() if process.ppid == guardian and process.dead] == []


def test_close_ends_running_attempts_as_preempted(bench: Bench) -> None:
    running = bench.start("start_daemon", bench.path("pid"), True, "hang")
    waiting = bench.order("nothing")
    bench.pool.slots[0].send([waiting])
    bench.step_until(Path(bench.path("pid")).exists)
    ended = {one.token: one for one in bench.pool.close()}
    assert {token: (one.reason, one.not_started) for token, one in ended.items()} == {
        running.token: (EndReason.PREEMPTED, False),
        waiting.token: (EndReason.PREEMPTED, True),
    }
    assert not is_running(int(Path(bench.path("pid")).read_text()))
    assert bench.pool.close() == []


def test_attempt_that_is_asked_to_stop_leaves_in_good_order(used: Bench) -> None:
    order = used.start("careful", used.path("note"))
    used.step_until(Path(used.path("note.up")).exists)
    used.pool.ask_to_stop(order.token, EndReason.PREEMPTED)
    assert used.wait(order)[0].reason is EndReason.PREEMPTED
    assert Path(used.path("note")).read_text() == "left in good order"


def test_idle_children_are_let_go_but_the_first_slots(make: Callable[..., Bench]) -> None:
    bench = make(slots=2, reuse=True)
    orders = [bench.order("nothing"), bench.order("nothing")]
    bench.pool.slots[0].send(orders[:1])
    bench.pool.slots[1].send(orders[1:])
    bench.wait(*orders)
    bench.step_until(lambda: len(bench.pids()) == 3)
    bench.grow_idle()
    bench.step_until(lambda: len(bench.pids()) == 2)
    order = bench.order("nothing")
    bench.pool.slots[1].send([order])
    assert bench.wait(order)[0].reason is EndReason.SUCCEEDED


# the guardian


def test_guardian_killed_alone_loses_the_running_attempt_and_the_rest_goes_on(bench: Bench) -> None:
    running = bench.start("start_daemon", bench.path("pid"), False, "hang")
    waiting = bench.order("echo", 1)
    bench.pool.slots[0].send([waiting])
    bench.step_until(Path(bench.path("pid")).exists)
    old = bench.pids()
    os.kill(old[0], signal.SIGKILL)
    lost, done = bench.wait(running, waiting)
    assert (lost.reason, done.reason) == (EndReason.LOST, EndReason.SUCCEEDED)
    assert not is_running(int(Path(bench.path("pid")).read_text()))
    assert not [pid for pid in old if is_running(pid)]


@pytest.fixture
def quick_guardians(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the next guardian and notice a stopped one at once; never give up on a slow one."""
    monkeypatch.setattr("runtime.worker.attempts.liveness.GUARDIAN_WAIT_S", 0.01)
    monkeypatch.setattr("runtime.worker.attempts.liveness.PING_EVERY_S", 0.2)
    monkeypatch.setattr("runtime.worker.attempts.liveness.SILENCES", 1000)


def ping_often(bench: Bench, monkeypatch: pytest.MonkeyPatch, *, silences: int = 1000) -> None:
    """From now on, notice a stopped guardian or child soon, and a silent one after `silences`."""
    monkeypatch.setattr("runtime.worker.attempts.liveness.PING_EVERY_S", 0.1)
    monkeypatch.setattr("runtime.worker.attempts.liveness.SILENCES", silences)
    bench.pool._events.ping_at = 0.0
    bench.pool._events.wake_by(0.0)


@pytest.mark.usefixtures("quick_guardians")
def test_guardian_that_is_killed_again_and_again_is_started_again_each_time(bench: Bench) -> None:
    orders = [bench.order("signal_guardian", signal.SIGKILL) for _ in range(7)]
    good = bench.order("echo", 1)
    bench.pool.slots[0].send([*orders, good])

    *lost, done = bench.wait(*orders, good)

    assert {(one.reason, one.not_started) for one in lost} == {(EndReason.LOST, False)}
    assert {one.message for one in lost} == {
        "the guardian of this worker ended with signal 9 (SIGKILL), and the attempt with it"
    }
    assert done.reason is EndReason.SUCCEEDED
    assert bench.pool.failure is None


@pytest.mark.usefixtures("quick_guardians")
def test_slots_beside_one_that_kills_the_guardian_are_lost_with_it_and_what_waits_there_runs(
    make: Callable[..., Bench],
) -> None:
    bench = make(slots=2, reuse=True)
    beside, waiting = bench.order("start_daemon", bench.path("pid"), False, "hang"), bench.order("echo", 1)
    bench.pool.slots[1].send([beside, waiting])
    bench.step_until(Path(bench.path("pid")).exists)
    killer = bench.order("signal_guardian", signal.SIGKILL)
    bench.pool.slots[0].send([killer])

    ended = bench.wait(killer, beside, waiting)

    assert [one.reason for one in ended] == [EndReason.LOST, EndReason.LOST, EndReason.SUCCEEDED]
    assert not is_running(int(Path(bench.path("pid")).read_text()))


@pytest.mark.usefixtures("quick_guardians")
def test_orders_taken_back_while_no_guardian_lives_never_run(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.worker.attempts.liveness.GUARDIAN_WAIT_S", 600.0)
    killers = [bench.order("signal_guardian", signal.SIGKILL) for _ in range(2)]
    waiting = bench.order("note", bench.path("notes"))
    bench.pool.slots[0].send([*killers, waiting])
    bench.wait(*killers)

    assert bench.pool.slots[0].take_back() == [waiting.token]
    assert bench.pool.close() == []
    assert not Path(bench.path("notes")).exists()


def make_guardians_fail(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    if how == "ends at once":
        monkeypatch.setattr("runtime.worker.attempts.guardian_link._GUARDIAN", "import os; os._exit(3)")
        return

    def refuse(*args: object, **keywords: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("runtime.worker.attempts.guardian_link.subprocess.Popen", refuse)


@pytest.mark.parametrize("how", ["ends at once", "cannot be forked"])
@pytest.mark.usefixtures("quick_guardians")
def test_guardian_that_never_gets_ready_is_a_failure_and_no_order_is_lost(
    make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    make_guardians_fail(monkeypatch, how)
    bench = make()
    order = bench.order("nothing")
    bench.pool.slots[0].send([order])

    bench.step_until(lambda: bench.pool.failure is not None)

    assert bench.pool.failure
    [fact] = bench.pool.failure.facts
    assert fact.startswith("8 in a row ended before they were ready; the last one ")
    assert fact.endswith({"ends at once": "ended with code 3", "cannot be forked": "temporarily unavailable"}[how])
    assert bench.pool.slots[0].take_back() == [order.token]


@pytest.mark.usefixtures("quick_guardians")
def test_guardian_that_could_not_be_started_for_a_while_is_started_then(
    make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as context:
        make_guardians_fail(context, "cannot be forked")
        bench = make()
    assert bench.run("echo", 1).reason is EndReason.SUCCEEDED


STOPPED = "the guardian of this worker was stopped and had to be killed, and the attempt with it"


@pytest.mark.usefixtures("quick_guardians")
@pytest.mark.parametrize("scrub", [False, True])
def test_attempt_of_a_stopped_guardian_is_lost_with_its_daemon_and_the_rest_goes_on(bench: Bench, scrub: bool) -> None:
    running = bench.start("start_daemon", bench.path("pid"), scrub, "hang")
    waiting = bench.order("echo", 1)
    bench.pool.slots[0].send([waiting])
    bench.step_until(Path(bench.path("pid")).exists)
    old = bench.pids()
    os.kill(old[0], signal.SIGSTOP)

    lost, done = bench.wait(running, waiting)

    assert (lost.reason, lost.message) == (EndReason.LOST, STOPPED)
    assert done.reason is EndReason.SUCCEEDED
    assert not [pid for pid in [*old, int(Path(bench.path("pid")).read_text())] if is_running(pid)]


def test_guardian_that_is_silent_is_ended_though_nothing_shows_it_as_stopped(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.worker.attempts.processes.is_stopped", lambda pid: False)
    order = bench.start("signal_guardian", signal.SIGSTOP)
    ping_often(bench, monkeypatch, silences=20)

    [lost] = bench.wait(order)

    assert lost.message == STOPPED.replace("was stopped", "did not answer")


def test_time_limit_holds_though_the_guardian_is_stopped(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    order = bench.start("signal_guardian", signal.SIGSTOP, bench.path("done"), timeout_s=600.0)
    bench.step_until(Path(bench.path("done")).exists)
    bench.expire(order)
    ping_often(bench, monkeypatch)
    assert bench.wait(order)[0].reason is EndReason.TIMEOUT
    assert bench.run("echo", 1).reason is EndReason.SUCCEEDED


@pytest.mark.parametrize("verb", ["ask_to_stop", "kill"])
def test_stop_of_an_attempt_holds_though_the_guardian_is_stopped(
    bench: Bench, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = bench.start("signal_guardian", signal.SIGSTOP, bench.path("done"))
    bench.step_until(Path(bench.path("done")).exists)
    getattr(bench.pool, verb)(order.token, EndReason.PREEMPTED)
    ping_often(bench, monkeypatch)
    assert bench.wait(order)[0].reason is EndReason.PREEMPTED


def test_end_of_an_attempt_is_told_though_the_guardian_was_stopped_before_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = bench.order("stop_guardian")
    bench.pool.slots[0].send([order])
    bench.step_until(bench.has_reported)
    ping_often(bench, monkeypatch)
    assert bench.wait(order)[0].reason is EndReason.SUCCEEDED
    assert bench.run("echo", 1).reason is EndReason.SUCCEEDED


@pytest.mark.usefixtures("quick_guardians")
def test_tree_is_removed_though_the_guardian_is_stopped_and_nothing_runs(bench: Bench, tmp_path: Path) -> None:
    bench.run("nothing")
    # Only the child's idle limit of ten minutes is pending now.
    bench.step_until(lambda: (bench.pool.next_deadline() or float("inf")) > time.monotonic() + 100)
    (tmp_path / "tree").mkdir()
    os.kill(bench.pids()[0], signal.SIGSTOP)

    bench.pool.discard(str(tmp_path / "tree"))

    bench.step_until(lambda: not (tmp_path / "tree").exists())


def test_close_ends_a_guardian_that_is_stopped(bench: Bench) -> None:
    bench.run("nothing")
    pids = bench.pids()
    os.kill(pids[0], signal.SIGSTOP)
    bench.pool.close()
    assert not [pid for pid in pids if is_running(pid)]


# children that hang


@pytest.mark.usefixtures("quick_guardians")
def test_order_for_a_child_that_was_stopped_while_it_waited_runs_in_another(bench: Bench) -> None:
    bench.step_until(lambda: len(bench.pids()) == 2)
    stopped = bench.pids()[1]
    os.kill(stopped, signal.SIGSTOP)

    assert bench.run("own_pid").value != str(stopped)
    assert not is_running(stopped)


@pytest.mark.usefixtures("quick_guardians")
def test_orders_for_a_warm_child_that_was_stopped_between_two_run_in_another_in_order(warm: Bench) -> None:
    stopped = int(warm.run("own_pid").value)
    os.kill(stopped, signal.SIGSTOP)
    orders = [warm.order("own_pid") for _ in range(3)]
    warm.pool.slots[0].send(orders)

    ended = warm.wait(*orders)

    assert {one.reason for one in ended} == {EndReason.SUCCEEDED}
    assert str(stopped) not in {one.value for one in ended}
    assert [one.started_at for one in ended] == sorted(one.started_at for one in ended)


@pytest.mark.usefixtures("quick_guardians")
def test_child_that_was_stopped_while_idle_is_let_go_and_its_slot_goes_on(make: Callable[..., Bench]) -> None:
    bench = make(slots=2, reuse=True)
    order = bench.order("own_pid")
    bench.pool.slots[1].send([order])
    stopped = int(bench.wait(order)[0].value)
    os.kill(stopped, signal.SIGSTOP)
    bench.grow_idle()

    bench.step_until(lambda: not is_running(stopped))
    bench.pool.slots[1].send([again := bench.order("nothing")])

    assert bench.wait(again)[0].reason is EndReason.SUCCEEDED


@pytest.mark.parametrize("how", ["stopped", "waiting"])
def test_end_of_an_attempt_is_told_though_its_process_does_not_leave(
    fresh: Bench, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = fresh.order("never_leave", how)
    fresh.pool.slots[0].send([order])
    fresh.step_until(fresh.has_reported)
    with monkeypatch.context() as context:
        ping_often(fresh, context, silences=20)
        assert fresh.wait(order)[0].reason is EndReason.SUCCEEDED
    assert fresh.run("echo", 1).reason is EndReason.SUCCEEDED


def test_order_for_a_warm_child_that_reads_no_more_runs_in_another(
    warm: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm.run("read_no_more")
    deaf = warm.child
    orders = [warm.order("echo", n, timeout_s=600.0) for n in range(2)]
    warm.pool.slots[0].send(orders)
    with monkeypatch.context() as context:
        ping_often(warm, context, silences=20)
        warm.step_until(lambda: warm.child is not deaf)

    assert {one.reason for one in warm.wait(*orders)} == {EndReason.SUCCEEDED}


# processes damaged by an attempt


def test_functions_replaced_in_json_do_not_reach_the_reports_of_a_warm_child(warm: Bench) -> None:
    warm.run("spoil_json")
    pid = warm.run("own_pid")

    assert warm.run("echo", 1, env={"EXTRA": "1"}).value == '{"args":[1],"kwargs":{}}'
    assert warm.run("fail").message == "ValueError: boom"
    assert warm.run("own_pid").value == pid.value


def test_attempt_that_finds_its_process_spoilt_before_it_begins_is_not_started_and_then_runs(warm: Bench) -> None:
    warm.run("spoil_folders")
    order = warm.order("echo", 1)
    warm.pool.slots[0].send([order, behind := warm.order("echo", 2)])

    refused, other = warm.wait(order, behind)
    warm.pool.slots[0].send([order])

    assert (refused.reason, refused.not_started) == (EndReason.PREEMPTED, True)
    assert "cannot enter folder" in (refused.message or "")
    assert other.reason is EndReason.SUCCEEDED or other.not_started
    assert warm.wait(order)[0].reason is EndReason.SUCCEEDED


def test_attempt_whose_report_another_has_spoilt_is_preempted_and_the_child_replaced(warm: Bench) -> None:
    warm.run("spoil_reports")

    ended = warm.run("echo", 1, task_id="t-victim")

    assert (ended.reason, ended.not_started, ended.value) == (EndReason.PREEMPTED, False, "")
    assert "what it reported cannot be read" in (ended.message or "")
    assert warm.run("echo", 1, task_id="t-victim").reason is EndReason.SUCCEEDED


def test_unreadable_report_is_put_down_to_the_process_once_and_then_to_the_task(warm: Bench) -> None:
    ends = []
    for _ in range(2):
        warm.run("nothing")
        ends.append(warm.run("broken_details", task_id="t-own").reason)

    assert ends == [EndReason.PREEMPTED, EndReason.APP_FAILED]


# death of the worker


WORKER = """
import json, os, selectors, signal, sys, fcntl
from pathlib import Path
from runtime.worker.attempts import guardian_link
from runtime.worker.attempts.model import AttemptOrder, ChildPoolSettings
from runtime.worker.attempts.pool import AttemptPool

folder, tasks, adopt, prefix = Path(sys.argv[1]), sys.argv[2], "adopt" in sys.argv[3], sys.argv[4]
if "old kernel" in sys.argv[3]:
    guardian_link._GUARDIAN = "import os; del os.pidfd_open" + guardian_link._GUARDIAN
lock = open(folder / "lock", "w")
fcntl.flock(lock, fcntl.LOCK_EX)
selector = selectors.DefaultSelector()
settings = ChildPoolSettings(hold_fds=(lock.fileno(),), sys_path=[tasks, *sys.path], adopt_orphans=adopt)
pool = AttemptPool(selector=selector, slots=3, settings=settings)
pool.start()
if "copied" in sys.argv[3] and not (copy := os.fork()):
    signal.pause()
for slot, (name, args) in enumerate([("start_daemon", [True, "hang"]), ("start_daemon", [False, "hang"])]):
    body = json.dumps({"function": f"pool_tasks:{name}", "args": [str(folder / f"pid{slot}"), *args]})
    pool.slots[slot].send([AttemptOrder(token=f"{prefix}{slot}", body=body, task_id=f"t-{slot}")])
command = ["sh", "-c", f"sleep 300 & echo $! > {folder}/pid2.part; mv {folder}/pid2.part {folder}/pid2; wait"]
pool.slots[2].send([AttemptOrder(token=f"{prefix}2", body=json.dumps({"command": command}), task_id="t-2")])
told = False
while True:
    for key, _ in selector.select(0.05):
        key.data()
    for ended in pool.tick():
        print(json.dumps([ended.token, ended.reason, ended.message, ended.log.decode()]), flush=True)
    if not told and all((folder / f"pid{slot}").exists() for slot in range(3)):
        told = True
        if "copied" in sys.argv[3]:
            (folder / "copy").write_text(str(copy))
        print(json.dumps([pool._guardian.process.pid, *(child.pid for child in pool._children)]), flush=True)
"""


def start_worker(tmp_path: Path, mode: str = "plain") -> tuple[subprocess.Popen[str], list[int], list[int]]:
    """Start a process with a pool; return it with the pids of guardian and children, and those its attempts started."""
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(tmp_path), str(Path(__file__).parent), mode, _PREFIX],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    assert worker.stdout
    pids: list[int] = json.loads(worker.stdout.readline())
    assert all(isinstance(pid, int) for pid in pids), pids
    return worker, pids, [int((tmp_path / f"pid{slot}").read_text()) for slot in range(3)]


@pytest.mark.parametrize("mode", ["plain", "old kernel"])
@pytest.mark.parametrize("stopped", [False, True])
def test_death_of_the_worker_ends_every_descendant_before_its_lock_is_free(
    tmp_path: Path, stopped: bool, mode: str
) -> None:
    worker, pids, started = start_worker(tmp_path, mode)
    assert all(is_running(pid) for pid in [*pids, *started])
    if stopped:
        os.kill(pids[0], signal.SIGSTOP)
    with (tmp_path / "lock").open() as lock:
        with pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        worker.kill()
        fcntl.flock(lock, fcntl.LOCK_EX)
        left = [pid for pid in [*pids[1:], *started] if is_running(pid)]
    worker.communicate()
    assert left == []
    wait_until(lambda: not is_running(pids[0]))


@pytest.mark.parametrize("mode", ["copied", "copied, old kernel"])
def test_death_of_the_worker_is_noticed_though_a_copy_of_its_process_holds_the_socket(
    tmp_path: Path, mode: str
) -> None:
    """Kernels before 5.3 have no descriptor of a process, so there the guardian asks for its parent."""
    worker, pids, started = start_worker(tmp_path, mode)
    copy = int((tmp_path / "copy").read_text())
    try:
        assert all(is_running(pid) for pid in [copy, *pids, *started])
        worker.kill()
        wait_until(lambda: not any(is_running(pid) for pid in [*pids, *started]))
        assert is_running(copy)
    finally:
        os.kill(copy, signal.SIGKILL)
    worker.communicate()


@pytest.mark.parametrize("mode", ["plain", "adopt", "adopt, old kernel"])
def test_death_of_the_guardian_ends_what_its_children_started(tmp_path: Path, mode: str) -> None:
    worker, pids, started = start_worker(tmp_path, mode)
    assert worker.stdout
    os.kill(pids[0], signal.SIGKILL)
    ended = [json.loads(worker.stdout.readline())[:2] for _ in range(3)]
    assert sorted(ended) == [[f"{_PREFIX}{slot}", "lost"] for slot in range(3)]
    # Only a process that adopts orphans can find a daemon that left its session and cleared its environment.
    sought = started if "adopt" in mode else started[1:]
    assert [pid for pid in [*pids[1:], *sought] if is_running(pid)] == []
    assert [
        process.pid for process in processes.read_table().values() if process.ppid == worker.pid and process.dead
    ] == []
    worker.kill()
    worker.communicate()
    if mode == "plain":
        os.kill(started[0], signal.SIGKILL)


def test_death_of_the_guardian_ends_its_children_though_the_worker_is_stopped(tmp_path: Path) -> None:
    worker, pids, started = start_worker(tmp_path)
    worker.send_signal(signal.SIGSTOP)
    os.kill(pids[0], signal.SIGKILL)
    wait_until(lambda: not any(is_running(pid) for pid in pids[1:]))
    worker.kill()
    worker.communicate()
    processes.send_signal(started, signal.SIGKILL)


def test_child_whose_guardian_died_before_it_could_ask_for_its_own_end_leaves() -> None:
    code = (
        "from runtime.worker.attempts import fork_server as module; module.prctl = lambda option, value: 0\n"
        "guardian = module.Guardian.__new__(module.Guardian); guardian.pid = -1\n"
        "import os; pid = os.fork()\n"
        "if not pid: guardian._leave_guardian(); os._exit(1)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=Path(__file__).parents[3]
    )
    assert shown.stdout == "117\n", shown.stderr


def test_guardian_and_fresh_child_load_next_to_nothing(tmp_path: Path) -> None:
    code = "import sys, runtime.worker.attempts.fork_server; print('\\n'.join(sys.modules))"
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3]
    )
    loaded = set(shown.stdout.split())
    unwanted = {"asyncio", "dataclasses", "inspect", "jsonargparse", "logging", "multiprocessing", "pathlib"}
    unwanted |= {"pydantic", "sqlite3", "subprocess", "tempfile", "threading", "traceback", "typer"}
    assert sorted(loaded & unwanted) == []
