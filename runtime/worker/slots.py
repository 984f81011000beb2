"""Slots: a worker gives each to one attempt at a time, with a share of its CPUs and memory, and whole GPUs or a part of one.

`read_machine` looks at the machine once; the rest is pure. Shares decide which tasks a worker takes, by the resources that
the tasks ask for; only GPUs are enforced, by the two variables that CUDA and containers obey.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import floor, inf
from pathlib import Path
from typing import Final, Literal

from runtime.errors import InvalidValue, NotPossible
from runtime.tasks.model import NO_RESOURCES, Resources
from runtime.units import count_noun, format_size

MOST_SLOTS: Final = 4_096
_ROUNDING: Final = 1e-9
"""Thirds and tenths do not add up exactly."""


@dataclass(frozen=True, slots=True)
class HostResources:
    """Resources that this process may use: less than the hardware in a container or under an affinity."""

    cpus: float
    """CPUs; below 1 if a container's quota is a part of one."""
    memory_bytes: int
    gpus: tuple[str, ...] = ()
    """Devices as CUDA_VISIBLE_DEVICES takes them: ordinals or UUIDs."""


@dataclass(frozen=True, slots=True)
class Slot:
    index: int
    cpus: float
    memory_bytes: int
    gpus: tuple[str, ...] = ()
    """Devices that its attempts see, if the worker deals out GPUs."""
    gpu_share: float = 0
    """Number of GPUs; below 1 if its one GPU serves other slots too."""

    def environment(self) -> dict[str, str]:
        """Return the variables for this slot's attempts. If the worker deals out no GPUs, they see them all."""
        variables = {"RUNTIME_SLOT": str(self.index)}
        if self.gpu_share:
            devices = ",".join(self.gpus)
            variables |= {"CUDA_VISIBLE_DEVICES": devices, "NVIDIA_VISIBLE_DEVICES": devices}
        return variables


def plan_slots(machine: HostResources, slots: int | Literal["auto"], gpus_per_slot: float = 0) -> tuple[Slot, ...]:
    """Divide a machine evenly.

    `auto` makes as many slots as GPU shares fit, or one per CPU if `gpus_per_slot` is 0. More slots than CPUs may
    be asked for: tasks that wait for a disk or a network need no CPU each. Raises `InvalidValue` for a number that
    means nothing, `NotPossible` if the machine lacks the GPUs.
    """
    whole = gpus_per_slot == floor(gpus_per_slot) if 0 <= gpus_per_slot < 1e6 else False
    if not 0 <= gpus_per_slot < inf or not (whole or gpus_per_slot < 1):
        raise InvalidValue(
            "number of GPUs per slot", _number(gpus_per_slot), "a whole number, or a part of one such as 0.25"
        )
    if slots != "auto" and not 1 <= slots <= MOST_SLOTS:
        raise InvalidValue("number of slots", slots, f"1 to {MOST_SLOTS:,}, or auto")
    if gpus_per_slot:
        found = len(machine.gpus)
        room = found // int(gpus_per_slot) if whole else found * floor(1 / gpus_per_slot + _ROUNDING)
        count = room if slots == "auto" else slots
        if count > room or not room:
            raise _too_few_gpus(machine, slots, gpus_per_slot, room)
    else:
        count = max(1, floor(machine.cpus + _ROUNDING)) if slots == "auto" else slots
    return tuple(
        Slot(
            index,
            cpus=machine.cpus / count,
            memory_bytes=machine.memory_bytes // count,
            gpus=_gpus_of(machine, index, gpus_per_slot),
            gpu_share=gpus_per_slot,
        )
        for index in range(count)
    )


def fits(resources: Resources, slot: Slot) -> str | None:
    """Explain why a slot cannot hold an attempt, such as `wants 2 GPUs, a slot has 0.25`; None if it can."""
    if resources is NO_RESOURCES:
        return None
    lacks = []
    if resources.gpus > slot.gpu_share + _ROUNDING:
        lacks.append(
            f"{_count(resources.gpus, 'GPU')}, a slot has {_number(slot.gpu_share) if slot.gpu_share else 'none'}"
        )
    if resources.memory_bytes > slot.memory_bytes:
        lacks.append(f"{format_size(resources.memory_bytes)} of memory, a slot has {format_size(slot.memory_bytes)}")
    if resources.cpus > slot.cpus + _ROUNDING:
        lacks.append(f"{_count(resources.cpus, 'CPU')}, a slot has {_number(slot.cpus)}")
    return f"wants {'; and '.join(lacks)}" if lacks else None


def describe_slots(slots: tuple[Slot, ...]) -> str:
    first = slots[0]
    parts = [_count(first.cpus, "CPU"), format_size(first.memory_bytes)]
    if first.gpu_share:
        parts.append(_count(first.gpu_share, "GPU"))
    each = f"{', '.join(parts[:-1])} and {parts[-1]}"
    return f"1 slot with {each}" if len(slots) == 1 else f"{len(slots)} slots, each {each}"


def _gpus_of(machine: HostResources, index: int, gpus_per_slot: float) -> tuple[str, ...]:
    if not gpus_per_slot:
        return ()
    if gpus_per_slot < 1:
        # Round robin, so that few slots spread over many GPUs.
        return (machine.gpus[index % len(machine.gpus)],)
    each = int(gpus_per_slot)
    return machine.gpus[index * each : (index + 1) * each]


def _too_few_gpus(machine: HostResources, slots: int | Literal["auto"], gpus_per_slot: float, room: int) -> NotPossible:
    asked = f"{_count(gpus_per_slot, 'GPU')} per slot"
    found = f"GPUs found: {', '.join(machine.gpus) or 'none'}"
    if not room:
        if machine.gpus:
            return NotPossible(
                f"no slot can have {_count(gpus_per_slot, 'GPU')}",
                facts=[found],
                hint=f"ask for at most `--gpus-per-slot {len(machine.gpus)}`",
            )
        return NotPossible(
            f"no GPU here for {asked}",
            facts=[found, "looked at CUDA_VISIBLE_DEVICES, NVIDIA_VISIBLE_DEVICES and /dev/nvidia*"],
            hint="leave `--gpus-per-slot` out, or set CUDA_VISIBLE_DEVICES if there is a GPU",
        )
    return NotPossible(
        f"{slots if slots == 'auto' else count_noun(slots, 'slot')} with {asked} {'does' if slots == 1 else 'do'} not fit on {_count(len(machine.gpus), 'GPU')}",
        facts=[found, f"room for {room} such {'slot' if room == 1 else 'slots'}"],
        hint=f"`--slots {room}` or `--slots auto`, or a smaller `--gpus-per-slot`",
    )


def _count(number: float, noun: str) -> str:
    return f"{_number(number)} {noun}{'s' if number > 1 else ''}"


def _number(number: float) -> str:
    return f"{number:.2f}".rstrip("0").rstrip(".") if round(number, 2) else f"{number:.2g}"


# Reading the machine


def read_machine(
    environ: Mapping[str, str] | None = None, *, root: Path = Path("/"), cpus: float | None = None
) -> HostResources:
    """Read what this process may use now. `root` and `cpus` stand in for the file system and the affinity in tests."""
    limits = _CgroupLimits(root)
    if cpus is None:
        cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return HostResources(
        cpus=min([cpus, *limits.cpus()]),
        memory_bytes=min([_physical_memory(root), *limits.memory()]),
        gpus=_read_gpus(os.environ if environ is None else environ, root),
    )


def _physical_memory(root: Path) -> int:
    if found := re.search(r"^MemTotal:\s+(\d+) kB$", _read(root / "proc/meminfo"), re.MULTILINE):
        return int(found[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class _CgroupLimits:
    """Limits of this process's control groups and of all groups above them; the tightest one holds.

    A container often sees its own group as the root of the mount while /proc/self/cgroup names the host's path:
    paths that do not exist have no limit, and the walk ends at the mount itself.
    """

    def __init__(self, root: Path) -> None:
        self._mount = root / "sys/fs/cgroup"
        self._v1: dict[str, str] = {}
        self._v2 = "/"
        for line in _read(root / "proc/self/cgroup").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers:
                self._v1 |= dict.fromkeys(controllers.split(","), path)
            else:
                self._v2 = path

    def cpus(self) -> Iterator[float]:
        for folder in self._folders(self._mount, self._v2):
            match _read(folder / "cpu.max").split():
                case [quota, period] if quota != "max":
                    yield int(quota) / int(period)
        for folder in self._folders(self._mount / "cpu", self._v1.get("cpu", "/")):
            allowed, of = _read_int(folder / "cpu.cfs_quota_us"), _read_int(folder / "cpu.cfs_period_us")
            if allowed is not None and allowed > 0 and of:
                yield allowed / of

    def memory(self) -> Iterator[int]:
        for folder in self._folders(self._mount, self._v2):
            if (limit := _read_int(folder / "memory.max")) is not None:
                yield limit
        for folder in self._folders(self._mount / "memory", self._v1.get("memory", "/")):
            if (limit := _read_int(folder / "memory.limit_in_bytes")) is not None:
                yield limit

    @staticmethod
    def _folders(mount: Path, path: str) -> Iterator[Path]:
        here = mount / path.strip("/")
        while here != mount and mount in here.parents:
            yield here
            here = here.parent
        yield mount


_NO_GPUS: Final = ("", "none", "void", "NoDevFiles")
_DEVICE_NODE: Final = re.compile(r"nvidia\d+")


def _read_gpus(environ: Mapping[str, str], root: Path) -> tuple[str, ...]:
    try:
        names = os.listdir(root / "dev")  # noqa: PTH208
    except OSError:
        names = []
    nodes = sum(_DEVICE_NODE.fullmatch(name) is not None for name in names)
    # CUDA counts the devices that it can open from 0, not by the numbers of their files: in a container that was
    # given /dev/nvidia2 and /dev/nvidia3 they are 0 and 1.
    ordinals = tuple(map(str, range(nodes)))
    cuda, container = environ.get("CUDA_VISIBLE_DEVICES"), environ.get("NVIDIA_VISIBLE_DEVICES")
    if container in _NO_GPUS:
        return ()
    if cuda is not None:
        return ordinals if cuda == "all" else _listed(cuda)
    if container is None or container == "all":
        return ordinals
    listed = _listed(container)
    given_by_index = all(each.isdecimal() for each in listed)
    return ordinals if given_by_index and len(listed) == nodes else listed


def _listed(value: str) -> tuple[str, ...]:
    """Split a list of devices as CUDA does, which drops an entry that it cannot read and all entries after it."""
    devices: list[str] = []
    for each in (part.strip() for part in value.split(",")):
        if each in _NO_GPUS or each.startswith("-"):
            break
        if each not in devices:
            devices.append(each)
    return tuple(devices)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _read_int(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.lstrip("-").isdecimal() else None
