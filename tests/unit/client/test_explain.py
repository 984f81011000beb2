"""Why a task waits or failed: the decision from the facts, and the facts that are read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from runtime.client.tasks.cancel import cancel_experiment, cancel_task
from runtime.client.tasks.explain import Facts, explain, explain_experiment, explain_worker, read_facts
from runtime.client.tasks.redrive import purge_dead, read_dead, redrive
from runtime.client.tasks.status import read_experiment
from runtime.client.tasks.task_facts import TaskFacts, WorkerStatus, worker_status
from runtime.end_reasons import EndReason
from runtime.errors import QueueUnavailable, UnknownName
from runtime.queues.base import Depth
from runtime.records.base import WorkerSeen
from runtime.tasks.history import EndedNote, History, Mark, Record
from runtime.tasks.model import Resources, Task, TaskState
from runtime.testing import sample_task
from tests.conformance.records_cases import cancel_order
from tests.verbs_support import Bench

NOW = datetime(2026, 1, 2, 12, tzinfo=UTC)
TASK = sample_task(id="t-1")


def facts(state: TaskState = TaskState.QUEUED, *, task: Task | None = TASK, **fields: Any) -> Facts:
    """Build the facts of task `t-1`; keywords are fields of `Facts` and `TaskFacts`."""
    ours = {name: fields.pop(name) for name in list(fields) if name in TaskFacts.__dataclass_fields__}
    standing = TaskFacts(task_id="t-1", experiment="sample", generation=1, state=state, task=task)
    return Facts(standing=replace(standing, **ours), queue="default", now=NOW, **fields)


def worker(name: str = "w-one", *, silent_s: float = 5, **fields: Any) -> WorkerStatus:
    defaults: dict[str, Any] = {
        "host": "node1",
        "queue": "default",
        "seen_at": NOW - timedelta(seconds=silent_s),
        "started_at": NOW - timedelta(hours=1),
        "slots": 2,
    }
    return worker_status(WorkerSeen(worker=name, **(defaults | fields)), NOW)


def note(reason: EndReason = EndReason.APP_FAILED, *, ago_s: float = 60, **fields: Any) -> EndedNote:
    at = NOW - timedelta(seconds=ago_s)
    defaults: dict[str, Any] = {"token": f"{ago_s}", "started_at": at - timedelta(seconds=10), "worker": "w-one"}
    return EndedNote(reason=reason, ended_at=at, **(defaults | fields))


def record(state: TaskState, reason: EndReason, **fields: Any) -> Record:
    defaults: dict[str, Any] = {
        "token": "feed",
        "ended_at": NOW - timedelta(minutes=5),
        "started_at": NOW - timedelta(minutes=6),
        "worker": "w-one",
    }
    return Record(task_id="t-1", generation=1, experiment="sample", state=state, reason=reason, **(defaults | fields))


def failed(reason: EndReason = EndReason.APP_FAILED, *, ended: tuple[EndedNote, ...] = (), **fields: Any) -> Facts:
    one = record(TaskState.FAILED, reason, **({"attempts": len(ended) + 1} | fields))
    return facts(TaskState.FAILED, recorded=(one,), history=History(ended))


# queued


def test_queued_with_live_workers_says_its_place() -> None:
    explained = explain(facts(workers=(worker(rate_per_s=0.5),), ahead=20, depth=Depth(21, 0, 2), history=History()))

    assert explained.sentence == "task `t-1` waits for its turn: 20 tasks before it, about 40s at the present rate"
    assert "queue `default`: 21 ready, 0 delayed, 2 leased" in explained.evidence
    assert explained.hint is None


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ({"ahead": 0}, "it is next"),
        ({"ahead": 1}, "1 task before it"),
        ({"ahead_at_least": 1000}, "more than 1,000 tasks before it"),
        ({}, "its place in the queue cannot be seen"),
    ],
)
def test_queued_place_is_said_as_far_as_it_is_known(place: dict[str, int], said: str) -> None:
    assert explain(facts(workers=(worker(),), **place)).sentence == f"task `t-1` waits for its turn: {said}"


def test_queued_without_a_live_worker_names_those_that_were_there() -> None:
    explained = explain(facts(workers=(worker("w-quiet", silent_s=600), worker("w-gone", silent_s=60, left=True))))

    assert explained.sentence == "task `t-1` waits because no live worker serves queue `default`"
    assert explained.evidence[:2] == (
        "worker `w-gone` on `node1` left 1m ago",
        "worker `w-quiet` on `node1` was last heard of 10m ago",
    )
    assert explained.hint == "runtime worker --queue default"


def test_queued_where_no_worker_ever_was() -> None:
    assert explain(facts()).evidence == ("no worker of queue `default` was seen in the last day",)


def test_paused_queue_is_the_reason_even_with_workers() -> None:
    explained = explain(facts(paused=True, workers=(worker(),), ahead=0))

    assert explained.sentence == "task `t-1` waits because queue `default` is paused"
    assert explained.hint == "runtime queue resume default"


def test_task_that_no_worker_can_hold_names_the_resource() -> None:
    why = "needs 4 GPUs, the largest slot has 1"
    workers = (worker("w-a", declined={"t-1": why}), worker("w-b", declined={"t-1": why}))

    explained = explain(facts(workers=workers, task=replace(TASK, resources=Resources(gpus=4))))

    assert explained.sentence == f"task `t-1` waits because none of 2 live workers can hold it: {why}"
    assert f"worker `w-a`: {why}" in explained.evidence
    assert explained.hint is not None


def test_task_whose_secret_no_worker_may_read_is_explained_with_the_secret_and_the_next_step() -> None:
    why = "cannot read secret `hf-token` of stack `dev`: this identity may not"

    explained = explain(facts(workers=(worker("w-a", declined={"t-1": why}),)))

    assert why in explained.sentence
    assert (explained.hint or "").startswith("`runtime doctor` on a worker's machine")


def test_task_that_was_declined_and_waits_for_the_next_look_is_not_blamed_on_its_submitter() -> None:
    due = NOW + timedelta(seconds=30)
    everyone = facts(workers=(worker("w-a", declined={"t-1": "wants 4 GPUs"}),), due=due)
    some = replace(everyone, workers=(*everyone.workers, worker("w-b")))

    assert "none of 1 live worker can hold it: wants 4 GPUs" in explain(everyone).sentence
    assert "was given back unstarted by a worker and is due again at 2026-01-02T12:00:30.000Z" in explain(some).sentence
    assert "worker `w-a` declined it: wants 4 GPUs" in explain(some).evidence


def test_task_that_only_some_workers_decline_waits_for_its_turn() -> None:
    workers = (worker("w-a", declined={"t-1": "too small"}), worker("w-b"))

    explained = explain(facts(workers=workers, ahead=0))

    assert explained.sentence == "task `t-1` waits for its turn: it is next"
    assert "worker `w-a` declined it: too small" in explained.evidence


def test_delayed_retry_says_what_failed_and_when_it_goes_on() -> None:
    due = NOW + timedelta(seconds=90)
    ended = (note(message="Traceback\nValueError: nan"),)

    explained = explain(facts(workers=(worker(),), due=due, history=History(ended)))

    assert explained.sentence == (
        "task `t-1` waits to be tried again at 2026-01-02T12:01:30.000Z (in 1m30s): attempt 1 failed"
    )
    assert explained.evidence[:2] == ("attempt 1 said: ValueError: nan", "1 of 3 failures spent")
    assert "attempt 1 on worker `w-one`: failed after 10s: ValueError: nan" in explained.evidence


def test_delayed_retry_on_a_queue_that_cannot_say_when_is_a_span_of_time() -> None:
    ended = tuple(note(ago_s=ago) for ago in (300, 200, 100, 2))
    task = replace(TASK, max_failures=9)

    explained = explain(facts(workers=(worker(),), task=task, history=History(ended)))

    # The fourth failure in a row waits 8 s, spread over 4 to 12.
    assert "between 2026-01-02T12:00:02.000Z and 2026-01-02T12:00:10.000Z (in 10s)" in explained.sentence
    assert "attempt 4 failed" in explained.sentence


def test_preempted_attempt_leaves_the_failure_budget_untouched() -> None:
    due = NOW + timedelta(seconds=2)

    explained = explain(facts(workers=(worker(),), due=due, history=History((note(EndReason.PREEMPTED),))))

    assert "attempt 1 was preempted" in explained.sentence
    assert any("its failure budget is untouched" in line for line in explained.evidence)
    assert any("spent no failure" in line for line in explained.evidence)


def test_delay_of_the_submitter_is_told_from_a_retry() -> None:
    task = replace(TASK, not_before=NOW + timedelta(hours=2))

    explained = explain(facts(workers=(worker(),), task=task))

    assert explained.sentence == "task `t-1` is delayed by its submitter until 2026-01-02T14:00:00.000Z (in 2h)"


def test_delayed_task_without_workers_names_both() -> None:
    explained = explain(facts(due=NOW + timedelta(minutes=1), history=History((note(),))))

    assert "waits to be tried again" in explained.sentence
    assert "no live worker serves queue `default` to take it then" in explained.evidence
    assert explained.hint == "runtime worker --queue default"


def test_queued_task_that_an_order_covers_says_so() -> None:
    explained = explain(facts(cancelled=True, cancel_ordered_at=NOW - timedelta(seconds=5)))

    assert explained.sentence.startswith("task `t-1` was cancelled at 2026-01-02T11:59:55.000Z; the worker that comes")


def test_task_that_no_order_covers_is_not_cancelled() -> None:
    explained = explain(facts(cancel_ordered_at=NOW - timedelta(seconds=5), workers=(worker(),), ahead=0))

    assert explained.sentence == "task `t-1` waits for its turn: it is next"


def test_queued_task_past_its_expiry_says_so() -> None:
    task = replace(TASK, expires_at=NOW - timedelta(seconds=1))

    assert "expired at" in explain(facts(task=task, workers=(worker(),))).sentence


def test_queue_that_cannot_be_asked_is_evidence() -> None:
    explained = explain(facts(workers=(worker(),), queue_problem="permission denied"))

    assert "queue `default` could not be asked: permission denied" in explained.evidence


# leased


def test_leased_task_names_its_worker_and_since_when() -> None:
    held = facts(
        TaskState.LEASED, holder="w-one", held_since=NOW - timedelta(minutes=4), workers=(worker(running=("t-1",)),)
    )

    explained = explain(held)

    assert explained.sentence == "task `t-1` runs on worker `w-one`, for 4m so far"
    assert explained.hint == "runtime logs -f t-1"


def test_leased_task_of_a_silent_worker_goes_back_when_the_lease_ends() -> None:
    explained = explain(facts(TaskState.LEASED, holder="w-one", workers=(worker(silent_s=300),)))

    assert "which was last heard of 5m ago; it goes back when its lease ends" in explained.sentence
    assert explained.hint == "runtime worker --queue default"


def test_leased_task_that_was_cancelled_is_about_to_stop() -> None:
    explained = explain(facts(TaskState.LEASED, holder="w-one", cancelled=True, workers=(worker(),)))

    assert explained.sentence == "task `t-1` was cancelled; worker `w-one` stops it at its next look, within 10 s"


# ended


def test_failed_task_says_which_budget_is_spent_and_how_each_attempt_ended() -> None:
    ended = (note(ago_s=900, message="nan"), note(EndReason.OOM, ago_s=600))

    explained = explain(failed(ended=ended, message="Traceback …\nValueError: nan", exit_code=1))

    assert explained.sentence == ("task `t-1` failed, 3 of 3 failures spent, the last attempt failed: ValueError: nan")
    assert explained.evidence == (
        "Traceback …",
        "ValueError: nan",
        "exit code 1",
        "attempt 1 on worker `w-one`: failed after 10s: nan",
        "attempt 2 on worker `w-one`: ran out of memory after 10s",
        "attempt 3 on worker `w-one`: failed after 1m",
    )
    assert explained.hint is not None
    assert "runtime logs t-1" in explained.hint


def test_failed_task_whose_failures_are_not_retried_spent_one_of_one() -> None:
    seen = failed()
    once = replace(seen, standing=replace(seen.standing, task=replace(TASK, max_failures=0)))

    explained = explain(once)

    assert "1 of 1 failure spent" in explained.sentence


def test_failed_for_memory_points_at_resources() -> None:
    assert "resources" in (explain(failed(EndReason.OOM)).hint or "")


def test_badly_called_task_is_not_blamed_on_a_budget() -> None:
    explained = explain(failed(EndReason.CONFIG_INVALID, message="train() got an unexpected argument --lrr"))

    assert explained.sentence == (
        "task `t-1` failed at once, because trying again would not help: train() got an unexpected argument --lrr"
    )


def test_crasher_is_told_from_lost_machines() -> None:
    ended = tuple(note(EndReason.LOST, ago_s=ago, alone=True, worker=f"w-{ago}") for ago in (900, 600, 300))

    known = "its worker was lost on 3 hosts one after the other (a, b, c); what ended the workers is not known"
    explained = explain(failed(EndReason.LOST, ended=ended, attempts=3, token="300", message=known))

    assert explained.sentence == f"task `t-1` was buried as a crasher: {known}"
    assert [line for line in explained.evidence if line.startswith("attempt")][2:] == [
        "attempt 3 on worker `w-300`: was lost with its worker after 10s, spent no failure"
    ]


def test_preemptions_that_used_up_their_budget_are_named() -> None:
    ended = tuple(note(EndReason.PREEMPTED, ago_s=1000 - number) for number in range(99))

    explained = explain(failed(EndReason.PREEMPTED, ended=ended))

    assert (
        explained.sentence == "task `t-1` failed, its preemption budget of 100 is spent, the last attempt was preempted"
    )
    assert "90 earlier attempts not shown" in explained.evidence


def test_malformed_dead_letter_shows_what_came() -> None:
    one = record(TaskState.FAILED, EndReason.CONFIG_INVALID, attempts=0, message="`project` is a number")
    mark = Mark(
        task_id="t-1",
        generation=1,
        experiment="sample",
        state=TaskState.FAILED,
        marked_at=NOW,
        reason=EndReason.CONFIG_INVALID,
        message=one.message,
        task=None,
        raw='{"project": 7}',
    )

    explained = explain(facts(TaskState.FAILED, task=None, recorded=(one,), mark=mark))

    assert explained.sentence == "task `t-1` could not be parsed and is a dead letter: `project` is a number"
    assert 'it came as: {"project": 7}' in explained.evidence
    assert "runtime queue dead purge t-1" in (explained.hint or "")


def test_cancelled_task_says_by_whom() -> None:
    one = record(TaskState.CANCELLED, EndReason.CANCELLED, message="cancelled by ada@laptop", attempts=0)

    explained = explain(facts(TaskState.CANCELLED, recorded=(one,)))

    assert explained.sentence == "task `t-1` will not run: it was cancelled 5m ago"
    assert explained.evidence == ("cancelled by ada@laptop",)
    assert explained.hint == "runtime retry t-1"


def test_expired_task_says_when() -> None:
    one = record(TaskState.EXPIRED, EndReason.EXPIRED, attempts=0)
    task = replace(TASK, expires_at=NOW - timedelta(minutes=5))

    explained = explain(facts(TaskState.EXPIRED, recorded=(one,), task=task))

    assert "it expired at 2026-01-02T11:55:00.000Z while it waited for a worker" in explained.sentence


def test_succeeded_task_says_which_attempt_did_it() -> None:
    one = record(TaskState.SUCCEEDED, EndReason.SUCCEEDED, attempts=2)

    explained = explain(facts(TaskState.SUCCEEDED, recorded=(one,), history=History((note(),))))

    assert explained.sentence == ("task `t-1` succeeded in its second attempt after 1m by worker `w-one`, 5m ago")


def test_later_generation_tells_how_the_earlier_ended() -> None:
    one = record(TaskState.FAILED, EndReason.OOM)

    explained = explain(facts(workers=(worker(),), recorded=(one,), generation=2, ahead=0))

    assert "generation 1 ended as failed (oom) 5m ago" in explained.evidence
    assert "this is generation 2, with new budgets" in explained.evidence


# experiments and workers


def test_experiment_without_workers_says_so(tmp_path: Path) -> None:
    bench = Bench.sqlite(tmp_path)
    bench.put(sample_task("1"), sample_task("2"))
    bench.fail(message="boom")

    explained = explain_experiment(read_experiment(bench, "sample", now=bench.now))

    assert explained.sentence == "1 task of experiment `sample` waits: no live worker serves queue `default`"
    assert explained.evidence[:2] == ("1 queued, 1 failed", "1 task failed")
    assert explained.hint == "runtime worker --queue default"
    bench.close()


def test_experiment_that_waits_says_why_workers_gave_its_tasks_back(tmp_path: Path) -> None:
    bench = Bench.sqlite(tmp_path)
    one, two, other = sample_task("1"), sample_task("2"), sample_task("3", experiment="other")
    bench.put(one, two, other)
    why = "the index does not answer"
    bench.report("w-small", declined={one.id: why, two.id: why, other.id: "needs 1 GPU"})

    now = explain_experiment(read_experiment(bench, "sample", now=bench.now))
    later = explain_experiment(read_experiment(bench, "sample", now=bench.now + timedelta(hours=1)))

    first = min(one.id, two.id)
    assert now.evidence == ("2 queued", f"worker `w-small` declined `{first}`: {why}")
    assert later.evidence == ("2 queued", f"worker `w-small`, which is gone, declined `{first}`: {why}")
    bench.close()


def test_experiment_that_is_done_points_at_its_failures(tmp_path: Path) -> None:
    bench = Bench.sqlite(tmp_path)
    bench.put(sample_task("1"), sample_task("2"))
    bench.succeed()
    bench.fail()

    explained = explain_experiment(read_experiment(bench, "sample", now=bench.now))

    assert explained.sentence == "experiment `sample` is done: 1 of 2 succeeded"
    assert explained.hint == "runtime status sample --failed"
    bench.close()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"running": ("t-1",)}, "runs 1 task in 2 slots"),
        ({}, "is idle"),
        ({"silent_s": 400}, "was last heard of 6m40s ago"),
        ({"left": True}, "left 5s ago"),
    ],
)
def test_worker_is_explained_by_its_last_report(fields: dict[str, Any], said: str) -> None:
    assert said in explain_worker(worker(**fields), now=NOW).sentence


# facts


@pytest.fixture(params=["memory", "sqlite"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    bench = Bench.memory() if request.param == "memory" else Bench.sqlite(tmp_path)
    yield bench
    bench.close()


def test_facts_of_a_waiting_task_have_its_place(bench: Bench) -> None:
    tasks = [sample_task(str(number), priority=number) for number in range(3)]
    bench.put(*tasks)

    seen = read_facts(bench, tasks[0].id, now=bench.now)

    assert (seen.ahead, seen.due, seen.depth) == (2, None, Depth(3, 0, 0))
    assert seen.task == tasks[0]


def test_facts_of_a_delayed_retry_have_its_time(bench: Bench) -> None:
    task = sample_task()
    bench.put(task)
    note = bench.try_again(after=timedelta(minutes=3))

    seen = read_facts(bench, task.id, now=bench.now)

    assert seen.due == bench.now + timedelta(minutes=3)
    assert [one.token for one in seen.standing.history.ended] == [note.token]
    assert "attempt 1 failed" in explain(seen).sentence


def test_facts_of_a_paused_queue(bench: Bench) -> None:
    task = sample_task()
    bench.put(task)
    bench.queue().pause()

    assert read_facts(bench, task.id, now=bench.now).paused


def test_facts_of_a_cancelled_experiment() -> None:
    bench = Bench.memory()
    task = sample_task(submitted_at=bench.now)
    bench.put(task)
    cancel_experiment(bench, "sample", now=bench.now)

    bench.put(after := sample_task("after"))

    seen, later = read_facts(bench, task.id, now=bench.now), read_facts(bench, after.id, now=bench.now)

    assert (seen.cancelled, seen.cancel_ordered_at, later.cancelled) == (True, bench.now, False)
    assert "was cancelled" in explain(seen).sentence
    assert "was cancelled" not in explain(later).sentence


def test_facts_of_a_task_whose_cancel_was_cut_off_before_its_record() -> None:
    bench = Bench.memory()
    task = sample_task()
    bench.put(task)
    bench.records.put_order("default", cancel_order(tasks=frozenset({(task.id, 1)})))

    seen = read_facts(bench, task.id, now=bench.now)

    assert (seen.cancelled, seen.cancel_ordered_at) == (True, None)


def test_task_that_waits_without_workers_names_what_the_last_ones_said_when_they_gave_it_back() -> None:
    gone = worker("w-a", silent_s=600, declined={"t-1": "the index does not answer"})

    waiting, delayed = explain(facts(workers=(gone,))), explain(facts(workers=(gone,), due=NOW + timedelta(seconds=30)))

    line = "worker `w-a`, which is gone, declined it: the index does not answer"
    assert line in waiting.evidence
    assert line in delayed.evidence


def test_facts_name_the_workers_that_declined(bench: Bench) -> None:
    task = sample_task()
    bench.put(task)
    bench.report("w-small", declined={task.id: "needs 1 GPU"})
    bench.report("w-elsewhere", queue="other", declined={task.id: "needs 1 GPU"})

    assert read_facts(bench, task.id, now=bench.now).declined == {"w-small": "needs 1 GPU"}


def test_facts_of_a_queue_that_does_not_answer_say_why(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    task = sample_task()
    bench.put(task)

    def refuse() -> Depth:
        raise QueueUnavailable("no route to the service")

    monkeypatch.setattr(bench.queue(), "depth", refuse)

    seen = read_facts(bench, task.id, now=bench.now)

    assert seen.queue_problem == "no route to the service"
    assert "no live worker" in explain(seen).sentence


def test_facts_of_an_unknown_task_in_the_embedded_file_are_refused(tmp_path: Path) -> None:
    bench = Bench.sqlite(tmp_path)

    with pytest.raises(UnknownName):
        read_facts(bench, "t-nowhere", now=bench.now)
    bench.close()


@pytest.mark.parametrize("state", ["succeeded", "failed", "cancelled", "leased", "queued", "redriven", "purged"])
def test_every_state_is_explained_from_what_is_stored(bench: Bench, state: str) -> None:
    task = sample_task()
    bench.put(task)
    if state == "succeeded":
        bench.succeed()
    if state in ("failed", "redriven", "purged"):
        bench.fail(attempts=1)
    if state == "redriven":
        list(redrive(bench, read_dead(bench.records), now=bench.now))
    if state == "purged":
        purge_dead(bench.records, read_dead(bench.records))
    if state == "cancelled":
        cancel_task(bench, task.id, now=bench.now, by="ada")
    if state == "leased":
        bench.lease()

    explained = explain(read_facts(bench, task.id, now=bench.now))

    assert f"`{task.id}`" in explained.sentence
    said = {
        "succeeded": "succeeded after 5s",
        "failed": "failed, 1 of 3 failures spent, the last attempt failed: boom",
        "redriven": "no live worker",
        "purged": "failed, 1 of 3 failures spent, the last attempt failed: boom",
        "cancelled": "cancelled",
        "leased": "runs on worker `w-one`",
        "queued": "no live worker",
    }[state]
    assert said in explained.sentence
    if state == "redriven":
        assert "this is generation 2, with new budgets" in explained.evidence
    if state == "purged":
        assert "its dead letter was purged" in explained.evidence
