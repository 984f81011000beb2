"""Jobs as arguments of the verbs: their options, ids and names, and messages while a job is followed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Final

from typer import Option

from runtime.cli.console import note
from runtime.cli.output import describe_state

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from runtime.client.jobs.handle import JobHandle
    from runtime.jobs.ledger import JobStatus

OnOption = Annotated[str | None, Option("--on", metavar="TARGET", help="Target of the job, or to look at.")]
IndexOption = Annotated[
    list[str] | None, Option("--index", metavar="I", help="These runs of a job's array: 3, 8,9 or 0-3,7.")
]
OthersOption = Annotated[bool, Option("--others", help="Also where the job is somebody else's.")]

_NAME: Final = re.compile(r"[\w-]+")


def is_job(
    text: str | None, *, on: str | None = None, stack: str | None = None, acting: bool = False, put: bool = False
) -> bool:
    """Whether `text` means a job: an id or its beginning, the name of a known job, or `last` while the user's newest work
    is a job.

    An experiment goes before a job of the same name, which is noted; with `put`, also one that has nothing but artifacts
    that were put. With `acting`, raises `NotPossible` if an experiment may be meant: by the beginning of its name, or because
    the stack does not answer.
    """
    if text is None or looks_like_job(text):
        return text is not None
    if on is not None and text != "last" and _NAME.fullmatch(text):
        return True  # tasks and workers have no target, so also a name that begins like one of theirs
    return may_be_job(text) and not _is_experiment(text, stack, acting=acting, put=put)


def looks_like_job(text: str) -> bool:
    """Whether `text` is the id of a job or its beginning, or `last` while the user's newest work is a job."""
    return re.fullmatch("j-[0-9a-f]*", text) is not None or (text == "last" and _is_newest())


def may_be_job(text: str) -> bool:
    """Whether `text` is like a job's id, or the name of a known job; there may be an experiment of that name."""
    if looks_like_job(text):
        return True
    if not _is_name(text):
        return False
    from runtime.client.jobs.find import is_known_name
    from runtime.config import load_settings

    return is_known_name(text, load_settings())


def _is_name(text: str) -> bool:
    return text != "last" and not text.startswith(("t-", "w-")) and _NAME.fullmatch(text) is not None


def _is_newest() -> bool:
    from runtime.client.resolve_id import newest_job
    from runtime.config import load_settings

    return newest_job(load_settings().data_dir) is not None


def _is_experiment(text: str, stack: str | None, *, acting: bool, put: bool) -> bool:
    from runtime.errors import NotPossible, RuntimeFailure
    from runtime.stack.open import open_stack

    try:
        with open_stack(stack) as opened:
            alike = [seen.name for seen in opened.records.experiments() if seen.name.startswith(text)]
            if put and text not in alike:
                from runtime.client.artifacts import has_put

                alike += [text] * has_put(text, opened.records)
    except RuntimeFailure as problem:
        if not acting:
            return False
        raise NotPossible(
            f"`{text}` is the name of a job, and it is not known whether there is an experiment of that name",
            facts=[problem.message],
            hint="name the job by its id, or its target with `--on`; `runtime status` shows both",
        ) from problem
    if text in alike:
        note(f"`{text}` is an experiment and the name of a job; this is the experiment, `--on TARGET` means the job")
    elif alike and acting:
        raise NotPossible(
            f"`{text}` is the name of a job, and the beginning of the name of an experiment",
            facts=[f"it may be: {', '.join(sorted(alike)[:10])}"],
            hint="write the whole name of the experiment, or the id of the job",
        )
    return text in alike


def open_job(text: str, on: str | None = None, *, acting: bool = False) -> JobHandle:
    """Find the job by its id, its name, the beginning of its id, or `last`; with `acting` as strictly as commands that
    change it need."""
    from runtime.client.jobs.find import open_job as find

    return find(text, target=on, acting=acting, tell=note)


def open_jobs(text: str, on: str | None = None) -> AbstractContextManager[list[JobHandle]]:
    """Find the job, or all jobs of a name, oldest first."""
    from runtime.client.jobs.find import open_jobs as find

    return find(text, target=on, tell=note)


def short(job: str) -> str:
    """Shorten an id as far as the next command allows."""
    return job[:10]


def detached(job: str) -> None:
    note(f"detached, the job goes on; `runtime logs -f {short(job)}` comes back, `runtime cancel {short(job)}` ends it")


def stuck_teller(job: str) -> Callable[[JobStatus], None]:
    """Make a function that notes, once for each reason, that a followed job needs help to go on."""
    said: set[object] = set()

    def tell(status: JobStatus) -> None:
        if not status.state.terminal and status.reason is not None and status.reason not in said:
            said.add(status.reason)
            note(f"job {short(job)} is {describe_state(status.state, status.reason)}, and does not go on by itself")
            note(f"why: `runtime explain {short(job)}`; `runtime cancel {short(job)}` gives back what it holds")

    return tell
