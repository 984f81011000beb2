"""Jobs by the beginning of their id, on whichever target they lie, and where this machine launched them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from runtime.client.jobs.roots import open_target
from runtime.client.jobs.targets import find_target, list_targets
from runtime.errors import InfrastructureFailure, NotPossible, UnknownName
from runtime.jobs import ledger
from runtime.jobs.ledger import LedgerEntry
from runtime.jobs.plan import Target
from runtime.launchers.registry import get_launcher
from runtime.values import replace

if TYPE_CHECKING:
    from runtime.config import Settings
from runtime.client.jobs.handle import JobHandle
from runtime.client.jobs.prepare import make_context

SHORTEST_PREFIX: Final = 4


class TargetSilent(InfrastructureFailure):
    """The target that a job was launched on does not answer, so nothing is known of the job."""

    def __init__(self, job: str, target: Target, problem: InfrastructureFailure) -> None:
        self.job, self.target, self.problem = job, target, problem
        super().__init__(
            f"nobody knows how job `{job}` stands: target `{target.name}` does not answer: {problem.message}",
            facts=problem.facts,
            hint=problem.hint or f"runtime targets check {target.name}",
            retryable=problem.retryable,
        )


def find_job(text: str, *, settings: Settings | None = None, target: str | None = None) -> JobHandle:
    """The job of that id or beginning of an id, on whichever target of the project it lies.

    The target that it was launched on from here is looked at first; another that does not answer is passed over. Raises
    `TargetSilent` if that target is the one that does not answer, and `UnknownName`.
    """
    from runtime.config import load_settings

    settings = settings or load_settings()
    known: list[str] = []
    silent: list[tuple[Target, InfrastructureFailure]] = []
    remembered = _remembered(text, settings)
    for each in [find_target(target, settings)] if target else _likely_targets(remembered, settings):
        launcher = get_launcher(each.kind)
        try:
            host = open_target(each, launcher, make_context(settings))
            jobs = ledger.list_jobs(host.files)
        except InfrastructureFailure as problem:
            if target:
                raise TargetSilent(text, each, problem) from problem
            silent.append((each, problem))
            continue
        found = [job for job in jobs if job.startswith(text)] if len(text) >= SHORTEST_PREFIX else []
        if len(found) == 1:
            return JobHandle(found[0], each, launcher, host)
        host.close()
        if found:
            raise NotPossible(
                f"`{text}` is the beginning of more than one job",
                facts=[f"it may be: {', '.join(found[:10])}"],
                hint="add letters until only one is left",
            )
        known += jobs
    for each, why in silent:
        if jobs := [job for job, there in remembered if there == each]:
            raise TargetSilent(jobs[0] if len(jobs) == 1 else text, each, why) from why
    unknown = UnknownName("job", text, known[:10], hint="`runtime status` lists the jobs that there are")
    unknown.facts = (*unknown.facts, *(f"target `{each.name}` does not answer: {why.message}" for each, why in silent))
    raise unknown


def remember_job(job: str, target: str, settings: Settings, *, records: str | None = None) -> None:
    """Keep on this machine where a job lies; a cache, and a folder that cannot be written stops nobody.

    `records` is a record root other than the target's own.
    """
    path = settings.data_dir / "launched" / job
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{target}\n{records or ''}", encoding="utf-8")
    except OSError:
        pass


def forget_job(job: str, settings: Settings) -> None:
    """Drop what `remember_job` kept, when a job is removed."""
    with contextlib.suppress(OSError):
        (settings.data_dir / "launched" / job).unlink()


def _remembered(text: str, settings: Settings) -> list[tuple[str, Target]]:
    """The jobs whose id begins so that were launched from here, each with its target."""
    known = {each.name: each for each in list_targets(settings)}
    found = []
    for path in (settings.data_dir / "launched").glob(f"{text}*") if len(text) >= SHORTEST_PREFIX else ():
        name, _, records = path.read_text(encoding="utf-8").strip().partition("\n")
        if name in known:
            found.append((path.name, replace(known[name], records=records) if records else known[name]))
    return found


def _likely_targets(remembered: Sequence[tuple[str, Target]], settings: Settings) -> list[Target]:
    """Every target, those of remembered jobs first."""
    first: list[Target] = []
    for _, target in remembered:
        if target not in first:
            first.append(target)
    return [*first, *(each for each in list_targets(settings) if each not in first)]


def check_owner(entry: LedgerEntry, me: str, *, others: bool, verb: str) -> None:
    """Raise `NotPossible` for a job of somebody else, unless that is meant."""
    if entry.owner != me and not others:
        raise NotPossible(
            f"job `{entry.id}` is `{entry.owner}`'s, and you are `{me}`", hint=f"`--others` to {verb} it all the same"
        )
