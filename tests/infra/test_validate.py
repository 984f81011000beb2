"""The typed validator finds every class of mistake, and accepts every input that the providers accept."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.check.recording import UNKNOWN, Recording, SecretValue
from runtime.schema import Problem
from tests.infra.provider_types import fields_of, find_args_class, find_input_problems

TOPIC = "gcp:pubsub/topic:Topic"
SUBSCRIPTION = "gcp:pubsub/subscription:Subscription"
POLICY = "kubernetes:networking.k8s.io/v1:NetworkPolicy"


def problems(type_: str, inputs: dict[str, Any]) -> dict[str, str]:
    return {each.path: each.message for each in find_input_problems(type_, inputs)}


def test_validate_stack_has_no_problem(recording: Recording) -> None:
    found = {
        each.urn: wrong
        for each in recording.resources
        if each.custom and (wrong := find_input_problems(each.type, each.inputs))
    }
    assert found == {}


def test_validate_stack_reads_each_type_once(recording: Recording) -> None:
    custom = [each for each in recording.resources if each.custom]
    for each in custom:
        find_input_problems(each.type, each.inputs)
    before = fields_of.cache_info().misses, find_args_class.cache_info().misses

    for each in custom:
        find_input_problems(each.type, each.inputs)

    assert (fields_of.cache_info().misses, find_args_class.cache_info().misses) == before


@pytest.mark.parametrize(
    ("type_", "inputs", "expected"),
    [
        (TOPIC, {"nme": "t-1"}, {"nme": "is no input here; did you mean `name`?"}),
        (
            TOPIC,
            {"message_retention_duration": "600s"},
            {"message_retention_duration": "is no input here; did you mean `messageRetentionDuration`?"},
        ),
        (SUBSCRIPTION, {"name": "s-1"}, {"topic": "is missing and required"}),
        (SUBSCRIPTION, {"topic": None}, {"topic": "is missing and required"}),
        (TOPIC, {"name": 3}, {"name": "is 3 (a number), expected a string"}),
        (
            SUBSCRIPTION,
            {"topic": "t-1", "ackDeadlineSeconds": "60"},
            {"ackDeadlineSeconds": "is `60`, expected a whole number"},
        ),
        (
            SUBSCRIPTION,
            {"topic": "t-1", "ackDeadlineSeconds": True},
            {"ackDeadlineSeconds": "is true (a boolean), expected a whole number"},
        ),
        (
            SUBSCRIPTION,
            {"topic": "t-1", "ackDeadlineSeconds": 60.5},
            {"ackDeadlineSeconds": "is 60.5 (a number), expected a whole number"},
        ),
        (
            SUBSCRIPTION,
            {"topic": "t-1", "enableExactlyOnceDelivery": "true"},
            {"enableExactlyOnceDelivery": "is `true`, expected true or false"},
        ),
        (TOPIC, {"labels": ["a"]}, {"labels": "is a list, expected an object"}),
        (TOPIC, {"labels": {"a": 1}}, {"labels.a": "is 1 (a number), expected a string"}),
        (
            SUBSCRIPTION,
            {"topic": "t-1", "retryPolicy": [{"minimumBackoff": "10s"}]},
            {"retryPolicy": "is a list, expected an object"},
        ),
        (SUBSCRIPTION, {"topic": "t-1", "expirationPolicy": {}}, {"expirationPolicy.ttl": "is missing and required"}),
        (
            SUBSCRIPTION,
            {"topic": "t-1", "deadLetterPolicy": {"deadletterTopic": "x"}},
            {"deadLetterPolicy.deadletterTopic": "is no input here; did you mean `deadLetterTopic`?"},
        ),
        (
            "gcp:artifactregistry/repository:Repository",
            {"repositoryId": "images", "format": "DOCKER", "cleanupPolicies": {"id": "a"}},
            {"cleanupPolicies": "is an object, expected a list"},
        ),
        (
            "gcp:artifactregistry/repository:Repository",
            {"repositoryId": "images", "format": "DOCKER", "cleanupPolicies": [{"action": "KEEP"}]},
            {"cleanupPolicies[0].id": "is missing and required"},
        ),
        (
            "gcp:compute/instance:Instance",
            {"machineType": "n2-standard-8", "networkInterfaces": []},
            {"bootDisk": "is missing and required"},
        ),
        (
            "pulumi:providers:gcp",
            {"project": "lab-1234", "userProjectOverride": "yes", "defaultLabels": '{"a": 1}'},
            {
                "userProjectOverride": "is `yes`, expected true or false",
                "defaultLabels.a": "is 1 (a number), expected a string",
            },
        ),
        ("kubernetes:core/v1:Namespace", {"kind": "Pod"}, {"kind": 'is `Pod`, allowed: "Namespace"'}),
        (
            POLICY,
            {"spec": {"podSelector": {}, "egress": [{"ports": [{"port": 1.5}]}]}},
            {"spec.egress[0].ports[0].port": "is 1.5 (a number), expected a whole number"},
        ),
        (
            POLICY,
            {"spec": {"podSelector": {}, "ingress": [{"form": []}]}},
            {"spec.ingress[0].form": "is no input here; did you mean `from`?"},
        ),
        (
            "kubernetes:rbac.authorization.k8s.io/v1:Role",
            {"rules": [{"resources": ["pods"]}]},
            {"rules[0].verbs": "is missing and required"},
        ),
        ("pulumi:providers:kubernetes", {"contxt": "a"}, {"contxt": "is no input here; did you mean `context`?"}),
    ],
)
def test_validate_known_bad_input_is_found(type_: str, inputs: dict[str, Any], expected: dict[str, str]) -> None:
    assert problems(type_, inputs) == expected


def test_validate_unknown_and_secret_are_accepted_anywhere() -> None:
    inputs = {
        "topic": UNKNOWN,
        "ackDeadlineSeconds": UNKNOWN,
        "labels": {"a": UNKNOWN, "b": SecretValue("text")},
        "deadLetterPolicy": UNKNOWN,
        "retryPolicy": {"minimumBackoff": UNKNOWN, "maximumBackoff": SecretValue("10s")},
        "messageTransforms": [UNKNOWN],
    }
    assert problems(SUBSCRIPTION, inputs) == {}


def test_validate_wrong_secret_is_found_and_not_shown() -> None:
    found = find_input_problems(SUBSCRIPTION, {"topic": "t-1", "labels": SecretValue(["hunter2"])})
    assert [each.path for each in found] == ["labels"]
    assert "hunter2" not in found[0].message


@pytest.mark.parametrize(
    ("type_", "near"),
    [
        ("gcp:pubsub/topc:Topic", "near is gcp:pubsub/topic:Topic"),
        ("kubernetes:core/v1:Namespaces", "near is kubernetes:core/v1:Namespace"),
        ("aws:s3/bucket:Bucket", "known packages: gcp, kubernetes"),
        ("pulumi:providers:aws", "known packages: gcp, kubernetes"),
    ],
)
def test_validate_unknown_type_raises_lookup_error_with_what_is_near(type_: str, near: str) -> None:
    with pytest.raises(LookupError) as unknown:
        find_input_problems(type_, {})
    assert near in str(unknown.value)


def test_validate_resource_whose_args_class_is_named_otherwise_is_found() -> None:
    """A claim's plain class name belongs to the object inside other resources; the resource's own ends in InitArgs."""
    assert find_args_class("kubernetes:core/v1:PersistentVolumeClaim").__name__ == "PersistentVolumeClaimInitArgs"
    assert find_args_class("pulumi:providers:gcp").__name__ == "ProviderArgs"


@settings(max_examples=150)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | st.just(UNKNOWN),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["labels", "topic", "ttl", "retryPolicy", "x"]), inner, max_size=3)
        ),
        max_leaves=10,
    )
)
def test_validate_any_value_at_any_place_is_judged_and_never_crashes(value: object) -> None:
    inputs = {
        "topic": value,
        "labels": value,
        "retryPolicy": value,
        "messageTransforms": value,
        "expirationPolicy": value,
    }
    assert all(isinstance(each, Problem) for each in find_input_problems(SUBSCRIPTION, inputs))
    assert all(isinstance(each, Problem) for each in find_input_problems(POLICY, {"spec": value, "metadata": value}))
