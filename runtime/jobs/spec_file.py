"""Job specs as YAML files: read, and described if they cannot be."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runtime.errors import NotPossible
from runtime.schema import describe


def read_spec_file(path: str | Path) -> dict[str, Any]:
    """The fields in a YAML or JSON file, not yet checked. Raises `NotPossible` for any other file."""
    import yaml

    try:
        value = load_yaml(Path(path).read_text(encoding="utf-8"))
    except OSError as problem:
        raise NotPossible(f"cannot read the job spec `{path}`: {(problem.strerror or str(problem)).lower()}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as problem:
        raise NotPossible(f"`{path}` is no YAML: {describe_syntax(problem)}") from None
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

    Dates are text, since JSON has none. Raises `yaml.YAMLError`, also for a duplicate key.
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
            if key.value != "<<" and str(key.value) in seen:
                raise yaml.constructor.ConstructorError(None, None, f"`{key.value}` is there twice", key.start_mark)
            seen.add(str(key.value))
        return self.construct_yaml_map(node)

    loader.add_constructor("tag:yaml.org,2002:map", construct)
    loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("true|True|TRUE|false|False|FALSE"), list("tTfF"))
    return yaml.load(text, loader)
