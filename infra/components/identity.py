"""One service account for each role, and the grants of people."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import pulumi
from pulumi_gcp import projects, serviceaccount

from infra.components.apis import Apis
from infra.components.shared import Members, Part, StackSite, as_member, shown_title
from infra.naming import digest
from infra.settings.model import AccessSettings, Role
from infra.settings.read import ensure_valid

TITLES: Final = {
    Role.WORKER: "Serves queues",
    Role.SUBMITTER: "Puts tasks into queues",
    Role.HEAD: "Runs Ray heads",
    Role.NODE: "Runs Ray nodes",
    Role.REAPER: "Removes lost TPU nodes",
    Role.PUSHER: "Pushes images",
}

LOG_WRITER: Final = "roles/logging.logWriter"
METRIC_WRITER: Final = "roles/monitoring.metricWriter"
MACHINE_ROLES: Final = {"log-writer": LOG_WRITER, "metric-writer": METRIC_WRITER}
"""Roles of accounts that machines run as. Google grants these on nothing smaller than the project."""
MACHINES: Final = frozenset({Role.WORKER, Role.HEAD, Role.NODE, Role.REAPER})

MONITORING_VIEWER: Final = "roles/monitoring.viewer"
LOG_VIEWER: Final = "roles/logging.viewer"
TUNNEL: Final = "roles/iap.tunnelResourceAccessor"
LOGIN: Final = "roles/compute.osLogin"
ADMIN_LOGIN: Final = "roles/compute.osAdminLogin"
SSH_ONLY: Final = "destination.port == 22"


@dataclass(frozen=True, slots=True, kw_only=True)
class IdentityArgs:
    site: StackSite
    roles: Sequence[Role]
    reaper_role: pulumi.Input[str] | None = None
    """`projects/P/roles/ID` of the role that the account `reaper` has in the project."""
    sign_ins: Members = field(default_factory=dict)
    """Label → machine outside of Google, or pod, that acts as the account `worker`."""
    access: AccessSettings = AccessSettings()
    project_grants: bool = True
    """Whether to make people's grants on the whole project."""
    has_heads: bool = False
    """Whether the project has machines that people log in to."""
    apis: Apis | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectGrant:
    label: str
    role: pulumi.Input[str]
    member: pulumi.Input[str]
    condition: projects.IAMMemberConditionArgs | None = None


class Identity(Part):
    """The accounts are protected: one made again under its old name has silently lost its grants."""

    emails: Mapping[Role, pulumi.Output[str]]
    members: Mapping[Role, pulumi.Output[str]]
    """`serviceAccount:EMAIL`"""

    def __init__(self, name: str, args: IdentityArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        ensure_valid(args.access, "access")
        super().__init__("runtime:identity:Identity", name, args.site, args.apis, opts)
        accounts = {
            role: self._account(f"{name}-{role.value}", role.value, shown_title(args.site, TITLES[role]))
            for role in dict.fromkeys(args.roles)
        }
        self.emails = {role: account.email for role, account in accounts.items()}
        self.members = {role: as_member(each.email) for role, each in accounts.items()}
        people = find_people_grants(args.access, has_heads=args.has_heads) if args.project_grants else ()
        for grant in (*self._machine_grants(args.reaper_role), *people):
            self._project_grant(f"{name}-{grant.label}", grant.role, grant.member, condition=grant.condition)
        for label, member in args.sign_ins.items():
            serviceaccount.IAMMember(
                f"{name}-worker-{label}",
                service_account_id=accounts[Role.WORKER].name,
                role="roles/iam.workloadIdentityUser",
                member=member,
                opts=self._options("iam"),
            )
        self.register_outputs(
            {
                "emails": {role.value: email for role, email in self.emails.items()},
                "members": {role.value: member for role, member in self.members.items()},
            }
        )

    def _machine_grants(self, reaper_role: pulumi.Input[str] | None) -> Iterator[ProjectGrant]:
        if reaper_role is not None:
            yield ProjectGrant(label="reaper-nodes", role=reaper_role, member=self.members[Role.REAPER])
        for role, member in self.members.items():
            if role in MACHINES:
                for kind, granted in MACHINE_ROLES.items():
                    yield ProjectGrant(label=f"{role.value}-{kind}", role=granted, member=member)


def member_label(member: str) -> str:
    """A stable label for a person or group: a new member of a list moves no other's grant, and a member who moves to
    another list keeps the grants that both have. Two members never have one label."""
    readable = re.sub(r"[^A-Za-z0-9.-]+", "-", member.replace("@", "-at-"))
    is_plain = re.fullmatch("[A-Za-z]+:[A-Za-z0-9.-]+(?:@[A-Za-z0-9.-]+)?", member) and "-at-" not in member
    return readable if is_plain else f"{readable}-{digest(member)}"


def find_people_grants(access: AccessSettings, *, has_heads: bool) -> Iterator[ProjectGrant]:
    """The grants that these people need in the project; any of its stacks may make them."""
    ssh = projects.IAMMemberConditionArgs(
        title="ssh-only", description="Tunnels to the SSH port and no other", expression=SSH_ONLY
    )
    for member in dict.fromkeys((*access.operators, *access.researchers)):
        label = member_label(member)
        yield ProjectGrant(label=f"{label}-monitoring", role=MONITORING_VIEWER, member=member)
        yield ProjectGrant(label=f"{label}-logs", role=LOG_VIEWER, member=member)
        if not has_heads:
            continue
        yield ProjectGrant(label=f"{label}-tunnel", role=TUNNEL, member=member, condition=ssh)
        login = ("admin-login", ADMIN_LOGIN) if member in access.operators else ("login", LOGIN)
        yield ProjectGrant(label=f"{label}-{login[0]}", role=login[1], member=member)
