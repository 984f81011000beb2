"""The entries of jobs in a record root: few once they have ended, and all still readable at their old places."""

from __future__ import annotations

import collections
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from runtime.errors import NotPossible
from runtime.jobs.hosts.base import Files
from runtime.jobs.hosts.local import LocalFiles, LocalHost
from runtime.jobs.hosts.ssh import SshHost
from runtime.jobs.lock import Lock
from runtime.shim import files as folding
from runtime.shim.common import AlreadyClaimed
from runtime.shim.files import FOLDED, fold_job, unfold
from runtime.shim.record import FolderRecord, RunRecord
from tests.jobs_support import Terminal, launch_as_before, open_terminal
from tests.shim_support import JOB, SHIM, find_pythons, make_job, processes_with, wait_for
from tests.ssh_support import SshServer

PYTHONS = find_pythons()
OLDEST = PYTHONS[min(PYTHONS, key=lambda version: int(version[2:]))]
SINGLE, RUN = 8, 3
"""The most entries that an ended job, or an ended run of an array, may take."""
LONG = "seq 100000"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Terminal]:
    with open_terminal(tmp_path, monkeypatch, capsys) as terminal:
        yield terminal


def entries(root: Path) -> int:
    """Count files and folders as `find` does."""
    return sum(1 for _ in root.rglob("*"))


SBATCH = """#!/bin/bash
while [ $# -gt 0 ]; do
  case "$1" in
    --output=*) out=${1#--output=} ;;
    --array=*) array=${1#--array=0-} ;;
    --*) ;;
    *) break ;;
  esac
  shift
done
last=${array%%%*}
for n in $(seq 0 "${last:-0}"); do
  log=${out//%A/41}; log=${log//%a/$n}; log=${log//%j/41}
  SLURM_JOB_ID=41 SLURM_ARRAY_JOB_ID=41 SLURM_ARRAY_TASK_ID=$n setsid bash "$@" >"$log" 2>&1 </dev/null &
done
echo 41
"""
"""Runs the batch script at once, here, as Slurm would. tests/services does the same count on a real Slurm."""


@pytest.fixture(params=["local", "slurm", pytest.param("ssh", marks=pytest.mark.service)])
def target(request: pytest.FixtureRequest, run: Terminal) -> tuple[str, Path]:
    """The name of a target and the folder of its record root."""
    if request.param == "local":
        return "local", run.data / "jobs"
    if request.param == "slurm":
        commands, records = run.tree.parent / "bin", run.tree.parent / "cluster"
        commands.mkdir()
        for name, script in (("sbatch", SBATCH), ("squeue", "#!/bin/sh\n")):
            (commands / name).write_text(script)
            (commands / name).chmod(0o755)
        settings = f'kind = "slurm"\nrecords = "{records}"\nbin = "{commands}"\n'
        (run.tree / "runtime.toml").write_text(f"[targets.hpc]\n{settings}")
        return "hpc", records
    server: SshServer = request.getfixturevalue("ssh_server")
    records = run.tree.parent / "far"
    options = ", ".join(f'"{word}"' for word in server.options)
    settings = f'host = "{server.host}"\noptions = [{options}]\nrecords = "{records}"\npython = "{OLDEST}"\n'
    (run.tree / "runtime.toml").write_text(f'[targets.far]\nkind = "ssh"\n{settings}')
    return "far", records


def launch(run: Terminal, target: tuple[str, Path], *words: str) -> str:
    """Launch a job and wait for its end and its shim's."""
    said = run("launch", "--on", target[0], *words)
    assert said.code == 0, said.err
    job = said.out.strip()
    run.wait(job)
    wait_for(lambda: not processes_with(f"jobs/{job}"), "the end of its shim")
    return job


@pytest.mark.daily(1)
def test_jobs_that_have_ended_take_few_entries(run: Terminal, target: tuple[str, Path]) -> None:
    again = ("--set", "retry.failure=3", "--set", "retry.backoff.min=10ms", "--set", "retry.backoff.max=10ms")
    jobs: dict[str, Sequence[str]] = {
        "echo hello": (),
        "true": (),
        LONG: (),
        "echo no; exit 3": (),
        "echo $RUNTIME_ATTEMPT; exit $((RUNTIME_ATTEMPT < 4))": again,
    }
    launch(run, target, "--", "true")
    counts = [entries(target[1])]
    for script, words in jobs.items():
        launch(run, target, *words, "--", "sh", "-c", script)
        counts.append(entries(target[1]))

    # The first one brought the code, which the others share.
    assert [after - before for before, after in itertools.pairwise(counts) if after - before > SINGLE] == []


def test_runs_of_an_array_that_has_ended_take_few_entries(run: Terminal, target: tuple[str, Path]) -> None:
    launch(run, target, "--", "true")
    before = entries(target[1])
    script = f"case $((SEED % 3)) in 0) echo $SEED;; 1) true;; 2) {LONG};; esac"
    job = launch(run, target, "--seeds", "6", "--", "sh", "-c", script)

    assert entries(target[1]) - before <= SINGLE + 6 * RUN
    places = [*(target[1] / "jobs" / job / "runs").iterdir(), *(target[1] / "done").glob(f"{job}.*")]
    each = collections.Counter(path.name.removeprefix(f"{job}.").split(".")[0] for path in places)
    assert all(path.is_file() for path in places)
    assert {index: count for index, count in each.items() if not 2 <= count <= RUN} == {}
    assert each.keys() == set(map(str, range(6)))


def test_run_of_an_array_takes_few_entries_while_the_others_go_on(run: Terminal) -> None:
    go = run.tree.parent / "go"
    script = f"[ $SEED != 0 ] || while [ ! -e {go} ]; do sleep 0.05; done"
    job = run.launch(script, "--seeds", "9")
    runs = run.folder(job) / "runs"
    wait_for(lambda: len(list(runs.glob("*.ended"))) == 8, "eight ends")

    def left() -> int:
        # Not with glob, which fails if a folder disappears during the search.
        found = (Path(folder, name) for folder, *names in os.walk(runs) for each in names for name in each)
        return sum(path.relative_to(runs).parts[0].split(".")[0] != "0" for path in found)

    wait_for(lambda: left() <= 8 * (RUN - 1), "few entries")  # apart from the names in `done`
    go.touch()

    run.wait(job, "succeeded")


def test_what_a_command_wrote_stays_in_its_folders(run: Terminal) -> None:
    job = run.finish("echo out > $RUNTIME_OUTPUT_DIR/a.txt; mkdir $RUNTIME_CHECKPOINT_DIR/empty; echo said")
    folder = run.folder(job)

    assert (folder / "runs/0/output/a0001/a.txt").read_text() == "out\n"
    assert (folder / "runs/0/checkpoint/empty").is_dir()
    assert (folder / "runs/0.a0001.rank0.log").read_text() == "said\n"
    assert run("logs", job).out == "said\n"
    assert run("fetch", job, str(run.tree.parent / "home")).code == 0
    assert (run.tree.parent / "home/a.txt").read_text() == "out\n"


def test_status_names_the_log_where_it_lies(run: Terminal) -> None:
    job = run.finish("echo said")

    place = run("status", job, "-o", "json").json["logs"]

    assert Path(place.replace("ATTEMPT", "0001").replace("RANK", "0")).read_text() == "said\n"


# equal output before and after folding

VERBS = [
    ["status", "JOB"],
    ["logs", "JOB"],
    ["explain", "JOB"],
    ["status", "JOB", "--index", "1"],
    ["logs", "JOB", "--index", "1"],
]


@pytest.fixture
def old(run: Terminal, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Run jobs as versions without folding did."""

    def finish(script: str, *words: str) -> str:
        with monkeypatch.context() as before:
            launch_as_before(before)
            return run.finish(script, *words)

    return finish


def said(run: Terminal, job: str, verbs: list[list[str]]) -> list[object]:
    found: list[object] = []
    for verb in verbs:
        words = [job if word == "JOB" else word for word in verb]
        if "logs" in words:
            found.append(run(*words).out)
            continue
        seen = run(*words, "-o", "json").json
        # The log's place and the free space have changed.
        seen["evidence"] = [line for line in seen.get("evidence", ()) if not line.endswith(" free")]
        found.append({**seen, "logs": None})
    return found


@pytest.mark.parametrize("array", [[], ["--seeds", "3"]], ids=["single", "array"])
def test_job_of_an_earlier_version_is_read_alike_before_and_after_gc_folds_it(
    run: Terminal, old: Callable[..., str], array: list[str]
) -> None:
    job = old(f"echo $SEED; {LONG}; echo out > $RUNTIME_OUTPUT_DIR/x; exit 3", *array)
    verbs = VERBS if array else VERBS[:3]
    before, files = said(run, job, verbs), entries(run.folder(job))

    folded = run("gc", "--yes")

    assert "1 ended job is in fewer files now" in folded.err
    assert entries(run.folder(job)) < files / 2
    assert said(run, job, verbs) == before
    assert "fewer files" not in run("gc", "--yes").err


@pytest.mark.parametrize("array", [[], ["--seeds", "3"]], ids=["single", "array"])
def test_job_that_was_folded_is_retried_and_folded_again(run: Terminal, array: list[str]) -> None:
    job = run.finish("echo $RUNTIME_ATTEMPT; cat main.py; [ ${SEED:-1} != 1 ] || exit $((RUNTIME_ATTEMPT < 2))", *array)
    before = entries(run.data / "jobs")
    at = ["--index", "1"] if array else []

    assert run("retry", job, "--failed").code == 0

    run.wait(job, "succeeded")
    wait_for(lambda: not processes_with(f"jobs/{job}"), "the end of its shim")
    assert run("logs", job, *at).out == "1\nprint('hello')\n2\nprint('hello')\n"
    assert run("status", job, *at, "-o", "json").json["attempts"][0]["reason"] == "app_failed"
    assert entries(run.data / "jobs") <= before + 2  # its second native job, and another log
    assert not list(run.folder(job).glob("secrets"))


def test_retry_of_a_folded_job_whose_code_is_gone_says_so(run: Terminal) -> None:
    job = run.finish("exit 3")
    shutil.rmtree(run.data / "jobs/snapshots")

    refused = run("retry", job)

    assert refused.code == 2
    assert refused.err.startswith(f"error: the code of job `{job}` is gone")
    assert run("explain", job).code == 0


def test_folded_job_is_cancelled_launched_and_collected_like_any_other(run: Terminal) -> None:
    job = run.finish("echo once")

    assert "already succeeded" in run("cancel", job).out
    assert run.launch("echo once") == job
    again = run("launch", "--on", "local", "--again", "--", "sh", "-c", "echo once").out.strip()
    run.wait(again)
    wait_for(lambda: not processes_with(f"jobs/{again}"), "the end of its shim")
    assert again != job
    assert run("gc", "--older-than", "0s", "--yes").code == 0
    assert list((run.data / "jobs/jobs").iterdir()) == list((run.data / "jobs/done").iterdir()) == []


def test_gc_asks_the_backend_and_folds_once_however_many_jobs_there_are(
    run: Terminal, old: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = old("echo 1")
    root = run.data / "jobs"
    for number in range(20):
        other = f"j-{number:024x}"
        shutil.copytree(root / "jobs" / job, root / "jobs" / other)
        (root / f"done/{other}.0.succeeded.0.1").touch()
    asked, ask = [], LocalHost.run

    def count(self: LocalHost, *words: object, **more: object) -> object:
        asked.append(words)
        return ask(self, *words, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(LocalHost, "run", count)
    folded = run("gc", "--yes")
    first = len(asked)
    assert "21 ended jobs are in fewer files now" in folded.err
    collected = run("gc", "--older-than", "0s", "--yes")

    assert list((root / "jobs").iterdir()) == []
    assert collected.code == 0
    assert first < 10
    assert len(asked) < 20


# files


def fill(root: Path, *, runs: int, attempts: int = 2) -> Path:
    """Write an ended job with every kind of entry; the last attempt is the second."""
    job = root / "jobs" / JOB
    for index in range(runs):
        run = job / "runs" / str(index)
        for number in range(3 - attempts, 3):
            place = run / f"a{number:04d}"
            place.mkdir(parents=True)
            (place / "start.json").write_text(f'{{"attempt": {number}}}')
            (place / "rank0.log").write_bytes(b"\xffshort %d\n" % number)
            (place / "rank1.log").write_bytes(b"long\n" * 20_000)
            (place / "end.app_failed.1").write_text("{}")
            (run / "output" / f"a{number:04d}").mkdir(parents=True)
        (run / "output/a0002/kept").write_text("kept")
        (run / "checkpoint").mkdir()
        (run / "result").write_text(json.dumps({"reason": "app_failed", "code": 1, "attempt": 2}))
    (job / "native").mkdir()
    (job / "native/001.000000.json").write_text('{"id": "1"}')
    (job / "intent.json").write_text('{"name": "ä"}')
    (job / "shim.log").write_text("")
    order = {"schema": 1, "runs": {str(index): {} for index in range(runs)}, "fold": True}
    (job / "order.json").write_text(json.dumps(order))
    return job


def look(files: Files, *, sizes: bool = True) -> dict[str, object]:
    """Collect the answers to every query about the existing names; `sizes` of whole folders are the slowest of them."""
    found: dict[str, object] = {}
    todo = [f"jobs/{JOB}", f"jobs/{JOB}/missing", f"jobs/{JOB}/runs/0/missing"]
    while todo:
        name = todo.pop()
        found[f"read {name}"] = content = files.read(name)
        found[f"many {name}"] = files.read_many([name])
        if content is not None:
            found[f"part {name}"] = [files.read_from(name, 1, 3), files.read_from(name, 100_000 - 2)]
            continue
        found[f"names {name}"] = files.names(name)
        # For a whole job, `gc` adds this up.
        found[f"tree {name}"] = files.tree(name) if sizes and name.count("/") > 2 else None
        todo += [f"{name}/{each}" for each in files.names(name)]
    return found


def read_all(files: Files) -> dict[str, bytes]:
    """Read every file, under the names that `look` gives it."""
    found: dict[str, bytes] = {}
    todo = [f"jobs/{JOB}"]
    while todo:
        name = todo.pop()
        content = files.read(name)
        if content is None:
            todo += [f"{name}/{each}" for each in files.names(name)]
        else:
            found[f"read {name}"] = content
    return found


def own_folders_aside(found: dict[str, object]) -> dict[str, object]:
    """Drop empty folders, which are removed, and files needed only while a job runs."""
    return {
        key: value
        for key, value in found.items()
        if "checkpoint" not in key and "a0001" not in key.partition("/output")[2]
    }


@pytest.mark.parametrize("runs", [1, 3])
@pytest.mark.parametrize("place", ["local", pytest.param("ssh", marks=pytest.mark.service)])
def test_everything_is_read_where_it_was_after_it_was_folded_and_after_it_was_unfolded(
    request: pytest.FixtureRequest, tmp_path: Path, runs: int, place: str
) -> None:
    files: Files = LocalFiles(str(tmp_path))
    job = fill(tmp_path, runs=runs)
    if place == "ssh":
        server: SshServer = request.getfixturevalue("ssh_server")
        host = SshHost(server.host, str(tmp_path), python=OLDEST, options=server.options)
        request.addfinalizer(host.close)
        files = host.files
    for folder in job.glob("runs/*/output/a0001"):
        folder.rmdir()
    for folder in job.glob("runs/*/checkpoint"):
        folder.rmdir()
    before = look(files)

    fold_job(str(job), json.loads((job / "order.json").read_text()))
    folded, count = look(files), entries(job)
    for start in ["", *(f"runs/{index}" for index in range(runs))]:
        unfold(str(job), start)

    assert folded == before
    assert look(files) == before
    assert count <= 2 + runs * 8  # a folded file, two long logs, the newest short log, an output in its folders
    assert not list(job.rglob("*ended"))


@pytest.mark.parametrize("runs", [1, 3])
def test_folded_result_stands_whatever_a_shim_that_was_overtaken_puts_beside_it(tmp_path: Path, runs: int) -> None:
    job, name = fill(tmp_path, runs=runs), "runs/0/result"
    stands = (job / name).read_text()
    fold_job(str(job), json.loads((job / "order.json").read_text()))
    (job / name).parent.mkdir(parents=True, exist_ok=True)
    (job / name).write_text('{"reason": "succeeded"}')

    assert FolderRecord(str(job)).read(name) == stands
    assert LocalFiles(str(tmp_path)).read(f"jobs/{JOB}/{name}") == stands.encode()
    for start in ["", "runs/0"]:
        unfold(str(job), start)
    assert (job / name).read_text() == stands


def test_folding_leaves_a_job_alone_that_somebody_launches(tmp_path: Path) -> None:
    job = fill(tmp_path, runs=1)
    before = sorted(job.rglob("*"))
    launching = Lock(LocalFiles(str(tmp_path)), job.name, "somebody")
    launching.take(patience_s=0)

    fold_job(str(job), {"runs": {"0": {}}})

    launching.ensure_held()
    launching.release()
    assert sorted(job.rglob("*")) == before


def test_lock_that_is_taken_while_a_job_is_folded_is_not_folded_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = fill(tmp_path, runs=1)
    files = LocalFiles(str(tmp_path))
    launching = Lock(files, job.name, "somebody")
    held: list[bool] = []

    def fold(*words: object) -> None:
        with pytest.raises(NotPossible, match="being launched by another"):
            launching.take(patience_s=0)
        (job / "lock.7").write_bytes(b"{}")  # from a process that took over from a suspended shim
        real(*words)
        held.append((job / "lock.7").exists())

    real = folding.fold
    monkeypatch.setattr(folding, "fold", fold)

    fold_job(str(job), {"runs": {"0": {}}})

    assert held == [True]
    assert (job / FOLDED).exists()
    assert not (job / "lock.1").exists()


STEPS = ("unlink", "link", "rename", "rmdir", "fsync", "mkdir")


@pytest.mark.parametrize("runs", [1, 2])
@pytest.mark.parametrize("way", ["fold", "unfold"])
def test_folding_that_is_cut_off_at_any_step_hides_nothing_and_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: int, way: str
) -> None:
    order = {"runs": {str(index): {} for index in range(runs)}}
    starts = ["", *(f"runs/{index}" for index in range(runs))]
    attempts = 3 - runs  # the newest and an older one in one run, and several runs, are cut apart
    fill(tmp_path / "whole", runs=runs, attempts=attempts)
    whole = own_folders_aside(look(LocalFiles(str(tmp_path / "whole")), sizes=False))
    files = {key: content for key, content in whole.items() if key.startswith("read") and content is not None}
    monkeypatch.setattr(os, "fsync", lambda opened: None)  # a step like the others, and slow

    def act(job: Path) -> None:
        if way == "fold":
            fold_job(str(job), order)
        else:
            for start in starts:
                unfold(str(job), start)

    cut = 0
    while True:
        root = tmp_path / f"cut{cut}"
        job = fill(root, runs=runs, attempts=attempts)
        if way == "unfold":
            fold_job(str(job), order)
        left = [cut]

        def die(step: Callable[..., object], left: list[int] = left) -> Callable[..., object]:
            def call(*words: object, **more: object) -> object:
                left[0] -= 1
                if left[0] < 0:
                    raise KeyboardInterrupt  # our handlers do not catch it, just as none sees a SIGKILL
                return step(*words, **more)

            return call

        with monkeypatch.context() as cutting:
            for name in STEPS:
                cutting.setattr(os, name, die(getattr(os, name)))
            try:
                act(job)
            except KeyboardInterrupt:
                pass
        seen = {
            key: value
            for key, value in look(LocalFiles(str(root)), sizes=False).items()
            if key in whole and "names" not in key
        }
        assert seen == {key: whole[key] for key in seen}, cut
        assert {key for key in whole if key.startswith("read")} <= seen.keys(), cut
        for lock in job.glob("lock.*"):
            os.utime(lock, (0, 0))  # days later
        act(job)
        again = read_all(LocalFiles(str(root)))
        assert {key: again.get(key) for key in files} == files, cut
        if left[0] >= 0:
            return
        cut += 1


@pytest.mark.parametrize("runs", [1, 2])
def test_result_of_a_folded_run_stays_whoever_comes_later(tmp_path: Path, runs: int) -> None:
    job = fill(tmp_path, runs=runs)
    fold_job(str(job), {"runs": {str(index): {} for index in range(runs)}})
    record, files = FolderRecord(str(job)), LocalFiles(str(tmp_path))
    twin = json.dumps({"reason": "succeeded", "code": 0, "attempt": 3})

    with pytest.raises(AlreadyClaimed):
        record.create("runs/0/result", twin)

    assert not files.create(f"jobs/{JOB}/runs/0/result", twin.encode())
    assert RunRecord(record, 0).result()["reason"] == "app_failed"
    assert json.loads(files.read(f"jobs/{JOB}/runs/0/result") or b"")["reason"] == "app_failed"


def test_shim_that_comes_late_to_a_folded_run_ends_with_its_result(tmp_path: Path) -> None:
    made = make_job(
        tmp_path, sys.executable, "exit $((RUNTIME_ARRAY_INDEX == 1))", runs={0: {}, 1: {}, 2: {}}, fold=True
    )
    assert made.run("--index", "1") == 1
    assert [path.name for path in (made.folder / "runs").iterdir()] == ["1.ended"]

    assert made.run("--index", "1") == 1

    assert made.results() == {1: ("app_failed", 1, 1)}


def test_job_with_secrets_in_its_folder_is_not_folded(tmp_path: Path) -> None:
    job = fill(tmp_path, runs=1)
    (job / "secrets").mkdir()
    (job / "secrets/TOKEN").write_text("canary-4711")

    fold_job(str(job), {"runs": {"0": {}}})

    assert not (job / "ended").exists()


def test_folder_that_is_folded_while_it_is_removed_goes(tmp_path: Path) -> None:
    words = [sys.executable, str(SHIM), str(tmp_path), "--fold", JOB]
    for _ in range(10):
        job = fill(tmp_path, runs=3)
        folding = subprocess.Popen(words, stderr=subprocess.DEVNULL)
        wait_for(lambda job=job: list(job.glob("runs/*.ended")), "the beginning of the fold")  # type: ignore[misc]

        LocalFiles(str(tmp_path)).remove(f"jobs/{JOB}")

        folding.wait()
        assert not job.exists()


def test_file_that_is_new_beside_a_folded_one_of_its_name_counts(tmp_path: Path) -> None:
    job, files = fill(tmp_path, runs=1), LocalFiles(str(tmp_path))
    fold_job(str(job), {"runs": {"0": {}}})
    files.write(f"jobs/{JOB}/intent.json", b"newer")

    fold_job(str(job), {"runs": {"0": {}}})

    assert files.read(f"jobs/{JOB}/intent.json") == b"newer"


def test_two_that_fold_one_job_at_once_lose_nothing(tmp_path: Path) -> None:
    fill(tmp_path, runs=1)
    before = own_folders_aside(look(LocalFiles(str(tmp_path))))
    words = [sys.executable, str(SHIM), str(tmp_path), "--fold", JOB]

    both = [subprocess.Popen(words) for _ in range(4)]

    assert {each.wait() for each in both} == {0}
    after = look(LocalFiles(str(tmp_path)))
    assert {key: after[key] for key in before if key.startswith("read")} == {
        key: value for key, value in before.items() if key.startswith("read")
    }
