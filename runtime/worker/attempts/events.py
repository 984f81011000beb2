"""What an attempt pool waits for in its worker's loop: descriptors that turn readable, and the next deadline."""

from __future__ import annotations

import selectors
from collections.abc import Callable
from typing import Any, NamedTuple


class _Channel(NamedTuple):
    """The data of our keys in the selector."""

    events: Events
    read: Callable[[], None]


class Events:
    """One pool's part of the selector, and the time of its next tick."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self.due: float | None = None
        """`time.monotonic()` of the next tick; None while nothing is awaited."""
        self.ping_at = 0.0
        """When the guardian is pinged next, while anything is awaited from it or its children."""

    def wake_by(self, due: float) -> None:
        if self.due is None or due < self.due:
            self.due = due

    def await_answer(self) -> None:
        """Have the liveness watch look at a process that is now to do something."""
        if self.due is None or self.ping_at < self.due:
            self.due = self.ping_at

    def listen(self, file: Any, read: Callable[[], None]) -> None:
        self._selector.register(file, selectors.EVENT_READ, _Channel(self, read))

    def change(self, file: Any, read: Callable[[], None], *, writable: bool) -> None:
        """Listen with another function, if `writable` also for room to write."""
        events = selectors.EVENT_READ | selectors.EVENT_WRITE if writable else selectors.EVENT_READ
        self._selector.modify(file, events, _Channel(self, read))

    def forget(self, file: Any) -> None:
        self._selector.unregister(file)

    def owns(self, key: selectors.SelectorKey) -> bool:
        return type(key.data) is _Channel and key.data.events is self

    def serve(self, timeout_s: float) -> None:
        """Wait for our own descriptors alone, and read them."""
        with selectors.DefaultSelector() as own:
            for key in list(self._selector.get_map().values()):
                if self.owns(key):
                    own.register(key.fileobj, key.events, key.data)
            for key, _ in own.select(timeout_s):
                if key.fd in self._selector.get_map():
                    key.data.read()
