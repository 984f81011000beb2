"""`python -m infra check|preflight`: what an operator asks before anything is made."""

from __future__ import annotations

from collections.abc import Sequence


def main(args: Sequence[str]) -> int:
    """Run the command and return its exit code; errors are printed."""
    raise NotImplementedError
