"""GPUs of this machine: which are free, and which are ours."""

import errno
import io
import json
import os
import random
import socket
import subprocess
import time

from runtime.shim.files import drop_file, list_names, read_json, token
from runtime.shim.processes import boot_id, is_alive, is_group_alive, started_at
from runtime.shim.words import LOOK_S, NoCapacity, SetupFailed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Dict

GPU_PATIENCE_S = 15.0
"""How long to wait for memory that another run of the same GPU gives back as it ends."""
GPU_CLAIMS = "/tmp/research-runtime-gpus"
"""The same for every user of a machine, independent of TMPDIR."""


class GpuShare(object):
    """GPUs of this machine, or a part of one, that are ours until `drop`.

    A claim is a file in a folder that all users of the machine can write to. A shim writes its claim first and then looks
    at all others: of two that overlap, the one that looks last sees the other, drops its claim and tries again. A claim
    counts while its shim or a command of it lives in this boot of the machine, so nothing has to be cleaned up.
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
        self._write()

    def variables(self):
        names = ",".join(each for each in self.devices if each in self.claim["gpus"])
        return {"CUDA_VISIBLE_DEVICES": names, "NVIDIA_VISIBLE_DEVICES": names}

    def drop(self):
        drop_file(self.path)

    def _write(self):
        temporary = os.path.join(self.folder, "new." + os.path.basename(self.path))
        with io.open(temporary, "w", encoding="utf-8") as opened:
            opened.write(json.dumps(self.claim, sort_keys=True))
        os.chmod(temporary, 0o644)
        os.rename(temporary, self.path)

    def _used(self):
        """GPU → the part of it that others have."""
        used: Dict[str, float] = {}
        for name in list_names(self.folder):
            path = os.path.join(self.folder, name)
            if not name.startswith("claim.") or path == self.path:
                continue
            try:
                claim = read_json(path)
            except (IOError, OSError, ValueError):
                continue  # given back since the listing
            if is_alive(claim) or any(is_group_alive(group) for group in claim["groups"]):
                for each, share in claim["gpus"].items():
                    used[each] = used.get(each, 0.0) + share
            else:
                drop_file(path)
        return used


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
            numbers = [int(part) if part.isdigit() else None for part in parts[2:]]
            free, total = numbers if None not in numbers else (None, None)
            found.append({"index": parts[0], "uuid": parts[1], "free": free, "total": total})
    return found


def given_gpus():
    for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS"):
        value = os.environ.get(name, "")
        if value and value not in ("all", "none", "void", "NoDevFiles"):
            return value.split(",")
    return []
