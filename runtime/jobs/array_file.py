"""Files that a spec names and that are read where it is launched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from runtime.errors import NotPossible
from runtime.jobs.spec import Array


def read_array_file(array: Array | None, base: Path) -> list[dict[str, Any]]:
    """The parameters in `array.file`, one JSON object a line; nothing where the array names no file."""
    if array is None or array.file is None:
        return []
    path = base / array.file
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as problem:
        raise NotPossible(f"cannot read `array.file` `{path}`: {(problem.strerror or str(problem)).lower()}") from None
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as problem:
            raise NotPossible(f"`{path}` line {number} is no JSON: {problem}") from None
        if not isinstance(value, dict):
            raise NotPossible(f"`{path}` line {number} is no object", hint='write {"name": value, …} on each line')
        found.append(value)
    return found
