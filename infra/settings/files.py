"""Finds and reads stack files as the engine does: the names of the stacks, and the config of their programs."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from infra.settings.model import NAMESPACE
from runtime.errors import RequestRefused, UnknownName
from runtime.file_trust import check_trusted

PROJECT_FILE = "Pulumi.yaml"


class InvalidStackFile(RequestRefused):
    """A file is not a valid stack file; `problem` continues a sentence about the file."""

    def __init__(self, path: Path, problem: str, *, hint: str | None = None) -> None:
        self.path, self.problem = path, problem
        super().__init__(f"`{path.name}` {problem}", facts=[f"read from {path}"], hint=hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class StackConfig:
    """The config that a stack's program gets."""

    values: Mapping[str, str]
    """Full key → value as the engine passes it: text; objects and lists as JSON."""
    secrets: frozenset[str] = frozenset()
    """Keys with encrypted values, which are empty here."""


def find_project_folder(start: Path | None = None) -> Path:
    """Return the nearest folder, from `start` (by default the current one) upwards, with this project's Pulumi.yaml.

    Raises `RequestRefused` without one, and `Untrusted` for another user's, unless `start` is its very folder.
    """
    named, start = start is not None, (start or Path.cwd()).resolve()
    hint = "run this in the folder of the stack files, or name it with `--folder`"
    if not start.is_dir():
        raise RequestRefused(f"`{start}` is no folder", hint=hint)
    for folder in (start, *start.parents):
        file = folder / PROJECT_FILE
        if file.is_file():
            if not (named and folder == start):
                check_trusted(str(file), instead=f"name it: `--folder {folder}`")
            name = _read_mapping(file).get("name")
            if name != NAMESPACE:
                facts = [f"expected the project `{NAMESPACE}`"]
                raise RequestRefused(f"`{file}` is of another project: `{name}`", facts=facts, hint=hint)
            return folder
    raise RequestRefused(f"no `{PROJECT_FILE}` in `{start}` or above", hint=hint)


def list_stacks(folder: Path) -> list[str]:
    names = [each.name.removeprefix("Pulumi.").removesuffix(".yaml") for each in folder.glob("Pulumi.*.yaml")]
    return sorted(names)


def find_stack_file(stack: str, folder: Path) -> Path:
    """Raises `UnknownName` with the existing stacks."""
    file = folder / f"Pulumi.{stack}.yaml"
    if "/" in stack or not file.is_file():
        raise UnknownName(
            "stack", stack, list_stacks(folder), where=f"in `{folder}`", hint="a stack is a file `Pulumi.NAME.yaml`"
        )
    return file


def load_stack_config(path: Path) -> StackConfig:
    """Return the engine's config for the stack file at `path`. Raises `InvalidStackFile`."""
    content = _read_mapping(path)
    if "environment" in content:
        hint = "write them under `config:`; `runtime secrets put` takes values that are secret"
        raise InvalidStackFile(path, "names an `environment`, whose settings nobody sees before `up`", hint=hint)
    salt = content.get("encryptionsalt")
    if salt is not None and not _SALT.fullmatch(str(salt)):
        hint = "take the line from an older version of the file: without it, what it encrypts is lost"
        raise InvalidStackFile(path, "has a damaged `encryptionsalt`, which the engine would refuse", hint=hint)
    unknown = sorted(set(content) - {"config", "encryptionsalt", "encryptedkey", "secretsprovider"})
    if unknown:
        near = difflib.get_close_matches(unknown[0], ["config"], n=1)
        raise InvalidStackFile(
            path,
            f"has the key `{unknown[0]}`, which is no part of a stack file",
            hint=f"did you mean `{near[0]}`?" if near else "settings stand under `config:`",
        )
    config = content.get("config")
    config = {} if config is None else config
    if not isinstance(config, Mapping):
        raise InvalidStackFile(path, f"has {_kind(config)} under `config`, expected keys and values")
    names = [_full(key) for key in config]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        short = twice[0].removeprefix(f"{NAMESPACE}:")
        raise InvalidStackFile(
            path, f"has the key `{short}` twice, once with `{NAMESPACE}:` before it", hint="keep one"
        )
    secrets = {_full(key) for key, value in config.items() if isinstance(value, Mapping) and set(value) == {"secure"}}
    values = {}
    for key, value in config.items():
        try:
            values[_full(key)] = "" if _full(key) in secrets else as_text(value)
        except (TypeError, ValueError, RecursionError):
            raise InvalidStackFile(
                path,
                f"has something under `{key}` that the engine cannot pass on",
                hint="a key that is a list goes in quotes, and no object contains itself",
            ) from None
    return StackConfig(values=values, secrets=frozenset(secrets))


def _full(key: object) -> str:
    return str(key) if ":" in str(key) else f"{NAMESPACE}:{key}"


def as_text(value: Any) -> str:
    """Return a value of a stack file as the engine passes it to the program. Raises `TypeError`, `ValueError` if it cannot."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    return json.dumps(value, default=str, ensure_ascii=False, separators=(",", ":"))


_SALT: Final = re.compile(r"v1:[A-Za-z0-9+/]{11}=:v1:[A-Za-z0-9+/]+={0,2}:[A-Za-z0-9+/]+={0,2}")
"""Salt, nonce and a probe of the passphrase, in base64."""
_MOST_VALUES: Final = 100_000
_TAG: Final = "tag:yaml.org,2002:"
_ONE_NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?")
_ONE_BOOLEAN: Final = frozenset({"true", "false"})
_OTHERS_NUMBER: Final = re.compile(r"[-+]?(?:0o[0-7_]+|\.?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+)")
"""Plain texts that the engine's YAML, of version 1.2, reads as numbers, and Python's, of 1.1, as texts."""


class _Loader(yaml.SafeLoader):
    """Refuses a repeated key, of which plain YAML loading keeps the last, merges, tags, and texts that YAML 1.1 and 1.2 read differently.

    The engine reads 1.2 and `check` 1.1: `yes`, `0200` and `1:30` would be checked as one value and deployed as another.
    """

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if (tag := getattr(event, "tag", None)) is not None:
            shown = tag.replace(_TAG, "!!")
            problem = f"the tag `{shown}` makes another value of what it stands before; write the value itself"
            raise yaml.composer.ComposerError(None, None, problem, event.start_mark)
        return super().compose_node(parent, index)

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        value = super().construct_object(node, deep=deep)
        if isinstance(node, yaml.ScalarNode) and node.style is None and (right := _right_form(node, value)):
            problem = f"`{node.value}` is not the same value to every reader of YAML; write {right}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return value

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if key_node.tag == f"{_TAG}merge":
                problem = (
                    "the key `<<` takes over the keys of another object, and no setting is written so; repeat them here"
                )
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                problem = "a key is no text; put it in quotes if it is meant as a name"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            if key in seen:
                problem = f"the key `{key}` stands twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def _right_form(node: yaml.ScalarNode, value: object) -> str | None:
    """Return how to write the value of a plain text that not every reader takes for the same; None if all do."""
    text, kind = node.value, node.tag.removeprefix(_TAG)
    as_text, right = f'`"{text}"`', None
    if kind == "timestamp":
        # The engine would pass on `2026-11-23 00:00:00 +0000 UTC`.
        return as_text
    if kind == "bool" and text not in _ONE_BOOLEAN:
        right = f"`{str(value).lower()}`"
    elif kind in ("int", "float") and not _ONE_NUMBER.fullmatch(text):
        right = "a plain decimal number" if kind == "float" else f"`{value}`"
    elif kind == "str" and _OTHERS_NUMBER.fullmatch(text):
        right = "a plain decimal number"
    return right and f"{right}, or {as_text} for a text"


def _read_mapping(path: Path) -> Mapping[str, Any]:
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
        values = _count(content, {})
    except OSError as problem:
        raise InvalidStackFile(path, f"cannot be read: {problem.strerror or problem}") from None
    except UnicodeDecodeError:
        raise InvalidStackFile(path, "is no UTF-8 text") from None
    except yaml.MarkedYAMLError as problem:
        mark = problem.problem_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        raise InvalidStackFile(path, f"is no valid YAML: {place}{problem.problem}") from None
    except yaml.YAMLError as problem:
        raise InvalidStackFile(path, f"is no valid YAML: {problem}") from None
    except RecursionError:
        raise InvalidStackFile(path, "is nested too deeply", hint="settings have at most a few levels") from None
    except ValueError as problem:
        # Python makes no number of more than some thousand digits, and no date of a 13th month.
        raise InvalidStackFile(path, f"has a value that cannot be read: {problem}") from None
    if values > _MOST_VALUES:
        raise InvalidStackFile(
            path, f"has anchors that stand for more than {_MOST_VALUES:,} values", hint="write the values out"
        )
    if content is None:
        content = {}
    if not isinstance(content, Mapping):
        raise InvalidStackFile(path, f"holds {_kind(content)}, expected `config:` with keys and values")
    return content


def _count(value: Any, counted: dict[int, int]) -> int:
    """Count the values in `value`, an anchored one at each place that refers to it, in one visit of each."""
    if not isinstance(value, list | tuple | dict):
        return 1
    if id(value) not in counted:
        # An object that contains itself counts once here, and `as_text` refuses it.
        counted[id(value)] = 1
        counted[id(value)] = 1 + sum(
            _count(each, counted) for each in (value.values() if isinstance(value, dict) else value)
        )
    return counted[id(value)]


def _kind(value: Any) -> str:
    if isinstance(value, list):
        return "a list"
    return "a text" if isinstance(value, str) else f"`{value}`"
