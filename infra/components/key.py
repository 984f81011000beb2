"""The grants of Google's own agents on the stack's encryption key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import pulumi
from pulumi_gcp import kms

from infra.components.apis import Apis
from infra.components.shared import Part, StackSite

ROLE: Final = "roles/cloudkms.cryptoKeyEncrypterDecrypter"

AGENTS: Final[Mapping[str, str]] = {
    "storage": "gs-project-accounts",
    "pubsub": "gcp-sa-pubsub",
    "artifactregistry": "gcp-sa-artifactregistry",
    "secretmanager": "gcp-sa-secretmanager",
    "compute": "compute-system",
}
"""Service → domain of its agent. https://cloud.google.com/iam/docs/service-agents"""

MADE_AS_IDENTITIES: Final = ("pubsub", "artifactregistry", "secretmanager")
"""Services whose agents Service Usage makes. Compute's comes with its API. `gcloud storage service-agent` makes Storage's,
for which Service Usage fails.
https://github.com/terraform-google-modules/terraform-google-project-factory/issues/803"""

WITHOUT_OTHERS: Final = "cloudkms"
"""Service whose agent reveals the project's number if none of the others exists."""


def agent_member(service: str, number: str) -> str:
    return f"serviceAccount:service-{number}@{AGENTS[service]}.iam.gserviceaccount.com"


def find_agents(services: Sequence[str]) -> list[str]:
    """Return the services whose agents `Apis` has to make, so that `services` can be granted the key."""
    return [each for each in MADE_AS_IDENTITIES if each in services] or [WITHOUT_OTHERS]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyGrantsArgs:
    site: StackSite
    kms_key: str
    """`projects/P/locations/L/keyRings/R/cryptoKeys/K`, in the project of the stack."""
    services: Sequence[str]
    """Services that encrypt with the key; each has a line in `AGENTS`."""
    apis: Apis


class KeyGrants(Part):
    """Lets the agents of `services` encrypt and decrypt with the key, and nobody else."""

    kms_key: str

    def __init__(self, name: str, args: KeyGrantsArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("runtime:key:KeyGrants", name, args.site, args.apis, opts)
        self.kms_key = args.kms_key
        made = args.apis.agents
        # The number of the project is in no file; every agent's name has it.
        number = made[find_agents(args.services)[0]].apply(lambda member: member.split("-")[1].split("@")[0])
        self.grants: dict[str, pulumi.Resource] = {
            service: kms.CryptoKeyIAMMember(
                f"{name}-{service}-agent",
                crypto_key_id=args.kms_key,
                role=ROLE,
                member=made[service] if service in made else number.apply(partial(agent_member, service)),
                opts=self._options("cloudkms", service),
            )
            for service in args.services
        }
        self._register()
