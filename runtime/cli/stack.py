"""`runtime stack`: which stacks there are, what one offers, which is the default, and its published copy."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from runtime.cli.commands import OutputOption, StackOption, YesOption, new_app
from runtime.cli.console import note, say
from runtime.cli.output import Columns, OutputFormat, confirm, format_ago, print_json, print_list
from runtime.config import load_settings, remember_stack
from runtime.errors import NotPossible
from runtime.outputs import OtherQueueOutput, PubSubQueueOutput, QueueOutput, SqliteQueueOutput
from runtime.stack.find import LOCAL, FoundStack, find_stack, list_stacks, pull_stack, read_stack
from runtime.units import count_noun

if TYPE_CHECKING:
    from runtime.stack.publish import Publication

app = new_app("Choose the stack that commands use, and show what it offers.")

OptionalName = Annotated[str | None, Argument(metavar="[NAME]", help="A stack; by default the one in use.")]


@app.command("list")
def list_(output: OutputOption = OutputFormat.TEXT) -> None:
    """List the stacks that can be named here, and which one commands use.

    \b
    Examples:
      runtime stack list
      runtime stack list -o json | jq '.[].name'
    """
    columns: Columns = {
        "STACK": "name",
        "FROM": "source",
        "READ": "read_at",
        "IN USE": lambda stack: "yes" if stack.default else "",
    }
    print_list(list_stacks(), columns, output)


@app.command()
def show(name: OptionalName = None, stack: StackOption = None, output: OutputOption = OutputFormat.TEXT) -> None:
    """Show what a stack offers and where that was read. `-o json` prints the contract itself.

    \b
    Examples:
      runtime stack show
      runtime stack show marin-us-west4 -o json > contract.json
    """
    found = find_stack(name if name is not None else stack)
    if output is OutputFormat.JSON:
        print_json(found.contract)
        return
    for label, text in _lines(found):
        say(f"{label:<12}{text}")


@app.command()
def pull(
    source: Annotated[
        str | None,
        Argument(metavar="[SOURCE]", help="A stack's name, or the path or URL of a copy; by default the stack in use."),
    ] = None,
    stack: StackOption = None,
    output: OutputOption = OutputFormat.TEXT,
) -> None:
    """Read a stack from its source now and keep it for when the source cannot be reached.

    \b
    Examples:
      runtime stack pull gs://lab-records/contract/v1.json
      runtime stack pull --stack marin-us-west4
    """
    settings = load_settings()
    found = pull_stack(source or stack or settings.stack or settings.outputs or LOCAL, settings=settings)
    if output is OutputFormat.JSON:
        print_json(_fields(found))
    else:
        note(f"read stack `{found.name}` from {found.source}; `runtime stack use {found.name}` makes it the default")


@app.command()
def use(
    name: Annotated[str, Argument(help="A stack that can be read now; `local` for the built-in one.")],
    output: OutputOption = OutputFormat.TEXT,
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
    if output is OutputFormat.JSON:
        print_json(_fields(found))
    else:
        note(f"commands now use stack `{found.name}` (kept in {path})")
    if load_settings().stack != name:
        note("here RUNTIME_STACK, RUNTIME_OUTPUTS or the project's file names another, which goes first")


@app.command()
def publish(
    stack: StackOption = None,
    to: Annotated[str | None, Option(metavar="PATH|URL", help="By default the contract's own `published_url`.")] = None,
    commit: Annotated[
        str | None,
        Option(
            "--commit", metavar="SHA", help="What the stack was deployed from; by default what is checked out here."
        ),
    ] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Say what would change, write nothing.")] = False,
    yes: YesOption = False,
    output: OutputOption = OutputFormat.TEXT,
) -> None:
    """Write a stack's contract where machines without Pulumi read it.

    What Pulumi says now is written as canonical JSON with its digest, the commit and the time, and what changes is
    said. A copy that was made from a later commit is replaced only with `--yes`. `--stack` takes a path too, such as
    what `pulumi stack output contract --json` wrote.

    \b
    Examples:
      runtime stack publish --stack marin-us-west4
      runtime stack publish --stack dev --dry-run
      runtime stack publish --stack dev --to ./contract.json --commit 4f1c2d0
    """
    from runtime.stack.publish import Effect, find_commit, plan_publication
    from runtime.stack.publish import publish as write

    settings = load_settings()
    name = stack or settings.stack
    if name is None or name == LOCAL:
        raise NotPossible("the built-in stack is not published: nobody else can use it", hint="name one with `--stack`")
    found = read_stack(name, settings=settings)
    folder = Path.cwd()
    plan = plan_publication(found, now=datetime.now(UTC), to=to, commit=find_commit(folder, commit), folder=folder)
    _report_changes(plan)
    if not dry_run:
        if plan.needs_consent:
            confirm(f"replace the contract at {plan.url}", yes=yes)
        write(plan)
    if output is OutputFormat.JSON:
        fields = {
            "stack": plan.stack,
            "url": plan.url,
            "written": not dry_run,
            "effect": plan.effect,
            "digest": plan.published.digest,
            "commit": plan.published.commit,
            "at": plan.published.at,
            "previous": plan.previous,
            "changes": plan.changes,
        }
        print_json(fields)
        return
    verb = "would write" if dry_run else "wrote"
    same = ", which says the same as before" if plan.effect is Effect.REPEATS else ""
    note(f"{verb} the contract of stack `{plan.stack}` to {plan.url}{same} ({plan.published.digest[:19]}…)")


@app.command()
def diff(
    old: Annotated[str, Argument(metavar="OLD", help="A stack, a path or URL, `cache:NAME` or `published:NAME`.")],
    new: Annotated[str | None, Argument(metavar="[NEW]", help="Likewise; by default the stack in use.")] = None,
    output: OutputOption = OutputFormat.TEXT,
) -> int:
    """Show in which keys two contracts differ. Exit code 0 if they are the same, 1 if they differ.

    The name of a stack stands for Pulumi's outputs now, never for a copy.

    \b
    Examples:
      runtime stack diff published:dev dev
      runtime stack diff cache:marin-us-west4 gs://lab-records/contract/v1.json
      runtime stack diff ./yesterday.json -o json | jq -r '.[].path'
    """
    from runtime.stack.publish import compare

    settings = load_settings()
    before = read_stack(old, settings=settings)
    after = read_stack(new, settings=settings) if new else find_stack(settings=settings)
    changes = list(compare(before.contract, after.contract))
    if output is OutputFormat.JSON:
        print_json(changes)
    else:
        columns: Columns = {
            "CHANGE": lambda change: change.kind.value,
            "PATH": "path",
            "OLD": lambda change: _leaf_text(change.old),
            "NEW": lambda change: _leaf_text(change.new),
        }
        print_list(changes, columns)
        note(count_noun(len(changes), "difference") if changes else "the two contracts are the same")
    return 1 if changes else 0


def _leaf_text(value: object) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _report_changes(plan: Publication) -> None:
    if plan.why:
        note(plan.why)
    for change in plan.changes if plan.previous or plan.needs_consent else ():
        old, new = _leaf_text(change.old), _leaf_text(change.new)
        note(
            f"  {change.kind.value} {change.path}: {old if old is not None else '-'} → {new if new is not None else '-'}"
        )


def _fields(found: FoundStack) -> dict[str, Any]:
    return {"name": found.name, "source": found.source, "read_at": found.read_at}


def _lines(found: FoundStack) -> list[tuple[str, str]]:
    outputs = found.outputs
    age = f", cached {format_ago(found.read_at)}" if found.cached else ""
    lines = [("stack", outputs.stack), ("from", found.source + age)]
    if found.published:
        commit = f", commit {found.published.commit[:12]}" if found.published.commit else ""
        lines.append(("as of", f"{format_ago(found.published.at)}{commit}"))
    lines += [(name, value) for name in ("project", "region", "zone") if (value := getattr(outputs, name))]
    lines.append(("records", outputs.records.url if outputs.records else "none: its queues cannot be used"))
    lines += [("queue", f"{name}: {_place(queue)}") for name, queue in sorted(outputs.queues.items())]
    lines += [("cluster", f"{name}: head {cluster.head}") for name, cluster in sorted(outputs.clusters.items())]
    for name, cluster in sorted(outputs.kubernetes.items()):
        lines.append(("kubernetes", f"{name}: namespaces {', '.join(sorted(cluster.namespaces)) or 'none'}"))
    for name, regions in sorted(outputs.registries.items()):
        lines.append(("images", f"{name}: {', '.join(sorted(regions))}"))
    if outputs.secrets:
        lines.append(("secrets", ", ".join(sorted(outputs.secrets))))
    lines += [("identity", f"{name}: {each.email}, {each.use}") for name, each in sorted(outputs.identities.items())]
    if outputs.published_url:
        lines.append(("published", outputs.published_url))
    return lines


def _place(queue: QueueOutput) -> str:
    match queue:
        case SqliteQueueOutput(path=path):
            return f"sqlite in {path}"
        case PubSubQueueOutput(subscription=subscription):
            return f"pubsub, {subscription}"
        case OtherQueueOutput(kind=kind):
            return f"{kind}, which this release does not know"
