"""docs/output.md for tests: the examples it shows, and whether what a command printed is of the same shape."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "output.md"
FREE = {"labels", "declined", "metrics", "spec", "order", "artefacts", "fidelity"}
"""Their keys are the user's, or told elsewhere."""


def documented() -> dict[str, Any]:
    """Command line → its example."""
    found = re.findall(r"^### `(runtime [^`]*)`\n.*?```json\n(.*?)```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return {command: json.loads(text) for command, text in found}


def differences(shown: Any, printed: Any, place: str = "$") -> list[str]:
    """Where the example and the real output are not of one shape. Null stands for any kind; arrays go by their first."""
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


def differences_from_page(command: str, printed: str) -> list[str]:
    """Between what the page shows for `command` and the text that it printed."""
    return differences(documented()[command], json.loads(printed))
