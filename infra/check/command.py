"""`python -m infra check`: prints the resources that a stack would make, and fails with every finding."""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Final

from infra.check.check import (
    CheckFinding,
    Grant,
    Report,
    check_stack,
    find_collisions,
    find_shared_notes,
    physical_name,
    shown,
)
from infra.check.recording import Registration
from infra.cli import InfraParser, say, say_json
from infra.gcp.prices import monthly_total
from infra.settings.files import find_project_folder, list_stacks
from runtime.errors import RequestRefused, UnknownName
from runtime.sanitize import clean

EXAMPLES: Final = """examples:
  python -m infra check --all                      every stack in a line, then what is wrong
  python -m infra check --stack dev                what the stack would make, who may do what, what it costs
  python -m infra check --stack dev -o json        the same for a program
  python -m infra check --stack marin-us-west4 --show main-head-vm/startup-script
  python -m infra check --stack dev --render out/  the rendered files, to read or compare

exit codes: 0 nothing wrong, 2 something is, and all of it is on stderr
"""


class CheckFailed(RequestRefused):
    """The stacks cannot be deployed; `findings` are all the reasons."""

    def __init__(self, what: str, findings: Sequence[CheckFinding], lines: Sequence[str]) -> None:
        self.findings = tuple(findings)
        count = f"{len(findings)} problem{'' if len(findings) == 1 else 's'}"
        settings = any(each.source in ("settings", "file") for each in findings)
        super().__init__(
            f"{what} cannot be deployed: {count}",
            facts=lines,
            hint="docs/settings.md has every key and what is allowed"
            if settings
            else "docs/check.md explains each check",
        )


def make_parser() -> argparse.ArgumentParser:
    parser = InfraParser("check", "What a stack would make, without an engine, an account or a network.", EXAMPLES)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--stack", "-s", metavar="NAME", help="the stack of the file Pulumi.NAME.yaml")
    which.add_argument("--all", action="store_true", help="every stack, and what they would take from each other")
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text", help="for people, or for a program")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="where the stack files are; found from here upwards")
    parser.add_argument("--show", metavar="FILE", help="print one rendered file and nothing else")
    parser.add_argument("--render", type=Path, metavar="DIR", help="write all rendered files into a folder")
    return parser


def main(words: Sequence[str]) -> int:
    args = make_parser().parse_args(words)
    folder = find_project_folder(args.folder)
    if args.all:
        if args.show is not None or args.render is not None:
            raise RequestRefused("`--show` and `--render` are about one stack", hint="use `--stack`")
        return _check_all(folder, args.output)
    return _check_one(_which(args.stack, folder), folder, args)


def _which(stack: str | None, folder: Path) -> str:
    if stack is not None:
        return stack
    stacks = list_stacks(folder)
    if len(stacks) == 1:
        return stacks[0]
    raise RequestRefused(
        "which stack?" if stacks else f"no stack file in `{folder}`",
        facts=[f"stacks: {', '.join(stacks)}"] if stacks else ["a stack is a file `Pulumi.NAME.yaml`"],
        hint=f"`python -m infra check --stack {stacks[0]}`, or `--all`" if stacks else None,
    )


def _check_all(folder: Path, output: str) -> int:
    stacks = list_stacks(folder)
    if not stacks:
        _which(None, folder)
    reports = [check_stack(each, folder=folder) for each in stacks]
    collisions, notes = find_collisions(reports), find_shared_notes(reports)
    notes = [*(f"{each.stack}: {note}" for each in reports for note in each.notes), *notes]
    if output == "json":
        _print_json(reports, collisions=[asdict(each) for each in collisions], notes=notes)
    else:
        say(render_summary(reports))
        say("".join(f"note: {each}\n" for each in notes))
    _stop_if_wrong(reports, collisions)
    return 0


def _check_one(stack: str, folder: Path, args: argparse.Namespace) -> int:
    report = check_stack(stack, folder=folder)
    if args.show is not None:
        text = _find_rendered(report, args.show)
        sys.stdout.write(clean(text) if sys.stdout.isatty() else text)
        return 0
    if args.output == "json":
        _print_json([report])
    elif report.recording is not None:
        say(render_report(report))
    if args.render is not None:
        _write(report.rendered, args.render)
        sys.stderr.write(f"wrote {len(report.rendered)} files into {args.render}\n")
    _stop_if_wrong([report])
    return 0


def _find_rendered(report: Report, name: str) -> str:
    if report.recording is None:
        _stop_if_wrong([report])
    ends = [each for each in report.rendered if each == name or each.endswith(f"/{name}")]
    if len(ends) != 1:
        raise UnknownName("rendered file", name, report.rendered, where=f"in stack `{report.stack}`")
    return report.rendered[ends[0]]


def _write(files: Mapping[str, str], folder: Path) -> None:
    for name, text in files.items():
        file = folder / name
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        except OSError as problem:
            reason = (problem.strerror or str(problem)).lower()
            raise RequestRefused(f"cannot write `{file}`: {reason}", hint="name another place") from problem


def _print_json(reports: Sequence[Report], **more: Any) -> None:
    document = {"schema": 1, "stacks": [report_fields(each) for each in reports], **more}
    say_json(json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False))


def _stop_if_wrong(reports: Sequence[Report], collisions: Sequence[CheckFinding] = ()) -> None:
    wrong = [each for each in reports if not each.ok]
    if not wrong and not collisions:
        return
    alone = len(reports) == 1
    lines = [
        finding_line(finding) if alone else f"{each.stack}: {finding_line(finding)}"
        for each in wrong
        for finding in each.findings
    ]
    findings = [finding for each in wrong for finding in each.findings]
    what = f"stack `{reports[0].stack}`" if alone else f"{len(wrong)} of {len(reports)} stacks"
    raise CheckFailed(
        what if wrong else "these stacks together", [*findings, *collisions], [*lines, *map(finding_line, collisions)]
    )


# reports as text and as JSON


def render_report(report: Report) -> str:
    """Render everything about one stack, section by section, without the texts of rendered files."""
    sections = [
        _header(report),
        _section("resources", _tree(report)),
        _section("cost a month", _costs(report)),
        _section("who may do what", _grants(report.grants)),
        _section("left to another stack of the project", _grants(report.left_grants)),
        _section("left to the owner of the network", report.left_to_host),
        _section("left to the owner of the key", report.left_to_key_owner),
        _section("protected: refuse to be destroyed", [f"{each.name}  ({each.type})" for each in report.protected]),
        _section(
            "rendered files",
            [
                f"{name}  {_count(text.count(chr(10)), 'line')}, {len(text.encode()):,} bytes  (`--show {name}`)"
                for name, text in report.rendered.items()
            ],
        ),
        _section(
            "contract",
            json.dumps(report.contract, indent=2, ensure_ascii=False).splitlines() if report.contract else [],
        ),
        _section("notes", report.notes),
    ]
    return "\n".join(each for each in sections if each)


def render_summary(reports: Sequence[Report]) -> str:
    """Render a line for each stack."""
    width = max((len(each.stack) for each in reports), default=0)
    return "".join(f"{_line(each, width)}\n" for each in reports)


def _line(report: Report, width: int) -> str:
    if report.recording is None:
        return f"{report.stack:<{width}}  wrong     {_count(len(report.findings), 'problem')}"
    verdict = "ok" if report.ok else "wrong"
    parts = [
        _count(sum(1 for each in report.resources if each.custom), "resource"),
        f"{len(report.protected)} protected",
        _count(len(report.grants), "grant"),
        _money(report),
    ]
    if not report.ok:
        parts.append(_count(len(report.findings), "problem"))
    return f"{report.stack:<{width}}  {verdict:<8}  {', '.join(parts)}"


def _header(report: Report) -> str:
    contract = report.contract or {}
    place = " ".join(f"{key} {contract[key]}" for key in ("project", "region", "zone") if contract.get(key))
    made = _count(sum(1 for each in report.resources if each.custom), "resource")
    return f"stack {report.stack}: {made}" + (f", {place}" if place else "") + f", {_money(report)}\n"


def _money(report: Report) -> str:
    total = monthly_total(report.costs)
    unknown = any(each.monthly_usd is None for each in report.costs)
    if not total:
        return "paid by use" if unknown else "no cost"
    return f"about {total:,.2f} USD a month" + (" and what is paid by use" if unknown else "")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _section(title: str, lines: Sequence[str]) -> str:
    return f"{title}\n" + "".join(f"  {line}\n" for line in lines) if lines else ""


def _tree(report: Report) -> list[str]:
    children: dict[str | None, list[Registration]] = defaultdict(list)
    known = {each.urn for each in report.resources}
    for each in report.resources:
        children[each.parent if each.parent in known else None].append(each)

    def walk(parent: str | None, depth: int) -> Iterator[str]:
        for each in children[parent]:
            yield "  " * depth + _resource(each)
            yield from walk(each.urn, depth + 1)

    return list(walk(None, 0))


def _resource(each: Registration) -> str:
    name = physical_name(each) if each.custom else None
    flags = [
        *(["protected"] if each.protect else []),
        *(["stays on destroy"] if each.retain_on_delete else []),
        *([f"taken over from {each.import_id}"] if each.import_id else []),
    ]
    text = f"{each.name}  {each.type}"
    text += f"  `{name}`" if name is not None and name != each.name else ""
    return text + (f"  [{', '.join(flags)}]" if flags else "")


def _costs(report: Report) -> list[str]:
    if not report.costs:
        return []
    lines = []
    for each in report.costs:
        amount = f"{each.monthly_usd:>10,.2f}" if each.monthly_usd is not None else f"{'–':>10}"
        lines.append(f"{amount}  {each.urn.rpartition('::')[2]}: {each.basis}")
    total = monthly_total(report.costs)
    return [*lines, f"{total:>10,.2f}  in all, in USD, before what is paid by use"] if total else lines


def _grants(grants: Sequence[Grant]) -> list[str]:
    by_member: dict[str, list[str]] = defaultdict(list)
    for each in grants:
        by_member[each.member].append(f"{each.role} on {each.on}")
    lines: list[str] = []
    for member, roles in by_member.items():
        lines += [member, *(f"  {role}" for role in dict.fromkeys(roles))]
    return lines


def finding_line(finding: CheckFinding) -> str:
    """`policy subscription-has-dead-letter: main-queue: …`, one line of an error."""
    where = finding.where.rpartition("::")[2]
    rule = "" if finding.rule == finding.source else f"{finding.rule}: "
    return f"{rule}`{where}` {finding.message}" + (f"; {finding.hint}" if finding.hint else "")


def report_fields(report: Report) -> dict[str, Any]:
    """Return the whole report as a JSON object; new releases only add keys."""
    return {
        "stack": report.stack,
        "ok": report.ok,
        "findings": [asdict(each) for each in report.findings],
        "notes": list(report.notes),
        "resources": [_resource_fields(each) for each in report.resources],
        "protected": [each.urn for each in report.protected],
        "monthly_usd": monthly_total(report.costs),
        "costs": [asdict(each) for each in report.costs],
        "grants": [asdict(each) for each in report.grants],
        "left_grants": [asdict(each) for each in report.left_grants],
        "left_to_host": list(report.left_to_host),
        "left_to_key_owner": list(report.left_to_key_owner),
        "rendered": dict(report.rendered),
        "contract": report.contract,
    }


def _resource_fields(each: Registration) -> dict[str, Any]:
    left_out = {"inputs", "dependencies", "property_dependencies", "replace_on_changes", "outputs"}
    facts = {fact.name: getattr(each, fact.name) for fact in fields(each) if fact.name not in left_out}
    return {
        **shown(facts),
        "physical_name": physical_name(each),
        "dependencies": sorted(each.dependencies),
        "inputs": shown(each.inputs),
    }
