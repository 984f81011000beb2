"""The rules about the stack's encryption key: its form, and the places whose resources it can encrypt."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from infra.settings.forms import KEY
from infra.settings.model import StackSettings
from infra.settings.problems import wrong
from runtime.schema import Problem, join

_VERSION: Final = re.compile(r"/cryptoKeyVersions/[0-9]+$")
_FORM: Final = "a key, `projects/P/locations/REGION/keyRings/R/cryptoKeys/K`"

EVERYWHERE: Final = "global"
_KEYS_OF_LARGER_PLACES: Final = {"eu": "europe"}
"""Location of a bucket → location of its key, if their names differ.
https://cloud.google.com/storage/docs/encryption/customer-managed-keys"""
_LARGER_PLACES: Final = ("us", "europe", "asia")
"""Locations of keys that the machines of their regions can use.
https://cloud.google.com/compute/docs/disks/customer-managed-encryption"""


def find_form_problems(settings: StackSettings, path: str) -> Iterator[Problem]:
    where, key = join(path, "kms_key"), settings.kms_key
    if key is None:
        return
    without = _VERSION.sub("", key)
    if without != key and KEY.fullmatch(without):
        hint = f"Google takes the primary version: `{without}`"
        yield wrong(where, key, f"{_FORM}, without a version", hint)
    elif not (found := KEY.fullmatch(key)):
        yield wrong(where, key, _FORM, "`gcloud kms keys list --keyring R --location REGION` prints the names")
    elif found["project"].isdecimal():
        # Only the id says whether the stack makes the grants on the key.
        yield wrong(where, key, f"{_FORM}, with the project's id", "`gcloud projects describe` prints it")


def find_key_problems(settings: StackSettings) -> Iterator[Problem]:
    """Find a key that nothing uses, and parts that are in another place than the key."""
    found = KEY.fullmatch(settings.kms_key or "")
    if found is None:
        return
    if not settings.encrypted_services:
        yield Problem("kms_key", "is set, and nothing that it encrypts is in this stack", "leave it out")
    location = found["location"]
    for part, needed in _places(settings):
        if location not in needed:
            allowed = f"a key in {' or '.join(needed)}, where `{part}` needs it"
            yield wrong("kms_key", settings.kms_key, allowed, _way_out(part))
    for name, secret in settings.secrets.items():
        # https://cloud.google.com/secret-manager/docs/cmek
        if secret.existing is None and not secret.regions and location != EVERYWHERE:
            yield Problem(
                f"secrets.{name}.regions",
                f"is not set, and a secret that is kept everywhere needs a key in {EVERYWHERE};"
                f" `kms_key` is in {location}",
                f"`regions: [{location}]`, or `existing` names the secret of a stack without a key",
            )


def _places(settings: StackSettings) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each part with the locations of keys that fit it. Topics take a key of any location."""
    region = settings.region or ""
    for part, location in settings.bucket_locations.items():
        place = (location or region).lower()
        yield part, (_KEYS_OF_LARGER_PLACES.get(place, place),)
    for name, registry in settings.registries.items():
        for each in registry.made_regions(region):
            # https://cloud.google.com/artifact-registry/docs/cmek
            yield f"registries.{name}", (each,)
    for name, secret in settings.secrets.items():
        for each in secret.regions if secret.existing is None else ():
            yield f"secrets.{name}", (each,)
    if settings.heads:
        larger = [each for each in _LARGER_PLACES if region.startswith(f"{each}-")]
        yield "heads", (region, *larger, EVERYWHERE)


def _way_out(part: str) -> str | None:
    kind = part.partition(".")[0]
    return None if kind in ("records", "heads") else "or `existing` names what a stack without this key makes"
