"""The typed validator finds every class of mistake, and accepts every input that the providers accept."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.check.recording import UNKNOWN, Recording, SecretValue
from infra.check.validate import fields_of, find_args_class, find_input_problems
from infra.gcp.values import COMMON, VALUES, bucket_name, member
from runtime.schema import Problem

TOPIC = "gcp:pubsub/topic:Topic"
SUBSCRIPTION = "gcp:pubsub/subscription:Subscription"
GRANT = "gcp:pubsub/topicIAMMember:TopicIAMMember"
INSTANCE = "gcp:compute/instance:Instance"
BALANCED = {"initializeParams": {"type": "pd-balanced"}}
BUCKET = "gcp:storage/bucket:Bucket"
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


@pytest.mark.parametrize(
    ("type_", "inputs", "path"),
    [
        (TOPIC, {"name": "goog-mine"}, "name"),
        (TOPIC, {"name": "1st"}, "name"),
        (TOPIC, {"name": "ab"}, "name"),
        (TOPIC, {"project": "Lab"}, "project"),
        (TOPIC, {"labels": {"Team": "x"}}, "labels"),
        (TOPIC, {"labels": {"team": "A B"}}, "labels"),
        (TOPIC, {"labels": {f"k{index}": "v" for index in range(65)}}, "labels"),
        (TOPIC, {"deletionPolicy": "KEEP"}, "deletionPolicy"),
        (TOPIC, {"messageRetentionDuration": "32d"}, "messageRetentionDuration"),
        (TOPIC, {"messageRetentionDuration": "2678401s"}, "messageRetentionDuration"),
        (SUBSCRIPTION, {"topic": "t-1", "ackDeadlineSeconds": 9}, "ackDeadlineSeconds"),
        (SUBSCRIPTION, {"topic": "t-1", "ackDeadlineSeconds": 601}, "ackDeadlineSeconds"),
        (SUBSCRIPTION, {"topic": "projects/p/topic/t"}, "topic"),
        (
            SUBSCRIPTION,
            {"topic": "t-1", "deadLetterPolicy": {"maxDeliveryAttempts": 4}},
            "deadLetterPolicy.maxDeliveryAttempts",
        ),
        (
            SUBSCRIPTION,
            {"topic": "t-1", "deadLetterPolicy": {"deadLetterTopic": "dead"}},
            "deadLetterPolicy.deadLetterTopic",
        ),
        (SUBSCRIPTION, {"topic": "t-1", "expirationPolicy": {"ttl": "3600s"}}, "expirationPolicy.ttl"),
        (
            SUBSCRIPTION,
            {"topic": "t-1", "retryPolicy": {"minimumBackoff": "60s", "maximumBackoff": "10s"}},
            "retryPolicy",
        ),
        (SUBSCRIPTION, {"topic": "t-1", "retryPolicy": {"maximumBackoff": "601s"}}, "retryPolicy.maximumBackoff"),
        (GRANT, {"topic": "t", "role": "owner", "member": "user:a@b.c"}, "role"),
        (GRANT, {"topic": "t", "role": "roles/owner", "member": "a@b.c"}, "member"),
        ("gcp:serviceaccount/account:Account", {"accountId": "short"}, "accountId"),
        ("gcp:serviceaccount/account:Account", {"accountId": "a" * 31}, "accountId"),
        ("gcp:projects/iAMCustomRole:IAMCustomRole", {"roleId": "my-role", "title": "t", "permissions": []}, "roleId"),
        (
            "gcp:projects/iAMCustomRole:IAMCustomRole",
            {"roleId": "mine", "title": "t", "permissions": ["tpu nodes"]},
            "permissions[0]",
        ),
        ("gcp:projects/service:Service", {"service": "pubsub"}, "service"),
        (BUCKET, {"location": "us-west4", "name": "Records"}, "name"),
        (
            BUCKET,
            {"location": "us-west4", "softDeletePolicy": {"retentionDurationSeconds": 3600}},
            "softDeletePolicy.retentionDurationSeconds",
        ),
        (BUCKET, {"location": "us-west4", "publicAccessPrevention": "on"}, "publicAccessPrevention"),
        ("gcp:compute/subnetwork:Subnetwork", {"network": "n", "ipCidrRange": "10.0.0.1/20"}, "ipCidrRange"),
        ("gcp:compute/subnetwork:Subnetwork", {"network": "projects/lab-1234/networks/n"}, "network"),
        (
            "gcp:compute/firewall:Firewall",
            {"network": "n", "sourceRanges": ["35.235.240.0/20", "iap"]},
            "sourceRanges[1]",
        ),
        (
            "gcp:compute/firewall:Firewall",
            {"network": "n", "allows": [{"protocol": "tcp", "ports": ["ssh"]}]},
            "allows[0].ports[0]",
        ),
        ("gcp:compute/firewall:Firewall", {"project": "p-1", "network": "projects/p-2/global/networks/n"}, "network"),
        (INSTANCE, {"machineType": "c4-standard-8", "bootDisk": BALANCED}, "machineType"),
        (INSTANCE, {"machineType": "g2-standard-8", "scheduling": {"onHostMaintenance": "MIGRATE"}}, "machineType"),
        (
            "gcp:iam/workloadIdentityPool:WorkloadIdentityPool",
            {"workloadIdentityPoolId": "gcp-ci"},
            "workloadIdentityPoolId",
        ),
        ("gcp:billing/budget:Budget", {"billingAccount": "1234", "thresholdRules": []}, "billingAccount"),
        ("gcp:secretmanager/secret:Secret", {"secretId": "a/b", "replication": {"auto": {}}}, "secretId"),
    ],
)
def test_validate_value_that_google_refuses_is_found(type_: str, inputs: dict[str, Any], path: str) -> None:
    assert path in problems(type_, inputs)


@pytest.mark.parametrize(
    ("type_", "inputs"),
    [
        ("gcp:compute/firewall:Firewall", {"project": "lab-1234", "network": "projects/lab-1234/global/networks/n"}),
        ("gcp:compute/firewall:Firewall", {"project": "lab-1234", "network": UNKNOWN}),
        ("gcp:compute/firewall:Firewall", {"network": "projects/lab-1234/global/networks/n"}),
        (INSTANCE, {"machineType": "c4-standard-8", "bootDisk": UNKNOWN}),
        (INSTANCE, {"machineType": UNKNOWN, "bootDisk": BALANCED}),
        (INSTANCE, {"machineType": "q9-standard-8", "bootDisk": BALANCED}),
        (INSTANCE, {"machineType": "n2-standard-8", "scheduling": {"onHostMaintenance": "MIGRATE"}}),
    ],
)
def test_validate_values_that_fit_each_other_or_are_not_known_yet_are_accepted(
    type_: str, inputs: dict[str, Any]
) -> None:
    assert not {"machineType", "network"} & set(problems(type_, inputs))


@pytest.mark.parametrize(
    "name", ["user:a@b.co", "group:g@b.co", "domain:b.co", "serviceAccount:x@p-1.iam.gserviceaccount.com",
             "principalSet://iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/p/attribute.role/deploy",
             "serviceAccount:service-12@gcp-sa-pubsub.iam.gserviceaccount.com", "allUsers"],
)  # fmt: skip
def test_member_that_google_knows_is_accepted(name: str) -> None:
    """`allUsers` is well-formed; whether public access is allowed is up to the policy."""
    assert member(name) is None


@pytest.mark.parametrize("name", ["goog-records", "my-google-data", "g00gle1", "a..b", "10.0.0.1", "ab", "-ab", "A"])
def test_bucket_name_that_google_refuses_is_found(name: str) -> None:
    assert bucket_name(name) is not None


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


def test_values_table_names_types_and_inputs_that_the_wheels_have() -> None:
    """A rule with a misspelt path would never be applied."""
    for type_, rules in VALUES.items():
        names = set(fields_of(find_args_class(type_)))
        wanted = {path.split(".")[0] for path in rules}
        assert wanted <= names, type_
    assert set(COMMON) <= set(fields_of(find_args_class(SUBSCRIPTION)))


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
