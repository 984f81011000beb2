"""The environment of a job's code, made once for each lock file."""

import contextlib
import errno
import hashlib
import io
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import threading
import time

from runtime.owners import is_ours, private_folder
from runtime.shim.files import create_whole, drop_file, list_names, make_folder, read_json, remove_folder, token
from runtime.shim.processes import boot_id, is_alive, started_at
from runtime.shim.tree import restore
from runtime.shim.words import DONE, FAILED, LOOK_S, SetupFailed, Taken, say

ENVIRONMENTS = "environments"
BEAT_S = 5.0
"""How often a builder renews its mark."""
SILENT_S = 120.0
"""How long a builder on another machine may leave its mark as it is before it counts as dead."""


def find_environment(made, job, tree, build):
    """The folder of the environment `made`, which all jobs of this user in this record root share, or on this machine if
    `made` has `local`.

    It is published as a link, since environments hold their own path and cannot be moved. One that another user made or
    could write is not used, because it runs whatever its maker put into it; nor is one whose interpreter is gone. Raises
    `SetupFailed`.
    """
    try:
        return _find_environment(made, job, tree, build)
    except (IOError, OSError) as problem:
        raise SetupFailed("cannot make the environment of %s: %s" % (made["lock"], problem))


def _find_environment(made, job, tree, build):
    lock = os.path.join(tree, made["lock"])
    try:
        with io.open(lock, "rb") as opened:
            content = opened.read()
    except (IOError, OSError) as problem:
        raise SetupFailed("cannot read the lock file %s: %s" % (made["lock"], problem.strerror))
    about = [made["manager"], sys.platform, platform.machine(), hashlib.sha256(content).hexdigest()]
    key = hashlib.sha256(json.dumps(about + sorted(made.get("extras") or [])).encode()).hexdigest()[:24]
    if made.get("local"):
        # A pod or a node of a cluster may have another system beneath than the last one.
        own = private_folder(os.path.join(tempfile.gettempdir(), "runtime-%s-%d" % (ENVIRONMENTS, os.geteuid())))
        places = [os.path.join(own, key)]
    else:
        records = os.path.dirname(os.path.dirname(job))
        places = [
            os.path.join(records, name, key)
            for name in list_names(records)
            if name == ENVIRONMENTS or name.startswith("%s-%d" % (ENVIRONMENTS, os.geteuid()))
        ]
    for place in places:
        if is_ours(os.path.dirname(place), alone=True) and is_ours(place, alone=True) and _is_whole(place):
            return os.path.realpath(place)
    if not build:
        text = "the environment of %s was to be made at the launch, and %s is not there, or not this user's alone"
        raise SetupFailed(text % (lock, os.path.join(records, ENVIRONMENTS, key)))
    place = os.path.join(own if made.get("local") else _own_folder(records, job), key)
    if os.path.lexists(place) and not (is_ours(place, alone=True) and _is_whole(place)):
        say("does not use %s, which another user made or can write, or whose interpreter is gone" % place)
        os.rename(place, "%s.%s" % (place, token()))
    builds = _wait_for_builder(place)
    try:
        # Another builder may have finished just before.
        if not os.path.isdir(place):
            _build_environment(made, lock, place)
    finally:
        if builds:
            drop_file(place + ".builder")
    return os.path.realpath(place)


def _is_whole(place):
    """Whether an environment is there and has its interpreter, which may be a link to one of the system."""
    python = os.path.join(place, "bin", "python")
    return os.path.isdir(place) and os.path.exists(python) == os.path.lexists(python)


def _own_folder(records, job):
    """The folder for environments that this user makes: the common one if this user made it, else one beside it."""
    common = os.path.join(records, ENVIRONMENTS)
    make_folder(common, within=job, mode=0o755)
    if os.stat(common).st_uid == os.geteuid() and is_ours(common, alone=True):
        return common
    return private_folder("%s-%d" % (common, os.geteuid()))


def _wait_for_builder(place):
    """Wait for another builder; returns whether this process has to build. Two builders at once lose only time."""
    me = {"host": socket.gethostname(), "boot": boot_id(), "pid": os.getpid(), "start": started_at(os.getpid())}
    mark, beat, since = place + ".builder", None, time.time()
    while not os.path.isdir(place):
        try:
            create_whole(mark, json.dumps(me))
            return True
        except Taken:
            pass
        try:
            other, last = read_json(mark), os.stat(mark).st_mtime
        except (IOError, OSError, ValueError):
            continue
        if other["host"] == me["host"]:
            if not is_alive(other):
                return True
        elif last != beat:
            beat, since = last, time.time()
        elif time.time() - since > SILENT_S:
            return True
        time.sleep(LOOK_S)
    return False


@contextlib.contextmanager
def renewed(mark):
    """Renew a builder's mark for the time of a block."""
    over = threading.Event()

    def renew():
        while not over.wait(BEAT_S):
            try:
                os.utime(mark, None)
            except OSError:
                pass  # another builder took this one for dead, or the disk is full

    thread = threading.Thread(target=renew)
    thread.daemon = True
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _build_environment(made, lock, place):
    home = "%s.%s" % (place, token())
    extras = made.get("extras") or []
    if made["manager"] == "uv":
        words = ["uv", "sync", "--frozen", "--no-install-project"]
        words += [word for extra in extras for word in ("--extra", extra)]
    elif lock.endswith((".yml", ".yaml")):
        words = ["conda", "env", "create", "--quiet", "--prefix", home, "--file", lock]
    else:
        words = ["conda", "create", "--yes", "--quiet", "--prefix", home, "--file", lock]
    environment = {key: value for key, value in os.environ.items() if key != "VIRTUAL_ENV"}
    environment["UV_PROJECT_ENVIRONMENT"] = home
    before = os.umask(0o022)  # a group that can write to it could put its own programs there
    try:
        child = subprocess.Popen(
            words,
            cwd=os.path.dirname(lock),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        os.umask(before)
        with renewed(place + ".builder"):
            said = child.communicate()[0].decode("utf-8", "replace").strip()
        if child.returncode != 0:
            raise SetupFailed("%s failed: %s" % (" ".join(words[:2]), "\n".join(said.splitlines()[-10:])))
        try:
            os.symlink(os.path.basename(home), place)
        except OSError as problem:
            if problem.errno != errno.EEXIST:
                raise
            remove_folder(home)  # another was first
    except (OSError, SetupFailed) as problem:
        os.umask(before)
        remove_folder(home)
        if isinstance(problem, SetupFailed):
            raise
        missing = "there is no such program on PATH on %s" % os.uname().nodename
        why = missing if problem.errno == errno.ENOENT else os.strerror(problem.errno or 0)
        raise SetupFailed("cannot make the environment with %s: %s" % (words[0], why))


def enter_environment(made, place, tree, environment):
    """Variables that put a command into an environment; the project itself is found in its tree."""
    paths = [os.path.join(tree, "src"), tree] if os.path.isdir(os.path.join(tree, "src")) else [tree]
    known = environment.get("PYTHONPATH")
    return {
        "VIRTUAL_ENV" if made["manager"] == "uv" else "CONDA_PREFIX": place,
        "PATH": os.pathsep.join([os.path.join(place, "bin"), environment.get("PATH", os.defpath)]),
        "PYTHONPATH": os.pathsep.join(paths + ([known] if known else [])),
    }


def prepare(order, folder, options):
    """Make the environment of a job; returns an exit code."""
    made = order.get("environment")
    if not made:
        return DONE
    scratch = tempfile.mkdtemp(prefix="job-%s-" % order["job"][:10], dir=options.scratch)
    code = order.get("code") or {}
    try:
        tree = code.get("path") or restore(
            os.path.join(folder, code["archive"]), code["sha256"], os.path.join(scratch, "tree")
        )
        say("the environment is %s" % find_environment(made, folder, tree, build=True))
    except SetupFailed as problem:
        say(str(problem))
        return FAILED
    finally:
        remove_folder(scratch)
    return DONE
