"""The bucket that holds task records; it outlives `pulumi destroy`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import pulumi
from pulumi_gcp import storage

from infra.components.apis import Apis
from infra.components.bucket import READER, USER
from infra.components.shared import Members, Part, StackSite, lifecycle_rule
from infra.naming import Names
from infra.settings.model import RecordsSettings
from infra.settings.read import ensure_valid

CONTRACT: Final = "contract/"
"""Prefix of the stack's published contract. Commands trust it with secrets and images, so those who write records, and
the code of their tasks with them, do not write it."""
LOGS: Final = "logs/"
NOTES: Final = "attempts/"
REWRITTEN: Final = ("workers/", "counters/")
"""Prefixes that each worker overwrites every 30 seconds; old versions are of no use."""
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
            self._bucket_grant(f"{name}-{label}-reader", bucket.name, READER, member)
        for label, member in args.users.items():
            self._bucket_grant(
                f"{name}-{label}-user", bucket.name, USER, member, self._condition(bucket, contract=False)
            )
        for label, member in args.publishers.items():
            self._bucket_grant(
                f"{name}-{label}-publisher", bucket.name, USER, member, self._condition(bucket, contract=True)
            )
        self._register()

    def _make(self, settings: RecordsSettings) -> storage.Bucket:
        rules = [
            lifecycle_rule("Delete", age=settings.logs_days, matches_prefixes=[LOGS]),
            lifecycle_rule("Delete", age=settings.notes_days, matches_prefixes=[NOTES]),
            lifecycle_rule(
                "Delete", days_since_noncurrent_time=1, with_state="ARCHIVED", matches_prefixes=list(REWRITTEN)
            ),
            # For past versions under every prefix: current records, manifests and outputs never age.
            lifecycle_rule("Delete", days_since_noncurrent_time=_PAST_DAYS, with_state="ARCHIVED"),
        ]
        bucket = name_bucket(settings, self._site.names)
        return self._bucket(bucket, self.location, settings.soft_delete_days, rules, versions=True)

    def _condition(self, bucket: storage.Bucket, *, contract: bool) -> storage.BucketIAMMemberConditionArgs:
        """Limit a grant to the contract, or to all objects but the contract."""
        # An object is `projects/_/buckets/BUCKET/objects/NAME`.
        # https://cloud.google.com/iam/docs/conditions-resource-attributes#resource-name
        return storage.BucketIAMMemberConditionArgs(
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
