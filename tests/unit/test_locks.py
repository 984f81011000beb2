"""The lock files can be installed from any index, together, and meet pyproject.toml's requirements."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOCKS = sorted((ROOT / "locks").glob("*.txt"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

_PIN = re.compile(r"(?P<name>[A-Za-z0-9._-]+)(\[[^]]*\])?==(?P<version>\S+)( ;(?P<marker> [^\\]+))? \\")
_HASH = re.compile(r"    --hash=sha256:[0-9a-f]{64}( \\)?")


def read_pins(text: str) -> dict[str, set[str]]:
    """Return package → versions. Raises ValueError at any line except pins and hashes, such as an index or a URL."""
    pins: dict[str, set[str]] = {}
    for line in text.splitlines():
        if pin := _PIN.fullmatch(line):
            pins.setdefault(pin["name"].lower(), set()).add(pin["version"])
        elif not _HASH.fullmatch(line):
            raise ValueError(line)
    return pins


def names_of(requirements: list[object]) -> set[str]:
    names = (re.match(r"[A-Za-z0-9._-]+", item) for item in requirements if isinstance(item, str))
    return {name[0].lower() for name in names if name} - {"research-runtime"}


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.stem)
def test_lock_holds_only_pins_with_hashes(lock: Path) -> None:
    assert read_pins(lock.read_text())


@pytest.mark.parametrize(
    "line",
    ["--index-url https://packages.example/simple", "huey", "huey==3.5.4", "huey @ https://packages.example/huey.whl"],
)
def test_line_that_names_a_place_or_lacks_a_hash_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match=re.escape(line)):
        read_pins(line)


def test_locks_agree_on_every_version() -> None:
    versions: dict[str, set[str]] = {}
    for lock in LOCKS:
        for name, pinned in read_pins(lock.read_text()).items():
            versions.setdefault(name, set()).update(pinned)

    assert {name: pinned for name, pinned in versions.items() if len(pinned) > 1} == {}


IMPORTED_AS = {"google-auth": "google", "google-cloud-pubsub": "google", "pyyaml": "yaml"}
"""Packages whose modules have another name."""
RUN_AS = {"ray": "exec ray start "}
"""Packages that a module of ours runs as a command, in its words."""


def find_unused(requirements: list[object], sources: str) -> set[str]:
    """Return the required packages that these sources neither import nor run."""
    unused = set()
    for name in names_of(requirements):
        module = IMPORTED_AS.get(name, name.replace("-", "_"))
        imports = rf"^\s*(?:import|from) {module}\b|import_module\(\"(?:\w+\.)*{module}\b"
        if not re.search(imports, sources, re.MULTILINE) and RUN_AS.get(name, "\0") not in sources:
            unused.add(name)
    return unused


def test_each_extra_is_of_a_package_that_a_module_imports_or_runs() -> None:
    files = [each for folder in ("runtime", "infra") for each in sorted((ROOT / folder).rglob("*.py"))]
    sources = "\n".join(each.read_text() for each in files)

    extras = {name: wanted for name, wanted in PROJECT["project"]["optional-dependencies"].items() if name != "all"}

    assert {name: find_unused(wanted, sources) for name, wanted in extras.items()} == {name: set() for name in extras}
    # No extra may be empty: it would promise what is not there.
    assert [name for name, wanted in extras.items() if not wanted] == []
    assert PROJECT["project"]["optional-dependencies"]["all"] == [f"research-runtime[{','.join(sorted(extras))}]"]
    assert {each.stem for each in LOCKS} == {*extras, "all", "base", "bench", "build", "cluster", "dev", "lock"}


def test_extra_whose_package_nothing_imports_is_found() -> None:
    assert find_unused(["beaker-py>=2.5", "boto3"], "import boto3\n") == {"beaker-py"}
    assert find_unused(["boto3", "ray[default]"], 'import_module("obstore.auth.boto3")\n# ray\n') == {"ray"}


def test_each_extra_has_a_lock_with_all_it_asks_for() -> None:
    base = names_of(PROJECT["project"]["dependencies"])
    extras = {name: names_of(wanted) for name, wanted in PROJECT["project"]["optional-dependencies"].items()}
    groups = {
        name: names_of(wanted) for name, wanted in PROJECT["dependency-groups"].items() if name in {"dev", "bench"}
    }

    for name, wanted in ({"base": set()} | extras | groups).items():
        locked = set(read_pins((ROOT / "locks" / f"{name}.txt").read_text()))
        assert wanted | base <= locked, name
