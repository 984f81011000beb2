"""Facts that all Google components of a stack share, and the base of these components."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import pulumi
from pulumi_gcp import projects, serviceaccount, storage

from infra.components.apis import Apis
from infra.naming import Names
from infra.settings.model import DAY_S

Members: TypeAlias = Mapping[str, pulumi.Input[str]]
"""Label → IAM member. The label is part of the logical names of the member's grants."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """The key that encrypts what the stack keeps."""

    name: str
    """`projects/P/locations/L/keyRings/R/cryptoKeys/K`"""
    grants: Mapping[str, pulumi.Resource] = field(default_factory=dict)
    """Service → the grant of its agent; empty if the key's owner makes the grants."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackSite:
    """The place of a stack's resources, and their protection; other programs make one, too."""

    project: str
    region: str
    names: Names
    labels: Mapping[str, str] = field(default_factory=dict)
    protect: bool = True
    """Whether resources that hold work refuse to be destroyed."""
    adopt: bool = False
    """Whether to import resources that survived a destroy instead of creating them."""
    key: Key | None = None
    """Google's own keys encrypt without one."""


class Part(pulumi.ComponentResource):
    """A component of Google resources; the names of its children begin with its own."""

    def __init__(
        self, type_: str, name: str, site: StackSite, apis: Apis | None, opts: pulumi.ResourceOptions | None
    ) -> None:
        super().__init__(type_, name, None, opts)
        self._name, self._site, self._apis = name, site, apis

    @property
    def _kms_key(self) -> str | None:
        return self._site.key.name if self._site.key is not None else None

    def _key_grants(self, service: str) -> list[pulumi.Resource]:
        """Return what a resource that `service` encrypts has to wait for."""
        granted = self._site.key.grants.get(service) if self._site.key is not None else None
        return [granted] if granted is not None else []

    def _options(self, *services: str, needs: Sequence[pulumi.Resource] = (), **more: Any) -> pulumi.ResourceOptions:
        """Options of a child that waits for the APIs `services` and the resources `needs`."""
        # Without `apis` the caller's own program switches the services on.
        enabled = self._apis.needs(*services) if self._apis is not None else []
        return pulumi.ResourceOptions(parent=self, depends_on=[*enabled, *needs], **more)

    def _kept(self, *services: str, **more: Any) -> pulumi.ResourceOptions:
        """Options of a child that holds work and has a fixed name."""
        return self._options(*services, protect=self._site.protect, delete_before_replace=True, **more)

    def _surviving(self, path: str, *services: str, **more: Any) -> pulumi.ResourceOptions:
        """Options of a child that a destroy leaves in Google at `path`; `adopt` imports it from there."""
        if self._site.adopt:
            # The engine updates what differs in the same `up`: an import cannot know inputs such as `deletionPolicy`, which
            # Google does not store. Engines before 2026 refuse such an import.
            more |= {"import_": path}
        return self._options(*services, retain_on_delete=True, delete_before_replace=True, **more)

    def _register(self) -> None:
        """Register the attributes that the component declares as its outputs; a program's subclass may declare others."""
        component = next(each for each in type(self).__mro__ if Part in each.__bases__)
        self.register_outputs({name: getattr(self, name) for name in component.__annotations__})

    def _account(
        self, name: str, role: str, title: str, *, deletion_policy: str = "DELETE", join_existing: bool | None = False
    ) -> serviceaccount.Account:
        return serviceaccount.Account(
            f"{name}-account",
            project=self._site.project,
            account_id=self._site.names.account(role),
            display_name=title,
            create_ignore_already_exists=join_existing,
            deletion_policy=deletion_policy,
            opts=self._kept("iam"),
        )

    def _custom_role(
        self, name: str, role_id: str, title: str, description: str, permissions: Sequence[str]
    ) -> projects.IAMCustomRole:
        return projects.IAMCustomRole(
            f"{name}-role",
            project=self._site.project,
            role_id=role_id,
            title=title,
            description=description,
            permissions=list(permissions),
            stage="GA",
            deletion_policy="ABANDON",
            # Google keeps a deleted role's id for weeks and refuses a new role with that id.
            opts=self._surviving(f"projects/{self._site.project}/roles/{role_id}", "iam"),
        )

    def _project_grant(
        self,
        name: str,
        role: pulumi.Input[str],
        member: pulumi.Input[str],
        *services: str,
        condition: projects.IAMMemberConditionArgs | None = None,
    ) -> projects.IAMMember:
        return projects.IAMMember(
            name,
            project=self._site.project,
            role=role,
            member=member,
            condition=condition,
            opts=self._options("cloudresourcemanager", *services),
        )

    def _bucket(
        self,
        bucket: str,
        location: str,
        soft_delete_days: int,
        rules: Sequence[storage.BucketLifecycleRuleArgs],
        *,
        versions: bool,
    ) -> storage.Bucket:
        site = self._site
        return storage.Bucket(
            f"{self._name}-bucket",
            name=bucket,
            project=site.project,
            location=location.upper(),
            storage_class="STANDARD",
            labels=site.labels,
            uniform_bucket_level_access=True,
            public_access_prevention="enforced",
            versioning=storage.BucketVersioningArgs(enabled=versions),
            soft_delete_policy=storage.BucketSoftDeletePolicyArgs(retention_duration_seconds=soft_delete_days * DAY_S),
            lifecycle_rules=[*rules, lifecycle_rule("AbortIncompleteMultipartUpload", age=7)],
            encryption=storage.BucketEncryptionArgs(default_kms_key_name=self._kms_key) if self._kms_key else None,
            force_destroy=False,
            deletion_policy="ABANDON",
            opts=self._surviving(bucket, "storage", protect=site.protect, needs=self._key_grants("storage")),
        )

    def _bucket_grant(
        self,
        name: str,
        bucket: pulumi.Input[str],
        role: str,
        member: pulumi.Input[str],
        condition: storage.BucketIAMMemberConditionArgs | None = None,
        *,
        protect: bool | None = None,
    ) -> None:
        opts = self._options("storage", protect=protect)
        storage.BucketIAMMember(name, bucket=bucket, role=role, member=member, condition=condition, opts=opts)


def lifecycle_rule(action: str, **condition: Any) -> storage.BucketLifecycleRuleArgs:
    return storage.BucketLifecycleRuleArgs(
        action=storage.BucketLifecycleRuleActionArgs(type=action),
        condition=storage.BucketLifecycleRuleConditionArgs(**condition),
    )


def as_member(email: pulumi.Output[str]) -> pulumi.Output[str]:
    """Return the IAM member of a service account."""
    return pulumi.Output.concat("serviceAccount:", email)


def shown_title(site: StackSite, title: str) -> str:
    """Return `title` with the stack's name, at most 100 characters for Google."""
    return f"{title} ({site.names.stack})"[:100]
