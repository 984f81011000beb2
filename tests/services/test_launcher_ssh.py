"""Jobs over a real ssh, beyond the promises of every launcher (tests/conformance/test_launchers.py)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from runtime.client.jobs.handle import JobHandle
from runtime.client.jobs.launch import launch
from runtime.client.jobs.prepare import LaunchOptions
from runtime.client.jobs.retry import retry_job
from runtime.client.jobs.targets import find_target
from runtime.config import Project, Settings
from runtime.end_reasons import EndReason
from runtime.errors import InvalidValue, NotPossible, RequestRefused, UnknownName
from runtime.jobs.spec import (
    Array,
    BuildOn,
    Code,
    CodeMode,
    EnvironmentManager,
    Gpus,
    JobEnvironment,
    JobResources,
    JobSpec,
    JobState,
)
from runtime.launchers.ssh.launcher import read_quota
from tests.shim_support import find_pythons, processes_with, signal_all, wait_for
from tests.ssh_support import SshServer

PYTHONS = find_pythons()
OLDEST = PYTHONS[min(PYTHONS, key=lambda version: int(version[2:]))]


class Far:
    """A project with a target `far`, which is the sshd of the test."""

    def __init__(self, server: SshServer, folder: Path, **target: object) -> None:
        self.server = server
        self.tree = folder / "tree"
        self.tree.mkdir()
        (self.tree / "main.sh").write_text("echo from the tree\n")
        named = {"kind": "ssh", "host": server.host, "options": server.options, "python": OLDEST, **target}
        self.settings = Settings(
            project=Project(root=folder, targets={"far": named}),
            data_dir=folder / "data",
            cache_dir=folder / "cache",
            config_dir=folder / "config",
        )
        self._jobs: list[JobHandle] = []

    def start(self, *command: str, **changes: object) -> JobHandle:
        spec = replace(JobSpec(command=command), **changes)  # type: ignore[arg-type]
        job = launch(spec, "far", settings=self.settings, options=LaunchOptions(base=self.tree))
        self._jobs.append(job)
        return job

    def close(self) -> None:
        for job in self._jobs:
            job.close()


@pytest.fixture
def make_far(ssh_server: SshServer, tmp_path: Path) -> Iterator[type[Far]]:
    made: list[Far] = []

    class Here(Far):
        def __init__(self, **target: object) -> None:
            super().__init__(ssh_server, tmp_path / "project", **target)
            made.append(self)

    (tmp_path / "project").mkdir()
    yield Here
    for each in made:
        each.close()
    signal_all(processes_with(str(tmp_path)))


def read_log(job: JobHandle, index: int = 0) -> str:
    return b"".join(job.logs(index=index)).decode()


# places of jobs


def test_job_lies_below_the_home_where_the_target_names_no_records(make_far: type[Far], ssh_server: SshServer) -> None:
    job = make_far().start("sh", "main.sh")

    assert job.wait(timeout=240).state is JobState.SUCCEEDED
    assert read_log(job) == "from the tree\n"
    folder = ssh_server.home / ".local/share/research-runtime/jobs/jobs" / job.id
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {"artefacts", "native", "owners", "runs"} <= set(job.files.names(f"jobs/{job.id}"))


def test_job_below_the_home_is_retried_there(make_far: type[Far]) -> None:
    far = make_far()
    job = far.start("sh", "-c", "[ $RUNTIME_ATTEMPT = 2 ]")
    assert job.wait(timeout=240).reason is EndReason.APP_FAILED

    again = retry_job(job, far.settings)

    assert (again.job, again.new, again.epoch) == (job.id, False, 2)
    assert job.wait(timeout=240).state is JobState.SUCCEEDED
    assert job.attempts() == [1, 2]


def test_home_with_a_small_quota_is_refused_before_anything_is_written_unless_it_is_named(
    make_far: type[Far], ssh_server: SshServer
) -> None:
    ssh_server.add_command(
        "quota",
        'echo "Disk quotas for user me (uid 1000):"; echo "     Filesystem   space   quota   limit"; '
        'echo "/dev/sda1  1048576 5242880 6291456 0 100 0 0 0"',
    )

    with pytest.raises(NotPossible) as refused:
        make_far().start("true")

    assert refused.value.message == "the home on `box` has a quota of 5GiB, and jobs would be kept there"
    assert list(ssh_server.home.rglob("*")) == []


def test_home_with_a_small_quota_is_taken_where_it_is_named(make_far: type[Far], ssh_server: SshServer) -> None:
    ssh_server.add_command("quota", 'echo "/dev/sda1  1048576 5242880 6291456 0 100 0 0 0"')

    job = make_far(records="~/jobs").start("true")

    assert job.wait(timeout=240).state is JobState.SUCCEEDED


@pytest.mark.parametrize(
    ("said", "limit"),
    [
        ("", None),
        ("Disk quotas for user root (uid 0): none", None),
        ("/dev/sda1  1048576* 0 6291456 0 100 0 0 0", 6291456 * 1024),
        ("/dev/a 1 0 0 0 1 0 0 0\nnas:/home 1 20 30 0 1 0 0 0\n", 20 * 1024),
    ],
)
def test_quota_is_the_smallest_limit_that_is_told(said: str, limit: int | None) -> None:
    assert read_quota(said) == limit


def test_live_tree_of_that_machine_sees_later_edits(make_far: type[Far], ssh_server: SshServer) -> None:
    far = make_far()
    job = far.start(
        "sh", "-c", "while [ ! -e go ]; do sleep 0.05; done; cat go", code=Code(mode=CodeMode.NONE, path=str(far.tree))
    )

    (far.tree / "go.part").write_text("edited later\n")
    (far.tree / "go.part").rename(far.tree / "go")

    assert job.wait(timeout=240).state is JobState.SUCCEEDED
    assert read_log(job) == "edited later\n"


# survival


def test_only_the_shim_and_its_command_stay_and_nothing_after_the_job(
    make_far: type[Far], ssh_server: SshServer, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    # One process, which waits for a writer.
    job = make_far().start("head", "-n", "1", str(gate))
    wait_for(lambda: job.attempts() == [1], "the attempt")
    job.close()
    ssh_server.stop()

    wait_for(lambda: len(processes_with(job.id)) == 2, "the shim and the command, and no more")
    with gate.open("wb") as opened:
        opened.write(b"go on\n")
    ssh_server.start()

    assert job.wait(timeout=240).state is JobState.SUCCEEDED
    wait_for(lambda: processes_with(job.id) == [], "the end of all")


def test_connection_that_is_cut_while_a_job_runs_changes_nothing(make_far: type[Far], ssh_server: SshServer) -> None:
    job = make_far().start("sh", "-c", "sleep 1; echo done")
    ssh_server.drop_connections()

    from runtime.jobs.hosts.base import HostUnavailable

    with pytest.raises(HostUnavailable):
        job.status()

    assert job.wait(timeout=240).state is JobState.SUCCEEDED
    assert read_log(job) == "done\n"


def test_machine_that_ends_what_its_users_leave_is_refused_before_anything_is_written(
    make_far: type[Far], ssh_server: SshServer
) -> None:
    ssh_server.add_command("busctl", "echo b true")
    ssh_server.add_command("loginctl", "echo no")

    with pytest.raises(NotPossible) as refused:
        make_far().start("true")

    assert "KillUserProcesses" in refused.value.message
    assert refused.value.hint == ("allow them to stay, once: ssh box loginctl enable-linger, or ask its administrator")
    assert list(ssh_server.home.rglob("*")) == []


def test_machine_that_ends_what_its_users_leave_keeps_those_who_may_linger(
    make_far: type[Far], ssh_server: SshServer
) -> None:
    ssh_server.add_command("busctl", "echo b true")
    ssh_server.add_command("loginctl", "echo yes")
    ssh_server.add_command(
        "systemd-run", 'echo "$@" > $HOME/scope; while [ "$1" != -- ]; do shift; done; shift; exec "$@"'
    )

    job = make_far().start("true")

    assert job.wait(timeout=240).state is JobState.SUCCEEDED
    assert (ssh_server.home / "scope").read_text().startswith(f"--user --scope --quiet -- {OLDEST} ")


def test_machine_that_was_started_anew_is_said_and_launching_again_goes_on_once(
    make_far: type[Far], ssh_server: SshServer
) -> None:
    far = make_far()
    command = ("sh", "-c", "echo $RUNTIME_ATTEMPT; [ $RUNTIME_ATTEMPT = 2 ] || sleep 600")
    job = far.start(*command)
    wait_for(lambda: read_log(job) == "1\n", "the attempt's first line")
    signal_all(processes_with(job.id))
    ssh_server.add_command("cat", 'case "$1" in */boot_id) echo 01234567-89ab;; *) exec /bin/cat "$@";; esac')

    gone = job.wait(timeout=240)
    again = [far.start(*command) for _ in range(2)]

    assert (gone.state, gone.reason) == (JobState.FAILED, EndReason.NODE_FAILED)
    assert [(each.id, each.new) for each in again] == [(job.id, False)] * 2
    assert job.wait(timeout=240).state is JobState.SUCCEEDED
    assert (read_log(job), job.attempts()) == ("1\n2\n", [1, 2])
    assert [each.native_id.partition("@")[2].partition(".")[0] for each in job.entry().natives][1:] == ["01234567"]


# GPUs and environments


def test_gpus_are_shared_out_among_all_jobs_of_the_machine(make_far: type[Far], tmp_path: Path) -> None:
    far = make_far(gpus=["0", "1"], slots=4)
    (tmp_path / "held").mkdir()
    # mkdir succeeds once: a GPU given to two runs at a time would fail the second.
    script = f"mkdir {tmp_path}/held/$CUDA_VISIBLE_DEVICES || exit 5; sleep 0.3; rmdir {tmp_path}/held/$NVIDIA_VISIBLE_DEVICES"
    resources = JobResources(gpus=Gpus(count=1))

    jobs = [
        far.start("sh", "-c", script, name=name, array=Array(count=4), resources=resources) for name in ("one", "two")
    ]

    assert [dict(job.wait(timeout=240).counts) for job in jobs] == [{JobState.SUCCEEDED: 4}] * 2


def test_gpus_that_the_machine_does_not_have_are_said(make_far: type[Far]) -> None:
    job = make_far(gpus=1).start("true", resources=JobResources(gpus=Gpus(count=2)))

    status = job.wait(timeout=240)

    assert (status.state, status.reason) == (JobState.FAILED, EndReason.SETUP_FAILED)


@pytest.mark.parametrize("where", list(BuildOn))
def test_environment_is_made_of_the_lock_and_entered(
    make_far: type[Far], ssh_server: SshServer, where: BuildOn
) -> None:
    ssh_server.add_command(
        "conda", 'mkdir -p "$5/bin"; printf "#!/bin/sh\\necho tool\\n" > "$5/bin/tool"; chmod 755 "$5/bin/tool"'
    )
    far = make_far()
    (far.tree / "environment.yml").write_text("dependencies: []\n")

    job = far.start("tool", environment=JobEnvironment(manager=EnvironmentManager.CONDA, build_on=where))

    assert job.wait(timeout=240).state is JobState.SUCCEEDED
    assert read_log(job) == "tool\n"


def test_environment_that_cannot_be_made_at_the_launch_stops_it(make_far: type[Far], ssh_server: SshServer) -> None:
    ssh_server.add_command("conda", "echo no such package: numpi >&2; exit 1")
    far = make_far()
    (far.tree / "environment.yml").write_text("dependencies: [numpi]\n")

    with pytest.raises(NotPossible, match="cannot be made on `box`") as refused:
        far.start("tool", environment=JobEnvironment(manager=EnvironmentManager.CONDA, build_on=BuildOn.SUBMIT))

    assert refused.value.facts == ("shim: conda env failed: no such package: numpi",)


# settings


@pytest.mark.parametrize(
    ("settings", "refusal", "says"),
    [
        ({}, InvalidValue, "a host as `ssh` knows it"),
        ({"host": "-oProxyCommand=x"}, InvalidValue, "a host as `ssh` knows it"),
        ({"host": "a b"}, InvalidValue, "a host as `ssh` knows it"),
        ({"host": "a", "hots": "b"}, UnknownName, "did you mean `host`"),
        ({"host": "a", "options": "-p 22"}, InvalidValue, "words for ssh"),
        ({"host": "a", "options": ["-o", "StrictHostKeyChecking=no"]}, NotPossible, "connect once by hand"),
        ({"host": "a", "options": ["-oStrictHostKeyChecking no"]}, NotPossible, "connect once by hand"),
        ({"host": "a", "options": ["-o", "UserKnownHostsFile=/dev/null"]}, NotPossible, "connect once by hand"),
        ({"host": "a", "slots": 0}, InvalidValue, "a whole number from 1 on"),
        ({"host": "a", "gpus": "all"}, InvalidValue, "how many there are"),
        ({"host": "a", "setup": "module load x"}, InvalidValue, "lines of shell"),
        ({"host": "a", "python": 3}, InvalidValue, "text"),
    ],
)
def test_target_with_wrong_settings_is_refused(
    tmp_path: Path, settings: dict[str, object], refusal: type[RequestRefused], says: str
) -> None:
    made = Settings(
        project=Project(root=tmp_path, targets={"far": {"kind": "ssh", **settings}}),
        data_dir=tmp_path,
        cache_dir=tmp_path,
        config_dir=tmp_path,
    )

    with pytest.raises(refusal) as refused:
        find_target("far", made)

    assert says in refused.value.render()


def test_jump_host_is_the_users_own_setting(make_far: type[Far], ssh_server: SshServer) -> None:
    inner = ssh_server.config.read_text()
    ssh_server.write_client_config("ProxyJump door")
    door = inner.replace(f"Host {ssh_server.host}", "Host door")
    # For the jump, the client starts another ssh with the same file, so the file has both hosts.
    ssh_server.config.write_text(ssh_server.config.read_text() + door)

    job = make_far().start("echo", "behind a jump host")

    assert job.wait(timeout=240).state is JobState.SUCCEEDED
    assert ssh_server.connections() >= 2


def test_interpreter_that_is_not_there_stops_the_launch_with_its_name(make_far: type[Far]) -> None:
    from runtime.jobs.hosts.base import HostUnavailable

    with pytest.raises(HostUnavailable) as refused:
        make_far(python="python3.99").start("true")

    assert refused.value.hint == "set `python` of the target: `python3.99` is not there"
