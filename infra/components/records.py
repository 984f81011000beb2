"""The bucket that holds task records; it outlives `pulumi destroy`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import pulumi
from pulumi_gcp import storage

from infra.components.apis import Apis
from infra.components.shared import Members, Part, StackSite
from infra.naming import Names
from infra.settings.model import RecordsSettings
from infra.settings.read import ensure_valid

USER: Final = "roles/storage.objectUser"
READER: Final = "roles/storage.objectViewer"
CONTRACT: Final = "contract/"
"""Prefix of the stack's published contract. Commands trust it with secrets and images, so those who write records, and
the code of their tasks with them, do not write it."""
LOGS: Final = "logs/"
NOTES: Final = "attempts/"
REWRITTEN: Final = ("workers/", "counters/")
"""Prefixes that each worker overwrites every 30 seconds; old versions are of no use."""
_DAY_S: Final = 86_400
_PAST_DAYS: Final = 30
"""How long an overwritten or deleted object can still be restored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordsArgs:
    site: StackSite
    settings: RecordsSettings = RecordsSettings()
    users: Members = field(default_factory=dict)
    """Label → IAM member that reads all objects, and writes all but the contract."""
    readers: Members = field(default_factory=dict)
    publishers: Members = field(default_factory=dict)
    """Label → member that writes the contract, and nothing else."""
    apis: Apis | None = None


def name_bucket(settings: RecordsSettings, names: Names) -> str:
    """Return the bucket's name, which is known before the bucket exists."""
    return settings.bucket or names.bucket("records")


class Records(Part):
    bucket: pulumi.Output[str]
    url: pulumi.Output[str]
    """`gs://BUCKET`"""
    location: str
    """A region, or a larger place, in lower case."""

    def __init__(self, name: str, args: RecordsArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        ensure_valid(args.settings, "records")
        super().__init__("runtime:records:Records", name, args.site, args.apis, opts)
        self.location = (args.settings.location or args.site.region).lower()
        bucket = self._make(args.settings)
        self.bucket = bucket.name
        self.url = pulumi.Output.concat("gs://", bucket.name)
        for label, member in (*args.users.items(), *args.readers.items()):
            # Lists the bucket, and reads the contract too; a condition on the other grant cannot take that away.
            self._grant(f"{name}-{label}-reader", bucket, READER, member)
        for label, member in args.users.items():
            self._grant(f"{name}-{label}-user", bucket, USER, member, contract=False)
        for label, member in args.publishers.items():
            self._grant(f"{name}-{label}-publisher", bucket, USER, member, contract=True)
        self._register()

    def _make(self, settings: RecordsSettings) -> storage.Bucket:
        site = self._site
        bucket = name_bucket(settings, site.names)
        return storage.Bucket(
            f"{self._name}-bucket",
            name=bucket,
            project=site.project,
            location=self.location.upper(),
            storage_class="STANDARD",
            labels=site.labels,
            uniform_bucket_level_access=True,
            public_access_prevention="enforced",
            versioning=storage.BucketVersioningArgs(enabled=True),
            soft_delete_policy=storage.BucketSoftDeletePolicyArgs(
                retention_duration_seconds=settings.soft_delete_days * _DAY_S
            ),
            lifecycle_rules=[
                _rule("Delete", age=settings.logs_days, matches_prefixes=[LOGS]),
                _rule("Delete", age=settings.notes_days, matches_prefixes=[NOTES]),
                _rule("Delete", days_since_noncurrent_time=1, with_state="ARCHIVED", matches_prefixes=list(REWRITTEN)),
                # For past versions under every prefix: current records, manifests and outputs never age.
                _rule("Delete", days_since_noncurrent_time=_PAST_DAYS, with_state="ARCHIVED"),
                _rule("AbortIncompleteMultipartUpload", age=7),
            ],
            encryption=storage.BucketEncryptionArgs(default_kms_key_name=self._kms_key) if self._kms_key else None,
            force_destroy=False,
            deletion_policy="ABANDON",
            opts=self._surviving(bucket, "storage", protect=site.protect, needs=self._key_grants("storage")),
        )

    def _grant(
        self,
        name: str,
        bucket: storage.Bucket,
        role: str,
        member: pulumi.Input[str],
        *,
        contract: bool | None = None,
    ) -> None:
        """Grant on all objects; with `contract`, on the contract alone, or on all objects but the contract."""
        condition = None
        if contract is not None:
            # An object is `projects/_/buckets/BUCKET/objects/NAME`.
            # https://cloud.google.com/iam/docs/conditions-resource-attributes#resource-name
            condition = storage.BucketIAMMemberConditionArgs(
                title="contract-only" if contract else "no-contract",
                description="Writes the published contract and nothing else"
                if contract
                else "Writes everything but the published contract",
                expression=pulumi.Output.concat(
                    "" if contract else "!",
                    'resource.name.startsWith("projects/_/buckets/',
                    bucket.name,
                    f'/objects/{CONTRACT}")',
                ),
            )
        storage.BucketIAMMember(
            name,
            bucket=bucket.name,
            role=role,
            member=member,
            condition=condition,
            opts=pulumi.ResourceOptions(parent=self),
        )


def _rule(action: str, **condition: Any) -> storage.BucketLifecycleRuleArgs:
    return storage.BucketLifecycleRuleArgs(
        action=storage.BucketLifecycleRuleActionArgs(type=action),
        condition=storage.BucketLifecycleRuleConditionArgs(**condition),
    )
