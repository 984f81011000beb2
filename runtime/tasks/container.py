"""The container that attempts of a task or job run in: its image, and the parts of the machine that it sees. Pure.

Loaded only for work that names an image.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, TypeAlias

from runtime.errors import InvalidTask
from runtime.schema import describe

_TAKEN: Final = ("/", "/proc", "/sys", "/dev")
"""Folders that every container has of its own."""
_IMAGE: Final = r"[A-Za-z0-9][\w./:@-]*"
_MOUNT_HINT: Final = "such as /data/imagenet:/data, which may be read, or /out:/out:rw"


class MountMode(StrEnum):
    RO = "ro"
    RW = "rw"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    source: str
    """A path of the node, `claim://NAME`, or a bucket's URL"""
    target: str
    mode: MountMode = MountMode.RO

    def __post_init__(self) -> None:
        if not self.target.startswith("/"):
            raise ValueError(f"has `target` {describe(self.target)}, expected an absolute path")


GivenMount: TypeAlias = str | Mapping[str, Any] | Mount


@dataclass(frozen=True, slots=True)
class ContainerSpec:
    """The image of a task, and the folders and files of its worker's machine that are mounted."""

    image: str
    mounts: tuple[Mount, ...] = ()


def make_container(image: Any, mounts: Any = ()) -> ContainerSpec | None:
    """Return the container with its mounts, each as text, object or `Mount`; None without both. Raises `InvalidTask`."""
    if not isinstance(mounts, list | tuple):
        raise InvalidTask("mounts", f"is {mounts!a:.60}, expected a list", hint=_MOUNT_HINT)
    read = tuple(_read_mount(f"mounts[{index}]", each) for index, each in enumerate(mounts))
    if image is None and not read:
        return None
    if image is None:
        raise InvalidTask(
            "mounts",
            f"puts `{read[0].source}` at `{read[0].target}`, and without a container a path is where it is",
            hint=f"use {read[0].source} itself, or name an `image`",
        )
    container = ContainerSpec(image, read)
    check_container(container)
    return container


def _read_mount(name: str, given: Any) -> Mount:
    if isinstance(given, Mount):
        return given
    if isinstance(given, str):
        words = given.split(":")
        if len(words) not in (2, 3):
            raise InvalidTask(name, f"is {given!a:.200}, expected SOURCE:TARGET", hint=_MOUNT_HINT)
        given = dict(zip(("source", "target", "mode"), words, strict=False))
    if not isinstance(given, Mapping):
        raise InvalidTask(name, f"is {given!a:.60}, expected SOURCE:TARGET or an object", hint=_MOUNT_HINT)
    if unknown := sorted(set(given) - {"source", "target", "mode"}, key=str):
        raise InvalidTask(f"{name}.{unknown[0]}", "is not known, expected source, target and mode")
    for field in ("source", "target"):
        if not isinstance(given.get(field), str):
            raise InvalidTask(f"{name}.{field}", f"is {given.get(field)!a:.60}, expected a path", hint=_MOUNT_HINT)
    mode = given.get("mode", MountMode.RO)
    if mode not in list(MountMode):
        raise InvalidTask(f"{name}.mode", f"is {mode!a:.60}, expected ro or rw")
    if not given["target"].startswith("/"):
        raise InvalidTask(f"{name}.target", f"is {given['target']!a:.200}, expected an absolute path", hint=_MOUNT_HINT)
    return Mount(source=given["source"], target=given["target"], mode=MountMode(mode))


def check_container(container: Any, environment: str | None = None) -> None:
    """Raise `InvalidTask` for an image or a mount that no engine takes, and for an `environment` beside them."""
    if environment is not None:
        raise InvalidTask(
            "environment",
            "has packages for a Python of the worker's machine, and the task runs in an `image`",
            hint="build them into the image",
        )
    if not isinstance(container, ContainerSpec):
        raise InvalidTask("image", f"is {container!a:.60}, expected the name of an image")
    plain_image(container.image)
    plain_mounts(container.mounts)


def plain_image(image: Any) -> str:
    """Return the name as podman and docker take it. Raises `InvalidTask`."""
    name = image.removeprefix("docker://") if isinstance(image, str) else ""
    if name.endswith(".sif") or name.startswith(("/", ".")):
        raise InvalidTask(
            "image",
            f"is `{image}`, a file, and podman and docker run images of a registry",
            hint="name the image as registry/name:tag; .sif files run on a target of kind `slurm`",
        )
    if not re.fullmatch(_IMAGE, name):
        shown = image if isinstance(image, str) else ascii(image)
        raise InvalidTask("image", f"is `{shown:.200}`, no name of an image", hint="such as ghcr.io/lab/train:1.4")
    place, _, last = name.partition("@")[0].rpartition("/")
    repository = "/".join([*place.split("/")[1:], last.partition(":")[0]]) if place else last.partition(":")[0]
    if repository != repository.lower():
        raise InvalidTask("image", f"is `{image}`, and names of images have no capital letters")
    return name


def plain_mounts(mounts: Sequence[Mount]) -> list[dict[str, str]]:
    """Return the mounts as objects with normalized paths. Raises `InvalidTask`."""
    found: dict[str, dict[str, str]] = {}
    for mount in mounts:
        target = posixpath.normpath("/" + mount.target.lstrip("/"))
        if "://" in mount.source or not mount.source.startswith("/"):
            raise InvalidTask(
                "mounts",
                f"names `{mount.source}`, and a machine can mount its own folders and files only",
                hint="name an absolute path of the machine; a bucket is read by the command itself",
            )
        if "\0" in mount.source + mount.target:
            raise InvalidTask("mounts", "holds a NUL character, and no path has one")
        if target in _TAKEN:
            raise InvalidTask("mounts", f"has the target `{mount.target}`, which every container has of its own")
        if target in found:
            raise InvalidTask("mounts", f"has the target `{target}` twice")
        found[target] = {"source": posixpath.normpath(mount.source), "target": target, "mode": mount.mode.value}
    return list(found.values())


def container_fields(container: ContainerSpec) -> dict[str, Any]:
    """Return the fields of the wire format, without those that have their default value."""
    fields: dict[str, Any] = {"image": container.image}
    if container.mounts:
        fields["mounts"] = [
            {"source": each.source, "target": each.target, **({"mode": "rw"} if each.mode is MountMode.RW else {})}
            for each in container.mounts
        ]
    return fields


def take_container(given: Mapping[str, Any], default: ContainerSpec | None) -> ContainerSpec | None:
    """Return the container of an object of the wire format; `default` fills the fields that the object leaves out."""
    image, mounts = given.get("image"), given.get("mounts")
    if default is not None:
        image, mounts = default.image if image is None else image, default.mounts if mounts is None else mounts
    return make_container(image, () if mounts is None else mounts)
