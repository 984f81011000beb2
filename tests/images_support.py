"""Real images: the tools that build and run them, registries on this machine, and a checker for leaked secrets."""

from __future__ import annotations

import base64
import gzip
import io
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.services_support import Service, _request

ROOT = Path(__file__).parents[1]
INSTALL = "scripts/image-tools"
CA_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
_CHUNK = 1 << 20
_GZIP = b"\x1f\x8b"


def find_tools_folder() -> Path | None:
    """Find the folder with the base image and the settings from `scripts/image-tools`, if that script finished."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(os.environ.get("RUNTIME_IMAGE_TOOLS") or cache / "research-runtime/image-tools")
    tools = ("buildah", "podman", "skopeo", "docker-registry")
    return folder if (folder / "ready").exists() and all(map(shutil.which, tools)) else None


# Determined at collection, since the tests' fixtures hide the developer's own folders.
TOOLS_FOLDER = find_tools_folder()


def tool_environment(folder: Path) -> dict[str, str]:
    """Return settings that restrict the tools to the tests' own image storage."""
    return {
        "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
        "CONTAINERS_CONF": str(folder / "containers.conf"),
        "BUILDAH_ISOLATION": "chroot",
    }


def build_arguments() -> list[str]:
    """Return build arguments for this machine's network and certificates, and against pulling the base image."""
    mounted = ["--volume", f"{CA_BUNDLE}:{CA_BUNDLE}:ro"] if CA_BUNDLE.exists() else []
    return ["--network=host", "--pull=never", *mounted]


class LocalRegistry(Service):
    """A registry without credentials that stores images in its own folder."""

    name = "registry"

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self._settings = folder / "settings.yml"

    @property
    def place(self) -> str:
        return f"localhost:{self.port}/lab/images"

    def _command(self) -> list[str]:
        self.folder.mkdir(parents=True, exist_ok=True)
        settings = {
            "version": 0.1,
            "log": {"level": "error", "accesslog": {"disabled": True}},
            "storage": {"filesystem": {"rootdirectory": str(self.folder / "blobs")}},
            "http": {"addr": self.address},
        }
        self._settings.write_text(json.dumps(settings))
        return ["docker-registry", "serve", str(self._settings)]

    def _is_ready(self) -> bool:
        return _request("GET", self.port, "/v2/") is not None


def copy_work_tree(target: Path) -> Path:
    """Copy the files that git tracks or would track, in their current state, into a repository with one commit."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        check=True,
    ).stdout
    for name in filter(None, os.fsdecode(listed).split("\0")):
        source = ROOT / name
        if source.is_file() and not name.startswith("tests/"):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target / name)
    git(target, "init", "--quiet", "--initial-branch=main")
    commit_all(target, "one")
    return target


def commit_all(folder: Path, message: str) -> str:
    """Commit all files and return the new commit's id."""
    git(folder, "add", "--all")
    git(folder, "-c", "user.name=t", "-c", "user.email=t@example.org", "commit", "--quiet", "--message", message)
    return git(folder, "rev-parse", "HEAD").strip()


def git(folder: Path, *args: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return subprocess.run(
        ["git", "-C", str(folder), *args], check=True, capture_output=True, text=True, env=environment
    ).stdout


# leaks


@dataclass(frozen=True, slots=True)
class Leak:
    canary: str
    """The secret's name, such as `token in the environment`."""
    where: str
    """The blob's digest, or the file in it."""


def export_image(reference: str, folder: Path) -> Path:
    """Export the image as an OCI layout, as a push sends it but unpacked: manifest, configuration and every layer."""
    target = folder / "layout"
    subprocess.run(
        ["buildah", "push", "--quiet", "--disable-compression", reference, f"oci:{target}:image"],
        check=True,
        capture_output=True,
        text=True,
    )
    return target


def find_leaks(folder: Path, canaries: Mapping[str, str]) -> list[Leak]:
    """Find canaries below `folder` (an OCI layout, or a registry's storage), plain or in base64.

    Searches every blob: unpacked layers with file names and contents, and JSON as it is.
    """
    wanted = {name: forms_of(value) for name, value in canaries.items()}
    leaks = []
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink():
            leaks += [Leak(name, f"{path.parent.name}/{path.name}") for name in _search(path, wanted)]
    return leaks


def forms_of(value: str) -> tuple[bytes, ...]:
    """Return the byte forms of a secret: itself, and the middle of its base64 at each of the three alignments."""
    data = value.encode()
    coded = (base64.b64encode(b"\0" * shift + data)[4 if shift else 0 :].rstrip(b"=")[:-2] for shift in range(3))
    return (data, *coded)


def files_of_layers(layout: Path) -> list[str]:
    """List the names of all files in all layers."""
    names = []
    for blob in (layout / "blobs/sha256").iterdir():
        if tarfile.is_tarfile(blob):
            with tarfile.open(blob) as layer:
                names += layer.getnames()
    return names


def _search(path: Path, wanted: Mapping[str, tuple[bytes, ...]]) -> set[str]:
    longest = max((len(form) for forms in wanted.values() for form in forms), default=0)
    found: set[str] = set()
    rest = b""
    for chunk in _read(path):
        window = rest + chunk
        found |= {name for name, forms in wanted.items() if any(form in window for form in forms)}
        rest = window[-longest:]
    return found


def _read(path: Path) -> Iterator[bytes]:
    with path.open("rb") as raw:
        packed = raw.read(2) == _GZIP
        raw.seek(0)
        stream: io.BufferedIOBase = gzip.GzipFile(fileobj=raw) if packed else raw
        while chunk := stream.read(_CHUNK):
            yield chunk


def build_from(dockerfile: str, files: Mapping[str, str], *, arguments: Iterable[str] = (), tag: str) -> None:
    """Build a small image from its own context, without an ignore file."""
    with tempfile.TemporaryDirectory() as name:
        context = Path(name)
        for path, content in files.items():
            (context / path).parent.mkdir(parents=True, exist_ok=True)
            (context / path).write_text(content)
        (context / "Dockerfile").write_text(dockerfile)
        subprocess.run(
            ["buildah", "build", "--quiet", *build_arguments(), *arguments, "--tag", tag, str(context)],
            check=True,
            capture_output=True,
            text=True,
        )


def find_images(reference: str) -> set[str]:
    """Find the ids of the images of this name, or of this name with a tag, in the tests' own storage."""
    found = subprocess.run(["buildah", "images", "--quiet", reference], check=False, capture_output=True, text=True)
    return set(found.stdout.split())


def remove_images(*references: str) -> None:
    """Remove images with all their names from the tests' own storage; missing images are skipped."""
    for reference in references:
        for identifier in find_images(reference):
            subprocess.run(["buildah", "rmi", "--force", identifier], check=False, capture_output=True)
