"""The record of a run as the driver reads it: from one thread, and rarely where each look is a paid request."""

from __future__ import annotations

import math
import time
from typing import Any, Final

from runtime.shim.record import RunRecord

BUCKET_S: Final = 5.0
"""How often a mark is looked for in a bucket, as shims do."""


class DriversRun(RunRecord):
    def __init__(self, record: Any, index: int, *, look_s: float) -> None:
        super().__init__(record, index)
        self._look_s, self._looked = look_s, -math.inf
        self._cancelled = False

    def cancelled(self) -> bool:
        """Whether the run has a cancel mark, by a look that is at most `look_s` old."""
        now = time.monotonic()
        if not self._cancelled and now - self._looked >= self._look_s:
            self._cancelled, self._looked = bool(super().cancelled()), now
        return self._cancelled
