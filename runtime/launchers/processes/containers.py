"""The container of a job on a plain machine, as the shim's order has it: image, mounts, and lines of shell that run inside."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from runtime.errors import InvalidTask, NotPossible
from runtime.jobs.run_config import activation_lines
from runtime.jobs.spec import EnvironmentManager, JobSpec
from runtime.shim.containers import Engine, container_words
from runtime.tasks.container import plain_image, plain_mounts


def container_order(spec: JobSpec, engine: str | None) -> dict[str, Any]:
    """The order's `container`, empty without an image. Raises `NotPossible` for an image or a mount that no engine takes."""
    try:
        mounts, image = plain_mounts(spec.mounts), plain_image(spec.image) if spec.image is not None else ""
    except InvalidTask as problem:
        raise NotPossible(f"`{problem.field}` {problem.problem}", hint=problem.hint) from None
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
    order: dict[str, Any] = {"image": image}
    if engine:
        order["engine"] = engine
    if mounts:
        order["mounts"] = mounts
    if setup := [*activation_lines(spec), *spec.environment.setup]:
        order["setup"] = setup
    return order


def show_container(order: Mapping[str, Any], job: str, root: str) -> str:
    """The words by which the shim starts the first rank of the first run, for people: values that it finds out there are in capitals."""
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
