"""The rules about variables, set-up scripts, containers and labels of a cluster's machines."""

from __future__ import annotations

from typing import Any

import pytest

from infra.settings.machine_rules import OPTIONS
from infra.settings.model import ContainerSettings
from infra.settings.read import InvalidSettings, parse_settings
from tests.infra.test_config import changed, find_paths, problems_of

HEAD, POOL = "heads/main", "heads/main/pools/v5e"
TAKEN = (
    *(
        "RAY_ADDRESS",
        "RAY_enable_autoscaler_v2",
        "RUNTIME_STACK",
        "GOOGLE_APPLICATION_CREDENTIALS",
        "GOOGLE_API_KEY_FILE",
    ),
    *(
        "LD_PRELOAD",
        "LD_LIBRARY_PATH",
        "LD_AUDIT",
        "BASH_ENV",
        "ENV",
        "IFS",
        "PATH",
        "HOME",
        "PYTHONPATH",
        "PYTHONSTARTUP",
    ),
    *("DOCKER_HOST", "CLOUDSDK_CONFIG", "GIT_SSH_COMMAND", "HTTPS_PROXY", "https_proxy", "SSL_CERT_FILE", "KUBECONFIG"),
    # A start script that exports one of these ends, or loses its value.
    *("UID", "EUID", "PPID", "BASHPID", "BASH_VERSINFO", "GROUPS", "SECONDS", "RANDOM", "SHLVL", "_"),
)
GITHUB = "ghp_" + "a" * 36


@pytest.mark.parametrize("place", [HEAD, POOL])
@pytest.mark.parametrize("name", TAKEN)
def test_variable_that_programs_obey_is_refused_on_heads_and_pools(place: str, name: str) -> None:
    found = problems_of(changed(f"{place}/variables", {name: "x"}))

    assert [each.path for each in found] == [f"{place.replace('/', '.')}.variables.{name}"]
    assert "sets or obeys" in str(found[0])


@pytest.mark.parametrize("name", TAKEN)
def test_variable_that_programs_obey_carries_no_secret_of_a_stack_either(name: str) -> None:
    assert find_paths(changed("secrets/hf-token/env", name)) == ["secrets.hf-token.env"]


@pytest.mark.parametrize("name", ["1X", "A-B", "A B", "", "A=B", "A\nB", "$(id)", "Ä"])
def test_variable_without_a_name_for_one_is_refused(name: str) -> None:
    assert "is no name of a variable" in str(problems_of(changed(f"{HEAD}/variables", {name: "x"}))[0])


@pytest.mark.parametrize("value", ["two\nlines", "a\0b", "a\rb", "\x1b[2J", "a\u2028b"])
def test_variable_with_a_line_break_or_control_character_is_refused(value: str) -> None:
    assert "line break or a control character" in str(problems_of(changed(f"{HEAD}/variables", {"A": value}))[0])


@pytest.mark.parametrize(
    ("name", "value"), [("WANDB_API_KEY", "0123456789abcdef"), ("DB_PASSWORD", "hunter2"), ("PLAIN", GITHUB)]
)
def test_variable_that_looks_like_a_secret_is_refused_without_its_value(name: str, value: str) -> None:
    (problem,) = problems_of(changed(f"{POOL}/variables", {name: value}))

    assert "looks like the value of a secret" in str(problem)
    assert value not in str(problem)


@pytest.mark.parametrize(
    "variables",
    [
        {"MARIN_PREFIX": "gs://marin-eu/x y", "A": 'it\'s "$HOME" `id` \\ % {} ;', "EMPTY": ""},
        {"TOKENIZERS_PARALLELISM": "false", "MAX_TOKENS": "4096", "XLA_FLAGS": "--xla_x=1", "JAX_PLATFORMS": "tpu"},
        {"HF_TOKEN_FILE": "/data/token"},
    ],
)
def test_plain_variables_are_accepted(variables: dict[str, str]) -> None:
    for place in (HEAD, POOL):
        assert find_paths(changed(f"{place}/variables", variables)) == []


def test_number_as_a_variable_is_asked_for_in_quotes() -> None:
    assert 'put it in quotes: "1"' in str(problems_of(changed(f"{HEAD}/variables", {"A": 1}))[0])


@pytest.mark.parametrize("place", [HEAD, POOL])
def test_variable_of_a_secret_of_the_cluster_is_refused(place: str) -> None:
    values = changed(f"{place}/variables", {"HF_TOKEN": "none"})
    values["heads"]["main"]["environment"] = ["hf-token"]

    (problem,) = problems_of(values)

    assert problem.path == f"{place.replace('/', '.')}.variables.HF_TOKEN"
    assert "is the variable of the secret `hf-token`" in str(problem)


@pytest.mark.parametrize(
    "setup", ['apt-get install -y jq\necho "it\'s $HOME"\n\tx\n', "#!/usr/bin/python3\nprint(1)\n", ""]
)
def test_setup_script_of_any_shell_text_is_accepted(setup: str) -> None:
    for place in (HEAD, POOL):
        assert find_paths(changed(f"{place}/setup", setup)) == []


@pytest.mark.parametrize(
    ("setup", "says"),
    [
        ("echo 1\r\necho 2\r\n", "lines that end with a line feed"),
        ("echo \0", "control character"),
        ("x" * 16_385, "has 16,385 bytes, allowed are 16,384"),
        ("export WANDB_API_KEY=0123456789abcdef\n", "looks like the value of a secret"),
        (f"git clone https://{GITHUB}@github.com/x/y\n", "looks like the value of a secret"),
    ],
)
def test_setup_script_that_cannot_travel_or_holds_a_secret_is_refused(setup: str, says: str) -> None:
    (problem,) = problems_of(changed(f"{HEAD}/setup", setup))

    assert says in str(problem)
    assert "0123456789abcdef" not in str(problem)
    assert GITHUB not in str(problem)


WRONG_CONTAINERS: list[tuple[dict[str, Any], str, str]] = [
    *(
        ({"shm_size": size}, "shm_size", "a size such as `8g`")
        for size in ("8", "8 g", "0g", "-1g", "8gb", "8g --privileged")
    ),
    *(
        ({"mounts": [f"{host}:/data"]}, "mounts[0]", "a folder of the machine in /data")
        for host in (
            *(
                "/etc",
                "/root",
                "/home",
                "/run",
                "/var/run/docker.sock",
                "/run/docker.sock",
                "/proc",
                "/sys",
                "/dev",
                "/usr",
            ),
            *("/var/lib/docker", "/opt/runtime-ray", "/etc/runtime-ray/ssh", "/boot", "/lib", "/mntx", "/var/tmpx"),
        )
    ),
    *(
        ({"mounts": [mount]}, "mounts[0]", "`/host/path:/container/path`")
        for mount in (
            *(
                "/:/data",
                "/mnt/../etc:/data",
                "/mnt/./x:/data",
                "//etc:/data",
                "/mnt//x:/data",
                "mnt:/data",
                "/mnt",
                "/mnt:",
            ),
            *(
                "/mnt:/data:rw",
                "/mnt:/data:ro:z",
                "/mnt:/data,/etc:/x",
                "/mnt:/data --privileged",
                "/mnt:/$(id)",
                "/mnt/%h:/data",
            ),
            *("/mnt:/data\n", "/mnt:/da'ta", "/mnt:/..", "/mnt:/data/../proc", ""),
        )
    ),
    *(
        ({"mounts": [f"/mnt/x:{target}"]}, "mounts[0]", "hides neither Ray's own nor the system's")
        for target in (
            *(
                "/etc",
                "/etc/ld.so.preload",
                "/usr/local/bin",
                "/proc",
                "/dev/shm",
                "/opt",
                "/opt/runtime-ray",
                "/tmp/ray/x",
            ),
            *("/run/runtime-ray", "/var", "/var/run", "/lib64", "/sys", "/bin"),
        )
    ),
    ({"mounts": ["/mnt/a:/data", "/mnt/b:/data:ro"]}, "mounts", "has `/data` 2 times"),
    *(
        ({"options": [option]}, "options[0]", "one of `--cap-add`")
        for option in (
            *(
                "--privileged=true",
                "--volume=/:/host",
                "--mount=type=bind,source=/,target=/x",
                "--pid=host",
                "--device=/dev/sda",
            ),
            *(
                "--security-opt=seccomp=unconfined",
                "--env=LD_PRELOAD=/x",
                "--env-file=/etc/shadow",
                "--entrypoint=/bin/sh",
            ),
            *("--network=bridge", "--user=1", "--name=other", "--log-driver=none", "--tmpfs=/etc", "--volumes-from=x"),
        )
    ),
    *(
        ({"options": [option]}, "options[0]", "`--name=value` in one word")
        for option in (
            "--privileged",
            "-v=/:/host",
            "-v /:/host",
            "--cpus 2",
            "--cpus=2 --privileged",
            "",
            "--cpus=\n2",
            "image",
        )
    ),
    *(
        ({"options": [option]}, "options[0]", "and a value of the form")
        for option in (
            "--cap-add=ALL",
            "--cap-add=SYS_ADMIN",
            "--cpus=$(id)",
            "--memory=1",
            "--ulimit=nofile='1'",
            "--cpus=2;id",
        )
    ),
    ({"options": ["--cpu=2"]}, "options[0]", "did you mean `cpus`?"),
    ({"options": ["--oom-score-adj=1001"]}, "options[0]", "and a value of the form"),
    ({"options": ["--memory=5m"]}, "options", "at least `6m`"),
    ({"options": ["--memory-swap=2g"]}, "options", "with a `--memory`"),
    ({"options": ["--memory=2g", "--memory-swap=2047m"]}, "options", "of at most as much"),
    ({"options": ["--memory=2g", "--memory-reservation=3g"]}, "options", "larger `--memory-reservation`"),
    ({"mounts": ["/mnt/a:/opt/runtime"]}, "mounts[0]", "hides neither"),
    ({"priviledged": True}, "priviledged", "is no key here"),
]


@pytest.mark.parametrize(
    ("container", "key", "says"), WRONG_CONTAINERS, ids=[str(each[0])[:60] for each in WRONG_CONTAINERS]
)
def test_container_that_reaches_more_than_it_may_is_refused(container: dict[str, Any], key: str, says: str) -> None:
    for place in (HEAD, POOL):
        found = {each.path: str(each) for each in problems_of(changed(f"{place}/container", container))}

        assert says in found[f"{place.replace('/', '.')}.container.{key}"]


def test_container_with_every_kind_of_setting_is_accepted() -> None:
    container = {
        "shm_size": "16g",
        "mounts": ["/mnt/disks/data:/data:ro", "/tmp:/tmp", "/scratch/a_b-c.d:/home/ray/cache"],
        "options": [
            "--ulimit=nproc=4096:8192",
            "--memory=100g",
            "--cpuset-cpus=0-3,7",
            "--cap-add=SYS_PTRACE",
            "--memory-swap=-1",
        ],
    }

    for place in (HEAD, POOL):
        assert find_paths(changed(f"{place}/container", container)) == []


@pytest.mark.parametrize("cpus", ["0.01", "0.05", "0.125", "0.5", "1", "2.5", "7.999", "8", "8.0"])
def test_cpus_that_the_machine_has_are_accepted_in_thousandths(cpus: str) -> None:
    assert find_paths(changed(f"{HEAD}/container", {"options": [f"--cpus={cpus}"]})) == []


def test_no_allowed_option_takes_a_value_that_a_shell_or_systemd_reads() -> None:
    """The values stand unquoted in a unit."""
    import re

    for name, form in OPTIONS.items():
        assert not any(
            re.fullmatch(form, f"{good}{sign}") for good in ("1", "1g", "SYS_NICE") for sign in " $%\\'\"\n;|&"
        ), name


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        ({"ray.io/accelerator-type": "x"}, "is a label that Ray sets"),
        ({"a b": "x"}, "is no key of a label"),
        ({"tier": "a b"}, "at most 63 letters"),
        ({"tier": "x" * 64}, "at most 63 letters"),
        ({"tier": "$(id)"}, "at most 63 letters"),
    ],
)
def test_label_of_nodes_that_ray_would_refuse_is_refused(labels: dict[str, str], says: str) -> None:
    assert says in str(problems_of(changed(f"{POOL}/labels", labels))[0])


def test_labels_of_nodes_that_ray_takes_are_accepted_and_ray_agrees() -> None:
    labels = {"tier": "cheap", "lab.example/Zone_1.a": "", "a": "B.c-d_e"}
    assert find_paths(changed(f"{POOL}/labels", labels)) == []

    label_utils = pytest.importorskip("ray._private.label_utils")
    label_utils.validate_node_label_syntax(labels)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("disk_type", "ssd", "one of"),
        ("snapshot_days", -1, "allowed are 0 to"),
        ("snapshot_days", 70_000, "allowed are 0 to"),
        ("cloud_logging", "maybe", "true or false"),
        ("labels", {"a": "b"}, "is no key here"),
    ],
)
def test_wrong_setting_of_a_head_is_refused(key: str, value: object, says: str) -> None:
    assert says in str(problems_of(changed(f"{HEAD}/{key}", value))[0])


def test_flow_logs_of_a_subnet_of_others_are_refused() -> None:
    network = {"subnet": "projects/lab-9/regions/us-west4/subnetworks/shared", "flow_logs": True}

    (problem,) = problems_of(changed("network", network))

    assert problem.path == "network.flow_logs"
    assert "gcloud compute networks subnets update" in str(problem)


def test_every_wrong_setting_of_the_machines_is_reported_at_once() -> None:
    values = changed(f"{HEAD}/container", {"shm_size": "x", "options": ["--privileged=true"]})
    values["heads"]["main"]["variables"] = {"LD_PRELOAD": "/x"}

    with pytest.raises(InvalidSettings) as invalid:
        parse_settings("west", values)

    assert len(invalid.value.problems) == 3


def test_container_of_a_pool_tells_an_empty_list_from_none() -> None:
    read = parse_settings("west", changed(f"{POOL}/container", {"mounts": []}))

    assert read.heads["main"].pools["v5e"].container == ContainerSettings(mounts=())
