"""Steps between two recordings: the engine's rules one by one, real stacks with one changed setting, and baselines."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from infra.check.command import render_steps
from infra.check.plan import REPLACING, Action, PlanStep, changes, differing_paths, path_parts, plan
from infra.check.recording import (
    UNKNOWN,
    Recording,
    Registration,
    SecretValue,
    UnknownValue,
    decode_recording,
    encode_recording,
)
from infra.check.validate import fields_of, find_args_class
from runtime.schema import join
from tests.engine.google_plugin import KINDS, GooglePlugin
from tests.infra.conftest import ROOT, STACKS, Project, recorded

BASELINES = ROOT / "tests/golden/infra/baselines"
TOPIC = "gcp:pubsub/topic:Topic"
SUBSCRIPTION = "gcp:pubsub/subscription:Subscription"
PROVIDER = "pulumi:providers:gcp"


def urn(type_: str, name: str) -> str:
    return f"urn:pulumi:dev::research-runtime::{type_}::{name}"


def sample(type_: str = TOPIC, name: str = "t", inputs: dict[str, Any] | None = None, **options: Any) -> Registration:
    return Registration(urn=urn(type_, name), type=type_, name=name, inputs=inputs or {}, **options)


def recording_of(*resources: Registration) -> Recording:
    return Recording(stack="dev", resources=resources, outputs={})


def step(old: Registration | None, new: Registration | None) -> PlanStep:
    before, now = (recording_of(*([each] if each else [])) for each in (old, new))
    (only,) = plan(before, now)
    return only


def test_plan_same_inputs_is_same() -> None:
    topic = sample(inputs={"name": "t", "labels": {"a": UNKNOWN}})
    assert step(topic, dataclasses.replace(topic, protect=True)) == PlanStep(
        action=Action.SAME, urn=topic.urn, type=TOPIC
    )


def test_plan_new_resource_is_created_and_one_with_an_id_is_imported() -> None:
    assert step(None, sample()).action is Action.CREATE
    assert step(None, sample(import_id="projects/p/topics/t")).action is Action.IMPORT


def test_plan_changed_input_is_updated_in_place() -> None:
    old, new = sample(inputs={"labels": {"a": "1", "b": "2"}}), sample(inputs={"labels": {"a": "1", "b": "3"}})
    assert step(old, new) == PlanStep(action=Action.UPDATE, urn=old.urn, type=TOPIC, changed=("labels.b",))


def test_plan_changed_name_is_replaced() -> None:
    old, new = sample(inputs={"name": "a"}), sample(inputs={"name": "b"}, delete_before_replace=True)
    assert step(old, new) == PlanStep(
        action=Action.REPLACE, urn=old.urn, type=TOPIC, changed=("name",), replacing=("name",), delete_first=True
    )


def test_plan_any_change_of_a_grant_replaces_it() -> None:
    type_ = "gcp:pubsub/topicIAMMember:TopicIAMMember"
    old, new = sample(type_, inputs={"role": "roles/a"}), sample(type_, inputs={"role": "roles/b"})
    assert step(old, new).replacing == ("role",)


def test_plan_dropped_resource_is_deleted_and_retained_one_forgotten() -> None:
    assert step(sample(), None).action is Action.DELETE
    assert step(sample(retain_on_delete=True), None).action is Action.FORGET


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ({"protect": True}, None, "it is protected"),
        ({"protect": True, "retain_on_delete": True}, None, "it is protected"),
        ({"protect": True}, {"protect": True}, "it is protected"),
        ({"protect": True}, {"protect": False}, None),
        ({"protect": False}, {"protect": True}, None),
        ({"inputs": {"name": "a", "deletionPolicy": "PREVENT"}}, None, "its `deletionPolicy` is PREVENT"),
        ({"inputs": {"name": "a", "deletionProtection": True}}, {}, "its `deletionProtection` is on"),
        (
            {"import_id": "projects/p/topics/a"},
            {"import_id": "projects/p/topics/a"},
            "it is still marked as imported, and an import cannot be replaced",
        ),
        (
            {"retain_on_delete": True, "outputs": {"id": "projects/p/topics/t"}},
            {"retain_on_delete": True, "outputs": {"id": "projects/p/topics/t"}},
            "the old one stays where it is, and has the name",
        ),
        (
            {"retain_on_delete": True, "outputs": {"id": "projects/p/topics/t"}},
            {"retain_on_delete": True, "outputs": {"id": "projects/p/topics/u"}},
            None,
        ),
        ({}, {}, None),
    ],
)
def test_plan_protected_resource_that_would_go_is_refused(
    old: dict[str, Any], new: dict[str, Any] | None, reason: str | None
) -> None:
    before = sample(**{"inputs": {"name": "a"}, **old})
    now = None if new is None else sample(**{"inputs": {"name": "b"}, **new})
    assert step(before, now).blocked == reason


def test_plan_ignored_changes_are_not_seen_at_any_depth() -> None:
    old = sample(inputs={"labels": {"ray.io/status": "a", "b": "1"}, "tags": [{"x": 1}, {"x": 2}]})
    new = sample(
        inputs={"labels": {"ray.io/status": "z", "b": "2"}, "tags": [{"x": 3}, {"x": 4}]},
        ignore_changes=('labels["ray.io/status"]', "tags[*].x"),
    )
    assert step(old, new).changed == ("labels.b",)


def test_plan_replace_on_changes_makes_an_update_a_replacement() -> None:
    old, new = (
        sample(inputs={"labels": {"a": "1"}}),
        sample(inputs={"labels": {"a": "2"}}, replace_on_changes=("labels",)),
    )
    assert step(old, new).replacing == ("labels.a",)


def test_plan_alias_finds_what_was_renamed() -> None:
    old, new = sample(name="old"), sample(name="new", aliases=(urn(TOPIC, "old"),))
    assert step(old, new) == PlanStep(action=Action.SAME, urn=new.urn, type=TOPIC, was=old.urn)


def test_plan_rename_without_alias_makes_one_and_deletes_the_other() -> None:
    steps = plan(recording_of(sample(name="old")), recording_of(sample(name="new")))
    assert [(each.action, each.name) for each in steps] == [(Action.CREATE, "new"), (Action.DELETE, "old")]


def test_plan_import_of_what_the_state_has_is_same_and_of_another_is_imported() -> None:
    old = sample(outputs={"id": "projects/p/topics/t"})
    assert step(old, sample(import_id="projects/p/topics/t")).action is Action.SAME
    assert step(old, sample(import_id="projects/p/topics/u")).action is Action.IMPORT
    assert step(sample(outputs={"id": UNKNOWN}), sample(import_id="projects/p/topics/t")).action is Action.SAME


def test_plan_replacement_takes_along_what_hangs_on_it() -> None:
    topic = sample(inputs={"name": "a"})
    depends = {"property_dependencies": {"topic": frozenset({topic.urn}), "labels": frozenset({topic.urn})}}
    subscription = sample(SUBSCRIPTION, "s", {"topic": "x", "labels": {}}, **depends)
    only_labels = sample(SUBSCRIPTION, "l", {"topic": "x"}, property_dependencies={"labels": frozenset({topic.urn})})
    old = recording_of(topic, subscription, only_labels)
    new = recording_of(dataclasses.replace(topic, inputs={"name": "b"}), subscription, only_labels)
    assert [(each.action, each.replacing) for each in plan(old, new)] == [
        (Action.REPLACE, ("name",)),
        (Action.REPLACE, ("topic",)),
        (Action.SAME, ()),
    ]


def test_plan_another_provider_replaces_and_a_renamed_one_does_not() -> None:
    first, second = sample(PROVIDER, "first"), sample(PROVIDER, "second")
    renamed = dataclasses.replace(second, aliases=(first.urn,))
    topic = sample(provider=f"{first.urn}::id-1")
    moved = dataclasses.replace(topic, provider=f"{second.urn}::id-2")
    old = recording_of(first, topic)
    assert plan(old, recording_of(first, second, moved))[2].replacing == ("provider",)
    assert changes(plan(old, recording_of(renamed, moved))) == []
    assert changes(plan(old, recording_of(first, dataclasses.replace(topic, provider=f"{first.urn}::id-9")))) == []


def test_plan_deletes_last_and_dependents_first() -> None:
    old = recording_of(sample(name="a"), sample(name="b"), sample(name="c"))
    new = recording_of(sample(name="c"), sample(name="d"))
    assert [(each.action, each.name) for each in plan(old, new)] == [
        (Action.SAME, "c"),
        (Action.CREATE, "d"),
        (Action.DELETE, "b"),
        (Action.DELETE, "a"),
    ]


@pytest.mark.parametrize(
    ("old", "new", "paths"),
    [
        ({"a": 1}, {"a": 1}, []),
        ({"a": 1}, {"a": True}, ["a"]),
        ({"a": None}, {}, []),
        ({"a": {"b": [1, 2]}}, {"a": {"b": [1, 3, 4]}}, ["a.b[1]", "a.b[2]"]),
        ({"a": [1]}, {"a": {"0": 1}}, ["a"]),
        ({"a": "x"}, {"a": UNKNOWN}, ["a"]),
        ({"a": UNKNOWN}, {"a": UNKNOWN}, []),
        ({"a": SecretValue("x")}, {"a": SecretValue("x")}, []),
        ({"a": SecretValue("x")}, {"a": "x"}, ["a"]),
        ({"a": {"b.c": 1}}, {"a": {"b.c": 2}}, ['a["b.c"]']),
    ],
)
def test_differing_paths_are_those_of_the_leaves(old: dict[str, Any], new: dict[str, Any], paths: list[str]) -> None:
    assert differing_paths(old, new) == paths


def test_path_parts_reads_dots_brackets_and_quotes() -> None:
    assert path_parts('labels["a.b"].c[0][*]') == ("labels", "a.b", "c", "0", "*")


@pytest.mark.parametrize(
    ("before", "now", "action"),
    [
        ("10.64.16.0/20", "10.64.0.0/19", Action.UPDATE),
        ("10.64.16.0/20", "10.64.16.0/21", Action.REPLACE),
        ("10.64.16.0/20", "10.65.0.0/20", Action.REPLACE),
        ("10.64.16.0/20", "fd00::/64", Action.REPLACE),
    ],
)
def test_plan_subnet_grows_in_place_and_moves_by_replacement(before: str, now: str, action: Action) -> None:
    type_ = "gcp:compute/subnetwork:Subnetwork"
    assert (
        step(sample(type_, inputs={"ipCidrRange": before}), sample(type_, inputs={"ipCidrRange": now})).action is action
    )


@pytest.mark.parametrize(("before", "now", "reason"), [(200, 300, None), (300, 200, "Google shrinks no disk")])
def test_plan_boot_disk_grows_in_place_and_never_shrinks(before: int, now: int, reason: str | None) -> None:
    old, new = (
        sample("gcp:compute/instance:Instance", inputs={"bootDisk": {"initializeParams": {"size": size}}})
        for size in (before, now)
    )

    found = step(old, new)

    assert (found.action, found.blocked) == (Action.UPDATE, reason)


def test_replacing_table_names_types_and_inputs_that_the_wheels_have() -> None:
    """A misspelt path in the table would never match."""
    for type_, paths in REPLACING.items():
        assert {path_parts(path)[0] for path in paths} <= set(fields_of(find_args_class(type_))), type_


def test_replacing_table_covers_every_type_of_the_stack(recording: Recording) -> None:
    in_place = {"kubernetes", PROVIDER}
    missing = {
        each.type
        for each in recording.resources
        if each.custom and each.type not in REPLACING and not each.type.endswith(("IAMMember", "IamMember"))
        and each.type.split(":")[0] not in in_place and each.type not in in_place
    }  # fmt: skip
    assert missing == set()


def test_plan_stack_recorded_twice_is_all_same(stack: str, project: Project) -> None:
    project.copy(stack)
    steps = plan(recorded(stack), project.record(stack))
    assert changes(steps) == []
    assert len(steps) == len(recorded(stack).resources)


def test_recording_in_a_fresh_process_with_another_hash_seed_is_the_same() -> None:
    """The order of sets and hashes must not matter: a program that depended on it would show changes at every `up`."""
    program = (
        "import sys; from tests.infra.conftest import STACKS, recorded; from infra.check.recording import encode_recording\n"
        "sys.stdout.write(''.join(encode_recording(recorded(stack)) for stack in STACKS))"
    )
    another = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    recorded_there = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": another},
        capture_output=True,
        check=True,
        text=True,
    ).stdout

    assert recorded_there == "".join(encode_recording(recorded(stack)) for stack in STACKS)
    assert len(recorded_there) > 100_000


def _queue(config: dict[str, Any], **knobs: Any) -> None:
    config["queues"]["default"] = knobs


def _encrypt(config: dict[str, Any], key: str) -> None:
    config.update(kms_key=key)
    config["secrets"]["hf-token"].update(regions=["us-central1"])


KNOBS: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
    "ack-deadline": ("dev", lambda config: _queue(config, ack_deadline_s=120)),
    "delivery-attempts": ("dev", lambda config: _queue(config, max_delivery_attempts=50)),
    "second-queue": ("dev", lambda config: config["queues"].update(second={})),
    "no-secrets": ("dev", lambda config: config.pop("secrets")),
    "other-region": ("dev", lambda config: config.update(region="us-east1", records={"location": "us-east1"})),
    "kms-key": ("dev", lambda config: _encrypt(config, "projects/my-lab-dev/locations/us-central1/keyRings/r/cryptoKeys/k")),
    "team-label": ("dev", lambda config: config.update(labels={"team": "ml"})),
    "protect-on": ("dev", lambda config: config.update(protect=True)),
    "pool-maximum": ("marin-us-west4", lambda config: config["heads"]["main"]["pools"]["v5e"].update(max=512)),
    "head-machine": ("marin-us-west4", lambda config: config["heads"]["main"].update(machine_type="n2-standard-16")),
    "head-family": ("marin-us-west4", lambda config: config["heads"]["main"].update(machine_type="c4-standard-8")),
    "head-image": (
        "marin-us-west4",
        lambda config: config["heads"]["main"].update(image=config["heads"]["main"]["image"].replace("0" * 64, "1" * 64)),
    ),
    "head-disk": ("marin-us-west4", lambda config: config["heads"]["main"].update(disk_gb=300)),
    "subnet-grows": ("marin-us-west4", lambda config: config["network"].update(cidr="10.64.0.0/19")),
    "subnet-moves": ("marin-us-west4", lambda config: config["network"].update(cidr="10.65.0.0/20")),
    "one-more-operator": ("marin-us-west4", lambda config: config["access"]["operators"].append("user:ada@example.com")),
    "project-grants-left": ("skylight", lambda config: config["access"].update(project_grants=False)),
    "protect-off": ("marin-us-west4", lambda config: config.update(protect=False)),
    "adopt": ("marin-us-west4", lambda config: config.update(adopt=True)),
    "no-records": ("marin-us-west4", lambda config: config.pop("records")),
    "quota": ("phoebe", lambda config: config["kubernetes"]["phoebe"]["namespaces"]["l2r"]["quota"].update(pods="300")),
    "other-cluster": ("phoebe", lambda config: config["kubernetes"]["phoebe"].update(cluster_identifier="other")),
    "other-context": ("phoebe", lambda config: config["kubernetes"]["phoebe"].update(context="other")),
    "image-clean-up": ("skylight", lambda config: config["registries"]["images"].update(keep_newest=8)),
}  # fmt: skip


@pytest.mark.parametrize("knob", sorted(KNOBS))
@pytest.mark.daily(12)
def test_plan_one_knob_takes_exactly_its_steps(knob: str, project: Project, golden: Callable[[str, str], None]) -> None:
    stack, change = KNOBS[knob]
    project.copy(stack, change)
    golden(f"infra/knobs/{knob}.txt", render_steps(plan(recorded(stack), project.record(stack)), stack))


def test_plan_and_the_plugin_of_the_engines_tests_replace_for_the_same_inputs(stack: str) -> None:
    """Each has its own table, and a row that one lacks is a head that goes away unannounced."""
    plugin, compared = GooglePlugin(cast(Any, None)), 0
    for each in recorded(stack).resources:
        if each.type not in KINDS or each.type in SAME_IN_BOTH:
            continue
        for path, inputs in with_one_other(each.inputs):
            told = step(each, dataclasses.replace(each, inputs=inputs, replace_on_changes=())).action
            assert (told is Action.REPLACE) is plugin.replaces(each.type, path, None, "another"), (each.type, path)
            compared += 1
    assert compared > 20 or stack == "phoebe"


SAME_IN_BOTH = {"gcp:monitoring/notificationChannel:NotificationChannel", "gcp:compute/subnetwork:Subnetwork"}
"""Types whose inputs replace or not by their values."""


def with_one_other(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each path with a known value, and a copy of everything with another value there."""
    if isinstance(value, UnknownValue | SecretValue):
        return
    if not isinstance(value, Mapping | list):
        yield path, "another"
        return
    for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
        for inner, changed in with_one_other(item, join(path, key) if isinstance(key, str) else f"{path}[{key}]"):
            copy: Any = dict(value) if isinstance(value, Mapping) else list(value)
            copy[key] = changed
            yield inner, copy


def test_plan_upgrade_from_the_baseline_takes_nothing_protected_away(stack: str) -> None:
    """The last release made these baselines; `check --save` writes them at a release."""
    baseline = decode_recording((BASELINES / f"{stack}.json").read_text(encoding="utf-8"))
    assert lost(baseline, recorded(stack)) == []
    assert any(each.action is Action.SAME for each in plan(baseline, recorded(stack)))


def lost(before: Recording, now: Recording) -> list[tuple[Action, str]]:
    """Return the steps that would remove protected resources, or any resource that holds work."""
    gone = (Action.REPLACE, Action.DELETE, Action.FORGET)
    holds_work = {TOPIC, SUBSCRIPTION, "gcp:secretmanager/secret:Secret", "gcp:storage/bucket:Bucket",
                  "gcp:artifactregistry/repository:Repository", "gcp:serviceaccount/account:Account"}  # fmt: skip
    return [
        (each.action, each.urn)
        for each in plan(before, now)
        if each.action in gone and (each.blocked or each.type in holds_work)
    ]


def test_lost_renamed_component_without_alias_is_found() -> None:
    """Known-bad input for the upgrade test: the effect of a careless rename on a stack that is up."""
    baseline = decode_recording((BASELINES / "dev.json").read_text(encoding="utf-8"))
    text = encode_recording(recorded("dev"))
    renamed = decode_recording(text.replace("default-queue-topic", "main-queue-topic"))
    assert (Action.DELETE, next(each.urn for each in baseline.resources if each.name == "default-queue-topic")) in lost(
        baseline, renamed
    )


def test_baselines_are_those_of_the_stacks_there_are(tmp_path: Path) -> None:
    assert sorted(each.stem for each in BASELINES.glob("*.json")) == STACKS
