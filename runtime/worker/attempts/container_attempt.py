"""Attempts in a container of podman or docker, by the means of the shim. Loaded only for tasks that name an image.

This process starts the engine's client, and sends TERM into the container when the attempt is asked to stop. A file beside the
attempt's scratch folder names the container as long as it may exist: if this process ends before, the guardian removes the
container, and if the guardian ends before, the next guardian or worker on the host does. docs/environments.md describes the view of user code.
"""

# pathlib is too large for the processes that load this.
# ruff: noqa: PTH110, PTH123

from __future__ import annotations

import json
import os
import signal
import time

from runtime.shim.common import SetupFailed
from runtime.shim.containers import Containers, Engine
from runtime.shim.ranks import ENGINE_FAILED
from runtime.units import format_size
from runtime.worker.attempts import entries, interpreter_call, processes, scratch
from runtime.worker.attempts.entries import AttemptFailed, AttemptStopped

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from runtime.worker.attempts.child import Execution
    from runtime.worker.attempts.environment import ProcessEnvironment

FOLDER = ".runtime-container"
"""Folder of the attempt's scratch folder that the container's first processes use."""
HELPERS_S = 5.0
"""How long processes of an engine that outlive its client may take to tidy up."""
BEGIN = """command -v "$1" >/dev/null 2>&1 || { true >"$0/no_command"; exit 127; }
true >"$0/began"
exec "$@\""""
"""Shell in a container that becomes the command; `$0` is the folder."""


class AttemptContainer(Containers):
    """The one container of an attempt."""

    shown = ("RUNTIME_TASK_ID", "RUNTIME_ATTEMPT_TOKEN")

    def name_of(self, rank: int) -> str:
        return self.prefix

    def inside(self, rank: int, words: list[str]) -> list[str]:
        return ["sh", "-c", BEGIN, self.scratch, *words]

    def has(self, name: str) -> bool:
        """Whether a process inside has left the file."""
        return os.path.exists(f"{self.scratch}/{name}")


def run(execution: Execution, environment: ProcessEnvironment, body: dict[str, Any]) -> str:
    """Run the attempt and return its value as JSON text. Raises `AttemptFailed` for every other end."""
    said = json.loads(environment.container)
    words, call = body.get("command"), None
    start = environment.cwd_of(execution.fields) or execution.make_scratch()
    if words is None:
        call = interpreter_call.InterpreterCall("python3", f"{execution.make_scratch()}/.runtime-call", body)
        call.write(inside=start)
        said["mounts"] += call.mounts
        words = call.argv
    try:
        _run(execution, environment, said, start, words, called=call is not None)
    except SetupFailed as problem:
        raise AttemptFailed(problem.reason, str(problem)) from None
    except AttemptFailed as failure:
        raise (call.explain(failure) if call else failure) from None
    return call.read_value() if call else ""


def _run(
    execution: Execution,
    environment: ProcessEnvironment,
    said: dict[str, Any],
    start: str,
    words: list[str],
    *,
    called: bool,
) -> None:
    token, task_id, code_dir = execution.fields[0], execution.fields[1], execution.fields[10]
    path, user, groups, limits_cpus = said["engine"]
    folder = f"{execution.make_scratch()}/{FOLDER}"
    scratch.make_folder(folder)
    scratch.make_folder(execution.checkpoint_dir)
    variables = {**environment.given(), "TMPDIR": execution.scratch_dir}
    places = [
        execution.scratch_dir,
        execution.make_output(),
        execution.checkpoint_dir,
        code_dir,
        execution.reports_path,
    ]
    with open(execution.reports_path, "ab"):
        pass  # Only an existing file can be mounted.
    if origin := variables.get("RUNTIME_ORIGIN"):
        said["mounts"].append({"source": origin, "target": origin, "mode": "ro"})
    if called:
        variables.pop("PYTHONPATH", None)  # The program sets it when its own modules are loaded.
    container = AttemptContainer(
        said,
        Engine(path, user, tuple(groups), limits_cpus),
        folder,
        scratch.record_path(execution.fields[8], token),
        f"rt-{token}",
        {"task": task_id, "attempt": token, "user": str(os.geteuid()), "scratch": execution.fields[8]},
        said["memory_bytes"] or None,
    )
    container.prepare(start, filter(None, places), variables, None)
    if execution.is_asked_to_stop():
        raise AttemptStopped("stopped before it began")
    container.note([0])
    try:
        argv, environ = container.enclose(0, words, variables)
        # Secrets are the attempt's, and the engine has no use for them.
        ours = {name: value for name, value in environ.items() if name.startswith("RUNTIME_")}
        code = _await(_start(argv, {**environment.inherited(), **ours}), execution, container)
        if code < 0 or code in ENGINE_FAILED or not container.has("began"):
            container.remove([0])
    finally:
        _end_helpers()
        container.close()
        scratch.remove_empty(execution.checkpoint_dir)
    _judge(execution, container, said, words[0], code)


def _start(argv: list[str], environ: dict[str, str]) -> int:
    """Start the engine's client, which ends with this process; returns its pid."""
    prctl = processes.find_prctl()
    me = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        prctl(processes.PR_SET_PDEATHSIG, signal.SIGKILL)
        for signum in (signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(signum, signal.SIG_DFL)
        if os.getppid() == me:
            os.execve(argv[0], argv, environ)
    except OSError as problem:
        entries.print_error(f"error: cannot start `{argv[0]}`: {problem.strerror}")
    finally:
        os._exit(126)


def _await(pid: int, execution: Execution, container: AttemptContainer) -> int:
    """Wait for the client; once the attempt is asked to stop, all processes inside but the first get TERM."""
    execution.ran_user_code = True
    pause, told = 0.005, False
    while True:
        # The engine's monitor falls to this process, and the client waits for it as long as it is not reaped.
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended == pid:
            return os.waitstatus_to_exitcode(status)
        if not told and execution.is_asked_to_stop():
            told = bool(container.end([0]))
        time.sleep(pause)
        pause = min(0.1, pause * 1.5)


def _end_helpers() -> None:
    """Wait for processes of the engine that tidy up after their client, which are below this one with podman."""
    give_up = time.monotonic() + HELPERS_S
    while processes.reap() and time.monotonic() < give_up:
        time.sleep(0.01)
    processes.end_tree(os.getpid())


def _judge(execution: Execution, container: AttemptContainer, said: dict[str, Any], program: str, code: int) -> None:
    """Raise `AttemptFailed` unless the command has ended with 0."""
    if container.has("no_command"):
        message = f"image `{said['image']}` has no command `{program}`"
        entries.print_error(f"error: {message}")
        raise AttemptFailed("config_invalid", message, exit_code=127)
    if not container.has("began"):
        if execution.is_asked_to_stop():
            raise AttemptStopped("stopped before it began")
        # 126 and 127 are the engine's codes for a shell of the image that cannot run.
        reason = "image_failed" if code in (126, 127) else "setup_failed"
        message = (
            f"{container.engine.name} did not start the command in `{said['image']}`, and its words are in the log"
        )
        raise AttemptFailed(reason, f"{message}: it ended with code {code}", exit_code=code)
    if code == 128 + signal.SIGKILL and container.has("oom"):
        limit = f", whose limit is {format_size(said['memory_bytes'])}" if said["memory_bytes"] else ""
        raise AttemptFailed("oom", f"killed for memory by the kernel, in its container{limit}", exit_code=code)
    # The exit code of a container is a shell's.
    entries.explain_status(128 - code if 128 < code <= 192 else code)
