"""Plans and states of jobs that are processes: what is started, and the states that one process listing shows."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from runtime.config import Project, Settings
from runtime.end_reasons import EndReason
from runtime.errors import InvalidValue, NotPossible
from runtime.jobs.hosts.base import CommandResult, FileToWrite, HostUnavailable
from runtime.jobs.hosts.local import LocalFiles
from runtime.jobs.plan import Fidelity, JobIdentity, LaunchPlan, PlanContext, Target
from runtime.jobs.spec import (
    Array,
    Checkpoint,
    Code,
    CodeMode,
    EnvironmentManager,
    Gpus,
    JobEnvironment,
    JobResources,
    JobSpec,
    JobState,
    OnTaskFailure,
    Range,
    Retry,
    SecretRef,
)
from runtime.launchers.local.launcher import LocalLauncher
from runtime.launchers.processes import discovery
from runtime.launchers.processes.base import end_processes, spawn_shim
from runtime.launchers.ssh.launcher import SshLauncher
from runtime.tasks.container import Mount, MountMode

JOB = JobIdentity(id="j-0123456789abcdef01234567", name="train", owner="kim", snapshot="sha256:" + "ab" * 32)
BOX = Target(
    name="box",
    kind="ssh",
    settings={"host": "gpu1", "setup": ["module load cuda"], "gpus": 2, "scratch": "/local"},
)


class ScriptedHost:
    """A machine whose process list is a given text."""

    name = "gpu1"

    def __init__(self, root: Path, listing: str) -> None:
        self.files = LocalFiles(str(root))
        self.listing = listing
        self.started: list[list[str]] = []

    def run(
        self, words: Sequence[str], *, stdin: bytes = b"", timeout_s: float = 60, env: Mapping[str, Any] | None = None
    ) -> CommandResult:
        return CommandResult(0, self.listing, "")

    def spawn(self, words: Sequence[str], *, folder: str, log: str, env: Mapping[str, str] | None = None) -> int:
        self.started.append(list(words))
        return 1

    def close(self) -> None:
        pass


def make_context(tmp_path: Path, **environ: str) -> PlanContext:
    settings = Settings(project=Project(root=tmp_path), data_dir=tmp_path, cache_dir=tmp_path, config_dir=tmp_path)
    now = datetime(2026, 1, 2, tzinfo=UTC)
    return PlanContext(settings=settings, now=now, base=tmp_path, environ=environ, records="/records")


def render(plan: LaunchPlan) -> str:
    order = json.dumps(plan.order, indent=1, sort_keys=True)
    kept = "\n".join(f"{name}: {support.fidelity} by {support.how}" for name, support in plan.fidelity.items())
    return f"# command\n{plan.artefacts['command']}\n# order\n{order}\n\n# fidelity\n{kept}\n"


def test_plan_of_everything_that_processes_keep(tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    spec = JobSpec(
        command=("python", "train.py", "--lr", "{lr}"),
        environment=JobEnvironment(manager=EnvironmentManager.UV, extras=("gpu",), setup=("ulimit -n 4096",)),
        env={"WANDB_MODE": "offline", "LAB": None},
        secrets=(SecretRef(name="HF_TOKEN", source="env://HF_TOKEN"),),
        resources=JobResources(gpus=Gpus(count=0.5)),
        tasks_per_node=2,
        array=Array(params={"lr": (0.1, 0.2), "seed": (7,)}, offset=3, on_task_failure=OnTaskFailure.STOP),
        time_limit=timedelta(hours=2),
        idle_timeout=timedelta(minutes=30),
        retry=Retry(failure=1),
        checkpoint=Checkpoint(),
    )

    plan = SshLauncher().plan(spec, BOX, JOB, make_context(tmp_path, LAB="north"))

    golden("launchers/ssh/array.txt", render(plan))


def test_plan_of_a_command_and_nothing_else(tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    target = Target(name="local", kind="local", settings={"python": "/usr/bin/python3"}, records="/records")

    plan = LocalLauncher().plan(JobSpec(command=("echo", "a b")), target, JOB, make_context(tmp_path))

    golden("launchers/local/command.txt", render(plan))


@pytest.mark.parametrize(
    ("memory", "limits"),
    [
        ("64MiB", {"cpus": 2.0, "memory_bytes": 64 << 20}),
        ("32MiB..64MiB", {"cpus": 2.0, "memory_bytes": 64 << 20}),
        ("32MiB..", {"cpus": 2.0}),
    ],
)
def test_plan_of_a_job_with_cpus_and_memory_has_them_as_limits(
    tmp_path: Path, memory: str, limits: dict[str, float]
) -> None:
    spec = JobSpec(command=("true",), resources=JobResources(cpus=2.0, memory=Range.read(memory)))

    plan = SshLauncher().plan(spec, BOX, JOB, make_context(tmp_path))

    assert plan.order["limits"] == limits
    assert {name: support.fidelity for name, support in plan.fidelity.items() if name.startswith("resources.")} == {
        "resources.cpus": Fidelity.SHIM,
        "resources.memory": Fidelity.SHIM,
    }


def test_plan_of_more_ranks_than_one_machine_starts_is_refused(tmp_path: Path) -> None:
    def plan(nodes: int) -> LaunchPlan:
        spec = JobSpec(command=("true",), nodes=nodes, tasks_per_node=16)
        return SshLauncher().plan(spec, BOX, JOB, make_context(tmp_path))

    with pytest.raises(NotPossible) as refused:
        plan(17)

    assert refused.value.message.startswith("target `box` is one machine, and 272 ranks are more than the 256 ")
    assert plan(16).order["nodes"] == 16


def test_plan_of_an_environment_without_a_tree_is_refused(tmp_path: Path) -> None:
    spec = JobSpec(
        command=("true",),
        code=Code(mode=CodeMode.IMAGE),
        environment=JobEnvironment(manager=EnvironmentManager.UV),
    )

    with pytest.raises(NotPossible, match="brings no tree to find it in"):
        SshLauncher().plan(spec, BOX, JOB, make_context(tmp_path))


@pytest.mark.parametrize(
    ("name", "manager", "lines"),
    [
        ("/venvs/a b", EnvironmentManager.NONE, [". '/venvs/a b'/bin/activate"]),
        ("lab", EnvironmentManager.CONDA, ['eval "$(conda shell.posix hook)"', "conda activate lab"]),
    ],
)
def test_environment_that_is_there_is_entered_after_the_targets_lines(
    tmp_path: Path, name: str, manager: EnvironmentManager, lines: list[str]
) -> None:
    spec = JobSpec(command=("true",), environment=JobEnvironment(name=name, manager=manager, setup=("last",)))

    plan = SshLauncher().plan(spec, BOX, JOB, make_context(tmp_path))

    assert plan.order["setup"] == ["module load cuda", *lines, "last"]
    assert "environment" not in plan.order


UNSEEN_TEXT = "its process began in another container of `gpu1`, and cannot be seen from here"


def test_states_follow_from_one_listing_and_the_start_of_the_machine(tmp_path: Path) -> None:
    listing = (
        "01234567-89ab-cdef\npid:[4026531836]\n"
        "/usr/bin/python3 /r/jobs/j-1/shim.py /r/jobs/j-1 --native aaaa@01234567.effffffc\ngrep --native\n"
    )

    natives = ["aaaa@01234567.effffffc", "bbbb@01234567.effffffc", "cccc@76543210.effffffc", "dddd@01234567.f0000001"]
    natives += ["eeee@01234567"]  # of an earlier version
    states = SshLauncher().states(BOX, natives, ScriptedHost(tmp_path, listing))

    assert [(each.native_id[:4], each.state, each.reason, each.raw, each.message) for each in states] == [
        ("aaaa", JobState.RUNNING, None, "running", ""),
        ("bbbb", JobState.FAILED, EndReason.LOST, "gone", "its process on `gpu1` is gone"),
        ("cccc", JobState.FAILED, EndReason.NODE_FAILED, "rebooted", "`gpu1` was started anew"),
        ("dddd", JobState.FAILED, EndReason.LOST, "elsewhere", UNSEEN_TEXT),
        ("eeee", JobState.FAILED, EndReason.LOST, "gone", "its process on `gpu1` is gone"),
    ]


def test_processes_that_do_not_end_are_said_with_what_to_do(tmp_path: Path) -> None:
    host = ScriptedHost(tmp_path, "71 1 S python3 shim.py --native aaaa@01234567\n")

    left = end_processes(["aaaa@01234567", "bbbb@01234567"], host, patience_s=0)

    said = "run the same `runtime cancel` again, and if that does not help, `kill -9 71` there"
    assert left == [f"the shim aaaa@01234567 on `gpu1` still runs; {said}"]


class StoppingHost(ScriptedHost):
    """A machine with a shim and its copy, which end when killed, or when woken often enough."""

    def __init__(self, root: Path, *, state: str, wakes: int) -> None:
        line = f"{{}} {{}} {state} python3 shim.py /r/jobs/{JOB.id} --native aaaa@01234567\n"
        super().__init__(root, line.format(71, 1) + line.format(72, 71))
        self.files.write_many([FileToWrite(f"jobs/{JOB.id}/order.json", b'{"grace_s": 0.0}')])
        self.sent: list[list[str]] = []
        self.wakes = wakes

    def run(self, words: Sequence[str], **more: Any) -> CommandResult:
        if words[0] == "sh":
            self.sent.append(list(words[3:]))
            if "KILL" in words or self.sent.count(["CONT", "71", "72"]) == self.wakes:
                self.listing = ""
        return super().run(words)


@pytest.mark.parametrize(
    ("state", "wakes", "slack", "sent"),
    [
        ("T", 1, 600.0, [["CONT", "71", "72"]]),
        ("T+", 2, 600.0, [["CONT", "71", "72"]] * 2),
        # Every woken process is stopped again.
        ("T", -1, 0.0, [["CONT", "71", "72"], ["CONT", "71", "72"], ["KILL", "71", "72"]]),
    ],
)
def test_stopped_shims_are_woken_and_killed_once_their_grace_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, wakes: int, slack: float, sent: list[list[str]]
) -> None:
    monkeypatch.setattr("runtime.launchers.processes.base.WAKE_S", slack)
    host = StoppingHost(tmp_path, state=state, wakes=wakes)

    left = end_processes(["aaaa@01234567"], host)

    assert (left, host.sent) == ([], sent)


def test_cancel_of_one_run_wakes_a_stopped_shim(tmp_path: Path) -> None:
    host = StoppingHost(tmp_path, state="T", wakes=1)

    assert LocalLauncher().cancel(BOX, ["aaaa@01234567"], [3], host) == []

    assert host.sent == [["CONT", "71", "72"]]


def test_shim_that_does_not_start_is_said_with_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.launchers.processes.base.APPEAR_S", 0.2)
    target = replace(BOX, records=str(tmp_path))
    plan = SshLauncher().plan(JobSpec(command=("true",)), target, JOB, make_context(tmp_path))
    host = ScriptedHost(tmp_path, "01234567\n")
    host.files.create(f"jobs/{JOB.id}/shim.log", b"python3: can't open file\n")

    with pytest.raises(NotPossible) as refused:
        spawn_shim(plan, plan.parts[0], host, before=["nice"])

    assert refused.value.message == f"the shim of job `{JOB.id}` did not start on `gpu1`"
    assert refused.value.facts == ("python3: can't open file",)
    folder = f"{tmp_path}/jobs/{JOB.id}"
    assert host.started[0][:4] == ["nice", "python3", f"{folder}/shim.py", folder]


def test_shim_that_is_slow_to_start_may_still_take_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.launchers.processes.base.START_S", 0.1)
    plan = SshLauncher().plan(
        JobSpec(command=("true",)), replace(BOX, records=str(tmp_path)), JOB, make_context(tmp_path)
    )

    # Not `NotPossible`, which would make `--on A,B` try the next target.
    with pytest.raises(HostUnavailable) as silent:
        spawn_shim(plan, plan.parts[0], ScriptedHost(tmp_path, "01234567\n"))

    assert silent.value.hint == "run the same `runtime launch` again: there is one job, whoever comes first"


def test_shim_of_a_twin_that_was_first_is_the_one_that_counts(tmp_path: Path) -> None:
    target = replace(BOX, records=str(tmp_path))
    plan = SshLauncher().plan(JobSpec(command=("true",)), target, JOB, make_context(tmp_path))
    host = ScriptedHost(tmp_path, "01234567\n")
    host.files.create(f"jobs/{JOB.id}/owners/1.0", b"first@01234567")

    assert spawn_shim(plan, plan.parts[0], host) == "first@01234567"


# containers

IMAGE = "ghcr.io/lab/train@sha256:" + "ab" * 32


def contain(tmp_path: Path, target: Target = BOX, **changes: Any) -> LaunchPlan:
    spec = JobSpec(**{"command": ("python", "train.py"), "image": IMAGE, **changes})
    return SshLauncher().plan(spec, target, JOB, make_context(tmp_path))


def test_order_of_a_container_has_the_lines_that_run_inside_apart_from_those_of_the_target(tmp_path: Path) -> None:
    plan = contain(
        tmp_path,
        replace(BOX, settings={**BOX.settings, "container": "docker"}),
        environment=JobEnvironment(name="/opt/env", setup=("ulimit -c 0",)),
        mounts=(Mount(source="/data//x/", target="/data/../in", mode=MountMode.RW),),
    )

    assert plan.order["container"] == {
        "engine": "docker",
        "image": IMAGE,
        "mounts": [{"source": "/data/x", "target": "/in", "mode": "rw"}],
        "setup": [". /opt/env/bin/activate", "ulimit -c 0"],
    }
    assert plan.order["setup"] == ["module load cuda"]
    assert plan.artefacts["container"].startswith("docker run --rm ")


def test_image_with_the_scheme_of_other_targets_is_the_same_image(tmp_path: Path) -> None:
    assert contain(tmp_path, image="docker://debian:12").order["container"] == {"image": "debian:12"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"image": None, "mounts": (Mount(source="/a", target="/b"),)}, "without a container a path is where it is"),
        ({"image": "train.sif"}, "podman and docker run images of a registry"),
        ({"image": "--privileged"}, "no name of an image"),
        ({"image": "a b"}, "no name of an image"),
        ({"mounts": (Mount(source="gs://lab/x", target="/b"),)}, "can mount its own folders and files only"),
        ({"mounts": (Mount(source="claim://x", target="/b"),)}, "can mount its own folders and files only"),
        ({"mounts": (Mount(source="data", target="/b"),)}, "can mount its own folders and files only"),
        ({"mounts": (Mount(source="/a", target="//"),)}, "which every container has of its own"),
        ({"mounts": (Mount(source="/a", target="/proc/"),)}, "which every container has of its own"),
        ({"mounts": (Mount(source="/a", target="/b"), Mount(source="/c", target="/b/"))}, "the target `/b` twice"),
        ({"environment": JobEnvironment(manager=EnvironmentManager.UV)}, "the job runs in an `image`"),
    ],
)
def test_container_that_no_engine_runs_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(NotPossible, match=said):
        contain(tmp_path, **changes)


def test_engine_that_is_none_is_refused_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="container"):
        SshLauncher().check_settings(replace(BOX, settings={**BOX.settings, "container": "lxc"}))


# what is ours, by the process list alone

OTHER = "j-89abcdef0123456789abcdef"


def list_ours(tmp_path: Path, processes: str, marks: str = "", *, user: int = 1000) -> list[tuple[str, str, str]]:
    """Return job, native id and kind of what is ours on a machine with these processes; this shell is 90, below 80."""
    root = LocalFiles(str(tmp_path)).root
    listing = f"90 {user}\n{processes}   80     1 1000 S 00:09 bash\n   90    80 1000 S 00:01 sh\n\n{marks}"
    found = SshLauncher().owned(BOX, ScriptedHost(tmp_path, listing.replace("ROOT", root)), owner="kim")
    return [(each.job, each.native_id, each.what) for each in found]


def shim_line(pid: int, parent: int, job: str, native: str, root: str = "ROOT", uid: int = 1000) -> str:
    return f"{pid} {parent} {uid} Ss 01:00 python3 {root}/jobs/{job}/shim.py {root}/jobs/{job} --native {native} --indices 0-3\n"


def test_shims_of_this_root_and_this_user_are_ours_once_with_their_copies(tmp_path: Path) -> None:
    processes = (
        shim_line(11, 1, JOB.id, "aaaa@0123")
        + shim_line(12, 11, JOB.id, "aaaa@0123")
        + shim_line(13, 1, OTHER, "bbbb@0123", root="/elsewhere")
        + shim_line(14, 1, OTHER, "cccc@0123", root="ROOT/deeper")
        + shim_line(15, 1, OTHER, "dddd@0123", uid=1001)
        + f"16 1 1000 S 01:00 vi ROOT/jobs/{OTHER}/shim.py\n"
        + "17 1 1000 Z 01:00 [python3] <defunct>\n"
    )

    assert list_ours(tmp_path, processes) == [(JOB.id, "aaaa@0123", "shim")]
    assert list_ours(tmp_path, processes, user=1001) == [(OTHER, "dddd@0123", "shim")]


def test_marked_processes_are_ours_unless_a_shim_looks_after_them_or_they_are_looking(tmp_path: Path) -> None:
    processes = (
        shim_line(11, 1, JOB.id, "aaaa@0123")
        + "12 11 1000 S 01:00 python train.py\n13 1 1000 S 01:00 daemon\n14 13 1000 S 01:00 child\n15 1 1000 S 01:00 other\n"
    )
    marks = "".join(
        f"/proc/{pid}/environ:RUNTIME_PREEMPTED_NOTE={root}/jobs/{OTHER}/runs/0/a0001/preempted\n"
        for pid, root in (
            (11, "ROOT"),
            (12, "ROOT"),
            (13, "ROOT"),
            (14, "ROOT"),
            (15, "/x"),
            (80, "ROOT"),
            (90, "ROOT"),
            (99, "ROOT"),
        )
    )

    assert list_ours(tmp_path, processes, marks) == [
        (JOB.id, "aaaa@0123", "shim"),
        (OTHER, "pid 13", "process"),
        (OTHER, "pid 14", "process"),
    ]


def test_containers_are_ours_unless_a_shim_looks_after_them(tmp_path: Path) -> None:
    lines = "".join(
        f"container {engine} rt-{job[2:]}-0-ab12cd34-0 {since}\n"
        for engine, job, since in (
            ("podman", JOB.id, "2026-01-02 03:04:05.678 +0100 CET"),
            ("docker", OTHER, "2026-01-02T03:04:05.678Z"),
            ("docker", "j-x", "2026-01-02T03:04:05.678Z"),
        )
    )
    name = f"rt-{OTHER[2:]}-0-ab12cd34-0"

    assert list_ours(tmp_path, shim_line(11, 1, JOB.id, "aaaa@0123"), lines) == [
        (JOB.id, "aaaa@0123", "shim"),
        (OTHER, name, "container"),
    ]


def test_containers_that_stay_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "GRACE_S", 0.0)
    monkeypatch.setattr(discovery, "KILLED_S", 0.0)
    name = f"rt-{OTHER[2:]}-0-ab-0"
    host = ScriptedHost(tmp_path, f"90 1000\n\n\ncontainer docker {name} 2026-01-02T03:04:05Z\n")

    left = SshLauncher().remove(BOX, SshLauncher().owned(BOX, host), host)

    assert left == [f"container {name} of job `{OTHER}` is still on `gpu1`"]


@pytest.mark.parametrize(
    ("text", "seconds"), [("00:07", 7), ("03:02", 182), ("02:00:01", 7201), ("10-00:00:00", 864_000), ("-", 0)]
)
def test_age_of_a_process_is_read_as_ps_writes_it(text: str, seconds: int) -> None:
    assert discovery.read_age(text) == timedelta(seconds=seconds)


def test_processes_that_nothing_ends_are_killed_after_their_grace_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "GRACE_S", 0.0)
    monkeypatch.setattr(discovery, "KILLED_S", 0.5)
    root, sent = LocalFiles(str(tmp_path)).root, []
    host = ScriptedHost(tmp_path, f"90 1000\n{shim_line(11, 1, JOB.id, 'aaaa@0123', root).replace(' Ss ', ' T ')}\n")
    answer = host.run

    def run(words: Sequence[str], **more: Any) -> CommandResult:
        if "kill" in words[2]:
            sent.append(list(words[3:]))
        return answer(words, **more)

    monkeypatch.setattr(host, "run", run)
    ours = SshLauncher().owned(BOX, host)

    left = SshLauncher().remove(BOX, ours, host)

    assert sent[:3] == [["CONT", "11"], ["TERM", "11"], ["KILL", "11"]]
    assert sent.count(["TERM", "11"]) == 1
    assert len(left) == 1
    assert left[0].startswith(f"process 11 of job `{JOB.id}` still runs on `gpu1`: python3 ")
