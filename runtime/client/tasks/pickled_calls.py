"""Calls for tasks that name no function of a module: packed in a file that goes with the snapshot."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final

from runtime.client.params import SHOWN
from runtime.client.tasks.build import function_entry, is_importable
from runtime.client.tasks.task_snapshot import SubmittedCode
from runtime.errors import InvalidTask, NotPossible, RequestRefused
from runtime.tasks.calls import CALL_PACKED, CALLS_FILE
from runtime.tasks.model import FunctionEntry, is_plain

if TYPE_CHECKING:
    from runtime.jobs.call import FunctionCall

NO_VALUE: Final = 0x2A0
"""Flags of the code of generators and coroutines; `inspect`, which names them, takes long to import."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWork:
    """A call for one task, and the files that go with its snapshot."""

    function: str
    entry: FunctionEntry
    more: Mapping[str, bytes]


def pack_work(work: object, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> PackedWork | None:
    """Pack a call whose function no module has, or whose arguments JSON does not hold; None for any other work.

    Raises like `runtime.client.functions.make_call`.
    """
    if isinstance(work, FunctionType):
        if work.__code__.co_flags & NO_VALUE:
            from runtime.client.functions import check_returns_value

            check_returns_value(work)
        if not kwargs and is_importable(work) and all(map(is_plain, args)):
            return None
    elif not callable(work) or isinstance(work, Mapping):
        return None
    try:
        function_entry(work, args, kwargs)
        return None
    except InvalidTask:
        raise
    except RequestRefused:
        pass
    from runtime.client.functions import make_call

    call, _ = make_call(work, args, kwargs)
    content = encode_packed(request_of(call, call.function))
    shown = {SHOWN: call.args[0][SHOWN]} if call.packed else {}
    entry = FunctionEntry(CALL_PACKED, (None, call.function, digest(content), *([shown] if shown else [])))
    return PackedWork(function=call.function, entry=entry, more={CALLS_FILE: content})


def request_of(call: FunctionCall, name: str) -> dict[str, Any]:
    """A call as `runtime.worker.attempts.calls` makes it, without the items of its runs."""
    made = call.pickled
    pickled = {"function": made.function, "python": made.python, "cloudpickle": made.cloudpickle} if made else None
    request = {
        "function": call.function,
        "name": name,
        "run": call.run,
        "args": list(call.args),
        "kwargs": dict(call.kwargs),
        "packed": call.packed,
    }
    return {**request, "pickled": pickled} if pickled else request


def encode_packed(request: Mapping[str, Any]) -> bytes:
    return json.dumps(request, sort_keys=True).encode()


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def check_packed(function: str, snapshot: object, code: SubmittedCode) -> None:
    """Raise `NotPossible` if the snapshot, in which the packed calls lie, does not go with the tasks."""
    if code.snapshot is None or isinstance(snapshot, str):
        raise NotPossible(
            f"`{function}` is packed in the snapshot that goes with the task, and `snapshot` is {snapshot!r}",
            hint="leave `snapshot` out, or move the function into a module that the workers have",
        )
