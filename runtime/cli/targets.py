"""`runtime targets`: places to launch on, and whether they work."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from runtime.cli.commands import OutputOption, new_app
from runtime.cli.console import note, paint, say
from runtime.cli.output import Columns, OutputFormat, print_checks, print_json, print_list
from runtime.units import parse_duration

if TYPE_CHECKING:
    from runtime.client.jobs.targets import Definition
    from runtime.jobs.plan import FieldSupport, Target

app = new_app("Places to launch on: what they are, what they can keep, and whether they work.")


@app.command("list")
def list_(output: OutputOption = OutputFormat.TEXT) -> None:
    """Every target, `local` first, and the file that each comes from.

    They are those of the project and those of your own file, `~/.config/runtime/config.toml`. A target of the project
    goes before one of yours with the same name.

    \b
    Examples:
      runtime targets list
      runtime targets list -o json | jq -r '.[].target'
    """
    from runtime.client.jobs.targets import read_definitions, read_target
    from runtime.config import load_settings
    from runtime.launchers.registry import list_kinds

    definitions = read_definitions(load_settings())
    targets = [read_target(name, each) for name, each in definitions.items()]
    rows = [_row(target, definitions[target.name]) for target in targets]
    columns: Columns = {name.upper(): itemgetter(name) for name in ("target", "kind", "where", "records")}
    print_list(rows, {**columns, "FROM": lambda row: row["file"] or "built in"}, output)
    for name, each in definitions.items():
        if each.hides:
            note(f"target `{name}` of `{each.hides}` is hidden by the project's of that name")
    kinds = list_kinds()
    for target in targets:
        if target.kind not in kinds:
            note(f"target `{target.name}` cannot be used: no launcher named `{target.kind}`, only {', '.join(kinds)}")


def _row(target: Target, definition: Definition) -> dict[str, object]:
    places = ("host", "hosts", "context", "namespace", "partition")
    where = [f"{name} {_text(target.settings[name])}" for name in places if name in target.settings]
    return {
        "target": target.name,
        "kind": target.kind,
        "where": ", ".join(where) or None,
        "records": target.records,
        "stack": target.stack,
        "file": str(definition.file) if definition.file else None,
    }


def _text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


@app.command()
def show(
    target: Annotated[str, Argument(metavar="TARGET", help="Its name.")], output: OutputOption = OutputFormat.TEXT
) -> None:
    """Settings and defaults of a target, how each field of a job is kept there, and who reads its secrets.

    `native` is the backend's own, `shim` lasts as long as the job, `client` as long as a command follows it, and what
    is `refused` stops a launch. Secrets are read at `launch`, by the `backend`, or by the `machine` that runs the job.

    \b
    Examples:
      runtime targets show local
      runtime targets show hpc -o json | jq .fields.time_limit
    """
    from runtime.client.jobs.targets import find_definition, find_target
    from runtime.config import load_settings
    from runtime.launchers.base import Interrupts
    from runtime.launchers.registry import get_launcher

    settings = load_settings()
    found = find_target(target, settings)
    launcher = get_launcher(found.kind)
    schemes = launcher.secret_schemes
    interrupts = launcher.interrupts if isinstance(launcher, Interrupts) else {}
    fields = {
        **_row(found, find_definition(target, settings)),
        "settings": dict(found.settings),
        "defaults": dict(found.defaults),
        "fields": _describe_fields(launcher.keeps),
        "secrets": {name: {"read_by": each.reader, "how": each.how} for name, each in sorted(schemes.items())},
        "interrupts": _describe_fields(interrupts),
    }
    if output is OutputFormat.JSON:
        print_json(fields)
        return
    for name in ("target", "kind", "where", "records", "stack", "file", "settings", "defaults"):
        if fields[name]:
            say(f"{paint(f'{name:<11}', 'dim')} {fields[name]}")
    for title, table in (("job fields", launcher.keeps), ("interruptions", interrupts)):
        if table:
            say("", paint(title, "bold"))
            for name, support in sorted(table.items()):
                say(f"  {name:<28} {support.fidelity:<8} {support.how}")
    say("", paint("sources of secrets", "bold"))
    for name, scheme in sorted(schemes.items()):
        say(f"  {f'{name}://':<28} {scheme.reader:<8} {scheme.how}")


def _describe_fields(table: Mapping[str, FieldSupport]) -> dict[str, Any]:
    return {name: {"kept": each.fidelity, "how": each.how} for name, each in sorted(table.items())}


@app.command()
def check(
    target: Annotated[str, Argument(metavar="TARGET", help="Its name.")],
    wait: Annotated[str, Option(metavar="10m", help="How long the probe job may take.")] = "10m",
    gpus: Annotated[float | None, Option(help="Ask for so many GPUs, and see them.")] = None,
    new_records: Annotated[
        bool, Option("--new-records", help="Take its record root for a new one: the old one is gone for good.")
    ] = False,
    output: OutputOption = OutputFormat.TEXT,
) -> int:
    """Try a target for real: settings, record root, and a probe job with its interpreter, code, output and clock.

    Each line is ok, warn or fail, and says the next step. The probe job is launched like any other and removed
    afterwards. Exit code 1 if a line fails.

    A record root that you used before, and that is gone or another one now, is refused by every command. After you
    removed it on purpose, `--new-records` begins a new one; what ran there may then be launched a second time.

    \b
    Examples:
      runtime targets check local
      runtime targets check hpc --gpus 1 --wait 1h
      runtime targets check hpc --new-records
    """
    from runtime.client.jobs.target_check import check_target
    from runtime.config import load_settings

    patience = parse_duration(wait, field="wait")
    steps = check_target(target, load_settings(), patience=patience, gpus=gpus, new_records=new_records)
    return print_checks(steps, output, name="step", remedy="hint", width=12)
