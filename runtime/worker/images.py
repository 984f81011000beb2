"""The containers of tasks: podman or docker of this machine, with the image and the folders that a task names.

An image that the engine has not is pulled once for all tasks that wait for it. A name that no registry has fails its tasks. A
machine without an engine, without a folder that is mounted, or without a login leaves them to other workers, and so does one
whose registry does not answer.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from functools import partial
from typing import Final

from runtime.shim.common import HOST, ImageFailed, SetupFailed
from runtime.shim.containers import Engine, ensure_image, find_engine
from runtime.tasks.container import ContainerSpec, plain_image, plain_mounts
from runtime.worker.attempts.environment import CONTAINER
from runtime.worker.prerequisites import Prerequisites
from runtime.worker.worker_context import HeldLease

_LOGIN: Final = re.compile("unauthorized|denied|authentication required", re.IGNORECASE)
"""Answers of registries to a machine without the right login."""


class UnwantedImage(SetupFailed):
    """No task waits for the image any more."""


class Images(Prerequisites[ContainerSpec, Engine]):
    """The engines that have the images, by the containers that tasks name."""

    fresh_s = 60.0
    """Time after which the engine is asked again whether it has the image."""
    kind = "its container cannot run on this machine: "

    def enter(self, held: HeldLease, container: ContainerSpec) -> None:
        """Pass the task on, once its container can start."""
        self.take(held, container)

    def make(self, key: ContainerSpec, gives_up: Callable[[], bool]) -> None:
        self.calls.call(partial(get_image, key, gives_up), lambda engine, problem: self.answer(key, engine, problem))

    def give(self, held: HeldLease, made: Engine) -> None:
        held.engine = made

    def name(self, key: ContainerSpec) -> str:
        return f"image {key.image}"

    def is_given_up(self, problem: Exception | None) -> bool:
        return isinstance(problem, UnwantedImage)

    def is_of_the_machine(self, problem: Exception | None) -> bool:
        if isinstance(problem, ImageFailed):
            return _LOGIN.search(str(problem)) is not None
        return isinstance(problem, SetupFailed | OSError)


def get_image(container: ContainerSpec, gives_up: Callable[[], bool]) -> Engine:
    """Return this machine's engine once it has the image. Raises `SetupFailed`, and `ImageFailed` for an image that is nowhere."""
    for mount in plain_mounts(container.mounts):
        if not os.path.exists(mount["source"]):  # noqa: PTH110 - as the engine takes it
            raise SetupFailed(f"no {mount['source']} on {HOST}, which `mounts` puts at {mount['target']}")
    engine: Engine = find_engine(None)
    try:
        ensure_image(engine, plain_image(container.image), gives_up, tell=lambda text: None)
    except ImageFailed:
        raise
    except SetupFailed as problem:
        raise UnwantedImage(str(problem)) if gives_up() else problem from None
    return engine


def contained(held: HeldLease, memory_bytes: int) -> dict[str, str]:
    """Return the variable of an order by which the attempt's process knows its container."""
    container, engine = held.lease.task.container, held.engine
    assert container is not None
    assert engine is not None
    said = {
        "engine": [engine.path, engine.user, list(engine.groups), engine.limits_cpus],
        "image": plain_image(container.image),
        "mounts": plain_mounts(container.mounts),
        "memory_bytes": memory_bytes,
    }
    return {CONTAINER: json.dumps(said)}
