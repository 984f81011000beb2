"""The name of the user, which jobs carry as their owner."""

from __future__ import annotations

import getpass
import os


def owner_name() -> str:
    """Return the user's name, the same on all machines of a person."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid{os.getuid()}"  # as in containers that run as a number without a name
