"""A secret's container and the grants of its readers; never a value."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import pulumi
from pulumi_gcp import secretmanager

from infra.components.apis import Apis
from infra.components.shared import Members, Part, StackSite
from infra.settings.model import SecretSettings
from infra.settings.read import ensure_valid

ACCESSOR: Final = "roles/secretmanager.secretAccessor"
KEEPER_ROLES: Final = {"viewer": "roles/secretmanager.viewer", "manager": "roles/secretmanager.secretVersionManager"}
"""Sees the container, its grants and its versions; adds versions and retires them. Neither shows a value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretArgs:
    site: StackSite
    secret: str
    settings: SecretSettings
    readers: Members = field(default_factory=dict)
    """Label → IAM member; one grant each, on this secret alone."""
    keepers: Members = field(default_factory=dict)
    """Label → member that adds values, as versions, and cannot read them. For another stack's secret, that stack decides."""
    apis: Apis | None = None


class Secret(Part):
    resource: pulumi.Output[str]
    """`projects/P/secrets/N`"""
    env: str

    def __init__(self, name: str, args: SecretArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        ensure_valid(args.settings, f"secrets.{args.secret}")
        super().__init__("runtime:secret:Secret", name, args.site, args.apis, opts)
        self.env = args.settings.env
        project: pulumi.Input[str]
        secret_id: pulumi.Input[str]
        if args.settings.existing is not None:
            _, project, _, secret_id = args.settings.existing.split("/")
            keepers: Members = {}
        else:
            secret = self._make(args)
            project, secret_id, keepers = secret.project, secret.secret_id, args.keepers
        # Made from inputs: a preview knows these, and the resource's own `name` has the project's number.
        self.resource = pulumi.Output.concat("projects/", project, "/secrets/", secret_id)
        grants = [(label, "accessor", ACCESSOR, member) for label, member in args.readers.items()]
        grants += [
            (label, kind, role, member) for label, member in keepers.items() for kind, role in KEEPER_ROLES.items()
        ]
        for label, kind, role, member in grants:
            secretmanager.SecretIamMember(
                f"{name}-{label}-{kind}",
                project=project,
                secret_id=secret_id,
                role=role,
                member=member,
                opts=self._options("secretmanager"),
            )
        self._register()

    def _make(self, args: SecretArgs) -> secretmanager.Secret:
        return secretmanager.Secret(
            f"{self._name}-secret",
            project=args.site.project,
            secret_id=args.site.names.secret(args.secret),
            labels=args.site.labels,
            replication=_replication(args.settings.regions, self._kms_key),
            # `protect` is the guard; this one would need an `up` of its own before a secret can go.
            deletion_protection=False,
            deletion_policy="DELETE",
            opts=self._kept("secretmanager", needs=self._key_grants("secretmanager")),
        )


def _replication(regions: tuple[str, ...], key: str | None) -> secretmanager.SecretReplicationArgs:
    if not regions:
        auto = secretmanager.SecretReplicationAutoCustomerManagedEncryptionArgs(kms_key_name=key) if key else None
        return secretmanager.SecretReplicationArgs(
            auto=secretmanager.SecretReplicationAutoArgs(customer_managed_encryption=auto)
        )
    each = secretmanager.SecretReplicationUserManagedReplicaCustomerManagedEncryptionArgs
    return secretmanager.SecretReplicationArgs(
        user_managed=secretmanager.SecretReplicationUserManagedArgs(
            replicas=[
                secretmanager.SecretReplicationUserManagedReplicaArgs(
                    location=region, customer_managed_encryption=each(kms_key_name=key) if key else None
                )
                for region in regions
            ]
        )
    )
