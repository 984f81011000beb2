"""The runs of an array: their parameters, and the command of each."""

from __future__ import annotations

import difflib
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runtime.errors import NotPossible
from runtime.jobs.spec import MAX_INDICES, Array
from runtime.schema import describe


def read_indices(array: Array | None, base: Path) -> list[dict[str, Any]]:
    """The parameters of each index in order; `base` is the folder that `array.file` starts from."""
    return expand_array(array, _read_lines(base / array.file) if array and array.file is not None else ())


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """The parameters in `array.file`, one JSON object a line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as problem:
        raise NotPossible(f"cannot read `array.file` `{path}`: {(problem.strerror or str(problem)).lower()}") from None
    from runtime.tasks.wire import unique_keys

    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line, object_pairs_hook=unique_keys)
        except ValueError as problem:
            raise NotPossible(f"`{path}` line {number} is no JSON: {problem}") from None
        if not isinstance(value, dict):
            raise NotPossible(f"`{path}` line {number} is no object", hint='write {"name": value, …} on each line')
        found.append(value)
    return found


def expand_array(array: Array | None, lines: Sequence[Mapping[str, Any]] = ()) -> list[dict[str, Any]]:
    """The parameters of each index in order; one empty set for a job that is not an array. `lines` are those of `file`."""
    if array is None:
        return [{}]
    if array.seeds is not None:
        return [{"seed": array.offset + index} for index in range(array.seeds)]
    if array.count is not None or array.items:
        return [{} for _ in range(array.count or len(array.items))]
    count = len(lines) if array.file is not None else math.prod(map(len, array.params.values()))
    if not 1 <= count <= MAX_INDICES:
        raise NotPossible(
            f"the array has {count} indices, expected 1 to {MAX_INDICES}",
            hint="split it into several jobs, or put the work into a queue: `runtime submit`",
        )
    if array.file is not None:
        found = [dict(line) for line in lines]
    else:
        found = [dict(zip(array.params, values, strict=True)) for values in itertools.product(*array.params.values())]
    for name, value in itertools.chain.from_iterable(each.items() for each in found):
        if not name or "=" in name or "\0" in f"{name}{value}":
            raise NotPossible(
                f"parameter {describe(name)} of the array cannot be a variable of a process",
                hint="names have no `=`, and neither they nor their values a zero byte",
            )
    return found


def fill_command(command: Sequence[str], params: Mapping[str, Any], index: int) -> tuple[str, ...]:
    """`command` with `{name}` replaced by the index's parameter and `{index}` by the index.

    Other braces stay, so that JSON and awk pass; a name that is nearly a parameter's is refused.
    """
    if not any("{" in word for word in command):
        return tuple(command)
    values = {"index": index, **params}

    def fill(match: re.Match[str]) -> str:
        name = match[1]
        if name in values:
            value = values[name]
            return value if isinstance(value, str) else json.dumps(value)
        if near := difflib.get_close_matches(name, list(values), n=1, cutoff=0.75):
            raise NotPossible(
                f"`{match[0]}` in the command is no parameter of the array",
                facts=[f"parameters: {', '.join(values)}"],
                hint=f"did you mean `{{{near[0]}}}`?",
            )
        return match[0]

    return tuple(re.sub(_BRACES, fill, word) for word in command)


_BRACES = r"\{([A-Za-z_][A-Za-z0-9_]*)\}"
