"""`runtime submit`: the tasks that each form submits, its output, and its refusals."""

from __future__ import annotations

import io
import json
import re
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runtime.cli import submit as command
from runtime.cli import wait as wait_command
from runtime.cli.main import main
from runtime.client.tasks import publish
from runtime.end_reasons import EndReason
from runtime.outputs import (
    PubSubQueueOutput,
    RecordsOutput,
    SecretOutput,
    SqliteQueueOutput,
    StackOutputs,
    encode_outputs,
)
from runtime.queues.sqlite.queue import SqliteQueue, open_sqlite
from runtime.snapshots.environment import fetch_packages
from runtime.tasks.history import Mark, Record, Settlement
from runtime.tasks.model import CommandEntry, Resources, Task, TaskState, WorkflowEntry
from runtime.tasks.notification_sinks import TaskSink
from runtime.tasks.wire import decode_task
from tests.services_support import replace_sleep

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("RUNTIME_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)

    def call(*args: str) -> tuple[int, str, str]:
        code = main(["submit", *args])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def queue(run: Run, tmp_path: Path) -> Iterator[SqliteQueue]:
    queue, records = open_sqlite(tmp_path / "data" / "local.db")
    yield queue
    queue.close()
    records.close()


def feed(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(data), isatty=lambda: False))


def waiting(queue: SqliteQueue) -> list[Task]:
    return queue.peek(100)


def settle(queue: SqliteQueue, task_count: int, state: TaskState, message: str | None = None) -> None:
    for lease in queue.lease(task_count, worker="w", ttl=timedelta(minutes=1)):
        succeeded = state is TaskState.SUCCEEDED
        reason = EndReason.SUCCEEDED if succeeded else EndReason.APP_FAILED
        common: dict[str, Any] = {
            "task_id": lease.task.id, "generation": 1, "experiment": lease.task.experiment, "state": state,
            "reason": reason, "message": message,
        }  # fmt: skip
        record = Record(**common, token=lease.token, ended_at=datetime.now(UTC))
        mark = None if succeeded else Mark(**common, marked_at=datetime.now(UTC), task=lease.task)
        queue.settle([Settlement(lease, record, mark)])


def test_workflow_with_arguments_taken_as_they_are(run: Run, queue: SqliteQueue, tmp_path: Path) -> None:
    (tmp_path / "proj.py").write_text("def wf(path, n): ...")
    code, out, err = run("proj", "wf", '--path=it\'s {a} "b"', "--n", "3", "--", "-x", "--tags+=a\nb")

    (task,) = waiting(queue)
    assert code == 0
    assert task.entry == WorkflowEntry("proj", "wf", ('--path=it\'s {a} "b"', "--n", "3", "--", "-x", "--tags+=a\nb"))
    assert out == f"{task.id}\n"
    assert err == (
        "1 task submitted to queue `default` of stack `local`, experiment `default`\n"
        f"with the code of `{tmp_path}` as it is now, `{str(task.snapshot)[:19]}`\n"
        f"follow with `runtime status {task.id}`\n"
    )
    assert task.submitted_by


def test_command_behind_two_dashes(run: Run, queue: SqliteQueue) -> None:
    code, _, _ = run("--gpus", "0.5", "--", "python", "-c", "print('{x}')", "--", "--help")

    (task,) = waiting(queue)
    assert code == 0
    assert task.entry == CommandEntry(("python", "-c", "print('{x}')", "--", "--help"))
    assert task.resources == Resources(gpus=0.5)


def test_options_set_the_fields_of_the_task(run: Run, queue: SqliteQueue) -> None:
    run(
        "--experiment", "e", "--key", "k", "--timeout", "2h", "--max-failures", "5", "--expires", "7d", "--priority", "4",
        "--resources", "cpus=2,memory=1GiB", "--gpus", "1", "--outputs", "/o/1", "--outputs", "/o/2", "p", "w",
    )  # fmt: skip

    (task,) = waiting(queue)
    assert (task.experiment, task.key, task.timeout, task.max_failures) == ("e", "k", timedelta(hours=2), 5)
    assert (task.priority, task.outputs) == (4, ("/o/1", "/o/2"))
    assert task.resources == Resources(cpus=2, memory_bytes=2**30, gpus=1)
    assert task.expires_at is not None
    assert abs(task.expires_at - datetime.now(UTC) - timedelta(days=7)) < timedelta(minutes=1)


@pytest.fixture
def with_secrets(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SqliteQueue]:
    """The queue of a stack with a secret for all attempts and one for those that name it."""
    contract, path = tmp_path / "dev.json", tmp_path / "dev.db"
    hf = SecretOutput(resource="projects/p/secrets/hf", env="HF_TOKEN", attempts="all")
    wandb = SecretOutput(resource="projects/p/secrets/wandb", env="WANDB_API_KEY", attempts="named")
    queues = {"default": SqliteQueueOutput(path=str(path))}
    contract.write_text(
        encode_outputs(StackOutputs(stack="dev", queues=queues, secrets={"hf-token": hf, "wandb": wandb}))
    )
    monkeypatch.setenv("RUNTIME_OUTPUTS", str(contract))
    queue, records = open_sqlite(path)
    yield queue
    queue.close()
    records.close()


@pytest.mark.parametrize(
    ("options", "secrets"),
    [
        ((), None),
        (("--secret", "wandb"), ("wandb",)),
        (("--secret", "wandb", "--secret", "hf-token"), ("wandb", "hf-token")),
        (("--no-secrets",), ()),
    ],
)
def test_secrets_of_a_task_are_the_default_those_that_are_named_or_none(
    run: Run, with_secrets: SqliteQueue, options: tuple[str, ...], secrets: tuple[str, ...] | None
) -> None:
    code, _, said = run("--no-snapshot", *options, "--", "true")

    assert code == 0, said
    assert [task.secrets for task in waiting(with_secrets)] == [secrets]


def test_line_that_names_its_secrets_comes_before_the_option(
    run: Run, with_secrets: SqliteQueue, tmp_path: Path
) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_text(
        '{"command": ["a"], "secrets": []}\n{"command": ["b"]}\n{"command": ["c"], "secrets": ["hf-token"]}\n'
    )

    assert run("--no-snapshot", "--secret", "wandb", "--from", str(lines))[0] == 0

    assert {task.entry.command[0]: task.secrets for task in waiting(with_secrets)} == {  # type: ignore[union-attr]
        "a": (),
        "b": ("wandb",),
        "c": ("hf-token",),
    }


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--secret", "wandbb", "--", "true"), "did you mean `wandb`?"),
        (("--secret", "wandb", "--no-secrets", "--", "true"), "contradict each other"),
        (("--secret", "wandb", "--queue", "sqlite:other.db", "--", "true"), "named by its URL"),
        (("--secret", "WANDB_API_KEY=sk-123", "--", "true"), "`--secret[0]` is no name of a secret"),
        (("--secret", "sk_AAAABBBB", "--", "true"), "it may be a value"),
    ],
)
def test_secret_that_no_attempt_can_get_is_refused_before_anything_is_sent(
    run: Run, with_secrets: SqliteQueue, args: tuple[str, ...], said: str
) -> None:
    code, out, err = run("--no-snapshot", *args)

    assert (code, out) == (2, "")
    assert said in err
    assert not re.search("sk-123|AAAABBBB", err)
    assert waiting(with_secrets) == []


def test_secret_is_refused_on_the_built_in_stack(run: Run, queue: SqliteQueue) -> None:
    code, _, said = run("--no-snapshot", "--secret", "hf-token", "--", "true")

    assert code == 2
    assert "stack `local` exports no `secrets`, and secret `hf-token` needs it" in said
    assert waiting(queue) == []


def test_delayed_task_waits(run: Run, queue: SqliteQueue) -> None:
    assert run("--delay", "10m", "p", "w")[0] == 0
    depth = queue.depth()
    assert depth is not None
    assert (depth.ready, depth.delayed) == (0, 1)


def test_grid_of_a_workflow_adds_options(run: Run, queue: SqliteQueue) -> None:
    code, out, _ = run("-e", "sweep", "--grid", "lr=1e-3,1e-4", "--grid", "seed=0:2", "p", "w", "--out=/o/{seed}")

    assert (code, out) == (0, "sweep\n")
    assert [task.entry.args for task in waiting(queue) if isinstance(task.entry, WorkflowEntry)] == [
        ("--out=/o/0", "--lr=1e-3", "--seed=0"),
        ("--out=/o/1", "--lr=1e-3", "--seed=1"),
        ("--out=/o/0", "--lr=1e-4", "--seed=0"),
        ("--out=/o/1", "--lr=1e-4", "--seed=1"),
    ]


def test_grid_of_a_command_replaces_its_names_in_command_key_and_outputs(run: Run, queue: SqliteQueue) -> None:
    code, _, _ = run(
        "--grid", "seed=0:2", "--key", "run-{seed}", "--outputs", "/o/{seed}.json", "--", "train", "{seed}", '{"a": {}}'
    )

    assert code == 0
    assert [(task.entry, task.key, task.outputs) for task in waiting(queue)] == [
        (CommandEntry(("train", "0", '{"a": {}}')), "run-0", ("/o/0.json",)),
        (CommandEntry(("train", "1", '{"a": {}}')), "run-1", ("/o/1.json",)),
    ]


def test_file_gives_its_tasks_and_their_experiment(run: Run, queue: SqliteQueue, tmp_path: Path) -> None:
    (tmp_path / "tiles.jsonl").write_text(
        '{"project": "p", "workflow": "w", "args": ["--x=1"]}\n{"command": ["ls"], "timeout_s": 5, "colour": "red"}\n'
    )

    code, out, _ = run("--from", "tiles.jsonl", "--timeout", "1h")

    assert (code, out) == (0, "tiles\n")
    first, second = waiting(queue)
    assert (first.experiment, first.timeout) == ("tiles", timedelta(hours=1))
    assert (second.timeout, second.extra) == (timedelta(seconds=5), {"colour": "red"})


def test_standard_input_needs_an_experiment(run: Run, queue: SqliteQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    feed(monkeypatch, b'{"command": ["ls"]}\n')
    code, _, err = run("--from", "-")
    assert code == 2
    assert "need an experiment" in err

    code, out, _ = run("--from", "-", "--experiment", "piped")
    assert (code, len(waiting(queue))) == (0, 1)
    assert out == f"{waiting(queue)[0].id}\n"


def test_submitted_again_it_says_what_was_known_and_what_is_the_same(
    run: Run, queue: SqliteQueue, tmp_path: Path
) -> None:
    lines = [json.dumps({"command": ["echo", str(n)]}) for n in (1, 2, 3, 1)]
    (tmp_path / "t.jsonl").write_text("\n".join(lines[:2]))
    run("--from", "t.jsonl")
    (tmp_path / "t.jsonl").write_text("\n".join(lines))

    code, _, err = run("--no-snapshot", "--from", "t.jsonl")

    assert code == 0
    assert err.splitlines()[:3] == [
        "1 task submitted to queue `default` of stack `local`, experiment `t`",
        "2 of 4 were already submitted",
        "1 of 4 lines repeat an earlier one: without a `key` of its own, what runs the same is one task",
    ]
    assert len(waiting(queue)) == 3


def test_bad_line_stops_with_line_field_and_what_stands(
    run: Run, queue: SqliteQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish.Direct, "part_tasks", 2)
    lines = [json.dumps({"command": ["echo", str(n)]}) for n in range(3)]
    (tmp_path / "t.jsonl").write_text("\n".join([*lines, '{"command": ["ls"], "timeout_s": "2h"}']))

    code, out, err = run("--from", "t.jsonl")

    assert (code, out) == (2, "")
    assert err == (
        "error: task on line 4 is malformed: `timeout_s` is '2h', expected seconds above 0 and below 1,000,000,000\n"
        "  2 tasks before it are submitted and stand; 1 after those were not submitted\n"
        "hint: docs/task-format.md has every field with an example\n"
    )
    assert len(waiting(queue)) == 2


def test_snapshot_binds_the_tasks_to_the_code_as_it_is(run: Run, queue: SqliteQueue, tmp_path: Path) -> None:
    from runtime.shim.tree import unpack
    from runtime.snapshots.snapshot import fetch_snapshot

    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text("print(1)\n")
    _, planned, _ = run("--dry-run", "--snapshot", "code", "--", "python", "train.py")

    code, _, _ = run("--snapshot", "code", "--", "python", "train.py")
    (tmp_path / "code" / "train.py").write_text("print(2)\n")

    (task,) = waiting(queue)
    assert code == 0
    assert task.snapshot is not None
    assert task.snapshot == decode_task(planned).snapshot
    unpack(fetch_snapshot(task.snapshot, queue.records), str(tmp_path / "restored"))
    assert (tmp_path / "restored" / "train.py").read_text() == "print(1)\n"


def test_skip_existing_leaves_out_what_is_done(run: Run, queue: SqliteQueue, tmp_path: Path) -> None:
    (tmp_path / "0").touch()

    _, _, err = run("--grid", "n=0:3", "--outputs", f"{tmp_path}/{{n}}", "--skip-existing", "--", "make", "{n}")

    assert "1 of 3 skipped: their outputs exist" in err
    assert [task.outputs for task in waiting(queue)] == [(f"{tmp_path}/1",), (f"{tmp_path}/2",)]


def test_json_output_has_every_count_and_the_ids(run: Run, queue: SqliteQueue) -> None:
    _, out, _ = run("-o", "json", "--grid", "n=0:2", "p", "w")

    task, _ = waiting(queue)
    assert task.snapshot is not None
    assert json.loads(out) == {
        "experiment": "default",
        "queue": "default",
        "stack": "local",
        "new": 2,
        "known": 0,
        "same": 0,
        "known_other": 0,
        "same_other": 0,
        "skipped": 0,
        "resumed": 0,
        "snapshot": task.snapshot,
        "environment": None,
        "kept_code": None,
        "ids": [task.id for task in waiting(queue)],
    }


def test_environment_goes_with_tasks_and_is_stored_once(run: Run, queue: SqliteQueue, tmp_path: Path) -> None:
    Path("locked.txt").write_text("six==1.17.0\n")

    for name in ("a", "b"):
        code, _, err = run("--environment", "locked.txt", "--with", "six==1.16.0", "--", name)
        assert code == 0, err
        assert "with the packages of `locked.txt` (Python " in err

    (identity,) = {task.environment for task in waiting(queue)}
    assert identity is not None
    assert fetch_packages(identity, queue.records).files == {"requirements.txt": "six==1.16.0\n"}


def test_dry_run_prints_the_tasks_and_touches_nothing(run: Run, tmp_path: Path) -> None:
    code, out, err = run("--dry-run", "--grid", "n=0:2", "p", "w")

    assert code == 0
    assert [decode_task(line).entry for line in out.splitlines()] == [
        WorkflowEntry("p", "w", ("--n=0",)),
        WorkflowEntry("p", "w", ("--n=1",)),
    ]
    assert err == "dry run: 2 tasks, nothing submitted\n"
    assert not (tmp_path / "data").exists()
    _, out, _ = run("--dry-run", "-o", "json", "p", "w")
    assert [task["workflow"] for task in json.loads(out)] == ["w"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "needs to know what to run"),
        (["--"], "needs to know what to run"),
        (["proj"], "needs the name of a workflow"),
        (["--from", "t.jsonl", "p", "w"], "both say what to run"),
        (["--from", "t.jsonl", "--", "ls"], "both say what to run"),
        (["--from", "t.jsonl", "--grid", "a=1"], "`--grid` does not go with `--from`"),
        (["--from", "t.jsonl", "--key", "k"], "`--key` does not go with `--from`"),
        (["--from", "nowhere.jsonl"], "no such file"),
        (["--grid", "a=0:3", "--", "ls"], "nowhere in the command"),
        (["--grid", "a", "p", "w"], "is no valid grid"),
        (["--timeout", "soon", "p", "w"], "is no valid timeout"),
        (["--max-failures", "-1", "p", "w"], "--max-failures"),
        (["--resources", "gpu=1", "p", "w"], "is no valid resources"),
        (["--gpus", "1.5", "p", "w"], "expected a whole number or a part below 1"),
        (["--experiment", "a/b", "p", "w"], "is no valid experiment"),
        (["--key", "", "p", "w"], "`--key` is empty"),
        (["--queue", "sqlite:", "p", "w"], "is no valid queue"),
        (["--stack", "nosuch", "p", "w"], "no stack named `nosuch`"),
        (["--waitt", "p", "w"], "did you mean `--wait`?"),
        (["--environment", "nowhere.lock", "p", "w"], "cannot read the lock file `nowhere.lock`"),
        (["--environment", "", "p", "w"], "is no valid environment"),
        (["--environment", "none", "--with", "six==1.17", "p", "w"], "adds to an environment, and the tasks have none"),
        (["--environment", "none", "--with", "six", "p", "w"], "adds to an environment, and the tasks have none"),
    ],
)
def test_request_that_makes_no_sense_is_refused(run: Run, args: list[str], said: str) -> None:
    code, out, err = run(*args)

    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert said in err


def test_option_behind_the_project_goes_to_the_workflow_and_is_pointed_out(run: Run, queue: SqliteQueue) -> None:
    _, _, err = run("p", "w", "--wait")

    assert "`--wait` follows PROJECT, so it goes to the workflow" in err
    assert waiting(queue)[0].entry == WorkflowEntry("p", "w", ("--wait",))


def test_priority_is_refused_on_a_queue_that_keeps_none(run: Run, tmp_path: Path) -> None:
    (tmp_path / "records").mkdir()
    outputs = StackOutputs(
        stack="dev",
        records=RecordsOutput(url=f"file:{tmp_path}/records"),
        queues={
            "default": PubSubQueueOutput(topic="projects/p/topics/tasks", subscription="projects/p/subscriptions/tasks")
        },
    )
    (tmp_path / "dev.json").write_text(encode_outputs(outputs))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RUNTIME_OUTPUTS", str(tmp_path / "dev.json"))
        code, _, err = run("--priority", "3", "p", "w")

    assert code == 2
    assert "queue `default` keeps no priorities" in err


def in_the_wait(queue: SqliteQueue, act: Callable[[], None]) -> Callable[[float], None]:
    """Return what acts in place of a sleep while the command waits for its tasks."""
    sleep = time.sleep

    def instead(seconds: float) -> None:
        if waiting(queue):
            act()
        else:
            sleep(seconds)  # A sleep outside the wait, since submitting waits for programs too.

    return instead


def test_wait_returns_with_the_work(run: Run, queue: SqliteQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    instead = in_the_wait(queue, lambda: settle(queue, 5, TaskState.SUCCEEDED))
    replace_sleep(monkeypatch, instead)

    code, out, err = run("--wait", "-o", "json", "--grid", "n=0:2", "p", "w")

    assert code == 0
    fields = json.loads(out)
    assert (fields["totals"]["succeeded"], fields["failed"]) == (2, 0)
    assert set(fields["totals"]) == {state.value for state in TaskState}
    assert "2 succeeded" in err


def test_wait_exits_1_and_names_what_failed(run: Run, queue: SqliteQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    instead = in_the_wait(queue, lambda: settle(queue, 1, TaskState.FAILED, "Traceback …\nValueError: boom"))
    replace_sleep(monkeypatch, instead)

    code, out, err = run("--wait", "p", "w")

    assert code == 1
    assert f"  {out.strip()}: ValueError: boom\n" in err
    assert f"`runtime explain {out.strip()}`" in err


@pytest.mark.parametrize("where", ["stack", "url"])
def test_wait_without_a_live_worker_says_why_it_waits(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(wait_command, "SAY_WHY_AFTER_S", 0.0)
    path = tmp_path / ("data/local.db" if where == "stack" else "other.db")
    url = [] if where == "stack" else ["--queue", f"sqlite:{path}"]

    sleep = time.sleep

    def work(seconds: float) -> None:
        if not path.exists():
            sleep(seconds)  # A sleep outside the wait, since submitting waits for programs too.
            return
        queue, _ = open_sqlite(path)
        settle(queue, 5, TaskState.SUCCEEDED)
        queue.close()

    replace_sleep(monkeypatch, work)

    code, _, err = run("--wait", *url, "p", "w")

    assert code == 0
    assert "waiting: no live worker serves queue `default`; next: `runtime worker --queue default`\n" in err


def test_reason_is_said_after_five_seconds_and_again_only_when_it_is_another() -> None:
    now, said, why = [100.0], [], ["no live worker"]
    reason = wait_command.Reason(lambda: why[0], clock=lambda: now[0], write=said.append)

    seen = []
    for at, is_so in (
        (104.9, "no live worker"),
        (105, "no live worker"),
        (106, "paused"),
        (136, "paused"),
        (170, "paused"),
    ):
        now[0], why[0] = at, is_so
        reason.say()
        seen.append(len(said))

    assert seen == [0, 1, 1, 2, 2]
    assert said == ["waiting: no live worker", "waiting: paused"]


def test_wait_says_nothing_of_reasons_once_all_has_ended(
    run: Run, queue: SqliteQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wait_command, "SAY_WHY_AFTER_S", 0.0)
    run("p", "w")
    settle(queue, 1, TaskState.SUCCEEDED)

    code, _, err = run("--wait", "p", "w")

    assert code == 0
    assert "waiting: " not in err.replace("waiting for", "")


def test_interrupted_wait_detaches(run: Run, queue: SqliteQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    replace_sleep(monkeypatch, in_the_wait(queue, interrupt))

    code, _, err = run("--wait", "p", "w")

    (task,) = waiting(queue)
    assert code == 130
    assert err.endswith(f"detached, the work goes on; come back with `runtime wait {task.id}`\n")


def test_interrupted_submission_says_what_is_safe(
    run: Run, queue: SqliteQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish.Direct, "part_tasks", 2)
    original = SqliteQueue.put

    def put(self: SqliteQueue, tasks: Any) -> Any:
        if len(waiting(self)) >= 4:
            raise KeyboardInterrupt
        return original(self, tasks)

    monkeypatch.setattr(SqliteQueue, "put", put)

    code, _, err = run("--grid", "n=0:9", "p", "w")

    assert code == 130
    assert err.endswith("interrupted: 4 tasks dealt with and safe; run the same command again to go on\n")
    monkeypatch.undo()


def test_long_input_shows_how_far_it_is(run: Run, queue: SqliteQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "SHOW_PROGRESS_FROM", 3)

    _, _, err = run("--grid", "n=0:3", "p", "w")

    assert "submitting default: 3 of 3" in err


def test_help_shows_how(run: Run) -> None:
    code, out, _ = run("--help")

    assert code == 0
    assert "runtime submit --from tiles.jsonl" in out
    assert "--skip-existing" in out


def test_submission_through_pubsub_publishes_each_task_once(
    run: Run, tmp_path: Path, pubsub_emulator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from google.api_core.exceptions import DeadlineExceeded
    from google.cloud import pubsub_v1

    topic, subscription = "projects/lab/topics/tasks", "projects/lab/subscriptions/tasks"
    (tmp_path / "records").mkdir()
    outputs = StackOutputs(
        stack="dev",
        records=RecordsOutput(url=f"file:{tmp_path}/records"),
        queues={"default": PubSubQueueOutput(topic=topic, subscription=subscription)},
    )
    (tmp_path / "dev.json").write_text(encode_outputs(outputs))
    (tmp_path / "t.jsonl").write_text("".join(f'{{"command": ["echo", "{n}"]}}\n' for n in (1, 2, 3, 1)))
    monkeypatch.setenv("RUNTIME_OUTPUTS", str(tmp_path / "dev.json"))
    with pubsub_v1.PublisherClient() as publisher, pubsub_v1.SubscriberClient() as subscriber:
        publisher.create_topic(name=topic)
        subscriber.create_subscription(request={"name": subscription, "topic": topic, "ack_deadline_seconds": 600})

        assert [run("--from", "t.jsonl", "-o", "json")[0] for _ in range(2)] == [0, 0]
        assert run("--", "echo", "4")[0] == 0

        received: list[Task] = []
        while len(received) < 4:
            answer = subscriber.pull(subscription=subscription, max_messages=10, timeout=240)
            received += [decode_task(message.message.data) for message in answer.received_messages]
            ids = [message.ack_id for message in answer.received_messages]
            subscriber.acknowledge(subscription=subscription, ack_ids=ids)
        try:
            left = list(subscriber.pull(subscription=subscription, max_messages=10, timeout=1).received_messages)
        except DeadlineExceeded:
            left = []
    assert left == []
    assert sorted(task.entry.command[1] for task in received if isinstance(task.entry, CommandEntry)) == list("1234")


# who hears


@pytest.fixture
def sinks(tmp_path: Path) -> None:
    text = (
        '[notify.oncall]\nwebhook = "env://HOOK"\non = "failed"\n[notify.log]\ntopic = "projects/our-lab/topics/ends"\n'
    )
    (tmp_path / "runtime.toml").write_text(text)


def test_submitted_tasks_carry_their_sinks_and_the_store_the_others(run: Run, queue: SqliteQueue, sinks: None) -> None:
    code, _, _ = run(
        "--notify", "oncall", "--notify", "file:///etc/hook", "--notify-on", "failed,complete", "--", "true"
    )

    assert code == 0
    [lease] = queue.lease(1, worker="w", ttl=timedelta(minutes=1))
    assert lease.task.notify == (
        TaskSink(webhook="env://HOOK", on=("failed",)),
        TaskSink(webhook="file:///etc/hook", on=("failed",)),
    )
    store = queue.records.open_notifications()
    [opened] = store.find_open()
    message = store.read(opened.name)
    assert message is not None
    assert (message.experiment, message.task, [sink.webhook for sink in message.sinks]) == (
        "default",
        None,
        ["env://HOOK", "file:///etc/hook"],
    )


def test_dry_run_shows_the_sinks_of_tasks_and_writes_none(run: Run, tmp_path: Path, sinks: None) -> None:
    _, out, _ = run("--dry-run", "--notify", "log", "--notify", "oncall", "--", "true")

    assert json.loads(out)["notify"] == [
        {"topic": "projects/our-lab/topics/ends"},
        {"webhook": "env://HOOK", "on": ["failed"]},
    ]
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--notify", "oncal"], "error: no sink named `oncal` in the project's settings\n  known sinks: log, oncall"),
        (["--notify", "log", "--notify-on", "done"], "error: `done` is no valid notify_on"),
        (["--notify-on", "failed"], "error: `notify_on` says when, and nobody is named"),
        (["--notify", "https://hooks.example/canary-4711"], "error: `notify` has a `webhook` that is no reference"),
        (["--notify", "hooks.example/canary-4711"], "error: `notify` is neither the name of a sink"),
        (["--notify", "secret-manager://hook"], "error: stack `local` exports no `secrets`"),
    ],
)
@pytest.mark.usefixtures("sinks")
def test_sink_that_no_worker_can_send_to_is_refused(run: Run, options: list[str], said: str) -> None:
    code, _, err = run(*options, "--", "true")

    assert (code, said in err, "canary-4711" in err) == (2, True, False), err
