"""`python -m infra check`: prints the resources that a stack would make, and fails with every finding."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from infra.check.check import Finding, Report, check_stack, find_collisions, find_shared_notes
from infra.check.plan import plan
from infra.check.recording import Recording, decode_recording, encode_recording
from infra.check.show import finding_line, render_report, render_steps, render_summary, report_fields
from infra.cli import Parser
from infra.settings.files import find_project_folder, find_stack_file, list_stacks
from runtime.errors import RequestRefused, UnknownName

EXAMPLES: Final = """examples:
  python -m infra check --all                      every stack in a line, then what is wrong
  python -m infra check --stack dev                what the stack would make, who may do what, what it costs
  python -m infra check --stack dev -o json        the same for a program
  python -m infra check --stack marin-us-west4 --show main-head-vm/startup-script
  python -m infra check --stack dev --render out/  the rendered files, to read or compare
  python -m infra check --stack dev --save dev.json, and after an edit --against dev.json
                                                   the steps that `pulumi up` would take for it

exit codes: 0 nothing wrong, 2 something is, and all of it is on stderr
"""


class CheckFailed(RequestRefused):
    """The stacks cannot be deployed; `findings` are all the reasons."""

    def __init__(self, what: str, findings: Sequence[Finding], lines: Sequence[str]) -> None:
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
    parser = Parser(
        prog="python -m infra check",
        description="What a stack would make, without an engine, an account or a network.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--stack", "-s", metavar="NAME", help="the stack of the file Pulumi.NAME.yaml")
    which.add_argument("--all", action="store_true", help="every stack, and what they would take from each other")
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text", help="for people, or for a program")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="where the stack files are; found from here upwards")
    parser.add_argument("--show", metavar="FILE", help="print one rendered file and nothing else")
    parser.add_argument("--render", type=Path, metavar="DIR", help="write all rendered files into a folder")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write what the program asks for, for --against")
    parser.add_argument(
        "--against", metavar="FILE|STACK", help="the steps from what --save wrote, or from another stack"
    )
    return parser


def main(words: Sequence[str]) -> int:
    args = make_parser().parse_args(words)
    folder = find_project_folder(args.folder)
    if args.all:
        if args.show or args.render or args.save or args.against:
            raise RequestRefused(
                "`--show`, `--render`, `--save` and `--against` are about one stack", hint="use `--stack`"
            )
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
        sys.stdout.write(render_summary(reports))
        sys.stdout.write("".join(f"note: {each}\n" for each in notes))
    _stop_if_wrong(reports, collisions)
    return 0


def _check_one(stack: str, folder: Path, args: argparse.Namespace) -> int:
    report = check_stack(stack, folder=folder)
    steps = None
    if args.against and report.recording is not None:
        steps = plan(_load_against(args.against, folder, stack), report.recording)
    if args.show:
        sys.stdout.write(_find_rendered(report, args.show))
        return 0
    if args.output == "json":
        more: dict[str, Any] = {"steps": [asdict(each) for each in steps]} if steps is not None else {}
        _print_json([report], **more)
    elif report.recording is not None:
        sys.stdout.write(render_report(report))
        if steps is not None:
            sys.stdout.write("\n" + render_steps(steps, args.against))
    if args.render is not None:
        for name, text in report.rendered.items():
            _write(args.render / name, text)
        sys.stderr.write(f"wrote {len(report.rendered)} files into {args.render}\n")
    if args.save is not None and report.recording is not None:
        _write(args.save, encode_recording(report.recording))
    _stop_if_wrong([report])
    return 0


def _load_against(against: str, folder: Path, stack: str) -> Recording:
    file = Path(against)
    if file.is_file():
        return decode_recording(file.read_text(encoding="utf-8"), source=against)
    if against.endswith(".json"):
        raise RequestRefused(
            f"no file `{against}`", hint=f"`python -m infra check --stack {stack} --save {against}` writes one"
        )
    find_stack_file(against, folder)
    other = check_stack(against, folder=folder)
    _stop_if_wrong([other])
    assert other.recording is not None
    # Every URN has the stack's name, so the comparison needs one name.
    text = encode_recording(other.recording)
    return decode_recording(text.replace(f"urn:pulumi:{against}::", f"urn:pulumi:{stack}::"), source=against)


def _find_rendered(report: Report, name: str) -> str:
    if report.recording is None:
        _stop_if_wrong([report])
    ends = [each for each in report.rendered if each == name or each.endswith(f"/{name}")]
    if len(ends) != 1:
        raise UnknownName("rendered file", name, report.rendered, where=f"in stack `{report.stack}`")
    return report.rendered[ends[0]]


def _write(file: Path, text: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as problem:
        reason = (problem.strerror or str(problem)).lower()
        raise RequestRefused(f"cannot write `{file}`: {reason}", hint="name another place") from problem


def _print_json(reports: Sequence[Report], **more: Any) -> None:
    fields = {"schema": 1, "stacks": [report_fields(each) for each in reports], **more}
    sys.stdout.write(json.dumps(fields, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def _stop_if_wrong(reports: Sequence[Report], collisions: Sequence[Finding] = ()) -> None:
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
