"""Messages about the ends of tasks, by real workers, to a server of this process and to commands."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import runtime
from runtime.client.tasks.notify import read_untold
from runtime.errors import StoreUnavailable
from runtime.outputs import PubSubQueueOutput, RecordsOutput, StackOutputs, encode_outputs
from runtime.queues.base import Queue
from runtime.queues.memory import MemoryQueue
from runtime.records.base import RecordStore
from runtime.records.memory import MemoryBlobs, MemoryRecords
from runtime.records.notifications import DeliveryRecord
from runtime.records.store import BlobRecords
from runtime.shim import notify
from runtime.tasks.model import Task, TaskState
from runtime.tasks.notification_sinks import TaskSink
from runtime.worker import notifying
from runtime.worker.notification_queue import AT_ONCE, TO_ONE
from tests.services_support import wait_until
from tests.shim_support import is_running
from tests.unit.shim.test_shim_notify import SECRET, Receiver
from tests.unit.worker.test_worker_records_elsewhere import WORKER
from tests.unit.worker.worker_bench import EXPERIMENT, ROOT, Bench, ago, bench, start_command, stored

__all__ = ["bench", "stored"]

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="workers run their attempts on Linux")

HOOK = TaskSink(webhook="env://TEST_HOOK")


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    with Receiver() as running:
        monkeypatch.setenv("TEST_HOOK", f"{running.url}/{SECRET}")
        monkeypatch.setattr(notify, "NOTIFY_PAUSE_S", 0.01)
        yield running


def left(records: RecordStore) -> list[tuple[str, int]]:
    """The messages that are not known to be sent, and how often each was tried."""
    return [(each.name, each.tries) for each in records.open_notifications().find_open()]


def told(records: RecordStore, task: Task) -> DeliveryRecord | None:
    return records.open_notifications().find_told(task.experiment, f"{task.id}.g{task.generation}")


def age_claims(bench: Bench) -> None:
    """Have an hour pass since messages were claimed."""
    if bench.elsewhere:
        for path in (bench.folder / "records" / "notify").iterdir():
            at = path.stat().st_mtime - 3600
            os.utime(path, (at, at))
        return
    with sqlite3.connect(bench.path) as connection:
        connection.execute("UPDATE objects SET modified = modified - 3600 WHERE key LIKE 'notify/%'")
    connection.close()


def run_killed(bench: Bench, fault: str) -> None:
    """Run a worker in a process of its own, which the fault kills."""
    fields = {"RUNTIME_FAULTS": f"{fault}=kill"}
    if bench.elsewhere:
        env = {**os.environ, **fields, "PYTHONPATH": f"{ROOT}:{bench.code}", "TMPDIR": str(bench.folder / "tmp")}
        words = [sys.executable, "-c", WORKER, str(bench.path), str(bench.folder / "records")]
        worker: subprocess.Popen[Any] = subprocess.Popen(
            words, cwd=bench.code, env=env, stderr=subprocess.DEVNULL, start_new_session=True
        )
    else:
        worker = start_command(bench, "--idle-timeout", "60s", **fields)
    worker.communicate(timeout=90)
    assert worker.returncode == -signal.SIGKILL


def test_webhook_hears_of_the_ends_that_it_wants_and_of_no_others(
    bench: Bench, stored: None, receiver: Receiver
) -> None:
    sinks = (TaskSink(webhook="env://TEST_HOOK", on=("failed",)),)
    good = bench.function("give", 1, notify=sinks)
    bad = bench.function("fail", "with secrets", notify=sinks, max_failures=1, submitted_by="ada@laptop")
    bench.put(good, bad, bench.function("give", 2))

    bench.run()

    [body] = receiver.bodies
    record = bench.record(bad)
    assert {name: value for name, value in body.items() if name not in ("id", "at")} == {
        "task": bad.id,
        "generation": 1,
        "experiment": EXPERIMENT,
        "queue": "default",
        "owner": "ada@laptop",
        "state": "failed",
        "reason": "app_failed",
        "attempts": 1,
        "text": f"task {bad.id[:14]} of {EXPERIMENT} failed: app_failed",
    }
    assert (len(body["id"]), left(bench.records)) == (24, [])
    found = told(bench.records, bad)
    assert found is not None
    assert (found.sent, found.problems, found.tries, found.by) == (frozenset({0}), {}, 1, record.worker)
    assert (told(bench.records, good), SECRET in bench.log.getvalue()) == (None, False)
    [said] = bench.events("notification_sent")
    assert said["message"] == f"told webhook 0 of the end of {bad.id[:14]}"


def test_queue_in_memory_tells_as_well(bench: Bench, receiver: Receiver) -> None:
    with closing(MemoryRecords()) as records:
        queue = MemoryQueue(records)
        task = bench.function("give", 1, notify=(HOOK,))
        queue.put([task])

        bench.run(queue)

        assert [body["state"] for body in receiver.bodies] == ["succeeded"]
        assert told(records, task) is not None


def test_receiver_that_is_away_for_a_moment_hears_in_the_same_try(bench: Bench, receiver: Receiver) -> None:
    receiver.answers = [500, 503]
    task = bench.function("give", 1, notify=(HOOK,))
    bench.put(task)

    bench.run()

    assert [body["task"] for body in receiver.bodies] == [task.id]
    assert (len(receiver.requests), left(bench.records)) == (3, [])


def test_expired_task_is_told_of_as_expired(bench: Bench, receiver: Receiver) -> None:
    bench.put(bench.function("give", 1, notify=(HOOK,), expires_at=ago(hours=1)))

    bench.run()

    assert [(body["state"], body["reason"]) for body in receiver.bodies] == [("expired", "expired")]


def test_worker_killed_between_the_record_and_the_message_leaves_it_to_the_next(
    bench: Bench, stored: None, receiver: Receiver
) -> None:
    task = bench.function("give", 1, notify=(HOOK,))
    bench.put(task)
    run_killed(bench, "worker.after_commit")
    assert bench.record(task).state is TaskState.SUCCEEDED
    assert (receiver.bodies, left(bench.records)) == ([], [(f"{task.id}.g1", 0)])

    bench.run()

    assert [body["task"] for body in receiver.bodies] == [task.id]
    assert left(bench.records) == []


def test_worker_killed_between_the_message_and_the_record_tells_only_of_what_is_recorded(
    bench: Bench, stored: None, receiver: Receiver
) -> None:
    task = bench.function("give", 1, notify=(HOOK,))
    bench.put(task)
    run_killed(bench, "worker.notification_written")
    assert (bench.records.find(task.id, 1), left(bench.records)) == (None, [(f"{task.id}.g1", 0)])

    bench.run()

    assert [(body["task"], body["state"]) for body in receiver.bodies] == [(task.id, "succeeded")]
    assert left(bench.records) == []


def test_message_of_a_sender_that_died_is_sent_again_once_its_claim_is_old(
    bench: Bench, stored: None, receiver: Receiver
) -> None:
    task = bench.function("give", 1, notify=(HOOK,))
    bench.put(task)
    run_killed(bench, "worker.notification_claimed")

    bench.run()
    assert (receiver.bodies, left(bench.records)) == ([], [(f"{task.id}.g1", 1)])

    age_claims(bench)
    bench.run()
    assert [body["task"] for body in receiver.bodies] == [task.id]
    assert left(bench.records) == []


def test_message_that_was_sent_and_not_noted_comes_twice_with_one_id(
    bench: Bench, stored: None, receiver: Receiver
) -> None:
    task = bench.function("give", 1, notify=(HOOK,))
    bench.put(task)
    run_killed(bench, "worker.notification_sent")
    age_claims(bench)

    bench.run()

    first, second = receiver.bodies
    assert first == second
    assert left(bench.records) == []


def test_sink_that_fails_is_tried_again_alone_and_then_given_up(
    bench: Bench, receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifying, "MOST_TRIES", 2)
    receiver.answers = [404, 410]
    note = tmp_path / "told"
    sinks = (HOOK, TaskSink(command=("sh", "-c", f"cat >> {note}; echo >> {note}")))
    task = bench.function("give", 1, notify=sinks)
    bench.put(task)

    bench.run()
    record = bench.record(task)
    assert left(bench.records) == [(f"{task.id}.g1", 1)]
    [line] = read_untold(bench.records, task, record)
    assert line == (
        "notification 0 (webhook) was not sent: the receiver answered HTTP 404; a worker of its queue tries again after 1 try"
    )
    bench.run()
    assert len(receiver.requests) == 1, "a try follows a pause"

    age_claims(bench)
    bench.run()

    assert (left(bench.records), len(note.read_text().splitlines())) == ([], 1)
    [line] = read_untold(bench.records, task, record)
    assert line == "notification 0 (webhook) was not sent: the receiver answered HTTP 410; given up after 2 tries"
    assert [event["next"] for event in bench.events("notification_failed")] == ["tried again later", "given up"]


def test_receiver_that_hangs_delays_no_task_and_no_lease(bench: Bench, receiver: Receiver) -> None:
    receiver.answers = [0]
    bench.put(bench.function("give", 1, notify=(HOOK,)))
    with bench.running():
        assert wait_until(lambda: bool(receiver.requests))
        after = bench.function("give", 2)
        bench.put(after)
        assert wait_until(lambda: bench.records.find(after.id, 1) is not None)
        receiver.over.set()

    assert bench.record(after).state is TaskState.SUCCEEDED


def test_receiver_that_hangs_holds_no_other_message_up(bench: Bench, receiver: Receiver, tmp_path: Path) -> None:
    receiver.answers = [0]
    note = tmp_path / "told"
    hung = bench.function("give", 1, notify=(HOOK,))
    told_at_once = bench.function("give", 2, notify=(TaskSink(command=("touch", str(note))),))
    bench.put(hung, told_at_once)
    with bench.running():
        assert wait_until(lambda: bool(receiver.requests))
        assert wait_until(lambda: told(bench.records, told_at_once) is not None)
        assert told(bench.records, hung) is None
        receiver.over.set()

    assert note.exists()


def test_receiver_that_hangs_holds_only_its_own_messages_up_however_many_they_are(
    bench: Bench, receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "NOTIFY_ANSWER_S", 1e6)
    receiver.answers = [0] * 1000
    to_hung = [bench.function("give", number, notify=(HOOK,)) for number in range(2 * AT_ONCE)]
    log = tmp_path / "told"
    append = TaskSink(command=("sh", "-c", f"echo x >>{log}"))
    to_other = [bench.function("give", -number, notify=(append,)) for number in range(1, 2 * AT_ONCE)]
    bench.put(*to_hung, *to_other)
    with bench.running():
        assert wait_until(lambda: all(told(bench.records, task) is not None for task in to_other))
        assert len(receiver.requests) <= TO_ONE
        receiver.over.set()

    assert log.read_text() == "x\n" * len(to_other)


def test_worker_that_leaves_ends_a_command_that_hangs(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.worker.worker.GRACE_FOR_MESSAGES_S", 0.0)
    mark = tmp_path / "mark"
    hangs = TaskSink(command=("sh", "-c", f"echo $$ >{mark}.new; mv {mark}.new {mark}; exec sleep 600"))
    bench.put(bench.function("give", 1, notify=(hangs,)))
    with bench.running():
        assert wait_until(mark.exists)

    pid = int(mark.read_text())
    assert wait_until(lambda: not is_running(pid))
    assert len(left(bench.records)) == 1


def test_command_gets_the_message_without_the_variables_of_the_worker_and_its_signals(
    bench: Bench, tmp_path: Path, receiver: Receiver
) -> None:
    heard = tmp_path / "heard"
    script = (
        "import json, os, signal, sys; json.dump([json.load(sys.stdin), sorted(os.environ), os.getcwd(),"
        f" len(signal.pthread_sigmask(signal.SIG_BLOCK, []))], open({str(heard)!r}, 'w')); print('printed')"
    )
    task = bench.function("give", 1, notify=(TaskSink(command=(sys.executable, "-c", script)),))
    bench.put(task)

    worker = start_command(bench, "--idle-timeout", "0.1s", RUNTIME_CANARY="x", PLAIN="y")
    said = worker.communicate(timeout=90)[1]

    event, names, folder, blocked = json.loads(heard.read_text())
    assert (event["task"], blocked) == (task.id, 0)
    assert ("PLAIN" in names, [name for name in names if name.startswith("RUNTIME_")]) == (True, [])
    assert Path(folder).is_relative_to(bench.folder / "tmp")
    assert "printed" not in said


def test_worker_that_accepts_no_commands_runs_none_for_a_message(bench: Bench, tmp_path: Path) -> None:
    task = bench.function("give", 1, notify=(TaskSink(command=("touch", str(tmp_path / "ran"))),))
    bench.put(task)

    bench.run(accept=frozenset({"function"}))

    assert not (tmp_path / "ran").exists()
    [event] = bench.events("notification_failed")
    assert (event["problem"], event["next"]) == ("this worker accepts no commands", "tried again later")


@pytest.mark.parametrize(
    ("reference", "problem"),
    [
        ("env://NO_SUCH_HOOK", "the worker has no variable `NO_SUCH_HOOK`"),
        ("file:///no/such/hook", "the worker cannot read `/no/such/hook`: no such file or directory"),
        (
            "secret-manager://hook",
            "the queue of this worker gives no secrets, and its URL is in secret-manager://hook",
        ),
    ],
)
def test_webhook_whose_url_the_worker_cannot_read_is_named_by_its_reference(
    bench: Bench, reference: str, problem: str
) -> None:
    bench.put(bench.function("give", 1, notify=(TaskSink(webhook=reference),)))

    bench.run()

    assert [event["problem"] for event in bench.events("notification_failed")] == [problem]


def test_file_that_holds_no_url_stays_unsaid(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "hook").write_text(SECRET)
    bench.put(bench.function("give", 1, notify=(TaskSink(webhook=f"file://{tmp_path}/hook"),)))

    bench.run()

    [event] = bench.events("notification_failed")
    assert event["problem"] == "its secret holds no URL that begins with https:// or http://"
    assert SECRET not in bench.log.getvalue()


def test_task_without_sinks_leaves_nothing_in_the_store(bench: Bench) -> None:
    with closing(MemoryRecords()) as records:
        queue = MemoryQueue(records)
        queue.put([bench.function("give", 1), bench.function("fail", max_failures=1)])

        bench.run(queue)

        assert [key for key in records.blobs.list_keys("") if key.startswith("notif")] == []


class NoMessages(MemoryBlobs):
    """A store that takes everything but messages."""

    def put(self, key: str, data: bytes) -> None:
        if key.startswith("notify/"):
            raise StoreUnavailable("no permission", retryable=False)
        super().put(key, data)

    def create(self, key: str, data: bytes) -> bool:
        if key.startswith("notify/"):
            raise StoreUnavailable("no permission", retryable=False)
        return super().create(key, data)


def test_store_that_refuses_messages_keeps_no_task_from_its_record(bench: Bench, receiver: Receiver) -> None:
    with closing(BlobRecords(NoMessages())) as records:
        queue = MemoryQueue(records)
        task = bench.function("give", 7, notify=(HOOK,))
        queue.put([task])

        bench.run(queue)

        assert bench.record(task, records=records).value == 7
    assert receiver.bodies == []
    [said] = bench.events("trouble")
    assert (said["what"], said["problem"]) == ("noting which messages are sent", "no permission")


def test_workers_beside_each_other_send_each_message_once(bench: Bench, stored: None, receiver: Receiver) -> None:
    tasks = [bench.function("give", number, notify=(HOOK,)) for number in range(24)]
    bench.put(*tasks)

    with bench.running(), bench.running(), bench.running():
        assert wait_until(lambda: all(told(bench.records, task) is not None for task in tasks))

    assert sorted(body["task"] for body in receiver.bodies) == sorted(task.id for task in tasks)
    assert left(bench.records) == []


# experiments


def submit(bench: Bench, queue: Queue, *numbers: int, **fields: Any) -> None:
    terms = {
        "experiment": EXPERIMENT,
        "snapshot": False,
        "notify": "env://TEST_HOOK",
        "notify_on": "complete",
        **fields,
    }
    work = [{"function": "worker_bodies:give", "args": [number]} for number in numbers]
    runtime.submit(work, queue=queue, **terms)


def test_experiment_is_told_of_once_when_all_its_tasks_have_ended(
    bench: Bench, stored: None, receiver: Receiver
) -> None:
    submit(bench, bench._queue, 1, 2, 3)
    submit(bench, bench._queue, 4)

    bench.run(max_tasks=2)
    assert receiver.bodies == []
    bench.run()
    bench.run()

    [body] = receiver.bodies
    assert {name: body[name] for name in ("experiment", "state", "counts", "text")} == {
        "experiment": EXPERIMENT,
        "state": "succeeded",
        "counts": {"succeeded": 4},
        "text": f"experiment {EXPERIMENT} is complete: 4 succeeded",
    }
    assert left(bench.records) == []

    submit(bench, bench._queue, 4)
    bench.run()
    assert len(receiver.bodies) == 1, "nothing was added"
    submit(bench, bench._queue, 5)
    bench.run()
    assert [body["counts"] for body in receiver.bodies] == [{"succeeded": 4}, {"succeeded": 5}]


def test_experiment_whose_last_worker_was_killed_is_told_of_by_the_next(
    bench: Bench, stored: None, receiver: Receiver
) -> None:
    submit(bench, bench._queue, 1)
    run_killed(bench, "worker.after_commit")
    assert receiver.bodies == []

    bench.run()

    assert [body["counts"] for body in receiver.bodies] == [{"succeeded": 1}]


def test_sinks_of_tasks_and_of_the_experiment_hear_each_of_their_own(bench: Bench, receiver: Receiver) -> None:
    submit(bench, bench._queue, 1, 2, notify_on=["succeeded", "complete"])

    bench.run()

    heard = [body.get("task", "all") for body in receiver.bodies]
    assert (len(heard), heard.count("all"), len({body["id"] for body in receiver.bodies})) == (3, 1, 3)


def test_queue_on_pubsub_tells_of_tasks_and_of_their_experiment(
    receiver: Receiver, tmp_path: Path, pubsub_emulator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from google.cloud import pubsub_v1

    topic, subscription = "projects/lab/topics/told", "projects/lab/subscriptions/told"
    (tmp_path / "records").mkdir()
    outputs = StackOutputs(
        stack="dev",
        records=RecordsOutput(url=f"file:{tmp_path}/records"),
        queues={"default": PubSubQueueOutput(topic=topic, subscription=subscription)},
    )
    (tmp_path / "dev.json").write_text(encode_outputs(outputs))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RUNTIME_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("RUNTIME_OUTPUTS", str(tmp_path / "dev.json"))
    with pubsub_v1.PublisherClient() as publisher, pubsub_v1.SubscriberClient() as subscriber:
        publisher.create_topic(name=topic)
        subscriber.create_subscription(request={"name": subscription, "topic": topic, "ack_deadline_seconds": 600})

    work = [{"command": ["true"], "key": "a"}, {"command": ["false"], "key": "b"}]
    terms: dict[str, Any] = {"notify": "env://TEST_HOOK", "notify_on": "failed,complete"}
    runtime.submit(work, experiment="told", snapshot=False, max_failures=1, **terms)
    runtime.run_worker(options=runtime.WorkerOptions(idle_timeout="1s", max_consecutive_failures=0))

    heard = {"task" in body: body for body in receiver.bodies}
    assert (len(receiver.bodies), heard[True]["state"], heard[True]["reason"]) == (2, "failed", "app_failed")
    assert heard[False]["counts"] == {"failed": 1, "succeeded": 1}
    assert not list((tmp_path / "records" / "notify").iterdir())
