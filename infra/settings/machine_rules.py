"""The rules about the machines of a Ray cluster: variables, the set-up script, the container, the nodes' labels.

Everything here ends in a script or a unit that root runs, so each rule lists what is allowed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Final

from infra.settings.forms import SHM_SIZE
from infra.settings.model import ContainerSettings, MachineSettings
from infra.settings.problems import find_repeated, wrong
from runtime.outputs import is_free_variable
from runtime.schema import Problem, join, suggest
from runtime.secret_detection import find_secret_in_shell, has_known_form, is_secret

VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}")
_ONE_LINE: Final = re.compile(r"[^\x00-\x1f\x7f\x85\u2028\u2029]*")
_IS_BASH: Final = re.compile(r"(?!#!)|#!\S*\b(?:env +)?(?:ba)?sh\b")
_SCRIPT: Final = re.compile(r"[^\x00-\x08\x0b-\x1f\x7f]*")
SETUP_LIMIT_BYTES: Final = 16 * 1024
"""The script travels in the metadata of each machine, and once for each different pool in that of the head."""

_PATH: Final = r"/[A-Za-z0-9._-]+(?:/[A-Za-z0-9._-]+)*"
_MOUNT: Final = re.compile(rf"(?P<host>{_PATH}):(?P<container>{_PATH})(?::ro)?")
HOST_FOLDERS: Final = ("/data", "/local", "/media", "/mnt", "/scratch", "/srv", "/tmp", "/var/tmp")
"""Folders that a container may see of its machine. Others have its programs, accounts, keys and sockets."""
OUR_FOLDERS: Final = (
    "/etc/runtime-ray",
    "/opt/runtime",
    "/opt/runtime-ray",
    "/run/runtime-ray",
    "/tmp/ray",
    "/var/run/runtime-ray",
)
SYSTEM_FOLDERS: Final = ("/bin", "/boot", "/dev", "/etc", "/lib", "/lib64", "/proc", "/run", "/sbin", "/sys", "/usr")
"""Folders of a container that a mount must not hide: programs, accounts, devices."""

_SIZE: Final = r"[1-9][0-9]{0,8}[bkmg]"
_LEAST_MEMORY: Final = 6 << 20
OPTIONS: Final[Mapping[str, str]] = {
    "cap-add": "IPC_LOCK|PERFMON|SYS_NICE|SYS_PTRACE",
    "cpu-shares": r"[0-9]{1,6}",
    "cpus": r"[1-9][0-9]{0,3}(?:\.[0-9]{1,3})?|0\.(?:0[1-9][0-9]?|[1-9][0-9]{0,2})",
    "cpuset-cpus": r"[0-9]{1,4}(?:-[0-9]{1,4})?(?:,[0-9]{1,4}(?:-[0-9]{1,4})?)*",
    "memory": _SIZE,
    "memory-reservation": _SIZE,
    "memory-swap": f"-1|{_SIZE}",
    "oom-score-adj": r"-?(?:[0-9]{1,3}|1000)",
    "ulimit": r"(?:core|memlock|nice|nofile|nproc|rtprio|sigpending|stack)=-?[0-9]{1,12}(?::-?[0-9]{1,12})?",
}
"""Option of `docker run` → its value. None of them gives more of the machine than the container has: a folder is a mount,
and a variable is in `variables`. https://docs.docker.com/reference/cli/docker/container/run/"""
_OPTION: Final = re.compile(r"--(?P<name>[a-z-]+)=(?P<value>[^\s]+)")

# https://docs.ray.io/en/latest/ray-core/scheduling/labels.html: the syntax of Kubernetes, and `ray.io` is Ray's own.
_LABEL_NAME: Final = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
_LABEL_KEY: Final = re.compile(rf"(?:(?=.{{1,253}}/)[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?/)?{_LABEL_NAME}")
_LABEL_VALUE: Final = re.compile(rf"(?:{_LABEL_NAME})?")


def find_machine_problems(machine: MachineSettings, path: str) -> Iterator[Problem]:
    for name, value in machine.variables.items():
        yield from _variable_problems(name, value, join(path, f"variables.{name}"))
    if machine.setup is not None:
        yield from _setup_problems(machine.setup, join(path, "setup"))


def _variable_problems(name: str, value: str, where: str) -> Iterator[Problem]:
    if not VARIABLE.fullmatch(name):
        yield Problem(where, "is no name of a variable: letters, digits and underscores, no digit first, are allowed")
    elif not is_free_variable(name):
        yield Problem(
            where,
            "is a variable that the system, Ray or the runtime sets or obeys",
            "what programs are, load and reach belongs into the image",
        )
    elif is_secret(name, value) or has_known_form(value):
        yield Problem(
            where,
            "looks like the value of a secret, which is not repeated here",
            "name it under `secrets` and in the head's `environment`; `runtime secrets put` takes the value",
        )
    elif not _ONE_LINE.fullmatch(value):
        yield Problem(where, "has a line break or a control character, allowed is one line of text")


def _setup_problems(setup: str, where: str) -> Iterator[Problem]:
    if not _SCRIPT.fullmatch(setup):
        yield Problem(where, "has a control character, allowed are lines that end with a line feed")
    elif len(setup.encode()) > SETUP_LIMIT_BYTES:
        size = f"{len(setup.encode()):,}"
        yield Problem(
            where,
            f"has {size} bytes, allowed are {SETUP_LIMIT_BYTES:,}",
            "put what is larger into the image, or let the script fetch it",
        )
    elif find_secret_in_shell(setup) or has_known_form(setup):
        yield Problem(
            where,
            "has what looks like the value of a secret, which is not repeated here",
            "everyone who sees the machine sees its metadata; `gcloud secrets versions access` in the script reads one",
        )
    elif _IS_BASH.match(setup) and (bash := shutil.which("bash")) is not None:
        looked = subprocess.run([bash, "-n"], input=setup, capture_output=True, text=True, check=False)
        if looked.returncode:
            said = (looked.stderr.strip().splitlines() or ["bash refuses it"])[0]
            yield Problem(where, f"is no Bash: {said.rpartition('bash: ')[2]}")


def find_container_problems(container: ContainerSettings, path: str) -> Iterator[Problem]:
    targets: list[str] = []
    for index, mount in enumerate(container.mounts or ()):
        where = f"{join(path, 'mounts')}[{index}]"
        found = _MOUNT.fullmatch(mount)
        if not found or any(part in (".", "..") for part in re.split("[:/]", mount)):
            yield wrong(where, mount, "`/host/path:/container/path`, or with `:ro` behind it")
            continue
        if not _is_within(found["host"], HOST_FOLDERS):
            yield wrong(where, mount, f"a folder of the machine in {', '.join(HOST_FOLDERS)}")
        if _hides(found["container"]):
            yield wrong(where, mount, "a folder of the container that hides neither Ray's own nor the system's")
        targets.append(found["container"])
    yield from find_repeated(tuple(targets), join(path, "mounts"))
    for index, option in enumerate(container.options or ()):
        yield from _option_problems(option, f"{join(path, 'options')}[{index}]")
    yield from _memory_problems(container.options or (), join(path, "options"))


def _option_problems(option: str, where: str) -> Iterator[Problem]:
    found = _OPTION.fullmatch(option)
    if not found:
        yield wrong(where, option, "`--name=value` in one word")
    elif found["name"] not in OPTIONS:
        other = {
            "env": "use `variables`",
            "volume": "use `mounts`",
            "mount": "use `mounts`",
            "shm-size": "use `shm_size`",
        }
        hint = other.get(found["name"]) or suggest(found["name"], OPTIONS)
        yield wrong(where, option, f"one of {', '.join(f'`--{each}`' for each in OPTIONS)}", hint)
    elif not re.fullmatch(OPTIONS[found["name"]], found["value"]):
        yield wrong(where, option, f"`--{found['name']}=` and a value of the form `{OPTIONS[found['name']]}`")
    elif found["name"] == "ulimit" and not _is_below_hard(found["value"]):
        yield wrong(where, option, "a soft limit of at most the hard one")
    elif found["name"] == "cpuset-cpus" and any(first > last for first, last in _cpu_ranges(found["value"])):
        yield wrong(where, option, "ranges of CPUs that begin below their end")


def _is_below_hard(limit: str) -> bool:
    soft, _, hard = limit.partition("=")[2].partition(":")
    # -1 is no limit.
    return not hard or hard == "-1" or 0 <= int(soft) <= int(hard)


def _cpu_ranges(cpus: str) -> list[tuple[int, int]]:
    """`0-3,7` → (0, 3), (7, 7)"""
    ends = [each.split("-") for each in cpus.split(",")]
    return [(int(each[0]), int(each[-1])) for each in ends]


def find_cpu_problems(container: ContainerSettings, path: str, machine: str, vcpus: int) -> Iterator[Problem]:
    """Find CPUs that a machine does not have, so that Docker would not start the container."""
    for index, option in enumerate(container.options or ()):
        found = _OPTION.fullmatch(option)
        if not found or not re.fullmatch(OPTIONS.get(found["name"], ""), found["value"]):
            continue
        name, value = found["name"], found["value"]
        too_many = name == "cpus" and float(value) > vcpus
        if too_many or (name == "cpuset-cpus" and any(last >= vcpus for _, last in _cpu_ranges(value))):
            where = f"{join(path, 'container.options')}[{index}]"
            yield Problem(where, f"is `{option}`, and `{machine}` has {vcpus} vCPUs")


def find_shm_problems(container: ContainerSettings, path: str, machine: str, memory_gib: float) -> Iterator[Problem]:
    """Find shared memory that a machine does not have: what fills it ends in the loss of the machine's processes."""
    size = container.shm_size
    if size is not None and SHM_SIZE.pattern.fullmatch(size) and _bytes(size) > memory_gib * (1 << 30):
        where = join(path, "container.shm_size")
        yield wrong(where, size, f"at most the memory of `{machine}`, {memory_gib:g} GiB")


def _memory_problems(options: Sequence[str], path: str) -> Iterator[Problem]:
    """Find limits of memory that Docker refuses together, so that Ray would never start."""
    # Docker takes the last of two values.
    values = {found["name"]: found["value"] for each in options if (found := _OPTION.fullmatch(each))}
    sizes = {name: _bytes(value) for name, value in values.items() if re.fullmatch(_SIZE, value)}
    memory = sizes.get("memory")
    if memory is not None and memory < _LEAST_MEMORY:
        yield Problem(path, f"has `--memory={values['memory']}`, and Docker needs at least `6m`")
    if "memory-swap" in sizes and (memory is None or sizes["memory-swap"] < memory):
        yield Problem(
            path,
            f"has `--memory-swap={values['memory-swap']}`, allowed with a `--memory` of at most as much",
            "it limits memory and swap together",
        )
    if memory is not None and sizes.get("memory-reservation", 0) > memory:
        yield Problem(path, "has a larger `--memory-reservation` than `--memory`, allowed is at most as much")


def _bytes(size: str) -> int:
    return int(size[:-1]) << {"b": 0, "k": 10, "m": 20, "g": 30}[size[-1]]


def _hides(folder: str) -> bool:
    """Whether a mount at `folder` hides programs, accounts or Ray's own folders from the container."""
    # Docker mounts outer folders first, so `/tmp` leaves Ray's `/tmp/ray` in place.
    around = folder != "/tmp" and any(_is_within(each, (folder,)) for each in OUR_FOLDERS)
    return around or _is_within(folder, (*OUR_FOLDERS, *SYSTEM_FOLDERS))


def _is_within(path: str, folders: Sequence[str]) -> bool:
    return any(PurePosixPath(path).is_relative_to(each) for each in folders)


def find_label_problems(labels: Mapping[str, str], path: str) -> Iterator[Problem]:
    for key, value in labels.items():
        where = join(path, key)
        if key.startswith("ray.io/"):
            yield Problem(where, "is a label that Ray sets", "choose another key")
        elif not _LABEL_KEY.fullmatch(key):
            allowed = "63 letters, digits, `-`, `_` and `.`, with an optional `DOMAIN/` before them"
            yield Problem(where, f"is no key of a label, allowed are {allowed}")
        if not _LABEL_VALUE.fullmatch(value):
            yield wrong(where, value, "at most 63 letters, digits, `-`, `_` and `.`, a letter or digit at both ends")
