"""GPUs of this machine: which are free, and which are ours."""

import errno
import json
import os
import random
import socket
import stat
import subprocess
import time

from runtime.file_trust import is_ours, private_folder
from runtime.shim.common import LOOK_S, NoCapacity, SetupFailed, say
from runtime.shim.files import drop_file, list_names, token
from runtime.shim.processes import boot_id, is_alive, is_group_alive, owner_of, started_at

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, Set

GPU_PATIENCE_S = 15.0
"""How long to wait for memory that another run of the same GPU gives back as it ends."""
GPU_CLAIMS = "/tmp/research-runtime-gpus"
"""The same for every user of a machine, independent of TMPDIR."""
CLAIM_BYTES = 1 << 16
"""The most of a claim."""


class GpuShare(object):
    """GPUs of this machine, or a part of one, that are ours until `drop`.

    A claim is a file in a folder that all users of the machine can write to. A shim writes its claim first and then looks
    at all others: of two that overlap, the one that looks last sees the other, drops its claim and tries again. A claim
    counts while its shim or a command of it lives in this boot of the machine, so nothing has to be cleaned up.

    The user who makes that folder first may take claims out of it, and anybody may claim all GPUs while a process of theirs
    lives. No file in it can do more: it is read as text of a few fields, and where the folder cannot be used, the user's
    own folder beside it takes the claims. All shims read both.
    """

    kind = "gpus"
    """The field of a claim."""
    called = "GPUs"
    folder = GPU_CLAIMS

    def __init__(self, wanted, devices):
        self.count = wanted["count"]
        self.devices = devices
        self.common = wanted.get("locks") or self.folder
        self.claim: Dict[str, Any] = {
            "boot": boot_id(),
            "pid": os.getpid(),
            "start": started_at(os.getpid()),
            "groups": [],
        }
        self.name = "claim.%d.%s" % (os.getpid(), token())
        self.path = os.path.join(self._common_folder() or self._own_folder(), self.name)
        self.said: Set[str] = set()

    def _common_folder(self):
        """The folder for the claims of all users, made if it is missing; None if it is not one."""
        try:
            os.mkdir(self.common)
            os.chmod(self.common, 0o1777)
        except OSError as problem:
            if problem.errno != errno.EEXIST:
                raise SetupFailed("cannot make %s: %s" % (self.common, problem.strerror))
        try:
            mode = os.lstat(self.common).st_mode
        except OSError:
            return None
        fits = stat.S_ISDIR(mode) and mode & 0o1007 == 0o1007
        return self.common if fits or (stat.S_ISDIR(mode) and is_ours(self.common, alone=True)) else None

    def _own_folder(self):
        try:
            folder = private_folder("%s-%d" % (self.common, os.geteuid()), 0o755)
        except OSError as problem:
            raise SetupFailed("cannot make a folder beside %s: %s" % (self.common, problem.strerror))
        text = "keeps its claims of %s in %s, as %s is not a folder that all users can write to"
        say(text % (self.called, folder, self.common))
        return folder

    def take(self, give_up):
        """Wait until enough is free and claim it; returns False if `give_up()` came true first."""
        share = min(1.0, self.count)
        while True:
            used = self._used()
            free = [each for each in self.devices if used.get(each, 0.0) + share <= 1.0 + 1e-6]
            # Parts go to GPUs that are shared already, so that whole ones stay free.
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
        """Note our processes that hold it too: they may outlive us if we are killed."""
        self.claim["groups"] = groups
        try:
            self._write()
        except SetupFailed as problem:
            say(str(problem))

    def variables(self):
        names = ",".join(each for each in self.devices if each in self.claim["gpus"])
        return {"CUDA_VISIBLE_DEVICES": names, "NVIDIA_VISIBLE_DEVICES": names}

    def drop(self):
        drop_file(self.path)

    def _write(self):
        try:
            self._write_to(self.path)
        except OSError as problem:
            if not self.path.startswith(self.common + os.sep):
                where = os.path.dirname(self.path)
                raise SetupFailed("cannot claim %s in %s: %s" % (self.called, where, problem.strerror))
            self.path = os.path.join(self._own_folder(), self.name)
            self._write()

    def _write_to(self, path):
        temporary = os.path.join(os.path.dirname(path), "new.%s" % token())
        opened = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            os.write(opened, json.dumps(self.claim, sort_keys=True).encode())
            os.fchmod(opened, 0o644)
        finally:
            os.close(opened)
        os.rename(temporary, path)

    def _used(self):
        """GPU → the part of it that others have."""
        used: Dict[str, float] = {}
        parent, common = os.path.split(self.common)
        for folder in [each for each in list_names(parent) if each == common or each.startswith(common + "-")]:
            if os.path.islink(os.path.join(parent, folder)):
                continue
            for name in list_names(os.path.join(parent, folder)):
                path = os.path.join(parent, folder, name)
                if name.startswith("claim.") and path != self.path:
                    self._add(path, used)
        return used

    def _add(self, path, used):
        try:
            owner, claim = read_claim(path, self.kind)
        except (IOError, OSError):
            return  # given back since the listing
        except (ValueError, RecursionError) as problem:
            if path not in self.said:
                self.said.add(path)
                say("skips the claim of %s %s: %s" % (self.called, path, problem))
            return
        if is_held(claim, owner):
            for each, share in claim[self.kind].items():
                used[each] = used.get(each, 0.0) + share
        else:
            drop_file(path)


def read_claim(path, kind="gpus"):
    """Owner and content of a claim that another user may have made. Raises `ValueError` if it is not a claim.

    Nothing is waited for: not for the other end of a pipe, nor for a device behind a link.
    """
    try:
        opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as problem:
        if problem.errno in (errno.ELOOP, errno.ENXIO, errno.EACCES):
            raise ValueError("it cannot be read: %s" % problem.strerror)
        raise
    try:
        status = os.fstat(opened)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is no regular file")
        content = os.read(opened, CLAIM_BYTES + 1)
    finally:
        os.close(opened)
    if len(content) > CLAIM_BYTES:
        raise ValueError("it has more than %d bytes" % CLAIM_BYTES)
    claim = json.loads(content.decode("utf-8"))
    if not isinstance(claim, dict) or not isinstance(claim.get(kind), dict):
        raise ValueError("it names no %s" % kind)
    groups = claim.get("groups")
    if not isinstance(groups, list) or not all(_is_process(each) for each in [claim] + groups):
        raise ValueError("it names no processes")
    if not all(type(share) in (int, float) and 0 < share <= 1 for share in claim[kind].values()):
        raise ValueError("it names parts that none of them has")
    return status.st_uid, claim


def _is_process(who):
    return isinstance(who, dict) and type(who.get("pid")) is int and 0 < who["pid"] < 1 << 31


def is_held(claim, owner):
    """Whether a process of a claim lives and is the claim's owner's: another's would hold the GPU for a claim by somebody else.

    Commands of root may run as anybody. A process whose user cannot be seen counts.
    """
    if is_alive(claim) and (owner == 0 or owner_of(claim["pid"]) in (None, owner)):
        return True
    return any(is_group_alive(group, owner or None) for group in claim["groups"])


def take_gpus(order, give_up):
    """The GPUs of this machine that the order wants, False if `give_up()` came true first. Raises `SetupFailed`."""
    wanted = order["gpus"]
    devices = wanted.get("devices")
    if devices is None:
        devices = given_gpus() or (_ask_nvidia("--query-gpu=index", "--format=csv,noheader") or "").split()
    if len(devices) < wanted["count"]:
        raise SetupFailed(
            "%g GPUs are wanted and %s has %s" % (wanted["count"], socket.gethostname(), len(devices) or "none")
        )
    share = GpuShare(wanted, devices)
    return share if share.take(give_up) else False


def _ask_nvidia(*options):
    """The output of nvidia-smi; None if there is no such program."""
    words = ["nvidia-smi"] + list(options)
    try:
        child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
    except OSError:
        return None
    return child.communicate()[0].decode("ascii", "replace")


def check_gpus(wanted):
    """Check that the GPUs that a backend gave us can be seen and are free; returns variables that correct their names.

    Raises `SetupFailed` if one cannot be seen, and `NoCapacity` if less than our part of its memory is free: others may
    use a GPU without asking the backend.
    """
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
    named = given_gpus()
    mine = [each for each in there if not named or each["index"] in named or each["uuid"] in named]
    variables = {}
    if len(mine) < count and len(there) == count:
        # The container runtime shows only ours, and counts them from 0.
        mine = there
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(each["index"] for each in mine)
    if len(mine) < count:
        seen = ", ".join(each["index"] for each in there) or "none"
        text = "%d GPUs were given (%s), and those visible are: %s"
        raise SetupFailed(text % (count, ",".join(named) or "any", seen))
    for each in mine:
        # A driver keeps some for itself, and neighbours are not exact.
        if each["free"] is not None and each["free"] < 0.8 * share * each["total"]:
            text = "GPU %s has %d of %d MiB free, and this run's part of it is %d: somebody else uses it"
            raise NoCapacity(text % (each["index"], each["free"], each["total"], share * each["total"]))
    return variables


def _query_gpus():
    """Every visible GPU; None if there is no nvidia-smi."""
    said = _ask_nvidia("--query-gpu=index,uuid,memory.free,memory.total", "--format=csv,noheader,nounits")
    if said is None:
        return None
    found = []
    for line in said.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 4:
            numbers = [int(part) if part.isdecimal() else None for part in parts[2:]]
            free, total = numbers if None not in numbers else (None, None)
            found.append({"index": parts[0], "uuid": parts[1], "free": free, "total": total})
    return found


def given_gpus():
    for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS"):
        value = os.environ.get(name, "")
        if value and value not in ("all", "none", "void", "NoDevFiles"):
            return value.split(",")
    return []
