"""Files of attempts: kept outputs, checkpoints and long logs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path

from runtime.clock import Clock
from runtime.records.base import KeptOutputs
from runtime.records.blobs.base import Blobs
from runtime.records.layout import log_key
from runtime.records.objects import Objects


class BlobFiles(Objects):
    """Files under the task and the token of their attempt."""

    def __init__(self, blobs: Blobs, *, clock: Clock | None = None) -> None:
        super().__init__(blobs, clock=clock)
        self._outputs: str | None = None

    def log_url(self, task_id: str, token: str) -> str:
        return self._address(log_key(task_id, token))

    def outputs_url(self, task_id: str, token: str) -> str:
        # On the path of every task, so the place that all of them share is looked up once.
        if self._outputs is None:
            self._outputs = self._address("outputs/").rstrip("/")
        return f"{self._outputs}/{task_id}/{token}"

    def checkpoints_path(self, task_id: str) -> str | None:
        path = self.blobs.path(f"checkpoints/{task_id}")
        return None if path is None else str(path)

    def keep_outputs(self, task_id: str, token: str, folder: Path) -> KeptOutputs:
        from runtime.records import kept_outputs

        key = f"outputs/{task_id}/{token}"
        found = kept_outputs.find_outputs(folder)
        if self.blobs.path(key) is not None:
            # What lies there stays there, whatever it is.
            if not (found.files or found.others):
                found.remove_empty()
                return KeptOutputs()
            found.sync()
            return KeptOutputs(self._address(key))
        odd = {name: why for name in found.files if (why := kept_outputs.why_no_object(name))}
        names = [name for name in found.files if name not in odd]
        deque(self._in_parallel(lambda name: self.blobs.upload(f"{key}/{name}", found.files[name]), names), maxlen=0)
        left_out = kept_outputs.tell_left_out(found.others | odd)
        return KeptOutputs(self._address(key) if names else None, left_out)

    def append_log(self, task_id: str, token: str, data: bytes) -> str:
        key = log_key(task_id, token)
        self.blobs.append(key, data)
        return self._address(key)

    def read_log(self, url: str) -> Iterator[bytes]:
        return self.blobs.stream("/".join(url.split("/")[-3:]))

    def close(self) -> None:
        self._outputs = None
        super().close()
