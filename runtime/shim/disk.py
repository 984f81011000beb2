"""How much this container has written to its own disk."""

import io
import os
import re
import tempfile
import time

from runtime.shim.words import BEGAN

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Set

DISK_S = 5.0
"""How often the container's own disk is looked at, and more rarely if a look takes long."""
OWN_DISK = "/"


def disk_limit():
    """How many bytes this container may write to its own disk; None where it has no limit of its own."""
    asked, limit = (os.environ.get(name, "") for name in ("RUNTIME_DISK_REQUEST", "RUNTIME_DISK_LIMIT"))
    # For a container without a limit, Kubernetes names all that the node has as its limit, and no request.
    return int(limit) if limit.isdigit() and asked.isdigit() and int(asked) else None


class DiskUse(object):
    """Bytes that this container has written to its own disk, counted a little at a time.

    Counted are files newer than this process in its file system, without what is mounted there, and all of `folders`. A folder whose names are as old as its image is listed and its files are not looked at; so what is
    appended to a file of the image itself stays unseen.
    """

    def __init__(self, limit, folders):
        self.limit = limit
        self.folders = [os.path.realpath(each) for each in folders]
        self.used = 0
        self.look, self.due = None, time.monotonic() + DISK_S

    def is_over(self, seconds, now=False):
        """Look for up to `seconds`; with `now` from the beginning, whenever the last look was."""
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
                # Not the time of its last change, which unpacking an archive sets back.
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
    """The entries of a folder, as far as they can be read."""
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
