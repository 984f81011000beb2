"""What holds in a world without faults alone: times, limits and numbers to the letter."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from runtime.end_reasons import Budget, EndReason
from runtime.tasks.history import Record
from runtime.tasks.model import TaskState
from runtime.worker.attempts.model import AttemptEnd, AttemptOrder
from tests.simulation.attempts import HUGE
from tests.simulation.laws import FAILS, IN_FORCE, Laws
from tests.simulation.world import Process

ON_TIME: Final = "without faults nothing starts before its time or after its end, twice at once, or too often"
STOPPED: Final = "without faults an attempt ends with its task and at its timeout"
PROMPT_S: Final = 20.0
"""An order is obeyed, and a record is seen, within this time."""


class CalmLaws(Laws):
    paused_at: float | None = None
    """When the pause in force was acknowledged."""

    def recorded(self, record: Record) -> None:
        super().recorded(record)
        if record.state is TaskState.FAILED and record.reason.budget is Budget.FAILURES:
            failed = sum(ended.reason in FAILS for ended in self.seen[record.task_id, record.generation].ends.values())
            allowed = max(1, self.tasks[record.task_id, 1][0].max_failures)
            if failed != allowed:
                self._break(ON_TIME, f"{record.task_id[-12:]} failed {failed} times of {allowed}")

    def attempt_starts(self, order: AttemptOrder, process: Process) -> None:
        seen, task = self.seen[order.task_id, order.generation], self.tasks[order.task_id, 1][0]
        ends = [seen.ends.get(token) for _, token, _ in seen.starts]
        now, wall, first = self._world.now, self._world.wall_time(), order.generation == 1
        too_late = None if task.expires_at is None else task.expires_at + timedelta(seconds=1)
        wrong = {
            "while it runs": None in ends,
            "long after its end": bool(seen.recorded_at) and now > seen.recorded_at + PROMPT_S,
            "too often": sum(each.reason in FAILS for each in ends if each) >= max(1, task.max_failures),
            "after a success": any(
                each.reason is EndReason.SUCCEEDED and each.value != HUGE for each in ends if each is not None
            ),
            "before its time": first and task.not_before is not None and wall < task.not_before,
            "after it expired": first and too_late is not None and wall > too_late,
        }
        for what in (what for what, so in wrong.items() if so):
            self._break(ON_TIME, f"{order.task_id[-12:]} starts {what}")
        if self.paused_at is not None and now > self.paused_at + PROMPT_S:
            self._break(IN_FORCE, f"a task starts {now - self.paused_at:.0f} s after a pause")
        super().attempt_starts(order, process)

    def attempt_ends(self, order: AttemptOrder, ended: AttemptEnd) -> None:
        super().attempt_ends(order, ended)
        key = order.task_id, order.generation
        seen, now = self.seen[key], self._world.now
        began = next(at for at, token, _ in seen.starts if token == order.token)
        asked, limit = self.cancelled.get(order.experiment), self.tasks[order.task_id, 1][0].timeout
        over = [seen.recorded_at] if seen.recorded_at else []
        if asked is not None and self.acknowledged.get(key, (None, 1e9))[1] < asked[0]:
            over.append(asked[1])
        if over and now > max(began, min(over)) + PROMPT_S:
            self._break(STOPPED, f"{order.task_id[-12:]} runs on for {now - max(began, min(over)):.0f} s")
        elif limit is not None and now - began > limit.total_seconds() + 1:
            self._break(STOPPED, f"{order.task_id[-12:]} runs for {now - began:.0f} s")
