"""The bucket that holds task records; it outlives `pulumi destroy`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pulumi

from infra.components.apis import Apis
from infra.components.site import Site
from infra.config import RecordsSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordsArgs:
    site: Site
    settings: RecordsSettings = RecordsSettings()
    users: Mapping[str, pulumi.Input[str]] = field(default_factory=dict)
    """Label → IAM member that reads and writes objects."""
    readers: Mapping[str, pulumi.Input[str]] = field(default_factory=dict)
    apis: Apis | None = None


class Records(pulumi.ComponentResource):
    bucket: pulumi.Output[str]
    url: pulumi.Output[str]
    """`gs://BUCKET`"""

    def __init__(self, name: str, args: RecordsArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("runtime:records:Records", name, None, opts)
        raise NotImplementedError
