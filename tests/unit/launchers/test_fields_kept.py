"""No field of a job without a launcher that keeps it."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from runtime.jobs.plan import Fidelity, FieldSupport
from runtime.jobs.spec import NOWHERE, InvalidSpec, parse_spec
from runtime.jobs.spec_fields import leaf_fields
from runtime.launchers.field_support import native, refused
from runtime.launchers.registry import get_launcher

OURS = ("kubernetes", "local", "ray", "slurm", "ssh")


def refused_everywhere(tables: Mapping[str, Mapping[str, FieldSupport]]) -> list[str]:
    return [
        name
        for name in leaf_fields()
        if all(name not in keeps or keeps[name].fidelity is Fidelity.REFUSED for keeps in tables.values())
    ]


def test_each_field_of_a_spec_is_kept_by_at_least_one_launcher() -> None:
    assert refused_everywhere({kind: get_launcher(kind).keeps for kind in OURS}) == []


def test_field_that_every_launcher_refuses_is_found() -> None:
    all_native = dict.fromkeys(leaf_fields(), native("here"))
    tables = {"a": {**all_native, "nodes": refused("one machine")}, "b": {**all_native, "nodes": refused("one pod")}}
    assert refused_everywhere(tables) == ["nodes"]


@pytest.mark.parametrize("name", sorted(NOWHERE))
def test_field_that_no_launcher_keeps_is_unknown_with_what_to_do_instead(name: str) -> None:
    outer, _, inner = name.partition(".")
    with pytest.raises(InvalidSpec) as said:
        parse_spec({"command": ["true"], outer: {inner: {"type": "x"}}})
    assert [(each.path, each.hint) for each in said.value.problems] == [(name, NOWHERE[name])]
    assert name not in leaf_fields()
