"""The recorder: it keeps the program's registrations, and refuses those that no engine would accept."""

from __future__ import annotations

import threading

import pulumi
import pytest
from pulumi.runtime import settings as engine
from pulumi_gcp import Provider, organizations, pubsub

from infra.check.recording import (
    UNKNOWN,
    Recording,
    SecretValue,
    record,
)
from infra.gcp.outputs import compute

URN = "urn:pulumi:dev::research-runtime::"


class Pair(pulumi.ComponentResource):
    def __init__(self, name: str, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("runtime:queue:Queue", name, None, opts)
        topic = pubsub.Topic(
            f"{name}-topic",
            name="t-1",
            project="lab-1234",
            opts=pulumi.ResourceOptions(
                parent=self,
                protect=True,
                retain_on_delete=True,
                delete_before_replace=True,
                ignore_changes=["labels.touched"],
                replace_on_changes=["name"],
                import_="projects/lab-1234/topics/t-1",
            ),
        )
        pubsub.Subscription(
            f"{name}-subscription",
            topic=topic.id,
            ack_deadline_seconds=60,
            opts=pulumi.ResourceOptions(parent=self, depends_on=[topic]),
        )
        self.register_outputs({"topic": topic.id})


def make_pair() -> None:
    provider = Provider("google", project="lab-1234")
    Pair("main", pulumi.ResourceOptions(providers=[provider]))


def test_record_pair_keeps_inputs_parents_options_and_dependencies() -> None:
    recording = record(make_pair, compute=compute)

    topic = recording.named("gcp:pubsub/topic:Topic", "main-topic")
    subscription = recording.named("gcp:pubsub/subscription:Subscription", "main-subscription")
    assert topic.urn == f"{URN}runtime:queue:Queue$gcp:pubsub/topic:Topic::main-topic"
    assert topic.parent == f"{URN}runtime:queue:Queue::main"
    assert topic.provider is not None
    assert topic.provider.startswith(f"{URN}pulumi:providers:gcp::google::")
    assert (topic.protect, topic.retain_on_delete, topic.delete_before_replace) == (True, True, True)
    assert (topic.ignore_changes, topic.replace_on_changes) == (("labels.touched",), ("name",))
    assert topic.import_id == "projects/lab-1234/topics/t-1"
    assert subscription.delete_before_replace is None
    assert subscription.inputs == {"topic": "projects/lab-1234/topics/t-1", "ackDeadlineSeconds": 60}
    assert subscription.dependencies == {topic.urn}
    assert subscription.property_dependencies == {"topic": frozenset({topic.urn})}
    assert recording.get(f"{URN}runtime:queue:Queue::main").outputs == {"topic": "projects/lab-1234/topics/t-1"}


def test_record_without_compute_leaves_ids_unknown() -> None:
    recording = record(make_pair)
    assert recording.of_type("gcp:pubsub/subscription:Subscription")[0].inputs["topic"] is UNKNOWN


def test_record_exports_keep_secrets_unknowns_numbers_and_null() -> None:
    def program() -> None:
        topic = pubsub.Topic("t")
        values = {"secret": pulumi.Output.secret("s"), "id": topic.id, "count": 3, "share": 0.5, "none": None}
        pulumi.export("all", values)

    assert record(program).outputs == {
        "all": {"secret": SecretValue("s"), "id": UNKNOWN, "count": 3, "share": 0.5, "none": None}
    }


def test_record_alias_of_component_gives_its_children_aliases_too() -> None:
    def program() -> None:
        provider = Provider("google", project="lab-1234")
        opts = pulumi.ResourceOptions(providers=[provider], aliases=[pulumi.Alias(name="old")])
        Pair("main", opts)

    recording = record(program)
    assert recording.get(f"{URN}runtime:queue:Queue::main").aliases == (f"{URN}runtime:queue:Queue::old",)
    topic = recording.of_type("gcp:pubsub/topic:Topic")[0]
    assert topic.aliases == (f"{URN}runtime:queue:Queue$gcp:pubsub/topic:Topic::old-topic",)


def test_record_alias_by_type_and_without_parent_is_a_whole_urn() -> None:
    def program() -> None:
        opts = pulumi.ResourceOptions(
            aliases=[pulumi.Alias(type_="gcp:pubsub/liteTopic:LiteTopic"), "urn:pulumi:dev::old::a:b:C::t"]
        )
        pubsub.Topic("t", opts=opts)

    topic = record(program).resources[0]
    assert topic.aliases == (f"{URN}gcp:pubsub/liteTopic:LiteTopic::t", "urn:pulumi:dev::old::a:b:C::t")


def test_record_twice_the_same_urn_is_refused() -> None:
    def program() -> None:
        pubsub.Topic("t")
        pubsub.Topic("t")

    with pytest.raises(RuntimeError, match="two resources have the same URN"):
        record(program)


@pytest.mark.parametrize(
    "look_up",
    [
        lambda: organizations.get_project(project_id="p"),
        lambda: pulumi.export("n", organizations.get_project_output(project_id="p").number),
        lambda: pubsub.Topic.get("t", "projects/p/topics/t"),
    ],
    ids=["call", "output", "resource"],
)
def test_record_program_that_looks_something_up_is_refused(look_up: object) -> None:
    assert callable(look_up)
    with pytest.raises(RuntimeError, match="from the cloud; nothing may be looked up"):
        record(look_up)


def test_record_failing_apply_is_raised_and_spoils_no_later_run() -> None:
    def program() -> None:
        pulumi.Output.from_input(1).apply(lambda one: one / 0)

    with pytest.raises(ZeroDivisionError):
        record(program)
    assert len(record(make_pair).resources) == 4


def test_record_leaves_no_engine_behind_and_no_thread() -> None:
    threads = threading.active_count()
    record(make_pair, config={"research-runtime:region": "us-west4"})
    assert engine.get_monitor() is None
    assert pulumi.Config("research-runtime").get("region") is None
    assert threading.active_count() == threads


def test_record_config_and_encrypted_keys_reach_the_program() -> None:
    seen = {}

    def program() -> None:
        from pulumi.runtime import config

        seen["region"] = pulumi.Config().get("region")
        seen["secret"] = config.is_config_secret("research-runtime:token")
        seen["plain"] = config.is_config_secret("research-runtime:region")

    record(program, config={"research-runtime:region": "r"}, secrets=["research-runtime:token"])
    assert seen == {"region": "r", "secret": True, "plain": False}


def test_named_unknown_name_says_which_there_are() -> None:
    recording: Recording = record(make_pair)
    with pytest.raises(LookupError, match="main-topic"):
        recording.named("gcp:pubsub/topic:Topic", "other")
