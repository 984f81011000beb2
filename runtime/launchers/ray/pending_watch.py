"""Looks at the cluster for a driver whose runs wait, and says why they do. Its sources only explain: none may end a driver."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from runtime.launchers.ray.cluster_state import read_view
from runtime.launchers.ray.pending_reason import describe_demand, explain_wait

PAUSE_S: Final = 10.0
CONTRACT: Final = "/etc/runtime-ray/config/contract.json"
"""The stack's contract on a head that a stack made."""
_STATUS, _ERROR = b"__autoscaling_status", b"__autoscaling_error"
_LOG_BYTES: Final = 1 << 18


class Watch:
    def __init__(self, wants: Mapping[str, Any], nodes: int) -> None:
        self.wants, self.nodes = wants, nodes
        self.for_what = describe_demand(wants, nodes)
        self._looked = -math.inf
        self._why: dict[str, Any] = {}

    def look(self, tell_order: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """Why runs wait, at most `PAUSE_S` old: what they wait for, sentence, evidence and hint, with what
        `tell_order` says of the runs before them."""
        if time.monotonic() - self._looked >= PAUSE_S:
            try:
                self._why = {**self._explain(), **tell_order()}
            except Exception as problem:  # Ray's errors have no common base, and nothing here may end a driver
                self._why = {"for": self.for_what, "error": type(problem).__name__}
            self._looked = time.monotonic()
        return self._why

    def _explain(self) -> dict[str, Any]:
        import ray
        from ray._private.state import available_resources_per_node
        from ray.experimental.internal_kv import _internal_kv_get

        view = read_view(
            ray.nodes(),
            available_resources_per_node(),
            contract=_read_end(CONTRACT),
            head=os.uname().nodename,
            status=_internal_kv_get(_STATUS),
            error=_internal_kv_get(_ERROR),
            log=_read_end(_find_log()) or "",
            now=time.time(),
        )
        found = explain_wait(self.wants, self.nodes, view)
        return {
            "for": self.for_what,
            "sentence": found.sentence,
            "evidence": list(found.evidence),
            "hint": found.hint,
        }


def _find_log() -> str:
    from ray._private import worker

    node: Any = worker._global_node
    return f"{node.get_session_dir_path()}/logs/monitor.log"


def _read_end(path: str) -> str | None:
    try:
        with Path(path).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _LOG_BYTES))
            return file.read(_LOG_BYTES).decode("utf-8", "replace")
    except OSError:
        return None
