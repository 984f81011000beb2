"""What the owner of a network in another project has to do for a stack, as commands."""

from __future__ import annotations

import shlex
from typing import Final

from infra.naming import Names
from infra.render.firewalls import list_openings
from infra.settings.model import StackSettings

TPU_AGENT: Final = "service-NUMBER@gcp-sa-tpu.iam.gserviceaccount.com"
"""It attaches TPU nodes to the network; NUMBER is the number of the stack's project.
https://cloud.google.com/tpu/docs/shared-vpc-networks"""


def list_host_needs(settings: StackSettings) -> list[str]:
    """List the commands for the network's project, in order; empty if the network is the stack's own project's."""
    host, network = settings.host_project, settings.network
    if host is None or network is None or network.subnet is None or not settings.heads:
        return []
    path = network.subnet.partition("/regions/")
    region, _, subnet = path[2].split("/")
    found = [
        f"gcloud compute shared-vpc associated-projects add {settings.project} --host-project {host}",
        f"gcloud projects add-iam-policy-binding {host} --member serviceAccount:{TPU_AGENT} --role roles/tpu.xpnAgent",
    ]
    found += [
        f"gcloud compute networks subnets add-iam-policy-binding {subnet} --project {host} --region {region}"
        f" --member {member} --role roles/compute.networkUser"
        for member in _makers(settings)
    ]
    return [*found, *_firewalls(settings, host, (network.network or subnet).rpartition("/")[2], network.cidr)]


def _makers(settings: StackSettings) -> list[str]:
    """List those who run `up`, and so put the heads into the subnet."""
    emails = [settings.impersonate] if settings.impersonate else []
    if settings.deployer is not None:
        emails.append(settings.deployer)
    return [f"serviceAccount:{email}" for email in dict.fromkeys(emails)] or ["user:EMAIL-OF-WHO-RUNS-UP"]


def _firewalls(settings: StackSettings, host: str, network: str, cidr: str) -> list[str]:
    names = Names(stack=settings.stack, project=settings.project)
    return [
        f"gcloud compute firewall-rules create {names.firewall(f'{head}-{rule.purpose}')} --project {host}"
        f" --network {network} --direction INGRESS --source-ranges {','.join(rule.sources)} --target-tags {names.cluster(head)}"
        f" --allow {','.join(_allowed(protocol, ports) for protocol, ports in rule.allowed)}"
        f" --description {shlex.quote(f'{rule.title}; cluster {names.cluster(head)}')}"
        for head in sorted(settings.heads)
        for rule in list_openings(cidr, settings.network.ssh_cidrs if settings.network else ())
    ]


def _allowed(protocol: str, ports: tuple[str, ...]) -> str:
    return ",".join(f"{protocol}:{port}" for port in ports) or protocol
