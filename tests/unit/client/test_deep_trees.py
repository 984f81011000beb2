"""Trees that are too deep for Python's recursion and for paths, below jobs and in the user's own code."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.client.fetch import RemoteFile, fetch
from runtime.errors import NotPossible
from runtime.jobs.hosts.local import LocalHost
from runtime.jobs.hosts.remote import PROGRAM, render_agent
from runtime.shim.tree_walk import MOST_PARTS
from runtime.snapshots.snapshot import SnapshotRules, survey
from runtime.snapshots.worker_code import digest_sources
from runtime.tasks.workflow_check import _find_sources
from tests.deep_support import cleared, dig
from tests.jobs_support import Terminal, open_terminal
from tests.shim_support import each_python

__all__ = ["cleared"]

pytestmark = pytest.mark.nightly


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Terminal]:
    with open_terminal(tmp_path, monkeypatch, capsys) as terminal:
        yield terminal


def make_deep(folder: Path) -> Path:
    subprocess.run(["sh", "-c", dig(str(folder))], check=True)
    return folder


DEEP = "; ".join(map(dig, ("here", "$RUNTIME_OUTPUT_DIR", "$RUNTIME_CHECKPOINT_DIR")))


def test_fetch_brings_what_is_not_too_deep_and_names_the_rest(run: Terminal) -> None:
    job = run.finish(f"set -e; {dig('$RUNTIME_OUTPUT_DIR')}; echo x > $RUNTIME_OUTPUT_DIR/f")

    said = run("fetch", job, "home")

    assert said.code == 0, said.err
    assert said.out == "home/f\t2B\tfetched\nhome/near\t0B\tfetched\n"
    assert f"left out: `{'/'.join(['d'] * 50)}" in said.err
    assert "lies too deep; it stays where the command wrote it" in said.err


def test_run_of_an_array_whose_folder_makes_a_name_too_deep_is_left_out(tmp_path: Path) -> None:
    name = "d/" * (MOST_PARTS - 1) + "f"
    places = {place: RemoteFile(name=name, place=place, size_bytes=1) for place in (name, f"7/{name}", f"{name}/")}

    assert [each.too_deep for each in places.values()] == [False, True, True]
    assert list(fetch(LocalHost(str(tmp_path)).files, [places[f"7/{name}"]], tmp_path / "home")) == []


@pytest.mark.slow
def test_gc_removes_a_job_with_deep_trees(run: Terminal) -> None:
    job = run.finish(f"set -e; {DEEP}")
    status = run("status", job, "-o", "json").json["state"]

    dry = run("gc", "--on", "local", "--older-than", "0s", "--dry-run")
    gone = run("gc", "--on", "local", "--older-than", "0s", "--yes")

    assert (status, dry.code, gone.code, run.folder(job).exists()) == ("succeeded", 0, 0, False), gone.err
    assert job in gone.out


@pytest.mark.parametrize("python", each_python())
def test_agent_of_another_machine_lists_and_removes_a_deep_tree(tmp_path: Path, python: str) -> None:
    make_deep(tmp_path / "root" / "jobs" / "j")
    requests = b'{"id": 1, "do": "tree", "args": ["jobs/j"]}\n{"id": 2, "do": "remove", "args": ["jobs/j"]}\n'

    said = subprocess.run(
        [python, "-c", PROGRAM],
        input=render_agent("=mark=", str(tmp_path / "root")) + requests,
        capture_output=True,
        check=True,
    )

    assert said.stderr == b""
    deep = "/".join(["d"] * MOST_PARTS)
    assert f'[["{deep}/", 0], ["near", 0]]' in said.stdout.decode()
    assert list((tmp_path / "root" / "jobs").iterdir()) == []


# the user's own code


def test_tree_that_is_too_deep_is_no_snapshot(tmp_path: Path) -> None:
    make_deep(tmp_path / "code")

    with pytest.raises(NotPossible, match="lies in more than 254 folders, which is too deep for a snapshot"):
        survey(tmp_path / "code", SnapshotRules())

    (tmp_path / "code" / ".gitignore").write_text("d/\n")
    assert [each.name for each in survey(tmp_path / "code", SnapshotRules())] == [".gitignore", "near"]


def test_tree_of_git_that_is_too_deep_is_no_snapshot(tmp_path: Path) -> None:
    place = deep = tmp_path / "code"
    place.mkdir()
    for _ in range(1500):
        deep /= "d"
        deep.mkdir()
    (deep / "file").write_text("x")
    subprocess.run(["git", "init", "-q", str(place)], check=True)

    with pytest.raises(NotPossible, match="lies in more than 254 folders, which is too deep for a snapshot"):
        survey(place, SnapshotRules())

    (place / ".gitignore").write_text("d/\n")
    assert [each.name for each in survey(place, SnapshotRules())] == [".gitignore"]


def test_identity_of_code_with_a_deep_tree_is_found(tmp_path: Path) -> None:
    make_deep(tmp_path / "lab")
    (tmp_path / "lab" / "__init__.py").write_text("x = 1\n")

    assert (digest_sources(tmp_path / "lab") or "").startswith("sha256:")
    assert _find_sources("lab", [str(tmp_path)]) == [tmp_path / "lab" / "__init__.py"]
