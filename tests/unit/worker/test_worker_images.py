"""Tasks that name an image, with engines that only answer: which worker takes them, and what is left to others. Real containers
are in tests/services/test_task_containers.py."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from runtime.end_reasons import EndReason
from runtime.shim.common import HOST
from runtime.tasks.container import ContainerSpec, Mount
from runtime.tasks.model import CommandEntry, Resources, Task
from runtime.testing import sample_task
from runtime.worker.attempts.environment import CONTAINER
from runtime.worker.attempts.scratch import open_root, remove_leftovers
from runtime.worker.images import contained
from runtime.worker.worker_context import HeldLease
from tests.services_support import wait_until
from tests.unit.shim.test_shim_containers import give_engine
from tests.unit.worker.worker_bench import Bench, bench

__all__ = ["bench"]

IMAGE = "lab/x:1"


def task(key: str = "a", *mounts: Mount, **fields: Any) -> Task:
    fields = {"entry": CommandEntry(("true",)), "container": ContainerSpec(IMAGE, mounts), **fields}
    return sample_task(key, **fields)


def give_podman(folder: Path, **answers: str) -> str:
    """Make a podman that only answers; returns the PATH that has it."""
    path = give_engine(folder, **answers)
    (folder / "bin/podman").symlink_to("docker")
    return path


def declined(bench: Bench, *tasks: Task) -> str:
    """Run a worker until it has declined a task; returns the reason."""
    bench.put(*tasks)
    with bench.running():
        assert wait_until(lambda: bool(bench.events("task_declined"))), bench.log.getvalue()
    assert [bench.notes(each) for each in tasks] == [[] for _ in tasks]
    return json.dumps(bench.events("task_declined"))


def test_machine_without_an_engine_leaves_the_task_to_other_workers(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(bench.folder))

    said = declined(bench, task())

    assert f"its container cannot run on this machine: no podman or docker is on {HOST}" in said


def test_machine_without_a_mounted_folder_leaves_the_task_to_other_workers(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", give_podman(bench.folder))

    said = declined(bench, task("a", Mount(source="/no/such", target="/data")))

    assert f"no /no/such on {HOST}, which `mounts` puts at /data" in said


@pytest.mark.parametrize(
    "answer", ["unauthorized: authentication required", "denied: requested access", "dial tcp: no such host"]
)
def test_machine_that_cannot_get_the_image_leaves_the_task_to_other_workers(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    monkeypatch.setenv("PATH", give_podman(bench.folder, image="exit 1", pull=f"echo '{answer}' >&2; exit 1"))

    assert answer in declined(bench, task())


def test_image_that_no_registry_has_fails_the_task_at_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", give_podman(bench.folder, image="exit 1", pull="echo manifest unknown; exit 1"))
    one = task(max_failures=3)
    bench.put(one)

    bench.run()

    record = bench.record(one)
    assert (record.reason, record.attempts) == (EndReason.IMAGE_FAILED, 1)
    assert record.message == (
        f"image lab/x:1: podman has no image lab/x:1 on {HOST} and cannot get it: manifest unknown"
    )


def test_image_is_got_once_for_all_tasks_that_wait_for_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    there = f"[ -e {bench.folder}/there ]"
    path = give_podman(bench.folder, image=there, pull=f"touch {bench.folder}/there", run="exit 125")
    monkeypatch.setenv("PATH", path)
    bench.put(*(task(str(number), max_failures=1) for number in range(4)))

    bench.run(slots=2, max_consecutive_failures=0)

    asked = (bench.folder / "asked").read_text().splitlines()
    assert [line for line in asked if line.startswith("pull")] == ["pull --quiet lab/x:1"]
    assert sum(line.startswith("image inspect") for line in asked) == 1
    assert sum(line.startswith("run ") for line in asked) == 4


def test_engine_that_does_not_start_the_container_spends_a_failure_and_leaves_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", give_podman(bench.folder, run="echo 'Error: no room' >&2; exit 125"))
    one = task(max_failures=2)
    bench.put(one)

    bench.run(max_consecutive_failures=0)

    record = bench.record(one)
    assert (record.reason, record.log) == (EndReason.SETUP_FAILED, "Error: no room\n")
    assert record.message == (
        "podman did not start the command in `lab/x:1`, and its words are in the log: it ended with code 125"
    )
    asked = (bench.folder / "asked").read_text().splitlines()
    runs = [line.split() for line in asked if line.startswith("run ")]
    names = [words[words.index("--name") + 1] for words in runs]
    assert [line for line in asked if line.startswith("rm ")] == [f"rm --force {name}" for name in names]
    assert len(set(names)) == 2


def test_worker_that_leaves_ends_the_engine_that_gets_an_image(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    pulls = bench.folder / "pulls"
    monkeypatch.setenv("PATH", give_podman(bench.folder, image="exit 1", pull=f"touch {pulls}; sleep 600 & wait"))
    one = task()
    bench.put(one)

    with bench.running():
        assert wait_until(pulls.exists)

    assert bench.records.find(one.id, 1) is None
    assert bench.notes(one) == []


def test_container_of_an_order_has_normal_names_and_the_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from runtime.shim.containers import Engine
    from runtime.tasks.history import Lease

    one = task("a", Mount(source="/data//x/", target="/in/"), resources=Resources(memory_bytes=5))
    one = sample_task("a", entry=one.entry, container=ContainerSpec("docker://lab/x:1", one.container.mounts))  # type: ignore[union-attr]
    held = HeldLease(Lease(one, "0" * 16), engine=Engine("/usr/bin/docker", "7:8", (9,)))

    assert json.loads(contained(held, 5)[CONTAINER]) == {
        "engine": ["/usr/bin/docker", "7:8", [9], True],
        "image": "lab/x:1",
        "mounts": [{"source": "/data/x", "target": "/in", "mode": "ro"}],
        "memory_bytes": 5,
    }


def test_container_of_a_dead_worker_is_removed_before_a_worker_takes_tasks_and_that_of_a_living_one_is_not(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", give_podman(bench.folder))
    roots = [open_root(f"w-{name}") for name in ("living", "dead")]
    for number, root in enumerate(roots):
        note = Path(root.path) / f"{number:016}.77.container"
        note.write_text(json.dumps({"engine": f"{bench.folder}/bin/docker", "names": [f"rt-{number:016}"]}))
    os.close(roots[1].fd)
    bench.put(sample_task("a", entry=CommandEntry(("cat", f"{bench.folder}/asked"))))

    bench.run()
    roots[0].close()

    record = bench.record(sample_task("a", entry=CommandEntry(("cat", f"{bench.folder}/asked"))))
    assert record.log == f"rm --force rt-{1:016}\n"


def test_container_that_a_dead_worker_left_stays_noted_until_an_engine_removes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tmp_path / "scratch"
    root = open_root("w-dead", base=str(base))
    (Path(root.path) / "tree").mkdir()
    note = Path(root.path) / f"{'0' * 16}.77.container"
    path = give_engine(tmp_path, rm=f"[ -e {tmp_path}/fine ] || {{ echo busy; exit 1; }}")
    note.write_text(json.dumps({"engine": f"{tmp_path}/bin/docker", "names": [f"rt-{'0' * 16}"]}))
    os.close(root.fd)
    monkeypatch.setenv("PATH", path)

    assert remove_leftovers(str(base)) == []
    assert sorted(each.name for each in Path(root.path).iterdir()) == [note.name]
    (tmp_path / "fine").touch()
    assert remove_leftovers(str(base)) == [root.path]

    assert list(base.iterdir()) == []
