"""Named fault points: places where a test can make this process die, stall or raise.

Off unless RUNTIME_FAULTS is set, such as `worker.mid_commit=kill:after=3,attempt.started=stall`. Actions: `kill`
(SIGKILL to itself), `exit` (status 70), `stall` (sleeps for ever), `raise`. `after=N` lets N times pass first.
"""

import os

TYPE_CHECKING = False  # the shim ships this module too, for Python from 3.6 on
if TYPE_CHECKING:
    from collections.abc import Mapping

ACTIONS = ("kill", "exit", "stall", "raise")


class FaultReached(Exception):
    """The exception that `raise` raises."""


def parse_faults(text: str) -> "dict[str, tuple[str, int]]":
    """Name → action and how often it is passed before it acts. Raises `ValueError`."""
    faults = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, _, rest = item.partition("=")
        action, _, option = rest.partition(":")
        key, _, count = option.partition("=")
        if action not in ACTIONS or (option and (key != "after" or not count.isdecimal())):
            raise ValueError(f"RUNTIME_FAULTS: `{item}` is no fault, expected name={'|'.join(ACTIONS)}[:after=N]")
        faults[name] = (action, int(count or 0))
    return faults


_armed: "dict[str, tuple[str, int]]" = {}


def arm(environ: "Mapping[str, str]" = os.environ) -> None:
    """Read the variable again; it is read once when this module is imported."""
    _armed.clear()
    _armed.update(parse_faults(environ.get("RUNTIME_FAULTS", "")))


def reach(name: str) -> None:
    """Pass a fault point: nothing happens unless it is armed."""
    if _armed and name in _armed:
        _act(name)


def _act(name: str) -> None:
    action, left = _armed[name]
    if left:
        _armed[name] = (action, left - 1)
        return
    if action == "raise":
        raise FaultReached(name)
    os.write(2, f"fault point {name}: {action}\n".encode())
    if action == "kill":
        os.kill(os.getpid(), 9)
    if action == "exit":
        os._exit(70)
    import time

    while True:
        time.sleep(3600)


arm()
