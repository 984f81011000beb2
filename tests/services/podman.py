"""The real podman of this machine: its settings for the tests, the image that tests run in, and its command line."""

from __future__ import annotations

import subprocess

import pytest

from tests.images_support import INSTALL, TOOLS_FOLDER, tool_environment
from tests.services_support import require

IMAGE = "docker.io/library/python:3.11.14-slim-bookworm"


@pytest.fixture
def podman_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have podman use the tests' own image storage."""
    require("podman with an image", TOOLS_FOLDER, INSTALL)
    assert TOOLS_FOLDER is not None
    for name, value in tool_environment(TOOLS_FOLDER).items():
        monkeypatch.setenv(name, value)


def podman(*words: str) -> str:
    return subprocess.run(["podman", *words], check=True, capture_output=True, text=True).stdout
