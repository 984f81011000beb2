"""`runtime explain`: why something waits or failed, and the next step."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from runtime.cli.commands import OutputOption, StackOption
from runtime.cli.show import Output, paint, print_json
from runtime.explain import Explanation, explain_experiment, explain_worker, read_facts
from runtime.explain import explain as explain_task
from runtime.identify import Identity, Kind, identify, recall_last
from runtime.stacks import open_stack
from runtime.status import read_experiment, read_worker

if TYPE_CHECKING:
    from runtime.stacks import OpenStack


def explain(
    what: Annotated[
        str, typer.Argument(metavar="TASK|EXPERIMENT|WORKER", help="An id or its beginning, a name, or `last`.")
    ],
    stack: StackOption = None,
    output: OutputOption = Output.TEXT,
) -> int:
    """Why something waits, failed or was tried again: a sentence, the evidence, and the next step.

    \b
    Examples:
      runtime explain t-3f2a
      runtime explain last
      runtime explain w-node3-81
      runtime explain t-3f2a -o json | jq -r .next_step
    """
    with open_stack(stack) as opened:
        found = identify(what, opened.records, last=recall_last(opened.settings.data_dir, opened.name))
        explanation = _explain(opened, found)
    if output is Output.JSON:
        print_json({"kind": found.kind, "name": found.name, **_fields(explanation)})
        return 0
    print(paint(explanation.sentence, "bold"))
    for line in explanation.evidence:
        print(f"  {line}")
    if explanation.next_step:
        print(f"next: {explanation.next_step}")
    return 0


def _explain(opened: OpenStack, found: Identity) -> Explanation:
    now = datetime.now(UTC)
    match found.kind:
        case Kind.TASK:
            return explain_task(read_facts(opened, found.name, now=now))
        case Kind.EXPERIMENT:
            return explain_experiment(read_experiment(opened, found.name, now=now))
        case Kind.WORKER:
            return explain_worker(read_worker(opened, found.name, now=now), now=now)


def _fields(explanation: Explanation) -> dict[str, object]:
    return {
        "sentence": explanation.sentence,
        "evidence": explanation.evidence,
        "next_step": explanation.next_step,
    }
