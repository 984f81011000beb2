"""Trees that are too deep for Python's recursion and for paths: walked, removed, and left by the commands of jobs."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.shim import run_loop, tree_walk
from runtime.shim.file_manifest import look
from runtime.shim.tree_walk import KEPT_OPEN, MOST_PARTS, remove_folder, walk
from tests.deep_support import cleared, dig
from tests.fakes.gcs import GcsServer
from tests.jobs_support import folder_for_all
from tests.shim_support import each_python, make_job
from tests.unit.shim.test_shim_bucket import MakeJob, maker

pytestmark = pytest.mark.nightly

__all__ = ["cleared"]

SOURCE = Path(tree_walk.__file__).read_text()


@pytest.fixture(params=each_python())
def python(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def deep(tmp_path: Path) -> Path:
    subprocess.run(["sh", "-c", dig(str(tmp_path / "deep"))], check=True)
    return tmp_path / "deep"


@pytest.fixture
def in_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeJob]:
    server = GcsServer().start()
    server.make_bucket("lab")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
    yield maker(tmp_path, sys.executable)
    server.stop()


# removing


def test_deep_tree_is_removed_with_few_descriptors(deep: Path) -> None:
    script = (
        "import resource, sys\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({KEPT_OPEN + 10}, {KEPT_OPEN + 10}))\n"
        "from runtime.shim.tree_walk import remove_folder\n"
        "assert remove_folder(sys.argv[1]) is None\n"
    )

    subprocess.run([sys.executable, "-c", script, str(deep)], check=True)

    assert not deep.exists()


def test_deep_tree_with_files_on_each_level_is_removed_and_links_are_not_followed(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("x")
    place = tmp_path / "tree"
    for level in range(3 * KEPT_OPEN):
        for name in ("a", "b", "c"):
            (place / name).mkdir(parents=True)
            (place / name / "file").write_text("x")
            (place / name / "link").symlink_to(kept)
        (place / f"link{level}").symlink_to("/nowhere")
        place /= "abc"[level % 3]

    assert remove_folder(str(tmp_path / "tree")) is None

    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "kept"]


def test_file_link_and_nothing_are_removed_like_a_folder(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    (tmp_path / "file").write_text("x")

    assert [remove_folder(str(tmp_path / name)) for name in ("file", "link", "none", "none/such")] == [None] * 4

    assert list(tmp_path.iterdir()) == [tmp_path / "kept"]


@pytest.mark.parametrize("mode", [0o000, 0o100, 0o300, 0o400, 0o500])
def test_folders_that_are_closed_to_their_owner_are_removed(mode: int) -> None:
    python = shutil.which("python3", path="/usr/local/bin:/usr/bin")  # root's own may be closed to others
    if python is None:
        pytest.skip("there is no Python that every user may run")
    script = (
        "import os\n"
        "os.makedirs('tree/shut/below')\n"
        "open('tree/shut/file', 'w').close()\n"
        f"for name in ('tree/shut/below', 'tree/shut', 'tree'): os.chmod(name, {mode})\n"
        "assert os.geteuid() != 0\n"
        "problem = remove_folder('tree')\n"
        "assert problem is None, problem\n"
    )
    with folder_for_all() as base:
        base.chmod(0o777)
        user = {"user": 12345} if os.geteuid() == 0 else {}

        subprocess.run([python, "-"], input=f"{SOURCE}\n{script}", text=True, check=True, cwd=base, **user)

        assert not list(base.iterdir())


def test_what_cannot_be_removed_is_named_and_the_rest_goes() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make a file that its owner cannot remove")
    with folder_for_all() as base:
        base.chmod(0o777)
        for name in ("a", "theirs", "z"):
            (base / "tree" / name).mkdir(parents=True)
            (base / "tree" / name / "file").write_text("x")
        for path in (base / "tree", *(base / "tree").glob("[az]*"), *(base / "tree").glob("[az]/file")):
            os.chown(path, 12345, 12345)
        os.seteuid(12345)
        try:
            problem = remove_folder(str(base / "tree"))
        finally:
            os.seteuid(0)

        assert problem is not None
        assert (problem.errno, problem.filename) == (errno.EACCES, str(base / "tree" / "theirs" / "file"))
        assert sorted(path.name for path in base.rglob("*")) == ["file", "theirs", "tree"]


# walking


def test_walk_finds_what_the_system_walk_finds(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "c").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "gone").symlink_to("nowhere")
    (tmp_path / "a" / "file").write_text("x")

    found = [(place, sorted(names), sorted(files)) for place, names, files in walk(str(tmp_path))]

    wanted = [(place, sorted(names), sorted(files)) for place, names, files in os.walk(tmp_path)]
    assert sorted(found) == sorted((str(place), names, files) for place, names, files in wanted)


def test_walk_names_what_lies_too_deep(deep: Path) -> None:
    problems: list[OSError] = []

    found = list(walk(str(deep), problems.append))

    assert len(found) == MOST_PARTS
    assert found[0] == (str(deep), ["d"], ["near"])
    assert [(each.errno, each.filename) for each in problems] == [
        (errno.ENAMETOOLONG, str(deep.joinpath(*["d"] * MOST_PARTS)))
    ]


def test_artifact_leaves_out_what_lies_too_deep(deep: Path) -> None:
    found, left_out = look(str(deep))

    assert found is not None
    assert max(name.count("/") for name in found) == MOST_PARTS - 1
    assert list(left_out.values()) == [f"lies in more than {MOST_PARTS - 1} folders"]


# jobs


def test_job_whose_command_leaves_a_deep_tree_everywhere_succeeds(tmp_path: Path, python: str) -> None:
    places = ("here", "$RUNTIME_OUTPUT_DIR", "$RUNTIME_CHECKPOINT_DIR")
    job = make_job(tmp_path, python, "set -e; " + "; ".join(map(dig, places)), fold=True)

    assert job.run() == 0, job.stderr

    assert job.results() == {0: ("succeeded", 0, 1)}
    assert job.left_over() == []
    assert (job.folder / "ended").exists()
    assert "Traceback" not in job.stderr


@pytest.mark.slow
def test_job_that_fails_with_a_deep_checkpoint_is_tried_again(tmp_path: Path) -> None:
    script = dig("here") + "; [ -e $RUNTIME_CHECKPOINT_DIR/d ] || { " + dig("$RUNTIME_CHECKPOINT_DIR") + "; exit 3; }"
    job = make_job(tmp_path, sys.executable, script, retry={"failure": 1})

    assert job.run() == 0, job.stderr

    assert (job.results(), job.left_over()) == ({0: ("succeeded", 0, 2)}, [])


def test_shim_removes_the_deep_tree_that_a_killed_one_left(tmp_path: Path) -> None:
    job = make_job(
        tmp_path,
        sys.executable,
        "[ -e $RUNTIME_CHECKPOINT_DIR/f ] && exit; " + dig("here") + "; "
        "touch $RUNTIME_CHECKPOINT_DIR/f; kill -9 $PPID; exec sleep 600",
    )
    job.run()

    assert job.run() == 0, job.stderr

    assert (job.results(), job.left_over()) == ({0: ("succeeded", 0, 2)}, [])


def test_job_with_a_bucket_names_what_lies_too_deep_and_keeps_the_rest(in_bucket: MakeJob) -> None:
    script = "set -e; " + "; ".join(map(dig, ("here", "$RUNTIME_OUTPUT_DIR", "$RUNTIME_CHECKPOINT_DIR")))
    job = in_bucket(script + "; echo x > $RUNTIME_OUTPUT_DIR/kept")

    assert job.run() == 0, job.stderr

    run = f"{job.folder.name}/runs/0"
    names = [name for name, _ in job.files.tree("jobs") if name.startswith(f"{run}/output")]
    assert job.results() == {0: ("succeeded", 0, 1)}
    assert sorted(names) == [f"{run}/output/a0001/{name}" for name in ("kept", "near")]
    assert len([line for line in job.stderr.splitlines() if "an output is left out" in line]) == 1
    assert len([line for line in job.stderr.splitlines() if "a checkpoint is left out" in line]) == 1
    assert f"lies {MOST_PARTS} folders deep" in job.stderr


def test_output_whose_name_no_bucket_takes_is_left_out(in_bucket: MakeJob) -> None:
    long = "/".join(["n" * 200] * 6)
    job = in_bucket(f"mkdir -p $RUNTIME_OUTPUT_DIR/{long}; cd $RUNTIME_OUTPUT_DIR; echo x > kept; echo x > {long}/file")

    assert job.run() == 0, job.stderr

    assert job.results() == {0: ("succeeded", 0, 1)}
    assert "an output is left out" in job.stderr
    assert "its name in the record root would have more than 1024 bytes" in job.stderr
    assert job.files.read(f"jobs/{job.folder.name}/runs/0/output/a0001/kept") == b"x\n"


def test_next_attempt_with_a_bucket_begins_with_the_rest_of_a_deep_checkpoint(in_bucket: MakeJob) -> None:
    fails = "{ " + dig("$RUNTIME_CHECKPOINT_DIR") + "; exit 3; }"
    job = in_bucket("[ -e $RUNTIME_CHECKPOINT_DIR/near ] || " + fails, retry={"failure": 1})

    assert job.run() == 0, job.stderr

    assert job.results() == {0: ("succeeded", 0, 2)}


# a failure after the end


def test_failure_while_the_shim_tidies_up_is_said_and_every_step_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    done = []

    def fail() -> None:
        raise RecursionError("too deep")

    run_loop.tidy(3, [fail, lambda: done.append("next")])

    assert done == ["next"]
    assert "cannot tidy up after attempt 3: RecursionError: too deep" in capsys.readouterr().err
