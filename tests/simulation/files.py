"""A record root that clients reach over a connection and nodes see as a folder: the agent's own code on files in memory.

Every operation of a client is one step, and so is every file that a shim reads or writes. The file system is strict: what
was written is there for everybody. What fails is the way there, a disk without room, and the mount.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from runtime.client.jobs.gc import UNWRITTEN
from runtime.jobs.hosts import agent
from runtime.jobs.hosts.base import Files, HostUnavailable
from runtime.jobs.hosts.remote import RemoteFiles, RemoteHost
from runtime.shim.files import fold_job, is_being_launched, unfold
from runtime.shim.record import load_order
from tests.simulation.choices import Choice
from tests.simulation.world import World

FULL_S: Final = (0.0, 20.0, 200.0)
FULL = Choice("full", 200, 1, 1)
"""The disk has no room for content for a while; it has room for names."""
AWAY_S: Final = (0.0, 3.0, 40.0, 3.0, 40.0)
AWAY = Choice("away", 30, 1, 1, 1, 1)
"""The file system is not mounted for a while: the folder is missing, or (the last two) it is empty."""
CONTENT: Final = ("create", "write", "write_many", "put_piece")
CHANGES: Final = (*CONTENT, "link", "make_folder", "place", "remove", "run")


class Root:
    """The folder, which may be full, and away."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.path: Path = world.folder() / "records"
        self.full_until = 0.0
        self.away_until = 0.0
        self.away = 0
        """0 if it is there, 1 if it is missing, 2 if an empty folder is in its place."""
        self.made_anew: list[str] = []
        """What somebody made in its place."""
        place = agent.GuardedRoot(str(self.path))
        place.known = []
        place.look(making=True)
        self.identity = str(place.id)

    def read(self, name: str) -> bytes | None:
        """Look at a file, folded or not, without a step."""
        return agent.GuardedRoot(str(self.path)).read(name)

    def check_room(self) -> None:
        world = self.world
        if world.me() is not None and (span := world.draw(FULL)):
            self.full_until = world.now + FULL_S[span]
            world.note(f"the disk is full for {FULL_S[span]:g} s")
        if world.now < self.full_until and not world.chance.healed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def weather(self) -> None:
        """Take it away now and then."""
        world = self.world
        while True:
            world.pause(15.0)
            kind = world.draw(AWAY)
            if not kind:
                continue
            empty = kind > 2
            world.note(
                f"the record root is away for {AWAY_S[kind]:g} s, {'an empty folder' if empty else 'nothing'} there"
            )
            self.away_until = world.now + AWAY_S[kind]
            aside = self.path.with_name("records.away")
            self.path.rename(aside)
            if empty:
                self.path.mkdir()
            self.away = 2 if empty else 1
            until = world.now + AWAY_S[kind]
            while world.now < until and not world.chance.healed:
                world.pause(1.0)
            if self.path.exists():
                self.made_anew += [str(each.relative_to(self.path)) for each in sorted(self.path.rglob("*"))]
                self.made_anew += [] if empty else ["the folder itself"]
                shutil.rmtree(self.path)
            aside.rename(self.path)
            self.away = 0
            world.note("the record root is there again")

    def step(self, what: str, do: Callable[[], Any], *, content: bool = False, write: bool = True) -> Any:
        """Do something to a file as a program on a node."""
        if self.world.me() is None:
            return do()
        found: list[Any] = []

        def apply() -> None:
            if content:
                self.check_room()
            found.append(do())

        self.world.call(what, apply, write=write, refused=_refuse)
        return found[0]


def _refuse(status: str) -> Exception:
    return OSError(errno.EIO, os.strerror(errno.EIO))


class SimulatedHost(RemoteHost):
    """The machine that submits, at the other end of a connection."""

    name = "login"

    def __init__(self, root: Root) -> None:
        super().__init__()
        self._root = root
        self.files: Files = RemoteFiles(self, f"login:{root.path}")
        self._place = agent.GuardedRoot(str(root.path))

    def exchange(self, request: bytes, patience_s: float) -> dict[str, Any]:
        asked = json.loads(request)
        do, args = asked["do"], agent.unpack(asked["args"])
        found: list[dict[str, Any]] = []
        change = args[2] if do == "if_held" else do
        named = args[0] if args and isinstance(args[0], str) else ""
        if do == "if_held":
            named = f"{change} {args[3][0]}"
        elif do in ("write_many", "read_many"):
            named = " ".join(each if isinstance(each, str) else each[0] for each in args[0])

        def refused(status: str) -> Exception:
            self._place = agent.GuardedRoot(str(self._root.path))  # the next connection has another agent
            return HostUnavailable("no connection to `login`: it closed the connection without a word")

        self._root.world.call(
            f"{do} {named}",
            lambda: found.append(self._answer(do, args, asked)),
            write=change in CHANGES,
            refused=refused,
        )
        return found[0]

    def _answer(self, do: str, args: list[Any], asked: dict[str, Any]) -> dict[str, Any]:
        """What `agent.serve` says."""
        place = self._place
        if place.id is None:
            place.known = asked.get("known")
        try:
            if do in CONTENT or (do == "if_held" and args[2] in CONTENT):
                self._root.check_room()
            value = _run(*args) if do == "run" else agent.answer(place, do, args)
            return {"id": asked["id"], "value": agent.pack(value), "root": place.id}
        except agent.ForeignRoot as strange:
            return {"id": asked["id"], "strange": [strange.found, strange.there]}
        except Exception as problem:
            return {"id": asked["id"], "error": str(problem), "errno": getattr(problem, "errno", None)}

    def close(self) -> None:
        pass


def _fold(job: str) -> bool:
    if not Path(job, "intent.json").exists() or is_being_launched(job):
        return False
    fold_job(job, load_order(job))
    return True


def _run(words: list[str], *_: object) -> list[Any]:
    """The commands that are known take the files of a job apart, put them together, and list folders without an intent."""
    if UNWRITTEN in words:
        folders = sorted(Path(words[3], "jobs").glob("j-*"))
        return [0, "".join(f"{each.name}/\n" for each in folders if not (each / "intent.json").exists()), ""]
    if "--fold" in words:
        return [
            0,
            "".join(f"{job}\n" for job in words[words.index("--fold") + 1 :] if _fold(f"{words[2]}/jobs/{job}")),
            "",
        ]
    if "--unfold" in words:
        for start in ["", *(f"runs/{index}" for index in words[words.index("--unfold") + 1 :])]:
            unfold(words[2], start)
    return [0, "", ""]
