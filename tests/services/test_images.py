"""Real images: built by buildah and podman, pushed to two registries, searched for secrets, run on the emulator."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runtime import __version__
from runtime.cli.main import main
from runtime.errors import NotPossible
from runtime.images.push import PushFailed, PushState, TagTaken, ensure_all_pushed, find_targets, plan_push, push
from runtime.images.registry import ImageRegistry
from runtime.images.source import COMMIT_LENGTH
from runtime.images.tools import Tool, find_tool
from runtime.outputs import PubSubQueueOutput, RecordsOutput, RegistryOutput, StackOutputs, encode_outputs
from runtime.queues.pubsub.client import ensure_topics
from tests.images_support import (
    INSTALL,
    TOOLS_FOLDER,
    Leak,
    LocalRegistry,
    build_arguments,
    build_from,
    copy_work_tree,
    export_image,
    files_of_layers,
    find_images,
    find_leaks,
    remove_images,
    tool_environment,
)
from tests.services_support import PubsubEmulator, require, wait_until

pytestmark = [pytest.mark.service, pytest.mark.slow, pytest.mark.xdist_group("images")]

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module", autouse=True)
def _tools() -> Iterator[None]:
    require("what builds, runs and stores images", TOOLS_FOLDER, INSTALL)
    assert TOOLS_FOLDER is not None
    patch = pytest.MonkeyPatch()
    for name, value in tool_environment(TOOLS_FOLDER).items():
        patch.setenv(name, value)
    yield
    patch.undo()


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_work_tree(tmp_path_factory.mktemp("checkout"))


@pytest.fixture(scope="module")
def worker_image(checkout: Path) -> Iterator[str]:
    """The worker image of the copied work tree, built by our own command."""
    # Parallel tests share the storage.
    name = f"test-worker-{os.getpid()}"
    assert build_image(checkout, "--name", name) == 0
    yield name
    remove_images(f"localhost/{name}:latest")


@pytest.fixture
def regions(tmp_path: Path) -> Iterator[tuple[LocalRegistry, LocalRegistry]]:
    west, east = LocalRegistry(tmp_path / "west").start(), LocalRegistry(tmp_path / "east").start()
    yield west, east
    west.kill()
    east.kill()


@pytest.fixture
def outputs(
    regions: tuple[LocalRegistry, LocalRegistry], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> StackOutputs:
    """A stack with two regions, which commands find by default."""
    west, east = regions
    places = {"west": RegistryOutput(url=west.place), "east": RegistryOutput(url=east.place)}
    outputs = StackOutputs(stack="two", region="west", registries={"images": places})
    (tmp_path / "contract.json").write_text(encode_outputs(outputs))
    monkeypatch.setenv("RUNTIME_OUTPUTS", str(tmp_path / "contract.json"))
    return outputs


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    def call(*args: str) -> tuple[int, str, str]:
        capfd.readouterr()
        code = main(["image", *args])
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    return call


def build_image(context: Path, *args: str, extra: tuple[str, ...] = ()) -> int:
    command = ["image", "build", "--tool", "buildah", "--context", str(context), *args]
    return main([*command, "--", *build_arguments(), *extra])


def small_image(checkout: Path, name: str, content: str) -> None:
    """Build an image with our labels in a second, for tests that do not care about its content."""
    file = checkout.parent / f"{name}.Dockerfile"
    file.write_text(f"FROM scratch\nCOPY {content} /\n")
    assert build_image(checkout, "--file", str(file), "--name", name) == 0


# building and pushing


def test_tool_without_its_engine_is_passed_over() -> None:
    assert find_tool() is (Tool.DOCKER if engine_answers() else Tool.PODMAN)


def test_engine_that_does_not_answer_is_explained() -> None:
    if engine_answers():
        assert find_tool(Tool.DOCKER) is Tool.DOCKER
        return
    with pytest.raises(NotPossible) as refused:
        find_tool(Tool.DOCKER)

    assert refused.value.message == "`docker` cannot be used here"
    assert len(refused.value.facts) == 1


def engine_answers() -> bool:
    if shutil.which("docker") is None:
        return False
    return subprocess.run(["docker", "version"], capture_output=True, check=False).returncode == 0


def test_image_pushed_to_two_regions_is_listed_and_a_second_push_changes_nothing(
    worker_image: str, checkout: Path, outputs: StackOutputs, run: Run
) -> None:
    commit = git_head(checkout)[:COMMIT_LENGTH]

    code, out, err = run("push", worker_image, "--tool", "buildah", "-o", "json")
    first = json.loads(out)
    again = json.loads(run("push", worker_image, "--tool", "podman", "-o", "json")[1])
    listed = json.loads(run("list", worker_image, "-o", "json")[1])

    assert code == 0
    assert "2 of 2 regions" in err
    [digest] = {each["digest"] for each in first}
    assert [(each["region"], each["state"]) for each in first] == [("east", "pushed"), ("west", "pushed")]
    assert [(each["region"], each["state"], each["digest"]) for each in again] == [
        ("east", "unchanged", digest),
        ("west", "unchanged", digest),
    ]
    assert {each["region"]: set(each["tags"]) for each in listed} == {
        region: {commit, "latest", first[0]["tags"][1]} for region in ("west", "east")
    }
    assert {each["digest"] for each in listed} == {digest}
    assert all(50e6 < each["size_bytes"] < 400e6 for each in listed)
    assert [each["image"] for each in listed] == [each["image"] for each in first]


def test_second_build_of_one_commit_is_refused_and_nothing_is_pushed(
    checkout: Path, regions: tuple[LocalRegistry, LocalRegistry], outputs: StackOutputs, run: Run
) -> None:
    west, east = regions
    commit = git_head(checkout)[:COMMIT_LENGTH]
    small_image(checkout, "fixed", "README.md")
    assert run("push", "fixed", "--tool", "buildah", "--region", "west")[0] == 0
    before = ImageRegistry(west.place).find_manifest("fixed", "latest")
    small_image(checkout, "fixed", "LICENSE")

    code, out, err = run("push", "fixed", "--tool", "buildah")

    assert (code, out) == (2, "")
    assert before is not None
    assert f"error: tag `{commit}` of `fixed` names another image already\n  west has it as {before.digest}\n" in err
    assert ImageRegistry(west.place).find_manifest("fixed", "latest") == before
    assert ImageRegistry(east.place).find_manifest("fixed", "latest") is None
    with pytest.raises(TagTaken) as taken:
        plan_push("fixed", Tool.BUILDAH, find_targets(outputs))
    assert taken.value.places == {"west": before}
    remove_images("localhost/fixed:latest")


def test_image_of_this_commit_is_fetched_where_it_is_and_then_reaches_the_other_region(
    checkout: Path, regions: tuple[LocalRegistry, LocalRegistry], outputs: StackOutputs, run: Run
) -> None:
    west, east = regions
    small_image(checkout, "reused", "README.md")
    assert run("push", "reused", "--tool", "buildah", "--region", "west")[0] == 0
    wanted = ImageRegistry(west.place).find_manifest("reused", "latest")
    remove_images("localhost/reused:latest")

    code, _, err = run("build", "--context", str(checkout), "--name", "reused", "--reuse", "--tool", "buildah")
    pushed = run("push", "reused", "--tool", "buildah")

    assert code == 0
    assert "this commit's image is there already" in err
    assert pushed[0] == 0
    assert ImageRegistry(east.place).find_manifest("reused", "latest") == wanted
    remove_images("localhost/reused:latest")


def test_dirty_work_tree_gives_a_tag_of_its_own_that_may_move(
    tmp_path: Path, checkout: Path, regions: tuple[LocalRegistry, LocalRegistry], outputs: StackOutputs, run: Run
) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(checkout, tree)
    commit = git_head(tree)[:COMMIT_LENGTH]
    (tree / "untracked.txt").write_text("new")
    small_image(tree, "dirty", "README.md")
    first = run("push", "dirty", "--tool", "buildah")
    small_image(tree, "dirty", "LICENSE")

    second = run("push", "dirty", "--tool", "buildah")

    assert (first[0], second[0]) == (0, 0)
    assert ImageRegistry(regions[0].place).list_tags("dirty") == [f"{commit}-dirty"]
    remove_images("localhost/dirty:latest")


def test_region_that_is_down_fails_alone(
    checkout: Path, regions: tuple[LocalRegistry, LocalRegistry], outputs: StackOutputs, run: Run
) -> None:
    west, east = regions
    east.kill()
    small_image(checkout, "halfway", "README.md")

    code, out, err = run("push", "halfway", "--tool", "buildah")

    assert code == 3
    assert [line.split("\t")[:2] for line in out.splitlines()] == [["east", "failed"], ["west", "pushed"]]
    assert "error: image `halfway` did not reach east\n" in err
    assert "  done: west\n" in err
    assert ImageRegistry(west.place).find_manifest("halfway", "latest") is not None
    results = push(plan_push("halfway", Tool.BUILDAH, find_targets(outputs)), Tool.BUILDAH)
    with pytest.raises(PushFailed) as failed:
        ensure_all_pushed("halfway", results)
    assert [each.region for each in failed.value.failed] == ["east"]
    assert [each.state for each in failed.value.done] == [PushState.UNCHANGED]
    remove_images("localhost/halfway:latest")


@pytest.mark.nightly
def test_image_on_a_base_of_ones_own_finds_the_packages_of_both(checkout: Path) -> None:
    base = "localhost/lab/torchlike:1.0"
    build_from(
        "FROM docker.io/library/python:3.11.14-slim-bookworm\n"
        "RUN python3 -m venv /venv\n"
        "COPY torchlike.py /tmp/\n"
        "RUN cp /tmp/torchlike.py /venv/lib/python3.*/site-packages/\n"
        "ENV PATH=/venv/bin:$PATH\n",
        {"torchlike.py": "answer = 42\n"},
        tag=base,
    )

    assert build_image(checkout, "--base", base) == 0
    code = "import runtime, torchlike; print(torchlike.answer, runtime.__name__)"
    done = podman(
        "run", "--rm", "--network=host", "--entrypoint=python", "localhost/torchlike-worker:latest", "-c", code
    )

    assert done.stdout == "42 runtime\n"
    remove_images("localhost/torchlike-worker:latest", base)


# image contents


def test_image_runs_as_nobody_in_particular_under_an_init_with_bytecode(worker_image: str) -> None:
    image = f"localhost/{worker_image}:latest"
    settings = json.loads(subprocess.run(["podman", "image", "inspect", image], capture_output=True, check=True).stdout)
    compiled = "-v -c 'import runtime.worker.worker, google.cloud.pubsub, obstore' 2>&1 | grep -cE \"code object from .*[.]py'?$\" || true"
    script = f"""
        set -eu
        id -u
        cat /proc/1/comm
        test ! -w /opt/runtime && test ! -w /etc/passwd && touch /work/x /home/runtime/x && echo writable where it should be
        find / -xdev -perm -0002 ! -type l ! -perm -1000 2>/dev/null || true
        python {compiled}
        [ $(PYTHONPYCACHEPREFIX=/nowhere python {compiled}) -gt 100 ] && echo noticed
    """

    done = podman("run", "--rm", "--network=host", "--entrypoint=/usr/bin/tini", image, "--", "sh", "-c", script)

    assert settings[0]["Config"]["User"] == "10001:10001"
    assert settings[0]["Config"]["Cmd"] == ["worker"]
    assert settings[0]["Config"]["Entrypoint"][-1] == "/opt/runtime/bin/runtime"
    # The number counts modules compiled at start; without byte code they would be noticed.
    assert done.stdout.splitlines() == ["10001", "tini", "writable where it should be", "0", "noticed"]


@pytest.mark.nightly
def test_cluster_image_has_ray_the_tpu_libraries_and_what_its_units_start(checkout: Path) -> None:
    """Takes minutes the first time; later runs find the layers in the tests' storage."""
    file = checkout / "docker/cluster.Dockerfile"
    script = """
        set -eu
        id -u
        ray --version
        runtime --version
        command -v ssh rsync bash >/dev/null && echo tools
        python -c 'import jax, libtpu, googleapiclient.discovery, ray.autoscaler._private.gcp.node; print("libraries")'
        find / -xdev -perm -0002 ! -type l ! -perm -1000 2>/dev/null || true
        cd "$(python -c 'import os, runtime; print(os.path.dirname(runtime.__file__))')"
        find . -name '*.py' -not -path './examples/*' | LC_ALL=C sort | xargs cat | sha256sum
    """
    # The code of this checkout (the wheel adds the examples), and not that of an earlier build's layer.
    files = sorted(f"./{path.relative_to(checkout / 'runtime')}" for path in (checkout / "runtime").rglob("*.py"))
    code = hashlib.sha256(b"".join((checkout / "runtime" / name).read_bytes() for name in files)).hexdigest()

    earlier = find_images("localhost/test-cluster")
    assert build_image(checkout, "--file", str(file), "--name", "test-cluster") == 0
    done = podman("run", "--rm", "--network=host", "localhost/test-cluster:latest", "bash", "-c", script)

    # This one stays until the next is there, which has most of its layers.
    remove_images(*earlier)
    assert done.stdout.splitlines() == [
        "10001",
        "ray, version 2.60.0",
        f"runtime {__version__}",
        "tools",
        "libraries",
        f"{code}  -",
    ]


# secrets

CANARIES = {
    "token in the environment": "canary-environment-7f3a9c21e5",
    "password of docker's settings": "canary-docker-0b8d46e1aa",
    "password of pip's settings": "canary-pip-93c5d7f2b0",
    "line of .env": "canary-dotenv-5e6f1d0c77",
    "address in .git": "canary-git-c4b1a8e9d3",
    "key in a package": "canary-key-2d9e0f5b6a",
    "state of pulumi": "canary-state-81f7c3e2d4",
}


class IndexThatKnowsNothing(http.server.BaseHTTPRequestHandler):
    """A package index without packages; it records the credentials it gets."""

    authorized: list[str]

    def do_GET(self) -> None:
        self.authorized.append(self.headers.get("Authorization", ""))
        self.send_error(404)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def index() -> Iterator[tuple[str, list[str]]]:
    """The index's address and the credentials it got."""
    authorized: list[str] = []
    handler = type("Handler", (IndexThatKnowsNothing,), {"authorized": authorized})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_address[1]}", authorized
    server.shutdown()
    server.server_close()


def test_no_secret_reaches_a_layer_the_configuration_or_the_registry(
    checkout: Path,
    tmp_path: Path,
    regions: tuple[LocalRegistry, LocalRegistry],
    outputs: StackOutputs,
    index: tuple[str, list[str]],
    monkeypatch: pytest.MonkeyPatch,
    run: Run,
) -> None:
    address, authorized = index
    values = list(CANARIES.values())
    tree = tmp_path / "tree"
    shutil.copytree(checkout, tree)
    monkeypatch.setenv("HF_TOKEN", values[0])
    login = {"auths": {regions[0].place.partition("/")[0]: {"auth": coded(f"user:{values[1]}")}}}
    (tmp_path / "docker").mkdir()
    (tmp_path / "docker/config.json").write_text(json.dumps(login))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    pip_config = tmp_path / "pip.conf"
    pip_config.write_text(f"[global]\nextra-index-url = http://user:{values[2]}@{address}/simple\n")
    (tree / ".env").write_text(f"TOKEN={values[3]}\n")
    (tree / "runtime/.env.local").write_text(f"TOKEN={values[3]}\n")
    with (tree / ".git/config").open("a") as config:
        config.write(f'[remote "origin"]\n\turl = https://user:{values[4]}@git.example.org/lab.git\n')
    (tree / "runtime/service.key").write_text(values[5])
    (tree / "infra/credentials-lab.json").write_text(values[5])
    (tree / ".pulumi/stacks").mkdir(parents=True)
    (tree / ".pulumi/stacks/dev.json").write_text(values[6])

    # Without the cache, because a changed secret does not run a step again.
    assert build_image(tree, "--name", "secretive", "--pip-config", str(pip_config), extra=("--no-cache",)) == 0
    code, out, err = run("push", "secretive", "--tool", "buildah")
    layout = export_image("localhost/secretive:latest", tmp_path)

    assert code == 0
    assert f"Basic {coded(f'user:{values[2]}')}" in authorized
    names = files_of_layers(layout)
    assert "opt/runtime/bin/runtime" in names
    assert [name for name in names if name.endswith(("pip.conf", ".env", ".env.local", "service.key"))] == []
    assert find_leaks(layout, CANARIES) == []
    assert find_leaks(regions[0].folder, CANARIES) == []
    assert [value for value in values if value in out + err] == []
    remove_images("localhost/secretive:latest")


BASE = "FROM docker.io/library/python:3.11.14-slim-bookworm\n"
LEAKY = {
    "copied": (BASE + "COPY . /app\n", ()),
    "removed again": (BASE + "COPY .env /tmp/x\nRUN rm /tmp/x\n", ("--layers",)),
    "argument in a command": (BASE + "ARG TOKEN\nRUN echo $TOKEN >/tmp/x; rm /tmp/x\n", ("--build-arg", "TOKEN={}")),
    "environment": (BASE + "ARG TOKEN\nENV TOKEN=$TOKEN\n", ("--build-arg", "TOKEN={}")),
    "coded login": (BASE + "COPY config.json /root/.docker/config.json\n", ()),
}


@pytest.mark.parametrize("way", LEAKY)
@pytest.mark.daily(2)
def test_checker_finds_a_secret_however_it_got_in(way: str, tmp_path: Path) -> None:
    dockerfile, arguments = LEAKY[way]
    token, tag = CANARIES["line of .env"], f"localhost/leaky:{os.getpid()}"
    files = {".env": f"TOKEN={token}\n"}
    if way == "coded login":
        files = {"config.json": json.dumps({"auths": {"r.example": {"auth": coded(f"user:{token}")}}})}
    build_from(dockerfile, files, arguments=[each.format(token) for each in arguments], tag=tag)

    leaks = find_leaks(export_image(tag, tmp_path), CANARIES)

    assert {leak.canary for leak in leaks} == {"line of .env"}
    remove_images(tag)


def test_checker_finds_nothing_in_the_base(tmp_path: Path) -> None:
    layout = export_image("docker.io/library/python:3.11.14-slim-bookworm", tmp_path)

    found: list[Leak] = find_leaks(layout, CANARIES)

    assert found == []
    assert len(files_of_layers(layout)) > 1000


# running it


@pytest.fixture
def stack_for_containers(
    pubsub_emulator: PubsubEmulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, list[str]]:
    """A stack on the emulator with its records in a folder, and the options that make a container its worker."""
    records = tmp_path / "records"
    records.mkdir()
    # The container's user differs from the user who runs the tests.
    records.chmod(0o777)
    queue = PubSubQueueOutput(
        topic="projects/test-project/topics/images", subscription="projects/test-project/subscriptions/images"
    )
    ensure_topics(queue, emulator=pubsub_emulator.address)
    contract = tmp_path / "contract.json"
    outputs = StackOutputs(stack="lab", records=RecordsOutput(url=f"file:{records}"), queues={"default": queue})
    contract.write_text(encode_outputs(outputs))
    monkeypatch.setenv("RUNTIME_OUTPUTS", str(contract))
    options = [
        "--network=host",
        f"--volume={records}:{records}",
        f"--volume={contract}:/contract.json:ro",
        "--env=RUNTIME_OUTPUTS=/contract.json",
        f"--env=PUBSUB_EMULATOR_HOST={pubsub_emulator.address}",
    ]
    return records, options


def test_worker_in_a_container_runs_one_task_and_leaves_its_record(
    worker_image: str, stack_for_containers: tuple[Path, list[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    records, options = stack_for_containers
    open_to_all(records)
    assert main(["submit", "--experiment", "inside", "--", "sh", "-c", "id -u; command -v python"]) == 0
    open_to_all(records)

    done = podman("run", "--rm", *options, f"localhost/{worker_image}:latest", "worker", "--once", check=False)

    capfd.readouterr()
    assert done.returncode == 0, done.stderr
    assert main(["status", "inside", "-o", "json"]) == 0
    status = json.loads(capfd.readouterr().out)
    assert find_number(status, "succeeded") == 1
    logs = [path for path in records.rglob("*") if path.is_file() and b"/opt/runtime/bin/python" in path.read_bytes()]
    assert logs, "the task's log is in the records"


def test_stopped_container_hands_its_task_back_and_ends_well(
    worker_image: str, stack_for_containers: tuple[Path, list[str]], tmp_path: Path
) -> None:
    records, options = stack_for_containers
    open_to_all(records)
    flag = records / "started"
    # When asked to stop, it saves and leaves; otherwise it would run for ten minutes.
    script = f"trap 'echo saved >{flag}.saved; exit 0' TERM; echo $$ >{flag}; for i in $(seq 6000); do sleep 0.1; done"
    assert main(["submit", "--experiment", "drained", "--", "sh", "-c", script]) == 0
    open_to_all(records)
    command = ["podman", "run", "--rm", "--name=test-drained", *options, f"localhost/{worker_image}:latest"]
    with (tmp_path / "worker.log").open("w") as log:
        worker = subprocess.Popen([*command, "worker", "--grace", "20s"], stdout=log, stderr=log)
    try:
        assert wait_until(flag.exists), (tmp_path / "worker.log").read_text()
        podman("stop", "--time", "60", "test-drained")
        code = worker.wait(600)
    finally:
        subprocess.run(["podman", "rm", "--force", "test-drained"], capture_output=True, check=False)
        worker.kill()

    assert code == 0, (tmp_path / "worker.log").read_text()
    assert Path(f"{flag}.saved").exists()
    terminal = [path for path in records.rglob("*drained*") if "records" in path.parts[len(records.parts) :]]
    assert [path for path in terminal if path.is_file()] == []


def podman(*args: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(["podman", *args], capture_output=True, text=True, check=False)
    if check and done.returncode:
        pytest.fail(f"podman {args[0]}: {done.stderr}")
    return done


def open_to_all(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o666)


def find_number(value: object, key: str) -> int:
    """Return the sum of all numbers under `key` at any depth."""
    if isinstance(value, dict):
        here = value[key] if isinstance(value.get(key), int) else 0
        return here + sum(find_number(each, key) for each in value.values())
    return sum(find_number(each, key) for each in value) if isinstance(value, list) else 0


def git_head(folder: Path) -> str:
    return subprocess.run(
        ["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()


def coded(text: str) -> str:
    import base64

    return base64.b64encode(text.encode()).decode()
