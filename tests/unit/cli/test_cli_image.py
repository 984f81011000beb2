"""`runtime image`: help, dry runs and JSON, with a podman that only logs its arguments."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime.cli.main import main
from runtime.outputs import RegistryOutput, StackOutputs, encode_outputs
from tests.fakes.registry import serve_registry
from tests.output_support import differences, documented
from tests.unit.cli.test_cli_startup import loaded_by, run_cli

Run = Callable[..., tuple[int, str, str]]

PODMAN = """#!/bin/sh
echo "$*" >>"$CALLS"
case "$*" in
    "image inspect"*) [ -f "$IMAGE" ] && cat "$IMAGE" || exit 125 ;;
    push*) exit "${PUSH:-0}" ;;
esac
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with git, and a podman that logs its calls to this file."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "podman").write_text(PODMAN)
    (programs / "podman").chmod(0o755)
    for name in ("git", "sh", "cat"):
        (programs / name).symlink_to(shutil.which(name) or name)
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("IMAGE", str(tmp_path / "image.json"))
    (tmp_path / "calls").touch()
    return tmp_path / "calls"


@pytest.fixture
def checkout(tmp_path: Path, calls: Path) -> Path:
    folder = tmp_path / "checkout"
    (folder / "docker").mkdir(parents=True)
    (folder / "docker/worker.Dockerfile").write_text("FROM scratch\n")
    (folder / "docker/cluster.Dockerfile").write_text("FROM scratch\n")
    for args in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "--message", "one"]):
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        subprocess.run(["git", "-C", str(folder), *identity, *args], check=True, capture_output=True)
    return folder


@pytest.fixture
def run(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    outputs = StackOutputs(stack="dev", registries={"images": {"west": RegistryOutput(url="localhost:1/lab")}})
    (tmp_path / "contract.json").write_text(encode_outputs(outputs))
    monkeypatch.setenv("RUNTIME_OUTPUTS", str(tmp_path / "contract.json"))
    monkeypatch.chdir(checkout)

    def call(*args: str) -> tuple[int, str, str]:
        code = main(["image", *args])
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    return call


def built(tmp_path: Path, revision: str = "a" * 40) -> None:
    labels = {
        "org.opencontainers.image.created": "2026-11-21T23:30:00Z",
        "org.opencontainers.image.revision": revision,
    }
    image = [{"Id": "c0", "Digest": "sha256:d0", "RepoDigests": [], "Config": {"Labels": labels}}]
    (tmp_path / "image.json").write_text(json.dumps(image))


@pytest.mark.parametrize("verb", ["build", "push", "list"])
def test_help_reads_as_reviewed(verb: str, golden: Callable[[str, str], None]) -> None:
    done = run_cli("image", verb, "--help")

    assert (done.returncode, done.stderr) == (0, "")
    golden(f"cli/image-{verb}.txt", done.stdout)


def test_image_commands_load_no_cloud_library() -> None:
    heavy = {"google", "obstore", "pulumi", "rich", "jsonargparse"}

    assert {each.partition(".")[0] for each in loaded_by("import runtime.cli.image")} & heavy == set()


def test_dry_run_prints_the_command_and_builds_nothing(run: Run, calls: Path, checkout: Path) -> None:
    code, out, err = run("build", "--dry-run", "--", "--no-cache")

    assert (code, err) == (0, "")
    assert out.startswith(f"podman build --platform linux/amd64 --file {checkout}/docker/worker.Dockerfile --label ")
    assert out.endswith(f"--tag localhost/worker:latest --no-cache {checkout}\n")
    assert calls.read_text() == "version\n"


def test_build_says_what_came_out(run: Run, tmp_path: Path) -> None:
    built(tmp_path)

    code, out, err = run("build", "--file", "docker/cluster.Dockerfile", "-o", "json")

    value = json.loads(out)
    assert code == 0
    assert (value["name"], value["tool"], value["dirty"], value["ids"]) == (
        "cluster",
        "podman",
        False,
        ["sha256:c0", "sha256:d0"],
    )
    assert value["images"][-1] == "localhost/cluster:latest"
    assert err == ""


def test_dirty_tree_is_said_before_it_is_built(run: Run, checkout: Path, tmp_path: Path) -> None:
    built(tmp_path)
    (checkout / "new.txt").write_text("x")

    code, _, err = run("build")

    assert code == 0
    assert err.startswith("note: the work tree differs from its commit: a push will carry the tag ")


def test_nothing_built_yet_is_explained(run: Run) -> None:
    code, out, err = run("push")

    assert (code, out) == (2, "")
    assert err == (
        "error: `podman` has no image `localhost/worker:latest`\n"
        "hint: runtime image build --name worker, or another `--tool`\n"
    )


def test_registry_that_is_down_is_named_and_nothing_is_pushed_there(run: Run, calls: Path, tmp_path: Path) -> None:
    built(tmp_path)

    code, out, err = run("push", "-o", "json")

    assert code == 3
    assert [(each["region"], each["state"]) for each in json.loads(out)] == [("west", "failed")]
    assert "error: image `worker` did not reach west\n" in err
    assert "push" not in calls.read_text()


def test_file_that_is_not_there_is_explained(run: Run) -> None:
    code, _, err = run("build", "--file", "docker/wroker.Dockerfile")

    assert code == 2
    assert err.startswith("error: no Dockerfile at `docker/wroker.Dockerfile`\n")


def test_unknown_tool_is_refused_with_those_there_are(run: Run) -> None:
    code, _, err = run("build", "--tool", "kaniko")

    assert code == 2
    assert "docker" in err
    assert "buildah" in err


def test_stack_without_a_registry_says_what_to_add(run: Run, tmp_path: Path) -> None:
    (tmp_path / "contract.json").write_text(encode_outputs(StackOutputs(stack="dev")))

    code, _, err = run("list")

    assert code == 2
    assert err == (
        "error: stack `dev` has no registry\n"
        "hint: add `registries` to Pulumi.dev.yaml, or name another stack with `--stack`\n"
    )


def test_machine_without_any_tool_says_so(run: Run, tmp_path: Path) -> None:
    (tmp_path / "bin/podman").unlink()

    code, _, err = run("build")

    assert code == 2
    assert err.startswith("error: no tool here can build or push images\n  docker: not installed\n")
    assert os.environ["PATH"] == str(tmp_path / "bin")


@pytest.fixture
def registry(run: Run, tmp_path: Path) -> Iterator[None]:
    """The stack's registry, with this commit's image in it."""
    tags = ["a" * 12, "20261121", "latest"]
    manifest = {"config": {"digest": "sha256:c0", "size": 10}, "layers": [{"size": 100}]}
    answers: dict[str, Any] = {f"/v2/lab/worker/manifests/{tag}": (200, manifest, {}) for tag in tags}
    answers["/v2/lab/worker/tags/list"] = (200, {"tags": tags}, {})
    answers["/v2/lab/worker/blobs/sha256:c0"] = (200, {"created": "2026-11-21T23:30:00Z"}, {})
    server = serve_registry(answers, [])
    url = f"127.0.0.1:{server.server_address[1]}/lab"
    outputs = StackOutputs(stack="dev", registries={"images": {"west": RegistryOutput(url=url)}})
    (tmp_path / "contract.json").write_text(encode_outputs(outputs))
    yield
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("command", [each for each in documented() if each.startswith("runtime image ")])
def test_shape_is_as_the_page_shows_it(registry: None, run: Run, tmp_path: Path, command: str) -> None:
    built(tmp_path)

    code, out, err = run(*command.split()[2:])

    assert code == 0, err
    assert differences(documented()[command], json.loads(out)) == []
