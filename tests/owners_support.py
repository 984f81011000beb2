"""Files of another user, for tests that run as root; the rule itself is tested without one in `test_owners.py`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

STRANGER = 12345


def give_away(*paths: Path) -> None:
    """Make these files, folders and links another user's."""
    if os.geteuid() != 0:
        pytest.skip("only root can make files of another user; test_owners.py tests the rule without")
    for path in paths:
        os.chown(path, STRANGER, STRANGER, follow_symlinks=False)
