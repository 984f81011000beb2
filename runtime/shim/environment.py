"""The environment of a job's code, made once for each lock file."""

import contextlib
import errno
import hashlib
import io
import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

from runtime.owners import is_ours, private_folder
from runtime.shim.files import create_whole, drop_file, list_names, make_folder, read_json, remove_folder, token
from runtime.shim.processes import Child, bears, boot_id, is_alive, kill_group, started_at
from runtime.shim.tree import restore
from runtime.shim.words import DONE, FAILED, LOOK_S, SetupFailed, Taken, say

ENVIRONMENTS = "environments"
BEAT_S = 5.0
"""How often a builder renews its mark."""
SILENT_S = 120.0
"""How long a builder on another machine may leave its mark as it is before it counts as dead."""
END_S = 3.0
"""How long a manager that is not wanted any more may take to end."""
UNUSED_S = 30 * 86400.0
"""How long an environment of a machine is kept that no attempt enters."""
HALF_MADE_S = 86400.0
"""Age at which an environment that was never published counts as left by a builder that was killed."""


def find_environment(made, job, tree, build, gives_up=lambda: False):
    """The folder of the environment `made`, which all jobs of this user in this record root share, or on this machine if
    `made` has `local`.

    It is published as a link, since environments hold their own path and cannot be moved. One that another user made or
    could write is not used, because it runs whatever its maker put into it; nor is one whose interpreter is gone. Raises
    `SetupFailed`, also once `gives_up()` is true while it is made; no process of its manager is left then.
    """
    try:
        return _find_environment(made, job, tree, build, gives_up)
    except (IOError, OSError) as problem:
        raise SetupFailed("cannot make the environment of %s: %s" % (made["lock"], problem))


def _find_environment(made, job, tree, build, gives_up):
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
        is_good = is_ours(os.path.dirname(place), alone=True) and is_ours(place, alone=True) and _is_whole(place)
        if is_good and (not made.get("local") or _note_use(place)):
            return os.path.realpath(place)
    if not build:
        text = "the environment of %s was to be made at the launch, and %s is not there, or not this user's alone"
        raise SetupFailed(text % (lock, os.path.join(records, ENVIRONMENTS, key)))
    place = os.path.join(own if made.get("local") else _own_folder(records, job), key)
    if os.path.lexists(place) and not (is_ours(place, alone=True) and _is_whole(place)):
        say("does not use %s, which another user made or can write, or whose interpreter is gone" % place)
        os.rename(place, "%s.%s" % (place, token()))
    builds = _wait_for_builder(place, gives_up)
    try:
        # Another builder may have finished just before.
        if not os.path.isdir(place):
            _build_environment(made, lock, place, gives_up)
            remove_unused(os.path.dirname(place), local=made.get("local"))
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


def _note_use(place):
    """Note that an environment of this machine is in use; False if it was removed just now."""
    try:
        os.utime(place, follow_symlinks=False)
    except OSError as problem:
        return problem.errno != errno.ENOENT
    return True


def remove_unused(folder, local):
    """Remove what builders that were killed left, and of a folder that is `local` to this machine the environments that no
    attempt has entered for long and no process of this machine is in. It only saves room, so nothing fails with it."""
    try:
        _remove_unused(folder, local)
    except (IOError, OSError) as problem:
        say("cannot remove environments that nobody uses from %s: %s" % (folder, problem))


def _remove_unused(folder, local):
    for place in _list_ours(folder) if local else ():
        if _is_link_of(place, UNUSED_S) and not _is_entered(os.path.realpath(place)):
            aside = "%s.%s" % (place, token())
            os.rename(place, aside)
            if _is_link_of(aside, UNUSED_S):
                os.unlink(aside)
            else:
                os.rename(aside, place)  # an attempt has just entered it
    places = _list_ours(folder)
    published = {os.path.realpath(place) for place in places if os.path.islink(place)}
    for place in places:
        old = os.path.isdir(place) and time.time() - os.lstat(place).st_mtime > HALF_MADE_S
        if old and os.path.realpath(place) not in published:
            remove_folder(place)


def _list_ours(folder):
    """Environments and their links, without what people put beside them."""
    return [
        os.path.join(folder, name) for name in list_names(folder) if re.match(r"[0-9a-f]{24}(\.[0-9a-f]{8})*$", name)
    ]


def _is_link_of(place, seconds):
    """Whether a link is older than this."""
    return os.path.islink(place) and time.time() - os.lstat(place).st_mtime > seconds


def _is_entered(home):
    """Whether a process of this machine has the variables of an environment."""
    pids = [int(name) for name in list_names("/proc") if name.isdecimal()]
    return any(bears(pid, {name: [home]}) for pid in pids for name in ("VIRTUAL_ENV", "CONDA_PREFIX"))


def _wait_for_builder(place, gives_up):
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
            last = os.stat(mark).st_mtime
            other = read_json(mark)
        except ValueError:
            other = None  # a power failure left it empty
        except (IOError, OSError) as problem:
            if problem.errno == errno.ENOENT:
                continue
            raise
        if other is None:
            is_dead = True
        elif other["host"] == me["host"]:
            is_dead = not is_alive(other)
        else:
            is_dead = last == beat and time.time() - since > SILENT_S
            since, beat = (since if last == beat else time.time()), last
        if is_dead:
            _drop_mark(mark, other)
            continue
        if gives_up():
            raise SetupFailed("another process makes the environment, and this attempt was not wanted any more")
        time.sleep(LOOK_S)
    return False


def _drop_mark(mark, dead):
    """Remove the mark of a builder that died, so that only one of those that wait becomes the next builder."""
    aside = "%s.%s" % (mark, token())
    try:
        os.rename(mark, aside)
        if read_json(aside) != dead:
            os.link(aside, mark)  # another has become the builder meanwhile
    except (IOError, OSError, ValueError):
        pass  # another was first
    drop_file(aside)


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


def _build_environment(made, lock, place, gives_up):
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
        child = Child(
            words,
            cwd=os.path.dirname(lock),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        os.umask(before)
        with renewed(place + ".builder"):
            said = _await_manager(child, gives_up).decode("utf-8", "replace").strip()
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


def _await_manager(child, gives_up):
    """Wait for a manager, and return what it said. Raises `SetupFailed` if it is not wanted any more; its group has ended then."""
    try:
        while True:
            try:
                return child.communicate(timeout=LOOK_S)[0]
            except subprocess.TimeoutExpired:
                if gives_up():
                    raise SetupFailed("the environment was being made, and this attempt was not wanted any more")
    finally:
        if child.poll() is None:
            kill_group(child.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(END_S)
        kill_group(child.pid, signal.SIGKILL)
        child.wait()


def enter_environment(made, place, tree, environment):
    """Variables that put a command into an environment; the project itself is found in its tree."""
    paths = [os.path.join(tree, "src"), tree] if os.path.isdir(os.path.join(tree, "src")) else [tree]
    known = environment.get("PYTHONPATH")
    return {
        "VIRTUAL_ENV" if made["manager"] == "uv" else "CONDA_PREFIX": place,
        "PATH": os.pathsep.join([os.path.join(place, "bin"), environment.get("PATH", os.defpath)]),
        "PYTHONPATH": os.pathsep.join(paths + ([known] if known else [])),
    }


def prepare(order, folder, options, asked):
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
        say("the environment is %s" % find_environment(made, folder, tree, True, lambda: asked.stop))
    except SetupFailed as problem:
        say(str(problem))
        return FAILED
    finally:
        remove_folder(scratch)
    return DONE
