"""`runtime stack`: which stacks there are, what one offers, and which is the default."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

import typer

from runtime.cli.commands import OutputOption, new_app
from runtime.cli.show import Output, format_ago, note, print_json, print_list
from runtime.config import load_settings, remember_stack
from runtime.outputs import (
    OtherQueueOutput,
    PubSubQueueOutput,
    QueueOutput,
    SqliteQueueOutput,
    StackOutputs,
    outputs_fields,
)
from runtime.stacks import FoundStack, ListedStack, find_stack, list_stacks, pull_stack

app = new_app("Choose the stack that commands use, and show what it offers.")

OptionalName = Annotated[str | None, typer.Argument(metavar="[NAME]", help="A stack; by default the one in use.")]


@app.command("list")
def list_(output: OutputOption = Output.TEXT) -> None:
    """List the stacks that can be named here, and which one commands use.

    \b
    Examples:
      runtime stack list
      runtime stack list -o json | jq '.[].name'
    """
    columns = {
        "STACK": lambda stack: stack.name,
        "FROM": lambda stack: stack.source,
        "READ": lambda stack: stack.read_at,
        "IN USE": lambda stack: "yes" if stack.default else "",
    }
    rows: list[ListedStack] = list_stacks()
    print_list(rows, columns, output)


@app.command()
def show(name: OptionalName = None, output: OutputOption = Output.TEXT) -> None:
    """Show what a stack offers and where that was read. `-o json` prints the contract itself.

    \b
    Examples:
      runtime stack show
      runtime stack show marin-us-west4 -o json > contract.json
    """
    found = find_stack(name)
    if output is Output.JSON:
        print_json(outputs_fields(found.outputs))
        return
    for label, text in _lines(found):
        print(f"{label:<12}{text}")


@app.command()
def pull(
    source: Annotated[str, typer.Argument(help="A stack's name, or the path or URL of a published copy.")],
    output: OutputOption = Output.TEXT,
) -> None:
    """Read a stack from its source now and keep it for when the source cannot be reached.

    \b
    Examples:
      runtime stack pull gs://lab-records/contract/v1.json
      runtime stack pull marin-us-west4
    """
    found = pull_stack(source)
    if output is Output.JSON:
        print_json(_fields(found.name, found.source, found.read_at))
    else:
        note(f"read stack `{found.name}` from {found.source}; `runtime stack use {found.name}` makes it the default")


@app.command()
def use(
    name: Annotated[str, typer.Argument(help="A stack that can be read now; `local` for the built-in one.")],
    output: OutputOption = Output.TEXT,
) -> None:
    """Make a stack the one that commands of yours use when they name none.

    \b
    Examples:
      runtime stack use marin-us-west4
      runtime stack use local
    """
    settings = load_settings()
    found = find_stack(name, settings=settings)
    path = remember_stack(name, settings)
    if output is Output.JSON:
        print_json(_fields(found.name, found.source, found.read_at))
    else:
        note(f"commands now use stack `{found.name}` (kept in {path})")
    if load_settings().stack != name:
        note("here RUNTIME_STACK, RUNTIME_OUTPUTS or the project's file names another, which goes first")


def _fields(name: str, source: str, read_at: datetime) -> dict[str, Any]:
    return {"name": name, "source": source, "read_at": read_at}


def _lines(found: FoundStack) -> list[tuple[str, str]]:
    outputs = found.outputs
    age = f", cached {format_ago(found.read_at)}" if found.cached else ""
    lines = [("stack", outputs.stack), ("from", found.source + age)]
    lines += [(name, value) for name in ("project", "region", "zone") if (value := getattr(outputs, name))]
    lines.append(("records", outputs.records.url if outputs.records else "none: its queues cannot be used"))
    lines += [("queue", f"{name}: {_place(queue)}") for name, queue in sorted(outputs.queues.items())]
    return lines + _more_lines(outputs)


def _place(queue: QueueOutput) -> str:
    match queue:
        case SqliteQueueOutput(path=path):
            return f"sqlite in {path}"
        case PubSubQueueOutput(subscription=subscription):
            return f"pubsub, {subscription}"
        case OtherQueueOutput(kind=kind):
            return f"{kind}, which this release does not know"


def _more_lines(outputs: StackOutputs) -> list[tuple[str, str]]:
    lines = [("cluster", f"{name}: head {cluster.head}") for name, cluster in sorted(outputs.clusters.items())]
    for name, cluster in sorted(outputs.kubernetes.items()):
        lines.append(("kubernetes", f"{name}: namespaces {', '.join(sorted(cluster.namespaces)) or 'none'}"))
    for name, regions in sorted(outputs.registries.items()):
        lines.append(("images", f"{name}: {', '.join(sorted(regions))}"))
    if outputs.secrets:
        lines.append(("secrets", ", ".join(sorted(outputs.secrets))))
    if outputs.published_url:
        lines.append(("published", outputs.published_url))
    return lines
