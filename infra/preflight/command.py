"""Asks a Google project, by reading alone, whether a stack could be made in it.

`preflight` yields one finding for each check: APIs, quotas, zones, machines, boot images and TPU software that the project
sees, names that are taken or soft-deleted, organisation policies that would break the stack. A question that this identity
may not ask, or that gets no answer, is a finding too, and the other checks go on.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Final

from infra.cli import InfraParser, say, say_json
from infra.preflight.findings import Level, Look, PreflightFinding, fail, guard, guard_all, ok, warn
from infra.preflight.heads import list_head_looks
from infra.preflight.names import check_names, find_referred, look_for
from infra.preflight.policies import check_policies
from infra.preflight.quotas import check_accounts, check_quotas, check_zone, list_pool_looks
from infra.settings.files import find_project_folder
from infra.settings.model import StackSettings
from infra.settings.read import load_settings
from runtime.stack.google_api import GoogleApi, GoogleUnreachable

_BATCH: Final = 20
"""Services in one request; Google takes 30."""


def preflight(settings: StackSettings, api: GoogleApi | None) -> Iterator[PreflightFinding]:
    """Check everything that can be known before `up`. A stack without Google resources needs no `api`."""
    if api is None or not settings.uses_google:
        yield ok("project", "the stack has no Google resources, so there is nothing to ask")
        return
    reached = False
    first: list[tuple[str, Look]] = [
        ("identity", lambda: [ok("identity", api.who() or "credentials that do not tell whose they are")]),
        ("project", lambda: _project(settings, api)),
    ]
    for check, look in first:
        try:
            yield from guard(check, look)
            reached = True
        except GoogleUnreachable as problem:
            yield fail(check, problem.message, problem.hint)
    if not reached:
        # Every other question would wait for its timeout, too.
        yield warn("the rest", "was not asked: Google cannot be reached from here", "mend the network, then ask again")
        return
    yield from _run_checks(settings, api)


def _run_checks(settings: StackSettings, api: GoogleApi) -> Iterator[PreflightFinding]:
    looks: list[tuple[str, Look]] = [
        ("apis", lambda: _apis(settings, api)),
        ("quotas", lambda: check_quotas(settings, api)),
        ("quota service accounts", lambda: check_accounts(settings, api)),
    ]
    for each in settings.by_zone():
        looks += [("zones", partial(check_zone, each, api)), *list_head_looks(each, api), *list_pool_looks(each, api)]
    looks += [
        (f"uses {wanted.what}", partial(look_for, wanted, settings.region if settings.heads else None, api))
        for wanted in find_referred(settings)
    ]
    for check, look in looks:
        yield from guard_all(check, look)
    yield from check_names(settings, api)
    yield from check_policies(settings, api)


EXAMPLES: Final = """examples:
  python -m infra preflight --stack dev
  python -m infra preflight --stack marin-us-west4 -o json | jq '.[] | select(.level != "ok")'

It asks with this machine's Google credentials, as the account that the stack file names under `impersonate`, and reads
only. What an identity may not ask is a warning.

exit codes: 0 nothing fails, 2 something does
"""


def main(args: Sequence[str]) -> int:
    """`python -m infra preflight`. Errors are raised."""
    parser = InfraParser(
        "preflight", "Ask a Google project, by reading alone, whether a stack could be made in it.", EXAMPLES
    )
    parser.add_argument("--stack", "-s", required=True, metavar="NAME", help="whose file is Pulumi.NAME.yaml")
    parser.add_argument(
        "--folder", type=Path, metavar="PATH", help="where the stack files lie; here or above by default"
    )
    parser.add_argument("--output", "-o", choices=["text", "json"], default="text")
    asked = parser.parse_args(args)
    settings = load_settings(asked.stack, find_project_folder(asked.folder))
    with ExitStack() as stack:
        api = None
        if settings.uses_google:
            # Names a server that stands in for Google; the runtime reads the same variable.
            server = os.environ.get("RUNTIME_GOOGLE_API") or None
            api = stack.enter_context(GoogleApi(server=server, impersonate=settings.impersonate, again=False))
        findings = list(_shown(preflight(settings, api), asked.output))
    if asked.output == "json":
        say_json(json.dumps([dataclasses.asdict(each) for each in findings], indent=2))
    return 2 if any(each.level is Level.FAIL for each in findings) else 0


def _shown(findings: Iterable[PreflightFinding], output: str) -> Iterator[PreflightFinding]:
    """Print each finding as it arrives, if `output` is text."""
    for finding in findings:
        if output == "text":
            say(f"{finding.level.value:<4}  {finding.check:<28}  {finding.message}\n")
            if finding.fix:
                say(f"{'':<36}fix: {finding.fix}\n")
            sys.stdout.flush()
        yield finding


def _project(settings: StackSettings, api: GoogleApi) -> Iterator[PreflightFinding]:
    found = api.find("cloudresourcemanager", f"v3/projects/{settings.project}")
    if found is None:
        yield fail(
            "project", f"there is no project `{settings.project}`", "correct `project`, or `gcloud projects create`"
        )
        return
    state = str(found.get("state", "ACTIVE"))
    if state != "ACTIVE":
        fix = f"gcloud projects undelete {settings.project}"
        yield fail("project", f"project `{settings.project}` is {state.lower().replace('_', ' ')}", fix)
        return
    yield ok("project", f"{settings.project} is active")


def _apis(settings: StackSettings, api: GoogleApi) -> Iterator[PreflightFinding]:
    from infra.program import find_services

    wanted = [f"{service}.googleapis.com" for service in find_services(settings)]
    off: list[str] = []
    for start in range(0, len(wanted), _BATCH):
        names = [f"projects/{settings.project}/services/{service}" for service in wanted[start : start + _BATCH]]
        answer = api.get("serviceusage", f"v1/projects/{settings.project}/services:batchGet", names=names)
        off += [
            each["name"].rpartition("/")[2] for each in answer.get("services", ()) if each.get("state") != "ENABLED"
        ]
    first = [name for name in off if name.partition(".")[0] in ("serviceusage", "cloudresourcemanager")]
    if first:
        fix = f"gcloud services enable {' '.join(first)} --project {settings.project}"
        yield fail("apis", f"{' and '.join(first)} must be on before `up` can enable the rest", fix)
    elif off:
        yield ok("apis", f"{len(wanted) - len(off)} of {len(wanted)} are on; `up` enables {', '.join(sorted(off))}")
    else:
        yield ok("apis", f"all {len(wanted)} are on")
