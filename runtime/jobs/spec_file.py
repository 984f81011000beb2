"""Job specs as YAML files: read, and described if they cannot be."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from runtime.errors import NotPossible
from runtime.schema import describe

MOST_BYTES: Final = 4 << 20
"""A larger job file, or a device without an end, is refused before it is parsed, which takes seconds for each MiB."""
MOST_VALUES: Final = 1_000_000


def read_spec_file(path: str | Path) -> dict[str, Any]:
    """The fields in a YAML or JSON file, not yet checked. Raises `NotPossible` for any other file."""
    import yaml

    try:
        with Path(path).open("rb") as file:
            read = file.read(MOST_BYTES + 1)
        if len(read) > MOST_BYTES:
            raise NotPossible(
                f"`{path}` is no job file: it has more than {MOST_BYTES >> 20} MiB",
                hint="put the parameters of an array into `array.file`, one JSON object a line",
            )
        value = load_yaml(read.decode())
    except OSError as problem:
        raise NotPossible(
            f"cannot read the job spec `{path}`: {(problem.strerror or str(problem)).lower()}",
            hint="name a YAML file; `runtime init` makes an example",
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as problem:
        raise NotPossible(
            f"`{path}` is no YAML: {describe_syntax(problem)}", hint="`runtime init` makes an example"
        ) from None
    if not isinstance(value, Mapping):
        raise NotPossible(f"`{path}` holds {describe(value)}, expected the fields of a job", hint="docs/jobs.md")
    return dict(value)


def describe_syntax(problem: Exception) -> str:
    """A syntax error of a YAML parser or a decoder, with its place."""
    mark, what = getattr(problem, "problem_mark", None), getattr(problem, "problem", None)
    if mark is None or not what:
        return " ".join(str(problem).split())
    return f"line {mark.line + 1}, column {mark.column + 1}: {what}"


def load_yaml(text: str) -> Any:
    """YAML 1.2, whose only truth values are `true` and `false`, since `on` is one of our keys.

    Dates are text, since JSON has none. Raises `yaml.YAMLError`, also for a duplicate key, a number of thousands of
    digits, and anchors that refer to themselves or stand for more than `MOST_VALUES` values.
    """
    import yaml

    resolvers = {
        letter: [each for each in known if each[0].rpartition(":")[2] not in ("bool", "timestamp")]
        for letter, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    loader: Any = type("Loader", (yaml.SafeLoader,), {"yaml_implicit_resolvers": resolvers})

    def construct(self: Any, node: Any) -> Any:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:null":
                raise yaml.constructor.ConstructorError(None, None, "a key is null, expected a name", key.start_mark)
            if key.value != "<<" and str(key.value) in seen:
                raise yaml.constructor.ConstructorError(None, None, f"`{key.value}` is there twice", key.start_mark)
            seen.add(str(key.value))
        return self.construct_yaml_map(node)

    loader.add_constructor("tag:yaml.org,2002:map", construct)
    loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("true|True|TRUE|false|False|FALSE"), list("tTfF"))
    try:
        value = yaml.load(text, loader)
        _count(value, {})
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    except ValueError as problem:
        raise yaml.YAMLError(str(problem).partition(";")[0]) from None
    return value


def _count(value: Any, counted: dict[int, int | None]) -> int:
    """Count the values in `value`, an anchored one at each place that refers to it, in one visit of each."""
    if not isinstance(value, list | dict):
        return 1
    if id(value) in counted:
        if (known := counted[id(value)]) is None:
            raise ValueError("an anchor refers to itself")
        return known
    counted[id(value)] = None
    total = 1 + sum(_count(each, counted) for each in (value.values() if isinstance(value, dict) else value))
    if total > MOST_VALUES:
        raise ValueError(f"its anchors stand for more than {MOST_VALUES:,} values")
    counted[id(value)] = total
    return total
