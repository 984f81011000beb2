"""The network of a stack's machines: private, with a way out and none in."""

from __future__ import annotations

from dataclasses import dataclass

import pulumi

from infra.components.apis import Apis
from infra.components.shared import Part, StackSite
from infra.settings.model import NetworkSettings
from infra.settings.read import ensure_valid


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkArgs:
    site: StackSite
    settings: NetworkSettings = NetworkSettings()
    apis: Apis | None = None


class Network(Part):
    """VPC, subnet with private Google access, router and NAT; or an existing subnet, which stays as it is."""

    network: pulumi.Output[str]
    """Self-link."""
    subnet: pulumi.Output[str]
    """Self-link."""
    cidr: pulumi.Output[str]
    """Range of the machines; for an existing subnet, the range in the settings."""

    def __init__(self, name: str, args: NetworkArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        ensure_valid(args.settings, "network")
        super().__init__("runtime:network:Network", name, args.site, args.apis, opts)
        if args.settings.subnet is not None:
            self.network = pulumi.Output.from_input(args.settings.network or find_network(args.settings.subnet))
            self.subnet = pulumi.Output.from_input(args.settings.subnet)
            self.cidr = pulumi.Output.from_input(args.settings.cidr)
        else:
            self._make(args.settings)
        self._register()

    def _make(self, settings: NetworkSettings) -> None:
        # This import takes more than a second, and only a stack that makes a network needs it.
        from pulumi_gcp import compute

        name, site = self._name, self._site
        network = compute.Network(
            f"{name}-network",
            name=site.names.network(),
            project=site.project,
            description=f"Machines of stack {site.names.stack}",
            auto_create_subnetworks=False,
            routing_mode="REGIONAL",
            deletion_policy="DELETE",
            opts=self._kept("compute"),
        )
        subnet = compute.Subnetwork(
            f"{name}-subnet",
            name=site.names.network(),
            project=site.project,
            region=site.region,
            network=network.self_link,
            ip_cidr_range=settings.cidr,
            private_ip_google_access=True,
            stack_type="IPV4_ONLY",
            # Each connection in a minute, of half of the packets: the rest is estimated.
            log_config=compute.SubnetworkLogConfigArgs(
                aggregation_interval="INTERVAL_1_MIN", flow_sampling=0.5, metadata="INCLUDE_ALL_METADATA"
            )
            if settings.flow_logs
            else None,
            deletion_policy="DELETE",
            opts=self._kept(),
        )
        router = compute.Router(
            f"{name}-router",
            name=site.names.network(),
            project=site.project,
            region=site.region,
            network=network.self_link,
            deletion_policy="DELETE",
            opts=self._options(delete_before_replace=True),
        )
        addresses = [
            compute.Address(
                f"{name}-nat-{index}",
                name=f"{site.names.network()}-nat-{index}",
                project=site.project,
                region=site.region,
                description=f"What leaves the network of stack {site.names.stack} comes from here",
                address_type="EXTERNAL",
                labels=site.labels,
                deletion_policy="DELETE",
                opts=self._kept("compute"),
            )
            for index in range(settings.nat_addresses)
        ]
        compute.RouterNat(
            f"{name}-nat",
            name=site.names.network(),
            project=site.project,
            region=site.region,
            router=router.name,
            nat_ip_allocate_option="MANUAL_ONLY" if addresses else "AUTO_ONLY",
            nat_ips=[each.self_link for each in addresses] or None,
            source_subnetwork_ip_ranges_to_nat="LIST_OF_SUBNETWORKS",
            subnetworks=[
                compute.RouterNatSubnetworkArgs(name=subnet.self_link, source_ip_ranges_to_nats=["ALL_IP_RANGES"])
            ],
            enable_dynamic_port_allocation=True,
            # Google refuses dynamic ports together with endpoint-independent mapping.
            # https://cloud.google.com/nat/docs/ports-and-addresses
            enable_endpoint_independent_mapping=False,
            min_ports_per_vm=64,
            max_ports_per_vm=8192,
            log_config=compute.RouterNatLogConfigArgs(enable=True, filter="ERRORS_ONLY"),
            deletion_policy="DELETE",
            opts=self._options(delete_before_replace=True),
        )
        compute.Firewall(
            f"{name}-internal",
            name=site.names.firewall("internal"),
            project=site.project,
            network=network.self_link,
            description="Machines of the subnet reach each other; nothing else reaches them",
            direction="INGRESS",
            priority=1000,
            source_ranges=[settings.cidr],
            destination_ranges=[settings.cidr],
            allows=[compute.FirewallAllowArgs(protocol=protocol) for protocol in ("tcp", "udp", "icmp")],
            deletion_policy="DELETE",
            opts=self._options(delete_before_replace=True, replace_on_changes=["network"]),
        )
        self.network = network.self_link
        self.subnet = subnet.self_link
        # Through the subnet, so that resources that need the range wait for it.
        self.cidr = subnet.ip_cidr_range


def find_network(subnet: str) -> str:
    """Return the network with the subnet's name, which Google's automatic subnets are in."""
    before, _, after = subnet.partition("/regions/")
    return f"{before}/global/networks/{after.rsplit('/', 1)[-1]}"
