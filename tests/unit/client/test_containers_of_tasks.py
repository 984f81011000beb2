"""The container of a task: how submissions name it, how it stays with the task, and which ones no worker could run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import runtime
from runtime.cli.main import main
from runtime.client.tasks.publish import content_of
from runtime.errors import InvalidTask, InvalidValue, RequestRefused
from runtime.queues.sqlite.queue import SqliteQueue, open_sqlite
from runtime.tasks.container import ContainerSpec, Mount, MountMode, make_container
from runtime.tasks.model import CommandEntry, Task, Terms
from runtime.tasks.wire import decode_stored, decode_task, encode_task, parse_task
from runtime.testing import sample_task

IMAGE = "ghcr.io/lab/train:1.4"
CONTAINER = ContainerSpec(
    IMAGE, (Mount(source="/data", target="/in"), Mount(source="/out:1", target="/out", mode=MountMode.RW))
)
MOUNTS = [{"source": "/data", "target": "/in"}, {"source": "/out:1", "target": "/out", "mode": "rw"}]
PACKAGES = "sha256:" + "0" * 64


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SqliteQueue]:
    monkeypatch.setenv("RUNTIME_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    queue, records = open_sqlite(tmp_path / "data" / "local.db")
    yield queue
    queue.close()
    records.close()


def waiting(queue: SqliteQueue) -> list[Task]:
    return queue.peek(100)


def double(n: int) -> int:
    return 2 * n


def test_container_stays_with_a_task_on_the_wire_and_is_part_of_its_content() -> None:
    task = sample_task("a", container=CONTAINER)

    assert decode_task(encode_task(task)) == task
    assert decode_stored(encode_task(task)) == task
    assert content_of(task) != content_of(replace(task, container=ContainerSpec(IMAGE)))


@pytest.mark.parametrize(
    "given",
    [
        ["/data:/in", {"source": "/out:1", "target": "/out", "mode": "rw"}],
        MOUNTS,
        list(CONTAINER.mounts),
        ["/data:/in:ro", CONTAINER.mounts[1]],
    ],
)
def test_mounts_are_texts_objects_or_values(given: Any) -> None:
    assert make_container(IMAGE, given) == CONTAINER


@pytest.mark.parametrize(
    ("fields", "container", "environment"),
    [
        ({}, CONTAINER, None),
        ({"image": "debian:12"}, ContainerSpec("debian:12", CONTAINER.mounts), None),
        ({"mounts": []}, ContainerSpec(IMAGE), None),
        ({"image": None}, CONTAINER, None),
        ({"environment": PACKAGES}, None, PACKAGES),
    ],
)
def test_field_of_a_line_comes_before_the_container_of_its_submission(
    fields: dict[str, Any], container: ContainerSpec | None, environment: str | None
) -> None:
    task = parse_task({"command": ["true"], **fields}, defaults=Terms(container=CONTAINER))

    assert (task.container, task.environment) == (container, environment)


def test_image_of_a_line_comes_before_the_environment_of_its_submission() -> None:
    task = parse_task({"command": ["true"], "image": IMAGE}, defaults=Terms(environment=PACKAGES))

    assert (task.container, task.environment) == (ContainerSpec(IMAGE), None)


def test_functions_lines_and_tasks_are_submitted_with_a_container(queue: SqliteQueue) -> None:
    given: list[Any] = [
        {"command": ["a"]},
        {"command": ["b"], "image": "debian:12"},
        sample_task("c", experiment="many", entry=CommandEntry(("c",))),
        sample_task("d", experiment="many", entry=CommandEntry(("d",)), environment=PACKAGES),
    ]

    runtime.submit(double, args=[1], image=IMAGE, mounts=MOUNTS, snapshot=False)
    runtime.submit(given, experiment="many", image=IMAGE, snapshot=False)

    assert [(task.container, task.environment) for task in waiting(queue)] == [
        (CONTAINER, None),
        (ContainerSpec(IMAGE), None),
        (ContainerSpec("debian:12"), None),
        (ContainerSpec(IMAGE), None),
        (None, PACKAGES),
    ]


def test_command_line_names_image_and_mounts(queue: SqliteQueue, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--image", IMAGE, "--mount", "/data:/in", "--mount", "/out:/out:rw", "--no-snapshot", "--", "true"]

    assert main(["submit", *words]) == 0

    (task,) = waiting(queue)
    mounts = Mount(source="/data", target="/in"), Mount(source="/out", target="/out", mode=MountMode.RW)
    assert task.container == ContainerSpec(IMAGE, mounts)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--image", "train.sif"], "`--image` is `train.sif`, a file, and podman and docker run images of a registry"),
        (["--mount", "/a:/b"], "`--mount` puts `/a` at `/b`, and without a container a path is where it is"),
        (
            ["--image", "ghcr.io/Lab/train:V1"],
            "`--image` is `ghcr.io/Lab/train:V1`, and names of images have no capital letters",
        ),
        (["--image", "x", "--mount", "/a"], "`--mount[0]` is '/a', expected SOURCE:TARGET"),
        (["--image", "x", "--mount", "/a:/proc"], "has the target `/proc`, which every container has of its own"),
        (["--image", "x", "--environment", "frozen"], "`--environment` has packages for a Python of the worker's"),
        (["--image", "x", "--with", "six==1.17"], "`--environment` has packages for a Python of the worker's"),
    ],
)
def test_container_that_no_worker_could_run_is_refused(
    queue: SqliteQueue, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(["submit", *words, "--no-snapshot", "--", "true"]) == 2

    assert said in capsys.readouterr().err
    assert waiting(queue) == []


def test_environment_of_the_project_does_not_go_into_a_container(queue: SqliteQueue, tmp_path: Path) -> None:
    (tmp_path / "runtime.toml").write_text('environment = "locks.txt"\n')
    (tmp_path / "locks.txt").write_text("six==1.17\n")

    assert main(["submit", "--image", IMAGE, "--no-snapshot", "--", "a"]) == 0
    runtime.submit({"command": ["b"]}, image=IMAGE, snapshot=False)
    with pytest.raises(InvalidTask):
        runtime.submit({"command": ["c"]}, image=IMAGE, environment="locks.txt", snapshot=False)

    assert [(task.container, task.environment) for task in waiting(queue)] == [(ContainerSpec(IMAGE), None)] * 2


def test_argument_of_another_kind_is_named(queue: SqliteQueue) -> None:
    with pytest.raises(InvalidValue) as image:
        runtime.submit(double, args=[1], image=["x"])  # type: ignore[arg-type]
    with pytest.raises(InvalidValue) as mounts:
        runtime.submit(double, args=[1], image="x", mounts="/a:/b")
    with pytest.raises(RequestRefused) as target:
        runtime.submit(double, args=[1], image="x", mounts=[{"source": "/a", "target": "b"}])

    assert "image" in image.value.message
    assert "mounts" in mounts.value.message
    assert "`mounts[0].target` is 'b', expected an absolute path" in target.value.message


def test_same_call_in_another_image_is_another_task(queue: SqliteQueue) -> None:
    calls = [
        runtime.run_experiment(fit, {"lr": 1}, name="fit", target="queue:", image=image) for image in ("a", "a", "b")
    ]

    assert [task.container for task in waiting(queue)] == [ContainerSpec("a"), ContainerSpec("b")]
    for call in calls:
        call.cancel()


def fit(run: Any, variant: Any) -> Any:
    return variant
