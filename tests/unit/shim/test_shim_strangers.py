"""What other users of the machine leave where the shim looks: nothing of it runs, and nothing of it stops a job."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runtime.client.jobs.gc import LIST_TREES
from runtime.shim.common import DONE, SetupFailed
from runtime.shim.environment import find_environment, prepare, renewed
from runtime.shim.gpus import GpuShare, is_held, read_claim
from runtime.shim.processes import boot_id, owner_of, started_at
from runtime.shim.tree import shared_tree
from runtime.snapshots.snapshot import make_snapshot
from tests.owners_support import STRANGER, give_away
from tests.shim_support import wait_for

MANAGER = """#!/bin/sh
umask
mkdir -p "$5/bin"
echo made >> "$5/bin/tool"
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a job with a lock file, on a machine whose `conda` makes environments."""
    (tmp_path / "conda-here").mkdir()
    (tmp_path / "conda-here" / "conda").write_text(MANAGER)
    (tmp_path / "conda-here" / "conda").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'conda-here'}:{os.environ['PATH']}")
    folder = tmp_path / "records" / "jobs" / "j-1"
    folder.mkdir(parents=True)
    (folder / "environment.yml").write_text("dependencies: [numpy]\n")
    return folder


def find(job: Path, *, build: bool = True) -> Path:
    made = {"manager": "conda", "lock": "environment.yml"}
    return Path(find_environment(made, str(job), str(job), build))


def link_of(job: Path) -> Path:
    (link,) = [each for each in (job.parents[1] / "environments").iterdir() if each.is_symlink()]
    return link


def test_environment_of_this_user_is_used_again_and_closed_to_groups(job: Path) -> None:
    before = os.umask(0o002)
    try:
        home = find(job)
    finally:
        os.umask(before)

    assert find(job) == home
    assert [stat.S_IMODE(each.stat().st_mode) for each in (home, home / "bin", home.parent)] == [0o755, 0o755, 0o755]


def test_environment_that_others_can_write_is_not_used_and_another_is_made(job: Path) -> None:
    theirs = find(job)
    theirs.chmod(0o775)

    mine = find(job)

    assert mine != theirs
    assert find(job) == mine


def test_environment_of_another_user_is_not_used_and_his_folder_does_not_stop_ours(job: Path) -> None:
    theirs = find(job)
    give_away(theirs.parent, link_of(job), theirs)

    mine = find(job)

    assert mine.parent == job.parents[1] / f"environments-{os.geteuid()}"
    assert stat.S_IMODE(mine.parent.stat().st_mode) == 0o700
    assert find(job, build=False) == mine


def test_environment_behind_a_link_of_another_user_is_not_used(job: Path) -> None:
    theirs = find(job)
    give_away(link_of(job))

    mine = find(job)

    assert mine != theirs
    assert find(job) == mine


def test_environment_can_be_made_if_another_user_has_every_name_of_ours(job: Path) -> None:
    records = job.parents[1]
    for name in ("environments", f"environments-{os.geteuid()}"):
        (records / name).mkdir()
        give_away(records / name)

    mine = find(job)

    assert mine.parent.name.startswith(f"environments-{os.geteuid()}-")
    assert find(job, build=False) == mine


def test_builder_of_another_user_keeps_nobody_waiting(job: Path) -> None:
    theirs = find(job)
    link = link_of(job)
    link.unlink()
    alive = {"host": os.uname().nodename, "boot": boot_id(), "pid": 1, "start": None}
    (link.parent / f"{link.name}.builder").write_text(json.dumps(alive))
    give_away(theirs.parent)

    assert find(job).parent != theirs.parent


def test_environment_of_a_machine_is_kept_there_for_this_user_and_used_again(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    made = {"manager": "conda", "lock": "environment.yml", "local": True}

    homes = {find_environment(made, str(job), str(job), True) for _ in range(2)}

    (home,) = map(Path, homes)
    assert (home.parent, (home / "bin/tool").read_text()) == (
        tmp_path / f"runtime-environments-{os.geteuid()}",
        "made\n",
    )
    assert stat.S_IMODE(home.parent.stat().st_mode) == 0o700
    assert [each.name for each in job.parents[1].iterdir()] == ["jobs"]


def test_environment_whose_interpreter_is_gone_is_made_again(job: Path) -> None:
    first = find(job)
    (first / "bin" / "python").symlink_to(first / "python3.11")
    (first / "python3.11").touch()
    assert find(job) == first

    (first / "python3.11").unlink()
    second = find(job)

    assert second != first
    assert find(job) == second


@pytest.mark.parametrize("beats", [True, False])
def test_builder_on_another_machine_is_waited_for_while_it_beats(
    job: Path, monkeypatch: pytest.MonkeyPatch, beats: bool
) -> None:
    theirs = find(job)
    link = link_of(job)
    link.unlink()
    builder = link.parent / f"{link.name}.builder"
    builder.write_text(json.dumps({"host": "another", "boot": "b", "pid": 1, "start": None}))
    monkeypatch.setattr("runtime.shim.environment.SILENT_S", 0.0)
    looks = 0

    def look(seconds: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 20:
            link.symlink_to(theirs)
        elif beats:
            os.utime(builder, (looks, looks))

    monkeypatch.setattr("runtime.shim.environment.time", SimpleNamespace(time=time.time, sleep=look))

    found = find(job)

    assert (found == theirs, looks == 20) == (beats, beats)


def test_builder_renews_its_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = tmp_path / "mark"
    mark.touch()
    os.utime(mark, (1, 1))
    monkeypatch.setattr("runtime.shim.environment.BEAT_S", 0.001)

    with renewed(str(mark)):
        wait_for(lambda: mark.stat().st_mtime > 1, "a beat")
        mark.unlink()

    assert not mark.exists()


def test_mark_that_a_power_failure_emptied_stops_no_builder(job: Path) -> None:
    find(job)
    link = link_of(job)
    link.unlink()
    (link.parent / f"{link.name}.builder").touch()

    assert find(job).is_dir()


def list_environments(folder: Path) -> set[str]:
    return {each.name for each in folder.iterdir()}


@pytest.mark.parametrize("local", [True, False])
def test_environments_that_nobody_uses_go_as_another_is_made(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local: bool
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    made = {"manager": "conda", "lock": "environment.yml", "local": local}
    folder = tmp_path / f"runtime-environments-{os.geteuid()}" if local else job.parents[1] / "environments"

    def make(lock: str) -> tuple[Path, Path]:
        (job / "environment.yml").write_text(lock)
        home = Path(find_environment(made, str(job), str(job), True))
        (link,) = [each for each in folder.iterdir() if each.is_symlink() and each.resolve() == home]
        return link, home

    old, entered, used = (make(lock) for lock in ("old", "entered", "used"))
    half_made, beginning, foreign = folder / f"{'a' * 24}.{'b' * 8}", folder / f"{'a' * 24}.{'c' * 8}", folder / "mine"
    for each in (half_made, beginning, foreign):
        (each / "bin").mkdir(parents=True)
    long_ago = time.time() - 40 * 86400
    for place in (*old, *entered, *used, half_made, foreign):
        os.utime(place, (long_ago, long_ago), follow_symlinks=False)
    assert make("used") == used
    with subprocess.Popen(["sleep", "1000"], env={**os.environ, "CONDA_PREFIX": str(entered[1])}) as process:
        new = make("new")
        process.kill()

    kept = [*entered, *used, *new, beginning, foreign, *([] if local else old)]
    assert list_environments(folder) == {each.name for each in kept}


def packed(tmp_path: Path) -> tuple[str, str]:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "file.txt").write_text("right")
    snapshot = make_snapshot(tmp_path / "code")
    (tmp_path / "code.tar").write_bytes(snapshot.archive)
    return str(tmp_path / "code.tar"), snapshot.id.removeprefix("sha256:")


def test_shared_tree_of_another_user_in_the_temporary_folder_is_neither_used_nor_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive, sha256 = packed(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    theirs = tmp_path / "tmp" / f"research-runtime-{os.getuid()}"
    (theirs / sha256).mkdir(parents=True)
    (theirs / sha256 / "file.txt").write_text("wrong")
    give_away(theirs, theirs / sha256)

    tree = Path(shared_tree(archive, sha256))

    assert (tree / "file.txt").read_text() == "right"
    assert stat.S_IMODE(tree.parent.stat().st_mode) == 0o700
    assert Path(shared_tree(archive, sha256)) == tree


def test_shared_tree_that_another_user_put_into_our_folder_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive, sha256 = packed(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    planted = tmp_path / f"research-runtime-{os.getuid()}" / sha256
    planted.mkdir(parents=True)
    (planted / "file.txt").write_text("wrong")
    give_away(planted)

    assert (Path(shared_tree(archive, sha256)) / "file.txt").read_text() == "right"


@pytest.mark.parametrize("taken_by", ["link", "file"])
def test_shared_tree_is_made_elsewhere_if_its_folder_s_name_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken_by: str
) -> None:
    archive, sha256 = packed(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    name = tmp_path / f"research-runtime-{os.getuid()}"
    if taken_by == "link":
        (tmp_path / "elsewhere").mkdir()
        name.symlink_to(tmp_path / "elsewhere")
    else:
        name.touch()

    tree = Path(shared_tree(archive, sha256))

    assert (tree / "file.txt").read_text() == "right"
    assert tree.parent.name.startswith(f"{name.name}-")


# the machine's GPUs


def claim(tmp_path: Path, **fields: Any) -> str:
    mine = {"boot": boot_id(), "pid": os.getpid(), "start": started_at(os.getpid()), "groups": [], "gpus": {"0": 1.0}}
    return json.dumps({**mine, **fields})


def share_of(tmp_path: Path, *devices: str) -> GpuShare:
    return GpuShare({"count": 1, "locks": str(tmp_path / "gpus")}, list(devices or ("0", "1")))


def test_claims_that_are_no_files_or_no_claims_are_skipped_with_one_note_each(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    share = share_of(tmp_path)
    folder = tmp_path / "gpus"
    os.mkfifo(folder / "claim.pipe")
    (tmp_path / "elsewhere").write_text(claim(tmp_path))
    (folder / "claim.link").symlink_to(tmp_path / "elsewhere")
    (folder / "claim.folder").mkdir()
    texts = {
        "empty": "",
        "list": "[]",
        "nothing": "{}",
        "deep": "[" * 30_000,
        "long": " " * 70_000,
        "negative": claim(tmp_path, gpus={"0": -1.0}),
        "much": claim(tmp_path, gpus={"0": 2}),
        "no-number": claim(tmp_path, gpus={"0": float("nan")}),
        "text": claim(tmp_path, gpus={"0": "1"}),
        "all": claim(tmp_path, pid=-1),
        "huge": claim(tmp_path, pid=10**30),
        "groups": claim(tmp_path, groups=[3]),
    }
    for name, text in texts.items():
        (folder / f"claim.{name}").write_text(text)
    (folder / "claim.bytes").write_bytes(b"\xff\xfe")

    assert share.take(lambda: True)
    share.drop()
    assert share.take(lambda: True)

    said = capfd.readouterr().err
    names = ["pipe", "link", "folder", "bytes", *texts]
    assert {name: said.count(f"/claim.{name}:") for name in names} == dict.fromkeys(names, 1)
    assert share.variables()["CUDA_VISIBLE_DEVICES"] == "0"


def test_claim_of_a_living_process_of_its_own_owner_holds_a_gpu(tmp_path: Path) -> None:
    share = share_of(tmp_path)
    (tmp_path / "gpus" / "claim.mine").write_text(claim(tmp_path))

    assert share.take(lambda: True)
    assert share.variables()["CUDA_VISIBLE_DEVICES"] == "1"


def test_claim_that_names_a_process_of_somebody_else_holds_no_gpu(tmp_path: Path) -> None:
    content = json.loads(claim(tmp_path))
    grouped = {**content, "pid": 2**22 + 1, "groups": [{**content, "pid": os.getpgid(0), "start": None}]}
    me = os.getuid()

    assert owner_of(os.getpid()) == me
    assert (is_held(content, me), is_held(content, STRANGER)) == (True, False)
    assert (is_held(grouped, me), is_held(grouped, STRANGER)) == (True, False)
    assert is_held(content, 0)


def test_claim_of_another_user_with_a_process_of_mine_is_removed_from_the_count(tmp_path: Path) -> None:
    share = share_of(tmp_path, "0")
    path = tmp_path / "gpus" / "claim.theirs"
    path.write_text(claim(tmp_path))
    give_away(path)

    assert share.take(lambda: True)


@pytest.mark.parametrize("kind", ["link", "file", "pipe", "closed"])
def test_claims_lie_in_a_folder_of_this_user_if_the_common_one_cannot_be_used_and_all_are_seen(
    tmp_path: Path, kind: str
) -> None:
    common = tmp_path / "gpus"
    if kind == "link":
        (tmp_path / "elsewhere").mkdir()
        common.symlink_to(tmp_path / "elsewhere")
    elif kind == "file":
        common.touch()
    elif kind == "pipe":
        os.mkfifo(common)
    else:
        common.mkdir()
        give_away(common)
    first, second = share_of(tmp_path, "0"), share_of(tmp_path, "0")

    assert first.take(lambda: True)
    assert not second.take(lambda: True)

    own = Path(first.path).parent
    assert own == tmp_path / f"gpus-{os.geteuid()}"
    assert stat.S_IMODE(own.stat().st_mode) == 0o755
    first.drop()
    assert second.take(lambda: True)


def test_claim_is_written_beside_if_the_common_folder_goes_away(tmp_path: Path) -> None:
    share = share_of(tmp_path, "0")
    (tmp_path / "gpus").rmdir()

    assert share.take(lambda: True)
    assert Path(share.path).parent == tmp_path / f"gpus-{os.geteuid()}"


def test_claims_that_no_folder_takes_stop_the_run_and_name_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SetupFailed, match=f"^cannot make {tmp_path}/file/gpus: Not a directory$"):
        GpuShare({"count": 1, "locks": str(tmp_path / "file/gpus")}, ["0"])

    share = share_of(tmp_path, "0")
    (tmp_path / "gpus").rmdir()
    assert share.take(lambda: True)
    own = Path(share.path).parent
    share.drop()
    own.rmdir()

    with pytest.raises(SetupFailed, match=f"^cannot claim GPUs in {own}: No such file or directory$"):
        share.take(lambda: True)


def test_claim_is_written_through_no_file_that_waits_for_it(tmp_path: Path) -> None:
    share = share_of(tmp_path, "0")
    os.mkfifo(tmp_path / "gpus" / f"new.{share.name}")

    assert share.take(lambda: True)
    share.note([])
    assert read_claim(share.path)[1]["gpus"] == {"0": 1.0}


def test_claims_of_all_users_of_a_machine_lie_in_a_folder_that_they_can_write(tmp_path: Path) -> None:
    share_of(tmp_path)

    assert stat.S_IMODE((tmp_path / "gpus").stat().st_mode) == 0o1777
    assert sys.platform != "linux" or owner_of(1) == 0


def test_gc_lists_shared_trees_of_this_user_alone(tmp_path: Path) -> None:
    name, tree = f"research-runtime-{os.getuid()}", "0" * 64
    (tmp_path / "elsewhere" / tree).mkdir(parents=True)
    (tmp_path / f"{name}-mine" / tree).mkdir(parents=True)
    (tmp_path / name).symlink_to(tmp_path / "elsewhere")
    os.utime(tmp_path / "elsewhere" / tree, (0, 0))
    os.utime(tmp_path / f"{name}-mine" / tree, (0, 0))

    listed = subprocess.run(
        ["sh", "-c", LIST_TREES, "60"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )

    assert [line.partition("\t")[2] for line in listed.stdout.splitlines()] == [str(tmp_path / f"{name}-mine" / tree)]


def test_environment_whose_folder_was_removed_is_made_again(job: Path) -> None:
    shutil.rmtree(find(job))

    assert (find(job) / "bin" / "tool").exists()


def test_builder_that_another_was_faster_than_takes_the_other_s_environment(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.symlink

    def link_late(source: str, target: str) -> None:
        other = Path(target).with_name("other")
        other.mkdir()
        link(other.name, target)
        link(source, target)

    with monkeypatch.context() as slow:
        slow.setattr(os, "symlink", link_late)
        found = find(job)

    assert found.name == "other"
    assert sorted(each.name for each in found.parent.iterdir() if each.is_dir() and not each.is_symlink()) == ["other"]


def test_environment_of_code_that_stays_in_its_folder_is_made_from_there(job: Path, tmp_path: Path) -> None:
    made = {"manager": "conda", "lock": "environment.yml"}
    order = {"job": "j-1", "environment": made, "code": {"path": str(job)}}

    assert prepare(order, str(job), SimpleNamespace(scratch=str(tmp_path)), SimpleNamespace(stop=False)) == DONE

    assert (link_of(job) / "bin" / "tool").exists()
