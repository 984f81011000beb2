"""Renders reports as text for people and as JSON for programs."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from infra.check.check import Finding, Grant, Report, physical_name, shown
from infra.check.plan import Action, Step, changes
from infra.check.recording import Registration
from infra.gcp.prices import monthly_total

SIGNS: Mapping[Action, str] = {
    Action.CREATE: "+",
    Action.IMPORT: "=",
    Action.UPDATE: "~",
    Action.REPLACE: "+-",
    Action.DELETE: "-",
    Action.FORGET: "×",
}


def render_report(report: Report) -> str:
    """Render everything about one stack, section by section, without the texts of rendered files."""
    sections = [
        _header(report),
        _section("resources", _tree(report)),
        _section("cost a month", _costs(report)),
        _section("who may do what", _grants(report.grants)),
        _section("left to another stack of the project", _grants(report.left_grants)),
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


def render_steps(steps: Sequence[Step], against: str) -> str:
    """Render the steps of an `up` from the state `against`."""
    same = sum(1 for each in steps if each.action is Action.SAME)
    lines = [line for each in changes(steps) for line in _step(each)]
    return f"steps from {against}\n" + "".join(f"  {line}\n" for line in [*lines, f"{same} the same"])


def _step(step: Step) -> Iterator[str]:
    first = " (deletes first)" if step.delete_first else ""
    yield f"{SIGNS[step.action]:<2} {step.action.value} {step.name}  {step.type}{first}"
    paths = [f"{path}{' (forces it)' if path in step.replacing else ''}" for path in step.changed]
    paths += [f"{path} (taken from what is replaced)" for path in step.replacing if path not in step.changed]
    if paths:
        yield f"     {', '.join(paths)}"
    if step.blocked:
        yield f"     refused: {step.blocked}"


def finding_line(finding: Finding) -> str:
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
        "rendered": dict(report.rendered),
        "contract": report.contract,
    }


def _resource_fields(each: Registration) -> dict[str, Any]:
    return {
        "urn": each.urn,
        "type": each.type,
        "name": each.name,
        "physical_name": physical_name(each),
        "custom": each.custom,
        "parent": each.parent,
        "provider": each.provider,
        "protect": each.protect,
        "retain_on_delete": each.retain_on_delete,
        "delete_before_replace": each.delete_before_replace,
        "ignore_changes": list(each.ignore_changes),
        "aliases": list(each.aliases),
        "import_id": each.import_id,
        "dependencies": sorted(each.dependencies),
        "inputs": shown(each.inputs),
    }
