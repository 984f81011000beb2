#!/usr/bin/env python3
"""Runs one job's command on any backend, with the same environment, signals, logs, deadline and result everywhere.

One file of the standard library, for Python 3.6 to 3.14, copied beside the job: nothing of this package need be on the
machine. It is told everything by `order.json` in the job's run folder, decides by what lies there, and writes nowhere
else but to a scratch folder of the machine. docs/shim.md describes the folder and each rule.

    shim.py FOLDER [--bucket URL] [--native ID] [--index I | --indices A-B] [--scratch FOLDER]

Exit codes: 0 the runs succeeded, 1 one failed for good, 2 the order cannot be followed, 3 this is a twin of another
job, 10 the backend should start it again, 11 the backend should never start it again, 12 as 10, where what was begun
counts as lost unless the backend knows why it ended.
"""

import argparse
import errno
import fcntl
import hashlib
import io
import json
import math
import os
import platform
import random
import re
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import traceback
from typing import Any, Dict, List, Set, Tuple

SCHEMA = 1
SNAPSHOT = "snapshot.tar"
DONE, FAILED, REFUSED, DUPLICATE, AGAIN, NEVER, LOST = 0, 1, 2, 3, 10, 11, 12

BEAT_S = 10.0
LOOK_S = 0.2
SOON_S = 0.005
HEAR_S = 1.0
"""The first looks at what was just started come sooner, so that short commands wait for nobody."""
ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)
TEMPORARY_FAILURE = 75
"""A command that wants to be started again says so with this code (EX_TEMPFAIL)."""
PREEMPTED_NOTE = "preempted"
"""File of an attempt's folder, by which a command that exits with that code says that its machine is taken away."""
SETUP_FAILED = "setup_failed"
"""File of an attempt's folder that says how what comes before the command went wrong."""
TELL_SETUP = """trap 'echo "the setup lines ended with exit code $?${BASH_COMMAND:+, at: $BASH_COMMAND}" """
TELL_SETUP += """>"${RUNTIME_PREEMPTED_NOTE%/*}/""" + SETUP_FAILED + """"' EXIT; trap 'trap - EXIT; exit 143' TERM"""
"""Line of shell before the setup lines. A shell that gets to the command becomes it, and leaves nothing; nor does one that is
ended from outside, as it is where another rank has failed."""
NAME_SETUP = 'runtime_setup="${RUNTIME_PREEMPTED_NOTE%/*}/setup.$RUNTIME_RANK"'
"""Line of shell that names the file which the shim writes for a rank with setup lines; they may change the variables."""
END_SETUP = 'true 2>/dev/null >|"$runtime_setup"'
"""Line of shell right before the command, which empties that file. Emptying takes no room on a full disk, and `true` is
no special builtin, whose redirection would end the shell where it fails."""
BRIEF_S = 600.0
"""Attempts that gave way to a notice sooner than this came to a machine that was going already."""
LOST_IN_A_ROW = 3
TIMEOUTS_IN_A_ROW = 2
MEMORY_S = 0.5
CGROUP = "/sys/fs/cgroup"
MEMORY_FULL, MEMORY_FREE = 0.9, 0.8
"""The part of a container's memory from which on it is said to be nearly full, and down to which."""
DISK_S = 5.0
"""So often it is looked at what was written to this container's own disk, and more rarely where that takes long."""
OWN_DISK = "/"
DISK_AT_ONCE_S = 0.005
"""A look goes on for so long at a time, since nothing else is looked at meanwhile."""
DISK_LAST_S = 0.5
"""The last look of one that is asked to stop: who evicts it for its disk gives it a second."""
BUILD_PATIENCE_S = 900.0
"""How long another's making of the same environment is waited for."""
WRITE_PATIENCE_S = 900.0
"""How long a result waits for a disk that is full, and what is read for a file server that does not answer."""
WRITE_AGAIN_S = 5.0
PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE)
KILLED_S = 10.0
"""How long the end is waited for where a command that asked for it was killed."""
LOG_BYTES = 1 << 30
"""The most that a rank's log of an attempt takes where the order says nothing."""
LOG_TAIL_BYTES = 16 << 20
"""Of a log that outgrew its limit so much of the end is kept, or a quarter of the limit; the rest of it is the beginning."""
LOG_FLUSH_S = 1.0
"""So often the end of such a log is written over."""
PIPE_BYTES = 1 << 20
F_SETPIPE_SZ = 1031
LEFT_S = 10.0
"""How long what a command left running is killed over and over: what is stuck in the kernel ends later, or never."""
PR_SET_CHILD_SUBREAPER = 36
LIMIT_SLACK_S = 30.0
"""So long before the backend's own limit, and the grace, an attempt ends at the latest."""
HOST = os.environ.get("RUNTIME_HOST") or socket.gethostname()
"""Of containers the name of their machine, where the backend tells it."""
BEGAN = float(os.environ.get("RUNTIME_SHIM_BEGAN") or time.time())
"""When the first shim of this native job began; those that it starts are told."""
GPU_PATIENCE_S = 15.0
"""How long memory is waited for that another run of the same GPU gives back as it ends."""
GPU_CLAIMS = "/tmp/research-runtime-gpus"
"""The same for every user of a machine, whatever their TMPDIR."""
PART_BYTES, PATH_BYTES, MOST_PARTS = 255, 4095, 255
"""Of a name that another machine chose: bytes of each part, bytes of the whole path, and parts."""

# What each end is charged to. Ends that are not here are final.
FAILURES = ("app_failed", "oom", "disk", "idle", "setup_failed", "timeout")
PREEMPTIONS = ("stopped", "lost", "preempted", "node_failed", "temporary")
FREE = ("requeue", "checkpointed")


OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") + (
    "JAX_COORDINATOR_ADDRESS",
    "JAX_NUM_PROCESSES",
    "JAX_PROCESS_ID",
)
"""A job that is launched from within another is none of its ranks."""


class Refused(Exception):
    """The order cannot be followed; the text says why."""


class SetupFailed(Exception):
    """The attempt could not be prepared."""


class NoCapacity(Exception):
    """What was given to us is in use."""


class Taken(Exception):
    """Something that only one may make is there already."""


# the run folder


def read_json(path):
    return json.loads(read_text(path))


def read_text(path):
    with io.open(path, encoding="utf-8") as opened:
        return opened.read()


def _write_beside(path, text, durable=True):
    temporary = "%s.%d.%s" % (path, os.getpid(), token())
    try:
        with io.open(temporary, "w", encoding="utf-8") as opened:
            opened.write(text)
            if durable:
                opened.flush()
                os.fsync(opened.fileno())
    except (IOError, OSError):
        try:
            os.unlink(temporary)
        except OSError:
            pass
        raise
    return temporary


def write_patiently(write, path, text, give_up=None):
    """As `write` does, over and over while the folder takes nothing: a full disk that somebody clears costs time only."""
    return patiently("write", path, lambda: write(path, text), give_up)


def patiently(verb, path, do, give_up=None):
    """Call `do` until it fails no more in a way that passes, which a file server that starts anew does, too.

    Once `give_up()` is true a refusal is raised.
    """
    until = time.time() + WRITE_PATIENCE_S
    while True:
        try:
            return do()
        except (IOError, OSError) as problem:
            if problem.errno not in PASSING or time.time() >= until:
                raise
            if give_up is not None and give_up():
                raise
            say("cannot %s %s, tries again: %s" % (verb, os.path.basename(path), problem.strerror))
        again = time.time() + WRITE_AGAIN_S
        while time.time() < again and not (give_up is not None and give_up()):
            time.sleep(min(LOOK_S, WRITE_AGAIN_S))


def write_whole(path, text, durable=True):
    """Write a file so that whoever looks sees none or all of it; one that is there is replaced.

    One that is not durable may be empty after a power failure, of which the next start of the machine tells.
    """
    temporary = _write_beside(path, text, durable)
    os.rename(temporary, path)


def create_whole(path, text):
    """As `write_whole`; raises `Taken` if the file is there already. The first of any number wins, on NFS too."""
    temporary = _write_beside(path, text)
    try:
        try:
            os.link(temporary, path)
        except OSError as problem:
            # An answer that was lost on the way looks like a refusal of our own link; the link count tells.
            if problem.errno == errno.EEXIST and os.stat(temporary).st_nlink < 2:
                raise Taken(path)
            if problem.errno != errno.EEXIST:
                raise
    finally:
        os.unlink(temporary)


def leave_mark(path, spare):
    """Make an empty file whose name says all. On a disk without room for another file it becomes a second name of the
    file `spare`, which takes none. False if it can be neither."""
    try:
        create_empty(path, "")
    except (IOError, OSError):
        try:
            os.link(spare, path)
        except OSError as problem:
            return problem.errno == errno.EEXIST
    return True


def create_empty(path, _):
    """A file whose name says all; one that is there stays."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    except OSError as problem:
        if problem.errno != errno.EEXIST:
            raise


def token():
    return "%08x" % random.SystemRandom().getrandbits(32)


def make_folder(path, within=None):
    """Make it with all above, but never the folder `within`, a job's: that of a record root that went may come back."""
    if within is not None and not os.path.isdir(within):
        raise OSError(errno.ESTALE, "the folder of the job is not there")
    try:
        os.makedirs(path)
    except OSError as problem:
        if problem.errno != errno.EEXIST:
            raise


def make_common_folder(path, within=None):
    """One that is for all who may write to the folder above it."""
    if not os.path.isdir(path):
        make_folder(path, within)
        try:
            os.chmod(path, os.stat(os.path.dirname(path)).st_mode & 0o7777)
        except OSError:
            pass  # another user was first


# what has ended, in few files: quotas of shared file systems count entries

FOLDED = "ended"
"""File with what a job's folder held, by name; `runs/INDEX.ended` that of one run of an array."""
FOLD_BYTES = 1 << 16
"""Longer logs stay files of their own, `runs/INDEX.aATTEMPT.rankRANK.log`, as does the newest of the first rank."""
OF_NO_USE = ("beat", "processes.json", "shim.py", "memory")
LOCK_DEAD_S = 86400.0
"""A launch lock that nobody has written for this long is nobody's, however far apart two machines' clocks are."""
LAUNCH_S = 10.0
"""How long a job that has ended waits for the launch that still writes down that it began."""


def fold(job, start=""):
    """Put the small files of a job's folder, or those below `start`, into one; what the command wrote itself stays.

    A result is never missing meanwhile, and one that is cut off is gone on with by the next call.
    """
    kept, beside = {}, []
    many = not start and len(list_runs(job)) > 1
    for place, folders, names in os.walk(os.path.join(job, start) if start else job):
        parts = [] if place == job else os.path.relpath(place, job).split(os.sep)
        folders[:] = [each for each in folders if not _is_apart(parts + [each], many)]
        for name in names:
            path, long = os.path.join(place, name), "/".join(parts + [name])
            if name in OF_NO_USE or long in (FOLDED, SNAPSHOT) or name.endswith("." + FOLDED):
                continue
            if not parts and name.startswith("lock."):
                continue
            size = os.path.getsize(path) if os.path.isfile(path) else 0
            if name.endswith(".log") and (size > FOLD_BYTES or (size and name == "rank0.log" and _is_newest(place))):
                beside += [long] if len(parts) == 3 else []
            elif os.path.isfile(path) and not os.path.islink(path):
                with io.open(path, "rb") as opened:
                    kept[long] = opened.read()
    _write_folded(_folded(job, start), kept, beside)
    there = read_header(_folded(job, start))[0]
    for name in there:
        path = os.path.join(job, name)
        if there[name] is None:
            _move(path, _beside(job, name))
        elif name in kept and read_folded(job, name) == kept[name]:  # one that was folded before may be another now
            os.unlink(path)
    _remove_empty(job, start, many)


def list_runs(job):
    """Indices that have anything in the job's folder."""
    return sorted({name.partition(".")[0] for name in list_names(os.path.join(job, "runs"))})


def _is_newest(attempt):
    run, name = os.path.split(attempt)
    numbers = [int(each[1:]) for each in list_names(run) if each[:1] == "a" and each[1:].isdigit()]
    return name[:1] == "a" and int(name[1:]) >= max(numbers)


def _folded(job, start):
    return os.path.join(job, start + "." + FOLDED if start else FOLDED)


def _beside(job, name):
    runs, index, rest = name.split("/", 2)
    return os.path.join(job, runs, "%s.%s" % (index, rest.replace("/", ".")))


def _is_apart(parts, many):
    """What the command wrote, secrets, and of an array its runs, which are folded one by one."""
    if parts in (["secrets"], ["runs"] if many else None):
        return True
    return len(parts) == 3 and parts[0] == "runs" and parts[2] in ("output", "checkpoint")


def _write_folded(path, kept, beside):
    places: Dict[str, Any] = dict.fromkeys(beside)
    size = 0
    for name in sorted(kept):
        places[name] = [size, len(kept[name])]
        size += len(kept[name])
    temporary = "%s.%d.%s" % (path, os.getpid(), token())
    try:
        with io.open(temporary, "wb") as opened:
            os.fchmod(opened.fileno(), 0o600)
            opened.write(json.dumps(places, sort_keys=True).encode("utf-8") + b"\n")
            for name in sorted(kept):
                opened.write(kept[name])
            opened.flush()
            os.fsync(opened.fileno())
        os.link(temporary, path)
    except OSError as problem:
        if problem.errno != errno.EEXIST:  # another was first, or an earlier call was cut off
            raise
    finally:
        os.unlink(temporary)


def read_header(path):
    """Name → where it lies in a folded file and how long it is, None for one beside; and where the first begins."""
    try:
        with io.open(path, "rb") as opened:
            line = opened.readline()
        return json.loads(line.decode("utf-8")), len(line)
    except (IOError, OSError, ValueError):
        return {}, 0


def read_folded(job, name):
    """The bytes of a small file of a job or run that has been folded, None where there is none."""
    run = "/".join(name.split("/")[:2])
    for path in [_folded(job, "")] + ([_folded(job, run)] if name.startswith("runs/") else []):
        places, begin = read_header(path)
        if places.get(name):
            with io.open(path, "rb") as opened:
                opened.seek(begin + places[name][0])
                return opened.read(places[name][1])
    return None


def unfold(job, start=""):
    """The other way round, for a job that goes on."""
    path = _folded(job, start)
    places, begin = read_header(path)
    for name in sorted(places):
        place = os.path.join(job, name)
        make_folder(os.path.dirname(place), within=job)
        if places[name] is None:
            _move(_beside(job, name), place)
        elif not os.path.exists(place):
            with io.open(path, "rb") as opened:
                opened.seek(begin + places[name][0])
                content = opened.read(places[name][1])
            temporary = "%s.%s" % (place, token())
            with io.open(temporary, "wb") as opened:
                os.fchmod(opened.fileno(), 0o600)
                opened.write(content)
                opened.flush()
                os.fsync(opened.fileno())
            os.rename(temporary, place)
    if places:
        os.unlink(path)


def _move(path, to):
    try:
        os.rename(path, to)
    except OSError as problem:
        if problem.errno != errno.ENOENT:
            raise


def _remove_empty(job, start, many):
    """Files of no use now, and folders that nothing was put into; those that the command made itself stay."""
    for place, _, names in os.walk(os.path.join(job, start) if start else job, topdown=False):
        parts = [] if place == job else os.path.relpath(place, job).split(os.sep)
        if (many and parts[:1] == ["runs"]) or len(parts) > (4 if parts[2:3] == ["output"] else 3):
            continue
        for name in names if len(parts) in (0, 3) and parts[2:3] not in (["output"], ["checkpoint"]) else ():
            if name in OF_NO_USE:
                os.unlink(os.path.join(place, name))
        try:
            if parts:
                os.rmdir(place)
        except OSError:
            continue  # something is in it


def fold_job(job, order):
    """Fold a job whose runs all have their results; not while anybody launches it, who would take it apart meanwhile."""
    lock = None if os.path.isdir(os.path.join(job, "secrets")) else take_lock(job)
    if lock is None:
        return
    try:
        _fold_held(job, order, lock)
    finally:
        os.unlink(lock)


def _fold_held(job, order, lock):
    if len(list_runs(job)) > 1:
        runs = [name for name in list_names(os.path.join(job, "runs")) if name.isdigit()]
        for count, index in enumerate(runs):
            if count % 50 == 0:
                _write_lock(lock, os.O_TRUNC, count)  # launchers take over one that stands still
            fold(job, "runs/" + index)
    fold(job)
    content = (order.get("code") or {}).get("sha256")
    archive = os.path.join(job, SNAPSHOT)
    common = os.path.join(os.path.dirname(os.path.dirname(job)), "snapshots", "%s.tar" % content)
    if os.path.exists(archive) and os.path.exists(common) and os.path.samefile(archive, common):
        os.unlink(archive)


def close_job(order, record):
    """Fold the job once every run has its result. That is for quotas: what goes wrong here is nobody's failure."""
    if not order.get("fold") or not isinstance(record, FolderRecord):
        return
    try:
        names = set(list_names(os.path.join(record.folder, "runs")))
        if len(order["runs"]) == 1:
            ended = all(record.read("runs/%s/result" % index) for index in order["runs"])
        else:
            ended = all("%s.%s" % (index, FOLDED) in names for index in order["runs"])
        until = time.monotonic() + LAUNCH_S
        while ended and time.monotonic() < until and _is_being_launched(record.folder):
            time.sleep(0.02)
        if ended:
            fold_job(record.folder, order)
    except (IOError, OSError) as problem:
        say("cannot fold the job: %s" % problem)


def _is_being_launched(job):
    return any(_is_held(os.path.join(job, name)) for name in _list_locks(job))


def take_lock(job):
    """Hold the launch lock of a job, as launchers do; the path of our file, None where somebody else has it."""
    if _is_being_launched(job):
        return None
    number = max([0] + [int(name[5:]) for name in _list_locks(job)]) + 1
    path = os.path.join(job, "lock.%d" % number)
    try:
        _write_lock(path, os.O_CREAT | os.O_EXCL, 0)
    except OSError as problem:
        if problem.errno == errno.EEXIST:
            return None
        raise
    return path


def _write_lock(path, flags, count):
    opened = os.open(path, os.O_WRONLY | flags, 0o600)
    try:
        said = {"owner": "a shim on %s, which folds the job" % HOST, "count": count}
        os.write(opened, json.dumps(said, sort_keys=True).encode("utf-8"))
    finally:
        os.close(opened)


def _list_locks(job):
    return [name for name in list_names(job) if name.startswith("lock.") and name[5:].isdigit()]


def _is_held(lock):
    """Not by a launcher or shim that died long ago: one that lives writes its lock every few seconds."""
    try:
        return time.time() - os.stat(lock).st_mtime < LOCK_DEAD_S
    except OSError:
        return False


def list_names(path):
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []


class FolderRecord(object):
    """What is known of a job, as files of its run folder. Names are relative to it.

    `BucketRecord` of shim_bucket.py keeps the same in a bucket.
    """

    def __init__(self, folder):
        self.folder = folder

    def _path(self, name):
        return os.path.join(self.folder, name)

    def read(self, name):
        """The text of a file, None while there is none."""
        try:
            return patiently("read", name, lambda: read_text(self._path(name)))
        except (IOError, OSError) as problem:
            if problem.errno in PASSING:
                raise
            folded = read_folded(self.folder, name)
            return None if folded is None else folded.decode("utf-8")

    def write(self, name, text, give_up=None):
        write_patiently(self._put(write_whole), self._path(name), text, give_up)

    def create(self, name, text, give_up=None):
        """Raises `Taken` if it is there already."""
        write_patiently(self._put(create_whole), self._path(name), text, give_up)
        if name.endswith("/result") and read_folded(self.folder, name) is not None:
            os.unlink(self._path(name))  # it was folded a moment ago
            raise Taken(name)

    def _put(self, write, make=make_folder):
        def put(path, text):
            make(os.path.dirname(path), within=self.folder)
            return write(path, text)

        return put

    def mark(self, name):
        """Make a file whose name says all, if there is any way."""
        if not leave_mark(self._path(name), self._path("order.json")):
            say("cannot write %s" % name)

    def begin(self, name, text):
        """Make the folder of an attempt with its `start.json`. Raises `Taken` if it is another's."""
        make_folder(os.path.dirname(self._path(name)), within=self.folder)
        try:
            os.mkdir(self._path(name))
        except OSError as problem:
            if problem.errno != errno.EEXIST:
                raise
            raise Taken(name)
        write_whole(os.path.join(self._path(name), "start.json"), text, durable=False)

    def has(self, name):
        return os.path.exists(self._path(name))

    def names(self, name):
        """Names in a folder, none while there is no such folder. Attempts are counted by them, so it is all or an error."""
        try:
            return sorted(patiently("list", name, lambda: os.listdir(self._path(name))))
        except (IOError, OSError) as problem:
            if problem.errno not in (errno.ENOENT, errno.ENOTDIR):
                raise
            return []

    def announce(self, name, give_up=None):
        """Say an outcome in a name, so that one listing of the record root tells the state of every job."""
        done = os.path.join(os.path.dirname(os.path.dirname(self.folder)), "done", name)
        write_patiently(self._put(create_empty, make_common_folder), done, "", give_up)

    def beat(self, name, text):
        try:
            write_whole(self._path(name), text, durable=False)
        except (IOError, OSError):
            pass  # a full disk is no reason to end a command that does without

    def before(self, run, attempt, asked):
        """Called before an attempt is prepared. False where it was asked to stop meanwhile."""
        return True

    def after(self, run, attempt):
        """Called when all that an attempt started has ended, before it is said how."""

    def own_folders(self):
        """Folders of the record that lie on this machine's own disk."""
        return []


class Run(object):
    """What is known of one index of a job, and its folder on this machine."""

    def __init__(self, record, index, told=None):
        """`told` is a file that the backend shows of what has ended."""
        self.record = record
        self.job = record.folder
        self.index = index
        self.told = told
        self.log_bytes = LOG_BYTES
        self.name = "runs/%s" % index
        self.folder = os.path.join(self.job, "runs", str(index))

    def result(self):
        """The committed result, None while there is none."""
        text = self.record.read(self.name + "/result")
        return None if text is None else json.loads(text)

    def commit(self, reason, code, attempt, details, give_up=None):
        """Make this the result of the index, unless another is; returns the one that stands."""
        result = dict(details, reason=reason, code=code, attempt=attempt, at=time.time())
        self.tell(result)
        try:
            self.record.create(self.name + "/result", json.dumps(result, sort_keys=True), give_up)
        except Taken:
            result = self.result()
        self.announce(result, give_up)
        return result

    def tell(self, result):
        """Say it to the backend too, which may be asked where the record root cannot be read."""
        if not self.told:
            return
        short = {name: result[name] for name in ("reason", "code", "attempt") if name in result}
        short["message"] = result.get("message", "")[:1000]
        try:
            with io.open(self.told, "w", encoding="utf-8") as opened:
                opened.write(json.dumps(short, sort_keys=True))
        except (IOError, OSError):
            pass

    def announce(self, result, give_up=None):
        job = os.path.basename(self.job)
        outcome = (job, self.index, result["reason"], result["code"], result["attempt"])
        self.record.announce("%s.%d.%s.%s.%d" % outcome, give_up)

    def cancelled(self):
        return any(self.record.has(name) for name in ("cancel", "cancel.%d" % self.index))

    def attempts(self):
        """Every attempt so far, oldest first: its number, and how it ended or None."""
        found = []
        for name in self.record.names(self.name):
            if name.startswith("a") and name[1:].isdigit():
                found.append((int(name[1:]), self.ended(int(name[1:]))))
        return sorted(found, key=lambda each: each[0])

    def counted(self, order, last=None):
        """How the attempts ended that budgets count: those before a retry by hand are forgiven.

        Up to `last` where one is named: later ones are a twin's, and it says itself how they end.
        """
        forgiven = (order.get("forgiven") or {}).get(str(self.index), 0)
        known = [each for each in self.attempts() if forgiven < each[0] <= (last or each[0])]
        if pod_failures() is None:
            return [note for _, note in known]
        found = []
        for place, (number, note) in enumerate(known):
            if note is None or note["reason"] == "stopped":
                later = known[place + 1 :]
                after = self.seen_failures(later[0][0]) if later else pod_failures()
                full = None if note else self.record.read(self.attempt_name(number) + "/memory")
                note = name_end(note, self.seen_failures(number), after, full)
            found.append(note)
        return found

    def seen_failures(self, attempt):
        """How many failures the backend had counted when an attempt began, None where it did not say."""
        return (self.started(attempt) or {}).get("failures")

    def ended(self, attempt):
        for name in self.record.names(self.attempt_name(attempt)):
            if name.startswith("end.") and name.count(".") == 2:  # more is what a killed shim was just writing
                return json.loads(self.record.read("%s/%s" % (self.attempt_name(attempt), name)))
        return None

    def attempt_name(self, attempt):
        return "%s/a%04d" % (self.name, attempt)

    def attempt_folder(self, attempt):
        return os.path.join(self.folder, "a%04d" % attempt)

    def claim(self, native, scratch=None):
        """Begin the next attempt: its number, which nobody else gets. `scratch` is the folder that it will make here."""
        start = {
            "native": native,
            "host": HOST,
            "boot": boot_id(),
            "pid": os.getpid(),
            "start": started_at(os.getpid()),
            "at": time.time(),
            "python": "%d.%d.%d" % sys.version_info[:3],
        }
        if scratch:
            start["scratch"] = scratch
        if pod_failures() is not None:
            start["failures"] = pod_failures()
        if "SLURM_JOB_ID" in os.environ:
            start["restarts"] = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
        known = self.attempts()
        attempt = known[-1][0] + 1 if known else 1
        while True:
            try:
                self.record.begin(self.attempt_name(attempt), json.dumps(start, sort_keys=True))
                return attempt
            except Taken:
                attempt += 1

    def clear(self):
        """End what attempts left running here whose shim died, with their trees, and note those that a restart of this
        machine ended."""
        rebooted, dead, trees = [], set(), []
        for attempt, ended in self.attempts():
            start = None if ended else self.started(attempt)
            if not start or start.get("host") != HOST or not start.get("boot") or is_alive(start):
                continue
            trees.append(start.get("scratch"))
            if start["boot"] != boot_id():
                rebooted.append(attempt)
                continue
            dead.add(str(attempt))
            try:
                groups = read_json(os.path.join(self.attempt_folder(attempt), "processes.json"))
            except (IOError, OSError, ValueError):
                continue
            for group in groups:
                if is_group_alive(group):
                    say("ends what attempt %d left running: process group %d" % (attempt, group["pid"]))
                    _kill_group(group["pid"], signal.SIGKILL)
        if dead:
            end_marked(os.path.basename(self.job), self.index, dead)
        for tree in trees:
            self._remove_scratch(tree)
        for attempt in rebooted:  # last, for a full disk may refuse it; the next start finds them again
            try:
                self.end(attempt, "node_failed", 1, {"message": "%s was started anew" % HOST}, lambda: True)
            except (IOError, OSError) as problem:
                say("cannot note how attempt %d ended: %s" % (attempt, problem))

    def _remove_scratch(self, path):
        """Remove what a note says an attempt made here, if it is such a folder, and ours."""
        if not path or not os.path.basename(path).startswith(scratch_prefix(os.path.basename(self.job), self.index)):
            return
        try:
            found = os.lstat(path)
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
                say("removes %s, which a killed shim left" % path)
                _remove(path)
        except OSError as problem:
            if problem.errno != errno.ENOENT:
                say("cannot remove %s: %s" % (path, problem.strerror))

    def started(self, attempt):
        """Who began an attempt, None where that is not known."""
        try:
            return json.loads(self.record.read(self.attempt_name(attempt) + "/start.json") or "null")
        except ValueError:
            return None

    def halted(self):
        """Whether another index failed of an array that stops then."""
        return self.record.has("stopped")

    def halt(self):
        self.record.mark("stopped")

    def end(self, attempt, reason, code, details, give_up=None):
        """Note how an attempt ended; the name says it too."""
        note = dict(details, reason=reason, code=code, at=time.time())
        self.tell(dict(note, attempt=attempt))
        name = "%s/end.%s.%s" % (self.attempt_name(attempt), reason, code)
        self.record.write(name, json.dumps(note, sort_keys=True), give_up)


def claim_job(record, epoch, part, native):
    """Raise `Taken` if another native job than ours serves this part of the job."""
    name = "owners/%d.%d" % (epoch, part)
    try:
        record.create(name, native)
    except Taken:
        owner = record.read(name)
        if owner != native:
            raise Taken(owner)
    names = record.names("owners")
    epochs = [name.partition(".")[0] for name in names if name.endswith(".%d" % part)]
    later = [each for each in epochs if each.isdigit() and int(each) > epoch]
    if later:
        raise Taken("%s.%d" % (later[-1], part))


# what follows on an end: a pure function


def decide(ended, retry, pause=random.random):
    """("again", seconds) or ("final", reason) after `ended`, the notes of all attempts, oldest first.

    A note of None is an attempt that left no word: its machine went, so it counts as lost.
    """
    reasons = [_charged(note, retry) for note in ended]
    last = reasons[-1]
    if last in FREE:
        return "again", 0.0
    if last in PREEMPTIONS:
        if last == "lost" and _in_a_row(reasons, ("lost",)) >= LOST_IN_A_ROW:
            return "final", "lost"
        spent = sum(reason in PREEMPTIONS for reason in reasons)
        if spent > retry["preemption"]:
            return "final", _named(last)
        # The first costs no wait; after that the notice may stand for as long as the machine does.
        brief = _in_a_row([bool(note) and note.get("lasted_s", BRIEF_S) < BRIEF_S for note in ended], (True,))
        return "again", _pause(brief - 1, retry, pause) if brief > 1 else 0.0
    if last == "timeout" and _in_a_row(reasons, ("timeout",)) >= TIMEOUTS_IN_A_ROW:
        return "final", "timeout"
    if last not in FAILURES:
        return "final", last
    spent = sum(reason in FAILURES for reason in reasons)
    if spent > retry["failure"]:
        return "final", last
    return "again", _pause(spent, retry, pause)


def _charged(note, retry):
    """The reason of an attempt, as budgets see it: "temporary" where its exit code alone asked for another."""
    if not note:
        return "lost"
    code = note.get("code")
    asked = note["reason"] == "requeue" and code == TEMPORARY_FAILURE and str(code) not in retry["on_exit"]
    return "temporary" if asked else note["reason"]


def _pause(count, retry, pause):
    low, high = retry["backoff_s"]
    return min(high, low * 2 ** (count - 1)) * (0.5 + pause())


def pod_failures():
    """How many pods of this index had failed when this one was made, as Kubernetes counts; None elsewhere.

    It leaves those out that it disrupted itself: evicted, preempted, drained, or on a node that is gone.
    """
    said = os.environ.get("RUNTIME_POD_FAILURES", "")
    return int(said) if said.isdigit() else None


def name_end(note, before, after, full):
    """The end of an attempt that was asked to stop, or left no word, by what the backend counted before and after it.

    TERM alone proves nothing. What the backend has counted was no disruption of its own, and nobody knows what it was,
    unless its memory was nearly `full`: a container whose processes are killed together for that leaves no word.
    """
    if before is None or after is None:
        return note
    if after > before and full:
        return {"code": 137, "reason": "oom", "message": "went without a word when its memory was %s full" % full}
    if after > before:
        said = (note or {}).get("message") or "it left no word"
        return dict(note or {"code": 1}, reason="lost", message="%s, and the backend tells of no disruption" % said)
    return dict(note or {"code": 1, "message": "the backend took its machine away"}, reason="preempted")


def _in_a_row(reasons, wanted):
    count = 0
    for reason in reversed(reasons):
        if reason not in wanted:
            break
        count += 1
    return count


def _named(reason):
    # Whoever looked at the backend's own state knows better; what we know is that something took the machine away.
    # A command that never stopped asking for another attempt has failed.
    return {"stopped": "preempted", "temporary": "app_failed"}.get(reason, reason)


# one attempt


class Attempt(object):
    """Prepares, runs and ends the command of one index, once."""

    def __init__(self, order, run, number, scratch, asked, binding, gpus=None):
        self.order, self.run, self.number, self.asked = order, run, number, asked
        self.scratch = scratch
        self.binding = binding
        self.gpus = gpus
        self.folder = run.attempt_folder(number)
        self.started = time.time()
        limit = order.get("time_limit_s")
        self.deadline = self.started + limit if limit else None
        if order.get("native_limit_s"):
            # What starts again in place has what is left of the backend's own limit, whose end would leave no word.
            left = BEGAN + order["native_limit_s"] - order["grace_s"] - LIMIT_SLACK_S
            self.deadline = min(self.deadline or left, left)
        self.checkpoints = self._checkpoint_folder()
        self.had = _newest(self.checkpoints)
        self.children = []
        self.has_setup = False
        self.setups = {}
        self.logs = Logs(order.get("log_bytes", LOG_BYTES))
        self.signalled = False
        self.address = "127.0.0.1"
        self.leads = False
        self.beats, self.beat_due = 0, 0.0
        self.disk = DiskUse(disk_limit(), run.record.own_folders())
        self.full = False

    def go(self):
        """Returns (reason, exit code, details). Whatever goes wrong here, no process is left."""
        try:
            return self._go()
        except BaseException:
            self._end_all(0)
            raise
        finally:
            self.logs.close()
            self._forget_setups()

    def _go(self):
        if self.order.get("launch_ranks"):
            return self._go_far()
        try:
            self.binding = dict(self.binding, **check_gpus(self.order.get("gpu_check")))
            words, environment, folder = self._prepare()
        except SetupFailed as problem:
            return "setup_failed", 1, {"message": str(problem)}
        except NoCapacity as problem:
            return "no_capacity", 1, {"message": str(problem)}
        ranks = self.order["nodes"] * self.order["tasks_per_node"]
        try:
            for rank in range(ranks):
                self.children.append(self._start(rank, ranks, words, environment, folder))
        except OSError as problem:
            self._end_all(0)
            return "setup_failed", 127, {"message": "cannot start %s: %s" % (words[0], problem.strerror)}
        except ValueError as problem:
            self._end_all(0)
            return "setup_failed", 127, {"message": "cannot start %s: %s" % (words[0], problem)}
        groups = [{"boot": boot_id(), "pid": child.pid, "start": started_at(child.pid)} for child in self.children]
        try:
            write_whole(os.path.join(self.folder, "processes.json"), json.dumps(groups), durable=False)
        except (IOError, OSError) as problem:
            say("cannot note the processes of attempt %d: %s" % (self.number, problem.strerror))
        if self.gpus:
            self.gpus.note(groups)
        return self._watch()

    def _go_far(self):
        """Ranks on several machines: the backend's own starter runs a shim for each (`run_rank`), and we watch it."""
        self.leads = True
        words = list(self.order["launch_ranks"]) + [sys.executable, os.path.abspath(__file__), self.run.job]
        words += ["--index", str(self.run.index), "--rank-of", str(self.number)]
        environment = dict(os.environ, RUNTIME_LEADER=socket.gethostname())
        log = os.open(os.path.join(self.folder, "ranks.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            self.children.append(
                Command(
                    words, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
            )
        except OSError as problem:
            return "setup_failed", 127, {"message": "cannot start %s: %s" % (words[0], problem.strerror)}
        finally:
            os.close(log)
        return self._watch()

    def run_rank(self, rank, leader):
        """One rank of an attempt that another shim watches; returns the command's exit code."""
        self.address = leader
        try:
            words, environment, folder = self._prepare()
            ranks = self.order["nodes"] * self.order["tasks_per_node"]
            self.children.append(self._start(rank, ranks, words, environment, folder))
        except (SetupFailed, OSError) as problem:
            write_whole(os.path.join(self.folder, SETUP_FAILED), str(problem))
            return 1
        child, stopped = self.children[0], False
        while child.poll() is None:
            if self.asked.stop or os.path.exists(os.path.join(self.folder, "stop")):
                self._end_all(self.order["grace_s"])
                stopped = True
                break
            if not self.signalled and os.path.exists(os.path.join(self.folder, "ask")):
                self.signalled = True
                self._ask_for_checkpoint()
            reap_orphans()
            time.sleep(LOOK_S)
        _kill_group(child.pid, signal.SIGKILL)
        code = child.wait()
        end_orphans()
        self.logs.close()
        if self.setups and not stopped:
            self._hear([code])
        failure = None if stopped or self.asked.stop or self.signalled else self._find_unreached([(rank, code)])
        self._forget_setups()
        if failure is not None:
            write_whole(os.path.join(self.folder, SETUP_FAILED), failure)
            return _shell_code(code) or 1
        return _shell_code(code)

    # before

    def _prepare(self):
        work = self.order["runs"][str(self.run.index)]
        folder = self._tree()
        environment = self._environment(work)
        if self.order.get("environment"):
            made = self.order["environment"]
            place = find_environment(made, self.run.job, folder, build=made["build_on"] == "node")
            environment.update(enter_environment(made, place, folder, environment))
        words = list(work["command"])
        if self.order.get("shell"):
            words = ["/bin/sh", "-c", words[0]]
        before = list(self.order.get("wrap") or [])
        self.has_setup = any(END_SETUP in word for word in before)
        if self.order.get("setup"):
            script = setup_script(self.order["setup"], last=not self.has_setup)
            before = [shutil.which("bash") or "/bin/sh", "-c", script, "setup"] + before
            self.has_setup = True
        return before + words, environment, folder

    def _tree(self):
        """The folder that the command starts in, its own tree if the order has code."""
        code = self.order.get("code") or {}
        if code.get("path"):
            if not os.path.isdir(code["path"]):
                raise SetupFailed("no folder %s on %s" % (code["path"], socket.gethostname()))
            return code["path"]
        if not code.get("archive"):
            home = os.path.join(self.scratch, "work")
            make_folder(home)
            return home
        if code.get("writable", True):
            return restore(
                os.path.join(self.run.job, code["archive"]), code["sha256"], os.path.join(self.scratch, "tree")
            )
        return shared_tree(os.path.join(self.run.job, code["archive"]), code["sha256"])

    def _checkpoint_folder(self):
        path = (self.order.get("checkpoint") or {}).get("dir") or os.path.join(self.run.folder, "checkpoint")
        make_folder(path, within=self.run.job)
        return path

    def _environment(self, work):
        output = self.order.get("output_dir") or os.path.join(self.run.folder, "output", "a%04d" % self.number)
        try:
            make_folder(output, within=self.run.job)
        except OSError as problem:
            raise SetupFailed("cannot make the output folder %s: %s" % (output, problem.strerror))
        own = dict(
            RUNTIME_JOB_ID=self.order["job"],
            RUNTIME_ATTEMPT=str(self.number),
            RUNTIME_RESTARTS=str(self.number - 1),
            RUNTIME_ARRAY_INDEX=str(self.run.index),
            RUNTIME_CHECKPOINT_DIR=self.checkpoints,
            RUNTIME_OUTPUT_DIR=output,
            RUNTIME_PREEMPTED_NOTE=os.path.join(self.folder, PREEMPTED_NOTE),
            PYTHONUNBUFFERED="1",
        )
        if self.deadline:
            own["RUNTIME_DEADLINE"] = str(int(self.deadline))
        if (self.order.get("code") or {}).get("sha256"):
            own["RUNTIME_SNAPSHOT_ID"] = "sha256:" + self.order["code"]["sha256"]
        nested = "RUNTIME_JOB_ID" in os.environ
        environment = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith("RUNTIME_") and not (nested and key in OF_RANKS)
        }
        environment.update(self.order.get("env") or {})
        environment.update(work.get("env") or {})
        for name, path in sorted((self.order.get("secrets") or {}).items()):
            environment[name] = read_secret(os.path.join(self.run.job, path))
        environment.update(self.binding)
        environment.update(own)
        return environment

    def _start(self, rank, ranks, words, environment, folder):
        per_node = self.order["tasks_per_node"]
        address = self.address
        environment = dict(
            environment,
            RUNTIME_RANK=str(rank),
            RUNTIME_WORLD_SIZE=str(ranks),
            RUNTIME_LOCAL_RANK=str(rank % per_node),
            RUNTIME_NODE_RANK=str(rank // per_node),
            RUNTIME_NUM_NODES=str(self.order["nodes"]),
            RUNTIME_MASTER_ADDR=address,
        )
        if ranks > 1:
            port = str(
                self.order.get("master_port")
                or 20000 + int(hashlib.sha256(self.folder.encode()).hexdigest()[:4], 16) % 10000
            )
            environment.update(
                RANK=str(rank),
                WORLD_SIZE=str(ranks),
                LOCAL_RANK=environment["RUNTIME_LOCAL_RANK"],
                MASTER_ADDR=address,
                MASTER_PORT=port,
                JAX_COORDINATOR_ADDRESS="%s:%s" % (address, port),
                JAX_NUM_PROCESSES=str(ranks),
                JAX_PROCESS_ID=str(rank),
            )
        if self.has_setup:
            self._expect_setup(rank)
        log = self.logs.open(self._log(rank))
        try:
            return Command(
                words,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                close_fds=True,
            )
        finally:
            os.close(log)

    def _expect_setup(self, rank):
        """Write the file that the setup lines of a rank empty at their end."""
        path = os.path.join(self.folder, "setup.%d" % rank)
        try:
            with io.open(path, "w", encoding="utf-8") as opened:
                opened.write("not at its command yet\n")
            self.setups[rank] = path
        except (IOError, OSError):
            pass  # a full disk: only the trap of the shell says then that the lines ended it

    def _setup_failure(self, ended):
        """How the setup lines kept a command from running, None if they did not. `ended` are ranks and their exit codes."""
        try:
            with io.open(os.path.join(self.folder, SETUP_FAILED), encoding="utf-8", errors="replace") as opened:
                return opened.read(2000).strip()
        except (IOError, OSError):
            return self._find_unreached(ended)

    def _find_unreached(self, ended):
        """As `_setup_failure`, of ranks of this machine whose shell left no word of it."""
        for rank, code in ended:
            try:
                if rank in self.setups and os.stat(self.setups[rank]).st_size:
                    return "the setup lines ended with exit code %d, before the command" % _shell_code(code)
            except OSError:
                continue
        return None

    def _forget_setups(self):
        for path in self.setups.values():
            try:
                os.unlink(path)
            except OSError:
                pass

    def _log(self, rank):
        return os.path.join(self.folder, "rank%d.log" % rank)

    # meanwhile

    def _watch(self):
        """Wait for the command, and for all that may end it sooner."""
        quiet = (self._printed(), time.time())
        checkpoint = self.order.get("checkpoint")
        limit, look = (self.order.get("limits") or {}).get("memory_bytes"), 0.0
        pause = SOON_S
        while True:
            codes = [child.poll() for child in self.children]
            if all(code is not None for code in codes):
                return self._judge(codes)
            if any(code for code in codes):
                # One rank's end ends the others: they would wait for it for ever.
                self._end_all(self.order["grace_s"])
                return self._judge(codes)
            now = time.time()
            reap_orphans()
            if self.asked.due:
                self.asked.due = False
                self.deadline = min(self.deadline or now + 1e9, now + (checkpoint or {}).get("lead_s", 0))
            self._beat()
            self._tell_memory()
            if self.run.cancelled():
                self._end_all(self.order["grace_s"])
                return "cancelled", 1, {}
            if self.asked.stop:
                return self._stop(self.order["grace_s"])
            if self.disk.is_over(DISK_AT_ONCE_S):
                return self._out_of_disk()
            if self.deadline and now >= self.deadline:
                self._end_all(self.order["grace_s"])
                return self._timed_out()
            soon = self.deadline and checkpoint and now >= self.deadline - checkpoint["lead_s"]
            if (soon or self.asked.checkpoint) and not self.signalled:
                self.signalled = True
                self.asked.checkpoint = False  # asked of this attempt, and not of the next one here
                self._ask_for_checkpoint()
            idle = self.order.get("idle_timeout_s")
            if idle:
                printed = self._printed()
                if printed != quiet[0]:
                    quiet = (printed, now)
                elif now - quiet[1] >= idle:
                    self._end_all(self.order["grace_s"])
                    return "idle", 1, {"message": "printed nothing for %d s" % idle}
            if limit and now >= look:
                used = self._held_memory(limit)
                # Many processes take long to look at; it is never more than a small part of the time.
                look = now + max(MEMORY_S, 50 * (time.time() - now))
                if used > limit:
                    self._end_all(0.0)
                    return "oom", 137, {"message": "held %d MiB, its limit is %d MiB" % (used >> 20, limit >> 20)}
            time.sleep(pause)
            pause = min(LOOK_S, pause * 1.5)

    def _beat(self):
        """Move the counter on where that is due, by a clock that nobody sets."""
        now = time.monotonic()
        if not self.beats or now >= self.beat_due:
            self.beats, self.beat_due = self.beats + 1, now + BEAT_S
            self.run.record.beat(self.run.attempt_name(self.number) + "/beat", str(self.beats))

    def _tell_memory(self):
        """Note when the memory is nearly full, and when it is no more, for the next start to know if we are killed."""
        share = 0.0 if pod_failures() is None else memory_share() or 0.0
        full = share >= (MEMORY_FREE if self.full else MEMORY_FULL)
        if full != self.full:
            self.full = full
            name = self.run.attempt_name(self.number) + "/memory"
            self.run.record.beat(name, "%d %%" % (100 * share) if full else "")

    def _printed(self):
        """What differs once anything more was printed. Ranks elsewhere write their logs themselves, over once they are
        full, so the time of the last change counts too."""
        if not self.leads:
            return self.logs.printed()
        logs = [os.path.join(self.folder, name) for name in list_names(self.folder) if name.endswith(".log")]
        found = [os.stat(log) for log in logs if os.path.exists(log)]
        return sum(each.st_size for each in found), max([each.st_mtime for each in found] or [0.0])

    def _held_memory(self, limit):
        """What the node that holds most has in memory, in bytes; nodes are groups of ranks of this machine."""
        per_node = self.order["tasks_per_node"]
        ranks = [child.pid for child in self.children]
        nodes = [ranks[first : first + per_node] for first in range(0, len(ranks), per_node)]
        return max([held_memory(node, limit) for node in nodes] or [0])

    def _ask_for_checkpoint(self):
        """To the command itself and not its group: a helper of it without a handler would die of the signal."""
        name = (self.order.get("checkpoint") or {}).get("signal")
        if name and self.leads:
            # A signal to srun would reach every process of every rank, whatever it does with signals.
            self._tell_ranks("ask")
        elif name:
            for child in self.children:
                if child.poll() is None:
                    _kill(child.pid, getattr(signal, "SIG" + name))

    def _end_all(self, grace):
        """TERM to every group, and what is left after `grace` seconds is killed."""
        until = time.time() + grace
        # srun turns a TERM into a kill of all ranks at once; their shims look for this instead.
        told = self.leads and self._tell_ranks("stop")
        if told:
            until += 2.0
        for child in self.children:
            if child.poll() is None and not told:
                _kill_group(child.pid, signal.SIGTERM)
        while time.time() < until and any(child.poll() is None for child in self.children):
            if self.beats:  # only the one that watches
                self._beat()
            time.sleep(min(LOOK_S, 0.05))
        for child in self.children:
            _kill_group(child.pid, signal.SIGKILL)
            child.wait()
        end_orphans()

    def _tell_ranks(self, name):
        """Whether the shims of ranks will find this file. No refusal may keep us from ending them."""
        return leave_mark(os.path.join(self.folder, name), os.path.join(self.folder, "start.json"))

    # after

    def _judge(self, codes):
        """`codes` are those of the moment when the first rank failed: what we ended after that has none."""
        for child in self.children:
            _kill_group(child.pid, signal.SIGKILL)  # what a command that ended left behind
        end_orphans()
        self._hear(codes)
        if self.asked.stop:
            return self._stop(0.0)
        first = next((code for code in codes if code), 0)
        code = _shell_code(first)
        checkpoint = self.order.get("checkpoint") if self.signalled else None
        died_of = code - 128 if first < 0 or self.leads else 0  # shims of ranks say it as shells do
        asked = died_of == getattr(signal, "SIG%s" % (checkpoint or {}).get("signal"), None)
        failure = self._setup_failure([(rank, each) for rank, each in enumerate(codes) if each is not None])
        if failure is not None and not asked:
            # A setup that ends well by itself has kept the command from running all the same.
            return "setup_failed", code or 1, {"message": failure}
        if not first:
            return "succeeded", 0, {}
        if code == TEMPORARY_FAILURE and os.path.exists(os.path.join(self.folder, PREEMPTED_NOTE)):
            return self._gave_way(code)
        said = self.order["retry"]["on_exit"].get(str(code))
        if said == "succeed":
            return "succeeded", code, {}
        if said == "requeue" or (code == TEMPORARY_FAILURE and said is None):
            free = said is None and self._has_new_checkpoint()
            return "checkpointed" if free else "requeue", code, {}
        if said == "fail":
            return "final_failure", code, {}
        if code == 137 and (ran_out_of_memory() or self.run.record.has(self.run.attempt_name(self.number) + "/oom")):
            return "oom", code, {}
        if checkpoint and self.deadline and time.time() >= self.deadline - checkpoint["lead_s"]:
            if died_of in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGTERM):
                return self._timed_out()
        elif asked:
            # The backend warned of an end that is not the time limit's: a preemption.
            return "stopped", code, {"message": "ended by the signal that asked it for a checkpoint"}
        return "app_failed", code, {"rank": codes.index(first)} if len(codes) > 1 else {}

    def _hear(self, codes):
        """A backend that signals all processes of a job may reach the command a moment before this shim."""
        until = time.time() + HEAR_S
        if any(code in (-number, 128 + number) for code in codes if code for number in _ENDING):
            while not self.asked.stop and time.time() < until:
                time.sleep(0.02)

    def _stop(self, grace):
        """TERM alone proves nothing about why: the backend's own state does, or the start of a next attempt. What we know
        ourselves is how much disk was used."""
        if self.disk.is_over(DISK_LAST_S, now=True):
            return self._out_of_disk()
        self._end_all(grace)
        return "stopped", 143, {"message": "asked to stop by %s" % self.asked.why}

    def _gave_way(self, code):
        """The code alone proves nothing: commands may fail with it. The note is what only a notice makes."""
        try:
            with io.open(os.path.join(self.folder, PREEMPTED_NOTE), encoding="utf-8", errors="replace") as opened:
                text = opened.readline(500).strip()
        except (IOError, OSError):
            text = ""
        said = "gave way to a notice: %s" % text if text else "gave way to a notice"
        return "preempted", code, {"message": said, "lasted_s": round(time.time() - self.started, 3)}

    def _out_of_disk(self):
        """Said before anything else is done: whoever evicts us for it gives us a second."""
        details = {
            "message": "used %d MiB of disk, its limit is %d MiB" % (self.disk.used >> 20, self.disk.limit >> 20)
        }
        try:
            self.run.end(self.number, "disk", 1, details, lambda: True)
        except (IOError, OSError):
            pass  # it is tried again, patiently, when the command has ended
        self._end_all(0.0)
        return "disk", 1, details

    def _timed_out(self):
        if self._has_new_checkpoint():
            return "checkpointed", 124, {"message": "time limit, after a new checkpoint"}
        return "timeout", 124, {}

    def _has_new_checkpoint(self):
        newest = _newest(self.checkpoints)
        return newest is not None and newest != self.had


def setup_script(lines: List[str], last: bool = True) -> str:
    """Shell that becomes the words after it once the setup lines are through; `last` unless more such lines follow."""
    script = ["set -e", TELL_SETUP, NAME_SETUP] + list(lines) + ["set +e"]
    return "\n".join(script + [END_SETUP] * last + ['exec "$@"'])


def _shell_code(code):
    """The exit code as shells say it."""
    return code if code >= 0 else 128 - code


# what is printed


def split_log(limit: int) -> Tuple[int, int]:
    """How much of the beginning and of the end is kept of a log that outgrew `limit`, in bytes."""
    tail = min(LOG_TAIL_BYTES, limit // 4)
    return limit - tail - len(render_gap(0)), tail


def render_gap(left_out: int) -> bytes:
    """What stands in a log where bytes were left out; of the same length whatever their number."""
    return b"\n[shim: %16d bytes are left out here, as the log outgrew its limit]\n" % left_out


GAP = re.compile(re.escape(render_gap(0)).replace(re.escape(b"%16d" % 0), b" *([0-9]+)"))


class Log(object):
    """What one rank prints, in a file that never takes more than `limit` bytes.

    Beyond that the file is its beginning, a line that says how much is left out, and the end, which is held in memory
    and written over now and then: however much is printed, little is written.
    """

    def __init__(self, path, limit):
        self.limit = limit
        self.head, self.tail = split_log(limit)
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self.printed = 0
        self.size = 0
        self.missing, self.why = 0, ""
        """Bytes that the disk refused since the last that it took."""
        self.kept = bytearray()
        self.stale = False

    def add(self, data):
        self.printed += len(data)
        if self.printed > self.head:
            self.kept += data
            if len(self.kept) > 2 * self.tail:
                del self.kept[: -self.tail]
        if self.printed > self.limit:
            self.stale = True
            data = data[: max(0, self.limit - self.printed + len(data))]
        if data:
            self._append(data)

    def _append(self, data):
        try:
            if self.missing:
                said = b"\n[shim: %d bytes could not be written here: %s]\n" % (self.missing, self.why.encode())
                self._write(said)
                self.missing = 0
            self._write(data)
        except OSError as problem:
            self.missing += len(data)
            self.why = os.strerror(problem.errno or 0)

    def _write(self, data):
        """All of it or nothing: what a full disk took of it is written over by the next."""
        at = self.size
        while data:
            done = os.pwrite(self.file, data, at)
            at += done
            data = data[done:]
        self.size = at

    def flush(self):
        """Write the end over. What the disk refuses is tried again with the next."""
        if not self.stale:
            return
        end = bytes(self.kept[-self.tail :])
        text = render_gap(self.printed - self.head - len(end)) + end
        try:
            at = min(self.head, self.size)  # less where the disk refused some of the beginning
            while text:
                done = os.pwrite(self.file, text, at)
                at += done
                text = text[done:]
            os.ftruncate(self.file, at)
            self.stale = False
        except OSError:
            pass

    def close(self):
        if self.missing:
            self._append(b"")
        self.flush()
        os.close(self.file)


class Logs(object):
    """Brings what commands print from pipes to their logs, in a thread, so that no command waits for what else is done."""

    def __init__(self, limit):
        self.limit = limit
        self.logs: Dict[int, Log] = {}
        self.ended: List[Log] = []
        self.thread: Any = None
        self.until = 0.0
        """When it is done with, whatever is still printed; 0 as long as it goes on."""

    def open(self, path):
        """The write end of a pipe whose bytes go to the log at `path`; the caller closes it."""
        log = Log(path, self.limit)
        source, sink = os.pipe()
        try:
            fcntl.fcntl(sink, F_SETPIPE_SZ, PIPE_BYTES)
        except (IOError, OSError):
            pass  # more than a user may have, or another system
        if self.thread is None:
            self.wake, self.waker = os.pipe()
            self.poll = select.poll()
            self.poll.register(self.wake, select.POLLIN)
            self.thread = threading.Thread(target=self._go)
            self.thread.daemon = True
            self.thread.start()
        self.logs[source] = log
        self.poll.register(source, select.POLLIN)
        os.write(self.waker, b".")
        return sink

    def printed(self):
        return sum(log.printed for log in list(self.logs.values()) + self.ended)

    def _go(self):
        due = 0.0
        while True:
            waits = any(log.stale for log in list(self.logs.values()))
            closing = self.until  # before the look: one that began earlier may not know of the last pipe
            ready = self.poll.poll(0 if closing else 1000 * LOG_FLUSH_S if waits else None)
            if closing and (time.monotonic() > closing or not any(each in self.logs for each, _ in ready)):
                return
            for source, _ in ready:
                if source in self.logs:
                    self._take(source)
                elif not closing:
                    os.read(self.wake, 4096)
            if waits and time.monotonic() >= due:
                for log in list(self.logs.values()):
                    log.flush()
                due = time.monotonic() + LOG_FLUSH_S

    def _take(self, source):
        data = os.read(source, PIPE_BYTES)
        if data:
            self.logs[source].add(data)
        else:
            self.poll.unregister(source)
            log = self.logs[source]
            self.ended.append(log)
            del self.logs[source]
            os.close(source)
            log.close()

    def close(self):
        """Return when all that was printed until now is in the logs. Safe to call again."""
        if self.thread is None:
            return
        self.until = time.monotonic() + LEFT_S
        os.write(self.waker, b".")
        self.thread.join()
        self.thread = None
        for source, log in self.logs.items():
            os.close(source)
            log.close()
        for each in (self.wake, self.waker):
            os.close(each)
        self.ended += self.logs.values()
        self.logs = {}


_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Asked(object):
    """What was asked of us by signals."""

    def __init__(self):
        self.stop = False
        self.checkpoint = False
        self.due = False
        self.why = ""
        for number in _ENDING:
            signal.signal(number, self._stop)
        for name in ("SIGUSR1", "SIGUSR2"):
            signal.signal(getattr(signal, name), self._checkpoint)
        signal.signal(signal.SIGALRM, self._due)

    def take(self):
        """The signals that ask for a checkpoint or say that time is up, for shims that others of ours started."""
        names = [signal.SIGUSR1] * self.checkpoint + [signal.SIGALRM] * self.due
        self.checkpoint = self.due = False
        return names

    def _stop(self, number, frame):
        self.stop = True
        self.why = self.why or signal.Signals(number).name

    def _checkpoint(self, number, frame):
        self.checkpoint = True

    def _due(self, number, frame):
        """The time limit is taken to be near, for rehearsals: as far away as a checkpoint's lead."""
        self.due = True


# the disk


def disk_limit():
    """How many bytes this container may write to its own disk; None where it has no limit of its own."""
    asked, limit = (os.environ.get(name, "") for name in ("RUNTIME_DISK_REQUEST", "RUNTIME_DISK_LIMIT"))
    # Of a container without one, Kubernetes names all that the node has as the limit, and nothing as what it asks for.
    return int(limit) if limit.isdigit() and asked.isdigit() and int(asked) else None


class DiskUse(object):
    """What this container has written to its own disk, looked at a little at a time.

    That is what is newer than this process in the file system that it sees, without what is mounted there, and all of
    `folders`. A folder whose names are as old as its image is listed and its files are not looked at; so what is
    appended to a file of the image itself stays unseen.
    """

    def __init__(self, limit, folders):
        self.limit = limit
        self.folders = [os.path.realpath(each) for each in folders]
        self.used = 0
        self.look, self.due = None, time.monotonic() + DISK_S

    def is_over(self, seconds, now=False):
        """Look for so long; with `now` from the beginning, whenever the last look was."""
        if not self.limit:
            return False
        if now:
            self.look = None
        elif self.look is None and time.monotonic() < self.due:
            return False
        if self.look is None:
            self.used, self.began = 0, time.monotonic()
            self.look = self._look()
        until = time.monotonic() + seconds
        for _ in self.look:
            if self.used > self.limit:
                return True
            if time.monotonic() >= until:
                return False
        self.look, self.due = None, time.monotonic() + max(DISK_S, 2 * (time.monotonic() - self.began))
        return self.used > self.limit

    def _look(self):
        """Add up, and stop now and then."""
        mounted = mount_points()
        # Most of it lies there, so it is looked at first.
        often = os.path.realpath(tempfile.gettempdir())
        first = self.folders + ([] if any((often + "/").startswith(each + "/") for each in mounted) else [often])
        left = [OWN_DISK] + [each for each in first[::-1] if each != OWN_DISK]
        elsewhere = mounted | set(first)
        seen: Set[Any] = set()
        while left:
            folder = left.pop()
            try:
                # Not the time of its last change, which whoever unpacks an archive sets back.
                fresh = os.lstat(folder).st_ctime >= BEGAN
            except OSError:
                continue  # it went meanwhile
            for place, entry in enumerate(scan(folder)):
                try:
                    if entry.is_dir(follow_symlinks=False):
                        left += [] if entry.path in elsewhere else [entry.path]
                    elif fresh:
                        self._add(entry.stat(follow_symlinks=False), seen)
                except OSError:
                    continue
                if place % 100 == 99:
                    yield
            yield

    def _add(self, status, seen):
        """A file of several names counts once."""
        who = (status.st_dev, status.st_ino)
        if status.st_ctime >= BEGAN and who not in seen:
            self.used += status.st_blocks * 512
            if status.st_nlink > 1:
                seen.add(who)


def scan(folder):
    """What is in a folder, as far as that can be read."""
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                yield entry
    except OSError:
        return


def mount_points():
    """Folders and files of this container that are mounted, and lie elsewhere than its file system."""
    try:
        with io.open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as opened:
            found = {line.split()[4] for line in opened} - {"/"}
    except (IOError, OSError):
        return set()
    return {re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal.group(1), 8)), each) for each in found}


# processes of this machine


def boot_id():
    """Another after each start of this machine; empty where the system does not say."""
    try:
        with io.open("/proc/sys/kernel/random/boot_id") as opened:
            return opened.read().strip()
    except (IOError, OSError):
        return ""


def _stat(pid):
    """State, group and start of a process; None where there is none, or the system does not say."""
    words = _stat_words(pid)
    return (words[0], int(words[2]), words[19]) if words else None


def _stat_words(pid):
    """What /proc says of a process behind its name."""
    try:
        with io.open("/proc/%d/stat" % pid, encoding="utf-8", errors="replace") as opened:
            return opened.read().rpartition(")")[2].split()
    except (IOError, OSError):
        return None


def held_memory(leaders, limit):
    """What the sessions of `leaders` hold in memory, in bytes; 0 where the system does not say.

    Resident sizes count a shared page once for each process, so where their sum is over the limit, and only there, the
    costlier proportional sizes are read.
    """
    pids = [int(name) for name in list_names("/proc") if name.isdigit()]
    mine = [pid for pid in pids if _session(pid) in leaders]
    total = sum(_resident(pid) for pid in mine)
    if total <= limit or len(mine) == 1:
        return total
    return sum(_proportional(pid) for pid in mine)


def memory_share():
    """Which part of this container's memory holds what cannot be given back; None where nothing says so.

    Only version 2 of cgroups is read: where it kills, it kills all processes of a container, and this one with them.
    """
    try:
        with io.open(CGROUP + "/memory.max") as opened:
            limit = int(opened.read())
        with io.open(CGROUP + "/memory.stat") as opened:
            held = [int(line.split()[1]) for line in opened if line.startswith(("anon ", "shmem "))]
        return sum(held) / limit
    except (IOError, OSError, ValueError, ZeroDivisionError):
        return None


def _session(pid):
    try:
        return os.getsid(pid)
    except OSError:
        return None


def _resident(pid):
    try:
        with io.open("/proc/%d/statm" % pid) as opened:
            return int(opened.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (IOError, OSError, IndexError):
        return 0


def _proportional(pid):
    try:
        with io.open("/proc/%d/smaps_rollup" % pid) as opened:
            return sum(int(line.split()[1]) * 1024 for line in opened if line.startswith("Pss:"))
    except (IOError, OSError):
        return _resident(pid)


def started_at(pid):
    found = _stat(pid)
    return found[2] if found else None


def is_alive(who):
    """Whether the process of `{"boot", "pid", "start"}` still runs. A number that another has now is not it."""
    if who.get("boot") != boot_id():
        return False
    try:
        os.kill(who["pid"], 0)
    except OSError as problem:
        if problem.errno != errno.EPERM:
            return False
    found = _stat(who["pid"])
    return found is None or (found[0] != "Z" and who.get("start") in (None, found[2]))


def is_group_alive(leader):
    """Whether anything of the process group of `{"boot", "pid", "start"}` still runs."""
    if leader.get("boot") != boot_id():
        return False
    found = _stat(leader["pid"])
    if found and leader.get("start") not in (None, found[2]):
        return False  # the number is another's now, so nothing of the group was left
    members = [_stat(int(name)) for name in list_names("/proc") if name.isdigit()]
    return any(each and each[0] != "Z" and each[1] == leader["pid"] for each in members)


def adopt_orphans():
    """Have what is orphaned below this process fall to it, whatever session it is in: daemons too.

    Does nothing where the system has no such thing; only the process group of a command can be ended there.
    """
    try:
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    except (ImportError, OSError, AttributeError):
        pass


def reap_orphans():
    """Take the exit status of what fell to us and has ended; False where we have no child at all.

    What commands started is in sessions of their own. A child in ours is waited for by the code that started it.
    """
    if not hasattr(os, "waitid"):
        return True
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None or ended.si_pid in KNOWN or os.getsid(ended.si_pid) == os.getsid(0):
                return True
            os.waitpid(ended.si_pid, os.WNOHANG)
        except OSError as problem:
            return problem.errno != errno.ECHILD


KNOWN: Set[int] = set()
"""Children of ours in sessions of their own that this process waits for by itself."""


class Command(subprocess.Popen):  # type: ignore[type-arg]
    """A child in a session of its own whose exit code is taken here alone: Popen takes one that is gone for a success."""

    def __init__(self, words, **more):
        subprocess.Popen.__init__(self, words, **more)
        KNOWN.add(self.pid)

    def poll(self):
        return self._known(subprocess.Popen.poll(self))

    def wait(self, timeout=None):
        return self._known(subprocess.Popen.wait(self, timeout))

    def _known(self, code):
        if code is not None:
            KNOWN.discard(self.pid)
        return code


def end_orphans():
    """Kill what the commands of this process left running, daemons too, until nothing is left.

    Shims of other jobs, which a command launched, stay. Gives up on what cannot be killed.
    """
    until, pause, found_none = time.monotonic() + LEFT_S, SOON_S / 5, 0
    while reap_orphans() and found_none < 2:
        left = find_orphans()
        for pid in left:
            _kill(pid, signal.SIGKILL)
        found_none = 0 if left else found_none + 1
        if time.monotonic() >= until:
            say("cannot end what a command left running: %s" % ", ".join(str(pid) for pid in left))
            return
        time.sleep(pause if left else 0)
        pause = min(LOOK_S, pause * 2)


def find_orphans():
    """Living processes below this one in other sessions than ours, but for known children and shims of other jobs with
    all that is below them."""
    table = list_processes()
    below: Dict[int, List[int]] = {}
    for pid, each in table.items():
        below.setdefault(each[0], []).append(pid)
    found, left, own = [], list(below.get(os.getpid(), ())), os.getsid(0)
    while left:
        pid = left.pop()
        if pid in KNOWN or (table[pid][1] != own and is_shim(pid)):
            continue
        if table[pid][1] != own and table[pid][2] != "Z":
            found.append(pid)
        left += below.get(pid, ())
    return found


def list_processes():
    """Process → its parent, session and state; empty where the system does not say."""
    found = {}
    for name in list_names("/proc"):
        words = _stat_words(int(name)) if name.isdigit() else None
        if words:
            found[int(name)] = int(words[1]), int(words[3]), words[0]
    return found


def end_marked(job, index, attempts):
    """Kill what attempts of a run left on this machine whose shim was killed: what bears their variables, with all below.

    Neither this process and those above it, nor shims and what is below them.
    """
    until, pause = time.monotonic() + LEFT_S, SOON_S
    while True:
        left = find_marked(job, index, attempts)
        for pid in left:
            _kill(pid, signal.SIGKILL)
        if not left:
            return
        if time.monotonic() >= until:
            say("cannot end what was left running: %s" % ", ".join(str(pid) for pid in left))
            return
        say("ends what was left running: %s" % ", ".join(str(pid) for pid in left))
        time.sleep(pause)
        pause = min(LOOK_S, pause * 2)


def find_marked(job, index, attempts):
    table = list_processes()
    spared, pid = set(), os.getpid()
    while pid in table:
        spared.add(pid)
        pid = table[pid][0]
    ours = {b"RUNTIME_JOB_ID": [job], b"RUNTIME_ARRAY_INDEX": [str(index)], b"RUNTIME_ATTEMPT": attempts}
    wanted = {name: [value.encode("ascii") for value in values] for name, values in ours.items()}
    marked = {pid for pid in table if pid not in spared and table[pid][2] != "Z" and _bears(pid, wanted)}
    return [pid for pid in table if marked and _is_left(pid, table, marked, spared)]


def _is_left(pid, table, marked, spared):
    line = []
    while pid in table:
        line.append(pid)
        pid = table[pid][0]
    if not line or line[0] in spared or table[line[0]][2] == "Z" or not marked.intersection(line):
        return False
    return not any(is_shim(each) for each in line)


def _bears(pid, wanted):
    """Whether the variables that a process was started with have these values."""
    try:
        with io.open("/proc/%d/environ" % pid, "rb") as opened:
            pairs = [each.partition(b"=") for each in opened.read().split(b"\0")]
    except (IOError, OSError):
        return False
    borne = {name: value for name, _, value in pairs}
    return all(borne.get(name) in values for name, values in wanted.items())


def is_shim(pid):
    """Whether a process is a shim, or a copy of one."""
    try:
        with io.open("/proc/%d/cmdline" % pid, "rb") as opened:
            words = opened.read().split(b"\0")
    except (IOError, OSError):
        return False
    names = [word.rpartition(b"/")[2] for word in words]
    return any(b"shim" in word for word in words) and any(re.match(b"j-[0-9a-f]{24}$", name) for name in names)


def _kill(pid, number):
    try:
        os.kill(pid, number)
    except OSError:
        pass


def _kill_group(pid, number):
    try:
        os.killpg(pid, number)
    except OSError:
        pass


def _newest(folder):
    """What tells one checkpoint from the next: the newest time and the number of files below."""
    newest, count = 0.0, 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                newest = max(newest, os.stat(os.path.join(place, name)).st_mtime)
                count += 1
            except OSError:
                continue
    return (newest, count) if count else None


def ran_out_of_memory():
    """Whether the kernel killed something of our cgroup for memory."""
    return _oom_kills() > _OOM_BEFORE


def _oom_kills():
    count = 0
    try:
        with io.open("/proc/self/cgroup") as opened:
            lines = opened.read().splitlines()
    except (IOError, OSError):
        return 0
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            places = ["/sys/fs/cgroup" + path + "/memory.events"]
        elif "memory" in controllers.split(","):
            places = [
                "/sys/fs/cgroup/memory" + path + "/memory.oom_control",
                "/sys/fs/cgroup/memory/memory.oom_control",
            ]
        else:
            continue
        for place in places:
            try:
                with io.open(place) as opened:
                    for entry in opened.read().splitlines():
                        if entry.startswith("oom_kill "):
                            count = max(count, int(entry.split()[1]))
            except (IOError, OSError):
                continue
    return count


_OOM_BEFORE = _oom_kills()


def read_secret(path):
    try:
        with io.open(path, encoding="utf-8", newline="") as opened:
            return opened.read()
    except (IOError, OSError):
        raise SetupFailed("a secret's file is gone: %s" % os.path.basename(path))


# names that another machine chose


class NameRefused(ValueError):
    """A name that another machine chose and that becomes no file here."""

    def __init__(self, name: Any, reason: str) -> None:
        self.name, self.reason = name, reason
        ValueError.__init__(self, "%s %s" % (ascii(name), reason))


def local_parts(name: Any) -> List[str]:
    """The parts of a relative path that another machine named; raises `NameRefused` unless it leads below a folder."""
    if not isinstance(name, str):
        raise NameRefused(name, "is no text")
    parts = name.split("/")
    if "\0" in name:
        raise NameRefused(name, "holds a NUL")
    if name.startswith("/"):
        raise NameRefused(name, "is an absolute path")
    if ".." in parts:
        raise NameRefused(name, "leads to a folder above")
    if "" in parts or "." in parts:
        raise NameRefused(name, "has an empty part")
    try:
        size = max(len(os.fsencode(part)) for part in parts)
    except UnicodeError:
        raise NameRefused(name, "cannot be a file name here")
    if size > PART_BYTES:
        raise NameRefused(name, "has a part of %d bytes, and %d is the most" % (size, PART_BYTES))
    if len(parts) > MOST_PARTS:
        raise NameRefused(name, "lies %d folders deep, and %d is the most" % (len(parts), MOST_PARTS))
    return parts


def check_length(name: str, folder: str) -> None:
    size = len(os.fsencode(folder)) + 1 + len(os.fsencode(name))
    if size > PATH_BYTES:
        raise NameRefused(name, "makes a path of %d bytes here, and %d is the most" % (size, PATH_BYTES))


class Below(object):
    """An open folder that takes files under names which another machine chose.

    Every folder on the way is opened inside the one above it and never through a link, so what is made here lies below
    the folder whatever links are there or come meanwhile. `close` lets go of it.
    """

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        self._parts = []  # type: List[str]
        self._open = [os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)]

    def close(self) -> None:
        while self._open:
            os.close(self._open.pop())

    def __enter__(self) -> "Below":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def enter(self, name: Any) -> Tuple[int, str]:
        """The descriptor of the folder that `name` lies in, made where it is missing, and its last part.

        The descriptor holds until the next call. Raises `NameRefused`.
        """
        parts = local_parts(name)
        return self._walk(name, parts[:-1]), parts[-1]

    def make(self, name: Any) -> None:
        """Make the folder `name` where it is missing."""
        self._walk(name, local_parts(name))

    def _walk(self, name: str, folders: List[str]) -> int:
        check_length(name, self.path)
        kept = 0
        while kept < min(len(folders), len(self._parts)) and folders[kept] == self._parts[kept]:
            kept += 1
        del self._parts[kept:]
        while len(self._open) > kept + 1:
            os.close(self._open.pop())
        for part in folders[kept:]:
            self._open.append(self._step(name, part))
            self._parts.append(part)
        return self._open[-1]

    def _step(self, name: Any, part: str) -> int:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            try:
                return os.open(part, flags, dir_fd=self._open[-1])
            except OSError as problem:
                if problem.errno != errno.ENOENT:
                    raise
            try:
                os.mkdir(part, 0o777, dir_fd=self._open[-1])
            except OSError as problem:
                if problem.errno != errno.EEXIST:
                    raise
            return os.open(part, flags, dir_fd=self._open[-1])
        except OSError as problem:
            if problem.errno in (errno.ENOTDIR, errno.ELOOP):
                raise NameRefused(name, "leads through %s, which is no folder here" % ascii(part))
            raise explain_name(name, problem)

    def clear(self, name: Any) -> Tuple[int, str]:
        """As `enter`, with whatever file or link had the name unlinked."""
        folder, last = self.enter(name)
        try:
            os.unlink(last, dir_fd=folder)
        except OSError as problem:
            if problem.errno in (errno.EISDIR, errno.EPERM):
                raise NameRefused(name, "is the name of a folder here")
            if problem.errno != errno.ENOENT:
                raise explain_name(name, problem)
        return folder, last

    def create(self, name: Any, mode: int = 0o666) -> int:
        """The descriptor of a new, empty file in the place of whatever file or link had its name."""
        folder, last = self.clear(name)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            return os.open(last, flags, mode, dir_fd=folder)
        except OSError as problem:
            raise explain_name(name, problem)

    def link(self, name: Any, target: str) -> None:
        """A symbolic link, whose target is text to us: nothing made here is reached through it."""
        folder, last = self.clear(name)
        try:
            os.symlink(target, last, dir_fd=folder)
        except (OSError, ValueError) as problem:
            raise explain_name(name, problem)


def explain_name(name: Any, problem: Exception) -> Exception:
    """`NameRefused` where it is the name that the file system does not take, else the problem itself."""
    number = getattr(problem, "errno", None)
    if isinstance(problem, ValueError) or number in (errno.ENAMETOOLONG, errno.EILSEQ, errno.EINVAL):
        return NameRefused(name, "is refused by the file system: %s" % (getattr(problem, "strerror", None) or problem))
    return problem


# the tree


def restore(archive, sha256, folder):
    """Unpack the snapshot into `folder`, after its bytes have proven to be the ones that were submitted."""
    try:
        with io.open(archive, "rb") as opened:
            content = opened.read()
    except (IOError, OSError) as problem:
        raise SetupFailed("cannot read the snapshot %s: %s" % (archive, problem.strerror))
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise SetupFailed("the snapshot %s holds other bytes than were submitted: sha256 is %s" % (archive, found))
    if os.path.islink(folder):
        os.unlink(folder)
    elif os.path.exists(folder):
        shutil.rmtree(folder)
    try:
        unpack(content, folder)
    except NameRefused as problem:
        raise SetupFailed("the snapshot is refused: %s" % problem)
    return folder


def unpack(content: bytes, folder: str) -> None:
    """Make `folder` with the tree of a snapshot; `content` has proven to be the bytes that were submitted.

    Raises `NameRefused` as `list_entries` does, and for what the file system says of a name.
    """
    entries = list_entries(content, folder)
    os.makedirs(folder)
    with Below(folder) as below:
        for name, mode, start, size, target in entries:
            if target:
                below.link(name, target)
                continue
            rest = memoryview(content)[start : start + size]
            descriptor = below.create(name)
            try:
                while rest:
                    rest = rest[os.write(descriptor, rest) :]
                os.fchmod(descriptor, mode)
            finally:
                os.close(descriptor)


def list_entries(content: bytes, folder: str) -> List[Tuple[str, int, int, int, str]]:
    """Name, mode, where the bytes begin, their number, and a link's target, of each file and link of an archive that is
    to be unpacked into `folder`.

    An archive holds files and symbolic links, as taking a snapshot makes them. With anything else in it, or with a name
    that leads elsewhere or through a link, it raises `NameRefused`. Of two with one name the last counts.
    """
    found = {}  # type: Dict[str, Tuple[str, int, int, int, str]]
    folders = {""}
    end = 0
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as tar:
            for entry in tar:
                _check_place(entry.name, found, folders)
                check_length(entry.name, folder)
                _check_entry(entry, len(content))
                end = max(end, entry.offset_data + entry.size)
                found.pop(entry.name, None)
                target = entry.linkname if entry.issym() else ""
                found[entry.name] = entry.name, entry.mode, entry.offset_data, entry.size, target
    except tarfile.TarError as problem:
        raise NameRefused("archive", "cannot be read: %s" % problem)
    if content[end:].strip(b"\0"):
        raise NameRefused("archive", "goes on after its last entry")
    return list(found.values())


def _check_entry(entry: Any, length: int) -> None:
    if entry.type == tarfile.SYMTYPE:
        if not entry.linkname:
            raise NameRefused(entry.name, "is a link to nothing")
        if entry.size:
            raise NameRefused(entry.name, "is a link with bytes of its own")
        if len(os.fsencode(entry.linkname)) > PATH_BYTES:
            raise NameRefused(entry.name, "is a link of more than %d bytes" % PATH_BYTES)
        return
    if entry.type != tarfile.REGTYPE or entry.issparse():
        raise NameRefused(entry.name, "is neither a file nor a symbolic link")
    if entry.mode & ~0o777:
        raise NameRefused(entry.name, "has the mode %o" % entry.mode)
    if entry.size < 0 or entry.offset_data + entry.size > length:
        raise NameRefused(entry.name, "is cut off")


def _check_place(name: str, found: Dict[str, Any], folders: Set[str]) -> None:
    parts = local_parts(name)
    if name in folders:
        raise NameRefused(name, "is the name of a folder here")
    if "/".join(parts[:-1]) in folders:
        return
    for depth in range(1, len(parts)):
        folder = "/".join(parts[:depth])
        if folder in found:
            raise NameRefused(name, "leads through %s, which is no folder here" % ascii(parts[depth - 1]))
        folders.add(folder)


def shared_tree(archive, sha256):
    """A tree that all attempts of this machine share and none can write to, made once and published by rename."""
    place = os.path.join(tempfile.gettempdir(), "research-runtime-%d" % os.getuid())
    make_folder(place)
    os.chmod(place, 0o700)
    tree = os.path.join(place, sha256)
    if os.path.isdir(tree):
        return tree
    fresh = restore(archive, sha256, "%s.%s" % (tree, token()))
    for folder, _, names in os.walk(fresh):
        for name in names:
            path = os.path.join(folder, name)
            if not os.path.islink(path):
                os.chmod(path, os.stat(path).st_mode & 0o555)
        os.chmod(folder, 0o700 if folder == fresh else 0o555)
    try:
        os.rename(fresh, tree)
    except OSError:
        _remove(fresh)  # another was first
    os.chmod(tree, 0o555)
    return tree


def _remove(folder):
    for place, _, _ in os.walk(folder):
        os.chmod(place, 0o700)
    shutil.rmtree(folder, ignore_errors=True)


# the environment


def find_environment(made, job, tree, build):
    """The folder of the environment that `made` tells of, beside the jobs of this record root, shared by all of them.

    Made once for each lock file. What is published is a link, since environments hold their own path and cannot be moved.
    """
    lock = os.path.join(tree, made["lock"])
    try:
        with io.open(lock, "rb") as opened:
            content = opened.read()
    except (IOError, OSError) as problem:
        raise SetupFailed("cannot read the lock file %s: %s" % (made["lock"], problem.strerror))
    about = [made["manager"], sys.platform, platform.machine(), hashlib.sha256(content).hexdigest()]
    key = hashlib.sha256(json.dumps(about + sorted(made.get("extras") or [])).encode()).hexdigest()[:24]
    root = os.path.join(os.path.dirname(os.path.dirname(job)), "environments")
    place = os.path.join(root, key)
    if os.path.isdir(place):
        return os.path.realpath(place)
    if not build:
        raise SetupFailed("the environment of %s was to be made at the launch, and %s is not there" % (lock, place))
    make_folder(root, within=job)
    builds = _wait_for_builder(place)
    try:
        # Whoever built it may have been done just before we could.
        if not os.path.isdir(place):
            _build_environment(made, lock, place)
    finally:
        if builds:
            try:
                os.unlink(place + ".builder")
            except OSError:
                pass
    return os.path.realpath(place)


def _wait_for_builder(place):
    """Return when there is nothing to wait for, and whether it is ours to build; who made the same at once loses
    nothing but time."""
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
    try:
        child = subprocess.Popen(
            words,
            cwd=os.path.dirname(lock),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        said = child.communicate()[0].decode("utf-8", "replace").strip()
        if child.returncode != 0:
            raise SetupFailed("%s failed: %s" % (" ".join(words[:2]), "\n".join(said.splitlines()[-10:])))
        try:
            os.symlink(os.path.basename(home), place)
        except OSError as problem:
            if problem.errno != errno.EEXIST:
                raise
            _remove(home)  # another was first
    except OSError as problem:
        _remove(home)
        raise SetupFailed("cannot make the environment with %s: %s" % (words[0], os.strerror(problem.errno or 0)))
    except SetupFailed:
        _remove(home)
        raise


def enter_environment(made, place, tree, environment):
    """Variables that put a command into it; the project itself is not installed there and is found in its tree."""
    paths = [os.path.join(tree, "src"), tree] if os.path.isdir(os.path.join(tree, "src")) else [tree]
    known = environment.get("PYTHONPATH")
    return {
        "VIRTUAL_ENV" if made["manager"] == "uv" else "CONDA_PREFIX": place,
        "PATH": os.pathsep.join([os.path.join(place, "bin"), environment.get("PATH", os.defpath)]),
        "PYTHONPATH": os.pathsep.join(paths + ([known] if known else [])),
    }


def prepare(order, folder, options):
    """Make the environment of a job and nothing else; returns an exit code."""
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
        _remove(scratch)
    return DONE


# GPUs


class GpuShare(object):
    """GPUs of this machine, or a part of one, that are ours until `drop`.

    A claim is a file in a folder that all users of the machine can write to. Who wants some writes the claim first and
    then looks at all others: of two that overlap, whoever looked last saw the other, goes back and tries again. A claim
    counts while its shim or a command of it lives on this very start of the machine, so nothing has to be cleaned up.
    """

    def __init__(self, wanted, devices):
        self.count = wanted["count"]
        self.devices = devices
        self.folder = wanted.get("locks") or GPU_CLAIMS
        self.path = os.path.join(self.folder, "claim.%d.%s" % (os.getpid(), token()))
        self.claim = {"boot": boot_id(), "pid": os.getpid(), "start": started_at(os.getpid()), "groups": []}
        try:
            os.mkdir(self.folder)
            os.chmod(self.folder, 0o1777)
        except OSError as problem:
            if problem.errno != errno.EEXIST:
                raise SetupFailed("cannot make %s: %s" % (self.folder, problem.strerror))

    def take(self, give_up):
        """Whether we have what we want; waits until it is free, or `give_up()`."""
        share = min(1.0, self.count)
        while True:
            used = self._used()
            free = [each for each in self.devices if used.get(each, 0.0) + share <= 1.0 + 1e-6]
            # Parts go where there are parts already, so that whole ones stay free.
            free.sort(key=lambda each: -used.get(each, 0.0))
            chosen = free[: int(max(1, self.count))]
            if len(chosen) >= self.count:
                self.claim["gpus"] = dict.fromkeys(chosen, share)
                self._write()
                used = self._used()
                if all(used.get(each, 0.0) + share <= 1.0 + 1e-6 for each in chosen):
                    return True
                self.drop()
            if give_up():
                return False
            time.sleep(LOOK_S * random.random())

    def note(self, groups):
        """Processes of ours that hold it too: they may outlive us if we are killed."""
        self.claim["groups"] = groups
        self._write()

    def variables(self):
        names = ",".join(each for each in self.devices if each in self.claim["gpus"])
        return {"CUDA_VISIBLE_DEVICES": names, "NVIDIA_VISIBLE_DEVICES": names}

    def drop(self):
        try:
            os.unlink(self.path)
        except OSError:
            pass

    def _write(self):
        temporary = os.path.join(self.folder, "new." + os.path.basename(self.path))
        with io.open(temporary, "w", encoding="utf-8") as opened:
            opened.write(json.dumps(self.claim, sort_keys=True))
        os.chmod(temporary, 0o644)
        os.rename(temporary, self.path)

    def _used(self):
        """GPU → how much of it others have."""
        used: Dict[str, float] = {}
        for name in list_names(self.folder):
            path = os.path.join(self.folder, name)
            if not name.startswith("claim.") or path == self.path:
                continue
            try:
                claim = read_json(path)
            except (IOError, OSError, ValueError):
                continue  # given back since we listed it
            if is_alive(claim) or any(is_group_alive(group) for group in claim["groups"]):
                for each, share in claim["gpus"].items():
                    used[each] = used.get(each, 0.0) + share
            else:
                try:
                    os.unlink(path)
                except OSError:
                    pass  # another user's
        return used


def take_gpus(order, give_up):
    """What the order wants of this machine's GPUs: None if it wants none, False if `give_up()` came true first."""
    wanted = order.get("gpus")
    if not wanted:
        return None
    devices = wanted.get("devices")
    if devices is None:
        devices = _gpus() or find_gpus()
    if len(devices) < wanted["count"]:
        raise SetupFailed(
            "%g GPUs are wanted and %s has %s" % (wanted["count"], socket.gethostname(), len(devices) or "none")
        )
    share = GpuShare(wanted, devices)
    return share if share.take(give_up) else False


def find_gpus():
    words = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
    except OSError:
        return []
    return child.communicate()[0].decode("ascii", "replace").split()


def check_gpus(wanted):
    """Variables that correct those that name our GPUs, where the GPUs that a backend gave us are there and free.

    Raises `SetupFailed` where one cannot be seen, and `NoCapacity` where less than our part of its memory is free:
    others may use a GPU without a word to whoever shares it out.
    """
    if not wanted:
        return {}
    until = time.time() + GPU_PATIENCE_S
    while True:
        try:
            return _check_gpus(wanted["count"], wanted["share"])
        except NoCapacity:
            if time.time() >= until:
                raise
        time.sleep(1.0)


def _check_gpus(count, share):
    there = _query_gpus()
    if there is None:
        if any(name.startswith("nvidia") for name in list_names("/dev")):
            return {}
        raise SetupFailed("no GPU is visible: there is no nvidia-smi, and /dev has no nvidia0")
    named = _gpus()
    mine = [each for each in there if not named or each["index"] in named or each["uuid"] in named]
    variables = {}
    if len(mine) < count and len(there) == count:
        # The container runtime shows ours only, and counts them anew from 0.
        mine = there
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(each["index"] for each in mine)
    if len(mine) < count:
        seen = ", ".join(each["index"] for each in there) or "none"
        raise SetupFailed(
            "%d GPUs were given (%s), and those visible are: %s" % (count, ",".join(named) or "any", seen)
        )
    for each in mine:
        # A driver keeps some for itself, and neighbours are not exact.
        if each["free"] is not None and each["free"] < 0.8 * share * each["total"]:
            text = "GPU %s has %d of %d MiB free, and this run's part of it is %d: somebody else uses it"
            raise NoCapacity(text % (each["index"], each["free"], each["total"], share * each["total"]))
    return variables


def _query_gpus():
    """Every GPU that can be seen, by nvidia-smi; None where there is no such program."""
    words = ["nvidia-smi", "--query-gpu=index,uuid,memory.free,memory.total", "--format=csv,noheader,nounits"]
    try:
        child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
    except OSError:
        return None
    found = []
    for line in child.communicate()[0].decode("ascii", "replace").splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 4:
            numbers = [int(part) if part.isdigit() else None for part in parts[2:]]
            free, total = numbers if None not in numbers else (None, None)
            found.append({"index": parts[0], "uuid": parts[1], "free": free, "total": total})
    return found


def rank_number():
    """Which of the ranks this is, as the backend's starter says."""
    for name in ("SLURM_PROCID", "PMI_RANK", "OMPI_COMM_WORLD_RANK"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    raise Refused("nothing says which rank this is")


def serve_rank(order, folder, options, asked):
    """One rank of an attempt whose ranks a starter of the backend runs; returns an exit code."""
    leader = os.environ.get("RUNTIME_LEADER") or "127.0.0.1"
    scratch = tempfile.mkdtemp(prefix=scratch_prefix(order["job"], options.index), dir=options.scratch)
    try:
        run = Run(FolderRecord(folder), options.index)
        return Attempt(order, run, options.rank_of, scratch, asked, {}).run_rank(rank_number(), leader)
    finally:
        _remove(scratch)


# one index, attempt after attempt


def serve(order, record, index, options, asked, binding):
    """Run one index until it has a result or the backend has to start us again; returns an exit code."""
    run = Run(record, index, order.get("told"))
    run.log_bytes = order.get("log_bytes", LOG_BYTES)

    def give_up():
        """What a full disk refuses now is told by the cancel mark, or by whoever asked us to stop."""
        return asked.stop or run.cancelled()

    try:
        return _serve(order, run, options, asked, binding, give_up)
    except (IOError, OSError) as problem:
        if not give_up():
            raise
        say("leaves no word of how index %d ended: %s" % (index, problem))
        return FAILED if run.cancelled() else AGAIN


def _serve(order, run, options, asked, binding, give_up):
    while True:
        result = run.result()
        if result:
            run.tell(result)
            run.announce(result)  # its maker may have died before it could
            return settle(order, run, result)
        if run.cancelled():
            return settle(order, run, run.commit("cancelled", 1, 0, {}, give_up))
        run.clear()
        before = run.counted(order)
        if before and _is_final(order, before):
            what, reason = decide(before, order["retry"])
            return settle(order, run, run.commit(reason, 1, run.attempts()[-1][0], before[-1] or {}, give_up))
        if run.halted():
            last = run.attempts()[-1][0] if before else 0
            said = {"message": "another index failed"}
            return settle(order, run, run.commit("sibling_failed", 1, last, said, give_up))
        gpus, problem = None, None
        try:
            gpus = take_gpus(order, lambda: asked.stop or run.cancelled())
        except SetupFailed as found:
            problem = found
        if gpus is False:
            if asked.stop:
                return AGAIN
            continue
        scratch = name_scratch(order["job"], run.index, options)
        number = run.claim(options.native, scratch)
        fault("claimed")
        if problem:
            reason, code, details = "setup_failed", 1, {"message": str(problem)}
        else:
            reason, code, details = attempt_once(order, run, number, scratch, asked, binding, gpus)
        fault("ended")
        if reason != "succeeded" and run.cancelled():
            reason, code, details = "cancelled", 1, {}  # whatever stopped the command before we saw the mark
        if reason == "succeeded":
            return settle(order, run, run.commit(reason, code, number, details))
        if reason == "cancelled":
            return settle(order, run, run.commit(reason, code, number, details, give_up))
        named = "app_failed" if reason == "final_failure" else reason
        run.end(number, named, code, details, give_up)
        fault("noted")
        if named == "stopped" and asked.stop and pod_failures() is not None:
            return AGAIN  # the next start is told whether the backend took the machine away, and decides
        if reason == "final_failure":
            return settle(order, run, run.commit(named, code, number, details, give_up))
        what, then = decide(run.counted(order, number), order["retry"])
        if what == "final":
            return settle(order, run, run.commit(then, code, number, details, give_up))
        if asked.stop:
            return AGAIN
        again = next_start(order, options, then, asked, run)
        if again is not None:
            return again


def scratch_prefix(job, index):
    return "job-%s-%s-" % (job[:10], index)


def name_scratch(job, index, options):
    """A folder of this machine that nobody has yet. It is written down before it is made, for a shim may be killed."""
    parent = os.path.abspath(options.scratch or tempfile.gettempdir())
    return os.path.join(parent, scratch_prefix(job, index) + token())


def attempt_once(order, run, number, scratch, asked, binding, gpus):
    """Returns (reason, exit code, details) of one attempt; what it needed of the machine is given back."""
    os.mkdir(scratch, 0o700)
    try:
        if gpus:
            binding = dict(binding, **gpus.variables())
        if not run.record.before(run, number, asked):
            return "stopped", 143, {"message": "asked to stop by %s" % asked.why}
        try:
            return Attempt(order, run, number, scratch, asked, binding, gpus).go()
        finally:
            run.record.after(run, number)
    finally:
        _remove(scratch)
        if gpus:
            gpus.drop()


def settle(order, run, result):
    """The exit code of an index with this result. The first that failed of an array may stop the others."""
    stops = order.get("on_task_failure") == "stop"
    if stops and result["reason"] not in ("succeeded", "cancelled", "sibling_failed"):
        run.halt()
    if order.get("fold") and len(order["runs"]) > 1 and isinstance(run.record, FolderRecord):
        try:
            fold(run.job, run.name)
        except (IOError, OSError) as problem:
            say("cannot fold run %d: %s" % (run.index, problem))
    return _exit_code(result["reason"])


def _is_final(order, before):
    return decide(before, order["retry"])[0] == "final"


def _exit_code(reason):
    return DONE if reason == "succeeded" else FAILED


def next_start(order, options, pause, asked, run):
    """Have the job started again after a pause: by the backend (then an exit code), or here (then None)."""
    how = order["retries"]
    if how == "backend":
        return AGAIN
    if _stops_within(pause, asked, run.cancelled):
        return AGAIN
    if run.cancelled():
        return None
    if how == "requeue":
        words = [word.replace("{native}", options.member or options.native) for word in order["requeue"]]
        try:
            answer = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            said = answer.communicate()[0].decode("utf-8", "replace").strip()
        except OSError as problem:
            answer, said = None, str(problem)
        if answer is not None and answer.returncode == 0:
            return AGAIN
        # What requeues us may be ended by the very requeuing, a moment before we are.
        if _stops_within(KILLED_S if answer is not None and answer.returncode < 0 else 1.0, asked):
            return AGAIN
        say("cannot be requeued, goes on here: %s" % said)
    return None


def _stops_within(seconds, asked, give_up=lambda: False):
    """Wait for `seconds`, or until we are asked to stop or `give_up()`. Whether we were asked."""
    until = time.time() + seconds
    while time.time() < until and not asked.stop and not give_up():
        time.sleep(min(LOOK_S, max(0.0, until - time.time())))
    return asked.stop


# many indices on one machine


def pack(order, record, indices, options, asked):
    """Fill this machine's slots with the runs of `indices`, each with CPUs and GPUs of its own; returns an exit code."""
    cpus, limits = _cpus(), order.get("limits") or {}
    wanted = order["pack"]["slots"] or min(len(cpus), len(indices))
    slots = share_out(min(wanted, room(limits, len(cpus))), order["pack"].get("per", "node"), cpus, _gpus())
    if limits.get("cpus"):
        slots = [(mine[: math.ceil(limits["cpus"])], own) for mine, own in slots]
    waiting, codes = list(indices), []
    running: Dict[int, Any] = {}
    pause = SOON_S
    tempfile.gettempdir()  # found out by writing to it, once for all copies
    while waiting or running:
        for slot in range(len(slots)):
            if slot in running and running[slot].poll() is not None:
                codes.append(running.pop(slot).returncode)
                if codes[-1] < 0:
                    end_orphans()  # it was killed, and what it ran fell to us
                pause = SOON_S
            if slot not in running and waiting and not asked.stop:
                if order["pack"].get("step"):
                    running[slot] = Step(order["pack"]["step"], record.folder, waiting.pop(0), options)
                else:
                    running[slot] = Branch(order, record, waiting.pop(0), slots[slot], options)
        for name in asked.take():
            for branch in running.values():
                branch.signal(name)
        if asked.stop:
            for branch in running.values():
                branch.signal(signal.SIGTERM)
            codes += [branch.wait() for branch in running.values()]
            return AGAIN
        reap_orphans()
        time.sleep(pause)
        pause = min(LOOK_S / 4, pause * 1.5)
    return worst(codes)


class Branch(object):
    """A copy of this process that serves one index of a packed machine.

    Copied and not started anew, because a new Python with all that this file imports costs many times what the rest of
    a short run does. This process has one thread and holds nothing open that a copy could disturb.
    """

    def __init__(self, order, record, index, share, options):
        self.returncode = None
        sys.stderr.flush()
        # A signal that comes before the copy has handlers of its own waits, rather than being noted in ours.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)
        try:
            self.pid = os.fork()
            if self.pid == 0:
                self._serve(order, record, index, share, options, blocked)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        KNOWN.add(self.pid)

    def poll(self):
        """The exit code, None while it runs."""
        return self._reap(os.WNOHANG)

    def wait(self):
        return self._reap(0)

    def signal(self, number):
        _kill(self.pid, number)

    def _reap(self, how):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, how)
            if pid:
                KNOWN.discard(pid)
                self.returncode = os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status)
        return self.returncode

    def _serve(self, order, record, index, share, options, unblocked):
        global _OOM_BEFORE
        code = FAILED
        try:
            os.setsid()
            KNOWN.clear()
            adopt_orphans()
            asked = Asked()
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
            random.seed()
            _OOM_BEFORE = _oom_kills()
            code = serve(order, record, index, options, asked, bind(*share))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)


class Step(object):
    """A shim of one index of a packed machine that a command of the backend starts, with what it keeps the run to."""

    def __init__(self, starter, folder, index, options):
        self.run = Run(FolderRecord(folder), index)
        self.before = len(self.run.attempts())
        words = list(starter) + [sys.executable, os.path.abspath(__file__), folder, "--native", options.native]
        words += ["--index", str(index)] + (["--part", str(options.part)] if options.part is not None else [])
        words += ["--scratch", options.scratch] if options.scratch else []
        self.child = subprocess.Popen(words, stdin=subprocess.DEVNULL)

    @property
    def returncode(self):
        return self.child.returncode

    def poll(self):
        return self.child.poll()

    def wait(self):
        return self.child.wait()

    def signal(self, number):
        """To its shim alone: the starter would pass it on to every process of the run, or end them at once."""
        for attempt, _ in self.run.attempts()[self.before :]:
            start = self.run.started(attempt)
            if start and is_alive(start):
                _kill(start["pid"], number)
                return
        if number == signal.SIGTERM:
            _kill(self.child.pid, number)  # nothing of it has begun


def worst(codes):
    """One exit code for many runs."""
    for code in (AGAIN, REFUSED, DUPLICATE):
        if code in codes:
            return code
    return FAILED if any(codes) else DONE


def share_out(slots, per, cpus, gpus):
    """What each slot may use: its CPUs, and its GPU or GPUs, as evenly as they go."""
    count = slots * max(1, len(gpus)) if per == "gpu" else slots
    shares = []
    for slot in range(count):
        mine = [cpu for place, cpu in enumerate(cpus) if place % count == slot] or [cpus[slot % len(cpus)]]
        if per == "gpu":
            own = [gpus[slot // slots]] if gpus else []
        elif len(gpus) >= count:
            own = [gpu for place, gpu in enumerate(gpus) if place % count == slot]
        else:
            own = [gpus[slot % len(gpus)]] if gpus else []
        shares.append((mine, own))
    return shares


def room(limits, cpus):
    """How many runs with these limits the machine has CPUs and memory for, at least one."""
    found = [cpus / limits["cpus"]] if limits.get("cpus") else []
    if limits.get("memory_bytes"):
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / limits["memory_bytes"])
    return max(1, int(min(found))) if found else sys.maxsize


def keep_to_cpus(count):
    """Keep this process and what it starts to so many CPUs, those that have least to do now."""
    cpus = _cpus()
    if count >= len(cpus):
        return
    before = _idle_time()
    time.sleep(LOOK_S / 2)
    after = _idle_time()
    idlest = sorted(cpus, key=lambda cpu: before.get(cpu, 0) - after.get(cpu, 0))
    try:
        os.sched_setaffinity(0, idlest[:count])
    except (AttributeError, OSError):
        pass


def _idle_time():
    try:
        with io.open("/proc/stat") as opened:
            lines = [line.split() for line in opened if line.startswith("cpu") and line[3].isdigit()]
    except (IOError, OSError):
        return {}
    return {int(words[0][3:]): int(words[4]) for words in lines}


def _cpus():
    try:
        return sorted(os.sched_getaffinity(0))
    except AttributeError:
        return list(range(os.cpu_count() or 1))


def _gpus():
    for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS"):
        value = os.environ.get(name, "")
        if value and value not in ("all", "none", "void", "NoDevFiles"):
            return value.split(",")
    return []


def bind(cpus, gpus):
    """Keep this run to its CPUs, and return the variables that keep it to its GPUs."""
    try:
        os.sched_setaffinity(0, cpus)
    except (AttributeError, OSError):
        pass
    # Both, for frameworks look at one and container runtimes at the other.
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus), "NVIDIA_VISIBLE_DEVICES": ",".join(gpus) or "void"}


# the command


def load_order(folder):
    try:
        order = read_json(os.path.join(folder, "order.json"))
    except (IOError, OSError) as problem:
        raise Refused("cannot read the order in %s: %s" % (folder, problem.strerror))
    except ValueError as problem:
        raise Refused("the order in %s is no JSON: %s" % (folder, problem))
    if order.get("schema") != SCHEMA:
        raise Refused("the order has schema %s, this shim follows %d" % (order.get("schema"), SCHEMA))
    return order


def parse_index(text):
    return sum(int(number) for number in text.split("+"))


def parse_indices(text):
    found: List[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def forget_secrets(order, folder):
    """Remove the files of secrets once every index has its result; who was last does it."""
    if not order.get("secrets"):
        return
    job = os.path.basename(folder)
    names = list_names(os.path.join(os.path.dirname(os.path.dirname(folder)), "done"))
    ended = {name.split(".")[1] for name in names if name.startswith(job + ".") and name.count(".") == 4}
    if ended.issuperset(order["runs"]):
        shutil.rmtree(os.path.join(folder, "secrets"), ignore_errors=True)


def say(text):
    try:
        sys.stderr.write("shim: %s\n" % text)
        sys.stderr.flush()
    except (IOError, OSError):
        pass  # its file may lie on the very disk that is full


def fault(point):
    """Die here if a test asked for it."""
    if os.environ.get("RUNTIME_SHIM_FAULT") == point:
        os.kill(os.getpid(), signal.SIGKILL)


def main(words):
    parser = argparse.ArgumentParser(description="Runs a job by the order in its folder.")
    parser.add_argument("folder", help="the job's run folder")
    parser.add_argument("--native", default="local", help="the backend's own id of this job")
    parser.add_argument("--member", help="its id of this array member, where that differs")
    parser.add_argument("--part", type=int, help="which part of the job this native job is, where there are several")
    parser.add_argument(
        "--index", type=parse_index, help="run this index; a sum such as 8+3 where the backend counts from 0"
    )
    parser.add_argument("--indices", type=parse_indices, help="run these, such as 0-7,9, in turn or packed")
    parser.add_argument("--bucket", help="the record root, gs://… or s3://…; FOLDER is then this machine's own")
    parser.add_argument("--scratch", help="folder on this machine for trees; the system's temporary one by default")
    parser.add_argument("--prepare", action="store_true", help="make the job's environment and run nothing")
    parser.add_argument("--clear", action="store_true", help="end what killed shims of the job left running here")
    parser.add_argument(
        "--fold", nargs="+", metavar="JOB", help="put what has ended into few files; FOLDER is the root"
    )
    parser.add_argument("--unfold", nargs="+", metavar="INDEX", help="the other way round, for a job that goes on")
    parser.add_argument("--rank-of", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    folder = os.path.abspath(options.folder)
    os.environ["RUNTIME_SHIM_BEGAN"] = repr(BEGAN)
    if options.fold:
        return fold_all(folder, options.fold)
    if options.unfold:
        for start in [""] + ["runs/" + index for index in options.unfold]:
            unfold(folder, start)
        return DONE
    asked = Asked()
    adopt_orphans()
    if options.scratch:
        make_folder(options.scratch)
    if options.bucket:
        sys.modules["shim"] = sys.modules[__name__]
        import shim_bucket  # beside this file, and only where it is needed: it loads much

        return shim_bucket.run(options, folder, lambda record: follow(record, options, asked))
    return follow(FolderRecord(folder), options, asked)


def fold_all(root, jobs):
    """Fold jobs that have ended; prints the ids of those that were not folded before."""
    for name in jobs:
        job = os.path.join(root, "jobs", name)
        try:
            if os.path.exists(os.path.join(job, "intent.json")) and not _is_being_launched(job):
                fold_job(job, load_order(job))
                sys.stdout.write(name + "\n")
        except (Refused, IOError, OSError, ValueError) as problem:
            say("cannot fold %s: %s" % (name, problem))
    return DONE


def follow(record, options, asked):
    """Do what the order in the record's folder says; returns an exit code."""
    folder = record.folder
    if options.clear and read_header(_folded(folder, ""))[0]:
        return DONE  # it has ended, and its shims left nothing
    try:
        if options.clear:
            for name in list_names(os.path.join(folder, "runs")):
                Run(record, name).clear()
            return DONE
        order = load_order(folder)
        if options.prepare:
            return prepare(order, folder, options)
        if options.rank_of:
            return serve_rank(order, folder, options, asked)
        part = order.get("part", 0) if options.part is None else options.part
        claim_job(record, order.get("epoch", 1), part, options.native)
    except Refused as problem:
        say(str(problem))
        return REFUSED
    except (IOError, OSError) as problem:
        say("cannot begin: %s" % problem)
        return REFUSED
    except Taken as owner:
        say("this is a twin: the job is served by %s" % owner)
        return DUPLICATE
    indices = [options.index] if options.index is not None else options.indices or [0]
    unknown = [index for index in indices if str(index) not in order["runs"]]
    if unknown:
        say("the order has no index %d" % unknown[0])
        return REFUSED
    if order.get("pack") and options.index is None:
        code = pack(order, record, indices, options, asked)
        forget_secrets(order, folder)
        close_job(order, record)
        return code
    if (order.get("limits") or {}).get("cpus"):
        keep_to_cpus(math.ceil(order["limits"]["cpus"]))
    codes = []
    for index in indices:
        codes.append(serve(order, record, index, options, asked, {}))
        if asked.stop:
            break
    forget_secrets(order, folder)
    close_job(order, record)
    code = worst(codes)
    return LOST if code == AGAIN and asked.stop and order.get("retries") == "backend" else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
