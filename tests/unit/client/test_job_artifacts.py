"""Artifacts of jobs on this machine: they survive a killed shim and a retry, and another job finds the same bytes."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import runtime
from runtime.client.artifacts import get_artifact as get_of_stack
from runtime.client.artifacts import list_artifacts as list_of_stack
from runtime.client.artifacts import put_artifact, resolve_reuse
from runtime.client.jobs.artifacts import ManyRuns, find_artifact, get_artifact, list_artifacts
from runtime.client.jobs.find import open_job
from runtime.client.jobs.handle import JobHandle
from runtime.client.jobs.launch import launch
from runtime.client.jobs.prepare import LaunchOptions, LaunchRequest, prepare
from runtime.client.jobs.retry import retry_job
from runtime.client.jobs.reused_artifacts import Sources, read_kept, store_reused
from runtime.client.jobs.targets import find_target
from runtime.config import Project, Settings
from runtime.errors import NotPossible, RequestRefused, UnknownName
from runtime.jobs.hosts.bucket import BucketFiles
from runtime.jobs.hosts.local import LocalFiles
from runtime.jobs.ledger import job_folder
from runtime.jobs.spec import InvalidSpec, JobState, parse_spec
from runtime.jobs.spec_fields import encode_spec, spec_fields
from runtime.launchers.slurm.bundle import export_bundle
from runtime.records.artifacts import ArtifactDamaged
from runtime.stack.open import open_stack
from tests.fakes.gcs import GcsServer
from tests.shim_support import PATIENCE_S, processes_with, shims_with, signal_all, wait_for

TRAIN = """
mkdir -p out; step=$(cat out/step 2>/dev/null || echo 0); echo begins at $step
while [ $step -lt 3 ]; do
    step=$((step + 1)); echo $step > next; mv next out/step; echo $step >> out/log; echo $step >> loss.csv
    [ $step != 2 ] || [ -e $HALF ] || { touch $HALF; while true; do sleep 0.1; done; }
done
"""
"""Three steps; the first attempt hangs after the second."""


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    found = Settings(
        project=Project(root=tmp_path),
        data_dir=tmp_path / "data",
        cache_dir=tmp_path / "cache",
        config_dir=tmp_path / "config",
    )
    for name in ("data", "cache", "config"):
        monkeypatch.setenv(f"RUNTIME_{name.upper()}_DIR", str(tmp_path / name))
    return found


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The work tree that jobs are launched from."""
    folder = tmp_path / "tree"
    folder.mkdir()
    # A shim kills leftovers of its job anywhere on the machine, even another test's.
    (folder / "salt").write_bytes(os.urandom(12))
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def here(settings: Settings, tree: Path, tmp_path: Path) -> Iterator[Here]:
    made = Here(settings, tmp_path)
    yield made
    made.close()


class Here:
    """Launches on this machine."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.settings, self.folder = settings, folder
        self.jobs: list[JobHandle] = []
        self.said: list[str] = []

    def start(self, *command: str, **fields: Any) -> JobHandle:
        job = {"command": list(command), "retry": {"backoff": {"min": 0.05, "max": 0.1}}, **fields}
        self.jobs.append(launch(job, "local", settings=self.settings, progress=self.said.append))
        return self.jobs[-1]

    def end(self, *command: str, **fields: Any) -> JobHandle:
        job = self.start(*command, **fields)
        job.wait(timeout=PATIENCE_S)
        return job

    def close(self) -> None:
        for job in self.jobs:
            job.close()
        signal_all(processes_with(str(self.folder)), signal.SIGKILL)


def read_log(job: JobHandle, index: int | None = None) -> str:
    return b"".join(job.logs(index=index)).decode()


def test_job_whose_shim_was_killed_half_way_goes_on_with_what_it_captured(here: Here, tmp_path: Path) -> None:
    fields: dict[str, Any] = {
        "capture": {"model": "out", "loss": "loss.csv"},
        "capture_every": "1s",
        "env": {"HALF": str(tmp_path / "half")},
    }
    job = here.start("sh", "-c", TRAIN, **fields)

    def saved() -> bool:
        """Whether the newest versions are of step 2."""
        sizes = {each.tag: each.size_bytes for each in list_artifacts(job)}
        return sizes == {"loss": 4, "model": 6}

    wait_for(saved, "a version of step 2")
    first = find_artifact(job, "model")
    signal_all(shims_with(job.id), signal.SIGKILL)
    wait_for(lambda: job.state().terminal, "the end of the job")
    again = here.end("sh", "-c", TRAIN, **fields)

    assert (again.id, again.status().state) == (job.id, JobState.SUCCEEDED)
    assert [line for line in read_log(again).splitlines() if line.startswith("begins")] == [
        "begins at 0",
        "begins at 2",
    ]
    assert (first.state, first.index, job.attempts()) == ("saved", 0, [1, 2])
    assert {each.tag: each.state for each in list_artifacts(job)} == {"loss": "final", "model": "final"}
    path = get_artifact(job, find_artifact(job, "loss"), tmp_path / "home")
    assert (path, path.read_text()) == (tmp_path / "home/loss.csv", "1\n2\n3\n")


def test_retry_by_hand_goes_on_with_what_the_failed_attempt_left(here: Here) -> None:
    job = here.end("sh", "-c", "cat out/w && exit; mkdir out; echo weights > out/w; exit 3", capture={"model": "out"})
    failed = job.state()

    retry_job(job, here.settings)
    job.wait(timeout=PATIENCE_S)

    assert (failed, job.state(), read_log(job).splitlines()[-1]) == (JobState.FAILED, JobState.SUCCEEDED, "weights")


def test_version_is_settled_at_launch_whatever_becomes_of_its_source(here: Here, tmp_path: Path) -> None:
    source = tmp_path / "weights"
    source.mkdir()
    (source / "w").write_text("first")
    fields = {"reuse": {"base": str(source)}}
    script = "cat artifacts/base/w; [ $RUNTIME_ATTEMPT = 2 ]"
    job = here.end("sh", "-c", script, **fields)
    (source / "w").write_text("second")

    retry_job(job, here.settings)
    job.wait(timeout=PATIENCE_S)
    other = here.end("sh", "-c", script, **fields)

    assert (read_log(job), read_log(other)) == ("firstfirst", "second")
    (source / "w").write_text("first")
    assert here.start("sh", "-c", script, **fields).id == job.id != other.id


def test_artifact_of_another_job_lies_on_the_disk_once(here: Here) -> None:
    made = here.end("sh", "-c", "mkdir out; echo weights > out/w", capture={"model": "out"}, name="train")

    by_id = here.end("cat", "artifacts/base/w", reuse={"base": f"{made.id[:10]}/model"})
    by_name = here.end("cat", "artifacts/model/w", reuse={"model": "train/model"})
    by_version = here.end("cat", "artifacts/m/w", reuse={"m": find_artifact(made, "model").version})

    assert [read_log(each) for each in (by_id, by_name, by_version)] == ["weights\n"] * 3
    content = hashlib.sha256(b"weights\n").hexdigest()
    folders = [Path(made.files.root) / job_folder(each.id) for each in (made, by_id, by_name, by_version)]
    places = [folders[0] / "runs/0/artifacts/data" / content, *(each / "reuse/data" / content for each in folders[1:])]
    assert len({path.stat().st_ino for path in places}) == 1
    spec = json.loads(by_id.files.read(f"{job_folder(by_id.id)}/spec.json") or b"")
    assert spec["reuse"] == {"base": find_artifact(made, "model").version}


def test_run_of_an_array_is_named_by_its_index(here: Here) -> None:
    made = here.end("sh", "-c", "echo {x} > out", array={"params": {"x": [5, 6]}}, capture={"out": "out"})

    with pytest.raises(ManyRuns) as many:
        here.start("true", reuse={"base": f"{made.id}/out"})
    job = here.end("cat", "artifacts/base", reuse={"base": f"{made.id}.1/out"})

    assert [(each.index, each.state) for each in list_artifacts(made)] == [(0, "final"), (1, "final")]
    assert [each.index for each in list_artifacts(made, 1)] == [1]
    assert (many.value.hint, read_log(job)) == (f"name the run, such as {made.id[:10]}.0", "6\n")


def test_damaged_artifact_of_one_run_hides_no_other_and_is_named_when_it_is_asked_for(here: Here) -> None:
    made = here.end("sh", "-c", "echo {x} > out", array={"params": {"x": [5, 6]}}, capture={"out": "out"})
    folder = here.settings.data_dir / "jobs" / job_folder(made.id) / "runs/0/artifacts/out"
    [version] = folder.iterdir()
    version.write_text("no list")

    assert [(each.index, each.state) for each in list_artifacts(made)] == [(0, "damaged"), (1, "final")]
    with pytest.raises(ArtifactDamaged):
        find_artifact(made, "out", 0)
    assert find_artifact(made, "out", 1).state == "final"


def test_version_whose_bytes_are_gone_is_named_with_the_file(here: Here, tmp_path: Path) -> None:
    made = here.end("sh", "-c", "echo 1 > out", capture={"out": "out"})
    [content] = (here.settings.data_dir / "jobs" / job_folder(made.id) / "runs/0/artifacts/data").iterdir()
    content.unlink()

    with pytest.raises(ArtifactDamaged, match="file `out` of it is gone"):
        get_artifact(made, find_artifact(made, "out"), tmp_path / "home")
    with pytest.raises(ArtifactDamaged, match="file `out` of it is gone"):
        here.start("true", reuse={"base": f"{made.id}/out"})


def test_artifact_of_a_run_that_has_not_succeeded_may_change_and_is_not_reused(here: Here) -> None:
    made = here.end("sh", "-c", "echo 1 > out; exit 3", capture={"out": "out"})

    with pytest.raises(NotPossible) as refused:
        here.start("true", reuse={"base": f"{made.id}/out"})

    assert refused.value.message == f"run 0 of job `{made.id}` has not succeeded, so its artifact `out` may change"
    assert len(here.jobs) == 1


def test_artifact_of_an_experiment_is_brought_from_the_store_of_its_stack(here: Here, tmp_path: Path) -> None:
    (tmp_path / "base").write_text("put")
    with open_stack(settings=here.settings) as opened:
        put = put_artifact(tmp_path / "base", "base", "sac", opened.records)

    job = here.end("cat", "artifacts/model", reuse={"model": "sac/base"})

    assert read_log(job) == "put"
    assert json.loads(job.files.read(f"{job_folder(job.id)}/spec.json") or b"")["reuse"] == {"model": put.version}


@pytest.mark.parametrize("how", ["id", "name", "version"])
def test_artifact_of_a_job_is_put_for_the_tasks_that_reuse_it(here: Here, how: str) -> None:
    made = here.end("sh", "-c", "mkdir out; printf weights > out/w", capture={"model": "out"}, name="train")
    source = {"id": f"{made.id}.0/model", "name": "train/model", "version": find_artifact(made, "model").version}[how]

    with open_stack(settings=here.settings) as opened:
        version = resolve_reuse(source, "base", opened.records, "eval")
        [put] = list_of_stack("eval", opened.records)
        path = get_of_stack(put, here.folder / "home", opened.records)

    assert (put.version, put.state, put.tag) == (version, "put", "base")
    assert (path / "w").read_text() == "weights"


def test_experiment_goes_before_a_job_of_the_same_name(here: Here, tmp_path: Path) -> None:
    here.end("sh", "-c", "printf job > out", capture={"out": "out"}, name="sac")
    (tmp_path / "out").write_text("experiment")
    with open_stack(settings=here.settings) as opened:
        put_artifact(tmp_path / "out", "out", "sac", opened.records)

    assert read_log(here.end("cat", "artifacts/out", reuse={"out": "sac/out"})) == "experiment"


def test_file_behind_an_address_is_verified_and_brought_at_launch(here: Here, tmp_path: Path) -> None:
    folder = tmp_path / "served"
    folder.mkdir()
    (folder / "w.bin").write_text("weights")
    good = hashlib.sha256(b"weights").hexdigest()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(folder))

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        address = f"http://127.0.0.1:{server.server_port}/w.bin"
        job = here.end("cat", "artifacts/base", reuse={"base": f"{address}#sha256={good}"})
        with pytest.raises(NotPossible) as other:
            here.start("true", reuse={"base": f"{address}#sha256={'0' * 64}"})
    finally:
        server.shutdown()
        server.server_close()

    assert read_log(job) == "weights"
    assert other.value.message == f"`{address}` has other bytes than expected"


def test_what_is_reused_lies_in_a_bucket_before_its_list_and_is_copied_there_once(
    settings: Settings, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = GcsServer().start()
    server.make_bucket("lab")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
    files, said = BucketFiles("gs://lab/runtime"), []
    (tree / "base").mkdir()
    (tree / "base/w").write_text("weights")
    spec, reused = Sources(settings).settle(parse_spec({"command": ["x"], "reuse": {"base": "./base"}}), None)

    store_reused(reused, "jobs/j-1", files, said.append)
    (tree / "base/w").write_text("other")
    kept = read_kept(spec, files, "j-1")
    store_reused(kept, "jobs/j-2", files, said.append)
    store_reused(kept, "jobs/j-2", files, said.append)
    server.stop()

    content = hashlib.sha256(b"weights").hexdigest()
    assert [each.version.id for each in kept] == [each.version.id for each in reused] == [spec.reuse["base"]]
    assert sorted(server.buckets["lab"]) == sorted(
        f"runtime/jobs/{job}/reuse/{name}" for job in ("j-1", "j-2") for name in ("base.json", f"data/{content}")
    )
    assert said == ["bringing `base`, which it reuses: 1 file, 7B"] * 2


def test_file_that_changes_before_it_is_brought_is_refused(settings: Settings, tree: Path, tmp_path: Path) -> None:
    (tree / "base").write_text("weights")
    _, reused = Sources(settings).settle(parse_spec({"command": ["x"], "reuse": {"base": "./base"}}), None)
    (tree / "base").write_text("other")
    files = LocalFiles(str(tmp_path / "records"))

    with pytest.raises(NotPossible) as refused:
        store_reused(reused, "jobs/j-1", files, lambda text: None)

    assert refused.value.message == "`./base` has changed since the launch began"
    assert files.names("jobs/j-1/reuse") == []


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("./nope", "there is no `./nope`, which `reuse` names"),
        ("/dev/null", "`/dev/null`, which `reuse` names, is neither a file nor a folder"),
        ("nope", "`nope` is no valid reuse"),
        ("j-0123456789abcdef01234567/model", "no job named `j-0123456789abcdef01234567`"),
        (
            "t-0123456789abcdef01234567/m/g0000001.a000001.n00000001.x",
            "version `t-0123456789abcdef01234567/m/g0000001.a000001.n00000001.x` of artifact `m` is gone",
        ),
    ],
)
def test_source_that_is_not_there_starts_nothing(here: Here, source: str, message: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        here.start("true", reuse={"base": source})

    assert refused.value.message == message
    assert not (here.settings.data_dir / "launched").exists()


def test_path_in_python_is_a_file_or_folder_of_this_machine(here: Here, tree: Path) -> None:
    (tree / "base").write_text("5\n")

    job = here.end("cat", "artifacts/base", capture={"model": Path("out")}, reuse={"base": Path("base")})

    assert read_log(job) == "5\n"


def test_tag_that_the_job_does_not_have_is_named_with_those_that_it_has(here: Here) -> None:
    made = here.end("sh", "-c", "echo 1 > out", capture={"out": "out"})

    with pytest.raises(UnknownName) as unknown:
        here.start("true", reuse={"base": f"{made.id}/model"})

    assert unknown.value.facts == ("known artifacts: out",)


def test_path_of_an_artifact_is_the_same_in_a_function_that_is_a_job(here: Here, tree: Path) -> None:
    (tree / "lab.py").write_text(
        "import runtime\n\n\ndef fit(n):\n    path = runtime.artifact('model')\n    path.mkdir(exist_ok=True)\n"
        "    (path / 'w').write_text(str(n))\n    return [str(path.name), (runtime.artifact('base')).read_text()]\n"
    )
    (tree / "base").write_text("weights")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tree))
        import lab  # type: ignore[import-not-found]

        job = runtime.launch(
            lab.fit,
            "local",
            args=[7],
            settings=here.settings,
            capture={"model": "out"},
            reuse={"base": "./base"},
        )
    here.jobs.append(job)

    assert job.result(timeout=PATIENCE_S) == ["out", "weights"]
    assert find_artifact(job, "model").state == "final"


def test_calls_on_a_target_have_artifacts_each_their_own(here: Here, tree: Path) -> None:
    (tree / "labmap.py").write_text(
        "import runtime\n\n\ndef save(n, variant=0):\n    runtime.artifact('out').write_text(str(n))\n    return str(runtime.artifact('out').name)\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tree))
        import labmap  # type: ignore[import-not-found]

        calls = runtime.map(labmap.save, [10, 200], name="save", target="local", capture={"out": "out"})
        found = calls.results(timeout=PATIENCE_S)
        one = runtime.run_experiment(
            labmap.save, 5, name="one", target="local", capture={"out": "artifacts/out"}, reuse={"base": "save.1/out"}
        )
        with pytest.raises(RequestRefused):
            runtime.run_experiment(labmap.save, 5, name="here", capture={"out": "out"})

    assert (found, one.result(timeout=PATIENCE_S)) == (["out", "out"], "out")
    with open_job("save", settings=here.settings) as job:
        assert [(each.index, each.size_bytes) for each in list_artifacts(job)] == [(0, 2), (1, 3)]


def test_fields_of_artifacts_are_part_of_the_spec_and_absent_without_any() -> None:
    spec = parse_spec(
        {"command": ["x"], "capture": {"b": "out", "a": "log"}, "capture_every": "30s", "reuse": {"m": "t/m"}}
    )

    assert spec_fields(spec) == {
        "command": ["x"],
        "capture": {"a": "log", "b": "out"},
        "capture_every": 30.0,
        "reuse": {"m": "t/m"},
    }
    assert parse_spec(spec_fields(spec)) == spec
    assert encode_spec(parse_spec({"command": ["x"]})) == '{"command":["x"]}'


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"capture": {"m": "../x"}}, "has `capture.m` that is '../x', expected a relative path"),
        ({"capture": {"m": "/x"}}, "has `capture.m` that is '/x', expected a relative path"),
        ({"capture": {"a b": "x"}}, "has `capture` that has the tag 'a b'"),
        ({"capture": {"a": "x", "b": "x/y"}}, "has 'b' at `x/y`, inside 'a' at `x`"),
        ({"capture": {"a": "x"}, "reuse": {"A": "t/m"}}, "which are one variable"),
        ({"capture": {"m": "x"}, "capture_every": "0.5s"}, "has `capture_every` that is 0.5, expected seconds from 1"),
        ({"capture_every": "5s"}, "has `capture_every`, and no `capture`"),
        ({"capture": {"m": "x"}, "code": {"mode": "none"}}, "no writable snapshot of the code"),
        ({"reuse": {"m": "t/m"}, "code": {"writable": False}}, "no writable snapshot of the code"),
        ({"reuse": {"m": ""}}, "has no source in `reuse.m`"),
    ],
)
def test_artifacts_that_no_attempt_could_have_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidSpec) as refused:
        parse_spec({"command": ["x"], **fields})

    assert said in refused.value.message


def test_capture_of_a_run_on_several_machines_is_refused(settings: Settings, tree: Path) -> None:
    slurm = {"kind": "slurm", "records": "/lab/records", "partition": "gpu"}
    settings = Settings(
        project=Project(root=settings.project.root, targets={"hpc": slurm}),
        data_dir=settings.data_dir,
        cache_dir=settings.cache_dir,
        config_dir=settings.config_dir,
    )
    request = LaunchRequest({"command": ["x"], "nodes": 2, "capture": {"m": "x"}})
    with pytest.raises(NotPossible) as refused:
        prepare(request, find_target("hpc", settings), settings, LaunchOptions())

    assert refused.value.message == "`capture` saves what one machine writes, and a run of this job takes 2 machines"


def test_bundle_takes_no_artifact_along(settings: Settings, tree: Path, tmp_path: Path) -> None:
    (tree / "base").write_text("1")
    request = LaunchRequest({"command": ["x"], "reuse": {"base": "./base"}})
    prepared = prepare(request, find_target("local", settings), settings, LaunchOptions())

    with pytest.raises(NotPossible) as refused:
        export_bundle(prepared.plan, tmp_path / "bundle", b"")

    assert refused.value.message == "the job reuses the artifact `base`, and a bundle takes the code alone"


def test_name_of_a_job_finds_its_artifacts(here: Here) -> None:
    here.end("sh", "-c", "echo 1 > out", capture={"out": "out"}, name="train")

    with open_job("train", settings=here.settings) as job:
        assert [(each.tag, each.state) for each in list_artifacts(job)] == [("out", "final")]
