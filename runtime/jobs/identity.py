"""Who launches: the name that jobs carry as their owner."""

from __future__ import annotations

import getpass
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


def owner_name() -> str:
    """Whose jobs these are; on every machine of a person the same."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid{os.getuid()}"  # as in containers that run as a number without a name
