"""The command of an attempt: its words, its variables and the folder that it starts in."""

import io
import os
import shutil
import socket

from runtime.shim.files import make_folder
from runtime.shim.setup import END_SETUP, setup_script
from runtime.shim.words import SetupFailed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List, Optional

PREEMPTED_NOTE = "preempted"
"""File of an attempt's folder by which a command that exits with `TEMPORARY_FAILURE` says that its machine is taken away."""
OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") + (
    "JAX_COORDINATOR_ADDRESS",
    "JAX_NUM_PROCESSES",
    "JAX_PROCESS_ID",
)
"""Variables that a job launched from within another one does not take over: it is none of the other's ranks."""


class Command(object):
    """The words, variables and folder of an attempt's command; `has_setup` if lines of setup come before it."""

    def __init__(self, words: "List[str]", environment: "Dict[str, str]", folder: str, has_setup: bool) -> None:
        self.words, self.environment, self.folder = words, environment, folder
        self.has_setup = has_setup


def make_command(order, run, number, scratch, checkpoints, deadline, binding):
    """Prepare all that the command needs on this machine. Raises `SetupFailed`."""
    work = order["runs"][str(run.index)]
    folder = make_tree(order, run.job, scratch)
    environment = make_variables(order, run, number, checkpoints, deadline, binding)
    if order.get("environment"):
        from runtime.shim.environment import enter_environment, find_environment

        made = order["environment"]
        place = find_environment(made, run.job, folder, build=made["build_on"] == "node")
        environment.update(enter_environment(made, place, folder, environment))
    words = list(work["command"])
    if order.get("shell"):
        words = ["/bin/sh", "-c", words[0]]
    before = list(order.get("wrap") or [])
    has_setup = any(END_SETUP in word for word in before)
    if order.get("setup"):
        script = setup_script(order["setup"], last=not has_setup)
        before = [shutil.which("bash") or "/bin/sh", "-c", script, "setup"] + before
        has_setup = True
    return Command(before + words, environment, folder, has_setup)


def make_tree(order, job, scratch):
    """The folder that the command starts in: a tree of its own if the order has code."""
    code = order.get("code") or {}
    if code.get("path"):
        if not os.path.isdir(code["path"]):
            raise SetupFailed("no folder %s on %s" % (code["path"], socket.gethostname()))
        return code["path"]
    if not code.get("archive"):
        home = os.path.join(scratch, "work")
        make_folder(home)
        return home
    from runtime.shim.tree import restore, shared_tree

    archive = os.path.join(job, code["archive"])
    if code.get("writable", True):
        return restore(archive, code["sha256"], os.path.join(scratch, "tree"))
    return shared_tree(archive, code["sha256"])


def make_variables(
    order: "Dict[str, Any]",
    run: "Any",
    number: int,
    checkpoints: str,
    deadline: "Optional[float]",
    binding: "Dict[str, str]",
) -> "Dict[str, str]":
    """The variables that all ranks of an attempt see alike."""
    output = order.get("output_dir") or os.path.join(run.folder, "output", "a%04d" % number)
    try:
        make_folder(output, within=run.job)
    except OSError as problem:
        raise SetupFailed("cannot make the output folder %s: %s" % (output, problem.strerror))
    own = dict(
        RUNTIME_JOB_ID=order["job"],
        RUNTIME_ATTEMPT=str(number),
        RUNTIME_RESTARTS=str(number - 1),
        RUNTIME_ARRAY_INDEX=str(run.index),
        RUNTIME_CHECKPOINT_DIR=checkpoints,
        RUNTIME_OUTPUT_DIR=output,
        RUNTIME_PREEMPTED_NOTE=os.path.join(run.attempt_folder(number), PREEMPTED_NOTE),
        PYTHONUNBUFFERED="1",
    )
    if deadline:
        own["RUNTIME_DEADLINE"] = str(int(deadline))
    if (order.get("code") or {}).get("sha256"):
        own["RUNTIME_SNAPSHOT_ID"] = "sha256:" + order["code"]["sha256"]
    nested = "RUNTIME_JOB_ID" in os.environ
    environment = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith("RUNTIME_") and not (nested and key in OF_RANKS)
    }
    environment.update(order.get("env") or {})
    environment.update(order["runs"][str(run.index)].get("env") or {})
    for name, path in sorted((order.get("secrets") or {}).items()):
        environment[name] = read_secret(os.path.join(run.job, path))
    environment.update(binding)
    environment.update(own)
    return environment


def read_secret(path):
    try:
        with io.open(path, encoding="utf-8", newline="") as opened:
            return opened.read()
    except (IOError, OSError):
        raise SetupFailed("a secret's file is gone: %s" % os.path.basename(path))
