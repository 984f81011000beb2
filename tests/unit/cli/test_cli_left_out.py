"""What the snapshot leaves out is in nothing else that a launch or a submission writes or prints."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.client.jobs.handle import find_job
from tests.jobs_support import Terminal, open_terminal


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Terminal]:
    for name in ("CACHE", "CONFIG"):
        monkeypatch.setenv(f"RUNTIME_{name}_DIR", str(tmp_path / name.lower()))
    with open_terminal(tmp_path, monkeypatch, capsys) as terminal:
        yield terminal


def git(folder: Path, *args: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(folder), *identity, *args], check=True, capture_output=True)


def write_all(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


KEY = f"-----BEGIN {'PRIVATE'} KEY-----\ncanary-key\n"


def make_repository(top: Path) -> Path:
    """Make a repository in which much must not leave this machine; each such name and content has a `canary`."""
    project = top / "project"
    write_all(
        top,
        {
            "canary-outside.txt": "canary-outside\n",
            "project/main.py": "print('before')\n",
            "project/.runtimeignore": "left-out/\n.env\n*.env\n*.local\n",
            "project/left-out/canary-tracked.txt": "canary-tracked\n",
            "project/.env": "A=canary-env\n",
            "project/canary-deleted.env": "A=canary-deleted\n",
            "project/canary-renamed.env": "a line\nanother line\na third line\n",
            "project/canary-gone.py": "canary_gone = 1\n",
            "project/place/canary-inside.env": "A=canary-inside\n",
            "project/became-a-link": "canary-link\n",
            "project/config.py": "API_KEY = 'canary-removed'\n",
            "project/login.yaml": "password: canary-yaml\n",
            "project/key.txt": KEY,
        },
    )
    (project / "weights.bin").write_bytes(b"\0canary-binary" + bytes(range(256)))
    write_all(
        project / "nested", {"model.py": "1\n", ".gitignore": "*.secret\n", "canary-nested.env": "canary-nested\n"}
    )
    git(project / "nested", "init", "-q")
    git(project / "nested", "add", "-A")
    git(project / "nested", "commit", "-qm", "x")
    git(top, "init", "-q", "-b", "main")
    git(top, "add", "-A")
    git(top, "commit", "-qm", "canary-message")

    write_all(
        top,
        {
            "canary-outside.txt": "canary-changed\n",
            "canary-untracked.txt": "canary-untracked\n",
            "project/main.py": "print('after')\n",
            "project/left-out/canary-tracked.txt": "canary-changed\n",
            "project/.env": "A=canary-changed\n",
            "project/config.py": "import os\nAPI_KEY = os.environ['API_KEY']\n",
            "project/login.yaml": "password: ${PASSWORD}\n",
            "project/key.txt": "elsewhere\n",
            "project/canary.local": "canary-local\n",
            "project/nested/model.py": "2\n",
            "project/nested/canary-nested.env": "canary-changed\n",
            "project/nested/canary.secret": "canary-secret\n",
        },
    )
    git(project / "nested", "commit", "-qam", "canary-nested-message")
    (project / "weights.bin").write_bytes(b"\0other" + bytes(range(256)))
    git(project, "mv", "canary-renamed.env", "settings.txt")
    for name in ("canary-deleted.env", "canary-gone.py", "became-a-link"):
        (project / name).unlink()
    (project / "became-a-link").symlink_to("main.py")
    shutil.rmtree(project / "place")
    (project / "place").write_text("a file\n")
    git(top, "add", "project/place")
    return project


def find_canaries(folder: Path, *, but: Path) -> list[str]:
    found = []
    for root, _, names in os.walk(folder):
        for path in (Path(root, name) for name in names):
            if path.is_relative_to(but) or not path.is_file():
                continue
            if "canary" in str(path.relative_to(folder)) or b"canary" in path.read_bytes():
                found.append(str(path.relative_to(folder)))
    return found


def read_diff(job: str) -> str:
    with find_job(job) as found:
        return str(found.entry().intent["diff"])


@pytest.mark.parametrize("code", [[], ["--set", "code.exclude=['login.yaml']"]])
def test_launch_and_submit_of_a_repository_with_secrets_write_nothing_of_what_the_snapshot_leaves_out(
    run: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: list[str]
) -> None:
    project = make_repository(run.tree)
    (project / "salt").write_bytes(os.urandom(12))
    (project / "runtime.toml").touch()
    monkeypatch.chdir(project)

    said = [run("launch", "--on", "local", *code, "--dry-run", *words, "--", "true") for words in ([], ["-o", "json"])]
    job = run.finish("cat main.py", *code)
    said += [run("explain", job), run("status", job), run("status", job, "-o", "json"), run("logs", job)]
    said += [
        run("submit", "--dry-run", "--", "true"),
        run("submit", "--", "true"),
        run("submit", "-o", "json", "--", "echo"),
    ]
    diff = read_diff(job)

    assert [each.err for each in said if each.code] == []
    assert [each for each in said if "canary" in each.out + each.err] == []
    assert find_canaries(tmp_path, but=run.tree) == []
    assert [line for line in diff.splitlines() if line.startswith("diff")] == [
        "diff --git a/main.py b/main.py",
        "diff --git a/place b/place",
        "diff --git a/settings.txt b/settings.txt",
        "diff --git a/weights.bin b/weights.bin",
    ]
    assert "-print('before')\n+print('after')\n" in diff


def test_launch_of_a_named_secret_keeps_its_diff_since_the_snapshot_has_it(
    run: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_all(run.tree, {".env": "MODE=one\n", "other.env": "canary\n"})
    git(run.tree, "init", "-q")
    git(run.tree, "add", "-A")
    git(run.tree, "commit", "-qm", "x")
    write_all(run.tree, {".env": "MODE=two\n", "other.env": "canary-2\n", ".runtimeignore": "other.env\n"})

    refused = run("launch", "--on", "local", "--", "true")
    job = run.finish("true", "--set", "code.secrets=['.env']")

    assert refused.code == 2
    assert refused.err.endswith("by reference; if it belongs in the snapshot, name it in `code.secrets`\n")
    diff = read_diff(job)
    assert "-MODE=one\n+MODE=two\n" in diff
    assert "canary" not in diff
