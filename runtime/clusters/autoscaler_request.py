"""Requests to Ray's autoscaler by `ray.autoscaler.sdk.request_resources`, in the store of Ray's head.

The autoscaler reads it every five seconds, and it is gone with the head. The SDK writes the same key, but only from a
program that has joined the cluster as a driver, and cannot read it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from runtime.errors import InfrastructureFailure, MissingExtra

if TYPE_CHECKING:
    from runtime.clusters.warm_nodes import Request

PATIENCE_S: Final = 10
RUNS_THERE: Final = (
    "the command belongs on the head: `runtime cluster exec -- sudo systemctl start runtime-ray-buffer` runs it there, "
    "and `runtime cluster exec -- sudo docker logs --tail 100 ray` shows whether Ray runs"
)


class RayRequest:
    """The request in the store at `address`, `HOST:PORT`."""

    def __init__(self, address: str) -> None:
        """Raises `MissingExtra` without Ray, `InfrastructureFailure` if the store does not answer."""
        try:
            from ray._private.ray_constants import AUTOSCALER_RESOURCE_REQUEST_CHANNEL
            from ray._raylet import GcsClient  # type: ignore[attr-defined]  # a compiled module
            from ray.exceptions import RayError
        except ImportError:
            raise MissingExtra("asking Ray's autoscaler", "ray") from None
        self.address = address
        self._key: bytes = AUTOSCALER_RESOURCE_REQUEST_CHANNEL
        self._error = RayError
        try:
            self._store: Any = GcsClient(address=address)
        except RayError as problem:
            raise self._failed(problem) from problem

    def read(self) -> Request:
        """Return the request; an empty one if there is none, or it is not of Ray's form, which Ray ignores too."""
        try:
            text = self._store.internal_kv_get(self._key, None, PATIENCE_S)
        except self._error as problem:
            raise self._failed(problem) from problem
        try:
            parts = json.loads(text or b"[]")
        except ValueError:
            return []
        return [each for each in parts if isinstance(each, dict)] if isinstance(parts, list) else []

    def write(self, request: Request) -> None:
        try:
            self._store.internal_kv_put(self._key, json.dumps(request).encode(), True, None, PATIENCE_S)
        except self._error as problem:
            raise self._failed(problem) from problem

    def _failed(self, problem: Exception) -> InfrastructureFailure:
        return InfrastructureFailure(
            f"no answer of Ray's store at `{self.address}`: {problem}",
            hint=RUNS_THERE,
        )
