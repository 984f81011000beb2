"""The shim with a bucket as record root: its promises for a folder, and those for buckets only."""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runtime.jobs.hosts.bucket import BucketFiles
from runtime.shim import bucket_record
from runtime.shim.bucket import Bucket
from runtime.shim.bucket_record import BucketRecord, Carrier, Checkpoints
from runtime.shim.cloud import Amazon, BucketDenied, BucketUnreachable, Google
from runtime.shim.common import TransferStopped
from runtime.shim.file_manifest import status_of
from runtime.shim.record import RunRecord
from tests.fakes.faults import Fault
from tests.fakes.gcs import GcsServer
from tests.services_support import MotoServer
from tests.shim_support import JOB, ShimJob, find_pythons, make_asked, make_job, wait_for
from tests.unit.shim import test_shim as folder

URL = "gs://lab/runtime"
RUN = f"jobs/{JOB}/runs/0"
WRITES_ODD_NAMES = """
import os
os.chdir(os.environ["RUNTIME_OUTPUT_DIR"])
open(b"\\xff.txt", "w").close()
open("kept", "w").write("x")
"""


def begin_run(record: BucketRecord, folder: Path, attempts: int = 1) -> RunRecord:
    """A run of so many attempts, whose files are in this folder."""
    run = RunRecord(record, 0)
    run.folder = str(folder)
    for number in range(1, attempts + 1):
        record.begin(run.attempt_name(number), "{}")
    return run


@dataclass
class BucketJob(ShimJob):
    """A job that is copied to the bucket before a shim starts, and back after it has ended.

    Each shim has its own folder, as on a machine that has never seen the job.
    """

    url: str = URL
    starts: int = 0
    copied: dict[str, bytes] = field(default_factory=dict)
    """What was copied before, either way, and need not be again."""

    @functools.cached_property
    def files(self) -> BucketFiles:
        return BucketFiles(self.url)

    def start(self, *words: str, **environ: Any) -> subprocess.Popen[str]:
        for part in ("jobs", "done"):  # and no folder in which an earlier shim may still work
            for path in (self.root / part).rglob("*"):
                name = path.relative_to(self.root).as_posix()
                if path.is_file() and self.copied.get(name) != path.read_bytes():
                    self.copied[name] = path.read_bytes()
                    self.files.write(name, self.copied[name])
        self.starts += 1
        own = self.root / f"machine-{self.starts}" / "jobs" / JOB
        names = ("STORAGE_EMULATOR_HOST", "AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
        environ = {**{name: os.environ[name] for name in names if name in os.environ}, **environ}
        return super().start("--bucket", self.url, *words, folder=own, **environ)

    def finish(self, started: subprocess.Popen[str]) -> int:
        code = super().finish(started)
        there = [(f"jobs/{JOB}/{name}", size) for name, size in self.files.tree(f"jobs/{JOB}")]
        there += [(f"done/{name}", 0) for name in self.files.names("done")]
        # Only signs of life are ever written over, and they grow.
        names = [name for name, size in there if name not in self.copied or len(self.copied[name]) != size]
        for name, content in self.files.read_many(names).items():
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            (self.root / name).write_bytes(content)
            self.copied[name] = content
        return code


MakeJob = Callable[..., BucketJob]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[GcsServer]:
    running = GcsServer().start()
    running.make_bucket("lab")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", running.url)
    yield running
    running.stop()


@pytest.fixture
def job(server: GcsServer, tmp_path: Path) -> MakeJob:
    return maker(tmp_path, sys.executable)


def maker(root: Path, python: str, url: str = URL) -> MakeJob:
    def make(script: str | Sequence[str], **changes: Any) -> BucketJob:
        made = make_job(root, python, script, **changes)
        return BucketJob(made.root, made.python, made.order, url=url)

    return make


# promises for folders that hold for buckets

test_outcome_is_said_in_a_name = folder.test_shim_runs_the_command_and_says_the_outcome_in_a_name
test_each_rank_has_its_place_and_log = folder.test_shim_runs_each_rank_with_its_place_and_a_log_of_its_own
test_tree_is_the_submitted_one = folder.test_shim_runs_the_submitted_tree_byte_for_byte_and_each_attempt_has_its_own
test_snapshot_of_other_bytes_is_refused = folder.test_shim_refuses_a_snapshot_of_other_bytes
test_failures_are_retried_until_the_budget_is_spent = (
    folder.test_shim_retries_failures_in_place_until_the_budget_is_spent
)


# What each code means is decided before the record hears of it; here one goes on, one ends.
@pytest.mark.parametrize(("code", "ends"), [(75, ["requeue", "requeue"]), (9, ["app_failed"])])
def test_exit_codes_mean_the_same(job: MakeJob, code: int, ends: list[str]) -> None:
    result = ("succeeded", 0, 3) if code == 75 else ("app_failed", 9, 1)

    folder.test_shim_does_what_an_exit_code_means(job, code, {"9": "fail"}, ends, result)


test_backend_is_asked_to_retry_by_an_exit_code = folder.test_shim_that_has_the_backend_retry_says_so_by_its_exit_code
test_result_that_is_there_counts = folder.test_shim_that_finds_a_result_exits_with_it_and_runs_nothing
test_other_owner_makes_a_twin = folder.test_shim_that_finds_another_owner_is_a_twin
test_two_timeouts_without_checkpoint_are_final = (
    folder.test_shim_at_the_time_limit_ends_the_whole_tree_and_two_without_checkpoint_are_final
)
test_checkpoints_before_the_limit_go_on_for_free = (
    folder.test_shim_asks_for_a_checkpoint_before_the_time_limit_and_goes_on_for_free
)
test_result_is_left_where_the_backend_shows_it = folder.test_shim_leaves_the_result_where_the_backend_shows_it
test_kill_at_any_step_ends_with_one_result = folder.test_shim_killed_at_any_step_and_started_again_ends_with_one_result
test_three_losses_in_a_row_are_final = folder.test_shim_lost_three_times_in_a_row_is_not_started_a_fourth_time
test_two_at_once_commit_one_result = folder.test_shim_started_twice_at_once_commits_one_result
test_runs_are_packed_into_slots = folder.test_shim_packs_runs_into_slots_that_share_cpus_and_gpus
test_index_that_is_not_in_the_order_is_said = folder.test_shim_with_an_index_that_is_not_in_the_order_says_so


# buckets only


def test_log_comes_in_chunks_while_the_command_runs_and_reads_as_one(job: MakeJob) -> None:
    made = job("echo first; while [ ! -e go ]; do sleep 0.1; done; echo last")
    started = made.start()
    wait_for(lambda: made.files.read(f"{RUN}/a0001/rank0.log") == b"first\n", "the first chunk")
    for work in (made.root / "scratch").rglob("work"):
        (work / "go").write_text("")

    assert made.finish(started) == 0

    chunks = [blob.key for blob in made.files._blobs.list_blobs(f"{RUN}/a0001/rank0")]
    assert len(chunks) >= 2
    assert made.files.read(f"{RUN}/a0001/rank0.log") == b"first\nlast\n"
    assert made.files.read_from(f"{RUN}/a0001/rank0.log", 4, 4) == b"t\nla"
    assert made.files.read_from(f"{RUN}/a0001/rank0.log", 8) == b"st\n"
    assert "rank0.log" in made.files.names(f"{RUN}/a0001", "rank")
    assert ("rank0.log", 11) in made.files.tree(f"{RUN}/a0001")


def test_log_that_outgrows_its_limit_is_no_longer_in_the_bucket(job: MakeJob) -> None:
    flood = "yes & while [ ! -e go ]; do sleep 0.1; done; kill $!; wait; echo end"
    made = job(flood, log_bytes=65_536)
    made.constants |= {"FIRST_LOOK_S": 0.05, "LOG_FLUSH_S": 0.05}
    started = made.start()
    try:
        wait_for(lambda: b"are left out here" in (made.files.read(f"{RUN}/a0001/rank0.log") or b""), "a full log")
    finally:
        for work in (made.root / "scratch").rglob("work"):
            (work / "go").write_text("")

    assert made.finish(started) == 0

    log = made.files.read(f"{RUN}/a0001/rank0.log") or b""
    assert len(log) <= 65_536
    assert log.endswith(b"\nend\n")
    assert log.count(b"are left out here") == 1


def test_mark_in_the_bucket_cancels_a_run(job: MakeJob) -> None:
    made = job("sleep 600")
    started = made.start()
    wait_for(lambda: made.files.names(f"{RUN}/a0001", "beat"), "the first sign of life")
    made.files.create(f"jobs/{JOB}/cancel", b"{}")

    assert made.finish(started) == 1

    assert made.results() == {0: ("cancelled", 1, 1)}


def test_run_that_is_killed_leaves_its_newest_whole_checkpoint_to_the_next_machine(job: MakeJob) -> None:
    script = (
        "if [ $RUNTIME_ATTEMPT = 2 ]; then cd $RUNTIME_CHECKPOINT_DIR; cat step deep/weights; exit; fi; "
        "mkdir $RUNTIME_CHECKPOINT_DIR/deep; echo weights > $RUNTIME_CHECKPOINT_DIR/deep/weights; "
        "echo 1 > $RUNTIME_CHECKPOINT_DIR/step; while [ ! -e go ]; do sleep 0.1; done; "
        "echo 2 > $RUNTIME_CHECKPOINT_DIR/step; sleep 600"
    )
    made = job(script)

    def kept(file: str) -> list[str]:
        """Return the digest of a file in each checkpoint, oldest first."""
        names = made.files.names(f"{RUN}/checkpoint", "a000")
        lists = [json.loads(made.files.read(f"{RUN}/checkpoint/{name}") or b"{}").get("files", {}) for name in names]
        return [each[file]["sha256"] for each in lists if each.get(file)]

    def wait_for_step(content: bytes) -> None:
        wait_for(lambda: kept("step")[-1:] == [hashlib.sha256(content).hexdigest()], f"a checkpoint with {content!r}")

    started = made.start()
    wait_for_step(b"1\n")
    for work in (made.root / "scratch").rglob("work"):
        (work / "go").write_text("")
    wait_for_step(b"2\n")
    os.kill(started.pid, signal.SIGKILL)
    made.finish(started)

    assert made.run() == 0

    assert made.log(attempt=2) == "2\nweights\n"
    (contents,) = set(kept("deep/weights"))
    assert contents in made.files.names(f"{RUN}/checkpoint/data")


def put_checkpoint(made: BucketJob, name: str, **files: bytes) -> None:
    """Put a checkpoint as a shim would, for the attempt and number in its name."""
    entries = {}
    for file, content in files.items():
        digest = hashlib.sha256(content).hexdigest()
        made.files.write(f"{RUN}/checkpoint/data/{digest}", content)
        entries[file] = {"sha256": digest, "size": len(content), "mode": 0o600}
    made.files.write(f"{RUN}/checkpoint/{name}", json.dumps({"files": entries}).encode())


def test_checkpoint_that_a_shim_taken_for_dead_sends_late_is_not_the_newest(job: MakeJob) -> None:
    made = job("cat $RUNTIME_CHECKPOINT_DIR/step")
    put_checkpoint(made, "a0001.000007.json", step=b"of the first")
    put_checkpoint(made, "a0002.000000.json", step=b"of the second")
    for attempt in (1, 2):
        made.files.write(f"{RUN}/a000{attempt}/start.json", b"{}")

    assert made.run() == 0

    assert made.log(attempt=3) == "of the second"


@pytest.mark.parametrize("damage", [None, b"other bytes"])
def test_checkpoint_that_is_not_whole_gives_way_to_the_one_before_with_nothing_of_it_left(
    job: MakeJob, damage: bytes | None
) -> None:
    made = job("cd $RUNTIME_CHECKPOINT_DIR; ls; cat step")
    put_checkpoint(made, "a0001.000000.json", step=b"old")
    put_checkpoint(made, "a0001.000001.json", a_shard=b"of the new one", step=b"new")
    gone = f"{RUN}/checkpoint/data/{hashlib.sha256(b'new').hexdigest()}"
    if damage is None:
        made.files.remove(gone)
    else:
        made.files.write(gone, damage)

    assert made.run() == 0

    assert made.log() == "step\nold"
    assert "a file of the checkpoint a0001.000001.json is gone" in made.stderr


def test_checkpoint_comes_back_with_its_links_folders_and_modes(job: MakeJob) -> None:
    script = (
        "cd $RUNTIME_CHECKPOINT_DIR; if [ $RUNTIME_ATTEMPT = 2 ]; then find . | sort; readlink latest; cat latest/w; "
        "test -x step-1/run && echo runs; exit; fi; "
        "mkdir -p step-1 empty; echo weights > step-1/w; ln -s step-1 latest; cp /bin/true step-1/run; exit 75"
    )
    made = job(script)

    assert made.run() == 0

    assert made.log(attempt=2).splitlines() == [
        *(".", "./empty", "./latest", "./step-1", "./step-1/run", "./step-1/w"),
        *("step-1", "weights", "runs"),
    ]


def test_checkpoint_that_is_replaced_while_it_is_sent_is_the_one_that_was_whole(
    server: GcsServer, tmp_path: Path
) -> None:
    record = BucketRecord(Bucket(URL), str(tmp_path / "jobs" / JOB))
    run = begin_run(record, tmp_path / "runs/0")
    checkpoints = Checkpoints(record, run, 1)
    checkpoints.restore()
    folder = tmp_path / "runs/0/checkpoint"
    for name in ("a", "b"):
        (folder / name).write_text("first")
    upload = record.bucket.upload

    def replace_meanwhile(*args: Any) -> None:
        for name in ("a", "b"):
            (folder / "fresh").write_text("second, longer")
            (folder / "fresh").rename(folder / name)
        upload(*args)

    checkpoints.send(lambda: False)
    record.bucket.upload = replace_meanwhile
    checkpoints.send(lambda: False)

    (name,) = [each for each in record.names("runs/0/checkpoint") if each.endswith(".json")]
    first = hashlib.sha256(b"first").hexdigest()
    said = json.loads(record.read(f"runs/0/checkpoint/{name}"))["files"]
    assert {each: about["sha256"] for each, about in said.items()} == {"a": first, "b": first}
    assert record.bucket.get(record.key(f"runs/0/checkpoint/data/{first}")) == b"first"


@pytest.mark.parametrize("newest", [1, 2], ids=["alone", "after another attempt has begun"])
def test_older_checkpoints_go_with_files_that_no_newer_one_has_unless_another_attempt_may_need_them(
    server: GcsServer, tmp_path: Path, newest: int
) -> None:
    record = BucketRecord(Bucket(URL), str(tmp_path / "jobs" / JOB))
    run = begin_run(record, tmp_path / "runs/0", newest)
    checkpoints = Checkpoints(record, run, 1)
    checkpoints.restore()
    folder = tmp_path / "runs/0/checkpoint"
    (folder / "weights").write_text("the same in all")
    contents = {"weights": hashlib.sha256(b"the same in all").hexdigest()}
    for number in range(4):
        (folder / "step").write_text("x" * number)
        contents[str(number)] = hashlib.sha256(b"x" * number).hexdigest()
        checkpoints.send()

    kept = range(2, 4) if newest == 1 else range(4)
    names = record.names("runs/0/checkpoint")
    assert [name for name in names if name.endswith(".json")] == [f"a0001.{number:06d}.json" for number in kept]
    wanted = {contents["weights"], *(contents[str(number)] for number in kept)}
    assert set(record.names("runs/0/checkpoint/data")) == wanted
    said = json.loads(record.read("runs/0/checkpoint/a0001.000003.json"))["files"]
    assert {name: about["size"] for name, about in said.items()} == {"weights": 15, "step": 3}
    Checkpoints(record, run, 2).restore()
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"weights": "the same in all", "step": "xxx"}


def test_checkpoint_is_restored_among_names_of_others(server: GcsServer, tmp_path: Path) -> None:
    record = BucketRecord(Bucket(URL), str(tmp_path / "jobs" / JOB))
    run = begin_run(record, tmp_path / "runs/0")
    checkpoints = Checkpoints(record, run, 1)
    checkpoints.restore()
    (tmp_path / "runs/0/checkpoint/a").write_text("kept")
    checkpoints.send()
    for name in ("notes.json", "a0001.000000.json.bak.json", "x//a0009.000000.json"):
        server.fill("lab", [f"runtime/jobs/{JOB}/runs/0/checkpoint/{name}"], b"{}")

    Checkpoints(record, run, 2).restore()

    assert (tmp_path / "runs/0/checkpoint/a").read_text() == "kept"


def test_file_that_is_written_over_while_it_is_sent_makes_no_checkpoint(server: GcsServer, tmp_path: Path) -> None:
    record = BucketRecord(Bucket(URL), str(tmp_path / "jobs" / JOB))
    run = begin_run(record, tmp_path / "runs/0")
    checkpoints = Checkpoints(record, run, 1)
    checkpoints.restore()
    (tmp_path / "runs/0/checkpoint/a").write_text("first")
    upload = record.bucket.upload

    def write_over(*args: Any) -> None:
        upload(*args)
        with (tmp_path / "runs/0/checkpoint/a").open("a") as opened:
            opened.write("and more")

    checkpoints.send(lambda: False)
    record.bucket.upload = write_over
    checkpoints.send(lambda: False)

    assert [each for each in record.names("runs/0/checkpoint") if each.endswith(".json")] == []


@pytest.mark.parametrize("what", ["stop", "goes"], ids=["a signal", "a notice"])
def test_shim_that_is_told_to_stop_begins_nothing_and_brings_no_more(
    server: GcsServer, tmp_path: Path, what: str
) -> None:
    record = BucketRecord(Bucket(URL), str(tmp_path / "jobs" / JOB))
    run = begin_run(record, tmp_path / "runs/0")
    server.fail_next("GET", [Fault.REFUSE_503] * 1000)
    asked = make_asked()
    threading.Timer(0.5, lambda: setattr(asked, what, True)).start()

    assert record.before(run, 1, asked) is False
    assert record.carrier is None


def test_upload_that_is_not_wanted_any_more_is_given_up(
    server: GcsServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("runtime.shim.bucket.PART_BYTES", 1 << 20)
    (tmp_path / "large").write_bytes(bytes(3 << 20))
    looks = iter([False, False, True])

    with pytest.raises(TransferStopped):
        Bucket(URL).upload("a/large", str(tmp_path / "large"), 0.0, lambda: next(looks))

    assert not server.uploads


def test_output_that_cannot_be_sent_is_said_and_the_run_has_succeeded(job: MakeJob) -> None:
    made = job(
        [
            sys.executable,
            "-c",
            WRITES_ODD_NAMES,
        ]
    )

    assert made.run() == 0

    assert made.results() == {0: ("succeeded", 0, 1)}
    assert made.files.tree(f"{RUN}/output/a0001") == [("kept", 1)]
    assert "an output is left out" in made.stderr


def test_outputs_are_in_the_bucket_before_the_result_is(job: MakeJob, server: GcsServer) -> None:
    made = job(
        "mkdir -p $RUNTIME_OUTPUT_DIR/'a b'; echo 1 > $RUNTIME_OUTPUT_DIR/'a b'/é#~; ln -s 'a b' $RUNTIME_OUTPUT_DIR/link"
    )

    assert made.run() == 0

    puts = [urllib.parse.unquote(each.path) for each in server.log if each.method == "PUT"]
    output, result = f"/lab/runtime/{RUN}/output/a0001/a b/é#~", f"/lab/runtime/{RUN}/result"
    assert puts.index(output) < puts.index(result)
    assert made.files.tree(f"{RUN}/output/a0001") == [("a b/é#~", 2)]
    assert (made.folder / "runs/0/output/a0001/a b/é#~").read_text() == "1\n"


def test_outputs_of_the_patterns_are_in_the_bucket_while_the_command_runs_and_all_of_them_at_its_end(
    job: MakeJob, tmp_path: Path
) -> None:
    script = (
        "cd $RUNTIME_OUTPUT_DIR; mkdir plots; echo 1 > loss.csv; echo 1 > plots/a.csv; echo 1 > model; "
        "while [ ! -e $STOP ]; do sleep 0.05; done; echo 2 >> loss.csv"
    )
    sync = {"every_s": 0.2, "include": ["*.csv"]}
    made = job(script, env={"STOP": str(tmp_path / "stop")}, outputs=sync)
    place = f"{RUN}/output/a0001"

    started = made.start()
    wait_for(lambda: len(made.files.tree(place)) == 2, "the outputs of the patterns")
    early = made.files.tree(place)
    (tmp_path / "stop").touch()

    assert made.finish(started) == 0
    assert early == [("loss.csv", 2), ("plots/a.csv", 2)]
    assert made.files.tree(place) == [("loss.csv", 4), ("model", 2), ("plots/a.csv", 2)]


def test_output_that_has_not_changed_is_sent_once(server: GcsServer, tmp_path: Path) -> None:
    folder = tmp_path / "jobs" / JOB
    run = RunRecord(BucketRecord(Bucket(URL), str(folder)), 0)
    output = folder / "runs/0/output/a0001"
    output.mkdir(parents=True)
    (output / "old").write_text("old")
    status = (output / "old").stat()
    carrier = Carrier(run.record, run, 1, Checkpoints(run.record, run, 1))
    carrier.synced = {str(output / "old"): status_of(status)}
    (output / "new").write_text("new")

    carrier.finish()

    assert run.record.names("runs/0/output/a0001") == ["new"]


@pytest.mark.parametrize(
    "faults", [[Fault.REFUSE_503, Fault.REFUSE_429], [Fault.STORE_THEN_503], [Fault.STORE_THEN_DROP, Fault.REFUSE_503]]
)
@pytest.mark.daily(1)
def test_answers_that_are_lost_change_nothing(job: MakeJob, server: GcsServer, faults: list[Fault]) -> None:
    made = job("echo $RUNTIME_ATTEMPT; exit 7", retry={"failure": 1})
    for kind in ("GET", "LIST", "PUT", "PUT", "PUT"):
        server.fail_next(kind, faults)

    assert made.run() == 1

    assert made.results() == {0: ("app_failed", 7, 2)}
    assert made.ends() == ["app_failed", "app_failed"]
    assert [made.log(attempt=number) for number in (1, 2)] == ["1\n", "2\n"]


@pytest.mark.parametrize(
    ("url", "said"), [(URL, "403"), ("gs://nowhere/x", "404 NoSuchBucket"), ("gs:///x", "it is no gs://")]
)
def test_bucket_that_cannot_be_used_is_said_and_nothing_is_begun(
    job: MakeJob, server: GcsServer, url: str, said: str
) -> None:
    made = job("true")
    server.fail_next("GET", [Fault.REFUSE_403] if url == URL else [])

    assert made.finish(made.start("--bucket", url)) == 2

    assert f"shim: the record root {url} cannot be used: " in made.stderr
    assert said in made.stderr
    assert made.files.names(f"jobs/{JOB}/owners") == []


@pytest.mark.service
def test_shim_does_the_same_with_s3_on_every_python(moto_server: MotoServer, tmp_path: Path) -> None:
    import boto3

    boto3.client("s3", endpoint_url=moto_server.url, region_name="us-east-1").create_bucket(Bucket="lab")
    for version, python in find_pythons().items():
        made = maker(tmp_path / version, python, f"s3://lab/{version}")(
            "cat $RUNTIME_CHECKPOINT_DIR/n 2>/dev/null; echo $RUNTIME_ATTEMPT > $RUNTIME_CHECKPOINT_DIR/n; "
            "echo out > $RUNTIME_OUTPUT_DIR/o; [ $RUNTIME_ATTEMPT = 2 ] || exit 1",
            retry={"failure": 1},
        )

        assert made.run() == 0, made.stderr

        assert made.results() == {0: ("succeeded", 0, 2)}
        assert [made.log(attempt=number) for number in (1, 2)] == ["", "1\n"]
        assert made.files.tree(f"{RUN}/output/a0002") == [("o", 4)]


# the client


def test_file_that_is_large_goes_in_parts_and_comes_back_whole(
    server: GcsServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("runtime.shim.bucket.PART_BYTES", 1 << 20)
    server.least_part = 1 << 20
    content = os.urandom((5 << 20) // 2)
    (tmp_path / "large").write_bytes(content)
    bucket = Bucket(URL)

    bucket.upload("a/large", str(tmp_path / "large"))

    assert bucket.download("a/large", str(tmp_path / "back")) is True
    assert (tmp_path / "back").read_bytes() == content
    assert not server.uploads
    assert bucket.download("a/nothing", str(tmp_path / "none")) is False


@pytest.mark.parametrize("fault", [Fault.STORE_THEN_503, Fault.STORE_THEN_DROP])
def test_end_of_an_upload_whose_answer_was_lost_is_found_to_be_there(
    server: GcsServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: Fault
) -> None:
    monkeypatch.setattr("runtime.shim.bucket.PART_BYTES", 1 << 20)
    server.least_part = 1 << 20
    (tmp_path / "large").write_bytes(bytes(3 << 20))
    bucket = Bucket(URL)
    put = bucket._complete

    def complete(*args: Any) -> None:
        server.fail_next("POST", [fault])
        put(*args)

    monkeypatch.setattr(bucket, "_complete", complete)
    bucket.upload("a/large", str(tmp_path / "large"))

    assert len(bucket.get("a/large")) == 3 << 20


def test_clock_that_is_wrong_is_set_right_for_the_service_and_old_keys_are_asked_for_anew(
    nobody: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "A")
    dates: list[str] = []

    def answer(method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
        dates.append(headers["x-amz-date"])
        code = {1: b"RequestTimeTooSkewed", 2: b"ExpiredToken", 3: b"RequestTimeout"}.get(len(dates))
        return (403 if len(dates) == 1 else 400, b"<Error><Code>" + code + b"</Code></Error>") if code else (200, b"x")

    with answering(answer) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        bucket = Bucket("s3://b/p")
        bucket.cloud.skew = 1_000_000_000 - time.time()  # as on a machine whose clock is years behind
        assert bucket.get("k") == b"x"

    assert dates[0].startswith("2001")
    assert [date[:4] for date in dates[1:]] == [str(datetime.now(UTC).year)] * 3


def test_machine_that_gives_no_credentials_is_given_up_after_a_while(
    nobody: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.shim.bucket.CREDENTIALS_S", 0.1)
    with answering(lambda *_: (200, b'{"Code": "Failed"}')) as url:
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", url)
        with pytest.raises(BucketDenied, match="no credentials"):
            Bucket("s3://b/p").get("k")


def test_variables_of_the_record_root_count_before_those_of_the_command_and_stay_with_the_shim(
    job: MakeJob, server: GcsServer
) -> None:
    made = job("env")
    environ = {"STORAGE_EMULATOR_HOST": "http://127.0.0.1:9", "RUNTIME_RECORDS_STORAGE_EMULATOR_HOST": server.url}

    assert made.finish(made.start(**environ)) == 0

    seen = made.log().splitlines()
    assert "STORAGE_EMULATOR_HOST=http://127.0.0.1:9" in seen
    assert not [line for line in seen if line.startswith("RUNTIME_RECORDS_")]


def test_key_of_a_service_account_may_be_in_a_variable(nobody: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNTIME_RECORDS_GOOGLE_SERVICE_ACCOUNT_KEY", '{"type": "external_account"}')

    with pytest.raises(BucketDenied, match="credentials of type external_account in GOOGLE_SERVICE_ACCOUNT_KEY"):
        Google().credentials()


def test_parts_of_a_file_that_cannot_be_sent_are_given_up(
    server: GcsServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("runtime.shim.bucket.PART_BYTES", 1 << 20)
    (tmp_path / "large").write_bytes(bytes(3 << 20))
    server.fail_next("PUT", [Fault.REFUSE_403])

    with pytest.raises(BucketDenied):
        Bucket(URL).upload("a/large", str(tmp_path / "large"))

    assert not server.uploads
    assert Bucket(URL).get("a/large") is None


def test_bucket_that_is_silent_for_long_leaves_the_job_to_another_start(
    server: GcsServer,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("runtime.shim.bucket.PATIENCE_S", 0.5)
    server.fail_next("GET", [Fault.REFUSE_503] * 50)
    begun: list[Any] = []

    code = bucket_record.run(SimpleNamespace(bucket=URL), str(tmp_path / "jobs" / JOB), begun.append)

    # A counted restart: the attempt that would have begun counts as lost.
    assert (code, begun) == (12, [])
    assert f"the record root {URL} does not answer: jobs/{JOB}/order.json: 503" in capsys.readouterr().err


def test_machine_that_has_no_place_for_the_job_is_refused_with_the_reason(
    server: GcsServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "jobs").write_text("a file where a folder should be")

    code = bucket_record.run(SimpleNamespace(bucket=URL), str(tmp_path / "jobs" / JOB), pytest.fail)

    assert code == 2
    assert f"the record root {URL} cannot be used: " in capsys.readouterr().err


def test_names_are_those_of_one_folder_on_any_number_of_pages(
    server: GcsServer,
) -> None:
    server.fill("lab", [f"runtime/a/{number:05}/deep" for number in range(1500)] + ["runtime/a/x", "runtime/b"])

    names = Bucket(URL).names("a/")

    assert names == [*(f"{number:05}" for number in range(1500)), "x"]


PAGE_FAULTS = (
    Fault.REFUSE_503,
    Fault.STORE_THEN_DROP,
    Fault.CUT_OFF,
    Fault.RESET,
    Fault.REPEAT_PAGE,
    Fault.EMPTY_PAGE,
    Fault.STORE_THEN_STALL,
)


@pytest.mark.parametrize("fault", PAGE_FAULTS)
@pytest.mark.daily(2)
def test_names_with_a_fault_on_any_page_are_all_there(server: GcsServer, fault: Fault) -> None:
    server.fill("lab", [f"runtime/a/{number}/deep" for number in range(7)] + ["runtime/a/x", "runtime/b"])
    server.page_size = 2
    server.stall_s = 1.0
    bucket = Bucket(URL)
    bucket.answer_s = 0.5 if fault is Fault.STORE_THEN_STALL else 60.0

    for page in range(4):
        server.fail_next("LIST", [*[None] * page, fault])
        assert bucket.names("a/") == [*map(str, range(7)), "x"]
        assert server.faults_left == 0


def test_names_among_those_of_others_are_all_there(
    server: GcsServer,
) -> None:
    others = ["runtime/a//x", "runtime/a/../x", "runtime/a/\x01\ufffe", "runtime/a/", "runtime/a/é &<>"]
    server.fill("lab", [*others, "runtime/a/a0001/end", "runtime/a/zz"])

    assert set(Bucket(URL).names("a/")) == {"..", "\ufffd\ufffd", "a0001", "zz", "é &<>"}


def page(body: str, more: str = "") -> bytes:
    return f"<ListBucketResult>{more}{body}</ListBucketResult>".encode()


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"<html>sign in</html>",
        b"<Error><Code>InternalError</Code></Error>",
        page("<Contents><Key>runtime/a/x</Key></Contents>"),
        page("", "<IsTruncated>true</IsTruncated>"),
        page("", "<IsTruncated>true</IsTruncated><NextContinuationToken>t</NextContinuationToken>"),
        page("<Contents><Key>runtime/a/x</Key><Size>0</Size></Contents>")[:-5],
    ],
    ids=["nothing", "a page of a proxy", "an error", "no size", "no token", "the same token", "cut off"],
)
def test_listing_that_makes_no_sense_is_no_empty_one(
    nobody: None, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    with answering(lambda *_: (200, answer)) as url:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)

        with pytest.raises(BucketUnreachable):
            list(Bucket(URL).pages("runtime/a/", patience=0.0))


@contextlib.contextmanager
def answering(
    answer: Callable[[str, str, dict[str, str], bytes], tuple[int, bytes]], missing: int = 0
) -> Iterator[str]:
    """Serve answers of `answer(method, path, headers, body)`; the first answer lacks its last bytes."""
    cut = [missing]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            headers = {name.lower(): value for name, value in self.headers.items()}
            status, said = answer(self.command, self.path, headers, body)
            self.send_response(status)
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said[: len(said) - cut[0]])
            cut[0] = 0

        do_PUT = do_POST = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=running.serve_forever, args=(0.05,), daemon=True).start()
    yield f"http://127.0.0.1:{running.server_port}"
    running.shutdown()
    running.server_close()


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without any credentials."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_", "STORAGE_", "GCE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.parametrize("into_a_file", [False, True])
def test_answer_that_was_cut_off_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, into_a_file: bool
) -> None:
    asked: list[str] = []

    def answer(method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
        asked.append(path)
        return 200, b"all of it"

    with answering(answer, missing=3) as url:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        bucket = Bucket(URL)
        if into_a_file:
            assert bucket.download("k", str(tmp_path / "k")) is True
            assert (tmp_path / "k").read_bytes() == b"all of it"
        else:
            assert bucket.get("k") == b"all of it"

    assert asked == ["/lab/runtime/k"] * 2


def test_token_of_google_comes_from_the_machine(nobody: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
        assert headers["metadata-flavor"] == "Google"
        assert path == "/computeMetadata/v1/instance/service-accounts/default/token"
        return 200, b'{"access_token": "t-1", "expires_in": 3599, "token_type": "Bearer"}'

    with answering(answer) as url:
        monkeypatch.setenv("GCE_METADATA_HOST", url.removeprefix("http://"))
        google = Google()

        assert google.credentials() == "t-1"
        assert 3500 < google.ends - time.time() < 3600


def test_key_of_a_service_account_signs_for_a_token(
    nobody: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if not shutil.which("openssl"):
        pytest.skip("openssl is not installed")
    key, public = tmp_path / "key.pem", tmp_path / "public.pem"
    subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
    subprocess.run(["openssl", "rsa", "-in", key, "-pubout", "-out", public], check=True, capture_output=True)
    asked: list[dict[str, str]] = []

    def answer(method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
        asked.append(dict(urllib.parse.parse_qsl(body.decode())))
        return 200, b'{"access_token": "t-2", "expires_in": 3600}'

    with answering(answer) as url:
        about = {"type": "service_account", "client_email": "w@p", "private_key": key.read_text(), "token_uri": url}
        (tmp_path / "account.json").write_text(json.dumps(about))
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "account.json"))

        assert Google().credentials() == "t-2"

    head, claims, signature = asked[0]["assertion"].split(".")
    (tmp_path / "signature").write_bytes(base64.urlsafe_b64decode(signature + "=="))
    verify = ["openssl", "dgst", "-sha256", "-verify", public, "-signature", tmp_path / "signature"]
    subprocess.run(verify, input=f"{head}.{claims}".encode(), check=True, capture_output=True)
    said = json.loads(base64.urlsafe_b64decode(claims + "=="))
    assert (said["iss"], said["aud"], said["exp"] - said["iat"]) == ("w@p", url, 3600)


def test_keys_of_amazon_come_from_variables_a_role_a_container_a_file_or_the_machine(
    nobody: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    expires = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 3000))
    as_json = json.dumps({"AccessKeyId": "A", "SecretAccessKey": "S", "Token": "T", "Expiration": expires}).encode()
    as_xml = (
        "<R xmlns='x'><Credentials><AccessKeyId>W</AccessKeyId><SecretAccessKey>S</SecretAccessKey>"
        f"<SessionToken>T</SessionToken><Expiration>{expires}</Expiration></Credentials></R>"
    ).encode()

    def answer(method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
        match path:
            case "/latest/api/token" if method == "PUT":
                return 200, b"imds"
            case "/latest/meta-data/iam/security-credentials/" if headers["x-aws-ec2-metadata-token"] == "imds":
                return 200, b"role"
            case "/latest/meta-data/iam/security-credentials/role":
                return 200, as_json
            case "/container" if headers.get("authorization") == "pass":
                return 200, as_json.replace(b'"A"', b'"C"')
            case "/" if b"WebIdentityToken=jwt" in body:
                return 200, as_xml
        return 403, b""

    with answering(answer) as url:
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", url)
        machine = Amazon()
        assert machine.credentials() == ("A", "S", "T")
        assert 2900 < machine.ends - time.time() < 3100

        (tmp_path / ".aws").mkdir()
        (tmp_path / ".aws/credentials").write_text("[default]\naws_access_key_id = F\naws_secret_access_key = S\n")
        assert Amazon().credentials() == ("F", "S", None)

        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{url}/container")
        with pytest.raises(BucketDenied):
            Amazon().credentials()
        monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN", "pass")
        assert Amazon().credentials() == ("C", "S", "T")

        (tmp_path / "jwt").write_text("jwt")
        monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "jwt"))
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", f"{url}/")
        assert Amazon().credentials() == ("W", "S", "T")

        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "E")
        assert Amazon().credentials() == ("E", "", None)


def test_request_is_signed_as_amazon_documents_it(nobody: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The service itself is never called here; the expected signature comes from its vendor's implementation."""
    auth = pytest.importorskip("botocore.auth")
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI")
    monkeypatch.setenv("AWS_REGION", "eu-west-3")
    amazon = Amazon()
    for method, path, query, data in (
        ("GET", "/lab", "list-type=2&prefix=a%2Fb", None),
        ("PUT", "/lab/a%20b/%C3%A9~", "", b"content"),
    ):
        headers = {"If-None-Match": "*"} if data else {}
        made = amazon.sign(method, path, query, headers, data)

        request = AWSRequest(method=method, url=f"{amazon.endpoint}{path}?{query}", data=data, headers=dict(headers))
        request.context["timestamp"] = made["x-amz-date"]
        signer = auth.S3SigV4Auth(Credentials("AKIDEXAMPLE", "wJalrXUtnFEMI"), "s3", "eu-west-3")
        for name in ("x-amz-content-sha256", "x-amz-date"):
            request.headers[name] = made[name]
        canonical = signer.canonical_request(request)
        expected = signer.signature(signer.string_to_sign(request, canonical), request)
        assert made["Authorization"].endswith(f"Signature={expected}")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("../../x", "leads to a folder above"),
        ("/x", "is an absolute path"),
        ("out/x", "leads through 'out', which is no folder here"),
    ],
)
def test_checkpoint_whose_list_names_a_file_elsewhere_is_refused_and_an_earlier_one_is_taken(
    server: GcsServer, tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str, why: str
) -> None:
    record = BucketRecord(Bucket(URL), str(tmp_path / "jobs" / JOB))
    run = begin_run(record, tmp_path / "jobs" / "runs/0")
    checkpoints = Checkpoints(record, run, 1)
    checkpoints.restore()
    (tmp_path / "jobs/runs/0/checkpoint/good").write_text("good")
    checkpoints.send()
    evil = hashlib.sha256(b"evil").hexdigest()
    record.bucket.put(record.key(f"runs/0/checkpoint/data/{evil}"), b"evil")
    (tmp_path / "outside").mkdir()
    files = {"out": {"link": str(tmp_path / "outside")}, name: {"sha256": evil, "size": 4, "mode": 0o4755}}
    record.write("runs/0/checkpoint/a0009.000000.json", json.dumps({"files": files}))

    checkpoints.restore()

    assert [path.name for path in (tmp_path / "jobs/runs/0/checkpoint").iterdir()] == ["good"]
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.read_bytes() == b"evil"]
    assert f"the checkpoint a0009.000000.json is refused: {name!a} {why}" in capfd.readouterr().err


def test_checkpoint_brings_no_mode_that_changes_who_runs_it(server: GcsServer, tmp_path: Path) -> None:
    record = BucketRecord(Bucket(URL), str(tmp_path / "jobs" / JOB))
    run = begin_run(record, tmp_path / "runs/0")
    content = hashlib.sha256(b"x").hexdigest()
    record.bucket.put(record.key(f"runs/0/checkpoint/data/{content}"), b"x")
    files = {"a": {"sha256": content, "size": 1, "mode": 0o6755}, "d": {"folder": True}, "l": {"link": "/nowhere"}}
    record.write("runs/0/checkpoint/a0001.000000.json", json.dumps({"files": files}))

    Checkpoints(record, run, 2).restore()

    folder = tmp_path / "runs/0/checkpoint"
    assert (folder / "a").stat().st_mode & 0o7777 == 0o755
    assert ((folder / "d").is_dir(), str((folder / "l").readlink())) == (True, "/nowhere")


@pytest.mark.parametrize(("codes", "left"), [(["0", "0"], []), (["0", "75"], [f"{JOB}.0"])])
def test_name_of_a_part_leaves_the_index_in_the_bucket_with_its_last_result(
    job: MakeJob, codes: list[str], left: list[str]
) -> None:
    runs = {str(index): {"command": ["sh", "-c", f"exit {code}"]} for index, code in enumerate(codes)}
    entry = {"name": f"open/local/{JOB}", "parts": [[0, 2]]}
    made = job("", runs=runs, open=entry, retries="backend")
    for name in (f"{JOB}.0", f"{JOB}.1"):
        made.files.create(f"open/local/{name}", b"")

    made.run("--indices", "0-1")

    # The other part's name is none of this shim's.
    assert made.files.names("open/local") == [*left, f"{JOB}.1"]
