"""What Google says of machines that it cannot make, of firewalls in a network of another project, and of keys that it may not use.

Each sentence is Google's own, as people have reported it.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final

from infra.gcp import catalog, machines
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


def refuse_machine(inputs: Values) -> None:
    """Refuse a machine type that does not exist, and one that does not fit disk, image or maintenance."""
    machine_type, zone = str(inputs["machineType"]).rpartition("/")[2], inputs["zone"]
    if not machines.is_offered(machine_type):
        raise Refused(
            f"Error 400: Invalid value for field 'resource.machineType': 'zones/{zone}/machineTypes/{machine_type}'. "
            f"Machine type with name '{machine_type}' does not exist in zone '{zone}'., invalid"
        )
    # A disk that is not named is of a type that Google chooses for the machine.
    disk = value_at(inputs, "bootDisk.initializeParams.type")
    if disk is not None and str(disk).rpartition("/")[2] not in machines.disk_types(machine_type):
        raise Refused(
            f"Error 400: [{disk}, {machine_type}] features are not compatible for creating instance., badRequest"
        )
    _refuse_image(machine_type, str(value_at(inputs, "bootDisk.initializeParams.image") or ""))
    if value_at(inputs, "scheduling.onHostMaintenance") == "MIGRATE":
        if machines.family_of(machine_type).gpus:
            raise Refused("Error 400: Instances with guest accelerators do not support live migration., badRequest")
        if machines.maintenance(machine_type) != "MIGRATE":
            raise Refused(
                f"Error 400: [{machine_type}, MIGRATE] features are not compatible for creating instance., badRequest"
            )


def _refuse_image(machine_type: str, image: str) -> None:
    wanted = machines.family_of(machine_type).architecture
    have = machines.ARM if catalog.is_arm_image(image) else machines.X86
    if image.startswith("projects/") and have != wanted:
        raise Refused(
            f"Error 400: Invalid resource usage: 'Requested boot disk architecture ({have}) is not compatible with "
            f"machine type architecture ({wanted}).'., invalidResourceUsage"
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
