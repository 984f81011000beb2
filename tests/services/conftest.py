"""What a failed test shows of the servers that it ran against."""

from __future__ import annotations

from collections.abc import Generator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add what the server of a failed test tells of itself, while it still runs."""
    report = yield
    if report.when == "call" and report.failed:
        used = getattr(item, "funcargs", {})
        # A bench tells of its server too.
        if name := next((each for each in ("bench", "head", "ray_cluster") if hasattr(used.get(each), "tell")), None):
            try:
                told = used[name].tell()
            except Exception as problem:  # the server's, which may be what failed
                told = f"nothing: {problem!r}"
            report.sections.append((f"what `{name}` tells", told))
    return report
