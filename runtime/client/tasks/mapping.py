"""`map_tasks`: one durable task for each input, and their ends as they come.

The output's place is the task's key, so the records show what is done already: the same call made again, after its program
has died or beside another one, does nothing twice and yields every end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from runtime.client.tasks.build import experiment_of, function_entry, module_folder, open_target
from runtime.client.tasks.call_results import find_ended
from runtime.client.tasks.kept_stacks import KeptStack
from runtime.client.tasks.submit import Submission, submit
from runtime.end_reasons import EndReason
from runtime.errors import InvalidValue, RequestRefused, WorkFailed
from runtime.queues.base import Queue
from runtime.records.base import RecordStore, calls_at_once
from runtime.records.codec import read_value
from runtime.system import system
from runtime.tasks.history import Record
from runtime.tasks.model import DEFAULT_MAX_FAILURES, Resources, TaskState, task_id
from runtime.units import Span, count_noun

SLOT: Final = "{}"
"""Stands for the input in a text for `output`."""
FAILED_SHOWN: Final = 5
_FIRST_POLL_S: Final = 0.05
_BATCH: Final = 500
"""Records that are read together before any of them is yielded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedTask:
    """The end of the task of one input."""

    input: Any
    output: str
    task: str
    state: TaskState
    reason: EndReason | None = None
    message: str | None = None
    value: Any = None
    """What the function returned."""

    @property
    def succeeded(self) -> bool:
        return self.state is TaskState.SUCCEEDED


class MappedTasks:
    """The tasks of one `map_tasks`. Iterating yields a `MappedTask` for each input, and may be repeated."""

    def __init__(
        self,
        submission: Submission,
        inputs: Mapping[str, tuple[Any, str]],
        *,
        ordered: bool,
        keep_going: bool,
        poll: timedelta,
    ) -> None:
        self.submission = submission
        self._inputs = inputs
        """Task id → its input and output."""
        self._ordered, self._keep_going, self._poll_s = ordered, keep_going, poll.total_seconds()

    def __len__(self) -> int:
        return len(self._inputs)

    def __repr__(self) -> str:
        return f"<{count_noun(len(self), 'task')} of experiment {self.submission.experiment}>"

    def __iter__(self) -> Iterator[MappedTask]:
        """Yield each end once it is recorded, or in the order of the inputs if the call was `ordered`.

        Raises `WorkFailed` after the last one if any task did not succeed, unless the call has `keep_going`.
        """
        failed: list[MappedTask] = []
        for each in self._in_order() if self._ordered else self._as_recorded():
            if not each.succeeded:
                failed.append(each)
            yield each
        if failed and not self._keep_going:
            more = [f"and {len(failed) - FAILED_SHOWN} more"] if len(failed) > FAILED_SHOWN else []
            raise WorkFailed(
                f"{len(failed)} of {count_noun(len(self), 'task')} did not succeed",
                facts=[
                    *(f"`{each.task}` for {each.output}: {_describe(each)}" for each in failed[:FAILED_SHOWN]),
                    *more,
                ],
                hint=f"runtime explain {failed[0].task}; `runtime retry {self.submission.experiment}` and the same call go on",
            )

    def _in_order(self) -> Iterator[MappedTask]:
        held: dict[str, MappedTask] = {}
        left = iter(self._inputs)
        wanted = next(left, None)
        for each in self._as_recorded():
            held[each.task] = each
            while wanted in held:
                yield held.pop(wanted)
                wanted = next(left, None)

    def _as_recorded(self) -> Iterator[MappedTask]:
        left, pause = set(self._inputs), _FIRST_POLL_S
        with self._open() as records, system.pool(calls_at_once(records), name="mapped") as pool:
            while left:
                ended = find_ended(records, self.submission.experiment, left)
                for start in range(0, len(ended), _BATCH):
                    for each in pool.map(lambda one: self._read(records, *one), ended[start : start + _BATCH]):
                        left.discard(each.task)
                        yield each
                pause = _FIRST_POLL_S if ended else min(pause * 1.5, self._poll_s)
                if left:
                    system.sleep(pause)

    def _read(self, records: RecordStore, task: str, generation: int) -> MappedTask:
        record = records.find(task, generation)
        given, output = self._inputs[task]
        assert record is not None, "it was listed, and records stay"
        return MappedTask(
            input=given,
            output=output,
            task=task,
            state=record.state,
            reason=record.reason,
            message=record.message or record.unreadable,
            value=_value_of(record, records),
        )

    @contextmanager
    def _open(self) -> Iterator[RecordStore]:
        made = self.submission
        with open_target(made.asked or made.queue, made.stack) as opened:
            yield (opened.queue if isinstance(opened, KeptStack) else opened).records


def map_tasks(
    function: Callable[..., Any],
    inputs: Iterable[Any],
    *,
    output: Callable[[Any], str] | str,
    experiment: str | None = None,
    queue: str | Queue | None = None,
    stack: str | None = None,
    ordered: bool = False,
    keep_going: bool = False,
    timeout: Span | None = None,
    max_failures: int = DEFAULT_MAX_FAILURES,
    priority: int = 0,
    resources: Resources | Mapping[str, Any] | None = None,
    secrets: Sequence[str] | None = None,
    notify: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    notify_on: str | Sequence[str] | None = None,
    snapshot: str | Path | bool | None = None,
    poll: timedelta = timedelta(seconds=2),
) -> MappedTasks:
    """Run `function(input, output)` for each input as a task of a queue; on return all of them are durable.

    `output` gives the place that a task writes to: a function of the input, or a text in which `{}` stands for it. An
    output names its task, so a task that is recorded is not run again, whoever submitted it, and a failed one only by
    `runtime retry`. Workers run them: `runtime worker`, here or anywhere that reaches the queue. The inputs are values of
    JSON, and the function is one of an importable module, whose code goes with the tasks as in `submit`.

    Iterate over the result for the ends as they come, in the order of the inputs if `ordered`. The program may be killed at
    any time: workers go on, and the same call yields what is done and waits for the rest. Raises `InvalidValue` for two
    inputs with one output, and like `submit`.
    """
    place = _place_of(output)
    experiment = experiment or experiment_of(function)
    name = function_entry(function).function
    placed: dict[str, tuple[Any, str]] = {}

    def make_lines() -> Iterator[dict[str, Any]]:
        for given in inputs:
            where: Any = place(given)
            if not isinstance(where, str) or not where:
                raise InvalidValue("output", repr(where), "a text that names a place for the input")
            identity = task_id(experiment, key=where)
            if identity in placed and placed[identity][0] != given:
                raise InvalidValue("output", where, "an output of its own for each input", hint="two inputs share it")
            placed[identity] = (given, where)
            yield {"function": name, "args": [given, where], "key": where, "outputs": [where]}

    submission = submit(
        make_lines(),
        experiment=experiment,
        queue=queue,
        stack=stack,
        timeout=timeout,
        max_failures=max_failures,
        priority=priority,
        resources=resources,
        secrets=secrets,
        notify=notify,
        notify_on=notify_on,
        snapshot=module_folder(function) if snapshot is None else snapshot,
    )
    return MappedTasks(submission, placed, ordered=ordered, keep_going=keep_going, poll=poll)


def _place_of(output: Callable[[Any], str] | str) -> Callable[[Any], str]:
    if callable(output):
        return output
    text: Any = output
    if not isinstance(text, str) or SLOT not in text:
        raise RequestRefused(
            f"`output` is {output!r}, and every input needs an output of its own",
            hint=f'a function of the input, or a text with {SLOT} for it, such as "gs://lab/tokens/{SLOT}.json"',
        )
    return lambda given: text.replace(SLOT, str(given))


def _value_of(record: Record, records: RecordStore) -> Any:
    return record.value if record.value_url is None or record.unreadable else read_value(record, records)


def _describe(each: MappedTask) -> str:
    last = (each.message or "").strip().rpartition("\n")[2]
    return f"{each.reason or each.state}" + (f": {last}" if last else "")
