"""Reads a stack's settings, and judges settings from stack files and other programs by every rule.

Only this module touches `pulumi.Config`. The engine checks neither misspelt nor nested keys, so `parse_settings` checks
all keys of a stack file before a resource exists: it returns `StackSettings`, or raises one `InvalidSettings` that lists every
problem with the field, the value, the allowed values and a hint.
"""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Final

from infra.settings.files import find_stack_file, load_stack_config
from infra.settings.model import KEYS, NAMESPACE, StackSettings
from infra.settings.rules import find_own_problems
from infra.settings.stack_rules import find_stack_problems
from runtime import schema
from runtime.errors import RequestRefused
from runtime.schema import UNREADABLE, Problem, join, leaves, suggest, type_hints, without_none

SECRET_VALUE: Final = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY|\bya29\.[\w-]{20,}|\bAIza[\w-]{35}|\bgh[pousr]_\w{30,}|\bhf_[A-Za-z0-9]{20,}"
    r'|\bAKIA[0-9A-Z]{16}\b|"private_key"|\bsk-[A-Za-z0-9_-]{20,}'
)
"""Recognisable forms of secret values."""
_VALUE_KEYS: Final = re.compile(
    r"secrets\.(?P<name>[^.]+)\.(?:value|values|token|password|key|secret|data|content|text)"
)


def parse_settings(stack: str, values: Mapping[str, Any]) -> StackSettings:
    """Check and convert the values of a stack file under our keys (without their prefix).

    A value is as YAML reads it, or text as the engine passes it (objects and lists as JSON). Raises
    `InvalidSettings` with every problem.
    """
    hints = type_hints(StackSettings)
    decoded = {key: decode(hints[key], value) if key in KEYS else value for key, value in values.items()}
    if typed_in := _find_typed_secrets(decoded):
        # Reported alone, since any other problem could repeat the value.
        raise InvalidSettings(f"stack `{stack}`", typed_in)
    reader = StackFileReader()
    settings = reader.read_record(StackSettings, decoded, "", {"stack": stack})
    problems = [*map(_with_place_of_values, reader.problems), *_find_news(settings, reader.problems)]
    if problems:
        raise InvalidSettings(f"stack `{stack}`", problems)
    assert isinstance(settings, StackSettings)
    return settings


def _find_news(settings: object, unread: Sequence[Problem]) -> list[Problem]:
    """Judge the readable part, without the problems of the defaults that replace unreadable values."""
    if not isinstance(settings, StackSettings):
        return []
    paths = {problem.path for problem in unread}
    broken = [] if paths.isdisjoint(_PARTS) else find_stack_problems(settings)
    return [each for each in find_problems(settings) if each.path not in paths and each not in broken]


def _find_typed_secrets(values: Mapping[str, Any]) -> list[Problem]:
    hint = "take it out and, where it was committed or shared, have a new one made; `runtime secrets put` takes values"
    message = "looks like the value of a secret, which is not repeated here"
    found = (path for path, value in leaves(values) if isinstance(value, str) and SECRET_VALUE.search(value))
    return [Problem(path, message, hint) for path in found]


def _with_place_of_values(problem: Problem) -> Problem:
    found = _VALUE_KEYS.fullmatch(problem.path)
    if found is None:
        return problem
    return replace(
        problem, hint=f"no value is written here: `runtime secrets put {found['name']}` takes it, after `up`"
    )


def read_settings() -> StackSettings:
    """Read the settings of the stack that Pulumi runs now. Raises `InvalidSettings`."""
    import pulumi
    from pulumi.runtime import config as engine

    config: dict[str, Any] = engine.CONFIG.get() or engine.get_config_env()
    secrets = {key for key in config if engine.is_config_secret(key)}
    return settings_from(pulumi.get_stack(), config, secrets)


def load_settings(stack: str, folder: Path) -> StackSettings:
    """Read the settings of `Pulumi.<stack>.yaml`. Raises `UnknownName` without this file, and `InvalidSettings`."""
    config = load_stack_config(find_stack_file(stack, folder))
    return settings_from(stack, config.values, config.secrets)


def settings_from(stack: str, config: Mapping[str, Any], secrets: Collection[str] = ()) -> StackSettings:
    """Read the settings from a stack's whole configuration, whose keys have their namespace.

    `secrets` are the keys with encrypted values. Raises `InvalidSettings`.
    """
    problems = [*_find_foreign(config), *_find_secret(secrets), *_find_open_door(config)]
    ours = {
        key.removeprefix(f"{NAMESPACE}:"): value for key, value in config.items() if key.startswith(f"{NAMESPACE}:")
    }
    try:
        settings = parse_settings(stack, ours)
    except InvalidSettings as invalid:
        raise InvalidSettings(invalid.where, [*problems, *invalid.problems]) from None
    if problems:
        raise InvalidSettings(f"stack `{stack}`", problems)
    return settings


_PARTS: Final = KEYS - {"project", "region", "zone", "protect", "adopt", "labels", "kms_key", "deployer", "impersonate"}
"""Keys with objects, which the rules about the whole stack read."""

_FOREIGN_HINTS: Final = {
    "gcp:project": f"`{NAMESPACE}:project` is where the project is set",
    "gcp:region": f"`{NAMESPACE}:region` is where the region is set",
    "gcp:zone": f"`{NAMESPACE}:zone` is where the zone is set",
    "gcp:impersonateServiceAccount": f"`{NAMESPACE}:impersonate` is where the account is set",
    "gcp:defaultLabels": f"`{NAMESPACE}:labels` is where labels are set",
    "gcp:credentials": "no key file: log in, or set `impersonate`",
    "kubernetes:context": f"`{NAMESPACE}:kubernetes` names each cluster's context",
    "kubernetes:kubeconfig": f"`{NAMESPACE}:kubernetes` names each cluster's context; a kubeconfig never enters the state",
}


def _find_foreign(config: Mapping[str, Any]) -> list[Problem]:
    """Find keys of other namespaces: a provider's key would bypass the settings, any other key is a mistake."""
    found = []
    for key in config:
        namespace = key.partition(":")[0]
        if namespace in (NAMESPACE, "pulumi"):
            continue
        hint = _FOREIGN_HINTS.get(key) or suggest(namespace, [NAMESPACE]) or f"our keys begin with `{NAMESPACE}:`"
        found.append(Problem(key, "is a key of another namespace", hint))
    return found


def _find_secret(secrets: Collection[str]) -> list[Problem]:
    hint = "`runtime secrets put` takes values; `secrets` has their names only"
    return [Problem(key, "is encrypted, and no setting is a secret", hint) for key in sorted(secrets)]


def _find_open_door(config: Mapping[str, Any]) -> list[Problem]:
    key = "pulumi:disable-default-providers"
    if config.get(key) in ('["*"]', ["*"]):
        return []
    seen = f"is `{config[key]}`" if key in config else "is not set"
    hint = f'add `{key}: ["*"]`: a default provider takes whatever project the shell happens to be in'
    return [Problem(key, f'{seen}, allowed is `["*"]`', hint)]


# values


_WHOLE_NUMBER: Final = re.compile(r"-?[0-9]{1,18}")
_ENCRYPTED: Final = "is encrypted, and no setting is a secret"


class StackFileReader(schema.Reader):
    """Reads the values of a stack file. Numbers and booleans may be text, as the engine passes them."""

    names: ClassVar[Mapping[Any, str]] = {**schema.Reader.names, str: "a text", Mapping: "an object with keys"}
    keeps_rest = True

    def read(self, kind: Any, value: object, path: str) -> Any:
        if _is_encrypted(value):
            self.report(path, _ENCRYPTED, "see `secrets`")
            return UNREADABLE
        # `default:` without a value is the shortest request for every default.
        return super().read(kind, {} if value is None and is_dataclass(kind) else value, path)

    def read_record(self, kind: Any, value: object, path: str, given: Mapping[str, Any] | None = None) -> Any:
        """As the base, and refuse a key with nothing behind it where an object or a list belongs.

        Somebody began to write it, or left it when the last entry went; no default could be meant by both. An entry
        under a name is no such key: `default:` asks for every default.
        """
        if isinstance(value, Mapping):
            hints = type_hints(kind)
            empty = [key for key in hints if key in value and value[key] is None and _show_none(hints[key])]
            for key in empty:
                self.report(join(path, key), "is empty", f"write {_show_none(hints[key])}, or leave it out")
            value = {key: item for key, item in value.items() if key not in empty}
        return super().read_record(kind, value, path, given)

    def read_scalar(self, kind: Any, value: object, path: str) -> Any:
        if kind is bool and value in ("true", "false"):
            return value == "true"
        if kind is int and isinstance(value, str) and _WHOLE_NUMBER.fullmatch(value):
            return int(value)
        return super().read_scalar(kind, value, path)

    def entries(self, value: Mapping[Any, Any], path: str) -> Mapping[str, Any]:
        for key in value:
            if not isinstance(key, str):
                self.report(path, f"has the key {show(key)}, which is no text", "put it in quotes")
        return {key: item for key, item in value.items() if isinstance(key, str)}

    def is_absent(self, value: object, *, required: bool) -> bool:
        return value is None and not required

    def report(self, path: str, message: str, hint: str | None = None) -> None:
        super().report(path or "the stack file", message, hint)

    def report_unknown(self, value: Mapping[str, Any], known: list[str], path: str) -> None:
        allowed = f"allowed are {', '.join(sorted(known))}"
        for key, item in value.items():
            if key not in known and _is_encrypted(item):
                self.report(join(path, key), _ENCRYPTED, "see `secrets`")
            elif key not in known:
                nearest = suggest(key, known)
                self.report(join(path, key), "is no key here", f"{nearest} ({allowed})" if nearest else allowed)

    def report_missing(self, kind: Any, name: str, path: str) -> None:
        bare = without_none(kind)
        is_choice = isinstance(bare, type) and issubclass(bare, StrEnum)
        self.report(path, f"lacks `{name}`", f"{'' if is_choice else 'it is '}{self.expected(bare)}")

    def wrong(self, kind: Any, value: object, path: str, expected: str | None = None) -> Any:
        seen = "is empty" if value is None or value == "" else f"is {show(value)}"
        self.report(path, f"{seen}, allowed is {expected or self.expected(kind)}", self.hint(kind, value))
        return UNREADABLE

    def hint(self, kind: Any, value: object) -> str | None:
        if kind is str and isinstance(value, int | float):
            text = json.dumps(str(value).lower() if isinstance(value, bool) else str(value))
            return f"put it in quotes: {text}"
        origin = typing.get_origin(kind)
        if origin is tuple:
            return f"write `[{value}]`" if isinstance(value, str) else None
        if origin is not None and is_dataclass(typing.get_args(kind)[1]):
            return _show_as_keys(value)
        return super().hint(kind, value)


class Checker(StackFileReader):
    """Judges the types of values that another program built; converts nothing, and does not enter dataclasses."""

    def read(self, kind: Any, value: object, path: str) -> Any:
        bare = without_none(kind)
        if typing.get_origin(bare) is not None or (value is None and bare is not kind):
            return schema.Reader.read(self, kind, value, path)
        if not isinstance(value, bare) or (bare is int and isinstance(value, bool)):
            named = is_dataclass(bare) or issubclass(bare, StrEnum)
            return self.wrong(bare, value, path, f"a {bare.__name__}" if named else None)
        return value


def decode(kind: Any, value: object) -> object:
    """Decode the value of a top-level key, which the engine passes as text: objects and lists as JSON."""
    if isinstance(value, str) and without_none(kind) not in (str, int, bool):
        try:
            return json.loads(value, object_pairs_hook=_without_repeats) if value else None
        except (ValueError, RecursionError):
            return value
    # `pulumi config set KEY ""` is as near as that command comes to leaving a key out.
    return None if value == "" else value


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("a key stands twice")
    return found


def show(value: object) -> str:
    """Format a value as in a stack file, short enough for a line."""
    if isinstance(value, str):
        text = f"`{value}`"
    elif isinstance(value, Mapping | list | tuple):
        text = schema.describe(value)
    else:
        text = json.dumps(value, default=str)
    return text if len(text) <= 80 else f"{text[:76]}…`"


def _show_none(kind: Any) -> str | None:
    """Return how to write that an object or a list is wanted with nothing in it; None for every other kind."""
    bare = without_none(kind)
    if is_dataclass(bare):
        return "at least one of its keys"
    origin = typing.get_origin(bare)
    return None if origin is None else "`[]` for none" if origin is tuple else "`{}` for none"


def _is_encrypted(value: object) -> bool:
    """Whether `pulumi config set --secret` wrote the value, as `{secure: …}`."""
    return isinstance(value, Mapping) and set(value) == {"secure"}


_PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9_. -]{1,63}")


def _show_as_keys(value: object) -> str | None:
    """Rewrite a list of names as an object with these keys; None for any other value."""
    names = [value] if isinstance(value, str) else value
    if (
        not isinstance(names, list)
        or not names
        or not all(isinstance(each, str) and _PLAIN_NAME.fullmatch(each) for each in names)
    ):
        return None
    return f"write `{{{', '.join(f'{name}: {{}}' for name in names)}}}`"


LONGEST: Final = 800
"""Most letters of a path, a message and a hint; a value or a name in a file may have any number of them."""


def _cut(problem: Problem) -> Problem:
    """Return the problem with the middle of long texts left out: the end says what is allowed."""
    texts = {"path": problem.path, "message": problem.message, "hint": problem.hint}
    long = {name: text for name, text in texts.items() if text is not None and len(text) > LONGEST}
    return (
        replace(problem, **{name: f"{text[:200]}…{text[220 - LONGEST :]}" for name, text in long.items()})
        if long
        else problem
    )


class InvalidSettings(RequestRefused):
    """The settings of `where` (a stack, or a component) cannot be used; nothing was made."""

    def __init__(self, where: str, problems: Sequence[Problem]) -> None:
        self.where, self.problems = where, tuple(map(_cut, problems))
        super().__init__(
            f"the settings of {where} cannot be used",
            facts=[str(each) for each in self.problems],
            hint="docs/settings.md has every key and what is allowed",
        )


def find_problems(value: object, path: str = "") -> list[Problem]:
    """Judge one settings value (a `QueueSettings`, `HeadSettings` … or the whole) alone.

    Components call `ensure_valid` with their settings, so that they are as strict in another program.
    """
    if isinstance(value, type) or not is_dataclass(value):
        raise TypeError(f"{value!r} is no settings value")
    checker = Checker()
    type_: type = type(value)
    for name, kind in type_hints(type_).items():
        checker.read(kind, getattr(value, name), join(path, name))
    if checker.problems:
        return checker.problems
    found = find_own_problems(value, path)
    for each in fields(value):
        found += _find_nested(getattr(value, each.name), join(path, each.name))
    if isinstance(value, StackSettings):
        found += find_stack_problems(value)
    return found


def ensure_valid(value: object, path: str) -> None:
    """Raise `InvalidSettings` unless `find_problems` is empty."""
    problems = find_problems(value, path)
    if problems:
        raise InvalidSettings(f"`{path}`", problems)


def _find_nested(value: object, path: str) -> list[Problem]:
    if isinstance(value, Mapping):
        return [problem for key, item in value.items() for problem in _find_nested(item, join(path, key))]
    if is_dataclass(value):
        return find_problems(value, path)
    return []
