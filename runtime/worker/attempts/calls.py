"""Functions of tasks that call other functions: with a run, or packed in the snapshot that goes with the task.

What a queue delivers is never unpickled: packed functions and arguments lie in a file of the snapshot, whose content id the
worker has checked, and the task only names a place in it.
"""

from __future__ import annotations

import json
import os

from runtime.shim import call
from runtime.tasks.calls import CALLS_FILE, PICKLE
from runtime.worker.attempts import context

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def call_request(request: dict[str, Any], argv: list[str] | None = None) -> Any:
    """Call a function of a module with JSON arguments, and with its run if the request says so; `argv` is its submitter's.

    Raises as `check_request`.
    """
    return _call(check_request(request), argv)


def check_request(request: dict[str, Any]) -> dict[str, Any]:
    """Return a request that a message brings. Raises `ValueError` for one with a pickle, which no snapshot vouches for."""
    if request.get("pickled") is not None or request["packed"]:
        raise ValueError("the task brings a pickle itself, and only those of its snapshot are loaded")
    return request


def call_packed(
    number: int | None, label: str, digest: str, more: dict[str, Any] | None = None, argv: list[str] | None = None
) -> Any:
    """Make a call of the snapshot's file. Raises as `read_packed`."""
    return _call(read_packed(number, label, digest, more), argv)


def read_packed(number: int | None, label: str, digest: str, more: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the request in the snapshot's file, whose SHA-256 is `digest`: that of item `number`, or with the `item` and
    `number` of `more`. Nothing is unpickled; `label` is for people.

    Raises `ValueError` for another file, and for an item that would have to be unpickled.
    """
    import hashlib  # here, since the guardian loads this module

    root = os.environ.get("RUNTIME_SNAPSHOT_DIR")
    if not root:
        raise ValueError(f"{label} is packed in a snapshot, and the task has none")
    with open(f"{root}/{CALLS_FILE}", "rb") as opened:  # noqa: PTH123 - pathlib is too large here
        content = opened.read()
    if hashlib.sha256(content).hexdigest() != digest:
        raise ValueError(f"{CALLS_FILE} of the snapshot is not the one that {label} was submitted with")
    request: dict[str, Any] = json.loads(content)
    if number is not None:
        request.update(item=request["items"][number], number=number)
    if more is not None and "item" in more:
        if request["packed"]:
            raise ValueError("the task brings an argument itself, and the call takes those of its snapshot")
        request.update(item=more["item"], number=more["number"])
    return request


def _call(request: dict[str, Any], argv: list[str] | None) -> Any:
    try:
        function = call.load(request)
    except call.IncompatibleFunction as problem:
        raise TypeError(str(problem)) from None
    args, kwargs = call.load_arguments(request)
    run = context.current_attempt()
    run.bind(int(request.get("number", 0)), argv)
    if request["run"]:
        run.variant = args[0] if args else None
        args = [run, *args]
    value = function(*args, **kwargs)
    if call.is_json(value, finite=False) and not (isinstance(value, dict) and list(value) == [PICKLE]):
        return value
    import base64

    return {PICKLE: base64.b64encode(call.dump(value)).decode("ascii")}
