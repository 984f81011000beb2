"""The checkpoints of an index in a bucket: lists of files, and their bytes by content."""

import hashlib
import io
import json
import os
import re
import shutil
import stat
import time

from runtime.shim.cloud import Unreachable
from runtime.shim.files import make_folder
from runtime.shim.names import Below, NameRefused
from runtime.shim.words import say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, Tuple

KEPT = 2
"""How many checkpoints are kept."""


class Checkpoints(object):
    """The checkpoint folder of an index, in a bucket: lists of files, and their bytes by content.

    A list is written when all files that it names are there, so the newest list is a whole checkpoint. Its name begins
    with the attempt's number: what a shim taken for dead still sends counts as older than what its successor sends.
    """

    def __init__(self, record, run, attempt):
        self.record, self.run, self.attempt = record, run, attempt
        self.folder = os.path.join(run.folder, "checkpoint")
        self.stage = self.folder + ".sending"
        self.place = "%s/checkpoint" % run.name
        self.number = 0
        self.seen = None
        self.sent = None
        self.contents = {}
        """(name, what `_scan` says of it) → content id"""
        self.there = set()
        self.mine = []
        """Lists of this attempt that are there, as (name, content ids)."""

    def restore(self, give_up=None):
        """Bring the newest checkpoint that is whole."""
        make_folder(self.folder)
        lists = [name for name in self.record.names(self.place) if _LIST.match(name)]
        for name in sorted(lists, reverse=True):
            # Files here come from an earlier attempt, perhaps newer than its last list, or from a newer list.
            shutil.rmtree(self.folder)
            make_folder(self.folder)
            files = json.loads(self.record.read("%s/%s" % (self.place, name)) or "{}").get("files", {})
            try:
                whole = self._restore_all(files, give_up)
            except NameRefused as problem:
                say("the checkpoint %s is refused: %s" % (name, problem))
                continue
            if whole:
                self.sent = self.seen = self._scan()
                self.there = {about["sha256"] for about in files.values() if "sha256" in about}
                for each, about in files.items():
                    if "sha256" in about:
                        self.contents[each, self.sent[each]] = about["sha256"]
                return
            say("a file of the checkpoint %s is gone; an earlier one is taken" % name)
        shutil.rmtree(self.folder)
        make_folder(self.folder)

    def _restore_all(self, files, give_up):
        """Whether every file of a list could be had. Raises `NameRefused` for one that would lie elsewhere."""
        make_folder(self.stage)
        try:
            with Below(self.folder) as below:
                return all(self._restore(each, about, below, give_up) for each, about in sorted(files.items()))
        finally:
            shutil.rmtree(self.stage, ignore_errors=True)

    def _restore(self, name, about, below, give_up):
        name = os.fsdecode(name.encode("utf-8", "surrogatepass"))
        if "link" in about:
            below.link(name, about["link"])
        elif about.get("folder"):
            below.make(name)
        else:
            path = os.path.join(self.stage, "one")
            if not self.record.bucket.download(self._key(about["sha256"]), path, give_up):
                return False
            if hash_file(path) != about["sha256"]:
                return False
            os.chmod(path, about["mode"] & 0o777)
            folder, last = below.clear(name)
            os.rename(path, last, dst_dir_fd=folder)
        return True

    def _key(self, content):
        return self.record.key("%s/data/%s" % (self.place, content))

    def _scan(self):
        """Name → ("file", size, time, mode), ("link", target) or ("folder",)."""
        found: Dict[str, Tuple[Any, ...]] = {}
        for place, folders, names in os.walk(self.folder):
            for each in folders + names:
                path = os.path.join(place, each)
                try:
                    name, status = as_text(os.path.relpath(path, self.folder)), os.lstat(path)
                    if stat.S_ISLNK(status.st_mode):
                        found[name] = ("link", os.readlink(path))
                    elif stat.S_ISDIR(status.st_mode):
                        found[name] = ("folder",)
                    elif stat.S_ISREG(status.st_mode):
                        found[name] = ("file", status.st_size, status.st_mtime, status.st_mode & 0o777)
                except (IOError, OSError, UnicodeError):
                    continue  # it went meanwhile, or has a name that no bucket takes
        return found

    def send(self, give_up=None):
        """Send what is new. While the command runs, which is where there is a `give_up`, only what stands still since
        the last look; raises `Stopped` where that comes true."""
        now = self._scan()
        still, self.seen = now == self.seen, now
        if now == self.sent or not now or not (still or give_up is None):
            return
        make_folder(self.stage)
        try:
            files = self._send_all(now, give_up)
        finally:
            shutil.rmtree(self.stage, ignore_errors=True)
        if files is None:
            return  # it was written while it was sent
        name = "a%04d.%06d.json" % (self.attempt, self.number)
        text = json.dumps({"files": files, "at": time.time()}, sort_keys=True)
        self.record.write("%s/%s" % (self.place, name), text)
        self.number += 1
        self.sent = now
        self.mine.append((name, {about["sha256"] for about in files.values() if "sha256" in about}))
        try:
            self._drop_old()
        except Unreachable as problem:
            say("an old checkpoint stays in the record root: %s" % problem)

    def _send_all(self, now, give_up):
        """The list's entry of each file, once its bytes are there; None if a file changed while it was sent.

        All files get a second name first: what replaces them while this goes on for minutes does no harm.
        """
        staged = {}
        for number, (name, about) in enumerate(sorted(now.items())):
            if about[0] == "file" and self.contents.get((name, about)) not in self.there:
                path = os.path.join(self.folder, *[os.fsdecode(part.encode("utf-8")) for part in name.split("/")])
                staged[name] = os.path.join(self.stage, str(number))
                try:
                    os.link(path, staged[name])
                except (IOError, OSError):
                    staged[name] = path
        files = {}
        for name, about in now.items():
            if about[0] == "link":
                files[name] = {"link": about[1]}
            elif about[0] == "folder":
                files[name] = {"folder": True}
            elif name not in staged:
                files[name] = {"sha256": self.contents[name, about], "size": about[1], "mode": about[3]}
            else:
                content = hash_file(staged[name])
                if content not in self.there:
                    self.record.bucket.upload(self._key(content), staged[name], 0.0 if give_up else None, give_up)
                status = os.stat(staged[name])
                if (status.st_size, status.st_mtime) != about[1:3]:
                    return None
                self.there.add(content)
                self.contents[name, about] = content
                files[name] = {"sha256": content, "size": about[1], "mode": about[3]}
        return files

    def _drop_old(self):
        """Remove older lists of this attempt, and what they alone name; nothing once another attempt has begun."""
        if len(self.mine) <= KEPT or self.run.attempts()[-1][0] > self.attempt:
            return
        old, self.mine = self.mine[:-KEPT], self.mine[-KEPT:]
        used = set().union(*(contents for _, contents in self.mine))
        for name, contents in old:
            self.record.bucket.delete(self.record.key("%s/%s" % (self.place, name)))
            for content in contents - used:
                self.there.discard(content)
                self.record.bucket.delete(self._key(content))


_LIST = re.compile(r"a[0-9]{4,}\.[0-9]{6,}\.json$")


def as_text(path):
    """A relative path as a key has it, whatever encoding this process takes names for. Raises `UnicodeError`."""
    return os.fsencode(path).decode("utf-8").replace(os.sep, "/")


def hash_file(path):
    found = hashlib.sha256()
    with io.open(path, "rb") as opened:
        for piece in iter(lambda: opened.read(1 << 20), b""):
            found.update(piece)
    return found.hexdigest()
