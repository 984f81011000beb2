"""The shim's record where its root is a bucket.

Meanwhile the files of a command lie on this machine: a thread sends its log in numbered chunks and its checkpoints once
they stand still; its outputs follow at the end of the attempt, before the record says how the attempt ended.
"""

import io
import os
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor

from runtime.shim.bucket import Bucket, Stopped
from runtime.shim.checkpoints import Checkpoints, as_text
from runtime.shim.cloud import Denied, Unreachable
from runtime.shim.files import list_names, make_folder, token
from runtime.shim.fold import SNAPSHOT
from runtime.shim.logs import split_log
from runtime.shim.words import LOST, REFUSED, Taken, say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Dict, Optional, Tuple

MARK_S = 5.0
"""How old the last look for a cancel mark may be."""
FIRST_LOOK_S = 1.0
LAST_LOOK_S = 30.0
"""How often a log is sent, at first and after a long time."""
CHUNK_BYTES = 8 << 20
AT_ONCE = 4
"""How many files are in memory at once."""


def run(options, folder, follow):
    """Call `follow` with the record of the job whose own folder on this machine is `folder`; returns an exit code."""
    try:
        record = BucketRecord(Bucket(options.bucket), folder)
        record.bring("order.json")
    except (Denied, ValueError, IOError, OSError) as problem:
        say("the record root %s cannot be used: %s" % (options.bucket, problem))
        return REFUSED
    except Unreachable as problem:
        say("the record root %s does not answer: %s" % (options.bucket, problem))
        return LOST
    try:
        return follow(record)
    except Unreachable as problem:
        # Whatever was begun has no end that anybody could read, so it counts as lost and is tried again.
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
        """Name → whether it was there, and when that was seen."""

    def key(self, name):
        return "jobs/%s/%s" % (self.job, name)

    def bring(self, name, give_up=None):
        """Copy a file here, once. One that is not there stays away."""
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
            raise Taken(name)

    def mark(self, name):
        self.bucket.create(self.key(name), b"")

    def begin(self, name, text):
        self.create(name + "/start.json", text)
        make_folder(os.path.join(self.folder, name))

    def has(self, name):
        """Whether there is such an object. A cancel mark is asked for often, so the answer may be some seconds old."""
        if not name.startswith("cancel"):
            return self.bucket.get(self.key(name)) is not None
        known, at = self.marks.get(name, (False, 0.0))
        # While an attempt runs its carrier looks; the first look is ours, for there is nothing to remember yet.
        if not known and (at == 0.0 or (self.carrier is None and time.time() - at >= MARK_S)):
            self.look_for(name)
        return self.marks[name][0]

    def look_for(self, name, patience=None):
        self.marks[name] = (self.bucket.get(self.key(name), patience) is not None, time.time())

    def names(self, name):
        return self.bucket.names(self.key(name) + "/")

    def announce(self, name, give_up=None):
        self.bucket.create("done/" + name, b"")

    def beat(self, name, text):
        if self.carrier is not None:
            self.carrier.beats[name] = text
            self.carrier.wake.set()

    def own_folders(self):
        return [self.folder]

    def before(self, run, attempt, asked):
        def give_up():
            return asked.stop

        try:
            self.bring(SNAPSHOT, give_up)
            checkpoints = Checkpoints(self, run, attempt)
            checkpoints.restore(give_up)
        except Stopped:
            return False
        self.carrier = Carrier(self, run, attempt, checkpoints)
        return True

    def after(self, run, attempt):
        carrier, self.carrier = self.carrier, None
        if carrier is not None:
            carrier.finish()
        self.marks = {}  # what ended the attempt may have been one that nobody saw yet


class Carrier(object):
    """Sends what an attempt writes while it runs, and looks for marks, so that the shim waits for no network.

    Checkpoints have a thread of their own: a large one takes minutes, in which marks, logs and signs of life go on.
    """

    def __init__(self, record, run, attempt, checkpoints):
        self.record, self.checkpoints = record, checkpoints
        self.name = run.attempt_name(attempt)
        self.folder = run.attempt_folder(attempt)
        self.output = os.path.join(run.folder, "output", "a%04d" % attempt)
        self.beats: Dict[str, str] = {}
        """Small files that are written over all the time: name → what is to be sent."""
        self.began = time.time()
        self.sent = {}
        """Log → bytes that were sent, the number of the next chunk, and when the last one went."""
        self.ends = {}
        """Log that has outgrown its beginning → its size and time when its end was sent."""
        self.head = split_log(run.log_bytes)[0]
        self.wake, self.ended = threading.Event(), threading.Event()
        self.threads = [
            threading.Thread(target=self._go, args=(self._look, self.wake)),
            threading.Thread(target=self._go, args=(self._send_checkpoint, self.ended)),
        ]
        for thread in self.threads:
            thread.daemon = True
            thread.start()

    def _go(self, do, wake):
        said = None
        while not self.ended.is_set():
            try:
                do()
                said = None
            except Stopped:
                return
            except Exception as problem:
                # It is sent at the next look, or at the end.
                if str(problem) != said:
                    say("cannot send to the record root, tries again: %s" % problem)
                said = str(problem)
            wake.wait(max(FIRST_LOOK_S, min(MARK_S, self._pause())))
            if wake is self.wake:
                wake.clear()

    def _pause(self):
        """How long what was printed may wait, the longer the longer this runs."""
        return min(LAST_LOOK_S, (time.time() - self.began) / 20)

    def _send_checkpoint(self):
        self.checkpoints.send(self.ended.is_set)

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
                silent = last and number == 0  # an empty chunk says that nothing was printed
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
        """Send what follows the beginning, as one chunk, again whenever it has changed: a full log is written over."""
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
        # Put and not created: a chunk whose answer was lost is sent again, and nobody else writes here.
        self.record.bucket.put(key, chunk, patience=None if last else 0.0)

    def finish(self):
        """Send the rest. Raises `Unreachable` if that cannot be done."""
        self.ended.set()
        self.wake.set()
        for thread in self.threads:
            thread.join()
        with ThreadPoolExecutor(AT_ONCE) as pool:
            sending = [pool.submit(self.send_logs, True), pool.submit(self._send_last_checkpoint)]
            sending += [pool.submit(self._send_output, path) for path in list_files(self.output)]
            for each in sending:
                each.result()

    def _send_last_checkpoint(self):
        try:
            self.checkpoints.send()
        except (IOError, OSError) as problem:
            say("the last checkpoint is left out: %s" % problem)

    def _send_output(self, path):
        try:
            name = as_text(os.path.relpath(path, self.record.folder))
            self.record.bucket.upload(self.record.key(name), path)
        except (IOError, OSError, UnicodeError) as problem:
            # It went while the rest was sent, may not be read, or has a name that no bucket takes.
            say("an output is left out: %s: %s" % (ascii(path), problem))


def list_files(folder):
    for place, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(place, name)
            if os.path.isfile(path):
                yield path
