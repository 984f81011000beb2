"""Set-up commands of a cluster file: those that read secrets, those that set variables, and the rest."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from typing import Final

from runtime.clusters.convert.container import add_variable
from runtime.clusters.convert.notes import READS, Notes, holds_secret
from runtime.outputs import PROJECT_ID, is_free_variable

_NAME: Final = re.compile(r"--secret[=\s]+[\"']?(?P<name>[A-Za-z0-9_-]{1,255})[\"']?(?:\s|$)")
_PROJECT: Final = re.compile(rf"--project[=\s]+[\"']?(?P<project>{PROJECT_ID.pattern})[\"']?(?:\s|$)")
_VERSION: Final = re.compile(r"\s*[\"']?(?P<version>[0-9]+|latest)\b")
_INTO: Final = re.compile(r">\s*(?P<file>[^\s;&|)]+)")
_EXPORT: Final = re.compile(r"export\s+(?P<name>[A-Za-z_][A-Za-z0-9_]*)=(?P<value>.*)", re.DOTALL)
_SET: Final = re.compile(r"gcloud\s+config\s+set\s+(?:core/)?project\s+[\"']?(?P<project>[a-z0-9.:-]+)[\"']?")
_KEY: Final = re.compile(r"[a-z](?:[a-z0-9-]{0,38}[a-z0-9])?")
LONGEST_SETUP: Final = 16 * 1024

_KNOWN: Final = (
    (
        r"\bchmod\b.{0,200}docker\.sock",
        "makes every program of the machine root; nothing here needs it, so leave it out",
    ),
    (
        r"docker\.sock",
        "whoever writes to the socket is root of the machine; run what needs containers on another target",
    ),
    (r"get\.docker\.com|\bwhich\s+docker\b|usermod\s.{0,200}\bdocker\b", "the machine has Docker and uses it as root"),
    (r"gcloud\s+auth\s+configure-docker", "the machine logs in to the image's registry with its own identity"),
    (
        r"authorized_keys|\.ssh/",
        "people log in with `runtime cluster attach`, and the head makes its own key for nodes",
    ),
    (r"\bgcsfuse\b", "read and write gs:// URLs, or mount the bucket in `setup` below /mnt and name it in `mounts`"),
    (r"gcloud\s+config\s+set", "a program gets project and zone from the metadata server, or by its own options"),
    (r"\brm\s.{0,200}/tmp/ray\b", "each start of Ray has a new container, and sessions older than a week are dropped"),
    (r"\.ray/auth_token", "Ray's token authentication is not set up by a stack; no port is open beyond the subnet"),
)
"""The replacement for each kind of command."""


@dataclass(slots=True, kw_only=True)
class SetUp:
    """The parts of the commands that a stack keeps."""

    secrets: dict[str, dict[str, str]] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    """Lines of the machine's own script."""


def read_machine_commands(commands: list[str], where: str, made: SetUp, notes: Notes, *, project: str) -> None:
    """Sort commands that ran on the machine itself, as the user of `ray up`; here they run as root."""
    for index, command in enumerate(commands):
        at = f"{where}[{index}]"
        if _sort(command, at, made, notes, project):
            continue
        if re.search(r"\$\{?(?:HOME|USER|LOGNAME)\b|(?:^|[\s=:])~(?:/|\s|$)", command):
            notes.add(at, command, "is about the user who logged in; write it for root in `setup`")
        elif any(not (each.isprintable() or each in "\n\t") for each in command):
            notes.add(at, command, "has a control character; write it in `setup` without")
        elif sum(len(each.encode()) + 1 for each in (*made.lines, command)) > LONGEST_SETUP:
            notes.add(at, command, "makes `setup` longer than 16 KiB; put it into the image, or have a script fetch it")
        else:
            made.lines.append(command.strip("\n"))


def read_container_commands(commands: list[str], where: str, made: SetUp, notes: Notes, *, project: str) -> None:
    """Sort commands that ran in the container at each start."""
    for index, command in enumerate(commands):
        at = f"{where}[{index}]"
        if not _sort(command, at, made, notes, project):
            step = "ran in the container at each start: put it into the image, `RUN` in its Dockerfile"
            notes.add(at, command, f"{step}; `setup` runs on the machine")


def _sort(command: str, at: str, made: SetUp, notes: Notes, project: str) -> bool:
    """Carry a command, or note what takes its place. Return False for a command that neither was done with."""
    # A value that is typed into the file comes before all else: no other rule repeats it.
    if holds_secret(command):
        step = "have a new value made, put it into Secret Manager with `runtime secrets put`"
        notes.add(at, command, f"{step}, and name it in `secrets` and `environment`")
        return True
    if found := list(READS.finditer(command)):
        for each in found:
            _read_secret(command, each["rest"], at, made, notes, project)
        return True
    if found_project := _SET.fullmatch(command.strip()):
        add_variable(made.variables, "GOOGLE_CLOUD_PROJECT", found_project["project"], at, notes)
        return True
    if exported := _EXPORT.fullmatch(command.strip()):
        return _read_export(exported["name"], exported["value"], command, at, made, notes)
    if re.fullmatch(r"\s*mkdir\s[^;&|]*", command) and "/.cache/" in command:
        notes.add(at, command, "the image makes the folders that it needs; secrets are in variables and in no file")
        return True
    for form, instead in _KNOWN:
        if re.search(form, command):
            notes.add(at, command, instead)
            return True
    return False


def _read_export(name: str, value: str, command: str, at: str, made: SetUp, notes: Notes) -> bool:
    try:
        words = shlex.split(value)
    except ValueError:
        words = []
    if len(words) > 1 or "$" in value or "`" in value or (value and not words):
        notes.add(at, command, "a variable of a stack has a plain value; write that into `variables`")
    else:
        add_variable(made.variables, name, words[0] if words else "", at, notes)
    return True


def _read_secret(command: str, rest: str, at: str, made: SetUp, notes: Notes, project: str) -> None:
    named = _NAME.search(rest)
    if not named:
        notes.add(at, command, "name the secret in `secrets` and in the head's `environment`")
        return
    name = named["name"]
    exported = _EXPORT.match(command.strip())
    variable = exported["name"] if exported else re.sub(r"[^A-Za-z0-9]", "_", name).upper()
    key = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if not is_free_variable(variable) or re.search(r"_PUBLIC_KEY$|^SSH_|PRIVATE_KEY$", variable):
        step = "keys for SSH are the head's own, and Ray's variables are not for a stack to set; it is left out"
        notes.add(at, command, step)
        return
    if not _KEY.fullmatch(key):
        notes.add(at, command, "name the secret in `secrets` by 40 letters, digits and dashes at most")
        return
    asked = _PROJECT.search(rest)
    existing = f"projects/{asked['project'] if asked else project}/secrets/{name}"
    others = {each: its for each, its in made.secrets.items() if each != key}
    if (
        any(its["env"] == variable for its in others.values())
        or made.secrets.get(key, {}).get("existing", existing) != existing
    ):
        notes.add(at, command, "another secret has that name or variable already; add it to `secrets` by hand")
        return
    made.secrets[key] = {"env": variable, "existing": existing}
    version = _VERSION.match(rest)
    if version and version["version"] != "latest":
        notes.add(at, command, "the newest enabled version is read, and no other one")
    into = _INTO.search(command)
    if into:
        step = f"the value is in the variable {variable} of every process, and in no file"
        notes.add(at, command, f"{step}: what reads {into['file']} reads the variable instead")
