"""Fixtures for every suite: real components, golden files, and a clean environment."""

from __future__ import annotations

import gc
import importlib.util
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from tests import services_support
from tests.copies_support import Copies
from tests.services_support import MotoServer, PubsubEmulator, RedisServer, find_emulator_jar, pass_over, require

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.kubernetes_support import Kubernetes
    from tests.ssh_support import SshServer

# Make failed asserts of the suite that ships with the package show their values, like those in this folder.
pytest.register_assert_rewrite("runtime.testing.launchers")

# The duration of an example depends more on the machine than on the code. Examples are the same in each run, so that a
# change is judged by itself; `--hypothesis-profile=fresh` draws others, as nightly.yml does. What they find is pinned
# with `@example`.
for name, same_each_time, examples in (("fresh", False, 500), ("tests", True, 50)):
    hypothesis.settings.register_profile(
        name,
        deadline=None,
        derandomize=same_each_time,
        max_examples=examples,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
hypothesis.settings.load_profile("tests")


def _draw_no_constants_of_loaded_modules() -> None:
    """Keep Hypothesis from drawing texts and numbers that occur in the code: which modules are loaded depends on the tests
    that ran before in the same process, and with it every further example. There is no setting for this."""
    from hypothesis.internal.conjecture import providers

    providers._get_local_constants = lambda: providers._local_constants  # type: ignore[attr-defined]


GOLDEN_FOLDER = Path(__file__).parent / "golden"

INSTALL_SERVICES = "make services"

_homes = itertools.count()

# The longest files of `make test-services` begin first, so that none still runs when all other workers have finished.
# Kubernetes comes after four others, as its build may still run.
LONGEST = ("launcher_ray", "launcher_slurm", "images", "task_containers", "launcher_kubernetes", "containers")
_OF_RAY = re.compile(r"tests/services/test_(launcher_ray|ray_\w+|cluster_\w+)\.py")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-goldens", action="store_true", help="rewrite the golden files instead of comparing")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Give all files with Ray heads to one worker: each head is some twenty processes, and several at a time would take the
    CPUs from the tests beside them."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class OneHeadAtATime(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = str(super()._split_scope(nodeid))
            return "ray" if _OF_RAY.fullmatch(file) else file

    return OneHeadAtATime(config, log)


def _find_python_without_scripts(config: pytest.Config) -> None:
    """Put the interpreter itself before a version manager's `python3`, a script that starts twenty processes each time."""
    found = shutil.which("python3")
    if found is None or not Path(found).read_bytes().startswith(b"#!"):
        return
    folder = Path(tempfile.mkdtemp(prefix="python-"))
    config.add_cleanup(lambda: shutil.rmtree(folder))
    own = subprocess.run([found, "-c", "import sys; print(sys.executable)"], capture_output=True, text=True, check=True)
    for name in ("python", "python3"):
        (folder / name).symlink_to(own.stdout.strip())
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "golden: compares with a golden file (set by the `golden` fixture)")
    if config.getoption("--hypothesis-profile") in (None, "tests"):
        _draw_no_constants_of_loaded_modules()
    _find_python_without_scripts(config)
    # A shell ignores SIGINT in background processes; tests run in the background would pass that on to their children.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Rewriting asserts dominates collection time, so the byte code is kept even if Python is told to write none.
    sys.dont_write_bytecode = False


def pytest_collection_finish() -> None:
    # All that is loaded by now stays, so the collector need not look at it during each test.
    gc.collect()
    gc.freeze()
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by the fixtures they use, services as `service` and golden files as `golden`, and variants as `nightly`."""
    services = {"pubsub_server", "pubsub_emulator", "moto_process", "moto_server", "redis_server"}
    services |= {"ssh_server", "kubernetes", "kubernetes_node", "shared_ray"}
    variants = Counter[str]()
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        if fixtures & services:
            item.add_marker(pytest.mark.service)
        if "golden" in fixtures:
            item.add_marker(pytest.mark.golden)
        daily = item.get_closest_marker("daily")
        if daily is not None:
            test = item.nodeid.partition("[")[0]
            variants[test] += 1
            if variants[test] > daily.args[0]:
                item.add_marker(pytest.mark.nightly)
    places = {Path(__file__).parent / f"services/test_{name}.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Have a test without the mark `service` fail when it uses a real component, also through a shared fixture."""
    services_support.unmarked_test = None if item.get_closest_marker("service") else item.nodeid


@pytest.fixture(autouse=True)
def _no_settings_of_the_developer(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Hide the developer's stack and data folder, and earlier tests' leftovers, from every test."""
    for name in list(os.environ):
        if name.startswith("RUNTIME_") and name != "RUNTIME_REQUIRE_SERVICES":
            monkeypatch.delenv(name)
    home = tmp_path_factory.getbasetemp() / f"home{next(_homes)}"
    monkeypatch.setenv("XDG_DATA_HOME", str(home / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "config"))


@pytest.fixture(autouse=True)
def _umask_stays() -> Iterator[None]:
    """Fail a test that leaves a changed umask, which would give files of later tests other modes."""
    before = os.umask(0o022)
    os.umask(before)
    yield
    after = os.umask(before)
    assert oct(after) == oct(before), "the test has changed the umask of this process"


@pytest.fixture
def own_umask() -> Iterator[None]:
    """Restore the process umask after a test whose code sets it."""
    before = os.umask(0o022)
    os.umask(before)
    yield
    os.umask(before)


@pytest.fixture(scope="session")
def copies() -> Iterator[Copies]:
    """Runs programs in copies of a process that has loaded the client."""
    with Copies() as opened:
        yield opened


@pytest.fixture(scope="session")
def pubsub_server() -> Iterator[PubsubEmulator]:
    """The running Pub/Sub emulator; sets no environment. Most tests want `pubsub_emulator`."""
    jar = find_emulator_jar()
    require("the Pub/Sub emulator", jar, INSTALL_SERVICES)
    require("a Java runtime", shutil.which("java"), INSTALL_SERVICES)
    emulator = PubsubEmulator(jar).start()
    yield emulator
    emulator.stop()


@pytest.fixture
def pubsub_emulator(pubsub_server: PubsubEmulator, monkeypatch: pytest.MonkeyPatch) -> PubsubEmulator:
    """The Pub/Sub emulator, empty, with PUBSUB_EMULATOR_HOST set for this test and its children."""
    if pubsub_server.pid is None:
        pubsub_server.start()
    pubsub_server.reset()
    for name, value in pubsub_server.environment.items():
        monkeypatch.setenv(name, value)
    return pubsub_server


@pytest.fixture(scope="session")
def moto_process() -> Iterator[MotoServer]:
    """The running moto server; sets no environment. Most tests want `moto_server`."""
    require("moto", importlib.util.find_spec("moto"), "make test")
    server = MotoServer().start()
    yield server
    server.kill()


@pytest.fixture
def moto_server(moto_process: MotoServer, monkeypatch: pytest.MonkeyPatch) -> MotoServer:
    """moto's S3 and EC2, empty, with endpoint and credentials in the environment of this test and its children."""
    moto_process.reset()
    for name, value in moto_process.environment.items():
        monkeypatch.setenv(name, value)
    return moto_process


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """A running Redis without persistence."""
    require("Redis", shutil.which("redis-server"), INSTALL_SERVICES)
    server = RedisServer().start()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def kubernetes() -> Iterator[Kubernetes]:
    """A Kubernetes without nodes: API, admission and controllers are real, but no pod ever runs."""
    yield from _running_kubernetes(node=False)


@pytest.fixture(scope="session")
def kubernetes_node() -> Iterator[Kubernetes]:
    """A Kubernetes with one node that runs pods."""
    yield from _running_kubernetes(node=True)


@pytest.fixture(scope="session")
def python_image(kubernetes_node: Kubernetes, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An image with a Python, on the node."""
    from tests.images_support import INSTALL, TOOLS_FOLDER, tool_environment
    from tests.kubernetes_support import PYTHON_IMAGE, run_script

    require("an image with Python", TOOLS_FOLDER, INSTALL)
    assert TOOLS_FOLDER is not None
    archive = tmp_path_factory.mktemp("image") / "python.tar"
    base = "docker.io/library/python:3.11.14-slim-bookworm"
    subprocess.run(
        ["buildah", "push", "--quiet", base, f"docker-archive:{archive}:{PYTHON_IMAGE}"],
        check=True,
        capture_output=True,
        env={**os.environ, **tool_environment(TOOLS_FOLDER)},
    )
    imported = run_script("import", str(kubernetes_node.folder), str(archive))
    assert imported.returncode == 0, imported.stderr
    archive.unlink()
    return PYTHON_IMAGE


def _running_kubernetes(*, node: bool) -> Iterator[Kubernetes]:
    from tests import kubernetes_support

    if node and os.geteuid() != 0:
        pass_over("a Kubernetes node makes namespaces, mounts and a bridge, which takes root")
    missing = kubernetes_support.find_missing(node=node)
    require(missing or "Kubernetes", not missing, kubernetes_support.INSTALL)
    running = kubernetes_support.Kubernetes(node=node).start()
    yield running
    running.stop()


@pytest.fixture
def ssh_server(tmp_path: Path) -> Iterator[SshServer]:
    """A running sshd private to this test, with an empty home; its client knows it as `box`."""
    from tests.ssh_support import INSTALL, SshServer, missing_for_ssh

    missing = missing_for_ssh()
    require(", ".join(missing) or "OpenSSH", not missing, INSTALL)
    server = SshServer(tmp_path / "ssh").start()
    yield server
    server.drop_connections()
    server.stop()


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare text with a golden file: `golden("slurm/array.sh", text)`; `make goldens` rewrites the file."""
    return GoldenFiles(GOLDEN_FOLDER, update=request.config.getoption("--update-goldens")).check


class GoldenFiles:
    """Files that rendered text must equal byte for byte."""

    def __init__(self, folder: Path, *, update: bool) -> None:
        self._folder, self._update = folder, update

    def check(self, name: str, text: str) -> None:
        path = self._folder / name
        if self._update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            return
        if not path.exists():
            pytest.fail(f"no golden file {path.name}; write it with `make goldens` and review it", pytrace=False)
        assert text == path.read_text(), f"{name} differs; if that is meant, run `make goldens` and review the diff"
