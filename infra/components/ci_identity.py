"""The identities of pipelines: federation without a key, one provider to deploy and one to preview.

They are in a stack of their own, which a person brings up: no pipeline deploys its own rights. `PROJECT_ROLES` has the two
accounts' roles in the project, each with its reason; the policies allow no other project roles. The deployer makes the
resources of the other stacks, and none of its roles reads a message, an object or a secret value. That keeps mistakes small and
is no boundary: it can grant on accounts, buckets and secrets and start machines as any account, so a program that runs as
the deployer can make itself the project's owner. The boundary is what may run on its branch and in its environment;
docs/operations.md has a deny policy that takes the shortest ways away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import pulumi
from pulumi_gcp import billing, iam, kms, projects, serviceaccount

from infra.components.apis import Apis
from infra.components.key import ROLE as KEY_USER
from infra.components.shared import Part, StackSite, as_member, shown_title
from infra.settings.model import CiSettings, RepositorySettings
from infra.settings.read import ensure_valid

DEPLOY: Final = "deploy"
PREVIEW: Final = "preview"
ISSUER: Final = "https://token.actions.githubusercontent.com"
"""https://docs.github.com/actions/concepts/security/openid-connect"""


@dataclass(frozen=True, slots=True)
class ProjectRole:
    role: str
    reason: str
    part: str | None = None
    """Key of the stacks whose deployment needs the role; None: each stack needs it."""
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
    ProjectRole(PROJECT_IAM_ADMIN, "grants machines their roles in the project, and no other role to anybody"),
    ProjectRole("roles/compute.networkAdmin", "makes network, router and NAT", part="network"),
    ProjectRole("roles/compute.securityAdmin", "makes firewall rules", part="network"),
    ProjectRole("roles/compute.instanceAdmin.v1", "makes heads and their disks", part="heads"),
    ProjectRole(
        "roles/iam.serviceAccountUser",
        "starts heads under their account, which may have been made in the same run, and so under any account",
        part="heads",
    ),
    ProjectRole("roles/monitoring.alertPolicyEditor", "makes alerts", part="alerts"),
    ProjectRole("roles/monitoring.notificationChannelEditor", "says whom to tell", part="alerts"),
    ProjectRole("roles/serviceusage.serviceUsageViewer", "reads which APIs are on", deploys=False),
    ProjectRole("roles/iam.serviceAccountViewer", "reads accounts and their grants", deploys=False),
    ProjectRole("roles/compute.viewer", "reads network, firewall and heads", part="network", deploys=False),
    ProjectRole("roles/monitoring.viewer", "reads alerts", part="alerts", deploys=False),
)


def _each(resource: str, *actions: str) -> tuple[str, ...]:
    return tuple(f"{resource}.{action}" for action in actions)


_MANAGE: Final = ("create", "delete", "get", "getIamPolicy", "list", "setIamPolicy", "update")
_BUCKETS: Final = _each("storage.buckets", *(action for action in _MANAGE if action != "delete"))

PERMISSIONS: Final[Mapping[str | None, tuple[str, ...]]] = {
    None: (*_each("resourcemanager.projects", "get", "getIamPolicy"), "serviceusage.services.use"),
    "queues": (
        *_each("pubsub.subscriptions", *_MANAGE),
        "pubsub.topics.attachSubscription",
        *_each("pubsub.topics", *_MANAGE),
    ),
    "records": _BUCKETS,
    "buckets": _BUCKETS,
    "registries": _each("artifactregistry.repositories", *_MANAGE),
    "secrets": _each("secretmanager.secrets", *_MANAGE),
    "kms_key": _each("cloudkms.cryptoKeys", "getIamPolicy", "setIamPolicy"),
}
"""Key of the deployed stacks → permissions of the deployer's custom role. Google's own administrator roles of these services
would read messages, objects and secret values too. Whoever has `setIamPolicy` can still grant that. The previewer's role has
the permissions that only read."""

READS: Final = frozenset({"get", "list", "getIamPolicy", "use"})
"""Last part of a permission that changes nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CiIdentityArgs:
    site: StackSite
    settings: CiSettings
    grantable: Sequence[str]
    """Roles that the deployer may grant in the project, at most 10.
    https://cloud.google.com/iam/docs/setting-limits-on-granting-roles"""
    apis: Apis | None = None


class CiIdentity(Part):
    """Pool, two providers pinned to numeric ids, and an account for each with all that it needs."""

    deployer_email: pulumi.Output[str]
    previewer_email: pulumi.Output[str]
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
        for role, account in ((DEPLOY, deployer), (PREVIEW, previewer)):
            serviceaccount.IAMMember(
                f"{name}-{role}-federation",
                service_account_id=account.name,
                role="roles/iam.workloadIdentityUser",
                member=pulumi.Output.concat("principalSet://iam.googleapis.com/", pool, f"/attribute.role/{role}"),
                opts=pulumi.ResourceOptions(parent=self),
            )
        permissions = find_permissions(args.settings.deploys)
        self._grant_content("deployer", "Makes what a stack is made of, and grants on it", permissions, deployer)
        reading = tuple(each for each in permissions if each.rpartition(".")[2] in READS)
        reads = "Reads what a stack is made of, and nothing of what it holds"
        self._grant_content("previewer", reads, reading, previewer)
        for granted in find_project_roles(args.settings.deploys):
            self._grant(granted, deployer if granted.deploys else previewer, args.grantable)
        self._grant_state(args.settings, as_member(deployer.email), as_member(previewer.email))
        self._register()

    def _pool(self, settings: CiSettings) -> pulumi.Output[str]:
        """Make the pool and return its name, with the project's number."""
        name, site = self._name, self._site
        pool_id = site.names.identity_pool()
        path = f"projects/{site.project}/locations/global/workloadIdentityPools/{pool_id}"
        pool = iam.WorkloadIdentityPool(
            f"{name}-pool",
            project=site.project,
            workload_identity_pool_id=pool_id,
            display_name="Pipelines",
            description=f"Pipelines of {', '.join(settings.repositories)}"[:256],
            disabled=False,
            deletion_policy="ABANDON",
            # Google keeps a deleted pool's id for 30 days and refuses a new pool with that id.
            opts=self._surviving(path, "iam", "sts", "iamcredentials", protect=site.protect),
        )
        for role, condition in ((DEPLOY, deploy_condition), (PREVIEW, preview_condition)):
            iam.WorkloadIdentityPoolProvider(
                f"{name}-{role}-provider",
                project=site.project,
                workload_identity_pool_id=pool.workload_identity_pool_id,
                workload_identity_pool_provider_id=role,
                display_name=f"Pipelines, {role}",
                disabled=False,
                attribute_condition=" || ".join(f"({condition(each)})" for each in settings.repositories.values()),
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
            self._site.names.role(role),
            shown_title(self._site, f"Pipeline {role}"),
            description,
            permissions,
        )
        self._project_grant(f"{self._name}-{role}-custom", made.name, as_member(account.email))

    def _grant(self, granted: ProjectRole, account: serviceaccount.Account, grantable: Sequence[str]) -> None:
        condition = None
        if granted.role == PROJECT_IAM_ADMIN:
            condition = projects.IAMMemberConditionArgs(
                title="stack-roles-only",
                description="Grants in the project what stacks grant to their machines, and nothing else",
                expression=grant_condition(grantable),
            )
        role = "deployer" if granted.deploys else "previewer"
        self._project_grant(
            f"{self._name}-{role}-{granted.label}", granted.role, as_member(account.email), condition=condition
        )

    def _grant_state(self, settings: CiSettings, deployer: pulumi.Output[str], previewer: pulumi.Output[str]) -> None:
        """Grant on what no stack makes: the bucket of Pulumi's state, its key, and the account that pays."""
        name, protect = self._name, self._site.protect
        # What each may do with the bucket and with the key.
        rights = {
            "deployer": (deployer, "roles/storage.objectAdmin", KEY_USER),
            "previewer": (previewer, "roles/storage.objectViewer", "roles/cloudkms.cryptoKeyDecrypter"),
        }
        for role, (member, bucket_role, key_role) in rights.items():
            if settings.state_bucket is not None:
                self._bucket_grant(f"{name}-{role}-state", settings.state_bucket, bucket_role, member, protect=protect)
            if settings.state_key is not None:
                kms.CryptoKeyIAMMember(
                    f"{name}-{role}-state-key",
                    crypto_key_id=settings.state_key,
                    role=key_role,
                    member=member,
                    opts=self._options("cloudkms", protect=protect),
                )
        if settings.billing_account is not None:
            billing.AccountIamMember(
                f"{name}-deployer-budgets",
                billing_account_id=settings.billing_account,
                role="roles/billing.costsManager",
                member=deployer,
                opts=self._options("cloudbilling", protect=protect),
            )


def find_project_roles(parts: Sequence[str]) -> list[ProjectRole]:
    """Return the accounts' project roles, to deploy stacks with these parts."""
    return [each for each in PROJECT_ROLES if each.part is None or each.part in parts]


def find_permissions(parts: Sequence[str]) -> tuple[str, ...]:
    """Return the permissions of the deployer's custom role, to deploy stacks with these parts."""
    found = (each for part, permissions in PERMISSIONS.items() if part in (None, *parts) for each in permissions)
    return tuple(dict.fromkeys(found))


def deploy_condition(repository: RepositorySettings) -> str:
    """Bind to ids, since names of owners and repositories can change hands, and to the environment with its reviewers."""
    return (
        f"{preview_condition(repository)} && assertion.ref == {_quoted(repository.ref)}"
        f" && assertion.environment == {_quoted(repository.environment)}"
    )


def preview_condition(repository: RepositorySettings) -> str:
    # `pull_request_target` runs a stranger's proposal with the repository's rights.
    return (
        f"assertion.repository_id == '{repository.repository_id}'"
        f" && assertion.repository_owner_id == '{repository.owner_id}'"
        " && assertion.event_name != 'pull_request_target'"
    )


def grant_condition(roles: Sequence[str]) -> str:
    """Return a condition that allows changes of the project's grants for these roles only."""
    listed = ", ".join(f"'{role}'" for role in sorted(set(roles)))
    return f"api.getAttribute('iam.googleapis.com/modifiedGrantsByRole', []).hasOnly([{listed}])"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
