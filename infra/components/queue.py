"""A task queue on Pub/Sub."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pulumi

from infra.components.apis import Apis
from infra.components.site import Site
from infra.config import QueueSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueArgs:
    site: Site
    queue: str
    """The name that users say."""
    settings: QueueSettings = QueueSettings()
    workers: Mapping[str, pulumi.Input[str]] = field(default_factory=dict)
    """Label → IAM member. The label is part of the grants' logical names."""
    submitters: Mapping[str, pulumi.Input[str]] = field(default_factory=dict)
    apis: Apis | None = None


class Queue(pulumi.ComponentResource):
    """Topic, subscription, a dead-letter topic with a subscription of its own, and the grants of all who use them."""

    topic: pulumi.Output[str]
    """`projects/P/topics/T`, like the others in full."""
    subscription: pulumi.Output[str]
    dead_letter_topic: pulumi.Output[str]
    dead_letter_subscription: pulumi.Output[str]

    def __init__(self, name: str, args: QueueArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("runtime:queue:Queue", name, None, opts)
        raise NotImplementedError
