"""What Google says of machines that it cannot make, of firewalls in a network of another project, and of keys that it may not use.

Each sentence is Google's own, as people have reported it.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from runtime.schema import leaves
from tests.engine.plugin import Refused, Values, value_at

KEY_USERS: Final = {
    "gcp:artifactregistry/repository:Repository": "gcp-sa-artifactregistry",
    "gcp:compute/instance:Instance": "compute-system",
    "gcp:pubsub/topic:Topic": "gcp-sa-pubsub",
    "gcp:secretmanager/secret:Secret": "gcp-sa-secretmanager",
    "gcp:storage/bucket:Bucket": "gs-project-accounts",
}
"""Type → domain of the agent that encrypts it."""

_PROJECT: Final = re.compile(r"projects/([^/]+)/global/networks/")


_PERSISTENT: Final = ("pd-balanced", "pd-ssd", "pd-standard")
_HYPERDISK: Final = ("hyperdisk-balanced",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    types: str
    """Form of the types' names, without the series."""
    disks: tuple[str, ...] = _HYPERDISK
    architecture: str = "X86_64"
    gpus: bool = False
    moves: bool = True


SERIES: Final = {
    "a3": Series(types=r"highgpu-[1248]g", disks=(*_PERSISTENT, *_HYPERDISK), gpus=True),
    "a4": Series(types=r"highgpu-8g", gpus=True),
    "c4": Series(types=r"(?:standard|highmem|highcpu)-(?:2|4|8|16|24|32|48|96)"),
    "c4a": Series(types=r"(?:standard|highmem|highcpu)-(?:1|2|4|8|16|32|48|64|72)", architecture="ARM64"),
    "g2": Series(types=r"standard-(?:4|8|12|16|24|32|48|96)", disks=_PERSISTENT[:2], gpus=True),
    "h3": Series(types=r"standard-88", disks=("pd-balanced", *_HYPERDISK), moves=False),
    "n2": Series(types=r"(?:standard|highmem|highcpu)-(?:2|4|8|16|32|48|64|80|96)", disks=_PERSISTENT),
    "x4": Series(types=r"megamem-(?:480|960|1440|1920)-metal", moves=False),
}
"""The machine series of this Google. https://cloud.google.com/compute/docs/machine-resource"""


def refuse_machine(inputs: Values) -> None:
    """Refuse a machine type that does not exist, and one that does not fit disk, image or maintenance."""
    machine_type, zone = str(inputs["machineType"]).rpartition("/")[2], inputs["zone"]
    name, _, kind = machine_type.partition("-")
    series = SERIES.get(name)
    if series is None or not re.fullmatch(series.types, kind):
        raise Refused(
            f"Error 400: Invalid value for field 'resource.machineType': 'zones/{zone}/machineTypes/{machine_type}'. "
            f"Machine type with name '{machine_type}' does not exist in zone '{zone}'., invalid"
        )
    # A disk that is not named is of a type that Google chooses for the machine.
    disk = value_at(inputs, "bootDisk.initializeParams.type")
    if disk is not None and str(disk).rpartition("/")[2] not in series.disks:
        raise Refused(
            f"Error 400: [{disk}, {machine_type}] features are not compatible for creating instance., badRequest"
        )
    image = str(value_at(inputs, "bootDisk.initializeParams.image") or "")
    have = "ARM64" if re.search("arm64|aarch64", image) else "X86_64"
    if image.startswith("projects/") and have != series.architecture:
        raise Refused(
            f"Error 400: Invalid resource usage: 'Requested boot disk architecture ({have}) is not compatible with "
            f"machine type architecture ({series.architecture}).'., invalidResourceUsage"
        )
    if value_at(inputs, "scheduling.onHostMaintenance") == "MIGRATE":
        if series.gpus:
            raise Refused("Error 400: Instances with guest accelerators do not support live migration., badRequest")
        if not series.moves:
            raise Refused(
                f"Error 400: [{machine_type}, MIGRATE] features are not compatible for creating instance., badRequest"
            )


def refuse_firewall(inputs: Values) -> None:
    """Refuse a firewall in a network of another project."""
    network = str(inputs["network"])
    found = _PROJECT.search(network)
    if found and found[1] != inputs["project"]:
        raise Refused(
            f"Error 400: Invalid value for field 'resource.network': '{network}'. "
            "Cross project referencing is not allowed for this resource., invalid"
        )


def refuse_key(type_: str, inputs: Values, number: str, granted: Collection[tuple[str, str]]) -> None:
    """Refuse a key that is not among the pairs of key and member in `granted`."""
    if type_ not in KEY_USERS:
        return
    member = f"serviceAccount:service-{number}@{KEY_USERS[type_]}.iam.gserviceaccount.com"
    for path, key in leaves(inputs):
        if "kmskey" in path.lower() and key and (key, member) not in granted:
            raise Refused(
                f"Error 403: Permission denied on Cloud KMS key. Please ensure that {member.partition(':')[2]} has "
                f"been granted roles/cloudkms.cryptoKeyEncrypterDecrypter on {key}., forbidden"
            )
