"""The whole program on every checked-in stack file: its resources, its exports, and its limits."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pulumi
import pytest

from infra.check.check import leaks_in, shown
from infra.check.recording import UNKNOWN, UNKNOWN_MARK, Recording, Registration, SecretValue, UnknownValue, record
from infra.gcp.outputs import compute
from infra.policy.rules import apply_rules, bounds_of
from infra.settings.files import load_stack_config
from infra.settings.read import settings_from
from runtime.outputs import (
    OtherQueueOutput,
    SqliteQueueOutput,
    StackOutputs,
    encode_outputs,
    parse_outputs,
)
from tests.infra.conftest import ROOT, STACKS, Project, recorded


def test_stack_makes_exactly_these_resources(
    stack: str, recording: Recording, golden: Callable[[str, str], None]
) -> None:
    """A changed URN replaces the resource unless an alias maps it."""
    golden(f"infra/urns/{stack}.txt", "".join(f"{each.urn}\n" for each in recording.resources))


def test_stack_exports_exactly_this_contract(
    stack: str, recording: Recording, golden: Callable[[str, str], None]
) -> None:
    text = json.dumps(shown(recording.outputs["contract"]), indent=2, sort_keys=True, ensure_ascii=False)
    golden(f"infra/contract/{stack}.json", text + "\n")


def test_stack_exports_the_contract_alone(recording: Recording) -> None:
    assert list(recording.outputs) == ["contract"]


def test_contract_of_stack_with_its_unknowns_filled_goes_round(recording: Recording) -> None:
    filled = _filled(recording.outputs["contract"])
    outputs = parse_outputs(filled)
    assert parse_outputs(json.loads(encode_outputs(outputs))) == outputs
    assert json.loads(encode_outputs(outputs)) == filled


def _filled(value: Any) -> Any:
    if isinstance(value, UnknownValue):
        return "10.64.0.2"
    if isinstance(value, Mapping):
        return {key: _filled(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_filled(item) for item in value]
    return value


def test_contract_of_dev_knows_every_value_before_up() -> None:
    """Ensures that a preview shows every value that a worker will read."""
    assert UNKNOWN_MARK not in json.dumps(shown(recorded("dev").outputs))


def test_every_field_of_the_contract_is_exported_by_some_stack(project: Project) -> None:
    # The setting with a contract field that no checked-in stack has: namespaces that share GPUs.
    def share_slots(config: dict[str, Any]) -> None:
        config["kubernetes"]["phoebe"]["slot_namespace"] = "l2r"

    project.copy("phoebe", share_slots)
    recordings = [*map(recorded, STACKS), project.record("phoebe")]
    assert missing_fields([parse_outputs(_filled(each.outputs["contract"])) for each in recordings]) == set()


def test_missing_fields_of_stacks_without_queues_are_found() -> None:
    """Known-bad input: this answer is how a field that no stack exports is noticed."""
    whole = parse_outputs(_filled(recorded("dev").outputs["contract"]))
    assert "StackOutputs.queues" in missing_fields([replace(whole, queues={})])


NOT_OF_A_STACK = (SqliteQueueOutput, OtherQueueOutput)
"""Queues of the built-in local stack, and of a newer release."""


def missing_fields(exported: list[StackOutputs]) -> set[str]:
    """Return the fields of the contract, at any depth, without a value in any of `exported`."""
    given = {name for each in exported for name in _given(each)}
    return set(_all_fields(StackOutputs)) - given


def _given(value: Any) -> Iterator[str]:
    if is_dataclass(value):
        for each in fields(value):
            item = getattr(value, each.name)
            if item is not None and item != {}:
                yield f"{type(value).__name__}.{each.name}"
                yield from _given(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _given(item)


def _all_fields(kind: type) -> Iterator[str]:
    for name, hint in typing.get_type_hints(kind).items():
        yield f"{kind.__name__}.{name}"
        for inner in _records_in(hint):
            yield from _all_fields(inner)


def _records_in(hint: Any) -> Iterator[type]:
    if isinstance(hint, type) and is_dataclass(hint):
        if hint not in NOT_OF_A_STACK:
            yield hint
    else:
        for each in typing.get_args(hint):
            yield from _records_in(each)


def test_outputs_of_stack_hold_no_secret_and_nothing_named_like_one(recording: Recording) -> None:
    assert list(leaks_in(recording.outputs)) == []
    assert list(leaks_in(recording.outputs | {"contract_token": "x", "s": SecretValue("y")})) != []


def test_no_input_of_stack_is_a_secret_value(recording: Recording) -> None:
    """No value that needs hiding enters the program, so none enters the state."""
    assert [each.urn for each in recording.resources if _has_secret(each.inputs)] == []
    assert _has_secret({"a": [{"b": SecretValue("x")}]})


def _has_secret(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_has_secret(item) for item in value.values())
    if isinstance(value, list):
        return any(_has_secret(item) for item in value)
    return isinstance(value, SecretValue)


def test_policies_hold_for_stack(stack: str, recording: Recording) -> None:
    config = load_stack_config(ROOT / f"Pulumi.{stack}.yaml")
    bounds = bounds_of(settings_from(stack, config.values, config.secrets))
    assert apply_rules(recording.resources, bounds) == []


def test_every_resource_of_stack_has_an_explicit_provider(recording: Recording) -> None:
    """Default providers are disabled, and the real engine refuses a resource that needs one."""
    providers = {each.urn for each in recording.resources if each.type.startswith("pulumi:providers:")}
    others = [each for each in recording.resources if each.custom and each.urn not in providers]
    assert {(each.provider or "").rpartition("::")[0] for each in others} <= providers
    assert all(_package(each.type) == _package((each.provider or "").split("::")[2]) for each in others)


def _package(type_: str) -> str:
    return type_.removeprefix("pulumi:providers:").split(":")[0]


def test_every_child_of_stack_has_a_component_as_parent_and_its_name(recording: Recording) -> None:
    """A child without a parent is accepted silently and belongs to the stack, where its name could collide."""
    by_urn = {each.urn: each for each in recording.resources}
    for each in recording.resources:
        if not each.custom or each.type.startswith("pulumi:providers:"):
            continue
        parent = by_urn.get(each.parent or "")
        assert parent is not None, f"{each.urn} has no component as parent"
        assert not parent.custom
        assert each.name.startswith(f"{parent.name}-")


def test_every_component_of_stack_registers_outputs_or_has_none(recording: Recording) -> None:
    exporting = {"runtime:queue:Queue", "runtime:records:Records", "runtime:ray:RayHead", "runtime:secret:Secret",
                 "runtime:network:Network", "runtime:registry:Registry"}  # fmt: skip
    for each in recording.resources:
        if each.type in exporting:
            assert each.outputs, each.urn


def test_components_of_stack_have_types_of_ours(recording: Recording) -> None:
    """The type is part of every child's URN, so it must never change."""
    types = {each.type for each in recording.resources if not each.custom}
    assert types
    assert {each for each in types if not re.fullmatch("runtime:[a-z]+:[A-Z][A-Za-z]+", each)} == set()


def test_dependencies_of_stack_are_its_own_resources(recording: Recording) -> None:
    urns = {each.urn for each in recording.resources}
    assert {urn for each in recording.resources for urn in each.dependencies} <= urns


def test_explicit_names_of_stack_delete_before_they_replace(recording: Recording) -> None:
    """A new resource cannot be created beside an old one of the same name."""
    named = [each for each in recording.resources if each.type.startswith("gcp:") and _has_own_name(each)]
    assert [each.urn for each in named if not each.delete_before_replace] == []


def _has_own_name(each: Registration) -> bool:
    keys = {"name", "accountId", "secretId", "repositoryId", "roleId", "workloadIdentityPoolId"}
    return not each.type.endswith(("IAMMember", "IamMember")) and bool(keys & each.inputs.keys())


def test_recorded_for_up_makes_the_same_as_for_preview(stack: str, recording: Recording) -> None:
    """The program must not depend on whether the engine previews."""
    from infra.__main__ import run_program

    config = load_stack_config(ROOT / f"Pulumi.{stack}.yaml")
    for_up = record(run_program, stack=stack, config=config.values, compute=_as_after_up, preview=False)
    assert [each.urn for each in for_up.resources] == [each.urn for each in recording.resources]


def _as_after_up(type_: str, name: str, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Compute outputs as after creation, when every value is known."""
    found = dict(compute(type_, name, inputs))
    found.setdefault("id", UNKNOWN)
    return {key: _made_up(key, value) for key, value in found.items()}


def _made_up(key: str, value: Any) -> Any:
    if isinstance(value, UnknownValue):
        return "serviceAccount:agent@gcp-sa-x.iam.gserviceaccount.com" if key == "member" else f"made-{key}"
    if isinstance(value, Mapping):
        return {name: _made_up(name, item) for name, item in value.items()}
    if isinstance(value, list):
        return [_made_up(key, item) for item in value]
    return value


def test_main_file_runs_as_the_engine_runs_it(stack: str, recording: Recording) -> None:
    """The engine runs the folder `infra/` with runpy, under the name of a main program."""
    config = load_stack_config(ROOT / f"Pulumi.{stack}.yaml")
    ran = record(
        lambda: runpy.run_path(str(ROOT / "infra"), run_name="__main__") and None,
        stack=stack,
        config=config.values,
        compute=compute,
    )
    assert ran == recording


def test_main_file_with_wrong_settings_ends_with_the_engines_own_error() -> None:
    """The engine prints an error of this class without a traceback."""
    with pytest.raises(pulumi.RunError, match="the settings of stack `dev` cannot be used"):
        record(lambda: runpy.run_path(str(ROOT / "infra"), run_name="__main__") and None, stack="dev", config={})


def test_program_with_wrong_settings_makes_nothing(project: Project) -> None:
    from infra.settings.read import InvalidSettings

    project.copy("dev", lambda config: config.update(region="nowhere"))
    made: list[str] = []

    def compute_and_note(type_: str, name: str, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        made.append(name)
        return {}

    from infra.__main__ import run_program

    config = load_stack_config(project.folder / "Pulumi.dev.yaml")
    with pytest.raises(pulumi.RunError) as refused:
        record(run_program, stack="dev", config=config.values, compute=compute_and_note)
    assert isinstance(refused.value.__cause__, InvalidSettings)
    assert made == []


def test_importing_every_module_needs_no_config_and_calls_nobody() -> None:
    """Runs in a process without network, home, or any variable that names a project."""
    program = """
import pathlib, socket, sys
def refuse(*args, **kwargs): raise AssertionError("an import opened a connection")
socket.socket.connect = socket.create_connection = refuse
root = pathlib.Path("infra")
for file in sorted(root.rglob("*.py")):
    parts = file.with_suffix("").parts
    if "policy" in parts and file.stem in ("__main__", "pack"):
        continue
    __import__(".".join(parts))
print(len([name for name in sys.modules if name.startswith("infra.")]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "HOME": "/nonexistent"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) > 20


@pytest.mark.parametrize("name", STACKS)
def test_stack_file_says_what_it_is_for(name: str) -> None:
    lines = (ROOT / f"Pulumi.{name}.yaml").read_text(encoding="utf-8").splitlines()
    comment = [line for line in lines if line.startswith("# ")]
    assert lines[0] == comment[0]
    assert any("Change first:" in line for line in comment)
