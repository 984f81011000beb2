"""The shim's record root where it is a bucket: `gs://BUCKET/PREFIX` or `s3://BUCKET/PREFIX`.

Of the standard library, for the same Pythons as shim.py, and copied beside it where a bucket is used. What only one may
make is written under a precondition, so two shims on two machines agree as they do on a shared folder. What a command
writes lies on this machine meanwhile: a thread sends its log in numbered chunks, its checkpoints once they stand still,
and at the end of the attempt its outputs, before it is said how the attempt ended.

Both clouds speak the same protocol here, Google by its XML API. Credentials and endpoints come from the environment
variables and files that the clouds' own tools read, and from the machine.
"""

import base64
import calendar
import configparser
import email.utils
import errno
import hashlib
import hmac
import http.client
import io
import json
import os
import random
import re
import shutil
import socket
import stat
import subprocess
import threading
import time
import traceback
import urllib.error
import urllib.parse
import urllib.request
import xml.etree.ElementTree
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Dict, Iterator, List, Optional, Set, Tuple

if __name__.startswith("runtime."):  # read by the package, which lists buckets with it too
    from runtime.shim import shim
else:
    import shim  # type: ignore[no-redef]

PATIENCE_S = 900.0
"""How long a bucket that does not answer is asked again."""
ANSWER_S = 60.0
MARK_S = 5.0
"""How old what is known of a cancel mark may be."""
FIRST_LOOK_S = 1.0
LAST_LOOK_S = 30.0
"""So often a log is sent, at first and of what has run for long."""
CHUNK_BYTES = 8 << 20
PART_BYTES = 16 << 20
"""Of larger files, which go in several parts, of which S3 takes 10,000. So many of them are in memory at once:"""
AT_ONCE = 4
KEPT = 2
"""So many checkpoints are kept."""
MAY_PASS = (408, 409, 425, 429, 500, 502, 503, 504)
EXPIRED = ("ExpiredToken", "InvalidToken", "TokenRefreshRequired")
SKEWED = "RequestTimeTooSkewed"
CREDENTIALS_S = 60.0
"""How long whoever gives credentials may not answer, as where a machine has just begun."""
OWN = "RUNTIME_RECORDS_"
"""Variables that begin so are for the record root alone; commands do not see them."""
SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
FRESH_S = 300.0
"""Credentials are renewed so long before they end."""

Row = Tuple[str, Optional[int], str]
"""Whole key, size in bytes and time of an object; of a folder its size is None."""


class Unreachable(Exception):
    """The bucket did not answer in time; the text says what it said."""


class Denied(Unreachable):
    """It did answer, and no other time would change that."""


class Stopped(Exception):
    """What was sent or brought is not wanted any more."""


class NoCredentials(IOError):
    """Whoever gives them does not, now."""


class Answer(Exception):
    """A status that is no success, or an error in the body of one that is."""

    def __init__(self, status, body, date=None):
        try:
            root = xml.etree.ElementTree.fromstring(body)
            self.code, text = _text(root, "Code"), " ".join(_text(root, name) for name in ("Code", "Message"))
        except xml.etree.ElementTree.ParseError:
            self.code, text = "", body[:200].decode("utf-8", "replace")
        Exception.__init__(self, "%d %s" % (status, text.strip()))
        self.status = status
        self.date = date


def run(options, folder, follow):
    """Call `follow` with the record of the job whose own folder on this machine is `folder`; returns an exit code."""
    try:
        record = BucketRecord(Bucket(options.bucket), folder)
        record.bring("order.json")
    except (Denied, ValueError, IOError, OSError) as problem:
        shim.say("the record root %s cannot be used: %s" % (options.bucket, problem))
        return shim.REFUSED
    except Unreachable as problem:
        shim.say("the record root %s does not answer: %s" % (options.bucket, problem))
        return shim.LOST
    try:
        return follow(record)
    except Unreachable as problem:
        # Whatever was begun has no end that anybody could read, so it counts as lost and is tried again.
        shim.say("the record root %s cannot be used any more: %s" % (options.bucket, problem))
        return shim.LOST
    except Exception:
        traceback.print_exc()
        return shim.LOST


# the record


class BucketRecord(object):
    """What is known of a job, as objects of a bucket, with the methods of `shim.FolderRecord`.

    `folder` is the job's folder on this machine, empty at first.
    """

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
            shim.make_folder(os.path.dirname(path))
            temporary = "%s.%s" % (path, shim.token())
            if self.bucket.download(self.key(name), temporary, give_up):
                os.rename(temporary, path)

    def read(self, name):
        found = self.bucket.get(self.key(name))
        return None if found is None else found.decode("utf-8")

    def write(self, name, text, give_up=None):
        self.bucket.put(self.key(name), text.encode("utf-8"))

    def create(self, name, text, give_up=None):
        if not self.bucket.create(self.key(name), text.encode("utf-8")):
            raise shim.Taken(name)

    def mark(self, name):
        self.bucket.create(self.key(name), b"")

    def begin(self, name, text):
        self.create(name + "/start.json", text)
        shim.make_folder(os.path.join(self.folder, name))

    def has(self, name):
        """Of a mark that may come at any time what was known some seconds ago at the most: it is asked for often."""
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
            self.bring(shim.SNAPSHOT, give_up)
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
        """Log that has outgrown its beginning → what the system said of it when its end was sent."""
        self.head = shim.split_log(run.log_bytes)[0]
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
                    shim.say("cannot send to the record root, tries again: %s" % problem)
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
        for log in shim.list_names(self.folder):
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
        """What follows the beginning is one chunk that is sent again when it has changed: it is written over once the
        log is full."""
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
            shim.say("the last checkpoint is left out: %s" % problem)

    def _send_output(self, path):
        try:
            name = as_text(os.path.relpath(path, self.record.folder))
            self.record.bucket.upload(self.record.key(name), path)
        except (IOError, OSError, UnicodeError) as problem:
            # It went while the rest was sent, may not be read, or has a name that no bucket takes.
            shim.say("an output is left out: %s: %s" % (ascii(path), problem))


class Checkpoints(object):
    """The checkpoint folder of an index, in a bucket: lists of files, and their bytes by content.

    A list is written when all that it names is there, so whoever restores the newest one gets a whole checkpoint. Lists
    bear the number of their attempt first: what a shim still sends that was taken for dead is older than what its
    successor sends.
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
        shim.make_folder(self.folder)
        lists = [name for name in self.record.names(self.place) if _LIST.match(name)]
        for name in sorted(lists, reverse=True):
            # What lies here is of an earlier attempt, perhaps newer than what was said of it, or of a newer list.
            shutil.rmtree(self.folder)
            shim.make_folder(self.folder)
            files = json.loads(self.record.read("%s/%s" % (self.place, name)) or "{}").get("files", {})
            try:
                whole = self._restore_all(files, give_up)
            except shim.NameRefused as problem:
                shim.say("the checkpoint %s is refused: %s" % (name, problem))
                continue
            if whole:
                self.sent = self.seen = self._scan()
                self.there = {about["sha256"] for about in files.values() if "sha256" in about}
                for each, about in files.items():
                    if "sha256" in about:
                        self.contents[each, self.sent[each]] = about["sha256"]
                return
            shim.say("a file of the checkpoint %s is gone; an earlier one is taken" % name)
        shutil.rmtree(self.folder)
        shim.make_folder(self.folder)

    def _restore_all(self, files, give_up):
        """Whether every file of a list could be had. Raises `shim.NameRefused` for one that would lie elsewhere."""
        shim.make_folder(self.stage)
        try:
            with shim.Below(self.folder) as below:
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
        shim.make_folder(self.stage)
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
            shim.say("an old checkpoint stays in the record root: %s" % problem)

    def _send_all(self, now, give_up):
        """What the list says of each file, after its bytes are there; None if one changed while it was sent.

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


def list_files(folder):
    for place, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(place, name)
            if os.path.isfile(path):
                yield path


def as_text(path):
    """A relative path as a key has it, whatever encoding this process takes names for. Raises `UnicodeError`."""
    return os.fsencode(path).decode("utf-8").replace(os.sep, "/")


def hash_file(path):
    found = hashlib.sha256()
    with io.open(path, "rb") as opened:
        for piece in iter(lambda: opened.read(1 << 20), b""):
            found.update(piece)
    return found.hexdigest()


# a bucket


class Bucket(object):
    """Objects below one prefix. Every call may come from any thread, and raises `Unreachable`."""

    answer_s = ANSWER_S
    say: Callable[[str], None] = staticmethod(shim.say)

    def __init__(self, url: str) -> None:
        scheme, _, rest = url.partition("://")
        name, _, prefix = rest.partition("/")
        if scheme not in ("gs", "s3") or not name:
            raise ValueError("it is no gs://BUCKET/PREFIX or s3://BUCKET/PREFIX")
        self.cloud = Google() if scheme == "gs" else Amazon()
        self.name = name
        self.prefix = prefix.strip("/") + "/" if prefix.strip("/") else ""

    def get(self, key, patience=None):
        """The bytes, None while there is no such object."""
        try:
            return self._ask("GET", key, patience=patience)
        except Answer as answer:
            return self._none_of(answer, key)

    def download(self, key, path, give_up=None):
        """False while there is no such object. Raises `Stopped` where `give_up` comes true meanwhile."""
        try:
            self._ask("GET", key, into=path, give_up=give_up)
            return True
        except Answer as answer:
            return bool(self._none_of(answer, key))

    def put(self, key, data, patience=None):
        self._sure("PUT", key, data=data, patience=patience)

    def create(self, key, data):
        """False if it is there already, and is not what an answer was lost of."""
        try:
            self._ask("PUT", key, data=data, headers=self.cloud.if_absent)
            return True
        except Answer as answer:
            if answer.status != 412:
                raise Denied("%s: %s" % (key, answer))
        # What is equal to the last byte is our own: all that is created here bears a time, a token or no news.
        return bool(data) and self.get(key) == data

    def upload(self, key, path, patience=None, give_up=None):
        """As `put`, of a file of any size. Raises `Stopped` where `give_up` comes true meanwhile."""
        more = {"patience": patience, "give_up": give_up}
        size = os.path.getsize(path)
        if size <= PART_BYTES:
            with io.open(path, "rb") as opened:
                self._sure("PUT", key, data=opened.read(), **more)
            return
        begun = self._sure("POST", key, query={"uploads": ""}, data=b"", **more)
        upload = _text(xml.etree.ElementTree.fromstring(begun), "UploadId")
        part = max(PART_BYTES, -(-size // 10000))
        try:
            tags = []
            with io.open(path, "rb") as opened:
                for number in range(1, -(-size // part) + 1):
                    query = {"partNumber": str(number), "uploadId": upload}
                    tags.append(
                        (number, self._sure("PUT", key, query=query, data=opened.read(part), said="ETag", **more))
                    )
            rows = ["<Part><PartNumber>%d</PartNumber><ETag>%s</ETag></Part>" % each for each in tags]
            whole = "<CompleteMultipartUpload>%s</CompleteMultipartUpload>" % "".join(rows)
            self._complete(key, upload, whole.encode("ascii"), size, patience)
        except BaseException:
            self._abandon(key, upload)
            raise

    def _complete(self, key, upload, whole, size, patience):
        try:
            self._ask("POST", key, query={"uploadId": upload}, data=whole, patience=patience)
        except Answer as answer:
            # Of an answer that was lost the next one says that there is no such upload any more.
            there = self._ask("HEAD", key, said="Content-Length") if answer.code == "NoSuchUpload" else None
            if there is None or int(there) != size:
                raise Denied("%s: %s" % (key, answer))

    def _abandon(self, key, upload):
        try:
            self._ask("DELETE", key, query={"uploadId": upload}, patience=0.0)
        except (Unreachable, Answer):
            pass  # the bucket's own rule ends uploads that nobody completes

    def delete(self, key):
        try:
            self._ask("DELETE", key)
        except Answer as answer:
            self._none_of(answer, key)

    def names(self, folder):
        """Names of objects and folders in `folder`, which ends with a slash, sorted."""
        prefix = self.prefix + folder
        found = {key[len(prefix) :].rstrip("/") for page in self.pages(prefix, delimiter="/") for key, _, _ in page}
        return sorted(name for name in found if name)

    def pages(
        self,
        prefix: str,
        delimiter: Optional[str] = None,
        after: Optional[str] = None,
        patience: Optional[float] = None,
    ) -> Iterator[List[Row]]:
        """Yield every object whose whole key begins with `prefix` and follows `after`, page by page.

        Keys that have a `delimiter` behind the prefix are one row, which ends with it. A listing is complete or raises
        `Unreachable`: a page that is cut off, makes no sense or leads nowhere is asked for again.
        """
        query = {"list-type": "2", "prefix": prefix}
        if delimiter:
            query["delimiter"] = delimiter
        if after:
            query["start-after"] = after
        tokens: Set[str] = set()
        while True:
            rows, token = self._sure(
                "GET", None, query=query, read=lambda body: read_page(body, tokens), patience=patience
            )
            yield rows
            if not token:
                return
            tokens.add(token)
            query["continuation-token"] = token

    def _none_of(self, answer, key):
        if answer.status != 404 or "NoSuchBucket" in str(answer):
            raise Denied("%s: %s" % (key, answer))
        return

    def _sure(self, method, key, **more):
        try:
            return self._ask(method, key, **more)
        except Answer as answer:
            raise Denied("%s: %s" % (key or self.name, answer))

    def _ask(self, method, key, patience=None, give_up=None, **more):
        """One request, again and again while it may pass. Raises `Answer` for what will not."""
        began, pause, mended = time.time(), 0.2, set()
        until = began + (PATIENCE_S if patience is None else patience)
        problem: Optional[Exception] = None
        while True:
            if give_up is not None and give_up():
                raise Stopped(key)
            try:
                return self._ask_once(method, key, give_up=give_up, **more)
            except Answer as answer:
                if (answer.status == 401 or answer.code in EXPIRED) and "key" not in mended:
                    mended.add("key")
                    self.cloud.forget()
                elif answer.code == SKEWED and answer.date and "clock" not in mended:
                    mended.add("clock")
                    self.cloud.skew = calendar.timegm(email.utils.parsedate(answer.date)) - time.time()
                elif answer.status not in MAY_PASS and answer.code != "RequestTimeout":
                    raise
                problem = answer
            except NoCredentials as found:
                problem = found
                if time.time() >= began + CREDENTIALS_S:
                    raise Denied(str(found))
            except (IOError, OSError, http.client.HTTPException) as found:  # of which urllib's are kinds
                if "CERTIFICATE_VERIFY_FAILED" in str(found):
                    raise Denied("%s: %s; the image needs the certificates of public authorities" % (key, found))
                problem = found
            if time.time() + pause >= until:
                raise Unreachable("%s: %s" % (key or self.name, problem))
            if 1.0 < pause <= 2.0:
                self.say("waits for the record root: %s: %s" % (key or self.name, problem))
            time.sleep(pause * (0.5 + random.random()))
            pause = min(30.0, pause * 2)

    def _ask_once(
        self, method, key, data=None, query=None, headers=None, into=None, said=None, read=None, give_up=None
    ):
        """The body of the answer or what `read` makes of it, or of its headers the one that is called `said`."""
        path = "/" + self.name + ("" if key is None else "/" + self.prefix + key)
        path = urllib.parse.quote(path, safe="/-_.~")
        words = sorted((query or {}).items())
        text = "&".join("%s=%s" % tuple(urllib.parse.quote(each, safe="-_.~") for each in pair) for pair in words)
        headers = dict(headers or {})
        headers.update(self.cloud.sign(method, path, text, headers, data))
        url = self.cloud.endpoint + path + ("?" + text if text else "")
        request = urllib.request.Request(url, data=data, headers=headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=self.answer_s) as answer:
                if into is not None:
                    return _save(answer, into, give_up)
                if said is not None:
                    return answer.headers.get(said)
                body = answer.read()
        except urllib.error.HTTPError as problem:
            raise Answer(problem.code, problem.read(), problem.headers.get("Date"))
        if method == "POST" and b"<Error>" in body[:1000]:
            raise Answer(500, body)  # S3 answers the last request of an upload before it knows how that ends
        return body if read is None else read(body)


def read_page(body, tokens):
    """The rows of a page of a listing, and the token of the next page or "". `tokens` are those that led here.

    Raises `IOError` for what is no such page. U+FFFD stands for the characters of a key that XML cannot hold.
    """
    text = _NO_XML.sub("\ufffd", _REFERENCE.sub(_readable, body.decode("utf-8", "replace")))
    try:
        root = xml.etree.ElementTree.fromstring(text)
        if root.tag.rpartition("}")[2] != "ListBucketResult":
            raise ValueError("it is %s" % root.tag)
        rows: List[Row] = []
        for each in root:
            kind = each.tag.rpartition("}")[2]
            if kind == "Contents":
                rows.append((_text(each, "Key"), int(_text(each, "Size")), _text(each, "LastModified")))
            elif kind == "CommonPrefixes":
                rows.append((_text(each, "Prefix"), None, ""))
    except (ValueError, xml.etree.ElementTree.ParseError) as problem:
        raise IOError(errno.EIO, "the answer is no page of a listing: %s" % problem)
    token = _text(root, "NextContinuationToken")
    if token in tokens:
        raise IOError(errno.EIO, "a page of the listing leads back to an earlier one")
    if "\ufffd" in token or (_text(root, "IsTruncated") == "true" and not token):
        raise IOError(errno.EIO, "a page of the listing says that more follows, and not where")
    return rows, token


_NO_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")
_REFERENCE = re.compile("&#(x[0-9a-fA-F]{1,6}|[0-9]{1,7});")


def _readable(reference):
    text = reference.group(1)
    number = int(text[1:], 16) if text.startswith("x") else int(text)
    if number > 0x10FFFF or 0xD800 <= number <= 0xDFFF or _NO_XML.match(chr(number)):
        return "\ufffd"
    return reference.group()


def _save(answer, path, give_up):
    """All of an answer's body, as a file. One that was cut off is a failure."""
    size = 0
    try:
        opened = io.open(path, "wb")
    except (IOError, OSError) as problem:
        raise Denied("cannot write %s: %s" % (path, problem.strerror))
    with opened:
        while True:
            if give_up is not None and give_up():
                raise Stopped(path)
            piece = answer.read(1 << 20)
            if not piece:
                break
            try:
                opened.write(piece)
            except (IOError, OSError) as problem:
                raise Denied("cannot write %s: %s" % (path, problem.strerror))
            size += len(piece)
    wanted = answer.headers.get("Content-Length")
    if wanted is not None and int(wanted) != size:
        raise IOError(errno.EIO, "the answer was cut off after %d of %s bytes" % (size, wanted))


def _text(element, name):
    """Of the first child of that name, whatever its namespace."""
    for each in element:
        if each.tag.rpartition("}")[2] == name:
            return each.text or ""
    return ""


# who we are there


class Cloud(object):
    """Endpoint and credentials, which are looked for on first use and kept until they end."""

    def __init__(self, endpoint, if_absent):
        self.endpoint = endpoint.rstrip("/")
        self.if_absent = if_absent
        """Headers of a write that creates and never replaces."""
        self.lock = threading.Lock()
        self.known: Optional[Any] = None
        self.ends = 0.0
        self.skew = 0.0
        """How far the service's clock is ahead of ours, in seconds, where it said so."""

    def credentials(self):
        with self.lock:
            if self.known is None or time.time() >= self.ends - FRESH_S:
                try:
                    self.known, self.ends = self.find()
                except (IOError, OSError, ValueError, KeyError, StopIteration, SyntaxError) as problem:
                    if self.known is None or time.time() >= self.ends:
                        raise NoCredentials(errno.EIO, "no credentials: %s" % problem)
            return self.known

    def find(self):
        """What `sign` needs, and when it ends, in seconds since 1970."""
        raise NotImplementedError

    def forget(self):
        with self.lock:
            self.known = None


def variable(name):
    """Of the variables that say where the bucket is and who we are there; empty where it is not set."""
    return os.environ.get(OWN + name) or os.environ.get(name) or ""


class Google(Cloud):
    """https://cloud.google.com/storage/docs/xml-api/overview"""

    def __init__(self):
        emulator = variable("STORAGE_EMULATOR_HOST")
        if emulator and "://" not in emulator:
            emulator = "http://" + emulator
        self.emulated = bool(emulator)
        Cloud.__init__(self, emulator or "https://storage.googleapis.com", {"x-goog-if-generation-match": "0"})

    def sign(self, method, path, query, headers, data):
        return {"Authorization": "Bearer " + self.credentials(), "Content-Type": "application/octet-stream"}

    def find(self):
        """A token and when it ends."""
        if self.emulated:
            return "anonymous", time.time() + 1e9
        named = ("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH", "GOOGLE_APPLICATION_CREDENTIALS")
        path = next(filter(None, map(variable, named)), "")
        usual = os.path.expanduser("~/.config/gcloud/application_default_credentials.json")
        if not path and os.path.exists(usual):
            path = usual
        if variable("GOOGLE_SERVICE_ACCOUNT_KEY"):
            path, about = "GOOGLE_SERVICE_ACCOUNT_KEY", json.loads(variable("GOOGLE_SERVICE_ACCOUNT_KEY"))
        elif path:
            try:
                about = shim.read_json(path)
            except (IOError, OSError) as problem:
                raise Denied("cannot read %s: %s" % (path, problem.strerror))
        else:
            place = variable("GCE_METADATA_HOST") or "metadata.google.internal"
            url = "http://%s/computeMetadata/v1/instance/service-accounts/default/token" % place
            return _token(url, {"Metadata-Flavor": "Google"})
        if about.get("type") == "authorized_user":
            form = {name: about[name] for name in ("client_id", "client_secret", "refresh_token")}
            return _token("https://oauth2.googleapis.com/token", {}, dict(form, grant_type="refresh_token"))
        if about.get("type") == "service_account":
            form = {"grant_type": "urn:ietf:params:oauth:grant-type:jwt-bearer", "assertion": _assertion(about)}
            return _token(about.get("token_uri") or "https://oauth2.googleapis.com/token", {}, form)
        raise Denied("credentials of type %s in %s are not read here" % (about.get("type"), path))


def _token(url, headers, form=None):
    data = urllib.parse.urlencode(form).encode("ascii") if form else None
    said = json.loads(fetch(url, headers, data).decode("utf-8"))
    return said["access_token"], time.time() + float(said["expires_in"])


def _assertion(about):
    """What a service account signs to get a token; the standard library has no RSA, so openssl does it."""
    now = int(time.time())
    claims = {"iss": about["client_email"], "scope": SCOPE, "iat": now, "exp": now + 3600}
    claims["aud"] = about.get("token_uri") or "https://oauth2.googleapis.com/token"
    header = {"alg": "RS256", "typ": "JWT", "kid": about.get("private_key_id", "")}
    text = b".".join(_base64url(json.dumps(each).encode("utf-8")) for each in (header, claims))
    reading, writing = os.pipe()
    try:
        os.write(writing, about["private_key"].encode("ascii"))
        os.close(writing)
        child = subprocess.Popen(
            ["openssl", "dgst", "-sha256", "-sign", "/dev/fd/%d" % reading],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[reading],
        )
        signature, said = child.communicate(text)
    except OSError as problem:
        raise Denied("the key of a service account needs openssl here: %s" % problem.strerror)
    finally:
        os.close(reading)
    if child.returncode != 0:
        raise Denied("openssl cannot sign: %s" % said.decode("utf-8", "replace").strip())
    return (text + b"." + _base64url(signature)).decode("ascii")


def _base64url(data):
    return base64.urlsafe_b64encode(data).rstrip(b"=")


class Amazon(Cloud):
    """https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-authenticating-requests.html"""

    def __init__(self, region: Optional[str] = None) -> None:
        self.region = region or variable("AWS_REGION") or variable("AWS_DEFAULT_REGION") or "us-east-1"
        own = variable("AWS_ENDPOINT_URL_S3") or variable("AWS_ENDPOINT_URL")
        Cloud.__init__(self, own or "https://s3.%s.amazonaws.com" % self.region, {"If-None-Match": "*"})

    def sign(self, method, path, query, headers, data):
        """The headers that say who asks, over method, path, query and body."""
        key, secret, session = self.credentials()
        now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(time.time() + self.skew))
        signed = {
            "host": urllib.parse.urlsplit(self.endpoint).netloc,
            "x-amz-content-sha256": hashlib.sha256(data or b"").hexdigest(),
            "x-amz-date": now,
        }
        if session:
            signed["x-amz-security-token"] = session
        for name, value in headers.items():
            signed[name.lower()] = value
        names = ";".join(sorted(signed))
        lines = "".join("%s:%s\n" % (name, signed[name]) for name in sorted(signed))
        request = "\n".join([method, path, query, lines, names, signed["x-amz-content-sha256"]])
        scope = "%s/%s/s3/aws4_request" % (now[:8], self.region)
        digest = hashlib.sha256(request.encode("utf-8")).hexdigest()
        text = "\n".join(["AWS4-HMAC-SHA256", now, scope, digest])
        made = ("AWS4" + secret).encode("utf-8")
        for word in scope.split("/"):
            made = hmac.new(made, word.encode("utf-8"), hashlib.sha256).digest()
        signature = hmac.new(made, text.encode("utf-8"), hashlib.sha256).hexdigest()
        words = "AWS4-HMAC-SHA256 Credential=%s/%s, SignedHeaders=%s, Signature=%s" % (key, scope, names, signature)
        del signed["host"]
        return dict(signed, Authorization=words, **{"Content-Type": "application/octet-stream"})

    def find(self):
        """(key id, secret, session token or None) and when they end."""
        if variable("AWS_ACCESS_KEY_ID"):
            known = variable("AWS_ACCESS_KEY_ID"), variable("AWS_SECRET_ACCESS_KEY")
            return known + (variable("AWS_SESSION_TOKEN") or None,), time.time() + 1e9
        if variable("AWS_WEB_IDENTITY_TOKEN_FILE"):
            return self._by_web_identity()
        if variable("AWS_CONTAINER_CREDENTIALS_FULL_URI") or variable("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"):
            return _by_container()
        named = _by_file()
        return named or _by_machine()

    def _by_web_identity(self):
        with io.open(variable("AWS_WEB_IDENTITY_TOKEN_FILE"), encoding="utf-8") as opened:
            token = opened.read().strip()
        form = {
            "Action": "AssumeRoleWithWebIdentity",
            "Version": "2011-06-15",
            "RoleArn": variable("AWS_ROLE_ARN"),
            "RoleSessionName": variable("AWS_ROLE_SESSION_NAME") or "research-runtime",
            "WebIdentityToken": token,
        }
        url = variable("AWS_ENDPOINT_URL_STS") or "https://sts.%s.amazonaws.com/" % self.region
        said = xml.etree.ElementTree.fromstring(fetch(url, {}, urllib.parse.urlencode(form).encode("ascii")))
        found = next(each for each in said.iter() if each.tag.rpartition("}")[2] == "Credentials")
        words = [_text(found, name) for name in ("AccessKeyId", "SecretAccessKey", "SessionToken")]
        return tuple(words), _seconds(_text(found, "Expiration"))


def _by_container():
    url = variable("AWS_CONTAINER_CREDENTIALS_FULL_URI")
    url = url or "http://169.254.170.2" + variable("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI")
    token = variable("AWS_CONTAINER_AUTHORIZATION_TOKEN")
    if variable("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"):
        with io.open(variable("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"), encoding="utf-8") as opened:
            token = opened.read().strip()
    return _of_json(fetch(url, {"Authorization": token} if token else {}))


def _by_file():
    path = variable("AWS_SHARED_CREDENTIALS_FILE") or os.path.expanduser("~/.aws/credentials")
    parser = configparser.RawConfigParser()
    profile = variable("AWS_PROFILE") or "default"
    if not parser.read(path) or not parser.has_option(profile, "aws_access_key_id"):
        return None
    about = dict(parser.items(profile))
    known = (about["aws_access_key_id"], about.get("aws_secret_access_key", ""), about.get("aws_session_token"))
    return known, time.time() + 1e9


def _by_machine():
    machine = (variable("AWS_EC2_METADATA_SERVICE_ENDPOINT") or "http://169.254.169.254").rstrip("/")
    ask = urllib.request.Request(machine + "/latest/api/token", method="PUT", data=b"")
    ask.add_header("X-aws-ec2-metadata-token-ttl-seconds", "21600")
    token = {"X-aws-ec2-metadata-token": _open(ask).decode("ascii")}
    place = machine + "/latest/meta-data/iam/security-credentials/"
    return _of_json(fetch(place + fetch(place, token).decode("ascii").split()[0], token))


def _of_json(body):
    said = json.loads(body.decode("utf-8"))
    return (said["AccessKeyId"], said["SecretAccessKey"], said.get("Token")), _seconds(said["Expiration"])


def _seconds(text):
    return calendar.timegm(time.strptime(text[:19], "%Y-%m-%dT%H:%M:%S"))


def fetch(url, headers, data=None):
    """The body behind an address that gives credentials."""
    return _open(urllib.request.Request(url, data=data, headers=headers))


_NEAR = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Addresses of the machine itself are behind no proxy."""


def _open(request):
    opener = _NEAR.open if request.type == "http" else urllib.request.urlopen
    try:
        with opener(request, timeout=10) as answer:
            return answer.read()
    except urllib.error.HTTPError as problem:
        if problem.code in MAY_PASS:
            raise
        raise Denied("no credentials: %s said %d" % (request.host, problem.code))
    except (urllib.error.URLError, socket.timeout) as problem:
        raise IOError(errno.EIO, "no credentials: %s does not answer: %s" % (request.host, problem))
