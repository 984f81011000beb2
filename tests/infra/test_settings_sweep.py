"""Every key of a stack file with every wrong kind of value: it is accepted, or an error names it and says what to do.

The values pass through the text that the engine makes of them, and once for each kind through a file.
"""

from __future__ import annotations

import copy
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.check.check import record_stack, report_on
from infra.settings import model
from infra.settings.files import StackConfig, as_text, load_stack_config
from infra.settings.model import StackSettings
from infra.settings.read import LONGEST, InvalidSettings, settings_from
from runtime.schema import Problem, join, type_hints, without_none
from tests.infra.conftest import ROOT
from tests.infra.test_config import GOOD

LONG = "a" * 2_000
VALUES: dict[str, Any] = {
    "null": None,
    "empty text": "",
    "text": "x",
    "long text": LONG,
    "newline": "two\nlines",
    "control": "a\x07\x1b[2Jb",
    "quotes": 'it\'s "so" $(a) `b` %s {c}',
    "unicode": "é\u202e\u200b",
    "true": True,
    "zero": 0,
    "negative": -1,
    "number": 7,
    "fraction": 1.5,
    "huge": 10**30,
    "longest": 10**400,
    "empty list": [],
    "list": ["x", "x"],
    "list of null": [None],
    "list of objects": [{"a": 1}],
    "empty object": {},
    "object": {"x": {"y": 1}},
    "object of null": {"x": None},
    "odd keys": {"a b\nc": {}, LONG: {}, "": {}, "É": {}},
}
MORE = {
    "alerts": {"emails": ["ops@example.com"], "budget": {"billing_account": "0123AB-0123AB-0123AB", "monthly": 5}},
    "overrides": {"images": ["ghcr.io/lab"]},
}
FULL: dict[str, Any] = {**copy.deepcopy(GOOD), **MORE}


def walk(kind: Any, good: Any, path: str, place: tuple[Any, ...]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield the path and the keys of every setting below `kind`, through the example `good`."""
    for name, hint in type_hints(kind).items():
        if kind is StackSettings and name == "stack":
            continue
        where, keys, bare = join(path, name), (*place, name), without_none(hint)
        yield where, keys
        inner = good.get(name) if isinstance(good, Mapping) else None
        if is_dataclass(bare):
            yield from walk(bare, inner, where, keys)
        elif typing.get_origin(bare) not in (None, tuple):
            entry = typing.get_args(bare)[1]
            for key, value in (inner or {"x": None}).items():
                yield join(where, key), (*keys, key)
                if is_dataclass(entry):
                    yield from walk(entry, value, join(where, key), (*keys, key))


KEYS = dict(walk(StackSettings, FULL, "", ()))


def spoil(keys: tuple[Any, ...], value: Any, good: Mapping[str, Any] = FULL) -> dict[str, Any]:
    config = copy.deepcopy(dict(good))
    place = config
    for key in keys[:-1]:
        place = place.setdefault(key, {})
    place[keys[-1]] = value
    return config


def full_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    ours = {f"research-runtime:{key}": value for key, value in config.items()}
    return {"pulumi:disable-default-providers": ["*"], **ours}


def read(config: Mapping[str, Any]) -> list[Problem]:
    """Return the problems of values as a file has them; none if the stack is accepted."""
    values = {key: as_text(value) for key, value in full_keys(config).items()}
    return refusals(lambda: settings_from("x", values))


def refusals(parse: Callable[[], object]) -> list[Problem]:
    try:
        parse()
    except InvalidSettings as refused:
        text = refused.render()
        return [*refused.problems, *([] if text.replace("\n", "").isprintable() else [Problem("?", text)])]
    return []


def test_the_example_of_the_sweep_is_accepted_and_reaches_every_class() -> None:
    assert read(FULL) == []
    classes = {each.__name__ for each in map(_class_of, KEYS.values()) if each is not None}
    known = {
        each
        for each in vars(model).values()
        if isinstance(each, type) and is_dataclass(each) and each.__module__ == model.__name__
    }
    # A base of other settings is no place of its own.
    assert classes == {each.__name__ for each in known if not each.__subclasses__()}


def _class_of(keys: tuple[Any, ...]) -> type | None:
    """Return the class that the last of the keys belongs to; None for an entry under a name."""
    kind: Any = StackSettings
    for key in keys[:-1]:
        kind = without_none(type_hints(kind)[key]) if is_dataclass(kind) else typing.get_args(kind)[1]
    return kind if is_dataclass(kind) and isinstance(kind, type) else None


@pytest.mark.parametrize("where", sorted(KEYS))
def test_key_with_a_wrong_kind_of_value_is_read_or_refused_with_what_to_do(where: str) -> None:
    wrong: list[str] = []
    for name, value in VALUES.items():
        found = read(spoil(KEYS[where], value))
        wrong += [f"{name}: {each.path[:60]} {fault}" for each in found if (fault := _find_fault(each))]
        if found and not any(_is_about(each.path, where) or each.path in RELATED for each in found):
            wrong.append(f"{name}: none of the problems names it: {[each.path for each in found]}")
    assert wrong == []


@pytest.mark.parametrize("name", sorted(VALUES))
def test_file_with_a_wrong_kind_of_value_everywhere_is_refused_without_a_traceback(tmp_path: Path, name: str) -> None:
    (tmp_path / "Pulumi.yaml").write_text((ROOT / "Pulumi.yaml").read_text(encoding="utf-8"), encoding="utf-8")
    file = tmp_path / "Pulumi.x.yaml"
    values = full_keys(dict.fromkeys(FULL, VALUES[name]))
    file.write_text(yaml.safe_dump({"config": values}, allow_unicode=True), encoding="utf-8")

    loaded = load_stack_config(file)

    assert refusals(lambda: settings_from("x", loaded.values, loaded.secrets)) or name in HARMLESS


RELATED = (
    *("heads.main.image", "heads.main.environment[0]", "heads.main.pools.v5e.min"),
    *("secrets.hf-token.readers[0]", "queues.default.min_backoff_s"),
)
"""Keys of the example that refer to others, and are named if those are wrong."""
HARMLESS = ("empty object",)
"""Values that mean nothing wrong at any key."""


@pytest.mark.parametrize("name", ["null", "text", "true", "zero", "number", "empty list", "empty object"])
@pytest.mark.daily(3)
def test_values_that_are_accepted_together_build(name: str) -> None:
    config, changed = copy.deepcopy(FULL), []
    for where, keys in KEYS.items():
        if not any(_is_about(each, where) for each in changed):
            tried = spoil(keys, VALUES[name], config)
            if read(tried) == []:
                config, changed = tried, [*changed, where]
    values = {key: as_text(value) for key, value in full_keys(config).items()}

    report = report_on(record_stack("x", StackConfig(values=values)), settings_from("x", values))

    assert (len(changed) > 2, report.findings) == (True, ())


def _find_fault(problem: Problem) -> str:
    """Return what a reader of the problem would miss; empty if nothing."""
    if max(map(len, (problem.path, problem.message, problem.hint or ""))) > LONGEST:
        return "is longer than anybody reads"
    words = ("allowed", "at most", "at least", "lacks", "missing", "too", "more", "times", "expected", "nothing")
    return (
        ""
        if problem.hint or any(word in problem.message for word in words)
        else f"says nothing to do: {problem.message[:80]}"
    )


def _is_about(path: str, where: str) -> bool:
    """Whether a problem is about the key, about something in it, or about the object that has the key."""
    return path == where or path.startswith((f"{where}.", f"{where}[")) or where.startswith((f"{path}.", f"{path}["))
