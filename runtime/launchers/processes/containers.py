"""The container of a job on a plain machine, as the shim's order has it: image, mounts, and lines of shell that run inside."""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Mapping
from typing import Any, Final

from runtime.errors import NotPossible
from runtime.jobs.order import activation_lines
from runtime.jobs.spec import EnvironmentManager, JobSpec, Mount
from runtime.shim.containers import Engine, container_words

_TAKEN: Final = ("/", "/proc", "/sys", "/dev")
"""Folders that every container has of its own."""


def container_order(spec: JobSpec, engine: str | None) -> dict[str, Any]:
    """The order's `container`, empty without an image. Raises `NotPossible` for an image or a mount that no engine takes."""
    mounts = _read_mounts(spec.mounts)
    if spec.image is None:
        if spec.mounts:
            first = spec.mounts[0]
            raise NotPossible(
                f"`mounts` puts `{first.source}` at `{first.target}`, and without a container a path is where it is",
                hint=f"use {first.source} in the command, or name an `image`",
            )
        return {}
    if spec.environment.manager is not EnvironmentManager.NONE and spec.environment.name is None:
        raise NotPossible(
            "`environment.manager` makes an environment for the machine's own Python, and the job runs in an `image`",
            hint="build it into the image; environment.name and environment.setup work inside of it",
        )
    order: dict[str, Any] = {"image": _check_image(spec.image)}
    if engine:
        order["engine"] = engine
    if mounts:
        order["mounts"] = mounts
    if setup := [*activation_lines(spec), *spec.environment.setup]:
        order["setup"] = setup
    return order


def show_container(order: Mapping[str, Any], job: str, root: str) -> str:
    """The words by which the shim starts the first rank of the first run, for people: in capitals is what it finds out there."""
    container, index = order["container"], next(iter(order["runs"]))
    engine = container.get("engine") or "podman"
    attempt = f"{root}/jobs/{job}/runs/{index}/a0001"
    folders = [attempt, f"{root}/jobs/{job}/runs/{index}/checkpoint", f"{root}/jobs/{job}/runs/{index}/output/a0001"]
    mounts = [(each, each, False) for each in [*folders, "SCRATCH"]]
    mounts += [(each["source"], each["target"], each["mode"] == "ro") for each in container.get("mounts", ())]
    words = container_words(
        Engine(engine, user="UID:GID" if engine == "docker" else "0:0"),
        container["image"],
        f"rt-{job[2:]}-{index}-ATTEMPT-0",
        {"job": job, "index": index, "root": root},
        mounts,
        order.get("code", {}).get("path") or "SCRATCH/tree",
        ["RUNTIME_…"],
        order.get("limits", {}).get("memory_bytes"),
        None,
        ["GPU"] if order.get("gpus") else None,
    )
    return shlex.join([*words, "-c", "…", *order["runs"][index]["command"]]) + "\n"


def _check_image(image: str) -> str:
    name = image.removeprefix("docker://")
    if name.endswith(".sif") or name.startswith(("/", ".")):
        raise NotPossible(
            f"`image` is `{image}`, a file, and podman and docker run images of a registry",
            hint="name the image as registry/name:tag; .sif files run on a target of kind `slurm`",
        )
    if not re.fullmatch(r"[A-Za-z0-9][\w./:@-]*", name):
        raise NotPossible(f"`image` is `{image}`, no name of an image", hint="such as ghcr.io/lab/train:1.4")
    return name


def _read_mounts(mounts: tuple[Mount, ...]) -> list[dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for mount in mounts:
        target = posixpath.normpath("/" + mount.target.lstrip("/"))
        if "://" in mount.source or not mount.source.startswith("/"):
            raise NotPossible(
                f"`mounts` names `{mount.source}`, and a machine can mount its own folders and files only",
                hint="name an absolute path of the machine; a bucket is read by the command itself",
            )
        if target in _TAKEN:
            raise NotPossible(f"`mounts` has the target `{mount.target}`, which every container has of its own")
        if target in found:
            raise NotPossible(f"`mounts` has the target `{target}` twice")
        found[target] = {"source": posixpath.normpath(mount.source), "target": target, "mode": mount.mode.value}
    return list(found.values())
