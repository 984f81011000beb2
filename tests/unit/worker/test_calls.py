"""Calls that a task brings: a worker unpickles what lies in the snapshot, and nothing that a message holds."""

from __future__ import annotations

import base64
import hashlib
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from runtime.tasks.calls import CALLS_FILE
from runtime.worker.attempts import calls


class Trap:
    """A value that notes when it is unpickled."""

    def __reduce__(self) -> Any:
        return (SPRUNG.append, (1,))


SPRUNG: list[int] = []
PICKLED = base64.b64encode(pickle.dumps(Trap())).decode()
REQUEST = {"function": "builtins:abs", "name": "n", "run": False, "args": [], "kwargs": {}, "packed": False, "item": -1}


@pytest.fixture
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Write the file of packed calls of a snapshot, and return its digest."""
    monkeypatch.setenv("RUNTIME_SNAPSHOT_DIR", str(tmp_path))

    def write(**changed: Any) -> str:
        content = json.dumps({**REQUEST, **changed}).encode()
        (tmp_path / CALLS_FILE).write_bytes(content)
        return hashlib.sha256(content).hexdigest()

    return write


def test_request_calls_a_function_of_a_module() -> None:
    assert calls.call_request(dict(REQUEST)) == 1


@pytest.mark.parametrize(
    "hostile",
    [
        {"packed": True, "item": PICKLED},
        {"packed": True, "args": [PICKLED]},
        {"pickled": {"function": PICKLED, "python": "3.11", "cloudpickle": "3"}},
    ],
    ids=["item", "args", "function"],
)
def test_request_with_a_pickle_is_refused_and_loads_nothing(hostile: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="brings a pickle itself"):
        calls.call_request({**REQUEST, **hostile})

    assert SPRUNG == []


def test_packed_call_takes_an_item_of_the_message_only_as_json(packed: Any) -> None:
    assert calls.call_packed(None, "abs", packed(), {"item": -2, "number": 4}) == 2
    with pytest.raises(ValueError, match="takes those of its snapshot"):
        calls.call_packed(None, "abs", packed(packed=True), {"item": PICKLED, "number": 4})
    assert SPRUNG == []


@pytest.mark.parametrize("name", ["pickled", "packed", "args", "function"])
def test_message_changes_nothing_else_of_a_packed_call(packed: Any, name: str) -> None:
    value = calls.call_packed(None, "abs", packed(), {"item": -2, "number": 4, name: PICKLED})

    assert (value, SPRUNG) == (2, [])


def test_packed_call_of_another_file_is_refused(packed: Any) -> None:
    packed()

    with pytest.raises(ValueError, match="is not the one that abs was submitted with"):
        calls.call_packed(0, "abs", "0" * 64)
