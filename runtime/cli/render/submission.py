"""What `runtime submit` says of a submission, and of its tasks when it has waited for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from runtime.cli.show import format_count, note
from runtime.tasks.model import TaskState
from runtime.units import count_noun

if TYPE_CHECKING:
    from runtime.client.tasks.code import SubmittedCode
    from runtime.client.tasks.submit import Submission
    from runtime.client.tasks.wait import Waited
    from runtime.queues.base import Queue


def submission_fields(done: Submission) -> dict[str, Any]:
    """What `-o json` prints."""
    return {
        "experiment": done.experiment,
        "queue": done.queue,
        "stack": done.stack,
        "new": done.new,
        "known": done.known,
        "same": done.same,
        "known_other": done.known_other,
        "same_other": done.same_other,
        "skipped": done.skipped,
        "resumed": done.resumed,
        "snapshot": done.snapshot,
        "kept_code": done.kept_code,
        "ids": None if done.ids is None else list(done.ids),
    }


def say_submitted(done: Submission, from_file: bool, code: SubmittedCode) -> None:
    total = done.new + done.known + done.same + done.skipped
    lines = "lines" if from_file else "tasks"
    where = f"queue `{done.queue}` of stack `{done.stack}`, experiment `{done.experiment}`"
    note(f"{count_noun(done.new, 'task')} submitted to {where}")
    if done.new and code.taken_from:
        note(f"with the code of `{code.taken_from}` as it is now, {_short(code.snapshot)}")
    if done.known:
        note("it was already submitted" if total == 1 else f"{_of(done.known, total)} were already submitted")
    if done.known_other:
        from runtime.client.tasks.sending import NAMED_TASKS

        those = (
            "it" if total == 1 else f"{'at least ' if done.known > NAMED_TASKS else ''}{_of(done.known_other, total)}"
        )
        note(
            f"{those} had other content when it was submitted before, and that stands; for what is new, name another"
            " `--experiment` or `--key`"
        )
    if done.kept_code:
        note(
            f"what was submitted before runs, or ran, {_short(done.kept_code)} and not {_short(done.snapshot)}; for"
            " that, name another `--experiment` or `--key` (`runtime retry` runs the earlier code again)"
        )
    if done.same:
        note(
            f"{_of(done.same, total)} {lines} repeat an earlier one: without a `key` of its own, what runs the same is"
            " one task"
        )
    if done.same_other:
        note(f"{_of(done.same_other, total)} {lines} have other content than the earlier one: the first stands")
    if done.skipped:
        note(f"{_of(done.skipped, total)} skipped: their outputs exist")
    if done.resumed:
        note(f"{count_noun(done.resumed, 'task')} of an interrupted submission published")
    name = done.tasks[0][0] if done.tasks and len(done.tasks) == 1 else done.experiment
    if done.count:
        note(f"follow with `runtime status {name}`")


def say_ended(waited: Waited, target: Queue) -> None:
    counts = [f"{format_count(count)} {state.value}" for state, count in waited.totals.items() if count]
    note(", ".join(counts) or "nothing to wait for")
    if not waited.failed:
        return
    if waited.records:
        failed = [
            (record.task_id, record.message) for record in waited.records if record.state is not TaskState.SUCCEEDED
        ]
    else:
        failed = []
        for mark in target.records.marks(waited.experiment):
            failed.append((mark.task_id, mark.message))
            if len(failed) == 5:
                break
    for identity, message in failed[:5]:
        last = (message or "").strip().rpartition("\n")[2]
        note(f"  {identity}: {last or 'no message'}")
    note(f"see why with `runtime explain {failed[0][0] if failed else waited.experiment}`")


def _short(code: str | None) -> str:
    """A content id as people read it."""
    return f"`{code[:19]}`" if code and code.startswith("sha256:") else "the code that workers have"


def _of(part: int, total: int) -> str:
    return f"{format_count(part)} of {format_count(total)}"
