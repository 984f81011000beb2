"""`runtime interrupt`: do to a job what backends do to jobs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Final

from typer import Argument, Option

from runtime.cli.commands import OutputOption
from runtime.cli.console import note, say
from runtime.cli.jobs import IndexOption, OnOption, OthersOption, open_job, short
from runtime.cli.output import OutputFormat, print_json
from runtime.errors import InvalidValue, NotPossible, RuntimeFailure

if TYPE_CHECKING:
    from runtime.jobs.plan import NativeState

WAYS: Final = ("preempt", "timeout", "node-loss", "oom")
PATIENCE_S: Final = 180.0


def interrupt(
    job: Annotated[str, Argument(metavar="JOB", help="Its id, its beginning, its name, or `last` of this terminal.")],
    as_: Annotated[str, Option("--as", metavar="|".join(WAYS), help="What happens to it.")],
    index: IndexOption = None,
    others: OthersOption = False,
    on: OnOption = None,
    output: OutputOption = OutputFormat.TEXT,
) -> int:
    """Do to a running job what backends do to jobs, to see whether it survives.

    `preempt` takes its machine away politely, `node-loss` at once, `timeout` brings it to its time limit, `oom` kills
    it for memory. What follows is what would follow for real: `runtime status` and `runtime explain` show it. How each
    is provoked on a target, and what is refused there: `runtime targets show TARGET`.

    \b
    Examples:
      runtime interrupt j-91c0 --as preempt
      runtime interrupt j-91c0 --as timeout --index 3-5
    """
    from runtime.client.jobs.handle import check_owner
    from runtime.client.jobs.retry import start_anew
    from runtime.config import load_settings
    from runtime.jobs.indices import choose_indices
    from runtime.jobs.ledger import judge, newest_natives
    from runtime.jobs.plan import Fidelity
    from runtime.launchers.base import Interrupts

    if as_ not in WAYS:
        raise InvalidValue("--as", as_, ", ".join(WAYS))
    with open_job(job, on, acting=True) as found:
        entry = found.entry()
        check_owner(entry, others=others, verb="interrupt")
        indices = choose_indices(entry, index)
        launcher = found.launcher
        support = launcher.interrupts.get(as_) if isinstance(launcher, Interrupts) else None
        if not isinstance(launcher, Interrupts) or support is None or support.fidelity is Fidelity.REFUSED:
            why = support.how if support else f"the launcher `{entry.kind}` provokes nothing"
            raise NotPossible(f"`{as_}` cannot be provoked on target `{found.target.name}`", facts=[why])
        states = found.natives(entry)
        if all(each.state.terminal for each in states):
            raise NotPossible(f"job `{found.id}` does not run", hint=f"runtime status {short(found.id)}")
        runs = judge(entry, states, indices=True).indices
        if ended := [str(each.index) for each in runs if each.index in indices and each.state.terminal]:
            which = f"run {ended[0]}" if len(ended) == 1 else f"runs {', '.join(ended[:20])}"
            raise NotPossible(f"{which} of job `{found.id}` ended before", hint=f"runtime status {short(found.id)}")
        natives = [each.native_id for each in newest_natives(entry)]
        for place, chosen in enumerate(indices):
            # The native job that serves the index if the backend reports it; otherwise the first one.
            native = ([each.native_id for each in states if each.index == chosen] or natives)[0]
            try:
                launcher.interrupt(found.target, native, chosen, as_, found.host)
            except RuntimeFailure as problem:
                before = ", ".join(map(str, indices[:place]))
                problem.facts = (
                    *problem.facts,
                    *([f"interrupted before it, of job `{found.id}`: {before}"] if before else []),
                )
                raise
        for native in () if indices else natives:
            launcher.interrupt(found.target, native, None, as_, found.host)
        again = None
        if as_ == "preempt" and not indices and support.fidelity is Fidelity.CLIENT:
            _wait_until_gone(found.natives)
            again = start_anew(found, load_settings(), progress=note)
    fields = {
        "job": found.id,
        "as": as_,
        "index": indices[0] if len(indices) == 1 else None,
        "indices": indices,
        "kept": support.fidelity,
        "how": support.how,
        "started_anew": again.native_id if again else None,
    }
    if output is OutputFormat.JSON:
        print_json(fields)
    else:
        say(f"{short(found.id)}: {support.how}")
    if as_ == "node-loss":
        note("nobody starts it again here: the same `runtime launch`, or `runtime retry`, takes it up")
    note(f"`runtime explain {short(found.id)}` says what came of it")
    return 0


def _wait_until_gone(natives: Callable[[], Sequence[NativeState]]) -> None:
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        if all(each.state.terminal for each in natives()):
            return
        time.sleep(0.1)
