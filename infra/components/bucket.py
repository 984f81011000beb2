"""Buckets of data and checkpoints, and grants on those of others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import pulumi

from infra.components.apis import Apis
from infra.components.shared import Members, Part, StackSite, lifecycle_rule
from infra.settings.model import BucketSettings
from infra.settings.read import ensure_valid

USER: Final = "roles/storage.objectUser"
READER: Final = "roles/storage.objectViewer"


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketArgs:
    site: StackSite
    bucket: str
    """The name that users say; `Names.bucket` makes the bucket's of it."""
    settings: BucketSettings
    readers: Members = field(default_factory=dict)
    """Label → IAM member that lists and reads objects."""
    writers: Members = field(default_factory=dict)
    """Label → member that also writes and deletes them."""
    apis: Apis | None = None


class Bucket(Part):
    """A bucket that outlives `pulumi destroy`; of another's bucket, the grants alone."""

    bucket: pulumi.Output[str]
    url: pulumi.Output[str]
    """`gs://BUCKET`"""
    location: str | None
    """In lower case; None for another's bucket whose place the settings do not say."""

    def __init__(self, name: str, args: BucketArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        settings = args.settings
        ensure_valid(settings, f"buckets.{args.bucket}")
        super().__init__("runtime:bucket:Bucket", name, args.site, args.apis, opts)
        if settings.existing is not None:
            self.location = settings.location.lower() if settings.location else None
            self.bucket = pulumi.Output.from_input(settings.existing)
        else:
            self.location = (settings.location or args.site.region).lower()
            rules = [
                lifecycle_rule("Delete", age=days, matches_prefixes=[prefix])
                for prefix, days in settings.delete_after_days.items()
            ]
            bucket = settings.bucket or args.site.names.bucket(args.bucket)
            # Versions would keep a month of overwritten checkpoints; what is deleted by mistake comes back without them.
            self.bucket = self._bucket(bucket, self.location, settings.soft_delete_days, rules, versions=False).name
        self.url = pulumi.Output.concat("gs://", self.bucket)
        for label, member in args.readers.items():
            self._bucket_grant(f"{name}-{label}-reader", self.bucket, READER, member)
        for label, member in args.writers.items():
            self._bucket_grant(f"{name}-{label}-writer", self.bucket, USER, member)
        self._register()
