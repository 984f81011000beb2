"""`runtime explain`: why something waits or failed, and the next step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated

from typer import Argument

from runtime.cli.commands import OutputOption, StackOption
from runtime.cli.console import note, paint, say
from runtime.cli.jobs import IndexOption, OnOption, is_job, open_job
from runtime.cli.output import OutputFormat, cut_line, print_json
from runtime.client.resolve_id import IdKind, identify, recall_last
from runtime.client.tasks.explain import explain as explain_task
from runtime.client.tasks.explain import explain_experiment, explain_worker, read_facts
from runtime.client.tasks.status import read_experiment
from runtime.client.tasks.task_facts import read_worker
from runtime.end_reasons import Explanation
from runtime.errors import RequestRefused
from runtime.stack.open import open_stack


def explain(
    what: Annotated[
        str, Argument(metavar="TASK|EXPERIMENT|WORKER|JOB", help="An id or its beginning, a name, or `last`.")
    ],
    index: IndexOption = None,
    on: OnOption = None,
    stack: StackOption = None,
    output: OutputOption = OutputFormat.TEXT,
) -> int:
    """Why something waits, failed or was tried again: a sentence, the evidence, and the next step.

    \b
    Examples:
      runtime explain t-3f2a
      runtime explain last
      runtime explain w-node3-81
      runtime explain t-3f2a -o json | jq -r .next_step
      runtime explain train-7b
      runtime explain j-91c0 --index 3-5
    """
    if is_job(what, on=on, stack=stack):
        from runtime.client.jobs.explain import explain as explain_job
        from runtime.client.jobs.explain import read_facts as read_job_facts
        from runtime.jobs.indices import choose_indices

        with open_job(what, on) as job:
            chosen = choose_indices(job.entry(), index)
            if len(chosen) < 2:
                one = chosen[0] if chosen else None
                return _print("job", job.id, explain_job(read_job_facts(job, one, watch=note)), output)
            why = [(each, explain_job(read_job_facts(job, each, watch=note))) for each in chosen]
            return _print_runs(job.id, why, output)
    if index is not None or on is not None:
        raise RequestRefused(
            f"`--index` and `--on` are of jobs, and `{what}` is none", hint="runtime explain j-91c0 --index 3"
        )
    with open_stack(stack) as opened:
        found = identify(what, opened.records, last=recall_last(opened.settings.data_dir, opened.name))
        now = datetime.now(UTC)
        if found.kind is IdKind.TASK:
            explanation = explain_task(read_facts(opened, found.name, now=now))
        elif found.kind is IdKind.EXPERIMENT:
            explanation = explain_experiment(read_experiment(opened, found.name, now=now))
        else:
            explanation = explain_worker(read_worker(opened, found.name, now=now), now=now)
    return _print(found.kind, found.name, explanation, output)


def _print(kind: str, name: str, found: Explanation, output: OutputFormat) -> int:
    explanation = _shorten(found)
    if output is OutputFormat.JSON:
        print_json({"kind": kind, "name": name, **_fields(explanation)})
        return 0
    _say(explanation)
    return 0


def _print_runs(job: str, found: Sequence[tuple[int, Explanation]], output: OutputFormat) -> int:
    """Print an explanation for each of several runs; in JSON, an array of them."""
    if output is OutputFormat.JSON:
        print_json([{"kind": "job", "name": job, "index": index, **_fields(_shorten(each))} for index, each in found])
        return 0
    for _, each in found:
        _say(_shorten(each))
    return 0


def _shorten(found: Explanation) -> Explanation:
    return replace(found, evidence=tuple(cut_line(line) for line in found.evidence))


def _fields(found: Explanation) -> dict[str, object]:
    return {"sentence": found.sentence, "evidence": found.evidence, "next_step": found.hint}


def _say(explanation: Explanation) -> None:
    say(paint(explanation.sentence, "bold"), *(f"  {line}" for line in explanation.evidence))
    if explanation.hint:
        say(f"next: {explanation.hint}")
