"""What Google adds to a resource that it makes, as far as that is known beforehand: ids, e-mail addresses, self-links.

`compute` fills recordings with it, so that `check` can show the contract; the rest stays `UNKNOWN`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def compute(type_: str, name: str, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """A `recording.Compute` for the resource types of this program."""
    raise NotImplementedError
