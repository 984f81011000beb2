"""Jobs as arguments of the verbs: their options, their ids, and messages while a job is followed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

from typer import Option

from runtime.cli.printing import note
from runtime.cli.show import describe_state

if TYPE_CHECKING:
    from runtime.client.jobs.handle import JobHandle
    from runtime.jobs.ledger import JobStatus

OnOption = Annotated[str | None, Option("--on", metavar="TARGET", help="Target of the job, or to look at.")]
IndexOption = Annotated[int | None, Option("--index", metavar="I", help="This run of a job's array.")]
OthersOption = Annotated[bool, Option("--others", help="Also where the job is somebody else's.")]


def is_job(text: str | None) -> bool:
    """Whether `text` is the id of a job or its beginning, or `last` while the user's newest work is a job."""
    return text is not None and (re.fullmatch("j-[0-9a-f]*", text) is not None or _last_job(text) is not None)


def open_job(text: str, on: str | None = None) -> JobHandle:
    """Find the job by its id, its beginning or `last`. Raises `UnknownName`."""
    from runtime.client.jobs.handle import find_job

    return find_job(_last_job(text) or text, target=on)


def _last_job(text: str) -> str | None:
    if text != "last":
        return None
    from runtime.client.identify import newest_job
    from runtime.config import load_settings

    return newest_job(load_settings().data_dir)


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
