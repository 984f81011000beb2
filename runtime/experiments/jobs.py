"""Calls that are a job: one run for each item of an array, or a job of a single run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from runtime.client.jobs import call_results
from runtime.client.jobs.handle import JobHandle
from runtime.client.values import End
from runtime.jobs import ledger
from runtime.jobs.ledger import RunOutcome
from runtime.system import system

JUDGED_EVERY_S: Final = 5.0
"""How often to ask the backend for runs that left no result in the record root, such as lost ones."""


class JobCalls:
    """The runs of a job. Each look reads new results from the record root, and every few seconds asks the backend."""

    def __init__(self, job: JobHandle) -> None:
        self.job = job
        self._entry = job.entry()
        self._judged_at = system.monotonic()

    def describe(self) -> str:
        return f"job {self.job.id[:10]} on {self.job.target.name}"

    def look(self, open: Sequence[int]) -> dict[int, End]:
        first = self._entry.first_index
        outcomes = ledger.read_outcomes(self.job.files, self.job.id).get(self.job.id, {})
        ended = {index: outcomes[index] for index in (first + number for number in open) if index in outcomes}
        if not ended and system.monotonic() - self._judged_at >= JUDGED_EVERY_S:
            ended = self._judge([first + number for number in open])
        ends = call_results.read_ends(self.job.files, self._entry, ended) if ended else {}
        return {index - first: end for index, end in ends.items()}

    def _judge(self, open: Sequence[int]) -> dict[int, RunOutcome]:
        """Return the ends of runs that only the backend knows."""
        status = self.job.status(indices=True)
        self._judged_at = system.monotonic()
        return {
            each.index: call_results.end_of(status.entry, each)
            for each in status.indices
            if each.state.terminal and each.index in open
        }

    def read_log(self, number: int) -> str:
        return b"".join(self.job.logs(index=self._entry.first_index + number)).decode(errors="replace")

    def cancel(self, numbers: Sequence[int] | None) -> list[str]:
        if numbers is None or self._entry.indices == 1:
            return self.job.cancel()
        return self.job.cancel(indices=[self._entry.first_index + number for number in numbers])
