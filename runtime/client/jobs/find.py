"""Finds the job that a person means: by its id, its name, the beginning of its id, or `last`.

`open_job` alone decides it, for every command. A command that acts on the job, such as `cancel`, is stricter than one that
only looks: `last` is the last job of its own terminal, and a name has to fit one living job at most.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Final

from runtime.client.jobs.handle import SHORTEST_PREFIX, JobHandle, TargetSilent, find_job
from runtime.client.jobs.job_cache import JobLine, find_from_terminal, list_known, list_launched, list_out_of_reach
from runtime.client.jobs.targets import OpenTarget, find_target, list_usable_targets, make_context, open_target
from runtime.client.resolve_id import LAST
from runtime.config import Settings, load_settings
from runtime.errors import InfrastructureFailure, NotPossible, RuntimeFailure, UnknownName
from runtime.jobs import ledger
from runtime.jobs.ledger import job_folder
from runtime.jobs.plan import Target, owner_name
from runtime.jobs.spec import JobState
from runtime.jobs.spec_fields import ID_LETTERS
from runtime.launchers.job_status import judge_jobs
from runtime.system import system
from runtime.units import count_noun, format_duration

SHOWN: Final = 10
_WHOLE_ID: Final = re.compile(f"j-[0-9a-f]{{{ID_LETTERS}}}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A job that a name or the beginning of an id may mean."""

    job: str
    name: str
    target: Target
    owner: str
    launched_at: datetime
    state: JobState | None = None
    """None if nobody asked."""

    def describe(self) -> str:
        age = format_duration(max(0.0, (system.now() - self.launched_at).total_seconds()))
        state = f", {self.state}" if self.state not in (None, JobState.UNKNOWN) else ""
        return f"`{self.job}` {self.name or 'without a known name'} on {self.target.name}, launched {age} ago{state}"


class AmbiguousJob(NotPossible):
    """A text that means more than one job."""

    def __init__(self, message: str, candidates: Sequence[Candidate], *, hint: str) -> None:
        self.candidates = list(candidates)
        more = [f"and {len(candidates) - SHOWN} more"] if len(candidates) > SHOWN else []
        super().__init__(message, facts=[*(each.describe() for each in candidates[:SHOWN]), *more], hint=hint)


def open_job(
    text: str,
    *,
    settings: Settings | None = None,
    target: str | None = None,
    acting: bool = False,
    tell: Callable[[str], None] = lambda text: None,
) -> JobHandle:
    """Open the job that `text` means. An exact id goes first, then an exact name, then the beginning of one id.

    Of several jobs with the name the newest is opened, and `tell` gets a line about it; with `acting`, more than one that
    has not ended is refused, by asking their backends. Raises `AmbiguousJob`, `TargetSilent`, `UnknownName` with the known
    jobs, and the refusal of a target that cannot be used here.
    """
    settings = settings or load_settings()
    if text == LAST:
        text = _last_here(settings, target) if acting else _last(settings, target)
    elif not _WHOLE_ID.fullmatch(text):
        known = _list_candidates(settings, target, text)
        named = _named(text, known, settings, target, acting=acting)
        if named and acting:
            _refuse_beginning(text, named, known)
        if named:
            chosen = _choose(text, named, acting=acting, tell=tell)
            place = replace(find_target(chosen.target.name, settings), records=chosen.target.records)
            return find_job(chosen.job, settings=settings, target=place)
        if len(text) >= SHORTEST_PREFIX:
            begun = [each for each in known if each.job.startswith(text)]
            if len(begun) > 1:
                raise AmbiguousJob(
                    f"`{text}` is the beginning of more than one job",
                    _newest_first(begun),
                    hint="add letters until only one is left",
                )
    try:
        return find_job(text, settings=settings, target=target)
    except UnknownName as unknown:
        names = dict.fromkeys(each.name for each in list_launched(settings) if each.name)
        if names and unknown.kind == "job":
            unknown.facts = (*unknown.facts, f"names of jobs launched from here: {', '.join([*names][:SHOWN])}")
            _add_out_of_reach(unknown, text, settings)
        raise


@contextmanager
def open_jobs(text: str, *, target: str | None = None, tell: Callable[[str], None]) -> Iterator[list[JobHandle]]:
    """Open the job that `text` means; if that is a name, all jobs of the name on every target that may have one, oldest first.

    Their connections are closed at the end of the `with`. `tell` gets a line about jobs whose target cannot be asked here.
    Raises as `open_job`, and `TargetSilent` if one of several targets does not answer.
    """
    settings = load_settings()
    with ExitStack() as opened:
        newest = opened.enter_context(open_job(text, settings=settings, target=target))
        if text in (LAST, newest.id) or newest.entry().name != text:
            yield [newest]
            return
        known = [each for each in _list_candidates(settings, target, text) if each.name == text]
        named = [*reversed(_own(_ask_all(text, known, settings, target, judge=False)))]
        for fact in _list_out_of_reach(text, settings) if target is None else ():
            tell(f"left out, since nothing can be asked about it here: {fact}")
        if len({each.job for each in named} | {newest.id}) == 1:
            yield [newest]
            return
        where = ", ".join(dict.fromkeys(each.target.name for each in named))
        tell(f"`{text}` is the name of {count_noun(len(named), 'job')} on {where}; these are all of them")
        places: dict[tuple[str, str | None], OpenTarget] = {_key(newest.target): newest}
        for each in named:
            if _key(each.target) not in places:
                places[_key(each.target)] = opened.enter_context(open_target(each.target, make_context(settings)))
        there = [(each.job, places[_key(each.target)]) for each in named]
        yield [JobHandle(job, place.target, place.launcher, place.host) for job, place in there]


def _refuse_beginning(text: str, named: Sequence[Candidate], known: Sequence[Candidate]) -> None:
    """Raise `AmbiguousJob` if a name is also the beginning of another job's id."""
    others = [
        each for each in known if len(text) >= SHORTEST_PREFIX and each.job.startswith(text) and each.name != text
    ]
    if others:
        raise AmbiguousJob(
            f"`{text}` is the name of a job and the beginning of the id of another",
            [*named, *_newest_first(others)],
            hint="write the whole id",
        )


def _list_out_of_reach(text: str, settings: Settings) -> list[str]:
    """Return what is known of launches that `text` may mean, and whose target cannot be asked here."""
    targets = list_usable_targets(settings)
    begins = len(text) >= SHORTEST_PREFIX
    found = list_out_of_reach(
        targets, settings, lambda each: each.name == text or (begins and each.job.startswith(text))
    )
    return [*found.values()][:SHOWN]


def _add_out_of_reach(unknown: UnknownName, text: str, settings: Settings) -> None:
    if facts := _list_out_of_reach(text, settings):
        unknown.facts = (*unknown.facts, *facts)
        unknown.hint = "go to the folder whose `runtime.toml` defines the target, or define it again"


def is_known_name(text: str, settings: Settings) -> bool:
    """Return whether a job known to this machine has exactly this name. No target is asked."""
    if any(each.name == text for each in list_launched(settings)):
        return True
    folder = settings.data_dir / "known" / "targets"
    return _mentions(folder, text) and any(each.name == text for each in _list_candidates(settings, None, text))


def _mentions(folder: Path, text: str) -> bool:
    """Return whether a file in the folder contains the text, which is cheaper than to parse them all."""
    needle = f'"{text}"'.encode()
    try:
        return any(path.is_file() and needle in path.read_bytes() for path in folder.iterdir())
    except OSError:
        return False


def _last(settings: Settings, target: str | None) -> str:
    launched = list_launched(settings)
    if target is not None:
        there = {each.job for each in _list_candidates(settings, target)}
        launched = [each for each in launched if each.job in there]
    if not launched:
        where = f" on `{target}`" if target else ""
        raise NotPossible(
            f"`last` means the last job that was launched from this machine{where}, and there is none",
            hint="`runtime status` lists the jobs that there are",
        )
    return launched[0].job


def _last_here(settings: Settings, target: str | None) -> str:
    from runtime.client.resolve_id import newest_submission

    found = find_from_terminal(settings)
    candidates = _newest_first(_list_candidates(settings, target))
    if found is not None and (target is None or any(each.job == found.job for each in candidates)):
        submitted = newest_submission(settings.data_dir)
        if submitted is None or submitted[1] < found.at:
            return found.job
        raise AmbiguousJob(
            f"`last` may mean job `{found.job[:10]}` of this terminal, or experiment `{submitted[0]}`, which is newer",
            candidates[:SHOWN],
            hint="name what you mean",
        )
    raise AmbiguousJob(
        "`last` means the last job that was launched from this terminal, and none was",
        candidates[:SHOWN],
        hint="name the job, by its id or its name",
    )


def _named(
    text: str, known: Sequence[Candidate], settings: Settings, target: str | None, *, acting: bool
) -> list[Candidate]:
    """Return the jobs with exactly this name, the newest first.

    Looking takes this machine's word for it if it knows one; acting, a target that is named, and a name that is unknown
    here ask the targets.
    """
    named = [each for each in known if each.name == text]
    if (named and not acting and target is None) or (not named and re.fullmatch("j-[0-9a-f]*", text)):
        return _own(named)
    found = _ask_all(text, named, settings, target, judge=acting)
    if acting and named and target is None and (facts := _list_out_of_reach(text, settings)):
        raise NotPossible(
            f"`{text}` is also the name of a job whose target cannot be asked here, and which may be the one that is meant",
            facts=facts,
            hint=f"name the job by its id, such as {named[0].job[:10]}, or its target with `--on`",
        )
    return _own(found)


def _ask_all(
    text: str, named: Sequence[Candidate], settings: Settings, target: str | None, *, judge: bool
) -> list[Candidate]:
    """Read the jobs of this name from the target that is named, from all that are known to have one, or else from all.

    Raises `TargetSilent` for a target that does not answer, unless the name is unknown here.
    """
    if target is not None:
        places = [find_target(target, settings)]
    elif named:
        places = list({_key(each.target): each.target for each in named}.values())
    else:
        places = list_usable_targets(settings)
    found: list[Candidate] = []
    for place in places:
        try:
            found += _ask(text, place, settings, judge=judge)
        except RuntimeFailure as problem:
            if named or target is not None:
                # It may be the one that is meant, and it may live.
                if not isinstance(problem, InfrastructureFailure):
                    raise
                silent = TargetSilent(text, place, problem)
                if target is None:
                    silent.facts = (*silent.facts, "a job of this name was known there; `--on TARGET` chooses another")
                raise silent from problem
    return found


def _key(target: Target) -> tuple[str, str | None]:
    return target.name, target.records


def _ask(name: str, target: Target, settings: Settings, *, judge: bool) -> Iterator[Candidate]:
    """Read the jobs of this name from a target's record root; with `judge` the backend is asked where they stand."""
    with open_target(target, make_context(settings)) as place:
        folders = {f"{job_folder(job)}/intent.json": job for job in ledger.list_jobs(place.files)}
        intents = ledger.read_objects(place.files, folders)
        wanted = [folders[file] for file, intent in intents.items() if intent.get("name") == name]
        damaged: list[ledger.DamagedFile] = []
        entries = ledger.read_many_entries(place.files, wanted, tell=damaged.append)
        if damaged:
            raise damaged[0]  # it may be the one that is meant, and it may live
        states: dict[str, JobState] = {}
        if judge:
            judged = judge_jobs(entries, place.target, place.launcher, place.host, tell=None)
            states = {status.entry.id: status.state for status, _ in judged}
    for each in entries:
        yield Candidate(
            job=each.id,
            name=each.name,
            target=target,
            owner=each.owner,
            launched_at=each.launched_at,
            state=states.get(each.id),
        )


def _choose(text: str, named: Sequence[Candidate], *, acting: bool, tell: Callable[[str], None]) -> Candidate:
    living = []
    if acting:
        living = [each for each in named if each.state is not None and not each.state.terminal]
        if len(living) > 1:
            raise AmbiguousJob(
                f"`{text}` is the name of {count_noun(len(living), 'job')} that have not ended, and this takes one",
                living,
                hint=f"name one by its id, such as {living[0].job[:10]}",
            )
        chosen = living[0] if living else named[0]
    else:
        chosen = named[0]
    if len(named) > 1:
        which = "the only one that has not ended" if acting and living else "the newest"
        tell(
            f"`{text}` is the name of {count_noun(len(named), 'job')}; this is {which}, {chosen.job[:10]} on {chosen.target.name}"
        )
    return chosen


def _list_candidates(settings: Settings, target: str | None, text: str = "") -> list[Candidate]:
    """Return the jobs that this machine knows of, on one target or on all that can be used here; with `text`, those that it
    may mean."""

    def fits(job: str, name: str) -> bool:
        return job.startswith(text) or name == text

    targets = [each for each in list_usable_targets(settings) if target is None or each.name == target]
    known = list_known(targets, settings, fits=fits)
    return [_candidate(each, place.target) for place in known for each in place.jobs if fits(each.job, each.name)]


def _candidate(line: JobLine, target: Target) -> Candidate:
    return Candidate(
        job=line.job,
        name=line.name,
        target=target,
        owner=line.owner,
        launched_at=line.launched_at,
        state=line.state,
    )


def _own(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return the user's own jobs, or those of others if there are none; the newest first, each once."""
    ranked = _newest_first({each.job: each for each in candidates}.values())
    me = owner_name()
    return [each for each in ranked if each.owner == me] or ranked


def _newest_first(candidates: Iterable[Candidate]) -> list[Candidate]:
    return sorted(candidates, key=lambda each: each.launched_at, reverse=True)
