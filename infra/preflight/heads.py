"""Whether the heads' machine types and boot images exist, fit each other, and are not given up by Google."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final

from infra.gcp import catalog
from infra.preflight.findings import Look, PreflightFinding, fail, name_nearest, ok, warn
from infra.settings.model import HeadSettings, StackSettings
from infra.settings.rules import BOOT_IMAGE
from runtime.stack.google_api import GoogleApi, GoogleRefused

_GONE: Final = frozenset({"OBSOLETE", "DELETED"})
"""States in which Google makes no machine of a type or an image. DEPRECATED is a warning of Google's."""


def list_head_looks(settings: StackSettings, api: GoogleApi) -> Iterator[tuple[str, Look]]:
    """Yield `head HEAD` and the check of its machine and image."""
    for name, head in settings.heads.items():
        yield f"head {name}", partial(_check_head, settings, f"head {name}", head, api)


def _check_head(settings: StackSettings, check: str, head: HeadSettings, api: GoogleApi) -> Iterator[PreflightFinding]:
    where = f"compute/v1/projects/{settings.project}/zones/{settings.zone}/machineTypes"
    machine = api.find("compute", f"{where}/{head.machine_type}")
    if machine is not None:
        yield _judge(check, f"machine type {head.machine_type}", machine, "another `machine_type`")
    elif known := _list_names(where, api):
        fix = f"it has {name_nearest(head.machine_type, known)}"
        yield fail(check, f"the project sees no {head.machine_type} in {settings.zone}", fix)
    found = BOOT_IMAGE.fullmatch(head.boot_image)
    if found is None:
        return
    path = f"projects/{found['project']}/global/images/{found['name']}"
    image = api.find("compute", f"compute/v1/{path}")
    if image is None:
        fix = f"`gcloud compute images list --project {found['project']}` lists the images that are there"
        yield fail(check, f"there is no boot image `{path}`", fix)
        return
    yield _judge(check, f"boot image {found['name']}", image, _successor(image))
    yield from _fits(check, head, image, machine or {})


def _list_names(where: str, api: GoogleApi) -> list[str]:
    """List the machine types of a zone; none for a zone that the project does not see, which is a finding of its own."""
    try:
        return [str(each.get("name", "")) for each in api.pages("compute", where, "items")]
    except GoogleRefused as refused:
        if refused.status != 404:
            raise
        return []


def _judge(check: str, thing: str, answer: Mapping[str, Any], instead: str) -> PreflightFinding:
    state = str(answer.get("deprecated", {}).get("state", "ACTIVE"))
    if state in _GONE:
        return fail(check, f"{thing} is {state.lower()}, and Google makes no machine of it", f"take {instead}")
    if state == "DEPRECATED":
        return warn(check, f"{thing} is deprecated: it works until Google takes it away", f"take {instead}")
    return ok(check, f"{thing} is there")


def _successor(image: Mapping[str, Any]) -> str:
    replacement = str(image.get("deprecated", {}).get("replacement", ""))
    return (
        f"`{replacement[replacement.index('projects/') :]}`" if "projects/" in replacement else "a newer `boot_image`"
    )


def _fits(
    check: str, head: HeadSettings, image: Mapping[str, Any], machine: Mapping[str, Any]
) -> Iterator[PreflightFinding]:
    # Google leaves the architecture out of old images, which are for x86.
    wanted = str(machine.get("architecture") or catalog.find_series(head.machine_type).architecture)
    have = str(image.get("architecture") or "X86_64")
    if have != wanted:
        text = f"the boot image is for {have}, and {head.machine_type} is {wanted}"
        yield fail(check, text, "take the image of the same system for the other architecture")
    least_gb = int(image.get("diskSizeGb", 0))
    if least_gb > head.disk_gb:
        text = f"the boot image needs a disk of {least_gb:,} GB, and `disk_gb` is {head.disk_gb:,}"
        yield fail(check, text, f"set `disk_gb` to {least_gb} or more")
