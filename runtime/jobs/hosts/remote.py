"""A machine at the other end of a connection: the agent travels over it as text, and answers requests there."""

from __future__ import annotations

import json
from abc import abstractmethod
from pathlib import Path
from typing import Any, Final

from runtime.errors import StoreUnavailable
from runtime.jobs.hosts import agent
from runtime.jobs.hosts.base import AgentFiles, AgentHost, HostUnavailable, RootWatch, explain_refusal
from runtime.shim import tree_walk
from runtime.system import system

PROGRAM: Final = "import sys; n = int(sys.stdin.buffer.readline()); exec(sys.stdin.buffer.read(n).decode())"
"""Python that reads the agent from its standard input and runs it."""

_CARRY: Final = """
import sys
module = type(sys)({module!r})
exec({source!r}, module.__dict__)
sys.modules[{module!r}] = module
"""
"""Makes a module of the package importable that the agent needs."""


def render_agent(mark: str, root: str) -> bytes:
    """The input of `PROGRAM`: an agent that serves `root` and writes `mark` before each answer."""
    carried = _CARRY.format(module=tree_walk.__name__, source=Path(tree_walk.__file__).read_text(encoding="utf-8"))
    text = carried.encode() + Path(agent.__file__).read_bytes() + f"\nserve({mark!r}, {root!r})\n".encode()
    return b"%d\n" % len(text) + text


class RemoteHost(AgentHost):
    """Brings requests to an agent elsewhere, one at a time, through `exchange` of a subclass."""

    def __init__(self) -> None:
        self.watch: RootWatch | None = None
        self._lock = system.lock()
        self._count = 0

    def ask(self, do: str, *args: Any, patience_s: float = 60) -> Any:
        """Make one request. Raises `HostUnavailable`, and `StoreUnavailable` for a file that is refused."""
        with self._lock:
            self._count += 1
            request = {"id": self._count, "do": do, "args": agent.pack(list(args))}
            if self.watch is not None:
                # The request names the root that is meant, so looking for its marker takes no exchange.
                request["known"] = list(self.watch.known)
            said = self.exchange(json.dumps(request).encode() + b"\n", patience_s)
        if self.watch is not None and "strange" in said:
            found, there = said["strange"]
            raise self.watch.refusal(found, there=there)
        if self.watch is not None and said.get("root"):
            self.watch.saw(said["root"])
        if "error" in said:
            raise self.explain(said["error"], said["errno"])
        return agent.unpack(said["value"])

    @abstractmethod
    def exchange(self, request: bytes, patience_s: float) -> dict[str, Any]:
        """Send a line and return the agent's answer, connecting first if need be. Raises `HostUnavailable`."""

    def explain(self, said: str, number: int | None) -> StoreUnavailable:
        """The error for a file that the agent was refused."""
        return explain_refusal(self.files.address, said, number)


class RemoteFiles(AgentFiles):
    """A folder of another machine."""

    def __init__(self, host: RemoteHost, address: str) -> None:
        self._host, self.address = host, address

    def keep_to(self, watch: RootWatch) -> None:
        self._host.watch = watch

    def ask(self, do: str, *args: Any, patience_s: float = 60) -> Any:
        return self._host.ask(do, *args, patience_s=patience_s)

    def tree(self, folder: str) -> list[tuple[str, int]]:
        try:
            return super().tree(folder)
        except (TypeError, ValueError):
            name = self._host.name
            raise HostUnavailable(
                f"`{name}` answers with no list of files", hint=f"try it by hand: ssh {name} true"
            ) from None
