"""The program that calls a function, `runtime.shim.call`, and its request, as the shim leaves them for a run."""

import importlib.util
import io
import json
import marshal
import os
import sys

from runtime.shim.common import SetupFailed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict

PROGRAM = "runtime.shim.call"
_loaded: "Dict[str, bytes]" = {}


def load_program(python):
    """Return the name and the content of the program's file, which `python` runs.

    If that is the Python of this shim, the program is compiled: a run then starts in half the time.
    """
    name = "call.pyc" if python == sys.executable and sys.version_info >= (3, 7) else "call.py"
    if name not in _loaded:
        # The program is not imported here, because it imports what no shim needs.
        spec: Any = importlib.util.find_spec(PROGRAM)
        source = spec.loader.get_source(PROGRAM)
        if name.endswith("c"):
            code = marshal.dumps(compile(source, "call.py", "exec", dont_inherit=True))
            _loaded[name] = importlib.util.MAGIC_NUMBER + bytes(12) + code
        else:
            _loaded[name] = source.encode("utf-8")
    return name, _loaded[name]


def write_call(order, run, number, scratch):
    """Write the program and its request into `scratch`; returns the words that start it."""
    call = order["call"]
    name, program = load_program(call["python"])
    request = dict(call, attempt=run.attempt_folder(number))
    if "item" in order["runs"][str(run.index)]:
        request["item"] = order["runs"][str(run.index)]["item"]
    checkpoint = order.get("checkpoint")
    if checkpoint:
        request["signals"] = ["SIG" + checkpoint["signal"]]
    # The request of the same Python is read without `json`, which costs a third of a short run.
    same = name.endswith("c")
    files = [
        (name, program),
        ("call.bin", marshal.dumps(request)) if same else ("call.json", json.dumps(request).encode()),
    ]
    try:
        for each, content in files:
            with io.open(os.open(os.path.join(scratch, each), os.O_WRONLY | os.O_CREAT, 0o600), "wb") as opened:
                opened.write(content)
    except (IOError, OSError) as problem:
        raise SetupFailed("cannot write the call: %s" % problem.strerror)
    return [call["python"]] + [os.path.join(scratch, each) for each, _ in files]
