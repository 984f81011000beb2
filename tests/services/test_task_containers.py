"""Tasks in containers of a real podman: what an attempt finds there, how it ends, and that nothing of it is left."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from runtime.client.tasks.call_results import read_end
from runtime.end_reasons import EndReason
from runtime.snapshots.snapshot import take_snapshot
from runtime.tasks.calls import CALL_REQUEST
from runtime.tasks.container import ContainerSpec, Mount, MountMode
from runtime.tasks.model import CommandEntry, FunctionEntry, Resources, Task, TaskState
from runtime.testing import sample_task
from tests.images_support import build_from, remove_images
from tests.services.podman import IMAGE, podman, podman_settings
from tests.services_support import wait_until
from tests.shim_support import processes_with, signal_all, wait_for
from tests.unit.worker.test_worker_fork_server import guardian_of
from tests.unit.worker.test_worker_secrets import SecretBench, given
from tests.unit.worker.worker_bench import Bench, bench, start_command

__all__ = ["bench", "given", "podman_settings"]

pytestmark = [pytest.mark.service, pytest.mark.slow, pytest.mark.xdist_group("containers")]


@pytest.fixture(autouse=True)
def _nothing_left_behind(tmp_path: Path, podman_settings: None) -> Iterator[None]:
    yield
    assert names_in(tmp_path) == [], "containers were left"


def names_in(folder: Path) -> list[str]:
    """List the containers of workers with their scratch in a folder, whatever their state."""
    form = '{{.Names}} {{index .Labels "research-runtime.scratch"}}'
    lines = podman("ps", "--all", "--filter", "label=research-runtime.scratch", "--format", form).splitlines()
    return [line.split()[0] for line in lines if line.split()[1].startswith(str(folder))]


def in_image(key: str, entry: CommandEntry | FunctionEntry, *mounts: Mount, image: str = IMAGE, **fields: Any) -> Task:
    return sample_task(key, entry=entry, container=ContainerSpec(image, mounts), **{"max_failures": 1, **fields})


def command(*argv: str, **fields: Any) -> Task:
    return in_image(" ".join(argv), CommandEntry(argv), **fields)


def shell(script: str, *mounts: Mount, **fields: Any) -> Task:
    return in_image(script, CommandEntry(("sh", "-c", script)), *mounts, **fields)


def gate(bench: Bench) -> Mount:
    """Mount a folder of the bench at /gate, for files by which test and attempt tell each other how far they are."""
    (bench.folder / "gate").mkdir(exist_ok=True)
    return Mount(source=str(bench.folder / "gate"), target="/gate", mode=MountMode.RW)


def began(bench: Bench) -> None:
    wait_for((bench.folder / "gate/began").exists, "the attempt")


WAITS = "touch /gate/began; while [ ! -e /gate/go ]; do sleep 0.1; done"


def token_of(bench: Bench) -> str:
    (name,) = names_in(bench.folder)
    return name.removeprefix("rt-")


# what an attempt finds


def test_command_finds_its_code_and_folders_and_leaves_what_a_bare_one_leaves(bench: Bench) -> None:
    source = bench.folder / "source"
    (source / "deep").mkdir(parents=True)
    (source / "deep/main.sh").write_text(
        "[ -e /run/.containerenv ] && echo inside\n"
        'echo "$RUNTIME_TASK_ID $RUNTIME_ATTEMPT ${WORKERS_OWN:-none}" >&2\n'
        "echo made >made; echo kept >$RUNTIME_OUTPUT_DIR/kept; echo step >$RUNTIME_CHECKPOINT_DIR/step\n"
        "touch $RUNTIME_SCRATCH_DIR/part $TMPDIR/tmp $HOME/home; cat $RUNTIME_ORIGIN >/dev/null && echo origin\n"
        'echo \'{"loss": 0.5}\' >>"$RUNTIME_METRICS"\n'
    )
    os.environ["WORKERS_OWN"] = "x"
    task = command("sh", "main.sh", snapshot=take_snapshot(source, bench.records), folder="deep")
    bench.put(task)

    try:
        bench.run()
    finally:
        del os.environ["WORKERS_OWN"]

    record = bench.record(task)
    assert (record.state, record.message, dict(record.metrics)) == (TaskState.SUCCEEDED, None, {"loss": 0.5})
    tidied = "runtime: `deep/made` goes with the attempt's copy of the code; $RUNTIME_OUTPUT_DIR is kept"
    assert record.log.splitlines() == ["inside", f"{task.id} 1 none", "origin", tidied]
    assert record.outputs_url is not None
    kept = Path(record.outputs_url.removeprefix("file://"))
    assert {path.name: path.stat().st_uid for path in kept.iterdir()} == {"kept": os.getuid()}
    checkpoints = bench.records.checkpoints_path(task.id)
    assert checkpoints is not None
    assert (Path(checkpoints) / "step").read_text() == "step\n"


def test_lines_of_both_streams_are_in_the_order_in_which_they_were_printed(bench: Bench) -> None:
    task = shell("n=0; while [ $n != 200 ]; do echo $n; echo $((n + 1)) >&2; n=$((n + 2)); done")
    bench.put(task)

    bench.run()

    assert bench.record(task).log.split() == [str(number) for number in range(200)]


def test_command_without_code_starts_in_its_scratch_folder_and_leaves_no_empty_folder(bench: Bench) -> None:
    task = shell('[ "$PWD" = "$RUNTIME_SCRATCH_DIR" ]')
    bench.put(task)

    bench.run()

    assert bench.record(task).state is TaskState.SUCCEEDED, bench.record(task).log
    assert bench.record(task).outputs_url is None
    assert not Path(bench.records.checkpoints_path(task.id) or "").exists()


def test_mounts_are_at_their_targets_and_kept_from_writes(bench: Bench) -> None:
    data = bench.folder / "a,b c"
    data.mkdir()
    (data / "x").write_text("here\n")
    task = shell(
        "cat /data/x; touch /data/y 2>/dev/null || echo refused; echo back >/gate/z",
        Mount(source=str(data), target="/data"),
        gate(bench),
    )
    bench.put(task)

    bench.run()

    assert bench.record(task).log == "here\nrefused\n"
    assert (bench.folder / "gate/z").read_text() == "back\n"


BODY = """
import os, sys


def where(value):
    import runtime

    attempt = runtime.current_attempt()
    return [value, os.path.exists("/run/.containerenv"), attempt.task_id]


def fail():
    raise ValueError("no such luck")


def leave():
    sys.exit(3)


def train(run, variant):
    run.report(loss=0.5)
    run.report(loss=0.25)
    (run.output / "model").write_text("x")
    return (variant["lr"], run.index)
"""


def test_functions_return_raise_and_leave_as_without_a_container(bench: Bench) -> None:
    source = bench.folder / "source"
    source.mkdir()
    (source / "lab_body.py").write_text(BODY)
    snapshot = take_snapshot(source, bench.records)
    made = [
        in_image(name, FunctionEntry(f"lab_body:{name}", args), snapshot=snapshot)
        for name, args in {"where": (1,), "fail": (), "leave": (), "gone": ()}.items()
    ]
    request = {"function": "lab_body:train", "name": "train", "args": [], "kwargs": {}, "run": True, "packed": False}
    call = FunctionEntry(CALL_REQUEST, ({**request, "item": {"lr": 0.1}, "number": 4},))
    train = in_image("train", call, snapshot=snapshot)
    bench.put(*made, train)

    bench.run(max_consecutive_failures=0)

    where, fail, leave, gone = map(bench.record, made)
    assert where.value == [1, True, made[0].id], where
    assert (fail.reason, fail.message) == (EndReason.APP_FAILED, "ValueError: no such luck")
    assert fail.log.startswith("Traceback")
    assert (leave.reason, leave.message) == (EndReason.APP_FAILED, "exit code 3")
    assert (gone.reason, gone.message) == (EndReason.CONFIG_INVALID, "module lab_body has no function gone")
    assert read_end(bench.records, train.id, 1, loads=True).take() == (0.1, 4)
    assert dict(bench.record(train).metrics) == {"loss": 0.25}


def test_warm_process_serves_tasks_with_and_without_a_container_in_turn(bench: Bench) -> None:
    source = bench.folder / "source"
    source.mkdir()
    (source / "lab_body.py").write_text(BODY)
    snapshot = take_snapshot(source, bench.records)
    entry = FunctionEntry("lab_body:where", (1,))
    inside = [in_image(f"in {number}", entry, snapshot=snapshot, priority=-number) for number in (0, 2)]
    outside = [sample_task(f"out {number}", entry=entry, snapshot=snapshot, priority=-number) for number in (1, 3)]
    bench.put(*inside, *outside)

    bench.run(reuse_process=True)

    assert [bench.record(task).value for task in inside] == [[1, True, task.id] for task in inside]
    assert [bench.record(task).value for task in outside] == [[1, False, task.id] for task in outside]


def test_secret_is_in_the_command_and_in_nothing_that_an_engine_or_a_process_list_shows(given: SecretBench) -> None:
    canary = "canary'$(id)\\ kahwe-4711"
    given.google.put_secret("dev-hf-token", canary.encode())
    task = shell(f"echo ${{#HF_TOKEN}} letters; {WAITS}", gate(given.bench))
    given.put(task)

    with given.worker():
        began(given.bench)
        said = podman("inspect", *names_in(given.bench.folder))
        lines = [read(path) for path in Path("/proc").glob("[0-9]*/cmdline")]
        (given.bench.folder / "gate/go").touch()
        given.value(task)

    assert given.bench.record(task).log == f"{len(canary)} letters\n"
    assert json.dumps(canary)[1:-1] not in said
    assert "kahwe-4711" not in said
    assert [line for line in lines if b"kahwe-4711" in line] == []


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


# how it ends


@pytest.mark.parametrize("code", [3, 125, 126, 127])
def test_exit_code_of_a_command_is_its_own(bench: Bench, code: int) -> None:
    task = shell(f"exit {code}")
    bench.put(task)

    bench.run()

    record = bench.record(task)
    assert (record.reason, record.exit_code) == (EndReason.APP_FAILED, code)
    assert record.log == ""


def test_command_that_takes_more_memory_than_its_limit_ends_as_oom(bench: Bench) -> None:
    task = command("python3", "-c", "print(len(bytearray(400 << 20)))", resources=Resources(memory_bytes=100 << 20))
    bench.put(task)

    bench.run()

    record = bench.record(task)
    assert (record.reason, record.message) == (
        EndReason.OOM,
        "killed for memory by the kernel, in its container, whose limit is 100MiB",
    )


def test_processes_of_the_engine_do_not_count_against_the_memory_of_a_task(bench: Bench) -> None:
    task = shell("sleep 3", resources=Resources(memory_bytes=20 << 20))
    bench.put(task)

    bench.run()

    assert bench.record(task).state is TaskState.SUCCEEDED, bench.record(task).message


def test_time_limit_asks_all_processes_inside_to_end_and_kills_them_after_the_grace(bench: Bench) -> None:
    polite = shell(
        "trap 'wait; echo asked; exit 0' TERM; (trap 'echo child asked; exit 0' TERM; while :; do sleep 0.1; done) &"
        "while :; do sleep 0.1; done",
        timeout=timedelta(seconds=3),
    )
    stubborn = shell("trap '' TERM; while :; do sleep 0.1; done", timeout=timedelta(seconds=3))
    bench.put(polite, stubborn)

    bench.run(slots=2, max_consecutive_failures=0)

    assert bench.record(polite).state is TaskState.SUCCEEDED
    assert {"asked", "child asked"} <= set(bench.record(polite).log.splitlines())
    assert (bench.record(stubborn).reason, bench.record(stubborn).message) == (
        EndReason.TIMEOUT,
        "timed out after 3s",
    )


def test_worker_that_is_asked_to_leave_ends_the_container_and_gives_the_task_back(bench: Bench) -> None:
    task = shell(f"trap 'echo asked; exit 1' TERM; {WAITS}", gate(bench))
    bench.put(task)
    with bench.running() as running:
        began(bench)
        running.worker.stop()
        running.join()

    assert names_in(bench.folder) == []
    assert bench.records.find(task.id, 1) is None
    (note,) = bench.notes(task)
    assert (note.reason, note.log.splitlines()[-1]) == (EndReason.PREEMPTED, "asked")


def test_daemon_that_a_command_leaves_ends_with_its_container(bench: Bench) -> None:
    program = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    os.closerange(0, 3)\n    time.sleep(600)"
    task = command("python3", "-c", program)
    bench.put(task)

    bench.run()

    record = bench.record(task)
    assert (record.state, record.log) == (TaskState.SUCCEEDED, "")
    assert processes_with(record.token or "?") == []


def test_image_that_is_nowhere_and_one_without_a_shell_fail_and_are_not_tried_again(bench: Bench) -> None:
    bare = f"localhost/runtime-test-bare-task:{os.getpid()}"
    build_from("FROM scratch\nCOPY file /file\n", {"file": "x"}, tag=bare)
    true = CommandEntry(("true",))
    images = bare, "localhost:1/lab/no-such-image:1"
    tasks = [in_image(image, true, image=image, max_failures=3) for image in images]
    bench.put(*tasks)

    try:
        with bench.running():
            assert wait_until(lambda: bench.records.find(tasks[0].id, 1) is not None)
            assert wait_until(lambda: [*bench.events("task_declined")] != [])
    finally:
        remove_images(bare)

    record = bench.record(tasks[0])
    assert (record.reason, record.attempts) == (EndReason.IMAGE_FAILED, 1)
    assert (record.message or "").startswith(f"podman did not start the command in `{bare}`")
    # A registry that does not answer is no failure of the task.
    (declined,) = bench.events("task_declined")
    assert "its container cannot run on this machine: podman has no image localhost:1/lab/no-such-image:1" in str(
        declined
    )


# nothing is left


def test_guardian_of_a_killed_worker_removes_the_container_before_another_worker_takes_the_task(bench: Bench) -> None:
    task = shell(WAITS, gate(bench), max_failures=3)
    bench.put(task)
    worker = start_command(bench)
    began(bench)
    token = token_of(bench)
    (bench.folder / "gate/began").unlink()
    worker.kill()
    worker.communicate()
    with bench.running():
        began(bench)
        assert token_of(bench) != token
        (bench.folder / "gate/go").touch()
        assert wait_until(lambda: bench.records.find(task.id, 1) is not None)

    assert bench.record(task).state is TaskState.SUCCEEDED


def test_worker_that_starts_removes_the_container_of_one_that_was_killed_with_its_guardian(bench: Bench) -> None:
    task = shell(f"trap '' TERM; {WAITS}", gate(bench), max_failures=3)
    bench.put(task)
    worker = start_command(bench)
    began(bench)
    token = token_of(bench)
    # All of the worker's processes at once, but neither the container's nor its monitor.
    guardian = guardian_of(worker.pid)
    children = [int(each) for each in Path(f"/proc/{guardian}/task/{guardian}/children").read_text().split()]
    signal_all([guardian, worker.pid, *children])
    worker.communicate()
    assert names_in(bench.folder) == [f"rt-{token}"]

    with bench.running(accept=frozenset({"workflow"})):
        wait_for(lambda: names_in(bench.folder) == [], "the removal")


@pytest.mark.parametrize("victim", ["guardian", "child", "client", "monitor"])
@pytest.mark.daily(2)
def test_container_is_gone_when_a_process_around_it_is_killed_and_the_task_runs_again(
    bench: Bench, victim: str
) -> None:
    task = shell(WAITS, gate(bench), max_failures=3)
    bench.put(task)
    worker = start_command(bench, "--idle-timeout", "1")
    began(bench)
    token = token_of(bench)
    (bench.folder / "gate/began").unlink()
    guardian = guardian_of(worker.pid)
    of_engine = [pid for pid in processes_with(f"rt-{token}") if pid != guardian]
    words = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in of_engine}
    found = {
        "guardian": [guardian],
        "child": [int(each) for each in Path(f"/proc/{guardian}/task/{guardian}/children").read_text().split()],
        "client": [pid for pid, each in words.items() if each[1:2] == [b"run"]],
        "monitor": [pid for pid, each in words.items() if b"conmon" in each[0]],
    }[victim]
    assert found
    signal_all(found)

    began(bench)
    assert [name for name in names_in(bench.folder) if name == f"rt-{token}"] == []
    (bench.folder / "gate/go").touch()
    _, err = worker.communicate()
    assert worker.returncode == 0, err
    assert bench.record(task).state is TaskState.SUCCEEDED
    assert processes_with(token) == []


def test_attempt_that_is_stopped_while_its_container_starts_leaves_none(bench: Bench) -> None:
    task = shell("sleep 600", max_failures=3)
    bench.put(task)
    with bench.running() as running:
        wait_for(lambda: list((bench.folder / "tmp").glob("*/*/*.container")), "the note on the container")
        running.worker.stop()
        running.join()

    assert names_in(bench.folder) == []
    assert [note.reason for note in bench.notes(task)] == [EndReason.PREEMPTED]
