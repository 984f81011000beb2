"""Secrets of a stack in attempts: who gets which, rotation, what a refusal or a silent service costs, and where no value is."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from runtime.clock import SystemClock
from runtime.end_reasons import EndReason
from runtime.outputs import SecretOutput, SqliteQueueOutput, StackOutputs, encode_outputs
from runtime.queues.base import Queue
from runtime.queues.sqlite.queue import open_sqlite
from runtime.stack import google_api
from runtime.tasks.history import Lease
from runtime.tasks.model import CommandEntry, FunctionEntry, Task, TaskState
from runtime.tasks.notification_sinks import TaskSink
from runtime.tasks.wire import decode_task
from runtime.testing import sample_task
from runtime.worker.attempts.model import AttemptOrder
from runtime.worker.options import WorkerOptions
from runtime.worker.secrets import FAILED_FOR_S, LIFETIME_S, REFUSED_FOR_S, AttemptSecrets
from runtime.worker.worker import Worker
from runtime.worker.worker_context import HeldLease
from runtime.worker.worker_log import WorkerLog
from tests.fakes.faults import Request, Response
from tests.fakes.google import GoogleServer
from tests.services_support import wait_until
from tests.unit.shim.test_shim_notify import Receiver
from tests.unit.worker.worker_bench import ROOT, Bench, bench, open_pair_with_folder, start_command

__all__ = ["bench"]

BODIES = """
import hashlib, os, threading, time
from pathlib import Path

HERE = Path(__file__).parent


def digest(name):
    value = os.environ.get(name)
    return None if value is None else hashlib.sha256(value.encode()).hexdigest()


def look(*names):
    return [os.getpid(), [digest(name) for name in names]]


def hold(name, *names):
    before = look(*names)
    (HERE / f"{name}.began").touch()
    while not (HERE / f"{name}.go").exists():
        time.sleep(0.01)
    return [before, look(*names)]


kept = []


def keep(name):
    kept.append(os.environ[name])
    return look(name)


def find_kept():
    return len(kept)
"""

SECRETS = {
    "hf-token": SecretOutput(resource="projects/p/secrets/dev-hf-token", env="HF_TOKEN", attempts="all"),
    "wandb": SecretOutput(resource="projects/p/secrets/dev-wandb", env="WANDB_API_KEY", attempts="named"),
    "deploy": SecretOutput(resource="projects/p/secrets/dev-deploy", env="DEPLOY_KEY"),
}
STACK = StackOutputs(stack="dev", secrets=SECRETS)
NAMES = ("HF_TOKEN", "WANDB_API_KEY", "DEPLOY_KEY")


def digest(value: str) -> str:
    return hashlib.sha256(value.encode()).hexdigest()


class Gated(GoogleServer):
    """Answers reads of values only while the gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.waiting = threading.Event()

    def answer(self, request: Request) -> Response:
        if not self.gate.is_set():
            self.waiting.set()
            self.gate.wait()
        return super().answer(request)

    def recover(self) -> None:
        self._troubles.clear()


class MovableClock(SystemClock):
    """The system's clocks, and what a test has added to them."""

    def __init__(self) -> None:
        self.ahead = timedelta()

    def now(self) -> datetime:
        return super().now() + self.ahead

    def boottime(self) -> float:
        return super().boottime() + self.ahead.total_seconds()


class SecretBench:
    def __init__(self, opened: Bench, google: Gated) -> None:
        self.bench, self.google = opened, google
        self.clock = MovableClock()
        self.outputs = STACK
        """The contract as it is now."""

    def task(self, name: str, *args: Any, key: str | None = None, secrets: Sequence[str] | None = None) -> Task:
        entry = FunctionEntry(f"secret_bodies:{name}", args)
        return _task(key or f"{name} {args} {secrets}", entry, None if secrets is None else tuple(secrets))

    def put(self, *tasks: Task) -> None:
        queue = self.open_queue()
        queue.put(tasks)
        queue.close()

    def open_queue(self) -> Queue:
        return open_sqlite(self.bench.path, clock=self.clock)[0]

    @contextmanager
    def worker(self, *, stack: StackOutputs = STACK, queue: Queue | None = None, **options: Any) -> Iterator[None]:
        """Run a worker in a thread; at the end it has left by itself, without a second request."""
        queue = queue or self.open_queue()
        secrets = AttemptSecrets(stack, server=self.google.url, find_outputs=lambda: self.outputs, clock=self.clock)
        worker = Worker(
            queue,
            WorkerOptions(**options),
            reporter=WorkerLog(self.bench.log, json_lines=True),
            clock=self.clock,
            secrets=secrets,
        )
        thread = threading.Thread(target=worker.run)
        thread.start()
        try:
            yield
        finally:
            worker.stop()
            thread.join(60)
            assert not thread.is_alive(), "the worker has not left"
            queue.close()

    def value(self, task: Task) -> Any:
        """Wait for the record of a task that succeeds."""
        self.ended(task)
        record = self.bench.record(task)
        assert record.state is TaskState.SUCCEEDED, (record, self.bench.log.getvalue())
        return record.value

    def ended(self, task: Task) -> None:
        assert wait_until(lambda: self.bench.records.find(task.id, 1) is not None), self.bench.log.getvalue()

    def went_back(self, task: Task) -> None:
        assert wait_until(lambda: any(each["task"] == task.id for each in self.bench.events("task_declined")))

    def advance(self, seconds: float) -> None:
        self.clock.ahead += timedelta(seconds=seconds + 1)


def _task(key: str, entry: FunctionEntry | CommandEntry, secrets: tuple[str, ...] | None) -> Task:
    return sample_task(key, entry=entry, secrets=secrets)


@pytest.fixture
def given(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Iterator[SecretBench]:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    (bench.code / "secret_bodies.py").write_text(BODIES)
    google = Gated()
    google.start()
    google.put_secret("dev-hf-token", b"hf-1")
    google.put_secret("dev-wandb", b"wandb-1")
    google.put_secret("dev-deploy", b"deploy-1")
    yield SecretBench(bench, google)
    google.gate.set()
    google.stop()
    assert google.refused == []


# which attempt gets which


@pytest.mark.parametrize("warm", [False, True])
def test_attempt_gets_the_secrets_of_its_stack_or_those_that_its_task_names(given: SecretBench, warm: bool) -> None:
    default = given.task("look", *NAMES)
    named = given.task("look", *NAMES, secrets=["wandb"])
    both = given.task("look", *NAMES, secrets=["wandb", "hf-token"])
    none = given.task("look", *NAMES, secrets=[])
    given.put(default, named, both, none)

    with given.worker(reuse_process=warm):
        found = [given.value(task)[1] for task in (default, named, both, none)]

    hf, wandb = digest("hf-1"), digest("wandb-1")
    assert found == [[hf, None, None], [None, wandb, None], [hf, wandb, None], [None, None, None]]


def test_worker_with_records_elsewhere_gives_secrets_too(given: SecretBench) -> None:
    queue, records = open_pair_with_folder(given.bench)
    default, none = given.task("look", *NAMES), given.task("look", *NAMES, secrets=[])
    queue.put([default, none])

    with given.worker(queue=queue):
        assert wait_until(lambda: all(records.find(task.id, 1) is not None for task in (default, none)))

    found = [given.bench.record(task, records=records).value for task in (default, none)]
    assert [each[1][0] for each in found] == [digest("hf-1"), None]  # type: ignore[index]


def test_command_gets_its_secrets_too(given: SecretBench) -> None:
    command = ("sh", "-c", 'test "$HF_TOKEN" = hf-1 && test -z "$WANDB_API_KEY"')
    task = _task("command", CommandEntry(command), None)
    given.put(task)

    with given.worker():
        given.value(task)


def test_bare_message_of_a_foreign_producer_gets_the_default_of_the_stack(given: SecretBench) -> None:
    task = decode_task('{"function": "secret_bodies:look", "args": ["HF_TOKEN"]}')
    given.put(task)

    with given.worker():
        assert given.value(task)[1] == [digest("hf-1")]


def test_secret_wins_over_a_variable_of_the_worker_which_other_attempts_keep(
    given: SecretBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "by-hand")
    default, none = given.task("look", "HF_TOKEN"), given.task("look", "HF_TOKEN", secrets=[])
    given.put(default, none)

    with given.worker(reuse_process=True):
        assert given.value(default)[1] == [digest("hf-1")]
        assert given.value(none)[1] == [digest("by-hand")]
    assert os.environ["HF_TOKEN"] == "by-hand"


def test_value_with_any_character_arrives_unchanged(given: SecretBench) -> None:
    odd = "a\n\"b'\\ \t€ \U0001f511 {x}"
    given.google.put_secret("dev-hf-token", odd.encode())
    task = given.task("look", "HF_TOKEN")
    given.put(task)

    with given.worker():
        assert given.value(task)[1] == [digest(odd)]


def test_warm_process_is_not_shared_by_attempts_with_other_secrets(given: SecretBench) -> None:
    first, same = given.task("keep", "HF_TOKEN", key="1"), given.task("keep", "HF_TOKEN", key="2")
    none = given.task("find_kept", secrets=[])
    given.put(first, same, none)

    with given.worker(reuse_process=True):
        assert given.value(first)[0] == given.value(same)[0]
        assert given.value(none) == 0, "the attempt found what an attempt with a secret has kept"


# rotation


@pytest.mark.parametrize("warm", [False, True])
def test_new_version_reaches_new_attempts_after_minutes_and_no_running_one(given: SecretBench, warm: bool) -> None:
    running = given.task("hold", "held", "HF_TOKEN")
    tasks = [given.task("look", "HF_TOKEN", key=str(number)) for number in range(3)]
    old, new = digest("hf-1"), digest("hf-2")

    with given.worker(reuse_process=warm, slots=2):
        given.put(running)
        given.bench.began("held")
        given.google._add_version("projects/p/secrets/dev-hf-token", b"hf-2")
        given.put(tasks[0])
        assert given.value(tasks[0])[1] == [old]
        assert len(given.google.calls("*.access")) == 1
        given.advance(LIFETIME_S)
        given.put(tasks[1])
        assert given.value(tasks[1])[1] == [new]
        given.put(tasks[2])
        assert given.value(tasks[2])[1] == [new]
        assert len(given.google.calls("*.access")) == 2
        given.bench.let_go("held")
        assert [found for _, found in given.value(running)] == [[old], [old]]


# trouble


@pytest.mark.parametrize(
    ("arrange", "for_s", "text"),
    [
        (lambda google: google.deny("*.access", "secretmanager.versions.access"), REFUSED_FOR_S, "this identity may not"),
        (lambda google: google.fail("*.access", 404, "NOT_FOUND", "gone"), REFUSED_FOR_S, "does not exist"),
        (lambda google: google.fail("*.access", 503, "UNAVAILABLE", "away"), FAILED_FOR_S, "away"),
        (lambda google: google.fail("*.access", 429, "RESOURCE_EXHAUSTED", "slow down"), FAILED_FOR_S, "slow down"),
    ],
)  # fmt: skip
@pytest.mark.daily(1)
def test_secret_that_cannot_be_read_buries_nothing_and_stops_no_other_task(
    given: SecretBench, arrange: Any, for_s: float, text: str
) -> None:
    arrange(given.google)
    needs, other = given.task("look", "HF_TOKEN"), given.task("look", "HF_TOKEN", secrets=[])
    given.put(needs)

    with given.worker(max_consecutive_failures=1):
        given.went_back(needs)
        given.put(other)
        assert given.value(other)[1] == [None]
        assert given.bench.records.find(needs.id, 1) is None
        given.google.recover()
        given.advance(max(for_s, 90))
        assert given.value(needs)[1] == [digest("hf-1")]
    assert given.bench.record(needs).attempts == 1, "the look for secrets counted as an attempt"
    assert given.bench.notes(needs) == []
    said = given.bench.events("trouble")
    assert text in said[0]["message"]
    assert "`hf-token`" in said[0]["message"]


def test_worker_that_may_read_nothing_leaves_the_queue_to_others(given: SecretBench) -> None:
    given.google.deny("*.access", "secretmanager.versions.access")
    tasks = [given.task("look", "HF_TOKEN", key=str(number)) for number in range(300)]
    given.put(*tasks)
    queue = given.open_queue()
    lease, calls = queue.lease, []

    def timed(*args: Any, **options: Any) -> Any:
        began = time.monotonic()
        found = lease(*args, **options)
        calls.append((began, time.monotonic(), len(found)))
        return found

    queue.lease = timed  # type: ignore[method-assign]

    with given.worker(queue=queue):
        assert wait_until(lambda: len(calls) >= 3)

    first, second, third = calls[:3]
    assert [found for _, _, found in calls[:3]] == [1, 1, 1]
    assert second[0] - first[1] >= 0.5
    assert third[0] - second[1] >= 1.0
    assert len(given.google.calls("*.access")) == 1


def test_worker_that_may_read_nothing_leaves_after_its_idle_time_out(given: SecretBench) -> None:
    given.google.deny("*.access", "secretmanager.versions.access")
    given.put(given.task("look", "HF_TOKEN"))

    with given.worker(idle_timeout=timedelta(milliseconds=200)):
        assert wait_until(lambda: given.bench.events("worker_draining"))

    assert "`hf-token`" in given.bench.events("worker_draining")[0]["reason"]
    assert given.bench.events("attempt_started") == []


def test_slow_service_keeps_no_task_that_needs_no_secret_and_no_worker_that_leaves(
    given: SecretBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(google_api, "PATIENCE_S", 3600)
    given.google.gate.clear()
    needs, other = given.task("look", "HF_TOKEN"), given.task("look", "HF_TOKEN", secrets=[])
    given.put(needs)

    with given.worker(slots=1):
        assert given.google.waiting.wait(60)
        given.put(other)
        assert given.value(other)[1] == [None]
        assert given.bench.records.find(needs.id, 1) is None
    assert given.bench.records.find(needs.id, 1) is None
    given.google.gate.set()
    with given.worker(slots=1):
        assert given.value(needs)[1] == [digest("hf-1")]


def test_task_goes_on_when_a_slow_service_answers(given: SecretBench) -> None:
    given.google.gate.clear()
    tasks = [given.task("look", "HF_TOKEN", key=str(number)) for number in range(4)]
    given.put(*tasks)

    with given.worker(slots=2):
        assert given.google.waiting.wait(60)
        given.google.gate.set()
        assert [given.value(task)[1] for task in tasks] == [[digest("hf-1")]] * 4


@pytest.mark.parametrize("name", ["hf-tokn", "deploy", "hf_AAAAbbbbCCCC1234"])
def test_name_that_the_stack_does_not_give_fails_that_task_alone(given: SecretBench, name: str) -> None:
    wrong, right = given.task("look", "HF_TOKEN", secrets=[name]), given.task("look", "HF_TOKEN")
    given.put(wrong, right)

    with given.worker():
        given.ended(wrong)
        assert given.value(right)[1] == [digest("hf-1")]
    record = given.bench.record(wrong)
    assert (record.state, record.reason) == (TaskState.FAILED, EndReason.CONFIG_INVALID)
    assert record.message is not None
    assert ("hf_AAAA" not in record.message) if name.startswith("hf_") else (f"`{name}`" in record.message)
    assert "hf-token" in record.message


def test_secret_that_the_stack_got_after_the_worker_started_is_given(given: SecretBench) -> None:
    task = given.task("look", "WANDB_API_KEY", secrets=["wandb"])
    given.put(task)
    before = StackOutputs(stack="dev", secrets={"hf-token": SECRETS["hf-token"]})

    with given.worker(stack=before):
        assert given.value(task)[1] == [digest("wandb-1")]


@pytest.mark.parametrize(
    "secrets",
    [
        {"a": SecretOutput(resource="projects/p/secrets/dev-wandb", env="LD_PRELOAD", attempts="all")},
        {"a": SecretOutput(resource="projects/p/secrets/dev-wandb", env="RUNTIME_OUTPUT_DIR", attempts="all")},
        {
            "a": SecretOutput(resource="projects/p/secrets/dev-wandb", env="HF_TOKEN", attempts="all"),
            "hf-token": SECRETS["hf-token"],
        },
    ],
)
def test_contract_with_a_variable_that_no_secret_may_set_reads_no_value_and_buries_no_task(
    given: SecretBench, secrets: dict[str, SecretOutput]
) -> None:
    task, other = given.task("look", "HF_TOKEN"), given.task("look", "HF_TOKEN", secrets=[])
    given.put(task, other)

    with given.worker(stack=StackOutputs(stack="dev", secrets=secrets)):
        given.value(other)
        given.went_back(task)
    assert given.bench.records.find(task.id, 1) is None
    assert given.google.calls() == []


def test_worker_of_a_queue_that_is_named_by_its_url_gives_none(given: SecretBench) -> None:
    contract = given.bench.folder / "dev.json"
    contract.write_text(encode_outputs(STACK))
    task = given.task("look", "HF_TOKEN")
    given.bench.put(task)

    worker = start_command(
        given.bench, "--idle-timeout", "0.1s", RUNTIME_OUTPUTS=str(contract), RUNTIME_GOOGLE_API=given.google.url
    )

    said = worker.communicate(timeout=240)[1]
    assert worker.returncode == 0, said
    assert given.value(task)[1] == [None]
    assert given.google.calls() == []


def test_worker_whose_stack_grants_none_gives_back_a_task_that_names_one(bench: Bench) -> None:
    named = sample_task("named", secrets=("hf-token",))
    plain = bench.command("true")
    bench.put(named, plain)

    with bench.running():
        assert wait_until(lambda: bench.records.find(plain.id, 1) is not None)
        assert wait_until(lambda: bool(bench.events("task_declined")))
    assert bench.records.find(named.id, 1) is None


# nowhere else


def test_value_is_in_no_file_argument_log_or_environment_of_the_worker(given: SecretBench) -> None:
    canary = b"hf_canary_27182818"
    given.google.put_secret("dev-hf-token", canary)
    contract = given.bench.folder / "dev.json"
    queues = {"default": SqliteQueueOutput(path=str(given.bench.path))}
    contract.write_text(encode_outputs(StackOutputs(stack="dev", queues=queues, secrets=SECRETS)))
    right = given.task("hold", "held", "HF_TOKEN")
    failing = _task("failing", FunctionEntry("secret_bodies:digest", ("HF_TOKEN", "one too many")), None)
    crashing = _task("crashing", CommandEntry(("sh", "-c", 'test "$HF_TOKEN" && kill -SEGV $$')), None)
    given.bench.put(failing, crashing, right)
    worker = start_command(
        given.bench,
        *("--reuse-process", "--slots", "1", "--max-consecutive-failures", "0", "--idle-timeout", "1s"),
        RUNTIME_QUEUE="default",
        RUNTIME_OUTPUTS=str(contract),
        RUNTIME_GOOGLE_API=given.google.url,
        RUNTIME_DATA_DIR=str(given.bench.folder / "data"),
        XDG_CACHE_HOME=str(given.bench.folder / "cache"),
    )
    try:
        given.bench.began("held")
        for pid in (worker.pid, *_children(worker.pid)):
            for name in ("cmdline", "environ"):
                assert canary not in Path(f"/proc/{pid}/{name}").read_bytes(), (
                    f"{name} of process {pid} holds the value"
                )
        given.bench.let_go("held")
        said = worker.communicate(timeout=240)[1]
    finally:
        worker.kill()

    found = given.bench.record(right).value
    assert [each for _, each in found] == [[digest(canary.decode())]] * 2, said  # type: ignore[union-attr]
    assert canary.decode() not in said
    files = [path for path in given.bench.folder.rglob("*") if path.is_file()]
    assert given.bench.path in files
    assert [path for path in files if canary in path.read_bytes()] == []


def test_values_are_in_no_text_of_an_order_or_a_held_lease() -> None:
    from runtime.testing import sample_task

    values = {"HF_TOKEN": "canary"}
    held = HeldLease(Lease(sample_task(), "token"), secrets=values)

    assert "canary" not in repr(held)
    assert "canary" not in repr(AttemptOrder(token="t", body="{}", task_id="t-1", secrets=values))


def _children(pid: int) -> list[int]:
    """Every process below `pid`."""
    found = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [*found, *(inner for each in found for inner in _children(each))]


def test_worker_of_a_stack_without_secrets_loads_no_code_for_them(bench: Bench) -> None:
    contract = bench.folder / "dev.json"
    queues = {"default": SqliteQueueOutput(path=str(bench.path))}
    secrets = {"deploy": SECRETS["deploy"]}
    contract.write_text(encode_outputs(StackOutputs(stack="dev", queues=queues, secrets=secrets)))
    task = bench.command("true")
    bench.put(task)
    script = (
        "import sys, threading\nfrom runtime.cli.worker import main\ncode = main(['--once'])\n"
        "heavy = {'requests', 'google.auth', 'runtime.worker.secrets', 'runtime.stack.google_api', 'runtime.stack.secrets'}\n"
        "print(code, sorted(heavy & set(sys.modules)))"
    )

    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ
        | {
            "PYTHONPATH": str(ROOT),
            "RUNTIME_OUTPUTS": str(contract),
            "RUNTIME_PREEMPTION_NOTICES": "off",
            "TMPDIR": str(bench.folder / "tmp"),
        },
        cwd=bench.code,
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )

    assert done.stdout.strip() == "0 []"
    assert bench.record(task).state is TaskState.SUCCEEDED


def test_webhook_whose_url_is_a_secret_of_the_stack_hears_of_its_task(given: SecretBench) -> None:
    with Receiver() as receiver:
        given.google.put_secret("dev-wandb", f"{receiver.url}/hooks".encode())
        told = replace(given.task("digest", "X"), notify=(TaskSink(webhook="secret-manager://wandb"),))
        never = replace(given.task("digest", "Y"), notify=(TaskSink(webhook="secret-manager://deploy"),))
        given.put(told, never)
        with given.worker():
            given.ended(never)
            assert wait_until(lambda: bool(receiver.bodies) and bool(given.bench.events("notification_failed")))

    assert [body["task"] for body in receiver.bodies] == [told.id]
    [event] = given.bench.events("notification_failed")
    assert (event["task"], event["problem"]) == (
        never.id,
        "secret `deploy` cannot be given to attempts: workers of stack `dev` may not read it",
    )
