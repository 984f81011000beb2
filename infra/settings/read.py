"""Reads a stack's settings, and is the only module that touches `pulumi.Config`.

The engine checks neither misspelt nor nested keys, so all of it happens here, over all keys, before a resource exists:
`parse_settings` takes the keys of a stack file and returns `Settings`, or raises one `InvalidSettings` that lists every
problem with the field, the value, what is allowed and a hint.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from infra.settings.model import KEYS, NAMESPACE, OPTIONAL_PARTS, Settings
from infra.settings.stack_rules import find_stack_problems
from infra.settings.valid import InvalidSettings, SettingsReader, decode, find_problems
from runtime.schema import Problem, join, suggest, type_hints

SECRET_VALUE: Final = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY|\bya29\.[\w-]{20,}|\bAIza[\w-]{35}|\bgh[pousr]_\w{30,}|\bhf_[A-Za-z0-9]{20,}"
    r'|\bAKIA[0-9A-Z]{16}\b|"private_key"|\bsk-[A-Za-z0-9_-]{20,}'
)
"""Forms of secret values that have a recognisable one."""
_VALUE_KEYS: Final = re.compile(
    r"secrets\.(?P<name>[^.]+)\.(?:value|values|token|password|key|secret|data|content|text)"
)


def parse_settings(stack: str, values: Mapping[str, Any]) -> Settings:
    """Check and type the values of a stack file under our keys (without their prefix).

    A value is as YAML reads it, or text as the engine passes it (objects and lists as JSON). Raises
    `InvalidSettings` with every problem found.
    """
    hints = type_hints(Settings)
    decoded = {key: decode(hints[key], value) if key in KEYS else value for key, value in values.items()}
    if typed_in := list(_find_typed_secrets(decoded)):
        # Alone: any other problem could repeat the value.
        raise InvalidSettings(f"stack `{stack}`", typed_in)
    reader = SettingsReader()
    for key in OPTIONAL_PARTS:
        if key in decoded and decoded[key] in ({}, None):
            reader.report(
                key,
                "is empty, and the engine cannot tell that from absent",
                f"write at least one of its keys, or leave `{NAMESPACE}:{key}` out",
            )
            del decoded[key]
    settings = reader.read_record(Settings, decoded, "", {"stack": stack})
    problems = [*map(_with_place_of_values, reader.problems), *_find_news(settings, reader.problems)]
    if problems:
        raise InvalidSettings(f"stack `{stack}`", problems)
    assert isinstance(settings, Settings)
    return settings


def _find_news(settings: object, unread: Sequence[Problem]) -> list[Problem]:
    """Judge the readable part. The rest has its default for now, and a problem that the default makes is left out."""
    if not isinstance(settings, Settings):
        return []
    paths = {problem.path for problem in unread}
    broken = [] if paths.isdisjoint(_PARTS) else find_stack_problems(settings)
    return [each for each in find_problems(settings) if each.path not in paths and each not in broken]


def _find_typed_secrets(value: object, path: str = "") -> Iterator[Problem]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _find_typed_secrets(item, join(path, str(key)))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _find_typed_secrets(item, f"{path}[{index}]")
    elif isinstance(value, str) and SECRET_VALUE.search(value):
        yield Problem(
            path=path,
            message="looks like the value of a secret, which is not repeated here",
            hint="take it out and, where it was committed or shared, have a new one made; `runtime secrets put` takes values",
        )


def _with_place_of_values(problem: Problem) -> Problem:
    found = _VALUE_KEYS.fullmatch(problem.path)
    if found is None:
        return problem
    return replace(
        problem, hint=f"no value is written here: `runtime secrets put {found['name']}` takes it, after `up`"
    )


def read_settings() -> Settings:
    """The settings of the stack that Pulumi runs now. Raises `InvalidSettings`."""
    import pulumi
    from pulumi.runtime import config as engine

    config: dict[str, Any] = engine.CONFIG.get() or engine.get_config_env()
    secrets = {key for key in config if engine.is_config_secret(key)}
    return settings_from(pulumi.get_stack(), config, secrets)


def settings_from(
    stack: str, config: Mapping[str, Any], secrets: Collection[str] = (), written: Collection[str] = ()
) -> Settings:
    """The settings in all of a stack's configuration, ours and others' keys alike, each with its namespace.

    `secrets` are the keys whose values are encrypted; `written` the keys that the stack file itself has, if known: the
    engine does not pass that. Raises `InvalidSettings`.
    """
    problems = [*_find_foreign(config), *_find_secret(secrets), *_find_open_door(config)]
    ours = {
        key.removeprefix(f"{NAMESPACE}:"): value for key, value in config.items() if key.startswith(f"{NAMESPACE}:")
    }
    if ours.keys() >= KEYS:
        # The engine adds the default of every key that Pulumi.yaml declares and a stack file leaves out.
        defaults = [key for key in OPTIONAL_PARTS if ours[key] == "{}" and f"{NAMESPACE}:{key}" not in written]
        ours = {key: value for key, value in ours.items() if key not in defaults}
    try:
        settings = parse_settings(stack, ours)
    except InvalidSettings as invalid:
        raise InvalidSettings(invalid.where, [*problems, *invalid.problems]) from None
    if problems:
        raise InvalidSettings(f"stack `{stack}`", problems)
    return settings


_PARTS: Final = frozenset(
    {"network", "queues", "records", "registries", "secrets", "heads", "kubernetes", "access", "ci", "alerts"}
)
"""Keys that hold objects, on which rules about the whole stack rest."""

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
    """Find keys of other namespaces: a provider's key would configure it past the settings, any other is a slip."""
    found = []
    for key in config:
        namespace = key.partition(":")[0]
        if namespace in (NAMESPACE, "pulumi"):
            continue
        hint = _FOREIGN_HINTS.get(key) or suggest(namespace, [NAMESPACE]) or f"our keys begin with `{NAMESPACE}:`"
        found.append(Problem(path=key, message="is a key of another namespace", hint=hint))
    return found


def _find_secret(secrets: Collection[str]) -> list[Problem]:
    hint = "`runtime secrets put` takes values; `secrets` has their names only"
    return [Problem(path=key, message="is encrypted, and no setting is a secret", hint=hint) for key in sorted(secrets)]


def _find_open_door(config: Mapping[str, Any]) -> list[Problem]:
    key = "pulumi:disable-default-providers"
    if config.get(key) in ('["*"]', ["*"]):
        return []
    seen = f"is `{config[key]}`" if key in config else "is not set"
    hint = f'add `{key}: ["*"]`: a default provider takes whatever project the shell happens to be in'
    return [Problem(path=key, message=f'{seen}, allowed is `["*"]`', hint=hint)]
