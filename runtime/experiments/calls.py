"""Calls of a function, wherever they run: each is a `concurrent.futures.Future`, and together they are a sequence."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError
from concurrent.futures import as_completed as futures_as_completed
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Protocol, overload

from runtime.client.values import End
from runtime.errors import InfrastructureFailure
from runtime.sanitize import CleanLogger
from runtime.system import system
from runtime.units import Span, count_noun, read_span

if TYPE_CHECKING:
    from runtime.client.jobs.handle import JobHandle

FIRST_LOOK_S: Final = 0.02
LAST_LOOK_S: Final = 1.0


class CallBackend(Protocol):
    """Where the calls of one experiment run."""

    def describe(self) -> str:
        """Return the name of all calls for messages, such as `job j-1234… on slurm`."""

    def look(self, open: Sequence[int]) -> dict[int, End]:
        """Return the ends of the open calls that have ended, by their numbers.

        Raises `InfrastructureFailure` if the backend or the store does not answer.
        """

    def read_log(self, number: int) -> str:
        """Return the output of a call so far, attempt after attempt."""

    def cancel(self, numbers: Sequence[int] | None) -> list[str]:
        """Stop these calls, or all. Returns descriptions of resources that remain."""


class Call(Future[Any]):
    """One call of a function. `result()`, `exception()` and `await` wait until it has ended; it goes on if this program
    ends before."""

    def __init__(self, number: int, what: str, source: CallBackend | None = None) -> None:
        super().__init__()
        self.number, self._what, self._source = number, what, source
        self._taken: tuple[Any, BaseException | None] | None = None
        """Value and exception of an end that somebody has asked for."""

    def __repr__(self) -> str:
        if not self.done():
            state = "not ended"
        elif self.cancelled():
            state = "cancelled"
        else:
            problem = super().exception()
            said = problem.end.failure if isinstance(problem, _Failed) else f"{type(problem).__name__}: {problem}"
            state = "succeeded" if problem is None else f"failed: {said}"
        return f"<{self._what}: {state}>"

    def result(self, timeout: Span | None = None) -> Any:
        """Return the function's value, or raise its exception. Raises `TimeoutError` and `CancelledError`."""
        value, problem = self._take(timeout)
        if problem is not None:
            raise problem
        return value

    def exception(self, timeout: Span | None = None) -> BaseException | None:
        """Return the exception that `result` would raise, or None. Raises `TimeoutError` and `CancelledError`."""
        return self._take(timeout)[1]

    def _take(self, timeout: Span | None) -> tuple[Any, BaseException | None]:
        """Wait for the end, and load the value the first time. Returns it and None, or None and the exception."""
        try:
            problem = super().exception(_seconds(timeout))
        except CancelledError:
            raise CancelledError(f"{self._what} was cancelled; `again=True` makes a new one") from None
        if problem is not None and not isinstance(problem, _Failed):
            return None, problem
        if self._taken is None:
            end: End = super().result() if problem is None else problem.end
            try:
                self._taken = end.take(), None
            except Exception as raised:
                self._taken = None, raised
        return self._taken

    @property
    def job(self) -> JobHandle | None:
        """The job that this call is a run of; None on `here` and in a queue."""
        return getattr(self._source, "job", None)

    def logs(self) -> str:
        """Return the output so far; empty for a call on `here`, which prints to this process's own output."""
        return self._source.read_log(self.number) if self._source else ""

    def cancel(self) -> bool:
        """Stop the call wherever it runs. False if it has ended."""
        if not self.give_up():
            return False
        if self._source is not None:
            self._source.cancel([self.number])
        return True

    def give_up(self) -> bool:
        """Mark the call as cancelled, and stop nothing. False if it has ended."""
        if self.done() or not super().cancel():
            return False
        with suppress(RuntimeError):  # another thread was first
            self.set_running_or_notify_cancel()  # wakes the threads that wait for it
        return True

    def finish(self, end: End) -> None:
        """End the call, unless this process has cancelled it."""
        if end.cancelled:
            self.give_up()
            return
        with suppress(InvalidStateError):
            if end.failure is not None:
                self.set_exception(_Failed(end))
            else:
                self.set_result(end)

    def __await__(self) -> Generator[Any, None, Any]:
        return _wait(self).__await__()


async def _wait(call: Call) -> Any:
    """Return the call's value, or raise its exception; a `StopIteration`, which no coroutine may raise, as the cause of a
    `RuntimeError`. A coroutine that is cancelled, as by Ctrl-C, stops waiting; the call goes on.
    """
    import asyncio

    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def wake(_: Future[Any]) -> None:
        with suppress(RuntimeError):  # the loop was closed
            loop.call_soon_threadsafe(ended.set)

    call.add_done_callback(wake)
    await ended.wait()
    if call.cancelled():
        raise asyncio.CancelledError(repr(call))
    return call.result()


class _Failed(Exception):
    """Stands for the exception of a call until somebody asks for it."""

    def __init__(self, end: End) -> None:
        super().__init__()
        self.end = end


def _seconds(timeout: Span | None) -> float | None:
    span = read_span(timeout, "timeout")
    return None if span is None else span.total_seconds()


class Calls(Sequence[Call]):
    """The calls of one `runtime.map`, in the order of its items."""

    def __init__(self, name: str, calls: Sequence[Call], source: CallBackend | None = None) -> None:
        self.name, self._calls, self._source = name, calls, source
        if source is not None:
            _watch(source, calls)

    def __len__(self) -> int:
        return len(self._calls)

    @overload
    def __getitem__(self, at: int) -> Call: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[Call]: ...

    def __getitem__(self, at: int | slice) -> Call | Sequence[Call]:
        return self._calls[at]

    def __repr__(self) -> str:
        ended = sum(each.done() for each in self._calls)
        where = f", {self._source.describe()}" if self._source else ""
        return f"<{count_noun(len(self), 'call')} of {self.name}{where}: {ended} ended>"

    def results(self, timeout: Span | None = None) -> list[Any]:
        """Wait for all calls, and return their values in the order of the items. Raises the exception of the first failed one."""
        span = _seconds(timeout)
        until = None if span is None else system.monotonic() + span
        return [each.result(None if until is None else max(0.0, until - system.monotonic())) for each in self._calls]

    def as_completed(self, timeout: Span | None = None) -> Iterator[Call]:
        """Yield each call once it has ended. Raises `TimeoutError`."""
        yield from futures_as_completed(self._calls, _seconds(timeout))  # type: ignore[misc]

    def cancel(self) -> list[str]:
        """Stop all calls that have not ended. Returns descriptions of resources that remain, such as a pod that was not deleted."""
        stopped = [each for each in self._calls if each.give_up()]
        return self._source.cancel(None) if self._source is not None and stopped else []

    def __await__(self) -> Generator[Any, None, list[Any]]:
        import asyncio

        return asyncio.gather(*map(_wait, self._calls)).__await__()


def _watch(source: CallBackend, calls: Iterable[Call]) -> None:
    """Start a thread that looks for calls that have ended, until all have or this process ends."""
    left = {each.number: each for each in calls}

    def look() -> None:
        pause, said = FIRST_LOOK_S, ""
        while left:
            for number in [number for number, call in left.items() if call.done()]:
                del left[number]
            began = system.monotonic()
            try:
                ended = source.look(list(left))
            except InfrastructureFailure as problem:
                if not problem.retryable:
                    _fail(left.values(), problem)
                    return
                if problem.message != said:
                    said = problem.message
                    CleanLogger(__name__).warning("%s: %s; looking again", source.describe(), said)
                ended = {}
            except BaseException as problem:
                _fail(left.values(), problem)
                return
            for number, end in ended.items():
                left.pop(number).finish(end)
            pause = FIRST_LOOK_S if ended else min(LAST_LOOK_S, pause * 1.5)
            # A look that takes long, as over a slow connection, is made less often.
            system.sleep(max(pause, system.monotonic() - began))

    system.thread(target=look, name="calls").start()


def _fail(calls: Iterable[Call], problem: BaseException) -> None:
    for call in calls:
        with suppress(InvalidStateError):
            call.set_exception(problem)
