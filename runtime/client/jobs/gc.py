"""Garbage of a target: folders, done marks and secrets of jobs that ended long ago, leftover processes and native jobs,
and trees that no job uses any more.

`find_garbage` looks and decides, `remove` acts; `tidy` clears away what killed shims left, at each look of `status`. Jobs
that run are never touched, nor jobs of other people unless asked for; a job whose backend does not answer counts as running.
A job that the backend has and the ledger does not, a stray, is found by the backend's labels alone. It goes even if it runs,
since nothing else would ever end it: a launch writes its intent before it calls the backend, so no launch makes a stray.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from runtime.client.jobs.end_times import ended_silently, read_ends
from runtime.client.jobs.record_removal import clear_record, end_processes, list_claims, remove_ends
from runtime.client.jobs.targets import OpenTarget
from runtime.errors import InfrastructureFailure, NotPossible, StoreUnavailable
from runtime.jobs import ledger
from runtime.jobs.hosts.agent import MARKER
from runtime.jobs.hosts.base import AccessDenied, Files, LockLost
from runtime.jobs.hosts.local import find_python
from runtime.jobs.indices import open_runs
from runtime.jobs.ledger import JobStatus, LedgerEntry, job_folder
from runtime.jobs.lock import Lock
from runtime.jobs.log_follower import find_living
from runtime.jobs.plan import NativeState, OwnedResource
from runtime.jobs.run_config import find_unnoted
from runtime.jobs.spec import JobState
from runtime.launchers.base import Clears, ListsOwned, find_keeper
from runtime.launchers.job_status import ask, judge_jobs
from runtime.shim.bundle import build_shim
from runtime.shim.files import FOLDED
from runtime.units import count_noun, format_duration

SETTLED: Final = timedelta(minutes=2)
"""Age from which a running stray is taken for one: every cache of a shared folder shows its intent by then."""
CUT_OFF: Final = timedelta(hours=1)
"""Age from which a job that was never submitted counts as cut off: no launch takes longer to submit one."""
LIST_TREES: Final = (
    'own="${TMPDIR:-/tmp}/research-runtime-$(id -u)"; for folder in "$own" "$own"-*; do '
    # Another user may have taken the name, also with a link to a folder that is not to be cleared.
    '[ ! -L "$folder" ] && [ -d "$folder" ] && [ -O "$folder" ] || continue; '
    'find "$folder" -mindepth 1 -maxdepth 1 -type d -mmin +"$0" -exec du -sk {} + 2>/dev/null || true; done'
)
_NAMED: Final = 10
_LAUNCHED_S: Final = 15.0
"""How long to wait for a launch of a stray; a dead one's lock is taken over in this time."""
_CODE: Final = (
    'cd "$0/snapshots" 2>/dev/null || exit 0; '
    'find . -type f -user "$(id -u)" -name "*.tar" -exec du -k {} + 2>/dev/null || true'
)
UNWRITTEN: Final = (
    'cd "$0/jobs" 2>/dev/null || exit 0; for folder in j-*/; do [ -O "$folder" ] && [ ! -e "$folder/intent.json" ] && '
    'find "$folder" -maxdepth 0 -mmin +"$1"; done; true'
)
"""Lists folders of launches that were cut off before they had written their intent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Garbage:
    kind: str
    """`job`, `native`, `tree`, `code`, `processes` or `secrets`; `native` is a stray, the last two are left by a killed
    shim."""
    name: str
    """The job's id, the tree's path on the target, or the snapshot's name in the record root."""
    target: str
    what: str
    """The job's name, or the content id of a tree or a snapshot."""
    state: JobState | None = None
    """`running` for a stray that has not ended, and None for one that has."""
    ended_at: datetime | None = None
    size_bytes: int = 0


def find_garbage(
    place: OpenTarget,
    *,
    owner: str | None,
    older_than: timedelta,
    now: datetime,
    tell: Callable[[str], None] = lambda text: None,
) -> list[Garbage]:
    """List garbage of `owner`, or of everybody if None, that ended longer than `older_than` ago on this target.

    `tell` gets a line for each running job without a record that is too young to be garbage.
    """
    files, target = place.files, place.target.name
    # Before the ledger, which has every job by the time its backend does.
    owned = _list_owned(place, owner)
    known = ledger.list_jobs(files)
    entries = ledger.read_many_entries(files, known)
    judged = _judge_closely([each for each in entries if owner in (None, each.owner)], place, tell)
    mine = [status for status, _ in judged]
    ended = read_ends(files, mine, before=now - older_than)
    old = [status for status in mine if status.state.terminal and now - ended[status.entry.id] >= older_than]
    lost = {status.entry.id for status, natives in judged if _can_go_on(status, natives, place)}
    if left := [status.entry.id for status in old if status.entry.id in lost]:
        tell(_report_lost(left))
    old = [status for status in old if status.entry.id not in lost]
    longest = max(older_than, CUT_OFF)
    aged = [each for each in mine if not each.state.terminal and now - each.entry.launched_at >= longest]
    old += _find_unsubmitted(aged, place, owned)
    living = _find_living(old, place, owned)
    old = [status for status in old if status.entry.id not in living]
    # Processes come first: nothing would find them without the folder.
    found = list(_find_leftovers(place, mine, [status for status in mine if status not in old]))
    found += [
        Garbage(
            kind="job",
            name=status.entry.id,
            target=target,
            what=status.entry.name,
            state=status.state,
            ended_at=ended[status.entry.id],
            size_bytes=_size(files, status.entry.id),
        )
        for status in old
    ]
    found += _find_strays(place, owned, {entry.id for entry in entries}, older_than=older_than, now=now, tell=tell)
    taken = {each.name for each in found if each.kind in ("job", "native")}
    if find_keeper(place.launcher):
        taken |= {job for job, each in owned.items() if _lives(each)}
    found += _find_half_removed(place, owner, taken)
    found += _find_unwritten(place, {each.name for each in found} | owned.keys(), longest)
    gone = {each.name for each in found if each.kind == "job"}
    used = _list_used(entry for entry in entries if entry.id not in gone)
    common = itertools.chain(_find_trees(place, older_than), _find_code(place))
    return found + [each for each in common if each.what not in used]


def _list_used(entries: Iterable[LedgerEntry]) -> set[str]:
    """The content ids of the code of jobs, without `sha256:`."""
    return {entry.snapshot.partition(":")[2] for entry in entries if entry.snapshot}


def _find_unsubmitted(
    statuses: Iterable[JobStatus], place: OpenTarget, owned: Mapping[str, Sequence[OwnedResource]]
) -> list[JobStatus]:
    """List jobs whose launch was cut off before it submitted anything, as far as the record and the backend know."""
    files = place.files
    silent = [
        each
        for each in statuses
        if not each.entry.natives and each.entry.id not in owned and not ledger.has_begun(files, each.entry.id)
    ]
    names = {str(part): each.entry.id for each in silent for part in each.entry.intent.get("parts", ())}
    there = place.launcher.find(place.target, list(names), place.host) if names else {}
    submitted = {names[name] for name in there}
    return [each for each in silent if each.entry.id not in submitted]


def _judge(
    entries: Sequence[LedgerEntry], place: OpenTarget, lives: Callable[[LedgerEntry], bool | None] = lambda entry: None
) -> list[tuple[JobStatus, list[NativeState]]]:
    return judge_jobs(entries, place.target, place.launcher, place.host, tell=lambda problem: None, lives=lives)


def _judge_closely(
    entries: Sequence[LedgerEntry], place: OpenTarget, tell: Callable[[str], None] = lambda text: None
) -> list[tuple[JobStatus, list[NativeState]]]:
    """Judge jobs after watching those that cannot be seen from here for a sign of life, all at once."""
    unseen: dict[str, list[int]] = {}
    judged = _judge(entries, place, lambda entry: unseen.update({entry.id: open_runs(entry, cancelled=True)}))
    if not unseen:
        return judged
    living = find_living(place.files, unseen, tell)
    return _judge(entries, place, lambda entry: entry.id in living if entry.id in unseen else None)


def _can_go_on(status: JobStatus, natives: Sequence[NativeState], place: OpenTarget) -> bool:
    """Whether `runtime keep` would take the job up: it was lost, and has not ended."""
    from runtime.client.jobs.reconcile import ReconcileAction, decide_keep

    # Native jobs are not looked up for jobs whose runs all have results.
    if not place.launcher.resumes or not open_runs(status.entry):
        return False
    return decide_keep(status.entry, natives, resumes=True).act is ReconcileAction.TAKE_UP


def _report_lost(jobs: Sequence[str]) -> str:
    named = ", ".join(f"`{job}`" for job in jobs[:_NAMED]) + (", …" if len(jobs) > _NAMED else "")
    stay = f"{count_noun(len(jobs), 'lost job')} can go on and {'stays' if len(jobs) == 1 else 'stay'}"
    return f"{stay}: {named}; `runtime keep` takes up what is lost, and `runtime cancel` gives it up"


def _size(files: Files, job: str) -> int:
    return sum(size for _, size in files.tree(job_folder(job)))


def _find_leftovers(place: OpenTarget, mine: Sequence[JobStatus], kept: Sequence[JobStatus]) -> Iterator[Garbage]:
    """List leftovers of killed shims, even of jobs that ended just now; secrets go with the folder of a job that is not kept."""
    running = _find_processes(mine, place)
    holding = {each.entry.id for each in _find_secrets(kept, place.files)}
    for status in mine:
        job, name = status.entry.id, status.entry.name
        for kind in ["processes"] * (job in running) + ["secrets"] * (job in holding):
            yield Garbage(kind=kind, name=job, target=place.target.name, what=name, state=status.state)


def _find_half_removed(place: OpenTarget, owner: str | None, known: set[str]) -> list[Garbage]:
    """List jobs with an interrupted removal."""
    files = place.files
    marks = {f"{job_folder(job)}/{ledger.REMOVING}": job for job in ledger.list_jobs(files) if job not in known}
    jobs = [marks[name] for name, mark in files.read_many(list(marks)).items() if owner in (None, _remover(mark))]
    return [
        Garbage(kind="job", name=job, target=place.target.name, what="half removed", size_bytes=_size(files, job))
        for job in jobs
    ]


def _find_unwritten(place: OpenTarget, known: set[str], older_than: timedelta) -> Iterator[Garbage]:
    """List folders of this user without an intent, of jobs that the backend does not have."""
    minutes = str(int(older_than.total_seconds() // 60))
    try:
        lines = place.host.run(["sh", "-c", UNWRITTEN, place.files.root, minutes]).out.splitlines()
    except InfrastructureFailure:
        return  # as with a bucket
    for job in sorted({line.strip("/") for line in lines} & set(ledger.list_jobs(place.files)) - known):
        size = _size(place.files, job)
        yield Garbage(kind="job", name=job, target=place.target.name, what="never written", size_bytes=size)


def _remover(mark: bytes) -> str:
    """The user who removes a job, from its mark; a mark that was left on a full disk is a second name of the intent."""
    try:
        return str(json.loads(mark)["owner"])
    except (ValueError, TypeError, KeyError):
        return mark.decode()


def _list_owned(place: OpenTarget, owner: str | None) -> Mapping[str, list[OwnedResource]]:
    """Job → what the backend holds of it by its own labels; empty for a backend without any."""
    found: dict[str, list[OwnedResource]] = {}
    if isinstance(place.launcher, ListsOwned):
        for each in place.launcher.owned(place.target, place.host, owner=owner):
            found.setdefault(each.job, []).append(each)
    return found


def _lives(owned: Iterable[OwnedResource]) -> bool:
    return any(each.live for each in owned)


def _find_strays(
    place: OpenTarget,
    owned: Mapping[str, list[OwnedResource]],
    known: set[str],
    *,
    older_than: timedelta,
    now: datetime,
    tell: Callable[[str], None] = lambda text: None,
) -> Iterator[Garbage]:
    """List jobs of the backend that the ledger does not have. A root without its marker proves nothing missing."""
    files = place.files
    unknown = {job: each for job, each in owned.items() if job not in known}
    if not unknown or files.read(MARKER) is None:
        return
    for job, each in sorted(unknown.items()):
        live, since = _lives(each), min(one.since for one in each)
        age = min(older_than, SETTLED) if live else older_than
        # The backend's clock may be ahead of ours.
        young = max(now - since, timedelta(0)) < age
        if (young and not live) or _is_known(files, job):
            continue
        if young:
            tell(f"job `{job}` runs without a record; a call later than {format_duration(age)} after its start ends it")
        else:
            what = f"{each[0].what} {each[0].native_id}, of no job that is known"
            state, ended_at = (JobState.RUNNING, None) if live else (None, since)
            yield Garbage(kind="native", name=job, target=place.target.name, what=what, state=state, ended_at=ended_at)


def _is_known(files: Files, job: str) -> bool:
    """Whether the ledger has the job, also one that we may not read."""
    try:
        return "intent.json" in files.names(job_folder(job))
    except AccessDenied:
        return True


def _find_living(
    statuses: Sequence[JobStatus], place: OpenTarget, owned: Mapping[str, list[OwnedResource]]
) -> set[str]:
    """Find jobs with a living native job, though every run has its result."""
    listed = {job for status in statuses if _lives(owned.get(job := status.entry.id, ()))}
    if find_keeper(place.launcher):
        return listed
    homes = {
        native.native_id: job
        for job, natives in ledger.read_natives(place.files, [status.entry for status in statuses]).items()
        for native in natives
    }
    said = ask(list(homes), place.target, place.launcher, place.host)
    living = [each.native_id for each in said if not each.state.terminal]
    return listed | {homes.get(each) or homes[each.rpartition("_")[0]] for each in living}


def fold(place: OpenTarget, *, owner: str | None) -> int:
    """Put the small files of ended jobs into one file each, unless a shim did so, and return the number of jobs.

    Nothing is lost by it, and `runtime retry` takes the file apart again.
    """
    if find_keeper(place.launcher):
        return 0  # its pods alone see the record root, and fold it themselves
    entries = ledger.read_many_entries(place.files, ledger.list_jobs(place.files))
    statuses = [each for each, _ in _judge(entries, place) if owner in (None, each.entry.owner)]
    ended = [each for each in statuses if each.state.terminal and len(each.entry.outcomes) >= each.entry.indices]
    jobs = sorted({each.entry.id for each in ended} - _find_living(ended, place, {}))
    python = find_python(place.target.settings, place.host)
    done = 0
    for first in range(0, len(jobs), 1000):
        words = [python, "-", place.files.root, "--fold", *jobs[first : first + 1000]]
        done += len(place.host.run(words, stdin=build_shim(), timeout_s=3600).out.split())
    return done


def _find_trees(place: OpenTarget, older_than: timedelta) -> Iterator[Garbage]:
    """List read-only trees that attempts shared, on the machine that submits."""
    minutes = str(int(older_than.total_seconds() // 60))
    try:
        lines = place.host.run(["sh", "-c", LIST_TREES, minutes]).out.splitlines()
    except InfrastructureFailure:
        return
    for path, name, size in _read_sizes(lines):
        yield Garbage(kind="tree", name=path, target=place.target.name, what=name, size_bytes=size)


def _find_code(place: OpenTarget) -> Iterator[Garbage]:
    """List our snapshots. A launch that has just begun may use one of them, and then stores it again."""
    files = place.files
    try:
        lines = place.host.run(["sh", "-c", _CODE, files.root]).out.splitlines()
    except InfrastructureFailure:
        # As with a bucket, whose files have no users.
        lines = [f"{-(-size // 1024)}\t{name}" for name, size in files.tree("snapshots") if name.endswith(".tar")]
    for _, name, size in _read_sizes(lines):
        snapshot = ledger.snapshot_name(name)
        yield Garbage(kind="code", name=snapshot, target=place.target.name, what=name, size_bytes=size)


def _read_sizes(lines: Iterable[str]) -> Iterator[tuple[str, str, int]]:
    """Yield path, content id and bytes of each line of `du -k` with a content id at its end."""
    for line in lines:
        size, _, path = line.partition("\t")
        name = path.rpartition("/")[2].removesuffix(".tar")
        if size.isdecimal() and len(name) == 64:
            yield path, name, int(size) * 1024


def remove_all(found: Iterable[Garbage], place: OpenTarget, *, owner: str) -> Iterator[tuple[Garbage, list[str]]]:
    """Remove what was found some time ago, unless it has come to be used since; yields each with what is left of it.

    Interrupted and run again, it removes the rest.
    """
    shared = []
    for each in found:
        if each.kind in ("tree", "code"):
            shared.append(each)
        else:
            yield each, remove(each, place, owner=owner)
    used = _list_used(ledger.read_many_entries(place.files, ledger.list_jobs(place.files))) if shared else set()
    for each in shared:
        if each.what in used:
            yield each, [f"{each.kind} {each.what[:12]}: a job uses it"]
        else:
            yield each, remove(each, place, owner=owner)


def remove(garbage: Garbage, place: OpenTarget, *, owner: str) -> list[str]:
    """Remove it, and return descriptions of leftovers."""
    files, job = place.files, garbage.name
    match garbage.kind:
        case "tree":
            words = [find_python(place.target.settings, place.host), "-", place.files.root, "--drop", garbage.name]
            if garbage.name not in place.host.run(words, stdin=build_shim(), timeout_s=600).out.splitlines():
                return [f"tree {garbage.what[:12]}: an attempt on this machine uses it"]
        case "code":
            files.remove(garbage.name)
        case "secrets":
            entry = ledger.read_entry(files, job)
            judged = _judge_closely([entry] if entry else [], place)
            holding = _find_secrets([status for status, _ in judged], files)
            if any(not _remove_secrets(status, files, owner) for status in holding):
                return [f"the files of secrets of job `{job}`: it is being started again"]
        case "processes":
            return end_processes(job, place)
        case _:
            return _remove_job(garbage, place, owner)
    return []


def _remove_job(garbage: Garbage, place: OpenTarget, owner: str) -> list[str]:
    """Remove a job, unless it has changed since it was found; nobody launches it or starts it again meanwhile."""
    job = garbage.name
    lock = Lock(place.files, job, owner)
    try:
        lock.take(patience_s=_LAUNCHED_S, wait=False)
    except NotPossible:
        return [f"job `{job}`: it is being launched"]
    except StoreUnavailable:
        if left := _make_room(garbage, place):
            return left
        lock.take(patience_s=_LAUNCHED_S, wait=False)
    try:
        claims = list_claims(job, place)
        changed = _find_change(garbage, place)
        if changed or not lock.is_held():
            return [f"job `{job}`: {changed or 'another command is at work on it'}"]
        # First, for without the ledger nobody would look for it.
        if left := _remove_natives(garbage, place):
            return left
        if left := clear_record(job, place, lock, owner=owner, claims=claims):
            return left
        # The lock goes with the folder: after that, a lock in it would be another's.
        lock.stop()
        lock.files().remove(job_folder(job))
    except LockLost:
        return [f"job `{job}`: another command is at work on it"]
    finally:
        lock.release()
    return []


def _make_room(garbage: Garbage, place: OpenTarget) -> list[str]:
    """Remove files of a job from a full disk, where nobody can launch it either, so that there is room for the lock."""
    files, job = place.files, garbage.name
    if changed := _find_change(garbage, place):
        return [f"job `{job}`: {changed}"]
    files.remove(f"{job_folder(job)}/runs")  # `done` has how they ended
    if files.read_from(f"{job_folder(job)}/{FOLDED}", 0, 1):
        # All that is known of the job goes with this file, so what only its record leads to goes first.
        if left := _remove_natives(garbage, place):
            return left
        remove_ends(job, files)
        files.remove(f"{job_folder(job)}/{FOLDED}")
    return []


def _find_change(garbage: Garbage, place: OpenTarget) -> str:
    """Say what has become of a job since it was found to be garbage, if it is none any more."""
    files, job = place.files, garbage.name
    if garbage.kind == "native":
        return "it is known again" if _is_known(files, job) else ""
    if garbage.state is None:
        half = files.read(f"{job_folder(job)}/{ledger.REMOVING}") is not None
        return "" if half or not _is_known(files, job) else "it was launched again"
    entry = ledger.read_entry(files, job)
    if entry is None:
        return ""
    if garbage.state is JobState.PENDING:
        return "it was submitted just now" if entry.natives or ledger.has_begun(files, job) else ""
    ((status, natives),) = _judge_closely([entry], place)
    # A job that was started again has no result, or another one.
    if not status.state.terminal or _may_live(status, place) or _can_go_on(status, natives, place):
        return "it was started again"
    return "" if read_ends(files, [status])[job] == garbage.ended_at else "it was started again, and has ended"


def _may_live(status: JobStatus, place: OpenTarget) -> bool:
    """Whether a native job lives that the record does not name, because a retry was cut off before it could note it."""
    job, launcher = status.entry.id, place.launcher
    if not find_unnoted(_read_order(place.files, job), status.entry) and find_keeper(launcher) is None:
        return False
    # A backend that cannot be asked may have it.
    return not isinstance(launcher, ListsOwned) or _lives(launcher.owned(place.target, place.host, job=job))


def _read_order(files: Files, job: str) -> dict[str, Any]:
    """The job's order, which a retry writes before it calls the backend; empty if it is damaged."""
    with contextlib.suppress(ValueError):
        found = json.loads(files.read(f"{job_folder(job)}/order.json") or b"{}")
        return found if isinstance(found, dict) else {}
    return {}


def _remove_natives(garbage: Garbage, place: OpenTarget) -> list[str]:
    """End and remove what the backend has of a job, if nothing else would; returns what is left, in words."""
    launcher = place.launcher if garbage.kind == "native" else find_keeper(place.launcher)
    if not isinstance(launcher, ListsOwned) or garbage.state is JobState.PENDING:
        return []
    return launcher.remove(place.target, launcher.owned(place.target, place.host, job=garbage.name), place.host)


def tidy(statuses: Iterable[JobStatus], place: OpenTarget, *, owner: str) -> None:
    """Clear away leftovers of ended jobs of `owner`. If the target refuses, they stay until the next time."""
    mine = [each for each in statuses if each.entry.owner == owner]
    with contextlib.suppress(InfrastructureFailure):
        for job in _find_processes(mine, place):
            end_processes(job, place)
    with contextlib.suppress(InfrastructureFailure):
        for status in _find_secrets(mine, place.files):
            _remove_secrets(status, place.files, owner)


def _find_processes(statuses: Iterable[JobStatus], place: OpenTarget) -> list[str]:
    """List jobs without a living shim that still have processes on this host."""
    silent = [each.entry.id for each in statuses if ended_silently(each)]
    if not silent or not isinstance(place.launcher, Clears):
        return []
    return place.launcher.find_leftovers(place.target, silent, place.host)


def _find_secrets(statuses: Iterable[JobStatus], files: Files) -> list[JobStatus]:
    """List ended jobs that still have files of secrets."""
    ended = [each for each in statuses if each.state.terminal and each.entry.intent.get("secrets")]
    return [each for each in ended if files.names(f"{job_folder(each.entry.id)}/secrets")]


def _remove_secrets(status: JobStatus, files: Files, owner: str) -> bool:
    """Remove the values of an ended job; False if it is being started again, which reads them once more."""
    job = status.entry.id
    lock = Lock(files, job, owner)
    try:
        lock.take(patience_s=0)
    except NotPossible:
        return False
    try:
        now = ledger.read_entry(files, job)
        if now is None or len(now.outcomes) < len(status.entry.outcomes):
            return False
        if status.entry.natives and now.natives != status.entry.natives:
            return False
        files.remove(f"{job_folder(job)}/secrets")
    finally:
        lock.release()
    return True
