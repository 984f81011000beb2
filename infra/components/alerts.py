"""Alerts that reach people: dead letters, old tasks, too many TPUs, a silent head, spend.

Names of metrics and their labels: https://cloud.google.com/monitoring/api/metrics_gcp_p_z (pubsub, tpu) and
https://cloud.google.com/monitoring/api/metrics_gcp_c (compute).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import pulumi
from pulumi_gcp import billing, monitoring

from infra.components.apis import Apis
from infra.components.shared import Part, StackSite
from infra.settings.model import DAY_S, AlertSettings, BudgetSettings
from infra.settings.read import ensure_valid

FORWARDED: Final = "pubsub.googleapis.com/subscription/dead_letter_message_count"
WAITING: Final = "pubsub.googleapis.com/subscription/num_undelivered_messages"
OLDEST: Final = "pubsub.googleapis.com/subscription/oldest_unacked_message_age"
TPU_MEMORY: Final = "tpu.googleapis.com/memory/usage"
UPTIME: Final = "compute.googleapis.com/instance/uptime_total"

SILENCE: Final = "900s"
"""Longer than a restart of the machine. Google samples uptime every minute and shows it within two more."""
SPEND_STEPS: Final = (
    (0.5, "CURRENT_SPEND"),
    (0.9, "CURRENT_SPEND"),
    (1.0, "CURRENT_SPEND"),
    (1.0, "FORECASTED_SPEND"),
)
_BUDGET_CHANNELS: Final = 5
"""As many as Google lets a budget notify. https://cloud.google.com/billing/docs/how-to/budgets-notification-recipients"""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedQueue:
    subscription: pulumi.Input[str]
    """Full name, as for the dead letters."""
    dead_letter_subscription: pulumi.Input[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedCluster:
    cluster_name: str
    zone: str
    head: pulumi.Input[str]
    max_nodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertsArgs:
    site: StackSite
    settings: AlertSettings
    queues: Mapping[str, WatchedQueue] = field(default_factory=dict)
    clusters: Mapping[str, WatchedCluster] = field(default_factory=dict)
    apis: Apis | None = None


class Alerts(Part):
    """A policy for each queue, zone and head, a budget, and a channel for each address.

    A budget counts the whole project, so one of several stacks of a project has it.
    """

    channels: list[pulumi.Output[str]]

    def __init__(self, name: str, args: AlertsArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        ensure_valid(args.settings, "alerts")
        super().__init__("runtime:monitoring:Alerts", name, args.site, args.apis, opts)
        self.channels = [self._channel(name, email) for email in dict.fromkeys(args.settings.emails)]
        self.channels += [pulumi.Output.from_input(channel) for channel in args.settings.channels]
        for queue, watched in args.queues.items():
            self._watch_dead_letters(f"{name}-{queue}-dead-letters", queue, watched)
            self._watch_age(f"{name}-{queue}-oldest-task", queue, watched, args.settings.oldest_task_days)
        for zone in dict.fromkeys(cluster.zone for cluster in args.clusters.values()):
            self._watch_tpus(f"{name}-{zone}-tpus", zone, args.clusters)
        for cluster, head in args.clusters.items():
            self._watch_head(f"{name}-{cluster}-head", cluster, head)
        if args.settings.budget is not None:
            self._budget(f"{name}-budget", args.settings.budget)
        self._register()

    def _channel(self, name: str, email: str) -> pulumi.Output[str]:
        channel = monitoring.NotificationChannel(
            f"{name}-email-{re.sub(r'[^A-Za-z0-9.-]+', '-', email.replace('@', '-at-'))}",
            project=self._site.project,
            type="email",
            display_name=f"{email} ({self._site.names.stack})",
            labels={"email_address": email},
            user_labels=self._site.labels,
            enabled=True,
            force_delete=False,
            deletion_policy="DELETE",
            opts=self._options("monitoring"),
        )
        return channel.name

    def _policy(
        self, name: str, title: str, *conditions: monitoring.AlertPolicyConditionArgs, severity: str, advice: str
    ) -> None:
        monitoring.AlertPolicy(
            name,
            project=self._site.project,
            display_name=f"{self._site.names.stack}: {title}",
            combiner="OR",
            conditions=list(conditions),
            enabled=True,
            severity=severity,
            notification_channels=self.channels,
            documentation=monitoring.AlertPolicyDocumentationArgs(content=advice, mime_type="text/markdown"),
            user_labels=self._site.labels,
            deletion_policy="DELETE",
            opts=self._options("monitoring"),
        )

    def _watch_dead_letters(self, name: str, queue: str, watched: WatchedQueue) -> None:
        # Workers drain the dead-letter subscription, so messages are counted at their source as well.
        self._policy(
            name,
            f"dead letters of queue {queue}",
            _queue_above("the service gave up on a message", FORWARDED, watched.subscription, 0, "ALIGN_DELTA"),
            _queue_above("a dead letter waits", WAITING, watched.dead_letter_subscription, 0),
            severity="WARNING",
            advice="`runtime queue dead list` says which and why; `runtime queue dead redrive` runs them again.",
        )

    def _watch_age(self, name: str, queue: str, watched: WatchedQueue, days: int) -> None:
        self._policy(
            name,
            f"queue {queue} has a task older than {days} days",
            _queue_above(f"oldest task over {days} days", OLDEST, watched.subscription, days * DAY_S),
            severity="CRITICAL",
            advice="The service forgets what is older than its retention. `runtime status` says why tasks wait; "
            "`runtime queue repair` publishes again what was forgotten.",
        )

    def _watch_tpus(self, name: str, zone: str, clusters: Mapping[str, WatchedCluster]) -> None:
        """Count all nodes in the zone: a node's metrics do not name its cluster."""
        most = sum(cluster.max_nodes for cluster in clusters.values() if cluster.zone == zone)
        self._policy(
            name,
            f"more than {most} TPU nodes in {zone}",
            _above(
                f"more than {most} nodes",
                f'resource.type = "tpu_worker" AND resource.labels.zone = "{zone}" AND metric.type = "{TPU_MEMORY}"',
                most,
                # The first step makes one series of each node's hosts, the second counts the series.
                _aggregation(
                    "ALIGN_MEAN", cross_series_reducer="REDUCE_MEAN", group_by_fields=["resource.label.node_id"]
                ),
                _aggregation("ALIGN_MEAN", cross_series_reducer="REDUCE_COUNT"),
                duration="600s",
            ),
            severity="CRITICAL",
            advice="More nodes than the pools' maxima together: Ray lost sight of some, or others are in the zone. "
            "`runtime cluster reap --dry-run` lists those that it would remove.",
        )

    def _watch_head(self, name: str, cluster: str, watched: WatchedCluster) -> None:
        # An uptime check would have to reach the head, which has no external address.
        self._policy(
            name,
            f"head of cluster {cluster} is silent",
            monitoring.AlertPolicyConditionArgs(
                display_name="no sign of life for 15 minutes",
                condition_absent=monitoring.AlertPolicyConditionConditionAbsentArgs(
                    filter=pulumi.Output.concat(
                        'resource.type = "gce_instance" AND metric.labels.instance_name = "',
                        watched.head,
                        f'" AND metric.type = "{UPTIME}"',
                    ),
                    duration=SILENCE,
                    aggregations=[
                        monitoring.AlertPolicyConditionConditionAbsentAggregationArgs(
                            alignment_period="60s", per_series_aligner="ALIGN_MAX"
                        )
                    ],
                ),
            ),
            severity="CRITICAL",
            advice="`gcloud compute instances describe` says what became of the machine; one that is gone comes back with "
            "`pulumi up --refresh`. docs/operations.md has the rest under `A lost head`.",
        )

    def _budget(self, name: str, settings: BudgetSettings) -> None:
        billing.Budget(
            name,
            billing_account=settings.billing_account,
            display_name=f"{self._site.project} ({self._site.names.stack})"[:60],
            amount=billing.BudgetAmountArgs(
                specified_amount=billing.BudgetAmountSpecifiedAmountArgs(
                    currency_code=settings.currency, units=str(settings.monthly)
                )
            ),
            budget_filter=billing.BudgetBudgetFilterArgs(
                projects=[f"projects/{self._site.project}"], calendar_period="MONTH"
            ),
            threshold_rules=[
                billing.BudgetThresholdRuleArgs(threshold_percent=step, spend_basis=basis)
                for step, basis in SPEND_STEPS
            ],
            all_updates_rule=billing.BudgetAllUpdatesRuleArgs(
                monitoring_notification_channels=self.channels[:_BUDGET_CHANNELS],
                disable_default_iam_recipients=False,
            ),
            deletion_policy="DELETE",
            # Google answers with the project's number, so each `up` would see a difference.
            opts=self._options("billingbudgets", "monitoring", ignore_changes=["budgetFilter.projects"]),
        )


def _queue_above(
    title: str, metric: str, subscription: pulumi.Input[str], threshold: int, aligner: str = "ALIGN_MAX"
) -> monitoring.AlertPolicyConditionArgs:
    """A condition on a subscription by its full name; metrics have the last part of it."""
    of_queue = pulumi.Output.from_input(subscription).apply(
        lambda path: (
            f'resource.type = "pubsub_subscription" AND resource.labels.subscription_id = "{path.rsplit("/", 1)[-1]}"'
            f' AND metric.type = "{metric}"'
        )
    )
    return _above(title, of_queue, threshold, _aggregation(aligner))


def _aggregation(aligner: str, **more: Any) -> monitoring.AlertPolicyConditionConditionThresholdAggregationArgs:
    return monitoring.AlertPolicyConditionConditionThresholdAggregationArgs(
        alignment_period="300s", per_series_aligner=aligner, **more
    )


def _above(
    title: str,
    filter_: pulumi.Input[str],
    threshold: int,
    *aggregations: monitoring.AlertPolicyConditionConditionThresholdAggregationArgs,
    duration: str = "0s",
) -> monitoring.AlertPolicyConditionArgs:
    return monitoring.AlertPolicyConditionArgs(
        display_name=title,
        condition_threshold=monitoring.AlertPolicyConditionConditionThresholdArgs(
            filter=filter_,
            comparison="COMPARISON_GT",
            threshold_value=threshold,
            duration=duration,
            aggregations=list(aggregations),
        ),
    )
