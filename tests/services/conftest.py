"""The Ray that several files share, and what a failed test shows of the servers that it ran against."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from runtime.testing.metadata import MetadataServer
from tests.fakes.google import GoogleServer
from tests.services.ray_cluster import HEAD_CPUS, NODE_CPUS, RayCluster
from tests.services_support import MotoServer


@pytest.fixture(scope="session")
def google() -> Iterator[GoogleServer]:
    server = GoogleServer().start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def machine() -> Iterator[MetadataServer]:
    with MetadataServer() as server:
        yield server


@pytest.fixture(scope="session")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a `conda` that makes an environment with one tool, which prints its own path."""
    folder = tmp_path_factory.mktemp("tools")
    make = 'mkdir -p "$5/bin"; printf "#!/bin/sh\\necho \\$0\\n" > "$5/bin/tool"; chmod 755 "$5/bin/tool"'
    (folder / "conda").write_text(f"#!/bin/sh\n{make}\n")
    (folder / "conda").chmod(0o755)
    return folder


@pytest.fixture(scope="session")
def shared_ray(
    moto_process: MotoServer, google: GoogleServer, machine: MetadataServer, tools: Path
) -> Iterator[RayCluster]:
    """A head and node 1, for all files that do not kill the head. A test that starts or kills nodes leaves these two."""
    path = f"{tools}:{os.environ['PATH']}"
    cluster = RayCluster({**moto_process.environment, **google.environment, **machine.environment, "PATH": path})
    try:
        cluster.start_head(HEAD_CPUS)
        cluster.start_node(1, NODE_CPUS)
        yield cluster
    finally:
        cluster.close()


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
