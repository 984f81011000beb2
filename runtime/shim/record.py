"""The record of a job and of each of its indices, in the job's folder."""

import errno
import io
import json
import os
import signal
import stat
import sys
import time

from runtime.shim.common import HOST, SCHEMA, AlreadyClaimed, OrderRefused, TransferStopped, say
from runtime.shim.files import (
    CONTAINERS,
    FOLDED,
    PASSING,
    check_folder,
    create_empty,
    create_whole,
    drop_file,
    folded_path,
    leave_mark,
    list_names,
    make_common_folder,
    make_folder,
    patiently,
    read_folded,
    read_json,
    read_text,
    write_patiently,
    write_whole,
)
from runtime.shim.logs import LOG_BYTES
from runtime.shim.processes import boot_id, end_marked, is_alive, is_group_alive, kill_group, started_at
from runtime.shim.retry import LOSS, forgive_commands, name_end, name_loss, pod_failures
from runtime.shim.tree_walk import remove_folder


def create_private(path, text):
    create_whole(path, text, 0o600)


def write_private(path, text):
    write_whole(path, text, mode=0o600)


def at_once():
    """Give a write up that a folder refuses, since nothing hangs on it that is worth a machine."""
    return True


class FolderRecord(object):
    """The record of a job as files of its folder, under relative names. `BucketRecord` keeps the same in a bucket."""

    folds = True
    """Whether a job that has ended is folded."""

    def __init__(self, folder):
        self.folder = folder
        self.give_up = None  # whether to wait no longer for a folder that is missing

    def _path(self, name):
        return os.path.join(self.folder, name)

    def _gives_up(self):
        return self.give_up is not None and not os.path.isdir(self.folder) and self.give_up()

    def read(self, name):
        """The text of a file, None if there is none."""

        def read():
            # A shim that was overtaken may have put its own beside a folded one a moment ago.
            stands = read_folded(self.folder, name) if name.endswith("/result") else None
            if stands is not None:
                return stands.decode("utf-8")
            try:
                return read_text(self._path(name))
            except (IOError, OSError) as problem:
                if problem.errno in PASSING:
                    raise
                folded = read_folded(self.folder, name)
                if folded is None:
                    check_folder(self.folder)
                return None if folded is None else folded.decode("utf-8")

        return patiently("read", name, read, self._gives_up)

    def write(self, name, text, give_up=None):
        write_patiently(self._put(write_whole), self._path(name), text, give_up)

    def create(self, name, text, give_up=None):
        """Create a file; raises `AlreadyClaimed` if it exists."""
        write_patiently(self._put(create_whole), self._path(name), text, give_up)
        if name.endswith("/result") and read_folded(self.folder, name) is not None:
            os.unlink(self._path(name))  # it was folded a moment ago
            raise AlreadyClaimed(name)

    def _put(self, write, make=make_folder):
        def put(path, text):
            make(os.path.dirname(path), within=self.folder)
            try:
                return write(path, text)
            except (IOError, OSError) as problem:
                if problem.errno == errno.ENOENT:
                    check_folder(self.folder)  # The record root may be away since a moment ago.
                raise

        return put

    def mark(self, name):
        """Make an empty file as a mark, if possible."""
        if not leave_mark(self._path(name), self._path("order.json")):
            say("cannot write %s" % name)

    def put_file(self, name, path, give_up=None):
        """Store a file of any size under a name, from a path of the same file system, which goes."""
        with io.open(path, "rb") as opened:
            os.fsync(opened.fileno())
        self._put(lambda to, source: os.rename(source, to))(self._path(name), path)

    def get_file(self, name, path, give_up=None):
        """Save a file of any size as `path`; False if there is none. Raises `TransferStopped` once `give_up` comes true."""
        try:
            source = io.open(self._path(name), "rb")
        except (IOError, OSError) as problem:
            if problem.errno != errno.ENOENT:
                raise
            return False
        with source, io.open(path, "wb") as copy:
            for piece in iter(lambda: source.read(1 << 20), b""):
                if give_up is not None and give_up():
                    raise TransferStopped(name)
                copy.write(piece)
        return True

    def remove(self, name):
        """Remove a file, if it exists and is ours."""
        drop_file(self._path(name))

    def begin(self, name, text, give_up=None):
        """Make the folder of an attempt with its `start.json`. Raises `AlreadyClaimed` if another shim made it."""

        def make():
            make_folder(os.path.dirname(self._path(name)), within=self.folder)
            try:
                os.mkdir(self._path(name))
            except OSError as problem:
                if problem.errno != errno.EEXIST:
                    raise
                raise AlreadyClaimed(name)

        def note():
            check_folder(self.folder)
            write_whole(os.path.join(self._path(name), "start.json"), text, durable=False)

        patiently("make", name, make, give_up)
        patiently("write", name + "/start.json", note, give_up)

    def has(self, name):
        return os.path.exists(self._path(name))

    def begun(self, name):
        """Whether somebody has begun an attempt with this folder."""
        return self.has(name)

    def folded(self, name):
        """Whether an attempt's files are gone because its run has a result and was folded."""
        start = name + "/start.json"  # the folder alone may have come back, with a log or a sign of life of its shim
        return not self.has(start) and read_folded(self.folder, start) is not None

    def names(self, name):
        """All names in a folder, or an error, since attempts are counted by them; none if there is no such folder."""

        def look():
            try:
                return sorted(os.listdir(self._path(name)))
            except (IOError, OSError) as problem:
                if problem.errno not in (errno.ENOENT, errno.ENOTDIR):
                    raise
                check_folder(self.folder)
                return []

        return patiently("list", name, look, self._gives_up)

    def announce(self, name, give_up=None):
        """Write an outcome as a name, so that one listing of the record root shows the state of every job."""
        done = os.path.join(os.path.dirname(os.path.dirname(self.folder)), "done", name)
        write_patiently(self._put(create_empty, make_common_folder), done, "", give_up)

    def outcomes(self):
        """(index, reason, code, attempt) of every run that has ended, by one listing."""
        return read_outcomes(os.path.basename(self.folder), list_names(self._common("done")))

    def create_common(self, name, text):
        """Create a file of the record root that all users may share; raises `AlreadyClaimed` if it exists."""
        write_patiently(self._put(create_private, make_common_folder), self._common(name), text, at_once)

    def write_common(self, name, text):
        write_patiently(self._put(write_private, make_common_folder), self._common(name), text, at_once)

    def drop_common(self, name):
        drop_file(self._common(name))

    def _common(self, name):
        return os.path.join(os.path.dirname(os.path.dirname(self.folder)), name)

    def overwrite(self, name, text):
        """Replace a small file that lasts only while the shim lives."""
        write_whole(self._path(name), text, durable=False)

    def drop_open(self, name, indices):
        """Remove a name from the index of open jobs if each of these runs has its result. A name that stays does no harm."""
        if not os.path.exists(folded_path(self.folder, "")):
            # The last one first: an array begins in order, so its result is mostly missing.
            for run in ("runs/%d" % index for index in reversed(indices)):
                if not (self.has("%s.%s" % (run, FOLDED)) or self.has(run + "/result")):
                    return
        drop_file(os.path.join(os.path.dirname(os.path.dirname(self.folder)), name))

    def beat(self, name, text):
        try:
            self.overwrite(name, text)
        except (IOError, OSError):
            pass  # a full disk is no reason to end a command

    def before(self, run, attempt, asked):
        """Called before an attempt is prepared; False if the shim was asked to stop meanwhile."""
        return True

    def after(self, run, attempt):
        """Called when all processes of an attempt have ended, before its end is noted."""

    def own_folders(self):
        """Folders of the record on this machine's own disk."""
        return []


class RunRecord(object):
    """The run of one index of a job: its attempts, its result, and its folder on this machine."""

    def __init__(self, record, index, told=None):
        """`told` is a file that the backend shows after the end."""
        self.record = record
        self.job = record.folder
        self.index = index
        self.told = told
        self.node = 0
        """Which of the run's nodes this machine is."""
        self.log_bytes = LOG_BYTES
        self.outputs = None
        """How often outputs are sent to a bucket while an attempt runs, and which: `every_s` and `include`."""
        self.hold = None
        """The trees that it waits for, if it keeps its machine between commands."""
        self.name = "runs/%s" % index
        self.folder = os.path.join(self.job, "runs", str(index))

    def result(self):
        """The committed result, None if there is none, or none that can be read."""
        try:
            return parse_result(self.record.read(self.name + "/result"))
        except ValueError:
            return None

    def unread_end(self, order):
        """The end of a run that has no result that can be read, because its files are damaged or gone; None if it has not ended.

        Its outcome tells it, unless a retry by hand forgave that attempt: a listing may be older than the retry.
        """
        forgiven = (order.get("forgiven") or {}).get(str(self.index), -1)
        if not (order.get("epoch", 1) > 1 or self.record.names(self.name) or self._is_folded()):
            return None  # nothing of it was ever begun here; a listing may show a job of the same id that was removed
        for index, reason, code, attempt in self.record.outcomes():
            if index == self.index and attempt > forgiven:
                return {"reason": reason, "code": code, "attempt": attempt}
        try:
            text = self.record.read(self.name + "/result")
        except ValueError as problem:
            text = str(problem)
        # It was committed, and retrying it by hand puts the damaged file aside.
        return None if text is None or parse_result(text) else {"reason": "lost", "code": 1, "attempt": 0}

    def _is_folded(self):
        return self.record.folds and os.path.exists(folded_path(self.job, self.name))

    def commit(self, reason, code, attempt, details, give_up=None):
        """Commit a result of the index, unless it has one; returns the result that stands."""
        result = dict(details, reason=reason, code=code, attempt=attempt, at=time.time())
        self.tell(result)
        try:
            self.record.create(self.name + "/result", json.dumps(result, sort_keys=True), give_up)
        except AlreadyClaimed:
            result = self.result() or result
        self.announce(result, give_up)
        return result

    def tell(self, result):
        """Write a result for the backend too, which a client may ask if it cannot read the record root."""
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
        name = self._outcome(result)
        self.record.announce(name, give_up)
        # If this machine stood still after the commit, the job may have been removed, or started again, before the name.
        stands = self.result()
        if stands is None or self._outcome(stands) != name:
            self.record.drop_common("done/" + name)

    def _outcome(self, result):
        outcome = (os.path.basename(self.job), self.index, result["reason"], result["code"], result["attempt"])
        return "%s.%d.%s.%s.%d" % outcome

    def cancelled(self):
        return any(self.record.has(name) for name in ("cancel", "cancel.%d" % self.index))

    def is_overtaken(self, attempt):
        """Whether a later attempt has begun, so that this one decides nothing any more: the job was taken up elsewhere."""
        return self.record.begun(self.attempt_name(attempt + 1)) or self.record.folded(self.attempt_name(attempt))

    def attempts(self):
        """Every attempt so far, oldest first: its number, and its end or None."""
        found = []
        for name in self.record.names(self.name):
            if is_attempt(name):
                found.append((int(name[1:]), self.ended(int(name[1:]))))
        return sorted(found, key=lambda each: each[0])

    def last_attempt(self):
        """The number of the last attempt; 0 if there is none, or none any more since another shim ended the run."""
        known = self.attempts()
        return known[-1][0] if known else 0

    def counted(self, order, last=None):
        """The ends of the attempts that budgets count: those before a retry by hand are forgiven.

        Attempts after `last` are a twin's, which records their ends itself.
        """
        forgiven = (order.get("forgiven") or {}).get(str(self.index), 0)
        known = [each for each in self.attempts() if forgiven < each[0] <= (last or each[0])]
        if pod_failures() is None:
            found = [self._name_loss(number, note, order) for number, note in known]
            return forgive_commands(found) if order.get("hold") else found
        found = []
        for place, (number, note) in enumerate(known):
            if note is None or note["reason"] == "stopped":
                later = known[place + 1 :]
                after = self.seen_failures(later[0][0]) if later else pod_failures()
                full = None if note else self.record.read(self.attempt_name(number) + "/memory")
                note = name_end(note, self.seen_failures(number), after, full)
            found.append(note)
        return forgive_commands(found) if order.get("hold") else found

    def _name_loss(self, attempt, note, order):
        """The end of an attempt with the word that the backend's own program left beside it."""
        if order.get("retries") != "backend" or (note and note["reason"] != "stopped"):
            return note
        text = self.record.read("%s/%s" % (self.attempt_name(attempt), LOSS))
        try:
            loss = json.loads(text or "null")
        except ValueError:
            loss = None
        # The file alone tells of the loss.
        return note if text is None else name_loss(note, loss if isinstance(loss, dict) else {})

    def seen_failures(self, attempt):
        """How many failures the backend had counted when an attempt began, None if it does not count."""
        return (self.started(attempt) or {}).get("failures")

    def ended(self, attempt):
        for name in self.record.names(self.attempt_name(attempt)):
            if name.startswith("end.") and name.count(".") == 2:  # more dots are a temporary file of a killed shim
                return self._read_end(self.attempt_name(attempt), name)
        return None

    def _read_end(self, attempt, name):
        """The note of an attempt's end; of one that is damaged what its name tells."""
        try:
            note = json.loads(self.record.read("%s/%s" % (attempt, name)) or "")
            if isinstance(note, dict) and "reason" in note:
                return note
        except ValueError:
            pass
        _, reason, code = name.split(".")
        return {"reason": reason, "code": int(code) if code.isdecimal() else 1}

    def attempt_name(self, attempt):
        return "%s/a%04d" % (self.name, attempt)

    def attempt_folder(self, attempt):
        return os.path.join(self.folder, "a%04d" % attempt)

    def claim(self, native, scratch=None, give_up=None):
        """Begin the next attempt; returns its number, which is unique, and that of no output. `scratch` is the folder that it
        will make here."""
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
        if self.hold:
            start["tree"] = self.hold.current[0]
        if pod_failures() is not None:
            start["failures"] = pod_failures()
        if "SLURM_JOB_ID" in os.environ:
            start["restarts"] = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
        # The outputs of an attempt may be there without its other files.
        names = self.record.names(self.name) + self.record.names(self.name + "/output")
        attempt = max([0] + [int(name[1:]) for name in names if is_attempt(name)]) + 1
        while True:
            try:
                self.record.begin(self.attempt_name(attempt), json.dumps(start, sort_keys=True), give_up)
                return attempt
            except AlreadyClaimed:
                attempt += 1

    def withdraw(self, attempt):
        """Take back an attempt that has run nothing."""
        self.record.remove(self.attempt_name(attempt) + "/start.json")
        try:
            os.rmdir(self.attempt_folder(attempt))
        except OSError as problem:
            say("cannot take attempt %d back: %s" % (attempt, problem.strerror))

    def clear(self):
        """End the processes and trees that attempts left here whose shim died, and note the ends of attempts that a
        restart of this machine ended."""
        rebooted, dead, trees = [], set(), []
        for attempt, ended in self.attempts():
            self._clear_containers(attempt)
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
                    kill_group(group["pid"], signal.SIGKILL)
        if dead:
            end_marked(os.path.basename(self.job), self.index, dead)
        for tree in trees:
            self.remove_scratch(tree)
        for attempt in rebooted:  # last, since a full disk may refuse it; the next start finds them again
            try:
                self.end(attempt, "node_failed", 1, {"message": "%s was started anew" % HOST}, lambda: True)
            except (IOError, OSError) as problem:
                say("cannot note how attempt %d ended: %s" % (attempt, problem))

    def _clear_containers(self, attempt):
        """Remove the containers that an attempt left whose shim has gone."""
        if not os.path.exists(os.path.join(self.attempt_folder(attempt), CONTAINERS)):
            return
        start = self.started(attempt)
        if start and start.get("host") == HOST and not is_alive(start):
            from runtime.shim.containers import clear_containers

            clear_containers(os.path.join(self.attempt_folder(attempt), CONTAINERS))

    def remove_scratch(self, path):
        """Remove the folder that a note names, if it is an attempt's, and ours."""
        if not path or not os.path.basename(path).startswith(scratch_prefix(os.path.basename(self.job), self.index)):
            return
        try:
            found = os.lstat(path)
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
                say("removes %s, which a killed shim left" % path)
                left = remove_folder(path)
                if left is not None:
                    raise left
        except OSError as problem:
            if problem.errno != errno.ENOENT:
                say("cannot remove %s: %s" % (path, problem.strerror))

    def started(self, attempt):
        """The note with which a shim began an attempt, None if there is none."""
        try:
            return json.loads(self.record.read(self.attempt_name(attempt) + "/start.json") or "null")
        except ValueError:
            return None

    def end(self, attempt, reason, code, details, give_up=None):
        """Note how an attempt ended, in the file and in its name; nothing if others have ended its run, and folded it."""
        if self.record.folded(self.attempt_name(attempt)):
            return
        note = dict(details, reason=reason, code=code, at=time.time())
        self.tell(dict(note, attempt=attempt))
        name = "%s/end.%s.%s" % (self.attempt_name(attempt), reason, code)
        self.record.write(name, json.dumps(note, sort_keys=True), give_up)


def is_attempt(name):
    """Whether the folder of an attempt, or of its outputs, has such a name."""
    return name.startswith("a") and name[1:].isdecimal()


def parse_result(text):
    """The result of a run in the text of its file; None if there is none, or if it is damaged."""
    try:
        result = json.loads(text or "null")
    except ValueError:
        return None
    whole = isinstance(result, dict) and all(name in result for name in ("reason", "code", "attempt"))
    return result if whole else None


def claim_job(record, epoch, part, native):
    """Claim this part of the job; raises `AlreadyClaimed` if another native job serves it."""
    name = "owners/%d.%d" % (epoch, part)
    try:
        record.create(name, native)
    except AlreadyClaimed:
        owner = record.read(name)
        if owner != native:
            raise AlreadyClaimed(owner)
    refuse_if_later(record, epoch, part)


def refuse_if_later(record, epoch, part):
    """Raise `AlreadyClaimed` if a native job of a later epoch serves this part of the job, or if the job is being removed."""
    names = record.names("owners")
    epochs = [name.partition(".")[0] for name in names if name.endswith(".%d" % part)]
    later = [each for each in epochs if each.isdecimal() and int(each) > epoch]
    if later:
        raise AlreadyClaimed("%s.%d" % (later[-1], part))
    # `gc` looks at the owners after it has written this, so that one of us meets the other.
    if record.has("removing"):
        raise AlreadyClaimed("nobody, since it is being removed")


def read_outcomes(job, names):
    """(index, reason, code, attempt) of each run of a job, from names in `done/`."""
    parts = [name.split(".") for name in names]
    return [(int(each[1]), each[2], int(each[3]), int(each[4])) for each in parts if each[0] == job and len(each) == 5]


def drop_open(order, record, part):
    """Remove the name of a part from the index of open jobs, once all its runs have their results."""
    entry = order.get("open") or {}
    if part < len(entry.get("parts", ())):
        first, count = entry["parts"][part]
        record.drop_open("%s.%d" % (entry["name"], part), range(first, first + count))


def scratch_prefix(job, index):
    return "job-%s-%s-" % (job[:10], index)


def load_order(folder):
    try:
        order = read_json(os.path.join(folder, "order.json"))
    except (IOError, OSError) as problem:
        raise OrderRefused("cannot read the order in %s: %s" % (folder, problem.strerror))
    except ValueError as problem:
        raise OrderRefused("the order in %s is no JSON: %s" % (folder, problem))
    if not isinstance(order, dict):
        raise OrderRefused("the order in %s is no JSON object" % folder)
    if order.get("schema") != SCHEMA:
        raise OrderRefused("the order has schema %s, this shim follows %d" % (order.get("schema"), SCHEMA))
    return order
