"""Every block of the README, in order, as a reader would: in an empty folder, with the packages of `locks/base.txt` alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.readme_support import AS_PROMISED, EXAMPLE_ID, README, split_commands

ROOT = README.parent
LIMIT_S = 400

NOT_RUN = {
    "make quickstart ": "`test_quickstart.py` runs the quickstart, and `.ci/run` calls `make test`",
    "What happened, counted": "the quickstart's output, which `test_quickstart.py` reads",
    "pip install . ": "needs a build and the address of a lab's copy",
    "pip install --require-hashes": "makes the environment of this test",
    "make .venv/.ready ": "`tests/infra` runs `check`; the rest needs an account",
}
"""Beginnings of blocks that are not run here, with the reason."""


def read_blocks() -> list[tuple[str, str]]:
    """Return the language and the text of each block."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", README.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make an environment of `locks/base.txt` and this checkout; return its folder of programs."""
    folder = tmp_path_factory.mktemp("base") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", "--require-hashes", "-r", str(ROOT / "locks/base.txt")], check=True)
    [packages] = folder.glob("lib/python3*/site-packages")
    (packages / "checkout.pth").write_text(f"{ROOT}\n")
    program = folder / "bin/runtime"
    program.write_text(
        f"#!{folder}/bin/python\nimport sys\nfrom runtime.cli.main import main\nsys.exit(main(sys.argv[1:]))\n"
    )
    program.chmod(0o755)
    return folder / "bin"


@pytest.mark.slow
def test_readme_works_as_written_with_the_base_packages(base: Path, tmp_path: Path) -> None:
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith("RUNTIME_")},
        "PATH": f"{base}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(tmp_path / "home"),
        "XDG_DATA_HOME": str(tmp_path / "home/data"),
        "XDG_CONFIG_HOME": str(tmp_path / "home/config"),
        "XDG_CACHE_HOME": str(tmp_path / "home/cache"),
    }
    folder, demo = tmp_path / "empty", tmp_path / "empty/demo"
    folder.mkdir()

    def run(script: str, where: Path) -> str:
        done = subprocess.run(
            ["bash", "-ec", script],
            cwd=where,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, (script, done.stdout, done.stderr)
        assert "error" not in done.stderr.lower(), (script, done.stderr)
        return done.stdout

    unknown = []
    for language, text in read_blocks():
        if any(text.startswith(each) for each in NOT_RUN):
            continue
        if text.startswith("runtime init demo"):
            lines = [line.partition("  #")[0].strip() for line in text.splitlines()]
            said = run("".join(f"echo '$ {line}'\n{line}\n" for line in lines), folder)
            shown = said.partition("$ runtime results last\n")[2].partition("$ ")[0].splitlines()
            assert [line.split("\t")[2:4] for line in shown] == [
                [f"train fit --seed={seed}", "succeeded"] for seed in range(10)
            ]
            assert all('"intercept": ' in line for line in shown)
        elif language == "yaml":
            assert (demo / "job.yaml").read_text() == text
        elif language == "toml":
            (demo / "runtime.toml").write_text(text)
            said = run("runtime launch --on local,box,hpc -f job.yaml --dry-run", demo)
            planned = [line.partition("`fit` on ")[2] for line in said.splitlines() if line.startswith("# job ")]
            assert planned == ["local (local)", "box (ssh)", "hpc (slurm)"]
        elif text.startswith("runtime launch "):
            launches, others = split_commands(text)
            job = run(" ".join(launches["local"]), demo).splitlines()[0]
            said = {each[1]: run(" ".join(each).replace(EXAMPLE_ID, job[:10]), demo) for each in others}
            assert "succeeded" in said["status"]
            steps = sorted(line.rpartition(" ")[0] for line in said["logs"].splitlines() if "] step " in line)
            assert tuple(steps) == AS_PROMISED.log
            assert said["explain"].startswith(f"job `{job[:10]}` succeeded")
            assert sorted(each.name for each in (demo / "results").glob("[0-9]")) == ["0", "1", "2"]
        elif text.startswith("# sweep.py"):
            (folder / "sweep.py").write_text(text)
            assert run("python sweep.py", folder) == "[0.1, 0.3]\n"
            assert "loss" in run("runtime results sweep", folder)
            assert run("runtime plot sweep loss", folder)
        else:
            unknown.append(text)
    assert unknown == [], "blocks that this test does not know"
