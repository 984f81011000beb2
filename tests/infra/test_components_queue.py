"""The queue: its resources, their order, and their permissions."""

from __future__ import annotations

import pulumi
import pytest

from infra.check.recording import Recording
from infra.components.queue import Queue, QueueArgs
from infra.settings.model import QueueSettings
from tests.infra.components_support import (
    AGENT,
    LABELS,
    assert_sound,
    assert_waits_for,
    customs,
    depends_on,
    find_grants,
    make_apis,
    run,
    sample_site,
)

QUEUE = "runtime:queue:Queue"
TOPIC = "gcp:pubsub/topic:Topic"
SUBSCRIPTION = "gcp:pubsub/subscription:Subscription"


def record_queue(*, preview: bool = True, apis: bool = True, **args: object) -> Recording:
    def program(opts: pulumi.ResourceOptions) -> None:
        made = make_apis(opts) if apis else None
        own: dict[str, object] = {"site": sample_site(), "queue": "default", "apis": made}
        Queue("default-queue", QueueArgs(**(own | args)), opts)  # type: ignore[arg-type]

    return run(program, preview=preview)


@pytest.mark.parametrize("preview", [True, False])
def test_queue_of_the_defaults_has_two_topics_and_two_subscriptions(preview: bool) -> None:
    recording = record_queue(preview=preview)

    assert {each.name: each.inputs for each in recording.of_type(TOPIC)} == {
        "default-queue-topic": {
            "name": "marin-default",
            "project": "lab-1234",
            "labels": LABELS,
            "deletionPolicy": "DELETE",
        },
        "default-queue-dead-topic": {
            "name": "marin-default-dead",
            "project": "lab-1234",
            "labels": LABELS,
            "deletionPolicy": "DELETE",
        },
    }
    alike = {
        "project": "lab-1234",
        "labels": LABELS,
        "ackDeadlineSeconds": 60,
        "messageRetentionDuration": "2678400s",
        "retainAckedMessages": False,
        "enableExactlyOnceDelivery": True,
        "enableMessageOrdering": False,
        "expirationPolicy": {"ttl": ""},
        "retryPolicy": {"minimumBackoff": "10s", "maximumBackoff": "600s"},
        "deletionPolicy": "DELETE",
    }
    assert {each.name: each.inputs for each in recording.of_type(SUBSCRIPTION)} == {
        "default-queue-subscription": {
            **alike,
            "name": "marin-default",
            "topic": "projects/lab-1234/topics/marin-default",
            "deadLetterPolicy": {
                "deadLetterTopic": "projects/lab-1234/topics/marin-default-dead",
                "maxDeliveryAttempts": 100,
            },
        },
        "default-queue-dead-subscription": {
            **alike,
            "name": "marin-default-dead",
            "topic": "projects/lab-1234/topics/marin-default-dead",
        },
    }
    assert recording.named(QUEUE, "default-queue").outputs == {
        "topic": "projects/lab-1234/topics/marin-default",
        "subscription": "projects/lab-1234/subscriptions/marin-default",
        "dead_letter_topic": "projects/lab-1234/topics/marin-default-dead",
        "dead_letter_subscription": "projects/lab-1234/subscriptions/marin-default-dead",
    }
    assert_sound(recording, QUEUE)
    assert_waits_for(recording, QUEUE, "pubsub", "serviceusage")


def test_queue_settings_reach_both_subscriptions() -> None:
    settings = QueueSettings(
        ack_deadline_s=600,
        max_delivery_attempts=5,
        retention_s=86_400,
        min_backoff_s=0,
        max_backoff_s=60,
        exactly_once=False,
    )

    recording = record_queue(settings=settings)

    for each in recording.of_type(SUBSCRIPTION):
        assert each.inputs["ackDeadlineSeconds"] == 600
        assert each.inputs["messageRetentionDuration"] == "86400s"
        assert each.inputs["retryPolicy"] == {"minimumBackoff": "0s", "maximumBackoff": "60s"}
        assert each.inputs["enableExactlyOnceDelivery"] is False
    main = recording.named(SUBSCRIPTION, "default-queue-subscription")
    assert main.inputs["deadLetterPolicy"]["maxDeliveryAttempts"] == 5


def test_queue_grants_are_these_and_no_others() -> None:
    recording = record_queue(
        workers={"worker": "serviceAccount:w@x.iam.gserviceaccount.com"},
        submitters={"submitter": "serviceAccount:s@x.iam.gserviceaccount.com"},
    )

    worker, submitter = "serviceAccount:w@x.iam.gserviceaccount.com", "serviceAccount:s@x.iam.gserviceaccount.com"
    publisher, subscriber, viewer = (f"roles/pubsub.{role}" for role in ("publisher", "subscriber", "viewer"))
    assert find_grants(recording) == {
        (AGENT, publisher, "topic marin-default-dead"),
        (AGENT, subscriber, "subscription marin-default"),
        (worker, publisher, "topic marin-default"),
        (worker, publisher, "topic marin-default-dead"),
        (worker, subscriber, "subscription marin-default"),
        (worker, viewer, "subscription marin-default"),
        (worker, subscriber, "subscription marin-default-dead"),
        (worker, viewer, "subscription marin-default-dead"),
        (submitter, publisher, "topic marin-default"),
    }


def test_queue_member_that_works_and_submits_has_each_grant_once() -> None:
    member = {"lab": "group:lab@example.org"}

    recording = record_queue(workers=member, submitters=member)

    publishes = [each for each in recording.of_type("gcp:pubsub/topicIAMMember:TopicIAMMember") if "lab" in each.name]
    assert sorted(each.name for each in publishes) == [
        "default-queue-lab-dead-publisher",
        "default-queue-lab-publisher",
    ]


def test_queue_subscription_waits_until_the_service_may_forward_its_dead_letters() -> None:
    recording = record_queue()

    forwards = recording.named("gcp:pubsub/topicIAMMember:TopicIAMMember", "default-queue-agent-dead-publisher")
    subscription = recording.named(SUBSCRIPTION, "default-queue-subscription")
    takes = recording.named("gcp:pubsub/subscriptionIAMMember:SubscriptionIAMMember", "default-queue-agent-subscriber")
    assert forwards.urn in subscription.dependencies
    assert depends_on(recording, takes, subscription.urn)


@pytest.mark.parametrize("protect", [True, False])
def test_queue_protects_topics_and_subscriptions_as_the_site_says(protect: bool) -> None:
    recording = record_queue(site=sample_site(protect=protect), workers={"w": "user:a@example.org"})

    held = {each.name for each in customs(recording, QUEUE) if each.protect}
    assert held == (
        {
            "default-queue-topic",
            "default-queue-dead-topic",
            "default-queue-subscription",
            "default-queue-dead-subscription",
        }
        if protect
        else set()
    )
    named = [each for each in customs(recording, QUEUE) if each.type in (TOPIC, SUBSCRIPTION)]
    assert all(each.delete_before_replace for each in named)


def test_queue_without_apis_makes_the_agent_itself() -> None:
    recording = record_queue(apis=False)

    (agent,) = recording.of_type("gcp:projects/serviceIdentity:ServiceIdentity")
    assert agent.inputs == {"project": "lab-1234", "service": "pubsub.googleapis.com"}
    assert agent.retain_on_delete
    assert find_grants(recording) == {
        (AGENT, "roles/pubsub.publisher", "topic marin-default-dead"),
        (AGENT, "roles/pubsub.subscriber", "subscription marin-default"),
    }
    assert_sound(recording, QUEUE)


def test_queue_twice_in_a_program_clashes_nowhere() -> None:
    def program(opts: pulumi.ResourceOptions) -> None:
        for queue in ("default", "urgent"):
            args = QueueArgs(site=sample_site(), queue=queue, workers={"w": "user:a@example.org"})
            Queue(f"{queue}-queue", args, opts)

    recording = run(program)

    assert len(recording.of_type(TOPIC)) == 4
    names = [each.inputs["name"] for each in recording.of_type(TOPIC)]
    assert sorted(names) == ["marin-default", "marin-default-dead", "marin-urgent", "marin-urgent-dead"]


def test_queue_whose_tasks_stay_in_its_regions_says_so_to_google() -> None:
    recording = record_queue(settings=QueueSettings(regions=("us-west4",)))

    policies = [each.inputs["messageStoragePolicy"] for each in recording.of_type(TOPIC)]
    assert policies == [{"allowedPersistenceRegions": ["us-west4"]}] * 2
