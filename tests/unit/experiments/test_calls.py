"""`Call` and `Calls`: futures whose ends come from wherever the calls run."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, wait
from typing import Any

import pytest

from runtime.client.values import End
from runtime.errors import InfrastructureFailure, InvalidValue
from runtime.experiments import calls as module
from runtime.experiments.calls import Call, Calls
from tests.services_support import PATIENCE_S


class Played:
    """A source whose calls end when the test says so."""

    def __init__(self) -> None:
        self.ends: dict[int, Callable[[], Any]] = {}
        self.loaded: list[int] = []
        self.cancelled: list[Sequence[int] | None] = []
        self.problems: list[BaseException] = []
        self.looked = threading.Event()
        self.asked: list[list[int]] = []

    def describe(self) -> str:
        return "played"

    def look(self, open: Sequence[int]) -> dict[int, End]:
        self.asked.append(list(open))
        self.looked.set()
        if self.problems:
            raise self.problems.pop()
        return {number: self._end(number, self.ends[number]) for number in open if number in self.ends}

    def _end(self, number: int, act: Callable[[], Any]) -> End:
        def take() -> Any:
            self.loaded.append(number)
            return act()

        return End(take=take, failure="KeyError: 'no'" if act is fail else None, cancelled=act is gone)

    def read_log(self, number: int) -> str:
        return f"log of {number}"

    def cancel(self, numbers: Sequence[int] | None) -> list[str]:
        self.cancelled.append(numbers)
        return ["a pod"] if numbers is None else []


def fail() -> Any:
    raise KeyError("no")


def gone() -> Any:
    raise CancelledError


@pytest.fixture
def source() -> Played:
    return Played()


@pytest.fixture
def calls(source: Played, monkeypatch: pytest.MonkeyPatch) -> Calls:
    monkeypatch.setattr(module, "FIRST_LOOK_S", 0.001)
    monkeypatch.setattr(module, "LAST_LOOK_S", 0.001)
    return Calls("fit", [Call(number, f"run {number} of fit", source) for number in range(3)], source)


def test_results_are_in_the_order_of_the_items(calls: Calls, source: Played) -> None:
    source.ends = {2: lambda: "c", 0: lambda: "a", 1: lambda: "b"}

    assert calls.results(timeout="1h") == ["a", "b", "c"]
    assert repr(calls) == "<3 calls of fit, played: 3 ended>"
    assert repr(calls[1]) == "<run 1 of fit: succeeded>"
    assert [each.number for each in calls[1:]] == [1, 2]


def test_calls_are_yielded_as_they_end(calls: Calls, source: Played) -> None:
    ended = calls.as_completed()
    source.ends[1] = lambda: "b"
    first = next(ended)
    source.ends |= {0: lambda: "a", 2: lambda: "c"}

    assert first is calls[1]
    assert {each.number for each in ended} == {0, 2}


def test_failed_call_raises_what_stands_for_it_and_tells_it_apart(calls: Calls, source: Played) -> None:
    source.ends = {0: lambda: "a", 1: fail, 2: gone}
    wait(calls)

    assert isinstance(calls[1].exception(), KeyError)
    assert repr(calls[1]) == "<run 1 of fit: failed: KeyError: 'no'>"
    assert (calls[2].cancelled(), repr(calls[2])) == (True, "<run 2 of fit: cancelled>")
    with pytest.raises(KeyError):
        calls.results()
    with pytest.raises(CancelledError):
        calls[2].result()


def test_time_out_is_a_span_and_leaves_the_calls_alone(calls: Calls, source: Played) -> None:
    for ask in (calls[0].result, calls[0].exception, calls.results):
        with pytest.raises(TimeoutError):
            ask(timeout="10ms")
    with pytest.raises(TimeoutError):
        list(calls.as_completed(timeout=0.01))
    with pytest.raises(InvalidValue, match="timeout"):
        calls[0].result(timeout="soon")
    source.ends = dict.fromkeys(range(3), lambda: 1)
    assert calls.results() == [1, 1, 1]
    assert source.cancelled == []


def test_source_that_does_not_answer_is_asked_again(calls: Calls, source: Played) -> None:
    source.problems = [InfrastructureFailure("silent"), InfrastructureFailure("silent")]
    source.ends = dict.fromkeys(range(3), lambda: 1)

    assert calls.results() == [1, 1, 1]


def test_source_that_fails_for_good_fails_every_open_call(calls: Calls, source: Played) -> None:
    source.ends[0] = lambda: 1
    assert calls[0].result() == 1
    source.problems.append(RuntimeError("damaged"))

    assert [str(each.exception()) for each in calls[1:]] == ["damaged", "damaged"]
    assert calls[0].result() == 1


def test_cancelled_call_is_stopped_where_it_runs_once(calls: Calls, source: Played) -> None:
    source.ends[0] = lambda: 1
    assert calls[0].result() == 1

    assert [each.cancel() for each in calls] == [False, True, True]
    assert source.cancelled == [[1], [2]]
    assert calls.cancel() == []
    assert source.cancelled == [[1], [2]]


def test_cancelling_all_says_what_was_left(calls: Calls, source: Played) -> None:
    assert calls.cancel() == ["a pod"]
    assert source.cancelled == [None]
    assert all(each.cancelled() for each in calls)


def test_calls_can_be_awaited_alone_and_together(calls: Calls, source: Played) -> None:
    async def main() -> tuple[Any, list[Any]]:
        source.ends = {number: lambda number=number: number for number in range(3)}  # type: ignore[misc]
        return await calls[1], await calls

    assert asyncio.run(main()) == (1, [0, 1, 2])


def test_stop_iteration_of_a_function_reaches_who_awaits_it_as_a_cause(calls: Calls, source: Played) -> None:
    def stop() -> Any:
        raise StopIteration(5)

    async def main() -> list[BaseException | None]:
        found = []
        for waiting in (calls[0], calls):
            with pytest.raises(RuntimeError) as raised:
                await asyncio.wait_for(_await(waiting), 60)
            found.append(raised.value.__cause__)
        return found

    source.ends = dict.fromkeys(range(3), stop)

    assert [type(each) for each in asyncio.run(main())] == [StopIteration] * 2


def test_cancelled_call_is_cancelled_for_who_awaits_it(calls: Calls) -> None:
    async def main() -> None:
        with pytest.raises(asyncio.CancelledError, match="cancelled"):
            await calls[0]

    calls[0].cancel()
    asyncio.run(main())


def test_log_is_that_of_its_source_and_empty_without_one(calls: Calls) -> None:
    assert calls[2].logs() == "log of 2"
    assert Call(0, "x").logs() == ""


def test_only_open_calls_are_looked_for(calls: Calls, source: Played) -> None:
    source.ends[0] = lambda: 1
    calls[0].result()
    calls[1].cancel()
    source.asked.clear()
    source.looked.clear()
    assert source.looked.wait(60)
    source.looked.clear()
    assert source.looked.wait(60)

    assert source.asked[-1] == [2]
    source.ends[2] = lambda: 1
    calls[2].result()


def test_value_is_loaded_only_for_who_asks_and_once(calls: Calls, source: Played) -> None:
    source.ends = {0: lambda: "a", 1: fail, 2: lambda: "c"}
    wait(calls)
    repr(calls)
    before = list(source.loaded)

    assert (calls[0].result(), calls[0].result(), type(calls[1].exception())) == ("a", "a", KeyError)
    assert (before, source.loaded) == ([], [0, 1])


def test_cancelled_coroutine_stops_waiting_and_the_call_goes_on(calls: Calls, source: Played) -> None:
    async def give_up() -> None:
        for waiting in (calls[0], calls):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(_await(waiting), 0.01)

    asyncio.run(give_up())

    assert (source.cancelled, [each.done() for each in calls]) == ([], [False] * 3)


async def _await(waiting: Any) -> Any:
    return await waiting


def test_source_that_cannot_answer_again_ends_the_calls(calls: Calls, source: Played) -> None:
    source.problems = [InfrastructureFailure("the record root is gone", retryable=False)]
    source.looked.clear()

    with pytest.raises(InfrastructureFailure, match="the record root is gone"):
        calls[0].result(timeout=PATIENCE_S)
