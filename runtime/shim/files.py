"""Files that are seen whole or not at all, and a folder that takes nothing for a while."""

import errno
import io
import json
import os
import shutil
import time

from runtime.shim.words import LOOK_S, Taken, say

WRITE_PATIENCE_S = 900.0
"""How long a result waits for a full disk, and a read for a file server that does not answer."""
WRITE_AGAIN_S = 5.0
PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE)


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
    """Call `write` until the folder takes the file: a full disk that somebody clears costs time only."""
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


def write_whole(path, text, durable=True):
    """Write a file so that a reader sees none or all of it; an older one is replaced.

    A file that is not durable may be empty after a power failure, after which the boot id is another.
    """
    temporary = _write_beside(path, text, durable)
    os.rename(temporary, path)


def create_whole(path, text):
    """Write a whole file; raises `Taken` if it is there already. The first of any number of writers wins, on NFS too."""
    temporary = _write_beside(path, text)
    try:
        try:
            os.link(temporary, path)
        except OSError as problem:
            # An answer that was lost on the way looks like a refusal of our own link; the link count shows which.
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
    """Make a file whose name says all; an existing one stays."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    except OSError as problem:
        if problem.errno != errno.EEXIST:
            raise


def token():
    return os.urandom(4).hex()


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
    """Make a folder for all who may write to the folder above it."""
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


def remove_folder(folder):
    for place, _, _ in os.walk(folder):
        os.chmod(place, 0o700)
    shutil.rmtree(folder, ignore_errors=True)
