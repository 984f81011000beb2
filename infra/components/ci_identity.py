"""The identities of pipelines: federation without a key, one provider to deploy and one to preview.

`PROJECT_ROLES` has the two accounts' roles in the project, each with its reason; the policies allow no other project roles.
The deployer makes the stack's resources, and none of its roles reads a message, an object or a secret value. That keeps
mistakes small and is no boundary: it can change custom roles, its own included, grant on accounts, buckets and secrets, and
start machines as any account, so a program that runs as the deployer can make itself the project's owner. The boundary is
what may run on its branch and in its environment; docs/operations.md has a deny policy that takes the shortest ways away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import pulumi
from pulumi_gcp import iam, projects, serviceaccount

from infra.components.apis import Apis
from infra.components.shared import Part, StackSite, as_member, shown_title
from infra.settings.model import CiSettings
from infra.settings.read import ensure_valid

DEPLOY: Final = "deploy"
PREVIEW: Final = "preview"
ISSUER: Final = "https://token.actions.githubusercontent.com"
"""https://docs.github.com/actions/concepts/security/openid-connect"""


@dataclass(frozen=True, slots=True)
class ProjectRole:
    role: str
    reason: str
    service: str | None = None
    """API whose users need the role; None: every stack needs it."""
    deploys: bool = True
    """Whether the deployer gets the role; otherwise the previewer gets it."""

    @property
    def label(self) -> str:
        return self.role.removeprefix("roles/").replace(".", "-")


PROJECT_IAM_ADMIN: Final = "roles/resourcemanager.projectIamAdmin"

PROJECT_ROLES: Final = (
    ProjectRole("roles/serviceusage.serviceUsageAdmin", "switches APIs on and makes their agents"),
    ProjectRole(
        "roles/iam.serviceAccountAdmin", "makes accounts and grants their use, of every account of the project"
    ),
    ProjectRole("roles/iam.roleAdmin", "makes and changes the custom roles of heads and pipelines, its own too"),
    ProjectRole(PROJECT_IAM_ADMIN, "grants in the project the roles that the stack grants, custom ones among them"),
    ProjectRole("roles/iam.workloadIdentityPoolAdmin", "keeps pool and providers, and their conditions", service="sts"),
    ProjectRole("roles/compute.networkAdmin", "makes network, router and NAT", service="compute"),
    ProjectRole("roles/compute.securityAdmin", "makes firewall rules", service="compute"),
    ProjectRole("roles/compute.instanceAdmin.v1", "makes heads and their disks", service="tpu"),
    ProjectRole(
        "roles/iam.serviceAccountUser",
        "starts heads under their account, which may have been made in the same run, and so under any account",
        service="tpu",
    ),
    ProjectRole("roles/monitoring.alertPolicyEditor", "makes alerts", service="monitoring"),
    ProjectRole("roles/monitoring.notificationChannelEditor", "says whom to tell", service="monitoring"),
    ProjectRole("roles/serviceusage.serviceUsageViewer", "reads which APIs are on", deploys=False),
    ProjectRole("roles/iam.serviceAccountViewer", "reads accounts and their grants", deploys=False),
    ProjectRole("roles/iam.roleViewer", "reads custom roles", deploys=False),
    ProjectRole("roles/iam.workloadIdentityPoolViewer", "reads pool and providers", service="sts", deploys=False),
    ProjectRole("roles/compute.viewer", "reads network, firewall and heads", service="compute", deploys=False),
    ProjectRole("roles/monitoring.viewer", "reads alerts", service="monitoring", deploys=False),
)


def _each(resource: str, *actions: str) -> tuple[str, ...]:
    return tuple(f"{resource}.{action}" for action in actions)


_MANAGE: Final = ("create", "delete", "get", "getIamPolicy", "list", "setIamPolicy", "update")

PERMISSIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "cloudresourcemanager": _each("resourcemanager.projects", "get", "getIamPolicy"),
    "serviceusage": ("serviceusage.services.use",),
    "pubsub": (
        *_each("pubsub.subscriptions", *_MANAGE),
        "pubsub.topics.attachSubscription",
        *_each("pubsub.topics", *_MANAGE),
    ),
    "storage": _each("storage.buckets", *(action for action in _MANAGE if action != "delete")),
    "artifactregistry": _each("artifactregistry.repositories", *_MANAGE),
    "secretmanager": _each("secretmanager.secrets", *_MANAGE),
    "cloudkms": _each("cloudkms.cryptoKeys", "getIamPolicy", "setIamPolicy"),
}
"""API → permissions of the deployer's custom role. Google's own administrator roles of these services would read messages,
objects and secret values too. Whoever has `setIamPolicy` can still grant that. The previewer's role has the permissions that
only read."""

READS: Final = frozenset({"get", "list", "getIamPolicy", "use"})
"""Last part of a permission that changes nothing."""

_CONDITION_LIMIT: Final = 10
"""Roles that one `hasOnly` of a condition may list.
https://cloud.google.com/iam/docs/setting-limits-on-granting-roles"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CiIdentityArgs:
    site: StackSite
    settings: CiSettings
    services: Sequence[str] = ()
    """Short names of the stack's APIs, which decide the accounts' rights; empty: all APIs of this module."""
    grantable: Sequence[str] = ()
    """Roles that the stack grants in the project, and the deployer may grant there."""
    apis: Apis | None = None


class CiIdentity(Part):
    """Pool, two providers pinned to numeric ids, and an account for each."""

    deployer_email: pulumi.Output[str]
    previewer_email: pulumi.Output[str]
    deployer_member: pulumi.Output[str]
    """`serviceAccount:EMAIL`, to publish the contract and to push images."""
    deploy_provider: pulumi.Output[str]
    """`projects/NUMBER/locations/global/workloadIdentityPools/POOL/providers/deploy`, as the pipeline names it."""
    preview_provider: pulumi.Output[str]

    def __init__(self, name: str, args: CiIdentityArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        ensure_valid(args.settings, "ci")
        super().__init__("runtime:identity:CiIdentity", name, args.site, args.apis, opts)
        pool = self._pool(args.settings)
        self.deploy_provider = pulumi.Output.concat(pool, f"/providers/{DEPLOY}")
        self.preview_provider = pulumi.Output.concat(pool, f"/providers/{PREVIEW}")
        deployer, previewer = (
            self._account(f"{name}-{role}", role, shown_title(args.site, f"{verb} from the pipeline"))
            for role, verb in (("deployer", "Deploys"), ("previewer", "Previews"))
        )
        self.deployer_email, self.previewer_email = deployer.email, previewer.email
        self.deployer_member = as_member(deployer.email)
        for role, account in ((DEPLOY, deployer), (PREVIEW, previewer)):
            serviceaccount.IAMMember(
                f"{name}-{role}-federation",
                service_account_id=account.name,
                role="roles/iam.workloadIdentityUser",
                member=pulumi.Output.concat("principalSet://iam.googleapis.com/", pool, f"/attribute.role/{role}"),
                opts=pulumi.ResourceOptions(parent=self),
            )
        permissions = find_permissions(args.services)
        self._grant_content("deployer", "Makes what a stack is made of, and grants on it", permissions, deployer)
        reading = tuple(each for each in permissions if each.rpartition(".")[2] in READS)
        reads = "Reads what a stack is made of, and nothing of what it holds"
        self._grant_content("previewer", reads, reading, previewer)
        for granted in find_project_roles(args.services):
            if granted.service == "sts" and args.settings.pool is not None:
                continue  # The stack that owns the pool grants these roles.
            self._grant(granted, deployer if granted.deploys else previewer, args.grantable)
        self._register()

    def _pool(self, settings: CiSettings) -> pulumi.Output[str]:
        """Return the pool's name, with the project's number.

        A stack that refers to another's pool uses its providers and their conditions: the owner's ids, ref and
        environment.
        """
        name, site = self._name, self._site
        if settings.pool is not None:
            return pulumi.Output.from_input(settings.pool)
        pool_id = site.names.identity_pool()
        path = f"projects/{site.project}/locations/global/workloadIdentityPools/{pool_id}"
        pool = iam.WorkloadIdentityPool(
            f"{name}-pool",
            project=site.project,
            workload_identity_pool_id=pool_id,
            display_name="Pipelines",
            description=f"Pipelines of {settings.repository}",
            disabled=False,
            deletion_policy="ABANDON",
            # Google keeps a deleted pool's id for 30 days and refuses a new pool with that id.
            opts=self._surviving(path, "iam", "sts", "iamcredentials", protect=site.protect),
        )
        for role, condition in ((DEPLOY, deploy_condition(settings)), (PREVIEW, preview_condition(settings))):
            iam.WorkloadIdentityPoolProvider(
                f"{name}-{role}-provider",
                project=site.project,
                workload_identity_pool_id=pool.workload_identity_pool_id,
                workload_identity_pool_provider_id=role,
                display_name=f"{role} {settings.repository}"[:32],
                disabled=False,
                attribute_condition=condition,
                # The role is a constant of the provider, so no claim of a token can turn a preview into a deployment.
                attribute_mapping={"google.subject": "assertion.sub", "attribute.role": f"'{role}'"},
                oidc=iam.WorkloadIdentityPoolProviderOidcArgs(issuer_uri=ISSUER),
                deletion_policy="ABANDON",
                opts=self._surviving(f"{path}/providers/{role}", protect=site.protect),
            )
        return pool.name

    def _grant_content(
        self, role: str, description: str, permissions: tuple[str, ...], account: serviceaccount.Account
    ) -> None:
        made = self._custom_role(
            f"{self._name}-{role}",
            role,
            shown_title(self._site, f"Pipeline {role}"),
            description,
            permissions,
        )
        self._project_grant(f"{self._name}-{role}-custom", made.name, as_member(account.email))

    def _grant(self, granted: ProjectRole, account: serviceaccount.Account, grantable: Sequence[str]) -> None:
        condition = None
        if granted.role == PROJECT_IAM_ADMIN and grantable:
            condition = projects.IAMMemberConditionArgs(
                title="stack-roles-only",
                description="Grants in the project what the stack grants there, and nothing else",
                expression=grant_condition(grantable),
            )
        role = "deployer" if granted.deploys else "previewer"
        self._project_grant(
            f"{self._name}-{role}-{granted.label}", granted.role, as_member(account.email), condition=condition
        )


def find_project_roles(services: Sequence[str]) -> list[ProjectRole]:
    """Return the accounts' project roles in a stack with these APIs."""
    return [each for each in PROJECT_ROLES if not services or each.service is None or each.service in services]


def find_permissions(services: Sequence[str]) -> tuple[str, ...]:
    """Return the permissions of the deployer's custom role in a stack with these APIs."""
    return tuple(
        permission
        for service, permissions in PERMISSIONS.items()
        if not services or service in services
        for permission in permissions
    )


def deploy_condition(settings: CiSettings) -> str:
    """Bind to ids, since names of owners and repositories can change hands, and to the environment with its reviewers."""
    return (
        f"{preview_condition(settings)} && assertion.ref == {_quoted(settings.ref)}"
        f" && assertion.environment == {_quoted(settings.environment)}"
    )


def preview_condition(settings: CiSettings) -> str:
    # `pull_request_target` runs a stranger's proposal with the repository's rights.
    return (
        f"assertion.repository_id == '{settings.repository_id}'"
        f" && assertion.repository_owner_id == '{settings.owner_id}'"
        " && assertion.event_name != 'pull_request_target'"
    )


def grant_condition(roles: Sequence[str]) -> str:
    """Return a condition that allows changes of the project's grants for these roles only."""
    ordered = sorted(set(roles))
    parts = [ordered[start : start + _CONDITION_LIMIT] for start in range(0, len(ordered), _CONDITION_LIMIT)]
    return " || ".join(
        "api.getAttribute('iam.googleapis.com/modifiedGrantsByRole', []).hasOnly(["
        + ", ".join(f"'{role}'" for role in part)
        + "])"
        for part in parts
    )


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
