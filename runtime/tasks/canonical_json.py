"""JSON as tasks and records spell it. Pure."""

from __future__ import annotations

import functools
import json
import json.encoder
from collections.abc import Callable
from typing import Any, Final


def make_encoder(*, sort_keys: bool, allow_nan: bool = False) -> Callable[[object], str]:
    """`JSONEncoder.encode` at a third of its cost: the standard one makes the encoder in C again for each call."""
    whole = json.JSONEncoder(sort_keys=sort_keys, separators=(",", ":"), ensure_ascii=False, allow_nan=allow_nan)
    make: Any = json.encoder.c_make_encoder  # type: ignore[attr-defined]
    if make is None:
        return whole.encode
    markers, indent, skip_keys = None, None, False
    spell = make(
        markers, whole.default, json.encoder.encode_basestring, indent, ":", ",", sort_keys, skip_keys, allow_nan
    )

    def encode(value: object) -> str:
        try:
            return "".join(spell(value, 0))
        except RecursionError:
            # Raises if the value contains itself; the encoder above would need markers for that.
            return whole.encode(value)

    return encode


canonical_json: Final = make_encoder(sort_keys=True)
"""The one spelling of a JSON value that hashes are taken of."""
plain_json: Final = make_encoder(sort_keys=False)
quote_json: Final = functools.lru_cache(maxsize=256)(plain_json)
"""For text that many tasks have in common."""
