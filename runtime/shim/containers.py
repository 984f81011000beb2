"""Containers of podman or docker that the ranks of an attempt run in, on this machine: of jobs, and of tasks in a worker.

A container sees the attempt's folders under the paths that they have outside. The first process in it is a shell that reads
the variables from a file, so that no argument and no configuration of a container has a secret, and runs the command as its
child: the first process of a container would ignore signals that it does not handle.
"""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time

from runtime.shim.common import HOST, LOOK_S, SOON_S, ImageFailed, SetupFailed, say
from runtime.shim.files import CONTAINERS, drop_file, make_folder, read_json, read_system, write_whole
from runtime.shim.processes import ChildProcess, kill_group
from runtime.shim.ranks import setup_script

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List, Optional, Tuple

ENGINES = ("podman", "docker")
"""Programs that run containers; the first that this machine has is taken."""
LABEL = "research-runtime."
ANSWER_S = 60.0
"""How long an engine may take to answer."""
SIGNAL_S = 10.0
PULL_S = 7200.0
TRIES = 3
AGAIN_S = 0.5
"""Pause before a container that could not be signalled or removed is tried again: it may still be starting."""

FIRST_PROCESS = """exec 2>&1
[ $$ = 1 ] || { echo "the container shares its process numbers with others"; exit 125; }
. "$0" && true >"$0" || exit 125
echo $$ >"${0%/*}/first.$RUNTIME_RANK"
note=${RUNTIME_PREEMPTED_NOTE:-$0}
"$@"
code=$?
if [ $code = 137 ]; then
    for file in /sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control; do
        [ ! -r $file ] || while read -r name count; do
            [ "$name" != oom_kill ] || [ "$count" = 0 ] || true >"${note%/*}/oom"
        done <$file
    done
fi
exit $code"""
"""Shell of a container's first process: its file of variables, which it empties, then the words. It reports a kill for memory, which only the
container's own cgroup counts. Its number is noted, because a signal to all processes may be sent in no other namespace."""

FIND_COMMAND = """command -v "$1" >/dev/null 2>&1 || {
    trap - EXIT
    echo "the image has no command $1" >"${runtime_setup%/*}/setup_failed"
    exit 127
}"""
"""Shell after the setup lines of a container, as a command that is not there counts as not begun."""

_GONE = re.compile("no such container|no container with", re.IGNORECASE)
_NO_IMAGE = re.compile(
    "manifest unknown|manifest for .* not found|name unknown|repository .*not found|unauthorized|denied|"
    "authentication required|invalid reference|short-name|does not exist or may require",
    re.IGNORECASE,
)
"""Answers to a pull that stay the same if it is tried again."""
_NAME = re.compile("rt-[0-9a-z-]+$")


class Engine(object):
    """podman or docker of a machine. `user` is the user inside of a container who has our rights outside, `groups` are our other
    groups if that user has them not; `limits_cpus` if it may keep a container to CPUs."""

    def __init__(self, path: str, user: str = "0:0", groups: "Tuple[int, ...]" = (), limits_cpus: bool = True) -> None:
        self.path, self.user, self.groups, self.limits_cpus = path, user, groups, limits_cpus

    @property
    def name(self) -> str:
        return os.path.basename(self.path)


def ask(words, limit_s=ANSWER_S, gives_up=lambda: False):
    """Run an engine's command; returns its exit code and the end of what it printed. Raises `SetupFailed` if it does not answer
    in time, or once `gives_up()` is true."""
    until, pause, named = time.monotonic() + limit_s, SOON_S, "`%s`" % " ".join(words[:2])
    try:
        with tempfile.TemporaryFile() as printed:
            child = ChildProcess(
                words, stdin=subprocess.DEVNULL, stdout=printed, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                while child.poll() is None:
                    if gives_up():
                        raise SetupFailed("%s was ended, as it is not wanted any more" % named)
                    if time.monotonic() >= until:
                        raise SetupFailed("%s gives no answer within %g s" % (named, limit_s))
                    time.sleep(pause)
                    pause = min(LOOK_S, pause * 1.5)
            finally:
                if child.poll() is None:
                    kill_group(child.pid, signal.SIGKILL)
                    child.wait()
            printed.seek(0)
            return child.returncode, printed.read().decode("utf-8", "replace").strip()
    except (IOError, OSError) as problem:
        raise SetupFailed("cannot run %s: %s" % (named, problem.strerror))


def last_line(text):
    """The last line that says something; docker adds where its manual is."""
    lines = [
        line.strip() for line in text.splitlines() if line.strip() and not line.startswith(("Run 'docker", "See '"))
    ]
    return (lines or ["it said nothing"])[-1][:500]


def find_engine(wanted: "Optional[str]") -> Engine:
    """Return the engine by its name, or the first that is installed. Raises `SetupFailed`."""
    found = [path for path in map(shutil.which, [wanted] if wanted else ENGINES) if path]
    if not found:
        raise SetupFailed("no %s is on %s, so no container can run" % (wanted or " or ".join(ENGINES), HOST))
    path = found[0]
    if os.path.basename(path) != "docker":
        return Engine(path, limits_cpus=os.geteuid() == 0)
    code, said = ask([path, "info", "--format", "{{.SecurityOptions}}"])
    if code:
        raise SetupFailed("docker does not run on %s: %s" % (HOST, last_line(said)))
    if "rootless" in said:
        return Engine(path, limits_cpus=False)
    return Engine(path, "%d:%d" % (os.geteuid(), os.getegid()), tuple(sorted(os.getgroups())))


def ensure_image(engine, image, gives_up, tell=say):
    """Have the engine get the image if it has it not. Raises `SetupFailed`."""
    if ask([engine.path, "image", "inspect", "--format", "{{.Id}}", image], gives_up=gives_up)[0] == 0:
        return
    tell("%s has no image %s yet, gets it" % (engine.name, image))
    code, said = ask([engine.path, "pull", "--quiet", image], PULL_S, gives_up)
    if code:
        text = "%s has no image %s on %s and cannot get it: %s" % (engine.name, image, HOST, last_line(said))
        raise (ImageFailed if _NO_IMAGE.search(said) else SetupFailed)(text)


class Containers(object):
    """The containers of an attempt's ranks here. `scratch` is the attempt's folder on this machine, `noted` the file with the
    names of its containers."""

    shown: "Tuple[str, ...]" = ("RUNTIME_JOB_ID", "RUNTIME_ARRAY_INDEX", "RUNTIME_ATTEMPT")
    """Variables in a container's configuration, by which its processes are found from outside. A secret may have any other name."""

    def __init__(
        self,
        container: "Dict[str, Any]",
        engine: Engine,
        scratch: str,
        noted: str,
        prefix: str,
        labels: "Dict[str, str]",
        memory_bytes: "Optional[int]" = None,
    ) -> None:
        self.order, self.engine, self.scratch, self.noted = container, engine, scratch, noted
        self.prefix, self.labels, self.memory_bytes = prefix, labels, memory_bytes
        self.before: "List[str]" = []
        """Words before the engine's, which run on this machine."""
        self.mounts: "List[Tuple[str, str, bool]]" = []
        self.workdir = scratch
        self.devices: "Optional[List[str]]" = None
        self.left = False
        self.again = 0.0

    def prepare(self, folder, places, environment, setup):
        """Set what all ranks share: the working folder, which is read-only unless `places` has it or one above it, the folders
        that are written, variables, and lines of shell on this machine. Raises `SetupFailed` for a mount that is not there."""
        self.workdir = folder
        written = sorted({os.path.abspath(each) for each in places})
        mounts = [(each, each, False) for each in written if not is_below(each, written)]
        if not any(folder == each or is_below(folder, [each]) for each in written):
            mounts.append((folder, folder, True))
        for each in self.order.get("mounts") or []:
            if not os.path.exists(each["source"]):
                raise SetupFailed("no %s on %s, which `mounts` puts at %s" % (each["source"], HOST, each["target"]))
            mounts.append((each["source"], each["target"], each["mode"] == "ro"))
        self.mounts = mounts
        if setup:
            self.before = [shutil.which("bash") or "/bin/sh", "-c", setup_script(setup, last=False), "setup"]
        if "HOME" not in environment:
            environment["HOME"] = os.path.join(self.scratch, "home")
            try:
                make_folder(environment["HOME"])
            except OSError as problem:
                raise SetupFailed("cannot make %s: %s" % (environment["HOME"], problem.strerror))
        devices = environment.get("CUDA_VISIBLE_DEVICES")
        if devices:
            # The container has these alone, and counts them from 0. The other variable would have the engine add all.
            self.devices = devices.split(",")
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(str(place) for place in range(len(self.devices)))
            environment["NVIDIA_VISIBLE_DEVICES"] = "void"

    def name_of(self, rank):
        return self.prefix + str(rank)

    def note(self, ranks):
        """Record the names before anything runs, so that the containers can be cleaned up if this shim is killed. Raises `SetupFailed`."""
        note = {"engine": self.engine.path, "names": [self.name_of(rank) for rank in ranks]}
        try:
            write_whole(self.noted, json.dumps(note, sort_keys=True))
        except (IOError, OSError) as problem:
            raise SetupFailed("cannot note the containers: %s" % problem.strerror)

    def enclose(self, rank, words, environment):
        """The words that run `words` in the rank's container, and the variables of the engine."""
        path = os.path.join(self.scratch, "variables.%d" % rank)
        with io.open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as opened:
            opened.write(b"".join(export_line(name, value) for name, value in sorted(environment.items())))
        ours = {name: value for name, value in environment.items() if name in self.shown}
        inside = self.inside(rank, list(words))
        words = self.before + container_words(
            self.engine,
            self.order["image"],
            self.name_of(rank),
            self.labels,
            self.mounts,
            self.workdir,
            sorted(ours),
            self.memory_bytes,
            chosen_cpus() if self.engine.limits_cpus else None,
            self.devices,
        )
        own = {name: value for name, value in os.environ.items() if not name.startswith("RUNTIME_")}
        return words + ["-c", FIRST_PROCESS, path] + inside, dict(own, **ours)

    def inside(self, rank, words):
        """The words for the container's first process: lines of shell that become the command."""
        lines = ["echo $$ >%s" % quote(self._pid_file(rank))] + list(self.order.get("setup") or []) + [FIND_COMMAND]
        return ["sh", "-c", setup_script(lines), "setup"] + words

    def _pid_file(self, rank):
        return os.path.join(self.scratch, "pid.%d" % rank)

    def end(self, ranks):
        """Send TERM to all processes of these containers but the first; returns the ranks that have got it. One that has not
        may be starting, and is tried again after a pause."""
        if time.monotonic() < self.again:
            return []
        line = 'read -r first <%s && [ "$first" = 1 ] && kill -TERM -1'
        told = [rank for rank in ranks if self._exec(rank, line % quote(os.path.join(self.scratch, "first.%d" % rank)))]
        self.again = time.monotonic() + AGAIN_S
        return told

    def signal_command(self, rank, name):
        """Send a signal to the command's own process."""
        pid = read_system(self._pid_file(rank)).strip()
        return pid.isdecimal() and self._exec(rank, "kill -%s %s" % (name, pid))

    def _exec(self, rank, line):
        try:
            return ask([self.engine.path, "exec", self.name_of(rank), "sh", "-c", line], SIGNAL_S)[0] == 0
        except SetupFailed as problem:
            say(str(problem))
            return False

    def remove(self, ranks):
        """End and remove containers of these ranks; what cannot be removed now, a later look at the job removes."""
        if ranks and not remove_containers(self.engine.path, [self.name_of(rank) for rank in ranks]):
            self.left = True

    def explain(self, printed):
        """Why a container did not come to its command, by what was printed instead."""
        return "%s did not start the command in %s: %s" % (self.engine.name, self.order["image"], last_line(printed))

    def close(self):
        if not self.left:
            drop_file(self.noted)


def containers_of(
    order: "Dict[str, Any]", job: str, index: int, folder: str, scratch: str, engine: Engine
) -> Containers:
    """The containers of an attempt of a job, whose folder in the record root is `folder`."""
    attempt = os.path.basename(scratch).rpartition("-")[2]
    labels = {"job": os.path.basename(job), "index": str(index), "attempt": attempt, "user": str(os.geteuid())}
    labels["root"] = os.path.dirname(os.path.dirname(job))
    prefix = "rt-%s-%d-%s-" % (os.path.basename(job)[2:], index, attempt)
    limit = (order.get("limits") or {}).get("memory_bytes")
    return Containers(order["container"], engine, scratch, os.path.join(folder, CONTAINERS), prefix, labels, limit)


def container_words(
    engine: Engine,
    image: str,
    name: str,
    labels: "Dict[str, str]",
    mounts: "List[Tuple[str, str, bool]]",
    workdir: str,
    variables: "List[str]",
    memory_bytes: "Optional[int]",
    cpus: "Optional[List[int]]",
    devices: "Optional[List[str]]",
) -> "List[str]":
    """The words that run a shell in a container, up to the shell's own words. Pure."""
    words = [engine.path, "run", "--rm", "--pull=never", "--init=false", "--name", name]
    words += ["--network=host", "--ipc=host"] + ["--pid=private"] * (engine.name == "podman")
    words += ["--log-driver=none", "--stop-timeout=0", "--pids-limit=-1", "--security-opt", "label=disable"]
    words += ["--user", engine.user] + [word for each in engine.groups for word in ("--group-add", str(each))]
    for key, value in sorted(labels.items()):
        words += ["--label", "%s%s=%s" % (LABEL, key, value)]
    if memory_bytes:
        words += ["--memory", "%db" % memory_bytes, "--memory-swap", "%db" % memory_bytes]
    if cpus:
        words += ["--cpuset-cpus", ",".join(map(str, cpus))]
    for device in devices or ():
        words += ["--device", "nvidia.com/gpu=%s" % device]
    for source, target, readonly in mounts:
        words += ["--mount", mount_word(source, target, readonly)]
    for variable in variables:
        words += ["--env", variable]
    return words + ["--workdir", workdir, "--entrypoint", "sh", image]


def mount_word(source, target, readonly):
    """A mount as CSV, the form in which paths may have any character."""
    fields = ["type=bind", "source=" + source, "target=" + target] + ["readonly"] * readonly
    return ",".join('"%s"' % each.replace('"', '""') if set(each) & set(',"\n') else each for each in fields)


def is_below(path, folders):
    return any(path != each and path.startswith(each.rstrip("/") + "/") for each in folders)


def chosen_cpus():
    """The CPUs that this shim is kept to; None if it is kept to none."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    mine = sorted(os.sched_getaffinity(0))
    return mine if len(mine) < (os.cpu_count() or 0) else None


def quote(text):
    return "'%s'" % text.replace("'", "'\\''")


def export_line(name, value):
    return b"export " + os.fsencode("%s=%s\n" % (name, quote(value)))


def remove_containers(engine, names):
    """End and remove containers; returns whether none of them is left."""
    for place in range(TRIES):
        try:
            # One after the other, since an engine may stop at the first that is gone.
            answers = [ask([engine, "rm", "--force", name]) for name in names]
        except SetupFailed as problem:
            say("cannot remove %s: %s" % (", ".join(names), problem))
            return False
        failed = [said for code, said in answers if code and not _GONE.search(said)]
        if not failed:
            return True
        # podman ends a container whose monitor was killed, and removes it when it is asked again.
        time.sleep(AGAIN_S if place + 1 < TRIES else 0)
    say("cannot remove %s: %s" % (", ".join(names), last_line(failed[0])))
    return False


def clear_containers(path):
    """Remove the containers that a file notes, if there are any."""
    try:
        note = read_json(path)
        engine, names = str(note["engine"]), [name for name in note["names"] if _NAME.match(name)]
    except (IOError, OSError, ValueError, KeyError, TypeError):
        return
    if os.path.basename(engine) in ENGINES and remove_containers(engine, names):
        drop_file(path)
