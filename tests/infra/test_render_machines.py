"""What heads and pools set for their machines, run as far as it runs here: scripts under Bash, units in systemd's parser,
options in Docker's, and what a pool takes from its head."""

from __future__ import annotations

import inspect
import shlex
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from infra.render import units
from infra.render.autoscaler import render_autoscaler
from infra.render.startup import head_metadata, node_metadata
from infra.settings.model import ContainerSettings, MachineSettings
from tests.infra.machine_support import Machine, finish
from tests.infra.render_support import IMAGE, V4, V5E, sample_cluster
from tests.infra.test_render_startup import unit_files_of, verify_units

ODD = {
    "PLAIN": "gs://marin-eu/x",
    "SPACES": "two  words ",
    "DOLLAR": "$HOME ${PATH} $(id) `id` $((1))",
    "QUOTES": 'it\'s "so" \\\' \\" \\',
    "SIGNS": "; & | > < * ? ~ # ! % %h {a,b} [x] = é 日本",
    "EMPTY": "",
    "DASH": "--privileged",
    "options": "a name that a script may use itself",
}
CONTAINER = ContainerSettings(
    shm_size="16g",
    mounts=("/mnt/data:/data:ro", "/tmp:/tmp"),
    options=(
        *("--ulimit=nproc=4096:8192", "--memory=100g", "--cpuset-cpus=0-3,8", "--cap-add=SYS_PTRACE", "--cpus=1.5"),
        *("--memory-swap=-1", "--memory-reservation=1g", "--oom-score-adj=-500", "--cpu-shares=512"),
    ),
)


def set_up(text: str) -> MachineSettings:
    return MachineSettings(setup=text)


def run_start(script: str, tmp_path: Path, ray: str, **variables: str) -> subprocess.CompletedProcess[str]:
    program = tmp_path / "ray"
    program.write_text(f"#!/bin/bash\n{ray}\n")
    program.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "RAY_HEAD_IP": "10.64.0.2", "RAY_TMPDIR": str(tmp_path)}
    return subprocess.run(
        ["bash", "-c", script, "start-ray", "node"],
        env={**environment, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


# variables


def test_variables_reach_ray_as_they_were_written_whatever_signs_they_hold(tmp_path: Path) -> None:
    script = units.render_start_script(sample_cluster(cloud_logging=False), MachineSettings(variables=ODD))

    done = run_start(script, tmp_path, "\n".join(f'printf "%s\\0" "${name}"' for name in ODD))

    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\0")[:-1] == list(ODD.values())


def test_variables_of_a_pool_add_to_those_of_its_head_and_replace_them() -> None:
    cluster = sample_cluster(machine=MachineSettings(variables={"A": "head", "B": "head"}))

    assert cluster.machine_of(V4).variables == {"A": "head", "B": "head"}
    pool = replace(V4, variables={"B": "pool", "C": "pool"})
    assert cluster.machine_of(pool).variables == {"A": "head", "B": "pool", "C": "pool"}


def test_pool_without_own_settings_has_those_of_its_head_but_not_its_shared_memory() -> None:
    head = MachineSettings(variables={"A": "1"}, setup="echo 1\n", container=CONTAINER)

    taken = sample_cluster(machine=head).machine_of(V4)

    assert taken == replace(head, container=replace(CONTAINER, shm_size=None))


def test_pool_with_own_or_empty_settings_keeps_them() -> None:
    cluster = sample_cluster(machine=MachineSettings(setup="echo 1\n", container=CONTAINER))
    none = ContainerSettings(shm_size="1g", mounts=(), options=())

    taken = cluster.machine_of(replace(V4, setup="", container=none))

    assert taken == MachineSettings(container=none)


def test_changed_variable_is_named_as_needing_a_restart_and_restarts_ray_with_the_boot_script(tmp_path: Path) -> None:
    machine = Machine(tmp_path, metadata_of(MachineSettings()))
    try:
        machine.push_image(IMAGE)
        assert finish(machine.boot())[0] == 0
        machine.forget_notes()
        machine.server.set(metadata_of(MachineSettings(variables={"A": "1"})))
        assert finish(machine.run("watch", "--rounds", "1"))[0] == 0
        assert machine.server.last("restart-needed") == "ray-start"

        assert finish(machine.boot())[0] == 0

        assert "systemctl restart runtime-ray-head.service" in machine.notes
        machine.forget_notes()
        assert finish(machine.boot())[0] == 0
        assert "systemctl start runtime-ray-head.service" in machine.notes
    finally:
        machine.server.stop()


def metadata_of(settings: MachineSettings) -> dict[str, str]:
    cluster = sample_cluster(machine=settings, secrets=())
    return head_metadata(cluster, render_autoscaler(cluster), "0" * 64)


# set-up


def install_setup(tmp_path: Path, setup: str) -> Path:
    """Install the two scripts below `tmp_path`; return the one that the unit runs."""
    for path, text in ((units.SETUP_SCRIPT, units.render_setup(setup)), (units.RUN_SETUP, units.render_run_setup())):
        file = tmp_path / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)
    return tmp_path / units.RUN_SETUP.lstrip("/")


def run_setup(tmp_path: Path, setup: str) -> subprocess.CompletedProcess[str]:
    program = install_setup(tmp_path, setup)
    environment = {"PATH": "/usr/bin:/bin", "RUNTIME_RAY_ROOT": str(tmp_path), "NOTES": str(tmp_path / "notes")}
    return subprocess.run([str(program)], env=environment, capture_output=True, text=True, check=False)


def test_set_up_runs_once_on_a_machine_and_again_after_its_text_changed(tmp_path: Path) -> None:
    for _ in range(3):
        assert run_setup(tmp_path, 'echo "it\'s $((1 + 1))" >>"$NOTES"').returncode == 0
    assert (tmp_path / "notes").read_text() == "it's 2\n"

    assert run_setup(tmp_path, 'echo other >>"$NOTES"').returncode == 0

    assert (tmp_path / "notes").read_text() == "it's 2\nother\n"


def test_set_up_that_fails_stops_the_start_says_so_and_runs_again(tmp_path: Path) -> None:
    failing = 'echo began >>"$NOTES"\necho "no such mirror" >&2\nfalse\necho ended >>"$NOTES"\n'

    for _ in range(2):
        done = run_setup(tmp_path, failing)

    assert done.returncode == 1
    assert done.stderr == (
        "no such mirror\nruntime-ray: the set-up script failed with exit 1; Ray does not start before it succeeds\n"
    )
    assert (tmp_path / "notes").read_text() == "began\nbegan\n"


@pytest.mark.parametrize(
    "failing", ["false | true", 'echo "$UNSET"', "exit 7", "kill -9 $$", "if", "#!/no/such/program\n"]
)
def test_set_up_that_fails_in_any_way_stops_the_start(tmp_path: Path, failing: str) -> None:
    assert run_setup(tmp_path, failing).returncode != 0


def test_set_up_in_another_language_runs_as_it_says(tmp_path: Path) -> None:
    done = run_setup(tmp_path, "#!/usr/bin/env python3\nprint('from', 'python')")

    assert (done.returncode, done.stdout) == (0, "from python\n")


def test_set_up_is_in_the_unit_of_heads_and_nodes_before_ray_and_only_if_there_is_one() -> None:
    cluster = sample_cluster(machine=set_up("echo 1\n"))

    for unit in (units.render_head_service(cluster), units.render_node_service(cluster, cluster.machine)):
        lines = unit.splitlines()
        (place,) = (index for index, line in enumerate(lines) if line.endswith(units.RUN_SETUP))
        assert lines[place].startswith("ExecStartPre=/usr/bin/systemd-cat ")
        assert place < next(index for index, line in enumerate(lines) if line.startswith("ExecStart="))
    plain = sample_cluster()
    assert "setup" not in units.render_head_service(plain) + units.render_node_service(plain, plain.machine)
    assert not any("setup" in key for key in metadata_of(MachineSettings()))


def test_set_up_script_is_what_the_boot_script_installs_and_starts_ray_by(tmp_path: Path) -> None:
    machine = Machine(tmp_path, metadata_of(set_up("echo 1\n")))
    try:
        machine.push_image(IMAGE)
        code, out = finish(machine.boot())
        assert code == 0, out
        assert machine.text("opt/runtime-ray/setup") == "#!/bin/bash\nset -euo pipefail\necho 1\n"
        assert (machine.mode("opt/runtime-ray/setup"), machine.mode("opt/runtime-ray/run-setup")) == ("0o755", "0o755")
        machine.forget_notes()
        machine.server.set(metadata_of(set_up("echo 2\n")))

        assert finish(machine.boot())[0] == 0

        assert "systemctl restart runtime-ray-head.service" in machine.notes
    finally:
        machine.server.stop()


@pytest.mark.parametrize(
    "text", [units.render_run_setup(), units.render_start_script(sample_cluster(), MachineSettings(variables=ODD))]
)
def test_scripts_of_the_settings_are_shell_that_shellcheck_passes(text: str) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed; install it with `apt-get install shellcheck`")
    # Its lesser remarks are about values that look as if somebody had meant them otherwise.
    done = subprocess.run(
        ["shellcheck", "--severity=warning", "-"], input=text, text=True, capture_output=True, check=False
    )

    assert (done.returncode, done.stdout) == (0, "")


# containers and units


def test_container_settings_stand_in_the_units_behind_ours() -> None:
    cluster = sample_cluster(machine=MachineSettings(container=CONTAINER))
    for unit in (units.render_head_service(cluster), units.render_node_service(cluster, cluster.machine)):
        words = command_of(unit)
        assert "--shm-size=16g" in words
        assert [word for word in words if word.startswith("--shm-size")] == ["--shm-size=16g"]
        assert words.index("--ulimit=nproc=4096:8192") > words.index("--ulimit=memlock=-1:-1")
        assert [*words[words.index("--volume=/mnt/data:/data:ro") :]][:2] == [
            "--volume=/mnt/data:/data:ro",
            "--volume=/tmp:/tmp",
        ]
        assert words.index(IMAGE) == words.index("--entrypoint=/bin/bash") + 1


def test_defaults_of_shared_memory_differ_between_heads_and_nodes() -> None:
    cluster = sample_cluster()

    assert "--shm-size=8g" in command_of(units.render_head_service(cluster))
    assert "--shm-size=200g" in command_of(units.render_node_service(cluster, cluster.machine))


def command_of(unit: str) -> list[str]:
    (line,) = (line for line in unit.splitlines() if line.startswith("ExecStart="))
    return shlex.split(line.removeprefix("ExecStart="))


def test_units_with_every_setting_are_ones_that_systemd_understands(tmp_path: Path) -> None:
    every = MachineSettings(variables=ODD, setup="echo $HOME % 'x'\n", container=CONTAINER)
    cluster = sample_cluster(machine=every)
    for name, metadata in (("head", metadata_of(every)), ("node", node_metadata(cluster, every))):
        folder = tmp_path / name
        folder.mkdir()
        files = {unit: text.replace(units.RUN_SETUP, "/bin/true") for unit, text in unit_files_of(metadata).items()}

        assert verify_units(folder, files) == ""


@pytest.mark.parametrize("logging", [True, False])
def test_docker_takes_every_option_of_the_units(logging: bool) -> None:
    """Docker's client judges its options before it looks for the daemon, which it does not find here."""
    if shutil.which("docker") is None:
        pytest.skip("docker is not installed; `test_container_settings_stand_in_the_units_behind_ours` has the text")
    cluster = sample_cluster(machine=MachineSettings(container=CONTAINER), cloud_logging=logging)
    for unit in (units.render_head_service(cluster), units.render_node_service(cluster, cluster.machine)):
        assert ask_docker(command_of(unit)).startswith(
            ("Cannot connect", "failed to connect", "docker: Cannot connect", "docker: failed to connect")
        )
    wrong = [word.replace("--ulimit=nproc=4096:8192", "--ulimit=nproc") for word in command_of(unit)]
    assert "invalid argument" in ask_docker(wrong)


def ask_docker(words: list[str]) -> str:
    environment = {
        "PATH": "/usr/bin:/bin",
        "DOCKER_HOST": "unix:///nonexistent/docker.sock",
        "DOCKER_CONFIG": "/nonexistent",
    }
    done = subprocess.run(
        ["docker", *words[1:]],
        env=environment | {"PATH": "/usr/local/bin:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    return done.stderr


# logs


def test_logs_go_to_cloud_logging_of_the_stacks_project_unless_switched_off() -> None:
    for logging, driver in ((True, "--log-driver=gcplogs"), (False, "--log-driver=json-file")):
        cluster = sample_cluster(cloud_logging=logging)
        reaper, _ = units.render_reaper(cluster)
        keep, _ = units.render_keep(cluster)
        for unit in (
            *(units.render_head_service(cluster), units.render_node_service(cluster, cluster.machine)),
            *(reaper, keep),
        ):
            words = command_of(unit)
            assert [word for word in words if word.startswith("--log-driver")] == [driver]
            assert ("--log-opt=gcp-project=p-1" in words) == logging


def test_head_lets_jobs_wait_for_a_week_and_stopped_ones_have_their_grace() -> None:
    variables = [word for word in command_of(units.render_head_service(sample_cluster())) if "=RAY_JOB_" in word]

    assert variables == ["--env=RAY_JOB_START_TIMEOUT_SECONDS=604800", "--env=RAY_JOB_STOP_WAIT_TIME_S=150"]


def test_variables_of_jobs_on_the_head_are_those_that_ray_reads() -> None:
    """Ray ignores a variable that it does not know, so a renamed one would go unnoticed."""
    manager = pytest.importorskip("ray.dashboard.modules.job.job_manager")
    supervisor = pytest.importorskip("ray.dashboard.modules.job.job_supervisor")

    assert manager.RAY_JOB_START_TIMEOUT_SECONDS_ENV_VAR == "RAY_JOB_START_TIMEOUT_SECONDS"
    assert '"RAY_JOB_STOP_WAIT_TIME_S"' in inspect.getsource(supervisor)


def test_keep_runs_in_the_clusters_image_with_the_heads_contract() -> None:
    keep, timer = units.render_keep(sample_cluster(cloud_logging=False))

    words = command_of(keep)
    assert words[words.index("--entrypoint=runtime") :] == [
        *("--entrypoint=runtime", IMAGE, "keep", "--once"),
        *("--cluster", "main", "--address", "http://127.0.0.1:8265"),
    ]
    assert "--env=RUNTIME_OUTPUTS=/etc/runtime-ray/config/contract.json" in words
    assert "--volume=/etc/runtime-ray/config:/etc/runtime-ray/config:ro" in words
    assert "OnUnitInactiveSec=60s" in timer


def test_buffer_runs_in_rays_own_container_with_the_heads_contract_and_names_no_image() -> None:
    service, timer = units.render_buffer(sample_cluster())

    assert command_of(service) == [
        *("/usr/bin/docker", "exec", "--env=RUNTIME_OUTPUTS=/etc/runtime-ray/config/contract.json", "ray"),
        *("timeout", "120", "runtime", "cluster", "buffer", "--cluster", "main", "--address", "http://127.0.0.1:8265"),
    ]
    assert IMAGE not in service
    assert "OnUnitInactiveSec=30s" in timer


def test_start_script_passes_on_what_rays_processes_log_in_this_session_alone(tmp_path: Path) -> None:
    before = tmp_path / "ray/session_1/logs"
    before.mkdir(parents=True)
    (before / "raylet.out").write_text("of the session before\n")
    (tmp_path / "ray/session_latest").symlink_to("session_1")
    script = units.render_start_script(sample_cluster(), MachineSettings())
    # Ray begins a session, logs, and runs until a reader has the lines of three files.
    ray = """
        mkdir -p "$RAY_TMPDIR/ray/session_2/logs"
        cd "$RAY_TMPDIR/ray"
        ln -s session_2 session_latest
        for name in raylet.out raylet.err monitor.log worker-1.out; do echo "from $name" >"session_2/logs/$name"; done
        read -r _
    """
    (tmp_path / "ray.sh").write_text(ray)
    with start(script, tmp_path) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        lines = {process.stdout.readline() for _ in range(3)}
        process.stdin.write("\n")
        process.stdin.close()
        # Until the process is waited for, `tail` takes it for a running one.
        assert process.wait(60) == 0
        rest = process.stdout.read()

    assert lines == {"from raylet.out\n", "from raylet.err\n", "from monitor.log\n"}
    assert rest == ""


def start(script: str, tmp_path: Path) -> subprocess.Popen[str]:
    program = tmp_path / "bin/ray"
    program.parent.mkdir()
    program.write_text(f'#!/bin/bash\nsource "{tmp_path}/ray.sh"\n')
    program.chmod(0o755)
    return subprocess.Popen(
        ["bash", "-c", script, "start-ray", "node"],
        env={"PATH": f"{program.parent}:/usr/bin:/bin", "RAY_HEAD_IP": "10.64.0.2", "RAY_TMPDIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_start_script_without_cloud_logging_copies_nothing() -> None:
    assert "tail" not in units.render_start_script(sample_cluster(cloud_logging=False), MachineSettings())


# pools in the autoscaler's file


def test_pools_of_equal_settings_share_their_metadata_and_others_have_their_own() -> None:
    pools = {"a": V4, "b": V5E, "c": replace(V4, variables={"X": "it's $c"}, labels={"tier": "cheap"})}
    text = render_autoscaler(sample_cluster(pools=pools))

    types = yaml.safe_load(text)["available_node_types"]

    metadata = {name: types[name]["node_config"]["metadata"] for name in pools}
    assert metadata["a"] == metadata["b"]
    assert {key for key in metadata["a"] if metadata["a"][key] != metadata["c"][key]} == {"ray-start"}
    assert "export X='it'\"'\"'s $c'\n" in metadata["c"]["ray-start"]
    assert text.count("ray-machine: ") == 2
    assert [types[name].get("labels") for name in pools] == [None, None, {"tier": "cheap"}]
