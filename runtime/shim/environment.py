"""The environment of a job's code, made once for each lock file."""

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
import time

from runtime.owners import is_ours, private_folder
from runtime.shim.files import create_whole, drop_file, list_names, make_folder, read_json, remove_folder, token
from runtime.shim.processes import boot_id, is_alive, started_at
from runtime.shim.tree import restore
from runtime.shim.words import DONE, FAILED, LOOK_S, SetupFailed, Taken, say

ENVIRONMENTS = "environments"
BUILD_PATIENCE_S = 900.0
"""How long to wait for another builder of the same environment."""


def find_environment(made, job, tree, build):
    """The folder of the environment `made`, which all jobs of this user in this record root share.

    It is published as a link, since environments hold their own path and cannot be moved. One that another user made or
    could write is not used: it runs whatever its maker put into it.
    """
    lock = os.path.join(tree, made["lock"])
    try:
        with io.open(lock, "rb") as opened:
            content = opened.read()
    except (IOError, OSError) as problem:
        raise SetupFailed("cannot read the lock file %s: %s" % (made["lock"], problem.strerror))
    about = [made["manager"], sys.platform, platform.machine(), hashlib.sha256(content).hexdigest()]
    key = hashlib.sha256(json.dumps(about + sorted(made.get("extras") or [])).encode()).hexdigest()[:24]
    records = os.path.dirname(os.path.dirname(job))
    for name in list_names(records):
        if name == ENVIRONMENTS or name.startswith("%s-%d" % (ENVIRONMENTS, os.geteuid())):
            place = os.path.join(records, name, key)
            if is_ours(os.path.dirname(place), alone=True) and is_ours(place, alone=True) and os.path.isdir(place):
                return os.path.realpath(place)
    place = os.path.join(records, ENVIRONMENTS, key)
    if not build:
        text = "the environment of %s was to be made at the launch, and %s is not there, or not this user's alone"
        raise SetupFailed(text % (lock, place))
    place = os.path.join(_own_folder(records, job), key)
    if os.path.lexists(place) and not is_ours(place, alone=True):
        say("does not use %s, which another user made or can write" % place)
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


def _own_folder(records, job):
    """The folder for environments that this user makes: the common one if this user made it, else one beside it."""
    common = os.path.join(records, ENVIRONMENTS)
    make_folder(common, within=job, mode=0o755)
    if os.stat(common).st_uid == os.geteuid() and is_ours(common, alone=True):
        return common
    return private_folder("%s-%d" % (common, os.geteuid()))


def _wait_for_builder(place):
    """Wait for another builder; returns whether this process has to build. Two builders at once lose only time."""
    until = time.time() + BUILD_PATIENCE_S
    me = {"host": socket.gethostname(), "boot": boot_id(), "pid": os.getpid(), "start": started_at(os.getpid())}
    while not os.path.isdir(place) and time.time() < until:
        try:
            create_whole(place + ".builder", json.dumps(me))
            return True
        except Taken:
            pass
        try:
            other = read_json(place + ".builder")
        except (IOError, OSError, ValueError):
            continue
        if other["host"] == me["host"] and not is_alive(other):
            return True
        time.sleep(LOOK_S)
    return not os.path.isdir(place)


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
        raise SetupFailed("cannot make the environment with %s: %s" % (words[0], os.strerror(problem.errno or 0)))


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
