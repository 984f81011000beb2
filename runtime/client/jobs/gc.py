"""What may go: folders, done marks and secrets of jobs that ended long ago, with what their backend still has of them, and
trees that no job uses any more.

`find_garbage` looks and decides, `remove` acts. What runs is never touched, nor, unless it is meant, what somebody else launched; a job whose
backend does not answer is taken to run.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

from runtime.client.jobs.leftovers import end_processes, find_processes, find_secrets, remove_secrets
from runtime.errors import InfrastructureFailure, StoreUnavailable
from runtime.jobs import ledger
from runtime.jobs.hosts.base import Files, Host
from runtime.jobs.hosts.local import find_python
from runtime.jobs.ledger import JobStatus, job_folder
from runtime.jobs.plan import Started, Target
from runtime.jobs.spec import JobState
from runtime.launchers.base import Launcher, Sweeps
from runtime.launchers.standing import ask, judge_many
from runtime.shim.files import FOLDED
from runtime.shim.program import build_shim
from runtime.values import dataclass

_TREES: Final = (
    'cd "${TMPDIR:-/tmp}/research-runtime-$(id -u)" 2>/dev/null || exit 0; '
    'find "$PWD" -mindepth 1 -maxdepth 1 -type d -mmin +"$0" -exec du -sk {} + 2>/dev/null || true'
)
_CODE: Final = (
    'cd "$0/snapshots" 2>/dev/null || exit 0; '
    'find . -type f -user "$(id -u)" -name "*.tar" -exec du -k {} + 2>/dev/null || true'
)
_REMOVE: Final = 'chmod -R u+rwx "$0" && rm -rf "$0"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Garbage:
    """One thing that may go."""

    kind: str
    """`job`, `native`, `tree`, `code`, `processes` or `secrets`; `native` is what a backend has of a job that is written
    down nowhere, the last two what a killed shim left of a job."""
    name: str
    """The job's id, the tree's path on the target, or the snapshot's name in the record root."""
    target: str
    what: str
    """The job's name; of a tree or a snapshot its content id."""
    state: JobState | None
    ended_at: datetime | None
    size_bytes: int


def find_garbage(
    target: Target, launcher: Launcher, host: Host, *, owner: str | None, older_than: timedelta, now: datetime
) -> list[Garbage]:
    """What of `owner`, None for everybody, ended longer than `older_than` ago on this target."""
    files = host.files
    # Before the ledger, which has every job by the time its backend does.
    started = _list_started(target, launcher, host, owner)
    known = ledger.list_jobs(files)
    entries = ledger.read_many_entries(files, known)
    mine = [status for status in judge_many(entries, target, launcher, host) if owner in (None, status.entry.owner)]
    ended = _read_ends(files, mine)
    old = [status for status in mine if status.state.terminal and now - ended[status.entry.id] >= older_than]
    living = _find_living(old, target, launcher, host, started)
    old = [status for status in old if status.entry.id not in living]
    # Processes come first: nothing would find them without the folder.
    found = list(_find_left(target, launcher, host, mine, [status for status in mine if status not in old]))
    found += [
        Garbage(
            kind="job",
            name=status.entry.id,
            target=target.name,
            what=status.entry.name,
            state=status.state,
            ended_at=ended[status.entry.id],
            size_bytes=sum(size for _, size in files.tree(job_folder(status.entry.id))),
        )
        for status in old
    ]
    taken = {each.name for each in found if each.kind == "job"} | {
        job for job in started or {} if _is_live(job, started or {})
    }
    found += _find_half_removed(files, target, owner, taken)
    strays = [each for job, each in (started or {}).items() if not each.live and job not in known]
    found += [_stray(each, target) for each in strays if now - each.at >= older_than]
    gone = {each.name for each in found if each.kind == "job"}
    used = {entry.snapshot for entry in entries if entry.id not in gone}
    common = itertools.chain(_find_trees(target, host, older_than), _find_code(target, host))
    return found + [each for each in common if f"sha256:{each.what}" not in used]


def _find_left(
    target: Target, launcher: Launcher, host: Host, mine: Sequence[JobStatus], kept: Sequence[JobStatus]
) -> Iterator[Garbage]:
    """What killed shims left, however recently their jobs ended; secrets go with the folder of a job that is not kept."""
    running = find_processes(mine, target, launcher, host)
    holding = {each.entry.id for each in find_secrets(kept, host.files)}
    for status in mine:
        kinds = ["processes"] * (status.entry.id in running) + ["secrets"] * (status.entry.id in holding)
        for kind in kinds:
            yield Garbage(
                kind=kind,
                name=status.entry.id,
                target=target.name,
                what=status.entry.name,
                state=status.state,
                ended_at=None,
                size_bytes=0,
            )


def _find_half_removed(files: Files, target: Target, owner: str | None, known: set[str]) -> list[Garbage]:
    """Jobs whose removal was interrupted."""
    marks = {f"{job_folder(job)}/{ledger.REMOVING}": job for job in ledger.list_jobs(files) if job not in known}
    return [
        Garbage(
            kind="job",
            name=marks[name],
            target=target.name,
            what="half removed",
            state=None,
            ended_at=None,
            size_bytes=sum(size for _, size in files.tree(job_folder(marks[name]))),
        )
        for name, content in files.read_many(list(marks)).items()
        if owner in (None, _remover(content))
    ]


def _remover(mark: bytes) -> str:
    """Who removes a job, as its mark says; one that was left on a full disk is a second name of the intent."""
    try:
        return str(json.loads(mark)["owner"])
    except (ValueError, TypeError, KeyError):
        return mark.decode()


def _stray(started: Started, target: Target) -> Garbage:
    return Garbage(
        kind="native",
        name=started.job,
        target=target.name,
        what="of no job that is known",
        state=None,
        ended_at=started.at,
        size_bytes=0,
    )


def _list_started(target: Target, launcher: Launcher, host: Host, owner: str | None) -> Mapping[str, Started] | None:
    """Job → what the backend has of it by its own labels; None of a backend without labels."""
    if not isinstance(launcher, Sweeps):
        return None
    return {each.job: each for each in launcher.list_started(target, host, owner=owner)}


def _is_live(job: str, started: Mapping[str, Started]) -> bool:
    return job in started and started[job].live


def _find_living(
    statuses: Sequence[JobStatus],
    target: Target,
    launcher: Launcher,
    host: Host,
    started: Mapping[str, Started] | None,
) -> set[str]:
    """Jobs of which a native job is still there, though every run has its result."""
    if started is not None:
        return {status.entry.id for status in statuses if _is_live(status.entry.id, started)}
    homes = {
        native.native_id: job
        for job, natives in ledger.read_natives(host.files, [status.entry for status in statuses]).items()
        for native in natives
    }
    living = [each.native_id for each in ask(list(homes), target, launcher, host) if not each.state.terminal]
    return {homes.get(each) or homes[each.rpartition("_")[0]] for each in living}


def fold(target: Target, launcher: Launcher, host: Host, *, owner: str | None) -> int:
    """Put the small files of jobs that have ended into one file each, where no shim did so; how many jobs that were.

    Jobs of earlier versions among them. Nothing is lost by it, and `runtime retry` takes them apart again.
    """
    if isinstance(launcher, Sweeps):
        return 0  # its pods alone see the record root, and fold it themselves
    entries = ledger.read_many_entries(host.files, ledger.list_jobs(host.files))
    statuses = [each for each in judge_many(entries, target, launcher, host) if owner in (None, each.entry.owner)]
    ended = [each for each in statuses if each.state.terminal and len(each.entry.outcomes) >= each.entry.indices]
    jobs = sorted({each.entry.id for each in ended} - _find_living(ended, target, launcher, host, None))
    python = find_python(target.settings, host)
    done = 0
    for first in range(0, len(jobs), 1000):
        words = [python, "-", host.files.root, "--fold", *jobs[first : first + 1000]]
        done += len(host.run(words, stdin=build_shim(), timeout_s=3600).out.split())
    return done


def _read_ends(files: Files, statuses: Iterable[JobStatus]) -> dict[str, datetime]:
    """Job → when its last result was committed; when it was launched, where it has none."""
    found, names = {}, {}
    for status in statuses:
        found[status.entry.id] = status.entry.launched_at
        for index in status.entry.outcomes:
            names[f"{job_folder(status.entry.id)}/runs/{index}/result"] = status.entry.id
    for name, result in ledger.read_objects(files, names).items() if names else ():
        at = datetime.fromtimestamp(result["at"], UTC)
        found[names[name]] = max(found[names[name]], at)
    return found


def _find_trees(target: Target, host: Host, older_than: timedelta) -> Iterator[Garbage]:
    """Read-only trees that attempts of one machine shared: those on the machine that submits."""
    minutes = str(int(older_than.total_seconds() // 60))
    try:
        lines = host.run(["sh", "-c", _TREES, minutes]).out.splitlines()
    except InfrastructureFailure:
        return
    for line in lines:
        size, _, path = line.partition("\t")
        name = path.rpartition("/")[2]
        if size.isdigit() and len(name) == 64:
            yield Garbage(
                kind="tree",
                name=path,
                target=target.name,
                what=name,
                state=None,
                ended_at=None,
                size_bytes=int(size) * 1024,
            )


def _find_code(target: Target, host: Host) -> Iterator[Garbage]:
    """Snapshots of ours. One of a launch that has just begun may be among them, which then stores it again."""
    try:
        lines = host.run(["sh", "-c", _CODE, host.files.root]).out.splitlines()
    except InfrastructureFailure:
        # As with a bucket, whose files have no users.
        lines = [f"{-(-size // 1024)}\t{name}" for name, size in host.files.tree("snapshots") if name.endswith(".tar")]
    for line in lines:
        size, _, path = line.partition("\t")
        name = path.rpartition("/")[2].removesuffix(".tar")
        if size.isdigit() and len(name) == 64:
            yield Garbage(
                kind="code",
                name=ledger.snapshot_name(name),
                target=target.name,
                what=name,
                state=None,
                ended_at=None,
                size_bytes=int(size) * 1024,
            )


def remove(garbage: Garbage, target: Target, launcher: Launcher, host: Host, *, owner: str) -> list[str]:
    """Take it away; what is left over, in words. Interrupted and run again, the rest goes too."""
    if garbage.kind == "tree":
        host.run(["sh", "-c", _REMOVE, garbage.name], timeout_s=600)
        return []
    if garbage.kind == "code":
        host.files.remove(garbage.name)
        return []
    if garbage.kind == "secrets":
        return _remove_secrets(garbage.name, target, launcher, host, owner)
    if garbage.kind == "processes":
        return end_processes(garbage.name, target, launcher, host)
    # First, for without the ledger nobody would look for it.
    if isinstance(launcher, Sweeps) and (left := launcher.sweep(target, garbage.name, host)):
        return left
    if garbage.kind == "native":
        return []
    files, folder = host.files, job_folder(garbage.name)
    # A killed shim may have left a tree, which only the folder knows.
    begun = {int(name) for name in files.names(f"{folder}/runs") if name.isdigit()}
    silent = begun - set(ledger.read_outcomes(files, garbage.name).get(garbage.name, {}))
    if silent and (left := end_processes(garbage.name, target, launcher, host)):
        return left
    try:
        ledger.leave_mark(files, garbage.name, ledger.REMOVING, owner.encode())
    except StoreUnavailable:
        # A full disk. How the runs ended is told by `done`, and without their folders there is room for the mark.
        files.remove(f"{folder}/runs")
        ledger.leave_mark(files, garbage.name, ledger.REMOVING, owner.encode())
    for name in files.names(folder):
        if name not in ("intent.json", ledger.REMOVING):
            files.remove(f"{folder}/{name}")
    files.remove(f"{folder}/{FOLDED}")
    # Before the folder: a mark that stayed behind would be taken for the end of the same job launched anew.
    for name in files.names("done", f"{garbage.name}."):
        files.remove(f"done/{name}")
    files.remove(folder)
    return []


def _remove_secrets(job: str, target: Target, launcher: Launcher, host: Host, owner: str) -> list[str]:
    entry = ledger.read_entry(host.files, job)
    for status in find_secrets(judge_many([entry] if entry else [], target, launcher, host), host.files):
        if not remove_secrets(status, host.files, owner=owner):
            return [f"the files of secrets of job `{job}`: it is being started again"]
    return []
