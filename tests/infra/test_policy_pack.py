"""The pack: the rules get the engine's view of the resources, and every rule stops an `up`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pulumi
import pulumi_gcp as gcp
import pytest
import yaml
from google.protobuf import json_format
from google.protobuf.struct_pb2 import Struct
from pulumi.runtime import proto
from pulumi.runtime.proto.analyzer_pb2_grpc import AnalyzerStub
from pulumi_policy import (
    EnforcementLevel,
    PolicyCustomTimeouts,
    PolicyProviderResource,
    PolicyResource,
    PolicyResourceOptions,
    ResourceValidationPolicy,
    StackValidationPolicy,
)
from pulumi_policy.deserialize import SPECIAL_SECRET_SIG, SPECIAL_SIG_KEY
from pulumi_policy.proxy import UNKNOWN_OBJECT_VALUE, UNKNOWN_STRING_VALUE, unknown_checking_proxy

from infra.check.recording import UNKNOWN, Recording, Registration, SecretValue, UnknownValue, record
from infra.gcp.catalog import BOOT_IMAGE_PROJECTS
from infra.policy.base import StackBounds
from infra.policy.crossguard import READER, as_registration, describe, policies, stack_bounds
from infra.policy.rules import RULES, apply_rules
from tests.infra.test_policy_rules import AGENT, BROKEN, KEPT, NEW, THERE, Lab, Program, run

PACK = Path(__file__).parents[2] / "infra" / "policy" / "pack"
URN = "urn:pulumi:dev::research-runtime::{}::{}"
TOPIC = "gcp:pubsub/topic:Topic"

Answers = Callable[[Registration], Mapping[str, Any]]
"""The provider's outputs for an existing resource."""


def shown(type_: str, name: str, inputs: dict[str, Any], **others: Any) -> PolicyResource:
    """Build a resource as the engine's library passes it to a policy."""
    options = PolicyResourceOptions(
        protect=others.pop("protect", False),
        ignore_changes=others.pop("ignore_changes", []),
        delete_before_replace=None,
        aliases=[],
        custom_timeouts=PolicyCustomTimeouts(0, 0, 0),
        additional_secret_outputs=[],
    )
    arguments: dict[str, Any] = {"provider": None, "parent": None, "dependencies": [], "property_dependencies": {}}
    return PolicyResource(
        resource_type=type_,
        props=unknown_checking_proxy(inputs),
        urn=others.pop("urn", URN.format(type_, name)),
        name=name,
        opts=options,
        **(arguments | others),
    )


class Pack:
    """The pack in its own process, queried over the engine's protocol."""

    def __init__(self) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PULUMI_")}
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-m", "pulumi.policy", "127.0.0.1:1", str(PACK)],
            cwd=PACK,
            env=clean,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self._channel = grpc.insecure_channel(f"127.0.0.1:{int(self._process.stdout.readline())}")
        self._engine = AnalyzerStub(self._channel)  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        self._channel.close()
        self._process.kill()
        self._process.communicate()

    def judge(
        self, recording: Recording, answers: Answers, *, registered: bool = True, rule: str | None = None
    ) -> list[tuple[str, str, str]]:
        """Return rule, resource and message for a stack with these provider answers; with `rule`, of that rule only."""
        for each in recording.resources if registered else ():
            said = self._engine.Analyze(
                proto.AnalyzeRequest(type=each.type, urn=each.urn, name=each.name, properties=as_struct(each.inputs))
            )
            assert list(said.diagnostics) == []
        request = proto.AnalyzeStackRequest(resources=[_shown(each, answers(each)) for each in recording.resources])
        said = self._engine.AnalyzeStack(request)
        return [
            (each.policyName, recording.get(each.urn).name, each.message.split("\n")[1].partition(";")[0])
            for each in said.diagnostics
            if rule in (None, each.policyName)
        ]


def _shown(each: Registration, outputs: Mapping[str, Any]) -> Any:
    provider = each.provider.rpartition("::")[0] if each.provider else None
    return proto.AnalyzerResource(
        type=each.type,
        urn=each.urn,
        name=each.name,
        properties=as_struct(outputs),
        options=proto.AnalyzerResourceOptions(protect=each.protect, aliases=list(each.aliases)),
        provider=proto.AnalyzerProviderResource(type=provider.split("::")[2], urn=provider) if provider else None,
        parent=each.parent or "",
        dependencies=sorted(each.dependencies),
        propertyDependencies={
            key: proto.AnalyzerPropertyDependencies(urns=sorted(urns))
            for key, urns in each.property_dependencies.items()
        },
    )


def as_struct(values: Mapping[str, Any]) -> Struct:
    return json_format.ParseDict(_wire(values), Struct())


def _wire(value: Any) -> Any:
    match value:
        case UnknownValue():
            return UNKNOWN_STRING_VALUE
        case SecretValue(value=inside):
            return {SPECIAL_SIG_KEY: SPECIAL_SECRET_SIG, "value": _wire(inside)}
        case dict():
            return {key: _wire(item) for key, item in value.items()}
        case list():
            return [_wire(item) for item in value]
    return value


def nothing(each: Registration) -> Mapping[str, Any]:
    return {}


def as_asked(each: Registration) -> Mapping[str, Any]:
    return each.outputs


def dirt(each: Registration) -> Mapping[str, Any]:
    """Return provider outputs in which every value that a rule checks is bad."""
    return {
        "member": AGENT,
        "role": "roles/owner",
        "permissions": ["iam.serviceAccountKeys.create"],
        "expirationPolicy": {"ttl": "86400s"},
        "messageRetentionDuration": "600s" if "dead" in each.name else "700s",
        "deadLetterPolicy": {},
        "topic": "projects/p/topics/t",
        "networkInterfaces": [{"accessConfigs": [{"natIp": "1.2.3.4"}]}],
        "sourceRanges": ["0.0.0.0/0"],
        "labels": {},
        "metadata": {"name": "other", "namespace": "another"},
        "region": "us-east1",
        "spec": {"storageClassName": "standard", "resources": {"requests": {"storage": "900Ti"}}},
        "subjects": [{"name": "system:authenticated"}],
        "service": "elsewhere.googleapis.com",
    }


@pytest.fixture(scope="module")
def pack() -> Iterator[Pack]:
    running = Pack()
    yield running
    running.stop()


def test_resource_of_the_engine_becomes_a_registration() -> None:
    component = shown("runtime:queue:Queue", "tasks", {})
    topic = shown(TOPIC, "tasks-topic", {"name": "t"}, parent=component, protect=True)

    assert as_registration(
        shown(
            "gcp:pubsub/subscription:Subscription",
            "tasks-sub",
            {"topic": UNKNOWN_STRING_VALUE, "retain": 3.0, "labels": {"a": "b"}, "list": [{"x": UNKNOWN_OBJECT_VALUE}]},
            parent=component,
            ignore_changes=["labels"],
            provider=PolicyProviderResource("pulumi:providers:gcp", {}, URN.format("pulumi:providers:gcp", "g"), "g"),
            dependencies=[topic],
            property_dependencies={"topic": [topic]},
        )
    ) == Registration(
        urn=URN.format("gcp:pubsub/subscription:Subscription", "tasks-sub"),
        type="gcp:pubsub/subscription:Subscription",
        name="tasks-sub",
        inputs={"topic": UNKNOWN, "retain": 3.0, "labels": {"a": "b"}, "list": [{"x": UNKNOWN}]},
        parent=component.urn,
        provider=URN.format("pulumi:providers:gcp", "g") + "::-",
        ignore_changes=("labels",),
        dependencies=frozenset({topic.urn}),
        property_dependencies={"topic": frozenset({topic.urn})},
    )
    assert as_registration(topic, {"name": UNKNOWN}).inputs == {"name": UNKNOWN}
    assert as_registration(component).custom is False
    assert as_registration(topic).protect is True


def test_pack_has_every_rule_and_each_is_mandatory() -> None:
    reader, *packed = policies()

    assert (reader.name, type(reader)) == (READER, ResourceValidationPolicy)
    assert [each.name for each in packed] == list(RULES)
    assert {each.enforcement_level for each in packed} == {EnforcementLevel.MANDATORY}
    assert {type(each) for each in packed} == {StackValidationPolicy}


@pytest.mark.parametrize("name", RULES)
def test_description_of_every_rule_is_a_sentence_of_its_own(name: str) -> None:
    text = describe(name, RULES[name])

    assert len(text) > 15
    assert text != name.replace("-", " ")
    assert len({describe(each, RULES[each]) for each in RULES}) == len(RULES)


# The engine's view of this resource lacks the mark for secret values, which the rule needs.
SEEN = [case for case in BROKEN if case[2] != [("lab-t", "has a secret value in `labels.x`")]]
DAYS: list[tuple[str, Answers]] = [(NEW, as_asked), (THERE, as_asked), (THERE, dirt), (THERE, nothing)]


@pytest.mark.parametrize(("rule", "program"), KEPT, ids=[rule for rule, _ in KEPT])
def test_policy_judges_what_the_program_asks_for_whatever_the_provider_answers(
    pack: Pack, rule: str, program: Program
) -> None:
    found = [pack.judge(run(program, day=day), answers, rule=rule) for day, answers in DAYS]

    assert found == [[]] * len(DAYS)


@pytest.mark.parametrize(("rule", "program", "expected"), SEEN, ids=[rule for rule, _, _ in SEEN])
def test_policy_reports_what_the_rule_finds_whatever_the_provider_answers(
    pack: Pack, rule: str, program: Program, expected: list[tuple[str, str]]
) -> None:
    found = [pack.judge(run(program, day=day), answers, rule=rule) for day, answers in DAYS]

    assert found == [[(rule, *each) for each in expected]] * len(DAYS)


def test_resource_that_the_program_left_to_the_stack_is_judged_by_its_state(pack: Pack) -> None:
    def program() -> None:
        lab = Lab("runtime:test:Left")
        lab.bucket()

    recording = record(program)
    [bucket] = recording.of_type("gcp:storage/bucket:Bucket")
    opened = {**bucket.inputs, "publicAccessPrevention": "inherited"}

    found = pack.judge(recording, lambda each: opened if each is bucket else {}, registered=False, rule="buckets")

    assert found == [("buckets", "lab-bucket", "could be made public")]


def test_resource_that_is_left_for_a_later_run_is_judged_by_that_one(pack: Pack) -> None:
    recording = run(lambda lab: gcp.pubsub.Topic("lab-t", name="t", labels={}, opts=lab.opts()) and None)
    left = replace(recording, resources=tuple(replace(each, inputs={}) for each in recording.resources))

    assert pack.judge(left, nothing) == []
    assert {rule for rule, _, _ in pack.judge(left, lambda each: {"id": "1"} if each.custom else {})} >= {"labels"}
    assert {rule for rule, _, _ in pack.judge(recording, nothing)} == {"labels", "api-first"}


def test_value_that_is_marked_as_secret_is_judged_like_any_other(pack: Pack) -> None:
    recording = run(lambda lab: lab.project_grant(pulumi.Output.secret("roles/owner")))

    found = pack.judge(recording, nothing, rule="project-grants")

    assert found == [("project-grants", "lab-grant", "grants `roles/owner` on the whole project")]


def test_program_that_breaks_one_rule_is_reported_by_that_policy_alone(pack: Pack) -> None:
    recording = run(lambda lab: lab.topic("tasks") and None)

    assert {each.rule for each in apply_rules(recording.resources)} == {"api-first"}
    assert {rule for rule, _, _ in pack.judge(recording, nothing)} == {"api-first"}


def test_bounds_in_the_engine_are_those_of_the_stack() -> None:
    config = {
        "pulumi:disable-default-providers": '["*"]',
        "research-runtime:project": "my-lab-dev",
        "research-runtime:region": "us-central1",
        "research-runtime:queues": '{"default": {}}',
        "research-runtime:protect": "false",
    }

    assert stack_bounds({"PULUMI_STACK": "dev", "PULUMI_CONFIG": json.dumps(config)}) == StackBounds(
        protect=False,
        regions=frozenset({"us-central1"}),
        storage_classes=frozenset(),
        project="my-lab-dev",
        members=frozenset(),
        cidrs=frozenset(),
        subjects=frozenset(),
        repositories=frozenset(),
        buckets=frozenset(),
        issuers=frozenset(),
        keys=frozenset(),
        image_projects=BOOT_IMAGE_PROJECTS | {"my-lab-dev"},
    )


@pytest.mark.parametrize("config", ["", "{}", "not json", '{"research-runtime:quues": "{}"}'])
def test_bounds_of_settings_that_the_program_refuses_anyway_are_none(config: str) -> None:
    assert stack_bounds({"PULUMI_STACK": "dev", "PULUMI_CONFIG": config}) == StackBounds()


def test_pack_file_names_the_virtual_environment_of_the_project() -> None:
    described = yaml.safe_load((PACK / "PulumiPolicy.yaml").read_text())
    virtualenv = described["runtime"]["options"]["virtualenv"]

    assert described["runtime"]["name"] == "python"
    assert (PACK / described["main"]).is_file()
    assert (PACK / virtualenv).resolve() == (PACK.parents[2] / ".venv").resolve()


def test_as_registration_without_defaults_that_the_provider_lists_has_the_programs_inputs() -> None:
    inputs = {
        "__defaults": ["disabled"],
        "oidc": {"__defaults": [], "issuerUri": "i"},
        "metadata": [{"__defaults": []}],
    }

    found = as_registration(shown(TOPIC, "t", inputs))

    assert found.inputs == {"oidc": {"issuerUri": "i"}, "metadata": [{}]}
