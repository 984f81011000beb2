"""Specs rendered for Slurm: command words, scripts, container lines and bundles, without any Slurm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.client.jobs.targets import make_context
from runtime.config import Project, Settings
from runtime.errors import InvalidValue, NotPossible, UnknownName
from runtime.jobs.plan import JobIdentity, LaunchPlan, Target
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
    Outputs,
    PackPer,
    Placement,
    Priority,
    Range,
    SecretRef,
    When,
)
from runtime.jobs.spec_fields import leaf_fields
from runtime.launchers.slurm import render
from runtime.launchers.slurm.bundle import export_bundle
from runtime.launchers.slurm.field_support import KEEPS
from runtime.launchers.slurm.launcher import SlurmLauncher
from runtime.launchers.slurm.settings import SlurmSettings, read_settings
from runtime.shim.ranks import END_SETUP
from runtime.tasks.container import Mount, MountMode

JOB = "j-0123456789abcdef01234567"
IMAGE = "registry.example.org/lab/train@sha256:" + "0" * 64


def make_plan(spec: JobSpec, tmp_path: Path, **settings: Any) -> LaunchPlan:
    target = Target(name="hpc", kind="slurm", settings=settings, records="/scratch/lab")
    loaded = Settings(project=Project(root=tmp_path), data_dir=tmp_path, cache_dir=tmp_path, config_dir=tmp_path)
    job = JobIdentity(id=JOB, name="train", owner="ada", snapshot=None)
    spec = replace(spec, code=Code(mode=CodeMode.IMAGE))
    return SlurmLauncher().plan(spec, target, job, make_context(loaded, tmp_path))


def shown(plan: LaunchPlan) -> str:
    parts = [f"== {name}\n{text}" for name, text in sorted(plan.artefacts.items())]
    order = {
        name: plan.order[name]
        for name in ("requeue", "pack", "setup", "wrap", "launch_ranks", "time_limit_s", "retries")
        if name in plan.order
    }
    notes = "".join(f"{note}\n" for note in plan.notes)
    return "".join(parts) + "== order\n" + json.dumps(order, indent=1, sort_keys=True) + f"\n== notes\n{notes}"


SHARED = JobResources(cpus=8, memory=Range.read("8GiB"))
PACKED = JobSpec(command=("x",), array=Array(count=8, pack=4), resources=SHARED)
GPU = JobResources(gpus=Gpus(count=4, type="a100"), cpus=32, memory=Range.read("120GiB"), disk=Range.read("100GiB"))


@pytest.mark.parametrize(
    ("name", "spec", "settings"),
    [
        ("plain", JobSpec(command=("python", "train.py")), {}),
        (
            "profiles",
            JobSpec(
                command=("python", "train.py"),
                resources=GPU,
                time_limit=timedelta(hours=12),
                checkpoint=Checkpoint(lead=timedelta(minutes=5)),
                account="vision",
                priority=Priority.HIGH,
                placement=Placement(
                    capacity="spot", exclude=("n7",), selector={"feature": "nvlink|nvswitch"}, nodes=("n1",)
                ),
                environment=JobEnvironment(name="/scratch/lab/venv", setup=("export A=1",)),
            ),
            {
                "partition": "main",
                "constraint": "ib",
                "flags": ["--comment=lab"],
                "setup": ["module load cuda/12"],
                "priorities": {"high": "express"},
                "gpu": {"partition": "a100", "account": "gpus", "max_time": "24h"},
                "capacity": {"spot": {"partition": "a100-preempt", "qos": "scavenge"}},
                "scratch": "$TMPDIR",
            },
        ),
        (
            "cpu-profile",
            JobSpec(command=("true",)),
            {"gpu": {"partition": "a100"}, "cpu": {"partition": "c", "cpus": 2}},
        ),
        (
            "split-array",
            JobSpec(command=("run", "{seed}"), array=Array(seeds=2500, offset=100, max_parallel=100)),
            {"python": "/opt/python3.11"},
        ),
        (
            "packed",
            JobSpec(
                command=("run", "{index}"),
                array=Array(count=200, pack=4, pack_per=PackPer.GPU, max_parallel=32),
                resources=JobResources(gpus=Gpus(count=2), cpus=8, memory=Range.read("32GiB")),
                time_limit=timedelta(minutes=10),
            ),
            {"gpu_option": "gpus-per-node"},
        ),
        (
            "packed-steps",
            replace(PACKED, resources=replace(SHARED, gpus=Gpus(count=4))),
            {"pack_steps": True},
        ),
        (
            "nodes",
            JobSpec(command=("torchrun",), nodes=4, tasks_per_node=8, resources=GPU, time_limit=timedelta(hours=48)),
            {"max_time": "48h"},
        ),
        (
            "container",
            JobSpec(
                command=("python", "train.py"),
                image=IMAGE,
                resources=GPU,
                env={"MODE": "fast run"},
                secrets=(SecretRef(name="HF_TOKEN", source="env://HF_TOKEN"),),
                mounts=(
                    Mount(source="/data/images", target="/images"),
                    Mount(source="/data/out dir", target="/out", mode=MountMode.RW),
                ),
            ),
            {"paths": {"/data": "/lustre/lab/data"}, "setup": ["module load apptainer"], "pre": ["ulimit -c 0"]},
        ),
        (
            "singularity",
            JobSpec(command=("python", "train.py")),
            {"container": "singularity", "cpu": {"image": "/images/cpu.sif"}, "gpu": {"image": "/images/gpu.sif"}},
        ),
        (
            "ht-helper",
            JobSpec(command=("run", "{index}"), array=Array(count=5, offset=3)),
            {"ht_helper": "ht_helper.sh -n 1 -s 1 -v", "setup": ["module load python"]},
        ),
        (
            "ht-helper-packed",
            JobSpec(
                command=("run", "{index}"),
                array=Array(count=9, pack=2, max_parallel=4),
                resources=JobResources(cpus=16),
                time_limit=timedelta(minutes=10),
            ),
            {"ht_helper": "ht_helper.sh", "scratch": "$TMPDIR", "python": "/opt/python3"},
        ),
    ],
)
def test_plan_renders_as_reviewed(
    golden: Callable[[str, str], None], tmp_path: Path, name: str, spec: JobSpec, settings: dict[str, Any]
) -> None:
    golden(f"slurm/{name}.txt", shown(make_plan(spec, tmp_path, **settings)))


def test_every_field_of_a_spec_is_answered_for() -> None:
    assert set(KEEPS) == set(leaf_fields())


def test_plans_of_equal_inputs_are_equal(tmp_path: Path) -> None:
    spec = JobSpec(command=("a",), array=Array(count=3))

    assert make_plan(spec, tmp_path) == make_plan(spec, tmp_path)


@pytest.mark.parametrize(
    ("array", "settings", "nodes"),
    [
        (Array(count=200, pack=4, max_parallel=16), {}, "array.max_parallel"),
        (Array(count=200, pack=4), {"max_submit": 4}, "`max_submit` of the target"),
    ],
)
def test_runs_that_follow_one_another_say_how_long_they_may_take_and_are_refused_where_that_is_too_long(
    tmp_path: Path, array: Array, settings: dict[str, Any], nodes: str
) -> None:
    spec = JobSpec(command=("run", "{index}"), array=array, time_limit=timedelta(minutes=10))
    said = "--time is 2h37m: 13 runs one after another, each of 10m and 2m of grace at worst, and 1m for Slurm's clock"

    known, unknown = make_plan(spec, tmp_path, max_time="3h", **settings), make_plan(spec, tmp_path, **settings)
    with pytest.raises(NotPossible) as refused:
        make_plan(spec, tmp_path, max_time="1h", **settings)

    assert "--time=157" in known.parts[0].native["words"]
    assert known.notes == (said,)
    assert unknown.notes == (f"{said}; a partition whose limit is shorter never starts it",)
    assert refused.value.message == "13 runs one after another may take longer than the partition's longest time, 1h"
    assert refused.value.facts == (said, "4 of them fit")
    assert refused.value.hint == (
        f"more nodes ({nodes}), more runs at a time on each (array.pack), or a shorter time_limit"
    )


def test_start_deadline_becomes_the_time_by_which_a_job_has_ended(tmp_path: Path) -> None:
    spec = JobSpec(command=("a",), start_deadline=timedelta(hours=6), time_limit=timedelta(hours=1))

    words = make_plan(spec, tmp_path).parts[0].native["words"]

    # Six hours to start, one to run, two minutes of grace and one spare.
    assert [word for word in words if word.startswith(("--deadline", "--time"))] == [
        "--time=63",
        "--deadline=now+423minutes",
    ]


@given(
    count=st.integers(1, 5000),
    max_parallel=st.none() | st.integers(1, 500),
    pack=st.none() | st.integers(1, 16),
    max_array_size=st.integers(1, 1001),
    max_submit=st.none() | st.integers(1, 300),
    offset=st.integers(0, 100),
)
def test_split_serves_every_index_once_within_all_limits(
    count: int, max_parallel: int | None, pack: int | None, max_array_size: int, max_submit: int | None, offset: int
) -> None:
    array = Array(count=count, max_parallel=max_parallel, pack=pack, offset=offset)
    settings = SlurmSettings(max_array_size=max_array_size, max_submit=max_submit)

    slices = render.split_array(JobSpec(command=("x",), array=array), count, settings)

    served = [
        index
        for piece in slices
        if piece.layout
        for task in range(-(-piece.layout.count // piece.layout.each))
        for index in piece.layout.indices(task)
    ]
    tasks = [-(-piece.layout.count // piece.layout.each) for piece in slices if piece.layout]
    assert served == list(range(offset, offset + count))
    assert max(tasks) <= max_array_size
    if max_submit:
        assert sum(tasks) <= max_submit
    if max_parallel:
        at_once = sum(min(piece.parallel or size, size) for piece, size in zip(slices, tasks, strict=True))
        assert at_once * (pack or 1) <= max(max_parallel, pack or 1)


@pytest.mark.parametrize(
    ("spec", "settings"),
    [
        (JobSpec(command=("x",), resources=JobResources(gpus=Gpus(count=0.25))), {}),
        (JobSpec(command=("x",), priority=Priority.URGENT), {}),
        (JobSpec(command=("x",), placement=Placement(capacity="spot")), {}),
        (JobSpec(command=("x",), placement=Placement(nodes=("n1", "n2"))), {}),
        (JobSpec(command=("x",), placement=Placement(selector={"zone": "a"})), {}),
        (JobSpec(command=("x",), mounts=(Mount(source="/a", target="/b"),)), {}),
        (JobSpec(command=("x",), image="a.sif", mounts=(Mount(source="gs://a", target="/b"),)), {}),
        (JobSpec(command=("x",), time_limit=timedelta(hours=1), grace_period=timedelta(hours=2)), {"max_time": "1h"}),
        (JobSpec(command=("x",), start_deadline=timedelta(hours=1)), {}),
        (JobSpec(command=("x",), image="a.sif", environment=JobEnvironment(manager=EnvironmentManager.UV)), {}),
        (replace(PACKED, resources=JobResources(cpus=8)), {"pack_steps": True}),
        (replace(PACKED, resources=JobResources(memory=Range.read("8GiB"))), {"pack_steps": True}),
        # Steps cannot share GPUs.
        (replace(PACKED, resources=replace(SHARED, gpus=Gpus(count=3))), {"pack_steps": True}),
        (replace(PACKED, array=Array(count=4, pack=2, pack_per=PackPer.GPU)), {"ht_helper": "ht_helper.sh"}),
        (JobSpec(command=("x",), array=Array(count=4), nodes=2), {"ht_helper": "ht_helper.sh"}),
    ],
)
def test_spec_that_slurm_cannot_keep_is_refused_with_a_next_step(
    tmp_path: Path, spec: JobSpec, settings: dict[str, Any]
) -> None:
    with pytest.raises(NotPossible) as refused:
        make_plan(spec, tmp_path, **settings)

    assert refused.value.hint


@pytest.mark.parametrize("image", [None, "a.sif"])
def test_bucket_as_a_mount_names_the_ways_out_and_no_image_is_one_of_them(tmp_path: Path, image: str | None) -> None:
    spec = JobSpec(command=("x",), image=image, mounts=(Mount(source="gs://lab/data", target="/data"),))

    with pytest.raises(NotPossible) as refused:
        make_plan(spec, tmp_path)
    kept = make_plan(replace(spec, image="a.sif"), tmp_path, paths={"gs://lab": "/mnt/lab"})

    assert refused.value.message == "`mounts` names `gs://lab/data`, and nodes of Slurm can bind paths only"
    assert refused.value.hint == "let the command read it by itself, or copy it to a folder of the nodes and name that"
    assert "--bind /mnt/lab/data:/data:ro" in kept.order["wrap"][2]


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"partitoin": "gpu"}, UnknownName),
        ({"gpu": {"partitoin": "gpu"}}, UnknownName),
        ({"gpu": "a100"}, InvalidValue),
        ({"capacity": {"spot": {"qqos": "low"}}}, UnknownName),
        ({"priorities": {"hihg": "x"}}, UnknownName),
        ({"flags": "--exclusive"}, InvalidValue),
        ({"max_array_size": 0}, InvalidValue),
        ({"max_time": "long"}, InvalidValue),
        ({"gpu_option": "gpus"}, InvalidValue),
        ({"host": "-oProxyCommand=x"}, InvalidValue),
        ({"host": "login", "options": ["-o", "StrictHostKeyChecking=no"]}, NotPossible),
        ({"partition": ""}, InvalidValue),
        ({"cpus": True}, InvalidValue),
        ({"pack_steps": "yes"}, InvalidValue),
        ({"container_flags": "--fakeroot"}, InvalidValue),
    ],
)
def test_settings_that_cannot_be_used_are_refused(settings: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        read_settings(Target(name="hpc", kind="slurm", settings=settings))


def test_target_over_ssh_needs_a_record_root(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue):
        SlurmLauncher().check_settings(Target(name="hpc", kind="slurm", settings={"host": "login"}))


def test_record_root_is_the_clusters_scratch_and_never_a_home_by_itself(tmp_path: Path) -> None:
    from runtime.launchers.slurm.launcher import find_records

    loaded = Settings(project=Project(root=tmp_path), data_dir=tmp_path, cache_dir=tmp_path, config_dir=tmp_path)
    context = make_context(loaded)

    with pytest.raises(NotPossible):
        find_records(Target(name="hpc", kind="slurm"), replace(context, environ={"HOME": "/home/ada"}))
    found = find_records(Target(name="hpc", kind="slurm"), replace(context, environ={"SCRATCH": "/scratch/ada/"}))
    assert found == "/scratch/ada/research-runtime"


@pytest.mark.parametrize("container", ["apptainer", "singularity"])
def test_container_runs_in_the_jobs_folder_with_only_the_jobs_variables(tmp_path: Path, container: str) -> None:
    spec = JobSpec(command=("x",), image="/images/a.sif", env={"MODE": "fast run"}, resources=GPU)
    wrap = make_plan(
        spec, tmp_path, container=container, pre=["echo before"], container_flags=["--writable-tmpfs"]
    ).order["wrap"]
    commands = tmp_path / "bin"
    commands.mkdir()
    prefix = f"{container.upper()}ENV_"
    # A stand-in: it prints its words, and runs the command with only the environment passed on.
    (commands / container).write_text(
        '#!/bin/sh\nwhile [ $# -gt 0 ] && [ "$1" != /images/a.sif ]; do printf \'%s \' "$1"; shift; done; shift; echo\n'
        f'set -- env -i $(env | sed -n \'s/^{prefix}\\([A-Z_]*\\)=\\([^ ]*\\)$/\\1=\\2/p\') PATH="$PATH" "$@"\nexec "$@"\n'
    )
    (commands / container).chmod(0o755)

    done = subprocess.run(
        [*wrap, sys.executable, "-c", "import os; print(sorted(set(os.environ) - {'PWD', 'SHLVL', '_', 'LC_CTYPE'}))"],
        cwd=tmp_path,
        env={
            "PATH": f"{commands}:{os.environ['PATH']}",
            "RUNTIME_RANK": "0",
            "RUNTIME_OUTPUT_DIR": "/out",
            "RUNTIME_CHECKPOINT_DIR": "/checkpoints",
            "RUNTIME_PREEMPTED_NOTE": "/run/a0001/preempted",
            "OTHER": "x",
            "RANK": "0",
        },
        capture_output=True,
        text=True,
        check=True,
    )

    words, before, variables = done.stdout.splitlines()
    assert words.split() == [
        "exec",
        "--nv",
        "--bind",
        str(tmp_path),
        "--bind",
        "/out",
        "--bind",
        "/checkpoints",
        "--bind",
        "/run/a0001",
        "--pwd",
        str(tmp_path),
        "--cleanenv",
        "--writable-tmpfs",
    ]
    assert before == "before"
    assert variables == (
        "['PATH', 'RANK', 'RUNTIME_CHECKPOINT_DIR', 'RUNTIME_OUTPUT_DIR', 'RUNTIME_PREEMPTED_NOTE', 'RUNTIME_RANK']"
    )


def test_lines_of_the_job_run_inside_its_container_and_those_of_the_target_outside(tmp_path: Path) -> None:
    spec = JobSpec(command=("x",), environment=JobEnvironment(name="/opt/venv", setup=("export A=1",)))
    settings: dict[str, Any] = {"setup": ["module load apptainer"], "paths": {"/opt": "/lustre/opt"}}

    outside = make_plan(spec, tmp_path, **settings).order
    inside = make_plan(replace(spec, image="/a.sif"), tmp_path, **settings).order

    assert outside["setup"] == ["module load apptainer", ". /lustre/opt/venv/bin/activate", "export A=1"]
    assert inside["setup"] == ["module load apptainer"]
    lines = f"""\n. /opt/venv/bin/activate\nexport A=1\nset +e\n{END_SETUP}\nexec "$@"' pre "$@\""""
    assert inside["wrap"][2].endswith(lines)


def test_folders_of_a_job_are_where_the_target_has_them(tmp_path: Path) -> None:
    spec = JobSpec(command=("x",), outputs=Outputs(dir="/data/out"), checkpoint=Checkpoint(dir="/data/c"))

    order = make_plan(spec, tmp_path, paths={"/data": "/lustre"}).order

    assert (order["output_dir"], order["checkpoint"]["dir"]) == ("/lustre/out", "/lustre/c")


# bundles


FAKE_SBATCH = """#!/bin/sh
echo "$@" >>"$0.calls"
echo "welcome to the cluster"
echo 4711
"""


def make_commands(folder: Path) -> Path:
    """Slurm commands that know no job until sbatch is called."""
    folder.mkdir()
    scripts = {
        "sbatch": FAKE_SBATCH,
        "squeue": f'#!/bin/sh\n[ -e "{folder}/sbatch.calls" ] && echo "4711|${{KNOWN-none}}|None"\n',
        "sacct": "#!/bin/sh\nexit 1\n",
    }
    for name, text in scripts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


def submit(folder: Path, commands: Path) -> subprocess.CompletedProcess[str]:
    env = {"PATH": f"{commands}:{os.environ['PATH']}", "SBATCH_PARTITION": "x"}
    return subprocess.run([str(folder / "submit.sh")], capture_output=True, text=True, env=env, check=False)


def test_bundle_submitted_twice_is_one_job_and_finds_its_folder_wherever_it_lies(tmp_path: Path) -> None:
    plan = make_plan(JobSpec(command=("echo", "it's")), tmp_path, partition="main")
    export_bundle(plan, tmp_path / "first")
    (tmp_path / "first").rename(tmp_path / "it's moved")
    commands = make_commands(tmp_path / "bin")

    first = submit(tmp_path / "it's moved", commands)
    second = submit(tmp_path / "it's moved", commands)

    run = tmp_path / "it's moved" / "records" / plan.folder
    assert (first.stdout, first.returncode, first.stderr) == ("4711\n", 0, "")
    assert (second.stdout, second.returncode, second.stderr) == ("4711\n", 0, "")
    calls = (commands / "sbatch.calls").read_text().splitlines()
    assert len(calls) == 1
    assert calls[0].endswith(f"--partition=main --nodes=1 --ntasks-per-node=1 {run}/artefacts/job.sh {run} 0")
    assert f"--output={run}/slurm/%j.log" in calls[0]


def test_task_file_of_a_bundle_runs_every_index_wherever_it_lies(tmp_path: Path) -> None:
    spec = JobSpec(command=("sh", "-c", "echo $RUNTIME_ARRAY_INDEX"), array=Array(count=3, offset=5))
    helper = tmp_path / "ht_helper.sh"
    helper.write_text(
        '#!/bin/sh\n[ $1 = -v ] && [ $2 = -t ] || exit 9\nwhile read -r line; do sh -c "$line"; done <$3\n'
    )
    helper.chmod(0o755)
    plan = make_plan(spec, tmp_path, ht_helper=f"{helper} -v", python=sys.executable)
    export_bundle(replace(plan, order={**plan.order, "code": {}}), tmp_path / "first")
    (tmp_path / "first").rename(tmp_path / "moved here")
    run = tmp_path / "moved here" / "records" / plan.folder
    (run / "slurm").mkdir()

    subprocess.run(
        ["bash", str(run / "artefacts" / "job.sh"), str(run), "0"],
        env={"PATH": os.environ["PATH"], "SLURM_JOB_ID": "77"},
        check=True,
    )

    assert [(run / f"runs/{index}/a0001/rank0.log").read_text() for index in (5, 6, 7)] == ["5\n", "6\n", "7\n"]
    assert (run / "owners" / "1.0").read_text() == "77"


def test_bundle_makes_the_environment_before_it_submits(tmp_path: Path) -> None:
    plan = make_plan(
        JobSpec(command=("true",)),
        tmp_path,
        setup=["export FROM_SETUP=yes"],
        python=str(tmp_path / "bin" / "prepare-python"),
    )
    plan = replace(plan, order={**plan.order, "environment": {"build_on": "submit"}})
    export_bundle(plan, tmp_path / "bundle")
    commands = make_commands(tmp_path / "bin")
    python = commands / "prepare-python"
    python.write_text('#!/bin/sh\n[ -e "$0.ready" ] || exit 1\necho "$FROM_SETUP $*" >"$0.calls"\n')
    python.chmod(0o755)

    failed = submit(tmp_path / "bundle", commands)
    (commands / "prepare-python.ready").touch()
    done = submit(tmp_path / "bundle", commands)

    run = tmp_path / "bundle" / "records" / plan.folder
    assert (failed.returncode, failed.stdout) == (1, "")
    assert (done.returncode, done.stdout) == (0, "4711\n")
    assert (commands / "prepare-python.calls").read_text() == f"yes {run}/shim.py {run} --prepare\n"


def test_bundle_whose_answer_was_lost_finds_its_job_by_name(tmp_path: Path) -> None:
    plan = make_plan(JobSpec(command=("true",)), tmp_path)
    export_bundle(plan, tmp_path / "bundle")
    commands = make_commands(tmp_path / "bin")
    submit(tmp_path / "bundle", commands)
    (tmp_path / "bundle" / "records" / plan.folder / "submit" / "0.id").unlink()

    again = submit(tmp_path / "bundle", commands)

    assert again.stdout == "4711\n"
    assert len((commands / "sbatch.calls").read_text().splitlines()) == 1


def test_bundle_that_slurm_refuses_says_so_and_may_be_tried_again(tmp_path: Path) -> None:
    plan = make_plan(JobSpec(command=("true",)), tmp_path)
    export_bundle(plan, tmp_path / "bundle")
    commands = make_commands(tmp_path / "bin")
    (commands / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: invalid partition' >&2\nexit 1\n")

    refused = submit(tmp_path / "bundle", commands)
    (commands / "sbatch").write_text(FAKE_SBATCH)
    again = submit(tmp_path / "bundle", commands)

    assert (refused.returncode, refused.stdout, refused.stderr) == (1, "", "sbatch: error: invalid partition\n")
    assert (again.returncode, again.stdout) == (0, "4711\n")


@pytest.mark.parametrize(
    "spec",
    [
        JobSpec(command=("x",), secrets=(SecretRef(name="A", source="env://A"),)),
        JobSpec(command=("x",), after=("j-0",)),
    ],
)
def test_bundle_of_a_job_that_needs_more_than_files_is_refused(tmp_path: Path, spec: JobSpec) -> None:
    with pytest.raises(NotPossible):
        export_bundle(make_plan(spec, tmp_path), tmp_path / "bundle")

    assert not (tmp_path / "bundle").exists()


def test_words_for_the_ends_that_a_job_waits_for() -> None:
    kill = "--kill-on-invalid-dep=yes"

    assert render.dependency_words([]) == []
    assert render.dependency_words([(When.OK, ["1", "2"]), (When.ANY, ["3"]), (When.NOTOK, ["4"])]) == [
        "--dependency=afterok:1:2,afterany:3,afternotok:4",
        kill,
    ]
    assert render.dependency_words([(When.NOTOK, ["1", "2"])]) == ["--dependency=afternotok:1?afternotok:2", kill]
    with pytest.raises(NotPossible, match="several native arrays"):
        render.dependency_words([(When.NOTOK, ["1", "2"]), (When.OK, ["3"])])


def test_parts_of_a_launch_are_read_back_as_they_were_and_cut_to_some_of_their_tasks(tmp_path: Path) -> None:
    launched = make_plan(
        JobSpec(command=("x",), array=Array(count=10, offset=5, max_parallel=4)), tmp_path, max_array_size=4
    )
    names = [part.name for part in launched.parts]

    parts = SlurmLauncher().restore_parts(launched.artefacts, names, [5, 6, 8, 14])

    assert [part.name for part in parts] == [names[0], names[2]]
    for part in parts:
        before = launched.parts[part.native["number"]]
        arrays = [[word for word in each.native["words"] if word.startswith("--array=")] for each in (before, part)]
        assert [word for word in before.native["words"] if word not in arrays[0]] == [
            word for word in part.native["words"] if word not in arrays[1]
        ]
        assert (part.native["script"], part.artefact, part.offset, part.count) == (
            before.native["script"],
            before.artefact,
            before.offset,
            before.count,
        )
    assert [word for part in parts for word in part.native["words"] if word.startswith("--array=")] == [
        "--array=0-1,3%2",
        "--array=1%1",
    ]


def test_single_job_and_one_for_a_sites_own_packer_are_restored_whole(tmp_path: Path) -> None:
    for launched in (
        make_plan(JobSpec(command=("x",)), tmp_path),
        make_plan(JobSpec(command=("x",), array=Array(count=3)), tmp_path, ht_helper="ht_helper.sh"),
    ):
        (part,) = SlurmLauncher().restore_parts(launched.artefacts, [launched.parts[0].name], [0])

        assert replace(part, count=launched.parts[0].count) == launched.parts[0]
