"""Whether a target works: every step of a launch tried for real, down to a probe job that runs there.

The probe is a job like any other: a snapshot with one unique file, launched, followed, read back, removed. A step that
fails has a hint, and the steps that depend on it are left out.
"""

from __future__ import annotations

import contextlib
import fcntl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import Final

from runtime.client.jobs.explain import describe_room, explain, read_facts
from runtime.client.jobs.handle import JobHandle
from runtime.client.jobs.job_cache import forget_job
from runtime.client.jobs.launch import carry_out
from runtime.client.jobs.prepare import LaunchOptions, PreparedLaunch, prepare
from runtime.client.jobs.status import read_attempts
from runtime.client.jobs.targets import OpenTarget, find_target, make_context, open_target
from runtime.config import Settings
from runtime.errors import InfrastructureFailure, InvalidValue, RuntimeFailure
from runtime.file_trust import write_private
from runtime.jobs import ledger
from runtime.jobs.hosts.base import Files, FreeSpace
from runtime.jobs.ledger import job_folder, read_object
from runtime.jobs.spec import Gpus, JobResources, JobSpec, JobState, Outputs
from runtime.system import system
from runtime.units import format_duration

LITTLE_SPACE: Final = 2 * 1024**3
FEW_FILES: Final = 1000
"""A job that runs takes some 25 entries, and each run of an array 10, until they have ended."""
CLEAN_UP: Final = timedelta(minutes=1)
"""Added to the probe's patience before the backend ends the probe itself, if it can."""
SKEW_S: Final = 30.0
"""No code compares two machines' clocks; people who read two logs do."""
_SCRIPT: Final = """
echo "probe clock $(date +%s)"
echo "probe host $(uname -n) $(uname -sm)"
echo "probe scratch $(df -Pk . | awk 'NR == 2 {print $4}')"
echo "probe gpus $( (nvidia-smi -L 2>/dev/null || true) | grep -c '^GPU' )"
echo "probe visible ${CUDA_VISIBLE_DEVICES:-}"
cat token > "$RUNTIME_OUTPUT_DIR/token" && echo "probe wrote yes"
"""


class CheckVerdict(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckStep:
    step: str
    """`settings`, `connection`, `records`, `launch`, `interpreter`, `run`, `write`, `read`, `space`, `gpus`, `clock`, `cleanup`"""
    verdict: CheckVerdict
    text: str
    hint: str | None = None


def _ok(step: str, text: str) -> CheckStep:
    return CheckStep(step=step, verdict=CheckVerdict.OK, text=text)


def _warn(step: str, text: str, hint: str) -> CheckStep:
    return CheckStep(step=step, verdict=CheckVerdict.WARN, text=text, hint=hint)


def _fail(step: str, text: str, hint: str | None = None) -> CheckStep:
    return CheckStep(step=step, verdict=CheckVerdict.FAIL, text=text, hint=hint)


def _failed(step: str, problem: RuntimeFailure) -> CheckStep:
    facts = f" ({'; '.join(problem.facts)})" if problem.facts else ""
    return _fail(step, problem.message + facts, problem.hint)


def check_target(
    name: str,
    settings: Settings,
    *,
    patience: timedelta = timedelta(minutes=10),
    gpus: float | None = None,
    new_records: bool = False,
) -> Iterator[CheckStep]:
    """Try the target `name`, and yield each step when it is done. The probe job asks for `gpus`. With `new_records` the
    record root may be another one than was used before."""
    if gpus:
        try:
            Gpus(count=gpus)
        except ValueError:
            raise InvalidValue("gpus", f"{gpus:g}", "whole GPUs, or a part of one such as 0.25") from None
    try:
        target = find_target(name, settings)
        yield _ok("settings", f"launcher `{target.kind}`")
    except RuntimeFailure as problem:
        yield _failed("settings", problem)
        return
    try:
        place = open_target(target, make_context(settings), new_records=new_records)
    except RuntimeFailure as problem:
        yield _failed("connection", problem)
        return
    with place:
        yield from _check(place, settings, patience, gpus)


def _check(place: OpenTarget, settings: Settings, patience: timedelta, gpus: float | None) -> Iterator[CheckStep]:
    try:
        yield _try_records(place.files)
    except RuntimeFailure as problem:
        # The first request to a host also finds out whether it answers.
        yield _failed("connection" if isinstance(problem, InfrastructureFailure) else "records", problem)
        return
    yield _try_space("space", place.files.room(), f"in the record root `{place.files.root}`")
    with tempfile.TemporaryDirectory(prefix="runtime-probe-") as folder:
        # No other tree has this file, so the probe never equals an earlier job.
        token = system.urandom(16).hex()
        (Path(folder) / "token").write_text(token + "\n")
        spec = JobSpec(
            command=("sh", "-c", _SCRIPT),
            name="targets-check",
            outputs=Outputs(),
            resources=JobResources(gpus=Gpus(count=gpus)) if gpus else JobResources(),
        )
        options = LaunchOptions(base=Path(folder), lifetime=patience + CLEAN_UP)
        try:
            prepared = prepare(spec, place.target, settings, options)
        except RuntimeFailure as problem:
            yield _failed("launch", problem)
            return
        yield from _run_probe(prepared, place, settings, token, patience, gpus)


def _run_probe(
    prepared: PreparedLaunch, place: OpenTarget, settings: Settings, token: str, patience: timedelta, gpus: float | None
) -> Iterator[CheckStep]:
    plan, began = prepared.plan, system.time()
    probe = JobHandle(plan.job.id, plan.target, prepared.launcher, place.host)
    _clean_up_earlier(probe, settings)
    with _remembered(probe, settings):
        cleanup = None
        try:
            try:
                job = carry_out(prepared, LaunchOptions(assume_yes=True))
            except RuntimeFailure as problem:
                yield _failed("launch", problem)
                return
            with job:
                yield _ok("launch", f"probe job {job.id} was taken")
                yield from _watch_probe(job, token, began, patience, gpus)
            cleanup = _clean_up(probe, settings)
            yield cleanup
        finally:
            if cleanup is None:
                _clean_up(probe, settings)


def _try_records(files: Files) -> CheckStep:
    """Write, read back, refuse the second creation, remove."""
    name, text = f"probe-{system.urandom(8).hex()}", system.urandom(32)
    try:
        first, second, read = files.create(name, text), files.create(name, b"twin"), files.read(name)
    finally:
        files.remove(name)
    if not first or second or read != text:
        return _fail(
            "records",
            f"`{files.root}` lets a second creation of one name through, or reads back something else",
            "name another record root: `records` of the target; a folder needs hard links, a bucket preconditions",
        )
    return _ok("records", f"`{files.root}` is written, read back and creates once")


def _try_space(step: str, room: FreeSpace, where: str) -> CheckStep:
    if room.bytes is None:
        return _ok(step, f"no limit {where}")
    little = room.bytes < LITTLE_SPACE or (room.files is not None and room.files < FEW_FILES)
    text = f"{describe_room(room)} free {where}"
    return _warn(step, text, "runtime gc, or name another place") if little else _ok(step, text)


def _watch_probe(
    job: JobHandle, token: str, began: float, patience: timedelta, gpus: float | None
) -> Iterator[CheckStep]:
    try:
        status = job.wait(timeout=patience, stuck=True)
    except TimeoutError:
        said = explain(read_facts(job))
        text = f"it did not end within {format_duration(patience)}: {said.sentence}"
        yield _fail("run", text, said.hint or "--wait gives it longer")
        return
    except RuntimeFailure as problem:
        yield _failed("run", problem)
        return
    seen = system.time()
    attempts = read_attempts(job.files, job.id, 0)
    if status.state.terminal:
        yield _interpreter(job)
    if status.state is not JobState.SUCCEEDED:
        said = explain(read_facts(job))
        yield _fail("run", said.sentence, said.hint)
        for line in said.evidence:
            yield _fail("run", line)
        return
    lines = b"".join(job.logs()).decode("utf-8", "replace").splitlines()
    said_by = {words[1]: words[2] for line in lines if len(words := line.split(" ", 2)) == 3 and words[0] == "probe"}
    took = format_duration(seen - began)
    yield _ok("run", f"on {said_by.get('host', 'an unnamed host')}, {took} in all")
    yield _read_back(job, token, attempts[-1].attempt if attempts else 1)
    if said_by.get("scratch", "").isdecimal():
        yield _try_space("scratch", FreeSpace(int(said_by["scratch"]) * 1024), "where attempts run")
    yield _gpus(said_by, gpus)
    yield _clock(said_by, began, seen)


def _interpreter(job: JobHandle) -> CheckStep:
    start = read_object(job.files, f"{job_folder(job.id)}/runs/0/a0001/start.json")
    if not start:
        hint = f"set `python` of target `{job.target.name}` to one from 3.6 on"
        return _fail("interpreter", "the shim did not start", hint)
    return _ok("interpreter", f"Python {start.get('python', 'of some kind')} runs the shim")


def _read_back(job: JobHandle, token: str, attempt: int) -> CheckStep:
    content = job.files.read(f"{job_folder(job.id)}/runs/0/output/a{attempt:04d}/token") or b""
    if content.decode("utf-8", "replace").strip() == token:
        return _ok("read back", "code went there, and what it wrote came back")
    hint = "the nodes see another folder than the record root: `records` of the target"
    return _fail("read back", "what the job wrote is not what was sent", hint)


def _gpus(said: dict[str, str], wanted: float | None) -> CheckStep:
    count = int(said.get("gpus", "0").strip() or 0)
    visible = said.get("visible", "").strip()
    text = f"{count} visible" + (f", CUDA_VISIBLE_DEVICES={visible}" if visible else "")
    if wanted and not count:
        return _fail("gpus", text, "the driver's `nvidia-smi` lists none in the job")
    return _ok("gpus", text if count or visible else "none asked for, none visible")


def _clock(said: dict[str, str], began: float, seen: float) -> CheckStep:
    """Compare the node's clock with ours: its time lies between our two."""
    if not said.get("clock", "").isdecimal():
        return _warn("clock", "the node told no time", "see whether `date` is there")
    at = int(said["clock"])
    distance = max(0.0, began - (at + 1), at - seen)
    if distance > SKEW_S:
        hint = "harmless for jobs; times in logs of two machines do not compare"
        return _warn("clock", f"at least {format_duration(distance)} apart", hint)
    return _ok("clock", "no distance that can be seen" if not distance else "close")


def _clean_up(job: JobHandle, settings: Settings) -> CheckStep:
    """End the probe in any state and remove all of it. Safe to repeat."""
    try:
        entry = ledger.read_entry(job.files, job.id)
        if entry is not None and (left := job.cancel() or job.sweep()):
            return _fail("cleanup", f"left over: {'; '.join(left)}", f"runtime cancel {job.id[:10]}")
        if entry is not None and entry.snapshot is not None:
            job.files.remove(ledger.snapshot_name(entry.snapshot))
        for name in job.files.names("done", f"{job.id}."):
            job.files.remove(f"done/{name}")
        job.files.remove(job_folder(job.id))
        forget_job(job.id, settings)
        _note_of(job, settings).unlink(missing_ok=True)
    except RuntimeFailure as problem:
        return _failed("cleanup", problem)
    return _ok("cleanup", "nothing left")


@contextmanager
def _remembered(job: JobHandle, settings: Settings) -> Iterator[None]:
    """Note on this machine that a probe is under way, so that the next check ends it if this one is killed.

    A folder that cannot be written stops no check.
    """
    note = _note_of(job, settings)
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            write_private(note, "")
            opened = stack.enter_context(note.open("w"))
            fcntl.flock(opened, fcntl.LOCK_EX)
            opened.write(_place_of(job))
            opened.flush()
        yield


def _clean_up_earlier(job: JobHandle, settings: Settings) -> None:
    """End probes of the same place whose check was killed."""
    for note in sorted(_note_of(job, settings).parent.glob("j-*")):
        with contextlib.suppress(OSError), note.open() as opened:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held as long as its check lives
            if opened.read() == _place_of(job):
                _clean_up(JobHandle(note.name, job.target, job.launcher, job.host), settings)


def _note_of(job: JobHandle, settings: Settings) -> Path:
    return settings.data_dir / "probes" / job.id


def _place_of(job: JobHandle) -> str:
    return f"{job.target.name}\n{job.files.root}\n"
