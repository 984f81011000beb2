"""Options of `docker run` in a cluster file, sorted into the settings of a stack and what no stack takes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from runtime.clusters.convert.notes import Notes, holds_secret
from runtime.outputs import is_free_variable
from runtime.secret_detection import is_secret

_SHORT: Final = {"v": "volume", "e": "env", "m": "memory", "c": "cpu-shares"}
_FLAGS: Final = frozenset({"privileged", "rm", "init", "detach", "interactive", "tty", "d", "i", "t", "it", "dit"})
_DEFAULTS: Final = frozenset({"memlock=-1:-1", "memlock=-1", "nofile=1048576:1048576", "nofile=1048576"})
_CARRIED: Final = frozenset(
    {"cap-add", "cpu-shares", "cpus", "cpuset-cpus", "memory", "memory-reservation", "memory-swap", "oom-score-adj"}
)
_HOST_FOLDERS: Final = "/data|/local|/media|/mnt|/scratch|/srv|/tmp|/var/tmp"
_PATH: Final = r"(?:/(?!\.\.?(?:/|:|$))[A-Za-z0-9._-]+)"
_MOUNT: Final = re.compile(rf"(?:{_HOST_FOLDERS}){_PATH}*:{_PATH}+(?::ro)?")
_SYSTEM: Final = re.compile(
    r"[^:]*:/(?:bin|boot|dev|etc|lib|lib64|opt|proc|run|sbin|sys|usr|var/run|tmp/ray)(?:/[^:]*)?(?::ro)?"
)
_SIZE: Final = re.compile(r"([1-9][0-9]{0,5})([kmg])b?", re.IGNORECASE)
_ENDED: Final = "systemd starts Ray's container again whenever it ends"


@dataclass(slots=True, kw_only=True)
class ContainerSettings:
    """Settings of one kind of machine's container."""

    shm_size: str | None = None
    mounts: list[str] = field(default_factory=list)
    options: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)

    def settings(self) -> dict[str, Any]:
        named = {"shm_size": self.shm_size, "mounts": self.mounts, "options": self.options}
        return {key: value for key, value in named.items() if value}


def read_options(options: Sequence[str], where: str, notes: Notes, *, head: bool) -> ContainerSettings:
    """Sort options of `docker run`; an option and its value may be one item of the list or two."""
    made = ContainerSettings()
    for name, value, written in _pairs(options, where, notes):
        _sort(made, name, value, written, where, notes, head=head)
    return made


def add_variable(variables: dict[str, str], name: str, value: str, where: str, notes: Notes) -> None:
    if is_secret(name, value) or holds_secret(f"{name}={value}"):
        step = "the value is in a file that others read: have a new one made, put it into Secret Manager with"
        notes.add(where, f"{name}=…", f"{step} `runtime secrets put`, and name it in `secrets` and `environment`")
    elif not is_free_variable(name):
        notes.add(
            where, f"{name}={value}", "Ray, the system or the runtime sets or obeys this variable; it is left out"
        )
    elif not value.isprintable():
        notes.add(where, f"{name}=…", "a variable is one line of text; put this one into the image")
    else:
        variables[name] = value


def _pairs(options: Sequence[str], where: str, notes: Notes) -> Iterator[tuple[str, str | None, str]]:
    """Yield name, value and the text of each option."""
    words: list[str] = []
    for each in options:
        try:
            words += shlex.split(each)
        except ValueError:
            notes.add(where, each, "its quotes do not close; it is left out")
    place = 0
    while place < len(words):
        word = words[place]
        place += 1
        found = re.fullmatch(r"--?([A-Za-z][A-Za-z-]*)(?:=(.*))?", word, re.DOTALL)
        if not found:
            # `-v/a:/b` and `-eNAME=value` have their value in the same word.
            joined = re.fullmatch(r"-([vemc])(.+)", word, re.DOTALL)
            if joined:
                yield _SHORT[joined[1]], joined[2], word
            else:
                notes.add(where, word, "is no option of `docker run`; it is left out")
            continue
        name, value = _SHORT.get(found[1], found[1]), found[2]
        if value is None and name not in _FLAGS and place < len(words) and not words[place].startswith("--"):
            value = words[place]
            place += 1
        yield name, value, word if value is None or found[2] is not None else f"{word} {value}"


def _sort(
    made: ContainerSettings, name: str, value: str | None, written: str, where: str, notes: Notes, *, head: bool
) -> None:
    match name:
        case "privileged":
            if head:
                notes.add(
                    where, written, "the head's container has no rights over the machine; nodes have them for TPUs"
                )
        case "rm" | "init" | "detach" | "d" | "interactive" | "i" | "tty" | "t" | "it" | "dit" | "restart" | "name":
            notes.add(where, written, _ENDED)
        case "net" | "network":
            if value != "host":
                notes.add(
                    where, written, "Ray's containers have the machine's network, so that Ray's ports are reached"
                )
        case "env":
            variable, is_set, text = (value or "").partition("=")
            if is_set:
                add_variable(made.variables, variable, text, where, notes)
            else:
                notes.add(
                    where, written, "takes its value from the shell of whoever ran `ray up`; set it in `variables`"
                )
        case "volume":
            _mount(made, value or "", written, where, notes)
        case "shm-size":
            found = _SIZE.fullmatch(value or "")
            if found and found[2].lower() in "mg":
                made.shm_size = f"{found[1]}{found[2].lower()}"
            else:
                notes.add(where, written, "is no size such as `8g` or `512m`; set `container.shm_size`")
        case "ulimit":
            if value not in _DEFAULTS:
                made.options.append(f"--ulimit={value}")
        case _ if name in _CARRIED and value:
            made.options.append(f"--{name}={_as_size(name, value)}")
        case _:
            notes.add(where, written, "no stack sets this option; what the container needs belongs into the image")


def _as_size(name: str, value: str) -> str:
    found = _SIZE.fullmatch(value) if name.startswith("memory") else None
    return f"{found[1]}{found[2].lower()}" if found else value


def _mount(made: ContainerSettings, mount: str, written: str, where: str, notes: Notes) -> None:
    mount = mount.removesuffix(":rw")
    if "docker.sock" in mount:
        step = "whoever writes to the socket is root of the machine; run what needs another image as a job on another target"
        notes.add(where, written, step)
    elif _MOUNT.fullmatch(mount) and not _SYSTEM.fullmatch(mount):
        if mount not in made.mounts:
            made.mounts.append(mount)
    else:
        folders = _HOST_FOLDERS.replace("|", ", ")
        notes.add(where, written, f"a container sees folders of its machine in {folders} only, at places of its own")
