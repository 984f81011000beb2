"""The shim: its promises on every platform, on every Python of this machine."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from runtime.jobs.hosts import agent
from runtime.shim.attempt import CommandAttempt
from runtime.shim.bundle import build_shim, list_shipped
from runtime.shim.common import NoCapacity
from runtime.shim.environment import find_environment
from runtime.shim.files import create_whole, write_patiently, write_whole
from runtime.shim.gpus import check_gpus
from runtime.shim.logs import Logs, RankLog, render_gap
from runtime.shim.main import parse_indices
from runtime.shim.packed_runs import share_out
from runtime.shim.processes import StopRequests, boot_id, is_alive, list_processes
from runtime.shim.ranks import setup_script
from runtime.shim.record import FolderRecord, RunRecord
from runtime.shim.resource_usage import DiskUse, mount_points
from runtime.shim.retry import decide, name_end
from runtime.snapshots.snapshot import make_snapshot
from tests.services_support import require
from tests.shim_support import (
    DAEMON,
    IMPORT,
    JOB,
    PATIENCE_S,
    SHIM,
    ShimJob,
    add_snapshot,
    find_pythons,
    lives,
    make_asked,
    make_job,
    processes_with,
    wait_for,
    wait_until_it_listens,
)

PYTHONS = find_pythons()
OWN = f"{sys.version_info[0]}.{sys.version_info[1]}"
RETRY = {"failure": 1, "preemption": 2, "on_exit": {}, "backoff_s": [1.0, 4.0]}

MakeJob = Callable[..., ShimJob]


OLDEST, NEWEST = (
    next(iter(sorted(PYTHONS, key=lambda version: int(version[2:])))),
    max(PYTHONS, key=lambda version: int(version[2:])),
)


@pytest.fixture(
    params=[
        pytest.param(version, marks=[] if version == OWN else [pytest.mark.service], id=f"python{version}")
        for version in dict.fromkeys((OWN, OLDEST, NEWEST))
    ]
)
def job(request: pytest.FixtureRequest, tmp_path: Path) -> MakeJob:
    def make(script: str | Sequence[str], **changes: Any) -> ShimJob:
        return make_job(tmp_path, PYTHONS[request.param], script, **changes)

    return make


# a run


def test_shim_runs_the_command_and_says_the_outcome_in_a_name(job: MakeJob) -> None:
    made = job("echo out; echo err >&2; pwd > $RUNTIME_OUTPUT_DIR/where")

    assert made.run() == 0

    assert made.results() == {0: ("succeeded", 0, 1)}
    assert made.log() == "out\nerr\n"
    assert made.left_over() == []
    assert json.loads((made.folder / "runs/0/result").read_text())["reason"] == "succeeded"


def test_shim_gives_the_command_the_environment_that_every_job_sees(job: MakeJob) -> None:
    made = job(
        "env",
        env={"A": "1"},
        runs={3: {"env": {"SEED": "3"}}},
        time_limit_s=600,
        checkpoint={"signal": "USR1", "lead_s": 5},
        name="fit",
    )

    began = time.time()
    assert made.run("--index", "3", RUNTIME_RANK="9", RUNTIME_OTHER="leaks") == 0
    ended = time.time()

    seen = dict(line.split("=", 1) for line in made.log(3).splitlines() if "=" in line)
    folder = made.folder / "runs" / "3"
    wanted = {
        "A": "1",
        "SEED": "3",
        "RUNTIME_JOB_ID": JOB,
        "RUNTIME_EXPERIMENT": "fit",
        "RUNTIME_ATTEMPT": "1",
        "RUNTIME_RESTARTS": "0",
        "RUNTIME_RANK": "0",
        "RUNTIME_WORLD_SIZE": "1",
        "RUNTIME_LOCAL_RANK": "0",
        "RUNTIME_NODE_RANK": "0",
        "RUNTIME_NUM_NODES": "1",
        "RUNTIME_ARRAY_INDEX": "3",
        "RUNTIME_CHECKPOINT_DIR": str(folder / "checkpoint"),
        "RUNTIME_OUTPUT_DIR": str(folder / "output" / "a0001"),
        "RUNTIME_PREEMPTED_NOTE": str(folder / "a0001" / "preempted"),
        "PYTHONUNBUFFERED": "1",
    }
    assert {name: seen.get(name) for name in wanted} == wanted
    assert int(began) + 600 <= int(seen["RUNTIME_DEADLINE"]) <= ended + 600
    assert "RUNTIME_OTHER" not in seen
    assert "RANK" not in seen


def test_shim_leaves_the_origin_of_the_job_and_the_ids_of_the_backend_in_a_file(job: MakeJob) -> None:
    made = job("cat $RUNTIME_ORIGIN", origin={"argv": ["a.py", "ü"], "git": []})

    assert made.run(SLURM_JOB_ID="7") == 0

    seen = json.loads(made.log())
    assert (seen["argv"], seen["git"], seen["ids"]["SLURM_JOB_ID"]) == (["a.py", "ü"], [], "7")
    assert made.left_over() == []


def test_shim_runs_each_rank_with_its_place_and_a_log_of_its_own(job: MakeJob) -> None:
    made = job(
        "echo $RANK/$WORLD_SIZE local $LOCAL_RANK node $RUNTIME_NODE_RANK of $RUNTIME_NUM_NODES",
        nodes=2,
        tasks_per_node=2,
    )

    assert made.run() == 0

    assert [made.log(rank=rank) for rank in range(4)] == [
        "0/4 local 0 node 0 of 2\n",
        "1/4 local 1 node 0 of 2\n",
        "2/4 local 0 node 1 of 2\n",
        "3/4 local 1 node 1 of 2\n",
    ]


def test_shim_sums_up_what_the_command_reported_and_keeps_other_ranks_apart(job: MakeJob) -> None:
    made = job(
        """echo '{"step": '$RANK', "loss": 2}' >> $RUNTIME_METRICS; echo '{"loss": '$RANK'}' >> $RUNTIME_METRICS""",
        nodes=2,
    )

    assert made.run() == 0

    attempt = made.folder / "runs/0/a0001"
    said = json.loads((attempt / "metrics.json").read_text())
    loss = said["names"]["loss"]
    assert (loss["last"], loss["min"], loss["max"], loss["count"]) == (0.0, 0.0, 2.0, 2)
    assert (said["lines"], said["step"], said["skipped"]) == (2, 0.0, 0)
    assert len((attempt / "metrics.rank1.jsonl").read_text().splitlines()) == 2


def test_shim_ends_the_other_ranks_when_one_fails(job: MakeJob) -> None:
    made = job('if [ "$RANK" = 1 ]; then exit 7; fi; sleep 600', nodes=2)

    assert made.run() == 1

    assert made.results() == {0: ("app_failed", 7, 1)}
    assert processes_with(str(made.root)) == []


def test_shim_runs_a_line_of_shell_after_the_setup_lines(job: MakeJob) -> None:
    made = job(["echo $GREETING $HOME_OF | tr a-z A-Z"], shell=True, setup=["export GREETING=hello", "HOME_OF=nobody"])

    assert made.run() == 0

    assert made.log() == "HELLO\n"


@pytest.mark.parametrize(
    ("lines", "code", "said"),
    [
        (["export A=1", "false"], 1, "exit code 1, at: false"),
        (["module_that_is_not_there load cuda/12"], 127, "exit code 127, at: module_that_is_not_there load cuda/12"),
        (["exit 75"], 75, "exit code 75, at: exit 75"),
        # The command never ran, so it did not succeed.
        (["exit 0"], 1, "exit code 0, at: exit 0"),
    ],
)
def test_shim_whose_setup_fails_blames_the_line_and_not_the_command(
    job: MakeJob, lines: list[str], code: int, said: str
) -> None:
    made = job("echo never", setup=lines)

    assert made.run() == 1

    assert made.results() == {0: ("setup_failed", code, 1)}
    note = json.loads((made.folder / "runs/0/result").read_text())
    assert note["message"] == f"the setup lines ended with {said}"
    assert "never" not in made.log()


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        (["exec true"], 1),
        (["exec bash"], 1),
        (["set -n"], 1),
        (["trap 'echo bye' EXIT", "exit 0"], 1),
        (["set -e; trap : EXIT; false"], 1),
        (["kill -9 $$"], 137),
    ],
)
def test_shim_whose_setup_never_comes_to_the_command_has_not_run_it(job: MakeJob, lines: list[str], code: int) -> None:
    made = job("echo never", setup=lines, retry={"on_exit": {"137": "succeed"}})

    assert made.run() == 1

    assert made.results() == {0: ("setup_failed", code, 1)}
    note = json.loads((made.folder / "runs/0/result").read_text())
    assert "the setup lines ended with exit code" in note["message"]
    assert "never" not in made.log()


@pytest.mark.parametrize("lines", [["unset RUNTIME_RANK RUNTIME_PREEMPTED_NOTE"], ["set -Cu"], ["trap : EXIT DEBUG"]])
def test_shim_whose_setup_comes_to_the_command_runs_it_and_leaves_no_mark(job: MakeJob, lines: list[str]) -> None:
    made = job("exit 3", setup=lines, tasks_per_node=2)

    assert made.run() == 1

    assert made.results() == {0: ("app_failed", 3, 1)}
    assert list((made.folder / "runs/0/a0001").glob("setup*")) == []


@pytest.mark.parametrize("wait", ["sleep 600", "while :; do :; done", "read line < $RUNTIME_OUTPUT_DIR/pipe"])
def test_setup_that_is_ended_because_another_rank_failed_has_not_failed(job: MakeJob, wait: str) -> None:
    up = "$RUNTIME_OUTPUT_DIR/up"
    setup = ["mkfifo $RUNTIME_OUTPUT_DIR/pipe || true", f"if [ $RUNTIME_RANK = 1 ]; then touch {up}; {wait}; fi"]
    made = job(f"until [ -e {up} ]; do sleep 0.01; done; exit 3", setup=setup, tasks_per_node=2)

    assert made.run() == 1

    assert made.results() == {0: ("app_failed", 3, 1)}


@pytest.mark.parametrize("line", ["echo 'open", "if true; then", "echo $(", "{ true"])
def test_setup_line_that_is_not_closed_is_told_of_without_the_lines_around_it(job: MakeJob, line: str) -> None:
    made = job("echo never", setup=["echo fine", line])

    assert made.run() == 1

    assert made.results()[0][0] == "setup_failed"
    assert "never" not in made.log()
    assert all(word not in made.log() for word in ("exec", "set +e", "trap", "runtime_setup"))


def test_setup_lines_may_go_over_several_of_them_and_see_the_command(job: MakeJob) -> None:
    made = job(["echo", "ran"], setup=["if true; then", "  echo for $1", "fi"])

    assert made.run() == 0

    assert made.log() == "for echo\nran\n"


def test_lines_inside_of_a_wrapper_are_setup_lines_too(job: MakeJob) -> None:
    inside = ["sh", "-c", setup_script(["exec true"]), "pre"]
    made = job("echo never", setup=["true"], wrap=inside)

    assert made.run() == 1

    assert made.results() == {0: ("setup_failed", 1, 1)}


def test_rank_that_a_starter_runs_and_whose_setup_never_comes_to_the_command_ends_as_setup_failed(job: MakeJob) -> None:
    made = job(
        "sleep 600",
        nodes=2,
        setup=['[ "$RANK" = 0 ] || exec true'],
        launch_ranks=["sh", "-c", 'SLURM_PROCID=0 "$@" & SLURM_PROCID=1 "$@"; code=$?; kill $!; exit $code', "starter"],
    )

    assert made.run() == 1

    assert made.results() == {0: ("setup_failed", 1, 1)}


def test_rank_that_failed_first_gives_its_code_though_the_starter_has_that_of_a_rank_it_ended(job: MakeJob) -> None:
    starter = 'SLURM_PROCID=0 "$@" & first=$!; SLURM_PROCID=1 "$@"; kill $first; wait $first; exit $?'
    made = job('[ "$RANK" = 1 ] && exit 7; exec sleep 600', nodes=2, launch_ranks=["sh", "-c", starter, "starter"])

    assert made.run() == 1

    assert made.results() == {0: ("app_failed", 7, 1)}
    assert json.loads((made.folder / "runs/0/result").read_text())["rank"] == 1


def test_shim_whose_disk_takes_no_mark_of_setup_lines_believes_the_command(job: MakeJob) -> None:
    made = job("true", setup=["true"])
    (made.folder / "runs/0/a0001").mkdir(parents=True)
    (made.folder / "runs/0/a0002/setup.0").mkdir(parents=True)  # no file can be written there

    assert made.run() == 0


def test_shim_with_setup_lines_and_a_command_that_is_not_there_ends_as_setup_failed(job: MakeJob) -> None:
    made = job(["no-such-command"], setup=["true"])

    assert made.run() == 1

    assert made.results() == {0: ("setup_failed", 127, 1)}


def test_shim_whose_command_fails_after_the_setup_lines_blames_the_command(job: MakeJob) -> None:
    made = job("exit 3", setup=["true"])

    assert made.run() == 1

    assert made.results() == {0: ("app_failed", 3, 1)}


def test_shim_that_is_stopped_during_the_setup_lines_has_stopped(job: MakeJob) -> None:
    made = job("echo never", setup=["touch $RUNTIME_CHECKPOINT_DIR/there", "sleep 600"])
    started = made.start()
    wait_for((made.folder / "runs/0/checkpoint/there").exists, "the setup lines")

    started.send_signal(signal.SIGTERM)
    made.finish(started)

    assert made.ends() == ["stopped"]


def test_rank_whose_setup_fails_ends_all_ranks_as_setup_failed(job: MakeJob) -> None:
    made = job("sleep 600", setup=["[ $RANK != 1 ]"], tasks_per_node=2)

    assert made.run() == 1

    assert made.results() == {0: ("setup_failed", 1, 1)}


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["sh", "-c", "true", "x" * 200_000], "cannot start sh: Argument list too long"),
        (["/"], "cannot start /: Permission denied"),
    ],
)
def test_shim_with_a_command_that_is_there_and_cannot_be_started_ends_with_the_code_of_a_shell(
    job: MakeJob, command: list[str], message: str
) -> None:
    made = job(command)

    assert made.run() == 1

    assert made.results() == {0: ("setup_failed", 126, 1)}
    assert json.loads((made.folder / "runs/0/result").read_text())["message"] == message


def test_shim_with_a_command_that_is_not_there_ends_as_setup_failed(job: MakeJob) -> None:
    made = job(["no-such-command"])

    assert made.run() == 1

    assert made.results() == {0: ("setup_failed", 127, 1)}
    assert made.ends() == ["setup_failed"]


# code


def test_shim_runs_the_submitted_tree_byte_for_byte_and_each_attempt_has_its_own(job: MakeJob, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "pkg").mkdir(parents=True)
    (tree / "pkg" / "data").write_bytes(b"\r\n\0")
    (tree / "run.sh").write_text(
        "#!/bin/sh\ncat pkg/data > $RUNTIME_OUTPUT_DIR/data\nls\ntouch mine\n[ $RUNTIME_ATTEMPT = 2 ]\n"
    )
    (tree / "run.sh").chmod(0o755)
    (tree / "link").symlink_to("run.sh")
    made = job(["./link"], retry={"failure": 1})
    add_snapshot(made, make_snapshot(tree).archive)
    (tree / "run.sh").write_text("exit 9")

    assert made.run() == 0

    assert (made.folder / "runs/0/output/a0002/data").read_bytes() == b"\r\n\0"
    assert made.log(attempt=1) == made.log(attempt=2) == "link\npkg\nrun.sh\n"
    assert made.left_over() == []


def test_shim_refuses_a_snapshot_of_other_bytes(job: MakeJob, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "a").write_text("1")
    made = job("echo never")
    add_snapshot(made, make_snapshot(tmp_path / "tree").archive)
    (made.folder / "snapshot.tar").write_bytes(b"other")

    assert made.run() == 1

    assert made.results() == {0: ("setup_failed", 1, 1)}
    assert "other bytes" in json.loads((made.folder / "runs/0/result").read_text())["message"]


def test_shim_unpacks_nothing_outside_of_the_tree_though_a_link_leads_there(job: MakeJob, tmp_path: Path) -> None:
    (tmp_path / "tree/first").mkdir(parents=True)
    (tmp_path / "tree/first/file").write_text("1")
    archive = make_snapshot(tmp_path / "tree").archive.rstrip(b"\0") + b"\0" * 511
    link, file = tarfile.TarInfo("leads"), tarfile.TarInfo("leads/file")
    link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path / "outside")
    (tmp_path / "outside").mkdir()
    made = job("true")
    add_snapshot(made, archive + link.tobuf() + file.tobuf() + b"\0" * 1024)

    assert made.run() == 1

    assert list((tmp_path / "outside").iterdir()) == []
    note = json.loads((made.folder / "runs/0/result").read_text())
    assert note["message"] == ("the snapshot is refused: 'leads/file' leads through 'leads', which is no folder here")


def test_shim_shares_a_tree_that_nobody_can_write_to_where_the_order_says_so(job: MakeJob, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "a").write_text("1")
    made = job("cat a; echo; pwd; stat -c %a . a", runs={0: {}, 1: {}})
    add_snapshot(made, make_snapshot(tmp_path / "tree").archive, writable=False)

    assert made.run("--indices", "0-1") == 0

    assert made.log(0) == made.log(1)
    assert made.log(0).splitlines()[0] == "1"
    assert made.log(0).splitlines()[2:] == ["555", "444"]


def test_shim_gives_a_secret_byte_by_byte(job: MakeJob) -> None:
    made = job('printf %s "$KEY" | od -An -tx1', secrets={"KEY": "secrets/KEY"})
    (made.folder / "secrets").mkdir()
    (made.folder / "secrets" / "KEY").write_bytes(b"a\r\nb\rc\n")

    assert made.run() == 0

    assert made.log().split() == ["61", "0d", "0a", "62", "0d", "63", "0a"]


def test_shim_reads_secrets_from_files_and_leaves_them_out_of_what_it_writes(job: MakeJob) -> None:
    made = job("test $HF_TOKEN = canary-4711", secrets={"HF_TOKEN": "secrets/HF_TOKEN"})
    (made.folder / "secrets").mkdir()
    (made.folder / "secrets" / "HF_TOKEN").write_text("canary-4711")

    assert made.run() == 0

    written = [path for path in made.root.rglob("*") if path.is_file() and "secrets" not in path.parts]
    assert [path for path in written if b"canary-4711" in path.read_bytes() and path.name != "order.json"] == []
    assert "canary" not in json.dumps(made.order["secrets"])


# retries


def test_shim_retries_failures_in_place_until_the_budget_is_spent(job: MakeJob) -> None:
    made = job("echo attempt $RUNTIME_ATTEMPT; exit 3", retry={"failure": 2})

    assert made.run() == 1

    assert made.ends() == ["app_failed"] * 3
    assert made.results() == {0: ("app_failed", 3, 3)}
    assert made.log(attempt=3) == "attempt 3\n"


@pytest.mark.parametrize(
    ("code", "on_exit", "ends", "result"),
    [
        (75, {}, ["requeue", "requeue"], ("succeeded", 0, 3)),
        (9, {"9": "requeue"}, ["requeue", "requeue"], ("succeeded", 0, 3)),
        (9, {"9": "fail"}, ["app_failed"], ("app_failed", 9, 1)),
        (9, {"9": "succeed"}, [], ("succeeded", 9, 1)),
        (75, {"75": "fail"}, ["app_failed"], ("app_failed", 75, 1)),
    ],
)
def test_shim_does_what_an_exit_code_means(
    job: MakeJob, code: int, on_exit: dict[str, str], ends: list[str], result: tuple[str, int, int]
) -> None:
    made = job(f"[ $RUNTIME_ATTEMPT = 3 ] || exit {code}", retry={"failure": 1, "on_exit": on_exit})

    assert made.run() == (0 if result[0] == "succeeded" else 1)

    assert [end for end in made.ends() if end != "-"] == ends
    assert made.results() == {0: result}


GIVES_WAY = 'echo "the machine goes" > "$RUNTIME_PREEMPTED_NOTE"; exit 75'


@pytest.mark.parametrize(
    ("retries", "codes"), [("shim", [0]), ("backend", [10, 0])], ids=["in place", "by the backend"]
)
def test_command_that_gives_way_to_a_notice_is_preempted_and_started_again(
    job: MakeJob, retries: str, codes: list[int]
) -> None:
    made = job(f"[ $RUNTIME_ATTEMPT = 2 ] || {{ {GIVES_WAY}; }}", retries=retries)

    began = time.time()
    assert [made.run() for _ in codes] == codes
    took = time.time() - began

    assert made.ends() == ["preempted", "-"]
    assert made.results() == {0: ("succeeded", 0, 2)}
    note = json.loads((made.folder / "runs/0/a0001/end.preempted.75").read_text())
    assert note["message"] == "gave way to a notice: the machine goes"
    assert 0 <= note["lasted_s"] <= took


def test_command_that_gives_way_again_and_again_spends_the_preemption_budget(job: MakeJob) -> None:
    made = job(GIVES_WAY, retry={"preemption": 1, "failure": 9, "on_exit": {"75": "requeue"}})

    assert made.run() == 1

    assert made.ends() == ["preempted"] * 2
    assert made.results() == {0: ("preempted", 75, 2)}


def test_exit_code_75_without_a_note_is_tried_again_so_often_and_then_a_failure(job: MakeJob) -> None:
    made = job("exit 75", retry={"preemption": 2, "failure": 9})

    assert made.run() == 1

    assert made.ends() == ["requeue"] * 3
    assert made.results() == {0: ("app_failed", 75, 3)}


def test_exit_code_75_after_a_new_checkpoint_is_free(job: MakeJob) -> None:
    script = "touch $RUNTIME_CHECKPOINT_DIR/$RUNTIME_ATTEMPT; [ $RUNTIME_ATTEMPT = 4 ] || exit 75"
    made = job(script, retry={"preemption": 0})

    assert made.run() == 0

    assert made.ends() == ["checkpointed"] * 3 + ["-"]


@pytest.mark.parametrize("code", [0, 1, 74])
def test_note_of_a_preemption_says_nothing_beside_another_exit_code(job: MakeJob, code: int) -> None:
    made = job(GIVES_WAY.replace("75", str(code)))

    assert made.run() == (1 if code else 0)

    assert made.results() == {0: ("app_failed" if code else "succeeded", code, 1)}


def test_note_of_an_earlier_attempt_says_nothing_of_the_next(job: MakeJob) -> None:
    made = job(f"[ $RUNTIME_ATTEMPT = 1 ] && {{ {GIVES_WAY}; }}; exit 75", retry={"preemption": 1})

    assert made.run() == 1

    assert made.ends() == ["preempted", "requeue"]
    assert made.results() == {0: ("app_failed", 75, 2)}


def test_rank_that_gives_way_has_all_ranks_started_again(job: MakeJob) -> None:
    made = job(f"[ $RUNTIME_ATTEMPT = 2 ] && exit 0; [ $RANK = 0 ] || {{ {GIVES_WAY}; }}; sleep 600", nodes=2)

    assert made.run() == 0

    assert made.ends() == ["preempted", "-"]


def test_cancel_while_the_shim_pauses_before_another_attempt_is_heard(job: MakeJob) -> None:
    made = job("exit 1", retry={"failure": 5, "backoff_s": [3600, 3600]})
    started = made.start()
    wait_for(lambda: made.ends() == ["app_failed"], "the end of the attempt")

    (made.folder / "cancel").touch()

    assert made.finish(started) == 1
    assert made.results() == {0: ("cancelled", 1, 0)}


def test_shim_that_has_the_backend_retry_says_so_by_its_exit_code(job: MakeJob) -> None:
    made = job("exit $((3 - RUNTIME_ATTEMPT))", retry={"failure": 5}, retries="backend")

    assert [made.run(), made.run(), made.run(), made.run()] == [10, 10, 0, 0]

    assert made.ends() == ["app_failed", "app_failed", "-"]
    assert made.results() == {0: ("succeeded", 0, 3)}


def test_shim_requeues_by_the_member_id_and_goes_on_in_place_where_that_is_refused(
    job: MakeJob, tmp_path: Path
) -> None:
    asked = tmp_path / "asked"
    made = job(
        "[ $RUNTIME_ATTEMPT = 3 ]",
        retry={"failure": 5},
        retries="requeue",
        requeue=["sh", "-c", f'echo "$0" >> {asked}; [ $(wc -l < {asked}) = 1 ]', "{native}"],
    )

    assert made.run("--native", "70", "--member", "70_0") == 10
    assert made.run("--native", "70", "--member", "70_0") == 0

    assert asked.read_text().split() == ["70_0", "70_0"]
    assert "cannot be requeued" in made.stderr
    assert made.results() == {0: ("succeeded", 0, 3)}


def test_shim_that_finds_a_result_exits_with_it_and_runs_nothing(job: MakeJob) -> None:
    made = job("exit 4")
    made.run()

    assert made.run() == 1

    assert made.ends() == ["app_failed"]
    assert made.results() == {0: ("app_failed", 4, 1)}


def test_shim_that_finds_another_owner_is_a_twin(job: MakeJob) -> None:
    made = job("echo once")

    assert made.run("--native", "41") == 0
    assert made.run("--native", "42") == 3
    assert made.run("--native", "41") == 0

    assert "this is a twin: the job is served by 41" in _twin_says(made)
    assert made.ends() == ["-"]


def test_shim_among_names_of_others_serves_its_job(job: MakeJob) -> None:
    made = job("echo once")
    for name in ("owners/notes.0", "owners/.nfs0000.0", "runs/0/a1.bak", "runs/0/notes"):
        (made.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (made.folder / name).write_text("not ours")

    assert made.run() == 0

    assert made.results() == {0: ("succeeded", 0, 1)}


def _twin_says(made: ShimJob) -> str:
    made.run("--native", "42")
    return made.stderr


def test_shim_of_a_later_epoch_takes_over_and_the_earlier_one_stands_back(job: MakeJob) -> None:
    made = job("exit 75", retries="backend")
    assert made.run("--native", "41") == 10
    made.order["epoch"] = 2
    made.order["runs"]["0"]["command"] = ["true"]
    made.write()

    assert made.run("--native", "43") == 0
    made.order["epoch"] = 1
    made.write()
    assert made.run("--native", "41") == 3


# signals and limits


def test_shim_at_the_time_limit_ends_the_whole_tree_and_two_without_checkpoint_are_final(job: MakeJob) -> None:
    made = job("sleep 61 & sleep 62", time_limit_s=0.5, retry={"failure": 9})

    assert made.run() == 1

    assert made.ends() == ["timeout", "timeout"]
    assert made.results() == {0: ("timeout", 124, 2)}
    assert processes_with(str(made.root)) == []


def test_shim_asks_for_a_checkpoint_before_the_time_limit_and_goes_on_for_free(job: MakeJob, tmp_path: Path) -> None:
    script = (
        "n=$(cat $RUNTIME_CHECKPOINT_DIR/n 2>/dev/null || echo 0); [ $n = 2 ] && exit 0; "
        'trap "echo $((n + 1)) > $RUNTIME_CHECKPOINT_DIR/n; echo saved; printf %300s >> $CLOCK" USR1; '
        "printf %400s >> $CLOCK; while :; do sleep 0.1; done"
    )
    made = job(script, time_limit_s=600, checkpoint={"signal": "USR1", "lead_s": 300})
    made.clock = tmp_path / "clock"

    assert made.run() == 0

    assert made.ends() == ["checkpointed", "checkpointed", "-"]
    assert made.results() == {0: ("succeeded", 0, 3)}
    assert made.log(attempt=1) == "saved\n"


def test_shim_passes_an_early_warning_on_and_lets_the_command_finish(job: MakeJob) -> None:
    made = job(
        'trap "echo warned; exit 0" USR2; touch $RUNTIME_OUTPUT_DIR/up; while :; do sleep 0.1; done',
        checkpoint={"signal": "USR2", "lead_s": 1},
    )
    started = made.start()
    wait_for((made.folder / "runs/0/output/a0001/up").exists, "the command")

    started.send_signal(signal.SIGUSR1)

    assert made.finish(started) == 0
    assert made.log() == "warned\n"


@pytest.mark.parametrize(
    ("limit", "end"), [({}, "stopped"), ({"time_limit_s": 600}, "stopped"), ({"time_limit_s": 600}, "timeout")]
)
def test_command_that_dies_of_the_warning_timed_out_only_near_its_deadline(
    job: MakeJob, tmp_path: Path, limit: dict[str, float], end: str
) -> None:
    script = "[ $RUNTIME_ATTEMPT = 1 ] || exit 0; touch $RUNTIME_OUTPUT_DIR/up; while :; do sleep 0.1; done"
    made = job(script, checkpoint={"signal": "USR1", "lead_s": 300}, retry={"failure": 1}, **limit)
    made.clock = tmp_path / "clock"
    started = made.start()
    wait_for((made.folder / "runs/0/output/a0001/up").exists, "the command")
    if end == "stopped":
        started.send_signal(signal.SIGUSR1)
    else:
        made.pass_time(400)

    assert made.finish(started) == 0
    assert made.ends() == [end, "-"]


@pytest.mark.parametrize("began", [None, 40.0])
def test_attempt_ends_before_the_backends_own_limit(job: MakeJob, began: float | None) -> None:
    made = job("sleep 600", time_limit_s=600, native_limit_s=32 + (began or 0), retry={"failure": 0})
    told = {"RUNTIME_SHIM_BEGAN": str(time.time() - began)} if began else {}

    assert made.run(**told) == 1

    assert made.results() == {0: ("timeout", 124, 1)}


def test_ranks_that_die_of_the_warning_are_no_failure(job: MakeJob) -> None:
    starter = 'SLURM_PROCID=0 "$@" & one=$!; SLURM_PROCID=1 "$@"; code=$?; wait $one; exit $code'
    made = job(
        "[ $RUNTIME_ATTEMPT = 1 ] || exit 0; touch $RUNTIME_OUTPUT_DIR/$RANK; while :; do sleep 0.1; done",
        nodes=2,
        launch_ranks=["sh", "-c", starter, "starter"],
        checkpoint={"signal": "USR1", "lead_s": 1},
    )
    started = made.start()
    output = made.folder / "runs/0/output/a0001"
    wait_for(lambda: (output / "0").exists() and (output / "1").exists(), "both ranks")

    started.send_signal(signal.SIGUSR1)

    assert made.finish(started) == 0
    assert made.ends() == ["stopped", "-"]


def test_shim_waits_before_it_has_a_failed_job_requeued(job: MakeJob, tmp_path: Path) -> None:
    requeue = tmp_path / "requeue"
    requeue.write_text('#!/bin/sh\necho "$1" > "$0.done"\n')
    requeue.chmod(0o755)
    made = job(
        "exit 1",
        retry={"failure": 1, "backoff_s": [3600, 3600]},
        retries="requeue",
        requeue=[str(requeue), "{native}"],
    )
    started = made.start("--native", "7", "--member", "7_0")
    wait_for(lambda: made.ends() == ["app_failed"], "the end of the attempt")

    started.send_signal(signal.SIGTERM)

    assert made.finish(started) == 10
    assert not (tmp_path / "requeue.done").exists()


def test_shim_whose_requeuing_ends_the_command_that_asked_for_it_begins_nothing_more(
    job: MakeJob, tmp_path: Path
) -> None:
    requeue = tmp_path / "requeue"
    requeue.write_text("#!/bin/sh\n(sleep 1.5; kill -TERM $PPID) >/dev/null 2>&1 &\nkill -TERM $$\n")
    requeue.chmod(0o755)
    made = job("exit 1", retry={"failure": 1}, retries="requeue", requeue=[str(requeue)])
    made.constants["KILLED_S"] = PATIENCE_S

    assert made.run() == 10

    assert made.ends() == ["app_failed"]


# orders from the backend


def test_shim_leaves_the_result_where_the_backend_shows_it(job: MakeJob, tmp_path: Path) -> None:
    told = tmp_path / "told"
    made = job("exit 3", told=str(told), retry={"failure": 1})

    assert made.run() == 1

    assert json.loads(told.read_text()) == {"reason": "app_failed", "code": 3, "attempt": 2, "message": ""}
    told.unlink()
    assert made.run() == 1
    assert json.loads(told.read_text())["attempt"] == 2


def test_shim_tells_the_backend_the_result_that_it_cannot_write(job: MakeJob, tmp_path: Path) -> None:
    made = job("exit 4", told=str(tmp_path / "told"))
    (made.root / "done").write_text("no folder")
    (made.folder / "runs" / "0").mkdir(parents=True)
    (made.folder / "runs" / "0" / "result").mkdir()

    assert made.run() != 0

    assert json.loads((tmp_path / "told").read_text())["reason"] == "app_failed"


# GPUs from the backend


def _smi(folder: Path, *lines: str) -> dict[str, str]:
    """Return a PATH whose nvidia-smi prints these lines."""
    folder.mkdir(exist_ok=True)
    (folder / "lines").write_text("".join(f"{line}\n" for line in lines))
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\ncat {folder}/lines\n")
    (folder / "nvidia-smi").chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


TWO = ("0, GPU-aa, 1000, 80000", "1, GPU-bb, 79000, 80000")


@pytest.mark.parametrize(
    ("lines", "given", "seen"),
    [
        (TWO, "1", "1"),
        (TWO, "GPU-bb", "GPU-bb"),
        # A container runtime that shows only one GPU numbers it 0.
        (TWO[1:], "1", "1"),
        (("0, GPU-bb, 79000, 80000",), "5", "0"),
        (("0, GPU-cc, [N/A], [N/A]",), "0", "0"),
        # Other users of the GPU have their own shares of it.
        (("0, GPU-aa, 19000, 80000",), "0", "0"),
    ],
)
def test_shim_starts_on_gpus_that_are_there_and_free(
    job: MakeJob, tmp_path: Path, lines: tuple[str, ...], given: str, seen: str
) -> None:
    made = job("echo $CUDA_VISIBLE_DEVICES", gpu_check={"count": 1, "share": 0.25})

    assert made.run(CUDA_VISIBLE_DEVICES=given, NVIDIA_VISIBLE_DEVICES=given, **_smi(tmp_path / "bin", *lines)) == 0

    assert made.log() == f"{seen}\n"


def test_shim_without_a_visible_gpu_fails_to_set_up(job: MakeJob, tmp_path: Path) -> None:
    made = job("true", gpu_check={"count": 1, "share": 0.25})

    assert made.run(CUDA_VISIBLE_DEVICES="7", **_smi(tmp_path / "bin", *TWO)) == 1

    assert made.results() == {0: ("setup_failed", 1, 1)}
    note = json.loads((made.folder / "runs/0/result").read_text())
    assert note["message"] == "1 GPUs were given (7), and those visible are: 0, 1"


def test_shim_on_a_gpu_that_somebody_else_fills_has_no_capacity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.shim.gpus.GPU_PATIENCE_S", 0.0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("PATH", _smi(tmp_path / "bin", *TWO)["PATH"])

    with pytest.raises(NoCapacity) as found:
        check_gpus({"count": 1, "share": 0.25})

    assert str(found.value).startswith("GPU 0 has 1000 of 80000 MiB free, and this run's part of it is 20000")


@pytest.mark.parametrize("ended_by", ["kill -TERM $$", "exit 143"])
def test_command_that_hears_of_the_end_before_its_shim_is_stopped_and_has_not_failed(
    job: MakeJob, tmp_path: Path, ended_by: str
) -> None:
    made = job(f"echo $$ >{tmp_path}/new; mv {tmp_path}/new {tmp_path}/pid; {ended_by}")
    made.constants["HEAR_S"] = PATIENCE_S
    running = made.start("--index", "0")
    wait_for((tmp_path / "pid").exists, "the command")
    wait_for(lambda: not lives(tmp_path / "pid"), "its end")

    running.terminate()

    assert made.finish(running) == 10

    assert made.ends() == ["stopped"]


def test_command_that_ends_by_a_signal_that_its_shim_never_gets_has_failed(job: MakeJob) -> None:
    made = job("kill -TERM $$")

    made.run("--index", "0")

    assert made.results() == {0: ("app_failed", 143, 1)}


@pytest.mark.parametrize("after", ["exit 0", "exit 3", "printf %99s >> $CLOCK"])
def test_shim_that_is_told_to_stop_lets_the_backend_say_why(job: MakeJob, tmp_path: Path, after: str) -> None:
    script = f'trap "echo bye; {after}" TERM; touch $RUNTIME_OUTPUT_DIR/up; while :; do sleep 0.1; done'
    made = job(script, grace_s=90.0)
    made.clock = tmp_path / "clock"
    started = made.start()
    wait_for((made.folder / "runs/0/output/a0001/up").exists, "the command")

    started.send_signal(signal.SIGTERM)

    assert made.finish(started) == 10
    assert made.ends() == ["stopped"]
    assert made.results() == {}
    assert "bye" in made.log()
    assert processes_with(str(made.root)) == []


# a backend that counts failures, except those that it caused


@pytest.mark.parametrize(
    ("said", "before", "after", "full", "reason", "message"),
    [
        ("asked to stop", 0, 0, None, "preempted", "asked to stop"),
        ("asked to stop", 0, 1, None, "lost", "asked to stop, and the backend tells of no disruption"),
        (None, 2, 3, None, "lost", "it left no word, and the backend tells of no disruption"),
        (None, 2, 3, "", "lost", "it left no word, and the backend tells of no disruption"),
        (None, 2, 3, "97 %", "oom", "went without a word when its memory was 97 % full"),
        (None, 2, 2, "97 %", "preempted", "the backend took its machine away"),
        # Its pod was released by hand, and its count was lost with it.
        (None, 2, 0, None, "preempted", "the backend took its machine away"),
        (None, 2, 0, "97 %", "preempted", "the backend took its machine away"),
        ("asked to stop", None, 1, None, "stopped", "asked to stop"),
        ("asked to stop", 1, None, None, "stopped", "asked to stop"),
    ],
)
def test_term_alone_proves_nothing_and_the_count_of_the_backend_tells(
    said: str | None, before: int | None, after: int, full: str | None, reason: str, message: str
) -> None:
    found = name_end({"reason": "stopped", "message": said} if said else None, before, after, full)

    assert (found["reason"], found.get("message")) == (reason, message)


def test_end_that_left_no_word_has_the_exit_code_of_its_reason() -> None:
    assert [name_end(None, 0, 1, full)["code"] for full in (None, "97 %")] == [1, 137]
    assert name_end(None, 0, 0, None)["code"] == 1
    assert name_end({"reason": "stopped", "code": 9}, 0, 1, None)["code"] == 9
    assert "code" not in name_end({"reason": "stopped"}, 0, 0, None)


def stop_once(made: ShimJob, failures: int, number: int, **environ: str) -> int:
    """Start once and stop the shim while its command runs; return its exit code."""
    started = made.start(RUNTIME_POD_FAILURES=str(failures), **environ)
    wait_for((made.folder / f"runs/0/output/a{number:04d}/up").exists, "the command")
    started.send_signal(signal.SIGTERM)
    return made.finish(started)


def test_run_that_is_stopped_and_not_disrupted_three_times_in_a_row_is_lost(job: MakeJob) -> None:
    made = job("touch $RUNTIME_OUTPUT_DIR/up; sleep 600", retries="backend")

    assert [stop_once(made, number, number + 1) for number in range(3)] == [12, 12, 12]
    assert (made.ends(), made.results()) == (["stopped"] * 3, {})

    assert made.run(RUNTIME_POD_FAILURES="3") == 1
    assert made.results() == {0: ("lost", 1, 3)}
    result = json.loads((made.folder / "runs/0/result").read_text())
    assert result["message"] == "asked to stop by SIGTERM, and the backend tells of no disruption"


def test_run_that_is_disrupted_spends_preemptions_and_nothing_else(job: MakeJob) -> None:
    made = job("touch $RUNTIME_OUTPUT_DIR/up; sleep 600", retries="backend", retry={"preemption": 3})

    assert [stop_once(made, 0, number + 1) for number in range(4)] == [12] * 4

    # Five starts; the last one classifies the fourth's end, and runs nothing.
    assert made.run(RUNTIME_POD_FAILURES="0") == 1
    assert made.results() == {0: ("preempted", 1, 4)}


def test_shim_that_is_killed_is_a_lost_container_and_no_failure(job: MakeJob) -> None:
    made = job("[ $RUNTIME_ATTEMPT = 2 ] || { touch $RUNTIME_OUTPUT_DIR/up; sleep 600; }", retries="backend")
    started = made.start(RUNTIME_POD_FAILURES="0")
    wait_for((made.folder / "runs/0/output/a0001/up").exists, "the command")
    started.kill()
    made.finish(started)

    assert made.run(RUNTIME_POD_FAILURES="1") == 0

    assert made.results() == {0: ("succeeded", 0, 2)}


@pytest.mark.parametrize(("then", "end"), [("970", ("oom", 1, 1)), ("100", None)])
def test_shim_that_is_killed_with_its_command_for_memory_has_said_that_it_was_full(
    job: MakeJob, then: str, end: tuple[str, int, int] | None
) -> None:
    made = job("[ $RUNTIME_ATTEMPT = 2 ] || { touch $RUNTIME_OUTPUT_DIR/up; sleep 600; }", retries="backend")
    made.constants["CGROUP"] = str(made.root)
    (made.root / "memory.max").write_text("1000\n")
    stat, note = made.root / "memory.stat", made.folder / "runs/0/a0001/memory"
    write_whole(str(stat), "anon 900\nfile 5000\nshmem 70\n")
    started = made.start(RUNTIME_POD_FAILURES="0")
    wait_for(lambda: note.exists() and note.read_text() == "97 %", "the note")
    write_whole(str(stat), f"anon {then}\nfile 5000\n")
    wait_for(lambda: note.read_text() == ("97 %" if end else ""), "the next look")
    started.kill()
    made.finish(started)

    made.run(RUNTIME_POD_FAILURES="1")

    assert made.results() == {0: end or ("succeeded", 0, 2)}


def test_failure_that_the_shim_saw_keeps_its_budget_whatever_the_backend_counts(job: MakeJob) -> None:
    made = job("exit 4", retries="backend", retry={"failure": 1})

    assert made.run(RUNTIME_POD_FAILURES="0") == 10
    assert made.run(RUNTIME_POD_FAILURES="0") == 1

    assert (made.ends(), made.results()) == (["app_failed"] * 2, {0: ("app_failed", 4, 2)})


# disk of its own

MIB = 1 << 20
WRITE = "head -c 3000000 /dev/zero > $TMPDIR/own/big; touch $RUNTIME_OUTPUT_DIR/up; sleep 600"


@pytest.fixture
def disk_job(job: MakeJob) -> Callable[..., ShimJob]:
    """A job whose container may write 2 MiB, all of it below its scratch folder."""

    def make(script: str, **changes: Any) -> ShimJob:
        made = job(script, retries="backend", **changes)
        (made.root / "scratch" / "own").mkdir(parents=True)
        made.constants |= {"OWN_DISK": str(made.root / "scratch"), "DISK_S": 0.05}
        made.environ |= {"RUNTIME_DISK_REQUEST": str(2 * MIB), "RUNTIME_DISK_LIMIT": str(2 * MIB)}
        return made

    return make


def test_run_over_its_disk_limit_ends_as_such_and_spends_failures(disk_job: Callable[..., ShimJob]) -> None:
    made = disk_job(WRITE, retry={"failure": 1})

    assert made.run(RUNTIME_POD_FAILURES="0") == 10
    (made.root / "scratch/own/big").unlink()  # the next container has its own disk
    assert made.run(RUNTIME_POD_FAILURES="0") == 1

    assert (made.ends(), made.results()) == (["disk", "disk"], {0: ("disk", 1, 2)})
    result = json.loads((made.folder / "runs/0/result").read_text())
    assert re.fullmatch(r"used [2-9] MiB of disk, its limit is 2 MiB", result["message"])
    assert processes_with(str(made.root)) == []


def test_run_that_is_told_to_stop_over_its_disk_limit_was_not_preempted(disk_job: Callable[..., ShimJob]) -> None:
    # It is evicted before the next check.
    made = disk_job(WRITE)
    made.constants |= {"DISK_S": 1000.0, "DISK_LAST_S": PATIENCE_S}

    assert stop_once(made, 0, 1) == 1

    assert made.results() == {0: ("disk", 1, 1)}


@pytest.mark.parametrize(("asked", "limit"), [("0", str(MIB)), ("", ""), (str(4 * MIB), str(4 * MIB))])
def test_run_within_its_disk_limit_or_without_one_is_only_stopped(
    disk_job: Callable[..., ShimJob], asked: str, limit: str
) -> None:
    made = disk_job(WRITE)

    # If a container has no limit, its variable holds the node's capacity.
    assert stop_once(made, 0, 1, RUNTIME_DISK_REQUEST=asked, RUNTIME_DISK_LIMIT=limit) == 12

    assert made.ends() == ["stopped"]


def test_disk_use_counts_what_is_new_once_and_nothing_that_is_mounted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    for folder in ("image/inner", "data", "tmp", "claim"):
        (root / folder).mkdir(parents=True)
    (root / "image/old").write_bytes(bytes(MIB))
    changed = (root / "image/old").stat().st_ctime
    wait_for(lambda: touched(tmp_path / "clock") > changed, "the next tick of the clock")
    monkeypatch.setattr("runtime.shim.resource_usage.BEGAN", (tmp_path / "clock").stat().st_ctime)
    monkeypatch.setattr("runtime.shim.resource_usage.OWN_DISK", str(root))
    monkeypatch.setattr("runtime.shim.resource_usage.mount_points", lambda: {str(root / "claim")})
    monkeypatch.setattr("tempfile.tempdir", str(root / "tmp"))
    (root / "claim/large").write_bytes(bytes(8 * MIB))
    (root / "tmp/one").write_bytes(bytes(MIB))
    (root / "data/two").write_bytes(bytes(MIB))
    (root / "image/inner/two").hardlink_to(root / "data/two")
    for unpacked in (root / "data/two", root / "data", root / "image/inner"):
        os.utime(unpacked, (0, 0))
    (root / "image/away").symlink_to(root / "claim")

    use = DiskUse(64 * MIB, [])

    assert not use.is_over(60, now=True)
    assert use.used >> 20 == 2
    assert DiskUse(MIB, []).is_over(60, now=True)
    assert not DiskUse(None, []).is_over(60, now=True)


def touched(path: Path) -> float:
    path.touch()
    return path.stat().st_ctime


def test_disk_use_is_looked_at_a_little_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.shim.resource_usage.BEGAN", 0.0)
    monkeypatch.setattr("runtime.shim.resource_usage.DISK_S", 0.0)
    monkeypatch.setattr("runtime.shim.resource_usage.OWN_DISK", str(tmp_path))
    monkeypatch.setattr("runtime.shim.resource_usage.mount_points", set)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    for number in range(20):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "file").write_bytes(bytes(4096))
    use = DiskUse(20 * 4096 - 1, [])

    looks = 0
    while not use.is_over(0):
        looks += 1
        assert looks < 1000

    assert looks > 10


def test_mount_points_are_read_with_their_odd_names() -> None:
    assert "/proc" in mount_points()
    assert "/" not in mount_points()


def test_shim_that_finds_a_cancel_mark_ends_the_run_as_cancelled(job: MakeJob) -> None:
    made = job("touch $RUNTIME_OUTPUT_DIR/up; sleep 600", retry={"failure": 9})
    started = made.start()
    wait_for((made.folder / "runs/0/output/a0001/up").exists, "the command")

    (made.folder / "cancel").write_text("")

    assert made.finish(started) == 1
    assert made.results() == {0: ("cancelled", 1, 1)}
    assert made.run() == 1


def test_shim_ends_a_command_that_prints_nothing_for_too_long(job: MakeJob) -> None:
    made = job("echo once; sleep 600", idle_timeout_s=0.6)

    assert made.run() == 1

    assert made.results() == {0: ("idle", 1, 1)}


def test_shim_ends_a_run_that_holds_more_memory_than_its_limit(job: MakeJob) -> None:
    script = f"{sys.executable} -c 'x = bytearray(80 << 20); import time; time.sleep(60)' & wait"
    made = job(script, limits={"memory_bytes": 40 << 20}, retry={"failure": 0})

    assert made.run() == 1

    assert made.results() == {0: ("oom", 137, 1)}
    note = json.loads((made.folder / "runs/0/result").read_text())
    assert re.fullmatch(r"held \d+ MiB, its limit is 40 MiB", note["message"])


def test_shim_counts_memory_that_processes_share_once(job: MakeJob) -> None:
    script = "import os, time; x = bytearray(60 << 20); [os.fork() for _ in range(2)]; time.sleep(1.5)"
    made = job([sys.executable, "-c", script], limits={"memory_bytes": 150 << 20})

    assert made.run() == 0

    assert made.results() == {0: ("succeeded", 0, 1)}


def test_shim_keeps_a_run_to_as_many_cpus_as_its_limit_says(job: MakeJob) -> None:
    made = job("nproc", limits={"cpus": 0.5})

    assert made.run() == 0

    assert made.log() == "1\n"


def test_shim_runs_as_many_at_a_time_as_the_machine_has_room_for(job: MakeJob) -> None:
    count = len(os.sched_getaffinity(0))
    made = job(
        "mkdir $RUNTIME_CHECKPOINT_DIR/../../busy || exit 1; sleep 0.1; rmdir $RUNTIME_CHECKPOINT_DIR/../../busy; nproc",
        runs={index: {} for index in range(4)},
        pack={"slots": 4},
        limits={"cpus": count, "memory_bytes": 256 << 20},
    )

    assert made.run("--indices", "0-3") == 0

    assert [made.log(index) for index in range(4)] == [f"{count}\n"] * 4


def test_shim_beats_while_the_command_runs(job: MakeJob) -> None:
    made = job('until [ "0$(cat "${RUNTIME_PREEMPTED_NOTE%/*}/beat")" -ge 3 ]; do sleep 0.05; done')
    made.constants["BEAT_S"] = 0.05

    assert made.run() == 0

    assert int((made.folder / "runs/0/a0001/beat").read_text()) >= 3


@pytest.mark.parametrize("point", ["claimed", "ended", "noted"])
def test_shim_killed_at_any_step_and_started_again_ends_with_one_result(job: MakeJob, point: str) -> None:
    made = job("echo attempt >> $RUNTIME_OUTPUT_DIR/../ran; exit 5", retry={"failure": 3})

    assert made.run(RUNTIME_FAULTS=f"shim.{point}=kill") == -signal.SIGKILL
    assert made.run() == 1

    assert made.results()[0][:2] == ("app_failed", 5)
    assert len(made.results()) == 1
    ended = [end for end in made.ends() if end != "-"]
    assert ended == ["app_failed"] * 4


def test_shim_lost_three_times_in_a_row_is_not_started_a_fourth_time(job: MakeJob) -> None:
    made = job("true")

    for _ in range(3):
        assert made.run(RUNTIME_FAULTS="shim.claimed=kill") == -signal.SIGKILL

    assert made.run() == 1
    assert made.ends() == ["-", "-", "-"]
    assert made.results() == {0: ("lost", 1, 3)}


def test_shim_started_twice_at_once_commits_one_result(job: MakeJob) -> None:
    made = job("sleep 0.3; exit $RUNTIME_ATTEMPT")

    both = [made.start(), made.start()]
    codes = [made.finish(each) for each in both]

    # The attempt that began last counts, and the other shim is told so, unless it came when all was over.
    assert sorted(codes) in ([1, 1], [1, 3])
    assert len(made.results()) == 1
    assert len(made.ends()) <= 2, "neither takes the attempt of the other for a lost one"


# many on one machine


def test_shim_packs_runs_into_slots_that_share_cpus_and_gpus(job: MakeJob) -> None:
    made = job(
        'touch "$HOME.$CUDA_VISIBLE_DEVICES"; until [ -e "$HOME.0" ] && [ -e "$HOME.1" ]; do sleep 0.05; done; '
        "echo $CUDA_VISIBLE_DEVICES $NVIDIA_VISIBLE_DEVICES",
        runs={index: {} for index in range(8)},
        pack={"slots": 2, "per": "gpu"},
    )

    assert made.run("--indices", "0-7", CUDA_VISIBLE_DEVICES="0,1", HOME=str(made.root / "seen")) == 0

    used = sorted(made.log(index).strip() for index in range(8))
    assert set(used) == {"0 0", "1 1"}
    assert made.results() == dict.fromkeys(range(8), ("succeeded", 0, 1))


def test_packed_runs_import_nothing_that_the_shim_has_not_imported_for_all(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "code.py").touch()
    made = make_job(tmp_path, sys.executable, "true", runs={0: {}, 1: {}, 2: {}}, pack={"slots": 1})
    add_snapshot(made, make_snapshot(tree).archive)

    assert made.run("--indices", "0-2", PYTHONPROFILEIMPORTTIME="1") == 0

    imported = re.findall(r"^import time: .*\| +(\S+)$", made.stderr, re.MULTILINE)
    assert "runtime.shim.tree" in imported
    assert [name for name in set(imported) if imported.count(name) > 1] == []


def test_shim_packs_on_when_a_run_fails_and_says_so_in_the_end(job: MakeJob) -> None:
    made = job("[ $RUNTIME_ARRAY_INDEX != 1 ]", runs={index: {} for index in range(4)}, pack={"slots": 2})

    assert made.run("--indices", "0-3") == 1

    assert {index: found[0] for index, found in made.results().items()} == {
        0: "succeeded",
        1: "app_failed",
        2: "succeeded",
        3: "succeeded",
    }


STEP = 'echo "$@" >>"$STARTED"; exec "$@"'


def test_shim_starts_packed_runs_as_steps_of_the_backend_where_it_is_told_to(job: MakeJob, tmp_path: Path) -> None:
    made = job(
        "[ $RUNTIME_ARRAY_INDEX != 1 ] || [ $RUNTIME_ATTEMPT = 2 ]",
        runs={index: {} for index in range(3)},
        retry={"failure": 1},
        pack={"slots": 2, "step": ["sh", "-c", STEP, "step"]},
    )

    assert made.run("--indices", "0-2", "--native", "7", "--part", "4", STARTED=str(tmp_path / "started")) == 0

    assert made.results() == {0: ("succeeded", 0, 1), 1: ("succeeded", 0, 2), 2: ("succeeded", 0, 1)}
    started = [line.split(" --native ")[1] for line in (tmp_path / "started").read_text().splitlines()]
    assert sorted(line.partition(" --scratch")[0] for line in started) == [f"7 --index {n} --part 4" for n in range(3)]


def test_shim_of_steps_passes_what_is_asked_to_their_shims_alone(job: MakeJob, tmp_path: Path) -> None:
    made = job(
        "[ $RUNTIME_ATTEMPT = 1 ] || exit 0; trap 'touch $RUNTIME_CHECKPOINT_DIR/c; exit 75' USR1; touch $RUNTIME_OUTPUT_DIR/up; while :; do sleep 0.1; done",
        runs={0: {}, 1: {}},
        pack={"slots": 2, "step": ["sh", "-c", "trap 'echo starter' TERM USR1 ALRM; \"$@\"", "step"]},
        checkpoint={"signal": "USR1", "lead_s": 600},
    )
    started = made.start("--indices", "0,1")
    ups = [made.folder / f"runs/{index}/output/a0001/up" for index in (0, 1)]
    wait_for(lambda: all(up.exists() for up in ups), "both commands")

    started.send_signal(signal.SIGALRM)
    assert made.finish(started) == 0

    assert [made.ends(index) for index in (0, 1)] == [["checkpointed", "-"]] * 2
    assert "starter" not in made.stdout


@pytest.mark.parametrize("step", [{}, {"step": ["env"]}])
def test_shim_that_packs_and_is_stopped_ends_every_run_and_takes_up_the_rest_later(
    job: MakeJob, step: dict[str, list[str]]
) -> None:
    made = job(
        "touch $RUNTIME_OUTPUT_DIR/up; [ $RUNTIME_ATTEMPT = 2 ] || [ $RUNTIME_ARRAY_INDEX = 2 ] || sleep 600",
        runs={index: {} for index in range(3)},
        pack={"slots": 2, **step},
    )
    started = made.start("--indices", "0-2")
    for index in (0, 1):
        wait_for((made.folder / f"runs/{index}/output/a0001/up").exists, f"run {index}")

    started.send_signal(signal.SIGTERM)
    assert made.finish(started) == 10
    assert processes_with(str(made.root)) == []

    assert made.run("--indices", "0-2") == 0
    assert made.results() == {0: ("succeeded", 0, 2), 1: ("succeeded", 0, 2), 2: ("succeeded", 0, 1)}


# wrong orders


@pytest.mark.parametrize(
    ("order", "says"),
    [
        ("{", "is no JSON"),
        ('{"schema": 2}', "has schema 2, this shim follows 1"),
        (None, "cannot read the order"),
    ],
)
def test_shim_with_an_order_it_cannot_follow_says_why(job: MakeJob, order: str | None, says: str) -> None:
    made = job("true")
    (made.folder / "order.json").unlink()
    if order is not None:
        (made.folder / "order.json").write_text(order)

    assert made.run() == 2

    assert says in made.stderr
    assert "Traceback" not in made.stderr


def test_shim_with_an_index_that_is_not_in_the_order_says_so(job: MakeJob) -> None:
    made = job("true")

    assert made.run("--index", "5") == 2

    assert "no index 5" in made.stderr


# decisions


def ended(*reasons: str | None) -> list[dict[str, Any] | None]:
    return [None if reason is None else {"reason": reason} for reason in reasons]


def temporary(*codes: int) -> list[dict[str, Any] | None]:
    return [{"reason": "requeue", "code": code} for code in codes]


def gave_way(*seconds: float) -> list[dict[str, Any] | None]:
    """Attempts that stopped on a notice after this many seconds."""
    return [{"reason": "preempted", "code": 75, "lasted_s": each} for each in seconds]


@pytest.mark.parametrize(
    ("notes", "then"),
    [
        (ended("app_failed"), ("again", 1.0)),
        (ended("app_failed", "app_failed"), ("final", "app_failed")),
        (ended("setup_failed"), ("again", 1.0)),
        (ended("disk"), ("again", 1.0)),
        (ended("idle"), ("again", 1.0)),
        (ended("oom", "app_failed"), ("final", "app_failed")),
        (ended("checkpointed", "requeue", "stopped", "app_failed"), ("again", 1.0)),
        (ended("stopped"), ("again", 0.0)),
        (ended("stopped", "stopped", "stopped"), ("final", "preempted")),
        (ended("stopped", "app_failed", "stopped"), ("again", 0.0)),
        (ended("checkpointed", "requeue", "app_failed", "stopped"), ("again", 0.0)),
        (ended("node_failed"), ("again", 0.0)),
        (ended("stopped", "preempted", "node_failed"), ("final", "node_failed")),
        (ended(None, None), ("again", 0.0)),
        (ended(None, "stopped", None), ("final", "lost")),
        (ended("timeout"), ("again", 1.0)),
        (ended("timeout", "checkpointed", "timeout"), ("final", "timeout")),
        (ended("timeout", "timeout"), ("final", "timeout")),
        (ended(*["checkpointed"] * 50), ("again", 0.0)),
        (ended(*["requeue"] * 50), ("again", 0.0)),
        (temporary(75, 75), ("again", 0.0)),
        (temporary(75, 75, 75), ("final", "app_failed")),
        (temporary(75) + ended("stopped", "stopped"), ("final", "preempted")),
        (temporary(*[9] * 50), ("again", 0.0)),
        (gave_way(700), ("again", 0.0)),
        (gave_way(2), ("again", 0.0)),
        (gave_way(2, 700), ("again", 0.0)),
        (gave_way(700, 2, 700), ("final", "preempted")),
        (ended("duplicate"), ("final", "duplicate")),
    ],
)
def test_decision_follows_from_how_the_attempts_ended(
    notes: list[dict[str, Any] | None], then: tuple[str, object]
) -> None:
    assert decide(notes, RETRY, pause=lambda: 0.5) == then


def test_decision_gives_up_after_three_losses_in_a_row_whatever_the_budget() -> None:
    retry = RETRY | {"preemption": 99}

    assert decide(ended(None, None), retry) == ("again", 0.0)
    assert decide(ended(None, None, None), retry) == ("final", "lost")
    assert decide(ended(None, None, "stopped", None, None), retry) == ("again", 0.0)


def test_decision_gives_up_after_two_timeouts_in_a_row_whatever_the_budget() -> None:
    retry = RETRY | {"failure": 99}

    assert decide(ended("timeout"), retry)[0] == "again"
    assert decide(ended("timeout", "app_failed", "timeout"), retry)[0] == "again"
    assert decide(ended("timeout", "timeout"), retry) == ("final", "timeout")


def test_decision_counts_no_exit_code_that_the_job_itself_declares_to_be_a_request_for_more() -> None:
    asked = RETRY | {"on_exit": {"75": "requeue"}}

    assert decide(temporary(*[75] * 50), asked) == ("again", 0.0)
    assert decide(temporary(*[75] * 3), RETRY | {"on_exit": {"76": "requeue"}}) == ("final", "app_failed")


def test_decision_pauses_longer_each_time_up_to_a_bound() -> None:
    retry = RETRY | {"failure": 9}
    pauses = [decide(ended(*["app_failed"] * count), retry, pause=lambda: 0.5)[1] for count in range(1, 6)]

    assert pauses == [1.0, 2.0, 4.0, 4.0, 4.0]
    assert [decide(ended("oom"), retry, pause=lambda drawn=drawn: drawn)[1] for drawn in (0.0, 0.9)] == [0.5, 1.4]


def test_decision_pauses_where_a_notice_still_stands_and_begins_anew_after_a_long_attempt() -> None:
    retry = RETRY | {"preemption": 99}

    def pauses(*seconds: float) -> list[object]:
        return [decide(gave_way(*seconds[:count]), retry, pause=lambda: 0.5)[1] for count in range(1, len(seconds) + 1)]

    assert pauses(3600, 2, 2, 2, 2, 3600, 2, 2) == [0.0, 0.0, 1.0, 2.0, 4.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("slots", "per", "cpus", "gpus", "shares"),
    [
        (2, "node", [0, 1, 2, 3], [], [([0, 2], []), ([1, 3], [])]),
        (4, "node", [0, 1], [], [([0], []), ([1], []), ([0], []), ([1], [])]),
        (2, "gpu", [0, 1, 2, 3], ["0", "1"], [([0], ["0"]), ([1], ["0"]), ([2], ["1"]), ([3], ["1"])]),
        (2, "node", [0, 1], ["0", "1", "2", "3"], [([0], ["0", "2"]), ([1], ["1", "3"])]),
        (3, "node", [0], ["0"], [([0], ["0"]), ([0], ["0"]), ([0], ["0"])]),
    ],
)
def test_slots_share_cpus_and_gpus_evenly(
    slots: int, per: str, cpus: list[int], gpus: list[str], shares: list[tuple[list[int], list[str]]]
) -> None:
    assert share_out(slots, per, cpus, gpus) == shares


def test_indices_are_read_as_a_range_or_one() -> None:
    assert (parse_indices("3"), parse_indices("3-5"), parse_indices("1,4-5")) == ([3], [3, 4, 5], [1, 4, 5])


@pytest.mark.service
@pytest.mark.parametrize("version", PYTHONS)
def test_shim_retries_and_succeeds_on_every_python_here(tmp_path: Path, version: str) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "run.sh").write_text('echo "$RUNTIME_ATTEMPT"; [ "$RUNTIME_ATTEMPT" = 2 ]')
    made = make_job(
        tmp_path, PYTHONS[version], ["sh", "run.sh"], retry={"failure": 1}, runs={0: {}, 1: {}}, pack={"slots": 2}
    )
    add_snapshot(made, make_snapshot(tree).archive)

    assert made.run("--indices", "0-1") == 0

    assert made.results() == {0: ("succeeded", 0, 2), 1: ("succeeded", 0, 2)}
    assert made.log(1, attempt=2) == "2\n"


@pytest.mark.service
def test_shim_is_tested_on_the_oldest_python_it_promises() -> None:
    if "3.6" not in PYTHONS and not os.environ.get("RUNTIME_REQUIRE_SERVICES"):
        pytest.skip("no Python 3.6 here: pyenv install 3.6")
    assert "3.6" in PYTHONS


# by hand


def test_shim_forgets_secrets_once_every_index_has_its_result(job: MakeJob) -> None:
    made = job('test "$KEY" = abc', runs={0: {}, 1: {}}, secrets={"KEY": "secrets/KEY"})
    (made.folder / "secrets").mkdir()
    (made.folder / "secrets" / "KEY").write_text("abc")

    assert made.run("--index", "0", "--native", "n") == 0
    assert (made.folder / "secrets" / "KEY").exists()
    assert made.run("--index", "1", "--native", "n") == 0

    assert not (made.folder / "secrets").exists()
    assert made.results() == {0: ("succeeded", 0, 1), 1: ("succeeded", 0, 1)}


def test_shim_counts_no_attempt_from_before_a_retry_by_hand(job: MakeJob) -> None:
    made = job("exit 1", retry={"failure": 1})
    assert made.run() == 1
    (made.folder / "runs" / "0" / "result").unlink()
    for mark in (made.root / "done").iterdir():
        mark.unlink()
    made.order |= {"epoch": 2, "forgiven": {"0": 2}}
    made.write()

    assert made.run("--native", "second") == 1

    assert made.ends() == ["app_failed"] * 4
    assert made.results() == {0: ("app_failed", 1, 4)}


def test_shim_told_that_time_is_up_asks_for_a_checkpoint_and_times_out(job: MakeJob, tmp_path: Path) -> None:
    script = (
        "trap 'touch $RUNTIME_CHECKPOINT_DIR/new; printf %400s >> $CLOCK' USR1; "
        "touch $RUNTIME_OUTPUT_DIR/up; while true; do sleep 0.1; done"
    )
    made = job(script, checkpoint={"signal": "USR1", "lead_s": 300.0}, grace_s=0.2)
    made.clock = tmp_path / "clock"
    shim = made.start()
    wait_for((made.folder / "runs/0/output/a0001/up").exists, "the command")

    shim.send_signal(signal.SIGALRM)
    wait_for(lambda: made.ends()[:1] == ["checkpointed"], "the end of the attempt")
    (made.folder / "cancel").touch()

    assert made.finish(shim) == 1


def test_shim_calls_a_kill_that_was_announced_as_one_for_memory_so(job: MakeJob) -> None:
    made = job("touch $(dirname $RUNTIME_CHECKPOINT_DIR)/a0001/oom; kill -9 $$")

    assert made.run() == 1
    assert made.results() == {0: ("oom", 137, 1)}


# the machine's GPUs


def gpu_order(tmp_path: Path, count: float, *devices: str) -> dict[str, Any]:
    return {"count": count, "devices": list(devices), "locks": str(tmp_path / "gpus")}


def test_shim_gives_a_run_gpus_of_its_own_and_gives_them_back(job: MakeJob, tmp_path: Path) -> None:
    made = job("echo $CUDA_VISIBLE_DEVICES $NVIDIA_VISIBLE_DEVICES", gpus=gpu_order(tmp_path, 2, "0", "1", "2"))

    assert made.run() == 0

    assert made.log() == "0,1 0,1\n"
    assert list((tmp_path / "gpus").iterdir()) == []


def test_shim_runs_of_a_machine_never_have_more_of_a_gpu_than_there_is(job: MakeJob, tmp_path: Path) -> None:
    made = job(
        'mkdir -p "$HOME/$CUDA_VISIBLE_DEVICES"; touch "$HOME/$CUDA_VISIBLE_DEVICES/$$"; '
        'until [ -e "$HOME.shared" ] && [ -e "$HOME/0" ] && [ -e "$HOME/1" ]; do sleep 0.05; '
        '[ $(ls "$HOME/$CUDA_VISIBLE_DEVICES" | wc -l) -lt 2 ] || touch "$HOME.shared"; done; '
        'ls "$HOME/$CUDA_VISIBLE_DEVICES" | wc -l; sleep 0.3; rm "$HOME/$CUDA_VISIBLE_DEVICES/$$"',
        runs={index: {} for index in range(8)},
        pack={"slots": 8, "per": "node"},
        gpus=gpu_order(tmp_path, 0.5, "0", "1"),
    )

    assert made.run("--indices", "0-7", HOME=str(tmp_path / "seen")) == 0

    together = [int(made.log(index)) for index in range(8)]
    assert max(together) == 2, "two halves of a GPU at a time, and never three"
    assert {path.name for path in (tmp_path / "seen").iterdir()} == {"0", "1"}


def test_shim_waits_for_a_gpu_that_is_taken_and_not_for_a_dead_claim(job: MakeJob, tmp_path: Path) -> None:
    claims = tmp_path / "gpus"
    claims.mkdir()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    dead = {"boot": boot, "pid": 2**22 + 1, "start": "1", "groups": [], "gpus": {"0": 1.0}}
    (claims / "claim.dead").write_text(json.dumps(dead))
    (claims / "claim.earlier").write_text(json.dumps({**dead, "boot": "another", "pid": os.getpid(), "start": None}))
    (claims / "claim.living").write_text(json.dumps({**dead, "pid": os.getpid(), "start": None, "gpus": {"1": 0.25}}))
    first = job("echo $CUDA_VISIBLE_DEVICES", gpus=gpu_order(tmp_path, 1, "0", "1"))
    assert first.run() == 0
    assert first.log() == "0\n"
    (claims / "claim.living").write_text(json.dumps({**dead, "pid": os.getpid(), "start": None, "gpus": {"0": 0.25}}))
    second = make_job(tmp_path / "second", first.python, "true", gpus=gpu_order(tmp_path, 1, "0"))
    running = second.start()
    time.sleep(1)
    waiting = second.ends()

    (claims / "claim.living").unlink()

    assert second.finish(running) == 0
    assert waiting == [], "no attempt begins before there is a GPU for it"


def test_shim_that_waits_for_a_gpu_can_be_cancelled_and_stopped(job: MakeJob, tmp_path: Path) -> None:
    (tmp_path / "gpus").mkdir()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    held = {"boot": boot, "pid": os.getpid(), "start": None, "groups": [], "gpus": {"0": 1.0}}
    (tmp_path / "gpus" / "claim.living").write_text(json.dumps(held))
    made = job("true", gpus=gpu_order(tmp_path, 1, "0"))
    stopped = made.start()
    wait_until_it_listens(stopped)
    time.sleep(0.5)
    stopped.send_signal(signal.SIGTERM)
    assert made.finish(stopped) == 10
    waiting = made.start()
    wait_until_it_listens(waiting)
    time.sleep(0.5)

    (made.folder / "cancel").touch()

    assert made.finish(waiting) == 1
    assert made.results() == {0: ("cancelled", 1, 0)}


def test_shim_on_a_machine_with_too_few_gpus_says_so(job: MakeJob, tmp_path: Path) -> None:
    made = job("true", gpus=gpu_order(tmp_path, 2, "0"))

    assert made.run() == 1

    assert made.results() == {0: ("setup_failed", 1, 1)}
    assert "2 GPUs are wanted and" in json.loads((made.folder / "runs/0/result").read_text())["message"]


def test_shim_that_was_killed_holds_its_gpu_while_its_command_lives(job: MakeJob, tmp_path: Path) -> None:
    # Silent, because the pipe for its output ends with the shim.
    made = job("sleep 600", gpus=gpu_order(tmp_path, 1, "0"))
    running = made.start()
    wait_for(lambda: any('"groups": [{' in path.read_text() for path in (tmp_path / "gpus").glob("claim.*")), "a claim")
    running.kill()
    made.finish(running)
    other = make_job(tmp_path / "other", made.python, "true", gpus=gpu_order(tmp_path, 1, "0"))
    waits = other.start()
    time.sleep(1)
    early, lives = other.ends(), processes_with(str(made.folder))

    again = made.start()
    wait_for(lambda: len(made.ends()) == 2 or other.results(), "somebody who has the GPU")
    (made.folder / "cancel").touch()

    assert (made.finish(again), other.finish(waits)) == (1, 0)
    assert early == []
    assert lives
    assert processes_with(str(made.folder)) == []


# logs


def printing(tmp_path: Path, lines: int, *, then: str = "") -> list[str]:
    """Make a command that prints numbered lines of 100 bytes, and then runs `then`."""
    script = f"for n in range({lines}): print(format(n, '099d'))\n{then}"
    return [sys.executable, "-c", f"import os, sys, time\nsys.stdout.reconfigure(line_buffering=False)\n{script}"]


def read_gap(log: str) -> tuple[list[str], int, list[str]]:
    """Return the whole lines before the gap of a log, the number of bytes left out, and the whole lines after it."""
    head, said, tail = re.split(r"\n\[shim: +(\d+) bytes are left out here[^\n]*\n", log)
    return head.split("\n")[:-1], int(said), tail.split("\n")[1:-1]


@pytest.mark.parametrize("lines", [100, 654, 655, 656, 5_000])
def test_log_keeps_its_beginning_and_its_end_and_says_what_is_left_out(
    job: MakeJob, tmp_path: Path, lines: int
) -> None:
    made = job(printing(tmp_path, lines), log_bytes=65_536)

    assert made.run() == 0

    log, whole = made.log(), [format(number, "099d") for number in range(lines)]
    assert len(log) <= 65_536
    if lines * 100 <= 65_536:
        assert log.splitlines() == whole
        return
    head, left_out, tail = read_gap(log)
    assert (head, tail) == (whole[: len(head)], whole[-len(tail) :])
    assert len(log) - len(render_gap(0)) + left_out == lines * 100
    assert min(len(head), len(tail)) > 100


def test_command_that_floods_its_log_goes_on_to_its_end_and_is_not_idle(job: MakeJob, tmp_path: Path) -> None:
    made = job(
        f"yes & while [ ! -e {tmp_path}/on ]; do sleep 0.05; done; kill $!; wait; echo end",
        log_bytes=65_536,
        idle_timeout_s=600,
    )
    made.clock = tmp_path / "clock"
    made.constants |= {"BEAT_S": 0.05, "LOG_FLUSH_S": 0.05}
    running = made.start()

    def left_out() -> int:
        log = made.folder / "runs/0/a0001/rank0.log"
        found = re.findall(r"shim: +(\d+) bytes", log.read_text() if log.exists() else "")
        return int(found[0]) if found else 0

    def beats() -> int:
        return int((made.folder / "runs/0/a0001/beat").read_text())

    def wait_for_more(count: Callable[[], int]) -> None:
        before = count()
        wait_for(lambda: count() > before + 1, "more")

    try:
        wait_for(left_out, "a full log")
        for _ in range(2):
            made.pass_time(400)
            wait_for_more(left_out)
            wait_for_more(left_out)  # the first line may have been printed earlier
            wait_for_more(beats)  # the shim has looked at the output again
    finally:
        (tmp_path / "on").touch()

    assert made.finish(running) == 0
    assert made.log().endswith("\nend\n")
    assert (made.folder / "runs/0/a0001/rank0.log").stat().st_size <= 65_536


def test_log_of_each_rank_has_the_limit_for_itself(job: MakeJob, tmp_path: Path) -> None:
    made = job(printing(tmp_path, 2000), log_bytes=65_536, nodes=2)

    assert made.run() == 0

    assert [read_gap(made.log(rank=rank))[2][-1] for rank in range(2)] == [format(1999, "099d")] * 2


def test_bytes_that_the_disk_refuses_are_counted_where_they_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = RankLog(str(tmp_path / "log"), 65_536)
    log.add(b"one\n")
    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", refuse)
        log.add(b"two\n")
        log.add(b"three\n")
    log.add(b"four\n")
    log.close()

    said = "\n[shim: 10 bytes could not be written here: No space left on device]\n"
    assert (tmp_path / "log").read_text() == f"one\n{said}four\n"


def refuse(*_: object) -> int:
    raise OSError(errno.ENOSPC, "no space left on device")


def test_last_words_of_a_command_are_in_its_log_however_soon_that_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, opened = threading.Event(), threading.Event()
    poll, write = select.poll, os.write

    class Late:
        """A poll that began before the pipe existed, and returns only when everything has ended."""

        def __init__(self) -> None:
            self.poll_ = poll()
            self.register, self.unregister = self.poll_.register, self.poll_.unregister

        def poll(self, timeout: float | None) -> list[tuple[int, int]]:
            ready = self.poll_.poll(timeout)
            if not looked.is_set():
                looked.set()
                opened.wait(60)
                return ready[:1]
            return ready

    monkeypatch.setattr(select, "poll", Late)
    logs = Logs(65_536)
    sink = logs.open(str(tmp_path / "log"))
    assert looked.wait(60)
    os.write(sink, b"last words\n")
    os.close(sink)
    monkeypatch.setattr(os, "write", lambda *words: (write(*words), opened.set())[0])

    logs.close()

    assert (tmp_path / "log").read_text() == "last words\n"


def test_logs_are_closed_although_something_goes_on_printing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.shim.logs.LEFT_S", 0.2)
    logs = Logs(65_536)
    sink = logs.open(str(tmp_path / "log"))
    flood = subprocess.Popen(["yes"], stdout=sink)
    os.close(sink)
    try:
        wait_for(lambda: logs.printed() > 1_000_000, "a flood")
        logs.close()
    finally:
        flood.kill()
        flood.wait()

    assert (tmp_path / "log").stat().st_size <= 65_536


# stopping an array


def test_shim_of_an_array_that_stops_starts_nothing_after_a_failure(job: MakeJob) -> None:
    made = job("exit $((RUNTIME_ARRAY_INDEX == 1))", runs={index: {} for index in range(4)}, on_task_failure="stop")

    assert made.run("--indices", "0-3") == 1

    assert made.results() == {
        0: ("succeeded", 0, 1),
        1: ("app_failed", 1, 1),
        2: ("sibling_failed", 1, 0),
        3: ("sibling_failed", 1, 0),
    }


def test_shim_of_an_array_that_stops_lets_what_runs_finish_and_knows_after_a_crash(job: MakeJob) -> None:
    made = job("[ $RUNTIME_ARRAY_INDEX = 0 ]", runs={0: {}, 1: {}}, on_task_failure="stop", pack={"slots": 1})
    assert made.run("--index", "1") == 1
    (made.folder / "stopped").unlink()

    assert made.run("--index", "1") == 1

    assert made.run("--indices", "0-1") == 1
    assert made.results() == {0: ("sibling_failed", 1, 0), 1: ("app_failed", 1, 1)}


# leftovers of a dead shim


def test_shim_ends_what_a_killed_one_left_running_before_it_starts_again(job: MakeJob) -> None:
    # Silent, like all commands that must outlive their shim: the pipe for their output ends with it.
    made = job("[ $RUNTIME_ATTEMPT = 2 ] || sleep 600")
    running = made.start()
    wait_for((made.folder / "runs/0/a0001/processes.json").exists, "the list of its processes")
    running.kill()
    made.finish(running)
    left = json.loads((made.folder / "runs/0/a0001/processes.json").read_text())[0]["pid"]
    assert Path(f"/proc/{left}").exists()

    assert made.run() == 0

    assert made.ends() == ["-", "-"]
    assert made.results() == {0: ("succeeded", 0, 2)}
    wait_for(lambda: f"process group {left}" in made.stderr, "a word about it")


def daemon(tmp_path: Path, *, environment: str = "") -> tuple[str, Path]:
    """Return a line of shell that starts a daemon and continues once it runs, and the file with its process id."""
    (tmp_path / "daemon.py").write_text(DAEMON)
    said = tmp_path / "daemon.pid"
    start = f"{environment} {sys.executable} {tmp_path}/daemon.py {said}"
    return f"{start}; while [ ! -e {said} ]; do sleep 0.05; done", said


@pytest.mark.parametrize(
    "ends",
    ["true", "exit 3", "kill -9 $$", "printf %999s >> $CLOCK; sleep 600"],
    ids=["well", "failed", "killed", "late"],
)
@pytest.mark.parametrize("environment", ["", "env -i"], ids=["", "without variables"])
def test_daemon_that_left_its_session_ends_with_the_command_that_began_it(
    job: MakeJob, tmp_path: Path, ends: str, environment: str
) -> None:
    start, said = daemon(tmp_path, environment=environment)
    made = job(f"{start}; {ends}", time_limit_s=600.0, grace_s=0.2)
    made.clock = tmp_path / "clock"

    made.run()

    assert made.results()
    assert not lives(said)


def test_daemon_of_one_run_ends_with_it_while_the_others_of_a_packed_machine_go_on(
    job: MakeJob, tmp_path: Path
) -> None:
    start, said = daemon(tmp_path)
    script = (
        f"[ $RUNTIME_ARRAY_INDEX = 1 ] || {{ {start}; exit 0; }}; while [ ! -e {tmp_path}/on ]; do sleep 0.05; done"
    )
    made = job(script, runs={0: {}, 1: {}}, pack={"slots": 2})
    running = made.start("--indices", "0-1")
    wait_for(lambda: 0 in made.results(), "the end of the first run")

    left = lives(said)
    (tmp_path / "on").touch()

    assert (made.finish(running), left) == (0, False)


def test_what_a_command_orphans_leaves_no_dead_process_behind(job: MakeJob, tmp_path: Path) -> None:
    made = job(f"(true &); (true &); while [ ! -e {tmp_path}/on ]; do sleep 0.05; done")
    running = made.start()
    wait_for((made.folder / "runs/0/a0001/rank0.log").exists, "the command")

    def dead() -> list[int]:
        found = list_processes().items()
        return [pid for pid, (parent, _, state) in found if (parent, state) == (running.pid, "Z")]

    try:
        wait_for(lambda: dead() == [], "an end of the dead")
    finally:
        (tmp_path / "on").touch()
    assert made.finish(running) == 0


@pytest.mark.parametrize("next_one", [[], ["--clear"]], ids=["start", "clear"])
def test_daemon_of_a_killed_shim_is_ended_by_the_next_one_on_its_machine(
    job: MakeJob, tmp_path: Path, next_one: list[str]
) -> None:
    start, said = daemon(tmp_path)
    made = job(f"[ $RUNTIME_ATTEMPT = 2 ] || {{ {start}; exec sleep 600; }}")
    running = made.start()
    wait_for(said.exists, "the daemon")
    running.kill()
    made.finish(running)
    before = lives(said)

    assert made.run(*next_one) == 0

    assert (before, lives(said), processes_with(str(made.folder))) == (True, False, [])


def test_shim_of_another_job_that_a_command_launched_outlives_it(job: MakeJob, tmp_path: Path) -> None:
    other = make_job(tmp_path / "other", sys.executable, f"while [ ! -e {tmp_path}/on ]; do sleep 0.05; done")
    begun = other.folder / "runs/0/a0001/rank0.log"
    started = f"setsid {sys.executable} {SHIM} {other.folder} >/dev/null 2>&1 &"
    made = job(f"{started} while [ ! -e {begun} ]; do sleep 0.05; done")

    assert made.run() == 0

    (tmp_path / "on").touch()
    wait_for(other.results, "the end of the other job")
    assert other.results() == {0: ("succeeded", 0, 1)}


def test_shim_killed_while_it_noted_an_end_disturbs_no_later_one(job: MakeJob) -> None:
    made = job("true")
    folder = made.folder / "runs" / "0" / "a0001"
    folder.mkdir(parents=True)
    (folder / "end.app_failed.1.4711.0123abcd").write_text('{"rea')

    assert made.run() == 0

    assert made.results() == {0: ("succeeded", 0, 2)}


def test_shim_that_cannot_beat_lets_the_command_finish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, text: str, durable: bool = True) -> None:
        if path.endswith("beat"):
            raise OSError(errno.ENOSPC, "no space left on device")
        write_whole(path, text, durable)

    made = make_job(tmp_path, sys.executable, "exit 4")
    monkeypatch.setattr("runtime.shim.record.write_whole", refuse)

    assert begin_attempt(made).go()[:2] == ("app_failed", 4)


def test_shim_beats_while_it_waits_for_a_command_that_is_slow_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beat = tmp_path / "jobs" / JOB / "runs/0/a0001/beat"
    until_it_beats = f'was=$(cat {beat}); while [ "$(cat {beat})" = "$was" ]; do sleep 0.05; done; exit'
    script = f"trap '{until_it_beats}' TERM; echo slow; while :; do sleep 0.1; done"
    made = make_job(tmp_path, sys.executable, script, grace_s=PATIENCE_S)
    monkeypatch.setattr("runtime.shim.attempt.BEAT_S", 0.05)
    attempt = begin_attempt(made)
    when_stopped: list[int] = []

    class Stopping(StopRequests):
        why = "SIGTERM"

        @property
        def stop(self) -> bool:
            if "slow" not in made.log():
                return False
            when_stopped.append(attempt.life.beats)
            return True

    attempt.asked = Stopping.__new__(Stopping)

    assert attempt.go()[0] == "stopped"
    assert int(beat.read_text()) > when_stopped[0] > 0


def begin_attempt(made: ShimJob) -> CommandAttempt:
    """Run the first attempt of a job in this process."""
    made.write()
    run, scratch = RunRecord(FolderRecord(str(made.folder)), 0), made.root / "scratch"
    scratch.mkdir()
    return CommandAttempt(made.order, run, run.claim("test"), str(scratch), make_asked(), {})


def test_result_waits_for_a_disk_that_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tries: list[str] = []

    def write(path: str, text: str) -> None:
        tries.append(path)
        if len(tries) < 3:
            raise OSError(errno.ENOSPC, "no space left on device")
        write_whole(path, text)

    monkeypatch.setattr("runtime.shim.files.WRITE_AGAIN_S", 0.0)
    write_patiently(write, str(tmp_path / "result"), "done")

    assert (tmp_path / "result").read_text() == "done"
    assert capsys.readouterr().err.count("cannot write result, tries again: no space left on device") == 2


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO])
def test_record_on_a_file_server_that_starts_anew_is_read_once_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    record = FolderRecord(str(tmp_path))
    record.write("result", "done")
    failures = {"listdir": 2, "open": 2}
    real = {"listdir": os.listdir, "open": io.open}

    def failing(name: str) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            failures[name] -= 1
            if failures[name] >= 0:
                raise OSError(number, os.strerror(number))
            return real[name](*args, **more)

        return call

    monkeypatch.setattr("runtime.shim.files.WRITE_AGAIN_S", 0.0)
    monkeypatch.setattr("runtime.shim.record.os.listdir", failing("listdir"))
    monkeypatch.setattr("runtime.shim.files.io.open", failing("open"))
    assert (record.names("."), record.read("result")) == (["result"], "done")

    monkeypatch.setattr("runtime.shim.files.WRITE_PATIENCE_S", 0.0)
    failures["listdir"] = failures["open"] = 1000
    for look in (lambda: record.names("."), lambda: record.read("result")):
        with pytest.raises(OSError, match=os.strerror(number)):
            look()


def test_result_that_can_never_be_written_is_given_up(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_patiently(write_whole, str(tmp_path / "none" / "result"), "done")


def test_shim_of_a_command_that_was_ended_with_its_job_says_cancelled(job: MakeJob) -> None:
    made = job("touch $RUNTIME_OUTPUT_DIR/../../../../cancel; exit 143", retry={"failure": 3})

    assert made.run() == 1

    assert made.results() == {0: ("cancelled", 1, 1)}


@pytest.mark.parametrize(
    ("stopper", "changes"),
    [
        ("kill -TERM $PPID", {"retry": {"preemption": 0}}),
        ("kill -ALRM $PPID", {"time_limit_s": 600}),
        ("while :; do printf %9s >> $CLOCK; sleep 0.05; done", {"idle_timeout_s": 600}),
    ],
    ids=["stopped", "time limit", "idle"],
)
def test_run_that_is_cancelled_while_something_else_ends_it_is_cancelled(
    job: MakeJob, tmp_path: Path, stopper: str, changes: dict[str, Any]
) -> None:
    mark = "touch $RUNTIME_OUTPUT_DIR/../../../../cancel; exit 143"
    made = job(f"trap '{mark}' TERM; {stopper}\nwhile :; do sleep 0.05; done", grace_s=1e9, **changes)
    made.clock = tmp_path / "clock"

    assert made.run() == 1

    assert made.results() == {0: ("cancelled", 1, 1)}


@pytest.mark.parametrize(("code", "result"), [(0, ("succeeded", 0, 1)), (3, ("app_failed", 3, 1))])
def test_result_that_is_there_before_the_cancel_mark_stands(
    job: MakeJob, code: int, result: tuple[str, int, int]
) -> None:
    made = job(f"exit {code}")
    first = made.run()
    (made.folder / "cancel").touch()

    assert (made.run(), made.results()) == (first, {0: result})


def test_shim_of_a_job_within_a_job_is_no_rank_of_that(job: MakeJob) -> None:
    made = job('echo "${RANK:-none} ${MASTER_ADDR:-none}"')

    assert made.run(RUNTIME_JOB_ID="j-outer", RANK="3", MASTER_ADDR="node7") == 0
    assert made.log() == "none none\n"


def test_shim_leaves_variables_of_the_machine_alone(job: MakeJob) -> None:
    made = job('echo "${RANK:-none}"')

    assert made.run(RANK="3") == 0
    assert made.log() == "3\n"


def test_shim_clears_and_runs_nothing(job: MakeJob) -> None:
    made = job("sleep 600")
    running = made.start()
    wait_for((made.folder / "runs/0/a0001/processes.json").exists, "the list of its processes")
    running.kill()
    made.finish(running)

    assert made.run("--clear") == 0

    assert processes_with(str(made.folder)) == []
    assert (made.ends(), made.results()) == (["-"], {})


@pytest.mark.parametrize("words", [["--clear"], []], ids=["cleared", "started again"])
def test_tree_of_a_killed_shim_goes_with_what_it_left_running(job: MakeJob, words: list[str]) -> None:
    made = job("[ $RUNTIME_ATTEMPT = 2 ] || sleep 600")
    running = made.start()
    wait_for((made.folder / "runs/0/a0001/processes.json").exists, "the list of its processes")
    running.kill()
    made.finish(running)
    assert len(made.left_over()) == 1

    assert made.run(*words) == 0

    assert made.left_over() == []


def test_shim_killed_before_it_made_its_tree_disturbs_no_later_one(job: MakeJob) -> None:
    made = job("true")
    made.finish(made.start(RUNTIME_FAULTS="shim.claimed=kill"))

    assert made.run() == 0

    assert (made.ends(), made.left_over()) == (["-", "-"], [])


def test_shim_removes_no_folder_but_one_that_attempts_make(job: MakeJob, tmp_path: Path) -> None:
    made = job("true")
    noted = {1: tmp_path / "other", 2: tmp_path / f"job-{JOB[:10]}-1-ab", 3: tmp_path / f"job-{JOB[:10]}-0-link"}
    noted[1].mkdir()
    noted[2].mkdir()
    noted[3].symlink_to(noted[1])
    for attempt, path in noted.items():
        start = {"host": socket.gethostname(), "boot": boot_id(), "pid": 1, "start": "0", "scratch": str(path)}
        (made.folder / f"runs/0/a{attempt:04d}").mkdir(parents=True)
        (made.folder / f"runs/0/a{attempt:04d}/start.json").write_text(json.dumps(start))

    assert made.run("--clear") == 0

    assert all(path.exists() for path in noted.values())


def test_shim_after_a_restart_of_the_machine_counts_a_failed_node(job: MakeJob) -> None:
    made = job("true", retry={"preemption": 0})
    folder = made.folder / "runs" / "0" / "a0001"
    folder.mkdir(parents=True)
    start = {"host": socket.gethostname(), "boot": "an earlier start", "pid": os.getpid(), "start": None, "at": 1.0}
    (folder / "start.json").write_text(json.dumps(start))

    assert made.run() == 1

    assert made.results() == {0: ("node_failed", 1, 1)}


def test_shim_says_which_rank_failed_first(job: MakeJob) -> None:
    made = job("[ $RUNTIME_RANK = 1 ] && exit 7; sleep 600", nodes=3)

    assert made.run() == 1

    result = json.loads((made.folder / "runs/0/result").read_text())
    assert (result["reason"], result["code"], result["rank"]) == ("app_failed", 7, 1)


# environments


CONDA = """#!/bin/sh
[ "$1 $2" = "env create" ] || exit 9
echo made >> "$RECORD"
sleep 0.3
[ -z "$BROKEN" ] || { echo "no such package: numpi" >&2; exit 1; }
mkdir -p "$5/bin"
printf '#!/bin/sh\\necho tool of %s\\n' "$5" > "$5/bin/tool"
chmod 755 "$5/bin/tool"
"""


@pytest.fixture
def conda(tmp_path: Path) -> dict[str, str]:
    """Variables of a machine whose `conda` makes an environment with one tool in it."""
    folder = tmp_path / "conda"
    folder.mkdir()
    (folder / "conda").write_text(CONDA)
    (folder / "conda").chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}", "RECORD": str(tmp_path / "made")}


def with_environment(job: MakeJob, tmp_path: Path, script: str, **environment: Any) -> ShimJob:
    tree = tmp_path / "with-lock"
    tree.mkdir(exist_ok=True)
    (tree / "environment.yml").write_text("dependencies: [numpy]\n")
    (tree / "module.py").write_text("")
    made = {"manager": "conda", "lock": "environment.yml", "extras": [], "build_on": "node", **environment}
    built = job(script, environment=made, runs={index: {} for index in range(3)}, pack={"slots": 3})
    add_snapshot(built, make_snapshot(tree).archive)
    return built


def test_shim_makes_an_environment_once_for_all_runs_and_enters_it(
    job: MakeJob, tmp_path: Path, conda: dict[str, str]
) -> None:
    made = with_environment(job, tmp_path, 'tool; echo "$CONDA_PREFIX"; ls "${PYTHONPATH%%:*}"')

    assert made.run("--indices", "0-2", **conda) == 0

    assert (tmp_path / "made").read_text() == "made\n"
    (link,) = [path for path in (tmp_path / "environments").iterdir() if path.is_symlink()]
    home = link.resolve()
    assert made.log(2) == f"tool of {home}\n{home}\nenvironment.yml\nmodule.py\n"
    assert sorted(path.name for path in (tmp_path / "environments").iterdir()) == sorted([link.name, home.name])


def test_environment_that_is_there_just_before_it_could_be_made_leaves_no_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, environments = tmp_path / "jobs" / "j-1", tmp_path / "environments"
    job.mkdir(parents=True)
    (tmp_path / "environment.yml").write_text("dependencies: [numpy]\n")
    create = create_whole

    def create_after_it_is_made(path: str, text: str) -> None:
        Path(path.removesuffix(".builder")).mkdir()
        create(path, text)

    monkeypatch.setattr("runtime.shim.environment.create_whole", create_after_it_is_made)
    made = {"manager": "conda", "lock": "environment.yml"}

    place = find_environment(made, str(job), str(tmp_path), True)

    assert [str(path) for path in environments.iterdir()] == [place]


def test_shim_whose_environment_cannot_be_made_says_what_the_manager_said(
    job: MakeJob, tmp_path: Path, conda: dict[str, str]
) -> None:
    made = with_environment(job, tmp_path, "true")

    assert made.run("--index", "0", **conda, BROKEN="1") == 1
    assert made.run("--index", "1", **{**conda, "PATH": "/usr/bin:/bin"}) == 1

    messages = [json.loads((made.folder / f"runs/{index}/result").read_text())["message"] for index in (0, 1)]
    assert messages == [
        "conda env failed: no such package: numpi",
        f"cannot make the environment with conda: there is no such program on PATH on {os.uname().nodename}",
    ]
    assert list((tmp_path / "environments").iterdir()) == []


def test_shim_with_an_environment_of_the_launch_makes_none_itself(
    job: MakeJob, tmp_path: Path, conda: dict[str, str]
) -> None:
    made = with_environment(job, tmp_path, "tool", build_on="submit")

    assert made.run("--index", "0", **conda) == 1
    assert made.run("--prepare", **conda) == 0
    assert made.run("--prepare", **conda) == 0
    assert made.run("--index", "1", **{**conda, "PATH": "/usr/bin:/bin"}) == 0

    assert made.results() == {0: ("setup_failed", 1, 1), 1: ("succeeded", 0, 1)}
    assert (tmp_path / "made").read_text() == "made\n"
    assert made.left_over() == []


def test_shim_takes_over_from_a_maker_of_the_environment_that_died(
    job: MakeJob, tmp_path: Path, conda: dict[str, str]
) -> None:
    made = with_environment(job, tmp_path, "tool")
    assert made.run("--prepare", **conda) == 0
    (link,) = [path for path in (tmp_path / "environments").iterdir() if path.is_symlink()]
    link.unlink()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    dead = {"host": socket.gethostname(), "boot": boot, "pid": 2**22 + 1, "start": "1"}
    (tmp_path / "environments" / f"{link.name}.builder").write_text(json.dumps(dead))

    assert made.run("--index", "0", **conda) == 0

    assert link.is_symlink()
    assert (tmp_path / "made").read_text() == "made\nmade\n"


SLOW_CONDA = """#!/bin/sh
mkdir -p "$5/bin"
sleep 1000 &
echo $! >> "$RECORD.new"
mv "$RECORD.new" "$RECORD"
wait
"""


@pytest.mark.parametrize(
    ("why", "code", "end"),
    [("TERM", 10, "stopped"), ("a cancel mark", 1, "cancelled"), ("the time limit", 1, "timeout")],
)
def test_environment_that_is_being_made_ends_with_its_attempt_and_leaves_nothing(
    job: MakeJob, tmp_path: Path, conda: dict[str, str], why: str, code: int, end: str
) -> None:
    (tmp_path / "conda" / "conda").write_text(SLOW_CONDA)
    made = with_environment(job, tmp_path, "true")
    made.order["time_limit_s"] = 3600
    made.write()
    made.clock = tmp_path / "clock"
    made.clock.touch()
    shim = made.start("--index", "0", **conda)
    wait_for((tmp_path / "made").exists, "the manager")

    if why == "TERM":
        shim.terminate()
    elif why == "a cancel mark":
        (made.folder / "cancel").touch()
    else:
        made.pass_time(3700)

    assert made.finish(shim) == code
    if why == "TERM":
        assert made.ends() == [end]
    else:
        assert made.results()[0][0] == end
    assert not is_alive({"boot": boot_id(), "pid": int((tmp_path / "made").read_text())})
    assert list((tmp_path / "environments").iterdir()) == []


def test_launch_that_makes_an_environment_ends_with_its_manager_once_it_is_asked_to(
    job: MakeJob, tmp_path: Path, conda: dict[str, str]
) -> None:
    (tmp_path / "conda" / "conda").write_text(SLOW_CONDA)
    made = with_environment(job, tmp_path, "true", build_on="submit")
    shim = made.start("--prepare", **conda)
    wait_for((tmp_path / "made").exists, "the manager")

    shim.terminate()

    assert made.finish(shim) == 1
    assert not is_alive({"boot": boot_id(), "pid": int((tmp_path / "made").read_text())})
    assert list((tmp_path / "environments").iterdir()) == []


@pytest.mark.service
def test_shim_makes_an_environment_of_a_uv_lock(job: MakeJob, tmp_path: Path) -> None:
    uv = shutil.which("uv") or shutil.which("uv", path=str(Path(__file__).parents[3] / ".venv-lock" / "bin"))
    require("uv", uv, "make .venv-lock/.ready")
    tree = tmp_path / "project"
    tree.mkdir()
    (tree / "pyproject.toml").write_text('[project]\nname = "empty"\nversion = "1"\nrequires-python = ">=3.11"\n')
    (tree / "uv.lock").write_text(
        'version = 1\nrequires-python = ">=3.11"\n\n[[package]]\nname = "empty"\nversion = "1"\nsource = { virtual = "." }\n'
    )
    made = job(
        'python -c "import sys; print(sys.prefix)"; echo $VIRTUAL_ENV',
        environment={"manager": "uv", "lock": "uv.lock", "extras": [], "build_on": "node"},
    )
    add_snapshot(made, make_snapshot(tree).archive)
    path = f"{Path(str(uv)).parent}:{Path(sys.executable).resolve().parent}:{os.environ['PATH']}"

    assert made.run(PATH=path, HOME=str(tmp_path), UV_OFFLINE="1", UV_PYTHON=sys.executable) == 0, made.stderr

    (link,) = [path for path in (tmp_path / "environments").iterdir() if path.is_symlink()]
    assert made.log() == f"{link.resolve()}\n{link.resolve()}\n"


# language versions


def test_files_that_travel_need_nothing_newer_than_python_3_6() -> None:
    assert needed_python(SHIM, *list_shipped().values(), Path(agent.__file__)) <= (3, 6)


def test_shim_is_one_file_that_holds_every_module_as_it_is() -> None:
    program: dict[str, Any] = {"__name__": "shim"}
    exec(compile(build_shim(), "shim.py", "exec"), program)
    sys.meta_path.remove(next(each for each in sys.meta_path if isinstance(each, program["Modules"])))

    sources = {module: path.read_text(encoding="utf-8") for module, path in list_shipped().items()}
    assert program["SOURCES"] == {"runtime": "", "runtime.shim": "", **sources}
    assert "runtime.shim.bundle" not in sources


@pytest.mark.parametrize("python", dict.fromkeys((OLDEST, OWN, NEWEST)))
def test_every_module_of_the_shim_is_taken_from_its_file_and_from_nowhere_else(tmp_path: Path, python: str) -> None:
    (tmp_path / "runtime.py").write_text("raise SystemExit('the wrong one')\n")
    (tmp_path / "shim").mkdir()
    lines = "".join(f"import {module}\nprint({module}.__spec__.loader.__class__)\n" for module in list_shipped())

    done = subprocess.run(
        [PYTHONS[python], "-c", IMPORT + lines],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(tmp_path)},
    )

    assert (done.stderr, set(done.stdout.splitlines())) == ("", {"<class 'shim.Modules'>"})


def test_command_of_a_shim_sees_none_of_its_modules(job: MakeJob) -> None:
    made = job(
        [sys.executable, "-Sc", "import sys; print([each for each in sys.path if 'shim' in each])\nimport runtime"]
    )

    assert made.run() == 1

    assert made.log().startswith("[]\n")
    assert "No module named 'runtime'" in made.log()


def test_check_of_the_python_that_is_needed_sees_a_newer_call(tmp_path: Path) -> None:
    newer = tmp_path / "newer.py"
    newer.write_text("import math\nprint(math.dist([1], [2]))\nx: int = 1\n")

    assert needed_python(newer) == (3, 8)


def needed_python(*paths: Path) -> tuple[int, ...]:
    """Return the oldest Python 3 that has everything the files use, by vermin's tables."""
    done = subprocess.run(
        [sys.executable, "-c", "from vermin import main; main()", "--no-tips", "--eval-annotations", *map(str, paths)],
        capture_output=True,
        text=True,
        check=True,
    )
    line = next(line for line in done.stdout.splitlines() if line.startswith("Minimum required versions:"))
    return tuple(int(number) for number in line.rpartition(" ")[2].split("."))


REAPED_EARLY = """
import subprocess
from runtime.shim import processes
processes.adopt_orphans()
child = processes.ChildProcess(["/bin/sh", "-c", "exit 5"], start_new_session=True)
os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
processes.reap_orphans()
print(child.pid in processes.KNOWN, child.wait(), child.pid in processes.KNOWN)
child = subprocess.Popen(["/bin/sh", "-c", "exit 6"])
os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
processes.reap_orphans()
print(child.wait())
"""


@pytest.mark.skipif(not hasattr(os, "waitid"), reason="orphans fall to nobody here")
def test_command_that_ends_while_orphans_are_taken_keeps_its_exit_code() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT + REAPED_EARLY], capture_output=True, text=True, check=False, timeout=60
    )

    assert done.stdout == "True 5 False\n6\n", done.stderr
