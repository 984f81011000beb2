"""Containers of an attempt: the words for an engine, and what follows if the engine or the image fails. Real ones are in
tests/services/test_containers.py."""

from __future__ import annotations

import csv
import json
import os
import sys
from pathlib import Path

import pytest

from runtime.shim.common import SetupFailed
from runtime.shim.containers import (
    Containers,
    Engine,
    ask,
    clear_containers,
    container_words,
    containers_of,
    export_line,
    last_line,
    mount_word,
)
from tests.shim_support import ShimJob, each_python, make_job, wait_for


def words_of(engine: Engine, **changes: object) -> list[str]:
    given = {
        "image": "lab/x:1",
        "name": "rt-1-0-ab-0",
        "labels": {"job": "j-1"},
        "mounts": [("/a", "/b", True)],
        "workdir": "/w",
        "variables": ["RUNTIME_RANK"],
        "memory_bytes": None,
        "cpus": None,
        "devices": None,
        **changes,
    }
    words: list[str] = container_words(engine, **given)
    return words


def test_words_for_podman_are_complete() -> None:
    assert words_of(Engine("/usr/bin/podman")) == [
        *("/usr/bin/podman", "run", "--rm", "--pull=never", "--init=false", "--name", "rt-1-0-ab-0"),
        *("--network=host", "--ipc=host", "--pid=private", "--log-driver=none", "--stop-timeout=0", "--pids-limit=-1"),
        *("--security-opt", "label=disable", "--user", "0:0", "--label", "research-runtime.job=j-1"),
        *("--mount", "type=bind,source=/a,target=/b,readonly", "--env", "RUNTIME_RANK"),
        *("--workdir", "/w", "--entrypoint", "sh", "lab/x:1"),
    ]


def test_words_for_docker_have_user_groups_limits_and_gpus() -> None:
    words = words_of(
        Engine("docker", "1000:100", (4, 27)), memory_bytes=1 << 30, cpus=[2, 3], devices=["0", "GPU-ab"], mounts=[]
    )

    assert "--pid=private" not in words  # which docker does not know, and always has
    assert words[words.index("--user") : words.index("--label")] == [
        *("--user", "1000:100", "--group-add", "4", "--group-add", "27"),
    ]
    assert words[words.index("--memory") : words.index("--env")] == [
        *("--memory", "1073741824b", "--memory-swap", "1073741824b", "--cpuset-cpus", "2,3"),
        *("--device", "nvidia.com/gpu=0", "--device", "nvidia.com/gpu=GPU-ab"),
    ]


@pytest.mark.parametrize("path", ["/plain", "/a,b", '/a"b', "/a b:c=d", '/",",'])
def test_paths_of_a_mount_are_read_back_by_any_reader_of_csv(path: str) -> None:
    assert next(csv.reader([mount_word(path, "/x", False)])) == ["type=bind", f"source={path}", "target=/x"]


def test_gpus_of_a_container_are_counted_from_0_inside(tmp_path: Path) -> None:
    containers = make_containers(tmp_path)
    environment = {"CUDA_VISIBLE_DEVICES": "2,5", "NVIDIA_VISIBLE_DEVICES": "2,5"}

    containers.prepare(str(tmp_path), [str(tmp_path)], environment, None)

    assert containers.devices == ["2", "5"]
    assert environment == {
        "CUDA_VISIBLE_DEVICES": "0,1",
        "NVIDIA_VISIBLE_DEVICES": "void",
        "HOME": f"{tmp_path}/home",
    }


def test_folders_below_others_are_mounted_once_and_a_tree_that_is_shared_is_read_only(tmp_path: Path) -> None:
    containers = make_containers(tmp_path)

    containers.prepare("/trees/ab", ["/s", "/s/tree", "/job/a0001", "/s2"], {"HOME": "/"}, None)

    assert containers.mounts == [
        ("/job/a0001", "/job/a0001", False),
        ("/s", "/s", False),
        ("/s2", "/s2", False),
        ("/trees/ab", "/trees/ab", True),
    ]


def make_containers(folder: Path) -> Containers:
    return containers_of({"container": {"image": "x"}}, "/r/jobs/j-1", 0, str(folder), str(folder), Engine("podman"))


def test_variables_reach_a_shell_as_they_are_and_only_their_file_has_the_values(tmp_path: Path) -> None:
    containers = make_containers(tmp_path)
    values = {"TOKEN": "it's $(id) `x` \\\n\"é", "RUNTIME_TOKEN": "hidden", "RUNTIME_ATTEMPT": "1"}

    words, environment = containers.enclose(0, ["true"], values)

    path = tmp_path / "variables.0"
    assert path.stat().st_mode & 0o777 == 0o600
    assert ask(["sh", "-c", f'. {path}; printf %s "$TOKEN"']) == (0, values["TOKEN"])
    assert not any("it's" in word for word in words)
    assert environment.keys() & values.keys() == {"RUNTIME_ATTEMPT"}
    assert environment["RUNTIME_ATTEMPT"] == "1"


def test_variable_that_is_no_text_is_kept_byte_by_byte() -> None:
    assert export_line("A", os.fsdecode(b"\xff'")) == b"export A='\xff'\\'''\n"


def test_engine_that_gives_no_answer_is_ended() -> None:
    with pytest.raises(SetupFailed, match=r"`sh -c` gives no answer within 0\.1 s"):
        ask(["sh", "-c", "sleep 600 & wait"], 0.1)


def test_last_line_of_docker_is_its_reason() -> None:
    said = "docker: Error response from daemon: no such thing\n\nRun 'docker run --help' for more information\n"

    assert last_line(said) == "docker: Error response from daemon: no such thing"
    assert last_line("\n") == "it said nothing"


# what an engine answers


def give_engine(folder: Path, **answers: str) -> str:
    """Make a docker that runs a line of shell for each of its commands, and notes them; returns the PATH that has it."""
    commands = folder / "bin"
    commands.mkdir()
    cases = {"info": "echo []", "image": "exit 0", "pull": "exit 1", "run": "exit 0", "rm": "exit 0", **answers}
    lines = "".join(f"{name}) {line} ;;\n" for name, line in cases.items())
    (commands / "docker").write_text(
        f'#!/bin/sh\nprintf "%s\\n" "$*" >>{folder}/asked\ncase $1 in\n{lines}*) echo "unknown $1"; exit 125 ;;\nesac\n'
    )
    (commands / "docker").chmod(0o755)
    return f"{commands}:{os.environ['PATH']}"


def contained(folder: Path, python: str = sys.executable, **changes: object) -> ShimJob:
    return make_job(folder, python, "true", container={"image": "lab/x:1", "engine": "docker"}, **changes)


def message(job: ShimJob) -> str:
    return str(json.loads((job.folder / "runs/0/result").read_text())["message"])


@pytest.mark.parametrize("python", each_python())
def test_image_that_does_not_exist_is_final_and_spends_no_failure(tmp_path: Path, python: str) -> None:
    path = give_engine(tmp_path, image="exit 1", pull="echo 'Error: manifest unknown' >&2; exit 1")
    job = contained(tmp_path, python, retry={"failure": 3})

    assert job.run(PATH=path) == 1

    assert job.results() == {0: ("image_failed", 1, 1)}
    assert message(job).endswith("cannot get it: Error: manifest unknown")


def test_registry_that_does_not_answer_is_tried_again_within_the_budget(tmp_path: Path) -> None:
    path = give_engine(tmp_path, image="exit 1", pull="echo 'dial tcp: lookup x: no such host' >&2; exit 1")
    job = contained(tmp_path, retry={"failure": 1})

    assert job.run(PATH=path) == 1

    assert job.results() == {0: ("setup_failed", 1, 2)}


def test_machine_without_an_engine_says_so(tmp_path: Path) -> None:
    job = contained(tmp_path)

    assert job.run(PATH=str(tmp_path)) == 1

    assert job.results() == {0: ("setup_failed", 1, 1)}
    assert message(job).startswith("no docker is on ")


def test_daemon_that_does_not_run_is_named(tmp_path: Path) -> None:
    path = give_engine(tmp_path, info="echo 'Cannot connect to the Docker daemon' >&2; exit 1")
    job = contained(tmp_path)

    job.run(PATH=path)

    assert message(job).endswith(": Cannot connect to the Docker daemon")


@pytest.mark.parametrize(("code", "reason"), [(125, "setup_failed"), (127, "image_failed"), (0, "setup_failed")])
def test_container_that_does_not_come_to_its_command_fails_in_the_words_of_its_engine(
    tmp_path: Path, code: int, reason: str
) -> None:
    path = give_engine(tmp_path, run=f"echo 'docker: no room' >&2; exit {code}")
    job = contained(tmp_path)

    assert job.run(PATH=path) == 1

    assert job.results() == {0: (reason, code or 1, 1)}
    assert message(job) == "docker did not start the command in lab/x:1: docker: no room"
    assert not list(job.folder.rglob("containers.json"))
    assert job.left_over() == []


def test_time_to_get_the_image_does_not_count(tmp_path: Path) -> None:
    path = give_engine(tmp_path, image="exit 1", pull="printf %99s >>$CLOCK; exit 0", run="sleep 0.3; exit 125")
    job = contained(tmp_path, time_limit_s=60)
    job.clock = tmp_path / "clock"

    job.run(PATH=path)

    assert job.results() == {0: ("setup_failed", 125, 1)}


def test_cancel_ends_a_pull(tmp_path: Path) -> None:
    path = give_engine(tmp_path, image="exit 1", pull=f"touch {tmp_path}/pulls; sleep 600 & wait")
    job = contained(tmp_path)
    started = job.start(PATH=path)
    wait_for((tmp_path / "pulls").exists, "the pull")
    (job.folder / "cancel").touch()

    assert job.finish(started) == 1

    assert job.results() == {0: ("cancelled", 1, 1)}


def test_container_that_cannot_be_removed_stays_noted_until_a_later_look_removes_it(tmp_path: Path) -> None:
    note = tmp_path / "containers.json"
    path = give_engine(tmp_path, rm=f"[ -e {tmp_path}/fine ] || {{ echo busy; exit 1; }}")
    engine = path.split(":")[0] + "/docker"
    note.write_text(json.dumps({"engine": engine, "names": ["rt-1-0-ab-0", "--all", "other"]}))

    clear_containers(str(tmp_path / "containers.json"))
    assert note.exists()
    (tmp_path / "fine").touch()
    clear_containers(str(tmp_path / "containers.json"))

    assert not note.exists()
    assert (tmp_path / "asked").read_text() == "rm --force rt-1-0-ab-0\n" * 4  # three tries, and one


@pytest.mark.parametrize(
    "text", ["", "[]", '{"engine": 1, "names": ["rt-1"]}', '{"engine": "/bin/sh", "names": ["rt-1"]}']
)
def test_note_that_is_none_runs_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "containers.json").write_text(text)

    clear_containers(str(tmp_path / "containers.json"))

    assert (tmp_path / "containers.json").exists()
