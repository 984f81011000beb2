"""The child that this process is, if it is one that runs attempts."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runtime.worker.attempts.child import ChildServer

server: ChildServer | None = None
"""Set once the process serves as a child."""
