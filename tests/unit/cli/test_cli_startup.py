"""The modules that the command line loads, and the time it takes, before a command begins."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import runtime
from runtime import __version__
from runtime.cli.commands import COMMANDS, load_command
from tests.shim_support import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable

PACKAGE = Path(runtime.__file__).parent
HEAVY = {
    "beaker", "boto3", "botocore", "google", "jsonargparse", "kubernetes", "obstore", "pulumi", "pydantic", "ray", "rich",
}  # fmt: skip


def run_cli(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "runtime", *args],
        env={**os.environ, "COLUMNS": "100", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def loaded_by(code: str) -> set[str]:
    """Return every module that `code` imports, in a separate interpreter."""
    script = f"import sys, json\n{code}\nsys.stderr.write(json.dumps(list(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    return set(json.loads(done.stderr))


def in_folder(folder: Path, *args: str) -> str:
    """Return code that runs a command in that interpreter, with its own data folder."""
    return f"""
import contextlib, io, os
os.chdir({str(folder)!r})
os.environ.update(RUNTIME_DATA_DIR={str(folder)!r}, XDG_CACHE_HOME={str(folder)!r}, XDG_CONFIG_HOME={str(folder)!r})
from runtime.cli.main import main
with contextlib.redirect_stderr(io.StringIO()):
    assert main({list(args)!r}) == 0
"""


def heavy_of(modules: set[str]) -> set[str]:
    return {module.partition(".")[0] for module in modules} & HEAVY


def test_import_loads_no_cloud_library() -> None:
    assert heavy_of(loaded_by("import runtime, runtime.cli.main, runtime.cli.commands, runtime.cli.output")) == set()


def test_heavy_import_is_noticed() -> None:
    assert heavy_of(loaded_by("import rich.text")) == {"rich"}


def test_help_loads_no_command_and_no_cloud_library() -> None:
    modules = loaded_by("from runtime.cli.main import main\nassert main(['--help']) == 0")

    assert heavy_of(modules) == set()
    assert modules & {module for module, _ in COMMANDS.values()} == set()


def test_status_of_an_empty_folder_loads_no_openssl(tmp_path: Path) -> None:
    modules = loaded_by(in_folder(tmp_path, "status"))

    assert modules & {"_hashlib", "hashlib", "yaml", "runtime.jobs.spec"} == set()


def test_launch_on_slurm_loads_no_other_launcher(tmp_path: Path) -> None:
    (tmp_path / "runtime.toml").write_text("[targets.hpc]\nkind = 'slurm'\nrecords = '/scratch/runtime'\n")
    modules = loaded_by(in_folder(tmp_path, "launch", "--on", "hpc", "--code", "none", "--dry-run", "true"))

    launchers = {module for module in modules if module.startswith("runtime.launchers.")}
    assert "runtime.launchers.slurm.launcher" in launchers
    assert launchers & {f"runtime.launchers.{name}" for name in ("interrupting", "processes", "local", "ssh")} == set()
    assert (
        modules & {"asyncio", "concurrent.futures", "importlib.metadata", "runtime.tasks.model", "sqlite3", "yaml"}
        == set()
    )


def test_command_is_built_of_annotations_that_were_evaluated_before() -> None:
    from runtime.cli.launch import launch

    load_command("launch")

    assert [name for name, kind in launch.__annotations__.items() if isinstance(kind, str)] == []


def test_version_loads_no_typer() -> None:
    modules = loaded_by("from runtime.cli.main import main\nassert main(['--version']) == 0")

    assert modules & {"typer", "argparse"} == set()


def test_worker_is_dispatched_without_typer() -> None:
    stand_in = "import types; worker = types.ModuleType('worker'); worker.main = lambda argv: len(argv)"
    register = "sys.modules['runtime.cli.worker'] = worker"
    modules = loaded_by(
        f"{stand_in}; {register}\nfrom runtime.cli.main import main\nassert main(['worker', '--slots', '2']) == 2"
    )

    assert "typer" not in modules


def test_worker_that_runs_here_loads_nothing_of_fleets(tmp_path: Path) -> None:
    modules = loaded_by(in_folder(tmp_path, "worker", "--once", "--idle-timeout", "0s"))

    assert modules & {"typer", "runtime.cli.worker_fleet", "runtime.cli.launch", "runtime.jobs.spec"} == set()


def test_version_is_printed() -> None:
    done = run_cli("--version")

    assert (done.returncode, done.stdout, done.stderr) == (0, f"runtime {__version__}\n", "")


ENDING = """
import atexit, sys, threading, time
from runtime.cli import main as entry
def work(args):
    atexit.register(print, "exit function")
    print("command")
    threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
    return 3
entry._dispatch = work
sys.exit(entry.main())
"""


def test_command_ends_after_its_threads_and_exit_functions_with_its_code() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )

    assert (done.returncode, done.stderr) == (3, "")
    assert done.stdout.splitlines() == ["command", "thread", "exit function"]


CARELESS = """
def write(path: str) -> None:
    global file
    file = open(path, "w")
    file.write("all of it")

workflows = {"write": write}
"""


def test_file_that_a_workflow_leaves_open_is_written(tmp_path: Path) -> None:
    (tmp_path / "careless.py").write_text(CARELESS)

    done = run_cli("run", "careless", "write", f"--path={tmp_path}/out.txt", PYTHONPATH=f"{tmp_path}:{PACKAGE.parent}")

    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "out.txt").read_text() == "all of it"


def test_help_reads_as_reviewed(golden: Callable[[str, str], None]) -> None:
    done = run_cli("--help")

    assert (done.returncode, done.stderr) == (0, "")
    golden("cli/help.txt", done.stdout)


HELPS = """
import os, sys, typer
from runtime.cli.main import main
failed = []
for name in sys.argv[1:]:
    if not (child := os.fork()):
        sys.exit(main([name, "--help"]))
    if os.waitpid(child, 0)[1]:
        failed.append(name)
print(*failed, file=sys.stderr)
"""
"""Asks for the help of each command in a copy of a process that has loaded none."""


def test_each_command_loads_and_has_a_help() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HELPS, *COMMANDS], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )

    assert [load_command(name).name for name in COMMANDS] == list(COMMANDS)
    assert done.stderr == "\n"
    assert [name for name in COMMANDS if f"usage: runtime {name} " not in done.stdout.lower()] == []


def test_no_command_prints_help() -> None:
    assert run_cli().stdout == run_cli("--help").stdout


def test_completion_offers_commands_and_options() -> None:
    commands = run_cli(_RUNTIME_COMPLETE="complete_bash", COMP_WORDS="runtime sta", COMP_CWORD="1")
    options = run_cli(_RUNTIME_COMPLETE="complete_bash", COMP_WORDS="runtime completion --h", COMP_CWORD="2")

    assert commands.stdout.split() == ["status", "stack"]
    assert options.stdout.split() == ["--help"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script_calls_us_back(shell: str) -> None:
    done = run_cli("completion", shell)

    assert done.returncode == 0
    assert f"_RUNTIME_COMPLETE=complete_{shell}" in done.stdout
