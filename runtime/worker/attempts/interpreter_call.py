"""Calls of functions and workflows in another Python than the worker's: that of the task's environment or container.

That Python runs `runtime.shim.call`, which needs nothing but its standard library, and leaves what the function returned or
raised in a file. This process reads that file, and loads no pickle from it. Loaded only for such attempts.
"""

# pathlib is too large for the processes that load this.
# ruff: noqa: PTH100, PTH109, PTH110, PTH120, PTH123, PTH211

from __future__ import annotations

import base64
import json
import os

from runtime.shim import call as program
from runtime.tasks.calls import CALL_PACKED, CALL_REQUEST, PICKLE
from runtime.worker.attempts import calls, entries, scratch, wire
from runtime.worker.attempts.entries import AttemptFailed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_NO_JSON, _NOT_LOADED = "__main__.NoJson", f"{__name__}.NotLoaded"
_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
"""The folder of the worker's own `runtime`."""


_MARKED = b'{"%s":' % PICKLE.encode()


class InterpreterCall:
    """A call, by the files in a folder of its own."""

    def __init__(self, python: str, folder: str, body: dict[str, Any], started_in: str | None = None) -> None:
        self._folder, self._body, self._started_in = folder, body, started_in
        self._is_call = body.get("function") in (CALL_PACKED, CALL_REQUEST)
        self.argv = [python, os.path.abspath(program.__file__), f"{folder}/call.json"]
        self.mounts: list[dict[str, str]] = []
        """Folders of the worker's machine that the call needs in a container."""

    def write(self, *, inside: str = "") -> None:
        """Write the request. Raises `AttemptFailed` if it cannot be made, or the Python is gone.

        `inside` is the folder that the call starts in if it is made in a container.
        """
        if not inside and not os.path.exists(self.argv[0]):
            raise AttemptFailed("setup_failed", f"the environment of the task is gone: no `{self.argv[0]}`")
        request = self._make_request()
        # Modules of ours come last, so that those of the code and of the environment stand before them.
        own = f"{self._folder}/own/runtime"
        if inside:
            scratch.make_folder(own)
            self.mounts.append({"source": _PACKAGE, "target": own, "mode": "ro"})
            self.argv[1] = f"{own}/shim/call.py"
        else:
            scratch.make_folder(os.path.dirname(own))
            os.symlink(_PACKAGE, own)
        python_path = os.environ.get("PYTHONPATH", "")
        here = inside or os.getcwd()
        request.update(
            attempt=self._folder,
            folder=here,
            paths=list(dict.fromkeys([here, *filter(None, python_path.split(os.pathsep))])),
            last_paths=[f"{self._folder}/own"],
            variables={"PYTHONPATH": python_path} if python_path else {},
            task=True,
        )
        with open(f"{self._folder}/call.json", "w", encoding="utf-8") as opened:
            json.dump(request, opened)

    def _make_request(self) -> dict[str, Any]:
        body = self._body
        if "workflow" in body:
            args = [body["project"], body["workflow"], list(body.get("args") or ())]
            return _plain(f"{__name__}:call_workflow", args, {"started_in": self._started_in})
        function, args, kwargs = body["function"], list(body.get("args") or ()), dict(body.get("kwargs") or {})
        if not self._is_call:
            return _plain(function, args, kwargs)
        argv = kwargs.pop("argv", None)
        try:
            found = calls.read_packed(*args, **kwargs) if function == CALL_PACKED else calls.check_request(args[0])
            request = dict(found)
        except (OSError, ValueError, TypeError, KeyError, IndexError) as problem:
            entries.print_error(f"error: {entries.describe(problem)}")
            raise AttemptFailed("config_invalid", entries.describe(problem)) from None
        return {**request, "argv": argv}

    # the end

    def explain(self, failure: AttemptFailed) -> AttemptFailed:
        """Return the failure that the program's end stands for."""
        if refusal := self._read(program.SETUP_FAILED):
            return AttemptFailed("config_invalid", refusal.decode(errors="replace"))
        head, _ = self._read_end()
        if not head.get("raised"):
            return failure
        kind, message = str(head.get("type")), str(head.get("message"))
        if kind in (_NO_JSON, _NOT_LOADED):
            return AttemptFailed("config_invalid" if kind == _NOT_LOADED else "app_failed", message[:4000])
        if kind == "SystemExit":
            return AttemptFailed("app_failed", message[:4000], exit_code=1)
        said = f"{kind}: {message}" if message else kind
        return AttemptFailed("oom" if kind == "MemoryError" else "app_failed", said[:4000])

    def read_value(self) -> str:
        """Return the value's JSON text after a success; a value that JSON does not hold is a pickle in an object of ours."""
        head, content = self._read_end()
        if head.get("form") == "json" and self._is_call and content.startswith(_MARKED):
            # A dictionary that looks like a pickle of ours must not be taken for one.
            content, head = program.dump(json.loads(content)), {**head, "form": "pickle"}
        if head.get("form") == "pickle":
            text = wire.encode_json({PICKLE: base64.b64encode(content).decode("ascii")})
        else:
            text = content.decode("utf-8", "surrogatepass")
        if len(text) > wire.MOST_VALUE_BYTES:
            most = wire.MOST_VALUE_BYTES >> 20
            raise AttemptFailed(
                "app_failed", f"the function returned {len(text) >> 20} MiB of JSON; the most is {most} MiB"
            )
        return "" if text == "null" else text

    def _read_end(self) -> tuple[dict[str, Any], bytes]:
        head, _, content = self._read(program.VALUE).partition(b"\n")
        try:
            said = json.loads(head) if head else {}
        except (ValueError, RecursionError):
            said = None
        if not isinstance(said, dict):
            raise AttemptFailed("app_failed", "what it returned cannot be read")
        return said, content

    def _read(self, name: str) -> bytes:
        try:
            with open(f"{self._folder}/{name}", "rb") as opened:
                content = opened.read(wire.MOST_FRAME_BYTES + 1)
        except OSError:
            return b""
        if len(content) > wire.MOST_FRAME_BYTES:
            raise AttemptFailed("app_failed", f"it left more than {wire.MOST_FRAME_BYTES >> 20} MiB of {name}")
        return content


def _plain(function: str, args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {
        "function": function,
        "name": function,
        "args": args,
        "kwargs": kwargs,
        "run": False,
        "packed": False,
        "plain": True,
    }


# in the environment's Python


class NotLoaded(Exception):
    """A workflow that cannot be found, or refuses its arguments."""


def call_workflow(project: str, workflow: str, args: list[str], started_in: str | None) -> Any:
    """Call a workflow, and return its value as far as JSON holds it. `started_in` is that of `load`."""
    import sys

    from runtime.errors import RequestRefused
    from runtime.tasks.model import WorkflowEntry
    from runtime.tasks.workflows import load

    sys.argv = [workflow, *args]
    try:
        entry = WorkflowEntry(project, workflow, tuple(args))
        call = load(entry, started_in=started_in)
    except RequestRefused as refusal:
        entries.print_error(refusal.render())
        raise NotLoaded("; ".join((refusal.message, *refusal.facts))) from None
    value = call()
    text = entries.encode_value(value, strict=False) if value is not None else ""
    return json.loads(text) if text else None
