"""Hosts and chips of TPU slices, by the slice's type. https://cloud.google.com/tpu/docs/system-architecture-tpu-vm"""

from __future__ import annotations

import re
from typing import Final

_TYPE: Final = re.compile(r"((?:v|tpu)[0-9]+[a-z]*)-([1-9][0-9]{0,5})")
_ONE_CORE: Final = frozenset({"v5litepod", "v6e"})
"""Families whose types count chips; a host has up to eight of a small slice, and four of a large one."""
_TWO_CORES: Final = frozenset({"v2", "v3", "v4", "v5p"})
"""Families whose types count cores, two of a chip; a host has up to four chips."""
_ON_HOST: Final = 4


def find_shape(type_: str) -> tuple[int, int] | None:
    """Return the hosts of a slice, and the chips of each: (1, 4) for `v4-8`, (2, 4) for `v4-16`, (1, 8) for `v5litepod-8`.

    None for a text that is not a type. A family that is not known is taken to count cores.
    """
    matched = _TYPE.fullmatch(type_)
    if matched is None:
        return None
    one_core, size = matched[1] in _ONE_CORE, int(matched[2])
    chips = size if one_core else max(size // 2, 1)
    on_host = chips if chips <= (8 if one_core else _ON_HOST) else _ON_HOST
    return -(-chips // on_host), on_host


def is_known(type_: str) -> bool:
    """Return whether the family of a type is known, so that its shape is certain."""
    return type_.partition("-")[0] in _ONE_CORE | _TWO_CORES
