"""Scratch roots, their locks, and removal."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from runtime.errors import InfrastructureFailure
from runtime.worker.attempts import scratch


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"TMPDIR": "made"},
        {"TMPDIR": "made/../made/"},
        {"TMPDIR": "missing"},
        {"TMPDIR": "", "TEMP": "made"},
        {"TMPDIR": "missing", "TMP": "made"},
        {"TMPDIR": "file", "TEMP": "missing", "TMP": "other"},
    ],
)
def test_base_lies_in_the_folder_that_tempfile_chooses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for folder in ("made", "other"):
        (tmp_path / folder).mkdir()
    (tmp_path / "file").touch()
    for name in ("TMPDIR", "TEMP", "TMP"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value and f"{tmp_path}/{value}")
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.delitem(sys.modules, "tempfile")

    assert scratch.default_base() == f"{tempfile.gettempdir()}/research-runtime-{os.getuid()}"


def test_base_lies_in_the_folder_that_a_program_has_set_in_tempfile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    assert scratch.default_base() == f"{tmp_path}/research-runtime-{os.getuid()}"


def test_base_whose_name_is_taken_is_another_that_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    name = tmp_path / f"research-runtime-{os.getuid()}"
    name.symlink_to(tmp_path)

    root = scratch.open_root("w-1")
    assert Path(root.path).parent.name.startswith(f"{name.name}-")
    assert Path(root.path).parent.stat().st_mode & 0o777 == 0o700
    assert scratch.remove_leftovers() == []
    root.close()
    (Path(root.path).parent / "w-2").mkdir()
    assert scratch.remove_leftovers() == [f"{Path(root.path).parent}/w-2"]


def test_root_is_private_and_goes_when_it_is_closed(tmp_path: Path) -> None:
    base = str(tmp_path / "base")
    root = scratch.open_root("w-1", base=base)
    assert Path(root.path).stat().st_mode & 0o777 == 0o700
    Path(root.path, "left").write_text("x")
    root.close()
    root.close()
    assert list(Path(base).iterdir()) == []


def test_root_of_living_worker_is_no_leftover_and_its_name_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch, "CLEANED_S", 0.0)
    base = str(tmp_path / "base")
    root = scratch.open_root("w-1", base=base)
    assert scratch.remove_leftovers(base) == []
    with pytest.raises(InfrastructureFailure, match="in use"):
        scratch.open_root("w-1", base=base)
    assert Path(root.path).is_dir()
    root.close()


def test_root_of_killed_worker_is_removed_and_its_name_is_free(tmp_path: Path) -> None:
    base = str(tmp_path / "base")
    code = (
        "import sys, time; from pathlib import Path; from runtime.worker.attempts import scratch\n"
        "root = scratch.open_root('w-1', base=sys.argv[1])\n"
        "Path(root.path, 'deep').mkdir(); Path(root.path, 'deep', 'file').write_text('x'); print(flush=True)\n"
        "time.sleep(300)\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    with subprocess.Popen([sys.executable, "-c", code, base], stdout=subprocess.PIPE, env=environ) as worker:
        assert worker.stdout
        worker.stdout.readline()
        living = scratch.open_root("w-2", base=base)
        assert scratch.remove_leftovers(base) == []
        worker.kill()
    assert scratch.remove_leftovers(base) == [f"{base}/w-1"]
    assert sorted(path.name for path in Path(base).iterdir()) == ["w-2", "w-2.lock"]
    scratch.open_root("w-1", base=base).close()
    living.close()


def test_leftover_folder_without_lock_file_is_removed(tmp_path: Path) -> None:
    (tmp_path / "w-9" / "deep").mkdir(parents=True)
    assert scratch.remove_leftovers(str(tmp_path)) == [str(tmp_path / "w-9")]
    assert list(tmp_path.iterdir()) == []


def test_leftovers_of_missing_base_are_none(tmp_path: Path) -> None:
    assert scratch.remove_leftovers(str(tmp_path / "nowhere")) == []


def test_base_that_others_can_write_is_refused(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    base.chmod(0o777)
    with pytest.raises(InfrastructureFailure, match="not safe") as refused:
        scratch.open_root("w-1", base=str(base))
    assert "drwxrwxrwx" in refused.value.facts[0]


def test_base_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "base").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InfrastructureFailure):
        scratch.open_root("w-1", base=str(tmp_path / "base"))


def test_remove_tree_takes_read_only_folders_and_leaves_what_links_point_to(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("x")
    tree = tmp_path / "tree"
    (tree / "shut").mkdir(parents=True)
    (tree / "shut" / "file").write_text("x")
    (tree / "link").symlink_to(kept)
    (tree / "dangling").symlink_to("/nowhere")
    (tree / "shut").chmod(0o500)
    scratch.remove_tree(str(tree))
    assert not tree.exists()
    assert (kept / "file").exists()
    scratch.remove_tree(str(tree))


def test_remove_empty_stops_at_the_first_folder_that_is_not(tmp_path: Path) -> None:
    (tmp_path / "a" / "b" / "c").mkdir(parents=True)
    (tmp_path / "a" / "file").write_text("x")
    scratch.remove_empty(str(tmp_path / "a" / "b" / "c"), parents=5)
    assert (tmp_path / "a").is_dir()
    assert not (tmp_path / "a" / "b").exists()


def test_new_file_is_one_written_since(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    file = tmp_path / "sub" / "checkpoint"
    file.write_text("x")
    now = time.time()
    os.utime(file, (now - 100, now - 100))
    assert not scratch.has_new_file(str(tmp_path), now - 50)
    assert scratch.has_new_file(str(tmp_path), now - 150)
    assert not scratch.has_new_file(str(tmp_path / "missing"), 0)
