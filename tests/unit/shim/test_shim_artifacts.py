"""Artifacts of a run, in a folder and in a bucket: restored before an attempt, saved while it runs and at its end."""

from __future__ import annotations

import errno
import hashlib
import json
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime.shim.artifacts import AttemptArtifacts, NoArtifact, clear_superseded
from runtime.shim.common import SetupFailed
from runtime.shim.record import FolderRecord, RunRecord
from runtime.snapshots.snapshot import make_snapshot
from runtime.tasks.artifacts import Version
from tests.fakes.gcs import GcsServer
from tests.shim_support import JOB, ShimJob, add_snapshot, find_pythons, make_job, processes_with, signal_all, wait_for
from tests.unit.shim.test_shim import NEWEST, OLDEST, OWN
from tests.unit.shim.test_shim_bucket import maker

MakeJob = Callable[..., ShimJob]
PLACE = "runs/0/artifacts"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[GcsServer]:
    running = GcsServer().start()
    running.make_bucket("lab")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", running.url)
    yield running
    running.stop()


@pytest.fixture(
    params=[
        "bucket",
        *(
            pytest.param(each, marks=[] if each == OWN else [pytest.mark.service], id=f"python{each}")
            for each in dict.fromkeys((OWN, OLDEST, NEWEST))
        ),
    ]
)
def job(request: pytest.FixtureRequest, tmp_path: Path) -> MakeJob:
    """Makes jobs that capture `out` as `model`, in a tree of their own."""
    tree = tmp_path / "code"
    tree.mkdir()
    (tree / "train.py").write_text("")
    archive = make_snapshot(tree).archive
    if request.param == "bucket":
        request.getfixturevalue("server")
        make: MakeJob = maker(tmp_path, sys.executable)
    else:

        def make(script: str, **changes: Any) -> ShimJob:
            return make_job(tmp_path, find_pythons()[request.param], script, **changes)

    def make_capturing(script: str, **changes: Any) -> ShimJob:
        named: dict[str, Any] = {"capture": {"model": "out"}, "every_s": 600.0, **changes.pop("artifacts", {})}
        made = make(script, artifacts=named, **changes)
        add_snapshot(made, archive)
        return made

    return make_capturing


def versions(made: ShimJob, tag: str = "model", index: int = 0) -> list[Version]:
    found = []
    for path in sorted((made.folder / f"runs/{index}/artifacts/{tag}").glob("*.json")):
        version = Version.parse(f"{JOB}-{index}/{tag}/{path.stem}")
        assert version is not None
        found.append(version)
    return found


def newest_list(made: ShimJob, tag: str = "model") -> dict[str, Any]:
    path = max((made.folder / PLACE / tag).glob("*.json"))
    return dict(json.loads(path.read_text()))


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def test_next_attempt_begins_with_what_the_one_before_left(job: MakeJob) -> None:
    script = (
        "if [ -e out/w ]; then cat out/w; readlink out/latest; test -x out/run && test -d out/empty && exit 0; fi; "
        "mkdir -p out/empty; printf weights > out/w; ln -s w out/latest; cp /bin/true out/run; exit 3"
    )
    made = job(script, retry={"failure": 1})

    assert made.run() == 0

    assert made.results() == {0: ("succeeded", 0, 2)}
    assert made.log(attempt=2) == "weightslatest\n".replace("latest", "w")
    assert made.left_over() == []


def test_success_leaves_its_last_version_alone(job: MakeJob) -> None:
    made = job("mkdir -p out; echo $RUNTIME_ATTEMPT > out/w; exit $((2 - RUNTIME_ATTEMPT))", retry={"failure": 1})

    assert made.run() == 0

    assert [(each.attempt, each.number) for each in versions(made)] == [(2, 1)]
    assert newest_list(made)["files"] == {"w": {"mode": 0o644, "sha256": sha("2\n"), "size": 2}}
    if (made.folder / PLACE / "data").is_dir() and not hasattr(made, "files"):
        assert [path.name for path in (made.folder / PLACE / "data").iterdir()] == [sha("2\n")]


def test_shim_that_is_killed_loses_what_was_written_since_the_last_version(job: MakeJob) -> None:
    script = (
        "if [ -e out/w ]; then cat out/w; exit 0; fi; mkdir out; printf first > out/new; mv out/new out/w; "
        "while [ ! -e $STOP ]; do sleep 0.05; done; printf never > out/w"
    )
    made = job(script, artifacts={"every_s": 0.1}, env={"STOP": "/nowhere"})
    files = getattr(made, "files", None)

    def saved() -> bool:
        if files:
            return any(name.endswith(".json") for name in files.names(f"jobs/{JOB}/{PLACE}/model"))
        return bool(list((made.folder / PLACE / "model").glob("*.json")))

    started = made.start()
    wait_for(saved, "a version")
    started.kill()
    assert made.finish(started) == -signal.SIGKILL
    signal_all(processes_with(str(made.root)))

    assert made.run() == 0

    assert made.results() == {0: ("succeeded", 0, 2)}
    assert made.log(attempt=2) == "first"
    assert [(each.attempt, each.number) for each in versions(made)][-1] == (2, 1)


def test_attempt_that_is_asked_to_stop_leaves_its_last_version(job: MakeJob) -> None:
    made = job(
        "trap 'printf last > out/w; exit 0' TERM; mkdir out; echo ready; while true; do sleep 0.05; done", grace_s=30.0
    )
    started = made.start()
    log = made.root / ("machine-1" if hasattr(made, "files") else "") / "jobs" / JOB / "runs/0/a0001/rank0.log"
    wait_for(lambda: log.exists() and log.read_text() == "ready\n", "the command")

    started.terminate()
    made.finish(started)

    assert made.ends() == ["stopped"]
    assert newest_list(made)["files"] == {"w": {"mode": 0o644, "sha256": sha("last"), "size": 4}}


def test_attempt_that_fails_leaves_its_last_version(job: MakeJob) -> None:
    made = job("mkdir out; printf 1 > out/w; exit 3")

    assert made.run() == 1

    assert made.results() == {0: ("app_failed", 3, 1)}
    assert newest_list(made)["files"] == {"w": {"mode": 0o644, "sha256": sha("1"), "size": 1}}


def test_single_file_is_restored_as_a_file_and_replaces_the_one_of_the_code(job: MakeJob) -> None:
    made = job(
        "[ -s train.py ] && cat train.py && exit; printf better > train.py; exit 3",
        artifacts={"capture": {"code": "train.py"}},
        retry={"failure": 1},
    )

    assert made.run() == 0

    assert made.log(attempt=2) == "better"
    said = newest_list(made, "code")
    assert (list(said["files"]), said["single"]) == (["train.py"], True)


def test_path_that_is_not_there_at_the_end_is_named_in_the_result(job: MakeJob) -> None:
    made = job("true")

    assert made.run() == 0

    result = json.loads((made.folder / "runs/0/result").read_text())
    assert result["message"] == "no artifact `model`: there is no `out`"
    assert versions(made) == []


def test_link_out_of_the_artifact_is_left_out_and_named(job: MakeJob) -> None:
    made = job("mkdir out; ln -s /etc out/etc; printf 1 > out/w")

    assert made.run() == 0

    said = newest_list(made)
    assert (list(said["files"]), said["left_out"]) == (["w"], "`etc` is a link out of the artifact")
    result = json.loads((made.folder / "runs/0/result").read_text())
    assert result["message"] == "left out of artifact `model`: `etc` is a link out of the artifact"


@pytest.mark.parametrize(("line", "what"), [("ln -s w out", "a link"), ("mkfifo out", "neither a file nor a folder")])
def test_success_whose_artifact_is_no_file_and_no_folder_is_none(job: MakeJob, line: str, what: str) -> None:
    made = job(f"echo 1 >w; {line}")

    assert made.run() == 1

    assert made.results() == {0: ("setup_failed", 1, 1)}
    message = json.loads((made.folder / "runs/0/result").read_text())["message"]
    assert re.fullmatch(f"its artifact could not be saved: `model`: `/[^`]*/out` is {what}", message), message
    assert versions(made) == []


def test_version_of_another_job_is_where_the_variables_say(job: MakeJob) -> None:
    variables = {"RUNTIME_ARTIFACT_BASE": "artifacts/base", "RUNTIME_ARTIFACT_MODEL": "out"}
    made = job(
        "cd /; cat $RUNTIME_ARTIFACT_BASE/w; cat $RUNTIME_ARTIFACTS/base/w; mkdir $RUNTIME_ARTIFACT_MODEL",
        artifacts={"reuse": {"base": "x"}, "variables": variables},
    )
    reuse(made, "base", {"w": "weights"})

    assert made.run() == 0, made.stderr

    assert made.log() == "weights" * 2


@pytest.mark.parametrize("there", [{}, {"w": "others"}], ids=["gone", "other bytes"])
def test_version_that_is_reused_and_gone_is_no_reason_to_try_again(job: MakeJob, there: dict[str, str]) -> None:
    made = job("true", artifacts={"reuse": {"base": "x"}}, retry={"failure": 3})
    reuse(made, "base", {"w": "weights"}, there)

    assert made.run() == 1

    assert made.results() == {0: ("config_invalid", 1, 1)}
    message = json.loads((made.folder / "runs/0/result").read_text())["message"]
    assert message.startswith("the version that the job reuses as `base` cannot be used: a file of it is gone")


def reuse(made: ShimJob, tag: str, files: dict[str, str], there: dict[str, str] | None = None) -> None:
    folder = made.folder / "reuse"
    (folder / "data").mkdir(parents=True)
    for name, text in files.items():
        if there is None or name in there:
            (folder / "data" / sha(text)).write_text(text if there is None else there[name])
    said = {name: {"sha256": sha(text), "size": len(text), "mode": 0o644} for name, text in files.items()}
    (folder / f"{tag}.json").write_text(json.dumps({"files": said, "at": 1.0}))


# in a folder, call by call


class Captured:
    """An attempt's artifacts in a folder, without a command."""

    def __init__(self, root: Path, number: int, **named: Any) -> None:
        self.root = root
        self.run = RunRecord(FolderRecord(str(root / "jobs" / JOB)), 0)
        (root / "jobs" / JOB / "runs/0" / f"a{number:04d}").mkdir(parents=True, exist_ok=True)
        scratch = root / f"scratch-{number}"
        self.tree = scratch / "tree"
        self.tree.mkdir(parents=True)
        order = {"artifacts": {"capture": {"model": "out"}, **named}}
        self.order = order
        self.artifacts = AttemptArtifacts(order, self.run, number, str(self.tree), str(scratch))
        self.artifacts.restore(lambda: False)

    def write(self, **files: str) -> None:
        (self.tree / "out").mkdir(exist_ok=True)
        for name, text in files.items():
            (self.tree / "out" / name).write_text(text)

    def save(self) -> list[Any]:
        return list(self.artifacts._save(False, None))

    def files(self) -> dict[str, str]:
        return {path.name: path.read_text() for path in sorted((self.tree / "out").glob("*"))}

    @property
    def place(self) -> Path:
        return self.root / "jobs" / JOB / PLACE

    def kept(self) -> list[str]:
        return [path.name[9:26] for path in sorted((self.place / "model").iterdir())]

    def contents(self) -> set[str]:
        return {path.name for path in (self.place / "data").iterdir()}


def test_attempt_that_runs_keeps_its_two_newest_versions_and_their_bytes(tmp_path: Path) -> None:
    captured = Captured(tmp_path, 1)
    for number in range(4):
        captured.write(same="same", step=f"{number}")
        assert captured.save() == []

    assert captured.kept() == ["a000001.n00000003", "a000001.n00000004"]
    assert captured.contents() == {sha("same"), sha("2"), sha("3")}


def test_older_versions_stay_once_another_attempt_has_begun(tmp_path: Path) -> None:
    captured = Captured(tmp_path, 1)
    for number in range(2):
        captured.write(step=f"{number}")
        captured.save()
    later = Captured(tmp_path, 2)
    for number in range(2, 4):
        captured.write(step=f"{number}")
        captured.save()

    assert (later.files(), len(captured.kept())) == ({"step": "1"}, 4)
    assert captured.contents() == {sha(f"{number}") for number in range(4)}


def test_version_without_a_change_is_not_saved_again(tmp_path: Path) -> None:
    captured = Captured(tmp_path, 1)
    captured.write(step="1")
    captured.save()
    (captured.tree / "out/step").write_text("1")
    captured.save()

    assert captured.kept() == ["a000001.n00000001"]


def test_version_that_is_damaged_is_passed_over(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    captured = Captured(tmp_path, 1)
    for text in ("good", "bad"):
        captured.write(step=text)
        captured.save()
    (captured.place / "data" / sha("bad")).write_text("worse")
    (captured.place / "model" / "g0000001.a000009.n00000001.x.json").write_text("{")
    (captured.place / "model" / "notes.json").write_text("{}")

    assert Captured(tmp_path, 2).files() == {"step": "good"}

    said = capfd.readouterr().err
    assert "g0000001.a000009.n00000001.x.json of artifact `model` cannot be used" in said
    assert "a file of it is gone, or has other bytes than it names" in said


def test_version_that_is_cut_off_before_its_list_is_none(tmp_path: Path) -> None:
    captured = Captured(tmp_path, 1)
    captured.write(step="1")
    captured.save()
    captured.write(step="2")
    captured.run.record.write = lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))

    [(tag, problem)] = captured.save()

    assert (tag, str(problem)) == ("model", "[Errno 28] No space left on device")
    assert Captured(tmp_path, 2).files() == {"step": "1"}


def test_name_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    captured = Captured(tmp_path, 1)
    captured.write(step="1")
    captured.save()
    evil = {"files": {"../../evil": {"sha256": sha("1"), "size": 1, "mode": 0o644}}, "at": 1.0}
    (captured.place / "model" / "g0000001.a000009.n00000001.x.json").write_text(json.dumps(evil))

    assert Captured(tmp_path, 2).files() == {"step": "1"}
    assert not list(tmp_path.rglob("evil"))


@pytest.mark.parametrize("named", [{"capture": {"model": "here/out"}}, {"capture": {}, "reuse": {"base": "x"}}])
def test_place_out_of_the_tree_is_refused_and_nothing_there_is_touched(tmp_path: Path, named: dict[str, Any]) -> None:
    (tmp_path / "elsewhere/out").mkdir(parents=True)
    captured = Captured(tmp_path, 1)
    for name in ("here", "artifacts"):
        (captured.tree / name).symlink_to(tmp_path / "elsewhere")
    made = AttemptArtifacts({"artifacts": named}, captured.run, 1, str(captured.tree), str(tmp_path / "scratch-1"))

    with pytest.raises(NoArtifact) as refused:
        made.restore(lambda: False)

    assert str(refused.value).endswith("leads out of the snapshot")
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["out"]


def test_success_whose_artifact_cannot_be_saved_says_why(tmp_path: Path) -> None:
    captured = Captured(tmp_path, 1)
    captured.write(step="1")
    captured.place.parent.mkdir(parents=True, exist_ok=True)
    captured.place.write_text("no folder")

    problem, _ = captured.artifacts.finish(True, lambda: False)

    assert problem is not None
    assert problem.startswith("its artifact could not be saved: `model`: ")


def test_full_disk_that_is_cleared_costs_a_success_only_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.shim.artifacts.WRITE_AGAIN_S", 0.0)
    captured = Captured(tmp_path, 1)
    captured.write(step="1")
    put, tries = captured.run.record.put_file, iter([True, True])

    def refuse_twice(*args: Any) -> None:
        if next(tries, False):
            raise OSError(errno.ENOSPC, "No space left on device")
        put(*args)

    captured.run.record.put_file = refuse_twice

    assert captured.artifacts.finish(True, lambda: False) == (None, None)
    assert Captured(tmp_path, 2).files() == {"step": "1"}


def test_full_disk_keeps_no_attempt_that_failed_waiting(tmp_path: Path) -> None:
    captured = Captured(tmp_path, 1)
    captured.write(step="1")

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    captured.run.record.put_file = refuse

    problem, _ = captured.artifacts.finish(False, lambda: False)

    assert problem == "its artifact could not be saved: `model`: [Errno 28] No space left on device"


def test_success_clears_what_it_supersedes_and_no_other_tag(tmp_path: Path) -> None:
    first = Captured(tmp_path, 1, capture={"model": "out", "data": "log"})
    first.write(step="1")
    (first.tree / "log").write_text("1")
    first.save()
    second = Captured(tmp_path, 2, capture={"model": "out", "data": "log"})
    second.write(step="2")
    second.artifacts.finish(True, lambda: False)

    clear_superseded(second.order, second.run, 2)

    assert second.kept() == ["a000002.n00000002"]
    assert {name for name in second.contents() if len(name) == 64} == {sha("1"), sha("2")}
    assert len([name for name in second.contents() if name.endswith(".json")]) == 1


def test_contents_that_another_shim_removed_are_sent_again_at_the_end(tmp_path: Path) -> None:
    captured = Captured(tmp_path, 1)
    captured.write(step="1")
    captured.save()
    (captured.place / "data" / sha("1")).unlink()
    captured.write(more="2")
    captured.artifacts.finish(False, lambda: False)

    assert Captured(tmp_path, 2).files() == {"more": "2", "step": "1"}


def test_attempt_that_is_not_wanted_any_more_brings_nothing(tmp_path: Path) -> None:
    captured = Captured(tmp_path, 1)
    captured.write(step="1")
    captured.save()
    later = Captured(tmp_path, 2)

    with pytest.raises(SetupFailed) as failed:
        later.artifacts.restore(lambda: True)

    assert "was not wanted any more" in str(failed.value)


def test_run_without_its_folder_is_not_made_again(tmp_path: Path) -> None:
    captured = Captured(tmp_path, 1)
    captured.write(step="1")
    (tmp_path / "jobs" / JOB).rename(tmp_path / "away")

    problems = captured.save()

    assert [type(problem) for _, problem in problems] == [OSError]
    assert not (tmp_path / "jobs" / JOB).exists()
