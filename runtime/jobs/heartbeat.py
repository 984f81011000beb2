"""The heartbeat check: reads the counter of a running attempt's shim until the counter moves."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from runtime.jobs.hosts.base import Files
from runtime.shim.words import BEAT_S
from runtime.units import format_duration
from runtime.values import dataclass

STILL_S: Final = 1.3 * BEAT_S
"""Seconds without a change after which a counter counts as standing still."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """The counter at the first and at the last look."""

    attempt: int
    before: str
    after: str
    watched_s: float

    @property
    def moved(self) -> bool:
        return self.before != self.after


class HeartbeatWatch:
    """Reads the counter first on construction, so that time before `wait` counts as waiting."""

    def __init__(self, files: Files, run: str, attempt: int) -> None:
        self._files, self._attempt = files, attempt
        self._name = f"{run}/a{attempt:04d}/beat"
        self._before = files.read(self._name)
        self._began = time.monotonic()

    def wait(self, tell: Callable[[str], None]) -> Heartbeat | None:
        """Wait for a change for at most `STILL_S`, and report the wait to `tell`. None if there is no counter yet."""
        if not self._before:
            return None
        told = False
        while True:
            watched = time.monotonic() - self._began
            now = self._files.read(self._name) or self._before
            if now != self._before or watched >= STILL_S:
                return Heartbeat(
                    attempt=self._attempt, before=self._before.decode(), after=now.decode(), watched_s=watched
                )
            if not told:
                told = True
                tell(f"waiting for a sign of life of attempt {self._attempt}, at most {format_duration(STILL_S)}")
            time.sleep(min(1.0, max(0.05, STILL_S - watched)))


def describe_heartbeat(heartbeat: Heartbeat) -> list[str]:
    if heartbeat.moved:
        return [
            f"the shim of attempt {heartbeat.attempt} lives: its counter went from {heartbeat.before} to {heartbeat.after}"
        ]
    stood = f"its counter stood at {heartbeat.before} for {format_duration(round(heartbeat.watched_s))}"
    return [
        f"no sign of life of attempt {heartbeat.attempt}: {stood}; a shim that lives moves it every {format_duration(BEAT_S)}",
        "that alone proves nothing: a shim that stands still, a folder that hangs and one that shows changes late look alike",
    ]
