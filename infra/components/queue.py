"""A task queue on Pub/Sub."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import pulumi
from pulumi_gcp import projects, pubsub

from infra.components.apis import Apis
from infra.components.shared import Members, Part, StackSite
from infra.settings.model import QueueSettings
from infra.settings.read import ensure_valid

PUBLISHER: Final = "roles/pubsub.publisher"
SUBSCRIBER: Final = "roles/pubsub.subscriber"
VIEWER: Final = "roles/pubsub.viewer"


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueArgs:
    site: StackSite
    queue: str
    """The name that users say."""
    settings: QueueSettings = QueueSettings()
    workers: Members = field(default_factory=dict)
    """Label → IAM member. The label is part of the grants' logical names."""
    submitters: Members = field(default_factory=dict)
    """Label → member; a label that is also in `workers` is the same member."""
    apis: Apis | None = None


class Queue(Part):
    """Topic, subscription, a dead-letter topic with a subscription of its own, and the grants of their users."""

    topic: pulumi.Output[str]
    """`projects/P/topics/T`, like the others in full."""
    subscription: pulumi.Output[str]
    dead_letter_topic: pulumi.Output[str]
    dead_letter_subscription: pulumi.Output[str]

    def __init__(self, name: str, args: QueueArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        ensure_valid(args.settings, f"queues.{args.queue}")
        super().__init__("runtime:queue:Queue", name, args.site, args.apis, opts)
        names = args.site.names
        topic = self._topic(f"{name}-topic", names.topic(args.queue), args)
        dead_topic = self._topic(f"{name}-dead-topic", names.dead_letters(args.queue), args)
        self.topic = _path(topic, "topics")
        self.dead_letter_topic = _path(dead_topic, "topics")
        agent = self._agent()
        # Without this grant the service silently drops dead letters.
        forwards = self._may_publish(f"{name}-agent-dead-publisher", dead_topic, agent)
        subscription = self._subscription(
            f"{name}-subscription",
            names.subscription(args.queue),
            args,
            topic=self.topic,
            dead_letter_policy=pubsub.SubscriptionDeadLetterPolicyArgs(
                dead_letter_topic=self.dead_letter_topic, max_delivery_attempts=args.settings.max_delivery_attempts
            ),
            needs=[forwards],
        )
        self._may_use(f"{name}-agent-subscriber", subscription, SUBSCRIBER, agent)
        dead_subscription = self._subscription(
            f"{name}-dead-subscription", names.dead_letters(args.queue), args, topic=self.dead_letter_topic
        )
        self.subscription = _path(subscription, "subscriptions")
        self.dead_letter_subscription = _path(dead_subscription, "subscriptions")
        for label, member in {**args.submitters, **args.workers}.items():
            self._may_publish(f"{name}-{label}-publisher", topic, member)
        for label, member in args.workers.items():
            self._may_publish(f"{name}-{label}-dead-publisher", dead_topic, member)
            self._may_use(f"{name}-{label}-subscriber", subscription, SUBSCRIBER, member)
            self._may_use(f"{name}-{label}-viewer", subscription, VIEWER, member)
            self._may_use(f"{name}-{label}-dead-subscriber", dead_subscription, SUBSCRIBER, member)
            self._may_use(f"{name}-{label}-dead-viewer", dead_subscription, VIEWER, member)
        self._register()

    def _agent(self) -> pulumi.Output[str]:
        """Return the member that forwards dead letters; Google accepts its creation twice."""
        if self._apis is not None and "pubsub" in self._apis.agents:
            return self._apis.agents["pubsub"]
        agent = projects.ServiceIdentity(
            f"{self._name}-agent",
            project=self._site.project,
            service="pubsub.googleapis.com",
            opts=self._options("pubsub", retain_on_delete=True),
        )
        return agent.member

    def _topic(self, name: str, topic: str, args: QueueArgs) -> pubsub.Topic:
        return pubsub.Topic(
            name,
            name=topic,
            project=args.site.project,
            labels=args.site.labels,
            kms_key_name=self._kms_key,
            message_storage_policy=pubsub.TopicMessageStoragePolicyArgs(
                allowed_persistence_regions=list(args.settings.regions)
            )
            if args.settings.regions
            else None,
            deletion_policy="DELETE",
            opts=self._kept("pubsub", needs=self._key_grants("pubsub")),
        )

    def _subscription(
        self,
        name: str,
        subscription: str,
        args: QueueArgs,
        *,
        topic: pulumi.Input[str],
        dead_letter_policy: pubsub.SubscriptionDeadLetterPolicyArgs | None = None,
        needs: Sequence[pulumi.Resource] = (),
    ) -> pubsub.Subscription:
        settings = args.settings
        return pubsub.Subscription(
            name,
            name=subscription,
            project=args.site.project,
            topic=topic,
            labels=args.site.labels,
            ack_deadline_seconds=settings.ack_deadline_s,
            message_retention_duration=f"{settings.retention_s}s",
            retain_acked_messages=False,
            enable_exactly_once_delivery=settings.exactly_once,
            enable_message_ordering=False,
            # An empty text means never; without it an idle subscription is deleted after 31 days.
            expiration_policy=pubsub.SubscriptionExpirationPolicyArgs(ttl=""),
            retry_policy=pubsub.SubscriptionRetryPolicyArgs(
                minimum_backoff=f"{settings.min_backoff_s}s", maximum_backoff=f"{settings.max_backoff_s}s"
            ),
            dead_letter_policy=dead_letter_policy,
            deletion_policy="DELETE",
            opts=self._kept("pubsub", needs=needs),
        )

    def _may_publish(self, name: str, topic: pubsub.Topic, member: pulumi.Input[str]) -> pubsub.TopicIAMMember:
        return pubsub.TopicIAMMember(
            name,
            project=topic.project,
            topic=topic.name,
            role=PUBLISHER,
            member=member,
            opts=pulumi.ResourceOptions(parent=self),
        )

    def _may_use(
        self, name: str, subscription: pubsub.Subscription, role: str, member: pulumi.Input[str]
    ) -> pubsub.SubscriptionIAMMember:
        return pubsub.SubscriptionIAMMember(
            name,
            project=subscription.project,
            subscription=subscription.name,
            role=role,
            member=member,
            opts=pulumi.ResourceOptions(parent=self),
        )


def _path(resource: pubsub.Topic | pubsub.Subscription, collection: str) -> pulumi.Output[str]:
    """Return the full name, made from inputs: a preview knows these, but not the resource's id."""
    return pulumi.Output.concat("projects/", resource.project, f"/{collection}/", resource.name)
