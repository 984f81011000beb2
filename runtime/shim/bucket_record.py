"""The shim's record in a bucket.

The files of a command lie on this machine. One thread sends its log in numbered chunks, another its checkpoints once they
no longer change; its outputs follow at the end of the attempt, before the record has that end.
"""

import errno
import fnmatch
import functools
import io
import json
import os
import re
import stat
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor

from runtime.shim.bucket import Bucket
from runtime.shim.cloud import BucketDenied, BucketUnreachable
from runtime.shim.common import LOST, REFUSED, AlreadyClaimed, TransferStopped, say
from runtime.shim.file_manifest import KEPT, as_text, hash_file, is_settled, restore_files, status_of
from runtime.shim.files import SNAPSHOT, drop_file, is_result, list_names, make_folder, token
from runtime.shim.logs import split_log
from runtime.shim.record import read_outcomes
from runtime.shim.tree import UnsafeName
from runtime.shim.tree_walk import remove_folder, walk

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, Optional, Tuple


class Checkpoints(object):
    """The checkpoint folder of an index, in a bucket: lists of files, and their bytes by content.

    A list is written once all its files are stored, so the newest list is a whole checkpoint. Its name begins with the
    attempt's number, so a list that a shim taken for dead still sends counts as older than its successor's.

    Node K of several has lists of its own, of the files that it did not get from node 0 in this state. It begins with the
    files of node 0 and its own ones, which replace those of the same names.
    """

    def __init__(self, record, run, attempt):
        self.record, self.run, self.attempt = record, run, attempt
        self.folder = os.path.join(run.folder, "checkpoint")
        self.stage = self.folder + ".sending"
        self.shared = "%s/checkpoint" % run.name
        self.place = "%s/node%d" % (self.shared, run.node) if run.node else self.shared
        self.given = {}
        """What node 0 gave to another node, as in `_scan`."""
        self.number = 0
        self.seen = None
        self.sent = None
        self.contents = {}
        """(name, its entry in `_scan`) → content id"""
        self.there = set()
        self.left_out = set()
        """Paths that were said to be in no list."""
        self.mine = []
        """Lists of this attempt in the bucket, as (name, content ids)."""

    def restore(self, give_up=None):
        """Download the newest whole checkpoint, of another node than 0 that of node 0 and its own."""
        own = self._lists(self.place)
        if self.place == self.shared:
            self._restore_newest(self.shared, own, give_up)
            return
        for name in own + [None]:
            self._restore_newest(self.shared, self._lists(self.shared), give_up)
            self.given, self.sent, self.contents, self.there = self._scan(), {}, {}, set()
            if name is None or self._restore_list(self.place, name, give_up):
                return

    def _lists(self, place):
        """The names of the lists, newest first."""
        return sorted([name for name in self.record.names(place) if _LIST.match(name)], reverse=True)

    def _restore_newest(self, place, lists, give_up):
        for name in lists:
            self._empty()
            if self._restore_list(place, name, give_up):
                return
        self._empty()

    def _restore_list(self, place, name, give_up):
        """Download the files of a list into the folder; returns whether all were there."""
        files = json.loads(self.record.read("%s/%s" % (place, name)) or "{}").get("files", {})
        try:
            whole = self._restore_all(place, files, give_up)
        except UnsafeName as problem:
            say("the checkpoint %s is refused: %s" % (name, problem))
            return False
        if not whole:
            say("a file of the checkpoint %s is gone; an earlier one is taken" % name)
            return False
        now = self._scan()
        self.sent = self.seen = {each: about for each, about in now.items() if about != self.given.get(each)}
        self.there = {about["sha256"] for about in files.values() if "sha256" in about}
        for each, about in files.items():
            if "sha256" in about:
                self.contents[each, now[each]] = about["sha256"]
        return True

    def _empty(self):
        """Remove files of an earlier attempt, perhaps newer than its last list, or of a newer list."""
        left = remove_folder(self.folder)
        if left is not None:
            raise left
        make_folder(self.folder)

    def _restore_all(self, place, files, give_up):
        """Whether every file of a list was downloaded. Raises `UnsafeName` for one that would lie elsewhere."""

        def fetch(content, path):
            return self.record.bucket.download(self._key(place, content), path, give_up)

        make_folder(self.stage)
        try:
            return restore_files(files, self.folder, self.stage, fetch)
        finally:
            remove_folder(self.stage)

    def _key(self, place, content):
        return self.record.key("%s/data/%s" % (place, content))

    def _scan(self):
        """Name → ("file", size, time, mode), ("link", target) or ("folder",)."""
        found: Dict[str, Tuple[Any, ...]] = {}
        for place, folders, names in walk(self.folder, self._leave_out):
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
                except (IOError, OSError) as problem:
                    self._leave_out(problem)
                except UnicodeError:
                    continue  # no bucket takes the name
        return found

    def _leave_out(self, problem):
        if problem.filename not in self.left_out:
            self.left_out.add(problem.filename)
            log_left_out("a checkpoint", problem)

    def send(self, give_up=None):
        """Send a new checkpoint. With `give_up`, while the command runs, only if it has not changed since the last look;
        raises `TransferStopped` once `give_up` comes true."""
        now = {name: about for name, about in self._scan().items() if about != self.given.get(name)}
        still, self.seen = now == self.seen, now
        if now == self.sent or not now or not (still or give_up is None):
            return
        make_folder(self.stage)
        try:
            files = self._send_all(now, give_up)
        finally:
            remove_folder(self.stage)
        if files is None:
            return  # it changed while it was sent
        name = "a%04d.%06d.json" % (self.attempt, self.number)
        text = json.dumps({"files": files, "at": time.time()}, sort_keys=True)
        self.record.write("%s/%s" % (self.place, name), text)
        self.number += 1
        self.sent = now
        self.mine.append((name, {about["sha256"] for about in files.values() if "sha256" in about}))
        try:
            self._drop_old()
        except BucketUnreachable as problem:
            say("an old checkpoint stays in the record root: %s" % problem)

    def _send_all(self, now, give_up):
        """Return the list's entry of each file, once its bytes are stored; None if a file changed while it was sent.

        All files get a second name first, so files that replace them during the minutes of a transfer do no harm.
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
                    self.record.bucket.upload(
                        self._key(self.place, content), staged[name], 0.0 if give_up else None, give_up
                    )
                status = os.stat(staged[name])
                if (status.st_size, status.st_mtime) != about[1:3]:
                    return None
                self.there.add(content)
                self.contents[name, about] = content
                files[name] = {"sha256": content, "size": about[1], "mode": about[3]}
        return files

    def _drop_old(self):
        """Remove older lists of this attempt, and files that they alone name; nothing once another attempt has begun."""
        if len(self.mine) <= KEPT or self.run.last_attempt() > self.attempt:
            return
        old, self.mine = self.mine[:-KEPT], self.mine[-KEPT:]
        used = set().union(*(contents for _, contents in self.mine))
        for name, contents in old:
            self.record.bucket.delete(self.record.key("%s/%s" % (self.place, name)))
            for content in contents - used:
                self.there.discard(content)
                self.record.bucket.delete(self._key(self.place, content))


_LIST = re.compile(r"a[0-9]{4,}\.[0-9]{6,}\.json$")


COMMON_S = 15.0
"""How long a file of the record root is tried that no job depends on."""
MARK_S = 5.0
"""How old the last look for a cancel mark may be."""
FIRST_LOOK_S = 1.0
LAST_LOOK_S = 30.0
"""How often a log is sent, at first and after a long time."""
CHUNK_BYTES = 8 << 20
KEY_BYTES = 1024
"""The longest name of an object that Google and Amazon take."""
AT_ONCE = 4
"""How many files are in memory at once."""


def run(options, folder, follow):
    """Call `follow` with the record of the job whose own folder on this machine is `folder`; returns an exit code."""
    try:
        record = BucketRecord(Bucket(options.bucket), folder)
        record.bring("order.json")
    except (BucketDenied, ValueError, IOError, OSError) as problem:
        say("the record root %s cannot be used: %s" % (options.bucket, problem))
        return REFUSED
    except BucketUnreachable as problem:
        say("the record root %s does not answer: %s" % (options.bucket, problem))
        return LOST
    try:
        return follow(record)
    except BucketUnreachable as problem:
        # The attempt has no end in the record, so it counts as lost and is tried again.
        say("the record root %s cannot be used any more: %s" % (options.bucket, problem))
        return LOST
    except Exception:
        traceback.print_exc()
        return LOST


class BucketRecord(object):
    """The record of a job as objects of a bucket, with the methods of `FolderRecord`.

    `folder` is the job's folder on this machine, empty at first.
    """

    folds = False

    def __init__(self, bucket, folder):
        self.bucket = bucket
        self.folder = folder
        self.job = os.path.basename(folder)
        self.carrier: Optional[Carrier] = None
        self.marks: Dict[str, Tuple[bool, float]] = {}
        """Name → whether it was there, and when we looked."""

    def key(self, name):
        return "jobs/%s/%s" % (self.job, name)

    def bring(self, name, give_up=None):
        """Copy a file here, once, if the bucket has it."""
        path = os.path.join(self.folder, name)
        if not os.path.exists(path):
            make_folder(os.path.dirname(path))
            temporary = "%s.%s" % (path, token())
            if self.bucket.download(self.key(name), temporary, give_up):
                os.rename(temporary, path)

    def read(self, name):
        found = self.bucket.get(self.key(name))
        return None if found is None else found.decode("utf-8")

    def write(self, name, text, give_up=None):
        self.bucket.put(self.key(name), text.encode("utf-8"))

    def create(self, name, text, give_up=None):
        if not self.bucket.create(self.key(name), text.encode("utf-8")):
            raise AlreadyClaimed(name)

    def mark(self, name):
        self.bucket.create(self.key(name), b"")

    def put_file(self, name, path, give_up=None):
        """Store a file of any size, which goes. Raises `TransferStopped` once `give_up` comes true."""
        self.bucket.upload(self.key(name), path, 0.0 if give_up else None, give_up)
        drop_file(path)

    def get_file(self, name, path, give_up=None):
        """Save a file of any size as `path`; False if there is none. Raises `TransferStopped` once `give_up` comes true."""
        return self.bucket.download(self.key(name), path, give_up)

    def remove(self, name):
        self.bucket.delete(self.key(name))

    def begin(self, name, text, give_up=None):
        self.create(name + "/start.json", text)
        make_folder(os.path.join(self.folder, name))

    def has(self, name):
        """Whether the bucket has an object. The answer for a cancel mark, which is asked for often, may be seconds old."""
        return self._sees(name) if name.startswith("cancel") else self.bucket.get(self.key(name)) is not None

    def begun(self, name):
        """Whether somebody has begun an attempt; the answer may be seconds old while one of ours runs."""
        return self._sees(name + "/start.json")

    def folded(self, name):
        return False

    def _sees(self, name):
        known, at = self.marks.get(name, (False, 0.0))
        # While an attempt runs its carrier looks; only the first look is ours.
        if not known and (at == 0.0 or (self.carrier is None and time.time() - at >= MARK_S)):
            self.look_for(name)
        return self.marks[name][0]

    def look_for(self, name, patience=None):
        self.marks[name] = (self.bucket.get(self.key(name), patience) is not None, time.time())

    def names(self, name):
        return self.bucket.names(self.key(name) + "/")

    def announce(self, name, give_up=None):
        self.bucket.create("done/" + name, b"")

    def outcomes(self):
        above = self.bucket.prefix + "done/"
        names = [key[len(above) :] for page in self.bucket.pages(above + self.job + ".") for key, _, _ in page]
        return read_outcomes(self.job, names)

    def create_common(self, name, text):
        if not self.bucket.create(name, text.encode("utf-8"), COMMON_S):
            raise AlreadyClaimed(name)

    def write_common(self, name, text):
        self.bucket.put(name, text.encode("utf-8"), COMMON_S)

    def drop_common(self, name):
        self.bucket.delete(name)

    def overwrite(self, name, text):
        self.bucket.put(self.key(name), text.encode("utf-8"), patience=0.0)

    def drop_open(self, name, indices):
        above = self.bucket.prefix + "done/%s." % self.job
        try:
            ended = {key[len(above) :].split(".")[0] for page in self.bucket.pages(above) for key, _, _ in page}
            if ended.issuperset(map(str, indices)):
                self.bucket.delete(name)
        except BucketUnreachable as problem:
            say("%s stays in the record root: %s" % (name, problem))

    def beat(self, name, text):
        if self.carrier is not None:
            self.carrier.beats[name] = text
            self.carrier.wake.set()

    def own_folders(self):
        return [self.folder]

    def before(self, run, attempt, asked):
        def give_up():
            return asked.stop or asked.goes

        try:
            self.bring(run.hold.archive if run.hold else SNAPSHOT, give_up)
            checkpoints = Checkpoints(self, run, attempt)
            checkpoints.restore(give_up)
        except TransferStopped:
            return False
        self.carrier = Carrier(self, run, attempt, checkpoints)
        return True

    def after(self, run, attempt):
        carrier, self.carrier = self.carrier, None
        if carrier is not None:
            carrier.finish()
        self.marks = {}  # a mark that was not seen yet may have ended the attempt
        if run.hold:
            drop_file(os.path.join(self.folder, run.hold.archive))  # trees follow one another


class Carrier(object):
    """Sends an attempt's files while it runs, and looks for marks, so that the shim waits for no network.

    Checkpoints have a thread of their own: a large one takes minutes, and marks, logs and signs of life go on meanwhile.
    """

    def __init__(self, record, run, attempt, checkpoints):
        self.record, self.checkpoints = record, checkpoints
        self.name = run.attempt_name(attempt)
        self.folder = run.attempt_folder(attempt)
        self.output = os.path.join(run.folder, "output", "a%04d" % attempt)
        self.beats: Dict[str, str] = {}
        """Small files that are written over all the time: name → text to send."""
        self.began = time.time()
        self.sent = {}
        """Log → bytes sent, the number of the next chunk, and the time of the last one."""
        self.ends = {}
        """Log that has outgrown its beginning → its size and time when its end was sent."""
        self.head = split_log(run.log_bytes)[0]
        self.sync = run.outputs or {}
        self.synced = {}
        """Output → its status when it was sent, of those that had stood still for a while."""
        self.wake, self.ended = threading.Event(), threading.Event()
        send = functools.partial(checkpoints.send, self.ended.is_set)
        self.threads = [
            threading.Thread(target=self._go, args=(self._look, self.wake)),
            threading.Thread(target=self._go, args=(send, self.ended)),
        ]
        if self.sync:
            args = (self._sync_outputs, self.ended, lambda: self.sync["every_s"])
            self.threads.append(threading.Thread(target=self._go, args=args))
        for thread in self.threads:
            thread.daemon = True
            thread.start()

    def _go(self, do, wake, pause=None):
        said = None
        while not self.ended.is_set():
            try:
                do()
                said = None
            except TransferStopped:
                return
            except Exception as problem:
                # The next look, or the end, sends it.
                if str(problem) != said:
                    say("cannot send to the record root, tries again: %s" % problem)
                said = str(problem)
            wake.wait(pause() if pause else max(FIRST_LOOK_S, min(MARK_S, self._pause())))
            if wake is self.wake:
                wake.clear()

    def _pause(self):
        """How long output may wait; it grows with the time that the attempt runs."""
        return min(LAST_LOOK_S, (time.time() - self.began) / 20)

    def _look(self):
        for name in [name for name, (known, _) in list(self.record.marks.items()) if not known]:
            self.record.look_for(name, patience=0.0)
        for name in list(self.beats):
            text = self.beats.pop(name)
            self.record.bucket.put(self.record.key(name), text.encode("utf-8"), patience=0.0)
        self.send_logs()

    def send_logs(self, last=False):
        for log in list_names(self.folder):
            if not log.endswith(".log"):
                continue
            path = os.path.join(self.folder, log)
            while True:
                offset, number, at = self.sent.get(log, (0, 0, 0.0))
                if offset >= self.head:
                    self._send_end(log, path, number, at, last)
                    break
                left = os.path.getsize(path) - offset
                silent = last and number == 0  # an empty chunk stands for an empty log
                if left <= 0 and not silent:
                    break
                if not (last or left >= CHUNK_BYTES or time.time() - at >= self._pause()):
                    break
                with io.open(path, "rb") as opened:
                    opened.seek(offset)
                    chunk = opened.read(min(CHUNK_BYTES, self.head - offset))
                self._send_chunk(log, number, chunk, last)
                self.sent[log] = (offset + len(chunk), number + 1, time.time())

    def _send_end(self, log, path, number, at, last):
        """Send the part after the beginning as one chunk, again after each change: a full log is written over."""
        status = os.stat(path)
        seen = (status.st_size, status.st_mtime_ns)
        if status.st_size <= self.head or seen == self.ends.get(log):
            return
        if not last and time.time() - at < self._pause():
            return
        with io.open(path, "rb") as opened:
            opened.seek(self.head)
            chunk = opened.read()
        self._send_chunk(log, number, chunk, last)
        self.ends[log] = seen
        self.sent[log] = (self.head, number, time.time())

    def _send_chunk(self, log, number, chunk, last):
        key = self.record.key("%s/%s.%05d.log" % (self.name, log[:-4], number))
        # Not created: a chunk whose answer was lost is sent again, and only this shim writes it.
        self.record.bucket.put(key, chunk, patience=None if last else 0.0)

    def finish(self):
        """Send the rest. Raises `BucketUnreachable` if that cannot be done."""
        self.ended.set()
        self.wake.set()
        for thread in self.threads:
            thread.join()
        with ThreadPoolExecutor(AT_ONCE) as pool:
            sending = [pool.submit(self.send_logs, True), pool.submit(self._send_last_checkpoint)]
            results = [os.path.join(self.folder, name) for name in list_names(self.folder) if is_result(name)]
            outputs = list_files(self.output, functools.partial(log_left_out, "an output"))
            sending += [pool.submit(self._send_output, path) for path in results + list(outputs)]
            for each in sending:
                each.result()

    def _send_last_checkpoint(self):
        try:
            self.checkpoints.send()
        except BucketUnreachable:
            raise
        except Exception as problem:
            say("the last checkpoint is left out: %s" % problem)

    def _sync_outputs(self):
        """Send outputs that have changed since they were sent, while the command runs. Raises `TransferStopped` at its end."""
        patterns = self.sync.get("include") or ["*"]
        for path in list_files(self.output):
            name = os.path.relpath(path, self.output)
            if any(fnmatch.fnmatchcase(name, each) for each in patterns):
                try:
                    self._send_changed(path, 0.0, self.ended.is_set)
                except (IOError, OSError, UnicodeError):
                    continue  # said at the end, if it is so still

    def _send_changed(self, path, patience=None, give_up=None):
        status = status_of(os.stat(path))
        if self.synced.get(path) == status:
            return
        name = as_text(os.path.relpath(path, self.record.folder))
        if len((self.record.bucket.prefix + self.record.key(name)).encode("utf-8")) > KEY_BYTES:
            raise OSError(errno.ENAMETOOLONG, "its name in the record root would have more than %d bytes" % KEY_BYTES)
        self.record.bucket.upload(self.record.key(name), path, patience, give_up)
        if is_settled(status):
            self.synced[path] = status

    def _send_output(self, path):
        try:
            self._send_changed(path)
        except (IOError, OSError, UnicodeError) as problem:
            # It was removed meanwhile, may not be read, or has a name that no bucket takes.
            say("an output is left out: %s: %s" % (_shorten(path), getattr(problem, "strerror", None) or problem))


def list_files(folder, refuse=None):
    """Yield the paths of regular files; `refuse` is called with the problems of files and folders that cannot be looked at."""
    for place, _, names in walk(folder, refuse):
        for name in names:
            path = os.path.join(place, name)
            try:
                if stat.S_ISREG(os.stat(path).st_mode):
                    yield path
            except OSError as problem:
                if refuse is not None:
                    refuse(problem)


def log_left_out(what, problem):
    """Name what cannot be looked at, unless it has been removed or is a link to nothing."""
    if problem.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
        say("%s is left out: %s: %s" % (what, _shorten(problem.filename), problem.strerror))


def _shorten(path):
    text = ascii(path)
    return text if len(text) <= 200 else "%s...%s" % (text[:100], text[-100:])
