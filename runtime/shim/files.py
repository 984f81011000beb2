"""Files seen whole or not at all, a folder that refuses files for a while, and a job that has ended, folded into few files.

Quotas of shared file systems count entries; folding keeps a job that has ended to a handful.
"""

import errno
import io
import json
import os
import re
import time

from runtime.shim.common import HOST, LOOK_S, AlreadyClaimed, say
from runtime.shim.tree_walk import walk

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict


WRITE_PATIENCE_S = 900.0
"""How long a write waits for a full disk, and a read for a file server that does not answer."""
WRITE_AGAIN_S = 5.0
PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE)


def read_json(path):
    return json.loads(read_text(path))


def read_system(path: str, errors: str = "replace") -> str:
    """The text of a file such as one of /proc; empty if it cannot be read."""
    try:
        with io.open(path, encoding="utf-8", errors=errors) as opened:
            return opened.read()
    except (IOError, OSError):
        return ""


def drop_file(path):
    """Remove a file, if it exists and is ours."""
    try:
        os.unlink(path)
    except OSError:
        pass


def read_text(path):
    with io.open(path, encoding="utf-8") as opened:
        return opened.read()


def _write_beside(path, content, durable=True, mode=None):
    temporary = "%s.%d.%s" % (path, os.getpid(), token())
    try:
        with io.open(temporary, "wb") as opened:
            if mode is not None:
                os.fchmod(opened.fileno(), mode)
            opened.write(content if isinstance(content, bytes) else content.encode("utf-8"))
            if durable:
                opened.flush()
                os.fsync(opened.fileno())
    except (IOError, OSError):
        drop_file(temporary)
        raise
    return temporary


def write_patiently(write, path, text, give_up=None):
    """Call `write` until the folder takes the file: a full disk that is cleared costs only time."""
    return patiently("write", path, lambda: write(path, text), give_up)


def patiently(verb, path, do, give_up=None):
    """Call `do` again while it fails in a way that may pass, such as a full disk or a file server that restarts.

    Raises the refusal once `give_up()` is true.
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


def write_whole(path, content, durable=True, mode=None):
    """Replace a file so that a reader sees all of it or the old one. A file that is not `durable` may be empty after a
    power failure, which changes the boot id."""
    os.rename(_write_beside(path, content, durable, mode), path)


def create_whole(path, content, mode=None):
    """Create a whole file; raises `AlreadyClaimed` if it exists. The first of any number of writers wins, on NFS too."""
    temporary = _write_beside(path, content, mode=mode)
    try:
        try:
            os.link(temporary, path)
        except OSError as problem:
            # If the answer to our own link was lost, a second try looks refused; the link count shows which it is.
            if problem.errno == errno.EEXIST and os.stat(temporary).st_nlink < 2:
                raise AlreadyClaimed(path)
            if problem.errno != errno.EEXIST:
                raise
    finally:
        os.unlink(temporary)


def leave_mark(path, spare):
    """Make an empty file as a mark. On a disk without room the mark becomes a second name of the file `spare`, which needs
    none. False if neither is possible."""
    try:
        create_empty(path, "")
    except (IOError, OSError):
        try:
            os.link(spare, path)
        except OSError as problem:
            return problem.errno == errno.EEXIST
    return True


def create_empty(path, _):
    """Make an empty file as a mark; an existing one stays."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    except OSError as problem:
        if problem.errno != errno.EEXIST:
            raise


def token():
    return os.urandom(4).hex()


def make_folder(path, within=None, mode=0o777):
    """Make a folder and its parents, but never the job's folder `within`: a record root that is away may come back."""
    if within is not None:
        check_folder(within)
    try:
        os.makedirs(path, mode)
    except OSError as problem:
        if problem.errno != errno.EEXIST:
            raise


def check_folder(job):
    """Raise an error that may pass if the job's folder is missing: nothing can be told of its files then."""
    if not os.path.isdir(job):
        raise OSError(errno.ESTALE, "the folder of the job is not there")


def make_common_folder(path, within=None):
    """Make a folder for all users who may write to the folder above it."""
    if not os.path.isdir(path):
        make_folder(path, within)
        try:
            os.chmod(path, os.stat(os.path.dirname(path)).st_mode & 0o7777)
        except OSError:
            pass  # another user was first


def list_names(path):
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []


SNAPSHOT = "snapshot.tar"
VALUE, METRICS, METRICS_SUM = "value", "metrics.jsonl", "metrics.json"
"""Files of an attempt: what its function returned or raised, the numbers that it reported, and their sum."""
OF_RANK = r"metrics\.rank[0-9]+\.jsonl"
"""Files with the numbers of other ranks than the first."""


def is_result(name):
    """Whether an attempt's file of this name is kept, however long it is."""
    return name in (VALUE, METRICS, METRICS_SUM) or re.fullmatch(OF_RANK, name) is not None


CONTAINERS = "containers.json"
"""File of an attempt's folder with the names of its containers, as long as they may exist."""
FOLDED = "ended"
"""File with the small files of a job's folder by name; `runs/INDEX.ended` has those of one run of an array."""
FOLD_BYTES = 1 << 16
"""Longer logs and results stay files of their own, `runs/INDEX.aATTEMPT.rankRANK.log`, as does the newest of the first rank."""
OF_COMMAND = ("output", "checkpoint", "artifacts")
"""Folders of a run with files of the command."""
OF_NO_USE = ("beat", "processes.json", "shim.py", "memory")
LOCK_DEAD_S = 86400.0
"""Age at which a launch lock counts as free, even if the clocks of two machines are far apart."""
LAUNCH_S = 10.0
"""How long a job that has ended waits for its launch to write down that it began."""


def fold(job, start=""):
    """Put the small files of a job's folder, or those below `start`, into one; files of the command stay.

    A result is never missing meanwhile, and the next call completes a fold that was cut off.
    """
    kept, beside = {}, []
    many = not start and len(list_runs(job)) > 1
    for place, folders, names in walk(os.path.join(job, start) if start else job):
        parts = [] if place == job else os.path.relpath(place, job).split(os.sep)
        folders[:] = [each for each in folders if not _is_apart(parts + [each], many)]
        for name in names:
            path, long = os.path.join(place, name), "/".join(parts + [name])
            if name in OF_NO_USE or long in (FOLDED, SNAPSHOT) or name.endswith("." + FOLDED):
                continue
            if not parts and name.startswith("lock."):
                continue
            size = os.path.getsize(path) if os.path.isfile(path) else 0
            long_enough = size > FOLD_BYTES or (size and name == "rank0.log" and _is_newest(place))
            if (name.endswith(".log") or is_result(name)) and long_enough:
                beside += [long] if len(parts) == 3 else []
            elif os.path.isfile(path) and not os.path.islink(path):
                with io.open(path, "rb") as opened:
                    kept[long] = opened.read()
    _write_folded(folded_path(job, start), kept, beside)
    there = read_header(folded_path(job, start))[0]
    for name in there:
        path = os.path.join(job, name)
        if there[name] is None:
            _move(path, _beside(job, name))
        elif name in kept and read_folded(job, name) == kept[name]:  # a file may have changed since an earlier fold
            os.unlink(path)
    _remove_empty(job, start, many)


def list_runs(job):
    """Indices with anything in the job's folder."""
    return sorted({name.partition(".")[0] for name in list_names(os.path.join(job, "runs"))})


def _is_newest(attempt):
    run, name = os.path.split(attempt)
    numbers = [int(each[1:]) for each in list_names(run) if each[:1] == "a" and each[1:].isdecimal()]
    return name[:1] == "a" and int(name[1:]) >= max(numbers)


def folded_path(job, start):
    return os.path.join(job, start + "." + FOLDED if start else FOLDED)


def _beside(job, name):
    runs, index, rest = name.split("/", 2)
    return os.path.join(job, runs, "%s.%s" % (index, rest.replace("/", ".")))


def _is_apart(parts, many):
    """Whether a folder is left alone: files of the command, secrets, trees of a held machine, and an array's runs, which are
    folded one by one."""
    if parts in (["secrets"], ["hold"], ["reuse"], ["runs"] if many else None):
        return True
    return len(parts) == 3 and parts[0] == "runs" and parts[2] in OF_COMMAND


def _write_folded(path, kept, beside):
    places: Dict[str, Any] = dict.fromkeys(beside)
    size = 0
    for name in sorted(kept):
        places[name] = [size, len(kept[name])]
        size += len(kept[name])
    header = json.dumps(places, sort_keys=True).encode("utf-8") + b"\n"
    try:
        create_whole(path, header + b"".join(kept[name] for name in sorted(kept)), mode=0o600)
    except AlreadyClaimed:
        pass  # another was first, or an earlier call was cut off


def read_header(path):
    """Name → offset and length in a folded file, None for a file beside it; and the offset of the first."""
    try:
        with io.open(path, "rb") as opened:
            line = opened.readline()
        places = json.loads(line.decode("utf-8"))
    except (IOError, OSError, ValueError):
        return {}, 0
    return (places, len(line)) if isinstance(places, dict) and all(map(_is_place, places.values())) else ({}, 0)


def _is_place(place):
    return place is None or (isinstance(place, list) and len(place) == 2 and all(type(each) is int for each in place))


def read_folded(job, name):
    """The bytes of a small file of a job or run that has been folded, None if there is none."""
    run = "/".join(name.split("/")[:2])
    for path in [folded_path(job, "")] + ([folded_path(job, run)] if name.startswith("runs/") else []):
        places, begin = read_header(path)
        if places.get(name):
            return _read_part(path, begin, places[name])
    return None


def _read_part(path, begin, place):
    with io.open(path, "rb") as opened:
        opened.seek(begin + place[0])
        return opened.read(place[1])


def unfold(job, start=""):
    """Restore the small files, for a job that goes on; of a run whose folded file is damaged, those that lie beside it."""
    path = folded_path(job, start)
    places, begin = read_header(path)
    for name in sorted(places):
        place = os.path.join(job, name)
        make_folder(os.path.dirname(place), within=job)
        if places[name] is None:
            _move(_beside(job, name), place)
        elif name.endswith("/result") or not os.path.exists(place):
            write_whole(place, _read_part(path, begin, places[name]), mode=0o600)
    if places:
        os.unlink(path)
    elif start and os.path.exists(path):
        for name, place in _list_beside(job, start):
            make_folder(os.path.dirname(place), within=job)
            _move(name, place)
        os.rename(path, path + ".damaged")


def _list_beside(job, start):
    """(path, where it was) of each file beside the folded file of a run."""
    runs, index = os.path.split(os.path.join(job, start))
    for name in list_names(runs):
        found = re.match(r"(a[0-9]+)\.(.+)", name[len(index) + 1 :]) if name.startswith(index + ".") else None
        if found:
            yield os.path.join(runs, name), os.path.join(runs, index, found.group(1), found.group(2))


def _move(path, to):
    try:
        os.rename(path, to)
    except OSError as problem:
        if problem.errno != errno.ENOENT:
            raise


def _remove_empty(job, start, many):
    """Remove files of no use and empty folders, but for those of the command."""
    found = []
    for place, folders, names in walk(os.path.join(job, start) if start else job):
        parts = [] if place == job else os.path.relpath(place, job).split(os.sep)
        found.append((place, parts, names))
        if len(parts) >= (4 if parts[2:3] == ["output"] else 3) or (many and parts == ["runs"]):
            folders.clear()
    for place, parts, names in reversed(found):
        if many and parts[:1] == ["runs"]:
            continue
        for name in names if len(parts) in (0, 3) and parts[2:3] not in [[each] for each in OF_COMMAND] else ():
            if name in OF_NO_USE:
                os.unlink(os.path.join(place, name))
        try:
            if parts:
                os.rmdir(place)
        except OSError:
            continue  # something is in it


def fold_job(job, order):
    """Fold a job whose runs all have their results, unless a launch, which would unfold it, is at work on it."""
    lock = None if os.path.isdir(os.path.join(job, "secrets")) else take_lock(job)
    if lock is None:
        return
    try:
        if len(list_runs(job)) > 1:
            runs = [name for name in list_names(os.path.join(job, "runs")) if name.isdecimal()]
            for count, index in enumerate(runs):
                if count % 50 == 0:
                    _write_lock(lock, os.O_TRUNC, count)  # launchers take over a lock that stands still
                fold(job, "runs/" + index)
        fold(job)
        content = (order.get("code") or {}).get("sha256")
        archive = os.path.join(job, SNAPSHOT)
        common = os.path.join(os.path.dirname(os.path.dirname(job)), "snapshots", "%s.tar" % content)
        if os.path.exists(archive) and os.path.exists(common) and os.path.samefile(archive, common):
            os.unlink(archive)
    finally:
        os.unlink(lock)


def close_job(order, record):
    """Fold the job once every run has its result. It only saves quota, so a problem here fails no job."""
    if not order.get("fold") or not record.folds:
        return
    try:
        names = set(list_names(os.path.join(record.folder, "runs")))
        if len(order["runs"]) == 1:
            ended = all(record.read("runs/%s/result" % index) for index in order["runs"])
        else:
            ended = all("%s.%s" % (index, FOLDED) in names for index in order["runs"])
        until = time.monotonic() + LAUNCH_S
        while ended and time.monotonic() < until and is_being_launched(record.folder):
            time.sleep(0.02)
        if ended:
            fold_job(record.folder, order)
    except Exception as problem:
        say("cannot fold the job: %s" % problem)


def is_being_launched(job):
    return any(_is_held(os.path.join(job, name)) for name in _list_locks(job))


def take_lock(job):
    """Take the launch lock of a job; returns the path of our file, None if another holds it."""
    if is_being_launched(job):
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
    return [name for name in list_names(job) if name.startswith("lock.") and name[5:].isdecimal()]


def _is_held(lock):
    """Whether a launcher or shim still holds a lock: it writes the lock every few seconds while it lives."""
    try:
        return time.time() - os.stat(lock).st_mtime < LOCK_DEAD_S
    except OSError:
        return False
