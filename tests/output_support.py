"""docs/output.md for tests: its examples, and a comparison of their shape with a command's output."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "output.md"
FREE = {"labels", "declined", "metrics", "metric_ranges", "params", "reports", "spec", "order", "artefacts", "fidelity"}
"""Objects with keys chosen by the user or documented elsewhere."""


def documented() -> dict[str, Any]:
    """Return command line → example."""
    found = re.findall(r"^### `(runtime [^`]*)`\n.*?```json\n(.*?)```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return {command: json.loads(text) for command, text in found}


def differences(shown: Any, printed: Any, place: str = "$") -> list[str]:
    """List the differences in shape between example and output. Null matches anything; arrays compare by first item."""
    if shown is None or printed is None:
        return []
    kinds = [("number" if isinstance(each, int | float) and each is not True and each is not False else type(each).__name__)
             for each in (shown, printed)]  # fmt: skip
    if kinds[0] != kinds[1]:
        return [f"{place} is shown as {kinds[0]} and printed as {kinds[1]}"]
    if isinstance(shown, dict):
        if place.rpartition(".")[2] in FREE:
            return []
        found = [f"{place}.{key} is only shown" for key in shown.keys() - printed.keys()]
        found += [f"{place}.{key} is only printed" for key in printed.keys() - shown.keys()]
        for key in shown.keys() & printed.keys():
            found += differences(shown[key], printed[key], f"{place}.{key}")
        return found
    if isinstance(shown, list) and shown and printed:
        return differences(shown[0], printed[0], f"{place}[0]")
    if isinstance(shown, list) and shown and not printed:
        return [f"{place} has an example and is printed empty"]
    return []
