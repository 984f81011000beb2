"""The environment of the code of a job or task, made once for each lock file."""

import contextlib
import errno
import hashlib
import io
import json
import os
import platform
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

from runtime.file_trust import is_ours, private_folder
from runtime.shim.common import DONE, FAILED, LOOK_S, AlreadyClaimed, SetupFailed, say
from runtime.shim.files import create_whole, drop_file, list_names, make_folder, read_json, token
from runtime.shim.processes import ChildProcess, bears, boot_id, is_alive, kill_group, started_at
from runtime.shim.tree import restore
from runtime.shim.tree_walk import remove_folder

ENVIRONMENTS = "environments"
BEAT_S = 5.0
"""How often a builder renews its mark."""
SILENT_S = 120.0
"""How long a builder on another machine may leave its mark as it is before it counts as dead."""
END_S = 3.0
"""How long a manager that is not wanted any more may take to end."""
UNUSED_S = 30 * 86400.0
"""How long an environment of a machine is kept that no attempt enters."""
MOST_SAID = 1 << 20
"""Bytes that are kept of what a manager says."""
HALF_MADE_S = 86400.0
"""Age at which an environment that was never published counts as left by a builder that was killed."""


class CannotMake(SetupFailed):
    """This machine cannot make the environment, for a reason that is not in the lock file."""


class GivenUp(SetupFailed):
    """The environment was not wanted any more while it was made."""


_MACHINES = re.compile("No space left on device|Disk quota exceeded|os error 28|os error 122")
"""Messages of package managers about a full disk."""
_NETWORKS = re.compile(
    "NewConnectionError|NameResolutionError|ConnectTimeoutError|ReadTimeoutError|ProxyError|Temporary failure in name resolution"
    "|error sending request|CondaHTTPError"
)
"""Messages of package managers about an index that does not answer; they count only if no lock file names the index."""
_REASON = re.compile("ERROR: (?!ResolutionImpossible)")
_NAMES_INDEX = re.compile(r"(?m)^\s*(-i|-f|--index-url|--extra-index-url|--find-links)\b")
_UNSET = re.compile(
    "VIRTUAL_ENV$|CONDA_PREFIX$|PYTHON(HOME|PATH|SAFEPATH|NOUSERSITE|STARTUP|USERBASE|PLATLIBDIR)$|__PYVENV_LAUNCHER__$"
    "|PIP_(TARGET|PREFIX|ROOT|USER|PYTHON|EDITABLE|REQUIREMENT|CONSTRAINT|DRY_RUN|SRC|REPORT|IGNORE_INSTALLED|NO_DEPS"
    "|BREAK_SYSTEM_PACKAGES|LOG|QUIET)$"
    "|UV_(PROJECT|WORKING_DIRECTORY|PROJECT_ENVIRONMENT|SYSTEM_PYTHON|NO_SYNC|BREAK_SYSTEM_PACKAGES|CONSTRAINT|OVERRIDE"
    "|BUILD_CONSTRAINT|EXCLUDE_NEWER|ENV_FILE|TARGET|PREFIX|VENV_CLEAR|VENV_SEED)$"
)
"""Variables of this machine that would change what is made or where. Those that name its mirrors and caches stay."""


def find_environment(made, job, tree, build, gives_up=lambda: False, log=lambda text: None):
    """The folder of the environment `made`, which all jobs of this user in this record root share, or on this machine if
    `made` has `local`.

    It is published as a link, since environments hold their own path and cannot be moved. One that another user made or
    could write is not used, because it runs whatever its maker put into it; nor is one whose interpreter is gone. `log` gets
    what the managers said, if it is made now. Raises `SetupFailed`, `CannotMake` if this machine is the reason, and `GivenUp`
    once `gives_up()` is true while it is made; no process of its manager is left then.
    """
    try:
        return _find_environment(made, job, tree, build, gives_up, log)
    except (IOError, OSError) as problem:
        raise CannotMake("cannot make the environment of %s: %s" % (made["lock"], problem))


def _find_environment(made, job, tree, build, gives_up, log):
    lock = os.path.join(tree, made["lock"])
    try:
        with io.open(lock, "rb") as opened:
            content = opened.read()
    except (IOError, OSError) as problem:
        raise SetupFailed("cannot read the lock file %s: %s" % (made["lock"], problem.strerror))
    about = [made["manager"], sys.platform, platform.machine(), hashlib.sha256(content).hexdigest()]
    python = made.get("python") or ("%d.%d" % sys.version_info[:2] if made["manager"] == "pip" else None)
    about += sorted(made.get("extras") or [])
    if python:
        about.append({"python": python, "complete": bool(made.get("complete"))})
    key = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:24]
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
        if is_good and (not made.get("local") or _record_use(place)):
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
            _build_environment(made, python, lock, place, gives_up, log)
            remove_unused(os.path.dirname(place), local=made.get("local"))
    finally:
        if builds:
            drop_file(place + ".builder")
    return os.path.realpath(place)


def _is_whole(place):
    """Whether an environment exists and has its interpreter, which may be a link to one of the system."""
    python = os.path.join(place, "bin", "python")
    return os.path.isdir(place) and os.path.exists(python) == os.path.lexists(python)


def _own_folder(records, job):
    """The folder for environments that this user makes: the common one if this user made it, else one beside it."""
    common = os.path.join(records, ENVIRONMENTS)
    make_folder(common, within=job, mode=0o755)
    if os.stat(common).st_uid == os.geteuid() and is_ours(common, alone=True):
        return common
    return private_folder("%s-%d" % (common, os.geteuid()))


def _record_use(place):
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
        except AlreadyClaimed:
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
            raise GivenUp("another process makes the environment, and this attempt was not wanted any more")
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


def _build_environment(made, python, lock, place, gives_up, log):
    home = "%s.%s" % (place, token())
    with io.open(lock, encoding="utf-8", errors="replace") as opened:
        names_index = bool(_NAMES_INDEX.search(opened.read()))
    environment = {key: value for key, value in os.environ.items() if not _UNSET.match(key)}
    environment["UV_PROJECT_ENVIRONMENT"] = home
    try:
        with renewed(place + ".builder"):
            for words, is_base in _list_steps(made, python, lock, home):
                code, said = _run_manager(
                    words, os.path.dirname(lock), environment, os.path.join(home, "made"), gives_up
                )
                log("$ %s\n%s" % (" ".join(words), said and said + "\n"))
                if code != 0:
                    text = "%s failed: %s" % (" ".join(_name(words)), describe_end(said))
                    away = _NETWORKS.search(said) and not names_index
                    # A manager that was killed, such as for memory, says nothing about the lock file.
                    is_machines = is_base or away or not 0 < code < 128 or _MACHINES.search(said)
                    raise (CannotMake if is_machines else SetupFailed)(text)
        try:
            os.symlink(os.path.basename(home), place)
        except OSError as problem:
            if problem.errno != errno.EEXIST:
                raise
            remove_folder(home)  # another was first
    except (OSError, SetupFailed):
        remove_folder(home)
        raise


def describe_end(said):
    """The last lines of what a manager said. The reason comes last, where pip often has something else."""
    lines = said.splitlines()
    reasons = [line for line in lines if _REASON.match(line)][-1:]
    return "\n".join(lines[-10:] + [line for line in reasons if line != lines[-1]])


def _list_steps(made, python, lock, home):
    """The commands that make an environment, in order, and whether a failure of each is this machine's, whatever the lock says."""
    manager, extras = made["manager"], made.get("extras") or []
    if manager == "uv":
        chosen = ["--python", python] if python else []
        words = ["uv", "sync", "--frozen", "--no-install-project"] + chosen
        words += [word for extra in extras for word in ("--extra", extra)]
        return ([(["uv", "venv", "--no-project"] + chosen + [home], True)] if python else []) + [(words, False)]
    if manager == "pip":
        found = _find_python(python)
        if found:
            base = [found, "-I", "-m", "venv", home]
        elif shutil.which("uv"):
            base = ["uv", "venv", "--no-project", "--seed", "--python", python, home]
        else:
            here = os.uname().nodename
            raise CannotMake("the environment needs Python %s, and neither it nor uv is on PATH on %s" % (python, here))
        words = [
            os.path.join(home, "bin", "python"),
            "-I",
            "-m",
            "pip",
            "install",
            "--no-input",
            "--disable-pip-version-check",
        ]
        return [(base, True), (words + ["--no-deps"] * bool(made.get("complete")) + ["-r", lock], False)]
    if lock.endswith((".yml", ".yaml")):
        return [(["conda", "env", "create", "--quiet", "--prefix", home, "--file", lock], False)]
    return [(["conda", "create", "--yes", "--quiet", "--prefix", home, "--file", lock], False)]


def _name(words):
    """The program and the verb of a manager's command, for people."""
    return ["pip", "install"] if "pip" in words else ["python", "-m", "venv"] if "venv" in words[2:4] else words[:2]


def _find_python(minor):
    """The interpreter of a minor version that runs here; None if none is known. A program of that name may be a mere
    placeholder, as those of pyenv are."""
    own = getattr(sys, "_base_executable", None) or sys.executable
    known = [own] if own and minor == "%d.%d" % sys.version_info[:2] else []
    known += [os.path.join(folder, "python" + minor) for folder in os.get_exec_path()]
    ask = "import ensurepip, venv, sys; print('%d.%d' % sys.version_info[:2])"
    for program in known:
        try:
            with io.open(os.devnull) as nothing:
                said = subprocess.check_output([program, "-I", "-c", ask], stdin=nothing, stderr=subprocess.STDOUT)
        except (OSError, subprocess.CalledProcessError):
            continue
        if said.decode("utf-8", "replace").strip() == minor:
            return program
    return None


def _run_manager(words, folder, environment, mark, gives_up):
    """The exit code of a manager's command, and what it said. Nobody but this user may write to what it makes: a group that can
    could put its own programs there. Success is the file `mark`, since a code of 0 may also stand for one that is not known."""
    program = shutil.which(words[0])
    if program is None:
        where = "there is no such program on PATH on %s" % os.uname().nodename
        raise CannotMake("cannot make the environment with %s: %s" % (words[0], where))
    # By a shell, since the mask of a process is that of all its threads.
    child = ChildProcess(
        ["/bin/sh", "-c", 'umask 022; "$@" && : > "$0"', mark, program] + words[1:],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    said = _await_manager(child, gives_up)
    code = -1
    with contextlib.suppress(OSError):
        os.unlink(mark)
        code = 0
    return code and (child.returncode or code), said.decode("utf-8", "replace").strip()


def _await_manager(child, gives_up):
    """Wait for a manager, and return the end of what it said. Raises `GivenUp` if it is not wanted any more. Its group has
    ended then; a daemon that it left, as the build of a package may, keeps the pipe open and nobody waiting."""
    said, pipe = bytearray(), child.stdout.fileno()
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    try:
        while child.poll() is None:
            if poll.poll(LOOK_S * 1000) and not _read_some(pipe, said):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(LOOK_S)
            if gives_up():
                raise GivenUp("the environment was being made, and this attempt was not wanted any more")
        for _ in range(MOST_SAID >> 16):
            if not poll.poll(0) or not _read_some(pipe, said):
                break
        return bytes(said)
    finally:
        if child.poll() is None:
            kill_group(child.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(END_S)
        kill_group(child.pid, signal.SIGKILL)
        child.wait()
        child.stdout.close()


def _read_some(pipe, said):
    """Add what can be read now; False at the end of it."""
    piece = os.read(pipe, 1 << 16)
    said.extend(piece)
    del said[:-MOST_SAID]
    return bool(piece)


def enter_environment(made, place, tree, environment):
    """Variables that put a command into an environment; the project itself is found in its tree."""
    paths = [os.path.join(tree, "src"), tree] if os.path.isdir(os.path.join(tree, "src")) else [tree]
    known = environment.get("PYTHONPATH")
    return {
        "CONDA_PREFIX" if made["manager"] == "conda" else "VIRTUAL_ENV": place,
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
