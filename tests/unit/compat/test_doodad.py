"""doodad's `run_experiment` with the modes of this project: the README's sample, its configuration, and its rules."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle  # type: ignore[import-untyped]
import pytest

from runtime.compat.doodad import GitInfo, run_experiment
from runtime.errors import InvalidValue, NotPossible, RequestRefused, UnknownName
from tests.services_support import PATIENCE_S
from tests.shim_support import processes_with, signal_all

SAMPLE = """\
from runtime.compat.doodad import run_experiment


def function(doodad_config, variant):
    print("The learning rate is", variant['learning_rate'])
    print("You are ", variant['parameter'])
    print("Save to ", doodad_config.base_log_dir)
    # save outputs (e.g. logs, parameter snapshots, etc.) to
    # doodad_config.base_log_dir

if __name__ == "__main__":
    variant = dict(
        learning_rate=1e-4,
        parameter='awesome',
    )
    run_experiment(
        function,
        exp_name='ec2-test-doodad-easy-launch',
        mode='ec2',
        variant=variant,
        use_gpue=False, # or True
    )
"""
"""The sample of doodad's README after a change of one import."""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "project"
    folder.mkdir()
    # Equal trees make equal jobs.
    (folder / "salt").write_bytes(os.urandom(12))
    (folder / "runtime.toml").write_text('[targets.ec2]\nkind = "local"\n')
    monkeypatch.chdir(folder)
    yield folder
    signal_all(processes_with(str(tmp_path)))


F = TypeVar("F", bound=Callable[..., Any])


def of_script(function: F) -> F:
    """Make it a function of the script that runs, whose project is the working directory."""
    function.__module__ = "__main__"
    return function


@pytest.fixture
def function() -> Callable[[Any, Any], Any]:
    """A function that no module has, as one of a script."""

    @of_script
    def fit(config: Any, variant: Any) -> Any:
        from pathlib import Path

        (Path(config.base_log_dir) / "seen").write_text("x")
        shown = config._asdict()
        return shown, variant

    return fit


def git(folder: Path, *words: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "init.defaultBranch=main"]
    subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)


# the sample


def test_sample_of_the_readme_runs_with_one_import_changed(project: Path) -> None:
    (project / "launch.py").write_text(SAMPLE.replace("    run_experiment(", "    call = run_experiment(") + AFTER)

    done = subprocess.run(
        [sys.executable, "launch.py"], cwd=project, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )

    assert done.returncode == 0, done.stderr
    first, second, third = done.stdout.splitlines()
    assert (first, second) == ("The learning rate is 0.0001", "You are  awesome")
    assert re.fullmatch("Save to  /.*/output/a0001", third)


AFTER = "    call.result()\n    print(call.logs(), end='')\n"


def test_machine_needs_cloudpickle_and_nothing_else(project: Path, function: Any) -> None:
    """The run's Python has no `runtime`, as on a cluster."""
    venv.create(project.parent / "bare", with_pip=False)
    packages = next((project.parent / "bare/lib").iterdir()) / "site-packages"
    shutil.copytree(Path(cloudpickle.__file__).parent, packages / "cloudpickle")
    (project / "runtime.toml").write_text('[targets.bare]\nkind = "local"\n')

    @of_script
    def fit(config: Any, variant: Any) -> Any:
        import importlib.util

        return config.git_infos, config.exp_name, variant["lr"], importlib.util.find_spec("runtime")

    git(project, "init")
    git(project, "add", ".")
    git(project, "commit", "-m", "first")

    call = run_experiment(
        fit,
        "bare",
        exp_name="sac",
        variant={"lr": 1},
        prepend_date_to_exp_name=False,
        environment={"name": str(project.parent / "bare")},
    )

    infos, *others = call.result(timeout=PATIENCE_S)
    assert others == ["sac", 1, None]
    assert [tuple(each)[:3] for each in infos] == [(str(project), "", "")]


def test_function_of_a_module_is_called_with_the_code_of_the_snapshot(project: Path) -> None:
    (project / "train.py").write_text("def fit(config, variant):\n    return __file__, variant\n")
    (project / "launch.py").write_text(
        "from runtime.compat.doodad import run_experiment\nfrom train import fit\n"
        "print(*run_experiment(fit, variant={'lr': 1}).result())\n"
    )

    done = subprocess.run(
        [sys.executable, "launch.py"], cwd=project, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )

    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"/.*/tree/train\.py {'lr': 1}\n", done.stdout)


# modes


def test_here_no_doodad_returns_the_value_and_makes_the_folder(project: Path) -> None:
    variant = {"layers": [1]}

    @of_script
    def change(config: Any, variant: Any) -> Any:
        variant["layers"].append(2)
        return Path(config.base_log_dir).is_dir(), variant

    assert run_experiment(change, "here_no_doodad", variant=variant) == (True, {"layers": [1, 2]})
    assert variant == {"layers": [1]}


def test_local_prints_what_the_run_prints_and_raises_what_it_raises(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    @of_script
    def fail(config: Any, variant: Any) -> None:
        print("before")
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        run_experiment(fail)

    assert capsys.readouterr().out.startswith("before\nTraceback")


def test_local_with_skip_wait_returns_at_once(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "go").unlink(missing_ok=True)
    go = str(project / "go")

    @of_script
    def wait(config: Any, variant: Any) -> int:
        import os
        import time

        while not os.path.exists(go):  # noqa: PTH110
            time.sleep(0.01)
        return 7

    call = run_experiment(wait, skip_wait=True)

    assert not call.done()
    Path(go).touch()
    assert call.result(timeout=PATIENCE_S) == 7
    assert capsys.readouterr().out == ""


def test_ctrl_c_cancels_a_local_run(project: Path) -> None:
    (project / "hang.py").write_text(HANG)
    script = subprocess.Popen(
        [sys.executable, "hang.py"], cwd=project, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert script.stdout
    assert script.stdout.readline() == "hangs\n"

    script.send_signal(signal.SIGINT)
    _, said = script.communicate(timeout=PATIENCE_S)

    assert said.splitlines()[-1].startswith("KeyboardInterrupt")
    words = [sys.executable, "-m", "runtime", "status", "hang", "-o", "json"]
    done = subprocess.run(words, check=True, capture_output=True, timeout=PATIENCE_S)
    assert json.loads(done.stdout)["state"] == "cancelled"


HANG = """\
import time
from runtime.compat.doodad import run_experiment

def hang(config, variant):
    print("hangs", flush=True)
    time.sleep(600)

run_experiment(hang, exp_name="hang", prepend_date_to_exp_name=False)
"""


def test_same_call_again_is_another_run(project: Path, function: Any) -> None:
    calls = [run_experiment(function, variant={"lr": 1}, skip_wait=True) for _ in range(2)]

    first, second = (call.result(timeout=PATIENCE_S)[0] for call in calls)
    assert first["base_log_dir"] != second["base_log_dir"]


def test_experiments_of_one_name_in_a_queue_are_tasks_of_their_own(project: Path, function: Any) -> None:
    calls = [run_experiment(function, "queue:", "sweep", {"lr": lr}) for lr in (1, 2)]
    words = [sys.executable, "-m", "runtime", "worker", "--idle-timeout", "1s", "--slots", "2"]
    subprocess.run(words, check=True, capture_output=True, timeout=PATIENCE_S)

    assert [call.result(timeout=PATIENCE_S)[1] for call in calls] == [{"lr": 1}, {"lr": 2}]


def test_config_has_the_fields_of_doodad(project: Path, function: Any) -> None:
    here, _ = run_experiment(function, "here_no_doodad", "a b", use_gpu=True, gpu_id=3)
    there, _ = run_experiment(function, "local", "a b", gpu_id=3, skip_wait=True).result(timeout=PATIENCE_S)

    for shown, gpu in ((here, True), (there, False)):
        assert list(shown) == [
            "exp_name",
            "base_log_dir",
            "use_gpu",
            "gpu_id",
            "git_infos",
            "script_name",
            "extra_launch_info",
        ]
        assert Path(shown["base_log_dir"], "seen").exists()
        assert (shown["exp_name"], shown["use_gpu"], shown["gpu_id"]) == (time.strftime("%y-%m-%d-") + "a b", gpu, 3)
        assert shown["script_name"] == " ".join(sys.argv)
        assert shown["extra_launch_info"]["base_exp_name"] == "a b"
    assert there["extra_launch_info"]["RUNTIME_JOB_ID"].startswith("j-")


@pytest.mark.parametrize("mode", ["here_no_doodad", "local"])
def test_base_log_dir_is_the_folder(project: Path, function: Any, mode: str) -> None:
    made = run_experiment(function, mode, base_log_dir="logs", skip_wait=True)
    shown, _ = made if mode == "here_no_doodad" else made.result(timeout=PATIENCE_S)

    assert shown["base_log_dir"] == str(project / "logs")
    assert (project / "logs/seen").exists()


def test_git_infos_have_every_repository_of_the_project(
    project: Path, function: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        (project / name).mkdir()
        (project / name / "a.py").write_text("1\n")
        git(project / name, "init")
        git(project / name, "add", ".")
        git(project / name, "commit", "-m", "first")
        monkeypatch.syspath_prepend(str(project / name))
    (project / "one/a.py").write_text("2\n")
    git(project / "one", "add", ".")
    (project / "one/a.py").write_text("3\n")

    shown, _ = run_experiment(function, "here_no_doodad")

    one, two = (GitInfo(*each) for each in shown["git_infos"])
    assert [Path(each.directory).name for each in (one, two)] == ["one", "two"]
    assert (len(one.commit_hash), one.branch_name) == (40, "main")
    assert (one.code_diff.splitlines()[-2:], one.code_diff_staged.splitlines()[-2:]) == (["-2", "+3"], ["-1", "+2"])
    assert (two.code_diff, two.code_diff_staged) == ("", "")


def test_time_and_image_and_gpu_become_fields_of_the_job(project: Path, function: Any) -> None:
    call = run_experiment(function, "ec2", time_in_mins=30, resources={"cpus": 1}, retry={"failure": 1})

    spec = call.job.files.read(f"jobs/{call.job.id}/spec.json").decode()
    assert ('"time_limit":1800' in spec.replace(" ", ""), '"failure":1' in spec.replace(" ", "")) == (True, True)


def test_secret_among_the_arguments_of_the_script_goes_nowhere(
    project: Path, function: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["launch.py", "--token=canary"])

    shown, _ = run_experiment(function, "here_no_doodad")

    assert shown["script_name"] == "launch.py"


# refusals


@pytest.mark.parametrize("mode", ["ec2", "gcp", "htp", "local_docker", "slurm_singularity", "ssh", "sss"])
def test_mode_of_doodad_that_the_project_does_not_define_says_what_replaces_it(
    project: Path, function: Any, mode: str
) -> None:
    (project / "runtime.toml").write_text("")

    with pytest.raises(NotPossible) as refused:
        run_experiment(function, mode)

    assert refused.value.message == f"`{mode}` is no target of this project"
    assert f"[targets.{mode}]" in (refused.value.hint or "")


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ({"mode": "sss", "slurm_config_name": "custom"}, "custom"),
        ({"mode": "sss", "slurm_config_name": "gpu", "use_gpu": True}, "sss"),
        ({"mode": "hpc", "slurm_config_name": "custom"}, "custom"),
        ({"mode": "lab", "slurm_config_name": "custom"}, "lab"),
        ({"mode": "ssh", "ssh_host": "box"}, "box"),
        ({"mode": "local", "slurm_config_name": "custom"}, "local"),
    ],
)
def test_names_of_slurm_settings_and_hosts_are_targets(project: Path, words: dict[str, Any], found: str) -> None:
    from runtime.compat.doodad import _choose_target

    kinds = {"sss": "slurm", "hpc": "slurm", "custom": "slurm", "lab": "kubernetes", "box": "ssh"}
    (project / "runtime.toml").write_text(
        "".join(f'[targets.{name}]\nkind = "{kind}"\n' for name, kind in kinds.items())
    )

    mode = words.pop("mode")
    options = {"use_gpu": False, "slurm_config_name": None, "ssh_host": None, **words}
    assert _choose_target(mode, **options) == found


def test_slurm_settings_that_do_not_agree_with_use_gpu_are_refused(project: Path, function: Any) -> None:
    (project / "runtime.toml").write_text('[targets.sss]\nkind = "slurm"\n')

    with pytest.raises(NotPossible, match="do not agree"):
        run_experiment(function, "sss", slurm_config_name="gpu")


@pytest.mark.parametrize(
    ("variant", "key"),
    [({"a": {"b.c": 1}}, "b.c"), ({"a": [{"b.c": 1}]}, "b.c"), ({"doodad_config": 1}, "doodad_config")],
)
def test_keys_that_doodad_refuses_are_refused(project: Path, function: Any, variant: Any, key: str) -> None:
    with pytest.raises(InvalidValue) as refused:
        run_experiment(function, "here_no_doodad", variant=variant)

    assert refused.value.value == key


@pytest.mark.parametrize(
    ("words", "kind", "said"),
    [
        ({"use_gpus": True}, UnknownName, "did you mean `use_gpu`?"),
        ({"mode": "loca"}, UnknownName, "did you mean `local`?"),
        ({"mode": "ec2", "num_exps_per_instance": 2}, NotPossible, "call it 2 times"),
        ({"local_input_dir_to_mount_point_dict": {"a": "b"}}, NotPossible, "`mounts`"),
    ],
)
def test_wrong_call_is_refused_with_the_next_step(
    project: Path, function: Any, words: dict[str, Any], kind: type[RequestRefused], said: str
) -> None:
    with pytest.raises(kind) as refused:
        run_experiment(function, **words)

    assert said in (refused.value.hint or "")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"method_call": None}, "`None` is no valid function"),
        ({"mode": None}, "`None` is no valid mode"),
        ({"mode": ""}, "`` is no valid mode"),
        ({"variant": [1]}, "`[1]` is no valid variant"),
        ({"time_in_mins": "x"}, "`'x'` is no valid time_in_mins"),
        ({"time_in_mins": -1}, "`-1` is no valid time_in_mins"),
    ],
)
def test_value_of_another_kind_is_refused_by_its_name(
    project: Path, function: Any, words: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidValue) as refused:
        run_experiment(**{"method_call": function, **words})

    assert refused.value.message == said


def test_generator_function_is_refused_before_it_goes_anywhere(project: Path) -> None:
    @of_script
    def steps(config: Any, variant: Any) -> Iterator[int]:
        yield 1

    with pytest.raises(RequestRefused, match="it is a generator function"):
        run_experiment(steps)


def test_use_gpu_asks_for_one_gpu_or_as_many_as_the_resources_say(
    project: Path, function: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "runtime.toml").write_text('[targets.box]\nkind = "local"\ngpus = 2\n')

    for resources, gpus in (({}, 1), ({"gpus": 2}, 2)):
        call = run_experiment(function, "box", use_gpu=True, resources=resources)
        spec = json.loads(call.job.files.read(f"jobs/{call.job.id}/spec.json"))
        assert find(spec, "gpus") == {"count": gpus}
        call.cancel()


def find(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        if name in value:
            return value[name]
        return next((found for each in value.values() if (found := find(each, name)) is not None), None)
    return None


def test_interval_of_the_outputs_is_that_of_the_job(project: Path, function: Any) -> None:
    call = run_experiment(function, "local", sync_interval=180, skip_wait=True)

    assert json.loads(call.job.files.read(f"jobs/{call.job.id}/spec.json"))["outputs"] == {"every": 180.0}
    with pytest.raises(InvalidValue, match="sync_interval"):
        run_experiment(function, "local", sync_interval=-1)


def test_settings_of_cloud_machines_are_left_out_with_a_warning(project: Path, function: Any) -> None:
    with pytest.warns(UserWarning, match=r"`spot_price` is left out on target `ec2`"):
        call = run_experiment(function, "ec2", spot_price=0.03, region=None)

    assert call.result(timeout=PATIENCE_S)[1] == {}
