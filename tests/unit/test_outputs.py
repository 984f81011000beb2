"""The contract: parsing, refusals, and that nothing is lost on the way back."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime import __version__
from runtime.errors import InvalidContract
from runtime.outputs import (
    ClaimOutput,
    ClusterOutput,
    ContractAltered,
    HiddenValue,
    IdentityOutput,
    KubernetesOutput,
    MissingOutput,
    NamespaceOutput,
    NetworkOutput,
    OtherQueueOutput,
    PublishedCopy,
    PubSubQueueOutput,
    RecordsOutput,
    RegistryOutput,
    SecretOutput,
    SqliteQueueOutput,
    StackOutputs,
    contract_digest,
    decode_fields,
    encode_outputs,
    need_output,
    outputs_fields,
    parse_outputs,
    published_fields,
    read_published,
)
from tests.cluster_support import OUTPUTS as CLUSTERS


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
        secrets={"hf-token": SecretOutput(resource="projects/p/secrets/hf-token", env="HF_TOKEN", attempts="all")},
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
                        image_pull_secrets=("ips",),
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

    assert parse_outputs(json.loads(encode_outputs(outputs))) == outputs


def test_encoding_is_canonical() -> None:
    text = encode_outputs(StackOutputs(stack="dev", labels={"b": "2", "a": "1"}))

    assert text == (
        '{"buckets":{},"clusters":{},"identities":{},"kubernetes":{},"labels":{"a":"1","b":"2"},"needs_runtime":"0.1","queues":{},'
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
    assert parse_outputs(json.loads(encode_outputs(parsed))) == parsed


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
        parse_outputs(decode_fields(data, source="contract.json"), source="contract.json")


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
    """Never another exception, for any content of a bucket."""
    try:
        parsed = parse_outputs({"schema": 1, **fields})
    except InvalidContract:
        return
    assert parsed.stack == fields["stack"]


# schemas of other releases


def test_contract_of_a_later_schema_says_which_release_reads_it() -> None:
    with pytest.raises(InvalidContract) as refused:
        parse_outputs({"schema": 2, "stack": "dev", "needs_runtime": "1.4", "queues": "of another shape"})

    assert refused.value.facts == (
        "found schema 2, need 1",
        "release 1.4 of research-runtime reads it, and newer ones do",
    )
    assert refused.value.hint == "pip install --upgrade 'research-runtime>=1.4'"


def test_every_contract_says_which_release_reads_it() -> None:
    """A change that raises SCHEMA must raise NEEDS_RUNTIME to the release that can read it."""
    fields = outputs_fields(StackOutputs(stack="dev"))

    assert (fields["schema"], fields["needs_runtime"]) == (1, "0.1")
    first, own = ([int(part) for part in text.split(".")[:2]] for text in (fields["needs_runtime"], __version__))
    assert first <= own


# secrets


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("region", "[secret]"),
        ("secrets.hf-token.resource", "[secret]"),
        ("labels.owner", {"4dabf18193072939515e22adb298388d": "1b47061264138c4ac30d75fd1eb44270", "plaintext": '"x"'}),
    ],
)
def test_hidden_value_is_refused_with_its_path(path: str, value: object) -> None:
    fields = set_at(json.loads(encode_outputs(full_outputs())), path, value)

    with pytest.raises(HiddenValue) as refused:
        parse_outputs(fields, source="pulumi")

    assert (refused.value.path, refused.value.facts[0]) == (path, "read from pulumi")
    assert f"`{path}` is hidden" in refused.value.message


def test_contract_that_is_hidden_as_a_whole_is_refused() -> None:
    with pytest.raises(HiddenValue) as refused:
        parse_outputs("[secret]", source="pulumi")

    assert refused.value.path == ""


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("secrets.hf-token", "hf_verysecret"),
        ("secrets.hf-token.resource", 31337),
        ("secrets", "hf_verysecret"),
    ],
)
def test_value_in_the_place_of_a_secret_is_refused_and_not_repeated(path: str, value: object) -> None:
    fields = set_at(json.loads(encode_outputs(full_outputs())), path, value)

    with pytest.raises(InvalidContract) as refused:
        parse_outputs(fields)

    assert f"`{path}` is a plain value" in refused.value.message
    assert str(value) not in refused.value.render()


# published copies


AT = datetime(2026, 11, 21, 12, tzinfo=UTC)


def published(**more: Any) -> dict[str, Any]:
    fields = outputs_fields(full_outputs())
    copy = published_fields(
        fields, PublishedCopy(digest=contract_digest(fields), at=AT, commit="c" * 40, committed_at=AT)
    )
    copy["published"].update(more)
    return json.loads(json.dumps(copy))  # type: ignore[no-any-return]


def test_published_copy_reads_like_the_contract_and_tells_of_itself() -> None:
    assert parse_outputs(published()) == full_outputs()
    assert read_published(published()) == PublishedCopy(
        digest=contract_digest(outputs_fields(full_outputs())), at=AT, commit="c" * 40, committed_at=AT
    )
    assert read_published(outputs_fields(full_outputs())) is None


def test_reader_that_knows_no_published_copies_takes_one() -> None:
    """An older release ignores the key, like every unknown key."""
    copy = published()
    copy["something_else"] = copy.pop("published")

    assert parse_outputs(copy) == full_outputs()


def test_altered_copy_is_refused_with_both_digests() -> None:
    copy = published()
    copy["queues"]["default"]["topic"] = "projects/evil/topics/t"

    with pytest.raises(ContractAltered) as refused:
        parse_outputs(copy, source="gs://lab/v1.json")

    assert refused.value.said == contract_digest(outputs_fields(full_outputs()))
    assert refused.value.found == contract_digest(copy)
    assert "runtime stack publish" in (refused.value.hint or "")


@pytest.mark.parametrize(
    "more",
    [{"digest": None}, {"digest": "md5:x"}, {"digest": 5}, {"at": "yesterday"}, {"at": None}, {"committed_at": "x"}],
)
def test_copy_that_cannot_be_verified_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(InvalidContract, match="cannot be verified"):
        parse_outputs(published(**more))


@pytest.mark.parametrize("value", ["x", 5, ["x"]])
def test_published_of_another_kind_is_refused(value: object) -> None:
    with pytest.raises(InvalidContract, match="cannot be verified"):
        parse_outputs({**published(), "published": value})


def test_contract_nested_beyond_reason_is_refused() -> None:
    value: object = 1
    for _ in range(200):
        value = {"a": value}

    with pytest.raises(InvalidContract, match="nested"):
        parse_outputs({"schema": 1, "stack": "dev", "x": value})
    with pytest.raises(InvalidContract):
        decode_fields("[" * 100_000)


# missing keys


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("records", "add `records` to Pulumi.dev.yaml, then run `pulumi up --stack dev`"),
        ("queues", "add `queues` to Pulumi.dev.yaml, then run `pulumi up --stack dev`"),
        ("registries", "add `registries` to Pulumi.dev.yaml, then run `pulumi up --stack dev`"),
        ("clusters", "add `heads` to Pulumi.dev.yaml, then run `pulumi up --stack dev`"),
        ("kubernetes", "add `kubernetes` to Pulumi.dev.yaml, then run `pulumi up --stack dev`"),
    ],
)
def test_missing_key_is_named_with_the_command_that_brings_it(key: str, hint: str) -> None:
    with pytest.raises(MissingOutput) as missing:
        need_output(StackOutputs(stack="dev"), key, "`runtime x`")

    assert missing.value.message == f"stack `dev` exports no `{key}`, and `runtime x` needs it"
    assert missing.value.hint == hint
    assert need_output(full_outputs(), key, "`runtime x`") == getattr(full_outputs(), key)


def test_key_that_the_local_stack_lacks_is_no_matter_of_pulumi() -> None:
    with pytest.raises(MissingOutput) as missing:
        need_output(StackOutputs(stack="local"), "secrets", "`runtime secrets`")

    assert "pulumi" not in (missing.value.hint or "")


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("project", "--impersonate-service-account=x"),
        ("project", "p/../q"),
        ("clusters.main.head", "-oProxyCommand=touch x"),
        ("clusters.main.head", "a b"),
        ("clusters.main.zone", "../../other/zones/z"),
        ("clusters.main.zone", "--project=x"),
        ("clusters.main.cluster_name", "../../../etc/x"),
        ("clusters.main.cluster_name", "\x1b]0;x\x07"),
        ("clusters.main.cluster_name", "marin\n"),
    ],
)
def test_name_of_a_cluster_that_is_none_of_googles_is_refused(where: str, value: str) -> None:
    fields = json.loads(encode_outputs(CLUSTERS))
    parse_outputs(fields)
    *path, last = where.split(".")
    part = fields
    for each in path:
        part = part[each]
    part[last] = value

    with pytest.raises(InvalidContract) as refused:
        parse_outputs(fields)

    assert f"`{where}`" in refused.value.message
    assert "\x1b" not in refused.value.message
