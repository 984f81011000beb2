"""Jobs in containers of a real podman: the promises of every launcher, and what only a container can break."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from runtime.client.jobs.handle import JobHandle
from runtime.end_reasons import EndReason
from runtime.jobs.ledger import job_folder
from runtime.jobs.spec import (
    Checkpoint,
    JobEnvironment,
    JobResources,
    JobState,
    Range,
    Retry,
)
from runtime.launchers.local.launcher import LocalLauncher
from runtime.tasks.container import Mount, MountMode
from runtime.testing.launcher_bench import Bench, LauncherCase, read_log
from runtime.testing.launchers import LauncherSuite
from tests.conformance.test_launchers import kill_job
from tests.images_support import TOOLS_FOLDER, build_from, remove_images, tool_environment
from tests.services.podman import IMAGE, podman, podman_settings
from tests.services_support import PATIENCE_S
from tests.shim_support import processes_with, signal_all, wait_for
from tests.ssh_support import SshServer

__all__ = ["podman_settings"]

pytestmark = [pytest.mark.service, pytest.mark.slow, pytest.mark.xdist_group("containers")]


@pytest.fixture(autouse=True)
def _nothing_left_behind(tmp_path: Path, podman_settings: None) -> Iterator[None]:
    yield
    signal_all(processes_with(str(tmp_path)))
    found = podman("ps", "--all", "--quiet", "--filter", f"label=research-runtime.root={tmp_path}/records").split()
    if found:
        podman("rm", "--force", *found)


class TestLocalLauncherInContainers(LauncherSuite):
    """A job in a container keeps each promise that a bare process keeps."""

    @pytest.fixture
    def case(self, tmp_path: Path) -> LauncherCase:
        return LauncherCase(
            kind="local",
            settings={"container": "podman"},
            defaults={"image": IMAGE},
            records=str(tmp_path / "records"),
            patience_s=PATIENCE_S,
            break_job=kill_job,
        )


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    case = LauncherCase(
        kind="local",
        settings={"scratch": str(tmp_path / "scratch")},
        defaults={"image": IMAGE},
        records=str(tmp_path / "records"),
        patience_s=PATIENCE_S,
    )
    bench = Bench(case, tmp_path / "bench")
    yield bench
    bench.close()


def names_of(job: JobHandle) -> list[str]:
    """List the containers of a job, whatever their state."""
    # Another run of these tests on this machine has jobs of the same ids.
    labels = f"label=research-runtime.job={job.id}", f"label=research-runtime.root={job.files.root}"
    return podman("ps", "--all", "--filter", labels[0], "--filter", labels[1], "--format", "{{.Names}}").split()


def wait_for_line(job: JobHandle, line: str) -> None:
    wait_for(lambda: line in read_log(job).splitlines(), f"the line {line!r}")


def kill_shim(job: JobHandle) -> None:
    """Kill the shim alone, so that the engine's client and the container go on."""
    folder = f"{job.files.root}/{job_folder(job.id)}"
    pids = [
        pid for pid in processes_with(f"{folder}/shim.py") if b"--native" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    assert pids
    signal_all(pids)


@pytest.mark.parametrize("look", ["clear", "remove"])
def test_container_of_a_killed_shim_is_removed_by_the_next_look(bench: Bench, look: str) -> None:
    job = bench.start("sh", "-c", "echo begun; sleep 600")
    wait_for_line(job, "begun")
    kill_shim(job)
    (name,) = names_of(job)

    host, launcher = bench.open_host(), LocalLauncher()
    assert launcher.find_leftovers(bench.target, [job.id], host) == [job.id]
    owned = launcher.owned(bench.target, host, job=job.id)
    assert {(each.native_id, each.what) for each in owned if each.what == "container"} == {(name, "container")}
    if look == "clear":
        assert launcher.clear(bench.target, job_folder(job.id), host) == []
    else:
        assert launcher.remove(bench.target, owned, host) == []

    assert names_of(job) == []
    assert processes_with(f"{job.files.root}/{job_folder(job.id)}") == []


def test_containers_of_living_shims_are_in_no_list_of_what_was_left(bench: Bench) -> None:
    job = bench.start("sh", "-c", "echo begun; sleep 600")
    wait_for_line(job, "begun")

    owned = LocalLauncher().owned(bench.target, bench.open_host(), job=job.id)

    assert [each.what for each in owned] == ["shim"]
    assert job.cancel() == []
    assert names_of(job) == []


def test_secret_is_in_the_command_and_in_nothing_that_an_engine_or_a_process_list_shows(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    canary = "canary'$(id)\\ kahwe-4711"
    monkeypatch.setenv("CANARY", canary)
    secret = bench.require_secret()
    goes_on = tmp_path / "records" / "goes-on"

    job = bench.start(
        "python3",
        "-c",
        "import os, time\nprint(len(os.environ['TOKEN']), 'letters', flush=True)\n"
        "while not os.path.exists('/go/goes-on'): time.sleep(0.1)",
        secrets=(secret, replace(secret, name="RUNTIME_TOKEN")),
        mounts=(Mount(source=str(goes_on.parent), target="/go"),),
    )
    wait_for_line(job, f"{len(canary)} letters")
    said = podman("inspect", *names_of(job))
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if readable(path)]
    goes_on.touch()

    assert bench.end(job).state is JobState.SUCCEEDED
    assert json.dumps(canary)[1:-1] not in said
    assert "kahwe-4711" not in said
    assert [line for line in lines if canary.encode() in line] == []


def readable(path: Path) -> bool:
    try:
        return bool(path.read_bytes())
    except OSError:
        return False


def test_command_that_takes_more_memory_than_its_limit_ends_as_oom(bench: Bench) -> None:
    limit = JobResources(memory=Range(100 << 20, 100 << 20))
    job = bench.start("python3", "-c", "print(len(bytearray(400 << 20)))", resources=limit)

    assert bench.end(job).reason is EndReason.OOM


def test_mounts_are_at_their_targets_and_kept_from_writes(bench: Bench, tmp_path: Path) -> None:
    odd = tmp_path / 'a,b c:"d"'
    odd.mkdir()
    (odd / "x").write_text("here\n")
    written = tmp_path / "written"
    written.mkdir()
    script = 'cat "/data,1/x"; touch "/data,1/y" 2>/dev/null || echo refused; echo back >/out/z'

    job = bench.start(
        "sh",
        "-c",
        script,
        mounts=(
            Mount(source=str(odd), target="/data,1"),
            Mount(source=str(written), target="/out", mode=MountMode.RW),
        ),
    )

    assert bench.end(job).state is JobState.SUCCEEDED
    assert read_log(job) == "here\nrefused\n"
    assert (written / "z").read_text() == "back\n"
    assert (written / "z").stat().st_uid == os.getuid()


def test_checkpoint_signal_reaches_the_command_alone_and_term_all_processes(bench: Bench) -> None:
    program = (
        "import os, signal, sys, time\n"
        "who = 'child' if os.fork() == 0 else 'command'\n"
        "def note(number, frame): sys.stdout.write(f'{who} {signal.Signals(number).name}\\n')\n"
        "signal.signal(signal.SIGUSR1, note)\n"
        "def end(number, frame): note(number, frame); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "sys.stdout.write(f'{who} waits\\n')\n"
        "while True: time.sleep(0.1)\n"
    )
    job = bench.start(
        "python3",
        "-c",
        program,
        time_limit=timedelta(hours=1),
        checkpoint=Checkpoint(lead=timedelta(seconds=2)),
        retry=Retry(failure=0),
    )
    wait_for_line(job, "child waits")
    wait_for_line(job, "command waits")
    pids = processes_with(f"{job.files.root}/{job_folder(job.id)}/shim.py")
    for pid in pids:
        if b"--native" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGALRM)  # the shim's deadline is now a lead away

    assert bench.end(job).reason is EndReason.TIMEOUT
    said = read_log(job).splitlines()
    assert sorted(said[2:]) == ["child SIGTERM", "command SIGTERM", "command SIGUSR1"]


def test_container_whose_monitor_was_killed_is_removed_with_its_processes(bench: Bench) -> None:
    # podman waits for 20 s for such a container.
    job = bench.start("sh", "-c", "echo begun; sleep 600", grace_period=timedelta(seconds=1))
    wait_for_line(job, "begun")
    (name,) = names_of(job)
    signal_all([pid for pid in processes_with(name) if b"conmon" in Path(f"/proc/{pid}/cmdline").read_bytes()[:40]])

    assert job.cancel() == []
    assert names_of(job) == []
    assert processes_with(f"{job.files.root}/{job_folder(job.id)}") == []


def test_engine_client_that_is_killed_leaves_no_container(bench: Bench) -> None:
    job = bench.start("sh", "-c", "echo begun; sleep 600")
    wait_for_line(job, "begun")
    (name,) = names_of(job)
    signal_all(
        [pid for pid in processes_with(name) if Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[1] == b"run"]
    )

    assert bench.end(job).state is JobState.FAILED
    assert names_of(job) == []


def test_daemon_that_a_command_leaves_ends_with_its_container(bench: Bench) -> None:
    program = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    os.closerange(0, 3)\n    time.sleep(600)"
    job = bench.start("python3", "-c", program)

    assert bench.end(job).state is JobState.SUCCEEDED
    assert names_of(job) == []
    assert processes_with(f"{job.files.root}/{job_folder(job.id)}") == []


def test_setup_lines_run_inside_and_those_of_the_target_outside(tmp_path: Path) -> None:
    inside = "[ -e /run/.containerenv ] && echo inside || echo outside"
    case = LauncherCase(
        kind="local",
        settings={"setup": [inside]},
        defaults={"image": IMAGE},
        records=str(tmp_path / "records"),
        patience_s=PATIENCE_S,
    )
    bench = Bench(case, tmp_path / "bench")
    job = bench.start("sh", "-c", 'echo "$WORD"', environment=JobEnvironment(setup=(inside, "export WORD=set")))

    assert bench.end(job).state is JobState.SUCCEEDED
    assert read_log(job) == "outside\ninside\nset\n"
    bench.close()


@pytest.fixture
def odd_images() -> Iterator[dict[str, str]]:
    names = {name: f"localhost/runtime-test-{name}:{os.getpid()}" for name in ("user", "bare")}
    build_from(f'FROM {IMAGE}\nUSER 1234\nENTRYPOINT ["false"]\nWORKDIR /opt\n', {}, tag=names["user"])
    build_from("FROM scratch\nCOPY file /file\n", {"file": "x"}, tag=names["bare"])
    yield names
    remove_images(*names.values())


def test_user_and_entrypoint_of_an_image_give_way_and_an_image_without_a_shell_fails(
    bench: Bench, odd_images: dict[str, str]
) -> None:
    written = bench.start("sh", "-c", 'id -u; touch "$RUNTIME_OUTPUT_DIR/x" "$HOME/y"', image=odd_images["user"])
    bare = bench.start("true", image=odd_images["bare"], retry=Retry(failure=3))

    assert bench.end(written).state is JobState.SUCCEEDED
    assert read_log(written) == "0\n"
    status = bench.end(bare)
    assert status.reason is EndReason.IMAGE_FAILED
    assert names_of(bare) == []


def test_job_runs_in_a_container_of_a_machine_behind_ssh(tmp_path: Path, ssh_server: SshServer) -> None:
    assert TOOLS_FOLDER is not None
    lines = [f"export {name}='{value}'" for name, value in tool_environment(TOOLS_FOLDER).items()]
    real = subprocess.run(["sh", "-c", "command -v podman"], capture_output=True, text=True, check=True).stdout.strip()
    wrapper = ssh_server.commands / "podman"
    wrapper.write_text("\n".join(["#!/bin/sh", *lines, f'exec {real} "$@"\n']))
    wrapper.chmod(0o755)
    case = LauncherCase(
        kind="ssh",
        settings={"host": ssh_server.host, "options": ssh_server.options},
        defaults={"image": IMAGE},
        records=str(tmp_path / "records"),
        patience_s=PATIENCE_S,
    )
    bench = Bench(case, tmp_path / "bench")
    job = bench.start("sh", "-c", "[ -e /run/.containerenv ] && sh main.sh; sleep 600")
    wait_for_line(job, "from the tree")

    assert job.cancel() == []
    assert names_of(job) == []
    bench.close()
