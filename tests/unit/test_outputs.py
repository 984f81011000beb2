"""The contract: what is read, what is refused and how, and that nothing is lost on the way back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import InvalidContract
from runtime.outputs import (
    ClaimOutput,
    ClusterOutput,
    IdentityOutput,
    KubernetesOutput,
    NamespaceOutput,
    NetworkOutput,
    OtherQueueOutput,
    PubSubQueueOutput,
    RecordsOutput,
    RegistryOutput,
    SecretOutput,
    SqliteQueueOutput,
    StackOutputs,
    decode_outputs,
    encode_outputs,
    outputs_fields,
    parse_outputs,
)


def full_outputs() -> StackOutputs:
    return StackOutputs(
        stack="marin-us-west4",
        project="p",
        region="us-west4",
        zone="us-west4-a",
        labels={"owner": "lab"},
        records=RecordsOutput(url="gs://p-records"),
        queues={
            "default": PubSubQueueOutput(
                topic="projects/p/topics/t",
                subscription="projects/p/subscriptions/s",
                dead_letter_topic="projects/p/topics/d",
                dead_letter_subscription="projects/p/subscriptions/d",
                ack_deadline_s=60,
                max_delivery_attempts=100,
                retention_s=2678400,
                exactly_once=True,
            ),
            "disk": SqliteQueueOutput(path="/data/q.db"),
        },
        registries={"images": {"us-west4": RegistryOutput(url="us-west4-docker.pkg.dev/p/marin")}},
        secrets={"hf-token": SecretOutput(resource="projects/p/secrets/hf-token", env="HF_TOKEN")},
        network=NetworkOutput(network="n", subnet="s"),
        clusters={
            "main": ClusterOutput(
                head="ray-main-head",
                cluster_name="main",
                zone="us-west4-a",
                internal_ip="10.0.0.2",
                image="img@sha256:0",
                ports={"dashboard": 8265},
                pools={"v4-8": {"max": 4, "preemptible": True}},
                worker_identity="w@p",
                config_sha256="ab",
            )
        },
        kubernetes={
            "nautilus": KubernetesOutput(
                context="n",
                server="https://k",
                namespaces={
                    "l2r": NamespaceOutput(
                        service_account="sa",
                        image_pull_secret="ips",
                        claims={"scratch": ClaimOutput(claim="c", size="1Ti", access_mode="ReadWriteMany")},
                    )
                },
            )
        },
        identities={"worker": IdentityOutput(email="w@p", use="workers")},
        published_url="gs://p-records/contract/v1.json",
    )


def test_full_contract_survives_the_way_to_json_and_back() -> None:
    outputs = full_outputs()

    assert decode_outputs(encode_outputs(outputs)) == outputs


def test_encoding_is_canonical() -> None:
    text = encode_outputs(StackOutputs(stack="dev", labels={"b": "2", "a": "1"}))

    assert text == (
        '{"clusters":{},"identities":{},"kubernetes":{},"labels":{"a":"1","b":"2"},"needs_runtime":"0.1","queues":{},'
        '"registries":{},"schema":1,"secrets":{},"stack":"dev"}'
    )


def test_keys_of_a_later_release_are_ignored_at_every_depth() -> None:
    fields = outputs_fields(full_outputs())
    fields["novel"] = {"x": 1}
    fields["queues"]["default"]["colour"] = "blue"
    fields["clusters"]["main"]["ports"]["new"] = 1234

    parsed = parse_outputs(fields)

    assert parsed.queues == full_outputs().queues
    assert parsed.clusters["main"].ports == {"dashboard": 8265, "new": 1234}


def test_absent_and_null_optional_keys_are_none() -> None:
    queue = {"kind": "pubsub", "topic": "t", "subscription": "s", "dead_letter_topic": None}

    parsed = parse_outputs({"schema": 1, "stack": "dev", "region": None, "queues": {"default": queue}})

    assert parsed == StackOutputs(stack="dev", queues={"default": PubSubQueueOutput(topic="t", subscription="s")})


def test_queue_of_an_unknown_kind_is_kept_with_its_values() -> None:
    fields = {"schema": 1, "stack": "dev", "queues": {"q": {"kind": "kafka", "brokers": ["a"]}}}

    parsed = parse_outputs(fields)

    assert parsed.queues["q"] == OtherQueueOutput(kind="kafka", values={"brokers": ["a"]})
    assert decode_outputs(encode_outputs(parsed)) == parsed


def test_whole_numbers_may_come_as_doubles_as_pulumi_carries_them() -> None:
    fields = outputs_fields(full_outputs())
    fields["schema"] = 1.0
    fields["queues"]["default"]["ack_deadline_s"] = 60.0

    assert parse_outputs(fields) == full_outputs()


def set_at(fields: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    *parents, last = path.split(".")
    inner = fields
    for name in parents:
        inner = inner[name]
    inner[last] = value
    return fields


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("stack", None, "is missing"),
        ("stack", 7, "is a number (7), expected a string"),
        ("labels", [], "is an array, expected an object"),
        ("labels.owner", True, "is a boolean (true), expected a string"),
        ("records", "gs://x", 'is a string ("gs://x"), expected an object'),
        ("records.url", None, "is missing"),
        ("queues.default", "x", 'is a string ("x"), expected an object'),
        ("queues.default.kind", None, "is missing"),
        ("queues.default.topic", None, "is missing"),
        ("queues.default.ack_deadline_s", "60", 'is a string ("60"), expected a whole number'),
        ("queues.default.ack_deadline_s", 1.5, "is a number (1.5), expected a whole number"),
        ("queues.default.exactly_once", 1, "is a number (1), expected true or false"),
        ("registries.images.us-west4.url", {}, "is an object, expected a string"),
        ("clusters.main.ports.dashboard", "a", 'is a string ("a"), expected a whole number'),
        ("kubernetes.nautilus.namespaces.l2r.claims.scratch.size", 1, "is a number (1), expected a string"),
    ],
)
def test_wrong_type_is_refused_with_its_path(path: str, value: object, problem: str) -> None:
    fields = set_at(json.loads(encode_outputs(full_outputs())), path, value)

    with pytest.raises(InvalidContract) as refused:
        parse_outputs(fields, source="gs://x")

    assert f"`{path}` {problem}" in refused.value.message


@pytest.mark.parametrize(
    ("schema", "hint"),
    [
        (2, "pip install --upgrade research-runtime"),
        (0, "run `pulumi up --stack dev`"),
        (None, "run `pulumi up --stack dev`"),
        ("1", "run `pulumi up --stack dev`"),
        (True, "run `pulumi up --stack dev`"),
    ],
)
def test_another_major_is_refused_with_the_command_that_fixes_it(schema: object, hint: str) -> None:
    with pytest.raises(InvalidContract) as refused:
        parse_outputs({"schema": schema, "stack": "dev"})

    assert refused.value.facts == (f"found schema {json.dumps(schema)}, need 1",)
    assert refused.value.hint == hint


@pytest.mark.parametrize("data", ["", "nope", "[]", "3", "null"])
def test_what_is_no_object_is_refused(data: str) -> None:
    with pytest.raises(InvalidContract):
        decode_outputs(data, source="contract.json")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text("ab1", max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["kind", "url", "topic", "a"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(
    st.dictionaries(
        st.sampled_from(["stack", "labels", "records", "queues", "registries", "clusters", "network", "x"]), json_values
    )
)
def test_any_object_parses_or_is_refused(fields: dict[str, Any]) -> None:
    """Never another exception, whatever a bucket holds."""
    try:
        parsed = parse_outputs({"schema": 1, **fields})
    except InvalidContract:
        return
    assert parsed.stack == fields["stack"]
