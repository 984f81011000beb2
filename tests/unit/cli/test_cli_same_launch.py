"""The same launch stays the same: what our own commands write is no code, and what does differ is said in a line."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.client.jobs import launch_diff
from runtime.snapshots.snapshot import digest_files, make_snapshot
from tests.jobs_support import Terminal, open_terminal

SCRIPT = 'echo out > "$RUNTIME_OUTPUT_DIR/model"'


@pytest.fixture(params=["git", "plain"])
def run(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[Terminal]:
    with open_terminal(tmp_path, monkeypatch, capsys) as terminal:
        if request.param == "git":
            subprocess.run(["git", "init", "-q", str(terminal.tree)], check=True)
        yield terminal


def launch(run: Terminal, *words: str, name: str = "train") -> tuple[str, list[str]]:
    """Launch; return the job and the lines about the last launch."""
    said = run("launch", "--on", "local", "--name", name, *words)
    assert said.code == 0, said.err
    return said.out.strip(), [line for line in said.err.splitlines() if "last launch" in line]


@pytest.mark.parametrize("to", [[], ["results"], ["deep/er/results"]])
def test_fetch_into_the_project_leaves_the_same_launch_the_same_job(run: Terminal, to: list[str]) -> None:
    job = run.finish(SCRIPT)
    fetched = run("fetch", job, *to, "-o", "json").json
    again = run("fetch", job, *to, "-o", "json").json

    assert [each["what"] for each in (*fetched, *again)] == ["fetched", "same"]
    assert (run.tree / fetched[0]["path"]).read_text() == "out\n"
    assert run.launch(SCRIPT) == job


def test_fetch_into_a_folder_that_was_there_marks_nothing(run: Terminal) -> None:
    (run.tree / "results").mkdir()
    job = run.finish(SCRIPT)
    run("fetch", job, "results")
    assert sorted(each.name for each in (run.tree / "results").iterdir()) == ["model"]
    assert run.launch(SCRIPT) != job


def test_fetch_of_a_file_with_the_markers_name_brings_it_as_it_is(run: Terminal) -> None:
    script = 'echo "*.tmp" > "$RUNTIME_OUTPUT_DIR/.gitignore"'
    job = run.finish(script)
    fetched = run("fetch", job, "results", "-o", "json")
    assert (fetched.code, [each["what"] for each in fetched.json]) == (0, ["fetched"])
    assert (run.tree / "results" / ".gitignore").read_text() == "*.tmp\n"


def test_bundle_in_the_project_leaves_the_same_launch_the_same_bundle(run: Terminal) -> None:
    (run.tree / "runtime.toml").write_text('[targets.hpc]\nkind = "slurm"\nscratch = "/scratch"\n')
    words = ("launch", "--on", "hpc", "-o", "json", "--", "python3", "main.py")
    first, second = (run(*words[:3], "--export", folder, *words[3:]) for folder in ("one", "two"))
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert first.json["job"] == second.json["job"]


@pytest.mark.parametrize("place", ["data", "records"])
def test_own_folders_inside_the_project_leave_the_same_launch_the_same_job(
    run: Terminal, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    if place == "data":
        monkeypatch.setenv("RUNTIME_DATA_DIR", str(run.tree / "state"))
        run.data = run.tree / "state"
    else:
        (run.tree / "runtime.toml").write_text(f'[targets.local]\nkind = "local"\nrecords = "{run.tree}/records"\n')
    first, _ = launch(run, "true")
    assert launch(run, "true")[0] == first


def test_launch_that_is_not_the_last_one_says_what_differs(run: Terminal) -> None:
    for name in ("a.py", "b.py", "gone.py"):
        (run.tree / name).write_text("1\n")
    first, nothing = launch(run, "true")
    (run.tree / "a.py").write_text("2\n")
    (run.tree / "b.py").chmod(0o755)
    (run.tree / "gone.py").unlink()
    for number in range(5):
        (run.tree / f"new{number}.py").write_text("3\n")
    _, (files,) = launch(run, "true")
    _, (fields,) = launch(run, "--cpus", "1", "--env", "A=secret-looking", "true")

    assert nothing == []
    assert files.endswith(
        f"not the last launch of `train` ({first[:10]}): 2 files changed (a.py, b.py); "
        "5 files added (new0.py, new1.py, new2.py and 2 more); 1 file removed (gone.py)"
    )
    assert fields.endswith(": different env, resources.cpus")
    assert "secret-looking" not in "".join(each.read_text() for each in (run.data / "last-launches").iterdir())


def test_launch_that_is_the_last_one_or_new_by_wish_says_nothing(run: Terminal) -> None:
    launch(run, "true")
    assert launch(run, "true")[1] == []
    assert launch(run, "--again", "true")[1] == []
    assert launch(run, "true", name="another")[1] == []


def test_difference_goes_to_stderr_and_not_into_json(run: Terminal) -> None:
    launch(run, "true")
    said = run("launch", "--on", "local", "--name", "train", "-o", "json", "false")
    assert (said.json["new"], "different command" in said.err) == (True, True)


def test_launch_from_another_folder_is_not_compared(run: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    launch(run, "true")
    other = run.tree.parent / "other"
    other.mkdir()
    (other / "salt").write_bytes(os.urandom(12))
    monkeypatch.chdir(other)
    assert launch(run, "true")[1] == []


def test_note_that_cannot_be_read_stops_no_launch(run: Terminal) -> None:
    launch(run, "true")
    (note,) = (run.data / "last-launches").iterdir()
    unreadable = ["", "{", "[]", '{"version": 1}', '{"version": 1, "job": 1, "fields": [], "files": {}}']
    for number, content in enumerate(unreadable):
        note.write_text(content)
        assert launch(run, "echo", str(number))[1] == [], content
        assert json.loads(note.read_text())["fields"], content


def test_notes_are_few_and_private(run: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_diff, "KEPT", 2)
    for name in ("a", "b", "c"):
        launch(run, "true", name=name)
    notes = list((run.data / "last-launches").iterdir())
    assert (len(notes), {each.stat().st_mode & 0o077 for each in notes}) == (2, {0})


def test_digest_files_is_of_each_file_alone_whatever_its_name(tmp_path: Path) -> None:
    long = "d" * 90 + "/" + "e" * 90
    (tmp_path / long).parent.mkdir()
    for name, content in {"a": b"", "b": b"x" * 512, "c": b"x" * 513, long: b"y"}.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "link").symlink_to("f" * 200)
    before = digest_files(make_snapshot(tmp_path))
    (tmp_path / long).write_bytes(b"z")
    after = digest_files(make_snapshot(tmp_path))
    assert sorted(before) == sorted(["a", "b", "c", "link", long])
    assert len(set(before.values())) == 5
    assert {name for name in before if before[name] != after[name]} == {long}
