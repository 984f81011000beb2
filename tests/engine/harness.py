"""Drives the `pulumi` command on a copy of the project, against the plug-ins of this folder.

`stack init` rewrites stack files and drops their comments, so nothing here works on the repository itself; only the
program's code is the repository's own. A `Lab` has its own engine home, state and simulated Google.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.components.late import PATIENCE_VARIABLE
from tests.engine.google_store import FOLDER_VARIABLE, Cloud
from tests.services_support import wait_until

ROOT = Path(__file__).parents[2]
PLUGINS = Path(__file__).parent / "plugins"
PROJECT = "research-runtime"
PACK = ("--policy-pack", str(ROOT / "infra" / "policy" / "pack"))
"""Arguments that the pipelines pass to `preview` and `up`."""
PATIENCE_S = 600

REQUIRE_VARIABLE = "RUNTIME_REQUIRE_ENGINE"
INSTALL = "https://www.pulumi.com/docs/install/"
NEEDED = ("pulumi", "pulumi-language-python", "pulumi-language-python-exec")


def require_engine(path: str | None) -> str:
    """Return the folder of the engine; skip with a one-line reason if it is not on `path`."""
    missing = [name for name in NEEDED if shutil.which(name, path=path) is None]
    if missing:
        pytest.skip(f"no `{missing[0]}` on PATH; how to get it: {INSTALL}")
    return str(Path(shutil.which("pulumi", path=path) or "").parent)


@dataclass(frozen=True, slots=True)
class Said:
    """The result of a command."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        return self.out + self.err

    def json(self) -> Any:
        return json.loads(self.out)


@dataclass(frozen=True, slots=True)
class Step:
    """A change that the engine would make to one resource."""

    op: str
    urn: str
    paths: tuple[str, ...] = ()
    """Inputs that differ."""

    @property
    def name(self) -> str:
        return self.urn.rpartition("::")[2]

    @property
    def type(self) -> str:
        return self.urn.split("::")[2].rpartition("$")[2]


class Lab:
    """A copy of the project with its own engine home, state and cloud."""

    def __init__(self, folder: Path, engine: str, *, virtualenv: bool = True) -> None:
        self.folder, self.project = folder, folder / "project"
        self.cloud = Cloud(folder / "google")
        self.environment = {
            **_outside(),
            "PATH": os.pathsep.join((str(PLUGINS), engine, os.environ.get("PATH", ""))),
            "PULUMI_HOME": str(folder / "home"),
            # Without the file of attributes beside each, which an engine that is killed may leave half written: then no
            # command reads the stack. The state itself is renamed into place, as a bucket would do it.
            "PULUMI_BACKEND_URL": f"file://{folder / 'state'}?metadata=skip",
            "PULUMI_CONFIG_PASSPHRASE": "only for tests",
            "PULUMI_SKIP_UPDATE_CHECK": "true",
            "PULUMI_DISABLE_AUTOMATIC_PLUGIN_ACQUISITION": "true",
            "PLUGIN_PYTHON": sys.executable,
            # Each wait for what Google makes known late is a thousandth of the real one; the number of tries is the same.
            PATIENCE_VARIABLE: "0.6",
            FOLDER_VARIABLE: str(self.cloud.folder),
        }
        (folder / "state").mkdir(parents=True)
        self.project.mkdir()
        shutil.copy(ROOT / "Pulumi.yaml", self.project)
        for name in ("infra", "runtime"):
            (self.project / name).symlink_to(ROOT / name)
        if virtualenv:
            (self.project / ".venv").symlink_to(sys.prefix)

    # stacks

    def init(self, stack: str, *, file: str | None = None) -> None:
        """Create the stack with the settings of `Pulumi.<file>.yaml`, by default the file of the same name."""
        target = self.project / f"Pulumi.{stack}.yaml"
        shutil.copy(ROOT / f"Pulumi.{file or stack}.yaml", target)
        settings = yaml.safe_load(target.read_text())
        self.run("stack", "init", stack, "--no-select")
        rewritten = yaml.safe_load(target.read_text())
        assert _as_text(rewritten["config"]) == _as_text(settings["config"]), "`stack init` changed a setting"

    def set(self, stack: str, path: str, value: Any) -> None:
        """Set `queues.default.ack_deadline_s` in the stack's file; None removes it."""
        file = self.project / f"Pulumi.{stack}.yaml"
        settings = yaml.safe_load(file.read_text())
        first, *rest = path.split(".")
        keys = [f"{PROJECT}:{first}", *rest]
        place = settings["config"]
        for key in keys[:-1]:
            place = place.setdefault(key, {})
        if value is None:
            place.pop(keys[-1])
        else:
            place[keys[-1]] = value
        file.write_text(yaml.safe_dump(settings))

    def setting(self, stack: str, key: str) -> Any:
        settings = yaml.safe_load((self.project / f"Pulumi.{stack}.yaml").read_text())["config"]
        return settings.get(f"{PROJECT}:{key}")

    # commands

    def run(self, *args: str, check: bool = True, cwd: Path | None = None, **environment: str | None) -> Said:
        """Run `pulumi ARGS` in the project's folder; with `check`, a failure raises AssertionError with the output."""
        done = subprocess.run(
            ["pulumi", *args, "--non-interactive", "--color=never"],
            cwd=cwd or self.project,
            env=_merged(self.environment, environment),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        said = Said(done.returncode, done.stdout, done.stderr)
        assert not check or said.code == 0, f"pulumi {' '.join(args)} ended with {said.code}:\n{said.text}"
        return said

    def up(self, stack: str, *args: str, check: bool = True) -> Said:
        return self.run("up", "--yes", "--skip-preview", "--stack", stack, *args, check=check)

    def preview(self, stack: str, *args: str) -> list[Step]:
        """Return the changes that an `up` would make, in the engine's order; fail if the preview fails."""
        return self.steps(self.run("preview", "--json", "--stack", stack, *args))

    def steps(self, said: Said) -> list[Step]:
        """Parse the steps from the output of `preview --json`."""
        return _steps(said.json())

    def expect_no_changes(self, stack: str, *args: str) -> None:
        self.run("preview", "--expect-no-changes", "--diff", "--stack", stack, *args)

    def refresh(self, stack: str) -> Said:
        return self.run("refresh", "--yes", "--skip-preview", "--stack", stack)

    def destroy(self, stack: str, *args: str, check: bool = True) -> Said:
        """Destroy with a preview: without it, the engine deletes unprotected resources before it refuses the others."""
        return self.run("destroy", "--yes", "--stack", stack, *args, check=check)

    def take_over(self, stack: str, ids: Mapping[str, str]) -> None:
        """Import existing resources, by logical name, as docs/operations.md describes."""
        file = self.folder / "import.json"
        self.run("preview", "--stack", stack, "--import-file", str(file))
        entries = json.loads(file.read_text())
        parents = [
            each
            for each in entries["resources"]
            if each.get("component") or each["type"].startswith("pulumi:providers:")
        ]
        found = [each | {"id": ids[each["name"]]} for each in entries["resources"] if each["name"] in ids]
        assert len(found) == len(ids), f"the preview would not make {ids.keys()}"
        file.write_text(json.dumps(entries | {"resources": [*parents, *found]}))
        self.run("import", "--yes", "--skip-preview", "--stack", stack, "--file", str(file), "--generate-code=false")

    def start(self, *args: str) -> subprocess.Popen[str]:
        """Start `pulumi ARGS` in its own process group, for `kill` to end."""
        return subprocess.Popen(
            ["pulumi", *args, "--non-interactive", "--color=never"],
            cwd=self.project,
            env=self.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )

    def kill(self, process: subprocess.Popen[str]) -> None:
        """Kill the engine and all its children at once, as a machine failure would."""
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def wait_for_call(self, operation: str) -> None:
        assert wait_until(lambda: bool(self.cloud.calls(operation))), f"no {operation} was called"

    # state

    def resources(self, stack: str) -> dict[str, dict[str, Any]]:
        """Return URN → resource from the engine's state."""
        deployment = self.export(stack)["deployment"]
        return {each["urn"]: each for each in deployment.get("resources", [])}

    def export(self, stack: str) -> dict[str, Any]:
        exported: dict[str, Any] = self.run("stack", "export", "--stack", stack).json()
        return exported

    def contract(self, stack: str) -> dict[str, Any]:
        found: dict[str, Any] = self.run("stack", "output", "contract", "--json", "--stack", stack).json()
        return found

    def runtime(self, *args: str, cwd: Path | None = None, check: bool = True, **environment: str | None) -> Said:
        """Run `runtime ARGS` in the project's folder, with its own cache and settings folders."""
        home = self.folder / "user"
        own = {f"XDG_{kind}_HOME": str(home / kind.lower()) for kind in ("DATA", "CACHE", "CONFIG")}
        done = subprocess.run(
            [sys.executable, "-m", "runtime", *args],
            cwd=cwd or self.project,
            env=_merged({**self.environment, **own}, environment),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        said = Said(done.returncode, done.stdout, done.stderr)
        assert not check or said.code == 0, f"runtime {' '.join(args)} ended with {said.code}:\n{said.text}"
        return said


def _as_text(config: Mapping[str, Any]) -> dict[str, Any]:
    """Convert booleans to text, as the engine writes them back."""
    return {key: str(value).lower() if isinstance(value, bool) else value for key, value in config.items()}


def _outside() -> dict[str, str]:
    """Return the environment without variables that would redirect the engine, the SDK or the program."""
    foreign = ("PULUMI_", "GOOGLE_", "CLOUDSDK_", "GCLOUD_", "KUBE", "PYTHON", "PUBSUB_", "RUNTIME_")
    return {name: value for name, value in os.environ.items() if not name.startswith(foreign)}


def _merged(environment: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    merged: dict[str, str | None] = {**environment, **changes}
    return {name: value for name, value in merged.items() if value is not None}


def _steps(preview: Mapping[str, Any]) -> list[Step]:
    quiet = ("same", "refresh")
    changing: Sequence[Mapping[str, Any]] = [each for each in preview["steps"] if each["op"] not in quiet]
    return [Step(each["op"], each["urn"], tuple(sorted(each.get("detailedDiff") or ()))) for each in changing]
