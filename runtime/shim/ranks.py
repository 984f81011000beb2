"""The command of an attempt and its ranks: processes on this machine, or a starter that runs a shim for each elsewhere."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zlib

from runtime.shim.common import LOOK_S, NOTIFY, SetupFailed, own_path, shell_code
from runtime.shim.files import METRICS, drop_file, leave_mark, list_names, make_folder, read_system
from runtime.shim.logs import LOG_BYTES, Logs
from runtime.shim.processes import ChildProcess, boot_id, end_orphans, kill, kill_group, started_at
from runtime.shim.resource_usage import held_memory

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, List, Optional, Set, Tuple


SETUP_FAILED = "setup_failed"
"""File of an attempt's folder about a failure before the command began."""
TELL_SETUP = """trap 'echo "the setup lines ended with exit code $?${BASH_COMMAND:+, at: $BASH_COMMAND}" """
TELL_SETUP += """>"${RUNTIME_PREEMPTED_NOTE%/*}/""" + SETUP_FAILED + """"' EXIT; trap 'trap - EXIT; exit 143' TERM"""
"""Line of shell before the setup lines. A shell that becomes the command leaves no file, nor does one that is ended from
outside, as when another rank has failed."""
NAME_SETUP = 'runtime_setup="${RUNTIME_PREEMPTED_NOTE%/*}/setup.$RUNTIME_RANK"'
"""Line of shell that names the file that the shim writes for a rank; the setup lines may change the variables."""
END_SETUP = 'true 2>/dev/null >|"$runtime_setup"'
"""Line of shell right before the command, which empties that file. Emptying takes no room on a full disk, and a failed
redirection of `true`, which is not a special builtin, does not end the shell."""


def setup_script(lines: "List[str]", last: bool = True) -> str:
    """Shell that becomes the words after it once the setup lines have run; `last` unless more such lines follow."""
    script = ["set -e", TELL_SETUP, NAME_SETUP] + list(lines) + ["set +e"]
    return "\n".join(script + [END_SETUP] * last + ['exec "$@"'])


class SetupLines(object):
    """Files in the attempt's folder that show whether the setup lines of each rank reached its command."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.files: "Dict[int, str]" = {}

    def expect(self, rank):
        """Write the file that the setup lines of a rank empty at their end."""
        path = os.path.join(self.folder, "setup.%d" % rank)
        try:
            with io.open(path, "w", encoding="utf-8") as opened:
                opened.write("not at its command yet\n")
            self.files[rank] = path
        except (IOError, OSError):
            pass  # a full disk: only the trap of the shell shows then that the lines ended it

    def find_failure(self, ended: "List[Tuple[int, int]]") -> "Optional[str]":
        """How setup lines kept a command from running, None if they did not. `ended` are ranks and their exit codes."""
        path = os.path.join(self.folder, SETUP_FAILED)
        return read_system(path)[:2000].strip() if os.path.exists(path) else self.find_unreached(ended)

    def find_unreached(self, ended: "List[Tuple[int, int]]") -> "Optional[str]":
        """How setup lines of a rank on this machine failed, if its shell left no file about it."""
        for rank, code in ended:
            try:
                if rank in self.files and os.stat(self.files[rank]).st_size:
                    return "the setup lines ended with exit code %d, before the command" % shell_code(code)
            except OSError:
                continue
        return None

    def forget(self):
        for path in self.files.values():
            drop_file(path)


PREEMPTED_NOTE = "preempted"
"""File of an attempt's folder by which a command that exits with `TEMPORARY_FAILURE` reports that it loses its machine."""
ENGINE_FAILED = (125, 126, 127)
"""Exit codes of podman and docker if they fail themselves; a command may have them too."""
NATIVE_IDS = ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "RAY_JOB_ID", "HOSTNAME")
"""Variables by which backends name what runs, as in `runtime.shim.call`."""
OF_RANKS: "Tuple[str, ...]" = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
OF_RANKS += ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
OF_RANKS += ("MEGASCALE_COORDINATOR_ADDRESS", "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID", "MEGASCALE_PORT")
"""Variables that a job launched from within another one does not inherit: it is none of the other's ranks."""


class RankCommand(object):
    """The words, variables and folder of an attempt's command; `has_setup` if setup lines come before it. `artifacts` are those
    that it has, which were restored."""

    def __init__(
        self, words: "List[str]", environment: "Dict[str, str]", folder: str, has_setup: bool, artifacts: "Any" = None
    ) -> None:
        self.words, self.environment, self.folder = words, environment, folder
        self.has_setup, self.artifacts = has_setup, artifacts


def make_command(order, run, number, scratch, checkpoints, deadline, binding, gives_up, containers=None):
    """Prepare the command's tree, artifacts, environment and variables on this machine. Raises `SetupFailed`, also once
    `gives_up()` is true while an environment is made or artifacts are brought."""
    work = order["runs"][str(run.index)]
    folder = make_tree(order, run.job, scratch)
    environment = make_variables(order, run, number, checkpoints, deadline, binding)
    environment["RUNTIME_ORIGIN"] = write_origin(order, scratch)
    artifacts: "Any" = None
    if order.get("artifacts"):
        from runtime.shim.artifacts import AttemptArtifacts

        artifacts = AttemptArtifacts(order, run, number, folder, scratch)
        artifacts.restore(gives_up)
        environment.update(artifacts.variables())
    if order.get("environment"):
        from runtime.shim.environment import enter_environment, find_environment

        made = order["environment"]
        place = find_environment(made, run.job, folder, made["build_on"] == "node", gives_up)
        environment.update(enter_environment(made, place, folder, environment))
    words = list(work["command"])
    if order.get("shell"):
        words = ["/bin/sh", "-c", words[0]]
    if order.get("call"):
        from runtime.shim.call_files import write_call

        words = write_call(order, run, number, scratch)
    if containers is not None:
        places = [scratch, run.attempt_folder(number), checkpoints, environment["RUNTIME_OUTPUT_DIR"]]
        if (order.get("code") or {}).get("writable", True):
            places.append(folder)
        containers.prepare(folder, places, environment, order.get("setup"))
        return RankCommand(words, environment, folder, True, artifacts)
    before = list(order.get("wrap") or [])
    has_setup = any(END_SETUP in word for word in before)
    if order.get("setup"):
        script = setup_script(order["setup"], last=not has_setup)
        before = [shutil.which("bash") or "/bin/sh", "-c", script, "setup"] + before
        has_setup = True
    return RankCommand(before + words, environment, folder, has_setup, artifacts)


def make_tree(order, job, scratch):
    """The folder that the command starts in: a tree of its own if the order has code."""
    code = order.get("code") or {}
    if code.get("path"):
        if not os.path.isdir(code["path"]):
            raise SetupFailed("no folder %s on %s" % (code["path"], os.uname().nodename))
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
    """The variables that all ranks of an attempt share."""
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
    if order.get("name"):
        own["RUNTIME_EXPERIMENT"] = order["name"]
    nested = "RUNTIME_JOB_ID" in os.environ
    environment = {
        key: value
        for key, value in ({} if order.get("container") else os.environ).items()
        if not key.startswith("RUNTIME_") and not (nested and key in OF_RANKS)
    }
    environment.update(order.get("env") or {})
    environment.update(order["runs"][str(run.index)].get("env") or {})
    for name, path in sorted((order.get("secrets") or {}).items()):
        if not name.startswith(NOTIFY):
            environment[name] = read_secret(os.path.join(run.job, path))
    named = {name: of for name, of in (order.get("machine_secrets") or {}).items() if not name.startswith(NOTIFY)}
    if named:
        from runtime.shim.machine_secrets import read_secrets

        environment.update(read_secrets(named))
    environment.update(binding)
    environment.update(own)
    return environment


def write_origin(order, scratch):
    """Write where the job comes from, and what the backend calls it, which a container's variables do not say; returns the
    file's path."""
    path = os.path.join(scratch, "origin.json")
    ids = {name: os.environ[name] for name in NATIVE_IDS if name in os.environ}
    try:
        with io.open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as opened:
            json.dump(dict(order.get("origin") or {}, ids=ids), opened)
    except (IOError, OSError) as problem:
        raise SetupFailed("cannot write %s: %s" % (path, problem.strerror))
    return path


def read_secret(path):
    try:
        with io.open(path, encoding="utf-8", newline="") as opened:
            return opened.read()
    except (IOError, OSError):
        raise SetupFailed("a secret's file is gone: %s" % os.path.basename(path))


def slice_variables(address, slices, nodes, node):
    """The variables by which libtpu and JAX join `slices` TPU slices, whose hosts are the nodes of a run, slice by slice.

    The names, the address without a port, and the port are those of Ray's `get_tpu_coordinator_env_vars`:
    https://docs.ray.io/en/latest/ray-core/api/doc/ray.util.tpu.get_tpu_coordinator_env_vars.html
    GKE sets the same ones for a JobSet of several slices. JAX reads them, and numbers its processes slice by slice:
    https://github.com/jax-ml/jax/blob/main/jax/_src/clusters/cloud_tpu_cluster.py
    """
    return dict(
        MEGASCALE_COORDINATOR_ADDRESS=address,
        MEGASCALE_NUM_SLICES=str(slices),
        MEGASCALE_SLICE_ID=str(node // (nodes // slices)),
        MEGASCALE_PORT="8081",
    )


class Ranks(object):
    """The processes of an attempt, or of one `node` of it. `leader` is the host of the shim that watches the attempt, if that
    is another one."""

    def __init__(
        self, order: "Dict[str, Any]", folder: str, leader: "Optional[str]" = None, node: "Optional[int]" = None
    ) -> None:
        self.order, self.folder = order, folder
        self.address = leader or "127.0.0.1"
        chosen = 20000 + zlib.crc32(self.folder.encode()) % 10000
        self.port = order.get("master_port") or chosen
        """Where rank 0 can be reached."""
        self.children: "List[ChildProcess]" = []
        per_node = order["tasks_per_node"]
        self.count = order["nodes"] * per_node
        self.here = range(self.count) if node is None else range(node * per_node, (node + 1) * per_node)
        """The ranks of this machine."""
        self.logs = Logs(order.get("log_bytes", LOG_BYTES))
        self.setup = SetupLines(folder)
        self.leads = False
        """Whether shims elsewhere run the ranks; they look for files in the attempt's folder."""
        self.containers: "Optional[Any]" = None
        """The containers that the ranks of this machine run in, if they do."""

    def start(self, rank: int, command: "RankCommand") -> None:
        """Start one rank. Raises `OSError` or `ValueError` if its command cannot be started."""
        if command.has_setup:
            self.setup.expect(rank)
        words, environment = command.words, dict(command.environment, **self._variables(rank))
        if self.containers is not None:
            words, environment = self.containers.enclose(rank, words, environment)
        log = self.logs.open(os.path.join(self.folder, "rank%d.log" % rank))
        try:
            child = ChildProcess(
                words,
                cwd=command.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                close_fds=True,
            )
        finally:
            os.close(log)
        self.children.append(child)

    def _variables(self, rank):
        per_node = self.order["tasks_per_node"]
        found = dict(
            RUNTIME_RANK=str(rank),
            RUNTIME_WORLD_SIZE=str(self.count),
            RUNTIME_LOCAL_RANK=str(rank % per_node),
            RUNTIME_NODE_RANK=str(rank // per_node),
            RUNTIME_NUM_NODES=str(self.order["nodes"]),
            RUNTIME_MASTER_ADDR=self.address,
            RUNTIME_METRICS=os.path.join(self.folder, "metrics.rank%d.jsonl" % rank if rank else METRICS),
        )
        if self.count > 1:
            port = str(self.port)
            host = "[%s]" % self.address if ":" in self.address else self.address
            found.update(
                RANK=str(rank),
                WORLD_SIZE=str(self.count),
                LOCAL_RANK=found["RUNTIME_LOCAL_RANK"],
                MASTER_ADDR=self.address,
                MASTER_PORT=port,
                JAX_COORDINATOR_ADDRESS="%s:%s" % (host, port),
                JAX_NUM_PROCESSES=str(self.count),
                JAX_PROCESS_ID=str(rank),
            )
        if self.order.get("slices", 1) > 1:
            found.update(slice_variables(self.address, self.order["slices"], self.order["nodes"], rank // per_node))
        return found

    def start_elsewhere(self, job, index, attempt):
        """Have the backend's own starter run a shim for each rank. Raises `OSError`."""
        self.leads = True
        words = list(self.order["launch_ranks"]) + [sys.executable, own_path(), job]
        words += ["--index", str(index), "--rank-of", str(attempt)]
        environment = dict(os.environ, RUNTIME_LEADER=os.uname().nodename)
        log = os.open(os.path.join(self.folder, "ranks.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            child = ChildProcess(
                words, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        finally:
            os.close(log)
        self.children.append(child)

    def groups(self):
        """The process groups of the ranks, distinct from later groups with the same numbers."""
        return [{"boot": boot_id(), "pid": child.pid, "start": started_at(child.pid)} for child in self.children]

    def poll(self) -> "List[Optional[int]]":
        """The exit code of each rank, None while it runs."""
        codes = [child.poll() for child in self.children]
        if self.containers is None:
            return codes
        # A container's exit code is a shell's: 128 plus the number of the signal that ended its command.
        return [128 - code if code is not None and 128 < code <= 192 else code for code in codes]

    def printed(self):
        """A value that changes with the output. Ranks elsewhere write full logs over, so the time of the last change counts
        too."""
        if not self.leads:
            return self.logs.printed()
        logs = [os.path.join(self.folder, name) for name in list_names(self.folder) if name.endswith(".log")]
        found = [os.stat(log) for log in logs if os.path.exists(log)]
        return sum(each.st_size for each in found), max([each.st_mtime for each in found] or [0.0])

    def held_memory(self, limit):
        """Memory of the largest node, in bytes; nodes are groups of ranks of this machine."""
        per_node = self.order["tasks_per_node"]
        ranks = [child.pid for child in self.children]
        nodes = [ranks[first : first + per_node] for first in range(0, len(ranks), per_node)]
        return max([held_memory(node, limit) for node in nodes] or [0])

    def ask_for_checkpoint(self, name):
        """Send the signal `name` to each command, not to its group: a helper without a handler would die of it."""
        if self.leads:
            # A signal to srun would reach every process of every rank, even one without a handler.
            self._mark("ask")
            return
        for place, child in enumerate(self.children):
            if child.poll() is not None:
                continue
            if self.containers is not None:
                self.containers.signal_command(self.here[place], name)
            else:
                kill(child.pid, getattr(signal, "SIG" + name))

    def end(self, grace: float, meanwhile: "Optional[Callable[[], bool]]" = None) -> None:
        """Send TERM to every group, and kill the rest after `grace` seconds, or once `meanwhile()` is true."""
        until = time.time() + grace
        # srun turns a TERM into a kill of all ranks at once; their shims look for this file instead.
        told = self.leads and self._mark("stop")
        if told:
            until += 2.0
        for child in self.children:
            if child.poll() is None and not told and self.containers is None:
                kill_group(child.pid, signal.SIGTERM)
        asked: "Set[int]" = set()
        while time.time() < until and any(child.poll() is None for child in self.children):
            if meanwhile is not None and meanwhile():
                break
            if self.containers is not None:
                asked.update(self.containers.end(rank for rank in self._running() if rank not in asked))
            time.sleep(min(LOOK_S, 0.05))
        self.kill()
        for child in self.children:
            child.wait()
        end_orphans()

    def kill(self):
        """Kill the rest of every group, and what engines have left."""
        codes = [child.poll() for child in self.children]
        for child in self.children:
            kill_group(child.pid, signal.SIGKILL)
        if self.containers is not None:
            # After its client, which might make it still. A client that was killed, or that failed, may have left it.
            left = [place for place, code in enumerate(codes) if code is None or code < 0 or code in ENGINE_FAILED]
            self.containers.remove([self.here[place] for place in left])

    def _running(self):
        return [self.here[place] for place, child in enumerate(self.children) if child.poll() is None]

    def _mark(self, name):
        """Leave a file for the shims of ranks; returns whether they will find it. A refusal must not stop this shim."""
        return leave_mark(os.path.join(self.folder, name), os.path.join(self.folder, "start.json"))

    def close(self):
        """Return when the logs hold all output. Safe to call again."""
        self.logs.close()
        self.setup.forget()
        if self.containers is not None:
            self.containers.close()
