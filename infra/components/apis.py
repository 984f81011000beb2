"""Enabled services of a Google project, and the services' agents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pulumi
from pulumi_gcp import projects

from runtime.errors import UnknownName


@dataclass(frozen=True, slots=True, kw_only=True)
class ApisArgs:
    project: str
    services: Sequence[str]
    """Short names: `pubsub`, `secretmanager` …"""
    agents: Sequence[str] = ()
    """Services whose agent gets grants; the component makes the agent's identity at once, not on first use."""


class Apis(pulumi.ComponentResource):
    """Enables services. A destroy leaves them enabled: other stacks of the project may need them."""

    agents: Mapping[str, pulumi.Output[str]]
    """Service → IAM member of its agent, `serviceAccount:service-NUMBER@…`."""

    def __init__(self, name: str, args: ApisArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        for agent in args.agents:
            _ensure_known(agent, args.services)
        super().__init__("runtime:google:Apis", name, None, opts)
        self._services: dict[str, projects.Service] = {}
        # Serviceusage enables all others; a person enables it by hand before the first `up`.
        for service in sorted(dict.fromkeys(args.services), key=lambda each: each != "serviceusage"):
            self._services[service] = projects.Service(
                f"{name}-{service}",
                project=args.project,
                service=f"{service}.googleapis.com",
                disable_on_destroy=False,
                disable_dependent_services=False,
                deletion_policy="ABANDON",
                opts=pulumi.ResourceOptions(
                    parent=self,
                    retain_on_delete=True,
                    depends_on=[each for key, each in self._services.items() if key == "serviceusage"],
                ),
            )
        self._agents = {
            service: projects.ServiceIdentity(
                f"{name}-{service}-agent",
                project=args.project,
                service=f"{service}.googleapis.com",
                opts=pulumi.ResourceOptions(parent=self, retain_on_delete=True, depends_on=[self._services[service]]),
            )
            for service in dict.fromkeys(args.agents)
        }
        self.agents = {service: agent.member for service, agent in self._agents.items()}
        self.register_outputs({"agents": self.agents})

    def needs(self, *services: str) -> list[pulumi.Resource]:
        """Return the resources that a user of these services depends on: the enabled services, and their agents.

        Raises `UnknownName` for a service that `ApisArgs` does not name.
        """
        found: list[pulumi.Resource] = []
        for service in services:
            _ensure_known(service, self._services)
            found.append(self._services[service])
            if service in self._agents:
                found.append(self._agents[service])
        return found


def _ensure_known(service: str, known: Mapping[str, object] | Sequence[str]) -> None:
    if service not in known:
        raise UnknownName("API", service, known, hint="name it among the `services` of `ApisArgs`")
