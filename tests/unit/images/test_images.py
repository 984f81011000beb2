"""Images: names and tags, tool command lines, registry answers, and refused pushes."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from runtime.errors import InvalidValue, NotPossible, RequestRefused, UnknownName, WorkFailed
from runtime.images.build import CUDA_BASE, BuildOptions, Variant, plan_build, plan_reuse
from runtime.images.push import (
    PushFailed,
    PushResult,
    PushState,
    PushTarget,
    RegionManifests,
    ensure_all_pushed,
    find_taken,
    find_targets,
)
from runtime.images.registry import (
    ImageManifest,
    ImageRegistry,
    RegistryFailed,
    RegistryRefused,
    find_credentials,
    is_local,
    login_hint,
)
from runtime.images.source import ImageSource, is_pinned, name_of, read_source, source_of_labels
from runtime.images.tools import (
    BuildRequest,
    LocalImage,
    Tool,
    build_command,
    find_tool,
    parse_inspection,
    pull_commands,
    push_commands,
    run_build,
    run_quietly,
)
from runtime.outputs import RegistryOutput, StackOutputs
from tests.fakes.registry import coded, serve_registry

ROOT = Path(__file__).parents[3]
NOW = datetime(2026, 11, 21, 23, 30, tzinfo=UTC)
COMMIT = "4f1c2d0" + "a" * 33


# names and tags


def test_clean_commit_has_three_tags_and_latest_comes_last() -> None:
    source = ImageSource(commit=COMMIT, dirty=False, created=NOW)

    assert source.tags == ("4f1c2d0aaaaa", "20261121", "latest")
    assert source.fixed_tag == "4f1c2d0aaaaa"


def test_dirty_tree_has_one_tag_that_is_not_the_commits() -> None:
    source = ImageSource(commit=COMMIT, dirty=True, created=NOW)

    assert source.tags == ("4f1c2d0aaaaa-dirty",)
    assert source.fixed_tag is None


def test_tree_without_git_is_called_by_its_day() -> None:
    assert ImageSource(commit=None, dirty=False, created=NOW).tags == ("20261121", "latest")


@pytest.mark.parametrize("source", [ImageSource(commit=COMMIT, dirty=dirty, created=NOW) for dirty in (True, False)])
def test_source_is_read_back_from_labels(source: ImageSource) -> None:
    assert source_of_labels(source.labels, image="worker") == source


def test_image_without_our_labels_is_refused() -> None:
    with pytest.raises(NotPossible) as refused:
        source_of_labels({"maintainer": "x"}, image="localhost/worker:latest")

    assert refused.value.message == "image `localhost/worker:latest` does not say when it was built"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout with one commit."""
    (tmp_path / "docker").mkdir()
    (tmp_path / "docker/worker.Dockerfile").write_text("FROM scratch\n")
    (tmp_path / ".gitignore").write_text("*.log\n")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "--all")
    git(tmp_path, "-c", "user.name=t", "-c", "user.email=t@example.org", "commit", "--quiet", "--message", "one")
    return tmp_path


def git(folder: Path, *args: str) -> None:
    subprocess.run(["git", "-C", str(folder), *args], check=True, capture_output=True)


def test_untouched_tree_is_clean_and_ignored_files_leave_it_so(tree: Path) -> None:
    (tree / "run.log").write_text("x")

    source = read_source(tree, NOW)

    assert re.fullmatch("[0-9a-f]{40}", source.commit or "")
    assert not source.dirty


@pytest.mark.parametrize("name", ["docker/worker.Dockerfile", "untracked.txt"])
def test_changed_or_untracked_file_makes_it_dirty(tree: Path, name: str) -> None:
    (tree / name).write_text("changed\n")

    assert read_source(tree, NOW).dirty


def test_tree_before_its_first_commit_has_none(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")

    assert read_source(tmp_path, NOW) == ImageSource(commit=None, dirty=False, created=NOW)


def test_tree_whose_git_cannot_be_read_is_explained(tree: Path) -> None:
    (tree / ".git/HEAD").write_text("ref: refs/heads/main\n")
    (tree / ".git/config").write_text("[core\n")

    with pytest.raises(NotPossible) as refused:
        read_source(tree, NOW)

    assert refused.value.message == f"git cannot read the work tree at `{tree}`"


@pytest.mark.parametrize(
    ("file", "base", "variant", "name"),
    [
        ("docker/worker.Dockerfile", None, None, "worker"),
        ("docker/worker.Dockerfile", None, "cpu", "worker"),
        ("docker/worker.Dockerfile", None, "cuda", "worker-cuda"),
        ("docker/cluster.Dockerfile", None, "cpu", "cluster"),
        ("docker/worker.Dockerfile", "registry.example:5000/Lab/Torch:2.8.0", "cpu", "torch-worker"),
        ("docker/worker.Dockerfile", "torch@sha256:" + "0" * 64, "cpu", "torch-worker"),
        ("Dockerfile", None, "cpu", "dockerfile"),
    ],
)
def test_image_is_called_after_its_file_and_base(file: str, base: str | None, variant: str | None, name: str) -> None:
    assert name_of(file=Path(file), base=base, variant=variant) == name


@pytest.mark.parametrize(
    ("image", "pinned"),
    [
        ("torch", False),
        ("torch:latest", False),
        ("registry.example:5000/torch", False),
        ("torch:2.8.0", True),
        ("python:3.11-slim", True),
        ("torch@sha256:" + "0" * 64, True),
    ],
)
def test_version_or_digest_is_told_from_a_moving_tag(image: str, pinned: bool) -> None:
    assert is_pinned(image) is pinned


@pytest.mark.parametrize("file", sorted((ROOT / "docker").glob("*.Dockerfile")), ids=lambda path: path.name)
def test_bases_of_our_dockerfiles_are_fixed_versions(file: Path) -> None:
    defaults = re.findall(r"^ARG (?:BASE|TOOLS)=(\S+)", file.read_text(), flags=re.MULTILINE)

    assert defaults
    assert [each for each in (*defaults, CUDA_BASE) if not is_pinned(each) or each.endswith(":latest")] == []


@pytest.mark.parametrize("file", sorted((ROOT / "docker").glob("*.Dockerfile")), ids=lambda path: path.name)
def test_dockerfile_keeps_its_promises(file: Path) -> None:
    assert find_faults(file.read_text()) == []


def find_faults(dockerfile: str) -> list[str]:
    last = dockerfile[dockerfile.rindex("\nFROM ") :]
    user = re.findall(r"^USER (\S+)", last, flags=re.MULTILINE)
    rules = {
        "ends as root": not user or user[-1].partition(":")[0] in ("0", "root"),
        "no init": not re.search(r'^ENTRYPOINT \["/usr/bin/tini", "--"', last, flags=re.MULTILINE),
        "without hashes": "--require-hashes" not in dockerfile,
        "without bytecode": "--no-compile" in dockerfile or "PYTHONDONTWRITEBYTECODE=" in dockerfile,
        "index in a layer": re.search(r"^(ARG|ENV) .*(INDEX|TOKEN|PASSWORD|PIP_CONFIG)", dockerfile, flags=re.MULTILINE)
        is not None,
        "one stage": len(re.findall(r"^FROM ", dockerfile, flags=re.MULTILINE)) < 2,
        "copies everything": re.search(r"^(COPY|ADD) \. ", dockerfile, flags=re.MULTILINE) is not None,
        "world-writable": re.search(r"chmod\s+(-R\s+)?(0?[0-7]{2}[2367]|[ao]\+\S*w)", dockerfile) is not None,
    }
    return [name for name, broken in rules.items() if broken]


GOOD = """
FROM a AS build
RUN pip install --require-hashes -r x
FROM a
USER 1:1
ENTRYPOINT ["/usr/bin/tini", "--", "runtime"]
"""


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("USER 1:1\n", "", "ends as root"),
        ("USER 1:1", "USER root", "ends as root"),
        ('"/usr/bin/tini", "--", ', "", "no init"),
        (" --require-hashes", "", "without hashes"),
        ("pip install", "pip install --no-compile", "without bytecode"),
        ("USER", "ARG PIP_INDEX_URL\nUSER", "index in a layer"),
        ("USER", "COPY . /app\nUSER", "copies everything"),
        ("USER", "RUN chmod 777 /work\nUSER", "world-writable"),
        ("FROM a AS build\n", "", "one stage"),
    ],
)
def test_dockerfile_that_breaks_a_promise_is_found(old: str, new: str, fault: str) -> None:
    assert find_faults(GOOD) == []
    assert fault in find_faults(GOOD.replace(old, new))


def test_context_lets_in_what_is_named_and_nothing_else() -> None:
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    copied = [
        word
        for file in (ROOT / "docker").glob("*.Dockerfile")
        for line in re.findall(r"^COPY (?!--from)(.*) \S+$", file.read_text(), flags=re.MULTILINE)
        for word in line.split()
    ]

    assert lines[0] == "*"
    let_in = {line.removeprefix("!") for line in lines if line.startswith("!")}
    assert {re.sub(r"locks/.*\.txt", "locks/*.txt", word) for word in copied} == let_in
    assert {"**/.env*", "**/*.key", "**/.git*"} <= set(lines)


# plans and command lines


def test_plan_says_all_of_a_build(tree: Path) -> None:
    plan = plan_build(BuildOptions(context=tree), NOW)

    commit = plan.source.commit
    assert commit is not None
    assert plan.request == BuildRequest(
        context=tree,
        file=tree / "docker/worker.Dockerfile",
        tags=tuple(f"localhost/worker:{tag}" for tag in (commit[:12], "20261121", "latest")),
        platform="linux/amd64",
        labels={
            "org.opencontainers.image.created": "2026-11-21T23:30:00.000Z",
            "org.opencontainers.image.revision": commit,
        },
    )
    assert plan.warnings == ()


def test_plan_of_a_dirty_tree_names_no_clean_tag(tree: Path) -> None:
    (tree / "new.txt").write_text("x")

    plan = plan_build(BuildOptions(context=tree), NOW)

    dirty = f"{(plan.source.commit or '')[:12]}-dirty"
    assert plan.request.tags == (f"localhost/worker:{dirty}", "localhost/worker:latest")
    assert plan.warnings == (f"the work tree differs from its commit: a push will carry the tag {dirty} alone",)
    assert plan_reuse(plan, [unreachable()]) is None


def unreachable() -> ImageRegistry:
    return ImageRegistry("localhost:1/x")


def test_plan_on_a_moving_base_warns_and_records_it(tree: Path) -> None:
    plan = plan_build(BuildOptions(context=tree, base="lab/torch:latest"), NOW)

    assert plan.name == "torch-worker"
    assert plan.request.arguments == {"BASE": "lab/torch:latest"}
    assert plan.request.labels["org.opencontainers.image.base.name"] == "lab/torch:latest"
    assert plan.warnings == (
        "base `lab/torch:latest` is no fixed version: the same commit may give another image tomorrow",
    )


def test_cuda_is_another_base_under_another_name(tree: Path) -> None:
    plan = plan_build(BuildOptions(context=tree, variant=Variant.CUDA), NOW)

    assert (plan.name, plan.request.arguments) == ("worker-cuda", {"BASE": CUDA_BASE})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"file": Path("/nowhere/x.Dockerfile")}, "no Dockerfile at `/nowhere/x.Dockerfile`"),
        ({"base": "torch:1.0", "variant": Variant.CUDA}, "`--base` and `--variant cuda` both name what to build on"),
        ({"pip_config": Path("/nowhere/pip.conf")}, "no file `/nowhere/pip.conf`"),
        ({"name": "Worker!"}, "`Worker!` is no valid name of an image"),
    ],
)
def test_build_that_cannot_be_is_refused(tree: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        plan_build(BuildOptions(context=tree, **change), NOW)

    assert refused.value.message == message


REQUEST = BuildRequest(
    context=Path("/c"),
    file=Path("/c/f"),
    tags=("localhost/w:1", "localhost/w:latest"),
    platform="linux/amd64",
    arguments={"BASE": "b:1"},
    labels={"k": "v"},
    pip_config=Path("/p/pip.conf"),
    extra=("--no-cache",),
)
COMMON = (
    "--platform linux/amd64 --file /c/f --build-arg BASE=b:1 --label k=v --tag localhost/w:1 --tag localhost/w:latest "
    "--secret id=pip,src=/p/pip.conf --no-cache /c"
)


@pytest.mark.parametrize(
    ("tool", "line"),
    [
        (Tool.DOCKER, f"DOCKER_BUILDKIT=1 docker build {COMMON}"),
        (Tool.PODMAN, f"podman build {COMMON}"),
        (Tool.BUILDAH, f"buildah build --layers {COMMON}"),
    ],
)
def test_build_command_of_each_tool(tool: Tool, line: str) -> None:
    assert str(build_command(tool, REQUEST)) == line


REMOTE = "us-west4-docker.pkg.dev/p/images/w:1"


@pytest.mark.parametrize(
    ("tool", "remote", "lines"),
    [
        (Tool.DOCKER, REMOTE, [f"docker tag l {REMOTE}", f"docker push --quiet {REMOTE}"]),
        (Tool.PODMAN, REMOTE, [f"podman push --quiet l docker://{REMOTE}"]),
        (Tool.BUILDAH, "localhost:5000/w:1", ["buildah push --quiet --tls-verify=false l docker://localhost:5000/w:1"]),
    ],
)
def test_push_commands_of_each_tool(tool: Tool, remote: str, lines: list[str]) -> None:
    assert [str(each) for each in push_commands(tool, "l", remote)] == lines


@pytest.mark.parametrize(
    ("tool", "lines"),
    [
        (Tool.DOCKER, ["docker pull --quiet localhost:5000/w@d", "docker tag localhost:5000/w@d a"]),
        (
            Tool.PODMAN,
            ["podman pull --quiet --tls-verify=false localhost:5000/w@d", "podman tag localhost:5000/w@d a"],
        ),
    ],
)
def test_pull_commands_of_each_tool(tool: Tool, lines: list[str]) -> None:
    assert [str(each) for each in pull_commands(tool, "localhost:5000/w@d", ["a"])] == lines


@pytest.mark.parametrize(
    ("tool", "value", "digests"),
    [
        (
            Tool.DOCKER,
            [{"Id": "sha256:c0", "RepoDigests": ["host/w@sha256:d0"], "Config": {"Labels": {"a": "b"}}}],
            {"sha256:c0", "sha256:d0"},
        ),
        (
            Tool.PODMAN,
            [{"Id": "c0", "Digest": "sha256:d0", "RepoDigests": [], "Config": {"Labels": {"a": "b"}}}],
            {"sha256:c0", "sha256:d0"},
        ),
        (
            Tool.BUILDAH,
            {"FromImageID": "c0", "FromImageDigest": "sha256:d0", "OCIv1": {"config": {"Labels": {"a": "b"}}}},
            {"sha256:c0", "sha256:d0"},
        ),
    ],
)
def test_what_each_tool_says_of_an_image_is_read(tool: Tool, value: Any, digests: set[str]) -> None:
    image = parse_inspection(tool, "w", value)

    assert image == LocalImage(reference="w", digests=frozenset(digests), labels={"a": "b"})


# present and missing tools


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Put a program on an otherwise empty PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def call(name: str, script: str) -> None:
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)

    return call


def test_docker_without_an_engine_gives_way_to_podman(install: Callable[[str, str], None]) -> None:
    install("docker", "echo 'Cannot connect to the Docker daemon' >&2; exit 1")
    install("podman", "echo 4.3.1")

    assert find_tool() is Tool.PODMAN


def test_no_tool_that_works_says_what_is_wrong_with_each(install: Callable[[str, str], None]) -> None:
    install("docker", "echo 'Cannot connect to the Docker daemon' >&2; exit 1")

    with pytest.raises(NotPossible) as refused:
        find_tool()

    assert refused.value.facts == (
        "docker: installed, but does not work: Cannot connect to the Docker daemon",
        "podman: not installed",
        "buildah: not installed",
    )


def test_tool_that_was_named_is_not_replaced_by_another(install: Callable[[str, str], None]) -> None:
    install("podman", "echo 4.3.1")

    with pytest.raises(NotPossible, match="`buildah` cannot be used here"):
        find_tool(Tool.BUILDAH)


def test_build_that_fails_is_the_works_own_failure(
    install: Callable[[str, str], None], capfd: pytest.CaptureFixture[str]
) -> None:
    install("podman", "echo step 1; exit 125")

    with pytest.raises(WorkFailed) as failed:
        run_build(Tool.PODMAN, build_command(Tool.PODMAN, REQUEST))

    assert failed.value.facts == ("exit code 125; its own words are above",)
    assert capfd.readouterr() == ("", "step 1\n")


def test_failed_push_gives_its_last_words_and_stops(install: Callable[[str, str], None], tmp_path: Path) -> None:
    install("docker", f'echo "$1" >>{tmp_path}/calls; echo one; echo denied: no right; exit 1')

    said = run_quietly(push_commands(Tool.DOCKER, "l", REMOTE))

    assert said == "one\ndenied: no right"
    assert (tmp_path / "calls").read_text() == "tag\n"


# registries


Serve = Callable[..., tuple[ImageRegistry, list[tuple[str, str]]]]


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("REGISTRY_AUTH_FILE", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    # A proxy in the environment would break every request to this machine.
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    servers = []

    def start(answers: dict[str, Any], password: str | None = None) -> tuple[ImageRegistry, list[tuple[str, str]]]:
        seen: list[tuple[str, str]] = []
        server = serve_registry(answers, seen, password)
        servers.append(server)
        return ImageRegistry(f"127.0.0.1:{server.server_address[1]}/lab"), seen

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


MANIFEST = {"config": {"digest": "sha256:c0", "size": 10}, "layers": [{"size": 100}, {"size": 1000}]}


def test_manifest_is_read_with_its_size_and_digests(serve: Serve) -> None:
    registry, _ = serve({"/v2/lab/w/manifests/1": (200, MANIFEST, {"Docker-Content-Digest": "sha256:d0"})})

    manifest = registry.find_manifest("w", "1")

    assert manifest == ImageManifest(digest="sha256:d0", config_digest="sha256:c0", size_bytes=1110)
    assert registry.find_manifest("w", "2") is None
    assert registry.list_tags("w") is None


def test_tags_are_read_over_all_pages(serve: Serve) -> None:
    registry, _ = serve(
        {
            "/v2/lab/w/tags/list": (200, {"tags": ["b"]}, {"Link": '</v2/lab/w/tags/list?last=b&n=1>; rel="next"'}),
            "/v2/lab/w/tags/list?last=b&n=1": (200, {"tags": ["a"]}, {}),
        }
    )

    assert registry.list_tags("w") == ["a", "b"]


def test_time_of_build_comes_from_the_configuration(serve: Serve) -> None:
    registry, _ = serve({"/v2/lab/w/blobs/sha256:c0": (200, {"created": "2026-11-21T23:30:00Z"}, {})})

    assert registry.created_at("w", ImageManifest(digest="d", config_digest="sha256:c0", size_bytes=1)) == NOW
    assert registry.created_at("w", ImageManifest(digest="d", config_digest="sha256:other", size_bytes=1)) is None


def test_password_of_docker_is_exchanged_for_a_token_and_sent_nowhere_else(serve: Serve, tmp_path: Path) -> None:
    registry, seen = serve({"/v2/lab/w/manifests/1": (200, MANIFEST, {})}, password="p0")
    write_login(tmp_path, {"auths": {registry.host: {"auth": coded("user:p0")}}})

    assert registry.find_manifest("w", "1") is not None

    sent = [authorization for _, authorization in seen]
    assert sent == ["", "Basic " + coded("user:p0"), "Bearer t0"]
    assert seen[1][0].startswith("/token?service=127.0.0.1")


def test_wrong_password_is_refused_with_the_way_to_log_in(serve: Serve, tmp_path: Path) -> None:
    registry, _ = serve({}, password="p0")
    write_login(tmp_path, {"auths": {registry.host: {"auth": coded("user:wrong")}}})

    with pytest.raises(RegistryRefused) as refused:
        registry.find_manifest("w", "1")

    assert refused.value.status == 401
    assert refused.value.hint == f"docker login {registry.host}"
    assert "wrong" not in refused.value.render()


def test_missing_right_is_told_from_a_missing_login(serve: Serve) -> None:
    registry, _ = serve({"/v2/lab/w/manifests/1": (403, {}, {})})

    with pytest.raises(RegistryRefused) as refused:
        registry.find_manifest("w", "1")

    assert refused.value.facts == ("it answered 403: no right to do this",)


@pytest.mark.parametrize(
    ("answer", "status", "retryable"), [((503, {}, {}), 503, True), ((200, "<html>", {}), 200, False)]
)
def test_registry_that_fails_is_explained(serve: Serve, answer: Any, status: int, retryable: bool) -> None:
    registry, _ = serve({"/v2/lab/w/manifests/1": answer})

    with pytest.raises(RegistryFailed) as failed:
        registry.find_manifest("w", "1")

    assert (failed.value.status, failed.value.retryable) == (status, retryable)


def test_registry_that_is_not_there_is_explained() -> None:
    with pytest.raises(RegistryFailed) as failed:
        unreachable().find_manifest("w", "1")

    assert (failed.value.place, failed.value.status, failed.value.retryable) == ("localhost:1/x/w", None, True)


def write_login(home: Path, value: dict[str, Any]) -> None:
    (home / "docker").mkdir()
    (home / "docker/config.json").write_text(json.dumps(value))


def test_helper_of_docker_is_asked_for_the_host(
    serve: Serve, tmp_path: Path, install: Callable[[str, str], None]
) -> None:
    write_login(tmp_path, {"credHelpers": {"r.example": "lab"}})
    install("docker-credential-lab", 'read host; echo "{\\"Username\\": \\"u\\", \\"Secret\\": \\"for $host\\"}"')

    assert find_credentials("r.example") == ("u", "for r.example")
    assert find_credentials("other.example") is None


@pytest.mark.parametrize("helper", ["missing", "../evil"])
def test_helper_that_cannot_be_asked_is_no_credential(serve: Serve, tmp_path: Path, helper: str) -> None:
    write_login(tmp_path, {"credsStore": helper})

    assert find_credentials("r.example") is None


def test_settings_that_cannot_be_read_are_passed_over(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "auth.json").write_text("[]")
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / "auth.json"))
    write_login(tmp_path, {"auths": {"r.example": {"auth": coded("u:p")}}})

    assert find_credentials("r.example") == ("u", "p")


@pytest.mark.parametrize(
    ("place", "local"),
    [
        ("localhost:5000/x", True),
        ("127.0.0.1:5000", True),
        ("[::1]:5000", True),
        ("localhost/x", False),
        ("localhost.example:5000", False),
        ("10.0.0.1:5000", False),
        ("us-west4-docker.pkg.dev/p/r", False),
    ],
)
def test_only_this_machine_is_spoken_to_without_tls(place: str, local: bool) -> None:
    assert is_local(place) is local


def test_login_is_googles_own_for_its_registries() -> None:
    assert login_hint("us-west4-docker.pkg.dev/p/r") == "gcloud auth configure-docker us-west4-docker.pkg.dev"
    assert login_hint("r.example/p", "podman") == "podman login r.example"


@pytest.mark.parametrize("place", ["https://r.example/x", "", "r.example/"])
def test_address_that_is_none_is_refused(place: str) -> None:
    with pytest.raises(InvalidValue):
        ImageRegistry(place)


# push destinations

IMAGE = LocalImage(reference="localhost/w:latest", digests=frozenset({"sha256:c0"}), labels={})
SAME = ImageManifest(digest="sha256:d0", config_digest="sha256:c0", size_bytes=1)
OTHER = ImageManifest(digest="sha256:d1", config_digest="sha256:c1", size_bytes=1)
SOURCE = ImageSource(commit=COMMIT, dirty=False, created=NOW)


def seen(region: str, **manifests: ImageManifest | None) -> RegionManifests:
    tags = {tag: manifests.get(name) for tag, name in zip(SOURCE.tags, ("commit", "day", "latest"), strict=True)}
    return RegionManifests(target=PushTarget(region=region, registry=unreachable()), manifests=tags)


def test_commits_tag_on_another_image_is_taken_and_others_may_move() -> None:
    looked = [seen("a", commit=OTHER), seen("b", commit=SAME, latest=OTHER), seen("c", day=OTHER)]

    assert find_taken(SOURCE, IMAGE, looked) == {"a": OTHER}


def test_tags_that_name_this_image_are_not_pushed_again() -> None:
    assert tuple(seen("a", commit=SAME, day=SAME, latest=OTHER).others(IMAGE)) == ("latest",)
    assert tuple(seen("a", commit=SAME, day=SAME, latest=SAME).others(IMAGE)) == ()
    assert tuple(seen("a").others(IMAGE)) == SOURCE.tags


def test_dirty_tag_is_never_taken() -> None:
    dirty = ImageSource(commit=COMMIT, dirty=True, created=NOW)
    looked = RegionManifests(target=PushTarget(region="a", registry=unreachable()), manifests={dirty.tags[0]: OTHER})

    assert find_taken(dirty, IMAGE, [looked]) == {}


def pushed(region: str, state: PushState, problem: str | None = None, hint: str | None = None) -> PushResult:
    return PushResult(region=region, state=state, image="i", digest=None, tags=("t",), problem=problem, hint=hint)


def test_regions_that_failed_are_named_with_reasons_and_the_next_step() -> None:
    results = [
        pushed("a", PushState.PUSHED),
        pushed("b", PushState.FAILED, "line one\nline two", "gcloud auth configure-docker b"),
    ]

    with pytest.raises(PushFailed) as failed:
        ensure_all_pushed("worker", results)

    assert failed.value.render() == (
        "error: image `worker` did not reach b\n  b: line one\n  b: line two\n  done: a\n"
        "hint: gcloud auth configure-docker b"
    )
    assert failed.value.exit_code == 3


def test_no_failure_is_none() -> None:
    ensure_all_pushed("worker", [pushed("a", PushState.UNCHANGED)])


def stack(**registries: dict[str, str]) -> StackOutputs:
    return StackOutputs(
        stack="dev",
        registries={
            name: {region: RegistryOutput(url=url) for region, url in places.items()}
            for name, places in registries.items()
        },
    )


PLACES = {"west": "r.example/west", "east": "r.example/east"}


def test_targets_are_the_regions_of_the_registry_for_images() -> None:
    targets = find_targets(stack(images=PLACES, cache={"west": "r.example/cache"}))

    assert [(each.region, each.registry.place) for each in targets] == [
        ("east", "r.example/east"),
        ("west", "r.example/west"),
    ]
    assert [each.region for each in find_targets(stack(only=PLACES), regions=["west"])] == ["west"]


@pytest.mark.parametrize(
    ("outputs", "options", "kind"),
    [
        (stack(), {}, NotPossible),
        (stack(a=PLACES, b=PLACES), {}, NotPossible),
        (stack(images=PLACES), {"registry": "imges"}, UnknownName),
        (stack(images=PLACES), {"regions": ["wset"]}, UnknownName),
    ],
)
def test_targets_that_cannot_be_found_are_explained(
    outputs: StackOutputs, options: dict[str, Any], kind: type[RequestRefused]
) -> None:
    with pytest.raises(kind) as refused:
        find_targets(outputs, **options)

    assert refused.value.hint
