"""The pack: what the engine shows becomes what the rules know, and every rule stops an `up`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from pulumi_policy import (
    EnforcementLevel,
    PolicyCustomTimeouts,
    PolicyProviderResource,
    PolicyResource,
    PolicyResourceOptions,
    StackValidationArgs,
    StackValidationPolicy,
)
from pulumi_policy.proxy import UNKNOWN_OBJECT_VALUE, UNKNOWN_STRING_VALUE, unknown_checking_proxy

from infra.policy.packed import as_registration, describe, policies, stack_bounds
from infra.policy.rules import RULES, Bounds, apply_rules
from infra.recording import UNKNOWN, Recording, Registration, Unknown, record
from tests.infra.test_policy_rules import BROKEN, Lab

PACK = Path(__file__).parents[2] / "infra" / "policy" / "pack"
URN = "urn:pulumi:dev::research-runtime::{}::{}"
TOPIC = "gcp:pubsub/topic:Topic"


def shown(type_: str, name: str, inputs: dict[str, Any], **others: Any) -> PolicyResource:
    """A resource as the library of the engine hands it to a policy."""
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


def shown_all(recording: Recording) -> list[PolicyResource]:
    """What the engine would show of a recording: no mark of a secret, and an unknown in its own notation."""
    made: dict[str, PolicyResource] = {}
    for each in recording.resources:
        provider = each.provider.rpartition("::")[0] if each.provider else None
        dependencies = [made[urn] for urn in sorted(each.dependencies)]
        made[each.urn] = shown(
            each.type,
            each.name,
            _wire(each.inputs),
            urn=each.urn,
            protect=each.protect,
            provider=PolicyProviderResource("pulumi:providers:gcp", {}, provider, "p") if provider else None,
            parent=made.get(each.parent or ""),
            dependencies=dependencies,
            property_dependencies={
                key: [made[urn] for urn in sorted(urns)] for key, urns in each.property_dependencies.items()
            },
        )
    return list(made.values())


def _wire(value: Any) -> Any:
    if isinstance(value, Unknown):
        return UNKNOWN_STRING_VALUE
    if isinstance(value, dict):
        return {key: _wire(item) for key, item in value.items()}
    return [_wire(item) for item in value] if isinstance(value, list) else value


def reported(policy: StackValidationPolicy, resources: list[PolicyResource]) -> list[tuple[str, str | None]]:
    found: list[tuple[str, str | None]] = []
    policy.validate(StackValidationArgs(resources), lambda message, urn=None: found.append((message, urn)))
    return found


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
    assert as_registration(component).custom is False
    assert as_registration(topic).protect is True


def test_pack_has_every_rule_and_each_is_mandatory() -> None:
    packed = policies()

    assert [each.name for each in packed] == list(RULES)
    assert {each.enforcement_level for each in packed} == {EnforcementLevel.MANDATORY}
    assert {type(each) for each in packed} == {StackValidationPolicy}


@pytest.mark.parametrize("name", RULES)
def test_description_of_every_rule_is_a_sentence_of_its_own(name: str) -> None:
    text = describe(name, RULES[name])

    assert len(text) > 15
    assert text != name.replace("-", " ")
    assert len({describe(each, RULES[each]) for each in RULES}) == len(RULES)


# Of one the engine's view lacks what the rule goes by: that a value is marked as secret.
SEEN = [case for case in BROKEN if case[2] != [("lab-t", "has a secret value in `labels.x`")]]


@pytest.mark.parametrize(("rule", "program", "expected"), SEEN, ids=[rule for rule, _, _ in SEEN])
def test_policy_reports_what_the_rule_finds(
    rule: str, program: Any, expected: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PULUMI_CONFIG", raising=False)
    recording = record(lambda: program(Lab()))
    policy = next(each for each in policies() if each.name == rule)
    assert isinstance(policy, StackValidationPolicy)

    seen = [(urn, message.partition(";")[0]) for message, urn in reported(policy, shown_all(recording))]
    assert seen == [(recording_urn(recording, name), message) for name, message in expected]


def recording_urn(recording: Recording, name: str) -> str:
    (urn,) = (each.urn for each in recording.resources if each.name == name and each.custom)
    return urn


def test_program_that_breaks_one_rule_is_reported_by_that_policy_alone() -> None:
    def program() -> None:
        lab = Lab()
        lab.topic("tasks")

    resources = shown_all(record(program))

    assert {each.rule for each in apply_rules([as_registration(each) for each in resources])} == {"api-first"}
    assert {each.name for each in policies() if reported(each, resources)} == {"api-first"}  # type: ignore[arg-type]


def test_bounds_in_the_engine_are_those_of_the_stack() -> None:
    config = {
        "pulumi:disable-default-providers": '["*"]',
        "research-runtime:project": "my-lab-dev",
        "research-runtime:region": "us-central1",
        "research-runtime:queues": '{"default": {}}',
        "research-runtime:protect": "false",
    }

    assert stack_bounds({"PULUMI_STACK": "dev", "PULUMI_CONFIG": json.dumps(config)}) == Bounds(
        protect=False, regions=frozenset({"us-central1"}), storage_classes=frozenset()
    )


@pytest.mark.parametrize("config", ["", "{}", "not json", '{"research-runtime:quues": "{}"}'])
def test_bounds_of_settings_that_the_program_refuses_anyway_are_none(config: str) -> None:
    assert stack_bounds({"PULUMI_STACK": "dev", "PULUMI_CONFIG": config}) == Bounds()


def test_pack_file_names_the_virtual_environment_of_the_project() -> None:
    described = yaml.safe_load((PACK / "PulumiPolicy.yaml").read_text())
    virtualenv = described["runtime"]["options"]["virtualenv"]

    assert described["runtime"]["name"] == "python"
    assert (PACK / described["main"]).is_file()
    assert (PACK / virtualenv).resolve() == (PACK.parents[2] / ".venv").resolve()
